"""The other servers of a broker: the live ones as the cluster last told, and what they are to be told after this turn.

`cluster.py` has what is done with both. Everything that may interest the peers of another server is collected here while a turn
is carried out, and leaves as one `Hint`; `core/cluster_messages.py` says what a hint is worth.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from tasuki.core.broker.events import Command, Publish
from tasuki.core.cluster_messages import Hint, ServerInfo, WorkerInfo
from tasuki.core.subscribers import QUEUES_TOLD_MAX, Subscribers
from tasuki.errors import TasukiError

READY_SUBJECTS_MAX = 512  # more subjects in one turn are told to other servers as "everything"; reading these takes them 2 ms


class OtherServers:
    """The other live servers, and the hint that they get after this turn."""

    def __init__(self) -> None:
        self.servers: dict[str, ServerInfo] = {}
        self.detached: frozenset[str] = frozenset()
        """worker_ids that get no more work."""
        self.ages_s: dict[str, float] = {}
        """Time since the last heartbeat of each server."""
        self.subscriptions: dict[str, tuple[tuple[str, tuple[str, ...], bool], ...]] = {}
        """By server: its workers, their patterns, and whether they can be addressed."""
        self.members: Subscribers[str] = Subscribers(QUEUES_TOLD_MAX)
        """Members of queue groups, by server."""
        self._queues_told: dict[str, tuple[tuple[str, str], ...]] = {}
        self.poll_at = 0.0
        self.polled: Iterator[str] = iter(())
        """Watched jobs that this round of polls has not asked about yet."""
        self._begin_hint()

    def _begin_hint(self) -> None:
        self.ready: dict[str, None] = {}
        """Subjects of ready jobs that no worker of this server took."""
        self.ready_jobs: int | None = 0
        self.routed: list[tuple[str, str]] = []
        self.ended: list[str] = []
        self.canceled: list[tuple[str, str]] = []
        self.moved: list[tuple[str, str, str]] = []
        self.tokens: list[str] = []
        self.everything = False

    def learn_members(self) -> None:
        """Note which queue groups have members at the servers that are alive now."""
        for server_id in self._queues_told.keys() - self.servers.keys():
            self.members.forget(server_id)
            del self._queues_told[server_id]
        for server_id, info in self.servers.items():
            before = self._queues_told.get(server_id, ())
            if info.queues != before:
                self._queues_told[server_id] = info.queues
                for pattern, queue in set(before) - set(info.queues):
                    self.members.remove(server_id, pattern, queue)
                for pattern, queue in info.queues:
                    with contextlib.suppress(TasukiError):  # of another version, which allows more
                        self.members.add(server_id, pattern, queue)

    def add_ready(self, subjects: Iterable[str], jobs: int) -> None:
        """Add so many ready jobs, spread over these subjects, to the hint; 0: it is not known how many."""
        self.ready.update(dict.fromkeys(subjects))
        self.ready_jobs = self.ready_jobs + jobs if jobs and self.ready_jobs is not None else None

    def hint(self, server_id: str) -> list[Command]:
        """Return the hint that was collected since the last one, if there is anything to tell and anybody to tell it to."""
        if self.ended and all(server.node_id for server in self.servers.values()):
            self.ended.clear()  # nodes have no clients that wait for the end of a job
        collected = self.ready or self.ended or self.canceled or self.moved or self.tokens or self.everything or self.routed
        if not collected:  # as after most turns
            return []
        if not self.servers:
            self._begin_hint()
            return []
        everything = self.everything or len(self.ready) > READY_SUBJECTS_MAX
        hint = Hint(
            server_id=server_id,
            ready=() if everything else tuple(sorted(self.ready)),
            ready_jobs=0 if everything else self.ready_jobs or 0,
            ended=tuple(self.ended),
            canceled=tuple(self.canceled),
            moved=tuple(self.moved),
            routed=tuple(self.routed),
            tokens=tuple(self.tokens),
            everything=everything,
        )
        self._begin_hint()
        return [Publish(hint)]

    def workers(self) -> Iterator[tuple[str, WorkerInfo]]:
        """Yield (server_id, worker) for all workers of other servers."""
        for server_id, info in self.servers.items():
            for worker in info.workers:
                yield server_id, worker

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(address for info in self.servers.values() for address in info.addresses)

    @property
    def blob_problem(self) -> str:
        """Reason why the leader, if it is another server, takes no new blobs."""
        return next((info.blob_problem for info in self.servers.values() if info.blob_problem), "")
