"""How the SQL store grants work: lease by patterns or by job_ids, assign, held.

Finding work never looks at more than it takes. The index of ready rows is walked by its distinct values (bands, groups,
subjects) with one seek each, only inside the ranges that the patterns can match; then the oldest rows of the chosen subjects
are read and granted. What was found is remembered for the one `lease` call, in which nothing can become ready.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from tasuki.core.fair import FairTurns
from tasuki.core.job import OnDisconnect, State
from tasuki.core.lifecycle import LEASE_MARGIN_S
from tasuki.core.subject import group_of, literal_prefix, matches
from tasuki.core.verbs import Assignment, Grant, LeaseRequest
from tasuki.errors import Unavailable
from tasuki.stores.sql_report import SqlReport
from tasuki.stores.sql_rows import READY, id_list, text_list
from tasuki.stores.store import Clock

LEASE_ID_BYTES = 16
_ABOVE_ALL_TEXT = "\U0010ffff"
_PENDING = State.PENDING.value
_ORPHANED = State.ORPHANED.value

Region = tuple[str | None, str, str, bool]
"""Where a pattern's subjects lie in the index: group (None: any), first subject, end, whether that still needs matching."""


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


class ReadySubjects:
    """What there is to lease, as far as one `lease` call has asked."""

    def __init__(self, execute: Callable[..., sqlite3.Cursor], statements: dict[str, str]) -> None:
        self._execute = execute
        self._statements = statements
        self._bands: list[int] = []
        self._has_lower_band = True
        self._found: dict[tuple[int, str], dict[str, list[str]]] = {}

    def bands(self) -> Iterator[int]:
        """Priorities with ready jobs, the highest first."""
        position = 0
        while True:
            if position == len(self._bands):
                if not self._has_lower_band:
                    return
                below = self._bands[-1] if self._bands else 1_000
                row = self._execute(self._statements["band"], (below,)).fetchone()
                if row is None:
                    self._has_lower_band = False
                    return
                self._bands.append(row[0])
            yield self._bands[position]
            position += 1

    def choose(self, priority: int, request: LeaseRequest) -> dict[str, list[str]]:
        """Group → the subjects in it that this request may take from."""
        if len(request.patterns) == 1:
            found = self._matching(priority, request.patterns[0])
        else:
            merged: dict[str, dict[str, None]] = {}
            for pattern in request.patterns:
                for group, subjects in self._matching(priority, pattern).items():
                    merged.setdefault(group, {}).update(dict.fromkeys(subjects))
            found = {group: list(names) for group, names in merged.items()}
        if not request.live_workers:
            return found
        others = request.live_workers - {request.worker_id}
        chosen = {group: [name for name in names if name.rpartition(".")[2] not in others] for group, names in found.items()}
        return {group: names for group, names in chosen.items() if names}

    def _matching(self, priority: int, pattern: str) -> dict[str, list[str]]:
        found = self._found.get((priority, pattern))
        if found is None:
            group, low, high, needs_match = region_of(pattern)
            found = {}
            for name in self._groups(priority) if group is None else [group]:
                rows = self._execute(self._statements["subjects"], (priority, name, low, high)).fetchall()
                names = [row[0] for row in rows if not needs_match or matches(pattern, row[0])]
                if names:
                    found[name] = names
            self._found[priority, pattern] = found
        return found

    def _groups(self, priority: int) -> list[str]:
        return [row[0] for row in self._execute(self._statements["groups"], (priority,))]


