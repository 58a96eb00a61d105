"""The runs of definitions: which nominal times are due, how runs follow each other, and what a definition may say."""

from __future__ import annotations

from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tasuki.core.job import definition_of, event_run_id, run_id
from tasuki.core.lifecycle import JobEvent
from tasuki.core.scheduler.firing import (
    MISSED_COUNT_MAX,
    Definition,
    DueTimes,
    EventRow,
    FiringState,
    LastRun,
    PlannedRun,
    arguments_of,
    check_definition,
    check_event,
    due_times,
    is_for,
    plan_runs,
    run_of_event,
    runs_of,
    settled_before,
)
from tasuki.core.scheduler.schedule import parse_schedule
from tasuki.errors import InvalidInput, TooLarge

UTC = ZoneInfo("UTC")
MINUTELY = parse_schedule("every_n_minutes", "1")
NOW = 1_800_000_000.0  # a whole minute
EVERY_MINUTE = Definition(id=7, name="m", command_name="tick", schedule_type="every_n_minutes", schedule_value="1")


# ---------------------------------------------------------------------------------------------------- which times


def test_all_times_since_the_last_look_are_due() -> None:
    due = due_times(MINUTELY, UTC, NOW - 120, NOW + 5, 300.0)

    assert due == DueTimes((1_799_999_940, 1_800_000_000), 0, None, NOW + 5, 1_800_000_060)


def test_after_three_hours_one_skipped_run_tells_of_the_times_outside_the_window() -> None:
    due = due_times(MINUTELY, UTC, NOW - 3 * 3600, NOW, 300.0)
    runs = list(runs_of(EVERY_MINUTE, due, 300.0))

    assert (due.missed, due.newest_missed) == (174, 1_799_999_640)
    assert due.times == tuple(range(1_799_999_700, 1_800_000_001, 60))  # a run exactly at the end of its window may still start
    assert [run.end is None for run in runs] == [False, *[True] * 6]
    assert runs[0].end is not None
    assert runs[0].end[0] is JobEvent.SKIP
    assert "174 nominal times were missed by more than 300 s" in runs[0].end[1].message
    assert [(run.spec.not_before, run.spec.not_after) for run in runs[1:2]] == [(1_799_999_700.0, 1_800_000_000.0)]


def test_years_without_a_leader_are_not_counted_one_by_one() -> None:
    due = due_times(MINUTELY, UTC, 0.0, NOW, 300.0)

    assert due.missed == MISSED_COUNT_MAX + 1
    assert "more than 200 nominal times" in next(runs_of(EVERY_MINUTE, due, 300.0)).end[1].message  # type: ignore[index]


def test_a_long_window_is_settled_some_runs_at_a_time() -> None:
    settled, seen = NOW - 7200, []
    for _ in range(3):
        due = due_times(MINUTELY, UTC, settled, NOW, 86_400.0)
        settled = due.settled_until
        seen += due.times

    assert seen == list(range(int(NOW) - 7140, int(NOW) + 1, 60))
    assert settled == NOW


@given(
    st.lists(st.floats(0.1, 500.0), min_size=1, max_size=30), st.sampled_from([("daily_at", "02:30"), ("cron", "*/3 * * * *")])
)
def test_whenever_the_leader_looks_each_time_is_settled_once(waits: list[float], form: tuple[str, str]) -> None:
    schedule, begin, now, seen = parse_schedule(*form), NOW, NOW, []
    settled = begin
    for wait_s in waits:
        now += wait_s
        due = due_times(schedule, UTC, settled, now, 1_000.0)
        seen += due.times
        settled = due.settled_until

    assert seen == _until(schedule, begin, now)


def _until(schedule: Any, begin: float, end: float) -> list[int]:
    found = []
    for at in schedule.times(begin, UTC):
        if at > end:
            return found
        found.append(at)
    return found


