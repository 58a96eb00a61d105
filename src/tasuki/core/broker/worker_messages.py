"""Conversations with workers: credit and leases, deliveries, starts, heartbeats, reports. Pure.

There is no queue of jobs here: when a worker has credit and something may be ready, the next turn asks the store for it, in the
same transaction that stores new jobs. Each conversation stands together: the function that asks the store, and below it the
function that gets the answers after the commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

from msgspec.structs import replace

from tasuki.core import protocol
from tasuki.core.apps import is_hash_of_all
from tasuki.core.broker import authentication, caches, log_reads, publish_subscribe
from tasuki.core.broker.client_messages import ask_ends, transferred
from tasuki.core.broker.events import Command, LogFenced
from tasuki.core.broker.routes import QUEUE_MAX
from tasuki.core.broker.state import CHOICE_MIN, Account, BrokerState, Delivery, WorkerSession
from tasuki.core.broker.turn_builder import REPORTED_PER_TURN, OnAnswers, TurnEffects
from tasuki.core.job import EMPTY_SHA256, TERMINAL, OnDisconnect, Outcome, Progress
from tasuki.core.lifecycle import LEASE_MARGIN_S
from tasuki.core.machine import Now, Send
from tasuki.core.store_messages import (
    Answers,
    ChosenJob,
    Grant,
    HeldLease,
    LeaseRequest,
    LeaseStatus,
    Report,
    ReportAnswer,
    ReportStatus,
    Submitted,
    Turn,
    kind_of,
)
from tasuki.errors import InvalidInput, ProtocolError, TasukiError, quoted

NOT_HELD = "the lease is not held, or no longer; the job may have another one, or none"  # of jobs of others: no more than this
PATTERNS_PER_TURN = 2_000  # that are looked for as a whole: a seek each, some 10 ms
LEASE_BATCH_MAX = 512  # jobs of one lease request: bounds a turn, and with it the wait of everybody else
REDELIVER_AFTER_S = 2.0  # first wait for a sign of an assignment; doubles each time
REDELIVER_MAX = 4
SILENT_SHARE = 2 / 3  # of the ttl; a worker beats every third of it
NO_PROGRESS: Mapping[str, Progress] = {}


def received(state: BrokerState, worker: WorkerSession, message: protocol.Message, now: Now) -> list[Command]:
    """Take one message of a worker."""
    match message:
        case protocol.JobsFinished():
            _finished(state, worker, message, now)
        case protocol.GiveCredit():
            worker.account.give(message.credit)
            if not worker.addressed and message.credit > 0:
                worker.addressed = True
                state.note_live_workers()
            state.look(worker, backlog=True)
        case protocol.JobsStarted():
            if message.claims:
                held, paced = _held(state, worker, message.claims)
                for claim in message.claims:
                    if (delivery := worker.deliveries.get(claim.lease_id)) is not None:
                        delivery.begun = True
                _ask(state, worker, "start", held, partial(_renewed, state, worker.conn, 0, held, ()), paced)
        case protocol.Heartbeat():
            withheld = _withheld(worker, message.claims) if worker.overdue else ()
            claims = [claim for claim in message.claims if claim.lease_id not in withheld] if withheld else message.claims
            held, paced = _held(state, worker, claims, log_reads.checked_progress(message.progress))
            _ask(state, worker, "renew", held, partial(_renewed, state, worker.conn, message.msg_id, held, withheld), paced)
            worker.cpu = worker.cpu if message.cpu is None else message.cpu
            if message.held is not None:
                worker.held = message.held
            if worker.resuming:
                _resume(state, worker, message.claims, paced)
            if state.has_news(worker):  # what came while it was silent
                state.look(worker, backlog=True)
        case protocol.JobsReleased():
            _give_back(state, worker, message)
        case protocol.Subscribe():
            assert worker.identity is not None
            state.change_patterns(worker, authentication.checked_patterns(worker.identity, message.patterns))
            return [Send(worker.conn, protocol.Reply(message.msg_id, {"patterns": list(worker.patterns)}))]
        case protocol.BlobPut() | protocol.Chunk() | protocol.BlobGet():
            return transferred(state, worker, message)
        case protocol.PublishMessages():
            return publish_subscribe.publish(state, worker, message)
        case protocol.Request():
            if message.verb in publish_subscribe.VERBS:
                return publish_subscribe.request(state, worker, message)
            assert worker.identity is not None
            return authentication.rotate(state, worker.conn, message, worker.identity, now)
        case protocol.LogPiece():
            return log_reads.arrived(state, worker, message)
        case protocol.CacheAck():
            return caches.acknowledged(state, worker, message)
        case _:
            raise ProtocolError(f"a worker may not send {type(message).__name__}")
    return []


def _is_paced(state: BrokerState, worker: WorkerSession, known: int, shown: int) -> bool:
    """Return whether a message goes to the store in parts: most of the leases that it shows were not given to its session, or
    the next turn has enough of its owner.

    Some of an honest worker's are not: they were given to an earlier session, or their reports are under way.
    """
    return 2 * known < shown or state.builder.by_owner.get(worker.owner, 0) + shown > REPORTED_PER_TURN


def _ask(
    state: BrokerState,
    worker: WorkerSession,
    verb: str,
    items: Sequence[object],
    reply: OnAnswers,
    paced: bool,
    size_bytes: int = 0,
) -> None:
    if paced:
        state.paced.add(worker.owner, verb, items, reply, size_bytes)
    else:
        state.builder.ask(verb, items, reply, None, worker.owner, size_bytes)


# ---------------------------------------------------------------------------------------------------- reports


def _finished(state: BrokerState, worker: WorkerSession, message: protocol.JobsFinished, now: Now) -> None:
    protocol.check_attempts(message.endings)
    worker_id, owner, deliveries = worker.worker_id, worker.owner, worker.deliveries
    succeeded: list[Report] = []
    failed: list[Report] = []
    known, reading, size_bytes = 0, worker.reading, 0
    for ending in message.endings:
        delivery = deliveries.pop(ending.lease_id, None)
        known += delivery is not None
        if reading:
            worker.settled.add(ending.lease_id)
        outcome = protocol.storable(ending)
        if outcome.result is not None:
            outcome = _hashed(outcome)
            size_bytes += len(outcome.result or b"")
        started_at = ending.started_at
        if started_at is not None:  # the word of another clock: not before the attempt was granted, and not after now
            granted_at = now.wall - (now.monotonic - delivery.sent_at) if delivery is not None else 0.0
            if not granted_at <= started_at <= now.wall:
                started_at = granted_at if started_at < granted_at else now.wall
        report = Report(ending.job_id, worker_id, ending.lease_id, ending.attempt, outcome, started_at, owner)
        (succeeded if outcome.error_code is None else failed).append(report)
    worker.account.ended(known)
    paced = _is_paced(state, worker, known, len(message.endings))
    for verb, reports in (("finish", succeeded), ("fail", failed)):
        if reports:
            _ask(state, worker, verb, reports, partial(_reported, state, worker.conn, reports), paced, size_bytes)
            size_bytes = 0  # counted


def _hashed(outcome: Outcome) -> Outcome:
    """Return an outcome whose `result_sha256` is the hash of its inline result; a failure if it says another one."""
    sha256 = hashlib.sha256(outcome.result).hexdigest() if outcome.result else EMPTY_SHA256
    if outcome.result_sha256 == sha256:
        return outcome
    if outcome.result_sha256 is None:
        return replace(outcome, result_sha256=sha256)
    if is_hash_of_all(outcome):
        return outcome
    return protocol.unstorable(InvalidInput(f"result_sha256 is {quoted(outcome.result_sha256)}, but its result has {sha256}"))


def _reported(
    state: BrokerState, conn: int, reports: Sequence[Report], answers: Sequence[ReportAnswer], effects: TurnEffects
) -> None:
    """Tell the worker what was recorded, and the clients how their jobs ended."""
    recorded: list[str] = []
    fenced: list[tuple[str, str]] = []
    watchers, wall, unwatched = state.watchers, effects.now.wall, state.cluster.ended
    for report, answer in zip(reports, answers, strict=True):
        if answer.answer is ReportStatus.FENCED:
            fenced.append((report.lease_id, NOT_HELD))
            effects.commands.append(LogFenced(conn, report.job_id, answer.reason))
            continue
        if answer.answer is ReportStatus.BLOB_MISSING:
            # The result was never brought: that is a failure of the attempt, which the next turn records.
            missing = [replace(report, outcome=protocol.not_uploaded(report.outcome))]
            state.builder.ask("fail", missing, partial(_reported, state, conn, missing))
            continue
        recorded.append(report.lease_id)
        job_state = answer.state
        if answer.answer is ReportStatus.REPEATED:  # later events may have ended the job otherwise: the row tells
            ask_ends(state, [report.job_id])
        elif job_state in TERMINAL:
            if report.job_id in watchers:
                generation = state.generations.get(report.job_id, 0)
                state.notify(
                    protocol.JobResult(report.job_id, job_state, report.attempt, report.outcome, wall, generation), effects
                )
            else:
                unwatched.append(report.job_id)
    if conn in state.sessions:
        effects.send(conn, protocol.JobsRecorded(recorded, fenced))


# ---------------------------------------------------------------------------------------------------- starts and heartbeats


def _held(
    state: BrokerState, worker: WorkerSession, claims: list[protocol.Claim], progress: Mapping[str, Progress] = NO_PROGRESS
) -> tuple[list[HeldLease], bool]:
    """Return the leases that the worker shows, and whether they are asked in parts; a shown lease has reached it."""
    protocol.check_attempts(claims)
    held = []
    known = 0
    worker_id, incarnation, owner, ttl_s = worker.worker_id, worker.incarnation, worker.owner, worker.ttl_s
    for claim in claims:
        lease_id = claim.lease_id
        delivery = worker.deliveries.get(lease_id)
        if delivery is not None:
            delivery.acked, delivery.shown_at = True, worker.heard_at
            known += 1
        told = progress.get(lease_id)
        if told is not None and delivery is not None:
            delivery.begun = True
        held.append(HeldLease(claim.job_id, worker_id, incarnation, lease_id, claim.attempt, ttl_s, told, owner))
    return held, _is_paced(state, worker, known, len(claims))


def _renewed(
    state: BrokerState,
    conn: int,
    msg_id: int,
    held: list[HeldLease],
    withheld: Collection[str],
    statuses: Sequence[LeaseStatus],
    effects: TurnEffects,
) -> None:
    """Tell the worker which of its leases are lost or to be canceled; after a start only if there are any."""
    session = state.sessions.get(conn)
    if session is None:
        return
    if msg_id and isinstance(session, WorkerSession):
        session.renewed_at = effects.now.monotonic
    cancel, lost = [], list(withheld)
    for claim, status in zip(held, statuses, strict=True):
        if status is LeaseStatus.CANCEL:
            cancel.append(claim.lease_id)
        elif status is LeaseStatus.LOST:
            lost.append(claim.lease_id)
            if isinstance(session, WorkerSession) and session.deliveries.pop(claim.lease_id, None) is not None:
                session.account.ended()
    if msg_id or cancel or lost:
        servers = authentication.new_servers(state, session) if msg_id else ()
        effects.send(conn, protocol.HeartbeatAnswer(msg_id or -1, cancel, lost, servers))


def _resume(state: BrokerState, worker: WorkerSession, claims: list[protocol.Claim], paced: bool) -> None:
    """Take the leases that the worker names as delivered. Others that the store has for it never reached it.

    These are read behind the renewal: what is leased before it could be a job that the worker kept.
    """
    worker.resuming = False
    for claim in claims:
        worker.deliveries.setdefault(claim.lease_id, Delivery(claim, 0.0, worker.heard_at, acked=True, begun=True))
    worker.account.running = len(worker.deliveries)
    read_back(state, worker, paced=paced)


# ---------------------------------------------------------------------------------------------------- release


def _give_back(state: BrokerState, worker: WorkerSession, message: protocol.JobsReleased) -> None:
    claims, paced = _held(state, worker, message.claims)
    known = [worker.deliveries.pop(claim.lease_id, None) for claim in message.claims]
    worker.account.ended(len(known) - known.count(None))
    if worker.reading:
        worker.settled.update(claim.lease_id for claim in message.claims)
    if claims:
        _ask(state, worker, "release", claims, partial(_released, state, claims), paced)


def _release(state: BrokerState, claims: Sequence[HeldLease]) -> None:
    if claims:
        state.builder.ask("release", claims, partial(_released, state, claims))


def _released(state: BrokerState, claims: Sequence[HeldLease], answers: Sequence[bool], effects: TurnEffects) -> None:
    # A job whose cancel was asked for ends when it is given back.
    ask_ends(state, (claim.job_id for claim, done in zip(claims, answers, strict=True) if done))


# ---------------------------------------------------------------------------------------------------- leases


class _Look(NamedTuple):
    """A lease request of one worker; `is_fresh` if it asks only for what its turn submits."""

    conn: int
    request: LeaseRequest
    is_fresh: bool
    older: tuple[str, ...]
    """Subjects among its patterns of which the turn submits nothing."""


def ask_leases(state: BrokerState, now: Now) -> None:
    """Add the lease requests of all workers that look for work, and know of something to look for, to the turn."""
    queues, new_jobs = state.builder.queues, state.builder.new_jobs
    for queue in queues:
        state.note_ready(*queue, is_new=True)
        state.look_for(*queue, backlog=False, enough=2 * new_jobs + CHOICE_MIN)
    if not state.looking or state.disk_problem:
        return
    full, fresh = _able(state, now)
    plan = dict((shares(full, None) if full else []) + (shares(fresh, new_jobs) if fresh else []))
    chosen = _chosen(state, now) if state.routed.queues else {}
    if not plan and not chosen:
        return
    live_workers = state.live_workers()
    subjects = {queue[0] for queue in queues}
    looks: list[_Look] = []
    for worker_id in plan | chosen if chosen else plan:
        worker = state.workers[worker_id]
        patterns = state.without_left(worker, state.take_news(worker)) if worker_id in plan else ()
        limit = plan.get(worker_id, 0) + len(chosen.get(worker_id, ()))
        request = LeaseRequest(
            worker_id=worker_id,
            incarnation=worker.incarnation,
            owner=worker.owner,
            patterns=patterns,
            offer=worker.offer,
            named_elsewhere=state.named_elsewhere(worker),
            limit=worker.account.reserve(limit),
            ttl_s=worker.ttl_s,
            on_disconnect=worker.on_disconnect,
            reconnect_grace_s=worker.reconnect_grace_s,
            live_workers=live_workers,
            routed=state.routed.patterns,
            chosen=tuple(chosen[worker_id]) if worker_id in chosen else (),
        )
        older = patterns if worker.backlog else tuple(subject for subject in patterns if subject not in subjects)
        looks.append(_Look(worker.conn, request, not worker.backlog, older))
    requests = [look.request for look in looks]
    state.builder.ask("lease", requests, partial(_leased, state, looks), partial(_not_leased, state, looks))


def _chosen(state: BrokerState, now: Now) -> dict[str, list[ChosenJob]]:
    """Return the jobs that routing policies have chosen workers of this server for, and tell others of theirs."""

    def is_able(worker: WorkerSession) -> bool:
        return bool(worker.patterns) and not (worker.resuming or worker.reading or _is_silent(worker, now))

    here, elsewhere = state.routed.plan(state.candidates(is_able), state.workers, now)
    state.cluster.routed += elsewhere
    return here


def _able(state: BrokerState, now: Now) -> tuple[list[tuple[str, Account]], list[tuple[str, Account]]]:
    """Return the workers that ask the store now: those that fill up, and those that share the jobs which this turn submits.

    Workers whose patterns are too many for this turn look in the next one.
    """
    full: list[tuple[str, Account]] = []
    fresh: list[tuple[str, Account]] = []
    room = PATTERNS_PER_TURN
    looking, state.looking = state.looking, {}
    for conn, worker in looking.items():
        if worker.resuming or worker.reading:
            state.looking[conn] = worker
        elif _is_silent(worker, now) or not worker.patterns or worker.worker_id in state.cluster.detached:
            continue
        elif not state.has_news(worker) or not state.without_left(worker, worker.patterns):
            worker.backlog = False
        elif worker.unsure and room <= 0:
            state.looking[conn] = worker
        else:
            room -= len(worker.patterns) if worker.unsure else 0
            (full if worker.backlog else fresh).append((worker.worker_id, worker.account))
    return full, fresh


def _is_silent(worker: WorkerSession, now: Now) -> bool:
    """Return whether the worker has missed a heartbeat: what is leased for it now may never be heard of again."""
    return now.monotonic - worker.heard_at > worker.ttl_s * SILENT_SHARE


def load(account: Account) -> float:
    """Return the share of used slots."""
    slots = account.running + account.available + account.reserved
    return (account.running + account.reserved) / slots if slots else 1.0


def shares(accounts: Iterable[tuple[str, Account]], wanted: int | None) -> list[tuple[str, int]]:
    """Return which workers ask the store for how many jobs in this turn; those with the smallest load ask first.

    `wanted` is how many jobs are thought to be ready: then the workers share them evenly, so that the first asker does not take
    everything while others idle. None: there is a backlog, and every worker fills up.
    """
    able = [(name, account) for name, account in accounts if account.available > 0]
    if wanted is not None and wanted < len(able):
        # One each for the first that have nothing to do. On a large server these are many more than are looked at here.
        idle = list(islice(((name, 1) for name, account in able if not (account.running or account.reserved)), wanted))
        if len(idle) == wanted:
            return idle
    able.sort(key=lambda one: load(one[1]))
    quota, extra = divmod(wanted, len(able)) if wanted is not None and able else (LEASE_BATCH_MAX, 0)
    limits = (min(LEASE_BATCH_MAX, quota + (place < extra)) for place in range(len(able)))
    return [(name, min(limit, account.available)) for (name, account), limit in zip(able, limits, strict=True) if limit]


def _leased(state: BrokerState, looks: list[_Look], answers: Sequence[list[Grant]], effects: TurnEffects) -> None:
    for place, (look, grants) in enumerate(zip(looks, answers, strict=True)):
        _granted(state, look, grants, place in effects.cut, effects)


def _granted(state: BrokerState, look: _Look, grants: list[Grant], is_cut: bool, effects: TurnEffects) -> None:
    """Deliver what was granted to one worker."""
    if look.request.chosen:
        is_all = len(grants) < look.request.limit  # what was not granted is not ready
        state.routed.forget(one.job_id for one in (look.request.chosen if is_all else grants))
    worker = state.sessions.get(look.conn)
    if isinstance(worker, WorkerSession):
        _settle(state, worker, look, len(grants) if worker.patterns else 0)
        _note_look(state, worker, look, len(grants), is_cut)
        if worker.patterns:
            deliveries, sent_at = worker.deliveries, effects.now.monotonic
            for grant in grants:
                deliveries[grant.lease_id] = Delivery(protocol.Claim(grant.job_id, grant.lease_id, grant.attempt), sent_at)
            effects.commands += _assignments(worker, worker.ttl_s, grants)
            return
    # The worker left, or began to drain, while the store was at work. Unseen grants go back, without using up a loss. But if the
    # worker left for another server, that one may have read these grants and delivered them: there they are its own.
    if isinstance(worker, WorkerSession) or not state.config.shared:
        asked = look.request
        holder = (asked.worker_id, asked.incarnation)
        _release(state, [HeldLease(g.job_id, *holder, g.lease_id, g.attempt, owner=asked.owner) for g in grants])


def _assignments(worker: WorkerSession, ttl_s: float, grants: Sequence[Grant]) -> list[Command]:
    return [
        Send(worker.conn, protocol.AssignJobs(ttl_s, list(some)))
        for some in protocol.batches(grants, lambda grant: len(grant.spec))
    ]


def _settle(state: BrokerState, worker: WorkerSession, look: _Look, granted: int) -> None:
    """Give back unused credit. If all that was asked for was granted, there may be more, and the worker looks again."""
    worker.account.settle(look.request.limit, granted)
    state.note_idle(worker, last=granted > 0)
    more = granted == look.request.limit and not look.is_fresh
    # Something may have become ready while the store was at work: that look is still to come.
    worker.backlog = more or (worker.backlog and worker.conn in state.looking)
    if more and worker.account.available:
        state.look(worker, backlog=True)


def _note_look(state: BrokerState, worker: WorkerSession, look: _Look, granted: int, is_cut: bool) -> None:
    """Note what the worker has not seen yet: the rest of what it asked for, and what became ready meanwhile."""
    asked = look.request
    is_walk = asked.patterns[: len(worker.patterns)] == worker.patterns
    if granted == asked.limit:
        worker.unsure = worker.unsure or is_walk
        worker.want([*worker.again, *(() if is_walk else look.older)])
        if not worker.account.available:
            for subject in () if is_walk else look.older:
                state.look_for(subject, backlog=True, enough=CHOICE_MIN)
    elif is_cut:
        worker.sparse = True
        state.look_everywhere()  # which finds what the walk did not come to
    elif is_walk:
        worker.sparse = False
    if worker.account.available and any(one.latest > worker.looked_at for one in worker.subscriptions):
        state.look(worker, backlog=True)


def _not_leased(state: BrokerState, looks: list[_Look], error: TasukiError, effects: TurnEffects) -> None:
    for look in looks:
        worker = state.sessions.get(look.conn)
        if isinstance(worker, WorkerSession):
            _settle(state, worker, look, 0)
            worker.unsure = True
            read_back(state, worker)  # the grants may be there all the same


def _note_routed(state: BrokerState, turn: Turn, answers: Answers, now: Now) -> None:
    """Note new jobs of routed subjects, and choose workers for them: others are told of theirs in the hint of this turn."""
    for one, answer in zip((*turn.submit, *turn.rerun), (*answers.submit, *answers.rerun), strict=True):
        if type(answer) is Submitted and answer.created and one.spec.not_before is None and state.is_routed(one.spec.subject):
            state.routed.add(one.spec, kind_of(one.spec.exec, one.submitter), one.spec.priority, now)
    if state.routed.queues and state.cluster.servers:
        _chosen(state, now)


def offer_the_rest(state: BrokerState, turn: Turn, answers: Answers, now: Now) -> None:
    """Offer new jobs that no worker took to other workers of this server, and to the other servers."""
    granted = {grant.job_id for grants in answers.lease for grant in grants}
    pairs = chain(zip(turn.submit, answers.submit, strict=True), zip(turn.rerun, answers.rerun, strict=True))
    left: dict[tuple[str, str, str], int] = {}
    for submission, answer in pairs:
        if type(answer) is Submitted and answer.created and answer.job_id not in granted:
            alike = (submission.spec.subject, submission.spec.exec, submission.submitter)
            left[alike] = left.get(alike, 0) + 1
    if state.routed.routes:
        _note_routed(state, turn, answers, now)
    for (subject, program, submitter), jobs in left.items():
        queue = (subject, kind_of(program, submitter), program)
        state.cluster.add_ready((subject,), jobs)
        state.note_ready(*queue, is_new=jobs <= QUEUE_MAX)
        state.look_for(*queue, backlog=True)


# ---------------------------------------------------------------------------------------------------- deliveries


def read_back(state: BrokerState, worker: WorkerSession, *, paced: bool = False, again: bool = False) -> None:
    """Ask the store which assignments it has for this worker; until it answers nothing more is leased for it. `again`: if it is
    being asked, ask once more, because something was assigned since."""
    worker.read_again |= again and worker.reading
    if not worker.reading:
        worker.reading = True
        holder = (worker.worker_id, worker.incarnation, worker.owner)
        _ask(state, worker, "held", [holder], partial(_redelivered, state, worker.conn), paced)


def _redelivered(state: BrokerState, conn: int, answers: Sequence[list[Grant]], effects: TurnEffects) -> None:
    """Deliver the assignments again of which the worker has shown no sign."""
    worker = state.sessions.get(conn)
    if not isinstance(worker, WorkerSession):
        return
    worker.reading = False
    grants = [grant for grant in answers[0] if grant.lease_id not in worker.settled]
    worker.settled.clear()
    for grant in grants:
        if grant.lease_id not in worker.deliveries:
            claim = protocol.Claim(grant.job_id, grant.lease_id, grant.attempt)
            worker.deliveries[grant.lease_id] = Delivery(claim, effects.now.monotonic)
            worker.account.charge()
    again = [grant for grant in grants if not worker.deliveries[grant.lease_id].acked]
    if again:
        effects.commands += _assignments(worker, min(grant.ttl_s for grant in again), again)
    if worker.read_again:
        worker.read_again = False
        read_back(state, worker)


def redeliver(state: BrokerState, worker: WorkerSession, now: Now) -> None:
    """Send assignments again of which no sign came back, with growing waits; the worker drops doubles. Forget those whose leases
    are over, because their worker did not renew them: it may have let them go, and never speak of them again."""
    due = False
    worker.overdue.clear()
    for lease_id, delivery in list(worker.deliveries.items()):
        if now.monotonic - max(delivery.sent_at, delivery.shown_at) > worker.ttl_s + LEASE_MARGIN_S:
            del worker.deliveries[lease_id]
            worker.account.ended()
            continue
        waited_s = now.monotonic - delivery.sent_at
        if not delivery.acked and delivery.tries < REDELIVER_MAX and waited_s >= REDELIVER_AFTER_S * ((2 << delivery.tries) - 1):
            delivery.tries += 1
            due = True
        if not delivery.begun and waited_s >= state.config.begin_within_s:
            worker.overdue.add(lease_id)
    if due and not worker.reading and not worker.resuming:
        read_back(state, worker)


# ---------------------------------------------------------------------------------------------------- taking back


def _withheld(worker: WorkerSession, claims: list[protocol.Claim]) -> set[str]:
    """Return the leases that are not renewed, because their attempts were not begun for too long: they run out."""
    found = set()
    for claim in claims:
        delivery = worker.deliveries.get(claim.lease_id) if claim.lease_id in worker.overdue else None
        if delivery is not None and not delivery.begun:
            delivery.withheld_since = delivery.withheld_since or worker.renewed_at or delivery.sent_at
            found.add(claim.lease_id)
    return found


def take_back(state: BrokerState, worker: WorkerSession, now: Now) -> None:
    """Release attempts in place of a worker that is silent, or never begins them, at the end of their leases: before the reaper
    would count a loss, and after the worker has given them up.

    Of a silent worker only those go back that stood behind others: an attempt that had a slot may be what made it silent, and
    must be counted. Others of it are reaped.
    """
    unbegun = [delivery for delivery in worker.deliveries.values() if not delivery.begun]
    if not unbegun:
        return
    grace_s = worker.reconnect_grace_s if worker.on_disconnect is OnDisconnect.KEEP else 0.0
    over_s = worker.ttl_s + grace_s
    due = [one for one in unbegun if one.withheld_since is not None and now.monotonic - one.withheld_since >= over_s]
    if now.monotonic - worker.renewed_at >= over_s:
        free = max(0, worker.slots - (len(worker.deliveries) - len(unbegun)))
        due += [one for one in unbegun[free:] if one.withheld_since is None and now.monotonic - one.sent_at >= over_s]
    if due:
        holder = (worker.worker_id, worker.incarnation)
        claims = [
            HeldLease(one.claim.job_id, *holder, one.claim.lease_id, one.claim.attempt, owner=worker.owner, is_over=True)
            for one in due
        ]
        state.builder.ask("release", claims, partial(_taken_back, state, worker.conn, claims))


def _taken_back(
    state: BrokerState, conn: int, claims: Sequence[HeldLease], answers: Sequence[bool], effects: TurnEffects
) -> None:
    worker = state.sessions.get(conn)
    for claim, done in zip(claims, answers, strict=True):
        if done and isinstance(worker, WorkerSession) and worker.deliveries.pop(claim.lease_id, None) is not None:
            worker.account.ended()
    _released(state, claims, answers, effects)
