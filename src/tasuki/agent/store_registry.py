"""Registry that agents share, in a tasuki store (Redis or PostgreSQL): a run is a lease, fenced like every lease.

Theory of operation. `core/failover/registry_records.py` defines the records, `registry_queries.py` the queries. A claim is
one turn: submit the job, or set it going again, and lease exactly that job. Its end is a `finish` or `fail` with that
lease, which counts only if the lease is still current; until the store has confirmed it, nobody is shown the result. Before
a claim is requested, a note of it is on this node's disk; a node that was killed settles its notes at the next start,
before its port opens.

While the store is away, nothing new is run. A running job continues until its lease expires, and one that
ended meanwhile waits for the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from starlette.responses import Response

from tasuki.agent import refusals, registry_queries
from tasuki.agent.folders import JobFolders
from tasuki.agent.refusals import log_context
from tasuki.agent.registry_queries import Holder, RegistryGrant, RegistryLease, RegistryLeases, RegistryQueries
from tasuki.agent.results import Peers, RemoteResultResponse, ResultElsewhere, ResultSource
from tasuki.blobs.blob import BlobStore
from tasuki.blobs.files import disk_full_as_error, durable_write, sync_folder
from tasuki.core.address import Address
from tasuki.core.failover import registry_records
from tasuki.core.failover.agent_protocol import AgentOutcome, EndedMarker, RemovalResult, RunningMarker
from tasuki.core.failover.registry_records import RegistryState
from tasuki.core.job import RESULT_INLINE_MAX_BYTES, Job, Outcome, check_job_id
from tasuki.core.store_messages import BlobClaim, BlobPlace, HeldLease, LeaseStatus, ReportStatus, RequeueOrder, Turn
from tasuki.core.worker.machine import lease_deadline
from tasuki.errors import AgentRefusal, ConfigError, InternalError, InvalidInput, TasukiError, Unavailable
from tasuki.server.assembly import StoreClient
from tasuki.worker.attempt import StopReason

logger = logging.getLogger("tasuki.agent")
ANSWER_S = 5.0  # for a report that nobody waits for
RETRY_S = 1.0
REFUSALS_MAX = 15
AGAIN_TRIES = 3  # of a job whose result nobody has
COMPARED = 64  # jobs in one query: small results come with their bytes
BLOB_TRIES = 3
WRITE_BYTES = 1024 * 1024


class ClaimJournal:
    """Notes of the claims that an agent has not settled with the registry, in its data folder: for the next start, if it is
    killed."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._folder = data / "claims"

    def prepare(self) -> str:
        """Make missing folders and files; return the id of this node."""
        with disk_full_as_error(self._data):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            path = self._data / "node-id"
            with contextlib.suppress(FileNotFoundError):
                if len(known := path.read_text("ascii").strip()) == registry_records.ID_CHARS:
                    return known
            made = secrets.token_hex(registry_records.ID_CHARS // 2)
            durable_write(path, f"{made}\n".encode())
        return made

    def write(self, job_id: str) -> None:
        with disk_full_as_error(self._folder):
            (self._folder / check_job_id(job_id)).touch()
            sync_folder(self._folder)

    def remove(self, job_id: str) -> None:
        """Remove a note. Not durable: a note that is back after a power cut is settled once more."""
        (self._folder / check_job_id(job_id)).unlink(missing_ok=True)

    def left(self) -> list[str]:
        """Return the jobs that an earlier process did not settle."""
        found = []
        for path in sorted(self._folder.iterdir()):
            with contextlib.suppress(InvalidInput):  # other files are ignored
                found.append(check_job_id(path.name))
        return found


class StoreRegistry:
    """Registry of one agent. Made inside the running loop. Answers such as "running elsewhere" are raised as `AgentRefusal`."""

    _records: RegistryQueries
    _holder: Holder

    def __init__(
        self,
        share: StoreClient,
        notes: ClaimJournal,
        *,
        node: str,
        incarnation: str,
        ttl_s: float,
        peers: Peers,
        advertised: str = "",
    ) -> None:
        """`advertised`: the address for other nodes, if it is not the one on which the agent listens."""
        self._share = share
        self._notes = notes
        self._node = node
        self._peers = peers
        self._address = advertised
        self._incarnation = incarnation
        self._ttl_s = ttl_s
        self._leases = RegistryLeases(share.execute, ttl_s)
        self._hurried = asyncio.Event()
        self._is_open = False
        self._keeping: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------------ life

    async def open(
        self, folders: JobFolders, address: Address, *, renewed: Callable[[], None], sent: Callable[[int], None]
    ) -> None:
        """Settle what an earlier process of this node left, before the port opens. `address` is for other nodes. `renewed` is
        called when a `deadline` has moved, `sent` with the number of bytes of results sent."""
        self._address = self._address or str(address if address.reachable else replace(address, host=socket.gethostname()))
        own_id = registry_records.worker_id_of(self._node, await asyncio.to_thread(self._notes.prepare))
        self._holder = Holder(own_id, self._incarnation, self._ttl_s, self._node)
        self._leases.renewed = renewed
        self._records = RegistryQueries(self._share, self._holder, registry_records.interrupted(self._node), sent)
        self._share.on_cancel(lambda worker_id: self._leases.renew_now() if worker_id == own_id else None)
        await self._share.open()
        self._is_open = True
        for job_id in await asyncio.to_thread(self._notes.left):
            with log_context(job_id):
                await self._settle(job_id, folders)
        await self._drop_what_others_removed(folders)
        self._keeping = asyncio.create_task(self._leases.keep_renewing())

    async def close(self) -> None:
        self.hurry()
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._is_open:
            self._is_open = False
            await self._share.close()
        await self._peers.close()

    def hurry(self) -> None:
        """Stop waiting for a registry that is away; the next start settles what could not be recorded."""
        self._hurried.set()

    def deadline(self, job_id: str) -> float | None:
        """Return when the processes of a job must be gone (CLOCK_BOOTTIME)."""
        lease = self._leases.get(job_id)
        return None if lease is None else lease.deadline

    async def _settle(self, job_id: str, folders: JobFolders) -> None:
        """Record the end, or the lack of one, of a job that an earlier process claimed. A result that is too late is dropped."""
        job = (await self._share.execute(Turn(get=[job_id]))).get[0]
        ended = await asyncio.to_thread(folders.read, job_id)
        counts = True
        if job is not None and job.lease is not None and job.lease.worker_id == self._holder.worker_id:
            held = registry_records.held_of(job)
            if isinstance(ended, EndedMarker) and ended.attempt == registry_records.attempt_of(job):
                counts = await self._report(held, ended, await self._outcome(ended, folders.result(job_id)))
            else:
                await self._share.execute(Turn(fail=[registry_queries.report_of(held, registry_records.interrupted(self._node))]))
                logger.warning("job %s was claimed by an earlier process of this node; it is free again", job_id)
        elif job is not None and isinstance(ended, EndedMarker):
            counts = job.outcome is not None and job.outcome.result_sha256 == ended.result_sha256
        if not counts:
            _drop(job_id, folders, "the result here came too late, another node has it")
        await asyncio.to_thread(self._notes.remove, job_id)

    async def _drop_what_others_removed(self, folders: JobFolders) -> None:
        """Drop results that were removed or made again while this node was away: a job done here is answered from here."""
        kept = await asyncio.to_thread(_done_in, folders)
        for start in range(0, len(kept), COMPARED):
            some = kept[start : start + COMPARED]
            jobs = await self._records.get_all([ended.job_id for ended in some])
            for ended, job in zip(some, jobs, strict=True):
                if job is not None and registry_records.attempt_of(job) > ended.attempt:
                    with log_context(ended.job_id):
                        _drop(ended.job_id, folders, "its result was removed while this node was away")

    # ------------------------------------------------------------------------------------------------ questions

    async def look(self, job_id: str, sent_input: str | None) -> None:
        """Raise what `claim` would raise, as far as that is known before an upload is read."""
        done = registry_queries.done_or_refused(await self._records.look(job_id), sent_input)
        if done is not None and (answer := await self._answer(done, cache="hit")) is not None:
            raise ResultElsewhere(answer)

    async def find(self, job_id: str) -> Response | None:
        """Return the result from elsewhere, or raise where the job runs; None: only this node can have it."""
        job = await self._records.get(job_id)
        if job is None:
            return None
        if registry_records.registry_state_of(job, None) in (RegistryState.HELD, RegistryState.QUEUED):
            raise registry_queries.is_held(job)
        found = await self._source(job)
        if found is None or isinstance(found, Response):
            return found
        ended, source = found
        return RemoteResultResponse(ended, source, self._records.sent)

    async def describe(self, job_id: str) -> dict[str, Any] | None:
        job = await self._records.get(job_id)
        return None if job is None else registry_queries.described(job)

    # ------------------------------------------------------------------------------------------------ results

    async def _answer(self, job: Job, cache: str | None) -> Response | None:
        """Return the response with a result that can be read now; None if nobody has it any more."""
        found = await self._source(job, cache)
        if found is None or isinstance(found, Response):
            return found
        return await self._records.opened(*found, cache)

    async def _source(self, job: Job, cache: str | None = None) -> tuple[EndedMarker, ResultSource] | Response | None:
        """Return the source of a result; the response for a small one; None: only this node can have it."""
        found = await self._records.stored(job, cache)
        place = registry_records.result_location_of(job)
        if found is not None or place is None or self._is_ours(job, place):
            return found
        return place.ended, self._peers.source(place)

    def _is_ours(self, job: Job, place: registry_records.ResultLocation) -> bool:
        return place.address == self._address or job.assigned_worker_id == self._holder.worker_id

    # ------------------------------------------------------------------------------------------------ claims

    async def claim(self, running: RunningMarker, lost: Callable[[StopReason], None]) -> int:
        """Claim a job for this node; return the number of the attempt. Raises if another node runs it (423) or has its result
        (ResultElsewhere). The claim is renewed until `record` or `release`; `lost` is called when that fails, or when the job is
        canceled in the registry."""
        job_id = running.job_id
        await asyncio.to_thread(self._notes.write, job_id)
        try:
            granted = await self._granted(running)
        except (ResultElsewhere, AgentRefusal) as error:
            if isinstance(error, ResultElsewhere) or error.status < 500:  # else the claim may have been granted all the same
                await asyncio.to_thread(self._notes.remove, job_id)
            raise

        def ended(status: LeaseStatus) -> None:
            lost(StopReason.CANCELED if status is LeaseStatus.CANCEL else StopReason.LEASE_LOST)

        deadline = lease_deadline(granted.asked_at, self._ttl_s)
        self._leases.add(RegistryLease(self._holder.held(granted.grant), deadline, ended))
        return granted.attempt

    async def _granted(self, running: RunningMarker) -> RegistryGrant:
        job_id = running.job_id
        submission = registry_records.submission_of(job_id, running.exec, running.input)
        again: RequeueOrder | None = None
        for _ in range(AGAIN_TRIES):
            found = await self._records.claim(submission, again)
            if isinstance(found, RegistryGrant):
                return found
            if registry_records.registry_state_of(found, None) is RegistryState.HELD:
                raise registry_queries.is_held(found)
            if (answer := await self._answer(found, cache="hit")) is not None:
                raise ResultElsewhere(answer)
            again = RequeueOrder(job_id, self._holder.worker_id, "its result was deleted everywhere", found.generation)
        raise Unavailable(f"job {job_id} could not be claimed: its result was made and lost {AGAIN_TRIES} times; try again")

    # ------------------------------------------------------------------------------------------------ ends

    async def record(self, ended: EndedMarker, result: Path) -> bool:
        """Record the durable end of a job, and end its claim. False: the claim was lost before, and this end does not count."""
        lease = self._leases.get(ended.job_id)
        assert lease is not None
        try:
            outcome = await self._outcome(ended, result)
        except OSError as error:
            logger.error("job %s: its result cannot be read: %s", ended.job_id, error)
            await self.release(ended.job_id)
            return False
        lease.is_reported = True
        try:
            counts = await self._report(lease.held, ended, outcome)
        finally:
            self._leases.drop(lease)
        await asyncio.to_thread(self._notes.remove, ended.job_id)
        return counts

    async def _report(self, held: HeldLease, ended: EndedMarker, outcome: Outcome) -> bool:
        """Report an end until the store has answered; return whether it counts. A store that refuses us (its password was
        changed) may accept us again; if not, its error is raised, and the lease expires."""
        reports = [registry_queries.report_of(held, outcome, ended.started_at)]
        succeeded = ended.outcome is AgentOutcome.SUCCEEDED
        refusals = 0
        while True:
            try:
                answers = await self._share.execute(Turn(finish=reports) if succeeded else Turn(fail=reports))
            except (Unavailable, ConfigError, InternalError) as error:
                logger.warning("job %s: its end cannot be recorded yet: %s", ended.job_id, error.message)
                refusals += not isinstance(error, Unavailable)
                if refusals > REFUSALS_MAX:
                    raise
                await self._pause()
                continue
            [recorded] = answers.finish or answers.fail
            if recorded.answer is ReportStatus.BLOB_MISSING:
                outcome = registry_records.outcome_of(self._peers.location(ended, self._address))
                reports = [registry_queries.report_of(held, outcome, ended.started_at)]
                continue
            if recorded.answer is ReportStatus.FENCED:
                logger.warning("job %s: its lease was lost before its end was recorded: %s", ended.job_id, recorded.reason)
            return recorded.answer in (ReportStatus.RECORDED, ReportStatus.REPEATED)

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(RETRY_S):
                await self._hurried.wait()
        except TimeoutError:
            return
        raise refusals.registry_away()

    async def release(self, job_id: str) -> None:
        """End a claim without a result. If the store cannot be told, the lease expires."""
        lease = self._leases.get(job_id)
        if lease is None:
            return
        self._leases.drop(lease)
        lease.is_reported = True
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._share.execute(
                    Turn(fail=[registry_queries.report_of(lease.held, registry_records.interrupted(self._node))])
                )
        except (TimeoutError, TasukiError):
            logger.warning("job %s: its end without a result could not be written to the registry", job_id)
            return
        await asyncio.to_thread(self._notes.remove, job_id)

    async def forget(self, job_id: str) -> None:
        """Drop the result of a job whose run here was stopped to remove it, if it had ended here before."""
        job = await self._records.get(job_id)
        if job is not None and job.assigned_worker_id == self._holder.worker_id:
            await self._records.forget(job)

    async def remove(self, job_id: str) -> RemovalResult | None:
        """Stop and remove a job that does not run here, wherever it is; None if nobody knows it."""
        job = await self._records.remove(job_id)
        if job is None:
            return None
        state, place = registry_records.state_of(job), registry_records.result_location_of(job)
        if place is None or self._is_ours(job, place):
            return RemovalResult(state)
        try:
            await self._peers.remove(place)
        except TasukiError as error:
            logger.warning("job %s: %s keeps its folder until it is started again: %s", job_id, place.ended.node, error.message)
            return RemovalResult(state, left_at=place.ended.node)
        return RemovalResult(state)

    async def _outcome(self, ended: EndedMarker, result: Path) -> Outcome:
        """Return the outcome, with the result stored where it outlives this node if there is such a place."""
        place = self._peers.location(ended, self._address)
        if ended.result_bytes <= RESULT_INLINE_MAX_BYTES:
            return registry_records.outcome_of(place, result=await asyncio.to_thread(result.read_bytes))
        if self._share.blobs is not None:
            try:
                await self._keep(self._share.blobs, ended, result)
                return registry_records.outcome_of(place, is_blob=True)
            except (TasukiError, OSError) as error:
                logger.warning("job %s: its result stays at this node, it could not be copied: %s", ended.job_id, error)
        return registry_records.outcome_of(place)

    async def _keep(self, blobs: BlobStore, ended: EndedMarker, result: Path) -> None:
        claims = [BlobClaim(ended.result_sha256, ended.result_bytes)]
        for _ in range(BLOB_TRIES):
            place = (await self._share.execute(Turn(place_blobs=claims))).place_blobs[0]
            if place.stored and await asyncio.to_thread(blobs.has, place.sha256, place.generation):
                return
            await asyncio.to_thread(_copy, blobs, place, result)
            if (await self._share.execute(Turn(blobs_stored=[place]))).blobs_stored[0]:
                return
        raise Unavailable(f"blob {ended.result_sha256} was deleted {BLOB_TRIES} times while it was stored")


def _done_in(folders: JobFolders) -> list[EndedMarker]:
    found = (folders.read(job_id) for job_id in folders.job_ids())
    return [marker for marker in found if isinstance(marker, EndedMarker) and marker.outcome is AgentOutcome.SUCCEEDED]


def _drop(job_id: str, folders: JobFolders, why: str) -> None:
    if folders.discard(job_id):
        logger.warning("job %s: %s", job_id, why)


def _copy(blobs: BlobStore, place: BlobPlace, result: Path) -> None:
    with result.open("rb") as file, blobs.begin(place.sha256, place.size_bytes, place.generation) as writer:
        while piece := file.read(WRITE_BYTES):
            writer.write(piece)
        writer.commit()
