"""The wire protocol in plain HTTP requests: /v1/frames for clients, /v1/worker for workers.

Theory of operation. A body holds frames as a TCP peer would send them, the answer the frames that answer them. A client's
requests stand for themselves, so that any server may get the next one: they go through the virtual connection of the caller's
token, under message ids of that connection. The ends of watched jobs, which a TCP client receives unasked, are polled: the
request `watch` with `?wait=25` is answered with `Results` as soon as there are some. A worker has a session
(`worker_sessions.py`): a Hello opens it; a request to it carries messages (`?said=N`, with frames as its body), or polls for
messages (`?heard=K&wait=25`), or both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TypeGuard

from msgspec.structs import replace
from starlette.responses import Response

from tasuki.core import protocol
from tasuki.core.broker import publish_subscribe
from tasuki.core.broker.client_messages import lists_bytes
from tasuki.doors.http.context import RequestContext
from tasuki.doors.http.exchange import disconnected, discreet, wait_of, whole_number
from tasuki.doors.http.virtual_connection import ClientRequest, Listener, TokenConnection, VirtualConnection
from tasuki.doors.http.worker_sessions import HttpWorkerSession
from tasuki.errors import InvalidInput, RefusedRequest, TasukiError, Unauthorized, UnknownFrame, from_wire
from tasuki.net.tcp_link import encode_answer
from tasuki.wire.compression import decompress
from tasuki.wire.messages import BATCH, FrameDecoder, decode

UNPACKED_MAX_BYTES = protocol.FRAME_MAX_BYTES  # of all frames of one body: 64 small ones could each become a large one
DECODED_ITEM_BYTES = 512  # of memory that a job or a report takes beside its bytes, while its request waits for the store
NUMBER_MAX = 2**53
WATCH_AT_ONCE = 256  # jobs whose rows, with results of up to 64 KiB, the store reads in one query
GATHER_PER_JOB_S = 1e-5  # about the cost of naming a job again, which a client answered at the first end does for all others
GATHER_MAX_S = 0.05
NO_SUBSCRIPTIONS = f"requests have no connection of their own; read messages with GET {protocol.MESSAGES_PATH}?pattern=…"

ClientQuestion = protocol.HelloClient | ClientRequest | protocol.CachePut


# ---------------------------------------------------------------------------------------------------- bodies


async def messages_in(context: RequestContext, body: bytes) -> list[protocol.Message]:
    """Decode a whole body, or none of it; an ErrorMessage stands for a request that this server cannot read.

    Between two frames others are served, and the memory that each takes is reserved: 60 KB may become 65,536 jobs.
    """
    decoder = FrameDecoder(protocol.FRAME_MAX_BYTES)
    frames = decoder.feed(body)
    if decoder.partial:
        raise InvalidInput("the last frame of the body is not whole")
    if not 0 < len(frames) <= protocol.FRAMES_MAX:
        raise InvalidInput(f"the body has {len(frames)} frames; send 1 to {protocol.FRAMES_MAX}")
    messages: list[protocol.Message] = []
    room = UNPACKED_MAX_BYTES
    for number, packed in enumerate(frames):
        if number:
            await asyncio.sleep(0)
        plain = decompress(packed.payload, packed.flags, min(room, protocol.FRAME_MAX_BYTES))
        frame = packed._replace(payload=plain, flags=packed.flags & BATCH)
        room -= len(frame.payload)
        try:
            message = decode(frame, protocol.FRAME_MAX_BYTES, from_server=False)
        except (UnknownFrame, RefusedRequest) as error:
            if error.msg_id:  # its sender waits for an answer
                messages.append(protocol.ErrorMessage(error.msg_id, error.code, error.message))
            continue
        if isinstance(message, protocol.ErrorMessage):
            raise InvalidInput("an error is the server's to send")
        items = max(len(getattr(message, name, ())) for name in ("specs", "endings", "claims", "job_ids", "entries", "items"))
        lists = sum(map(lists_bytes, message.specs)) if isinstance(message, protocol.SubmitJobs) else 0
        context.reserve(len(plain) + DECODED_ITEM_BYTES * items + lists)
        messages.append(message)
    return messages


def _framed(frames: Iterable[bytes], headers: dict[str, str] | None = None) -> Response:
    return Response(b"".join(frames), headers=headers, media_type=protocol.FRAMES_TYPE)


def _not_here(message: protocol.Message) -> InvalidInput:
    return InvalidInput(f"{type(message).__name__} cannot be sent over HTTP; blobs have a path of their own, /v1/blobs")


# ---------------------------------------------------------------------------------------------------- clients


async def frames(context: RequestContext, body: bytes) -> Response:
    """Send messages of the wire protocol (docs/wire.md), as a client does over TCP; the answer has the same form."""
    wait_s, codec = wait_of(context.request), context.request.query_params.get("codec")
    if codec is not None and codec not in protocol.CODECS:
        raise InvalidInput(f"codec must be {' or '.join(protocol.CODECS)}, got {codec[:40]!r}")
    messages = await _client_messages(context, body)
    watches = [message for message in messages if _is_watch(message)]
    others = [message for message in messages if not _is_watch(message)]
    async with context.client() as client:
        answers = await asyncio.gather(*(_answer(context, client, message) for message in others))
        if watches:
            answers += await _poll(context, client, watches, wait_s)
    return _framed(encode_answer(answer, codec) for answer in answers)


async def _client_messages(context: RequestContext, body: bytes) -> list[ClientQuestion | protocol.ErrorMessage]:
    """Decode the messages that a client may send here."""
    messages: list[ClientQuestion | protocol.ErrorMessage] = []
    for message in await messages_in(context, body):
        if not isinstance(message, ClientQuestion | protocol.ErrorMessage):
            raise _not_here(message)
        if isinstance(message, ClientQuestion) and message.msg_id <= 0:
            raise InvalidInput(f"a {type(message).__name__} has the msg_id {message.msg_id}; it must be above 0")
        if _is_watch(message):
            _job_ids_of(message)
        messages.append(message)
    return messages


def _is_watch(message: protocol.Message) -> TypeGuard[protocol.Request]:
    return isinstance(message, protocol.Request) and message.verb == "watch"


def _job_ids_of(watch: protocol.Request) -> list[str]:
    job_ids = watch.params.get("job_ids")
    if not isinstance(job_ids, list) or not all(isinstance(job_id, str) for job_id in job_ids):
        raise InvalidInput("watch needs job_ids, a list of texts")
    return job_ids


async def _answer(
    context: RequestContext, client: TokenConnection, message: ClientQuestion | protocol.ErrorMessage
) -> protocol.Message:
    if isinstance(message, protocol.ErrorMessage):
        return message
    if isinstance(message, protocol.HelloClient):
        return await _welcome(context, message)
    if isinstance(message, protocol.Request) and message.verb in publish_subscribe.VERBS:
        return protocol.error_message(message.msg_id, InvalidInput(f"{message.verb}: {NO_SUBSCRIPTIONS}"))
    msg_id = client.connection.next_id()  # all requests of the token share the virtual connection
    if isinstance(message, protocol.SubmitJobs):
        context.http.metrics.submitted(len(message.specs))
        question: ClientQuestion = replace(message, msg_id=msg_id, watch=False)
    elif isinstance(message, protocol.PublishMessages):
        question = replace(message, msg_id=msg_id, confirm=True)
    else:
        question = replace(message, msg_id=msg_id)
    try:
        answer = await client.connection.exchange(question)
    except Unauthorized:  # of the whole connection: the door looks up what has become of the token
        raise
    except TasukiError as error:
        answer = protocol.error_message(msg_id, error)
    return _discreet(context, replace(answer, corr_id=message.msg_id))


def _discreet(context: RequestContext, answer: protocol.Message) -> protocol.Message:
    """Return the answer; only administrators see the words of an error behind the server."""
    if not isinstance(answer, protocol.ErrorMessage) or context.caller.identity.admin:
        return answer
    error = from_wire(answer.code, answer.message, answer.details)
    shown = discreet(error)
    return answer if shown is error else protocol.ErrorMessage(answer.corr_id, shown.code, shown.message)


async def _welcome(context: RequestContext, hello: protocol.HelloClient) -> protocol.Message:
    """Judge a Hello on a connection of its own: name and version are the peer's, the token is that of the request."""
    connection = VirtualConnection(context.http.server, context.caller.address, lambda message: None)
    try:
        welcome = await connection.ask(replace(hello, token=context.caller.secret))
    except Unauthorized:
        raise
    except TasukiError as error:
        return _discreet(context, protocol.error_message(0, error))
    finally:
        connection.leave()
    assert isinstance(welcome, protocol.Welcome)
    return replace(welcome, servers=())  # the client's way leads through this door


