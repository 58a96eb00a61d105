"""Roles of a node, with a cluster in memory: what it does about a leader that does not work, and nodes that are silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tasuki.coords.coordination import LEADER, ClusterMember, MemoryCoordination, View
from tasuki.core.broker.broker import Broker
from tasuki.core.broker.events import BrokerConfig, Elected
from tasuki.core.cluster_messages import ServerInfo, WorkerInfo
from tasuki.core.election import LEADER_SCOPE
from tasuki.core.machine import Now
from tasuki.core.scheduler.sub_leader import DEFERENCE_S
from tasuki.core.scheduler.thresholds import Thresholds
from tasuki.errors import TasukiError, Unavailable
from tasuki.event_loop import BackgroundTasks
from tasuki.server.roles import NodeCaller, Roles
from tasuki.testing.clocks import FakeClock

TERM = 7
LEADING = ServerInfo(server_id="1", node_id="n1", epoch=TERM, grpc_address="n1:50051")
WATCHING = ServerInfo(server_id="3", node_id="n3", sub_leads=True)
WORKERS = (WorkerInfo("5", "5/1", ()), WorkerInfo("6", "6/1", ()))
SILENT = ServerInfo(server_id="5", node_id="n5", grpc_address="n5:50051", workers=WORKERS)
FAILURES = Thresholds().grpc_ping_failures


class Calls:
    """Calls to other nodes, with the answers that a test wants: a time, None, or an error."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.count = 0

    async def led_ago_s(self, node: ServerInfo, timeout_s: float) -> float | None:
        self.count += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return float(self.answer) if self.answer is not None else None

    async def ping(self, node: ServerInfo, timeout_s: float) -> None:
        await self.led_ago_s(node, timeout_s)


