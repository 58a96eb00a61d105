"""Workers of apps over HTTP: one virtual worker connection per worker_id at this server, kept while requests come.

A lease request is credit for as long as it waits; at its end the unused credit is taken back. A job that is assigned when no
request waits any more is released unstarted, which costs it no attempt. A leased job is reported as started a little later,
unless it has ended by then, so that a short job costs one write less.

All connections of a worker have the incarnation of its token: each lease lives by its own renewals, at any server, and a worker
process that starts again does not know the old ones. The lease_id that a worker sees is `<lease_id>.<attempt>`: with it any
server can renew or record the attempt, whichever server granted it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeVar

import msgspec

from tasuki.core import protocol
from tasuki.core.job import BlobRef, OnDisconnect, Outcome
from tasuki.core.store_messages import Grant, LeaseStatus, Takes
from tasuki.doors.http.virtual_connection import ANSWER_TIMEOUT_S, Caller, VirtualConnection
from tasuki.errors import ProtocolError, TasukiError, TooManyRequests, Unauthorized, Unavailable
from tasuki.event_loop import ignore_result
from tasuki.server.server import Server

T = TypeVar("T")
STARTED_AFTER_S = 0.5  # below what the server waits before it delivers an assignment again
WAITING_MAX = 16  # lease requests of one worker at once
LATEST_REPORTS_S = 60.0  # how long an answered lease is remembered beyond its ttl


class AnsweredLease(msgspec.Struct):
    """A lease that a request was answered with."""

    claim: protocol.Claim
    at_wall: float
    until: float
    """Time at which the lease is forgotten, however the attempt ended."""
    started: bool = False


class _LeaseRequest:
    """A lease request that waits for jobs."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.grants: list[Grant] = []
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def room(self) -> int:
        return 0 if self.over.done() else self.wanted - len(self.grants)

    def end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


def shown_lease_id(grant: Grant) -> str:
    """Return the lease_id as workers see it."""
    return f"{grant.lease_id}.{grant.attempt}"


def claim_of(job_id: str, lease_id: str) -> protocol.Claim:
    """Return the claim that a worker shows; a malformed lease_id becomes one that nobody holds."""
    inner, _, attempt = lease_id.rpartition(".")
    is_number = attempt.isascii() and attempt.isdecimal() and len(attempt) <= 18
    return protocol.Claim(job_id, inner, int(attempt)) if is_number else protocol.Claim(job_id, "", 0)


def _raise_if_refused(connection: VirtualConnection, looked: asyncio.Future[protocol.Message]) -> None:
    """Raise the reason why there is no job, if it is an ended token or a store that does not answer."""
    if isinstance(connection.closed, Unauthorized):
        raise connection.closed
    if looked.done() and not looked.cancelled() and connection.closed is None:
        looked.result()


