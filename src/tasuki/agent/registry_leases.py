"""Leases that an agent or a dispatcher holds in a registry: one loop renews them, and ends those that it cannot renew in time.

The holder counts from before it asked, the store from its commit: a job is gone here before another node may be granted it. The
keeper is given every deadline too, and enforces it if this process hangs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tasuki.agent.refusals import log_context
from tasuki.clocks import boot_time
from tasuki.core.job import Outcome
from tasuki.core.lifecycle import lease_deadline
from tasuki.core.store_messages import Answers, Grant, HeldLease, LeaseRequest, LeaseStatus, Report, Turn
from tasuki.errors import TasukiError

logger = logging.getLogger("tasuki.agent")
RENEWALS_PER_TTL = 3
CHECKS_PER_TTL = 24

Execute = Callable[[Turn], Awaitable[Answers]]
LeaseEnded = Callable[[LeaseStatus], None]
"""Called with LOST or CANCEL."""


class Holder(NamedTuple):
    """Identity under which an agent or a dispatcher asks for leases."""

    worker_id: str
    incarnation: str
    ttl_s: float
    name: str

    def request(self, job_id: str) -> LeaseRequest:
        return LeaseRequest(worker_id=self.worker_id, incarnation=self.incarnation, job_ids=(job_id,), limit=1, ttl_s=self.ttl_s)

    def held(self, grant: Grant) -> HeldLease:
        return HeldLease(grant.job_id, self.worker_id, self.incarnation, grant.lease_id, grant.attempt, self.ttl_s)


def report_of(held: HeldLease, outcome: Outcome, started_at: float | None = None) -> Report:
    """Return the report that ends an attempt."""
    return Report(held.job_id, held.worker_id, held.lease_id, held.attempt, outcome, started_at)


class RegistryLease:
    """One lease of this process."""

    def __init__(self, held: HeldLease, deadline: float, on_end: LeaseEnded, *, is_started: bool = False) -> None:
        """`on_end` is called once, if the lease was lost or its job canceled. A lease that `is_started` is only renewed."""
        self.held = held
        self.deadline = deadline
        self._on_end = on_end
        self.is_started = is_started
        self.is_reported = False
        """The end of the job is on its way to the store, whose answer counts; or `on_end` was called."""

    def end(self, status: LeaseStatus, why: str) -> None:
        if not self.is_reported:
            self.is_reported = True
            with log_context(self.held.job_id):
                logger.info("job %s: the lease of %s has ended: %s", self.held.job_id, self.held.worker_id, why)
            self._on_end(status)

    def heed(self, status: LeaseStatus) -> None:
        """Act on the store's answer to a renewal."""
        match status:
            case LeaseStatus.LOST:
                self.end(status, "another process holds the job")
            case LeaseStatus.CANCEL:
                self.end(status, "the job was canceled in the registry")
            case LeaseStatus.GO_ON:
                pass


class RegistryLeases:
    """All leases of one agent or dispatcher."""

    def __init__(self, execute: Execute, ttl_s: float, renew_every_s: float | None = None) -> None:
        self._execute = execute
        self._ttl_s = ttl_s
        self._renew_every_s = renew_every_s or ttl_s / RENEWALS_PER_TTL
        self.renewed: Callable[[], None] = lambda: None
        """Called when deadlines have moved."""
        self._leases: dict[str, RegistryLease] = {}
        self._renew_at = 0.0
        self._wake = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._is_away = False

    def get(self, job_id: str) -> RegistryLease | None:
        return next((lease for lease in self._leases.values() if lease.held.job_id == job_id), None)

    def all(self) -> list[RegistryLease]:
        return list(self._leases.values())

    def add(self, lease: RegistryLease) -> None:
        self._leases[lease.held.lease_id] = lease
        self._wake.set()

    def drop(self, lease: RegistryLease) -> bool:
        """Stop renewing a lease; return whether it was still renewed."""
        return self._leases.pop(lease.held.lease_id, None) is not None

    def renew_now(self) -> None:
        """Renew all leases at once: one of them may have been canceled."""
        self._renew_at = 0.0
        self._wake.set()

    async def keep_renewing(self) -> None:
        """Renew until canceled. A turn that waits for a store that is away does not delay the check of deadlines."""
        try:
            while True:
                self._check(boot_time())
                try:
                    async with asyncio.timeout(min(self._ttl_s / CHECKS_PER_TTL, self._renew_every_s)):
                        await self._wake.wait()
                except TimeoutError:
                    continue
                self._wake.clear()
        finally:
            if self._asking is not None:
                self._asking.cancel()

    def _check(self, now: float) -> None:
        for lease in self.all():
            if now >= lease.deadline:
                lease.end(LeaseStatus.LOST, "the registry did not renew it in time")
        if self._asking is not None and not self._asking.done():
            return
        fresh = [lease for lease in self._leases.values() if not lease.is_started]
        due = [lease for lease in self._leases.values() if lease.is_started] if now >= self._renew_at else []
        if now >= self._renew_at:
            self._renew_at = now + self._renew_every_s
        if fresh or due:
            self._asking = asyncio.ensure_future(self._renew(fresh, due, now))

    async def _renew(self, fresh: list[RegistryLease], due: list[RegistryLease], asked_at: float) -> None:
        turn = Turn(start=[lease.held for lease in fresh], renew=[lease.held for lease in due])
        try:
            answers = await self._execute(turn)
        except TasukiError as error:
            if not self._is_away:
                logger.warning("the registry does not renew leases; jobs go on while theirs last: %s", error.message)
            self._is_away = True
            return
        if self._is_away:
            logger.info("the registry answers again")
            self._is_away = False
        for lease, status in zip(fresh, answers.start, strict=True):
            lease.is_started = True
            lease.heed(status)
        for lease, status in zip(due, answers.renew, strict=True):
            if status is LeaseStatus.GO_ON:
                lease.deadline = max(lease.deadline, lease_deadline(asked_at, self._ttl_s))
            lease.heed(status)
        if due:
            self.renewed()
