"""Queries of agents and dispatchers to their registry (the state of a job, its result, a claim, a removal), and their leases.

Theory of operation. Every query is a turn of the store, and every write is conditional on what was read: a claim on the lease
that it releases, a requeue on the generation. A lease that is granted to a request which does not wait any more is given back.

A job is removed in two steps. One that has not ended is canceled: its holder is told, stops it and reports that. One that ended
with a result is set going again and ended at once as removed, in two turns with one lease. No verb of the store deletes one job:
its record stays, as that of a job without a result, until it is old.

One loop renews all leases, and ends those that it cannot renew in time. The holder counts from before it asked, the store from
its commit: a job is gone here before another node may be granted it. The keeper is given every deadline too, and enforces it if
this process hangs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from starlette.responses import Response

from tasuki.agent import refusals
from tasuki.agent.refusals import log_context
from tasuki.agent.results import RemoteResultResponse, ResultResponse, ResultSource, blob_source
from tasuki.clocks import boot_time
from tasuki.core.failover import registry_records
from tasuki.core.failover.agent_protocol import AgentState, EndedMarker, job_view
from tasuki.core.failover.registry_records import RegistryState, attempt_of, held_of, registry_state_of, result_location_of
from tasuki.core.job import Job, Outcome
from tasuki.core.store_messages import (
    Answers,
    BlobClaim,
    Grant,
    HeldLease,
    LeaseRequest,
    LeaseStatus,
    Report,
    RequeueOrder,
    Submission,
    Turn,
)
from tasuki.core.worker.machine import lease_deadline
from tasuki.errors import ConfigError, Conflict, InternalError, NotFound, TasukiError, Unavailable
from tasuki.event_loop import ignore_result
from tasuki.server.assembly import StoreClient

logger = logging.getLogger("tasuki.agent")

# ------------------------------------------------------------------------------------------------ leases

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
        if status is not LeaseStatus.GO_ON:
            is_lost = status is LeaseStatus.LOST
            self.end(status, "another process holds the job" if is_lost else "the job was canceled in the registry")


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
                logger.warning("the registry does not renew leases; jobs continue while theirs last: %s", error.message)
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


# ------------------------------------------------------------------------------------------------ queries

ANSWER_S = 5.0  # for a request that waits
CLAIM_TRIES = 4  # an expired lease ends first, and the next try gets the job; another node may come in between
STOP_S = 30.0  # until a canceled job has ended: its program may take a while, or its node be dead
QUEUE_STOP_S = 3.0  # until a canceled job has left the queue of its dispatcher, which asks every second
STOP_LOOK_S = 0.1

Sent = Callable[[int], None]


class RegistryGrant(NamedTuple):
    """Grant of a job. `asked_at`: when the request for it was sent (CLOCK_BOOTTIME)."""

    grant: Grant
    attempt: int
    asked_at: float


class RegistryQueries:
    """Queries of one agent or dispatcher."""

    def __init__(self, share: StoreClient, holder: Holder, given_up: Outcome, sent: Sent, answer_s: float | None = None) -> None:
        """`given_up`: the outcome of an attempt that no request waits for. `sent` is called with the number of bytes of results
        sent."""
        self._share = share
        self.holder = holder
        self.given_up = given_up
        self.sent = sent
        self._answer_s = answer_s

    async def ask(self, turn: Turn) -> Answers:
        """Execute a turn for a request. If the answer comes too late, leases that it grants are given back."""
        asking = asyncio.ensure_future(self._share.execute(turn))
        answer_s = self._answer_s or ANSWER_S
        try:
            async with asyncio.timeout(answer_s):
                return await asyncio.shield(asking)
        except (TimeoutError, Unavailable, ConfigError, InternalError) as error:
            asking.add_done_callback(self._give_back)
            logger.warning("the registry did not answer: %s", error if isinstance(error, TasukiError) else f"in {answer_s:g} s")
            raise refusals.registry_away() from None
        except asyncio.CancelledError:
            asking.add_done_callback(self._give_back)
            raise

    def _give_back(self, asking: asyncio.Future[Answers]) -> None:
        if asking.cancelled() or asking.exception() is not None:
            return
        grants = [grant for granted in asking.result().lease for grant in granted]
        if grants:
            reports = [report_of(self.holder.held(grant), self.given_up) for grant in grants]
            reporting = asyncio.ensure_future(self._share.execute(Turn(fail=reports)))
            reporting.add_done_callback(ignore_result)

    # ------------------------------------------------------------------------------------------------ how a job stands

    async def look(self, job_id: str) -> Job | None:
        """Return the current state of a job. To ask for its lease ends one that has expired; nothing is granted, as no loss is
        left."""
        found = await self.ask(Turn(lease=[self.holder.request(job_id)], get=[job_id]))
        if found.lease[0]:  # after an operator's requeue it waits for a node
            held = self.holder.held(found.lease[0][0])
            found = await self.ask(Turn(release=[held], get=[job_id]))
        return _agents(found.get[0])

    async def get(self, job_id: str) -> Job | None:
        return _agents((await self.ask(Turn(get=[job_id]))).get[0])

    async def get_all(self, job_ids: Sequence[str]) -> list[Job | None]:
        return [_agents(job) for job in (await self._share.execute(Turn(get=job_ids))).get]

    # ------------------------------------------------------------------------------------------------ results

    async def stored(self, job: Job, cache: str | None = None) -> tuple[EndedMarker, ResultSource] | Response | None:
        """Return the result if it outlives its node: a small one from the registry, another from the blob store."""
        place, outcome = result_location_of(job), job.outcome
        if place is None or outcome is None:
            return None
        if outcome.result is not None:
            return ResultResponse(place.ended, outcome.result, self.sent, cache)
        if outcome.result_ref is None or self._share.blobs is None:
            return None
        claims = [BlobClaim(place.ended.result_sha256, place.ended.result_bytes)]
        return place.ended, blob_source(self._share.blobs, (await self.ask(Turn(place_blobs=claims))).place_blobs[0])

    async def opened(self, ended: EndedMarker, source: ResultSource, cache: str | None) -> Response | None:
        """Return the response with a result after its source was opened; None if the result is gone."""
        answer = RemoteResultResponse(ended, source, self.sent, cache)
        try:
            await answer.open()
        except NotFound as error:
            logger.warning("job %s: its result is gone: %s", ended.job_id, error.message)
            return None
        except TasukiError as error:
            logger.warning("job %s: its result cannot be had: %s", ended.job_id, error.message)
            raise refusals.result_away(ended.job_id, ended.node, error) from None
        return answer

    # ------------------------------------------------------------------------------------------------ claims

    async def claim(self, submission: Submission, requeue: RequeueOrder | None = None) -> RegistryGrant | Job:
        """Claim a job that is free or only waits at a dispatcher; else return it, HELD or DONE. Another input and a cancel are
        raised. `requeue`: set the job going again first, as nobody has its result."""
        job_id, waits = submission.spec.job_id, None
        again = () if requeue is None else (requeue,)
        for _ in range(CLAIM_TRIES):
            asked_at = boot_time()
            release = () if waits is None else (held_of(waits),)
            request = self.holder.request(job_id)
            found = await self.ask(Turn(release=release, requeue=again, rerun=[submission], lease=[request], get=[job_id]))
            job = found.get[0]
            if isinstance(found.rerun[0], Conflict):
                if found.lease[0]:  # it waited with another input
                    await self.ask(Turn(release=[self.holder.held(found.lease[0][0])]))
                raise refusals.other_input(job_id)
            if found.lease[0]:
                assert job is not None
                grant = found.lease[0][0]
                if waits is not None and found.release[0] and job.generation != waits.generation:
                    await self.ask(Turn(fail=[report_of(self.holder.held(grant), registry_records.removed(self.holder.name))]))
                    raise refusals.was_canceled(job_id)  # the released lease had been canceled meanwhile
                return RegistryGrant(grant, attempt_of(job), asked_at)
            match registry_state_of(job, None):
                case RegistryState.HELD | RegistryState.DONE:
                    assert job is not None
                    return job
                case RegistryState.QUEUED:
                    assert job is not None
                    check_wanted(job)
                    waits = job
        raise Unavailable(f"job {job_id} was not claimed in {CLAIM_TRIES} tries: other nodes changed its record; try again")

    # ------------------------------------------------------------------------------------------------ removing

    async def remove(self, job_id: str) -> Job | None:
        """Stop a job and drop its result; return it as it was. Its node may still have the folder."""
        first = job = await self.get(job_id)
        if job is not None and not job.state.terminal:
            first = job = await self._stop(job)
        for _ in range(CLAIM_TRIES):
            if job is None or result_location_of(job) is None:
                return first
            job = await self._forget(job)
        raise Unavailable(f"job {job_id} could not be removed: it was set going again {CLAIM_TRIES} times; try again")

    async def _stop(self, job: Job) -> Job | None:
        """Cancel a job, and wait for its end; return it as it was, or with the result that it ended with."""
        was, job_id = job, job.job_id
        loop = asyncio.get_running_loop()
        began = loop.time()
        canceled = (await self.ask(Turn(cancel=[(job_id, self.holder.name, "removed")]))).cancel[0]
        if canceled.worker_id is not None and canceled.lease_id is not None:
            self._share.hint_cancel(canceled.worker_id, canceled.lease_id)
        while True:
            found = await self.look(job_id)
            if found is None or found.generation != was.generation:
                return was  # it was sent again since
            if found.state.terminal:
                return found if result_location_of(found) is not None else was
            waited_s = loop.time() - began
            if waited_s >= STOP_S:
                raise refusals.still_stopping(job_id, registry_records.node_of(found.assigned_worker_id or ""))
            if registry_state_of(found, None) is RegistryState.QUEUED and waited_s >= QUEUE_STOP_S:
                await self.ask(Turn(release=[held_of(found)]))  # its dispatcher is dead; a canceled job ends with the release
            await asyncio.sleep(STOP_LOOK_S)

    async def _forget(self, job: Job) -> Job | None:
        """End another attempt of a job as removed. Return the job if another process was quicker."""
        job_id = job.job_id
        again = [RequeueOrder(job_id, self.holder.name, "its result was removed", job.generation)]
        found = await self.ask(Turn(requeue=again, lease=[self.holder.request(job_id)], get=[job_id]))
        if not found.lease[0]:
            return found.get[0]
        await self.ask(Turn(fail=[report_of(self.holder.held(found.lease[0][0]), registry_records.removed(self.holder.name))]))
        return None

    async def forget(self, job: Job) -> None:
        """Drop the result of a job, unless it has changed since it was read."""
        if result_location_of(job) is not None:
            await self._forget(job)


def _agents(job: Job | None) -> Job | None:
    return job if job is not None and registry_records.is_agent_job(job) else None


def done_or_refused(job: Job | None, sent: str | None) -> Job | None:
    """Raise what forbids an upload with this input (None: not known yet); return the job if it is done."""
    if job is None:
        return None
    match registry_state_of(job, sent):
        case RegistryState.OTHER_INPUT:
            raise refusals.other_input(job.job_id)
        case RegistryState.HELD:
            raise is_held(job)
        case RegistryState.QUEUED:
            check_wanted(job)
        case RegistryState.DONE if sent is not None:
            return job
    return None


def check_wanted(job: Job) -> None:
    """Refuse to run a queued job that is to be canceled."""
    if job.cancel_requested:
        raise refusals.was_canceled(job.job_id)


def is_held(job: Job) -> TasukiError:
    """Return the refusal of a job that a node runs, or that waits at a dispatcher."""
    assert job.lease is not None
    node = registry_records.node_of(job.lease.worker_id)
    if registry_records.is_queued(job):
        return refusals.is_queued(job.job_id, node, job.assigned_at or 0.0)
    return refusals.is_running(job.job_id, node, job.started_at or job.assigned_at or 0.0)


def described(job: Job) -> dict[str, Any] | None:
    """Return the answer to `GET /jobs/{job_id}`."""
    if job.assigned_worker_id is None:
        return None
    state, place = registry_records.state_of(job), result_location_of(job)
    common = {
        "job_id": job.job_id,
        "node": registry_records.node_of(job.assigned_worker_id),
        "exec": job.spec.exec,
        "input": registry_records.input_of(job),
        "attempt": attempt_of(job),
        "started_at": None if state is AgentState.QUEUED else job.started_at or job.assigned_at,
    }
    ended = None if place is None else place.ended
    return job_view(common, state, ended_at=job.finished_at, ended=ended, progress=job.progress)
