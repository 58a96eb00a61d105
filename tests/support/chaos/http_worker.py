"""A worker process of the chaos tests over HTTP: `python http_worker.py URL,URL --app APP --ledger FILE --reports FILE`.

Only the standard library, as somebody's own worker may be: it starts in a moment, and is killed at any other. The token comes
from TASUKI_TOKEN. It leases a few jobs at a time, notes each in the ledger as e2e/jobs.py does, and does what the payload says:

    (nothing)     ends at once
    stumble       fails in its first attempt
    linger        in its first attempt goes on for longer than its lease, and reports all the same
    fail          fails, always
    die           kills its worker, always

A report is sent until there is an answer, to whichever server takes it. Each final answer is a line of JSON in `reports`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

RETRIED = (429, 503)
LEASE_WAIT_S = 1.0
TIMEOUT_S = 20.0  # frozen servers do not answer
READY_LOOK_S = 0.05

moment = threading.Event()  # never set: its wait is the time that a job takes, or the pause between two looks


class Servers:
    """The control planes, one at a time; another one when it does not answer."""

    def __init__(self, urls: list[str], app: str, token: str) -> None:
        self._hosts = [urlsplit(url).netloc for url in urls]
        self._path = f"/calc/{app}/compute"
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._connection: http.client.HTTPConnection | None = None

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Until a server has answered."""
        data = json.dumps(body)
        while True:
            try:
                status, answer = self._once("POST", self._path + path, data)
            except (OSError, http.client.HTTPException):
                status, answer = 503, None
                self._turn_to_next()
            if status not in RETRIED:
                return status, json.loads(answer) if answer else None
            self._until_ready()

    def _once(self, method: str, path: str, data: str | None = None) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._hosts[0], timeout=TIMEOUT_S)
        self._connection.request(method, path, data, self._headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def _until_ready(self) -> None:
        """Until one of them, and the store behind it, answers."""
        while True:
            try:
                if self._once("GET", "/readyz")[0] == 200:
                    return
            except (OSError, http.client.HTTPException):
                self._turn_to_next()
            moment.wait(READY_LOOK_S)

    def _turn_to_next(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._hosts.append(self._hosts.pop(0))


def append(path: Path, line: str) -> None:
    """In one write that no other process can break into."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def run(servers: Servers, job: dict[str, Any], options: argparse.Namespace) -> None:
    attempt = int(job["lease_id"].rpartition(".")[2])
    append(options.ledger, f"{job['job_id']} {attempt} {os.getpid()} {time.time():.3f}\n")
    do = job["payload"].get("do", "")
    if do == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "linger" and attempt == 1:
        moment.wait(job["lease_ttl_seconds"] + options.linger)
    fails = do == "fail" or (do == "stumble" and attempt == 1)
    body: dict[str, Any] = {"lease_id": job["lease_id"]}
    if fails:
        body |= {"error_code": "MEANT", "error_message": do}
    else:
        body |= {"result": {"attempt": attempt, "pid": os.getpid()}, "summary_text": job["job_id"], "freqs_csv": ""}
    status, answer = servers.post(f"/jobs/{job['job_id']}/{'failed' if fails else 'result'}", body)
    noted = {"job_id": job["job_id"], "attempt": attempt, "pid": os.getpid(), "fails": fails, "status": status, "answer": answer}
    append(options.reports, json.dumps(noted) + "\n")


def main(options: argparse.Namespace) -> None:
    servers = Servers(options.urls.split(","), options.app, os.environ["TASUKI_TOKEN"])
    while True:
        status, answer = servers.post(f"/jobs/lease?wait={LEASE_WAIT_S}", {"max_jobs": options.max_jobs})
        if status not in (200, 204):
            append(options.reports, json.dumps({"job_id": "", "status": status, "answer": answer}) + "\n")
            continue
        for job in answer["jobs"] if answer else ():
            run(servers, job, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("urls")
    parser.add_argument("--app", required=True)
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--reports", type=Path, required=True)
    parser.add_argument("--max-jobs", type=int, default=3)
    parser.add_argument("--linger", type=float, default=1.0, help="seconds beyond the lease")
    main(parser.parse_args())
