"""Nodes of a client or dispatcher: circuit breakers, the ranking, and the choice of a node for a job. Pure.

Theory of operation. All nodes are checked at once (`/health` and `/capacity`), and all runs of a client share the answers. A
ranking waits RANK_WAIT_S for answers: a node that is late enters the ranking when it answers, and a node that never answers fails
at the driver's own time limit. So a frozen node delays nobody. Nodes with most free slots come first. A job that was sent to a
node since its last check counts as taken. Equal nodes stand in an order of each client's own, so that clients spread.

A node that failed is left out for `left_out_s`, counted from the last failure. To come back it also needs `good_checks` good
health checks in a row. Checks that follow each other faster than `check_spacing_s` count once: many callers who check at the same
moment do not prove that a node has been well for a while. A caller without any other node may use one that is `steady` before its
time is over.

Dispatchers share nothing and decide alike: among nodes that are equally free, a job's own order decides (rendezvous hashing:
every dispatcher computes the same order, and one node more or less changes only its own jobs). So an id that comes through two
dispatchers at once mostly goes to one node, which runs it once. Times are seconds of one clock, the caller's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum, StrEnum

import msgspec

from tasuki.core.decoding import decodable
from tasuki.core.failover.agent_protocol import AgentState
from tasuki.core.failover.events import NodeJobStatus, Refusal
from tasuki.core.job import check_file_name
from tasuki.errors import InvalidInput, quoted

# ------------------------------------------------------------------------------------------------ the breaker

REASON_MAX_CHARS = 300


class BreakerRules(msgspec.Struct, frozen=True):
    """Rules of a breaker."""

    left_out_s: float = 30.0
    failures: int = 1
    """Failures in a row that leave a node out."""
    good_checks: int = 3
    """Good health checks in a row that let a node come back."""
    check_spacing_s: float = 0.2


DEFAULT_RULES = BreakerRules()


class BreakerState(StrEnum):
    CLOSED = "closed"
    """In use."""
    OPEN = "open"
    """Left out."""
    HALF_OPEN = "half-open"
    """The time is over; the node still has to pass health checks."""


class BreakerNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of a breaker for another process; its times count from the moment of writing."""

    failures: int = 0
    good_checks: int = 0
    left_out_s: float | None = None
    """Seconds left; zero or less: the time is over. None: the node is not left out."""
    reason: str = ""


class Breaker:
    """Circuit breaker of one node: records failures, health checks and answers, and tells if the node is left out."""

    def __init__(self, rules: BreakerRules = DEFAULT_RULES) -> None:
        self.reason = ""
        """Reason of the last failure."""
        self.good_checks = 0
        """Good checks in a row since the last failure."""
        self._rules = rules
        self._failures = 0
        self._until: float | None = None
        self._counted_at: float | None = None

    def state(self, now: float) -> BreakerState:
        if self._until is None or (self.steady and now >= self._until):
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._until else BreakerState.HALF_OPEN

    @property
    def steady(self) -> bool:
        """The node has passed enough checks in a row to come back."""
        return self.good_checks >= self._rules.good_checks

    def left_out_s(self, now: float) -> float:
        """Return the seconds for which the node is still left out, whatever its health."""
        return 0.0 if self._until is None else max(0.0, self._until - now)

    def failed(self, now: float, reason: str) -> None:
        """Record a failed request or a bad health check."""
        self._close_if_due(now)
        self._failures += 1
        self.good_checks = 0
        self._counted_at = None
        self.reason = reason[:REASON_MAX_CHARS]
        if self._until is not None or self._failures >= self._rules.failures:
            self._until = now + self._rules.left_out_s

    def checked(self, now: float) -> None:
        """Record a good health check."""
        spaced = self._counted_at is None or now - self._counted_at >= self._rules.check_spacing_s
        if self._until is not None and not self.steady and spaced:
            self._counted_at = now
            self.good_checks += 1
        self._close_if_due(now)

    def answered(self, now: float) -> None:
        """Record a good answer. A request that was under way at a failure proves nothing: only a steady node comes back."""
        self._close_if_due(now)
        if self._until is None or self.steady:
            self._until = None
            self._failures = 0

    def _close_if_due(self, now: float) -> None:
        if self._until is not None and self.state(now) is BreakerState.CLOSED:
            self._until = None
            self._failures = 0

    # ------------------------------------------------------------------------------------------------ written down

    def note(self, now: float) -> BreakerNote | None:
        """Return the state for another process; None if there is nothing to keep."""
        if self._until is None and not self._failures:
            return None
        left_out_s = None if self._until is None else self._until - now
        return BreakerNote(self._failures, self.good_checks, left_out_s, self.reason)

    def recall(self, note: BreakerNote, now: float) -> None:
        """Restore a state. A clock that was set meanwhile must not leave a node out for years."""
        self._failures = max(0, note.failures)
        self.good_checks = max(0, note.good_checks)
        self.reason = note.reason[:REASON_MAX_CHARS]
        self._counted_at = None
        self._until = None if note.left_out_s is None else now + min(note.left_out_s, self._rules.left_out_s)


