"""One attempt of a job: the types that all ways of running it share, the handlers, its lines in the log, and how its end becomes
an `Outcome`.

Touches no process and no file: an `async def` handler runs in the event loop, a `def` in a process of `function_processes.py`.
The rules of an exec and of a job about exit codes are applied here (docs/concepts.md, Exit codes of jobs). Signals come from
outside (no memory, an operator, a limit), so they stay retryable unless `permanent_exit_codes` has their code, 128 + n. A time
limit, a cancel and a lost lease are no exits, whatever code the program ended with.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import inspect
import io
import logging
import signal
import traceback
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
from msgspec.structs import replace

from tasuki.core.job import EMPTY_SHA256, HEADERS_MAX, PAYLOAD_FILE, InputFile, JobSpec, Outcome, Progress
from tasuki.core.subject import SubjectTrie, check_job_pattern
from tasuki.core.units import shown_duration
from tasuki.errors import ConfigError, Retry, WrongType
from tasuki.worker.keeper.protocol import EndReason, Limits, TreeEnded

HANDLER_RESULT_MAX_BYTES = 64 * 1024 * 1024  # held in memory; larger results belong into a command's out/
RESULT_HEADERS_MAX_BYTES = 8 * 1024  # half of what the outcome's meta may have
MESSAGE_MAX_CHARS = 2_000
JOB_LINES_PER_S = 40
TRACEBACK_MAX_CHARS = 4_000
SIGNAL_EXIT_BASE = 128
BY_EXIT = "EXIT_CODE"
BY_SIGNAL = frozenset({"SIGNAL", "OOM", "PROCESS_LIMIT", "CPU_LIMIT", "FILE_SIZE_LIMIT"})

logger = logging.getLogger("tasuki.worker")


class StopReason(enum.StrEnum):
    """The reason for stopping a running attempt from outside; the value is the outcome's error code."""

    CANCELED = "CANCELED"
    LEASE_LOST = "LEASE_LOST"
    SHUTDOWN = "SHUTDOWN"


STOPPED_BECAUSE = {
    StopReason.CANCELED: "canceled",
    StopReason.LEASE_LOST: "stopped: its lease could not be renewed",
    StopReason.SHUTDOWN: "stopped: the worker is shutting down",
}


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One granted attempt, as the code that runs it sees it."""

    spec: JobSpec
    lease_id: str
    attempt: int
    submitter: str = ""
    facts: dict[str, Any] = {}
    """Further fields for its result.json."""


class HandlerInput(msgspec.Struct, frozen=True):
    """An input file of a handler's job. It is there while the job runs."""

    name: str
    data: bytes | None
    """Content of a small file, which came with the job."""
    path: Path
    """Place of a larger one on this machine."""

    def open(self) -> BinaryIO:
        """Open the file to read its bytes."""
        return io.BytesIO(self.data) if self.data is not None else self.path.open("rb")

    def read_bytes(self) -> bytes:
        """Return the whole contents."""
        with self.open() as file:
            return file.read()


def _unheard(progress: Progress) -> None:
    """Report progress to nobody."""


def _never() -> bool:
    return False


class HandlerJob(msgspec.Struct, frozen=True, eq=False):
    """The one argument of a handler function; `current_job()` returns it inside a task."""

    spec: JobSpec
    attempt: int
    """Only grows: a fencing token for the handler's own conditional writes."""
    folder: str = ""
    """Folder of the inputs that are too large to come with the job."""
    report: Callable[[Progress], None] = _unheard
    is_canceled: Callable[[], bool] = _never

    def __repr__(self) -> str:
        return f"<HandlerJob {self.job_id!r}, {self.subject}, attempt {self.attempt}>"

    @property
    def job_id(self) -> str:
        return self.spec.job_id

    @property
    def subject(self) -> str:
        return self.spec.subject

    @property
    def payload(self) -> bytes:
        """The whole payload; `open_payload` reads a large one piece by piece."""
        if self.spec.payload or not self.spec.files:
            return self.spec.payload
        with self.open_payload() as file:
            return file.read()

    def open_payload(self) -> BinaryIO:
        """Open the payload to read its bytes."""
        large = next((file for file in self.spec.files if file.name == PAYLOAD_FILE), None)
        return self._input(large).open() if large is not None else io.BytesIO(self.spec.payload)

    @property
    def files(self) -> tuple[HandlerInput, ...]:
        """The input files, in the submitter's order: `with job.files[0].open() as file: …`."""
        return tuple(self._input(file) for file in self.spec.files if file.name != PAYLOAD_FILE)

    def _input(self, file: InputFile) -> HandlerInput:
        return HandlerInput(file.name, file.data, Path(self.folder, file.name))

    @property
    def headers(self) -> dict[str, str]:
        return self.spec.headers

    @property
    def args(self) -> tuple[str, ...]:
        return self.spec.args

    @property
    def env(self) -> dict[str, str]:
        """The variables that the submitter sent; none is put into the process's own environment."""
        return self.spec.env

    def progress(self, fraction: float, text: str = "") -> None:
        """Report how far the job is, 0 to 1, to those who follow it, `tasuki status` and `tasuki explain`."""
        self.report(Progress.of(fraction, text))

    @property
    def canceled(self) -> bool:
        """True once the job was canceled. The task of an `async def` is canceled then as well. A `def` that asks here has some
        seconds to return; one that never asks is killed at once."""
        return self.is_canceled()


