"""Hints over PostgreSQL's LISTEN and NOTIFY: one connection listens, another one notifies, both apart from the store's.

Why not NOTIFY in the store's own transactions: from there on until its end such a commit holds a lock that every other
notifying commit of the database server waits for, fsync included: the turns of all servers would queue up. Here a notifying
transaction writes nothing, waits for no disk (`synchronous_commit = off`), and carries all that waits at the moment.

Touches the database and its log, and no table. psycopg is imported when an object is made.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from tasuki.core.conninfo import with_deadlines, without_secrets
from tasuki.errors import ConfigError
from tasuki.stores.reconnecting_wakeups import BATCH_MAX, QUEUE_MAX, TIMEOUT_S, ReconnectingWakeups

if TYPE_CHECKING:
    import psycopg

__all__ = ["BATCH_MAX", "QUEUE_MAX", "PostgresWakeups"]

CHANNEL = "tasuki_hint"

_SESSION = b"SELECT set_config('synchronous_commit', 'off', false), set_config('statement_timeout', %s, false)"
_NOTIFY = b"SELECT pg_notify(%s, piece) FROM unnest(%s::text[]) AS piece"


class PostgresWakeups(ReconnectingWakeups["psycopg.AsyncConnection[tuple[Any, ...]]"]):
    """`server_id` is the sender of what replaces details that could not be sent."""

    def __init__(self, url: str, *, server_id: str, jitter: Callable[[], float] = random.random) -> None:
        super().__init__(server_id=server_id, jitter=jitter)
        self._parameters = _parameters(url)

    async def _connect(self) -> psycopg.AsyncConnection[tuple[Any, ...]]:
        import psycopg

        # No prepared statements: behind a pooler they would break.
        return await psycopg.AsyncConnection.connect(**self._parameters, autocommit=True, prepare_threshold=None)

    async def _disconnect(self, connection: psycopg.AsyncConnection[tuple[Any, ...]]) -> None:
        await connection.close()

    async def _heard(self, connection: psycopg.AsyncConnection[tuple[Any, ...]]) -> AsyncGenerator[bytes | None]:
        await connection.execute(f"LISTEN {CHANNEL}".encode())
        yield None
        async with aclosing(connection.notifies()) as notifies:
            async for notify in notifies:
                yield notify.payload.encode()

    async def _prepare_sending(self, connection: psycopg.AsyncConnection[tuple[Any, ...]]) -> None:
        await connection.execute(_SESSION, (str(int(TIMEOUT_S * 1000)),))

    async def _send(self, connection: psycopg.AsyncConnection[tuple[Any, ...]], batch: Sequence[bytes]) -> None:
        await connection.execute(_NOTIFY, (CHANNEL, [piece.decode() for piece in batch]))

    def _told(self, error: Exception) -> str:
        return without_secrets(str(error), self._parameters)


def _parameters(url: str) -> dict[str, Any]:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        return with_deadlines(conninfo_to_dict(url), TIMEOUT_S)
    except psycopg.ProgrammingError:
        # libpq's own text quotes the address, password included.
        raise ConfigError("the address of the database is not understood; use postgresql://user@host:5432/database") from None
