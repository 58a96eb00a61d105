"""Sub-leaders: the members that are taken to be dead, and the one that stands first for the leader's place. Pure.

A member is *suspected* when it was not seen for a time: a leader whose turns the store did not take, a worker without heartbeats.
That alone proves nothing, since the observer may be the one that is cut off. So suspects are asked, and one that leaves several
calls in a row unanswered is taken to be dead. Neither conclusion needs to be true: a leader that is deposed is fenced by the
store, and a worker that is detached keeps its leases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

SAME_NODE_DEFERENCE_S = 0.3
DEFERENCE_S = 1.0


def deference_s(*, sub_leads: bool, node_id: str, leader_node: str) -> float:
    """Return how long a node lets others ask first for the leader's lock: a sub-leader of another node than the leader's not at
    all, since what ended the leader may have hit its whole node."""
    if not sub_leads:
        return DEFERENCE_S
    return SAME_NODE_DEFERENCE_S if node_id == leader_node else 0.0


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
