"""Election of the one server that does the leader's upkeep: `apply(event, now) -> commands`. Pure; one `Election` per server.

Theory of operation. The coordination keeps a lock with a ttl, judged by its own clock; the server that gets the lock gets an
epoch, higher than all before. The lock is a right to try, not yet to lead: the epoch counts when the store has registered it
(`TakeOver`). The lock keeps two servers from *trying* to lead at once. The store alone keeps two from *writing* as leaders at
once: it refuses every epoch but the one registered last. So the promise never depends on clocks here; clocks decide only that
there is a leader, and that it is rarely refused.

A holder counts its time from *before* it asked, on its own clock, minus a margin; the coordination counts from when it
answered. So the holder's time is over first, and the holder steps down by itself, whether or not an answer comes. A request that
failed may have been carried out, or may yet be: the machine then acts as if it was not, and the ttl ends a lock it may have got.

One request is out at a time. The driver carries commands out in their order, and answers every Acquire, TakeOver and Renew
with exactly one event, however long it takes (TakeOver with TookOver or EpochFenced); Release has no answer.

    state        Ticked            Acquired           TookOver          Renewed             Fenced       Resign
    ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────
    Following    due: Acquire                                                                            → Resigned
                 → Acquiring
    Acquiring                      Locked: TakeOver                                                      the answer
                                   → TakingOver                                                          is awaited
                                   Busy, error:
                                   → Following
    TakingOver                                        True: Lead                            as refused   the answer
                                                      → Leading                                          is awaited
                                                      False, error,
                                                      too late: Release
                                                      → Following
    Leading      due: Renew                                             True: longer        StepDown     StepDown
                 over: StepDown                                         error: soon again   Release      Release
                 → Following                                            False: StepDown     → Following  → Resigned
                                                                        → Following
    Awaiting                                                            True, error:
                                                                        Release
                                                                        → Following
    Resigned     (asks nothing any more)

`Leading` has a renewal under way or not. A leadership that ends with one under way becomes `Awaiting` that answer instead of
`Following` or `Resigned`: a lock that may have been renewed after all is given back. Every event looks at the time first: a
leader whose time is over steps down before it handles the event. `EpochFenced` of an epoch other than the present one changes
nothing. `Lapsed` and `Degraded` are to a leader as `EpochFenced`, except that it asks for the lock again at once, or
after a time in which all other servers ask for it; others ignore both. `LockReleased` makes a follower ask at once, also after
an answer that it is still waiting for.

A server may let others ask first (`deference_s`): it asks for the lock only so long after the end or the release of the lock
that it has heard of. So the sub-leader of another node than the last leader's is the first to ask, then that of the same node,
then all others.
"""

from __future__ import annotations

from typing import NoReturn

import msgspec
from msgspec.structs import replace

from tasuki.core.machine import Ticked
from tasuki.errors import ConfigError, InvalidTransition

LEADER_SCOPE = "leader"  # name of the lock, and of the row with its epoch
LOCK_TTL_S = 10.0
LOCK_TTL_MAX_S = 60.0  # no lock lasts longer: one that seems to was written before the coordination's clock was set back
MARGIN_MAX_S = 1.0  # how much sooner than the coordination a holder lets go; a tenth of the ttl, if that is less
ASK_MIN_S = 0.1  # a lock that ends any moment is not asked for in a hot loop
ASK_MAX_S = 1.0  # a follower asks at least this often: the holder may have given the lock back


# -------------------------------------------------------------------------------------------- the coordination's answers
class Locked(msgspec.Struct, frozen=True):
    """The lock is yours, under this epoch."""

    epoch: int


class Busy(msgspec.Struct, frozen=True):
    """Another server has the lock."""

    holder: str
    left_s: float
    """Seconds until the lock ends, unless it is renewed."""


# ------------------------------------------------------------------------------------------------------------------ events
class Acquired(msgspec.Struct, frozen=True):
    """The answer to Acquire; None: an error."""

    answer: Locked | Busy | None
    asked_at: float
    """Read from the driver's clock before it asked."""


class TookOver(msgspec.Struct, frozen=True):
    """The answer to TakeOver: the store registered the epoch, or refused it; None: an error."""

    epoch: int
    done: bool | None


class Renewed(msgspec.Struct, frozen=True):
    """The answer to Renew: False, the lock is not ours any more; None: an error."""

    done: bool | None
    asked_at: float


class EpochFenced(msgspec.Struct, frozen=True):
    """The store refused a write under this epoch: a newer one is registered. Final for that epoch."""

    epoch: int


class Lapsed(msgspec.Struct, frozen=True):
    """The store took no turn of this leader for so long that leases may be over which nobody could renew. It is back, and the
    takeover under a new epoch renews them before any is ended."""

    epoch: int


class Degraded(msgspec.Struct, frozen=True):
    """Somebody asked the leader to step down, or its worker was detached. It stands again when all others have asked."""


class LockReleased(msgspec.Struct, frozen=True):
    """The lock may be free before its time: its holder has left, or was deposed."""


