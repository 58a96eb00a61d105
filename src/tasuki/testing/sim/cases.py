"""A case is seed, options and plan of a run. It can be tried, kept as a file, made smaller, and told to people.

    case = case_of(7)
    tried = try_case(case)
    tried.failure                # None, or what went wrong: CaseFailure(what="I5", message=…, at=…)

Everything that a seed brings to light is a failure: a violation that the checker found, a hot loop, a world that does not come to
its end, and an exception out of the code under test. `shrink` leaves out operations and jobs, faults, then processes, as long as
the case fails alike. A `Narrative` listens to a run (`observe` and `trace` of `run.check_plan`) and changes nothing.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec
from msgspec.structs import replace

from tasuki.errors import InvalidInput
from tasuki.testing.sim.clients import PROJECT, Operation
from tasuki.testing.sim.faults import DRAWN_KINDS, PlannedFault
from tasuki.testing.sim.history import AnyLine, FaultEvent, WatchingEvent, kind_of
from tasuki.testing.sim.run import Plan, SeedOutcome, check_plan, check_seed, plan_of
from tasuki.testing.sim.servers import COORDINATION, STORE, MakeStore
from tasuki.testing.sim.system import cast_of
from tasuki.testing.sim.world import WALL_START_S, SimOptions, Trace, derived

if TYPE_CHECKING:
    from tasuki.testing.sim.ablations_store import Ablation

HOT_LOOP, UNFINISHED = "hot loop", "unfinished"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One complete run: the same case gives the same run."""

    seed: int
    options: SimOptions
    plan: Plan

    def encode(self) -> bytes:
        """Return the case as JSON, for a file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidInput(f"this is no case that was saved by `tasuki sim --save`: {error}") from None


class CaseFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The failure that a case leads to."""

    what: str
    """The invariant, `hot loop`, `unfinished`, or the name of an exception; it stays the same while a case is made smaller."""
    message: str
    at: float | None = None
    """Virtual time; None if not known."""
    line: int | None = None
    """The line of the history, from 0; None if no single line is to blame."""
    details: str = ""
    """The traceback of an exception."""

    def __str__(self) -> str:
        return f"{self.what}: {self.message}" + (f" (at {self.at:.3f} s)" if self.at is not None else "")


class Tried(msgspec.Struct, frozen=True):
    """The result of a case. Without an outcome the run broke off with an exception."""

    outcome: SeedOutcome | None
    failure: CaseFailure | None


def case_of(seed: int, options: SimOptions | None = None) -> Case:
    """Return the case of this seed, with every open option drawn from it."""
    complete = derived(seed, options or SimOptions(), DRAWN_KINDS)
    return Case(seed=seed, options=complete, plan=plan_of(seed, complete))


def try_case(
    case: Case,
    observe: Callable[[AnyLine], None] | None = None,
    *,
    trace: Trace | None = None,
    make_store: MakeStore | None = None,
) -> Tried:
    """Run a case under the checker."""
    try:
        outcome = check_plan(case.seed, case.options, case.plan, observe, trace=trace, make_store=make_store)
    except Exception as error:  # noqa: BLE001 - whatever the code under test raises is what this seed has found
        return Tried(None, _raised(error))
    return Tried(outcome, failure_of(outcome))


def failure_of(outcome: SeedOutcome) -> CaseFailure | None:
    for violation in outcome.violations:
        return CaseFailure(what=violation.invariant, message=violation.message, at=violation.at, line=violation.line)
    if outcome.problem:
        return CaseFailure(what=HOT_LOOP, message=outcome.problem, at=outcome.virtual_s)
    if outcome.unfinished:
        return CaseFailure(what=UNFINISHED, message=outcome.unfinished)
    return None


def _raised(error: Exception) -> CaseFailure:
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{'/'.join(where.filename.split('/')[-2:])}:{where.lineno}"
    details = "".join(traceback.format_exception(error))
    return CaseFailure(what=type(error).__name__, message=f"{error} (in {where.name}, {place})", details=details)


def switched_off(without: str) -> AbstractContextManager[None]:
    """Return a context in which this safeguard (`ablations.py`) is switched off; empty: none is."""
    if not without:
        return nullcontext()
    return ablation(without).switch_off()


