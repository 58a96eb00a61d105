"""One seed, one run: the same to the last event whatever process runs it, busy enough to count, and judged as it happens."""

import os
import subprocess
import sys

import pytest
from msgspec.structs import replace

from tasuki.core.job import Lease, State
from tasuki.core.lifecycle import JobEvent
from tasuki.core.store_messages import Report, ReportAnswer, ReportStatus
from tasuki.stores.memory.records import MemoryJob
from tasuki.stores.memory.store import MemoryStore
from tasuki.testing.sim.history import AnyLine, EndedEvent, FaultEvent, FiredEvent, HealedEvent, RowEvent
from tasuki.testing.sim.run import check_seed, plan_of, run_plan
from tasuki.testing.sim.world import HotLoop, SimOptions, World
from tests.sim.worlds import AcceptsAnyBody

SEEDS = (1, 3, 5, 6)
SMALL = SimOptions(jobs=12, chaos_s=6.0, faults=4)


def test_the_same_seed_gives_the_same_trace() -> None:
    assert check_seed(1).trace_hash == check_seed(1).trace_hash


def test_another_seed_gives_another_trace() -> None:
    assert check_seed(1).trace_hash != check_seed(2).trace_hash


@pytest.mark.parametrize("hash_seed", ["0", "4711"])
def test_the_hash_seed_of_the_process_does_not_matter(hash_seed: str) -> None:
    here = [check_seed(seed).trace_hash for seed in SEEDS]
    program = f"from tasuki.testing.sim.run import check_seed\nfor seed in {SEEDS}: print(check_seed(seed).trace_hash)"

    there = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert there.stdout.split() == here


def test_watching_changes_nothing() -> None:
    lines: list[AnyLine] = []
    traced: list[str] = []

    watched = check_seed(3, SMALL, lines.append, trace=lambda at, label: traced.append(label))

    assert watched.trace_hash == check_seed(3, SMALL).trace_hash
    assert len(lines) == watched.lines
    assert len(traced) == watched.lines + watched.events


@pytest.mark.parametrize("seed", [1, 3])
def test_sqlite_under_its_own_statements_gives_the_trace_of_the_memory_store(seed: int) -> None:
    assert check_seed(seed, SimOptions(store="sqlite")).trace_hash == check_seed(seed).trace_hash


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_does_enough_to_count_and_breaks_nothing(seed: int) -> None:
    outcome = check_seed(seed)

    assert outcome.counts, outcome.text()
    assert outcome.good, outcome.text()


def test_the_chaos_ends_and_then_everything_comes_to_its_end() -> None:
    lines: list[AnyLine] = []

    outcome = check_seed(5, None, lines.append)

    [healed] = [place for place, line in enumerate(lines) if isinstance(line, HealedEvent)]
    assert not [line for line in lines[healed:] if isinstance(line, FaultEvent)]
    assert isinstance(lines[-1], EndedEvent)
    assert lines[-1].quiet
    last = {line.job_id: line for line in lines if isinstance(line, RowEvent)}
    assert {row.state for row in last.values()} <= {"SUCCEEDED", "FAILED", "CANCELED", "TIMED_OUT", "SKIPPED"}
    runs = {line.job_id for line in lines if isinstance(line, FiredEvent)}
    assert runs
    assert len(last) == (outcome.options.jobs or 0) + len(runs)


def test_a_part_of_a_plan_can_be_run_by_itself() -> None:
    options = check_seed(2).options
    plan = plan_of(2, options)

    outcome = run_plan(2, options, replace(plan, faults=plan.faults[:3]))

    assert sum(outcome.faults.values()) <= 3 < len(plan.faults)
    assert not outcome.unfinished


def test_the_text_of_an_outcome_names_the_seed_and_all_that_was_drawn() -> None:
    text = check_seed(2, SMALL).text()

    assert text.startswith("seed 2 [")
    assert all(f" {name}=" in text for name in SimOptions.__struct_fields__)
    assert "None" not in text


# ---------------------------------------------------------------------------------------------------- what is wrong is seen


class TakesLateFinishes(MemoryStore):
    """Forgets to look at the lease of a finish."""

    def _repeated_or_fenced(self, record: MemoryJob, report: Report, verb: JobEvent) -> ReportAnswer:
        if verb is not JobEvent.SUCCEED or record.job.state.terminal:
            return super()._repeated_or_fenced(record, report, verb)
        ended = self._end(record, replace(record.job, state=State.RUNNING, lease=record.job.lease or _NONE), verb, report.outcome)
        return ReportAnswer(ReportStatus.RECORDED, ended.job.state)


_NONE = Lease(lease_id="", worker_id="", incarnation="", attempt=0, expires_at=0.0)


class LosesJobs(MemoryStore):
    """Answers that a job is stored, and forgets every tenth."""

    def _put(self, job_id: str, new: MemoryJob | None) -> None:
        if job_id.endswith("7") and job_id not in self._records:
            return
        super()._put(job_id, new)


@pytest.mark.parametrize(
    ("broken", "invariants"),
    [(AcceptsAnyBody, {"I2"}), (TakesLateFinishes, {"I3", "I6", "I17"}), (LosesJobs, {"I1", "I2", "liveness"})],
)
def test_a_store_that_breaks_its_promise_is_found_out(broken: type[MemoryStore], invariants: set[str]) -> None:
    cut_off = SimOptions(workers=4, kinds=("one_way", "partition", "pause", "half_open", "slow"))
    outcomes = (check_seed(seed, cut_off, make_store=broken) for seed in range(8, 28))
    found = next(outcome.violations for outcome in outcomes if outcome.violations)

    assert found[0].invariant in invariants, found


def test_a_hot_loop_is_noticed() -> None:
    outcome = check_seed(1, replace(SMALL, tick_s=0.0))

    assert "events within a second" in outcome.problem


def test_a_world_that_goes_round_in_circles_is_stopped() -> None:
    world = World(1, replace(SMALL, servers=1), lambda line: None)

    def again() -> None:
        world.after(0.0001, "again", again)

    again()

    with pytest.raises(HotLoop, match="again"):
        world.run_until(10.0)
