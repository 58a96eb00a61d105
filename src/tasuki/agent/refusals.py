"""What an agent refuses, as errors that know their status: the table of the contract, and nothing else."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from tasuki.core.failover import agent_protocol
from tasuki.doors.http import exchange as http_answers
from tasuki.doors.http.exchange import envelope, error_answer, json_answer
from tasuki.errors import AgentRefusal, NotFound, RegistryUnavailable, TasukiError

RETRY_AFTER_S = 1
LOCKED = 423


def is_running(job_id: str, node: str, since: float) -> AgentRefusal:
    message = f"job {job_id} is running at {node}; ask again later for its result"
    return AgentRefusal(LOCKED, agent_protocol.RUNNING, message, retry=True, job_id=job_id, node=node, since=since)


def is_queued(job_id: str, dispatcher: str, since: float) -> AgentRefusal:
    message = f"job {job_id} waits at {dispatcher} for a node; ask again later for its result"
    return AgentRefusal(
        LOCKED, agent_protocol.RUNNING, message, retry=True, job_id=job_id, node=dispatcher, since=since, state="queued"
    )


def is_full(running: int, limit: int) -> AgentRefusal:
    message = f"all {limit} slots are taken; try another node, or later"
    return AgentRefusal(503, agent_protocol.FULL, message, retry=True, running=running, limit=limit)


def is_draining() -> AgentRefusal:
    return AgentRefusal(
        503, agent_protocol.DRAINING, "this agent is going down and takes no new jobs; try another node", retry=True
    )


def has_no_folder() -> AgentRefusal:
    message = "the data folder of this agent cannot be used any more; put it in order, and start the agent again"
    return AgentRefusal(503, "UNAVAILABLE", message, retry=True)


def other_input(job_id: str) -> AgentRefusal:
    message = f"job {job_id} exists with another input; use a new job_id, or send exactly the same files, exec and args"
    return AgentRefusal(409, "CONFLICT", message, job_id=job_id)


def was_canceled(job_id: str) -> AgentRefusal:
    return AgentRefusal(409, agent_protocol.CANCELED, f"job {job_id} was removed meanwhile", job_id=job_id)


def still_stopping(job_id: str, node: str) -> AgentRefusal:
    message = f"job {job_id} is being stopped at {node}, and has not ended yet; ask again later"
    return AgentRefusal(503, "UNAVAILABLE", message, retry=True, job_id=job_id, node=node)


def claim_lost(job_id: str) -> AgentRefusal:
    message = f"job {job_id} was stopped here, because this node could not renew its claim to it; ask again"
    return AgentRefusal(503, "UNAVAILABLE", message, retry=True, job_id=job_id)


def registry_away() -> RegistryUnavailable:
    message = "the registry of this agent does not answer; jobs that run go on, new ones are not taken: try again later"
    return RegistryUnavailable(503, "UNAVAILABLE", message, retry=True)


def result_away(job_id: str, node: str, why: TasukiError) -> AgentRefusal:
    if isinstance(why, NotFound):
        return AgentRefusal(404, NotFound.code, f"the result of job {job_id} is not kept any more; send the job again to run it")
    message = f"the result of job {job_id} is at {node}, which cannot be asked now; try again later"
    return AgentRefusal(503, "UNAVAILABLE", message, retry=True, job_id=job_id, node=node)


def program_failed(ended: agent_protocol.EndedMarker) -> AgentRefusal:
    """The program's own end. Its ZIP is kept."""
    if ended.outcome is agent_protocol.AgentOutcome.TIMED_OUT:
        status, code = 504, agent_protocol.TIMED_OUT
    else:
        status, code = 500, agent_protocol.PROGRAM_FAILED
    facts: dict[str, Any] = {"job_id": ended.job_id, "exit_code": ended.exit_code, "error_code": ended.error_code}
    return AgentRefusal(status, code, f"{ended.message}; its logs and files are at /result/{ended.job_id}", **facts)


def code_of(error: TasukiError) -> str:
    return error.code if isinstance(error, AgentRefusal) else http_answers.code_of(error)


def refusal_answer(error: TasukiError) -> Response:
    """The answer to any error that was raised on purpose."""
    if not isinstance(error, AgentRefusal):
        answer = error_answer(error)
        if "Connection" in answer.headers:
            del answer.headers["Connection"]  # whoever still sends must come to read this: see `EarlyAnswer`
        return answer
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.retry else {}
    return json_answer(envelope(error.code, error.message, error.details()), error.status, headers)
