"""The data file docs/wire-vectors.json as the tests read it, and the page docs/wire.md that quotes it."""

import json
import re
import typing
from pathlib import Path
from typing import Any

import msgspec

from tasuki.core import protocol
from tasuki.core.protocol import Message
from tasuki.wire.messages import FrameDecoder, decode

DOCS = Path(__file__).parents[2] / "docs"
VECTORS: dict[str, Any] = json.loads((DOCS / "wire-vectors.json").read_text("utf-8"))
PAGE = (DOCS / "wire.md").read_text("utf-8")

MESSAGE_TYPES: tuple[type[msgspec.Struct], ...] = typing.get_args(Message)


def values(readable: Any) -> Any:
    """Decode the readable form: texts that begin with `hex:` are bytes."""
    match readable:
        case str() if readable.startswith("hex:"):
            return bytes.fromhex(readable.removeprefix("hex:"))
        case dict():
            return {name: values(value) for name, value in readable.items()}
        case list():
            return [values(value) for value in readable]
        case _:
            return readable


def message_of(vector: dict[str, Any]) -> Any:
    """The message that a vector describes."""
    return msgspec.convert(values(vector["message"]), getattr(protocol, vector["type"]))


def decode_all(data: bytes, max_bytes: int = protocol.FRAME_MAX_BYTES) -> list[Any]:
    """The messages in these bytes, as a connection with this limit takes them."""
    return [decode(frame, max_bytes) for frame in FrameDecoder(max_bytes).feed(data)]


def hex_blocks(page: str) -> list[str]:
    """Every fenced block of hex on a page, without its spaces and comments."""
    blocks = re.findall(r"^```hex\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    return ["".join(re.sub(r"#.*", "", block).split()) for block in blocks]
