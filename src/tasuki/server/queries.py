"""Reads that may be slow: the queries of peers, limited to the jobs that the caller may see, and the threads that answer them.

Each reader thread has a read-only connection of its own, beside the store's thread. A `PerConnectionQueue` runs the slow work of
each connection (queries, downloads) a few pieces at a time: a peer that asks a lot waits for itself, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Annotated, Any, Generic, Protocol, TypeVar

import msgspec

from tasuki.core.access import Identity
from tasuki.core.broker.events import AskRouted, Query
from tasuki.core.decoding import decodable
from tasuki.core.explain import ExplainContext, explain
from tasuki.core.job import TERMINAL, Job, State, check_name
from tasuki.core.machine import Peer
from tasuki.core.protocol import DeliverMessages, Message
from tasuki.core.statistics import (
    ROLLUP_DAYS,
    ROLLUP_GROUPS_MAX,
    ROLLUP_S,
    Rollup,
    current_minute,
    describe_periods,
    largest_groups,
    periods,
)
from tasuki.core.store_messages import Filter
from tasuki.core.subject import check_job_pattern
from tasuki.errors import InvalidInput, NotFound, TasukiError, TooLarge, Unavailable, unknown_job
from tasuki.stores.store import Reader

PAGE_MAX = 1000
GET_MAX = 1000
GROUPS_SHOWN, GROUPS_MAX = 1_000, 50_000  # of `counts`: without a limit, and as many as fit a frame
PAGE_BYTES = 1024 * 1024  # a page of a list ends at this size as well as at its number of jobs
STATISTICS = "statistics"
STATISTICS_S = 900  # that are looked back, unless a range is given
STEPS_MAX = 1_500  # a day by minutes
WINDOW_S = 6 * 3600  # whose rollups are read at once
GET_MAX_BYTES = 6 * 1024 * 1024  # of all jobs of one answer, which must fit a frame
STEP_ROWS = 32  # jobs that are read at once: with their headers and file names each may have 3 MiB
INCIDENTS_MAX = 1000  # of one answer to `explain`, the latest
GET_RESULTS_MAX = 64  # results are up to 64 KiB each, and a frame is up to 8 MiB
ARGS_SHOWN_MAX = 20
NAME_SHOWN_MAX_CHARS = 64
MESSAGE_SHOWN_MAX_CHARS = 1000  # in lists
QUICK_READS = ("get", "logs")  # by job_id; the others may look at 20,000 rows, and run one at a time for each token
WAITING_MAX = 256  # queued pieces of one connection; past this it is not read from
WAITING_MAX_BYTES = 1024 * 1024  # of memory that they take, about

UNREAD_MAX_BYTES = 32 * 1024 * 1024  # of answers to the peers of one owner
UNREAD_MIN_BYTES = 64 * 1024  # of one connection; less is not counted

T = TypeVar("T")


def answer_query(reader: Reader, query: Query, current: Rollup | None = None) -> Any:
    """Return the body of the Reply. Errors are the caller's mistakes. `current`: what this server has not written yet."""
    if query.verb == STATISTICS:
        return _statistics(reader, query, current)
    return _ANSWERS[query.verb](reader, query)


def _get(reader: Reader, query: Query) -> Any:
    job_ids = query.params.get("job_ids")
    if not isinstance(job_ids, list) or len(job_ids) > GET_MAX or not all(isinstance(job_id, str) for job_id in job_ids):
        raise InvalidInput(f"get needs job_ids, a list of at most {GET_MAX} texts")
    with_result = bool(query.params.get("result"))
    if with_result and len(job_ids) > GET_RESULTS_MAX:
        raise InvalidInput(f"results of at most {GET_RESULTS_MAX} jobs can be asked for at once, not of {len(job_ids)}")
    views: list[dict[str, Any]] = []
    jobs: list[Job] = []
    size = 0
    for start in range(0, len(job_ids), STEP_ROWS):
        some = job_ids[start : start + STEP_ROWS]
        jobs = [_visible(job_id, job, query.identity) for job_id, job in zip(some, reader.get(some), strict=True)]
        views += [describe(job, with_result=with_result, in_list=len(job_ids) > 1) for job in jobs]
        size += _size_of(views[start:])
        if size > GET_MAX_BYTES:
            raise TooLarge(f"these {len(job_ids)} jobs have more than {GET_MAX_BYTES} bytes; ask for fewer at once")
    if len(views) == 1:
        views[0]["cancel_reason"] = _cancel_reason(reader, jobs[0])
    return views


