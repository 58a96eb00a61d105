"""The verbs of the SQL store that grant work: lease by patterns or by job ids, assign, held; and the index of ready jobs.

`ReadyIndex` walks the database's index of ready rows by its distinct values, one seek each, and never looks at more than it
needs: priorities from the highest, groups of a priority GROUPS_AT_ONCE at a time, and inside a group only the subjects in the
ranges that the request's patterns can match, SUBJECTS_AT_ONCE at a time. The price: in a priority with more groups than that,
each request serves some of them and the next request the following ones; in a group with more ready subjects than that, subjects
take turns, and age decides among those of the current window. A queue is a subject, a kind and an exec: a worker that offers its
execs is served from these queues, by a seek each, however many others wait; one that runs every program from EXECS_AT_ONCE.

A call looks at IN_VAIN_MAX names in vain: subjects that no pattern matches, jobs of other kinds, subjects that are left to other
workers. Subjects that are paused as a whole range (`render.>`) are not even read: a scan has that range cut out. Then it looks
only for subjects that a pattern names, and notes which requests were cut short (`Transaction.cut`). So
neither the length of a queue, nor patterns that match nothing, nor a client that makes a new subject or group for every job costs
other groups more than a moment.

A scan is remembered for the one `lease` call, in which nothing can become ready.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from tasuki.core.job import OnDisconnect, State
from tasuki.core.lifecycle import LEASE_MARGIN_S, is_late
from tasuki.core.pauses import is_paused, unpaused
from tasuki.core.store_messages import Assignment, Grant, JobKind, LeaseRequest, ReadyPage, ReadyQueue
from tasuki.core.subject import SubjectTrie, group_of, literal_prefix, matches, only_group
from tasuki.errors import Unavailable
from tasuki.stores.common import TAKEN_BACK
from tasuki.stores.sql import report
from tasuki.stores.sql.database import (
    ABOVE_ALL_PRIORITIES,
    NOTHING_STORED,
    Queues,
    SqlSession,
    Transaction,
    must_change,
)
from tasuki.stores.sql.rows import ABOVE_ALL_TEXT, AHEAD, DUE, NEXT, READY, JobRow
from tasuki.stores.store import QUEUES_OF_SUBJECT_MAX, Clock

LEASE_ID_BYTES = 16
GROUPS_AT_ONCE = 256
SUBJECTS_AT_ONCE = 128
EXECS_AT_ONCE = 256
QUEUES_AT_ONCE = 1024
IN_VAIN_MAX = 512  # some 2 ms of a transaction
_REMEMBERED_MAX = 10_000
_BEFORE_ALL_QUEUES = ("", "", 0, "")
_PENDING = State.PENDING.value
_ORPHANED = State.ORPHANED.value

# ---------------------------------------------------------------------------------------------------- ready jobs

Region = tuple[str | None, str, str, bool]
"""Range of the index that holds a pattern's subjects: group (None: any), first subject, end, whether matching is still needed."""

Place = tuple[int] | tuple[int, str, tuple[str, ...]] | tuple[int, str, int]
"""Object of a scan: the groups of a priority; the subjects of a priority and group that patterns match; or its execs of a
kind."""

Read = Callable[[str, str, int], list[str]]
"""(low, high, n): return the first n names from low on, below high."""


@lru_cache(4096)
def region_of(pattern: str) -> Region:
    """Return the narrowest range that holds all subjects that the pattern matches."""
    prefix = literal_prefix(pattern)
    if prefix == pattern:
        return only_group(pattern), pattern, pattern + NEXT, False
    if not prefix:
        return None, "", ABOVE_ALL_TEXT, pattern != ">"
    return only_group(pattern), prefix + ".", prefix + "/", pattern != prefix + ".>"


class PatternRange(NamedTuple):
    """Patterns whose subjects lie in the same range of the index: they are looked for in one walk."""

    group: str | None
    low: str
    high: str
    patterns: tuple[str, ...]
    match: Callable[[str], object] | None
    """Says whether a name of the range matches one of them; None: all do."""

    @property
    def is_literal(self) -> bool:
        return self.low == self.patterns[0]


