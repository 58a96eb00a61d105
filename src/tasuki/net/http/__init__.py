"""HTTP clients. httpx is slow to import, so modules here are imported only where an address is http or https.

transport.py        requests to one address, their errors, and the form that starts a run at an agent
early_response.py   stops sending a body once its response comes
base_link.py        base of both links: frames in the bodies of requests and responses
client_link.py      a client's link: independent requests, and long polls for the ends of jobs
event_streams.py    a client's subscriptions: streams of server-sent events
worker_link.py      a worker's link: a session with one poll and one request at a time
blobs.py            blobs through the server in resumable pieces, or by presigned URLs
"""
