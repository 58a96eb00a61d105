"""A world of thousands of workers: the same servers, machines, store and network as in a small one, told about less and looked at
less often.

What is left out is what only costs time at this size: the history, the hash over all events, timers that find nothing due. A
worker's timer fires when a heartbeat is due, or soon again while it has no connection; its machine judges as always.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from tasuki.core.broker.events import Hinted
from tasuki.core.client_machine import Call, CallAnswered, ResultsArrived
from tasuki.core.cluster_messages import Hint, decode
from tasuki.core.job import JobSpec
from tasuki.core.machine import Closed, Received, Ticked
from tasuki.core.protocol import Accepted, HeartbeatAnswer, SubmitJobs
from tasuki.core.store_messages import Answers, Grant, Turn
from tasuki.core.worker.events import AttemptEnded, Event, Started
from tasuki.errors import TasukiError
from tasuki.testing.sim.clients import SimClient
from tasuki.testing.sim.cluster import CoordinationNode
from tasuki.testing.sim.history import AnyLine, LeadingEvent
from tasuki.testing.sim.network import Network, Peer
from tasuki.testing.sim.scale_load import Load
from tasuki.testing.sim.scale_tally import Tally
from tasuki.testing.sim.servers import SimServer
from tasuki.testing.sim.storage import StoreNode, Task
from tasuki.testing.sim.workers import SimulatedAttempt, SimWorker
from tasuki.testing.sim.world import World

TURN_S = 0.012  # what a transaction takes at a busy database, drawn from half to one and a half of it,
ITEM_S = 0.000_03  # and for each item in it (bench/postgresql.py: some 10,000 jobs/s, three verbs each)
START_S = 0.02  # until a program runs
OFFLINE_TICK_S = 0.1
LATE_S = 0.001  # a worker's timer fires so much after its heartbeat is due, never a rounding before it

_ITEMS = ("finish", "fail", "start", "renew", "release", "submit", "held", "get")


class BigWorld(World):
    """Time and chance without a hash, and of all that is told only who leads."""

    leaderships: list[list[float | str | int]]
    """[at, server_id, epoch]; epoch 0: no more."""

    def run_until(self, end: float) -> None:
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= end:
            self.at, _, _, action, arguments = pop(heap)
            self.events += 1
            action(*arguments)
        self.at = end

    def tell(self, line: AnyLine) -> None:
        if type(line) is LeadingEvent:
            self.leaderships.append([round(line.at, 3), line.server_id, line.epoch])


class BigNetwork(Network):
    """All links are of one kind: none is slower than the others by itself."""

    def _dialed(self, node: Peer, server: SimServer) -> None:
        super()._dialed(node, server)
        if node.link is not None:
            node.link.extra_s = 0.0


class BigStore(StoreNode):
    """One busy database: a turn takes longer the more is in it. Nothing is wrong with it."""

    recorder: Tally

    def __init__(self, world: World, network: Network) -> None:
        super().__init__(world, network)
        self.recorder = Tally(world, self.store, self.clock)

    def latency_s(self) -> float:
        return TURN_S * (0.5 + self._chance.random())

    def _try(self, task: Task, wait_s: float) -> None:
        turn: Turn = task.turn
        took_s = self.latency_s() + ITEM_S * sum(len(getattr(turn, name)) for name in _ITEMS)
        server = self.recorder.servers[task.server.name]
        server.store_s += took_s
        if turn.epoch:
            server.duty_s += took_s
        self.world.after(wait_s + took_s, "commits", self._commit, task)

    def _answer(self, task: Task, answer: Answers | TasukiError) -> None:
        if task.server.life == task.life:
            task.server.answered(task.turn, answer)


class BigCoordination(CoordinationNode):
    """Hints reach everybody at once, and are decoded once: twenty servers would each do the same."""

    tally: Tally

    def publish(self, sender: SimServer, pieces: list[bytes]) -> None:
        self.tally.hints += len(pieces)
        hints = [decode(piece) for piece in pieces]
        self.world.after(self.network.delay_s(sender.name, "everybody"), "hints", self._spread, sender, hints)

    def _spread(self, sender: SimServer, hints: list[Hint]) -> None:
        for server in self.servers:
            if server is not sender and server.alive:
                self.tally.hints_heard += len(hints)
                for hint in hints:
                    server.tell(Hinted(hint))


class BigWorker(SimWorker):
    """A worker that is looked at when something is due."""

    load: Load
    tally: Tally
    _timer = 0

    def tick_for_ever(self, tick: Callable[[], None], every_s: float) -> None:
        self._tick_in(self._beat_s * self.sim.streams.processes.random())

    @property
    def _beat_s(self) -> float:
        return (self.sim.options.lease_ttl_s or 15.0) / 3 + LATE_S

    def _tick_in(self, delay_s: float) -> None:
        """In the place of whatever timer it had."""
        self._timer += 1
        self.sim.after(delay_s, "ticks", self._tick_now, self.life, self._timer)

    def _tick_now(self, life: int, timer: int) -> None:
        if life != self.life or timer != self._timer:
            return
        self.hear(Ticked())
        if life == self.life:
            self._tick_in(self._beat_s if self.machine.online else OFFLINE_TICK_S)

    def hear(self, event: Event) -> None:
        super().hear(event)
        if type(event) is Closed and self.alive:
            self._tick_in(OFFLINE_TICK_S * self.sim.streams.jitter.random())

    def hear_message(self, event: Received) -> None:
        self.apply(event)
        if type(event.message) is HeartbeatAnswer and self.alive:
            for lease_id, attempt in self.attempts.items():
                attempt.deadline = self.machine.lease_deadline(lease_id)

    def _end(self, what: str, *, silent: bool = False) -> None:
        for attempt in self.attempts.values():
            self.tally.lost_at[attempt.grant.job_id] = self.sim.at
        super()._end(what, silent=silent)

    # -- attempts -------------------------------------------------------------------------------------------------
    def _run(self, grant: Grant) -> None:
        deadline = self.machine.lease_deadline(grant.lease_id)
        attempt = self.attempts[grant.lease_id] = SimulatedAttempt(grant, self.identity.incarnation, deadline)
        self._plan(START_S * self.sim.streams.attempts.random(), "starts", self._start_attempt, attempt)

    def _start_attempt(self, attempt: SimulatedAttempt) -> None:
        if attempt.stopping:
            return
        grant = attempt.grant
        attempt.runs = True
        self.tally.started(self.name, grant.job_id)
        outcome = self.load.outcome(grant.job_id, grant.attempt, self.name)
        lasts_s = self.load.lasts_s(self.tally.groups[grant.job_id])
        self._plan(lasts_s, "ends", self._over, attempt, "ended", outcome)
        self.hear(Started(grant.lease_id))

    def _gone(self, attempt: SimulatedAttempt, how: str) -> None:
        attempt.gone = True

    def _told_by_keeper(self, event: Started | AttemptEnded) -> None:
        self.attempts.pop(event.lease_id, None)
        self.hear(event)


class BigClient(SimClient):
    """A client that submits one job at a time and counts what comes of it."""

    tally: Tally

    def _begin(self) -> None:
        super()._begin()
        self._submitted: dict[int, str] = {}
        self._numbers = itertools.count(1)

    def submit_one(self, spec: JobSpec) -> None:
        ticket = next(self._numbers)
        self._submitted[ticket] = spec.job_id
        specs = [spec]
        self.apply(Call(ticket, lambda msg_id: SubmitJobs(msg_id, specs, True), watch=(spec.job_id,)))

    def _answered(self, answered: CallAnswered) -> None:
        job_id = self._submitted.pop(answered.ticket)
        if isinstance(answered.answer, Accepted) and not any(item.code for item in answered.answer.exceptions):
            self.tally.was_accepted(job_id)
        else:
            raise AssertionError(f"{self.name}: {job_id} was not accepted: {answered.answer or answered.error}")

    def _arrived(self, arrived: ResultsArrived) -> None:
        for item in arrived.items:
            self.tally.arrived(item)
