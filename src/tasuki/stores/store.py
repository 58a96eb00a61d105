"""The store: what must survive, and the verbs that may change it. This is the contract; the implementations are beside it.

Every verb is synchronous and takes a batch; a single call is a batch of one, and each item has its own answer at the same
index. Verbs called inside `with store.turn():` share one transaction: all of them are durable when the block ends, or none is.
Outside a turn each call is its own transaction. A store is used by one thread at a time.

Time. `clock.lease()` is the store's lease clock (never compared with another host's), `clock.wall()` the wall clock for
`not_before` and for the times that people read.

Fencing. `finish` and `fail` are accepted only if the job is ASSIGNED, RUNNING or ORPHANED *and* worker_id, lease_id and attempt
are the current ones, in the same write. `start` and `renew` also check the incarnation. Leader verbs carry an epoch, and are
refused with `StaleEpoch` when a newer one is registered.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from tasuki.core.job import Incident, Job
from tasuki.core.verbs import (
    COUNTED,
    Answer,
    Assignment,
    Canceled,
    Filter,
    Grant,
    GroupCounts,
    Held,
    LeaseRequest,
    Page,
    Promoted,
    Reaped,
    Recorded,
    Report,
    Requeued,
    Standing,
    Submission,
    Submitted,
    Takes,
    TokenRow,
)
from tasuki.errors import Conflict

__all__ = [
    "COUNTED",
    "Answer",
    "Assignment",
    "Canceled",
    "Clock",
    "Feature",
    "Filter",
    "Grant",
    "GroupCounts",
    "Held",
    "LeaseRequest",
    "Page",
    "Promoted",
    "Reaped",
    "Recorded",
    "Report",
    "Requeued",
    "Standing",
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


class Store(Protocol):
    """See the module's docstring for what holds for all verbs."""

    features: frozenset[Feature]
    clock: Clock

    # -- transactions ---------------------------------------------------------------------------------------------
    def turn(self) -> AbstractContextManager[None]:
        """One transaction around several verbs. Durable when it returns without an error; DiskFull, Unavailable otherwise."""
        ...

    def close(self) -> None:
        """Give back everything; a SQLite file is free for another owner afterwards."""
        ...

    # -- submitters -----------------------------------------------------------------------------------------------
    def submit(self, submissions: Sequence[Submission], *, on_failed: str = "return") -> list[Submitted | Conflict]:
        """Store new jobs. Same id and body: the existing job. Same id, other body: Conflict. Also between items of one batch.

        An existing job comes with its outcome but without the result's bytes (`result` None, `result_ref` and `result_sha256`
        kept): a frame of known ids would else bring 64 KiB each. Read them with `get`.

        With on_failed="rerun" a job of the same submitter that ended other than SUCCEEDED is set going again: generation + 1,
        budgets reset.
        """
        ...

    def cancel(self, job_ids: Sequence[str], *, actor: str, reason: str = "") -> list[Canceled]:
        """Waiting jobs become CANCELED; leased ones get `cancel_requested`, which `renew` tells their worker."""
        ...

    def requeue(self, job_ids: Sequence[str], *, actor: str, reason: str = "") -> list[Requeued]:
        """Set terminal jobs going again: generation + 1, both budgets reset, attempt goes on, the old outcome is an incident.

        The spec's own `not_before` holds again.
        """
        ...

    # -- workers --------------------------------------------------------------------------------------------------
    def lease(self, requests: Sequence[LeaseRequest]) -> list[list[Grant]]:
        """Grant ready jobs: strict priority, fair between groups inside a band, then age. attempt + 1 each. At most limit.

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

    def start(self, claims: Sequence[Held]) -> list[Standing]:
        """ASSIGNED → RUNNING with started_at; again: no change. Also tells of a cancel request, like renew. ORPHANED: LOST."""
        ...

    def renew(self, claims: Sequence[Held]) -> list[Standing]:
        """Set the lease's expiry to now + ttl_s + margin. LOST if it is not the current lease of this incarnation.

        An ORPHANED job whose lease is still the current one: GO_ON, and nothing is written.
        """
        ...

    def release(self, claims: Sequence[Held], *, reason: str = "") -> list[bool]:
        """Give an unstarted attempt back: PENDING again (CANCELED if that was asked for), no retry and no loss used; the attempt
        number stays used."""
        ...

    def finish(self, reports: Sequence[Report]) -> list[Recorded]:
        """Record that attempts succeeded, with their results."""
        ...

    def fail(self, reports: Sequence[Report]) -> list[Recorded]:
        """Record that attempts failed: PENDING with not_before while a retry remains, else FAILED, TIMED_OUT or CANCELED."""
        ...

    # -- the leader -----------------------------------------------------------------------------------------------
    def take_over(self, holder: str) -> int:
        """Register a new epoch, one above the highest ever, and return it.

        Every lease that was not reaped yet counts as renewed now, by its own ttl.
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

    def promote(self, *, epoch: int, limit: int = 1024) -> Promoted:
        """Make delayed jobs whose time has come ready, at most `limit`."""
        ...

    def prune(self, *, before: float, epoch: int, limit: int = 256) -> int:
        """Delete jobs that became terminal before that wall time, with their incidents; how many."""
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

    def incidents(self, job_id: str) -> list[Incident]:
        """The unusual things that befell the job, oldest first."""
        ...

    def counts(self) -> dict[str, GroupCounts]:
        """Per group, from maintained counters, never a scan."""
        ...

    def ready_ahead(self, job_id: str, *, limit: int = 10_000) -> int | None:
        """How many ready jobs of its priority and subject stand before it (at most `limit`); None if it is not ready."""
        ...

    def blob_owners(self, sha256: str, *, limit: int = 16) -> list[str]:
        """Ids of jobs whose inputs or result are this blob; who may read them may read it."""
        ...

    # -- tokens ---------------------------------------------------------------------------------------------------
    def add_token(self, token: TokenRow) -> bool:
        """Store a token's row. Again the same row: no change. False, and no change, if another row has that id or that hash."""
        ...

    def token(self, sha256: str) -> TokenRow | None:
        """The row with that hash, revoked and expired ones too (the caller judges)."""
        ...

    def tokens(self) -> list[TokenRow]:
        """All, oldest first."""
        ...

    def revoke_token(self, token_id: str, *, actor: str) -> bool:
        """Mark it revoked; False if unknown or revoked before."""
        ...
