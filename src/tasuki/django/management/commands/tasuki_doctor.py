"""`manage.py tasuki_doctor`: look at the project's set-up, database and workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.conf import settings
from django.core import checks
from django.core.management.base import CommandError
from django.utils.module_loading import import_string

from tasuki.django import operations, standalone
from tasuki.django.commands import allowed_commands
from tasuki.django.conf import project_settings
from tasuki.django.enqueueing import project_store
from tasuki.django.management.command_base import JsonCommand
from tasuki.django.models import DefinitionState, Event
from tasuki.errors import ConfigError, TasukiError

LATE_S = 60.0  # a ready job that waits longer is worth a word


class Command(JsonCommand):
    help = "Check the settings, the tables, the workers and the queues of this project. Exit code 1 if something is wrong."

    def act(self, options: dict[str, Any]) -> None:
        found: list[dict[str, Any]] = []
        try:
            found += self._findings()
        except TasukiError as error:
            found.append({"what": "problem", "ok": False, "text": error.message})
        if self.json:
            self.show_json(found)
        else:
            for one in found:
                word = "WARN" if one["what"].startswith("tasuki.W") else "ok  " if one["ok"] else "BAD "
                self.stdout.write(f"{word} {one['what']}: {one['text']}")
        if not all(one["ok"] for one in found):
            raise CommandError("some checks failed; see the lines above")

    def _findings(self) -> Iterator[dict[str, Any]]:
        project = project_settings()
        for problem in checks.run_checks(databases=[project.database]):
            if (problem.id or "").startswith("tasuki."):
                yield _finding(str(problem.id), problem.level < checks.ERROR, f"{problem.msg} {problem.hint or ''}".rstrip())
        standalone.check_tables(project.database)
        yield _finding("tables", True, f"version {standalone.SCHEMA_VERSION} in the database {project.database!r}")
        workers = operations.live_workers()
        names = ", ".join(worker.worker_id for _, worker in workers)
        yield _finding("workers", bool(workers), names or "none runs; start one with: python manage.py tasuki_worker")
        for queue, counts in sorted(project_store().counts().items()):
            yield _finding(f"queue {queue}", True, f"{counts.pending} wait, {counts.active} run, {counts.failed} failed")
        if (waits := operations.longest_waiting()) is not None and waits[1] > LATE_S:
            text = f"{waits[0]} waits for {waits[1]:.0f} s; ask: manage.py tasuki_runs explain {waits[0]}"
            yield _finding("oldest job", False, text)
        for state in DefinitionState.objects.using(project.database).exclude(problem="").select_related("definition"):
            yield _finding(f"definition {state.definition.name}", False, state.problem)
        refused = Event.objects.using(project.database).exclude(problem="").order_by("-id")
        if (latest := refused.first()) is not None:
            text = f"{refused.count()} with a definition that could not be run; the latest is {latest.pk}: {latest.problem}; "
            text += "correct it, then: manage.py tasuki_events list --problems, tasuki_events retry ID"
            yield _finding("events", False, text)
        backends = ", ".join(alias for alias, backend in getattr(settings, "TASKS", {}).items() if _is_ours(backend))
        nowhere = "not of tasuki: no entry of TASKS has the BACKEND tasuki.django.TasukiBackend"
        yield _finding("tasks", True, f"of the entries {backends} of TASKS" if backends else nowhere)
        yield _finding("commands for jobs", True, ", ".join(sorted(allowed_commands())) or "none")


def _is_ours(backend: dict[str, Any]) -> bool:
    try:
        ours, found = import_string("tasuki.django.TasukiBackend"), import_string(backend.get("BACKEND", ""))
    except (ImportError, ConfigError):  # Django 5.2 without django-tasks has no tasks
        return False
    return isinstance(found, type) and issubclass(found, ours)


def _finding(what: str, ok: bool, text: str) -> dict[str, Any]:
    return {"what": what, "ok": ok, "text": text}
