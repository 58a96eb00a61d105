"""Definitions and events of the memory store, and the verb `fire` on them.

In an SQL store an application writes these tables itself; here `define`, `undefine` and `emit` stand in for its transactions.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from tasuki.core.job import Job, JobIncident, Outcome, State
from tasuki.core.lifecycle import REASSIGN_AFTER_S, JobEvent
from tasuki.core.scheduler.firing import (
    CLOCK_SET_BACK_S,
    SKIP_LATE_RUNS_AFTER_S,
    ConcurrencyPolicy,
    Definition,
    DefinitionType,
    EventRow,
    FiringState,
    PlannedRun,
    stored_ahead,
)
from tasuki.core.store_messages import AheadRun, Canceled, FiredRun, FiredRuns, FireOrder, Submission
from tasuki.core.subject import group_of
from tasuki.stores.common import INCIDENT_OF
from tasuki.stores.firing import REPLACED_BY, RUNS_AHEAD_MAX, fire, going_on
from tasuki.stores.memory.records import MemoryJob, MemoryRecords, queue_of
from tasuki.stores.store import Clock

_encode = msgspec.msgpack.Encoder().encode


class MemoryDefinitions(MemoryRecords):
    """Definitions, events and the verb `fire`; `stores.firing.FiringRecords` tells what its methods are for."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.definitions: dict[int, Definition] = {}
        self.notes_of: dict[int, FiringState] = {}
        """The leader's notes by definition."""
        self.events: dict[int, EventRow] = {}
        """Events that are not processed."""
        self.refused_events: dict[int, str] = {}
        """Processed events of which a definition got no run, and why."""
        self.window_s = SKIP_LATE_RUNS_AFTER_S
        self._epoch_of_runs = 0

    @abstractmethod
    def cancel(self, job_ids: Sequence[str], *, actor: str, reason: str = "") -> list[Canceled]: ...

    @abstractmethod
    def _end(self, record: MemoryJob, job: Job, event: JobEvent, outcome: Outcome, *incidents: JobIncident) -> MemoryJob: ...

    # -- applications ---------------------------------------------------------------------------------------------
    def define(self, definition: Definition) -> None:
        self._set(self.definitions, definition.id, definition)

    def undefine(self, definition_id: int) -> None:
        self._set(self.definitions, definition_id, None)

    def emit(self, event: EventRow) -> None:
        self._set(self.events, event.id, event)

    def _set(self, table: dict[int, Any], key: int, value: Any) -> None:
        """Set or delete (None) an entry, and undo it if the turn is rolled back."""
        before = table.get(key)
        undo: Callable[[], Any] = lambda: table.pop(key, None) if before is None else table.update({key: before})  # noqa: E731
        with self.turn():
            self._undo.append(undo)
            table.update({key: value}) if value is not None else table.pop(key, None)

    # -- operators ------------------------------------------------------------------------------------------------
    def _begin_again(self, run: Job) -> str | None:
        """Make a run the last one of its definition, or return the one that it would overlap."""
        number = run.job_definition_id
        definition = self.definitions.get(number) if number is not None else None
        if definition is None or definition.policy == ConcurrencyPolicy.ALLOW:
            return None
        notes = self.notes_of[definition.id]
        known = self.states_of([notes.last_run_id, notes.waits_for])
        if (still_running := going_on(notes, known)) is None:
            self._set(self.notes_of, definition.id, replace(notes, last_run_id=run.job_id, waits_for=""))
        return still_running

    # -- the leader -----------------------------------------------------------------------------------------------
    def fire(
        self, *, epoch: int, limit: int = 256, ahead_s: float = 0.0, reassign_after_s: float = REASSIGN_AFTER_S
    ) -> FiredRuns:
        with self.turn():
            self._check_epoch(epoch)
            self._epoch_of_runs = epoch
            return fire(self, self.clock.wall(), FireOrder(limit, ahead_s, reassign_after_s))

    def make_waiting_ready(self) -> int:
        released = 0
        for number, state in list(self.notes_of.items()):
            earlier = self._records.get(state.waits_for)
            if not state.waits_for or (earlier is not None and not earlier.job.state.terminal):
                continue
            self._set(self.notes_of, number, replace(state, waits_for=""))
            run = self._records.get(state.last_run_id)
            if run is not None and run.waiting:
                self._change(run, run.job)
                released += 1
        return released

    def due_definitions(self, now: float, ahead_until: float, limit: int) -> Sequence[tuple[Definition, FiringState]]:
        both = [(definition, self.notes_of.get(number, FiringState())) for number, definition in self.definitions.items()]
        due = [
            (definition, state)
            for definition, state in both
            if _is_due(definition, state, now) or self._lacks_next(definition, state, ahead_until)
        ]
        return sorted(due, key=lambda pair: (pair[1].next_at or 0.0, pair[0].id))[:limit]

    def _lacks_next(self, definition: Definition, state: FiringState, ahead_until: float) -> bool:
        is_near = definition.enabled and definition.type == DefinitionType.TIME and (state.next_at or math.inf) <= ahead_until
        return is_near and stored_ahead(definition.id, state) not in self._records

    def ahead_among(self, job_ids: Collection[str]) -> Mapping[str, bytes]:
        found = (self._records.get(job_id) for job_id in job_ids)
        return {record.job.job_id: record.job.body_hash for record in found if record is not None and record.ahead}

    def next_of_nothing(self) -> Mapping[int, str | None]:
        gone = [number for number, state in self.notes_of.items() if number not in self.definitions and state.next_at is not None]
        return {number: stored_ahead(number, self.notes_of[number]) for number in gone}

    def forget_next(self, definition_ids: Collection[int]) -> None:
        for number in definition_ids:
            self._set(self.notes_of, number, replace(self.notes_of[number], next_at=None))

    def judge(self, runs: Sequence[PlannedRun], reassign_after_s: float | None) -> Sequence[FiredRun]:
        return [self._judge(run, self._records[run.spec.job_id], reassign_after_s) for run in runs]

    def _judge(self, run: PlannedRun, record: MemoryJob, reassign_after_s: float | None) -> FiredRun:
        job, lease = replace(record.job, leader_epoch=self._epoch_of_runs), record.job.lease
        if lease is not None and run.is_ready and reassign_after_s is not None:
            lease = replace(lease, expires_at=self.clock.lease() + reassign_after_s)
            record = self._change(record, replace(job, lease=lease), due=True)
        elif run.end is None:
            record = self._change(record, replace(job, state=State.PENDING, lease=None), waiting=run.waits_for is not None)
        else:
            event, outcome = run.end
            incident = self._incident(INCIDENT_OF[event], job, actor=REPLACED_BY, reason=outcome.message)
            record = self._end(record, replace(job, state=State.PENDING), event, outcome, incident)
        return FiredRun(run.spec.job_id, run.definition_id, run.scheduled_for, record.job.state, group_of(run.spec.subject))

    def withdraw(self, job_ids: Collection[str]) -> None:
        for job_id in sorted(job_ids):
            self._put(job_id, None)

    def runs_ahead(self) -> Sequence[AheadRun]:
        due = [entry for entry in self._leased if self._records[entry[2]].due]
        return [_ahead_run(self._records[job_id]) for _, _, job_id in (*due, *self._ahead)][:RUNS_AHEAD_MAX]

    def new_events(self, limit: int) -> Sequence[EventRow]:
        return [self.events[number] for number in sorted(self.events)[:limit]]

    def definitions_for(self, events: Sequence[EventRow]) -> Sequence[tuple[Definition, FiringState]]:
        return [(self.definitions[number], self.notes_of.get(number, FiringState())) for number in sorted(self.definitions)]

    def skip_late_runs_after_s(self) -> float:
        return self.window_s

    def states_of(self, job_ids: Collection[str]) -> Mapping[str, State]:
        return {job_id: self._records[job_id].job.state for job_id in job_ids if job_id in self._records}

    def lock_notes(self, definition_ids: Collection[int]) -> Mapping[int, tuple[str, str]]:
        return {number: (self.notes_of[number].last_run_id, self.notes_of[number].waits_for) for number in definition_ids}

    def lock_runs(self, job_ids: Collection[str]) -> Collection[str]:
        return job_ids

    def add_runs(self, runs: Sequence[tuple[PlannedRun, Submission]]) -> Sequence[FiredRun]:
        return [self._add_run(run, submission) for run, submission in runs if run.spec.job_id not in self._records]

    def _add_run(self, run: PlannedRun, submission: Submission) -> FiredRun:
        facts = {"leader_epoch": self._epoch_of_runs, "scheduled_for": run.scheduled_for, "job_definition_id": run.definition_id}
        waiting = not run.is_ready and not run.ahead
        record = replace(self._new_record(submission, waiting=waiting, **facts), ahead=run.ahead)
        job = record.job
        if run.end is None:
            self._put(job.job_id, record)
            if record.ready:
                self.note_ready(job)
        else:
            event, outcome = run.end
            incident = self._incident(INCIDENT_OF[event], job, actor=REPLACED_BY, reason=outcome.message)
            record = self._end(record, job, event, outcome, incident)
        return FiredRun(job.job_id, run.definition_id, run.scheduled_for, record.job.state, group_of(job.spec.subject))

    def cancel_runs(self, job_ids: Sequence[str], reason: str) -> Sequence[Canceled]:
        return self.cancel(job_ids, actor=REPLACED_BY, reason=reason)

    def save_states(self, states: Mapping[int, FiringState]) -> None:
        for number, state in states.items():
            self._set(self.notes_of, number, state)

    def events_processed(self, event_ids: Sequence[int], refused: Mapping[int, str]) -> None:
        for number in event_ids:
            self._set(self.events, number, None)
        for number, why in refused.items():
            self._set(self.refused_events, number, why)

    def next_time(self, now: float) -> float | None:
        planned = [self.notes_of[number].next_at for number in self.definitions if number in self.notes_of]
        delayed = next((at for at, *_ in self._delayed if at > now), None)
        return min((at for at in (*planned, delayed) if at is not None), default=None)


def _ahead_run(record: MemoryJob) -> AheadRun:
    job, lease = record.job, record.job.lease
    holder = ("", "", 0) if lease is None else (lease.worker_id, lease.incarnation, lease.attempt)
    return AheadRun(job.job_id, queue_of(job), record.due, *holder)


def _is_due(definition: Definition, state: FiringState, now: float) -> bool:
    if not definition.enabled or definition.type != DefinitionType.TIME:
        return state.next_at is not None or state.plan != ""
    is_changed = (state.plan, state.changed_at) != (definition.plan, definition.changed_at)
    is_reached = state.next_at is not None and state.next_at <= now
    return is_changed or is_reached or state.fired_until > now + CLOCK_SET_BACK_S
