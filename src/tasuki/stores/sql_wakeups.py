"""Hints over PostgreSQL's LISTEN and NOTIFY: one connection listens, another one notifies, both apart from the store's.

Why not NOTIFY in the store's own transactions: from there on until its end such a commit holds a lock that every other
notifying commit of the database server waits for, fsync included: the turns of all servers would queue up. Here a notifying
transaction writes nothing, waits for no disk (`synchronous_commit = off`), and carries all that waits at the moment.

Touches the database and its log, and no table. psycopg is imported when an object is made.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from tasuki.core.conninfo import with_deadlines, without_secrets
from tasuki.core.hints import everything
from tasuki.errors import ConfigError

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.AsyncConnection[tuple[Any, ...]]

logger = logging.getLogger("tasuki.wakeups")

CHANNEL = "tasuki_hint"
TIMEOUT_S = 5.0  # for connecting, and for one statement
QUEUE_MAX = 256  # pieces, some 2 MB; a database that is so far behind is not helped by details
BATCH_MAX = 32  # pieces of one transaction
BACKOFF_FIRST_S = 0.2
BACKOFF_MAX_S = 5.0
STEADY_S = 1.0  # a connection that ended sooner was none

_SESSION = b"SELECT set_config('synchronous_commit', 'off', false), set_config('statement_timeout', %s, false)"
_NOTIFY = b"SELECT pg_notify(%s, piece) FROM unnest(%s::text[]) AS piece"


class PostgresWakeups:
    """`server_id` is the sender of what replaces details that could not be sent."""

    def __init__(self, url: str, *, server_id: str, jitter: Callable[[], float] = random.random) -> None:
        self._parameters = _parameters(url)
        self._server_id = server_id
        self._jitter = jitter
        self._queue: list[bytes] = []
        self._filled = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._down: set[str] = set()
        """Which of the two connections are lost; one outage, though it takes both, is logged once."""

    async def start(self, on_hint: Callable[[bytes], None]) -> None:
        async def listen(connection: Connection) -> None:
            await self._listen(connection, on_hint)

        self._tasks = [
            asyncio.create_task(self._keep("listening", listen), name="tasuki-hints-in"),
            asyncio.create_task(self._keep("notifying", self._notify), name="tasuki-hints-out"),
        ]

    def publish(self, pieces: Sequence[bytes]) -> None:
        if not pieces:
            return
        self._queue += pieces
        if len(self._queue) > QUEUE_MAX:
            self._queue = [everything(self._server_id)]
        self._filled.set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    # ------------------------------------------------------------------------------------------------- the two ends

    async def _listen(self, connection: Connection, on_hint: Callable[[bytes], None]) -> None:
        await connection.execute(f"LISTEN {CHANNEL}".encode())
        self._is_up("listening")
        _hand_over(on_hint, everything())
        async with aclosing(connection.notifies()) as notifies:
            async for notify in notifies:
                _hand_over(on_hint, notify.payload.encode())

    async def _notify(self, connection: Connection) -> None:
        await connection.execute(_SESSION, (str(int(TIMEOUT_S * 1000)),))
        self._is_up("notifying")
        while True:
            await self._filled.wait()
            batch, self._queue = self._queue[:BATCH_MAX], self._queue[BATCH_MAX:]
            if not self._queue:
                self._filled.clear()
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await connection.execute(_NOTIFY, (CHANNEL, [piece.decode() for piece in batch]))
            except BaseException:
                # Not known whether it was sent, and more may pile up until there is a connection again.
                self._queue = [everything(self._server_id)]
                self._filled.set()
                raise

    # --------------------------------------------------------------------------------------------------- connections

    async def _keep(self, role: str, serve: Callable[[Connection], Awaitable[None]]) -> None:
        """Have a connection for this role as long as we live."""
        import psycopg

        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            connected_at = None
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    # No prepared statements: behind a pooler they would break.
                    connection = await psycopg.AsyncConnection.connect(
                        **self._parameters, autocommit=True, prepare_threshold=None
                    )
                connected_at = loop.time()
                try:
                    await serve(connection)
                finally:
                    await connection.close()
            except Exception as error:  # noqa: BLE001 - whatever it is, the server goes on without hints, and we try again
                self._is_down(role, error)
            if connected_at is not None and loop.time() - connected_at >= STEADY_S:
                failures = 0
            failures += 1
            wait_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * float(1 << min(failures - 1, 16)))
            await asyncio.sleep(wait_s * (0.5 + self._jitter() / 2))

    def _is_up(self, role: str) -> None:
        if role in self._down:
            self._down.remove(role)
            if not self._down:
                logger.info("hints between servers travel again")

    def _is_down(self, role: str, error: Exception) -> None:
        if not self._down:
            text = without_secrets(str(error), self._parameters) or type(error).__name__
            logger.warning("hints between servers are lost for now, which makes things slower: %s: %s", role, text)
        self._down.add(role)
        # The one that notifies would find out only at the next hint; sending nothing tells it now.
        self._filled.set()


def _hand_over(on_hint: Callable[[bytes], None], piece: bytes) -> None:
    try:
        on_hint(piece)
    except Exception:
        logger.exception("a hint of %d bytes could not be taken in", len(piece))


def _parameters(url: str) -> dict[str, Any]:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        return with_deadlines(conninfo_to_dict(url), TIMEOUT_S)
    except psycopg.ProgrammingError:
        # libpq's own text quotes the address, password included.
        raise ConfigError("the address of the database is not understood; use postgresql://user@host:5432/database") from None
