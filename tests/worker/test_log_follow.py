"""Followers of a running attempt's logs, as the worker serves them."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tasuki.core.job import Progress
from tasuki.core.protocol import LOG_PIECE_MAX_BYTES, LogPiece, ReadLog
from tasuki.worker import logs
from tasuki.worker.attempt import StopReason
from tasuki.worker.logs import PROGRESS_KEPT_BYTES, WAITING_MAX, CappedLog, LogCaps, LogFollow, LogRead, ProgressLog
from tasuki.worker.runner import CommandRunner
from tests.support.waiting import until_async
from tests.worker.runs import run, runner_in, shell, text_of

DEADLINE_S = 25.0


class Desk:
    """A worker's logs, and what was sent to the server."""

    def __init__(self, tmp_path: Path) -> None:
        self.sent: list[LogPiece] = []
        self.tails = LogFollow(self.sent.append)
        self.log = CappedLog(tmp_path / "stdout", LogCaps(head_bytes=100, tail_bytes=100))

    def write(self, data: bytes) -> None:
        os.write(self.log.descriptor, data)

    def ask(self, msg_id: int = 1, *, lease_id: str = "lease", stream: str = "stdout", **fields: object) -> None:
        self.tails.ask(ReadLog(msg_id, lease_id, stream, **fields))  # type: ignore[arg-type]

    async def answered(self, count: int = 1) -> list[LogPiece]:
        await until_async(lambda: len(self.sent) >= count, what=f"{count} answers")
        return self.sent


def play(tmp_path: Path, scenario: Callable[[Desk], Awaitable[None]]) -> list[LogPiece]:
    desk = Desk(tmp_path)

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            with desk.tails.of("lease", {"stdout": desk.log}):
                await scenario(desk)

    asyncio.run(main())
    return desk.sent