def ablation(without: str) -> Ablation:
    """Return the ablation of this name."""
    from tasuki.testing.sim.ablations import ABLATIONS  # loads Django, which nobody else here needs

    there = {name: ablation for name, ablation in ABLATIONS.items() if ablation.check is check_seed}
    if without not in there:
        raise InvalidInput(f"no such safeguard: {without}; there are {', '.join(there)}")
    return there[without]


def command_of(seed: int, options: SimOptions, without: str = "") -> str:
    """Return the command that repeats a seed; `options` are those that were chosen, before anything was drawn."""
    usual = ablation(without).options if without else SimOptions()
    chosen = [
        f"--set {name}={_shown(getattr(options, name))}"
        for name in SimOptions.__struct_fields__
        if name != "store" and getattr(options, name) != getattr(usual, name)
    ]
    store = [f"--store {options.store}"] if options.store != "memory" else []
    gone = [f"--without {without}"] if without else []
    return " ".join([f"tasuki sim --seed {seed}", *store, *gone, *chosen])


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


# ---------------------------------------------------------------------------------------------------- making a case smaller

RUNS_MAX = 800  # a minute or so; most cases need 30 to 300
SMALL_ENOUGH = 10  # faults and operations that a person can take in at once

StillFails = Callable[[SimOptions, Plan], CaseFailure | None]
"""Runs a plan, and returns its failure if it is the one that is looked for."""
Item = TypeVar("Item")


