"""Servers on Redis, as real processes: the raw keys of an app through a job's whole life, and what dies on the way."""

from __future__ import annotations

import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.stage import LEAD_TTL_S, SOON_S, leader_of
from tests.support.processes import SOURCE, ServerProcess, start_server, start_servers, start_worker
from tests.support.redis_service import RedisService
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

LEASE_TTL_S = 1.0
PAYLOAD = '{"molecule":"H2"}'
ANSWER = {"result": {"zpe_ev": 0.27}, "summary_text": "ZPE 0.27 eV", "freqs_csv": "mode,cm-1\n1,4401\n"}
FAILURE = {"error_code": "QE_RUNTIME_ERROR", "error_message": "pw.x exited with code 1"}
OPTIONS = ("--http", "127.0.0.1:0", "--app", "zpe", "--lead-ttl", str(LEAD_TTL_S), "--http-lease-ttl", str(LEASE_TTL_S))


class Raw:
    """The app as redis-cli sees it."""

    def __init__(self, service: RedisService, url: str) -> None:
        self.client: Any = service.client(int(urlsplit(url).path.strip("/")))

    def push(self, job_id: str) -> None:
        """All that an outsider does."""
        self.client.set(f"zpe:payload:{job_id}", PAYLOAD)
        self.client.lpush("zpe:queue", job_id)

    def keys_of(self, job_id: str) -> set[str]:
        """The keys of the contract that are there now."""
        kinds = ("payload", "status", "lease", "retry_count", "result", "summary", "freqs")
        return {kind for kind in kinds if self.client.exists(f"zpe:{kind}:{job_id}")}

    def places_of(self, job_id: str) -> set[str]:
        """The places where the job waits, or is counted."""
        lists = {name for name in ("queue", "dlq") if job_id in self.client.lrange(f"zpe:{name}", 0, -1)}
        return lists | {name for name in ("delay", "lease:index") if self.client.zscore(f"zpe:{name}", job_id) is not None}

    def status(self, job_id: str) -> str:
        return str(self.client.hget(f"zpe:status:{job_id}", "status"))

    def retries(self, job_id: str) -> int:
        return int(self.client.get(f"zpe:retry_count:{job_id}") or 0)

    def do_not_wait_for(self, job_id: str) -> None:
        """An operator's hand: it may run now."""
        self.client.zadd("zpe:delay", {job_id: 0}, xx=True)


class Worker:
    """A worker of the app, behind the door of one server or of several."""

    def __init__(self, *servers: ServerProcess) -> None:
        self._doors = [httpx.Client(base_url=http_of(server), timeout=30.0) for server in servers]
        enrolled = self._post(servers[0].token, "/enroll-tokens", {}).json()["enroll_token"]
        self._token = self._post(enrolled, "/servers/register", {}).json()["worker_token"]

    def _post(self, token: str, path: str, body: dict[str, Any], door: int = 0) -> httpx.Response:
        answer = self._doors[door].post(f"/calc/zpe/compute{path}", json=body, headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code in (200, 204), answer.text
        return answer

    def lease(self, door: int = 0) -> dict[str, Any]:
        answer = self._post(self._token, "/jobs/lease?wait=10", {}, door)
        assert answer.status_code == 200, "there was no job"
        leased: dict[str, Any] = answer.json()
        return leased

    def tell(self, leased: dict[str, Any], what: str, door: int = 0, **body: Any) -> dict[str, Any]:
        path = f"/jobs/{leased['job_id']}/{what}"
        told: dict[str, Any] = self._post(self._token, path, {"lease_id": leased["lease_id"], **body}, door).json()
        return told


def http_of(server: ServerProcess) -> str:
    return re.findall(r"^listening (http://\S+)", server.output(), re.MULTILINE)[-1]


@pytest.fixture(scope="module")
def shared_url(redis_service: RedisService) -> str:
    return redis_service.url()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, shared_url: str) -> Iterator[ServerProcess]:
    with start_server(tmp_path_factory.mktemp("zpe"), *OPTIONS, store=shared_url) as server:
        leader_of([server])
        yield server


@pytest.fixture
def raw(redis_service: RedisService, shared_url: str) -> Iterator[Raw]:
    """Beside `server`."""
    seen = Raw(redis_service, shared_url)
    yield seen
    seen.client.close()


# -- the way of an outsider's job ----------------------------------------------------------------------------------


