"""Conversations with clients: submits, watches, cancels, requeues, requests by name; and transfers, also of workers. Pure.

Each conversation stands together: the function that checks the message and asks the store, and below it the function that gets
the answers after the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

from msgspec.structs import replace

from tasuki.core import protocol
from tasuki.core.access import Identity, PeerKind
from tasuki.core.broker import authentication, caches, events, publish_subscribe
from tasuki.core.broker.log_reads import question_of
from tasuki.core.broker.state import BrokerState, ClientSession, Session, TransferSession, WorkerSession
from tasuki.core.broker.turn_builder import TurnEffects, ignore
from tasuki.core.job import TERMINAL, Job, JobSpec, Outcome, State, body_hash, check_name, check_sha256, check_spec, mark
from tasuki.core.machine import Now, Send
from tasuki.core.pauses import PAUSES_MAX, PauseAnswer, PauseOrder
from tasuki.core.store_messages import (
    BlobClaim,
    BlobPlace,
    Canceled,
    JobKind,
    MissingBlobs,
    Offer,
    Requeued,
    RequeueOrder,
    Submission,
    Submitted,
    kind_of,
)
from tasuki.core.subject import SUBMIT, assigned, check_job_pattern, intersects
from tasuki.errors import (
    Conflict,
    DiskFull,
    Forbidden,
    InvalidInput,
    NotFound,
    ProtocolError,
    TasukiError,
    TooLarge,
    Unavailable,
    discreet,
    unknown_job,
)

SPECS_MAX = protocol.BATCH_MAX  # jobs of one frame: the answers must fit a frame too, and those that exist are read whole
ROWS_AT_ONCE = 64  # jobs of one request that a turn reads or changes: with its lists a row may have 3 MiB
ENTRY_BYTES = 128  # of memory that an argument, environment name, file or header takes beside its text
READ_VERBS = frozenset({"get", "find", "counts", "statistics", "explain", "token.audit", "cache.list", "cache.show", "paused"})
PAUSE_VERBS = frozenset({"pause", "resume"})
OTHER_VERBS = frozenset(
    {"logs", "watch", "requeue", "targets", "workers", "servers", "detach", "attach", "degrade", "cache.remove"}
)
REQUEST_VERBS = READ_VERBS | OTHER_VERBS | PAUSE_VERBS | {*publish_subscribe.VERBS, *authentication.TOKEN_VERBS}
REASON_MAX_CHARS = 1000
TARGETS_MAX = protocol.BATCH_MAX  # workers of a broadcast, whose jobs are stored in one transaction


def received(state: BrokerState, client: ClientSession, message: protocol.Message, now: Now) -> list[events.Command]:
    """Take one message of a client."""
    identity = client.identity
    assert identity is not None
    if identity.kind is PeerKind.ENROL:
        authentication.check_enrolment(message)
    match message:
        case protocol.SubmitJobs():
            return submit(state, client, identity, message)
        case protocol.Heartbeat():
            servers = authentication.new_servers(state, client)
            return [Send(client.conn, protocol.HeartbeatAnswer(message.msg_id, servers=servers))]
        case protocol.Request():
            return request(state, client, identity, message, now)
        case protocol.PublishMessages():
            return publish_subscribe.publish(state, client, message)
        case protocol.CancelJobs():
            return _cancel(state, client, identity, message)
        case protocol.CachePut():
            return caches.put(state, client, identity, message)
        case protocol.BlobPut() | protocol.Chunk() | protocol.BlobGet():
            return transferred(state, client, message)
        case _:
            raise ProtocolError(f"a client may not send {type(message).__name__}")


# ---------------------------------------------------------------------------------------------------- submit


def submit(state: BrokerState, client: ClientSession, identity: Identity, message: protocol.SubmitJobs) -> list[events.Command]:
    """Check each job by itself and store those that pass; a job that cannot be accepted is named by its index."""
    if state.disk_problem:
        full = DiskFull(f"no job can be accepted: {state.disk_problem}")
        raise full if identity.admin else discreet(full)
    if message.on_failed not in ("return", "rerun"):
        raise InvalidInput(f'on_failed must be "return" or "rerun", got {message.on_failed[:40]!r}')
    if len(message.specs) > SPECS_MAX:
        raise InvalidInput(f"{len(message.specs)} jobs in one frame are too many, the limit is {SPECS_MAX}; send several frames")
    submitter, builder = identity.name, state.builder
    is_local = submitter.startswith("uid:")
    key = state.config.key if is_local else b""
    queues, command_kind = builder.queues, kind_of("any", submitter)
    submissions: list[Submission] = []
    rejected: list[protocol.Acceptance] = []
    indexes: list[int] | None = None  # place in the message of each submission; None: all of the message
    size_bytes = 0
    is_cached = False
    for index, spec in enumerate(message.specs):
        if spec.subject.startswith(SUBMIT):
            spec = routed(spec)
        try:
            check_spec(spec)
            if identity.scope:
                identity.check_submit(spec.subject)
            if spec.cwd and not is_local:
                raise Forbidden(
                    f"job {spec.job_id!r} names a current folder, {spec.cwd[:80]!r}: only jobs that the server's own user "
                    "submits over its unix socket run in one; leave cwd out"
                )
        except TasukiError as error:
            if indexes is None:
                indexes = list(range(index))
            rejected.append(_refused(index, spec.job_id[:128], error))
            continue
        if indexes is not None:
            indexes.append(index)
        if spec.mac or (key and spec.exec):
            spec = mark(spec, submitter, key)
        queues[spec.subject, command_kind if spec.exec else JobKind.HANDLER, spec.exec] = None
        size_bytes += len(spec.payload)
        if spec.args or spec.env or spec.files or spec.headers:
            size_bytes += lists_bytes(spec)
            is_cached = is_cached or any(file.cached_as is not None for file in spec.files)
        submissions.append(Submission(spec, submitter, body_hash(spec)))

    def store(found: list[Submission]) -> None:
        for one in found if is_cached else ():  # of a later turn than the one that was noted above
            kind = command_kind if one.spec.exec else JobKind.HANDLER
            state.builder.queues[one.spec.subject, kind, one.spec.exec] = None
        verb = "rerun" if message.on_failed == "rerun" else "submit"
        reply = partial(_submitted, state, client, message, rejected, indexes, found)
        failed = partial(state.tell_failure, client.conn, message.msg_id)
        state.builder.ask(verb, found, reply, failed, client.owner, size_bytes)

    if is_cached:
        caches.resolve(state, client, identity, message.msg_id, submissions, store)
    else:
        store(submissions)
    return []


def lists_bytes(spec: JobSpec) -> int:
    """Return about how much memory the lists of a job take."""
    texts = (*spec.args, *spec.env, *spec.env.values(), *spec.headers, *spec.headers.values(), *(one.name for one in spec.files))
    entries = len(spec.args) + len(spec.env) + len(spec.files) + len(spec.headers)
    return ENTRY_BYTES * entries + sum(map(len, texts)) + sum(len(file.data or b"") for file in spec.files)


def routed(spec: JobSpec) -> JobSpec:
    """Return the spec as it is checked and stored."""
    return replace(spec, subject=assigned(spec.subject))


def _submitted(
    state: BrokerState,
    client: ClientSession,
    message: protocol.SubmitJobs,
    exceptions: list[protocol.Acceptance],
    indexes: list[int] | None,
    submissions: list[Submission],
    answers: Sequence[Submitted | Conflict | MissingBlobs],
    effects: TurnEffects,
) -> None:
    """Acknowledge the jobs that are stored, and tell apart those that existed before or were refused."""
    if client.conn not in state.sessions:
        return
    watch = message.watch
    for place, answer in enumerate(answers):
        if type(answer) is Submitted and answer.job is None:
            if watch:
                state.watch(client, answer.job_id)
            continue
        index = indexes[place] if indexes is not None else place
        if isinstance(answer, MissingBlobs) and caches.NO_BLOB in answer.sha256s:
            exceptions.append(_refused(index, answer.job_id, caches.not_cached(answer.job_id, submissions[place].spec)))
        elif isinstance(answer, MissingBlobs):
            job_id, named = answer.job_id, ", ".join(answer.sha256s[:3])
            unfit = f"job {job_id!r} needs blobs that are not here, or have another size: {named}"
            missing = f"{unfit}; upload its input files before the job"
            exceptions.append(_refused(index, job_id, NotFound(missing, blobs=list(answer.sha256s[:100]))))
        else:
            exceptions.append(_existing(state, client, index, answer, message))
    effects.send(client.conn, protocol.Accepted(message.msg_id, len(message.specs), exceptions))
    if watch:
        # Results may be large: they are read apart, some per turn.
        ended = list(dict.fromkeys(item.job_id for item in exceptions if item.state in TERMINAL))
        for start in range(0, len(ended), ROWS_AT_ONCE):
            some = ended[start : start + ROWS_AT_ONCE]
            state.builder.ask("get", some, partial(_results_read, state, client, some))


def _refused(index: int, job_id: str, error: TasukiError) -> protocol.Acceptance:
    return protocol.Acceptance(index, job_id, "", error.code, error.message, error.details())


def _existing(
    state: BrokerState, client: ClientSession, index: int, answer: Submitted | Conflict, message: protocol.SubmitJobs
) -> protocol.Acceptance:
    """Describe a job whose id was there before: the same job with its state, a Conflict, or another submitter's."""
    identity = client.identity
    assert identity is not None
    job = None if isinstance(answer, Conflict) else answer.job
    owner = answer.owner if isinstance(answer, Conflict) else (job.submitter, job.spec.subject) if job is not None else None
    if owner is not None and not identity.may_see(*owner):
        # Also for a Conflict: which fields differ would let a stranger guess at them one by one.
        refusal = Forbidden(f"job {answer.job_id!r} belongs to another submitter; use another job_id")
        return _refused(index, answer.job_id, refusal)
    if isinstance(answer, Conflict):
        return _refused(index, answer.job_id, answer)
    assert job is not None
    is_failed = job.state in TERMINAL and job.state is not State.SUCCEEDED
    if message.on_failed == "rerun" and is_failed and job.submitter != identity.name:
        refusal = Forbidden(f"job {job.job_id!r} was submitted by {job.submitter}; set it going again with: tasuki retry")
        return _refused(index, job.job_id, refusal)
    if message.watch and job.state not in TERMINAL:
        _watch_open(state, client, job)
    return protocol.Acceptance(index, job.job_id, job.state)