class RunResult(msgspec.Struct, frozen=True):
    """The end of a command's attempt. `outcome.result_ref` names `result_file`, which is uploaded before the outcome is sent."""

    outcome: Outcome
    result_file: Path | None = None


class JobRefused(Exception):
    """The job can never run here as it is. Stays inside the worker: it becomes the attempt's permanent outcome."""

    def __init__(self, error_code: str, message: str) -> None:
        super().__init__(message)
        self.error_code = error_code
        self.message = message

    def outcome(self) -> Outcome:
        return Outcome(error_code=self.error_code, message=self.message, permanent=True)


def stopped_outcome(reason: StopReason) -> Outcome:
    return Outcome(error_code=reason.value, message=STOPPED_BECAUSE[reason])


def timed_out_outcome(timeout_s: float | None) -> Outcome:
    return Outcome(error_code="TIMED_OUT", message=f"passed its time limit of {shown_duration(timeout_s or 0.0)} and was stopped")


def exit_outcome(exit_code: int, who: str) -> Outcome:
    """Return success, EXIT_CODE or SIGNAL for an exit code as `subprocess` has it, negative for a signal."""
    if exit_code == 0:
        return Outcome(exit_code=0)
    if exit_code > 0:
        return Outcome(exit_code=exit_code, error_code="EXIT_CODE", message=f"{who} exited with code {exit_code}")
    name = signal_name(-exit_code)
    return Outcome(
        exit_code=SIGNAL_EXIT_BASE - exit_code,
        error_code="SIGNAL",
        message=f"{who} was killed by {name}",
        meta={"signal": name},
    )


def ended_outcome(ended: TreeEnded, who: str, timeout_s: float | None, limits: Limits) -> Outcome:
    """Return the outcome of an attempt that the keeper reports as ended: the reason, in words, and the exit code."""
    own = exit_outcome(ended.exit_code, who)
    match ended.reason:
        case None:
            return _by_limit(own, ended, who, limits)
        case EndReason.TIMED_OUT:
            outcome = timed_out_outcome(timeout_s)
        case EndReason.OOM:
            outcome = Outcome(error_code="OOM", message=f"{who} ran out of memory: {ended.detail}")
        case EndReason.PROCESS_LIMIT:
            outcome = Outcome(error_code="PROCESS_LIMIT", message=f"{who} was killed: {ended.detail}")
        case _:
            outcome = stopped_outcome(StopReason(ended.reason.value))
    return replace(outcome, exit_code=own.exit_code)


def _by_limit(own: Outcome, ended: TreeEnded, who: str, limits: Limits) -> Outcome:
    """Return CPU_LIMIT or FILE_SIZE_LIMIT if the kernel ended it with the signal of that limit, which nobody else sends."""
    if ended.exit_code == -signal.SIGXCPU and limits.cpu_seconds is not None:
        message = f"{who} was killed: it used up its limit of {limits.cpu_seconds} s of processor time"
        return replace(own, error_code="CPU_LIMIT", message=message)
    if ended.exit_code == -signal.SIGXFSZ and limits.file_size_mb is not None:
        message = f"{who} was killed: it wrote a file larger than its limit of {limits.file_size_mb} MB"
        return replace(own, error_code="FILE_SIZE_LIMIT", message=message)
    if own.error_code and ended.detail:
        return replace(own, message=f"{own.message}; {ended.detail}")
    return own


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals between SIGRTMIN and SIGRTMAX have no names
        return f"signal {number}"


