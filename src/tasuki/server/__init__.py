"""The server: one process that connects doors, broker, store, blobs and the cluster, and keeps no state of its own.

May import `stores`, `coords`, `blobs` and what all may import; doors, agents and dispatchers import it. A door passes messages to
`Server`, the broker decides, the store commits a turn, and the answers leave by the door.

    server.py      the event loop's part: turns, answers, limits          cluster.py     membership among servers on one store
    queries.py     slow reads on threads of their own                     transfers.py   blobs in and out, and presigned URLs
    assembly.py    a server from its parts; `StoreClient` for others      archive.py     the file format of a backup
    backup.py      makes, checks and restores a backup                    refusal_log.py one bounded line for each refusal
    roles.py       leader, sub-leader and worker among Django nodes
    upload_shares.py   the share of the disk that one uploader may fill
    statistics.py  counts by group, for rollups and metrics               message_delivery.py   published messages to subscribers
"""
