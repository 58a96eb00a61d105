"""Following the logs and the progress of running jobs: a client asks, the worker that has the attempt answers. Pure.

Theory of operation. A client asks for one stream of one job from an offset. The driver reads the job's row, which says who may
see it, whether an attempt runs, and where. If its worker is connected here, the question goes on to it, and its piece of the
log back to the client; if it is connected to another live server, the client gets that server's addresses. In all other cases the
answer is empty and says how the job stands: the client asks again, or reads the rest from the job's result. The broker remembers
only the questions under way, each with a deadline: whatever a worker or a connection does, the client gets an answer.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from tasuki.core import protocol
from tasuki.core.broker.authentication import usable_by
from tasuki.core.broker.events import Command, JobSeen, LogQuestion
from tasuki.core.broker.state import BrokerState, ClientSession, PendingLogRead, WorkerSession
from tasuki.core.job import LEASED, PROGRESS_TEXT_MAX_CHARS, TERMINAL, Job, Progress
from tasuki.core.machine import Now, Send
from tasuki.core.store_messages import Takes
from tasuki.errors import InvalidInput, NotFound, Overloaded

# Questions under way at a time, to one worker and of one client. From half of that on, questions do not wait for new bytes, so
# that they do not keep the next ones waiting.
READS_PER_WORKER = 16
READS_PER_CLIENT = 8
ANSWER_WITHIN_S = 5.0  # beyond the wait; then the client is answered without the worker
READ_LOG_VERSION = 2  # of the protocol


def question_of(params: dict[str, Any]) -> LogQuestion:
    """Return the checked parameters of a request; InvalidInput names the parameter that is wrong."""
    try:
        asked = msgspec.convert(params, LogQuestion)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"logs: {str(error)[:200]}") from None
    if asked.stream not in protocol.LOG_STREAMS:
        raise InvalidInput(f"logs: stream must be stdout, stderr or progress, got {asked.stream[:40]!r}")
    if not 0 <= asked.offset <= protocol.NUMBER_MAX:
        raise InvalidInput(f"logs: offset must be 0 to {protocol.NUMBER_MAX}, got {asked.offset}")
    if not 0 <= asked.attempt <= protocol.NUMBER_MAX:
        raise InvalidInput(f"logs: attempt must be 0 (the current one) or more, got {asked.attempt}")
    if not (math.isfinite(asked.wait_s) and 0.0 <= asked.wait_s <= protocol.LOG_WAIT_MAX_S):
        raise InvalidInput(f"logs: wait_s must be 0 to {protocol.LOG_WAIT_MAX_S:g} seconds, got {asked.wait_s}")
    if not 1 <= asked.max_bytes <= protocol.LOG_PIECE_MAX_BYTES:
        raise InvalidInput(f"logs: max_bytes must be 1 to {protocol.LOG_PIECE_MAX_BYTES}, got {asked.max_bytes}")
    return asked


def checked_progress(told: dict[str, Progress]) -> dict[str, Progress]:
    """Return the progress reports that can be kept; the others are dropped, since nothing is decided by them."""
    return {
        lease_id: Progress(progress.fraction, progress.text[:PROGRESS_TEXT_MAX_CHARS])
        for lease_id, progress in list(told.items())[: protocol.PROGRESS_MAX]
        if 0.0 <= progress.fraction <= 1.0 and progress.text.isprintable()
    }


def job_seen(state: BrokerState, event: JobSeen, now: Now) -> list[Command]:
    """Ask the worker that runs the job, or answer without it; the client may see the job."""
    client = state.sessions.get(event.conn)
    if not isinstance(client, ClientSession):
        return []
    job, asked = event.job, event.question
    of_any_job = asked.stream == protocol.PROGRESS_STREAM
    if not (of_any_job or job.spec.exec or asked.attempt or _may_be_a_command(state, job) or _left_a_log(job)):
        message = f"job {job.job_id!r} has no logs: it is a handler's, or an app's whose program neither runs now nor failed"
        return [Send(event.conn, protocol.error_message(event.msg_id, NotFound(message)))]
    offset = asked.offset if asked.attempt in (0, job.attempt) else 0
    answer = _answer_without_worker(job, asked.stream, offset)
    lease = job.lease
    if lease is None or job.state not in LEASED:
        return [Send(event.conn, protocol.Reply(event.msg_id, answer))]
    worker = state.workers.get(lease.worker_id)
    if worker is None or (worker.incarnation, worker.owner) != (lease.incarnation, lease.owner):
        servers = _servers_of(state, client, lease.worker_id, lease.incarnation)
        return [Send(event.conn, protocol.Reply(event.msg_id, {**answer, "elsewhere": servers} if servers else answer))]
    if worker.version < READ_LOG_VERSION:
        return [Send(event.conn, protocol.Reply(event.msg_id, {**answer, "unsupported": True}))]
    if client.log_reads >= READS_PER_CLIENT:
        message = f"{client.log_reads} questions about logs are open on this connection; wait for their answers"
        return [Send(event.conn, protocol.error_message(event.msg_id, Overloaded(message)))]
    if worker.log_reads >= READS_PER_WORKER:
        return [Send(event.conn, protocol.Reply(event.msg_id, answer))]
    crowded = worker.log_reads >= READS_PER_WORKER // 2 or client.log_reads >= READS_PER_CLIENT // 2
    wait_s = 0.0 if crowded else asked.wait_s
    state.last_question += 1
    question = protocol.ReadLog(state.last_question, lease.lease_id, asked.stream, offset, asked.max_bytes, wait_s)
    deadline = now.monotonic + wait_s + ANSWER_WITHIN_S
    state.log_reads[question.msg_id] = PendingLogRead(event.conn, event.msg_id, worker.conn, question, answer, deadline)
    client.log_reads += 1
    worker.log_reads += 1
    return [Send(worker.conn, question)]


def arrived(state: BrokerState, worker: WorkerSession, piece: protocol.LogPiece) -> list[Command]:
    """Pass a worker's answer on. An answer to no question of ours is dropped; one that makes no sense counts as none."""
    pending = state.log_reads.get(piece.corr_id)
    if pending is None or pending.worker_conn != worker.conn:
        return []
    asked = pending.question
    follows = piece.next == piece.offset + len(piece.data) and piece.cut_bytes == piece.offset - asked.offset
    fits = asked.offset <= piece.offset and len(piece.data) <= asked.max_bytes and piece.next <= protocol.NUMBER_MAX
    return _answer(state, piece.corr_id, piece if follows and fits else None)


