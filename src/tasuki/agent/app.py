"""Routes and life of an agent: recover what an earlier process left, listen, drain, close.

agent = Agent(config, incarnation, keeper=keeper)       without a keeper that was forked before the loop, one is made
address = await agent.start(address, tls)
await agent.drain(timeout_s); await agent.close()
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from tasuki.agent import refusals
from tasuki.agent.folders import AgentRunFolders, JobFolders
from tasuki.agent.jobs import AgentJobs, AgentMetrics
from tasuki.agent.refusals import GuardedServer, log_context
from tasuki.agent.results import ResultElsewhere, ResultResponse, log_response
from tasuki.agent.settings import AgentConfig
from tasuki.agent.upload import InputSource, Upload, boundary_of
from tasuki.core.address import Address
from tasuki.core.failover.agent_protocol import (
    AgentOutcome,
    EndedMarker,
    check_input_hash,
    input_hash,
    job_view,
    only_running,
    parse_list_query,
    parse_log_query,
)
from tasuki.core.job import check_job_id
from tasuki.core.protocol import LogPiece
from tasuki.core.units import DAY_S
from tasuki.doors.http.exchange import CLIENT_GONE, json_answer, unless_left
from tasuki.doors.listening import bound
from tasuki.errors import KeeperLost, NotFound, TooLarge
from tasuki.worker.folder import remove_tree
from tasuki.worker.keeper.client import Keeper
from tasuki.worker.keeper.linux import sweep
from tasuki.worker.logs import LogFollow
from tasuki.worker.runner import CommandRunner

if TYPE_CHECKING:
    from tasuki.agent.store_registry import StoreRegistry

logger = logging.getLogger("tasuki.agent")
_digits = re.compile(r"[0-9]{1,18}").fullmatch


class Agent:
    """One agent. Made inside the running loop."""

    def __init__(
        self,
        config: AgentConfig,
        incarnation: str,
        *,
        keeper: Keeper | None = None,
        registry: StoreRegistry | None = None,
        inputs: InputSource | None = None,
        fault: Callable[[str], None] = lambda point: None,
        on_lost: Callable[[KeeperLost], None] = lambda error: None,
    ) -> None:
        """`on_lost` is called when the keeper is gone: all runs were stopped, and nothing can be started any more."""
        self._config = config
        self._inputs = inputs
        self.folders = JobFolders(config.data, fault)
        self._metrics = AgentMetrics(config.slots, self.folders.free_bytes)
        self._on_lost = on_lost
        logs = LogFollow(lambda piece: self.jobs.log_was_read(piece))
        self._runner = CommandRunner(
            config.data,
            config.execs,
            incarnation=incarnation,
            fetch=_nothing_to_fetch,
            log_caps=config.log_caps,
            keeper=keeper,
            lease_deadline=lambda lease_id: self.jobs.deadline(lease_id),
            on_keeper_lost=self._lost,
            on_progress=lambda lease_id, progress: self.jobs.progressed(lease_id, progress),
            log_follow=logs,
            folders=AgentRunFolders(config.data, incarnation, self.folders),
        )
        self.jobs = AgentJobs(config, incarnation, self.folders, self._runner, logs, self._metrics, registry)
        self._cleaning: asyncio.Task[None] | None = None
        routes = (
            ("POST", "/run/{job_id}", self._run),
            ("GET", "/result/{job_id}", self._result),
            ("GET", "/jobs", self._jobs),
            ("GET", "/jobs/{job_id}", self._job),
            ("GET", "/jobs/{job_id}/logs/{stream}", self._log),
            ("DELETE", "/jobs/{job_id}", self._delete),
            ("GET", "/capacity", self._capacity),
            ("GET", "/metrics", self._scrape),
        )
        self.http = GuardedServer("agent", config.tokens, routes, self._health, self._count_refusal)

    # ------------------------------------------------------------------------------------------------ life

    async def start(self, address: Address, tls: ssl.SSLContext | None = None, host_names: tuple[str, ...] = ()) -> Address:
        """Recover what an earlier agent left, and listen; return the address with the port that was bound."""
        sock = bound(address)
        level = await self._runner.keeper_level()
        logger.info("keeper: level %s (%s), limits %s", level.level, level.detail, level.limits)
        await asyncio.to_thread(self._runner.folders.sweep, self._dispose)
        for job_id in await asyncio.to_thread(self.folders.recover):
            with log_context(job_id):
                logger.warning("job %s was interrupted by the end of an earlier agent", job_id)
        here = Address("https" if tls is not None else "http", address.host, sock.getsockname()[1])
        if self.jobs.registry is not None:
            await self.jobs.registry.open(self.folders, here, renewed=self._runner.renewed, sent=self._metrics.sent.inc)
        await self.http.open(sock, tls, host_names)
        self._cleaning = asyncio.create_task(self._clean_daily())
        return here

    def _dispose(self, left: Path) -> None:
        """Kill the processes of a dead agent. The folder of an agent's incarnation is empty: its jobs are elsewhere."""
        where = left if any(left.iterdir()) else self.folders.root
        if killed := sweep(left.name, where):
            logger.warning("killed %d processes that outlived their agent %s: %s", len(killed), left.name, killed)
        try:
            remove_tree(left)
        except OSError as error:
            logger.warning("%s cannot be removed: %s", left, error)

    async def drain(self, timeout_s: float | None = None) -> None:
        """Take no new jobs; running jobs may end, and results may be fetched."""
        await self.jobs.drain(timeout_s)

    def hurry(self) -> None:
        """Stop running jobs, and cut downloads soon."""
        self.jobs.stop_all()
        self.http.hurry()

    async def close(self) -> None:
        """Stop running jobs, and release everything."""
        self.jobs.stop_all()
        await self.jobs.drain(None)
        if self._cleaning is not None:
            self._cleaning.cancel()
            await self.http.close()
            await asyncio.gather(self._cleaning, return_exceptions=True)
        self._runner.kill_all()
        self._runner.close()
        self.folders.close()
        if self.jobs.registry is not None:
            await self.jobs.registry.close()
        if self._inputs is not None:
            await self._inputs.close()

    async def _clean_daily(self) -> None:
        while True:
            try:
                await self.jobs.remove_old(self._config.keep_days, time.time())
            except OSError:
                logger.exception("old jobs could not be removed; another try tomorrow")
            await asyncio.sleep(DAY_S)

    def _lost(self, error: KeeperLost) -> None:
        self.jobs.stop_all()
        self._on_lost(error)

    # ------------------------------------------------------------------------------------------------ the routes

    def _count_refusal(self, _method: str, _answer: Response, code: str | None) -> None:
        if code is not None:
            self._metrics.refused.labels(code).inc()

    async def _run(self, request: Request) -> Response:
        try:
            return await self._run_here(request)
        except ResultElsewhere as elsewhere:
            return elsewhere.answer

    async def _run_here(self, request: Request) -> Response:
        job_id = check_job_id(request.path_params["job_id"])
        sent = request.query_params.get("input")
        if sent is not None:
            check_input_hash(sent)
        boundary = boundary_of(request.headers.get("content-type", ""))
        await self.jobs.ask_others(job_id, sent)
        found = self.jobs.arrive(job_id, sent, _announced(request))
        if isinstance(found, EndedMarker):
            if sent is None:  # nothing is written: the space that is left does not matter
                limit_bytes = self._config.max_upload_bytes or sys.maxsize
                await self._compare(found, Upload(boundary, None, limit_bytes, source=self._inputs), request)
            return self._stored(job_id, cache="hit")
        place = self.folders.new_place()
        upload = Upload(boundary, place, found.max_bytes, source=self._inputs)
        answer = await self.jobs.run(found, upload, place.path, request.stream(), sent)
        if answer.ended.outcome is not AgentOutcome.SUCCEEDED:
            raise refusals.program_failed(answer.ended)
        if answer.small is not None:
            return ResultResponse(answer.ended, answer.small, self._metrics.sent.inc, "miss")
        return self._stored(job_id, cache="miss")

    async def _compare(self, ended: EndedMarker, upload: Upload, request: Request) -> None:
        """Compare an upload with the input of a job that is done. Nothing is written."""
        order = self.jobs.order_of(await upload.receive(request.stream()))
        found = input_hash(order.exec.name, order.form.args, await upload.finish())
        self._metrics.received.inc(upload.received_bytes)
        if found != ended.input:
            raise refusals.other_input(ended.job_id)

    def _stored(self, job_id: str, cache: str | None = None) -> Response:
        opened = self.folders.open_result(job_id)
        if opened is None and cache is not None:  # it was removed since the decision
            raise refusals.was_canceled(job_id)
        if opened is None:
            raise NotFound(f"there is no result of job {job_id} at this node")
        if cache == "hit":
            self._metrics.stored.inc()
            logger.info("job %s: answered with the stored result", job_id)
        return ResultResponse(*opened, self._metrics.sent.inc, cache)

    async def _result(self, request: Request) -> Response:
        job_id = check_job_id(request.path_params["job_id"])
        if (held := self.jobs.held(job_id)) is not None:
            raise refusals.is_running(job_id, self._config.node, held.since)
        registry = self.jobs.registry
        if registry is not None and not self.jobs.is_done(job_id):  # a job that failed here may be done elsewhere
            elsewhere = await registry.find(job_id)
            if elsewhere is not None:
                return elsewhere
        return self._stored(job_id)

    async def _jobs(self, request: Request) -> Response:
        states, limit = parse_list_query(request.query_params.multi_items())
        return json_answer({"jobs": await self.jobs.listed(states, limit)})

    async def _log(self, request: Request) -> Response:
        job_id = check_job_id(request.path_params["job_id"])
        query = parse_log_query(request.path_params["stream"], request.query_params)
        held = self.jobs.held(job_id)
        if held is None:
            marker = self.jobs.look(job_id)
            if marker is None:
                raise NotFound(f"there is no job {job_id} at this node")
            return log_response(LogPiece(0, query.offset, b"", query.offset, query.offset, ended=True), marker.attempt)
        piece = await unless_left(request, self.jobs.read_log(held, query.stream, query.offset, query.wait_s))
        if piece is None:
            return Response(status_code=CLIENT_GONE)
        is_over = piece.ended and self.jobs.held(job_id) is not held  # else its program has not started yet
        return log_response(replace(piece, ended=is_over), held.attempt)

    async def _job(self, request: Request) -> Response:
        job_id = check_job_id(request.path_params["job_id"])
        held = self.jobs.held(job_id)
        if held is not None:
            return json_answer(held.view(self._config.node))
        registry = self.jobs.registry
        if registry is not None and not self.jobs.is_done(job_id):
            described = await registry.describe(job_id)
            if described is not None:
                return json_answer(described)
        marker = self.jobs.look(job_id)
        if marker is None:
            raise NotFound(f"there is no job {job_id} at this node")
        return json_answer(job_view(marker.common, marker.state, ended_at=marker.ended_at, ended=marker))

    async def _delete(self, request: Request) -> Response:
        job_id = check_job_id(request.path_params["job_id"])
        removed = await self.jobs.delete(job_id, only_running=only_running(request.query_params.get("state")))
        logger.info("job %s: removed, it was %s", job_id, removed.state.value)
        return json_answer(removed.view(job_id))

    async def _capacity(self, request: Request) -> Response:
        pulls = {"pulls": True} if self._inputs is not None else {}
        return json_answer({"running": self.jobs.running, "limit": self.jobs.limit, **pulls})

    async def _scrape(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def _health(self, request: Request) -> Response:
        """Answer whether this agent takes jobs. For load balancers, which have no token."""
        if self.jobs.draining:
            return refusals.refusal_answer(refusals.is_draining())
        return json_answer("ok") if self.folders.are_there() else refusals.refusal_answer(refusals.has_no_folder())


async def _nothing_to_fetch(job_id: str, sha256: str, size_bytes: int, target: Any) -> None:
    raise AssertionError("an agent's inputs come with the request")


def _announced(request: Request) -> int:
    """Return the Content-Length, which uvicorn has checked; 0: the body is chunked."""
    text = request.headers.get("content-length", "0")
    if not _digits(text):
        raise TooLarge("the upload is larger than any limit")
    return int(text)
