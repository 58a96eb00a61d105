"""What the server tells whom when a turn is committed, or when it failed. The second half of `broker.py`; pure as well.

`broker` is passed in as the owner of sessions, watchers and the next draft.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tasuki.core.access import Identity
from tasuki.core.broker import enrolment, handshake
from tasuki.core.broker.events import DeleteBlobs, ReceiveBlob
from tasuki.core.broker.sessions import ClientSession, Delivery, WorkerSession
from tasuki.core.broker.turn_builder import (
    ActRoute,
    BlobRoute,
    CheckRoute,
    LeaseRoute,
    Slice,
    SubmitRoute,
    TokenRoute,
    TurnBuilder,
)
from tasuki.core.job import TERMINAL, Job, Outcome, State
from tasuki.core.machine import Now, Send
from tasuki.core.protocol import (
    Acceptance,
    Accepted,
    AssignJobs,
    CancelLeases,
    Claim,
    ErrorMessage,
    HeartbeatAnswer,
    JobResult,
    JobsRecorded,
    Message,
    Reply,
    Results,
    batches,
    outcome_bytes,
)
from tasuki.core.report_limits import not_uploaded
from tasuki.core.store_messages import (
    Answers,
    BlobPlace,
    Grant,
    HeldLease,
    LeaseStatus,
    MissingBlobs,
    Report,
    ReportAnswer,
    ReportStatus,
    Submitted,
    Turn,
)
from tasuki.errors import Conflict, DiskFull, Forbidden, InvalidInput, NotFound, TasukiError, Unauthorized, Unavailable, discreet

if TYPE_CHECKING:
    from tasuki.core.broker.broker import Broker
    from tasuki.core.broker.events import Command

_Outbox = defaultdict[int, list[JobResult]]
RESULTS_READ = 256


def turn_done(broker: Broker, turn: Turn, answers: Answers, now: Now) -> list[Command]:
    """The commit is durable: acknowledge, assign, deliver."""
    broker.store_problem = ""
    draft: TurnBuilder = turn.context
    out: list[Command] = []
    results: _Outbox = defaultdict(list)
    for route in draft.finish_routes:
        _reported(
            broker,
            route.conn,
            draft.finish[route.start : route.stop],
            answers.finish[route.start : route.stop],
            out,
            results,
            now,
        )
    for route in draft.fail_routes:
        _reported(
            broker, route.conn, draft.fail[route.start : route.stop], answers.fail[route.start : route.stop], out, results, now
        )
    for route in draft.start_routes:
        _standing(broker, route.conn, 0, draft.start[route.start : route.stop], answers.start[route.start : route.stop], out)
    for route in draft.renew_routes:
        _standing(
            broker, route.conn, route.msg_id, draft.renew[route.start : route.stop], answers.renew[route.start : route.stop], out
        )
    for index, lease in enumerate(draft.lease_routes):
        _granted(broker, lease, turn.lease[index].worker_id, answers.lease[index], out, now)
    for submit in draft.submit_routes:
        _submitted(broker, submit, answers, out)
    for act in draft.act_routes:
        _acted(broker, act, draft, answers, out)
    for index, conn in enumerate(draft.held_routes):
        _redelivered(broker, conn, answers.held[index], out, now)
    for check in draft.check_routes:
        _checked(broker, check, answers.get[check.start : check.stop], draft.get[check.start : check.stop], out, results)
    for index, hello in enumerate(draft.hello_routes):
        out += handshake.token_known(broker, hello, answers.token[index], now)
    for token in draft.token_routes:
        if token.verb in enrolment.VERBS:
            out += enrolment.token_done(broker, token, answers, now)
        else:
            _token_done(broker, token, answers, out)
    if draft.submit or draft.rerun:
        _look_for_the_rest(broker, draft, answers)
    if answers.release:  # a job whose cancel was asked for ends when it is given back
        broker.ask_ends(claim.job_id for claim, done in zip(draft.release, answers.release, strict=True) if done)
        if any(answers.release):
            broker.look_everywhere()
            broker.fellows.everything = True
    for index, place in enumerate(draft.place_routes):
        session = broker.sessions.get(place.conn)
        if session is not None and session.identity is not None:
            out.append(ReceiveBlob(place.conn, place.put, answers.place_blobs[index], session.identity.uploader))
    for index, stored in enumerate(draft.stored_routes):
        _blob_stored(broker, stored, draft.blobs_stored[index], answers.blobs_stored[index], out)
    if broker.config.shared:
        _note_ready(broker, draft, answers)
    for conn, items in results.items():
        out += [Send(conn, Results(list(some))) for some in batches(items, _result_bytes)]
    return out


def _note_ready(broker: Broker, draft: TurnBuilder, answers: Answers) -> None:
    """New jobs that no worker of ours took: the other servers may have one for them."""
    granted = {grant.job_id for grants in answers.lease for grant in grants}
    for submission, answer in zip(draft.submit, answers.submit, strict=True):
        if type(answer) is Submitted and answer.created and answer.job_id not in granted:
            broker.fellows.ready.add(submission.spec.subject)
    if draft.rerun or draft.requeue:
        broker.fellows.everything = True


def _blob_stored(broker: Broker, route: BlobRoute, place: BlobPlace, stored: bool, out: list[Command]) -> None:
    if not stored:  # condemned while it came in: nothing can refer to these bytes, and nobody else may know of them any more
        out.append(DeleteBlobs(0, (place,)))
    if route.conn not in broker.sessions:
        return
    if stored:
        out.append(Send(route.conn, Reply(route.put.msg_id, {"have": True})))
    else:
        error = Unavailable(f"blob {route.put.sha256} was collected while it came in; send it again")
        out.append(Send(route.conn, ErrorMessage(route.put.msg_id, error.code, error.message)))


def _look_for_the_rest(broker: Broker, draft: TurnBuilder, answers: Answers) -> None:
    """What the workers that were asked for it could not take may fit others, or those of them that could take more."""
    granted = {grant.job_id for grants in answers.lease for grant in grants}
    pairs = (*zip(draft.submit, answers.submit, strict=True), *zip(draft.rerun, answers.rerun, strict=True))
    left = {new.spec.subject: None for new, answer in pairs if isinstance(answer, Submitted) and answer.job_id not in granted}
    broker.look_for(left, backlog=True)


def _spec_bytes(grant: Grant) -> int:
    return len(grant.spec)


def _result_bytes(ending: JobResult) -> int:
    return outcome_bytes(ending.outcome)


def _notify(broker: Broker, ending: JobResult, results: _Outbox) -> None:
    watching = broker.watchers.pop(ending.job_id, None)
    if watching is None:
        return
    broker.generations.pop(ending.job_id, None)
    for conn in watching if isinstance(watching, list) else (watching,):
        session = broker.sessions.get(conn)
        if isinstance(session, ClientSession):
            session.watching.discard(ending.job_id)
            results[conn].append(ending)


def _reported(
    broker: Broker,
    conn: int,
    reports: Sequence[Report],
    answers: Sequence[ReportAnswer],
    out: list[Command],
    results: _Outbox,
    now: Now,
) -> None:
    recorded: list[str] = []
    fenced: list[tuple[str, str]] = []
    watchers, wall, elsewhere = broker.watchers, now.wall, broker.fellows.ended
    for report, answer in zip(reports, answers, strict=True):
        if answer.answer is ReportStatus.FENCED:
            fenced.append((report.lease_id, answer.reason))
            continue
        if answer.answer is ReportStatus.BLOB_MISSING:
            _report_missing(broker, conn, report)
            continue
        recorded.append(report.lease_id)
        state = answer.state
        if state is State.PENDING:  # it failed and may be tried again, perhaps at once
            broker.look_everywhere()
        elif answer.answer is ReportStatus.REPEATED:  # what came after it may have ended the job otherwise: the row tells
            broker.ask_ends([report.job_id])
        elif state in TERMINAL:
            if report.job_id in watchers:
                generation = broker.generations.get(report.job_id, 0)
                _notify(broker, JobResult(report.job_id, state, report.attempt, report.outcome, wall, generation), results)
            else:
                elsewhere.append(report.job_id)
    if conn in broker.sessions:
        out.append(Send(conn, JobsRecorded(recorded, fenced)))


def _report_missing(broker: Broker, conn: int, report: Report) -> None:
    """The result was never brought: that is a failure of the attempt, and stands in the next turn."""
    draft = broker.draft
    draft.fail.append(replace(report, outcome=not_uploaded(report.outcome)))
    draft.fail_routes.append(Slice(conn, len(draft.fail) - 1, len(draft.fail)))


def _standing(
    broker: Broker, conn: int, msg_id: int, claims: Sequence[HeldLease], standings: Sequence[LeaseStatus], out: list[Command]
) -> None:
    session = broker.sessions.get(conn)
    if session is None:
        return
    cancel, lost = [], []
    for claim, standing in zip(claims, standings, strict=True):
        if standing is LeaseStatus.CANCEL:
            cancel.append(claim.lease_id)
        elif standing is LeaseStatus.LOST:
            lost.append(claim.lease_id)
            if isinstance(session, WorkerSession) and session.deliveries.pop(claim.lease_id, None) is not None:
                session.account.ended()
    if msg_id or cancel or lost:
        servers = handshake.new_servers(broker, session) if msg_id else ()
        out.append(Send(conn, HeartbeatAnswer(msg_id or -1, cancel, lost, servers)))


def _submitted(broker: Broker, route: SubmitRoute, answers: Answers, out: list[Command]) -> None:
    session = broker.sessions.get(route.conn)
    if not isinstance(session, ClientSession):
        return
    exceptions = route.rejected
    stored = (answers.rerun if route.rerun else answers.submit)[route.start : route.stop]
    for place, answer in enumerate(stored):
        if type(answer) is Submitted and answer.job is None:
            if route.watch:
                broker.watch(session, answer.job_id)
            continue
        index = route.indexes[place] if route.indexes is not None else place
        if type(answer) is MissingBlobs:
            exceptions.append(_without_blobs(index, answer))
            continue
        assert not isinstance(answer, MissingBlobs)
        exceptions.append(_existing(broker, session, index, answer, watch=route.watch, rerun=route.rerun))
    out.append(Send(route.conn, Accepted(route.msg_id, route.count, exceptions)))
    if route.watch:
        # Results may be large: they are read apart, some per turn.
        ended = [item.job_id for item in exceptions if item.state in TERMINAL]
        for start in range(0, len(ended), RESULTS_READ):
            broker.check(route.conn, 0, ended[start : start + RESULTS_READ], "results")


def _without_blobs(index: int, answer: MissingBlobs) -> Acceptance:
    named = ", ".join(answer.sha256s[:3])
    error = NotFound(f"job {answer.job_id!r} needs blobs that are not here: {named}; upload its input files before the job")
    return Acceptance(index, answer.job_id, "", error.code, error.message, {"blobs": list(answer.sha256s[:100])})


def _existing(
    broker: Broker,
    session: ClientSession,
    index: int,
    answer: Submitted | Conflict,
    *,
    watch: bool,
    rerun: bool,
) -> Acceptance:
    """The id was there before: the same job (its state, its result), a Conflict, or somebody else's."""
    assert session.identity is not None
    conflict = answer if isinstance(answer, Conflict) else None
    job: Job | None = getattr(answer, "job", None)
    owner = conflict.owner if conflict is not None else (job.submitter, job.spec.subject) if job is not None else None
    if owner is not None and not session.identity.may_see(*owner):
        # Also of a Conflict: which fields differ would let a stranger guess at them one by one.
        refusal = Forbidden(f"job {answer.job_id!r} belongs to another submitter; use another job_id")
        return Acceptance(index, answer.job_id, "", refusal.code, refusal.message)
    if job is None:
        assert conflict is not None
        return Acceptance(index, conflict.job_id, "", conflict.code, conflict.message, conflict.details())
    if rerun and job.state in TERMINAL and job.state is not State.SUCCEEDED and job.submitter != session.identity.name:
        refusal = Forbidden(f"job {job.job_id!r} was submitted by {job.submitter}; set it going again with: tasuki retry")
        return Acceptance(index, job.job_id, "", refusal.code, refusal.message)
    if watch and job.state not in TERMINAL:
        broker.watch(session, job.job_id)
    return Acceptance(index, job.job_id, job.state)


