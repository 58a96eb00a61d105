"""The contract of the coordination (live members, the leader's lock, detached workers), and the implementation in memory.

Nothing here is authoritative. A server that looks dead may be alive, and two servers may both believe that they hold a lock, if
clocks or networks misbehave: the store, which knows the epochs (`Store.take_over`), decides what a leader may write. So a back
end may forget everything at any time, except the highest epoch; and if it forgot even that, `floor` brings it back.

Time is that of the coordination's own clock; callers pass and get durations. Two hosts' clocks are never compared.

The verbs are synchronous, and block: call them from a thread. Several threads may share one object; their calls queue up.
`Unavailable` means that the verb may or may not have been executed, and should be repeated. The next call connects anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from tasuki.core.election import LOCK_TTL_MAX_S, Busy, Locked
from tasuki.errors import InvalidInput

BEAT_INTERVAL_S = 1.0
TIMEOUT_SHARE = 0.4  # of the lock's ttl, for one call: one that hangs is over while there is time for one more renewal
MEMBER_TIMEOUT_S = 5.0  # five beats: a member survives one lost connection and one slow statement
FORGET_AFTER_S = 3600.0  # how long the row of a dead member is kept
FORGET_BATCH = 100  # rows that one beat removes
LEADER = "(leader)"  # no user of a Django project has such a name
"""Actor of a leader that detaches a worker which does not answer."""
ASSIGNED_S = 5.0  # how long the note of an assignment is kept
LEADER_DETACH_S = 86_400  # how long the flag of such a worker is kept: its id is not given again


class ClusterMember(msgspec.Struct, frozen=True, kw_only=True):
    """A process that announces itself."""

    member_id: str
    kind: str = "server"
    incarnation: str
    """New at every start of the process."""
    schema_version: int = 0
    """Version of the tables that its code expects."""
    version: int = 0
    """Version of `info`. Must grow when that changes, also from one incarnation of this member to the next: others know by it
    whether they have read `info`. (Start at the wall clock in milliseconds.)"""
    info: bytes = b""
    """Facts for the other members."""
    led_ago_s: float | None = None
    """Seconds since the store took its last turn as the leader, who is to be told if somebody asked it to step down; None: it
    does not lead."""
    workers: Mapping[str, Mapping[str, str | int]] = {}
    """Facts about its workers by worker_id, for people and programs that read them; used if `shows_workers`."""


class LiveMember(msgspec.Struct, frozen=True):
    """A member whose last beat was less than MEMBER_TIMEOUT_S ago."""

    member_id: str
    kind: str
    incarnation: str
    schema_version: int
    version: int
    info: bytes | None
    """Facts about the member; None if the caller has seen this version."""
    age_s: float = 0.0
    """Time since its last beat, where the coordination tells."""


class View(msgspec.Struct, frozen=True):
    """The answer to a beat."""

    members: tuple[LiveMember, ...]
    """Live members by id, including the one that has just beaten."""
    detached: frozenset[str]
    degraded: bool = False
    """The leader, who asks, has to step down. Told once."""
    leader_seen_s: float | None = None
    """Seconds since the store took the last turn of a leader, as leaders told; None: that is not known."""
    detached_by_leader: frozenset[str] = frozenset()
    """Workers of `detached` that a leader detached (LEADER): they come back under another id."""


class Coordination(Protocol):
    """The verbs of the coordination. See the module's docstring for what holds for all of them."""

    member_timeout_s: float = MEMBER_TIMEOUT_S
    """A member whose last beat was so long ago is not alive."""
    shows_workers: bool = False
    """A beat also writes what `ClusterMember.workers` says."""

    def set_lock_ttl(self, ttl_s: float) -> None:
        """Give an answer up in time for another renewal of a lock with this ttl. Connects anew, where that is needed."""
        return

    # -- members --------------------------------------------------------------------------------------------------
    def beat(self, me: ClusterMember, *, seen: Mapping[str, int]) -> View:
        """Announce that `me` is alive, and return the live members. Call it every BEAT_INTERVAL_S.

        `seen` is member_id → the version of its info that the caller has; only newer info is returned. The info of `me` is
        written only when its version or incarnation is not the stored one. Also removes members that have been dead for
        FORGET_AFTER_S, a few at a time.
        """

    def heartbeat_ages(self) -> dict[str, float]:
        """Return the seconds since the last beat of each member that has not left, alive or not."""

    def leave(self, member_id: str, incarnation: str) -> None:
        """Remove a member that ends. Does nothing if another incarnation has beaten since."""

    # -- the leader's lock ----------------------------------------------------------------------------------------
    def acquire(self, scope: str, holder: str, ttl_s: float, floor: int) -> Locked | Busy:
        """Take the lock if it is free or expired, whichever server had it.

        Its epoch is one more than the last of this scope, or than `floor`, the highest that the store knows, if that is higher.
        """

    def renew(self, scope: str, holder: str, epoch: int, ttl_s: float) -> bool:
        """Extend the lock to ttl_s from now; False, and no change, if the holder does not hold it any more.

        An expired lock is not renewed, even if nobody took it: its holder has stepped down.
        """
        check_ttl(ttl_s)
        return self._set_expiry(scope, holder, epoch, ttl_s)

    def release(self, scope: str, holder: str, epoch: int) -> bool:
        """Give the lock back early; the epoch stays used. False, and no change, if the holder does not hold it any more.

        A sub-leader calls it in the name of a leader that it takes to be dead. That is always safe: the store fences."""
        return self._set_expiry(scope, holder, epoch, 0.0)

    def _set_expiry(self, scope: str, holder: str, epoch: int, ttl_s: float) -> bool:
        """Let a lock that is held end ttl_s from now; False, and no change, if the holder does not hold it any more."""

    def degrade(self) -> None:
        """Have the leader step down: its next beat is told. Without a leader, the next one is told."""

    # -- workers that get no more work ----------------------------------------------------------------------------
    def note_assigned(self, worker_of: Mapping[str, str]) -> None:
        """Note which worker each run is about to be assigned to, for people and programs that read it; used if
        `shows_workers`. Nothing depends on it: the store alone says what is assigned to whom."""
        return

    def set_detached(self, worker_id: str, detached: bool, *, actor: str, reason: str = "") -> bool:
        """Give a worker no more work, or give it work again. True if that changed anything; else actor and reason stay.

        A worker that LEADER detached is forgotten after LEADER_DETACH_S; a person who detaches it takes LEADER's place."""

    def detached(self) -> frozenset[str]:
        """Return the worker_ids that get no more work."""

    def close(self) -> None:
        """Close the connection. Call `leave` and `release` before: neither is implied."""


