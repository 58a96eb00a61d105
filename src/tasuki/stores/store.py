"""The store: the data that must survive, and the verbs that may change it. The contract; its implementations are beside it.

Every verb is synchronous and takes a batch; a single call is a batch of one, and each item has its own answer at the same
index. Verbs called inside `with store.turn():` share one transaction: all of them are durable when the block ends, or none is.
Outside a turn each call is its own transaction. A store is used by one thread at a time.

Time. `clock.lease()` is the store's lease clock (never compared with another host's), `clock.wall()` the wall clock for
`not_before` and for the times that people read.

Fencing. `finish` and `fail` are accepted only if the job is ASSIGNED, RUNNING or ORPHANED *and* worker_id, owner, lease_id and
attempt are the current ones, in the same write. `start` and `renew` also check the incarnation. Leader verbs carry an epoch, and
are refused with `StaleEpoch` when another one is registered; they are called in a turn of their own, so that the check is the
first statement of its transaction. `docs/invariants.md` lists the promises that these rules keep.

Blobs. The store knows which bytes exist (a row before the first byte, gone after the last) and which jobs and caches refer to
them; a blob store (`tasuki.blobs`) has the bytes. A reference is written in the transaction of its job or cache, and only to
bytes that are stored; `condemn_blobs` re-checks it inside its own.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from tasuki.core.job import Job, JobIncident
from tasuki.core.lifecycle import REASSIGN_AFTER_S
from tasuki.core.pauses import PauseAnswer, PausedPattern, PauseOrder
from tasuki.core.statistics import GroupCounts, Rollup
from tasuki.core.store_messages import (
    Assignment,
    AuditRow,
    BlobClaim,
    BlobPlace,
    CachedFile,
    CacheOrder,
    CacheStored,
    CacheSummary,
    Canceled,
    Condemned,
    CondemnOrder,
    Filter,
    FiredRuns,
    Grant,
    HeldLease,
    LateJob,
    LeaseHolder,
    LeaseRequest,
    LeaseStatus,
    MissingBlobs,
    Page,
    ReadyPage,
    Reaped,
    Report,
    ReportAnswer,
    Requeued,
    Submission,
    Submitted,
    TokenRow,
    TurnNotes,
)
from tasuki.errors import CacheConflict, Conflict

QUEUES_OF_SUBJECT_MAX = 64  # that `ready_jobs` looks at in one priority

Answered = Submitted | Conflict | MissingBlobs
"""Answer to one submission."""


class Clock(Protocol):
    """The two clocks of a store, in seconds."""

    def lease(self) -> float:
        """Return the time of the lease clock, which counts on while the machine sleeps; for SQLite the owner's CLOCK_BOOTTIME."""

    def wall(self) -> float:
        """Return the Unix time."""


class Feature(enum.StrEnum):
    """Features that a store may lack; the conformance suite checks that the flags are true."""

    FIND_TEXT = "find_text"
    DURABLE = "durable"
    SHARED = "shared"
    """Several servers may work on the store at once. Without it, the process that opened it is its only user, and leads."""
    DEFINITIONS = "definitions"
    """Definitions and events are rows beside the jobs, which `fire` makes runs of."""