def _watch(broker: Broker, session: ClientSession, job: Job, results: _Outbox) -> None:
    if job.state in TERMINAL:
        results[session.conn].append(result_of(job))
    else:
        broker.watch(session, job.job_id)
        if job.generation:
            broker.generations[job.job_id] = job.generation


def result_of(job: Job) -> JobResult:
    """How a terminal job ended, from its row."""
    outcome = job.outcome or Outcome(error_code=None if job.state is State.SUCCEEDED else str(job.state))
    return JobResult(job.job_id, job.state, job.attempt, outcome, job.finished_at, job.generation)


def _granted(
    broker: Broker,
    lease: LeaseRoute,
    worker_id: str,
    grants: list[Grant],
    out: list[Command],
    now: Now,
) -> None:
    conn, incarnation = lease.conn, lease.incarnation
    worker = broker.sessions.get(conn)
    if isinstance(worker, WorkerSession) and not worker.patterns:
        broker.leased(worker, lease, 0)
    if not isinstance(worker, WorkerSession) or not worker.patterns:
        # It left, or began to drain, while the store was at work. What it never saw goes back, without using up a loss. But if
        # it left for another server, that one may have read these grants and delivered them: there they are its own.
        if isinstance(worker, WorkerSession) or not broker.config.shared:
            broker.draft.release.extend(
                HeldLease(g.job_id, worker_id, incarnation, g.lease_id, g.attempt, g.ttl_s) for g in grants
            )
        return
    broker.leased(worker, lease, len(grants))
    if not grants:
        return
    deliveries, sent_at = worker.deliveries, now.monotonic
    for grant in grants:
        deliveries[grant.lease_id] = Delivery(Claim(grant.job_id, grant.lease_id, grant.attempt), sent_at)
    out += [Send(conn, AssignJobs(worker.ttl_s, list(some))) for some in batches(grants, _spec_bytes)]


