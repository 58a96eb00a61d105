"""Schedules in every zone around the days on which its clocks are changed, compared with a walk over all minutes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from functools import cache
from itertools import islice, pairwise
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasuki.core.scheduler.schedule import ClockChange, Schedule, parse_schedule, preview
from tasuki.errors import InvalidInput

ZONES = sorted(name for name in available_timezones() if not name.startswith(("posix", "right", "build", "Factory", "local")))
FIRST, LAST = (int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) for year in (1970, 2040))
FORMS = [
    ("every_n_minutes", "1"), ("every_n_minutes", "15"), ("every_n_minutes", "45"), ("every_n_minutes", "120"),
    ("every_n_minutes", "1440"), ("hourly_at_minute", "0"), ("hourly_at_minute", "30"), ("daily_at", "00:00"),
    ("daily_at", "02:30"), ("daily_at", "23:45"), ("weekly", "sun 02:30"), ("weekly", "mon,sat 00:15"),
    ("cron", "30 2 * * *"), ("cron", "0,30 0-3 * * *"), ("cron", "*/30 2 * * *"), ("cron", "5 * * * *"),
    ("cron", "0 1 * * sun"),
]  # fmt: skip


@cache
def transitions(zone: ZoneInfo) -> list[int]:
    """The instants from 1970 to 2040 at which the zone's clock is changed, by halving intervals of a week."""

    def offset(at: int) -> timedelta | None:
        return datetime.fromtimestamp(at, zone).utcoffset()

    found = []
    for (low, one), (high, other) in pairwise((at, offset(at)) for at in range(FIRST, LAST, 7 * 86_400)):
        if one != other:
            before, behind = low, high
            while behind - before > 1:
                middle = (before + behind) // 2
                before, behind = (middle, behind) if offset(middle) == offset(before) else (before, middle)
            found.append(behind)
    return found


def local(at: int, zone: ZoneInfo) -> tuple[date, int]:
    shown = datetime.fromtimestamp(at, zone)
    return shown.date(), 60 * shown.hour + shown.minute


def expected(schedule: Schedule, zone: ZoneInfo, begin: int, end: int) -> list[int]:
    """The nominal times from `begin` on, by looking at the local clock every 60 s from two days before."""
    step = DAY_S // len(schedule.minutes)
    found: set[int] = set()
    wanted = set(schedule.minutes)
    seen: set[tuple[date, int]] = set()
    before: tuple[date, int] | None = None
    midnight, latest_day = None, date.min
    for at in range(begin - 2 * DAY_S, end, 60):
        now = local(at, zone)
        if before is not None and now[0] > before[0] and now[0] > latest_day:
            midnight, latest_day = at, now[0]
        if schedule.on_clock_change is ClockChange.ELAPSED:
            if midnight is not None and (at - midnight) % step == 0:
                found.add(at)
        elif schedule.on_clock_change is ClockChange.AS_SHOWN:
            if now[1] in wanted and schedule.is_day(now[0]):
                found.add(at)
        elif before is not None:  # each local minute since the last look, shown or left out; none a second time
            for day, minute in skipped(before, now):
                if (day, minute) not in seen and minute in wanted and schedule.is_day(day):
                    found.add(at)
        if before is not None:
            seen.update(skipped(before, now))
        before = now
    return sorted(at for at in found if at >= begin)


def skipped(before: tuple[date, int], now: tuple[date, int]) -> Iterator[tuple[date, int]]:
    """The local minutes after `before` up to `now`."""
    day, minute = before
    if now < before:
        yield now
    while (day, minute) < now:
        day, minute = (day, minute + 1) if minute < 1439 else (day + timedelta(days=1), 0)
        yield day, minute


DAY_S = 86_400


@cache
def zones_of_whole_minutes() -> list[ZoneInfo]:
    """Not made when this file is imported: all processes of the tests would take their seconds for it."""
    return [zone for zone in map(ZoneInfo, ZONES) if all(at % 60 == 0 for at in transitions(zone))]


def test_all_zones_but_those_with_odd_seconds_are_walked() -> None:
    assert len(zones_of_whole_minutes()) > 0.95 * len(ZONES) > 400


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_around_a_change_of_the_clock_the_times_are_those_of_a_walk_over_all_minutes(data: st.DataObject) -> None:
    zone = data.draw(st.sampled_from([zone for zone in zones_of_whole_minutes() if transitions(zone)]))
    change = data.draw(st.sampled_from(transitions(zone)))
    form = data.draw(st.sampled_from(FORMS))
    schedule = parse_schedule(*form)
    begin, end = change - DAY_S, change + 2 * DAY_S
    if datetime.fromtimestamp(begin - 2 * DAY_S, zone).utcoffset().total_seconds() % 60:  # type: ignore[union-attr]
        return

    found = [at for at in islice(schedule.times(begin - 1, zone), 5_000) if at < end]

    assert found == expected(schedule, zone, begin, end), (zone, form, datetime.fromtimestamp(change, UTC))


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
def test_in_every_zone_times_increase_and_any_start_gives_the_same(form: tuple[str, str]) -> None:
    schedule = parse_schedule(*form)
    chance = random.Random(str(form))
    for zone in map(ZoneInfo, ZONES):
        change = chance.choice(transitions(zone) or [FIRST + 30 * DAY_S])
        times = preview(schedule, change - 3 * 3600, zone, 12)
        assert times == sorted(set(times))
        for at in chance.sample(range(12), 2):
            begin = times[at] - chance.choice((0.001, 1, 30))
            if at == 0 or begin >= times[at - 1]:
                assert preview(schedule, begin, zone, 2) == times[at : at + 2] or at == 11, (zone.key, form)


