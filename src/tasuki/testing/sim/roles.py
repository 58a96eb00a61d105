"""The roles of nodes in a simulated system: sub-leaders that watch the leader, and workers that ask whether they may go on.

Stands in for `server/roles.py`, `django/continuation.py` and the calls of `doors/grpc` between them, around the production
machines (`Suspects`, `Continuation`, `Election`). Two servers make a node. Each that does not lead watches the leader; the first
of a node stands as its sub-leader, without the election of one. A call is lost if the network between the two is cut, in either
direction, or if whoever is called is down or paused. Calls take CALL_S: they draw no chance, so that seeds in which nobody asks
anything are what they were. Servers and workers import this module: it knows them by their attributes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from tasuki.coords.coordination import View
from tasuki.core.cluster_messages import ServerInfo
from tasuki.core.job import LEASED, Job, OnDisconnect
from tasuki.core.scheduler import continuation
from tasuki.core.scheduler.continuation import AskLeaders, Command, Confirming, Continuation, Deny
from tasuki.core.scheduler.sub_leader import LeaderCandidate, Suspects, deference_s
from tasuki.core.scheduler.thresholds import Thresholds
from tasuki.core.store_messages import HeldLease, LeaseStatus
from tasuki.core.worker.events import LeasesConfirmed, LeasesDenied
from tasuki.core.worker.machine import lease_deadline
from tasuki.errors import TasukiError
from tasuki.testing.sim.history import ConfirmedEvent, DeniedEvent
from tasuki.testing.sim.network import Network
from tasuki.testing.sim.world import SimProcess

CALL_S = 0.004
TIMEOUT_S = 0.3
FAILURES = 3
SILENT_TTLS = 1.5  # of the leader's lock: after that a worker is asked
NODE_SERVERS = 2
COORDINATION = "coordination"


def call(
    network: Network, caller: SimProcess, callee: SimProcess, what: Callable[[Callable[[Any], None]], None], then: Any
) -> None:
    """Have `what` done at the callee, which is given a function that takes its answer; `then` gets the answer, or None."""
    open_ = [True]

    def answer(value: Any) -> None:
        if open_[0]:
            open_[0] = False
            caller.later(CALL_S, f"{caller.name} hears from {callee.name}", then, value)

    def over() -> None:
        if open_[0]:
            open_[0] = False
            then(None)

    is_cut = network.is_cut(caller.name, callee.name) or network.is_cut(callee.name, caller.name)
    if callee.alive and not is_cut:
        callee.later(CALL_S, f"{callee.name} is called by {caller.name}", what, answer)
    caller.later(TIMEOUT_S, f"{caller.name} waits for {callee.name} no more", over)


class SimulatedRoles:
    """The roles of one server, for one life of its process."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._server = cluster.server
        self._suspects = Suspects()
        self._leader: ServerInfo | None = None
        self._live: set[str] = set()
        self._leader_since = self._seen_at = self._leads_since = 0.0
        self._workers: dict[str, float] = {}
        """Time at which each worker was last connected to a live server, as far as this one knows."""

    def met(self, view: View, servers: list[ServerInfo]) -> None:
        now = self._server.now().monotonic
        self._live = {server.server_id for server in servers if not server.epoch}
        self._workers |= {worker.worker_id: now for server in servers for worker in server.workers}
        leader = max((one for one in servers if one.epoch), key=lambda one: one.epoch, default=None)
        if leader is not None and (self._leader is None or leader.epoch > self._leader.epoch):
            self._leader, self._leader_since = leader, now
        if view.leader_seen_s is not None:
            self._seen_at = now - max(0.0, view.leader_seen_s)

    def leads_now(self) -> None:
        self._leads_since = self._server.now().monotonic

    # -- the leader is watched ----------------------------------------------------------------------------------------
    def tick(self) -> None:
        leader, server = self._leader, self._server
        leader_node = _node_of(leader.server_id) if leader is not None else ""
        own = LeaderCandidate(_node_of(server.name), self._sub_leads)
        others = (LeaderCandidate(_node_of(name), name == self._first_of(_node_of(name))) for name in self._live - {server.name})
        self._cluster.set_deference(deference_s(leader_node, own, others))
        if server.leads:
            self._watch_workers()
        if leader is None or server.leads or leader.server_id == server.name:
            return
        unseen_s = server.now().monotonic - max(self._seen_at, self._leader_since)
        for _ in self._suspects.to_ask({f"{leader.server_id} {leader.epoch}": unseen_s}, self._cluster.term.ttl_s):
            callee = next(one for one in self._cluster.node.servers if one.name == leader.server_id)
            call(server.network, server, callee, callee.say_led_ago, lambda said, one=leader: self._heard(one, said))

    def _heard(self, leader: ServerInfo, led_ago_s: float | None) -> None:
        if led_ago_s is not None and led_ago_s < self._cluster.term.ttl_s:
            self._judged(leader, True)
            return
        server = self._server
        server.storage.read(
            server, "the epoch", lambda store: store.epoch()[0], lambda found: self._judged(leader, _is_led(leader, found))
        )

    def _judged(self, leader: ServerInfo, is_alive: bool | None) -> None:
        if not self._suspects.answered(f"{leader.server_id} {leader.epoch}", is_alive, FAILURES):
            return
        self._server.sim.effects["deposed"] += 1
        self._cluster.depose(leader)

    @property
    def _sub_leads(self) -> bool:
        """This server does not lead, and is the first such one of its node."""
        return not self._server.leads and self._server.name == self._first_of(_node_of(self._server.name))

    def _first_of(self, node: str) -> str:
        return min(name for name in self._live | {self._server.name} if _node_of(name) == node)

    def _watch_workers(self) -> None:
        """Call workers that no server has been connected to for long, and detach those that leave calls unanswered."""
        server, node = self._server, self._cluster.node
        now = server.now().monotonic
        silent = {worker: now - at for worker, at in self._workers.items() if worker not in node.detached_by_leader}
        for worker in self._suspects.to_ask(silent, SILENT_TTLS * self._cluster.term.ttl_s):
            call(server.network, server, node.workers[worker], _say_yes, partial(self._worker_judged, worker))

    def _worker_judged(self, worker: str, answers: bool | None) -> None:
        self._server.sim.effects["answered"] += bool(answers)
        if self._suspects.answered(worker, bool(answers), FAILURES) and self._server.leads:
            self._workers.pop(worker, None)
            self._cluster.detach(worker)

    # -- workers ask ----------------------------------------------------------------------------------------------------
    def confirm(self, claim: HeldLease, renewed_ago_s: float, answer: Callable[[bool | None], None]) -> None:
        """Renew the lease for a worker that asks, if the store still has it as the worker's and the job is not canceled; if the
        store is away, say yes while no other server can lead."""
        server = self._server
        over_at = server.sim.at + TIMEOUT_S - CALL_S

        def found(jobs: list[Job | None] | TasukiError) -> None:
            if isinstance(jobs, TasukiError):
                self._promise(claim, renewed_ago_s, over_at, answer)
                return
            lease = jobs[0].lease if jobs[0] is not None and jobs[0].state in LEASED else None
            if lease is None or (lease.lease_id, lease.worker_id) != (claim.lease_id, claim.worker_id):
                answer(False)
                return
            assert server.broker is not None
            server.broker.builder.ask(
                "renew",
                [replace(claim, owner=lease.owner)],
                lambda statuses, _: answer(statuses[0] is LeaseStatus.GO_ON),
                lambda error, _: self._promise(claim, renewed_ago_s, over_at, answer),
            )
            server.pump()

        server.storage.read(server, "a run", lambda store: store.get([claim.job_id]), found)

    def _promise(self, claim: HeldLease, renewed_ago_s: float, over_at: float, answer: Callable[[bool | None], None]) -> None:
        server, now = self._server, self._server.now().monotonic
        epoch = self._cluster.term.leads(now)
        if server.broker is None or not continuation.may_promise(epoch, self._leads_since, renewed_ago_s, now):
            answer(None)
            return
        server.broker.upkeep.lapse()

        def held(holds: bool) -> None:
            if not holds or server.leads != epoch or server.sim.at >= over_at:
                answer(None)
                return
            server.sim.effects["promised"] += 1
            for_s = lease_deadline(over_at - TIMEOUT_S, claim.ttl_s) - server.sim.at
            line = ConfirmedEvent(
                at=server.sim.at, job_id=claim.job_id, attempt=claim.attempt, lease_id=claim.lease_id, for_s=for_s
            )
            server.sim.tell(line)
            answer(True)

        self._cluster.hold(epoch, held)


