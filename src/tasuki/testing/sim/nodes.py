"""Processes without a world: clients, workers and servers, each a machine with the state that a driver keeps.

Touches nothing: bytes go into lists, and a world moves them. The simulator subclasses these processes; the harness of our own
tests moves their bytes step by step. `NodeContext` and `ServerContext` name what a process needs of either world. A step that
takes time in the simulator is a method of its own here.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from tasuki.core.address import Address
from tasuki.core.broker import events as broker_events
from tasuki.core.broker.broker import Broker
from tasuki.core.client_machine import Call, CallAnswered, ClientMachine, Failed, ResultsArrived, Watch, WatchRefused
from tasuki.core.client_machine import Command as ClientCommand
from tasuki.core.client_machine import Event as ClientEvent
from tasuki.core.cluster_messages import Hint
from tasuki.core.election import EpochFenced, Lapsed, TookOver
from tasuki.core.job import JobSpec, Outcome
from tasuki.core.machine import Hangup, Now, Peer, Send
from tasuki.core.protocol import (
    FRAME_MAX_BYTES,
    Accepted,
    CancelJobs,
    Ending,
    HelloClient,
    JobResult,
    Message,
    Reply,
    Request,
    SubmitJobs,
    error_message,
)
from tasuki.core.reconnect import Connect
from tasuki.core.store_messages import Answers, Grant, Turn
from tasuki.core.worker import events as worker_events
from tasuki.core.worker.machine import WorkerMachine
from tasuki.errors import StaleEpoch, TasukiError
from tasuki.server.cluster import ClusterCommand, SingleServer
from tasuki.server.queries import answer_query, routed_jobs
from tasuki.stores.batching import execute
from tasuki.stores.store import Store
from tasuki.testing.sim.recorder import Recorder
from tasuki.wire.messages import FrameDecoder, encode


class NodeContext(Protocol):
    """The part of its world that a client or worker needs."""

    random: random.Random
    """The source of the jitter of the machine."""

    def now(self) -> Now: ...
    def send_to_server(self, node: Any, conn: int, message: Message) -> None: ...
    def dial(self, node: Any, address: Address) -> None: ...
    def close_from_node(self, node: Any, reason: str) -> None: ...
    def exit(self, node: Any) -> None: ...


class NodeLink:
    """One connection: bytes on their way in both directions. A held direction keeps its bytes; a `mute` link loses them."""

    def __init__(self, conn: int, node: Node, server: ServerNode) -> None:
        self.conn = conn
        self.node = node
        self.server = server
        self.accepted = False
        """The server has heard of the connection."""
        self.lost = ""
        """The reason why the peer has left; a frozen server hears of it later."""
        self.to_server: deque[bytes] = deque()
        self.to_node: deque[bytes] = deque()
        self.server_decoder = FrameDecoder(FRAME_MAX_BYTES)
        self.node_decoder = FrameDecoder(FRAME_MAX_BYTES)
        self.hold_to_server = False
        self.hold_to_node = False
        self.mute = False
        self.loses: Callable[[Message], bool] = lambda message: False
        """Decide which of the server's messages are lost on this link."""
        self.ending = ""
        """The reason why the server hung up: the peer hears of it when it has read what was sent before."""


class Node:
    """One peer of the server: a machine, and the state that its driver would keep."""

    def __init__(self, world: NodeContext, name: str, peer: Peer) -> None:
        self.world = world
        self.name = name
        self.peer = peer
        self.link: NodeLink | None = None
        self.frozen = False
        self.dead = False
        self.dials = 0

    @property
    def awake(self) -> bool:
        return not (self.frozen or self.dead)

    def now(self) -> Now:
        """Return what the clocks of this process show."""
        return self.world.now()

    def apply(self, event: Any) -> None:
        raise NotImplementedError

    def _dial(self, wanted: Connect) -> None:
        self.world.dial(self, wanted.address)

    def flush(self) -> None:
        """Send what the machine has gathered in this turn of its loop; only workers gather anything."""


