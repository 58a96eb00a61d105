"""The verb `fire` on the SQL store: definitions, events and the leader's notes as rows (`django/models.py`).

Definitions and events belong to the applications that write them. Definitions are read as committed, without a lock: whoever
edits one in a transaction that lasts never makes the leader wait. The notes (`tasuki_definitionstate`) are written by the leader,
behind the fence of its epoch; a requeue locks them to make a run the last one again. Events, notes and runs that others have
locked are left for the next look.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from tasuki.core.job import State
from tasuki.core.lifecycle import REASSIGN_AFTER_S, after
from tasuki.core.scheduler.firing import (
    CLOCK_SET_BACK_S,
    SKIP_LATE_RUNS_AFTER_S,
    Definition,
    EventRow,
    FiringState,
    PlannedRun,
    stored_ahead,
)
from tasuki.core.store_messages import (
    AheadRun,
    Canceled,
    FiredRun,
    FiredRuns,
    FireOrder,
    JobKind,
    ReadyQueue,
    Submission,
    Submitted,
    storable_text,
)
from tasuki.core.subject import group_of
from tasuki.stores.common import INCIDENT_OF
from tasuki.stores.firing import REPLACED_BY, RUNS_AHEAD_MAX
from tasuki.stores.firing import fire as plan_and_write
from tasuki.stores.sql import submit
from tasuki.stores.sql.database import Transaction, must_change
from tasuki.stores.sql.lease import unassigned
from tasuki.stores.sql.rows import AHEAD, DUE, READY, JobRow

_DEFINITION = Definition.__struct_fields__
_STATE = FiringState.__struct_fields__


def fire(
    tx: Transaction, *, epoch: int, limit: int = 256, ahead_s: float = 0.0, reassign_after_s: float = REASSIGN_AFTER_S
) -> FiredRuns:
    tx.check_epoch(epoch)
    return plan_and_write(_Rows(tx, epoch), tx.clock.wall(), FireOrder(limit, ahead_s, reassign_after_s))


class _Rows:
    """Reads and writes of one transaction; see `stores.firing.FiringRecords`."""

    def __init__(self, tx: Transaction, epoch: int) -> None:
        self._tx = tx
        self._epoch = epoch

    def make_waiting_ready(self) -> int:
        tx = self._tx
        found = tx.session.rows("waiting_over")
        if not found:
            return 0
        free = self.lock_runs([job_id for _, job_id, row_id, *_ in found if row_id is not None])
        over = [row for row in found if row[2] is None or row[1] in free]
        tx.session.change("forget_waiting", (tx.session.listed([definition_id for definition_id, *_ in over]),))
        runs = [
            (row_id, ReadyQueue(subject, JobKind(kind), exec_)) for *_, row_id, subject, kind, exec_ in over if row_id is not None
        ]
        tx.session.change("make_ready", (tx.session.listed([row_id for row_id, _ in runs]),))
        for row_id, queue in runs:
            tx.comes_back(queue, row_id)
        return len(runs)

    def due_definitions(self, now: float, ahead_until: float, limit: int) -> list[tuple[Definition, FiringState]]:
        found = self._tx.session.rows("due_definitions", (now, now + CLOCK_SET_BACK_S, limit, ahead_until))
        return list(map(_definition_of, found))

    def new_events(self, limit: int) -> list[EventRow]:
        return [
            EventRow(id=number, event_type=name, payload_json=_compact(payload), created_at=at, job_definition_id=definition_id)
            for number, name, payload, at, definition_id in self._tx.session.rows("new_events", (limit,))
        ]

    def definitions_for(self, events: Sequence[EventRow]) -> list[tuple[Definition, FiringState]]:
        named = sorted({event.job_definition_id for event in events if event.job_definition_id is not None})
        return list(map(_definition_of, self._tx.session.rows("definitions_for_events", (self._tx.session.listed(named),))))

    def skip_late_runs_after_s(self) -> float:
        found = self._tx.session.rows("skip_late_runs_after")
        return float(found[0][0]) if found else SKIP_LATE_RUNS_AFTER_S

    def states_of(self, job_ids: Collection[str]) -> Mapping[str, State]:
        return {job_id: row.job_state for job_id, row in self._tx.rows_unlocked(sorted(job_ids)).items()}

    def lock_notes(self, definition_ids: Collection[int]) -> Mapping[int, tuple[str, str]]:
        found = self._tx.session.rows("lock_notes", (self._tx.session.listed(sorted(definition_ids)),))
        return {number: (last_run_id, waits_for) for number, last_run_id, waits_for in found}

    def lock_runs(self, job_ids: Collection[str]) -> Collection[str]:
        found = self._tx.session.rows("lock_free_runs", (self._tx.session.listed(sorted(job_ids)),)) if job_ids else ()
        return {job_id for (job_id,) in found}

    def add_runs(self, runs: Sequence[tuple[PlannedRun, Submission]]) -> list[FiredRun]:
        tx = self._tx
        if not runs:
            return []
        answers = submit.submit(tx, [submission for _, submission in runs])
        new = [run for (run, _), answer in zip(runs, answers, strict=True) if isinstance(answer, Submitted) and answer.created]
        marks = [(run.spec.job_id, run.definition_id, run.scheduled_for, self._epoch, _ready_of(run)) for run in new]
        tx.session.changed("mark_runs", (), marks)
        tx.at("fire.written")
        ended = tx.rows(run.spec.job_id for run in new if run.end is not None)
        for run in new:
            if run.end is not None:
                event, outcome = run.end
                row = ended[run.spec.job_id]
                tx.incident(row, INCIDENT_OF[event], actor=REPLACED_BY, reason=outcome.message)
                tx.end_waiting(row, after(row.job_state, event), outcome, epoch=self._epoch)
            elif run.is_ready:
                tx.came_back[ReadyQueue(run.spec.subject, JobKind.COMMAND, run.spec.exec)] = None
        tx.write_state_changes()
        return [
            FiredRun(
                run.spec.job_id,
                run.definition_id,
                run.scheduled_for,
                State.PENDING if run.end is None else after(State.PENDING, run.end[0]),
                group_of(run.spec.subject),
            )
            for run in new
        ]

    def ahead_among(self, job_ids: Collection[str]) -> Mapping[str, bytes]:
        return dict(self._tx.session.rows("ahead_among", (self._tx.session.listed(sorted(job_ids)),)))

    def next_of_nothing(self) -> Mapping[int, str | None]:
        return {
            number: stored_ahead(number, FiringState(next_at=next_at, problem=problem))
            for number, next_at, problem in self._tx.session.rows("next_of_nothing")
        }

    def forget_next(self, definition_ids: Collection[int]) -> None:
        self._tx.session.change("forget_next", (self._tx.session.listed(sorted(definition_ids)),))

    def judge(self, runs: Sequence[PlannedRun], reassign_after_s: float | None) -> list[FiredRun]:
        tx = self._tx
        rows = tx.rows_unlocked(run.spec.job_id for run in runs)  # which are locked
        placed, fired = [], []
        for run in runs:
            row = rows[run.spec.job_id]
            state = State.PENDING
            if run.end is not None:
                event, outcome = run.end
                state = after(state, event)
                tx.incident(row, INCIDENT_OF[event], actor=REPLACED_BY, reason=outcome.message)
                tx.end_waiting(row, state, outcome, epoch=self._epoch)
            elif run.is_ready and row.job_state is State.ASSIGNED and reassign_after_s is not None:
                state = row.job_state
                placed.append(_may_start(row, tx.clock.lease() + reassign_after_s))
            else:
                placed.append(unassigned(tx, row, READY if run.is_ready else 0))
            fired.append(FiredRun(run.spec.job_id, run.definition_id, run.scheduled_for, state, group_of(run.spec.subject)))
        must_change(len(placed), tx.session.changed("set_ahead", (self._epoch,), placed))
        tx.at("fire.judged")
        tx.write_state_changes()
        return fired

    def withdraw(self, job_ids: Collection[str]) -> None:
        tx = self._tx
        rows = tx.rows_unlocked(sorted(job_ids)).values()
        for row in rows:
            tx.count(row.group, row.job_state, -1)
        row_ids = tx.session.listed([row.id for row in rows])
        for name in ("prune_jobs", "prune_incidents") if rows else ():
            tx.session.change(name, (row_ids,))

    def runs_ahead(self) -> list[AheadRun]:
        return [
            AheadRun(job_id, ReadyQueue(subject, JobKind(kind), exec_), ready == DUE, *holder)
            for job_id, subject, kind, exec_, ready, *holder in self._tx.session.rows("runs_ahead", (RUNS_AHEAD_MAX,))
        ]

    def cancel_runs(self, job_ids: Sequence[str], reason: str) -> list[Canceled]:
        return submit.cancel(self._tx, job_ids, actor=REPLACED_BY, reason=reason)

    def save_states(self, states: Mapping[int, FiringState]) -> None:
        rows = [(number, *(getattr(state, name) for name in _STATE)) for number, state in states.items()]
        self._tx.session.changed("save_firing", (), rows)

    def events_processed(self, event_ids: Sequence[int], refused: Mapping[int, str]) -> None:
        if event_ids:
            self._tx.session.change("events_processed", (self._tx.clock.wall(), self._tx.session.listed(list(event_ids))))
        self._tx.session.changed("events_refused", (), [(number, storable_text(why)) for number, why in refused.items()])

    def next_time(self, now: float) -> float | None:
        found = [*self._tx.session.rows("next_nominal"), *self._tx.session.rows("next_delayed", (now,))]
        return min((at for (at,) in found if at is not None), default=None)


def _ready_of(run: PlannedRun) -> int | None:
    """Return the value of `ready` for a new run, if it is another one than that of other new jobs."""
    return AHEAD if run.ahead else None if run.is_ready else 0


def _may_start(row: JobRow, until: float) -> tuple[Any, ...]:
    """Return the values of `set_ahead` for an assigned run that its worker may fetch until this time."""
    holder = (row.attempt, row.lease_id, row.assigned_worker_id, row.incarnation)
    terms = (until, None, row.on_disconnect, row.reconnect_grace_s, row.assigned_at, row.lease_owner)
    return (row.id, row.version, row.state, DUE, *holder, *terms)


_decode_json = msgspec.json.Decoder().decode


def _compact(payload: str | None) -> str:
    """Return the payload as `emit` measured it: databases write it with spaces, or six characters for one that is not ASCII."""
    try:
        return msgspec.json.encode(_decode_json(payload or "null")).decode()
    except (msgspec.DecodeError, ValueError):  # not written by `emit`
        return payload or "null"


def _definition_of(row: Any) -> tuple[Definition, FiringState]:
    fields = dict(zip(_DEFINITION, row, strict=False))
    fields["enabled"] = bool(fields["enabled"])
    if fields["default_args_json"] is not None:
        with suppress(msgspec.DecodeError):  # then it stays a text, which cannot be fired
            fields["default_args_json"] = _decode_json(fields["default_args_json"])
    noted = dict(zip(_STATE, row[len(_DEFINITION) :], strict=True))
    return Definition(**fields), FiringState(**noted) if noted["plan"] is not None else FiringState()
