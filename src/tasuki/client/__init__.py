"""The client library: one asynchronous implementation and a thin blocking one, with failover between servers.

    aio        AsyncClient: submits jobs, asks about them, moves files
    sync       Client and JobHandle: the blocking form, in a thread of its own
    types      AsyncJobHandle, answers of the server, the result of a command, checks of arguments
    caches     puts files into caches, and asks until the workers have them
    logs       reads the output of a command while it runs and after its end
    embedded   starts a server for a data folder that has none
    agents/    AgentsClient: runs commands at node agents, without a server

A call becomes an event of `core.client_machine`, whose commands are sent over a link of `net`; answers settle futures and
handles. May import `tasuki.wire`, `tasuki.net`, `tasuki.blobs`, `tasuki.stores` (to submit straight to a store), and what all may
import (`core`, `errors`, `config`). Importing it never imports Django.
"""
