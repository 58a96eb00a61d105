"""A job as its submitter holds it: its id, and its result when there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from tasuki.core.job import State
from tasuki.core.protocol import JobResult
from tasuki.errors import DeadlineExceeded, JobFailed, TasukiError


class AsyncJobHandle:
    """Awaitable result of one job. The future is made only when somebody waits."""

    __slots__ = ("_error", "_read", "_result", "_waiter", "existed", "holders", "job_id")

    def __init__(self, job_id: str, read: Callable[[JobResult], Awaitable[bytes]]) -> None:
        """`read` returns the bytes of a result."""
        self.job_id = job_id
        self.existed = False
        """The server knew this job before."""
        self.holders = 1
        """Number of submits of this id that share the handle; a refused one must not end the wait of the others."""
        self._read = read
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
            raise _failure(ended)
        return await self._read(ended)


def _failure(ended: JobResult) -> JobFailed:
    outcome = ended.outcome
    reason = outcome.message or outcome.error_code or "no reason was given"
    return JobFailed(f"job {ended.job_id!r} is {ended.state} after attempt {ended.attempt}: {reason}", outcome=ended)


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
