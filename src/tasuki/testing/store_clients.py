"""Cases of the store suite for clients: submitters (submit, cancel, requeue), readers, and tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from tasuki.core.apps import DEFAULT_APP, template_of
from tasuki.core.job import BlobRef, InputFile, JobSpec, Outcome, State
from tasuki.core.statistics import COUNTED, GroupCounts
from tasuki.core.store_messages import Canceled, Filter, LeaseStatus, ReportStatus, Requeued, Submitted
from tasuki.core.subject import group_of
from tasuki.errors import Conflict, Unavailable
from tasuki.stores.store import Feature
from tasuki.testing.clocks import FakeClock
from tasuki.testing.store_stage import KEEP, MakeStore, Stage, StoreCase, token_row

TERMINAL_BY_WORKER = ["SUCCEEDED", "FAILED", "TIMED_OUT", "CANCELED"]
SUBJECTS = ["render.eu", template_of(DEFAULT_APP).subject]  # a store may keep the jobs of its app in another way


class SubmitterCases(StoreCase):
    """Cases of submit, cancel and requeue."""

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
            files=(InputFile("in/a.txt", data=b"\x00"), InputFile("b", sha256="0" * 64, size_bytes=3)),
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

        assert stage.submit_again("a") == stage.job("a")

    def test_the_same_body_again_gives_the_stored_outcome_without_the_bytes_of_the_result(self, stage: Stage) -> None:
        stage.finish(stage.running("a"), result=b"42", result_sha256="4" * 64, message="well", meta={"n": 1})

        assert stage.submit_again("a").outcome == Outcome(result_sha256="4" * 64, message="well", meta={"n": 1})
        assert stage.job("a").outcome == Outcome(result=b"42", result_sha256="4" * 64, message="well", meta={"n": 1})

    @pytest.mark.parametrize("outcome", [Outcome(), Outcome(result=b""), Outcome(result_ref=BlobRef("4" * 64, 3))])
    def test_the_same_body_again_tells_what_kind_of_result_there_is(self, stage: Stage, outcome: Outcome) -> None:
        stage.store_blobs("4" * 64)
        stage.finish(stage.running("a"), **msgspec.structs.asdict(outcome))

        told = stage.submit_again("a").outcome

        assert told is not None
        assert (told.result, told.result_ref) == (None, outcome.result_ref)

    def test_headers_priority_and_not_before_are_not_the_body(self, stage: Stage) -> None:
        stage.add("a")

        stage.submit_again("a", headers={"x": "y"}, priority=9, not_before=5.0, max_retries=0, timeout_s=1.0)

        assert stage.job("a").priority == 5
        assert stage.job("a").spec.max_retries == 3

    def test_another_body_is_a_conflict_that_names_the_fields(self, stage: Stage) -> None:
        stage.add("a", args=("1",), payload=b"x")

        answer = stage.submit("a", args=("2",), payload=b"y", max_retries=1)

        assert isinstance(answer, Conflict)
        assert answer.job_id == "a"
        assert sorted(answer.differs) == ["args", "payload"]

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

    def test_rerun_leaves_a_job_alone_that_succeeded_or_runs(self, stage: Stage) -> None:
        stage.ended("succeeded", "SUCCEEDED")
        stage.running("running", max_retries=0)

        for job_id, state in (("succeeded", State.SUCCEEDED), ("running", State.RUNNING)):
            stage.submit(job_id, max_retries=0, on_failed="rerun")
            assert (stage.job(job_id).state, stage.job(job_id).generation) == (state, 0)

    def test_without_rerun_a_failed_job_is_returned_as_it_is(self, stage: Stage) -> None:
        stage.ended("a", "FAILED")

        assert stage.submit_again("a", max_retries=0).state is State.FAILED

    # -- cancel ---------------------------------------------------------------------------------------------------
    def test_cancel_of_a_waiting_job_is_immediate_and_tells_who_and_why(self, stage: Stage) -> None:
        stage.add("a")

        answers = stage.store.cancel(["a"], actor="alice", reason="typo")

        assert answers == [Canceled(State.CANCELED, group="render")]
        assert stage.job("a").state is State.CANCELED
        assert stage.job("a").finished_at == stage.clock.wall()
        assert stage.lease() == []
        [incident] = stage.store.incidents("a")
        assert (incident.kind, incident.actor, incident.reason) == ("canceled", "alice", "typo")
        assert incident.at == stage.clock.wall()

    def test_cancel_of_a_delayed_job_is_immediate(self, stage: Stage) -> None:
        stage.add("a", not_before=stage.clock.wall() + 10)

        stage.store.cancel(["a"], actor="alice")
        stage.clock.advance(20)

        assert stage.promote() == 0
        assert stage.job("a").state is State.CANCELED

    def test_cancel_of_an_orphaned_job_is_immediate_and_fences_its_worker(self, stage: Stage) -> None:
        grant = stage.orphaned("a")

        assert stage.store.cancel(["a"], actor="alice") == [Canceled(State.CANCELED, group="render")]
        assert stage.finish(grant).answer is ReportStatus.FENCED
        assert stage.job("a").state is State.CANCELED

    @pytest.mark.parametrize("state", [State.ASSIGNED, State.RUNNING])
    def test_cancel_of_a_leased_job_is_asked_of_its_worker(self, stage: Stage, state: State) -> None:
        grant = stage.assigned("a", "w7") if state is State.ASSIGNED else stage.running("a", "w7")

        answers = stage.store.cancel(["a"], actor="alice")

        assert answers == [Canceled(state, requested=True, worker_id="w7", lease_id=grant.lease_id)]
        assert (stage.job("a").state, stage.job("a").cancel_requested) == (state, True)
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
        assert [answer.group for answer in answers] == ["", "", "render", ""], "of a job that this cancel has ended"

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
        assert answers == [Requeued(True, State.PENDING, group="render")]
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

        assert stage.store.requeue(["a", "?"], actor="operator") == [
            Requeued(False, State.RUNNING, group="render"), Requeued(False, None),
        ]  # fmt: skip
        assert stage.job("a") == before

    def test_requeue_of_a_generation_that_is_over_does_nothing(self, stage: Stage) -> None:
        stage.ended("a", "SUCCEEDED")
        stage.ended("b", "SUCCEEDED")
        stage.store.requeue(["b"], actor="quicker", generation=0)
        stage.finish(stage.take("b"))
        before = stage.job("b")

        answers = stage.store.requeue(["a", "b"], actor="operator", generation=0)

        assert answers == [
            Requeued(True, State.PENDING, group="render"), Requeued(False, State.SUCCEEDED, group="render"),
        ]  # fmt: skip
        assert stage.job("b") == before
        assert stage.store.requeue(["b"], actor="operator", generation=1) == [Requeued(True, State.PENDING, group="render")]

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


# ---------------------------------------------------------------------------------------------------- readers


class ReaderCases(StoreCase):
    """Cases of get, find, incidents, counts, ready_ahead, blob_owners and tokens."""

    # -- get ------------------------------------------------------------------------------------------------------
    def test_an_unknown_job_is_none_and_has_no_incidents(self, stage: Stage) -> None:
        stage.add("a", "b")

        found = stage.store.get(["b", "?", "a", "b"])

        assert [job.job_id if job is not None else None for job in found] == ["b", None, "a", "b"]
        assert stage.store.incidents("?") == []

    def test_incidents_are_told_in_order_with_their_time(self, stage: Stage) -> None:
        times = [stage.clock.wall() + 1, stage.clock.wall() + 2]
        stage.add("a", backoff_s=0.0)
        for _ in times:
            stage.clock.advance(1)
            stage.fail(stage.take("a", "w1"))

        told = [(incident.kind, incident.at, incident.attempt, incident.worker_id) for incident in stage.store.incidents("a")]
        assert told == [("failed", times[0], 1, "w1"), ("failed", times[1], 2, "w1")]

    # -- find -----------------------------------------------------------------------------------------------------
    def test_find_gives_the_newest_first(self, stage: Stage) -> None:
        stage.add("b")
        stage.add("a")
        stage.add("c")

        assert stage.found() == ["c", "a", "b"]

    def test_find_by_state(self, stage: Stage) -> None:
        stage.ended("failed", "FAILED")
        stage.ended("succeeded", "SUCCEEDED")
        stage.running("running")
        stage.add("pending")

        assert stage.found(states=(State.RUNNING,)) == ["running"]
        assert stage.found(states=(State.SUCCEEDED, State.FAILED)) == ["succeeded", "failed"]

    def test_find_by_subject_pattern(self, stage: Stage) -> None:
        stage.add("1", subject="a.x")
        stage.add("2", subject="a.x.y")
        stage.add("3", subject="ab.x")

        assert stage.found(subject="a.>") == ["2", "1"]
        assert stage.found(subject="*.x") == ["3", "1"]
        assert stage.found(subject="a.x") == ["1"]

    def test_find_by_array(self, stage: Stage) -> None:
        stage.add("1", "2", array_id="array")
        stage.add("3")

        assert stage.found(array_id="array") == ["2", "1"]

    def test_find_by_worker_gives_what_it_has_and_had(self, stage: Stage) -> None:
        stage.finish(stage.running("1", "w1"))
        stage.running("2", "w1")
        stage.running("3", "w2")
        stage.add("4")

        assert stage.found(worker_id="w1") == ["2", "1"]

    def test_find_by_submitter_or_scope(self, stage: Stage) -> None:
        stage.add("1", submitter="alice", subject="a.x")
        stage.add("2", submitter="bob", subject="b.x")
        stage.add("3", submitter="carol", subject="c.x")

        assert stage.found(submitter="alice") == ["1"]
        assert stage.found(submitter="alice", scope=("b.*",)) == ["2", "1"]
        assert stage.found(submitter="nobody", scope=()) == []
        assert stage.found(scope=("b.*", "c.>")) == ["3", "2"]

    def test_find_by_the_time_of_the_submit(self, stage: Stage) -> None:
        times = []
        for number in range(12):
            stage.add(f"job-{number:02}")
            times.append(stage.clock.wall())
            stage.clock.advance(600)

        assert stage.found(created_from=times[9]) == ["job-11", "job-10", "job-09"]
        assert stage.found(created_until=times[2]) == ["job-01", "job-00"]
        assert stage.found(created_from=times[4], created_until=times[6]) == ["job-05", "job-04"]
        assert stage.found(created_from=stage.clock.wall() + 1) == []
        assert stage.found(created_until=times[0] - 1e6) == []

    def test_find_by_all_fields_at_once(self, stage: Stage) -> None:
        stage.running("1", "w1", subject="a.x", array_id="r", submitter="alice")
        stage.running("2", "w1", subject="a.y", array_id="r", submitter="bob")
        stage.add("3", subject="a.z", array_id="r", submitter="alice")

        filters: dict[str, Any] = {
            "states": (State.RUNNING,),
            "subject": "a.*",
            "array_id": "r",
            "worker_id": "w1",
            "submitter": "alice",
        }
        assert stage.found(**filters) == ["1"]

    def test_find_by_text_if_the_store_says_it_can(self, stage: Stage) -> None:
        stage.ended("job-red", "FAILED")
        stage.add("job-blue")
        stage.add("job_100", "job-100")

        can = Feature.FIND_TEXT in stage.store.features
        assert (stage.found(text="blue") == ["job-blue"]) == can
        assert (stage.found(text="it broke") == ["job-red"]) == can
        # No character is a wildcard.
        assert (stage.found(text="b_1") == ["job_100"]) == can
        assert (stage.found(text="%") == []) == can

    def test_pages_miss_nothing_and_repeat_nothing(self, stage: Stage) -> None:
        for number in range(23):
            stage.add(f"job-{number:02}", subject=f"s{number % 3}.x")

        for limit in (1, 4, 23, 50):
            assert stage.found(limit=limit) == [f"job-{number:02}" for number in reversed(range(23))]
            assert stage.found(limit=limit, subject="s1.*") == [f"job-{number:02}" for number in reversed(range(1, 23, 3))]

    def test_paging_goes_on_where_it_was_while_jobs_come_and_go(self, stage: Stage) -> None:
        stage.add(*"abcdef")
        first = stage.store.find(Filter(), limit=2)
        stage.add("new")
        stage.store.cancel(["e"], actor="x")
        stage.store.prune(before=stage.clock.wall() + 1, epoch=stage.epoch)
        rest = stage.store.find(Filter(), limit=10, cursor=first.cursor)

        assert [job.job_id for job in first.jobs] == ["f", "e"]
        assert [job.job_id for job in rest.jobs] == ["d", "c", "b", "a"]

    # -- counts ---------------------------------------------------------------------------------------------------
    def test_counts_tell_where_the_jobs_of_each_group_stand(self, stage: Stage) -> None:
        stage.orphaned("orphaned")
        stage.ended("succeeded", "SUCCEEDED")
        stage.ended("failed", "FAILED")
        stage.ended("timed_out", "TIMED_OUT")
        stage.ended("canceled", "CANCELED")
        stage.add("pending")
        stage.add("delayed", not_before=stage.clock.wall() + 10)
        stage.assigned("assigned")
        stage.running("running")
        stage.add("other", subject="job.submit.calc.1")

        counts = stage.store.counts()

        assert counts["render"] == GroupCounts(pending=2, active=2, orphaned=1, succeeded=1, failed=1, canceled=1, timed_out=1)
        assert counts["calc"] == GroupCounts(pending=1)

    def test_counts_equal_a_recount_after_a_long_history(self, stage: Stage) -> None:
        self._live_a_while(stage)

        recount: dict[str, Counter[str]] = {}
        for job in stage.find_all():
            recount.setdefault(group_of(job.spec.subject), Counter())[COUNTED[job.state]] += 1
        counts = {group: count for group, count in stage.store.counts().items() if count != GroupCounts()}
        assert counts == {group: GroupCounts(**counter) for group, counter in recount.items()}

    def _live_a_while(self, stage: Stage) -> None:
        """Call every verb many times, over three groups; the calls are the same on every run."""
        for step in range(40):
            stage.add(*(f"job-{step}-{n}" for n in range(5)), subject=f"g{step % 3}.x", max_retries=step % 2, max_losses=1)
            grants = stage.lease(limit=4, **(KEEP if step % 4 == 0 else {}))
            for number, grant in enumerate(grants):
                match (number + step) % 5:
                    case 0:
                        stage.finish(grant)
                    case 1:
                        stage.fail(grant, error_code="TIMED_OUT" if step % 3 else "EXIT_CODE")
                    case 2:
                        stage.release(grant)
                    case 3:
                        stage.store.cancel([grant.job_id], actor="x")
                    case _:
                        stage.start(grant)
            stage.store.cancel([f"job-{step}-4"], actor="x")
            stage.store.requeue([f"job-{step - 2}-4", f"job-{step - 3}-0"], actor="x")
            stage.clock.advance(7)
            stage.reap()
            stage.promote()
            if step % 10 == 9:
                stage.store.prune(before=stage.clock.wall() - 100, epoch=stage.epoch, limit=7)

    # -- ready_ahead ----------------------------------------------------------------------------------------------
    def test_ready_ahead_counts_the_older_jobs_of_its_priority_and_subject(self, stage: Stage) -> None:
        stage.add("1", "2", "3")
        stage.add("high", priority=9)
        stage.add("elsewhere", subject="other.x")
        stage.add("delayed", not_before=stage.clock.wall() + 10)
        stage.add("last")

        assert [stage.store.ready_ahead(job_id) for job_id in ("1", "3", "last", "high", "elsewhere")] == [0, 2, 3, 0, 0]
        assert stage.store.ready_ahead("last", limit=2) == 2

    def test_ready_ahead_is_none_for_a_job_that_is_not_ready(self, stage: Stage) -> None:
        stage.running("running")
        stage.ended("ended", "SUCCEEDED")
        stage.add("delayed", not_before=stage.clock.wall() + 10)

        assert [stage.store.ready_ahead(job_id) for job_id in ("running", "ended", "delayed", "?")] == [None] * 4

    def test_the_top_band_is_the_highest_priority_of_which_anything_is_ready(self, stage: Stage) -> None:
        assert stage.store.top_band() is None
        stage.add("low", priority=2)
        stage.add("delayed", priority=9, not_before=stage.clock.wall() + 10)
        stage.running("running", priority=8)

        assert stage.store.top_band() == 2

    def test_ready_ahead_follows_the_leases(self, stage: Stage) -> None:
        stage.add("1", "2", "3")
        stage.lease()

        assert stage.store.ready_ahead("3") == 1

    # -- blob_owners ----------------------------------------------------------------------------------------------
    def test_blob_owners_are_the_jobs_with_this_input_or_result(self, stage: Stage) -> None:
        blob = "ab" * 32
        stage.store_blobs(blob)
        stage.add("input", files=(InputFile("a", sha256=blob, size_bytes=3), InputFile("b", sha256=blob, size_bytes=3)))
        stage.add("inline", files=(InputFile("a", data=b"abc"),))
        stage.finish(stage.running("result"), result_ref=BlobRef(blob, 3), result_sha256=blob)

        assert sorted(stage.store.blob_owners(blob)) == ["input", "result"]
        assert stage.store.blob_owners("cd" * 32) == []
        assert len(stage.store.blob_owners(blob, limit=1)) == 1

    def test_a_pruned_job_owns_no_blob(self, stage: Stage) -> None:
        blob = "ab" * 32
        stage.store_blobs(blob, "cd" * 32)
        stage.add("a", files=(InputFile("a", sha256=blob, size_bytes=3),))
        stage.finish(stage.take("a"), result_ref=BlobRef("cd" * 32, 3))

        stage.store.prune(before=stage.clock.wall() + 1, epoch=stage.epoch)

        assert stage.store.blob_owners(blob) + stage.store.blob_owners("cd" * 32) == []

    # -- ended_among ----------------------------------------------------------------------------------------------
    def test_those_that_ended_or_are_gone_are_told_once_each(self, stage: Stage) -> None:
        stage.orphaned("orphan", subject="kept.x")
        stage.add("waiting")
        stage.running("running")
        stage.ended("done", "SUCCEEDED")
        stage.ended("broken", "FAILED")

        ended = stage.store.ended_among(["waiting", "done", "?", "running", "broken", "orphan", "done"])

        assert ended == ["done", "?", "broken"]
        assert stage.store.ended_among([]) == []

    # -- texts ----------------------------------------------------------------------------------------------------
    def test_a_nul_in_a_text_from_outside_becomes_the_sign_for_what_cannot_be_shown(self, stage: Stage) -> None:
        stage.fail(stage.running("failed", max_retries=0), error_code="EXIT_CODE", message="bro\0ken")
        stage.finish(stage.running("finished"), message="do\0ne", exit_code=0)
        stage.add("canceled")
        stage.store.cancel(["canceled"], actor="alice", reason="no\0 more")
        stage.store.add_token(token_row("t", label="my\0 laptop"))

        messages = [job.outcome.message for job in map(stage.job, ("failed", "finished", "canceled")) if job.outcome]
        assert messages == ["bro\ufffdken", "do\ufffdne", "no\ufffd more"]
        assert "\0" not in "".join(incident.reason for incident in stage.store.incidents("failed"))
        assert [incident.reason for incident in stage.store.incidents("canceled")] == ["no\ufffd more"]
        assert [token.label for token in stage.store.tokens()] == ["my\ufffd laptop"]

    def test_a_nul_where_a_name_should_be_names_nothing(self, stage: Stage) -> None:
        grant = stage.running("a")

        assert stage.store.get(["a\0"]) == [None]
        assert stage.renew(grant, lease_id="\0" * 32) is LeaseStatus.LOST
        assert stage.finish(grant, "w1\0").answer is ReportStatus.FENCED
        assert stage.found(text="a\0") == []
        assert stage.job("a").state is State.RUNNING

    # -- tokens ---------------------------------------------------------------------------------------------------
    def test_those_revoked_or_unknown_are_told(self, stage: Stage) -> None:
        for token_id in ("good", "bad"):
            stage.store.add_token(token_row(token_id, sha256=token_id.ljust(64, "0")))
        stage.store.revoke_token("bad", actor="admin")

        assert stage.store.revoked_among(["good", "bad", "?", "bad"]) == ["bad", "?"]
        assert stage.store.revoked_among([]) == []

    def test_the_audit_tells_who_made_and_revoked_tokens_the_newest_first(self, stage: Stage) -> None:
        stage.store.add_token(token_row("t", created_by="admin", label="laptop"))
        stage.store.add_token(token_row("t", created_by="admin", label="laptop"))
        stage.clock.advance(5)
        stage.store.revoke_token("t", actor="operator")
        stage.store.revoke_token("t", actor="somebody")

        audit = stage.store.audit()

        assert [(row.actor, row.action, row.target) for row in audit] == [
            ("operator", "token.revoke", "t"),
            ("admin", "token.create", "t"),
        ]
        assert [row.at for row in audit] == [stage.clock.wall(), stage.clock.wall() - 5]
        assert "laptop" in audit[1].detail
        assert stage.store.audit(limit=1) == audit[:1]
        assert stage.store.audit(before=audit[0].number) == audit[1:]
        assert stage.store.audit(before=audit[1].number) == []

    def test_the_audit_has_what_somebody_did(self, stage: Stage) -> None:
        stage.store.note("operator", "run.cancel", "job-1", "wrong input")

        [row] = stage.store.audit()

        assert (row.actor, row.action, row.target, row.detail) == ("operator", "run.cancel", "job-1", "wrong input")
        assert row.at == stage.clock.wall()

    def test_a_token_is_found_by_its_hash(self, stage: Stage) -> None:
        scope = ("render.>", "a.*")
        fields = {"kind": "worker", "label": "rack 7", "scope": scope, "worker_id": "w1", "incarnation": "i1"}
        token = token_row("1", **fields, created_at=5.0, created_by="admin", expires_at=9.0)
        stage.store.add_token(token)

        assert stage.store.token("1" * 64) == token
        assert stage.store.token("2" * 64) is None

    def test_tokens_are_listed_oldest_first(self, stage: Stage) -> None:
        for number, token_id in enumerate(["b", "a", "c"]):
            stage.store.add_token(token_row(token_id, created_at=float(number)))

        assert [token.token_id for token in stage.store.tokens()] == ["b", "a", "c"]

    def test_a_token_added_again_is_no_change_and_another_of_its_id_or_hash_is_refused(self, stage: Stage) -> None:
        token = token_row("t", scope=("render.>",))
        same_id, same_hash = token_row("t", sha256="b" * 64), token_row("u", sha256=token.sha256)

        answers = [stage.store.add_token(row) for row in (token, token, same_id, same_hash)]

        assert answers == [True, True, False, False]
        assert stage.store.tokens() == [token]

    def test_a_token_is_revoked_once(self, stage: Stage) -> None:
        stage.store.add_token(token_row("t"))

        answers = [stage.store.revoke_token(token_id, actor="admin") for token_id in ("t", "t", "?")]

        token = stage.store.token("t" * 64)
        assert answers == [True, False, False]
        assert token is not None
        assert (token.revoked_at, token.revoked_by) == (stage.clock.wall(), "admin")

    # -- features -------------------------------------------------------------------------------------------------
    def test_what_was_acked_is_there_after_reopening_if_the_store_says_it_is_durable(
        self, make_store: MakeStore, clock: FakeClock
    ) -> None:
        store = make_store(clock)
        stage = Stage(store, clock)
        grant = stage.running("a", lease={"ttl_s": 15.0})
        stage.ended("b", "FAILED")
        store.add_token(token_row("t"))
        before = (store.get(["a", "b"]), store.incidents("b"), store.counts(), store.tokens())
        store.close()

        reopened = make_store(clock)
        try:
            after = (reopened.get(["a", "b"]), reopened.incidents("b"), reopened.counts(), reopened.tokens())
            assert (after == before) == (Feature.DURABLE in reopened.features)
            if Feature.DURABLE in reopened.features:
                clock.advance(3600)
                # A new owner: a higher epoch, and the running job goes on.
                assert reopened.epoch() == (stage.epoch, "leader-1")
                assert reopened.take_over("leader-2", stage.epoch + 1)
                assert reopened.renew([stage.claim(grant)]) == [LeaseStatus.GO_ON]
        finally:
            reopened.close()

    def test_a_store_says_truly_whether_several_may_use_it(self, stage: Stage, make_store: MakeStore, clock: FakeClock) -> None:
        stage.add("a")

        try:
            other = make_store(clock)
        except Unavailable:
            assert Feature.SHARED not in stage.store.features
            return

        try:
            assert (other.get(["a"]) != [None]) == (Feature.SHARED in other.features)
        finally:
            other.close()
