"""HTTP byte ranges: the headers Range, If-Range and Content-Range, parsed and formatted. Offsets inside are [start, stop)."""

from __future__ import annotations

import re
from typing import NamedTuple

from tasuki.errors import InvalidInput

BODY_DIGITS_MAX = 15  # of a number in the headers of an upload, or in a request to a store of blobs or inputs
DIGITS_MAX = 18  # of a number in the headers of a result, or in a request for one

_RANGE = re.compile(r"bytes=(\d*)-(\d*)", re.ASCII).fullmatch
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)", re.ASCII).fullmatch


class BodyRange(NamedTuple):
    """The part [start, stop) of `size_bytes` bytes that a body brings. Both are 0 where no part is named (`bytes */SIZE`)."""

    start: int
    stop: int
    size_bytes: int


def is_number(text: str) -> bool:
    """Return whether a header such as Content-Length is a plain decimal number."""
    return text.isascii() and text.isdigit()


def range_headers(offset: int, etag: str = "") -> dict[str, str]:
    """Return the request headers for everything from `offset` on; with `etag` only if the representation is still that one."""
    if not offset:
        return {}
    headers = {"Range": f"bytes={offset}-"}
    if etag:
        headers["If-Range"] = etag
    return headers


def parse_range(header: str, max_digits: int = BODY_DIGITS_MAX) -> tuple[int | None, int | None] | None:
    """Return the (first, last) byte of a Range header, of which one may be missing; None asks for everything.

    Several ranges, a longer number, and whatever is not a range, ask for everything, as RFC 9110 allows.
    """
    found = _RANGE(header)
    if found is None or not 0 < max(map(len, found.groups())) <= max_digits:
        return None
    first, last = (int(number) if number else None for number in found.groups())
    return None if first is not None and last is not None and last < first else (first, last)


def requested_range(header: str, size_bytes: int) -> tuple[int, int] | None:
    """Return the (start, stop) that a Range header asks for; None asks for everything. Behind the end, start >= stop."""
    found = parse_range(header, DIGITS_MAX)
    if found is None:
        return None
    first, last = found
    if first is None:
        return max(0, size_bytes - (last or 0)), size_bytes
    return first, size_bytes if last is None else min(last + 1, size_bytes)


def content_range(start: int, stop: int, size_bytes: int) -> str:
    """Return the Content-Range of the bytes [start, stop); without any bytes `bytes */SIZE`."""
    return f"bytes {start}-{stop - 1}/{size_bytes}" if start < stop else f"bytes */{size_bytes}"


def parse_content_range(header: str, max_digits: int = DIGITS_MAX) -> BodyRange | None:
    """Return the part that a Content-Range names, or None if it is not one of a known size, or has a longer number."""
    found = _CONTENT_RANGE(header)
    if found is None or max(len(number or "") for number in found.groups()) > max_digits:
        return None
    start, stop = (int(found[1]), int(found[2]) + 1) if found[1] else (0, 0)
    return BodyRange(start, stop, int(found[3]))


def body_range(content_length: str, header: str | None) -> BodyRange:
    """Return which bytes the body of a PUT brings, by its Content-Length and Content-Range; InvalidInput if they do not agree."""
    if not is_number(content_length) or len(content_length) > BODY_DIGITS_MAX:
        raise InvalidInput("the size of the body must be known before it is sent: send the header Content-Length")
    length = int(content_length)
    if header is None:
        return BodyRange(0, length, length)
    found = parse_content_range(header, BODY_DIGITS_MAX)
    if found is None:
        raise InvalidInput(f"Content-Range: {header[:80]!r} is not understood; send bytes FIRST-LAST/SIZE, or bytes */SIZE")
    if not found.start <= found.stop <= found.size_bytes:
        raise InvalidInput(f"Content-Range: {header[:80]!r} names bytes that the whole does not have")
    if found.stop - found.start != length:
        raise InvalidInput(
            f"Content-Range: {header[:80]!r} names {found.stop - found.start} bytes, but Content-Length is {length}"
        )
    return found
