"""The server's decisions: `apply(event, now) -> commands`, and `next_turn(now)` for the store. Pure.

Theory of operation. Messages do not touch the store one by one: they are added to a draft. Whenever the store is idle the
driver takes the draft as one `Turn` (one transaction), and brings its `Answers` back as `TurnDone`. Everything that is sent
to a peer as done (accepted, recorded, assigned, canceled) is sent from `TurnDone`, that is, after the commit.

The broker holds connections, credits, watchers and drafts: nothing of it must survive. There is no queue of jobs here; when a
worker has credit and something may be ready, the turn asks the store for it, in the same transaction that stores new jobs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tasuki.core import settle
from tasuki.core.access import Identity, Kind, identify, token_sha256
from tasuki.core.credit import shares
from tasuki.core.draft import CheckRoute, Draft, HelloRoute, LeaseRoute, Slice, SubmitRoute, TokenRoute
from tasuki.core.ids import check_name
from tasuki.core.job import body_hash, check_spec
from tasuki.core.lifecycle import LEASE_MARGIN_S, LEASE_TTL_S
from tasuki.core.machine import Closed, Hangup, Now, Opened, Received, Send, Ticked
from tasuki.core.protocol import (
    HANDSHAKE_TIMEOUT_S,
    PROTOCOL_OLDEST,
    PROTOCOL_VERSION,
    Acceptance,
    BlobGet,
    BlobPut,
    CancelJobs,
    Chunk,
    Claim,
    ErrorMessage,
    GiveCredit,
    Heartbeat,
    HeartbeatAnswer,
    HelloClient,
    HelloWorker,
    JobsFinished,
    JobsReleased,
    JobsStarted,
    Message,
    Reply,
    Request,
    SubmitJobs,
    Subscribe,
    Welcome,
)
from tasuki.core.sessions import REDELIVER_AFTER_S, REDELIVER_MAX, ClientSession, Session, WorkerSession
from tasuki.core.subject import DEFAULT_PATTERN, SubjectTrie
from tasuki.core.verbs import Answers, Held, LeaseRequest, Report, Submission, TokenRow, Turn
from tasuki.errors import DiskFull, InvalidInput, NotFound, ProtocolError, TasukiError, Unauthorized, VersionMismatch

DUTY_INTERVAL_S = 0.25  # reaping and promoting: two index seeks when there is nothing to do
PRUNE_INTERVAL_S = 10.0
IDLE_TIMEOUT_S = 60.0  # a client that says nothing for so long is gone; it beats every third of it
LEASE_TTL_MIN_S, LEASE_TTL_MAX_S = 1.0, 3600.0
PATTERNS_MAX = 256
CODECS = ("zstd", "gzip")  # in the order of preference; what a peer does not offer is not used
FEATURES = ("batch", "blobs", "watch")
STORE_RETRY_S = 0.2  # after a failed turn


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is told at its start."""

    server_id: str
    epoch: int
    own_uid: int | None = None
    lease_ttl_s: float = LEASE_TTL_S
    retention_s: float = 30 * 86400.0
    frame_max_bytes: int = 8 * 1024 * 1024
    servers: tuple[str, ...] = ()


class TurnDone(msgspec.Struct, frozen=True):
    """The store committed a turn."""

    turn: Turn
    answers: Answers


class TurnFailed(msgspec.Struct, frozen=True):
    """The store refused a turn: nothing of it happened, or (Unavailable) it is not known."""

    turn: Turn
    error: TasukiError


class DiskSpace(msgspec.Struct, frozen=True):
    """The driver looked at the disk; `problem` is empty when there is room."""

    problem: str = ""


class Query(msgspec.Struct, frozen=True):
    """A read that may be slow: the driver answers it from its reader, with what `identity` may see."""

    conn: int
    msg_id: int
    verb: str
    params: dict[str, object]
    identity: Identity
    workers: list[dict[str, object]]


class ReceiveBlob(msgspec.Struct, frozen=True):
    """Take a blob from this peer: it may send one."""

    conn: int
    put: BlobPut


class BlobPiece(msgspec.Struct, frozen=True):
    """A Chunk of a transfer that ReceiveBlob began."""

    conn: int
    chunk: Chunk


class SendBlob(msgspec.Struct, frozen=True):
    """Send a blob if the job's row says that this peer may read it."""

    conn: int
    get: BlobGet
    identity: Identity
    worker_id: str


