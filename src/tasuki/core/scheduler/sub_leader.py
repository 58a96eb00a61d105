"""Sub-leaders: the members that are taken to be dead, and the one that asks first for the leader's lock. Pure.

A member is *suspected* when it was not seen for a time: a leader whose turns the store did not take, a worker without heartbeats.
That alone proves nothing, since the observer may be the one that is cut off. So suspects are asked, and one that leaves several
calls in a row unanswered is taken to be dead. Neither conclusion needs to be true: a leader that is deposed is fenced by the
store, and a worker that is detached keeps its leases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class LeaderCandidate(NamedTuple):
    """A member that may lead next."""

    node_id: str
    sub_leads: bool


DEFERENCE_S = 2.0  # more than the second within which each member asks for the leader's lock anyway


def deference_s(leader_node: str, own: LeaderCandidate, others: Iterable[LeaderCandidate]) -> float:
    """Return how long a member lets better candidates ask first for the leader's lock: DEFERENCE_S for each better rank that one
    of the live others has. The best are sub-leaders of other nodes than the leader's, since what ended the leader may have hit
    its whole node; then come those of its node, then all others."""

    def rank(candidate: LeaderCandidate) -> int:
        return 2 if not candidate.sub_leads else 1 if candidate.node_id == leader_node else 0

    return DEFERENCE_S * len({rank(other) for other in others if rank(other) < rank(own)})


class Suspects:
    """Members that were not seen for too long, and how many calls to each were left unanswered since."""

    def __init__(self) -> None:
        self._unanswered: Counter[str] = Counter()
        self._asked: set[str] = set()

    def to_ask(self, unseen_s: Mapping[str, float], limit_s: float) -> list[str]:
        """Return the members to ask now, by the time that each was not seen; an answer follows for each (`answered`)."""
        suspected = {member for member, age_s in unseen_s.items() if age_s > limit_s}
        for member in self._unanswered.keys() - suspected:
            del self._unanswered[member]
        found = sorted(suspected - self._asked)
        self._asked.update(found)
        return found

    def answered(self, member: str, is_alive: bool | None, failures: int) -> bool:
        """Note an answer, and return whether the member is dead: so many calls in a row had none. None: nothing can be told."""
        self._asked.discard(member)
        if is_alive:
            self._unanswered.pop(member, None)
        elif is_alive is not None:
            self._unanswered[member] += 1
        return self._unanswered[member] >= failures
