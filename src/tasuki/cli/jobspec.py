"""Options that describe a job, for `run` and `submit`, and the fields of the job that they make."""

from __future__ import annotations

import os
import re
import select
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import click

from tasuki.cli.command import PATH, STDIN, Duration, argument, duration, gather, number, option, options, several
from tasuki.cli.output import Output
from tasuki.client.aio import SUBMIT_NAMES, AsyncClient
from tasuki.core.job import BODY_INLINE_MAX_BYTES, BUDGET_MAX, TIMEOUT_MAX_S, InputFile, check_file_name, check_name
from tasuki.core.units import parse_duration
from tasuki.errors import ConfigError, InvalidInput, TooLarge

INDEX, LINE = "{i}", "{line}"
ARRAY_MAX = 1_000_000
PIPE_S = 0.2
_NUMBER = re.compile(r"\d+(\.\d*)?")
_RANGE = re.compile(r"(\d{1,12})(?:-(\d{1,12})(?::(\d{1,12}))?)?")

# Everything from the exec's name on belongs to the job, also what looks like an option.
TAKES_A_COMMAND = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def _check_exec(context: click.Context, parameter: click.Parameter, exec_: str) -> str:
    """Refuse an empty name: it would be a handler's job, and is more likely a variable that was not set."""
    if not exec_.strip():
        raise click.BadParameter("it is empty; name a program, or write - for a handler's job")
    if len(exec_.split()) > 1 and not Path(exec_).exists():
        raise click.BadParameter(
            f"there is no program {exec_[:80]!r}; write it and its arguments as words of their own, without quotes"
        )
    return exec_


def job_fields(
    exec_: str,
    args: tuple[str, ...],
    subject: str | None,
    job_id: str | None,
    files: tuple[str, ...],
    cwd: Path | None,
    env: tuple[str, ...],
    payload_file: str | None,
    timeout: float | None,
    retries: int,
    priority: int,
    not_before: str | None,
    not_after: str | None,
    permanent_exit: str | None,
    retry_exit: str | None,
    route_key: str,
) -> dict[str, Any]:
    """Return what all jobs of one command have in common, named as in JobSpec, with `job_id` and `files`.

    Without --subject, --cwd and --payload-file there is no `subject`, no `cwd` and no `payload`.
    """
    return {
        "exec": "" if exec_ == "-" else exec_,
        "args": args,
        "env": parse_env(env),
        "timeout_s": timeout,
        "max_retries": retries,
        "priority": priority,
        **({"payload": read_payload(payload_file)} if payload_file is not None else {}),
        "not_before": parse_time("--not-before", not_before),
        "not_after": parse_time("--not-after", not_after),
        "permanent_exit_codes": parse_codes("--permanent-exit", permanent_exit),
        "retry_exit_codes": parse_codes("--retry-exit", retry_exit),
        "route_key": route_key,
        "job_id": job_id,
        "files": check_files(files),
        **({"subject": subject} if subject else {}),
        **({"cwd": cwd} if cwd is not None else {}),
    }


