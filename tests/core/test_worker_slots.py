"""A worker whose attempts are short asks for some ahead, tells of several ends at once, and gives back what it cannot run."""

from __future__ import annotations

import pytest

from tasuki.core.job import Outcome
from tasuki.core.protocol import (
    CancelLeases,
    GiveCredit,
    Heartbeat,
    JobsFinished,
    JobsRecorded,
    JobsReleased,
    JobsStarted,
)
from tasuki.core.worker.events import AttemptEnded, AttemptReturned, Drain, Exit, Forget, Run, Started, Stop
from tasuki.core.worker.machine import AHEAD_PER_SLOT, AHEAD_WAIT_S, SHORT_S, STARTED_AFTER_S, TOGETHER_S
from tests.core.worker_bench import TTL_S, Bench, assign, grant, only, sent

DONE = Outcome(exit_code=0)


def run_of(commands: list[object]) -> list[str]:
    return [command.grant.job_id for command in only(commands, Run)]


def end(bench: Bench, job_id: str, *, after_s: float = 0.001) -> list[object]:
    bench.time += after_s
    return bench.do(AttemptEnded(f"lease-{job_id}-1", DONE))


@pytest.fixture
def bench() -> Bench:
    """One place, up to two ahead; attempts have been short, so that it has credit for three."""
    bench = Bench(capacity=1, ahead=2)
    bench.answer_beats(bench.connect())
    bench.hear(assign(grant("first")))
    assert sent(end(bench, "first"), GiveCredit) == [GiveCredit(3)]
    return bench


def test_before_its_attempts_were_short_it_asks_for_its_places_only() -> None:
    bench = Bench(capacity=2, ahead=8)

    assert sent(bench.connect(), GiveCredit) == [GiveCredit(2)]


def test_after_long_attempts_it_asks_for_its_places_only() -> None:
    bench = Bench(capacity=1, ahead=2)
    bench.connect()
    bench.hear(assign(grant("long")))

    assert sent(end(bench, "long", after_s=2 * SHORT_S), GiveCredit) == [GiveCredit(1)]


@pytest.mark.parametrize(("after_s", "ahead"), [(SHORT_S / 2, AHEAD_PER_SLOT), (SHORT_S / 10, 10), (0.001, 32)])
def test_the_shorter_its_attempts_the_more_it_asks_for_ahead_up_to_its_limit(after_s: float, ahead: int) -> None:
    bench = Bench(capacity=1, ahead=32)
    bench.answer_beats(bench.connect())
    given = [1]
    for number in range(80):  # the average is near the latest ones
        bench.hear(assign(grant(f"job-{number}")))
        given += [given_now.credit for given_now in sent(end(bench, f"job-{number}", after_s=after_s), GiveCredit)]

    assert sum(given) - 80 == pytest.approx(1 + ahead, abs=1)


def test_what_is_here_ahead_of_its_time_runs_when_a_place_is_free(bench: Bench) -> None:
    assert run_of(bench.hear(assign(grant("a"), grant("b"), grant("c")))) == ["a"]

    assert run_of(end(bench, "a")) == ["b"]
    assert run_of(end(bench, "b")) == ["c"]


def test_ends_are_told_together_while_there_is_a_next_attempt(bench: Bench) -> None:
    bench.hear(assign(grant("a"), grant("b"), grant("c")))

    assert sent(end(bench, "a"), JobsFinished) == []
    assert bench.machine.flush_at == pytest.approx(bench.time + TOGETHER_S)
    commands = end(bench, "b")  # now nothing waits behind c

    [finished] = sent(commands, JobsFinished)
    assert [ending.job_id for ending in finished.endings] == ["a", "b"]
    assert sent(commands, GiveCredit) == [GiveCredit(2)]
    assert bench.machine.flush_at is None


