"""The registry that agents share, in a store of tasuki's (Redis or PostgreSQL): a run is a lease, fenced as everywhere.

Theory of operation. What is written is in `core/agent_claim.py`. A claim is one turn: submit the job, or set it going again, and
lease exactly it. Its end is a `finish` or `fail` with that lease, which counts only if the lease is still the current one; until
the store has said so, nobody is shown the result. Before a claim is asked for, a note of it is on this node's disk; a node that
was killed settles its notes at its next start, before its port opens.

Where the store does not answer, nothing new is run. What runs goes on until its lease is over (`leases.py`), and what ended
meanwhile waits for the store's word.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from starlette.responses import Response

from tasuki.blobs.blob import BlobStore
from tasuki.core import agent_claim
from tasuki.core.address import Address
from tasuki.core.agent_claim import Stand, interrupted, outcome_of, place_of, stand_of
from tasuki.core.agent_job import AgentOutcome, EndedMarker, RunningMarker
from tasuki.core.job import RESULT_INLINE_MAX_BYTES, Job, Lease, Outcome
from tasuki.core.verbs import Answer, Answers, BlobClaim, BlobPlace, Grant, Held, LeaseRequest, Turn
from tasuki.doors.agent import answers
from tasuki.doors.agent.claim_notes import ClaimNotes
from tasuki.doors.agent.correlation import on_behalf_of
from tasuki.doors.agent.downloads import ResultAnswer
from tasuki.doors.agent.elsewhere import BlobSource, ElsewhereAnswer, Peers, PeerSource, Source
from tasuki.doors.agent.folders import JobFolders
from tasuki.doors.agent.leases import Claim, Leases, Lost, boot_time
from tasuki.doors.agent.registry import AnsweredElsewhere
from tasuki.errors import Conflict, NotFound, TasukiError, Unavailable
from tasuki.server.share import Share
from tasuki.worker.folder import remove_tree

logger = logging.getLogger("tasuki.agent")
ANSWER_S = 5.0  # of a registry that somebody waits for
RETRY_S = 1.0
CLAIM_TRIES = 4  # a lease that is over ends first, and is claimed by the next; another node may come in between
BLOB_TRIES = 3
WRITE_BYTES = 1024 * 1024


class SharedRegistry:
    """One agent's part in it. Made inside the running loop."""

    def __init__(
        self,
        share: Share,
        notes: ClaimNotes,
        *,
        node: str,
        incarnation: str,
        ttl_s: float,
        peers: Peers,
        advertised: str = "",
    ) -> None:
        """`advertised`: where others reach this node, if not at the address that it listens on."""
        self._share = share
        self._notes = notes
        self._node = node
        self._peers = peers
        self._address = advertised
        self._sent: Callable[[int], None] = lambda size_bytes: None
        self._leases = Leases(share.execute, "", incarnation, ttl_s)
        self._hurried = asyncio.Event()
        self._is_open = False
        self._keeping: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------------ life

    async def open(
        self, folders: JobFolders, address: Address, *, renewed: Callable[[], None], sent: Callable[[int], None]
    ) -> None:
        self._address = self._address or str(address if address.reachable else replace(address, host=socket.gethostname()))
        self._leases.worker_id = agent_claim.worker_id_of(self._node, await asyncio.to_thread(self._notes.prepare))
        self._leases.renewed, self._sent = renewed, sent
        await self._share.open()
        self._is_open = True
        for job_id in await asyncio.to_thread(self._notes.left):
            with on_behalf_of(job_id):
                await self._settle(job_id, folders)
        self._keeping = asyncio.create_task(self._leases.keep())

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
        self._hurried.set()

    def deadline(self, job_id: str) -> float | None:
        claim = self._leases.get(job_id)
        return None if claim is None else claim.deadline

    async def _settle(self, job_id: str, folders: JobFolders) -> None:
        """An earlier process had claimed it: record how it ended, or that it did not. A result that came too late is none."""
        job = (await self._share.execute(Turn(get=[job_id]))).get[0]
        ended = await asyncio.to_thread(folders.read, job_id)
        counts = True
        if job is not None and job.lease is not None and job.lease.worker_id == self._leases.worker_id:
            claim = Claim(_held(job_id, job.lease, self._leases.ttl_s), boot_time())
            if isinstance(ended, EndedMarker) and ended.attempt == job.lease.attempt:
                counts = await self._report(claim, ended, await self._outcome(ended, folders.result(job_id)))
            else:
                await self._share.execute(Turn(fail=[claim.report(interrupted(self._node))]))
                logger.warning("job %s was claimed by an earlier process of this node; it is free again", job_id)
        elif job is not None and isinstance(ended, EndedMarker):
            counts = job.outcome is not None and job.outcome.result_sha256 == ended.result_sha256
        if not counts and (place := folders.discard(job_id)) is not None:
            logger.warning("job %s: the result here came too late, another node has it", job_id)
            await asyncio.to_thread(remove_tree, place)
        await asyncio.to_thread(self._notes.remove, job_id)

    # ------------------------------------------------------------------------------------------------ questions

    async def look(self, job_id: str, sent_input: str | None) -> None:
        """With no loss left, a lease that is over is ended by asking for it, and nothing is granted."""
        request = self._request(job_id)
        found = await self._ask(Turn(lease=[request], get=[job_id]))
        if found.lease[0]:  # an operator's requeue: it waits for a node
            await self._ask(Turn(release=[self._leases.held_of(found.lease[0][0])]))
            return
        job = found.get[0]
        match stand_of(job, sent_input):
            case Stand.OTHER_INPUT:
                raise answers.other_input(job_id)
            case Stand.HELD:
                assert job is not None
                raise self._running(job)
            case Stand.DONE if sent_input is not None:
                assert job is not None
                if (answer := await self._answer(job, cache="hit")) is not None:
                    raise AnsweredElsewhere(answer)

    async def find(self, job_id: str) -> Response | None:
        job = (await self._ask(Turn(get=[job_id]))).get[0]
        if job is None:
            return None
        if stand_of(job, None) is Stand.HELD:
            raise self._running(job)
        found = await self._source(job)
        if found is None or isinstance(found, Response):
            return found
        ended, source = found
        return ElsewhereAnswer(ended, source, self._sent)

    async def describe(self, job_id: str) -> dict[str, Any] | None:
        job = (await self._ask(Turn(get=[job_id]))).get[0]
        if job is None or job.assigned_worker_id is None:
            return None
        place = place_of(job)
        progress = job.progress
        return {
            "job_id": job_id,
            "state": agent_claim.state_of(job).value,
            "exec": job.spec.exec,
            "input": agent_claim.input_of(job),
            "attempt": job.attempt,
            "started_at": job.started_at or job.assigned_at,
            "ended_at": job.finished_at,
            "exit_code": None if place is None else place.ended.exit_code,
            "progress": None if progress is None else {"fraction": progress.fraction, "message": progress.text},
            "node": agent_claim.node_of(job.assigned_worker_id),
        }

    def _running(self, job: Job) -> TasukiError:
        assert job.lease is not None
        return answers.is_running(job.job_id, agent_claim.node_of(job.lease.worker_id), job.started_at or job.assigned_at or 0.0)

    # ------------------------------------------------------------------------------------------------ results

    async def _answer(self, job: Job, cache: str | None) -> Response | None:
        """To a POST: the result, once it is sure that it can be had; None if nobody has it any more."""
        found = await self._source(job, cache)
        if found is None or isinstance(found, Response):
            return found
        ended, source = found
        answer = ElsewhereAnswer(ended, source, self._sent, cache)
        try:
            await answer.open()
        except NotFound as error:
            logger.warning("job %s runs again: %s", job.job_id, error.message)
            return None
        except TasukiError as error:
            logger.warning("job %s: its result cannot be had: %s", job.job_id, error.message)
            raise answers.result_away(job.job_id, ended.node, error) from None
        return answer

    async def _source(self, job: Job, cache: str | None = None) -> tuple[EndedMarker, Source] | Response | None:
        """Where the result is; what is small is there at once. None: at this node, if anywhere."""
        place, outcome = place_of(job), job.outcome
        if place is None or outcome is None:
            return None
        if outcome.result is not None:
            return ResultAnswer(place.ended, outcome.result, self._sent, cache)
        if outcome.result_ref is not None and self._share.blobs is not None:
            at = await self._blob_place(place.ended)
            return place.ended, BlobSource(self._share.blobs, at)
        if place.address == self._address or job.assigned_worker_id == self._leases.worker_id:
            return None
        return place.ended, PeerSource(self._peers, place.address, place.ended)

    async def _blob_place(self, ended: EndedMarker) -> BlobPlace:
        return (await self._ask(Turn(place_blobs=[BlobClaim(ended.result_sha256, ended.result_bytes)]))).place_blobs[0]

    # ------------------------------------------------------------------------------------------------ claims

    async def claim(self, running: RunningMarker, lost: Lost) -> int:
        job_id = running.job_id
        await asyncio.to_thread(self._notes.write, job_id)
        try:
            grant, asked_at = await self._granted(running)
        except (AnsweredElsewhere, answers.AgentRefusal) as error:
            if isinstance(error, AnsweredElsewhere) or error.status < 500:  # else it may have been granted all the same
                await asyncio.to_thread(self._notes.remove, job_id)
            raise
        self._leases.add(grant, asked_at, lost)
        return grant.attempt

    async def _granted(self, running: RunningMarker) -> tuple[Grant, float]:
        job_id = running.job_id
        submission = agent_claim.submission_of(job_id, running.exec, running.input)
        again: tuple[tuple[str, str, str], ...] = ()
        for _ in range(CLAIM_TRIES):
            asked_at = boot_time()
            turn = Turn(requeue=again, rerun=[submission], lease=[self._request(job_id)], get=[job_id])
            found = await self._ask(turn)
            if isinstance(found.rerun[0], Conflict):
                raise answers.other_input(job_id)
            if found.lease[0]:
                return found.lease[0][0], asked_at
            job = found.get[0]
            match stand_of(job, None):
                case Stand.HELD:
                    assert job is not None
                    raise self._running(job)
                case Stand.DONE:
                    assert job is not None
                    if (answer := await self._answer(job, cache="hit")) is not None:
                        raise AnsweredElsewhere(answer)
                    again = ((job_id, self._leases.worker_id, "nobody has its result any more"),)
        raise Unavailable(f"job {job_id} could not be claimed: others were quicker {CLAIM_TRIES} times; try again")

    def _request(self, job_id: str) -> LeaseRequest:
        leases = self._leases
        return LeaseRequest(
            worker_id=leases.worker_id, incarnation=leases.incarnation, job_ids=(job_id,), limit=1, ttl_s=leases.ttl_s
        )

    async def _ask(self, turn: Turn) -> Answers:
        """For somebody who waits. A lease that is granted after that is given back: nobody runs what it was for."""
        asking = asyncio.ensure_future(self._share.execute(turn))
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.shield(asking)
        except (TimeoutError, Unavailable) as error:
            asking.add_done_callback(self._give_back)
            logger.warning("the registry did not answer: %s", error if isinstance(error, Unavailable) else f"in {ANSWER_S:g} s")
            raise answers.registry_away() from None
        except asyncio.CancelledError:
            asking.add_done_callback(self._give_back)
            raise

    def _give_back(self, asking: asyncio.Future[Answers]) -> None:
        if asking.cancelled() or asking.exception() is not None:
            return
        claims = [Claim(self._leases.held_of(grant), 0.0) for granted in asking.result().lease for grant in granted]
        if claims:
            told = asyncio.ensure_future(
                self._share.execute(Turn(fail=[claim.report(interrupted(self._node)) for claim in claims]))
            )
            told.add_done_callback(_look_at)

    # ------------------------------------------------------------------------------------------------ ends

    async def record(self, ended: EndedMarker, result: Path) -> bool:
        claim = self._leases.get(ended.job_id)
        assert claim is not None
        try:
            outcome = await self._outcome(ended, result)
        except OSError as error:
            logger.error("job %s: its result cannot be read: %s", ended.job_id, error)
            await self.release(ended.job_id)
            return False
        claim.is_told = True
        counts = await self._report(claim, ended, outcome)
        self._leases.drop(ended.job_id)
        await asyncio.to_thread(self._notes.remove, ended.job_id)
        return counts

    async def _report(self, claim: Claim, ended: EndedMarker, outcome: Outcome) -> bool:
        """Until the store has answered; whether it counts."""
        reports = [claim.report(outcome, ended.started_at)]
        succeeded = ended.outcome is AgentOutcome.SUCCEEDED
        while True:
            try:
                told = await self._share.execute(Turn(finish=reports) if succeeded else Turn(fail=reports))
            except Unavailable as error:
                logger.warning("job %s: its end cannot be recorded yet: %s", ended.job_id, error.message)
                await self._pause()
                continue
            [recorded] = told.finish or told.fail
            if recorded.answer is Answer.BLOB_MISSING:
                outcome = outcome_of(ended, self._address)
                reports = [claim.report(outcome, ended.started_at)]
                continue
            if recorded.answer is Answer.FENCED:
                logger.warning("job %s: its lease was lost before its end was recorded: %s", ended.job_id, recorded.reason)
            return recorded.answer in (Answer.RECORDED, Answer.REPEATED)

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(RETRY_S):
                await self._hurried.wait()
        except TimeoutError:
            return
        raise answers.registry_away()

    async def release(self, job_id: str) -> None:
        """If the store does not hear of it, the lease is over in time."""
        claim = self._leases.drop(job_id)
        if claim is None:
            return
        claim.is_told = True
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._share.execute(Turn(fail=[claim.report(interrupted(self._node))]))
        except (TimeoutError, Unavailable):
            logger.warning("job %s: the registry was not told that it ended without a result", job_id)
            return
        await asyncio.to_thread(self._notes.remove, job_id)

    async def forget(self, job_id: str) -> None:
        """As if another attempt had been made, and come to nothing."""
        job = (await self._ask(Turn(get=[job_id]))).get[0]
        if job is None or place_of(job) is None or job.assigned_worker_id != self._leases.worker_id:
            return
        again = [(job_id, self._leases.worker_id, "its result was removed")]
        found = await self._ask(Turn(requeue=again, lease=[self._request(job_id)]))
        if found.lease[0]:
            claim = Claim(self._leases.held_of(found.lease[0][0]), 0.0)
            await self._ask(Turn(fail=[claim.report(interrupted(self._node))]))

    async def _outcome(self, ended: EndedMarker, result: Path) -> Outcome:
        """With the result where it outlives this node, if there is such a place."""
        if ended.result_bytes <= RESULT_INLINE_MAX_BYTES:
            return outcome_of(ended, self._address, result=await asyncio.to_thread(result.read_bytes))
        if self._share.blobs is not None:
            try:
                await self._keep(self._share.blobs, ended, result)
                return outcome_of(ended, self._address, is_blob=True)
            except (TasukiError, OSError) as error:
                logger.warning("job %s: its result stays at this node, it could not be copied: %s", ended.job_id, error)
        return outcome_of(ended, self._address)

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


def _copy(blobs: BlobStore, place: BlobPlace, result: Path) -> None:
    with result.open("rb") as file, blobs.begin(place.sha256, place.size_bytes, place.generation) as writer:
        while piece := file.read(WRITE_BYTES):
            writer.write(piece)
        writer.commit()


def _held(job_id: str, lease: Lease, ttl_s: float) -> Held:
    return Held(job_id, lease.worker_id, lease.incarnation, lease.lease_id, lease.attempt, ttl_s)


def _look_at(told: asyncio.Future[Answers]) -> None:
    if not told.cancelled():
        told.exception()
