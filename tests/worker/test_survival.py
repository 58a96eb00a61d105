"""Workers that are killed, cut off and told to end in the middle of things: what they have is not lost, nor fetched twice."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shlex
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tasuki import Client, Worker
from tasuki.core.job import JobSpec
from tasuki.core.protocol import AssignJobs, GiveCredit
from tasuki.core.store_messages import Grant
from tests.e2e.stage import stdout_of
from tests.support.processes import ServerProcess, WorkerProcess, start_server, start_worker
from tests.support.waiting import until
from tests.worker.test_worker import PATIENCE_S, Desk

LEASE_TTL_S = 1.0
SIZE_BYTES = 12 * 1024 * 1024
SOON_S = 15.0


class Narrows:
    """A line to the server through which each side may send so many bytes; then nothing passes, and nobody is told."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self.limit_bytes = {"up": 1 << 40, "down": 1 << 40}
        self.passed_bytes = {"up": 0, "down": 0}
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed at the end of the test
            while True:
                near = self._listening.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [near, far]
                for source, target, way in ((near, far, "up"), (far, near, "down")):
                    threading.Thread(target=self._carry, args=(source, target, way), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(1 << 16)) and self.passed_bytes[way] < self.limit_bytes[way]:
                target.sendall(data)
                self.passed_bytes[way] += len(data)
            if not data:
                target.shutdown(socket.SHUT_WR)

    def stuck(self, way: str) -> bool:
        return self.passed_bytes[way] >= self.limit_bytes[way]

    def mend(self) -> None:
        """New connections are carried, without an end; those that were stuck are cut."""
        self.limit_bytes = {"up": 1 << 40, "down": 1 << 40}
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.close()
        self.mend()
        for one in self._sockets:
            one.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with start_server(tmp_path_factory.mktemp("survival"), "--lease-ttl", str(LEASE_TTL_S)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def narrows(server: ServerProcess) -> Iterator[Narrows]:
    with contextlib.closing(Narrows(server.port)) as narrows:
        yield narrows


@pytest.fixture(scope="module")
def token(server: ServerProcess) -> str:
    return server.create_token("worker")


def command_worker(url: str, token: str, tmp_path: Path, *arguments: str, script: str) -> WorkerProcess:
    """A worker whose exec `tool` runs this shell script; it can be the same again."""
    tool = f"tool=/bin/sh -c {shlex.quote(script)}"
    return start_worker(
        url,
        *("--worker-id", tmp_path.name[-40:], "--data", str(tmp_path / "data"), "--slots", "1", "--exec", tool),
        *("--subject", tmp_path.name[-40:], *arguments),
        command=True,
        token=token,
        log=tmp_path / "worker.log",
    )


def endings(tmp_path: Path) -> list[str]:
    return sorted(path.suffix for path in (tmp_path / "data" / "endings").rglob("*") if path.is_file())


def test_a_worker_that_is_killed_in_the_middle_of_an_upload_loses_nothing(
    server: ServerProcess, client: Client, token: str, narrows: Narrows, tmp_path: Path
) -> None:
    # given: a run that is over, and whose result has arrived by a third
    script = f"echo ran >> {tmp_path}/runs; head -c {SIZE_BYTES} /dev/urandom > out/bytes"
    keep = ("--on-disconnect", "keep")
    narrows.limit_bytes["up"] = SIZE_BYTES // 3
    with command_worker(narrows.url, token, tmp_path, *keep, script=script) as worker:
        job = client.submit(subject=tmp_path.name[-40:], exec="tool", job_id="uploaded")
        until(lambda: narrows.stuck("up"), SOON_S, "a third of the result has passed")
        assert endings(tmp_path) == [".ending", ".result"]
        # when: its worker is killed, and started again with a line that carries
        worker.kill()
    with command_worker(server.url, token, tmp_path, *keep, script=script):
        # then: the result is that of the only run
        assert len(job.result(SOON_S)) > SIZE_BYTES
        until(lambda: endings(tmp_path) == [], SOON_S, "the files are removed")
    assert (tmp_path / "runs").read_text() == "ran\n"
    assert client.status("uploaded").attempt == 1


@pytest.mark.soak  # its seconds are those of a lease that has to end; test_incoming.py shows the same of a process that is killed
def test_a_worker_that_is_killed_while_it_fetches_an_input_does_not_fetch_it_twice(
    server: ServerProcess, client: Client, token: str, narrows: Narrows, tmp_path: Path
) -> None:
    # given: an input of which more than a half has come
    (tmp_path / "input").write_bytes(content := os.urandom(SIZE_BYTES))
    narrows.limit_bytes["down"] = SIZE_BYTES * 2 // 3
    with command_worker(narrows.url, token, tmp_path, script="sha256sum in/input") as worker:
        job = client.submit(subject=tmp_path.name[-40:], exec="tool", job_id="fetched", files=[tmp_path / "input"])
        until(lambda: narrows.stuck("down"), SOON_S, "two thirds have passed")
        # when: its worker is killed, and the next attempt comes to the same one
        worker.kill()
        narrows.mend()
        with command_worker(narrows.url, token, tmp_path, script="sha256sum in/input"):
            assert hashlib.sha256(content).hexdigest() in stdout_of(job.result(SOON_S))
    # then
    assert client.status("fetched").attempt == 2
    assert narrows.passed_bytes["down"] <= 1.1 * SIZE_BYTES + 1024 * 1024  # what is not written yet at a kill is sent again
    assert list((tmp_path / "data" / "incoming").iterdir()) == []


def test_a_large_result_that_came_too_late_is_kept_aside(
    server: ServerProcess, client: Client, token: str, narrows: Narrows, tmp_path: Path
) -> None:
    # given: a run that ended while its worker was cut off, and another worker that has taken the job
    script = f"head -c 2000000 /dev/urandom > out/bytes; while [ ! -e {tmp_path}/gate ]; do sleep 0.02; done"
    keep = ("--on-disconnect", "keep", "--reconnect-grace", "0")
    with command_worker(narrows.url, token, tmp_path, *keep, script=script) as cut:
        job = client.submit(subject=tmp_path.name[-40:], exec="tool", job_id="late")
        until(lambda: client.status("late").state == "RUNNING", SOON_S, "it runs")
        narrows.limit_bytes["up"] = 0
        (tmp_path / "gate").touch()
        until(lambda: endings(tmp_path) == [".ending", ".result"], SOON_S, "its result is on disk")
        (tmp_path / "other").mkdir()
        other = start_worker(
            server,
            *("--exec", "tool=/bin/echo the other one", "--subject", tmp_path.name[-40:], "--data", str(tmp_path / "other")),
            command=True,
        )
        with other:
            assert "the other one" in stdout_of(job.result(SOON_S))
        # when: the line is back
        narrows.mend()
        cut.wait_for_output("job late attempt 1: refused, its result is kept in ", SOON_S)
        until(lambda: endings(tmp_path) == [], SOON_S, "nothing waits any more")
    # then: it lost, and is not lost
    place = tmp_path / "data" / "kept-aside" / "late-1"
    about = json.loads((place / "about.json").read_text())
    assert (about["job_id"], about["attempt"], about["subject"]) == ("late", 1, tmp_path.name[-40:])
    assert (place / "result.zip").stat().st_size == about["size_bytes"] > 2_000_000
    assert client.status("late").attempt == 2


# ---------------------------------------------------------------------------------------------------- told to end


def test_a_worker_that_is_told_to_end_where_no_server_is_leaves_what_it_has_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("tasuki.core.worker.machine.ALONE_S", "tasuki.core.worker.machine.SAVE_AFTER_S"):
        monkeypatch.setattr(name, 0.2)

    async def main() -> None:
        # given: a worker whose server is gone, with a job that ends
        desk = Desk()
        listening = await asyncio.get_running_loop().create_unix_server(desk.link, str(tmp_path / "socket"))
        worker = Worker(f"unix://{tmp_path}/socket", token="", worker_id="w1", data=tmp_path, on_disconnect="keep")
        began, go_on = asyncio.Event(), asyncio.Event()

        @worker.handler("a.job")
        async def wait(job: object) -> bytes:
            began.set()
            await go_on.wait()
            return b"dear"

        serving = asyncio.ensure_future(worker.serve())
        await desk.hear(GiveCredit)
        spec = JobSpec(job_id="a", subject="a.job")
        desk.worker.send(AssignJobs(60.0, [Grant("a", msgspec.msgpack.encode(spec), "uid:1", "lease", 1, 60.0)]))
        await asyncio.wait_for(began.wait(), PATIENCE_S)
        listening.close()
        desk.worker.abort("gone")
        # when: it is told to end, and then the job does
        worker.drain()
        go_on.set()
        # then: it ends without a second word
        await asyncio.wait_for(serving, PATIENCE_S)

    asyncio.run(main())
    assert [path.suffix for path in (tmp_path / "endings" / "w1").iterdir()] == [".ending"]
    assert f"1 result(s) wait in {tmp_path / 'endings' / 'w1'}; the next start offers them" in caplog.text
