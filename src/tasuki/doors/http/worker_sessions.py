"""The sessions of workers that speak the wire protocol over HTTP, each with a virtual connection behind it.

Theory of operation. What was said under a number is done once, however often it comes. What was told is kept until the worker
says that it has heard it. So a request or an answer that is lost on the way costs nothing but its repeat. The session ends with
the virtual connection: the server hangs up, the worker leaves, or nothing is heard of it any more.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque

import msgspec

from tasuki.core.protocol import AssignJobs, Claim, ErrorMessage, HelloWorker, JobsFinished, JobsReleased, Message, Welcome
from tasuki.doors.http.authentication import Caller
from tasuki.doors.http.exchange import REQUESTS_MAX, discreet
from tasuki.doors.http.virtual_connection import VirtualConnection
from tasuki.errors import NotFound, OutOfTurn, Overloaded, TasukiError, Unavailable, UnknownSession
from tasuki.net.tcp_link import encode_answer
from tasuki.server.server import Server

LINES_MAX = REQUESTS_MAX * 3 // 4  # each has a poll open; what they say, and everybody else, needs room beside them
KEPT_S = 20.0  # a session of which nothing is heard, and one that has ended, so that its worker can still hear why
LEFT_S = 5.0  # one whose worker hung up in the middle of a poll; if it lives it comes back at once
KEPT_MAX_BYTES = 32 * 1024 * 1024  # of what was told and not heard; far above what a worker's credit can lead to
UNKNOWN = "this session is not known here any more; say Hello again"
ANSWER_MAX_BYTES = 4 * 1024 * 1024  # of one answer; the rest comes with the next


class HttpWorkerSession:
    """One worker's session at this server."""

    def __init__(self, server: Server, caller: Caller) -> None:
        self.name = secrets.token_urlsafe(18)
        self.owner = caller.sha256
        self.users = 0
        self.used_at = server.now().monotonic
        self.closed = False
        self._server = server
        self._talk = VirtualConnection(server, caller.address, self._hear, self._on_close)
        self._codec: str | None = None
        self._said = 0
        self._saying = asyncio.Lock()
        self._kept: deque[bytes] = deque()
        """Frames that the worker has not confirmed; the first has the number `_confirmed + 1`."""
        self._kept_bytes = 0
        self._confirmed = 0
        self._assigned: deque[tuple[int, list[Claim]]] = deque()
        """By the number of their frame, attempts that were in no answer yet."""
        self._known: set[str] = set()
        """Leases that the worker may have heard of, and has not spoken the last word on. The broker sends them again where no
        sign of them came back: that such a frame was not heard says nothing."""
        self._has_left = False
        self._poll: asyncio.Future[None] | None = None
        self._why: TasukiError | None = None

    async def greet(self, hello: HelloWorker) -> Welcome:
        """Come in, or the error with which the server hung up."""
        welcome = await self._talk.ask(hello.msg_id, hello)
        assert isinstance(welcome, Welcome)
        self._codec = welcome.codecs[0] if welcome.codecs else None
        return msgspec.structs.replace(welcome, servers=())  # its way leads through this door, whatever is behind it

    # ------------------------------------------------------------------------------------------------ in

    async def say(self, number: int, messages: list[Message]) -> None:
        """Done once: the number before is the last one that counts, and its repeat is only answered."""
        async with self._saying:
            if number == self._said:
                return
            if number != self._said + 1:
                raise OutOfTurn(f"said={number} is out of turn: the last one was {self._said}; begin a new session")
            await self._talk.flow()
            self._said = number
            for message in messages:
                if isinstance(message, ErrorMessage):  # a request that is newer than this server
                    self._hear(message)
                else:
                    self._forget(message)
                    self._talk.tell(message)

    def _forget(self, message: Message) -> None:
        if isinstance(message, JobsFinished):
            self._known.difference_update(ending.lease_id for ending in message.endings)
        elif isinstance(message, JobsReleased):
            self._known.difference_update(claim.lease_id for claim in message.claims)

    # ------------------------------------------------------------------------------------------------ out

    def _hear(self, message: Message) -> None:
        frame = encode_answer(message, self._codec)
        self._kept.append(frame)
        self._kept_bytes += len(frame)
        if isinstance(message, AssignJobs):
            claims = [Claim(grant.job_id, grant.lease_id, grant.attempt) for grant in message.grants]
            self._assigned.append((self._confirmed + len(self._kept), claims))
        if self._kept_bytes > KEPT_MAX_BYTES and not self.closed:
            self._kept.clear()
            self._kept_bytes = 0
            self.leave(Overloaded(f"this worker has not heard more than {KEPT_MAX_BYTES} bytes of what it was told"))
        self._wake()

    def _on_close(self, error: TasukiError) -> None:
        self.closed = True
        told = self._why or discreet(error)
        self._hear(ErrorMessage(0, told.code, told.message, told.details()))

    def _wake(self) -> None:
        if self._poll is not None and not self._poll.done():
            asyncio.get_running_loop().call_soon(_done, self._poll)  # what comes in the same turn goes with it

    async def listen(self, heard: int, wait_s: float, left: asyncio.Future[None]) -> list[bytes]:
        """What the worker has not heard yet, as soon as there is something; nothing when the time is over."""
        self._confirm(heard)
        if self.closed and not self._kept:
            raise NotFound(f"{UNKNOWN}: it has ended, as it was told")
        if self._poll is not None:  # the worker gave that one up
            _done(self._poll)
        poll = self._poll = asyncio.get_running_loop().create_future()
        self._has_left = False
        try:
            if not self._kept and wait_s:
                await asyncio.wait([poll, left], timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if self._poll is not poll:
                return []
            self._has_left = left.done()
            return [] if self._has_left else self._next()
        finally:
            if self._poll is poll:
                self._poll = None

    def _confirm(self, heard: int) -> None:
        if not self._confirmed <= heard <= self._confirmed + len(self._kept):
            there = f"{self._confirmed} to {self._confirmed + len(self._kept)}"
            raise OutOfTurn(f"heard={heard} is none of {there}; begin a new session")
        for _ in range(heard - self._confirmed):
            self._kept_bytes -= len(self._kept.popleft())
        self._confirmed = heard

    def _next(self) -> list[bytes]:
        frames: list[bytes] = []
        size = 0
        for frame in self._kept:
            if frames and size + len(frame) > ANSWER_MAX_BYTES:
                break
            frames.append(frame)
            size += len(frame)
        while self._assigned and self._assigned[0][0] <= self._confirmed + len(frames):
            self._known.update(claim.lease_id for claim in self._assigned.popleft()[1])
        return frames

    def is_silent(self, now: float) -> bool:
        """Nothing was heard of it for longer than a worker takes that lives."""
        return not self.users and now - self.used_at > (LEFT_S if self._has_left else KEPT_S)

    def leave(self, why: TasukiError) -> None:
        """This side ends it; `why` is for the worker. What it has certainly not heard of goes to others at once."""
        self._why = why
        unheard = [claim for _, claims in self._assigned for claim in claims if claim.lease_id not in self._known]
        if unheard and not self.closed:
            self._talk.tell(JobsReleased(unheard, "its worker is gone"))
        self._talk.leave()


def _done(poll: asyncio.Future[None]) -> None:
    if not poll.done():
        poll.set_result(None)


class Lines:
    """All sessions at this server, by their names."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._lines: dict[str, HttpWorkerSession] = {}

    async def open(self, caller: Caller, hello: HelloWorker) -> tuple[HttpWorkerSession, Welcome]:
        """A new session; the broker sees to it that an older one of the same worker ends."""
        if len(self._lines) >= LINES_MAX:
            for line in [line for line in self._lines.values() if line.closed]:
                self.drop(line, "it has ended")
        if len(self._lines) >= LINES_MAX:
            raise Overloaded(f"this server has {LINES_MAX} workers; try again later, or another server")
        line = HttpWorkerSession(self._server, caller)
        line.users = 1  # the store may take its time
        self._lines[line.name] = line
        try:
            return line, await line.greet(msgspec.structs.replace(hello, token=caller.secret))
        except BaseException:
            self.drop(line, "it was not let in")
            raise
        finally:
            line.users = 0
            line.used_at = self._server.now().monotonic

    def of(self, caller: Caller, name: str) -> HttpWorkerSession:
        """Another worker's session is as unknown as one that there never was."""
        line = self._lines.get(name)
        if line is None or line.owner != caller.sha256:
            raise UnknownSession(f"{UNKNOWN}: the server was started again, or another one has it")
        return line

    def drop(self, line: HttpWorkerSession, why: str) -> None:
        line.leave(Unavailable(f"the session was ended: {why}"))
        self._lines.pop(line.name, None)

    def tick(self) -> None:
        """Forget those of which nothing was heard lately."""
        now = self._server.now().monotonic
        for line in list(self._lines.values()):
            if line.is_silent(now):
                self.drop(line, f"nothing was heard for {now - line.used_at:.0f} s")

    def close(self) -> None:
        """Those who wait hear that it is over; their next requests find nothing."""
        for line in list(self._lines.values()):
            line.leave(Unavailable("the server is going down; try again"))
        self._lines.clear()