class SqlLease(SqlReport):
    """Verbs that hand out attempts."""

    _fair: FairTurns

    def lease(self, requests: Sequence[LeaseRequest]) -> list[list[Grant]]:
        if not requests:
            return []
        with self._turn:
            ready = ReadySubjects(self._execute, self._one)
            answers = [
                self._lease_named(request) if request.job_ids else self._lease_next(request, ready) for request in requests
            ]
            self._at("lease.written")
            return answers

    def _lease_next(self, request: LeaseRequest, ready: ReadySubjects) -> list[Grant]:
        grants: list[Grant] = []
        for priority in ready.bands():
            wanted = request.limit - len(grants)
            if wanted <= 0:
                break
            groups = ready.choose(priority, request)

            def take(group: str, limit: int, band: int = priority, names: dict[str, list[str]] = groups) -> list[Grant]:
                return self._grant(self._oldest(band, group, names[group], limit), group, request)

            grants += self._fair.fill(groups, wanted, take)
        return grants

    def _oldest(self, priority: int, group: str, subjects: list[str], limit: int) -> list[Any]:
        if len(subjects) == 1:
            return self._execute(self._one["oldest_of_subject"], (priority, group, subjects[0], limit)).fetchall()
        return self._execute(self._one["oldest_of_subjects"], (priority, group, text_list(subjects), limit)).fetchall()

    def _lease_named(self, request: LeaseRequest) -> list[Grant]:
        grants: list[Grant] = []
        for job_id in dict.fromkeys(request.job_ids):
            if len(grants) >= request.limit:
                break
            found = self._execute(self._one["named"], (job_id,)).fetchone()
            if found is None:
                continue
            *row, group, ready, expires_at = found
            is_over = expires_at is not None and expires_at <= self.clock.lease()
            if ready == READY or (is_over and self._take_from_lost(job_id, request.worker_id)):
                grants += self._grant([row], group, request)
        return grants

    def _take_from_lost(self, job_id: str, by: str) -> bool:
        """A lease that is over, asked for by job_id before the reaper came: the loss counts. False if that ended the job."""
        row = self._row(job_id)
        assert row is not None
        verdict = self._loss(row)
        if verdict.state.terminal:
            self._end_attempt(row, verdict, None)
            return False
        reason = f"{verdict.reason}; taken over by {by}"
        self._incident(row, "taken_over", worker_id=row.assigned_worker_id or "", reason=reason)
        self._execute(self._one["take_from_lost"], (row.id, row.version, verdict.losses, self.clock.lease()))
        return True

    def _grant(self, rows: list[Any], group: str, to: LeaseRequest | Assignment, epoch: int | None = None) -> list[Grant]:
        """Lease rows of one group that were just read as ready: (id, job_id, spec, submitter, attempt, state, result_sha256)."""
        if not rows:
            return []
        # 128 random bits nobody can guess, once per call; the row id behind them makes each lease_id its own.
        prefix = self._random(LEASE_ID_BYTES).hex() + "."
        changed = self._execute(
            self._one["grant"],
            (
                prefix,
                to.worker_id,
                to.incarnation,
                lease_over_at(self.clock, to),
                to.ttl_s,
                to.on_disconnect.value,
                to.reconnect_grace_s,
                self.clock.wall(),
                epoch,
                id_list([row[0] for row in rows]),
            ),
        ).rowcount
        if changed != len(rows):
            raise Unavailable(f"{len(rows)} jobs were ready and {changed} could be leased: another writer is at work here")
        self._count_grants(rows, group)
        self._clear_results([row[0] for row in rows if row[6] is not None])
        ttl_s = to.ttl_s
        return [Grant(row[1], row[2], row[3], f"{prefix}{row[0]}", row[4] + 1, ttl_s) for row in rows]

    def _count_grants(self, rows: list[Any], group: str) -> None:
        states = [row[5] for row in rows]
        pending, orphaned = states.count(_PENDING), states.count(_ORPHANED)
        self._count(group, State.PENDING, -pending)
        self._count(group, State.ORPHANED, -orphaned)
        self._count(group, State.ASSIGNED, pending + orphaned)

    def assign(self, assignments: Sequence[Assignment], *, epoch: int) -> list[Grant | None]:
        with self._turn:
            self._check_epoch(epoch)
            return [self._assign(assignment, epoch) for assignment in assignments]

    def _assign(self, assignment: Assignment, epoch: int) -> Grant | None:
        found = self._execute(self._one["named"], (assignment.job_id,)).fetchone()
        if found is None:
            return None
        *row, group, ready, _expires_at = found
        return self._grant([row], group, assignment, epoch)[0] if ready == READY else None

    def held(self, worker_id: str, incarnation: str) -> list[Grant]:
        now = self.clock.lease()
        grants = []
        for row in self._select("held", (worker_id, incarnation)):
            job_id, spec, submitter, lease_id, attempt, over_at, on_disconnect, grace_s = row
            expires_at = over_at - (grace_s if on_disconnect == OnDisconnect.KEEP.value else 0.0)
            if expires_at > now:
                # What is left, not the whole: the worker counts from when it hears this.
                left_s = max(0.0, expires_at - LEASE_MARGIN_S - now)
                grants.append(Grant(job_id, spec, submitter, lease_id, attempt, left_s))
        return grants


def lease_over_at(clock: Clock, to: LeaseRequest | Assignment) -> float:
    """When reaping may end a lease that is granted now."""
    grace_s = to.reconnect_grace_s if to.on_disconnect is OnDisconnect.KEEP else 0.0
    return clock.lease() + to.ttl_s + LEASE_MARGIN_S + grace_s
