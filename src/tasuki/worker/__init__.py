"""The worker: leases jobs from a server or a store, runs them, and reports their ends.

    worker.py              `Worker`: drives the machine of `core/worker` over a connection; starts, stops and ends attempts
    attempt.py             the types of one attempt, the handlers, its log, and how its end becomes an `Outcome`
    runner.py              runs a command: folder, inputs, process, result
    execs.py, commands.py  the allowed programs; the exact command of one attempt, with its secrets
    folder.py, logs.py     run folders; stdout, stderr and progress of a running job
    redaction.py           secrets masked in output
    results.py             the result archive, and the output files in it
    outbox.py              ended attempts until a server has answered them, on disk too
    transfers.py           downloads of inputs, uploads of results
    cache.py               files of caches: kept by their hash, linked into run folders
    function_processes.py  the child processes of plain functions
    local_workers.py       the worker processes of `tasuki up`
    keeper/                the process that starts and ends commands; `preforked.py` is its warm interpreter
    credentials.py         the worker's identity and tokens on disk, and their rotation
    status.py              the status file for `tasuki worker status`
    linux_calls.py         system calls and /proc

A granted attempt goes worker → runner → keeper; its end goes keeper → runner → results → worker → outbox → server.
May import `wire`, `net`, `blobs`, `stores` (to lease straight from a store), and what all may import (`core`, `errors`, `config`,
`clocks`). Importing it never imports Django.
"""
