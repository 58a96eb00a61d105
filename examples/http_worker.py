"""A worker behind NAT, over HTTPS only, in plain Python: copy it, and replace `compute`.

    tasuki server --http 127.0.0.1:7080 --app zpe
    tasuki token enroll --app zpe | python examples/http_worker.py http://127.0.0.1:7080 zpe

The enrol token comes on stdin and is spent by the registration; the worker's own token stays in memory. A job waits at the server
until this worker's request for one is open, so that it starts at once. While it runs, a thread renews its lease.
"""

import json
import random
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request

PAUSE_FIRST_S, PAUSE_MAX_S = 5.0, 30.0  # while the server is away: growing, and never in step with other workers
EV_PER_CM1 = 1.239841984e-4


def compute(payload):
    """The zero-point energy of a molecule from its frequencies: half a quantum each."""
    frequencies = [float(frequency) for frequency in payload["frequencies_cm1"]]
    energy = sum(frequencies) / 2 * EV_PER_CM1
    csv = "mode,cm-1\n" + "".join(f"{mode},{value}\n" for mode, value in enumerate(frequencies, 1))
    return {"result": {"zpe_ev": energy}, "summary_text": f"ZPE {energy:.4f} eV", "freqs_csv": csv}


class Server:
    """The routes below /calc/APP/compute."""

    def __init__(self, url, app, token):
        self.base, self.token = f"{url}/calc/{app}/compute", token

    def post(self, path, body):
        """(status, answer); a server that is away is asked again until it is back."""
        pause_s = PAUSE_FIRST_S
        while True:
            headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
            request = urllib.request.Request(self.base + path, json.dumps(body).encode(), headers)
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return answer.status, json.loads(answer.read() or b"null")
            except urllib.error.HTTPError as error:
                if error.code < 500 and error.code != 429:
                    return error.code, json.load(error)
            except OSError as error:
                print(f"the server is away: {error}", file=sys.stderr)
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(PAUSE_MAX_S, pause_s * 2)


def run(server, job):
    """One job, from lease to report."""
    path, lease, ended = f"/jobs/{job['job_id']}", {"lease_id": job["lease_id"]}, threading.Event()

    def renew():
        while not ended.wait(job["lease_ttl_seconds"] / 3):
            server.post(f"{path}/renew", lease)

    threading.Thread(target=renew, daemon=True).start()
    try:
        status, answer = server.post(f"{path}/result", {**lease, **compute(job["payload"])})
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the job is told, and the next one gets its turn
        told = {"error_message": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        body = {**lease, "error_code": "COMPUTE_ERROR", **told}
        status, answer = server.post(f"{path}/failed", body)
    finally:
        ended.set()
    print(job["job_id"], answer["status"] if status == 200 else answer["error"]["code"], flush=True)


def main():
    url, app = sys.argv[1:3]
    server = Server(url, app, sys.stdin.readline().strip())
    status, answer = server.post("/servers/register", {})
    if status != 200:
        sys.exit(answer["error"]["message"])
    server.token = answer["worker_token"]
    print("registered as", answer["worker_id"], flush=True)
    while True:
        status, job = server.post("/jobs/lease?wait=25", {})
        if status == 200:
            run(server, job)
        elif status != 204:
            sys.exit(job["error"]["message"])


if __name__ == "__main__":
    main()
