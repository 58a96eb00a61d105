"""What a dispatcher decides, without I/O: which node a job goes to, whose word about a job counts, how often nodes are looked at.

Theory of operation. Dispatchers share nothing and decide alike: among nodes that are equally free, a job's own order of them
decides (rendezvous hashing: every dispatcher computes the same one, and a node more or less changes only its own jobs). So an id
that comes through two dispatchers at once mostly meets itself at one node, which runs it once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tasuki.core.failover.agent_protocol import AgentState
from tasuki.core.failover.events import JobSays
from tasuki.core.failover.node_ranking import NodeState, Ranked
from tasuki.core.ids import quoted
from tasuki.core.job import check_file_name
from tasuki.errors import InvalidInput

LOOK_BUSY_S = 0.25
LOOK_IDLE_S = 2.0
LOOKS_PER_PAUSE = 4  # so often is a node looked at during a pause as long as the one since the last request

_STATES = (
    AgentState.DONE, AgentState.RUNNING, AgentState.QUEUED, AgentState.FAILED, AgentState.TIMED_OUT, AgentState.INTERRUPTED,
)  # fmt: skip
"""Of what several nodes say of one job, the first of these counts."""
_is_input = re.compile(r"([0-9a-f]{64}):(.+)", re.DOTALL).fullmatch


class InputRef(msgspec.Struct, frozen=True):
    """A file of a job that lies in the store of inputs."""

    sha256: str
    name: str

    def __str__(self) -> str:
        return f"{self.sha256}:{self.name}"


def parse_input(text: str) -> InputRef:
    """The form field `input`: `SHA256:NAME`."""
    found = _is_input(text)
    if found is None:
        raise InvalidInput(f"input {quoted(text)} must be SHA256:NAME, the hash of a stored input and the name that the job sees")
    return InputRef(found[1], check_file_name(found[2]))


def rendezvous(job_id: str, nodes: Iterable[str]) -> list[str]:
    """The nodes in this job's own order."""
    return sorted(nodes, key=lambda node: hashlib.sha256(f"{job_id}\0{node}".encode()).digest())


def candidates(ranking: Sequence[Ranked], job_id: str) -> list[Ranked]:
    """Who may be sent the job, the best first. Of nodes that are left out, steady ones, and only if there are no others."""
    order = {node: place for place, node in enumerate(rendezvous(job_id, (line.node for line in ranking)))}

    def place(line: Ranked) -> tuple[int, bool, int, int]:
        return line.standing, line.free is None, -(line.free or 0), order[line.node]

    hopeful = [line for line in ranking if line.standing in (NodeState.FREE, NodeState.FULL, NodeState.UNKNOWN)]
    return sorted(hopeful or [line for line in ranking if line.steady], key=place)


def well(ranking: Sequence[Ranked]) -> list[Ranked]:
    """Whose places count: those that answer, and if there are none, those that would be used nevertheless. One that has answered
    counts as well while it is asked again: else an idle dispatcher would be unwell for a moment at each look."""
    answered = [
        line
        for line in ranking
        if line.standing in (NodeState.FREE, NodeState.FULL) or (line.standing is NodeState.UNKNOWN and line.free is not None)
    ]
    return answered or [line for line in ranking if line.steady]


def who_knows(job_id: str, said: Mapping[str, JobSays]) -> str | None:
    """Whose word counts, of those that know the job."""
    ranks = {str(state): rank for rank, state in enumerate(_STATES)}
    in_order = rendezvous(job_id, said)
    return min(in_order, key=lambda node: ranks.get(said[node].state, len(ranks)), default=None)


def look_every_s(idle_s: float, *, well: bool = True) -> float:
    """How old an answer of a node may become, when the last request was so long ago. Without a node that is `well`, not old."""
    if not well:
        return LOOK_BUSY_S
    return min(LOOK_IDLE_S, max(LOOK_BUSY_S, idle_s / LOOKS_PER_PAUSE))
