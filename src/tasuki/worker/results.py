"""A command's result: always a ZIP with stdout.log, stderr.log, result.json and the files that the job left in out/.

Runs in a thread, after the last process of the attempt is gone. Everything below out/ was made by the job and is believed
in nothing: only regular files are taken, no link is followed, and what is left out is named in result.json with its reason.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from io import BufferedWriter
from pathlib import Path
from typing import Any

import msgspec

from tasuki.blobs.disk import disk_full_as_error
from tasuki.blobs.zipnames import NameBook
from tasuki.blobs.zips import FileUnder, ZipMember, write_zip
from tasuki.core.job import RESULT_INLINE_MAX_BYTES, BlobRef, Outcome, body_hash
from tasuki.errors import InvalidInput
from tasuki.worker.attempt import Attempt, RunResult
from tasuki.worker.folder import RunFolder
from tasuki.worker.logs import CappedLog

SKIPPED_LISTED_MAX = 1000
QUICK_MAX_BYTES = 16 * 1024
SMALL_MAX_BYTES = 64 * 1024


class OutputLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much of out/ goes into a result. The defaults are what a reader of archives accepts."""

    max_files: int = 9_000
    max_file_bytes: int = 1024 * 1024 * 1024
    max_total_bytes: int = 2 * 1024 * 1024 * 1024


class Output(msgspec.Struct, frozen=True):
    name: str
    size_bytes: int


class Skipped(msgspec.Struct, frozen=True):
    name: str
    reason: str


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
    globs: Sequence[str],
    times: Times,
    limits: OutputLimits,
) -> RunResult:
    """Write the archive and complete the outcome with it: inline up to RESULT_INLINE_MAX_BYTES, else as a file."""
    outputs, skipped = collect_outputs(folder.outputs, globs, limits)
    stdout, stderr = (log.contents() for log in logs)
    cut = {name: log.cut_bytes for name, log in zip(("stdout", "stderr"), logs, strict=True) if log.cut_bytes}
    report = _report(attempt, outcome, times, cut)
    texts = [ZipMember("stdout.log", stdout), ZipMember("stderr.log", stderr)]
    try:
        archive = _write(folder, [_json_member(report, outputs, skipped), *texts, *_members(folder, outputs)])
    except InvalidInput as error:
        # Something still changes out/ (a process that left the group). The rest of the result is kept all the same.
        skipped = [*skipped, *(Skipped(output.name, f"not readable at the end: {error.message}") for output in outputs)]
        archive = _write(folder, [_json_member(report, [], skipped), *texts])
    meta = {**outcome.meta, "duration_s": round(times.duration_s, 6)}
    if cut:
        meta["cut_bytes"] = cut
    if skipped:
        meta["skipped"] = len(skipped)
    outcome = msgspec.structs.replace(outcome, result_sha256=archive.sha256, meta=meta)
    if archive.path is None:
        return RunResult(msgspec.structs.replace(outcome, result=archive.inline))
    return RunResult(msgspec.structs.replace(outcome, result_ref=BlobRef(archive.sha256, archive.size_bytes)), archive.path)


def is_quick(folder: RunFolder, logs: tuple[CappedLog, CappedLog]) -> bool:
    """Whether the archive is so small that a thread for it would cost more than the archive."""
    try:
        return not any(folder.outputs.iterdir()) and sum(log.size_bytes() for log in logs) <= QUICK_MAX_BYTES
    except OSError:  # the job has done something to its folder
        return False


def _write(folder: RunFolder, members: Sequence[ZipMember]) -> _Archive:
    archive = _Archive(folder.path)
    try:
        texts = [(member.name, member.content) for member in members if isinstance(member.content, bytes)]
        if len(texts) == len(members) and sum(len(text) for _, text in texts) <= SMALL_MAX_BYTES:
            archive.write(small_zip(texts))
        else:
            write_zip(archive, members)
        archive.close()
    except BaseException:
        archive.discard()
        raise
    return archive


def _report(attempt: Attempt, outcome: Outcome, times: Times, cut: dict[str, int]) -> dict[str, Any]:
    return {
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
        "host": socket.gethostname(),
        "cut_bytes": cut,
    }


def _json_member(report: dict[str, Any], outputs: Sequence[Output], skipped: Sequence[Skipped]) -> ZipMember:
    listed = {**report, "outputs": outputs, "skipped": skipped[:SKIPPED_LISTED_MAX], "skipped_count": len(skipped)}
    return ZipMember("result.json", msgspec.json.format(msgspec.json.encode(listed)) + b"\n")


def _members(folder: RunFolder, outputs: Sequence[Output]) -> list[ZipMember]:
    return [ZipMember(output.name, FileUnder(folder.path, output.name)) for output in outputs]


# ---------------------------------------------------------------------------------------------------- what out/ holds