def _results_read(
    state: BrokerState, client: ClientSession, job_ids: list[str], jobs: Sequence[Job | None], effects: TurnEffects
) -> None:
    """Send the results of jobs that had ended when they were submitted; their submitter was allowed to see them."""
    for job_id, job in zip(job_ids, jobs, strict=True):
        if client.conn not in state.sessions:
            return
        if job is not None:
            _watch_job(state, client, job, effects)
        else:
            state.watch(client, job_id)
            _tell_deleted(state, job_id, effects)


def _watch_job(state: BrokerState, client: ClientSession, job: Job, effects: TurnEffects) -> None:
    if job.state in TERMINAL:
        effects.results[client.conn].append(result_of(job))
    else:
        _watch_open(state, client, job)


def _watch_open(state: BrokerState, client: ClientSession, job: Job) -> None:
    """Watch a job that has not ended; its result will name the generation."""
    state.watch(client, job.job_id)
    if job.generation:
        state.generations[job.job_id] = job.generation


def result_of(job: Job) -> protocol.JobResult:
    """Return how a terminal job ended, from its row."""
    outcome = job.outcome or Outcome(error_code=None if job.state is State.SUCCEEDED else str(job.state))
    return protocol.JobResult(job.job_id, job.state, job.attempt, outcome, job.finished_at, job.generation)


