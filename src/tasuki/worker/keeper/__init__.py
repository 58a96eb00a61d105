"""The keeper: a small process beside each worker that starts its jobs, and ends them whatever happens to the worker.

    client.py      the worker's end: forks the keeper, sends orders, receives reports
    protocol.py    orders and reports, and their frames
    keeper.py      the keeper's loop: phases and deadlines of all jobs
    plain.py       process groups: starting and ending jobs on any POSIX system
    linux.py       the same on Linux: whole trees of processes; and the sweep after a dead keeper
    cgroup.py      cgroup v2: limits, and a kill that reaches everything
    preforked.py   warm interpreters for execs of kind python, each running `worker/preforked.py`

An order goes client → frame → keeper → system; an end comes back as a report. Imported by `worker` and `agent`; imports
`errors`, `clocks`, `worker.linux_calls` and `worker.preforked`, nothing else of the worker.
"""
