"""One store, one clock, and the short forms that the cases of the conformance suite are written in.

`StoreCase` is the base of the case classes; `Stage` is their fixture. Touches only the store it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from tasuki.core.job import Job, JobSpec, OnDisconnect, Outcome, body_hash
from tasuki.core.lifecycle import LEASE_MARGIN_S, LEASE_TTL_S
from tasuki.core.store_messages import (
    Assignment,
    BlobClaim,
    BlobPlace,
    Filter,
    Grant,
    HeldLease,
    JobKind,
    LeaseRequest,
    LeaseStatus,
    MissingBlobs,
    ReadyQueue,
    Reaped,
    Report,
    ReportAnswer,
    Submission,
    Submitted,
    TokenRow,
)
from tasuki.errors import Conflict
from tasuki.stores.store import Store
from tasuki.testing.clocks import FakeClock

MakeStore = Callable[[FakeClock], Store]

PAST_LEASE_S = LEASE_TTL_S + LEASE_MARGIN_S + 0.5
GRACE_S = 60.0
A_MOMENT_S = 2.0**-6  # more than TAKEOVER_TIE_S, and sums with it are exact
KEEP: dict[str, Any] = {"on_disconnect": OnDisconnect.KEEP, "reconnect_grace_s": GRACE_S}


def token_row(token_id: str, **fields: Any) -> TokenRow:
    """Return a token whose hash is its id repeated."""
    return TokenRow(**{"token_id": token_id, "kind": "client", "sha256": (token_id * 64)[:64], **fields})


class Abandoned(Exception):
    """Raised inside a turn to end it."""


class Stage:
    """A store with a registered leader. Worker w of incarnation i is called ("w", "w/i")."""

    def __init__(self, store: Store, clock: FakeClock) -> None:
        self.store = store
        self.clock = clock
        self.epoch = self.lead("leader-1")
        if isinstance(clock, FakeClock):  # a real one goes on by itself
            clock.advance(A_MOMENT_S)

    def lead(self, holder: str) -> int:
        """Register the next epoch for this holder."""
        epoch = self.store.epoch()[0] + 1
        assert self.store.take_over(holder, epoch)
        return epoch

    # -- given ----------------------------------------------------------------------------------------------------
    def submission(self, job_id: str, *, submitter: str = "alice", **fields: Any) -> Submission:
        spec = JobSpec(job_id=job_id, **{"subject": "render.eu", **fields})
        return Submission(spec, submitter, body_hash(spec))

    def submit(self, job_id: str, *, on_failed: str = "return", **fields: Any) -> Submitted | Conflict | MissingBlobs:
        [answer] = self.store.submit([self.submission(job_id, **fields)], on_failed=on_failed)
        return answer

    def submit_again(self, job_id: str, **fields: Any) -> Job:
        """Submit a job that exists, and return it as it was answered."""
        answer = self.submit(job_id, **fields)
        assert isinstance(answer, Submitted)
        assert not answer.created
        assert answer.job is not None
        return answer.job

    def add(self, *job_ids: str, **fields: Any) -> None:
        answers = self.store.submit([self.submission(job_id, **fields) for job_id in job_ids])
        assert [isinstance(answer, Submitted) and answer.created for answer in answers] == [True] * len(job_ids)

    def store_blobs(self, *sha256s: str, size_bytes: int = 3) -> list[BlobPlace]:
        """Place blobs and mark their bytes as stored."""
        places = self.store.place_blobs([BlobClaim(sha256, size_bytes) for sha256 in sha256s])
        assert self.store.blobs_stored(places) == [True] * len(places)
        return [replace(place, stored=True) for place in places]

    def running(self, job_id: str, worker_id: str = "w1", *, lease: dict[str, Any] | None = None, **fields: Any) -> Grant:
        """Add a job that the worker holds and has started."""
        grant = self.assigned(job_id, worker_id, lease=lease, **fields)
        assert self.store.start([self.claim(grant, worker_id)]) == [LeaseStatus.GO_ON]
        return grant

    def assigned(self, job_id: str, worker_id: str = "w1", *, lease: dict[str, Any] | None = None, **fields: Any) -> Grant:
        self.add(job_id, **fields)
        return self.take(job_id, worker_id, **(lease or {}))

    def orphaned(self, job_id: str, worker_id: str = "w1", **fields: Any) -> Grant:
        grant = self.running(job_id, worker_id, lease=KEEP, **fields)
        self.clock.advance(PAST_LEASE_S + GRACE_S)
        assert [reaped.state.value for reaped in self.reap()] == ["ORPHANED"]
        return grant

    def ended(self, job_id: str, state: str) -> Grant:
        """Add a job that one attempt brought to this terminal state."""
        grant = self.running(job_id, max_retries=0)
        if state == "SUCCEEDED":
            self.finish(grant, message="all good")
        elif state == "CANCELED":
            self.store.cancel([job_id], actor="alice")
            self.fail(grant, error_code="CANCELED")
        else:
            self.fail(grant, error_code="TIMED_OUT" if state == "TIMED_OUT" else "EXIT_CODE", message="it broke")
        assert self.job(job_id).state == state
        return grant

    # -- when -----------------------------------------------------------------------------------------------------
    def lease(self, worker_id: str = "w1", *, limit: int = 1, patterns: tuple[str, ...] = (">",), **fields: Any) -> list[Grant]:
        request = LeaseRequest(worker_id=worker_id, incarnation=f"{worker_id}/1", patterns=patterns, limit=limit, **fields)
        [grants] = self.store.lease([request])
        return grants

    def take(self, job_id: str, worker_id: str = "w1", **fields: Any) -> Grant:
        [grant] = self.lease(worker_id, job_ids=(job_id,), **fields)
        return grant

    def claim(self, grant: Grant, worker_id: str = "w1", *, incarnation: str | None = None, **fields: Any) -> HeldLease:
        shown = {
            "job_id": grant.job_id,
            "worker_id": worker_id,
            "incarnation": incarnation or f"{worker_id}/1",
            "lease_id": grant.lease_id,
            "attempt": grant.attempt,
        }
        return HeldLease(**{**shown, **fields})

    def report(self, grant: Grant, worker_id: str = "w1", **outcome: Any) -> Report:
        return Report(grant.job_id, worker_id, grant.lease_id, grant.attempt, Outcome(**outcome))

    def finish(self, grant: Grant, worker_id: str = "w1", **outcome: Any) -> ReportAnswer:
        [answer] = self.store.finish([self.report(grant, worker_id, **outcome)])
        return answer

    def fail(self, grant: Grant, worker_id: str = "w1", **outcome: Any) -> ReportAnswer:
        [answer] = self.store.fail([self.report(grant, worker_id, **{"error_code": "EXIT_CODE", **outcome})])
        return answer

    def start(self, grant: Grant, worker_id: str = "w1", **fields: Any) -> LeaseStatus:
        [standing] = self.store.start([self.claim(grant, worker_id, **fields)])
        return standing

    def renew(self, grant: Grant, worker_id: str = "w1", **fields: Any) -> LeaseStatus:
        [standing] = self.store.renew([self.claim(grant, worker_id, **fields)])
        return standing

    def release(self, grant: Grant, worker_id: str = "w1", **fields: Any) -> bool:
        [done] = self.store.release([self.claim(grant, worker_id, **fields)], reason="draining")
        return done

    def assign(self, job_id: str, worker_id: str = "w1", **fields: Any) -> Grant | None:
        assignment = Assignment(job_id=job_id, worker_id=worker_id, incarnation=f"{worker_id}/1", **fields)
        [grant] = self.store.assign([assignment], epoch=self.epoch)
        return grant

    def reap(self, limit: int = 256) -> list[Reaped]:
        return self.store.reap(epoch=self.epoch, limit=limit)

    def skip(self, limit: int = 1024) -> list[str]:
        return [job_id for job_id, _ in self.store.skip(epoch=self.epoch, limit=limit)]

    def promote(self) -> int:
        return self.store.promote(epoch=self.epoch)

    @contextmanager
    def abandoned_turn(self) -> Iterator[None]:
        """Open a turn that an exception ends, which the store must not swallow."""
        try:
            with self.store.turn():
                yield
                raise Abandoned
        except Abandoned:
            return
        raise AssertionError("the exception did not come out of the turn")

    def lose(self) -> list[Reaped]:
        """Let every lease run out, and reap."""
        self.clock.advance(PAST_LEASE_S)
        return self.reap()

    # -- then -----------------------------------------------------------------------------------------------------
    def job(self, job_id: str) -> Job:
        [job] = self.store.get([job_id])
        assert job is not None
        return job

    def came_back_to(self, *subjects: str) -> bool:
        """Return whether the last turn noted these subjects, of jobs for handlers, or that it does not know."""
        ready = self.store.notes().ready
        return ready is None or sorted(ready) == [ReadyQueue(subject, JobKind.HANDLER) for subject in sorted(subjects)]

    def kinds(self, job_id: str) -> list[str]:
        return [incident.kind for incident in self.store.incidents(job_id)]

    def found(self, *, limit: int = 50, **fields: Any) -> list[str]:
        """Return the ids of all pages."""
        return [job.job_id for job in self.find_all(limit=limit, **fields)]

    def find_all(self, *, limit: int = 50, **fields: Any) -> list[Job]:
        jobs: list[Job] = []
        cursor: str | None = None
        while True:
            page = self.store.find(Filter(**fields), limit=limit, cursor=cursor)
            assert len(page.jobs) <= limit
            jobs += page.jobs
            cursor = page.cursor
            if cursor is None:
                return jobs


class StoreCase:
    """Base of the case classes: the store under test comes from the subclass's `make_store`."""

    @pytest.fixture
    def make_store(self) -> MakeStore:
        """Override: a function that opens the test's own store on the clock it is given; after a close, the same one again."""
        raise NotImplementedError("a subclass of StoreSuite gives the fixture make_store")

    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    def store(self, make_store: MakeStore, clock: FakeClock) -> Iterator[Store]:
        store = make_store(clock)
        yield store
        store.close()

    @pytest.fixture
    def stage(self, store: Store, clock: FakeClock) -> Stage:
        return Stage(store, clock)
