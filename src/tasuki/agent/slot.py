"""A job that has a slot, and what an end means: pure but for the futures that others wait for."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple, Protocol

from tasuki.core.failover.agent_protocol import AgentOutcome, AgentState, EndedMarker, InterruptedMarker, Marker, RunningMarker
from tasuki.core.job import Outcome, Progress
from tasuki.errors import AgentRefusal, DiskFull, InvalidInput, TasukiError
from tasuki.worker.attempt import StopReason

_SENDERS_MISTAKES = frozenset({"BAD_INPUT", "ARGS_NOT_ALLOWED", "ENV_NOT_ALLOWED", "EXEC_NOT_ALLOWED"})


class FinishedRun(NamedTuple):
    """How a job ended; a small result also stands in memory, for the one who waits for it."""

    ended: EndedMarker
    small: bytes | None = None


class ReceivedUpload(Protocol):
    """An upload on its way."""

    received_bytes: int


class SlotJob:
    """A job that has a slot: being received, or running."""

    def __init__(self, job_id: str, attempt: int, since: float, loop: asyncio.AbstractEventLoop) -> None:
        self.job_id = job_id
        self.attempt = attempt
        self.since = since
        self.exec = ""
        self.input: str | None = None
        """None: it is being received."""
        self.announced_bytes = 0
        self.intake: ReceivedUpload | None = None
        self.running: RunningMarker | None = None
        self.progress: Progress | None = None
        self.begun = False
        """Its folder stands among the jobs."""
        self.marked: asyncio.Future[None] | None = None
        """Done when its marker outlives a power cut. None: it is too short for that to be of worth."""
        self.started = False
        """The program was started."""
        self.stop: asyncio.Future[StopReason] = loop.create_future()
        self.ended: asyncio.Future[FinishedRun] = loop.create_future()
        self.ended.add_done_callback(_look_at)  # nobody may be waiting for it
        self.receiving: asyncio.Task[Any] | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def awaited_bytes(self) -> int:
        """What will still be written of its upload."""
        if self.input is not None:
            return 0
        return max(0, self.announced_bytes - (0 if self.intake is None else self.intake.received_bytes))

    @property
    def canceled(self) -> bool:
        return self.stop.done() and self.stop.result() is StopReason.CANCELED

    def end(self, reason: StopReason) -> None:
        """Stop it, in whichever stage it is."""
        if not self.stop.done():
            self.stop.set_result(reason)
            if self.task is None and self.receiving is not None:
                self.receiving.cancel()


def state_of(marker: Marker | None) -> AgentState | None:
    match marker:
        case None:
            return None
        case EndedMarker():
            return marker.outcome.state
        case InterruptedMarker():
            return AgentState.INTERRUPTED
        case RunningMarker():
            return AgentState.RUNNING


def outcome_of(outcome: Outcome) -> AgentOutcome:
    match outcome.error_code:
        case None:
            return AgentOutcome.SUCCEEDED
        case "TIMED_OUT":
            return AgentOutcome.TIMED_OUT
        case _:
            return AgentOutcome.FAILED


def no_result(outcome: Outcome, *, started: bool) -> TasukiError:
    """Why nothing came out: the sender's mistake is 400; what only this node lacks is a 5xx, so that another one is tried."""
    if outcome.error_code == DiskFull.code:
        return DiskFull(outcome.message)
    if not started and outcome.error_code in _SENDERS_MISTAKES:
        return InvalidInput(outcome.message)
    return AgentRefusal(500, outcome.error_code or "INTERNAL", outcome.message)


def _look_at(ended: asyncio.Future[FinishedRun]) -> None:
    if not ended.cancelled():
        ended.exception()