RANK_WAIT_S = 0.3
STALE_S = 1.0  # an older answer counts for nothing while a new one is awaited
NOT_ASKED = "not asked yet"


class NodeState(IntEnum):
    """State of a node; better ones first."""

    FREE = 0
    """Healthy, and has a free slot as far as is known."""
    FULL = 1
    """Healthy; all its slots are taken."""
    UNKNOWN = 2
    """The node has not answered yet."""
    UNWELL = 3
    """The node did not answer, or takes no jobs."""
    LEFT_OUT = 4
    """The breaker is open."""


@decodable
class Capacity(msgspec.Struct, frozen=True):
    """Answer of `/capacity`."""

    running: int
    limit: int
    pulls: bool = False
    """The node can fetch stored inputs."""
    inputs: bool = False
    """The node stores inputs: a file that it has need not be sent again."""


class Ranked(msgspec.Struct, frozen=True):
    """One node in the ranking."""

    node: str
    standing: NodeState
    running: int | None
    limit: int | None
    breaker: BreakerState
    good_checks: int
    left_out_s: float
    steady: bool
    """Left out, and usable if there is no other node."""
    last_answer: str
    """Last answer, in words."""
    free: int | None = None
    """Free slots, less the jobs that this client sent since the last check."""
    refusal: Refusal | None = None
    """The node refuses our token, or its certificate is not trusted."""
    full: bool = False
    """All its slots are taken, whatever its breaker says."""

    def view(self) -> dict[str, object]:
        """Return the node as data for `tasuki nodes --json` and `/nodes` of a dispatcher."""
        return {
            "node": self.node,
            "standing": self.standing.name.lower(),
            "running": self.running,
            "limit": self.limit,
            "breaker": str(self.breaker),
            "good_checks": self.good_checks,
            "left_out_s": round(self.left_out_s, 1),
            "said": self.last_answer,
        }


class _Node:
    def __init__(self, name: str, rules: BreakerRules, tie: float) -> None:
        self.name = name
        self.tie = tie
        self.breaker = Breaker(rules)
        self.well: bool | None = None
        self.capacity: Capacity | None = None
        self.sent = 0
        """Jobs that this client sent since `capacity` was true, less those that have ended since."""
        self.full_until = 0.0
        self.looked_at: float | None = None
        self.looking = False
        self.last_answer = NOT_ASKED
        self.refusal: Refusal | None = None

    @property
    def free(self) -> int | None:
        if self.capacity is None:
            return None
        return min(self.capacity.limit, self.capacity.limit - self.capacity.running - self.sent)

    def standing(self, now: float) -> NodeState:
        if self.breaker.state(now) is not BreakerState.CLOSED:
            return NodeState.LEFT_OUT
        late = self.looking and (self.looked_at is None or now - self.looked_at > STALE_S)
        if self.well is None or (self.well and late):
            return NodeState.UNKNOWN
        if not self.well:
            return NodeState.UNWELL
        return NodeState.FULL if self.is_full(now) else NodeState.FREE

    def is_full(self, now: float) -> bool:
        return now < self.full_until or (self.free is not None and self.free <= 0)

    def place(self, now: float) -> tuple[int, bool, int, float]:
        """Return the sort key; smaller is better. A node that does not report its capacity comes after those that do."""
        return self.standing(now), self.free is None, -(self.free or 0), self.tie


