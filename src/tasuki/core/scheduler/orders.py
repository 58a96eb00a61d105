"""Orders of a leader to the workers of other nodes: which of them are obeyed. Pure.

An order carries the epoch under which its sender leads. The store fences every *write* of an old leader; `OrderEpochs` keeps
a worker from *obeying* one: an order is obeyed only if its epoch is not below the highest that is known here, nor below one that
was obeyed before. It is not above the highest that the store has registered, either: nobody leads under such an epoch yet, and a
number that anybody could make up would shut the real leader out.
"""

from __future__ import annotations


class OrderEpochs:
    """Judges the epochs of the orders that one worker gets."""

    def __init__(self) -> None:
        self.last_obeyed = 0

    def problem(self, epoch: int, known: int, registered: int | None) -> str:
        """Return why an order under this epoch is refused; empty: it is obeyed, and from now on none below it.

        `known` is the highest epoch that the node knows, `registered` the one that the store has; None: it did not answer.
        """
        known = max(known, registered or 0)
        highest = max(known, self.last_obeyed)
        if epoch < highest:
            return f"epoch {epoch} is old: epoch {highest} is known here"
        if epoch > known:
            why = "the database does not answer" if registered is None else f"the database has epoch {registered}"
            return f"no leader is known under epoch {epoch}: {why}"
        self.last_obeyed = epoch
        return ""
