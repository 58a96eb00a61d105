"""A case is what makes a run: seed, options, plan. It can be tried, kept as a file, and made smaller (`shrink.py`).

    case = case_of(7)
    tried = try_case(case)
    tried.failure                # None, or what went wrong: Failure(what="I5", message=…, at=…)

Everything that a seed brings to light is a failure: a violation that the checker found, a hot loop, a world that does not come to
its end, and an exception out of the code under test.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Self

import msgspec

from tasuki.errors import InvalidInput
from tasuki.testing.sim.faults import KINDS
from tasuki.testing.sim.history import AnyLine
from tasuki.testing.sim.options import SimOptions, derived
from tasuki.testing.sim.patches import Ablation
from tasuki.testing.sim.run import Plan, SeedOutcome, check_plan, plan_of
from tasuki.testing.sim.storage import MakeStore
from tasuki.testing.sim.world import Trace

HOT_LOOP, UNFINISHED = "hot loop", "unfinished"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One run, complete: the same case gives the same run."""

    seed: int
    options: SimOptions
    plan: Plan

    def encode(self) -> bytes:
        """As JSON, for a file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidInput(f"this is no case that was saved by `tasuki sim --save`: {error}") from None


class CaseFailure(msgspec.Struct, frozen=True, kw_only=True):
    """What a case brought to light."""

    what: str
    """The invariant, `hot loop`, `unfinished`, or the name of an exception; it stays the same while a case is made smaller."""
    message: str
    at: float | None = None
    """Virtual time; None: not known."""
    line: int | None = None
    """Of the history, from 0; None: not one line is to blame."""
    details: str = ""
    """The traceback of an exception."""

    def __str__(self) -> str:
        return f"{self.what}: {self.message}" + (f" (at {self.at:.3f} s)" if self.at is not None else "")


class Tried(msgspec.Struct, frozen=True):
    """What came of a case. Without an outcome the run broke off with an exception."""

    outcome: SeedOutcome | None
    failure: CaseFailure | None


def case_of(seed: int, options: SimOptions | None = None) -> Case:
    """What this seed does, with all that was left open drawn from it."""
    complete = derived(seed, options or SimOptions(), tuple(KINDS))
    return Case(seed=seed, options=complete, plan=plan_of(seed, complete))


def try_case(
    case: Case,
    observe: Callable[[AnyLine], None] | None = None,
    *,
    trace: Trace | None = None,
    make_store: MakeStore | None = None,
) -> Tried:
    """Run it under the checker."""
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
    """While it lasts, this safeguard (`ablations.py`) is gone; empty: nothing is."""
    if not without:
        return nullcontext()
    return ablation(without).switch_off()


def ablation(without: str) -> Ablation:
    """What is switched off under this name."""
    from tasuki.testing.sim.ablations import ABLATIONS  # loads Django, which nobody else here needs

    if without not in ABLATIONS:
        raise InvalidInput(f"no such safeguard: {without}; there are {', '.join(ABLATIONS)}")
    return ABLATIONS[without]


def command_of(seed: int, options: SimOptions, without: str = "") -> str:
    """What repeats a seed; `options` are those that were chosen, before anything was drawn."""
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
