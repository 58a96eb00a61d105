"""The app, and schedules that a test has time for."""

import os

from django.apps import AppConfig

from tasuki.core.scheduler.schedule import ClockChange, Schedule


class EverySeconds(Schedule, frozen=True, kw_only=True):
    """A schedule whose grain is seconds instead of minutes."""

    step_s: int

    def after(self, at, zone=None):
        return int(at // self.step_s + 1) * self.step_s


class ProbesConfig(AppConfig):
    name = "probes"

    def ready(self):
        if "SITE_SECONDS" in os.environ:  # `every_n_minutes` is that many seconds
            from tasuki.stores import firing

            firing.parse_schedule = lambda _, value: EverySeconds(
                minutes=(0,), on_clock_change=ClockChange.ELAPSED, step_s=int(value)
            )
