"""Patterns of the workers, and subjects that became ready since each of them looked, so that nobody asks the store in vain. Pure.

Theory of operation. Leasing for a pattern with wildcards may walk over everything that waits, so a worker must not ask again and
again for what is not there. Each queue that becomes ready is noted, under the next number, at the patterns that match it: new
jobs, and those that came back, of this server's turns; those of other servers by their hints. A worker remembers the number up to
which it has looked. Only subjects that were noted since then can be new for it, and it asks for exactly these: a seek each.
It asks by its patterns only when that is not enough: at first, after it got all that it asked for, or when more was noted than a
pattern remembers.

`ReadyWalk` names all queues again, page by page, through a reader beside the store's writer, and each of them is noted as if it
had just become ready. One walk is for all workers, whatever the number of their patterns. There is always a slow one, in case a
hint was lost; and a hurried one when something happened that only a look at everything can answer. So a ready job is found by an
idle worker that may take it after two walks at the latest. A page may take long: on PostgreSQL under an old snapshot, for
instance, it visits the entries of all jobs that were leased since. Pauses leave others their part of the reader's time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tasuki.core.machine import Now
from tasuki.core.store_messages import JobKind, Offer, ReadyPage
from tasuki.core.subject import SubjectTrie

NOTED_MAX = 256  # subjects that one pattern remembers
PAGE_QUEUES = 256  # queues that are read at once: some 2 ms of a reader, and 1 ms of the event loop
PAGE_INTERVAL_S = 0.25  # between the pages of a slow walk: a hundredth of a core, whatever waits
WALK_INTERVAL_S = 1.0  # from the end of a walk to the next
FAILED_READ_S = 1.0  # after which a read that failed is tried again
SLOW_SHARE, HURRIED_SHARE = 0.1, 0.5  # of a reader's time
QUICK_READ_S = 0.05  # after one that took less nothing has to wait
PAUSE_MAX_S = 30.0  # also if the whole machine stood still during a read


class Subscription:
    """A pattern, the workers with one offer that subscribe to it, and what became ready for them lately."""

    __slots__ = ("forgotten", "latest", "noted", "offer", "workers")

    def __init__(self, offer: Offer) -> None:
        self.offer = offer
        self.workers: set[int] = set()
        """Connections of the workers."""
        self.noted: dict[str, int] = {}
        """Number under which each subject was noted last, in the order of the numbers."""
        self.latest = 0
        self.forgotten = 0
        """Highest number of a subject that had to make room for others."""

    def note(self, subject: str, number: int) -> None:
        self.noted.pop(subject, None)
        self.noted[subject] = self.latest = number
        if len(self.noted) > NOTED_MAX:
            self.forgotten = self.noted.pop(next(iter(self.noted)))

    def since(self, number: int) -> Iterator[tuple[int, str]]:
        """Yield what was noted after this number, the latest first."""
        for subject in reversed(self.noted):
            noted_at = self.noted[subject]
            if noted_at <= number:
                return
            yield noted_at, subject


class Subscriptions:
    """All subscriptions of a server's workers."""

    def __init__(self) -> None:
        self.trie: SubjectTrie[Subscription] = SubjectTrie()
        self.number = 0
        """Number of the last queue that was noted."""
        self._all: dict[tuple[str, Offer], Subscription] = {}

    def add(self, conn: int, patterns: tuple[str, ...], offer: Offer) -> list[Subscription]:
        """Subscribe a worker."""
        found = []
        for pattern in dict.fromkeys(patterns):
            one = self._all.get((pattern, offer))
            if one is None:
                one = self._all[pattern, offer] = Subscription(offer)
                self.trie.add(pattern, one)
            one.workers.add(conn)
            found.append(one)
        return found

    def remove(self, conn: int, patterns: tuple[str, ...], offer: Offer) -> None:
        for pattern in dict.fromkeys(patterns):
            one = self._all[pattern, offer]
            one.workers.remove(conn)
            if not one.workers:
                del self._all[pattern, offer]
                self.trie.remove(pattern, one)

    def matching(self, subject: str, kind: JobKind | None = None, exec: str = "") -> list[Subscription]:
        """Return the subscriptions whose workers may take jobs of this queue; kind None: of any kind and program."""
        return [one for one in self.trie.match(subject) if kind is None or one.offer.fits(kind, exec)]

    def note(self, subject: str, kind: JobKind | None = None, exec: str = "") -> None:
        """Note that jobs of this queue are ready."""
        self.number += 1
        for one in self.matching(subject, kind, exec):
            one.note(subject, self.number)


def pause_s(took_s: float, share: float) -> float:
    """Return how long after a read that took so long the next one of its kind has to wait."""
    return 0.0 if took_s < QUICK_READ_S else min(PAUSE_MAX_S, took_s * (1 / share - 1))


class ReadyWalk:
    """The walk over all queues with ready jobs. See the module's docstring."""

    def __init__(self) -> None:
        self.is_wanted = False
        """A walk from the beginning is wanted as soon as possible."""
        self._place: Any = None
        """The place of the next page; None: the beginning."""
        self._is_hurried = False
        self._asked_at: float | None = None
        self._next_at = self._hurried_at = 0.0

    def is_due(self, now: Now) -> bool:
        """Return whether the next page must be asked for."""
        is_hurried = self.is_wanted or self._is_hurried
        return self._asked_at is None and now.monotonic >= (self._hurried_at if is_hurried else self._next_at)

    def next_place(self, now: Now) -> Any:
        """Return the place of the page that is asked for now."""
        if self.is_wanted and (self._place is None or not self._is_hurried):
            self.is_wanted, self._is_hurried, self._place = False, True, None
        self._asked_at = now.monotonic
        return self._place

    def came(self, page: ReadyPage | None, now: Now) -> None:
        """Note that the page came; None: it could not be read, and is asked for again."""
        took_s = now.monotonic - self._asked_at if self._asked_at is not None else 0.0
        self._asked_at = None
        interval_s, hurried_s = PAGE_INTERVAL_S, pause_s(took_s, HURRIED_SHARE)
        if page is None:
            interval_s = hurried_s = max(FAILED_READ_S, hurried_s)
        else:
            self._place = page.place
            if page.place is None:
                self._is_hurried, interval_s = False, WALK_INTERVAL_S
        self._hurried_at = now.monotonic + hurried_s
        self._next_at = now.monotonic + max(interval_s, pause_s(took_s, SLOW_SHARE))
