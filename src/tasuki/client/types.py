"""Types that callers of a client meet: handles of jobs, answers of the server, the result of a command, checks of arguments.

Handles of the same job share one wait for its end.

Answers are frozen structs with the names of the JSON that the CLI and HTTP show; fields of a newer server are left out. Times are
Unix times in seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

import msgspec

from tasuki.blobs.zip.reader import ZipReader
from tasuki.core.decoding import decodable
from tasuki.core.job import WAYS_OUT, InputFile, JobIncident, Progress, State, type_name
from tasuki.core.protocol import BATCH_MAX, JobResult
from tasuki.core.statistics import GroupCounts
from tasuki.core.units import shown_duration
from tasuki.errors import DeadlineExceeded, InvalidInput, JobFailed, ProtocolError, TasukiError, WrongType

__all__ = [
    "AsyncJobHandle",
    "AwaitedJob",
    "CancelAnswer",
    "CommandResult",
    "Explanation",
    "GroupCounts",
    "JobPage",
    "JobStatus",
    "OutcomeStatus",
    "OutputFiles",
    "RetryAnswer",
    "WorkerStatus",
]

STDERR_NOTE_CHARS = 2000
OUTPUT_FOLDER = "out/"  # of a result's archive: the files that the program left
COPY_BYTES = 64 * 1024
EXPLAIN_WITHIN_S = 2.0
HINT_AFTER_S = 10.0
NOBODY = frozenset({"NO_WORKERS", "NO_PATTERN", "OTHER_KIND"})  # facts of `explain`: no worker can take the job

logger = logging.getLogger("tasuki.client")

T = TypeVar("T")
R = TypeVar("R")
E = TypeVar("E", bound=Exception)


# ---------------------------------------------------------------------------------------------------- answers


class OutcomeStatus(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """The end of a job's latest attempt."""

    exit_code: int | None = None
    error_code: str | None = None
    """None: success; else a stable word: EXIT_CODE, TIMED_OUT, HANDLER_ERROR, …"""
    message: str = ""
    result_bytes: int = 0
    """Size of the result."""
    result_sha256: str | None = None
    result_is_blob: bool = False
    meta: dict[str, Any] = {}