@lru_cache(64)
def ranges_of(patterns: tuple[str, ...]) -> tuple[PatternRange, ...]:
    """Return the ranges of these patterns, each once."""
    found: dict[tuple[str | None, str, str], dict[str, bool]] = {}
    for pattern in patterns:
        group, low, high, needs_match = region_of(pattern)
        found.setdefault((group, low, high), {})[pattern] = needs_match
    return tuple(PatternRange(*place, tuple(some), _match_of(some)) for place, some in found.items())


def _match_of(patterns: dict[str, bool]) -> Callable[[str], object] | None:
    """Return what tells whether a name matches one of the patterns, each with whether it has to be asked; None: all names do."""
    if not all(patterns.values()):
        return None
    if len(patterns) == 1:
        return partial(matches, *patterns)
    trie: SubjectTrie[None] = SubjectTrie()
    for pattern in patterns:
        trie.add(pattern, None)
    return trie.match


class Scan:
    """A walk over the names from `low` on, below `high`, `at_once` at a time, keeping those that `match` takes (None: all).

    The walk begins at `start`, wraps around to it, and jumps over the ranges of `paused` patterns.
    """

    def __init__(
        self,
        read: Read,
        at_once: int,
        low: str,
        high: str,
        start: str,
        match: Callable[[str], object] | None = None,
        paused: tuple[str, ...] = (),
    ) -> None:
        self._read = read
        self._at_once = at_once
        self._match = match
        begin = max(low, start)
        self._ranges = [(begin, high)] if begin == low else [(begin, high), (low, begin)]
        if paused:
            self._ranges = unpaused(self._ranges, paused)
        self.names: list[str] = []
        self.looked = 0
        """Number of names in the window that was read last, those that do not match too."""
        self.last = ""
        """Start of the next scan of this place, unless this one is complete."""
        self.advance()

    @property
    def is_over(self) -> bool:
        return not self._ranges

    def advance(self) -> None:
        """Read the next window into `names`."""
        found: list[str] = []
        while self._ranges and len(found) < self._at_once:
            low, high = self._ranges[0]
            wanted = self._at_once - len(found)
            names = self._read(low, high, wanted)
            found += names
            if len(names) < wanted:
                del self._ranges[0]
            else:
                self.last = names[-1] + NEXT
                self._ranges[0] = (self.last, high)
        match = self._match
        self.names = found if match is None else [name for name in found if match(name)]
        self.looked = len(found)


