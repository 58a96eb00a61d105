"""The files that a job left in out/: which of them go into its result, and why the others do not.

Everything below out/ was made by the job and is believed in nothing. It is walked once, folder by folder, through descriptors:
only regular files are taken, no link is followed even if one is put there meanwhile, and nothing is opened that could block.
Files are read while the archive is written, so nothing stands in memory and no file is opened twice.

    outputs     exactly what the archive holds below out/, with the size and sha256 of what was read
    left_out    what is there and not in the archive as it is, with the reason. A file that changed or ended while it was read
                stands in both.

None of that fails a job, unless its exec says that some output is required. Blocks on I/O: call it in a thread.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
import stat
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from tasuki.blobs.zip.names import NAME_MAX_BYTES, NAME_MAX_DEPTH, NameBook
from tasuki.blobs.zip.writer import Pieces, ZipMember
from tasuki.errors import InvalidInput

DEFAULT_OUTPUTS = ("out/**",)
MAX_FILES = 9_000
MAX_FILE_BYTES = 1024 * 1024 * 1024
MAX_TOTAL_BYTES = 2 * 1024 * 1024 * 1024
NAMES_MAX_BYTES = 3 * 1024 * 1024  # a reader takes 4 MiB for the list of names and its other columns
LOOKED_AT_MAX = 100_000  # entries of all folders; their names stand in memory, folder by folder
LEFT_OUT_LISTED_MAX = 1_000
READ_BYTES = 256 * 1024
# A reader takes an archive that unpacks to more than 200 times its size for a bomb, once it has passed 40 MiB. So only the first
# bytes are packed however well that goes; after them a file that would shrink to less than a fortieth is stored as it is.
PACKED_FREE_BYTES = 16 * 1024 * 1024
STORED_RATIO = 40
WORTH_PACKING = 0.97  # a file that stays larger than this is stored as it is; small ones are packed in any case
LOGS_PACKED_FREE_BYTES = 33 * 1024 * 1024  # of both logs: those of the usual caps are always packed
_SAMPLES, _SAMPLE_BYTES = 16, 16 * 1024
_ENTRY_BYTES = 46  # of the archive's directory, besides the name

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# NONBLOCK: a FIFO put in the file's place after we looked must not make us wait for a writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class OutputLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much of out/ goes into a result. The defaults are also the most: what a reader of archives accepts."""

    max_files: int = MAX_FILES
    max_file_bytes: int = MAX_FILE_BYTES
    max_total_bytes: int = MAX_TOTAL_BYTES


DEFAULT_LIMITS = OutputLimits()


class OutputRules(msgspec.Struct, frozen=True, kw_only=True):
    """Which outputs an exec wants."""

    globs: tuple[str, ...] = DEFAULT_OUTPUTS
    required: tuple[str, ...] = ()
    """Each must match an output that could be taken whole; collected like those above."""
    limits: OutputLimits = DEFAULT_LIMITS


class OutputFile(msgspec.Struct, frozen=True):
    name: str
    size_bytes: int
    sha256: str


class LeftOut(msgspec.Struct, frozen=True):
    name: str
    reason: str


