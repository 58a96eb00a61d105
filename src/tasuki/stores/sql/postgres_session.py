"""Runs the statements of `statements/postgresql.sql` on one connection of psycopg. Touches nothing but that connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from psycopg import RawCursor

from tasuki.stores.sql.database import WALL, Batch, Inserted, Parameters, Queues
from tasuki.stores.sql.postgres_values import Statement, columns, find_statement, register, statements

if TYPE_CHECKING:
    import psycopg

WALK_FIRST = 256  # rows of the first step of a `find`; each further step takes four times as many
LOOK_AGAIN_MAX = 4  # how often a claim looks further when other servers took what it had found; four times as far each time


class PostgresSession:
    """See `sql_database.Session` for what each call promises."""

    def __init__(
        self, connection: psycopg.Connection[Any], *, prepare: bool, before_write: Callable[[], None] | None = None
    ) -> None:
        self.connection = connection
        self._statements = statements()
        self._cursor: RawCursor[Any] = RawCursor(connection)
        register(self._cursor.adapters)
        self._prepare = prepare
        self._before_write = before_write

    # -- any statement --------------------------------------------------------------------------------------------
    def rows(self, name: str, parameters: Parameters = ()) -> list[Any]:
        return self._run(self._statements[name], parameters).fetchall()

    def change(self, name: str, parameters: Parameters = ()) -> int:
        return self._run(self._statements[name], parameters).rowcount

    def changed(self, name: str, shared: tuple[Any, ...], batch: Batch) -> int:
        return self.change(name, (*shared, *columns(batch))) if batch else 0

    def returned(self, name: str, shared: tuple[Any, ...], batch: Batch) -> list[Any]:
        return self.rows(name, (*shared, *columns(_by_row_id(batch)))) if batch else []

    def walk(self, name: str, conditions: str, values: dict[str, Any]) -> Iterator[Any]:
        """In steps, so that a page of fifty does not bring twenty thousand rows over the network."""
        statement = find_statement(name, conditions)
        left, step, high = values["most"], WALK_FIRST, values["high"]
        while left > 0:
            asked = min(left, step)
            found = self._run(statement, {**values, "high": high, "most": asked}).fetchall()
            yield from found
            if len(found) < asked:
                return
            left, step, high = left - asked, step * 4, found[-1][0]

    def _run(self, statement: Statement, parameters: Parameters) -> RawCursor[Any]:
        if statement.writes and self._before_write is not None:
            self._before_write()
        return self._cursor.execute(statement.text, statement.values(parameters), prepare=self._prepare or None, binary=True)

    # -- lists as parameters --------------------------------------------------------------------------------------
    def ids(self, ids: list[int]) -> list[int]:
        return ids

    def texts(self, texts: list[str]) -> list[str]:
        return texts

    def holders(self, pairs: list[tuple[str, str]]) -> tuple[list[str], list[str]]:
        return [worker_id for worker_id, _ in pairs], [incarnation for _, incarnation in pairs]

    def contains(self, column: str) -> str:
        return f"strpos({column}, :text) > 0"

    # -- where vendors differ as a whole --------------------------------------------------------------------------
    def insert(self, name: str, wall: float, batch: Batch) -> Iterator[Inserted]:
        fresh = {row_id for (row_id,) in self.rows(name, (wall, *columns(batch)))}
        yield Inserted(len(batch), len(fresh), fresh)

    def claim(self, queues: Queues, terms: tuple[Any, ...]) -> list[Any]:
        if len(queues.members) == 1:
            place = (queues.priority, queues.group, *queues.members[0])
            rows = self.rows("claim_of_queue", (*terms, *place, queues.limit))
        else:
            rows = self._claim_merged(queues, terms)
        rows.sort(key=itemgetter(0))
        return rows

    def _claim_merged(self, queues: Queues, terms: tuple[Any, ...]) -> list[Any]:
        oldest = self._oldest_of(queues, terms[WALL])
        claimed: list[Any] = []
        for look in range(LOOK_AGAIN_MAX):
            missing = queues.limit - len(claimed)
            # What others are about to lease is skipped, which leaves us short unless there were more to choose from.
            wanted = missing * 4**look
            found = list(islice(oldest, wanted))
            if found:
                claimed += self.rows("claim_of_rows", (*terms, found, missing))
            if len(claimed) == queues.limit or len(found) < wanted:
                break
        return claimed

    def _oldest_of(self, queues: Queues, wall: float) -> Iterator[int]:
        """The ids of what is ready in these queues, oldest first: a merge that reads each queue only as far as it must.

        It reads the next few of every queue that may hold the next oldest, and gives out what is older than the end of all that
        was read. However the jobs are spread, about limit + (number of queues) entries are read for `limit` that are given.
        """
        seen = [0] * len(queues.members)
        is_open = [True] * len(queues.members)
        waiting: list[int] = []
        step = max(1, -(-queues.limit // len(queues.members)), min(queues.limit, 2048 // len(queues.members)))
        while True:
            behind = [place for place, more in enumerate(is_open) if more and (not waiting or seen[place] <= waiting[0])]
            for place, ids in self._next_of(queues, behind, seen, step, wall):
                is_open[place] = len(ids) == step
                waiting += ids
                seen[place] = ids[-1] if ids else seen[place]
            waiting.sort()
            end = min((seen[place] for place, more in enumerate(is_open) if more), default=None)
            given = waiting if end is None else [row_id for row_id in waiting if row_id <= end]
            waiting = waiting[len(given) :]
            yield from given
            if end is None:
                return

    def _next_of(self, queues: Queues, places: list[int], seen: list[int], step: int, wall: float) -> list[tuple[int, list[int]]]:
        subjects = [queues.members[place][0] for place in places]
        kinds = [queues.members[place][1] for place in places]
        found: list[list[int]] = [[] for _ in places]
        parameters = (queues.priority, queues.group, subjects, kinds, [seen[place] for place in places], step, wall)
        for number, row_id in self.rows("next_of_queues", parameters):
            found[number - 1].append(row_id)
        return list(zip(places, found, strict=True))

    def finish(self, wall: float, plain: Batch, full: Batch) -> list[tuple[int, str]]:
        return self.returned("finish_plain", (wall,), plain) + self.returned("finish_full", (wall,), full)


def _by_row_id(batch: Batch) -> list[tuple[Any, ...]]:
    """Rows are locked in the order of their ids by all servers, so that two of them do not wait for each other in a circle."""
    return sorted(batch, key=itemgetter(0))
