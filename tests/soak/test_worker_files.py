"""A worker over HTTP with files of GiBs: killed on the way, and never in memory."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.metered import Metered
from tests.e2e.transfers import MIB, kept_bytes, make_file, port_of
from tests.soak.memory import ALLOWED_BYTES, watched
from tests.support.processes import ServerProcess, WorkerProcess, start_server, start_worker
from tests.support.waiting import until

pytestmark = pytest.mark.soak

PATIENCE_S = 300.0


def worker_of(server: ServerProcess, port: int, folder: Path, token: str, *execs: str) -> WorkerProcess:
    return start_worker(
        f"http://127.0.0.1:{port}",
        *("--worker-id", "lab", "--data", str(folder / "lab"), "--slots", "1"),
        *(word for exec_ in execs for word in ("--exec", exec_)),
        command=True,
        token=token,
        log=folder / "worker.log",
    )


def sha256_of_outputs(server: ServerProcess, job_id: str, into: Path) -> str:
    """Of all files of the job's result, one behind the other."""
    server.tasuki("result", job_id, "-o", str(into), timeout=PATIENCE_S)
    digest = hashlib.sha256()
    with zipfile.ZipFile(into) as archive:
        for name in sorted(name for name in archive.namelist() if name.startswith("out/")):
            with archive.open(name) as member:
                while piece := member.read(MIB):
                    digest.update(piece)
    return digest.hexdigest()


def test_a_result_of_a_gib_whose_worker_and_server_are_killed_is_hardly_sent_twice(tmp_path: Path) -> None:
    size_bytes = 1024 * MIB
    sha256 = make_file(tmp_path / "large.bin", size_bytes)
    copy = f"copy=/bin/cp {tmp_path / 'large.bin'} out/large.bin"
    with start_server(tmp_path, "--http", "127.0.0.1:0") as server, Metered(port_of(server, "http")) as way:
        token = server.create_token("worker")

        def stands_at(share: float) -> Callable[[], bool]:
            return lambda: way.holds and kept_bytes(server) >= share * size_bytes - MIB

        way.hold_at(size_bytes // 2)
        with server.client() as client:
            client.submit(exec="copy", job_id="large")
        with worker_of(server, way.port, tmp_path, token, copy):
            until(stands_at(0.5), PATIENCE_S, "half of the result is on its way")
        way.cut()
        way.hold_at(size_bytes * 3 // 4)
        with worker_of(server, way.port, tmp_path, token, copy) as again:
            until(stands_at(0.75), PATIENCE_S, "three quarters of it are on their way")
            server.kill()
            server.restart()
            way.target = port_of(server, "http")
            way.cut()
            way.hold_at(0)
            with server.client() as client:
                ended = client.submit(exec="copy", job_id="large").outcome(timeout=PATIENCE_S)
            assert (ended.state, ended.attempt) == ("SUCCEEDED", 1)
            assert "its saved ending is offered" in again.output()
            assert sha256_of_outputs(server, "large", tmp_path / "result.zip") == sha256

    assert size_bytes <= way.sent <= 1.1 * size_bytes


def test_two_gib_in_and_out_stay_out_of_the_memory_of_worker_and_server(tmp_path: Path) -> None:
    sha256 = make_file(tmp_path / "large.bin", 2048 * MIB)
    split = "split=/usr/bin/split -b 1000M in/large.bin out/part-"
    with start_server(tmp_path, "--http", "127.0.0.1:0") as server:
        worker = worker_of(server, port_of(server, "http"), tmp_path, server.create_token("worker"), split)
        with worker, server.client() as client:
            warm_up = tmp_path / "small"
            warm_up.mkdir()
            (warm_up / "large.bin").write_bytes(b"small")
            client.submit(exec="split", files=[warm_up / "large.bin"]).result(timeout=PATIENCE_S)
            with watched(server.pid) as servers, watched(worker.pid) as workers:
                job = client.submit(exec="split", files=[tmp_path / "large.bin"])
                assert job.outcome(timeout=PATIENCE_S).state == "SUCCEEDED"
            (tmp_path / "large.bin").unlink()
            assert sha256_of_outputs(server, job.job_id, tmp_path / "result.zip") == sha256

    assert servers.grown <= ALLOWED_BYTES
    assert workers.grown <= ALLOWED_BYTES
