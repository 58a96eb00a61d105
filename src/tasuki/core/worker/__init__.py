"""The worker's state machine: leases, slots, renewals and reports of one worker process. Pure.

    events.py     what can happen to the machine, and what it asks its driver to do
    machine.py    `WorkerMachine`: events in, commands out; and its records of leases, slots and progress

`worker/worker.py` drives it over a real connection, `testing/sim` over a simulated one. May import `core` and `errors`.
"""
