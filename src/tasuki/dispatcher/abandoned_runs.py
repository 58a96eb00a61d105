"""Runs that were left behind: a node fell silent with a job, another one gave the result, and the first goes on for nothing.

Where the node answers again, the run there is stopped, if it is exactly the one that was seen there before: of this id, running,
and begun at the same moment. What somebody else has begun meanwhile is let be, and so is a result. Only in memory, and so much of
it: what is forgotten runs to its end, which costs a place and no more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import NamedTuple

from tasuki.agent.correlation import on_behalf_of
from tasuki.client.agent_answers import Refusing
from tasuki.clocks import now
from tasuki.core.failover.agent_protocol import AgentState
from tasuki.core.failover.node_ranking import NodeState
from tasuki.dispatcher.metrics import DispatcherMetrics
from tasuki.dispatcher.node_pool import Knows, NodePool
from tasuki.errors import TasukiError

logger = logging.getLogger("tasuki.dispatcher")
REMEMBERED_MAX = 1024  # jobs
REMEMBERED_S = 86_400.0
CLEAR_EVERY_S = 2.0


class _Left(NamedTuple):
    """A run that nobody needs."""

    node: str
    job_id: str
    started_at: float
    since: float


class AbandonedRuns:
    """Of one dispatcher."""

    def __init__(self, company: NodePool, metrics: DispatcherMetrics) -> None:
        self._company = company
        self._metrics = metrics
        self._seen: OrderedDict[str, dict[str, float]] = OrderedDict()
        """Jobs under way: at which nodes they were seen to run, and since when by those nodes' clocks."""
        self._left: list[_Left] = []
        self._some = asyncio.Event()

    def seen(self, node: str, job_id: str, knows: Knows) -> None:
        """A job of ours runs there."""
        started_at = knows.facts.get("started_at")
        if knows.says.state == AgentState.RUNNING and isinstance(started_at, float | int):
            self._seen.setdefault(job_id, {})[node] = started_at
            if len(self._seen) > REMEMBERED_MAX:
                self._seen.popitem(last=False)

    def settled(self, node: str, job_id: str) -> None:
        """This node has given the result: wherever else the job runs, it does so in vain."""
        others = self._seen.pop(job_id, {})
        others.pop(node, None)
        self._left += [_Left(other, job_id, started_at, now().monotonic) for other, started_at in others.items()]
        del self._left[:-REMEMBERED_MAX]
        if self._left:
            self._some.set()

    async def keep_clearing(self) -> None:
        """Until it is canceled."""
        while True:
            await self._some.wait()
            await asyncio.sleep(CLEAR_EVERY_S)
            await self.clear()
            if not self._left:
                self._some.clear()

    async def clear(self) -> None:
        """Once: what is at nodes that answer again."""
        lines = self._company.ranking()
        there = {line.node for line in lines if line.standing in (NodeState.FREE, NodeState.FULL) or line.good_checks}
        for left in list(self._left):
            with on_behalf_of(left.job_id):
                if now().monotonic - left.since > REMEMBERED_S or (left.node in there and await self._is_dealt_with(left)):
                    self._left = [other for other in self._left if other is not left]  # it may have been forgotten meanwhile

    async def _is_dealt_with(self, left: _Left) -> bool:
        try:
            knows = await self._company.ask(left.node, left.job_id)
            if knows is None or knows.says.state != AgentState.RUNNING or knows.facts.get("started_at") != left.started_at:
                return True
            await self._company.remove(left.node, left.job_id, only_running=True)
        except (TasukiError, Refusing) as error:
            logger.info("job %s still runs at %s, in vain; another try soon: %s", left.job_id, left.node, error)
            return False
        self._metrics.stopped.inc()
        logger.info("job %s: stopped at %s, another node has given the result", left.job_id, left.node)
        return True