class ClientNode(Node):
    """A client process, with the answers and results that it received."""

    def __init__(self, world: NodeContext, name: str, peer: Peer, token: str, addresses: Sequence[Address]) -> None:
        super().__init__(world, name, peer)
        hello = HelloClient(msg_id=0, client_id=name, token=token)
        self.machine = ClientMachine(hello, addresses=addresses, jitter=world.random.random)
        self.answers: dict[int, CallAnswered] = {}
        self.results: dict[str, list[JobResult]] = {}
        self.accepted: dict[str, JobSpec] = {}
        self.refused: dict[str, TasukiError] = {}
        self.failed: TasukiError | None = None
        self._submits: dict[int, list[JobSpec]] = {}
        self._tickets = itertools.count(1)

    def apply(self, event: ClientEvent) -> None:
        for command in self.machine.apply(event, self.now()):
            self._perform(command)

    def _perform(self, command: ClientCommand) -> None:
        match command:
            case Send():
                self.world.send_to_server(self, command.conn, command.message)
            case CallAnswered():
                self._answered(command)
            case ResultsArrived():
                self._arrived(command)
            case Connect():
                self._dial(command)
            case Hangup():
                self.world.close_from_node(self, "the client hung up")
            case WatchRefused():
                self.refused.update(dict.fromkeys(command.job_ids, command.error))
            case Failed():
                self.failed = command.error

    def _arrived(self, arrived: ResultsArrived) -> None:
        for item in arrived.items:
            self.results.setdefault(item.job_id, []).append(item)

    def _answered(self, answered: CallAnswered) -> None:
        self.answers[answered.ticket] = answered
        self._accepted(answered)

    def _accepted(self, answered: CallAnswered) -> None:
        specs = self._submits.pop(answered.ticket, None)
        if specs is None or not isinstance(answered.answer, Accepted):
            return
        refused = {item.index for item in answered.answer.exceptions if item.code}
        taken = [spec for index, spec in enumerate(specs) if index not in refused]
        self.accepted.update((spec.job_id, spec) for spec in taken)

    # -- what a user does -----------------------------------------------------------------------------------------
    def call(self, make: Callable[[int], Message]) -> int:
        """Send a call; return the ticket under which `answers` will have the answer."""
        ticket = next(self._tickets)
        self.apply(Call(ticket, make))
        return ticket

    def submit(self, *specs: JobSpec, on_failed: str = "return") -> int:
        ticket = next(self._tickets)
        self._submits[ticket] = list(specs)
        watch = tuple(spec.job_id for spec in specs)
        self.apply(Call(ticket, lambda msg_id: SubmitJobs(msg_id, list(specs), True, on_failed), watch=watch))
        return ticket

    def submit_ids(self, *job_ids: str, **fields: Any) -> int:
        return self.submit(*(JobSpec(job_id=job_id, **fields) for job_id in job_ids))

    def cancel(self, *job_ids: str, reason: str = "") -> int:
        return self.call(lambda msg_id: CancelJobs(msg_id, list(job_ids), reason))

    def request(self, verb: str, **params: Any) -> int:
        return self.call(lambda msg_id: Request(msg_id, verb, params))

    def watch(self, *job_ids: str) -> None:
        self.apply(Watch(list(job_ids)))

    def result(self, job_id: str) -> JobResult:
        """Return the only result that came for this job."""
        [result] = self.results[job_id]
        return result


