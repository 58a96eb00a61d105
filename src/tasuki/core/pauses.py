"""Pauses: patterns of subjects whose waiting jobs are granted to nobody until somebody resumes them. Pure.

A pause is a row of the store, so it holds on every server from the turn on that stores it. Submits are accepted all the same, and
jobs that a worker has continue. There are few pauses (PAUSES_MAX), which a lease reads at its beginning. However many jobs wait
below one, a walk over the index of ready jobs jumps over them: `unpaused` cuts a pause's range of subjects out of a walk's range.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import msgspec

from tasuki.core.subject import literal_prefix, matches

PAUSES_MAX = 100

Range = tuple[str, str]
"""Subjects from the first text on, below the second."""


class PauseOrder(msgspec.Struct, frozen=True, gc=False):
    """An order to pause the subjects of a pattern, or to resume it."""

    pattern: str
    actor: str
    reason: str = ""
    resume: bool = False


class PauseAnswer(enum.StrEnum):
    """The answer to a `PauseOrder`."""

    DONE = "done"
    AS_BEFORE = "as_before"
    """The pattern was paused before, and the first reason stays; or it was not, and cannot be resumed."""
    TOO_MANY = "too_many"
    """There are PAUSES_MAX pauses; nothing was changed."""


class PausedPattern(msgspec.Struct, frozen=True, gc=False):
    """A pattern that is paused."""

    pattern: str
    since: float
    """Wall time."""
    actor: str
    reason: str = ""


def pause_of(pauses: Iterable[PausedPattern], subject: str) -> PausedPattern | None:
    """Return the oldest pause that holds the jobs of a subject."""
    return min((one for one in pauses if matches(one.pattern, subject)), key=lambda one: one.since, default=None)


def is_paused(patterns: Iterable[str], subject: str) -> bool:
    return any(matches(pattern, subject) for pattern in patterns)


def paused_range(pattern: str) -> Range | None:
    """Return the range that has the subjects of a pattern and no others; None: there is no such range."""
    prefix = literal_prefix(pattern)
    if prefix == pattern:
        return pattern, pattern + "\x01"  # names have no control characters
    if pattern == ">":
        return "", "\U0010ffff"
    return (prefix + ".", prefix + "/") if pattern == prefix + ".>" else None


def unpaused(ranges: Sequence[Range], patterns: Iterable[str]) -> list[Range]:
    """Return the parts of the ranges, in their order, that are not in the range of a paused pattern."""
    left = list(ranges)
    for paused in filter(None, map(paused_range, patterns)):
        left = [part for one in left for part in ((one[0], min(one[1], paused[0])), (max(one[0], paused[1]), one[1]))]
        left = [part for part in left if part[0] < part[1]]
    return left
