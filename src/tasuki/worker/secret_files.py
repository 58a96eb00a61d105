"""Secrets of execs: environment variables whose values lie in files on the worker's machine, one file for each.

    [exec.price]
    env_from_file = { API_KEY = "/run/secrets/price-api-key" }

A value is the file's contents without the line end at its end. It is read anew for each attempt, so a file that was replaced
counts from the next start on. It goes into the job's environment and nowhere else: a value never stands in a setting, a message,
an error, a log line or an argument, and `repr` of what holds it does not show it. Links are followed, because that is how
orchestrators swap files; what counts is the file at the end: a regular one, owned by the worker's user or root, closed to others.

Reads the files it is told to, in a thread: a path may lie on a network.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from typing import Protocol

from tasuki.errors import ConfigError
from tasuki.worker.redaction import NOTHING_SECRET, Redactor

SECRET_MAX_BYTES = 64 * 1024  # Linux takes 128 KiB for one variable, its name included
_OTHERS_READ = stat.S_IRGRP | stat.S_IROTH
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class SecretProblem(Exception):
    """Why a file cannot be used. Says which, never what is in it."""


class Secrets:
    """The values of one attempt, by name of the variable."""

    def __init__(self, values: Mapping[bytes, bytes]) -> None:
        self.environment = dict(values)
        self.redactor = Redactor(values.values()) if values else NOTHING_SECRET

    def __repr__(self) -> str:
        return f"<Secrets {', '.join(map(os.fsdecode, self.environment)) or 'none'}>"


NO_SECRETS = Secrets({})


class HasSecrets(Protocol):
    """What is needed of an exec."""

    @property
    def name(self) -> str: ...
    @property
    def env_from_file(self) -> Mapping[str, str]: ...
    @property
    def allow_loose_permissions(self) -> bool: ...


def check_secrets(execs: Iterable[HasSecrets]) -> None:
    """At a worker's start: ConfigError for the first exec whose secrets cannot be used as things are."""
    for exec_ in execs:
        try:
            read_secrets(exec_)
        except SecretProblem as problem:
            raise ConfigError(str(problem)) from None


def read_secrets(exec_: HasSecrets) -> Secrets:
    """All values as they are now, or SecretProblem for the first that cannot be had."""
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
        value = _contents(descriptor)
    except OSError as error:
        raise SecretProblem(f"cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)
    if not value:
        raise SecretProblem("is empty")
    if b"\0" in value:
        raise SecretProblem("has a NUL character, which no environment can hold")
    return value


def _contents(descriptor: int) -> bytes:
    value = b""
    while piece := os.read(descriptor, SECRET_MAX_BYTES + 1 - len(value)):
        value += piece
    if len(value) > SECRET_MAX_BYTES:
        raise SecretProblem(f"is larger than {SECRET_MAX_BYTES} bytes")
    return value[:-2] if value.endswith(b"\r\n") else value.removesuffix(b"\n")


def problem_of(found: os.stat_result, uid: int, *, allow_loose: bool) -> str:
    """Why a file of this kind, owner and mode holds no secret for this user, or nothing."""
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file"
    if found.st_uid not in (uid, 0):
        return f"belongs to user {found.st_uid}; it must belong to the worker's user ({uid}) or to root"
    if mode & _OTHERS_WRITE:
        return f"can be changed by others (mode {mode:04o}); chmod 600 it"
    if mode & _OTHERS_READ and not allow_loose:
        return (
            f"can be read by others (mode {mode:04o}); chmod 600 it, or set allow_loose_permissions = true "
            "where nobody else lives on the machine"
        )
    return ""
