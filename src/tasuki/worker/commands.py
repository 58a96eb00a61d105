"""The exact command of a job and an exec. Every refusal is decided here, before anything of the job is started.

Secrets of an exec (`env_from_file`) are environment variables whose values are in files on the worker's machine. A value is the
file's content without the line end at its end. It is read for each attempt, in a thread, so a file that was replaced counts from
the next start on. It goes into the job's environment and nowhere else: no setting, message, error, log line, argument or `repr`
shows it. Links are followed, because orchestrators swap files that way; the file at the end must be a regular one, owned by the
worker's user or root, and closed to others.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from tasuki.config import OTHERS_READ, secret_problem
from tasuki.core.job import JobSpec
from tasuki.errors import ConfigError, quoted
from tasuki.worker.attempt import Attempt, JobRefused
from tasuki.worker.execs import ARGS, FILE, FILES, RESERVED_PREFIX, Exec, any_program, base_environment
from tasuki.worker.folder import RunFolder
from tasuki.worker.keeper.protocol import NO_LIMITS, PROGRESS_DESCRIPTOR, Limits, Prepare
from tasuki.worker.logs import PROGRESS_VARIABLE
from tasuki.worker.redaction import NOTHING_SECRET, Redactor

SECRET_MAX_BYTES = 64 * 1024  # Linux takes 128 KiB for one variable, its name included


class SecretProblem(Exception):
    """A file that cannot be used as a secret. The message never has its content."""


class Secrets:
    """The values of one attempt, by variable."""

    def __init__(self, values: Mapping[bytes, bytes]) -> None:
        self.environment = dict(values)
        self.redactor = Redactor(values.values()) if values else NOTHING_SECRET

    def __repr__(self) -> str:
        return f"<Secrets {', '.join(map(os.fsdecode, self.environment)) or 'none'}>"


NO_SECRETS = Secrets({})


def check_secrets(execs: Iterable[Exec]) -> None:
    """Raise ConfigError for the first exec whose secrets cannot be used. For the worker's start."""
    for exec_ in execs:
        try:
            read_secrets(exec_)
        except SecretProblem as problem:
            raise ConfigError(str(problem)) from None


def read_secrets(exec_: Exec) -> Secrets:
    """Return the current values, or raise SecretProblem for the first that cannot be read."""
    values = {}
    for variable, path in exec_.env_from_file.items():
        try:
            values[os.fsencode(variable)] = _read(path, allow_loose=exec_.allow_loose_permissions)
        except SecretProblem as problem:
            what = f"exec {exec_.name!r}: the file {path!r} for {variable} (env_from_file)"
            raise SecretProblem(f"{what} {problem}") from None
    return Secrets(values)


