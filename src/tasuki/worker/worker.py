"""The worker: drives a WorkerMachine over a Link, and runs what it is given (commands, async handlers, plain functions).

worker = Worker("tcp://host:7000")

@worker.handler("math.square")
async def square(job): return str(int(job.payload) ** 2).encode()

worker.run()
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import random
import secrets
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import msgspec

from tasuki import __version__
from tasuki.config import data_folder, default_url, find_token, parse_url
from tasuki.core.job import RESULT_INLINE_MAX_BYTES, JobSpec, Outcome
from tasuki.core.machine import Closed, Hangup, Opened, Received, Send, Ticked
from tasuki.core.protocol import Ending, HeartbeatAnswer, Message, Welcome
from tasuki.core.redial import Connect
from tasuki.core.subject import check_pattern
from tasuki.core.verbs import Grant
from tasuki.core.worker_events import (
    ChangePatterns,
    Command,
    Drain,
    Ended,
    Event,
    Exit,
    Forget,
    GaveBack,
    Restored,
    Run,
    Save,
    Started,
    Stop,
    Tail,
    WorkerIdentity,
)
from tasuki.core.worker_machine import WorkerMachine
from tasuki.errors import ConfigError, TasukiError, Unavailable
from tasuki.net import Line, client_tls
from tasuki.net.loops import loop_factory, now
from tasuki.wire.compression import CODECS
from tasuki.worker.attempt import (
    Attempt,
    HandlerJob,
    RunResult,
    StopReason,
    worker_failure,
)
from tasuki.worker.children import Children
from tasuki.worker.execs import Exec
from tasuki.worker.handlers import Handler, Handlers
from tasuki.worker.keeper_client import Keeper
from tasuki.worker.logs import DEFAULT_CAPS, LogCaps
from tasuki.worker.runner import CommandRunner, RunLimits
from tasuki.worker.settings import ahead_of, capacity_of, check_slots, cut_off, what_it_takes
from tasuki.worker.tail import LogTails
from tasuki.worker.transfers import Transfers
from tasuki.worker.unreported import Saved, Unreported

TICK_S = 0.05
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
        log_caps: LogCaps = DEFAULT_CAPS,
    ) -> None:
        self.url = url
        self.worker_id = worker_id or f"{socket.gethostname().split('.')[0][:40]}-{os.getpid()}-{secrets.token_hex(2)}"
        self.incarnation = secrets.token_hex(8)
        self._token, self._token_file = token, token_file
        self._subjects = tuple(check_pattern(subject) for subject in subjects)
        self._concurrency = check_slots(concurrency)
        self._execs = dict(execs or {})
        self._any_program = any_program
        self._data = data
        self._on_disconnect, self._grace_s = cut_off(on_disconnect, reconnect_grace_s)
        self._lease_ttl_s = lease_ttl_s
        self._drain_timeout_s = drain_timeout_s
        self._handlers = Handlers()
        self._active: dict[str, _Active] = {}
        self._line = Line(self._heard, client_tls(tls_ca))
        self._transfers = Transfers(self._line.blobs)
        self._tails = LogTails(self._send)
        self._log_caps = log_caps
        self._unreported = Unreported(Path(data), self.worker_id) if data is not None and worker_id is not None else None
        """Only where the next process can be told to be the same worker."""
        self._tasks: set[asyncio.Future[Any]] = set()
        self._children: Children | None = None
        self._keeper: Keeper | None = None
        self._pumping = False
        self._flush_timer: asyncio.TimerHandle | None = None
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

    # ------------------------------------------------------------------------------------------------ life

    def run(self) -> None:
        """Work until a signal: the first SIGTERM or SIGINT drains (no new jobs, running ones finish), the second stops them."""
        # Forked before the loop and its threads exist: a child that inherits a locked lock would hang.
        self._children = Children.start(self._handlers.plain) if self._handlers.plain else None
        self._keeper = Keeper.start(self.incarnation) if self._execs or self._any_program else None
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
        addresses = parse_url(self.url)
        self._local = all(address.scheme == "unix" for address in addresses)
        remote = any(not address.loopback for address in addresses)
        only_async = bool(self._handlers) and not self._handlers.plain and not self._execs
        capacity = capacity_of(self._concurrency, only_async=only_async)
        identity = WorkerIdentity(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            token=find_token(self._token_file) if self._token is None else self._token,
            patterns=self.patterns,
            capacity=capacity,
            ahead=ahead_of(capacity) if self._execs or self._any_program else 0,
            on_disconnect=self._on_disconnect,
            reconnect_grace_s=self._grace_s,
            ttl_s=self._lease_ttl_s,
            host=socket.gethostname(),
            agent=f"tasuki-python/{__version__}",
            codecs=CODECS if remote else (),
            takes=what_it_takes(bool(self._handlers), bool(self._execs), self._any_program),
        )
        self._machine = WorkerMachine(identity, addresses=addresses, jitter=random.random)
        self._done: asyncio.Future[None] = self._loop.create_future()
        with nullcontext(self._data) if self._data is not None else TemporaryDirectory(prefix="tasuki-worker-") as folder:
            self._runner = CommandRunner(
                Path(folder),
                self._execs,
                incarnation=self.incarnation,
                fetch=self._transfers.fetch,
                any_program_for=self._any_program_for,
                keeper=self._keeper,
                lease_deadline=self._machine.lease_deadline,
                on_keeper_lost=self.stop,
                limits=RunLimits(log_caps=self._log_caps),
                on_progress=self._machine.progressed,
                tails=self._tails,
            )
            await self._runner.sweep()
            if signals:
                for number in (signal.SIGTERM, signal.SIGINT):
                    self._loop.add_signal_handler(number, self._signaled)
            self._spawn(self._tick())
            if self._unreported is not None:
                for saved in await self._unreported.load():
                    self._spawn(self._offer(saved))
            try:
                await self._done
            finally:
                await self._close()

    async def _close(self) -> None:
        self._apply(Drain())  # what was not started yet is given back, and costs its job nothing
        for active in list(self._active.values()):
            self._stop_active(active, StopReason.SHUTDOWN)
        if self._active:
            await asyncio.wait([active.task for active in self._active.values() if active.task], timeout=HARD_STOP_S)
        self._runner.kill_all()
        self._pump()
        if self._unreported is not None:
            for ending in self._machine.unreported:
                self._unreported.save(ending)
            await self._unreported.close()
        self._runner.close()
        await self._line.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drain(self) -> None:
        """No new jobs; `serve` ends when those that run are done and recorded."""
        self._apply(Drain())
        if self._drain_timeout_s is not None:
            self._loop.call_later(self._drain_timeout_s, self.stop)

    def stop(self, error: TasukiError | None = None) -> None:
        """End now, with this error if any: running jobs are stopped, and go to another worker when their leases end."""
        if not self._done.done():
            self._done.set_result(None) if error is None else self._done.set_exception(error)

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
        commands = self._machine.flush(at)
        if self._machine.flush_at is not None and self._flush_timer is None:
            self._flush_timer = self._loop.call_later(self._machine.flush_at - at.monotonic, self._flush)
        if self._line.link is not None:  # an ending and the credit for its place, read at once, are one turn of the store
            self._line.link.send_together(command.message for command in commands if type(command) is Send)
        for command in commands:
            if type(command) is not Send:
                self._perform(command)

    def _flush(self) -> None:
        self._flush_timer = None
        self._pump()

    def _perform(self, command: Command) -> None:
        match command:
            case Run():
                self._start(command.grant)
            case Forget():
                self._forget(command)
            case Send():
                self._send(command.message)
            case Tail():
                self._tails.ask(command.question)
            case Stop():
                active = self._active.get(command.lease_id)
                if active is not None:
                    self._stop_active(active, StopReason(command.reason))
            case Connect():
                self._line.dial(command)
            case Hangup():
                self._line.hang_up(command.error)
            case Save():
                if self._unreported is not None:
                    self._unreported.save(command.ending)
            case Exit():
                if command.error is not None:
                    self._line.blobs.close(command.error)
                self.stop(command.error)

    def _send(self, message: Message) -> None:
        if self._line.link is not None:
            self._line.link.send(message)

    def _heard(self, event: Opened | Received | Closed) -> None:
        if type(event) is Received and type(event.message) is Welcome and self._line.link is not None:
            self._welcome = event.message
            logger.info("connected to %s as %s", self._line.link.peer.address, self.worker_id)
        elif type(event) is Closed and not self._done.done():
            self._tails.forget()
            if event.conn:
                logger.warning("connection lost: %s", event.reason)
            else:
                logger.info("%s", event.reason)
        self._apply(event)
        if type(event) is Received and type(event.message) is HeartbeatAnswer:
            self._runner.renewed()

    # ------------------------------------------------------------------------------------------------ attempts

    def _start(self, grant: Grant) -> None:
        spec = _decode_spec(grant.spec)
        attempt = Attempt(spec=spec, lease_id=grant.lease_id, attempt=grant.attempt, submitter=grant.submitter)
        active = self._active[grant.lease_id] = _Active(attempt)
        if spec.exec:
            active.stop = self._loop.create_future()
            active.task = self._loop.create_task(self._run_command(active))
            active.task.add_done_callback(functools.partial(self._look_at, active))
            return
        handler = self._handlers.find(spec.subject)
        if handler is not None and handler.asynchronous:
            # Said to the machine without an event of its own: this is the path of ten thousand jobs a second.
            self._machine.handler_started(grant.lease_id, self._wall)
            active.task = self._loop.create_task(self._run_async(active, handler))
        else:
            active.stop = self._loop.create_future()
            active.task = self._loop.create_task(self._run_plain(active, handler))
            active.task.add_done_callback(functools.partial(self._look_at, active))

    async def _run_async(self, active: _Active, handler: Handler) -> None:
        await self._end_handler(active, await handler.run(active.attempt, lambda: active.stopped))

    async def _run_plain(self, active: _Active, handler: Handler | None) -> None:
        spec = active.attempt.spec
        if handler is None or self._children is None or active.stop is None:
            message = f"this worker has no handler for subject {spec.subject!r}"
            self._end(active, Outcome(error_code="NO_HANDLER", message=message, permanent=True))
            return
        self._machine.handler_started(active.attempt.lease_id, self._wall)
        job = HandlerJob(spec, active.attempt.attempt)
        try:
            outcome = await self._children.run(handler.name, job, handler.limit_s(spec), active.stop)
        except Unavailable as error:
            # The process that forks our children is gone: nothing plain can run here any more.
            outcome = Outcome(error_code=error.code, message=error.message)
            self.stop(error)
        await self._end_handler(active, outcome)

    async def _end_handler(self, active: _Active, outcome: Outcome) -> None:
        if outcome.result is not None and len(outcome.result) > RESULT_INLINE_MAX_BYTES:
            outcome = await self._transfers.as_blob(outcome, active.stop, lambda: active.stopped)
        self._end(active, outcome)

    async def _run_command(self, active: _Active) -> None:
        assert active.stop is not None
        attempt = active.attempt
        try:
            result = await self._runner.run(attempt, active.stop, lambda: self._apply(Started(attempt.lease_id)))
            result = await self._as_reported(attempt, result)
        except Unavailable as error:  # nothing was started
            logger.warning("job %s is given back: %s", attempt.spec.job_id, error.message)
            self._active.pop(attempt.lease_id, None)
            self._apply(GaveBack(attempt.lease_id))
            await self._runner.cleanup(attempt)
            return
        outcome = result.outcome
        if result.result_file is not None and outcome.result_ref is not None:
            try:
                await self._transfers.bring(result.result_file, outcome.result_ref, active.stop)
            except TasukiError as error:
                if active.stopped is StopReason.SHUTDOWN and self._unreported is not None:  # for our next process
                    self._unreported.save(self._ending_of(attempt, outcome), result.result_file)
                    return
                outcome = Outcome(error_code=error.code, message=f"the result could not be kept: {error.message}")
        await self._end_handler(active, outcome)

    async def _as_reported(self, attempt: Attempt, result: RunResult) -> RunResult:
        """For subclasses whose results look otherwise."""
        return result

    def _look_at(self, active: _Active, task: asyncio.Task[None]) -> None:
        """An attempt whose end nobody tells would be renewed for ever."""
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            logger.error("job %s attempt %d", active.attempt.spec.job_id, active.attempt.attempt, exc_info=error)
            self._end(active, worker_failure(error))

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
        if self._unreported is not None:
            self._unreported.forget(command.lease_id, command.fenced)
        active = self._active.pop(command.lease_id, None)
        if active is None:
            return
        if command.fenced:
            named = (active.attempt.spec.job_id, active.attempt.attempt, command.fenced)
            logger.warning("job %s attempt %d: refused, its result is dropped: %s", *named)
        if active.attempt.spec.exec and not self._runner.recycle(active.attempt):
            self._spawn(self._runner.cleanup(active.attempt))

    # ------------------------------------------------------------------------------------------------ large things

    def _any_program_for(self) -> str | None:
        """The submitter whose jobs may run any program: our own user, and only where the socket proves it."""
        if self._any_program and self._local and self._welcome is not None and hasattr(os, "getuid"):
            return f"uid:{os.getuid()}"
        return None

    async def _offer(self, saved: Saved) -> None:
        """An ending that an earlier process could not report; its large result goes first."""
        ending = saved.ending
        logger.info("job %s attempt %d: its saved ending is offered", ending.job_id, ending.attempt)
        if saved.result_file is not None and ending.outcome.result_ref is not None:
            try:
                await self._transfers.bring(saved.result_file, ending.outcome.result_ref, self._loop.create_future())
            except TasukiError as error:
                logger.error(
                    "job %s attempt %d: its saved result cannot be sent: %s", ending.job_id, ending.attempt, error.message
                )
                return
        self._apply(Restored(ending))

    def _ending_of(self, attempt: Attempt, outcome: Outcome) -> Ending:
        held = self._machine.held.get(attempt.lease_id)
        started_at = held.started_at if held is not None else None
        return Ending(attempt.spec.job_id, attempt.lease_id, attempt.attempt, outcome, started_at)
