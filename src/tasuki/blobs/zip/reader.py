"""Reading archives without trusting their headers. `writer.py` writes and extracts them.

Theory of operation. `zipfile` is used only to list the central directory, and of its names only the raw ones: it turns
`../../evil` into `evil` and cuts names at NUL. `ZipReader` refuses every entry that is not a plain file or folder, and every two
entries that share bytes. Its `unpack` then inflates an entry by itself: bytes and ratio are counted as they come out, and the
output must be exactly what the directory says. `ArchiveNames` accepts only names that mean the same file on every system, inside
the folder that they go to.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

import msgspec

from tasuki.core.job import CONTROL_CHARACTERS
from tasuki.errors import InvalidInput, TooLarge

PIECE_BYTES = 64 * 1024  # read, inflated or written at once
NAME_MAX_BYTES = 1024  # of the whole name; leaves room for the folder it goes to below Linux's 4096
PART_MAX_BYTES = 255  # of one part between slashes; what ext4, xfs and NTFS can hold
NAME_MAX_DEPTH = 32  # parts; bounds what the folders implied by hostile names cost

_DRIVE = re.compile(r"[A-Za-z]:")


def _check_name(name: str) -> str:
    """Return the name without the slash that marks a folder, or raise InvalidInput."""
    path = name.removesuffix("/")
    parts = path.split("/")
    sizes_bytes = [len(part.encode(errors="surrogatepass")) for part in parts]
    name_bytes = sum(sizes_bytes) + len(parts) - 1
    problems = (
        ("\0" in name, "has a NUL"),
        ("\\" in name, "has a backslash, which is a separator on some systems"),
        (name.startswith("/"), "is absolute"),
        (_DRIVE.match(name), "begins like a drive of Windows"),
        (".." in parts, "has a '..' part"),
        ("" in parts or "." in parts, "has an empty or '.' part"),
        (CONTROL_CHARACTERS.search(path), "has a control character, or is not valid Unicode"),
        (name_bytes > NAME_MAX_BYTES, f"has a name of {name_bytes} bytes (limit {NAME_MAX_BYTES})"),
        (len(parts) > NAME_MAX_DEPTH, f"is {len(parts)} levels deep (limit {NAME_MAX_DEPTH})"),
        (max(sizes_bytes) > PART_MAX_BYTES, f"has a part of more than {PART_MAX_BYTES} bytes"),
    )
    for is_found, problem in problems:
        if is_found:
            raise InvalidInput(f"archive entry {name[:NAME_MAX_BYTES]!r} {problem}; only plain relative names are allowed")
    return path


def _folded(path: str) -> str:
    """Return a key that is equal for names that differ only in case or Unicode composition: some file systems ignore both."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


class ArchiveNames:
    """The names seen in one archive; `add` refuses each name that is bad by itself or clashes with an earlier one."""

    def __init__(self) -> None:
        self._files: dict[str, str] = {}
        self._folders: dict[str, str] = {}  # also those that are only part of other names
        self._folder_entries: set[str] = set()

    def add(self, name: str, *, is_folder: bool) -> None:
        path = _check_name(name)
        key = _folded(path)
        self._refuse_clash(name, self._files.get(key))
        if is_folder:
            if key in self._folder_entries:
                self._refuse_clash(name, self._folders[key])
            self._folder_entries.add(key)
            self._add_folder(name, path)
        else:
            self._refuse_clash(name, self._folders.get(key))
            self._files[key] = path
        while "/" in path:
            path = path.rpartition("/")[0]
            self._add_folder(name, path)

    def _add_folder(self, name: str, folder: str) -> None:
        key = _folded(folder)
        self._refuse_clash(name, self._files.get(key))
        if self._folders.setdefault(key, folder) != folder:
            self._refuse_clash(name, self._folders[key])

    @staticmethod
    def _refuse_clash(name: str, earlier: str | None) -> None:
        if earlier is not None:
            raise InvalidInput(
                f"archive entry {name!r} clashes with {earlier!r}: the same name twice (case does not count), "
                "or a file that would also be a folder"
            )


LOCAL_HEADER = struct.Struct("<4s5H3I2H")
LOCAL_SIGNATURE = b"PK\x03\x04"
_FLAGS_REFUSED = 0x0001 | 0x0040 | 0x2000  # encrypted: traditional, strong, with masked headers
_FLAG_UTF8 = 0x0800

# Exceptions of `zipfile` for directories that are not in order.
_MALFORMED = (zipfile.BadZipFile, struct.error, NotImplementedError, ValueError, OverflowError, EOFError)


class ZipLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of what an archive may unpack to. The defaults suit results of untrusted jobs."""

    max_entries: int = 10_000
    max_directory_bytes: int = 4 * 1024 * 1024
    """Size of the list of entries, which is in memory whole: 4 MiB hold at most 91,000 of the smallest."""
    max_entry_bytes: int = 1024 * 1024 * 1024
    max_total_bytes: int = 4 * 1024 * 1024 * 1024
    max_ratio: float = 200.0
    """Unpacked : packed, of each entry and of the whole; deflate itself cannot pass 1032."""
    ratio_free_bytes: int = 40 * 1024 * 1024
    """Size up to which the ratio does not count: two whole logs (16 MiB each) of equal lines are no bomb."""


class ZipEntry(msgspec.Struct, frozen=True):
    """One entry as the directory describes it. Name, kind and place are checked; size and CRC are claims until it is unpacked."""

    name: str
    """Relative, parts separated by `/`; a folder ends with `/`."""
    is_folder: bool
    is_deflated: bool
    header_start: int
    data_start: int
    packed_bytes: int
    size_bytes: int
    crc32: int

    @property
    def data_end(self) -> int:
        return self.data_start + self.packed_bytes


class _Bounded:
    """The source as `zipfile` sees it: no read beyond a limit, no position outside of the file."""

    def __init__(self, source: BinaryIO, max_read_bytes: int) -> None:
        self._source = source
        self._max_read_bytes = max_read_bytes
        self._size_bytes = source.seek(0, os.SEEK_END)

    def read(self, size_bytes: int | None = -1, /) -> bytes:
        # Without this, one number in a forged header makes zipfile read and list a directory of gigabytes.
        left_bytes = max(0, self._size_bytes - self._source.tell())
        if size_bytes is None or size_bytes < 0:
            size_bytes = left_bytes
        if min(size_bytes, left_bytes) > self._max_read_bytes:
            raise TooLarge(f"the archive's list of entries passes max_directory_bytes = {self._max_read_bytes}")
        return self._source.read(min(size_bytes, left_bytes))

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence == os.SEEK_SET and not 0 <= offset <= self._size_bytes:
            raise zipfile.BadZipFile(f"it points to byte {offset} of {self._size_bytes}")
        return self._source.seek(offset, whence)

    def tell(self) -> int:
        return self._source.tell()


def _read_directory(source: BinaryIO, limits: ZipLimits) -> list[ZipEntry]:
    try:
        # 64 KiB + 22 is what zipfile reads to find the end record, whatever the limit for the directory.
        archive = zipfile.ZipFile(_Bounded(source, max(limits.max_directory_bytes, 65_557)))
    except _MALFORMED as error:
        raise InvalidInput(f"not a ZIP archive that can be read: {error}") from error
    infos = archive.infolist()
    if len(infos) > limits.max_entries:
        beyond = infos[limits.max_entries].orig_filename
        raise TooLarge(
            f"the archive has {len(infos)} entries, more than max_entries = {limits.max_entries}; "
            f"the first too many is {beyond[:1024]!r}"
        )
    names = ArchiveNames()
    entries = []
    for info in infos:
        _check_kind(info)
        names.add(info.orig_filename, is_folder=info.orig_filename.endswith("/"))
        entries.append(_locate(source, info, archive.start_dir))
    _check_places(entries, archive.start_dir)
    return entries


def _check_kind(info: zipfile.ZipInfo) -> None:
    """Refuse entries other than regular files and folders that every program can read."""
    name = info.orig_filename
    shown = name[:1024]
    if info.flag_bits & _FLAGS_REFUSED:
        raise InvalidInput(f"archive entry {shown!r} is encrypted; only plain entries are allowed")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InvalidInput(f"archive entry {shown!r} uses method {info.compress_type}; use stored (0) or deflate (8)")
    kind = stat.S_IFMT(info.external_attr >> 16)  # 0: the archive comes from a system without modes
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise InvalidInput(f"archive entry {shown!r} is a link or a device (mode {kind:o}); only files and folders")
    if kind and (kind == stat.S_IFDIR) != name.endswith("/"):
        raise InvalidInput(f"archive entry {shown!r}: names of folders, and only they, must end with '/'")
    if name.endswith("/") and (info.file_size or info.CRC):
        raise InvalidInput(f"archive entry {shown!r} is a folder with contents")


def _locate(source: BinaryIO, info: zipfile.ZipInfo, directory_start: int) -> ZipEntry:
    """Find the contents by the local header, which must agree with the directory."""
    name = info.orig_filename
    if not 0 <= info.header_offset <= directory_start - LOCAL_HEADER.size:
        raise InvalidInput(f"archive entry {name!r} starts at byte {info.header_offset}, outside of the archive")
    source.seek(info.header_offset)
    header = source.read(LOCAL_HEADER.size)
    if len(header) != LOCAL_HEADER.size:
        raise InvalidInput(f"archive entry {name!r} has a local header that is cut off")
    signature, _, flags, method, _, _, _, _, _, name_bytes, extra_bytes = LOCAL_HEADER.unpack(header)
    raw_name = name.encode("utf-8" if info.flag_bits & _FLAG_UTF8 else "cp437")
    if signature != LOCAL_SIGNATURE or source.read(name_bytes) != raw_name:
        raise InvalidInput(f"archive entry {name!r} has another name, or none, in its local header")
    if flags & _FLAGS_REFUSED or method != info.compress_type:
        raise InvalidInput(f"archive entry {name!r} is stored in another way in its local header")
    return ZipEntry(
        name=name,
        is_folder=name.endswith("/"),
        is_deflated=method == zipfile.ZIP_DEFLATED,
        header_start=info.header_offset,
        data_start=info.header_offset + LOCAL_HEADER.size + name_bytes + extra_bytes,
        packed_bytes=info.compress_size,
        size_bytes=info.file_size,
        crc32=info.CRC,
    )


def _check_places(entries: list[ZipEntry], directory_start: int) -> None:
    """Refuse two entries that share bytes: so a small archive would unpack to petabytes."""
    ordered = sorted(entries, key=lambda entry: entry.header_start)
    for entry, following in itertools.pairwise(ordered):
        if entry.data_end > following.header_start:
            raise InvalidInput(f"archive entries {entry.name!r} and {following.name!r} overlap")
    if ordered and ordered[-1].data_end > directory_start:
        raise InvalidInput(f"archive entry {ordered[-1].name!r} overlaps the archive's list of entries")


class ZipReader:
    """The entries of one archive, in the order of its directory, and their unpacking within limits.

    Opening lists the archive, or refuses it, and unpacks nothing. `source` must be seekable.
    """

    def __init__(self, source: BinaryIO, limits: ZipLimits | None = None) -> None:
        self._source = source
        self._limits = limits or ZipLimits()
        self._total_bytes = 0
        self._total_packed_bytes = 0
        self.entries = _read_directory(source, self._limits)

    def unpack(self, entry: ZipEntry, take: Callable[[bytes], object]) -> None:
        """Unpack one entry into `take`; refuse it unless it is exactly what the directory says."""
        size_bytes = crc32 = 0
        for piece, used_bytes in (_inflated if entry.is_deflated else _stored)(self._source, entry):
            size_bytes += len(piece)
            self._check_limits(entry.name, size_bytes, used_bytes)
            if size_bytes > entry.size_bytes:
                break
            crc32 = zlib.crc32(piece, crc32)
            take(piece)
        if size_bytes != entry.size_bytes:
            more = " or more" if size_bytes > entry.size_bytes else ""
            raise InvalidInput(
                f"archive entry {entry.name!r} unpacks to {size_bytes} bytes{more}; its header says {entry.size_bytes}"
            )
        if crc32 != entry.crc32:
            raise InvalidInput(f"archive entry {entry.name!r} has the CRC {crc32:08x}; its header says {entry.crc32:08x}")
        self._total_bytes += size_bytes
        self._total_packed_bytes += entry.packed_bytes

    def _check_limits(self, name: str, entry_bytes: int, entry_packed_bytes: int) -> None:
        """Check the sums of the entry so far, before its newest piece is passed on."""
        limits = self._limits
        total_bytes = self._total_bytes + entry_bytes
        total_packed_bytes = self._total_packed_bytes + entry_packed_bytes
        if entry_bytes > limits.max_entry_bytes:
            raise TooLarge(f"archive entry {name!r} has more than max_entry_bytes = {limits.max_entry_bytes}")
        if total_bytes > limits.max_total_bytes:
            raise TooLarge(f"archive entry {name!r} passes max_total_bytes = {limits.max_total_bytes} of the archive")
        for size_bytes, packed_bytes in ((entry_bytes, entry_packed_bytes), (total_bytes, total_packed_bytes)):
            if size_bytes > limits.ratio_free_bytes and size_bytes > limits.max_ratio * packed_bytes:
                raise TooLarge(
                    f"archive entry {name!r}: {packed_bytes} bytes unpack to {size_bytes} or more, "
                    f"past max_ratio = {limits.max_ratio:g}"
                )


def _stored(source: BinaryIO, entry: ZipEntry) -> Iterator[tuple[bytes, int]]:
    """Yield (piece, packed bytes used so far), a piece being at most PIECE_BYTES."""
    source.seek(entry.data_start)
    used_bytes = 0
    while used_bytes < entry.packed_bytes:
        piece = source.read(min(PIECE_BYTES, entry.packed_bytes - used_bytes))
        if not piece:
            raise InvalidInput(f"archive entry {entry.name!r} is cut off at byte {used_bytes} of {entry.packed_bytes}")
        used_bytes += len(piece)
        yield piece, used_bytes


def _inflated(source: BinaryIO, entry: ZipEntry) -> Iterator[tuple[bytes, int]]:
    """Yield (piece, packed bytes used so far) of a deflated entry; no piece is larger than PIECE_BYTES."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    pieces = _stored(source, entry)
    packed, used_bytes = b"", 0
    while not inflater.eof:
        if not packed:
            packed, used_bytes = next(pieces, (b"", used_bytes))
        try:
            piece = inflater.decompress(packed, PIECE_BYTES)
        except zlib.error as error:
            raise InvalidInput(f"archive entry {entry.name!r} cannot be unpacked: {error}") from error
        if not (piece or packed or inflater.eof):
            raise InvalidInput(f"archive entry {entry.name!r} ends in the middle of its contents")
        packed = inflater.unconsumed_tail
        yield piece, used_bytes
    if inflater.unused_data or used_bytes < entry.packed_bytes:
        raise InvalidInput(f"archive entry {entry.name!r} has bytes behind the end of its contents")
