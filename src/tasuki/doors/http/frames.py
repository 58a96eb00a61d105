"""/v1/frames: the wire protocol of clients in plain requests. Each stands for itself, so that any server may get the next one.

Theory of operation. The body holds frames as a TCP client would send them, the answer the frames that answer them. They go
through the virtual connection of the caller's token, under numbers of its own. What TCP tells without being asked, the ends of
watched jobs, is asked for: the request `watch` with `?wait=25` is answered with `Results` as soon as there are some.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TypeGuard

import msgspec
from starlette.responses import Response

from tasuki.core.protocol import (
    CancelJobs,
    ErrorMessage,
    Heartbeat,
    HelloClient,
    JobResult,
    Message,
    Reply,
    Request,
    Results,
    SubmitJobs,
    Welcome,
    batches,
    outcome_bytes,
)
from tasuki.doors.http.clients import Listener, TokenConnection
from tasuki.doors.http.context import RequestContext
from tasuki.doors.http.exchange import disconnected, discreet, wait_of
from tasuki.doors.http.frame_bodies import framed, messages_in
from tasuki.doors.http.virtual_connection import VirtualConnection
from tasuki.errors import InvalidInput, TasukiError, Unauthorized, from_wire
from tasuki.net.tcp_link import encode_answer
from tasuki.wire.compression import CODECS

WATCH_AT_ONCE = 256  # jobs whose rows, with results of up to 64 KiB, the store reads in one go
GATHER_PER_JOB_S = 1e-5  # about what it costs to name a job again, which who is answered at the first end must do for all others
GATHER_MAX_S = 0.05

Asked = HelloClient | SubmitJobs | CancelJobs | Request | Heartbeat


async def frames(call: RequestContext) -> Response:
    """Messages of the wire protocol (docs/wire.md), as a client says them over TCP; answered in the same form."""
    wait_s, codec = wait_of(call.request), _codec_of(call)
    messages = _messages_in(call.body)
    watches = [message for message in messages if _is_watch(message)]
    others = [message for message in messages if not _is_watch(message)]
    async with call.house.clients.use(call.caller) as client:
        answers = await asyncio.gather(*(_answer(call, client, message) for message in others))
        if watches:
            answers += await _Poll(call, client, watches).answers(wait_s)
    return framed(encode_answer(answer, codec) for answer in answers)


def _codec_of(call: RequestContext) -> str | None:
    codec: str | None = call.request.query_params.get("codec")
    if codec is not None and codec not in CODECS:
        raise InvalidInput(f"codec must be {' or '.join(CODECS)}, got {codec[:40]!r}")
    return codec


def _messages_in(body: bytes) -> list[Asked | ErrorMessage]:
    """What a client may say here."""
    messages: list[Asked | ErrorMessage] = []
    for message in messages_in(body):
        if not isinstance(message, Asked | ErrorMessage):
            raise InvalidInput(f"{type(message).__name__} cannot be sent over HTTP; blobs have a path of their own, /v1/blobs")
        if isinstance(message, Asked) and message.msg_id <= 0:
            raise InvalidInput(f"a {type(message).__name__} has the msg_id {message.msg_id}; it must be above 0")
        if _is_watch(message):
            _job_ids_of(message)
        messages.append(message)
    return messages


def _is_watch(message: Message) -> TypeGuard[Request]:
    return isinstance(message, Request) and message.verb == "watch"


def _job_ids_of(watch: Request) -> list[str]:
    job_ids = watch.params.get("job_ids")
    if not isinstance(job_ids, list) or not all(isinstance(job_id, str) for job_id in job_ids):
        raise InvalidInput("watch needs job_ids, a list of texts")
    return job_ids


# ---------------------------------------------------------------------------------------------------- one question, one answer


async def _answer(call: RequestContext, client: TokenConnection, message: Asked | ErrorMessage) -> Message:
    if isinstance(message, ErrorMessage):
        return message
    if isinstance(message, HelloClient):
        return await _welcome(call, message)
    msg_id = client.talk.next_id()
    try:
        answer = await client.talk.exchange(msg_id, _as_ours(call, message, msg_id))
    except Unauthorized:  # of the whole connection: the door finds out what has become of the token
        raise
    except TasukiError as error:
        answer = ErrorMessage(msg_id, error.code, error.message, error.details())
    return _told(call, msgspec.structs.replace(answer, corr_id=message.msg_id))


def _as_ours(call: RequestContext, message: Message, msg_id: int) -> Message:
    """Under a number of the virtual connection, which all of the token's requests share."""
    if isinstance(message, SubmitJobs):
        call.house.metrics.submitted(len(message.specs))
        return SubmitJobs(msg_id, message.specs, watch=False, on_failed=message.on_failed)
    return msgspec.structs.replace(message, msg_id=msg_id)


