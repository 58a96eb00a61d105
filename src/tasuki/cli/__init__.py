"""The `tasuki` command, for people and, with `--json`, for programs.

This folder is the top layer: it may import everything (of `tasuki.testing` only the simulator); only `tasuki.__main__` imports
it. `main` finds the word in `command.COMMANDS` and imports its module; the command gets its options and an `Output`, builds the
configuration of its role once, connects or serves, and returns an exit code. Django, the stores, FastAPI and httpx are
imported inside the functions that need them, so that commands begin at once.

    main            the root command, which loads the others lazily
    command         the table of words, shared options, the frame around every command
    output          answers, hints, errors, exit codes
    connect         from --to and --data to a client; a guest server for addresses of stores
    process         logs, events, signals and the event loop of long-running commands
    jobspec         options and fields of jobs, for run
    run             run, submit; arrays
    jobs            status, list, cancel, explain, retry, dead
    cache           files of caches
    messages        pub, sub, request
    result          result, logs
    agents          jobs on node agents, nodes
    cluster         servers, workers, stats, detach, attach, token
    server, up      server processes, with local workers
    worker          worker processes; worker_login, worker_service are its parts
    agent           node agents, dispatchers and their registry
    store           backup, restore, compact, migrate, duties
    top             the overview in a terminal
    completion, dev_cert, doctor, demo, sim     the commands of these names
"""
