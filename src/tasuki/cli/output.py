"""How a command speaks: to a person, to a program (`--json`), or only the ids (`--quiet`).

Answers go to stdout; errors, hints and progress to stderr, progress only on a terminal. A command hands over its data and
the lines a person reads, and never asks which of them is shown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tasuki.errors import TasukiError

CLEAR_LINE = "\r\033[K"


class Output:
    """Where everything that a command has to say goes."""

    def __init__(self, *, json: bool = False, quiet: bool = False) -> None:
        self.json = json
        self.quiet = quiet
        self._progress = False

    def show(self, data: Any, human: Callable[[], Iterable[str]], quiet: Iterable[str] = ()) -> None:
        """The command's answer: `data` for programs, the lines of `human` for people, those of `quiet` with --quiet."""
        self.end_progress()
        if self.json:
            write_line(encode_json(data))
            return
        for line in quiet if self.quiet else human():
            write_line(line)

    def hint(self, text: str) -> None:
        """A word for people, beside the answer."""
        if not self.json and not self.quiet:
            self.end_progress()
            print(text, file=sys.stderr)

    def progress(self, text: str) -> None:
        """What is going on; each replaces the one before. Nothing unless a person looks at a terminal."""
        if not self.json and not self.quiet and sys.stderr.isatty():
            self._progress = True
            print(f"{CLEAR_LINE}{text}", end="", file=sys.stderr, flush=True)

    def end_progress(self) -> None:
        if self._progress:
            self._progress = False
            print(CLEAR_LINE, end="", file=sys.stderr, flush=True)

    def error(self, error: TasukiError) -> None:
        """One line on stderr; with --json an object with the code, the message and the details."""
        self.end_progress()
        if self.json:
            body = {"error": {"code": error.code, "message": error.message, "details": error.details()}}
            print(encode_json(body), file=sys.stderr)
        else:
            print(f"tasuki: {error.code}: {error.message}", file=sys.stderr)


def encode_json(data: Any) -> str:
    """One line of JSON; bytes become base64."""
    import msgspec

    return msgspec.json.encode(data).decode()


def write_line(line: str) -> None:
    """Out at once: whoever reads a pipe sees a line when it is true, not when a buffer is full."""
    print(line, flush=True)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Columns as wide as their contents; the last one is not padded."""
    texts = [list(head), *([plain(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts]


def plain(value: object) -> str:
    """A cell: `-` for nothing; control characters, which could fool a terminal, are shown as escapes."""
    text = "-" if value is None or value == "" else str(value)
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def when(unix_time: float | None) -> str:
    """Local time, to the second."""
    if unix_time is None:
        return "-"
    from datetime import UTC, datetime

    return datetime.fromtimestamp(unix_time, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
