"""Simulated clients: the production machine, the operations that a seed draws for it, and the answers that it receives.

Operations are drawn once, as a list, so that a failing seed can be tried with fewer of them.
"""

from __future__ import annotations

import itertools

import msgspec

from tasuki.core.broker.client_messages import routed
from tasuki.core.client_machine import Call, ClientMachine, Event, Watch, WatchRefused
from tasuki.core.client_machine import CallAnswered as Told
from tasuki.core.client_machine import Command as ClientCommand
from tasuki.core.client_machine import ResultsArrived as Came
from tasuki.core.job import JobSpec, body_hash
from tasuki.core.machine import Now, Peer, Received, Ticked
from tasuki.core.protocol import Accepted, CancelJobs, HelloClient, Request, SubmitJobs
from tasuki.core.reconnect import Connect
from tasuki.core.scheduler.firing import Definition
from tasuki.core.store_messages import OWN_PROGRAMS, Offer, Takes
from tasuki.errors import Unavailable
from tasuki.testing.sim.history import AnsweredEvent, ArrivedEvent, AskedEvent
from tasuki.testing.sim.network import Network, SimulatedLink
from tasuki.testing.sim.nodes import ClientNode
from tasuki.testing.sim.servers import SimServer
from tasuki.testing.sim.world import WALL_START_S, HostClock, SimOptions, SimProcess, Streams, World

# ---------------------------------------------------------------------------------------------------- operations

SUBJECTS = ("render.fast", "render.slow", "price.all", "price.worker-1", "job.submit.books.close")
PROGRAMS = ("",) * 3 + ("program",) * 5 + ("other",) * 2
OFFERS = (Offer(), Offer(Takes.ANY, ("other", OWN_PROGRAMS)), Offer(Takes.COMMANDS, ("program",)), Offer(Takes.HANDLERS))
"""Jobs that workers can run, besides the first, which can run all."""
PATTERNS = ((">",), ("render.>", "job.>"), ("price.*", "render.fast"))
"""Patterns of workers; the first worker of every world takes everything, so that every job has one that fits."""


ROUTE_KEYS = ("", "", "", "a", "b", "c")
"""Keys of jobs whose subjects have the policy sticky; without one the subject is the key."""

PAUSED = (">", "render.>", "*.*", "job.>")
"""Patterns that are paused."""

PROJECT = "project"
"""The applications that write definitions and events (`project.py`)."""


