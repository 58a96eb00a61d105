"""One simulated system: its processes, how they are started, and whether anything is left to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import asdict

from tasuki.core.access import TOKEN_PREFIXES, token_sha256
from tasuki.core.job import OnDisconnect
from tasuki.core.machine import Peer
from tasuki.core.store_messages import TokenRow
from tasuki.core.worker.events import WorkerIdentity
from tasuki.testing.sim.clients import OFFERS, PATTERNS, PROJECT, Operation, SimClient
from tasuki.testing.sim.network import Network
from tasuki.testing.sim.nodes import OWN_UID
from tasuki.testing.sim.project import Project
from tasuki.testing.sim.servers import STORE, CoordinationNode, MakeStore, SimServer, StoreNode
from tasuki.testing.sim.workers import DrawnEndings, SimWorker
from tasuki.testing.sim.world import HostClock, SimOptions, World

OFFSET_MAX_S = 10_000.0  # of a host's monotonic clock: its time since boot
WALL_OFFSET_MAX_S = 2.0


class ProcessNames(NamedTuple):
    """The names of all processes that faults can hit."""

    servers: tuple[str, ...]
    workers: tuple[str, ...]
    clients: tuple[str, ...]

    @property
    def peers(self) -> tuple[str, ...]:
        return self.workers + self.clients

    @property
    def processes(self) -> tuple[str, ...]:
        return self.servers + self.workers + self.clients


def cast_of(options: SimOptions) -> ProcessNames:
    counts = (("server", options.servers), ("worker", options.workers), ("client", options.clients))
    return ProcessNames(*(tuple(f"{role}-{number}" for number in range(1, (count or 0) + 1)) for role, count in counts))


class System:
    """All processes of one world, and what they share."""

    def __init__(self, world: World, make_store: MakeStore | None = None) -> None:
        self.world = world
        options = world.options
        self.cast = cast_of(options)
        self.network = Network(world)
        self.storage = StoreNode(world, self.network, make_store)
        self.project = Project(world, self.storage)
        self.coordination = CoordinationNode(world, self.network, self.storage.clock)
        shared = self.coordination if len(self.cast.servers) > 1 else None
        self.servers = [
            SimServer(world, number, self.network, self.storage, shared, self._clock())
            for number in range(1, len(self.cast.servers) + 1)
        ]
        self.coordination.servers = self.servers
        self.workers = [self._worker(place, name) for place, name in enumerate(self.cast.workers)]
        self.coordination.workers = {worker.name: worker for worker in self.workers}
        self.clients = [self._client(name) for name in self.cast.clients]
        everybody: list[SimServer | SimWorker | SimClient] = [*self.servers, *self.workers, *self.clients]
        self.processes = {process.name: process for process in everybody}

    def _clock(self) -> HostClock:
        chance = self.world.streams.clocks
        return HostClock(self.world, OFFSET_MAX_S * chance.random(), WALL_OFFSET_MAX_S * (chance.random() - 0.5))

    def _worker(self, place: int, name: str) -> SimWorker:
        chance = self.world.streams.processes
        keep = chance.random() < 0.2
        identity = WorkerIdentity(
            worker_id=name,
            incarnation="",
            token=self._token("worker", name),
            patterns=PATTERNS[0] if place == 0 else chance.choice(PATTERNS),
            capacity=chance.randint(1, 3),
            ahead=chance.choice((0, 1, 2, 4)),
            on_disconnect=OnDisconnect.KEEP if keep else OnDisconnect.STOP,
            reconnect_grace_s=3.0 if keep else 0.0,
            **asdict(OFFERS[0] if place == 0 else chance.choice(OFFERS)),
        )
        return SimWorker(
            self.world, self.network, self.servers, identity, self._peer(name), self._clock(), DrawnEndings(self.world)
        )

    def _client(self, name: str) -> SimClient:
        # One of the clients is an operator's, and may see and end all jobs.
        kind = "admin" if name == self.cast.clients[-1] else "client"
        return SimClient(self.world, self.network, self.servers, name, self._peer(name), self._token(kind, name), self._clock())

    def _peer(self, name: str) -> Peer:
        return Peer("tcp", None, name) if self.world.options.tokens else Peer("unix", OWN_UID, "unix socket")

    def _token(self, kind: str, name: str) -> str:
        if not self.world.options.tokens:
            return ""
        secret = f"{TOKEN_PREFIXES[kind]}{name}"
        row = TokenRow(token_id=f"token-{name}", kind=kind, sha256=token_sha256(secret), created_by="the simulator")
        assert self.storage.store.add_token(row)
        return secret

    def worker(self, name: str) -> SimWorker:
        process = self.processes[name]
        assert isinstance(process, SimWorker)
        return process

    def server(self, name: str) -> SimServer:
        process = self.processes[name]
        assert isinstance(process, SimServer)
        return process

    def clock_of(self, name: str) -> HostClock:
        return self.storage.clock if name == STORE else self.processes[name].clock

    # -- running --------------------------------------------------------------------------------------------------
    def start(self) -> None:
        for process in self.processes.values():
            process.start()

    def plan(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            self.world.at_time(operation.at, f"{operation.client} {operation.verb}", self._operate, operation)

    def _operate(self, operation: Operation) -> None:
        if operation.client == PROJECT:
            self.project.write(operation)
            return
        client = self.processes[operation.client]
        assert isinstance(client, SimClient)
        client.operate(operation)

    def heal(self) -> None:
        """Start all processes that are down, continue those that are paused."""
        for process in self.processes.values():
            if not process.alive:
                process.start()
            elif process.paused:
                process.resume()

    def unfinished(self) -> str:
        """Return what is still to be done; empty if nothing is."""
        if self.storage.recorder.open:
            return f"not terminal: {', '.join(list(self.storage.recorder.open)[:5])}"
        if self.project.has_times:
            return "nominal times are to come"
        for client in self.clients:
            if not client.idle:
                asked = [asking.verb for asking in client.asking.values()]
                return f"{client.name} waits for {list(client.waiting)[:5]} and for the answers to {asked[:5]}"
        for worker in self.workers:
            if not worker.idle:
                return f"{worker.name} still has {list(worker.machine.held)[:5]}" if worker.alive else f"{worker.name} is down"
        leaders = [server.leads for server in self.servers if server.leads]
        if leaders != [self.storage.store.epoch()[0]]:
            return f"leaders by epoch: {leaders}; the store knows {self.storage.store.epoch()}"
        return ""
