"""The blocking client: an AsyncClient in an event loop that has a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import suppress
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from tasuki.client.aio import AsyncClient, OnFailed
from tasuki.client.types import AsyncJobHandle, CancelAnswer, CommandResult, JobStatus
from tasuki.core.job import BROADCAST_WITHIN_S, JobSpec, Progress
from tasuki.core.protocol import JobResult
from tasuki.core.units import shown_duration
from tasuki.errors import DeadlineExceeded, Unavailable
from tasuki.event_loop import loop_factory
from tasuki.net.messages import MessageSubscription

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
Q = ParamSpec("Q")
CLOSE_TIMEOUT_S = 5.0


class LoopThread:
    """An event loop in a thread of its own. Safe to share between threads.

    The constructor waits for `opening`; if that fails, the thread has ended. Closing runs `leaving`. A thread that nobody closed
    is closed when the interpreter exits: one that still ran then would be ended inside the loop's native code, which can crash.
    """

    def __init__(
        self, name: str, opening: Coroutine[Any, Any, object], leaving: Callable[[], Coroutine[Any, Any, object]]
    ) -> None:
        self.loop = (loop_factory() or asyncio.new_event_loop)()
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._leaving = leaving
        self._closing = False
        self._pid = os.getpid()
        self._waits: set[futures.Future[Any]] = set()
        self._lock = threading.Lock()
        self.thread.start()
        atexit.register(self.close, cancel=True)
        try:
            self.wait(opening)
        except BaseException:
            self._stop()
            raise

    @property
    def closed(self) -> bool:
        return self._closing or self.loop.is_closed()

    @property
    def _is_copy(self) -> bool:
        """True in a process that was forked: the thread is not there."""
        return os.getpid() != self._pid

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it; Ctrl-C ends the wait and the work."""
        if self.closed:
            work.close()
            raise Unavailable("this client was closed")
        return self._wait(work)

    def begin(self, work: Coroutine[Any, Any, T]) -> futures.Future[T]:
        """Run a coroutine there, and return the future of its result."""
        if self._closing:
            work.close()
            raise Unavailable("this client was closed")
        future = self._begin(work)
        future.add_done_callback(self._waits.discard)
        return future

    def _begin(self, work: Coroutine[Any, Any, T]) -> futures.Future[T]:
        if self._is_copy:
            work.close()
            raise Unavailable(f"this client was made by process {self._pid}, and this is a fork of it; make one in each process")
        with self._lock:
            if self.loop.is_closed():
                work.close()
                raise Unavailable("this client was closed")
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
            self._waits.add(future)
        return future

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._begin(work)
        try:
            return future.result()
        except futures.CancelledError:
            if self._closing:
                raise Unavailable("this client was closed") from None
            raise
        except BaseException:
            future.cancel()
            raise
        finally:
            self._waits.discard(future)

    def close(self, *, cancel: bool = False) -> None:
        """Run `leaving`, then end the thread. With `cancel`, other threads do not get their answers first. May be repeated."""
        if self.closed or self._is_copy:
            return
        self._closing = True
        if cancel:
            for future in list(self._waits):
                future.cancel()
        try:
            self._wait(self._leave())
        finally:  # also after Ctrl-C: the thread and its loop must not stay
            self._stop()

    async def _leave(self) -> None:
        await self._leaving()
        # The work of other threads has its answer now, and must get out of the loop before the loop ends.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            _, late = await asyncio.wait(others, timeout=CLOSE_TIMEOUT_S)
            for task in late:
                task.cancel()

    def _stop(self) -> None:
        atexit.unregister(self.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        with self._lock:  # a call that came after the loop had ended would wait for ever
            for future in list(self._waits):
                future.cancel()
            self.loop.close()


def _each(client: HandleThread, pieces: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """Yield what an asynchronous generator of the client yields; closing this one closes it."""

    async def following() -> T | None:
        return await anext(pieces, None)

    async def closed() -> None:
        await pieces.aclose()

    try:
        while (piece := client.wait(following())) is not None:
            yield piece
    finally:
        with suppress(Unavailable):  # the client was closed, and the generator with it
            client.wait(closed())


def _blocking(method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Client, P], T]:
    """Return the blocking form of a method of AsyncClient."""

    @_documented_as(method)
    def call(client: Client, /, *args: P.args, **options: P.kwargs) -> T:
        return client.wait(method(client.aio, *args, **options))

    return call


def _handle(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, AsyncJobHandle[T]]],
) -> Callable[Concatenate[Client, P], JobHandle[T]]:
    """Return the blocking form of a method of AsyncClient that returns a handle."""

    @_documented_as(method)
    def call(client: Client, /, *args: P.args, **options: P.kwargs) -> JobHandle[T]:
        return JobHandle(client.wait(method(client.aio, *args, **options)), client)

    return call


