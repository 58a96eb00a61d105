"""The readers of the SQL store, on its own connection or on a second one that cannot write.

`find` walks jobs from the newest on. Where the filter names an array, only failed or only leased states, it walks just
those by their partial index; else it walks by id, a bounded number of rows per call.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tasuki.core.job import LEASED, Incident, Job
from tasuki.core.subject import literal_prefix, matches
from tasuki.core.verbs import Filter, GroupCounts, Page, TokenRow
from tasuki.errors import InvalidInput
from tasuki.stores.sql_rows import FAILED_STATES, FoundRow, JobRow, id_list, job_of, text_list, token_of
from tasuki.stores.sql_sqlite import open_reader, translated
from tasuki.stores.sql_statements import load

FIND_SCAN_MAX = 20_000  # rows that one find looks at, some 20 ms; the caller goes on with the cursor


class SqlReads:
    """The verbs that only read. `_connection` says on what."""

    _one: dict[str, str]
    _connection: Callable[[], sqlite3.Connection]

    def _select(self, name: str, parameters: Sequence[Any] | dict[str, Any] = ()) -> list[Any]:
        with translated():
            return self._connection().execute(self._one[name], parameters).fetchall()

    def get(self, job_ids: Sequence[str]) -> list[Job | None]:
        names = text_list(list(dict.fromkeys(job_ids)))
        jobs = {row[1]: job_of(JobRow._make(row)) for row in self._select("rows_by_key", (names,))}
        return [jobs.get(job_id) for job_id in job_ids]

    def incidents(self, job_id: str) -> list[Incident]:
        return [Incident(*row) for row in self._select("incidents", (job_id,))]

    def counts(self) -> dict[str, GroupCounts]:
        groups: dict[str, dict[str, int]] = {}
        for group, name, n in self._select("counts"):
            groups.setdefault(group, {})[name] = n
        return {group: GroupCounts(**numbers) for group, numbers in groups.items()}

    def ready_ahead(self, job_id: str, *, limit: int = 10_000) -> int | None:
        place = self._select("place", (job_id,))
        if not place:
            return None
        *queue, kind = place[0]
        ((ahead,),) = self._select("ahead", (*queue, limit, kind))
        return int(ahead)

    def blob_owners(self, sha256: str, *, limit: int = 16) -> list[str]:
        return [job_id for (job_id,) in self._select("blob_owners", (sha256, limit))]

    def token(self, sha256: str) -> TokenRow | None:
        rows = self._select("token", (sha256,))
        return token_of(rows[0]) if rows else None

    def tokens(self) -> list[TokenRow]:
        return [token_of(row) for row in self._select("tokens")]

    # -- find -----------------------------------------------------------------------------------------------------
    def find(self, filter: Filter, *, limit: int = 50, cursor: str | None = None) -> Page:
        if cursor is not None and not (cursor.isdecimal() and len(cursor) <= 18):
            raise InvalidInput(f"cursor {cursor[:40]!r} is not one that find gave")
        oldest, newest = self._select("id_range")[0]
        if newest is None:
            return Page([], None)
        high = min(int(cursor), newest + 1) if cursor is not None else newest + 1
        ids: list[int] = []
        looked = 0
        position = high
        with translated():
            low, walk = self._walk(filter, high, oldest)
            for row in islice(walk, FIND_SCAN_MAX):
                looked += 1
                position = row[0]
                if _is_wanted(filter, FoundRow._make(row)):
                    ids.append(position)
                    if len(ids) == limit:
                        break
        if len(ids) < limit and looked < FIND_SCAN_MAX:
            position = low  # the walk came to its end
        rows = sorted(map(JobRow._make, self._select("rows_by_id", (id_list(ids),))), reverse=True)
        return Page([job_of(row) for row in rows], str(position) if position > oldest else None)

    def _walk(self, filter: Filter, high: int, oldest: int) -> tuple[int, Iterator[Any]]:
        """Rows below `high` that may be wanted, the newest first; and the id down to which this walk is complete."""
        states = frozenset(filter.states)
        at = {"high": high, "low": oldest}
        if filter.array_id is not None:
            return oldest, self._rows_of("find_by_array", "", {**at, "array_id": filter.array_id})
        if states and states <= FAILED_STATES:
            return oldest, self._rows_of("find_failed", "", at)
        if states and states <= LEASED:
            return oldest, self._rows_of("find_leased", "", at)
        low = max(oldest, high - FIND_SCAN_MAX)
        conditions, values = _conditions(filter)
        return low, self._rows_of("find_by_id", conditions, {**values, "high": high, "low": low})

    def _rows_of(self, name: str, conditions: str, values: dict[str, Any]) -> Iterator[Any]:
        return self._connection().execute(self._one[name].replace("{and}", conditions), values)


def _conditions(filter: Filter) -> tuple[str, dict[str, Any]]:
    """The part of the filter that the database can judge, so that most rows never reach Python. `_is_wanted` judges all."""
    conditions: list[str] = []
    values: dict[str, Any] = {}
    if filter.states:
        conditions.append("state IN (" + ", ".join(f"'{state.value}'" for state in sorted(set(filter.states))) + ")")
    if filter.worker_id is not None:
        conditions.append("assigned_worker_id = :worker_id")
        values["worker_id"] = filter.worker_id
    if filter.submitter is not None and not filter.scope:
        conditions.append("submitter = :submitter")
        values["submitter"] = filter.submitter
    if filter.subject is not None and (prefix := literal_prefix(filter.subject)):
        conditions.append("subject >= :prefix AND subject < :prefix_end")
        values |= {"prefix": prefix, "prefix_end": prefix + "/"}
    if filter.text is not None:
        conditions.append(
            "(instr(idempotency_key, :text) OR instr(error_summary, :text) OR instr(ifnull(error_code, ''), :text))"
        )
        values["text"] = filter.text
    return "".join(f" AND {condition}" for condition in conditions), values


def _is_wanted(filter: Filter, row: FoundRow) -> bool:
    if filter.states and row.state not in filter.states:
        return False
    if filter.subject is not None and not matches(filter.subject, row.subject):
        return False
    if filter.array_id is not None and row.array_id != filter.array_id:
        return False
    if filter.worker_id is not None and row.assigned_worker_id != filter.worker_id:
        return False
    if filter.submitter is not None or filter.scope:
        is_own = row.submitter == filter.submitter
        if not is_own and not any(matches(pattern, row.subject) for pattern in filter.scope):
            return False
    if filter.text is not None:
        return any(filter.text in place for place in (row.idempotency_key, row.error_code or "", row.error_summary))
    return True


class SqlReader(SqlReads):
    """The read verbs on a connection of their own, for the thread that made it: slow reads leave the writer alone."""

    def __init__(self, path: Path, vendor: str = "sqlite") -> None:
        self._one = load(vendor).one
        self._own = open_reader(path)
        self._connection = lambda: self._own

    def close(self) -> None:
        self._own.close()
