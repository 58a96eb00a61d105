"""The server's decisions: `apply(event, now) -> commands`, and `next_turn(now)` for the store. Pure.

Theory of operation. Messages do not touch the store one by one: conversations add questions to the next turn
(`turn_builder.py`). Whenever the store is idle the driver takes them as one `Turn` (one transaction), and brings its `Answers`
back as `TurnDone`: every conversation gets its part of them. Everything that is sent to a peer as done (accepted, recorded,
assigned, canceled) is sent from there, that is, after the commit.
"""

from __future__ import annotations

from tasuki.core.broker import (
    authentication,
    caches,
    client_messages,
    cluster,
    events,
    log_reads,
    publish_subscribe,
    worker_messages,
)
from tasuki.core.broker.routes import QUEUE_MAX
from tasuki.core.broker.state import CHOICE_MIN, BrokerState, ClientSession, Session, TransferSession, WorkerSession
from tasuki.core.broker.subscriptions import PAGE_QUEUES
from tasuki.core.broker.turn_builder import TurnBuilder, TurnEffects
from tasuki.core.broker.upkeep import Upkeep
from tasuki.core.election import TakeOver
from tasuki.core.lifecycle import LEASE_MARGIN_S
from tasuki.core.machine import Closed, Now, Opened, Received, Send, Ticked
from tasuki.core.protocol import HANDSHAKE_TIMEOUT_S, error_message
from tasuki.core.store_messages import LeaseHolder, Turn
from tasuki.errors import DiskFull, ProtocolError, TasukiError, Unauthorized, Unavailable

READS_PER_TURN = 128  # jobs whose rows, with results of up to 64 KiB and larger lists, are read at once
SESSIONS_INTERVAL_S = 0.5  # silence, an expired token, an assignment without a sign: all of them are a matter of seconds
STORE_RETRY_S = 0.2  # after a failed turn


