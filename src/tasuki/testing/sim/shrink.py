"""Makes a failing case small: fewer operations and jobs, fewer faults, then fewer processes, as long as it fails alike.

    small = shrink(case.seed, case.options, case.plan, same_failure(case, failure.what))
    print(*small.lines(), sep="\\n")

Whatever is left out changes all that follows (the next delay is drawn by somebody else), so nothing is certain but by trying:
halves first, then single ones, until nothing more can go or the number of runs is used up.

Operations go first. With faults first a fault less is often paid for with many operations, which then have to bring about the
same by chance: 5 faults and 18 operations were left of one seed, 1 and 20 of another; the other way round 2 and 2 of both, after
half and a seventh of the runs. Where much is left, the other order is tried as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from tasuki.errors import InvalidInput
from tasuki.testing.sim.cases import HOT_LOOP, Case, CaseFailure, try_case
from tasuki.testing.sim.faults import COORDINATION, STORE, PlannedFault, cast_of
from tasuki.testing.sim.load import Operation
from tasuki.testing.sim.options import SimOptions
from tasuki.testing.sim.run import Plan
from tasuki.testing.sim.storage import MakeStore

RUNS_MAX = 800  # a minute or so; most cases need 30 to 300
SMALL_ENOUGH = 10  # faults and operations that a person can take in at once

StillFails = Callable[[SimOptions, Plan], CaseFailure | None]
"""Runs it, and tells the failure if it is the one that was looked for."""
Item = TypeVar("Item")


class Shrunk(msgspec.Struct, frozen=True, kw_only=True):
    """What is left, and what there was."""

    case: Case
    failure: CaseFailure
    before: Case
    runs: int
    is_minimal: bool
    """Nothing more could go. False: the runs were used up before that was known."""

    def lines(self) -> list[str]:
        """For people: what is left, in the order of its times."""
        case, before = self.case, self.before
        counts = [
            f"{len(case.plan.faults)} of {len(before.plan.faults)} faults",
            f"{len(case.plan.operations)} of {len(before.plan.operations)} operations",
            *(
                f"{getattr(case.options, name)} of {getattr(before.options, name)} {name}"
                for name in ("servers", "workers", "clients")
            ),
        ]
        end = "" if self.is_minimal else "; there may be less, but the runs were used up"
        return [
            f"seed {case.seed} still fails with {', '.join(counts)} ({self.runs} runs{end}):",
            *plan_lines(case.plan),
            f"  → {self.failure}",
        ]


def plan_lines(plan: Plan) -> list[str]:
    """Faults and operations, one line each."""
    timed = [(fault.at, _fault_text(fault)) for fault in plan.faults]
    timed += [(operation.at, _operation_text(operation)) for operation in plan.operations]
    return [f"  {at:8.3f}  {text}" for at, text in sorted(timed)]


def _fault_text(fault: PlannedFault) -> str:
    between = f" and {fault.other}" if fault.other else ""
    lasts = f" for {fault.for_s:.3g} s" if fault.for_s else ""
    amount = f" ({fault.amount:.3g})" if fault.amount else ""
    return f"fault     {fault.kind} {fault.target}{between}{lasts}{amount}"


def _operation_text(operation: Operation) -> str:
    bodies = [f"{spec.job_id}{'' if spec.payload == b'body' else ' with another body'}" for spec in operation.specs]
    return f"{operation.client}  {operation.verb} {', '.join([*bodies, *operation.job_ids])}"


def same_failure(case: Case, what: str, make_store: MakeStore | None = None) -> StillFails:
    """Fails with this invariant or exception (`CaseFailure.what`), under the case's seed."""

    def still_fails(options: SimOptions, plan: Plan) -> CaseFailure | None:
        found = try_case(Case(seed=case.seed, options=options, plan=plan), make_store=make_store).failure
        return found if found is not None and found.what == what else None

    return still_fails


def shrink(seed: int, options: SimOptions, plan: Plan, still_fails: StillFails, *, runs_max: int = RUNS_MAX) -> Shrunk:
    """`options` are complete, as `options.derived` makes them."""
    before = Case(seed=seed, options=options, plan=plan)
    failure = still_fails(options, plan)
    if failure is None:
        raise InvalidInput(f"seed {seed} does not fail in this way; there is nothing to make smaller")
    work = _Shrinking(before, failure, still_fails, 1, runs_max)
    work.run()
    if _size(work.case) > SMALL_ENOUGH and not work.is_used_up:
        other = _Shrinking(before, failure, still_fails, work.runs, runs_max)
        other.run(faults_first=True)
        smaller = other if _size(other.case) < _size(work.case) else work
        work.case, work.failure, work.runs = smaller.case, smaller.failure, other.runs
    return Shrunk(case=work.case, failure=work.failure, before=before, runs=work.runs, is_minimal=not work.is_used_up)


