"""Management commands as jobs: which ones may run, how they are enqueued, and their run in a fork of a warm interpreter.

`enqueue_command("rebuild_index", "--days=7")` is a job of the exec `django`. The node's keeper has an interpreter that has
imported this project and its commands once (`warm.py`), and forks it for each job; in the fork `run_command` does what
`manage.py rebuild_index --days=7` does.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from asgiref.sync import sync_to_async
from django.apps import apps
from django.core.management import get_commands, load_command_class
from django.core.management.base import BaseCommand, CommandError

from tasuki.core.job import JobSpec, Outcome, check_spec, check_specs, check_text, type_name
from tasuki.core.scheduler.firing import DJANGO_EXEC
from tasuki.django.conf import APP_LABEL, project_settings
from tasuki.django.enqueueing import DEFAULT_QUEUE, command_subject, enqueue_job, new_id, unix_time
from tasuki.errors import InvalidInput, WrongType, quoted
from tasuki.worker.attempt import ExitRules
from tasuki.worker.execs import ARGS, RESERVED_PREFIX, Exec, PythonCall

NEVER_BY_DEFAULT = frozenset({"dbshell", "flush", "migrate", "runserver", "shell", "sqlflush", "testserver"})
"""Commands that must be named in TASUKI["commands"], also where an app of the project replaces them."""
USAGE_EXIT_CODE = 2
"""Exit code of a command that does not understand its arguments: another attempt would not either."""
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")})
_PACKAGES = {"site-packages", "dist-packages"}  # also of the user, of a system's own packages, of `pip install --target`
RUN_VARIABLES = ("TASUKI_SCHEDULED_FOR", "TASUKI_DEFINITION")


def allowed_commands() -> dict[str, str]:
    """Return the commands that jobs may run, by name, with their apps: the project's own, and those of TASUKI["commands"]."""
    named = project_settings().commands
    own = {config.name for config in apps.get_app_configs() if config.label != APP_LABEL and is_own(config.path)}
    found = get_commands()
    return {
        name: app if isinstance(app, str) else app.__module__
        for name, app in found.items()
        if name in named or (app in own and name not in NEVER_BY_DEFAULT)
    }


@cache
def is_own(file: str) -> bool:
    """Return whether a file is part of the project: neither installed by pip nor of Python itself."""
    return not file.startswith(_INSTALLED) and _PACKAGES.isdisjoint(Path(file).parts)


def check_command(name: str) -> str:
    """Return the app of a command that jobs may run, or raise InvalidInput."""
    if name not in get_commands():
        get_commands.cache_clear()  # type: ignore[attr-defined]  # it may be a new file
    allowed = allowed_commands()
    if name in allowed:
        return allowed[name]
    if name not in get_commands():
        known = ", ".join(sorted(allowed)) or "none"
        raise InvalidInput(f"command {quoted(name)} is not a management command of this project; allowed are {known}")
    raise InvalidInput(f'command {quoted(name)} may not be run by jobs; add it to TASUKI["commands"] in the settings to allow it')


def refused_command(name: str) -> Outcome | None:
    """Return the outcome of a job whose command jobs may not run; None: they may."""
    try:
        check_command(name)
    except InvalidInput as error:
        return Outcome(error_code="COMMAND_NOT_ALLOWED", message=error.message, permanent=True)
    return None


def enqueue_command(
    command: str,
    *arguments: object,
    queue: str = DEFAULT_QUEUE,
    job_id: str | None = None,
    not_before: datetime | None = None,
    priority: int = 5,
    timeout_s: float | None = None,
    max_retries: int = 3,
    backoff_s: float | None = None,
) -> str:
    """Enqueue `manage.py COMMAND ARGUMENTS` in the calling thread's transaction, and return the job's id.

    With a `job_id` of your own, asking again is the same job. `priority` is 0 to 9, higher first. InvalidInput for a command
    that jobs may not run, or arguments that it does not take.
    """
    check_text("command", command)
    check_text("queue", queue)
    words = tuple(_word(command, place, value) for place, value in enumerate(arguments, 1))
    check_arguments(command, words)
    spec = JobSpec(
        job_id=new_id() if job_id is None else job_id,
        subject=command_subject(queue, command),
        exec=DJANGO_EXEC,
        args=(command, *words),
        not_before=unix_time("not_before", not_before),
        priority=priority,
        timeout_s=timeout_s,
        max_retries=max_retries,
        backoff_s=backoff_s,
    )
    check_specs([spec])
    enqueue_job(check_spec(spec))
    return spec.job_id


