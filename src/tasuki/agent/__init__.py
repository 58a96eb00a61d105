"""Node agent: one process on one machine that runs programs for clients who send it files. No server, no store.

May import `worker` (the executor and its keeper), `doors` (HTTP), `server` (the client of a store, for a registry), `blobs`,
`net`, `wire` and `core`. Imported by `dispatcher`, which shares its refusals, uploads and registry, and by `cli`.

Data flow. The folder of a job is the truth: its state is what its markers say, and a marker is written completely or not at all.
An upload is received beside the jobs; when it is complete and valid, its folder, with `.running` in it, is renamed into `jobs`.
So every folder there has a marker, whenever the process dies. The executor runs the program; a client that leaves changes
nothing. The end is written and synced, then the result is sent.

    app.py               routes, retention, life of the process     jobs.py              slots, repeats, running, ending; metrics
    upload.py            forms (RFC 7578) and their files           folders.py           job folders and markers; batched fsync
    results.py           responses with results                     refusals.py          refusals, guarded server, log context
    settings.py          settings and tokens                        input_sources.py     stored inputs that an agent fetches
    registry_queries.py  questions to the registry, and leases      store_registry.py    registry shared by agents, in a store
"""