def check_ttl(ttl_s: float) -> None:
    """InvalidInput for a ttl that no lock may have."""
    if not 0 < ttl_s <= LOCK_TTL_MAX_S:
        raise InvalidInput(f"a lock for {ttl_s} s: use more than 0 and at most {LOCK_TTL_MAX_S:g} s")


# ---------------------------------------------------------------------------------------------------- in memory


class _Lock(msgspec.Struct, frozen=True):
    epoch: int
    holder: str
    expires_at: float


class MemoryCoordination(Coordination):
    """Coordination in memory: the reference, for tests and simulations. `clock()` is its clock, in seconds.

    Several simulated processes share one object.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._mutex = threading.Lock()
        self._members: dict[str, tuple[float, ClusterMember]] = {}
        self._locks: dict[str, _Lock] = {}
        self._detached: dict[str, tuple[str, str]] = {}
        """worker_id → (actor, reason)"""
        self._degraded = False
        self._led_at: float | None = None

    def beat(self, me: ClusterMember, *, seen: Mapping[str, int]) -> View:
        with self._mutex:
            now = self._clock()
            self._members[me.member_id] = (now, self._with_stored_info(me))
            self._forget(now)
            rows = sorted(self._members.items())
            timeout_s = self.member_timeout_s
            live = (_seen_by(member, seen, now - beat_at) for _, (beat_at, member) in rows if abs(now - beat_at) < timeout_s)
            degraded = me.led_ago_s is not None and self._degraded
            if me.led_ago_s is not None:
                self._degraded, self._led_at = False, now - me.led_ago_s
            seen_s = None if self._led_at is None else now - self._led_at
            detached_by_leader = frozenset(name for name, (actor, _) in self._detached.items() if actor == LEADER)
            return View(tuple(live), frozenset(self._detached), degraded, seen_s, detached_by_leader)

    def heartbeat_ages(self) -> dict[str, float]:
        with self._mutex:
            return {member_id: self._clock() - beat_at for member_id, (beat_at, _) in self._members.items()}

    def _with_stored_info(self, me: ClusterMember) -> ClusterMember:
        _, before = self._members.get(me.member_id, (0.0, me))
        same = (before.incarnation, before.version) == (me.incarnation, me.version)
        return msgspec.structs.replace(me, info=before.info) if same else me

    def _forget(self, now: float) -> None:
        dead = [member_id for member_id, (beat_at, _) in self._members.items() if beat_at < now - FORGET_AFTER_S]
        for member_id in dead[:FORGET_BATCH]:
            del self._members[member_id]

    def leave(self, member_id: str, incarnation: str) -> None:
        with self._mutex:
            _, member = self._members.get(member_id, (0.0, None))
            if member is not None and member.incarnation == incarnation:
                del self._members[member_id]

    def acquire(self, scope: str, holder: str, ttl_s: float, floor: int) -> Locked | Busy:
        check_ttl(ttl_s)
        with self._mutex:
            now = self._clock()
            lock = self._locks.get(scope)
            if lock is not None and _is_held(lock, now):
                return Busy(lock.holder, lock.expires_at - now)
            epoch = max(lock.epoch if lock is not None else 0, floor) + 1
            self._locks[scope] = _Lock(epoch, holder, now + ttl_s)
            return Locked(epoch)

    def _set_expiry(self, scope: str, holder: str, epoch: int, ttl_s: float) -> bool:
        with self._mutex:
            now = self._clock()
            lock = self._locks.get(scope)
            if lock is None or (lock.holder, lock.epoch) != (holder, epoch) or not _is_held(lock, now):
                return False
            self._locks[scope] = _Lock(epoch, holder, now + ttl_s)
            return True

    def degrade(self) -> None:
        with self._mutex:
            self._degraded = True

    def set_detached(self, worker_id: str, detached: bool, *, actor: str, reason: str = "") -> bool:
        with self._mutex:
            before, _ = self._detached.get(worker_id, ("", ""))
            if detached == bool(before) and not (detached and before == LEADER != actor):
                return False
            if detached:
                self._detached[worker_id] = (actor, reason)
            else:
                del self._detached[worker_id]
            return True

    def detached(self) -> frozenset[str]:
        with self._mutex:
            return frozenset(self._detached)

    def close(self) -> None:
        """Do nothing: other members continue using this object."""


def _seen_by(member: ClusterMember, seen: Mapping[str, int], age_s: float) -> LiveMember:
    is_known = seen.get(member.member_id) == member.version
    known = {name: getattr(member, name) for name in LiveMember.__struct_fields__ if name != "age_s"}
    return LiveMember(**{**known, "info": None if is_known else member.info}, age_s=age_s)


def _is_held(lock: _Lock, now: float) -> bool:
    return now < lock.expires_at <= now + LOCK_TTL_MAX_S