def _redelivered(broker: Broker, conn: int, grants: list[Grant], out: list[Command], now: Now) -> None:
    worker = broker.sessions.get(conn)
    if not isinstance(worker, WorkerSession):
        return
    worker.reading = False
    grants = [grant for grant in grants if grant.lease_id not in worker.settled]
    worker.settled.clear()
    for grant in grants:
        if grant.lease_id not in worker.deliveries:
            worker.deliveries[grant.lease_id] = Delivery(Claim(grant.job_id, grant.lease_id, grant.attempt), now.monotonic)
            worker.account.charge()
    again = [grant for grant in grants if not worker.deliveries[grant.lease_id].acked]
    if again:
        ttl_s = min(grant.ttl_s for grant in again)
        out += [Send(conn, AssignJobs(ttl_s, list(some))) for some in batches(again, _spec_bytes)]


def _checked(
    broker: Broker, route: CheckRoute, jobs: Sequence[Job | None], job_ids: list[str], out: list[Command], results: _Outbox
) -> None:
    """The rows are read: is the caller allowed to do what it asked for? All of it, or nothing happens."""
    if route.action == "ends":
        for job_id, job in zip(job_ids, jobs, strict=True):
            if job is None:
                _gone(broker, job_id, out)
            elif job.state in TERMINAL:
                _notify(broker, result_of(job), results)
        return
    session = broker.sessions.get(route.conn)
    if not isinstance(session, ClientSession) or session.identity is None:
        return
    if route.action == "results":  # whoever gets here was allowed to see them when it submitted them
        for job_id, job in zip(job_ids, jobs, strict=True):
            if job is not None:
                _watch(broker, session, job, results)
            else:
                broker.watch(session, job_id)
                _gone(broker, job_id, out)
        return
    refusal = _refusal(session.identity, jobs, job_ids)
    if refusal is not None:
        out.append(Send(route.conn, ErrorMessage(route.msg_id, refusal.code, refusal.message, refusal.details())))
        return
    if route.action == "watch":
        for job in jobs:
            assert job is not None
            _watch(broker, session, job, results)
        states = {job.job_id: str(job.state) for job in jobs if job is not None}
        out.append(Send(route.conn, Reply(route.msg_id, {"states": states})))
        return
    start, stop = broker.draft.act(route.action, job_ids, session.identity.name, route.reason)
    broker.draft.act_routes.append(ActRoute(route.conn, route.msg_id, start, stop, route.action))