def _cancel_reason(reader: Reader, job: Job) -> str:
    """Return why a leased job was to be canceled. The reason for a waiting one is its outcome's message."""
    if not job.cancel_requested or (job.state in TERMINAL and job.state is not State.CANCELED):
        return ""
    return next((one.reason for one in reversed(reader.incidents(job.job_id)) if one.kind == "cancel_requested"), "")


def _visible(job_id: str, job: Job | None, identity: Identity) -> Job:
    if job is None or not identity.may_see(job.submitter, job.spec.subject):
        raise unknown_job(job_id)
    return job


def _limit_of(query: Query, default: int, most: int = PAGE_MAX) -> int:
    """Return how many items the query asks for."""
    limit = query.params.get("limit", default)
    if not isinstance(limit, int) or not 1 <= limit <= most:
        raise InvalidInput(f"{query.verb}: limit must be 1 to {most}, got {str(limit)[:40]}")
    return limit


def _find(reader: Reader, query: Query) -> Any:
    limit = _limit_of(query, 50)
    params = {name: value for name, value in query.params.items() if name != "limit"}
    cursor = params.pop("cursor", None)
    if cursor is not None and not isinstance(cursor, str):
        raise InvalidInput("cursor must be the text that came with the previous page")
    unknown = params.keys() - set(Filter.__struct_fields__)
    if unknown:  # ignored, it would silently find everything
        raise InvalidInput(f"find has no filter {min(unknown)[:40]!r}; there are {', '.join(Filter.__struct_fields__)}")
    try:
        filter = msgspec.convert(params, Filter)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"find: {error}") from None
    if filter.subject is not None:
        filter = msgspec.structs.replace(filter, subject=check_job_pattern(filter.subject))
    if not query.identity.admin:
        filter = msgspec.structs.replace(filter, submitter=query.identity.name, scope=query.identity.job_scope)
    views: list[dict[str, Any]] = []
    size = 0
    while len(views) < limit and size < PAGE_BYTES:
        step = min(STEP_ROWS, limit - len(views))
        page = reader.find(filter, limit=step, cursor=cursor)
        found = [describe(job, in_list=True) for job in page.jobs]
        size += _size_of(found)
        views += found
        cursor = page.cursor
        if len(found) < step:  # the end, or the store has looked at enough rows for one request
            break
    return {"jobs": views, "cursor": cursor}


def _size_of(views: list[dict[str, Any]]) -> int:
    return len(msgspec.msgpack.encode(views))  # as JSON up to six times as much


def _counts(reader: Reader, query: Query) -> Any:
    query.identity.check_admin("statistics of all groups")
    limit = _limit_of(query, GROUPS_SHOWN, GROUPS_MAX)
    return {group: msgspec.structs.asdict(counts) for group, counts in largest_groups(reader.counts(), limit).items()}


