"""A client's link over HTTP: to its owner a connection that carries messages, on the network independent requests.

Theory of operation. The messages that the owner sends in one turn of the loop leave in one request (`/v1/frames`), several of
which may be under way; a message that may wait long for its answer (a log that is followed) has a request of its own. The token
of the Hello goes into a header, not into the frame. The link is closed by whatever would break a connection: no answer, half an
answer, an unreachable server. Its owner then dials again and repeats the messages that are safe to repeat, as over TCP. A request
that was refused as a whole is an error for each message in it, and the link stays open.

The ends of jobs come by long polls (`ResultPolls`): each names the jobs of several `watch` requests, and the jobs that it was not
told of are named again by the next.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from tasuki.core.address import Address
from tasuki.core.backoff import Backoff
from tasuki.core.protocol import (
    BATCH_MAX,
    FRAME_MAX_BYTES,
    FRAMES_MAX,
    FRAMES_PATH,
    Accepted,
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
from tasuki.net.http.base_link import BaseHttpLink, check_token, next_bundle, post
from tasuki.net.http.transport import ANSWER_S
from tasuki.wire.messages import encode

FIRST_MSG_ID = 1 << 41  # above the counters of machines and of blob transfers
POLL_WAIT_S = 25.0  # below the idle timeouts of proxies
POLL_WAIT_MIN_S = 5.0
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


class PostFrames(Protocol):
    """Sends frames, and yields the messages of the answer as they come."""

    def __call__(
        self, frames: Sequence[bytes], params: Mapping[str, str], answer_s: float
    ) -> AbstractAsyncContextManager[AsyncIterator[Message]]: ...


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
        fresh = [job_id for job_id in job_ids if job_id not in self._known]
        if fresh:
            self._known.update(fresh)
            self._waiting.update(dict.fromkeys(fresh))
            self._soon(GATHER_S)

    def forget(self, job_ids: Iterable[str]) -> None:
        """Stop watching these jobs: nobody waits for their ends."""
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
        try:
            count = await self._ask(poll)
            self._cuts = 0
        except ResponseLost as error:
            count = 0
            self._cut(error, self._loop.time() - began)
        except NoConnection as error:
            self._fail(error)
            return
        except Unavailable:  # the server refused for now
            count = 0
        except TasukiError as error:
            self._fail(error)
            return
        self._put_back(poll)
        if count or self._loop.time() - began >= POLL_WAIT_MIN_S / 2:
            self._backoff.reset()
            self._open()
        else:  # it came back at once, and empty: another one at once would be a hot loop
            self._soon(self._backoff.next_s())

    def _cut(self, error: ResponseLost, lasted_s: float) -> None:
        if lasted_s > POLL_WAIT_MIN_S:  # a proxy has a shorter timeout than this poll
            self._wait_s = max(POLL_WAIT_MIN_S, min(self._wait_s, lasted_s * 0.7))
            return
        self._cuts += 1
        if self._cuts > CUTS_MAX:
            self._fail(error)

    async def _ask(self, poll: _Poll) -> int:
        """Run one poll, and return the number of messages for the owner."""
        wait_s = (
            0.0 if poll in self._first_polls else POLL_WAIT_MIN_S if self._waiting else self._wait_s
        )  # others wait for a poll
        frames = [group.frame for group in poll.groups.values()]
        count = 0
        async with self._post(frames, {"wait": f"{wait_s:g}"}, wait_s + POLL_SLACK_S) as messages:
            async for message in messages:
                count += self._take(poll, message)
        return count

    def _take(self, poll: _Poll, message: Message) -> int:
        match message:
            case Results():
                self._known.difference_update([item.job_id for item in message.items])
                self._on_message(message)
                return 1
            case Reply():
                return self._replied(poll, message)
            case ErrorMessage() if message.corr_id:
                return self._refused(poll, message)
            case _:
                self._on_message(message)
                return 0

    def _replied(self, poll: _Poll, reply: Reply) -> int:
        """Pass on the answer to the owner's `watch`; its jobs are watched from now on."""
        group = poll.groups.get(reply.corr_id)
        if group is None or group.msg_id >= FIRST_MSG_ID:
            return 0
        del poll.groups[group.msg_id]
        self._on_message(reply)
        self._add_behind(poll, group.job_ids)
        return 1

    def _add_behind(self, poll: _Poll, job_ids: Iterable[str]) -> None:
        """Watch jobs after this poll: the results in the same response come after the reply."""
        fresh = [job_id for job_id in job_ids if job_id not in self._known]
        self._known.update(fresh)
        msg_id = next(self._msg_ids)
        poll.groups[msg_id] = _Group(msg_id, fresh, b"")

    def _refused(self, poll: _Poll, message: ErrorMessage) -> int:
        group = poll.groups.get(message.corr_id)
        if group is None:
            return 0
        if group.msg_id < FIRST_MSG_ID:
            del poll.groups[group.msg_id]
            self._on_message(message)
            return 1
        if message.code not in (Unavailable.code, Overloaded.code):
            # One of the jobs is gone, deleted after its end was due. The owner asks for all of them again and finds out which.
            self._fail(ResponseLost(f"awaited jobs cannot be watched any more: {message.message}"))
        return 0


