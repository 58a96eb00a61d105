"""Contract between a node agent and its clients: the input hash, states, error codes, and the meaning of a repeated id. Pure.

    nothing, FAILED, INTERRUPTED ──► it runs            with any input; an earlier folder is removed first
    QUEUED                       ──► it runs            or CONFLICT: a dispatcher has the input, and no node has begun
    RUNNING                      ──► LOCKED (423)       or CONFLICT, if both inputs are known and differ
    DONE                         ──► STORED             the same bytes as before; CONFLICT with another input;
                                                        COMPARE if the input is not known before the upload is read

The markers of a job's folder are these structs as JSON.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tasuki.core.decoding import decodable
from tasuki.core.job import Progress, is_sha256
from tasuki.errors import InvalidInput, quoted

ARGS_MAX = 1_000
ARG_MAX_CHARS = 16 * 1024
LISTED, LISTED_MAX = 100, 1_000  # jobs in one answer
TIMEOUT_S = 20 * 60.0
SLOT_MEMORY_BYTES = 1024**3
"""Memory that a job is assumed to need, if the number of slots is not configured."""

FULL, RUNNING, DRAINING, PROGRAM_FAILED, TIMED_OUT, CANCELED, EXEC_NOT_ALLOWED = (
    "FULL", "RUNNING", "DRAINING", "PROGRAM_FAILED", "TIMED_OUT", "CANCELED", "EXEC_NOT_ALLOWED",
)  # fmt: skip
"""Error codes of an agent, beside those of `tasuki.errors`."""
INPUT_NOT_FOUND = "INPUT_NOT_FOUND"
"""Error code of a job that names an input which is not stored."""

_is_number = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?").fullmatch


class AgentState(enum.StrEnum):
    """State of a job at an agent."""

    QUEUED = "queued"
    """Only in a registry: a dispatcher has the input, and looks for a node."""
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    INTERRUPTED = "interrupted"


class AgentOutcome(enum.StrEnum):
    """Outcome of a program that was not interrupted."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"

    @property
    def state(self) -> AgentState:
        return AgentState.DONE if self is AgentOutcome.SUCCEEDED else AgentState(self.value)


class InputRecord(msgspec.Struct, frozen=True, gc=False):
    """File of an upload as it was received."""

    name: str
    sha256: str
    size_bytes: int


