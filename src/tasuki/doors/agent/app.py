"""The agent's routes, and its life: recover what was left, listen, drain, end.

agent = Agent(config, incarnation, keeper=keeper)       without a keeper that was forked before the loop, one is made
address = await agent.start(address, tls)
await agent.drain(timeout_s); await agent.close()
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tasuki.core.address import Address
from tasuki.core.agent_job import AgentOutcome, EndedMarker, InterruptedMarker, Marker, check_input_hash, input_hash
from tasuki.core.ids import check_job_id
from tasuki.doors.agent import answers
from tasuki.doors.agent.cleaning import Cleaner
from tasuki.doors.agent.correlation import on_behalf_of
from tasuki.doors.agent.desk import Desk
from tasuki.doors.agent.downloads import EarlyAnswer, ResultAnswer
from tasuki.doors.agent.folders import AgentRunFolders, JobFolders
from tasuki.doors.agent.held import Held, state_of
from tasuki.doors.agent.intake import Intake
from tasuki.doors.agent.metrics import AgentMetrics
from tasuki.doors.agent.multipart import boundary_of
from tasuki.doors.agent.pulls import Inputs, PullingIntake
from tasuki.doors.agent.registry import AnsweredElsewhere, Registry
from tasuki.doors.agent.settings import AgentConfig, Tokens
from tasuki.doors.http.answers import CODES, discreet, envelope, json_answer
from tasuki.doors.http.bearer import secret_of
from tasuki.doors.http.limits import HEADERS_MAX_BYTES, KEEP_ALIVE_S, REQUESTS_MAX, LimitedProtocol
from tasuki.doors.http.shortcut import Shortcut
from tasuki.doors.listening import bound, listen, until_closed
from tasuki.errors import InternalError, NotFound, Overloaded, TasukiError, TooLarge, Unauthorized
from tasuki.worker.folder import remove_tree
from tasuki.worker.keeper_client import Keeper, KeeperLost
from tasuki.worker.keeper_sweep import sweep
from tasuki.worker.runner import CommandRunner, RunLimits

logger = logging.getLogger("tasuki.agent")
DRAINED_BODY_BYTES = 1024 * 1024  # a body that was not read, up to this, is read by uvicorn, and the connection stays
LINGER_S = 2.0
FREE_SHARE = 4  # without a limit of its own, an upload may take a quarter of what is free
CLOSE_TIMEOUT_S = 60  # downloads that are under way when the agent ends
HURRIED_CLOSE_S = 2
_digits = re.compile(r"[0-9]{1,18}").fullmatch

Handler = Callable[[Request], Awaitable[Response]]


class Agent:
    """One agent. Made inside the running loop."""

    def __init__(
        self,
        config: AgentConfig,
        incarnation: str,
        *,
        keeper: Keeper | None = None,
        registry: Registry | None = None,
        inputs: Inputs | None = None,
        fault: Callable[[str], None] = lambda point: None,
        on_lost: Callable[[KeeperLost], None] = lambda error: None,
    ) -> None:
        """`on_lost`: the keeper is gone; what ran was stopped, and nothing can be started here any more."""
        self._config = config
        self._tokens = Tokens(config.tokens)
        self._inputs = inputs
        self.folders = JobFolders(config.data, fault)
        self._metrics = AgentMetrics(config.slots)
        self._on_lost = on_lost
        self._runner = CommandRunner(
            config.data,
            config.execs,
            incarnation=incarnation,
            fetch=_nothing_to_fetch,
            limits=RunLimits(log_caps=config.log_caps),
            keeper=keeper,
            lease_deadline=lambda lease_id: self.desk.deadline(lease_id),
            on_keeper_lost=self._lost,
            on_progress=lambda lease_id, progress: self.desk.progressed(lease_id, progress),
            folders=AgentRunFolders(config.data, incarnation, self.folders),
        )
        self.desk = Desk(config, incarnation, self.folders, self._runner, self._metrics, registry)
        self.cleaner = Cleaner(self.desk, config.keep_days)
        self._under_way = 0
        self._server: uvicorn.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.app = self._application()

    # ------------------------------------------------------------------------------------------------ life

    async def start(self, address: Address, tls: ssl.SSLContext | None = None) -> Address:
        """Listen, once all that a dead agent left is dealt with; the address with the port that was really taken."""
        sock = bound(address)
        level = await self._runner.keeper_level()
        logger.info("keeper: level %s (%s), limits %s", level.level, level.detail, level.limits)
        await asyncio.to_thread(self._runner.folders.sweep, self._dispose)
        for job_id in await asyncio.to_thread(self.folders.recover):
            with on_behalf_of(job_id):
                logger.warning("job %s was interrupted by the end of an earlier agent", job_id)
        here = Address("https" if tls is not None else "http", address.host, sock.getsockname()[1])
        if self.desk.registry is not None:
            await self.desk.registry.open(self.folders, here, renewed=self._runner.renewed, sent=self._metrics.sent.inc)
        config = uvicorn.Config(
            Shortcut(self.app),
            http=LimitedProtocol,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=HEADERS_MAX_BYTES,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )
        config.load()
        config.ssl = tls
        self._server = uvicorn.Server(config)
        await listen(self._server, sock)
        self._tasks = [asyncio.create_task(until_closed(self._server)), asyncio.create_task(self.cleaner.daily())]
        return here

    def _dispose(self, left: Path) -> None:
        """Kill what a dead process left running. The folder of an agent's incarnation is empty: its jobs lie elsewhere."""
        where = left if any(left.iterdir()) else self.folders.root
        if killed := sweep(left.name, where):
            logger.warning("killed %d processes that outlived their agent %s: %s", len(killed), left.name, killed)
        remove_tree(left)

    async def drain(self, timeout_s: float | None = None) -> None:
        """No new jobs; those that run may end, and their results may still be fetched."""
        await self.desk.drain(timeout_s)

    def hurry(self) -> None:
        """What still runs is stopped; whoever downloads is soon cut off."""
        self.desk.stop_all()
        if self._server is not None:
            self._server.config.timeout_graceful_shutdown = HURRIED_CLOSE_S

    async def close(self) -> None:
        """Stop what still runs, and let go of everything."""
        self.desk.stop_all()
        await self.desk.drain(None)
        if self._server is not None:
            self._server.should_exit = True
            serving, cleaning = self._tasks
            cleaning.cancel()
            await asyncio.gather(serving, cleaning, return_exceptions=True)
            self._server = None
        self._runner.kill_all()
        self._runner.close()
        self.folders.close()
        if self.desk.registry is not None:
            await self.desk.registry.close()
        if self._inputs is not None:
            await self._inputs.close()

    def _lost(self, error: KeeperLost) -> None:
        self.desk.stop_all()
        self._on_lost(error)

    # ------------------------------------------------------------------------------------------------ the application

    def _application(self) -> FastAPI:
        app = FastAPI(title="tasuki agent", openapi_url=None, docs_url=None, redoc_url=None)
        app.router.redirect_slashes = False
        routes: tuple[tuple[str, str, Handler], ...] = (
            ("POST", "/run/{job_id}", self._run),
            ("GET", "/result/{job_id}", self._result),
            ("GET", "/jobs/{job_id}", self._job),
            ("DELETE", "/jobs/{job_id}", self._delete),
            ("GET", "/capacity", self._capacity),
            ("GET", "/metrics", self._scrape),
        )
        for method, path, handler in routes:
            app.router.add_route(path, self._endpoint(handler), methods=[method])
        app.router.add_route("/health", self._health, methods=["GET"])
        app.add_exception_handler(HTTPException, _framework_error)
        return app

    def _endpoint(self, handler: Handler) -> Handler:
        async def endpoint(request: Request) -> Response:
            if self._under_way >= REQUESTS_MAX:
                return answers.refusal_answer(Overloaded(f"this agent is busy with {self._under_way} requests; try again"))
            self._under_way += 1
            try:
                with on_behalf_of(request.path_params.get("job_id", "")):
                    return await self._surely_answer(handler, request)
            finally:
                self._under_way -= 1

        return endpoint

    async def _surely_answer(self, handler: Handler, request: Request) -> Response:
        try:
            if self._tokens and not self._tokens.admit(secret_of(request)):
                raise Unauthorized("this token is not one of this agent's")
            return await handler(request)
        except AnsweredElsewhere as elsewhere:
            return elsewhere.answer
        except TasukiError as error:
            told = error if isinstance(error, answers.AgentRefusal) else discreet(error)
            if told is not error:
                logger.warning("%s %s: %s", request.method, request.url.path[:200], error.message)
            answer, code = answers.refusal_answer(told), answers.code_of(told)
        except Exception:
            logger.exception("%s %s failed", request.method, request.url.path[:200])
            answer, code = answers.refusal_answer(discreet(InternalError(""))), InternalError.code
        if request.method != "POST":
            return answer
        self._metrics.refused.labels(code).inc()
        return answer if _is_over(request) else EarlyAnswer(answer, LINGER_S)

    # ------------------------------------------------------------------------------------------------ the routes

    async def _run(self, request: Request) -> Response:
        job_id = check_job_id(request.path_params["job_id"])
        sent = request.query_params.get("input")
        if sent is not None:
            check_input_hash(sent)
        boundary = boundary_of(request.headers.get("content-type", ""))
        max_bytes = self._max_upload_bytes()
        announced = _announced(request)
        if announced > max_bytes:
            raise TooLarge(f"an upload of {announced} bytes is too large; the limit of this agent is {max_bytes}")
        await self.desk.ask_others(job_id, sent)
        found = self.desk.arrive(job_id, sent, announced)
        if isinstance(found, EndedMarker):
            if sent is None:
                await self._compare(found, PullingIntake(boundary, None, max_bytes, self._inputs), request)
            return self._stored(job_id, cache="hit")
        place = self.folders.new_place()
        intake = PullingIntake(boundary, place, max_bytes, self._inputs)
        answer = await self.desk.run(found, intake, place, request.stream(), sent)
        if answer.ended.outcome is not AgentOutcome.SUCCEEDED:
            raise answers.program_failed(answer.ended)
        if answer.small is not None:
            return ResultAnswer(answer.ended, answer.small, self._metrics.sent.inc, "miss")
        return self._stored(job_id, cache="miss")

    def _max_upload_bytes(self) -> int:
        if self._config.max_upload_bytes is not None:
            return self._config.max_upload_bytes
        return self.folders.free_bytes() // FREE_SHARE

    async def _compare(self, ended: EndedMarker, intake: Intake, request: Request) -> None:
        """Is it the same input as that of the job that is done? Nothing is written for it."""
        order = self.desk.order_of(await intake.receive(request.stream()))
        found = await intake.finish(lambda files: input_hash(order.exec.name, order.form.args, files))
        self._metrics.received.inc(intake.received_bytes)
        if found != ended.input:
            raise answers.other_input(ended.job_id)

    def _stored(self, job_id: str, cache: str | None = None) -> Response:
        opened = self.folders.open_result(job_id)
        if opened is None:
            raise NotFound(f"there is no result of job {job_id} at this node")
        if cache == "hit":
            self._metrics.stored.inc()
            logger.info("job %s: answered with the stored result", job_id)
        return ResultAnswer(*opened, self._metrics.sent.inc, cache)

    async def _result(self, request: Request) -> Response:
        job_id = check_job_id(request.path_params["job_id"])
        if (held := self.desk.held(job_id)) is not None:
            raise answers.is_running(job_id, self._config.node, held.since)
        registry = self.desk.registry
        if registry is not None and not self.desk.is_done(job_id):  # what failed here may be done elsewhere
            elsewhere = await registry.find(job_id)
            if elsewhere is not None:
                return elsewhere
        return self._stored(job_id)

    async def _job(self, request: Request) -> Response:
        job_id = check_job_id(request.path_params["job_id"])
        held = self.desk.held(job_id)
        if held is not None:
            return json_answer(_described_held(held, self._config.node))
        registry = self.desk.registry
        if registry is not None and not self.desk.is_done(job_id):
            described = await registry.describe(job_id)
            if described is not None:
                return json_answer(described)
        marker = self.desk.look(job_id)
        if marker is None:
            raise NotFound(f"there is no job {job_id} at this node")
        return json_answer(_described(marker))

    async def _delete(self, request: Request) -> Response:
        job_id = check_job_id(request.path_params["job_id"])
        state = await self.desk.delete(job_id)
        logger.info("job %s: removed, it was %s", job_id, state.value)
        return json_answer({"job_id": job_id, "state": state.value, "removed": True})

    async def _capacity(self, request: Request) -> Response:
        pulls = {"pulls": True} if self._inputs is not None else {}
        return json_answer({"running": self.desk.running, "limit": self.desk.limit, **pulls})

    async def _scrape(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def _health(self, request: Request) -> Response:
        """The process is there, and takes jobs. For load balancers; they have no token."""
        return answers.refusal_answer(answers.is_draining()) if self.desk.draining else json_answer("ok")


async def _nothing_to_fetch(job_id: str, sha256: str, size_bytes: int, target: Any) -> None:
    raise AssertionError("an agent's inputs come with the request")


def _announced(request: Request) -> int:
    """What Content-Length says, which uvicorn has held against what HTTP allows; 0: it comes in chunks."""
    text = request.headers.get("content-length", "0")
    if not _digits(text):
        raise TooLarge("the upload is larger than any limit")
    return int(text)


def _is_over(request: Request) -> bool:
    """Whether the body was read, or is so small that the connection may stay open for the rest of it."""
    if request._stream_consumed:  # nothing else tells
        return True
    length = request.headers.get("content-length", "")
    return (
        "transfer-encoding" not in request.headers and bool(_digits(length or "0")) and int(length or "0") <= DRAINED_BODY_BYTES
    )


def _described(marker: Marker) -> dict[str, Any]:
    state = state_of(marker)
    assert state is not None
    facts: dict[str, Any] = {
        "job_id": marker.job_id,
        "state": state.value,
        "exec": marker.exec,
        "input": marker.input,
        "attempt": marker.attempt,
        "started_at": marker.started_at,
        "ended_at": None,
        "exit_code": None,
        "progress": None,
        "node": marker.node,
    }
    if isinstance(marker, EndedMarker):
        facts |= {"ended_at": marker.ended_at, "exit_code": marker.exit_code}
        facts |= {"error_code": marker.error_code, "message": marker.message}
        facts |= {"result_sha256": marker.result_sha256, "result_bytes": marker.result_bytes}
    elif isinstance(marker, InterruptedMarker):
        facts["ended_at"] = marker.interrupted_at
    return facts


def _described_held(held: Held, node: str) -> dict[str, Any]:
    progress = held.progress
    return {
        "job_id": held.job_id,
        "state": "running",
        "exec": held.exec or None,
        "input": held.input,
        "attempt": held.attempt,
        "started_at": held.running.started_at if held.running is not None else None,
        "ended_at": None,
        "exit_code": None,
        "progress": None if progress is None else {"fraction": progress.fraction, "message": progress.text},
        "node": node,
    }


async def _framework_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code if error.status_code in CODES else 400
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return json_answer(envelope(CODES[status], message), status, dict(error.headers or {}))
