"""The data of the memory store: jobs as immutable records with their indexes, blobs, tokens; and the verbs on what is no job.

Every change of a job goes through `_put`, which keeps the indexes true. That makes it simple to roll a turn back: put the old
records again, latest first. Touches nothing outside its own memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any

import msgspec
from msgspec.structs import replace

from tasuki.core import subject as subjects
from tasuki.core.job import LEASED, READY, BlobRef, Job, JobIncident, OnDisconnect, Outcome, State
from tasuki.core.lifecycle import LEASE_MARGIN_S, TAKEOVER_TIE_S
from tasuki.core.pauses import PAUSES_MAX, PauseAnswer, PausedPattern, PauseOrder, is_paused
from tasuki.core.statistics import COUNTED, GroupCounts, Rollup
from tasuki.core.store_messages import (
    AuditRow,
    BlobClaim,
    BlobPlace,
    CachedFile,
    CacheOrder,
    CacheStored,
    CacheSummary,
    Condemned,
    CondemnOrder,
    Filter,
    HeldLease,
    MissingBlobs,
    Page,
    ReadyPage,
    ReadyQueue,
    Submission,
    TokenRow,
    TurnNotes,
    kind_of,
    storable_text,
)
from tasuki.errors import CacheConflict
from tasuki.stores.common import is_wanted, judge_cache, judge_names, lowest_generation, stale_epoch, unknown_cursor
from tasuki.stores.store import QUEUES_OF_SUBJECT_MAX, Clock

FIND_SCAN_MAX = 10_000  # jobs that one find looks at; the caller continues with the cursor

Entry = tuple[float, int, str]
"""Entry of a sorted index: sort key, seq, job_id."""

_encode = msgspec.msgpack.Encoder().encode


class MemoryJob(msgspec.Struct, frozen=True):
    """One job with the store's own fields."""

    seq: int
    """Order of submission: the job's age, whatever happens to it later."""
    job: Job
    spec: bytes
    delayed: bool = False
    """True while the job waits for `promote`."""
    waiting: bool = False
    """True while the job waits until the run that it replaces has ended."""
    ahead: bool = False
    """True for a run that was stored ahead of its time, until `fire` has judged it; assigned or not."""
    due: bool = False
    """True for an assigned run that may start, until its worker fetches it."""
    ttl_s: float = 0.0
    """Duration of the lease; `take_over` renews by it."""
    last_report: tuple[str | int | None, ...] | None = None
    """Identity of the report that ended the last attempt; kept until the next grant or requeue."""
    incidents: tuple[JobIncident, ...] = ()

    @property
    def ready(self) -> bool:
        return self.job.state in READY and not self.delayed and not self.waiting and not self.ahead

    @property
    def over_at(self) -> float:
        """Return when, on the lease clock, the lease may be taken from its worker."""
        lease = self.job.lease
        assert lease is not None
        return lease.expires_at + (lease.reconnect_grace_s if lease.on_disconnect is OnDisconnect.KEEP else 0.0)

    def was_renewed_since(self, at: float) -> bool:
        """Return whether the worker got or renewed the lease after this time of the lease clock."""
        lease = self.job.lease
        assert lease is not None
        return lease.expires_at > at + self.ttl_s + LEASE_MARGIN_S + TAKEOVER_TIE_S

    def blobs(self) -> set[str]:
        """Return the inputs and the result that are blobs."""
        found = {file.sha256 for file in self.job.spec.files if file.sha256 is not None}
        if self.job.outcome is not None and self.job.outcome.result_ref is not None:
            found.add(self.job.outcome.result_ref.sha256)
        return found


class BlobRow(msgspec.Struct, frozen=True):
    """One generation of a blob."""

    seq: int
    place: BlobPlace
    touched_at: float
    condemned: bool = False


def queue_of(job: Job) -> ReadyQueue:
    return ReadyQueue(job.spec.subject, kind_of(job.spec.exec, job.submitter), job.spec.exec)


