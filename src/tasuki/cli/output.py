"""The output of commands, and their exit codes.

Answers go to stdout; errors, hints and progress go to stderr, progress only on a terminal. A command passes its data and the
lines for a person to an `Output`, which shows one of them: the lines, the data as JSON (`--json`), or only the ids (`--quiet`).

`run` exits with the code of its job. Errors of tasuki itself are 124 and 125 there, as with `timeout` and `env`, so that a
script can tell the two apart.

A program's own output (`run`, `logs`, `result`) is passed on as it is. Everything else is printed through `visible`: it may
quote a job, a peer or a file, and escape sequences could fool the terminal.

Imported for `tasuki --help`, so it imports nothing heavy.
"""

from __future__ import annotations

import enum
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TextIO

from tasuki.core.units import shown_size
from tasuki.errors import (
    CacheConflict,
    ConfigError,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    InvalidInput,
    NotFound,
    TasukiError,
    Unauthorized,
    Unavailable,
)

RED, GREEN, YELLOW, CYAN = 31, 32, 33, 36
COLOURS = {"SUCCEEDED": GREEN, "FAILED": RED, "TIMED_OUT": RED, "CANCELED": YELLOW, "SKIPPED": YELLOW, "RUNNING": CYAN}
_WORDS = re.compile(rf"\b(?:{'|'.join(COLOURS)})\b|^tasuki: [A-Z_]+(?=:)")
BAR_CHARS = 24
CLEAR_LINE = "\r\033[K"
CLEAR_SCREEN = "\033[H\033[2J"


class ExitCode(enum.IntEnum):
    """Exit codes of `tasuki`, with their meanings."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> ExitCode:
        made = int.__new__(cls, code)
        made._value_, made.meaning = code, meaning
        return made

    OK = 0, "done"
    FAILED = 1, "a job did not succeed, or another error"
    USAGE = 2, "wrong options, or input that can never work"
    NOT_FOUND = 3, "no such job or token, or it is not yours"
    FORBIDDEN = 4, "no valid token, or one that may not do this"
    UNAVAILABLE = 5, "no server, too busy, disk full, or out of time: try again"
    CONFLICT = 6, "the job id exists with another body"
    TIME_LIMIT = 124, "run: the job passed its time limit"
    COULD_NOT_RUN = (
        125,
        "run: an error of tasuki's own, instead of 1 and 3 to 6; run, result: outputs were left out; see stderr",
    )
    INTERRUPTED = 130, "Ctrl-C; 128+n: ended by signal n"
    BROKEN_PIPE = 141, "run: the reader of the output has ended; the job is canceled"  # as of a program that SIGPIPE ends


# The first match counts; a subclass stands before its base.
_BY_ERROR: tuple[tuple[type[TasukiError], ExitCode], ...] = (
    (NotFound, ExitCode.NOT_FOUND),
    (Unauthorized, ExitCode.FORBIDDEN),
    (Forbidden, ExitCode.FORBIDDEN),
    (Conflict, ExitCode.CONFLICT),
    (CacheConflict, ExitCode.CONFLICT),
    (Unavailable, ExitCode.UNAVAILABLE),
    (DeadlineExceeded, ExitCode.UNAVAILABLE),
    (InvalidInput, ExitCode.USAGE),
    (ConfigError, ExitCode.USAGE),
)


def exit_code_for(error: TasukiError) -> ExitCode:
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), ExitCode.FAILED)


def exit_code_table() -> str:
    """Return the table of exit codes, as `tasuki --help` shows it."""
    return "\n".join(f"  {code:>3}  {code.meaning}" for code in ExitCode)


class Output:
    """Writes answers, hints, progress and errors in the form that the user chose."""

    def __init__(self, *, json: bool = False, quiet: bool = False) -> None:
        self.json = json
        self.quiet = quiet
        self._progress = False

    def show(self, data: Any, human: Callable[[], Iterable[str]], quiet: Iterable[str] = ()) -> None:
        """Print the command's answer: `data` with --json, the lines of `quiet` with --quiet, else the lines of `human`."""
        self.end_progress()
        if self.json:
            write_line(encode_json(data))
            return
        for line in quiet if self.quiet else human():
            write_line(line, coloured=True)

    def hint(self, text: str) -> None:
        """Print a remark for people to stderr."""
        if not self.json and not self.quiet:
            self.end_progress()
            tell(text)

    @property
    def shows_progress(self) -> bool:
        """True if stderr is a terminal that a person looks at."""
        return not self.json and not self.quiet and sys.stderr.isatty()

    def transfer(self, what: str, size_bytes: int) -> Callable[[int], None]:
        """Return a function that shows how many bytes of a transfer are done, with a bar."""

        def show(done_bytes: int) -> None:
            share = min(1.0, done_bytes / size_bytes) if size_bytes else 1.0
            bar = ("#" * int(BAR_CHARS * share)).ljust(BAR_CHARS, ".")
            self.progress(f"{what}: {shown_size(done_bytes)} of {shown_size(size_bytes)} [{bar}] {share:.0%}")

        return show

    def progress(self, text: str) -> None:
        """Replace the line of progress, if there is somebody to see it."""
        if self.shows_progress:
            self._progress = True
            print(f"{CLEAR_LINE}{visible(text)}", end="", file=sys.stderr, flush=True)

    def end_progress(self) -> None:
        if self._progress:
            self._progress = False
            print(CLEAR_LINE, end="", file=sys.stderr, flush=True)

    def clear_screen(self) -> None:
        """Clear the terminal before the next answer of a command that repeats itself."""
        if not self.json and sys.stdout.isatty():
            print(CLEAR_SCREEN, end="")

    def error(self, error: TasukiError) -> None:
        """Print an error to stderr: a line, or with --json an object with code, message and details."""
        self.end_progress()
        if self.json:
            body = {"error": {"code": error.code, "message": error.message, "details": error.details()}}
            tell(encode_json(body))
        else:
            tell(f"tasuki: {error.code}: {error.message}")


def encode_json(data: Any) -> str:
    """Return the data as one line of JSON; bytes become base64."""
    import msgspec

    return msgspec.json.encode(data).decode()


def tell(text: str) -> None:
    """Print a line to stderr. If that fails, nobody can be told."""
    with suppress(OSError):
        print(_coloured(visible(text), sys.stderr), file=sys.stderr, flush=True)


def write_line(line: str, *, coloured: bool = False) -> None:
    """Print a line and flush it, so that the reader of a pipe gets each line at once."""
    print(_coloured(visible(line), sys.stdout) if coloured else visible(line), flush=True)


def _coloured(line: str, stream: TextIO) -> str:
    """Return the line with states and the names of errors in colours, if the stream is a terminal that has them."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return line
    return _WORDS.sub(lambda found: f"\033[{COLOURS.get(found[0], RED)}m{found[0]}\033[0m", line)


def visible(text: str) -> str:
    """Return the text with control characters as escapes, in the form of JSON, whose strings stay equal by it."""
    if text.isprintable():
        return text
    from tasuki.core.job import CONTROL_CHARACTERS

    return CONTROL_CHARACTERS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table whose columns are as wide as their contents; the last column is not padded."""
    texts = [list(head), *([plain(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts]


def plain(value: object) -> str:
    """Return the text of a cell: `-` for an empty value, control characters as escapes."""
    return "-" if value is None or value == "" else visible(str(value))
