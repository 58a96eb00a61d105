"""A job as its submitter holds it: its id, and its result when there is one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tasuki.core.job import State
from tasuki.core.protocol import JobResult
from tasuki.errors import DeadlineExceeded, JobFailed, TasukiError

if TYPE_CHECKING:
    from tasuki.client.aio import AsyncClient


class AsyncJobHandle:
    """Awaitable result of one job. Costs nothing while nobody waits: the future is made only then."""

    __slots__ = ("_client", "_error", "_result", "_waiter", "existed", "holders", "job_id")

    def __init__(self, client: AsyncClient, job_id: str) -> None:
        self.job_id = job_id
        self.existed = False
        """The server knew this job before."""
        self.holders = 1
        """How many submits of this id it was given out for; one that is refused must not end the wait of the others."""
        self._client = client
        self._result: JobResult | None = None
        self._error: TasukiError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        return self._result is not None or self._error is not None

    def settle(self, result: JobResult | None, error: TasukiError | None = None) -> None:
        """The client's reader found out how it ended."""
        self._result, self._error = result, error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def outcome(self, timeout: float | None = None) -> JobResult:
        """How the job ended, whatever the state; DeadlineExceeded if it has not within `timeout` seconds."""
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
        """The result's bytes (of a command: a ZIP); JobFailed if it ended in another state than SUCCEEDED."""
        ended = await self.outcome(timeout)
        if ended.state is not State.SUCCEEDED:
            raise failure(ended)
        return await self._client.result_bytes(ended)


def failure(ended: JobResult) -> JobFailed:
    """The exception for a job that did not succeed."""
    outcome = ended.outcome
    reason = outcome.message or outcome.error_code or "no reason was given"
    return JobFailed(f"job {ended.job_id!r} is {ended.state} after attempt {ended.attempt}: {reason}", outcome=ended)
