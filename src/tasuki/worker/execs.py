"""Execs: the names that a worker's operator allows, and the argv template behind each.

A template is split like a shell line once, when the worker starts, and never again. Placeholders:

    {file}    inside an element: the path of the job's one input file
    {files}   an element of its own: one element for each input file
    {args}    an element of its own: the job's free arguments, one element each

Any other braces are left alone. docs/concepts.md, Programs, shows a TOML table with every setting, and says how far each limit
holds. An exec of kind python is a function that is imported once, in a warm interpreter that forks for each job; a job brings
arguments only, never the name of a function.

Decision: free arguments are opt-in. In TOML, `{args}` in the template or `args` allows them. On the command line,
`--exec render='/opt/render --quiet'` without a placeholder means "this program, with the job's arguments after these": a flag
that could only run one fixed line would be of no use. With a placeholder, the flag follows the TOML rule.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from tasuki.core.decoding import decodable
from tasuki.core.job import check_exit_codes, check_name
from tasuki.errors import ConfigError, InvalidInput
from tasuki.worker import preforked
from tasuki.worker.attempt import NO_RULES, ExitRules
from tasuki.worker.keeper.protocol import NO_LIMITS, Limits
from tasuki.worker.results import (
    DEFAULT_OUTPUTS,
    MAX_FILE_BYTES,
    MAX_FILES,
    MAX_TOTAL_BYTES,
    OutputRules,
)

FILE, FILES, ARGS = "{file}", "{files}", "{args}"
RESERVED_PREFIX = "TASUKI_"  # variables of tasuki itself, which neither a job nor an exec may set
NICE_RANGE = (0, 19)  # below 0 needs a privilege that a worker should not have
MB = 1024 * 1024
OUTPUTS_MAX_MB = 64 * 1024  # the largest blob of a server

PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ")
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
_DOTTED = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_MODULE = re.compile(_DOTTED)
_CALL = re.compile(rf"{_DOTTED}:{_DOTTED}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def base_environment() -> dict[str, str]:
    """Return the environment that every job gets: a few variables of the worker's own, with no token and no address in them."""
    found = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {"PATH": DEFAULT_PATH, "LANG": "C.UTF-8", **found}


class PythonCall(msgspec.Struct, frozen=True):
    """The function that a warm interpreter calls, and its imports."""

    call: str
    """package.module:function"""
    modules: tuple[str, ...]
    """Imported before it."""
    interpreter: str
    or_cold: bool = False
    """True: jobs start cold while the interpreter cannot be prepared; False: they are refused."""

    @property
    def cold(self) -> tuple[str, ...]:
        """The beginning of an argv that does the same in an interpreter of its own; `keeper/preforked.py` relies on its shape."""
        return (self.interpreter, "-P", preforked.__file__, self.call)


class _Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that an `[exec.NAME]` table and its `Exec` share."""

    env: dict[str, str] = {}
    allow_env: tuple[str, ...] = ()
    timeout_s: float | None = None
    env_from_file: dict[str, str] = {}
    """Variable → path of the file with its value."""
    allow_loose_permissions: bool = False
    cwd: str | None = None
    stop_grace_s: float | None = None
    pid_namespace: bool = False


class Exec(_Settings, frozen=True, kw_only=True):
    """One allowed program, made and checked by the functions below."""

    name: str
    argv: tuple[str, ...]
    args: Literal["none", "any"] | tuple[str, ...] = "none"
    """The free arguments that a job may bring; where any are allowed, `{args}` is in argv."""
    any_env: bool = False
    """Set only for "any program", where the submitter is the worker's own user."""
    outputs: OutputRules = OutputRules()
    exits: ExitRules = NO_RULES
    limits: Limits = NO_LIMITS
    python: PythonCall | None = None
    """Set for kind python; argv is the same call in a cold interpreter, for systems without warm ones."""