def _gone(broker: Broker, job_id: str, out: list[Command]) -> None:
    """Retention has deleted a job before those who watch it were told its end: they connect again, ask, and hear so."""
    watching = broker.watchers.get(job_id, [])
    for conn in list(watching) if isinstance(watching, list) else [watching]:
        out += broker.hang_up(conn, Unavailable(f"job {job_id} was deleted before its end could be told; ask again"))


def _refusal(identity: Identity, jobs: Sequence[Job | None], job_ids: list[str]) -> TasukiError | None:
    for job_id, job in zip(job_ids, jobs, strict=True):
        # Whether a job of somebody else exists is also not everybody's business.
        if job is None or not identity.may_see(job.submitter, job.spec.subject):
            return NotFound(f"there is no job {job_id[:128]!r}, or it is not yours")
    return None


def _acted(broker: Broker, route: ActRoute, draft: TurnBuilder, answers: Answers, out: list[Command]) -> None:
    states: dict[str, dict[str, object]] = {}
    if route.action == "cancel":
        orders = zip(draft.cancel[route.start : route.stop], answers.cancel[route.start : route.stop], strict=True)
        for (job_id, _, _), canceled in orders:
            states[job_id] = {"state": canceled.state, "requested": canceled.requested}
            if canceled.requested and canceled.worker_id is not None and canceled.lease_id is not None:
                worker = broker.workers.get(canceled.worker_id)
                if worker is not None:
                    out.append(Send(worker.conn, CancelLeases([canceled.lease_id])))
                else:
                    broker.fellows.canceled.append((canceled.worker_id, canceled.lease_id))
            elif canceled.state is State.CANCELED:
                broker.ask_ends([job_id])
                broker.fellows.ended.append(job_id)
    else:
        pairs = zip(draft.requeue[route.start : route.stop], answers.requeue[route.start : route.stop], strict=True)
        for order, requeued in pairs:
            states[order.job_id] = {"state": requeued.state, "done": requeued.done}
        broker.look_everywhere()
    if route.conn in broker.sessions:
        out.append(Send(route.conn, Reply(route.msg_id, states)))