class HandlerResult(msgspec.Struct, frozen=True):
    """A handler's return value with headers: small texts that travel beside the result."""

    result: bytes | str | None = None
    headers: Mapping[str, str] = {}


def handler_outcome(value: object) -> Outcome:
    """Return the outcome for a handler's return value: bytes, text (as UTF-8), None, or a HandlerResult of one of these;
    anything else is the handler's mistake.

    A result above RESULT_INLINE_MAX_BYTES is in `result` all the same; the caller makes it a blob.
    """
    match value:
        case Outcome():
            return value
        case HandlerResult():
            return _with_headers(handler_outcome(value.result), value.headers)
        case bytes() | bytearray() | memoryview():
            result = bytes(value)
        case str():
            result = value.encode("utf-8", "surrogateescape")
        case None:
            result = b""
        case _:
            return _handler_mistake(f"the handler returned {type(value).__name__}; return bytes, str, None or a HandlerResult")
    if len(result) > HANDLER_RESULT_MAX_BYTES:
        return _handler_mistake(f"the handler returned {len(result)} bytes, the limit is {HANDLER_RESULT_MAX_BYTES}")
    return Outcome(result=result, result_sha256=hashlib.sha256(result).hexdigest() if result else EMPTY_SHA256)


def _with_headers(outcome: Outcome, headers: Mapping[str, str]) -> Outcome:
    if outcome.error_code is not None or not headers:
        return outcome
    if not all(isinstance(text, str) for pair in headers.items() for text in pair):
        return _handler_mistake("the handler returned headers that are not all text")
    size_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for pair in headers.items() for text in pair)
    if len(headers) > HEADERS_MAX or size_bytes > RESULT_HEADERS_MAX_BYTES:
        limits = f"the limits are {HEADERS_MAX} and {RESULT_HEADERS_MAX_BYTES}"
        return _handler_mistake(f"the handler returned {len(headers)} headers of {size_bytes} bytes; {limits}")
    return replace(outcome, meta={**outcome.meta, "headers": dict(headers)})


def _handler_mistake(message: str) -> Outcome:
    return Outcome(error_code="HANDLER_ERROR", message=message, permanent=True)


def tidy(text: str) -> str:
    """Return the text with lone surrogates (of a file name, say) escaped, so that it can be sent."""
    return text.encode("utf-8", "backslashreplace").decode()


def handler_failure(error: BaseException) -> Outcome:
    """Return the outcome for an exception of a handler: its type, its message and the end of its traceback."""
    if isinstance(error, JobRefused):
        return error.outcome()
    kind = type(error).__name__
    story = tidy("".join(traceback.format_exception(_from_users_code(error))))[-TRACEBACK_MAX_CHARS:]
    return Outcome(
        error_code="HANDLER_ERROR",
        message=tidy(f"{kind}: {error}")[:MESSAGE_MAX_CHARS],
        meta={"type": kind, "traceback": story},
        retry_in_s=error.in_s if isinstance(error, Retry) else None,
    )


def _from_users_code(error: BaseException) -> BaseException:
    """Return the error with a traceback that begins in the handler's own code, if it was raised there."""
    trace = error.__traceback__
    while trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("tasuki."):
        trace = trace.tb_next
    return error if trace is None else error.with_traceback(trace)


def worker_failure(error: Exception) -> Outcome:
    """Return the outcome for a failure of the worker itself (no thread, a broken disk); the job is tried again elsewhere."""
    message = tidy(f"the worker failed: {type(error).__name__}: {error}")
    return Outcome(error_code="WORKER_ERROR", message=message[:MESSAGE_MAX_CHARS])