class Operation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of one client, or one write of the project."""

    number: int
    at: float
    client: str
    verb: str
    """submit, rerun, cancel, requeue, get, watch, pause or resume; of the project define, edit, disable, enable, delete or
    emit."""
    specs: tuple[JobSpec, ...] = ()
    job_ids: tuple[str, ...] = ()
    pattern: str = ""
    definition: Definition | None = None


def draw_operations(streams: Streams, options: SimOptions) -> list[Operation]:
    """Draw all operations of the chaos phase, in any order; most are in its first two thirds."""
    return _Drawing(streams, options).operations() + _draw_pauses(streams, options)


def _draw_pauses(streams: Streams, options: SimOptions) -> list[Operation]:
    """Draw pauses of subjects. Those left at the end are resumed when all is healed: a client that was cut off may have said its
    pause again after another one resumed it."""
    chance, found = streams.pauses, []
    clients = [f"client-{number}" for number in range(1, (options.clients or 1) + 1)]
    for _ in range(options.pauses):
        at, pattern = options.chaos_s * 0.7 * chance.random(), chance.choice(PAUSED)
        healed = [(options.chaos_s + wait_s, "resume") for wait_s in (10.0, 40.0)]
        for moment, verb in [(at, "pause"), (at + 1.0 + 4.0 * chance.random(), "resume"), *healed]:
            found.append(Operation(number=0, at=moment, client=chance.choice(clients), verb=verb, pattern=pattern))
    return found


class _Drawing:
    def __init__(self, streams: Streams, options: SimOptions) -> None:
        self.chance = streams.load
        self.routes = streams.routes
        self.options = options
        self.clients = [f"client-{number}" for number in range(1, (options.clients or 1) + 1)]
        self.known: list[tuple[str, JobSpec]] = []
        """(client, spec) of the jobs submitted so far."""

    def operations(self) -> list[Operation]:
        chance, jobs = self.chance, self.options.jobs or 1
        found: list[Operation] = []
        end, number = self.options.chaos_s * 0.85, 0
        moments = sorted(end * chance.random() ** 1.5 for _ in range(jobs))
        while number < jobs:
            at = moments[number]
            size = min(jobs - number, 1 if chance.random() < 0.6 else chance.randint(2, 6))
            specs = tuple(self._spec(number + place, at) for place in range(size))
            client = chance.choice(self.clients)
            self.known += [(client, spec) for spec in specs if "@" not in spec.subject]  # set going again, it has no not_after
            found.append(Operation(number=0, at=at, client=client, verb="submit", specs=specs))
            number += size
            if chance.random() < 0.8:
                found.append(self._another(at + 4.0 * chance.random()))
        found += [self._another(end * chance.random()) for _ in range(jobs // 4)]
        return found

    def _spec(self, number: int, at: float) -> JobSpec:
        chance = self.chance
        wall = WALL_START_S + at
        not_before = wall + 3.0 * chance.random() if chance.random() < 0.15 else None
        not_after = wall + 3.0 + 8.0 * chance.random() if chance.random() < 0.12 else None
        subject, route = chance.choice(SUBJECTS), self.routes
        if self.known and route.random() < 0.1:  # one of a broadcast; its worker may not subscribe, or not offer the program
            subject = f"{subject}.@worker-{route.randint(1, self.options.workers or 1)}"
            not_after = not_after or wall + 3.0 + 8.0 * route.random()
        return JobSpec(
            job_id=f"job-{number:03}",
            subject=subject,
            route_key=route.choice(ROUTE_KEYS),
            exec=PROGRAMS[int(10 * chance.random())],
            payload=b"body",
            max_retries=chance.choice((0, 0, 1, 2, 3)),
            max_losses=chance.choice((0, 1, 2, 3, 3)),
            backoff_s=chance.choice((0.0, 0.3, 1.0)),
            priority=chance.choice((0, 5, 5, 5, 9)),
            not_before=not_before,
            not_after=not_after,
        )

    def _another(self, at: float) -> Operation:
        """Draw an operation about jobs that were, or will soon be, submitted."""
        chance = self.chance
        client, spec = chance.choice(self.known)
        if chance.random() < 0.3:
            client = chance.choice(self.clients)
        verb = chance.choice(("again", "again", "conflict", "rerun", "rerun", "cancel", "cancel", "requeue", "get", "watch"))
        if verb == "again":
            return Operation(number=0, at=at, client=client, verb="submit", specs=(spec,))
        if verb == "conflict":
            other = msgspec.structs.replace(spec, payload=b"another body")
            return Operation(number=0, at=at, client=client, verb="submit", specs=(other,))
        if verb == "rerun":
            return Operation(number=0, at=at, client=client, verb="rerun", specs=(spec,))
        job_ids = (spec.job_id,) if chance.random() < 0.7 else (spec.job_id, chance.choice(self.known)[1].job_id)
        return Operation(number=0, at=at, client=client, verb=verb, job_ids=tuple(dict.fromkeys(job_ids)))


class Asking(msgspec.Struct, frozen=True):
    """A call that is not answered yet."""

    call: str
    verb: str
    job_ids: tuple[str, ...]


class SimClient(SimProcess, ClientNode):
    """One client process, and after a crash the next one, which asks again for the results of the same jobs."""

    machine: ClientMachine

    def __init__(
        self,
        world: World,
        network: Network,
        servers: list[SimServer],
        name: str,
        peer: Peer,
        token: str,
        clock: HostClock,
    ) -> None:
        self.world = self.network = network
        self.servers = {server.address: server for server in servers}
        self.peer = peer
        self.token = token
        self.link: SimulatedLink | None = None  # type: ignore[assignment]  # of the simulated network, not of the harness
        self.asking: dict[int, Asking] = {}
        self.waiting: dict[str, None] = {}
        """Jobs of whose ends the client has not heard yet."""
        self.refused = {}
        self.failed = None
        self._wanted: list[Operation] = []
        self._tickets = itertools.count(1)
        SimProcess.__init__(self, world, name, clock)

    def now(self) -> Now:
        return self.clock.now()

    # -- life -----------------------------------------------------------------------------------------------------
    def start(self) -> None:
        self.born()
        self.link = None
        self._begin()
        if self.waiting:
            self.apply(Watch(list(self.waiting)))
        self.tick_for_ever(self._tick, 2 * self.sim.options.tick_s)
        self._catch_up()

    def _begin(self) -> None:
        hello = HelloClient(msg_id=0, client_id=self.name, token=self.token)
        self.machine = ClientMachine(hello, addresses=list(self.servers), jitter=self.sim.streams.jitter.random)
        self._tickets = itertools.count(1)
        self.asking = {}

    def crash(self, *, silent: bool = False) -> None:
        """Kill the process: nobody will know what came of its open calls."""
        link = self.link
        for asking in self.asking.values():
            self.sim.tell(AnsweredEvent(at=self.sim.at, client=self.name, call=asking.call, answer="unknown"))
        self.died()
        self.asking = {}
        if link is not None:
            self.network.process_gone([link], server=False, silent=silent)

    def resume(self) -> None:
        super().resume()
        self.network.go_on()
        self._catch_up()

    def _catch_up(self) -> None:
        wanted, self._wanted = self._wanted, []
        for operation in wanted:
            self.operate(operation)

    def exit_now(self) -> None:
        raise AssertionError("a client's machine never ends its process")

    def _tick(self) -> None:
        self.apply(Ticked())

    # -- the machine's driver -------------------------------------------------------------------------------------
    def hear(self, event: Event) -> None:
        self.apply(event)

    def hear_message(self, event: Received) -> None:
        self.apply(event)

    def _dial(self, wanted: Connect) -> None:
        self.network.connect(self, self.servers[wanted.address], wanted)

    def _perform(self, command: ClientCommand) -> None:
        super()._perform(command)
        if isinstance(command, WatchRefused):
            for job_id in command.job_ids:
                self.waiting.pop(job_id, None)

    # -- what its user does ---------------------------------------------------------------------------------------
    def operate(self, operation: Operation) -> None:
        """Make a planned call. A call that is due while the client is down or paused is made when it is back."""
        if not self.alive or self.paused:
            self._wanted.append(operation)
            return
        verb = operation.verb
        job_ids = operation.job_ids or tuple(spec.job_id for spec in operation.specs)
        if verb == "watch":
            self.waiting.update(dict.fromkeys(job_ids))
            self.apply(Watch(list(job_ids)))
            return
        ticket = next(self._tickets)
        asking = self.asking[ticket] = Asking(f"{self.name}/{self.life}/{ticket}", verb, job_ids)
        self.sim.tell(
            AskedEvent(
                at=self.sim.at,
                client=self.name,
                call=asking.call,
                verb=verb,
                job_ids=job_ids,
                bodies=tuple(body_hash(routed(spec)).hex() for spec in operation.specs),
            )
        )
        self.apply(self._call(ticket, operation, job_ids))

    def _call(self, ticket: int, operation: Operation, job_ids: tuple[str, ...]) -> Call:
        named = list(job_ids)
        match operation.verb:
            case "submit" | "rerun":
                specs, on_failed = list(operation.specs), "rerun" if operation.verb == "rerun" else "return"
                return Call(ticket, lambda msg_id: SubmitJobs(msg_id, specs, True, on_failed), watch=job_ids)
            case "cancel":
                return Call(ticket, lambda msg_id: CancelJobs(msg_id, named, "not wanted any more"))
            case "pause" | "resume" as verb:
                return Call(ticket, lambda msg_id: Request(msg_id, verb, {"pattern": operation.pattern}))
            case verb:
                return Call(ticket, lambda msg_id: Request(msg_id, verb, {"job_ids": named}))

    # -- what it is told ------------------------------------------------------------------------------------------
    def _answered(self, told: Told) -> None:
        asking = self.asking.pop(told.ticket)
        at, call = self.sim.at, asking.call
        if told.error is not None:
            # A call that may be tried again may also have been done: by an earlier try, whose answer was lost.
            answer = "unknown" if isinstance(told.error, Unavailable) else "refused"
            self.sim.tell(AnsweredEvent(at=at, client=self.name, call=call, answer=answer))
        elif isinstance(told.answer, Accepted):
            exceptional = {item.index: item for item in told.answer.exceptions}
            accepted = [
                one for place, one in enumerate(asking.job_ids) if place not in exceptional or not exceptional[place].code
            ]
            created = [one for place, one in enumerate(asking.job_ids) if place not in exceptional]
            self.waiting.update(dict.fromkeys(accepted))
            self.sim.tell(
                AnsweredEvent(at=at, client=self.name, call=call, answer="ok", accepted=tuple(accepted), created=tuple(created))
            )
        elif asking.verb == "cancel":
            words = [told.answer[job_id] for job_id in asking.job_ids]
            states = tuple(str(word["state"] or "") for word in words)
            yes = [
                one for one, word in zip(asking.job_ids, words, strict=True) if word["requested"] or word["state"] == "CANCELED"
            ]
            self.sim.tell(AnsweredEvent(at=at, client=self.name, call=call, answer="ok", accepted=tuple(yes), states=states))
        elif asking.verb == "requeue":
            done = tuple(job_id for job_id in asking.job_ids if told.answer[job_id]["done"])
            self.sim.tell(AnsweredEvent(at=at, client=self.name, call=call, answer="ok", accepted=done))
        else:
            self.sim.tell(AnsweredEvent(at=at, client=self.name, call=call, answer="ok"))

    def _arrived(self, arrived: Came) -> None:
        for item in arrived.items:
            self.waiting.pop(item.job_id, None)
            self.sim.tell(
                ArrivedEvent(
                    at=self.sim.at,
                    client=self.name,
                    job_id=item.job_id,
                    state=item.state,
                    attempt=item.attempt,
                    generation=item.generation,
                    result_sha256=item.outcome.result_sha256,
                )
            )

    # -- then -----------------------------------------------------------------------------------------------------
    @property
    def idle(self) -> bool:
        """The client waits for nothing."""
        return self.alive and not self.paused and not (self.asking or self.waiting or self._wanted)