def test_what_is_there_is_answered_at_once(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        desk.write(b"hello")
        desk.ask(offset=1, max_bytes=3, wait_s=20.0)

    assert play(tmp_path, scenario) == [LogPiece(1, 1, b"ell", 4, 5)]


def test_without_a_wait_nothing_new_is_an_answer(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        desk.write(b"hello")
        desk.ask(offset=5)

    assert play(tmp_path, scenario) == [LogPiece(1, 5, b"", 5, 5)]


def test_a_question_waits_for_something_new(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        desk.ask(wait_s=20.0)
        assert not desk.sent
        desk.write(b"late")
        await desk.answered()

    assert play(tmp_path, scenario) == [LogPiece(1, 0, b"late", 4, 4)]


def test_a_wait_ends(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        desk.ask(wait_s=0.2)
        await desk.answered()

    assert play(tmp_path, scenario) == [LogPiece(1, 0, b"", 0, 0)]


def test_the_end_of_the_attempt_is_told_with_the_rest(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        desk.ask(wait_s=20.0)
        desk.write(b"last words")

    assert play(tmp_path, scenario) == [LogPiece(1, 0, b"last words", 10, 10, ended=True)]


def test_of_an_attempt_that_is_not_here_nothing_comes(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        desk.ask(lease_id="another", offset=7, wait_s=20.0)
        desk.ask(2, stream="stdlog", wait_s=20.0)

    assert play(tmp_path, scenario) == [LogPiece(1, 7, b"", 7, 7, ended=True), LogPiece(2, 0, b"", 0, 0, ended=True)]


def test_what_was_cut_is_jumped_over_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasuki.worker.logs.SLACK_BYTES", 0)

    async def scenario(desk: Desk) -> None:
        desk.write(b"x" * 900 + b"y" * 100)
        desk.log.trim()
        desk.ask(offset=100, wait_s=20.0)

    assert play(tmp_path, scenario) == [LogPiece(1, 900, b"y" * 100, 1000, 1000, 800)]


@pytest.mark.parametrize(
    "fields",
    [{"offset": -5}, {"max_bytes": -1}, {"max_bytes": 1 << 40}, {"wait_s": math.nan}, {"wait_s": -1.0}, {"wait_s": 1e9}],
)
def test_impossible_questions_get_bounded_answers(tmp_path: Path, fields: dict[str, object]) -> None:
    async def scenario(desk: Desk) -> None:
        desk.write(b"z" * (2 * LOG_PIECE_MAX_BYTES))
        desk.ask(**{"offset": 0, **fields})

    [piece] = play(tmp_path, scenario)
    assert len(piece.data) <= LOG_PIECE_MAX_BYTES


def test_only_so_many_wait(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        for msg_id in range(WAITING_MAX + 1):
            desk.ask(msg_id, wait_s=20.0)
        assert [piece.corr_id for piece in desk.sent] == [WAITING_MAX]

    play(tmp_path, scenario)


def test_questions_go_with_their_connection(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        desk.ask(wait_s=20.0)
        desk.tails.forget()
        desk.write(b"for nobody")
        desk.ask(2)
        await desk.answered()

    assert [piece.corr_id for piece in play(tmp_path, scenario)] == [2]


def test_a_log_that_cannot_be_read_has_ended(tmp_path: Path) -> None:
    class Broken:
        def read(self, offset: int, max_bytes: int) -> LogRead:
            raise OSError(5, "Input/output error")

        def size_bytes(self) -> int:
            return 100

    sent: list[LogPiece] = []
    tails = logs.LogFollow(sent.append)
    with tails.of("lease", {"stdout": Broken()}):
        tails.ask(ReadLog(1, "lease", "stdout", 10, wait_s=20.0))

    assert sent == [LogPiece(1, 10, b"", 10, 10, ended=True)]


def test_a_log_that_cannot_be_read_or_cut_does_not_change_the_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> LogRead:
        raise OSError(errno.EIO, "Input/output error")

    async def asked(runner: CommandRunner, stop: asyncio.Future[StopReason]) -> None:
        await until_async((tmp_path / "started").exists, what="the job runs")
        tails.ask(ReadLog(1, "lease-1", "stdout", wait_s=20.0))
        await until_async(lambda: cut, what="the log was to be cut")
        (tmp_path / "go").touch()

    sent: list[LogPiece] = []
    cut: list[object] = []
    tails = LogFollow(sent.append)
    monkeypatch.setattr(CappedLog, "read", broken)
    monkeypatch.setattr(CappedLog, "due", lambda log: True)
    monkeypatch.setattr(CappedLog, "trim", lambda log: (cut.append(log), broken()))
    script = f"echo hello; touch {tmp_path}/started; until [ -e {tmp_path}/go ]; do sleep 0.02; done"

    result = run(runner_in(tmp_path, log_follow=tails), shell(script), asked)

    assert (result.outcome.exit_code, result.outcome.error_code) == (0, None)
    assert text_of(result) == "[tasuki: this log could not be read: Input/output error]\n"
    assert [piece.ended for piece in sent] == [True]


# ---------------------------------------------------------------------------------------------------- progress


def test_progress_is_a_log_of_its_latest_reports() -> None:
    log = ProgressLog()
    for number in range(2000):
        log.note(Progress(number / 2000, "step"))

    read = log.read(0, LOG_PIECE_MAX_BYTES)

    assert len(read.data) <= PROGRESS_KEPT_BYTES
    assert read.offset + len(read.data) == log.size_bytes()
    lines = [json.loads(line) for line in read.data.splitlines()]
    assert lines[-1] == {"fraction": 1999 / 2000, "text": "step"}
    assert [line["fraction"] for line in lines] == [number / 2000 for number in range(2000 - len(lines), 2000)]


def test_a_follower_of_progress_waits_for_the_next_report_and_gets_the_last_one_at_the_end() -> None:
    async def main() -> list[LogPiece]:
        sent: list[LogPiece] = []
        follow = LogFollow(sent.append)
        log = follow.progress_of("lease")
        follow.ask(ReadLog(1, "lease", "progress", wait_s=20.0))
        assert sent == []
        log.note(Progress(0.5, "half"))
        await until_async(lambda: len(sent) == 1, what="the first report")
        follow.ask(ReadLog(2, "lease", "progress", offset=sent[0].next, wait_s=20.0))
        log.note(Progress(1.0))
        assert follow.end_progress("lease") == Progress(1.0)
        assert follow.end_progress("lease") is None
        follow.ask(ReadLog(3, "lease", "progress", offset=sent[1].next, wait_s=20.0))  # of an attempt that is over
        return sent

    first, last, none = asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    assert (json.loads(first.data)["fraction"], json.loads(last.data)["fraction"], last.ended) == (0.5, 1.0, True)
    assert (none.data, none.ended) == (b"", True)