class Nodes:
    """All nodes of one client, shared by its runs. `jitter()` returns a random number from 0 to 1."""

    def __init__(self, names: Sequence[str], jitter: Callable[[], float], rules: BreakerRules = DEFAULT_RULES) -> None:
        self._nodes = {name: _Node(name, rules, jitter()) for name in dict.fromkeys(names)}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._nodes)

    def to_look_at(self, now: float, fresh_s: float) -> list[str]:
        """Return the nodes whose last answer is too old and that are not being checked; they count as being checked now."""
        stale = [
            node
            for node in self._nodes.values()
            if not node.looking and (node.looked_at is None or now - node.looked_at >= fresh_s)
        ]
        for node in stale:
            node.looking = True
        return [node.name for node in stale]

    def older_than(self, now: float, age_s: float) -> set[str]:
        """Return the nodes whose last answer is older, or that have not answered."""
        return {node.name for node in self._nodes.values() if node.looked_at is None or now - node.looked_at > age_s}

    def capacity(self, name: str) -> Capacity | None:
        """Return the last capacity that the node reported."""
        return self._nodes[name].capacity

    @property
    def looking(self) -> bool:
        """A node is being checked."""
        return any(node.looking for node in self._nodes.values())

    # ------------------------------------------------------------------------------------------------ what they say

    def seen(self, name: str, capacity: Capacity | None, now: float) -> None:
        """Record that a node is healthy; `capacity` is None if it reports none."""
        node = self._looked(name, now)
        node.well, node.refusal = True, None
        node.sent = 0
        node.capacity = capacity
        node.last_answer = "ok" if capacity is None else f"{capacity.running} of {capacity.limit} running"
        node.breaker.checked(now)

    def unwell(self, name: str, reason: str, now: float) -> None:
        """Record a node that did not answer in time, or takes no jobs."""
        self._looked(name, now)
        self.failed(name, reason, now)

    def refused(self, name: str, refusal: Refusal, now: float) -> None:
        """Record a node that refuses us, or whose certificate is not trusted. That is no failure of the node."""
        node = self._looked(name, now)
        node.well, node.refusal = False, refusal
        node.last_answer = refusal.words()

    def failed(self, name: str, reason: str, now: float) -> None:
        """Record a request that was lost, or answered without an outcome."""
        node = self._nodes[name]
        node.well, node.refusal = False, None
        node.last_answer = reason
        node.breaker.failed(now, reason)

    def answered(self, name: str, now: float) -> None:
        """Record a good answer."""
        self._nodes[name].breaker.answered(now)

    def taken(self, name: str) -> None:
        """Count a job that was sent to a node."""
        self._nodes[name].sent += 1

    def given_back(self, name: str) -> None:
        """Count a job that has ended at a node."""
        self._nodes[name].sent -= 1

    def full(self, name: str, reason: str, pause_s: float, now: float) -> None:
        """Record that a node is full, and is not to be tried for a moment. That is no failure."""
        node = self._nodes[name]
        node.full_until = max(node.full_until, now + pause_s)
        node.last_answer = reason

    def _looked(self, name: str, now: float) -> _Node:
        node = self._nodes[name]
        node.looking = False
        node.looked_at = now
        return node

    # ------------------------------------------------------------------------------------------------ the ranking

    def ranking(self, now: float) -> list[Ranked]:
        """Return all nodes, the best first."""
        return [self._ranked(node, now) for node in sorted(self._nodes.values(), key=lambda node: node.place(now))]

    def _ranked(self, node: _Node, now: float) -> Ranked:
        standing = node.standing(now)
        return Ranked(
            node=node.name,
            standing=standing,
            running=node.capacity.running if node.capacity else None,
            limit=node.capacity.limit if node.capacity else None,
            breaker=node.breaker.state(now),
            good_checks=node.breaker.good_checks,
            left_out_s=node.breaker.left_out_s(now),
            steady=node.breaker.steady and node.well is True,
            full=standing in (NodeState.FULL, NodeState.LEFT_OUT) and node.is_full(now),
            last_answer=node.last_answer,
            free=node.free,
            refusal=node.refusal,
        )

    def notes(self, now: float) -> dict[str, BreakerNote | None]:
        """Return the state of all breakers, for another process."""
        return {name: node.breaker.note(now) for name, node in self._nodes.items()}

    def recall(self, notes: dict[str, BreakerNote], now: float) -> None:
        """Restore the breakers of these nodes."""
        for name, note in notes.items():
            if name in self._nodes:
                self._nodes[name].breaker.recall(note, now)
                self._nodes[name].last_answer = note.reason or NOT_ASKED


