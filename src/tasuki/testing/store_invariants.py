"""The invariants of RELIABILITY §1 that a store decides, checked against what its callers were told.

`History` is told every answer of the store and is shown all jobs after every step. Pure but for the clock it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tasuki.core.job import LEASED, READY, Job, JobIncident, State
from tasuki.core.store_messages import Grant, MissingBlobs, Report, ReportAnswer, ReportStatus, Submission, Submitted
from tasuki.errors import Conflict
from tasuki.stores.store import Clock


class History:
    """What callers know of each job, by id."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._latest_wall = clock.wall()
        self._bodies: dict[str, bytes] = {}
        self._grants: Counter[str] = Counter()
        self._recorded: dict[str, dict[int, tuple[str, int]]] = {}  # job_id -> attempt -> verb, generation
        self._seen: dict[str, Job] = {}

    # -- what callers were told -----------------------------------------------------------------------------------
    def submitted(self, submissions: Sequence[Submission], answers: Sequence[Submitted | Conflict | MissingBlobs]) -> None:
        """I2: one job per id, all acks agree, another body is refused."""
        for submission, answer in zip(submissions, answers, strict=True):
            known = self._bodies.get(answer.job_id)
            if isinstance(answer, MissingBlobs):
                assert known is None, f"I2: {answer.job_id} is known, whatever its blobs"
                continue
            if isinstance(answer, Conflict):
                assert known not in (None, submission.body_hash), f"I2: {answer.job_id} was refused without cause"
                continue
            assert answer.created == (known is None), f"I2: {answer.job_id} was created twice, or not at all"
            assert known in (None, submission.body_hash), f"I2: {answer.job_id} was acked with another body"
            self._bodies[answer.job_id] = submission.body_hash

    def granted(self, grant: Grant, job: Job) -> None:
        """I5: every grant is one attempt more. I12: none before its time (of any wall clock ever shown), nor after it."""
        self.saw_time()
        self._grants[grant.job_id] += 1
        assert grant.attempt == job.attempt == self._grants[grant.job_id], f"I5: {grant.job_id}"
        assert job.not_before is None or job.not_before <= self._latest_wall, f"I12: {grant.job_id} was granted too early"
        assert job.not_after is None or job.not_after >= self._clock.wall(), f"{grant.job_id} was granted too late"

    def reported(
        self, verb: str, reports: Sequence[Report], before: Sequence[Job | None], answers: Sequence[ReportAnswer]
    ) -> None:
        """I3: at most one finish per attempt. I6: it held the current lease. I14: a cancel and a finish do not both win."""
        for report, job, answer in zip(reports, before, answers, strict=True):
            if answer.answer is not ReportStatus.RECORDED:
                continue
            assert job is not None
            assert job.lease is not None, f"I6: {report.job_id} had no lease"
            shown = (report.worker_id, report.lease_id, report.attempt)
            assert shown == (job.lease.worker_id, job.lease.lease_id, job.lease.attempt), f"I6: {report.job_id}"
            recorded = self._recorded.setdefault(report.job_id, {})
            assert report.attempt not in recorded, f"I3: two reports on attempt {report.attempt} of {report.job_id}"
            recorded[report.attempt] = verb, job.generation
            assert (verb == "finish") == (answer.state is State.SUCCEEDED), f"I14: {verb} led to {answer.state}"

    def pruned(self, job_ids: Iterable[str]) -> None:
        """Ids that are gone are new again."""
        for job_id in list(job_ids):
            for known in (self._bodies, self._grants, self._recorded, self._seen):
                known.pop(job_id, None)

    def saw_time(self) -> None:
        self._latest_wall = max(self._latest_wall, self._clock.wall())

    # -- what the store shows -------------------------------------------------------------------------------------
    def check(self, jobs: Sequence[Job], stories: dict[str, list[JobIncident]]) -> None:
        """All jobs, after a step."""
        self.saw_time()
        assert {job.job_id for job in jobs} == set(self._bodies), "I1, I2: acked jobs and stored jobs differ"
        assert len(jobs) == len(self._bodies), "I2: two jobs of one id"
        for job in jobs:
            assert job.body_hash == self._bodies[job.job_id], f"I2: the body of {job.job_id} changed"
            assert job.attempt == self._grants[job.job_id], f"I5: {job.job_id}"
            self._check_lease(job)
            self._check_budgets(job, stories[job.job_id])
            if (earlier := self._seen.get(job.job_id)) is not None:
                self._check_step(earlier, job)
            self._seen[job.job_id] = job

    def _check_lease(self, job: Job) -> None:
        has_lease = job.lease is not None
        assert has_lease == (job.state in LEASED or job.state is State.ORPHANED), f"I5: {job.job_id} is {job.state}"
        assert job.lease is None or job.lease.attempt == job.attempt, f"I5: {job.job_id}"
        is_finished = self._recorded.get(job.job_id, {}).get(job.attempt) == ("finish", job.generation)
        if job.state is State.SUCCEEDED:
            assert is_finished, f"I6: {job.job_id} succeeded without a finish of attempt {job.attempt}"
        else:
            assert not is_finished, f"I14: {job.job_id} is {job.state} after a recorded finish"

    @staticmethod
    def _check_budgets(job: Job, story: list[JobIncident]) -> None:
        """I11."""
        spec = job.spec
        if not job.state.terminal:
            assert job.failures <= spec.max_retries, f"I11: {job.job_id} is past its retries"
            assert job.losses <= spec.max_losses, f"I11: {job.job_id} is past its losses"
        assert job.failures <= spec.max_retries + 1, f"I11: {job.job_id}"
        assert job.losses <= spec.max_losses + 1, f"I11: {job.job_id}"
        if job.state in (State.FAILED, State.TIMED_OUT):
            reasons = [incident.reason for incident in story if incident.kind == "dead_lettered"]
            assert reasons, f"I11: {job.job_id} is {job.state} without a story"
            assert all(reasons), f"I11: {job.job_id} is {job.state} without a reason"

    @staticmethod
    def _check_step(earlier: Job, job: Job) -> None:
        """I4: terminal absorbs; only a new generation leaves it, with its budgets whole."""
        assert job.attempt >= earlier.attempt, f"I5: the attempt of {job.job_id} fell"
        assert job.generation >= earlier.generation, f"I4: the generation of {job.job_id} fell"
        if job.generation == earlier.generation:
            assert job.failures >= earlier.failures, f"I11: {job.job_id} got a retry back"
            assert job.losses >= earlier.losses, f"I11: {job.job_id} got a loss back"
            if earlier.state.terminal:
                assert (job.state, job.outcome) == (earlier.state, earlier.outcome), f"I4: {job.job_id} left {earlier.state}"
        elif job.state in READY and job.attempt == earlier.attempt:
            assert (job.failures, job.losses) == (0, 0), f"I4: {job.job_id} was set going again with budgets spent"