# ---------------------------------------------------------------------------------------------------- ends without a report


def ask_ends(state: BrokerState, job_ids: Iterable[str]) -> None:
    """Read the watched ones of jobs that may have ended otherwise than by a report, and tell their watchers."""
    watched = list(dict.fromkeys(job_id for job_id in job_ids if job_id in state.watchers))
    for start in range(0, len(watched), ROWS_AT_ONCE):
        some = watched[start : start + ROWS_AT_ONCE]
        state.builder.ask("get", some, partial(_ends_read, state, some))


def _ends_read(state: BrokerState, job_ids: list[str], jobs: Sequence[Job | None], effects: TurnEffects) -> None:
    for job_id, job in zip(job_ids, jobs, strict=True):
        if job is None:
            _tell_deleted(state, job_id, effects)
        elif job.state in TERMINAL:
            state.notify(result_of(job), effects)


def _tell_deleted(state: BrokerState, job_id: str, effects: TurnEffects) -> None:
    """Hang up on the watchers of a job that retention deleted before they were told its end: they ask again, and hear so."""
    watching = state.watchers.get(job_id, [])
    for conn in list(watching) if isinstance(watching, list) else [watching]:
        gone = Unavailable(f"job {job_id} was deleted before its end was sent; ask again")
        effects.commands += state.hang_up(conn, gone)


