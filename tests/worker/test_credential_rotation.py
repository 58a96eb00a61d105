"""The token of a worker is exchanged for the next one. Whatever is lost or killed on the way, one of those it has is good."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tasuki.clocks import now
from tasuki.core.access import WORKER_TOKEN_S, token_sha256
from tasuki.core.address import parse_url
from tasuki.core.machine import Closed, Opened, Peer, Received
from tasuki.core.protocol import ErrorMessage, Message, Reply, Welcome
from tasuki.errors import TasukiError
from tasuki.worker import credentials as module
from tasuki.worker.credentials import Credential, CredentialFile, CredentialToken, Rotation, new_token
from tests.support.waiting import until_async

ADDRESS = parse_url("https://control.example")[0]
PEER = Peer("tcp", None, "control.example:443")
WEEK_S = WORKER_TOKEN_S
ASKED = 77
WELCOME = Welcome(corr_id=1, version=1, server_id="s", identity="token:t", kind="worker")


class Killed(BaseException):
    """The process ends here."""


def aged(token_id: str, part: float) -> CredentialToken:
    """A token of which this part of its life is over."""
    issued_at = now().wall - WEEK_S * part
    return CredentialToken(secret=f"tsk_w_{token_id}", token_id=token_id, issued_at=issued_at, expires_at=issued_at + WEEK_S)


class Control:
    """The server: knows which tokens are good, and exchanges them."""

    def __init__(self, *tokens: CredentialToken) -> None:
        self.good = {token_sha256(token.secret): token.token_id for token in tokens}
        self.requests: list[dict[str, str]] = []

    def rotate(self, shown: str, params: dict[str, str]) -> Message:
        if self.good.pop(token_sha256(shown), None) is None:
            return ErrorMessage(ASKED, "FORBIDDEN", "the token of the worker was revoked", {})
        self.good[params["sha256"]] = params["token_id"]
        return Reply(ASKED, {"token_id": params["token_id"], "ttl_s": WEEK_S})


class Worker:
    """A worker around a Rotation: a connection that is dialed again, and a machine that hears what is its business."""

    def __init__(self, control: Control, data: Path) -> None:
        self.control = control
        self.seat = CredentialFile(data, ADDRESS)
        self.seat.load()
        self.rotation = Rotation(self.seat, ask=self._ask, use=self._use, hang_up=self._hang_up, jitter=lambda: 0.0)
        self.next_secret = self.shown = self.rotation._chosen.secret
        self.welcomes = self.hung_up = 0
        self.sent_away = ""
        self.answer: Callable[[dict[str, str]], Message | None] = lambda params: self.control.rotate(self.shown, params)
        self._conn = 0

    def _ask(self, verb: str, params: dict[str, str]) -> int:
        assert verb == "worker.rotate"
        self.control.requests.append(params)
        answer = self.answer(params)
        if answer is None:
            asyncio.get_running_loop().call_soon(self.cut)
        else:
            asyncio.get_running_loop().call_soon(self.rotation.heard, Received(self._conn, answer))
        return ASKED

    def _use(self, secret: str) -> None:
        self.next_secret = secret

    def _hang_up(self, error: TasukiError) -> None:
        self.hung_up += 1
        self.cut()

    def cut(self) -> None:
        """The line is lost, and dialed again."""
        self.rotation.heard(Closed(self._conn, "lost"))
        asyncio.get_running_loop().call_soon(self.dial)

    def dial(self) -> None:
        self._conn += 1
        self.rotation.heard(Opened(self._conn, PEER))
        self.shown = self.next_secret
        if token_sha256(self.shown) in self.control.good:
            self.welcomes += 1
            self.rotation.heard(Received(self._conn, WELCOME))
        else:
            self.refuse(f"{self.shown} is not known here")

    def refuse(self, why: str) -> None:
        """The server ends the connection."""
        left = self.rotation.heard(Received(self._conn, ErrorMessage(0, "UNAUTHORIZED", why)))
        if left is None:
            self.cut()
        else:
            assert isinstance(left, Received)
            assert isinstance(left.message, ErrorMessage)
            self.sent_away = left.message.message

    @property
    def kept(self) -> Credential:
        """The credential as it is on disk."""
        found = self.seat.load()
        assert found is not None
        return found

    @property
    def settled(self) -> bool:
        kept = self.kept
        return (kept.pending, kept.previous) == (None, None) and token_sha256(kept.token.secret) in self.control.good


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed rotations are tried again at once, not in a minute."""
    monkeypatch.setattr(module, "RETRY_FIRST", 1e-9)
    monkeypatch.setattr(module, "RETRY_MIN_S", 0.001)