@decodable
class _ExecTable(_Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An `[exec.NAME]` table of a TOML file."""

    command: str | None = None
    argv: tuple[str, ...] | None = None
    args: Literal["none", "any"] | tuple[str, ...] | None = None
    outputs: tuple[str, ...] = DEFAULT_OUTPUTS
    outputs_required: tuple[str, ...] = ()
    outputs_max_files: int = MAX_FILES
    outputs_max_file_mb: int = MAX_FILE_BYTES // MB
    outputs_max_total_mb: int = MAX_TOTAL_BYTES // MB
    permanent_exit_codes: tuple[int, ...] | None = None
    retry_exit_codes: tuple[int, ...] | None = None
    memory_mb: int | None = None
    processes: int | None = None
    cpu_seconds: int | None = None
    file_size_mb: int | None = None
    open_files: int | None = None
    nice: int = 0
    kind: Literal["program", "python"] = "program"
    call: str | None = None
    preload: tuple[str, ...] = ()
    interpreter: str | None = None


def load_execs(path: Path) -> dict[str, Exec]:
    """Return the execs of a TOML file that has `[exec.NAME]` tables and nothing else, or raise ConfigError."""
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the execs file {str(path)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the execs file {str(path)!r} is not TOML: {error}") from error
    tables = document.pop("exec", None)
    if document or not isinstance(tables, dict):
        wrong = f"has {', '.join(sorted(document))!r}" if document else "has no exec"
        raise ConfigError(f"the execs file {str(path)!r} {wrong}; write each exec as a table [exec.NAME]")
    return parse_execs(tables)


def parse_execs(tables: Mapping[str, Any]) -> dict[str, Exec]:
    """Return the execs of a mapping from name to table."""
    execs = {}
    for name, table in tables.items():
        try:
            parsed = msgspec.convert(table, _ExecTable)
        except msgspec.ValidationError as error:
            raise ConfigError(f"exec {name!r}: {error}; its settings are {', '.join(_ExecTable.__struct_fields__)}") from error
        execs[name] = _checked(name, parsed)
    return execs


def parse_exec_flag(flag: str) -> Exec:
    """Return the exec of `--exec NAME=TEMPLATE`; see the decision at the top of this file."""
    name, separator, template = flag.partition("=")
    if not separator:
        raise ConfigError(
            f"--exec {flag!r} has no '='; write --exec NAME='PROGRAM ARGUMENTS', like --exec render='/opt/render -q'"
        )
    with _naming(name):
        argv = _split(template)
    has_placeholder = any(placeholder in element for element in argv for placeholder in (FILE, FILES, ARGS))
    return _checked(name, _ExecTable(argv=argv, args=None if has_placeholder else "any"))


def any_program(name: str, cwd: str = "") -> Exec:
    """Return the exec for a job of the worker's own user, who may run any program with any arguments and environment, in any
    folder."""
    return Exec(name=name, argv=(name, ARGS), args="any", any_env=True, cwd=cwd or None)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Name the exec in the errors about its settings."""
    try:
        yield
    except (ConfigError, InvalidInput) as error:
        raise ConfigError(f"exec {name!r}: {error.message}") from error


def _checked(name: str, table: _ExecTable) -> Exec:
    try:
        check_name(name, "exec")
    except InvalidInput as error:
        raise ConfigError(error.message) from error
    with _naming(name):
        python = _python_call(table)
        if python is not None:
            table = replace(table, argv=(*python.cold, *(table.argv or ())))
        argv = _argv(table)
        args = _args_rule(table, argv)
        _check_numbers(table)
        _check_environment(table)
        _check_paths(table)
        check_exit_codes(table.permanent_exit_codes or (), table.retry_exit_codes or ())
    return Exec(
        name=name,
        argv=argv,
        args=args,
        outputs=OutputRules(
            globs=table.outputs,
            required=table.outputs_required,
            max_files=table.outputs_max_files,
            max_file_bytes=table.outputs_max_file_mb * MB,
            max_total_bytes=table.outputs_max_total_mb * MB,
        ),
        exits=ExitRules(permanent=table.permanent_exit_codes, retry=table.retry_exit_codes),
        limits=Limits(**{limit: getattr(table, limit) for limit in Limits.__struct_fields__}),
        python=python,
        **{setting: getattr(table, setting) for setting in _Settings.__struct_fields__},
    )


def _python_call(table: _ExecTable) -> PythonCall | None:
    """Return the checked function of a table of kind python, None for another kind."""
    if table.kind != "python":
        if table.call is not None or table.preload or table.interpreter is not None:
            raise ConfigError('call, preload and interpreter are for kind = "python"; add it, or remove them')
        return None
    if table.call is None or _CALL.fullmatch(table.call) is None:
        raise ConfigError(f"kind python needs call, like 'package.module:function', got {table.call!r}")
    if table.command is not None:
        raise ConfigError("kind python has no command; write the function's arguments as argv = [...]")
    if table.pid_namespace:
        raise ConfigError("pid_namespace is for programs; a forked interpreter has no namespace of its own")
    for module in table.preload:
        if _MODULE.fullmatch(module) is None:
            raise ConfigError(f"preload has {module!r}, which is not the name of a module")
    interpreter = table.interpreter or sys.executable
    if not interpreter.startswith("/") or "{" in interpreter:
        raise ConfigError(f"interpreter must be an absolute path, got {interpreter!r}")
    return PythonCall(table.call, table.preload, interpreter)


def _argv(table: _ExecTable) -> tuple[str, ...]:
    if (table.command is None) == (table.argv is None):
        raise ConfigError("it needs exactly one of command (one line) and argv (a list)")
    argv = _split(table.command) if table.command is not None else table.argv or ()
    if not argv or not argv[0]:
        raise ConfigError("it has an empty command; it must begin with a program")
    program = argv[0]
    if "{" in program or ("/" in program and not program.startswith("/")):
        raise ConfigError(f"the program {program!r} must be an absolute path or a plain name on PATH")
    for element in argv:
        if "\0" in element:
            raise ConfigError(f"{element!r} has a NUL character, which no program can be given")
        if any(placeholder in element and element != placeholder for placeholder in (FILES, ARGS)):
            raise ConfigError(f"{{files}} and {{args}} become several arguments and must stand alone, not in {element!r}")
    if ARGS not in argv and table.args not in (None, "none", ()):
        argv = (*argv, ARGS)
    return argv


def _split(line: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(line))
    except ValueError as error:
        raise ConfigError(f"cannot split {line!r} into arguments: {error}") from error


def _args_rule(table: _ExecTable, argv: tuple[str, ...]) -> Literal["none", "any"] | tuple[str, ...]:
    if table.args is None:
        return "any" if ARGS in argv else "none"
    if ARGS in argv and table.args in ("none", ()):
        raise ConfigError(f"it has {{args}} in its command but args = {table.args!r}; remove one of them")
    if isinstance(table.args, tuple):
        for pattern in table.args:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"args has {pattern!r}, which is not a regular expression: {error}") from error
    return table.args or "none"


