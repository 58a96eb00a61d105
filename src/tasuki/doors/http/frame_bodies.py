"""Bodies and answers that are frames of the wire protocol."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.responses import Response

from tasuki.core.protocol import FRAME_MAX_BYTES, ErrorMessage, Message
from tasuki.errors import InvalidInput, UnknownFrame
from tasuki.net.http.names import FRAMES_MAX, FRAMES_TYPE
from tasuki.wire.compression import decompress
from tasuki.wire.frames import BATCH, Frame, FrameDecoder
from tasuki.wire.messages import decode

UNPACKED_MAX_BYTES = 4 * FRAME_MAX_BYTES  # of all frames of one body: 64 small ones could each become a large one


def messages_in(body: bytes) -> list[Message]:
    """What the body says; an ErrorMessage stands for a request that is newer than this server. All of it is good, or nothing."""
    decoder = FrameDecoder(FRAME_MAX_BYTES)
    frames = decoder.feed(body)
    if decoder.partial:
        raise InvalidInput("the last frame of the body is not whole")
    if not 0 < len(frames) <= FRAMES_MAX:
        raise InvalidInput(f"the body has {len(frames)} frames; send 1 to {FRAMES_MAX}")
    messages: list[Message] = []
    room = UNPACKED_MAX_BYTES
    for packed in frames:
        frame = _unpacked(packed, room)
        room -= len(frame.payload)
        try:
            message = decode(frame, FRAME_MAX_BYTES)
        except UnknownFrame as error:
            if error.msg_id:  # it must not wait for ever
                messages.append(ErrorMessage(error.msg_id, error.code, error.message))
            continue
        if isinstance(message, ErrorMessage):
            raise InvalidInput("an error is the server's to send")
        messages.append(message)
    return messages


def _unpacked(frame: Frame, room: int) -> Frame:
    plain = decompress(frame.payload, frame.flags, min(room, FRAME_MAX_BYTES))
    return frame._replace(payload=plain, flags=frame.flags & BATCH)


def framed(frames: Iterable[bytes], headers: dict[str, str] | None = None) -> Response:
    """An answer of frames."""
    return Response(b"".join(frames), headers=headers, media_type=FRAMES_TYPE)
