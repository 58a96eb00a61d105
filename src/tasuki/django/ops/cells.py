"""Template tags of the screens: cells of tables, times, links."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django import template
from django.urls import reverse
from django.utils.html import format_html
from django.utils.timezone import localtime
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy as lazy

from tasuki.django.ops.screens import ASSET_HASHES, moment

register = template.Library()
register.filter(moment)
CELL_MAX_CHARS = 120
LABELS = {
    "args count": lazy("Arguments"),
    "array id": lazy("Array"),
    "assigned at": lazy("Given to a worker"),
    "assigned worker id": lazy("Worker"),
    "attempt": lazy("Attempt"),
    "cancel requested": lazy("Cancel requested"),
    "created at": lazy("Created"),
    "cwd": lazy("Folder"),
    "env count": lazy("Environment variables"),
    "env names": lazy("Names of environment variables"),
    "error code": lazy("Error code"),
    "exit code": lazy("Exit code"),
    "failures": lazy("Failures"),
    "files count": lazy("Files"),
    "finished at": lazy("Ended"),
    "generation": lazy("Times run again"),
    "header names": lazy("Names of headers"),
    "headers": lazy("Headers"),
    "log ref": lazy("Place of the log"),
    "losses": lazy("Losses"),
    "max losses": lazy("Losses allowed"),
    "max retries": lazy("Retries"),
    "message": lazy("Message"),
    "not after": lazy("Starts no later than"),
    "not before": lazy("Starts no sooner than"),
    "payload bytes": lazy("Payload, bytes"),
    "priority": lazy("Priority"),
    "progress": lazy("Progress"),
    "progress text": lazy("Progress, text"),
    "result bytes": lazy("Result, bytes"),
    "result is blob": lazy("Result is a blob"),
    "result sha256": lazy("SHA-256 of the result"),
    "started at": lazy("Started"),
    "subject": lazy("Subject"),
    "submitter": lazy("Submitted by"),
    "timeout s": lazy("Time limit, s"),
}
"""Labels of a job's details."""


@register.simple_tag
def place(name: str, *arguments: Any) -> str:
    """Return the address of a screen."""
    return reverse(f"tasuki_ops:{name}", args=arguments)


@register.simple_tag
def asset(name: str) -> str:
    """Return the address of a file, which changes with what is in it: browsers keep files."""
    return f"{place('asset', name)}?v={ASSET_HASHES[name]}"


@register.filter
def cell(value: Any) -> Any:
    """Return a value as people read it; times become the viewer's own by the script."""
    if isinstance(value, datetime):
        local = localtime(value)
        return format_html('<time datetime="{}">{}</time>', local.isoformat(), local.isoformat(" ", "seconds"))
    if value is None or value == "" or value == [] or value == ():
        return "–"
    if isinstance(value, bool):
        return _("yes") if value else _("no")
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    if len(text) > CELL_MAX_CHARS:
        return format_html('<span title="{}">{}…</span>', text[:2_000], text[:CELL_MAX_CHARS])
    return text


@register.filter
def label(name: str) -> str:
    """Return the label of one of a job's details."""
    return str(LABELS.get(name, name))


@register.filter
def fits(button: Any, row: dict[str, Any]) -> bool:
    """Return whether a row has the button."""
    return not button.only or bool(row.get(button.only))


@register.simple_tag
def linked_cell(table: Any, key: str, row: dict[str, Any]) -> Any:
    """Return the cell of a row, as a link if its column leads somewhere; states have their colour."""
    shown = cell(row.get(key))
    if key == "state":
        return format_html('<span class="state state-{}">{}</span>', str(row.get(key)).lower(), shown)
    if (name := table.links.get(key)) and row.get("id") not in (None, ""):
        return format_html('<a href="{}">{}</a>', place(name, row["id"]), shown)
    return shown
