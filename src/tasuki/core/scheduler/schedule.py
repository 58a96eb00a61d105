"""Schedules: the nominal times of a definition, as Unix times, in its time zone. Pure: the zone is passed in.

    schedule = parse_schedule("daily_at", "02:30")
    schedule.after(now, ZoneInfo("Europe/Berlin"))            # the first nominal time after now
    list(islice(schedule.times(now, zone), 10))               # a preview: firing uses the same function

| type             | value              | nominal times                                       | when clocks change |
| ---              | ---                | ---                                                 | ---                |
| every_n_minutes  | `15`               | each local midnight, and every n minutes from it    | elapsed            |
| hourly_at_minute | `5`                | whenever the local clock shows minute 5             | as shown           |
| daily_at         | `02:30`            | once per local date                                 | once               |
| weekly           | `mon,thu 02:30`    | once per local date that is one of these days       | once               |
| cron             | `30 2 * * mon-fri` | the five fields; minute or hour begins with `*`     | as shown           |
|                  |                    | the five fields otherwise                           | once               |

A zone's clock is set forward (a gap: some local times never come) and back (an overlap: some come twice). `ClockChange` names
what then happens to a schedule, one of these:

- **once**: a time in a gap becomes the first instant after the gap, a time in an overlap is its first occurrence. Each local date
  has its run.
- **as shown**: each instant at which the clock shows the time. None in a gap, two in an overlap.
- **elapsed**: minutes that passed since local midnight, whatever the clock shows. Nothing is left out or doubled; the last
  interval of a day may be shorter.

Nominal times strictly increase. A schedule that has no time in the next 40 years is refused.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import lru_cache
from itertools import islice
from zoneinfo import ZoneInfo

import msgspec

from tasuki.errors import ConfigError, InvalidInput, quoted

DAY_MINUTES = 1440
HORIZON_DAYS = 40 * 366  # the fifth Monday of a February comes every 28 years; around 2100 it takes 40
WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY = timedelta(days=1)
_FIRST_DAY, _LAST_DAY = date(1900, 1, 1), date(9000, 1, 1)


class ScheduleType(enum.StrEnum):
    """Forms in which a schedule can be written."""

    EVERY_N_MINUTES = "every_n_minutes"
    HOURLY_AT_MINUTE = "hourly_at_minute"
    DAILY_AT = "daily_at"
    WEEKLY = "weekly"
    CRON = "cron"


class ClockChange(enum.StrEnum):
    """Behaviour of a schedule when the clock of its zone is set forward or back; see the module's docstring."""

    ONCE = "once"
    AS_SHOWN = "as shown"
    ELAPSED = "elapsed"


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Nominal times: some minutes of some local dates."""

    minutes: tuple[int, ...]
    """Minutes of the local day, ascending."""
    on_clock_change: ClockChange
    is_day: Callable[[date], bool] = lambda day: True
    months: frozenset[int] = frozenset(range(1, 13))

    def after(self, at: float, zone: tzinfo) -> int | None:
        """Return the first nominal time after `at`; None if there is none in the next 40 years."""
        day = _clamped(at, zone)
        if not _is_plain(_start_of(day - _DAY, zone), _start_of(day, zone), zone):
            day -= _DAY  # a gap moves times past midnight, an overlap repeats the end of the day before
        end = day + timedelta(days=HORIZON_DAYS)
        found: int | None = None
        while day < end and day < _LAST_DAY:
            if day.month not in self.months and found is None:
                day = (day.replace(day=28) + timedelta(days=4)).replace(day=1)  # the first of the next month
                continue
            of_day = self._first_of_day(day, at, zone) if day.month in self.months and self.is_day(day) else None
            day += _DAY
            if found is not None:  # in an overlap around midnight a time of the next day may come first
                return found if of_day is None else min(found, of_day)
            if of_day is not None and of_day < _start_of(day, zone):
                return of_day
            found = of_day
        return found

    def times(self, at: float, zone: tzinfo) -> Iterator[int]:
        """Yield the nominal times after `at`, without end if there is one."""
        found = self.after(at, zone)
        while found is not None:
            yield found
            found = self.after(found, zone)

    def last_until(self, at: float, zone: tzinfo) -> int | None:
        """Return the latest nominal time up to and including `at`, if there is one in the last 40 years."""
        back_s = 3600.0
        while back_s < HORIZON_DAYS * 86_400.0:
            found = self.after(at - back_s, zone)
            if found is not None and found <= at:
                for later in self.times(found, zone):
                    if later > at:
                        return found
                    found = later
                return found
            back_s *= 4
        return None

    def _first_of_day(self, day: date, at: float, zone: tzinfo) -> int | None:
        """Return the first nominal time of a local date that is after `at`."""
        start, end = _start_of(day, zone), _start_of(day + _DAY, zone)
        if self.on_clock_change is ClockChange.ELAPSED:
            step = DAY_MINUTES * 60 // len(self.minutes)
            found = start + max(0, int((at - start) // step) + 1) * step
            return found if found < end else None
        if not _is_plain(start, end, zone):
            times = self._of_odd_day(day, zone)
            place = bisect_right(times, at)
            return times[place] if place < len(times) else None
        place = bisect_right(self.minutes, (at - start) // 60)
        return start + 60 * self.minutes[place] if place < len(self.minutes) else None

    def _of_odd_day(self, day: date, zone: tzinfo) -> list[int]:
        """Return all nominal times of a date on which the clock is changed."""
        found: set[int] = set()
        for minute in self.minutes:
            first, second = _instant(day, minute, zone, 0), _instant(day, minute, zone, 1)
            if _is_shown(first, day, minute, zone):
                found.add(first)
                if self.on_clock_change is ClockChange.AS_SHOWN:
                    found.add(second)
            elif self.on_clock_change is ClockChange.ONCE:
                found.add(_end_of_gap(second, first, zone))
        return sorted(found)


def preview(schedule: Schedule, at: float, zone: tzinfo, count: int) -> list[int]:
    """Return the next `count` nominal times after `at`."""
    return list(islice(schedule.times(at, zone), count))


# ---------------------------------------------------------------------------------------------------- local time


@lru_cache(1024)
def zone_of(name: str) -> ZoneInfo:
    """Return the time zone of this name, or raise InvalidInput. The only thing here that reads files: those of the zones."""
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # unknown, no name at all, or that of a folder
        raise InvalidInput(
            f"time_zone {quoted(name)} is not known; write a name such as 'Europe/Berlin' or 'UTC'. "
            "If even these are not, install the package tzdata"
        ) from None


def _clamped(at: float, zone: tzinfo) -> date:
    return min(max(_local(at, zone).date(), _FIRST_DAY), _LAST_DAY)


def _local(at: float, zone: tzinfo) -> datetime:
    return datetime.fromtimestamp(at, UTC).astimezone(zone)


def _instant(day: date, minute: int, zone: tzinfo, fold: int) -> int:
    """Return the instant of a local time: in an overlap the first (fold 0) or the second, in a gap one behind or before it."""
    return int(datetime(day.year, day.month, day.day, *divmod(minute, 60), tzinfo=zone, fold=fold).timestamp())


def _is_shown(at: int, day: date, minute: int, zone: tzinfo) -> bool:
    """Return whether the zone's clock shows this local time."""
    local = _local(at, zone)
    return (local.date(), 60 * local.hour + local.minute) == (day, minute)