def test_a_job_of_set_and_lpush_goes_through_lease_failed_delay_dead_letters_and_result(server: ServerProcess, raw: Raw) -> None:
    worker = Worker(server)
    raw.push("h2")
    assert (raw.keys_of("h2"), raw.places_of("h2")) == ({"payload"}, {"queue"})

    # three failures: each waits longer
    for retry, delay_s in enumerate((10.0, 20.0, 40.0), 1):
        leased = worker.lease()
        assert (leased["job_id"], leased["payload"]) == ("h2", {"molecule": "H2"})
        assert (raw.status("h2"), raw.places_of("h2")) == ("running", {"lease:index"})
        lease = raw.client.hgetall("zpe:lease:h2")
        assert leased["lease_id"] == f"{lease['lease_id']}.{retry}"
        assert float(lease["expires_at"]) == raw.client.zscore("zpe:lease:index", "h2")
        assert raw.client.ttl("zpe:lease:h2") == -1

        told = worker.tell(leased, "failed", **FAILURE)

        assert (told["status"], told["retry_count"]) == ("queued", retry)
        assert (raw.status("h2"), raw.retries("h2"), raw.places_of("h2")) == ("queued", retry, {"delay"})
        assert raw.client.zscore("zpe:delay", "h2") - time.time() == pytest.approx(delay_s, abs=2.0)
        assert "lease" not in raw.keys_of("h2")
        raw.do_not_wait_for("h2")
        until(lambda: raw.places_of("h2") == {"queue"}, SOON_S, "it is promoted")

    # the fourth: no retry is left
    worker.tell(worker.lease(), "failed", **FAILURE)
    assert (raw.status("h2"), raw.retries("h2"), raw.places_of("h2")) == ("failed", 4, {"dlq"})
    assert raw.keys_of("h2") == {"payload", "status", "retry_count"}
    assert "pw.x exited with code 1" in raw.client.hget("zpe:status:h2", "detail")
    assert raw.client.ttl("zpe:payload:h2") > 0

    # set going again, it ends well
    with server.client() as client:
        assert client.retry("h2")
    assert (raw.status("h2"), raw.places_of("h2"), raw.client.ttl("zpe:payload:h2")) == ("queued", {"queue"}, -1)
    worker.tell(worker.lease(), "result", **ANSWER)
    assert (raw.status("h2"), raw.places_of("h2")) == ("finished", set())
    assert raw.keys_of("h2") == {"payload", "status", "result", "summary", "freqs"}
    assert raw.client.mget("zpe:summary:h2", "zpe:freqs:h2") == [ANSWER["summary_text"], ANSWER["freqs_csv"]]
    assert raw.client.ttl("zpe:result:h2") > 0


def test_a_lease_that_ran_out_is_a_delayed_loss_and_its_late_result_is_refused(server: ServerProcess, raw: Raw) -> None:
    worker = Worker(server)
    raw.push("late")
    lost = worker.lease()

    until(lambda: raw.places_of("late") == {"delay"}, SOON_S, "the lease is reaped")

    assert (raw.status("late"), raw.retries("late"), raw.keys_of("late")) == ("queued", 1, {"payload", "status", "retry_count"})
    assert raw.client.zscore("zpe:delay", "late") - time.time() == pytest.approx(10.0, abs=2.0)
    with pytest.raises(AssertionError, match="FENCED"):
        worker.tell(lost, "result", **ANSWER)
    assert "result" not in raw.keys_of("late")


def test_a_job_that_is_pushed_while_a_worker_waits_reaches_it_soon(server: ServerProcess, raw: Raw) -> None:
    worker = Worker(server)
    with server.client() as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.lease)
        until(lambda: any(seen["credit"] for seen in client.wait(client.aio.call("workers"))), SOON_S, "it waits")

        raw.push("awaited")

        assert waiting.result(SOON_S)["job_id"] == "awaited"


# -- what dies -----------------------------------------------------------------------------------------------------


def test_when_the_leader_is_killed_the_other_server_does_its_duties_under_a_higher_epoch(
    tmp_path: Path, redis_service: RedisService, redis_url: str
) -> None:
    raw = Raw(redis_service, redis_url)
    with start_servers(tmp_path, 2, *OPTIONS, "--http-lease-ttl", "30", store=redis_url) as pair:
        first = leader_of(pair)
        [second] = [server for server in pair if server is not first]
        worker = Worker(second, first)
        raw.push("h2")
        leased = worker.lease(door=1)

        first.kill()

        assert leader_of([second], LEAD_TTL_S + SOON_S) is second
        assert second.led()[-1] > first.led()[-1] == 1
        assert int(raw.client.hget("zpe:epoch", "epoch")) == second.led()[-1]
        # The lease outlived the server that gave it, and what waits is promoted by the new leader.
        assert worker.tell(leased, "renew")["cancel"] is False
        worker.tell(leased, "failed", **FAILURE)
        raw.do_not_wait_for("h2")
        worker.tell(worker.lease(), "result", **ANSWER)
        assert raw.status("h2") == "finished"
    raw.client.close()


def test_after_redis_was_killed_and_came_back_with_its_append_only_file_the_server_goes_on(tmp_path: Path) -> None:
    # With appendfsync=everysec Redis puts writes off while an fsync is under way, and a kill loses what it has acknowledged.
    with RedisService(appendfsync="always") as service:
        url = service.url()
        raw = Raw(service, url)
        with start_server(tmp_path, *OPTIONS, "--http-lease-ttl", "30", store=url) as server:
            leader_of([server])
            worker = Worker(server)
            raw.push("before")
            leased = worker.lease()
            raw.push("waiting")

            service.kill()
            service.start()

            assert worker.tell(leased, "result", **ANSWER)["status"] == "finished"
            assert worker.lease()["job_id"] == "waiting"
            raw.push("after")
            assert worker.lease()["job_id"] == "after"
            until(lambda: server.leads, SOON_S, "it leads")
        raw.client.close()


