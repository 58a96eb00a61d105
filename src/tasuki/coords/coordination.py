"""The coordination: who is alive, who may try to lead, and which workers are to be left alone. This is the contract; the
implementations are beside it.

Nothing here is truth. A server that looks dead may be alive, and a lock may be held by two who both believe in it, if clocks
or networks misbehave: what a leader may write is decided by the store, which knows the epochs (`Store.take_over`). So a back
end may forget everything at any time, except the highest epoch; and if it forgot even that, `floor` brings it back.

Time is judged by the coordination's own clock; callers bring durations, and get durations. Two hosts' clocks are never compared.

The verbs are synchronous, and block: call them from a thread. Several threads may share one object; their calls queue up.
`Unavailable` means: it may or may not have happened, ask again. The next call tries to connect anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from tasuki.core.election import LOCK_TTL_MAX_S, Busy, Locked
from tasuki.errors import InvalidInput

__all__ = [
    "BEAT_INTERVAL_S",
    "FORGET_AFTER_S",
    "FORGET_BATCH",
    "LOCK_TTL_MAX_S",
    "MEMBER_TIMEOUT_S",
    "Busy",
    "ClusterMember",
    "Coordination",
    "LiveMember",
    "Locked",
    "View",
    "check_ttl",
]

BEAT_INTERVAL_S = 1.0
MEMBER_TIMEOUT_S = 5.0  # five beats: one lost connection and one slow statement are no death
FORGET_AFTER_S = 3600.0  # how long a dead member can still be looked at
FORGET_BATCH = 100  # rows that one beat removes


class ClusterMember(msgspec.Struct, frozen=True, kw_only=True):
    """A process that says it is alive."""

    member_id: str
    kind: str = "server"
    incarnation: str
    """New at every start of the process."""
    schema_version: int = 0
    """What its code expects of the tables."""
    version: int = 0
    """Of `info`. Must grow when that changes, also from one incarnation of this member to the next: others know by it whether
    they have read `info`. (Start at the wall clock in milliseconds.)"""
    info: bytes = b""
    """What others should know of it."""


class LiveMember(msgspec.Struct, frozen=True, kw_only=True):
    """A member whose last beat was less than MEMBER_TIMEOUT_S ago."""

    member_id: str
    kind: str
    incarnation: str
    schema_version: int
    version: int
    info: bytes | None
    """None: the caller has seen this version."""


class View(msgspec.Struct, frozen=True):
    """What a beat brings back."""

    members: tuple[LiveMember, ...]
    """By id; the one that has just beaten is among them."""
    detached: frozenset[str]


class Coordination(Protocol):
    """See the module's docstring for what holds for all verbs."""

    # -- members --------------------------------------------------------------------------------------------------
    def beat(self, me: ClusterMember, *, seen: Mapping[str, int]) -> View:
        """Say that I am alive, and hear who else is. Call it every BEAT_INTERVAL_S.

        `seen` is member_id → the version of its info that the caller has; only what is new travels. My own info is written
        only when its version, or my incarnation, is not the stored one. Also removes members that have been dead for
        FORGET_AFTER_S, a few at a time.
        """
        ...

    def leave(self, member_id: str, incarnation: str) -> None:
        """I am going: do not wait for my beats. Does nothing if another incarnation has beaten since."""
        ...

    # -- the leader's lock ----------------------------------------------------------------------------------------
    def acquire(self, scope: str, holder: str, ttl_s: float, floor: int) -> Locked | Busy:
        """Take the lock if it is free or over, whoever had it. Its epoch is one more than the last of this scope, or than
        `floor`, the highest that the store knows, if that is higher."""
        ...

    def renew(self, scope: str, holder: str, epoch: int, ttl_s: float) -> bool:
        """The lock lasts ttl_s from now. False, and no change: it is not ours any more. One that is over is not renewed, even
        if nobody took it: its holder has stepped down."""
        ...

    def release(self, scope: str, holder: str, epoch: int) -> bool:
        """Give the lock back before its time; the epoch stays used. False, and no change, if it was not ours any more."""
        ...

    # -- workers that get no more work ----------------------------------------------------------------------------
    def set_detached(self, worker_id: str, detached: bool, *, actor: str, reason: str = "") -> bool:
        """Give a worker no more work, or give it work again. True if that changed anything; if not, actor and reason stay as
        they were."""
        ...

    def detached(self) -> frozenset[str]:
        """The worker_ids of those."""
        ...

    def close(self) -> None:
        """Give back the connection. Leaves nothing: call `leave` and `release` before."""
        ...


def check_ttl(ttl_s: float) -> None:
    """InvalidInput for a ttl that no lock may have."""
    if not 0 < ttl_s <= LOCK_TTL_MAX_S:
        raise InvalidInput(f"a lock for {ttl_s} s: use more than 0 and at most {LOCK_TTL_MAX_S:g} s")
