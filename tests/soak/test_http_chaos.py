"""Workers over HTTP, a server that is killed again and again, workers that vanish with their leases: every job ends once."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes import ServerProcess, start_server
from tests.support.waiting import until

pytestmark = [pytest.mark.soak, pytest.mark.e2e]

JOBS = 400
WORKERS = 8
KILLS = 4
LEASE_TTL_S = 2.0


class Worker(threading.Thread):
    """Leases in batches, forgets some of what it leased, reports the rest until there is an answer."""

    def __init__(self, url: str, enroll: str, seed: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.recorded: list[tuple[str, int]] = []
        self.unexpected: list[Any] = []
        self._chance = random.Random(seed)
        self._stop_wanted = stop
        self._health = f"{url}/healthz"
        self._client = httpx.Client(base_url=f"{url}/calc/zpe/compute", timeout=15.0)
        answer = self._client.post("/servers/register", json={}, headers={"Authorization": f"Bearer {enroll}"})
        self._client.headers["Authorization"] = f"Bearer {answer.json()['worker_token']}"
        self.seed = seed

    def run(self) -> None:
        while not self._stop_wanted.is_set():
            answer = self._post("/jobs/lease?wait=2", {"max_jobs": 8})
            if answer is not None and answer.status_code == 200:
                self._work(answer.json()["jobs"])

    def _work(self, jobs: list[dict[str, Any]]) -> None:
        kept = [job for job in jobs if self._chance.random() > 0.1]
        results = [
            {
                "job_id": job["job_id"],
                "lease_id": job["lease_id"],
                "result": {"by": self.seed, "n": job["payload"]["n"]},
                "summary_text": "",
                "freqs_csv": "",
            }
            for job in kept
        ]
        while results and not self._stop_wanted.is_set():
            answer = self._post("/jobs/result", {"results": results})
            if answer is not None and answer.status_code == 200:
                items = answer.json()["items"]
                self.recorded += [(item["job_id"], self.seed) for item in items if item["status"] == 200]
                self.unexpected += [item for item in items if item["status"] not in (200, 409)]
                return

    def _server_answers(self) -> bool:
        try:
            return self._client.get(self._health).status_code == 200
        except httpx.TransportError:
            return False

    def _post(self, path: str, body: Any) -> httpx.Response | None:
        try:
            answer = self._client.post(path, json=body)
        except httpx.TransportError:
            until(lambda: self._stop_wanted.is_set() or self._server_answers(), 60, "the server is there again")
            return None
        if answer.status_code >= 500 and answer.status_code != 503:
            self.unexpected.append(answer.text)
        return answer


def _http_port(server: ServerProcess) -> str:
    return next(line.split()[1] for line in server.output().splitlines() if line.startswith("listening http"))


def test_every_job_ends_once_though_servers_and_leases_die(tmp_path: Path) -> None:
    words = ("--app", "zpe", "--http-lease-ttl", str(LEASE_TTL_S))
    with start_server(tmp_path, "--http", "127.0.0.1:0", *words) as first:
        port = _http_port(first).rpartition(":")[2]
    with start_server(tmp_path, "--http", f"127.0.0.1:{port}", *words) as server:
        url, stop = _http_port(server), threading.Event()
        admin = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {server.token}"}, timeout=15.0)
        enroll = [admin.post("/calc/zpe/compute/enroll-tokens", json={}).json()["enroll_token"] for _ in range(WORKERS)]
        jobs = [{"payload": {"n": n}, "job_id": f"job-{n}"} for n in range(JOBS)]
        assert admin.post("/calc/zpe/jobs/batch", json={"jobs": jobs}).status_code == 200
        workers = [Worker(url, token, seed, stop) for seed, token in enumerate(enroll)]
        for worker in workers:
            worker.start()
        for _ in range(KILLS):
            before = sum(len(worker.recorded) for worker in workers)
            until(lambda before=before: sum(len(w.recorded) for w in workers) > before or _ended(admin), 60, "work goes on")
            server.restart()
        until(lambda: _ended(admin), 120, "all jobs have ended")
        stop.set()
        for worker in workers:
            worker.join(30.0)
        views = [admin.get(f"/calc/zpe/jobs/job-{n}/result").json() for n in range(JOBS)]

    recorded = [job for worker in workers for job in worker.recorded]
    assert [worker.unexpected for worker in workers] == [[]] * WORKERS
    assert {view["job_id"] for view in views if view.get("status") == "finished"} == {f"job-{n}" for n in range(JOBS)}
    assert all(view["result"]["n"] == n for n, view in enumerate(views))
    winners = {view["job_id"]: view["result"]["by"] for view in views}
    assert all(winners[job_id] == seed for job_id, seed in recorded)


def _ended(admin: httpx.Client) -> bool:
    try:
        groups = admin.get("/v1/stats").json().get("groups", {})
    except httpx.TransportError:
        return False
    return bool(groups.get("zpe", {}).get("succeeded") == JOBS)
