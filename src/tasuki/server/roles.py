"""The roles of a node among the nodes of a Django project: leader, sub-leader, worker.

    sub-leader   holds the lock `subleader:NODE_ID`: one of the processes of each node that do not lead. It watches the leader:
                 the time since the store took a turn of it, then calls. A leader that neither works nor says that it does is
                 deposed (its lock is released in its name), and all are told that the lock is free.
    leader       watches the others: one without heartbeats that leaves calls unanswered is detached.

`Roles` drives `core/scheduler/sub_leader.py`, and a second `Election` for the lock of the sub-leader, whose epochs nobody
registers. It belongs to one `Cluster`, which calls it; calls to other nodes go through `NodeCaller`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

from tasuki.coords.coordination import LEADER, Coordination, View
from tasuki.core import election
from tasuki.core.broker.broker import Broker
from tasuki.core.broker.events import Event
from tasuki.core.cluster_messages import ServerInfo
from tasuki.core.election import LEADER_SCOPE
from tasuki.core.machine import Now, Ticked
from tasuki.core.scheduler.sub_leader import LeaderCandidate, Suspects, deference_s
from tasuki.core.scheduler.thresholds import Thresholds
from tasuki.errors import TasukiError
from tasuki.server.statistics import Statistics
from tasuki.stores.store import Reader

logger = logging.getLogger("tasuki.cluster")
T = TypeVar("T")


class NodeCaller(Protocol):
    """Calls to other nodes; Unavailable if there is no answer."""

    async def led_ago_s(self, node: ServerInfo, timeout_s: float) -> float | None:
        """Return how long ago the store took a turn of a node that leads; None: it does not lead."""

    async def ping(self, node: ServerInfo, timeout_s: float) -> None:
        """Return if the node answers."""


class LocalServer(Protocol):
    """The server of this process, as its membership uses it."""

    @property
    def server_id(self) -> str: ...
    @property
    def info(self) -> ServerInfo: ...
    @property
    def broker(self) -> Broker: ...
    @property
    def statistics(self) -> Statistics: ...
    def now(self) -> Now: ...
    def tell(self, event: Event) -> None: ...
    async def ask(self, question: Callable[[Reader], T]) -> T: ...


class NodeMember(Protocol):
    """The cluster's part of a node, as its roles use it."""

    coordination: Coordination

    @property
    def server(self) -> LocalServer: ...
    @property
    def is_candidate(self) -> bool: ...
    async def call(self, verb: Callable[..., T], *arguments: Any) -> T: ...
    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]: ...
    def set_deference(self, deference_s: float, *, now_free: bool = False) -> None: ...


