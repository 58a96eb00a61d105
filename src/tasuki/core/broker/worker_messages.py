"""What workers tell a broker: credit, starts, ends, heartbeats. Part of the broker; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tasuki.core.broker import client_messages, enrolment, handshake
from tasuki.core.broker.events import BlobPiece, SendBlob
from tasuki.core.broker.log_reads import checked_progress
from tasuki.core.broker.sessions import Delivery, TransferSession, WorkerSession
from tasuki.core.broker.turn_builder import Slice
from tasuki.core.job import Progress
from tasuki.core.machine import Now, Send
from tasuki.core.protocol import (
    BlobGet,
    BlobPut,
    Chunk,
    Claim,
    GiveCredit,
    Heartbeat,
    HeartbeatAnswer,
    JobsFinished,
    JobsReleased,
    JobsStarted,
    LogPiece,
    Message,
    Reply,
    Request,
    Subscribe,
)
from tasuki.core.report_limits import check_attempts, storable
from tasuki.core.store_messages import HeldLease, Report
from tasuki.errors import ProtocolError

if TYPE_CHECKING:
    from tasuki.core.broker.broker import Broker
    from tasuki.core.broker.events import Command

NO_PROGRESS: Mapping[str, Progress] = {}


def received(broker: Broker, worker: WorkerSession, message: Message, now: Now) -> list[Command]:
    draft = broker.draft
    match message:
        case JobsFinished():
            _finished(broker, worker, message)
        case GiveCredit():
            worker.account.give(message.credit)
            broker.look(worker, backlog=True)
        case JobsStarted():
            start = len(draft.start)
            draft.start.extend(_held(worker, message.claims))
            draft.start_routes.append(Slice(worker.conn, start, len(draft.start)))
        case Heartbeat():
            if worker.resuming:
                _resume(broker, worker, message.claims)
            start = len(draft.renew)
            draft.renew.extend(_held(worker, message.claims, checked_progress(message.progress)))
            draft.renew_routes.append(Slice(worker.conn, start, len(draft.renew), message.msg_id))
        case JobsReleased():
            _released(broker, worker, message)
        case Subscribe():
            assert worker.identity is not None
            broker.change_patterns(worker, handshake.checked_patterns(worker.identity, message.patterns))
            return [Send(worker.conn, Reply(message.msg_id, {"patterns": list(worker.patterns)}))]
        case BlobPut() | Chunk() | BlobGet():
            return transferred(broker, worker, message)
        case Request():
            assert worker.identity is not None
            return enrolment.rotate(broker, worker.conn, message, worker.identity, now)
        case LogPiece():
            return broker.logs.arrived(broker, worker, message)
        case _:
            raise ProtocolError(f"a worker may not send {type(message).__name__}")
    return []


def transferred(broker: Broker, worker: WorkerSession | TransferSession, message: Message) -> list[Command]:
    """Large things, on the worker's own connection or on one beside it."""
    assert worker.identity is not None
    match message:
        case BlobPut():
            return client_messages.put_blob(broker, worker.conn, message)
        case Chunk():
            return [BlobPiece(worker.conn, message)]
        case BlobGet():
            return [SendBlob(worker.conn, message, worker.identity, worker.worker_id, worker.incarnation)]
        case Heartbeat():
            return [Send(worker.conn, HeartbeatAnswer(message.msg_id))]
        case _:
            raise ProtocolError(f"a connection for blobs may not send {type(message).__name__}")


def _finished(broker: Broker, worker: WorkerSession, message: JobsFinished) -> None:
    draft, worker_id, deliveries = broker.draft, worker.worker_id, worker.deliveries
    finish, fail = draft.finish, draft.fail
    finish_start, fail_start = len(finish), len(fail)
    check_attempts(message.endings)
    known, reading, size_bytes = 0, worker.reading, 0
    for ending in message.endings:
        known += deliveries.pop(ending.lease_id, None) is not None
        if reading:
            worker.settled.add(ending.lease_id)
        outcome = storable(ending)
        size_bytes += len(outcome.result or b"")
        report = Report(ending.job_id, worker_id, ending.lease_id, ending.attempt, outcome, ending.started_at)
        (finish if outcome.error_code is None else fail).append(report)
    worker.account.ended(known)
    draft.size_bytes += size_bytes
    if len(finish) > finish_start:
        draft.finish_routes.append(Slice(worker.conn, finish_start, len(finish)))
    if len(fail) > fail_start:
        draft.fail_routes.append(Slice(worker.conn, fail_start, len(fail)))


def _released(broker: Broker, worker: WorkerSession, message: JobsReleased) -> None:
    known = [worker.deliveries.pop(claim.lease_id, None) for claim in message.claims]
    worker.account.ended(len(known) - known.count(None))
    if worker.reading:
        worker.settled.update(claim.lease_id for claim in message.claims)
    broker.draft.release.extend(_held(worker, message.claims))
    broker.look_everywhere()


def _resume(broker: Broker, worker: WorkerSession, claims: list[Claim]) -> None:
    """What it names it has. What the store has for it besides never reached it, or was given back unheard."""
    worker.resuming = False
    for claim in claims:
        worker.deliveries.setdefault(claim.lease_id, Delivery(claim, worker.heard_at, acked=True))
    worker.account.running = len(worker.deliveries)
    broker.read_back(worker)


def _held(worker: WorkerSession, claims: list[Claim], progress: Mapping[str, Progress] = NO_PROGRESS) -> list[HeldLease]:
    check_attempts(claims)
    held = []
    worker_id, incarnation, ttl_s = worker.worker_id, worker.incarnation, worker.ttl_s
    for claim in claims:
        lease_id = claim.lease_id
        delivery = worker.deliveries.get(lease_id)
        if delivery is not None:
            delivery.acked = True
        held.append(HeldLease(claim.job_id, worker_id, incarnation, lease_id, claim.attempt, ttl_s, progress.get(lease_id)))
    return held
