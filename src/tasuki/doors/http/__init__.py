"""The HTTP door: FastAPI on uvicorn, inside the server's own event loop.

Theory of operation. There is no second set of rules here: a request becomes what a TCP peer would have said. The door holds
*virtual connections* to the server (`talk.py`): one per token for those who submit and ask (`clients.py`), one per worker_id for
those who run jobs (`workers.py`). A waiting lease request is credit; a renewal is a heartbeat; a result is a report, answered
when the store has recorded it. `routes.py` is the one table of what there is: each line says which kinds of token may come in.

    door.py      listens, builds the application, ends it in order
    gate.py      who is it, and may a token of this kind use this route? Asked of the store for every request
    bearer.py    the token that a request brings
    limits.py    bodies, headers, time, how many at once; JSON in
    answers.py   JSON out, errors as {"error": {"code", "message", "details"}}
    routes.py    the table; openapi.py makes the document of it
    calc.py      /calc/{app}/jobs: the jobs of an app            compute.py   /calc/{app}/compute: its workers
    v1.py        /v1: the general client API                     health.py    /healthz, /readyz
    metrics.py   /metrics                                        job_metrics.py  what turns did to jobs, counted
    bodies.py    what requests bring                             shortcut.py  from uvicorn to an endpoint, past the framework
    frames.py    /v1/frames: our own clients' messages           blobs.py     /v1/blobs: large files, streamed
    enrolment.py /v1/workers: a worker's own token

Only `door.py` is imported from outside. Nothing here knows which store is behind the server.
"""
