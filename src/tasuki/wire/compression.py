"""Payload compression: only where it makes the payload smaller; decompression never exceeds a size limit."""

from __future__ import annotations

import threading
import zlib

import zstandard

from tasuki.errors import ProtocolError, TooLarge

ZSTD, GZIP = 2, 4  # flags of a frame whose payload is compressed
COMPRESS_FROM_BYTES = 1024  # below this the codec's own frame eats the gain
ZSTD_WINDOW_MAX_BYTES = 8 * 1024 * 1024  # all that RFC 8878 requires; with a larger window the peer decides on the memory
FLAGS = {"zstd": ZSTD, "gzip": GZIP}


class _ZstdCompressor(threading.local):
    """One compressor for each thread: it is not thread-safe, and several loops may run in one process."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(level=1).compress


_zstd = _ZstdCompressor()


def compress(payload: bytes, codec: str | None) -> tuple[bytes, int]:
    """Return (payload, flags), compressed if a codec was agreed on and makes it smaller."""
    if codec is None or len(payload) < COMPRESS_FROM_BYTES:
        return payload, 0
    if codec == "zstd":
        smaller = _zstd.compress(payload)
    else:
        packer = zlib.compressobj(1, zlib.DEFLATED, 31)
        smaller = packer.compress(payload) + packer.flush()
    return (smaller, FLAGS[codec]) if len(smaller) < len(payload) else (payload, 0)


def decompress(payload: bytes, flags: int, max_bytes: int) -> bytes:
    """Return the plain payload; TooLarge before more than max_bytes are allocated, ProtocolError if it is cut off or corrupt."""
    if not flags & (ZSTD | GZIP):
        return payload
    if flags & ZSTD and flags & GZIP:
        raise ProtocolError("a payload cannot be both zstd and gzip")
    try:
        plain, whole = _inflate_zstd(payload, max_bytes) if flags & ZSTD else _inflate_gzip(payload, max_bytes)
    except (zstandard.ZstdError, zlib.error) as error:
        raise ProtocolError(f"a compressed payload cannot be read: {error}") from None
    if len(plain) > max_bytes:
        raise TooLarge(f"a compressed payload of {len(payload)} bytes grows past the limit of {max_bytes} bytes")
    if not whole:
        raise ProtocolError(f"a compressed payload of {len(payload)} bytes is cut off")
    return plain


def _inflate_zstd(payload: bytes, max_bytes: int) -> tuple[bytes, bool]:
    unpacker = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_MAX_BYTES)
    plain = unpacker.stream_reader(payload, read_across_frames=False).read(max_bytes + 1)
    if len(plain) > max_bytes:
        return plain, False
    # The reader does not report a frame that was cut off, so the declared size is compared; where none is declared (a streaming
    # encoder) the frame is read once more for its end mark, now that its size is known to be within the limit.
    declared = zstandard.get_frame_parameters(payload).content_size
    if declared not in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
        return plain, declared == len(plain)
    again = unpacker.decompressobj()
    again.decompress(payload)
    return plain, again.eof


def _inflate_gzip(payload: bytes, max_bytes: int) -> tuple[bytes, bool]:
    unpacker = zlib.decompressobj(31)
    plain = unpacker.decompress(payload, max_bytes + 1)
    return plain, unpacker.eof
