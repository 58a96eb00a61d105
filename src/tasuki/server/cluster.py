"""Membership of a server in the cluster of servers that share its store: heartbeats, the election of a leader, hints.

`Cluster` drives `core/election.py` and the coordination (whose methods block: they run on a thread of their own, one at a time)
and carries hints between the servers. The broker decides what follows from them. `SingleServer` is the membership of a server
whose store has no other user.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec

from tasuki.coords.coordination import BEAT_INTERVAL_S, ClusterMember, Coordination, View
from tasuki.core import election
from tasuki.core.broker.broker import Broker
from tasuki.core.broker.events import (
    ClusterView,
    Detach,
    Elected,
    Hinted,
    NoteAssigned,
    Publish,
    Relay,
    Relayed,
    StartRuns,
)
from tasuki.core.cluster_messages import Hint, RelayedPieces, RelayPiece, ServerInfo, decode, relay, split
from tasuki.core.election import LEADER_SCOPE
from tasuki.core.machine import Now, Ticked
from tasuki.core.scheduler import continuation
from tasuki.core.subject import group_of
from tasuki.errors import TasukiError
from tasuki.event_loop import BackgroundTasks
from tasuki.server.roles import LocalServer, Roles
from tasuki.stores.wakeups import Wakeups

logger = logging.getLogger("tasuki.cluster")
LEAVE_TIMEOUT_S = 2.0  # for a coordination that does not answer: others notice the missing heartbeats as well

T = TypeVar("T")
ClusterCommand = election.TookOver | election.EpochFenced | election.Lapsed | Publish | Relay | StartRuns | NoteAssigned
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ServerInfo).decode


class SingleServer:
    """The only server of its store: it leads from its start to its end, and keeps the detached workers in memory."""

    def __init__(self, server: LocalServer | None = None) -> None:
        self._server = server
        self._detached: frozenset[str] = frozenset()

    async def join(self, server: LocalServer) -> None:
        self._server = server

    def address_changed(self) -> None:
        pass

    def tick(self, now: Now) -> None:
        pass

    def carry_out(self, command: ClusterCommand) -> None:
        """Take the next epoch after one that lapsed, until the store has registered one."""
        assert self._server is not None
        match command:
            case election.Lapsed(epoch=epoch):
                self._server.tell(Elected(0))
                self._server.tell(election.TakeOver(epoch + 1))
            case election.TookOver(epoch=epoch, done=done):
                self._server.tell(Elected(epoch) if done else election.TakeOver(epoch + 1))
            case _:
                pass

    async def detach(self, command: Detach) -> bool:
        """Set whether a worker is detached; return whether that was a change."""
        before, one = self._detached, frozenset({command.worker_id})
        self._detached = before | one if command.detached else before - one
        assert self._server is not None
        self._server.tell(ClusterView((), self._detached))
        return self._detached != before

    async def degrade(self) -> None:
        """Do nothing: there is nobody else to lead, and the broker refuses this order."""

    async def leave(self) -> None:
        pass


class Cluster:
    """Membership among other servers, by a coordination and hints. `open_coordination` is called on the coordination's thread.

    A member that is no `candidate` sends heartbeats and hints, and never leads.
    """

    def __init__(
        self,
        open_coordination: Callable[[], Coordination],
        wakeups: Wakeups[Any],
        *,
        incarnation: str,
        schema_version: int,
        lock_ttl_s: float = election.LOCK_TTL_S,
        candidate: bool = True,
        roles: Roles | None = None,
    ) -> None:
        self._open_coordination = open_coordination
        self._wakeups = wakeups
        self._incarnation = incarnation
        self._schema_version = schema_version
        self._lock_ttl_s = lock_ttl_s
        self._next_ttl_s = lock_ttl_s
        self._beat_interval_s = BEAT_INTERVAL_S
        self._candidate = candidate
        self.roles = roles
        """Roles among the nodes of a Django project; None: this is a server of its own."""
        self._is_willing = True
        self.is_detached_by_leader = False
        """A leader has detached the worker of this process: it comes back under another id."""
        self.kept_detached: frozenset[str] = frozenset()
        """Workers that people detached, where the database keeps that beside a coordination that may forget it."""
        self.lost_flags: frozenset[str] = frozenset()
        """Workers of `kept_detached` in this process whose flag the coordination has not, or has as set by a leader."""
        self._leads_since = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tasuki-coordination")
        self._tasks = BackgroundTasks(lambda task: self._answered.set())
        self._info = b""
        self._version = 0
        self._seen: dict[str, tuple[int, ServerInfo]] = {}
        self._beat_at = 0.0
        self._beating = False
        self._reachable = True
        self._is_leaving = self._has_left = False
        self.busy: election.Busy | None = None
        """The holder of the leader's lock, by the last answer to a request for it."""
        self._highest_epoch = 0
        """Seen in the store, or held. A store that has less was emptied."""
        self._is_emptied = False
        self._is_detached = False
        """The worker of this process is detached, which has the same id: then it does not lead."""
        self._answered = asyncio.Event()
        self._relays = itertools.count(1)
        self._relayed = RelayedPieces()
        self.on_hint: Callable[[Hint], None] = lambda hint: None
        """Called with every hint from another server."""
        self.on_start: Callable[[StartRuns], None] = lambda order: None
        """Called with orders for workers of other nodes; a node that has no way to them loses these."""

    # ------------------------------------------------------------------------------------------------ life

    async def join(self, server: LocalServer) -> None:
        """Open the coordination (errors are raised here), and send the first heartbeat."""
        self._server = server
        self._election = election.Election(server.server_id, ttl_s=self._lock_ttl_s)
        self._version = int(server.now().wall * 1000)  # it must grow from one start of this server to the next
        self.coordination = await self.call(self._open_coordination)
        if self.roles is not None:
            self.roles.join(self)
        await self._beat_once()
        await self._wakeups.start(self._received)

    async def leave(self) -> None:
        """Release the lock and leave the cluster: the next leader need not wait for a ttl."""
        self._is_leaving = True
        self._decide(election.Resign())
        if self.roles is not None:
            await self.roles.leave()
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                while self._tasks or self._election.asking:  # an answer may bring a lock, which is released
                    self._answered.clear()
                    await self._answered.wait()
                await self.call(self.coordination.leave, self._server.server_id, self._incarnation)
        except (TimeoutError, TasukiError) as error:
            logger.info("left the cluster without telling the others: %s", error or "no answer")
        self._has_left = True
        self._tasks.cancel()
        await self._wakeups.close()
        self._thread.submit(self.coordination.close)
        self._thread.shutdown(wait=False)

    def address_changed(self) -> None:
        """Tell the others soon where the server can be reached."""
        self._beat_at = 0.0

    def set_times(self, *, beat_interval_s: float, member_timeout_s: float, lock_ttl_s: float) -> None:
        """Beat, judge members and lock by these times from now on."""
        self._beat_interval_s, self._next_ttl_s = beat_interval_s, lock_ttl_s
        self.coordination.member_timeout_s = member_timeout_s

    def tick(self, now: Now) -> None:
        if self._is_leaving:  # a heartbeat now could arrive after the message that this server leaves
            return
        if self._next_ttl_s != self._lock_ttl_s and not self._election.asking:  # an answer counts by the ttl that was asked for
            self._lock_ttl_s = self._next_ttl_s
            self._election.set_ttl(self._lock_ttl_s)
            self._tasks.spawn(self.call(self.coordination.set_lock_ttl, self._lock_ttl_s))
        if self.is_candidate or self._election.asking:
            self._decide(Ticked())
        if self.roles is not None:
            self.roles.tick(now)
        if now.monotonic >= self._beat_at and not self._beating:
            self._beat_at = now.monotonic + self._beat_interval_s
            self._tasks.spawn(self._beat())

    @property
    def server(self) -> LocalServer:
        return self._server

    @property
    def is_candidate(self) -> bool:
        """This server asks for the leader's lock: its worker is neither detached nor draining."""
        return self._candidate and self._is_willing and not self._is_detached

    def set_willing(self, willing: bool) -> None:
        """Ask for the leader's lock from now on, or step down and ask no more."""
        self._is_willing = willing
        if not willing:
            self._decide(election.Degraded())

    def set_deference(self, deference_s: float, *, now_free: bool = False) -> None:
        """Let others ask for the lock for so long before this server does; `now_free`: its holder was deposed, all are told."""
        is_sooner, self._election.deference_s = deference_s < self._election.deference_s, deference_s
        if now_free or is_sooner:
            self._decide(election.LockReleased())
        if now_free:
            self._tell_released()

    async def holds_lead(self, renewed_ago_s: float) -> bool:
        """Return whether no lease that was renewed so long ago can end before it has lasted its time from now on, although the
        store is away: this server leads, and the lease was renewed since it took over, so that the next takeover renews it. From
        now on this server ends no lease without one, and the coordination says that there was none yet."""
        now = self._server.now().monotonic
        epoch = self._election.leads(now)
        if not continuation.may_promise(epoch, self._leads_since, renewed_ago_s, now):
            return False
        self._server.broker.upkeep.lapse()
        holds = await self.call(self.coordination.renew, LEADER_SCOPE, self._server.server_id, epoch, self._lock_ttl_s)
        return holds and self._server.broker.epoch == epoch

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self._tasks.spawn(work)

    async def call(self, verb: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, verb, *arguments)

    # ------------------------------------------------------------------------------------------------ members

    async def _beat(self) -> None:
        """Send a heartbeat; log once that there is no answer, and once that there is one again."""
        self._beating = True
        try:
            await self._beat_once()
            if not self._reachable:
                logger.info("the coordination answers again")
            self._reachable = True
        except TasukiError as error:
            if self._reachable:
                logger.warning("the coordination does not answer: %s", error)
            self._reachable = False
        finally:
            self._beating = False

    async def _beat_once(self) -> None:
        """Send a heartbeat, and learn which other servers live."""
        info = _encode(self._server.info)
        if info != self._info:
            self._info, self._version = info, self._version + 1
        me = ClusterMember(
            member_id=self._server.server_id,
            kind="server",
            incarnation=self._incarnation,
            schema_version=self._schema_version,
            version=self._version,
            info=info,
            led_ago_s=self._server.broker.upkeep.led_ago_s(self._server.now()),
            workers=_facts(self._server.broker) if self.coordination.shows_workers else {},
        )
        known = {member_id: version for member_id, (version, _) in self._seen.items()}
        self._update(await self.call(lambda: self.coordination.beat(me, seen=known)))

    def _update(self, view: View) -> None:
        seen: dict[str, tuple[int, ServerInfo]] = {}
        for member in view.members:
            if member.info is not None:
                try:
                    info = _decode(member.info)
                except msgspec.DecodeError as error:  # of another version: all that is known is that it lives
                    logger.warning("the description of server %s is not understood: %s", member.member_id, error)
                    info = ServerInfo(server_id=member.member_id)
                seen[member.member_id] = (member.version, info)
            elif member.member_id in self._seen:
                seen[member.member_id] = self._seen[member.member_id]
        self._seen = seen
        detached = view.detached | self.kept_detached
        self._is_detached = self._server.server_id in detached
        self.is_detached_by_leader = self._server.server_id in view.detached_by_leader - self.kept_detached
        own = {self._server.server_id, *self._server.broker.workers}
        self.lost_flags = (self.kept_detached & own) - (view.detached - view.detached_by_leader)
        if view.degraded or self._is_detached:
            self._decide(election.Degraded())
        if self.roles is not None:
            self.roles.met(view, [info for _, info in seen.values()])
        ages_s = {member.member_id: member.age_s for member in view.members}
        self._server.tell(ClusterView(tuple(info for _, info in seen.values()), detached, ages_s))

    async def detach(self, command: Detach) -> bool:
        """Set whether a worker is detached. This server knows at once, the others with their next heartbeat."""
        told = {"actor": command.actor, "reason": command.reason}
        changed = await self.call(partial(self.coordination.set_detached, command.worker_id, command.detached, **told))
        await self._beat()
        if command.now:  # no server may give it work again after its leases have ended
            await asyncio.sleep(self._beat_interval_s)
        return changed

    async def degrade(self) -> None:
        """Have the leader step down with its next heartbeat."""
        await self.call(self.coordination.degrade)

    # ------------------------------------------------------------------------------------------------ election

    def carry_out(self, command: ClusterCommand) -> None:
        match command:
            case Publish():
                self._wakeups.publish(split(command.hint))
            case Relay():
                pieces = relay(self._server.server_id, next(self._relays), command.messages, self._wakeups.piece_max_bytes)
                groups = Counter(group_of(relayed.message.subject) for relayed in command.messages)
                self._wakeups.publish_messages(pieces, partial(self._server.statistics.unrelayed, groups))
            case StartRuns():
                self.on_start(command)
            case NoteAssigned():
                self._tasks.spawn(self._note(command))
            case election.TookOver() | election.Lapsed():
                self._decide(command)
            case election.EpochFenced():
                logger.warning("epoch %d was refused by the store, which has another one", command.epoch)
                self._decide(command)

    async def _note(self, command: NoteAssigned) -> None:
        try:
            await self.call(self.coordination.note_assigned, command.worker_of)
        except TasukiError as error:
            logger.debug("assigned runs were not noted: %s", error)

    def _decide(self, event: election.Event) -> None:
        if self._has_left:
            return
        self._answered.set()
        for command in self._election.apply(event, self._server.now().monotonic):
            match command:
                case election.Acquire():
                    self._tasks.spawn(self._acquire())
                case election.TakeOver():
                    self._server.tell(command)
                case election.Renew():
                    self._tasks.spawn(self._renew(command.epoch))
                case election.Release():
                    self._tasks.spawn(self._release(command.epoch))
                case election.Lead():
                    self._highest_epoch = max(command.epoch, self._highest_epoch)
                    self._leads_since = self._server.now().monotonic
                    logger.info("leads, under epoch %d", command.epoch)
                    self._server.tell(Elected(command.epoch))
                case election.StepDown():
                    logger.info("leads no more (epoch %d): %s", command.epoch, command.reason)
                    self._server.tell(Elected(0))
                    self.address_changed()

    async def _acquire(self) -> None:
        asked_at = self._server.now().monotonic
        answer: election.Locked | election.Busy | None = None
        try:
            registered, _ = await self._server.ask(lambda reader: reader.epoch())
            self._look_at_epoch(registered)
            holder = self._server.server_id
            answer = await self.call(self.coordination.acquire, LEADER_SCOPE, holder, self._lock_ttl_s, self._highest_epoch)
            self.busy = answer if isinstance(answer, election.Busy) else None
        except TasukiError as error:
            logger.debug("the request for the leader's lock failed: %s", error)
        finally:
            self._decide(election.Acquired(answer, asked_at))

    def _look_at_epoch(self, registered: int) -> None:
        """Warn, once, of a store whose epoch has fallen; the next epoch is above all that were seen all the same."""
        was_emptied, self._is_emptied = self._is_emptied, registered < self._highest_epoch
        self._highest_epoch = max(registered, self._highest_epoch)
        if self._is_emptied and not was_emptied:
            logger.error(
                "the store was emptied, or set back: its epoch is %d, and was %d before. Jobs, leases and tokens since then are "
                "gone; workers keep results that they could not report (docs/operate/failure-table.md)",
                registered,
                self._highest_epoch,
            )

    async def _renew(self, epoch: int) -> None:
        asked_at = self._server.now().monotonic
        done: bool | None = None
        try:
            done = await self.call(self.coordination.renew, LEADER_SCOPE, self._server.server_id, epoch, self._lock_ttl_s)
        except TasukiError as error:
            logger.warning("the leader's lock could not be renewed: %s", error)
        finally:
            self._decide(election.Renewed(done, asked_at))

    async def _release(self, epoch: int) -> None:
        try:
            await self.call(self.coordination.release, LEADER_SCOPE, self._server.server_id, epoch)
            self._tell_released()
        except TasukiError as error:
            logger.info("the leader's lock was not released, it ends by itself: %s", error)

    def _tell_released(self) -> None:
        self._wakeups.publish(split(Hint(server_id=self._server.server_id, everything=True)))  # another may lead at once

    # ------------------------------------------------------------------------------------------------ hints

    def _received(self, piece: bytes) -> None:
        try:
            hint = decode(piece)
            if hint.relay is not None:
                self._take(hint.server_id, hint.relay)
                return
        except TasukiError as error:
            logger.warning("%s", error)
            return
        self._server.tell(Hinted(hint))
        if hint.everything:
            self._decide(election.LockReleased())
        self.on_hint(hint)

    def _take(self, server_id: str, piece: RelayPiece) -> None:
        """Take a piece of messages of another server."""
        if server_id != self._server.server_id and (messages := self._relayed.take(server_id, piece)):
            self._server.tell(Relayed(messages))


def _facts(broker: Broker) -> dict[str, dict[str, str | int]]:
    """Return what people and programs may read of the workers of this server."""
    host, _, port = broker.grpc_address.rpartition(":")
    facts: dict[str, dict[str, str | int]] = {}
    for worker_id, session in broker.workers.items():
        runs = [delivery.claim.job_id for delivery in session.deliveries.values()]
        is_own = worker_id == broker.config.server_id
        facts[worker_id] = {
            "node_id": broker.config.node_id,
            "pid": os.getpid() if is_own else "",
            "grpc_host": host.strip("[]") if is_own else "",
            "grpc_port": port if is_own else "",
            "role": "worker" if not is_own else "leader" if broker.epoch else "subleader" if broker.sub_leads else "worker",
            "load": len(runs),
            "current_job_run_id": ",".join(runs),
        }
    return facts
