"""A simulated worker: the production machine, attempts that take their drawn time, a keeper, and a disk with saved endings.

Stands in for `worker/worker.py` and the keeper. Attempts are processes of their own: they go on while their worker is paused, and
the keeper ends them at the lease deadline that it was last told; all of them die with their worker.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from tasuki.coords.coordination import LEADER
from tasuki.core.job import JobSpec, Outcome
from tasuki.core.machine import Now, Peer, Received, Ticked
from tasuki.core.protocol import AssignJobs, Ending, HeartbeatAnswer, JobsRecorded
from tasuki.core.reconnect import Connect
from tasuki.core.store_messages import Grant
from tasuki.core.worker.events import AttemptEnded, AttemptReturned, Drain, Event, Restored, Started, Stop, WorkerIdentity
from tasuki.core.worker.machine import WorkerMachine
from tasuki.testing.sim.history import BeganEvent, BusyEvent, GoneEvent, SettledEvent
from tasuki.testing.sim.network import Network, SimulatedLink
from tasuki.testing.sim.nodes import WorkerNode
from tasuki.testing.sim.roles import SimulatedContinuation
from tasuki.testing.sim.servers import SimServer
from tasuki.testing.sim.world import HostClock, SimProcess, World

START_MAX_S = 0.05
RETRY_IN_S = 2.0  # more than any backoff of a simulated job
STOP_MAX_S = 0.6  # how long an attempt that is told to end may take; after that it is killed
LOST_GRACE_S = 1.0  # the keeper kills at the latest so long after a lease's deadline (worker/keeper/keeper.py)

_decode_spec = msgspec.msgpack.Decoder(JobSpec).decode


class SimulatedAttempt(msgspec.Struct, eq=False):
    """The processes of one attempt."""

    grant: Grant
    incarnation: str
    deadline: float | None
    """The deadline on the worker's clock, as the keeper was told last."""
    runs: bool = False
    stopping: str = ""
    gone: bool = False


class DrawnEndings:
    """Durations and outcomes of attempts, drawn from the seed."""

    def __init__(self, world: World) -> None:
        self._chance = world.streams.attempts
        self._scale = world.options.attempts_scale or 1.0

    def lasts_s(self) -> float:
        return self._scale * self._drawn_s()

    def _drawn_s(self) -> float:
        chance = self._chance
        length = chance.random()
        if length < 0.6:
            return 0.01 + 0.3 * chance.random()
        return 0.3 + 1.5 * chance.random() if length < 0.93 else 2.0 + 5.0 * chance.random()

    def outcome(self, job_id: str, attempt: int, worker_id: str) -> Outcome:
        kind = self._chance.random()
        if kind < 0.74:
            result = f"{job_id} {attempt} {worker_id}".encode()
            return Outcome(exit_code=0, result=result, result_sha256=hashlib.sha256(result).hexdigest())
        if kind < 0.9:
            asked_s = RETRY_IN_S if kind > 0.86 else None
            return Outcome(exit_code=1, error_code="EXIT_CODE", message="it broke", retry_in_s=asked_s)
        if kind < 0.95:
            return Outcome(error_code="TIMED_OUT", message="it took too long")
        return Outcome(exit_code=2, error_code="EXIT_CODE", message="it will never work", permanent=True)

    def cannot_start(self) -> bool:
        return self._chance.random() < 0.02


