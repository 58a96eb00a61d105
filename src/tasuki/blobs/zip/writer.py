"""Result archives: written in a stream, and extracted without trusting their headers.

Every refusal is InvalidInput or TooLarge and names the entry. The rules for names, and how an archive is listed and unpacked, are
in `reader.py`. `extract_zip` makes only the given folder.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from tasuki.blobs.files import disk_full_as_error
from tasuki.blobs.zip.reader import LOCAL_HEADER, LOCAL_SIGNATURE, ArchiveNames, ZipEntry, ZipLimits, ZipReader
from tasuki.errors import InvalidInput

_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_ZIP_VERSION, _UNIX, _DAY_ONE = 20, 3, 0x21  # 1980-01-01, as `write_zip` has it
_REGULAR_FILE = (stat.S_IFREG | 0o644) << 16

FIXED_TIME = (1980, 1, 1, 0, 0, 0)  # the oldest that ZIP knows: equal contents give equal bytes


class Pieces(msgspec.Struct, frozen=True):
    """Bytes that come one after another while they are written, at most so many; for callers that read a file themselves."""

    max_bytes: int
    pieces: Iterable[bytes]
    stored: bool = False
    """Do not compress."""


class ZipMember(msgspec.Struct, frozen=True):
    """A member to be written: its name, and its bytes, or None for a folder (its name ends with `/`)."""

    name: str
    content: bytes | Pieces | None


class ByteSink(Protocol):
    """The target of an archive: a binary file, a socket's file, a `BlobWriter`. It is never asked to seek."""

    def write(self, data: memoryview, /) -> int: ...


class _Stream:
    """A sink as `zipfile` sees it: no `tell` or `seek`, so that the bytes do not depend on the kind of sink."""

    def __init__(self, sink: ByteSink) -> None:
        self._sink: ByteSink | None = sink

    def write(self, data: bytes) -> int:
        left = memoryview(data)
        while left and self._sink is not None:  # an unbuffered file on a disk that fills up takes a part first
            left = left[self._sink.write(left) :]
        return len(data)

    def flush(self) -> None:
        """Do nothing: nothing is buffered here."""

    def cut_off(self) -> None:
        """Drop everything from now on: `zipfile` ends even a broken archive with a directory that makes it look whole."""
        self._sink = None


def write_zip(target: ByteSink, members: Iterable[ZipMember]) -> None:
    """Write an archive that `extract_zip` accepts, but for its limits. Equal members give equal bytes (same Python and zlib).

    A name that no archive may have: InvalidInput; a full disk: DiskFull. The target then holds a part of an archive that
    cannot be taken for a whole one.
    """
    stream = _Stream(target)
    names = ArchiveNames()
    archive = zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED)  # type: ignore[call-overload]  # typed as seekable
    try:
        with disk_full_as_error(getattr(target, "name", "the archive")):
            for member in members:
                names.add(member.name, is_folder=member.content is None)
                _write_member(archive, member)
            archive.close()
    except BaseException:
        stream.cut_off()
        archive.close()
        raise


def _write_member(archive: zipfile.ZipFile, member: ZipMember) -> None:
    is_folder = member.content is None
    if is_folder != member.name.endswith("/"):
        raise InvalidInput(f"archive entry {member.name!r}: names of folders, and only they, end with '/'")
    info = zipfile.ZipInfo(member.name, FIXED_TIME)
    info.create_system = 3  # Unix, on every platform
    mode = stat.S_IFDIR | 0o755 if is_folder else stat.S_IFREG | 0o644
    info.external_attr = mode << 16
    info.compress_type = zipfile.ZIP_STORED if is_folder else zipfile.ZIP_DEFLATED
    match member.content:
        case None:
            archive.writestr(info, b"")
        case bytes() as data:
            info.file_size = len(data)
            with archive.open(info, "w") as entry:
                entry.write(data)
        case Pieces() as some:
            info.file_size = some.max_bytes
            info.compress_type = zipfile.ZIP_STORED if some.stored else zipfile.ZIP_DEFLATED
            with archive.open(info, "w") as entry:
                for piece in some.pieces:
                    entry.write(piece)


def extract_zip(source: BinaryIO, into: Path, limits: ZipLimits | None = None) -> list[ZipEntry]:
    """Unpack into the new folder `into`: all of it or, whatever goes wrong, nothing.

    Modes, owners and times in the archive are ignored. Nothing is fsynced: the archive is what lasts.
    InvalidInput if `into` exists or an entry is not acceptable, TooLarge if a limit is passed, DiskFull.
    """
    exists = InvalidInput(f"{str(into)!r} exists; an archive is extracted into a new folder")
    if os.path.lexists(into):
        raise exists
    archive = ZipReader(source, limits)
    with disk_full_as_error(into):
        # Private (0700) while it fills; the folder inside has the modes that the caller's umask asks for.
        private = Path(tempfile.mkdtemp(prefix=f".{into.name[:100]}-", dir=into.parent))
        try:
            new = private / "new"
            new.mkdir()
            for entry in archive.entries:
                _extract_entry(archive, entry, new / entry.name)
            try:
                new.rename(into)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):  # made by another process meanwhile
                    raise exists from error
                raise
        finally:
            shutil.rmtree(private)
    return archive.entries


def _extract_entry(archive: ZipReader, entry: ZipEntry, path: Path) -> None:
    if entry.is_folder:
        path.mkdir(parents=True, exist_ok=True)
        archive.unpack(entry, lambda piece: None)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as target:
        archive.unpack(entry, target.write)


def small_zip(members: Sequence[tuple[str, bytes]]) -> bytes:
    """Return an archive of a few texts with fixed names. Takes a sixth of the time of `zipfile`; most results are like this."""
    body, directory = bytearray(), bytearray()
    for name, data in members:
        packed = _deflated(data)
        method = zipfile.ZIP_DEFLATED
        if len(packed) >= len(data):
            packed, method = data, zipfile.ZIP_STORED
        facts = (0, method, 0, _DAY_ONE, zlib.crc32(data), len(packed), len(data), len(name), 0)
        at = len(body)
        body += LOCAL_HEADER.pack(LOCAL_SIGNATURE, _ZIP_VERSION, *facts) + name.encode("ascii") + packed
        made = _ZIP_VERSION | _UNIX << 8
        directory += _CENTRAL.pack(b"PK\1\2", made, _ZIP_VERSION, *facts, 0, 0, 0, _REGULAR_FILE, at) + name.encode("ascii")
    end = _END.pack(b"PK\5\6", 0, 0, len(members), len(members), len(directory), len(body), 0)
    return bytes(body + directory + end)


def _deflated(data: bytes) -> bytes:
    """Deflate with a window that fits: zlib's default of a quarter of a megabyte takes ten times as long to set up as to use."""
    if not data:
        return data
    window_bits, memory_level = (12, 5) if len(data) <= 4096 else (zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL)
    packer = zlib.compressobj(zlib.Z_DEFAULT_COMPRESSION, zlib.DEFLATED, -window_bits, memory_level)
    return packer.compress(data) + packer.flush()
