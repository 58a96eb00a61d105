"""Payload compression: only where it makes the payload smaller, and never past a size cap on the way back."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import zstandard

from tasuki.errors import ProtocolError, TooLarge
from tasuki.wire.frames import GZIP, ZSTD

CODECS = ("zstd", "gzip")  # in the order of preference
COMPRESS_FROM_BYTES = 1024  # below this the codec's own frame eats the gain
_FLAG = {"zstd": ZSTD, "gzip": GZIP}
_compressor = zstandard.ZstdCompressor(level=1)


def common_codec(ours: Iterable[str], theirs: Iterable[str]) -> str | None:
    """The first of ours that the peer has too."""
    offered = set(theirs)
    return next((codec for codec in ours if codec in offered and codec in _FLAG), None)


def compress(payload: bytes, codec: str | None) -> tuple[bytes, int]:
    """(payload, flags): compressed if a codec was agreed on and it pays, else as it is."""
    if codec is None or len(payload) < COMPRESS_FROM_BYTES:
        return payload, 0
    if codec == "zstd":
        smaller = _compressor.compress(payload)
    else:
        packer = zlib.compressobj(1, zlib.DEFLATED, 31)
        smaller = packer.compress(payload) + packer.flush()
    return (smaller, _FLAG[codec]) if len(smaller) < len(payload) else (payload, 0)


def decompress(payload: bytes, flags: int, max_bytes: int) -> bytes:
    """The plain payload; TooLarge before more than max_bytes are allocated."""
    if not flags & (ZSTD | GZIP):
        return payload
    if flags & ZSTD and flags & GZIP:
        raise ProtocolError("a payload cannot be both zstd and gzip")
    try:
        plain, whole = _inflate_zstd(payload, max_bytes) if flags & ZSTD else _inflate_gzip(payload, max_bytes)
    except (zstandard.ZstdError, zlib.error) as error:
        raise ProtocolError(f"a compressed payload cannot be read: {error}") from None
    if not whole:
        raise TooLarge(f"a compressed payload of {len(payload)} bytes is cut off or grows past the limit of {max_bytes} bytes")
    return plain


def _inflate_zstd(payload: bytes, max_bytes: int) -> tuple[bytes, bool]:
    reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(payload, read_across_frames=False)
    plain = reader.read(max_bytes + 1)
    # A frame that ended gives nothing more; one that was cut off raises no error, so that its declared size is compared.
    declared = zstandard.get_frame_parameters(payload).content_size
    known = declared not in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR)
    return plain, len(plain) <= max_bytes and (not known or declared == len(plain))


def _inflate_gzip(payload: bytes, max_bytes: int) -> tuple[bytes, bool]:
    unpacker = zlib.decompressobj(31)
    plain = unpacker.decompress(payload, max_bytes + 1)
    return plain, unpacker.eof and len(plain) <= max_bytes