class SimWorker(SimProcess, WorkerNode):
    """One worker process, and after a crash the next one of the same id on the same disk."""

    machine: WorkerMachine

    def __init__(
        self,
        world: World,
        network: Network,
        servers: list[SimServer],
        identity: WorkerIdentity,
        peer: Peer,
        clock: HostClock,
        endings: DrawnEndings,
    ) -> None:
        self.world = self.network = network
        self.servers = {server.address: server for server in servers}
        self.template = identity
        self.endings = endings
        self.disk_full = 0
        self.link: SimulatedLink | None = None  # type: ignore[assignment]  # of the simulated network, not of the harness
        self.peer = peer
        self.handlers = False
        self.forgotten: list[tuple[str, str]] = []
        self.disk: dict[str, Ending] = {}
        self.attempts: dict[str, SimulatedAttempt] = {}
        self._flush_planned: float | None = None
        self._continuation: SimulatedContinuation | None = None
        SimProcess.__init__(self, world, identity.worker_id, clock)

    def now(self) -> Now:
        return self.clock.now()

    # -- life -----------------------------------------------------------------------------------------------------
    def start(self) -> None:
        self.born()
        self.identity = msgspec.structs.replace(self.template, incarnation=f"{self.name}-{self.life}")
        self.machine = WorkerMachine(self.identity, addresses=list(self.servers), jitter=self.sim.streams.jitter.random)
        self.attempts, self.link, self._flush_planned = {}, None, None
        if (node := next(iter(self.servers.values())).coordination) is not None:  # it has another id each time
            node.detached_by_leader.discard(self.name)
            node.coordination.set_detached(self.name, False, actor=LEADER)
            self._continuation = SimulatedContinuation(self, self.sim.options.lease_ttl_s or 15.0)
        for ending in list(self.disk.values()):
            self.apply(Restored(ending))
        self.tick_for_ever(self._tick, self.sim.options.tick_s)

    def crash(self, *, silent: bool = False) -> None:
        """Kill the process, or (`silent`) its host: the keeper ends all attempts, or they end with the host."""
        self._end("crashed", silent=silent)

    def _end(self, what: str, *, silent: bool = False) -> None:
        link = self.link
        self.died(what)
        for attempt in self.attempts.values():
            self._gone(attempt, "killed")
        self.attempts = {}
        if link is not None:
            self.network.process_gone([link], server=False, silent=silent)

    def pause(self) -> None:
        super().pause()
        for attempt in self.attempts.values():
            self._watch_deadline(attempt)

    def resume(self) -> None:
        super().resume()
        self.network.go_on()

    def _tick(self) -> None:
        life = self.life
        self.hear(Ticked())
        if self._continuation is not None and self.life == life:
            self._continuation.tick()

    def exit_now(self) -> None:
        """End the process because its machine is done, or can never do its work; a supervisor starts it again."""
        self.sim.effects["drain"] += self.machine.draining
        self._end("exited")
        self.sim.after(1.0, f"{self.name} is started again", self._start_again, self.life)

    def _start_again(self, life: int) -> None:
        if life == self.life and not self.alive:
            self.start()

    def drain(self) -> None:
        """Drain (SIGTERM): take no more work, and end when all is done and recorded."""
        self.hear(Drain())

    # -- the machine's driver -------------------------------------------------------------------------------------
    def apply(self, event: Event) -> None:
        life = self.life
        for command in self.machine.apply(event, self.clock.now()):
            if self.life == life:
                self._perform(command)

    def hear(self, event: Event) -> None:
        """Apply an event, and end this turn of the worker's loop."""
        life = self.life
        self.apply(event)
        if self.life == life:
            self.flush()

    def hear_message(self, event: Received) -> None:
        message = event.message
        if type(message) is JobsRecorded:
            self._settled(message)
        self.apply(event)
        if type(message) is AssignJobs and self.outstanding > self.identity.capacity:
            self._tell_busy(self.outstanding - len(self.attempts))
        if type(message) is HeartbeatAnswer and self.alive:
            for lease_id, attempt in self.attempts.items():
                attempt.deadline = self.machine.lease_deadline(lease_id)

    def flush(self) -> None:
        life = self.life
        for command in self.machine.flush(self.clock.now()):
            if self.life == life:
                self._perform(command)
        at = self.machine.flush_at
        if at is not None and at != self._flush_planned and self.life == life:
            self._flush_planned = at
            self.later(max(0.0, self.clock.when(at) - self.sim.at), f"{self.name} flushes", self.flush)

    def _settled(self, message: JobsRecorded) -> None:
        told = [(lease_id, True) for lease_id in message.recorded]
        told += [(lease_id, False) for lease_id, _ in message.fenced]
        for lease_id, recorded in told:
            held = self.machine.held.get(lease_id)
            if held is not None and held.ending is not None:
                self.sim.tell(SettledEvent(at=self.sim.at, worker_id=self.name, lease_id=lease_id, recorded=recorded))

    # -- commands -------------------------------------------------------------------------------------------------
    def _dial(self, wanted: Connect) -> None:
        self.network.connect(self, self.servers[wanted.address], wanted)

    def _save(self, ending: Ending) -> None:
        if self.disk_full:
            self.sim.effects["worker_disk_full"] += 1
        else:
            super()._save(ending)

    def _run(self, grant: Grant) -> None:
        deadline = self.machine.lease_deadline(grant.lease_id)
        attempt = self.attempts[grant.lease_id] = SimulatedAttempt(grant, self.identity.incarnation, deadline)
        self._tell_busy()
        delay_s = START_MAX_S * self.sim.streams.attempts.random()
        if self.disk_full or self.endings.cannot_start():
            self.sim.effects["worker_disk_full"] += self.disk_full > 0
            self.later(delay_s, f"{self.name} gives {grant.job_id} back", self._give_back, attempt)
        else:
            self._plan(delay_s, f"{self.name} starts {grant.job_id}", self._start_attempt, attempt)

    def _tell_busy(self, waiting: int = 0) -> None:
        identity, running = self.identity, len(self.attempts)
        room = {"capacity": identity.capacity, "ahead": identity.ahead}
        self.sim.tell(BusyEvent(at=self.sim.at, worker_id=self.name, attempts=running, waiting=waiting, **room))

    def _stop(self, command: Stop) -> None:
        attempt = self.attempts.get(command.lease_id)
        if attempt is None or attempt.gone:
            return  # its end is on its way to the machine
        attempt.stopping = attempt.stopping or command.reason
        delay_s = STOP_MAX_S * self.sim.streams.attempts.random() if attempt.runs else 0.0
        self._plan(delay_s, f"{self.name} stopped {attempt.grant.job_id}", self._stopped, attempt, command.reason)

    # -- attempts: they belong to the host, and go on while the worker is paused ----------------------------------
    def _plan(self, delay_s: float, label: str, action: Any, attempt: SimulatedAttempt, *arguments: Any) -> None:
        self.sim.after(delay_s, label, self._if_it_lives, self.life, action, attempt, arguments)

    def _if_it_lives(self, life: int, action: Any, attempt: SimulatedAttempt, arguments: tuple[Any, ...]) -> None:
        if life == self.life and not attempt.gone:
            action(attempt, *arguments)

    def _give_back(self, attempt: SimulatedAttempt) -> None:
        if not attempt.gone and not attempt.stopping:
            attempt.gone = True
            self.attempts.pop(attempt.grant.lease_id, None)
            self.hear(AttemptReturned(attempt.grant.lease_id))

    def _start_attempt(self, attempt: SimulatedAttempt) -> None:
        if attempt.stopping:
            return
        grant = attempt.grant
        if attempt.deadline is not None and self.clock.monotonic() >= attempt.deadline:  # the keeper starts no such attempt
            self._over(attempt, "stopped", Outcome(error_code="LEASE_LOST", message="its lease was over before it began"))
            return
        attempt.runs = True
        self.sim.tell(BeganEvent(**self._facts(attempt)))
        self._notify(Started(grant.lease_id))
        outcome = self.endings.outcome(grant.job_id, grant.attempt, self.name)
        lasts_s = self.endings.lasts_s()
        self._plan(lasts_s, f"{self.name} ends {grant.job_id}", self._over, attempt, "ended", outcome)
        if self.paused:
            self._watch_deadline(attempt)

    def _stopped(self, attempt: SimulatedAttempt, reason: str) -> None:
        self._over(attempt, "stopped", Outcome(error_code=reason, message="stopped"))

    def _over(self, attempt: SimulatedAttempt, how: str, outcome: Outcome) -> None:
        self._gone(attempt, how)
        self._notify(AttemptEnded(attempt.grant.lease_id, outcome))

    def _gone(self, attempt: SimulatedAttempt, how: str) -> None:
        if attempt.runs and not attempt.gone:
            self.sim.tell(GoneEvent(**self._facts(attempt), how=how))
        attempt.gone = True

    def _facts(self, attempt: SimulatedAttempt) -> dict[str, Any]:
        """Return the fields of a history line about this attempt, now."""
        grant, own = attempt.grant, {"at": self.sim.at, "worker_id": self.name, "incarnation": attempt.incarnation}
        return {**own, "job_id": grant.job_id, "attempt": grant.attempt, "lease_id": grant.lease_id}

    def _notify(self, event: Started | AttemptEnded) -> None:
        """Pass an event of the keeper to the worker, which hears it when it runs."""
        if self.paused:
            self.later(0.0, f"{self.name} is told", self._told_by_keeper, event)
        else:
            self._told_by_keeper(event)

    def _told_by_keeper(self, event: Started | AttemptEnded) -> None:
        if isinstance(event, AttemptEnded):
            self.attempts.pop(event.lease_id, None)
        elif (attempt := self.attempts.get(event.lease_id)) is not None and not _decode_spec(attempt.grant.spec).exec:
            self.machine.handler_started(event.lease_id, self.clock.wall())
            return
        self.hear(event)

    def _watch_deadline(self, attempt: SimulatedAttempt) -> None:
        """Start the keeper's own timer. It matters only while the worker is paused: otherwise the worker is as quick."""
        if attempt.deadline is not None and not attempt.gone:
            delay_s = max(0.0, self.clock.when(attempt.deadline) - self.sim.at)
            delay_s += LOST_GRACE_S * self.sim.streams.attempts.random()
            self._plan(delay_s, f"{self.name}'s keeper ends {attempt.grant.job_id}", self._deadline_passed, attempt)

    def _deadline_passed(self, attempt: SimulatedAttempt) -> None:
        if self.paused and attempt.deadline is not None and self.clock.monotonic() >= attempt.deadline:
            self.sim.effects["keeper"] += 1
            self._over(attempt, "stopped", Outcome(error_code="LEASE_LOST", message="its lease was over"))

    # -- then -----------------------------------------------------------------------------------------------------
    @property
    def idle(self) -> bool:
        """The worker holds nothing, and has nothing to say."""
        return self.alive and not self.paused and not self.machine.held and not self.attempts
