"""The start of a warm interpreter for management commands: its import sets Django up and imports the commands that jobs may run.

Imported by `worker/preforked.py` in a process of the node's keeper, and by nothing else. A job whose source has changed since
then starts a fresh interpreter in its place.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import import_module
from pathlib import Path

import django

from tasuki.worker import preforked

django.setup()

from django.db import connections  # noqa: E402 - Django is set up first

from tasuki.django.commands import allowed_commands, is_own, run_command  # noqa: E402

for _name, _app in allowed_commands().items():
    with contextlib.suppress(Exception):  # the job that runs it will say so; all others can run
        import_module(f"{_app}.management.commands.{_name}")
connections.close_all()

_FRESH = "TASUKI_FRESH_INTERPRETER"


def _sources() -> dict[str, int]:
    """Return the time of change of each source file that is loaded, except those of installed packages."""
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    own = [file for file in files if file.endswith(".py") and is_own(file)]
    return {file: Path(file).stat().st_mtime_ns for file in own if Path(file).exists()}


_LOADED = _sources()


def main(arguments: list[str]) -> None:
    """Run the command; in a fresh interpreter if the source has changed since this one loaded it."""
    if _FRESH not in os.environ and any(_changed(file, at) for file, at in _LOADED.items()):
        os.environ[_FRESH] = "1"
        os.execv(sys.executable, [sys.executable, "-P", preforked.__file__, "tasuki.django.warm:main", *arguments])  # noqa: S606
    run_command(arguments)


def _changed(file: str, at: int) -> bool:
    try:
        return os.stat(file).st_mtime_ns != at  # noqa: PTH116 - called for each file at each job
    except OSError:
        return True
