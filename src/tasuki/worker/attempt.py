"""The small types that all ways of running a job share, and how an end becomes an `Outcome`.

Only data and waiting: nothing here touches a process or a file.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import signal
import traceback
from pathlib import Path
from typing import Any

import msgspec

from tasuki.core.job import EMPTY_SHA256, JobSpec, Outcome
from tasuki.worker.keeper.protocol import EndReason, Limits, TreeEnded

HANDLER_RESULT_MAX_BYTES = 64 * 1024 * 1024  # it stands in memory whole; larger results belong to a command's out/
MESSAGE_MAX_CHARS = 2_000
TRACEBACK_MAX_CHARS = 4_000
SIGNAL_EXIT_BASE = 128  # the exit code that a shell shows for a program killed by signal n is 128 + n


class StopReason(enum.StrEnum):
    """Why a running attempt is to be ended from outside; its value is the outcome's error code."""

    CANCELED = "CANCELED"
    LEASE_LOST = "LEASE_LOST"
    SHUTDOWN = "SHUTDOWN"


STOPPED_BECAUSE = {
    StopReason.CANCELED: "canceled",
    StopReason.LEASE_LOST: "stopped: its lease could not be renewed",
    StopReason.SHUTDOWN: "stopped: the worker is shutting down",
}


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One granted attempt, as those who run it see it."""

    spec: JobSpec
    lease_id: str
    attempt: int
    submitter: str = ""
    facts: dict[str, Any] = {}
    """What else its result.json is to tell."""


class HandlerJob(msgspec.Struct, frozen=True):
    """What a handler function gets as its one argument."""

    spec: JobSpec
    attempt: int
    """Only grows: a fencing token for the handler's own conditional writes."""

    @property
    def job_id(self) -> str:
        return self.spec.job_id

    @property
    def subject(self) -> str:
        return self.spec.subject

    @property
    def payload(self) -> bytes:
        return self.spec.payload

    @property
    def headers(self) -> dict[str, str]:
        return self.spec.headers

    @property
    def args(self) -> tuple[str, ...]:
        return self.spec.args

    @property
    def env(self) -> dict[str, str]:
        """What the submitter sent; nothing of it is put into the process's own environment."""
        return self.spec.env


class RunResult(msgspec.Struct, frozen=True):
    """How a command's attempt ended.

    With a `result_file`, `outcome.result_ref` names it already: the caller makes the file a durable blob before it sends
    the outcome.
    """

    outcome: Outcome
    result_file: Path | None = None


class JobRefused(Exception):
    """The job can never run here as it is. Never leaves the worker: it becomes the attempt's permanent outcome."""

    def __init__(self, error_code: str, message: str) -> None:
        super().__init__(message)
        self.error_code = error_code
        self.message = message

    def outcome(self) -> Outcome:
        return Outcome(error_code=self.error_code, message=self.message, permanent=True)


def stopped_outcome(reason: StopReason) -> Outcome:
    return Outcome(error_code=reason.value, message=STOPPED_BECAUSE[reason])


def timed_out_outcome(timeout_s: float | None) -> Outcome:
    return Outcome(error_code="TIMED_OUT", message=f"passed its time limit of {timeout_s:g} s and was stopped")


def exit_outcome(exit_code: int, who: str) -> Outcome:
    """From an exit code as `subprocess` has it, negative for a signal: success, EXIT_CODE or SIGNAL, naming `who`."""
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
    """From how the keeper says that an attempt ended: the reason, in words, and the exit code beside it."""
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
    return msgspec.structs.replace(outcome, exit_code=own.exit_code)


def _by_limit(own: Outcome, ended: TreeEnded, who: str, limits: Limits) -> Outcome:
    """The kernel ends what passes a limit of its own with a signal that nobody else sends."""
    if ended.exit_code == -signal.SIGXCPU and limits.cpu_seconds is not None:
        message = f"{who} was killed: it used up its limit of {limits.cpu_seconds} s of processor time"
        return msgspec.structs.replace(own, error_code="CPU_LIMIT", message=message)
    if ended.exit_code == -signal.SIGXFSZ and limits.file_size_mb is not None:
        message = f"{who} was killed: it wrote a file larger than its limit of {limits.file_size_mb} MB"
        return msgspec.structs.replace(own, error_code="FILE_SIZE_LIMIT", message=message)
    if own.error_code and ended.detail:
        return msgspec.structs.replace(own, message=f"{own.message}; {ended.detail}")
    return own


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals between SIGRTMIN and SIGRTMAX have no names
        return f"signal {number}"


