"""The agents as a dispatcher sees them: looked at by one poller, asked for jobs, ranked. Holds their connections, and no job.

At most one look per node is under way. Requests wait for a look only where the last answer is old, and only for a moment: a node
that does not answer delays nobody for longer than RANK_WAIT_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Container
from typing import Any
from urllib.parse import quote

import msgspec

from tasuki.client.agents.node import ASK_S, AgentNode
from tasuki.client.agents.transfer import Refusing
from tasuki.clocks import now
from tasuki.core.failover.events import JobSays, Refusal
from tasuki.core.failover.nodes import RANK_WAIT_S, Capacity, Nodes, NodeState, Ranked, candidates, look_every_s, rendezvous, well
from tasuki.dispatcher.metrics import DispatcherMetrics
from tasuki.dispatcher.proxying import read_refusal
from tasuki.dispatcher.settings import DispatcherConfig
from tasuki.errors import NoConnection, TasukiError

logger = logging.getLogger("tasuki.dispatcher")
FRESH_S = 0.6  # an answer that is not older is good enough to choose by
FIND_S = 0.5  # how long a run waits to hear whether a node knows its id
REMOVE_S = 60.0
SMALL_MAX_BYTES = 64 * 1024


class _Job(msgspec.Struct):
    state: str
    input: str | None = None
    exit_code: int | None = None


class Knows(msgspec.Struct, frozen=True):
    """A node's word about a job."""

    says: JobSays
    body: bytes
    """As it was said."""

    @property
    def facts(self) -> dict[str, Any]:
        return dict(msgspec.json.decode(self.body))


class NodeReports(msgspec.Struct, frozen=True):
    """What all nodes that could be asked say about a job."""

    known: dict[str, Knows]
    silent: dict[str, str]
    """Those that did not say, and why."""

    @property
    def says(self) -> dict[str, JobSays]:
        return {node: knows.says for node, knows in self.known.items()}

    def best_told(self, node: str) -> str:
        """Of those that say the same as this one: with a registry all know of a run, and one how far it is."""
        same = (other for other, knows in self.known.items() if knows.says == self.known[node].says)
        return next((other for other in same if self.known[other].facts.get("progress")), node)


