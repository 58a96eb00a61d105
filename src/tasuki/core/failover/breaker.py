"""The circuit breaker of one node: whether it is left out for now, and when it may come back. Pure.

Theory of operation. A node that failed is left out for `left_out_s`, counted from the last failure that was seen. Being quiet is
not enough to come back: `good_checks` health checks in a row must be good as well. Checks that follow each other faster than
`check_spacing_s` count once, so that many callers who look at the same moment are not taken for a node that has been well for
a while. Whoever has no other node to turn to may use one that is `steady`, though its time is not over: the pause is there to
spare the callers, and these have nothing to be spared for.

Times are seconds of one clock, the caller's.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

REASON_MAX_CHARS = 300


class BreakerRules(msgspec.Struct, frozen=True):
    """How strict a breaker is."""

    left_out_s: float = 30.0
    failures: int = 1
    """How many failures in a row leave a node out."""
    good_checks: int = 3
    """How many good health checks in a row let it come back."""
    check_spacing_s: float = 0.2


DEFAULT_RULES = BreakerRules()


class BreakerState(StrEnum):
    CLOSED = "closed"
    """In use."""
    OPEN = "open"
    """Left out."""
    HALF_OPEN = "half-open"
    """Its time is over; it still has to show that it is well."""


class BreakerNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """A breaker as it can be written down, with its times counted from the moment of writing."""

    failures: int = 0
    good_checks: int = 0
    left_out_s: float | None = None
    """How much longer; zero or less: its time is over. None: it is not left out."""
    reason: str = ""


class Breaker:
    """Told of failures, of health checks and of answers; asked for its state."""

    def __init__(self, rules: BreakerRules = DEFAULT_RULES) -> None:
        self.reason = ""
        """Of the last failure."""
        self.good_checks = 0
        """In a row, since the last failure."""
        self._rules = rules
        self._failures = 0
        self._until: float | None = None
        self._counted_at: float | None = None

    def state(self, now: float) -> BreakerState:
        if self._until is None or (self.steady and now >= self._until):
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._until else BreakerState.HALF_OPEN

    @property
    def steady(self) -> bool:
        """So many good checks in a row that it could come back."""
        return self.good_checks >= self._rules.good_checks

    def left_out_s(self, now: float) -> float:
        """How much longer it is left out, whatever its health."""
        return 0.0 if self._until is None else max(0.0, self._until - now)

    def failed(self, now: float, reason: str) -> None:
        """It did not do what it was asked, or a health check was bad."""
        self._close_if_due(now)
        self._failures += 1
        self.good_checks = 0
        self._counted_at = None
        self.reason = reason[:REASON_MAX_CHARS]
        if self._until is not None or self._failures >= self._rules.failures:
            self._until = now + self._rules.left_out_s

    def checked(self, now: float) -> None:
        """A good health check."""
        spaced = self._counted_at is None or now - self._counted_at >= self._rules.check_spacing_s
        if self._until is not None and not self.steady and spaced:
            self._counted_at = now
            self.good_checks += 1
        self._close_if_due(now)

    def answered(self, now: float) -> None:
        """It did what it was asked. What was under way when it failed proves nothing: only a steady one is taken back."""
        self._close_if_due(now)
        if self._until is None or self.steady:
            self._until = None
            self._failures = 0

    def _close_if_due(self, now: float) -> None:
        if self._until is not None and self.state(now) is BreakerState.CLOSED:
            self._until = None
            self._failures = 0

    # ------------------------------------------------------------------------------------------------ written down

    def note(self, now: float) -> BreakerNote | None:
        """What another process should know; None if there is nothing to tell."""
        if self._until is None and not self._failures:
            return None
        left_out_s = None if self._until is None else self._until - now
        return BreakerNote(self._failures, self.good_checks, left_out_s, self.reason)

    def recall(self, note: BreakerNote, now: float) -> None:
        """Take over what was written down. A clock that was set meanwhile must not leave a node out for years."""
        self._failures = max(0, note.failures)
        self.good_checks = max(0, note.good_checks)
        self.reason = note.reason[:REASON_MAX_CHARS]
        self._counted_at = None
        self._until = None if note.left_out_s is None else now + min(note.left_out_s, self._rules.left_out_s)