def ticked(state: BrokerState, now: Now) -> list[Command]:
    """Answer clients whose worker is late or has left."""
    late = [
        number
        for number, pending in state.log_reads.items()
        if pending.deadline <= now.monotonic or pending.worker_conn not in state.sessions
    ]
    return [command for number in late for command in _answer(state, number, None)]


def _answer(state: BrokerState, number: int, piece: protocol.LogPiece | None) -> list[Command]:
    pending = state.log_reads.pop(number)
    worker, client = state.sessions.get(pending.worker_conn), state.sessions.get(pending.conn)
    if isinstance(worker, WorkerSession):
        worker.log_reads -= 1
    if not isinstance(client, ClientSession):
        return []
    client.log_reads -= 1
    answer = pending.answer
    if piece is not None:
        part = {"offset": piece.offset, "data": piece.data, "next": piece.next, "cut_bytes": piece.cut_bytes}
        answer = {**answer, **part, "end": piece.end, "complete": piece.ended}
    return [Send(pending.conn, protocol.Reply(pending.msg_id, answer))]


def _may_be_a_command(state: BrokerState, job: Job) -> bool:
    """Return whether a job that names no program may run one: the worker of an app can have one for it."""
    worker = state.workers.get(job.lease.worker_id) if job.lease is not None and job.state in LEASED else None
    return worker is not None and worker.offer.takes is Takes.ANY


def _left_a_log(job: Job) -> bool:
    """Return whether a failed job that names no program left a traceback, or an archive with its output."""
    outcome = job.outcome
    if outcome is None or outcome.error_code is None:
        return False
    return outcome.result is not None or outcome.result_ref is not None or "traceback" in outcome.meta


def _answer_without_worker(job: Job, stream: str, offset: int) -> dict[str, Any]:
    """Return the answer with no new bytes and the state of the job."""
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


def _servers_of(state: BrokerState, client: ClientSession, worker_id: str, incarnation: str) -> list[str]:
    """Return the addresses of the server that has this worker, as far as the client can use them."""
    for server_id, worker in state.cluster.workers():
        if worker.worker_id == worker_id and worker.incarnation == incarnation:
            return list(usable_by(client.peer, state.cluster.servers[server_id].addresses))
    return []
