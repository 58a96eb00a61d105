"""Coordination in memory: the reference, for tests and simulations. Several "processes" share one object. Touches nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import msgspec

from tasuki.coords.coordination import (
    FORGET_AFTER_S,
    FORGET_BATCH,
    LOCK_TTL_MAX_S,
    MEMBER_TIMEOUT_S,
    Busy,
    ClusterMember,
    LiveMember,
    Locked,
    View,
    check_ttl,
)


class _Lock(msgspec.Struct, frozen=True):
    epoch: int
    holder: str
    expires_at: float


class MemoryCoordination:
    """`clock()` is the coordination's clock, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._mutex = threading.Lock()
        self._members: dict[str, tuple[float, ClusterMember]] = {}
        self._locks: dict[str, _Lock] = {}
        self._detached: dict[str, tuple[str, str]] = {}
        """worker_id → (actor, reason)"""

    def beat(self, me: ClusterMember, *, seen: Mapping[str, int]) -> View:
        with self._mutex:
            now = self._clock()
            self._members[me.member_id] = (now, self._written(me))
            self._forget(now)
            return View(
                tuple(
                    _told(member, seen)
                    for _, (beat_at, member) in sorted(self._members.items())
                    if abs(now - beat_at) < MEMBER_TIMEOUT_S
                ),
                frozenset(self._detached),
            )

    def _written(self, me: ClusterMember) -> ClusterMember:
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

    def renew(self, scope: str, holder: str, epoch: int, ttl_s: float) -> bool:
        check_ttl(ttl_s)
        with self._mutex:
            return self._set_expiry(scope, holder, epoch, lambda now: now + ttl_s)

    def release(self, scope: str, holder: str, epoch: int) -> bool:
        with self._mutex:
            return self._set_expiry(scope, holder, epoch, lambda now: now)

    def _set_expiry(self, scope: str, holder: str, epoch: int, expiry: Callable[[float], float]) -> bool:
        now = self._clock()
        lock = self._locks.get(scope)
        if lock is None or (lock.holder, lock.epoch) != (holder, epoch) or not _is_held(lock, now):
            return False
        self._locks[scope] = _Lock(epoch, holder, expiry(now))
        return True

    def set_detached(self, worker_id: str, detached: bool, *, actor: str, reason: str = "") -> bool:
        with self._mutex:
            if detached == (worker_id in self._detached):
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
        """Nothing to give back; the others go on with this object."""


def _told(member: ClusterMember, seen: Mapping[str, int]) -> LiveMember:
    return LiveMember(
        member_id=member.member_id,
        kind=member.kind,
        incarnation=member.incarnation,
        schema_version=member.schema_version,
        version=member.version,
        info=None if seen.get(member.member_id) == member.version else member.info,
    )


def _is_held(lock: _Lock, now: float) -> bool:
    return now < lock.expires_at <= now + LOCK_TTL_MAX_S
