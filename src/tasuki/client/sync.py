"""The blocking client: an AsyncClient in an event loop that has a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent import futures
from types import TracebackType
from typing import Any, Self, TypeVar

from tasuki.client.aio import AsyncClient, AsyncJobHandle
from tasuki.core.job import JobSpec
from tasuki.core.protocol import JobResult
from tasuki.errors import Unavailable

T = TypeVar("T")
CLOSE_TIMEOUT_S = 5.0


class LoopThread:
    """An event loop in a thread of its own. Safe to share between threads.

    The constructor waits for `opening`; if that fails, the thread has ended.
    """

    def __init__(self, name: str, opening: Coroutine[Any, Any, object]) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._closing = False
        self._waits: set[futures.Future[Any]] = set()
        self._lock = threading.Lock()
        self.thread.start()
        try:
            self.wait(opening)
        except BaseException:
            self._stop()
            raise

    @property
    def closed(self) -> bool:
        return self._closing or self.loop.is_closed()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it; Ctrl-C ends the wait and the work."""
        if self.closed:
            work.close()
            raise Unavailable("this client was closed")
        return self._wait(work)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self.loop.is_closed():
                work.close()
                raise Unavailable("this client was closed")
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
            self._waits.add(future)
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

    def close(self, leaving: Coroutine[Any, Any, None], *, cancel: bool = False) -> None:
        """Run `leaving`, then end the thread. With `cancel`, other threads do not get their answers first. May be repeated."""
        if self.closed:
            leaving.close()
            return
        self._closing = True
        if cancel:
            for future in list(self._waits):
                future.cancel()
        try:
            self._wait(self._leave(leaving))
        finally:  # also after Ctrl-C: the thread and its loop must not stay
            self._stop()

    async def _leave(self, leaving: Coroutine[Any, Any, None]) -> None:
        await leaving
        # The work of other threads has its answer now, and must get out of the loop before the loop ends.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            _, late = await asyncio.wait(others, timeout=CLOSE_TIMEOUT_S)
            for task in late:
                task.cancel()

    def _stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        with self._lock:  # a call that came after the loop had ended would wait for ever
            for future in list(self._waits):
                future.cancel()
            self.loop.close()


async def _closed(pieces: AsyncGenerator[bytes, None]) -> None:
    await pieces.aclose()


class JobHandle:
    """One job; `result()` blocks until the job has ended."""

    __slots__ = ("_handle", "_wait")

    def __init__(self, handle: AsyncJobHandle, wait: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        """`wait` runs a coroutine in the client's thread and returns its result."""
        self._handle = handle
        self._wait = wait

    @property
    def job_id(self) -> str:
        return self._handle.job_id

    @property
    def existed(self) -> bool:
        """The server knew this job before."""
        return self._handle.existed

    @property
    def done(self) -> bool:
        return self._handle.done

    def outcome(self, timeout: float | None = None) -> JobResult:
        """Wait for the end of the job, in any state."""
        ended: JobResult = self._wait(self._handle.outcome(timeout))
        return ended

    def result(self, timeout: float | None = None) -> bytes:
        """Return the result's bytes; JobFailed if the job did not succeed, DeadlineExceeded if it takes longer."""
        data: bytes = self._wait(self._handle.result(timeout))
        return data


class Client:
    """Blocking client: `with Client(url) as client`. Takes the arguments of AsyncClient; safe to share between threads."""

    def __init__(self, url: str | None = None, **options: Any) -> None:
        self._async = AsyncClient(url, **options)
        self._thread = LoopThread("tasuki-client", self._async.open())

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the asynchronous client and wait for it; Ctrl-C ends the wait and the work."""
        return self._thread.wait(work)

    def close(self) -> None:
        """Close the connection. Jobs go on."""
        self._thread.close(self._async.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def aio(self) -> AsyncClient:
        """The asynchronous client underneath, for calls that have no blocking form: `client.wait(client.aio.…)`."""
        return self._async

    def submit(self, **fields: Any) -> JobHandle:
        """Submit one job; see AsyncClient.submit."""
        return JobHandle(self.wait(self._async.submit(**fields)), self.wait)

    def submit_many(self, specs: Sequence[JobSpec], **options: Any) -> list[JobHandle]:
        """Submit many jobs; see AsyncClient.submit_many."""
        return [JobHandle(handle, self.wait) for handle in self.wait(self._async.submit_many(specs, **options))]

    def job(self, job_id: str) -> JobHandle:
        """Return a job that was submitted before."""

        async def attach() -> AsyncJobHandle:
            return self._async.job(job_id)

        return JobHandle(self.wait(attach()), self.wait)

    def status(self, job_id: str) -> dict[str, Any]:
        return self.wait(self._async.status(job_id))

    def find(self, **filter: Any) -> dict[str, Any]:
        return self.wait(self._async.find(**filter))

    def cancel(self, *job_ids: str, reason: str = "") -> dict[str, Any]:
        return self.wait(self._async.cancel(job_ids, reason))

    def requeue(self, *job_ids: str, reason: str = "") -> dict[str, Any]:
        return self.wait(self._async.requeue(job_ids, reason))

    def explain(self, job_id: str) -> dict[str, Any]:
        return self.wait(self._async.explain(job_id))

    def logs(self, job_id: str, stream: str = "stdout", *, offset: int = 0, follow: bool = True) -> Iterator[bytes]:
        """Read the output of a command; see AsyncClient.logs. Closing the iterator early leaves the job alone."""
        pieces = self._async.logs(job_id, stream, offset=offset, follow=follow)

        async def following() -> bytes | None:
            return await anext(pieces, None)

        try:
            while (piece := self.wait(following())) is not None:
                yield piece
        finally:
            if not self._thread.closed:
                self.wait(_closed(pieces))

    def counts(self, limit: int = 1000) -> dict[str, dict[str, int]]:
        return self.wait(self._async.counts(limit))

    def workers(self) -> list[dict[str, Any]]:
        return self.wait(self._async.workers())