@decodable
class TimeRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of the request `statistics`: Unix times; without a `step_s` the whole range is one step."""

    since: int | None = None
    until: int | None = None
    step_s: int | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=GROUPS_MAX)] = ROLLUP_GROUPS_MAX


def _statistics(reader: Reader, query: Query, current: Rollup | None) -> Any:
    """Return the sums of all servers for each step of a time range, by default of the last quarter of an hour."""
    query.identity.check_admin("statistics of all groups")
    try:
        asked = msgspec.convert(query.params, TimeRange)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"statistics: {error}") from None
    until = int(time.time()) + 1 if asked.until is None else asked.until
    since = current_minute(until - STATISTICS_S if asked.since is None else asked.since)
    step_s = current_minute(max(0, until - since) + ROLLUP_S) if asked.step_s is None else asked.step_s
    if step_s < ROLLUP_S or step_s % ROLLUP_S or not 0 < until - since <= ROLLUP_S * STEPS_MAX * (step_s // ROLLUP_S):
        most = f"there may be {STEPS_MAX} steps, each a multiple of {ROLLUP_S} s"
        raise InvalidInput(f"statistics from {since} to {until} in steps of {step_s} s: {most}")
    oldest = max(since, until - ROLLUP_DAYS * 86_400 - WINDOW_S)
    windows = range(oldest, until, WINDOW_S)
    found = (one for start in windows for one in reader.rollups(start, min(start + WINDOW_S, until)))
    own = [current] if current is not None and since <= current.minute < until else []
    views = describe_periods(periods(chain(found, own), step_s, begin=since), asked.limit)
    if _size_of(views) > GET_MAX_BYTES:
        raise TooLarge(f"these statistics have more than {GET_MAX_BYTES} bytes; ask for fewer groups (limit) or longer steps")
    return {"since": since, "until": until, "step_s": step_s, "periods": views}


def _explain(reader: Reader, query: Query) -> Any:
    job_id = query.params.get("job_id")
    if not isinstance(job_id, str):
        raise InvalidInput("explain needs job_id, a text")
    job = _visible(job_id, reader.get([job_id])[0], query.identity)
    around = ExplainContext(
        workers=query.workers,
        ahead=reader.ready_ahead(job_id),
        top_band=reader.top_band(),
        trouble=query.trouble,
        now_wall=time.time(),
        routes=query.routes,
        route_wait_s=query.route_wait_s,
        route_reason=query.route_reason,
        pauses=reader.paused(),
    )
    return explain(job, reader.incidents(job_id)[-INCIDENTS_MAX:], around)


def _audit(reader: Reader, query: Query) -> Any:
    query.identity.check_admin("the audit of tokens")
    limit = _limit_of(query, 100)
    before = query.params.get("before")
    if before is not None and not (isinstance(before, int) and 0 < before < 2**62):
        raise InvalidInput(f"token.audit: before must be the number of an entry, got {str(before)[:40]}")
    return [msgspec.structs.asdict(row) for row in reader.audit(limit=limit, before=before)]


def _paused(reader: Reader, query: Query) -> Any:
    query.identity.check_admin("the list of pauses")
    return [msgspec.structs.asdict(one) for one in reader.paused()]


def _logs(reader: Reader, query: Query) -> Job:
    """Return the job whose worker is asked for the log: the broker makes the answer."""
    job_id = str(query.params["job_id"])
    return _visible(job_id, reader.get([job_id])[0], query.identity)


def _page_of(query: Query) -> tuple[str, int]:
    after = query.params.get("after", "")
    if not isinstance(after, str):
        raise InvalidInput(f"{query.verb}: after must be a text, got {after!r:.80}")
    return after, _limit_of(query, PAGE_MAX)


def _cache_list(reader: Reader, query: Query) -> Any:
    after, limit = _page_of(query)
    found = reader.caches(after=after, limit=limit)
    views = [msgspec.structs.asdict(one) for one in found if query.identity.may_read_cache(one.owner, one.target)]
    return {"caches": views, "after": found[-1].cache_id if len(found) == limit else None}


def _cache_show(reader: Reader, query: Query) -> Any:
    cache_id = check_name(str(query.params.get("cache_id", "")), "cache_id")
    after, limit = _page_of(query)
    found = reader.cache(cache_id, after=after, limit=limit)
    views = [msgspec.structs.asdict(one) for one in found if query.identity.may_read_cache(one.owner, one.target)]
    if not views and not after:
        raise NotFound(f"there is no cache {cache_id!r}, or it is not for you; see: tasuki cache list")
    return {"cache_id": cache_id, "files": views, "after": found[-1].name if len(found) == limit else None}


def routed_jobs(reader: Reader, command: AskRouted) -> list[Job]:
    """Return the oldest ready jobs of some subjects, for routing."""
    job_ids = [job_id for subject in command.subjects for job_id in reader.ready_jobs(subject, limit=command.limit)]
    return [job for job in reader.get(job_ids) if job is not None]


_ANSWERS = {
    "get": _get,
    "find": _find,
    "counts": _counts,
    "explain": _explain,
    "logs": _logs,
    "token.audit": _audit,
    "paused": _paused,
    "cache.list": _cache_list,
    "cache.show": _cache_show,
}

_PLAIN = (
    "attempt",
    "generation",
    "failures",
    "losses",
    "created_at",
    "assigned_at",
    "started_at",
    "finished_at",
    "assigned_worker_id",
    "cancel_requested",
    "not_before",
    "not_after",
    "priority",
    "submitter",
)


def describe(job: Job, *, with_result: bool = False, in_list: bool = False) -> dict[str, Any]:
    """Return a job for people and programs outside: no payload, no environment values, the result only if asked for.

    In a list, headers are shown by their names, files and environment by their number, and a long message is cut.
    """
    spec, outcome = job.spec, job.outcome
    view: dict[str, Any] = {
        "job_id": job.job_id,
        "state": str(job.state),
        "subject": spec.subject,
        "exec": spec.exec,
        "cwd": spec.cwd,
        "args": [argument[:200] for argument in spec.args[:ARGS_SHOWN_MAX]],
        "args_count": len(spec.args),
        "files_count": len(spec.files),
        "env_count": len(spec.env),
        "header_names": [name[:NAME_SHOWN_MAX_CHARS] for name in sorted(spec.headers)],
        "payload_bytes": len(spec.payload),
        "timeout_s": spec.timeout_s,
        "max_retries": spec.max_retries,
        "max_losses": spec.max_losses,
        "array_id": spec.array_id,
    }
    if not in_list:
        view |= {"files": [file.name for file in spec.files], "env_names": sorted(spec.env), "headers": spec.headers}
        view["file_hashes"] = {file.name: file.sha256 for file in spec.files if file.sha256}
    view.update((name, getattr(job, name)) for name in _PLAIN)
    view["progress"] = job.progress.fraction if job.progress is not None else None
    view["progress_text"] = job.progress.text if job.progress is not None else ""
    view["outcome"] = None
    if outcome is not None:
        size = outcome.result_ref.size_bytes if outcome.result_ref is not None else len(outcome.result or b"")
        view["outcome"] = {
            "exit_code": outcome.exit_code,
            "error_code": outcome.error_code,
            "message": outcome.message[:MESSAGE_SHOWN_MAX_CHARS] if in_list else outcome.message,
            "result_bytes": size,
            "result_sha256": outcome.result_sha256,
            "result_is_blob": outcome.result_ref is not None,
            "meta": outcome.meta,
        }
        if with_result:
            view["outcome"]["result"] = outcome.result
    return view


# ---------------------------------------------------------------------------------------------------- threads


class _ReaderThread:
    def __init__(self, open_reader: Callable[[], Reader]) -> None:
        self._open = open_reader
        self._reader: Reader | None = None
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="tasuki-reader")
        self.asked = 0

    def answer(self, question: Callable[[Reader], T]) -> T:
        if self._reader is None:
            self._reader = self._open()
        return question(self._reader)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


class Readers:
    """Reader threads; `await ask(lambda reader: reader.get(...))` uses the least busy one. Each opens when it is first asked."""

    def __init__(self, open_reader: Callable[[], Reader], threads: int = 1) -> None:
        self._threads = [_ReaderThread(open_reader) for _ in range(threads)]

    async def ask(self, question: Callable[[Reader], T]) -> T:
        thread = min(self._threads, key=lambda one: one.asked)
        thread.asked += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(thread.pool, thread.answer, question)
        finally:
            thread.asked -= 1

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        for thread in self._threads:
            await loop.run_in_executor(thread.pool, thread.close)
            thread.pool.shutdown()


class Connection(Protocol):
    """A door's connection to one peer, which can be made to wait."""

    peer: Peer
    codec: str | None

    @property
    def full(self) -> bool: ...
    @property
    def unread_bytes(self) -> int: ...
    @property
    def undelivered_bytes(self) -> int:
        """Number of bytes that wait for the peer when published messages are to be sent to it."""

    def send(self, message: Message) -> None: ...
    def send_together(self, messages: Iterable[Message]) -> None: ...

    def deliver(self, message: DeliverMessages) -> None:
        """Send a message that other connections get as well."""

    def trust(self, max_bytes: int, owner: str) -> None: ...
    def close(self, error: TasukiError | None = None) -> None: ...
    def abort(self, reason: str) -> None: ...
    def pause_reading(self, why: object = None) -> None: ...
    def resume_reading(self, why: object = None) -> None: ...
    async def drain(self) -> None: ...