# ---------------------------------------------------------------------------------------------------- watch, cancel, requeue


def _authorize(
    state: BrokerState,
    client: ClientSession,
    request: protocol.Request | protocol.CancelJobs,
    job_ids: list[str],
    seen: Callable[[Sequence[Job], TurnEffects], None],
    then: Callable[[TurnEffects], None],
) -> list[events.Command]:
    """Read these jobs, some in each turn: `seen` gets those that the client may see. Refuse the request if one is not among
    them, else call `then` at the end."""
    if len(job_ids) > protocol.BATCH_MAX:
        action = request.verb if isinstance(request, protocol.Request) else "cancel"
        limit = f"the limit is {protocol.BATCH_MAX}; send several"
        raise InvalidInput(f"{action} of {len(job_ids)} jobs at once is too much, {limit}")
    identity = client.identity
    assert identity is not None

    def judge(start: int, jobs: Sequence[Job | None], effects: TurnEffects) -> None:
        if client.conn not in state.sessions:
            return
        mine = [job for job in jobs if job is not None and identity.may_see(job.submitter, job.spec.subject)]
        if len(mine) < len(jobs):
            # Whether a job of somebody else exists is also not everybody's business.
            known = {job.job_id for job in mine}
            job_id = next(job_id for job_id in job_ids[start:] if job_id not in known)
            unknown = unknown_job(job_id)
            state.answer(client.conn, request.msg_id, unknown, effects)
            return
        seen(mine, effects)
        if start + len(jobs) < len(job_ids):
            ask(start + len(jobs))
        else:
            then(effects)

    def ask(start: int) -> None:
        failed = partial(state.tell_failure, client.conn, request.msg_id)
        some = job_ids[start : start + ROWS_AT_ONCE]
        state.builder.ask("get", some, partial(judge, start), failed, client.owner)

    ask(0)
    return []


def _order(
    state: BrokerState,
    client: ClientSession,
    request: protocol.Request | protocol.CancelJobs,
    job_ids: list[str],
    verb: str,
    order: Callable[[str], object],
    done: Callable[[str, Any, TurnEffects], dict[str, object]],
) -> list[events.Command]:
    """Give an order for each of the jobs that the client may see, some in each turn, and answer with what `done` returns.

    An administrator's order with a reason is noted in the audit: programs give none.
    """
    states: dict[str, dict[str, object]] = {}
    identity = client.identity
    assert identity is not None
    reason = reason_of(request)

    def ask(_effects: TurnEffects) -> None:
        some = job_ids[len(states) : len(states) + ROWS_AT_ONCE]
        failed = partial(state.tell_failure, client.conn, request.msg_id)
        state.builder.ask(verb, [order(job_id) for job_id in some], partial(answered, some), failed)
        if identity.admin and reason:
            action = "run.cancel" if verb == "cancel" else "run.rerun"
            state.builder.ask("note", [(identity.name, action, job_id, reason) for job_id in some], ignore, ignore)

    def answered(some: Sequence[str], answers: Sequence[Any], effects: TurnEffects) -> None:
        for job_id, answer in zip(some, answers, strict=True):
            states[job_id] = done(job_id, answer, effects)
        if len(states) < len(job_ids):
            ask(effects)
        else:
            state.answer(client.conn, request.msg_id, states, effects)

    return _authorize(state, client, request, job_ids, lambda jobs, effects: None, ask)