def _node_of(server_id: str) -> str:
    """Return the node of a server: server-1 and server-2 are one."""
    number = int(server_id.rpartition("-")[2])
    return f"node-{(number + NODE_SERVERS - 1) // NODE_SERVERS}"


def _say_yes(answer: Callable[[bool], None]) -> None:
    answer(True)


def _is_led(leader: ServerInfo, found: int | TasukiError) -> bool | None:
    return None if isinstance(found, TasukiError) else found != leader.epoch


class SimulatedContinuation:
    """The questions of one worker, for one life of its process."""

    def __init__(self, worker: Any, ttl_s: float) -> None:
        self._worker, self._ttl_s = worker, ttl_s
        self._machine = Continuation()
        self._machine.thresholds = Thresholds(
            continuation_retry_interval_seconds=0.03 * ttl_s, grpc_ping_timeout_seconds=0.03 * ttl_s
        )

    def tick(self) -> None:
        worker = self._worker
        is_stopped = worker.identity.on_disconnect is OnDisconnect.STOP  # else its attempts go on without a lease too
        deadlines = worker.machine.deadlines() if is_stopped else {}
        node = next(iter(worker.servers.values())).coordination
        is_detached = (
            node is not None and not worker.network.is_cut(worker.name, COORDINATION) and worker.name in node.detached_by_leader
        )
        self._carry_out(self._machine.look(deadlines, detached=is_detached, now=worker.clock.monotonic()))
        if is_detached and not worker.machine.held and not worker.attempts and node is not None:
            worker.sim.effects["detached"] += 1
            worker.exit_now()

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Confirming(lease_id=lease_id, for_s=for_s):
                    self._through_some_server(lease_id, for_s)
                case AskLeaders(lease_id=lease_id):
                    for server in self._worker.servers.values():
                        self._ask(server, lease_id, 0.0)
                case Deny(lease_id=lease_id):
                    self._worker.sim.effects["denied"] += 1
                    if (held := self._worker.machine.held.get(lease_id)) is not None:
                        about = {"job_id": held.claim.job_id, "attempt": held.claim.attempt}
                        self._worker.sim.tell(DeniedEvent(at=self._worker.sim.at, **about))
                    self._worker.hear(LeasesDenied((lease_id,)))

    def _through_some_server(self, lease_id: str, for_s: float) -> None:
        """Mark a run as one whose worker asks: a node writes that itself."""
        server = next((one for one in self._worker.servers.values() if one.alive and not one.paused), None)
        if server is not None:
            self._ask(server, lease_id, for_s)

    def _ask(self, server: Any, lease_id: str, confirm_s: float) -> None:
        worker, held = self._worker, self._worker.machine.held.get(lease_id)
        if held is None:
            return
        asked_at = worker.clock.monotonic()
        shown = (held.claim.job_id, worker.name, worker.identity.incarnation, lease_id, held.claim.attempt)
        claim = HeldLease(*shown, ttl_s=self._ttl_s, confirm_s=confirm_s)
        renewed_ago_s = asked_at - held.renewed_at

        def ask(answer: Callable[[bool | None], None]) -> None:
            if server.cluster is not None and server.cluster.roles is not None:
                server.cluster.roles.confirm(claim, renewed_ago_s, answer)

        call(worker.network, worker, server, ask, lambda said: self._heard(lease_id, said, asked_at, confirm_s))

    def _heard(self, lease_id: str, said: bool | None, asked_at: float, confirm_s: float) -> None:
        if confirm_s:
            self._carry_out(self._machine.marked(lease_id))
        if said is None or confirm_s:
            return
        if said:
            self._worker.sim.effects["confirmed"] += 1
            self._worker.hear(LeasesConfirmed((lease_id,), asked_at))
            if (attempt := self._worker.attempts.get(lease_id)) is not None:
                attempt.deadline = self._worker.machine.lease_deadline(lease_id)
        self._carry_out(self._machine.answered(lease_id, said))
