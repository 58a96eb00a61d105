"""Check of the keys of a Redis store for what outsiders may have spoilt, for `tasuki doctor`. Reads only.

It finds keys of a wrong type, leases that are in no index (nobody would take them from a lost worker), and jobs that wait in no
queue (nobody would lease them). Servers continue beside it: a job is named only if it looks the same twice. The work is
bounded, of each command and in all, whatever else is in the database.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import redis

from tasuki.core.apps import template_of
from tasuki.core.job import LEASED, TERMINAL, State
from tasuki.stores.redis.codec import SHARED_TYPES, JobRecord, Place, read_record, split, template_value

KEYS_MAX = 200_000
SCANNED_MAX = 2_000_000  # keys of all programs that Redis walks over to find them; some seconds
QUEUE_MAX = 200_000  # entries of an app's list
STEP = 500  # keys in one round trip, more or less
LIST_STEP = 5_000  # entries of a list in one

_TYPES_OF_JOBS = {
    "payload": "string",
    "status": "hash",
    "lease": "hash",
    "retry_count": "string",
    "result": "string",
    "summary": "string",
    "freqs": "string",
    "token": "hash",
}


class KeyProblems(NamedTuple):
    """Sentences, each about one key or job, those about jobs first, and whether all keys were looked at."""

    problems: list[str]
    looked_at: int
    is_complete: bool


def check_keys(client: redis.Redis) -> KeyProblems:
    """Look at the keys of all apps in the database, at most KEYS_MAX."""
    problems: list[str] = []
    looked_at = 0
    scan = _Scan(client)
    epochs = {name.decode(errors="replace") for names in scan.pages("*:epoch") for name in names}
    are_whole = True
    for app in sorted(name.removesuffix(":epoch") for name in epochs):
        checked = _AppKeys(client, app)
        for names in scan.pages(f"{app}:*"):
            if looked_at >= KEYS_MAX:
                are_whole = False
                break
            problems += checked.look_at(names)
            looked_at += len(names)
        problems += checked.misplaced()
        are_whole = are_whole and checked.is_queue_whole
    return KeyProblems(_jobs_first(problems), looked_at, is_complete=are_whole and not scan.is_cut)


def _jobs_first(problems: list[str]) -> list[str]:
    """Put the jobs that nobody continues with before the keys that hurt nobody: a long list is cut off."""
    return sorted(problems, key=lambda problem: not problem.startswith("job "))


class _Scan:
    """Names of keys, a page at a time. `is_cut`: Redis has walked over SCANNED_MAX keys, and there are more."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._left = SCANNED_MAX
        self.is_cut = False

    def pages(self, pattern: str) -> Iterator[list[bytes]]:
        cursor = -1
        while cursor and not self.is_cut:
            cursor, names = self._client.scan(max(cursor, 0), match=pattern, count=STEP)
            self._left -= STEP
            self.is_cut = bool(cursor) and self._left <= 0
            yield names


