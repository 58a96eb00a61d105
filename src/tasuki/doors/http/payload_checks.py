"""JSON Schemas of apps: the payloads of their jobs are checked in a process of its own.

A pattern of a schema may take years for a short text, and `uniqueItems` the square of the time for a long list; while Python
matches a pattern, no other thread of the process runs. So the server hands payloads to a child, one per line, which answers each
with a line: "" or why it does not fit. The kernel ends a child that needs more than CHECK_CPU_S for one payload, and the next
check starts another.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from tasuki.core.job import BODY_INLINE_MAX_BYTES
from tasuki.errors import ConfigError, InvalidInput, Unavailable

CHECK_CPU_S = 1.0  # an ordinary payload takes milliseconds
SHOWN_MAX_CHARS = 300


class PayloadCheck:
    """The check of one app's payloads against the JSON Schema in a file, which is read once.

    Nothing is fetched: references lead to places in the file itself. ConfigError if the file is no such schema.
    """

    def __init__(self, app: str, path: Path) -> None:
        self._app = app
        self._schema = msgspec.json.encode(_read_schema(path, f"--app {app}: the schema {os.fspath(path)!r}"))
        self._child: Process | None = None
        self._alone = asyncio.Lock()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By token: it has one request that is checked at a time, so that others wait for one payload of it at most."""

    async def problems(self, payloads: Sequence[bytes], token: str) -> list[InvalidInput | None]:
        """Return for each payload why it is refused, or None. Payloads behind one that takes too long are refused with it."""
        found: list[InvalidInput | None] = []
        turn = self._turns.setdefault(token, asyncio.Lock())
        async with turn:
            for payload in payloads:
                if len(payload) > BODY_INLINE_MAX_BYTES:
                    found.append(None)  # no job can have it; its submit says so
                    continue
                async with self._alone:
                    told = await self._ask(payload)
                if told is None:
                    late = f"a payload takes longer than {CHECK_CPU_S:g} s to check against the schema of app {self._app!r}"
                    return found + [InvalidInput(f"{late}; send shorter texts and lists")] * (len(payloads) - len(found))
                found.append(InvalidInput(f"the payload does not fit app {self._app!r}: {told}") if told else None)
        return found

    async def _ask(self, payload: bytes) -> str | None:
        """Return what the child says of a payload; None if it takes too long."""
        child = self._child or await self._start()
        self._child = None  # a child whose answer was not read is of no further use
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(payload + b"\n")
            answer = await child.stdout.readline()
        except BaseException:
            child.stdin.close()
            raise
        if answer:
            self._child = child
            return str(msgspec.json.decode(answer))
        if (code := await child.wait()) == -signal.SIGPROF:
            return None
        raise Unavailable(f"the check of payloads of app {self._app!r} ended with {code}; try again, and see the server's log")

    async def _start(self) -> Process:
        command = (sys.executable, "-P", "-m", "tasuki.doors.http.payload_checks")
        child = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, start_new_session=True)
        assert child.stdin is not None
        child.stdin.write(self._schema + b"\n")
        return child

    async def close(self) -> None:
        """End the child."""
        if self._child is not None:
            child, self._child = self._child, None
            assert child.stdin is not None
            child.stdin.close()
            await child.wait()


def _read_schema(path: Path, name: str) -> Any:
    """Return the schema in a file, with all its references checked."""
    try:
        import jsonschema
        import referencing.jsonschema
    except ImportError:
        raise ConfigError("--app NAME=SCHEMA needs jsonschema; install it with: pip install 'tasuki[server]'") from None
    try:
        schema = msgspec.json.decode(path.read_bytes())
        jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
        registry: Any = referencing.jsonschema.EMPTY_REGISTRY
        resolver = registry.with_resource("", referencing.jsonschema.DRAFT202012.create_resource(schema)).resolver()
        for reference in _references(schema):
            resolver.lookup(reference)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None
    except jsonschema.SchemaError as error:
        raise ConfigError(f"{name} is not a JSON Schema: {error.json_path}: {error.message[:SHOWN_MAX_CHARS]}") from None
    except referencing.exceptions.Unresolvable as error:
        raise ConfigError(f"{name} refers to {error.ref[:200]!r}, which must be in the file itself; put it below $defs") from None
    return schema


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        for part in schema.values():
            yield from _references(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _references(part)


# ---------------------------------------------------------------------------------------------------- the child


def _checker(schema: Any) -> Callable[[Any], str]:
    """Return a function that says why a payload does not fit the schema, or ""."""
    import jsonschema
    import referencing.jsonschema

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator = kind(schema, registry=referencing.jsonschema.EMPTY_REGISTRY)

    def check(payload: Any) -> str:
        try:
            error = jsonschema.exceptions.best_match(validator.iter_errors(payload))
        except RecursionError:
            return "it is nested too deep"
        return "" if error is None else f"{error.json_path[:SHOWN_MAX_CHARS]}: {error.message[:SHOWN_MAX_CHARS]}"

    return check


def main() -> None:
    """Check payloads, one per line of stdin behind the schema, until there are no more."""
    lines = sys.stdin.buffer
    check = _checker(msgspec.json.decode(lines.readline()))
    for line in lines:
        signal.setitimer(signal.ITIMER_PROF, CHECK_CPU_S)
        problem = check(msgspec.json.decode(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(msgspec.json.encode(problem) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
