"""The synchronous face of the client: the same client, run by a thread of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from tasuki.client.aio import AsyncClient
from tasuki.client.handles import AsyncJobHandle
from tasuki.client.loop_thread import LoopThread
from tasuki.core.job import JobSpec
from tasuki.core.protocol import JobResult

T = TypeVar("T")


class JobHandle:
    """One job; `result()` blocks until it has ended."""

    __slots__ = ("_client", "_handle")

    def __init__(self, client: Client, handle: AsyncJobHandle) -> None:
        self._client = client
        self._handle = handle

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
        """How it ended, whatever the state."""
        return self._client.wait(self._handle.outcome(timeout))

    def result(self, timeout: float | None = None) -> bytes:
        """The result's bytes; JobFailed if it did not succeed, DeadlineExceeded if it takes longer."""
        return self._client.wait(self._handle.result(timeout))


async def _closed(pieces: AsyncGenerator[bytes, None]) -> None:
    await pieces.aclose()


class Client:
    """Blocking client. Use as `with Client(url) as client`. Takes what AsyncClient takes; safe to share between threads."""

    def __init__(self, url: str | None = None, **options: Any) -> None:
        self._async = AsyncClient(url, **options)
        self._thread = LoopThread("tasuki-client", self._async.open())

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something of the asynchronous client and wait for it; Ctrl-C ends the wait and the work."""
        return self._thread.wait(work)

    def close(self) -> None:
        """Leave. Jobs go on."""
        self._thread.close(self._async.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def aio(self) -> AsyncClient:
        """The asynchronous client underneath, for what has no blocking form: `client.wait(client.aio.…)`."""
        return self._async

    def submit(self, **fields: Any) -> JobHandle:
        """As AsyncClient.submit."""
        return JobHandle(self, self.wait(self._async.submit(**fields)))

    def submit_many(self, specs: Sequence[JobSpec], **options: Any) -> list[JobHandle]:
        """As AsyncClient.submit_many."""
        return [JobHandle(self, handle) for handle in self.wait(self._async.submit_many(specs, **options))]

    def job(self, job_id: str) -> JobHandle:
        """A job that was submitted before."""

        async def attach() -> AsyncJobHandle:
            return self._async.job(job_id)

        return JobHandle(self, self.wait(attach()))

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
        """As AsyncClient.logs. Closing the iterator early leaves the job alone."""
        pieces = self._async.logs(job_id, stream, offset=offset, follow=follow)

        async def following() -> bytes | None:
            return await anext(pieces, None)

        try:
            while (piece := self.wait(following())) is not None:
                yield piece
        finally:
            if not self._thread.closed:
                self.wait(_closed(pieces))

    def counts(self) -> dict[str, dict[str, int]]:
        return self.wait(self._async.counts())

    def workers(self) -> list[dict[str, Any]]:
        return self.wait(self._async.workers())