def enrolled(data: Path, token: CredentialToken, pending: CredentialToken | None = None) -> None:
    with CredentialFile(data, ADDRESS) as seat:
        seat.save(Credential(server=str(ADDRESS), worker_id="w-1", token=token, pending=pending))


def live(worker: Worker, act: Callable[[], Awaitable[None]]) -> None:
    """The worker connects and rotates while `act` looks on."""

    async def main() -> None:
        worker.dial()
        running = asyncio.ensure_future(worker.rotation.run())
        acting: asyncio.Future[None] = asyncio.ensure_future(_run(act()))
        try:
            await asyncio.wait({running, acting}, timeout=10.0, return_when=asyncio.FIRST_COMPLETED)
            assert acting.done() or running.done(), "nothing came of it"
            if running.done():
                running.result()
            await acting
        finally:
            running.cancel()
            acting.cancel()
            await asyncio.gather(running, acting, return_exceptions=True)
            worker.seat.close()

    asyncio.run(main())


async def _run(work: Awaitable[None]) -> None:
    await work


def settle(worker: Worker) -> Coroutine[Any, Any, None]:
    return until_async(lambda: worker.settled and worker.welcomes, what="the worker is let in with the token that it keeps")


def test_a_token_in_the_last_third_of_its_life_is_exchanged_and_the_worker_comes_back_with_the_new_one(tmp_path: Path) -> None:
    old = aged("old", 0.7)
    enrolled(tmp_path, old)
    control = Control(old)
    worker = Worker(control, tmp_path)

    async def rotated() -> None:
        await until_async(lambda: worker.welcomes == 2 and worker.settled, what="rotated")

    live(worker, rotated)

    [asked] = control.requests
    assert control.good == {asked["sha256"]: asked["token_id"]}
    assert (worker.hung_up, worker.sent_away) == (1, "")
    assert worker.kept.token.token_id == asked["token_id"]
    assert worker.kept.token.left_s(now().wall) > 0.99 * WEEK_S


def test_a_young_token_stays(tmp_path: Path) -> None:
    young = aged("young", 0.5)
    enrolled(tmp_path, young)
    control = Control(young)
    worker = Worker(control, tmp_path)

    async def nothing_happens() -> None:
        await until_async(lambda: worker.welcomes, what="connected")
        for _ in range(20):
            await asyncio.sleep(0)

    live(worker, nothing_happens)

    assert control.requests == []


def test_workers_of_one_day_do_not_rotate_in_one_moment(tmp_path: Path) -> None:
    enrolled(tmp_path, aged("t", 0.0))
    waits = []
    for chance in (0.0, 0.5, 1.0):
        with CredentialFile(tmp_path, ADDRESS) as seat:
            seat.load()
            made = Rotation(seat, ask=lambda *_: 0, use=lambda _: None, hang_up=lambda _: None, jitter=lambda now=chance: now)
            waits.append(made._wait_s() / WEEK_S)

    assert waits == pytest.approx([2 / 3, 2 / 3 + 0.05, 2 / 3 + 0.1], abs=0.001)


