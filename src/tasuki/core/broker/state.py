"""Everything that the conversations of a server share: connections, credit, watchers, other servers, the next turn. Pure.

Nothing of it must survive a restart, and all that concerns a connection goes with the connection. Conversations are functions
over `BrokerState` in the modules above this one; methods here keep several fields consistent with each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from contextlib import ExitStack
from itertools import islice
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import replace

from tasuki.core.access import Identity
from tasuki.core.broker.events import BrokerConfig, Command
from tasuki.core.broker.other_servers import OtherServers
from tasuki.core.broker.routes import Queue, RoutedJobs
from tasuki.core.broker.subscriptions import NOTED_MAX, ReadyWalk, Subscription, Subscriptions
from tasuki.core.broker.turn_builder import OWNER_PER_TURN, PacedQuestions, TurnBuilder, TurnEffects
from tasuki.core.cluster_messages import ServerInfo, WorkerInfo
from tasuki.core.job import OnDisconnect
from tasuki.core.lifecycle import LEASE_TTL_S
from tasuki.core.machine import Hangup, Peer
from tasuki.core.protocol import CachePut, Claim, JobResult, ReadLog, Reply, WorkerCache, error_message
from tasuki.core.routing import Candidate, Policy
from tasuki.core.shares import SharedItems, Shares
from tasuki.core.store_messages import OWN_PROGRAMS, JobKind, Offer, ReadyQueue
from tasuki.core.subject import covers, is_reached, matches, only_worker
from tasuki.core.subscribers import Subscribers
from tasuki.errors import InvalidInput, TasukiError, discreet

CREDIT_MAX = 100_000  # jobs for one worker: far above any real concurrency, below what would make a turn unbounded
WORKERS_MAX = 4096  # of one token at this server; a worker with a token of its own is alone
# Of one token at this server, each counted once: all of them may match one subject (`a.*.b`, `*.a.b`, …), and a new subject then
# costs the event loop 2 µs for each. Workers with different lists of programs are subscribed apart.
MIXED_PATTERNS_MAX = 256
SUBSCRIBERS_MAX = 16_384  # subscriptions to messages of one token at this server
QUEUES_MAX = 1024  # of one token at this server, of pattern and queue group, each counted once: other servers are told of them
CHOICE_MIN = 8  # idle workers beyond two for each new job, among which the least busy are asked
NEWS_AT_ONCE = 32  # subjects that a worker looks for in one request; for more its patterns are cheaper, unless they match little


# ---------------------------------------------------------------------------------------------------- sessions

_idle_since = attrgetter("idle_since")


class Account(msgspec.Struct):
    """Credit of one worker: how many more jobs it will take.

    Only `GiveCredit` messages add credit; a grant takes one away. While a lease request is on its way to the store, the credit
    that it may use is reserved, so that two turns never spend the same credit.
    """

    available: int = 0
    reserved: int = 0
    running: int = 0
    """Attempts that were granted and not yet reported: the worker's load."""
    owed: int = 0
    """Slots that were filled without credit, because a lost assignment was delivered again; the next credit pays for them."""
    withdrawn: int = 0
    """Part of the reserved credit that the worker took back."""

    def give(self, credit: int) -> None:
        """Add the credit of a message; a negative one takes credit back."""
        if -CREDIT_MAX <= credit < 0:
            # Reserved credit is taken when its lease request is answered, unless it is granted meanwhile.
            taken = min(self.available, -credit)
            self.available -= taken
            self.withdrawn = min(self.reserved, self.withdrawn - credit - taken)
            return
        if not 0 <= credit <= CREDIT_MAX or self.available + self.reserved + credit > CREDIT_MAX:
            raise InvalidInput(f"credit must be 0 to {CREDIT_MAX} in all; {credit} more on top of {self.available} is not")
        paid = min(self.owed, credit)
        self.owed -= paid
        self.available += credit - paid

    def charge(self) -> None:
        """Count an assignment that the worker has not heard of: credit for its slot was given, or will be."""
        self.running += 1
        if self.available:
            self.available -= 1
        else:
            self.owed += 1

    def reserve(self, limit: int) -> int:
        """Reserve credit for one lease request; return how much there was."""
        taken = min(self.available, limit)
        self.available -= taken
        self.reserved += taken
        return taken

    def settle(self, reserved: int, granted: int) -> None:
        """Turn the reserved credit of a lease request into load, as far as jobs were granted; the rest is available again."""
        if not 0 <= granted <= reserved <= self.reserved:
            raise ValueError(f"{granted} jobs were granted on {reserved} of {self.reserved} reserved credits")
        self.reserved -= reserved
        unused = reserved - granted
        self.available += unused - min(unused, self.withdrawn)
        self.withdrawn = min(self.reserved, max(0, self.withdrawn - reserved))
        self.running += granted

    def ended(self, count: int = 1) -> None:
        """Count attempts that were reported, given back or lost. Adds no credit: only the worker does."""
        self.running = max(0, self.running - count)


