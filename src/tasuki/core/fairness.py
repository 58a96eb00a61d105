"""Fair order between groups: the group that was served longest ago comes first, so that no group's flood delays another's job.

The order of service is not durable: after a restart all groups start level again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

REMEMBERED_GROUPS_MAX = 10_000  # past this the groups served longest ago are forgotten, which puts them first


class FairTurns:
    """Division of leases between groups, one round after the other."""

    def __init__(self) -> None:
        self._served: dict[str, None] = {}  # insertion order = order of service, the latest last

    def order(self, groups: Iterable[str]) -> list[str]:
        """Return the groups in order of service: never served ones first, by name, then those served longest ago."""
        waiting = sorted(set(groups))
        if len(waiting) < 2:
            return waiting
        rank = {group: number for number, group in enumerate(self._served, 1)}
        return sorted(waiting, key=lambda group: rank.get(group, 0))

    def fill(self, groups: Iterable[str], limit: int, take: Callable[[str, int], list[T]]) -> list[T]:
        """Take up to `limit` items evenly. `take(group, n)` returns at most n items of a group; fewer means it has no more."""
        taken: list[T] = []
        dealt: dict[str, int] = {}
        live = self.order(groups)
        while live and len(taken) < limit:
            quota, extra = divmod(limit - len(taken), len(live))
            still_live = []
            for place, group in enumerate(live):
                wanted = quota + (place < extra)
                got = take(group, wanted) if wanted else []
                taken += got
                dealt[group] = dealt.get(group, 0) + len(got)
                if len(got) == wanted:
                    still_live.append(group)
            # A group that got one item more than others comes after them for the next one, in this call and in the next.
            live = sorted(still_live, key=dealt.__getitem__)
        for group in sorted(filter(dealt.get, dealt), key=dealt.__getitem__):
            self._mark(group)
        return taken

    def _mark(self, group: str) -> None:
        self._served.pop(group, None)
        self._served[group] = None
        if len(self._served) > REMEMBERED_GROUPS_MAX:
            del self._served[next(iter(self._served))]
