"""`manage.py tasuki_events`: what happened in the project, and the runs that follow."""

from __future__ import annotations

import json

from tasuki.django import operations
from tasuki.django.conf import project_settings
from tasuki.django.management.command_base import ActionCommand, actor
from tasuki.django.models import Event
from tasuki.errors import InvalidInput


class Command(ActionCommand):
    help = "List events, the newest first, emit them, and process those again that could not be run."
    actions = {
        "list": (
            "List events.",
            {
                "--waiting": {"action": "store_true", "help": "Only those that have no runs yet."},
                "--problems": {"action": "store_true", "help": "Only those of which a definition that matched got no run."},
                "--limit": {"type": int, "default": 50, "help": "At most so many. Default: 50."},
            },
        ),
        "emit": (
            "Store an event: each definition whose pattern matches gets one run.",
            {
                "type": {"metavar": "TYPE"},
                "--payload": {"metavar": "JSON", "default": "null", "help": "Reaches the command as --event=JSON."},
                "--dedupe-key": {"metavar": "KEY", "default": None, "help": "A second event with this key is not stored."},
            },
        ),
        "retry": (
            "Process events again of which a definition got no run; those that got one get no second.",
            {"event_id": {"nargs": "+", "type": int, "metavar": "ID"}},
        ),
    }

    def do_list(self, waiting: bool, problems: bool, limit: int) -> None:
        rows = Event.objects.using(project_settings().database).order_by("-id")
        rows = rows.filter(processed_at=None) if waiting else rows
        rows = rows.exclude(problem="") if problems else rows
        columns = ("id", "event_type", "dedupe_key", "payload_json", "created_at", "processed_at", "problem")
        self.show_table(columns, rows.values(*columns)[:limit])

    def do_emit(self, type: str, payload: str, dedupe_key: str | None) -> None:
        try:
            value = json.loads(payload)
        except ValueError as error:
            raise InvalidInput(f"--payload is not JSON: {error}") from error
        event = operations.emit_event(type, value, dedupe_key=dedupe_key, actor=actor())
        self.say({"id": event.pk, "event_type": event.event_type}, f"event {event.pk}")

    def do_retry(self, event_id: list[int]) -> None:
        operations.retry_events(event_id, actor=actor())
        for one in event_id:
            self.say({"id": one}, f"event {one} will be processed again")
