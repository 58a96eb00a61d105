"""Frames: bytes <-> (type, flags, header, payload). Sans-I/O and without meaning.

    [length u32 LE][type u8][flags u8][header length u16 LE][header: msgpack][payload]

`length` counts the bytes that follow it. It is checked before anything is allocated for the frame.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tasuki.core.protocol import UNAUTHENTICATED_FRAME_MAX_BYTES
from tasuki.errors import ProtocolError, TooLarge

BATCH = 1  # the payload is a msgpack array of items instead of one item
ZSTD = 2  # the payload is compressed
GZIP = 4
KNOWN_FLAGS = BATCH | ZSTD | GZIP

_PREFIX = struct.Struct("<IBBH")
PREFIX_BYTES = _PREFIX.size
_AFTER_LENGTH_BYTES = PREFIX_BYTES - 4
HEADER_MAX_BYTES = 0xFFFF


class Frame(NamedTuple):
    """One frame, not decoded yet."""

    type: int
    flags: int
    header: bytes
    payload: bytes


def encode_frame(type: int, header: bytes, payload: bytes = b"", flags: int = 0) -> bytes:
    """Return the bytes of one frame."""
    header_bytes = len(header)
    if header_bytes > HEADER_MAX_BYTES:
        raise TooLarge(
            f"a frame header has {header_bytes} bytes, the limit is {HEADER_MAX_BYTES}; put large things in the payload"
        )
    return _PREFIX.pack(_AFTER_LENGTH_BYTES + header_bytes + len(payload), type, flags, header_bytes) + header + payload


class FrameDecoder:
    """Turns bytes as they come into whole frames. After an error the connection cannot be used any more."""

    def __init__(self, max_bytes: int = UNAUTHENTICATED_FRAME_MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def partial(self) -> bool:
        """True while a frame has begun and not ended: its deadline counts."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """Return all frames that are complete with these bytes."""
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < PREFIX_BYTES or len(self._buffer) < self._needed(self._buffer, 0):
                return []
            data = bytes(self._buffer)
            self._buffer = bytearray()
        frames: list[Frame] = []
        position, end = 0, len(data)
        while end - position >= PREFIX_BYTES:
            size = self._needed(data, position)
            if end - position < size:
                break
            _, type, flags, header_bytes = _PREFIX.unpack_from(data, position)
            body = position + PREFIX_BYTES + header_bytes
            frames.append(Frame(type, flags, data[position + PREFIX_BYTES : body], data[body : position + size]))
            position += size
        if position < end:
            self._buffer += data[position:] if position else data
        return frames

    def _needed(self, data: bytes | bytearray, position: int) -> int:
        length, type, flags, header_bytes = _PREFIX.unpack_from(data, position)
        if length > self.max_bytes:
            raise TooLarge(f"a frame of type {type} announces {length} bytes, the limit on this connection is {self.max_bytes}")
        if length < _AFTER_LENGTH_BYTES + header_bytes:
            raise ProtocolError(f"a frame of type {type} announces {length} bytes but a header of {header_bytes}")
        if flags & ~KNOWN_FLAGS:
            raise ProtocolError(f"a frame of type {type} has unknown flags {flags:#04x}")
        return int(length) + 4
