"""Cases of the store suite for reports: finish and fail, fencing, repeats, budgets and delays."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from tasuki.core.job import HANDLER_BACKOFF_S, BlobRef, Outcome, State
from tasuki.core.store_messages import Report, ReportStatus
from tasuki.testing.store_stage import PAST_LEASE_S, Stage, StoreCase

WRONG_FIELDS = [{"worker_id": "w2"}, {"lease_id": "0" * 32}, {"attempt": 0}, {"attempt": 2}, {"job_id": "b"}]


class ReportCases(StoreCase):
    """Cases of finish and fail."""

    # -- finish ---------------------------------------------------------------------------------------------------
    def test_finish_records_the_outcome(self, stage: Stage) -> None:
        grant = stage.running("a")
        outcome = Outcome(
            exit_code=0,
            message="done",
            result=b"\x00\xff",
            result_sha256=hashlib.sha256(b"\x00\xff").hexdigest(),
            meta={"host": "n1", "list": [1, 2.5, None]},
        )
        stage.clock.advance(3)

        [answer] = stage.store.finish([msgspec.structs.replace(stage.report(grant), outcome=outcome)])

        job = stage.job("a")
        assert (answer.answer, answer.state) == (ReportStatus.RECORDED, State.SUCCEEDED)
        assert (job.state, job.outcome, job.lease) == (State.SUCCEEDED, outcome, None)
        assert (job.finished_at, job.assigned_worker_id) == (stage.clock.wall(), "w1")

    def test_finish_keeps_the_reference_to_a_large_result(self, stage: Stage) -> None:
        grant = stage.running("a")
        reference = BlobRef("a" * 64, 1 << 40)
        stage.store_blobs("a" * 64, size_bytes=1 << 40)

        stage.finish(grant, result_ref=reference, result_sha256="a" * 64)

        outcome = stage.job("a").outcome
        assert outcome is not None
        assert (outcome.result, outcome.result_ref) == (None, reference)

    def test_an_empty_result_is_not_no_result(self, stage: Stage) -> None:
        empty, none = stage.running("a"), stage.running("b")

        stage.finish(empty, result=b"")
        stage.finish(none)

        results = [job.outcome.result for job in stage.store.get(["a", "b"]) if job is not None and job.outcome is not None]
        assert results == [b"", None]

    def test_an_attempt_that_was_never_reported_as_started_may_finish(self, stage: Stage) -> None:
        grant = stage.assigned("a")
        report = msgspec.structs.replace(stage.report(grant), started_at=1_700_000_000.5)

        [answer] = stage.store.finish([report])

        assert answer.state is State.SUCCEEDED
        assert stage.job("a").started_at == 1_700_000_000.5

    def test_an_expired_lease_that_nobody_ended_may_finish(self, stage: Stage) -> None:
        grant = stage.running("a")
        stage.clock.advance(PAST_LEASE_S)

        assert stage.finish(grant).answer is ReportStatus.RECORDED
        assert stage.reap() == []

    def test_a_job_without_trouble_has_no_incidents(self, stage: Stage) -> None:
        stage.finish(stage.running("a"))

        assert stage.store.incidents("a") == []

    def test_answers_stand_at_the_index_of_their_report(self, stage: Stage) -> None:
        a, b, c = (stage.running(job_id) for job_id in "abc")
        stage.finish(b)
        unknown = msgspec.structs.replace(stage.report(a), job_id="?")
        wrong = msgspec.structs.replace(stage.report(c), attempt=7)

        answers = stage.store.finish([wrong, stage.report(a), unknown, stage.report(b), stage.report(c)])

        told = [ReportStatus.FENCED, ReportStatus.RECORDED, ReportStatus.FENCED, ReportStatus.REPEATED, ReportStatus.RECORDED]
        assert [answer.answer for answer in answers] == told
        done = State.SUCCEEDED
        assert [answer.state for answer in answers] == [State.RUNNING, done, None, done, done]

    def test_a_large_batch_is_answered_whole(self, stage: Stage) -> None:
        stage.add(*(f"job-{number}" for number in range(1200)))
        grants = stage.lease(limit=1200)

        answers = stage.store.finish([stage.report(grant) for grant in grants])

        assert [answer.answer for answer in answers] == [ReportStatus.RECORDED] * 1200
        assert stage.store.counts()["render"].succeeded == 1200

    # -- fencing --------------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("verb", ["finish", "fail"])
    @pytest.mark.parametrize("wrong", WRONG_FIELDS, ids=str)
    def test_a_report_with_a_wrong_field_is_fenced(self, stage: Stage, verb: str, wrong: dict[str, object]) -> None:
        grant = stage.running("a")
        stage.add("b")
        before = stage.job("a")

        [answer] = getattr(stage.store, verb)([msgspec.structs.replace(stage.report(grant), **wrong)])

        assert answer.answer is ReportStatus.FENCED
        assert answer.reason
        assert stage.job("a") == before
        assert stage.job("b").state is State.PENDING

    @pytest.mark.parametrize("verb", ["finish", "fail"])
    def test_a_report_on_an_unknown_job_is_fenced(self, stage: Stage, verb: str) -> None:
        grant = msgspec.structs.replace(stage.running("a"), job_id="?")

        [answer] = getattr(stage.store, verb)([stage.report(grant)])

        assert (answer.answer, answer.state) == (ReportStatus.FENCED, None)

    @pytest.mark.parametrize("verb", ["finish", "fail"])
    def test_a_report_after_reaping_is_fenced(self, stage: Stage, verb: str) -> None:
        grant = stage.running("a")
        stage.lose()

        [answer] = getattr(stage.store, verb)([stage.report(grant)])

        assert (answer.answer, answer.state) == (ReportStatus.FENCED, State.PENDING)
        assert (stage.job("a").state, stage.job("a").outcome, stage.job("a").failures) == (State.PENDING, None, 0)

    def test_a_report_after_the_next_grant_is_fenced(self, stage: Stage) -> None:
        old = stage.running("a", "w1")
        stage.lose()
        new = stage.take("a", "w2")

        assert stage.finish(old, result=b"old").answer is ReportStatus.FENCED
        assert stage.finish(new, "w2", result=b"new").answer is ReportStatus.RECORDED
        assert stage.finish(old, result=b"old").answer is ReportStatus.FENCED
        outcome = stage.job("a").outcome
        assert outcome is not None
        assert outcome.result == b"new"

    def test_the_same_worker_is_fenced_from_its_own_older_attempt(self, stage: Stage) -> None:
        old = stage.running("a", "w1")
        stage.lose()
        new = stage.take("a", "w1")

        assert stage.finish(old).answer is ReportStatus.FENCED
        assert stage.finish(new).answer is ReportStatus.RECORDED

    def test_a_fenced_report_is_part_of_the_story(self, stage: Stage) -> None:
        grant = stage.running("a", "w1")
        stage.lose()

        stage.finish(grant)

        incident = stage.store.incidents("a")[-1]
        assert (incident.kind, incident.worker_id, incident.attempt) == ("fenced", "w1", 1)

    def test_the_fenced_reports_of_one_attempt_are_one_incident(self, stage: Stage) -> None:
        old = stage.running("a", "w1")
        stage.lose()
        stage.take("a", "w2")

        for _ in range(3):
            reports = [Report("a", "w1", old.lease_id, old.attempt, Outcome(exit_code=code)) for code in range(5)]
            assert {answer.answer for answer in stage.store.finish(reports)} == {ReportStatus.FENCED}

        assert [incident.kind for incident in stage.store.incidents("a")].count("fenced") == 1

    def test_a_report_of_somebody_who_never_had_the_job_is_no_part_of_its_story(self, stage: Stage) -> None:
        grant = stage.running("a", "w1")
        stage.lose()
        stage.take("a", "w2")
        before = stage.store.incidents("a")

        strangers = [Report("a", "w3", f"lease-{n}", n, Outcome(error_code="X")) for n in (0, 1, 2, 3, 2**40)]
        strangers.append(Report("a", "w3", grant.lease_id, grant.attempt, Outcome(error_code="X")))

        assert {answer.answer for answer in stage.store.fail(strangers)} == {ReportStatus.FENCED}
        assert stage.store.incidents("a") == before

    def test_an_orphan_may_finish_until_the_next_grant(self, stage: Stage) -> None:
        grant = stage.orphaned("a")

        assert stage.finish(grant).answer is ReportStatus.RECORDED
        assert stage.job("a").state is State.SUCCEEDED
        assert stage.lease() == []

    def test_an_orphan_may_fail_until_the_next_grant(self, stage: Stage) -> None:
        grant = stage.orphaned("a", max_retries=1)

        answer = stage.fail(grant)

        assert (answer.answer, answer.state) == (ReportStatus.RECORDED, State.PENDING)
        assert (stage.job("a").failures, stage.job("a").losses) == (1, 1)

    def test_an_orphan_is_fenced_after_the_next_grant(self, stage: Stage) -> None:
        old = stage.orphaned("a", "w1")
        new = stage.take("a", "w2")

        assert stage.finish(old).answer is ReportStatus.FENCED
        assert stage.finish(new, "w2").answer is ReportStatus.RECORDED

    # -- repeats --------------------------------------------------------------------------------------------------
    def test_an_exact_repeat_of_a_finish_gives_the_stored_answer(self, stage: Stage) -> None:
        grant = stage.running("a")
        stage.finish(grant, result=b"1", result_sha256="1" * 64)
        before = stage.job("a")
        stage.clock.advance(5)

        answer = stage.finish(grant, result=b"1", result_sha256="1" * 64)

        assert (answer.answer, answer.state) == (ReportStatus.REPEATED, State.SUCCEEDED)
        assert stage.job("a") == before
        assert stage.store.incidents("a") == []

    def test_an_exact_repeat_in_the_same_batch_is_recorded_once(self, stage: Stage) -> None:
        report = stage.report(stage.running("a"))

        answers = stage.store.finish([report, report])

        assert [answer.answer for answer in answers] == [ReportStatus.RECORDED, ReportStatus.REPEATED]

    def test_a_finish_with_another_result_is_fenced(self, stage: Stage) -> None:
        grant = stage.running("a")
        stage.finish(grant, result=b"1", result_sha256="1" * 64)

        answer = stage.finish(grant, result=b"2", result_sha256="2" * 64)

        assert (answer.answer, answer.state) == (ReportStatus.FENCED, State.SUCCEEDED)
        outcome = stage.job("a").outcome
        assert outcome is not None
        assert outcome.result == b"1"

    def test_a_report_after_another_kind_of_report_is_fenced(self, stage: Stage) -> None:
        finished, failed = stage.running("finished"), stage.running("failed")
        stage.finish(finished)
        stage.fail(failed)

        assert (stage.fail(finished).answer, stage.finish(failed).answer) == (ReportStatus.FENCED, ReportStatus.FENCED)
        assert (stage.job("finished").state, stage.job("failed").state) == (State.SUCCEEDED, State.PENDING)

    def test_an_exact_repeat_of_a_fail_uses_no_second_retry(self, stage: Stage) -> None:
        grant = stage.running("a", max_retries=3)
        stage.fail(grant, exit_code=1)
        before = stage.job("a")

        answer = stage.fail(grant, exit_code=1)

        assert (answer.answer, answer.state) == (ReportStatus.REPEATED, State.PENDING)
        assert stage.job("a") == before
        assert stage.job("a").failures == 1

    def test_an_exact_repeat_of_the_last_fail_gives_the_stored_answer(self, stage: Stage) -> None:
        grant = stage.running("a", max_retries=0)
        stage.fail(grant, exit_code=1)

        answer = stage.fail(grant, exit_code=1)

        assert (answer.answer, answer.state) == (ReportStatus.REPEATED, State.FAILED)

    def test_a_fail_with_another_ending_is_fenced(self, stage: Stage) -> None:
        grant = stage.running("a", max_retries=3)
        stage.fail(grant, exit_code=1)

        assert stage.fail(grant, exit_code=2).answer is ReportStatus.FENCED
        assert stage.job("a").failures == 1

    def test_an_exact_repeat_of_a_finish_is_known_though_a_cancel_once_replaced_a_failure(self, stage: Stage) -> None:
        stage.fail(stage.running("a", max_retries=1, backoff_s=0.0))
        stage.store.cancel(["a"], actor="alice")
        stage.store.requeue(["a"], actor="alice")
        grant = stage.take("a")

        answers = [stage.finish(grant, exit_code=0, result=b"42", result_sha256="4" * 64) for _ in range(2)]

        assert [answer.answer for answer in answers] == [ReportStatus.RECORDED, ReportStatus.REPEATED]

    def test_a_repeat_is_forgotten_with_the_next_grant(self, stage: Stage) -> None:
        grant = stage.running("a", backoff_s=0.0)
        stage.fail(grant, exit_code=1)
        stage.take("a", "w2")

        assert stage.fail(grant, exit_code=1).answer is ReportStatus.FENCED
        assert stage.job("a").state is State.ASSIGNED

    # -- budgets and delays ---------------------------------------------------------------------------------------
    def test_a_failure_with_a_retry_left_waits_out_its_delay(self, stage: Stage) -> None:
        answer = stage.fail(stage.running("a", max_retries=1), message="no route")

        job = stage.job("a")
        assert (answer.answer, answer.state) == (ReportStatus.RECORDED, State.PENDING)
        assert (job.state, job.failures, job.lease, job.finished_at) == (State.PENDING, 1, None, None)
        assert job.not_before == stage.clock.wall() + HANDLER_BACKOFF_S
        assert job.outcome is not None
        assert job.outcome.message == "no route"
        assert stage.kinds("a") == ["failed"]

    def test_the_delays_double_and_are_capped(self, stage: Stage) -> None:
        stage.add("a", max_retries=7, backoff_s=10.0)
        delays = []
        for _ in range(7):
            stage.fail(stage.take("a"))
            not_before = stage.job("a").not_before
            assert not_before is not None
            delays.append(not_before - stage.clock.wall())
            stage.clock.advance(delays[-1])
            stage.promote()

        assert delays == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]

    @pytest.mark.parametrize(("exec_", "delay_s"), [("", 1.0), ("program", 10.0)])
    def test_without_a_backoff_of_its_own_a_job_has_that_of_its_kind(self, stage: Stage, exec_: str, delay_s: float) -> None:
        stage.fail(stage.running("a", exec=exec_))

        assert stage.job("a").not_before == stage.clock.wall() + delay_s

    def test_a_failure_may_name_the_delay_of_its_retry(self, stage: Stage) -> None:
        answer = stage.fail(stage.running("a", max_retries=1), message="later", retry_in_s=3600.0)

        job = stage.job("a")
        assert (answer.state, answer.reason) == (State.PENDING, "later; retry 1 of 1 in 3600 s")
        assert (job.not_before, job.failures) == (stage.clock.wall() + 3600.0, 1)
        assert job.outcome == Outcome(error_code="EXIT_CODE", message="later")

    def test_a_failure_that_asks_for_no_delay_is_ready_at_once(self, stage: Stage) -> None:
        stage.fail(stage.running("a", backoff_s=60.0), retry_in_s=0.0)

        assert [grant.attempt for grant in stage.lease()] == [2]

    def test_without_backoff_a_retry_is_ready_at_once(self, stage: Stage) -> None:
        stage.fail(stage.running("a", backoff_s=0.0))

        assert [grant.attempt for grant in stage.lease()] == [2]

    def test_a_spent_retry_budget_dead_letters_the_job(self, stage: Stage) -> None:
        stage.add("a", max_retries=2, backoff_s=0.0)

        answers = [stage.fail(stage.take("a"), message="disk on fire") for _ in range(3)]

        assert [answer.state for answer in answers] == [State.PENDING, State.PENDING, State.FAILED]
        incident = stage.store.incidents("a")[-1]
        assert stage.kinds("a") == ["failed", "failed", "dead_lettered"]
        assert "disk on fire" in incident.reason
        assert stage.job("a").finished_at == stage.clock.wall()
        assert stage.lease() == []

    def test_a_permanent_failure_is_not_retried(self, stage: Stage) -> None:
        answer = stage.fail(stage.running("a", max_retries=3), error_code="EXEC_NOT_ALLOWED", permanent=True)

        assert answer.state is State.FAILED
        assert stage.job("a").state is State.FAILED

    def test_a_time_out_is_retried_like_a_failure(self, stage: Stage) -> None:
        stage.add("a", max_retries=1, backoff_s=0.0)

        answers = [stage.fail(stage.take("a"), error_code="TIMED_OUT") for _ in range(2)]

        assert [answer.state for answer in answers] == [State.PENDING, State.TIMED_OUT]
        assert stage.job("a").state is State.TIMED_OUT

    def test_failures_use_no_losses_and_losses_no_failures(self, stage: Stage) -> None:
        stage.running("a", max_retries=1, max_losses=1, backoff_s=0.0)
        stage.lose()
        stage.fail(stage.take("a"))

        assert (stage.job("a").failures, stage.job("a").losses) == (1, 1)
        assert stage.job("a").state is State.PENDING
