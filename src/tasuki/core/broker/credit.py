"""The credit ledger: how many more jobs each worker will take, and which worker is asked to take next.

Only `Credit` frames add credit; a grant takes one away. While a lease request is on its way to the store the credit it may
use is reserved, so that two turns never spend the same credit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import msgspec

from tasuki.errors import InvalidInput

CREDIT_MAX = 100_000  # what one worker may hold; far above any real concurrency, below what would make a turn unbounded
LEASE_BATCH_MAX = 512  # jobs of one lease request: bounds a turn, and with it everybody's wait


class Account(msgspec.Struct):
    """One worker's credit."""

    available: int = 0
    reserved: int = 0
    running: int = 0
    """Granted and not yet reported: its load."""
    owed: int = 0
    """Places that were filled without credit, because a lost assignment was delivered again; the next credit pays for them."""
    withdrawn: int = 0
    """Of what is reserved: credit that the worker took back."""

    def give(self, credit: int) -> None:
        """A Credit frame came; a negative one takes credit back."""
        if -CREDIT_MAX <= credit < 0:
            self._take_back(-credit)
            return
        if not 0 <= credit <= CREDIT_MAX or self.available + self.reserved + credit > CREDIT_MAX:
            raise InvalidInput(f"credit must be 0 to {CREDIT_MAX} in all; {credit} more on top of {self.available} is not")
        paid = min(self.owed, credit)
        self.owed -= paid
        self.available += credit - paid

    def _take_back(self, credit: int) -> None:
        """What a lease request has set aside is taken when it comes back; what it was granted meanwhile stays granted."""
        taken = min(self.available, credit)
        self.available -= taken
        self.withdrawn = min(self.reserved, self.withdrawn + credit - taken)

    def charge(self) -> None:
        """An assignment that the worker had not heard of is delivered: it fills a place for which credit came, or will come."""
        self.running += 1
        if self.available:
            self.available -= 1
        else:
            self.owed += 1

    def reserve(self, limit: int) -> int:
        """Set credit aside for one lease request; how much there was."""
        taken = min(self.available, limit)
        self.available -= taken
        self.reserved += taken
        return taken

    def settle(self, reserved: int, granted: int) -> None:
        """The lease request came back: what was not granted is free again."""
        if not 0 <= granted <= reserved <= self.reserved:
            raise ValueError(f"{granted} jobs were granted on {reserved} of {self.reserved} reserved credits")
        self.reserved -= reserved
        unused = reserved - granted
        self.available += unused - min(unused, self.withdrawn)
        self.withdrawn = min(self.reserved, max(0, self.withdrawn - reserved))
        self.running += granted

    def ended(self, count: int = 1) -> None:
        """Attempts that were reported, given back or lost. Gives no credit: only the worker does."""
        self.running = max(0, self.running - count)


Policy = Callable[[Account], object]


def least_load(account: Account) -> object:
    """The default policy: the smallest share of used places first."""
    places = account.running + account.available + account.reserved
    return (account.running + account.reserved) / places if places else 1.0


def shares(accounts: Iterable[tuple[str, Account]], wanted: int | None, policy: Policy = least_load) -> list[tuple[str, int]]:
    """Who asks the store for how many jobs in this turn, in the order of asking.

    `wanted` is how many jobs are thought to be ready: then the workers share them evenly, so that the first asker does not take
    everything while others idle. None: there is a backlog, everybody fills up.
    """
    able = [(name, account) for name, account in accounts if account.available > 0]
    if wanted is not None and wanted < len(able) and policy is least_load:
        # One each for the first that have nothing to do. On a large server these are many more than are looked at here.
        idle = list(islice(((name, 1) for name, account in able if not (account.running or account.reserved)), wanted))
        if len(idle) == wanted:
            return idle
    able.sort(key=lambda one: policy(one[1]))  # type: ignore[arg-type, return-value]
    quota, extra = divmod(wanted, len(able)) if wanted is not None and able else (LEASE_BATCH_MAX, 0)
    limits = (min(LEASE_BATCH_MAX, quota + (place < extra)) for place in range(len(able)))
    return [(name, min(limit, account.available)) for (name, account), limit in zip(able, limits, strict=True) if limit]