def _in_loop(method: Callable[Concatenate[AsyncClient, P], T]) -> Callable[Concatenate[Client, P], T]:
    """Return a method of AsyncClient that does not wait, for use from any thread."""

    @_documented_as(method)
    def call(client: Client, /, *args: P.args, **options: P.kwargs) -> T:
        async def result() -> T:
            return method(client.aio, *args, **options)

        return client.wait(result())

    return call


def _documented_as(method: Callable[..., Any]) -> Callable[[Callable[Q, T]], Callable[Q, T]]:
    """Give a function the name, signature and docstring of an asynchronous one, without its `await`."""

    def document(function: Callable[Q, T]) -> Callable[Q, T]:
        function = functools.wraps(method)(function)
        function.__doc__ = (method.__doc__ or "").replace("await ", "").replace("AsyncClient", "Client")
        return function

    return document


class HandleThread(Protocol):
    """The part of a Client that a handle uses: it runs coroutines, for threads and for event loops."""

    def wait(self, work: Coroutine[Any, Any, R]) -> R: ...
    def begin(self, work: Coroutine[Any, Any, R]) -> futures.Future[R]: ...
    def future(self, work: Coroutine[Any, Any, R]) -> asyncio.Future[R]: ...


class JobHandle(Generic[T]):
    """One job; `result()` blocks until the job has ended. In an event loop, `await` it instead.

    job = client.submit(subject="math.square", payload=b"7")
    print(job.job_id, job.result(timeout=60))        # … b'49'
    """

    __slots__ = ("_client", "_handle")

    def __init__(self, handle: AsyncJobHandle[T], client: HandleThread) -> None:
        self._handle = handle
        self._client = client

    def __repr__(self) -> str:
        return repr(self._handle).replace("AsyncJobHandle", "JobHandle")

    def __await__(self) -> Generator[Any, None, T]:
        return self._client.future(self._handle.result()).__await__()

    @property
    def job_id(self) -> str:
        return self._handle.job_id

    @property
    def existed(self) -> bool:
        """True if the server knew this job before: nothing runs twice."""
        return self._handle.existed

    @property
    def done(self) -> bool:
        """True if the end of the job is known here; then `result` and `outcome` do not wait."""
        return self._handle.done

    @property
    def ended(self) -> JobResult | None:
        """The end of the job, if it is known here."""
        return self._handle.ended

    def decoded_by(self, decode: Callable[[bytes], R]) -> JobHandle[R]:
        """Return a handle of the same job whose result is `decode(bytes)`, as in `job.decoded_by(json.loads)`."""
        return JobHandle(self._handle.decoded_by(decode), self._client)

    def outcome(self, timeout: float | None = None) -> JobResult:
        """Wait for the end of the job, in any state; DeadlineExceeded (a TimeoutError) after `timeout` seconds."""
        return self._handle.ended or self._client.wait(self._handle.outcome(timeout))

    def begin_outcome(self) -> futures.Future[JobResult]:
        """Return the future of the end of the job, for `concurrent.futures.wait`; `as_completed` uses it."""
        return self._client.begin(self._handle.outcome())

    def result(self, timeout: float | None = None) -> T:
        """Return what the handler returned; JobFailed if the job did not succeed, DeadlineExceeded if it takes longer."""
        ended = self.outcome(timeout)
        if ended.outcome.result_ref is not None:
            return self._client.wait(self._handle.result())
        return self._handle.inline_result(ended)  # without the way to the client's thread and back

    def command_result(self, timeout: float | None = None, *, check: bool = True) -> CommandResult:
        """Return a command's exit code, output and files; JobFailed if it did not succeed, unless check=False."""
        return self._client.wait(self._handle.command_result(timeout, check=check))

    def status(self) -> JobStatus:
        """Return everything that the server knows of the job."""
        return self._client.wait(self._handle.status())

    def progress(self) -> Iterator[Progress]:
        """Yield the reports of progress as they come, to the end of the job; see Client.progress."""
        return _each(self._client, self._handle.progress())

    def cancel(self, reason: str = "") -> CancelAnswer:
        """Cancel the job; see Client.cancel."""
        return self._client.wait(self._handle.cancel(reason))


