"""The store in an SQL database, through Django: SQLite for one server, PostgreSQL for several. Imported only where it is used.

A verb of `SqlStore` enters the store's one `Transaction` and calls its function, which reads and writes by the named statements
of the vendor (`statements/`); the outermost verb or turn writes counters and incidents, and commits.

    store              `SqlStore`: opening, the list of verbs, the verbs that only read
    submit             submit, cancel, requeue
    lease              lease, assign, held; the index of ready jobs
    report             start, renew, release, finish, fail; the end of an attempt
    leader             take over, reap, skip, promote, prune, archive logs
    fire               definitions, events, and the leader's notes on them
    blobs              places of bytes, and their collection
    rows               conversion between rows and structs
    database           the interface between verbs and vendors, named statements, the transaction that verbs share
    sqlite             SQLite: file, settings, statements, errors
    sqlite_backup      backup and restore of a SQLite file
    postgres           PostgreSQL: opening, transactions, reconnecting, hints
    postgres_ready     its ready jobs without the entries of leased ones, which an old snapshot keeps
    postgres_wakeups   hints between servers, by LISTEN and NOTIFY
    postgres_session   one PostgreSQL connection: statements, parameters, errors
"""
