"""`tasuki result` and `tasuki logs`: what a job leaves behind, and what a command writes while it runs.

The result of a command is a ZIP with its logs and output files. It came from a worker and is not trusted: it lies in a temporary
file, never whole in memory, and is read with all the checks of `tasuki.blobs.zip`. `run` prints logs and results from here, too.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from tasuki.cli.arrays import ENDED, ArraySummary, element_number, elements, look_up, pages, wait_all
from tasuki.cli.command import PATH, Destination, argument, command, connection_options, duration, flag, number, option
from tasuki.cli.connect import with_client
from tasuki.cli.output import ExitCode, Output, encode_json, write_line
from tasuki.client.aio import AsyncClient
from tasuki.client.logs import LogFollower, LogPart
from tasuki.core.protocol import JobResult
from tasuki.core.units import shown_size
from tasuki.errors import InvalidInput, NotFound

PIECE_BYTES = 64 * 1024
STREAMS = ("stdout", "stderr")
# Errors of a program that ran: the exit code is its own, or that of the signal with which a limit ended it.
ENDED_ITSELF = frozenset({"EXIT_CODE", "SIGNAL", "OOM", "PROCESS_LIMIT", "CPU_LIMIT", "FILE_SIZE_LIMIT"})


# ---------------------------------------------------------------------------------------------------- result


@command(
    "result",
    examples=[
        "tasuki result JOB                          # waits for the end, saves JOB.zip (of a handler: JOB.bin)",
        "tasuki result JOB -o out.zip --timeout 1m",
        "tasuki result JOB --extract ./out          # a new folder with logs and output files",
        "tasuki result --stdout JOB | wc -c",
        "tasuki result ARRAY --extract ./out        # out/ARRAY.1, out/ARRAY.2, …",
    ],
)
@argument("named", metavar="JOB|ARRAY", help="Id of a job or an array.")
@option("--output", "-o", "output_file", metavar="FILE", type=PATH, help="Save it here; - for stdout. Of an array: a folder.")
@option("--extract", metavar="FOLDER", type=PATH, help="Unpack the ZIP into this new folder; of an array one for each job.")
@flag("--stdout", help="Write the bytes to stdout.")
@duration("--timeout", help="How long to wait for the job's end. Default: no limit.")
@connection_options()
def result(
    output: Output,
    named: str,
    output_file: Path | None,
    extract: Path | None,
    stdout: bool,
    timeout: float | None,
    place: Destination,
) -> int:
    """The result of a command is a ZIP with its logs and output files, of a handler the bytes it returned, of a broadcast the
    ledger: what each worker did.

    Exit 1 if the job, or one of the array's, did not succeed; 125 if one that succeeded has outputs that are not in its result.
    """
    if output_file == Path("-"):
        output_file, stdout = None, True
    if sum((output_file is not None, extract is not None, stdout)) > 1:
        raise InvalidInput("choose one of --output, --extract and --stdout")
    if stdout and output.json:
        raise InvalidInput("--stdout writes the result itself; it cannot stand with --json")
    if output_file is not None and not output_file.is_dir():
        check_target(output_file)

    async def work(client: AsyncClient) -> int:
        found, _ = await look_up(client, [named])
        view = found[named]
        if view is None:
            if output_file is None and extract is None and (done := await _ledger(client, named, timeout, output)) is not None:
                return done
            if stdout:
                raise InvalidInput(f"{named!r} is an array; name one of its jobs, or a folder for all results with -o FOLDER")
            return await _save_array(client, named, output_file or extract or Path(named), extract is not None, timeout, output)
        name = Path(f"{named}.{_suffix(view)}")
        if not stdout and extract is None:
            check_target(output_file or name)
        output.progress(f"waiting for job {named} …")
        ended = await client.job(named).outcome(timeout)
        where: Path | None = None
        size = 0
        if has_result(ended):
            where = output_file or extract or name
            with saved_to(None if stdout or extract else where) as path:
                size = await save(client, ended, path, output)
                if stdout or extract:
                    _unpack(path, extract)
        if not stdout:
            answer = {**describe(ended), "path": str(where) if where else None, "size_bytes": size}
            line = f"{where}  {shown_size(size)}" if where else "it left no result"
            output.show(answer, lambda: [line])
        if ended.state != "SUCCEEDED":
            output.hint(f"job {named} is {ended.state}: {ended.outcome.message or ended.outcome.error_code}")
        return check_left_out(
            named, ended.outcome.meta.get("left_out"), ExitCode.OK if ended.state == "SUCCEEDED" else ExitCode.FAILED, output
        )

    return with_client(place, work, agents=True)


def _suffix(view: dict[str, Any]) -> str:
    return "zip" if view["exec"] else "bin"


def _unpack(path: Path, folder: Path | None) -> None:
    """Unpack a result into a new folder, or write it to stdout."""
    from tasuki.blobs.zip.writer import extract_zip

    with path.open("rb") as source:
        if folder is not None:
            extract_zip(source, folder)
        else:
            copy_all(source, sys.stdout.buffer.write)
            sys.stdout.buffer.flush()


async def _ledger(client: AsyncClient, array_id: str, timeout: float | None, output: Output) -> int | None:
    """Show who did what of a broadcast, when all have ended: that is its result. None if the array is none."""
    before = await ArraySummary.of(client, array_id, output)
    if not before.ledger:
        return None
    handles = [client.job(did["job_id"]) for did in before.ledger.values() if did["state"] not in ENDED]
    await wait_all(client, handles, output, array_id=array_id, timeout=timeout)
    summary = await ArraySummary.of(client, array_id, output)
    output.show(summary.view(), summary.lines)
    return ExitCode.FAILED if summary.unsuccessful else ExitCode.OK


async def _save_array(
    client: AsyncClient, array_id: str, folder: Path, unpacked: bool, timeout: float | None, output: Output
) -> int:
    """Save the result of each element of an array in a folder, when all have ended: as a file, or unpacked."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"the folder {str(folder)!r} cannot be made: {error.strerror}; name another with -o FOLDER") from None
    views = {view["job_id"]: view async for page in pages(client, {"array_id": array_id}) for view in page}
    handles = [client.job(job_id) for job_id in sorted(views, key=element_number)]
    summary, saved, size, code = ArraySummary(array_id), 0, 0, int(ExitCode.OK)
    before = sum(view["state"] in ENDED for view in views.values())
    for ended in await wait_all(client, handles, output, array_id=array_id, timeout=timeout, ended_before=before):
        summary.add_result(ended)
        code = check_left_out(ended.job_id, ended.outcome.meta.get("left_out"), code, output)
        if has_result(ended):
            with scratch_file() as scratch:
                target = folder / ended.job_id if unpacked else folder / f"{ended.job_id}.{_suffix(views[ended.job_id])}"
                size += await save(client, ended, scratch if unpacked else target, output)
                if unpacked:
                    _unpack(scratch, target)
            saved += 1
    answer = {**summary.view(), "path": str(folder), "saved": saved, "size_bytes": size}
    output.show(answer, lambda: [f"{folder}  {saved} results, {shown_size(size)}", *summary.reason_lines()])
    return ExitCode.FAILED if summary.unsuccessful else code


