"""The base of tasuki's management commands: actions as sub-commands, `--json`, errors in one line."""

from __future__ import annotations

import getpass
import json
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils.timezone import localtime

from tasuki.errors import TasukiError


class JsonCommand(BaseCommand):
    """A command with `--json`, whose errors are one line. Its work is `act`."""

    requires_migrations_checks = False

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="Print JSON for programs.")

    def handle(self, *_arguments: Any, **options: Any) -> None:
        self.json = options["json"]
        try:
            self.act(options)
        except TasukiError as error:
            raise CommandError(error.message) from error

    def act(self, options: dict[str, Any]) -> None:
        raise NotImplementedError

    def show_table(self, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
        """Print rows: as JSON, or these columns side by side."""
        found = list(rows)
        if self.json:
            self.show_json(found)
            return
        cells = [[column.upper() for column in columns], *([_text(row.get(column)) for column in columns] for row in found)]
        widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
        for row in cells:
            self.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

    def show_json(self, value: Any) -> None:
        self.stdout.write(json.dumps(value, default=_plain, ensure_ascii=False))

    def say(self, value: dict[str, Any], line: str) -> None:
        """Print what was done."""
        self.show_json(value) if self.json else self.stdout.write(line)


class ActionCommand(JsonCommand):
    """A command whose actions are methods: `manage.py tasuki_runs show ID` calls `do_show(job_id=ID)`."""

    actions: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {}
    """Help and arguments of each action: those of `add_argument`, by name or flag."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        chosen = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        for name, (text, arguments) in self.actions.items():
            sub = chosen.add_parser(name, help=text, description=text)
            super().add_arguments(sub)
            for argument, settings in arguments.items():
                sub.add_argument(*argument.split(", "), **settings)

    def act(self, options: dict[str, Any]) -> None:
        _help, arguments = self.actions[options["action"]]
        names = [argument.split(", ")[-1].lstrip("-").replace("-", "_") for argument in arguments]
        getattr(self, f"do_{options['action'].replace('-', '_')}")(**{name: options[name] for name in names})


def _plain(value: Any) -> Any:
    return value.timestamp() if isinstance(value, datetime) else str(value)


def _text(value: Any) -> str:
    if isinstance(value, float | datetime):
        return shown_time(value)
    return "-" if value in (None, "", []) else " ".join(map(str, value)) if isinstance(value, list) else str(value)


def shown_time(at: float | datetime) -> str:
    """Return a time in the project's time zone."""
    return localtime(at if isinstance(at, datetime) else datetime.fromtimestamp(at, UTC)).isoformat(" ", "seconds")


def actor() -> str:
    """Return the name under which the audit and the incidents have what this command does."""
    return f"manage.py:{getpass.getuser()}"
