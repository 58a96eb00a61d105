"""Following the logs of running jobs: a client asks, the worker that has the attempt answers. Part of the broker; pure.

Theory of operation. A client asks for one stream of one job from an offset. The driver reads the job's row, which says who may
see it, whether an attempt runs, and where. If its worker is connected here, the question goes on to it, and its piece of the
log back to the client; if it is connected to another live server, the client is told where. In all other cases the answer is
empty and says how the job stands: the client asks again, or reads the rest from the job's result. Nothing is remembered here
but the questions that are under way, each with a deadline: whatever a worker or a connection does, the client gets an answer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from tasuki.core.address import parse_url
from tasuki.core.broker.sessions import ClientSession, WorkerSession
from tasuki.core.job import LEASED, TERMINAL, Job, Progress
from tasuki.core.job import PROGRESS_TEXT_MAX_CHARS as TEXT_MAX_CHARS
from tasuki.core.machine import Now, Send
from tasuki.core.protocol import (
    LOG_PIECE_MAX_BYTES,
    LOG_WAIT_MAX_S,
    PROGRESS_MAX,
    ErrorMessage,
    LogPiece,
    Message,
    ReadLog,
    Reply,
)
from tasuki.core.report_limits import NUMBER_MAX
from tasuki.core.store_messages import Takes
from tasuki.errors import InvalidInput, NotFound, Overloaded, TasukiError

if TYPE_CHECKING:
    from tasuki.core.broker.broker import Broker
    from tasuki.core.broker.events import Command, JobSeen

STREAMS = ("stdout", "stderr")
# Questions under way at a time, to one worker and of one client; from half of that on they do not wait for something new, so that
# whoever asks next is not kept waiting by those who wait.
READS_PER_WORKER = 16
READS_PER_CLIENT = 8
ANSWER_WITHIN_S = 5.0  # beyond the wait; then the client is answered without the worker
READ_LOG_VERSION = 2  # of the protocol


class LogQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of the request `logs`, checked."""

    job_id: str
    stream: str = "stdout"
    offset: int = 0
    attempt: int = 0
    """The one that the offset is of; if the job has another now, that is read from its start. 0: the current one."""
    wait_s: float = 0.0
    max_bytes: int = LOG_PIECE_MAX_BYTES


class _Pending(msgspec.Struct):
    """A question that a worker has."""

    conn: int
    msg_id: int
    worker_conn: int
    question: ReadLog
    answer: dict[str, Any]
    """What the client is told if the worker says nothing."""
    deadline: float


def question_of(params: dict[str, Any]) -> LogQuestion:
    """What a client asks for, or InvalidInput with the parameter that is wrong."""
    try:
        asked = msgspec.convert(params, LogQuestion)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"logs: {str(error)[:200]}") from None
    if asked.stream not in STREAMS:
        raise InvalidInput(f"logs: stream must be stdout or stderr, got {asked.stream[:40]!r}")
    if not 0 <= asked.offset <= NUMBER_MAX:
        raise InvalidInput(f"logs: offset must be 0 to {NUMBER_MAX}, got {asked.offset}")
    if not 0 <= asked.attempt <= NUMBER_MAX:
        raise InvalidInput(f"logs: attempt must be 0 (the current one) or more, got {asked.attempt}")
    if not (math.isfinite(asked.wait_s) and 0.0 <= asked.wait_s <= LOG_WAIT_MAX_S):
        raise InvalidInput(f"logs: wait_s must be 0 to {LOG_WAIT_MAX_S:g} seconds, got {asked.wait_s}")
    if not 1 <= asked.max_bytes <= LOG_PIECE_MAX_BYTES:
        raise InvalidInput(f"logs: max_bytes must be 1 to {LOG_PIECE_MAX_BYTES}, got {asked.max_bytes}")
    return asked


def checked_progress(told: dict[str, Progress]) -> dict[str, Progress]:
    """What a worker tells of its attempts, as far as it can be kept; the rest is left out, since it decides nothing."""
    return {
        lease_id: Progress(progress.fraction, progress.text[:TEXT_MAX_CHARS])
        for lease_id, progress in list(told.items())[:PROGRESS_MAX]
        if 0.0 <= progress.fraction <= 1.0 and progress.text.isprintable()
    }


