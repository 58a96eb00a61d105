"""Runs the statements of `statements/sqlite.sql` on one connection of sqlite3. Touches nothing but that connection.

Lists of any length are one JSON text, for json_each. A batch is one statement with as many rows of parameters, in sizes that
are powers of two (`sql_statements.py`): so a batch of any length is a handful of statements that stay compiled.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from itertools import chain
from typing import Any

import msgspec

from tasuki.errors import Unavailable
from tasuki.stores.sql.database import WALL, Batch, Inserted, Parameters, Queues
from tasuki.stores.sql.statement_files import load, pieces

_encode_json = msgspec.json.Encoder().encode


class SqliteSession:
    """See `sql_database.Session` for what each call promises."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        statements = load("sqlite")
        self.one = statements.one
        self.many = statements.many
        self._execute = connection.execute

    # -- any statement --------------------------------------------------------------------------------------------
    def rows(self, name: str, parameters: Parameters = ()) -> list[Any]:
        return self._execute(self.one[name], parameters).fetchall()

    def change(self, name: str, parameters: Parameters = ()) -> int:
        return self._execute(self.one[name], parameters).rowcount

    def changed(self, name: str, shared: tuple[Any, ...], batch: Batch) -> int:
        statements = self.many[name]
        changed = 0
        for start, size in pieces(len(batch)):
            part = batch if size == len(batch) else batch[start : start + size]
            changed += self._execute(statements[size], (*shared, *chain.from_iterable(part))).rowcount
        return changed

    def returned(self, name: str, shared: tuple[Any, ...], batch: Batch) -> list[Any]:
        statements = self.many[name]
        returned: list[Any] = []
        for start, size in pieces(len(batch)):
            part = batch if size == len(batch) else batch[start : start + size]
            returned += self._execute(statements[size], (*shared, *chain.from_iterable(part))).fetchall()
        return returned

    def walk(self, name: str, conditions: str, values: dict[str, Any]) -> Iterator[Any]:
        return self._execute(self.one[name].replace("{and}", conditions), values)

    # -- lists as parameters --------------------------------------------------------------------------------------
    def ids(self, ids: list[int]) -> str:
        return _encode_json(ids).decode()

    def texts(self, texts: list[str]) -> str:
        return _encode_json(texts).decode()

    def holders(self, pairs: list[tuple[str, str]]) -> tuple[str]:
        return (_encode_json(pairs).decode(),)

    def contains(self, column: str) -> str:
        return f"instr({column}, :text) > 0"

    # -- where vendors differ as a whole --------------------------------------------------------------------------
    def insert(self, name: str, wall: float, batch: Batch) -> Iterator[Inserted]:
        statements = self.many[name]
        for start, size in pieces(len(batch)):
            cursor = self._execute(statements[size], (wall, *chain.from_iterable(batch[start : start + size])))
            created = cursor.rowcount
            newest = cursor.lastrowid or 0
            # One writer: the new rows of one statement have consecutive ids.
            yield Inserted(size, created, range(newest - created + 1, newest + 1) if created else ())

    def claim(self, queues: Queues, terms: tuple[Any, ...]) -> list[Any]:
        wall = terms[WALL]
        if len(queues.members) == 1:
            rows = self.rows("oldest_of_queue", (queues.priority, queues.group, *queues.members[0], queues.limit, wall))
        else:
            members = _encode_json(queues.members).decode()
            rows = self.rows("oldest_of_queues", (queues.priority, queues.group, members, queues.limit, wall))
        if rows:
            changed = self.change("grant", (*terms, self.ids([row[0] for row in rows])))
            if changed != len(rows):
                raise Unavailable(f"{len(rows)} jobs were ready and {changed} could be leased: another writer is at work here")
        return rows

    def finish(self, wall: float, plain: Batch, full: Batch) -> list[tuple[int, str]]:
        ids = self.ids([row[0] for row in chain(plain, full)])
        leased = self.rows("leased_groups", (ids,))
        changed = self.changed("finish_plain", (wall,), plain) + self.changed("finish_full", (wall,), full)
        if changed < len(leased):
            # Leased before and SUCCEEDED now: those are the ones that these statements changed.
            succeeded = {row_id for (row_id,) in self.rows("succeeded_of", (ids,))}
            leased = [(row_id, group) for row_id, group in leased if row_id in succeeded]
        return leased
