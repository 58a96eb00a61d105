"""The seam to what several agents share: which node has a job, and where its result is. An agent works without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from starlette.responses import Response

from tasuki.core.agent_job import EndedMarker


class AnsweredElsewhere(Exception):
    """Another node has the result already: this is the answer to the request, and nothing is run."""

    def __init__(self, answer: Response) -> None:
        super().__init__("done at another node")
        self.answer = answer


class Registry(Protocol):
    """Few verbs. Errors that are answers (running elsewhere, other input) are raised as `AgentRefusal`."""

    async def claim(self, job_id: str, input_hash: str, lost: Callable[[], None]) -> None:
        """This node is to run it; raises if another one does (423) or has (AnsweredElsewhere). The registry renews the claim
        until `record` or `release`; `lost` is called if that fails: the job is stopped."""

    async def record(self, ended: EndedMarker, result: Path) -> None:
        """It has ended here, durably; the result may be copied from the file. Ends the claim."""

    async def release(self, job_id: str) -> None:
        """It did not come to an end here: others may run it."""

    async def find(self, job_id: str) -> Response | None:
        """What another node knows of it: its result, or a refusal that says where it runs."""