def _told(call: RequestContext, answer: Message) -> Message:
    """Not everybody hears what is wrong behind the server."""
    if not isinstance(answer, ErrorMessage) or call.caller.identity.admin:
        return answer
    error = from_wire(answer.code, answer.message, answer.details)
    told = discreet(error)
    return answer if told is error else ErrorMessage(answer.corr_id, told.code, told.message)


async def _welcome(call: RequestContext, hello: HelloClient) -> Message:
    """A Hello is judged on a connection of its own: name and version are the peer's, the token is that of the request."""
    talk = VirtualConnection(call.house.server, call.caller.address, lambda message: None)
    try:
        welcome = await talk.ask(hello.msg_id, msgspec.structs.replace(hello, token=call.caller.secret))
    except Unauthorized:
        raise
    except TasukiError as error:
        return _told(call, ErrorMessage(0, error.code, error.message, error.details()))
    finally:
        talk.leave()
    assert isinstance(welcome, Welcome)
    return msgspec.structs.replace(welcome, servers=())  # its way leads through this door, whatever is behind it


# ---------------------------------------------------------------------------------------------------- the ends of jobs


class _Poll:
    """The requests `watch` of one body: which jobs they name, and what has to be told of them."""

    def __init__(self, call: RequestContext, client: TokenConnection, watches: Sequence[Request]) -> None:
        self._call = call
        self._client = client
        self._watches = {watch.msg_id: _job_ids_of(watch) for watch in watches}
        self._replies: list[Message] = []
        self._refused = False

    async def answers(self, wait_s: float) -> list[Message]:
        """At once if a job has ended or cannot be watched; else when the first one ends, or the time is over.

        What is too much for one answer is left out. A watch without a reply was not looked at: ask again.
        """
        named = list(dict.fromkeys(job_id for job_ids in self._watches.values() for job_id in job_ids))
        with self._client.listen(named) as listener:
            for msg_id, job_ids in self._watches.items():
                if listener.full:
                    break
                await self._begin(msg_id, job_ids, listener)
            if wait_s and not self._refused and not listener.woken.done():
                await self._wait(listener, wait_s, len(named))
            if self._client.talk.closed is not None and not listener.items:
                raise self._client.talk.closed
            return [*self._replies, *_results(listener.items)]

    async def _begin(self, msg_id: int, job_ids: list[str], listener: Listener) -> None:
        """Make sure that the server tells the ends of these."""
        states: dict[str, str] = {}
        fresh = self._client.unwatched(job_ids)
        try:
            for start in range(0, len(fresh), WATCH_AT_ONCE):
                if listener.full:
                    return
                states |= await self._client.watch(fresh[start : start + WATCH_AT_ONCE])
        except Unauthorized:
            raise
        except TasukiError as error:
            self._refused = True
            self._replies.append(_told(self._call, ErrorMessage(msg_id, error.code, error.message, error.details())))
        else:
            self._replies.append(Reply(msg_id, {"states": states}))

    async def _wait(self, listener: Listener, wait_s: float, count: int) -> None:
        left = disconnected(self._call.request)
        try:
            await asyncio.wait([listener.woken, left], timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if 0 < len(listener.items) < count and not left.done():  # those that end together are told together
                await asyncio.sleep(min(GATHER_MAX_S, count * GATHER_PER_JOB_S))
        finally:
            left.cancel()


def _results(items: Sequence[JobResult]) -> Iterable[Message]:
    return [Results(list(some)) for some in batches(items, lambda item: outcome_bytes(item.outcome))]
