"""/v1/worker: the wire protocol of workers in plain requests, in sessions (`lines.py`).

A Hello opens a session, whose name only its worker knows. A request to it says something (`?said=N`, with frames as its body), or
asks what there is to hear (`?heard=K&wait=25`), or both.
"""

from __future__ import annotations

from msgspec.structs import replace
from starlette.responses import Response

from tasuki.core.protocol import BlobGet, BlobPut, Chunk, ErrorMessage, HelloWorker, Message
from tasuki.doors.http.context import RequestContext
from tasuki.doors.http.exchange import disconnected, discreet, wait_of, whole_number
from tasuki.doors.http.frame_bodies import framed, messages_in
from tasuki.errors import InvalidInput, TasukiError, Unauthorized
from tasuki.net.http.names import SESSION_HEADER
from tasuki.net.tcp_link import encode_answer

NUMBER_MAX = 2**53


async def open_line(call: RequestContext) -> Response:
    """A worker says Hello: one HelloWorker frame. The answer has the Welcome, and in a header the name of the session."""
    messages = _messages_in(call.body)
    if len(messages) != 1 or not isinstance(messages[0], HelloWorker):
        raise InvalidInput("a session begins with one HelloWorker, and nothing else")
    if messages[0].transfers:
        raise InvalidInput("a session is a worker's own connection; its blobs have a path of their own, /v1/blobs")
    hello = messages[0]
    if hello.ttl_s is None:
        hello = replace(hello, ttl_s=call.house.config.lease_ttl_s)
    try:
        line, welcome = await call.house.lines.open(call.caller, hello)
    except Unauthorized:  # of the whole request: the door finds out what has become of the token
        raise
    except TasukiError as error:
        told = discreet(error)
        return framed([encode_answer(ErrorMessage(0, told.code, told.message, told.details()), None)])
    return framed([encode_answer(welcome, None)], {SESSION_HEADER: line.name})


async def use_line(call: RequestContext) -> Response:
    """What a worker says (`said`, with frames in the body), and what there is for it to hear (`heard`, `wait`)."""
    query = call.request.query_params
    wait_s = wait_of(call.request)
    said = whole_number(call.request, "said", 0, NUMBER_MAX, least=1) if "said" in query else None
    heard = whole_number(call.request, "heard", 0, NUMBER_MAX) if "heard" in query else None
    if (said is None) == bool(call.body):
        raise InvalidInput("frames need ?said= with the number of this request, and a request without frames has none")
    messages = _messages_in(call.body) if call.body else []
    line = call.house.lines.of(call.caller, str(call.request.path_params["session"]))
    line.users += 1
    try:
        if said is not None:
            await line.say(said, messages)
        if heard is None:
            return framed([])
        left = disconnected(call.request)
        try:
            return framed(await line.listen(heard, wait_s, left))
        finally:
            left.cancel()
    finally:
        line.users -= 1
        line.used_at = call.house.server.now().monotonic


async def leave_line(call: RequestContext) -> dict[str, str]:
    """The worker is going: the server need not wait for its heartbeats."""
    line = call.house.lines.of(call.caller, str(call.request.path_params["session"]))
    call.house.lines.drop(line, "the worker left")
    return {"session": "ended"}


def _messages_in(body: bytes) -> list[Message]:
    """What a worker may say here."""
    messages = messages_in(body)
    for message in messages:
        if isinstance(message, BlobPut | BlobGet | Chunk):
            raise InvalidInput(f"{type(message).__name__} cannot be sent over HTTP; blobs have a path of their own, /v1/blobs")
    return messages