class Shrunk(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest failing case, and the case before."""

    case: Case
    failure: CaseFailure
    before: Case
    runs: int
    is_minimal: bool
    """Nothing more could be left out; False if the runs were used up before that was known."""

    def lines(self) -> list[str]:
        """Return the remaining plan as text, in the order of its times."""
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
    """Return faults and operations as text, one line each."""
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
    definition = operation.definition
    what = [] if definition is None else [f"{definition.name}: {definition.schedule_value} s, {definition.concurrency_policy}"]
    return f"{operation.client}  {operation.verb} {', '.join([*bodies, *operation.job_ids, *what])}"


def same_failure(case: Case, what: str, make_store: MakeStore | None = None) -> StillFails:
    """Return a function that runs a plan, and returns its failure if it is of this kind (`CaseFailure.what`)."""

    def still_fails(options: SimOptions, plan: Plan) -> CaseFailure | None:
        found = try_case(Case(seed=case.seed, options=options, plan=plan), make_store=make_store).failure
        return found if found is not None and found.what == what else None

    return still_fails


def shrink(seed: int, options: SimOptions, plan: Plan, still_fails: StillFails, *, runs_max: int = RUNS_MAX) -> Shrunk:
    """Make a failing plan smaller; `options` are complete, as `world.derived` makes them."""
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
    """The smallest failing case so far."""

    def __init__(self, case: Case, failure: CaseFailure, still_fails: StillFails, runs: int, runs_max: int) -> None:
        self.case = case
        self.failure = failure
        self.runs = runs
        self._still_fails = still_fails
        self._runs_max = runs_max
        self._known: set[bytes] = set()
        """Cases that were tried and do not fail."""

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
        """Return whether a smaller case still fails; if so, it becomes the case."""
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
        """Leave out what was planned for after the failure. A hot loop is found some time after it began."""
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
        """Leave out jobs of operations on several jobs."""
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
    """Return the plan for fewer processes: faults of missing ones go, and the first client makes the calls of missing clients."""
    cast = cast_of(options)
    there = {*cast.processes, STORE, COORDINATION, ""}
    faults = tuple(fault for fault in plan.faults if fault.target in there and fault.other in there)
    operations = tuple(
        operation if operation.client in (*cast.clients, PROJECT) else replace(operation, client=cast.clients[0])
        for operation in plan.operations
    )
    return Plan(faults, operations)


# ---------------------------------------------------------------------------------------------------- a run as text

LAST_MARKED = 12  # lines of the history before a failure that are marked
SHORT_HASH = 8  # characters of a sha256 or a body's hash that are shown
HASH_MIN = 32  # texts of so many hexadecimal digits are hashes

# Lines of the history, and the beginnings of faults, come by `observe`; timers that find nothing to do are left out.
_TOLD_ELSEWHERE = re.compile(r"^· |^fault (?!.* is over$)| ticks$")
_JOB = re.compile(r"\bjob-\d+\b")
_HASH = re.compile(rf"\b[0-9a-f]{{{HASH_MIN},}}\b")
_SPEAKERS = ("client", "worker_id", "server_id", "name")
_WALL = ("wall", "highest_wall", "not_before", "not_after")  # shown from the start of the world on


class NarrativeLine(msgspec.Struct, frozen=True):
    """One line of a run's story."""

    at: float
    who: str
    what: str
    line: int | None
    """The place in the history, from 0; None for an event that left no line."""

    def text(self, mark: str = " ") -> str:
        return f"{mark} {self.at:9.4f}  {self.who:<12} {self.what}".rstrip()


class Narrative:
    """Records a run as text. `events`: not only the history but each delivery, timer and commit, as `--trace` shows."""

    def __init__(self, *, events: bool = False) -> None:
        self.told: list[NarrativeLine] = []
        self._events = events
        self._lines = 0

    def observe(self, line: AnyLine) -> None:
        number, self._lines = self._lines, self._lines + 1
        if not isinstance(line, WatchingEvent):
            who, what = in_words(line)
            self.told.append(NarrativeLine(line.at, who, what, number))

    def trace(self, at: float, label: str) -> None:
        """Record an event of the world."""
        if self._events and not _TOLD_ELSEWHERE.search(label):
            who, _, what = label.partition(" ")
            self.told.append(NarrativeLine(at, who, what.replace("> ", "to ", 1) if what.startswith("> ") else what, None))

    def lines(self, failure: CaseFailure | None = None) -> Iterator[str]:
        """Return all lines. Of a failing run the last lines are marked with `>`, the one that broke it with `!`."""
        end = failure.line if failure is not None else None
        for told in self.told:
            before = end - told.line if end is not None and told.line is not None else None
            mark = " " if before is None or not 0 <= before <= LAST_MARKED else "!" if before == 0 else ">"
            yield told.text(mark)
        if failure is not None:
            yield f"! {short(str(failure))}"

    def of_the_job(self, failure: CaseFailure) -> list[str]:
        """Return the lines of the job that the failure names, and the faults meanwhile; empty if it names none."""
        named = _JOB.search(failure.message)
        if named is None:
            return []
        about = re.compile(rf"\b{named.group()}\b")
        found = [told for told in self.told if told.line is not None and (about.search(told.what) or told.who == "fault")]
        first = next((place for place, told in enumerate(found) if told.who != "fault"), len(found))
        marked = (told.text("!" if told.line == failure.line else " ") for told in found[first:])
        return [f"what befell {named.group()}:", *marked]


def in_words(line: AnyLine) -> tuple[str, str]:
    """Return (who, what) of a line of the history; who is `store` for commits."""
    if isinstance(line, FaultEvent):
        return "fault", f"{line.fault} {line.target}"
    fields = {name: getattr(line, name) for name in line.__struct_fields__ if name != "at"}
    kind = kind_of(type(line).__name__)
    is_commit = "accepted" in fields or "held" in fields or kind in ("granted", "reaped")
    speaker = None if is_commit and kind != "answered" else next((name for name in _SPEAKERS if fields.get(name)), None)
    who = str(fields.pop(speaker)) if speaker is not None else "store"
    words = [kind, *(str(fields.pop(name)) for name in ("what", "job_id") if name in fields)]
    fields.update({name: fields[name] - WALL_START_S for name in _WALL if fields.get(name) is not None})
    words += [f"{name}={_value_text(value)}" for name, value in fields.items() if value not in (None, "", (), False, 0)]
    return who, " ".join(words)


def _value_text(value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, tuple) else f"{value:.3f}" if isinstance(value, float) else str(value)
    return short(text)


def short(text: str) -> str:
    """Return a text with its hashes cut: nobody compares more of them by eye."""
    return _HASH.sub(lambda found: found.group()[:SHORT_HASH] + "…", text)
