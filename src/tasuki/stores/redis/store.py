"""The store in Redis: for one server or several over one Redis (or Sentinel), and outsiders that know the keys of their app.

All verbs are Lua (`lua/`) in one script, so that a turn is one call. A verb's method makes its `ScriptCall`: the arguments, whose
order is in the comment above the verb in `lua/`, and the decoder of the answer. Time is Redis TIME. Touches the network.

    store = RedisStore.open("redis://127.0.0.1:6379/0", app="zpe")

An outsider's `SET {app}:payload:{id}` + `LPUSH {app}:queue {id}` is a job, made of the template that the store was opened with.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial, wraps
from itertools import starmap
from typing import Any, Concatenate, NamedTuple, ParamSpec, Self, TypeVar

import msgspec
from msgspec.structs import replace

from tasuki.core.apps import DEFAULT_APP, template_of
from tasuki.core.job import PRIORITY_MAX, Job, JobIncident, JobSpec, Outcome, State, differing_fields
from tasuki.core.lifecycle import REASSIGN_AFTER_S, RETENTION_DAYS
from tasuki.core.pauses import PauseAnswer, PausedPattern, PauseOrder
from tasuki.core.statistics import GroupCounts, Rollup, decode_rollup, encode_rollup
from tasuki.core.store_messages import (
    VERBS,
    Answers,
    Assignment,
    AuditRow,
    BlobClaim,
    BlobPlace,
    CachedFile,
    CacheOrder,
    CacheStored,
    CacheSummary,
    Canceled,
    Condemned,
    CondemnOrder,
    Filter,
    FiredRuns,
    Grant,
    HeldLease,
    JobKind,
    LateJob,
    LeaseHolder,
    LeaseRequest,
    LeaseStatus,
    MissingBlobs,
    Offer,
    Page,
    ReadyPage,
    ReadyQueue,
    Reaped,
    Report,
    ReportAnswer,
    ReportStatus,
    Requeued,
    RequeueOrder,
    StoreVerb,
    Submission,
    Submitted,
    TokenRow,
    Turn,
    TurnNotes,
    recorded_success,
    storable_text,
)
from tasuki.core.subject import group_of
from tasuki.errors import CacheConflict, ConfigError, Conflict, Unavailable
from tasuki.stores import common
from tasuki.stores.redis import codec
from tasuki.stores.redis.codec import Argument, JobRecord, Reply, SpecFacts, flag, optional
from tasuki.stores.redis.connection import TIMEOUT_S, check_settings, connect, name_of
from tasuki.stores.redis.scripts import Clocks, RedisSession, ScriptCall, script
from tasuki.stores.store import QUEUES_OF_SUBJECT_MAX, Answered, Clock, Feature

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")

SCHEMA_VERSION = 3  # of the keys and their values
RESULT_TTL_S = int((RETENTION_DAYS + 1) * 86_400)  # pruning comes first; this is for stores without a leader
FIND_SCAN_MAX = 5_000  # jobs that one find looks at; the caller continues with the cursor
FIND_WINDOW = 500  # jobs that one call looks at
LEASE_PREFIX_BYTES = 12  # one worker's leases of one request share these; a number follows
ASSIGN_LEASE_BYTES = 16


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
        self.lease = self.wall = session.time


def _verb(build: Callable[Concatenate[RedisStore, P], ScriptCall[T]]) -> Callable[Concatenate[RedisStore, P], T]:
    """Return the method that calls what `build` makes."""

    @wraps(build)
    def method(store: RedisStore, /, *arguments: P.args, **named: P.kwargs) -> T:
        return store._do(build(store, *arguments, **named))

    return method


def _batch(
    build: Callable[Concatenate[RedisStore, Sequence[Item], P], ScriptCall[list[T]]],
) -> Callable[Concatenate[RedisStore, Sequence[Item], P], list[T]]:
    """Return such a method for a verb with an answer for each item; without items there is no call."""

    @wraps(build)
    def method(store: RedisStore, items: Sequence[Item], /, *arguments: P.args, **named: P.kwargs) -> list[T]:
        return store._do(build(store, items, *arguments, **named)) if items else []

    return method


class RedisStore:
    """A store in Redis. See `tasuki.stores.store.Store` for what each verb promises."""

    features = frozenset({Feature.FIND_TEXT, Feature.DURABLE, Feature.SHARED})

    def __init__(
        self, session: RedisSession, app: str, own_subject: str, clock: Clock | None, random: Callable[[int], bytes] = os.urandom
    ) -> None:
        self._session = session
        self._app, self._own_subject = app, own_subject
        self._live_workers = codec.LiveWorkers({})
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

        Without a template outsiders' jobs are as those over HTTP. Without `check` settings are not checked: another object of
        this process has done so.
        """
        if not app or not app.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"app {app!r} must be letters, digits, - and _: it is the prefix of its keys in Redis")
        client = connect(url, timeout_s)
        template = template or template_of(app)
        session = RedisSession(client, name_of(url), script(app, template, result_ttl_s), clock)
        try:
            session.time()
            is_durable = not check or check_settings(client, url, strict=strict)
            if check:
                session.check_records(app)
        except BaseException:
            session.close()
            raise
        store = cls(session, app, template.subject, clock)
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
        asked = [(verb, value) for verb in VERBS if (value := getattr(turn, verb.name))]
        built = [(verb.name, self._calls_of(verb, value, turn.epoch)) for verb, value in asked]

        def done(replies: Sequence[Reply]) -> None:
            rest = iter(replies)
            for name, calls in built:
                if isinstance(calls, list):
                    setattr(answers, name, [call.decode(next(rest)) for call in calls])
                else:
                    setattr(answers, name, calls.decode(next(rest)))
            answers.notes = self.notes()

        if built:
            self._session.run([call for _, calls in built for call in (calls if isinstance(calls, list) else [calls])], done)

    def notes(self) -> TurnNotes:
        if self._session.notes is None:
            return TurnNotes(ready=None)
        ready, cut = self._session.notes
        return TurnNotes(tuple(_ready_queue(*name.split(b"\0")) for name in ready), tuple(map(int, cut)))

    def _calls_of(self, verb: StoreVerb, asked: Any, epoch: int) -> ScriptCall[Any] | list[ScriptCall[Any]]:
        """Return the call of one verb of a Turn, or a list if the verb takes one call for each item."""
        if (build := _OF_TURN.get(verb.name)) is not None:
            return build(asked)
        build = partial(getattr(RedisStore, verb.method or verb.name).__wrapped__, self)
        calls: ScriptCall[Any] | list[ScriptCall[Any]] = verb.call(build, asked, epoch, self.clock.wall)
        return calls

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
    @_batch
    def submit(self, submissions: Sequence[Submission], *, on_failed: str = "return") -> ScriptCall[list[Answered]]:
        """Store new jobs. A payload has a key of its own if outsiders may look for it there, or if it is large."""
        common.check_on_failed(on_failed)
        places: dict[codec.Place, int] = {}
        jobs: list[Argument] = []
        for submission in submissions:
            spec, number = submission.spec, 0
            is_inside = spec.subject != self._own_subject and len(spec.payload) <= codec.INSIDE_MAX_BYTES
            value, place = codec.spec_value(spec, submission.submitter, submission.body_hash, with_payload=is_inside)
            if spec.not_before is None and spec.not_after is None and not spec.files:
                number = places.setdefault(place, len(places) + 1)
            jobs += (number, value, b"" if is_inside else spec.payload)
        arguments: list[Argument] = [on_failed, len(places)]
        for place in places:
            arguments += (*place, codec.record_head(place[1], False), codec.record_head(place[1], True))
        arguments += (len(submissions), *(submission.spec.job_id for submission in submissions), *jobs)
        return ScriptCall("submit", arguments, lambda reply: [_submitted(*pair) for pair in zip(submissions, reply, strict=True)])

    @_batch
    def cancel(self, job_ids: Sequence[str], *, actor: str, reason: str = "") -> ScriptCall[list[Canceled]]:
        return _cancel([(job_id, actor, reason) for job_id in job_ids])

    @_batch
    def requeue(
        self, job_ids: Sequence[str], *, actor: str, reason: str = "", generation: int | None = None
    ) -> ScriptCall[list[Requeued]]:
        return _requeue([RequeueOrder(job_id, actor, reason, generation) for job_id in job_ids])

    # -- workers --------------------------------------------------------------------------------------------------
    @_batch
    def lease(self, requests: Sequence[LeaseRequest]) -> ScriptCall[list[list[Grant]]]:
        # Requests of one turn mostly name the same live workers, and idle workers ask for the same: both go once.
        live_of: dict[tuple[int, tuple[str, ...]], int] = {}
        lists: dict[tuple[Argument, ...], int] = {}
        terms: dict[tuple[Argument, ...], int] = {}
        secrets = self._random(LEASE_PREFIX_BYTES * len(requests)).hex("-", LEASE_PREFIX_BYTES).split("-")
        asking: list[Argument] = []
        for request, secret in zip(requests, secrets, strict=True):
            asked = (id(request.live_workers), request.patterns)
            if asked not in live_of:
                if request.live_workers is not self._live_workers.patterns:
                    self._live_workers = codec.LiveWorkers(request.live_workers)
                live_of[asked] = lists.setdefault(self._live_workers.arguments(request.patterns), len(lists) + 1)
            number = terms.setdefault(_terms(request, live_of[asked]), len(terms) + 1)
            asking += (request.worker_id, secret, number, len(request.job_ids), *request.job_ids)
            asking.append(3 * len(request.chosen))
            for one in request.chosen:
                asking += (one.job_id, one.priority, one.group)
        arguments: list[Argument] = [len(lists), *(part for live in lists for part in live)]
        arguments += (len(terms), *(part for shared in terms for part in shared), len(requests), *asking)

        def decode(reply: Reply) -> list[list[Grant]]:
            return [
                [
                    codec.grant((job_id, lease_id, attempt, request.ttl_s, spec, payload))
                    for job_id, lease_id, attempt, spec, payload in zip(*(iter(flat),) * 5, strict=True)
                ]
                for request, flat in zip(requests, reply, strict=True)
            ]

        return ScriptCall("lease", arguments, decode)

    @_batch
    def held(self, holders: Sequence[tuple[str, str, str]]) -> ScriptCall[list[list[Grant]]]:
        def decode(reply: Reply) -> list[list[Grant]]:
            return [[codec.grant(row) for row in rows] for rows in reply]

        return ScriptCall("held", [len(holders), *(part for holder in holders for part in holder)], decode, reads=True)

    @_batch
    def start(self, claims: Sequence[HeldLease]) -> ScriptCall[list[LeaseStatus]]:
        arguments = [len(claims), *(part for claim in claims for part in (*_key_of(claim), claim.ttl_s))]
        return ScriptCall("start", arguments, _statuses)

    @_batch
    def renew(self, claims: Sequence[HeldLease]) -> ScriptCall[list[LeaseStatus]]:
        arguments: list[Argument] = [len(claims)]
        for claim in claims:
            arguments += (*_key_of(claim), claim.ttl_s, "" if claim.progress is None else msgspec.json.encode(claim.progress))
        return ScriptCall("renew", arguments, _statuses)

    @_batch
    def release(self, claims: Sequence[HeldLease], *, reason: str = "") -> ScriptCall[list[bool]]:
        arguments: list[Argument] = [storable_text(reason), len(claims)]
        for claim in claims:
            arguments += (*_key_of(claim), codec.encode(common.outcome_of_unstarted(claim.worker_id)), flag(claim.is_over))
        return ScriptCall("release", arguments, _flags)

    @_batch
    def end_leases(self, holders: Sequence[LeaseHolder]) -> ScriptCall[list[int]]:
        arguments: list[Argument] = [common.LEASES_ENDED_MAX, len(holders)]
        for holder in holders:
            arguments += (holder.owner, holder.worker_id, holder.reason)
        return ScriptCall("end_leases", arguments, lambda reply: [int(count) for count in reply])

    @_batch
    def finish(self, reports: Sequence[Report]) -> ScriptCall[list[ReportAnswer]]:
        return _report("finish", reports)

    @_batch
    def fail(self, reports: Sequence[Report]) -> ScriptCall[list[ReportAnswer]]:
        return _report("fail", reports)

    # -- the leader -----------------------------------------------------------------------------------------------
    @_verb
    def assign(self, assignments: Sequence[Assignment], *, epoch: int) -> ScriptCall[list[Grant | None]]:
        arguments: list[Argument] = [epoch, len(assignments)]
        for item in assignments:
            lease_id = self._random(ASSIGN_LEASE_BYTES).hex()
            arguments += (item.job_id, item.worker_id, item.incarnation, item.owner)
            arguments += (item.ttl_s, item.on_disconnect.value, item.reconnect_grace_s, lease_id)
        return ScriptCall("assign", arguments, lambda reply: [row and codec.grant(row) for row in reply], leads=True)

    @_verb
    def take_over(self, holder: str, epoch: int) -> ScriptCall[bool]:
        return ScriptCall("take_over", [holder, epoch], _is_one)

    @_verb
    def reap(self, *, epoch: int, limit: int = 256) -> ScriptCall[list[Reaped]]:
        def decode(reply: Reply) -> list[Reaped]:
            rows = map(_texts, reply)
            return [Reaped(name, State(state), worker_id, int(attempt), *rest) for name, state, worker_id, attempt, *rest in rows]

        return ScriptCall("reap", [epoch, limit], decode, leads=True)

    @_verb
    def promote(self, *, epoch: int, limit: int = 1024) -> ScriptCall[int]:
        return ScriptCall("promote", [epoch, limit], int, leads=True)

    @_verb
    def skip(self, *, epoch: int, limit: int = 1024) -> ScriptCall[list[LateJob]]:
        return ScriptCall("skip", [epoch, limit], lambda reply: [LateJob(*_texts(row)) for row in reply], leads=True)

    @_verb
    def fire(
        self, *, epoch: int, limit: int = 256, ahead_s: float = 0.0, reassign_after_s: float = REASSIGN_AFTER_S
    ) -> ScriptCall[FiredRuns]:
        raise ConfigError("definitions and events are tables of the SQL store; use PostgreSQL or SQLite for them, not Redis")

    @_verb
    def prune(self, *, before: float, epoch: int, limit: int = 256) -> ScriptCall[int]:
        return ScriptCall("prune", [before, epoch, limit], int, leads=True)

    @_verb
    def condemn_blobs(self, order: CondemnOrder, *, epoch: int) -> ScriptCall[Condemned]:
        def decode(reply: Reply) -> Condemned:
            places = tuple(_place(sha256.decode(), *row) for sha256, *row in reply[1])
            return Condemned(places, None if order.budget_bytes is None else int(reply[0]))

        arguments = [epoch, order.unused_since, optional(order.budget_bytes), order.squeezed_since, order.limit]
        return ScriptCall("condemn_blobs", arguments, decode, leads=True)

    @_verb
    def forget_blobs(self, places: Sequence[BlobPlace], *, epoch: int) -> ScriptCall[int]:
        doomed = dict.fromkeys((place.sha256, place.generation) for place in places)
        return ScriptCall("forget_blobs", [epoch, len(doomed), *(part for place in doomed for part in place)], int, leads=True)

    @_verb
    def epoch(self) -> ScriptCall[tuple[int, str]]:
        return ScriptCall("epoch", [], lambda reply: (int(reply[0]), reply[1].decode()), reads=True)

    @_verb
    def next_due(self) -> ScriptCall[tuple[float | None, float | None]]:
        return ScriptCall("next_due", [], lambda reply: (reply[0] and float(reply[0]), reply[1] and float(reply[1])), reads=True)

    # -- readers --------------------------------------------------------------------------------------------------
    @_batch
    def get(self, job_ids: Sequence[str]) -> ScriptCall[list[Job | None]]:
        return ScriptCall("get", [len(job_ids), *job_ids], lambda reply: [codec.job(row) for row in reply], reads=True)

    def find(self, filter: Filter, *, limit: int = 50, cursor: str | None = None) -> Page:
        if cursor is not None and not cursor.isdecimal():
            raise common.unknown_cursor(cursor)
        jobs: list[Job] = []
        window = limit if filter == Filter() else FIND_WINDOW
        looked_at = 0
        while len(jobs) < limit and looked_at < FIND_SCAN_MAX:
            rows = self._newest(cursor, window, with_texts=filter.text is not None)
            wanted = [row for row in rows if row.passes(filter)][: limit - len(jobs)]
            if wanted:
                jobs += [job for job in self.get([row.job_id for row in wanted]) if job is not None]
            looked_at += window
            last = wanted[-1] if len(jobs) >= limit and wanted else rows[-1] if rows else None
            if last is None or (len(rows) < window and last is rows[-1]):
                return Page(jobs, None)
            cursor = str(last.record.seq)
        return Page(jobs, cursor)

    @_verb
    def _newest(self, below: str | None, count: int, *, with_texts: bool) -> ScriptCall[list[FilterFields]]:
        """Read the newest jobs below a seq, with the fields that a filter looks at."""

        def decode(reply: Reply) -> list[FilterFields]:
            return [
                FilterFields(job_id.decode(), codec.read_record(record), codec.split(spec)[0], outcome)
                for job_id, record, spec, outcome in reply
            ]

        return ScriptCall("find", [optional(below), count, flag(with_texts)], decode, reads=True)

    @_verb
    def incidents(self, job_id: str) -> ScriptCall[list[JobIncident]]:
        return ScriptCall("incidents", [job_id], lambda reply: [codec.incident(row) for row in reply], reads=True)

    @_verb
    def counts(self) -> ScriptCall[dict[str, GroupCounts]]:
        def decode(reply: Reply) -> dict[str, GroupCounts]:
            groups: dict[str, dict[str, int]] = {}
            for field, number in zip(reply[::2], reply[1::2], strict=True):
                counter, _, group = field.decode().partition(":")
                groups.setdefault(group, {})[counter] = int(number)
            return {group: GroupCounts(**counters) for group, counters in groups.items()}

        return ScriptCall("counts", [], decode, reads=True)

    @_verb
    def ready_ahead(self, job_id: str, *, limit: int = 10_000) -> ScriptCall[int | None]:
        return ScriptCall("ready_ahead", [job_id], lambda reply: reply and min(limit, int(reply)), reads=True)

    @_verb
    def top_band(self) -> ScriptCall[int | None]:
        return ScriptCall("top_band", [], lambda reply: reply and int(reply), reads=True)

    @_verb
    def ready_queues(self, place: Any = None, *, limit: int = 256) -> ScriptCall[ReadyPage]:
        def decode(reply: Reply) -> ReadyPage:
            rows, own = reply
            queues = [_ready_queue(subject, kind) for _, _, subject, kind in rows if subject]
            queues += [_ready_queue(*own)] if own else []
            return ReadyPage(queues, (int(rows[-1][0]), rows[-1][1]) if len(rows) == limit else None)

        priority, after = place or (PRIORITY_MAX, "")
        return ScriptCall("ready_queues", [priority, after, limit], decode, reads=True)

    @_verb
    def ready_jobs(self, subject: str, *, limit: int = 256) -> ScriptCall[list[str]]:
        arguments: list[Argument] = [subject, group_of(subject), limit, QUEUES_OF_SUBJECT_MAX]
        return ScriptCall("ready_jobs", arguments, lambda reply: [job_id.decode() for job_id in reply], reads=True)

    @_batch
    def ended_among(self, job_ids: Sequence[str]) -> ScriptCall[list[str]]:
        return _some_of("ended_among", job_ids)

    # -- blobs ----------------------------------------------------------------------------------------------------
    @_batch
    def blob_places(self, sha256s: Sequence[str]) -> ScriptCall[list[BlobPlace | None]]:
        def decode(reply: Reply) -> list[BlobPlace | None]:
            return [row and _place(sha256, *row) for sha256, row in zip(sha256s, reply, strict=True)]

        return ScriptCall("blob_places", [len(sha256s), *sha256s], decode, reads=True)

    @_verb
    def blob_owners(self, sha256: str, *, limit: int = 16) -> ScriptCall[list[str]]:
        return ScriptCall("blob_owners", [sha256, limit], _texts, reads=True)

    @_batch
    def place_blobs(self, claims: Sequence[BlobClaim]) -> ScriptCall[list[BlobPlace]]:
        def decode(reply: Reply) -> list[BlobPlace]:
            return [_place(claim.sha256, *row) for claim, row in zip(claims, reply, strict=True)]

        arguments = [len(claims), *(part for claim in claims for part in (claim.sha256, claim.size_bytes))]
        return ScriptCall("place_blobs", arguments, decode)

    @_batch
    def blobs_stored(self, places: Sequence[BlobPlace]) -> ScriptCall[list[bool]]:
        arguments = [len(places), *(part for place in places for part in (place.sha256, place.generation, place.size_bytes))]
        return ScriptCall("blobs_stored", arguments, _flags)

    # -- caches ---------------------------------------------------------------------------------------------------
    @_batch
    def put_cache(self, orders: Sequence[CacheOrder]) -> ScriptCall[list[CacheStored | CacheConflict | MissingBlobs]]:
        def decode(reply: Reply) -> list[CacheStored | CacheConflict | MissingBlobs]:
            return [_cache_put(order, *_texts(row)) for order, row in zip(orders, reply, strict=True)]

        arguments: list[Argument] = [len(orders)]
        for order in orders:
            arguments += (order.cache_id, order.target, order.owner, len(order.entries))
            arguments += (part for one in order.entries for part in (one.name, one.sha256, one.size_bytes, one.name.casefold()))
        return ScriptCall("put_cache", arguments, decode)

    @_batch
    def remove_cache(self, caches: Sequence[tuple[str, str]]) -> ScriptCall[list[int]]:
        arguments: list[Argument] = [len(caches), *(part for cache in caches for part in cache)]
        return ScriptCall("remove_cache", arguments, lambda reply: [int(count) for count in reply])

    @_batch
    def cached_files(self, names: Sequence[tuple[str, str]]) -> ScriptCall[list[CachedFile | None]]:
        def decode(reply: Reply) -> list[CachedFile | None]:
            return [row and codec.cached_file(name, row) for (_, name), row in zip(names, reply, strict=True)]

        return ScriptCall("cached_files", [len(names), *(part for pair in names for part in pair)], decode, reads=True)

    @_verb
    def cache(self, cache_id: str, *, after: str = "", limit: int = 1000) -> ScriptCall[list[CachedFile]]:
        def decode(reply: Reply) -> list[CachedFile]:
            rows = sorted((name, row) for name, row in zip(reply[::2], reply[1::2], strict=True) if name > after.encode())
            return [codec.cached_file(name.decode(), row) for name, row in rows[:limit]]

        return ScriptCall("cache", [cache_id], decode, reads=True)

    def caches(self, *, after: str = "", limit: int = 100) -> list[CacheSummary]:
        found = self._do(
            ScriptCall("caches", [], lambda reply: dict(zip(_texts(reply[::2]), reply[1::2], strict=True)), reads=True)
        )
        summaries = []
        for cache_id in sorted(one for one in found if one > after)[:limit]:
            sizes = [file.size_bytes for file in self.cache(cache_id, limit=sys.maxsize)]
            summaries.append(codec.cache_summary(cache_id, len(sizes), sum(sizes), found[cache_id]))
        return summaries

    # -- statistics -----------------------------------------------------------------------------------------------
    @_batch
    def add_rollups(self, rollups: Sequence[Rollup]) -> ScriptCall[list[None]]:
        arguments: list[Argument] = [len(rollups)]
        for one in rollups:
            arguments += [one.minute, encode_rollup(one)]
        return ScriptCall("add_rollups", arguments, lambda reply: [None] * len(reply))

    @_verb
    def rollups(self, since: int, until: int) -> ScriptCall[list[Rollup]]:
        return ScriptCall("rollups", [since, until], lambda reply: [decode_rollup(packed) for packed in reply], reads=True)

    # -- pauses ---------------------------------------------------------------------------------------------------
    @_batch
    def pause(self, orders: Sequence[PauseOrder]) -> ScriptCall[list[PauseAnswer]]:
        arguments: list[Argument] = [len(orders)]
        for order in orders:
            arguments += [order.pattern, order.actor, storable_text(order.reason), flag(order.resume)]
        return ScriptCall("pause", arguments, lambda reply: [PauseAnswer(row.decode()) for row in reply])

    @_verb
    def paused(self) -> ScriptCall[list[PausedPattern]]:
        return ScriptCall("paused", [], codec.pauses, reads=True)

    # -- tokens ---------------------------------------------------------------------------------------------------
    @_verb
    def add_token(self, token: TokenRow) -> ScriptCall[bool]:
        token = replace(token, label=storable_text(token.label))

        def decode(reply: Reply) -> bool:
            return reply == [b"added"] or [codec.token(row) for row in reply] == [token]

        fields = codec.token_arguments(token)
        detail = f"{token.kind} {token.label}".rstrip()
        return ScriptCall("add_token", [token.token_id, token.sha256, token.created_by, detail, len(fields), *fields], decode)

    def token(self, sha256: str) -> TokenRow | None:
        if self._open is not None:
            return self._do(_tokens_of([sha256]))[0]
        # Two plain commands at once: doors ask this for every request.
        found = self._session.fields_of(f"{self._app}:token:{sha256}", f"{self._app}:revoked_tokens", sha256)
        return codec.token(*found)

    @_verb
    def tokens(self) -> ScriptCall[list[TokenRow]]:
        return ScriptCall(
            "tokens", [], lambda reply: [row for flat in reply if (row := codec.token(flat)) is not None], reads=True
        )

    @_verb
    def revoke_token(self, token_id: str, *, actor: str) -> ScriptCall[bool]:
        return ScriptCall("revoke_token", [token_id, actor], _is_one)

    @_verb
    def note(self, actor: str, action: str, target: str, detail: str = "") -> ScriptCall[None]:
        return ScriptCall("note", [actor, action, target, detail], lambda reply: None)

    @_batch
    def revoked_among(self, token_ids: Sequence[str]) -> ScriptCall[list[str]]:
        return _some_of("revoked_among", token_ids)

    @_verb
    def audit(self, *, limit: int = 100, before: int | None = None) -> ScriptCall[list[AuditRow]]:
        return ScriptCall("audit", [limit, before or 0], codec.audit_rows, reads=True)