def names_jobs(params: Mapping[str, Any]) -> bool:
    """Return whether a `watch` request names jobs as it should. The server refuses those that do not."""
    job_ids = params.get("job_ids")
    return isinstance(job_ids, list) and all(isinstance(job_id, str) for job_id in job_ids)


class _QueuedFrame(NamedTuple):
    msg_id: int
    frame: bytes


class HttpClientLink(BaseHttpLink):
    """A link to one address, until it stops answering."""

    def __init__(
        self,
        address: Address,
        on_message: Callable[[HttpClientLink, Message], None],
        on_closed: Callable[[HttpClientLink, str], None],
        *,
        tls: ssl.SSLContext | None,
        timeout_s: float,
    ) -> None:
        super().__init__(address, on_message, on_closed, tls=tls, timeout_s=timeout_s)
        self._polls = ResultPolls(self._post, self._hear, self._broken)
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
        """Send a message, or raise InvalidInput if it does not fit a frame; then nothing was sent."""
        if self._closed:
            return
        match message:
            case HelloClient():
                self._greet(message)
            case Heartbeat() if not self._unanswered:
                # The next request shows whether the server is there; until then nobody needs to know.
                self._loop.call_soon(self._hear, HeartbeatAnswer(message.msg_id))
            case Request(verb="watch") if names_jobs(message.params):
                self._polls.ask(message)
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
        if isinstance(message, Request) and message.verb in WAITING_VERBS and message.params.get("wait_s"):
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
                await self._send_apart(bundle, error)
            else:
                self._refuse(bundle, error)
        else:
            for msg_id in unanswered:
                self._hear(ErrorMessage(msg_id, "UNAVAILABLE", f"{self._address} has answered without a reply to this request"))

    async def _send_apart(self, bundle: list[_QueuedFrame], error: InvalidInput) -> None:
        """Send the messages of a refused request one by one: together they were too large for a proxy, or one of them was bad."""
        if isinstance(error, TooLarge):
            self._request_max_bytes = sum(len(queued.frame) for queued in bundle) // 2
        for queued in bundle:
            await self._bundle([queued])

    def _refuse(self, bundle: list[_QueuedFrame], error: TasukiError) -> None:
        for queued in bundle:
            self._hear(ErrorMessage(queued.msg_id, error.code, error.message, error.details()))

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
        self._unanswered.discard(getattr(message, "corr_id", 0))
        match message:
            case Welcome():
                self._greeted = True
            case ErrorMessage() if not message.corr_id:
                self._on_message(self, message)
                self.abort(message.message)
                return
            case ErrorMessage():
                self._submits.pop(message.corr_id, None)
            case Accepted():
                self._on_message(self, message)
                self._watch(message)
                return
        self._on_message(self, message)

    def _watch(self, accepted: Accepted) -> None:
        job_ids = self._submits.pop(accepted.corr_id, None)
        if job_ids:
            refused = {item.index for item in accepted.exceptions if item.code}
            self._polls.add(job_id for place, job_id in enumerate(job_ids) if place not in refused)

    def forget(self, job_ids: Iterable[str]) -> None:
        """Stop watching these jobs: nobody waits for their ends."""
        self._polls.forget(job_ids)

    # ------------------------------------------------------------------------------------------------ end

    def _broken(self, error: TasukiError) -> None:
        """Close the link for an error that ends it."""
        if self._closed:
            return
        if isinstance(error, NotFound):
            error = NotTasuki(f"{self._address} has no {FRAMES_PATH}: its path is another one, or it is older than this client")
        elif isinstance(error, Unauthorized) and not self._transport.token:
            error = Unauthorized(
                "a token is needed: --token-file FILE or TASUKI_TOKEN (the server's own user finds it in the data folder)"
            )
        if not isinstance(error, NoConnection | ResponseLost | NotTasuki):  # final, if it was the Hello that was refused
            self._on_message(self, ErrorMessage(0, error.code, error.message, error.details()))
        self.abort(error.message)

    def _stop(self) -> None:
        self._queue.clear()
        self._ending = self._polls.close()

    async def wait_closed(self) -> None:
        """Wait after `close` or `abort` until all resources are freed."""
        await asyncio.gather(*self._ending, return_exceptions=True)
        await super().wait_closed()
