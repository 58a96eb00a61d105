"""Jobs of a project: rows of the caller's own transaction, and the hint to the nodes after its commit.

A job is inserted by the connection of the calling thread, so it is there exactly if the transaction is committed. On PostgreSQL
one NOTIFY for each transaction then wakes the nodes; on SQLite they see by themselves that the file was changed. A hint that is
lost costs a second: nodes also look by themselves.

Subjects of a project's jobs begin with the queue, which is their group: `<queue>.task.<function>`, `<queue>.<command>`.
"""

from __future__ import annotations

import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from django.db import connections, transaction

from tasuki.core.cluster_messages import Hint, split
from tasuki.core.job import IdMaker, JobSpec, body_hash, check_spec
from tasuki.core.store_messages import Submission, Submitted
from tasuki.core.subject import matches
from tasuki.django.conf import project_settings
from tasuki.errors import InvalidInput, TasukiError
from tasuki.stores.sql.store import SqlStore

SUBMITTER = "django"
DEFAULT_QUEUE = "default"
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


def store_of(alias: str) -> SqlStore:
    """Return the store on the calling thread's connection to a database of the project."""
    if alias not in _own.stores:
        _own.stores[alias] = SqlStore.in_django(alias)
    return _own.stores[alias]


def project_store() -> SqlStore:
    """Return the store on the calling thread's connection to the database that `TASUKI` names."""
    return store_of(project_settings().database)


def new_ids(count: int) -> list[str]:
    """Return ids for new jobs: 36 characters, in the order of time."""
    return _own.new_ids.many(count)


def task_subject(queue: str, function: str) -> str:
    """Return the subject of a task."""
    return f"{_checked(queue)}.task.{function}"


def command_subject(queue: str, command: str) -> str:
    """Return the subject of a management command."""
    return f"{_checked(queue)}.{command}"


def patterns_of(queue: str) -> tuple[str, str]:
    """Return the patterns of all tasks and of all commands of a queue; `*`: of any."""
    return f"{queue if queue == '*' else _checked(queue)}.task.>", f"{queue}.*"


def is_task(spec: JobSpec) -> bool:
    """Return whether a job is a task."""
    return not spec.exec and matches("*.task.>", spec.subject)


def _checked(queue: str) -> str:
    if _QUEUE.fullmatch(queue) is None:
        raise InvalidInput(f"queue {queue[:80]!r} must be 1 to 64 characters of A-Z a-z 0-9 _ -")
    return queue


def enqueue_jobs(specs: Sequence[JobSpec]) -> list[Submitted]:
    """Insert jobs in the calling thread's transaction; they start after its commit. Raises the first refusal, Conflict too."""
    submissions = [Submission(check_spec(spec), SUBMITTER, body_hash(spec)) for spec in specs]
    if not submissions:
        return []
    alias = project_settings().database
    _warn_of_another_transaction(alias)
    answers: list[Submitted] = []
    for answer in store_of(alias).enqueue(submissions):
        if isinstance(answer, TasukiError):
            raise answer
        assert isinstance(answer, Submitted)  # without input files no blob can be missing
        answers.append(answer)
    hint_after_commit(alias, Hint(ready=tuple({spec.subject for spec in specs})))
    if (run := on_enqueued.get()) is not None:
        run()
    return answers


def _warn_of_another_transaction(alias: str) -> None:
    if connections[alias].in_atomic_block:
        return
    for other in connections.all(initialized_only=True):
        if other.in_atomic_block:
            warnings.warn(
                f"enqueued inside a transaction on the database {other.alias!r}; jobs are rows of {alias!r}, so this one is "
                f"committed at once, whatever becomes of that transaction",
                RuntimeWarning,
                stacklevel=4,
            )


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
    transaction.on_commit(sender, using=alias, robust=True)