class OutputCollector:
    """One walk through one out/ folder. Use up `members`; then the rest tells what was taken."""

    def __init__(self, out: Path | str, rules: OutputRules, beside_bytes: int = 0) -> None:
        """`beside_bytes` is what the archive holds besides."""
        self.outputs: list[OutputFile] = []
        self.left_out: list[LeftOut] = []
        """The first of them; `left_out_count` counts all."""
        self.left_out_count = 0
        self._out = out
        self._limits = rules.limits
        self._wanted = [glob_pattern(glob) for glob in (*rules.globs, *rules.required)]
        self._required = {glob: glob_pattern(glob) for glob in rules.required}
        self._unmet = dict(self._required)
        self._why_unmet: dict[str, LeftOut] = {}
        self._names = NameBook()
        self._names_bytes = self._total_bytes = 0
        self._packed_free_bytes = PACKED_FREE_BYTES - beside_bytes
        self._looks_left = LOOKED_AT_MAX

    def missing(self) -> str:
        """Which required outputs are not there, in words, or nothing."""
        told = []
        for glob in self._unmet:
            found = self._why_unmet.get(glob)
            told.append(f"{glob!r}" + (f" ({found.name!r}: {found.reason})" if found else ""))
        return ", ".join(told)

    def members(self) -> Generator[ZipMember, None, None]:
        """What goes into the archive, in the order of names; each is to be written before the next is asked for."""
        for name, folder, last in self._walk(None, str(self._out), "out", 1):
            if any(pattern.fullmatch(name) for pattern in self._wanted):
                yield from self._member(name, folder, last)

    # ------------------------------------------------------------------------------------------------ one file

    def _member(self, name: str, folder: int, last: str) -> Iterator[ZipMember]:
        try:
            # Looked at before it is opened: opening a device can do something.
            reason = self._refused(name, os.stat(last, dir_fd=folder, follow_symlinks=False))
            descriptor = os.open(last, _FILE, dir_fd=folder) if not reason else -1
        except OSError as error:
            reason, descriptor = _words(error), -1
        if descriptor < 0:
            self._leave_out(name, reason)
            return
        try:
            yield from self._opened(name, descriptor)
        finally:
            os.close(descriptor)

    def _opened(self, name: str, descriptor: int) -> Iterator[ZipMember]:
        found = os.fstat(descriptor)
        if reason := self._refused(name, found) or _refused_name(self._names, name):
            self._leave_out(name, reason)
            return
        reading = _Reading(descriptor, found)
        yield ZipMember(name, Pieces(found.st_size, reading.pieces(), stored=self._is_stored(descriptor, found.st_size)))
        self.outputs.append(OutputFile(name, reading.size_bytes, reading.digest.hexdigest()))
        self._total_bytes += reading.size_bytes
        self._names_bytes += _ENTRY_BYTES + len(name.encode())
        if reading.problem:
            self._leave_out(name, reading.problem)
        else:
            self._unmet = {glob: pattern for glob, pattern in self._unmet.items() if not pattern.fullmatch(name)}

    def _refused(self, name: str, found: os.stat_result) -> str:
        limits, size_bytes = self._limits, found.st_size
        if stat.S_ISLNK(found.st_mode):
            return "is a link"
        if not stat.S_ISREG(found.st_mode):
            return "is not a regular file"
        if _CONTROL.search(name):
            return "has a control character in its name"
        if size_bytes > limits.max_file_bytes:
            return f"has {size_bytes} bytes, the limit for one file is {limits.max_file_bytes}"
        if self._total_bytes + size_bytes > limits.max_total_bytes:
            return f"would pass the limit of {limits.max_total_bytes} bytes for all outputs"
        if len(self.outputs) >= limits.max_files:
            return f"there are more than {limits.max_files} files"
        if self._names_bytes > NAMES_MAX_BYTES:
            return f"the names of all outputs pass {NAMES_MAX_BYTES} bytes"
        return ""

    def _is_stored(self, descriptor: int, size_bytes: int) -> bool:
        """Whether it packs so well that a reader would take the archive for a bomb, or so badly that it is not worth the time."""
        self._packed_free_bytes -= size_bytes
        if self._packed_free_bytes >= 0:
            return False
        try:
            samples = _samples(descriptor, size_bytes)
            return _packs_well(samples) or _packs_badly(samples)
        except OSError:  # the reading that follows says so
            return False

    def _leave_out(self, name: str, reason: str) -> None:
        left_out = LeftOut(_printable(name)[:NAME_MAX_BYTES], _printable(reason))
        self.left_out_count += 1
        if len(self.left_out) < LEFT_OUT_LISTED_MAX:
            self.left_out.append(left_out)
        for glob, pattern in self._unmet.items():
            if pattern.fullmatch(name):
                self._why_unmet.setdefault(glob, left_out)

    # ------------------------------------------------------------------------------------------------ the folders

    def _walk(self, parent: int | None, path: str, name: str, depth: int) -> Iterator[tuple[str, int, str]]:
        """Everything below a folder that is no folder itself: its name, its folder's descriptor, its name in there."""
        try:
            folder = os.open(path, _FOLDER, dir_fd=parent)
        except OSError as error:
            self._leave_out(name, "is a link" if _is_link(path, parent) else f"cannot be listed: {_words(error)}")
            return
        try:
            for last in self._listed(folder, name):
                below = f"{name}/{last}"
                if not _is_folder(last, folder):
                    yield below, folder, last
                elif depth + 1 < NAME_MAX_DEPTH:
                    yield from self._walk(folder, last, below, depth + 1)
                else:
                    self._leave_out(below, f"is a folder {depth + 1} levels deep (limit {NAME_MAX_DEPTH - 1})")
        finally:
            os.close(folder)

    def _listed(self, folder: int, name: str) -> Sequence[str]:
        try:
            with os.scandir(folder) as found:
                names = [entry.name for entry in itertools.islice(found, self._looks_left + 1)]
        except OSError as error:
            self._leave_out(name, f"cannot be listed: {_words(error)}")
            return ()
        if len(names) > self._looks_left:
            self._leave_out(name, f"has more in it than the {LOOKED_AT_MAX} files and folders that are looked at")
            del names[self._looks_left :]
        self._looks_left -= len(names)
        return sorted(names)