class NodePool:
    """All agents of one dispatcher."""

    def __init__(self, config: DispatcherConfig, metrics: DispatcherMetrics) -> None:
        tls = config.agent_tls
        self._agents = {str(address): AgentNode(address, config.agent_token, tls) for address in config.agents}
        self.nodes = Nodes(list(self._agents), random.random, config.rules)
        self._metrics = metrics
        self._pulls: set[str] = set()
        self._ours: Counter[str] = Counter()
        """How many jobs of this dispatcher are at each node, or on their way there."""
        self._problems: dict[str, str] = {}
        self._looks: dict[str, asyncio.Task[None]] = {}
        self._wanted_at = now().monotonic
        self._wanted = asyncio.Event()

    async def close(self) -> None:
        looks = list(self._looks.values())
        for task in looks:
            task.cancel()
        await asyncio.gather(*looks, return_exceptions=True)
        await asyncio.gather(*(agent.close() for agent in self._agents.values()))

    def agent(self, node: str) -> AgentNode:
        return self._agents[node]

    def has(self, node: str) -> bool:
        return node in self._agents

    def pulls(self, node: str) -> bool:
        """Whether it fetches stored inputs itself."""
        return node in self._pulls

    # ------------------------------------------------------------------------------------------------ capacity

    async def keep_looking(self) -> None:
        """The one poller. A request after a pause wakes it."""
        while True:
            every_s = look_every_s(now().monotonic - self._wanted_at, well=self.well)
            self._look_at_all(every_s * 0.9)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self._wanted.wait()
            self._wanted.clear()

    def _look_at_all(self, fresh_s: float) -> None:
        for node in self.nodes.to_look_at(now().monotonic, fresh_s):
            self._looks[node] = asyncio.create_task(self._look(node))

    async def _look(self, node: str) -> None:
        end = "ok"
        try:
            capacity = await self._agents[node].look()
            self._note_pulls(node, capacity)
            self.nodes.seen(node, capacity, now().monotonic)
            self._tell(node, "")
            for _ in range(self._ours[node] - (capacity.running if capacity is not None else 0)):
                self.nodes.taken(node)  # on its way there: the node does not know of it
        except (TasukiError, Refusing) as error:
            end = "failed"
            self.nodes.unwell(node, str(error), now().monotonic)
            self._tell(node, str(error))
        except Exception as error:  # a defect must not leave the node "being asked" for ever
            end = "failed"
            logger.exception("%s could not be looked at", node)
            self.nodes.unwell(node, f"could not be looked at: {error!r}", now().monotonic)
        finally:
            self._looks.pop(node, None)
        self._metrics.looks.labels(end).inc()

    def _tell(self, node: str, problem: str) -> None:
        """Not with every look: when a problem begins, changes, or is over."""
        before = self._problems.pop(node, "")
        if problem:
            self._problems[node] = problem
            if problem != before:
                logger.warning("%s takes no jobs: %s", node, problem)
        elif before:
            logger.info("%s answers again", node)

    def _note_pulls(self, node: str, capacity: Capacity | None) -> None:
        if capacity is not None and capacity.pulls:
            self._pulls.add(node)
        else:
            self._pulls.discard(node)

    async def fresh(self, fresh_s: float = FRESH_S) -> None:
        """There is something to decide: have answers that are not older, as far as they come soon."""
        moment = now().monotonic
        if look_every_s(moment - self._wanted_at) > FRESH_S:
            self._wanted.set()
        self._wanted_at = moment
        self._look_at_all(fresh_s)
        left_out = {line.node for line in self.ranking() if line.standing is NodeState.LEFT_OUT}
        stale = self.nodes.older_than(moment, fresh_s) - left_out
        waiting = [task for node, task in self._looks.items() if node in stale]
        if waiting:
            await asyncio.wait(waiting, timeout=RANK_WAIT_S)

    def ranking(self) -> list[Ranked]:
        return self.nodes.ranking(now().monotonic)

    def sent(self, node: str) -> None:
        """It is sent a job, and has a place less until `ended`."""
        self._ours[node] += 1
        self.nodes.taken(node)

    def ended(self, node: str) -> None:
        self._ours[node] -= 1
        self.nodes.given_back(node)

    def candidates(self, job_id: str, tried: Container[str] = ()) -> list[Ranked]:
        """Who may be sent the job now, besides those that were tried."""
        return candidates([line for line in self.ranking() if line.node not in tried], job_id)

    def capacity(self) -> Capacity:
        """Of all that are well, together."""
        lines = well(self.ranking())
        return Capacity(sum(line.running or 0 for line in lines), sum(line.limit or 0 for line in lines))

    @property
    def well(self) -> bool:
        """At least one takes jobs, now or soon."""
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
        said = dict(zip(tasks, ended, strict=True))
        late = f"did not answer within {wait_s:g} s"
        return NodeReports(
            {node: knows for node, knows in said.items() if isinstance(knows, Knows)},
            {node: str(error) or late for node, error in said.items() if isinstance(error, BaseException)},
        )

    async def remove(self, node: str, job_id: str, *, only_running: bool) -> None:
        """Stop it there, and remove it. A job that does not end at once has time until it is killed. Unavailable, Refusing."""
        path = f"/jobs/{quote(job_id)}" + ("?state=running" if only_running else "")
        async with self._agents[node].answer("DELETE", path, answer_s=REMOVE_S) as response:
            if not response.is_success and response.status_code != 404:
                raise Refusing((await read_refusal(response)).refusal)

    async def ask(self, node: str, job_id: str) -> Knows | None:
        """What it says about the job; None: it does not know it. Unavailable, Refusing."""
        try:
            async with self._agents[node].answer("GET", f"/jobs/{quote(job_id)}", answer_s=ASK_S) as response:
                body = b""
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > SMALL_MAX_BYTES:
                        raise Refusing(Refusal(response.status_code, "", "and did not end; is this a node agent?"))
        except NoConnection as error:
            self.nodes.failed(node, error.message, now().monotonic)
            raise
        if response.status_code == 404:
            return None
        try:
            job = msgspec.json.decode(body, type=_Job)
        except msgspec.DecodeError:
            raise Refusing(Refusal(response.status_code, "", "and told nothing about the job")) from None
        return Knows(JobSays(job.state, job.input or "", job.exit_code), body)
