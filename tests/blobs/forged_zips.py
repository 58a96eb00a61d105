"""Archives as bytes, field by field, for the ones that no library agrees to write."""

from __future__ import annotations

import stat
import struct
import zlib
from dataclasses import dataclass, field

REGULAR = (stat.S_IFREG | 0o644) << 16


def deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


@dataclass
class Forged:
    """One entry; whatever is not given is honest."""

    name: bytes = b"a.txt"
    data: bytes = b"hello"
    packed: bytes | None = None
    """The bytes in the archive, if they are not `data` itself."""
    method: int = 0
    flags: int = 0x0800
    mode: int = REGULAR
    claimed_bytes: int | None = None
    claimed_packed_bytes: int | None = None
    crc32: int | None = None
    local_name: bytes | None = None
    local_flags: int | None = None
    local_method: int | None = None
    header_offset: int | None = None
    """Start of the entry according to the directory, if that is not its start."""
    omit_contents: bool = field(default=False)
    """Only the directory knows it: for entries that point into another one."""

    def sizes(self) -> tuple[int, int, int]:
        packed = self.data if self.packed is None else self.packed
        return (
            zlib.crc32(self.data) if self.crc32 is None else self.crc32,
            len(packed) if self.claimed_packed_bytes is None else self.claimed_packed_bytes,
            len(self.data) if self.claimed_bytes is None else self.claimed_bytes,
        )

    def local(self) -> bytes:
        name = self.name if self.local_name is None else self.local_name
        flags = self.flags if self.local_flags is None else self.local_flags
        method = self.method if self.local_method is None else self.local_method
        header = struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, flags, method, 0, 33, *self.sizes(), len(name), 0)
        return header + name + (self.data if self.packed is None else self.packed)

    def central(self, offset: int) -> bytes:
        if self.header_offset is not None:
            offset = self.header_offset
        fixed = (b"PK\x01\x02", 20 | 3 << 8, 20, self.flags, self.method, 0, 33, *self.sizes(), len(self.name))
        return struct.pack("<4s6H3I5H2I", *fixed, 0, 0, 0, 0, self.mode, offset) + self.name


def forge(*entries: Forged, directory_bytes: int | None = None, count: int | None = None) -> bytes:
    """The archive of these entries, with an end record that may lie too."""
    body = b""
    directory = b""
    for entry in entries:
        directory += entry.central(len(body))
        if not entry.omit_contents:
            body += entry.local()
    count = len(entries) if count is None else count
    size_bytes = len(directory) if directory_bytes is None else directory_bytes
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, size_bytes, len(body), 0)
    return body + directory + end