class Reader(Protocol):
    """The reading verbs of a store, which a read-only connection beside it has too."""

    def get(self, job_ids: Sequence[str]) -> list[Job | None]:
        """Return jobs by id, None for an unknown one."""

    def find(self, filter: Filter, *, limit: int = 50, cursor: str | None = None) -> Page:
        """Return jobs by filter, newest first. Bounded work per call: continue with the cursor."""

    def incidents(self, job_id: str) -> list[JobIncident]:
        """Return the unusual events of a job, oldest first."""

    def counts(self) -> dict[str, GroupCounts]:
        """Return the number of jobs per group and state, from maintained counters, never a scan."""

    def ready_ahead(self, job_id: str, *, limit: int = 10_000) -> int | None:
        """Return how many ready jobs of its priority and subject come before it (at most `limit`); None if it is not ready."""

    def top_band(self) -> int | None:
        """Return the highest priority of any ready job; None if no job is ready."""

    def ready_queues(self, place: Any = None, *, limit: int = 256) -> ReadyPage:
        """Return queues with ready jobs, the highest priority first; a queue comes once for each priority. The place leads on.

        Bounded work per call. A queue that has ready jobs during a whole walk is in it; one that gets or loses its jobs meanwhile
        may be. Queues of paused subjects are left out, so a page may be short and still have a place.
        Jobs may come to a queue without any turn of a server (other programs write to Redis): such a queue, if it has
        jobs, is in every page.
        """

    def ready_jobs(self, subject: str, *, limit: int = 256) -> list[str]:
        """Return ready jobs of a subject, the highest priority first; of each of its queues the `limit` oldest. Of a subject with
        more than QUEUES_OF_SUBJECT_MAX queues, some. Of a paused one, none."""

    def ended_among(self, job_ids: Sequence[str]) -> list[str]:
        """Return the jobs that are terminal, or do not exist any more. Cheap: servers ask it in case they missed an end."""

    def blob_places(self, sha256s: Sequence[str]) -> list[BlobPlace | None]:
        """Return the places of these blobs; None for one that is not stored (or condemned)."""

    def blob_owners(self, sha256: str, *, limit: int = 16) -> list[str]:
        """Return ids of jobs whose inputs or result are this blob, and `cache:` with ids of caches that have it; a peer that may
        read one of them may read the blob."""

    def cached_files(self, names: Sequence[tuple[str, str]]) -> list[CachedFile | None]:
        """Return files of caches by (cache_id, name), None for one that is not there."""

    def cache(self, cache_id: str, *, after: str = "", limit: int = 1000) -> list[CachedFile]:
        """Return the files of a cache by name, from the first one behind `after` on; none for an unknown cache."""

    def caches(self, *, after: str = "", limit: int = 100) -> list[CacheSummary]:
        """Return caches by cache_id, from the first one behind `after` on. Owner, target and time are those of its first file."""

    def rollups(self, since: int, until: int) -> list[Rollup]:
        """Return the rollups of all servers whose minute began at `since` or later, and before `until`, by minute."""

    def paused(self) -> list[PausedPattern]:
        """Return the patterns that are paused, by pattern; at most PAUSES_MAX."""

    def epoch(self) -> tuple[int, str]:
        """Return the highest epoch ever registered, and its holder; (0, "") before the first."""

    def token(self, sha256: str) -> TokenRow | None:
        """Return the row with that hash, also if it is revoked or expired (the caller judges)."""

    def revoked_among(self, token_ids: Sequence[str]) -> list[str]:
        """Return the ids of tokens that are revoked or unknown."""

    def audit(self, *, limit: int = 100, before: int | None = None) -> list[AuditRow]:
        """Return the changes of tokens, newest first; `before`: those with lower numbers."""

    def close(self) -> None:
        """Release all resources; a SQLite file is free for another owner afterwards."""