# ------------------------------------------------------------------------------------------------ the choice of a node

LOOK_BUSY_S = 0.25
LOOK_IDLE_S = 2.0
LOOKS_PER_PAUSE = 4  # checks during a pause as long as the one since the last request

_STATES = (
    AgentState.DONE, AgentState.RUNNING, AgentState.QUEUED, AgentState.FAILED, AgentState.TIMED_OUT, AgentState.INTERRUPTED,
)  # fmt: skip
"""States by precedence, when several nodes report one job."""
_is_input = re.compile(r"([0-9a-f]{64}):(.+)", re.DOTALL).fullmatch


class InputRef(msgspec.Struct, frozen=True):
    """File of a job in the store of inputs."""

    sha256: str
    name: str

    def __str__(self) -> str:
        return f"{self.sha256}:{self.name}"


def parse_input(text: str) -> InputRef:
    """Parse the form field `input`: `SHA256:NAME`."""
    found = _is_input(text)
    if found is None:
        raise InvalidInput(f"input {quoted(text)} must be SHA256:NAME, the hash of a stored input and the name that the job sees")
    return InputRef(found[1], check_file_name(found[2]))


def rendezvous(job_id: str, nodes: Iterable[str]) -> list[str]:
    """Return the nodes in this job's own order."""
    return sorted(nodes, key=lambda node: hashlib.sha256(f"{job_id}\0{node}".encode()).digest())


def candidates(ranking: Sequence[Ranked], job_id: str) -> list[Ranked]:
    """Return the nodes that may be sent the job, the best first; steady nodes that are left out only if there are no others."""
    order = {node: place for place, node in enumerate(rendezvous(job_id, (line.node for line in ranking)))}

    def place(line: Ranked) -> tuple[int, bool, int, int]:
        return line.standing, line.free is None, -(line.free or 0), order[line.node]

    hopeful = [line for line in ranking if line.standing in (NodeState.FREE, NodeState.FULL, NodeState.UNKNOWN)]
    return sorted(hopeful or [line for line in ranking if line.steady], key=place)


def well(ranking: Sequence[Ranked]) -> list[Ranked]:
    """Return the nodes whose slots count: those that answer, else those that would be used nevertheless. A node that has answered
    also counts while it is checked again: an idle dispatcher must not be unwell at each check."""
    answered = [
        line
        for line in ranking
        if line.standing in (NodeState.FREE, NodeState.FULL) or (line.standing is NodeState.UNKNOWN and line.free is not None)
    ]
    return answered or [line for line in ranking if line.steady]


def authoritative_node(job_id: str, statuses: Mapping[str, NodeJobStatus]) -> str | None:
    """Return the node whose report about a job counts."""
    ranks = {str(state): rank for rank, state in enumerate(_STATES)}
    in_order = rendezvous(job_id, statuses)
    return min(in_order, key=lambda node: ranks.get(statuses[node].state, len(ranks)), default=None)


def look_every_s(idle_s: float, *, well: bool = True) -> float:
    """Return how often nodes are checked, this long after the last request; more often if no node is `well`."""
    if not well:
        return LOOK_BUSY_S
    return min(LOOK_IDLE_S, max(LOOK_BUSY_S, idle_s / LOOKS_PER_PAUSE))
