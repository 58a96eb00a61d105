"""The file format of a backup: a plain tar with three kinds of members, which any tar can list.

    blobs/<sha256>[.<generation>]      the bytes of one blob, whose name is their hash
    tasuki.sqlite3                     the database
    manifest.json                      sizes and hashes of the two above; last, so that a torn archive has none

The reader trusts nothing: no other name, no link, folder or device, no extension of the format, no member twice, nothing after
the manifest. Nothing is compressed, so nothing can grow while it is read. Only the given files are touched.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import msgspec

from tasuki.blobs.blob import CHUNK_BYTES, name_of
from tasuki.core.decoding import decodable
from tasuki.errors import Corrupt, InvalidInput

FORMAT = 1
MANIFEST_NAME = "manifest.json"
DATABASE_NAME = "tasuki.sqlite3"
MANIFEST_MAX_BYTES = 512 * 1024 * 1024  # some five million blobs
_BLOB_NAME = re.compile(r"blobs/([0-9a-f]{64})(?:\.([1-9][0-9]{0,8}))?")
_BLOCK = tarfile.BLOCKSIZE


@decodable
class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a backup."""

    tasuki: str
    """Version of tasuki that made the backup."""
    made_at: float
    schema_version: int
    migrations: tuple[str, ...]
    epoch: int
    holder: str
    jobs: dict[str, int]
    database_bytes: int
    database_sha256: str
    with_blobs: bool
    """False: the bytes of blobs are kept elsewhere, and must be restored from there."""
    blobs: list[tuple[str, int, int]] = []
    """(sha256, generation, size in bytes)"""
    missing: list[tuple[str, int]] = []
    """Blobs that jobs refer to and whose bytes were gone or damaged when the backup was made."""
    format: int = FORMAT

    @property
    def blob_bytes(self) -> int:
        return sum(size_bytes for _, _, size_bytes in self.blobs)


class ArchiveMember(msgspec.Struct, frozen=True):
    """The header of one member. `blob` is (sha256, generation) if it is a blob."""

    name: str
    size_bytes: int
    blob: tuple[str, int] | None = None


def blob_name(sha256: str, generation: int) -> str:
    return f"blobs/{name_of(sha256, generation)}"


# ---------------------------------------------------------------------------------------------------- writing


class ArchiveWriter:
    """Writes members one after the other to a file that can be truncated."""

    def __init__(self, target: BinaryIO) -> None:
        self._target = target

    def add(self, name: str, size_bytes: int, pieces: Iterable[bytes]) -> str:
        """Add a member and return the sha256 of its bytes. If `pieces` fails, the archive is as it was before."""
        start = self._target.tell()
        head = tarfile.TarInfo(name)
        head.size, head.mode = size_bytes, 0o600
        digest, written = hashlib.sha256(), 0
        try:
            self._target.write(head.tobuf(tarfile.GNU_FORMAT))
            for piece in pieces:
                digest.update(piece)
                written += self._target.write(piece)
            if written != size_bytes:
                raise Corrupt(f"{name} has {written} bytes instead of {size_bytes}: it changed while it was copied")
            self._target.write(bytes(-written % _BLOCK))
        except BaseException:
            self._target.seek(start)
            self._target.truncate()
            raise
        return digest.hexdigest()

    def close(self, manifest: Manifest) -> None:
        """Write the manifest and the end mark; the caller syncs and renames the file."""
        encoded = msgspec.json.encode(manifest)
        self.add(MANIFEST_NAME, len(encoded), [encoded])
        self._target.write(bytes(2 * _BLOCK))


# ---------------------------------------------------------------------------------------------------- reading


class ArchiveReader:
    """Reads an archive once: `for member in reader`, with `reader.pieces()` for the bytes of that member."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._left_bytes = 0
        self._padding_bytes = 0
        self._seen: set[str] = set()

    def __iter__(self) -> Iterator[ArchiveMember]:
        while MANIFEST_NAME not in self._seen:
            member = self._head()
            if member.name in self._seen:
                raise InvalidInput(f"the backup has {member.name} twice; it was not made by tasuki backup")
            self._seen.add(member.name)
            self._left_bytes, self._padding_bytes = member.size_bytes, -member.size_bytes % _BLOCK
            yield member
            for _ in self.pieces():  # bytes that the caller did not read
                pass
            self._take(self._padding_bytes)
        rest = self._source.read(2 * _BLOCK + 1)
        if rest != bytes(2 * _BLOCK):
            raise Corrupt("the backup does not end after its manifest; it is torn, or was changed")

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the current member, once."""
        while self._left_bytes:
            piece = self._take(min(CHUNK_BYTES, self._left_bytes))
            self._left_bytes -= len(piece)
            yield piece

    def _take(self, size_bytes: int) -> bytes:
        taken = self._source.read(size_bytes)
        if len(taken) != size_bytes:
            raise Corrupt("the backup is cut off in the middle; copy it again, or use another one")
        return taken

    def _head(self) -> ArchiveMember:
        block = self._source.read(_BLOCK)
        if len(block) != _BLOCK or block == bytes(_BLOCK):
            if not self._seen:
                raise InvalidInput("this is not a file that tasuki backup made")
            raise Corrupt("the backup is cut off: its last member, the manifest, is missing; copy it again, or use another one")
        try:
            head = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError):
            if not self._seen:
                raise InvalidInput("this is not a file that tasuki backup made") from None
            raise Corrupt("the backup is damaged: where a member should begin there is none; use another one") from None
        return _member(head)


def _member(head: tarfile.TarInfo) -> ArchiveMember:
    """Return the member of a header; InvalidInput for all but regular files with the three kinds of names."""
    if head.type != tarfile.REGTYPE or head.size < 0:
        raise InvalidInput(f"the backup has a member {head.name[:100]!r} that is no plain file; it was not made by tasuki backup")
    if head.name in (MANIFEST_NAME, DATABASE_NAME):
        if head.name == MANIFEST_NAME and head.size > MANIFEST_MAX_BYTES:
            raise InvalidInput(f"the backup's manifest has {head.size} bytes, more than {MANIFEST_MAX_BYTES}")
        return ArchiveMember(head.name, head.size)
    matched = _BLOB_NAME.fullmatch(head.name)
    if matched is None:
        raise InvalidInput(f"the backup has a member with the unknown name {head.name[:100]!r}; it was not made by tasuki backup")
    return ArchiveMember(head.name, head.size, (matched[1], int(matched[2] or 0)))


def read_manifest(encoded: bytes) -> Manifest:
    """Decode a manifest; InvalidInput if it is of a format that this code does not know."""
    try:
        format_ = msgspec.json.decode(encoded, type=_Format).format
        if format_ == FORMAT:
            return msgspec.json.decode(encoded, type=Manifest)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Corrupt(f"the backup's manifest cannot be read: {error}") from None
    raise InvalidInput(f"the backup has format {format_}, this tasuki reads format {FORMAT}; use the version that made it")


@decodable
class _Format(msgspec.Struct):
    format: int