class Client:
    """Blocking client, with the methods of AsyncClient. Safe to share between threads.

        with Client() as client:
            print(client.run("echo", "hi").stdout)

    No `url`: TASUKI_URL, else the server that owns the data folder, else an embedded one that is started for the time being.
    No token: TASUKI_TOKEN; the unix socket of the same user needs none. A call with an argument of the wrong type raises
    WrongType (a TypeError) and sends nothing.
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
        self._async = AsyncClient(
            url,
            token=token,
            token_file=token_file,
            client_id=client_id,
            data=data,
            tls_ca=tls_ca,
            connect_timeout_s=connect_timeout_s,
        )
        self._thread = LoopThread("tasuki-client", self._async.open(), self._async.close)

    def __repr__(self) -> str:
        return repr(self._async).replace("AsyncClient", "Client")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Jobs continue; their results can be asked for later by id."""
        self._thread.close()

    @property
    def aio(self) -> AsyncClient:
        """The asynchronous client underneath; its methods run in the client's thread: `client.wait(client.aio.…)`."""
        return self._async

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the asynchronous client and wait for it; Ctrl-C ends the wait and the work."""
        return self._thread.wait(work)

    def begin(self, work: Coroutine[Any, Any, T]) -> futures.Future[T]:
        """Run a coroutine of the asynchronous client, and return the future of its result for any thread."""
        return self._thread.begin(work)

    def future(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run a coroutine of the asynchronous client, and return a future for the running loop of the caller."""
        return asyncio.wrap_future(self.begin(work))

    @property
    def connected(self) -> bool:
        """True while a server has accepted this client and the connection stands; otherwise the client keeps trying."""
        return self._async.connected

    submit = _handle(AsyncClient.submit)
    run = _blocking(AsyncClient.run)
    status = _blocking(AsyncClient.status)
    statuses = _blocking(AsyncClient.statuses)
    list_jobs = _blocking(AsyncClient.list_jobs)
    cancel = _blocking(AsyncClient.cancel)
    retry = _blocking(AsyncClient.retry)
    explain = _blocking(AsyncClient.explain)
    counts = _blocking(AsyncClient.counts)
    workers = _blocking(AsyncClient.workers)
    call = _blocking(AsyncClient.call)
    publish = _blocking(AsyncClient.publish)
    flush = _blocking(AsyncClient.flush)
    request = _blocking(AsyncClient.request)
    put_file = _blocking(AsyncClient.put_file)
    put_cache = _blocking(AsyncClient.put_cache)
    caches = _blocking(AsyncClient.caches)
    cache = _blocking(AsyncClient.cache)
    remove_cache = _blocking(AsyncClient.remove_cache)
    with_payload_uploaded = _blocking(AsyncClient.with_payload_uploaded)
    result_bytes = _blocking(AsyncClient.result_bytes)
    open_result = _blocking(AsyncClient.open_result)
    save_result = _blocking(AsyncClient.save_result)
    new_id = _in_loop(AsyncClient.new_id)
    new_ids = _in_loop(AsyncClient.new_ids)

    @_documented_as(AsyncClient.submit_many)
    def submit_many(
        self, specs: Sequence[JobSpec], *, on_failed: OnFailed = "return", watch: bool = True, strict: bool = True
    ) -> list[JobHandle[bytes]]:
        handles = self.wait(self._async.submit_many(specs, on_failed=on_failed, watch=watch, strict=strict))
        return [JobHandle(handle, self) for handle in handles]

    @_documented_as(AsyncClient.broadcast)
    def broadcast(
        self, spec: JobSpec, *, within_s: float = BROADCAST_WITHIN_S, on_failed: OnFailed = "return", watch: bool = True
    ) -> list[JobHandle[bytes]]:
        handles = self.wait(self._async.broadcast(spec, within_s=within_s, on_failed=on_failed, watch=watch))
        return [JobHandle(handle, self) for handle in handles]

    @_documented_as(AsyncClient.job)
    def job(self, job_id: str) -> JobHandle[bytes]:
        async def watch() -> AsyncJobHandle[bytes]:
            return self._async.job(job_id)

        return JobHandle(self.wait(watch()), self)

    def subscribe(self, pattern: str, *, queue: str = "") -> MessageSubscription:
        """Return the messages whose subjects match, from now on, for `for`.

            for message in client.subscribe("prices.>"):
                print(message.subject, message.payload)

        Of all subscribers with the same `queue`, one gets a message. A slow reader loses messages: `dropped` counts them.
        """
        return MessageSubscription(self._async.subscribe(pattern, queue=queue), self.wait)

    def logs(self, job_id: str, stream: str = "stdout", *, offset: int = 0, follow: bool = True) -> Iterator[bytes]:
        """Yield the output of a command as it comes, to the job's end; follow=False: the output so far.

        Closing the iterator early leaves the job alone.
        """
        return _each(self, self._async.logs(job_id, stream, offset=offset, follow=follow))

    def progress(self, job_id: str) -> Iterator[Progress]:
        """Yield the reports of progress of a running job as they come, to the job's end; of a job that has ended, the last one.

            for told in client.progress(job_id):
                print(f"{told.fraction:.0%} {told.text}")

        Closing the iterator early leaves the job alone.
        """
        return _each(self, self._async.progress(job_id))


