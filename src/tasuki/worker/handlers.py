"""Handlers: the Python functions of a worker, by subject. `async def` runs in the event loop, `def` in a child process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from tasuki.core.job import JobSpec, Outcome
from tasuki.core.subject import SubjectTrie, check_pattern
from tasuki.errors import ConfigError
from tasuki.worker.attempt import (
    Attempt,
    HandlerJob,
    StopReason,
    handler_failure,
    handler_outcome,
    stopped_outcome,
    timed_out_outcome,
)


class Handler(msgspec.Struct, frozen=True):
    """A function for a subject. An `async def` runs in the worker's loop, a `def` in a child process."""

    name: str
    function: Callable[[HandlerJob], Any]
    asynchronous: bool
    timeout_s: float | None

    def limit_s(self, spec: JobSpec) -> float | None:
        """Return the job's own time limit, else the handler's."""
        return spec.timeout_s if spec.timeout_s is not None else self.timeout_s

    async def run(self, attempt: Attempt, stopped: Callable[[], StopReason | None]) -> Outcome:
        """Run an `async def` handler in this task. `stopped()` returns the reason if the worker has canceled the task."""
        limit_s = self.limit_s(attempt.spec)
        job = HandlerJob(attempt.spec, attempt.attempt)
        limit = asyncio.timeout(limit_s) if limit_s is not None else None
        try:
            if limit is None:
                return handler_outcome(await self.function(job))
            async with limit:
                return handler_outcome(await self.function(job))
        except asyncio.CancelledError as error:  # by the worker, or by the handler's own use of cancellation
            reason = stopped()
            return stopped_outcome(reason) if reason is not None else handler_failure(error)
        except Exception as error:  # noqa: BLE001 - any exception of a handler is its attempt's outcome
            timed_out = limit is not None and limit.expired()
            return timed_out_outcome(limit_s) if timed_out else handler_failure(error)


class Handlers:
    """The handlers of a worker. If several patterns match a job, the one that was added first counts."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._trie: SubjectTrie[str] = SubjectTrie()

    def __len__(self) -> int:
        return len(self._handlers)

    def add(self, subject: str, function: Callable[[HandlerJob], Any], timeout_s: float | None) -> None:
        check_pattern(subject)
        if subject in self._handlers:
            raise ConfigError(f"subject {subject!r} has a handler already; remove one of the two")
        self._handlers[subject] = Handler(subject, function, inspect.iscoroutinefunction(function), timeout_s)
        self._trie.add(subject, subject)

    def find(self, subject: str) -> Handler | None:
        names = self._trie.match(subject)
        return self._handlers[names[0]] if names else None

    @property
    def patterns(self) -> tuple[str, ...]:
        return tuple(self._handlers)

    @property
    def plain(self) -> dict[str, Callable[[HandlerJob], Any]]:
        """The `def` functions, by name."""
        return {name: handler.function for name, handler in self._handlers.items() if not handler.asynchronous}