class FilterFields(NamedTuple):
    """Fields of a job that a filter looks at."""

    job_id: str
    record: JobRecord
    facts: SpecFacts
    outcome: bytes | None

    def passes(self, filter: Filter) -> bool:
        record, facts = self.record, self.facts
        texts = (self.job_id, *codec.outcome_texts(self.outcome)) if filter.text is not None else ()
        origin = facts.subject, facts.submitter, record.assigned_worker_id, facts.array_id, float(record.created_at)
        return common.is_wanted(filter, self.job_id, record.state, *origin, texts)


# ---------------------------------------------------------------------------------------------------- calls


def _cancel(orders: Sequence[tuple[str, str, str]]) -> ScriptCall[list[Canceled]]:
    """Cancel jobs; orders are (job_id, actor, reason)."""
    arguments: list[Argument] = [len(orders)]
    for job_id, actor, reason in orders:
        outcome = Outcome(error_code="CANCELED", message=storable_text(reason) or f"canceled by {actor}")
        arguments += (job_id, actor, storable_text(reason), codec.encode(outcome))
    return ScriptCall("cancel", arguments, lambda reply: [_canceled(*row) for row in reply])


def _canceled(state: bytes | None, requested: bytes = b"", *rest: bytes) -> Canceled:
    return Canceled(_state(state), True, *_texts(rest)) if requested else Canceled(_state(state), group="".join(_texts(rest)))


