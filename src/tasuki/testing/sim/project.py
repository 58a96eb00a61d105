"""The applications of a Django project beside the servers: definitions and events, written to the store between its turns.

Their writes are operations of the client `project`, drawn from the seed as all others. Nominal times come every few seconds here,
and end before the faults do, since a world lasts 18 s and must come to rest. The history ends with all due firings: each
time of a definition's last version, and a run of each event for each definition by event, whatever the store's clock did.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import tzinfo
from typing import Any
from unittest import mock

from msgspec.structs import asdict, replace

from tasuki.core.job import event_run_id, run_id
from tasuki.core.scheduler.firing import Definition, EventRow
from tasuki.core.scheduler.schedule import ClockChange, Schedule
from tasuki.stores import firing
from tasuki.stores.memory.store import MemoryStore
from tasuki.testing.sim.clients import PROJECT, Operation
from tasuki.testing.sim.history import DefinitionEvent, DueEvent
from tasuki.testing.sim.servers import StoreNode
from tasuki.testing.sim.world import WALL_START_S, SimOptions, Streams, World

STEPS_S = (2, 3, 5)  # numbers of minutes that a definition may have
TIMES_END = WALL_START_S + 14.0
POLICIES = ("forbid", "replace", "forbid", "replace", "allow")
TRY_AGAIN_S = 0.5


class _ShortSchedule(Schedule, frozen=True, kw_only=True):
    """A schedule whose grain and end a simulated world has time for."""

    step_s: int

    def after(self, at: float, zone: tzinfo | None = None) -> int | None:
        following = int(at // self.step_s + 1) * self.step_s
        return following if following <= TIMES_END else None


def _parsed(_type: str, value: str) -> _ShortSchedule:
    return _ShortSchedule(minutes=(0,), on_clock_change=ClockChange.ELAPSED, step_s=int(value))


@contextmanager
def short_schedules() -> Iterator[None]:
    """Let `every_n_minutes` be that many seconds."""
    with mock.patch.object(firing, "parse_schedule", _parsed):
        yield


def draw_writes(streams: Streams, options: SimOptions) -> list[Operation]:
    """Draw the writes of the applications: definitions at the start, changes of those by time, and events; and the runs that an
    operator sets going again, whether or not they are there by then."""
    chance, found = streams.applications, list[Operation]()
    operator = f"client-{options.clients}"  # who may see all jobs

    def write(at: float, verb: str, definition: Definition | None = None) -> None:
        found.append(Operation(number=0, at=at, client=PROJECT, verb=verb, definition=definition))

    for number in range(1, (options.definitions or 0) + 1):
        by_event = chance.random() < 0.4
        definition = Definition(
            id=number,
            name=f"definition {number}",
            # A subject of all workers: a run's successor may go to another one.
            queue="render",
            command_name="fast",
            type="event" if by_event else "time",
            event_type=">" if by_event else "",
            schedule_type="every_n_minutes",
            schedule_value=str(chance.choice(STEPS_S)),
            max_retries=1,
            retry_backoff_seconds=1,
            concurrency_policy=chance.choice(POLICIES),
        )
        write(chance.random(), "define", definition)
        for _ in range(0 if by_event else chance.choice((0, 0, 1, 2, 3))):
            verb = chance.choice(("edit", "edit", "disable", "enable", "delete"))
            value = str(chance.choice(STEPS_S))
            write(1.0 + 12.0 * chance.random(), verb, replace(definition, schedule_value=value, enabled=verb != "disable"))
        for _ in range(chance.choice((0, 1, 2, 3))):
            nominal = _parsed("", definition.schedule_value).after(WALL_START_S + 9.0 * chance.random()) or 0
            run = event_run_id(chance.randint(1, 4), number) if by_event else run_id(number, nominal)
            at = 3.0 + 12.0 * chance.random()
            found.append(Operation(number=0, at=at, client=operator, verb="requeue", job_ids=(run,)))
    for _ in range(chance.randint(2, 6) if options.definitions else 0):
        write(1.0 + 12.0 * chance.random(), "emit")
    return found


class Project:
    """The applications of one world."""

    def __init__(self, world: World, storage: StoreNode) -> None:
        self.world = world
        self.storage = storage
        self.last: dict[int, tuple[Definition, float]] = {}
        """Definitions as they were last written, with the highest time that the store's clock had shown by then, or that of the
        last event."""
        self.emitted: list[EventRow] = []

    def write(self, operation: Operation) -> None:
        troubles = self.storage.troubles
        if any(troubles.down.values()) or any(troubles.full.values()):
            self.world.after(TRY_AGAIN_S, f"{PROJECT} tries again", self.write, operation)
        elif operation.definition is None:
            self.emitted.append(EventRow(id=len(self.emitted) + 1, event_type="order.paid", created_at=len(self.emitted) + 1.0))
            self._add_event(self.emitted[-1])
        else:
            self._define(operation.definition, is_gone=operation.verb == "delete")

    def _define(self, definition: Definition, *, is_gone: bool) -> None:
        clock = self.storage.clock
        definition = replace(definition, changed_at=clock.wall(), enabled=definition.enabled and not is_gone)
        by_event = definition.type == "event"
        self.last[definition.id] = definition, float(len(self.emitted)) if by_event else clock.highest_wall()
        self._store_definition(definition, is_gone=is_gone)
        self.world.tell(
            DefinitionEvent(
                at=self.world.at,
                definition=str(definition.id),
                policy="allow" if is_gone else definition.policy,
                enabled=definition.enabled,
                by_event=by_event,
                every_s=int(definition.schedule_value),
            )
        )

    def _store_definition(self, definition: Definition, *, is_gone: bool) -> None:
        store: Any = self.storage.store
        if isinstance(store, MemoryStore):
            store.undefine(definition.id) if is_gone else store.define(definition)
            return
        from tasuki.django.models import JobDefinition

        rows, columns = JobDefinition.objects.using(store._database._alias), asdict(definition)
        if is_gone:
            rows.filter(id=definition.id).delete()
        else:
            changed = [name for name in columns if name != "id"]
            rows.bulk_create([JobDefinition(**columns)], update_conflicts=True, unique_fields=["id"], update_fields=changed)

    def _add_event(self, event: EventRow) -> None:
        store: Any = self.storage.store
        if isinstance(store, MemoryStore):
            store.emit(event)
            return
        from tasuki.django.models import Event

        Event(id=event.id, event_type=event.event_type, created_at=event.created_at).save(using=store._database._alias)

    @property
    def has_times(self) -> bool:
        """Nominal times are to come."""
        by_time = [definition for definition, _ in self.last.values() if definition.enabled and definition.type == "time"]
        return bool(by_time) and self.storage.clock.wall() <= TIMES_END

    def tell_what_was_due(self) -> None:
        for number, (definition, since) in self.last.items():
            # Times before the definition could be written, because of an outage, are over.
            times: list[float] = [event.created_at for event in self.emitted if event.created_at > since]
            if definition.type == "time":
                schedule = _parsed("", definition.schedule_value)
                times = list(schedule.times(since, None)) if definition.enabled else []  # type: ignore[arg-type]
            for nominal in times:
                self.world.tell(DueEvent(at=self.world.at, definition=str(number), nominal=float(nominal)))