def test_an_end_is_told_after_a_moment_even_if_nothing_else_ends(bench: Bench) -> None:
    bench.hear(assign(grant("a"), grant("b"), grant("c")))
    end(bench, "a")

    bench.time += TOGETHER_S
    [finished] = sent(bench.machine.flush(bench.now), JobsFinished)

    assert [ending.job_id for ending in finished.endings] == ["a"]


def test_a_heartbeat_that_is_due_takes_what_ended_with_it(bench: Bench) -> None:
    bench.hear(assign(grant("a"), grant("b"), grant("c")))

    commands = end(bench, "a", after_s=TTL_S / 3)

    assert len(sent(commands, JobsFinished)) == 1
    assert len(sent(commands, Heartbeat)) == 1


def test_what_waits_here_too_long_is_given_back_and_no_more_is_asked_for(bench: Bench) -> None:
    bench.hear(assign(grant("a"), grant("b"), grant("c")))

    commands = bench.after(AHEAD_WAIT_S)

    [released] = sent(commands, JobsReleased)
    assert [claim.job_id for claim in released.claims] == ["b", "c"]
    assert sent(commands, GiveCredit) == []
    assert sent(end(bench, "a"), GiveCredit) == [GiveCredit(1)]


def test_a_cancel_of_what_waits_gives_it_back(bench: Bench) -> None:
    bench.hear(assign(grant("a"), grant("b"), grant("c")))

    commands = bench.hear(CancelLeases(["lease-b-1"]))

    assert only(commands, Stop) == []
    assert [claim.job_id for message in sent(commands, JobsReleased) for claim in message.claims] == ["b"]
    assert run_of(end(bench, "a")) == ["c"]


def test_what_waits_and_is_lost_never_runs(bench: Bench) -> None:
    bench.time += TTL_S / 3
    commands = bench.hear(assign(grant("a"), grant("b")))

    bench.answer_beats(commands, lost=["lease-b-1"])

    assert sent(commands, Heartbeat)
    assert run_of(end(bench, "a")) == []


def test_a_drain_gives_back_what_waits(bench: Bench) -> None:
    bench.hear(assign(grant("a"), grant("b"), grant("c")))

    commands = bench.do(Drain())

    assert [claim.job_id for message in sent(commands, JobsReleased) for claim in message.claims] == ["b", "c"]
    assert only(commands, Exit) == []
    assert run_of(end(bench, "a")) == []


def test_the_place_of_what_could_not_be_started_goes_to_the_next(bench: Bench) -> None:
    bench.hear(assign(grant("a"), grant("b")))

    commands = bench.do(AttemptReturned("lease-a-1"))

    assert run_of(commands) == ["b"]
    assert only(commands, Forget) == [Forget("lease-a-1")]


def test_after_a_reconnect_what_waits_counts_as_asked_for(bench: Bench) -> None:
    bench.hear(assign(grant("a"), grant("b")))
    bench.lose()

    commands = bench.connect()

    [beat] = sent(commands, Heartbeat)
    assert [claim.job_id for claim in beat.claims] == ["first", "a", "b"]
    assert sent(commands, GiveCredit) == [GiveCredit(1)]


def test_a_short_attempt_is_not_told_to_have_started_and_one_that_lasts_is(bench: Bench) -> None:
    bench.hear(assign(grant("a")))

    assert sent(bench.do(Started("lease-a-1")), JobsStarted) == []
    assert [claim.job_id for message in sent(bench.after(STARTED_AFTER_S), JobsStarted) for claim in message.claims] == ["a"]


def test_credit_never_exceeds_places_and_what_may_be_ahead(bench: Bench) -> None:
    """In any order of assignments, ends and records: given minus used is never more than capacity + ahead."""
    given, used = 4, 1  # 1 and then 3; "first"
    for number in range(50):
        job_id = f"j{number}"
        used += 1
        bench.hear(assign(grant(job_id)))
        commands = end(bench, job_id)
        given += sum(message.credit for message in sent(commands, GiveCredit))
        bench.hear(JobsRecorded([f"lease-{job_id}-1"]))
        assert given - used <= 3
    assert given - used == 3
