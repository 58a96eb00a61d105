"""Routes of published messages: which connections are subscribed to a subject. Pure.

Messages to an inbox, a subject below `_INBOX.`, reach only patterns that name the inbox: whoever subscribes to `>` does not read
the answers to requests of others.
"""

from __future__ import annotations

import msgspec

from tasuki.core.subject import SubjectTrie, check_pattern
from tasuki.errors import InvalidInput, Overloaded

INBOX = "_INBOX."
INBOX_NAME_MIN_CHARS = 22  # of the token after it, which is the secret of the client that waits there: 128 random bits
SUBSCRIPTIONS_MAX = 256  # of one connection
QUEUE_MAX_CHARS = 64
ROUTES_MAX = 4096  # subjects whose route is remembered


class MessageRoute(msgspec.Struct, frozen=True):
    """Receivers of a subject: connections that get every message, and of each queue group those of which one gets it."""

    conns: tuple[int, ...] = ()
    queues: dict[str, tuple[int, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self.conns or self.queues)


class MessageRoutes:
    """The subscriptions of all connections of a server, each a (pattern, queue group); without a group it is the empty text."""

    def __init__(self) -> None:
        self._trie: SubjectTrie[tuple[int, str]] = SubjectTrie()
        self._inboxes: SubjectTrie[tuple[int, str]] = SubjectTrie()
        self._by_conn: dict[int, dict[tuple[str, str], None]] = {}
        self._routes: dict[str, MessageRoute] = {}

    def __len__(self) -> int:
        """Return the number of connections with a subscription."""
        return len(self._by_conn)

    def of(self, conn: int) -> int:
        """Return the number of subscriptions of a connection."""
        return len(self._by_conn.get(conn, ()))

    def add(self, conn: int, pattern: str, queue: str = "") -> None:
        """Add a subscription; one that is there already stays as it is."""
        _check_inbox(check_pattern(pattern))
        if len(queue) > QUEUE_MAX_CHARS or not queue.isprintable():
            raise InvalidInput(f"queue group {queue[:80]!r} must have at most {QUEUE_MAX_CHARS} printable characters")
        own = self._by_conn.get(conn, {})
        if (pattern, queue) in own:
            return
        if len(own) >= SUBSCRIPTIONS_MAX:
            raise Overloaded(
                f"this connection has {len(own)} subscriptions, the limit is {SUBSCRIPTIONS_MAX}; use wider patterns"
            )
        self._trie_of(pattern).add(pattern, (conn, queue))
        self._by_conn.setdefault(conn, own)[pattern, queue] = None
        self._routes.clear()

    def remove(self, conn: int, pattern: str, queue: str = "") -> bool:
        """Remove a subscription; return whether it was there."""
        own = self._by_conn.get(conn, {})
        if (pattern, queue) not in own:
            return False
        del own[pattern, queue]
        if not own:
            del self._by_conn[conn]
        self._trie_of(pattern).remove(pattern, (conn, queue))
        self._routes.clear()
        return True

    def forget(self, conn: int) -> None:
        """Remove all subscriptions of a connection."""
        for pattern, queue in list(self._by_conn.get(conn, ())):
            self.remove(conn, pattern, queue)

    def find(self, subject: str) -> MessageRoute:
        """Return the receivers of a subject."""
        route = self._routes.get(subject)
        if route is None:
            queues: dict[str, list[int]] = {}
            for conn, queue in self._trie_of(subject).match(subject):
                queues.setdefault(queue, []).append(conn)
            conns = tuple(queues.pop("", ()))
            route = MessageRoute(conns, {queue: tuple(members) for queue, members in queues.items()})
            if len(self._routes) >= ROUTES_MAX:
                self._routes.clear()
            self._routes[subject] = route
        return route

    @property
    def queues(self) -> tuple[tuple[str, str], ...]:
        """The (pattern, queue group) pairs of all connections, each once."""
        return tuple(sorted({key for own in self._by_conn.values() for key in own if key[1]}))

    def _trie_of(self, subject: str) -> SubjectTrie[tuple[int, str]]:
        return self._inboxes if subject.startswith(INBOX) else self._trie


def _check_inbox(pattern: str) -> None:
    """Refuse a pattern of inboxes that does not name one."""
    if pattern.startswith(INBOX) and len(pattern.split(".")[1]) < INBOX_NAME_MIN_CHARS:
        raise InvalidInput(
            f"pattern {pattern!r}: an inbox is named by {INBOX_NAME_MIN_CHARS} random characters or more, "
            "so that only its owner can read it"
        )
