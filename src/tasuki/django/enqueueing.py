"""Jobs of a project: rows of the caller's own transaction, and the hint to the nodes after its commit.

A job is inserted by the connection of the calling thread, so it is there exactly if the transaction is committed. On PostgreSQL
one NOTIFY for each transaction then wakes the nodes; on SQLite they see by themselves that the file was changed. A hint that is
lost costs a second: nodes also look by themselves.

Subjects of a project's jobs begin with the queue, which is their group: `<queue>.task.<function>`, `<queue>.<command>`.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar

from django.conf import settings
from django.db import connections, transaction
from django.utils import timezone

from tasuki.core.cluster_messages import Hint, split
from tasuki.core.job import TIME_END, IdMaker, JobSpec, body_hash, type_name
from tasuki.core.store_messages import Submission, Submitted
from tasuki.core.subject import matches
from tasuki.django.conf import project_settings
from tasuki.errors import InvalidInput, TasukiError, WrongType
from tasuki.stores.sql.store import SqlStore

T = TypeVar("T")
SUBMITTER = "django"
DEFAULT_QUEUE = "default"
IDS_AT_ONCE = 64
TIME_END_YEAR = 5138
_NOT_THE_PROJECT = ("tasuki.django", "django.", "django_tasks.", "asgiref.")
_QUEUE = re.compile(r"[A-Za-z0-9_-]{1,64}")
# A commit that notifies waits for no disk: it writes nothing.
_NOTIFY = "SELECT set_config('synchronous_commit', 'off', true), pg_notify('tasuki_hint', piece) FROM unnest(%s::text[]) AS piece"


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.stores: dict[str, SqlStore] = {}
        self.new_ids = IdMaker(lambda: time.time_ns() // 1_000_000, os.urandom)


_own = _PerThread()
on_enqueued: ContextVar[Callable[[], object] | None] = ContextVar("on_enqueued", default=None)
"""Called after each enqueue; for tests, which run jobs at once."""


class _Collected:
    """The jobs that the calls of one `enqueue_many` enqueue."""

    def __init__(self) -> None:
        self.jobs: list[tuple[JobSpec, Callable[[], object]]] = []
        """Each job, and what to do when it is stored."""
        self.ids: Iterator[str] = iter(())
        """Ids that were made together: one by one they take three times as long."""

    def new_id(self) -> str:
        if (found := next(self.ids, None)) is None:
            self.ids = iter(_own.new_ids.many(IDS_AT_ONCE))
            found = next(self.ids)
        return found


_together: ContextVar[_Collected | None] = ContextVar("_together", default=None)


def store_of(alias: str) -> SqlStore:
    """Return the store on the calling thread's connection to a database of the project."""
    if alias not in _own.stores:
        _own.stores[alias] = SqlStore.in_django(alias)
    return _own.stores[alias]


def project_store() -> SqlStore:
    """Return the store on the calling thread's connection to the database that `TASUKI` names."""
    return store_of(project_settings().database)


def new_id() -> str:
    """Return the id of a new job: 36 characters, in the order of time."""
    collected = _together.get()
    return _own.new_ids() if collected is None else collected.new_id()


@lru_cache(1024)
def task_subject(queue: str, function: str) -> str:
    """Return the subject of a task."""
    return f"{_checked(queue)}.task.{function}"


@lru_cache(1024)
def command_subject(queue: str, command: str) -> str:
    """Return the subject of a management command."""
    return f"{_checked(queue)}.{command}"


def patterns_of(queue: str) -> tuple[str, str]:
    """Return the patterns of all tasks and of all commands of a queue; `*`: of any."""
    return f"{queue if queue == '*' else _checked(queue)}.task.>", f"{queue}.*"


def is_task(spec: JobSpec) -> bool:
    """Return whether a job is a task."""
    return not spec.exec and matches("*.task.>", spec.subject)


def unix_time(name: str, moment: datetime | None) -> float | None:
    """Return a point in time as the store has it. A naive one is refused, or with USE_TZ off of the current time zone."""
    if moment is None:
        return None
    if not isinstance(moment, datetime):
        raise WrongType(f"{name} must be an aware datetime, got {type_name(moment)}")
    if timezone.is_naive(moment):
        if settings.USE_TZ:
            raise InvalidInput(f"{name} {moment} has no time zone; write timezone.now() + …, or timezone.make_aware(…)")
        moment = timezone.make_aware(moment)
    if not 0 <= (at := moment.timestamp()) < TIME_END:
        raise InvalidInput(f"{name} {moment} must be a time from 1970 to {TIME_END_YEAR}")
    return at


