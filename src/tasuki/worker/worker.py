"""The worker: drives a WorkerMachine over a Link, and runs what it is given (commands, async handlers, plain functions).

worker = Worker("tcp://host:7000")

@worker.handler("math.square")
async def square(job): return str(int(job.payload) ** 2).encode()

worker.run()
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import random
import secrets
import signal
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tasuki import __version__
from tasuki.config import data_folder, default_url, find_token, parse_url
from tasuki.core.job import RESULT_INLINE_MAX_BYTES, BlobRef, JobSpec, OnDisconnect, Outcome
from tasuki.core.machine import Closed, Hangup, Opened, Received, Send, Ticked
from tasuki.core.protocol import Message, Welcome
from tasuki.core.subject import check_pattern
from tasuki.core.verbs import Grant, Takes
from tasuki.core.worker_machine import (
    ChangePatterns,
    Command,
    Connect,
    Drain,
    Ended,
    Event,
    Exit,
    Forget,
    GaveBack,
    Run,
    Started,
    Stop,
    WorkerIdentity,
    WorkerMachine,
)
from tasuki.errors import ConfigError, TasukiError, Unavailable
from tasuki.net import Link, client_tls, connect
from tasuki.net.blobs import BlobLine
from tasuki.net.loops import loop_factory, now
from tasuki.wire.compression import CODECS
from tasuki.worker.attempt import (
    Attempt,
    HandlerJob,
    StopReason,
    handler_failure,
    handler_outcome,
    stopped_outcome,
    timed_out_outcome,
)
from tasuki.worker.children import Children
from tasuki.worker.execs import Exec
from tasuki.worker.handlers import Handler, Handlers
from tasuki.worker.runner import CommandRunner

TICK_S = 0.05
ASYNC_CONCURRENCY = 100
UPLOAD_RETRY_S = 2.0  # while the server has no room for a result
HARD_STOP_S = 15.0  # a second signal: how long killed jobs may take to be gone

logger = logging.getLogger("tasuki.worker")
Function = TypeVar("Function", bound=Callable[..., Any])
_decode_spec = msgspec.msgpack.Decoder(JobSpec).decode


class _Active(msgspec.Struct):
    """An attempt that runs here."""

    attempt: Attempt
    stop: asyncio.Future[StopReason] | None = None
    task: asyncio.Task[None] | None = None
    stopped: StopReason | None = None


class Worker:
    """Runs jobs for a server. Handlers are added with `@worker.handler(subject)`, commands with `execs`."""

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        worker_id: str | None = None,
        subjects: Iterable[str] = (),
        concurrency: int | None = None,
        execs: Mapping[str, Exec] | None = None,
        any_program: bool = False,
        data: str | os.PathLike[str] | None = None,
        on_disconnect: str = "stop",
        reconnect_grace_s: float = 60.0,
        lease_ttl_s: float | None = None,
        tls_ca: str | None = None,
        drain_timeout_s: float | None = None,
    ) -> None:
        self.url = url
        self.worker_id = worker_id or f"{socket.gethostname().split('.')[0][:40]}-{os.getpid()}-{secrets.token_hex(2)}"
        self.incarnation = secrets.token_hex(8)
        self._token, self._token_file = token, token_file
        self._subjects = tuple(check_pattern(subject) for subject in subjects)
        if concurrency is not None and concurrency < 1:
            raise ConfigError(f"a worker needs at least one slot, got {concurrency}")
        self._concurrency = concurrency
        self._execs = dict(execs or {})
        self._any_program = any_program
        self._data = data
        self._on_disconnect = OnDisconnect(on_disconnect)
        self._grace_s = reconnect_grace_s if self._on_disconnect is OnDisconnect.KEEP else 0.0
        self._lease_ttl_s = lease_ttl_s
        self._tls = client_tls(tls_ca)
        self._drain_timeout_s = drain_timeout_s
        self._handlers = Handlers()
        self._active: dict[str, _Active] = {}
        self._link: Link | None = None
        self._link_numbers = itertools.count(1)
        self._blobs = BlobLine()
        self._tasks: set[asyncio.Future[Any]] = set()
        self._children: Children | None = None
        self._pumping = False
        self._wall = 0.0
        self._signals = 0
        self._welcome: Welcome | None = None
        self._ended: list[Ended] = []

    # ------------------------------------------------------------------------------------------------ set-up

    def handler(self, subject: str, *, timeout_s: float | None = None) -> Callable[[Function], Function]:
        """Decorator: run this function for jobs of the subject (a pattern). `async def` runs in the loop, `def` in a child."""

        def register(function: Function) -> Function:
            self._handlers.add(subject, function, timeout_s)
            return function

        return register

    @property
    def patterns(self) -> tuple[str, ...]:
        """What it subscribes to: what was given, else its handlers' subjects, else the server's default."""
        return self._subjects or self._handlers.patterns

    def _takes(self) -> Takes:
        """Only what it can run: the rest is left for those who can."""
        if self._handlers:
            return Takes.ANY if self._execs or self._any_program else Takes.HANDLERS
        if self._execs:
            return Takes.COMMANDS
        if self._any_program:
            return Takes.OWN
        raise ConfigError("this worker has nothing to run: give it execs (--exec NAME=COMMAND, --config FILE) or handlers")

    def _capacity(self) -> int:
        if self._concurrency is not None:
            return self._concurrency
        only_async = self._handlers and not self._handlers.plain
        return ASYNC_CONCURRENCY if only_async and not self._execs else os.cpu_count() or 1

    # ------------------------------------------------------------------------------------------------ life

    def run(self) -> None:
        """Work until a signal: the first SIGTERM or SIGINT drains (no new jobs, running ones finish), the second stops them."""
        if self._handlers.plain:
            # Forked before the loop and its threads exist: a child that inherits a locked lock would hang.
            self._children = Children.start(self._handlers.plain)
        # This process is ours: without this the collector took a third of its time with a thousand handlers at once.
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(self.serve(signals=True))
        finally:
            if self._children is not None:
                self._children.close()

    async def serve(self, *, signals: bool = False) -> None:
        """Work until drained. Plain functions need `run`, which prepares their processes first."""
        self._loop = asyncio.get_running_loop()
        if self._children is None and self._handlers.plain:
            raise ConfigError("plain function handlers need Worker.run(); in a running loop use async def handlers")
        if self.url is None:
            self.url = default_url() or f"unix://{data_folder(None).socket}"
        self._addresses = parse_url(self.url)
        self._local = all(address.scheme == "unix" for address in self._addresses)
        remote = any(not address.loopback for address in self._addresses)
        identity = WorkerIdentity(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            token=find_token(self._token_file) if self._token is None else self._token,
            patterns=self.patterns,
            capacity=self._capacity(),
            on_disconnect=self._on_disconnect,
            reconnect_grace_s=self._grace_s,
            ttl_s=self._lease_ttl_s,
            host=socket.gethostname(),
            agent=f"tasuki-python/{__version__}",
            codecs=CODECS if remote else (),
            takes=self._takes(),
        )
        self._machine = WorkerMachine(identity, addresses=len(self._addresses), jitter=random.random)
        self._done: asyncio.Future[None] = self._loop.create_future()
        with tempfile.TemporaryDirectory(prefix="tasuki-worker-") as scratch:
            data = Path(self._data) if self._data is not None else Path(scratch)
            self._runner = CommandRunner(
                data, self._execs, incarnation=self.incarnation, fetch=self._fetch, any_program_for=self._any_program_for
            )
            await self._runner.sweep()
            if signals:
                for number in (signal.SIGTERM, signal.SIGINT):
                    self._loop.add_signal_handler(number, self._signaled)
            self._spawn(self._tick())
            try:
                await self._done
            finally:
                await self._close()

    async def _close(self) -> None:
        for active in list(self._active.values()):
            self._stop_active(active, StopReason.SHUTDOWN)
        if self._active:
            await asyncio.wait([active.task for active in self._active.values() if active.task], timeout=HARD_STOP_S)
        self._runner.kill_all()
        self._runner.close()
        self._blobs.close()
        if self._link is not None:
            self._link.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drain(self) -> None:
        """No new jobs; `serve` ends when those that run are done and recorded."""
        self._apply(Drain())
        if self._drain_timeout_s is not None:
            self._loop.call_later(self._drain_timeout_s, self.stop)

    def stop(self) -> None:
        """End now: running jobs are stopped, and go to another worker when their leases end."""
        if not self._done.done():
            self._done.set_result(None)

    @property
    def connected(self) -> bool:
        """A server knows this worker at the moment."""
        return self._machine.online

    def subscribe(self, *subjects: str) -> None:
        """Change the patterns of a running worker."""
        self._apply(ChangePatterns(tuple(check_pattern(subject) for subject in subjects)))

    def _signaled(self) -> None:
        self._signals += 1
        if self._signals == 1:
            logger.info("draining: %d job(s) still run; a second signal stops them", len(self._active))
            self.drain()
        else:
            self.stop()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tick(self) -> None:
        while True:
            self._apply(Ticked())
            await asyncio.sleep(TICK_S)

    # ------------------------------------------------------------------------------------------------ the machine's driver

    def _apply(self, event: Event) -> None:
        at = now()
        self._wall = at.wall
        for command in self._machine.apply(event, at):
            self._perform(command)
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Once per turn of the loop: everything that ended in it is told in one message."""
        self._pumping = False
        at = now()
        if self._ended:
            ended, self._ended = self._ended, []
            for event in ended:
                for command in self._machine.apply(event, at):
                    self._perform(command)
        for command in self._machine.flush(at):
            self._perform(command)

    def _perform(self, command: Command) -> None:
        match command:
            case Run():
                self._start(command.grant)
            case Forget():
                self._forget(command)
            case Send():
                if self._link is not None:
                    self._link.send(command.message)
            case Stop():
                active = self._active.get(command.lease_id)
                if active is not None:
                    self._stop_active(active, StopReason(command.reason))
            case Connect():
                self._spawn(self._dial(command.address))
            case Hangup():
                if self._link is not None:
                    self._link.abort(command.error.message if command.error is not None else "hung up")
            case Exit():
                if command.error is not None:
                    self._blobs.close(command.error)
                if not self._done.done():
                    if command.error is not None:
                        self._done.set_exception(command.error)
                    else:
                        self._done.set_result(None)

    async def _dial(self, index: int) -> None:
        try:
            link = await connect(self._addresses[index], self._message, self._lost, tls=self._tls)
        except Unavailable as error:
            logger.info("%s", error.message)
            self._apply(Closed(0, error.message))
            return
        if link.closed:  # the server hung up while we were still connecting: `_lost` has said so
            return
        link.tag = next(self._link_numbers)
        self._link = link
        self._apply(Opened(link.tag, link.peer))

    def _message(self, link: Link, message: Message) -> None:
        if self._blobs.take(message):
            return
        if type(message) is Welcome:
            self._welcome = message
            if message.codecs:
                link.codec = message.codecs[0]
            self._blobs.connected(link)
            logger.info("connected to %s as %s", link.peer.address, self.worker_id)
        self._apply(Received(link.tag, message))

    def _lost(self, link: Link, reason: str) -> None:
        if self._link is link:
            self._link = None
            self._blobs.lost()
            if not self._done.done():
                logger.warning("connection lost: %s", reason)
        self._apply(Closed(link.tag or 0, reason))

    # ------------------------------------------------------------------------------------------------ attempts

    def _start(self, grant: Grant) -> None:
        spec = _decode_spec(grant.spec)
        attempt = Attempt(spec=spec, lease_id=grant.lease_id, attempt=grant.attempt, submitter=grant.submitter)
        active = self._active[grant.lease_id] = _Active(attempt)
        if spec.exec:
            active.stop = self._loop.create_future()
            active.task = self._loop.create_task(self._run_command(active))
            return
        handler = self._handlers.find(spec.subject)
        if handler is not None and handler.asynchronous:
            # Said to the machine without an event of its own: this is the path of ten thousand jobs a second.
            self._machine.handler_started(grant.lease_id, self._wall)
            active.task = self._loop.create_task(self._run_async(active, handler))
        else:
            active.stop = self._loop.create_future()
            active.task = self._loop.create_task(self._run_plain(active, handler))

    async def _run_async(self, active: _Active, handler: Handler) -> None:
        spec = active.attempt.spec
        timeout_s = spec.timeout_s if spec.timeout_s is not None else handler.timeout_s
        job = HandlerJob(spec, active.attempt.attempt)
        limit = asyncio.timeout(timeout_s) if timeout_s is not None else None
        try:
            if limit is None:
                outcome = handler_outcome(await handler.function(job))
            else:
                async with limit:
                    outcome = handler_outcome(await handler.function(job))
        except asyncio.CancelledError as error:  # by us, or the handler let one through that was never meant for it
            outcome = stopped_outcome(active.stopped) if active.stopped is not None else handler_failure(error)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is its attempt's outcome
            ours = limit is not None and limit.expired()
            outcome = timed_out_outcome(timeout_s) if ours else handler_failure(error)
        if outcome.result is not None and len(outcome.result) > RESULT_INLINE_MAX_BYTES:
            outcome = await self._as_blob(outcome)
        self._end(active, outcome)

    async def _run_plain(self, active: _Active, handler: Handler | None) -> None:
        spec = active.attempt.spec
        if handler is None or self._children is None or active.stop is None:
            message = f"this worker has no handler for subject {spec.subject!r}"
            self._end(active, Outcome(error_code="NO_HANDLER", message=message, permanent=True))
            return
        self._machine.handler_started(active.attempt.lease_id, self._wall)
        timeout_s = spec.timeout_s if spec.timeout_s is not None else handler.timeout_s
        try:
            outcome = await self._children.run(handler.name, HandlerJob(spec, active.attempt.attempt), timeout_s, active.stop)
        except Unavailable as error:
            # The process that forks our children is gone: nothing plain can run here any more.
            outcome = Outcome(error_code=error.code, message=error.message)
            if not self._done.done():
                self._done.set_exception(error)
        if outcome.result is not None and len(outcome.result) > RESULT_INLINE_MAX_BYTES:
            outcome = await self._as_blob(outcome)
        self._end(active, outcome)

    async def _run_command(self, active: _Active) -> None:
        assert active.stop is not None
        attempt = active.attempt
        try:
            result = await self._runner.run(attempt, active.stop, lambda: self._apply(Started(attempt.lease_id)))
        except Unavailable as error:  # nothing was started
            logger.warning("job %s is given back: %s", attempt.spec.job_id, error.message)
            self._active.pop(attempt.lease_id, None)
            self._apply(GaveBack(attempt.lease_id))
            await self._runner.cleanup(attempt)
            return
        outcome = result.outcome
        if result.result_file is not None and outcome.result_ref is not None:
            try:
                await self._upload(active.stop, result.result_file, outcome.result_ref)
            except TasukiError as error:
                outcome = Outcome(error_code=error.code, message=f"the result could not be kept: {error.message}")
        self._end(active, outcome)

    def _end(self, active: _Active, outcome: Outcome) -> None:
        self._ended.append(Ended(active.attempt.lease_id, outcome))
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _stop_active(self, active: _Active, reason: StopReason) -> None:
        active.stopped = reason
        if active.stop is not None:
            if not active.stop.done():
                active.stop.set_result(reason)
        elif active.task is not None:
            active.task.cancel()

    def _forget(self, command: Forget) -> None:
        active = self._active.pop(command.lease_id, None)
        if active is None:
            return
        if command.fenced:
            logger.warning("job %s attempt %d: refused: %s", active.attempt.spec.job_id, active.attempt.attempt, command.fenced)
        if active.attempt.spec.exec:
            self._spawn(self._runner.cleanup(active.attempt))

    # ------------------------------------------------------------------------------------------------ large things

    def _any_program_for(self) -> str | None:
        """The submitter whose jobs may run any program: our own user, and only where the socket proves it."""
        if self._any_program and self._local and self._welcome is not None and hasattr(os, "getuid"):
            return f"uid:{os.getuid()}"
        return None

    async def _fetch(self, job_id: str, sha256: str, size_bytes: int, target: Path) -> None:
        file = await asyncio.to_thread(target.open, "wb")
        with file:
            await self._blobs.get(BlobRef(sha256, size_bytes), job_id, file.write)

    async def _upload(self, stop: asyncio.Future[StopReason], path: Path, ref: BlobRef) -> None:
        """The command has run: its result waits for the server to have room, for as long as the lease is ours."""
        file = await asyncio.to_thread(path.open, "rb")
        with file:
            while True:
                try:
                    await self._blobs.put(file, ref)
                    return
                except Unavailable as error:
                    if stop.done():
                        raise
                    logger.warning("a result of %d bytes waits: %s", ref.size_bytes, error.message)
                    await asyncio.wait([stop], timeout=UPLOAD_RETRY_S)

    async def _as_blob(self, outcome: Outcome) -> Outcome:
        """A handler's large result becomes a blob, durable before the outcome is sent."""
        assert outcome.result is not None
        assert outcome.result_sha256 is not None
        ref = BlobRef(outcome.result_sha256, len(outcome.result))
        with tempfile.SpooledTemporaryFile() as file:
            file.write(outcome.result)
            await self._blobs.put(file, ref)  # type: ignore[arg-type]
        return msgspec.structs.replace(outcome, result=None, result_ref=ref)
