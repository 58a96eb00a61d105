"""Safeguards of definitions, events and runs that are assigned ahead, each taken away once."""

from __future__ import annotations

from itertools import count
from typing import Any

from msgspec.structs import replace

from tasuki.core.scheduler.orders import OrderEpochs
from tasuki.stores import firing
from tasuki.stores.memory.definitions import MemoryDefinitions
from tasuki.stores.memory.store import MemoryStore
from tasuki.stores.sql import fire
from tasuki.testing.sim.ablations_store import EARLY_S, Ablation, Method, Replacement, around
from tasuki.testing.sim.world import SimOptions


@around
def _settles_too_much(due_times: Method, *given: Any) -> Any:
    due = due_times(*given)
    return replace(due, settled_until=due.settled_until + EARLY_S)


@around
def _without_the_time(runs_of: Method, *given: Any) -> Any:
    for run in runs_of(*given):
        run.spec = replace(run.spec, job_id=f"d{run.definition_id}-0")
        yield run


def _each_time_another(run_of_event: Method) -> Method:
    numbers = count(1)

    def _run_of_event(*given: Any) -> Any:
        run = run_of_event(*given)
        run.spec = replace(run.spec, job_id=f"{run.spec.job_id}{next(numbers):06}")
        return run

    return _run_of_event


@around
def _ready_at_once(plan_runs: Method, *given: Any) -> Any:
    plan = plan_runs(*given)
    for run in plan.runs:
        run.waits_for = None
    return plan


@around
def _not_the_last_one(begin_again: Method, self: Any, run: Any) -> Any:
    notes = dict(self.notes_of)
    answer = begin_again(self, run)
    self.notes_of.update(notes)
    return answer


@around
def _before_its_time(fetch: Method, self: Any, holders: Any) -> None:
    with self.turn():
        for _, _, job_id in list(self._ahead):
            record = self._records[job_id]
            lease = record.job.lease
            if lease is not None and (lease.worker_id, lease.incarnation, lease.owner) in holders:
                self._extend(self._change(record, record.job), record.ttl_s)
    fetch(self, holders)


def _by_any_leader(_: Method) -> Method:
    def assign(self: Any, assignments: Any, *, epoch: int) -> Any:
        with self.turn():
            return [self._assign(assignment, epoch) for assignment in assignments]

    return assign


# Without clocks that are set, so that fewer times come at once; with runs that last longer than the time between two of them.
SCHEDULED = SimOptions(definitions=4, jobs=8, attempts_scale=4.0, kinds=("crash", "power", "pause", "partition", "store_lost"))

# Several servers that give each other orders, which are late or lost, and leaders that change.
ASSIGNED = SimOptions(
    definitions=8, ahead_s=3.0, servers=3, jobs=4, lock_ttl_s=2.0, latency_s=0.01, faults=24,
    kinds=("crash", "power", "pause", "partition", "one_way", "hints_late", "hints_doubled", "store_slow"),
)  # fmt: skip

# Turns that are held up for longer than their leaders lead: assignments are turns of their own, which nothing else fences.
HELD = SimOptions(definitions=8, ahead_s=3.0, servers=3, jobs=4, lock_ttl_s=2.0, faults=20, kinds=("store_held", "pause"))

SCHEDULES = (
    Ablation(
        "nominal_time_in_the_id",
        "the id of a run is made of its definition and its nominal time",
        ("I15",),
        (Replacement(firing, "runs_of", _without_the_time),),
        SCHEDULED,
    ),
    Ablation(
        "settled_as_planned",
        "no more nominal times are settled than were planned",
        ("I15",),
        (Replacement(firing, "due_times", _settles_too_much),),
        SCHEDULED,
    ),
    Ablation(
        "event_processed_once",
        "an event is processed in the turn that stores its runs, whose ids are made of it",
        ("I18", "I19"),
        (
            Replacement(firing, "run_of_event", _each_time_another),
            Replacement(MemoryDefinitions, "events_processed", lambda _: lambda *_: None),
            Replacement(fire._Rows, "events_processed", lambda _: lambda *_: None),
        ),
        SCHEDULED,
    ),
    Ablation(
        "forbid_sees_the_last_run",
        "the turn that fires looks at the last run of the definition",
        ("I18",),
        (Replacement(firing, "_last_run", lambda _: lambda *_: None),),
        SCHEDULED,
    ),
    Ablation(
        "run_again_alone",
        "a run is not set going again while another one of its definition goes on",
        ("I18",),
        (Replacement(MemoryDefinitions, "_begin_again", lambda _: lambda *_: None),),
        SCHEDULED,
    ),
    Ablation(
        "run_again_is_the_last",
        "a run that is set going again is the last one of its definition",
        ("I18",),
        (Replacement(MemoryDefinitions, "_begin_again", _not_the_last_one),),
        SCHEDULED,
    ),
    Ablation(
        "replacement_waits",
        "a run that replaces another is not ready before that has ended",
        ("I18",),
        (Replacement(firing, "plan_runs", _ready_at_once),),
        SCHEDULED,
    ),
    Ablation(
        "fetched_at_its_time",
        "a worker does not get a run that is assigned to it before the run's time",
        ("I12", "I15", "I18"),
        (Replacement(MemoryStore, "_fetch", _before_its_time),),
        ASSIGNED,
    ),
    Ablation(
        "assigned_by_epoch",
        "runs are assigned only under the latest epoch",
        ("I8",),
        (Replacement(MemoryStore, "assign", _by_any_leader),),
        HELD,
    ),
    Ablation(
        "orders_by_epoch",
        "a node obeys no order of an epoch below one that it knows",
        ("I20",),
        (Replacement(OrderEpochs, "problem", lambda _: lambda *_: ""),),
        ASSIGNED,
    ),
)
