"""The verb `fire`, written once: it reads definitions and events, has `core.scheduler.firing` plan, and writes the plan.

A store gives the reads and writes (`FiringRecords`), all in the leader's transaction. One look costs the same few statements
whether nothing is due or hundreds of definitions are. It makes RUNS_PER_TURN runs and those of one more definition or event at
most, so that no backlog makes a turn that others wait long for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from tasuki.core.job import TERMINAL, State, body_hash
from tasuki.core.scheduler.firing import (
    PROBLEM_RETRY_S,
    RUNS_PER_TURN,
    SKIP_LATE_RUNS_AFTER_MAX_S,
    Definition,
    DefinitionType,
    EventRow,
    FiringState,
    LastRun,
    PlannedRun,
    check_definition,
    due_times,
    is_for,
    plan_runs,
    run_ahead,
    run_of_event,
    runs_of,
    settled_before,
    stored_ahead,
)
from tasuki.core.scheduler.schedule import parse_schedule, zone_of
from tasuki.core.store_messages import AheadRun, Canceled, FiredRun, FiredRuns, FireOrder, Submission
from tasuki.errors import TasukiError

RUNS_AHEAD_MAX = 2048  # that are listed for the leader at once, the earliest first
REPLACED_BY = "its definition"
"""Actor of the cancel of a run that the next one replaces."""


class FiringRecords(Protocol):
    """Reads and writes of definitions, events and runs in one transaction of the leader."""

    def make_waiting_ready(self) -> int:
        """Make runs ready whose predecessor has ended; return how many. Runs that another transaction has locked are left."""

    def due_definitions(self, now: float, ahead_until: float, limit: int) -> Sequence[tuple[Definition, FiringState]]:
        """Return definitions to look at: due or changed, or whose notes are of a time ahead of `now`, the longest due first; and
        those whose next run is due until `ahead_until` and not stored."""

    def new_events(self, limit: int) -> Sequence[EventRow]:
        """Return events that are not processed and that nobody else has locked, the oldest first."""

    def definitions_for(self, events: Sequence[EventRow]) -> Sequence[tuple[Definition, FiringState]]:
        """Return all definitions that one of these events may be for."""

    def skip_late_runs_after_s(self) -> float: ...

    def states_of(self, job_ids: Collection[str]) -> Mapping[str, State]:
        """Return the states of the jobs that exist, without a lock: an application that has one of them in a transaction that
        lasts stops no leader. A run that ends, or is run again, at this moment might as well have done so a moment later."""

    def lock_notes(self, definition_ids: Collection[int]) -> Mapping[int, tuple[str, str]]:
        """Lock the notes on these definitions, unless somebody else has, and return `last_run_id` and `waits_for` as they are:
        a requeue writes them too."""

    def lock_runs(self, job_ids: Collection[str]) -> Collection[str]:
        """Lock runs, and return those that nobody else has locked."""

    def ahead_among(self, job_ids: Collection[str]) -> Mapping[str, bytes]:
        """Return the runs among these that were stored ahead and are not judged yet, and the hashes of their bodies."""

    def next_of_nothing(self) -> Mapping[int, str | None]:
        """Return definitions that are gone and whose notes have a next run, with the id that this has if it is stored."""

    def forget_next(self, definition_ids: Collection[int]) -> None:
        """Note that these definitions have no next run."""

    def judge(self, runs: Sequence[PlannedRun], reassign_after_s: float | None) -> Sequence[FiredRun]:
        """Let runs start that were stored ahead; one with `waits_for` waits, one with an `end` is terminal. None: nobody can tell
        their workers, and a free worker takes them."""

    def withdraw(self, job_ids: Collection[str]) -> None:
        """Delete runs that were stored ahead and are not judged yet."""

    def runs_ahead(self) -> Sequence[AheadRun]:
        """Return all runs that were stored ahead and that no worker has fetched, the earliest first."""

    def add_runs(self, runs: Sequence[tuple[PlannedRun, Submission]]) -> Sequence[FiredRun]:
        """Store runs whose ids are new, and return them. One with `waits_for` is not ready, nor is one ahead of its time; one
        with an `end` is terminal."""

    def cancel_runs(self, job_ids: Sequence[str], reason: str) -> Sequence[Canceled]: ...

    def save_states(self, states: Mapping[int, FiringState]) -> None: ...

    def events_processed(self, event_ids: Sequence[int], refused: Mapping[int, str]) -> None:
        """Note that these events have their runs; of some, why a definition that matched got none."""

    def next_time(self, now: float) -> float | None:
        """Return the wall time of the next nominal time, or of the next delayed job after `now`. Jobs that `promote` has left are
        locked by others, or will be found by its next look at all: to look at once would change nothing."""


def fire(records: FiringRecords, now: float, order: FireOrder) -> FiredRuns:
    """Make the runs that are due, and say when to look again."""
    fired = _fire(records, now, order)
    return replace(fired, ahead=tuple(records.runs_ahead())) if order.ahead_s else fired


def _fire(records: FiringRecords, now: float, order: FireOrder) -> FiredRuns:
    limit = order.limit
    released = records.make_waiting_ready()
    due = records.due_definitions(now, now + order.ahead_s, limit)
    events = records.new_events(limit)
    if gone := records.next_of_nothing():
        _withdraw(records, gone)
    if not due and not events:
        return _with_wait(FiredRuns(released=released), records.next_time(now), now)
    firing = _Firing(records, now, order)
    for definition, state in due:
        if not firing.is_full:
            firing.look_at(definition, state)
    taken = firing.take_events(events, records.definitions_for(events)) if events else ()
    answer = replace(firing.write(), released=released)
    done = [event.id for event in taken if event.id not in firing.left_events]
    records.events_processed(done, {number: why for number, why in firing.refused.items() if number in done})
    if firing.left:  # they are due still: to look again at once would find them locked again
        return answer
    if firing.is_full or len(due) >= limit or len(events) >= limit:
        return replace(answer, wait_s=0.0)
    return _with_wait(answer, records.next_time(now), now)


def _withdraw(records: FiringRecords, gone: Mapping[int, str | None]) -> None:
    """Withdraw the runs that were stored ahead for definitions that are gone."""
    job_ids = [job_id for job_id in gone.values() if job_id is not None]
    free = set(records.lock_runs(job_ids))
    stored = set(records.ahead_among(job_ids))
    if stored & free:
        records.withdraw(stored & free)
    records.forget_next([number for number, job_id in gone.items() if job_id not in stored - free])


def _with_wait(answer: FiredRuns, following: float | None, now: float) -> FiredRuns:
    return answer if following is None else replace(answer, wait_s=max(0.0, following - now))


def going_on(state: FiringState, known: Mapping[str, State]) -> str | None:
    """Return the run of a definition that another one must not overlap, if there is any."""
    last = _last_run(state, known)
    return last.open if last is not None else None


class _Firing:
    """The plans of one call."""

    def __init__(self, records: FiringRecords, now: float, order: FireOrder) -> None:
        self._records = records
        self._now = now
        self._order = order
        self._window_s = min(SKIP_LATE_RUNS_AFTER_MAX_S, max(0.0, records.skip_late_runs_after_s()))  # anybody may write the row
        self._definitions: dict[int, Definition] = {}
        self._states: dict[int, FiringState] = {}
        self._runs: dict[int, list[PlannedRun]] = {}
        self._planned = 0
        self._ahead: dict[int, PlannedRun] = {}
        """The next runs, to be stored ahead of their times."""
        self._stored_ahead: dict[int, str] = {}
        """Ids that the next runs had when the definitions were last looked at: they may be stored."""
        self._with_notes: set[int] = set()
        self._events_of: dict[int, list[int]] = {}
        self.left: set[int] = set()
        """Definitions for the next look: somebody else has locked what would be written."""
        self.left_events: set[int] = set()
        self.refused: dict[int, str] = {}
        """Events that a definition cannot be run upon, and why."""

    @property
    def is_full(self) -> bool:
        """Return whether this turn has enough runs."""
        return self._planned >= RUNS_PER_TURN

    def look_at(self, definition: Definition, state: FiringState) -> None:
        """Find the nominal times that are due. A definition that cannot be fired keeps no other from it: its problem is noted."""
        self._add(definition, state)
        if (job_id := stored_ahead(definition.id, state)) is not None:
            self._stored_ahead[definition.id] = job_id
        if not definition.enabled or definition.type != DefinitionType.TIME:
            # Times until now are settled: if it is enabled by an update, which notes no time, they do not count.
            settled = max(state.fired_until, self._now)
            self._states[definition.id] = replace(
                state, fired_until=settled, next_at=None, plan="", changed_at=definition.changed_at, problem=""
            )
            return
        settled = settled_before(definition, state, self._now)
        noted = replace(
            state, fired_until=settled, next_at=None, plan=definition.plan, changed_at=definition.changed_at, problem=""
        )
        try:
            check_definition(definition)
            schedule = parse_schedule(definition.schedule_type, definition.schedule_value)
            due = due_times(schedule, zone_of(definition.time_zone), settled, self._now, self._window_s)
            self._runs[definition.id] = list(runs_of(definition, due, self._window_s))
            self._planned += len(self._runs[definition.id])
            if (run := run_ahead(definition, due, self._now, self._order.ahead_s, self._window_s)) is not None:
                self._ahead[definition.id] = run
                self._planned += 1
        except TasukiError as error:
            self._states[definition.id] = replace(noted, next_at=self._now + PROBLEM_RETRY_S, problem=error.message)
        else:
            self._states[definition.id] = replace(noted, fired_until=due.settled_until, next_at=due.next_at)

    def take_events(
        self, events: Sequence[EventRow], definitions: Sequence[tuple[Definition, FiringState]]
    ) -> Sequence[EventRow]:
        """Add the runs of events, each with all its runs, until this turn has enough; return those that were taken."""
        matching: dict[int, list[EventRow]] = {}
        taken = 0
        while taken < len(events) and not self.is_full:
            event = events[taken]
            for definition, _ in definitions:
                if is_for(event, definition):
                    matching.setdefault(definition.id, []).append(event)
                    self._planned += 1
            taken += 1
        for definition, state in definitions:
            if definition.id in matching:
                self._add_events(definition, state, matching[definition.id])
        return events[:taken]

    def _add_events(self, definition: Definition, state: FiringState, matching: Sequence[EventRow]) -> None:
        """Add the runs of events for this definition. One that cannot be run is noted with the event and the definition."""
        self._add(definition, state)
        self._events_of[definition.id] = [event.id for event in matching]
        state = self._states.setdefault(definition.id, state)
        runs, problem = self._runs.setdefault(definition.id, []), ""
        for event in matching:
            try:
                runs.append(run_of_event(definition, event))
            except TasukiError as error:
                problem = error.message
                self.refused[event.id] = f"definition {definition.name}: {problem}"
        if problem or definition.type == DefinitionType.EVENT:
            self._states[definition.id] = replace(state, problem=problem)

    def _add(self, definition: Definition, state: FiringState) -> None:
        self._definitions[definition.id] = definition
        if state != FiringState():
            self._with_notes.add(definition.id)

    def _leave(self, number: int) -> None:
        self.left.add(number)
        self.left_events.update(self._events_of.get(number, ()))
        del self._states[number]
        self._runs.pop(number, None)
        self._ahead.pop(number, None)

    def _lock(self) -> None:
        """Read the notes once more, locked: a run may have been set going again since. The leader waits for nobody."""
        locked = self._records.lock_notes(self._with_notes) if self._with_notes else {}
        for number in self._with_notes:
            if number in locked:
                last_run_id, waits_for = locked[number]
                self._states[number] = replace(self._states[number], last_run_id=last_run_id, waits_for=waits_for)
            else:
                self._leave(number)

    def _take_ahead(self) -> tuple[dict[str, PlannedRun], set[str]]:
        """Return the runs of this look that were stored ahead, and those to be withdrawn: of a definition that was changed."""
        stored = {number: job_id for number, job_id in self._stored_ahead.items() if number in self._states}
        if not stored:
            return {}, set()
        free = set(self._records.lock_runs(stored.values()))  # before they are read: nobody changes them from here on
        hashes = self._records.ahead_among(stored.values())
        taken: dict[str, PlannedRun] = {}
        withdrawn: set[str] = set()
        for number, job_id in stored.items():
            if job_id not in hashes:
                continue
            if job_id not in free:
                self._leave(number)
                continue
            planned = [*self._runs.get(number, ()), *([self._ahead[number]] if number in self._ahead else [])]
            run = next((run for run in planned if run.spec.job_id == job_id), None)
            if run is None or body_hash(run.spec) != hashes[job_id]:
                withdrawn.add(job_id)
            elif run.ahead:  # its time has not come: it stays as it is
                del self._ahead[number]
            else:
                taken[job_id] = run
        return taken, withdrawn

    def write(self) -> FiredRuns:
        """Decide which runs may follow now, and store everything."""
        self._lock()
        taken, withdrawn = self._take_ahead()
        if withdrawn:
            self._records.withdraw(withdrawn)
        asked = {run.spec.job_id for runs in self._runs.values() for run in runs}
        earlier = {job_id for state in self._states.values() for job_id in (state.last_run_id, state.waits_for) if job_id}
        known = self._records.states_of(asked | earlier) if asked else {}
        known = {job_id: state for job_id, state in known.items() if job_id not in taken}
        plans = {
            number: plan_runs(self._definitions[number].policy, runs, _last_run(self._states[number], known), known)
            for number, runs in self._runs.items()
        }
        wanted = [job_id for plan in plans.values() for job_id in plan.cancel]
        free = set(self._records.lock_runs(wanted)) if wanted else set()
        new: list[PlannedRun] = []
        cancel: list[str] = []
        for number, plan in plans.items():
            if not free.issuperset(plan.cancel):
                self._leave(number)
                continue
            state = self._states[number]
            new += plan.runs
            cancel += plan.cancel
            latest = next((run for run in reversed(plan.runs) if run.spec.job_id == plan.last_run_id), None)
            waits_for = state.waits_for if latest is None else latest.waits_for or ""
            self._states[number] = replace(state, last_run_id=plan.last_run_id, waits_for=waits_for)
        judged = [run for run in new if run.spec.job_id in taken]
        new = [run for run in new if run.spec.job_id not in taken] + list(self._ahead.values())
        stored = self._records.add_runs([(run, Submission(run.spec, run.submitter, body_hash(run.spec))) for run in new])
        ahead = {run.spec.job_id for run in self._ahead.values()}
        started = [run for run in stored if run.job_id not in ahead]
        if judged:
            started += self._records.judge(judged, self._order.reassign_after_s if self._order.ahead_s else None)
        canceled = self._records.cancel_runs(cancel, "replaced by the next run of its definition") if cancel else ()
        self._records.save_states(self._states)
        return FiredRuns(runs=tuple(started), replaced=tuple(zip(cancel, canceled, strict=True)))


def _last_run(state: FiringState, known: Mapping[str, State]) -> LastRun | None:
    if not state.last_run_id:
        return None
    waits_for = state.waits_for or None
    return LastRun(state.last_run_id, not _is_open(state.last_run_id, known), waits_for if _is_open(waits_for, known) else None)


def _is_open(job_id: str | None, known: Mapping[str, State]) -> bool:
    """Return whether the run has not ended. One that is not in the store any more was deleted after its end."""
    return job_id is not None and known.get(job_id, State.SUCCEEDED) not in TERMINAL
