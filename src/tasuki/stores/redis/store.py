"""The store in Redis: for one server or several over one Redis (or Sentinel), and outsiders that know the keys of their app.

All verbs are Lua (`lua/`) in one script, so that a turn is one call; `verbs.py` makes the calls and decodes the answers. Time is
Redis TIME. Touches the network.

    store = RedisStore.open("redis://127.0.0.1:6379/0", app="zpe")

An outsider's `SET {app}:payload:{id}` + `LPUSH {app}:queue {id}` is a job, made of the template that the store was opened with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from tasuki.core.apps import DEFAULT_APP
from tasuki.core.job import Job, JobSpec
from tasuki.core.lifecycle import RETENTION_DAYS
from tasuki.core.store_messages import (
    VERBS,
    Answers,
    Assignment,
    Canceled,
    Filter,
    Grant,
    LeaseRequest,
    Page,
    Requeued,
    RequeueOrder,
    StoreVerb,
    Submission,
    TokenRow,
    Turn,
)
from tasuki.errors import ConfigError, InvalidInput, Unavailable
from tasuki.stores.common import check_on_failed, is_wanted
from tasuki.stores.redis import codec, verbs
from tasuki.stores.redis.codec import Reply
from tasuki.stores.redis.connection import TIMEOUT_S, check_settings, connect, name_of
from tasuki.stores.redis.scripts import Clocks, RedisSession, outsiders_of, script
from tasuki.stores.redis.verbs import Answered, FilterFields, Random, ScriptCall
from tasuki.stores.store import Clock, Feature

P = ParamSpec("P")
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


def _verb(build: Callable[P, ScriptCall[T]]) -> Callable[Concatenate[RedisStore, P], T]:
    """Return the method of a verb whose arguments are all that it needs."""

    @wraps(build)
    def method(store: RedisStore, /, *arguments: P.args, **named: P.kwargs) -> T:
        return store._do(build(*arguments, **named))

    return method


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
        asked = [(verb, value) for verb in VERBS if (value := getattr(turn, verb.name))]
        built = [(verb.name, self._calls_of(verb, value, turn.epoch)) for verb, value in asked]

        def done(replies: Sequence[Reply]) -> None:
            rest = iter(replies)
            for name, calls in built:
                if isinstance(calls, list):
                    setattr(answers, name, [call.decode(next(rest)) for call in calls])
                else:
                    setattr(answers, name, calls.decode(next(rest)))

        if built:
            self._session.run([call for _, calls in built for call in (calls if isinstance(calls, list) else [calls])], done)

    def _calls_of(self, verb: StoreVerb, asked: Any, epoch: int) -> ScriptCall[Any] | list[ScriptCall[Any]]:
        """Return the call of one verb of a Turn, or a list if the verb takes one call for each item."""
        if (build := _SPECIAL.get(verb.name)) is not None:
            return build(self, asked)
        method = getattr(verbs, verb.method or verb.name)
        calls: ScriptCall[Any] | list[ScriptCall[Any]] = verb.call(method, asked, epoch, self.clock.wall)
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

    # -- verbs that need more than their arguments ---------------------------------------------------------------
    def submit(self, submissions: Sequence[Submission], *, on_failed: str = "return") -> list[Answered]:
        check_on_failed(on_failed)
        return self._do(verbs.submit(submissions, on_failed, self._own_subject))

    def cancel(self, job_ids: Sequence[str], *, actor: str, reason: str = "") -> list[Canceled]:
        return self._do(verbs.cancel([(job_id, actor, reason) for job_id in job_ids]))

    def requeue(self, job_ids: Sequence[str], *, actor: str, reason: str = "", generation: int | None = None) -> list[Requeued]:
        return self._do(verbs.requeue([RequeueOrder(job_id, actor, reason, generation) for job_id in job_ids]))

    def lease(self, requests: Sequence[LeaseRequest]) -> list[list[Grant]]:
        return self._do(verbs.lease(requests, self._random)) if requests else []

    def assign(self, assignments: Sequence[Assignment], *, epoch: int) -> list[Grant | None]:
        return self._do(verbs.assign(assignments, epoch, self._random))

    def find(self, filter: Filter, *, limit: int = 50, cursor: str | None = None) -> Page:
        if cursor is not None and not cursor.isdecimal():
            raise InvalidInput(f"cursor {cursor[:40]!r} is not one that find gave")
        jobs: list[Job] = []
        window = limit if filter == Filter() else FIND_WINDOW
        looked_at = 0
        while len(jobs) < limit and looked_at < FIND_SCAN_MAX:
            rows = self._do(verbs.find(cursor, window, with_texts=filter.text is not None))
            wanted = [row for row in rows if _passes(filter, row)][: limit - len(jobs)]
            if wanted:
                jobs += [job for job in self.get([row.job_id for row in wanted]) if job is not None]
            looked_at += window
            last = wanted[-1] if len(jobs) >= limit and wanted else rows[-1] if rows else None
            if last is None or (len(rows) < window and last is rows[-1]):
                return Page(jobs, None)
            cursor = str(last.record.seq)
        return Page(jobs, cursor)

    def ready_ahead(self, job_id: str, *, limit: int = 10_000) -> int | None:
        ahead = self._do(verbs.ready_ahead(job_id))
        return None if ahead is None else min(limit, ahead)

    def token(self, sha256: str) -> TokenRow | None:
        if self._open is not None:
            return self._do(verbs.token([sha256]))[0]
        # One plain command: doors ask this for every request.
        return codec.token(self._session.fields_of(f"{self._app}:token:{sha256}"))

    # -- all others -----------------------------------------------------------------------------------------------
    held = _verb(verbs.held)
    start = _verb(verbs.start)
    renew = _verb(verbs.renew)
    release = _verb(verbs.release)
    finish = _verb(verbs.finish)
    fail = _verb(verbs.fail)
    take_over = _verb(verbs.take_over)
    reap = _verb(verbs.reap)
    skip = _verb(verbs.skip)
    promote = _verb(verbs.promote)
    prune = _verb(verbs.prune)
    condemn_blobs = _verb(verbs.condemn_blobs)
    forget_blobs = _verb(verbs.forget_blobs)
    epoch = _verb(verbs.epoch)
    next_due = _verb(verbs.next_due)
    get = _verb(verbs.get)
    incidents = _verb(verbs.incidents)
    counts = _verb(verbs.counts)
    top_band = _verb(verbs.top_band)
    ended_among = _verb(verbs.ended_among)
    blob_places = _verb(verbs.blob_places)
    blob_owners = _verb(verbs.blob_owners)
    place_blobs = _verb(verbs.place_blobs)
    blobs_stored = _verb(verbs.blobs_stored)
    add_token = _verb(verbs.add_token)
    tokens = _verb(verbs.tokens)
    revoke_token = _verb(verbs.revoke_token)
    revoked_among = _verb(verbs.revoked_among)
    audit = _verb(verbs.audit)


_SPECIAL: dict[str, Callable[[RedisStore, Any], ScriptCall[Any]]] = {
    "cancel": lambda _, orders: verbs.cancel(orders),
    "requeue": lambda _, orders: verbs.requeue(orders),
    "submit": lambda store, submissions: verbs.submit(submissions, "return", store._own_subject),
    "rerun": lambda store, submissions: verbs.submit(submissions, "rerun", store._own_subject),
    "lease": lambda store, requests: verbs.lease(requests, store._random),
    "token": lambda _, sha256s: verbs.token(sha256s),
}
"""Builders of the script call for the verbs of a Turn that differ from the method of the store."""


def _passes(filter: Filter, found: FilterFields) -> bool:
    record, facts = found.record, found.facts
    texts = (found.job_id, *codec.outcome_texts(found.outcome)) if filter.text is not None else ()
    return is_wanted(filter, record.state, facts.subject, facts.submitter, record.assigned_worker_id, facts.array_id, texts)