class Node:
    """A node with its cluster's part and its server, in memory; worker 1 leads under epoch TERM."""

    is_candidate, server_id = True, "2"

    def __init__(self, caller: NodeCaller | None, *, node_id: str = "n2") -> None:
        self.clock = FakeClock()
        self.coordination = MemoryCoordination(self.clock.lease)
        self.coordination.acquire(LEADER_SCOPE, "1", 50.0, TERM - 1)
        self.broker = Broker(BrokerConfig(server_id="2", node_id=node_id))
        self.registered: int | TasukiError = TERM
        self.deferences: list[tuple[float, bool]] = []
        self.failed: list[str] = []
        self._tasks = BackgroundTasks(lambda task: self.failed.append(str(task.exception())) if task.exception() else None)
        self.roles = Roles(node_id)
        self.roles.caller = caller
        self.roles.join(self)  # type: ignore[arg-type]

    @property
    def server(self) -> Node:
        return self

    def now(self) -> Now:
        return Now(self.clock.lease(), self.clock.wall())

    async def ask(self, question: Callable[[Any], Any]) -> Any:
        return question(self)

    def epoch(self) -> tuple[int, str]:
        if isinstance(self.registered, TasukiError):
            raise self.registered
        return self.registered, "1"

    async def call(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        return verb(*arguments)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._tasks.spawn(work)

    def set_deference(self, deference_s: float, *, now_free: bool = False) -> None:
        self.deferences.append((deference_s, now_free))

    # ------------------------------------------------------------------------------------------------ of the tests

    async def tick(self, times: int = 1, *, every_s: float = 1.0) -> None:
        for _ in range(times):
            self.clock.advance(every_s)
            self.roles.tick(self.now())
            await self._tasks.wait()

    def met(self, *nodes: ServerInfo, leader_seen_s: float | None = None) -> None:
        self.roles.met(View((), frozenset(), leader_seen_s=leader_seen_s), list(nodes))

    def leads(self) -> None:
        self.broker.apply(Elected(TERM), self.now())

    @property
    def has_deposed(self) -> bool:
        return (0.0, True) in self.deferences


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


# ---------------------------------------------------------------------------------------------------- who asks first


@pytest.mark.parametrize(
    ("node_id", "sub_leads", "deference_s"),
    [("n2", True, 0.0), ("n1", True, DEFERENCE_S), ("n2", False, DEFERENCE_S)],
)
def test_a_sub_leader_of_another_node_than_the_leaders_asks_first(node_id: str, sub_leads: bool, deference_s: float) -> None:
    async def scenario() -> None:
        node = Node(None, node_id=node_id)
        if not sub_leads:
            node.coordination.acquire(f"subleader:{node_id}", "3", 50.0, 0)
        node.met(LEADING, WATCHING, leader_seen_s=0.0)
        await node.tick(2)

        assert (node.roles.sub_leads, node.broker.sub_leads) == (sub_leads, sub_leads)
        assert node.deferences[-1] == (deference_s, False)

    run(scenario())


def test_a_node_that_leads_or_stands_no_more_gives_the_lock_of_the_sub_leader_back() -> None:
    async def scenario() -> None:
        node = Node(None)
        await node.tick(2)
        assert node.roles.sub_leads
        node.leads()
        await node.tick(2)

        assert not node.roles.sub_leads
        assert not node.broker.sub_leads
        assert node.coordination.acquire("subleader:n2", "3", 5.0, 0).epoch == 2  # type: ignore[union-attr]

    run(scenario())


# ---------------------------------------------------------------------------------------------------- the leader is judged


@pytest.mark.parametrize(
    ("caller", "deposes"),
    [
        (Calls(Unavailable("no answer")), True),
        (Calls(None), True),  # it answers that it does not lead, and the store knows no other leader
        (Calls(60.0), True),  # it answers, but the store took no turn of it for a minute
        (None, True),
        (Calls(0.5), False),
    ],
    ids=["silent", "does not lead", "hangs", "nobody can be called", "works"],
)
def test_a_leader_that_does_not_work_is_deposed_after_as_many_calls_as_the_settings_say(
    caller: Calls | None, deposes: bool
) -> None:
    async def scenario() -> None:
        node = Node(caller)
        node.met(LEADING, leader_seen_s=0.0)
        await node.tick(5)
        assert caller is None or caller.count == 0, "it was seen lately"
        ticks = 0
        while not node.has_deposed and ticks < 50:
            ticks += 1
            await node.tick(every_s=0.1)

        assert node.has_deposed == deposes
        assert node.coordination.release(LEADER_SCOPE, "1", TERM) != deposes
        assert caller is None or caller.count == (FAILURES if deposes else 5)  # one that works is asked once a second

    run(scenario())


@pytest.mark.parametrize("registered", [TERM + 1, Unavailable("the database is away")], ids=["another leads", "no store"])
def test_nobody_is_deposed_by_a_node_that_the_store_does_not_tell_that_this_one_leads(registered: int | TasukiError) -> None:
    async def scenario() -> None:
        node = Node(Calls(Unavailable("no answer")))
        node.registered = registered
        node.met(LEADING, leader_seen_s=0.0)
        await node.tick(20)

        assert not node.has_deposed

    run(scenario())


@pytest.mark.parametrize(("node_id", "deference_s"), [("n2", 0.0), ("n1", DEFERENCE_S)])
def test_who_has_deposed_the_leader_stands_after_sub_leaders_of_other_nodes_all_the_same(
    node_id: str, deference_s: float
) -> None:
    async def scenario() -> None:
        node = Node(Calls(Unavailable("no answer")), node_id=node_id)
        node.met(LEADING, WATCHING, leader_seen_s=0.0)
        await node.tick(15)

        assert {deference for deference, now_free in node.deferences if now_free} == {deference_s}

    run(scenario())


def test_a_call_that_fails_in_an_unexpected_way_does_not_end_the_watch_over_the_leader() -> None:
    async def scenario() -> None:
        calls = Calls(OSError("no such file"))
        node = Node(calls)
        node.met(LEADING, leader_seen_s=0.0)
        await node.tick(10)
        assert not node.has_deposed, "nothing is known of it"
        assert set(node.failed) == {"no such file"}

        calls.answer = Unavailable("no answer")
        await node.tick(FAILURES + 1)
        assert node.has_deposed

    run(scenario())


# ---------------------------------------------------------------------------------------------------- nodes are judged


def silent(node: Node) -> None:
    """Have the leader meet a node that beat once, and does not since."""
    node.leads()
    node.coordination.beat(ClusterMember(member_id="5", incarnation="5/1"), seen={})
    node.met(SILENT)
    node.met()


@pytest.mark.parametrize(
    ("caller", "detaches"), [(Calls(Unavailable("no answer")), True), (None, True), (Calls(0.0), False)],
    ids=["silent", "nobody can be called", "answers"],
)  # fmt: skip
def test_all_workers_of_a_node_that_neither_beats_nor_answers_are_detached(caller: Calls | None, detaches: bool) -> None:
    async def scenario() -> None:
        node = Node(caller)
        silent(node)
        await node.tick(10)
        assert not node.coordination.detached(), "it may come back for so long"
        await node.tick(5)

        assert node.coordination.detached() == (frozenset({"5", "6"}) if detaches else frozenset())
        told = node.coordination.beat(ClusterMember(member_id="2", incarnation="2/1"), seen={})
        assert told.detached_by_leader == node.coordination.detached(), f"in the name of {LEADER}"

    run(scenario())


def test_a_node_that_has_left_is_not_judged() -> None:
    async def scenario() -> None:
        calls = Calls(Unavailable("no answer"))
        node = Node(calls)
        silent(node)
        node.coordination.leave("5", "5/1")
        await node.tick(20)

        assert (calls.count, node.coordination.detached()) == (0, frozenset())

    run(scenario())


def test_a_call_that_fails_in_an_unexpected_way_does_not_end_the_watch_over_a_node() -> None:
    async def scenario() -> None:
        calls = Calls(OSError("no such file"))
        node = Node(calls)
        silent(node)
        await node.tick(15)
        assert not node.coordination.detached(), "nothing is known of it"

        calls.answer = Unavailable("no answer")
        await node.tick(FAILURES + 1)
        assert node.coordination.detached() == {"5", "6"}

    run(scenario())


def test_a_node_that_leads_no_more_when_the_last_call_ends_detaches_nobody() -> None:
    async def scenario() -> None:
        calls = Calls(Unavailable("no answer"))
        node = Node(calls)
        silent(node)
        await node.tick(11)
        while calls.count < FAILURES - 1:
            await node.tick(every_s=0.1)
        node.clock.advance(0.1)
        node.roles.tick(node.now())
        node.broker.apply(Elected(0), node.now())
        await node.tick(5)

        assert calls.count == FAILURES
        assert not node.coordination.detached()

    run(scenario())