Event = Opened | Received | Closed | Ticked | TurnDone | TurnFailed | DiskSpace
Command = Send | Hangup | Query | ReceiveBlob | BlobPiece | SendBlob

READ_VERBS = frozenset({"get", "find", "counts", "explain"})
TOKEN_VERBS = frozenset({"token.create", "token.list", "token.revoke"})


class Broker:
    """One server's connections. See the module's docstring."""

    def __init__(self, config: BrokerConfig) -> None:
        self.config = config
        self.sessions: dict[int, Session] = {}
        self.workers: dict[str, WorkerSession] = {}
        self.watchers: dict[str, list[int]] = {}
        self.trie: SubjectTrie[int] = SubjectTrie()
        self.draft = Draft()
        self.disk_problem = ""
        self._live_workers: frozenset[str] = frozenset()
        self._looking: dict[int, WorkerSession] = {}
        self._duty_at = 0.0
        self._prune_at = 0.0
        self._wait_until = 0.0

    # ------------------------------------------------------------------------------------------------ events

    def apply(self, event: Event, now: Now) -> list[Command]:
        match event:
            case Received():
                return self._received(event.conn, event.message, now)
            case TurnDone():
                return settle.turn_done(self, event.turn, event.answers, now)
            case Ticked():
                return self._ticked(now)
            case Opened():
                self.sessions[event.conn] = Session(event.conn, event.peer, now.monotonic, now.monotonic)
                return []
            case Closed():
                self._forget(event.conn)
                return []
            case TurnFailed():
                self._wait_until = now.monotonic + STORE_RETRY_S
                return settle.turn_failed(self, event.turn, event.error, now)
            case DiskSpace():
                if self.disk_problem and not event.problem:
                    self.look_everywhere()
                self.disk_problem = event.problem
                return []

    def _received(self, conn: int, message: Message, now: Now) -> list[Command]:
        session = self.sessions.get(conn)
        if session is None:  # hung up on, and it had sent more before it noticed
            return []
        session.heard_at = now.monotonic
        try:
            if isinstance(session, WorkerSession):
                return self._from_worker(session, message)
            if isinstance(session, ClientSession):
                return self._from_client(session, message, now)
            return self._hello(session, message, now)
        except (Unauthorized, ProtocolError) as error:
            return self.hang_up(conn, error)
        except TasukiError as error:
            return [Send(conn, error_message(getattr(message, "msg_id", 0), error))]

    # ------------------------------------------------------------------------------------------------ Hello

    def _hello(self, session: Session, message: Message, now: Now) -> list[Command]:
        if not isinstance(message, HelloClient | HelloWorker):
            raise ProtocolError(f"the first frame must be HelloClient or HelloWorker, not {type(message).__name__}")
        if session.hello_seen:
            raise ProtocolError("a second Hello came before the first was answered")
        if message.oldest > PROTOCOL_VERSION or message.version < PROTOCOL_OLDEST:
            raise VersionMismatch(
                f"this server speaks protocol versions {PROTOCOL_OLDEST} to {PROTOCOL_VERSION}, "
                f"the peer {message.oldest} to {message.version}; upgrade the older side"
            )
        session.hello_seen = True
        if not message.token and session.peer.uid is not None and session.peer.uid == self.config.own_uid:
            identity = Identity(Kind.NODE, f"uid:{session.peer.uid}")
            return self.welcome(session, message, identity, now)
        if not message.token:
            raise Unauthorized(
                "a token is needed: --token-file FILE or TASUKI_TOKEN (the server's own user finds it in the data folder)"
            )
        self.draft.token.append(token_sha256(message.token))
        self.draft.hello_routes.append(HelloRoute(session.conn, message))
        return []

    def token_known(self, route: HelloRoute, row: TokenRow | None, now: Now) -> list[Command]:
        """The store looked the token up."""
        session = self.sessions.get(route.conn)
        if session is None:
            return []
        try:
            return self.welcome(session, route.hello, identify(row, now.wall), now)
        except TasukiError as error:
            return self.hang_up(route.conn, error)

    def welcome(self, session: Session, hello: HelloClient | HelloWorker, identity: Identity, now: Now) -> list[Command]:
        common: dict[str, Any] = {
            "conn": session.conn,
            "peer": session.peer,
            "opened_at": session.opened_at,
            "heard_at": now.monotonic,
            "identity": identity,
        }
        ttl_s = self.config.lease_ttl_s
        commands: list[Command] = []
        if isinstance(hello, HelloWorker):
            worker = self._new_worker(common, hello, identity)
            commands += self._replace_worker(worker)
            self.sessions[session.conn] = self.workers[worker.worker_id] = worker
            self._live_workers = frozenset(self.workers)
            ttl_s = worker.ttl_s
            for pattern in worker.patterns:
                self.trie.add(pattern, worker.conn)
            if hello.resumed:
                self.draft.held.append((worker.worker_id, worker.incarnation))
                self.draft.held_routes.append(worker.conn)
        else:
            if identity.kind is Kind.WORKER:
                raise Unauthorized("a worker token cannot be used by a client; make one with: tasuki token create --kind client")
            client_id = check_name(hello.client_id, "client_id")
            self.sessions[session.conn] = ClientSession(**common, client_id=client_id)
        welcome = Welcome(
            corr_id=hello.msg_id,
            version=min(PROTOCOL_VERSION, hello.version),
            server_id=self.config.server_id,
            identity=identity.name,
            kind=identity.kind,
            servers=self.config.servers,
            features=FEATURES,
            codecs=tuple(codec for codec in CODECS if codec in hello.codecs)[:1],
            lease_ttl_s=ttl_s,
            lease_margin_s=LEASE_MARGIN_S,
            frame_max_bytes=self.config.frame_max_bytes,
            idle_timeout_s=IDLE_TIMEOUT_S,
        )
        return [*commands, Send(session.conn, welcome)]

    def _new_worker(self, common: dict[str, Any], hello: HelloWorker, identity: Identity) -> WorkerSession:
        identity.check_worker()
        check_name(hello.worker_id, "worker_id")
        check_name(hello.incarnation, "incarnation")
        if "." in hello.worker_id:
            raise InvalidInput(f"worker_id {hello.worker_id!r} may not contain a dot: it can be the last token of a subject")
        patterns = self._checked_patterns(identity, hello.patterns or (DEFAULT_PATTERN,))
        ttl_s = hello.ttl_s if hello.ttl_s is not None else self.config.lease_ttl_s
        if not LEASE_TTL_MIN_S <= ttl_s <= LEASE_TTL_MAX_S:
            raise InvalidInput(f"the lease ttl must be {LEASE_TTL_MIN_S:g} to {LEASE_TTL_MAX_S:g} seconds, got {ttl_s:g}")
        worker = WorkerSession(
            **common,
            worker_id=hello.worker_id,
            incarnation=hello.incarnation,
            patterns=patterns,
            on_disconnect=hello.on_disconnect,
            reconnect_grace_s=max(0.0, min(hello.reconnect_grace_s, LEASE_TTL_MAX_S)),
            ttl_s=ttl_s,
            host=hello.host[:200],
            slots=hello.slots,
        )
        worker.account.running = len(hello.holding)
        return worker

    def _checked_patterns(self, identity: Identity, patterns: tuple[str, ...]) -> tuple[str, ...]:
        if len(patterns) > PATTERNS_MAX:
            raise InvalidInput(f"{len(patterns)} patterns are too many, the limit is {PATTERNS_MAX}")
        identity.check_patterns(patterns)
        return tuple(dict.fromkeys(patterns))

    def _replace_worker(self, worker: WorkerSession) -> list[Command]:
        """The same worker_id again: a restarted process (a fresh incarnation) or a new connection of the same one."""
        old = self.workers.get(worker.worker_id)
        if old is None:
            return []
        why = "a new connection" if old.incarnation == worker.incarnation else "a new start"
        return self.hang_up(old.conn, ProtocolError(f"worker {worker.worker_id!r}: {why} of it has taken its place"))

    # ------------------------------------------------------------------------------------------------ clients

    def _from_client(self, client: ClientSession, message: Message, now: Now) -> list[Command]:
        assert client.identity is not None
        match message:
            case SubmitJobs():
                return self._submit(client, client.identity, message)
            case Heartbeat():
                return [Send(client.conn, HeartbeatAnswer(message.msg_id))]
            case Request():
                return self._request(client, client.identity, message, now)
            case CancelJobs():
                return self._check(client.conn, message.msg_id, message.job_ids, "cancel", message.reason)
            case BlobPut():
                return [ReceiveBlob(client.conn, message)]
            case Chunk():
                return [BlobPiece(client.conn, message)]
            case BlobGet():
                return [SendBlob(client.conn, message, client.identity, "")]
            case _:
                raise ProtocolError(f"a client may not send {type(message).__name__}")

    def _submit(self, client: ClientSession, identity: Identity, message: SubmitJobs) -> list[Command]:
        if self.disk_problem:
            raise DiskFull(f"no job can be accepted: {self.disk_problem}")
        if message.on_failed not in ("return", "rerun"):
            raise InvalidInput(f'on_failed must be "return" or "rerun", got {message.on_failed[:40]!r}')
        rerun = message.on_failed == "rerun"
        into = self.draft.rerun if rerun else self.draft.submit
        start = len(into)
        submitter = identity.name
        subjects = self.draft.subjects
        rejected: list[Acceptance] = []
        indexes: list[int] | None = None
        for index, spec in enumerate(message.specs):
            try:
                check_spec(spec)
                if identity.scope:
                    identity.check_submit(spec.subject)
            except TasukiError as error:
                if indexes is None:
                    indexes = list(range(index))
                rejected.append(Acceptance(index, spec.job_id[:128], "", error.code, error.message, error.details()))
                continue
            if indexes is not None:
                indexes.append(index)
            subjects.add(spec.subject)
            into.append(Submission(spec, submitter, body_hash(spec)))
        count = len(message.specs)
        route = SubmitRoute(client.conn, message.msg_id, start, len(into), message.watch, rerun, count, rejected, indexes)
        self.draft.submit_routes.append(route)
        return []

    def _check(self, conn: int, msg_id: int, job_ids: Iterable[str], action: str, reason: str = "") -> list[Command]:
        start = len(self.draft.get)
        self.draft.get.extend(job_ids)
        self.draft.check_routes.append(CheckRoute(conn, msg_id, start, len(self.draft.get), action, reason[:1000]))
        return []

    def _request(self, client: ClientSession, identity: Identity, request: Request, now: Now) -> list[Command]:
        verb, params = request.verb, request.params
        if verb in READ_VERBS:
            workers = self.describe_workers() if verb == "explain" else []
            return [Query(client.conn, request.msg_id, verb, params, identity, workers)]
        if verb in ("watch", "requeue"):
            job_ids = params.get("job_ids")
            if not isinstance(job_ids, list) or not all(isinstance(job_id, str) for job_id in job_ids):
                raise InvalidInput(f"{verb} needs job_ids, a list of texts")
            return self._check(client.conn, request.msg_id, job_ids, verb, str(params.get("reason", "")))
        if verb == "workers":
            identity.check_admin("the list of workers")
            return [Send(client.conn, Reply(request.msg_id, self.describe_workers()))]
        if verb in TOKEN_VERBS:
            identity.check_admin(verb)
            return self._token_order(client, request, identity)
        raise NotFound(
            f"there is no request {verb[:40]!r}; there are {', '.join(sorted(READ_VERBS | TOKEN_VERBS))}, watch, requeue, workers"
        )

    def _token_order(self, client: ClientSession, request: Request, identity: Identity) -> list[Command]:
        draft, index, body = self.draft, 0, None
        if request.verb == "token.create":
            try:
                row = msgspec.convert(request.params, TokenRow)
            except msgspec.ValidationError as error:
                raise InvalidInput(f"token.create: {error}") from None
            if row.kind not in ("admin", "client", "worker"):
                raise InvalidInput(f"a token's kind must be admin, client or worker, got {row.kind[:40]!r}")
            for pattern in row.scope:
                identity.check_patterns((pattern,))
            draft.add_token.append(msgspec.structs.replace(row, created_by=identity.name))
            body = {"token_id": row.token_id}
        elif request.verb == "token.revoke":
            index = len(draft.revoke_token)
            token_id = str(request.params.get("token_id", ""))
            draft.revoke_token.append((token_id, identity.name))
            body = {"token_id": token_id}
        else:
            draft.list_tokens = True
        draft.token_routes.append(TokenRoute(client.conn, request.msg_id, request.verb, index, body))
        return []

    # ------------------------------------------------------------------------------------------------ workers

    def _from_worker(self, worker: WorkerSession, message: Message) -> list[Command]:
        match message:
            case JobsFinished():
                self._finished(worker, message)
            case GiveCredit():
                worker.account.give(message.credit)
                self._look(worker, backlog=True)
            case JobsStarted():
                start = len(self.draft.start)
                self.draft.start.extend(self._held(worker, message.claims))
                self.draft.start_routes.append(Slice(worker.conn, start, len(self.draft.start)))
            case Heartbeat():
                start = len(self.draft.renew)
                self.draft.renew.extend(self._held(worker, message.claims))
                self.draft.renew_routes.append(Slice(worker.conn, start, len(self.draft.renew), message.msg_id))
            case JobsReleased():
                for claim in message.claims:
                    worker.deliveries.pop(claim.lease_id, None)
                worker.account.ended(len(message.claims))
                self.draft.release.extend(self._held(worker, message.claims))
                self.look_everywhere()
            case Subscribe():
                assert worker.identity is not None
                self._change_patterns(worker, self._checked_patterns(worker.identity, message.patterns))
                return [Send(worker.conn, Reply(message.msg_id, {"patterns": list(worker.patterns)}))]
            case BlobPut():
                return [ReceiveBlob(worker.conn, message)]
            case Chunk():
                return [BlobPiece(worker.conn, message)]
            case BlobGet():
                assert worker.identity is not None
                return [SendBlob(worker.conn, message, worker.identity, worker.worker_id)]
            case _:
                raise ProtocolError(f"a worker may not send {type(message).__name__}")
        return []

    def _finished(self, worker: WorkerSession, message: JobsFinished) -> None:
        draft, worker_id, deliveries = self.draft, worker.worker_id, worker.deliveries
        finish, fail = draft.finish, draft.fail
        finish_start, fail_start = len(finish), len(fail)
        for ending in message.endings:
            deliveries.pop(ending.lease_id, None)
            report = Report(ending.job_id, worker_id, ending.lease_id, ending.attempt, ending.outcome, ending.started_at)
            (finish if ending.outcome.error_code is None else fail).append(report)
        worker.account.ended(len(message.endings))
        if len(finish) > finish_start:
            draft.finish_routes.append(Slice(worker.conn, finish_start, len(finish)))
        if len(fail) > fail_start:
            draft.fail_routes.append(Slice(worker.conn, fail_start, len(fail)))

    def _held(self, worker: WorkerSession, claims: list[Claim]) -> list[Held]:
        held = []
        for claim in claims:
            delivery = worker.deliveries.get(claim.lease_id)
            if delivery is not None:
                delivery.acked = True
            held.append(Held(claim.job_id, worker.worker_id, worker.incarnation, claim.lease_id, claim.attempt, worker.ttl_s))
        return held

    def _change_patterns(self, worker: WorkerSession, patterns: tuple[str, ...]) -> None:
        for pattern in worker.patterns:
            self.trie.remove(pattern, worker.conn)
        worker.patterns = patterns
        for pattern in patterns:
            self.trie.add(pattern, worker.conn)
        if worker.account.available and patterns:
            self._look(worker, backlog=True)

    # ------------------------------------------------------------------------------------------------ leasing

    def _look(self, worker: WorkerSession, *, backlog: bool) -> None:
        worker.backlog = worker.backlog or backlog
        self._looking[worker.conn] = worker

    def look_everywhere(self) -> None:
        """Something became ready of which no submit tells: every worker with credit looks again."""
        for worker in self.workers.values():
            if worker.account.available:
                self._look(worker, backlog=True)

    def look_for(self, subjects: Iterable[str]) -> None:
        """Jobs of these subjects became ready."""
        for subject in subjects:
            for conn in self.trie.match(subject):
                worker = self.sessions.get(conn)
                if isinstance(worker, WorkerSession) and worker.account.available:
                    self._look(worker, backlog=False)

    def leased(self, worker: WorkerSession, asked: int, granted: int) -> None:
        """A lease request came back. Fewer than asked for: there is nothing more for this worker now."""
        worker.account.settle(asked, granted)
        worker.backlog = granted == asked
        if granted == asked and worker.account.available:
            self._look(worker, backlog=True)

    def _lease_requests(self) -> list[LeaseRequest]:
        self.look_for(self.draft.subjects)
        if not self._looking or self.disk_problem:
            return []
        looking, self._looking = self._looking, {}
        everybody = [worker for worker in looking.values() if worker.patterns]
        full = [worker for worker in everybody if worker.backlog]
        fresh = [worker for worker in everybody if not worker.backlog]
        wanted = len(self.draft.submit) + len(self.draft.rerun)
        plan = shares([(worker.worker_id, worker.account) for worker in full], None)
        plan += shares([(worker.worker_id, worker.account) for worker in fresh], wanted)
        requests = []
        for worker_id, limit in plan:
            worker = self.workers[worker_id]
            reserved = worker.account.reserve(limit)
            requests.append(
                LeaseRequest(
                    worker_id=worker_id,
                    incarnation=worker.incarnation,
                    patterns=worker.patterns,
                    limit=reserved,
                    ttl_s=worker.ttl_s,
                    on_disconnect=worker.on_disconnect,
                    reconnect_grace_s=worker.reconnect_grace_s,
                    live_workers=self._live_workers,
                )
            )
            self.draft.lease_routes.append(LeaseRoute(worker.conn, worker.incarnation, reserved))
        return requests

    def next_turn(self, now: Now) -> Turn | None:
        """What the store should do next, or None if there is nothing; the draft begins anew."""
        if now.monotonic < self._wait_until:
            return None
        leases = self._lease_requests()
        duties = now.monotonic >= self._duty_at
        prune = now.monotonic >= self._prune_at
        if not (leases or len(self.draft) or duties or self.draft.submit_routes or self.draft.check_routes):
            return None
        if duties:
            self._duty_at = now.monotonic + DUTY_INTERVAL_S
        if prune:
            self._prune_at = now.monotonic + PRUNE_INTERVAL_S
        prune_before = now.wall - self.config.retention_s if prune else None
        turn = self.draft.turn(leases, epoch=self.config.epoch, duties=duties, prune_before=prune_before)
        self.draft = Draft()
        return turn

    # ------------------------------------------------------------------------------------------------ time, ends

    def _ticked(self, now: Now) -> list[Command]:
        commands: list[Command] = []
        for session in list(self.sessions.values()):
            silent_s = now.monotonic - session.heard_at
            if isinstance(session, WorkerSession):
                if silent_s > session.ttl_s + LEASE_MARGIN_S:
                    commands += self.hang_up(session.conn, ProtocolError(f"no heartbeat for {silent_s:.0f} s"))
                else:
                    self._redeliver(session, now)
            elif isinstance(session, ClientSession):
                if silent_s > IDLE_TIMEOUT_S:
                    commands += self.hang_up(session.conn, ProtocolError(f"nothing was heard for {silent_s:.0f} s"))
            elif now.monotonic - session.opened_at > HANDSHAKE_TIMEOUT_S:
                commands += self.hang_up(session.conn, ProtocolError(f"no Hello within {HANDSHAKE_TIMEOUT_S:g} s"))
        return commands

    def _redeliver(self, worker: WorkerSession, now: Now) -> None:
        """An assignment of which no sign came back is sent again, from the store, with growing waits; the worker drops doubles."""
        due = False
        for delivery in worker.deliveries.values():
            wait_s = REDELIVER_AFTER_S * (1 << delivery.tries)
            if not delivery.acked and delivery.tries < REDELIVER_MAX and now.monotonic - delivery.sent_at >= wait_s:
                delivery.tries += 1
                delivery.sent_at = now.monotonic
                due = True
        if due:
            self.draft.held.append((worker.worker_id, worker.incarnation))
            self.draft.held_routes.append(worker.conn)

    def hang_up(self, conn: int, error: TasukiError) -> list[Command]:
        """Tell the peer why, and forget it."""
        self._forget(conn)
        return [Hangup(conn, error)]

    def _forget(self, conn: int) -> None:
        session = self.sessions.pop(conn, None)
        if isinstance(session, WorkerSession):
            for pattern in session.patterns:
                self.trie.remove(pattern, conn)
            self._looking.pop(conn, None)
            if self.workers.get(session.worker_id) is session:
                del self.workers[session.worker_id]
                self._live_workers = frozenset(self.workers)
                # Jobs addressed to this worker by their last token may now go to others.
                self.look_everywhere()
        elif isinstance(session, ClientSession):
            for job_id in session.watching:
                watching = self.watchers.get(job_id)
                if watching is not None:
                    watching[:] = [other for other in watching if other != conn]
                    if not watching:
                        del self.watchers[job_id]

    def describe_workers(self) -> list[dict[str, object]]:
        """The live workers of this server, for people."""
        return [
            {
                "worker_id": worker.worker_id,
                "incarnation": worker.incarnation,
                "host": worker.host,
                "patterns": list(worker.patterns),
                "credit": worker.account.available + worker.account.reserved,
                "running": worker.account.running,
                "slots": worker.slots,
                "address": worker.peer.address,
                "on_disconnect": str(worker.on_disconnect),
            }
            for worker in self.workers.values()
        ]


def error_message(corr_id: int, error: TasukiError) -> ErrorMessage:
    """An error as the wire carries it."""
    return ErrorMessage(corr_id, error.code, error.message, error.details())