def _size(case: Case) -> int:
    return len(case.plan.faults) + len(case.plan.operations)


class _Shrinking:
    """The smallest case so far that fails."""

    def __init__(self, case: Case, failure: CaseFailure, still_fails: StillFails, runs: int, runs_max: int) -> None:
        self.case = case
        self.failure = failure
        self.runs = runs
        self._still_fails = still_fails
        self._runs_max = runs_max
        self._known: set[bytes] = set()
        """What was tried and does not fail."""

    @property
    def is_used_up(self) -> bool:
        return self.runs >= self._runs_max

    def run(self, *, faults_first: bool = False) -> None:
        self._without_what_came_later()
        before = None
        while before != self.case and not self.is_used_up:
            before = self.case
            if faults_first:
                self._fewer_faults()
            self._fewer_operations()
            self._fewer_jobs()
            self._fewer_faults()
            self._fewer_processes()
            self._simpler()

    def _try(self, options: SimOptions, plan: Plan) -> bool:
        """Whether it still fails; then it is the case from now on."""
        case = Case(seed=self.case.seed, options=options, plan=plan)
        key = msgspec.msgpack.encode(case)
        if case == self.case or key in self._known or self.is_used_up:
            return False
        self.runs += 1
        failure = self._still_fails(options, plan)
        if failure is None:
            self._known.add(key)
            return False
        self.case, self.failure = case, failure
        return True

    # -- the plan -------------------------------------------------------------------------------------------------
    def _without_what_came_later(self) -> None:
        """What was planned for after the failure has no part in it. A hot loop is found some time after it began."""
        at = self.failure.at
        if at is not None and self.failure.what != HOT_LOOP:
            plan = self.case.plan
            faults = tuple(fault for fault in plan.faults if fault.at <= at)
            operations = tuple(operation for operation in plan.operations if operation.at <= at)
            self._try(self.case.options, Plan(faults, operations))

    def _fewer_faults(self) -> None:
        self._fewer(self.case.plan.faults, lambda left: replace(self.case.plan, faults=left))

    def _fewer_operations(self) -> None:
        self._fewer(self.case.plan.operations, lambda left: replace(self.case.plan, operations=left))

    def _fewer_jobs(self) -> None:
        """Of operations on several jobs."""
        several = [
            (operation.number, job_id)
            for operation in self.case.plan.operations
            if len(job_ids := _job_ids(operation)) > 1
            for job_id in job_ids
        ]

        def keeping(left: Sequence[tuple[int, str]]) -> Plan:
            gone = set(several) - set(left)
            kept = (_without_jobs(operation, gone) for operation in self.case.plan.operations)
            return replace(self.case.plan, operations=tuple(operation for operation in kept if _job_ids(operation)))

        self._fewer(several, keeping)

    def _fewer(self, items: Sequence[Item], plan_with: Callable[[tuple[Item, ...]], Plan]) -> None:
        """Leave out all, then halves, quarters and so on, then one by one."""
        left = tuple(items)
        size = len(left)
        while left and size:
            start = 0
            while start < len(left):
                fewer = left[:start] + left[start + size :]
                if self._try(self.case.options, plan_with(fewer)):
                    left = fewer
                else:
                    start += size
            size //= 2

    # -- the world ------------------------------------------------------------------------------------------------
    def _fewer_processes(self) -> None:
        for name in ("workers", "clients", "servers"):
            there = getattr(self.case.options, name) or 1
            for count in range(1, there):
                options = replace(self.case.options, **{name: count})
                if self._try(options, _within(self.case.plan, options)):
                    break

    def _simpler(self) -> None:
        for options in _simpler_options(self.case.options):
            self._try(options, self.case.plan)


def _simpler_options(options: SimOptions) -> Iterator[SimOptions]:
    yield replace(options, tokens=False)
    yield replace(options, wire=False)
    yield replace(options, store="memory")


def _job_ids(operation: Operation) -> tuple[str, ...]:
    return (*(spec.job_id for spec in operation.specs), *operation.job_ids)


def _without_jobs(operation: Operation, gone: set[tuple[int, str]]) -> Operation:
    specs = tuple(spec for spec in operation.specs if (operation.number, spec.job_id) not in gone)
    job_ids = tuple(job_id for job_id in operation.job_ids if (operation.number, job_id) not in gone)
    return replace(operation, specs=specs, job_ids=job_ids)


def _within(plan: Plan, options: SimOptions) -> Plan:
    """The plan for a smaller cast: nothing befalls who is not there, and the first client asks for what others would have."""
    cast = cast_of(options)
    there = {*cast.processes, STORE, COORDINATION, ""}
    faults = tuple(fault for fault in plan.faults if fault.target in there and fault.other in there)
    operations = tuple(
        operation if operation.client in cast.clients else replace(operation, client=cast.clients[0])
        for operation in plan.operations
    )
    return Plan(faults, operations)