def _read(path: str, *, allow_loose: bool) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise SecretProblem(f"cannot be read: {error.strerror}") from None
    try:
        if problem := problem_of(os.fstat(descriptor), os.geteuid(), allow_loose=allow_loose):
            raise SecretProblem(problem)
        value = b""
        while piece := os.read(descriptor, SECRET_MAX_BYTES + 1 - len(value)):
            value += piece
    except OSError as error:
        raise SecretProblem(f"cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)
    if len(value) > SECRET_MAX_BYTES:
        raise SecretProblem(f"is larger than {SECRET_MAX_BYTES} bytes")
    value = value[:-2] if value.endswith(b"\r\n") else value.removesuffix(b"\n")
    if not value:
        raise SecretProblem("is empty")
    if b"\0" in value:
        raise SecretProblem("has a NUL character, which no environment can hold")
    return value


def problem_of(found: os.stat_result, uid: int, *, allow_loose: bool) -> str:
    """Return the reason why a file of this kind, owner and mode must not hold a secret of this user, or ""."""
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file"
    problem = secret_problem(found, uid, 0)
    if not problem and not allow_loose and (problem := secret_problem(found, uid, OTHERS_READ)):
        return f"{problem}, or set allow_loose_permissions = true on a machine with a single user"
    return problem


MARK = "TASUKI_MARK"
"""`<incarnation>/<lease_id>` in a job's environment, by which the next start finds processes that outlived their worker."""
# util-linux does the extra fork and the mount of /proc that a PID namespace needs. The program is process 1 in there: when it
# ends the kernel kills all others, and TERM reaches it only if it handles it.
IN_A_NAMESPACE = ("unshare", "--fork", "--pid", "--mount-proc", "--kill-child")
AS_ONESELF = ("--user", "--map-current-user")
FOUND_MAX = 256
MATCH_CPU_S = 1  # for all arguments of a job: an ordinary match takes microseconds
_MATCHER = """
import json, re, resource, sys
limit_s, patterns, arguments = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
for argument in arguments:
    if not any(re.fullmatch(pattern, argument) for pattern in patterns):
        break
    print(end=".", flush=True)
"""
_found: dict[tuple[str, str], str] = {}
"""Paths of programs, by name and PATH: a search through PATH takes a fifth of what a worker does for a job."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A complete command: nothing of the worker's own environment is added to it."""

    program: str
    """Absolute path of argv[0]."""
    argv: tuple[str, ...]
    env: dict[str, str]
    secrets: Secrets = NO_SECRETS
    """Added to env at the very last, so that no text that shows a command shows them."""
    cwd: str
    mark: str
    timeout_s: float | None
    stop_grace_s: float | None = None
    limits: Limits = NO_LIMITS
    warm: str = ""
    """Name of the exec whose warm interpreter forks it."""


def choose_exec(execs: Mapping[str, Exec], attempt: Attempt, may_run_any: Callable[[Attempt], bool]) -> Exec:
    """Return the exec that the job names, or any program if its submitter may run that; else refuse with EXEC_NOT_ALLOWED."""
    name = attempt.spec.exec
    if name in execs:
        return execs[name]
    if name and may_run_any(attempt):
        return any_program(name, attempt.spec.cwd)
    allowed = ", ".join(sorted(execs)) or "none"
    raise JobRefused(
        "EXEC_NOT_ALLOWED",
        f"exec {quoted(name)} is not allowed at this worker (allowed: {allowed}); "
        "name one of them, or start the worker with --exec NAME=COMMAND",
    )


def build_command(
    exec_: Exec,
    attempt: Attempt,
    folder: RunFolder,
    environment: Mapping[str, str],
    incarnation: str,
    secrets: Secrets = NO_SECRETS,
) -> Command:
    """Return the command of this attempt, or refuse: ARGS_NOT_ALLOWED, ENV_NOT_ALLOWED, BAD_INPUT, PROGRAM_NOT_FOUND."""
    spec = attempt.spec
    _check_args(exec_, spec)
    _check_env(exec_, spec)
    argv = _fill(exec_, spec, folder)
    mark = f"{incarnation}/{attempt.lease_id}"
    env = {
        **environment,
        **exec_.env,
        **spec.env,
        "TMPDIR": f"{folder.name}/tmp",  # noqa: S108 - of this attempt alone
        "TASUKI_JOB_ID": spec.job_id,
        "TASUKI_ATTEMPT": str(attempt.attempt),
        "TASUKI_IN": f"{folder.name}/in",
        "TASUKI_OUT": f"{folder.name}/out",
        PROGRESS_VARIABLE: str(PROGRESS_DESCRIPTOR),
        MARK: mark,
    }
    if exec_.cwd and not Path(exec_.cwd).is_dir():
        raise JobRefused("PROGRAM_NOT_STARTED", f"exec {exec_.name!r}: its cwd {exec_.cwd!r} is not a folder on this worker")
    program = _program(exec_, argv[0], env)
    if exec_.pid_namespace:
        argv = (*IN_A_NAMESPACE, *(() if os.geteuid() == 0 else AS_ONESELF), "--", program, *argv[1:])
        program = _program(exec_, argv[0], env)
    return Command(
        program=program,
        argv=argv,
        env=env,
        secrets=secrets,
        cwd=exec_.cwd or folder.name,
        mark=mark,
        timeout_s=spec.timeout_s if spec.timeout_s is not None else exec_.timeout_s,
        stop_grace_s=exec_.stop_grace_s,
        limits=exec_.limits,
        warm=exec_.name if exec_.python is not None else "",
    )


def build_interpreter(exec_: Exec, environment: Mapping[str, str], incarnation: str) -> Prepare | None:
    """Return the order for the exec's warm interpreter, if it needs one. It has the exec's settings, and nothing of any job."""
    if exec_.python is None:
        return None
    env = {**environment, **exec_.env, MARK: f"{incarnation}/{exec_.name}"}
    return Prepare(
        name=exec_.name,
        program=os.fsencode(exec_.python.interpreter),
        call=exec_.python.call,
        modules=exec_.python.modules,
        env={os.fsencode(name): os.fsencode(value) for name, value in env.items()},
        or_cold=exec_.python.or_cold,
    )


def _check_args(exec_: Exec, spec: JobSpec) -> None:
    if not spec.args or exec_.args == "any":
        return
    if exec_.args == "none":
        raise JobRefused(
            "ARGS_NOT_ALLOWED",
            f"exec {exec_.name!r} takes no arguments from a job, {len(spec.args)} were given; "
            'leave them out, or allow them in the exec (args = "any", or {args} in its command)',
        )
    if (argument := _first_unmatched(exec_, spec)) is not None:
        raise JobRefused(
            "ARGS_NOT_ALLOWED",
            f"argument {quoted(argument)} matches none of the patterns that exec {exec_.name!r} allows, or not within "
            f"{MATCH_CPU_S} s; change it, or add a pattern to the args of the exec",
        )


def matches_apart(exec_: Exec, spec: JobSpec) -> bool:
    """Return whether the job's arguments are matched in a process of their own, which takes some milliseconds: a pattern with a
    group or with more than one repetition may take longer than the job's lease, and no other thread runs meanwhile."""
    if not spec.args or isinstance(exec_.args, str):
        return False
    return any("(" in pattern or sum(map(pattern.count, "*+?{")) > 1 for pattern in exec_.args)


def _first_unmatched(exec_: Exec, spec: JobSpec) -> str | None:
    if not matches_apart(exec_, spec):
        return next((one for one in spec.args if not any(re.fullmatch(pattern, one) for pattern in exec_.args)), None)
    question = json.dumps([MATCH_CPU_S, exec_.args, spec.args]).encode()
    command = (sys.executable, "-I", "-S", "-c", _MATCHER)
    done = subprocess.run(command, input=question, capture_output=True, env={}, check=False)
    return next(iter(spec.args[len(done.stdout) :]), None)


def _check_env(exec_: Exec, spec: JobSpec) -> None:
    for name in spec.env:
        # An operator cannot allow reserved names; the exec of a Django project allows those that a run of a definition has.
        if name not in exec_.allow_env and (name.startswith(RESERVED_PREFIX) or not exec_.any_env):
            allowed = "any but TASUKI_…" if exec_.any_env else ", ".join(exec_.allow_env) or "none"
            raise JobRefused(
                "ENV_NOT_ALLOWED",
                f"environment name {quoted(name)} is not allowed for exec {exec_.name!r} (allowed: {allowed}); "
                "leave it out, or add it to the allow_env of the exec",
            )


def _fill(exec_: Exec, spec: JobSpec, folder: RunFolder) -> tuple[str, ...]:
    files = [f"{folder.name}/in/{file.name}" for file in spec.files]
    argv: list[str] = []
    for element in exec_.argv:
        if element == ARGS:
            argv += spec.args
        elif element == FILES:
            argv += files
        elif FILE in element:
            if len(files) != 1:
                raise JobRefused("BAD_INPUT", f"exec {exec_.name!r} works on exactly one input file, {len(files)} were given")
            argv.append(element.replace(FILE, files[0]))
        else:
            argv.append(element)
    return tuple(argv)


def missing_programs(execs: Mapping[str, Exec]) -> Iterator[str]:
    """Yield a sentence for each exec whose program is not there, or may not be executed."""
    environment = base_environment()
    for exec_ in execs.values():
        try:
            _program(exec_, exec_.argv[0], {**environment, **exec_.env})
        except JobRefused as error:
            yield f"its jobs will fail: {error.message}"


def _program(exec_: Exec, program: str, env: Mapping[str, str]) -> str:
    path = env.get("PATH", "")
    found = _found.get((program, path))
    if found is None or not os.access(found, os.X_OK):
        # "" as a part of PATH means the current folder, which is the job's own: nothing is to be found there.
        path = ":".join(part for part in path.split(":") if part.startswith("/"))
        found = shutil.which(program, path=path)
    if found is None:
        where = "" if "/" in program else f" on PATH ({path})"
        what, way = f"program {program!r} of exec {exec_.name!r}", "install it on this worker, or correct the exec"
        if exec_.any_env:
            what, way = f"program {program!r}", "install it, or name it by its path, as in ./program"
        raise JobRefused("PROGRAM_NOT_FOUND", f"{what} was not found{where} or may not be executed; {way}")
    if len(_found) >= FOUND_MAX:
        _found.clear()
    _found[program, env.get("PATH", "")] = found
    return found
