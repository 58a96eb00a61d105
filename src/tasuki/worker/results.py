"""A command's result: always a ZIP with stdout.log, stderr.log, the files that the job left in out/, and result.json.

Blocks on I/O: runs in a thread, after the last process of the attempt is gone. result.json is written last, because it lists the
outputs. Everything below out/ was made by the job and is not trusted. It is walked once, folder by folder, through descriptors:
only regular files are taken, no link is followed even if one is put there meanwhile, and nothing is opened that could block.
Files are read while the archive is written, so none is held in memory and none is opened twice.

    outputs     exactly the files in the archive below out/, with the size and sha256 of the bytes that were read
    left_out    files that are not in the archive as they are, with the reason. A file that changed or ended while it was read
                is in both lists.

A file that is left out fails the job only if its exec requires it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
import socket
import stat
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from io import BufferedWriter
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tasuki.blobs.files import disk_full_as_error
from tasuki.blobs.zip.reader import NAME_MAX_BYTES, NAME_MAX_DEPTH, ArchiveNames
from tasuki.blobs.zip.writer import Pieces, ZipMember, small_zip, write_zip
from tasuki.core.job import CONTROL_CHARACTERS, RESULT_INLINE_MAX_BYTES, BlobRef, Outcome, body_hash
from tasuki.errors import InvalidInput
from tasuki.worker.attempt import MESSAGE_MAX_CHARS, Attempt, RunResult
from tasuki.worker.folder import RunFolder
from tasuki.worker.logs import CappedLog, KeptLog
from tasuki.worker.redaction import NOTHING_SECRET, Redactor

REPORT = "result.json"
HOST = socket.gethostname()
QUICK_MAX_BYTES = 16 * 1024
SMALL_MAX_BYTES = 64 * 1024
DEFAULT_OUTPUTS = ("out/**",)
MAX_FILES = 9_000
MAX_FILE_BYTES = 1024 * 1024 * 1024
MAX_TOTAL_BYTES = 2 * 1024 * 1024 * 1024
NAMES_MAX_BYTES = 3 * 1024 * 1024  # a reader takes 4 MiB for the list of names and its other columns
LOOKED_AT_MAX = 100_000  # entries of all folders; their names are in memory, folder by folder
LEFT_OUT_LISTED_MAX = 1_000
READ_BYTES = 256 * 1024
# A reader refuses an archive that unpacks to more than 200 times its size once it has passed 40 MiB (a ZIP bomb). So only the
# first bytes are packed at any ratio; after them a file that would shrink to less than a fortieth is stored as it is.
PACKED_FREE_BYTES = 16 * 1024 * 1024
STORED_SHARE = 1 / 40
# A file that stays larger than this is stored as it is: a gigabyte of packed data would take half a minute of a core.
WORTH_PACKING = 0.97
LOGS_PACKED_FREE_BYTES = 33 * 1024 * 1024  # of both logs: those of the usual caps are always packed
_SAMPLES, _SAMPLE_BYTES = 16, 16 * 1024
_ENTRY_BYTES = 46  # of the archive's directory, besides the name

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# NONBLOCK: a FIFO put in the file's place after the check must not block until a writer comes.
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class OutputRules(msgspec.Struct, frozen=True, kw_only=True):
    """The outputs that an exec collects. `extract_zip` refuses archives that are larger than the default limits allow."""

    globs: tuple[str, ...] = DEFAULT_OUTPUTS
    required: tuple[str, ...] = ()
    """Each must match an output that could be read whole; collected like `globs`."""
    max_files: int = MAX_FILES
    max_file_bytes: int = MAX_FILE_BYTES
    max_total_bytes: int = MAX_TOTAL_BYTES


class OutputFile(msgspec.Struct, frozen=True):
    name: str
    size_bytes: int
    sha256: str


class LeftOut(msgspec.Struct, frozen=True):
    name: str
    reason: str


class OutputCollector:
    """One walk through one out/ folder. Exhaust `members`; then the other fields are complete."""

    def __init__(self, out: Path | str, rules: OutputRules, beside_bytes: int = 0) -> None:
        """`beside_bytes` is the size of the archive's other members."""
        self.outputs: list[OutputFile] = []
        self.left_out: list[LeftOut] = []  # the first LEFT_OUT_LISTED_MAX; `left_out_count` counts all
        self.left_out_count = 0
        self._out = out
        self._rules = rules
        self._wanted = [glob_pattern(glob) for glob in (*rules.globs, *rules.required)]
        self._unmet = {glob: glob_pattern(glob) for glob in rules.required}
        self._why_unmet: dict[str, LeftOut] = {}
        self._names = ArchiveNames()
        self._names_bytes = self._total_bytes = 0
        self._packed_free_bytes = PACKED_FREE_BYTES - beside_bytes
        self._looks_left = LOOKED_AT_MAX

    def missing(self) -> str:
        """Return the required outputs that are missing, in words, or ""."""
        reasons = {glob: f" ({found.name!r}: {found.reason})" for glob, found in self._why_unmet.items()}
        return ", ".join(f"{glob!r}{reasons.get(glob, '')}" for glob in self._unmet)

    def members(self) -> Generator[ZipMember, None, None]:
        """Yield the archive's members in the order of names; each is to be written before the next is requested."""
        for name, folder, last in self._walk(None, str(self._out), "out", 1):
            if any(pattern.fullmatch(name) for pattern in self._wanted):
                yield from self._member(name, folder, last)

    # ------------------------------------------------------------------------------------------------ one file

    def _member(self, name: str, folder: int, last: str) -> Iterator[ZipMember]:
        try:
            # Checked before it is opened: opening a device can have an effect.
            reason = self._refused(name, os.stat(last, dir_fd=folder, follow_symlinks=False))
            descriptor = os.open(last, _OPEN_FILE, dir_fd=folder) if not reason else -1
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
        reason = self._refused(name, found)
        if not reason:
            try:
                self._names.add(name, is_folder=False)
            except InvalidInput as error:
                reason = error.message
        if reason:
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
        rules, size_bytes = self._rules, found.st_size
        if stat.S_ISLNK(found.st_mode):
            return "is a link"
        if not stat.S_ISREG(found.st_mode):
            return "is not a regular file"
        if CONTROL_CHARACTERS.search(name):
            return "has a control character in its name"
        if size_bytes > rules.max_file_bytes:
            return f"has {size_bytes} bytes, the limit for one file is {rules.max_file_bytes}"
        if self._total_bytes + size_bytes > rules.max_total_bytes:
            return f"would pass the limit of {rules.max_total_bytes} bytes for all outputs"
        if len(self.outputs) >= rules.max_files:
            return f"there are more than {rules.max_files} files"
        if self._names_bytes > NAMES_MAX_BYTES:
            return f"the names of all outputs pass {NAMES_MAX_BYTES} bytes"
        return ""

    def _is_stored(self, descriptor: int, size_bytes: int) -> bool:
        """Return whether a file packs so well that a reader would refuse the archive, or too badly to be worth the time."""
        self._packed_free_bytes -= size_bytes
        if self._packed_free_bytes >= 0:
            return False
        try:
            share = _packed_share([os.pread(descriptor, _SAMPLE_BYTES, at) for at in _sample_offsets(size_bytes)])
        except OSError:  # reported when the file is read
            return False
        return share < STORED_SHARE or share > WORTH_PACKING

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
        """Yield every entry below a folder that is not a folder: full name, descriptor of its folder, name in it."""
        try:
            folder = os.open(path, _OPEN_FOLDER, dir_fd=parent)
        except OSError as error:
            is_link = _has_type(stat.S_ISLNK, path, parent)
            self._leave_out(name, "is a link" if is_link else f"cannot be listed: {_words(error)}")
            return
        try:
            for last in self._listed(folder, name):
                below = f"{name}/{last}"
                if not _has_type(stat.S_ISDIR, last, folder):
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
            self._leave_out(name, f"has entries beyond the limit of {LOOKED_AT_MAX} files and folders")
            del names[self._looks_left :]
        self._looks_left -= len(names)
        return sorted(names)


