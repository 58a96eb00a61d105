"""What node agents and dispatchers write into a store that they share: a run is a job, the right to run it a lease. Pure.

Between two transactions a job of the registry is held by somebody or has ended; it is never PENDING. Submit and grant are one
turn, and there are no retries and no losses: an attempt that came to nothing ends its job, and whoever is sent it again sets it
going again (`on_failed="rerun"`). So no worker that shares the store can be granted one by its patterns, and no delay stands
between a node's death and the next run. A lease by job_id ends one that is over, without waiting for the reaper.

    free ──► QUEUED ──► HELD ──► ended      QUEUED is a lease of a dispatcher, which has the input and looks for a node
      └─────────────────►┘                  HELD is one of a node, which runs it

A dispatcher's lease is a soft claim: it is never started, and whoever else has the input takes it over by releasing it in the
turn of its own claim. So a dispatcher that was killed blocks nobody, and a node need not ask it. What others call `attempt` is
how often the job was set going, its generation; the store's own attempt also counts the leases of dispatchers.

How it ended is an `EndedMarker` in the outcome's meta, with the address of the node that has the folder. The result itself is in
the outcome where it is small, else among the blobs, else only at that node.
"""

from __future__ import annotations

import enum
import re

import msgspec

from tasuki.core.failover.agent_protocol import AgentOutcome, AgentState, EndedMarker
from tasuki.core.job import BlobRef, Job, JobSpec, Outcome, State, body_hash
from tasuki.core.store_messages import HeldLease, Submission

SUBJECT = "agents.run"
SUBMITTER = "agents"
INTERRUPTED = "INTERRUPTED"
DISPATCHER = "dispatcher."
"""How the worker_id of a dispatcher begins; no node's does."""
NAME_MAX_CHARS = 40
ID_CHARS = 8
"""Of what tells two nodes of one name apart."""


class ResultLocation(msgspec.Struct, frozen=True):
    """An end, and where the node that has it can be asked."""

    ended: EndedMarker
    address: str


class Meta(msgspec.Struct, frozen=True):
    """The meta of an outcome, as agents write it."""

    agent: ResultLocation


class RegistryState(enum.Enum):
    """What the registry says of a job, to a node that is asked for it."""

    FREE = enum.auto()
    QUEUED = enum.auto()
    HELD = enum.auto()
    DONE = enum.auto()
    OTHER_INPUT = enum.auto()


def worker_id_of(node: str, node_id: str) -> str:
    """Who holds a lease: the node's name, for people, and what makes it the only one of that name."""
    return f"{re.sub(r'[^A-Za-z0-9_-]', '-', node)[:NAME_MAX_CHARS]}-{node_id}"


def dispatcher_id_of(name: str, own_id: str) -> str:
    return DISPATCHER + worker_id_of(name, own_id)


def node_of(worker_id: str) -> str:
    return worker_id[: -ID_CHARS - 1]


def is_queued(job: Job) -> bool:
    """It waits at a dispatcher; or, after an operator's requeue, for whoever is sent it."""
    if job.state is State.PENDING:
        return True
    return job.state is State.ASSIGNED and job.lease is not None and job.lease.worker_id.startswith(DISPATCHER)


def attempt_of(job: Job) -> int:
    """How often it was set going. A wait at a dispatcher and the run that comes of it are one attempt."""
    return job.generation + 1


def held_of(job: Job) -> HeldLease:
    """The claim of whoever holds it, as the registry has it."""
    lease = job.lease
    assert lease is not None
    return HeldLease(job.job_id, lease.worker_id, lease.incarnation, lease.lease_id, lease.attempt)


def submission_of(job_id: str, exec_: str, input_hash: str) -> Submission:
    """The job, whose body is its input: another input is a Conflict. The hash covers exec, arguments and files."""
    spec = JobSpec(job_id=job_id, subject=SUBJECT, exec=exec_, payload=input_hash.encode(), max_retries=0, max_losses=0)
    return Submission(spec, SUBMITTER, body_hash(spec))


def is_agent_job(job: Job) -> bool:
    """A store that servers use too has their jobs as well."""
    return job.submitter == SUBMITTER and job.spec.subject == SUBJECT


def input_of(job: Job) -> str:
    return job.spec.payload.decode("ascii", "replace")


def registry_state_of(job: Job | None, sent_input: str | None) -> RegistryState:
    """Before anything is read (None: the input is not known yet)."""
    if job is None:
        return RegistryState.FREE
    if sent_input is not None and input_of(job) != sent_input:
        return RegistryState.OTHER_INPUT
    if job.lease is not None and not job.state.terminal:
        return RegistryState.QUEUED if is_queued(job) else RegistryState.HELD
    return RegistryState.DONE if job.state is State.SUCCEEDED else RegistryState.FREE


def outcome_of(ended: EndedMarker, address: str, *, result: bytes | None = None, is_blob: bool = False) -> Outcome:
    """What is recorded of an end, with its result in it, or as a blob that is stored."""
    failed = ended.outcome is not AgentOutcome.SUCCEEDED
    return Outcome(
        exit_code=ended.exit_code,
        error_code=(ended.error_code or ended.outcome.value.upper()) if failed else None,
        message=ended.message,
        result=result,
        result_ref=BlobRef(ended.result_sha256, ended.result_bytes) if is_blob else None,
        result_sha256=ended.result_sha256,
        meta=msgspec.to_builtins(Meta(ResultLocation(ended, address))),
    )


def interrupted(node: str) -> Outcome:
    """Of an attempt that came to no end."""
    return Outcome(error_code=INTERRUPTED, message=f"it did not come to its end at node {node}; send it again to run it")


def given_up(dispatcher: str) -> Outcome:
    """Of a wait at a dispatcher that came to no run."""
    return Outcome(error_code=INTERRUPTED, message=f"{dispatcher} found no node for it; send it again to run it")


def removed(by: str) -> Outcome:
    """Of a job whose result is to be none any more."""
    return Outcome(error_code=INTERRUPTED, message=f"it was removed by {by}; send it again to run it")


def result_location_of(job: Job) -> ResultLocation | None:
    """How it ended, if it did with a result."""
    if not job.state.terminal or job.outcome is None:
        return None
    try:
        return msgspec.convert(job.outcome.meta, Meta).agent
    except msgspec.ValidationError:  # it was interrupted, lost, or canceled by somebody else
        return None


def state_of(job: Job) -> AgentState:
    """In the words of an agent."""
    if not job.state.terminal:
        return AgentState.QUEUED if is_queued(job) else AgentState.RUNNING
    place = result_location_of(job)
    return AgentState.INTERRUPTED if place is None else place.ended.outcome.state
