"""Jobs of node agents for commands that know jobs of a server: `tasuki status`, `list`, `result`, `logs` and `cancel`.

Has the methods of AsyncClient that these commands use, with the same views. A job has the state of the node whose report counts:
done is SUCCEEDED; INTERRUPTED has no result, and runs again when it is sent again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from tasuki.client.agents.client import AsyncAgentsClient
from tasuki.client.agents.node import AgentNode, JobView, NodeJob
from tasuki.client.agents.transfer import NodeRefused, TransferListener
from tasuki.client.types import CancelAnswer
from tasuki.core.backoff import Backoff
from tasuki.core.failover.agent_protocol import LISTED_MAX, AgentState
from tasuki.core.failover.events import answers_in_words
from tasuki.core.failover.nodes import authoritative_node
from tasuki.core.job import BlobRef, Outcome, State, check_job_id
from tasuki.core.protocol import JobResult
from tasuki.core.units import shown_duration
from tasuki.errors import DeadlineExceeded, InvalidInput, NotFound, TasukiError, Unavailable

log = logging.getLogger(__name__)
T = TypeVar("T")
INTERRUPTED = "INTERRUPTED"
STOP_S = 60.0  # a node answers when the program has ended
_STATES = {
    AgentState.QUEUED: "PENDING",
    AgentState.RUNNING: "RUNNING",
    AgentState.DONE: "SUCCEEDED",
    AgentState.FAILED: "FAILED",
    AgentState.TIMED_OUT: "TIMED_OUT",
    AgentState.INTERRUPTED: INTERRUPTED,
}
_UNDER_WAY = ("PENDING", "RUNNING")


class _NodeAnswers(NamedTuple):
    """Answers of all nodes to one question, and the problems of those that gave none."""

    given: dict[str, Any]
    problems: dict[str, str]


class AgentJobHandle(NamedTuple):
    """Handle of one job."""

    client: AgentJobsClient
    job_id: str

    async def outcome(self, timeout_s: float | None = None) -> JobResult:
        """Return how the job ended, when it has; DeadlineExceeded."""
        backoff = Backoff(0.1, 2.0)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    view = await self.client.status(self.job_id)
                    if view["state"] not in _UNDER_WAY:
                        break
                    await asyncio.sleep(backoff.next_s())
        except TimeoutError:
            waited = shown_duration(timeout_s or 0.0)
            raise DeadlineExceeded(f"job {self.job_id} has not ended after {waited}; it goes on") from None
        outcome = view["outcome"]
        state = State(view["state"]) if view["state"] != INTERRUPTED else State.FAILED
        sha256 = outcome["result_sha256"]
        return JobResult(
            job_id=self.job_id,
            state=state,
            attempt=view["attempt"],
            outcome=Outcome(
                exit_code=outcome["exit_code"],
                error_code=outcome["error_code"],
                message=outcome["message"],
                result_ref=BlobRef(sha256, outcome["result_bytes"]) if sha256 else None,
                result_sha256=sha256,
                meta=outcome["meta"],
            ),
        )


class AgentJobsClient:
    """Client of the jobs of several node agents or dispatchers."""

    welcome = None
    connected = True

    def __init__(self, client: AsyncAgentsClient) -> None:
        self._client = client
        self._at: dict[str, str] = {}
        """Node whose report about a job counts."""

    async def open(self) -> None:
        """Do nothing: connections are made with the requests."""

    async def close(self) -> None:
        """Do nothing: the other client is closed by its owner."""

    def beside(self, url: str, connect_timeout_s: float) -> None:
        """Return None: no node knows of servers."""

    def job(self, job_id: str) -> AgentJobHandle:
        return AgentJobHandle(self, check_job_id(job_id))

    # ------------------------------------------------------------------------------------------------ questions

    async def call(self, verb: str, /, **params: Any) -> Any:
        """Answer the requests `get`, `find` and `logs` as a server does."""
        match verb:
            case "get":
                result = params.get("result", False)
                return [await self.status(job_id, result=result) for job_id in params["job_ids"]]
            case "find":
                return await self._find(**params)
            case _:
                assert verb == "logs"
                return await self._logs(**params)

    async def status(self, job_id: str, *, result: bool = False) -> dict[str, Any]:
        """Return the view of a job; NotFound, Unavailable. `result`: for a reader that knows only the states of a server."""
        check_job_id(job_id)
        answers = await self._ask_all(lambda agent: agent.ask(job_id))
        views: dict[str, JobView] = {node: view for node, view in answers.given.items() if view is not None}
        node = authoritative_node(job_id, {node: view.status for node, view in views.items()})
        if node is None and answers.problems:
            raise Unavailable(f"no node knows job {job_id}, and some could not be asked: {answers_in_words(answers.problems)}")
        if node is None:
            raise NotFound(f"no node knows job {job_id}")
        self._at[job_id] = node
        view = _view(job_id, msgspec.json.decode(views[node].body, type=NodeJob))
        return {**view, "state": State.FAILED.value} if result and view["state"] == INTERRUPTED else view

    async def _find(self, *, limit: int, cursor: str | None, states: Sequence[str] = (), **others: Any) -> dict[str, Any]:
        """Return the newest jobs of all nodes. Nodes that cannot be asked are logged."""
        if cursor is not None or others:
            raise InvalidInput("node agents list their jobs by --state and --limit alone; the other filters need a server")
        wanted = [str(state) for state, name in _STATES.items() if name in states]
        if states and not wanted:
            return {"jobs": [], "cursor": None}
        query = "&".join([f"limit={min(limit, LISTED_MAX)}", *(f"state={state}" for state in wanted)])
        answers = await self._ask_all(lambda agent: agent.jobs(f"?{query}"))
        if not answers.given:
            raise Unavailable(f"no node could be asked: {answers_in_words(answers.problems)}")
        for node, problem in answers.problems.items():
            log.warning("the jobs of %s are not shown: %s", node, problem)
        listed = {(job.job_id, job.node): job for jobs in answers.given.values() for job in jobs}  # once behind two dispatchers
        views = [_view(job.job_id, job) for job in listed.values()]
        newest = sorted(views, key=lambda job: job["started_at"] or float("inf"), reverse=True)
        return {"jobs": newest[:limit], "cursor": None}

    async def _logs(self, job_id: str, **params: Any) -> dict[str, Any]:
        """Answer the request of a LogFollower."""
        view = await self.status(job_id)
        progress = {"progress": view["progress"], "progress_text": view["progress_text"]}
        state = view["state"] if view["state"] != INTERRUPTED else "FAILED"
        ended = {"offset": params["offset"], "data": b"", "state": state, "attempt": view["attempt"], "ended": True}
        if view["state"] != "RUNNING":
            return ended if view["state"] != "PENDING" else {**ended, "ended": False}
        try:
            node = self._client.agents[self._at[job_id]]
            piece = await node.read_log(job_id, params["stream"], params["offset"], params["wait_s"])
        except NodeRefused as error:
            if error.refusal.status == 404:  # it has ended just now, and its node does not keep it
                return {**ended, **progress}
            raise Unavailable(str(error)) from None
        data = piece.data[: params["max_bytes"]]
        facts = {"offset": piece.offset, "cut_bytes": piece.cut_bytes, "end": piece.end, "attempt": piece.attempt}
        return {**facts, "data": data, "ended": piece.ended, "state": state, "complete": True, **progress}

    # ------------------------------------------------------------------------------------------------ actions

    async def save_result(
        self, ended: JobResult, path: str | os.PathLike[str], progress: Callable[[int], None] | None = None
    ) -> int:
        """Download the result of a job whose status was asked for; return its size. Agents tell no progress."""
        target, node = Path(path), self._at[ended.job_id]
        listener = TransferListener(0, node, 0, lambda event: None, lambda progress: None)
        try:
            result = await self._client.agents[node].fetch(ended.job_id, target, listener)
        except NodeRefused as error:
            raise Unavailable(f"{node}: {error}") from None
        result.part.publish(target)
        return result.size_bytes

    async def cancel(self, *job_ids: str, reason: str = "") -> dict[str, CancelAnswer]:
        """Stop jobs that run, at all nodes; what has ended stays. Agents keep no reason."""
        return {job_id: await self._cancel(check_job_id(job_id)) for job_id in job_ids}

    async def _cancel(self, job_id: str) -> CancelAnswer:
        answers = await self._ask_all(lambda agent: agent.remove(job_id, only_running=True, answer_s=STOP_S))
        if any(answers.given.values()):
            return CancelAnswer(State.CANCELED)
        state = (await self.status(job_id))["state"]
        if state in _UNDER_WAY:
            raise Unavailable(f"job {job_id} still runs, it could not be stopped: {answers_in_words(answers.problems)}")
        return CancelAnswer(state)

    async def _ask_all(self, question: Callable[[AgentNode], Awaitable[T]]) -> _NodeAnswers:
        nodes = self._client.agents
        ended = await asyncio.gather(*map(question, nodes.values()), return_exceptions=True)
        given, problems = {}, {}
        for node, answer in zip(nodes, ended, strict=True):
            if isinstance(answer, TasukiError | NodeRefused):
                problems[node] = str(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                given[node] = answer
        return _NodeAnswers(given, problems)


def _view(job_id: str, job: NodeJob) -> dict[str, Any]:
    """Return the answer of a node as the view of a server's job."""
    state = _STATES[AgentState(job.state)] if job.state in set(AgentState) else job.state.upper()
    progress = job.progress
    outcome = None
    if state not in _UNDER_WAY:
        failed = {INTERRUPTED: INTERRUPTED, "SUCCEEDED": None}.get(state, "EXIT_CODE")
        outcome = {
            "exit_code": job.exit_code,
            "error_code": job.error_code or failed,
            "message": job.message or ("its agent ended while it ran; send it again" if state == INTERRUPTED else ""),
            "result_sha256": job.result_sha256,
            "result_bytes": job.result_bytes or 0,
            "result_is_blob": job.result_sha256 is not None,
            "result": None,
            "meta": {"left_out": job.left_out},
        }
    return {
        "job_id": job_id,
        "state": state,
        "exec": job.exec,
        "args": [],
        "subject": "",
        "node": job.node,
        "assigned_worker_id": job.node,
        "attempt": job.attempt or 0,
        "failures": 0,
        "losses": 0,
        "input": job.input,
        "created_at": job.started_at,
        "started_at": job.started_at,
        "finished_at": job.ended_at,
        "progress": progress.fraction if progress is not None else None,
        "progress_text": (progress.message if progress is not None else None) or "",
        "outcome": outcome,
    }
