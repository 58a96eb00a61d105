"""The door itself: TLS, the end in order, and what a restart or a lost connection costs the peers that talk to it."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import time
from concurrent import futures
from pathlib import Path

import pytest

from tasuki.core.access import identify, token_sha256
from tasuki.core.protocol import HelloWorker
from tasuki.doors.http.virtual_connection import VirtualConnection
from tasuki.doors.listening import server_tls
from tasuki.errors import ConfigError
from tests.conftest import Require
from tests.doors.http.stage import Stage, Worker
from tests.support.waiting import until


def test_https(tmp_path: Path, require: Require) -> None:
    require("openssl", shutil.which("openssl") is not None, "certificates are made with it")
    cert, key = os.fspath(tmp_path / "cert.pem"), os.fspath(tmp_path / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=server", "-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:TRUE",
         "-keyout", key, "-out", cert],
        check=True, capture_output=True, timeout=20,
    )  # fmt: skip
    with Stage(tmp_path, server_tls(cert, key), ssl.create_default_context(cafile=cert)) as stage:
        answer = stage.call("GET", "/readyz")

    assert stage.url.startswith("https://")
    assert answer.status_code == 200


def test_a_port_that_is_taken_is_named(stage: Stage) -> None:
    with pytest.raises(ConfigError, match=f"{stage.address.port}"):
        stage.run(stage.door.listen(stage.address))


def test_those_who_wait_are_told_when_the_door_closes(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        worker = stage.register()
        with futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(worker.lease, 30)
            _until_waiting(stage, worker)
            stage.run(stage.door.close())

            assert waiting.result(30.0).status_code == 204


def _until_waiting(stage: Stage, worker: Worker) -> None:
    def waits() -> bool:
        session = stage.server.broker.workers.get(worker.worker_id)
        return session is not None and session.account.available > 0

    until(waits, what=f"{worker.worker_id} waits for a job")


def test_a_lease_outlives_the_server_that_granted_it(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        worker = stage.register()
        leased = worker.take(stage.submit())
    with Stage(tmp_path) as again:
        worker = Worker(again, "zpe", worker.worker_id, worker.token)

        renewed, recorded = worker.renew(leased), worker.finish(leased)

    assert renewed.status_code == 200
    assert recorded.status_code == 200


def test_a_worker_that_turned_to_another_server_is_told_to_ask_again(stage: Stage, worker: Worker) -> None:
    with futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.lease, 30)
        _until_waiting(stage, worker)

        stage.run(_come_in_elsewhere(stage, worker))

        assert waiting.result(30.0).status_code == 204
    job_id = stage.submit()
    assert worker.lease(wait=10).json()["job_id"] == job_id


async def _come_in_elsewhere(stage: Stage, worker: Worker) -> None:
    """A new connection of the same worker, as a load balancer may make it at another server."""
    row = await stage.server.ask_tokens(lambda reader: reader.token(token_sha256(worker.token)))
    incarnation = identify(row, time.time()).incarnation
    connection = VirtualConnection(stage.server, "elsewhere", lambda message: None)
    hello = HelloWorker(
        msg_id=1, worker_id=worker.worker_id, incarnation=incarnation, token=worker.token, patterns=("job.assign.zpe",)
    )
    await connection.ask(hello)


def test_a_short_job_is_never_noted_as_started_and_a_longer_one_is(stage: Stage, worker: Worker) -> None:
    short, longer = stage.submit(), stage.submit()
    jobs = {leased["job_id"]: leased for leased in worker.lease(max_jobs=2).json()["jobs"]}
    worker.finish(jobs[short])

    until(lambda: stage.get(f"/v1/jobs/{longer}").json()["state"] == "RUNNING", what="the longer job is noted as running")

    assert worker.finish(jobs[longer]).status_code == 200
    assert all(stage.get(f"/v1/jobs/{job_id}").json()["started_at"] for job_id in (short, longer))


def test_several_lease_requests_of_one_worker_share_what_there_is(stage: Stage, worker: Worker) -> None:
    job_id = stage.submit()
    with futures.ThreadPoolExecutor(4) as pool:
        answers = [poll.result(30.0) for poll in [pool.submit(worker.lease, 0.5) for _ in range(4)]]

    taken = [answer.json()["job_id"] for answer in answers if answer.status_code == 200]
    view = stage.get(f"/v1/jobs/{job_id}").json()

    assert taken == [job_id]
    assert (view["attempt"], view["failures"], view["losses"]) == (1, 0, 0)
