"""Failing cases are made small: only what the failure needs is left, and it is still the same failure."""

from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace

from tasuki.core.store_messages import Reaped
from tasuki.errors import InvalidInput
from tasuki.stores.memory.store import MemoryStore
from tasuki.testing.sim.cases import Case, CaseFailure, StillFails, case_of, same_failure, shrink, try_case
from tasuki.testing.sim.run import Plan
from tasuki.testing.sim.world import SimOptions
from tests.sim.worlds import AcceptsAnyBody

SMALL = SimOptions(servers=2, workers=3, clients=2, jobs=16, chaos_s=6.0, faults=8, heal_limit_s=20.0)
CASE = case_of(1, SMALL)


class NeverReaps(MemoryStore):
    """Leases that are over stay: their jobs never come to an end."""

    def reap(self, *, epoch: int, limit: int = 256) -> list[Reaped]:
        return []


def first_failing(make_store: type[MemoryStore], options: SimOptions) -> tuple[Case, CaseFailure]:
    for seed in range(30):
        case = case_of(seed, options)
        failure = try_case(case, make_store=make_store).failure
        if failure is not None:
            return case, failure
    raise AssertionError("no seed showed it")


def test_a_broken_store_is_shown_by_two_submits_and_no_fault() -> None:
    case, failure = first_failing(AcceptsAnyBody, SMALL)

    small = shrink(case.seed, case.options, case.plan, same_failure(case, failure.what, AcceptsAnyBody))

    assert small.is_minimal
    assert small.failure.what == failure.what == "I2"
    assert not small.case.plan.faults
    assert [operation.verb for operation in small.case.plan.operations] == ["submit", "submit"]
    assert [len(operation.specs) for operation in small.case.plan.operations] == [1, 1]
    assert (small.case.options.servers, small.case.options.workers, small.case.options.clients) == (1, 1, 1)


def test_what_is_left_fails_by_itself() -> None:
    case, failure = first_failing(AcceptsAnyBody, SMALL)

    small = shrink(case.seed, case.options, case.plan, same_failure(case, failure.what, AcceptsAnyBody))

    assert try_case(Case.decode(small.case.encode()), make_store=AcceptsAnyBody).failure == small.failure


def test_the_fault_that_the_failure_needs_is_kept() -> None:
    case, failure = first_failing(NeverReaps, replace(SMALL, kinds=("crash", "jump", "hints_doubled")))

    small = shrink(case.seed, case.options, case.plan, same_failure(case, failure.what, NeverReaps))

    assert small.failure.what == failure.what
    assert {fault.kind for fault in small.case.plan.faults} == {"crash"}
    assert len(small.case.plan.faults) <= 2 < len(case.plan.faults)
    assert len(small.case.plan.operations) <= 2 < len(case.plan.operations)


# ---------------------------------------------------------------------------------------------------- how it is looked for


def needing(*needed: object) -> tuple[StillFails, list[Plan]]:
    """Fails whenever these faults, operations or jobs are all there."""
    tried: list[Plan] = []

    def still_fails(options: SimOptions, plan: Plan) -> CaseFailure | None:
        tried.append(plan)
        there = {*plan.faults, *(spec.job_id for operation in plan.operations for spec in operation.specs)}
        return CaseFailure(what="I1", message="it is lost") if there.issuperset(needed) else None

    return still_fails, tried


def test_exactly_what_is_needed_is_left() -> None:
    fault, other = CASE.plan.faults[2], CASE.plan.faults[5]
    still_fails, _ = needing(fault, other, "job-003")

    small = shrink(CASE.seed, CASE.options, CASE.plan, still_fails)

    assert small.case.plan.faults == (fault, other)
    assert [spec.job_id for operation in small.case.plan.operations for spec in operation.specs] == ["job-003"]


def test_operations_go_before_faults() -> None:
    still_fails, tried = needing()

    shrink(CASE.seed, CASE.options, CASE.plan, still_fails)

    assert not tried[1].operations
    assert tried[1].faults == CASE.plan.faults
    assert not tried[-1].faults


