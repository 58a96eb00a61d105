"""The leases that an agent holds of a registry: renewed while its jobs run, and given up in time when that fails.

The holder counts from before it asked, the store from its commit: so the job is gone here before another node may have it. The
keeper is told every deadline too, and keeps it if this process hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

from tasuki.agent.refusals import on_behalf_of
from tasuki.blobs.files import disk_full_as_error, durable_write, sync_folder
from tasuki.clocks import boot_time
from tasuki.core.failover.registry_records import ID_CHARS, lease_deadline
from tasuki.core.ids import check_job_id
from tasuki.core.job import Outcome
from tasuki.core.store_messages import Answers, Grant, HeldLease, LeaseStatus, Report, Turn
from tasuki.errors import InvalidInput, TasukiError
from tasuki.worker.attempt import StopReason

# ----------------------------------------------------------------------------------------------------
# Which jobs an agent has claimed and not yet settled with the registry, on its disk: for the next start, if it is killed.


class ClaimJournal:
    """Of one data folder."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._folder = data / "claims"

    def prepare(self) -> str:
        """Make what is missing; the id of this node."""
        with disk_full_as_error(self._data):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            path = self._data / "node-id"
            with contextlib.suppress(FileNotFoundError):
                if len(known := path.read_text("ascii").strip()) == ID_CHARS:
                    return known
            made = secrets.token_hex(ID_CHARS // 2)
            durable_write(path, f"{made}\n".encode())
        return made

    def write(self, job_id: str) -> None:
        with disk_full_as_error(self._folder):
            (self._folder / check_job_id(job_id)).touch()
            sync_folder(self._folder)

    def remove(self, job_id: str) -> None:
        """Not made durable: one that is back after a power cut is looked at once more."""
        (self._folder / check_job_id(job_id)).unlink(missing_ok=True)

    def left(self) -> list[str]:
        """What an earlier process did not settle."""
        found = []
        for path in sorted(self._folder.iterdir()):
            with contextlib.suppress(InvalidInput):  # what somebody else put there
                found.append(check_job_id(path.name))
        return found


logger = logging.getLogger("tasuki.agent")
RENEWALS_PER_TTL = 3
LOOKS_PER_TTL = 24

Execute = Callable[[Turn], Awaitable[Answers]]
Lost = Callable[[StopReason], None]


class RegistryLease:
    """One lease in our hands."""

    def __init__(self, held: HeldLease, deadline: float, lost: Lost = lambda reason: None) -> None:
        self.held = held
        self.deadline = deadline
        self._lost = lost
        self.is_started = False
        self.is_told = False
        """Its end is on the way to the store, whose answer counts; or it was lost."""

    def report(self, outcome: Outcome, started_at: float | None = None) -> Report:
        held = self.held
        return Report(held.job_id, held.worker_id, held.lease_id, held.attempt, outcome, started_at)

    def lose(self, why: str, reason: StopReason = StopReason.LEASE_LOST) -> None:
        if not self.is_told:
            self.is_told = True
            with on_behalf_of(self.held.job_id):
                logger.warning("job %s is stopped: %s", self.held.job_id, why)
            self._lost(reason)


class Leases:
    """All claims of one agent."""

    def __init__(self, execute: Execute, worker_id: str, incarnation: str, ttl_s: float) -> None:
        self._execute = execute
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.ttl_s = ttl_s
        self.renewed: Callable[[], None] = lambda: None
        """Called when deadlines have moved."""
        self._claims: dict[str, RegistryLease] = {}
        self._renew_at = 0.0
        self._wake = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._answers = True

    def get(self, job_id: str) -> RegistryLease | None:
        return self._claims.get(job_id)

    def held_of(self, grant: Grant) -> HeldLease:
        return HeldLease(grant.job_id, self.worker_id, self.incarnation, grant.lease_id, grant.attempt, self.ttl_s)

    def add(self, grant: Grant, asked_at: float, lost: Lost) -> RegistryLease:
        claim = self._claims[grant.job_id] = RegistryLease(self.held_of(grant), lease_deadline(asked_at, self.ttl_s), lost)
        self._wake.set()
        return claim

    def drop(self, job_id: str) -> RegistryLease | None:
        """It is renewed no more."""
        return self._claims.pop(job_id, None)

    def hurry(self) -> None:
        """Renew now: somebody may have canceled one."""
        self._renew_at = 0.0
        self._wake.set()

    async def keep(self) -> None:
        """Until it is canceled. A turn that waits for a store that is away keeps no deadline from being seen."""
        try:
            while True:
                self._look(boot_time())
                try:
                    async with asyncio.timeout(self.ttl_s / LOOKS_PER_TTL):
                        await self._wake.wait()
                except TimeoutError:
                    continue
                self._wake.clear()
        finally:
            if self._asking is not None:
                self._asking.cancel()

    def _look(self, now: float) -> None:
        for claim in list(self._claims.values()):
            if now >= claim.deadline:
                claim.lose("the registry did not renew its lease in time")
        if self._asking is not None and not self._asking.done():
            return
        fresh = [claim for claim in self._claims.values() if not claim.is_started]
        due = [claim for claim in self._claims.values() if claim.is_started] if now >= self._renew_at else []
        if now >= self._renew_at:
            self._renew_at = now + self.ttl_s / RENEWALS_PER_TTL
        if fresh or due:
            self._asking = asyncio.ensure_future(self._tell(fresh, due, now))

    async def _tell(self, fresh: list[RegistryLease], due: list[RegistryLease], asked_at: float) -> None:
        turn = Turn(start=[claim.held for claim in fresh], renew=[claim.held for claim in due])
        try:
            answers = await self._execute(turn)
        except TasukiError as error:
            self._say(answers=False, why=error.message)
            return
        self._say(answers=True)
        for claim, standing in zip(fresh, answers.start, strict=True):
            claim.is_started = True
            _heed(claim, standing)
        for claim, standing in zip(due, answers.renew, strict=True):
            if standing is LeaseStatus.GO_ON:
                claim.deadline = lease_deadline(asked_at, self.ttl_s)
            _heed(claim, standing)
        if due:
            self.renewed()

    def _say(self, *, answers: bool, why: str = "") -> None:
        if answers != self._answers:
            self._answers = answers
            if answers:
                logger.info("the registry answers again")
            else:
                logger.warning("the registry does not answer, running jobs go on while their leases last: %s", why)


def _heed(claim: RegistryLease, standing: LeaseStatus) -> None:
    match standing:
        case LeaseStatus.LOST:
            claim.lose("its lease is not ours any more")
        case LeaseStatus.CANCEL:
            claim.lose("it was canceled in the registry", StopReason.CANCELED)
        case LeaseStatus.GO_ON:
            pass
