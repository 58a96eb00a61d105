"""The store: what must survive, and the verbs that may change it. This is the contract; the implementations are beside it.

Every verb is synchronous and takes a batch; a single call is a batch of one, and each item has its own answer at the same
index. Verbs called inside `with store.turn():` share one transaction: all of them are durable when the block ends, or none is.
Outside a turn each call is its own transaction. A store is used by one thread at a time.

Time. `clock.lease()` is the store's lease clock (never compared with another host's), `clock.wall()` the wall clock for
`not_before` and for the times that people read.

Fencing. `finish` and `fail` are accepted only if the job is ASSIGNED, RUNNING or ORPHANED *and* worker_id, lease_id and attempt
are the current ones, in the same write. `start` and `renew` also check the incarnation. Leader verbs carry an epoch, and are
refused with `StaleEpoch` when another one is registered; they are called in a turn of their own, so that the check is the
first thing of its transaction.

Blobs. The store knows which bytes exist (a row before the first byte, gone after the last), and which jobs refer to them; the
bytes themselves are elsewhere (`tasuki.blobs`). A reference is written in its job's transaction, and only to bytes that are
stored; `condemn_blobs` re-checks it inside its own.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from tasuki.core.job import Job, JobIncident
from tasuki.core.store_messages import (
    COUNTED,
    Assignment,
    AuditRow,
    BlobClaim,
    BlobPlace,
    Canceled,
    Condemned,
    CondemnOrder,
    Filter,
    Grant,
    GroupCounts,
    HeldLease,
    LeaseRequest,
    LeaseStatus,
    MissingBlobs,
    Page,
    Promoted,
    Reaped,
    Report,
    ReportAnswer,
    Requeued,
    Submission,
    Submitted,
    Takes,
    TokenRow,
)
from tasuki.errors import Conflict

__all__ = [
    "COUNTED",
    "Assignment",
    "AuditRow",
    "BlobClaim",
    "BlobPlace",
    "Canceled",
    "Clock",
    "CondemnOrder",
    "Condemned",
    "Feature",
    "Filter",
    "Grant",
    "GroupCounts",
    "HeldLease",
    "LeaseRequest",
    "LeaseStatus",
    "MissingBlobs",
    "Page",
    "Promoted",
    "Reaped",
    "Report",
    "ReportAnswer",
    "Requeued",
    "Store",
    "Submission",
    "Submitted",
    "Takes",
    "TokenRow",
]


class Clock(Protocol):
    """The two clocks of a store, in seconds."""

    def lease(self) -> float:
        """Counts on while the machine sleeps; for SQLite the owner's CLOCK_BOOTTIME."""
        ...

    def wall(self) -> float:
        """Unix time."""
        ...


class Feature(enum.StrEnum):
    """What a back end may lack; the conformance suite checks that the flag is true to the facts."""

    FIND_TEXT = "find_text"
    DURABLE = "durable"
    SHARED = "shared"
    """Several servers may work on it at once. Without it, whoever opened the store is its only user, and leads."""


