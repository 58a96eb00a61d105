"""The domain, pure: jobs, leases, subjects, and the machines that decide for server, worker, client and failover.

Modules here are data and functions of data. A machine is `apply(event, now) -> commands`: its driver (in `server/`, `worker/`,
`client/` or `testing/`) brings events in, carries commands out, and passes in time and random numbers. No await, clock, random
number or I/O. Every part may import `core`; `core` imports `tasuki.errors` and nothing else of tasuki.

    job, lifecycle, subject, access          the data with its ids and checks, the table of transitions, routing, access rules
    protocol, store_messages                 messages between peers; messages between machines and a store
    broker/, worker/, client_machine         the machines of server, worker and client
    failover/                                one job over several node agents
    scheduler/                               nominal times of definitions, and the runs that are due
    election, cluster_messages               the leader's election; messages between servers that share a store
    subscribers                              receivers of published messages, here and at other servers
    shares, statistics                       counts per owner with a limit; counts by group and minute
    machine                                  the clock values and commands that machines have in common
    message_requests                         messages of the clients and workers of one process
    pauses, routing                          subjects whose jobs do not start; policies that choose a worker
    decoding                                 types that several threads may decode
    units                                    durations, sizes and times as people write and read them
    explain, reconnect, backoff              reasons for a job's state; when and where to connect again
    address, ranges, presigned, apps         addresses; HTTP ranges; answers about presigned URLs; jobs of apps
"""