def submit_options(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a JobSpec as `AsyncClient.submit` calls them."""
    return {SUBMIT_NAMES.get(name, name): value for name, value in fields.items()}


OPTIONS = {
    "job_id": "--job-id",
    "subject": "--subject",
    "exec": "EXEC",
    "cwd": "--cwd",
    "environment name": "--env",
    "input file": "--file",
    "file name": "--file",
    "permanent_exit_codes": "--permanent-exit",
    "retry_exit_codes": "--retry-exit",
    "not_before": "--not-before",
    "not_after": "--not-after",
    "route_key": "--route-key",
}
"""Fields of a job with their options."""


@contextmanager
def naming_options() -> Iterator[None]:
    """Let errors about a field of a job name the option that it came from."""
    try:
        yield
    except InvalidInput as error:
        field = next((field for field in OPTIONS if error.message.startswith(f"{field} ")), None)
        if field is None:
            raise
        words = error.message.removeprefix(field)
        for name, option in OPTIONS.items():
            words = re.sub(rf"\b{name}\b", option, words) if "_" in name else words
        raise type(error)(OPTIONS[field] + words) from None


def located(fields: dict[str, Any], client: AsyncClient) -> dict[str, Any]:
    """Return the fields with the folder that the job runs in, and with the whole path of a program that has a relative one.

    Only jobs of the server's own user run in a folder of that user: the current one, or with inputs, which lie in `in/` of the
    attempt's folder, none unless --cwd names it.
    """
    exec_, given = fields["exec"], fields.get("cwd")
    is_path = "/" in exec_ and not exec_.startswith("/")
    if client.welcome is None or client.welcome.identity != f"uid:{os.getuid()}":
        if given is not None:
            raise InvalidInput(
                f"--cwd {str(given)!r}: only your own jobs on the server's machine, over its unix socket, run in a folder of "
                "yours; leave it out, and send what the job needs with --file"
            )
        if is_path:
            raise InvalidInput(
                f"{exec_!r} is a path on this machine, and the job may run on another; name a program that the workers allow"
            )
        return fields
    has_inputs = given is None and bool(fields["files"])
    if not exec_ or (has_inputs and not is_path):
        return fields
    folder = _folder(given or Path())
    found = {"exec": _program(folder, exec_)} if is_path else {}
    return {**fields, **found, **({} if has_inputs else {"cwd": str(folder)})}


def _folder(given: Path) -> Path:
    try:
        folder = given.resolve(strict=True)
        os.stat(f"{folder}/.")  # noqa: PTH116 - an error for a file, and for a folder that may not be entered
        str(folder).encode()
    except (OSError, UnicodeEncodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its name is not valid UTF-8"
        where = f"--cwd {str(given)!a}" if given != Path() else "the current folder"
        raise InvalidInput(f"{where} cannot be used: {reason}; name a folder with --cwd") from None
    return folder


def _program(folder: Path, exec_: str) -> str:
    path = folder / exec_
    if not path.is_file():
        raise InvalidInput(f"there is no program {exec_!r} in {folder}; name one on PATH, or one that is there")
    if not os.access(path, os.X_OK):
        raise InvalidInput(f"{exec_!r} may not be executed; allow it with: chmod +x {exec_}")
    return os.path.normpath(path)


def job_options(*, retries: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare EXEC, ARGS and the options that describe a job; the command gets them as `fields`."""
    return options(
        argument(
            "exec_", metavar="EXEC", help="Name of a program that the worker allows; - for a handler.", callback=_check_exec
        ),
        argument("args", metavar="[ARGS]...", help="All of it belongs to the job.", nargs=-1),
        option("--subject", metavar="SUBJECT", help="Routing key. Default: job.assign.default."),
        option("--job-id", metavar="ID", help="Your own id: asking again with it gives the same job. Default: a new one."),
        several(
            "--file",
            "files",
            metavar="PATH|ID:NAME",
            help="Input file, or a file of a cache (see tasuki cache), found by the job as in/NAME. Several times. {i} and "
            "{line} are replaced.",
        ),
        option(
            "--cwd",
            metavar="FOLDER",
            type=PATH,
            help="Where the program runs: a folder of this machine, for your own jobs on it. Default: the current folder; with "
            "--file, and elsewhere, a folder of its own.",
        ),
        several("--env", metavar="NAME=VALUE", help="For the job; the exec must allow the name. Several times."),
        option("--payload-file", metavar="FILE", help="Standard input of the job, or a handler's payload; - for stdin."),
        duration("--timeout", type=Duration(0, TIMEOUT_MAX_S, above=True), help="Time limit of one attempt."),
        number(
            "--retries",
            metavar="N",
            type=click.IntRange(0, BUDGET_MAX),
            default=retries,
            help="How often a failure is tried again.",
        ),
        number("--priority", metavar="0-9", type=click.IntRange(0, 9), default=5, help="Higher first."),
        option("--not-before", metavar="TIME", help="Do not start before: +90s, +1h30m, 2026-01-31T06:00, or a Unix time."),
        option("--not-after", metavar="TIME", help="Do not start after: a job that still waits then is SKIPPED."),
        option("--permanent-exit", metavar="CODES", help="Exit codes not worth a retry, as in 3,4. Default: the exec's own."),
        option("--retry-exit", metavar="CODES", help="The only exit codes worth a retry. Default: the exec's own."),
        option("--route-key", metavar="KEY", default="", help="Key of a sticky route. Default: the subject."),
        gather("fields", job_fields),
    )


def parse_env(pairs: Sequence[str]) -> dict[str, str]:
    """Return the variables of a sequence of NAME=VALUE."""
    found = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise InvalidInput(f"--env {name[:40]!r} has no '='; write --env NAME=VALUE")
        found[name] = value
    return found


def parse_time(option: str, text: str | None) -> float | None:
    """Return the Unix time of `+1h` (from now), a Unix time, or 2026-01-31T06:00 (local, unless it names its zone)."""
    if text is None:
        return None
    try:
        if text.startswith("+"):
            return time.time() + parse_duration(text[1:])
        return float(text) if _NUMBER.fullmatch(text) else datetime.fromisoformat(text).timestamp()
    except (ValueError, ConfigError):
        raise InvalidInput(f"{option} {text[:40]!r} is not a time; write +90s, +1h, 2026-01-31T06:00, or a Unix time") from None


def parse_codes(option: str, text: str | None) -> tuple[int, ...]:
    """Return the exit codes of a text like 3,4."""
    try:
        return tuple(dict.fromkeys(int(code) for code in text.split(","))) if text is not None else ()
    except ValueError:
        raise InvalidInput(f"{option} {(text or '')[:40]!r}: write exit codes with commas between, as in 3,4") from None


def read_payload(path: str) -> bytes:
    """Return the whole file, or stdin for `-`. The payload is sent inside the job, so it has the limit of a job's body."""
    try:
        if path == STDIN:
            return _limited(sys.stdin.buffer, "on stdin")
        with Path(path).open("rb") as file:
            return _limited(file, repr(path))
    except OSError as error:
        raise InvalidInput(f"the payload file {path!r} cannot be read: {error.strerror or error}") from None


def _limited(source: BinaryIO, where: str) -> bytes:
    data = source.read(BODY_INLINE_MAX_BYTES + 1)
    if len(data) > BODY_INLINE_MAX_BYTES:
        raise TooLarge(
            f"the payload {where} has more than {BODY_INLINE_MAX_BYTES} bytes; give larger input with --file, "
            "which the job finds as in/NAME"
        )
    return data


def piped_payload(hint: Callable[[str], None]) -> bytes:
    """Return what was piped into the command, if anything was, without waiting for a pipe that somebody only left open.

    Under cron, CI and ssh, stdin is often a pipe that nobody writes to or closes, so after PIPE_S without data it is not waited
    for. There could be a slow writer at its other end, so a hint says that its data is not read.
    """
    if sys.stdin is None:  # closed by the process that started us
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
    except (OSError, ValueError):  # not a stdin that can be read, so there is nothing to pass on
        return b""
    hint("stdin is a pipe with nothing in it yet: the job gets no input (--payload-file - waits for it, < /dev/null is silent)")
    return b""


def check_files(files: Iterable[str]) -> tuple[str, ...]:
    """Return the paths of input files, or raise InvalidInput if one cannot be read.

    A path with {i} or {line} in it is looked at when its element is submitted.
    """
    for file in files:
        if INDEX in file or LINE in file or cached_input(file) is not None:
            continue
        try:
            with Path(file).open("rb"):
                pass
        except OSError as error:
            raise InvalidInput(f"the input file {file!r} cannot be read: {error.strerror or error}") from None
    return tuple(files)


def cached_input(text: str) -> InputFile | None:
    """Return the file of a cache that ID:NAME names, found by the job as in/NAME; None for the path of a file."""
    cache_id, separator, name = text.partition(":")
    if not separator or not name or Path(text).exists():
        return None
    try:
        return InputFile(check_file_name(name), cache=(check_name(cache_id), name))
    except InvalidInput:
        return None


async def uploaded(client: AsyncClient, files: Iterable[str], output: Output, *, inline: bool = True) -> tuple[InputFile, ...]:
    """Upload input files, and show how far that is. With `inline`, small ones travel inside the job."""
    made = []
    for file in files:
        if (cached := cached_input(file)) is not None:
            made.append(cached)
            continue
        name, size_bytes = Path(file).name, Path(file).stat().st_size
        if inline and size_bytes <= BODY_INLINE_MAX_BYTES // 4:
            made.append(InputFile(name, data=Path(file).read_bytes()))
        else:
            ref = await client.put_file(file, output.transfer(f"uploading {name}", size_bytes))
            made.append(InputFile(name, sha256=ref.sha256, size_bytes=ref.size_bytes))
    return tuple(made)


def parse_array(text: str) -> list[int]:
    """Return the indexes of `1-1000`, `0-100:10` or `3,7,9-12`, in order, each once."""
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


class ArrayJob(NamedTuple):
    """One job of an array."""

    number: int
    args: tuple[str, ...]
    files: tuple[str, ...]


def array_elements(indexes: Iterable[int], args: Sequence[str], files: Sequence[str]) -> Iterator[ArrayJob]:
    """Yield the elements with {i} replaced."""
    for index in indexes:
        yield ArrayJob(index, _replaced(args, INDEX, str(index)), _replaced(files, INDEX, str(index)))


def line_elements(lines: Iterable[str], args: Sequence[str], files: Sequence[str]) -> Iterator[ArrayJob]:
    """Yield the elements with {line} replaced, or the line as the last argument. Empty lines make no job."""
    named = any(LINE in text for text in (*args, *files))
    for line_number, raw in enumerate(lines, 1):
        line = raw.rstrip("\r\n")
        if line.strip():
            last = () if named else (line,)
            yield ArrayJob(line_number, (*_replaced(args, LINE, line), *last), _replaced(files, LINE, line))


def _replaced(texts: Sequence[str], word: str, value: str) -> tuple[str, ...]:
    return tuple(text.replace(word, value) for text in texts)


@contextmanager
def open_lines(path: str) -> Iterator[Iterable[str]]:
    """Open a file of lines, or stdin for `-`."""
    if path == STDIN:
        yield sys.stdin
        return
    try:
        file = Path(path).open(encoding="utf-8", errors="surrogateescape")  # noqa: SIM115 - closed below; only its opening may fail so
    except OSError as error:
        raise InvalidInput(f"--each-line {path!r} cannot be read: {error.strerror or error}") from None
    with file:
        yield file