def _check_numbers(table: _ExecTable) -> None:
    for setting in ("timeout_s", "memory_mb", "processes", "cpu_seconds", "file_size_mb", "open_files"):
        value = getattr(table, setting)
        if value is not None and not value > 0:
            raise ConfigError(f"{setting} must be above 0, got {value}; leave it out for no limit")
    if table.stop_grace_s is not None and not table.stop_grace_s >= 0:
        raise ConfigError(f"stop_grace_s must be 0 or more, got {table.stop_grace_s}; leave it out for the default")
    if not NICE_RANGE[0] <= table.nice <= NICE_RANGE[1]:
        raise ConfigError(f"nice must be {NICE_RANGE[0]} to {NICE_RANGE[1]}, got {table.nice}")
    limits = {"outputs_max_files": MAX_FILES, "outputs_max_file_mb": OUTPUTS_MAX_MB, "outputs_max_total_mb": OUTPUTS_MAX_MB}
    for setting, most in limits.items():
        value = getattr(table, setting)
        if not 0 <= value <= most:
            raise ConfigError(f"{setting} must be 0 to {most}, got {value}")


def _check_environment(table: _ExecTable) -> None:
    for variable in (*table.env, *table.allow_env, *table.env_from_file):
        if _ENV_NAME.fullmatch(variable) is None:
            raise ConfigError(f"environment name {variable!r} must be letters, digits and _, not starting with a digit")
        if variable.startswith(RESERVED_PREFIX):
            raise ConfigError(f"environment name {variable!r} is reserved; choose one without {RESERVED_PREFIX}")
    for variable, value in table.env.items():
        if "\0" in value:
            raise ConfigError(f"the value of {variable} has a NUL character, which no program can be given")
    for variable, path in table.env_from_file.items():
        if variable in (*PASSED_ON, "TMPDIR"):
            raise ConfigError(f"{variable} cannot come from a file (env_from_file); fix it with env")
        if variable in table.env or variable in table.allow_env:
            other = "env" if variable in table.env else "allow_env"
            raise ConfigError(f"{variable} stands in env_from_file and in {other}; remove one of them")
        if not path.startswith("/") or "\0" in path:
            raise ConfigError(f"env_from_file names {path!r} for {variable}; it must be an absolute path")


def _check_paths(table: _ExecTable) -> None:
    for setting in ("outputs", "outputs_required"):
        for glob in getattr(table, setting):
            parts = glob.split("/")
            if parts[0] != "out" or len(parts) < 2 or any(part in ("", ".", "..") for part in parts):
                raise ConfigError(f"{setting} has {glob!r}; outputs lie below out/, so write it like 'out/**' or 'out/*.csv'")
    if table.cwd is not None and not table.cwd.startswith("/"):
        raise ConfigError(f"cwd must be an absolute path, got {table.cwd!r}; leave it out for the job's own folder")