def _word(command: str, place: int, value: object) -> str:
    """Return an argument as text. What is None or a list there was meant otherwise: `--days=None` is no default."""
    if value is None or isinstance(value, bytes | list | tuple | dict | set | frozenset):
        raise WrongType(f"argument {place} of command {quoted(command)} must be a text or a number, got {type_name(value)}")
    return check_text(f"argument {place} of command {quoted(command)}", str(value))


aenqueue_command = sync_to_async(enqueue_command, thread_sensitive=True)
"""`enqueue_command` for async code; it is a transaction of its own."""


def check_arguments(name: str, arguments: Sequence[str]) -> BaseCommand:
    """Return a command that jobs may run if it takes these arguments, else raise InvalidInput.

    Options of manage.py itself that say which code is imported are refused: the settings and paths of a job are its node's.
    """
    app = check_command(name)
    try:
        return _checked(app, name, arguments)
    except InvalidInput:  # its arguments may have changed: a parser's choices can be rows
        _loaded.cache_clear()
        return _checked(app, name, arguments)


@lru_cache(256)
def _loaded(app: str, name: str) -> tuple[BaseCommand, Any]:
    """Return a command and its parser: to build one takes longer than all the rest."""
    command = load_command_class(app, name)
    parser: Any = command.create_parser("manage.py", name)
    command.create_parser = lambda *_, **__: parser  # type: ignore[method-assign]
    parser._print_message = lambda *_: None  # --help and --version are refused
    return command, parser


def _checked(app: str, name: str, arguments: Sequence[str]) -> BaseCommand:
    command, parser = _loaded(app, name)
    try:
        found = parser.parse_args(arguments)
    except CommandError as error:
        raise InvalidInput(f"arguments of command {quoted(name)}: {error}") from error
    except SystemExit:
        raise InvalidInput(f"arguments of command {quoted(name)}: with --help or --version it does not run") from None
    for option in ("settings", "pythonpath"):
        if (value := getattr(found, option, None)) is not None:
            raise InvalidInput(f"arguments of command {quoted(name)}: --{option}={value} is not for jobs; the worker's own holds")
    return command


# ---------------------------------------------------------------------------------------------------- in the node


def command_exec(environment: Mapping[str, str]) -> Exec:
    """Return the exec of the node: the project's own environment and folder, a warm interpreter that forks for each job."""
    inherited = {name: value for name, value in environment.items() if not name.startswith(RESERVED_PREFIX)}
    python = PythonCall("tasuki.django.warm:main", ("tasuki.django.warm",), sys.executable, or_cold=True)
    return Exec(
        name=DJANGO_EXEC,
        argv=(*python.cold, ARGS),
        args="any",
        env={**inherited, "PYTHONPATH": python_path()},
        allow_env=RUN_VARIABLES,
        cwd=str(Path.cwd()),
        exits=ExitRules(permanent=(USAGE_EXIT_CODE,)),
        python=python,
    )


def python_path() -> str:
    """Return PYTHONPATH for an interpreter that shall find the modules that this one finds."""
    return os.pathsep.join(path for path in sys.path if path and not path.endswith(".zip"))


def run_command(arguments: list[str]) -> None:
    """Do what `manage.py ARGUMENTS` does, without system checks: the node's own start has made them."""
    name, *words = arguments
    try:
        command = check_arguments(name, words)
    except InvalidInput as error:
        sys.stderr.write(f"{error.message}\n")
        sys.exit(USAGE_EXIT_CODE)
    skipping = ["--skip-checks"] if command.requires_system_checks else []
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    command.run_from_argv(["manage.py", name, *skipping, *words])
