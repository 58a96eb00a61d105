"""An enrolled worker at a real server, over HTTP and over TCP: its token changes while it works, and its jobs do not notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasuki.clocks import now
from tasuki.core.address import Address, parse_url
from tasuki.core.broker import authentication
from tasuki.doors.tcp import TcpDoor
from tasuki.errors import TasukiError, Unauthorized
from tasuki.net.enrol import is_good, register
from tasuki.worker import credentials
from tasuki.worker.credentials import Credential, CredentialFile, CredentialToken
from tasuki.worker.worker import Worker
from tests.doors.http.stage import Stage
from tests.support.waiting import until_async

SUBJECT = "job.assign.zpe"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("enrolled")) as stage:
        yield stage


@pytest.fixture(scope="module")
def tcp_url(stage: Stage) -> Iterator[str]:
    door = TcpDoor(stage.server)
    yield str(stage.run(door.listen_tcp(Address("tcp", "127.0.0.1", 0))))
    stage.run(door.close())


class Enrolled:
    """A worker with one handler, whose job goes on until it is told to end."""

    def __init__(self, stage: Stage, url: str, data: Path) -> None:
        self.stage = stage
        self.seat = CredentialFile(data, parse_url(url)[0])
        self.credential = enrol(stage, self.seat)
        self.worker = Worker(
            url,
            token=self.credential.token.secret,
            worker_id=self.credential.worker_id,
            credential_file=self.seat,
            subjects=(SUBJECT,),
            data=data,
        )
        self.begun, self.stopped = 0, 0
        self.may_end = asyncio.Event()
        self.worker.handler(SUBJECT)(self._work)

    async def _work(self, job: Any) -> bytes:
        self.begun += 1
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        return b'{"zpe_ev": 0.27}'

    @property
    def kept(self) -> Credential:
        found = self.seat.load()
        assert found is not None
        return found

    def job(self) -> dict[str, Any]:
        [job] = self.stage.get(f"/v1/jobs?worker_id={self.credential.worker_id}", self.stage.admin).json()["jobs"]
        found: dict[str, Any] = job
        return found


def enrol(stage: Stage, seat: CredentialFile) -> Credential:
    told = asyncio.run(register([stage.address], None, stage.enroll(), "test"))
    at = now().wall
    token = CredentialToken(secret=told.worker_token, token_id=told.token_id, issued_at=at, expires_at=at + told.ttl_seconds)
    seat.save(Credential(server=str(seat.address), worker_id=told.worker_id, scope=told.scope, token=token))
    found = seat.load()
    assert found is not None
    return found


def work(enrolled: Enrolled, act: Callable[[], Any]) -> TasukiError | None:
    """The worker serves while `act` looks on; the error that it ended with."""

    async def main() -> TasukiError | None:
        serving = asyncio.ensure_future(enrolled.worker.serve())
        try:
            acting = asyncio.ensure_future(act())
            await asyncio.wait({serving, acting}, return_when=asyncio.FIRST_COMPLETED)
            if not acting.done():
                acting.cancel()
                return outcome(serving)
            await acting
            enrolled.worker.drain()
            await asyncio.wait_for(serving, 10.0)
        except TasukiError as error:
            return error
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            enrolled.seat.close()
        return None

    return asyncio.run(main())


def outcome(serving: asyncio.Future[None]) -> TasukiError | None:
    error = serving.exception()
    assert error is None or isinstance(error, TasukiError), error
    return error


def make_due(monkeypatch: pytest.MonkeyPatch, due: CredentialToken) -> None:
    """Let one token be old enough to be exchanged, and not the one that replaces it."""
    left_s = CredentialToken.left_s
    monkeypatch.setattr(
        CredentialToken, "left_s", lambda token, wall: 0.0 if token.token_id == due.token_id else left_s(token, wall)
    )


@pytest.mark.parametrize(("transport", "ttl_s"), [("http", 60.0), ("tcp", 15.0)])
def test_a_lease_over_http_is_longer(stage: Stage, tcp_url: str, tmp_path: Path, transport: str, ttl_s: float) -> None:
    enrolled = Enrolled(stage, stage.url if transport == "http" else tcp_url, tmp_path)

    assert work(enrolled, lambda: until_async(lambda: enrolled.worker._welcome, what="connected")) is None

    assert enrolled.worker._welcome is not None
    assert enrolled.worker._welcome.lease_ttl_s == ttl_s


@pytest.mark.parametrize("transport", ["http", "tcp"])
def test_the_token_is_rotated_while_a_job_runs(
    stage: Stage, tcp_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    monkeypatch.setattr(credentials, "SLEEP_MAX_S", 0.02)
    stage.clear_queue()
    enrolled = Enrolled(stage, stage.url if transport == "http" else tcp_url, tmp_path)
    job_id = stage.submit()
    old = enrolled.credential.token

    async def rotate_in_mid_job() -> None:
        await until_async(lambda: enrolled.begun, what="the job runs")
        make_due(monkeypatch, old)
        await until_async(lambda: enrolled.kept.token.token_id != old.token_id, what="the token was rotated")
        await until_async(lambda: enrolled.worker.connected and enrolled.kept.previous is None, what="it uses the new one")
        assert await is_good([stage.address], None, enrolled.kept.token.secret)
        assert not await is_good([stage.address], None, old.secret)
        enrolled.may_end.set()
        await until_async(lambda: stage.status(job_id)["status"] == "finished", what="the result is recorded")

    assert work(enrolled, rotate_in_mid_job) is None
    assert (enrolled.begun, enrolled.stopped) == (1, 0)
    assert enrolled.job()["attempt"] == 1


def test_a_token_that_ends_in_mid_job_does_not_end_the_job(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life_s = 2.5
    monkeypatch.setattr(authentication, "WORKER_TOKEN_S", life_s)
    stage.clear_queue()
    enrolled = Enrolled(stage, stage.url, tmp_path)
    job_id = stage.submit()

    async def outlive_the_token() -> None:
        await until_async(lambda: enrolled.begun, what="the job runs")
        await until_async(lambda: now().wall > enrolled.credential.token.issued_at + life_s + 0.2, what="its first token is over")
        await until_async(lambda: enrolled.worker.connected, what="it is there")
        enrolled.may_end.set()
        await until_async(lambda: stage.status(job_id)["status"] == "finished", what="the result is recorded")

    assert work(enrolled, outlive_the_token) is None
    assert (enrolled.begun, enrolled.stopped) == (1, 0)
    assert enrolled.kept.token.token_id != enrolled.credential.token.token_id


@pytest.mark.parametrize("transport", ["http", "tcp"])
def test_a_worker_that_is_revoked_stops_its_jobs_and_says_why(stage: Stage, tcp_url: str, tmp_path: Path, transport: str) -> None:
    stage.clear_queue()
    enrolled = Enrolled(stage, stage.url if transport == "http" else tcp_url, tmp_path)
    stage.submit()

    async def revoke() -> None:
        await until_async(lambda: enrolled.begun, what="the job runs")
        stage.call("DELETE", f"/calc/zpe/compute/servers/{enrolled.credential.worker_id}", stage.admin)
        await until_async(lambda: False, what="the worker ends")

    error = work(enrolled, revoke)

    assert isinstance(error, Unauthorized)
    assert f"token {enrolled.credential.token.token_id} was revoked" in error.message
    assert enrolled.credential.token.secret not in error.message
    assert (enrolled.begun, enrolled.stopped) == (1, 1)


def test_a_worker_whose_exchanged_token_was_revoked_is_told_of_that_one(stage: Stage, tmp_path: Path) -> None:
    """The worker began a rotation that never reached the server. News of that token must not hide why it may not come in."""
    enrolled = Enrolled(stage, stage.url, tmp_path)
    enrolled.seat.save(
        Credential(
            server=enrolled.credential.server,
            worker_id=enrolled.credential.worker_id,
            token=enrolled.credential.token,
            pending=credentials.new_token(1000.0),
        )
    )
    stage.call("DELETE", f"/calc/zpe/compute/servers/{enrolled.credential.worker_id}", stage.admin)

    error = work(enrolled, lambda: until_async(lambda: False, what="the worker ends"))

    assert isinstance(error, Unauthorized)
    assert f"token {enrolled.credential.token.token_id} was revoked" in error.message
