"""The asynchronous client: drives a ClientMachine over a Link. The blocking client and the CLI are built on it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import itertools
import os
import random
import secrets
import socket
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self, TypeVar, cast

from msgspec.structs import replace

from tasuki.client.caches import CacheCalls
from tasuki.client.embedded import ensure_server
from tasuki.client.logs import SPOOL_BYTES, LogFollower
from tasuki.client.types import (
    AsyncJobHandle,
    AwaitedJob,
    CancelAnswer,
    CommandResult,
    Explanation,
    JobPage,
    JobStatus,
    RetryAnswer,
    WorkerStatus,
    check_job_ids,
    check_list,
    check_texts,
    read_answer,
    unchanged,
)
from tasuki.clocks import now
from tasuki.config import DataFolder, data_folder, default_url, find_token
from tasuki.core.address import parse_url, shown_address
from tasuki.core.client_machine import (
    Call,
    CallAnswered,
    ClientMachine,
    Command,
    Event,
    Failed,
    ResultsArrived,
    Unsendable,
    Unwatch,
    Watch,
    WatchRefused,
    Welcomed,
)
from tasuki.core.job import (
    BODY_INLINE_MAX_BYTES,
    BROADCAST_WITHIN_S,
    PAYLOAD_FILE,
    BlobRef,
    IdMaker,
    InputFile,
    JobSpec,
    Progress,
    State,
    broadcast_specs,
    check_specs,
)
from tasuki.core.machine import Closed, Hangup, Opened, Received, Send, Ticked
from tasuki.core.message_requests import MessagesArrived, PublishRefused, SubscriptionAnswered
from tasuki.core.protocol import (
    BATCH_BYTES,
    CODECS,
    FRAME_MAX_BYTES,
    PROGRESS_STREAM,
    Accepted,
    CancelJobs,
    HelloClient,
    JobResult,
    Message,
    PublishedMessage,
    Request,
    SubmitJobs,
    Welcome,
    batches,
)
from tasuki.core.reconnect import Connect, believed
from tasuki.core.statistics import GroupCounts
from tasuki.core.subject import DEFAULT_SUBJECT
from tasuki.core.units import shown_duration
from tasuki.errors import (
    ConfigError,
    InvalidInput,
    NotFound,
    TasukiError,
    TooLarge,
    Unavailable,
    from_wire,
)
from tasuki.event_loop import BackgroundTasks
from tasuki.net.messages import AsyncMessageSubscription, MessageExchange, check_subscription
from tasuki.net.server_connection import ServerConnection
from tasuki.net.tls import client_tls
from tasuki.version import __version__
from tasuki.wire.messages import encode

TICK_S = 0.05
SUBMIT_NAMES = {"max_retries": "retries"}  # fields of a JobSpec that `submit` calls otherwise
SUBMITS_AT_ONCE = 32  # frames of up to 1 MiB on their way; all at once, a link would be cut for holding too much

OnFailed = Literal["return", "rerun"]
T = TypeVar("T")
R = TypeVar("R")


class AsyncClient(CacheCalls):
    """Client that submits jobs and asks about them.

        async with AsyncClient("tcp://host:7000", token_file="token") as client:
            done = await client.run("echo", "hi")
            print(done.stdout)

    No `url`: TASUKI_URL, else the server that owns the data folder, else an embedded one that is started for the time being.
    No token: TASUKI_TOKEN; the unix socket of the same user needs none. The client connects again after a lost connection, to
    another server if there is one, and repeats what is safe to repeat. A call with an argument of the wrong type raises WrongType
    (a TypeError) and sends nothing.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        client_id: str | None = None,
        data: str | os.PathLike[str] | None = None,
        tls_ca: str | None = None,
        connect_timeout_s: float = 30.0,
    ) -> None:
        self._url = url or default_url()
        self._data = data
        self._embedded: DataFolder | None = None
        """Data folder of an embedded server, to be started again if the one that was found ends before it accepts this client."""
        self._token = find_token(token_file) if token is None else token
        self._client_id = client_id or f"{socket.gethostname().split('.')[0][:40]}-{os.getpid()}-{secrets.token_hex(3)}"
        self._connect_timeout_s = connect_timeout_s
        self._make_id = IdMaker(lambda: time.time_ns() // 1_000_000, os.urandom)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._tickets = itertools.count(1)
        self._jobs: dict[str, AwaitedJob] = {}
        self._dials = 0
        self._tasks = BackgroundTasks()
        self._closed = False
        self._last_problem = "no address was tried yet"
        self._tls_ca = tls_ca
        self._connection = ServerConnection(self._on_event, client_tls(tls_ca))
        self._blobs = self._connection.blobs
        self._messages = MessageExchange(self._connection, self._apply, self._ask, connect_timeout_s)
        self._submits = asyncio.Semaphore(SUBMITS_AT_ONCE)
        self.welcome: Welcome | None = None
        self.hinted = False

    # ------------------------------------------------------------------------------------------------ life

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {shown_address(self._url or 'of the embedded server')}>"

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect; Unavailable if no server accepts this client within `connect_timeout_s`, Unauthorized if none ever will."""
        self._loop = asyncio.get_running_loop()
        if self._url is None:
            self._embedded = data_folder(self._data)
            self._url = await self._loop.run_in_executor(None, ensure_server, self._embedded)
        addresses = parse_url(self._url)
        if self._tls_ca and any(address.scheme == "http" for address in addresses):
            raise ConfigError(f"{shown_address(self._url)} is not encrypted, a CA file is of no use for it; is it https://?")
        remote = any(not address.loopback for address in addresses)
        hello = HelloClient(
            msg_id=0,
            client_id=self._client_id,
            token=self._token,
            codecs=CODECS if remote else (),
            agent=f"tasuki-python/{__version__}",
        )
        self._machine = ClientMachine(hello, addresses=addresses, jitter=random.random)
        self._ready = self._loop.create_future()
        self._tasks.spawn(self._tick())
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await asyncio.shield(self._ready)
        except TimeoutError:
            is_open = self._connection.link is not None and not addresses[0].http
            problem = "it takes connections and does not answer; is it http://?" if is_open else self._last_problem
            await self.close()
            waited = shown_duration(self._connect_timeout_s)
            raise Unavailable(f"no server at {shown_address(self._url)} within {waited}; the last try: {problem}") from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the connection. Jobs continue; their results can be asked for later by id."""
        self._messages.close()
        self._closed = True
        await self._connection.close()
        await self._tasks.close()
        closed = Unavailable("this client was closed")
        for ticket in list(self._calls):
            self._answer(ticket, None, closed)
        for job in list(self._jobs.values()):
            job.settle(None, closed)

    @property
    def connected(self) -> bool:
        """True while a server has accepted this client and the connection stands; otherwise the client keeps trying."""
        return self._machine.online

    async def _tick(self) -> None:
        while True:
            self._apply(Ticked())
            await asyncio.sleep(TICK_S)

    # ------------------------------------------------------------------------------------------------ the machine's driver

    def _apply(self, event: Event) -> None:
        for command in self._machine.apply(event, now()):
            self._perform(command)

    def _perform(self, command: Command) -> None:
        match command:
            case Send():
                self._send(command.message)
            case ResultsArrived():
                jobs = self._jobs
                for item in command.items:
                    job = jobs.pop(item.job_id, None)
                    if job is not None:
                        job.settle(item)
            case MessagesArrived():
                self._messages.arrived(command.delivery)
            case CallAnswered():
                self._answer(command.ticket, command.answer, command.error)
            case Connect():
                self._dial(command)
            case Hangup():
                self._connection.hang_up(command.error)
            case Welcomed():
                self.welcome = command.welcome
                self._messages.welcomed()
                if not self._ready.done():
                    self._ready.set_result(None)
            case WatchRefused():
                for job_id in command.job_ids:
                    job = self._jobs.pop(job_id, None)
                    if job is not None:
                        job.settle(None, command.error)
            case SubscriptionAnswered():
                self._messages.answered(command)
            case PublishRefused():
                self._messages.refused(command.error)
            case Failed():
                self._blobs.close(command.error)
                if not self._ready.done():
                    self._ready.set_exception(command.error)

    def _send(self, message: Message) -> None:
        """Send a message; if it cannot be encoded, its own call fails, and the link and all other calls continue."""
        link = self._connection.link
        if link is None:
            return
        try:
            link.say(message)
        except InvalidInput as error:
            named = _which_job(message, error) if isinstance(message, SubmitJobs) else error
            self._apply(Unsendable(getattr(message, "msg_id", 0), named))

    def _dial(self, wanted: Connect) -> None:
        self._dials += 1
        if self._embedded is not None and self._dials == 2 and not self._ready.done():
            # The embedded server that was found may have been about to end: start another one, once.
            self._tasks.spawn(self._ensure_again(self._embedded, wanted))
        else:
            self._connection.dial(wanted)

    async def _ensure_again(self, folder: DataFolder, wanted: Connect) -> None:
        try:
            await self._loop.run_in_executor(None, ensure_server, folder)
        except Unavailable as error:
            self._last_problem = error.message
        self._connection.dial(wanted)

    def _on_event(self, event: Opened | Received | Closed) -> None:
        if type(event) is Closed:
            self._last_problem = event.reason
            self._messages.lost()
        self._apply(event)

    def _ask(self, make: Callable[[int], Message], *, watch: tuple[str, ...] = ()) -> asyncio.Future[Any]:
        """Begin a call and return the future of its answer."""
        if self._closed:
            raise Unavailable("this client was closed")
        ticket = next(self._tickets)
        future = self._calls[ticket] = self._loop.create_future()
        self._apply(Call(ticket, make, watch=watch))
        return future

    def _answer(self, ticket: int, body: Any, error: TasukiError | None) -> None:
        """Settle a call."""
        future = self._calls.pop(ticket, None)
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(body)

    async def call(self, verb: str, /, **params: Any) -> Any:
        """Make a request of the protocol by name (docs/wire.md lists them), and return the answer as it came."""
        return await self._ask(lambda msg_id: Request(msg_id, verb, params))

    # ------------------------------------------------------------------------------------------------ messages

    async def publish(
        self, subject: str, payload: bytes = b"", *, headers: Mapping[str, str] | None = None, reply_to: str = ""
    ) -> None:
        """Send a message to all who are subscribed to its subject now; it is stored nowhere, and delivered at most once.

            await client.publish("prices.fx.eurusd", b"1.0931", headers={"source": "ecb"})

        Returns when the message is on its way to the server. One that the server refuses raises at the next `publish` or `flush`.
        """
        await self._messages.publish(PublishedMessage(subject, payload, reply_to, dict(check_texts("headers", headers))))

    async def flush(self) -> None:
        """Wait until the server has taken all published messages; raises the refusal of one of them."""
        await self._messages.flush()

    def subscribe(self, pattern: str, *, queue: str = "") -> AsyncMessageSubscription:
        """Return the messages whose subjects match, from now on, for `async for`.

            async for message in client.subscribe("prices.>"):
                print(message.subject, message.payload)

        Of all subscribers with the same `queue`, one gets a message. After a lost connection the subscription continues at
        another server, if there is one; messages of the meantime are lost. A slow reader loses some too: `dropped` counts them.
        """
        check_subscription(pattern, queue)
        return AsyncMessageSubscription(self._messages, pattern, queue)

    async def request(
        self, subject: str, payload: bytes = b"", timeout: float = 5.0, *, headers: Mapping[str, str] | None = None
    ) -> PublishedMessage:
        """Publish a message, and return the first answer to it: a subscriber publishes that to the `reply_to` of the message.

            answer = await client.request("time.now", timeout=2.0)

        NotFound if nobody is subscribed there, DeadlineExceeded (a TimeoutError) if nobody answers in time.
        """
        return await self._messages.request(subject, payload, check_texts("headers", headers), timeout)

    # ------------------------------------------------------------------------------------------------ submitting

    def new_id(self) -> str:
        """Return a new, time-ordered job_id."""
        return self._make_id()

    def new_ids(self, count: int) -> list[str]:
        """Return `count` new job_ids, in order."""
        return self._make_id.many(count)

    async def submit(
        self,
        *,
        subject: str = DEFAULT_SUBJECT,
        exec: str = "",
        args: list[str] | tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        payload: bytes = b"",
        files: Iterable[InputFile | str | os.PathLike[str]] = (),
        cwd: str | os.PathLike[str] = "",
        job_id: str | None = None,
        timeout_s: float | None = None,
        retries: int = 3,
        max_losses: int = 3,
        backoff_s: float | None = None,
        priority: int = 5,
        not_before: float | None = None,
        not_after: float | None = None,
        permanent_exit_codes: list[int] | tuple[int, ...] = (),
        retry_exit_codes: list[int] | tuple[int, ...] = (),
        headers: Mapping[str, str] | None = None,
        array_id: str | None = None,
        delay_first_loss: bool = False,
        route_key: str = "",
        on_failed: OnFailed = "return",
        watch: bool = True,
    ) -> AsyncJobHandle[bytes]:
        """Submit one job, and return when it is durable: for a handler by `subject`, or a command by `exec`.

            job = await client.submit(subject="math.square", payload=b"7", retries=5)
            job = await client.submit(exec="render", args=["--fast"], files=["scene.blend"], timeout_s=60)

        `retries` counts further tries after failures, `timeout_s` limits one attempt; the other fields are those of JobSpec. A
        path among `files` is uploaded and found by the program as in/NAME; `cwd` is for your own programs on this machine. The
        same `job_id` and body again is the same job: nothing runs twice. `on_failed` and `watch`: see `submit_many`.
        """
        spec = JobSpec(
            job_id=self.new_id() if job_id is None else job_id,
            subject=subject,
            exec=exec,
            args=tuple(check_list("args", args)),
            env=dict(check_texts("env", env)),
            payload=payload,
            cwd=str(Path(cwd).absolute()) if os.fspath(cwd) else "",
            timeout_s=timeout_s,
            max_retries=retries,
            max_losses=max_losses,
            backoff_s=backoff_s,
            priority=priority,
            not_before=not_before,
            not_after=not_after,
            permanent_exit_codes=tuple(check_list("permanent_exit_codes", permanent_exit_codes)),
            retry_exit_codes=tuple(check_list("retry_exit_codes", retry_exit_codes)),
            headers=dict(check_texts("headers", headers)),
            array_id=array_id,
            delay_first_loss=delay_first_loss,
            route_key=route_key,
        )
        check_specs([spec], SUBMIT_NAMES)  # before anything is uploaded
        if inputs := [await self._input(file) for file in check_list("files", files)]:
            spec = replace(spec, files=tuple(inputs))
        spec = await self.with_payload_uploaded(spec)
        return (await self.submit_many([spec], on_failed=on_failed, watch=watch))[0]

    async def run(
        self,
        exec: str,
        *args: str,
        subject: str = DEFAULT_SUBJECT,
        env: Mapping[str, str] | None = None,
        payload: bytes = b"",
        files: Iterable[InputFile | str | os.PathLike[str]] = (),
        cwd: str | os.PathLike[str] = "",
        job_id: str | None = None,
        timeout_s: float | None = None,
        retries: int = 0,
        check: bool = True,
    ) -> CommandResult:
        """Run a command and return its exit code, output and files; JobFailed if it did not succeed, unless check=False.

            print((await client.run("echo", "hi")).stdout)

        `payload` is its standard input. It is submitted like any job: for the other fields, or to wait later, use `submit`.
        """
        job = await self.submit(
            exec=exec,
            args=args,
            subject=subject,
            env=env,
            payload=payload,
            files=files,
            cwd=cwd,
            job_id=job_id,
            timeout_s=timeout_s,
            retries=retries,
        )
        return await job.command_result(check=check)

    async def submit_many(
        self, specs: Sequence[JobSpec], *, on_failed: OnFailed = "return", watch: bool = True, strict: bool = True
    ) -> list[AsyncJobHandle[bytes]]:
        """Submit many jobs in as few frames as possible, and return when all are durable.

            specs = [JobSpec(job_id=f"scene-{n}", subject="render", payload=b"%d" % n) for n in range(1000)]
            for job in await client.submit_many(specs):
                print(await job)

        A refused job raises its error (Conflict, InvalidInput, …); with strict=False its handle carries it instead. A job that is
        there and ended in another state than SUCCEEDED is returned as it is; with on_failed="rerun" it runs again. Then a lost
        connection is Unavailable, and the jobs may run or not; otherwise the request is repeated. With watch=False the server
        does not deliver the results: `client.job(job_id)` asks for one.
        """
        check_specs(specs)
        if on_failed not in ("return", "rerun"):
            raise InvalidInput(f"on_failed must be 'return' or 'rerun', got {str(on_failed)[:40]!r}")
        jobs = [self._awaited(spec.job_id, watch) for spec in specs]
        calls: list[tuple[int, asyncio.Future[Any]]] = []
        first: TasukiError | None = None
        start = 0
        try:
            for some in batches(specs, _large_bytes):
                await self._submits.acquire()
                calls.append((start, self._ask_submit(list(some), watch, on_failed)))
                start += len(some)
            for start, call in calls:
                first = self._read_exceptions(await call, jobs, start) or first
        except TasukiError:
            for _, other in calls:
                if not other.cancel() and not other.cancelled():
                    other.exception()  # failed for the same reason; retrieved, so that asyncio does not log it
            self._drop(jobs)
            raise
        if first is not None and strict:
            raise first
        return [AsyncJobHandle(job, self, unchanged) for job in jobs]

    async def broadcast(
        self, spec: JobSpec, *, within_s: float = BROADCAST_WITHIN_S, on_failed: OnFailed = "return", watch: bool = True
    ) -> list[AsyncJobHandle[bytes]]:
        """Submit a job for each worker that meets a pattern now, the subject of `spec`; return when all are durable.

            jobs = await client.broadcast(JobSpec(job_id="rotate-7", subject="render.>", exec="rotate-keys"))
            done = {job.job_id: (await job.outcome()).succeeded for job in jobs}

        They are the elements `rotate-7.WORKER` of the array `rotate-7`, and run like any job. A worker that is away gets its own
        when it returns, but no later than `within_s` from now by the server's clock, or the spec's `not_after`: then it is
        SKIPPED. NotFound if no worker meets the pattern. The same broadcast again reaches workers that have come since, and
        nobody twice.
        """
        found = await self.call("targets", subject=spec.subject, exec=spec.exec)
        if not found["workers"]:
            what = f"offers {spec.exec!r} and " if spec.exec else ""
            raise NotFound(f"no connected worker {what}subscribes to what {spec.subject!r} meets; see: tasuki workers")
        specs = broadcast_specs(spec, found["workers"], found["now"] + within_s)
        return await self.submit_many(specs, on_failed=on_failed, watch=watch)

    def _ask_submit(self, specs: list[JobSpec], watch: bool, on_failed: str) -> asyncio.Future[Any]:
        job_ids = tuple(spec.job_id for spec in specs) if watch else ()
        try:
            if len(specs) == 1 and _large_bytes(specs[0]) > BATCH_BYTES:  # the server could only refuse the frame
                raise TooLarge(
                    f"job {specs[0].job_id!r} has more than {BATCH_BYTES} bytes of payload, arguments and inline files; "
                    "give large things as files, which are uploaded as blobs"
                )
            call = self._ask(lambda msg_id: SubmitJobs(msg_id, specs, watch, on_failed), watch=job_ids)
        except TasukiError:
            self._submits.release()
            raise
        call.add_done_callback(lambda _: self._submits.release())
        return call

    def _read_exceptions(self, accepted: Accepted, jobs: list[AwaitedJob], start: int) -> TasukiError | None:
        first: TasukiError | None = None
        for item in accepted.exceptions:
            job = jobs[start + item.index]
            if item.code:
                error = from_wire(item.code, item.message, item.details)
                first = first or error
                if not self._let_go(job):
                    job = jobs[start + item.index] = AwaitedJob(job.job_id)
                job.settle(None, error)
            else:
                job.existed = True
        return first

    def _awaited(self, job_id: str, watch: bool) -> AwaitedJob:
        if not watch:
            return AwaitedJob(job_id)
        job = self._jobs.get(job_id)
        if job is None:
            job = self._jobs[job_id] = AwaitedJob(job_id)
        else:
            job.holders += 1
        return job

    def _let_go(self, job: AwaitedJob) -> bool:
        """Take away one submit of the job, which was refused; return if it was the only one."""
        job.holders -= 1
        if job.holders > 0:
            return False
        if self._jobs.get(job.job_id) is job:
            del self._jobs[job.job_id]
        return True

    def _drop(self, jobs: Iterable[AwaitedJob]) -> None:
        job_ids = [job.job_id for job in jobs if self._let_go(job)]
        self._apply(Unwatch(job_ids))
        if self._connection.link is not None:
            self._connection.link.forget(job_ids)

    # ------------------------------------------------------------------------------------------------ asking

    def job(self, job_id: str) -> AsyncJobHandle[bytes]:
        """Return a job that was submitted before, by this or another process, to wait for its result."""
        check_job_ids([job_id])
        job = self._awaited(job_id, watch=True)
        if self._closed:
            job.settle(None, Unavailable("this client was closed"))
        elif not job.done:
            self._apply(Watch([job_id]))
        return AsyncJobHandle(job, self, unchanged)

    async def status(self, job_id: str) -> JobStatus:
        """Return everything that the caller may know of a job; NotFound for an unknown id."""
        return (await self.statuses(job_id))[0]

    async def statuses(self, *job_ids: str) -> list[JobStatus]:
        """Return up to 1,000 jobs in the order of the ids; NotFound if one is unknown."""
        return read_answer(await self.call("get", job_ids=check_job_ids(job_ids)), list[JobStatus])

    async def list_jobs(
        self,
        *,
        states: Iterable[State | str] = (),
        subject: str | None = None,
        array_id: str | None = None,
        worker_id: str | None = None,
        text: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> JobPage:
        """Return the newest jobs, of these states, this subject (`*` and `>` allowed), array or worker, with this text in the id
        or the error.

            for job in await client.list_jobs(states=["FAILED"], subject="render.>"):
                print(job.job_id, job.outcome)

        The `cursor` of a page gives the next one.
        """
        chosen = [states] if isinstance(states, str) else states
        filter = {"subject": subject, "array_id": array_id, "worker_id": worker_id, "text": text}
        given = {name: value for name, value in filter.items() if value is not None}
        page = await self.call("find", states=[str(state) for state in chosen], limit=limit, cursor=cursor, **given)
        return read_answer(page, JobPage)

    async def cancel(self, *job_ids: str, reason: str = "") -> dict[str, CancelAnswer]:
        """Cancel up to 1,024 jobs: waiting ones at once, running ones when their worker has stopped them. Ended ones stay.

        await client.cancel("nightly-1", "nightly-2", reason="wrong input")
        """
        named = check_job_ids(job_ids)
        return read_answer(await self._ask(lambda msg_id: CancelJobs(msg_id, named, reason)), dict[str, CancelAnswer])

    async def retry(self, *job_ids: str, reason: str = "") -> dict[str, RetryAnswer]:
        """Run up to 1,024 jobs again that have ended, with fresh budgets of retries and losses.

        Never repeated: if the connection is lost before the answer, Unavailable is raised and the jobs may run again or not; read
        their status before another try.
        """
        answer = await self.call("requeue", job_ids=check_job_ids(job_ids), reason=reason)
        return read_answer(answer, dict[str, RetryAnswer])

    async def explain(self, job_id: str) -> Explanation:
        """Return why a job waits, where it runs, or how it ended, and what happened to it: `print(await client.explain(id))`."""
        [named] = check_job_ids([job_id])
        return read_answer(await self.call("explain", job_id=named), Explanation)

    async def logs(
        self, job_id: str, stream: str = "stdout", *, offset: int = 0, follow: bool = True
    ) -> AsyncGenerator[bytes, None]:
        """Yield the output of a command as it comes, to the job's end; follow=False: the output so far.

        A line marks a place where output was cut out of the middle. A new attempt begins anew. `tasuki.client.logs.LogFollower`
        also knows attempt and offset of each piece.
        """
        check_job_ids([job_id])
        async with aclosing(LogFollower(self, job_id, stream, offset=offset).parts(follow=follow)) as parts:
            async for part in parts:
                yield part.text

    async def progress(self, job_id: str) -> AsyncGenerator[Progress, None]:
        """Yield the reports of progress of a running job as they come, to the job's end; of a job that has ended, the last one.

            async for told in client.progress(job_id):
                print(f"{told.fraction:.0%} {told.text}")

        A new attempt begins anew. A follower that comes later gets the latest reports first; one that is slower than the job may
        miss some, but not the last.
        """
        check_job_ids([job_id])
        async with aclosing(LogFollower(self, job_id, PROGRESS_STREAM).progress()) as reports:
            async for told in reports:
                yield told

    async def counts(self, limit: int = 1000) -> dict[str, GroupCounts]:
        """Count jobs by group and state: of the groups with the most jobs, and of all others as "(other)". For admins."""
        return read_answer(await self.call("counts", limit=limit), dict[str, GroupCounts])

    async def workers(self) -> list[WorkerStatus]:
        """Return the connected workers. For admins."""
        return read_answer(await self.call("workers"), list[WorkerStatus])

    def beside(self, url: str, connect_timeout_s: float) -> AsyncClient | None:
        """Return a second client, not open yet, for a server that this one named; None if its address is not to be trusted."""
        address = believed(url, parse_url(self._url or ""))
        if address is None:
            return None
        return AsyncClient(str(address), token=self._token, tls_ca=self._tls_ca, connect_timeout_s=connect_timeout_s)

    # ------------------------------------------------------------------------------------------------ files and results

    async def _input(self, file: InputFile | str | os.PathLike[str]) -> InputFile:
        if isinstance(file, InputFile):
            return file
        path = Path(file)
        size = path.stat().st_size
        if size <= BODY_INLINE_MAX_BYTES // 4:
            return InputFile(path.name, data=path.read_bytes())
        ref = await self.put_file(path)
        return InputFile(path.name, sha256=ref.sha256, size_bytes=ref.size_bytes)

    async def with_payload_uploaded(self, spec: JobSpec) -> JobSpec:
        """Return a handler's job whose payload is an uploaded file if it is too large to come with the job."""
        inline_bytes = len(spec.payload) + sum(len(file.data or b"") for file in spec.files)
        if spec.exec or inline_bytes <= BODY_INLINE_MAX_BYTES or not spec.payload:
            return spec
        ref = BlobRef(hashlib.sha256(spec.payload).hexdigest(), len(spec.payload))
        with io.BytesIO(spec.payload) as file:
            await self._blobs.put(file, ref)
        large = InputFile(PAYLOAD_FILE, sha256=ref.sha256, size_bytes=ref.size_bytes)
        return replace(spec, payload=b"", files=(*spec.files, large))

    async def put_file(self, path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> BlobRef:
        """Upload a file as a blob, in chunks; nothing is sent if the server has it. An upload that was cut off is continued."""
        file = await asyncio.to_thread(Path(path).open, "rb")
        with file:
            digest = await asyncio.to_thread(hashlib.file_digest, file, "sha256")
            ref = BlobRef(digest.hexdigest(), file.tell())
            await self._blobs.put(file, ref, progress)
        return ref

    async def result_bytes(self, ended: JobResult) -> bytes:
        """Return the whole result; for large ones use `save_result`."""
        outcome = ended.outcome
        if outcome.result_ref is None:
            return outcome.result or b""
        pieces: list[bytes] = []
        await self._blobs.get(outcome.result_ref, ended.job_id, pieces.append)
        return b"".join(pieces)

    async def open_result(self, ended: JobResult) -> BinaryIO | None:
        """Return the result as a temporary file, which is in memory if it is small; None if there is none."""
        outcome = ended.outcome
        if outcome.result is None and outcome.result_ref is None:
            return None
        file = cast(BinaryIO, tempfile.SpooledTemporaryFile(SPOOL_BYTES))  # noqa: SIM115 - closed by the caller
        try:
            if outcome.result_ref is None:
                file.write(outcome.result or b"")
            else:
                await self._blobs.get(outcome.result_ref, ended.job_id, file.write)
        except BaseException:
            file.close()
            raise
        return file

    async def save_result(
        self, ended: JobResult, path: str | os.PathLike[str], progress: Callable[[int], None] | None = None
    ) -> int:
        """Write the result to a file, verified, and return its size. The file appears whole or not at all.

        `progress` is told how many bytes of a large one have come.
        """
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
        outcome = ended.outcome
        try:
            file = await asyncio.to_thread(temporary.open, "wb")
            with file:
                if outcome.result_ref is None:
                    file.write(outcome.result or b"")
                else:
                    tell = progress or (lambda done: None)
                    await self._blobs.get(outcome.result_ref, ended.job_id, lambda data: tell(file.tell() + file.write(data)))
                size = file.tell()
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        return size


def _which_job(submit: SubmitJobs, error: InvalidInput) -> InvalidInput:
    for spec in submit.specs:
        try:
            encode(SubmitJobs(0, [spec]), max_bytes=FRAME_MAX_BYTES)
        except InvalidInput as own:
            return type(own)(f"job {spec.job_id[:128]!r}: {own.message}")
    return error


def _large_bytes(spec: JobSpec) -> int:
    size = len(spec.payload)
    if spec.args or spec.files or spec.env or spec.headers:
        size += sum(map(len, spec.args)) + sum(len(file.data or b"") + 200 for file in spec.files)
        size += sum(len(name) + len(value) for name, value in (*spec.env.items(), *spec.headers.items()))
    return size
