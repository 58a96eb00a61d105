"""Shares: the part of a bounded thing that one owner may have, so that no owner takes all of it. Pure."""

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
