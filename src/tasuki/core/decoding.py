"""Types that several threads may decode.

msgspec notes how to decode a struct when that is asked for first. Another thread that decodes one meanwhile reads what is not
noted yet, and the process crashes. So a module has it noted for its types while it is imported.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decodable(kind: type[T]) -> type[T]:
    """Return the type, which `msgspec` can decode and convert to in any thread from now on."""
    msgspec.json.Decoder(kind)
    return kind
