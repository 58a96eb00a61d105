"""What servers on one store know of each other, and tell each other. Part of the broker; pure.

Two ways. Every server says once a second that it is alive, at which addresses, and which workers are connected to it
(`ServerInfo`, through the coordination): so all know whom a subject's last token may name, and which servers a peer can turn
to. And after a commit a server hints at what the others may be waiting for (`cluster_messages.py`). A hint may be lost:
everything that a hint tells is also looked for, a little later, by whoever needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from tasuki.core.broker.events import AskEnded, AskRevoked, Publish
from tasuki.core.broker.sessions import WorkerSession
from tasuki.core.cluster_messages import Hint, ServerInfo, WorkerInfo
from tasuki.core.machine import Now, Send
from tasuki.core.protocol import CancelLeases
from tasuki.core.store_messages import Takes
from tasuki.errors import ProtocolError, Unauthorized

if TYPE_CHECKING:
    from tasuki.core.broker.broker import Broker
    from tasuki.core.broker.events import Command

POLL_INTERVAL_S = 1.0  # a revoked token must be noticed within 2 s, whether or not the hint came
POLLED_JOBS = 4_000  # watched jobs that are looked up at each poll, in turns: some 20 ms of an index
READY_SUBJECTS_MAX = 64  # more in one turn are told as "look at everything"
SPARE_LOOKERS = 1  # workers that look for another server's job, beside one for each: some may have fallen silent

_takes_what = attrgetter("worker_id", "patterns")


class ReadySubjects:
    """Where jobs became ready that no worker of ours took, and how many."""

    def __init__(self) -> None:
        self.subjects: dict[str, None] = {}
        self.jobs = 0

    def __len__(self) -> int:
        return len(self.subjects)

    def add(self, subject: str) -> None:
        """One more job of this subject."""
        self.subjects[subject] = None
        self.jobs += 1

    def add_some(self, subjects: Iterable[str], jobs: int) -> None:
        """So many jobs, spread over these subjects."""
        self.subjects.update(dict.fromkeys(subjects))
        self.jobs += jobs


class OtherServers:
    """The other live servers, and what they have to be told after this turn."""

    def __init__(self) -> None:
        self.servers: dict[str, ServerInfo] = {}
        self.detached: frozenset[str] = frozenset()
        self._takers: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {}
        """By server: its workers and their patterns, as last noted by the broker."""
        self._poll_at = 0.0
        self._watched: Iterator[str] = iter(())
        self._forget_hint()

    def _forget_hint(self) -> None:
        self.ready = ReadySubjects()
        self.ended: list[str] = []
        self.canceled: list[tuple[str, str]] = []
        self.moved: list[tuple[str, str]] = []
        self.tokens: list[str] = []
        self.everything = False

    def met(self, broker: Broker, servers: Iterable[ServerInfo], detached: frozenset[str]) -> None:
        """Who is alive now, and which workers are to be given nothing more."""
        self.servers = {info.server_id: info for info in servers if info.server_id != broker.config.server_id}
        was_detached, self.detached = self.detached, detached
        takers = {server_id: tuple(map(_takes_what, info.workers)) for server_id, info in self.servers.items()}
        if takers != self._takers or was_detached != detached:  # else only their loads changed, as in most seconds
            self._takers = takers
            broker.note_live_workers()
        if was_detached - detached:
            broker.look_everywhere()

    def workers(self) -> Iterator[tuple[str, WorkerInfo]]:
        """(server_id, worker) of all workers that are connected elsewhere."""
        for server_id, info in self.servers.items():
            for worker in info.workers:
                yield server_id, worker

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the other servers are."""
        return tuple(address for info in self.servers.values() for address in info.addresses)

    @property
    def blob_problem(self) -> str:
        """What the leader, if it is one of them, has against new blobs."""
        return next((info.blob_problem for info in self.servers.values() if info.blob_problem), "")

    # ------------------------------------------------------------------------------------------------ telling

    def hint(self, server_id: str) -> list[Command]:
        """What this turn's end means for the others, if there are any."""
        told = self.ready or self.ended or self.canceled or self.moved or self.tokens or self.everything
        if not told:  # as after most turns
            return []
        if not self.servers:
            self._forget_hint()
            return []
        everything = self.everything or len(self.ready) > READY_SUBJECTS_MAX
        hint = Hint(
            server_id=server_id,
            ready=() if everything else tuple(sorted(self.ready.subjects)),
            ready_jobs=0 if everything else self.ready.jobs,
            ended=tuple(self.ended),
            canceled=tuple(self.canceled),
            moved=tuple(self.moved),
            tokens=tuple(self.tokens),
            everything=everything,
        )
        self._forget_hint()
        return [Publish(hint)]

    # ------------------------------------------------------------------------------------------------ hearing

    def heard(self, broker: Broker, hint: Hint) -> list[Command]:
        """Another server's hint: look, sooner than we would have."""
        if hint.server_id == broker.config.server_id:
            return []
        commands: list[Command] = []
        if hint.everything:
            broker.look_everywhere()
            self._poll_at = 0.0
        elif hint.ready:
            self._look_for(broker, hint)
        broker.ask_ends(hint.ended)
        for worker_id, lease_id in hint.canceled:
            worker = broker.workers.get(worker_id)
            if worker is not None and lease_id in worker.deliveries:
                commands.append(Send(worker.conn, CancelLeases([lease_id])))
        for worker_id, incarnation in hint.moved:
            worker = broker.workers.get(worker_id)
            if worker is not None and worker.incarnation == incarnation:
                moved = ProtocolError(f"worker {worker_id!r}: it has connected to server {hint.server_id}")
                commands += broker.hang_up(worker.conn, moved)
        return commands + self.revoked(broker, hint.tokens)

    def _look_for(self, broker: Broker, hint: Hint) -> None:
        """Some of our workers look for another server's jobs: as many as there are jobs, however many are idle. With all of them,
        one job would be asked for by thousands."""
        if not hint.ready_jobs:
            broker.look_for(hint.ready, backlog=True)
            return
        enough = hint.ready_jobs + SPARE_LOOKERS
        for subject in hint.ready:
            named = broker.workers.get(subject.rpartition(".")[2])
            if named is not None and named.account.available:
                broker.look(named, backlog=True)
            sent: Counter[Takes] = Counter()
            for worker in broker.idle.matching(subject):
                if sent[worker.takes] < enough and self._can_look(worker):
                    sent[worker.takes] += 1  # apart, because the job may be of a kind that only some of them run
                    broker.look(worker, backlog=True)
                    if sent[Takes.ANY] >= enough:
                        break

    def _can_look(self, worker: WorkerSession) -> bool:
        return not (worker.reading or worker.resuming or worker.worker_id in self.detached)

    def revoked(self, broker: Broker, token_ids: Iterable[str]) -> list[Command]:
        """These tokens are good for nothing any more: their connections end."""
        gone = set(token_ids)
        commands: list[Command] = []
        if gone:
            for session in list(broker.sessions.values()):
                if session.identity is not None and session.identity.token_id in gone and not session.spending:
                    error = Unauthorized(f"token {session.identity.token_id} was revoked")
                    commands += broker.hang_up(session.conn, error)
        return commands

    def poll(self, broker: Broker, now: Now) -> list[Command]:
        """What a lost hint would have told, or a turn of which we never heard that it was stored: ask the store, now and then."""
        if now.monotonic < self._poll_at:
            return []
        self._poll_at = now.monotonic + POLL_INTERVAL_S
        commands: list[Command] = []
        identities = (session.identity for session in broker.sessions.values())
        token_ids = {identity.token_id for identity in identities if identity is not None and identity.token_id}
        if token_ids:
            commands.append(AskRevoked(sorted(token_ids)))
        some = list(islice(self._watched, POLLED_JOBS))
        if not some:
            self._watched = iter(list(broker.watchers))
            some = list(islice(self._watched, POLLED_JOBS))
        if some:
            commands.append(AskEnded(some))
        return commands


def describe(worker: WorkerSession) -> WorkerInfo:
    """A worker of ours, for the others and for people."""
    return WorkerInfo(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        patterns=worker.patterns,
        host=worker.host,
        slots=worker.slots,
        takes=worker.takes,
        credit=worker.account.available + worker.account.reserved,
        running=worker.account.running,
        address=worker.peer.address,
        on_disconnect=worker.on_disconnect,
    )
