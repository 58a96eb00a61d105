"""`manage.py tasuki_prune`: delete what is old, and archive old logs."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from tasuki.django import operations
from tasuki.django.conf import project_settings
from tasuki.django.definitions import scheduler_settings
from tasuki.django.management.command_base import JsonCommand


class Command(JsonCommand):
    help = "Delete old jobs and events, and archive old logs, at once. The leading worker does it in small steps."

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--days", type=float, help="Jobs and events older than this. Default: TASUKI['retention_days'].")
        parser.add_argument(
            "--logs-days", type=float, help="Logs of jobs that ended longer ago than this. Default: log_retention_days_db."
        )

    def act(self, options: dict[str, Any]) -> None:
        project = project_settings()
        days, logs_days = options["days"], options["logs_days"]
        days = project.retention_days if days is None else days
        logs_days = scheduler_settings(project.database).log_retention_days_db if logs_days is None else logs_days
        done = operations.prune(days=days, logs_days=logs_days)
        self.say(done, f"{done['runs']} runs and {done['events']} events deleted, logs of {done['archived_logs']} runs archived")
