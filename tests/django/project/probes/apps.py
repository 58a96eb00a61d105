"""The app, and schedules that a test has time for."""

import os

from django.apps import AppConfig

from tasuki.core.scheduler.schedule import ClockChange, Schedule, ScheduleType


class EverySeconds(Schedule, frozen=True, kw_only=True):
    """A schedule whose grain is seconds instead of minutes."""

    step_s: int
    offset_s: int = 0

    def after(self, at, zone=None):
        return int((at - self.offset_s) // self.step_s + 1) * self.step_s + self.offset_s


class ProbesConfig(AppConfig):
    name = "probes"

    def ready(self):
        if "SITE_SECONDS" in os.environ:  # `every_n_minutes` is that many seconds, and an hour has SITE_SECONDS
            from tasuki.stores import firing

            def parse_schedule(kind, value):
                hourly = kind == ScheduleType.HOURLY_AT_MINUTE
                step = {"step_s": int(os.environ["SITE_SECONDS"]), "offset_s": int(value)} if hourly else {"step_s": int(value)}
                return EverySeconds(minutes=(0,), on_clock_change=ClockChange.ELAPSED, **step)

            firing.parse_schedule = parse_schedule