def _requeue(orders: Sequence[RequeueOrder]) -> ScriptCall[list[Requeued]]:
    arguments: list[Argument] = [len(orders)]
    for order in orders:
        arguments += (order.job_id, order.actor, storable_text(order.reason), optional(order.generation))
    return ScriptCall("requeue", arguments, lambda reply: [_requeued(*row) for row in reply])


def _requeued(done: bytes, state: bytes | None, group: bytes = b"") -> Requeued:
    return Requeued(done == b"1", _state(state), group=group.decode())


def _tokens_of(sha256s: Sequence[str]) -> ScriptCall[list[TokenRow | None]]:
    return ScriptCall("token", [len(sha256s), *sha256s], lambda reply: [codec.token(row) for row in reply], reads=True)


_OF_TURN: dict[str, Callable[[Any], ScriptCall[Any]]] = {"cancel": _cancel, "requeue": _requeue, "token": _tokens_of}
"""Verbs of a Turn whose items differ from the arguments of the store's method: one call for all of them."""


def _terms(request: LeaseRequest, live_workers: int) -> tuple[Argument, ...]:
    return (
        request.incarnation,
        request.owner,
        request.ttl_s,
        request.on_disconnect.value,
        request.reconnect_grace_s,
        *_offered(request.offer),
        *_patterns_by_name(request.named_elsewhere),
        request.limit,
        live_workers,
        len(request.patterns),
        *request.patterns,
        len(request.routed),
        *request.routed,
    )


