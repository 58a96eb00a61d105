"""Asks for 7 squared, twice. `python examples/square_client.py [tcp://host:7000]`; square_worker.py must run.

The job_id is ours. The second submit has the same id and the same body, so it is the same job: its stored result comes back
and nothing runs. With another body it would be refused as a Conflict.
"""

import sys

from tasuki import Client, TasukiError

with Client(sys.argv[1] if len(sys.argv) > 1 else None) as client:
    job = client.submit(subject="math.square", payload=b"7", job_id="sq-7")
    print("7 squared is", job.result(timeout=30).decode())

    again = client.submit(subject="math.square", payload=b"7", job_id="sq-7")
    print("once more:", again.result(timeout=30).decode(), "(known before)" if again.existed else "(new)")

    try:
        client.submit(subject="math.square", payload=b"8", job_id="sq-7")
    except TasukiError as error:
        print(f"{error.code}: {error}")
