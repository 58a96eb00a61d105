"""Node agents of a dispatcher: checked by one poller, asked for jobs, ranked. Holds their connections, and no job.

At most one check per node is under way. A request waits for a check only if the last answer is old, and only for a moment: a node
that does not answer delays no request by more than RANK_WAIT_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Container

import msgspec

from tasuki.client.agents.node import ASK_S, AgentNode, JobView
from tasuki.clocks import now
from tasuki.core.failover.events import NodeJobStatus
from tasuki.core.failover.nodes import RANK_WAIT_S, Capacity, Nodes, NodeState, Ranked, candidates, look_every_s, rendezvous, well
from tasuki.dispatcher.metrics import DispatcherMetrics
from tasuki.dispatcher.settings import DispatcherConfig
from tasuki.errors import NoConnection

logger = logging.getLogger("tasuki.dispatcher")
FRESH_S = 0.6  # an answer that is not older is good enough to choose by
FIND_S = 0.5  # how long a run waits for the nodes that are asked for its id
REMOVE_S = 60.0


class NodeReports(msgspec.Struct, frozen=True):
    """Answers of all nodes that could be asked for a job."""

    known: dict[str, JobView]
    silent: dict[str, str]
    """Nodes that did not answer, and why."""

    @property
    def statuses(self) -> dict[str, NodeJobStatus]:
        return {node: view.status for node, view in self.known.items()}

    def with_progress(self, node: str) -> str:
        """Return a node that reports the same status as this one, and progress if any does: with a registry one node knows it."""
        same = (other for other, view in self.known.items() if view.status == self.known[node].status)
        return next((other for other in same if self.known[other].has_progress), node)


class NodePool:
    """All agents of one dispatcher."""

    def __init__(self, config: DispatcherConfig, metrics: DispatcherMetrics) -> None:
        tls = config.agent_tls
        self.agents = {str(address): AgentNode(address, config.agent_token, tls) for address in config.agents}
        self.nodes = Nodes(list(self.agents), random.random, config.rules)
        self._metrics = metrics
        self._ours: Counter[str] = Counter()
        """Number of this dispatcher's jobs at each node, or on their way there."""
        self._problems: dict[str, str] = {}
        self._checks: dict[str, asyncio.Task[None]] = {}
        self._wanted_at = now().monotonic
        self._wanted = asyncio.Event()

    async def close(self) -> None:
        checks = list(self._checks.values())
        for task in checks:
            task.cancel()
        await asyncio.gather(*checks, return_exceptions=True)
        await asyncio.gather(*(agent.close() for agent in self.agents.values()))

    def pulls(self, node: str) -> bool:
        """Return whether a node fetches stored inputs itself."""
        capacity = self.nodes.capacity(node)
        return capacity is not None and capacity.pulls

    # ------------------------------------------------------------------------------------------------ capacity

    async def keep_checking(self) -> None:
        """Check the nodes until canceled; more often while there are requests. A request after a pause wakes this."""
        while True:
            every_s = look_every_s(now().monotonic - self._wanted_at, well=self.well)
            self._check_all(every_s * 0.9)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self._wanted.wait()
            self._wanted.clear()

    def _check_all(self, fresh_s: float) -> None:
        for node in self.nodes.to_look_at(now().monotonic, fresh_s):
            self._checks[node] = asyncio.create_task(self._check(node))

    async def _check(self, node: str) -> None:
        try:
            capacity, problem = await self.agents[node].check(self.nodes, token_matters=False)
        finally:
            self._checks.pop(node, None)
        if not problem:
            for _ in range(self._ours[node] - (capacity.running if capacity is not None else 0)):
                self.nodes.taken(node)  # a job on its way there, which the node did not count
        self._log(node, problem)
        self._metrics.looks.labels("failed" if problem else "ok").inc()

    def _log(self, node: str, problem: str) -> None:
        """Log when a problem begins, changes, or ends; not with every check."""
        before = self._problems.pop(node, "")
        if problem:
            self._problems[node] = problem
            if problem != before:
                logger.warning("%s takes no jobs: %s", node, problem)
        elif before:
            logger.info("%s answers again", node)

    async def fresh(self, fresh_s: float = FRESH_S) -> None:
        """Check the nodes whose last answer is older, and wait for a moment for the answers."""
        moment = now().monotonic
        if look_every_s(moment - self._wanted_at) > FRESH_S:
            self._wanted.set()
        self._wanted_at = moment
        self._check_all(fresh_s)
        left_out = {line.node for line in self.ranking() if line.standing is NodeState.LEFT_OUT}
        stale = self.nodes.older_than(moment, fresh_s) - left_out
        waiting = [task for node, task in self._checks.items() if node in stale]
        if waiting:
            await asyncio.wait(waiting, timeout=RANK_WAIT_S)

    def ranking(self) -> list[Ranked]:
        return self.nodes.ranking(now().monotonic)

    def sent(self, node: str) -> None:
        """Count a job that is sent to a node: it has a place less until `ended`."""
        self._ours[node] += 1
        self.nodes.taken(node)

    def ended(self, node: str) -> None:
        self._ours[node] -= 1
        self.nodes.given_back(node)

    def candidates(self, job_id: str, tried: Container[str] = ()) -> list[Ranked]:
        """Return the nodes that may be sent the job now, without those that were tried."""
        return candidates([line for line in self.ranking() if line.node not in tried], job_id)

    def capacity(self) -> Capacity:
        """Return the sum over all nodes that are well."""
        lines = well(self.ranking())
        return Capacity(sum(line.running or 0 for line in lines), sum(line.limit or 0 for line in lines))

    @property
    def well(self) -> bool:
        """At least one node takes jobs, now or soon."""
        return bool(well(self.ranking()))

    # ------------------------------------------------------------------------------------------------ jobs

    async def find(self, job_id: str, wait_s: float = ASK_S) -> NodeReports:
        """Ask every node that is not left out, all at once."""
        asked = [line.node for line in self.ranking() if line.standing is not NodeState.LEFT_OUT or line.steady]
        tasks = {node: asyncio.create_task(self.ask(node, job_id)) for node in rendezvous(job_id, asked)}
        try:
            if tasks:
                await asyncio.wait(tasks.values(), timeout=wait_s)
        finally:
            for task in tasks.values():
                task.cancel()
            ended = await asyncio.gather(*tasks.values(), return_exceptions=True)
        answers = dict(zip(tasks, ended, strict=True))
        late = f"did not answer within {wait_s:g} s"
        return NodeReports(
            {node: view for node, view in answers.items() if isinstance(view, JobView)},
            {node: str(error) or late for node, error in answers.items() if isinstance(error, BaseException)},
        )

    async def remove(self, node: str, job_id: str, *, only_running: bool) -> None:
        """Stop and remove a job at a node. The node may take a while to kill the program. Unavailable, NodeRefused."""
        await self.agents[node].remove(job_id, only_running=only_running, answer_s=REMOVE_S)

    async def ask(self, node: str, job_id: str) -> JobView | None:
        """Return what a node answers about a job; None if it does not know it. Unavailable, NodeRefused."""
        try:
            return await self.agents[node].ask(job_id)
        except NoConnection as error:
            self.nodes.failed(node, error.message, now().monotonic)
            raise