class ReadyIndex:
    """The ready jobs, as far as one `lease` call has asked. `starts` says where incomplete scans of earlier calls stopped."""

    def __init__(self, session: SqlSession, starts: dict[Place, str]) -> None:
        self._rows = session.rows
        self._listed = session.listed
        self._starts = starts
        self._paused: tuple[str, ...] | None = None
        self._priorities: list[int] = []
        self._has_lower = True
        self._complete: dict[Place, Scan] = {}
        self._in_vain = 0
        self.is_cut = False
        """A walk of the current request ended at IN_VAIN_MAX."""

    @property
    def paused(self) -> tuple[str, ...]:
        """Patterns that are paused, read when the call first has something to grant."""
        if self._paused is None:
            self._paused = tuple(pattern for (pattern,) in self._rows("paused_patterns"))
        return self._paused

    def looked_in_vain(self, count: int) -> None:
        """Count names from which nothing was granted."""
        self._in_vain += count

    def _may_walk(self) -> bool:
        self.is_cut = self.is_cut or self._in_vain >= IN_VAIN_MAX
        return self._in_vain < IN_VAIN_MAX

    def priorities(self) -> Iterator[int]:
        """Yield the priorities with ready jobs, the highest first."""
        position = 0
        while position < len(self._priorities) or self._find_lower():
            yield self._priorities[position]
            position += 1

    def _find_lower(self) -> bool:
        if self._has_lower:
            below = self._priorities[-1] if self._priorities else ABOVE_ALL_PRIORITIES
            found = self._rows("band", (below,))
            if found:
                self._priorities.append(found[0][0])
                return True
            self._has_lower = False
        return False

    def groups(self, priority: int, patterns: tuple[str, ...], chosen: set[str]) -> Iterator[Collection[str]]:
        """Yield the groups that may have jobs for these patterns, or are chosen, some at a time."""
        regions = {region_of(pattern)[0] for pattern in patterns}
        named = {group for group in regions if group is not None} | chosen
        if None in regions and self._may_walk():
            place = (priority,)
            scan = self._scan(place, GROUPS_AT_ONCE, "", ABOVE_ALL_TEXT)
            yield scan.names
            named.difference_update(scan.names)
            while self._go_on(scan, place):
                yield scan.names
                named.difference_update(scan.names)
        yield named

    def windows(self, priority: int, group: str, request: LeaseRequest) -> Iterator[list[str]]:
        """Yield the subjects of the group that the request may take from, some at a time."""
        scans: dict[Place, Scan] = {}
        for one in ranges_of(request.patterns):
            if one.group in (None, group) and (one.is_literal or self._may_walk()):
                place = (priority, group, one.patterns)
                scans[place] = self._scan(place, SUBJECTS_AT_ONCE, one.low, one.high, one.match)
        while scans:
            names = list(dict.fromkeys(name for scan in scans.values() for name in scan.names))
            names = [name for name in names if not request.leaves(name) and not (self.paused and is_paused(self.paused, name))]
            if names:
                yield names
            else:
                self.looked_in_vain(sum(scan.looked for scan in scans.values()))
            scans = {place: scan for place, scan in scans.items() if self._go_on(scan, place)}

    def queues(self, priority: int, group: str, subjects: list[str], request: LeaseRequest) -> list[tuple[str, int, str]]:
        """Return the queues of these subjects that the request may take from. The named ones may be empty."""
        named, whole = request.offer.queues()
        found = [(subject, kind, exec_) for subject in subjects for kind, exec_ in named]
        for kind in whole:
            rows = self._execs((priority, group, kind), subjects)
            found += [(subject, kind, exec_) for subject, exec_ in rows if request.may_take(subject, JobKind(kind), exec_)]
        return found

    def _execs(self, place: tuple[int, str, int], subjects: list[str]) -> list[tuple[str, str]]:
        """Return subject and exec of the ready jobs of a kind, EXECS_AT_ONCE at a time, from where the last call stopped."""
        start = self._starts.pop(place, "")
        rows = self._rows("execs", (*place, self._listed(subjects), start, EXECS_AT_ONCE))
        if len(rows) == EXECS_AT_ONCE:
            self._start_at(place, rows[-1][1])
        elif start:
            from_begin = self._rows("execs", (*place, self._listed(subjects), "", EXECS_AT_ONCE - len(rows)))
            rows += [row for row in from_begin if row[1] < start]
        return rows

    def _go_on(self, scan: Scan, place: Place) -> bool:
        """Read the next window of a scan, if there is one and this call may still look."""
        if scan.is_over or not self._may_walk():
            return False
        scan.advance()
        self._remember(scan, place)
        return True

    def _scan(self, place: Place, at_once: int, low: str, high: str, match: Callable[[str], object] | None = None) -> Scan:
        scan = self._complete.get(place)
        if scan is None:
            paused = self.paused if len(place) > 1 else ()
            scan = Scan(self._reader(place), at_once, low, high, self._starts.pop(place, ""), match, paused)
            if scan.is_over:
                self._complete[place] = scan
            else:
                self._remember(scan, place)
        return scan

    def _reader(self, place: Place) -> Read:
        name = "groups" if len(place) == 1 else "subjects"
        fixed = place[:2]
        return lambda low, high, n: [row[0] for row in self._rows(name, (*fixed, low, high, n))]

    def _remember(self, scan: Scan, place: Place) -> None:
        """Let the next scan of the place begin where this one is."""
        self._start_at(place, scan.last)

    def _start_at(self, place: Place, name: str) -> None:
        if len(self._starts) >= _REMEMBERED_MAX:
            self._starts.clear()
        self._starts[place] = name


# ---------------------------------------------------------------------------------------------------- verbs


def lease(tx: Transaction, requests: Sequence[LeaseRequest]) -> list[list[Grant]]:
    ready = ReadyIndex(tx.session, tx.ready_starts)
    answers = []
    for position, request in enumerate(requests):
        ready.is_cut = False
        answers.append(_lease_named(tx, request, ready) if request.job_ids else _lease_next(tx, request, ready))
        if ready.is_cut and len(answers[-1]) < request.limit:
            tx.cut.append(position)
    tx.at("lease.written")
    return answers


