"""One job on its way: node after node, until one gives an answer that another would not better.

What each answer means is decided in `core.failover_events`, as for the client: a program's failure, 409, 400 and 423 are answers;
a lost connection or a 5xx without an outcome leads to the next node, if what is to be sent can be sent again; full nodes are
passed over, and so are those that cannot run this very job, which does not count against them. While a node works, it is asked
how the job stands: one that says nothing for `silent_s` is as good as dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from starlette.responses import Response

from tasuki.agent.input_sources import INPUT_NOT_FOUND
from tasuki.agent.refusals import on_behalf_of
from tasuki.client.agents.transfer import Refusing
from tasuki.clocks import now
from tasuki.core.failover import agent_protocol
from tasuki.core.failover.agent_protocol import AgentState
from tasuki.core.failover.events import LONGER_THAN_THE_JOB_S, TOKEN_STATUSES, RefusalMeaning, about, verdict_of
from tasuki.core.failover.nodes import NodeState
from tasuki.core.failover.plan import ODD_MAX, WATCH_S
from tasuki.dispatcher.metrics import DispatcherMetrics
from tasuki.dispatcher.node_pool import Knows, NodePool
from tasuki.dispatcher.proxying import NodeRefusal, PassedAnswer, RequestBody, check_result, read_refusal
from tasuki.errors import AgentRefusal, InvalidInput, ResponseLost, TasukiError, TooLarge, Unavailable

if TYPE_CHECKING:
    import httpx


# ----------------------------------------------------------------------------------------------------
# Runs that were left behind: a node fell silent with a job, another one gave the result, and the first goes on for nothing.

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


logger = logging.getLogger("tasuki.dispatcher")
WATCH_MAX_S = 3.0  # of jobs that run for long there are many
RUNNING: frozenset[str] = frozenset({agent_protocol.AgentState.RUNNING})
COMPARING: frozenset[str] = RUNNING | {agent_protocol.AgentState.DONE}
FULL_PAUSE_S = 0.1  # until the next look; its Retry-After is for those who do not look
WORDS_MAX_CHARS = 300
READ_S = LONGER_THAN_THE_JOB_S


class Dispatch:
    """What all requests of a dispatcher share."""

    def __init__(self, company: NodePool, metrics: DispatcherMetrics, limit_s: float, silent_s: float) -> None:
        self._company = company
        self._metrics = metrics
        self.leftovers = AbandonedRuns(company, metrics)
        self._limit_s = limit_s
        self._silent_s = silent_s
        self._sent_to: dict[str, str] = {}
        """Where jobs are being run by requests of this dispatcher: an id that comes twice at once meets itself."""

    async def run(self, job_id: str, sent: str | None, parcel: RequestBody, first: str | None = None) -> Response:
        """The answer of the first node that gives one. `first` has the result, and is to compare what it is sent with it."""
        said: dict[str, str] = {}
        refused: dict[str, NodeRefusal] = {}
        node = first or self._sent_to.get(job_id) or self._next(job_id, said)
        while node is not None:
            if said:
                self._metrics.moved.inc()
            logger.info("job %s: goes to %s", job_id, node)
            answer = await self._try(node, job_id, sent, parcel, COMPARING if node == first else RUNNING)
            if isinstance(answer, Response):
                if isinstance(answer, PassedAnswer):
                    self.leftovers.settled(node, job_id)
                return answer
            if isinstance(answer, NodeRefusal):
                refused[node] = answer
                said[node] = answer.refusal.words()[:WORDS_MAX_CHARS]
            else:
                said[node] = answer
                logger.warning("job %s: %s: %s", job_id, node, answer)
            if parcel.spent and isinstance(answer, NodeRefusal) and verdict_of(answer.refusal) is RefusalMeaning.NOT_HERE:
                return answer.answer(node)
            node = None if parcel.spent else self._next(job_id, said)
        raise self._no_answer(job_id, said, refused, spent=parcel.spent)

    def _no_answer(self, job_id: str, said: dict[str, str], refused: dict[str, NodeRefusal], *, spent: bool) -> AgentRefusal:
        """Nobody is left. Where every node has said that it cannot run this job, that is the answer; else it may come again."""
        if not spent and any(verdict_of(one.refusal) is RefusalMeaning.FULL for one in refused.values()):
            return self.full(job_id)
        words = {line.node: said.get(line.node, line.said) for line in self._company.ranking()}
        if spent or len(refused) < len(words):
            return nobody(job_id, words, spent=spent)
        refusal = max((one.refusal for one in refused.values()), key=lambda refusal: refusal.status)
        message = f"no node could run job {job_id}: {_told(words)}"
        retry = refusal.retry_after_s is not None
        return AgentRefusal(refusal.status, refusal.code or TooLarge.code, message, retry=retry, job_id=job_id, nodes=words)

    def _next(self, job_id: str, tried: dict[str, str]) -> str | None:
        return next((line.node for line in self._company.candidates(job_id, tried)), None)

    def full(self, job_id: str) -> AgentRefusal:
        places = self._company.capacity()
        message = f"no node has a free place for job {job_id}; try again later"
        return AgentRefusal(503, agent_protocol.FULL, message, retry=True, running=places.running, limit=places.limit)

    async def _try(
        self, node: str, job_id: str, sent: str | None, parcel: RequestBody, fitting: frozenset[str]
    ) -> Response | NodeRefusal | str:
        """An answer for the client; Refused: it is full, or cannot run this one; a text: why it is none."""
        self._company.sent(node)
        leads = job_id not in self._sent_to
        self._sent_to.setdefault(job_id, node)
        stack = AsyncExitStack()
        try:
            response = await self._answer_of(node, job_id, sent, parcel, fitting, stack)
            if response.is_success:
                check_result(response, 200)
                self._company.nodes.answered(node, now().monotonic)
                return self._passed(job_id, node, response, stack.pop_all(), unread=parcel.unread)
            refused = await read_refusal(response)
        except Unavailable as error:
            self._company.nodes.failed(node, error.message, now().monotonic)
            return error.message[:WORDS_MAX_CHARS]
        finally:
            self._company.ended(node)
            if leads:
                del self._sent_to[job_id]
            await stack.aclose()
        return self._judged(node, refused)

    def _judged(self, node: str, refused: NodeRefusal) -> Response | NodeRefusal | str:
        words = refused.refusal.words()[:WORDS_MAX_CHARS]
        match verdict_of(refused.refusal):
            case RefusalMeaning.FULL:
                self._company.nodes.full(node, words, FULL_PAUSE_S, now().monotonic)
                return refused
            case _ if refused.refusal.code == INPUT_NOT_FOUND:  # the others look into the same store
                self._company.nodes.answered(node, now().monotonic)
                return refused.answer(node)
            case RefusalMeaning.FAILED:
                self._company.nodes.failed(node, words, now().monotonic)
                return words
            case _ if refused.refusal.status in TOKEN_STATUSES:
                self._company.nodes.failed(node, f"refuses the token of this dispatcher: {words}", now().monotonic)
                return f"refuses the token of this dispatcher: {words}"
            case RefusalMeaning.NOT_HERE:
                self._company.nodes.answered(node, now().monotonic)
                return refused
            case _:
                self._company.nodes.answered(node, now().monotonic)
                return refused.answer(node)

    def _passed(
        self, job_id: str, node: str, response: httpx.Response, stack: AsyncExitStack, *, unread: bool, cached: bool = False
    ) -> PassedAnswer:
        more = {"Tasuki-Cache": "hit"} if cached else {}
        return PassedAnswer(job_id, node, response, stack, on_cut=self._metrics.cut.inc, unread=unread, more=more)

    async def stored(
        self,
        job_id: str,
        node: str,
        headers: dict[str, str],
        *,
        method: str = "GET",
        cached: bool = False,
        unread: bool = False,
    ) -> Response:
        """The result that is at this node; whatever it answers. Unavailable."""
        stack = AsyncExitStack()
        try:
            asking = self._company.agent(node).answer(method, f"/result/{quote(job_id)}", headers=headers, answer_s=READ_S)
            response = await stack.enter_async_context(asking)
            if response.is_success:
                check_result(response, 200, *([206] if "range" in headers else []))
                return self._passed(job_id, node, response, stack.pop_all(), unread=unread, cached=cached)
            return (await read_refusal(response)).answer(node)
        except Unavailable as error:
            self._company.nodes.failed(node, error.message, now().monotonic)
            raise
        finally:
            await stack.aclose()

    # ------------------------------------------------------------------------------------------------ one node

    async def _answer_of(
        self, node: str, job_id: str, sent: str | None, parcel: RequestBody, fitting: frozenset[str], stack: AsyncExitStack
    ) -> httpx.Response:
        """Send it, and wait for the answer as long as the node works on it and the client is there."""
        sending = parcel.sending(pulls=self._company.pulls(node))
        pieces = await stack.enter_async_context(aclosing(sending.pieces))
        asking = self._company.agent(node).answer(
            "POST",
            f"/run/{quote(job_id)}",
            params={"input": sent} if sent is not None else {},
            headers=sending.headers,
            content=pieces,
            answer_s=self._limit_s,
        )
        answering = asyncio.ensure_future(stack.enter_async_context(asking))
        watching = asyncio.ensure_future(self._watch(node, job_id, fitting))
        leaving = asyncio.ensure_future(parcel.left())
        tasks = (answering, watching, leaving)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
            if watching.done():
                raise ResponseLost(watching.result())
            logger.info("job %s: the client has left; it goes on at %s", job_id, node)
            raise InvalidInput(f"whoever asked for job {job_id} has left")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, node: str, job_id: str, fitting: frozenset[str]) -> str:
        """Returns, with the reason, when no answer is to be expected any more: nothing is said, or other states than these."""
        began = heard_at = now().monotonic
        odd, pause_s = 0, WATCH_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = WATCH_S
            try:
                knows = await self._company.ask(node, job_id)
            except (TasukiError, Refusing):
                silent_s = now().monotonic - heard_at
                if silent_s >= self._silent_s:
                    return f"has said nothing for {silent_s:.0f} s"
                continue
            heard_at = now().monotonic
            if knows is not None and knows.says.state in fitting:
                self.leftovers.seen(node, job_id, knows)
                odd, pause_s = 0, min(WATCH_MAX_S, max(WATCH_S, (heard_at - began) / 10))
                continue
            odd += 1
            if odd >= ODD_MAX:
                return "its connection is dead: the job is not running there any more"


def nobody(job_id: str, said: dict[str, str], *, spent: bool = False) -> AgentRefusal:
    """No node gave an answer."""
    again = "; what was sent is not kept here, send it again" if spent else ""
    message = f"no node could take job {job_id}{again}: {_told(said)}"
    return AgentRefusal(503, Unavailable.code, message, retry=True, job_id=job_id, nodes=said)


def _told(said: dict[str, str]) -> str:
    return "; ".join(about(node, words) for node, words in said.items())