def query_bytes(query: Query) -> int:
    """Return about how much memory the parameters of a query take."""
    return sum(
        len(value) * (64 if isinstance(value, list) else 1) for value in query.params.values() if isinstance(value, list | str)
    )


class UnreadAnswers:
    """Answers that peers do not read: those of one owner take UNREAD_MAX_BYTES of memory, over all its connections."""

    def __init__(self) -> None:
        self._links: dict[str, dict[Connection, None]] = {}
        """Connections with large unread answers, by owner, oldest first."""

    def note(self, owner: str, link: Connection) -> None:
        """Note a connection with UNREAD_MIN_BYTES unread or more; abort others of the owner, or this one, if it is too much."""
        links = self._links.setdefault(owner, {})
        links[link] = None
        sizes = {one: size for one in links if (size := one.unread_bytes) >= UNREAD_MIN_BYTES}
        total = sum(sizes.values())
        for oldest, size in list(sizes.items()):
            if total <= UNREAD_MAX_BYTES:
                break
            total -= sizes.pop(oldest)
            oldest.abort(f"{size} bytes wait for this peer to read, and {UNREAD_MAX_BYTES} for all with its token")
        self._links[owner] = dict.fromkeys(sizes)
        if not sizes:
            del self._links[owner]


class PerConnectionQueue(Generic[T]):
    """One kind of work, of which `at_once` pieces run at the same time for one connection that is still open.

    The next piece is begun only when the peer has taken the answers to the ones before.
    """

    def __init__(
        self,
        work: Callable[[Connection, T], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        *,
        at_once: int,
        size_of: Callable[[T], int] = lambda piece: 0,
    ) -> None:
        self._work, self._spawn, self._at_once, self._size_of = work, spawn, at_once, size_of
        self._waiting: dict[int, deque[T]] = {}
        self._bytes: dict[int, int] = {}
        """Size of what waits, by connection."""
        self._running: dict[int, int] = {}

    def add(self, conn: int, link: Connection, piece: T) -> None:
        waiting = self._waiting.setdefault(conn, deque())
        waiting.append(piece)
        self._bytes[conn] = self._bytes.get(conn, 0) + self._size_of(piece)
        running = self._running.get(conn, 0)
        if running < self._at_once:
            self._running[conn] = running + 1
            self._spawn(self._run(conn, link))
        elif len(waiting) > WAITING_MAX or self._bytes[conn] > WAITING_MAX_BYTES:
            link.pause_reading(self)

    def forget(self, conn: int) -> None:
        """Drop the queue of a connection that is gone; pieces that run end by themselves."""
        self._waiting.pop(conn, None)
        self._bytes.pop(conn, None)

    async def _run(self, conn: int, link: Connection) -> None:
        try:
            while waiting := self._waiting.get(conn):
                piece = waiting.popleft()
                self._bytes[conn] -= self._size_of(piece)
                if len(waiting) <= WAITING_MAX // 2 and self._bytes[conn] <= WAITING_MAX_BYTES // 2:
                    link.resume_reading(self)
                await self._work(link, piece)
                await link.drain()
        except Unavailable:
            self.forget(conn)  # the peer left
        finally:
            self._running[conn] -= 1
            if not self._running[conn]:
                del self._running[conn]
                if not self._waiting.get(conn):
                    self.forget(conn)
