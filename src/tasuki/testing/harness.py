"""The machines together: clients, a server's broker, workers and a store, with no socket, thread or real clock.

A `World` has a fake clock and in-memory links; every message passes through the wire's bytes. Things happen one at a time and
only when a test says so: a message is delivered, the store takes or commits a turn, a clock moves. Links can be cut or held up,
the server killed between any two steps and started again on the same store, workers frozen or killed. After every commit the
invariants of RELIABILITY §1 that the store decides are checked; `check()` adds what clients and workers can see.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

from tasuki.core.broker import Broker, error_message
from tasuki.core.broker_events import BrokerConfig, DiskSpace, Query, TurnDone, TurnFailed
from tasuki.core.broker_events import Command as BrokerCommand
from tasuki.core.job import Job, OnDisconnect
from tasuki.core.machine import Closed, Hangup, Now, Opened, Peer, Received, Send, Ticked
from tasuki.core.protocol import FRAME_MAX_BYTES, Message, Reply
from tasuki.core.verbs import Answers, Filter, Turn
from tasuki.core.worker_machine import WorkerIdentity
from tasuki.errors import TasukiError
from tasuki.server.queries import answer_query
from tasuki.stores.batching import execute
from tasuki.stores.store import Store
from tasuki.testing.clocks import FakeClock
from tasuki.testing.harness_nodes import ClientNode, Link, Node, WorkerNode
from tasuki.testing.store_invariants import History
from tasuki.wire.messages import decode, encode

OWN_UID = 1000
SAME_USER = Peer("unix", OWN_UID, "unix socket")
STEP_S = 0.1  # how finely `run_for` cuts time: as the drivers tick
QUIET_STEPS_MAX = 20_000  # a world that has not come to rest by then is in a hot loop
WIDE_PAGE = 1_000


class World:
    """A server, its store and its peers. `restart` gets the store of the dead server and gives the one of the next."""

    def __init__(
        self,
        store: Store,
        clock: FakeClock,
        *,
        restart: Callable[[Store], Store] = lambda store: store,
        seed: int = 0,
        lease_ttl_s: float = 15.0,
    ) -> None:
        self.clock = clock
        self.store = store
        self.random = random.Random(seed)  # noqa: S311 - jitter and schedules that must be the same again
        self.history = History(clock)
        self.nodes: list[Node] = []
        self.links: dict[int, Link] = {}
        self.broker: Broker | None = None
        self.turn: Turn | None = None
        """Taken by the store, not committed."""
        self.answers: Answers | None = None
        """Committed; the broker has not heard of it."""
        self.turns = 0
        self.disk_problem = ""
        """What the driver sees when it looks at the disk."""
        self.refuse: Callable[[Turn], TasukiError | None] = lambda turn: None
        """Makes the store refuse a turn, before it did anything."""
        self.lose_answer: Callable[[Turn], TasukiError | None] = lambda turn: None
        """Makes the store commit a turn and then say that it does not know."""
        self._restart = restart
        self._numbers = itertools.count(1)
        self._lease_ttl_s = lease_ttl_s
        self._start_broker()

    # -- time -----------------------------------------------------------------------------------------------------
    def now(self) -> Now:
        return Now(self.clock.lease(), self.clock.wall())

    def tick(self) -> None:
        """Everybody's timer fires."""
        if self.broker is not None:
            self._perform(self.broker.apply(DiskSpace(self.disk_problem), self.now()))
            self._perform(self.broker.apply(Ticked(), self.now()))
        for node in self.nodes:
            if node.awake:
                node.apply(Ticked())

    def run_for(self, seconds: float, step_s: float = STEP_S) -> None:
        """Let time pass; all that can happen happens."""
        end = self.clock.lease() + seconds
        while self.clock.lease() < end - 1e-9:
            self.clock.advance(min(step_s, end - self.clock.lease()))
            self.tick()
            self.settle()

    def run_until(self, condition: Callable[[], bool], within_s: float, step_s: float = STEP_S) -> None:
        """Let time pass until the condition holds; AssertionError if it does not within that time."""
        end = self.clock.lease() + within_s
        while not condition():
            assert self.clock.lease() < end, f"it did not happen within {within_s} s"
            self.run_for(step_s, step_s)

    # -- nodes ----------------------------------------------------------------------------------------------------
    def client(self, name: str = "client", *, peer: Peer = SAME_USER, token: str = "") -> ClientNode:
        return self._join(ClientNode(self, name, peer, token))

    def worker(
        self, name: str = "w1", *, capacity: int = 1, incarnation: str = "", peer: Peer = SAME_USER, **fields: Any
    ) -> WorkerNode:
        patterns = fields.pop("patterns", (">",))
        identity = WorkerIdentity(
            worker_id=name, incarnation=incarnation or f"{name}-1", capacity=capacity, patterns=patterns, **fields
        )
        return self._join(WorkerNode(self, name, peer, identity))

    def _join(self, node: Any) -> Any:
        self.nodes.append(node)
        node.apply(Ticked())
        self.settle()
        return node

    @property
    def workers(self) -> list[WorkerNode]:
        return [node for node in self.nodes if isinstance(node, WorkerNode)]

    @property
    def clients(self) -> list[ClientNode]:
        return [node for node in self.nodes if isinstance(node, ClientNode)]

    def kill(self, node: Node) -> None:
        """The process is gone, and its connection with it."""
        node.dead = True
        if isinstance(node, WorkerNode):
            node.running.clear()
        self.cut(node)

    def exit(self, node: Node) -> None:
        """The process ends by itself: what it sent before still arrives."""
        node.dead = True
        link, node.link = node.link, None
        if link is not None:
            while link.to_server:
                self.deliver_to_server(link)
            self._server_loses(link, "the peer closed the connection")

    # -- links ----------------------------------------------------------------------------------------------------
    def dial(self, node: Node) -> None:
        node.dials += 1
        if self.broker is None:
            node.apply(Closed(0, "connection refused"))
            return
        conn = next(self._numbers)
        node.link = self.links[conn] = Link(conn, node)
        self._perform(self.broker.apply(Opened(conn, node.peer), self.now()))
        node.apply(Opened(conn, node.peer))

    def send_to_server(self, node: Node, conn: int, message: Message) -> None:
        if node.link is not None and node.link.conn == conn and not node.link.mute:
            node.link.to_server.append(encode(message))

    def deliver_to_server(self, link: Link) -> None:
        """The next piece of this way arrives."""
        data = link.to_server.popleft()
        for frame in link.server_decoder.feed(data):
            if self.broker is not None and link.conn in self.links:
                self._perform(self.broker.apply(Received(link.conn, decode(frame, FRAME_MAX_BYTES)), self.now()))

    def deliver_to_node(self, link: Link) -> None:
        """The next piece of this way arrives; if the server hung up, after the last one the end."""
        if link.to_node:
            data = link.to_node.popleft()
            for frame in link.node_decoder.feed(data):
                if link.node.awake:
                    link.node.apply(Received(link.conn, decode(frame, FRAME_MAX_BYTES)))
        elif link.ending:
            self._node_loses(link, link.ending)

    def cut(self, node: Node, reason: str = "the connection was cut") -> None:
        """Both sides lose the connection, and all that was on its way."""
        if (link := node.link) is not None:
            self._server_loses(link, reason)
            self._node_loses(link, reason)

    def close_from_node(self, node: Node, reason: str) -> None:
        if (link := node.link) is not None:
            if not link.mute:
                self._server_loses(link, reason)
            self._node_loses(link, reason)

    def _server_loses(self, link: Link, reason: str) -> None:
        if self.links.pop(link.conn, None) is not None and self.broker is not None:
            self._perform(self.broker.apply(Closed(link.conn, reason), self.now()))

    def _node_loses(self, link: Link, reason: str) -> None:
        link.ending = ""
        link.to_node.clear()
        node = link.node
        if node.link is link:
            node.link = None
            if not node.dead:
                node.apply(Closed(link.conn, reason))

    # -- the server -----------------------------------------------------------------------------------------------
    def _start_broker(self) -> None:
        epoch = self.store.take_over(f"server-{self.turns}")
        self.broker = Broker(BrokerConfig(server_id="server", epoch=epoch, own_uid=OWN_UID, lease_ttl_s=self._lease_ttl_s))

    def kill_server(self) -> None:
        """SIGKILL: a turn that was not committed never was; nothing that was not sent is sent."""
        self.broker = self.turn = self.answers = None
        for link in list(self.links.values()):
            self.links.pop(link.conn)
            self._node_loses(link, "connection reset")

    def restart_server(self) -> None:
        self.store = self._restart(self.store)
        self._start_broker()

    def _perform(self, commands: list[BrokerCommand]) -> None:
        for command in commands:
            if isinstance(command, Send):
                self._send_to_node(command.conn, command.message)
            elif isinstance(command, Hangup):
                error = command.error
                link = self.links.pop(command.conn, None)
                if link is not None and not link.mute:
                    if error is not None:
                        link.to_node.append(encode(error_message(0, error)))
                    link.ending = error.message if error is not None else "closed"
            elif isinstance(command, Query):
                self._answer_query(command)
            else:
                raise AssertionError(f"no blobs travel in this world: {command}")

    def _send_to_node(self, conn: int, message: Message) -> None:
        link = self.links.get(conn)
        if link is not None and not link.mute and not link.loses(message) and (data := encode(message)):
            link.to_node.append(data)

    def _answer_query(self, query: Query) -> None:
        try:
            self._send_to_node(query.conn, Reply(query.msg_id, answer_query(self.store, query)))
        except TasukiError as error:
            self._send_to_node(query.conn, error_message(query.msg_id, error))

    # -- the store ------------------------------------------------------------------------------------------------
    def take_turn(self) -> bool:
        """If it is idle, the store takes what the broker has drafted."""
        if self.broker is None or self.turn is not None:
            return False
        self.turn = self.broker.next_turn(self.now())
        return self.turn is not None

    def commit_turn(self) -> None:
        """The turn becomes durable; the broker does not know it yet."""
        assert self.turn is not None
        assert self.answers is None
        turn = self.turn
        if (error := self.refuse(turn)) is not None:
            self._turn_failed(error)
            return
        self.turns += 1
        before = self._jobs([*(report.job_id for report in turn.finish), *(report.job_id for report in turn.fail)])
        answers = execute(self.store, turn)
        self._tell_history(turn, answers, before)
        if (error := self.lose_answer(turn)) is not None:
            self._turn_failed(error)
            return
        self.answers = answers

    def answer_turn(self) -> None:
        """The broker hears of the commit, and sends what follows from it."""
        assert self.broker is not None
        assert self.turn is not None
        assert self.answers is not None
        turn, answers = self.turn, self.answers
        self.turn = self.answers = None
        self._perform(self.broker.apply(TurnDone(turn, answers), self.now()))

    def _turn_failed(self, error: TasukiError) -> None:
        assert self.broker is not None
        assert self.turn is not None
        turn, self.turn = self.turn, None
        self._perform(self.broker.apply(TurnFailed(turn, error), self.now()))

    def _jobs(self, job_ids: list[str]) -> dict[str, Job | None]:
        return dict(zip(job_ids, self.store.get(job_ids), strict=True))

    def _tell_history(self, turn: Turn, answers: Answers, before: dict[str, Job | None]) -> None:
        history = self.history
        history.submitted([*turn.submit, *turn.rerun], [*answers.submit, *answers.rerun])
        history.reported("finish", turn.finish, [before[report.job_id] for report in turn.finish], answers.finish)
        history.reported("fail", turn.fail, [before[report.job_id] for report in turn.fail], answers.fail)
        for grants in answers.lease:
            for grant, job in zip(grants, self.store.get([grant.job_id for grant in grants]), strict=True):
                assert job is not None
                history.granted(grant, job)

    # -- running --------------------------------------------------------------------------------------------------
    def choices(self) -> list[Callable[[], object]]:
        """Everything that could happen next."""
        found: list[Callable[[], object]] = []
        for link in [node.link for node in self.nodes if node.link is not None]:
            if link.to_server and not link.hold_to_server and self.broker is not None:
                found.append(lambda link=link: self.deliver_to_server(link))  # type: ignore[misc]
            if (link.to_node or link.ending) and not link.hold_to_node and link.node.awake:
                found.append(lambda link=link: self.deliver_to_node(link))  # type: ignore[misc]
        if self.answers is not None:
            found.append(self.answer_turn)
        elif self.turn is not None:
            found.append(self.commit_turn)
        return found

    def settle(self) -> None:
        """Let everything happen that needs no time to pass."""
        for _ in range(QUIET_STEPS_MAX):
            for node in self.nodes:
                if node.awake:
                    node.flush()
            choices = self.choices()
            if choices:
                choices[0]()
            elif not self.take_turn():
                return
        raise AssertionError("the world does not come to rest: a hot loop")

    # -- then -----------------------------------------------------------------------------------------------------
    def job(self, job_id: str) -> Job:
        [job] = self.store.get([job_id])
        assert job is not None, f"there is no job {job_id}"
        return job

    def all_jobs(self) -> list[Job]:
        jobs, cursor = [], None
        while True:
            page = self.store.find(Filter(), limit=WIDE_PAGE, cursor=cursor)
            jobs += page.jobs
            cursor = page.cursor
            if cursor is None:
                return jobs

    def check(self) -> None:
        """What must hold between any two steps."""
        jobs = self.all_jobs()
        self.history.check(jobs, {job.job_id: self.store.incidents(job.job_id) for job in jobs})
        stored = {job.job_id: job for job in jobs}
        for worker in self.workers:
            assert worker.outstanding <= worker.identity.capacity, f"{worker.name} was given more than its credit"
            assert len(worker.runs) == len(set(worker.runs)), f"{worker.name} ran an attempt twice: {worker.runs}"
        self._check_runs()
        for client in self.clients:
            self._check_client(client, stored)

    def _check_runs(self) -> None:
        """No attempt runs at two places; and (I9) of workers that stop when cut off, only one runs a job."""
        attempts = [run for worker in self.workers for run in worker.runs]
        assert len(attempts) == len(set(attempts)), "an attempt ran at two workers"
        now = [
            grant.job_id
            for worker in self.workers
            if worker.awake and worker.identity.on_disconnect is OnDisconnect.STOP
            for grant in worker.running.values()
        ]
        assert len(now) == len(set(now)), f"I9: a job runs at two workers: {sorted(now)}"

    def _check_client(self, client: ClientNode, stored: dict[str, Job]) -> None:
        for job_id in client.accepted:
            assert job_id in stored, f"I1: {job_id} was accepted and is gone"
        for job_id, results in client.results.items():
            for result in results:
                job = stored[job_id]
                if result.generation == job.generation:
                    assert job.state is result.state, f"I4, I14: {job_id} was told {result.state} and is {job.state}"
                    assert result.attempt == job.attempt, f"I13: {job_id} was told attempt {result.attempt} of {job.attempt}"
                    told, kept = result.outcome, job.outcome
                    assert kept is not None
                    assert (told.result, told.error_code) == (kept.result, kept.error_code), f"I13: {job_id}"
