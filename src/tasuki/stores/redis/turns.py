"""One turn is one call of one script. Touches the network.

Verbs that are called one by one inside `with store.turn():` want their answers before the turn is over. Each time, the script
does the whole turn so far and takes it back again (`try`); at the end it is done for good if the answers are still those that
were given out (`commit`), else the turn is a conflict, to be tried again from the start. Whole turns, which are the rule, are
done at once (`run`).

Every turn has a number, which the script writes down with the answers. If the connection breaks before the answer has come,
`recall` finds out by it whether the turn was done, and if not, makes sure that it never will be: the lost call may still lie in
front of Redis.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis

from tasuki.errors import InterruptCause, StaleEpoch, TasukiError, TurnInterrupted, Unavailable
from tasuki.stores.redis.codec import Argument, Reply
from tasuki.stores.redis.connection import translate
from tasuki.stores.redis.verbs import ScriptCall
from tasuki.stores.store import Clock

T = TypeVar("T")

Clocks = tuple[Argument, Argument]

NO_CLOCKS: Clocks = ("", "")


def _twice(look: Callable[[], T]) -> T:
    try:
        return look()
    except TurnInterrupted as error:
        if error.why is not InterruptCause.CONNECTION or isinstance(error.__cause__, redis.TimeoutError):
            raise
        return look()


class RedisSession:
    """One store's connection and its numbered turns; of one thread at a time."""

    def __init__(self, client: redis.Redis, where: str, script: str, clock: Clock | None) -> None:
        self._client: Any = client  # its execute_command has no types
        self._where = where
        self._script = script
        self._sha = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        self._clock = clock
        self._name = secrets.token_hex(8)
        self._number = 0

    def close(self) -> None:
        self._client.close()

    def time(self) -> float:
        try:
            seconds, microseconds = self._client.time()
        except redis.RedisError as error:
            raise self._error(error) from error
        return int(seconds) + int(microseconds) / 1e6

    # -- turns ----------------------------------------------------------------------------------------------------
    def look(self, call: ScriptCall[T]) -> T:
        """A verb that only reads. Harmless twice: a connection that broke while it idled is made again at once."""
        calls: list[ScriptCall[Any]] = [call]
        [answer] = _twice(lambda: self._send("look", calls, self._clocks())[1])
        return call.decode(answer)

    def fields_of(self, name: str) -> list[bytes]:
        """Field, value, … of a hash; likewise."""
        found: dict[bytes, bytes] = _twice(lambda: self._command("HGETALL", name))
        return [part for pair in found.items() for part in pair]

    def _command(self, *parts: str) -> Any:
        try:
            return self._client.execute_command(*parts)
        except redis.RedisError as error:
            raise self._error(error) from error

    def run(self, calls: Sequence[ScriptCall[Any]], done: Callable[[list[Reply]], None]) -> None:
        """All of them in one transaction. `done` gets the answers, also those that are found only when the turn is recalled."""
        self._number += 1
        clocks = self._clocks()
        mode = "lead" if len(calls) > 1 and any(call.leads for call in calls) else "run"
        done(self._finally(mode, calls, clocks, "", done))

    def attempt(
        self, calls: Sequence[ScriptCall[Any]], before: Sequence[Reply], clocks: Clocks | None
    ) -> tuple[list[Reply], str, Clocks]:
        """What the answers would be, their digest, and the clocks that they were made by. `before` was given out already."""
        _, answers, digest, lease_clock, wall_clock = self._send("try", calls, clocks or self._clocks())
        if answers[:-1] != before:
            raise self._overtaken()
        return answers, digest.decode(), (lease_clock, wall_clock)

    def commit(self, calls: Sequence[ScriptCall[Any]], clocks: Clocks, digest: str) -> None:
        """Do what was tried, or nothing if the answers would be others now."""
        self._number += 1
        self._finally("commit", calls, clocks, digest, lambda _: None)

    def _finally(
        self, mode: str, calls: Sequence[ScriptCall[Any]], clocks: Clocks, digest: str, done: Callable[[list[Reply]], None]
    ) -> list[Reply]:
        number = self._number

        def was_stored() -> bool:
            verdict, *answers = self._send("recall", calls, clocks, number=number)
            if verdict == b"done":
                done(answers[0])
            return bool(verdict == b"done")

        verdict, *answers = self._send(mode, calls, clocks, digest, number=number, was_stored=was_stored)
        if verdict == b"changed":
            raise self._overtaken()
        if verdict == b"void":
            raise Unavailable(f"{self._where}: this turn was given up before; nothing was stored")
        found: list[Reply] = answers[0]
        return found

    def _overtaken(self) -> TurnInterrupted:
        return TurnInterrupted(
            f"{self._where}: another server changed what this turn had seen; nothing was stored", InterruptCause.CONFLICT
        )

    # -- calls ----------------------------------------------------------------------------------------------------
    def _clocks(self) -> Clocks:
        return NO_CLOCKS if self._clock is None else (self._clock.lease(), self._clock.wall())

    def _send(
        self,
        mode: str,
        calls: Sequence[ScriptCall[Any]],
        clocks: Clocks,
        digest: str = "",
        *,
        number: int = 0,
        was_stored: Callable[[], bool] | None = None,
    ) -> list[Reply]:
        arguments: list[Argument] = [mode, self._name, number, *clocks, digest, len(calls)]
        for call in calls:
            arguments += (call.verb, len(call.arguments))
            arguments += call.arguments
        try:
            reply = self._evaluate(arguments)
        except redis.RedisError as error:
            raise self._error(error, was_stored) from error
        if reply[0] == b"stale":
            raise StaleEpoch(f"this epoch does not lead, {int(reply[1])} does ({reply[2].decode() or 'nobody'}); step down")
        return reply

    def _evaluate(self, arguments: Sequence[Argument]) -> list[Reply]:
        try:
            reply: list[Reply] = self._client.execute_command("EVALSHA", self._sha, 0, *arguments)
        except redis.exceptions.NoScriptError:  # a new server, or one that was restarted
            reply = self._client.execute_command("EVAL", self._script, 0, *arguments)
        return reply

    def _error(self, error: redis.RedisError, was_stored: Callable[[], bool] | None = None) -> TasukiError:
        translated = translate(error, self._where, was_stored)
        if isinstance(translated, TurnInterrupted):
            # What it was connected to may be a replica now, or its answer may still come and be taken for the next one.
            self._client.connection_pool.disconnect()
        return translated
