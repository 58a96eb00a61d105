"""What submitters may rely on: submit, cancel, requeue. Part of `tasuki.testing.store_suite`."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tasuki.core.apps import DEFAULT_APP, template_of
from tasuki.core.job import BlobRef, InputFile, JobSpec, Outcome, State
from tasuki.core.store_messages import Canceled, LeaseStatus, ReportStatus, Requeued, Submitted
from tasuki.errors import Conflict
from tasuki.testing.store_stage import Stage, StoreCase

TERMINAL_BY_WORKER = ["SUCCEEDED", "FAILED", "TIMED_OUT", "CANCELED"]
SUBJECTS = ["render.eu", template_of(DEFAULT_APP).subject]  # a store may keep the jobs of its app in another way


class SubmitterCases(StoreCase):
    """submit, cancel, requeue."""

    # -- submit ---------------------------------------------------------------------------------------------------
    def test_a_new_job_is_created_and_pending(self, stage: Stage) -> None:
        answer = stage.submit("a", submitter="alice", priority=7)

        job = stage.job("a")
        assert answer == Submitted("a", created=True, job=None)
        assert (job.state, job.submitter, job.priority) == (State.PENDING, "alice", 7)
        assert (job.attempt, job.generation, job.failures, job.losses, job.lease) == (0, 0, 0, 0, None)
        assert job.created_at == stage.clock.wall()

    def test_the_spec_comes_back_as_it_was_given(self, stage: Stage) -> None:
        spec = JobSpec(
            job_id="a",
            subject="render.日本",
            exec="render",
            args=("--x", "", "ü\n"),
            env={"B": "2", "A": "1"},
            payload=b"\x00\xff" * 50,
            files=(InputFile("in/a.txt", data=b"\x00"), InputFile("b", sha256="0" * 64, size_bytes=1)),
            timeout_s=1.5,
            max_retries=0,
            max_losses=9,
            backoff_s=0.25,
            headers={"note": "x"},
            array_id="array-1",
        )
        stage.store_blobs("0" * 64)

        stage.store.submit([stage.submission("b"), stage.submission("a", **_fields(spec))])

        assert stage.job("a").spec == spec

    def test_the_same_body_again_gives_the_existing_job(self, stage: Stage) -> None:
        stage.add("a")

        answer = stage.submit("a")

        assert isinstance(answer, Submitted)
        assert not answer.created
        assert answer.job == stage.job("a")

    def test_the_same_body_again_gives_the_stored_outcome_without_the_bytes_of_the_result(self, stage: Stage) -> None:
        stage.finish(stage.running("a"), result=b"42", result_sha256="4" * 64, message="well", meta={"n": 1})

        answer = stage.submit("a")

        assert isinstance(answer, Submitted)
        assert answer.job is not None
        assert answer.job.outcome == Outcome(result_sha256="4" * 64, message="well", meta={"n": 1})
        assert stage.job("a").outcome == Outcome(result=b"42", result_sha256="4" * 64, message="well", meta={"n": 1})

    @pytest.mark.parametrize("outcome", [Outcome(), Outcome(result=b""), Outcome(result_ref=BlobRef("4" * 64, 9))])
    def test_the_same_body_again_tells_what_kind_of_result_there_is(self, stage: Stage, outcome: Outcome) -> None:
        stage.store_blobs("4" * 64)
        stage.finish(stage.running("a"), **msgspec.structs.asdict(outcome))

        answer = stage.submit("a")

        assert isinstance(answer, Submitted)
        assert answer.job is not None
        assert answer.job.outcome is not None
        assert (answer.job.outcome.result, answer.job.outcome.result_ref) == (None, outcome.result_ref)

    def test_headers_priority_and_not_before_are_not_the_body(self, stage: Stage) -> None:
        stage.add("a")

        answer = stage.submit("a", headers={"x": "y"}, priority=9, not_before=5.0)

        assert isinstance(answer, Submitted)
        assert not answer.created
        assert stage.job("a").priority == 5

    def test_another_body_is_a_conflict_that_names_the_fields(self, stage: Stage) -> None:
        stage.add("a", args=("1",), payload=b"x")

        answer = stage.submit("a", args=("2",), payload=b"x", max_retries=1)

        assert isinstance(answer, Conflict)
        assert answer.job_id == "a"
        assert sorted(answer.differs) == ["args", "max_retries"]

    def test_a_conflict_never_tells_contents(self, stage: Stage) -> None:
        stage.add("a", env={"PASSWORD": "hunter2"}, args=("first-secret",))

        answer = stage.submit("a", env={"PASSWORD": "correct-horse"}, args=("second-secret",))

        assert isinstance(answer, Conflict)
        told = f"{answer} {answer.details()}"
        assert not [secret for secret in ("hunter2", "correct-horse", "secret") if secret in told]

    def test_a_conflict_changes_nothing(self, stage: Stage) -> None:
        stage.add("a")
        before = stage.job("a")

        stage.submit("a", args=("other",), on_failed="rerun")

        assert stage.job("a") == before

    def test_the_same_job_twice_in_one_batch_is_created_once(self, stage: Stage) -> None:
        one, two = stage.store.submit([stage.submission("a"), stage.submission("a")])

        assert isinstance(one, Submitted)
        assert isinstance(two, Submitted)
        assert (one.created, two.created) == (True, False)
        assert stage.found() == ["a"]

    def test_two_bodies_of_one_id_in_one_batch_conflict(self, stage: Stage) -> None:
        one, two = stage.store.submit([stage.submission("a", args=("1",)), stage.submission("a", args=("2",))])

        assert isinstance(one, Submitted)
        assert isinstance(two, Conflict)
        assert two.differs == ("args",)
        assert stage.job("a").spec.args == ("1",)

    def test_answers_stand_at_the_index_of_their_submission(self, stage: Stage) -> None:
        stage.add("old", "other")

        answers = stage.store.submit(
            [stage.submission("new"), stage.submission("other", exec="x"), stage.submission("old"), stage.submission("newer")]
        )

        told = [answer.created if isinstance(answer, Submitted) else "conflict" for answer in answers]
        assert told == [True, "conflict", False, True]
        assert [answer.job_id for answer in answers] == ["new", "other", "old", "newer"]

    def test_a_batch_may_be_empty(self, stage: Stage) -> None:
        assert stage.store.submit([]) == []

    def test_a_batch_may_be_large(self, stage: Stage) -> None:
        job_ids = [f"job-{number}" for number in range(3000)]

        stage.add(*job_ids)

        assert stage.store.counts()["render"].pending == 3000
        assert [job.job_id for job in stage.store.get(job_ids) if job is not None] == job_ids

    @pytest.mark.parametrize("subject", SUBJECTS)
    def test_the_jobs_of_one_batch_stand_and_are_granted_in_its_order(self, stage: Stage, subject: str) -> None:
        stage.store_blobs("0" * 64)
        plain: dict[str, Any] = {}
        with_blob = {"files": (InputFile("in", sha256="0" * 64, size_bytes=3),)}
        was_delayed, ends = {"not_before": stage.clock.wall() - 1}, {"not_after": stage.clock.wall() + 100}
        batch: dict[str, dict[str, Any]] = dict(
            zip("zyxwvut", (plain, with_blob, plain, was_delayed, plain, ends, plain), strict=True)
        )

        stage.store.submit([stage.submission(job_id, subject=subject, **fields) for job_id, fields in batch.items()])

        assert [stage.store.ready_ahead(job_id) for job_id in batch] == list(range(len(batch)))
        assert [grant.job_id for grant in stage.lease(limit=len(batch))] == list(batch)

    @pytest.mark.parametrize("state", ["FAILED", "TIMED_OUT", "CANCELED"])
    def test_rerun_sets_a_job_that_did_not_succeed_going_again(self, stage: Stage, state: str) -> None:
        stage.ended("a", state)

        answer = stage.submit("a", max_retries=0, on_failed="rerun")

        job = stage.job("a")
        assert isinstance(answer, Submitted)
        assert not answer.created
        assert (job.state, job.generation, job.failures, job.losses) == (State.PENDING, 1, 0, 0)
        assert (job.outcome, job.cancel_requested) == (None, False)
        assert stage.take("a").attempt == 2

    def test_rerun_of_a_succeeded_job_gives_its_result(self, stage: Stage) -> None:
        stage.ended("a", "SUCCEEDED")

        stage.submit("a", max_retries=0, on_failed="rerun")

        assert (stage.job("a").state, stage.job("a").generation) == (State.SUCCEEDED, 0)

    def test_rerun_of_a_running_job_leaves_it_alone(self, stage: Stage) -> None:
        stage.running("a")

        stage.submit("a", on_failed="rerun")

        assert (stage.job("a").state, stage.job("a").generation) == (State.RUNNING, 0)

    def test_without_rerun_a_failed_job_is_returned_as_it_is(self, stage: Stage) -> None:
        stage.ended("a", "FAILED")

        answer = stage.submit("a", max_retries=0)

        assert isinstance(answer, Submitted)
        assert answer.job is not None
        assert answer.job.state is State.FAILED

    # -- cancel ---------------------------------------------------------------------------------------------------
    def test_cancel_of_a_waiting_job_is_immediate(self, stage: Stage) -> None:
        stage.add("a")

        answers = stage.store.cancel(["a"], actor="alice", reason="typo")

        assert answers == [Canceled(State.CANCELED)]
        assert stage.job("a").state is State.CANCELED
        assert stage.job("a").finished_at == stage.clock.wall()
        assert stage.lease() == []

    def test_cancel_tells_who_and_why(self, stage: Stage) -> None:
        stage.add("a")

        stage.store.cancel(["a"], actor="alice", reason="typo")

        [incident] = stage.store.incidents("a")
        assert (incident.kind, incident.actor, incident.reason) == ("canceled", "alice", "typo")
        assert incident.at == stage.clock.wall()

    def test_cancel_of_a_delayed_job_is_immediate(self, stage: Stage) -> None:
        stage.add("a", not_before=stage.clock.wall() + 10)

        stage.store.cancel(["a"], actor="alice")
        stage.clock.advance(20)

        assert stage.promote() == []
        assert stage.job("a").state is State.CANCELED

    def test_cancel_of_an_orphaned_job_is_immediate_and_fences_its_worker(self, stage: Stage) -> None:
        grant = stage.orphaned("a")

        assert stage.store.cancel(["a"], actor="alice") == [Canceled(State.CANCELED)]
        assert stage.finish(grant).answer is ReportStatus.FENCED
        assert stage.job("a").state is State.CANCELED

    def test_cancel_of_an_assigned_job_is_asked_of_its_worker(self, stage: Stage) -> None:
        grant = stage.assigned("a", "w7")

        answers = stage.store.cancel(["a"], actor="alice")

        assert answers == [Canceled(State.ASSIGNED, requested=True, worker_id="w7", lease_id=grant.lease_id)]
        assert (stage.job("a").state, stage.job("a").cancel_requested) == (State.ASSIGNED, True)

    def test_cancel_of_a_running_job_is_asked_of_its_worker(self, stage: Stage) -> None:
        grant = stage.running("a", "w7")

        answers = stage.store.cancel(["a"], actor="alice")

        assert answers == [Canceled(State.RUNNING, requested=True, worker_id="w7", lease_id=grant.lease_id)]
        assert stage.kinds("a") == ["cancel_requested"]

    def test_a_second_cancel_asks_again_but_is_told_once(self, stage: Stage) -> None:
        stage.running("a")

        first = stage.store.cancel(["a"], actor="alice")
        second = stage.store.cancel(["a"], actor="bob")

        assert first == second
        assert stage.kinds("a") == ["cancel_requested"]

    @pytest.mark.parametrize("state", TERMINAL_BY_WORKER)
    def test_cancel_of_a_terminal_job_tells_its_state(self, stage: Stage, state: str) -> None:
        stage.ended("a", state)
        before = stage.job("a")

        assert stage.store.cancel(["a"], actor="alice") == [Canceled(State(state))]
        assert stage.job("a") == before

    def test_cancel_answers_index_by_index(self, stage: Stage) -> None:
        stage.add("a")
        stage.running("b")

        answers = stage.store.cancel(["?", "b", "a", "a"], actor="alice")

        assert [answer.state for answer in answers] == [None, State.RUNNING, State.CANCELED, State.CANCELED]
        assert [answer.requested for answer in answers] == [False, True, False, False]

    def test_renew_and_start_tell_the_worker_of_a_cancel(self, stage: Stage) -> None:
        grant = stage.assigned("a")
        stage.store.cancel(["a"], actor="alice")

        assert stage.renew(grant) is LeaseStatus.CANCEL
        assert stage.start(grant) is LeaseStatus.CANCEL

    def test_a_finish_wins_over_a_cancel_request(self, stage: Stage) -> None:
        grant = stage.running("a")
        stage.store.cancel(["a"], actor="alice")

        answer = stage.finish(grant)

        assert (answer.answer, answer.state) == (ReportStatus.RECORDED, State.SUCCEEDED)
        assert stage.job("a").state is State.SUCCEEDED

    @pytest.mark.parametrize("error_code", ["CANCELED", "EXIT_CODE"])
    def test_a_failure_after_a_cancel_request_is_a_cancel_not_a_retry(self, stage: Stage, error_code: str) -> None:
        grant = stage.running("a", max_retries=3)
        stage.store.cancel(["a"], actor="alice")

        answer = stage.fail(grant, error_code=error_code)

        assert (answer.answer, answer.state) == (ReportStatus.RECORDED, State.CANCELED)
        assert (stage.job("a").state, stage.job("a").failures) == (State.CANCELED, 0)
        assert stage.kinds("a") == ["cancel_requested", "canceled"]

    def test_reaping_after_a_cancel_request_is_a_cancel_not_a_loss(self, stage: Stage) -> None:
        stage.running("a")
        stage.store.cancel(["a"], actor="alice")

        [reaped] = stage.lose()

        assert reaped.state is State.CANCELED
        assert (stage.job("a").state, stage.job("a").losses) == (State.CANCELED, 0)

    def test_release_after_a_cancel_request_is_a_cancel(self, stage: Stage) -> None:
        grant = stage.assigned("a")
        stage.store.cancel(["a"], actor="alice")

        assert stage.release(grant)
        assert stage.job("a").state is State.CANCELED

    # -- requeue --------------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("state", TERMINAL_BY_WORKER)
    def test_requeue_sets_a_terminal_job_going_again(self, stage: Stage, state: str) -> None:
        stage.ended("a", state)

        answers = stage.store.requeue(["a"], actor="operator")

        job = stage.job("a")
        assert answers == [Requeued(True, State.PENDING)]
        assert (job.state, job.generation, job.failures, job.losses, job.attempt) == (State.PENDING, 1, 0, 0, 1)
        assert (job.lease, job.outcome, job.finished_at, job.cancel_requested) == (None, None, None, False)
        assert stage.take("a").attempt == 2

    def test_requeue_gives_both_budgets_again(self, stage: Stage) -> None:
        stage.running("a", max_retries=1, max_losses=1, backoff_s=0.0)
        stage.lose()
        stage.fail(stage.take("a"))
        stage.fail(stage.take("a"))
        assert (stage.job("a").state, stage.job("a").losses) == (State.FAILED, 1)

        stage.store.requeue(["a"], actor="operator")
        stage.take("a")
        stage.lose()
        answer = stage.fail(stage.take("a"))

        assert answer.state is State.PENDING

    def test_requeue_keeps_the_old_outcome_in_the_story(self, stage: Stage) -> None:
        stage.ended("a", "FAILED")

        stage.store.requeue(["a"], actor="operator", reason="fixed the disk")

        incident = stage.store.incidents("a")[-1]
        assert (incident.kind, incident.actor) == ("requeued", "operator")
        assert "fixed the disk" in incident.reason
        assert "it broke" in " ".join(incident.reason for incident in stage.store.incidents("a"))

    def test_requeue_of_a_job_that_is_not_terminal_does_nothing(self, stage: Stage) -> None:
        stage.running("a")
        before = stage.job("a")

        assert stage.store.requeue(["a", "?"], actor="operator") == [Requeued(False, State.RUNNING), Requeued(False, None)]
        assert stage.job("a") == before

    def test_requeue_of_a_generation_that_is_over_does_nothing(self, stage: Stage) -> None:
        stage.ended("a", "SUCCEEDED")
        stage.ended("b", "SUCCEEDED")
        stage.store.requeue(["b"], actor="quicker", generation=0)
        stage.finish(stage.take("b"))
        before = stage.job("b")

        answers = stage.store.requeue(["a", "b"], actor="operator", generation=0)

        assert answers == [Requeued(True, State.PENDING), Requeued(False, State.SUCCEEDED)]
        assert stage.job("b") == before
        assert stage.store.requeue(["b"], actor="operator", generation=1) == [Requeued(True, State.PENDING)]

    def test_a_report_from_before_the_requeue_is_fenced(self, stage: Stage) -> None:
        grant = stage.ended("a", "FAILED")
        stage.store.requeue(["a"], actor="operator")

        assert stage.finish(grant).answer is ReportStatus.FENCED
        assert stage.job("a").state is State.PENDING

    def test_requeue_does_not_start_a_job_before_its_time(self, stage: Stage) -> None:
        stage.add("a", not_before=stage.clock.wall() + 100)
        stage.store.cancel(["a"], actor="alice")

        stage.store.requeue(["a"], actor="alice")

        assert stage.lease() == []
        stage.clock.advance(101)
        stage.promote()
        assert [grant.job_id for grant in stage.lease()] == ["a"]


def _fields(spec: JobSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__struct_fields__ if name != "job_id"}
