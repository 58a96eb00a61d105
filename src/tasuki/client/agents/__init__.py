"""Client of node agents and dispatchers, without a server, with failover between them.

Imported by `cli` and `dispatcher` (which uses `node.py` and `transfer.py`); users import the clients from `tasuki`. `client.py`
starts a run, `run.py` applies events to the plan of `core/failover` and executes its commands by `node.py`, which uses
`transfer.py`.

    client.py    AsyncAgentsClient, AgentsClient, the file of breakers    run.py       run of one job
    node.py      HTTP API of one node                                     transfer.py  requests, stored inputs, results
    jobs.py      jobs that there are, as commands for a server's jobs see them
"""
