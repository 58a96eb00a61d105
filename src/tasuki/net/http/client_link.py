"""A client's link over HTTP: to its owner a connection that carries messages, on the network independent requests.

Theory of operation. The messages that the owner sends in one turn of the loop leave in one request (`/v1/frames`), several of
which may be under way; a message that may wait long for its answer (a log that is followed) has a request of its own. The token
of the Hello goes into a header, not into the frame. The link is closed by whatever would break a connection: no answer, half an
answer, an unreachable server. Its owner then dials again and repeats the messages that are safe to repeat, as over TCP. A request
that was refused as a whole is an error for each message in it, and the link stays open.

The ends of jobs come by long polls (`ResultPolls`): each names the jobs of several `watch` requests, and the jobs that it was not
told of are named again by the next. Messages come by streams of events (`event_streams.py`), one for each pattern.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NamedTuple

from msgspec.structs import replace

from tasuki.core.access import UNAUTHENTICATED
from tasuki.core.address import Address
from tasuki.core.backoff import Backoff
from tasuki.core.protocol import (
    BATCH_MAX,
    FRAME_MAX_BYTES,
    FRAMES_MAX,
    FRAMES_PATH,
    Accepted,
    CachePut,
    ErrorMessage,
    Heartbeat,
    HeartbeatAnswer,
    HelloClient,
    Message,
    Reply,
    Request,
    Results,
    SubmitJobs,
    Welcome,
)
from tasuki.errors import (
    Forbidden,
    InvalidInput,
    NoConnection,
    NotFound,
    NotTasuki,
    Overloaded,
    ResponseLost,
    TasukiError,
    TooLarge,
    Unauthorized,
    Unavailable,
)
from tasuki.net.http import event_streams
from tasuki.net.http.base_link import (
    POLL_WAIT_MIN_S,
    POLL_WAIT_S,
    BaseHttpLink,
    OnClosed,
    OnMessage,
    check_token,
    next_bundle,
    post,
    shorter_wait_s,
)
from tasuki.net.http.event_streams import EventStreams
from tasuki.net.http.transport import ANSWER_S
from tasuki.wire.messages import encode

FIRST_MSG_ID = 1 << 41  # above the counters of machines and of blob transfers
POLL_SLACK_S = 15.0  # how much longer an answer may take before the server counts as gone
POLLS_MAX = 4
WINDOW_MAX = 8 * BATCH_MAX  # jobs of one poll
GATHER_S = 0.005  # jobs that are accepted one after the other go into one poll
MAKE_ROOM_S = 0.25  # a poll that is given up costs its connection
PAUSE_FIRST_S = 0.2
PAUSE_MAX_S = 5.0
CUTS_MAX = 2  # in a row; a third means that the server is gone
REQUESTS_AT_ONCE = 8
WAITS_AT_ONCE = 32
WAITING_VERBS = frozenset({"logs"})  # whose answers may take long


# Send frames with query parameters, and yield the messages of the answer as they come, within so many seconds.
PostFrames = Callable[[Sequence[bytes], Mapping[str, str], float], AbstractAsyncContextManager[AsyncIterator[Message]]]


class _Group(NamedTuple):
    """One `watch` request."""

    msg_id: int
    job_ids: list[str]
    frame: bytes


class _Poll:
    """One open long poll."""

    def __init__(self, groups: list[_Group]) -> None:
        self.groups = {group.msg_id: group for group in groups}
        self.size = sum(len(group.job_ids) for group in groups)
        self.task: asyncio.Task[None] | None = None


class ResultPolls:
    """The long polls of one link. `post` sends, `on_message` gets messages for the owner, `fail` an error that ends the link."""

    def __init__(self, post: PostFrames, on_message: Callable[[Message], None], fail: Callable[[TasukiError], None]) -> None:
        self._post, self._on_message, self._fail = post, on_message, fail
        self._loop = asyncio.get_running_loop()
        self._msg_ids = itertools.count(FIRST_MSG_ID)
        self._asked: deque[_Group] = deque()
        """The owner's own requests that the server has not answered yet."""
        self._known: set[str] = set()
        """Jobs whose ends are awaited: those of open polls, and those that wait for one."""
        self._waiting: dict[str, None] = {}
        self._polls: set[_Poll] = set()
        self._first_polls: set[_Poll] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._made_room_at = 0.0
        self._wait_s = POLL_WAIT_S
        self._backoff = Backoff(PAUSE_FIRST_S, PAUSE_MAX_S)
        self._cuts = 0
        self._closed = False

    def ask(self, request: Request) -> None:
        """Send the owner's `watch`, and pass on whether the server knows the jobs. InvalidInput if it does not fit a frame."""
        frame = encode(request, max_bytes=FRAME_MAX_BYTES)
        self._asked.append(_Group(request.msg_id, list(request.params["job_ids"]), frame))
        self._soon(GATHER_S)

    def add(self, job_ids: Iterable[str]) -> None:
        """Watch jobs that were accepted."""
        if fresh := self._added(job_ids):
            self._waiting.update(dict.fromkeys(fresh))
            self._soon(GATHER_S)

    def _added(self, job_ids: Iterable[str]) -> list[str]:
        """Return the jobs that were not watched before."""
        fresh = [job_id for job_id in job_ids if job_id not in self._known]
        self._known.update(fresh)
        return fresh

    def forget(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            self._known.discard(job_id)
            self._waiting.pop(job_id, None)

    def close(self) -> list[asyncio.Task[None]]:
        """Cancel all polls, and return the tasks that are still to end."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        under_way = [poll.task for poll in self._polls | self._first_polls]
        tasks = [task for task in under_way if task is not None and task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        return tasks

    # ------------------------------------------------------------------------------------------------ polls

    def _soon(self, wait_s: float) -> None:
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(wait_s, self._open)

    def _open(self) -> None:
        self._timer = None
        if self._closed:
            return
        if self._asked:
            self._start(self._first_polls, self._next_asked())
        if self._waiting and (len(self._polls) < POLLS_MAX or self._make_room()):
            self._start(self._polls, self._next_waiting())
        if self._asked or (self._waiting and len(self._polls) < POLLS_MAX):
            self._soon(GATHER_S)

    def _start(self, among: set[_Poll], groups: list[_Group]) -> None:
        poll = _Poll(groups)
        among.add(poll)
        poll.task = asyncio.ensure_future(self._run(poll))

    def _make_room(self) -> bool:
        """Give up the smallest poll if its jobs and the new ones fit into one; not too often."""
        smallest = min(self._polls, key=lambda poll: poll.size)
        if smallest.size + len(self._waiting) > WINDOW_MAX:
            return False  # the next poll that ends makes room
        wait_s = self._made_room_at + MAKE_ROOM_S - self._loop.time()
        if wait_s > 0:
            self._soon(wait_s)
            return False
        self._made_room_at = self._loop.time()
        assert smallest.task is not None
        smallest.task.cancel()
        self._put_back(smallest)
        return True

    def _next_asked(self) -> list[_Group]:
        groups: list[_Group] = []
        while self._asked and len(groups) < FRAMES_MAX and sum(len(group.job_ids) for group in groups) < WINDOW_MAX:
            groups.append(self._asked.popleft())
        return groups

    def _next_waiting(self) -> list[_Group]:
        """Return the jobs that have waited longest, as `watch` requests."""
        groups: list[_Group] = []
        while self._waiting and len(groups) < WINDOW_MAX // BATCH_MAX:
            job_ids = list(itertools.islice(self._waiting, BATCH_MAX))
            for job_id in job_ids:
                del self._waiting[job_id]
            msg_id = next(self._msg_ids)
            groups.append(_Group(msg_id, job_ids, encode(Request(msg_id, "watch", {"job_ids": job_ids}))))
        return groups

    def _put_back(self, poll: _Poll) -> None:
        """Queue the jobs of a poll again that it was not told of."""
        self._polls.discard(poll)
        self._first_polls.discard(poll)
        for group in poll.groups.values():
            if group.msg_id < FIRST_MSG_ID:
                self._asked.append(group)
            else:
                self._waiting.update(dict.fromkeys(job_id for job_id in group.job_ids if job_id in self._known))

    # ------------------------------------------------------------------------------------------------ one poll

    async def _run(self, poll: _Poll) -> None:
        began = self._loop.time()
        count = 0
        try:
            count = await self._ask(poll)
            self._cuts = 0
        except TasukiError as error:
            if isinstance(error, ResponseLost):
                self._cut(error, self._loop.time() - began)
            elif isinstance(error, NoConnection) or not isinstance(error, Unavailable):  # Unavailable: refused for now
                self._fail(error)
                return
        self._put_back(poll)
        if count or self._loop.time() - began >= POLL_WAIT_MIN_S / 2:
            self._backoff.reset()
            self._open()
        else:  # it came back at once, and empty: another one at once would be a hot loop
            self._soon(self._backoff.next_s())

    def _cut(self, error: ResponseLost, lasted_s: float) -> None:
        if lasted_s > POLL_WAIT_MIN_S:
            self._wait_s = shorter_wait_s(self._wait_s, lasted_s)
            return
        self._cuts += 1
        if self._cuts > CUTS_MAX:
            self._fail(error)

    async def _ask(self, poll: _Poll) -> int:
        """Run one poll, and return the number of messages for the owner."""
        wait_s = 0.0
        if poll in self._polls:
            wait_s = POLL_WAIT_MIN_S if self._waiting else self._wait_s  # others wait for a poll
        frames = [group.frame for group in poll.groups.values()]
        count = 0
        async with self._post(frames, {"wait": f"{wait_s:g}"}, wait_s + POLL_SLACK_S) as messages:
            async for message in messages:
                count += self._take(poll, message)
        return count

    def _take(self, poll: _Poll, message: Message) -> bool:
        """Pass on a message, and return whether it is an end of a job or an answer to the owner's `watch`."""
        if isinstance(message, Reply) or (isinstance(message, ErrorMessage) and message.corr_id):
            return self._take_answer(poll, message)
        if isinstance(message, Results):
            self._known.difference_update([item.job_id for item in message.items])
        self._on_message(message)
        return isinstance(message, Results)

    def _take_answer(self, poll: _Poll, message: Reply | ErrorMessage) -> bool:
        group = poll.groups.get(message.corr_id)
        if group is None:
            return False
        if group.msg_id >= FIRST_MSG_ID:
            if isinstance(message, ErrorMessage) and message.code not in (Unavailable.code, Overloaded.code):
                # One of the jobs is gone, deleted after its end was due. The owner asks for all again and finds out which.
                self._fail(ResponseLost(f"awaited jobs cannot be watched any more: {message.message}"))
            return False
        del poll.groups[group.msg_id]
        self._on_message(message)
        if isinstance(message, Reply):  # its jobs are watched after this poll: results in this response come after the reply
            msg_id = next(self._msg_ids)
            poll.groups[msg_id] = _Group(msg_id, self._added(group.job_ids), b"")
        return True


class _QueuedFrame(NamedTuple):
    msg_id: int
    frame: bytes


class HttpClientLink(BaseHttpLink):
    """A link to one address, until it stops answering."""

    def __init__(
        self, address: Address, on_message: OnMessage, on_closed: OnClosed, tls: ssl.SSLContext | None, timeout_s: float
    ) -> None:
        super().__init__(address, on_message, on_closed, tls, timeout_s)
        self._polls = ResultPolls(self._post, self._hear, self._broken)
        self._streams = EventStreams(self._transport, self._tasks, self._hear, self._broken)
        self._queue: deque[_QueuedFrame] = deque()
        self._flushing = False
        self._quick = 0
        """Number of requests under way, except those that may wait long."""
        self._waits = asyncio.Semaphore(WAITS_AT_ONCE)
        self._submits: dict[int, list[str]] = {}
        """By msg_id: the jobs to watch once they are accepted."""
        self._unanswered: set[int] = set()
        self._greeted = False
        self._ending: list[asyncio.Task[None]] = []
        """Polls that are ending after `close`."""

    # ------------------------------------------------------------------------------------------------ out

    def say(self, message: Message) -> None:
        if self._closed:
            return
        match message:
            case HelloClient():
                self._greet(message)
            case Heartbeat() if not self._unanswered and not self._streams:
                # The next request shows whether the server is there; until then nobody needs to know.
                self._loop.call_soon(self._hear, HeartbeatAnswer(message.msg_id))
            case Request(verb="watch", params={"job_ids": list(job_ids)}) if all(isinstance(one, str) for one in job_ids):
                self._polls.ask(message)  # the server refuses requests of another form
            case Request(verb=verb, params={"pattern": str(), "queue": str()}) if verb in event_streams.VERBS:
                self._streams.ask(message)
            case _:
                self._queue_up(message)

    def _greet(self, hello: HelloClient) -> None:
        self._transport.token = check_token(hello.token)
        queued = self._frame_of(hello.msg_id, encode(replace(hello, token="")))
        self._tasks.spawn(self._bundle([queued]))

    def _queue_up(self, message: Message) -> None:
        queued = self._frame_of(getattr(message, "msg_id", 0), encode(message, self.codec, max_bytes=FRAME_MAX_BYTES))
        if isinstance(message, SubmitJobs) and message.watch:
            self._submits[queued.msg_id] = [spec.job_id for spec in message.specs]
        if isinstance(message, CachePut) or (
            isinstance(message, Request) and message.verb in WAITING_VERBS and message.params.get("wait_s")
        ):
            self._tasks.spawn(self._alone(queued))
            return
        self._queue.append(queued)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _frame_of(self, msg_id: int, frame: bytes) -> _QueuedFrame:
        self._unanswered.add(msg_id)
        return _QueuedFrame(msg_id, frame)

    def _flush(self) -> None:
        self._flushing = False
        while self._queue and self._quick < REQUESTS_AT_ONCE and not self._closed:
            self._quick += 1
            self._tasks.spawn(self._next(next_bundle(self._queue, self._request_max_bytes, lambda queued: len(queued.frame))))

    async def _next(self, bundle: list[_QueuedFrame]) -> None:
        try:
            await self._bundle(bundle)
        finally:
            self._quick -= 1
            self._flush()

    # ------------------------------------------------------------------------------------------------ one request

    async def _alone(self, queued: _QueuedFrame) -> None:
        async with self._waits:
            await self._bundle([queued])

    async def _bundle(self, bundle: list[_QueuedFrame]) -> None:
        unanswered = {queued.msg_id for queued in bundle if queued.msg_id}
        try:
            async with self._post([queued.frame for queued in bundle], {}, ANSWER_S) as messages:
                async for message in messages:
                    unanswered.discard(getattr(message, "corr_id", 0))
                    self._hear(message)
        except (NoConnection, ResponseLost, NotTasuki, Unauthorized, Forbidden) as error:
            self._broken(error)
        except TasukiError as error:
            if isinstance(error, NotFound) or not self._greeted:
                self._broken(error)
            elif isinstance(error, InvalidInput) and len(bundle) > 1:
                # Together they were too large for a proxy, or one of them was bad: send them one by one.
                if isinstance(error, TooLarge):
                    self._request_max_bytes = sum(len(queued.frame) for queued in bundle) // 2
                for queued in bundle:
                    await self._bundle([queued])
            else:
                for queued in bundle:
                    self._hear(ErrorMessage(queued.msg_id, error.code, error.message, error.details()))
        else:
            for msg_id in unanswered:
                self._hear(ErrorMessage(msg_id, "UNAVAILABLE", f"{self._address} has answered without a reply to this request"))

    @asynccontextmanager
    async def _post(
        self, frames: Sequence[bytes], params: Mapping[str, str], answer_s: float
    ) -> AsyncIterator[AsyncIterator[Message]]:
        wanted = {**params, "codec": self.codec} if self.codec is not None else params
        async with post(self._transport, FRAMES_PATH, frames, wanted, answer_s) as answer:
            yield (message async for message in answer.messages if message is not None)

    # ------------------------------------------------------------------------------------------------ in

    def _hear(self, message: Message) -> None:
        if self._closed:
            return
        corr_id = getattr(message, "corr_id", 0)
        self._unanswered.discard(corr_id)
        self._greeted = self._greeted or isinstance(message, Welcome)
        job_ids = self._submits.pop(corr_id, ()) if isinstance(message, Accepted | ErrorMessage) else ()
        self._on_message(self, message)
        if isinstance(message, ErrorMessage) and not corr_id:
            self.abort(message.message)
        elif isinstance(message, Accepted) and job_ids:
            refused = {item.index for item in message.exceptions if item.code}
            self._polls.add(job_id for place, job_id in enumerate(job_ids) if place not in refused)

    def forget(self, job_ids: Iterable[str]) -> None:
        self._polls.forget(job_ids)

    # ------------------------------------------------------------------------------------------------ end

    def _broken(self, error: TasukiError) -> None:
        """Close the link for an error that ends it."""
        if self._closed:
            return
        if isinstance(error, NotFound):
            error = NotTasuki(f"{self._address} has no {FRAMES_PATH}: its path is another one, or it is older than this client")
        elif isinstance(error, Unauthorized) and not self._transport.token:
            error = Unauthorized(UNAUTHENTICATED)
        if not isinstance(error, NoConnection | ResponseLost | NotTasuki):  # final, if it was the Hello that was refused
            self._on_message(self, ErrorMessage(0, error.code, error.message, error.details()))
        self.abort(error.message)

    def _stop(self) -> None:
        self._queue.clear()
        self._ending = self._polls.close()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._ending, return_exceptions=True)
        await super().wait_closed()