@decodable
class JobStatus(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """One job as its server sees it. In lists, `files`, `file_hashes`, `env_names`, `headers` and `cancel_reason` are empty."""

    job_id: str
    state: State
    subject: str
    exec: str = ""
    """Name of a program; empty: a handler's job."""
    args: tuple[str, ...] = ()
    """The first 20, each cut at 200 characters."""
    args_count: int = 0
    files_count: int = 0
    env_count: int = 0
    header_names: tuple[str, ...] = ()
    payload_bytes: int = 0
    cwd: str = ""
    timeout_s: float | None = None
    max_retries: int = 0
    max_losses: int = 0
    array_id: str | None = None
    files: tuple[str, ...] = ()
    """Names of the input files."""
    file_hashes: dict[str, str] = {}
    """sha256 of the input files that have one, by name."""
    env_names: tuple[str, ...] = ()
    headers: dict[str, str] = {}
    attempt: int = 0
    generation: int = 0
    failures: int = 0
    losses: int = 0
    created_at: float = 0.0
    assigned_at: float | None = None
    started_at: float | None = None
    finished_at: float | None = None
    assigned_worker_id: str | None = None
    cancel_requested: bool = False
    cancel_reason: str = ""
    not_before: float | None = None
    not_after: float | None = None
    priority: int = 0
    submitter: str = ""
    progress: float | None = None
    """0 to 1, as the job reports it."""
    progress_text: str = ""
    outcome: OutcomeStatus | None = None
    """The end of the job, or of its latest failed attempt while a retry waits."""

    @property
    def ended(self) -> bool:
        """True in a terminal state: SUCCEEDED, FAILED, CANCELED, TIMED_OUT or SKIPPED."""
        return self.state.terminal


@decodable
class JobPage(msgspec.Struct, frozen=True):
    """A page of a list: iterate over it, or over `jobs`. `cursor` is that of the next page; None: this is the last one."""

    jobs: tuple[JobStatus, ...]
    cursor: str | None = None

    def __iter__(self) -> Iterator[JobStatus]:
        return iter(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)


@decodable
class CancelAnswer(msgspec.Struct, frozen=True):
    """State of a job after a cancel. `requested`: a worker holds the job, and was asked to stop it."""

    state: State
    requested: bool = False


@decodable
class RetryAnswer(msgspec.Struct, frozen=True):
    """State of a job after a retry. `done`: it had ended, and runs again."""

    state: State
    done: bool = False
    still_running: str | None = None
    """The other run of its definition that has not ended, and that it must not overlap."""


@decodable
class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Reasons for the state of a job: `because` for people, `facts` for programs, `story` oldest first. `str()` is the text."""

    job_id: str
    state: State
    subject: str
    attempt: int
    because: tuple[str, ...]
    facts: dict[str, Any]
    story: tuple[JobIncident, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.job_id} is {self.state}", *self.because])


@decodable
class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """One connected worker."""

    worker_id: str
    server_id: str = ""
    incarnation: str = ""
    patterns: tuple[str, ...] = ()
    """Subjects that it takes."""
    host: str = ""
    slots: int = 1
    takes: str = "any"
    execs: tuple[str, ...] | None = None
    """Programs that it offers; `*`: any program, for jobs of its own user. None: it does not say."""
    credit: int = 0
    running: int = 0
    cpu: float = 0.0
    """Load of its host's CPUs, 0 to 1."""
    address: str = ""
    on_disconnect: str = "stop"
    detached: bool = False
    agent: str = ""
    """Program and version of the worker."""
    heartbeat_age_s: float | None = None
    """Time since its last heartbeat. None: it is connected to another server."""


def read_answer(answer: Any, kind: type[T]) -> T:
    """Return the body of a Reply as a type of this module; ProtocolError if it is none."""
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the server's answer cannot be read: {error}") from None


# ---------------------------------------------------------------------------------------------------- commands


class OutputFiles(Mapping[str, bytes]):
    """Files that a command left in its output folder, by name. A file is unpacked when it is asked for."""

    def __init__(self, archive: BinaryIO | None) -> None:
        self._archive = archive
        entries = ZipReader(archive).entries if archive is not None else []
        self._entries = {entry.name: entry for entry in entries if not entry.is_folder}
        self._names = [name.removeprefix(OUTPUT_FOLDER) for name in self._entries if name.startswith(OUTPUT_FOLDER)]

    def __getitem__(self, name: str) -> bytes:
        if name not in self._names:
            raise KeyError(name)
        return self.unpack(OUTPUT_FOLDER + name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"OutputFiles({self._names})"

    def unpack(self, name: str) -> bytes:
        """Return one entry of the archive; KeyError if there is none of that name."""
        entry = self._entries.get(name)
        if entry is None or self._archive is None:
            raise KeyError(name)
        data = bytearray()
        ZipReader(self._archive).unpack(entry, data.extend)  # a new reader: its limits count all that it unpacks
        return bytes(data)

    def log(self, stream: str) -> bytes:
        """Return stdout or stderr; empty if the job left no result."""
        return self.unpack(f"{stream}.log") if f"{stream}.log" in self._entries else b""


class CommandResult:
    """A command that has ended: `exit_code`, `stdout`, `stderr`, `files`, and `save_to()` for all of it.

        done = client.run("convert", "in/a.png", "out/a.jpg", files=["a.png"])
        print(done.stdout)
        jpeg = done.files["a.jpg"]
        done.save_to("results/a")

    A large result lies in a temporary file, which is removed together with this object.
    """

    def __init__(self, ended: JobResult, archive: BinaryIO | None) -> None:
        """`archive` is the ZIP of the result; None if the job left none. This object closes it."""
        self.ended = ended
        self._archive = archive
        if archive is not None:
            weakref.finalize(self, archive.close)
        try:
            self.files = OutputFiles(archive)
        except InvalidInput as error:
            raise InvalidInput(
                f"the result of job {ended.job_id!r} is not a command's: {error.message}; ask for result()"
            ) from None

    def __repr__(self) -> str:
        return f"CommandResult({self.job_id!r}, {self.state}, exit_code={self.exit_code}, files={list(self.files)})"

    @property
    def job_id(self) -> str:
        return self.ended.job_id

    @property
    def state(self) -> State:
        return self.ended.state

    @property
    def exit_code(self) -> int | None:
        """The program's own; None if it did not run to its end."""
        return self.ended.outcome.exit_code

    @property
    def stdout_bytes(self) -> bytes:
        return self.files.log("stdout")

    @property
    def stderr_bytes(self) -> bytes:
        return self.files.log("stderr")

    @property
    def stdout(self) -> str:
        """Standard output of the program. Bytes that are not UTF-8 are replaced: see `stdout_bytes`."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode("utf-8", "replace")

    def save_to(self, path: str | Path) -> Path:
        """Save everything, and return the path: as the ZIP itself if the name ends in .zip, else as a new folder with
        `stdout.log`, `stderr.log`, `result.json` and `out/`."""
        from tasuki.blobs.zip.writer import extract_zip

        target = Path(path)
        if self._archive is None:
            raise InvalidInput(f"job {self.job_id!r} left no result; it is {self.state}")
        self._archive.seek(0)
        if target.suffix == ".zip":
            with target.open("wb") as file:
                while piece := self._archive.read(COPY_BYTES):
                    file.write(piece)
        else:
            extract_zip(self._archive, target)
        return target

    def check(self) -> None:
        """Raise JobFailed unless the job succeeded; its note is the end of stderr."""
        if self.state is State.SUCCEEDED:
            return
        error = job_failed(self.ended)
        if stderr := self.stderr[-STDERR_NOTE_CHARS:].rstrip():
            error.add_note(f"the end of its stderr:\n{stderr}")
        raise error


def job_failed(ended: JobResult) -> JobFailed:
    """Return the error of a job that ended in another state than SUCCEEDED, with the traceback of its handler as a note."""
    reason = ended.outcome.message or ended.outcome.error_code or "no reason was given"
    error = JobFailed(f"job {ended.job_id!r} is {ended.state} after attempt {ended.attempt}: {reason}", outcome=ended)
    return with_traceback(error, ended.outcome.meta)


def with_traceback(error: E, meta: Mapping[str, Any]) -> E:
    """Add the traceback of a failed attempt, if its outcome has one, to an error as a note; return the error."""
    if isinstance(traceback := meta.get("traceback"), str):
        error.add_note(f"at its worker:\n{traceback.rstrip()}")
    return error


# ---------------------------------------------------------------------------------------------------- handles


class HandleClient(Protocol):
    """The part of an AsyncClient that a handle uses."""

    hinted: bool
    """True once it was said that there is no worker for a job."""

    async def result_bytes(self, ended: JobResult) -> bytes: ...
    async def open_result(self, ended: JobResult) -> BinaryIO | None: ...
    async def status(self, job_id: str) -> JobStatus: ...
    async def explain(self, job_id: str) -> Explanation: ...
    def progress(self, job_id: str) -> AsyncGenerator[Progress, None]: ...
    async def cancel(self, *job_ids: str, reason: str = "") -> dict[str, CancelAnswer]: ...


class AwaitedJob:
    """One job whose end is awaited, by all handles of it. The future is made only when somebody waits."""

    __slots__ = ("error", "existed", "holders", "job_id", "result", "waiter")

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.existed = False
        self.holders = 1
        """Number of submits of this id that share the wait; a refused one must not end the wait of the others."""
        self.result: JobResult | None = None
        self.error: TasukiError | None = None
        self.waiter: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        return self.result is not None or self.error is not None

    def settle(self, result: JobResult | None, error: TasukiError | None = None) -> None:
        """Set the end of the job."""
        self.result, self.error = result, error
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def end(self, timeout: float | None) -> JobResult:
        if not self.done:
            if self.waiter is None or self.waiter.done():
                self.waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout):
                    await asyncio.shield(self.waiter)
            except TimeoutError:
                waited = shown_duration(timeout or 0.0)
                raise DeadlineExceeded(
                    f"job {self.job_id!r} has not ended within {waited}; it goes on: ask again with the same id"
                ) from None
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


def unchanged(data: bytes) -> bytes:
    return data


class AsyncJobHandle(Generic[T]):
    """One job. `await` it for its result, which is of type T: bytes, unless `decoded_by` says otherwise.

    job = await client.submit(subject="math.square", payload=b"7")
    print(job.job_id, await job)         # … b'49'
    """

    __slots__ = ("_client", "_decode", "_job")

    def __init__(self, job: AwaitedJob, client: HandleClient, decode: Callable[[bytes], T]) -> None:
        self._job = job
        self._client = client
        self._decode = decode

    def __repr__(self) -> str:
        state = self._job.result.state if self._job.result is not None else "failed" if self._job.error else "not ended yet"
        return f"<{type(self).__name__} {self.job_id!r}: {state}>"

    def __await__(self) -> Generator[Any, None, T]:
        return self.result().__await__()

    @property
    def job_id(self) -> str:
        return self._job.job_id

    @property
    def existed(self) -> bool:
        """True if the server knew this job before: nothing runs twice."""
        return self._job.existed

    @property
    def done(self) -> bool:
        """True if the end of the job is known here; then `result` and `outcome` do not wait."""
        return self._job.done

    def decoded_by(self, decode: Callable[[bytes], R]) -> AsyncJobHandle[R]:
        """Return a handle of the same job whose result is `decode(bytes)`, as in `job.decoded_by(json.loads)`."""
        return AsyncJobHandle(self._job, self._client, decode)

    async def outcome(self, timeout: float | None = None) -> JobResult:
        """Wait for the end of the job, in any state; DeadlineExceeded (a TimeoutError) after `timeout` seconds.

        The job continues after that, and can be asked for again: `client.job(job_id)`.
        """
        if timeout is None and not self._job.done and not self._client.hinted:
            try:
                return await self._job.end(HINT_AFTER_S)
            except DeadlineExceeded:
                await self._hint()
        try:
            return await self._job.end(timeout)
        except DeadlineExceeded as late:
            raise await self._explained(late) from None

    async def _hint(self) -> None:
        """Log a warning, once for each client, if a job waits because there is nobody to run it."""
        if self._client.hinted:
            return
        self._client.hinted = True
        with contextlib.suppress(TasukiError, TimeoutError):  # the wait itself meets the same trouble
            async with asyncio.timeout(EXPLAIN_WITHIN_S):
                why = await self._client.explain(self.job_id)
            if why.facts.get("why") in NOBODY:
                logger.warning("job %s still waits: %s", self.job_id, why.because[0])

    async def _explained(self, late: DeadlineExceeded) -> DeadlineExceeded:
        """Return the error with the server's reasons, and the traceback of the last failure as a note."""
        try:
            async with asyncio.timeout(EXPLAIN_WITHIN_S):
                why = await self._client.explain(self.job_id)
                status = await self._client.status(self.job_id)
        except (TasukiError, TimeoutError):  # the caller's own time is over, and that is what counts
            return late
        explained = DeadlineExceeded(f"{late.message}. It is {why.state}: {' '.join(why.because)}")
        return with_traceback(explained, status.outcome.meta if status.outcome is not None else {})

    async def result(self, timeout: float | None = None) -> T:
        """Return what the handler returned; JobFailed if the job ended in another state than SUCCEEDED.

        The bytes of a command's result are a ZIP: `command_result` reads it.
        """
        ended = await self.outcome(timeout)
        if ended.state is State.SUCCEEDED and ended.outcome.result_ref is not None:
            return self._decode(await self._client.result_bytes(ended))
        return self.inline_result(ended)

    def inline_result(self, ended: JobResult) -> T:
        """Return the result of a job that has ended, which is not a blob; JobFailed if it did not succeed."""
        if ended.state is not State.SUCCEEDED:
            raise job_failed(ended)
        return self._decode(ended.outcome.result or b"")

    @property
    def ended(self) -> JobResult | None:
        """The end of the job, if it is known here."""
        return self._job.result

    async def command_result(self, timeout: float | None = None, *, check: bool = True) -> CommandResult:
        """Return a command's exit code, output and files; JobFailed if it did not succeed, unless check=False."""
        ended = await self.outcome(timeout)
        done = CommandResult(ended, await self._client.open_result(ended))
        if check:
            done.check()
        return done

    async def status(self) -> JobStatus:
        """Return everything that the server knows of the job."""
        return await self._client.status(self.job_id)

    def progress(self) -> AsyncGenerator[Progress, None]:
        """Yield the reports of progress as they come, to the end of the job; see AsyncClient.progress."""
        return self._client.progress(self.job_id)

    async def cancel(self, reason: str = "") -> CancelAnswer:
        """Cancel the job; see AsyncClient.cancel."""
        return (await self._client.cancel(self.job_id, reason=reason))[self.job_id]


# ---------------------------------------------------------------------------------------------------- arguments


def check_list(name: str, value: Any) -> Sequence[Any]:
    """Return the elements of a list argument; WrongType for a bare text, whose characters would be the elements."""
    if isinstance(value, str | bytes | InputFile) or not hasattr(value, "__iter__"):
        raise WrongType(f"{name} must be a list, got {type_name(value)}{WAYS_OUT.get(name, f'; write {name}=[…]')}")
    return tuple(value)


def check_texts(name: str, value: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return a mapping argument; WrongType if it is none."""
    if value is not None and not isinstance(value, Mapping):
        raise WrongType(f"{name} must be a dict, got {type_name(value)}")
    return value or {}


def check_job_ids(job_ids: Sequence[object]) -> list[str]:
    """Return the ids as a list; WrongType if one is no text, as in `cancel(["a", "b"])` in place of `cancel("a", "b")`."""
    if len(job_ids) > BATCH_MAX:
        raise InvalidInput(f"{len(job_ids)} job ids at once are too many, the limit is {BATCH_MAX}; use several calls")
    checked: list[str] = []
    for job_id in job_ids:
        if not isinstance(job_id, str):
            hint = "; write *ids" if isinstance(job_id, list | tuple | set) else ""
            raise WrongType(f"a job_id must be str, got {type_name(job_id)}{hint}")
        checked.append(job_id)
    return checked