class Roles:
    """The roles of this node."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.thresholds = Thresholds()
        self.caller: NodeCaller | None = None
        """None: no node is called, and one that was not seen counts as one that does not answer."""
        self._leader: ServerInfo | None = None
        self._leader_since = 0.0
        self._seen_at = 0.0
        """Time at which the store took the last turn of the leader, as far as this node knows."""
        self._nodes: dict[str, ServerInfo] = {}
        self._live: set[str] = set()
        self._suspects = Suspects()
        self._check_at = 0.0
        self._looking = False

    def join(self, member: NodeMember) -> None:
        self._cluster = member
        self._scope = f"subleader:{self.node_id}"
        self._election = election.Election(member.server.server_id, self.thresholds.leader_lock_ttl_seconds)

    # ------------------------------------------------------------------------------------------------ each tick

    def tick(self, now: Now) -> None:
        leads = bool(self._cluster.server.broker.epoch)
        ttl_s = self.thresholds.leader_lock_ttl_seconds
        if self._election.ttl_s != ttl_s and not self._election.asking:
            self._election.set_ttl(ttl_s)
        may_watch = self._cluster.is_candidate and not leads
        if not may_watch and self.sub_leads:
            self._decide(election.Degraded())
        elif may_watch or self._election.asking:
            self._decide(Ticked())
        self._cluster.set_deference(self._deference_s)
        if now.monotonic < self._check_at or self._looking:
            return
        if leads:
            self._check_at = now.monotonic + self.thresholds.heartbeat_interval_seconds
            self._look(self._watch_nodes())
        elif self.sub_leads and self._leader is not None:
            self._check_at = now.monotonic + self.thresholds.subleader_check_seconds
            unseen_s = now.monotonic - max(self._seen_at, self._leader_since)
            for _ in self._suspects.to_ask({_term_of(self._leader): unseen_s}, self.thresholds.leader_stale_seconds):
                self._look(self._judge_leader(self._leader))

    def met(self, view: View, nodes: list[ServerInfo]) -> None:
        """Note the live nodes, and when the leader last did its work."""
        now = self._cluster.server.now().monotonic
        self._live = {node.server_id for node in nodes}
        self._nodes |= {node.server_id: node for node in nodes if node.node_id}
        leader = max((node for node in nodes if node.epoch), key=lambda node: node.epoch, default=None)
        if leader is not None and (self._leader is None or leader.epoch > self._leader.epoch):
            self._leader_since = now
        if leader is not None and (self._leader is None or leader.epoch >= self._leader.epoch):
            self._leader = leader
        if view.leader_seen_s is not None:
            self._seen_at = now - max(0.0, view.leader_seen_s)

    async def leave(self) -> None:
        self._decide(election.Resign())

    def _look(self, work: Coroutine[Any, Any, None]) -> None:
        self._looking = True
        self._cluster.spawn(self._looked(work))

    async def _looked(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except TasukiError as error:
            logger.debug("other nodes could not be judged: %s", error)
        finally:
            self._looking = False

    # ------------------------------------------------------------------------------------------------ the leader is watched

    async def _judge_leader(self, leader: ServerInfo) -> None:
        """Ask a leader whose turns the store did not take lately; depose one that leaves several calls unanswered."""
        is_alive: bool | None = None
        try:
            if works := await self._works(leader):
                is_alive = works
            else:
                registered, _ = await self._cluster.server.ask(lambda reader: reader.epoch())
                is_alive = registered != leader.epoch  # another leads already
        except TasukiError as error:  # the store: whoever cannot reach it cannot lead either
            logger.debug("the leader %s could not be judged: %s", leader.server_id, error)
        finally:  # also for an error that nobody expects: else it would never be asked again
            is_dead = self._suspects.answered(_term_of(leader), is_alive, self.thresholds.grpc_ping_failures)
        if not is_dead:
            self._check_at = self._check_at if is_alive else 0.0
            return
        was_held = await self._cluster.call(self._cluster.coordination.release, LEADER_SCOPE, leader.server_id, leader.epoch)
        if was_held:
            logger.warning("deposed the leader %s (epoch %d): the store takes no turns of it", leader.server_id, leader.epoch)
        self._cluster.set_deference(self._deference_s, now_free=True)

    @property
    def _deference_s(self) -> float:
        leader_node = self._leader.node_id if self._leader is not None else ""
        others = (self._nodes[name] for name in self._live & self._nodes.keys())
        own = LeaderCandidate(self.node_id, self.sub_leads)
        return deference_s(leader_node, own, (LeaderCandidate(node.node_id, node.sub_leads) for node in others))

    async def _works(self, leader: ServerInfo) -> bool:
        if self.caller is None or not leader.grpc_address:
            return False
        try:
            ago_s = await self.caller.led_ago_s(leader, self.thresholds.grpc_ping_timeout_seconds)
        except TasukiError:
            return False
        return ago_s is not None and ago_s < self.thresholds.leader_stale_seconds

    # ------------------------------------------------------------------------------------------------ nodes are watched

    async def _watch_nodes(self) -> None:
        """Detach the workers of nodes that have neither left nor beaten for long, and do not answer."""
        silent = self._nodes.keys() - self._live
        if not silent:
            return
        ages = await self._cluster.call(self._cluster.coordination.heartbeat_ages)
        for gone in silent - ages.keys():
            del self._nodes[gone]
        limit_s = self.thresholds.heartbeat_ttl_seconds + self.thresholds.worker_detach_grace_seconds
        suspects = self._suspects.to_ask({name: ages[name] for name in silent & ages.keys()}, limit_s)
        await asyncio.gather(*(self._judge(self._nodes[server_id]) for server_id in suspects))

    async def _judge(self, node: ServerInfo) -> None:
        answers: bool | None = None
        try:
            answers = await self._answers(node)
        finally:
            is_dead = self._suspects.answered(node.server_id, answers, self.thresholds.grpc_ping_failures)
        if is_dead:
            if self._cluster.server.broker.epoch:
                await self._detach(node)
        elif not answers:
            self._check_at = 0.0

    async def _answers(self, node: ServerInfo) -> bool:
        if self.caller is None or not node.grpc_address:
            return False
        try:
            await self.caller.ping(node, self.thresholds.grpc_ping_timeout_seconds)
        except TasukiError:
            return False
        return True

    async def _detach(self, node: ServerInfo) -> None:
        for worker_id in sorted({node.server_id, *(worker.worker_id for worker in node.workers)}):
            reason = f"no heartbeat, and {self.thresholds.grpc_ping_failures} calls without an answer"
            logger.warning("worker %s of node %s is detached: %s", worker_id, node.node_id, reason)
            set_detached = self._cluster.coordination.set_detached
            await self._cluster.call(partial(set_detached, worker_id, True, actor=LEADER, reason=reason))
        self._nodes.pop(node.server_id, None)

    # ------------------------------------------------------------------------------------------------ the sub-leader's lock

    @property
    def sub_leads(self) -> bool:
        """This node watches the leader."""
        return bool(self._election.leads(self._cluster.server.now().monotonic))

    def _decide(self, event: election.Event) -> None:
        cluster, holder = self._cluster, self._cluster.server.server_id
        commands = self._election.apply(event, cluster.server.now().monotonic)
        cluster.server.broker.sub_leads = self.sub_leads
        verbs, ttl_s = cluster.coordination, self._election.ttl_s
        for command in commands:
            match command:
                case election.Acquire():
                    cluster.spawn(self._asked(election.Acquired, verbs.acquire, self._scope, holder, ttl_s, 0))
                case election.Renew(epoch=epoch):
                    cluster.spawn(self._asked(election.Renewed, verbs.renew, self._scope, holder, epoch, ttl_s))
                case election.Release(epoch=epoch):
                    cluster.spawn(self._asked(None, verbs.release, self._scope, holder, epoch))
                case election.TakeOver(epoch=epoch):
                    self._decide(election.TookOver(epoch, done=True))
                case election.Lead():
                    logger.info("is the sub-leader of node %s", self.node_id)
                case election.StepDown(reason=reason):
                    logger.info("is not the sub-leader of node %s any more: %s", self.node_id, reason)

    async def _asked(
        self, event: Callable[[T | None, float], election.Event] | None, verb: Callable[..., T], *arguments: Any
    ) -> None:
        asked_at, answer = self._cluster.server.now().monotonic, None
        try:
            answer = await self._cluster.call(verb, *arguments)
        except TasukiError as error:
            logger.debug("the lock of the sub-leader: %s", error)
        finally:
            if event is not None:
                self._decide(event(answer, asked_at))


def _term_of(leader: ServerInfo) -> str:
    return f"{leader.server_id} {leader.epoch}"
