"""Registry of the agents, as a dispatcher uses it: it reads what no node need be asked for, and records the jobs that wait here.

Theory of operation. The registry is asked first: that is one question, while the nodes are many, and each of them would ask it
too. Its answer counts for what it has (a result, a run at a node, another input). For everything else the nodes are asked as
without a registry: a job may be at a node from before, the registry may have lost its data, and only the node of a running job
knows its progress. So a dispatcher with a registry knows what it knew without one, and more.

A job whose input is stored here waits in the registry (`QueuedJob`) until a node has claimed it.

While the registry is away, nothing is asked of it and nothing recorded, until it has answered once: the dispatcher works as
without one. It keeps nothing on disk.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response

from tasuki.agent import refusals, registry_queries
from tasuki.agent.registry_queries import RegistryGrant, RegistryLease, RegistryLeases, RegistryQueries
from tasuki.core.failover import registry_records
from tasuki.core.failover.agent_protocol import RemovalResult
from tasuki.core.failover.registry_records import RegistryState, registry_state_of, result_location_of
from tasuki.core.job import Job
from tasuki.core.store_messages import Answers, HeldLease, LeaseStatus, Turn
from tasuki.dispatcher.proxying import StoredForm
from tasuki.errors import AgentRefusal, NotFound, RegistryUnavailable, TasukiError, Unavailable
from tasuki.event_loop import BackgroundTasks
from tasuki.server.assembly import StoreClient

logger = logging.getLogger("tasuki.dispatcher")
ANSWER_S = 2.0  # for a request; then the registry counts as away
OPEN_S = 5.0  # how long a start waits for it
RETRY_S = 1.0

CANCEL_CHECK_S = 1.0  # how often the leases of queued jobs are renewed: the answer reports a cancel

T = TypeVar("T")


class QueuedJob(RegistryLease):
    """Lease of a job that waits here for a node. It is never started; the node that is sent the job takes it over."""

    def __init__(self, held: HeldLease, leases: RegistryLeases) -> None:
        super().__init__(held, math.inf, self._ended, is_started=True)
        self._leases = leases
        self._canceled = asyncio.Event()
        leases.add(self)

    def _ended(self, status: LeaseStatus) -> None:
        if status is LeaseStatus.CANCEL:
            self._canceled.set()
        else:
            self._leases.drop(self)

    async def unless_canceled(self, sending: Coroutine[Any, Any, T]) -> T:
        """Return the result of `sending`; stop it, and raise, when the job is canceled."""
        sent = asyncio.ensure_future(sending)
        hearing = asyncio.ensure_future(self._canceled.wait())
        try:
            await asyncio.wait((sent, hearing), return_when=asyncio.FIRST_COMPLETED)
            if sent.done():
                return sent.result()
            raise refusals.was_canceled(self.held.job_id)
        finally:
            for task in (sent, hearing):
                task.cancel()
            await asyncio.gather(sent, hearing, return_exceptions=True)


class DispatcherRegistry:
    """Registry of one dispatcher. Made inside the running loop."""

    def __init__(self, make_share: Callable[[], StoreClient], *, name: str, ttl_s: float) -> None:
        """`make_share` is called again while the registry cannot be opened."""
        self._make_share = make_share
        worker_id = registry_records.dispatcher_id_of(name, secrets.token_hex(registry_records.ID_CHARS // 2))
        self._holder = registry_queries.Holder(worker_id, secrets.token_hex(8), ttl_s, registry_records.node_of(worker_id))
        self._share: StoreClient | None = None
        self._records: RegistryQueries | None = None
        """None: the registry is away."""
        self._queued = RegistryLeases(self._execute, ttl_s, min(CANCEL_CHECK_S, ttl_s / registry_queries.RENEWALS_PER_TTL))
        self._tasks = BackgroundTasks()
        self._reports = BackgroundTasks()

    # ------------------------------------------------------------------------------------------------ life

    async def open(self) -> None:
        """Open the registry. Permanent errors are raised; a registry that is away is awaited in the background."""
        tried = asyncio.Event()
        opening = self._tasks.spawn(self._open(tried))
        trying = asyncio.ensure_future(tried.wait())
        await asyncio.wait((opening, trying), timeout=OPEN_S, return_when=asyncio.FIRST_COMPLETED)
        trying.cancel()
        if opening.done():
            await opening
        elif not tried.is_set():
            logger.warning("the registry did not open in %g s; this dispatcher works without it until it does", OPEN_S)
        self._tasks.spawn(self._queued.keep_renewing())

    async def _open(self, tried: asyncio.Event) -> None:
        while True:
            share = self._make_share()
            try:
                await share.open()
            except Unavailable as error:
                if not tried.is_set():
                    logger.warning("the registry does not answer; until then this dispatcher works without it: %s", error.message)
                tried.set()
                await asyncio.sleep(RETRY_S)
                continue
            except TasukiError as error:
                if tried.is_set():
                    logger.error("the registry cannot be used: %s", error.message)
                raise
            self._share = share
            self._is_back(share)
            return

    def _is_back(self, share: StoreClient) -> None:
        logger.info("the registry answers")
        given_up = registry_records.given_up(self._holder.name)
        self._records = RegistryQueries(share, self._holder, given_up, lambda size_bytes: None, ANSWER_S)

    async def close(self) -> None:
        for queued in self._queued.all():
            self._end(queued)
        await self._reports.wait()
        await self._tasks.close()
        if self._share is not None:
            await self._share.close()

    # ------------------------------------------------------------------------------------------------ away

    async def _execute(self, turn: Turn) -> Answers:
        """Execute a turn that no request waits for."""
        found = await self._asked(lambda records: records.ask(turn))
        if found is None:
            raise Unavailable("the registry does not answer; try again later")
        return found

    async def _asked(self, question: Callable[[RegistryQueries], Awaitable[T]]) -> T | None:
        """Ask the registry; None if it is away."""
        if self._records is None:
            return None
        try:
            return await question(self._records)
        except RegistryUnavailable:
            self._is_away()
            return None

    def _is_away(self) -> None:
        """Note that the registry is away: one turn waits for it, and no request does."""
        if self._records is not None:
            self._records = None
            logger.warning("the registry does not answer; until then this dispatcher works without it")
            self._tasks.spawn(self._wait_for_it())

    async def _wait_for_it(self) -> None:
        share = self._share
        assert share is not None
        while True:
            try:
                await share.execute(Turn(get=["-"]))
            except TasukiError:
                await asyncio.sleep(RETRY_S)
                continue
            self._is_back(share)
            return

    # ------------------------------------------------------------------------------------------------ reading

    async def read(self, job_id: str) -> Job | None:
        """Return a job; None also if the registry is away. An expired lease does not count, even without an agent to end it."""
        job = await self._asked(lambda records: records.get(job_id))
        if registry_state_of(job, None) in (RegistryState.HELD, RegistryState.QUEUED):
            job = await self._asked(lambda records: records.look(job_id))
        return job

    async def look(self, job_id: str, sent: str | None) -> Response | None:
        """Return the result, if the registry has it and the input is the same, before an upload is read. 409, 423."""
        done = registry_queries.done_or_refused(await self._asked(lambda records: records.look(job_id)), sent)
        return None if done is None else await self.result(done, "hit")

    async def result(self, job: Job, cache: str | None = None) -> Response | None:
        """Return the result, if it outlives its node and can be read now."""
        found = await self._asked(lambda records: records.stored(job, cache))
        if found is None or isinstance(found, Response):
            return found
        ended, source = found
        try:
            return await self._asked(lambda records: records.opened(ended, source, cache))
        except AgentRefusal:  # the store of results is away; the node may have it
            return None

    # ------------------------------------------------------------------------------------------------ recording

    async def run(
        self, job_id: str, sent: str | None, stored: StoredForm, send: Callable[[], Coroutine[Any, Any, Response]]
    ) -> Response:
        """Have the job sent to a node, and record that it waits until then. Return the result if the registry has it."""
        exec_, found = stored.exec, stored.input
        if exec_ is None or found is None or sent not in (None, found):  # the agent decides
            return await send()
        submission = registry_records.submission_of(job_id, exec_, found)
        try:
            claimed = await self._asked(lambda records: records.claim(submission))
        except Unavailable as error:
            logger.info("job %s: %s", job_id, error.message)
            claimed = None
        if isinstance(claimed, Job):
            if registry_state_of(claimed, None) is RegistryState.HELD:
                raise registry_queries.is_held(claimed)
            return await self.result(claimed, "hit") or await send()
        if not isinstance(claimed, RegistryGrant):
            return await send()
        queued = QueuedJob(self._holder.held(claimed.grant), self._queued)
        try:
            answer = await queued.unless_canceled(send())
        except BaseException:
            self._end(queued)
            raise
        if answer.status_code == refusals.LOCKED:  # another request brought it there: the job still waits for that one
            self._queued.drop(queued)
        else:
            self._end(queued)
        return answer

    def _end(self, queued: RegistryLease) -> None:
        """Report that nobody waits for the job any more. The store refuses the report if a node has taken the lease over."""
        if self._queued.drop(queued):
            self._reports.spawn(self._report_given_up(queued.held))

    async def _report_given_up(self, held: HeldLease) -> None:
        try:
            await self._execute(Turn(fail=[registry_queries.report_of(held, registry_records.given_up(self._holder.name))]))
        except TasukiError as error:  # the lease expires
            logger.info("job %s: its waiting entry could not be removed from the registry: %s", held.job_id, error.message)

    async def remove(self, job_id: str) -> RemovalResult | None:
        """Remove a job that no node could be asked to remove. Its node, if any, keeps the folder until its next start."""
        job = await self._asked(lambda records: records.remove(job_id))
        if job is None:
            return None
        place = result_location_of(job)
        return RemovalResult(registry_records.state_of(job), left_at=place.ended.node if place is not None else "")


def refusal_of(job: Job) -> TasukiError:
    """Return the refusal of a job whose result cannot be read, if no node answers more."""
    if registry_state_of(job, None) in (RegistryState.HELD, RegistryState.QUEUED):
        return registry_queries.is_held(job)
    place = result_location_of(job)
    if place is None:
        return NotFound(f"job {job.job_id} has no result: it did not come to its end; send it again to run it")
    node = place.ended.node
    return refusals.result_away(job.job_id, node, Unavailable(f"{node} does not answer"))
