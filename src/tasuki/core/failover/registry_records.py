"""Records of node agents and dispatchers in a store that they share: a run is a job, the right to run it a lease. Pure.

Between two transactions a job of the registry has a lease or has ended; it is never PENDING. Submit and grant are one
turn, and there are no retries and no losses: an attempt without a result ends its job, and the next request with its id reruns it
(`on_failed="rerun"`). So no worker that shares the store can be granted one by its patterns, and no delay stands between a node's
death and the next run. A lease by job_id ends one that has expired, without waiting for the reaper.

    free ──► QUEUED ──► HELD ──► ended      QUEUED is a lease of a dispatcher, which has the input and looks for a node
      └─────────────────►┘                  HELD is a lease of a node, which runs the job

A dispatcher's lease is a soft claim: it is never started, and a node that has the input takes it over by releasing it in the turn
of its own claim. So a dispatcher that was killed blocks nobody, and a node need not ask it. The `attempt` of agents is the
generation of the job; the attempt of the store also counts the leases of dispatchers.

The end is an `EndedMarker` in the meta of the outcome, with the address of the node that has the folder. The result is in the
outcome if it is small, else in the blob store, else only at that node. A proof, which only a process with the agents' token can
make, stands beside the address: whoever writes to the store cannot lead an agent, and with it the token, to another address.
"""

from __future__ import annotations

import enum
import hmac
import re

import msgspec
from msgspec.structs import replace

from tasuki.core.decoding import decodable
from tasuki.core.failover.agent_protocol import AgentOutcome, AgentState, EndedMarker
from tasuki.core.job import BlobRef, Job, JobSpec, Outcome, State, body_hash, check_job_id, check_sha256
from tasuki.core.store_messages import HeldLease, Submission
from tasuki.errors import InvalidInput

SUBJECT = "agents.run"
SUBMITTER = "agents"
INTERRUPTED = "INTERRUPTED"
DISPATCHER = "dispatcher."
"""Prefix of the worker_id of dispatchers; no node has it."""
NAME_MAX_CHARS = 40
ID_CHARS = 8
"""Length of the id that distinguishes two nodes of one name."""


class ResultLocation(msgspec.Struct, frozen=True):
    """End of a job, and the address of the node that has the result."""

    ended: EndedMarker
    address: str
    proof: str = ""

    def proven(self, token: str) -> ResultLocation:
        """Return this location with the proof that its writer knows the token."""
        ended = self.ended
        stated = ("result", self.address, ended.job_id, ended.node, ended.attempt, ended.result_sha256, ended.result_bytes)
        return replace(self, proof=hmac.digest(token.encode(), msgspec.json.encode(stated), "sha256").hex())

    def proves(self, token: str) -> bool:
        return hmac.compare_digest(self.proof.encode(), self.proven(token).proof.encode())


@decodable
class Meta(msgspec.Struct, frozen=True):
    """Meta of an outcome, as agents write it."""

    agent: ResultLocation


class RegistryState(enum.Enum):
    """State of a job in the registry, for a node that is sent the job."""

    FREE = enum.auto()
    QUEUED = enum.auto()
    HELD = enum.auto()
    DONE = enum.auto()
    OTHER_INPUT = enum.auto()


def worker_id_of(node: str, node_id: str) -> str:
    """Return the worker_id of a node: its name, and the id of its data folder."""
    return f"{re.sub(r'[^A-Za-z0-9_-]', '-', node)[:NAME_MAX_CHARS]}-{node_id}"


def dispatcher_id_of(name: str, own_id: str) -> str:
    return DISPATCHER + worker_id_of(name, own_id)


def node_of(worker_id: str) -> str:
    return worker_id[: -ID_CHARS - 1]


def is_queued(job: Job) -> bool:
    """Return whether a job waits at a dispatcher, or, after an operator's requeue, for the next request."""
    if job.state is State.PENDING:
        return True
    return job.state is State.ASSIGNED and job.lease is not None and job.lease.worker_id.startswith(DISPATCHER)