def _checked(queue: str) -> str:
    if _QUEUE.fullmatch(queue) is None:
        raise InvalidInput(f"queue {queue[:80]!r} must be 1 to 64 characters of A-Z a-z 0-9 _ -")
    return queue


def enqueue_job(spec: JobSpec, then: Callable[[], object] = lambda: None) -> None:
    """Insert a checked job in the calling thread's transaction; it starts after its commit. `then` is called when it is stored.

    Raises the store's refusal, Conflict too. Inside of `enqueue_many` it is collected.
    """
    collected = _together.get()
    if collected is None:
        _insert([spec])
        then()
    else:
        collected.jobs.append((spec, then))


def enqueue_many(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Make these calls, and insert what they enqueue in one statement; return what the calls returned.

        enqueue_many(partial(send_invoice.enqueue, order.pk) for order in orders)
        enqueue_many(partial(enqueue_command, "rebuild_index", f"--shop={shop}") for shop in shops)

    All or none: an error of a call, or the refusal of a job, is raised, and no job is inserted.
    """
    collected = _Collected()
    before = _together.set(collected)
    try:
        results = [_called(call, place) for place, call in enumerate(calls)]
    finally:
        _together.reset(before)
    _insert([spec for spec, _ in collected.jobs])
    for _, then in collected.jobs:
        then()
    return results


def _called(call: Callable[[], T], place: int) -> T:
    if not callable(call):
        raise WrongType(f"enqueue_many takes calls, as in partial(send_invoice.enqueue, 1); number {place} is {type_name(call)}")
    return call()


def _insert(specs: Sequence[JobSpec]) -> None:
    submissions = [Submission(spec, SUBMITTER, body_hash(spec)) for spec in specs]
    if not submissions:
        return
    alias = project_settings().database
    if not connections[alias].in_atomic_block:
        _warn_of_another_transaction(alias)
    with transaction.atomic(using=alias) if len(submissions) > 1 else nullcontext():
        for answer in store_of(alias).enqueue(submissions):
            if isinstance(answer, TasukiError):
                raise answer
            assert isinstance(answer, Submitted)  # without input files no blob can be missing
    hint_after_commit(alias, Hint(ready=tuple({spec.subject for spec in specs})))
    if (run := on_enqueued.get()) is not None:
        run()


def _warn_of_another_transaction(alias: str) -> None:
    for other in connections.all(initialized_only=True):
        if other.in_atomic_block:
            warnings.warn(
                f"enqueued inside a transaction on the database {other.alias!r}; jobs are rows of {alias!r}, so this one is "
                f"committed at once, even if that transaction is rolled back",
                RuntimeWarning,
                stacklevel=_callers_level(),
            )


def _callers_level() -> int:
    """Return the `stacklevel`, for the function that asks, of the project's own line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_NOT_THE_PROJECT):
        level, frame = level + 1, frame.f_back
    return level


class _HintNodes:
    """Tells the nodes, after the commit, which subjects have new jobs, and which leases are canceled."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.ready: set[str] = set()
        self.canceled: set[tuple[str, str]] = set()
        self.everything = False

    def add(self, hint: Hint) -> None:
        self.ready.update(hint.ready)
        self.canceled.update(hint.canceled)
        self.everything |= hint.everything

    def __call__(self) -> None:
        hint = Hint(ready=tuple(self.ready), canceled=tuple(self.canceled), everything=self.everything)
        pieces = [piece.decode() for piece in split(hint)]
        with connections[self.alias].cursor() as cursor:
            cursor.execute(_NOTIFY, [pieces])


def hint_after_commit(alias: str, hint: Hint) -> None:
    """Send one hint for all that a transaction on PostgreSQL did. On SQLite nodes look at the file itself."""
    connection: Any = connections[alias]
    if connection.vendor != "postgresql":
        return
    for savepoints, function, *_ in connection.run_on_commit:
        # One that was added inside no other savepoints than those of now is called whenever this change is committed.
        if isinstance(function, _HintNodes) and savepoints <= set(connection.savepoint_ids):
            function.add(hint)
            return
    sender = _HintNodes(alias)
    sender.add(hint)
    connection.on_commit(sender, robust=True)