class MemoryRecords:
    """Jobs, blobs and tokens with their indexes; `MemoryStore` adds the verbs that change jobs."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._records: dict[str, MemoryJob] = {}
        self._tokens: dict[str, TokenRow] = {}  # by token_id, oldest first
        self._audit: list[AuditRow] = []
        self._all: list[Entry] = []  # by seq
        self._ready: dict[int, dict[ReadyQueue, list[Entry]]] = {}  # priority -> queue -> by seq; never an empty list
        self._delayed: list[Entry] = []  # by not_before
        self._ahead: list[Entry] = []  # stored ahead of their times, by these
        self._late: list[Entry] = []  # ready or delayed, by not_after
        self._leased: list[Entry] = []  # by when the lease is over
        self._ended: list[Entry] = []  # terminal, by finished_at
        self._counts: dict[str, Counter[str]] = {}  # group -> GroupCounts field -> jobs
        self._references: dict[str, dict[str, None]] = {}  # sha256 -> job_ids
        self._blobs: dict[str, dict[int, BlobRow]] = {}  # sha256 -> generation
        self._last_blob_seq = 0
        self._caches: dict[str, dict[str, CachedFile]] = {}  # cache_id -> name, in the order in which they came
        self._rollups: dict[tuple[int, str], Rollup] = {}  # (minute, server_id)
        self._paused: dict[str, PausedPattern] = {}  # by pattern
        self._last_seq = 0
        self._epoch = (0, "")
        self._undo: list[Callable[[], None]] = []
        self._depth = 0
        self._came_back: dict[ReadyQueue, None] = {}
        self._cut: list[int] = []

    # -- transactions ---------------------------------------------------------------------------------------------
    @contextmanager
    def turn(self, *, lasting: bool = True) -> Iterator[None]:
        """Keep all of the block's changes, or none. A verb inside is a turn of its own that the outer one rolls back too."""
        mark = len(self._undo)
        if self._depth == 0:
            self._came_back, self._cut = {}, []
        self._depth += 1
        try:
            yield
        except BaseException:
            while len(self._undo) > mark:
                self._undo.pop()()
            raise
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._undo.clear()

    def notes(self) -> TurnNotes:
        return TurnNotes(tuple(self._came_back), tuple(self._cut))

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    # -- records and their indexes --------------------------------------------------------------------------------
    def _put(self, job_id: str, new: MemoryJob | None) -> None:
        """Set or delete the one record; nothing else changes `_records`."""
        old = self._records.get(job_id)
        self._undo.append(lambda: self._place(job_id, old))
        self._place(job_id, new)

    def _place(self, job_id: str, new: MemoryJob | None) -> None:
        old = self._records.pop(job_id, None)
        if old is not None:
            self._unindex(old)
        if new is not None:
            self._records[job_id] = new
            self._index(new)

    def _indexes(self, record: MemoryJob) -> Iterator[tuple[list[Entry], float]]:
        """Yield the sorted lists that this record is in, and its sort key there."""
        job = record.job
        yield self._all, 0.0
        if record.ahead:
            yield self._ahead, job.scheduled_for or 0.0
            return
        if record.waiting:
            return
        if job.state in READY and job.not_after is not None:
            yield self._late, job.not_after
        if record.delayed:
            assert job.not_before is not None
            yield self._delayed, job.not_before
        elif job.state in READY:
            yield self._ready.setdefault(job.priority, {}).setdefault(queue_of(job), []), 0.0
        elif job.state in LEASED:
            yield self._leased, record.over_at
        else:
            assert job.finished_at is not None
            yield self._ended, job.finished_at

    def _index(self, record: MemoryJob) -> None:
        job = record.job
        for entries, key in self._indexes(record):
            insort(entries, (key, record.seq, job.job_id))
        self._counts.setdefault(subjects.group_of(job.spec.subject), Counter())[COUNTED[job.state]] += 1
        for sha256 in record.blobs():
            self._references.setdefault(sha256, {})[job.job_id] = None

    def _unindex(self, record: MemoryJob) -> None:
        job = record.job
        for entries, key in self._indexes(record):
            del entries[bisect_left(entries, (key, record.seq, job.job_id))]
        if record.ready:
            band = self._ready[job.priority]
            if not band[queue_of(job)]:
                del band[queue_of(job)]
            if not band:
                del self._ready[job.priority]
        self._counts[subjects.group_of(job.spec.subject)][COUNTED[job.state]] -= 1
        for sha256 in record.blobs():
            del self._references[sha256][job.job_id]
            if not self._references[sha256]:
                del self._references[sha256]

    def _change(self, record: MemoryJob, job: Job, *incidents: JobIncident, **marks: bool) -> MemoryJob:
        """Put the record with its job changed, its version counted up and its incidents appended. `marks` are those of the record
        that are true from now on: delayed, waiting, ahead, due."""
        job = replace(job, version=record.job.version + 1)
        none = dict.fromkeys(("delayed", "waiting", "ahead", "due"), False)
        new = replace(record, job=job, incidents=record.incidents + incidents, **(none | marks))
        self._put(job.job_id, new)
        if new.ready and not record.ready:
            self.note_ready(job)
        return new

    def note_ready(self, job: Job) -> None:
        """Note that a job is ready without having been submitted in this turn."""
        self._came_back[queue_of(job)] = None

    def _incident(self, kind: str, job: Job, *, worker_id: str = "", actor: str = "", reason: str = "") -> JobIncident:
        return JobIncident(self.clock.wall(), kind, job.attempt, worker_id, actor, storable_text(reason))

    def _new_record(self, submission: Submission, *, waiting: bool = False, **facts: Any) -> MemoryJob:
        """Return the record of a new job; `facts` are further fields of the job."""
        spec = submission.spec
        self._last_seq += 1
        job = Job(
            spec=spec,
            state=State.PENDING,
            submitter=submission.submitter,
            body_hash=submission.body_hash,
            created_at=self.clock.wall(),
            priority=spec.priority,
            not_before=spec.not_before,
            not_after=spec.not_after,
            **facts,
        )
        return MemoryJob(self._last_seq, job, _encode(spec), delayed=self._is_later(spec.not_before), waiting=waiting)

    def _is_later(self, not_before: float | None) -> bool:
        return not_before is not None and not_before > self.clock.wall()

    def _claimed(self, claim: HeldLease) -> MemoryJob | None:
        """Return the record, if the claim shows its current lease."""
        record = self._records.get(claim.job_id)
        lease = record.job.lease if record else None
        if lease is None:
            return None
        shown = (claim.worker_id, claim.incarnation, claim.lease_id, claim.attempt, claim.owner)
        return record if shown == (lease.worker_id, lease.incarnation, lease.lease_id, lease.attempt, lease.owner) else None

    # -- readers --------------------------------------------------------------------------------------------------
    def get(self, job_ids: Sequence[str]) -> list[Job | None]:
        return [record.job if (record := self._records.get(job_id)) else None for job_id in job_ids]

    def find(self, filter: Filter, *, limit: int = 50, cursor: str | None = None) -> Page:
        end = len(self._all)
        if cursor is not None:
            if not cursor.isdecimal():
                raise unknown_cursor(cursor)
            end = bisect_left(self._all, (0.0, int(cursor), ""))
        jobs: list[Job] = []
        stop = max(0, end - FIND_SCAN_MAX)
        position = end
        while position > stop and len(jobs) < limit:
            position -= 1
            job = self._records[self._all[position][2]].job
            if _passes(filter, job):
                jobs.append(job)
        return Page(jobs, str(self._all[position][1]) if position > 0 else None)

    def incidents(self, job_id: str) -> list[JobIncident]:
        record = self._records.get(job_id)
        return list(record.incidents) if record else []

    def counts(self) -> dict[str, GroupCounts]:
        return {group: GroupCounts(**counter) for group, counter in self._counts.items() if counter.total()}

    def ready_ahead(self, job_id: str, *, limit: int = 10_000) -> int | None:
        record = self._records.get(job_id)
        if record is None or not record.ready:
            return None
        queue = self._ready[record.job.priority][queue_of(record.job)]
        return min(limit, bisect_left(queue, (0.0, record.seq, job_id)))

    def next_due(self) -> tuple[float | None, float | None]:
        return (
            self._leased[0][0] if self._leased else None,
            self._delayed[0][0] if self._delayed else None,
        )

    def top_band(self) -> int | None:
        return max(self._ready, default=None)

    def ready_queues(self, place: Any = None, *, limit: int = 256) -> ReadyPage:
        bands = self._ready.items()
        found = sorted((-priority, subjects.group_of(queue.subject), queue) for priority, band in bands for queue in band)
        begin = 0 if place is None else bisect_right(found, place)
        some = found[begin : begin + limit]
        queues = [queue for *_, queue in some if not is_paused(self._paused, queue.subject)]
        return ReadyPage(queues, some[-1] if len(some) == limit else None)

    def ready_jobs(self, subject: str, *, limit: int = 256) -> list[str]:
        if is_paused(self._paused, subject):
            return []
        bands = [band for _, band in sorted(self._ready.items(), reverse=True)]
        queues = [entries[:limit] for band in bands for queue, entries in band.items() if queue.subject == subject]
        return [job_id for _, _, job_id in chain.from_iterable(queues[:QUEUES_OF_SUBJECT_MAX])]

    def ended_among(self, job_ids: Sequence[str]) -> list[str]:
        records = ((job_id, self._records.get(job_id)) for job_id in dict.fromkeys(job_ids))
        return [job_id for job_id, record in records if record is None or record.job.state.terminal]

    def blob_owners(self, sha256: str, *, limit: int = 16) -> list[str]:
        return list(islice(self._references.get(sha256, ()), limit))

    # -- tokens ---------------------------------------------------------------------------------------------------
    def add_token(self, token: TokenRow) -> bool:
        with self.turn():
            token = replace(token, label=storable_text(token.label))
            known = [row for row in self._tokens.values() if token.token_id == row.token_id or token.sha256 == row.sha256]
            if known:
                return known == [token]
            self._undo.append(lambda: self._tokens.__delitem__(token.token_id))
            self._tokens[token.token_id] = token
            self.note(token.created_by, "token.create", token.token_id, f"{token.kind} {token.label}".rstrip())
            return True

    def token(self, sha256: str) -> TokenRow | None:
        return next((token for token in self._tokens.values() if token.sha256 == sha256), None)

    def tokens(self) -> list[TokenRow]:
        return list(self._tokens.values())

    def revoke_token(self, token_id: str, *, actor: str) -> bool:
        with self.turn():
            token = self._tokens.get(token_id)
            if token is None or token.revoked_at is not None:
                return False
            self._undo.append(lambda: self._tokens.__setitem__(token_id, token))
            self._tokens[token_id] = replace(token, revoked_at=self.clock.wall(), revoked_by=actor)
            self.note(actor, "token.revoke", token_id)
            return True

    def revoked_among(self, token_ids: Sequence[str]) -> list[str]:
        tokens = ((token_id, self._tokens.get(token_id)) for token_id in dict.fromkeys(token_ids))
        return [token_id for token_id, token in tokens if token is None or token.revoked_at is not None]

    def audit(self, *, limit: int = 100, before: int | None = None) -> list[AuditRow]:
        known = self._audit if before is None else self._audit[: max(0, before - 1)]
        return list(islice(reversed(known), limit))

    def note(self, actor: str, action: str, target: str, detail: str = "") -> None:
        with self.turn():
            self._undo.append(lambda: self._audit.__delitem__(-1))
            named = {"actor": actor, "action": action, "target": target, "detail": detail}
            self._audit.append(AuditRow(number=len(self._audit) + 1, at=self.clock.wall(), **named))

    # -- blobs -----------------------------------------------------------------------------------------------------
    def _set_blob(self, sha256: str, generation: int, new: BlobRow | None) -> None:
        old = self._blob(sha256, generation)
        self._undo.append(lambda: self._put_blob(sha256, generation, old))
        self._put_blob(sha256, generation, new)

    def _put_blob(self, sha256: str, generation: int, row: BlobRow | None) -> None:
        rows = self._blobs.setdefault(sha256, {})
        if row is None:
            rows.pop(generation, None)
        else:
            rows[generation] = row
        if not rows:
            del self._blobs[sha256]

    def _blob(self, sha256: str, generation: int) -> BlobRow | None:
        return self._blobs.get(sha256, {}).get(generation)

    def _live_blob(self, sha256: str) -> BlobRow | None:
        """Return the one row that is not condemned."""
        return next((row for row in self._blobs.get(sha256, {}).values() if not row.condemned), None)

    def _missing_among(self, refs: Iterable[BlobRef]) -> tuple[str, ...]:
        """Return the blobs that no job may refer to now: not stored, or of another size."""
        missing = set()
        for ref in refs:
            row = self._live_blob(ref.sha256)
            if row is None or not row.place.stored or row.place.size_bytes != ref.size_bytes:
                missing.add(ref.sha256)
        return tuple(sorted(missing))

    def blob_places(self, sha256s: Sequence[str]) -> list[BlobPlace | None]:
        rows = [self._live_blob(sha256) for sha256 in sha256s]
        return [row.place if row is not None and row.place.stored else None for row in rows]

    def place_blobs(self, claims: Sequence[BlobClaim]) -> list[BlobPlace]:
        with self.turn():
            return [self._place_blob(claim) for claim in claims]

    def _place_blob(self, claim: BlobClaim) -> BlobPlace:
        wall = self.clock.wall()
        row = self._live_blob(claim.sha256)
        if row is None:
            self._last_blob_seq += 1
            generation = max([lowest_generation(wall), *(known + 1 for known in self._blobs.get(claim.sha256, ()))])
            row = BlobRow(self._last_blob_seq, BlobPlace(claim.sha256, claim.size_bytes, generation), wall)
        self._set_blob(claim.sha256, row.place.generation, replace(row, touched_at=wall))
        return row.place

    def blobs_stored(self, places: Sequence[BlobPlace]) -> list[bool]:
        with self.turn():
            return [self._blob_stored(place) for place in places]

    def _blob_stored(self, place: BlobPlace) -> bool:
        row = self._blob(place.sha256, place.generation)
        if row is None or row.condemned:
            return False
        size_bytes = row.place.size_bytes if row.place.stored else place.size_bytes
        stored = replace(row.place, stored=True, size_bytes=size_bytes)
        self._set_blob(place.sha256, place.generation, replace(row, place=stored, touched_at=self.clock.wall()))
        return True

    def condemn_blobs(self, order: CondemnOrder, *, epoch: int) -> Condemned:
        with self.turn():
            self._check_epoch(epoch)
            rows = [row for rows in self._blobs.values() for row in rows.values()]
            rows.sort(key=lambda row: (row.touched_at, row.seq))  # the longest untouched first
            places = [row.place for row in rows if row.condemned][: order.limit]
            total_bytes = sum(row.place.size_bytes for row in rows if not row.condemned)
            for row in rows:
                is_over = order.budget_bytes is not None and total_bytes > order.budget_bytes
                before = max(order.unused_since, order.squeezed_since) if is_over else order.unused_since
                is_unused = row.touched_at < before and row.place.sha256 not in self._references
                if is_unused and not row.condemned and len(places) < order.limit:
                    self._set_blob(row.place.sha256, row.place.generation, replace(row, condemned=True))
                    places.append(row.place)
                    total_bytes -= row.place.size_bytes
            return Condemned(tuple(places), None if order.budget_bytes is None else total_bytes)

    def forget_blobs(self, places: Sequence[BlobPlace], *, epoch: int) -> int:
        with self.turn():
            self._check_epoch(epoch)
            keys = {(place.sha256, place.generation) for place in places}
            doomed = [key for key in keys if (row := self._blob(*key)) is not None and row.condemned]
            for key in doomed:
                self._set_blob(*key, None)
            return len(doomed)

    # -- caches ----------------------------------------------------------------------------------------------------
    def put_cache(self, orders: Sequence[CacheOrder]) -> list[CacheStored | CacheConflict | MissingBlobs]:
        with self.turn():
            return [self._put_cache(order) for order in orders]

    def _put_cache(self, order: CacheOrder) -> CacheStored | CacheConflict | MissingBlobs:
        known = self._caches.get(order.cache_id, {})
        refs = {BlobRef(entry.sha256, entry.size_bytes) for entry in order.entries}
        stored = {ref for ref in refs if not self._missing_among([ref])}
        new = judge_cache(order, known, next((file.target for file in known.values()), None), stored)
        if not isinstance(new, list):
            return new
        if (clash := judge_names(order, known, new)) is not None:
            return clash
        wall = self.clock.wall()
        added = {one.name: CachedFile(one.name, one.sha256, one.size_bytes, order.target, order.owner, wall) for one in new}
        self._set_cache(order.cache_id, {**known, **added})
        return CacheStored(len(new))

    def remove_cache(self, caches: Sequence[tuple[str, str]]) -> list[int]:
        with self.turn():
            return [self._remove_cache(cache_id, target) for cache_id, target in caches]

    def _remove_cache(self, cache_id: str, target: str) -> int:
        files = self._caches.get(cache_id, {})
        if any(file.target != target for file in files.values()):
            return 0
        self._set_cache(cache_id, {})
        return len(files)

    def _set_cache(self, cache_id: str, files: dict[str, CachedFile]) -> None:
        old = self._caches.get(cache_id, {})
        self._undo.append(lambda: self._replace_cache(cache_id, old))
        self._replace_cache(cache_id, files)

    def _replace_cache(self, cache_id: str, files: dict[str, CachedFile]) -> None:
        owner = f"cache:{cache_id}"
        for sha256 in {file.sha256 for file in self._caches.pop(cache_id, {}).values()}:
            del self._references[sha256][owner]
            if not self._references[sha256]:
                del self._references[sha256]
        for file in files.values():
            self._references.setdefault(file.sha256, {})[owner] = None
        if files:
            self._caches[cache_id] = files

    def cached_files(self, names: Sequence[tuple[str, str]]) -> list[CachedFile | None]:
        return [self._caches.get(cache_id, {}).get(name) for cache_id, name in names]

    def cache(self, cache_id: str, *, after: str = "", limit: int = 1000) -> list[CachedFile]:
        files = self._caches.get(cache_id, {})
        return [files[name] for name in sorted(files, key=str.encode) if name.encode() > after.encode()][:limit]

    def caches(self, *, after: str = "", limit: int = 100) -> list[CacheSummary]:
        found = []
        for cache_id in sorted(one for one in self._caches if one > after)[:limit]:
            files = list(self._caches[cache_id].values())
            size_bytes, first = sum(file.size_bytes for file in files), files[0]
            found.append(CacheSummary(cache_id, len(files), size_bytes, first.target, first.owner, first.added_at))
        return found

    # -- statistics ------------------------------------------------------------------------------------------------
    def add_rollups(self, rollups: Sequence[Rollup]) -> list[None]:
        with self.turn():
            new = {(one.minute, one.server_id): one for one in reversed(rollups)}
            self._replace_rollups({**new, **self._rollups})
        return [None] * len(rollups)

    def _replace_rollups(self, rollups: dict[tuple[int, str], Rollup]) -> None:
        self._undo.append(partial(setattr, self, "_rollups", self._rollups))
        self._rollups = rollups

    def rollups(self, since: int, until: int) -> list[Rollup]:
        return [self._rollups[key] for key in sorted(self._rollups) if since <= key[0] < until]

    # -- pauses ----------------------------------------------------------------------------------------------------
    def pause(self, orders: Sequence[PauseOrder]) -> list[PauseAnswer]:
        with self.turn():
            return [self._pause(order) for order in orders]

    def _pause(self, order: PauseOrder) -> PauseAnswer:
        if order.resume != (order.pattern in self._paused):
            return PauseAnswer.AS_BEFORE
        if not order.resume and len(self._paused) >= PAUSES_MAX:
            return PauseAnswer.TOO_MANY
        self._undo.append(partial(setattr, self, "_paused", self._paused))
        self._paused = {name: one for name, one in self._paused.items() if name != order.pattern}
        if not order.resume:
            reason = storable_text(order.reason)
            self._paused[order.pattern] = PausedPattern(order.pattern, self.clock.wall(), order.actor, reason)
        return PauseAnswer.DONE

    def paused(self) -> list[PausedPattern]:
        return [self._paused[pattern] for pattern in sorted(self._paused)]

    def epoch(self) -> tuple[int, str]:
        return self._epoch

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._epoch[0]:
            raise stale_epoch(epoch, *self._epoch)


def _passes(filter: Filter, job: Job) -> bool:
    outcome = job.outcome or Outcome()
    texts = (job.job_id, outcome.error_code or "", outcome.message)
    spec = job.spec
    origin = spec.subject, job.submitter, job.assigned_worker_id, spec.array_id, job.created_at
    return is_wanted(filter, job.job_id, job.state, *origin, texts)
