"""The seam to what several agents share: which node has a job, and where its result is. An agent works without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from starlette.responses import Response

from tasuki.agent.folders import JobFolders
from tasuki.core.address import Address
from tasuki.core.failover.agent_protocol import AgentState, EndedMarker, RunningMarker
from tasuki.worker.attempt import StopReason


class AnsweredElsewhere(Exception):
    """Another node has the result already: this is the answer to the request, and nothing is run."""

    def __init__(self, answer: Response) -> None:
        super().__init__("done at another node")
        self.answer = answer


class RemovalResult(NamedTuple):
    """What became of a job that was to be removed, wherever it was."""

    state: AgentState
    """How it stood."""
    left_at: str = ""
    """The node that still has its folder, as it could not be told."""


class Registry(Protocol):
    """Few verbs. Errors that are answers (running elsewhere, other input) are raised as `AgentRefusal`."""

    async def open(
        self, folders: JobFolders, address: Address, *, renewed: Callable[[], None], sent: Callable[[int], None]
    ) -> None:
        """Before the port opens: settle what an earlier process of this node left. Others reach this one at `address`. `renewed`
        is called whenever a `deadline` has moved, `sent` with how many bytes of results go out."""

    async def close(self) -> None: ...

    def hurry(self) -> None:
        """Wait no longer for a registry that is away; what could not be recorded is settled at the next start."""

    def deadline(self, job_id: str) -> float | None:
        """When its processes must be gone (CLOCK_BOOTTIME)."""

    async def look(self, job_id: str, sent_input: str | None) -> None:
        """Before an upload is read: raises what `claim` would, as far as that is known."""

    async def claim(self, running: RunningMarker, lost: Callable[[StopReason], None]) -> int:
        """This node is to run it, as the attempt with this number; raises if another one does (423) or has (AnsweredElsewhere).
        The registry renews the claim until `record` or `release`; `lost` is called if that fails, or if somebody canceled it
        there: the job is stopped."""

    async def record(self, ended: EndedMarker, result: Path) -> bool:
        """It has ended here, durably; the result may be copied from the file. Ends the claim. False: it was lost before, and
        this end counts for nothing."""

    async def release(self, job_id: str) -> None:
        """It did not come to an end here: others may run it. Harmless where there is no claim."""

    async def forget(self, job_id: str) -> None:
        """Its run here was stopped, to be removed: if it had ended here before, its result is none any more."""

    async def remove(self, job_id: str) -> RemovalResult | None:
        """It does not run here: stop it wherever it does, and let its result be none any more; None: nobody knows it."""

    async def find(self, job_id: str) -> Response | None:
        """Its result from elsewhere, or a refusal that says where it runs; None: only this node can have it."""

    async def describe(self, job_id: str) -> dict[str, Any] | None:
        """The same for `GET /jobs/{job_id}`."""