@pytest.mark.parametrize(
    ("state", "changed_at", "settled"),
    [
        (FiringState(), NOW - 50, NOW - 50),  # new: from the time when it was made
        (FiringState(), 0.0, NOW - 1),  # made without `save`
        (FiringState(fired_until=NOW - 90, plan=EVERY_MINUTE.plan, changed_at=NOW - 500), NOW - 500, NOW - 90),
        (FiringState(fired_until=NOW - 90, plan="daily_at 02:30 UTC", changed_at=NOW - 500), NOW - 40, NOW - 40),  # edited
        (FiringState(fired_until=NOW - 90, plan=EVERY_MINUTE.plan, changed_at=NOW - 500), NOW - 40, NOW - 40),  # enabled again
        (FiringState(fired_until=NOW - 90, plan="daily_at 02:30 UTC", changed_at=NOW - 500), NOW - 500, NOW - 1),  # by update()
        (
            FiringState(fired_until=NOW - 90, plan="daily_at 02:30 UTC", changed_at=NOW - 500),
            NOW - 200,
            NOW - 90,
        ),  # edited, and the clock was set back
        (FiringState(fired_until=NOW, plan=EVERY_MINUTE.plan, changed_at=NOW - 9), NOW + 30, NOW),  # by a clock that is ahead
        (FiringState(fired_until=NOW + 86_400, plan=EVERY_MINUTE.plan, changed_at=0.0), 0.0, NOW),  # the clock was set back
    ],
)
def test_nominal_times_count_from(state: FiringState, changed_at: float, settled: float) -> None:
    definition = replace(EVERY_MINUTE, changed_at=changed_at)

    assert settled_before(definition, state, NOW) == settled


# ---------------------------------------------------------------------------------------------------- which runs at once


def planned(*nominal: int) -> list[PlannedRun]:
    return list(runs_of(EVERY_MINUTE, DueTimes(nominal), 300.0))


def ends(runs: list[PlannedRun]) -> list[str | None]:
    return [run.end[1].error_code if run.end is not None else None for run in runs]


def test_forbid_skips_while_the_last_run_goes_on_and_among_new_ones() -> None:
    free = plan_runs("forbid", planned(60, 120), LastRun("d7-0", is_over=True), ())
    busy = plan_runs("forbid", planned(60), LastRun("d7-0", is_over=False), ())

    assert (ends(free.runs), free.last_run_id) == ([None, "STILL_RUNNING"], "d7-60")
    assert (ends(busy.runs), busy.last_run_id, busy.cancel) == (["STILL_RUNNING"], "d7-0", [])


def test_replace_cancels_the_last_run_and_waits_for_it() -> None:
    plan = plan_runs("replace", planned(60, 120), LastRun("d7-0", is_over=False), ())

    assert (plan.cancel, ends(plan.runs), plan.last_run_id) == (["d7-0"], ["CANCELED", None], "d7-120")
    assert [run.waits_for for run in plan.runs] == [None, "d7-0"]


@pytest.mark.parametrize("is_over", [True, False])
def test_what_replaces_a_run_that_never_began_waits_for_the_one_before(is_over: bool) -> None:
    plan = plan_runs("replace", planned(120), LastRun("d7-60", is_over=is_over, waits_for="d7-0"), ())
    forbidden = plan_runs("forbid", planned(120), LastRun("d7-60", is_over=is_over, waits_for="d7-0"), ())

    assert plan.runs[0].waits_for == "d7-0"
    assert plan.cancel == ([] if is_over else ["d7-60"])
    assert ends(forbidden.runs) == ["STILL_RUNNING"]


def test_allow_lets_all_run_and_known_runs_change_nothing() -> None:
    allowed = plan_runs("allow", planned(60, 120), LastRun("d7-0", is_over=False), ())
    again = plan_runs("replace", planned(60), LastRun("d7-120", is_over=False), {"d7-60"})

    assert ends(allowed.runs) == [None, None]
    assert (again.runs, again.cancel, again.last_run_id) == ([], [], "d7-120")


# ---------------------------------------------------------------------------------------------------- events and arguments


def test_an_event_is_for_definitions_whose_pattern_matches() -> None:
    event = EventRow(id=3, event_type="order.paid", payload_json='{"order":17}', created_at=NOW)
    by_event = replace(EVERY_MINUTE, type="event", event_type="order.*", default_args_json=["x"])

    run = run_of_event(by_event, event)

    assert is_for(event, by_event)
    assert not is_for(event, replace(by_event, enabled=False))
    assert not is_for(event, replace(by_event, event_type="order.*.late"))
    assert not is_for(event, EVERY_MINUTE)
    assert (run.spec.job_id, run.spec.args) == ("e3-7", ("tick", "x", '--event={"order":17}'))
    assert (run.spec.not_after, run.scheduled_for) == (None, NOW)


