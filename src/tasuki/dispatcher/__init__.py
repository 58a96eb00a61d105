"""The dispatcher: a thin process before the node agents, which decides where a job goes. Any number of them, without state.

Theory of operation. All that a dispatcher knows it has just asked the agents: their capacity (one poller, whatever the number of
requests, quicker while there are some), and before each run whether one of them knows the id. So it may be killed at any moment,
and another one answers the same. In redirect mode it names the node (307, which keeps POST and body); in proxy mode it passes
request and result through, as streams. With a store of inputs (--inputs) an upload is kept there first: then the death of a node
costs no second upload, because the next node gets it from the store; and a client may PUT its input once and run it by its hash.

    app.py       routes, errors, the life of the listener        company.py   the agents: looked at, asked, ranked
    dispatch.py  one job: node after node, until one answers     parcels.py   what is sent to a node, streamed or from the store
    passing.py   a node's answer on its way to the client        inputs.py    the store of inputs: PUT, GET, HEAD
    spool.py     an upload on its way into the store             settings.py  what a dispatcher is told at its start
    metrics.py   /metrics
"""