class Resign(msgspec.Struct, frozen=True):
    """This server is going down: give the lock back, and do not ask again."""


# ---------------------------------------------------------------------------------------------------------------- commands
class Acquire(msgspec.Struct, frozen=True):
    """Ask the coordination for the lock, with the store's highest epoch as the floor; report Acquired."""


class TakeOver(msgspec.Struct, frozen=True):
    """Register this epoch in the store; report TookOver."""

    epoch: int


class Renew(msgspec.Struct, frozen=True):
    """Ask the coordination to prolong the lock; report Renewed."""

    epoch: int


class Release(msgspec.Struct, frozen=True):
    """Give the lock back if it is still ours. Without it, it ends by itself."""

    epoch: int


class Lead(msgspec.Struct, frozen=True):
    """Lead from now on, under this epoch."""

    epoch: int


class StepDown(msgspec.Struct, frozen=True):
    """Stop leading."""

    epoch: int
    reason: str


# ------------------------------------------------------------------------------------------------------------------ states
class Following(msgspec.Struct, frozen=True):
    """Another server leads, or none does."""

    ask_at: float
    defers: bool = False
    """Others ask first, since the lock was released."""


class Acquiring(msgspec.Struct, frozen=True):
    """The coordination was asked for the lock."""

    released: bool = False
    """Meanwhile the lock was released, which the answer may not know."""


class TakingOver(msgspec.Struct, frozen=True):
    """The lock is ours, and the store was asked to register its epoch."""

    epoch: int
    asked_at: float
    """Time at which the lock was asked for."""


class Leading(msgspec.Struct, frozen=True):
    """This server leads."""

    epoch: int
    until: float
    """Time at which the leadership ends, unless the lock is renewed before."""
    renew_at: float
    renewing: bool = False


class Awaiting(msgspec.Struct, frozen=True):
    """The leadership has ended; the answer to the last renewal is still out."""

    epoch: int


class Resigned(msgspec.Struct, frozen=True):
    """This server stands for election no more."""


Event = Ticked | Acquired | TookOver | Renewed | EpochFenced | Lapsed | Degraded | LockReleased | Resign
Command = Acquire | TakeOver | Renew | Release | Lead | StepDown
State = Following | Acquiring | TakingOver | Leading | Awaiting | Resigned


