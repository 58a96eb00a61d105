"""Dispatcher: a thin process before the node agents, which decides where a job goes. Any number of them, without state.

May import `agent`, `client`, `doors`, `server`, `blobs`, `net`, `wire` and `core`. Imported by `cli` only.

Data flow. A dispatcher asks the agents for everything it knows: their capacity (one poller, more often while there are requests),
and before each run whether one of them has the id. So it may be killed at any moment, and another one answers the same. In
redirect mode it names the node (307, which keeps method and body); in proxy mode it forwards request and result as streams. With
a store of inputs (--inputs) an upload is stored first: the death of a node then costs no second upload, as the next node gets the
input from the store; and a client may PUT its input once and run it by its hash.

    app.py       routes and life of the process                  node_pool.py  the agents: checked, asked, ranked
    dispatch.py  one job: node after node; abandoned runs        proxying.py   request bodies and responses, as streams
    inputs.py    store of inputs: PUT, GET, HEAD, retention      registry.py   the registry of the agents, if there is one
    settings.py  settings                                        metrics.py    /metrics
"""