class Delivery(msgspec.Struct):
    """An attempt that was sent to a worker and is not reported yet."""

    claim: Claim
    sent_at: float
    shown_at: float = 0.0
    """Time at which its worker last showed its lease."""
    acked: bool = False
    tries: int = 0
    begun: bool = False
    """The worker has reported its start, or progress; or it may have, on an earlier connection."""
    withheld_since: float | None = None
    """Time of the last renewal of its lease, if it is not renewed any more because the attempt was not begun."""


class Session(msgspec.Struct):
    """One connection after `Opened`. `identity` is None until its Hello was accepted."""

    conn: int
    peer: Peer
    opened_at: float
    heard_at: float
    identity: Identity | None = None
    owner: str = ""
    """`identity.owner`, which has a share of everything: leases are granted to it, and those of another owner are not its own."""
    hello_seen: bool = False
    known_servers: tuple[str, ...] = ()
    """Addresses of all servers, as this peer was last told."""
    token_exchanges: int = 0
    """Exchanges under way of the token that the peer came with: it must hear what it gets, and several requests may ask."""


class ClientSession(Session):
    """A connection that submits and asks."""

    client_id: str = ""
    watching: set[str] = msgspec.field(default_factory=set)
    log_reads: int = 0
    """Number of its log reads that wait for workers."""
    cache_puts: int = 0
    """Number of its puts of caches that wait for workers."""


class TransferSession(Session, kw_only=True):
    """A connection beside a worker's own, for blobs alone: a slow transfer delays no heartbeat."""

    worker_id: str
    incarnation: str