@lru_cache(4096)
def _start_of(day: date, zone: tzinfo) -> int:
    """Return the first instant of a local date; of a date that the zone left out, that of the next one."""
    first = _instant(day, 0, zone, 0)
    return first if _is_shown(first, day, 0, zone) else _end_of_gap(_instant(day, 0, zone, 1), first, zone)


@lru_cache(4096)
def _is_plain(start: int, end: int, zone: tzinfo) -> bool:
    """Return whether a local date has 24 hours, with one offset throughout."""
    offsets = {_offset(at, zone) for at in range(start, end, 6 * 3600)} | {_offset(end, zone)}
    return end - start == 86_400 and len(offsets) == 1


def _offset(at: int, zone: tzinfo) -> timedelta | None:
    return _local(at, zone).utcoffset()


def _end_of_gap(before: int, behind: int, zone: tzinfo) -> int:
    """Return the instant between these two at which the zone's clock is set forward."""
    old = _offset(before, zone)
    while behind - before > 1:
        middle = (before + behind) // 2
        if _offset(middle, zone) == old:
            before = middle
        else:
            behind = middle
    return behind


# ---------------------------------------------------------------------------------------------------- schedules as texts


def parse_schedule(schedule_type: str, value: str) -> Schedule:
    """Return the schedule, or raise InvalidInput that names the field and says how to write it."""
    try:
        parse = _PARSERS[ScheduleType(schedule_type)]
    except ValueError:
        known = ", ".join(ScheduleType)
        raise InvalidInput(f"schedule_type {quoted(schedule_type)} is not known; one of {known}") from None
    return parse(value.strip())