def _watch(state: BrokerState, client: ClientSession, request: protocol.Request, job_ids: list[str]) -> list[events.Command]:
    states: dict[str, str] = {}

    def watch(jobs: Sequence[Job], effects: TurnEffects) -> None:
        """Watch from the moment on in which they were read: the end of one may follow at once."""
        for job in jobs:
            _watch_job(state, client, job, effects)
            states[job.job_id] = str(job.state)

    def answer(effects: TurnEffects) -> None:
        effects.send(client.conn, protocol.Reply(request.msg_id, {"states": states}))

    return _authorize(state, client, request, job_ids, watch, answer)


def stop_canceled(state: BrokerState, canceled: Canceled) -> list[events.Command]:
    """Tell the worker that holds a canceled job to stop it; if it is connected to another server, by a hint."""
    if canceled.requested and canceled.worker_id is not None and canceled.lease_id is not None:
        worker = state.workers.get(canceled.worker_id)
        if worker is not None and canceled.lease_id in worker.deliveries:
            return [Send(worker.conn, protocol.CancelLeases([canceled.lease_id]))]
        state.cluster.canceled.append((canceled.worker_id, canceled.lease_id))
    return []


def _cancel(state: BrokerState, client: ClientSession, identity: Identity, message: protocol.CancelJobs) -> list[events.Command]:
    reason = reason_of(message)

    def canceled(job_id: str, answer: Canceled, effects: TurnEffects) -> dict[str, object]:
        effects.commands += stop_canceled(state, answer)
        if not answer.requested and answer.state is State.CANCELED:
            ask_ends(state, [job_id])
            state.cluster.ended.append(job_id)
        return {"state": answer.state, "requested": answer.requested}

    job_ids = list(dict.fromkeys(message.job_ids))
    return _order(state, client, message, job_ids, "cancel", lambda job_id: (job_id, identity.name, reason), canceled)


def _requeue(
    state: BrokerState, client: ClientSession, identity: Identity, request: protocol.Request, job_ids: list[str]
) -> list[events.Command]:
    def requeued(job_id: str, answer: Requeued, effects: TurnEffects) -> dict[str, object]:
        blocked = {"still_running": answer.still_running} if answer.still_running is not None else {}
        return {"state": answer.state, "done": answer.done, **blocked}

    reason = reason_of(request)
    return _order(
        state, client, request, job_ids, "requeue", lambda job_id: RequeueOrder(job_id, identity.name, reason), requeued
    )


# ---------------------------------------------------------------------------------------------------- requests by name


def _workers(state: BrokerState, now: Now) -> list[dict[str, object]]:
    """Describe all live workers; those of this server also by their last heartbeat, and how long one without is taken to live."""
    views = state.describe_workers()
    for view, session in zip(views, state.workers.values(), strict=False):  # this server's come first
        view |= {"heartbeat_age_s": round(now.monotonic - session.heard_at, 1), "ttl_s": session.ttl_s}
    return views