def _token_done(broker: Broker, route: TokenRoute, answers: Answers, out: list[Command]) -> None:
    message: Message = Reply(route.msg_id, route.body)
    if route.verb == "token.list":
        rows = [{name: getattr(row, name) for name in row.__struct_fields__ if name != "sha256"} for row in answers.tokens[0]]
        message = Reply(route.msg_id, rows)
    elif route.verb == "token.create" and not answers.add_token[route.index]:
        taken = InvalidInput(f"token {route.body['token_id'][:80]!r}: there is another with that id or that secret")
        message = ErrorMessage(route.msg_id, taken.code, taken.message)
    elif route.verb == "token.revoke":
        token_id = route.body["token_id"]
        if answers.revoke_token[route.index]:
            broker.fellows.tokens.append(token_id)
            for session in list(broker.sessions.values()):
                if session.identity is not None and session.identity.token_id == token_id and session.conn != route.conn:
                    out += broker.hang_up(session.conn, Unauthorized(f"token {token_id} was revoked"))
        else:
            error = NotFound(f"there is no token {token_id[:80]!r} that is still valid")
            message = ErrorMessage(route.msg_id, error.code, error.message)
    if route.conn in broker.sessions:
        out.append(Send(route.conn, message))


def turn_failed(broker: Broker, turn: Turn, error: TasukiError, now: Now) -> list[Command]:
    """Nothing was acknowledged. What workers reported is tried again by ourselves, everybody else is told."""
    broker.store_problem = error.message
    draft: TurnBuilder = turn.context
    out: list[Command] = []

    def tell(conn: int, msg_id: int) -> None:
        session = broker.sessions.get(conn)
        if session is not None:
            told = error if session.identity is not None and session.identity.admin else discreet(error)
            out.append(Send(conn, ErrorMessage(msg_id, told.code, told.message, told.details())))

    for submit in draft.submit_routes:
        tell(submit.conn, submit.msg_id)
    for check in draft.check_routes:
        job_ids = draft.get[check.start : check.stop]
        if check.action == "ends":
            broker.ask_ends(job_ids)
        elif check.action == "results":
            broker.check(check.conn, 0, job_ids, "results")
        else:
            tell(check.conn, check.msg_id)
    for act in draft.act_routes:
        tell(act.conn, act.msg_id)
    for token in draft.token_routes:
        tell(token.conn, token.msg_id)
    for blob in (*draft.place_routes, *draft.stored_routes):
        tell(blob.conn, blob.put.msg_id)
    for hello in draft.hello_routes:
        out += broker.hang_up(hello.conn, discreet(error))
    for lease in draft.lease_routes:
        worker = broker.sessions.get(lease.conn)
        if isinstance(worker, WorkerSession):
            broker.leased(worker, lease, 0)
            broker.read_back(worker)  # the grants may be there all the same
    _carry_over(broker.draft, draft)
    broker.look_everywhere()
    if isinstance(error, DiskFull) and not broker.disk_problem:
        broker.disk_problem = error.message
    return out


def _carry_over(into: TurnBuilder, draft: TurnBuilder) -> None:
    """Workers' words are idempotent (an exact repeat gives the stored answer), so they simply stand in the next turn again."""
    for name in ("finish", "fail", "start", "renew"):
        items, routes = getattr(into, name), getattr(into, f"{name}_routes")
        shift = len(items)
        items.extend(getattr(draft, name))
        for route in getattr(draft, f"{name}_routes"):
            route.start += shift
            route.stop += shift
            routes.append(route)
    into.release.extend(draft.release)
    into.held.extend(draft.held)
    into.held_routes.extend(draft.held_routes)
