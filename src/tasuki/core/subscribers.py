"""Subscribers of published messages: which connections, or which other servers, get those of a subject. Pure.

Both are found by a trie of patterns, so that a message costs the same however many patterns it does not match. Messages to an
inbox, a subject below `_INBOX.`, reach only patterns that name the inbox: whoever subscribes to `>` does not read
the answers to requests of others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from itertools import islice
from typing import Generic, TypeVar

import msgspec

from tasuki.core.subject import SubjectTrie, check_pattern
from tasuki.errors import InvalidInput, Overloaded

INBOX = "_INBOX."
INBOX_NAME_MIN_CHARS = 22  # of the token after it, which is the secret of the client that waits there: 128 random bits
SUBSCRIPTIONS_MAX = 256  # of one connection
QUEUE_MAX_CHARS = 64
RECEIVERS_MAX = 4096  # subjects whose receivers are remembered
QUEUES_TOLD_MAX = 4096  # (pattern, queue group) pairs that a server tells the others: some 150 KB of each heartbeat

Place = TypeVar("Place", bound=Hashable)
"""Place of subscribers: the number of a connection, or the id of a server."""


class FoundSubscribers(msgspec.Struct, Generic[Place], frozen=True):
    """Receivers of a subject: places that get every message, and of each queue group those of which one gets it."""

    places: tuple[Place, ...] = ()
    queues: dict[str, tuple[Place, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self.places or self.queues)


class Subscribers(Generic[Place]):
    """Subscriptions by place, each a (pattern, queue group); without a group it is the empty text."""

    def __init__(self, limit: int = SUBSCRIPTIONS_MAX) -> None:
        self._limit = limit
        """Number of subscriptions of one place."""
        self._trie: SubjectTrie[tuple[Place, str]] = SubjectTrie()
        self._inboxes: SubjectTrie[tuple[Place, str]] = SubjectTrie()
        self._by_place: dict[Place, dict[tuple[str, str], None]] = {}
        self._members: Counter[tuple[str, str]] = Counter()
        """Number of places by (pattern, queue group), of queue groups."""
        self._found: dict[str, FoundSubscribers[Place]] = {}

    def __len__(self) -> int:
        """Return the number of places with a subscription."""
        return len(self._by_place)

    def of(self, place: Place) -> int:
        """Return the number of subscriptions of a place."""
        return len(self._by_place.get(place, ()))

    def add(self, place: Place, pattern: str, queue: str = "") -> bool:
        """Add a subscription; return False if it is there already."""
        _check_inbox(check_pattern(pattern))
        if len(queue) > QUEUE_MAX_CHARS or not queue.isprintable():
            raise InvalidInput(f"queue group {queue[:80]!r} must have at most {QUEUE_MAX_CHARS} printable characters")
        own = self._by_place.get(place, {})
        if (pattern, queue) in own:
            return False
        if len(own) >= self._limit:
            raise Overloaded(f"this connection has {len(own)} subscriptions, the limit is {self._limit}; use wider patterns")
        self._trie_of(pattern).add(pattern, (place, queue))
        self._by_place.setdefault(place, own)[pattern, queue] = None
        if queue:
            self._members[pattern, queue] += 1
        self._found.clear()
        return True

    def remove(self, place: Place, pattern: str, queue: str = "") -> bool:
        """Remove a subscription; return whether it was there."""
        own = self._by_place.get(place, {})
        if (pattern, queue) not in own:
            return False
        del own[pattern, queue]
        if not own:
            del self._by_place[place]
        self._trie_of(pattern).remove(pattern, (place, queue))
        if queue:
            self._members[pattern, queue] -= 1
            if not self._members[pattern, queue]:
                del self._members[pattern, queue]
        self._found.clear()
        return True

    def forget(self, place: Place) -> list[tuple[str, str]]:
        """Remove all subscriptions of a place, and return them."""
        own = list(self._by_place.get(place, ()))
        for pattern, queue in own:
            self.remove(place, pattern, queue)
        return own

    def find(self, subject: str) -> FoundSubscribers[Place]:
        """Return the receivers of a subject."""
        found = self._found.get(subject)
        if found is None:
            queues: dict[str, list[Place]] = {}
            for place, queue in self._trie_of(subject).match(subject):
                queues.setdefault(queue, []).append(place)
            places = tuple(queues.pop("", ()))
            found = FoundSubscribers(places, {queue: tuple(members) for queue, members in queues.items()})
            if len(self._found) >= RECEIVERS_MAX:
                self._found.clear()
            self._found[subject] = found
        return found

    @property
    def nodes_visited(self) -> int:
        """Number of nodes of the tries that all searches so far have visited."""
        return self._trie.nodes_visited + self._inboxes.nodes_visited

    @property
    def queues(self) -> tuple[tuple[str, str], ...]:
        """The (pattern, queue group) pairs that the other servers are told, each once: the oldest QUEUES_TOLD_MAX."""
        return tuple(islice(self._members, QUEUES_TOLD_MAX))

    def _trie_of(self, subject: str) -> SubjectTrie[tuple[Place, str]]:
        return self._inboxes if subject.startswith(INBOX) else self._trie


def _check_inbox(pattern: str) -> None:
    """Refuse a pattern of inboxes that does not name one."""
    if pattern.startswith(INBOX) and len(pattern.split(".")[1]) < INBOX_NAME_MIN_CHARS:
        raise InvalidInput(
            f"pattern {pattern!r}: an inbox is named by {INBOX_NAME_MIN_CHARS} random characters or more, "
            "so that only its owner can read it"
        )
