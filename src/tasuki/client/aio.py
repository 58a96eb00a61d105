"""The asynchronous client: drives a ClientMachine over a Link. The blocking client and the CLI are built on it."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import random
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tasuki.client.embedded import ensure_server
from tasuki.client.logs import LogFollower
from tasuki.clocks import now
from tasuki.config import DataFolder, data_folder, default_url, find_token
from tasuki.core.address import parse_url
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
from tasuki.core.job import BODY_INLINE_MAX_BYTES, BlobRef, IdMaker, InputFile, JobSpec, State
from tasuki.core.machine import Closed, Hangup, Opened, Received, Send, Ticked
from tasuki.core.protocol import (
    BATCH_BYTES,
    FRAME_MAX_BYTES,
    Accepted,
    CancelJobs,
    HelloClient,
    JobResult,
    Message,
    Request,
    SubmitJobs,
    Welcome,
    batches,
)
from tasuki.core.reconnect import Connect, believed
from tasuki.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    JobFailed,
    TasukiError,
    TooLarge,
    Unavailable,
    from_wire,
)
from tasuki.event_loop import BackgroundTasks
from tasuki.net import ServerConnection, client_tls
from tasuki.version import __version__
from tasuki.wire.compression import CODECS
from tasuki.wire.messages import encode

TICK_S = 0.05
SUBMITS_AT_ONCE = 32  # frames of up to 1 MiB on their way; all at once, a link would be cut for holding too much


class AsyncJobHandle:
    """Awaitable result of one job. The future is made only when somebody waits."""

    __slots__ = ("_client", "_error", "_result", "_waiter", "existed", "holders", "job_id")

    def __init__(self, job_id: str, client: AsyncClient) -> None:
        self.job_id = job_id
        self.existed = False
        """The server knew this job before."""
        self.holders = 1
        """Number of submits of this id that share the handle; a refused one must not end the wait of the others."""
        self._client = client
        self._result: JobResult | None = None
        self._error: TasukiError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        return self._result is not None or self._error is not None

    def settle(self, result: JobResult | None, error: TasukiError | None = None) -> None:
        """Set the end of the job. Called by the client."""
        self._result, self._error = result, error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def outcome(self, timeout: float | None = None) -> JobResult:
        """Wait for the end of the job, in any state; DeadlineExceeded after `timeout` seconds."""
        if not self.done:
            if self._waiter is None or self._waiter.done():
                self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout):
                    await asyncio.shield(self._waiter)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"job {self.job_id!r} has not ended within {timeout:g} s; it goes on: ask again with the same id"
                ) from None
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    async def result(self, timeout: float | None = None) -> bytes:
        """Return the result's bytes (of a command: a ZIP); JobFailed if the job ended in another state than SUCCEEDED."""
        ended = await self.outcome(timeout)
        if ended.state is not State.SUCCEEDED:
            outcome = ended.outcome
            reason = outcome.message or outcome.error_code or "no reason was given"
            raise JobFailed(f"job {self.job_id!r} is {ended.state} after attempt {ended.attempt}: {reason}", outcome=ended)
        return await self._client.result_bytes(ended)