class HttpWorker:
    """One worker of one app."""

    def __init__(self, server: Server, worker_id: str, subject: str, ttl_s: float) -> None:
        self.worker_id, self.subject, self.ttl_s = worker_id, subject, ttl_s
        self.users = 0
        self.used_at = 0.0
        self._server = server
        self._connection: VirtualConnection | None = None
        self._opening: asyncio.Future[VirtualConnection] | None = None
        self._waiting: deque[_LeaseRequest] = deque()
        self._answered: dict[str, AnsweredLease] = {}
        self._reports: defaultdict[str, list[asyncio.Future[str | None]]] = defaultdict(list)
        self._starting: asyncio.TimerHandle | None = None
        self._beat_at = 0.0

    def __enter__(self) -> Self:
        self.users += 1
        return self

    def __exit__(self, *error: object) -> None:
        self.users -= 1
        self.used_at = self._server.now().monotonic

    async def _open(self, caller: Caller) -> VirtualConnection:
        """Return the connection, opened if there is none. Several requests may want it at once."""
        if self._connection is not None:
            return self._connection
        if self._opening is None or self._opening.done():
            self._opening = asyncio.ensure_future(self._dial(caller))
        return await asyncio.shield(self._opening)

    async def _dial(self, caller: Caller) -> VirtualConnection:
        connection = VirtualConnection(self._server, caller.address, self._on_message, self._on_close)
        hello = protocol.HelloWorker(
            msg_id=connection.next_id(),
            worker_id=self.worker_id,
            incarnation=caller.identity.incarnation,
            token=caller.secret,
            agent="http",
            patterns=(self.subject,),
            on_disconnect=OnDisconnect.STOP,
            ttl_s=self.ttl_s,
            host=caller.address,
            takes=Takes.HANDLERS,
        )
        try:
            await connection.ask(hello)
        except BaseException:
            connection.leave()
            raise
        self._connection = connection
        return connection

    # ------------------------------------------------------------------------------------------------ lease

    async def lease(self, caller: Caller, wanted: int, wait_s: float, left: asyncio.Future[None]) -> list[Grant]:
        """Lease up to `wanted` jobs, as soon as there is one; none when the time is over, or the peer has left."""
        connection = await self._open(caller)
        if len(self._waiting) >= WAITING_MAX:
            raise TooManyRequests(f"worker {self.worker_id!r} has {WAITING_MAX} lease requests open; wait for their answers")
        request = _LeaseRequest(wanted)
        self._waiting.append(request)
        connection.tell(protocol.GiveCredit(wanted))
        looked = asyncio.ensure_future(connection.ask(protocol.Heartbeat(connection.next_id())))
        looked.add_done_callback(ignore_result)  # where jobs came, its error is not the answer
        ends: set[asyncio.Future[Any]] = {request.over, left}
        is_wanted = False
        try:
            if wait_s:
                await asyncio.wait(ends, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            # The heartbeat is in the same turn as the credit: once it is answered, all jobs that there were have come. To end
            # before that, because the time was short, would release a job that was just granted.
            await asyncio.wait({*ends, looked}, return_when=asyncio.FIRST_COMPLETED)
            is_wanted = not left.done()
        finally:
            self._waiting.remove(request)
            request.end()
            if unused := wanted - len(request.grants):
                connection.tell(protocol.GiveCredit(-unused))
            if not is_wanted and request.grants:
                self._release(connection, request.grants)
                request.grants = []
            if not looked.done():
                looked.cancel()
        if not request.grants:
            _raise_if_refused(connection, looked)
        self._note_answered(request.grants)
        return request.grants

    def _note_answered(self, grants: Sequence[Grant]) -> None:
        now = self._server.now()
        until = now.monotonic + self.ttl_s + LATEST_REPORTS_S
        for grant in grants:
            claim = protocol.Claim(grant.job_id, grant.lease_id, grant.attempt)
            self._answered[grant.lease_id] = AnsweredLease(claim, now.wall, until)
        if grants and self._starting is None:
            self._starting = asyncio.get_running_loop().call_later(STARTED_AFTER_S, self._report_started)

    def _report_started(self) -> None:
        """Report the leases as started that were answered and have not ended yet."""
        self._starting = None
        fresh = [lease for lease in self._answered.values() if not lease.started]
        for lease in fresh:
            lease.started = True
        if fresh and self._connection is not None:
            self._connection.tell(protocol.JobsStarted([lease.claim for lease in fresh]))

    def _assigned(self, message: protocol.AssignJobs) -> None:
        unwanted = []
        for grant in message.grants:
            if grant.lease_id in self._answered:  # delivered again
                continue
            request = next((one for one in self._waiting if one.room), None)
            if request is None:
                unwanted.append(grant)
            else:
                request.grants.append(grant)
        for request in self._waiting:
            if request.grants and not request.over.done():
                asyncio.get_running_loop().call_soon(request.end)  # after all jobs of the same turn
        if unwanted and self._connection is not None:
            self._release(self._connection, unwanted)

    def _release(self, connection: VirtualConnection, grants: Sequence[Grant]) -> None:
        claims = [protocol.Claim(grant.job_id, grant.lease_id, grant.attempt) for grant in grants]
        connection.tell(protocol.JobsReleased(claims, "the lease request that it came for was over"))

    # ------------------------------------------------------------------------------------------------ renew, report

    async def renew(self, caller: Caller, claims: Sequence[protocol.Claim]) -> list[LeaseStatus]:
        """Renew leases and return the status of each."""
        answer = await _again_if_closed(lambda: self._beat(caller, claims))
        assert isinstance(answer, protocol.HeartbeatAnswer)
        cancel, lost = set(answer.cancel), set(answer.lost)
        return [
            LeaseStatus.LOST if claim.lease_id in lost else LeaseStatus.CANCEL if claim.lease_id in cancel else LeaseStatus.GO_ON
            for claim in claims
        ]

    async def _beat(self, caller: Caller, claims: Sequence[protocol.Claim]) -> protocol.Message:
        connection = await self._open(caller)
        return await connection.ask(protocol.Heartbeat(connection.next_id(), list(claims)))

    async def put_blob(self, caller: Caller, data: bytes) -> BlobRef:
        """Store a result that is too large for the store's row."""
        return await (await self._open(caller)).put_blob(data)

    async def report(self, caller: Caller, reports: Sequence[tuple[protocol.Claim, Outcome]]) -> list[str | None]:
        """Report ends of attempts; for each return None if it was recorded (or repeated exactly), else why it is fenced."""
        endings = []
        for claim, outcome in reports:
            lease = self._answered.pop(claim.lease_id, None)
            started_at = lease.at_wall if lease is not None else None
            endings.append(protocol.Ending(claim.job_id, claim.lease_id, claim.attempt, outcome, started_at))
        return await _again_if_closed(lambda: self._report(caller, endings))

    async def _report(self, caller: Caller, endings: list[protocol.Ending]) -> list[str | None]:
        connection = await self._open(caller)
        await connection.flow()
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[str | None]] = []
        for ending in endings:
            answers.append(loop.create_future())
            self._reports[ending.lease_id].append(answers[-1])
        try:
            connection.tell(protocol.JobsFinished(endings))
            _, waiting = await asyncio.wait(answers, timeout=ANSWER_TIMEOUT_S)
            if waiting:
                raise connection.closed or Unavailable("the store has not recorded it yet; send it again")
            return [answer.result() for answer in answers]
        finally:
            for ending, answer in zip(endings, answers, strict=True):
                self._forget_report(ending.lease_id, answer)

    def _forget_report(self, lease_id: str, answer: asyncio.Future[str | None]) -> None:
        waiting = self._reports.get(lease_id, [])
        if answer in waiting:
            waiting.remove(answer)
        if not waiting:
            self._reports.pop(lease_id, None)
        answer.cancel()

    def _recorded(self, lease_id: str, reason: str | None) -> None:
        for answer in self._reports.get(lease_id, ())[:1]:
            self._reports[lease_id].remove(answer)
            if not answer.done():
                answer.set_result(reason)

    async def rotate(self, caller: Caller, token_id: str, sha256: str) -> dict[str, Any]:
        """Exchange the token and return the facts of the new one. The connection ends with the old token."""
        connection = await self._open(caller)
        params = {"token_id": token_id, "sha256": sha256}
        token = await connection.ask_body(protocol.Request(connection.next_id(), "worker.rotate", params))
        self.leave()
        return token

    # ------------------------------------------------------------------------------------------------ life

    def _on_message(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.AssignJobs):
            self._assigned(message)
        elif isinstance(message, protocol.JobsRecorded):  # cancels come with the answer to the next renewal
            for lease_id in message.recorded:
                self._recorded(lease_id, None)
            for lease_id, reason in message.fenced:
                self._recorded(lease_id, reason)

    def _on_close(self, error: TasukiError) -> None:
        """End all waiting requests; their workers ask again and get an answer from a new connection."""
        self._connection = None
        for request in self._waiting:
            request.end()
        for answers in self._reports.values():
            for answer in answers:
                if not answer.done():
                    answer.set_exception(error)

    def tick(self, now: float) -> None:
        """Forget old leases, and send a heartbeat while lease requests wait."""
        if self._answered:
            for lease_id in [lease_id for lease_id, lease in self._answered.items() if lease.until < now]:
                del self._answered[lease_id]
        if self._waiting and self._connection is not None and now - self._beat_at > self.ttl_s / 4:
            self._beat_at = now
            self._connection.tell(protocol.Heartbeat(self._connection.next_id()))

    def leave(self) -> None:
        """Close the connection, after everything was reported."""
        if self._starting is not None:
            self._starting.cancel()
            self._report_started()
        if self._connection is not None:
            self._connection.leave()


async def _again_if_closed(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask, and once more on a new connection if the first one was closed by a late hint that the worker is at another server: a
    worker may talk to several."""
    try:
        return await ask()
    except ProtocolError:
        return await ask()


class Workers:
    """All app workers that sent a request lately."""

    def __init__(self, server: Server, ttl_s: float) -> None:
        self._server = server
        self._ttl_s = ttl_s
        self._workers: dict[str, HttpWorker] = {}

    def of(self, worker_id: str, subject: str) -> HttpWorker:
        """Return the worker, to be used in `with`."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.subject != subject:
            if worker is not None:
                worker.leave()
            worker = self._workers[worker_id] = HttpWorker(self._server, worker_id, subject, self._ttl_s)
        return worker

    def tick(self) -> None:
        """Close the connections of workers that sent no request for a lease's lifetime."""
        now = self._server.now().monotonic
        for worker_id, worker in list(self._workers.items()):
            worker.tick(now)
            if not worker.users and now - worker.used_at > self._ttl_s:
                worker.leave()
                del self._workers[worker_id]

    def close(self) -> None:
        for worker in self._workers.values():
            worker.leave()
        self._workers.clear()
