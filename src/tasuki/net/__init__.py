"""Asyncio connections that clients, workers and doors share. Imports `wire` and what all may import, no store and no server.

Messages of a state machine go through `ServerConnection` to a link, which sends frames; received frames come back as events.

    server_connection.py   the `Link` protocol, and the connection that a client or worker has at a time
    tcp_link.py            a link over TCP or a Unix socket          http/          links, blobs and requests over HTTP
    blob_transfer.py       blobs over the current link, resumed      streams.py     files as sources and sinks of transfers
    tls.py                 contexts, certificates, messages          enrol.py       a worker gets its token
    dev_certificates.py    a CA for development

docs/decisions/0007 tells why this is a part of its own.
"""