def test_a_run_by_hand_is_for_one_definition_only_also_a_disabled_one() -> None:
    event = EventRow(id=3, event_type="definition.run", created_at=NOW, job_definition_id=7)
    others = replace(EVERY_MINUTE, id=8, type="event", event_type=">")

    assert is_for(event, replace(EVERY_MINUTE, enabled=False))
    assert not is_for(event, others)
    assert run_of_event(EVERY_MINUTE, event).spec.args == ("tick",)
    assert run_of_event(EVERY_MINUTE, replace(event, payload_json="[1]")).spec.args == ("tick", "--event=[1]")


def test_the_id_of_a_run_names_its_definition() -> None:
    assert [definition_of(run_id(7, 1_767_225_600)), definition_of(event_run_id(12, 7))] == [7, 7]
    assert {definition_of(other) for other in ("d7", "7-12", "xd7-12", "e12-7-1", "01a1f193-8a7b-7220", f"d7-{10**19}")} == {None}


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (None, ()),
        ([], ()),
        ({}, ()),
        (["--days", "7", 3, 2.5, ""], ("--days", "7", "3", "2.5", "")),
        ({"days": 7, "verbose": True, "tags": ["a", "b"]}, ("--days=7", "--verbose", "--tags=a", "--tags=b")),
        ({"no_color": False, "since": None, "dry_run": True, "text": "a b"}, ("--dry-run", "--text=a b")),
        ({"args": ["in.csv"], "options": {"days": 7}}, ("--days=7", "in.csv")),
        ({"args": ["in.csv"]}, ("in.csv",)),
        ({"options": {"tags": []}}, ()),
    ],
)
def test_default_args_become_a_command_line(written: Any, arguments: tuple[str, ...]) -> None:
    assert arguments_of(written) == arguments


@pytest.mark.parametrize(
    "written",
    [
        "text", 7, True, [True], [None], [["a"]], [{}], ["\0"], {"days": {}}, {"days": [None]}, {"a b": 1}, {"": 1}, {"-x": 1},
        {"args": 5}, {"args": [], "days": 7}, {"options": []}, {"args": [], "options": "x"},
    ],
)  # fmt: skip
def test_any_other_form_of_default_args_is_refused(written: Any) -> None:
    with pytest.raises(InvalidInput, match="default_args_json"):
        arguments_of(written)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": " "}, "name ' ' must have"),
        ({"command_name": "../x"}, "command_name '../x' must be"),
        ({"queue": "a c"}, "queue 'a c' must be"),
        ({"queue": "a.c"}, "queue 'a.c' must not have a dot"),
        ({"type": "hourly"}, "type 'hourly' must be one of time, event"),
        ({"concurrency_policy": "maybe"}, "concurrency_policy 'maybe' must be one of forbid, allow, replace"),
        ({"timeout_seconds": 0}, "timeout_seconds 0 must be above 0"),
        ({"max_retries": -1}, "max_retries -1 must not"),
        ({"schedule_value": "7"}, "schedule_value '7'"),
        ({"type": "event"}, "event_type is empty"),
        ({"type": "event", "event_type": "a..b"}, "event_type: "),
        ({"default_args_json": "x"}, "default_args_json must be"),
    ],
)
def test_a_definition_that_cannot_be_fired_is_refused_with_its_field(fields: dict[str, Any], words: str) -> None:
    check_definition(EVERY_MINUTE)
    with pytest.raises(InvalidInput) as refused:
        check_definition(replace(EVERY_MINUTE, **fields))

    assert refused.value.message.startswith(words)


def test_an_event_must_have_a_type_and_json_of_some_size() -> None:
    assert check_event("order.paid", {"order": 17}) == '{"order":17}'
    for event_type, payload in (("order.*", None), ("", None), ("a", {1, 2}), ("a", object())):
        with pytest.raises(InvalidInput, match=r"event_type|payload"):
            check_event(event_type, payload) if payload is None else check_event(event_type, [payload, object()])
    with pytest.raises(TooLarge, match="the limit is 65536; store it, and send its key"):
        check_event("a", "x" * 10_000_000)