class _AppKeys:
    """The keys of one app."""

    def __init__(self, client: Any, app: str) -> None:
        self._client = client
        self._app = app
        self._own = template_value(template_of(app), f"app:{app}")[1]
        self._suspects: dict[str, tuple[bytes, str]] = {}
        self.is_queue_whole = True
        self._queued = self._read_queue()

    def _read_queue(self) -> set[str]:
        """Return what is in the app's list, read page by page: to find one job in it would cost the length of the list."""
        queued: set[str] = set()
        for begin in range(0, QUEUE_MAX, LIST_STEP):
            [page] = self._all([("LRANGE", f"{self._app}:queue", begin, begin + LIST_STEP - 1)])
            queued.update(name.decode(errors="replace") for name in page or ())
            if len(page or ()) < LIST_STEP:
                return queued
        self.is_queue_whole = False
        return queued

    def look_at(self, names: Sequence[bytes]) -> Iterator[str]:
        """Yield what is wrong with these keys, and note the jobs of these records that are misplaced."""
        yield from self._wrong_types(names)
        prefix = f"{self._app}:job:".encode()
        self._suspects |= self._misplaced([name[len(prefix) :].decode() for name in names if name.startswith(prefix)])

    def misplaced(self) -> Iterator[str]:
        """Yield the problems of the noted jobs that look the same a second time."""
        if self._suspects:
            self._queued = self._read_queue()
        noted = list(self._suspects)
        for begin in range(0, len(noted), STEP):
            for job_id, found in self._misplaced(noted[begin : begin + STEP]).items():
                if self._suspects[job_id] == found:
                    yield found[1]

    def _wrong_types(self, names: Sequence[bytes]) -> Iterator[str]:
        for name, found in zip(names, self._all(("TYPE", name) for name in names), strict=True):
            shown, kind = name.decode(errors="replace"), found.decode()
            rest = shown.removeprefix(f"{self._app}:")
            wanted = SHARED_TYPES.get(rest) or _TYPES_OF_JOBS.get(rest.partition(":")[0])
            if wanted is not None and kind not in (wanted, "none"):
                yield f"{shown} is a {kind} and must be a {wanted}: DEL it"

    def _misplaced(self, job_ids: Iterable[str]) -> dict[str, tuple[bytes, str]]:
        """Return the jobs that are not where their state says, each with its record and the problem."""
        job_ids = list(job_ids)
        values = self._all(("GET", f"{self._app}:{kind}:{job_id}") for job_id in job_ids for kind in ("job", "spec"))
        found: dict[str, tuple[bytes, str]] = {}
        asked: list[tuple[str, bytes, str, tuple[Any, ...]]] = []
        for job_id, packed, spec in zip(job_ids, values[::2], values[1::2], strict=True):
            try:
                record, place = read_record(packed), _place_of(spec)
            except (msgspec.MsgspecError, TypeError):  # deleted meanwhile, or no record of this version
                continue
            if State(record.state) in TERMINAL:
                continue
            problem, command = self._where(job_id, record, place)
            if command:
                asked.append((job_id, packed, problem, command))
            elif self.is_queue_whole and job_id not in self._queued:
                found[job_id] = (packed, problem)
        for (job_id, packed, problem, _), there in zip(asked, self._all(command for *_, command in asked), strict=True):
            if there is None:
                found[job_id] = (packed, problem)
        return found

    def _where(self, job_id: str, record: JobRecord, place: Place) -> tuple[str, tuple[Any, ...]]:
        """Return the words for a job that is not where it must be, and the command that finds it there; none: in the list."""
        if State(record.state) in LEASED:
            index = f"{self._app}:lease:index"
            return f"job {job_id} is leased and in no index: ZADD {index} 0 {job_id}", ("ZSCORE", index, job_id)
        if isinstance(record.rare, dict) and "delayed" in record.rare:
            delay = f"{self._app}:delay"
            return f"job {job_id} is delayed and not in {delay}: ZADD {delay} 0 {job_id}", ("ZSCORE", delay, job_id)
        if place == self._own:
            queue = f"{self._app}:queue"
            return f"job {job_id} waits and is not in {queue}: LPUSH {queue} {job_id}", ()
        priority, group, kind, subject = place
        number, _, exec_ = kind.partition(":")
        queue = f"{self._app}:queue:{priority}:{group}:{number}:{subject}" + (f"\0{exec_}" if exec_ else "")
        return f"job {job_id} waits and is in no queue: cancel it and retry it", ("ZSCORE", queue, job_id)

    def _all(self, commands: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Return the answers to these commands; None for an error: the key is of another type."""
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        answers = pipeline.execute(raise_on_error=False)
        return [None if isinstance(answer, redis.ResponseError) else answer for answer in answers]


def _place_of(spec: bytes) -> Place:
    facts = split(spec)[0]
    return int(facts.priority), facts.group, facts.kind, facts.subject
