"""What the Redis store is asked rather than told, and the blobs and tokens: everything that never changes a job's state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from msgspec.structs import replace

from tasuki.core.job import Job
from tasuki.core.store_messages import (
    AuditRow,
    BlobClaim,
    BlobPlace,
    Condemned,
    CondemnOrder,
    Filter,
    GroupCounts,
    Page,
    TokenRow,
)
from tasuki.errors import InvalidInput
from tasuki.stores.common import storable
from tasuki.stores.memory.records import matches
from tasuki.stores.redis import verbs
from tasuki.stores.redis.codec import outcome_texts
from tasuki.stores.redis.verbs import FilterFields, ScriptCall

T = TypeVar("T")

FIND_SCAN_MAX = 5_000  # jobs that one find looks at; the caller goes on with the cursor
FIND_WINDOW = 500  # jobs that one call looks at


class RedisReader:
    """`RedisStore` adds the verbs that change jobs."""

    @abstractmethod
    def _do(self, call: ScriptCall[T]) -> T:
        """Call it, in the turn that is open if one is."""

    @abstractmethod
    def get(self, job_ids: Sequence[str]) -> list[Job | None]:
        """Jobs by id."""

    # -- jobs -----------------------------------------------------------------------------------------------------
    def epoch(self) -> tuple[int, str]:
        return self._do(verbs.epoch())

    def next_due(self) -> tuple[float | None, float | None]:
        return self._do(verbs.next_due())

    def find(self, filter: Filter, *, limit: int = 50, cursor: str | None = None) -> Page:
        if cursor is not None and not cursor.isdecimal():
            raise InvalidInput(f"cursor {cursor[:40]!r} is not one that find gave")
        jobs: list[Job] = []
        window = limit if filter == Filter() else FIND_WINDOW
        looked_at = 0
        while len(jobs) < limit and looked_at < FIND_SCAN_MAX:
            rows = self._do(verbs.find(cursor, window, with_texts=filter.text is not None))
            wanted = [row for row in rows if _is_wanted(filter, row)][: limit - len(jobs)]
            jobs += [job for job in self.get([row.job_id for row in wanted]) if job is not None]
            looked_at += window
            last = wanted[-1] if len(jobs) >= limit and wanted else rows[-1] if rows else None
            if last is None or (len(rows) < window and last is rows[-1]):
                return Page(jobs, None)
            cursor = str(last.record.seq)
        return Page(jobs, cursor)

    def counts(self) -> dict[str, GroupCounts]:
        return self._do(verbs.counts())

    def ready_ahead(self, job_id: str, *, limit: int = 10_000) -> int | None:
        ahead = self._do(verbs.ready_ahead(job_id))
        return None if ahead is None else min(limit, ahead)

    def top_band(self) -> int | None:
        return self._do(verbs.top_band())

    def ended_among(self, job_ids: Sequence[str]) -> list[str]:
        return self._do(verbs.texts_of("ended_among", list(dict.fromkeys(job_ids)))) if job_ids else []

    # -- blobs ----------------------------------------------------------------------------------------------------
    def blob_places(self, sha256s: Sequence[str]) -> list[BlobPlace | None]:
        return self._do(verbs.blob_places(sha256s)) if sha256s else []

    def blob_owners(self, sha256: str, *, limit: int = 16) -> list[str]:
        return self._do(verbs.blob_owners(sha256, limit))

    def place_blobs(self, claims: Sequence[BlobClaim]) -> list[BlobPlace]:
        return self._do(verbs.place_blobs(claims)) if claims else []

    def blobs_stored(self, places: Sequence[BlobPlace]) -> list[bool]:
        return self._do(verbs.blobs_stored(places)) if places else []

    def condemn_blobs(self, order: CondemnOrder, *, epoch: int) -> Condemned:
        return self._do(verbs.condemn_blobs(order, epoch))

    def forget_blobs(self, places: Sequence[BlobPlace], *, epoch: int) -> int:
        return self._do(verbs.forget_blobs(places, epoch))

    # -- tokens ---------------------------------------------------------------------------------------------------
    def add_token(self, token: TokenRow) -> bool:
        return self._do(verbs.add_token(replace(token, label=storable(token.label))))

    def token(self, sha256: str) -> TokenRow | None:
        return self._do(verbs.token([sha256]))[0]

    def tokens(self) -> list[TokenRow]:
        return self._do(verbs.tokens())

    def revoke_token(self, token_id: str, *, actor: str) -> bool:
        return self._do(verbs.revoke_token(token_id, actor))

    def revoked_among(self, token_ids: Sequence[str]) -> list[str]:
        return self._do(verbs.texts_of("revoked_among", list(dict.fromkeys(token_ids)))) if token_ids else []

    def audit(self, *, limit: int = 100) -> list[AuditRow]:
        return self._do(verbs.audit(limit))


def _is_wanted(filter: Filter, found: FilterFields) -> bool:
    record, facts = found.record, found.facts
    if filter.states and record.state not in filter.states:
        return False
    if filter.subject is not None and not matches(filter.subject, facts.subject):
        return False
    if filter.array_id is not None and facts.array_id != filter.array_id:
        return False
    if filter.worker_id is not None and record.assigned_worker_id != filter.worker_id:
        return False
    if filter.submitter is not None or filter.scope:
        is_own = facts.submitter == filter.submitter
        if not is_own and not any(matches(pattern, facts.subject) for pattern in filter.scope):
            return False
    if filter.text is not None:
        return any(filter.text in place for place in (found.job_id, *outcome_texts(found.outcome)))
    return True