def handler_outcome(value: object) -> Outcome:
    """From what a handler returned: bytes, text (as UTF-8) or nothing. Anything else is the handler's mistake.

    A result above RESULT_INLINE_MAX_BYTES stands in `result` all the same; the caller makes it a blob.
    """
    match value:
        case bytes() | bytearray() | memoryview():
            result = bytes(value)
        case str():
            result = value.encode("utf-8", "surrogateescape")
        case None:
            result = b""
        case _:
            kind = type(value).__name__
            return Outcome(
                error_code="HANDLER_ERROR", message=f"the handler returned {kind}; return bytes, str or None", permanent=True
            )
    if len(result) > HANDLER_RESULT_MAX_BYTES:
        return Outcome(
            error_code="HANDLER_ERROR",
            message=f"the handler returned {len(result)} bytes, the limit is {HANDLER_RESULT_MAX_BYTES}",
            permanent=True,
        )
    return Outcome(result=result, result_sha256=hashlib.sha256(result).hexdigest() if result else EMPTY_SHA256)


def tidy(text: str) -> str:
    """Text that can be sent: what is no Unicode (a lone surrogate, from a file name say) is shown escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def handler_failure(error: BaseException) -> Outcome:
    """From what a handler raised: its type, its message and the end of its traceback."""
    kind = type(error).__name__
    story = tidy("".join(traceback.format_exception(error)))[-TRACEBACK_MAX_CHARS:]
    return Outcome(
        error_code="HANDLER_ERROR",
        message=tidy(f"{kind}: {error}")[:MESSAGE_MAX_CHARS],
        meta={"type": kind, "traceback": story},
    )


def worker_failure(error: Exception) -> Outcome:
    """When the worker itself failed with an attempt (no thread to be had, a disk that fails): it may be tried again elsewhere."""
    return Outcome(
        error_code="WORKER_ERROR", message=tidy(f"the worker failed: {type(error).__name__}: {error}")[:MESSAGE_MAX_CHARS]
    )


async def first_of(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Wait until one of them is done or the time is over; the caller looks which. None of them is canceled."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


# ----------------------------------------------------------------------------------------------------
# Which exit codes are worth another attempt: the rules of an exec and of a job, and what they make of an outcome. Pure.

BY_EXIT = "EXIT_CODE"
BY_SIGNAL = frozenset({"SIGNAL", "OOM", "PROCESS_LIMIT", "CPU_LIMIT", "FILE_SIZE_LIMIT"})


class ExitRules(msgspec.Struct, frozen=True, kw_only=True):
    """What one side, exec or job, says about exit codes. None: nothing; empty: none of them."""

    permanent: tuple[int, ...] | None = None
    retry: tuple[int, ...] | None = None


NO_RULES = ExitRules()


def rules_of(spec: JobSpec) -> ExitRules:
    """What the job itself says."""
    return ExitRules(permanent=spec.permanent_exit_codes or None, retry=spec.retry_exit_codes or None)


def judged(outcome: Outcome, exec_name: str, of_exec: ExitRules = NO_RULES, of_job: ExitRules = NO_RULES) -> Outcome:
    """The outcome, permanent if a rule says so; its message then names the rule."""
    code = outcome.exit_code
    if code is None or outcome.permanent or outcome.error_code not in {BY_EXIT, *BY_SIGNAL}:
        return outcome
    why = _why_permanent(code, outcome.error_code == BY_EXIT, f"exec {exec_name!r}", of_exec, of_job)
    return msgspec.structs.replace(outcome, permanent=True, message=f"{outcome.message}; {why}") if why else outcome


def _why_permanent(code: int, chosen: bool, exec_: str, of_exec: ExitRules, of_job: ExitRules) -> str:
    """In the order in which rules count; nothing if the code may be tried again."""
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
