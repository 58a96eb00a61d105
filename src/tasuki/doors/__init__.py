"""The doors of a server: thin drivers between a transport and the server.

    tcp         TCP, TLS and unix sockets
    http/       HTTP: apps, the general client API, the wire protocol in requests, blobs, monitoring
    grpc/       orders of the leader to the nodes of a Django project
    guest       a server inside a process that uses a store itself, on a private socket
    listening   addresses, sockets and certificates of listeners; shared with node agents and dispatchers

A door accepts connections, authenticates, limits and translates; decisions are made in `tasuki.core`. Only `cli` and `django`
(and for HTTP parts `agent` and `dispatcher`) import doors. May import `tasuki.wire`, `tasuki.net`, `tasuki.server`, and what all
may import (`core`, `errors`, `config`).
"""