def _every_n_minutes(value: str) -> Schedule:
    n = _number(value, "every_n_minutes", 1, DAY_MINUTES)
    if DAY_MINUTES % n:
        fitting = [divisor for divisor in range(1, DAY_MINUTES + 1) if DAY_MINUTES % divisor == 0]
        nearest = sorted(sorted(fitting, key=lambda divisor: abs(divisor - n))[:4])
        raise InvalidInput(
            f"schedule_value {quoted(value)}: every_n_minutes must divide a day of 1440 minutes; "
            f"{', '.join(map(str, nearest))} do"
        )
    return Schedule(minutes=tuple(range(0, DAY_MINUTES, n)), on_clock_change=ClockChange.ELAPSED)


def _hourly_at_minute(value: str) -> Schedule:
    minute = _number(value, "hourly_at_minute", 0, 59)
    return Schedule(minutes=tuple(range(minute, DAY_MINUTES, 60)), on_clock_change=ClockChange.AS_SHOWN)


def _daily_at(value: str) -> Schedule:
    return Schedule(minutes=(_minute_of_day(value, "daily_at", "02:30"),), on_clock_change=ClockChange.ONCE)


def _weekly(value: str) -> Schedule:
    days, _, at = value.partition(" ")
    names = [name.strip().lower() for name in days.split(",")]
    if not at or not set(names) <= set(WEEKDAYS):
        raise InvalidInput(f"schedule_value {quoted(value)}: weekly is written as days and a time, as in 'mon,thu 02:30'")
    wanted = frozenset(WEEKDAYS.index(name) for name in names)
    minute = _minute_of_day(at.strip(), "weekly", "mon,thu 02:30")
    return Schedule(minutes=(minute,), on_clock_change=ClockChange.ONCE, is_day=lambda day: day.weekday() in wanted)


@lru_cache(1024)
def _cron(value: str) -> Schedule:
    try:
        from cronsim import CronSim, CronSimError
    except ImportError:
        raise ConfigError("schedules of type cron need the package cronsim; install tasuki[server] or tasuki[django]") from None

    fields = value.split()
    if len(fields) != 5:
        raise InvalidInput(
            f"schedule_value {quoted(value)}: cron has five fields: minute, hour, day of month, month, day of week"
        )
    try:
        cron = CronSim(value, datetime(2000, 1, 1, tzinfo=UTC))
    except (CronSimError, ValueError, AssertionError, IndexError) as error:
        raise InvalidInput(f"schedule_value {quoted(value)} is not cron: {error or type(error).__name__}") from None
    often = any(field.startswith("*") for field in fields[:2])
    schedule = Schedule(
        minutes=tuple(sorted(60 * hour + minute for hour in cron.hours for minute in cron.minutes)),
        on_clock_change=ClockChange.AS_SHOWN if often else ClockChange.ONCE,
        is_day=cron.match_day,
        months=frozenset(cron.months),
    )
    if schedule.after(0, UTC) is None:
        raise InvalidInput(f"schedule_value {quoted(value)}: no such day comes in 40 years")
    return schedule


def _number(value: str, name: str, low: int, high: int) -> int:
    if not (value.isascii() and value.isdecimal() and len(value) <= 4 and low <= int(value) <= high):
        raise InvalidInput(f"schedule_value {quoted(value)}: {name} must be a number from {low} to {high}")
    return int(value)


def _minute_of_day(value: str, name: str, example: str) -> int:
    hour, colon, minute = value.partition(":")
    is_time = colon and all(part.isascii() and part.isdecimal() and len(part) == 2 for part in (hour, minute))
    if not is_time or int(hour) > 23 or int(minute) > 59:
        raise InvalidInput(f"schedule_value {quoted(value)}: {name} is written as {example!r}, from 00:00 to 23:59")
    return 60 * int(hour) + int(minute)


_PARSERS: dict[ScheduleType, Callable[[str], Schedule]] = {
    ScheduleType.EVERY_N_MINUTES: _every_n_minutes,
    ScheduleType.HOURLY_AT_MINUTE: _hourly_at_minute,
    ScheduleType.DAILY_AT: _daily_at,
    ScheduleType.WEEKLY: _weekly,
    ScheduleType.CRON: _cron,
}
