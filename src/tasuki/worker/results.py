"""A command's result: always a ZIP with stdout.log, stderr.log, result.json and the files that the job left in out/.

Runs in a thread, after the last process of the attempt is gone. What goes into it of out/ is the business of `outputs.py`;
result.json is written last, because it tells what was found there.
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from io import BufferedWriter
from pathlib import Path

import msgspec

from tasuki.blobs.files import disk_full_as_error
from tasuki.blobs.zip.writer import ZipMember, write_zip
from tasuki.core.job import RESULT_INLINE_MAX_BYTES, BlobRef, Outcome, body_hash
from tasuki.worker.attempt import MESSAGE_MAX_CHARS, Attempt, RunResult
from tasuki.worker.folder import RunFolder
from tasuki.worker.logs import CappedLog, KeptLog
from tasuki.worker.outputs import OutputCollector, OutputRules, log_members
from tasuki.worker.redaction import NOTHING_SECRET, Redactor

REPORT = "result.json"
HOST = socket.gethostname()
QUICK_MAX_BYTES = 16 * 1024
SMALL_MAX_BYTES = 64 * 1024


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
    outcome = msgspec.structs.replace(outcome, result_sha256=archive.sha256, meta=meta)
    if archive.path is None:
        return RunResult(msgspec.structs.replace(outcome, result=archive.inline))
    return RunResult(msgspec.structs.replace(outcome, result_ref=BlobRef(archive.sha256, archive.size_bytes)), archive.path)


def _with_outputs(outcome: Outcome, collector: OutputCollector) -> Outcome:
    """A success without a required output is none. It may be tried again: that costs retries, which the job limits itself."""
    missing = collector.missing()
    if outcome.error_code is not None or not missing:
        return outcome
    message = f"the program succeeded, but left no output {missing}, which its exec requires"
    return msgspec.structs.replace(outcome, error_code="OUTPUT_MISSING", message=message[:MESSAGE_MAX_CHARS])


def is_quick(folder: RunFolder, logs: tuple[CappedLog, CappedLog]) -> bool:
    """Whether the archive is so small that a thread for it would cost more than the archive."""
    try:
        empty = not os.listdir(f"{folder.name}/out")  # noqa: PTH208  # Path costs more than the call
        return empty and sum(log.size_bytes() for log in logs) <= QUICK_MAX_BYTES
    except OSError:  # the job has done something to its folder
        return False


def _write(
    folder: RunFolder, texts: Sequence[tuple[str, bytes]], collector: OutputCollector, report: Callable[[], bytes]
) -> _Archive:
    """Logs, outputs, and then the report on what was found."""
    archive = _Archive(folder.name)
    try:
        with closing(collector.members()) as outputs:
            first = next(outputs, None)
            small = [*texts, (REPORT, report())] if first is None else []
            if small and sum(len(text) for _, text in small) <= SMALL_MAX_BYTES:
                archive.write(small_zip(small))
            else:
                write_zip(archive, _members(texts, first, outputs, report))
        archive.close()
    except BaseException:
        archive.discard()
        raise
    return archive


def _members(
    texts: Sequence[tuple[str, bytes]], first: ZipMember | None, outputs: Iterator[ZipMember], report: Callable[[], bytes]
) -> Iterator[ZipMember]:
    yield from log_members(texts)
    if first is not None:
        yield first
        yield from outputs
    yield ZipMember(REPORT, report())


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
        # A follower goes on in the archive by offsets in the stream that the job wrote.
        "cut_logs": {
            name: {"head_bytes": len(log.head), "cut_bytes": log.cut_bytes, "tail_bytes": len(log.tail)}
            for name, log in kept.items()
            if log.cut_bytes
        },
        "outputs": collector.outputs,
        "left_out": collector.left_out,
        "left_out_count": collector.left_out_count,
    }
    if attempt.facts:
        report |= {**attempt.facts, "ended_at": times.finished_at}
    return msgspec.json.format(msgspec.json.encode(report)) + b"\n"


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
        packed = _deflated(data)
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


def _deflated(data: bytes) -> bytes:
    """Raw deflate with a window that fits: zlib's usual quarter of a megabyte takes ten times as long to set up as to use."""
    if not data:
        return data
    window_bits, memory_level = (12, 5) if len(data) <= 4096 else (zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL)
    packer = zlib.compressobj(zlib.Z_DEFAULT_COMPRESSION, zlib.DEFLATED, -window_bits, memory_level)
    return packer.compress(data) + packer.flush()


class _Archive:
    """Takes the archive's bytes, hashes them, and keeps them in memory as long as they fit into the finish itself."""

    def __init__(self, folder: str) -> None:
        self.path: Path | None = None
        self.size_bytes = 0
        self._file: BufferedWriter | None = None
        self._small = bytearray()
        self._digest = hashlib.sha256()
        self.name = folder  # an error about a full disk calls it so

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
