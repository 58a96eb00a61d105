"""Sessions of workers that speak the wire protocol over HTTP, each with a virtual connection behind it.

Theory of operation. Messages that a worker sends under a number are carried out once, however often they come. Messages for the
worker are kept until it confirms them. So a request or an answer that is lost on the way costs nothing but its repetition. The
session ends with the virtual connection: the server closes it, the worker leaves, or no request comes any more.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque

import msgspec

from tasuki.core import protocol
from tasuki.core.shares import Shares
from tasuki.doors.http.exchange import REQUESTS_MAX, discreet
from tasuki.doors.http.virtual_connection import Caller, VirtualConnection
from tasuki.errors import NotFound, OutOfTurn, Overloaded, TasukiError, Unavailable, UnknownSession
from tasuki.net.tcp_link import encode_answer
from tasuki.server.server import Server

SESSIONS_MAX = REQUESTS_MAX * 3 // 4  # each has a poll open; their other requests, and other peers, need room beside them
TOKEN_SHARE = 4  # one in so many sessions may be of one token
KEPT_S = 20.0  # a session without requests, and an ended one, so that its worker can still read why
LEFT_S = 5.0  # one whose worker disconnected during a poll; a live one comes back at once
KEPT_MAX_BYTES = 32 * 1024 * 1024  # of frames that are not confirmed; far above what a worker's credit can lead to
UNKNOWN = "this session is unknown here; send Hello again"
ANSWER_MAX_BYTES = 4 * 1024 * 1024  # of one answer; the rest comes with the next


class HttpWorkerSession:
    """One worker's session at this server."""

    def __init__(self, server: Server, caller: Caller) -> None:
        self.name = secrets.token_urlsafe(18)
        self.owner, self.token = caller.sha256, caller.identity.name
        self.users = 0
        self.used_at = server.now().monotonic
        self.closed = False
        self._connection = VirtualConnection(server, caller.address, self._on_message, self._on_close)
        self._codec: str | None = None
        self._said = 0
        """Number of the last request with frames."""
        self._saying = asyncio.Lock()
        self._kept: deque[bytes] = deque()
        """Frames that the worker has not confirmed; the first has the number `_confirmed + 1`."""
        self._kept_bytes = 0
        self._confirmed = 0
        self._assigned: deque[tuple[int, list[protocol.Claim]]] = deque()
        """(number of the frame, its attempts) of assignments that were in no answer yet."""
        self._known: set[str] = set()
        """Leases that the worker may have received and not ended. The broker sends an assignment again if no sign of it came
        back: that such a repeated frame was not confirmed proves nothing."""
        self._has_left = False
        self._poll: asyncio.Future[None] | None = None
        self._why: TasukiError | None = None

    async def greet(self, hello: protocol.HelloWorker) -> protocol.Welcome:
        """Send the Hello and return the Welcome; raise the error with which the server closed the connection."""
        welcome = await self._connection.ask(hello)
        assert isinstance(welcome, protocol.Welcome)
        self._codec = welcome.codecs[0] if welcome.codecs else None
        return msgspec.structs.replace(welcome, servers=())  # the worker's way leads through this door

    # ------------------------------------------------------------------------------------------------ from the worker

    async def say(self, number: int, messages: list[protocol.Message]) -> None:
        """Carry out the messages of request `number` once; a repetition of the last request is only answered."""
        async with self._saying:
            if number == self._said:
                return
            if number != self._said + 1:
                raise OutOfTurn(f"said={number} is out of turn: the last one was {self._said}; begin a new session")
            await self._connection.flow()
            self._said = number
            for message in messages:
                if isinstance(message, protocol.ErrorMessage):  # stands for a request that is newer than this server
                    self._on_message(message)
                else:
                    self._forget_ended(message)
                    self._connection.tell(message)

    def _forget_ended(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.JobsFinished):
            self._known.difference_update(ending.lease_id for ending in message.endings)
        elif isinstance(message, protocol.JobsReleased):
            self._known.difference_update(claim.lease_id for claim in message.claims)

    # ------------------------------------------------------------------------------------------------ to the worker

    def _on_message(self, message: protocol.Message) -> None:
        frame = encode_answer(message, self._codec)
        self._kept.append(frame)
        self._kept_bytes += len(frame)
        self._connection.undelivered_bytes = self._kept_bytes
        if isinstance(message, protocol.AssignJobs):
            claims = [protocol.Claim(grant.job_id, grant.lease_id, grant.attempt) for grant in message.grants]
            self._assigned.append((self._confirmed + len(self._kept), claims))
        if self._kept_bytes > KEPT_MAX_BYTES and not self.closed:
            self._kept.clear()
            self._kept_bytes = 0
            self.leave(Overloaded(f"this worker has not confirmed more than {KEPT_MAX_BYTES} bytes of messages"))
        if self._poll is not None and not self._poll.done():
            asyncio.get_running_loop().call_soon(_finish, self._poll)  # after all messages of the same turn

    def _on_close(self, error: TasukiError) -> None:
        self.closed = True
        self._on_message(protocol.error_message(0, self._why or discreet(error)))

    async def listen(self, heard: int, wait_s: float, left: asyncio.Future[None]) -> list[bytes]:
        """Return the frames behind number `heard`, as soon as there are some; none when the time is over."""
        self._confirm(heard)
        if self.closed and not self._kept:
            raise NotFound(f"{UNKNOWN}: it has ended on an order")
        if self._poll is not None:  # abandoned by the worker
            _finish(self._poll)
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
            raise OutOfTurn(f"heard must be {there}, got {heard}; begin a new session")
        for _ in range(heard - self._confirmed):
            self._kept_bytes -= len(self._kept.popleft())
        self._confirmed = heard
        self._connection.undelivered_bytes = self._kept_bytes

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
        """Return if no request came for longer than a live worker pauses."""
        return not self.users and now - self.used_at > (LEFT_S if self._has_left else KEPT_S)

    def leave(self, why: TasukiError) -> None:
        """End the session from this side; `why` is for the worker. Attempts that it cannot know of are released at once."""
        self._why = why
        unknown = [claim for _, claims in self._assigned for claim in claims if claim.lease_id not in self._known]
        if unknown and not self.closed:
            self._connection.tell(protocol.JobsReleased(unknown, "its worker is gone"))
        self._connection.leave()