@contextmanager
def scratch_file() -> Iterator[Path]:
    """Make a private folder for a result, and remove it afterwards; yields a path in it."""
    with tempfile.TemporaryDirectory(prefix="tasuki-result-") as folder:
        yield Path(folder) / "result.zip"


def has_result(ended: JobResult) -> bool:
    """Return whether the attempt left a result (a job that never started has none)."""
    return ended.outcome.result_ref is not None or ended.outcome.result is not None


@contextmanager
def saved_to(output_file: Path | None) -> Iterator[Path]:
    """Yield the path where a result is to be saved: `output_file`, or a temporary file that is copied to it if it is a stream.

    Raise InvalidInput, before anybody waits for the result, if it could not be saved there.
    """
    if output_file is not None and not _is_stream(output_file):
        check_target(output_file)
        yield output_file
        return
    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_file())
        stream = stack.enter_context(_open_stream(output_file)) if output_file is not None else None
        yield scratch
        if stream is not None and scratch.exists():
            _copy(scratch, stream)


def _is_stream(path: Path) -> bool:
    """Return whether this is a device, a FIFO or /dev/stdout: to be written into, and never to be replaced."""
    if not path.exists() or path.is_dir():
        return False
    return not path.is_file() or (path.is_symlink() and path.is_relative_to("/dev"))


