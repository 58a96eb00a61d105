"""The nodes that a client was given: how each stands, and which comes first. Pure.

Theory of operation. Nodes are looked at all at once (`/health` and `/capacity`), and all runs of a client share the answers.
Whoever ranks does so with those that have answered after `RANK_WAIT_S`: a node that is late comes into the ranking when it
answers, and one that never does has failed at the driver's own time limit. So a frozen node delays nobody.

First come the nodes with most free places. What this client sent to a node since it was last looked at counts as taken: the
node's own count would say so only later. Equal ones stand in an order of this client's own, so that clients spread.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum, StrEnum

import msgspec

from tasuki.core.failover.agent_protocol import AgentState
from tasuki.core.failover.events import JobStatus, Refusal
from tasuki.core.ids import quoted
from tasuki.core.job import check_file_name
from tasuki.errors import InvalidInput

# ----------------------------------------------------------------------------------------------------
# The circuit breaker of one node: whether it is left out for now, and when it may come back. Pure.

REASON_MAX_CHARS = 300


class BreakerRules(msgspec.Struct, frozen=True):
    """How strict a breaker is."""

    left_out_s: float = 30.0
    failures: int = 1
    """How many failures in a row leave a node out."""
    good_checks: int = 3
    """How many good health checks in a row let it come back."""
    check_spacing_s: float = 0.2


DEFAULT_RULES = BreakerRules()


class BreakerState(StrEnum):
    CLOSED = "closed"
    """In use."""
    OPEN = "open"
    """Left out."""
    HALF_OPEN = "half-open"
    """Its time is over; it still has to show that it is well."""


class BreakerNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """A breaker as it can be written down, with its times counted from the moment of writing."""

    failures: int = 0
    good_checks: int = 0
    left_out_s: float | None = None
    """How much longer; zero or less: its time is over. None: it is not left out."""
    reason: str = ""


class Breaker:
    """Told of failures, of health checks and of answers; asked for its state."""

    def __init__(self, rules: BreakerRules = DEFAULT_RULES) -> None:
        self.reason = ""
        """Of the last failure."""
        self.good_checks = 0
        """In a row, since the last failure."""
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
        """So many good checks in a row that it could come back."""
        return self.good_checks >= self._rules.good_checks

    def left_out_s(self, now: float) -> float:
        """How much longer it is left out, whatever its health."""
        return 0.0 if self._until is None else max(0.0, self._until - now)

    def failed(self, now: float, reason: str) -> None:
        """It did not do what it was asked, or a health check was bad."""
        self._close_if_due(now)
        self._failures += 1
        self.good_checks = 0
        self._counted_at = None
        self.reason = reason[:REASON_MAX_CHARS]
        if self._until is not None or self._failures >= self._rules.failures:
            self._until = now + self._rules.left_out_s

    def checked(self, now: float) -> None:
        """A good health check."""
        spaced = self._counted_at is None or now - self._counted_at >= self._rules.check_spacing_s
        if self._until is not None and not self.steady and spaced:
            self._counted_at = now
            self.good_checks += 1
        self._close_if_due(now)

    def answered(self, now: float) -> None:
        """It did what it was asked. What was under way when it failed proves nothing: only a steady one is taken back."""
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
        """What another process should know; None if there is nothing to tell."""
        if self._until is None and not self._failures:
            return None
        left_out_s = None if self._until is None else self._until - now
        return BreakerNote(self._failures, self.good_checks, left_out_s, self.reason)

    def recall(self, note: BreakerNote, now: float) -> None:
        """Take over what was written down. A clock that was set meanwhile must not leave a node out for years."""
        self._failures = max(0, note.failures)
        self.good_checks = max(0, note.good_checks)
        self.reason = note.reason[:REASON_MAX_CHARS]
        self._counted_at = None
        self._until = None if note.left_out_s is None else now + min(note.left_out_s, self._rules.left_out_s)


RANK_WAIT_S = 0.3
STALE_S = 1.0  # an answer that is older says nothing while a new one is waited for
NOT_ASKED = "not asked yet"


class NodeState(IntEnum):
    """Better ones first."""

    FREE = 0
    """Well, and takes another job as far as we know."""
    FULL = 1
    """Well, all its places are taken."""
    UNKNOWN = 2
    """Has not answered yet."""
    UNWELL = 3
    """Did not answer, or said that it takes nothing."""
    LEFT_OUT = 4
    """Its breaker is open."""


class Capacity(msgspec.Struct, frozen=True):
    """What `/capacity` answers."""

    running: int
    limit: int
    pulls: bool = False
    """It can fetch inputs from where they are stored."""
    inputs: bool = False
    """It keeps inputs: a file that it has need not be sent again."""


class Ranked(msgspec.Struct, frozen=True):
    """One line of the ranking."""

    node: str
    standing: NodeState
    running: int | None
    limit: int | None
    breaker: BreakerState
    good_checks: int
    left_out_s: float
    steady: bool
    """Left out, and could come back if it must."""
    said: str
    """What it answered last, in words."""
    free: int | None = None
    """Places that are free, without those for what this client sent it meanwhile."""
    refusal: Refusal | None = None
    """It does not take our token, or we do not trust its certificate."""

    def view(self) -> dict[str, object]:
        """For programs: `tasuki nodes --json`, and a dispatcher's /nodes."""
        return {
            "node": self.node,
            "standing": self.standing.name.lower(),
            "running": self.running,
            "limit": self.limit,
            "breaker": str(self.breaker),
            "good_checks": self.good_checks,
            "left_out_s": round(self.left_out_s, 1),
            "said": self.said,
        }