class WorkerNode(Node):
    """A worker process. Attempts run until the test ends them; a stopped one ends at once."""

    def __init__(
        self, world: NodeContext, name: str, peer: Peer, identity: worker_events.WorkerIdentity, addresses: Sequence[Address]
    ) -> None:
        super().__init__(world, name, peer)
        self.identity = identity
        self.machine = WorkerMachine(identity, addresses=addresses, jitter=world.random.random)
        self.running: dict[str, Grant] = {}
        self.runs: list[tuple[str, int]] = []
        self.stopped: list[tuple[str, str]] = []
        self.forgotten: list[tuple[str, str]] = []
        self.disk: dict[str, Ending] = {}
        """Endings that the worker has saved."""
        self.exited: worker_events.Exit | None = None
        self.handlers = False
        """Attempts are handlers in the worker's loop: a start is reported only if they take longer."""

    def apply(self, event: worker_events.Event) -> None:
        for command in self.machine.apply(event, self.now()):
            self._perform(command)

    def flush(self) -> None:
        for command in self.machine.flush(self.now()):
            self._perform(command)

    def _perform(self, command: worker_events.Command) -> None:
        match command:
            case Send():
                self.world.send_to_server(self, command.conn, command.message)
            case worker_events.Run():
                self._run(command.grant)
            case worker_events.Stop():
                self._stop(command)
            case worker_events.Save():
                self._save(command.ending)
            case worker_events.Forget():
                self.disk.pop(command.lease_id, None)
                self.forgotten.append((command.lease_id, command.fenced))
            case Connect():
                self._dial(command)
            case Hangup():
                self.world.close_from_node(self, "the worker hung up")
            case worker_events.Exit():
                self.exited = command
                self.world.exit(self)

    def _run(self, grant: Grant) -> None:
        self.running[grant.lease_id] = grant
        self.runs.append((grant.job_id, grant.attempt))
        self._started(grant.lease_id)

    def _stop(self, command: worker_events.Stop) -> None:
        grant = self.running.pop(command.lease_id)
        self.stopped.append((grant.job_id, command.reason))
        self.apply(worker_events.AttemptEnded(command.lease_id, Outcome(error_code=command.reason, message="stopped")))

    def _save(self, ending: Ending) -> None:
        self.disk[ending.lease_id] = ending
        self.apply(worker_events.EndingSaved(ending.lease_id))

    def _started(self, lease_id: str) -> None:
        if self.handlers:
            self.machine.handler_started(lease_id, self.now().wall)
        else:
            self.apply(worker_events.Started(lease_id))

    # -- what happens in the process ------------------------------------------------------------------------------
    @property
    def jobs(self) -> list[str]:
        """The ids of the jobs that run now."""
        return [grant.job_id for grant in self.running.values()]

    def grant_of(self, job_id: str) -> Grant:
        [grant] = [grant for grant in self.running.values() if grant.job_id == job_id]
        return grant

    def finish(self, job_id: str, result: bytes = b"done") -> Grant:
        return self.end(job_id, Outcome(exit_code=0, result=result))

    def fail(self, job_id: str, **fields: Any) -> Grant:
        return self.end(job_id, Outcome(**{"exit_code": 1, "error_code": "EXIT_CODE", "message": "it broke", **fields}))

    def end(self, job_id: str, outcome: Outcome) -> Grant:
        grant = self.grant_of(job_id)
        del self.running[grant.lease_id]
        self.apply(worker_events.AttemptEnded(grant.lease_id, outcome))
        return grant

    def give_back(self, job_id: str) -> None:
        grant = self.grant_of(job_id)
        del self.running[grant.lease_id]
        self.apply(worker_events.AttemptReturned(grant.lease_id))

    def restore(self, disk: dict[str, Ending]) -> None:
        """Restore the endings that an earlier process of this worker saved."""
        for ending in disk.values():
            self.disk[ending.lease_id] = ending
            self.apply(worker_events.Restored(ending))

    def drain(self) -> None:
        self.apply(worker_events.Drain())

    @property
    def outstanding(self) -> int:
        """The number of attempts that the worker was given and that have not ended."""
        return sum(1 for held in self.machine.held.values() if held.ending is None)


# ---------------------------------------------------------------------------------------------------- servers

OWN_UID = 1000


class ServerContext(Protocol):
    """The part of its world that a server needs."""

    store: Store
    links: dict[int, NodeLink]
    turns: int
    refuse: Callable[[Turn], TasukiError | None]
    lose_answer: Callable[[Turn], TasukiError | None]

    @property
    def history(self) -> Recorder: ...
    def now(self) -> Now: ...
    def hint(self, sender: ServerNode, hint: Hint) -> None: ...
    def hang_up(self, conn: int, last_words: bytes, reason: str) -> None: ...