class LogReads:
    """The questions of one server's clients that are at workers."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self._last_id = 0

    # ------------------------------------------------------------------------------------------------ asking

    def seen(self, broker: Broker, event: JobSeen, now: Now) -> list[Command]:
        """The job's row was read, for a client that may see it."""
        client = broker.sessions.get(event.conn)
        if not isinstance(client, ClientSession):
            return []
        job, asked = event.job, event.question
        if not (job.spec.exec or asked.attempt or _may_be_a_command(broker, job)):
            message = f"job {job.job_id!r} has no logs: it is a handler's, or an app's whose program does not run now"
            return [_refusal(event, NotFound(message))]
        offset = asked.offset if asked.attempt in (0, job.attempt) else 0
        answer = _standing(job, asked.stream, offset)
        lease = job.lease
        if lease is None or job.state not in LEASED:
            return [Send(event.conn, Reply(event.msg_id, answer))]
        worker = broker.workers.get(lease.worker_id)
        if worker is None or worker.incarnation != lease.incarnation:
            where = _elsewhere(broker, client, lease.worker_id, lease.incarnation)
            return [Send(event.conn, Reply(event.msg_id, {**answer, "elsewhere": where} if where else answer))]
        if worker.version < READ_LOG_VERSION:
            return [Send(event.conn, Reply(event.msg_id, {**answer, "unsupported": True}))]
        if client.log_reads >= READS_PER_CLIENT:
            message = f"{client.log_reads} questions about logs are open on this connection; wait for their answers"
            return [_refusal(event, Overloaded(message))]
        if worker.log_reads >= READS_PER_WORKER:
            return [Send(event.conn, Reply(event.msg_id, answer))]
        crowded = worker.log_reads >= READS_PER_WORKER // 2 or client.log_reads >= READS_PER_CLIENT // 2
        wait_s = 0.0 if crowded else asked.wait_s
        self._last_id += 1
        question = ReadLog(self._last_id, lease.lease_id, asked.stream, offset, asked.max_bytes, wait_s)
        deadline = now.monotonic + wait_s + ANSWER_WITHIN_S
        self._pending[self._last_id] = _Pending(event.conn, event.msg_id, worker.conn, question, answer, deadline)
        client.log_reads += 1
        worker.log_reads += 1
        return [Send(worker.conn, question)]

    # ------------------------------------------------------------------------------------------------ answers

    def arrived(self, broker: Broker, worker: WorkerSession, piece: LogPiece) -> list[Command]:
        """A worker answers. What it was not asked, or what makes no sense, tells nobody anything."""
        pending = self._pending.get(piece.corr_id)
        if pending is None or pending.worker_conn != worker.conn:
            return []
        return self._answer(broker, piece.corr_id, piece if _makes_sense(piece, pending.question) else None)

    def ticked(self, broker: Broker, now: Now) -> list[Command]:
        """Whoever waited long enough is answered without the worker, and so is everybody whose worker has left."""
        late = [
            number
            for number, pending in self._pending.items()
            if pending.deadline <= now.monotonic or pending.worker_conn not in broker.sessions
        ]
        return [command for number in late for command in self._answer(broker, number, None)]

    def _answer(self, broker: Broker, number: int, piece: LogPiece | None) -> list[Command]:
        pending = self._pending.pop(number)
        worker, client = broker.sessions.get(pending.worker_conn), broker.sessions.get(pending.conn)
        if isinstance(worker, WorkerSession):
            worker.log_reads -= 1
        if not isinstance(client, ClientSession):
            return []
        client.log_reads -= 1
        answer = pending.answer
        if piece is not None:
            part = {"offset": piece.offset, "data": piece.data, "next": piece.next, "cut_bytes": piece.cut_bytes}
            answer = {**answer, **part, "end": piece.end, "complete": piece.ended}
        return [Send(pending.conn, Reply(pending.msg_id, answer))]


def _may_be_a_command(broker: Broker, job: Job) -> bool:
    """It names no program. But a worker of an app may have one for it, whose logs can be read while it runs."""
    worker = broker.workers.get(job.lease.worker_id) if job.lease is not None and job.state in LEASED else None
    return worker is not None and worker.takes is Takes.ANY


def _standing(job: Job, stream: str, offset: int) -> dict[str, Any]:
    """The answer without a worker: nothing new, and how the job stands."""
    progress = job.progress
    return {
        "stream": stream,
        "offset": offset,
        "data": b"",
        "next": offset,
        "cut_bytes": 0,
        "ended": job.state in TERMINAL,
        "state": str(job.state),
        "attempt": job.attempt,
        "progress": progress.fraction if progress is not None else None,
        "progress_text": progress.text if progress is not None else "",
    }


def _elsewhere(broker: Broker, client: ClientSession, worker_id: str, incarnation: str) -> list[str]:
    """Where the server is that has this worker. A loopback address means something only on the machine itself."""
    for server_id, worker in broker.fellows.workers():
        if worker.worker_id == worker_id and worker.incarnation == incarnation:
            addresses = broker.fellows.servers[server_id].addresses
            return [url for url in addresses if client.peer.local or not parse_url(url)[0].loopback]
    return []


def _makes_sense(piece: LogPiece, asked: ReadLog) -> bool:
    follows = piece.next == piece.offset + len(piece.data) and piece.cut_bytes == piece.offset - asked.offset
    return follows and asked.offset <= piece.offset and len(piece.data) <= asked.max_bytes and piece.next <= NUMBER_MAX


def _refusal(event: JobSeen, error: TasukiError) -> Send:
    message: Message = ErrorMessage(event.msg_id, error.code, error.message, error.details())
    return Send(event.conn, message)