# ---------------------------------------------------------------------------------------------------- many jobs


class CompletedJobs(Generic[T]):
    """Jobs in the order in which they end, for `for` and for `async for`. `as_completed` makes it."""

    def __init__(self, jobs: Sequence[JobHandle[T]], timeout: float | None) -> None:
        self._jobs = jobs
        self._timeout = timeout

    def __iter__(self) -> Iterator[JobHandle[T]]:
        waiting = {job.begin_outcome(): job for job in self._jobs}
        try:
            for future in futures.as_completed(waiting, self._timeout):
                yield waiting.pop(future)
        except futures.TimeoutError:
            raise self._late(len(waiting)) from None
        finally:
            for future in waiting:
                future.cancel()

    async def __aiter__(self) -> AsyncIterator[JobHandle[T]]:
        ended: asyncio.Queue[JobHandle[T]] = asyncio.Queue()
        waiting = {asyncio.wrap_future(job.begin_outcome()): job for job in self._jobs}
        for future, job in waiting.items():
            future.add_done_callback(functools.partial(_note_end, ended, job))
        left = len(waiting)
        deadline = None if self._timeout is None else asyncio.get_running_loop().time() + self._timeout
        try:
            while left:
                try:
                    async with asyncio.timeout_at(deadline):  # not around the yield: it would cancel the task of the caller
                        job = await ended.get()
                except TimeoutError:
                    raise self._late(left) from None
                left -= 1
                yield job
        finally:
            for future in waiting:
                future.cancel()

    def _late(self, left: int) -> DeadlineExceeded:
        waited = shown_duration(self._timeout or 0.0)
        return DeadlineExceeded(f"{left} of {len(self._jobs)} jobs have not ended within {waited}; they go on")


def _note_end(ended: asyncio.Queue[JobHandle[T]], job: JobHandle[T], future: asyncio.Future[JobResult]) -> None:
    if not future.cancelled():
        future.exception()  # the handle raises it again
        ended.put_nowait(job)


def as_completed(jobs: Iterable[JobHandle[T]], timeout: float | None = None) -> CompletedJobs[T]:
    """Return the jobs in the order in which they end, with `for` or `async for`; DeadlineExceeded after `timeout` seconds.

    for job in as_completed(resize.map(paths)):
        print(job.result())
    """
    return CompletedJobs(list(jobs), timeout)


def gather(jobs: Iterable[JobHandle[T]], timeout: float | None = None) -> list[T]:
    """Return the results in the order of the jobs; JobFailed for the first that failed, DeadlineExceeded if they take longer.

    In an event loop, use `await asyncio.gather(*jobs)`.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    return [job.result(None if deadline is None else max(0.0, deadline - time.monotonic())) for job in jobs]
