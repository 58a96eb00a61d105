"""multipart/form-data (RFC 7578) as it comes in, piece by piece. Without I/O, strict, and bounded in all that a peer decides.

    parser = MultipartParser(boundary_of(content_type))
    for event in parser.feed(piece): ...        Part, then its bytes in pieces, then PART_ENDED
    parser.finish()                             InvalidInput unless the closing boundary has come

Nothing but the part that is open is looked at, and of that no more than a boundary's length is held back.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator

import msgspec

from tasuki.core.ids import quoted
from tasuki.errors import InvalidInput

HEADERS_MAX_BYTES = 8 * 1024  # of one part
PARTS_MAX = 1_000

_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]").fullmatch
_PARAMETER = re.compile(r""";[ \t]*([!#$%&'*+.^_`|~0-9A-Za-z-]+)=(?:"((?:[^"\\]|\\.)*)"|([^";\s]+))[ \t]*""", re.DOTALL)
_ESCAPED = re.compile(r"\\([\\\"])")
_PLAIN_ENCODINGS = ("binary", "8bit", "7bit")


class Part(msgspec.Struct, frozen=True):
    """The begin of a part: the field's name, and the file's name if it is a file."""

    name: str
    filename: str | None


class PartEnded(enum.Enum):
    PART_ENDED = enum.auto()


PART_ENDED = PartEnded.PART_ENDED
Event = Part | bytes | PartEnded


class _State(enum.Enum):
    BOUNDARY = enum.auto()
    """Right behind a boundary: another part or the end."""
    HEADERS = enum.auto()
    BODY = enum.auto()
    END = enum.auto()


def boundary_of(content_type: str) -> bytes:
    """The boundary that a Content-Type of multipart/form-data names; InvalidInput for anything else."""
    kind, separator, parameters = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        raise InvalidInput(f"multipart/form-data is needed, with the field file; got Content-Type {quoted(content_type)}")
    boundary = _parameters(separator + parameters).get("boundary", "")
    if _BOUNDARY(boundary) is None:
        raise InvalidInput("the Content-Type names no usable boundary; it has 1 to 70 characters (RFC 2046)")
    return boundary.encode("ascii")


class MultipartParser:
    """One body."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        # A boundary belongs to the line break before it. The first one has none, so it is given one.
        self._buffer = bytearray(b"\r\n")
        self._state: _State | None = None
        self._parts = 0

    def feed(self, piece: bytes) -> Iterator[Event]:
        """What this piece completes. To be used up before the next one."""
        self._buffer += piece
        while (event := self._next()) is not None:
            if event:  # a part may have no bytes to tell
                yield event

    def finish(self) -> None:
        """The body is over."""
        if self._state is None:
            raise self._wrong_begin()
        if self._state is not _State.END:
            raise InvalidInput("the form ended before its closing boundary; send all of it")

    def _next(self) -> Event | None:
        """The next event; None: more is needed. b"": look again."""
        match self._state:
            case None:
                return self._begin()
            case _State.BOUNDARY:
                return self._behind_boundary()
            case _State.HEADERS:
                return self._headers()
            case _State.BODY:
                return self._body()
            case _State.END:
                if self._buffer.strip(b"\r\n"):
                    raise InvalidInput("there is something behind the closing boundary of the form")
                self._buffer.clear()
                return None

    def _begin(self) -> Event | None:
        have = min(len(self._buffer), len(self._delimiter))
        if self._buffer[:have] != self._delimiter[:have]:
            raise self._wrong_begin()
        if have < len(self._delimiter):
            return None
        del self._buffer[:have]
        self._state = _State.BOUNDARY
        return b""

    def _wrong_begin(self) -> InvalidInput:
        return InvalidInput("the form does not begin with the boundary that its Content-Type names")

    def _behind_boundary(self) -> Event | None:
        if len(self._buffer) < 2:
            return None
        two = bytes(self._buffer[:2])
        del self._buffer[:2]
        if two == b"--":
            self._state = _State.END
        elif two == b"\r\n":
            self._state = _State.HEADERS
            self._parts += 1
            if self._parts > PARTS_MAX:
                raise InvalidInput(f"the form has more than {PARTS_MAX} parts")
        else:
            raise InvalidInput("a boundary of the form is not followed by a line break")
        return b""

    def _headers(self) -> Event | None:
        end = self._buffer.find(b"\r\n\r\n", 0, HEADERS_MAX_BYTES)
        if end < 0:
            if len(self._buffer) >= HEADERS_MAX_BYTES:
                raise InvalidInput(f"the headers of part {self._parts} of the form are larger than {HEADERS_MAX_BYTES} bytes")
            return None
        part = _part_of(bytes(self._buffer[:end]))
        del self._buffer[: end + 4]
        self._state = _State.BODY
        return part

    def _body(self) -> Event | None:
        end = self._buffer.find(self._delimiter)
        if end == 0:
            del self._buffer[: len(self._delimiter)]
            self._state = _State.BOUNDARY
            return PART_ENDED
        if end < 0:
            end = len(self._buffer) - len(self._delimiter) + 1
        if end <= 0:
            return None
        data = bytes(self._buffer[:end])
        del self._buffer[:end]
        return data


def _part_of(headers: bytes) -> Part:
    try:
        lines = headers.decode("utf-8").split("\r\n")
    except UnicodeDecodeError:
        raise InvalidInput("the headers of a part of the form are not UTF-8") from None
    found: dict[str, str] = {}
    for line in lines:
        name, separator, value = line.partition(":")
        if not separator or name != name.strip() or name.lower() in found or "\r" in line or "\n" in line or "\0" in line:
            raise InvalidInput(f"a part of the form has the header line {quoted(line)}, which is none")
        found[name.lower()] = value.strip()
    if found.get("content-transfer-encoding", "binary").lower() not in _PLAIN_ENCODINGS:
        raise InvalidInput("a part of the form has a Content-Transfer-Encoding; send the bytes as they are")
    kind, separator, rest = found.get("content-disposition", "").partition(";")
    if kind.strip().lower() != "form-data":
        raise InvalidInput("a part of the form has no Content-Disposition: form-data")
    parameters = _parameters(separator + rest)
    if "filename*" in parameters:
        raise InvalidInput("a part of the form has filename*, which RFC 7578 forbids; write the name as UTF-8 in filename")
    if "name" not in parameters:
        raise InvalidInput("a part of the form has no name")
    return Part(parameters["name"], parameters.get("filename"))


def _parameters(text: str) -> dict[str, str]:
    """`; name="value"; other=value`, all of it."""
    found: dict[str, str] = {}
    at = 0
    text = text.rstrip()
    while at < len(text):
        parameter = _PARAMETER.match(text, at)
        if parameter is None or parameter[1].lower() in found:
            raise InvalidInput(f"the parameters {quoted(text)} of a header of the form cannot be read")
        value = parameter[3] if parameter[2] is None else _ESCAPED.sub(r"\1", parameter[2])
        found[parameter[1].lower()] = value
        at = parameter.end()
    return found
