"""Hints between servers that share a store, carried by a service that may be away.

A carrier promises little, because a hint is never the only way to learn something (`cluster_messages.py`): a published hint
reaches the other servers soon, or not at all. `publish` neither blocks nor raises nor grows without bound, and a server that may
have missed a hint is told to look at everything. A carrier belongs to one event loop, and is used on its thread alone.

Messages of publish/subscribe travel the same way, behind the hints; if they cannot be sent in time they are dropped, and counted.

`Wakeups` keeps a connection that listens and, while there are hints to send, one that notifies. It decides what all carriers
share: the queue of hints to send, when details become an `everything`, how long to wait before the next try, and that an outage
is logged once. Its subclasses (`sql/postgres.py`, `redis/connection.py`) talk to their service.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

from tasuki.core.backoff import Backoff
from tasuki.core.cluster_messages import PIECE_MAX_BYTES, everything

logger = logging.getLogger("tasuki.wakeups")

TIMEOUT_S = 5.0  # for connecting, and for one statement
QUEUE_MAX = 256  # pieces, some 2 MB; details do not help a service that is so far behind
MESSAGES_MAX = 1024  # pieces of messages
BATCH_MAX = 32  # pieces that are sent at once
BACKOFF_FIRST_S = 0.2
BACKOFF_MAX_S = 5.0
CANCEL_AGAIN_S = 0.2
STEADY_S = 1.0  # a connection that ended sooner counts as a failure
NOTIFY_IDLE_S = 5.0  # how long the notifying connection is kept for the next hint
OUTAGE_S = 30.0  # a loss so soon after the last one is the same outage: it is logged, without a second warning

Connection = TypeVar("Connection")


class Wakeups(ABC, Generic[Connection]):
    """A carrier of hints over two connections. `server_id` is the sender of the hint that replaces lost details."""

    piece_max_bytes = PIECE_MAX_BYTES
    """Size of the largest piece that the service carries."""

    def __init__(self, *, server_id: str, jitter: Callable[[], float] = random.random) -> None:
        self._server_id = server_id
        self._jitter = jitter
        self._queue: list[bytes] = []
        self._messages: deque[tuple[bytes, Callable[[], None]]] = deque()
        """Pieces of messages, and what is called if they are not sent."""
        self._filled = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._down: set[str] = set()
        """Roles of the connections that are lost; one outage, though it takes both, is logged once."""
        self._up_at = -math.inf

    # -- for each service ----------------------------------------------------------------------------------------------
    @abstractmethod
    async def _connect(self) -> Connection: ...

    @abstractmethod
    async def _disconnect(self, connection: Connection) -> None: ...

    @abstractmethod
    def _received(self, connection: Connection) -> AsyncGenerator[bytes | None]:
        """Yield None when listening has begun, then every piece that comes."""

    @abstractmethod
    async def _prepare_sending(self, connection: Connection) -> None: ...

    @abstractmethod
    async def _send(self, connection: Connection, batch: Sequence[bytes]) -> None: ...

    @abstractmethod
    def _describe(self, error: Exception) -> str:
        """Return the error's text without secrets."""

    # -- the contract --------------------------------------------------------------------------------------------------
    async def start(self, on_hint: Callable[[bytes], None]) -> None:
        """Listen, and call `on_hint` with every hint that comes, also with this server's own. Returns at once, and never raises.

        While the service is away, connecting is tried again and again. Each time that listening begins, `on_hint` gets an
        `everything`.
        """

        async def listen(connection: Connection) -> None:
            await self._listen(connection, on_hint)

        self._tasks = [
            asyncio.create_task(self._keep("listening", listen, _always), name="tasuki-hints-in"),
            asyncio.create_task(self._keep("notifying", self._notify, self._filled.wait), name="tasuki-hints-out"),
        ]

    def publish(self, pieces: Sequence[bytes]) -> None:
        """Send these pieces (of `split`) to all servers. Pieces that cannot be sent in time become one `everything`."""
        if not pieces:
            return
        self._queue += pieces
        if len(self._queue) > QUEUE_MAX:
            self._queue = [everything(self._server_id)]
        self._filled.set()

    def publish_messages(self, pieces: Sequence[bytes], lost: Callable[[], None]) -> None:
        """Send pieces of messages to all servers, all of them or none, after the hints that wait. `lost` is called once if not
        all of them were sent."""
        if len(self._messages) + len(pieces) > MESSAGES_MAX:
            lost()
            return
        self._messages.extend((piece, lost) for piece in pieces)
        self._filled.set()

    async def close(self) -> None:
        """Stop. Pieces that were not sent yet are lost."""
        left = set(self._tasks)
        while left:
            # More than once: a cancel that meets a driver's own timeout is sometimes taken for it, and lost.
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
        self._tasks = []

    # -- the two ends --------------------------------------------------------------------------------------------------
    async def _listen(self, connection: Connection, on_hint: Callable[[bytes], None]) -> None:
        async with aclosing(self._received(connection)) as pieces:
            async for piece in pieces:
                if piece is None:
                    self._is_up("listening")
                _hand_over(on_hint, everything() if piece is None else piece)

    async def _notify(self, connection: Connection) -> None:
        await self._prepare_sending(connection)
        self._is_up("notifying")
        while await self._is_filled_soon():
            batch, self._queue = self._queue[:BATCH_MAX], self._queue[BATCH_MAX:]
            sending = [self._messages.popleft() for _ in range(min(len(self._messages), BATCH_MAX - len(batch)))]
            batch += [piece for piece, _ in sending]
            if not self._queue and not self._messages:
                self._filled.clear()
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await self._send(connection, batch)
                self._is_up("notifying")
            except BaseException:
                # The batch may or may not have been sent, and more may pile up until there is a connection again.
                self._queue = [everything(self._server_id)]
                self._filled.set()
                self._messages.extendleft(reversed(sending))
                raise

    async def _is_filled_soon(self) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NOTIFY_IDLE_S):
                return await self._filled.wait()
        return False

    # -- connections ---------------------------------------------------------------------------------------------------
    async def _keep(
        self, role: str, serve: Callable[[Connection], Awaitable[None]], wanted: Callable[[], Awaitable[object]]
    ) -> None:
        """Keep a connection for this role, whenever it is wanted, until cancelled."""
        loop = asyncio.get_running_loop()
        backoff = Backoff(BACKOFF_FIRST_S, BACKOFF_MAX_S, self._jitter)
        while True:
            connected_at = None
            await wanted()
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    connection = await self._connect()
                connected_at = loop.time()
                try:
                    await serve(connection)
                finally:
                    await self._disconnect(connection)
            except Exception as error:  # noqa: BLE001 - whatever it is, the server continues without hints, and connecting is tried again
                self._is_down(role, error)
            if connected_at is not None and loop.time() - connected_at >= STEADY_S:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    def _is_up(self, role: str) -> None:
        if role in self._down:
            self._down.remove(role)
            if not self._down:
                self._up_at = time.monotonic()
                logger.info("hints to other processes of this store travel again")

    def _is_down(self, role: str, error: Exception) -> None:
        if role == "notifying":  # what comes when the service is back would be old
            for lost in dict.fromkeys(lost for _, lost in self._messages):
                lost()
            self._messages.clear()
        if not self._down:
            level = logging.WARNING if time.monotonic() - self._up_at >= OUTAGE_S else logging.INFO
            text = self._describe(error) or type(error).__name__
            logger.log(level, "hints to other processes of this store are lost for now, which is slower: %s: %s", role, text)
        # The notifying connection would find out only at the next hint: it is in doubt until it has sent nothing, now.
        self._down |= {role, "notifying"}
        self._filled.set()


async def _always() -> None:
    pass


def _hand_over(on_hint: Callable[[bytes], None], piece: bytes) -> None:
    try:
        on_hint(piece)
    except Exception:
        logger.exception("a hint of %d bytes could not be taken in", len(piece))
