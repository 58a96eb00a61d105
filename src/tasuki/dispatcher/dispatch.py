"""Dispatch of one job: send it to node after node, until one gives an answer that no other node would improve.

`core/failover/events.py` decides the meaning of each answer, as for the client. A program's failure, 400, 409 and 423 are final.
A lost connection or a 5xx without an outcome leads to the next node, if the body can be sent again. Full nodes are skipped; so
are nodes that cannot run this very job, which does not count against them. While a node works, it is asked for the status of the
job: a node that does not answer for `silent_s` counts as dead.

A run that was abandoned so may continue for nothing while another node gives the result. When its node answers again, the run is
stopped if it is exactly the one that was seen there: this id, running, begun at the same moment. Anything else is left alone. The
list is bounded and in memory: a run that is forgotten ends by itself, and costs a slot until then.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from starlette.responses import Response

from tasuki.agent.refusals import log_context
from tasuki.client.agents.node import JobView
from tasuki.client.agents.transfer import NodeRefused
from tasuki.clocks import now
from tasuki.core.failover import agent_protocol
from tasuki.core.failover.agent_protocol import AgentState
from tasuki.core.failover.events import LONGER_THAN_THE_JOB_S, TOKEN_STATUSES, RefusalMeaning, answers_in_words, meaning_of
from tasuki.core.failover.nodes import NodeState
from tasuki.core.failover.plan import ODD_MAX, WATCH_S
from tasuki.dispatcher.metrics import DispatcherMetrics
from tasuki.dispatcher.node_pool import NodePool
from tasuki.dispatcher.proxying import NodeRefusal, ProxiedResponse, RequestBody, check_result, read_node_refusal
from tasuki.errors import AgentRefusal, InvalidInput, ResponseLost, TasukiError, TooLarge, Unavailable

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger("tasuki.dispatcher")
WATCH_MAX_S = 3.0  # of jobs that run for long there are many
RUNNING: frozenset[str] = frozenset({AgentState.RUNNING})
COMPARING: frozenset[str] = RUNNING | {AgentState.DONE}
FULL_PAUSE_S = 0.1  # until the next check; a node's Retry-After is for clients that do not poll
WORDS_MAX_CHARS = 300
READ_S = LONGER_THAN_THE_JOB_S
REMEMBERED_MAX = 1024  # jobs
REMEMBERED_S = 86_400.0
CLEAR_EVERY_S = 2.0


class _AbandonedRun(NamedTuple):
    """Run whose result is not needed any more."""

    node: str
    job_id: str
    started_at: float
    since: float


class AbandonedRuns:
    """Abandoned runs of one dispatcher."""

    def __init__(self, pool: NodePool, metrics: DispatcherMetrics) -> None:
        self._pool = pool
        self._metrics = metrics
        self._seen: OrderedDict[str, dict[str, float]] = OrderedDict()
        """Start time of each job under way, by the nodes at which it was seen to run and by their clocks."""
        self._left: list[_AbandonedRun] = []
        self._is_any_left = asyncio.Event()

    def seen(self, node: str, job_id: str, view: JobView) -> None:
        """Note that a job of this dispatcher runs at a node."""
        if view.status.state == AgentState.RUNNING and view.started_at is not None:
            self._seen.setdefault(job_id, {})[node] = view.started_at
            if len(self._seen) > REMEMBERED_MAX:
                self._seen.popitem(last=False)

    def settled(self, node: str, job_id: str) -> None:
        """Note that a node has given the result: runs at other nodes are abandoned."""
        others = self._seen.pop(job_id, {})
        others.pop(node, None)
        self._left += [_AbandonedRun(other, job_id, started_at, now().monotonic) for other, started_at in others.items()]
        del self._left[:-REMEMBERED_MAX]
        if self._left:
            self._is_any_left.set()

    async def keep_stopping(self) -> None:
        """Stop abandoned runs until canceled."""
        while True:
            await self._is_any_left.wait()
            await asyncio.sleep(CLEAR_EVERY_S)
            await self.stop_reachable()
            if not self._left:
                self._is_any_left.clear()

    async def stop_reachable(self) -> None:
        """Stop the abandoned runs at nodes that answer again."""
        lines = self._pool.ranking()
        there = {line.node for line in lines if line.standing in (NodeState.FREE, NodeState.FULL) or line.good_checks}
        for run in list(self._left):
            with log_context(run.job_id):
                if now().monotonic - run.since > REMEMBERED_S or (run.node in there and await self._stop(run)):
                    self._left = [other for other in self._left if other is not run]  # it may have been forgotten meanwhile

    async def _stop(self, run: _AbandonedRun) -> bool:
        """Stop a run if it is the one that was seen; return whether it need not be looked at again."""
        try:
            view = await self._pool.ask(run.node, run.job_id)
            if view is None or view.status.state != AgentState.RUNNING or view.started_at != run.started_at:
                return True
            await self._pool.remove(run.node, run.job_id, only_running=True)
        except (TasukiError, NodeRefused) as error:
            logger.info("job %s still runs at %s for nothing; another try soon: %s", run.job_id, run.node, error)
            return False
        self._metrics.stopped.inc()
        logger.info("job %s: stopped at %s, another node has given the result", run.job_id, run.node)
        return True


class Dispatch:
    """Dispatch of all requests of one dispatcher."""

    def __init__(self, pool: NodePool, metrics: DispatcherMetrics, limit_s: float, silent_s: float) -> None:
        self._pool = pool
        self._metrics = metrics
        self.abandoned = AbandonedRuns(pool, metrics)
        self._limit_s = limit_s
        self._silent_s = silent_s
        self._sent_to: dict[str, str] = {}
        """Node of each job that a request of this dispatcher runs: a second request with its id goes to the same node."""

    async def run(self, job_id: str, sent: str | None, body: RequestBody, first: str | None = None) -> Response:
        """Return the answer of the first node that gives one. `first` has the result, and compares the upload with its input."""
        answers: dict[str, str] = {}
        refused: dict[str, NodeRefusal] = {}
        node = first or self._sent_to.get(job_id) or self._next(job_id, answers)
        while node is not None:
            if answers:
                self._metrics.moved.inc()
            logger.info("job %s: goes to %s", job_id, node)
            answer = await self._try(node, job_id, sent, body, COMPARING if node == first else RUNNING)
            if isinstance(answer, Response):
                if isinstance(answer, ProxiedResponse):
                    self.abandoned.settled(node, job_id)
                return answer
            if isinstance(answer, NodeRefusal):
                refused[node] = answer
                answers[node] = answer.refusal.words()[:WORDS_MAX_CHARS]
            else:
                answers[node] = answer
                logger.warning("job %s: %s: %s", job_id, node, answer)
            if body.spent and isinstance(answer, NodeRefusal) and meaning_of(answer.refusal) is RefusalMeaning.NOT_HERE:
                return answer.answer(node)
            node = None if body.spent else self._next(job_id, answers)
        raise self._no_answer(job_id, answers, refused, spent=body.spent)

    def _no_answer(self, job_id: str, answers: dict[str, str], refused: dict[str, NodeRefusal], *, spent: bool) -> AgentRefusal:
        """Return the refusal when no node is left: final if every node cannot run this job, else one that asks for a retry."""
        if not spent and any(meaning_of(one.refusal) is RefusalMeaning.FULL for one in refused.values()):
            return self.full(job_id)
        words = {line.node: answers.get(line.node, line.last_answer) for line in self._pool.ranking()}
        if spent or len(refused) < len(words):
            return nobody(job_id, words, spent=spent)
        refusal = max((one.refusal for one in refused.values()), key=lambda refusal: refusal.status)
        message = f"no node could run job {job_id}: {answers_in_words(words)}"
        retry = refusal.retry_after_s is not None
        return AgentRefusal(refusal.status, refusal.code or TooLarge.code, message, retry=retry, job_id=job_id, nodes=words)

    def _next(self, job_id: str, tried: dict[str, str]) -> str | None:
        return next((line.node for line in self._pool.candidates(job_id, tried)), None)

    def full(self, job_id: str) -> AgentRefusal:
        places = self._pool.capacity()
        message = f"no node has a free place for job {job_id}; try again later"
        return AgentRefusal(503, agent_protocol.FULL, message, retry=True, running=places.running, limit=places.limit)

    async def _try(
        self, node: str, job_id: str, sent: str | None, body: RequestBody, fitting: frozenset[str]
    ) -> Response | NodeRefusal | str:
        """Return a response for the client; a refusal of a node that is full or cannot run this job; or why there is neither."""
        self._pool.sent(node)
        leads = job_id not in self._sent_to
        self._sent_to.setdefault(job_id, node)
        stack = AsyncExitStack()
        try:
            response = await self._answer_of(node, job_id, sent, body, fitting, stack)
            if response.is_success:
                check_result(response, 200)
                self._pool.nodes.answered(node, now().monotonic)
                return ProxiedResponse(job_id, node, response, stack.pop_all(), self._metrics.cut.inc)
            refused = await read_node_refusal(response)
        except Unavailable as error:
            self._pool.nodes.failed(node, error.message, now().monotonic)
            return error.message[:WORDS_MAX_CHARS]
        finally:
            self._pool.ended(node)
            if leads:
                del self._sent_to[job_id]
            await stack.aclose()
        return self._judge(node, refused)

    def _judge(self, node: str, refused: NodeRefusal) -> Response | NodeRefusal | str:
        words = refused.refusal.words()[:WORDS_MAX_CHARS]
        match meaning_of(refused.refusal):
            case RefusalMeaning.FULL:
                self._pool.nodes.full(node, words, FULL_PAUSE_S, now().monotonic)
                return refused
            case _ if refused.refusal.code == agent_protocol.INPUT_NOT_FOUND:  # the other nodes use the same store
                self._pool.nodes.answered(node, now().monotonic)
                return refused.answer(node)
            case RefusalMeaning.FAILED:
                self._pool.nodes.failed(node, words, now().monotonic)
                return words
            case _ if refused.refusal.status in TOKEN_STATUSES:
                problem = f"refuses the token of this dispatcher: {words}"
                self._pool.nodes.failed(node, problem, now().monotonic)
                return problem
            case RefusalMeaning.NOT_HERE:
                self._pool.nodes.answered(node, now().monotonic)
                return refused
            case _:
                self._pool.nodes.answered(node, now().monotonic)
                return refused.answer(node)

    async def stored(
        self,
        job_id: str,
        node: str,
        headers: dict[str, str],
        *,
        method: str = "GET",
        cached: bool = False,
    ) -> Response:
        """Return the response of a node that has the result. Unavailable."""
        stack = AsyncExitStack()
        try:
            asking = self._pool.agents[node].answer(method, f"/result/{quote(job_id)}", headers=headers, answer_s=READ_S)
            response = await stack.enter_async_context(asking)
            if response.is_success:
                check_result(response, 200, *([206] if "range" in headers else []))
                more = {"Tasuki-Cache": "hit"} if cached else {}
                return ProxiedResponse(job_id, node, response, stack.pop_all(), self._metrics.cut.inc, more)
            return (await read_node_refusal(response)).answer(node)
        except Unavailable as error:
            self._pool.nodes.failed(node, error.message, now().monotonic)
            raise
        finally:
            await stack.aclose()

    # ------------------------------------------------------------------------------------------------ one node

    async def _answer_of(
        self, node: str, job_id: str, sent: str | None, body: RequestBody, fitting: frozenset[str], stack: AsyncExitStack
    ) -> httpx.Response:
        """Send a job to a node, and wait for its answer while the node works on it and the client is connected."""
        sending = body.sending(pulls=self._pool.pulls(node))
        pieces = await stack.enter_async_context(aclosing(sending.pieces))
        asking = self._pool.agents[node].answer(
            "POST",
            f"/run/{quote(job_id)}",
            params={"input": sent} if sent is not None else {},
            headers=sending.headers,
            content=pieces,
            answer_s=self._limit_s,
        )
        answering = asyncio.ensure_future(stack.enter_async_context(asking))
        watching = asyncio.ensure_future(self._watch(node, job_id, fitting))
        leaving = asyncio.ensure_future(body.client_left())
        tasks = (answering, watching, leaving)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
            if watching.done():
                raise ResponseLost(watching.result())
            logger.info("job %s: the client has left; the job continues at %s", job_id, node)
            raise InvalidInput(f"the client of job {job_id} has disconnected")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, node: str, job_id: str, fitting: frozenset[str]) -> str:
        """Return, with the reason, when no answer can be expected: the node is silent, or reports other states than these."""
        began = heard_at = now().monotonic
        odd, pause_s = 0, WATCH_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = WATCH_S
            try:
                view = await self._pool.ask(node, job_id)
            except (TasukiError, NodeRefused):
                silent_s = now().monotonic - heard_at
                if silent_s >= self._silent_s:
                    return f"has been silent for {silent_s:.0f} s"
                continue
            heard_at = now().monotonic
            if view is not None and view.status.state in fitting:
                self.abandoned.seen(node, job_id, view)
                odd, pause_s = 0, min(WATCH_MAX_S, max(WATCH_S, (heard_at - began) / 10))
                continue
            odd += 1
            if odd >= ODD_MAX:
                return "its connection is dead: the job is not running there any more"


def nobody(job_id: str, answers: dict[str, str], *, spent: bool = False) -> AgentRefusal:
    """Return the refusal of a job to which no node gave an answer."""
    again = "; what was sent is not kept here, send it again" if spent else ""
    message = f"no node could take job {job_id}{again}: {answers_in_words(answers)}"
    return AgentRefusal(503, Unavailable.code, message, retry=True, job_id=job_id, nodes=answers)