def _patterns_by_name(patterns: Mapping[str, tuple[str, ...]]) -> list[Argument]:
    arguments: list[Argument] = [len(patterns)]
    for name, found in patterns.items():
        arguments += (name, len(found), *found)
    return arguments


@lru_cache(512)
def _offered(offer: Offer) -> tuple[Argument, ...]:
    named, whole = offer.queues()
    return ("".join(map(str, whole)), len(named), *starmap(codec.kind_text, named))


def _key_of(claim: HeldLease) -> tuple[Argument, ...]:
    return claim.job_id, claim.worker_id, claim.incarnation, claim.lease_id, claim.attempt, claim.owner


def _report(verb: str, reports: Sequence[Report]) -> ScriptCall[list[ReportAnswer]]:
    arguments: list[Argument] = [len(reports), *(item.job_id for item in reports)]
    for item in reports:
        outcome, retry_in_s = item.outcome, item.outcome.retry_in_s
        if retry_in_s is not None:
            outcome = replace(outcome, retry_in_s=None)
        if "\0" in outcome.message:
            outcome = replace(outcome, message=storable_text(outcome.message))
        arguments += (
            item.worker_id,
            item.lease_id,
            item.attempt,
            item.owner,
            optional(item.started_at),
            codec.report_key(item, verb),
            *codec.outcome_arguments(outcome),
        )
        if verb == "fail":
            words = outcome.message or outcome.error_code or "failed"
            arguments += (outcome.error_code or "", flag(outcome.permanent), words, optional(retry_in_s))
    return ScriptCall(verb, arguments, _recorded)


