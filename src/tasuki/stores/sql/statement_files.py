"""Loads the named statements of one vendor's .sql file. Touches only that file, once per process.

A statement with `{rows: …}` takes a whole batch. It exists in sizes of 1, 2, 4, … 256 rows, so that a batch of any length
is a handful of statements out of a set small enough to stay compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.resources import files

BATCH_MAX = 256  # rows of one statement; twice as many brought nothing more

_NAME = re.compile(r"^-- (name|part): (\w+)$", re.MULTILINE)
_ROWS = re.compile(r"\{rows: (\(.*?\))\}")


class Statements:
    """The statements of one vendor by name: `one[name]`, or `many[name][size]` for those that take batches."""

    def __init__(self, text: str, fragments: Mapping[str, str]) -> None:
        self.one: dict[str, str] = {}
        self.many: dict[str, dict[int, str]] = {}
        fragments = dict(fragments)
        pieces = _NAME.split(text)[1:]
        for kind, name, block in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
            lines = (line.strip() for line in block.splitlines())
            statement = " ".join(line for line in lines if line and not line.startswith("--"))
            for key, fragment in fragments.items():
                statement = statement.replace(f"{{{key}}}", fragment)
            rows = _ROWS.search(statement)
            if kind == "part":
                fragments[name] = statement
            elif rows is None:
                self.one[name] = statement
            else:
                self.many[name] = {size: _repeated(statement, rows, size) for size in sizes()}


def _repeated(statement: str, rows: re.Match[str], size: int) -> str:
    return statement[: rows.start()] + ", ".join([rows[1]] * size) + statement[rows.end() :]


def sizes() -> list[int]:
    """The batch sizes that statements are kept in."""
    return [1 << exponent for exponent in range(BATCH_MAX.bit_length())]


def pieces(count: int) -> Iterator[tuple[int, int]]:
    """(start, size) of the statements that together take `count` rows: whole BATCH_MAX ones, then the powers of two."""
    start = 0
    while start < count:
        size = min(BATCH_MAX, 1 << ((count - start).bit_length() - 1))
        yield start, size
        start += size


@lru_cache
def load(vendor: str) -> Statements:
    """The statements for `sqlite` or `postgresql`."""
    from tasuki.stores.sql.rows import fragments

    return Statements(files("tasuki.stores.sql").joinpath("statements", f"{vendor}.sql").read_text("utf-8"), fragments(vendor))