def request(
    state: BrokerState, client: ClientSession, identity: Identity, request: protocol.Request, now: Now
) -> list[events.Command]:
    """Answer a question or an order by name, or pass it on."""
    conn, msg_id, verb, params = client.conn, request.msg_id, request.verb, request.params
    if verb in READ_VERBS:
        if verb == "explain":
            workers, trouble = state.describe_workers(), state.disk_problem or state.store_problem
            if trouble and not identity.admin:
                trouble = discreet(DiskFull("") if state.disk_problem else Unavailable("")).message
            routes, wait_s, choice = state.routed.routes, state.config.route_wait_s, state.routed.reason(params.get("job_id"))
            return [events.Query(conn, msg_id, verb, params, identity, workers, None, trouble, routes, wait_s, choice)]
        return [events.Query(conn, msg_id, verb, params, identity, [])]
    if verb == "logs":
        question = question_of(params)
        return [events.Query(conn, msg_id, verb, {"job_id": question.job_id}, identity, [], question)]
    if verb in ("watch", "requeue"):
        job_ids = params.get("job_ids")
        if not isinstance(job_ids, list) or not all(isinstance(job_id, str) for job_id in job_ids):
            raise InvalidInput(f"{verb} needs job_ids, a list of texts")
        job_ids = list(dict.fromkeys(job_ids))
        if verb == "watch":
            return _watch(state, client, request, job_ids)
        return _requeue(state, client, identity, request, job_ids)
    if verb == "cache.remove":
        return caches.remove(state, client, identity, request)
    if verb == "targets":
        return [Send(conn, protocol.Reply(msg_id, {"workers": _targets(state, identity, params), "now": now.wall}))]
    if verb == "workers":
        identity.check_admin("the list of workers")
        return [Send(conn, protocol.Reply(msg_id, _workers(state, now)))]
    if verb in ("detach", "attach"):
        identity.check_admin(verb)
        worker_id = check_name(str(params.get("worker_id", "")), "worker_id")
        is_now = verb == "detach" and params.get("now") is True
        reason = reason_of(request)
        state.builder.ask("note", [(identity.name, f"worker.{verb}", worker_id, reason)], ignore, ignore)
        return [events.Detach(conn, msg_id, worker_id, verb == "detach", identity.name, reason, is_now)]
    if verb == "degrade":
        return _degrade(state, client, identity, request)
    if verb in PAUSE_VERBS:
        return _pause(state, client, identity, request)
    if verb == "servers":
        identity.check_admin("the list of servers")
        return [Send(conn, protocol.Reply(msg_id, state.describe_servers()))]
    if verb in publish_subscribe.VERBS:
        return publish_subscribe.request(state, client, request)
    if verb in authentication.TOKEN_VERBS:
        return authentication.token_request(state, conn, request, identity, now)
    raise NotFound(f"there is no request {verb[:40]!r}; there are {', '.join(sorted(REQUEST_VERBS))}")


def _pause(state: BrokerState, client: ClientSession, identity: Identity, request: protocol.Request) -> list[events.Command]:
    """Pause the subjects of a pattern, or resume them and have all workers look for their jobs."""
    identity.check_admin(request.verb)
    pattern = check_job_pattern(str(request.params.get("pattern", "")))
    order = PauseOrder(pattern, identity.name, reason_of(request), resume=request.verb == "resume")

    def done(answers: Sequence[PauseAnswer], effects: TurnEffects) -> None:
        is_changed = answers[0] is PauseAnswer.DONE
        if is_changed and order.resume:
            state.look_everywhere()
            state.cluster.everything = True
        too_many = InvalidInput(f"{PAUSES_MAX} patterns are paused, which is the limit; resume one first: tasuki resume PATTERN")
        answer = too_many if answers[0] is PauseAnswer.TOO_MANY else {"pattern": pattern, "changed": is_changed}
        state.answer(client.conn, request.msg_id, answer, effects)

    state.builder.ask("pause", [order], done, partial(state.tell_failure, client.conn, request.msg_id))
    state.builder.ask("note", [(identity.name, f"subject.{request.verb}", pattern, order.reason)], ignore, ignore)
    return []


def _degrade(state: BrokerState, client: ClientSession, identity: Identity, request: protocol.Request) -> list[events.Command]:
    """Have the leader step down, if there is one and another server that could lead."""
    identity.check_admin("degrade")
    leader = next((server["server_id"] for server in state.describe_servers() if server["leads"]), None)
    if leader is None:
        raise InvalidInput("no server leads at the moment; one is elected within seconds")
    if not state.cluster.servers:
        raise InvalidInput(f"server {leader} is the only one on this store: nobody else could lead")
    note = (identity.name, "leader.degrade", str(leader), reason_of(request))
    state.builder.ask("note", [note], ignore, ignore)
    return [events.Degrade(client.conn, request.msg_id, str(leader))]


