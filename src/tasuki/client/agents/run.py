"""Run of one job on node agents: drive its plan (core/failover/plan.py), and make the requests that the plan asks for.

Writes a part file beside the output, which becomes the output when it is complete.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from tasuki.client.agents.node import AgentNode, JobPost
from tasuki.client.agents.transfer import LARGE_BYTES, DownloadedResult, NodeRefused, RunProgress, RunRequest, TransferListener
from tasuki.clocks import now
from tasuki.core.failover import events
from tasuki.core.failover.events import FailoverJob
from tasuki.core.failover.nodes import Nodes
from tasuki.core.failover.plan import FailoverPlan
from tasuki.errors import InvalidInput, NoConnection, TasukiError, Unavailable, UntrustedCertificate
from tasuki.event_loop import BackgroundTasks

log = logging.getLogger(__name__)


class AgentResult(msgspec.Struct, frozen=True):
    """Result of a job. A program that failed has one too: see `outcome`."""

    job_id: str
    node: str
    """Node that ran the job, also behind a dispatcher."""
    outcome: str
    """succeeded, failed or timed_out"""
    exit_code: int | None
    error_code: str | None
    message: str
    path: Path | None
    """File of the ZIP; None if the node was lost before the result could be fetched."""
    size_bytes: int
    sha256: str
    cached: bool
    """The result was stored; nothing was run for it."""
    left_out: int = 0
    """Number of outputs that are not in the ZIP; its `result.json` names them."""

    @property
    def succeeded(self) -> bool:
        return self.outcome == "succeeded"


class SharedNodes(Protocol):
    """Nodes that all runs of a client share."""

    nodes: Nodes
    agents: dict[str, AgentNode]

    def check(self, node: str) -> asyncio.Task[None]: ...

    def remove_soon(self, node: str, job_id: str) -> None: ...


class AgentRun:
    """Run of one job: drives its plan, and makes the requests that the plan asks for."""

    def __init__(
        self,
        client: SharedNodes,
        job: FailoverJob,
        upload: RunRequest,
        target: Path,
        on_progress: Callable[[RunProgress], None] | None,
        on_note: Callable[[str], None] | None,
    ) -> None:
        self._client = client
        self._job = job
        self._upload = upload
        self._target = target
        self._on_progress = on_progress
        self._on_note = on_note
        self._plan = FailoverPlan(job, client.nodes)
        self._events: asyncio.Queue[events.Event] = asyncio.Queue()
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._asking = BackgroundTasks()
        self._results: dict[int, DownloadedResult] = {}
        self._posts = 0
        self._ended: events.Finish | None = None
        self._error: BaseException | None = None

    def notify(self, event: events.Event) -> None:
        self._events.put_nowait(event)

    async def drive(self) -> AgentResult:
        """Run until the plan is over."""
        try:
            self._apply(events.Begin())
            while not self._plan.over and self._error is None:
                wait_s = self._plan.due_at(now().monotonic) - now().monotonic
                try:
                    async with asyncio.timeout(max(0.0, wait_s)):
                        event = await self._events.get()
                except TimeoutError:
                    event = events.TimePassed()
                self._apply(event)
            return self._result()
        finally:
            await self._end_requests()

    def _apply(self, event: events.Event) -> None:
        for command in self._plan.apply(event, now().monotonic):
            self._execute(command)

    def _execute(self, command: events.Command) -> None:
        match command:
            case events.CheckNode():
                self._client.check(command.node)
            case events.Ask():
                task = self._asking.spawn(self._ask(command))
                task.add_done_callback(self._end_if_broken)
            case events.Post() | events.Fetch():
                self._posts += isinstance(command, events.Post)
                task = self._requests[command.ticket] = asyncio.create_task(self._request(command))
                task.add_done_callback(self._end_if_broken)
            case events.Drop():
                if command.ticket in self._requests:  # a run that is only polled has none
                    self._requests[command.ticket].cancel()
            case events.Remove():
                self._client.remove_soon(command.node, self._job.job_id)
            case events.Notify():
                self._log(command.text)
            case events.Finish():
                self._ended = command
            case events.GiveUp():
                self._error = command.error

    def _log(self, text: str) -> None:
        log.info("job %s: %s", self._job.job_id, text, extra={"job_id": self._job.job_id})
        if self._on_note is not None:
            self._on_note(text)

    # ------------------------------------------------------------------------------------------------ requests

    def _end_if_broken(self, task: asyncio.Task[None]) -> None:
        """End the run when a request fails by a defect, which the plan would take for silence."""
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()
            self.notify(events.TimePassed())

    async def _ask(self, command: events.Ask) -> None:
        try:
            view = await self._client.agents[command.node].ask(self._job.job_id)
        except (TasukiError, NodeRefused) as error:
            alive = isinstance(error, NodeRefused) and bool(error.refusal.code) and error.refusal.status == 503
            self.notify(events.JobStatusMissing(command.ticket, str(error), gone=isinstance(error, NoConnection), alive=alive))
            return
        self.notify(events.JobStatusReceived(command.ticket, view.status if view is not None else None))
        if view is not None and view.status.state == "running":
            self._progress(RunProgress("run", command.node, fraction=view.fraction, message=view.message))

    async def _request(self, command: events.Post | events.Fetch) -> None:
        ticket = command.ticket
        agent = self._client.agents[command.node]
        listener = TransferListener(ticket, command.node, self._upload.size_bytes, self.notify, self._progress)
        try:
            if isinstance(command, events.Post):
                post = JobPost(self._job.job_id, self._upload, self._target, listener, self._job.limit_s)
                result = await agent.post(post, self._ask_from_bytes(command.node))
            else:
                result = await agent.fetch(self._job.job_id, self._target, listener)
        except NodeRefused as error:
            self.notify(events.Refused(ticket, error.refusal))
        except UntrustedCertificate as error:  # after a redirect the request is lost: the next one may lead elsewhere
            lost = events.RequestLost(ticket, error.message)
            self.notify(lost if listener.is_redirected else events.Refused(ticket, events.not_trusted(error.message)))
        except Unavailable as error:
            self.notify(events.RequestLost(ticket, error.message))
        except (TasukiError, OSError) as error:  # with a file of this machine: another node would not help
            self._error = error if isinstance(error, TasukiError) else self._unwritable(error)
            self.notify(events.TimePassed())
        else:
            self._results[ticket] = result
            self.notify(events.Saved(ticket, result.ended))

    def _ask_from_bytes(self, node: str) -> int | None:
        """Return the size from which on files are asked for. After a first post, to any dispatcher, that is every file."""
        capacity = self._client.nodes.capacity(node)
        if capacity is None or not capacity.inputs:
            return None
        return LARGE_BYTES if self._posts == 1 else 0

    def _unwritable(self, error: OSError) -> TasukiError:
        return InvalidInput(
            f"job {self._job.job_id}: its result cannot be saved as {str(self._target)!r}: {error.strerror or error}"
        )

    def _progress(self, progress: RunProgress) -> None:
        if self._on_progress is not None:
            self._on_progress(progress)

    # ------------------------------------------------------------------------------------------------ the end

    def _result(self) -> AgentResult:
        if self._error is not None:
            raise self._error
        assert self._ended is not None
        ended, result = self._ended.ended, None
        if self._ended.ticket is not None:
            result = self._results.pop(self._ended.ticket)
            try:
                result.part.publish(self._target)
            except OSError as error:
                result.part.discard()
                raise self._unwritable(error) from None
        return AgentResult(
            job_id=self._job.job_id,
            node=result.node or self._ended.node if result is not None else self._ended.node,
            outcome=ended.outcome,
            exit_code=ended.exit_code,
            error_code=ended.error_code,
            message=ended.message,
            path=self._target if result is not None else None,
            size_bytes=result.size_bytes if result is not None else 0,
            sha256=result.sha256 if result is not None else "",
            cached=result is not None and (result.cached or not self._posts),
            left_out=result.left_out if result is not None else 0,
        )

    async def _end_requests(self) -> None:
        tasks = [*self._requests.values(), *self._asking]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for result in self._results.values():  # those that were not needed
            result.part.discard()
