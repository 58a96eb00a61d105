"""A worker's link over HTTP: to its owner a connection that speaks messages, to the network two requests at most.

Theory of operation. The Hello opens a session at the server, which keeps a virtual connection for it. One request, the *poll*, is
nearly always open: it is answered as soon as the server has something to say, or after its wait. What the worker says in one
turn of the loop leaves at once in a second request, one after the other.

Requests are cut on the way, by proxies above all, and that must not cost the session. So both directions are numbered: the
worker repeats what it said under the same number until it is answered, and the server tells again what the worker has not
said that it heard. What does end the link: nobody answers, the session is not known any more (the server was started again, or
the request came to another one), the token is refused. The machine above then says Hello again and names what it holds.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager

from msgspec.structs import replace

from tasuki.core.address import Address
from tasuki.core.backoff import Backoff
from tasuki.core.job import BlobRef
from tasuki.core.protocol import (
    FRAME_MAX_BYTES,
    FRAMES_MAX,
    SESSION_HEADER,
    WORKER_PATH,
    ErrorMessage,
    HelloWorker,
    JobsFinished,
    Message,
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
    Unavailable,
)
from tasuki.net.http.base_link import REQUEST_MAX_BYTES, BaseHttpLink, check_token, post
from tasuki.net.http.blobs import HttpBlobs
from tasuki.net.http.transport import ANSWER_S, HttpTransport
from tasuki.net.streams import FileSource
from tasuki.wire.messages import encode

POLL_WAIT_S = 25.0
POLL_WAIT_MIN_S = 5.0
POLL_SLACK_S = 10.0  # beyond the wait, for an answer that is on its way
TRIES_MAX = 5  # of one request, while there is somebody who may answer
PAUSE_FIRST_S = 0.05  # between two tries; doubled each time
_BACKOFF = Backoff(PAUSE_FIRST_S, jitter=random.random)
LEAVE_S = 3.0

logger = logging.getLogger("tasuki.worker")


class HttpWorkerLink(BaseHttpLink):
    """One address, for as long as it answers and knows the session."""

    def __init__(
        self,
        address: Address,
        on_message: Callable[[HttpWorkerLink, Message], None],
        on_closed: Callable[[HttpWorkerLink, str], None],
        *,
        tls: ssl.SSLContext | None,
        timeout_s: float,
    ) -> None:
        super().__init__(address, on_message, on_closed, tls=tls, timeout_s=timeout_s)
        self._path = ""
        self._queue: deque[bytes] = deque()
        self._saying = False
        self._under_way: list[bytes] = []
        """What was said and is not answered yet."""
        self._last_words: deque[bytes] | None = None
        self._said = 0
        """The number of the last request with something to say."""
        self._heard = 0
        """How many frames have come in polls."""
        self._wait_s = POLL_WAIT_S

    def _make_blobs(self, transport: HttpTransport) -> HttpBlobs:
        return _WorkerBlobs(transport)

    # ------------------------------------------------------------------------------------------------ out

    def say(self, message: Message) -> None:
        """Send it, or InvalidInput if no frame can hold it."""
        if self._closed:
            return
        if isinstance(message, HelloWorker):
            self.blobs.params = {"worker_id": message.worker_id, "incarnation": message.incarnation}
            self._tasks.spawn(self._greet(message))
            return
        self._queue.extend(self._frames_of(message))
        self._speak()

    def _frames_of(self, message: Message) -> list[bytes]:
        """One, or several where that is the only way past a proxy: endings that waited together may be large together."""
        frame = encode(message, self.codec, max_bytes=FRAME_MAX_BYTES)
        if not isinstance(message, JobsFinished) or len(frame) <= REQUEST_MAX_BYTES or len(message.endings) == 1:
            return [frame]
        half = len(message.endings) // 2
        return [*self._frames_of(JobsFinished(message.endings[:half])), *self._frames_of(JobsFinished(message.endings[half:]))]

    def _speak(self) -> None:
        if self._queue and self._path and not self._saying:
            self._saying = True
            self._loop.call_soon(lambda: self._tasks.spawn(self._say_all()))

    async def _say_all(self) -> None:
        """One request after the other, until nothing is left to say."""
        try:
            while self._queue and not self._closed:
                await self._say_some(self._queue)
        except TasukiError as error:
            self._break(error)
        finally:
            self._saying = False

    async def _say_some(self, queue: deque[bytes]) -> None:
        """As much of it as one request takes; first what may have been said, and was not answered, as it was."""
        bundle = self._under_way = self._under_way or self._bundle_of(queue)
        try:
            await self._say_surely(bundle)
        except InvalidInput:  # nothing of it was taken: too large for something on the way, or for the time that a body may take
            if len(bundle) == 1:
                raise
            self._request_max_bytes = sum(map(len, bundle)) // 2
            queue.extendleft(reversed(bundle))
        self._under_way = []

    def _bundle_of(self, queue: deque[bytes]) -> list[bytes]:
        bundle = [queue.popleft()]
        size = len(bundle[0])
        while queue and len(bundle) < FRAMES_MAX and size + len(queue[0]) <= self._request_max_bytes:
            bundle.append(queue.popleft())
            size += len(bundle[-1])
        return bundle

    async def _say_surely(self, bundle: list[bytes]) -> None:
        """Repeated under its number, word for word, while it may or may not have arrived."""
        number = self._said + 1
        tries = 0
        while True:
            try:
                async with post(self._transport, self._path, bundle, {"said": str(number)}, ANSWER_S) as answer:
                    async for _ in answer.messages:
                        """What there is to hear comes with the polls."""
                self._said = number
                return
            except (Unavailable, NotFound) as error:
                tries += 1
                if _is_final(error, tries):
                    raise
                await asyncio.sleep(_pause_s(tries, error))

    # ------------------------------------------------------------------------------------------------ in

    async def _greet(self, hello: HelloWorker) -> None:
        welcome = None
        try:
            self._transport.token = check_token(hello.token)
            frame = encode(replace(hello, token=""))
            async with post(self._transport, WORKER_PATH, [frame], {}, ANSWER_S) as answer:
                session = answer.headers.get(SESSION_HEADER, "")
                async for message in answer.messages:
                    if isinstance(message, ErrorMessage):
                        self._refused(message)
                        return
                    if isinstance(message, Welcome):
                        welcome = message
        except TasukiError as error:
            self._break(error)
            return
        if not session or welcome is None:
            self._break(
                NotTasuki(f"{self._address} answered the Hello of a worker with no session; is it older than this worker?")
            )
            return
        self._path = f"{WORKER_PATH}/{session}"
        self._tasks.spawn(self._poll())
        self._on_message(self, welcome)
        self._speak()

    async def _poll(self) -> None:
        tries = 0
        while not self._closed:
            began, heard = self._loop.time(), self._heard
            failed: TasukiError | None = None
            try:
                await self._poll_once()
                if self._heard > heard or self._loop.time() - began > POLL_WAIT_MIN_S / 2:
                    tries = 0
                    continue
                tries = min(tries + 1, TRIES_MAX)  # it came back at once, with nothing: asking again at once would be a hot loop
            except (Unavailable, NotFound) as error:
                lasted_s = self._loop.time() - began
                if isinstance(error, ResponseLost) and lasted_s > POLL_WAIT_MIN_S:  # a proxy has a shorter timeout than this poll
                    self._wait_s = max(POLL_WAIT_MIN_S, min(self._wait_s, lasted_s * 0.7))
                    tries = 0
                tries += 1
                failed = error
                if _is_final(error, tries):
                    self._break(error)
                    return
            except TasukiError as error:
                self._break(error)
                return
            await asyncio.sleep(_pause_s(tries, failed))

    async def _poll_once(self) -> None:
        params = {"heard": str(self._heard), "wait": f"{self._wait_s:g}"}
        async with post(self._transport, self._path, [], params, self._wait_s + POLL_SLACK_S) as answer:
            async for message in answer.messages:
                self._heard += 1
                if isinstance(message, ErrorMessage) and not message.corr_id:
                    self._refused(message)
                    return
                if message is not None and not self._closed:
                    self._on_message(self, message)

    # ------------------------------------------------------------------------------------------------ end

    def forget(self, job_ids: Iterable[str]) -> None:
        """A worker watches no jobs."""

    def _refused(self, error: ErrorMessage) -> None:
        """The server has hung up, and this is why."""
        if not self._closed:
            self._on_message(self, error)
            self.abort(error.message)

    def _break(self, error: TasukiError) -> None:
        """The link is of no use any more."""
        if self._closed:
            return
        if isinstance(error, NotFound) and self._path:
            self.abort("the server does not know this session any more: it was started again, or another server answers there")
            return
        if isinstance(error, NotFound):
            error = NotTasuki(f"{self._address} has no {WORKER_PATH}: its path is another one, or it is older than this worker")
        elif isinstance(error, Unauthorized) and not self._transport.token:
            error = Unauthorized(
                "a token is needed: TASUKI_ENROLL or --enroll-file to enrol, or --token-file with a worker token"
            )
        final = isinstance(error, Unauthorized | Forbidden | TooLarge)  # saying it again is no better
        if final or (isinstance(error, InvalidInput) and not self._path):  # in a session it may be a body that was cut on the way
            self._on_message(self, ErrorMessage(0, error.code, error.message, error.details()))
        self.abort(error.message)

    def close(self, error: TasukiError | None = None) -> None:
        """What is still to be said is said in `wait_closed`, and the server is told that this worker leaves."""
        if self._path and not self._closed:
            self._last_words = deque(self._queue)
        super().close(error)

    def _stop(self) -> None:
        self._queue.clear()

    async def wait_closed(self) -> None:
        """After `close` or `abort`: until nothing of it is left."""
        await self._tasks.wait()
        if self._last_words is not None:
            try:
                async with asyncio.timeout(LEAVE_S):
                    await self._leave(self._last_words)
            except (TasukiError, TimeoutError) as error:  # then the server finds out by itself, when the ttl is over
                logger.debug("the server could not be told that this worker leaves: %s", error)
        await super().wait_closed()

    async def _leave(self, last_words: deque[bytes]) -> None:
        while self._under_way or last_words:
            await self._say_some(last_words)
        async with self._transport.exchange("DELETE", self._path):
            """The status says it all."""


class _WorkerBlobs(HttpBlobs):
    """A token that is refused may have been rotated. Whether that is the end is for the link to find out; a transfer waits."""

    async def put(self, source: FileSource, ref: BlobRef, progress: Callable[[int], None] | None) -> None:
        with _patiently():
            await super().put(source, ref, progress)

    async def pieces(self, ref: BlobRef, job_id: str, offset: int) -> AsyncGenerator[bytes, None]:
        with _patiently():
            async with aclosing(super().pieces(ref, job_id, offset)) as pieces:
                async for piece in pieces:
                    yield piece


@contextmanager
def _patiently() -> Iterator[None]:
    try:
        yield
    except Unauthorized as error:
        raise ResponseLost(error.message) from error


def _is_final(error: TasukiError, tries: int) -> bool:
    """Whether another try at this address is of no use. Behind a balancer the next one may reach the server that knows us."""
    return isinstance(error, NoConnection) or tries > TRIES_MAX


def _pause_s(tries: int, error: TasukiError | None) -> float:
    """Not the same for all workers of a server that was away. Where a server answered, another one may know us: no long wait."""
    return _BACKOFF.delay_s(0 if isinstance(error, NotFound) else tries)