def _open_stream(path: Path) -> BinaryIO:
    """Open a stream before the run: a FIFO without a reader is found now, and does not block at the end."""
    flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise InvalidInput(
            f"-o {str(path)!r} cannot be written: {error.strerror}; if it is a FIFO, start its reader first"
        ) from None
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "wb")


def _copy(path: Path, stream: BinaryIO) -> None:
    try:
        with path.open("rb") as source:
            shutil.copyfileobj(source, stream)
        stream.flush()
    except OSError as error:
        raise InvalidInput(f"the result cannot be written to -o: {error.strerror}; the same --job-id fetches it again") from None


async def save(client: AsyncClient, ended: JobResult, path: Path, output: Output) -> int:
    """Save a result, show how far its download is, and return its size."""
    ref = ended.outcome.result_ref
    return await client.save_result(ended, path, output.transfer("downloading the result", ref.size_bytes if ref else 0))


def check_target(path: Path) -> None:
    """Raise InvalidInput if a file cannot be made here."""
    folder = path.parent
    if _is_stream(path):  # it is there, and is written to
        return
    if not folder.is_dir():
        raise InvalidInput(f"-o {str(path)!r}: there is no folder {str(folder)!r}; make it with: mkdir -p {folder}")
    if path.is_dir():
        raise InvalidInput(f"-o {str(path)!r} is a folder; name a file in it, as in -o {path / 'result.zip'}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidInput(f"-o {str(path)!r}: you may not write to the folder {str(folder.absolute())!r}; choose another file")


def copy_logs(source: BinaryIO, stdout: Callable[[bytes], Any], stderr: Callable[[bytes], Any]) -> None:
    """Pass the two logs in a result to their functions, in pieces."""
    from tasuki.blobs.zip.reader import ZipReader

    archive = ZipReader(source)
    takers = {"stdout.log": stdout, "stderr.log": stderr}
    for entry in archive.entries:
        if entry.name in takers:
            archive.unpack(entry, takers[entry.name])


def copy_all(source: BinaryIO, write: Callable[[bytes], Any]) -> None:
    """Pass a file to a function, in pieces."""
    while piece := source.read(PIECE_BYTES):
        write(piece)


class CapturedOutput:
    """The stdout and stderr of an ended job: written to ours, or with --json collected for the answer."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._logs = {name: bytearray() for name in STREAMS}

    def print_result(self, path: Path, *, is_command: bool) -> None:
        """Print the logs of a command's result, or all bytes of a handler's."""
        stdout: Callable[[bytes], Any] = sys.stdout.buffer.write
        stderr: Callable[[bytes], Any] = sys.stderr.buffer.write
        if self._output.json:
            stdout, stderr = self._logs["stdout"].extend, self._logs["stderr"].extend
        with path.open("rb") as source:
            if is_command:
                copy_logs(source, stdout, stderr)
            else:
                copy_all(source, stdout)
        sys.stdout.buffer.flush()
        sys.stderr.buffer.flush()

    def show(self, facts: dict[str, Any], code: int) -> None:
        """Print the answer for programs."""
        texts = {name: log.decode("utf-8", "replace") for name, log in self._logs.items()}
        self._output.show({**facts, **texts, "exit": code}, list)


def check_left_out(job_id: str, left_out: object, code: int, output: Output) -> int:
    """Say how many outputs a result lacks, and return the exit code: a success without all its outputs is none."""
    if not isinstance(left_out, int) or left_out <= 0:
        return code
    many = "1 output is" if left_out == 1 else f"{left_out} outputs are"
    output.hint(
        f"tasuki: job {job_id}: {many} not in the result (too large, too many, or no plain file); its result.json lists them"
    )
    return code or ExitCode.COULD_NOT_RUN


def describe(ended: JobResult) -> dict[str, Any]:
    """Return how a job ended, for programs."""
    outcome = ended.outcome
    return {
        "job_id": ended.job_id,
        "state": str(ended.state),
        "attempt": ended.attempt,
        "exit_code": outcome.exit_code,
        "error_code": outcome.error_code,
        "message": outcome.message,
        "result_sha256": outcome.result_sha256,
        "left_out": outcome.meta.get("left_out", 0),
    }


# ---------------------------------------------------------------------------------------------------- logs


@command(
    "logs",
    examples=[
        "tasuki logs JOB                            # what it has written so far",
        "tasuki logs -f JOB                         # and what it writes, to its end",
        "tasuki logs --stream stderr JOB 2> errors.txt",
        "tasuki logs -f --tail 4096 --stream stdout JOB | grep ERROR",
    ],
)
@argument("named", metavar="JOB|ARRAY", help="Id of a job or an array.")
@flag("--follow", "-f", help="Follow to the job's end.")
@option("--stream", metavar="stdout|stderr|both", default="both", help="Which of the two.")
@number("--offset", metavar="BYTES", type=int, help="Begin at this byte.")
@number("--tail", metavar="BYTES", type=int, help="Begin so much before the end.")
@connection_options()
def logs(output: Output, named: str, follow: bool, stream: str, offset: int | None, tail: int | None, place: Destination) -> None:
    """The job's stdout goes to stdout, its stderr to stderr; of an array, those of one job after the other.

    Where a long log was cut in its middle, a line says so.

    Exits with 0 however the job ends: see tasuki status. With --json a line per piece (-f), else one object with both texts.
    """
    if stream not in (*STREAMS, "both"):
        raise InvalidInput(f"--stream must be stdout, stderr or both, got {stream!r}")
    if offset is not None and tail is not None:
        raise InvalidInput("choose one of --offset and --tail")
    if min(offset or 0, tail or 0) < 0:
        raise InvalidInput(f"--offset and --tail must be 0 or more, got {min(offset or 0, tail or 0)}")
    streams = STREAMS if stream == "both" else (stream,)
    show = _show_texts if output.json and not follow else _show_parts

    async def work(client: AsyncClient) -> None:
        found, _ = await look_up(client, [named])
        job_ids = [named] if found[named] is not None else await elements(client, named)
        for job_id in job_ids:
            if len(job_ids) > 1:
                output.hint(f"==> {job_id}")
            printer = LogPrinter(output)
            make = functools.partial(LogFollower, offset=offset or 0, tail_bytes=tail, on_progress=printer.progress)
            try:
                await show([make(client, job_id, name) for name in streams], follow, printer)
            except NotFound:  # of an array, a job that has no log
                if len(job_ids) == 1:
                    raise

    with_client(place, work, agents=True)


class LogPrinter:
    """Prints parts of logs to stdout and stderr, and hints where a new attempt begins."""

    def __init__(self, output: Output) -> None:
        self.output = output
        self._attempt = 0
        self._progress = ""

    async def part(self, part: LogPart) -> None:
        """Print a part at once; in a thread, so that a slow reader does not keep us from answering the server."""
        if self._attempt and part.attempt > self._attempt:
            self.output.hint(f"tasuki: attempt {part.attempt} begins")
        self._attempt = max(self._attempt, part.attempt)
        self.output.end_progress()
        await asyncio.to_thread(_write, part.stream, part.text)

    def progress(self, fraction: float, text: str) -> None:
        """Print how far the job is, on a terminal; both streams report it."""
        line = f"tasuki: {fraction:.0%} {text}".rstrip()
        if line != self._progress and sys.stderr.isatty():
            self.output.hint(line)
        self._progress = line


def _write(stream: str, data: bytes) -> None:
    target = sys.stdout.buffer if stream == "stdout" else sys.stderr.buffer
    target.write(data)
    target.flush()


async def _show_parts(followers: list[LogFollower], follow: bool, printer: LogPrinter) -> None:
    async def one(follower: LogFollower) -> None:
        async for part in follower.parts(follow=follow):
            if printer.output.json:
                where = {"job_id": follower.job_id, "stream": part.stream, "attempt": part.attempt, "offset": part.offset}
                data = part.data.decode("utf-8", "replace")
                write_line(encode_json({**where, "cut_bytes": part.cut_bytes, "data": data}))
            else:
                await printer.part(part)

    if follow:
        tasks = [asyncio.ensure_future(one(follower)) for follower in followers]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    else:
        for follower in followers:
            await one(follower)


async def _show_texts(followers: list[LogFollower], follow: bool, printer: LogPrinter) -> None:
    texts: dict[str, str] = dict.fromkeys(STREAMS, "")
    for follower in followers:
        pieces = [part.text async for part in follower.parts(follow=follow)]
        texts[follower.stream] = b"".join(pieces).decode("utf-8", "replace")
    printer.output.show({"job_id": followers[0].job_id, **texts}, list)