async def _poll(
    context: RequestContext, client: TokenConnection, watches: Sequence[protocol.Request], wait_s: float
) -> list[protocol.Message]:
    """Answer `watch` requests: at once if a job has ended or cannot be watched, else at the first end or when the time is over.

    Results beyond the size of one answer are left out. A watch without a reply was not looked at: ask again.
    """
    asked = {watch.msg_id: _job_ids_of(watch) for watch in watches}
    named = list(dict.fromkeys(job_id for job_ids in asked.values() for job_id in job_ids))
    replies: list[protocol.Message] = []
    with client.listen(named) as listener:
        for msg_id, job_ids in asked.items():
            if listener.full or (reply := await _watch(context, client, msg_id, job_ids, listener)) is None:
                break
            replies.append(reply)
        refused = any(isinstance(reply, protocol.ErrorMessage) for reply in replies)
        if wait_s and not refused and not listener.woken.done():
            with disconnected(context.request) as left:
                await asyncio.wait([listener.woken, left], timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                if 0 < len(listener.items) < len(named) and not left.done():  # report together what ends together
                    await asyncio.sleep(min(GATHER_MAX_S, len(named) * GATHER_PER_JOB_S))
        closed = client.connection.closed
        if closed is not None and not listener.items:
            raise closed
        results = protocol.batches(listener.items, lambda item: protocol.outcome_bytes(item.outcome))
        return [*replies, *(protocol.Results(list(some)) for some in results)]


async def _watch(
    context: RequestContext, client: TokenConnection, msg_id: int, job_ids: list[str], listener: Listener
) -> protocol.Message | None:
    """Make the server report the ends of these jobs; None if the listener is full before all are watched."""
    states: dict[str, str] = {}
    fresh = client.unwatched(job_ids)
    try:
        for start in range(0, len(fresh), WATCH_AT_ONCE):
            if listener.full:
                return None
            states |= await client.watch(fresh[start : start + WATCH_AT_ONCE])
    except Unauthorized:
        raise
    except TasukiError as error:
        return _discreet(context, protocol.error_message(msg_id, error))
    return protocol.Reply(msg_id, {"states": states})


# ---------------------------------------------------------------------------------------------------- workers


async def open_session(context: RequestContext, body: bytes) -> Response:
    """Open a worker's session with one HelloWorker frame. The answer has the Welcome, and in a header the session's name."""
    messages = await _worker_messages(context, body)
    if len(messages) != 1 or not isinstance(messages[0], protocol.HelloWorker):
        raise InvalidInput("a session begins with one HelloWorker, and nothing else")
    if messages[0].transfers:
        raise InvalidInput("a session is a worker's own connection; its blobs have a path of their own, /v1/blobs")
    hello = messages[0]
    if hello.ttl_s is None:
        hello = replace(hello, ttl_s=context.http.config.lease_ttl_s)
    try:
        session, welcome = await context.http.sessions.open(context.caller, hello)
    except Unauthorized:  # of the whole request: the door looks up what has become of the token
        raise
    except TasukiError as error:
        return _framed([encode_answer(protocol.error_message(0, discreet(error)), None)])
    return _framed([encode_answer(welcome, None)], {protocol.SESSION_HEADER: session.name})


async def use_session(context: RequestContext, body: bytes) -> Response:
    """Send messages of a worker (`said`, with frames in the body), and poll for messages to it (`heard`, `wait`)."""
    query = context.request.query_params
    wait_s = wait_of(context.request)
    said = whole_number(context.request, "said", 0, NUMBER_MAX, least=1) if "said" in query else None
    heard = whole_number(context.request, "heard", 0, NUMBER_MAX) if "heard" in query else None
    if (said is None) == bool(body):
        raise InvalidInput("frames need ?said= with the number of this request, and a request without frames has none")
    messages = await _worker_messages(context, body) if body else []
    session = _session_of(context)
    session.users += 1
    try:
        if said is not None:
            await session.say(said, messages)
        if heard is None:
            return _framed([])
        with disconnected(context.request) as left:
            return _framed(await session.listen(heard, wait_s, left))
    finally:
        session.users -= 1
        session.used_at = context.http.server.now().monotonic


async def end_session(context: RequestContext) -> dict[str, str]:
    """End a worker's session: the server need not wait for its heartbeats."""
    context.http.sessions.drop(_session_of(context), "the worker left")
    return {"session": "ended"}


def _session_of(context: RequestContext) -> HttpWorkerSession:
    return context.http.sessions.of(context.caller, str(context.request.path_params["session"]))


async def _worker_messages(context: RequestContext, body: bytes) -> list[protocol.Message]:
    """Decode the messages that a worker may send here."""
    messages = await messages_in(context, body)
    for message in messages:
        if isinstance(message, protocol.BlobPut | protocol.BlobGet | protocol.Chunk):
            raise _not_here(message)
    return messages
