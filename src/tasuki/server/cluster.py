"""A server among others on one store: it says that it lives, stands for election, hears hints and gives them.

`Cluster` drives `core/election.py` and the coordination (whose verbs block: they run on a thread of their own, one at a time) and
carries hints to and fro. What all that means is decided in the broker; this is the wiring. `Alone` is a server whose store has
no other user.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from tasuki.coords.coordination import BEAT_INTERVAL_S, ClusterMember, Coordination, View
from tasuki.core import election
from tasuki.core.broker.events import Deposed, Detach, Elected, Hinted, Met, Publish, TakeoverDone, Won
from tasuki.core.cluster_messages import Hint, ServerInfo, decode, split
from tasuki.core.machine import Now, Ticked
from tasuki.errors import TasukiError
from tasuki.event_loop import BackgroundTasks
from tasuki.stores.wakeups import Wakeups

if TYPE_CHECKING:
    from tasuki.server.server import Server

logger = logging.getLogger("tasuki.server")
LEAVE_TIMEOUT_S = 2.0  # for a coordination that does not answer: others notice our silence as well
SCOPE = "leader"

T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ServerInfo).decode


class ClusterMembership(Protocol):
    """Whom a server shares its store with."""

    async def join(self, server: Server) -> None: ...
    def moved(self) -> None:
        """The server can be reached elsewhere: the others hear of it soon."""
        ...

    def tick(self, now: Now) -> None: ...
    def told(self, command: TakeoverDone | Deposed | Publish) -> None: ...
    async def detach(self, command: Detach) -> bool: ...
    async def leave(self) -> None: ...


class Alone:
    """Nobody: the store belongs to this server, which leads from its start to its end. It remembers detached workers as long."""

    async def join(self, server: Server) -> None:
        self._server = server
        self._detached: frozenset[str] = frozenset()

    def moved(self) -> None:
        pass

    def tick(self, now: Now) -> None:
        pass

    def told(self, command: TakeoverDone | Deposed | Publish) -> None:
        pass

    async def detach(self, command: Detach) -> bool:
        before, one = self._detached, frozenset({command.worker_id})
        self._detached = before | one if command.detached else before - one
        self._server.tell(Met((), self._detached))
        return self._detached != before

    async def leave(self) -> None:
        pass


class Cluster:
    """Other servers, over a coordination and hints. `open_coordination` is called on the coordination's thread. One that does not
    stand (for election) beats, hears and tells, and never leads."""

    def __init__(
        self,
        open_coordination: Callable[[], Coordination],
        wakeups: Wakeups,
        *,
        incarnation: str,
        schema_version: int,
        lock_ttl_s: float = election.LOCK_TTL_S,
        stands: bool = True,
    ) -> None:
        self._open_coordination = open_coordination
        self._wakeups = wakeups
        self._incarnation = incarnation
        self._schema_version = schema_version
        self._lock_ttl_s = lock_ttl_s
        self._stands = stands
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
        """Who has the leader's lock, as we heard when we last asked for it."""
        self._answered = asyncio.Event()
        self.heard: Callable[[Hint], None] = lambda hint: None
        """Called with every hint, for those who are no server's workers."""

    # ------------------------------------------------------------------------------------------------ life

    async def join(self, server: Server) -> None:
        """Open the coordination (errors are raised here), and be seen."""
        self._server = server
        self._term = election.Election(server.config.server_id, ttl_s=self._lock_ttl_s)
        self._version = int(server.now().wall * 1000)  # it must grow from one life of this server to the next
        self._coordination = await self._call(self._open_coordination)
        await self._beat_once()
        await self._wakeups.start(self._heard)

    async def leave(self) -> None:
        """Let the lock go, and say that we leave: the next leader need not wait for a ttl."""
        self._is_leaving = True
        self._decide(election.Resign())
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                while self._tasks or self._term.asking:  # an answer may bring a lock that can be given back
                    self._answered.clear()
                    await self._answered.wait()
                await self._call(self._coordination.leave, self._server.config.server_id, self._incarnation)
        except (TimeoutError, TasukiError) as error:
            logger.info("left without a word to the others: %s", error or "no answer")
        self._has_left = True
        self._tasks.cancel()
        await self._wakeups.close()
        self._thread.submit(self._coordination.close)
        self._thread.shutdown(wait=False)

    def moved(self) -> None:
        self._beat_at = 0.0

    def tick(self, now: Now) -> None:
        if self._is_leaving:  # a beat now could come after our word that we leave
            return
        if self._stands:
            self._decide(Ticked())
        if now.monotonic >= self._beat_at and not self._beating:
            self._beat_at = now.monotonic + BEAT_INTERVAL_S
            self._tasks.spawn(self._beat())

    async def _call(self, verb: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, verb, *arguments)

    # ------------------------------------------------------------------------------------------------ who is there

    async def _beat(self) -> None:
        """Every second. An answer that does not come is said once."""
        self._beating = True
        try:
            await self._beat_once()
            self._say(reachable=True)
        except TasukiError as error:
            self._say(reachable=False, why=str(error))
        finally:
            self._beating = False

    async def _beat_once(self) -> None:
        """Say that we live, and learn who else does."""
        info = _encode(self._server.broker.info)
        if info != self._info:
            self._info, self._version = info, self._version + 1
        me = ClusterMember(
            member_id=self._server.config.server_id,
            kind="server",
            incarnation=self._incarnation,
            schema_version=self._schema_version,
            version=self._version,
            info=info,
        )
        known = {member_id: version for member_id, (version, _) in self._seen.items()}
        self._met(await self._call(lambda: self._coordination.beat(me, seen=known)))

    def _met(self, view: View) -> None:
        seen: dict[str, tuple[int, ServerInfo]] = {}
        for member in view.members:
            if member.info is not None:
                try:
                    told = _decode(member.info)
                except msgspec.DecodeError as error:  # of another version than ours: that it lives is all that we know
                    logger.warning("what server %s tells of itself is not understood: %s", member.member_id, error)
                    told = ServerInfo(server_id=member.member_id)
                seen[member.member_id] = (member.version, told)
            elif member.member_id in self._seen:
                seen[member.member_id] = self._seen[member.member_id]
        self._seen = seen
        self._server.tell(Met(tuple(info for _, info in seen.values()), view.detached))

    async def detach(self, command: Detach) -> bool:
        """Others hear of it with their next beat, we at once."""
        changed = await self._call(
            lambda: self._coordination.set_detached(
                command.worker_id, command.detached, actor=command.actor, reason=command.reason
            )
        )
        await self._beat()
        return changed

    def _say(self, *, reachable: bool, why: str = "") -> None:
        if reachable != self._reachable:
            self._reachable = reachable
            if reachable:
                logger.info("the coordination answers again")
            else:
                logger.warning("the coordination does not answer: %s", why)

    # ------------------------------------------------------------------------------------------------ who leads

    def told(self, command: TakeoverDone | Deposed | Publish) -> None:
        match command:
            case Publish():
                self._wakeups.publish(split(command.hint))
            case TakeoverDone():
                self._decide(election.TookOver(command.epoch, command.done))
            case Deposed():
                logger.warning("epoch %d was refused by the store: another server leads", command.epoch)
                self._decide(election.EpochFenced(command.epoch))

    def _decide(self, event: election.Event) -> None:
        if self._has_left:
            return
        self._answered.set()
        for command in self._term.apply(event, self._server.now().monotonic):
            match command:
                case election.Acquire():
                    self._tasks.spawn(self._acquire())
                case election.TakeOver():
                    self._server.tell(Won(command.epoch))
                case election.Renew():
                    self._tasks.spawn(self._renew(command.epoch))
                case election.Release():
                    self._tasks.spawn(self._release(command.epoch))
                case election.Lead():
                    logger.info("leads, under epoch %d", command.epoch)
                    self._server.tell(Elected(command.epoch))
                case election.StepDown():
                    logger.info("leads no more (epoch %d): %s", command.epoch, command.reason)
                    self._server.tell(Elected(0))

    async def _acquire(self) -> None:
        asked_at = self._server.now().monotonic
        answer: election.Locked | election.Busy | None = None
        try:
            floor = await self._server.highest_epoch()
            holder = self._server.config.server_id
            answer = await self._call(self._coordination.acquire, SCOPE, holder, self._lock_ttl_s, floor)
            self.busy = answer if isinstance(answer, election.Busy) else None
        except TasukiError as error:
            logger.debug("the leader's lock could not be asked for: %s", error)
        finally:
            self._decide(election.Acquired(answer, asked_at))

    async def _renew(self, epoch: int) -> None:
        asked_at = self._server.now().monotonic
        done: bool | None = None
        try:
            done = await self._call(self._coordination.renew, SCOPE, self._server.config.server_id, epoch, self._lock_ttl_s)
        except TasukiError as error:
            logger.warning("the leader's lock could not be renewed: %s", error)
        finally:
            self._decide(election.Renewed(done, asked_at))

    async def _release(self, epoch: int) -> None:
        try:
            await self._call(self._coordination.release, SCOPE, self._server.config.server_id, epoch)
        except TasukiError as error:
            logger.info("the leader's lock was not given back, it ends by itself: %s", error)

    # ------------------------------------------------------------------------------------------------ hints

    def _heard(self, piece: bytes) -> None:
        try:
            hint = decode(piece)
        except TasukiError as error:
            logger.warning("%s", error)
            return
        self._server.tell(Hinted(hint))
        self.heard(hint)
