"""A worker's machine, questions about logs, and the progress that its jobs tell."""

from __future__ import annotations

from tasuki.core.job import Outcome, Progress
from tasuki.core.protocol import PROGRESS_MAX, AssignJobs, Heartbeat, ReadLog
from tasuki.core.worker.events import AttemptEnded, Tail
from tests.core.test_worker_machine import TTL_S, Bench, grant, only, sent


def with_jobs(count: int) -> Bench:
    bench = Bench(capacity=count)
    bench.connect()
    bench.hear(AssignJobs(TTL_S, [grant(f"job{number}") for number in range(count)]))
    return bench


def test_a_question_about_a_log_is_the_drivers() -> None:
    bench = with_jobs(1)
    question = ReadLog(7, "lease-job0-1", "stdout", 10)

    assert only(bench.hear(question), Tail) == [Tail(question)]


def test_progress_travels_with_the_next_heartbeat_once() -> None:
    bench = with_jobs(2)
    bench.machine.progressed("lease-job0-1", Progress(0.1))
    bench.machine.progressed("lease-job0-1", Progress(0.2, "later"))

    first, second = bench.run_answered(TTL_S / 3), bench.run_answered(TTL_S / 3)

    assert [beat.progress for beat in sent(first, Heartbeat)] == [{"lease-job0-1": Progress(0.2, "later")}]
    assert [beat.progress for beat in sent(second, Heartbeat)] == [{}]


def test_another_server_is_told_again() -> None:
    bench = with_jobs(1)
    bench.machine.progressed("lease-job0-1", Progress(0.5))
    bench.run_answered(TTL_S / 3)
    bench.lose()

    [beat] = sent(bench.connect(), Heartbeat)

    assert beat.progress == {"lease-job0-1": Progress(0.5)}


def test_one_heartbeat_tells_only_so_much_and_the_next_one_the_rest() -> None:
    bench = with_jobs(PROGRESS_MAX + 3)
    for number in range(PROGRESS_MAX + 3):
        bench.machine.progressed(f"lease-job{number}-1", Progress(0.5))

    beats = sent([*bench.run_answered(TTL_S / 3), *bench.run_answered(TTL_S / 3)], Heartbeat)

    assert [len(beat.progress) for beat in beats] == [PROGRESS_MAX, 3]
    assert len({lease_id for beat in beats for lease_id in beat.progress}) == PROGRESS_MAX + 3


def test_of_a_job_that_is_not_held_any_more_nothing_is_told() -> None:
    bench = with_jobs(1)
    bench.machine.progressed("lease-job0-1", Progress(0.5))
    bench.do(AttemptEnded("lease-job0-1", Outcome(error_code="LEASE_LOST")))
    bench.machine.progressed("lease-job0-1", Progress(0.9))

    beats = sent(bench.run_answered(TTL_S / 3), Heartbeat)

    assert [beat.progress for beat in beats] == [{}]