class WorkerSession(Session, kw_only=True):
    """A connection that runs jobs."""

    worker_id: str
    incarnation: str
    patterns: tuple[str, ...] = ()
    on_disconnect: OnDisconnect = OnDisconnect.STOP
    reconnect_grace_s: float = 0.0
    ttl_s: float
    host: str = ""
    slots: int = 1
    offer: Offer = Offer()
    version: int = 1
    """Version of the protocol that both sides speak."""
    log_reads: int = 0
    agent: str = ""
    caches: bool = False
    """The worker keeps files of caches."""
    held: bytes = b""
    """Prefixes of the hashes of cached files that it holds."""
    cpu: float = 0.0
    """Load of its CPUs, 0 to 1."""
    account: Account = msgspec.field(default_factory=Account)
    deliveries: dict[str, Delivery] = msgspec.field(default_factory=dict)
    """Deliveries by lease_id."""
    renewed_at: float = 0.0
    """Time of its last heartbeat that was answered."""
    overdue: set[str] = msgspec.field(default_factory=set)
    """lease_ids of deliveries that it has not begun for too long."""
    settled: set[str] = msgspec.field(default_factory=set)
    """lease_ids that were reported or given back while the store was asked what the worker holds: that answer is older."""
    resuming: bool = False
    """The worker was connected before: nothing is leased for it until its first Heartbeat names the leases that it holds."""
    reading: bool = False
    """The store is asked what the worker holds: nothing is leased for it until it is known which assignments were lost."""
    read_again: bool = False
    """The store is to be asked once more: that question was under way when an order came to start something newer."""
    addressed: bool = False
    """The worker has given credit since its Hello."""
    backlog: bool = False
    """The worker may take all it can: there are more ready jobs than this turn submits."""
    subscriptions: list[Subscription] = msgspec.field(default_factory=list)
    looked_at: int = 0
    """Number of the last queue that was noted when the worker looked (see `subscriptions.py`)."""
    unsure: bool = True
    """There may be jobs for it that were noted before: its next look is by its patterns."""
    sparse: bool = False
    """The worker's last walk was cut short: it looks for all that was noted before it walks again."""
    again: dict[str, None] = msgspec.field(default_factory=dict)
    """Subjects of which it got all that it asked for: there may be more."""
    idle_since: int = 0
    """Place in the order in which workers were served."""

    def want(self, subjects: Iterable[str]) -> None:
        """Look for these subjects next time; if they are many, by the patterns."""
        self.again = dict.fromkeys(subjects)
        if len(self.again) > NOTED_MAX:
            self.unsure, self.again = True, {}

    def info(self) -> WorkerInfo:
        """Return the description for other servers and for people."""
        return WorkerInfo(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            patterns=self.patterns,
            host=self.host,
            slots=self.slots,
            takes=self.offer.takes,
            execs=self.offer.execs,
            credit=self.account.available + self.account.reserved,
            running=self.account.running,
            address=self.peer.address,
            on_disconnect=self.on_disconnect,
            addressed=self.addressed,
            owner=self.owner,
            cpu=self.cpu,
            held=self.held,
            agent=self.agent,
        )


class PendingLogRead(msgspec.Struct):
    """A client's read of a log that waits for the answer of a worker."""

    conn: int
    msg_id: int
    worker_conn: int
    question: ReadLog
    answer: dict[str, Any]
    """Answer to the client if the worker says nothing."""
    deadline: float


class PendingCachePut(msgspec.Struct):
    """A client's put of a cache that waits for the answers of workers."""

    conn: int
    message: CachePut
    workers: dict[str, WorkerCache]
    elsewhere: tuple[str, ...]
    deadline: float
    waiting: dict[int, str] = msgspec.field(default_factory=dict)
    """Workers that have not answered, by connection."""


def _counted(worker: WorkerSession, patterns: tuple[str, ...]) -> set[str]:
    """Return what a worker with these patterns uses up of its owner's share."""
    found = {pattern for pattern in patterns if "*" in pattern}
    return found | {f"execs {execs}"} if patterns and (execs := worker.offer.execs) else found


# ---------------------------------------------------------------------------------------------------- the state