class AsyncClient:
    """Submits jobs and asks about them: `async with AsyncClient(url) as client`.

    No `url`: TASUKI_URL, else the server that owns the data folder, else an embedded one that is started for the time being.
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
        self._handles: dict[str, AsyncJobHandle] = {}
        self._dials = 0
        self._tasks = BackgroundTasks()
        self._closed = False
        self._last_problem = "no address was tried yet"
        self._tls_ca = tls_ca
        self._connection = ServerConnection(self._on_event, client_tls(tls_ca))
        self._blobs = self._connection.blobs
        self._submits = asyncio.Semaphore(SUBMITS_AT_ONCE)
        self.welcome: Welcome | None = None

    # ------------------------------------------------------------------------------------------------ life

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
            raise ConfigError(f"{self._url} is not encrypted, a CA file is of no use for it; is it https://?")
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
            await self.close()
            raise Unavailable(
                f"no server at {self._url} within {self._connect_timeout_s:g} s; the last try: {self._last_problem}"
            ) from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the connection. Jobs go on; their results can be asked for later by id."""
        self._closed = True
        await self._connection.close()
        await self._tasks.close()
        closed = Unavailable("this client was closed")
        for ticket in list(self._calls):
            self._answer(ticket, None, closed)
        for handle in list(self._handles.values()):
            handle.settle(None, closed)

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
                handles = self._handles
                for item in command.items:
                    handle = handles.pop(item.job_id, None)
                    if handle is not None:
                        handle.settle(item)
            case CallAnswered():
                self._answer(command.ticket, command.answer, command.error)
            case Connect():
                self._dial(command)
            case Hangup():
                self._connection.hang_up(command.error)
            case Welcomed():
                self.welcome = command.welcome
                if not self._ready.done():
                    self._ready.set_result(None)
            case WatchRefused():
                for job_id in command.job_ids:
                    handle = self._handles.pop(job_id, None)
                    if handle is not None:
                        handle.settle(None, command.error)
            case Failed():
                self._blobs.close(command.error)
                if not self._ready.done():
                    self._ready.set_exception(command.error)

    def _send(self, message: Message) -> None:
        """Send a message; if it cannot be encoded, its own call fails, and the link and all other calls go on."""
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

    async def request(self, verb: str, **params: Any) -> Any:
        """Make a request of the protocol by name (docs/wire.md lists them)."""
        return await self._ask(lambda msg_id: Request(msg_id, verb, params))

    # ------------------------------------------------------------------------------------------------ jobs

    def new_id(self) -> str:
        """Return a new, time-ordered job_id."""
        return self._make_id()

    def new_ids(self, count: int) -> list[str]:
        return self._make_id.many(count)

    async def submit(
        self,
        *,
        job_id: str | None = None,
        files: Iterable[InputFile | str | os.PathLike[str]] = (),
        on_failed: str = "return",
        watch: bool = True,
        **fields: Any,
    ) -> AsyncJobHandle:
        """Submit one job, named by keyword as in JobSpec. The same job_id and body again gives the same job."""
        inputs = tuple([await self._input(file) for file in files])
        fields["args"] = tuple(fields.get("args", ()))
        spec = JobSpec(job_id=job_id or self.new_id(), files=inputs, **fields)
        return (await self.submit_many([spec], on_failed=on_failed, watch=watch))[0]

    async def submit_many(
        self, specs: Sequence[JobSpec], *, on_failed: str = "return", watch: bool = True, strict: bool = True
    ) -> list[AsyncJobHandle]:
        """Submit many jobs in as few frames as possible; returns when all are durable.

        A refused job raises its error (Conflict, InvalidInput, …); with strict=False its handle carries it instead. With
        on_failed="rerun" a lost connection is Unavailable, and the jobs may run or not; otherwise the request is repeated.
        """
        handles = [self._handle(spec.job_id, watch) for spec in specs]
        calls: list[tuple[int, asyncio.Future[Any]]] = []
        first: TasukiError | None = None
        start = 0
        try:
            for some in batches(specs, _large_bytes):
                await self._submits.acquire()
                calls.append((start, self._ask_submit(list(some), watch, on_failed)))
                start += len(some)
            for start, call in calls:
                first = self._read_exceptions(await call, handles, start) or first
        except TasukiError:
            for _, other in calls:
                if not other.cancel() and not other.cancelled():
                    other.exception()  # failed for the same reason; retrieved, so that asyncio does not log it
            self._drop(handles)
            raise
        if first is not None and strict:
            raise first
        return handles

    def _ask_submit(self, specs: list[JobSpec], watch: bool, on_failed: str) -> asyncio.Future[Any]:
        job_ids = tuple(spec.job_id for spec in specs) if watch else ()
        try:
            if len(specs) == 1 and _large_bytes(specs[0]) > BATCH_BYTES:  # the server could only close the connection
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

    def _read_exceptions(self, accepted: Accepted, handles: list[AsyncJobHandle], start: int) -> TasukiError | None:
        first: TasukiError | None = None
        for item in accepted.exceptions:
            handle = handles[start + item.index]
            if item.code:
                error = from_wire(item.code, item.message, item.details)
                first = first or error
                if not self._let_go(handle):
                    handle = handles[start + item.index] = AsyncJobHandle(handle.job_id, self)
                handle.settle(None, error)
            else:
                handle.existed = True
        return first

    def _handle(self, job_id: str, watch: bool) -> AsyncJobHandle:
        if not watch:
            return AsyncJobHandle(job_id, self)
        handle = self._handles.get(job_id)
        if handle is None:
            handle = self._handles[job_id] = AsyncJobHandle(job_id, self)
        else:
            handle.holders += 1
        return handle

    def _let_go(self, handle: AsyncJobHandle) -> bool:
        """Take away one submit of the handle, which was refused; return if it was the only one."""
        handle.holders -= 1
        if handle.holders > 0:
            return False
        if self._handles.get(handle.job_id) is handle:
            del self._handles[handle.job_id]
        return True

    def _drop(self, handles: Iterable[AsyncJobHandle]) -> None:
        job_ids = [handle.job_id for handle in handles if self._let_go(handle)]
        self._apply(Unwatch(job_ids))
        if self._connection.link is not None:
            self._connection.link.forget(job_ids)

    def job(self, job_id: str) -> AsyncJobHandle:
        """Return a job that was submitted before, by this or another process, to wait for its result."""
        handle = self._handle(job_id, watch=True)
        if self._closed:
            handle.settle(None, Unavailable("this client was closed"))
        elif not handle.done:
            self._apply(Watch([job_id]))
        return handle

    async def status(self, job_id: str, *, result: bool = False) -> dict[str, Any]:
        """Return everything that the caller may know of a job; NotFound for an unknown id."""
        return (await self.request("get", job_ids=[job_id], result=result))[0]

    async def statuses(self, job_ids: Sequence[str]) -> list[dict[str, Any]]:
        return await self.request("get", job_ids=list(job_ids))

    async def find(self, *, limit: int = 50, cursor: str | None = None, **filter: Any) -> dict[str, Any]:
        """Return {"jobs", "cursor"}, newest first; filters as in `core.store_messages.Filter`."""
        return await self.request("find", limit=limit, cursor=cursor, **filter)

    async def cancel(self, job_ids: Sequence[str], reason: str = "") -> dict[str, Any]:
        """Cancel jobs; return for each id its state, and if a worker was asked to stop it."""
        return await self._ask(lambda msg_id: CancelJobs(msg_id, list(job_ids), reason))

    async def requeue(self, job_ids: Sequence[str], reason: str = "") -> dict[str, Any]:
        """Run finished jobs again. Never repeated: if the connection is lost before the answer, Unavailable is raised and the
        jobs may run again or not; read their status before another try."""
        return await self.request("requeue", job_ids=list(job_ids), reason=reason)

    async def explain(self, job_id: str) -> dict[str, Any]:
        return await self.request("explain", job_id=job_id)

    async def logs(
        self, job_id: str, stream: str = "stdout", *, offset: int = 0, follow: bool = True
    ) -> AsyncGenerator[bytes, None]:
        """Yield the output of a command as it comes, to the job's end; follow=False: the output so far.

        A line marks a place where output was cut out of the middle. A new attempt begins anew. `tasuki.client.logs.LogFollower`
        also knows attempt and offset of each piece.
        """
        async with aclosing(LogFollower(self, job_id, stream, offset=offset).parts(follow=follow)) as parts:
            async for part in parts:
                yield part.text

    def beside(self, url: str, connect_timeout_s: float) -> AsyncClient | None:
        """Return a second client, not open yet, for a server that this one named; None if its address is not to be trusted."""
        address = believed(url, parse_url(self._url or ""))
        if address is None:
            return None
        return AsyncClient(str(address), token=self._token, tls_ca=self._tls_ca, connect_timeout_s=connect_timeout_s)

    async def counts(self, limit: int = 1000) -> dict[str, dict[str, int]]:
        """Count jobs by group and state: of the groups with the most jobs, and of all others as "(other)"."""
        return await self.request("counts", limit=limit)

    async def workers(self) -> list[dict[str, Any]]:
        return await self.request("workers")

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

    async def save_result(self, ended: JobResult, path: str | os.PathLike[str]) -> int:
        """Write the result to a file, verified, and return its size. The file appears whole or not at all."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
        outcome = ended.outcome
        try:
            file = await asyncio.to_thread(temporary.open, "wb")
            with file:
                if outcome.result_ref is None:
                    file.write(outcome.result or b"")
                else:
                    await self._blobs.get(outcome.result_ref, ended.job_id, file.write)
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
