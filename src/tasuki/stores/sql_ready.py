"""What there is to lease: a walk over the index of ready rows by its distinct values, one seek each.

It never looks at more than it needs: bands from the highest, groups of a band, and inside a group only the subjects in the
ranges that the request's patterns can match, SUBJECTS_AT_ONCE at a time. So neither the length of a queue, nor patterns that
match nothing, nor a client that makes a new subject for every job costs other groups more than a moment. The price: in a group
with more ready subjects than that, subjects take turns, and age decides among those whose turn it is.

What a walk found is remembered for the one `lease` call, in which nothing can become ready.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from functools import lru_cache

from tasuki.core.subject import group_of, literal_prefix, matches
from tasuki.core.verbs import LeaseRequest

SUBJECTS_AT_ONCE = 128
_REMEMBERED_MAX = 10_000
_ABOVE_ALL_PRIORITIES = 1_000
_ABOVE_ALL_TEXT = "\U0010ffff"

Region = tuple[str | None, str, str, bool]
"""Where a pattern's subjects lie in the index: group (None: any), first subject, end, whether that still needs matching."""

Place = tuple[int, str, str]
"""Priority, group, pattern."""


@lru_cache(4096)
def region_of(pattern: str) -> Region:
    """The narrowest range that holds all subjects that the pattern matches."""
    prefix = literal_prefix(pattern)
    if prefix == pattern:
        return group_of(pattern), pattern, pattern + "\0", False
    if not prefix:
        return None, "", _ABOVE_ALL_TEXT, pattern != ">"
    # `job.*.x` may be of any group: the token that names it comes after the prefix.
    is_open = prefix in ("job", "job.assign", "job.submit")
    group = None if is_open else group_of(prefix + ".x")
    return group, prefix + ".", prefix + "/", pattern != prefix + ".>"


class SubjectScan:
    """The ready subjects of one place, in windows. Begins behind `start`, and comes round to it."""

    def __init__(self, execute: Callable[..., sqlite3.Cursor], statement: str, place: Place, start: str) -> None:
        self._execute = execute
        self._statement = statement
        self._place = place
        _, low, high, self._needs_match = region_of(place[2])
        begin = max(low, start)
        self._ranges = [(begin, high)] if begin == low else [(begin, high), (low, begin)]
        self.names: list[str] = []
        self.last = ""
        """Where the next scan of this place should begin, if this one does not see all of it."""
        self.advance()
        self.is_whole = not self._ranges

    def advance(self) -> bool:
        """Look at the next window; False if all was seen."""
        if not self._ranges:
            return False
        priority, group, pattern = self._place
        found: list[str] = []
        while self._ranges and len(found) < SUBJECTS_AT_ONCE:
            low, high = self._ranges[0]
            wanted = SUBJECTS_AT_ONCE - len(found)
            names = [row[0] for row in self._execute(self._statement, (priority, group, low, high, wanted))]
            found += names
            if len(names) < wanted:
                del self._ranges[0]
            else:
                self.last = names[-1] + "\0"
                self._ranges[0] = (self.last, high)
        self.names = [name for name in found if matches(pattern, name)] if self._needs_match else found
        return True


class ReadySubjects:
    """What is ready, as far as one `lease` call has asked. `starts` is where scans that did not see all left off before."""

    def __init__(self, execute: Callable[..., sqlite3.Cursor], statements: dict[str, str], starts: dict[Place, str]) -> None:
        self._execute = execute
        self._statements = statements
        self._starts = starts
        self._bands: list[int] = []
        self._has_lower_band = True
        self._groups: dict[int, list[str]] = {}
        self._whole: dict[Place, SubjectScan] = {}

    def bands(self) -> Iterator[int]:
        """Priorities with ready jobs, the highest first."""
        position = 0
        while position < len(self._bands) or self._find_band():
            yield self._bands[position]
            position += 1

    def _find_band(self) -> bool:
        if self._has_lower_band:
            below = self._bands[-1] if self._bands else _ABOVE_ALL_PRIORITIES
            row = self._execute(self._statements["band"], (below,)).fetchone()
            if row is not None:
                self._bands.append(row[0])
                return True
            self._has_lower_band = False
        return False

    def groups(self, priority: int, patterns: tuple[str, ...]) -> set[str]:
        """The groups that may have something for these patterns."""
        named = {region_of(pattern)[0] for pattern in patterns}
        if None not in named:
            return {group for group in named if group is not None}
        if priority not in self._groups:
            self._groups[priority] = [row[0] for row in self._execute(self._statements["groups"], (priority,))]
        return set(self._groups[priority])

    def windows(self, priority: int, group: str, request: LeaseRequest) -> Iterator[list[str]]:
        """The subjects of the group that the request may take from, some at a time."""
        scans = [self._scan((priority, group, pattern)) for pattern in request.patterns if region_of(pattern)[0] in (None, group)]
        while scans:
            names = scans[0].names if len(scans) == 1 else list(dict.fromkeys(name for scan in scans for name in scan.names))
            if request.live_workers:
                names = [name for name in names if not request.leaves(name)]
            if names:
                yield names
            scans = [scan for scan in scans if scan.advance()]

    def _scan(self, place: Place) -> SubjectScan:
        scan = self._whole.get(place)
        if scan is None:
            scan = SubjectScan(self._execute, self._statements["subjects"], place, self._starts.pop(place, ""))
            if scan.is_whole:
                self._whole[place] = scan
            else:
                if len(self._starts) >= _REMEMBERED_MAX:
                    self._starts.clear()
                self._starts[place] = scan.last
        return scan
