"""Shares: the part of a bounded thing that one owner may have, so that no owner takes all of it. Pure."""

from collections import Counter
from collections.abc import Collection, Hashable

from tasuki.errors import Overloaded, TasukiError


class Shares:
    """Counts per owner with one limit: requests under way, workers, patterns, bytes.

    An owner is the text by which a peer is known, such as `token:<id>`. Owners that have nothing are not kept.
    """

    def __init__(self, limit: int, unit: str, error: type[TasukiError] = Overloaded) -> None:
        self.limit = limit
        self._unit = unit
        """Named by the error: `workers`, `bytes of half-sent blobs`."""
        self._error = error
        self._taken: dict[str, int] = {}

    def taken(self, owner: str) -> int:
        return self._taken.get(owner, 0)

    def take(self, owner: str, count: int = 1, *, beyond: bool = False) -> None:
        """Add to the owner's count, or raise the error and leave it as it is. With `beyond` the limit is for others."""
        taken = self.taken(owner) + count
        if taken > self.limit and not beyond:
            raise self._error(
                f"{owner} has {taken - count} {self._unit} and may have {self.limit}: {count} more would be too many; "
                "wait until some have ended, or use a token of its own for each user"
            )
        if taken:
            self._taken[owner] = taken

    def give_back(self, owner: str, count: int = 1) -> None:
        """Subtract from the owner's count. ValueError if the owner has less: a defect of the caller."""
        left = self.taken(owner) - count
        if left < 0:
            raise ValueError(f"{owner} gives back {count} {self._unit} and has {self.taken(owner)}")
        if left:
            self._taken[owner] = left
        else:
            self._taken.pop(owner, None)

    def __len__(self) -> int:
        """Return the number of owners that have something."""
        return len(self._taken)


class SharedItems:
    """Items that several peers of one owner may use at once: each counts once for its owner, however many use it."""

    def __init__(self, limit: int, unit: str) -> None:
        self._shares = Shares(limit, unit)
        self._users: Counter[tuple[str, Hashable]] = Counter()

    def use(self, owner: str, items: Collection[Hashable]) -> None:
        """Add one user of each item, or raise Overloaded and add none."""
        self._shares.take(owner, sum(1 for item in items if not self._users[owner, item]))
        self._users.update((owner, item) for item in items)

    def leave(self, owner: str, items: Collection[Hashable]) -> None:
        """Take one user of each item away."""
        for item in items:
            self._users[owner, item] -= 1
            if not self._users[owner, item]:
                del self._users[owner, item]
                self._shares.give_back(owner)
