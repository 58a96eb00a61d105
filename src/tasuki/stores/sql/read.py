"""The verbs of the SQL store that only read, on its own connection or on a second one that cannot write.

`find` walks jobs from the newest on. If the filter names an array, or only failed or only leased states, it walks just those by
their partial index; else it walks by id, a bounded number of rows per call.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from tasuki.core.job import LEASED, Job, JobIncident
from tasuki.core.store_messages import AuditRow, BlobPlace, Filter, GroupCounts, Page, TokenRow
from tasuki.core.subject import literal_prefix
from tasuki.errors import InterruptCause, InvalidInput, TurnInterrupted
from tasuki.stores.common import is_wanted
from tasuki.stores.sql.database import ABOVE_ALL_PRIORITIES, LEADER_SCOPE, Parameters, ReadOnly, SqlSession
from tasuki.stores.sql.rows import FAILED_STATES, JobRow, job_of, token_of

T = TypeVar("T")

FIND_SCAN_MAX = 20_000  # rows that one find looks at, some 20 ms; the caller goes on with the cursor


class SqlReads:
    """The read verbs, on the connection that a subclass provides."""

    @abstractmethod
    def _read(self, read: Callable[[SqlSession], T]) -> T:
        """Call `read` with the connection's session, with errors of the driver translated."""

    def _select(self, name: str, parameters: Parameters = ()) -> list[Any]:
        return self._read(lambda session: session.rows(name, parameters))

    def _select_by_texts(self, name: str, texts: Sequence[str]) -> list[Any]:
        return self._read(lambda session: session.rows(name, (session.texts(list(dict.fromkeys(texts))),)))

    def get(self, job_ids: Sequence[str]) -> list[Job | None]:
        jobs = {row[1]: job_of(JobRow._make(row)) for row in self._select_by_texts("rows_by_key", job_ids)}
        return [jobs.get(job_id) for job_id in job_ids]

    def ended_among(self, job_ids: Sequence[str]) -> list[str]:
        alive = {job_id for (job_id,) in self._select_by_texts("alive_among", job_ids)}
        return [job_id for job_id in dict.fromkeys(job_ids) if job_id not in alive]

    def incidents(self, job_id: str) -> list[JobIncident]:
        return [JobIncident(*row) for row in self._select("incidents", (job_id,))]

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

    def top_band(self) -> int | None:
        found = self._select("band", (ABOVE_ALL_PRIORITIES,))
        return int(found[0][0]) if found else None

    def blob_owners(self, sha256: str, *, limit: int = 16) -> list[str]:
        return [job_id for (job_id,) in self._select("blob_owners", (sha256, limit))]

    def blob_places(self, sha256s: Sequence[str]) -> list[BlobPlace | None]:
        places = {row[0]: BlobPlace(row[0], row[1], row[2], stored=True) for row in self._select_by_texts("blob_places", sha256s)}
        return [places.get(sha256) for sha256 in sha256s]

    def token(self, sha256: str) -> TokenRow | None:
        rows = self._select("token", (sha256,))
        return token_of(rows[0]) if rows else None

    def tokens(self) -> list[TokenRow]:
        return [token_of(row) for row in self._select("tokens")]

    def revoked_among(self, token_ids: Sequence[str]) -> list[str]:
        valid = {token_id for (token_id,) in self._select_by_texts("unrevoked_among", token_ids)}
        return [token_id for token_id in dict.fromkeys(token_ids) if token_id not in valid]

    def audit(self, *, limit: int = 100) -> list[AuditRow]:
        return [
            AuditRow(at=at, actor=actor, action=action, target=target, detail=detail)
            for at, actor, action, target, detail in self._select("audit", (limit,))
        ]

    def epoch(self) -> tuple[int, str]:
        rows = self._select("epoch_seen", (LEADER_SCOPE,))
        return (rows[0][0], rows[0][1]) if rows else (0, "")

    def next_due(self) -> tuple[float | None, float | None]:
        ((lease_over,),) = self._select("next_lease_over")
        ((delayed,),) = self._select("next_delayed")
        return lease_over, delayed

    # -- find -----------------------------------------------------------------------------------------------------
    def find(self, filter: Filter, *, limit: int = 50, cursor: str | None = None) -> Page:
        if cursor is not None and not (cursor.isdecimal() and len(cursor) <= 18):
            raise InvalidInput(f"cursor {cursor[:40]!r} is not one that find gave")
        return self._read(lambda session: _find(session, filter, limit, cursor))


def _find(session: SqlSession, filter: Filter, limit: int, cursor: str | None) -> Page:
    oldest, newest = session.rows("id_range")[0]
    if newest is None:
        return Page([], None)
    high = min(int(cursor), newest + 1) if cursor is not None else newest + 1
    ids: list[int] = []
    looked = 0
    position = high
    low, walk = _walk(session, filter, high, oldest)
    for row in islice(walk, FIND_SCAN_MAX):
        looked += 1
        position = row[0]
        _, job_id, state, subject, submitter, worker_id, array_id, error_code, error_summary = row
        if is_wanted(filter, state, subject, submitter, worker_id, array_id, (job_id, error_code or "", error_summary)):
            ids.append(position)
            if len(ids) == limit:
                break
    if len(ids) < limit and looked < FIND_SCAN_MAX:
        position = low  # the walk came to its end
    rows = sorted(map(JobRow._make, session.rows("rows_by_id", (session.ids(ids),))), reverse=True, key=lambda row: row.id)
    return Page([job_of(row) for row in rows], str(position) if position > oldest else None)


def _walk(session: SqlSession, filter: Filter, high: int, oldest: int) -> tuple[int, Iterator[Any]]:
    """Return the id down to which the walk is complete, and the rows below `high` that may be wanted, the newest first."""
    states = frozenset(filter.states)
    at = {"high": high, "low": oldest, "most": FIND_SCAN_MAX}
    if filter.array_id is not None:
        return oldest, session.walk("find_by_array", "", {**at, "array_id": filter.array_id})
    if states and states <= FAILED_STATES:
        return oldest, session.walk("find_failed", "", at)
    if states and states <= LEASED:
        return oldest, session.walk("find_leased", "", at)
    low = max(oldest, high - FIND_SCAN_MAX)
    conditions, values = _conditions(filter, session.contains)
    return low, session.walk("find_by_id", conditions, {**at, **values, "low": low})


def _conditions(filter: Filter, contains: Callable[[str], str]) -> tuple[str, dict[str, Any]]:
    """Return the part of the filter that the database can judge, so that few rows reach Python, where `is_wanted` judges all."""
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
        places = ("idempotency_key", "error_summary", "coalesce(error_code, '')")
        conditions.append("(" + " OR ".join(map(contains, places)) + ")")
        values["text"] = filter.text
    return "".join(f" AND {condition}" for condition in conditions), values


class SqlReader(SqlReads):
    """The read verbs on a connection of their own, for the thread that made it: slow reads do not delay the writer."""

    def __init__(self, own: ReadOnly) -> None:
        self._own = own

    def _read(self, read: Callable[[SqlSession], T]) -> T:
        try:
            return self._read_once(read)
        except TurnInterrupted as error:
            if error.why is not InterruptCause.CONNECTION:
                raise
            return self._read_once(read)  # a connection that idled through a restart of the database: on a new one

    def _read_once(self, read: Callable[[SqlSession], T]) -> T:
        with self._own.translated():
            return read(self._own.session)

    def close(self) -> None:
        self._own.close()