def _some_of(verb: str, names: Sequence[str]) -> ScriptCall[list[str]]:
    """Call a verb that returns some of the names."""
    unique = dict.fromkeys(names)
    return ScriptCall(verb, [len(unique), *unique], _texts, reads=True)


# ---------------------------------------------------------------------------------------------------- answers


def _ready_queue(subject: bytes, kind: bytes) -> ReadyQueue:
    number, _, exec_ = kind.decode().partition(":")
    return ReadyQueue(subject.decode(), JobKind(int(number)), exec_)


def _submitted(submission: Submission, row: Reply) -> Answered:
    spec = submission.spec
    if row == b"created":
        return Submitted(spec.job_id, created=True)
    if row[0] == b"missing":
        return MissingBlobs(spec.job_id, tuple(sha256.decode() for sha256 in row[1:]))
    job = codec.job(row[1])
    assert job is not None
    if job.body_hash != submission.body_hash:
        return Conflict(spec.job_id, differing_fields(job.spec, spec), (job.submitter, job.spec.subject))
    return Submitted.before(job)


def _recorded(reply: Reply) -> list[ReportAnswer]:
    return [recorded_success(row.decode()) if isinstance(row, bytes) else _judged(*row) for row in reply]


def _judged(answer: bytes, state: bytes | None, *rest: bytes) -> ReportAnswer:
    return ReportAnswer(ReportStatus(answer.decode()), _state(state), *_texts(rest))


def _statuses(reply: Reply) -> list[LeaseStatus]:
    return [LeaseStatus(row.decode()) for row in reply]


def _place(sha256: str, size_bytes: bytes, generation: bytes, stored: bytes) -> BlobPlace:
    return BlobPlace(sha256, int(size_bytes), int(generation), stored == b"1")


def _cache_put(order: CacheOrder, word: str, *facts: str) -> CacheStored | CacheConflict | MissingBlobs:
    if word == "stored":
        return CacheStored(int(facts[0]))
    if word == "missing":
        return MissingBlobs(order.cache_id, facts)
    if word == "target":
        return common.other_target(order.cache_id, facts[0], order.target)
    return (common.other_file if word == "other" else common.clashing_names)(order.cache_id, facts[0], facts[1])


def _texts(reply: Reply) -> list[str]:
    return [row.decode() for row in reply]


def _flags(reply: Reply) -> list[bool]:
    return [row == b"1" for row in reply]


def _is_one(reply: Reply) -> bool:
    return bool(reply == b"1")


def _state(state: bytes | None) -> State | None:
    return None if state is None else State(state.decode())
