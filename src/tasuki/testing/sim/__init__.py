"""The simulator: production machines of servers, workers and clients on one heap of events that owns time, network, processes,
clocks, store and disks, in one thread. The same seed gives the same run, to the last event.

`run.check_seed(seed)` draws options and a plan (operations of clients, faults), builds a `System`, and runs it; each event
becomes a line of the history, which the checker judges. May import everything below `tasuki.cli`; only `tasuki sim` and tests
import it.

    world        options, time, randomness, processes     faults       kinds of fault, and when they happen
    network      connections between processes            nodes        clients, workers and servers without time or faults
    servers      broker, election, hints, the store behind its faults
    workers      attempts, keeper, disk                   clients      operations, calls and their answers
    roles        sub-leaders, and workers that ask whether they may go on
    project      definitions and events of applications   system       all processes together
    run          one seed, from its start to the verdict
    history      lines that an observer hears             recorder     lines of a committed turn
    checker      judges of the invariants                 checker_store   findings, and judges of the store's commits

    cases        a run that can be kept, tried, made smaller and told
    seed_runner  thousands of seeds on several processes
    coverage     rare events that must have happened
    ablations    safeguards taken away, to show that the checker notices (ablations_store: those of the stores,
                 ablations_schedule: those of definitions and of runs that are assigned ahead)
    agents       node agents and a client of them, in a world of their own

No transition, lease or retry rule is written here: those of `core/` and `stores/` run.
"""
