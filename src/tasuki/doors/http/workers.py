"""Those who run jobs over HTTP: one virtual worker connection per worker_id at this server, kept while it is heard of.

A lease request is credit for as long as it waits; when it ends, what was not used is taken back. A job that comes when nobody
waits any more is given back unstarted, and costs it nothing. What was handed out is noted as started a little later, unless it
has ended by then, so that a short job costs one write less.

The lease_id that a worker sees is `<lease_id>.<attempt>`: with it any server can renew or record the attempt, whichever
granted it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Self

import msgspec

from tasuki.core.job import BlobRef, OnDisconnect, Outcome
from tasuki.core.protocol import (
    AssignJobs,
    Claim,
    Ending,
    GiveCredit,
    Heartbeat,
    HeartbeatAnswer,
    HelloWorker,
    JobsFinished,
    JobsRecorded,
    JobsReleased,
    JobsStarted,
    Message,
    Reply,
    Request,
)
from tasuki.core.store_messages import Grant, LeaseStatus, Takes
from tasuki.doors.http.authentication import Caller
from tasuki.doors.http.virtual_connection import ANSWER_TIMEOUT_S, VirtualConnection
from tasuki.errors import TasukiError, TooManyRequests, Unauthorized, Unavailable
from tasuki.server.server import Server

INCARNATION = "http"  # its leases live by the renewals of each; a process that starts again does not know the old ones
STARTED_AFTER_S = 0.5  # below what the server waits before it delivers an assignment again
WAITING_MAX = 16  # lease requests of one worker at once
LATEST_REPORTS_S = 60.0  # how long a lease that was handed out is remembered beyond its ttl


class Handed(msgspec.Struct):
    """A lease that some request was answered with."""

    claim: Claim
    at_wall: float
    until: float
    """When it is forgotten, whatever became of it."""
    started: bool = False


class _Waiting:
    """A lease request."""

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
    return f"{grant.lease_id}.{grant.attempt}"


def claim_of(job_id: str, lease_id: str) -> Claim:
    """What a worker shows; a lease_id that is none is one that nobody holds."""
    inner, _, attempt = lease_id.rpartition(".")
    is_number = attempt.isascii() and attempt.isdecimal() and len(attempt) <= 18
    return Claim(job_id, inner, int(attempt)) if is_number else Claim(job_id, "", 0)


def _note_error(looked: asyncio.Future[Message]) -> None:
    """Seen, whether or not it is the answer: where jobs came all the same, it is not."""
    if not looked.cancelled():
        looked.exception()


def _raise_if_refused(talk: VirtualConnection, looked: asyncio.Future[Message]) -> None:
    """There is no job: because the token is over, because the store does not answer, or because there is none."""
    if isinstance(talk.closed, Unauthorized):
        raise talk.closed
    if looked.done() and not looked.cancelled() and talk.closed is None:
        looked.result()


class HttpWorker:
    """One worker of one app."""

    def __init__(self, server: Server, worker_id: str, subject: str, ttl_s: float) -> None:
        self.worker_id, self.subject, self.ttl_s = worker_id, subject, ttl_s
        self.users = 0
        self.used_at = 0.0
        self._server = server
        self._talk: VirtualConnection | None = None
        self._opening: asyncio.Future[VirtualConnection] | None = None
        self._waiting: deque[_Waiting] = deque()
        self._handed: dict[str, Handed] = {}
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
        """The connection, new if there is none. Several requests may want it at once."""
        if self._talk is not None:
            return self._talk
        if self._opening is None or self._opening.done():
            self._opening = asyncio.ensure_future(self._dial(caller))
        return await asyncio.shield(self._opening)

    async def _dial(self, caller: Caller) -> VirtualConnection:
        talk = VirtualConnection(self._server, caller.address, self._hear, self._closed)
        hello = HelloWorker(
            msg_id=talk.next_id(),
            worker_id=self.worker_id,
            incarnation=INCARNATION,
            token=caller.secret,
            agent="http",
            patterns=(self.subject,),
            on_disconnect=OnDisconnect.STOP,
            ttl_s=self.ttl_s,
            host=caller.address,
            takes=Takes.HANDLERS,
        )
        try:
            await talk.hello(hello)
        except BaseException:
            talk.leave()
            raise
        self._talk = talk
        return talk

    # ------------------------------------------------------------------------------------------------ lease

    async def lease(self, caller: Caller, wanted: int, wait_s: float, gone: asyncio.Future[None]) -> list[Grant]:
        """Up to `wanted` jobs, as soon as there is one; none when the time is over, or the one who asked is `gone`."""
        talk = await self._open(caller)
        if len(self._waiting) >= WAITING_MAX:
            raise TooManyRequests(f"worker {self.worker_id!r} has {WAITING_MAX} lease requests open; wait for their answers")
        waiting = _Waiting(wanted)
        self._waiting.append(waiting)
        talk.tell(GiveCredit(wanted))
        msg_id = talk.next_id()
        looked = asyncio.ensure_future(talk.ask(msg_id, Heartbeat(msg_id)))
        looked.add_done_callback(_note_error)
        ends: set[asyncio.Future[Any]] = {waiting.over, gone}
        is_wanted = False
        try:
            if wait_s:
                await asyncio.wait(ends, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            # It stands in the same turn as the credit: once it is answered, what there was has come. Whoever left before that,
            # because the time was short, would have the job given back that was just granted.
            await asyncio.wait({*ends, looked}, return_when=asyncio.FIRST_COMPLETED)
            is_wanted = not gone.done()
        finally:
            self._waiting.remove(waiting)
            waiting.end()
            if unused := wanted - len(waiting.grants):
                talk.tell(GiveCredit(-unused))
            if not is_wanted and waiting.grants:
                self._give_back(talk, waiting.grants)
                waiting.grants = []
            if not looked.done():
                looked.cancel()
        if not waiting.grants:
            _raise_if_refused(talk, looked)
        self._note(waiting.grants)
        return waiting.grants

    def _note(self, grants: Sequence[Grant]) -> None:
        """These are on their way to the worker."""
        now = self._server.now()
        until = now.monotonic + self.ttl_s + LATEST_REPORTS_S
        for grant in grants:
            self._handed[grant.lease_id] = Handed(Claim(grant.job_id, grant.lease_id, grant.attempt), now.wall, until)
        if grants and self._starting is None:
            self._starting = asyncio.get_running_loop().call_later(STARTED_AFTER_S, self._start)

    def _start(self) -> None:
        """Tell the server what has been handed out and is not over yet."""
        self._starting = None
        fresh = [handed for handed in self._handed.values() if not handed.started]
        for handed in fresh:
            handed.started = True
        if fresh and self._talk is not None:
            self._talk.tell(JobsStarted([handed.claim for handed in fresh]))

    def _assigned(self, message: AssignJobs) -> None:
        unwanted = []
        for grant in message.grants:
            if grant.lease_id in self._handed:  # delivered again, and it was handed out
                continue
            waiting = next((one for one in self._waiting if one.room), None)
            if waiting is None:
                unwanted.append(grant)
            else:
                waiting.grants.append(grant)
        for waiting in self._waiting:
            if waiting.grants and not waiting.over.done():
                asyncio.get_running_loop().call_soon(waiting.end)  # what comes with it in the same turn is its too
        if unwanted and self._talk is not None:
            self._give_back(self._talk, unwanted)

    def _give_back(self, talk: VirtualConnection, grants: Sequence[Grant]) -> None:
        claims = [Claim(grant.job_id, grant.lease_id, grant.attempt) for grant in grants]
        talk.tell(JobsReleased(claims, "the lease request that it came for was over"))

    # ------------------------------------------------------------------------------------------------ renew, report

    async def renew(self, caller: Caller, claims: Sequence[Claim]) -> list[LeaseStatus]:
        """How each lease stands, after the renewal."""
        talk = await self._open(caller)
        msg_id = talk.next_id()
        answer = await talk.ask(msg_id, Heartbeat(msg_id, list(claims)))
        assert isinstance(answer, HeartbeatAnswer)
        cancel, lost = set(answer.cancel), set(answer.lost)
        return [
            LeaseStatus.LOST if claim.lease_id in lost else LeaseStatus.CANCEL if claim.lease_id in cancel else LeaseStatus.GO_ON
            for claim in claims
        ]

    async def put_blob(self, caller: Caller, data: bytes) -> BlobRef:
        """A result that is too large for the store's row."""
        return await (await self._open(caller)).put_blob(data)

    async def report(self, caller: Caller, reports: Sequence[tuple[Claim, Outcome]]) -> list[str | None]:
        """None where it was recorded (or is an exact repeat), else why it is fenced."""
        talk = await self._open(caller)
        await talk.flow()
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[str | None]] = []
        endings = []
        for claim, outcome in reports:
            handed = self._handed.pop(claim.lease_id, None)
            started_at = handed.at_wall if handed is not None else None
            endings.append(Ending(claim.job_id, claim.lease_id, claim.attempt, outcome, started_at))
            answers.append(loop.create_future())
            self._reports[claim.lease_id].append(answers[-1])
        try:
            talk.tell(JobsFinished(endings))
            _, waiting = await asyncio.wait(answers, timeout=ANSWER_TIMEOUT_S)
            if waiting:
                raise talk.closed or Unavailable("the store has not recorded it yet; send it again")
            return [answer.result() for answer in answers]
        finally:
            for (claim, _), answer in zip(reports, answers, strict=True):
                self._forget_report(claim.lease_id, answer)

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
        """Exchange the token; what the new one is. The connection ends with the old one."""
        talk = await self._open(caller)
        msg_id = talk.next_id()
        answer = await talk.ask(msg_id, Request(msg_id, "worker.rotate", {"token_id": token_id, "sha256": sha256}))
        self.leave()
        assert isinstance(answer, Reply)
        told: dict[str, Any] = answer.body
        return told

    # ------------------------------------------------------------------------------------------------ life

    def _hear(self, message: Message) -> None:
        match message:
            case AssignJobs():
                self._assigned(message)
            case JobsRecorded():
                for lease_id in message.recorded:
                    self._recorded(lease_id, None)
                for lease_id, reason in message.fenced:
                    self._recorded(lease_id, reason)
            case _:
                """Cancels are told with the next renewal."""

    def _closed(self, error: TasukiError) -> None:
        """The server hung up, or we did: whoever waits asks again, and finds out with which answer."""
        self._talk = None
        for waiting in self._waiting:
            waiting.end()
        for answers in self._reports.values():
            for answer in answers:
                if not answer.done():
                    answer.set_exception(error)

    def tick(self, now: float) -> None:
        if self._handed:
            for lease_id in [lease_id for lease_id, handed in self._handed.items() if handed.until < now]:
                del self._handed[lease_id]
        if self._waiting and self._talk is not None and now - self._beat_at > self.ttl_s / 4:
            self._beat_at = now
            self._talk.tell(Heartbeat(self._talk.next_id()))

    def leave(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            self._start()
        if self._talk is not None:
            self._talk.leave()


class Workers:
    """All workers that were heard of lately."""

    def __init__(self, server: Server, ttl_s: float) -> None:
        self._server = server
        self._ttl_s = ttl_s
        self._workers: dict[str, HttpWorker] = {}

    def of(self, worker_id: str, subject: str) -> HttpWorker:
        """`with workers.of(...) as worker:`"""
        worker = self._workers.get(worker_id)
        if worker is None or worker.subject != subject:
            if worker is not None:
                worker.leave()
            worker = self._workers[worker_id] = HttpWorker(self._server, worker_id, subject, self._ttl_s)
        return worker

    def tick(self) -> None:
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