class ServerNode:
    """One server process. `broker` is None while it is dead; a frozen one keeps its connections and answers nothing."""

    def __init__(self, world: ServerContext, server_id: str, address: Address, *, shared: bool, lease_ttl_s: float) -> None:
        self.world = world
        self.server_id = server_id
        self.address = address
        self.frozen = False
        self.broker: Broker | None = None
        self.turn: Turn | None = None
        """The turn that the store has taken and not committed."""
        self.answers: Answers | None = None
        """The answers of a committed turn that the broker has not heard of."""
        self.hints: deque[Hint] = deque()
        """Hints of other servers, on their way."""
        self._shared = shared
        self._lease_ttl_s = lease_ttl_s

    @property
    def awake(self) -> bool:
        return self.broker is not None and not self.frozen

    @property
    def leads(self) -> int:
        """The epoch under which the server believes to lead; 0 if it does not."""
        return self.broker.epoch if self.broker is not None else 0

    def start(self) -> None:
        epoch = 0
        if not self._shared:  # whoever opens such a store leads it
            epoch = self.world.store.epoch()[0] + 1
            assert self.world.store.take_over(self.server_id, epoch)
            self.world.history.took_over(self.server_id, epoch, done=True)
        self._begin(epoch)

    def _begin(self, epoch: int, **settings: Any) -> None:
        config = broker_events.BrokerConfig(
            server_id=self.server_id,
            epoch=epoch,
            shared=self._shared,
            own_uid=OWN_UID,
            lease_ttl_s=self._lease_ttl_s,
            **settings,
        )
        self.broker = Broker(config)
        self.broker.addresses = (str(self.address),)

    def die(self) -> None:
        """Kill the process (SIGKILL): a turn that was not committed never happened; nothing more is sent."""
        self.broker = self.turn = self.answers = None
        self.frozen = False
        self.hints.clear()

    def now(self) -> Now:
        """Return what the clocks of this process show."""
        return self.world.now()

    def apply(self, event: broker_events.Event) -> None:
        if self.broker is not None:
            self._perform(self.broker.apply(event, self.now()))

    tell = apply

    def _perform(self, commands: list[broker_events.Command]) -> None:
        for command in commands:
            match command:
                case Send():
                    self._send(command.conn, command.message)
                case Hangup():
                    self._hang_up(command)
                case broker_events.Query():
                    self._answer_query(command)
                case (
                    broker_events.Publish()
                    | broker_events.StartRuns()
                    | broker_events.NoteAssigned()
                    | TookOver()
                    | EpochFenced()
                    | Lapsed()
                ):
                    self._told(command)
                case broker_events.LogFenced():
                    """The history has the answer of the store."""
                case broker_events.AskEnded() | broker_events.AskRevoked() | broker_events.AskReady() | broker_events.AskRouted():
                    self._ask(command)
                case _:
                    raise AssertionError(f"no blobs travel in this world: {command}")

    def _hang_up(self, command: Hangup) -> None:
        error = command.error
        self.world.hang_up(command.conn, encode(error_message(0, error)) if error else b"", error.message if error else "")

    def _told(self, command: ClusterCommand) -> None:
        """Carry out a command that concerns other servers; the harness is also the election, and counts every win."""
        if not self._shared:
            SingleServer(cast(Any, self)).carry_out(command)
        elif isinstance(command, broker_events.Publish):
            self.world.hint(self, command.hint)
        else:
            self.tell(broker_events.Elected(command.epoch if isinstance(command, TookOver) and command.done else 0))

    def _ask(self, command: broker_events.StoreQuestion) -> None:
        if isinstance(command, broker_events.AskEnded):
            self.apply(broker_events.SomeEnded(self.world.store.ended_among(command.job_ids)))
        elif isinstance(command, broker_events.AskReady):
            self.apply(broker_events.ReadyFound(self.world.store.ready_queues(command.place, limit=command.limit)))
        elif isinstance(command, broker_events.AskRouted):
            self.apply(broker_events.RoutedFound(routed_jobs(self.world.store, command)))
        else:
            self.apply(broker_events.SomeRevoked(self.world.store.revoked_among(command.token_ids)))

    def _send(self, conn: int, message: Message) -> None:
        link = self.world.links.get(conn)
        if link is not None and not link.mute and not link.loses(message) and (data := encode(message)):
            link.to_node.append(data)

    def _answer_query(self, query: broker_events.Query) -> None:
        try:
            self._send(query.conn, Reply(query.msg_id, answer_query(self.world.store, query)))
        except TasukiError as error:
            self._send(query.conn, error_message(query.msg_id, error))

    # -- the store ------------------------------------------------------------------------------------------------
    def take_turn(self) -> bool:
        """Let the store take what the broker has gathered, if no turn is under way; return whether it did."""
        if self.broker is None or self.frozen or self.turn is not None:
            return False
        self.turn = self.broker.next_turn(self.now())
        return self.turn is not None

    def commit_turn(self) -> None:
        """Make the turn durable; the broker does not know it yet."""
        assert self.turn is not None
        assert self.answers is None
        turn, world = self.turn, self.world
        if (error := world.refuse(turn)) is not None:
            self._turn_failed(error)
            return
        world.turns += 1
        try:
            answers = execute(world.store, turn)
        except StaleEpoch as stale:
            self._turn_failed(stale)
            return
        world.history.turn(self.server_id, turn, answers)
        if (error := world.lose_answer(turn)) is not None:
            self._turn_failed(error)
            return
        self.answers = answers

    def answer_turn(self) -> None:
        """Tell the broker of the commit, and let it send what follows."""
        assert self.turn is not None
        assert self.answers is not None
        turn, answers = self.turn, self.answers
        self.turn = self.answers = None
        self.apply(broker_events.TurnDone(turn, answers))

    def _turn_failed(self, error: TasukiError) -> None:
        assert self.turn is not None
        turn, self.turn = self.turn, None
        self.apply(broker_events.TurnFailed(turn, error))

    def choices(self) -> list[Callable[[], object]]:
        """Return the events of store and other servers that could reach this server next."""
        if not self.awake:
            return []
        found: list[Callable[[], object]] = [self._hear_hint] if self.hints else []
        if self.answers is not None:
            found.append(self.answer_turn)
        elif self.turn is not None:
            found.append(self.commit_turn)
        return found

    def _hear_hint(self) -> None:
        self.apply(broker_events.Hinted(self.hints.popleft()))
