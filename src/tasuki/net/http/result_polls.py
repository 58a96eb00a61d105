"""The ends of jobs over HTTP: which ones are waited for, and the long polls that wait for them.

Theory of operation. TCP tells the end of a watched job by itself. Here it is asked for: a poll names jobs, and is answered as
soon as some of them have ended, or after its wait. What it named and did not hear of is named by the next one, so a poll that is
cut costs nothing but the asking; what came twice is dropped by whoever waits. A job that becomes of interest while a poll is open
gets another poll beside it. When there are as many as may be, the smallest is given up, and its jobs go into one with the new
ones. So a client that only waits has one request open, whatever the number of jobs.

Jobs that the owner asks for by name are looked at first, without a wait: it is told which of them the server does not know.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol

from tasuki.core.backoff import Backoff
from tasuki.core.protocol import BATCH_MAX, FRAME_MAX_BYTES, ErrorMessage, Message, Reply, Request, Results
from tasuki.errors import NoConnection, Overloaded, ResponseLost, TasukiError, Unavailable
from tasuki.net.http.names import FRAMES_MAX
from tasuki.wire.messages import encode

FIRST_MSG_ID = 1 << 41  # above what a machine's own counter reaches, so that the two never meet
POLL_WAIT_S = 25.0  # below every idle time-out on the way
POLL_WAIT_MIN_S = 5.0
POLL_SLACK_S = 15.0  # how much longer an answer may take before the server is taken to be gone
POLLS_MAX = 4
WINDOW_MAX = 8 * BATCH_MAX  # jobs of one poll
GATHER_S = 0.005  # jobs that are accepted one after the other go into one poll
MAKE_ROOM_S = 0.25  # a poll that is given up costs its connection
PAUSE_FIRST_S = 0.2
PAUSE_MAX_S = 5.0
CUTS_MAX = 2  # in a row; a third means that the server is gone


class PostFrames(Protocol):
    """Sends frames, gives the messages of the answer as they come."""

    def __call__(
        self, frames: Sequence[bytes], params: Mapping[str, str], answer_s: float
    ) -> AbstractAsyncContextManager[AsyncIterator[Message]]: ...


class _Group(NamedTuple):
    """One request `watch`."""

    msg_id: int
    job_ids: list[str]
    frame: bytes


class _Poll:
    """One request that is open."""

    def __init__(self, groups: list[_Group]) -> None:
        self.groups = {group.msg_id: group for group in groups}
        self.size = sum(len(group.job_ids) for group in groups)
        self.task: asyncio.Task[None] | None = None


class Watches:
    """`hear` gets what the owner should know, `fail` what ends the link, `post` sends."""

    def __init__(self, post: PostFrames, hear: Callable[[Message], None], fail: Callable[[TasukiError], None]) -> None:
        self._post, self._hear, self._fail = post, hear, fail
        self._loop = asyncio.get_running_loop()
        self._msg_ids = itertools.count(FIRST_MSG_ID)
        self._asked: deque[_Group] = deque()
        """The owner's own requests, which no server has answered yet."""
        self._known: set[str] = set()
        """All whose ends are waited for: those of open polls, and those that wait for one."""
        self._waiting: dict[str, None] = {}
        self._polls: set[_Poll] = set()
        self._looks: set[_Poll] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._made_room_at = 0.0
        self._wait_s = POLL_WAIT_S
        self._backoff = Backoff(PAUSE_FIRST_S, PAUSE_MAX_S)
        self._cuts = 0
        self._closed = False

    def ask(self, request: Request) -> None:
        """The owner asks for the ends of jobs; it hears whether the server knows them. InvalidInput if it cannot be sent."""
        frame = encode(request, max_bytes=FRAME_MAX_BYTES)
        self._asked.append(_Group(request.msg_id, list(request.params["job_ids"]), frame))
        self._soon(GATHER_S)

    def add(self, job_ids: Iterable[str]) -> None:
        """These were accepted."""
        fresh = [job_id for job_id in job_ids if job_id not in self._known]
        if fresh:
            self._known.update(fresh)
            self._waiting.update(dict.fromkeys(fresh))
            self._soon(GATHER_S)

    def forget(self, job_ids: Iterable[str]) -> None:
        """Nobody waits for these any more."""
        for job_id in job_ids:
            self._known.discard(job_id)
            self._waiting.pop(job_id, None)

    def close(self) -> list[asyncio.Task[None]]:
        """What is still to end."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        under_way = [poll.task for poll in self._polls | self._looks]
        tasks = [task for task in under_way if task is not None and task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        return tasks

    # ------------------------------------------------------------------------------------------------ which polls there are

    def _soon(self, wait_s: float) -> None:
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(wait_s, self._open)

    def _open(self) -> None:
        self._timer = None
        if self._closed:
            return
        if self._asked:
            self._start(self._looks, self._next_asked())
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
            return False  # the next one that ends makes room
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
        """Those that have waited longest."""
        groups: list[_Group] = []
        while self._waiting and len(groups) < WINDOW_MAX // BATCH_MAX:
            job_ids = list(itertools.islice(self._waiting, BATCH_MAX))
            for job_id in job_ids:
                del self._waiting[job_id]
            msg_id = next(self._msg_ids)
            groups.append(_Group(msg_id, job_ids, encode(Request(msg_id, "watch", {"job_ids": job_ids}))))
        return groups

    def _put_back(self, poll: _Poll) -> None:
        """What the poll named and did not hear of is to be named again."""
        self._polls.discard(poll)
        self._looks.discard(poll)
        for group in poll.groups.values():
            if group.msg_id < FIRST_MSG_ID:
                self._asked.append(group)
            else:
                self._waiting.update(dict.fromkeys(job_id for job_id in group.job_ids if job_id in self._known))

    # ------------------------------------------------------------------------------------------------ one poll

    async def _run(self, poll: _Poll) -> None:
        began = self._loop.time()
        try:
            told = await self._ask(poll)
            self._cuts = 0
        except ResponseLost as error:
            told = 0
            self._cut(error, self._loop.time() - began)
        except NoConnection as error:
            self._fail(error)
            return
        except Unavailable:  # the server said "not now"
            told = 0
        except TasukiError as error:
            self._fail(error)
            return
        self._put_back(poll)
        if told or self._loop.time() - began >= POLL_WAIT_MIN_S / 2:
            self._backoff.reset()
            self._open()
        else:  # it came back at once, with nothing: asking again at once would be a hot loop
            self._soon(self._backoff.next_s())

    def _cut(self, error: ResponseLost, lasted_s: float) -> None:
        if lasted_s > POLL_WAIT_MIN_S:  # something on the way has less patience than we
            self._wait_s = max(POLL_WAIT_MIN_S, min(self._wait_s, lasted_s * 0.7))
            return
        self._cuts += 1
        if self._cuts > CUTS_MAX:
            self._fail(error)

    async def _ask(self, poll: _Poll) -> int:
        """How much there was to tell."""
        wait_s = 0.0 if poll in self._looks else POLL_WAIT_MIN_S if self._waiting else self._wait_s  # others wait for their turn
        frames = [group.frame for group in poll.groups.values()]
        told = 0
        async with self._post(frames, {"wait": f"{wait_s:g}"}, wait_s + POLL_SLACK_S) as messages:
            async for message in messages:
                told += self._take(poll, message)
        return told

    def _take(self, poll: _Poll, message: Message) -> int:
        match message:
            case Results():
                self._known.difference_update([item.job_id for item in message.items])
                self._hear(message)
                return 1
            case Reply():
                return self._replied(poll, message)
            case ErrorMessage() if message.corr_id:
                return self._refused(poll, message)
            case _:
                self._hear(message)
                return 0

    def _replied(self, poll: _Poll, reply: Reply) -> int:
        """The server has looked at these; from now on they are ours to name."""
        group = poll.groups.get(reply.corr_id)
        if group is None or group.msg_id >= FIRST_MSG_ID:
            return 0
        del poll.groups[group.msg_id]
        self._hear(reply)
        self._add_behind(poll, group.job_ids)
        return 1

    def _add_behind(self, poll: _Poll, job_ids: Iterable[str]) -> None:
        """Results of the same answer come after the reply: these wait for the next poll only if none does."""
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
            self._hear(message)
            return 1
        if message.code not in (Unavailable.code, Overloaded.code):
            # One of them is gone, deleted after its end was due. The owner asks for all again and finds out which.
            self._fail(ResponseLost(f"jobs that are waited for cannot be watched any more: {message.message}"))
        return 0


def names_jobs(params: Mapping[str, Any]) -> bool:
    """Does a request name jobs as `watch` should? What does not is the server's to refuse."""
    job_ids = params.get("job_ids")
    return isinstance(job_ids, list) and all(isinstance(job_id, str) for job_id in job_ids)
