"""Definitions and events in the simulator: one run for each nominal time and event, no overlap where none is allowed.

The store of each seed has applications beside the servers: they emit events, and in the end disable all definitions; an operator
sets runs going again. Schedules come every few seconds here, since a world lasts 18 s.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from tasuki.core.scheduler.firing import Definition, EventRow
from tasuki.core.scheduler.schedule import ClockChange, Schedule
from tasuki.stores import firing
from tasuki.stores.memory.definitions import MemoryDefinitions
from tasuki.stores.memory.store import MemoryStore
from tasuki.stores.store import Clock
from tasuki.testing.sim import faults, history
from tasuki.testing.sim.ablations_store import Replacement
from tasuki.testing.sim.checker import Violation
from tasuki.testing.sim.checker_store import ViolationFound
from tasuki.testing.sim.recorder import Recorder
from tasuki.testing.sim.run import SeedOutcome, check_seed
from tasuki.testing.sim.world import SimOptions

STEP_S = 3
EMITTING_S = 14.0
EMIT_CHANCE = 0.03  # at each turn
RERUN_CHANCE = 0.03
SEEDS = 40
HUNTED_SEEDS = 40

BY_TIME = dict(enumerate(("forbid", "replace"), 1))
BY_EVENT = dict(enumerate(("forbid", "replace"), 11))
ALONE = {str(number) for number in BY_TIME | BY_EVENT}
# Without clocks that are set: what was due is known then.
KINDS = tuple(kind for kind in faults.KINDS if kind != "jump")
OPTIONS = SimOptions(kinds=KINDS, retention_s=1e6, attempts_scale=4.0, jobs=8)


class EverySeconds(Schedule):
    """A schedule with a grain that a simulated world has time for."""

    def after(self, at: float, zone: Any) -> int | None:
        return int(at // STEP_S + 1) * STEP_S


def parse(schedule_type: str, value: str) -> Schedule:
    return EverySeconds(minutes=(0,), on_clock_change=ClockChange.ELAPSED)


class ScheduledStore(MemoryStore):
    """A memory store with applications that write definitions and events between the servers' turns."""

    def __init__(self, clock: Clock, random_bytes: Callable[[int], bytes], chance: random.Random) -> None:
        super().__init__(clock, random_bytes)
        self.window_s = 1e6  # nothing is too late: everything that was due must have run
        self._chance = chance
        self._writing = False
        self._begun_at = clock.lease()
        self.began_at, self.ended_at = clock.wall(), 0.0
        """Times between which all nominal times must have runs: up to what is settled when the definitions are disabled."""
        self.emitted: list[EventRow] = []
        self.run_again: list[str] = []
        """Runs that an operator has set going again, and that are not recorded yet."""
        # A subject that all workers subscribe to: a run's successor may go to another one.
        common = {
            "queue": "render",
            "command_name": "fast",
            "schedule_type": "every_n_minutes",  # `parse` stands in for it
            "schedule_value": "1",
            "max_retries": 1,
            "retry_backoff_seconds": 1,
            "changed_at": self.began_at,
        }
        for number, policy in BY_TIME.items():
            self.define(Definition(id=number, name=f"time {policy}", concurrency_policy=policy, **common))  # type: ignore[arg-type]
        for number, policy in BY_EVENT.items():
            by_event = {"type": "event", "event_type": ">", **common}
            self.define(Definition(id=number, name=f"event {policy}", concurrency_policy=policy, **by_event))  # type: ignore[arg-type]

    def turn(self, *, lasting: bool = True) -> AbstractContextManager[None]:
        if self._depth == 0 and not self._writing and hasattr(self, "emitted"):
            self._writing = True
            self._write()
            self._writing = False
        return super().turn(lasting=lasting)

    def _write(self) -> None:
        if self.clock.lease() - self._begun_at < EMITTING_S:
            if self._chance.random() < EMIT_CHANCE:
                number = len(self.emitted) + 1
                self.emitted.append(EventRow(id=number, event_type="order.paid", created_at=float(number)))
                self.emit(self.emitted[-1])
            if self._chance.random() < RERUN_CHANCE:
                self._rerun()
        elif not self.ended_at:
            self.ended_at = min(
                self.notes_of[number].fired_until if number in self.notes_of else self.began_at for number in BY_TIME
            )
            for number in BY_TIME:
                self.define(replace(self.definitions[number], enabled=False))

    def _rerun(self) -> None:
        jobs = [record.job for record in self._records.values()]
        ended = [job.job_id for job in jobs if str(job.job_definition_id) in ALONE and job.state.terminal]
        if ended:
            chosen = self._chance.choice(ended)
            self.run_again += [chosen for answer in self.requeue([chosen], actor="operator") if answer.done]


def with_reruns(record: Callable[..., None]) -> Callable[..., None]:
    """Return a recorder's `turn` that first tells what an operator did to the store without any server."""

    def turn(self: Recorder, *given: Any, **named: Any) -> None:
        assert isinstance(self.store, ScheduledStore)
        chosen, self.store.run_again = self.store.run_again, []
        for job_id, job in zip(chosen, self.store.get(chosen), strict=True):
            generation = job.generation if job is not None else 0
            at, who = self.world.at, {"client": "operator", "call": f"{job_id} {generation}"}
            self.world.tell(history.AskedEvent(at=at, verb="requeue", job_ids=(job_id,), **who))
            self.world.tell(history.RequeuedEvent(at=at, job_id=job_id, done=True, generation=generation))
            self.world.tell(history.AnsweredEvent(at=at, answer="ok", accepted=(job_id,), **who))
        record(self, *given, **named)

    return turn


