"""The store in Redis: for one server or several over one Redis (or Sentinel), and outsiders that know the keys of their app.

All verbs are Lua (`lua/`) in one script, so that a turn is one call; `verbs.py` makes the calls and reads the answers. Time is
Redis TIME. Touches the network.

    store = RedisStore.open("redis://127.0.0.1:6379/0", app="zpe")

An outsider's `SET {app}:payload:{id}` + `LPUSH {app}:queue {id}` is a job, made of the template that the store was opened with.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from msgspec.structs import replace

from tasuki.core.apps import DEFAULT_APP
from tasuki.core.job import Job, JobIncident, JobSpec
from tasuki.core.lifecycle import RETENTION_DAYS
from tasuki.core.store_messages import (
    Answers,
    Assignment,
    AuditRow,
    BlobClaim,
    BlobPlace,
    Canceled,
    Condemned,
    CondemnOrder,
    Filter,
    Grant,
    GroupCounts,
    HeldLease,
    LeaseRequest,
    LeaseStatus,
    Page,
    Promoted,
    Reaped,
    Report,
    ReportAnswer,
    Requeued,
    RequeueOrder,
    Submission,
    TokenRow,
    Turn,
)
from tasuki.errors import ConfigError, InvalidInput, Unavailable
from tasuki.stores.common import check_on_failed, is_wanted, storable
from tasuki.stores.redis import codec, verbs
from tasuki.stores.redis.codec import Reply
from tasuki.stores.redis.connection import TIMEOUT_S, check_settings, connect, name_of
from tasuki.stores.redis.scripts import Clocks, RedisSession, outsiders_of, script
from tasuki.stores.redis.turn_script import calls_of, fill
from tasuki.stores.redis.verbs import Answered, FilterFields, Random, ScriptCall
from tasuki.stores.store import Clock, Feature

T = TypeVar("T")

SCHEMA_VERSION = 1  # of the keys and their values
RESULT_TTL_S = int((RETENTION_DAYS + 1) * 86_400)  # pruning comes first; this is for stores without a leader
FIND_SCAN_MAX = 5_000  # jobs that one find looks at; the caller goes on with the cursor
FIND_WINDOW = 500  # jobs that one call looks at


class _Open:
    """A turn whose verbs are called one by one."""

    def __init__(self) -> None:
        self.calls: list[ScriptCall[Any]] = []
        self.replies: list[Reply] = []
        self.digest = ""
        self.clocks: Clocks | None = None


class RedisClock:
    """Redis TIME for leases and for people: one clock for all who share the store."""

    def __init__(self, session: RedisSession) -> None:
        self._session = session

    def lease(self) -> float:
        return self._session.time()

    def wall(self) -> float:
        return self._session.time()


class RedisStore:
    """A store in Redis. See `tasuki.stores.store.Store` for what each verb promises."""

    features = frozenset({Feature.FIND_TEXT, Feature.DURABLE, Feature.SHARED})

    def __init__(
        self, session: RedisSession, app: str, own_subject: str, clock: Clock | None = None, random: Random = os.urandom
    ) -> None:
        self._session = session
        self._app, self._own_subject = app, own_subject
        self._random = random
        self._open: _Open | None = None
        self.clock = clock or RedisClock(session)

    @classmethod
    def open(
        cls,
        url: str,
        *,
        app: str = DEFAULT_APP,
        template: JobSpec | None = None,
        result_ttl_s: int = RESULT_TTL_S,
        strict: bool = False,
        check: bool = True,
        clock: Clock | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Self:
        """Connect. `app` is the prefix of all keys, `template` makes outsiders' jobs; `strict` refuses bad settings.

        Without `check` settings are not checked: another object of this process has done so.
        """
        if not app or not app.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"app {app!r} must be letters, digits, - and _: it is the prefix of its keys in Redis")
        client = connect(url, timeout_s)
        outsiders = outsiders_of(app, template)
        session = RedisSession(client, name_of(url), script(app, outsiders, result_ttl_s), clock)
        try:
            session.time()
            is_durable = not check or check_settings(client, name_of(url), strict=strict)
        except BaseException:
            session.close()
            raise
        store = cls(session, app, outsiders.spec.subject, clock)
        if not is_durable:
            store.features = cls.features - {Feature.DURABLE}
        return store

    def close(self) -> None:
        self._session.close()

    # -- turns ----------------------------------------------------------------------------------------------------
    @contextmanager
    def turn(self, *, lasting: bool = True) -> Iterator[None]:
        """Make one transaction of several verbs; see `scripts.py`. Its durability is a setting of Redis, for all turns alike."""
        if self._open is not None:
            yield
            return
        self._open = turn = _Open()
        try:
            yield
        finally:
            self._open = None
        if turn.clocks is not None and not all(call.reads for call in turn.calls):
            self._session.commit(turn.calls, turn.clocks, turn.digest)

    def fill_turn(self, answers: Answers, turn: Turn) -> None:
        """Execute all of a Turn in one call."""
        if self._open is not None and self._open.calls:
            raise Unavailable("a whole turn cannot be done inside another one")
        calls = calls_of(turn, self.clock, self._random, self._own_subject)
        if calls:
            self._session.run([call for _, call in calls], lambda replies: fill(answers, calls, replies))

    def _do(self, call: ScriptCall[T]) -> T:
        turn = self._open
        if turn is not None:
            turn.calls.append(call)
            turn.replies, turn.digest, turn.clocks = self._session.attempt(turn.calls, turn.replies, turn.clocks)
            return call.decode(turn.replies[-1])
        if call.reads:
            return self._session.look(call)
        found: list[Reply] = []
        calls: list[ScriptCall[Any]] = [call]
        self._session.run(calls, found.extend)
        return call.decode(found[0])

    # -- submitters -----------------------------------------------------------------------------------------------
    def submit(self, submissions: Sequence[Submission], *, on_failed: str = "return") -> list[Answered]:
        check_on_failed(on_failed)
        return self._do(verbs.submit(submissions, on_failed, self._own_subject)) if submissions else []

    def cancel(self, job_ids: Sequence[str], *, actor: str, reason: str = "") -> list[Canceled]:
        return self._do(verbs.cancel([(job_id, actor, reason) for job_id in job_ids])) if job_ids else []

    def requeue(self, job_ids: Sequence[str], *, actor: str, reason: str = "", generation: int | None = None) -> list[Requeued]:
        orders = [RequeueOrder(job_id, actor, reason, generation) for job_id in job_ids]
        return self._do(verbs.requeue(orders)) if orders else []

    # -- workers --------------------------------------------------------------------------------------------------
    def lease(self, requests: Sequence[LeaseRequest]) -> list[list[Grant]]:
        return self._do(verbs.lease(requests, self._random)) if requests else []

    def held(self, holders: Sequence[tuple[str, str]]) -> list[list[Grant]]:
        return self._do(verbs.held(holders)) if holders else []

    def start(self, claims: Sequence[HeldLease]) -> list[LeaseStatus]:
        return self._do(verbs.start(claims)) if claims else []

    def renew(self, claims: Sequence[HeldLease]) -> list[LeaseStatus]:
        return self._do(verbs.renew(claims)) if claims else []

    def release(self, claims: Sequence[HeldLease], *, reason: str = "") -> list[bool]:
        return self._do(verbs.release(claims, reason)) if claims else []

    def finish(self, reports: Sequence[Report]) -> list[ReportAnswer]:
        return self._do(verbs.report("finish", reports)) if reports else []

    def fail(self, reports: Sequence[Report]) -> list[ReportAnswer]:
        return self._do(verbs.report("fail", reports)) if reports else []

    # -- the leader -----------------------------------------------------------------------------------------------
    def take_over(self, holder: str, epoch: int) -> bool:
        return self._do(verbs.take_over(holder, epoch))

    def assign(self, assignments: Sequence[Assignment], *, epoch: int) -> list[Grant | None]:
        return self._do(verbs.assign(assignments, epoch, self._random))

    def reap(self, *, epoch: int, limit: int = 256) -> list[Reaped]:
        return self._do(verbs.reap(epoch, limit))

    def skip(self, *, epoch: int, limit: int = 1024) -> list[str]:
        return self._do(verbs.skip(epoch, limit))

    def promote(self, *, epoch: int, limit: int = 1024) -> Promoted:
        return self._do(verbs.promote(epoch, limit))

    def prune(self, *, before: float, epoch: int, limit: int = 256) -> int:
        return self._do(verbs.prune(before, epoch, limit))

    # -- readers ----------------------------------------------------------------------------------------------------
    def get(self, job_ids: Sequence[str]) -> list[Job | None]:
        return self._do(verbs.get(job_ids)) if job_ids else []

    def incidents(self, job_id: str) -> list[JobIncident]:
        return self._do(verbs.incidents(job_id))

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
            wanted = [row for row in rows if _passes(filter, row)][: limit - len(jobs)]
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
        if self._open is not None:
            return self._do(verbs.token([sha256]))[0]
        # One plain command: doors ask this for every request.
        return codec.token(self._session.fields_of(f"{self._app}:token:{sha256}"))

    def tokens(self) -> list[TokenRow]:
        return self._do(verbs.tokens())

    def revoke_token(self, token_id: str, *, actor: str) -> bool:
        return self._do(verbs.revoke_token(token_id, actor))

    def revoked_among(self, token_ids: Sequence[str]) -> list[str]:
        return self._do(verbs.texts_of("revoked_among", list(dict.fromkeys(token_ids)))) if token_ids else []

    def audit(self, *, limit: int = 100) -> list[AuditRow]:
        return self._do(verbs.audit(limit))


def _passes(filter: Filter, found: FilterFields) -> bool:
    record, facts = found.record, found.facts
    texts = (found.job_id, *codec.outcome_texts(found.outcome)) if filter.text is not None else ()
    return is_wanted(filter, record.state, facts.subject, facts.submitter, record.assigned_worker_id, facts.array_id, texts)