class _Reading:
    """Reads an open file up to the size it had, and notes what it gave and what was wrong with it."""

    def __init__(self, descriptor: int, found: os.stat_result) -> None:
        self._descriptor = descriptor
        self._found = found
        self.size_bytes = 0
        self.digest = hashlib.sha256()
        self.problem = ""

    def pieces(self) -> Iterator[bytes]:
        while left_bytes := self._found.st_size - self.size_bytes:
            try:
                piece = os.read(self._descriptor, min(READ_BYTES, left_bytes))
            except OSError as error:
                self.problem = f"could be read only up to byte {self.size_bytes}: {_words(error)}"
                return
            if not piece:
                self.problem = f"became shorter while it was read: {self.size_bytes} of {self._found.st_size} bytes are here"
                return
            self.digest.update(piece)
            self.size_bytes += len(piece)
            yield piece
        now = os.fstat(self._descriptor)
        if (now.st_size, now.st_mtime_ns) != (self._found.st_size, self._found.st_mtime_ns):
            self.problem = "changed while it was read"


def _is_link(path: str, parent: int | None) -> bool:
    try:
        return stat.S_ISLNK(os.stat(path, dir_fd=parent, follow_symlinks=False).st_mode)
    except OSError:  # it is gone
        return False


def _is_folder(last: str, folder: int) -> bool:
    try:
        return stat.S_ISDIR(os.stat(last, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:  # whoever opens it will say why
        return False


def log_members(texts: Iterable[tuple[str, bytes]]) -> Iterator[ZipMember]:
    """The logs of a result, by name. What packs too well for a reader is stored as it is, like an output."""
    free_bytes = LOGS_PACKED_FREE_BYTES
    for name, text in texts:
        free_bytes -= len(text)
        if free_bytes < 0 and _packs_well([text[at : at + _SAMPLE_BYTES] for at in _sampled(len(text))]):
            yield ZipMember(name, Pieces(len(text), (text,), stored=True))
        else:
            yield ZipMember(name, text)


def _samples(descriptor: int, size_bytes: int) -> list[bytes]:
    return [os.pread(descriptor, _SAMPLE_BYTES, at) for at in _sampled(size_bytes)]


def _sampled(size_bytes: int) -> list[int]:
    return [size_bytes * number // _SAMPLES for number in range(_SAMPLES)]


def _packs_well(samples: Sequence[bytes]) -> bool:
    return sum(map(len, samples)) > STORED_RATIO * _packed_bytes(samples)


def _packs_badly(samples: Sequence[bytes]) -> bool:
    """A gigabyte that is packed already would take half a minute of a core, for nothing."""
    return _packed_bytes(samples) > WORTH_PACKING * sum(map(len, samples))


def _packed_bytes(samples: Sequence[bytes]) -> int:
    return sum(len(zlib.compress(sample, 1)) for sample in samples)


def _words(error: OSError) -> str:
    return "vanished" if isinstance(error, FileNotFoundError) else error.strerror or str(error)


def _refused_name(names: NameBook, name: str) -> str:
    try:
        names.add(name, is_folder=False)
    except InvalidInput as error:
        return error.message
    return ""


def _printable(name: str) -> str:
    """File names are bytes; those that are no text would make result.json unwritable."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


@functools.lru_cache(maxsize=256)
def glob_pattern(glob: str) -> re.Pattern[str]:
    """`**` stands for any number of folders (at the end: everything below), `*` and `?` for text inside one name."""
    pattern = ""
    *folders, last = glob.split("/")
    for part in folders:
        pattern += "(?:[^/]+/)*" if part == "**" else _part_pattern(part) + "/"
    return re.compile(pattern + (".+" if last == "**" else _part_pattern(last)), re.DOTALL)


def _part_pattern(part: str) -> str:
    wild = {"*": "[^/]*", "?": "[^/]"}
    return "".join(wild.get(character) or re.escape(character) for character in part)
