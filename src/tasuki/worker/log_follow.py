"""What followers read of the logs of running attempts. Answers questions; sends nothing by itself, and changes nothing.

A question names an offset in one stream. If there is something from there on it is answered at once; else it waits, as long as
it was told to, and one timer looks at the logs of all that wait. No follower has a thread or a buffer here: what it has not
asked for yet lies in the file. A log that cannot be read is answered as one that has ended: what is kept of it comes with the
result.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from tasuki.core.protocol import LOG_PIECE_MAX_BYTES, LOG_WAIT_MAX_S, LogPiece, ReadLog
from tasuki.worker.logs import ReadableLog

LOOK_S = 0.1
CUT_S = 1.0
WAITING_MAX = 64  # questions of one server, which itself asks fewer at a time

logger = logging.getLogger(__name__)


class _Waiting(msgspec.Struct):
    question: ReadLog
    until: float


class LogFollow:
    """The logs of all attempts of one worker. `send` reaches the server that asked, if it is still there. One event loop."""

    def __init__(self, send: Callable[[LogPiece], None]) -> None:
        self._send = send
        self._logs: dict[str, Mapping[str, ReadableLog]] = {}
        self._waiting: list[_Waiting] = []
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def of(self, lease_id: str, logs: Mapping[str, ReadableLog]) -> Iterator[None]:
        """These can be read while the block lasts; at its end whoever waits gets the rest, or hears that there is none."""
        self._logs[lease_id] = logs
        try:
            yield
        finally:
            waiting = [one for one in self._waiting if one.question.lease_id == lease_id]
            self._waiting = [one for one in self._waiting if one.question.lease_id != lease_id]
            for one in waiting:
                self._send(self._answer(one.question, over=True))
            self._logs.pop(lease_id, None)

    def ask(self, question: ReadLog) -> None:
        """Answer now, or when there is something, but not later than the question says."""
        piece = self._answer(question)
        wait_s = question.wait_s if 0.0 < question.wait_s <= LOG_WAIT_MAX_S else 0.0
        if piece.end > question.offset:  # there is something, but it is being cut just now
            wait_s = max(wait_s, CUT_S)
        if piece.data or piece.ended or not wait_s or len(self._waiting) >= WAITING_MAX:
            self._send(piece)
            return
        self._waiting.append(_Waiting(question, asyncio.get_running_loop().time() + wait_s))
        self._look_soon()

    def forget(self) -> None:
        """The connection is gone, and with it all questions."""
        self._waiting.clear()

    def _look_soon(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            piece = self._answer(one.question)
            if piece.data or piece.ended or now >= one.until:
                self._send(piece)
            else:
                self._waiting.append(one)
        self._look_soon()

    def _answer(self, question: ReadLog, *, over: bool = False) -> LogPiece:
        log = self._logs.get(question.lease_id, {}).get(question.stream)
        offset = question.offset
        if log is None or offset < 0:
            return LogPiece(question.msg_id, offset, b"", offset, offset, ended=True)
        try:
            start, data = log.read(offset, max(1, min(question.max_bytes, LOG_PIECE_MAX_BYTES)))
            end = log.size_bytes()
        except OSError as error:
            logger.warning("the %s of lease %s cannot be read: %s", question.stream, question.lease_id, error)
            return LogPiece(question.msg_id, offset, b"", offset, offset, ended=True)
        following = start + len(data)
        if not data:  # nothing new, so nothing is known to be missing either
            start = following = offset
        return LogPiece(question.msg_id, start, data, following, end, start - offset, over and following >= end)
