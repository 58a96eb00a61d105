"""The Python functions of a worker, by the subjects they are for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from tasuki.core.subject import SubjectTrie, check_pattern
from tasuki.errors import ConfigError
from tasuki.worker.attempt import HandlerJob


class Handler(msgspec.Struct, frozen=True):
    """A function for a subject. An `async def` runs in the worker's loop, a `def` in a child process."""

    name: str
    function: Callable[[HandlerJob], Any]
    asynchronous: bool
    timeout_s: float | None


class Handlers:
    """Finds the handler of a job. If several patterns match, the one that was added first."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._trie: SubjectTrie[str] = SubjectTrie()

    def __len__(self) -> int:
        return len(self._handlers)

    def add(self, subject: str, function: Callable[[HandlerJob], Any], timeout_s: float | None) -> None:
        check_pattern(subject)
        if subject in self._handlers:
            raise ConfigError(f"there is a handler for {subject!r} already")
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