def _targets(state: BrokerState, identity: Identity, params: dict[str, Any]) -> list[str]:
    """Return the live workers, here and elsewhere, that a job for all of a pattern's workers reaches."""
    target, exec_ = check_job_pattern(str(params.get("subject", ""))), str(params.get("exec", ""))
    identity.check_broadcast(target)
    kind = kind_of(exec_, identity.name)
    everyone = chain((worker.info() for worker in state.workers.values()), (worker for _, worker in state.cluster.workers()))
    met = {
        worker.worker_id
        for worker in everyone
        if Offer(worker.takes, worker.execs).fits(kind, exec_) and any(intersects(one, target) for one in worker.patterns)
    }
    if len(met) > TARGETS_MAX:
        raise TooLarge(f"{target!r} matches {len(met)} workers, the limit is {TARGETS_MAX}; use a narrower pattern")
    return sorted(met - state.cluster.detached)


def reason_of(message: protocol.Request | protocol.CancelJobs) -> str:
    """Return the reason that an order gives; empty: none."""
    reason = message.reason if isinstance(message, protocol.CancelJobs) else str(message.params.get("reason", ""))
    return reason[:REASON_MAX_CHARS]


# ---------------------------------------------------------------------------------------------------- transfers


def transferred(state: BrokerState, session: Session, message: protocol.Message) -> list[events.Command]:
    """Take one message of a blob transfer: of a client, of a worker, or on a connection beside a worker's own."""
    assert session.identity is not None
    match message:
        case protocol.BlobPut():
            return _put_blob(state, session.conn, message)
        case protocol.Chunk():
            return [events.BlobPiece(session.conn, message)]
        case protocol.BlobGet() if isinstance(session, WorkerSession | TransferSession):
            return [events.SendBlob(session.conn, message, session.identity, session.worker_id, session.incarnation)]
        case protocol.BlobGet():
            return [events.SendBlob(session.conn, message, session.identity)]
        case protocol.Heartbeat():
            return [Send(session.conn, protocol.HeartbeatAnswer(message.msg_id))]
        case _:
            raise ProtocolError(f"a connection for blobs may not send {type(message).__name__}")


def _put_blob(state: BrokerState, conn: int, put: protocol.BlobPut) -> list[events.Command]:
    """Ask the store for the place of a blob that a peer brings; from then on collection leaves it alone."""
    check_sha256(put.sha256)
    if not 0 <= put.size_bytes <= protocol.NUMBER_MAX:
        raise InvalidInput(f"a blob cannot have {put.size_bytes} bytes")
    if state.blob_problem:
        raise DiskFull(f"no blob can be taken: {state.blob_problem}; wait, shorten the retention, or raise --blob-budget")

    def placed(places: Sequence[BlobPlace], effects: TurnEffects) -> None:
        session = state.sessions.get(conn)
        if session is not None and session.identity is not None:
            uploader = session.identity
            effects.commands.append(events.ReceiveBlob(conn, put, places[0], uploader.owner, uploader.kind))

    claim = BlobClaim(put.sha256, put.size_bytes)
    state.builder.ask("place_blobs", [claim], placed, partial(state.tell_failure, conn, put.msg_id))
    return []


def blobs_under_way(state: BrokerState, event: events.BlobsUnderWay) -> None:
    """Place blobs again whose uploads take long."""
    claims = [BlobClaim(put.sha256, put.size_bytes) for put in event.puts]
    state.builder.ask("place_blobs", claims, ignore, ignore)


def blob_arrived(state: BrokerState, event: events.BlobArrived) -> None:
    """Tell the store that the bytes of a blob are durable, then the peer that brought it."""
    conn, put = event.conn, event.put

    def stored(answers: Sequence[bool], effects: TurnEffects) -> None:
        if not answers[0]:  # condemned meanwhile: nothing can refer to these bytes, and nobody else may know of them any more
            effects.commands.append(events.DeleteBlobs(0, (event.place,)))
        collected = Unavailable(f"blob {put.sha256} was collected while it came in; send it again")
        state.answer(conn, put.msg_id, {"have": True} if answers[0] else collected, effects)

    state.builder.ask("blobs_stored", [event.place], stored, partial(state.tell_failure, conn, put.msg_id))
