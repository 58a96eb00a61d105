"""Frames of the wire protocol in the bodies of HTTP requests and answers: what all links over HTTP share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple

import httpx

from tasuki.core.protocol import FRAME_MAX_BYTES, Message
from tasuki.errors import InvalidInput, NotTasuki, ResponseLost, UnknownFrame
from tasuki.net.http.names import FRAMES_TYPE
from tasuki.net.http.transport import HttpTransport
from tasuki.wire.frames import Frame, FrameDecoder
from tasuki.wire.messages import decode

REQUEST_MAX_BYTES = 1024 * 1024  # of several frames together; what proxies let through unless told otherwise
TOKEN_MAX_CHARS = 512


def check_token(token: str) -> str:
    """The token, if a header can carry it."""
    if len(token) > TOKEN_MAX_CHARS or not token.isascii() or not token.isprintable():
        raise InvalidInput("the token cannot be sent: it is longer than a token, or has characters that no token has")
    return token


class FrameStream(NamedTuple):
    """What came back, as it comes: a frame of a kind that this side does not know is None."""

    messages: AsyncIterator[Message | None]
    headers: Mapping[str, str]


@asynccontextmanager
async def post(
    transport: HttpTransport, path: str, frames: Sequence[bytes], params: Mapping[str, str], answer_s: float
) -> AsyncIterator[FrameStream]:
    """Send these frames; the frames that answer them are read inside the block."""
    headers = {"Content-Type": FRAMES_TYPE, "Accept": FRAMES_TYPE}
    async with transport.exchange(
        "POST", path, params=params, headers=headers, content=b"".join(frames), answer_s=answer_s
    ) as response:
        kind = response.headers.get("content-type", "")
        if kind.partition(";")[0].strip() != FRAMES_TYPE:
            raise NotTasuki(f"{transport.address} answered with {kind[:80] or 'nothing'!r}: is this a tasuki server with --http?")
        async with aclosing(_messages_of(response)) as messages:
            yield FrameStream(messages, response.headers)


async def _messages_of(response: httpx.Response) -> AsyncGenerator[Message | None, None]:
    decoder = FrameDecoder(FRAME_MAX_BYTES)
    async for piece in response.aiter_bytes():
        try:
            frames = decoder.feed(piece)
        except InvalidInput as error:
            raise ResponseLost(f"an answer cannot be read: {error.message}") from None
        for frame in frames:
            yield _decoded(frame)
    if decoder.partial:
        raise ResponseLost("an answer ended in the middle of a frame")


def _decoded(frame: Frame) -> Message | None:
    try:
        return decode(frame, FRAME_MAX_BYTES)
    except UnknownFrame:  # of a newer server, to a newer peer
        return None
    except InvalidInput as error:
        raise ResponseLost(f"an answer cannot be read: {error.message}") from None