class Watch:
    """Judge of I18, and memory of what was fired."""

    def __init__(self) -> None:
        self.fired: Counter[tuple[str, float]] = Counter()
        self._definition_of: dict[str, str] = {}
        self._open: dict[str, set[str]] = {}

    def __call__(self, line: history.AnyLine) -> None:
        if isinstance(line, history.FiredEvent):
            self.fired[line.definition, line.nominal] += 1
            self._definition_of[line.job_id] = line.definition
        elif isinstance(line, history.RowEvent) and (definition := self._definition_of.get(line.job_id)) in ALONE:
            open_runs = self._open.setdefault(definition or "", set())
            if line.state not in ("ASSIGNED", "RUNNING", "ORPHANED"):
                open_runs.discard(line.job_id)
                return
            open_runs.add(line.job_id)
            if len(open_runs) > 1:
                raise ViolationFound(Violation("I18", f"runs of definition {definition} overlap: {sorted(open_runs)}"))


def check(seed: int) -> tuple[SeedOutcome, set[str]]:
    """Run a seed; return its outcome, and the invariants that its end shows to be broken."""
    watch, stores = Watch(), []

    def make(clock: Clock, random_bytes: Callable[[int], bytes]) -> ScheduledStore:
        stores.append(ScheduledStore(clock, random_bytes, random.Random(f"applications {seed}")))
        return stores[-1]

    with patched(Replacement(firing, "parse_schedule", lambda _: parse), Replacement(Recorder, "turn", with_reruns)):
        outcome = check_seed(seed, OPTIONS, watch, make_store=make)
    store = stores[-1]
    broken = {violation.invariant for violation in outcome.violations}
    if outcome.good:
        times = range(int(store.began_at // STEP_S + 1) * STEP_S, int(store.ended_at) + 1, STEP_S)
        due = {(str(number), float(at)) for number in BY_TIME for at in times}
        by_event = {(str(number), event.created_at) for number in BY_EVENT for event in store.emitted}
        once = {key for key, count in watch.fired.items() if count == 1}
        broken |= {"I15"} if not due <= once else set()
        broken |= {"I19"} if store.events or not by_event <= once else set()
    return outcome, broken


@contextmanager
def patched(*replacements: Replacement) -> Iterator[None]:
    with ExitStack() as stack:
        for replacement in replacements:
            stack.enter_context(replacement.open())
        yield


@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_time_and_event_has_one_run_and_none_overlaps(seed: int) -> None:
    outcome, broken = check(seed)

    assert outcome.good, outcome.text()
    assert broken == set()


def test_the_worlds_have_runs_that_were_skipped_replaced_and_released() -> None:
    seen: Counter[str] = Counter()
    original = MemoryDefinitions.fire

    def counted(self: Any, **named: Any) -> Any:
        fired = original(self, **named)
        seen.update(skipped=sum(run.state == "SKIPPED" for run in fired.runs), replaced=len(fired.replaced))
        seen.update(released=fired.released, runs=len(fired.runs))
        return fired

    def asked(self: Any, *given: Any, **named: Any) -> Any:
        answers = requeue(self, *given, **named)
        seen.update("run again" if answer.done else "kept back" for answer in answers if answer.done or answer.still_running)
        return answers

    requeue = MemoryStore.requeue
    with patched(Replacement(MemoryDefinitions, "fire", lambda _: counted), Replacement(MemoryStore, "requeue", lambda _: asked)):
        for seed in range(6):
            check(seed)

    assert min(seen[name] for name in ("skipped", "replaced", "released", "runs", "run again", "kept back")) > 0, seen


ABLATIONS = {
    "an event is processed in the turn that makes its runs": (
        {"I19", "I15"}, Replacement(MemoryDefinitions, "events_processed", lambda _: lambda self, *given: None),
    ),
    "the run's id is made of its nominal time": (
        {"I15", "liveness"}, Replacement(firing, "runs_of", lambda runs_of: lambda *given: map(same_id, runs_of(*given))),
    ),
    "no more is settled than was planned": (
        {"I15"}, Replacement(MemoryDefinitions, "save_states", lambda save: lambda self, states: save(self, ahead(states))),
    ),
    "forbid looks at the last run": (
        {"I18"}, Replacement(firing, "_last_run", lambda _: lambda state, known: None),
    ),
    "a run is run again while no other one goes on": (
        {"I18"}, Replacement(MemoryDefinitions, "_begin_again", lambda _: lambda self, run: None),
    ),
    "a run that is run again is the last one": (
        {"I18"}, Replacement(MemoryDefinitions, "_begin_again", lambda begin: lambda self, run: forgetful(begin, self, run)),
    ),
    "a run that replaces another waits for its end": (
        {"I18"}, Replacement(MemoryDefinitions, "add_runs", lambda add: lambda self, runs: add(self, list(map(at_once, runs)))),
    ),
}  # fmt: skip


def forgetful(begin: Any, store: Any, run: Any) -> Any:
    notes = dict(store.notes_of)
    answer = begin(store, run)
    store.notes_of.update(notes)
    return answer


def same_id(run: Any) -> Any:
    run.spec = replace(run.spec, job_id=f"d{run.definition_id}")
    return run


def ahead(states: Any) -> dict[int, Any]:
    return {number: replace(state, fired_until=state.fired_until + 2 * STEP_S) for number, state in states.items()}


def at_once(pair: Any) -> Any:
    run, submission = pair
    run.waits_for = None
    return run, submission


@pytest.mark.parametrize("name", ABLATIONS)
def test_a_safeguard_that_is_taken_away_is_missed(name: str) -> None:
    invariants, replacement = ABLATIONS[name]
    with patched(replacement):
        for seed in range(HUNTED_SEEDS):
            outcome, broken = check(seed)
            found = broken | ({"liveness"} if outcome.unfinished or outcome.problem else set())
            if found:
                break

    assert found & invariants, (found, outcome.text())
