"""A worker's link over HTTP: to its owner a connection that carries messages, on the network at most two requests at a time.

Theory of operation. The Hello opens a session at the server, which keeps a virtual connection for it. One request, the *poll*, is
nearly always open: it is answered as soon as the server has a message for the worker, or after its wait. The messages that the
worker sends in one turn of the loop leave at once in a second request, one request after the other.

Requests are cut on the way, mostly by proxies, and that must not end the session. So both directions are numbered: the worker
repeats a request under the same number until it is answered, and the server repeats the frames that the worker has not
acknowledged. The link ends when nobody answers, when the session is unknown (the server was restarted, or another one was
reached), and when the token is refused. The machine above then sends Hello again, with the leases that it holds.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections import deque
from collections.abc import Iterable

from msgspec.structs import replace

from tasuki.core.address import Address
from tasuki.core.backoff import Backoff
from tasuki.core.protocol import (
    FRAME_MAX_BYTES,
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
from tasuki.net.http.base_link import (
    POLL_WAIT_MIN_S,
    POLL_WAIT_S,
    REQUEST_MAX_BYTES,
    BaseHttpLink,
    OnClosed,
    OnMessage,
    check_token,
    next_bundle,
    post,
    shorter_wait_s,
)
from tasuki.net.http.transport import ANSWER_S
from tasuki.wire.messages import encode

POLL_SLACK_S = 10.0  # beyond the wait, for an answer under way
TRIES_MAX = 5  # of one request, while connections can be made
PAUSE_FIRST_S = 0.05  # between two tries; doubled each time
_BACKOFF = Backoff(PAUSE_FIRST_S, jitter=random.random)
LEAVE_S = 3.0

logger = logging.getLogger("tasuki.worker")


class HttpWorkerLink(BaseHttpLink):
    """A link to one address, until it stops answering or forgets the session."""

    def __init__(
        self, address: Address, on_message: OnMessage, on_closed: OnClosed, tls: ssl.SSLContext | None, timeout_s: float
    ) -> None:
        super().__init__(address, on_message, on_closed, tls, timeout_s)
        self._path = ""
        self._queue: deque[bytes] = deque()
        self._sending = False
        self._under_way: list[bytes] = []
        """Frames of a request that is not answered yet."""
        self._unsent: deque[bytes] | None = None
        self._said = 0
        """Number of the last request with frames that was answered."""
        self._heard = 0
        """Number of frames that have come in polls."""
        self._wait_s = POLL_WAIT_S
        self.blobs.retries_unauthorized = True

    # ------------------------------------------------------------------------------------------------ out

    def say(self, message: Message) -> None:
        if self._closed:
            return
        if isinstance(message, HelloWorker):
            self.blobs.params = {"worker_id": message.worker_id, "incarnation": message.incarnation}
            self._tasks.spawn(self._greet(message))
            return
        self._queue.extend(self._frames_of(message))
        self._send_soon()

    def _frames_of(self, message: Message) -> list[bytes]:
        """Return one frame, or several that pass a proxy's limit: the endings of an outage may be large together."""
        frame = encode(message, self.codec, max_bytes=FRAME_MAX_BYTES)
        if not isinstance(message, JobsFinished) or len(frame) <= REQUEST_MAX_BYTES or len(message.endings) == 1:
            return [frame]
        half = len(message.endings) // 2
        return [*self._frames_of(JobsFinished(message.endings[:half])), *self._frames_of(JobsFinished(message.endings[half:]))]

    def _send_soon(self) -> None:
        if self._queue and self._path and not self._sending:
            self._sending = True
            self._loop.call_soon(lambda: self._tasks.spawn(self._send_all()))

    async def _send_all(self) -> None:
        """Send one request after the other until the queue is empty."""
        try:
            while self._queue and not self._closed:
                await self._send_some(self._queue)
        except TasukiError as error:
            self._break(error)
        finally:
            self._sending = False

    async def _send_some(self, queue: deque[bytes]) -> None:
        """Send as many frames as one request takes; first, unchanged, those of a request that was not answered."""
        bundle = self._under_way = self._under_way or next_bundle(queue, self._request_max_bytes, len)
        try:
            await self._send_repeatedly(bundle)
        except InvalidInput:  # nothing was accepted: too large for a proxy, or for the time that a body may take
            if len(bundle) == 1:
                raise
            self._request_max_bytes = sum(map(len, bundle)) // 2
            queue.extendleft(reversed(bundle))
        self._under_way = []

    async def _send_repeatedly(self, bundle: list[bytes]) -> None:
        """Send a request, unchanged and under the same number, until it is answered."""
        number = self._said + 1
        tries = 0
        while True:
            try:
                async with post(self._transport, self._path, bundle, {"said": str(number)}, ANSWER_S) as answer:
                    async for _ in answer.messages:
                        pass  # the answers come with the polls
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
        self._send_soon()

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
                tries = min(tries + 1, TRIES_MAX)  # it came back at once, and empty: another one at once would be a hot loop
            except (Unavailable, NotFound) as error:
                lasted_s = self._loop.time() - began
                if isinstance(error, ResponseLost) and lasted_s > POLL_WAIT_MIN_S:
                    self._wait_s = shorter_wait_s(self._wait_s, lasted_s)
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
        """Do nothing: a worker watches no jobs."""

    def _refused(self, error: ErrorMessage) -> None:
        """Pass on why the server has hung up, and close."""
        if not self._closed:
            self._on_message(self, error)
            self.abort(error.message)

    def _break(self, error: TasukiError) -> None:
        """Close the link for an error that ends it."""
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
        final = isinstance(error, Unauthorized | Forbidden | TooLarge)  # another try would be refused too
        if final or (isinstance(error, InvalidInput) and not self._path):  # in a session a body may have been cut on the way
            self._on_message(self, ErrorMessage(0, error.code, error.message, error.details()))
        self.abort(error.message)

    def close(self, error: TasukiError | None = None) -> None:
        """Close the link; `wait_closed` sends the queued frames, and tells the server that this worker leaves."""
        if self._path and not self._closed:
            self._unsent = deque(self._queue)
        super().close(error)

    def _stop(self) -> None:
        self._queue.clear()

    async def wait_closed(self) -> None:
        await self._tasks.wait()
        if self._unsent is not None:
            try:
                async with asyncio.timeout(LEAVE_S):
                    await self._leave(self._unsent)
            except (TasukiError, TimeoutError) as error:  # the server notices it when the ttl is over
                logger.debug("the server did not get the message that this worker leaves: %s", error)
        await super().wait_closed()

    async def _leave(self, unsent: deque[bytes]) -> None:
        while self._under_way or unsent:
            await self._send_some(unsent)
        async with self._transport.exchange("DELETE", self._path):
            pass  # the status is the whole answer


def _is_final(error: TasukiError, tries: int) -> bool:
    """Return whether to give up this address. Behind a balancer the next try may reach the server that has the session."""
    return isinstance(error, NoConnection) or tries > TRIES_MAX


def _pause_s(tries: int, error: TasukiError | None) -> float:
    """Return the pause before the next try, with jitter; short where a server answered, as another one may have the session."""
    return _BACKOFF.delay_s(0 if isinstance(error, NotFound) else tries)
