"""Execs of kind python: a function of a module that is imported once, in a warm interpreter that forks for each job.

    [exec.price]
    kind = "python"
    call = "shop.pricing:main"            # main(arguments: list[str]) -> int | None
    preload = ["decimal", "sqlite3"]      # more modules to import before the first job; what `call` imports comes by itself
    interpreter = "/srv/shop/.venv/bin/python"    # Python 3.11 or newer; default: the worker's own
    argv = ["--fast", "{args}", "{file}"] # the function's arguments; default: those of the job, if `args` allows any
    env = { PYTHONPATH = "/srv/shop" }    # for the import too

All other settings are those of any exec. What is imported and called stands here and nowhere else: a job brings arguments only.
Only checks; starts nothing.
"""

from __future__ import annotations

import re
import sys
from typing import Literal, Protocol

import msgspec

from tasuki.errors import ConfigError
from tasuki.worker import preforked

_DOTTED = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_MODULE = re.compile(_DOTTED)
_CALL = re.compile(rf"{_DOTTED}:{_DOTTED}")


class PythonSettings(Protocol):
    """What is needed of an `[exec.NAME]` table."""

    kind: Literal["program", "python"]
    call: str | None
    preload: tuple[str, ...]
    interpreter: str | None
    command: str | None
    pid_namespace: bool


class PythonCall(msgspec.Struct, frozen=True):
    """What a warm interpreter imports and calls."""

    call: str
    """package.module:function"""
    modules: tuple[str, ...]
    """To import before it."""
    interpreter: str

    @property
    def cold(self) -> tuple[str, ...]:
        """How an argv begins that does the same in an interpreter of its own; `keeper_warm.CALL_AT` counts on it."""
        return (self.interpreter, "-P", preforked.__file__, self.call)


def python_call(name: str, table: PythonSettings) -> PythonCall | None:
    """What the table says, or None if it is of another kind; ConfigError."""
    if table.kind != "python":
        if table.call is not None or table.preload or table.interpreter is not None:
            raise ConfigError(f'exec {name!r}: call, preload and interpreter are for kind = "python"; add it, or remove them')
        return None
    if table.call is None or _CALL.fullmatch(table.call) is None:
        raise ConfigError(f"exec {name!r}: kind python needs call, like 'package.module:function', got {table.call!r}")
    if table.command is not None:
        raise ConfigError(f"exec {name!r}: kind python has no command; write the function's arguments as argv = [...]")
    if table.pid_namespace:
        raise ConfigError(f"exec {name!r}: pid_namespace is for programs; a forked interpreter has no namespace of its own")
    for module in table.preload:
        if _MODULE.fullmatch(module) is None:
            raise ConfigError(f"exec {name!r}: preload has {module!r}, which is no name of a module")
    interpreter = table.interpreter or sys.executable
    if not interpreter.startswith("/") or "{" in interpreter:
        raise ConfigError(f"exec {name!r}: interpreter must be an absolute path, got {interpreter!r}")
    return PythonCall(table.call, table.preload, interpreter)