async def first_of(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Wait until one of the futures is done or the time is over, and cancel none."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def unless_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Future[StopReason]) -> bool:
    """Do the work, and return True; cancel it and return False if the stop comes first."""
    task = asyncio.ensure_future(work)
    try:
        await first_of(task, stop)
        if task.done():
            task.result()
        return task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# ---------------------------------------------------------------------------------------------------- handlers


Exceptions = tuple[type[BaseException], ...]


class Handler(msgspec.Struct, frozen=True):
    """A function for a subject. An `async def` runs in the worker's loop, a `def` in a child process."""

    name: str
    function: Callable[[HandlerJob], Any]
    asynchronous: bool
    timeout_s: float | None = None
    retry_on: Exceptions | None = None
    """The only exceptions that are worth another attempt; None: all but those of `give_up_on`."""
    give_up_on: Exceptions = ()

    def limit_s(self, spec: JobSpec) -> float | None:
        """Return the job's own time limit, else the handler's."""
        return spec.timeout_s if spec.timeout_s is not None else self.timeout_s

    async def run(self, job: HandlerJob, stopped: Callable[[], StopReason | None]) -> Outcome:
        """Run an `async def` handler in this task. `stopped()` returns the reason if the worker has canceled the task."""
        limit_s = self.limit_s(job.spec)
        limit = asyncio.timeout(limit_s) if limit_s is not None else None
        try:
            if limit is None:
                return handler_outcome(await self.function(job))
            async with limit:
                return handler_outcome(await self.function(job))
        except asyncio.CancelledError as error:  # by the worker, or by the handler's own use of cancellation
            reason = stopped()
            return stopped_outcome(reason) if reason is not None else handler_failure(error)
        except Exception as error:  # noqa: BLE001 - any exception of a handler is its attempt's outcome
            timed_out = limit is not None and limit.expired()
            return timed_out_outcome(limit_s) if timed_out else self.failure(error)

    def call(self, job: HandlerJob) -> Outcome:
        """Call a `def` handler."""
        try:
            return handler_outcome(self.function(job))
        except BaseException as error:  # noqa: BLE001 - any exception, SystemExit too, is its attempt's outcome
            return self.failure(error)

    def failure(self, error: BaseException) -> Outcome:
        """Return the outcome for an exception of the function, by the rules about further attempts."""
        outcome = handler_failure(error)
        if outcome.permanent or isinstance(error, Retry):
            return outcome
        if isinstance(error, self.give_up_on):
            return replace(outcome, permanent=True, message=f"{outcome.message} (not tried again: give_up_on)")
        if self.retry_on is not None and not isinstance(error, self.retry_on):
            return replace(outcome, permanent=True, message=f"{outcome.message} (not tried again: not in retry_on)")
        return outcome


def check_handler(subject: object, function: object = None) -> None:
    """Raise WrongType for a use of `@worker.handler` that could only fail later: no subject, or a function without the job."""
    if not isinstance(subject, str):
        name = getattr(subject, "__name__", "function")
        raise WrongType(f'a handler needs the subject of its jobs: write @worker.handler("{name}"), got {type(subject).__name__}')
    if function is None:
        return
    name = getattr(function, "__name__", repr(function))
    if not callable(function):
        raise WrongType(f"a handler must be a function, got {type(function).__name__}")
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise WrongType(f"handler {name!r} is called with one argument, the job: write def {name}(job)") from None
    except ValueError:  # a builtin, whose arguments are not known
        return


def check_exceptions(name: str, given: object) -> Exceptions:
    """Return the exceptions of `retry_on` or `give_up_on`; WrongType if it is neither an exception class nor some of them."""
    kinds = given if isinstance(given, tuple | list) else (given,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise WrongType(f"{name} must be exception classes, got {kind!r}")
    return cast(Exceptions, tuple(kinds))


class Handlers:
    """The handlers of a worker. If several patterns match a job, the one that was added first counts."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._trie: SubjectTrie[str] = SubjectTrie()

    def __len__(self) -> int:
        return len(self._handlers)

    def add(self, handler: Handler) -> None:
        subject = check_job_pattern(handler.name)
        handler = msgspec.structs.replace(handler, name=subject)
        if subject in self._handlers:
            raise ConfigError(f"subject {subject!r} has a handler already; remove one of the two")
        self._handlers[subject] = handler
        self._trie.add(subject, subject)

    def find(self, subject: str) -> Handler | None:
        names = self._trie.match(subject)
        return self._handlers[names[0]] if names else None

    @property
    def patterns(self) -> tuple[str, ...]:
        return tuple(self._handlers)

    @property
    def plain(self) -> dict[str, Callable[[HandlerJob], Any]]:
        """The `def` functions, by name."""
        return {name: handler.call for name, handler in self._handlers.items() if not handler.asynchronous}


# ---------------------------------------------------------------------------------------------------- exit codes


class ExitRules(msgspec.Struct, frozen=True, kw_only=True):
    """The exit codes that an exec or a job names. None: no rule; empty: no code."""

    permanent: tuple[int, ...] | None = None
    retry: tuple[int, ...] | None = None


NO_RULES = ExitRules()


def rules_of(spec: JobSpec) -> ExitRules:
    """Return the job's own rules."""
    return ExitRules(permanent=spec.permanent_exit_codes or None, retry=spec.retry_exit_codes or None)


def judged(outcome: Outcome, exec_name: str, of_exec: ExitRules = NO_RULES, of_job: ExitRules = NO_RULES) -> Outcome:
    """Return the outcome, made permanent if a rule says so; its message then names the rule."""
    code = outcome.exit_code
    if code is None or outcome.permanent or outcome.error_code not in {BY_EXIT, *BY_SIGNAL}:
        return outcome
    why = _why_permanent(code, outcome.error_code == BY_EXIT, f"exec {exec_name!r}", of_exec, of_job)
    return replace(outcome, permanent=True, message=f"{outcome.message}; {why}") if why else outcome


def _why_permanent(code: int, chosen: bool, exec_: str, of_exec: ExitRules, of_job: ExitRules) -> str:
    """Return the reason, in the order in which rules count; "" if the code may be retried."""
    if code in (of_job.permanent or ()):
        return f"exit code {code} is permanent for this job"
    if code in (of_job.retry or ()):
        return ""
    if of_job.permanent is None and code in (of_exec.permanent or ()):
        return f"exit code {code} is permanent for {exec_}"
    if chosen and of_job.retry is not None:
        return f"exit code {code} is permanent for this job, which retries only {_listed(of_job.retry)}"
    if chosen and of_job.retry is None and of_exec.retry is not None and code not in of_exec.retry:
        return f"exit code {code} is permanent for {exec_}, which retries only {_listed(of_exec.retry)}"
    return ""


def _listed(codes: tuple[int, ...]) -> str:
    return ", ".join(map(str, codes)) or "none"


# ---------------------------------------------------------------------------------------------------- the log


class JobLog:
    """Lines in the log about the jobs of handlers: start, end, and the traceback of a failure.

    At most JOB_LINES_PER_S, and as many for failures: a worker runs ten thousand short jobs a second. The others are counted, and
    told once a second.
    """

    def __init__(self) -> None:
        self._second = 0
        self._lines = [0, 0]  # in this second: of failures last
        self._full_until = 0.0
        """End of a second that has no room for further lines but those of failures: most jobs of a busy worker end here."""
        self._untold = 0
        self._untold_failures = 0

    def started(self, spec: JobSpec, attempt: int, at: float) -> None:
        if at >= self._full_until and self._has_room(at):
            self._write(logging.INFO, f"job {spec.job_id} ({spec.subject}) started, attempt {attempt}")

    def ended(self, spec: JobSpec, attempt: int, outcome: Outcome, started_at: float | None, at: float) -> None:
        failed = outcome.error_code is not None
        if (at < self._full_until and not failed) or not self._has_room(at, failed):
            self._untold += 1
            self._untold_failures += failed
            return
        took_s = at - (started_at or at)
        took = f"{took_s:.3g}s" if took_s < 10 else shown_duration(took_s)
        job = f"job {spec.job_id} ({spec.subject})"
        if not failed:
            self._write(logging.INFO, f"{job} succeeded in {took}")
            return
        traceback = str(outcome.meta.get("traceback", ""))
        why = outcome.message or str(outcome.error_code)
        self._write(logging.WARNING, f"{job} failed in {took}, attempt {attempt}: {why}", traceback.rstrip())

    def flush(self, at: float) -> None:
        """Tell how many jobs had no line of their own, once a second."""
        if self._untold and int(at) != self._second:
            others = f"{self._untold} other jobs ended in a second, {self._untold_failures} of them failed"
            self._untold = self._untold_failures = 0
            self._write(logging.INFO, others)

    def _has_room(self, at: float, failed: bool = False) -> bool:
        if int(at) != self._second:
            self.flush(at)
            self._second, self._lines = int(at), [0, 0]
        self._lines[failed] += 1
        if self._lines[False] >= JOB_LINES_PER_S:
            self._full_until = self._second + 1.0
        return self._lines[failed] <= JOB_LINES_PER_S

    def _write(self, level: int, message: str, traceback: str = "") -> None:
        if logger.isEnabledFor(level):
            record = logger.makeRecord(logger.name, level, __file__, 0, message, (), None)
            lines = (line if line.isprintable() else repr(line)[1:-1] for line in traceback.splitlines())
            record.exc_text = "\n".join(lines) or None
            logger.handle(record)