def attempt_of(job: Job) -> int:
    """Return the number of the attempt. A wait at a dispatcher and the run that follows are one attempt."""
    return job.generation + 1


def held_of(job: Job) -> HeldLease:
    """Return the current lease of a job."""
    lease = job.lease
    assert lease is not None
    return HeldLease(job.job_id, lease.worker_id, lease.incarnation, lease.lease_id, lease.attempt)


def submission_of(job_id: str, exec_: str, input_hash: str) -> Submission:
    """Return the job, whose body is its input hash (exec, arguments, files): another input is a Conflict."""
    spec = JobSpec(job_id=job_id, subject=SUBJECT, exec=exec_, payload=input_hash.encode(), max_retries=0, max_losses=0)
    return Submission(spec, SUBMITTER, body_hash(spec))


def is_agent_job(job: Job) -> bool:
    """Return whether this is a job of agents; a store that servers share has other jobs too."""
    return job.submitter == SUBMITTER and job.spec.subject == SUBJECT


def input_of(job: Job) -> str:
    return job.spec.payload.decode("ascii", "replace")


def registry_state_of(job: Job | None, sent_input: str | None) -> RegistryState:
    """Return the state for a request with this input (None: not known yet)."""
    if job is None:
        return RegistryState.FREE
    if sent_input is not None and input_of(job) != sent_input:
        return RegistryState.OTHER_INPUT
    if job.lease is not None and not job.state.terminal:
        return RegistryState.QUEUED if is_queued(job) else RegistryState.HELD
    return RegistryState.DONE if job.state is State.SUCCEEDED else RegistryState.FREE


def outcome_of(place: ResultLocation, *, result: bytes | None = None, is_blob: bool = False) -> Outcome:
    """Return the outcome to record, with the result in it, or as a stored blob."""
    ended = place.ended
    failed = ended.outcome is not AgentOutcome.SUCCEEDED
    return Outcome(
        exit_code=ended.exit_code,
        error_code=(ended.error_code or ended.outcome.value.upper()) if failed else None,
        message=ended.message,
        result=result,
        result_ref=BlobRef(ended.result_sha256, ended.result_bytes) if is_blob else None,
        result_sha256=ended.result_sha256,
        meta=msgspec.to_builtins(Meta(place)),
    )


def interrupted(node: str) -> Outcome:
    """Return the outcome of an attempt without an end."""
    return Outcome(error_code=INTERRUPTED, message=f"it did not come to its end at node {node}; send it again to run it")


def given_up(dispatcher: str) -> Outcome:
    """Return the outcome of a wait at a dispatcher without a run."""
    return Outcome(error_code=INTERRUPTED, message=f"{dispatcher} found no node for it; send it again to run it")


def removed(by: str) -> Outcome:
    """Return the outcome of a job whose result was removed."""
    return Outcome(error_code=INTERRUPTED, message=f"it was removed by {by}; send it again to run it")


def result_location_of(job: Job) -> ResultLocation | None:
    """Return the end of a job that has a result, else None."""
    if not job.state.terminal or job.outcome is None:
        return None
    try:
        place = msgspec.convert(job.outcome.meta, Meta).agent
        check_sha256(place.ended.result_sha256)  # it becomes a header, and the job_id a part of a path
        return place if check_job_id(place.ended.job_id) == job.job_id else None
    except (msgspec.ValidationError, InvalidInput):  # interrupted, lost, or canceled; or written by somebody else
        return None


def state_of(job: Job) -> AgentState:
    """Return the state of a job in the terms of agents."""
    if not job.state.terminal:
        return AgentState.QUEUED if is_queued(job) else AgentState.RUNNING
    place = result_location_of(job)
    return AgentState.INTERRUPTED if place is None else place.ended.outcome.state