class Election:
    """`now` is always the driver's monotonic clock (CLOCK_BOOTTIME), in seconds."""

    def __init__(self, holder: str, ttl_s: float = LOCK_TTL_S) -> None:
        self.holder = holder
        self.state: State = Following(ask_at=0.0)
        self.deference_s = 0.0
        """Time from the end of another's lock until this server asks for it; 0: it also asks before, every ASK_MAX_S at least."""
        self._resigning = False
        self._others_first_until = 0.0
        """Time before which a leader that was told to step down does not ask, whoever releases the lock."""
        self.set_ttl(ttl_s)

    # ------------------------------------------------------------------------------------------------ for the driver

    def set_ttl(self, ttl_s: float) -> None:
        """Count with another ttl from the next question on, which is due now: a lock that is held gets it then, and whoever waits
        for the end of another's lock waits anew. Not while a request is out: its answer counts by the ttl that was asked for."""
        if not 0 < ttl_s <= LOCK_TTL_MAX_S:
            raise ConfigError(f"a leader's lock of {ttl_s} s: use more than 0 and at most {LOCK_TTL_MAX_S:g} s")
        self.ttl_s = ttl_s
        self.margin_s = min(MARGIN_MAX_S, ttl_s / 10)
        match self.state:
            case Leading():
                self.state = replace(self.state, renew_at=0.0)
            case Following():
                self.state = Following(self._others_first_until)

    @property
    def asking(self) -> bool:
        """True while a request is out. A server that closes waits for the answer a while, to give back a lock that it brings."""
        match self.state:
            case Acquiring() | TakingOver() | Awaiting():
                return True
            case Leading(renewing=renewing):
                return renewing
            case _:
                return False

    def leads(self, now: float) -> int:
        """Return the epoch under which this server may act as the leader now; 0: it may not."""
        return self.state.epoch if isinstance(self.state, Leading) and now < self.state.until else 0

    # ----------------------------------------------------------------------------------------------------- the table

    def apply(self, event: Event, now: float) -> list[Command]:
        """Handle the event as the table above says."""
        commands: list[Command] = []
        if isinstance(self.state, Leading) and now >= self.state.until:
            commands += self._step_down(now, "the lock could not be renewed in time")
        match event:
            case Ticked():
                commands += self._ticked(now)
            case Acquired(answer=answer, asked_at=asked_at):
                commands += self._acquired(answer, asked_at, now)
            case TookOver():
                commands += self._took_over(event, now)
            case Renewed():
                commands += self._renewed(event, now)
            case EpochFenced(epoch=epoch):
                commands += self._fenced(epoch, now)
            case Lapsed(epoch=epoch):
                commands += self._lapsed(epoch, now)
            case Degraded():
                commands += self._degraded(now)
            case LockReleased():
                self._released(now)
            case Resign():
                commands += self._resign(now)
        return commands

    def _ticked(self, now: float) -> list[Command]:
        state = self.state
        if isinstance(state, Following) and now >= state.ask_at:
            self.state = Acquiring()
            return [Acquire()]
        if isinstance(state, Leading) and now >= state.renew_at and not state.renewing:
            self.state = replace(state, renewing=True)
            return [Renew(state.epoch)]
        return []

    def _acquired(self, answer: Locked | Busy | None, asked_at: float, now: float) -> list[Command]:
        if not isinstance(self.state, Acquiring):
            self._nobody_asked("Acquired")
        was_released = self.state.released
        match answer:
            case Locked(epoch=epoch) if not self._resigning:
                self.state = TakingOver(epoch, asked_at)
                return [TakeOver(epoch)]
            case Locked(epoch=epoch):
                self._follow(now)
                return [Release(epoch)]
            case Busy(left_s=left_s):
                wait_s = max(min(left_s, self.ttl_s), ASK_MIN_S)  # a lock that has more left may be about to get another ttl
                self._follow(now, wait_s + self.deference_s if self.deference_s else min(wait_s, ASK_MAX_S))
            case None:
                self._follow(now)
        if was_released:
            self._released(now)
        return []

    def _released(self, now: float) -> None:
        ask_at = max(now + self.deference_s, self._others_first_until)
        match self.state:
            case Following(defers=False) if self.deference_s:  # also if it would ask sooner; once, for such news may come again
                self.state = Following(ask_at, defers=True)
            case Following() as state:
                self.state = replace(state, ask_at=min(state.ask_at, ask_at))
            case Acquiring():
                self.state = Acquiring(released=True)

    def _took_over(self, event: TookOver, now: float) -> list[Command]:
        state = self.state
        if not isinstance(state, TakingOver) or state.epoch != event.epoch:
            self._nobody_asked(f"TookOver for epoch {event.epoch}")
        until = self._until(state.asked_at)
        if event.done and now < until and not self._resigning:
            self.state = Leading(state.epoch, until, renew_at=state.asked_at + self.ttl_s / 3)
            return [Lead(state.epoch)]
        self._follow(now)
        return [Release(state.epoch)]

    def _renewed(self, event: Renewed, now: float) -> list[Command]:
        state = self.state
        if isinstance(state, Awaiting):
            self._follow(now)
            return [] if event.done is False else [Release(state.epoch)]
        if not isinstance(state, Leading) or not state.renewing:
            self._nobody_asked("Renewed")
        if event.done is False:
            self.state = replace(state, renewing=False)
            return self._step_down(now, "the lock is not ours any more")
        if event.done:
            self.state = Leading(state.epoch, self._until(event.asked_at), renew_at=event.asked_at + self.ttl_s / 3)
        else:
            self.state = replace(state, renewing=False, renew_at=now + self.margin_s)
        return []

    def _fenced(self, epoch: int, now: float) -> list[Command]:
        match self.state:
            case Leading(epoch=current) if current == epoch:
                return self._step_down(now, "the store has another epoch", release=True)
            case TakingOver(epoch=current) if current == epoch:
                # Nothing else was written under it yet: this is what came of registering it.
                return self._took_over(TookOver(epoch, False), now)
            case _:
                return []

    def _lapsed(self, epoch: int, now: float) -> list[Command]:
        if not isinstance(self.state, Leading) or self.state.epoch != epoch:
            return []
        commands = self._step_down(now, "the store was away for so long that leases may be over", release=True)
        if isinstance(self.state, Following):
            self.state = Following(now)
        return commands

    def _degraded(self, now: float) -> list[Command]:
        if not isinstance(self.state, Leading):
            return []
        commands = self._step_down(now, "it was told to", release=True)
        if isinstance(self.state, Following):
            self._others_first_until = now + self.ttl_s + ASK_MAX_S  # every other server asks before that
            self.state = Following(self._others_first_until)
        return commands

    def _resign(self, now: float) -> list[Command]:
        self._resigning = True
        if isinstance(self.state, Leading):
            return self._step_down(now, "this server is going down", release=True)
        if isinstance(self.state, Following):
            self.state = Resigned()
        return []

    # --------------------------------------------------------------------------------------------------------- steps

    def _until(self, asked_at: float) -> float:
        return asked_at + self.ttl_s - self.margin_s

    def _step_down(self, now: float, reason: str, *, release: bool = False) -> list[Command]:
        state = self.state
        assert isinstance(state, Leading)
        commands: list[Command] = [StepDown(state.epoch, reason)]
        if state.renewing:
            self.state = Awaiting(state.epoch)
        else:
            self._follow(now)
            commands += [Release(state.epoch)] if release else []
        return commands

    def _follow(self, now: float, wait_s: float = ASK_MAX_S) -> None:
        self.state = Resigned() if self._resigning else Following(now + wait_s)

    def _nobody_asked(self, what: str) -> NoReturn:
        raise InvalidTransition(f"{what} came to {self.holder!r} in {self.state!r}, where no such question is out")
