"""Firing on every store that has definitions: one run for each nominal time and event, overlap, windows, edits, clocks."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from msgspec.structs import asdict, replace

from tasuki.core.job import State
from tasuki.core.scheduler.firing import Definition, EventRow
from tasuki.core.store_messages import FiredRuns, JobKind, Requeued
from tasuki.errors import ConfigError, StaleEpoch
from tasuki.stores.memory.store import MemoryStore
from tasuki.stores.redis.store import RedisStore
from tasuki.stores.sql import leader
from tasuki.stores.sql.store import SqlStore
from tasuki.testing.clocks import FakeClock
from tasuki.testing.store_stage import Stage
from tests.support.sqlite_files import with_tables

T0 = 1_800_000_000.0  # a whole minute
MINUTELY = Definition(
    id=1, name="tick", command_name="tick", schedule_type="every_n_minutes", schedule_value="1", concurrency_policy="allow",
    max_retries=1, changed_at=T0 - 10,
)  # fmt: skip
ON_PAID = Definition(id=2, name="mail", command_name="mail", type="event", event_type="order.*", concurrency_policy="allow")


class Firing(Stage):
    """A store with definitions, written to as an application does."""

    def __init__(self, store: Any, clock: FakeClock) -> None:
        super().__init__(store, clock)
        self.ahead_s = 0.0
        self._events = 0

    def define(self, *definitions: Definition) -> None:
        for definition in definitions:
            if isinstance(self.store, MemoryStore):
                self.store.define(definition)
            else:
                fields = {name: value for name, value in asdict(definition).items() if name != "id"}
                self._models.JobDefinition.objects.using(self._alias).update_or_create(id=definition.id, defaults=fields)
                if definition.changed_at != self._changed_at(definition.id):  # `save` notes the time of the real clock
                    self._models.JobDefinition.objects.using(self._alias).filter(id=definition.id).update(
                        changed_at=definition.changed_at
                    )

    def _changed_at(self, number: int) -> float:
        found: float = self._models.JobDefinition.objects.using(self._alias).get(id=number).changed_at.timestamp()
        return found

    def undefine(self, number: int) -> None:
        if isinstance(self.store, MemoryStore):
            self.store.undefine(number)
        else:
            self._models.JobDefinition.objects.using(self._alias).get(id=number).delete()

    def emit(self, event_type: str, payload: Any = None, *, by_hand_for: int | None = None, created_at: float = T0) -> int:
        self._events += 1
        if isinstance(self.store, MemoryStore):
            text = "null" if payload is None else payload
            row = EventRow(
                id=self._events,
                event_type=event_type,
                payload_json=text,
                created_at=created_at,
                job_definition_id=by_hand_for,
            )
            self.store.emit(row)
            return row.id
        event = self._models.Event(
            event_type=event_type, payload_json=payload, created_at=created_at, job_definition_id=by_hand_for
        )
        event.save(using=self._alias)
        return int(event.pk)

    def refused_events(self) -> list[tuple[int, str]]:
        if isinstance(self.store, MemoryStore):
            return list(self.store.refused_events.items())
        return list(self._models.Event.objects.using(self._alias).exclude(problem="").values_list("pk", "problem"))

    def window(self, seconds: float) -> None:
        if isinstance(self.store, MemoryStore):
            self.store.window_s = seconds
        else:
            rows = self._models.SchedulerSettings.objects.using(self._alias)
            rows.update_or_create(id=1, defaults={"skip_late_runs_after_seconds": seconds})

    @property
    def _models(self) -> Any:
        from tasuki.django import models

        return models

    @property
    def _alias(self) -> str:
        alias: str = self.store._database._alias  # type: ignore[attr-defined]
        return alias

    def fire(self, *, limit: int = 256) -> FiredRuns:
        return self.store.fire(epoch=self.epoch, limit=limit, ahead_s=self.ahead_s)

    def at(self, seconds: float) -> FiredRuns:
        """Let the clock show T0 + seconds, and fire."""
        self.clock.advance(T0 + seconds - self.clock.wall())
        return self.fire()

    def run(self, job_id: str, worker_id: str = "w1") -> Any:
        """Lease and start the run."""
        grant = self.take(job_id, worker_id)
        assert self.start(grant, worker_id) == "go_on"
        return grant

    def runs(self) -> dict[str, tuple[str, str]]:
        jobs = self.find_all(limit=500)
        return {job.job_id: (str(job.state), (job.outcome.error_code or "") if job.outcome is not None else "") for job in jobs}


def ids(fired: FiredRuns) -> list[str]:
    return [run.job_id for run in fired.runs]


def d(seconds: float, definition: int = 1) -> str:
    return f"d{definition}-{T0 + seconds:.0f}"


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def firing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Firing]:
    clock = FakeClock(wall=T0 - 5)
    makers: dict[str, Callable[[], Any]] = {
        "memory": lambda: MemoryStore(clock),
        "sqlite": lambda: SqlStore.open_sqlite(with_tables(tmp_path / "tasuki.sqlite3"), clock=clock),
        "postgresql": lambda: SqlStore.open_postgresql(request.getfixturevalue("postgres_url"), clock=clock),
    }
    store = makers[request.param]()
    yield Firing(store, clock)
    store.close()


# ---------------------------------------------------------------------------------------------------- nominal times


def test_a_definition_is_fired_at_its_times_and_a_second_look_changes_nothing(firing: Firing) -> None:
    firing.define(MINUTELY)

    assert firing.fire() == FiredRuns(wait_s=pytest.approx(T0 - firing.clock.wall()))
    first, again, later = firing.at(0.01), firing.fire(), firing.at(125)

    assert (ids(first), ids(again), ids(later)) == ([d(0)], [], [d(60), d(120)])
    assert first.wait_s == pytest.approx(59.99)
    job = firing.job(d(0))
    assert (job.state, job.scheduled_for, job.job_definition_id, job.leader_epoch) == (State.PENDING, T0, 1, firing.epoch)
    assert (job.spec.subject, job.spec.args, job.not_after) == ("default.tick", ("tick",), T0 + 300)
    assert firing.take(d(0)).attempt == 1


def test_a_stale_leader_fires_nothing(firing: Firing) -> None:
    firing.define(MINUTELY)
    firing.lead("leader-2")

    with pytest.raises(StaleEpoch):
        firing.at(1)
    assert firing.runs() == {}


def test_a_turn_that_is_rolled_back_fired_nothing_and_the_next_fires_it(firing: Firing) -> None:
    firing.define(MINUTELY)
    firing.clock.advance(6)

    with firing.abandoned_turn():
        assert ids(firing.fire()) == [d(0)]
    assert firing.runs() == {}
    assert ids(firing.fire()) == [d(0)]


def test_after_three_hours_the_old_times_leave_one_skipped_run(firing: Firing) -> None:
    firing.define(MINUTELY)
    firing.at(0.5)
    fired = firing.at(3 * 3600 + 0.5)

    assert [(run.job_id, str(run.state)) for run in fired.runs[:2]] == [
        (d(3 * 3600 - 300), "SKIPPED"), (d(3 * 3600 - 240), "PENDING"),
    ]  # fmt: skip
    assert len(fired.runs) == 6
    skipped = firing.job(d(3 * 3600 - 300))
    assert skipped.outcome is not None
    assert skipped.outcome.error_code == "TOO_LATE"
    assert "175 nominal times were missed" in skipped.outcome.message
    assert firing.kinds(skipped.job_id) == ["skipped"]
    assert firing.store.counts()["default"].skipped == 1


def test_the_window_of_the_settings_is_in_force_at_once(firing: Firing) -> None:
    firing.define(MINUTELY)
    firing.at(0.5)
    firing.window(0.0)

    assert [(run.job_id, str(run.state)) for run in firing.at(180.5).runs] == [(d(180), "SKIPPED")]


def test_a_run_that_never_began_is_skipped_after_its_window_and_one_that_began_is_retried(firing: Firing) -> None:
    firing.define(MINUTELY)
    firing.at(0.5)
    firing.at(60.5)
    grant = firing.run(d(60))
    firing.clock.advance(400)

    assert firing.fail(grant, error_code="EXIT_CODE").state is State.PENDING
    assert firing.skip() == [d(0)]
    firing.clock.advance(20)
    firing.promote()
    assert firing.take(d(60)).attempt == 2


def test_a_run_that_was_lost_after_its_start_is_not_skipped(firing: Firing) -> None:
    firing.define(MINUTELY)
    firing.at(0.5)
    firing.run(d(0))
    firing.clock.advance(400)
    firing.reap()

    assert firing.skip() == []
    assert firing.job(d(0)).state is State.PENDING


# ---------------------------------------------------------------------------------------------------- edits


def test_an_edit_before_the_time_fires_the_new_schedule_only(firing: Firing) -> None:
    firing.define(MINUTELY)
    firing.at(0.5)
    firing.define(replace(MINUTELY, schedule_value="2", changed_at=T0 + 50))

    assert [ids(firing.at(seconds)) for seconds in (60.5, 120.5, 180.5, 240.5)] == [[], [d(120)], [], [d(240)]]


def test_an_edit_that_leaves_the_schedule_misses_no_time(firing: Firing) -> None:
    firing.define(MINUTELY)
    firing.at(0.5)
    firing.define(replace(MINUTELY, command_name="tock"))

    assert ids(firing.at(60.5)) == [d(60)]
    assert firing.job(d(60)).spec.args == ("tock",)


def test_an_edit_while_no_leader_looked_counts_from_the_edit(firing: Firing) -> None:
    firing.define(replace(MINUTELY, schedule_type="daily_at", schedule_value="00:00"))
    firing.at(0.5)
    firing.define(replace(MINUTELY, changed_at=T0 + 90))

    assert ids(firing.at(200)) == [d(120), d(180)]


def test_a_disabled_or_deleted_definition_is_not_fired_and_one_enabled_again_counts_from_then(firing: Firing) -> None:
    firing.define(MINUTELY, replace(MINUTELY, id=7, name="gone"))
    firing.at(0.5)
    firing.define(replace(MINUTELY, enabled=False))
    firing.undefine(7)
    off = firing.at(180)
    firing.define(replace(MINUTELY, changed_at=T0 + 190))

    assert (ids(off), off.wait_s) == ([], None)
    assert ids(firing.at(245)) == [d(240)]


def test_one_disabled_by_save_and_enabled_by_update_has_no_run_for_the_time_between(firing: Firing) -> None:
    firing.define(MINUTELY)
    firing.at(0.5)
    firing.define(replace(MINUTELY, enabled=False, changed_at=T0 + 10))
    firing.at(11)
    firing.clock.advance(189)
    firing.define(replace(MINUTELY, changed_at=T0 + 10))  # an update notes no time

    assert ids(firing.at(200)) == []
    assert ids(firing.at(245)) == [d(240)]


@pytest.mark.parametrize("wrong", [{"default_args_json": "x"}, {"queue": "a b"}])
def test_a_definition_that_is_put_in_order_is_fired_again(firing: Firing, wrong: dict[str, Any]) -> None:
    firing.define(replace(MINUTELY, **wrong))
    assert ids(firing.at(0.5)) == []
    firing.define(MINUTELY)  # its times are the same as before

    assert firing.at(61.5).runs[-1].job_id == d(60)
    assert sorted(firing.runs()) == [d(0), d(60)]


@pytest.mark.parametrize("window", [math.inf, -math.inf, -5.0])
def test_a_window_that_cannot_be_leaves_others_in_force(firing: Firing, window: float) -> None:
    firing.window(window)
    firing.define(MINUTELY)

    assert ids(firing.at(0.0)) == [d(0)]


def test_a_definition_that_cannot_be_fired_keeps_no_other_from_it(firing: Firing) -> None:
    firing.define(replace(MINUTELY, id=3, name="zone", time_zone="Mars/Olympus"), MINUTELY)
    firing.define(replace(MINUTELY, id=4, name="cron", schedule_type="cron", schedule_value="nonsense"))

    fired = firing.at(0.5)

    assert ids(fired) == [d(0)]
    assert fired.wait_s == pytest.approx(59.5)


CLOCK_CHANGES = {
    "Berlin, gap": ("Europe/Berlin", "2027-03-28T01:00Z"),
    "Berlin, overlap": ("Europe/Berlin", "2027-10-31T01:00Z"),
    "Lord Howe, overlap of half an hour": ("Australia/Lord_Howe", "2027-04-03T15:00Z"),
    "Lord Howe, gap of half an hour": ("Australia/Lord_Howe", "2027-10-02T15:30Z"),
}
AROUND_TWO = [
    ("daily_at", "02:15"), ("daily_at", "01:45"), ("weekly", "sun 02:15"), ("cron", "*/15 1-2 * * *"), ("cron", "45 1,2 * * *"),
    ("hourly_at_minute", "45"), ("every_n_minutes", "45"),
]  # fmt: skip


@pytest.mark.parametrize("firing", ["sqlite", "postgresql"], indirect=True)
@pytest.mark.parametrize(("zone", "change"), CLOCK_CHANGES.values(), ids=CLOCK_CHANGES)
def test_a_definition_is_fired_at_the_times_of_its_preview_also_when_clocks_change(
    firing: Firing, zone: str, change: str
) -> None:
    begin = datetime.fromisoformat(change) - timedelta(hours=3)
    firing.clock.advance(begin.timestamp() - firing.clock.wall())
    previews = {}
    for number, (kind, value) in enumerate(AROUND_TWO, 1):
        form = {"schedule_type": kind, "schedule_value": value, "time_zone": zone, "changed_at": begin.timestamp()}
        firing.define(replace(MINUTELY, id=number, name=f"n{number}", **form))
        defined = firing._models.JobDefinition.objects.using(firing._alias).get(id=number)
        previews[number] = [at.timestamp() for at in defined.preview(12, after=begin)]

    fired: dict[int, list[float]] = {number: [] for number in previews}
    while any(len(times) < 12 for times in fired.values()):
        look = firing.fire()
        for run in look.runs:
            job = firing.job(run.job_id)
            fired[job.job_definition_id].append(job.scheduled_for)
            if len(fired[job.job_definition_id]) == 12:
                firing.undefine(job.job_definition_id)
        firing.clock.advance((look.wait_s or 0.0) + 0.001)

    assert fired == previews


# ---------------------------------------------------------------------------------------------------- clocks


@pytest.mark.parametrize("seconds", [3600, 86_400])
def test_a_clock_that_jumps_and_comes_back_fires_no_time_twice_and_none_never(firing: Firing, seconds: int) -> None:
    firing.define(MINUTELY)
    firing.at(0.5)
    firing.clock.jump_wall(seconds)
    forward = firing.fire()
    firing.clock.jump_wall(-seconds)
    back = firing.fire()

    assert len(forward.runs) == 6
    assert (ids(back), back.wait_s) == ([], pytest.approx(59.5))
    assert ids(firing.at(60.5)) == [d(60)]


@pytest.mark.parametrize("seconds", [3600, 86_400])
def test_a_clock_that_is_set_back_and_put_right_fires_no_time_twice_and_no_burst(firing: Firing, seconds: int) -> None:
    firing.define(MINUTELY)
    looks = [firing.at(0.5), firing.at(60.5)]
    firing.clock.jump_wall(-seconds)
    looks += [firing.fire(), firing.at(120.5 - seconds)]
    firing.clock.jump_wall(seconds)
    looks += [firing.fire(), firing.at(180.5)]

    fired = [ids(look) for look in looks]
    assert fired[:4] == [[d(0)], [d(60)], [], [d(120 - seconds)]]
    assert fired[5] == [d(180)]
    assert [str(run.state) for run in looks[4].runs].count("SKIPPED") == 1
    assert len(fired[4]) <= 6
    every = [job_id for look in fired for job_id in look]
    assert len(every) == len(set(every))


def test_a_clock_that_is_set_back_fires_known_times_no_second_time(firing: Firing) -> None:
    firing.define(MINUTELY)
    for seconds in (0.5, 60.5, 120.5):
        firing.at(seconds)
    firing.clock.jump_wall(-100)

    fired = [ids(firing.at(seconds)) for seconds in (21, 61, 121, 181)]

    assert fired == [[], [], [], [d(180)]]
    assert sorted(firing.runs()) == [d(0), d(60), d(120), d(180)]


# ---------------------------------------------------------------------------------------------------- overlap


def test_forbid_skips_while_a_run_goes_on_or_waits_for_its_retry(firing: Firing) -> None:
    firing.define(replace(MINUTELY, concurrency_policy="forbid"))
    firing.at(0.5)
    grant = firing.run(d(0))
    firing.at(60.5)
    firing.fail(grant, error_code="EXIT_CODE")
    firing.at(120.5)
    firing.promote()
    firing.finish(firing.take(d(0)))
    firing.at(180.5)

    assert firing.runs() == {
        d(0): ("SUCCEEDED", ""), d(60): ("SKIPPED", "STILL_RUNNING"), d(120): ("SKIPPED", "STILL_RUNNING"),
        d(180): ("PENDING", ""),
    }  # fmt: skip


def test_replace_cancels_the_run_and_the_new_one_starts_when_it_has_ended(firing: Firing) -> None:
    firing.define(replace(MINUTELY, concurrency_policy="replace"))
    firing.at(0.5)
    grant = firing.run(d(0))
    fired = firing.at(60.5)

    assert [(job_id, canceled.requested) for job_id, canceled in fired.replaced] == [(d(0), True)]
    assert firing.promote() == 0
    assert firing.lease("w2", limit=9) == []
    assert firing.renew(grant) == "cancel"
    assert firing.fire().released == 0
    firing.fail(grant, error_code="CANCELED")
    assert firing.fire().released == 1
    assert firing.store.notes().ready == (("default.tick", JobKind.COMMAND, "django"),)
    assert [grant.job_id for grant in firing.lease("w2", limit=9)] == [d(60)]
    assert firing.runs()[d(0)] == ("CANCELED", "CANCELED")


def test_a_third_run_waits_for_the_first_although_the_second_never_began(firing: Firing) -> None:
    firing.define(replace(MINUTELY, concurrency_policy="replace"))
    firing.at(0.5)
    grant = firing.run(d(0))
    firing.at(60.5)
    firing.at(120.5)

    assert firing.runs() == {d(0): ("RUNNING", ""), d(60): ("CANCELED", "CANCELED"), d(120): ("PENDING", "")}
    assert firing.lease("w2", limit=9) == []
    firing.store.cancel([d(120)], actor="alice")
    firing.at(180.5)
    assert firing.lease("w2", limit=9) == []
    firing.finish(grant)
    firing.fire()
    assert [grant.job_id for grant in firing.lease("w2", limit=9)] == [d(180)]


def test_a_run_that_waits_is_released_also_if_its_definition_was_deleted(firing: Firing) -> None:
    firing.define(replace(MINUTELY, concurrency_policy="replace"))
    firing.at(0.5)
    grant = firing.run(d(0))
    firing.at(60.5)
    firing.undefine(1)
    assert firing.fire().released == 0
    firing.finish(grant)

    assert firing.fire().released == 1
    assert [grant.job_id for grant in firing.lease("w2", limit=9)] == [d(60)]


def test_what_waited_past_its_window_is_skipped(firing: Firing) -> None:
    firing.define(replace(MINUTELY, schedule_value="720", concurrency_policy="replace"))
    begin = (-T0) % 43_200
    firing.at(begin + 0.5)
    grant = firing.run(d(begin))
    firing.at(begin + 43_200.5)
    firing.clock.advance(400)
    firing.finish(grant)
    firing.fire()

    assert firing.skip() == [d(begin + 43_200)]


def test_a_run_is_not_run_again_while_another_one_of_its_definition_goes_on(firing: Firing) -> None:
    firing.define(replace(MINUTELY, concurrency_policy="forbid"))
    firing.at(0.5)
    firing.finish(firing.run(d(0)))
    firing.at(60.5)
    grant = firing.run(d(60))

    assert firing.store.requeue([d(0)], actor="alice") == [Requeued(False, State.SUCCEEDED, d(60), "default")]
    firing.finish(grant)
    assert firing.store.requeue([d(0), d(60)], actor="alice") == [
        Requeued(True, State.PENDING, group="default"), Requeued(False, State.SUCCEEDED, d(0), "default"),
    ]  # fmt: skip
    assert [str(run.state) for run in firing.at(120.5).runs] == ["SKIPPED"]
    firing.finish(firing.run(d(0)))
    assert [str(run.state) for run in firing.at(180.5).runs] == ["PENDING"]


def test_a_run_that_is_run_again_is_replaced_by_the_next_one(firing: Firing) -> None:
    firing.define(replace(MINUTELY, concurrency_policy="replace"))
    firing.at(0.5)
    firing.finish(firing.run(d(0)))
    firing.at(60.5)
    firing.finish(firing.run(d(60)))
    assert firing.store.requeue([d(0)], actor="alice") == [Requeued(True, State.PENDING, group="default")]
    grant = firing.run(d(0))

    assert [job_id for job_id, _ in firing.at(120.5).replaced] == [d(0)]
    assert firing.lease("w2", limit=9) == []
    firing.fail(grant, error_code="CANCELED")
    assert firing.fire().released == 1


def test_with_allow_any_run_is_run_again(firing: Firing) -> None:
    firing.define(MINUTELY)
    firing.at(0.5)
    firing.finish(firing.run(d(0)))
    firing.at(60.5)

    assert firing.store.requeue([d(0)], actor="alice") == [Requeued(True, State.PENDING, group="default")]


# ---------------------------------------------------------------------------------------------------- rows that others hold


@pytest.fixture
def shared(postgres_url: str) -> Iterator[tuple[Firing, psycopg.Connection]]:
    """A leader, and the connection of an application that locks rows."""
    clock = FakeClock(wall=T0 - 5)
    with (
        closing(SqlStore.open_postgresql(postgres_url, clock=clock)) as store,
        closing(psycopg.connect(postgres_url)) as application,
    ):
        yield Firing(store, clock), application


def test_an_application_that_holds_the_last_run_in_its_transaction_stops_no_leader(
    shared: tuple[Firing, psycopg.Connection],
) -> None:
    firing, application = shared
    firing.define(replace(MINUTELY, concurrency_policy="forbid"))
    firing.at(0.5)
    application.execute("SELECT 1 FROM tasuki_jobrun WHERE idempotency_key = %s FOR UPDATE", [d(0)])

    assert [(run.job_id, str(run.state)) for run in firing.at(60.5).runs] == [(d(60), "SKIPPED")]


@pytest.mark.parametrize(
    "held",
    [
        "SELECT 1 FROM tasuki_jobrun WHERE idempotency_key = 'd1-1800000000' FOR UPDATE",
        "SELECT 1 FROM tasuki_definitionstate WHERE definition_id = 1 FOR UPDATE",
    ],
)
def test_a_definition_whose_run_or_notes_are_held_is_left_for_the_next_look(
    shared: tuple[Firing, psycopg.Connection], held: str
) -> None:
    firing, application = shared
    firing.define(replace(MINUTELY, concurrency_policy="replace"), replace(MINUTELY, id=3, name="other"))
    firing.at(0.5)
    firing.run(d(0))
    by_hand = firing.emit("definition.run", by_hand_for=1, created_at=T0 + 70)
    application.execute(held)

    look = firing.at(60.5)
    assert (ids(look), look.replaced, look.wait_s) == ([d(60, 3)], (), None)
    application.rollback()
    again = firing.fire()
    assert (ids(again), [job_id for job_id, _ in again.replaced]) == ([d(60), f"e{by_hand}-1"], [d(0)])
    assert again.wait_s == pytest.approx(59.5)


def test_events_and_waiting_runs_that_are_held_are_left_for_the_next_look(shared: tuple[Firing, psycopg.Connection]) -> None:
    firing, application = shared
    firing.define(ON_PAID, replace(MINUTELY, concurrency_policy="replace"))
    firing.at(0.5)
    grant = firing.run(d(0))
    firing.at(60.5)
    firing.finish(grant)
    held, free = firing.emit("order.paid"), firing.emit("order.paid")
    application.execute("UPDATE tasuki_event SET event_type = 'order.sent' WHERE id = %s", [held])
    application.execute("SELECT 1 FROM tasuki_jobrun WHERE idempotency_key = %s FOR UPDATE", [d(60)])

    look = firing.fire()
    assert (ids(look), look.released) == ([f"e{free}-2"], 0)
    application.commit()
    look = firing.fire()
    assert (ids(look), look.released) == ([f"e{held}-2"], 1)


# ---------------------------------------------------------------------------------------------------- events


def test_an_event_gives_each_matching_definition_one_run(firing: Firing) -> None:
    firing.define(ON_PAID, replace(ON_PAID, id=3, name="all", event_type=">"), replace(ON_PAID, id=4, name="x", event_type="x"))
    payload = '{"order":17}' if isinstance(firing.store, MemoryStore) else {"order": 17}
    event = firing.emit("order.paid", payload)

    first, again = firing.fire(), firing.fire()

    assert (ids(first), ids(again)) == ([f"e{event}-2", f"e{event}-3"], [])
    command, argument = firing.job(f"e{event}-2").spec.args
    assert (command, argument) == ("mail", '--event={"order":17}')


def test_an_event_may_have_64_kib_of_any_letters(firing: Firing) -> None:
    firing.define(ON_PAID)
    text = "я" * 32_000
    event = firing.emit("order.paid", f'"{text}"' if isinstance(firing.store, MemoryStore) else text)

    assert ids(firing.fire()) == [f"e{event}-2"]
    assert firing.job(f"e{event}-2").spec.args == ("mail", f'--event="{text}"')


def test_events_obey_the_policy_and_a_run_by_hand_too(firing: Firing) -> None:
    firing.define(replace(ON_PAID, concurrency_policy="forbid"), replace(MINUTELY, enabled=False))
    events = [firing.emit("order.paid") for _ in range(2)]
    by_hand = firing.emit("definition.run", by_hand_for=1)

    firing.fire()

    assert firing.runs() == {
        f"e{events[0]}-2": ("PENDING", ""), f"e{events[1]}-2": ("SKIPPED", "STILL_RUNNING"), f"e{by_hand}-1": ("PENDING", ""),
    }  # fmt: skip
    assert firing.job(f"e{by_hand}-1").spec.args == ("tick",)


def test_an_event_is_run_however_late_and_some_at_a_time(firing: Firing) -> None:
    firing.define(ON_PAID)
    events = [firing.emit("order.paid") for _ in range(5)]
    firing.clock.advance(10_000)

    looks = [firing.fire(limit=2) for _ in range(3)]

    assert [len(look.runs) for look in looks] == [2, 2, 1]
    assert [look.wait_s for look in looks] == [0.0, 0.0, None]
    assert sorted(firing.runs()) == sorted(f"e{event}-2" for event in events)
    assert firing.skip() == []


@pytest.mark.parametrize("created_at", [1e18, -1e18])
def test_an_event_of_no_possible_time_keeps_no_other_from_its_run(firing: Firing, created_at: float) -> None:
    firing.define(ON_PAID)
    wrong = firing.emit("order.paid", created_at=created_at)
    event = firing.emit("order.paid")

    assert ids(firing.fire()) == [f"e{event}-2"]
    assert ids(firing.fire()) == []
    [(refused, why)] = firing.refused_events()
    assert refused == wrong
    assert why.startswith(f"definition mail: event {wrong}: created_at ")


def test_a_delayed_job_that_cannot_be_promoted_yet_makes_no_look_come_at_once(firing: Firing) -> None:
    firing.submit("later", not_before=T0 + 10)
    firing.submit("much-later", not_before=T0 + 50)

    assert firing.at(20).wait_s == pytest.approx(30)


# ---------------------------------------------------------------------------------------------------- many


def test_three_hours_without_a_leader_and_600_definitions_leave_600_skipped_runs(firing: Firing) -> None:
    leave_for_three_hours(firing, 600 if isinstance(firing.store, MemoryStore) else 120)


def leave_for_three_hours(firing: Firing, count: int) -> None:
    """Let so many definitions of every minute be without a leader; check that old times are SKIPPED, and the others have runs."""
    firing.define(*(replace(MINUTELY, id=number, name=f"n{number}") for number in range(1, count + 1)))
    while firing.at(0.5).wait_s == 0.0:
        pass
    firing.clock.advance(3 * 3600)
    states: Counter[str] = Counter()
    while True:
        fired = firing.fire()
        states.update(str(run.state) for run in fired.runs)
        if fired.wait_s != 0.0:
            break

    assert states == {"SKIPPED": count, "PENDING": 5 * count}
    assert fired.wait_s == pytest.approx(59.5)


def test_a_turn_makes_a_bounded_number_of_runs_and_the_next_one_goes_on(firing: Firing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasuki.stores.firing.RUNS_PER_TURN", 6)
    firing.define(*(replace(MINUTELY, id=number, name=f"n{number}") for number in (1, 2, 3, 4)))
    firing.define(*(replace(ON_PAID, id=number, name=f"n{number}") for number in (5, 6, 7, 8)))
    firing.at(-4)
    events = [firing.emit("order.paid") for _ in range(3)]

    looks = [firing.at(130)]  # three nominal times of each
    while looks[-1].wait_s == 0.0:
        looks.append(firing.fire())

    made = [len(look.runs) for look in looks]
    assert made == [6, 6, 8, 4]  # two definitions, the other two, two events with all their runs, the last one
    assert len(firing.runs()) == 4 * 3 + len(events) * 4
    assert looks[-1].wait_s == pytest.approx(50)


@pytest.mark.parametrize("ahead_s", [0.0, 90.0])
def test_around_its_time_a_definition_that_is_changed_runs_as_the_old_or_the_new_one_once(firing: Firing, ahead_s: float) -> None:
    firing.ahead_s = ahead_s
    edit_around_its_times(firing, 1_000 if isinstance(firing.store, MemoryStore) else 100)


def edit_around_its_times(firing: Firing, minutes: int) -> None:
    """At a random moment of each minute the command or the schedule is changed, or the definition is disabled and enabled, or
    deleted and made again."""
    chance = random.Random(7)
    definition, is_there = MINUTELY, True
    firing.define(definition)
    firing.window(1e6)
    expected: dict[float, set[str]] = {}
    for minute in range(minutes):
        due, edit_at = minute * 60.0, minute * 60.0 + chance.choice((-1, -0.1, -0.001, 0.001, 0.1, 1))
        before, was_there = definition, is_there
        definition = replace(definition, command_name=f"v{minute}")
        is_there = chance.random() < 0.85 or not was_there
        if chance.random() < 0.3 or not was_there:  # a change of the schedule counts from its own time
            definition = replace(definition, schedule_type="cron", schedule_value="* * * * *", changed_at=T0 + edit_at)
        if chance.random() < 0.3:
            definition = replace(definition, enabled=not definition.enabled, changed_at=T0 + edit_at)
        looks = sorted([edit_at - 0.0005, edit_at + 0.0005, due + chance.random()])
        for look_at in looks:
            if look_at > edit_at and firing.clock.wall() <= T0 + edit_at:
                if is_there:
                    firing.define(definition)
                else:
                    firing.undefine(definition.id)
            firing.at(max(look_at, firing.clock.wall() - T0))
        sides = [one for one, there in ((before, was_there), (definition, is_there)) if there and one.enabled]
        allowed = {one.command_name for one in sides}
        if len({one.changed_at for one in sides}) != 1 or len(sides) < 2:
            allowed.add("")  # it may also have no run
        expected[T0 + due] = allowed

    ran = {at: job.spec.args[0] for job in firing.find_all(limit=500) if (at := job.scheduled_for or 0.0) <= max(expected)}
    assert {at: command for at, command in ran.items() if command not in expected.get(at, set())} == {}
    assert [at for at, allowed in expected.items() if "" not in allowed and at not in ran] == []
    assert len(ran) > minutes / 4


@pytest.mark.parametrize("firing", ["sqlite", "postgresql"], indirect=True)
def test_the_leader_deletes_old_events_and_notes_of_deleted_definitions(firing: Firing, monkeypatch: Any) -> None:
    models, using = firing._models, firing._alias
    firing.define(MINUTELY, replace(MINUTELY, id=7, name="gone"), ON_PAID)
    firing.at(0.5)
    firing.undefine(7)
    events = [firing.emit("order.paid") for _ in range(4)]
    firing.fire()
    rows = models.Event.objects.using(using)
    rows.filter(pk__in=events[:2]).update(processed_at=T0 - 1)
    rows.filter(pk=events[3]).update(processed_at=None)
    monkeypatch.setattr(leader, "PRUNE_ROWS_MAX", 1)

    left = []
    for _ in range(3):
        assert firing.store.prune(before=T0, epoch=firing.epoch) == 0
        left.append(sorted(rows.values_list("pk", flat=True)))

    assert left == [events[1:], events[2:], events[2:]]
    assert sorted(models.DefinitionState.objects.using(using).values_list("definition_id", flat=True)) == [1, 2]


def test_redis_has_no_definitions_and_says_so(redis_url: str) -> None:
    store = RedisStore.open(redis_url)
    store.take_over("leader", 1)

    with pytest.raises(ConfigError, match="tables of the SQL store; use PostgreSQL or SQLite"):
        store.fire(epoch=1)
    store.close()
