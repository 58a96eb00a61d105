"""HTTP byte ranges: the headers Range, If-Range and Content-Range, parsed and formatted. Offsets inside are [start, stop)."""

from __future__ import annotations

import re
from typing import NamedTuple

from tasuki.errors import InvalidInput

__all__ = [
    "BodyRange",
    "body_range",
    "content_range",
    "is_number",
    "parse_content_range",
    "parse_range",
    "range_headers",
    "requested_range",
]

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII).fullmatch
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18})", re.ASCII).fullmatch
_NUMBER = re.compile(r"\d{1,18}", re.ASCII).fullmatch


class BodyRange(NamedTuple):
    """The part [start, stop) of `size_bytes` bytes that a body brings. Both are 0 where no part is named (`bytes */SIZE`)."""

    start: int
    stop: int
    size_bytes: int


def is_number(text: str) -> bool:
    """Return whether a header such as Content-Length is a plain decimal number."""
    return _NUMBER(text) is not None


def range_headers(offset: int, etag: str = "") -> dict[str, str]:
    """Return the request headers for everything from `offset` on; with `etag` only if the representation is still that one."""
    if not offset:
        return {}
    headers = {"Range": f"bytes={offset}-"}
    if etag:
        headers["If-Range"] = etag
    return headers


def parse_range(header: str) -> tuple[int | None, int | None] | None:
    """Return the (first, last) byte of a Range header, of which one may be missing; None asks for everything.

    Several ranges, and whatever is not a range, ask for everything, as RFC 9110 allows.
    """
    found = _RANGE(header)
    if found is None or not (found[1] or found[2]):
        return None
    first, last = (int(number) if number else None for number in found.groups())
    return None if first is not None and last is not None and last < first else (first, last)


def requested_range(header: str, size_bytes: int) -> tuple[int, int] | None:
    """Return the (start, stop) that a Range header asks for; None asks for everything. Behind the end, start >= stop."""
    found = parse_range(header)
    if found is None:
        return None
    first, last = found
    if first is None:
        return max(0, size_bytes - (last or 0)), size_bytes
    return first, size_bytes if last is None else min(last + 1, size_bytes)


def content_range(start: int, stop: int, size_bytes: int) -> str:
    """Return the Content-Range of the bytes [start, stop); without any bytes `bytes */SIZE`."""
    return f"bytes {start}-{stop - 1}/{size_bytes}" if start < stop else f"bytes */{size_bytes}"


def parse_content_range(header: str) -> BodyRange | None:
    """Return the part that a Content-Range names, or None if it is not one of a known size."""
    found = _CONTENT_RANGE(header)
    if found is None:
        return None
    start, stop = (int(found[1]), int(found[2]) + 1) if found[1] else (0, 0)
    return BodyRange(start, stop, int(found[3]))


def body_range(content_length: str, header: str | None) -> BodyRange:
    """Return which bytes the body of a PUT brings, by its Content-Length and Content-Range; InvalidInput if they do not agree."""
    if not is_number(content_length):
        raise InvalidInput("the size of the body must be known before it is sent: send the header Content-Length")
    length = int(content_length)
    if header is None:
        return BodyRange(0, length, length)
    found = parse_content_range(header)
    if found is None:
        raise InvalidInput(f"Content-Range: {header[:80]!r} is not understood; send bytes FIRST-LAST/SIZE, or bytes */SIZE")
    if not found.start <= found.stop <= found.size_bytes:
        raise InvalidInput(f"Content-Range: {header[:80]!r} names bytes that the whole does not have")
    if found.stop - found.start != length:
        raise InvalidInput(
            f"Content-Range: {header[:80]!r} names {found.stop - found.start} bytes, but Content-Length is {length}"
        )
    return found
