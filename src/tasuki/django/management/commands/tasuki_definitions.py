"""`manage.py tasuki_definitions`: the jobs that the project runs by time or upon events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tasuki.core.scheduler.firing import EVENT_ARGUMENT, arguments_of, problem_of
from tasuki.django import definitions, operations
from tasuki.django.commands import check_arguments, check_command
from tasuki.django.conf import project_settings
from tasuki.django.management.command_base import ActionCommand, actor, shown_time
from tasuki.django.models import JobDefinition
from tasuki.errors import InvalidInput, NotFound, quoted

SETTINGS = "settings"
_NAME = {"name": {"metavar": "NAME"}}


class Command(ActionCommand):
    help = "List, apply, run, enable and disable the definitions of this project, and show their next times."
    actions = {
        "list": ("List all definitions.", {}),
        "apply": (
            'Put the definitions of a file, or of TASUKI["definitions"], in force, and delete those that are gone.',
            {
                "-f, --file": {"metavar": "FILE", "help": "A TOML file with [definitions.NAME] tables. Default: the settings."},
                "--dry-run": {"action": "store_true", "help": "Only show what would change."},
            },
        ),
        "run": ("Run one now, whether or not it is enabled.", _NAME),
        "enable": ("Enable one: its times count from now on.", _NAME),
        "disable": ("Disable one; runs that have begun continue.", _NAME),
        "next": ("Show the next times.", {**_NAME, "--count": {"type": int, "default": 5, "help": "So many. Default: 5."}}),
    }

    def do_list(self) -> None:
        rows = JobDefinition.objects.using(project_settings().database).select_related("state").order_by("name")
        columns = ("name", "enabled", "command_name", "when", "time_zone", "next_at", "last_run_id", "managed_by", "problem")
        self.show_table(columns, map(_described, rows))

    def do_apply(self, file: str | None, dry_run: bool) -> None:
        entries = definitions.read_file(Path(file)) if file else project_settings().definitions
        for name, entry in entries.items():
            if isinstance(entry, dict) and "command_name" in entry:
                _check_call(name, entry)
        source = _source_of(Path(file)) if file else SETTINGS
        if dry_run:
            applied = definitions.apply(entries, source=source, dry_run=True)
        else:
            applied = operations.apply_definitions(entries, source=source, actor=actor())
        done = msgspec.to_builtins(applied)
        lines = [f"{what}: {', '.join(names)}" for what, names in done.items() if names]
        self.say(done, "\n".join(lines) or "nothing to do")

    def do_run(self, name: str) -> None:
        job_id = operations.run_now(_found(name), actor=actor())
        self.say({"job_id": job_id}, f"{job_id} will be run")

    def do_enable(self, name: str) -> None:
        self._set_enabled(name, True)

    def do_disable(self, name: str) -> None:
        self._set_enabled(name, False)

    def _set_enabled(self, name: str, enabled: bool) -> None:
        operations.set_enabled(_found(name), enabled, actor=actor())
        self.say({"name": name, "enabled": enabled}, f"{name} is {'enabled' if enabled else 'disabled'}")

    def do_next(self, name: str, count: int) -> None:
        row = _found(name)
        if row.type != "time":
            raise InvalidInput(f"definition {quoted(name)} runs upon events {row.event_type}, not by time")
        times = row.preview(count)
        self.say({"name": name, "next": times}, "\n".join(map(shown_time, times)))


def _check_call(name: str, entry: dict[str, Any]) -> None:
    """InvalidInput, with the name of the column, if jobs may not run the command, or it does not take these arguments."""
    command = str(entry["command_name"])
    column = "command_name"
    try:
        check_command(command)
        column = "default_args_json"
        event = (f"{EVENT_ARGUMENT}null",) if entry.get("event_type") else ()
        check_arguments(command, (*arguments_of(entry.get("default_args_json")), *event))
    except InvalidInput as error:
        raise InvalidInput(f"definition {quoted(name)}: {column}: {error.message}") from error


def _source_of(file: Path) -> str:
    """Return the name of a file of definitions: from the current folder on, so that the next deploy's is the same."""
    here = Path.cwd()
    return str(file.resolve().relative_to(here) if file.resolve().is_relative_to(here) else file.resolve())


def _found(name: str) -> JobDefinition:
    row = JobDefinition.objects.using(project_settings().database).filter(name=name).first()
    if row is None:
        raise NotFound(f"there is no definition {quoted(name)}; tasuki_definitions list shows all")
    return row


def _described(row: JobDefinition) -> dict[str, Any]:
    state = getattr(row, "state", None)
    return {
        "name": row.name,
        "enabled": row.enabled,
        "command_name": row.command_name,
        "when": f"event {row.event_type}" if row.type == "event" else f"{row.schedule_type} {row.schedule_value}",
        "time_zone": row.time_zone,
        "next_at": row.preview(1)[0] if row.enabled and row.type == "time" and problem_of(row.definition()) is None else None,
        "last_run_id": state.last_run_id if state is not None else "",
        "managed_by": row.managed_by,
        "problem": state.problem if state is not None else "",
    }
