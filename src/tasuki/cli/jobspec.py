"""From the words of `run` and `submit` to the fields of a job, and to the many jobs of an array or a file of lines."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from tasuki.errors import InvalidInput, TooLarge

INDEX, LINE = "{i}", "{line}"
ARRAY_MAX = 1_000_000
PIPE_S = 0.2
_NUMBER = re.compile(r"\d+(\.\d*)?")
_RANGE = re.compile(r"(\d{1,12})(?:-(\d{1,12})(?::(\d{1,12}))?)?")


def job_fields(
    exec_: str,
    args: Sequence[str],
    *,
    subject: str | None,
    env: Sequence[str] | None,
    timeout: float | None,
    retries: int,
    priority: int,
    payload_file: str | None,
    not_before: str | None = None,
    not_after: str | None = None,
    permanent_exit: str | None = None,
    retry_exit: str | None = None,
) -> dict[str, Any]:
    """The fields that all jobs of one command have in common, named as in JobSpec. `-` as exec: a handler's job."""
    fields: dict[str, Any] = {
        "exec": "" if exec_ == "-" else exec_,
        "args": tuple(args),
        "env": parse_env(env or ()),
        "timeout_s": timeout,
        "max_retries": retries,
        "priority": priority,
        "payload": read_payload(payload_file),
        "not_before": parse_time("--not-before", not_before),
        "not_after": parse_time("--not-after", not_after),
        "permanent_exit_codes": parse_codes("--permanent-exit", permanent_exit),
        "retry_exit_codes": parse_codes("--retry-exit", retry_exit),
    }
    if subject:
        fields["subject"] = subject
    return fields


def parse_env(pairs: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE, several."""
    found = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise InvalidInput(f"--env {name[:40]!r} has no '='; write --env NAME=VALUE")
        found[name] = value
    return found


def parse_time(option: str, text: str | None) -> float | None:
    """`+90` seconds from now, a Unix time, or a date and time as in 2026-01-31T06:00 (local, unless it names its zone)."""
    if text is None:
        return None
    try:
        if text.startswith("+"):
            return time.time() + float(text[1:])
        return float(text) if _NUMBER.fullmatch(text) else datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise InvalidInput(f"{option} {text[:40]!r} is no time; write +SECONDS, 2026-01-31T06:00, or a Unix time") from None


def parse_codes(option: str, text: str | None) -> tuple[int, ...]:
    """Exit codes with commas between."""
    try:
        return tuple(dict.fromkeys(int(code) for code in text.split(","))) if text is not None else ()
    except ValueError:
        raise InvalidInput(f"{option} {(text or '')[:40]!r}: write exit codes with commas between, as in 3,4") from None


def read_payload(path: str | None) -> bytes:
    """The whole file, or stdin for `-`; it travels inside the job, so it has the limit of a job's body."""
    if path is None:
        return b""
    try:
        if path == "-":
            return _limited(sys.stdin.buffer, "on stdin")
        with Path(path).open("rb") as file:
            return _limited(file, repr(path))
    except OSError as error:
        raise InvalidInput(f"the payload file {path!r} cannot be read: {error.strerror or error}") from None


def _limited(source: BinaryIO, where: str) -> bytes:
    from tasuki.core.job import BODY_INLINE_MAX_BYTES

    data = source.read(BODY_INLINE_MAX_BYTES + 1)
    if len(data) > BODY_INLINE_MAX_BYTES:
        raise TooLarge(
            f"the payload {where} has more than {BODY_INLINE_MAX_BYTES} bytes; give larger input with --file, "
            "which the job finds as in/NAME"
        )
    return data


def piped_payload(hint: Callable[[str], None]) -> bytes:
    """What was piped into the command, if anything was; never waits for a pipe that somebody only left open.

    Under cron, CI and ssh, stdin is often a pipe that nobody writes to or closes, so one that says nothing for PIPE_S is not
    waited for. That could also be a slow writer, whose words must not be lost without one of ours.
    """
    import select
    import stat

    if sys.stdin is None:  # closed by whoever started us
        return b""
    try:
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return _limited(sys.stdin.buffer, "on stdin")
        if not stat.S_ISFIFO(mode):
            return b""
        if select.select([descriptor], [], [], PIPE_S)[0]:
            return _limited(sys.stdin.buffer, "on stdin")
    except (OSError, ValueError):  # not a stdin that can be read, so there is nothing to hand on
        return b""
    hint("stdin is a pipe with nothing in it yet: the job gets no input (--payload-file - waits for it, < /dev/null is silent)")
    return b""


def check_files(files: Sequence[str] | None) -> tuple[str, ...]:
    """Input files that can be read, before anything is started for them."""
    for file in files or ():
        try:
            with Path(file).open("rb"):
                pass
        except OSError as error:
            raise InvalidInput(f"the input file {file!r} cannot be read: {error.strerror or error}") from None
    return tuple(files or ())


def parse_array(text: str) -> list[int]:
    """`1-1000`, `0-100:10`, `3,7,9-12`: the indexes, in order, each once."""
    indexes: dict[int, None] = {}
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise InvalidInput(
                f"--array {text[:80]!r}: {part[:40]!r} is not a number or range, as in 1-1000, 0-100:10 or 3,7,9-12"
            )
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if step < 1 or last < first:
            raise InvalidInput(f"--array {text[:80]!r}: {part[:40]!r} must go up, in steps of at least 1")
        span = range(first, last + 1, step)
        if len(indexes) + len(span) > ARRAY_MAX:
            raise TooLarge(f"--array {text[:80]!r} has more than {ARRAY_MAX} elements; split it")
        indexes.update(dict.fromkeys(span))
    return list(indexes)


def array_elements(indexes: Iterable[int], args: Sequence[str]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(index, arguments) with {i} replaced."""
    for index in indexes:
        yield index, tuple(argument.replace(INDEX, str(index)) for argument in args)


def line_elements(lines: Iterable[str], args: Sequence[str]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(line number, arguments): {line} replaced, or the line as the last argument. Empty lines make no job."""
    named = any(LINE in argument for argument in args)
    for number, raw in enumerate(lines, 1):
        line = raw.rstrip("\r\n")
        if line.strip():
            yield number, tuple(argument.replace(LINE, line) for argument in args) if named else (*args, line)


@contextmanager
def open_lines(path: str) -> Iterator[Iterable[str]]:
    """The lines of a file, or of stdin for `-`."""
    if path == "-":
        yield sys.stdin
        return
    try:
        file = Path(path).open(encoding="utf-8", errors="surrogateescape")  # noqa: SIM115 - closed below; only its opening may fail so
    except OSError as error:
        raise InvalidInput(f"--each-line {path!r} cannot be read: {error.strerror or error}") from None
    with file:
        yield file
