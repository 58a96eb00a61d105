"""`manage.py tasuki_prune`: delete what is old, and archive old logs."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from tasuki.django import operations
from tasuki.django.conf import project_settings
from tasuki.django.definitions import scheduler_settings
from tasuki.django.management.command_base import ActionCommand
from tasuki.errors import TasukiError


class Command(ActionCommand):
    help = "Delete old jobs and events, and archive old logs, at once. The leading worker does it in small steps."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--days", type=float, help="Jobs and events older than this. Default: TASUKI['retention_days'].")
        parser.add_argument(
            "--logs-days", type=float, help="Logs of jobs that ended longer ago than this. Default: log_retention_days_db."
        )
        parser.add_argument("--json", action="store_true", help="Print JSON for programs.")

    def handle(self, *_arguments: Any, days: float | None, logs_days: float | None, **options: Any) -> None:
        self.json = options["json"]
        project = project_settings()
        days = project.retention_days if days is None else days
        logs_days = scheduler_settings(project.database).log_retention_days_db if logs_days is None else logs_days
        try:
            done = operations.prune(days=days, logs_days=logs_days)
        except TasukiError as error:
            raise CommandError(error.message) from error
        self.say(done, f"{done['runs']} runs and {done['events']} events deleted, logs of {done['archived_logs']} runs archived")
