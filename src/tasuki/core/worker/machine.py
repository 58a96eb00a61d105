"""The worker's machine: `apply(event, now) -> commands`, and `flush(now)` once per turn of its driver's loop. Pure.

Theory of operation. A lease's deadline is counted from *before* the message that the server answered was sent: the latest
heartbeat (or Hello) that was answered on this connection, plus the ttl, minus what a kill takes. So a grant that was stuck on
the way is never run past the time at which the store gives the job to another worker.

An ending is kept until a server says `recorded` or `fenced`; after a reconnect it is offered again, to whichever server answers.
One that waits longer is saved, so that it outlives this process. Credit is given for each free slot, once.

Where attempts are short, the way to the server and back costs more than the attempt itself. So a worker whose attempts have been
short requests more than it has slots for: the next attempt is here when a slot is free, and ends are reported together. An
attempt that waited here for AHEAD_WAIT_S is given back unstarted, and none is requested ahead until attempts are short again.

A server that leaves a heartbeat unanswered for a third of the ttl is left while there is time: the leases are renewed through the
next one before their deadline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence

import msgspec

from tasuki.core import protocol
from tasuki.core.address import Address
from tasuki.core.job import OnDisconnect, Outcome, Progress
from tasuki.core.lifecycle import LEASE_MARGIN_S, LEASE_TTL_S
from tasuki.core.machine import Closed, Hangup, Now, Opened, Received, Send, Ticked
from tasuki.core.message_requests import MessageRequests, MessagesArrived
from tasuki.core.reconnect import HELLO_QUICK_S, Redial
from tasuki.core.store_messages import Grant
from tasuki.core.worker import events
from tasuki.errors import TasukiError, Unavailable, VersionMismatch, from_wire

SEEN_S = 600.0  # how long a lease is remembered, so that a delivery that comes twice is run once
SHORTEST_S = 0.001
SHORT_S = 0.05  # attempts that take less, on average, are worth requesting ahead
LATEST_SHARE = 1 / 8  # weight of the latest attempt in that average
AHEAD_PER_SLOT = 4  # attempts that are requested ahead, or as many as take SHORT_S together: the shorter, the more in one turn
AHEAD_WAIT_S = 0.2  # after that another worker had better run it
GIVE_BACK_PAUSE_S = 5.0  # an attempt that could not be started here (no space, no processes) would come back at once
SAVE_AFTER_S = 3.0  # an ending that no server has taken by then is saved
ALONE_S = 10.0  # how long a draining worker whose endings are all on disk looks for a server to take them
STARTED_AFTER_S = 0.1  # an attempt that ends sooner spares the store a write
TOGETHER_S = 0.005  # how long an ending waits for others, while every slot has its next attempt
FATAL_CODES = frozenset({"UNAUTHORIZED", "FORBIDDEN", "VERSION", "INVALID", "TOO_LARGE"})  # a repetition would not help


def lease_deadline(sent_at: float, ttl_s: float) -> float:
    """Return when the holder of a lease must have ended its attempt, which is before the store may grant the job to another.

    `sent_at` is when the request was sent that got or last renewed the lease; the store counts from later. Short leases leave
    less time for the kill: a renewal (every third of the ttl) that is a little late must not end them.
    """
    return sent_at + ttl_s - min(LEASE_MARGIN_S, ttl_s / 4)


class WorkerLease(msgspec.Struct):
    """One lease, from its delivery until a server has answered its ending."""

    claim: protocol.Claim
    deadline: float
    received_at: float
    renewed_at: float
    """Time at which the request was sent that got or last renewed it."""
    waiting: Grant | None = None
    """Set while it waits here for a free slot."""
    started_at: float | None = None
    reported_start: bool = False
    stopping: str = ""
    ending: protocol.Ending | None = None
    ended_at: float = 0.0
    saved: bool = False
    """True if the driver was asked to save the ending."""
    kept: bool = False
    """True if it is over and its ending is on disk. While a large result is being uploaded, it has no `ending` yet."""
    restored: bool = False
    """True if it is of an earlier process: its ending may still count, but this process cannot renew its lease."""

    def ended(self, outcome: Outcome) -> protocol.Ending:
        """Return its ending, with this outcome."""
        return protocol.Ending(self.claim.job_id, self.claim.lease_id, self.claim.attempt, outcome, self.started_at)


class SeenLeases:
    """Delivered leases, each with the connection that delivered it."""

    def __init__(self) -> None:
        self._conns: dict[str, int] = {}
        self._order: deque[tuple[float, str]] = deque()

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._conns

    def note(self, lease_id: str, conn: int, at: float) -> None:
        self._conns[lease_id] = conn
        self._order.append((at + SEEN_S, lease_id))

    def moved(self, lease_id: str, conn: int) -> bool:
        """Move a lease to this connection, and return whether it was on another one."""
        before, self._conns[lease_id] = self._conns[lease_id], conn
        return before != conn

    def forget_old(self, at: float) -> None:
        while self._order and self._order[0][0] <= at:
            self._conns.pop(self._order.popleft()[1], None)


class Slots:
    """The slots of a worker: running attempts, attempts that wait for a slot, and how many more to request.

    `asked` counts every slot that the server may fill or has filled: its credit, and the attempts that are here.
    """

    def __init__(self, capacity: int, ahead_max: int = 0) -> None:
        self.asked = 0
        self.capacity = capacity
        """May change: attempts that run continue, and what comes for credit that was given waits, or is given back."""
        self._ahead_max = ahead_max
        self._average_s = SHORT_S
        self._running: dict[str, float] = {}  # lease_id → start
        self._waiting: deque[tuple[str, float]] = deque()

    def take(self, lease_id: str, at: float) -> bool:
        """Give a delivered attempt a slot; False: it waits for one."""
        if len(self._running) < self.capacity:
            self._running[lease_id] = at
            return True
        self._waiting.append((lease_id, at))
        return False

    def leave(self, lease_id: str, at: float) -> None:
        """Free the slot of an attempt that is over."""
        began = self._running.pop(lease_id, None)
        if began is not None:
            self.asked -= 1
            self._average_s += (at - began - self._average_s) * LATEST_SHARE

    def drop(self, lease_ids: set[str]) -> None:
        """Remove attempts that wait and were not started."""
        before = len(self._waiting)
        self._waiting = deque(one for one in self._waiting if one[0] not in lease_ids)
        self.asked -= before - len(self._waiting)

    def advance(self, at: float) -> list[str]:
        """Give free slots to waiting attempts, and return those."""
        found = []
        while self._waiting and len(self._running) < self.capacity:
            lease_id, _ = self._waiting.popleft()
            self._running[lease_id] = at
            found.append(lease_id)
        return found

    def overdue(self, at: float) -> list[str]:
        """Return the attempts that have waited for too long: attempts are not that short any more."""
        found = [lease_id for lease_id, since in self._waiting if at - since >= AHEAD_WAIT_S]
        if found:
            self._average_s = SHORT_S
        return found

    @property
    def waiting(self) -> list[str]:
        return [lease_id for lease_id, _ in self._waiting]

    @property
    def well_stocked(self) -> bool:
        """True if each slot has a next attempt: nothing stands still if ends are reported a little later."""
        return len(self._waiting) >= self.capacity

    @property
    def short(self) -> bool:
        """True if attempts have been short, so that more are requested ahead."""
        return self._ahead_max > 0 and self._average_s < SHORT_S

    def wanted(self, blocked: int) -> int:
        """Return how much credit to give now; `blocked` slots are not to be filled yet."""
        return max(0, self.capacity + self._ahead() - blocked - self.asked)

    def _ahead(self) -> int:
        if not self.short:
            return 0
        per_slot = max(AHEAD_PER_SLOT, SHORT_S / max(self._average_s, SHORTEST_S))
        return min(self._ahead_max, int(per_slot * self.capacity))


class ProgressNotes:
    """The latest progress of each attempt, by lease_id, and which of it no server has received yet."""

    def __init__(self) -> None:
        self._latest: dict[str, Progress] = {}
        self._due: dict[str, None] = {}

    def note(self, lease_id: str, progress: Progress) -> None:
        self._latest[lease_id] = progress
        self._due[lease_id] = None

    def all_due(self) -> None:
        """Mark everything as unsent: another server knows nothing of it yet."""
        self._due = dict.fromkeys(self._latest)

    def to_tell(self, held: Container[str]) -> dict[str, Progress]:
        """Return the progress for the next Heartbeat, of attempts that are still held; the rest goes with the one after it."""
        if not self._latest:
            return {}
        self._latest = {lease_id: latest for lease_id, latest in self._latest.items() if lease_id in held}
        due = [lease_id for lease_id in self._due if lease_id in self._latest]
        self._due = dict.fromkeys(due[protocol.PROGRESS_MAX :])
        return {lease_id: self._latest[lease_id] for lease_id in due[: protocol.PROGRESS_MAX]}


class WorkerMachine:
    """One worker process's view of its leases."""

    def __init__(self, identity: events.WorkerIdentity, *, addresses: Sequence[Address], jitter: Callable[[], float]) -> None:
        self.identity = identity
        self.held: dict[str, WorkerLease] = {}
        self.online = False
        self.draining = False
        self.patterns = identity.patterns
        self._conn: int | None = None
        self._redial = Redial(addresses, jitter)
        self._ttl_s = identity.ttl_s or LEASE_TTL_S
        self._msg_id = 0
        self._ever_connected = False
        self._answered_at = 0.0
        self._beat_at = 0.0
        self._beats: dict[int, tuple[float, list[str]]] = {}
        self._seen = SeenLeases()
        self._slots = Slots(identity.capacity, identity.ahead)
        self._credit_later: deque[float] = deque()  # times at which slots that could not start anything are open again
        self._started_due: list[protocol.Claim] = []
        self._endings_due: list[protocol.Ending] = []
        self.flush_at: float | None = None  # the time at which to flush even if nothing happens until then
        self._released_due: list[protocol.Claim] = []
        self._progress = ProgressNotes()
        self._tells_resources = False
        self._cpu: float | None = None
        self._held_files = b""
        self._held_due: bytes | None = None
        self._messages = MessageRequests(self._next_id)
        self.uploading: set[str] = set()
        """Leases of earlier processes whose large results are being uploaded. Credit before that could bring the same jobs."""
        self._alone_since: float | None = None
        self._drain_id = 0
        self._drained = False
        self._exited = False

    # ------------------------------------------------------------------------------------------------ events

    def apply(self, event: events.Event, now: Now) -> list[events.Command]:
        match event:
            case Received():
                return self._received(event.message, now) if event.conn == self._conn else []
            case events.AttemptEnded():
                return self._ended(event.lease_id, event.outcome, now)
            case events.Started():
                self._started(event, now)
                return []
            case events.AttemptReturned():
                return self._gave_back(event.lease_id, now)
            case Ticked():
                return self._ticked(now)
            case Opened():
                return self._hello(event.conn, now)
            case Closed():
                if event.conn == self._conn or self._conn is None:
                    self._offline(now)
                return []
            case events.Restored():
                self._restored(event.ending, now)
                return []
            case events.EndingSaved():
                if (held := self.held.get(event.lease_id)) is not None:
                    held.kept = True
                return []
            case events.LeasesConfirmed():
                for held in filter(None, map(self.held.get, event.lease_ids)):
                    held.deadline = max(held.deadline, lease_deadline(event.asked_at, self._ttl_s))
                return []
            case events.LeasesDenied():
                return self._stop(list(event.lease_ids), "LEASE_LOST")
            case events.Drain():
                return self._drain()
            case events.ChangePatterns():
                self.patterns = event.patterns
                return self._subscribe(event.patterns)
            case _:
                return self._sends(self._messages.take(event, online=self.online))

    def _sends(self, messages: Sequence[protocol.Message]) -> list[events.Command]:
        return [Send(self._conn, message) for message in messages if self._conn is not None]

    def _next_id(self) -> int:
        self._msg_id += 1
        return self._msg_id

    def question(self, verb: str, params: dict[str, str]) -> protocol.Request:
        """Return a request of the driver's own, with a number that no other message has."""
        return protocol.Request(self._next_id(), verb, params)

    def _hello(self, conn: int, now: Now) -> list[events.Command]:
        self._conn = conn
        msg_id = self._next_id()
        self._beats = {msg_id: (now.monotonic, [])}
        return [Send(conn, self.identity.hello(msg_id, self.patterns, resumed=self._ever_connected))]

    def _offline(self, now: Now) -> None:
        self._conn = None
        self.online = False
        self._redial.lost(now.monotonic)
        self._started_due.clear()
        self._endings_due.clear()
        self._released_due.clear()

    def _received(self, message: protocol.Message, now: Now) -> list[events.Command]:
        match message:
            case protocol.AssignJobs():
                return self._assigned(message, now)
            case protocol.JobsRecorded():
                return self._recorded(message)
            case protocol.HeartbeatAnswer():
                return self._answered(message)
            case protocol.Welcome():
                return self._welcomed(message, now)
            case protocol.CancelLeases():
                return self._stop(message.lease_ids, "CANCELED")
            case protocol.DeliverMessages():
                return [MessagesArrived(message)]
            case protocol.ErrorMessage():
                about_messages = self._messages.answered(message)
                return self._refused(message) if about_messages is None else [*about_messages]
            case protocol.ReadLog():
                return [events.Tail(message)]
            case protocol.CachePut():
                return [events.TakeFiles(message)]
            case protocol.Reply():
                if (answered := self._messages.answered(message)) is not None:
                    return [*answered]
                if message.corr_id == self._drain_id:
                    self._drained = True  # no assignment follows
                return self._maybe_exit()
            case _:
                return []  # anything newer than this worker

    def _welcomed(self, welcome: protocol.Welcome, now: Now) -> list[events.Command]:
        assert self._conn is not None
        try:
            protocol.check_version(welcome)
        except VersionMismatch as error:
            return self._exit(error)
        self.online = True
        self._ever_connected = True
        self._redial.connected(now.monotonic, welcome.servers)
        self._ttl_s = welcome.lease_ttl_s
        self._answered_at = self._beats.pop(welcome.corr_id, (now.monotonic, []))[0]
        self._beat_at = now.monotonic  # the leases it already holds are renewed at once
        self._endings_due = self.unreported
        self._progress.all_due()
        self._tells_resources = welcome.version > 1
        self._held_due = self._held_files or None
        running = [held for held in self.held.values() if held.ending is None]
        self._started_due = [held.claim for held in running if held.reported_start]
        self._slots.asked = len(running)
        return (self._no_more() if self.draining else []) + self._sends(self._messages.welcomed())

    def _refused(self, error: protocol.ErrorMessage) -> list[events.Command]:
        if error.corr_id or error.code not in FATAL_CODES:
            return []  # the server hangs up, or answers one request; Closed follows if it must
        return self._exit(from_wire(error.code, error.message, error.details))

    # ------------------------------------------------------------------------------------------------ attempts

    def _assigned(self, message: protocol.AssignJobs, now: Now) -> list[events.Command]:
        commands: list[events.Command] = []
        deadline = lease_deadline(self._answered_at, message.ttl_s)
        for grant in message.grants:
            claim = protocol.Claim(grant.job_id, grant.lease_id, grant.attempt)
            if grant.lease_id in self._seen or grant.lease_id in self.held:
                self._seen_again(claim)
                continue
            self._seen.note(grant.lease_id, self._conn or 0, now.monotonic)
            if self.draining or deadline <= now.monotonic:
                # Nothing was started, so nothing is lost: the store takes it back without using up a loss.
                self._release(claim)
                continue
            held = self.held[grant.lease_id] = WorkerLease(claim, deadline, now.monotonic, self._answered_at)
            if self._slots.take(grant.lease_id, now.monotonic):
                commands.append(events.Run(grant))
            else:
                held.waiting = grant
        return commands

    def _release(self, claim: protocol.Claim) -> None:
        self._released_due.append(claim)
        self._slots.asked -= 1

    def _let_go(self, lease_ids: list[str], *, lost: bool = False) -> None:
        """Give back attempts that wait for a slot; with `lost` the store has them already."""
        self._slots.drop(set(lease_ids))
        for lease_id in lease_ids:
            held = self.held.pop(lease_id)
            if not lost:
                self._released_due.append(held.claim)

    def _leave(self, lease_id: str, now: Now) -> list[events.Command]:
        """Free the slot of an attempt that is over, and run the next one."""
        self._slots.leave(lease_id, now.monotonic)
        commands: list[events.Command] = []
        for held in map(self.held.__getitem__, self._slots.advance(now.monotonic)):
            assert held.waiting is not None
            commands.append(events.Run(held.waiting))
            held.waiting, held.received_at = None, now.monotonic
        return commands

    def _seen_again(self, claim: protocol.Claim) -> None:
        held = self.held.get(claim.lease_id)
        if held is None:
            if self._seen.moved(claim.lease_id, self._conn or 0):
                # The lease was given back, and that message was lost with its connection: for the store it is still held here.
                self._release(claim)
            return
        if held.ending is not None:
            self._endings_due.append(held.ending)
        else:
            # A heartbeat at once names it and is its acknowledgement; it may still be fetching its inputs, and be given back.
            self._beat_at = 0.0

    def _started(self, event: events.Started, now: Now) -> None:
        held = self.held.get(event.lease_id)
        if held is not None and held.started_at is None:
            held.started_at = now.wall
            if not self._slots.short:
                held.reported_start = True
                self._started_due.append(held.claim)

    def lease_deadline(self, lease_id: str) -> float | None:
        """Return when this attempt must be over if no later heartbeat is answered; None: it continues without a lease too."""
        held = self.held.get(lease_id)
        return held.deadline if held is not None and self.identity.on_disconnect is OnDisconnect.STOP else None

    def deadlines(self) -> dict[str, float]:
        """Return the deadlines of the attempts that run here."""
        return {lease_id: held.deadline for lease_id, held in self.held.items() if held.ending is None and held.waiting is None}

    def renewed_at(self, lease_id: str) -> float:
        """Return the time after which the store granted or last renewed a lease at this worker's request."""
        return self.held[lease_id].renewed_at

    def progressed(self, lease_id: str, progress: Progress) -> None:
        """Note the progress of an attempt; it travels with the next Heartbeat."""
        if lease_id in self.held:
            self._progress.note(lease_id, progress)

    def note_resources(self, cpu: float, held: bytes) -> None:
        """Note the load of the CPUs and the cached files that are here; other files are told at once."""
        self._cpu = cpu
        if held != self._held_files:
            self._held_files = self._held_due = held
            self._beat_at = 0.0

    def handler_started(self, lease_id: str, wall: float) -> None:
        """Note the start of a handler. The server learns it only if the handler takes longer than STARTED_AFTER_S."""
        held = self.held.get(lease_id)
        if held is not None:
            held.started_at = wall

    def _gave_back(self, lease_id: str, now: Now) -> list[events.Command]:
        held = self.held.pop(lease_id, None)
        if held is None:
            return []
        self._released_due.append(held.claim)
        self._credit_later.append(now.monotonic + GIVE_BACK_PAUSE_S)
        return [*self._leave(lease_id, now), events.Forget(lease_id), *self._maybe_exit()]

    def _ended(self, lease_id: str, outcome: Outcome, now: Now) -> list[events.Command]:
        held = self.held.get(lease_id)
        if held is None or held.ending is not None:
            return []
        commands = self._leave(lease_id, now)
        if held.stopping == "LEASE_LOST" or outcome.error_code == "LEASE_LOST":  # decided here, or by the keeper
            # The store has given, or will give, this job to another worker, and counts the loss itself.
            del self.held[lease_id]
            why = "the lease was lost"
            commands.append(events.KeepRejected(held.ended(outcome), why))
            return [*commands, events.Forget(lease_id, why), *self._maybe_exit()]
        if outcome.error_code == "SHUTDOWN":
            # A shutdown of the worker is no failure of the job: nothing is reported, and the lease runs out.
            del self.held[lease_id]
            return [*commands, events.Forget(lease_id), *self._maybe_exit()]
        held.ending = held.ended(outcome)
        held.ended_at = now.monotonic
        self._endings_due.append(held.ending)
        return commands

    def _restored(self, ending: protocol.Ending, now: Now) -> None:
        claim = protocol.Claim(ending.job_id, ending.lease_id, ending.attempt)
        at = now.monotonic
        self.held[ending.lease_id] = WorkerLease(
            claim, at, at, at, ending=ending, ended_at=at, saved=True, kept=True, restored=True
        )
        self._endings_due += [ending] if self.online else []

    @property
    def unreported(self) -> list[protocol.Ending]:
        """Endings that no server has answered yet."""
        return [held.ending for held in self.held.values() if held.ending is not None]

    def _save_what_waits(self, now: Now) -> list[events.Command]:
        commands: list[events.Command] = []
        for held in self.held.values():
            if held.ending is not None and not held.saved and now.monotonic - held.ended_at >= SAVE_AFTER_S:
                held.saved = True
                commands.append(events.Save(held.ending))
        return commands

    def _recorded(self, message: protocol.JobsRecorded) -> list[events.Command]:
        commands: list[events.Command] = []
        commands += [events.Forget(lease_id) for lease_id in message.recorded if self.held.pop(lease_id, None) is not None]
        for lease_id, reason in message.fenced:
            if (held := self.held.pop(lease_id, None)) is not None:
                commands += [events.KeepRejected(held.ending, reason or "fenced")] if held.ending is not None else []
                commands.append(events.Forget(lease_id, reason or "fenced"))
        return [*commands, *self._maybe_exit()]

    def _answered(self, answer: protocol.HeartbeatAnswer) -> list[events.Command]:
        if answer.servers:
            self._redial.learn(answer.servers)
        sent_at, lease_ids = self._beats.pop(answer.corr_id, (None, []))
        if sent_at is not None:
            self._answered_at = max(self._answered_at, sent_at)
            lost = set(answer.lost)
            for lease_id in lease_ids:
                held = self.held.get(lease_id)
                if held is not None and lease_id not in lost:
                    held.deadline = max(held.deadline, lease_deadline(sent_at, self._ttl_s))
                    held.renewed_at = max(held.renewed_at, sent_at)
        return [*self._stop(answer.lost, "LEASE_LOST"), *self._stop(answer.cancel, "CANCELED")]

    def _stop(self, lease_ids: list[str], reason: str) -> list[events.Command]:
        commands: list[events.Command] = []
        for lease_id in lease_ids:
            held = self.held.get(lease_id)
            if held is None or held.ending is not None or held.stopping == "LEASE_LOST":
                continue  # an attempt that has ended is settled by recorded or fenced
            if held.waiting is not None:
                self._let_go([lease_id], lost=reason == "LEASE_LOST")
                continue
            first = not held.stopping
            held.stopping = reason
            if first:
                commands.append(events.Stop(lease_id, reason))
        return commands

    # ------------------------------------------------------------------------------------------------ time

    def _ticked(self, now: Now) -> list[events.Command]:
        self._seen.forget_old(now.monotonic)
        while self._credit_later and self._credit_later[0] <= now.monotonic:
            self._credit_later.popleft()
        commands: list[events.Command] = []
        if overdue := self._slots.overdue(now.monotonic):
            self._let_go(overdue)
        if self.identity.on_disconnect is OnDisconnect.STOP:
            late = [lease_id for lease_id, held in self.held.items() if held.ending is None and held.deadline <= now.monotonic]
            commands += self._stop(late, "LEASE_LOST")
        due_at = self._redial.due_at
        if self._conn is None and due_at is not None and due_at <= now.monotonic and not self._exited:
            commands.append(self._redial.dialed())
        if self._conn is not None and self._stale(now):
            commands.append(Hangup(self._conn, Unavailable("the server does not answer")))
        if self.online:
            self._report_long_starts(now)
        return [*commands, *self._save_what_waits(now), *self._maybe_exit(), *self._exit_alone(now)]

    def _stale(self, now: Now) -> bool:
        """Return whether the connection is half-open: messages go out and nothing comes back. A new connection finds out faster
        than the kernel does, and before the leases are over: after a third of the ttl without an answer another third is left."""
        patience_s = self._ttl_s / 3 if self.online else HELLO_QUICK_S if self._redial.several else protocol.HANDSHAKE_TIMEOUT_S
        return any(now.monotonic - sent_at > patience_s for sent_at, _ in self._beats.values())

    def _report_long_starts(self, now: Now) -> None:
        for held in self.held.values():
            lasts = held.ending is None and now.monotonic - held.received_at >= STARTED_AFTER_S
            if lasts and held.started_at is not None and not held.reported_start:
                held.reported_start = True
                self._started_due.append(held.claim)

    def _holds_back(self, now: Now) -> bool:
        """Return whether the endings may wait a moment for the next ones: one turn of the store serves both."""
        self.flush_at = None
        if not self._endings_due or not self._slots.well_stocked or self._released_due or now.monotonic >= self._beat_at:
            return False
        oldest = self.held.get(self._endings_due[0].lease_id)
        if oldest is not None and now.monotonic < oldest.ended_at + TOGETHER_S:
            self.flush_at = oldest.ended_at + TOGETHER_S
        return self.flush_at is not None

    def flush(self, now: Now) -> list[events.Command]:
        """Return the reports of this turn of the loop, in as few messages as possible."""
        conn = self._conn
        if not self.online or conn is None or self._holds_back(now):
            return []
        commands: list[events.Command] = []
        if self._released_due:
            commands += [Send(conn, protocol.JobsReleased(some, "not started")) for some in _frames_of(self._released_due)]
            self._released_due = []
        if self._started_due:
            # An attempt that has ended meanwhile reports its start in its ending.
            running = [claim for claim in self._started_due if (held := self.held.get(claim.lease_id)) and held.ending is None]
            commands += [Send(conn, protocol.JobsStarted(some)) for some in _frames_of(running)]
            self._started_due = []
        if self._endings_due:
            for some in protocol.batches(self._endings_due, lambda ending: protocol.outcome_bytes(ending.outcome)):
                commands.append(Send(conn, protocol.JobsFinished(list(some))))
            self._endings_due = []
        if now.monotonic >= self._beat_at:
            self._beat_at = now.monotonic + self._ttl_s / 3
            claims = [held.claim for held in self.held.values() if not held.restored]
            progress = self._progress.to_tell(self.held)
            for shown in _frames_of(claims) or [[]]:
                msg_id, lease_ids = self._next_id(), [claim.lease_id for claim in shown]
                self._beats[msg_id] = (now.monotonic, lease_ids)
                told = {lease_id: progress[lease_id] for lease_id in lease_ids if lease_id in progress} if progress else progress
                resources = (self._cpu, self._held_due) if self._tells_resources else ()
                commands.append(Send(conn, protocol.Heartbeat(msg_id, shown, told, *resources)))
                self._held_due = None
        if not self.draining and not self.uploading and (credit := self._slots.wanted(len(self._credit_later))):
            # After the heartbeat: a job that was kept past its lease (ORPHANED) may go to any worker until the heartbeat takes it
            # back, and credit that came first could be used to deliver the same job here a second time.
            commands.append(Send(conn, protocol.GiveCredit(credit)))
            self._slots.asked += credit
        return [*commands, *self._maybe_exit()]

    @property
    def slots(self) -> int:
        """The number of attempts that run at once."""
        return self._slots.capacity

    def limit_slots(self, most: int) -> None:
        """Run at most so many attempts at once; 0: as many as the worker was started with."""
        self._slots.capacity = min(most or self.identity.capacity, self.identity.capacity)

    # ------------------------------------------------------------------------------------------------ the end

    def _drain(self) -> list[events.Command]:
        self.draining = True
        self._let_go(self._slots.waiting)
        return [*self._no_more(), *self._maybe_exit()]

    def _no_more(self) -> list[events.Command]:
        """Request no more jobs. The answer comes behind every assignment that was on its way: those are given back first."""
        commands = self._subscribe(())
        if commands:
            self._drain_id, self._drained = self._msg_id, False
        return commands

    def _subscribe(self, patterns: tuple[str, ...]) -> list[events.Command]:
        if not self.online or self._conn is None:
            return []
        return [Send(self._conn, protocol.Subscribe(self._next_id(), patterns))]

    def _maybe_exit(self) -> list[events.Command]:
        if not self.draining or self.held or self._exited:
            return []
        if self.online and (self._released_due or self.uploading or not self._drained):
            return []
        return self._exit()

    def _exit(self, error: TasukiError | None = None) -> list[events.Command]:
        self._exited = True
        return [events.Exit(error)]

    def _exit_alone(self, now: Now) -> list[events.Command]:
        """Exit if nothing runs and no server answers: endings on disk can wait for the next process as well as in this one."""
        if self.online or not self.draining:
            self._alone_since = None
            return []
        self._alone_since = self._alone_since or now.monotonic
        patient = now.monotonic - self._alone_since < ALONE_S
        if patient or self._exited or not all(held.kept for held in self.held.values()):
            return []
        return self._exit()


def _frames_of(claims: list[protocol.Claim]) -> list[list[protocol.Claim]]:
    """Return the claims in lists that one frame may carry."""
    return [list(some) for some in protocol.batches(claims, lambda claim: 0)]
