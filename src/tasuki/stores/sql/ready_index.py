"""What there is to lease: a walk over the index of ready rows by its distinct values, one seek each.

It never looks at more than it needs: bands from the highest, groups of a band, GROUPS_AT_ONCE at a time, and inside a group only
the subjects in the ranges that the request's patterns can match, SUBJECTS_AT_ONCE at a time. So neither the length of a queue,
nor patterns that match nothing, nor a client that makes a new subject or a new group for every job costs other groups more than a
moment. The price: in a band with more groups than that, each request deals to those whose turn it is, and the next request to
those that follow; in a group with more ready subjects than that, subjects take turns, and age decides among those whose turn
it is.

What a walk found is remembered for the one `lease` call, in which nothing can become ready.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from typing import Any

from tasuki.core.store_messages import LeaseRequest
from tasuki.core.subject import group_of, literal_prefix, matches
from tasuki.stores.sql.database import Parameters
from tasuki.stores.sql.read import ABOVE_ALL_PRIORITIES

GROUPS_AT_ONCE = 256
SUBJECTS_AT_ONCE = 128
_REMEMBERED_MAX = 10_000
_ABOVE_ALL_TEXT = "\U0010ffff"
_NEXT = (
    "\x01"  # behind a name: the smallest text above it, since no name has control characters. Not NUL, which PostgreSQL refuses
)

Region = tuple[str | None, str, str, bool]
"""Where a pattern's subjects lie in the index: group (None: any), first subject, end, whether that still needs matching."""

Place = tuple[int] | tuple[int, str, str]
"""What a scan is of: the groups of a priority; or the subjects of a priority and group that a pattern matches."""

Read = Callable[[str, str, int], list[str]]
"""(low, high, n): the first n names from low on, below high."""


@lru_cache(4096)
def region_of(pattern: str) -> Region:
    """The narrowest range that holds all subjects that the pattern matches."""
    prefix = literal_prefix(pattern)
    if prefix == pattern:
        return group_of(pattern), pattern, pattern + _NEXT, False
    if not prefix:
        return None, "", _ABOVE_ALL_TEXT, pattern != ">"
    # `job.*.x` may be of any group: the token that names it comes after the prefix.
    is_open = prefix in ("job", "job.assign", "job.submit")
    group = None if is_open else group_of(prefix + ".x")
    return group, prefix + ".", prefix + "/", pattern != prefix + ".>"


class Scan:
    """Names from `low` on, below `high`, `at_once` at a time, and of those what matches `pattern` (None: all). Begins at `start`,
    and comes round to it."""

    def __init__(self, read: Read, at_once: int, low: str, high: str, start: str, pattern: str | None = None) -> None:
        self._read = read
        self._at_once = at_once
        self._pattern = pattern
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
        found: list[str] = []
        while self._ranges and len(found) < self._at_once:
            low, high = self._ranges[0]
            wanted = self._at_once - len(found)
            names = self._read(low, high, wanted)
            found += names
            if len(names) < wanted:
                del self._ranges[0]
            else:
                self.last = names[-1] + _NEXT
                self._ranges[0] = (self.last, high)
        pattern = self._pattern
        self.names = found if pattern is None else [name for name in found if matches(pattern, name)]
        return True


class ReadyIndex:
    """What is ready, as far as one `lease` call has asked. `starts` is where scans that did not see all left off before."""

    def __init__(self, rows: Callable[[str, Parameters], list[Any]], starts: dict[Place, str]) -> None:
        self._rows = rows
        self._starts = starts
        self._bands: list[int] = []
        self._has_lower_band = True
        self._whole: dict[Place, Scan] = {}

    def bands(self) -> Iterator[int]:
        """Priorities with ready jobs, the highest first."""
        position = 0
        while position < len(self._bands) or self._find_band():
            yield self._bands[position]
            position += 1

    def _find_band(self) -> bool:
        if self._has_lower_band:
            below = self._bands[-1] if self._bands else ABOVE_ALL_PRIORITIES
            found = self._rows("band", (below,))
            if found:
                self._bands.append(found[0][0])
                return True
            self._has_lower_band = False
        return False

    def groups(self, priority: int, patterns: tuple[str, ...]) -> Iterator[Collection[str]]:
        """The groups that may have something for these patterns, some at a time."""
        named = {region_of(pattern)[0] for pattern in patterns}
        if None not in named:
            yield {group for group in named if group is not None}
            return
        scan = self._scan((priority,), GROUPS_AT_ONCE, "", _ABOVE_ALL_TEXT)
        yield scan.names
        while not scan.is_whole and scan.advance():
            self._go_on((priority,), scan)
            yield scan.names

    def windows(self, priority: int, group: str, request: LeaseRequest) -> Iterator[list[str]]:
        """The subjects of the group that the request may take from, some at a time."""
        scans = []
        for pattern in request.patterns:
            region, low, high, needs_match = region_of(pattern)
            if region in (None, group):
                place = (priority, group, pattern)
                scans.append(self._scan(place, SUBJECTS_AT_ONCE, low, high, pattern if needs_match else None))
        while scans:
            names = scans[0].names if len(scans) == 1 else list(dict.fromkeys(name for scan in scans for name in scan.names))
            if request.live_workers:
                names = [name for name in names if not request.leaves(name)]
            if names:
                yield names
            scans = [scan for scan in scans if scan.advance()]

    def _scan(self, place: Place, at_once: int, low: str, high: str, pattern: str | None = None) -> Scan:
        scan = self._whole.get(place)
        if scan is None:
            scan = Scan(self._reader(place), at_once, low, high, self._starts.pop(place, ""), pattern)
            if scan.is_whole:
                self._whole[place] = scan
            else:
                self._go_on(place, scan)
        return scan

    def _reader(self, place: Place) -> Read:
        name = "groups" if len(place) == 1 else "subjects"
        fixed = place[:2]
        return lambda low, high, n: [row[0] for row in self._rows(name, (*fixed, low, high, n))]

    def _go_on(self, place: Place, scan: Scan) -> None:
        """The next scan of the place begins where this one is."""
        if len(self._starts) >= _REMEMBERED_MAX:
            self._starts.clear()
        self._starts[place] = scan.last