def test_nothing_is_told_to_the_server_before_it_is_on_disk(tmp_path: Path) -> None:
    old = aged("old", 0.9)
    enrolled(tmp_path, old)
    control = Control(old)
    worker = Worker(control, tmp_path)
    on_disk: list[CredentialToken | None] = []

    def answer(params: dict[str, str]) -> Message:
        on_disk.append(worker.kept.pending)
        return control.rotate(worker.shown, params)

    worker.answer = answer
    live(worker, lambda: until_async(lambda: worker.welcomes == 2, what="rotated"))

    [pending] = on_disk
    assert pending is not None
    assert token_sha256(pending.secret) == control.requests[0]["sha256"]


@pytest.mark.parametrize("was_done", [True, False])
def test_when_the_answer_is_lost_the_token_that_is_good_is_found(tmp_path: Path, *, was_done: bool) -> None:
    old = aged("old", 0.9)
    enrolled(tmp_path, old)
    control = Control(old)
    worker = Worker(control, tmp_path)
    lost: list[dict[str, str]] = []

    def answer(params: dict[str, str]) -> Message | None:
        if lost:
            return control.rotate(worker.shown, params)
        lost.append(params)
        if was_done:
            control.rotate(worker.shown, params)
        return None

    worker.answer = answer
    live(worker, lambda: settled_with(worker, lost))

    assert worker.kept.token.token_id == lost[0]["token_id"]
    assert len(control.requests) == (1 if was_done else 2)
    assert worker.sent_away == ""


async def settled_with(worker: Worker, asked: list[dict[str, str]]) -> None:
    await until_async(lambda: asked and worker.settled and worker.kept.token.token_id == asked[0]["token_id"], what="settled")


def test_a_request_that_was_done_after_its_connection_was_lost_counts_too(tmp_path: Path) -> None:
    """The request reached the server, which was slow: meanwhile the worker came back with the old token and asked again."""
    old = aged("old", 0.9)
    enrolled(tmp_path, old)
    control = Control(old)
    worker = Worker(control, tmp_path)
    asked: list[dict[str, str]] = []

    def answer(params: dict[str, str]) -> Message | None:
        asked.append(params)
        if len(asked) == 1:
            return None
        control.rotate(old.secret, asked[0])
        return ErrorMessage(ASKED, "INVALID", "there is another with that id or that secret", {})

    worker.answer = answer
    live(worker, lambda: settled_with(worker, asked))

    assert asked[0] == asked[1]
    assert worker.sent_away == ""


def test_an_id_that_is_somebody_elses_is_changed(tmp_path: Path) -> None:
    old = aged("old", 0.9)
    enrolled(tmp_path, old)
    control = Control(old)
    worker = Worker(control, tmp_path)

    def answer(params: dict[str, str]) -> Message:
        if params == control.requests[0]:
            return ErrorMessage(ASKED, "INVALID", "there is another with that id or that secret", {})
        return control.rotate(worker.shown, params)

    worker.answer = answer
    live(worker, lambda: until_async(lambda: worker.settled and worker.kept.token != old, what="rotated"))

    assert control.requests[0]["token_id"] not in control.good.values()


def test_a_server_that_cannot_is_asked_again(tmp_path: Path) -> None:
    old = aged("old", 0.9)
    enrolled(tmp_path, old)
    control = Control(old)
    worker = Worker(control, tmp_path)

    def answer(params: dict[str, str]) -> Message:
        if len(control.requests) < 4:
            return ErrorMessage(ASKED, "UNAVAILABLE", "the store does not answer", {})
        return control.rotate(worker.shown, params)

    worker.answer = answer
    live(worker, lambda: until_async(lambda: worker.welcomes == 2 and worker.settled, what="rotated"))

    assert len(control.requests) == 4
    assert len({asked["sha256"] for asked in control.requests}) == 1, "one secret, until it is taken"