class BrokerState:
    """State of one server. See the module's docstring."""

    def __init__(self, config: BrokerConfig) -> None:
        self.config = config
        self.epoch = config.epoch
        """Epoch under which this server leads; 0: it does not."""
        self.addresses: tuple[str, ...] = ()
        """Addresses at which peers can reach this server."""
        self.grpc_address = ""
        self.sub_leads = False
        """HOST:PORT of the node's gRPC door."""
        self.sessions: dict[int, Session] = {}
        self.workers: dict[str, WorkerSession] = {}
        self.watchers: dict[str, int | list[int]] = {}
        """Connections to tell a job's end: nearly always one, which is kept as a number without a list."""
        self.generations: dict[str, int] = {}
        """Generations of the watched jobs that were requeued."""
        self.subscriptions = Subscriptions()
        self.walk = ReadyWalk()
        self.routed = RoutedJobs(config.routes, config.route_wait_s, self.fitting)
        self._fitting: dict[Queue, tuple[str, ...]] = {}
        """Live workers that may take the jobs of a routed queue."""
        self.left_for: set[str] = set()
        """Workers for which jobs were left, because their subject names them."""
        self._worker_shares = Shares(WORKERS_MAX, "workers at this server")
        self._mixed = SharedItems(MIXED_PATTERNS_MAX, "patterns with `*` and lists of programs at this server")
        self._idle: dict[int, WorkerSession] = {}
        """Workers that may have credit, by connection; the one that was served last is at the end."""
        self._served = 0
        self.looking: dict[int, WorkerSession] = {}
        """Workers for which the next turn asks for work."""
        self.builder = TurnBuilder()
        self.paced = PacedQuestions()
        self.cluster = OtherServers()
        self.messages: Subscribers[int] = Subscribers()
        self.published: Counter[str] = Counter()
        """Messages that clients published, by group; the driver takes the counts."""
        self.next_member = 0
        """Turn of the members of queue groups."""
        self._message_shares = Shares(SUBSCRIBERS_MAX, "subscriptions to messages at this server")
        self._queues = SharedItems(QUEUES_MAX, "pairs of pattern and queue group at this server")
        self.log_reads: dict[int, PendingLogRead] = {}
        self.cache_puts: dict[int, PendingCachePut] = {}
        self.last_question = 0
        """Number of the last question to a worker: of a log, or of a cache."""
        self.disk_problem = ""
        """Reason why no job can be stored; empty: there is room."""
        self.store_problem = ""
        """Reason why the last turn was not stored; empty: it was."""
        self.over_budget = ""
        """Reason why this server, which leads, takes no new blobs; empty: there is room."""
        self._live_workers: dict[str, tuple[str, ...]] | None = {}
        self._named: dict[str, tuple[str, ...]] | None = None
        """Patterns of the live workers that offer each program; None: to be computed anew."""

    @property
    def blob_problem(self) -> str:
        """Reason why no new blob can be taken; empty: there is room."""
        return self.over_budget or self.cluster.blob_problem

    @property
    def is_idle(self) -> bool:
        """Return whether nothing waits for the store or for a worker's answer, and no attempt runs here. False while there are
        short leases, which are watched more closely."""
        waits = (
            len(self.builder)
            or self.looking
            or self.routed.queues
            or self.log_reads
            or self.store_problem
            or self.config.lease_ttl_s < LEASE_TTL_S
        )
        return not waits and not any(worker.deliveries for worker in self.workers.values())

    # -- connections ----------------------------------------------------------------------------------------------
    def add_worker(self, worker: WorkerSession) -> None:
        """Add the session; Overloaded if its token has too many workers or patterns already."""
        patterns, worker.patterns = worker.patterns, ()
        self._worker_shares.take(worker.owner)
        try:
            self._subscribe(worker, patterns)
        except TasukiError:
            self._worker_shares.give_back(worker.owner)
            raise
        self.sessions[worker.conn] = self.workers[worker.worker_id] = worker
        self.note_live_workers()

    def _subscribe(self, worker: WorkerSession, patterns: tuple[str, ...]) -> None:
        """Replace the patterns of a worker. Each one with `*` that no other of its owner has uses up a part of the share, and so
        does its list of programs."""
        mixed, before = _counted(worker, patterns), _counted(worker, worker.patterns)
        self._mixed.use(worker.owner, mixed - before)
        self._mixed.leave(worker.owner, before - mixed)
        self.subscriptions.remove(worker.conn, worker.patterns, worker.offer)
        worker.patterns = patterns
        worker.subscriptions = self.subscriptions.add(worker.conn, patterns, worker.offer)
        worker.unsure = True

    def change_patterns(self, worker: WorkerSession, patterns: tuple[str, ...]) -> None:
        self._subscribe(worker, patterns)
        self.note_live_workers()
        self.leave_no_more({worker.worker_id})
        self.look(worker, backlog=True)

    def hang_up(self, conn: int, error: TasukiError) -> list[Command]:
        """Forget a connection, and return the command that ends it with this error."""
        self.forget(conn)
        return [Hangup(conn, error)]

    def forget(self, conn: int) -> None:
        """Remove a connection and everything that is kept for it."""
        session = self.sessions.pop(conn, None)
        if session is not None:
            for pattern, queue in self.messages.forget(conn):
                self._unsubscribed(session.owner, pattern, queue)
        if isinstance(session, WorkerSession):
            self._subscribe(session, ())
            self._worker_shares.give_back(session.owner)
            self.looking.pop(conn, None)
            self._idle.pop(conn, None)
            if self.workers.get(session.worker_id) is session:
                del self.workers[session.worker_id]
                self.note_live_workers()
                self.leave_no_more({session.worker_id})
        elif isinstance(session, ClientSession):
            for job_id in session.watching:
                self._unwatch(job_id, conn)

    def subscribe(self, session: Session, pattern: str, queue: str) -> None:
        """Send this peer the messages whose subjects match."""
        if not self.messages.add(session.conn, pattern, queue):
            return
        with ExitStack() as undo:
            undo.callback(self.messages.remove, session.conn, pattern, queue)
            self._message_shares.take(session.owner)
            undo.callback(self._message_shares.give_back, session.owner)
            self._queues.use(session.owner, [(pattern, queue)] if queue else [])
            undo.pop_all()

    def unsubscribe(self, session: Session, pattern: str, queue: str) -> bool:
        """Undo `subscribe`; return whether there was such a subscription."""
        removed = self.messages.remove(session.conn, pattern, queue)
        if removed:
            self._unsubscribed(session.owner, pattern, queue)
        return removed

    def _unsubscribed(self, owner: str, pattern: str, queue: str) -> None:
        self._message_shares.give_back(owner)
        self._queues.leave(owner, [(pattern, queue)] if queue else [])

    def is_behind(self, conn: int) -> bool:
        """Return whether so much of this peer's owner waits for its turn that no more should be read from it."""
        session = self.sessions.get(conn)
        if session is None or session.identity is None:
            return False
        return self.builder.by_owner.get(session.owner, 0) > OWNER_PER_TURN or self.paced.is_full(session.owner)

    def behind_with(self, conn: int) -> list[int]:
        """Return the connections that are not to be read from, of which this one is: when many connections of its owner have
        brought twice of what one may bring, all of them."""
        owner = self.sessions[conn].owner
        if self.builder.by_owner.get(owner, 0) <= 2 * OWNER_PER_TURN:
            return [conn]
        return [one.conn for one in self.sessions.values() if one.owner == owner]

    def sessions_of(self, token_ids: Collection[str]) -> list[Session]:
        """Return the sessions of peers that came with one of these tokens."""
        if not token_ids:
            return []
        return [session for session in self.sessions.values() if session.identity and session.identity.token_id in token_ids]

    def answer(self, conn: int, msg_id: int, answer: Any, effects: TurnEffects) -> None:
        """Answer a request with a value or an error, if its peer is still there."""
        if conn in self.sessions:
            is_error = isinstance(answer, TasukiError)
            effects.send(conn, error_message(msg_id, answer) if is_error else Reply(msg_id, answer))

    def tell_failure(self, conn: int, msg_id: int, error: TasukiError, effects: TurnEffects) -> None:
        """Answer a request whose turn failed. Only an administrator is told what is wrong with the store."""
        session = self.sessions.get(conn)
        is_admin = session is not None and session.identity is not None and session.identity.admin
        self.answer(conn, msg_id, error if is_admin else discreet(error), effects)

    # -- watchers -------------------------------------------------------------------------------------------------
    def watch(self, session: ClientSession, job_id: str) -> None:
        """Tell this client the job's end when it comes."""
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

    def notify(self, ending: JobResult, effects: TurnEffects) -> None:
        """Send a job's end to those who watch it, which ends their watch."""
        watching = self.watchers.pop(ending.job_id, None)
        if watching is None:
            return
        self.generations.pop(ending.job_id, None)
        for conn in watching if isinstance(watching, list) else (watching,):
            session = self.sessions.get(conn)
            if isinstance(session, ClientSession):
                session.watching.discard(ending.job_id)
                effects.results[conn].append(ending)

    # -- who asks for work ----------------------------------------------------------------------------------------
    def look(self, worker: WorkerSession, *, backlog: bool) -> None:
        """Ask the store for work for this worker at the next turn; with `backlog`, for more than what that turn submits."""
        worker.backlog = worker.backlog or backlog
        self.looking[worker.conn] = self._idle[worker.conn] = worker

    def look_everywhere(self) -> None:
        """Walk over all that is ready: jobs may have become ready of which nobody tells."""
        self.walk.is_wanted = True

    def note_ready(self, subject: str, kind: JobKind | None = None, exec: str = "", *, is_new: bool = False) -> None:
        """Note that jobs of this queue are ready: at the worker that its subject names, or at all patterns that match.
        Kind None: it is not known what they need. `is_new`: the jobs of this turn, which need not be read."""
        if (only := only_worker(subject)) is not None:
            worker = self.workers.get(only)
            if worker is not None and is_reached(worker.patterns, subject) and (kind is None or worker.offer.fits(kind, exec)):
                worker.want([*worker.again, subject])
        elif (last := self._live_name(subject)) is not None:
            self.left_for.add(last)
            if (worker := self.workers.get(last)) is not None and (kind is None or worker.offer.fits(kind, exec)):
                worker.want([*worker.again, subject])
        elif self.routed.routes and self.routed.route_of(subject) is not None:
            if not is_new:
                self.routed.note(subject)
        else:
            self.subscriptions.note(subject, kind, exec)

    def _live_name(self, subject: str) -> str | None:
        """Return the last token of a subject if it is the id of a live worker that subscribes to the subject."""
        last = subject.rpartition(".")[2]
        patterns = self.live_workers().get(last, ())
        return last if any(matches(pattern, subject) for pattern in patterns) else None

    def is_routed(self, subject: str) -> bool:
        """Return whether a policy chooses the worker for jobs of this subject, which then names none itself."""
        return self.routed.route_of(subject) is not None and only_worker(subject) is None and self._live_name(subject) is None

    def leave_no_more(self, worker_ids: Set[str]) -> None:
        """Let others look for the jobs that were left for these workers, if there were any."""
        if self.left_for & worker_ids:
            self.left_for -= worker_ids
            self.look_everywhere()

    def look_for(
        self, subject: str, kind: JobKind | None = None, exec: str = "", *, backlog: bool, enough: int | None = None
    ) -> None:
        """Ask for work for idle workers that may take this queue: jobs that the next turn submits, or with `backlog` others.

        No more than `enough` workers look: more than there are jobs, so that the least busy can be chosen, and far fewer than
        all, whose number would be the cost of every turn. Workers that get all they asked for let others look.
        """
        named = self.named_worker(subject)
        if named is not None and subject in named.again and named.account.available:
            self.look(named, backlog=backlog)
            return
        for worker in islice(self.idle_workers(subject, kind, exec), enough):
            self.look(worker, backlog=backlog)

    def named_worker(self, subject: str) -> WorkerSession | None:
        """Return the worker of this server that the subject's end names, if there is one."""
        return self.workers.get(only_worker(subject) or subject.rpartition(".")[2])

    def came_back(self, queues: Collection[ReadyQueue] | None, jobs: int) -> None:
        """Let workers look for jobs that became ready other than by a submit. Queues None, jobs 0: it is not known which."""
        if queues is None:
            self.look_everywhere()
            self.cluster.everything = True
            return
        for queue in queues:
            self.note_ready(*queue)
            self.look_for(*queue, backlog=True)
        if queues:
            self.cluster.add_ready((queue.subject for queue in queues), jobs)

    def has_news(self, worker: WorkerSession) -> bool:
        """Return whether the worker has something to look for."""
        looked_at = worker.looked_at
        return worker.unsure or bool(worker.again) or any(one.latest > looked_at for one in worker.subscriptions)

    def take_news(self, worker: WorkerSession) -> tuple[str, ...]:
        """Return the patterns to ask the store for; from then on they count as looked for."""
        looked_at, worker.looked_at = worker.looked_at, self.subscriptions.number
        noted = {subject: number for one in worker.subscriptions for number, subject in one.since(looked_at)}
        is_lacking = worker.unsure or any(one.forgotten > looked_at for one in worker.subscriptions)
        if (is_lacking or len(noted) + len(worker.again) > NEWS_AT_ONCE) and not worker.sparse:
            worker.unsure, worker.again = False, {}
            return worker.patterns
        subjects = list(dict.fromkeys([*worker.again, *sorted(noted, key=noted.__getitem__)]))
        worker.unsure = False
        worker.want(subjects[NEWS_AT_ONCE:])
        return (*(worker.patterns if is_lacking else ()), *subjects[:NEWS_AT_ONCE])

    def note_idle(self, worker: WorkerSession, *, last: bool) -> None:
        """Note that a worker may have credit; with `last` it comes after all others."""
        if last:
            self._idle.pop(worker.conn, None)
            self._served += 1
            worker.idle_since = self._served
        self._idle[worker.conn] = worker

    def idle_workers(self, subject: str, kind: JobKind | None = None, exec: str = "") -> Iterator[WorkerSession]:
        """Yield the workers with credit that may take jobs of this queue, the one served last at the end."""
        able = self.subscriptions.matching(subject, kind, exec)
        if sum(len(one.workers) for one in able) < len(self._idle):
            few = {conn for one in able for conn in one.workers if conn in self._idle}
            idle = sorted((self._idle[conn] for conn in few), key=_idle_since)
        else:
            idle = [worker for conn, worker in self._idle.items() if any(conn in one.workers for one in able)]
        for worker in idle:
            if worker.account.available:
                yield worker
            else:
                del self._idle[worker.conn]

    def note_live_workers(self) -> None:
        """Make `live_workers` compute its answer anew, once per turn: thousands of workers may come or go at once."""
        self._live_workers = self._named = None
        self._fitting.clear()
        self.routed.workers_changed()
        if self.epoch:
            self.look_for_left()

    def look_for_left(self) -> None:
        """Let the worker of a node's own process look again: what it left to others while it led may be for it now."""
        if self.only_leads is not None:
            self.only_leads.unsure = True
            self.look(self.only_leads, backlog=True)

    @property
    def only_leads(self) -> WorkerSession | None:
        """The worker of a node's own process, which takes nothing that others take while that process leads."""
        return self.workers.get(self.config.server_id) if self.config.node_id else None

    def without_left(self, worker: WorkerSession, patterns: tuple[str, ...]) -> tuple[str, ...]:
        """Return the patterns that this worker asks for: of the leader's own those that no other live worker subscribes to."""
        if not self.epoch or worker is not self.only_leads:
            return patterns
        others = {pattern for name, theirs in self.live_workers().items() if name != worker.worker_id for pattern in theirs}
        return tuple(pattern for pattern in patterns if not any(covers(wide, pattern) for wide in others))

    def live_workers(self) -> dict[str, tuple[str, ...]]:
        """Return the patterns of all workers that gave credit: jobs whose subject names one of them are left for it."""
        if self._live_workers is None:
            # A new one each time: requests of turns under way keep theirs.
            live = {worker.worker_id: worker.patterns for _, worker in self.cluster.workers() if worker.addressed}
            live |= {worker_id: worker.patterns for worker_id, worker in self.workers.items() if worker.addressed}
            detached = self.cluster.detached
            self._live_workers = {worker_id: patterns for worker_id, patterns in live.items() if worker_id not in detached}
        return self._live_workers

    def named_elsewhere(self, worker: WorkerSession) -> dict[str, tuple[str, ...]]:
        """Return the programs that other live workers offer by name, with their patterns, if this one offers every program of
        its user: it leaves them jobs that may be for them."""
        execs = worker.offer.execs
        if not execs or OWN_PROGRAMS not in execs:
            return {}
        if self._named is None:
            named: defaultdict[str, dict[str, None]] = defaultdict(dict)
            for other in self.workers.values():  # of this server alone: a store that servers share has no local commands
                for exec_ in other.offer.execs or () if other.worker_id in self.live_workers() else ():
                    named[exec_].update(dict.fromkeys(other.patterns))
            self._named = {exec_: tuple(patterns) for exec_, patterns in named.items() if exec_ != OWN_PROGRAMS}
        return {exec_: patterns for exec_, patterns in self._named.items() if exec_ not in execs}

    # -- routes ---------------------------------------------------------------------------------------------------
    def candidates(self, able: Callable[[WorkerSession], bool]) -> dict[str, Candidate]:
        """Return all live workers among which policies choose. Those here that are not `able` have no credit at the moment."""
        found = {worker.worker_id: worker.candidate() for _, worker in self.cluster.workers()}
        for worker_id, left in self.routed.left.items():
            if (elsewhere := found.get(worker_id)) is not None:
                elsewhere.credit -= left
        for worker_id, worker in self.workers.items():
            one = found[worker_id] = worker.info().candidate()
            one.credit = min(one.credit, worker.account.available) if able(worker) else 0
        for worker_id in self.cluster.detached & found.keys():
            del found[worker_id]
        return found

    def fitting(self, queue: Queue) -> tuple[str, ...]:
        """Return the live workers, here and elsewhere, that may take jobs of this queue, sorted."""
        if queue not in self._fitting:
            subject, kind, exec_ = queue
            conns = {conn for one in self.subscriptions.matching(*queue) for conn in one.workers}
            ids = {worker.worker_id for worker in self.workers.values() if worker.conn in conns}
            for _, other in self.cluster.workers():
                is_able = Offer(other.takes, other.execs).fits(kind, exec_)
                if is_able and any(matches(pattern, subject) for pattern in other.patterns):
                    ids.add(other.worker_id)
            self._fitting[queue] = tuple(sorted(ids - self.cluster.detached))
        return self._fitting[queue]

    # -- descriptions ---------------------------------------------------------------------------------------------
    @property
    def info(self) -> ServerInfo:
        """Description of this server for the others."""
        return ServerInfo(
            server_id=self.config.server_id,
            addresses=self.addresses,
            node_id=self.config.node_id,
            grpc_address=self.grpc_address,
            sub_leads=self.sub_leads,
            workers=tuple(self._worker_infos()),
            epoch=self.epoch,
            blob_problem=self.over_budget,
            queues=self.messages.queues,
            routes=self.routed.own,
        )

    def _worker_infos(self) -> Iterator[WorkerInfo]:
        """Yield descriptions of the workers here, with the cached files that they hold if a route asks for them."""
        tells_held = any(route.policy is Policy.CACHE_AFFINITY for route in self.routed.routes)
        for worker in self.workers.values():
            yield worker.info() if tells_held else replace(worker.info(), held=b"")

    def describe_servers(self) -> list[dict[str, object]]:
        """Describe all live servers for people, this one first."""
        problems = {self.config.server_id: self.disk_problem or self.store_problem}
        return [
            {
                "server_id": info.server_id,
                "addresses": list(info.addresses),
                "workers": len(info.workers),
                "leads": info.epoch > 0,
                "epoch": info.epoch or None,
                "problem": problems.get(info.server_id) or info.blob_problem,
            }
            for info in (self.info, *self.cluster.servers.values())
        ]

    def describe_workers(self) -> list[dict[str, object]]:
        """Describe all live workers for people, those of this server first."""
        own = [worker.view(self.config.server_id) for worker in self._worker_infos()]
        views = own + [worker.view(server_id) for server_id, worker in self.cluster.workers()]
        return [{**view, "detached": view["worker_id"] in self.cluster.detached} for view in views]
