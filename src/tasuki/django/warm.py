"""The start of a warm interpreter for management commands: its import sets Django up and imports the commands that jobs may run.

Imported by `worker/preforked.py` in a process of the node's keeper, and by nothing else. Jobs are forks of it. The first job that
finds source changed since this import runs in a fresh interpreter, and ends this one: the keeper starts another in its place, and
the jobs after it are warm again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

_BEGAN_NS = time.time_ns()

import django  # noqa: E402 - what changes from here on may be loaded in its older form

from tasuki.worker import preforked  # noqa: E402

django.setup()

from django.core.management.base import BaseCommand  # noqa: E402 - Django is set up first
from django.db import connections  # noqa: E402

from tasuki.django.commands import allowed_commands, is_own, run_command  # noqa: E402

for _name, _app in allowed_commands().items():
    with contextlib.suppress(Exception):  # the job that runs it will say so; all others can run
        import_module(f"{_app}.management.commands.{_name}")
connections.close_all()

REPLACED_AFTER_S = 2.0  # a younger one stays: while files are still being copied, each new one would be ended by the next job
_FRESH = "TASUKI_FRESH_INTERPRETER"


def _sources() -> dict[str, int]:
    """Return the time of change of each source file that is loaded, except those of installed packages; 0: it is not sure which
    version of it was loaded."""
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    own = [file for file in files if file.endswith(".py") and is_own(file)]
    times = {file: Path(file).stat().st_mtime_ns for file in own if Path(file).exists()}
    return {file: 0 if _BEGAN_NS <= at <= time.time_ns() else at for file, at in times.items()}


_LOADED = _sources()
_LOADED_AT = time.monotonic()
_SELF = os.pidfd_open(os.getpid()) if hasattr(os, "pidfd_open") else None
"""This interpreter, for the jobs that are forked from it."""


def main(arguments: list[str]) -> None:
    """Run the command; in a fresh interpreter if the source has changed since this one loaded it."""
    if _FRESH not in os.environ and any(_changed(file, at) for file, at in _LOADED.items()):
        if _SELF is not None and time.monotonic() - _LOADED_AT >= REPLACED_AFTER_S:
            with contextlib.suppress(ProcessLookupError):  # another job was faster
                signal.pidfd_send_signal(_SELF, signal.SIGKILL)
        os.environ[_FRESH] = "1"
        os.execv(sys.executable, [sys.executable, "-P", preforked.__file__, "tasuki.django.warm:main", *arguments])  # noqa: S606
    run_command(arguments)


def _rehearse() -> None:
    """Do what each job does up to the first line of its command; `preforked.py` calls it in the process of the next job."""
    with contextlib.suppress(Exception):  # the last one: a command without a `handle` of its own
        any(_changed(file, at) for file, at in _LOADED.items())
        allowed_commands()
        BaseCommand().run_from_argv(["manage.py", "", "--skip-checks"])


main.rehearse = _rehearse  # type: ignore[attr-defined]


def _changed(file: str, at: int) -> bool:
    try:
        return os.stat(file).st_mtime_ns != at  # noqa: PTH116 - called for each file at each job
    except OSError:
        return True