class Store(Protocol):
    """See the module's docstring for what holds for all verbs."""

    features: frozenset[Feature]
    clock: Clock

    # -- transactions ---------------------------------------------------------------------------------------------
    def turn(self, *, lasting: bool = True) -> AbstractContextManager[None]:
        """One transaction around several verbs. Durable when it returns without an error; DiskFull, Unavailable otherwise.

        Not `lasting`: a power cut may take it back, with nothing that came after it kept. For news that nobody is promised.
        """
        ...

    def close(self) -> None:
        """Give back everything; a SQLite file is free for another owner afterwards."""
        ...

    # -- submitters -----------------------------------------------------------------------------------------------
    def submit(
        self, submissions: Sequence[Submission], *, on_failed: str = "return"
    ) -> list[Submitted | Conflict | MissingBlobs]:
        """Store new jobs. Same id and body: the existing job. Same id, other body: Conflict. Also between items of one batch.
        Every new job is younger than all that were stored before it, also than those before it in the batch.

        A new job that names input blobs is stored, with its references, only if all of them are stored; else MissingBlobs.

        An existing job comes with its outcome but without the result's bytes (`result` None, `result_ref` and `result_sha256`
        kept): a frame of known ids would else bring 64 KiB each. Read them with `get`.

        With on_failed="rerun" a job of the same submitter that ended other than SUCCEEDED is set going again: generation + 1,
        budgets reset.
        """
        ...

    def cancel(self, job_ids: Sequence[str], *, actor: str, reason: str = "") -> list[Canceled]:
        """Waiting jobs become CANCELED; leased ones get `cancel_requested`, which `renew` tells their worker."""
        ...

    def requeue(self, job_ids: Sequence[str], *, actor: str, reason: str = "", generation: int | None = None) -> list[Requeued]:
        """Set terminal jobs going again: generation + 1, both budgets reset, attempt goes on, the old outcome is an incident.
        With `generation` only those that still have it: of several who read the same end, one sets the job going again.

        The spec's own `not_before` holds again, and its `not_after` unless that time is over: who asks now wants it all the same.
        """
        ...

    # -- workers --------------------------------------------------------------------------------------------------
    def lease(self, requests: Sequence[LeaseRequest]) -> list[list[Grant]]:
        """Grant ready jobs: strict priority, fair between groups inside a band, then age. attempt + 1 each. At most limit.
        Nothing is granted after its `not_after`, however it is asked for.

        A delayed job is ready only after `promote`, whoever asks. By job_id a lease that is over (for `keep`: by its grace too)
        is taken over: that counts as a loss, may end the job when no loss is left, and waits for no loss delay. The lease_ids of
        one request may share their random part: they belong to one worker. A subject that the request `leaves` to another live
        worker is not granted by patterns.
        """
        ...

    def held(self, holders: Sequence[tuple[str, str]]) -> list[list[Grant]]:
        """For each (worker_id, incarnation) its live leases that are still ASSIGNED: what to deliver again after a broken
        connection. One look at the live leases, however many ask.

        `ttl_s` is what is left of each, without the margin.
        """
        ...

    def start(self, claims: Sequence[HeldLease]) -> list[LeaseStatus]:
        """ASSIGNED → RUNNING with started_at; again: no change. Tells of a cancel request, and resumes, like renew."""
        ...

    def renew(self, claims: Sequence[HeldLease]) -> list[LeaseStatus]:
        """Set the lease's expiry to now + ttl_s + margin. LOST if it is not the current lease of this incarnation.

        The `progress` that a claim brings is kept with the job; a grant clears it, and nothing is ever decided by it.
        An ORPHANED job whose lease is still the current one is resumed: RUNNING again, not ready any more, with the incident
        `resumed`. The loss that was counted stays counted.
        """
        ...

    def release(self, claims: Sequence[HeldLease], *, reason: str = "") -> list[bool]:
        """Give an unstarted attempt back: PENDING again (CANCELED if that was asked for), no retry and no loss used; the attempt
        number stays used."""
        ...

    def finish(self, reports: Sequence[Report]) -> list[ReportAnswer]:
        """Record that attempts succeeded, with their results. BLOB_MISSING, and nothing written, if the result is a blob that is
        not stored (also for `fail`); the reference is written with the rest."""
        ...

    def fail(self, reports: Sequence[Report]) -> list[ReportAnswer]:
        """Record that attempts failed: PENDING with not_before while a retry remains, else FAILED, TIMED_OUT or CANCELED."""
        ...

    # -- the leader -----------------------------------------------------------------------------------------------
    def epoch(self) -> tuple[int, str]:
        """The highest epoch ever registered, and its holder; (0, "") before the first."""
        ...

    def take_over(self, holder: str, epoch: int) -> bool:
        """Register this epoch. False, and no change, unless it is higher than every one before.

        Every lease that was not reaped yet counts as renewed now, by its own ttl; but not one that an earlier takeover renewed
        and its worker has not renewed since. (An earlier one of a lease clock that has begun again does not count.)
        """
        ...

    def assign(self, assignments: Sequence[Assignment], *, epoch: int) -> list[Grant | None]:
        """Targeted grants of ready jobs; None where the job is not ready."""
        ...

    def reap(self, *, epoch: int, limit: int = 256) -> list[Reaped]:
        """End leases that are over (`keep`: over by their grace too): PENDING, ORPHANED, CANCELED or, without budget, FAILED.

        Outcomes that the store makes itself have the error_code LOST or CANCELED.
        """
        ...

    def skip(self, *, epoch: int, limit: int = 1024) -> list[str]:
        """End jobs that wait, ready, delayed or ORPHANED, past their `not_after`: SKIPPED, with the error_code TOO_LATE and the
        incident `skipped`. Their ids, at most `limit`; the longest overdue first. Costs nothing for jobs without a not_after."""
        ...

    def promote(self, *, epoch: int, limit: int = 1024) -> Promoted:
        """Make delayed jobs whose time has come ready, at most `limit`."""
        ...

    def prune(self, *, before: float, epoch: int, limit: int = 256) -> int:
        """Delete jobs that became terminal before that wall time, with their incidents; how many."""
        ...

    def condemn_blobs(self, order: CondemnOrder, *, epoch: int) -> Condemned:
        """Which bytes to delete: at most `limit` blobs that no job refers to, those condemned before and not forgotten yet first,
        then the longest untouched.

        A blob may be condemned if it was last touched before `unused_since`; while all blobs together take more than
        `budget_bytes`, before `squeezed_since` (which is later) is enough. From then on nothing can refer to it: `place_blobs`
        gives the next generation.
        """
        ...

    def forget_blobs(self, places: Sequence[BlobPlace], *, epoch: int) -> int:
        """Their bytes are deleted: drop the rows of those that are condemned; how many."""
        ...

    def next_due(self) -> tuple[float | None, float | None]:
        """(lease-clock time of the next lease to end, wall time of the next delayed job): when the leader must look again."""
        ...

    # -- readers --------------------------------------------------------------------------------------------------
    def get(self, job_ids: Sequence[str]) -> list[Job | None]:
        """Jobs by id, None for an unknown one."""
        ...

    def find(self, filter: Filter, *, limit: int = 50, cursor: str | None = None) -> Page:
        """Jobs by filter, newest first. Bounded work per call: go on with the cursor."""
        ...

    def incidents(self, job_id: str) -> list[JobIncident]:
        """The unusual things that befell the job, oldest first."""
        ...

    def counts(self) -> dict[str, GroupCounts]:
        """Per group, from maintained counters, never a scan."""
        ...

    def ready_ahead(self, job_id: str, *, limit: int = 10_000) -> int | None:
        """How many ready jobs of its priority and subject stand before it (at most `limit`); None if it is not ready."""
        ...

    def top_band(self) -> int | None:
        """The highest priority of which a job is ready; None if none is."""
        ...

    def ended_among(self, job_ids: Sequence[str]) -> list[str]:
        """Those that are terminal, or that do not exist any more. Cheap: servers ask for what they may not have heard."""
        ...

    def blob_places(self, sha256s: Sequence[str]) -> list[BlobPlace | None]:
        """Where the bytes of these blobs are; None for what is not stored (or condemned)."""
        ...

    def blob_owners(self, sha256: str, *, limit: int = 16) -> list[str]:
        """Ids of jobs whose inputs or result are this blob; who may read them may read it."""
        ...

    # -- blobs ----------------------------------------------------------------------------------------------------
    def place_blobs(self, claims: Sequence[BlobClaim]) -> list[BlobPlace]:
        """Somebody brings these bytes, or will refer to them soon: where they are (`stored`) or are to be written. Touches them,
        so that collection leaves them alone for its grace time. Sizes are taken from the first claim of bytes not yet stored."""
        ...

    def blobs_stored(self, places: Sequence[BlobPlace]) -> list[bool]:
        """The bytes are durable at these places. False: it was condemned meanwhile; place it again."""
        ...

    # -- tokens ---------------------------------------------------------------------------------------------------
    def add_token(self, token: TokenRow) -> bool:
        """Store a token's row, and in the audit that `created_by` made it. Again the same row: no change. False, and no change,
        if another row has that id or that hash."""
        ...

    def token(self, sha256: str) -> TokenRow | None:
        """The row with that hash, revoked and expired ones too (the caller judges)."""
        ...

    def tokens(self) -> list[TokenRow]:
        """All, oldest first."""
        ...

    def revoke_token(self, token_id: str, *, actor: str) -> bool:
        """Mark it revoked, and write it into the audit; False if unknown or revoked before. Of several who do it one gets True:
        that is how an enrol token is used once."""
        ...

    def revoked_among(self, token_ids: Sequence[str]) -> list[str]:
        """Those that are revoked or unknown."""
        ...

    def audit(self, *, limit: int = 100) -> list[AuditRow]:
        """What was done to tokens, the newest first."""
        ...