class Broker(BrokerState):
    """The event loop over the state of one server. See the module's docstring."""

    def __init__(self, config: events.BrokerConfig) -> None:
        super().__init__(config)
        self.upkeep = Upkeep(self)
        self._wait_until = 0.0
        self._look_at_sessions_at = 0.0

    # ------------------------------------------------------------------------------------------------ events

    def apply(self, event: events.Event, now: Now) -> list[events.Command]:
        """Take one event; return what the driver has to do."""
        commands = self._apply(event, now)
        if self.workers and self.walk.is_due(now):
            commands.append(events.AskReady(self.walk.next_place(now), PAGE_QUEUES))
        if self.routed.routes and self.workers and (subjects := self.routed.next_read(now)):
            commands.append(events.AskRouted(subjects, QUEUE_MAX))
        return commands

    def _apply(self, event: events.Event, now: Now) -> list[events.Command]:
        match event:
            case Received():
                return self._received(event, now)
            case events.TurnDone():
                return self._turn_done(event, now)
            case Ticked():
                return self._ticked(now)
            case Opened():
                self.sessions[event.conn] = Session(event.conn, event.peer, now.monotonic, now.monotonic)
                return []
            case Closed():
                self.forget(event.conn)
                return []
            case events.TurnFailed():
                return self._turn_failed(event, now)
            case events.Hinted():
                if event.hint.everything:
                    self.upkeep.look_for_events()
                return cluster.heard(self, event.hint, now)
            case events.JobSeen():
                return log_reads.job_seen(self, event, now)
            case events.ReadyFound():
                return self._ready_found(event, now)
            case events.RoutedFound():
                self.routed.read(event.jobs, now)
                self._look_for_routed()
                return []
            case _:
                return self._from_driver(event)

    def _from_driver(self, event: events.DriverEvent) -> list[events.Command]:
        match event:
            case events.DiskSpace():
                if self.disk_problem and not event.problem:
                    self.look_everywhere()
                self.disk_problem = event.problem
            case events.BlobArrived():
                client_messages.blob_arrived(self, event)
            case events.BlobsUnderWay():
                client_messages.blobs_under_way(self, event)
            case events.BlobsDeleted():
                self.upkeep.blobs_deleted(event.epoch, event.places)
            case TakeOver():
                self.upkeep.claim(event.epoch)
            case events.Elected():
                self.upkeep.lead(event.epoch)
                self.look_for_left()
            case events.ClusterView():
                cluster.met(self, event)
            case events.Relayed():
                return publish_subscribe.relayed(self, event.messages)
            case events.SomeEnded():
                client_messages.ask_ends(self, event.job_ids)
            case events.SomeRevoked():
                return cluster.revoked(self, event.token_ids)
            case events.StartAssigned():
                if (worker := self.workers.get(event.worker_id)) is not None and not worker.resuming:
                    worker_messages.read_back(self, worker, again=True)
            case events.WorkerDetached():
                authentication.end_leases(self, LeaseHolder(worker_id=event.worker_id))
        return []

    def _ready_found(self, event: events.ReadyFound, now: Now) -> list[events.Command]:
        self.walk.came(event.page, now)
        for queue in event.page.queues if event.page is not None else ():
            self.note_ready(*queue)
            self.look_for(*queue, backlog=True, enough=CHOICE_MIN)
        return []

    def _look_for_routed(self) -> None:
        """Let workers with credit ask for jobs that a policy may choose them for."""
        for worker_id in sorted(self.routed.awaited() & self.workers.keys()):
            if (worker := self.workers[worker_id]).account.available:
                self.look(worker, backlog=False)

    def _received(self, event: Received, now: Now) -> list[events.Command]:
        conn, message = event.conn, event.message
        session = self.sessions.get(conn)
        if session is None:  # the broker hung up, and the peer had sent more before it noticed
            return []
        session.heard_at = now.monotonic
        try:
            if isinstance(session, WorkerSession):
                return worker_messages.received(self, session, message, now)
            if isinstance(session, ClientSession):
                return client_messages.received(self, session, message, now)
            if isinstance(session, TransferSession):
                return client_messages.transferred(self, session, message)
            return authentication.hello(self, session, message, now)
        except (Unauthorized, ProtocolError) as error:
            return self.hang_up(conn, error)
        except TasukiError as error:
            msg_id = getattr(message, "msg_id", 0)
            if session.identity is None or not msg_id:  # there is no request that this could be the answer to
                return self.hang_up(conn, error)
            return [Send(conn, error_message(msg_id, error))]

    # ------------------------------------------------------------------------------------------------ turns

    def next_turn(self, now: Now) -> Turn | None:
        """Return what the store should do next, or None if there is nothing; the turn after it begins empty."""
        if now.monotonic < self._wait_until:
            return None
        others_wait = bool(self.looking or self.paced.waiting or len(self.builder))
        if (upkeep := self.upkeep.next_turn(now, others_wait=others_wait)) is not None:
            return upkeep
        if not others_wait:
            return None
        if self.paced.waiting:
            self.paced.ask(self.builder)
        worker_messages.ask_leases(self, now)
        if not len(self.builder):
            return None
        following = self.builder.split_reads(READS_PER_TURN)
        turn = self.builder.turn()
        self.builder = following
        return turn

    def _turn_done(self, event: events.TurnDone, now: Now) -> list[events.Command]:
        turn, answers = event.turn, event.answers
        if turn.epoch:
            commands = self.upkeep.done(turn, answers, now)
        else:
            self.store_problem = ""
            effects = TurnEffects(now, answers.notes.cut)
            builder: TurnBuilder = turn.context
            builder.done(answers, effects)
            if turn.submit or turn.rerun:
                worker_messages.offer_the_rest(self, turn, answers, now)
            commands = effects.all_commands()
        self.came_back(answers.notes.ready, answers.promote + len(answers.reap) + len(answers.fire.runs) + answers.fire.released)
        return commands + self.cluster.hint(self.config.server_id)

    def _turn_failed(self, event: events.TurnFailed, now: Now) -> list[events.Command]:
        turn, error = event.turn, event.error
        self._wait_until = now.monotonic + STORE_RETRY_S
        if turn.epoch:
            return self.upkeep.failed(turn, error)
        self.store_problem = error.message
        effects = TurnEffects(now)
        builder: TurnBuilder = turn.context
        builder.failed(error, effects, self.builder)
        self.look_everywhere()
        if isinstance(error, DiskFull) and not self.disk_problem:
            self.disk_problem = error.message
        return effects.all_commands()

    # ------------------------------------------------------------------------------------------------ time

    def _ticked(self, now: Now) -> list[events.Command]:
        commands = cluster.poll(self, now) + log_reads.ticked(self, now) + caches.ticked(self, now)
        if self.routed.queues:
            self._look_for_routed()
        if now.monotonic >= self._look_at_sessions_at:
            self._look_at_sessions_at = now.monotonic + SESSIONS_INTERVAL_S
            for session in list(self.sessions.values()):
                commands += self._look_at_session(session, now)
        return commands

    def _look_at_session(self, session: Session, now: Now) -> list[events.Command]:
        """Hang up on a peer that is silent or whose token has expired; deliver again what a worker may not have got."""
        if session.identity is not None and session.identity.expired(now.wall):
            return self.hang_up(session.conn, Unauthorized(f"token {session.identity.token_id} has expired"))
        silent_s = now.monotonic - session.heard_at
        if isinstance(session, WorkerSession):
            if silent_s > session.ttl_s + LEASE_MARGIN_S:
                return self.hang_up(session.conn, ProtocolError(f"no heartbeat for {silent_s:.0f} s"))
            if session.deliveries:
                worker_messages.redeliver(self, session, now)
                worker_messages.take_back(self, session, now)
        elif session.identity is not None and silent_s > authentication.IDLE_TIMEOUT_S:
            # Unavailable, since the peer may send the same requests again; after a ProtocolError it must not.
            return self.hang_up(session.conn, Unavailable(f"no message came for {silent_s:.0f} s"))
        elif session.identity is None and now.monotonic - session.opened_at > HANDSHAKE_TIMEOUT_S:
            return self.hang_up(session.conn, ProtocolError(f"no Hello within {HANDSHAKE_TIMEOUT_S:g} s"))
        return []
