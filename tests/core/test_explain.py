"""Why a job stands where it stands."""

from __future__ import annotations

from typing import Any

import pytest

from tasuki.core.explain import explain
from tasuki.core.job import Incident, Job, JobSpec, Lease, Outcome, State

NOW = 1_700_000_000.0


def job(state: State = State.PENDING, *, subject: str = "render.eu.1", **fields: Any) -> Job:
    spec = JobSpec(job_id="a", subject=subject, not_before=fields.pop("asked_not_before", None))
    return Job(spec=spec, state=state, submitter="token:alice", created_at=NOW - 60, **fields)


def worker(name: str = "w1", *patterns: str, credit: int = 1, running: int = 0) -> dict[str, Any]:
    return {
        "worker_id": name,
        "incarnation": f"{name}-1",
        "patterns": list(patterns or (">",)),
        "credit": credit,
        "running": running,
    }


def lease(worker_id: str = "w1", incarnation: str = "w1-1") -> Lease:
    return Lease("lease", worker_id, incarnation, 1, 100.0)


def told(job: Job, *workers: dict[str, Any], incidents: tuple[Incident, ...] = (), ahead: int | None = 0) -> dict[str, Any]:
    return explain(job, incidents, workers, ahead, NOW)


def because(job: Job, *workers: dict[str, Any], **fields: Any) -> str:
    return " ".join(told(job, *workers, **fields)["because"])


def test_no_worker_at_all() -> None:
    assert "No worker is connected" in because(job())


def test_no_worker_of_this_subject_names_the_nearest_patterns() -> None:
    answer = told(job(), worker("w1", "other.>"), worker("w2", "render.us.*"), worker("w3", "render.eu"))
    assert "No connected worker subscribes to 'render.eu.1'" in answer["because"][0]
    assert answer["facts"]["nearest_patterns"][0] == "render.eu"
    assert answer["facts"]["fitting_workers"] == []


def test_all_workers_that_fit_are_busy() -> None:
    text = because(job(), worker("w1", "render.>", credit=0, running=4), worker("w2", "other.*"), ahead=7)
    assert "All workers that fit are busy: w1 (4 running)" in text
    assert "7 ready job(s)" in text


def test_it_is_about_to_be_leased() -> None:
    answer = told(job(), worker("w1", "render.>"), worker("w2", "render.>", credit=0))
    assert "about to be leased" in answer["because"][0]
    assert answer["facts"]["workers_with_credit"] == ["w1"]


def test_it_waits_for_a_time_that_its_submitter_named() -> None:
    text = because(job(not_before=NOW + 30, asked_not_before=NOW + 30), worker())
    assert "another 30.0 s: its submitter said so" in text


def test_it_waits_for_its_retry_and_why() -> None:
    waiting = job(not_before=NOW + 10, failures=1, attempt=1, outcome=Outcome(error_code="EXIT_CODE", message="exit code 3"))
    assert "another 10.0 s: retry 1 of 3 after exit code 3" in because(waiting, worker())


def test_a_time_that_has_passed_holds_nothing_up() -> None:
    assert "about to be leased" in because(job(not_before=NOW - 1), worker())


@pytest.mark.parametrize(("state", "word"), [(State.ASSIGNED, "was given to"), (State.RUNNING, "runs at")])
def test_it_is_at_a_worker_that_is_connected(state: State, word: str) -> None:
    text = because(job(state, attempt=1, lease=lease()), worker("w1"))
    assert f"It {word} worker w1, which is connected" in text


def test_it_is_at_a_worker_that_is_away_or_was_started_anew() -> None:
    text = because(job(State.RUNNING, attempt=1, lease=lease(incarnation="w1-0")), worker("w1"))
    assert "not connected" in text
    assert "goes to another one" in text


def test_it_was_asked_to_stop() -> None:
    assert "asked to stop" in because(job(State.RUNNING, attempt=1, lease=lease(), cancel_requested=True), worker("w1"))


def test_it_succeeded() -> None:
    ended = job(State.SUCCEEDED, attempt=1, assigned_worker_id="w9", outcome=Outcome(exit_code=0))
    assert because(ended) == "It succeeded in attempt 1 at worker w9."


def test_it_failed_and_how_to_set_it_going_again() -> None:
    text = because(job(State.FAILED, attempt=1, outcome=Outcome(error_code="EXIT_CODE", message="exit code 3")))
    assert "It is FAILED: exit code 3" in text
    assert "tasuki retry a" in text


def test_an_ending_without_a_message_tells_its_code() -> None:
    assert "It is TIMED_OUT: TIMED_OUT" in because(job(State.TIMED_OUT, attempt=1, outcome=Outcome(error_code="TIMED_OUT")))


def test_a_later_attempt_tells_what_became_of_the_one_before() -> None:
    lost = Incident(NOW - 20, "lost", 1, "w1", "", "worker w1 was lost (loss 1 of 3)")
    fenced = Incident(NOW - 5, "fenced", 1, "w1", "", "too late")
    answer = told(job(State.RUNNING, attempt=2, lease=lease()), worker("w1"), incidents=(lost, fenced))
    assert "This is attempt 2: attempt 1 was lost (worker w1 was lost (loss 1 of 3))." in answer["because"]
    assert [entry["kind"] for entry in answer["story"]] == ["lost", "fenced"]


def test_a_job_of_a_restored_store_says_so_instead_of_telling_of_attempts_that_never_were() -> None:
    ended = because(job(State.SUCCEEDED, attempt=2_000_000, assigned_worker_id="w1", outcome=Outcome()))
    assert "It succeeded at worker w1. The store was restored from a backup since; its next attempt is 2000001." in ended
    restored = Incident(NOW - 20, "restored", 3, "w1", "restore", "from a backup")
    again = told(job(State.RUNNING, attempt=1_000_001, lease=lease()), worker("w1"), incidents=(restored,))
    assert "This is attempt 1000001: attempt 3 was restored (from a backup)." in again["because"]


def test_a_job_that_was_set_going_again_says_so() -> None:
    assert "set going again 2 time(s)" in because(job(generation=2), worker())


def test_the_answer_can_be_sent_as_it_is() -> None:
    import msgspec

    incident = Incident(NOW, "lost", 1, "w1", "", "gone")
    answer = told(job(State.RUNNING, attempt=2, lease=lease()), worker("w1"), incidents=(incident,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(answer)) == answer
