"""A link over HTTP: to its owner a connection that speaks messages, to the network plain requests, each of which stands alone.

Theory of operation. What the owner says in one turn of the loop leaves in one request (`/v1/frames`), several of which may be
under way; what may wait long for its answer (a log that is followed) has one for itself. The token of the Hello goes into a
header, not into the frame. The link is closed by whatever would break a connection: no answer, half an answer, a server that is
not there. Its owner then dials again and says again what is safe to say twice, as over TCP. A request that was refused as a whole
is an error to each message in it, and the link goes on.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from msgspec.structs import replace

from tasuki.core.address import Address
from tasuki.core.protocol import (
    FRAME_MAX_BYTES,
    Accepted,
    ErrorMessage,
    Heartbeat,
    HeartbeatAnswer,
    HelloClient,
    Message,
    Request,
    SubmitJobs,
    Welcome,
)
from tasuki.errors import (
    Forbidden,
    InvalidInput,
    NoConnection,
    NotFound,
    NotTasuki,
    ResponseLost,
    TasukiError,
    TooLarge,
    Unauthorized,
)
from tasuki.net.http.base_link import BaseHttpLink
from tasuki.net.http.frame_bodies import check_token, post
from tasuki.net.http.names import FRAMES_MAX, FRAMES_PATH
from tasuki.net.http.result_polls import Watches, names_jobs
from tasuki.net.http.transport import ANSWER_S
from tasuki.wire.messages import encode

REQUESTS_AT_ONCE = 8
WAITS_AT_ONCE = 32
WAITING_VERBS = frozenset({"logs"})  # whose answers may take long


class _Said(NamedTuple):
    msg_id: int
    frame: bytes


class HttpClientLink(BaseHttpLink):
    """One address, for as long as it answers."""

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
        self._watches = Watches(self._post, self._hear, self._broken)
        self._queue: deque[_Said] = deque()
        self._flushing = False
        self._quick = 0
        """Requests under way, but for those that may wait long."""
        self._waits = asyncio.Semaphore(WAITS_AT_ONCE)
        self._submits: dict[int, list[str]] = {}
        """By msg_id: the jobs whose ends are to be heard of, once they are accepted."""
        self._unanswered: set[int] = set()
        self._greeted = False
        self._polls: list[asyncio.Task[None]] = []
        """Those that were under way at the end."""

    # ------------------------------------------------------------------------------------------------ out

    def say(self, message: Message) -> None:
        """Send it, or InvalidInput if no frame can hold it."""
        if self._closed:
            return
        match message:
            case HelloClient():
                self._greet(message)
            case Heartbeat() if not self._unanswered:
                # Whether the server is there shows at the next request; until then nobody needs to know.
                self._loop.call_soon(self._hear, HeartbeatAnswer(message.msg_id))
            case Request(verb="watch") if names_jobs(message.params):
                self._watches.ask(message)
            case _:
                self._queue_up(message)

    def _greet(self, hello: HelloClient) -> None:
        self._transport.token = check_token(hello.token)
        said = self._said(hello.msg_id, encode(replace(hello, token="")))
        self._tasks.spawn(self._bundle([said]))

    def _queue_up(self, message: Message) -> None:
        said = self._said(getattr(message, "msg_id", 0), encode(message, self.codec, max_bytes=FRAME_MAX_BYTES))
        if isinstance(message, SubmitJobs) and message.watch:
            self._submits[said.msg_id] = [spec.job_id for spec in message.specs]
        if isinstance(message, Request) and message.verb in WAITING_VERBS and message.params.get("wait_s"):
            self._tasks.spawn(self._alone(said))
            return
        self._queue.append(said)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _said(self, msg_id: int, frame: bytes) -> _Said:
        self._unanswered.add(msg_id)
        return _Said(msg_id, frame)

    def _flush(self) -> None:
        self._flushing = False
        while self._queue and self._quick < REQUESTS_AT_ONCE and not self._closed:
            self._quick += 1
            self._tasks.spawn(self._next(self._next_bundle()))

    def _next_bundle(self) -> list[_Said]:
        bundle = [self._queue.popleft()]
        size = len(bundle[0].frame)
        while self._queue and len(bundle) < FRAMES_MAX and size + len(self._queue[0].frame) <= self._request_max_bytes:
            bundle.append(self._queue.popleft())
            size += len(bundle[-1].frame)
        return bundle

    async def _next(self, bundle: list[_Said]) -> None:
        try:
            await self._bundle(bundle)
        finally:
            self._quick -= 1
            self._flush()

    # ------------------------------------------------------------------------------------------------ one request

    async def _alone(self, said: _Said) -> None:
        async with self._waits:
            await self._bundle([said])

    async def _bundle(self, bundle: list[_Said]) -> None:
        unanswered = {said.msg_id for said in bundle if said.msg_id}
        try:
            async with self._post([said.frame for said in bundle], {}, ANSWER_S) as messages:
                async for message in messages:
                    unanswered.discard(getattr(message, "corr_id", 0))
                    self._hear(message)
        except (NoConnection, ResponseLost, NotTasuki, Unauthorized, Forbidden) as error:
            self._broken(error)
        except TasukiError as error:
            if isinstance(error, NotFound) or not self._greeted:
                self._broken(error)
            elif isinstance(error, InvalidInput) and len(bundle) > 1:
                await self._apart(bundle, error)
            else:
                self._refuse(bundle, error)
        else:
            for msg_id in unanswered:
                self._hear(ErrorMessage(msg_id, "UNAVAILABLE", f"{self._address} has answered without a word to this"))

    async def _apart(self, bundle: list[_Said], error: InvalidInput) -> None:
        """Nothing of it was done. Together they were too large for something on the way, or one was bad: which shows apart."""
        if isinstance(error, TooLarge):
            self._request_max_bytes = sum(len(said.frame) for said in bundle) // 2
        for said in bundle:
            await self._bundle([said])

    def _refuse(self, bundle: list[_Said], error: TasukiError) -> None:
        for said in bundle:
            self._hear(ErrorMessage(said.msg_id, error.code, error.message, error.details()))

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
            self._watches.add(job_id for place, job_id in enumerate(job_ids) if place not in refused)

    def forget(self, job_ids: Iterable[str]) -> None:
        """Nobody waits for the ends of these any more."""
        self._watches.forget(job_ids)

    # ------------------------------------------------------------------------------------------------ end

    def _broken(self, error: TasukiError) -> None:
        """The link is of no use any more."""
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
        self._polls = self._watches.close()

    async def wait_closed(self) -> None:
        """After `close` or `abort`: until nothing of it is left."""
        await asyncio.gather(*self._polls, return_exceptions=True)
        await super().wait_closed()
