"""Types that callers of a client meet: answers of the server, the result of a command, and checks of arguments.

Answers are frozen structs with the names of the JSON that the CLI and HTTP show; fields of a newer server are left out. Times are
Unix times in seconds.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from tasuki.blobs.zip.reader import ZipReader
from tasuki.core.arguments import WAYS_OUT, type_name
from tasuki.core.job import InputFile, JobIncident, State
from tasuki.core.protocol import BATCH_MAX, JobResult
from tasuki.core.store_messages import GroupCounts
from tasuki.errors import InvalidInput, JobFailed, ProtocolError, WrongType

__all__ = [
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

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


# ---------------------------------------------------------------------------------------------------- answers


class OutcomeStatus(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """The end of a job's latest attempt."""

    exit_code: int | None = None
    error_code: str | None = None
    """None: success. Else a stable word: EXIT_CODE, TIMED_OUT, HANDLER_ERROR, …"""
    message: str = ""
    result_bytes: int = 0
    """Size of the result."""
    result_sha256: str | None = None
    result_is_blob: bool = False
    meta: dict[str, Any] = {}


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


class JobPage(msgspec.Struct, frozen=True):
    """A page of a list: iterate over it, or over `jobs`. `cursor` is that of the next page; None: this is the last one."""

    jobs: tuple[JobStatus, ...]
    cursor: str | None = None

    def __iter__(self) -> Iterator[JobStatus]:
        return iter(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)


class CancelAnswer(msgspec.Struct, frozen=True):
    """State of a job after a cancel. `requested`: a worker holds the job, and was asked to stop it."""

    state: State
    requested: bool = False


class RetryAnswer(msgspec.Struct, frozen=True):
    """State of a job after a retry. `done`: it had ended, and runs again."""

    state: State
    done: bool = False
    still_running: str | None = None
    """The other run of its definition that has not ended, and that it must not overlap."""


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
    """Its program and version."""
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