class _Reading:
    """Reads an open file up to the size it had; keeps size and hash of the bytes, and the problem if there was one."""

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


def _has_type(check: Callable[[int], bool], name: str, folder: int | None) -> bool:
    try:
        return check(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:  # opening it gives the reason
        return False


def log_members(texts: Iterable[tuple[str, bytes]]) -> Iterator[ZipMember]:
    """Yield the logs of a result. A log that packs too well for a reader is stored as it is, like an output."""
    free_bytes = LOGS_PACKED_FREE_BYTES
    for name, text in texts:
        free_bytes -= len(text)
        samples = [text[at : at + _SAMPLE_BYTES] for at in _sample_offsets(len(text))] if free_bytes < 0 else []
        if samples and _packed_share(samples) < STORED_SHARE:
            yield ZipMember(name, Pieces(len(text), (text,), stored=True))
        else:
            yield ZipMember(name, text)


def _sample_offsets(size_bytes: int) -> list[int]:
    return [size_bytes * number // _SAMPLES for number in range(_SAMPLES)]


def _packed_share(samples: Sequence[bytes]) -> float:
    """Return the size of the samples when packed, as a share of their size."""
    return sum(len(zlib.compress(sample, 1)) for sample in samples) / max(1, sum(map(len, samples)))


def _words(error: OSError) -> str:
    return "vanished" if isinstance(error, FileNotFoundError) else error.strerror or str(error)


def _printable(name: str) -> str:
    """Escape the bytes of a file name that are not text, which result.json could not hold."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


@functools.lru_cache(maxsize=256)
def glob_pattern(glob: str) -> re.Pattern[str]:
    """Compile a glob: `**` matches any number of folders (at the end: everything below), `*` and `?` text inside one name."""
    *folders, last = glob.split("/")
    runs = [""]
    for part in folders:
        runs = [*runs, ""] if part == "**" else [*runs[:-1], f"{runs[-1]}{_part_pattern(part)}/"]
    return re.compile(_joined(runs, "(?:[^/]+/)*") + (".+" if last == "**" else _part_pattern(last)), re.DOTALL)


def _part_pattern(part: str) -> str:
    return _joined([re.escape(text).replace(r"\?", "[^/]") for text in part.split("*")], "[^/]*")


def _joined(texts: Sequence[str], gap: str) -> str:
    """Return a pattern for texts with gaps between them that takes linear time, also for names that a job made for this purpose.

    Each text but the last is looked for at the first place where it fits, and never again (an atomic group): the gap behind it
    can take all that an earlier place leaves over.
    """
    first, *others = texts
    middle = "".join(f"(?>{gap}?{text})" for text in others[:-1] if text)
    return first + middle + (gap + others[-1] if others else "")


class Times(msgspec.Struct, frozen=True):
    """Unix times of one attempt, on the worker's clock."""

    started_at: float
    finished_at: float
    duration_s: float


def build_result(
    attempt: Attempt,
    outcome: Outcome,
    folder: RunFolder,
    logs: tuple[CappedLog, CappedLog],
    rules: OutputRules,
    times: Times,
    redactor: Redactor = NOTHING_SECRET,
) -> RunResult:
    """Write the archive and complete the outcome with it: inline up to RESULT_INLINE_MAX_BYTES, else as a file."""
    kept = {name: redactor.log(log.kept()) for name, log in zip(("stdout", "stderr"), logs, strict=True)}
    texts = [(f"{name}.log", log.text) for name, log in kept.items()]
    collector = OutputCollector(f"{folder.name}/out", rules, sum(len(text) for _, text in texts))

    def report() -> bytes:
        return _report(attempt, redactor.outcome(_with_outputs(outcome, collector)), times, kept, collector)

    archive = _write(folder, texts, collector, report)
    meta = {**outcome.meta, "duration_s": round(times.duration_s, 6)}
    if cut := {name: log.cut_bytes for name, log in kept.items() if log.cut_bytes}:
        meta["cut_bytes"] = cut
    if collector.left_out_count:
        meta["left_out"] = collector.left_out_count
    outcome = redactor.outcome(_with_outputs(outcome, collector))
    outcome = replace(outcome, result_sha256=archive.sha256, meta=meta)
    if archive.path is None:
        return RunResult(replace(outcome, result=archive.inline))
    return RunResult(replace(outcome, result_ref=BlobRef(archive.sha256, archive.size_bytes)), archive.path)


def _with_outputs(outcome: Outcome, collector: OutputCollector) -> Outcome:
    """Return the outcome, OUTPUT_MISSING if it is a success without a required output. The job's retries limit new attempts."""
    missing = collector.missing()
    if outcome.error_code is not None or not missing:
        return outcome
    message = f"the program succeeded, but left no output {missing}, which its exec requires"
    return replace(outcome, error_code="OUTPUT_MISSING", message=message[:MESSAGE_MAX_CHARS])


def is_quick(folder: RunFolder, logs: tuple[CappedLog, CappedLog]) -> bool:
    """Return whether the archive is so small that a thread for it would cost more than the archive."""
    try:
        empty = not os.listdir(f"{folder.name}/out")  # noqa: PTH208  # Path costs more than the call
        return empty and sum(log.size_bytes() for log in logs) <= QUICK_MAX_BYTES
    except OSError:  # the job has changed its folder
        return False


def _write(
    folder: RunFolder, texts: Sequence[tuple[str, bytes]], collector: OutputCollector, report: Callable[[], bytes]
) -> _Archive:
    """Write logs, outputs, and then the report on them."""
    archive = _Archive(folder.name)

    def members() -> Iterator[ZipMember]:
        yield from log_members(texts)
        if first is not None:
            yield first
            yield from outputs
        yield ZipMember(REPORT, report())

    try:
        with closing(collector.members()) as outputs:
            first = next(outputs, None)
            small = [*texts, (REPORT, report())] if first is None else []
            if small and sum(len(text) for _, text in small) <= SMALL_MAX_BYTES:
                archive.write(small_zip(small))
            else:
                write_zip(archive, members())
        archive.close()
    except BaseException:
        archive.discard()
        raise
    return archive


def _report(attempt: Attempt, outcome: Outcome, times: Times, kept: Mapping[str, KeptLog], collector: OutputCollector) -> bytes:
    report = {
        "job_id": attempt.spec.job_id,
        "attempt": attempt.attempt,
        "exec": attempt.spec.exec,
        "input_hash": body_hash(attempt.spec).hex(),
        "exit_code": outcome.exit_code,
        "error_code": outcome.error_code,
        "message": outcome.message,
        "signal": outcome.meta.get("signal"),
        "started_at": times.started_at,
        "finished_at": times.finished_at,
        "duration_s": times.duration_s,
        "host": HOST,
        # A follower continues in the archive by offsets in the stream that the job wrote.
        "cut_logs": {
            name: {"head_bytes": len(log.head), "cut_bytes": log.cut_bytes, "tail_bytes": len(log.tail)}
            for name, log in kept.items()
            if log.cut_bytes
        },
        "outputs": collector.outputs,
        "left_out": collector.left_out,
        "left_out_count": collector.left_out_count,
    }
    report |= attempt.facts
    return msgspec.json.format(msgspec.json.encode(report)) + b"\n"


# ---------------------------------------------------------------------------------------------------- the archive


class _Archive:
    """The archive that is being written: hashed, and in memory as long as it fits into the report itself."""

    def __init__(self, folder: str) -> None:
        self.path: Path | None = None
        self.size_bytes = 0
        self._file: BufferedWriter | None = None
        self._small = bytearray()
        self._digest = hashlib.sha256()
        self.name = folder  # named in the error about a full disk

    @property
    def inline(self) -> bytes:
        return bytes(self._small)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        self._digest.update(data)
        self.size_bytes += len(data)
        if self._file is None and self.size_bytes > RESULT_INLINE_MAX_BYTES:
            self._file = self._open()
            self._file.write(self._small)
        if self._file is not None:
            self._file.write(data)
        else:
            self._small += data
        return len(data)

    def _open(self) -> BufferedWriter:
        Path(self.name).mkdir(exist_ok=True)  # a job may have removed its own folder
        descriptor, path = tempfile.mkstemp(prefix="result-", suffix=".zip", dir=self.name)
        self.path = Path(path)
        return os.fdopen(descriptor, "wb")

    def close(self) -> None:
        if self._file is not None:
            with disk_full_as_error(self.name):
                self._file.close()

    def discard(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self.close()