@pytest.mark.parametrize(
    ("form", "at", "times"),
    [
        # Berlin: 2026-03-29 02:00 becomes 03:00, 2026-10-25 03:00 becomes 02:00.
        (("daily_at", "02:30"), "2026-03-29", ["03-29T03:00+02:00", "03-30T02:30+02:00"]),
        (("daily_at", "02:30"), "2026-10-25", ["10-25T02:30+02:00", "10-26T02:30+01:00"]),
        (("cron", "30 2 * * *"), "2026-03-29", ["03-29T03:00+02:00", "03-30T02:30+02:00"]),
        (("cron", "*/30 2 * * *"), "2026-03-29", ["03-30T02:00+02:00", "03-30T02:30+02:00"]),
        (
            ("cron", "*/30 2 * * *"),
            "2026-10-25",
            ["10-25T02:00+02:00", "10-25T02:30+02:00", "10-25T02:00+01:00", "10-25T02:30+01:00", "10-26T02:00+01:00"],
        ),
        (("every_n_minutes", "720"), "2026-03-29", ["03-29T00:00+01:00", "03-29T13:00+02:00", "03-30T00:00+02:00"]),
        (("hourly_at_minute", "15"), "2026-10-25T01:30", ["10-25T02:15+02:00", "10-25T02:15+01:00", "10-25T03:15+01:00"]),
        (("weekly", "sun 02:30"), "2026-03-23", ["03-29T03:00+02:00", "04-05T02:30+02:00"]),
    ],
)
def test_the_examples_of_the_guide(form: tuple[str, str], at: str, times: list[str]) -> None:
    zone = ZoneInfo("Europe/Berlin")
    begin = datetime.fromisoformat(at).replace(tzinfo=zone).timestamp() - 1

    found = preview(parse_schedule(*form), begin, zone, len(times))

    assert [datetime.fromtimestamp(one, zone).strftime("%m-%dT%H:%M%z") for one in found] == [
        text.replace("+02:00", "+0200").replace("+01:00", "+0100") for text in times
    ]


def test_on_ordinary_days_cron_is_that_of_cronsim() -> None:
    from cronsim import CronSim

    for expression in ("*/7 3-9 * * mon-fri", "0 0 1,15 * fri", "59 23 L * *", "0 12 * 2 mon#5", "15 4 29 2 *"):
        begin = datetime(2026, 1, 1, tzinfo=UTC)
        wanted = [int(at.timestamp()) for at in islice(CronSim(expression, begin), 20)]
        assert preview(parse_schedule("cron", expression), begin.timestamp(), UTC, 20) == wanted


@given(st.integers(FIRST, LAST), st.sampled_from(FORMS), st.sampled_from(["UTC", "America/St_Johns", "Australia/Lord_Howe"]))
@settings(max_examples=100, deadline=None)
def test_the_latest_time_is_the_one_before_the_next(at: int, form: tuple[str, str], name: str) -> None:
    schedule, zone = parse_schedule(*form), ZoneInfo(name)

    latest = schedule.last_until(at, zone)

    assert latest is not None
    assert latest <= at < (schedule.after(latest, zone) or 0)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (("every_n_minutes", "7"), "must divide a day of 1440 minutes; 5, 6, 8, 9 do"),
        (("every_n_minutes", "0"), "from 1 to 1440"),
        (("every_n_minutes", "²"), "from 1 to 1440"),
        (("hourly_at_minute", "60"), "from 0 to 59"),
        (("daily_at", "24:00"), "from 00:00 to 23:59"),
        (("daily_at", "2:30"), "is written as '02:30'"),
        (("weekly", "02:30"), "weekly is written as days and a time"),
        (("weekly", "mon,day 02:30"), "weekly is written as days and a time"),
        (("cron", "* * * *"), "five fields"),
        (("cron", "* * * * * *"), "five fields"),
        (("cron", "61 * * * *"), "is not cron: Bad minute"),
        (("cron", "0 0 31 2 *"), "is not cron: Bad day-of-month"),
        (("cron", "L L * * *"), "is not cron"),
        (("yearly", "1"), "schedule_type 'yearly' is not known; one of every_n_minutes"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused_with_its_value(form: tuple[str, str], words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_schedule(*form)

    assert words in refused.value.message
