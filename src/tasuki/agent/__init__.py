"""The node agent: one process on one machine that runs programs for whoever sends it files. No server, no store.

Theory of operation. The folder of a job is the truth (`folders.py`): a job is what its markers say, and every marker appears
whole or not at all. An upload is received beside the jobs; when it is whole and good, its folder, with `.running` in it, takes
its place among them by one rename. So no folder there is ever without a marker, whenever the process dies. The programs run on
the executor that workers use (`worker/runner.py`), with its keeper; a client that leaves changes nothing for them.

    app.py        routes, errors, the life of the listener       desk.py      which id is where: slots, repeats, running, ending
    multipart.py  RFC 7578, strict, without I/O                  intake.py    an upload on its way to disk
    downloads.py  results on their way out, with ranges          folders.py   job folders and their markers
    cleaning.py   what is old goes, every day                    settings.py  what an agent is told at its start
    answers.py    an agent's own refusals                        metrics.py   /metrics
    registry.py   the seam to what several agents share          correlation.py  job_id in every line of the log
    held.py       a job that has a slot, and how one ends        pulls.py     stored inputs, which an agent fetches itself
    answering.py  how every request ends                         syncing.py   makes the ends of many jobs durable at once
    spares.py     folders for the next job                       records.py   the registry, as agents and dispatchers ask it
    shared.py     an agent's part in it, in a store of tasuki's: leases.py renews, claim_notes.py outlives a kill,
                  elsewhere.py fetches
"""
