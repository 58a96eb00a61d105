"""The workers of one server that have credit, so that a turn need not look at all the others. Part of the broker; pure."""

from __future__ import annotations

from collections.abc import Iterator

from tasuki.core.broker.sessions import WorkerSession
from tasuki.core.subject import SubjectTrie


class IdleWorkers:
    """Whoever was given something last comes last. One whose credit is used up is dropped when it is next met."""

    def __init__(self, trie: SubjectTrie[int]) -> None:
        self._trie = trie
        self._workers: dict[int, WorkerSession] = {}

    def note(self, worker: WorkerSession, *, last: bool = False) -> None:
        """It may have credit now."""
        if last:
            self._workers.pop(worker.conn, None)
        self._workers[worker.conn] = worker

    def forget(self, conn: int) -> None:
        self._workers.pop(conn, None)

    def __iter__(self) -> Iterator[WorkerSession]:
        for conn, worker in list(self._workers.items()):
            if worker.account.available:
                yield worker
            else:
                del self._workers[conn]

    def matching(self, subject: str) -> Iterator[WorkerSession]:
        """Those that may take jobs of this subject."""
        able = self._trie.match_set(subject)
        return (worker for worker in self if worker.conn in able)