def _lease_next(tx: Transaction, request: LeaseRequest, ready: ReadyIndex) -> list[Grant]:
    grants: list[Grant] = []
    if request.limit <= 0:
        return grants
    for priority in ready.priorities():

        def take(group: str, limit: int, priority: int = priority) -> list[Grant]:
            return _take(tx, ready, priority, group, limit, request)

        chosen = {job.group for job in request.chosen if job.priority == priority}
        for groups in ready.groups(priority, request.patterns, chosen):
            grants += tx.fairness.fill(groups, request.limit - len(grants), take)
            if len(grants) >= request.limit:
                return grants
    return grants


def _take(tx: Transaction, ready: ReadyIndex, priority: int, group: str, limit: int, request: LeaseRequest) -> list[Grant]:
    taken = _take_chosen(tx, ready, priority, group, limit, request)
    if len(taken) == limit:
        return taken
    for subjects in ready.windows(priority, group, request):
        members = ready.queues(priority, group, subjects, request)
        before = len(taken)
        for start in range(0, len(members), QUEUES_AT_ONCE):
            prefix = _lease_id_prefix(tx)
            queues = Queues(priority, group, members[start : start + QUEUES_AT_ONCE], limit - len(taken))
            rows = tx.session.claim(queues, _terms(tx, prefix, request, epoch=None))
            taken += _granted(tx, rows, group, prefix, request)
            if len(taken) == limit:
                return taken
        if len(taken) == before:
            ready.looked_in_vain(max(len(subjects), len(members) // len(JobKind)))
    if not taken:
        ready.looked_in_vain(1)
    return taken


def _take_chosen(tx: Transaction, ready: ReadyIndex, priority: int, group: str, limit: int, request: LeaseRequest) -> list[Grant]:
    taken: list[Grant] = []
    for job in request.chosen:
        if (job.priority, job.group) == (priority, group) and len(taken) < limit:
            found = tx.session.rows("named", (job.job_id,))
            *row, _, is_ready, _, not_after, subject = found[0] if found else (None, 0, None, None, "")
            if (
                is_ready == READY
                and not is_late(not_after, tx.clock.wall())
                and not (ready.paused and is_paused(ready.paused, subject))
            ):
                taken.append(_grant(tx, row, group, request))
    return taken


def _lease_named(tx: Transaction, request: LeaseRequest, index: ReadyIndex) -> list[Grant]:
    grants: list[Grant] = []
    for job_id in dict.fromkeys(request.job_ids):
        if len(grants) >= request.limit:
            break
        found = tx.session.rows("named", (job_id,))
        if not found:
            continue
        *row, group, ready, expires_at, not_after, subject = found[0]
        if is_late(not_after, tx.clock.wall()) or (index.paused and is_paused(index.paused, subject)):
            continue
        is_over = expires_at is not None and expires_at <= tx.clock.lease() and ready != AHEAD
        if ready == READY or (is_over and _take_from_lost(tx, job_id, request.worker_id)):
            grants.append(_grant(tx, row, group, request))
    return grants


def _take_from_lost(tx: Transaction, job_id: str, by: str) -> bool:
    """Take over an expired lease that the reaper has not ended yet: it counts as a loss. False if that ended the job."""
    row = tx.rows((job_id,))[job_id]
    disposition = report.disposition_of_loss(row)
    if disposition.state.terminal:
        report.end_attempt(tx, row, disposition, None)
        tx.write_state_changes()
        return False
    reason = f"{disposition.reason}; taken over by {by}"
    tx.incident(row, "taken_over", worker_id=row.assigned_worker_id or "", reason=reason)
    must_change(1, tx.session.change("take_from_lost", (row.id, row.version, disposition.losses, tx.clock.lease())))
    return True


def _grant(tx: Transaction, row: list[Any], group: str, to: LeaseRequest | Assignment, epoch: int | None = None) -> Grant:
    """Lease a row that was just read as ready, and locked: (id, job_id, spec, submitter, attempt, state, result_sha256)."""
    prefix = _lease_id_prefix(tx)
    changed = tx.session.change("grant", (*_terms(tx, prefix, to, epoch), tx.session.listed([row[0]])))
    if changed != 1:
        raise Unavailable(f"job {row[1]!r} was leased by another writer meanwhile; {NOTHING_STORED}")
    return _granted(tx, [row], group, prefix, to)[0]


def _lease_id_prefix(tx: Transaction) -> str:
    """Return 128 random bits that nobody can guess, once per call; the row id behind them makes each lease_id its own."""
    return tx.random(LEASE_ID_BYTES).hex() + "."


def _terms(tx: Transaction, prefix: str, to: LeaseRequest | Assignment, epoch: int | None) -> tuple[Any, ...]:
    """Return the parameters of the statement `grant`."""
    return (
        prefix,
        to.worker_id,
        to.incarnation,
        lease_over_at(tx.clock, to),
        to.ttl_s,
        to.on_disconnect.value,
        to.reconnect_grace_s,
        tx.clock.wall(),
        epoch,
        to.owner,
    )


def _granted(tx: Transaction, rows: list[Any], group: str, prefix: str, to: LeaseRequest | Assignment) -> list[Grant]:
    """Count the granted rows of one group, drop their old results, and return the grants."""
    if not rows:
        return []
    states = [row[5] for row in rows]
    pending, orphaned = states.count(_PENDING), states.count(_ORPHANED)
    tx.count_move(group, State.PENDING, State.ASSIGNED, pending)
    tx.count_move(group, State.ORPHANED, State.ASSIGNED, orphaned)
    tx.clear_results([row[0] for row in rows if row[6] is not None])
    ttl_s = to.ttl_s
    return [Grant(row[1], row[2], row[3], f"{prefix}{row[0]}", row[4] + 1, ttl_s) for row in rows]


def assign(tx: Transaction, assignments: Sequence[Assignment], *, epoch: int) -> list[Grant | None]:
    """Assign jobs in a few statements, however many. Rows that others have locked at this moment are left alone: the leader waits
    for nobody."""
    tx.check_epoch(epoch)
    wanted = tx.session.listed(sorted({assignment.job_id for assignment in assignments}))
    free = {job_id for (job_id,) in tx.session.rows("lock_free_runs", (wanted,))}
    rows = {job_id: row for job_id, row in tx.rows_unlocked(sorted(free)).items() if job_id in free}
    paused = ReadyIndex(tx.session, {}).paused
    prefix = _lease_id_prefix(tx)
    placed: list[tuple[Any, ...]] = []
    answers: list[Grant | None] = []
    for assignment in assignments:
        row = rows.pop(assignment.job_id, None)  # named twice in one batch: the first counts
        grant = None
        if row is None or is_late(row.not_after, tx.clock.wall()):
            pass
        elif not assignment.worker_id:
            if row.is_unfetched and row.job_state is State.ASSIGNED:
                placed.append(_taken_back(tx, row))
        elif paused and is_paused(paused, row.queue.subject):
            pass
        elif row.ready == AHEAD:
            grant = Grant(row.idempotency_key, row.spec, row.submitter, f"{prefix}{row.id}", row.attempt + 1, assignment.ttl_s)
            placed.append(_assigned(tx, row, assignment, grant))
        elif row.ready == READY:
            found = [row.id, row.idempotency_key, row.spec, row.submitter, row.attempt, row.state, row.result_sha256]
            grant = _grant(tx, found, row.group, assignment, epoch)
        answers.append(grant)
    must_change(len(placed), tx.session.changed("set_ahead", (epoch,), placed))
    return answers


def _assigned(tx: Transaction, row: JobRow, to: Assignment, grant: Grant) -> tuple[Any, ...]:
    """Return the values of `set_ahead` for a run that is assigned: it stays ahead of its time."""
    tx.count_move(row.group, row.job_state, State.ASSIGNED)
    terms = (lease_over_at(tx.clock, to), to.ttl_s, to.on_disconnect.value, to.reconnect_grace_s, tx.clock.wall(), to.owner)
    holder = (grant.attempt, grant.lease_id, to.worker_id, to.incarnation)
    return (row.id, row.version, State.ASSIGNED.value, AHEAD, *holder, *terms)


def _taken_back(tx: Transaction, row: JobRow) -> tuple[Any, ...]:
    tx.incident(row, "released", worker_id=row.assigned_worker_id or "", reason=TAKEN_BACK)
    return unassigned(tx, row, READY if row.ready == DUE else AHEAD)


def unassigned(tx: Transaction, row: JobRow, ready: int) -> tuple[Any, ...]:
    """Return the values of `set_ahead` for a run that belongs to nobody, as it was before it was assigned."""
    tx.count_move(row.group, row.job_state, State.PENDING)
    if ready == READY:
        tx.comes_back(row.queue, row.id)
    terms = (None, None, row.on_disconnect, row.reconnect_grace_s, row.assigned_at, row.lease_owner)
    holder = (row.attempt, "", row.assigned_worker_id, row.incarnation)
    return (row.id, row.version, State.PENDING.value, ready, *holder, *terms)


def fetch(tx: Transaction, holders: Sequence[tuple[str, str, str]]) -> None:
    """Begin the leases of runs that were assigned ahead and may start."""
    found = tx.session.holders(list(dict.fromkeys(holders)))
    tx.session.change("fetch", (tx.clock.lease(), LEASE_MARGIN_S, tx.clock.wall(), *found))


def held_leases(session: SqlSession, holders: Sequence[tuple[str, str, str]], now: float) -> tuple[list[list[Grant]], bool]:
    """Return what the holders have not started, and whether there is something to fetch."""
    is_due = False
    grants: dict[tuple[str, str, str], list[Grant]] = {holder: [] for holder in holders}
    for row in session.rows("held", session.holders(list(grants))):
        *holder, job_id, spec, submitter, lease_id, attempt, over_at, on_disconnect, grace_s, ready = row
        if ready:
            is_due = is_due or ready == DUE
            continue
        expires_at = over_at - (grace_s if on_disconnect == OnDisconnect.KEEP.value else 0.0)
        if expires_at > now:
            # The rest of the lease, not the whole: this does not renew. The worker counts from its last answered heartbeat,
            # so its own deadline lies before the store's.
            left_s = max(0.0, expires_at - LEASE_MARGIN_S - now)
            grants[tuple(holder)].append(Grant(job_id, spec, submitter, lease_id, attempt, left_s))
    return [list(grants[holder]) for holder in holders], is_due


def ready_queues(session: SqlSession, place: Any, limit: int) -> ReadyPage:
    """Walk the index of ready rows by its distinct queues, one seek each, from the highest priority down."""
    bands = [(place[0],)] if place else session.rows("band", (ABOVE_ALL_PRIORITIES,))
    behind = place[1:] if place else _BEFORE_ALL_QUEUES
    paused = [row[0] for row in session.rows("pauses")] if bands else []  # a reader may not lock, as `paused_patterns` does
    queues: list[ReadyQueue] = []
    looked = 0
    while bands:
        priority = bands[0][0]
        rows = session.rows("queues", (priority, *behind, limit - looked))
        looked += len(rows)
        found = (ReadyQueue(subject, JobKind(kind), exec_) for _, subject, kind, exec_ in rows)
        queues += [queue for queue in found if not (paused and is_paused(paused, queue.subject))]
        if looked == limit:
            return ReadyPage(queues, (priority, *rows[-1]))
        bands, behind = session.rows("band", (priority,)), _BEFORE_ALL_QUEUES
    return ReadyPage(queues)


def ready_jobs(session: SqlSession, subject: str, limit: int) -> list[str]:
    """Return the oldest jobs of each queue of a subject, by a few seeks for each priority."""
    if is_paused([row[0] for row in session.rows("pauses")], subject):
        return []
    group, found = group_of(subject), []
    bands = session.rows("band", (ABOVE_ALL_PRIORITIES,))
    while bands:
        priority = bands[0][0]
        rows = session.rows("queues", (priority, group, subject, -1, "", QUEUES_OF_SUBJECT_MAX))
        for queue in rows:
            if tuple(queue[:2]) == (group, subject):
                found += [job_id for (job_id,) in session.rows("head_of_queue", (priority, *queue, limit))]
        bands = session.rows("band", (priority,))
    return found[: QUEUES_OF_SUBJECT_MAX * limit]


def lease_over_at(clock: Clock, to: LeaseRequest | Assignment) -> float:
    """Return when reaping may end a lease that is granted now."""
    grace_s = to.reconnect_grace_s if to.on_disconnect is OnDisconnect.KEEP else 0.0
    return clock.lease() + to.ttl_s + LEASE_MARGIN_S + grace_s
