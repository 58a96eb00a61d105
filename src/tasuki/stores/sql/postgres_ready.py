"""The ready index of PostgreSQL, walked without the entries of jobs that were leased long ago.

While anybody holds an old snapshot (a dump, a long report), PostgreSQL can neither remove the index entries of leased jobs nor
mark them as dead: every walk over ready jobs would visit all of them. So the writer remembers for each of its busiest queues a
*floor*, a row id up to which it has seen everything taken. Claims begin there; walks go around what lies below, which costs some
seeks for each floor, once plain ones took long for what they found (`WalkMode`). New jobs have higher ids. Others come back below
a floor, or are committed late:

- a job that this server brings back (retry, loss, release, requeue) lowers the floors at once (`came_back`);
- a floor is raised RAISE_DELAY_S late, so that jobs whose ids were drawn earlier than their commit are seen;
- what other servers bring back, or commit later than that, is found by `_look_below`: it looks at what lies below the floors, for
  LOOK_MAX_S at most and LOOK_SHARE of the time, and continues from there the next time.

Floors are hints of one session: a rollback and a new connection forget them.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import psycopg

from tasuki.core.store_messages import JobKind
from tasuki.stores.sql.database import Parameters, Queues
from tasuki.stores.sql.postgres_session import PostgresSession, columns
from tasuki.stores.sql.rows import ABOVE_ALL_TEXT, NEXT

FLOOR_JOBS_MIN = 500  # jobs taken from a queue before it gets a floor: fewer dead entries cost less than going around them
FLOORS_MAX = 64  # each costs every walk around them some more seeks
SLOW_WALK_S = 0.003  # of a plain walk: 10,000 dead entries take as long
SLOW_ROW_S = 0.0001  # for each row that it finds
SLOW_WALKS = 3  # in a row: one alone may have waited for the CPU
AROUND_S, AROUND_MAX_S = 5.0, 60.0  # from slow walks to the next plain one; longer each time that is slow again
RAISE_DELAY_S = 0.1
LOOK_SHARE = 0.02  # of the time. A look without dead entries takes some 0.2 ms, so that it may be repeated after 10 ms
LOOK_MAX_S = 0.03  # some 100,000 dead entries
LOOK_STEP_S = 0.005  # one statement's share of it
_LOOK_IDS_FIRST = 16_384
_LOOK_IDS_MAX = 1 << 40
_COUNTED_MAX = 10_000

QueueKey = tuple[int, str, str, int, str]
"""Queue of the ready index: priority, group, subject, kind, exec."""


class ReadyParts(NamedTuple):
    """The ready index of one priority, without what lies below the floors."""

    groups: list[tuple[int, str, str]]
    """Ranges of groups without a floor: priority, low, high."""
    subjects: list[tuple[int, str, str, str]]
    """Ranges of subjects without a floor in the other groups: priority, group, low, high."""
    execs: list[tuple[int, str, str, int, str, str]]
    """Ranges of execs without a floor in the other subjects: priority, group, subject, kind, low, high."""
    queues: list[tuple[int, str, str, int, str, int]]
    """The queues of the other execs: priority, group, subject, kind, exec, floor."""


class ReadyFloors:
    """The floors of the queues from which most jobs were taken."""

    def __init__(self) -> None:
        self.known: dict[QueueKey, int] = {}
        self._next: dict[QueueKey, int] = {}
        self._later: dict[QueueKey, int] = {}
        self._raise_at = 0.0
        self._taken: dict[QueueKey, int] = {}

    def take(self, queue: QueueKey, row_id: int, count: int) -> None:
        """Note that `count` jobs were taken, and that none up to `row_id` is left."""
        if len(self._taken) >= _COUNTED_MAX:
            self._taken = {counted: self._taken[counted] for counted in self.known}
        self._taken[queue] = taken = self._taken.get(queue, 0) + count
        if taken >= FLOOR_JOBS_MIN:
            self._later[queue] = row_id

    def raise_due(self, now: float) -> None:
        """Let the floors follow what was taken RAISE_DELAY_S ago, or up to twice as long."""
        if now >= self._raise_at:
            self._raise_at = now + RAISE_DELAY_S
            self.known.update(self._next)
            self._next, self._later = self._later, {}
            while len(self.known) > FLOORS_MAX:
                del self.known[min(self.known, key=lambda queue: self._taken.get(queue, 0))]

    def lower(self, row_id: int, of: QueueKey | None = None) -> None:
        """Let the floors lie below a row that is ready: that of its queue, or if that is not known all of them."""
        for floors in (self.known, self._next, self._later):
            for queue, floor in floors.items():
                if floor >= row_id and of in (None, queue):
                    floors[queue] = row_id - 1

    def forget(self) -> None:
        for floors in (self.known, self._next, self._later):
            floors.clear()

    def parts(self, priority: int, low: str = "", high: str = ABOVE_ALL_TEXT) -> ReadyParts:
        """Return the parts of a priority in which jobs may be ready, of the groups from `low` on, below `high`."""
        floors = [queue for queue in self.known if queue[0] == priority and low <= queue[1] < high]
        groups = sorted({queue[1] for queue in floors})
        found = ReadyParts([(priority, *gap) for gap in _gaps(groups, low, high)], [], [], [])
        for group in groups:
            inside = self.parts_of_group(priority, group)
            found.subjects.extend(inside.subjects)
            found.execs.extend(inside.execs)
            found.queues.extend(inside.queues)
        return found

    def parts_of_group(self, priority: int, group: str, low: str = "", high: str = ABOVE_ALL_TEXT) -> ReadyParts:
        """Return the parts of a group in which jobs may be ready, of the subjects from `low` on, below `high`."""
        place = (priority, group)
        queues = [(*queue, floor) for queue, floor in self.known.items() if queue[:2] == place and low <= queue[2] < high]
        subjects = sorted({queue[2] for queue in queues})
        gaps = [(*place, *gap) for gap in _gaps(subjects, low, high)]
        execs = []
        for subject in subjects:
            for kind in map(int, JobKind):
                known = sorted(queue[4] for queue in queues if queue[2:4] == (subject, kind))
                if known != [""]:  # the only exec of the jobs for handlers
                    execs += [(*place, subject, kind, *gap) for gap in _gaps(known, "", ABOVE_ALL_TEXT)]
        return ReadyParts([], gaps, execs, queues)


def _gaps(names: list[str], low: str, high: str) -> Iterator[tuple[str, str]]:
    """Yield the ranges between these sorted names, from `low` on, below `high`."""
    for name in names:
        if low < name:
            yield low, name
        low = name + NEXT
    yield low, high


class WalkMode:
    """Choice between plain walks and those around the floors, for one kind of walk, by the time that plain ones take."""

    def __init__(self) -> None:
        self._slow = 0
        """Slow walks in a row."""
        self._around_until = 0.0
        self._around_s = AROUND_S

    def is_plain(self, now: float) -> bool:
        return now >= self._around_until

    def took(self, seconds: float, rows: int, now: float) -> None:
        """Note the time of a plain walk that found so many rows."""
        if seconds <= SLOW_WALK_S + rows * SLOW_ROW_S:
            self._slow, self._around_s = 0, AROUND_S
            return
        self._slow += 1
        if self._slow >= SLOW_WALKS:
            self._around_until = now + self._around_s
            self._around_s = min(AROUND_MAX_S, 2 * self._around_s)


class ReadySession(PostgresSession):
    """A session of a writer, which leases."""

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        *,
        before_write: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(connection, prepare=True, before_write=before_write)
        self._walks: dict[str, Callable[..., list[Any]]] = {
            "band": self._highest_priority,
            "groups": self._groups,
            "subjects": self._subjects,
        }
        self._monotonic = monotonic
        self._floors = ReadyFloors()
        self._modes = {name: WalkMode() for name in self._walks}
        self._look_at = 0.0
        self._look_ids = _LOOK_IDS_FIRST
        self._looked: dict[QueueKey, int] = {}
        """Row id above which each floor's queue was looked at; the one that was looked at last stands last."""

    def rows(self, name: str, parameters: Parameters = ()) -> list[Any]:
        walk = self._walks.get(name) if self._floors.known else None
        if walk is None:
            return super().rows(name, parameters)
        began = self._monotonic()
        if name == "band":  # the question with which every lease begins
            self._floors.raise_due(began)
            if began >= self._look_at:
                self._look_below(began)
                end = self._monotonic()
                self._look_at = end + (end - began) / LOOK_SHARE
                began = end
        mode = self._modes[name]
        if not mode.is_plain(began):
            return walk(*parameters)
        found = super().rows(name, parameters)
        end = self._monotonic()
        mode.took(end - began, len(found), end)
        return found

    def came_back(self, row_id: int) -> None:
        self._floors.lower(row_id)

    def rolled_back(self) -> None:
        """Forget the floors: some of the jobs below them may be ready again."""
        self._floors.forget()

    # -- claims ---------------------------------------------------------------------------------------------------
    def claim(self, queues: Queues, terms: tuple[Any, ...]) -> list[Any]:
        self._floors.raise_due(self._monotonic())
        return super().claim(queues, terms)

    def _floor(self, queues: Queues, place: int) -> int:
        return self._floors.known.get((queues.priority, queues.group, *queues.members[place]), 0)

    def _was_taken(self, queues: Queues, place: int, ids: list[int], highest: int) -> None:
        count = bisect_right(ids, highest)
        if count:
            self._floors.take((queues.priority, queues.group, *queues.members[place]), ids[count - 1], count)

    def _look_below(self, now: float) -> None:
        """Find jobs that became ready below a floor, and lower it."""
        known = self._floors.known
        self._looked = {queue: self._looked[queue] for queue in self._looked if queue in known} | {
            queue: floor for queue, floor in known.items() if queue not in self._looked
        }
        for queue in list(self._looked):
            high = min(self._looked.pop(queue), known[queue])
            while high > 0 and self._monotonic() < now + LOOK_MAX_S:
                began = self._monotonic()
                low = max(0, high - self._look_ids)
                found = super().rows("ready_below", (*queue, low, high))
                took_s = self._monotonic() - began
                factor = 4.0 if took_s < LOOK_STEP_S / 4 else 0.25 if took_s > LOOK_STEP_S else 1.0
                self._look_ids = min(_LOOK_IDS_MAX, max(1, int(self._look_ids * factor)))
                high = low
                if found:
                    self._floors.lower(found[0][0], queue)
                    break
            self._looked[queue] = high or known[queue]  # at the end it begins again
            if self._monotonic() >= now + LOOK_MAX_S:
                return

    # -- walks over the distinct values of the index --------------------------------------------------------------
    def _highest_priority(self, below: int) -> list[Any]:
        """Return the highest priority with ready jobs."""
        priorities = sorted({queue[0] for queue in self._floors.known if queue[0] < below}, reverse=True)
        gaps = list(zip([*priorities, -1], [below, *priorities], strict=True))
        parts = [self._floors.parts(priority) for priority in priorities]
        [[found]] = super().rows(
            "band_above",
            (
                *_columns(gaps, 2),
                *_columns(list(chain.from_iterable(part.groups for part in parts)), 3),
                *_columns(list(chain.from_iterable(part.subjects for part in parts)), 4),
                *_columns(list(chain.from_iterable(part.execs for part in parts)), 6),
                *_columns(list(chain.from_iterable(part.queues for part in parts)), 6),
            ),
        )
        return [] if found is None else [(found,)]

    def _groups(self, priority: int, low: str, high: str, n: int) -> list[Any]:
        parts = self._floors.parts(priority, low, high)
        groups, subjects = _columns(parts.groups, 3)[1:], _columns(parts.subjects, 4)
        inside = (*_columns(parts.execs, 6), *_columns(parts.queues, 6))
        names = super().rows("groups_above", (priority, n, *groups, *subjects, *inside))
        return sorted(names)[:n]

    def _subjects(self, priority: int, group: str, low: str, high: str, n: int) -> list[Any]:
        parts = self._floors.parts_of_group(priority, group, low, high)
        inside = (*_columns(parts.execs, 6), *_columns(parts.queues, 6))
        names = super().rows("subjects_above", (priority, n, *_columns(parts.subjects, 4), *inside))
        return sorted(names)[:n]


def _columns(batch: Sequence[tuple[Any, ...]], width: int) -> list[tuple[Any, ...]]:
    return columns(batch) if batch else [()] * width
