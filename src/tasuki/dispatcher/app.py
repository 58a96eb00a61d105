"""Routes and life of a dispatcher: check the agents, listen, drain, close.

dispatcher = Dispatcher(config)
address = await dispatcher.start(address, tls)
await dispatcher.drain(timeout_s); await dispatcher.close()
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import ssl
from urllib.parse import quote

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from tasuki.agent import refusals
from tasuki.agent.input_sources import open_store
from tasuki.agent.refusals import GuardedServer
from tasuki.agent.registry_queries import described
from tasuki.agent.results import log_response
from tasuki.agent.upload import boundary_of
from tasuki.client.agents.node import JobView
from tasuki.client.agents.transfer import NodeRefused
from tasuki.config import DISK_FLOOR_BYTES
from tasuki.core.address import Address
from tasuki.core.failover.agent_protocol import (
    AgentState,
    IdDecision,
    check_input_hash,
    judge,
    only_running,
    parse_list_query,
    parse_log_query,
)
from tasuki.core.failover.nodes import NodeState, authoritative_node
from tasuki.core.failover.registry_records import result_location_of
from tasuki.core.job import Job, check_job_id
from tasuki.core.protocol import LogPiece
from tasuki.dispatcher.dispatch import Dispatch, nobody
from tasuki.dispatcher.inputs import InputStore
from tasuki.dispatcher.metrics import DispatcherMetrics
from tasuki.dispatcher.node_pool import FIND_S, NodePool, NodeReports
from tasuki.dispatcher.proxying import NODE_HEADER, ProxiedResponse, StreamedForm
from tasuki.dispatcher.registry import DispatcherRegistry, refusal_of
from tasuki.dispatcher.settings import DispatcherConfig, Mode
from tasuki.doors.http.exchange import CLIENT_GONE, json_answer, secret_of, unless_left
from tasuki.doors.listening import bound
from tasuki.errors import AgentRefusal, NotFound, TooLarge, Unavailable

logger = logging.getLogger("tasuki.dispatcher")
RANGE_HEADERS = ("range", "if-range")


class Dispatcher:
    """One dispatcher. Made inside the running loop."""

    def __init__(self, config: DispatcherConfig, registry: DispatcherRegistry | None = None) -> None:
        self._config = config
        self._registry = registry
        self.metrics = DispatcherMetrics()
        self.pool = NodePool(config, self.metrics)
        self._inputs = self._open_inputs()
        self._dispatch = Dispatch(self.pool, self.metrics, config.limit_s, config.silent_s)
        self.draining = False
        self._in_hand: list[str] = []
        """Jobs whose requests are here, while perhaps no node knows them."""
        self._tasks: list[asyncio.Task[None]] = []
        routes = (
            ("POST", "/run/{job_id}", self._run),
            ("GET", "/result/{job_id}", self._result),
            ("GET", "/jobs", self._jobs),
            ("GET", "/jobs/{job_id}", self._job),
            ("GET", "/jobs/{job_id}/logs/{stream}", self._log),
            ("DELETE", "/jobs/{job_id}", self._delete),
            ("PUT", "/inputs/{sha256}", self._put_input),
            ("GET", "/inputs/{sha256}", self._get_input),
            ("GET", "/capacity", self._capacity),
            ("GET", "/nodes", self._nodes),
            ("GET", "/metrics", self._scrape),
        )
        self.http = GuardedServer("dispatcher", config.tokens, routes, self._health, self._count_run, results_end_uploads=True)

    def _open_inputs(self) -> InputStore | None:
        if self._config.inputs is None:
            return None
        limit = self._config.max_upload_bytes
        blobs = open_store(self._config.inputs, max_blob_bytes=limit, floor_free_bytes=DISK_FLOOR_BYTES)
        return InputStore(blobs, limit, self._config.keep_inputs_days, self.metrics)

    # ------------------------------------------------------------------------------------------------ life

    async def start(self, address: Address, tls: ssl.SSLContext | None = None, host_names: tuple[str, ...] = ()) -> Address:
        """Listen; return the address with the port that was bound."""
        sock = bound(address)
        if self._inputs is not None:
            await self._inputs.check()
        if self._registry is not None:
            await self._registry.open()
        await self.pool.fresh()
        await self.http.open(sock, tls, host_names)
        works = [self.pool.keep_checking(), self._dispatch.abandoned.keep_stopping()]
        if self._inputs is not None:
            works += [self._inputs.keep_sweeping(), self._inputs.keeping.daily()]
        self._tasks = [asyncio.create_task(work) for work in works]
        return Address("https" if tls is not None else "http", address.host, sock.getsockname()[1])

    async def drain(self, timeout_s: float | None = None) -> None:
        """Take no new runs; wait for those that are under way."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.http.idle.wait()

    def hurry(self) -> None:
        """Cut the requests that still wait; the jobs continue at their nodes."""
        self.http.hurry()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.http.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.pool.close()
        if self._registry is not None:
            await self._registry.close()
        if self._inputs is not None:
            await self._inputs.close()

    # ------------------------------------------------------------------------------------------------ runs

    def _count_run(self, method: str, answer: Response, _code: str | None) -> None:
        if method == "POST":
            self.metrics.runs.labels(str(answer.status_code)).inc()

    async def _run(self, request: Request) -> Response:
        job_id = check_job_id(request.path_params["job_id"])
        sent = request.query_params.get("input")
        if sent is not None:
            check_input_hash(sent)
        boundary = boundary_of(request.headers.get("content-type", ""))
        if self.draining:
            raise refusals.is_draining()
        if self._registry is not None and (stored := await self._registry.look(job_id, sent)) is not None:
            return stored
        await self.pool.fresh()
        found = await self.pool.find(job_id, FIND_S)
        node = authoritative_node(job_id, found.statuses)
        first = None
        if node is not None:
            known = await self._known(job_id, sent, node, found.known[node])
            if isinstance(known, Response):
                return known
            first = known
        self._check_size(request)
        if first is None:
            if self._config.mode is Mode.REDIRECT and self._is_full(job_id):
                await self.pool.fresh(0.0)  # a redirected job may have ended at its node, which does not report that
            self._check_places(job_id)
        if self._config.mode is Mode.REDIRECT:
            return self._redirected(job_id, sent, first)
        self._in_hand.append(job_id)
        try:
            if self._inputs is None:
                return await self._dispatch.run(job_id, sent, StreamedForm(request), first)
            async with self._inputs.taking_in(request, boundary) as body:
                if self._registry is None:
                    return await self._dispatch.run(job_id, sent, body, first)
                return await self._registry.run(job_id, sent, body, lambda: self._dispatch.run(job_id, sent, body, first))
        finally:
            self._in_hand.remove(job_id)

    def _check_size(self, request: Request) -> None:
        """Refuse an upload that is too large for the store. A body that is only forwarded is limited by the agents."""
        length = request.headers.get("content-length", "0")
        limit = self._config.max_upload_bytes
        if self._inputs is not None and not (length.isdecimal() and len(length) < 19 and int(length) <= limit):
            raise TooLarge(f"an upload of {length[:20]} bytes is too large; the limit of this dispatcher is {limit}")

    async def _known(self, job_id: str, sent: str | None, node: str, view: JobView) -> Response | str | None:
        """Decide about a job that a node knows: return the response, or the node that must see the upload; None: run it."""
        state = AgentState(view.status.state) if view.status.state in set(AgentState) else None
        match judge(state, view.status.input or None, sent):
            case IdDecision.LOCKED:
                raise refusals.is_running(job_id, view.node or node, view.started_at, address=node)
            case IdDecision.CONFLICT:
                raise refusals.other_input(job_id)
            case IdDecision.COMPARE:
                return node
            case IdDecision.STORED if self._config.mode is Mode.REDIRECT:
                return node
            case IdDecision.STORED:
                try:
                    answer = await self._dispatch.stored(job_id, node, {}, cached=True)
                except Unavailable:  # the node has just died, and its result is lost: the job is run again
                    return None
                return answer if isinstance(answer, ProxiedResponse) else node
            case IdDecision.RUN:
                return None

    def _check_places(self, job_id: str) -> None:
        """Refuse a job that no node can take, before the upload is read."""
        candidates = self.pool.candidates(job_id)
        if not candidates:
            raise nobody(job_id, {line.node: line.last_answer for line in self.pool.ranking()})
        if self._is_full(job_id):
            raise self._dispatch.full(job_id)

    def _is_full(self, job_id: str) -> bool:
        return all(line.full for line in self.pool.candidates(job_id))

    def _redirected(self, job_id: str, sent: str | None, first: str | None) -> Response:
        """Redirect with 307, which keeps method and body; only to a node of this dispatcher, as the client sends it the token."""
        node = first or next(line.node for line in self.pool.candidates(job_id) if not line.full)
        self.pool.nodes.taken(node)
        logger.info("job %s: redirected to %s", job_id, node)
        return _leads_to(node, f"/run/{quote(job_id)}" + (f"?input={sent}" if sent is not None else ""))

    # ------------------------------------------------------------------------------------------------ jobs

    async def _recorded(self, job_id: str) -> Job | None:
        return None if self._registry is None else await self._registry.read(job_id)

    async def _find(self, job_id: str) -> tuple[str, NodeReports]:
        """Return the node whose report counts, and the reports of all nodes; NotFound."""
        found = await self.pool.find(job_id)
        node = authoritative_node(job_id, found.statuses)
        if node is not None:
            return node, found
        if job_id in self._in_hand:
            words = f"job {job_id} is on its way to a node, or its node does not answer; ask again"
            raise refusals.unavailable(words, job_id=job_id)
        if found.silent:
            raise nobody(job_id, found.silent)
        raise NotFound(f"no healthy node has a job {job_id}")

    async def _result(self, request: Request) -> Response:
        """Return the result from the registry, else from a node; `registry.py` explains the order."""
        job_id = check_job_id(request.path_params["job_id"])
        job = await self._recorded(job_id)
        if self._registry is not None and job is not None and (stored := await self._registry.result(job)) is not None:
            return stored
        place = result_location_of(job) if job is not None else None
        try:
            return await self._result_of_node(request, job_id, place.address if place is not None else "")
        except (NotFound, AgentRefusal):
            if job is None:
                raise
            raise refusal_of(job) from None

    async def _result_of_node(self, request: Request, job_id: str, address: str) -> Response:
        """Return the result of a node. `address`: the node that has it, used only if it is one of ours; no other is sent the
        token."""
        known = self._config.mode is Mode.PROXY and address in self.pool.agents
        node = address if known else (await self._find(job_id))[0]
        if self._config.mode is Mode.REDIRECT:
            return _leads_to(node, f"/result/{quote(job_id)}")
        headers = {name: request.headers[name] for name in RANGE_HEADERS if name in request.headers}
        try:
            return await self._dispatch.stored(job_id, node, headers, method=request.method)
        except Unavailable as error:
            raise nobody(job_id, {node: error.message}) from None

    async def _job(self, request: Request) -> Response:
        job_id = check_job_id(request.path_params["job_id"])
        job = await self._recorded(job_id)
        recorded = None if job is None else described(job)
        if recorded is not None and job is not None and result_location_of(job) is not None:
            return json_answer(recorded)
        try:
            node, found = await self._find(job_id)
        except (NotFound, AgentRefusal):
            if recorded is None:
                raise
            return json_answer(recorded)
        node = found.with_progress(node)
        return Response(found.known[node].body, headers={NODE_HEADER: node}, media_type="application/json")

    async def _jobs(self, request: Request) -> Response:
        """List the jobs of all nodes that answer; `silent` are the others."""
        _, limit = parse_list_query(request.query_params.multi_items())
        nodes = [line.node for line in self.pool.ranking() if line.standing is not NodeState.LEFT_OUT or line.steady]
        asking = (self.pool.agents[node].jobs(f"?{request.url.query}") for node in nodes)
        answers = dict(zip(nodes, await asyncio.gather(*asking, return_exceptions=True), strict=True))
        jobs = [job for answer in answers.values() if not isinstance(answer, BaseException) for job in answer]
        jobs.sort(key=lambda job: job.started_at or float("inf"), reverse=True)
        silent = {node: str(answer) for node, answer in answers.items() if isinstance(answer, BaseException)}
        return json_answer({"jobs": jobs[:limit], "silent": silent})

    async def _log(self, request: Request) -> Response:
        """Pass on what a running program has written. Never by a redirect: the answers are small."""
        job_id = check_job_id(request.path_params["job_id"])
        query = parse_log_query(request.path_params["stream"], request.query_params)
        node, _ = await self._find(job_id)
        try:
            answer = await unless_left(request, self.pool.agents[node].read_log(job_id, *query))
        except (Unavailable, NodeRefused) as error:
            raise nobody(job_id, {node: str(error)}) from None
        if answer is None:
            return Response(status_code=CLIENT_GONE)
        piece = LogPiece(0, answer.offset, answer.data, 0, answer.end, answer.cut_bytes, answer.ended)
        return log_response(piece, answer.attempt)

    async def _delete(self, request: Request) -> Response:
        """Remove a job at every node that has it, or with `?state=running` runs it: after a failover there may be two."""
        job_id = check_job_id(request.path_params["job_id"])
        running = only_running(request.query_params.get("state"))
        try:
            node, found = await self._find(job_id)
        except (NotFound, AgentRefusal):
            if running or self._registry is None or (removed := await self._registry.remove(job_id)) is None:
                raise
            return json_answer(removed.view(job_id))
        where = [other for other, status in found.statuses.items() if not running or status.state == AgentState.RUNNING]
        if not where:
            raise NotFound(f"job {job_id} does not run at any node that is well")
        removing = (self.pool.remove(other, job_id, only_running=running) for other in where)
        ended = await asyncio.gather(*removing, return_exceptions=True)
        problems = {other: str(end) for other, end in zip(where, ended, strict=True) if isinstance(end, BaseException)}
        if problems:
            raise nobody(job_id, problems)
        state = found.known[where[0] if running else node].status.state
        logger.info("job %s: removed at %s, it was %s", job_id, ", ".join(where), state)
        return json_answer({"job_id": job_id, "state": state, "removed": True}, headers={NODE_HEADER: node})

    # ------------------------------------------------------------------------------------------------ inputs

    def _store(self) -> InputStore:
        if self._inputs is None:
            raise NotFound("this dispatcher keeps no inputs; it was started without --inputs")
        return self._inputs

    async def _put_input(self, request: Request) -> Response:
        whose = hashlib.sha256(secret_of(request).encode()).hexdigest() if self.http.tokens else "anyone"
        return await self._store().put(request, whose)

    async def _get_input(self, request: Request) -> Response:
        store = self._store()
        return await (store.head(request) if request.method == "HEAD" else store.get(request))

    # ------------------------------------------------------------------------------------------------ about itself

    async def _capacity(self, request: Request) -> Response:
        await self.pool.fresh()
        places = self.pool.capacity()
        keeps = {"inputs": True} if self._inputs is not None and self._config.mode is Mode.PROXY else {}
        return json_answer({"running": places.running, "limit": places.limit, **keeps})

    async def _nodes(self, request: Request) -> Response:
        await self.pool.fresh()
        return json_answer([line.view() for line in self.pool.ranking()])

    async def _scrape(self, request: Request) -> Response:
        places = self.pool.capacity()
        text = self.metrics.text(self.pool.ranking(), places.running, places.limit)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def _health(self, request: Request) -> Response:
        """Answer whether this dispatcher and at least one agent take jobs. For load balancers, which have no token."""
        if self.draining:
            return refusals.refusal_answer(refusals.is_draining())
        if not self.pool.well:
            return refusals.refusal_answer(Unavailable("no node agent takes jobs; see /nodes"))
        return json_answer("ok")


def _leads_to(node: str, path: str) -> Response:
    return Response(status_code=307, headers={"Location": node + path, NODE_HEADER: node})