class _Node:
    def __init__(self, name: str, rules: BreakerRules, tie: float) -> None:
        self.name = name
        self.tie = tie
        self.breaker = Breaker(rules)
        self.well: bool | None = None
        self.capacity: Capacity | None = None
        self.sent = 0
        """Jobs that this client gave it since `capacity` was true, less those that have ended since."""
        self.full_until = 0.0
        self.looked_at: float | None = None
        self.looking = False
        self.said = NOT_ASKED
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
        if now < self.full_until or (self.free is not None and self.free <= 0):
            return NodeState.FULL
        return NodeState.FREE

    def place(self, now: float) -> tuple[int, bool, int, float]:
        """Smaller is better. A node that does not tell its capacity stands behind those that do."""
        return self.standing(now), self.free is None, -(self.free or 0), self.tie


class Nodes:
    """All nodes of one client, shared by its runs. `jitter()` gives a number from 0 to 1; the driver's random source."""

    def __init__(self, names: Sequence[str], jitter: Callable[[], float], rules: BreakerRules = DEFAULT_RULES) -> None:
        self._nodes = {name: _Node(name, rules, jitter()) for name in dict.fromkeys(names)}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._nodes)

    def to_look_at(self, now: float, fresh_s: float) -> list[str]:
        """Those whose last answer is too old, and that are not being asked; they count as being asked from now on."""
        stale = [
            node
            for node in self._nodes.values()
            if not node.looking and (node.looked_at is None or now - node.looked_at >= fresh_s)
        ]
        for node in stale:
            node.looking = True
        return [node.name for node in stale]

    def older_than(self, now: float, age_s: float) -> set[str]:
        """Those whose last answer is older, or that have not answered."""
        return {node.name for node in self._nodes.values() if node.looked_at is None or now - node.looked_at > age_s}

    def keeps_inputs(self, name: str) -> bool:
        """As far as it has said."""
        capacity = self._nodes[name].capacity
        return capacity is not None and capacity.inputs

    @property
    def looking(self) -> bool:
        """Somebody is being asked."""
        return any(node.looking for node in self._nodes.values())

    # ------------------------------------------------------------------------------------------------ what they say

    def seen(self, name: str, capacity: Capacity | None, now: float) -> None:
        """It is well; `capacity` is None where it did not say."""
        node = self._looked(name, now)
        node.well, node.refusal = True, None
        node.sent = 0
        node.capacity = capacity
        node.said = "ok" if capacity is None else f"{capacity.running} of {capacity.limit} running"
        node.breaker.checked(now)

    def unwell(self, name: str, reason: str, now: float) -> None:
        """It did not answer in time, or not as one that takes jobs."""
        self._looked(name, now)
        self.failed(name, reason, now)

    def refused(self, name: str, refusal: Refusal, now: float) -> None:
        """It is there, but takes nothing from us, or we trust it with nothing. That is not its failure."""
        node = self._looked(name, now)
        node.well, node.refusal = False, refusal
        node.said = refusal.words()

    def failed(self, name: str, reason: str, now: float) -> None:
        """A request to it was lost, or answered without an outcome."""
        node = self._nodes[name]
        node.well, node.refusal = False, None
        node.said = reason
        node.breaker.failed(now, reason)

    def answered(self, name: str, now: float) -> None:
        """It did what it was asked."""
        self._nodes[name].breaker.answered(now)

    def taken(self, name: str) -> None:
        """It was sent a job."""
        self._nodes[name].sent += 1

    def given_back(self, name: str) -> None:
        """A job that it was sent has ended."""
        self._nodes[name].sent -= 1

    def full(self, name: str, reason: str, pause_s: float, now: float) -> None:
        """It has no place, and wants to be left alone for a moment. That is not a failure."""
        node = self._nodes[name]
        node.full_until = max(node.full_until, now + pause_s)
        node.said = reason

    def _looked(self, name: str, now: float) -> _Node:
        node = self._nodes[name]
        node.looking = False
        node.looked_at = now
        return node

    # ------------------------------------------------------------------------------------------------ the ranking

    def ranking(self, now: float) -> list[Ranked]:
        """The best first."""
        return [self._ranked(node, now) for node in sorted(self._nodes.values(), key=lambda node: node.place(now))]

    def _ranked(self, node: _Node, now: float) -> Ranked:
        return Ranked(
            node=node.name,
            standing=node.standing(now),
            running=node.capacity.running if node.capacity else None,
            limit=node.capacity.limit if node.capacity else None,
            breaker=node.breaker.state(now),
            good_checks=node.breaker.good_checks,
            left_out_s=node.breaker.left_out_s(now),
            steady=node.breaker.steady and node.well is True,
            said=node.said,
            free=node.free,
            refusal=node.refusal,
        )

    def notes(self, now: float) -> dict[str, BreakerNote | None]:
        """All breakers as they can be written down."""
        return {name: node.breaker.note(now) for name, node in self._nodes.items()}

    def recall(self, notes: dict[str, BreakerNote], now: float) -> None:
        """What another process wrote down about nodes that are ours."""
        for name, note in notes.items():
            if name in self._nodes:
                self._nodes[name].breaker.recall(note, now)
                self._nodes[name].said = note.reason or NOT_ASKED


# ----------------------------------------------------------------------------------------------------
# What a dispatcher decides, without I/O: which node a job goes to, whose word about a job counts, how often nodes are looked at.

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


def who_knows(job_id: str, said: Mapping[str, JobStatus]) -> str | None:
    """Whose word counts, of those that know the job."""
    ranks = {str(state): rank for rank, state in enumerate(_STATES)}
    in_order = rendezvous(job_id, said)
    return min(in_order, key=lambda node: ranks.get(said[node].state, len(ranks)), default=None)


def look_every_s(idle_s: float, *, well: bool = True) -> float:
    """How old an answer of a node may become, when the last request was so long ago. Without a node that is `well`, not old."""
    if not well:
        return LOOK_BUSY_S
    return min(LOOK_IDLE_S, max(LOOK_BUSY_S, idle_s / LOOKS_PER_PAUSE))
