"""The worker: drives a `WorkerMachine` over a connection to a server, and runs commands, async handlers and plain functions.

Leases are decided by the machine (`core/worker`). Commands go to the runner, `async def` handlers run in the event loop, plain
functions in a child process; results are sent by `outbox.py`.

worker = Worker("tcp://host:7000")

@worker.handler("math.square")
async def square(job): return str(int(job.payload) ** 2).encode()

worker.run()
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import logging
import os
import random
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from tasuki.clocks import now
from tasuki.config import DataFolder, data_folder, default_url, find_token, user_key
from tasuki.core.address import parse_url
from tasuki.core.job import RESULT_INLINE_MAX_BYTES, BlobRef, JobSpec, OnDisconnect, Outcome, Progress, is_marked
from tasuki.core.lifecycle import GRACE_MAX_S, HTTP_LEASE_TTL_S
from tasuki.core.machine import Closed, Hangup, Opened, Received, Send, Ticked
from tasuki.core.message_requests import MessagesArrived, PublishNow, PublishRefused, SubscriptionAnswered
from tasuki.core.protocol import (
    CODECS,
    PROGRESS_STREAM,
    Ending,
    HeartbeatAnswer,
    Message,
    PublishedMessage,
    PublishMessages,
    Welcome,
)
from tasuki.core.reconnect import Connect
from tasuki.core.store_messages import OWN_PROGRAMS, Grant, Offer, Takes
from tasuki.core.subject import base_subject, check_job_pattern
from tasuki.core.worker import events
from tasuki.core.worker.machine import WorkerMachine
from tasuki.errors import ConfigError, TasukiError, Unavailable
from tasuki.event_loop import BackgroundTasks, loop_factory
from tasuki.net.messages import MessageExchange, MessageFunction, check_subscription
from tasuki.net.server_connection import ServerConnection
from tasuki.net.tls import client_tls
from tasuki.version import __version__
from tasuki.worker.attempt import (
    Attempt,
    Handler,
    HandlerJob,
    Handlers,
    JobLog,
    JobRefused,
    RunResult,
    StopReason,
    check_exceptions,
    check_handler,
    worker_failure,
)
from tasuki.worker.cache import CACHE_FOLDER, DEFAULT_CACHE, CacheConfig, CacheFolder, InputCache
from tasuki.worker.commands import missing_programs
from tasuki.worker.credentials import CredentialFile, Rotation
from tasuki.worker.execs import Exec
from tasuki.worker.folder import RunFolder
from tasuki.worker.function_processes import FunctionProcesses
from tasuki.worker.keeper.client import Keeper
from tasuki.worker.logs import DEFAULT_CAPS, LogCaps, LogFollow
from tasuki.worker.outbox import Outbox, OutboxFiles, OutboxRecord, RejectedResults
from tasuki.worker.runner import CommandRunner
from tasuki.worker.status import RunningJob, StatusFile, log_to_stderr_by_default
from tasuki.worker.transfers import WorkerTransfers, sweep_incoming

TICK_S = 0.05
RESOURCES_S = 1.0  # between two looks at what is told of this host
IDLE_TICK_S = 0.2  # of a worker that is connected and runs nothing
HARD_STOP_S = 15.0  # a second signal: how long killed jobs may take to be gone
LOG_AGAIN_S = 60.0  # how often the reason of a missing connection is repeated in the log
ASYNC_CONCURRENCY = 100
AHEAD_MAX = 32  # attempts that are requested beyond the slots while attempts are short
CONNECTED_WITHIN_S = 30.0  # how long a message waits for a connection

FETCHING = Progress(0.0, "fetching its input files")

logger = logging.getLogger("tasuki.worker")
Function = TypeVar("Function", bound=Callable[..., Any])
_decode_spec = msgspec.msgpack.Decoder(JobSpec).decode


class ActiveAttempt(msgspec.Struct):
    """An attempt that runs here, or whose end no server has answered."""

    attempt: Attempt
    tell: Callable[[str, Progress], None]
    """Takes the progress of the attempt with this lease."""
    stop: asyncio.Future[StopReason] | None = None
    """Stops it if it is a command or a plain function; the task of an async handler is canceled."""
    task: asyncio.Task[None] | None = None
    stopped: StopReason | None = None
    ended_at: float = 0.0

    def report(self, progress: Progress) -> None:
        """Take the progress that its handler reports."""
        self.tell(self.attempt.lease_id, progress)

    def is_canceled(self) -> bool:
        return self.stopped is StopReason.CANCELED

    def request_stop(self, reason: StopReason) -> None:
        """Stop the attempt; its end is reported when nothing of it is left."""
        self.stopped = reason
        if self.stop is not None:
            if not self.stop.done():
                self.stop.set_result(reason)
        elif self.task is not None:
            self.task.cancel()


class Worker:
    """Runs jobs for a server. Handlers are added with `@worker.handler(subject)`, commands with `execs`."""

    _archives = True  # the result of a command is an archive

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
        on_disconnect: str | None = None,
        reconnect_grace_s: float = 60.0,
        lease_ttl_s: float | None = None,
        tls_ca: str | None = None,
        drain_timeout_s: float | None = None,
        log_caps: LogCaps = DEFAULT_CAPS,
        credential_file: CredentialFile | None = None,
        cache: CacheConfig = DEFAULT_CACHE,
    ) -> None:
        self.url = url
        self.worker_id = worker_id or f"{socket.gethostname().split('.')[0][:40]}-{os.getpid()}-{secrets.token_hex(2)}"
        self.incarnation = secrets.token_hex(8)
        self._token, self._token_file = token, token_file
        self._credential_file = credential_file
        """With a credential in it the worker is enrolled; the credential has the token, which is rotated in time."""
        self._rotation: Rotation | None = None
        self._subjects = tuple(map(check_job_pattern, subjects))
        self._concurrency = check_slots(concurrency)
        self._execs, self._any_program = dict(execs or {}), any_program
        self._key = b""
        """This user's key, where jobs may run any program."""
        self._policy = functools.partial(disconnect_policy, on_disconnect, reconnect_grace_s, lease_ttl_s)
        self._policy(over_http=False)  # raises for a bad value
        self._drain_timeout_s, self._cache_config = drain_timeout_s, cache
        self._handlers = Handlers()
        self._connection = ServerConnection(self._heard, client_tls(tls_ca), is_worker=True)
        self._folder = None if data is None else data_folder(data).root
        self._transfers = WorkerTransfers(self._connection.blobs, self._folder)
        self._messages = MessageExchange(self._connection, self._apply, self._publish_now, CONNECTED_WITHIN_S)
        self._message_functions: list[tuple[str, str, MessageFunction]] = []
        self._log_follow, self._log_caps = LogFollow(self._send), log_caps
        self._outbox_files: OutboxFiles | None = None
        self._status: StatusFile | None = None
        if self._folder is not None:
            lasting = worker_id is not None  # the next process can be given the same worker_id
            self._outbox_files = OutboxFiles(self._folder, self.worker_id) if lasting else None
            self._status = StatusFile(self._folder, self.worker_id, url or "", lasting=lasting)
        self._tasks = BackgroundTasks()
        self._active: dict[str, ActiveAttempt] = {}
        self._cleaning = BackgroundTasks()  # of run folders; the next start removes what is left
        self._function_processes: FunctionProcesses | None = None
        self._keeper: Keeper | None = None
        self._flush_timer: asyncio.TimerHandle | None = None
        self._flushing, self._wall, self._signals = False, 0.0, 0
        self._welcome: Welcome | None = None
        self._logged_reason, self._log_again_at = "", 0.0
        self._job_log = JobLog()
        self._ended: list[events.AttemptEnded] = []

    # ------------------------------------------------------------------------------------------------ set-up

    def handler(
        self,
        subject: str,
        *,
        timeout_s: float | None = None,
        retry_on: type[BaseException] | tuple[type[BaseException], ...] | None = None,
        give_up_on: type[BaseException] | tuple[type[BaseException], ...] = (),
    ) -> Callable[[Function], Function]:
        """Register a function for jobs of a subject (a pattern). `async def` runs in the loop, `def` in a child process.

        An exception fails the attempt, and the job is tried again as long as it has retries; not for exceptions of `give_up_on`,
        and with `retry_on` for those alone. `raise Retry(in_s=30)` chooses the time of the next attempt.
        """
        check_handler(subject)
        only = None if retry_on is None else check_exceptions("retry_on", retry_on)
        never = check_exceptions("give_up_on", give_up_on)

        def register(function: Function) -> Function:
            check_handler(subject, function)
            asynchronous = inspect.iscoroutinefunction(function)
            self._handlers.add(Handler(subject, function, asynchronous, timeout_s, only, never))
            return function

        return register

    def subscribe(self, pattern: str, *, queue: str = "") -> Callable[[MessageFunction], MessageFunction]:
        """Register an `async def` function for the messages of a pattern; it gets one after the other.

            @worker.subscribe("settings.>")
            async def changed(message): print(message.subject, message.payload)

        Of all subscribers with the same `queue`, one gets a message. A message that comes while the worker is not connected is
        lost, and so are those that come faster than the function takes them. An exception is logged.
        """
        check_subscription(pattern, queue)

        def register(function: MessageFunction) -> MessageFunction:
            if not inspect.iscoroutinefunction(function):
                raise ConfigError(f"the function for messages of {pattern!r} must be async def")
            self._message_functions.append((pattern, queue, function))
            return function

        return register

    async def publish(
        self, subject: str, payload: bytes = b"", *, headers: Mapping[str, str] | None = None, reply_to: str = ""
    ) -> None:
        """Send a message to all who are subscribed to its subject now, as a client does; a refusal is logged."""
        await self._messages.publish(PublishedMessage(subject, payload, reply_to, dict(headers or {})))

    @property
    def patterns(self) -> tuple[str, ...]:
        """The subscribed patterns: those that were given, else the handlers' subjects, else the server's default."""
        return self._subjects or self._handlers.patterns

    # ------------------------------------------------------------------------------------------------ life

    def run(self) -> None:
        """Work until a signal: the first SIGTERM or SIGINT drains (no new jobs, running ones finish), the second stops them."""
        log_to_stderr_by_default()
        # Forked before the loop and its threads exist: a child that inherits a locked lock would hang.
        self._function_processes = FunctionProcesses.start(self._handlers.plain) if self._handlers.plain else None
        self._keeper = Keeper.start(self.incarnation) if self._execs or self._any_program else None
        # Nothing else runs in this process: the defaults took a third of its time with a thousand handlers at once.
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(self.serve(signals=True))
        finally:
            if self._function_processes is not None:
                self._function_processes.close()

    async def serve(self, *, signals: bool = False) -> None:
        """Work until drained. Plain functions need `run`, which starts their processes first."""
        self._loop = asyncio.get_running_loop()
        if self._function_processes is None and self._handlers.plain:
            raise ConfigError("plain function handlers need Worker.run(); in a running loop use async def handlers")
        if self.url is None:
            self.url = default_url() or f"unix://{data_folder(None).socket}"
        addresses = parse_url(self.url)
        if self._any_program and all(address.scheme == "unix" for address in addresses):
            self._key = user_key()
        remote = any(not address.loopback for address in addresses)
        on_disconnect, grace_s, ttl_s = self._policy(over_http=all(address.http for address in addresses))
        only_async = bool(self._handlers) and not self._handlers.plain and not self._execs
        capacity = self._concurrency or (ASYNC_CONCURRENCY if only_async else os.cpu_count() or 1)
        offer = what_it_offers(bool(self._handlers), self._execs, bool(self._key))
        identity = events.WorkerIdentity(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            token=find_token(self._token_file) if self._token is None else self._token,
            patterns=self.patterns,
            capacity=capacity,
            ahead=AHEAD_MAX if self._execs or self._any_program else 0,
            on_disconnect=on_disconnect,
            reconnect_grace_s=grace_s,
            ttl_s=ttl_s,
            host=socket.gethostname(),
            agent=f"tasuki-python/{__version__}" + (f" ({self._keeper.level})" if self._keeper is not None else ""),
            codecs=CODECS if remote else (),
            takes=offer.takes,
            execs=offer.execs,
            caches=True,
        )
        self._machine = WorkerMachine(identity, addresses=addresses, jitter=random.random)
        self._done: asyncio.Future[None] = self._loop.create_future()
        if self._credential_file is not None and self._credential_file.credential is not None:
            self._rotation = Rotation(
                self._credential_file, ask=self._ask, use=self._use, hang_up=self._connection.hang_up, jitter=random.random
            )
            self._tasks.spawn(self._rotation.run())
        with TemporaryDirectory(prefix="tasuki-worker-") if self._folder is None else nullcontext(self._folder) as folder:
            await self._prepare(Path(folder))
            if signals:
                for number in (signal.SIGTERM, signal.SIGINT):
                    self._loop.add_signal_handler(number, self._signaled)
            for record in await self._outbox.load():
                if record.result is not None:
                    self._machine.uploading.add(record.ending.lease_id)
                self._tasks.spawn(self._offer(record))
            self._tasks.spawn(self._tick())
            self._tasks.spawn(self._note_resources())
            for pattern, queue, function in self._message_functions:
                self._tasks.spawn(self._take_messages(pattern, queue, function))
            try:
                await self._done
            finally:
                await self._close()

    async def _prepare(self, folder: Path) -> None:
        """Open the parts that use the data folder, and sweep the files and processes that dead workers left."""
        DataFolder(folder).make()
        for problem in missing_programs(self._execs):
            logger.warning("%s", problem)
        cache = CacheFolder(self._cache_config.folder or folder / CACHE_FOLDER, self._cache_config.max_bytes)
        self._cache = InputCache(cache, self._transfers, self.worker_id, self._send)
        self._runner = CommandRunner(
            folder,
            self._execs,
            incarnation=self.incarnation,
            fetch=self._transfers.fetch,
            fetch_cached=self._cache.place,
            may_run_any=self._may_run_any,
            keeper=self._keeper,
            lease_deadline=self._machine.lease_deadline,
            on_keeper_lost=self.stop,
            log_caps=self._log_caps,
            on_progress=self._progressed,
            log_follow=self._log_follow,
            archives=self._archives,
        )
        await self._runner.sweep()
        aside = None
        if self._folder is not None:
            await asyncio.to_thread(sweep_incoming, self._folder)
            aside = RejectedResults(self._folder)
        self._outbox = Outbox(self._transfers, self._outbox_files, aside, tell=self._apply, closing=self._done.done)
        if self._status is not None:
            self._tasks.spawn(self._status.keep(self.running_jobs, lambda: self._machine.draining))

    async def _take_messages(self, pattern: str, queue: str, function: MessageFunction) -> None:
        try:
            await self._messages.hand_to(function, pattern, queue, logger)
        except TasukiError as error:  # the worker ends, or may not read these
            if not self._done.done():
                logger.error("messages of %s are not read: %s", pattern, error.message)

    def _publish_now(self, make: Callable[[int], Message]) -> asyncio.Future[Any]:
        """Send messages over HTTP, where the link has no back-pressure of its own."""
        published = make(1)
        assert isinstance(published, PublishMessages)
        self._apply(PublishNow(published.items))
        done = self._loop.create_future()
        done.set_result(None)
        return done

    async def _close(self) -> None:
        self._messages.close()
        self._apply(events.Drain())  # attempts that were not started yet are given back, at no cost for their jobs
        for active in list(self._active.values()):
            active.request_stop(StopReason.SHUTDOWN)
        if tasks := [active.task for active in self._active.values() if active.task]:
            await asyncio.wait(tasks, timeout=HARD_STOP_S)
        self._runner.kill_all()
        self._pump()
        for ending in self._machine.unreported:
            self._outbox.save(self._record(ending))
        await self._cleaning.close()
        await self._cache.close()
        await self._outbox.close()
        self._runner.close()
        await self._connection.close()
        await self._tasks.close()
        if self._status is not None:
            error = self._done.exception() if self._done.done() and not self._done.cancelled() else None
            await self._status.end(str(error or ""))

    def drain(self) -> None:
        """Take no new jobs; `serve` ends when the running ones are done and recorded."""
        self._apply(events.Drain())
        if self._drain_timeout_s is not None:
            self._loop.call_later(self._drain_timeout_s, self.stop)

    def stop(self, error: TasukiError | None = None) -> None:
        """End now, with an error if one is given: running jobs are stopped, and go to another worker when their leases end."""
        if not self._done.done():
            self._done.set_result(None) if error is None else self._done.set_exception(error)

    @property
    def connected(self) -> bool:
        """True if a server has accepted this worker on the current connection."""
        return self._machine.online

    @property
    def is_draining(self) -> bool:
        """True if the worker takes no new jobs, and ends when the running ones are done."""
        return self._machine.draining

    @property
    def slots(self) -> int:
        """The number of jobs that it runs at once."""
        return self._machine.slots

    def limit_slots(self, most: int) -> None:
        """Run at most so many jobs at once; 0: as many as it was started with."""
        self._machine.limit_slots(most)

    def change_subjects(self, *subjects: str) -> None:
        """Change the patterns of a running worker."""
        self._apply(events.ChangePatterns(tuple(map(check_job_pattern, subjects))))

    def _signaled(self) -> None:
        self._signals += 1
        if self._signals == 1:
            logger.info("draining: %d job(s) still run; a second signal stops them", len(self._active))
            self.drain()
        else:
            self.stop()

    async def _note_resources(self) -> None:
        """Tell the machine, now and then, how busy this host is and which cached files are here."""
        while True:
            cpu = min(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
            self._machine.note_resources(round(cpu, 2), await self._cache.held())
            await asyncio.sleep(RESOURCES_S)

    async def _tick(self) -> None:
        while True:
            self._apply(Ticked())
            self._job_log.flush(self._wall)
            await asyncio.sleep(TICK_S if self._active or not self._machine.online else IDLE_TICK_S)

    # ------------------------------------------------------------------------------------------------ the machine's driver

    def _apply(self, event: events.Event) -> None:
        at = now()
        self._wall = at.wall
        for command in self._machine.apply(event, at):
            self._perform(command)
        self._pump_soon()

    def _pump_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Report everything that ended in this turn of the loop in one message."""
        self._flushing = False
        at = now()
        if self._ended:
            ended, self._ended = self._ended, []
            for event in ended:
                for command in self._machine.apply(event, at):
                    self._perform(command)
        commands = self._machine.flush(at)
        if self._machine.flush_at is not None and self._flush_timer is None:
            self._flush_timer = self._loop.call_later(self._machine.flush_at - at.monotonic, self._flush)
        if self._connection.link is not None:  # an ending and the credit for its slot, read at once, are one turn of the store
            self._connection.link.send_together(command.message for command in commands if type(command) is Send)
        for command in commands:
            if type(command) is not Send:
                self._perform(command)

    def _flush(self) -> None:
        self._flush_timer = None
        self._pump()

    def _perform(self, command: events.Command) -> None:
        match command:
            case events.Run():
                self._start(command.grant)
            case events.Forget():
                self._forget(command)
            case Send():
                self._send(command.message)
            case events.Tail():
                if command.question.stream == PROGRESS_STREAM and command.question.lease_id in self._active:
                    self._log_follow.progress_of(command.question.lease_id)  # a follower may be there before the first report
                self._log_follow.ask(command.question)
            case events.TakeFiles():
                self._cache.asked(command.put)
            case events.Stop():
                if (active := self._active.get(command.lease_id)) is not None:
                    active.request_stop(StopReason(command.reason))
            case MessagesArrived():
                self._messages.arrived(command.delivery)
            case SubscriptionAnswered():
                self._messages.answered(command)
            case PublishRefused():
                logger.warning("a message was not published: %s", command.error.message)
            case Connect():
                self._connection.dial(command)
            case Hangup():
                self._connection.hang_up(command.error)
            case events.Save():
                self._outbox.save(self._record(command.ending))
            case events.KeepRejected():
                self._outbox.set_aside(self._record(command.ending), command.reason)
            case events.Exit():
                if command.error is not None:
                    self._connection.blobs.close(command.error)
                self.stop(command.error)

    def _send(self, message: Message) -> None:
        if self._connection.link is not None:
            self._connection.link.send(message)

    def _ask(self, verb: str, params: dict[str, str]) -> int:
        question = self._machine.question(verb, params)
        self._send(question)
        return question.msg_id

    def _use(self, token: str) -> None:
        """Use this token from the next Hello on."""
        self._machine.identity = replace(self._machine.identity, token=token)

    def _heard(self, event: Opened | Received | Closed) -> None:
        if self._rotation is not None:
            left = self._rotation.heard(event)
            if left is None:
                return
            event = left
        if type(event) is Received and type(event.message) is Welcome and self._connection.link is not None:
            self._welcome = event.message
            self._messages.welcomed()
            logger.info("connected to %s as %s", self._connection.link.peer.address, self.worker_id)
            if self._status is not None:
                self._status.connected(self._connection.link.peer.address)
        elif type(event) is Closed and not self._done.done():
            self._messages.lost()
            self._log_follow.forget()
            if self._status is not None:
                self._status.lost(event.reason)
            self._log_disconnect(event.reason)
        self._apply(event)
        if type(event) is Received and type(event.message) is HeartbeatAnswer:
            self._runner.renewed()
            if self._function_processes is not None:
                self._function_processes.renewed()

    def _log_disconnect(self, reason: str) -> None:
        """Log the reason once, then only a new one, or every LOG_AGAIN_S: an outage may last for days."""
        if self._machine.online:
            logger.warning("connection lost: %s", reason)
        elif reason != self._logged_reason or self._loop.time() >= self._log_again_at:
            logger.info("%s", reason)
        else:
            return
        self._logged_reason, self._log_again_at = reason, self._loop.time() + LOG_AGAIN_S

    # ------------------------------------------------------------------------------------------------ attempts

    def _start(self, grant: Grant) -> None:
        """Start the attempt in a task of its own; subclasses may change the grant."""
        spec = _decode_spec(grant.spec)
        attempt = Attempt(spec=spec, lease_id=grant.lease_id, attempt=grant.attempt, submitter=grant.submitter)
        active = self._active[grant.lease_id] = ActiveAttempt(attempt, self._progressed)
        if any(file.sha256 is not None for file in spec.files):  # a start may be far: the server shall know that it was begun
            self._machine.progressed(grant.lease_id, FETCHING)
        handler = None if spec.exec else self._handlers.find(base_subject(spec.subject))
        if handler is not None:
            self._job_log.started(spec, grant.attempt, self._wall)
        if handler is not None and handler.asynchronous and not spec.files:
            # The machine is told without an event: this is the path of ten thousand jobs a second.
            self._machine.handler_started(grant.lease_id, self._wall)
            active.task = self._loop.create_task(self._run_async(active, handler))
            return
        stop = active.stop = self._loop.create_future()
        run = self._run_command(active, stop) if spec.exec else self._run_handler(active, stop, handler, self._wall)
        active.task = self._loop.create_task(run)
        active.task.add_done_callback(functools.partial(self._report_failure, active))

    async def _run_async(self, active: ActiveAttempt, handler: Handler) -> None:
        await self._end_run(active, await handler.run(_handler_job(active, ""), lambda: active.stopped))

    def _progressed(self, lease_id: str, progress: Progress) -> None:
        self._machine.progressed(lease_id, progress)
        if lease_id in self._active:
            self._log_follow.progress_of(lease_id).note(progress)

    async def _run_handler(
        self, active: ActiveAttempt, stop: asyncio.Future[StopReason], handler: Handler | None, wall: float
    ) -> None:
        """Run a plain function, or any handler of a job with input files, which are fetched first."""
        spec = active.attempt.spec
        if handler is None or (self._function_processes is None and not handler.asynchronous):
            message = f"this worker has no handler for subject {spec.subject!r}"
            self._end(active, Outcome(error_code="NO_HANDLER", message=message, permanent=True))
            return
        folder = None
        if spec.files:
            try:
                prepared = await self._runner.prepare(active.attempt, stop)
            except Unavailable as error:
                await self._give_back(active, error)
                return
            if isinstance(prepared, Outcome):
                self._end(active, prepared)
                return
            folder = prepared
        self._machine.handler_started(active.attempt.lease_id, wall)
        outcome = await self._handled(active, stop, handler, folder)
        if folder is not None and active.stopped is None:
            again = await self._runner.prepare_again(active.attempt, folder, stop)
            if again is not None:
                outcome = again if isinstance(again, Outcome) else await self._handled(active, stop, handler, again)
        await self._end_run(active, outcome)

    async def _handled(
        self, active: ActiveAttempt, stop: asyncio.Future[StopReason], handler: Handler, folder: RunFolder | None
    ) -> Outcome:
        job = _handler_job(active, "" if folder is None else str(folder.inputs))
        if handler.asynchronous:
            active.stop = None  # a stop cancels this task
            try:
                return await handler.run(job, lambda: active.stopped)
            finally:
                active.stop = stop
        assert self._function_processes is not None
        try:
            deadline = functools.partial(self._machine.lease_deadline, active.attempt.lease_id)
            return await self._function_processes.run(handler.name, job, handler.limit_s(job.spec), stop, deadline)
        except Unavailable as error:
            # The processes that fork the children are gone: no plain function can run here any more.
            self.stop(error)
            return Outcome(error_code=error.code, message=error.message)

    async def _run_command(self, active: ActiveAttempt, stop: asyncio.Future[StopReason]) -> None:
        attempt = active.attempt
        try:
            result = await self._runner.run(attempt, stop, lambda: self._apply(events.Started(attempt.lease_id)))
            result = await self._as_reported(attempt, result)
        except Unavailable as error:  # nothing was started
            await self._give_back(active, error)
            return
        await self._end_run(active, result.outcome, result.result_file)

    async def _give_back(self, active: ActiveAttempt, error: Unavailable) -> None:
        attempt = active.attempt
        logger.warning("job %s is given back: %s", attempt.spec.job_id, error.message)
        self._active.pop(attempt.lease_id, None)
        self._log_follow.end_progress(attempt.lease_id)
        self._apply(events.AttemptReturned(attempt.lease_id))
        await self._runner.cleanup(attempt)

    async def _as_reported(self, attempt: Attempt, result: RunResult) -> RunResult:
        """Return a command's result as it is reported; subclasses may change it."""
        return result

    async def _end_run(self, active: ActiveAttempt, outcome: Outcome, result: Path | bytes | None = None) -> None:
        """Report the end; a large result is uploaded before."""
        if outcome.result is not None and len(outcome.result) > RESULT_INLINE_MAX_BYTES and outcome.result_sha256 is not None:
            result = outcome.result
            outcome = replace(outcome, result=None, result_ref=BlobRef(outcome.result_sha256, len(result)))
        if result is not None and outcome.result_ref is not None:
            active.ended_at = time.time()
            attempt, lease_id = active.attempt, active.attempt.lease_id
            ending = Ending(attempt.spec.job_id, lease_id, attempt.attempt, outcome, self._started_at(lease_id))
            record = OutboxRecord(ending, attempt.spec.subject, active.ended_at, result)
            reported = await self._outbox.upload(record, active.stop or self._loop.create_future(), lambda: active.stopped)
            if reported is None:
                return
            outcome = reported
        self._end(active, outcome)

    def _end(self, active: ActiveAttempt, outcome: Outcome) -> None:
        """Report an end, together with the others of this turn of the loop."""
        ended_at = active.ended_at = active.ended_at or time.time()
        attempt = active.attempt
        is_told = attempt.lease_id in self._log_follow.progress
        if is_told and (told := self._log_follow.end_progress(attempt.lease_id)) is not None:
            outcome = replace(outcome, meta={**outcome.meta, PROGRESS_STREAM: [told.fraction, told.text]})
        if not attempt.spec.exec:
            self._job_log.ended(attempt.spec, attempt.attempt, outcome, self._started_at(attempt.lease_id), ended_at)
        self._ended.append(events.AttemptEnded(active.attempt.lease_id, outcome))
        self._pump_soon()

    def _report_failure(self, active: ActiveAttempt, task: asyncio.Task[None]) -> None:
        """Report an attempt whose task failed: without a report its lease would be renewed for ever."""
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            logger.error("job %s attempt %d", active.attempt.spec.job_id, active.attempt.attempt, exc_info=error)
            self._end(active, worker_failure(error))

    def _forget(self, command: events.Forget) -> None:
        """Drop everything about the attempt, and recycle or remove its folder."""
        if command.lease_id in self._outbox.leases:
            self._outbox.forget(command.lease_id)
        if command.lease_id in self._log_follow.progress:
            self._log_follow.end_progress(command.lease_id)
        active = self._active.pop(command.lease_id, None)
        if active is None or not (active.attempt.spec.exec or active.attempt.spec.files):
            return
        if command.fenced or not self._runner.folders.recycle(active.attempt):
            self._cleaning.spawn(self._cleanup(active.attempt, bool(command.fenced)))

    async def _cleanup(self, attempt: Attempt, refused: bool) -> None:
        if refused:
            await self._outbox.written()  # its result may be in the folder until it is copied
        await self._runner.cleanup(attempt)

    def _record(self, ending: Ending) -> OutboxRecord:
        active = self._active.get(ending.lease_id)
        return OutboxRecord(ending) if active is None else OutboxRecord(ending, active.attempt.spec.subject, active.ended_at)

    def running_jobs(self) -> list[RunningJob]:
        """Return the attempts that are here, as the status file shows them."""
        attempts = [active.attempt for active in self._active.values()]
        return [RunningJob(one.spec.job_id, one.attempt, one.spec.subject, self._started_at(one.lease_id)) for one in attempts]

    def _started_at(self, lease_id: str) -> float | None:
        held = self._machine.held.get(lease_id)
        return held.started_at if held is not None else None

    def _may_run_any(self, attempt: Attempt) -> bool:
        """Return whether a job may run any program: this process's user submitted it here, as its MAC proves, not the row."""
        if not self._key or self._welcome is None or attempt.submitter != f"uid:{os.getuid()}":
            return False
        if is_marked(attempt.spec, attempt.submitter, self._key):
            return True
        raise JobRefused(
            "UNPROVEN",
            f"nothing proves that this user submitted job {attempt.spec.job_id!r} on this machine: it came with the data folder, "
            "or this user's key was replaced since; if it is yours, submit it again under another job_id",
        )

    async def _offer(self, record: OutboxRecord) -> None:
        try:
            await self._outbox.offer(record)
        finally:
            self._machine.uploading.discard(record.ending.lease_id)


def _handler_job(active: ActiveAttempt, folder: str) -> HandlerJob:
    attempt = active.attempt
    return HandlerJob(attempt.spec, attempt.attempt, folder, active.report, active.is_canceled)


# ---------------------------------------------------------------------------------------------------- settings, checked


def disconnect_policy(
    on_disconnect: str | None, reconnect_grace_s: float, lease_ttl_s: float | None, *, over_http: bool
) -> tuple[OnDisconnect, float, float | None]:
    """Return the checked policy of a worker that cannot renew: stop or keep its jobs, the grace before others get them, and the
    lease ttl (None: the server's).

    Over HTTP the connection is what fails first: jobs continue, and leases are longer.
    """
    usual = OnDisconnect.KEEP if over_http else OnDisconnect.STOP
    chosen = usual if on_disconnect is None else on_disconnect
    if chosen not in list(OnDisconnect):
        raise ConfigError(f"on_disconnect must be stop or keep, got {on_disconnect!r}")
    if not 0.0 <= reconnect_grace_s <= GRACE_MAX_S:
        raise ConfigError(f"reconnect_grace_s must be 0 to {GRACE_MAX_S:g} seconds, got {reconnect_grace_s:g}")
    grace_s = reconnect_grace_s if chosen == OnDisconnect.KEEP else 0.0
    return OnDisconnect(chosen), grace_s, lease_ttl_s or (HTTP_LEASE_TTL_S if over_http else None)


def check_slots(concurrency: int | None) -> int | None:
    """Return the number of slots if it is valid; None: one slot per core, or ASYNC_CONCURRENCY for async handlers alone."""
    if concurrency is not None and concurrency < 1:
        raise ConfigError(f"a worker needs at least one slot, got {concurrency}")
    return concurrency


def what_it_offers(handlers: bool, execs: Iterable[str], any_program: bool) -> Offer:
    """Return the jobs that this worker can run; others are left to other workers."""
    names = (*execs, *((OWN_PROGRAMS,) if any_program else ()))
    if handlers:
        return Offer(Takes.ANY, names) if names else Offer(Takes.HANDLERS)
    if names:
        return Offer(Takes.OWN if names == (OWN_PROGRAMS,) else Takes.COMMANDS, names)
    raise ConfigError(
        "this worker has nothing to run: give it execs (--exec NAME=COMMAND, --config FILE) or "
        "handlers; any program is run only for jobs of its own user, over the server's unix socket"
    )
