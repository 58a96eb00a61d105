"""The questions of a node whose worker was cut off or detached: drives `core/scheduler/continuation.py`.

Runs that may continue keep their leases: the node that said so has renewed them. Runs that may not are stopped, with all their
processes. If the worker was detached, their leases are then ended as losses, and the next attempt starts at once; else they run
out: that of a canceled job ends as CANCELED. A worker that a leader has detached, and that has no more runs, ends (`on_rejoin`),
and its process comes back under another id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from tasuki.clocks import now
from tasuki.core.broker.events import WorkerDetached
from tasuki.core.cluster_messages import ServerInfo
from tasuki.core.scheduler.continuation import AskLeaders, Command, Confirming, Continuation, Deny
from tasuki.core.store_messages import HeldLease, LeaseStatus
from tasuki.errors import TasukiError
from tasuki.event_loop import BackgroundTasks
from tasuki.server.cluster import Cluster
from tasuki.server.server import Server
from tasuki.worker.status import RunningJob

LOOK_S = 0.1
IDLE_LOOK_S = 0.5  # while nothing runs here
logger = logging.getLogger("tasuki.django")


class Questions(Protocol):
    """Questions to other nodes; Unavailable if there is no answer."""

    async def confirms(self, node: ServerInfo, run: RunningJob, renewed_ago_s: float, timeout_s: float) -> bool | None: ...


class RunningLeases(Protocol):
    """The worker of the node."""

    worker_id: str
    incarnation: str

    def renewed_at(self, lease_id: str) -> float: ...
    def deadlines(self) -> dict[str, float]: ...
    def run_of(self, lease_id: str) -> RunningJob | None: ...
    def confirm_leases(self, lease_ids: tuple[str, ...], asked_at: float) -> None: ...
    def deny_leases(self, lease_ids: tuple[str, ...]) -> None: ...


class NodeContinuation:
    """The questions of one node. `questions` is None where the node calls nobody: then its leases alone decide."""

    def __init__(self, worker: RunningLeases, server: Server, cluster: Cluster, on_rejoin: Callable[[], None]) -> None:
        self._worker, self._server, self._cluster, self._on_rejoin = worker, server, cluster, on_rejoin
        self.machine = Continuation()
        self.questions: Questions | None = None
        self._denied = False
        self._tasks = BackgroundTasks()

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(LOOK_S if self._worker.deadlines() else IDLE_LOOK_S)
                self._look()
        finally:
            await self._tasks.close()

    def _look(self) -> None:
        deadlines, is_detached = self._worker.deadlines(), self._cluster.is_detached_by_leader
        if self.questions is not None:
            self._carry_out(self.machine.look(deadlines, detached=is_detached, now=now().monotonic))
        if deadlines:
            return
        if self._denied:
            self._denied = False
            self._server.tell(WorkerDetached(self._worker.worker_id))
        elif is_detached and not len(self._server.broker.builder) and not self._server.broker.store_problem:
            logger.warning("worker %s was detached; it starts again under another id", self._worker.worker_id)
            self._on_rejoin()

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Confirming(lease_id=lease_id, for_s=for_s):
                    self._tasks.spawn(self._mark(lease_id, for_s))
                case AskLeaders(lease_id=lease_id):
                    self._ask(lease_id)
                case Deny(lease_id=lease_id):
                    run = self._worker.run_of(lease_id)
                    logger.warning("job %s is stopped: no leader confirmed that it may continue", run.job_id if run else lease_id)
                    self._denied = self._denied or self._cluster.is_detached_by_leader
                    self._worker.deny_leases((lease_id,))

    async def _mark(self, lease_id: str, for_s: float) -> None:
        """Have the store show whether the worker asks, so that people see it; the lease is renewed with that."""
        if (run := self._worker.run_of(lease_id)) is None:
            return
        if for_s:
            logger.info("job %s: detached; asks whether it may continue", run.job_id)
        worker, session = self._worker, self._server.broker.workers.get(self._worker.worker_id)
        owner = session.owner if session is not None else ""
        claim = HeldLease(run.job_id, worker.worker_id, worker.incarnation, lease_id, run.attempt, owner=owner, confirm_s=for_s)
        try:
            [status] = await self._server.renew([claim])
            if status is LeaseStatus.LOST:
                logger.info("job %s: the database has another attempt, or none", run.job_id)
        except TasukiError as error:
            logger.info("job %s: whether its worker asks could not be written: %s", run.job_id, error.message)
        if for_s:
            self._carry_out(self.machine.marked(lease_id))

    def _ask(self, lease_id: str) -> None:
        nodes = [info for info in self._server.broker.cluster.servers.values() if info.epoch or info.sub_leads]
        if self._server.broker.epoch:
            nodes.append(self._server.info)
        for node in nodes:
            if node.grpc_address:
                self._tasks.spawn(self._ask_one(node, lease_id))

    async def _ask_one(self, node: ServerInfo, lease_id: str) -> None:
        run, asked_at = self._worker.run_of(lease_id), now().monotonic
        if run is None or lease_id not in self._worker.deadlines() or self.questions is None:
            return
        timeout_s = self.machine.thresholds.grpc_ping_timeout_seconds
        try:
            said = await self.questions.confirms(node, run, asked_at - self._worker.renewed_at(lease_id), timeout_s)
        except TasukiError as error:
            logger.debug("job %s: %s", run.job_id, error.message)
            return
        if said is not None:
            if said:
                logger.info("job %s continues: worker %s confirmed it", run.job_id, node.server_id)
                self._worker.confirm_leases((lease_id,), asked_at)
            self._carry_out(self.machine.answered(lease_id, said))
