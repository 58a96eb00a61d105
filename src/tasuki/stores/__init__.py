"""Stores: the data that must survive. `store.py` is the contract, every back end keeps it, `batching.py` commits in groups.

A server sends a `Turn` to `batching.StoreThread`, which executes its verbs on one `Store` in one transaction and returns the
answers; after an interruption the whole turn is tried again. May import `tasuki.core`, `tasuki.errors`, `tasuki.clocks` and
`tasuki.config`; `sql` alone also imports Django and `tasuki.django`, and is itself imported only where the store is SQL. The
servers, the commands and `tasuki.testing` import this folder.

    store      the contract: a few dozen batch-first verbs
    batching   group commit on the store's thread
    common     rules that all back ends share
    firing     the verb that makes runs of definitions and events, for all back ends that have them
    wakeups    hints between servers that share a store
    memory/    in dictionaries: the model for tests and the simulator
    sql/       SQLite and PostgreSQL
    redis/     Redis, with all verbs in Lua
"""