class JobMarker(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of every marker."""

    job_id: str
    node: str
    exec: str
    input: str
    attempt: int
    started_at: float

    @property
    def common(self) -> dict[str, Any]:
        """Fields that every marker has, for another one of the same attempt."""
        return {name: getattr(self, name) for name in JobMarker.__struct_fields__}


@decodable
class RunningMarker(JobMarker, frozen=True, kw_only=True):
    """`.running`: an incarnation of the agent receives or runs this job."""

    incarnation: str
    boot_id: str
    pid: int

    @property
    def state(self) -> AgentState:
        return AgentState.RUNNING


@decodable
class EndedMarker(JobMarker, frozen=True, kw_only=True):
    """`.done` or `.failed`: the program has ended, and `result.zip` beside it is complete."""

    outcome: AgentOutcome
    exit_code: int | None
    error_code: str | None = None
    message: str = ""
    ended_at: float
    result_sha256: str
    result_bytes: int
    left_out: int = 0
    """Number of outputs that are not in the result."""

    @property
    def state(self) -> AgentState:
        return self.outcome.state


@decodable
class InterruptedMarker(JobMarker, frozen=True, kw_only=True):
    """`.interrupted`: the agent ended while the job ran; there is no result."""

    interrupted_at: float

    @property
    def ended_at(self) -> float:
        return self.interrupted_at

    @property
    def state(self) -> AgentState:
        return AgentState.INTERRUPTED


_VIEW = (
    "job_id", "state", "exec", "input", "attempt", "started_at", "ended_at", "exit_code", "progress", "node",
)  # fmt: skip
LastMarker = EndedMarker | InterruptedMarker
Marker = RunningMarker | LastMarker


class RemovalResult(NamedTuple):
    """End of a removal, at any node."""

    state: AgentState
    """State of the job before."""
    left_at: str = ""
    """Node that could not be told, and still has the folder."""

    def view(self, job_id: str) -> dict[str, Any]:
        """Return the answer to `DELETE /jobs/{job_id}`."""
        left = {"left_at": self.left_at} if self.left_at else {}
        return {"job_id": job_id, "state": self.state.value, "removed": True, **left}


def job_view(
    common: dict[str, Any],
    state: AgentState,
    *,
    ended_at: float | None = None,
    ended: Marker | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return the answer to `GET /jobs/{job_id}`. `common`: the fields of every marker. Only an EndedMarker adds to it."""
    facts = dict.fromkeys(_VIEW) | common | {"state": state.value, "ended_at": ended_at}
    if progress is not None:
        facts["progress"] = {"fraction": progress.fraction, "message": progress.text}
    if isinstance(ended, EndedMarker):
        names = ("exit_code", "error_code", "message", "result_sha256", "result_bytes", "left_out")
        facts |= {name: getattr(ended, name) for name in names}
    return facts


class IdDecision(enum.Enum):
    """Answer to a POST with an id, as far as the id decides it."""

    RUN = enum.auto()
    STORED = enum.auto()
    COMPARE = enum.auto()
    LOCKED = enum.auto()
    CONFLICT = enum.auto()


def judge(state: AgentState | None, recorded_input: str | None, sent_input: str | None) -> IdDecision:
    """Decide about a job in this state and with this input. None: there is no such job; the input is not known yet."""
    differs = recorded_input is not None and sent_input is not None and recorded_input != sent_input
    match state:
        case AgentState.QUEUED:
            return IdDecision.CONFLICT if differs else IdDecision.RUN
        case AgentState.RUNNING:
            return IdDecision.CONFLICT if differs else IdDecision.LOCKED
        case AgentState.DONE:
            if sent_input is None:
                return IdDecision.COMPARE
            return IdDecision.CONFLICT if differs else IdDecision.STORED
        case _:
            return IdDecision.RUN


def input_hash(exec_: str, args: Sequence[str], files: Iterable[InputRecord]) -> str:
    """Return the sha256 of exec, arguments and files, by which two requests with one id are the same. The time limit does not
    count.

    Files are in the order in which they were sent, then those that were only named: a program may be given only the first.
    """
    body = {"args": list(args), "exec": exec_, "files": list(files)}
    return hashlib.sha256(msgspec.json.encode(body, order="sorted")).hexdigest()


def only_running(state: str | None) -> bool:
    """Parse the `state` of `DELETE /jobs/{job_id}?state=running`, which stops a run and keeps a job that has ended."""
    if state is not None and state != AgentState.RUNNING:
        raise InvalidInput(f"state {quoted(state)} must be running, or be left out to remove the job in any state")
    return state is not None


def parse_list_query(query: Iterable[tuple[str, str]]) -> tuple[frozenset[str], int]:
    """Parse `state` (none or several) and `limit` of `GET /jobs`."""
    states, limit = set[str](), LISTED
    for name, value in query:
        match name:
            case "state" if value in set(AgentState):
                states.add(value)
            case "limit" if value.isascii() and value.isdecimal() and 0 < int(value[:9]) <= LISTED_MAX:
                limit = int(value)
            case _:
                words = f"is no state of a job ({', '.join(AgentState)}), and no limit from 1 to {LISTED_MAX}"
                raise InvalidInput(f"{quoted(f'{name}={value}')} {words}")
    return frozenset(states or AgentState), limit


class LogQuery(NamedTuple):
    """Question for the output of a running job."""

    stream: str
    offset: int
    wait_s: float


def parse_log_query(stream: str, query: Mapping[str, str]) -> LogQuery:
    """Parse `stream`, `offset` and `wait_s` of `GET /jobs/{job_id}/logs/{stream}`."""
    offset, wait_s = query.get("offset", "0"), query.get("wait_s", "0")
    if stream not in ("stdout", "stderr"):
        raise InvalidInput(f"a program has stdout and stderr, not {quoted(stream)}")
    if not (offset.isascii() and offset.isdecimal() and len(offset) < 19) or not _is_number(wait_s):
        raise InvalidInput(f"offset {quoted(offset)} must be a number of bytes, and wait_s {quoted(wait_s)} seconds")
    return LogQuery(stream, int(offset), float(wait_s))


def check_input_hash(text: str) -> str:
    if not is_sha256(text):
        raise InvalidInput(f"input {quoted(text)} must be the sha256 of the input, 64 digits of 0-9 a-f; leave it out if unknown")
    return text


def parse_args(text: str) -> tuple[str, ...]:
    """Parse the form field `args`: a JSON list of texts."""
    try:
        args = msgspec.json.decode(text, type=tuple[str, ...])
    except (msgspec.MsgspecError, RecursionError):
        raise InvalidInput(f'args {quoted(text)} must be a JSON list of texts, like ["--seed", "7"]') from None
    if len(args) > ARGS_MAX or any(len(argument) > ARG_MAX_CHARS for argument in args):
        raise InvalidInput(f"args must be at most {ARGS_MAX} texts of at most {ARG_MAX_CHARS} characters")
    if any("\0" in argument for argument in args):
        raise InvalidInput("args has a NUL character, which no program can be given")
    return args


def parse_timeout(text: str) -> float:
    """Parse the form field `timeout_s`: seconds above 0."""
    timeout_s = float(text) if _is_number(text) else 0.0
    if not 0.0 < timeout_s < float("inf"):
        raise InvalidInput(f"timeout_s {quoted(text)} must be seconds, above 0; leave it out for the agent's own limit")
    return timeout_s


def default_slots(cores: int, memory_bytes: int) -> int:
    """Return the number of slots that suit a machine: one for each core, if each has a gigabyte of memory."""
    return max(1, min(cores, memory_bytes // SLOT_MEMORY_BYTES))