def _finish(poll: asyncio.Future[None]) -> None:
    if not poll.done():
        poll.set_result(None)


class WorkerSessions:
    """All worker sessions at this server, by name."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._sessions: dict[str, HttpWorkerSession] = {}
        self._shares = Shares(SESSIONS_MAX // TOKEN_SHARE, "sessions at this server")

    async def open(self, caller: Caller, hello: protocol.HelloWorker) -> tuple[HttpWorkerSession, protocol.Welcome]:
        """Open a session; the broker ends an older one of the same worker."""
        token = caller.identity.name
        if len(self._sessions) >= SESSIONS_MAX or self._shares.taken(token) >= self._shares.limit:
            for session in [session for session in self._sessions.values() if session.closed]:
                self.drop(session, "it has ended")
        if len(self._sessions) >= SESSIONS_MAX:
            raise Overloaded(f"this server has {SESSIONS_MAX} workers; try again later, or another server")
        self._shares.take(token)
        session = HttpWorkerSession(self._server, caller)
        session.users = 1  # not silent while the store takes its time
        self._sessions[session.name] = session
        try:
            return session, await session.greet(msgspec.structs.replace(hello, token=caller.secret))
        except BaseException:
            self.drop(session, "it was not let in")
            raise
        finally:
            session.users = 0
            session.used_at = self._server.now().monotonic

    def of(self, caller: Caller, name: str) -> HttpWorkerSession:
        """Return the caller's session; another caller's session is as unknown as one that never was."""
        session = self._sessions.get(name)
        if session is None or session.owner != caller.sha256:
            raise UnknownSession(f"{UNKNOWN}: the server was started again, or another one has it")
        return session

    def drop(self, session: HttpWorkerSession, why: str) -> None:
        """End a session and forget it."""
        session.leave(Unavailable(f"the session was ended: {why}"))
        self._forget(session)

    def _forget(self, session: HttpWorkerSession) -> None:
        if self._sessions.pop(session.name, None) is not None:
            self._shares.give_back(session.token)

    def tick(self) -> None:
        """Drop the sessions that are silent."""
        now = self._server.now().monotonic
        for session in list(self._sessions.values()):
            if session.is_silent(now):
                self.drop(session, f"no message came for {now - session.used_at:.0f} s")

    def close(self) -> None:
        """End all sessions; waiting polls are answered, later requests find no session."""
        for session in list(self._sessions.values()):
            session.leave(Unavailable("the server is going down; try again"))
            self._forget(session)
