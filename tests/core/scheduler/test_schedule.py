"""Schedules in every zone around the days on which its clocks are changed, compared with a walk over all minutes or seconds."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from functools import cache
from itertools import islice, pairwise, takewhile
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import given
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


class Walk:
    """The clock of a zone: at which instants a local minute begins, and which minutes a jump leaves out."""

    def __init__(self, zone: ZoneInfo, begin: int, end: int) -> None:
        self.shown: defaultdict[int, list[tuple[date, int]]] = defaultdict(list)
        """By minute of the day: each instant at which the clock shows it, with the local date."""
        self.passed: defaultdict[int, list[tuple[date, int]]] = defaultdict(list)
        """By minute of the day: for each local date the first instant at which the clock shows it, or has jumped over it."""
        self.midnights: list[int] = []
        """The first instant of each local date."""
        is_odd = any(at % 60 for at in transitions(zone) if begin <= at <= end)
        seen: set[tuple[date, int]] = set()
        before: tuple[date, int] | None = None
        latest = date.max
        for at in range(begin, end, 1 if is_odd else 60):
            clock = datetime.fromtimestamp(at, zone)
            now = clock.date(), 60 * clock.hour + clock.minute
            if clock.second == 0:
                self.shown[now[1]].append((now[0], at))
            if before is None:
                before, latest = now, now[0]
            if now[0] > latest:
                self.midnights.append(at)
                latest = now[0]
            for local in skipped(before, now) if now != before else ():
                if local not in seen:
                    seen.add(local)
                    self.passed[local[1]].append((local[0], at))
            before = now
        self.end = end

    def expected(self, schedule: Schedule, begin: int, end: int) -> list[int]:
        """Return the nominal times of the schedule in this part of the walk."""
        if schedule.on_clock_change is ClockChange.ELAPSED:
            step = DAY_S // len(schedule.minutes)
            days = pairwise([*self.midnights, self.end])
            found = {at for midnight, next_midnight in days for at in range(midnight, next_midnight, step)}
        else:
            looked_at = self.shown if schedule.on_clock_change is ClockChange.AS_SHOWN else self.passed
            found = {at for minute in schedule.minutes for day, at in looked_at[minute] if schedule.is_day(day)}
        return sorted(at for at in found if begin <= at < end)


def skipped(before: tuple[date, int], now: tuple[date, int]) -> Iterator[tuple[date, int]]:
    """The local minutes after `before` up to `now`."""
    day, minute = before
    if now < before:
        yield now
    while (day, minute) < now:
        day, minute = (day, minute + 1) if minute < 1439 else (day + timedelta(days=1), 0)
        yield day, minute


def judge(zone: ZoneInfo, change: int) -> None:
    """Compare all forms around a change of the clock with one walk, which is what costs time."""
    begin, end = change - 8 * 3600, change + 20 * 3600
    walk = Walk(zone, begin - DAY_S, end)
    for form in FORMS:
        schedule = parse_schedule(*form)
        found = list(takewhile(lambda at: at < end, schedule.times(begin - 1, zone)))
        assert found == walk.expected(schedule, begin, end), (zone, form, datetime.fromtimestamp(change, UTC))


DAY_S = 86_400


def distinct(changes: Iterable[tuple[ZoneInfo, int]]) -> list[tuple[ZoneInfo, int]]:
    """Leave out the changes that are those of another zone too: at the same instant, from and to the same offset."""
    found = {}
    for zone, change in changes:
        offsets = [
            datetime.fromtimestamp(at, zone).utcoffset() for at in (change - 2 * DAY_S, change - 1, change, change + DAY_S)
        ]
        found[change, *offsets] = (zone, change)
    return list(found.values())


def some_changes(count: int, chance: Callable[[ZoneInfo], random.Random]) -> list[tuple[ZoneInfo, int]]:
    """Choose some changes of every zone."""
    zones = [zone for zone in map(ZoneInfo, ZONES) if transitions(zone)]
    assert len(zones) > 400
    return distinct(
        (zone, at) for zone in zones for at in chance(zone).sample(transitions(zone), min(count, len(transitions(zone))))
    )


def test_in_every_zone_each_form_has_the_times_of_a_walk_around_a_change_of_the_clock() -> None:
    for zone, change in some_changes(1, lambda zone: random.Random(str(transitions(zone)))):
        judge(zone, change)


@pytest.mark.soak
def test_in_every_zone_each_form_has_the_times_of_a_walk_around_ten_changes_of_the_clock() -> None:
    for zone, change in some_changes(10, lambda zone: random.Random()):
        judge(zone, change)


def test_where_clocks_change_at_odd_seconds_each_form_has_the_times_of_a_walk_over_all_seconds() -> None:
    changes = distinct((zone, at) for zone in map(ZoneInfo, ZONES) for at in transitions(zone) if at % 60)

    assert changes
    for zone, change in changes:
        judge(zone, change)


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
