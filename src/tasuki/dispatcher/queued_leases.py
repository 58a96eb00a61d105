"""Jobs that wait for a node, as the registry knows them: a dispatcher's leases, renewed until a node takes them over.

Soft claims (see `core/failover/registry_records.py`): a lease that is lost here was taken by whoever has the
input too, which is how it should
be. What is canceled in the registry is heard with the next renewal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from tasuki.agent import refusals
from tasuki.agent.registry_queries import Holder
from tasuki.core.job import Outcome
from tasuki.core.store_messages import Answers, HeldLease, LeaseStatus, Report, Turn
from tasuki.errors import TasukiError

logger = logging.getLogger("tasuki.dispatcher")
RENEW_S = 1.0
RENEWALS_PER_TTL = 3

T = TypeVar("T")
Execute = Callable[[Turn], Awaitable[Answers]]


class QueuedLease:
    """One job that waits."""

    def __init__(self, held: HeldLease) -> None:
        self.held = held
        self.canceled = asyncio.Event()

    async def unless_canceled(self, sending: Coroutine[Any, Any, T]) -> T:
        """What comes of it; it is stopped where somebody has canceled the job."""
        sent = asyncio.ensure_future(sending)
        hearing = asyncio.ensure_future(self.canceled.wait())
        try:
            await asyncio.wait((sent, hearing), return_when=asyncio.FIRST_COMPLETED)
            if sent.done():
                return sent.result()
            raise refusals.was_canceled(self.held.job_id)
        finally:
            for task in (sent, hearing):
                task.cancel()
            await asyncio.gather(sent, hearing, return_exceptions=True)


class QueuedLeases:
    """All of one dispatcher."""

    def __init__(self, execute: Execute, holder: Holder, given_up: Outcome) -> None:
        self._execute = execute
        self._given_up = given_up
        self._every_s = min(RENEW_S, holder.ttl_s / RENEWALS_PER_TTL)
        self._waiting: dict[str, QueuedLease] = {}
        self._ends: set[asyncio.Task[None]] = set()

    def add(self, held: HeldLease) -> QueuedLease:
        waiting = self._waiting[held.lease_id] = QueuedLease(held)
        return waiting

    def leave(self, waiting: QueuedLease) -> None:
        """It is renewed no more. If no node takes it in time, it does not wait any more."""
        self._waiting.pop(waiting.held.lease_id, None)

    def end(self, waiting: QueuedLease) -> None:
        """Nobody waits for it any more. If a node has taken it, or has ended it already, that is refused, and nothing is lost."""
        if self._waiting.pop(waiting.held.lease_id, None) is not None:
            task = asyncio.create_task(self._tell_end(waiting.held))
            self._ends.add(task)
            task.add_done_callback(self._ends.discard)

    async def _tell_end(self, held: HeldLease) -> None:
        report = Report(held.job_id, held.worker_id, held.lease_id, held.attempt, self._given_up)
        try:
            await self._execute(Turn(fail=[report]))
        except TasukiError as error:  # the lease is over in time
            logger.info("job %s: the registry was not told that it does not wait any more: %s", held.job_id, error.message)

    async def keep(self) -> None:
        """Until it is canceled."""
        while True:
            await asyncio.sleep(self._every_s)
            if self._waiting:
                await self._renew(list(self._waiting.values()))

    async def _renew(self, due: list[QueuedLease]) -> None:
        try:
            found = await self._execute(Turn(renew=[waiting.held for waiting in due]))
        except TasukiError as error:
            logger.info("the registry was not told what waits here: %s", error.message)
            return
        for waiting, standing in zip(due, found.renew, strict=True):
            match standing:
                case LeaseStatus.LOST:  # mostly to the node that it was sent to
                    self._waiting.pop(waiting.held.lease_id, None)
                case LeaseStatus.CANCEL:
                    waiting.canceled.set()
                case LeaseStatus.GO_ON:
                    pass

    async def close(self) -> None:
        """Let all go, and wait until that is told."""
        for waiting in list(self._waiting.values()):
            self.end(waiting)
        await asyncio.gather(*self._ends, return_exceptions=True)
