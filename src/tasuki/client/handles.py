"""Handles of jobs, and the wait for their ends that handles of the same job share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

from tasuki.client.types import CancelAnswer, CommandResult, Explanation, JobStatus, job_failed, with_traceback
from tasuki.core.job import Progress, State
from tasuki.core.protocol import JobResult
from tasuki.core.units import shown_duration
from tasuki.errors import DeadlineExceeded, TasukiError

EXPLAIN_WITHIN_S = 2.0
HINT_AFTER_S = 10.0
NOBODY = frozenset({"NO_WORKERS", "NO_PATTERN", "OTHER_KIND"})  # facts of `explain`: no worker can take the job

logger = logging.getLogger("tasuki.client")

T = TypeVar("T")
R = TypeVar("R")


class HandleClient(Protocol):
    """The part of an AsyncClient that a handle uses."""

    hinted: bool
    """True once it was said that there is no worker for a job."""

    async def result_bytes(self, ended: JobResult) -> bytes: ...
    async def open_result(self, ended: JobResult) -> BinaryIO | None: ...
    async def status(self, job_id: str) -> JobStatus: ...
    async def explain(self, job_id: str) -> Explanation: ...
    def progress(self, job_id: str) -> AsyncGenerator[Progress, None]: ...
    async def cancel(self, *job_ids: str, reason: str = "") -> dict[str, CancelAnswer]: ...


class AwaitedJob:
    """One job whose end is awaited, by all handles of it. The future is made only when somebody waits."""

    __slots__ = ("error", "existed", "holders", "job_id", "result", "waiter")

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.existed = False
        self.holders = 1
        """Number of submits of this id that share the wait; a refused one must not end the wait of the others."""
        self.result: JobResult | None = None
        self.error: TasukiError | None = None
        self.waiter: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        return self.result is not None or self.error is not None

    def settle(self, result: JobResult | None, error: TasukiError | None = None) -> None:
        """Set the end of the job."""
        self.result, self.error = result, error
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def end(self, timeout: float | None) -> JobResult:
        if not self.done:
            if self.waiter is None or self.waiter.done():
                self.waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout):
                    await asyncio.shield(self.waiter)
            except TimeoutError:
                waited = shown_duration(timeout or 0.0)
                raise DeadlineExceeded(
                    f"job {self.job_id!r} has not ended within {waited}; it goes on: ask again with the same id"
                ) from None
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


def unchanged(data: bytes) -> bytes:
    return data


class AsyncJobHandle(Generic[T]):
    """One job. `await` it for its result, which is of type T: bytes, unless `decoded_by` says otherwise.

    job = await client.submit(subject="math.square", payload=b"7")
    print(job.job_id, await job)         # … b'49'
    """

    __slots__ = ("_client", "_decode", "_job")

    def __init__(self, job: AwaitedJob, client: HandleClient, decode: Callable[[bytes], T]) -> None:
        self._job = job
        self._client = client
        self._decode = decode

    def __repr__(self) -> str:
        state = self._job.result.state if self._job.result is not None else "failed" if self._job.error else "not ended yet"
        return f"<{type(self).__name__} {self.job_id!r}: {state}>"

    def __await__(self) -> Generator[Any, None, T]:
        return self.result().__await__()

    @property
    def job_id(self) -> str:
        return self._job.job_id

    @property
    def existed(self) -> bool:
        """True if the server knew this job before: nothing runs twice."""
        return self._job.existed

    @property
    def done(self) -> bool:
        """True if the end of the job is known here; then `result` and `outcome` do not wait."""
        return self._job.done

    def decoded_by(self, decode: Callable[[bytes], R]) -> AsyncJobHandle[R]:
        """Return a handle of the same job whose result is `decode(bytes)`, as in `job.decoded_by(json.loads)`."""
        return AsyncJobHandle(self._job, self._client, decode)

    async def outcome(self, timeout: float | None = None) -> JobResult:
        """Wait for the end of the job, in any state; DeadlineExceeded (a TimeoutError) after `timeout` seconds.

        The job goes on after that, and can be asked for again: `client.job(job_id)`.
        """
        if timeout is None and not self._job.done and not self._client.hinted:
            try:
                return await self._job.end(HINT_AFTER_S)
            except DeadlineExceeded:
                await self._hint()
        try:
            return await self._job.end(timeout)
        except DeadlineExceeded as late:
            raise await self._explained(late) from None

    async def _hint(self) -> None:
        """Log a warning, once for each client, if a job waits because there is nobody to run it."""
        if self._client.hinted:
            return
        self._client.hinted = True
        with contextlib.suppress(TasukiError, TimeoutError):  # the wait itself meets the same trouble
            async with asyncio.timeout(EXPLAIN_WITHIN_S):
                why = await self._client.explain(self.job_id)
            if why.facts.get("why") in NOBODY:
                logger.warning("job %s still waits: %s", self.job_id, why.because[0])

    async def _explained(self, late: DeadlineExceeded) -> DeadlineExceeded:
        """Return the error with the server's reasons, and the traceback of the last failure as a note."""
        try:
            async with asyncio.timeout(EXPLAIN_WITHIN_S):
                why = await self._client.explain(self.job_id)
                status = await self._client.status(self.job_id)
        except (TasukiError, TimeoutError):  # the caller's own time is over, and that is what counts
            return late
        explained = DeadlineExceeded(f"{late.message}. It is {why.state}: {' '.join(why.because)}")
        return with_traceback(explained, status.outcome.meta if status.outcome is not None else {})

    async def result(self, timeout: float | None = None) -> T:
        """Return what the handler returned; JobFailed if the job ended in another state than SUCCEEDED.

        The bytes of a command's result are a ZIP: `command_result` reads it.
        """
        ended = await self.outcome(timeout)
        if ended.state is State.SUCCEEDED and ended.outcome.result_ref is not None:
            return self._decode(await self._client.result_bytes(ended))
        return self.inline_result(ended)

    def inline_result(self, ended: JobResult) -> T:
        """Return the result of a job that has ended, which is not a blob; JobFailed if it did not succeed."""
        if ended.state is not State.SUCCEEDED:
            raise job_failed(ended)
        return self._decode(ended.outcome.result or b"")

    @property
    def ended(self) -> JobResult | None:
        """The end of the job, if it is known here."""
        return self._job.result

    async def command_result(self, timeout: float | None = None, *, check: bool = True) -> CommandResult:
        """Return a command's exit code, output and files; JobFailed if it did not succeed, unless check=False."""
        ended = await self.outcome(timeout)
        done = CommandResult(ended, await self._client.open_result(ended))
        if check:
            done.check()
        return done

    async def status(self) -> JobStatus:
        """Return everything that the server knows of the job."""
        return await self._client.status(self.job_id)

    def progress(self) -> AsyncGenerator[Progress, None]:
        """Yield the reports of progress as they come, to the end of the job; see AsyncClient.progress."""
        return self._client.progress(self.job_id)

    async def cancel(self, reason: str = "") -> CancelAnswer:
        """Cancel the job; see AsyncClient.cancel."""
        return (await self._client.cancel(self.job_id, reason=reason))[self.job_id]
