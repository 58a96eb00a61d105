"""A worker beside a server that is only its end of a socket: messages that leave together; and its settings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from tasuki import Worker
from tasuki.core.job import JobSpec
from tasuki.core.protocol import (
    FRAME_MAX_BYTES,
    PROTOCOL_VERSION,
    AssignJobs,
    GiveCredit,
    HelloWorker,
    JobsFinished,
    Message,
    Welcome,
)
from tasuki.core.store_messages import Grant
from tasuki.errors import ConfigError
from tasuki.net.tcp_link import TcpLink
from tasuki.worker.execs import parse_execs
from tasuki.worker.folder import RunFolders
from tasuki.worker.worker import disconnect_policy

PATIENCE_S = 10.0


class Desk:
    """Welcomes one worker, and keeps what it says."""

    def __init__(self) -> None:
        self.said: list[Message] = []
        self._heard = asyncio.Event()

    def link(self) -> TcpLink:
        return TcpLink(self._message, lambda link, reason: None, max_bytes=FRAME_MAX_BYTES)

    def _message(self, link: TcpLink, message: Message) -> None:
        self.said.append(message)
        self._heard.set()
        if isinstance(message, HelloWorker):
            self.worker = link
            facts = {"server_id": "s1", "identity": "w1", "kind": "worker", "lease_ttl_s": 60.0}
            link.send(Welcome(corr_id=message.msg_id, version=PROTOCOL_VERSION, **facts))  # type: ignore[arg-type]

    async def hear(self, kind: type[Message]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not any(isinstance(message, kind) for message in self.said):
                self._heard.clear()
                await self._heard.wait()


def test_an_ending_and_the_credit_for_its_place_leave_in_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        # Given a worker that is connected, with one job under way
        desk = Desk()
        listening = await asyncio.get_running_loop().create_unix_server(desk.link, str(tmp_path / "socket"))
        worker = Worker(f"unix://{tmp_path}/socket", concurrency=1, token="")
        began, go_on, told = asyncio.Event(), asyncio.Event(), asyncio.Event()

        @worker.handler("a.job")
        async def wait(job: object) -> None:
            began.set()
            await go_on.wait()

        serving = asyncio.ensure_future(worker.serve())
        await desk.hear(GiveCredit)
        desk.worker.send(AssignJobs(60.0, [_grant()]))
        await asyncio.wait_for(began.wait(), PATIENCE_S)
        writes: list[list[type[Message]]] = []

        def written(link: TcpLink, messages: Iterable[Message]) -> None:
            writes.append([type(message) for message in messages])
            if JobsFinished in writes[-1]:
                told.set()

        monkeypatch.setattr(TcpLink, "send", lambda link, message: written(link, [message]))
        monkeypatch.setattr(TcpLink, "send_together", written)
        # When the job ends
        go_on.set()
        await asyncio.wait_for(told.wait(), PATIENCE_S)
        # Then the server can make one turn of both
        assert writes[-1] == [JobsFinished, GiveCredit]
        worker.stop()
        await serving
        listening.close()

    asyncio.run(main())


def test_an_attempt_that_the_worker_itself_fails_with_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> JobsFinished:
        # Given a worker on a machine that has no thread left
        desk = Desk()
        listening = await asyncio.get_running_loop().create_unix_server(desk.link, str(tmp_path / "socket"))
        execs = parse_execs({"tool": {"command": "/bin/true"}})
        worker = Worker(f"unix://{tmp_path}/socket", concurrency=1, token="", execs=execs, data=tmp_path)
        serving = asyncio.ensure_future(worker.serve())
        await desk.hear(GiveCredit)

        def no_thread(*_: object) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(RunFolders, "create", no_thread)
        # When a job comes
        desk.worker.send(AssignJobs(60.0, [_grant(exec="tool")]))
        await desk.hear(JobsFinished)
        # Then its end is told: nobody would renew it for ever
        worker.stop()
        await serving
        listening.close()
        return next(message for message in desk.said if isinstance(message, JobsFinished))

    [ending] = asyncio.run(main()).endings
    assert ending.outcome.error_code == "WORKER_ERROR"
    assert "can't start new thread" in ending.outcome.message
    assert not ending.outcome.permanent


def _grant(**fields: str) -> Grant:
    spec = JobSpec(job_id="a", subject="a.job", **fields)  # type: ignore[arg-type]
    return Grant("a", msgspec.msgpack.encode(spec), "uid:1", "lease", 1, 60.0)


@pytest.mark.parametrize("value", ["", "maybe", "STOP"])
def test_on_disconnect_is_stop_or_keep(value: str) -> None:
    with pytest.raises(ConfigError, match=f"on_disconnect must be stop or keep, got '{value}'"):
        Worker("tcp://127.0.0.1:1", on_disconnect=value)


@pytest.mark.parametrize("seconds", [-1.0, 3601.0, float("nan"), float("inf")])
def test_the_grace_has_bounds(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"reconnect_grace_s must be 0 to 3600 seconds, got"):
        Worker("tcp://127.0.0.1:1", on_disconnect="keep", reconnect_grace_s=seconds)


def test_the_grace_means_nothing_without_keep() -> None:
    assert disconnect_policy(None, 60.0, None, over_http=False) == ("stop", 0.0, None)
    assert disconnect_policy("keep", 60.0, None, over_http=False) == ("keep", 60.0, None)


def test_endings_are_saved_only_where_the_next_process_can_be_the_same_worker(tmp_path) -> None:
    assert Worker("tcp://127.0.0.1:1", worker_id="w1", data=tmp_path)._outbox_files is not None
    assert Worker("tcp://127.0.0.1:1", worker_id="w1")._outbox_files is None
    assert Worker("tcp://127.0.0.1:1", data=tmp_path)._outbox_files is None


def test_over_http_jobs_are_kept_and_leases_longer_unless_it_is_said_otherwise() -> None:
    assert disconnect_policy(None, 60.0, None, over_http=True) == ("keep", 60.0, 60.0)
    assert disconnect_policy("stop", 60.0, 5.0, over_http=True) == ("stop", 0.0, 5.0)