def test_a_full_disk_keeps_the_old_token_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = aged("old", 0.9)
    enrolled(tmp_path, old)
    control = Control(old)
    worker = Worker(control, tmp_path)
    tries: list[Credential] = []
    save = worker.seat.save

    def full(credential: Credential) -> None:
        tries.append(credential)
        if len(tries) < 3:
            raise OSError(28, "No space left on device")
        save(credential)

    monkeypatch.setattr(worker.seat, "save", full)
    live(worker, lambda: until_async(lambda: worker.welcomes == 2 and worker.settled, what="rotated when there was room"))

    assert len(control.requests) == 1
    assert len(tries) >= 3


def test_a_revoked_worker_is_sent_away_for_the_first_reason(tmp_path: Path) -> None:
    old, pending = aged("old", 0.9), new_token(WEEK_S)
    enrolled(tmp_path, old, pending)
    worker = Worker(Control(), tmp_path)

    live(worker, lambda: until_async(lambda: worker.sent_away, what="sent away"))

    assert worker.sent_away == f"{old.secret} is not known here"
    assert worker.kept.token == old


def test_a_connection_that_came_with_the_old_token_may_end_with_a_refusal(tmp_path: Path) -> None:
    """The server ends those on its own, too: here before the worker has hung up."""
    old = aged("old", 0.9)
    enrolled(tmp_path, old)
    control = Control(old)
    worker = Worker(control, tmp_path)

    def answer(params: dict[str, str]) -> Message:
        asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(worker.refuse, "token old was revoked"))
        return control.rotate(worker.shown, params)

    worker.answer = answer
    live(worker, lambda: until_async(lambda: worker.settled and worker.kept.token != old, what="rotated"))

    assert worker.sent_away == ""


def test_a_server_that_was_restored_from_a_backup_still_knows_the_one_before(tmp_path: Path) -> None:
    old = aged("old", 0.9)
    enrolled(tmp_path, old)
    control = Control(old)
    worker = Worker(control, tmp_path)
    forgotten: list[str] = []

    def answer(params: dict[str, str]) -> Message:
        if forgotten:
            return control.rotate(worker.shown, params)
        forgotten.append(params["token_id"])
        return Reply(ASKED, {"token_id": params["token_id"], "ttl_s": WEEK_S})  # said, and undone by the restore

    worker.answer = answer
    live(
        worker,
        lambda: until_async(
            lambda: worker.settled and worker.kept.token.token_id not in ("old", *forgotten), what="rotated again"
        ),
    )

    assert worker.sent_away == ""


# ---------------------------------------------------------------------------------------------------- killed


@pytest.mark.parametrize("point", ["before pending", "after pending", "after the request", "before the new", "after the new"])
def test_a_worker_that_is_killed_while_it_rotates_gets_in_at_its_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    old = aged("old", 0.9)
    enrolled(tmp_path, old)
    control = Control(old)
    killed = Worker(control, tmp_path)
    save, answer = killed.seat.save, killed.answer

    def dying_save(credential: Credential) -> None:
        when = "pending" if credential.pending is not None else "the new"
        if point == f"before {when}":
            raise Killed
        save(credential)
        if point == f"after {when}":
            raise Killed

    def dying_answer(params: dict[str, str]) -> Message | None:
        done = answer(params)
        if point == "after the request":
            raise Killed
        return done

    monkeypatch.setattr(killed.seat, "save", dying_save)
    killed.answer = dying_answer
    with pytest.raises(Killed):
        live(killed, lambda: until_async(lambda: False, what="it is killed"))

    again = Worker(control, tmp_path)

    async def rotated() -> None:
        is_new = lambda: again.settled and again.kept.token.token_id != old.token_id  # noqa: E731 - the old one is due again
        await until_async(is_new, what="the worker is let in, and its token is exchanged")

    live(again, rotated)

    assert again.sent_away == ""
    assert again.welcomes > 0
    assert again.kept.token.token_id in control.good.values()