def test_when_redis_is_emptied_the_server_warns_once_and_the_worker_keeps_what_it_has(
    tmp_path: Path, redis_service: RedisService, redis_url: str
) -> None:
    gate, over, folder = tmp_path / "gate", tmp_path / "over", tmp_path / "worker"
    script = f'echo it is done; until [ -e {gate} ]; do sleep 0.05; done; touch "{over}"'
    raw = Raw(redis_service, redis_url)
    with start_server(tmp_path, "--lead-ttl", str(LEAD_TTL_S), store=redis_url) as server:
        leader_of([server])
        words = ("--exec", f"wait=/bin/sh -c {shlex.quote(script)}", "--worker-id", "lab", "--data", str(folder))
        with start_worker(server, *words, command=True) as worker, server.client() as client:
            client.submit(exec="wait", job_id="kept")
            until(lambda: client.status("kept").state == "RUNNING", SOON_S, "it runs")

            server.signal(signal.SIGSTOP)
            gate.touch()
            until(over.exists, SOON_S, "the program has ended, and nobody hears of it")
            raw.client.flushdb()
            server.signal(signal.SIGCONT)

            until(lambda: "the store was emptied, or set back" in server.output(), SOON_S, "it is noticed")
            # Refused, or not taken while the worker's token was unknown: which of the two comes first is the server's business.
            kept = until(lambda: [*folder.glob("kept-aside/kept-1/result.zip"), *folder.glob("endings/lab/*.ending")], SOON_S)
            assert b"stdout.log" in kept[0].read_bytes()
            until(lambda: server.led() == [1, 2], SOON_S, "it leads again, under a higher epoch")
        assert server.output().count("the store was emptied") == 1
        assert "Traceback" not in server.output() + worker.output()
    raw.client.close()


def test_a_flushed_redis_gives_no_epoch_again_that_the_database_knows(
    tmp_path: Path, postgres_url: str, redis_service: RedisService, redis_url: str
) -> None:
    options = ("--coordination", redis_url, "--lead-ttl", str(LEAD_TTL_S))
    with start_servers(tmp_path, 2, *options, store=postgres_url) as pair:
        first = leader_of(pair)
        assert first.led() == [1]
        raw = Raw(redis_service, redis_url)
        assert raw.client.get("scheduler:leader:lock")

        raw.client.flushdb()

        until(lambda: first.output().count("leads no more") == 1, SOON_S, "the leader has lost its lock")
        leader_of(pair)
        epochs = [epoch for server in pair for epoch in server.led()]
        assert sorted(epochs) == [1, 2]
        raw.client.close()


# -- secrets -------------------------------------------------------------------------------------------------------


def test_a_password_is_neither_in_the_log_nor_in_the_list_of_processes(
    tmp_path: Path, redis_service: RedisService, redis_url: str
) -> None:
    secret = f"s3cret-{secrets.token_hex(4)}"
    admin: Any = redis_service.client()
    rights = ("~zpe:*", "resetchannels", "&zpe:*", "+@all", "-@admin", "-@dangerous", "+info")
    admin.execute_command("ACL", "SETUSER", "zpe", "on", f">{secret}", *rights)
    try:
        url = redis_url.replace("redis://", f"redis://zpe:{secret}@")
        with start_server(tmp_path, *OPTIONS, "--log-level", "debug", env={"TASUKI_STORE": url}, fresh=True) as server:
            leader_of([server])
            worker = Worker(server)
            assert secret not in Path(f"/proc/{server.pid}/cmdline").read_text()
            admin.execute_command("ACL", "SETUSER", "zpe", "resetpass")
            admin.execute_command("CLIENT", "KILL", "USER", "zpe", "SKIPME", "no")
            with pytest.raises(AssertionError) as told:
                worker.lease()
            until(lambda: "does not answer" in server.output(), SOON_S, "the server is locked out")
            assert secret not in server.output() + str(told.value)
            assert str(redis_service.port) not in str(told.value), "nothing about Redis is told to a worker"
    finally:
        admin.execute_command("ACL", "DELUSER", "zpe")
        admin.close()


def test_a_server_on_redis_never_imports_django(tmp_path: Path, redis_url: str) -> None:
    code = f"""
import asyncio, sys
from pathlib import Path
from tasuki.config import DataFolder
from tasuki.server.server import ServerConfig
from tasuki.server.assembly import StorageLocations, make_server
from tasuki.server.backup import prepare_folder

async def main():
    folder = DataFolder(Path({str(tmp_path)!r}) / "data")
    prepare_folder(folder)
    server = make_server(StorageLocations(folder, {redis_url!r}), ServerConfig(server_id="a", data=folder.root))
    await server.start()
    await server.stop()

asyncio.run(main())
print([name for name in ("django", "psycopg") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.strip() == "[]"
