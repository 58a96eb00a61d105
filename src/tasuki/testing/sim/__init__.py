"""A whole system in one thread: the production machines of servers, workers and clients on one heap of events that owns time,
network, processes, clocks, store and disks. The same seed gives the same run, to the last event.

`run.run_seed(seed)` runs one; `history.py` is what an observer hears, `checker.py` what must hold of it. Where to look:

    options.py   what a seed leaves open, and what it draws         faults.py     what is done to the system, and when
    world.py     time, chance, the trace                             load.py       what clients ask for, and when
    process.py   a process: its life, its clocks, its pauses         network.py    connections
    servers.py   broker, election, hints (company.py)                storage.py    the store behind its faults (recorder.py)
    workers.py   attempts, keeper, disk                              clients.py    calls and what they came to
    system.py    all of them together                                run.py        one seed, from its start to the verdict

    cases.py     a run that can be kept and tried                    shrink.py     the least of it that fails alike
    story.py     a run told to people                                many.py       thousands of seeds (crew.py)
    ablations.py what each safeguard is good for (seams.py)          coverage.py   what of the rare came (probes.py)

No transition, lease or retry rule stands here: those of `core/` and `stores/` run.
"""