def test_where_much_is_left_faults_are_tried_first_as_well() -> None:
    """Without the first fault one operation is enough; with it the plan fails only as a whole."""

    def still_fails(options: SimOptions, plan: Plan) -> CaseFailure | None:
        is_whole = len(plan.operations) == len(CASE.plan.operations)
        enough = plan.operations if CASE.plan.faults[0] not in plan.faults else is_whole
        return CaseFailure(what="I1", message="it is lost") if enough else None

    small = shrink(CASE.seed, CASE.options, CASE.plan, still_fails)

    assert (len(small.case.plan.faults), len(small.case.plan.operations)) == (0, 1)


def test_what_was_planned_for_after_the_failure_goes_first() -> None:
    at = CASE.plan.faults[3].at
    tried: list[Plan] = []

    def still_fails(options: SimOptions, plan: Plan) -> CaseFailure | None:
        tried.append(plan)
        return CaseFailure(what="I1", message="it is lost", at=at)

    shrink(CASE.seed, CASE.options, CASE.plan, still_fails)

    assert tried[1].faults == CASE.plan.faults[:4]
    assert all(operation.at <= at for operation in tried[1].operations)


def test_the_number_of_runs_is_bounded() -> None:
    still_fails, tried = needing(CASE.plan.faults[0])

    small = shrink(CASE.seed, CASE.options, CASE.plan, still_fails, runs_max=5)

    assert len(tried) == small.runs == 5
    assert not small.is_minimal
    assert "the runs were used up" in small.lines()[0]


def test_the_same_is_not_tried_twice() -> None:
    still_fails, _ = needing(CASE.plan.faults[1], CASE.plan.faults[4], "job-003")
    tried: list[bytes] = []

    def noted(options: SimOptions, plan: Plan) -> CaseFailure | None:
        tried.append(msgspec.msgpack.encode((options, plan)))
        return still_fails(options, plan)

    shrink(CASE.seed, CASE.options, CASE.plan, noted)

    assert len(tried) > 20
    assert len(set(tried)) == len(tried)


def test_a_fault_that_hits_somebody_who_is_gone_goes_with_him() -> None:
    fault = replace(CASE.plan.faults[0], target="worker-3", other="")
    plan = replace(CASE.plan, faults=(fault, *CASE.plan.faults[1:]))

    small = shrink(CASE.seed, CASE.options, plan, _all_but_without(lambda options: options.workers == 1))

    assert small.case.options.workers == 1
    assert fault not in small.case.plan.faults


def _all_but_without(enough: Callable[[SimOptions], bool]) -> StillFails:
    """Fails with the whole plan, or in a world that is small enough."""
    return lambda options, plan: (
        CaseFailure(what="I1", message="") if len(plan.faults) == len(CASE.plan.faults) or enough(options) else None
    )


def test_what_does_not_fail_is_not_made_smaller() -> None:
    with pytest.raises(InvalidInput, match="seed 1 does not fail"):
        shrink(CASE.seed, CASE.options, CASE.plan, lambda options, plan: None)


def test_another_failure_is_not_the_same() -> None:
    case, failure = first_failing(AcceptsAnyBody, SMALL)

    assert same_failure(case, failure.what, AcceptsAnyBody)(case.options, case.plan) == failure
    assert same_failure(case, "I5", AcceptsAnyBody)(case.options, case.plan) is None


def test_the_lines_say_when_who_and_what() -> None:
    case, failure = first_failing(AcceptsAnyBody, SMALL)

    lines = shrink(case.seed, case.options, case.plan, same_failure(case, failure.what, AcceptsAnyBody)).lines()

    assert lines[0].startswith(
        f"seed {case.seed} still fails with 0 of 8 faults, 2 of {len(case.plan.operations)} operations, 1 of 2"
    )
    assert "client-1  submit job-" in lines[1]
    assert "with another body" in lines[1] + lines[2]
    assert lines[-1].startswith("  → I2: job-")


# ---------------------------------------------------------------------------------------------------- cases


class Raises(MemoryStore):
    def reap(self, *, epoch: int, limit: int = 256) -> list[Reaped]:
        raise ZeroDivisionError("by nothing")


def test_an_exception_of_the_code_under_test_is_a_failure() -> None:
    failure = try_case(CASE, make_store=Raises).failure

    assert failure is not None
    assert failure.what == "ZeroDivisionError"
    assert "by nothing (in reap, sim/test_cases.py:" in failure.message
    assert "Traceback" in failure.details


def test_what_is_no_case_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no case that was saved"):
        Case.decode(b'{"seed": 1}')
