"""The HTTP door: FastAPI on uvicorn, inside the server's own event loop.

Theory of operation. The door has no rules of its own: a request becomes the messages that a TCP peer would have sent. It holds
*virtual connections* to the server: one per token for clients, one per worker_id for the workers of apps, one per session for
workers that speak the wire protocol. A waiting lease request is credit; a renewal is a heartbeat; a result is a report, answered
when the store has recorded it.

    door                 listens; authenticates, limits and answers each request
    routes, openapi      the table of all routes; the OpenAPI document made from it
    app_jobs             /calc/{app}/jobs: the jobs of an app
    payload_checks       JSON Schemas of apps, in a process of their own
    app_workers          /calc/{app}/compute: the workers of an app; /v1/workers
    v1                   /v1: the general client API; /healthz, /readyz, /metrics
    messages             /v1/messages: publish, and subscribe as server-sent events
    frames               /v1/frames and /v1/worker: the wire protocol of clients and workers
    blobs                /v1/blobs: large files, streamed or with presigned URLs
    context              authentication; one request and the state that all requests share
    virtual_connection   connections to the server: one per token, one per transfer
    workers              connections of the workers of apps
    worker_sessions      connections of workers that speak the wire protocol
    metrics              counters for Prometheus
    exchange             limits, JSON, errors; shared with node agents and dispatchers
    uvicorn_server       uvicorn with limits; shared with node agents and dispatchers

Handlers import `context`, which imports the connections; `exchange` and `uvicorn_server` import no server. Nothing here depends
on the kind of store.
"""