class Store(Reader, Protocol):
    """All verbs of a store; the module's docstring tells the rules that hold for all of them."""

    features: frozenset[Feature]
    clock: Clock

    # -- transactions ---------------------------------------------------------------------------------------------
    def turn(self, *, lasting: bool = True) -> AbstractContextManager[None]:
        """Open one transaction for several verbs. Durable when the block ends without an error; DiskFull, Unavailable otherwise.

        Not `lasting`: a power cut may undo it, together with everything after it. For facts that nobody was promised.
        """

    def notes(self) -> TurnNotes:
        """Return the notes of the turn that is open, or of the last one."""

    # -- submitters -----------------------------------------------------------------------------------------------
    def submit(self, submissions: Sequence[Submission], *, on_failed: str = "return") -> list[Answered]:
        """Store new jobs. Same id and body: the existing job. Same id, other body: Conflict. Also between items of one batch.
        Every new job is younger than all jobs stored before it, also than those before it in the batch.

        A new job that names input blobs is stored, with its references, only if all of these blobs are stored, with
        the size that it names; else MissingBlobs.

        An existing job comes with its outcome but without the result's bytes (`result` None, `result_ref` and `result_sha256`
        kept): a frame of known ids would else bring 64 KiB each. Read them with `get`.

        With on_failed="rerun" a job of the same submitter that ended other than SUCCEEDED is set going again: generation + 1,
        budgets reset.
        """

    def cancel(self, job_ids: Sequence[str], *, actor: str, reason: str = "") -> list[Canceled]:
        """Cancel jobs: waiting ones become CANCELED; leased ones get `cancel_requested`, which `renew` tells their worker."""

    def requeue(self, job_ids: Sequence[str], *, actor: str, reason: str = "", generation: int | None = None) -> list[Requeued]:
        """Set terminal jobs going again: generation + 1, both budgets reset, attempt continues, the old outcome is an incident.
        With `generation` only jobs that still have it: of several callers that read the same end, one sets the job going again.

        The spec's own `not_before` holds again, and its `not_after` unless that time is over: the caller wants the job run now.
        A run of a definition whose policy is not allow is left alone while another one of it has not ended (`still_running`);
        else it is the last run now, which the next one must not overlap.
        """

    # -- workers --------------------------------------------------------------------------------------------------
    def lease(self, requests: Sequence[LeaseRequest]) -> list[list[Grant]]:
        """Grant ready jobs: strict priority, fair between groups inside a band, then age. attempt + 1 each. At most limit.
        Nothing is granted after its `not_after`, or of a subject that is paused, however it is asked for.

        A delayed job is ready only after `promote`. A request by job_id takes over an expired lease (for `keep`: expired by its
        grace too): that counts as a loss, may end the job when no loss is left, and waits for no loss delay. The lease_ids of
        one request may share their random part: they belong to one worker. A subject that the request `leaves`
        is not granted by patterns. Jobs that are `chosen` are granted in their priority and group, before others, if they are
        ready.

        The work of a call is bounded, whatever waits: patterns without a wildcard are always looked for, a walk for the others
        ends after some hundred queues that it granted nothing from, and `notes().cut` names the requests whose walk was cut
        short. Their next walk continues where this one stopped.
        """

    def held(self, holders: Sequence[tuple[str, str, str]]) -> list[list[Grant]]:
        """Return for each (worker_id, incarnation, owner) its live leases that are still ASSIGNED, to be delivered again after a
        broken connection. One read of the live leases, however many holders ask.

        A run that was assigned ahead is among them from the time on at which `fire` let it start: the first call fetches it, its
        lease begins then, and the leader cannot take it back any more.

        `ttl_s` is the time left of each lease, without the margin.
        """

    def end_leases(self, holders: Sequence[LeaseHolder]) -> list[int]:
        """End live leases of holders that were shut out, and return how many of each; LEASES_ENDED_MAX means that there may be
        more. Unstarted attempts go back as by `release`; started ones are lost, also those that were to be kept.
        """

    def start(self, claims: Sequence[HeldLease]) -> list[LeaseStatus]:
        """Mark attempts as started: ASSIGNED → RUNNING with started_at; again: no change. Answers and resumes like `renew`."""

    def renew(self, claims: Sequence[HeldLease]) -> list[LeaseStatus]:
        """Extend leases to now + ttl_s + margin. LOST if a lease is not the current one of this incarnation.

        The `progress` of a claim is kept with the job; a grant clears it, and nothing is ever decided by it. So is its
        `confirm_s`, in stores with DEFINITIONS: the lease lasts at least so long, and no one else is granted the job before.
        An ORPHANED job whose lease is still the current one is resumed: RUNNING again, not ready any more, with the incident
        `resumed`. The loss that was counted stays counted.
        """

    def release(self, claims: Sequence[HeldLease], *, reason: str = "") -> list[bool]:
        """Give unstarted attempts back: PENDING again (CANCELED if that was asked for), no retry and no loss used; the attempt
        number stays used. A claim with `is_over` is refused while more than the margin is left of its lease."""

    def finish(self, reports: Sequence[Report]) -> list[ReportAnswer]:
        """Record that attempts succeeded, with their results. BLOB_MISSING, and nothing written, if the result is a blob that is
        not stored or has another size (also for `fail`); else the reference to it is written too."""

    def fail(self, reports: Sequence[Report]) -> list[ReportAnswer]:
        """Record that attempts failed: PENDING with not_before while a retry remains, else FAILED, TIMED_OUT or CANCELED."""

    # -- the leader -----------------------------------------------------------------------------------------------
    def take_over(self, holder: str, epoch: int) -> bool:
        """Register this epoch. False, and no change, unless it is higher than all before.

        Every lease that was not reaped yet counts as renewed now, by its own ttl; except one that an earlier takeover renewed
        and its worker has not renewed since. (A takeover before a restart of the lease clock does not count.)
        """

    def assign(self, assignments: Sequence[Assignment], *, epoch: int) -> list[Grant | None]:
        """Grant jobs to chosen workers: ready ones, and runs that `fire` made ahead of their time and nobody has fetched. None
        where the job is neither.

        Nothing is granted of a subject that is paused; a run that was assigned before continues.
        Until its time a run that was made ahead may be assigned to another worker, which is a new attempt. Until its worker has
        fetched it (`held`), also after its time, it may be assigned to nobody: then None.
        """

    def reap(self, *, epoch: int, limit: int = 256) -> list[Reaped]:
        """End expired leases (`keep`: expired by their grace too): PENDING, ORPHANED, CANCELED or, without budget, FAILED.

        Outcomes that the store makes itself have the error_code LOST or CANCELED.
        """

    def skip(self, *, epoch: int, limit: int = 1024) -> list[LateJob]:
        """End jobs that wait, ready, delayed or ORPHANED, past their `not_after`: SKIPPED, with the error_code TOO_LATE and the
        incident `skipped`. Return at most `limit`, the longest overdue first. Costs nothing for jobs without a not_after."""

    def promote(self, *, epoch: int, limit: int = 1024) -> int:
        """Make delayed jobs whose time has come ready, at most `limit`; return how many."""

    def fire(
        self, *, epoch: int, limit: int = 256, ahead_s: float = 0.0, reassign_after_s: float = REASSIGN_AFTER_S
    ) -> FiredRuns:
        """Make the runs of definitions that are due, and of events, as `core.scheduler.firing` plans them; look at no more than
        `limit` definitions and events. An exact repeat changes nothing. ConfigError without Feature.DEFINITIONS.

        With `ahead_s` the next run of a definition is stored so long before its time, for `assign`. Nothing is decided by that:
        at its time it starts, is skipped or waits as if it were made then, and until then it is gone again when its definition
        changes. An assigned one that may start and that its worker does not fetch within `reassign_after_s` is reaped.
        """

    def prune(self, *, before: float, epoch: int, limit: int = 256) -> int:
        """Delete jobs that became terminal before that wall time, with their incidents; return how many. Delete rollups of more
        than ROLLUP_DAYS ago too."""

    def condemn_blobs(self, order: CondemnOrder, *, epoch: int) -> Condemned:
        """Condemn at most `limit` blobs that nothing refers to, so that their bytes can be deleted: first those condemned before
        and not forgotten yet, then the longest untouched.

        A blob may be condemned if it was last touched before `unused_since`; while all blobs together take more than
        `budget_bytes`, before `squeezed_since` (which is later) is enough. From then on nothing can refer to it: `place_blobs`
        gives the next generation.
        """

    def forget_blobs(self, places: Sequence[BlobPlace], *, epoch: int) -> int:
        """Drop the rows of condemned blobs whose bytes are deleted; return how many."""

    def next_due(self) -> tuple[float | None, float | None]:
        """Return (lease-clock time of the next lease to end, wall time of the next delayed job), for the leader's next look."""

    # -- blobs ----------------------------------------------------------------------------------------------------
    def place_blobs(self, claims: Sequence[BlobClaim]) -> list[BlobPlace]:
        """Return the places of blobs that a peer brings or will refer to soon: where the bytes are (`stored`) or are to be
        written. Touches them, so that collection leaves them alone for its grace time. The first claim of a blob that is not
        stored yet sets its size."""

    def blobs_stored(self, places: Sequence[BlobPlace]) -> list[bool]:
        """Note that the bytes are durable at these places. False: the blob was condemned meanwhile; place it again."""

    # -- caches ---------------------------------------------------------------------------------------------------
    def put_cache(self, orders: Sequence[CacheOrder]) -> list[CacheStored | CacheConflict | MissingBlobs]:
        """Add files to caches, with a reference to their blobs; a cache begins with its first file. All files of an order or
        none: MissingBlobs if one is no stored blob of that size, CacheConflict if the cache has another file of that name, or
        another target. Files that are there stay as they are."""

    def remove_cache(self, caches: Sequence[tuple[str, str]]) -> list[int]:
        """Remove caches by (cache_id, target), with their references; return how many files each had. 0, and no change, for one
        with another target: the caller was not allowed to remove that."""

    # -- pauses ---------------------------------------------------------------------------------------------------
    def pause(self, orders: Sequence[PauseOrder]) -> list[PauseAnswer]:
        """Pause the subjects of patterns, or resume them. No job of a paused subject is granted once the turn is done: not by
        patterns, not by job_id, not by `assign`, and no expired lease is taken over. A second pause of a pattern changes
        nothing. The caller wakes the workers up after it resumed something."""

    # -- statistics -----------------------------------------------------------------------------------------------
    def add_rollups(self, rollups: Sequence[Rollup]) -> list[None]:
        """Keep what servers counted. A second one of the same server and minute: no change."""

    # -- tokens ---------------------------------------------------------------------------------------------------
    def add_token(self, token: TokenRow) -> bool:
        """Store a token's row, and note in the audit that `created_by` made it. The same row again: no change. False, and no
        change, if another row has that id or that hash."""

    def tokens(self) -> list[TokenRow]:
        """Return all tokens, oldest first."""

    def revoke_token(self, token_id: str, *, actor: str) -> bool:
        """Mark a token revoked, and note it in the audit; False if it is unknown or was revoked before. Of several callers one
        gets True: so an enrol token is used once."""

    def note(self, actor: str, action: str, target: str, detail: str = "") -> None:
        """Note in the audit what somebody did."""