def collect_outputs(out: Path, globs: Sequence[str], limits: OutputLimits) -> tuple[list[Output], list[Skipped]]:
    """What goes into the archive (named `out/…`), and what does not, with the reason."""
    wanted = [_glob_pattern(glob) for glob in globs]
    outputs: list[Output] = []
    skipped: list[Skipped] = []
    names = NameBook()
    total_bytes = 0
    for name, problem, size_bytes in _walk(out, "out"):
        if not any(pattern.fullmatch(name) for pattern in wanted):
            continue
        reason = problem or _refused_name(names, name)
        if not reason and size_bytes > limits.max_file_bytes:
            reason = f"has {size_bytes} bytes, the limit for one file is {limits.max_file_bytes}"
        if not reason and total_bytes + size_bytes > limits.max_total_bytes:
            reason = f"would pass the limit of {limits.max_total_bytes} bytes for all outputs"
        if not reason and len(outputs) >= limits.max_files:
            reason = f"there are more than {limits.max_files} files"
        if reason:
            skipped.append(Skipped(_printable(name), reason))
        else:
            outputs.append(Output(name, size_bytes))
            total_bytes += size_bytes
    return outputs, skipped


def _walk(folder: Path, name: str) -> Iterator[tuple[str, str, int]]:
    """Everything below the folder that is no folder, in the order of names: (name, why it cannot be taken, size)."""
    pending = [(folder, name)]
    while pending:
        folder, prefix = pending.pop()
        if folder.is_symlink():  # out/ itself, replaced by the job; links below it are not followed by the scan
            yield prefix, "is a link", 0
            continue
        try:
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError as error:
            yield prefix, f"cannot be listed: {error.strerror}", 0
            continue
        for entry in entries:
            below = f"{prefix}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                pending.append((Path(entry.path), below))
            else:
                yield below, *_look_at(entry)


def _look_at(entry: os.DirEntry[str]) -> tuple[str, int]:
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return "vanished", 0
    if stat.S_ISLNK(status.st_mode):
        return "is a link", 0
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file", 0
    if not os.access(entry.path, os.R_OK):
        return "is not readable", 0
    return "", status.st_size


def _refused_name(names: NameBook, name: str) -> str:
    try:
        names.add(name, is_folder=False)
    except InvalidInput as error:
        return _printable(error.message)
    return ""


def _printable(name: str) -> str:
    """File names are bytes; those that are no text would make result.json unwritable."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _glob_pattern(glob: str) -> re.Pattern[str]:
    """`**` stands for any number of folders (at the end: everything below), `*` and `?` for text inside one name."""
    pattern = ""
    *folders, last = glob.split("/")
    for part in folders:
        pattern += "(?:[^/]+/)*" if part == "**" else _part_pattern(part) + "/"
    return re.compile(pattern + (".+" if last == "**" else _part_pattern(last)), re.DOTALL)


def _part_pattern(part: str) -> str:
    wild = {"*": "[^/]*", "?": "[^/]"}
    return "".join(wild.get(character) or re.escape(character) for character in part)


# ---------------------------------------------------------------------------------------------------- where it goes

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_ZIP_VERSION, _UNIX, _DAY_ONE = 20, 3, 0x21  # 1980-01-01, as `write_zip` has it
_REGULAR_FILE = (stat.S_IFREG | 0o644) << 16


def small_zip(members: Sequence[tuple[str, bytes]]) -> bytes:
    """An archive of a few texts whose names are ours. A sixth of what `zipfile` takes, and most results are like this."""
    body, directory = bytearray(), bytearray()
    for name, data in members:
        packed = zlib.compress(data, wbits=-zlib.MAX_WBITS)
        method = zipfile.ZIP_DEFLATED
        if len(packed) >= len(data):
            packed, method = data, zipfile.ZIP_STORED
        facts = (0, method, 0, _DAY_ONE, zlib.crc32(data), len(packed), len(data), len(name), 0)
        at = len(body)
        body += _LOCAL.pack(b"PK\3\4", _ZIP_VERSION, *facts) + name.encode("ascii") + packed
        made = _ZIP_VERSION | _UNIX << 8
        directory += _CENTRAL.pack(b"PK\1\2", made, _ZIP_VERSION, *facts, 0, 0, 0, _REGULAR_FILE, at) + name.encode("ascii")
    end = _END.pack(b"PK\5\6", 0, 0, len(members), len(members), len(directory), len(body), 0)
    return bytes(body + directory + end)


class _Archive:
    """Takes the archive's bytes, hashes them, and keeps them in memory as long as they fit into the finish itself."""

    def __init__(self, folder: Path) -> None:
        self.path: Path | None = None
        self.size_bytes = 0
        self._folder = folder
        self._file: BufferedWriter | None = None
        self._small = bytearray()
        self._digest = hashlib.sha256()
        self.name = str(folder)  # what an error about a full disk calls it

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
        self._folder.mkdir(exist_ok=True)  # a job may have removed its own folder
        descriptor, path = tempfile.mkstemp(prefix="result-", suffix=".zip", dir=self._folder)
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
