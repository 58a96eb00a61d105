"""The server's decisions: `apply(event, now) -> commands`, and `next_turn(now)` for the store. Pure.

Theory of operation. Messages do not touch the store one by one: they are added to a draft. Whenever the store is idle the
driver takes the draft as one `Turn` (one transaction), and brings its `Answers` back as `TurnDone`. Everything that is sent
to a peer as done (accepted, recorded, assigned, canceled) is sent from `TurnDone`, that is, after the commit.

The broker holds connections, credits, watchers and drafts: nothing of it must survive. There is no queue of jobs here; when a
worker has credit and something may be ready, the turn asks the store for it, in the same transaction that stores new jobs.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from tasuki.core.access import PeerKind
from tasuki.core.broker import client_messages, enrolment, handshake, settle, worker_messages
from tasuki.core.broker.cluster import OtherServers, describe
from tasuki.core.broker.credit import shares
from tasuki.core.broker.events import (
    BlobArrived,
    BlobPiece,
    BlobsDeleted,
    BlobsUnderWay,
    BrokerConfig,
    Command,
    DiskSpace,
    Elected,
    Event,
    Hinted,
    JobSeen,
    Met,
    SendBlob,
    SomeEnded,
    SomeRevoked,
    ToldEvent,
    TurnDone,
    TurnFailed,
    Won,
)
from tasuki.core.broker.idle_workers import IdleWorkers
from tasuki.core.broker.log_reads import LogReads
from tasuki.core.broker.sessions import REDELIVER_AFTER_S, REDELIVER_MAX, ClientSession, Session, TransferSession, WorkerSession
from tasuki.core.broker.turn_builder import BlobRoute, CheckRoute, LeaseRoute, TurnBuilder
from tasuki.core.broker.upkeep import Upkeep, UpkeepConfig
from tasuki.core.cluster_messages import ServerInfo
from tasuki.core.lifecycle import LEASE_MARGIN_S
from tasuki.core.machine import Closed, Hangup, Now, Opened, Received, Send, Ticked
from tasuki.core.protocol import (
    BATCH_MAX,
    HANDSHAKE_TIMEOUT_S,
    BlobGet,
    BlobPut,
    CancelJobs,
    Chunk,
    ErrorMessage,
    Heartbeat,
    HeartbeatAnswer,
    Message,
    Request,
    SubmitJobs,
)
from tasuki.core.store_messages import BlobClaim, LeaseRequest, Reaped, Turn
from tasuki.core.subject import SubjectTrie
from tasuki.errors import InvalidInput, ProtocolError, TasukiError, Unauthorized

READS_PER_TURN = 512  # jobs whose rows, with results of up to 64 KiB, are read at once
SESSIONS_INTERVAL_S = 0.5  # silence, an expired token, an assignment without a sign: all of them are a matter of seconds
LOOK_INTERVAL_S = 1.0  # every worker with credit looks this often, whatever hint may have been missed
SILENT_SHARE = 2 / 3  # of the ttl; a worker beats every third of it
CHOICE_MIN = 8  # idle workers beyond two for each new job, among which the least busy are asked
STORE_RETRY_S = 0.2  # after a failed turn
NOBODY = 0  # connections are numbered from 1


class Broker:
    """One server's connections. See the module's docstring."""

    def __init__(self, config: BrokerConfig) -> None:
        self.config = config
        self.sessions: dict[int, Session] = {}
        self.workers: dict[str, WorkerSession] = {}
        self.watchers: dict[str, int | list[int]] = {}
        """Who wants to hear of a job's end: nearly always one connection, so that one number is kept and no list."""
        self.generations: dict[str, int] = {}
        """Of the watched jobs that were set going again."""
        self.trie: SubjectTrie[int] = SubjectTrie()
        self.draft = TurnBuilder()
        self.disk_problem = ""
        self.store_problem = ""
        """Why the last turn was not stored; empty: it was."""
        self.duties = Upkeep(UpkeepConfig.of(config), config.epoch)
        self.fellows = OtherServers()
        self.logs = LogReads()
        self.addresses: tuple[str, ...] = ()
        """Where peers can reach this server; the doors know."""
        self.idle = IdleWorkers(self.trie)
        self._live_workers: dict[str, tuple[str, ...]] | None = {}
        """None: to be made anew when it is next needed."""
        self._looking: dict[int, WorkerSession] = {}
        self._all_look = False
        self._wait_until = 0.0
        self._look_at = self._look_at_sessions_at = 0.0

    # ------------------------------------------------------------------------------------------------ events

    def apply(self, event: Event, now: Now) -> list[Command]:
        match event:
            case Received():
                return self._received(event, now)
            case TurnDone():
                return self._turn_done(event, now)
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
                if event.turn.epoch:
                    return self.duties.failed(event.turn, event.error)
                return settle.turn_failed(self, event.turn, event.error, now)
            case JobSeen():
                return self.logs.seen(self, event, now)
            case _:
                return self._told(event)

    def _told(self, event: ToldEvent) -> list[Command]:
        """What the driver noticed besides connections and turns."""
        match event:
            case DiskSpace():
                if self.disk_problem and not event.problem:
                    self.look_everywhere()
                self.disk_problem = event.problem
                return []
            case BlobArrived():
                self.draft.blobs_stored.append(event.place)
                self.draft.stored_routes.append(BlobRoute(event.conn, event.put))
                return []
            case BlobsUnderWay():
                for put in event.puts:
                    self.draft.place_blobs.append(BlobClaim(put.sha256, put.size_bytes))
                    self.draft.place_routes.append(BlobRoute(NOBODY, put))
                return []
            case BlobsDeleted():
                self.duties.blobs_deleted(event.epoch, event.places)
                return []
            case Won():
                self.duties.claim(event.epoch, self.config.server_id)
                return []
            case Elected():
                self.duties.lead(event.epoch)
                return []
            case Met():
                self.fellows.met(self, event.servers, event.detached)
                return []
            case Hinted():
                return self.fellows.heard(self, event.hint)
            case SomeEnded():
                self.ask_ends(event.job_ids)
                return []
            case SomeRevoked():
                return self.fellows.revoked(self, event.token_ids)

    def _turn_done(self, event: TurnDone, now: Now) -> list[Command]:
        if event.turn.epoch:
            commands = self.duties.done(self, event.turn, event.answers)
        else:
            commands = settle.turn_done(self, event.turn, event.answers, now)
        return commands + self.fellows.hint(self.config.server_id)

    def _received(self, event: Received, now: Now) -> list[Command]:
        conn, message = event.conn, event.message
        session = self.sessions.get(conn)
        if session is None:  # hung up on, and it had sent more before it noticed
            return []
        session.heard_at = now.monotonic
        try:
            if isinstance(session, WorkerSession):
                return worker_messages.received(self, session, message, now)
            if isinstance(session, ClientSession):
                return self._from_client(session, message)
            if isinstance(session, TransferSession):
                return worker_messages.transferred(self, session, message)
            return handshake.hello(self, session, message, now)
        except (Unauthorized, ProtocolError) as error:
            return self.hang_up(conn, error)
        except TasukiError as error:
            msg_id = getattr(message, "msg_id", 0)
            if session.identity is None or not msg_id:  # there is no request that this could be the answer to
                return self.hang_up(conn, error)
            return [Send(conn, error_message(msg_id, error))]

    def add_worker(self, worker: WorkerSession) -> None:
        """A worker was welcomed."""
        self.sessions[worker.conn] = self.workers[worker.worker_id] = worker
        self.note_live_workers()
        for pattern in worker.patterns:
            self.trie.add(pattern, worker.conn)

    # ------------------------------------------------------------------------------------------------ clients

    def _from_client(self, client: ClientSession, message: Message) -> list[Command]:
        assert client.identity is not None
        if client.identity.kind is PeerKind.ENROL:
            enrolment.check_enrolment(message)
        match message:
            case SubmitJobs():
                return client_messages.submit(self, client, client.identity, message)
            case Heartbeat():
                return [Send(client.conn, HeartbeatAnswer(message.msg_id, servers=handshake.new_servers(self, client)))]
            case Request():
                return client_messages.request(self, client, client.identity, message)
            case CancelJobs():
                return self.check(client.conn, message.msg_id, message.job_ids, "cancel", message.reason)
            case BlobPut():
                return client_messages.put_blob(self, client.conn, message)
            case Chunk():
                return [BlobPiece(client.conn, message)]
            case BlobGet():
                return [SendBlob(client.conn, message, client.identity, "")]
            case _:
                raise ProtocolError(f"a client may not send {type(message).__name__}")

    def check(self, conn: int, msg_id: int, job_ids: Iterable[str], action: str, reason: str = "") -> list[Command]:
        """Read these jobs in the next turn; `settle` judges who may do the action, and does it."""
        job_ids = list(dict.fromkeys(job_ids))
        if len(job_ids) > BATCH_MAX and conn != NOBODY:
            raise InvalidInput(f"{action} of {len(job_ids)} jobs at once is too much, the limit is {BATCH_MAX}; send several")
        start = len(self.draft.get)
        self.draft.get.extend(job_ids)
        self.draft.check_routes.append(CheckRoute(conn, msg_id, start, len(self.draft.get), action, reason[:1000]))
        return []

    # ------------------------------------------------------------------------------------------------ workers

    def read_back(self, worker: WorkerSession) -> None:
        """Ask the store which assignments it has for this worker; until it answers nothing more is leased for it."""
        if worker.reading:
            return
        worker.reading = True
        self.draft.held.append((worker.worker_id, worker.incarnation))
        self.draft.held_routes.append(worker.conn)

    def forget_deliveries(self, lost: Iterable[Reaped]) -> None:
        """These attempts are over, whatever their workers do; a worker that let one go may never speak of it again."""
        for reaped in lost:
            worker = self.workers.get(reaped.worker_id)
            if worker is None:
                continue
            for lease_id, delivery in list(worker.deliveries.items()):
                if (delivery.claim.job_id, delivery.claim.attempt) == (reaped.job_id, reaped.attempt):
                    del worker.deliveries[lease_id]
                    worker.account.ended()

    def ask_ends(self, job_ids: Iterable[str]) -> None:
        """These jobs may have ended otherwise than by a report: their watchers are told what their rows say."""
        watched = [job_id for job_id in job_ids if job_id in self.watchers]
        if watched:
            self.check(NOBODY, 0, watched, "ends")

    def change_patterns(self, worker: WorkerSession, patterns: tuple[str, ...]) -> None:
        for pattern in worker.patterns:
            self.trie.remove(pattern, worker.conn)
        worker.patterns = patterns
        for pattern in patterns:
            self.trie.add(pattern, worker.conn)
        self.note_live_workers()
        self.look_everywhere()  # itself for what it takes now, others for what it no longer keeps from them

    def note_live_workers(self) -> None:
        """Who takes work has changed. It is put together once per turn: thousands may come or go at once."""
        self._live_workers = None

    def _live(self) -> dict[str, tuple[str, ...]]:
        """Jobs addressed to one of these by their last token are left for it, if it subscribes to them."""
        if self._live_workers is not None:
            return self._live_workers
        # A new one each time: requests of turns under way keep theirs.
        live = {worker.worker_id: worker.patterns for _, worker in self.fellows.workers() if worker.patterns}
        live |= {worker_id: worker.patterns for worker_id, worker in self.workers.items() if worker.patterns}
        self._live_workers = {
            worker_id: patterns for worker_id, patterns in live.items() if worker_id not in self.fellows.detached
        }
        return self._live_workers

    # ------------------------------------------------------------------------------------------------ leasing

    def look(self, worker: WorkerSession, *, backlog: bool) -> None:
        """Ask the store for work for this worker at the next turn; with `backlog`, for more than what that turn submits."""
        worker.backlog = worker.backlog or backlog
        self._looking[worker.conn] = worker
        self.idle.note(worker)

    def look_everywhere(self) -> None:
        """Something became ready of which no submit tells: every worker with credit looks again, at the next turn."""
        self._all_look = True

    def look_for(self, subjects: Iterable[str], *, backlog: bool = False) -> None:
        """Jobs of these subjects became ready: those that the draft submits, or with `backlog` others.

        For new ones some idle workers look: more than there are jobs, so that the least busy can be chosen, and far fewer than
        all, whose number would be the cost of every turn. `settle` looks further for what they leave.
        """
        enough = None if backlog else 2 * (len(self.draft.submit) + len(self.draft.rerun)) + CHOICE_MIN
        for subject in subjects:
            for worker in islice(self.idle.matching(subject), enough):
                self.look(worker, backlog=backlog)

    def leased(self, worker: WorkerSession, lease: LeaseRoute, granted: int) -> None:
        """A lease request came back. Fewer than asked for: there is nothing more for this worker now."""
        worker.account.settle(lease.reserved, granted)
        self.idle.note(worker, last=granted > 0)
        more = granted == lease.reserved and not lease.fresh
        # Something may have become ready while the store was at work: that look is still to come.
        worker.backlog = more or (worker.backlog and worker.conn in self._looking)
        if more and worker.account.available:
            self.look(worker, backlog=True)

    def _lease_requests(self, now: Now) -> list[LeaseRequest]:
        if self._all_look:
            self._all_look = False
            for worker in self.idle:
                self.look(worker, backlog=True)
        self.look_for(self.draft.subjects)
        if not self._looking or self.disk_problem:
            return []
        looking = self._looking
        self._looking = {conn: worker for conn, worker in looking.items() if worker.resuming or worker.reading}
        free = [worker for worker in looking.values() if not (worker.resuming or worker.reading) and not _is_silent(worker, now)]
        everybody = [worker for worker in free if worker.patterns and worker.worker_id not in self.fellows.detached]
        full = [worker for worker in everybody if worker.backlog]
        fresh = [worker for worker in everybody if not worker.backlog]
        wanted = len(self.draft.submit) + len(self.draft.rerun)
        plan = shares([(worker.worker_id, worker.account) for worker in full], None)
        plan += shares([(worker.worker_id, worker.account) for worker in fresh], wanted)
        requests = []
        live_workers = self._live() if plan else {}
        for worker_id, limit in plan:
            worker = self.workers[worker_id]
            reserved = worker.account.reserve(limit)
            requests.append(
                LeaseRequest(
                    worker_id=worker_id,
                    incarnation=worker.incarnation,
                    patterns=worker.patterns,
                    takes=worker.takes,
                    limit=reserved,
                    ttl_s=worker.ttl_s,
                    on_disconnect=worker.on_disconnect,
                    reconnect_grace_s=worker.reconnect_grace_s,
                    live_workers=live_workers,
                )
            )
            self.draft.lease_routes.append(LeaseRoute(worker.conn, worker.incarnation, reserved, not worker.backlog))
        return requests

    def next_turn(self, now: Now) -> Turn | None:
        """What the store should do next, or None if there is nothing; the draft begins anew."""
        if now.monotonic < self._wait_until:
            return None
        others_wait = bool(self._all_look or self._looking or len(self.draft))
        if (duty := self.duties.next_turn(now, others_wait=others_wait)) is not None:
            return duty
        if not others_wait:
            return None
        leases = self._lease_requests(now)
        if not (leases or len(self.draft)):
            return None
        following = self.draft.leave_reads(READS_PER_TURN)
        turn = self.draft.turn(leases)
        self.draft = following
        return turn

    # ------------------------------------------------------------------------------------------------ time, ends

    def _ticked(self, now: Now) -> list[Command]:
        commands: list[Command] = []
        if now.monotonic >= self._look_at:
            self._look_at = now.monotonic + LOOK_INTERVAL_S
            self.look_everywhere()
        commands += self.fellows.poll(self, now)
        commands += self.logs.ticked(self, now)
        if now.monotonic < self._look_at_sessions_at:
            return commands
        self._look_at_sessions_at = now.monotonic + SESSIONS_INTERVAL_S
        for session in list(self.sessions.values()):
            if session.identity is not None and session.identity.expired(now.wall):
                commands += self.hang_up(session.conn, Unauthorized(f"token {session.identity.token_id} has expired"))
                continue
            silent_s = now.monotonic - session.heard_at
            if isinstance(session, WorkerSession):
                if silent_s > session.ttl_s + LEASE_MARGIN_S:
                    commands += self.hang_up(session.conn, ProtocolError(f"no heartbeat for {silent_s:.0f} s"))
                elif session.deliveries:
                    self._redeliver(session, now)
            elif session.identity is not None and silent_s > handshake.IDLE_TIMEOUT_S:
                commands += self.hang_up(session.conn, ProtocolError(f"nothing was heard for {silent_s:.0f} s"))
            elif session.identity is None and now.monotonic - session.opened_at > HANDSHAKE_TIMEOUT_S:
                commands += self.hang_up(session.conn, ProtocolError(f"no Hello within {HANDSHAKE_TIMEOUT_S:g} s"))
        return commands

    def _redeliver(self, worker: WorkerSession, now: Now) -> None:
        """An assignment of which no sign came back is sent again, with growing waits; the worker drops doubles."""
        due = False
        for delivery in worker.deliveries.values():
            wait_s = REDELIVER_AFTER_S * (1 << delivery.tries)
            if not delivery.acked and delivery.tries < REDELIVER_MAX and now.monotonic - delivery.sent_at >= wait_s:
                delivery.tries += 1
                delivery.sent_at = now.monotonic
                due = True
        if due and not worker.reading and not worker.resuming:
            self.read_back(worker)

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
            self.idle.forget(conn)
            if self.workers.get(session.worker_id) is session:
                del self.workers[session.worker_id]
                self.note_live_workers()
                # Jobs addressed to this worker by their last token may now go to others.
                self.look_everywhere()
        elif isinstance(session, ClientSession):
            for job_id in session.watching:
                self._unwatch(job_id, conn)

    def watch(self, session: ClientSession, job_id: str) -> None:
        """This client hears of the job's end."""
        if job_id in session.watching:
            return
        session.watching.add(job_id)
        others = self.watchers.setdefault(job_id, session.conn)
        if others != session.conn:
            self.watchers[job_id] = [*others, session.conn] if isinstance(others, list) else [others, session.conn]

    def _unwatch(self, job_id: str, conn: int) -> None:
        watching = self.watchers.get(job_id)
        if isinstance(watching, list):
            watching.remove(conn)
        if watching in (conn, []):
            del self.watchers[job_id]
            self.generations.pop(job_id, None)

    @property
    def blob_problem(self) -> str:
        """Why no new blob can be taken; empty: there is room."""
        return self.duties.over_budget or self.fellows.blob_problem

    @property
    def info(self) -> ServerInfo:
        """What the other servers should know of this one."""
        own = tuple(describe(worker) for worker in self.workers.values())
        return ServerInfo(
            server_id=self.config.server_id,
            addresses=self.addresses,
            workers=own,
            epoch=self.duties.epoch,
            blob_problem=self.duties.over_budget,
        )

    def describe_servers(self) -> list[dict[str, object]]:
        """All live servers, this one first, for people."""
        return [
            {
                "server_id": info.server_id,
                "addresses": list(info.addresses),
                "workers": len(info.workers),
                "leads": info.epoch > 0,
                "epoch": info.epoch or None,
            }
            for info in (self.info, *self.fellows.servers.values())
        ]

    def describe_workers(self) -> list[dict[str, object]]:
        """All live workers, those of this server first, for people."""
        own = [describe(worker).view(self.config.server_id) for worker in self.workers.values()]
        views = own + [worker.view(server_id) for server_id, worker in self.fellows.workers()]
        return [{**view, "detached": view["worker_id"] in self.fellows.detached} for view in views]


def _is_silent(worker: WorkerSession, now: Now) -> bool:
    """It has missed a heartbeat: what is leased for it now may never be heard of again."""
    return now.monotonic - worker.heard_at > worker.ttl_s * SILENT_SHARE


def error_message(corr_id: int, error: TasukiError) -> ErrorMessage:
    """An error as the wire carries it."""
    return ErrorMessage(corr_id, error.code, error.message, error.details())
