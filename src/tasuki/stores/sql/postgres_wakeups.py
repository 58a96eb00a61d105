"""Hints over LISTEN and NOTIFY of PostgreSQL.

NOTIFY is not part of the store's own transactions: from there on until its end such a commit holds a lock that every other
notifying commit of the database server waits for, fsync included, so the turns of all servers would queue up. Here a notifying
transaction writes nothing, waits for no disk (`synchronous_commit = off`), and carries all waiting hints.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import psycopg

from tasuki.core.address import with_deadlines, without_secrets
from tasuki.stores.sql.postgres import parse_address
from tasuki.stores.wakeups import TIMEOUT_S, Wakeups

CHANNEL = "tasuki_hint"

_LISTEN = f"LISTEN {CHANNEL}".encode()
_NOTIFY_SETTINGS = b"SELECT set_config('synchronous_commit', 'off', false), set_config('statement_timeout', %s, false)"
_NOTIFY = b"SELECT pg_notify(%s, piece) FROM unnest(%s::text[]) AS piece"


HINT_LOOK_S = 5.0  # an end of the wait is seen at once


class _HintConnection(psycopg.AsyncConnection[tuple[Any, ...]]):
    """A connection that waits for hints without waking its process ten times a second, as the driver does for Ctrl-C."""

    async def wait(self, gen: Any, interval: float = HINT_LOOK_S, *limits: Any, **named_limits: Any) -> Any:
        return await super().wait(gen, HINT_LOOK_S, *limits, **named_limits)


class PostgresWakeups(Wakeups["psycopg.AsyncConnection[tuple[Any, ...]]"]):
    """Hints over two connections: one listens, another one notifies when needed, both apart from the store's.

    `server_id` is the sender of the hint that replaces details that could not be sent.
    """

    def __init__(self, url: str, *, server_id: str, jitter: Callable[[], float] = random.random) -> None:
        super().__init__(server_id=server_id, jitter=jitter)
        self._parameters: dict[str, Any] = with_deadlines(parse_address(url), TIMEOUT_S)

    async def _connect(self) -> psycopg.AsyncConnection[tuple[Any, ...]]:
        # No prepared statements: behind a pooler they would break.
        return await _HintConnection.connect(**self._parameters, autocommit=True, prepare_threshold=None)

    async def _disconnect(self, connection: psycopg.AsyncConnection[tuple[Any, ...]]) -> None:
        await connection.close()

    async def _received(self, connection: psycopg.AsyncConnection[tuple[Any, ...]]) -> AsyncGenerator[bytes | None]:
        await connection.execute(_LISTEN)
        yield None
        async with contextlib.aclosing(connection.notifies()) as notifies:
            async for notify in notifies:
                yield notify.payload.encode()

    async def _prepare_sending(self, connection: psycopg.AsyncConnection[tuple[Any, ...]]) -> None:
        await connection.execute(_NOTIFY_SETTINGS, (str(int(TIMEOUT_S * 1000)),))

    async def _send(self, connection: psycopg.AsyncConnection[tuple[Any, ...]], batch: Sequence[bytes]) -> None:
        await connection.execute(_NOTIFY, (CHANNEL, [piece.decode() for piece in batch]))

    def _describe(self, error: Exception) -> str:
        return without_secrets(str(error), self._parameters)


_NOTIFY_AMONG_OTHERS = b"SELECT set_config('synchronous_commit', 'off', true), " + _NOTIFY.removeprefix(b"SELECT ")
LOOK_S = 1.0  # until a connection is noticed that another thread has closed
BUSY_S = 0.002


class SharedWakeups(Wakeups["psycopg.Connection[tuple[Any, ...]]"]):
    """Hints over the connection that `shared` returns, which other threads use for quick statements, and close.

    The reader of the socket takes what has come: a thread that waits for the answer to its statement, or the loop while the
    connection rests.
    """

    def __init__(self, url: str, shared: Callable[[], psycopg.Connection[tuple[Any, ...]]], *, server_id: str) -> None:
        super().__init__(server_id=server_id)
        self._parameters, self._shared = parse_address(url), shared

    async def _connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        return await asyncio.to_thread(self._shared)

    async def _disconnect(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        """Leave it open for the others."""

    async def _received(self, connection: psycopg.Connection[tuple[Any, ...]]) -> AsyncGenerator[bytes | None]:
        loop, came, pieces = asyncio.get_running_loop(), asyncio.Event(), list[bytes]()

        def take(notify: psycopg.Notify) -> None:
            pieces.append(notify.payload.encode())
            loop.call_soon_threadsafe(came.set)

        connection.add_notify_handler(take)
        socket = os.dup(connection.fileno())  # another thread may close it while the loop watches
        try:
            await asyncio.to_thread(connection.execute, _LISTEN)
            yield None
            rests = True
            while True:
                if rests:
                    loop.add_reader(socket, came.set)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_S):
                            await came.wait()
                    loop.remove_reader(socket)  # it would not cease before the answer to a statement is read
                came.clear()
                rests = _read_rested(connection, take)
                if not rests:  # what came together with the answer is taken then: the socket would not tell of it
                    await asyncio.sleep(BUSY_S)
                taken, pieces[:] = pieces[:], []
                for piece in taken:
                    yield piece
        finally:
            loop.remove_reader(socket)
            os.close(socket)
            connection.remove_notify_handler(take)

    async def _prepare_sending(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        """Every statement has its settings."""

    async def _send(self, connection: psycopg.Connection[tuple[Any, ...]], batch: Sequence[bytes]) -> None:
        await asyncio.to_thread(connection.execute, _NOTIFY_AMONG_OTHERS, (CHANNEL, [piece.decode() for piece in batch]))

    def _describe(self, error: Exception) -> str:
        return without_secrets(str(error), self._parameters)


def _read_rested(connection: psycopg.Connection[Any], take: Callable[[psycopg.Notify], None]) -> bool:
    """Take what has come on a connection, without waiting; False: a thread uses it, and will take it."""
    if connection.closed:
        raise psycopg.OperationalError("the shared connection was closed")
    if not connection.lock.acquire(blocking=False):
        return False
    try:
        connection.pgconn.consume_input()
        while found := connection.pgconn.notifies():
            take(psycopg.Notify(found.relname.decode(), found.extra.decode(), found.be_pid))
    finally:
        connection.lock.release()
    return True
