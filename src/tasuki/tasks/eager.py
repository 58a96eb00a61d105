"""Eager mode, for users' own tests: jobs run where they are submitted, or are only recorded, and can be asserted."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import io
import itertools
import time
from collections.abc import AsyncGenerator, Coroutine
from concurrent import futures
from typing import Any, BinaryIO, ParamSpec, TypeVar

import msgspec

from tasuki.client.sync import JobHandle
from tasuki.client.types import AsyncJobHandle, AwaitedJob, CancelAnswer, Explanation, JobStatus, unchanged
from tasuki.core.job import JobSpec, Outcome, Progress, State
from tasuki.core.protocol import JobResult
from tasuki.errors import Conflict, NotFound, Unavailable
from tasuki.tasks.task import Task

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class EagerJob(msgspec.Struct, frozen=True):
    """A job that was submitted in eager mode."""

    task: str
    arguments: dict[str, Any]
    handle: JobHandle[Any]


class EagerJobs(list[EagerJob]):
    """The jobs that were submitted while `tasks.eager()` was in force, in order, and assertions about them."""

    def __init__(self, *, run: bool) -> None:
        super().__init__()
        self._runs = run
        self._numbers = itertools.count(1)
        self._payloads: dict[str, bytes] = {}

    def submit(self, task: Task[P, R, T], payload: bytes, job_id: str | None) -> JobHandle[T]:
        """Run or record a call, and return the handle of its job."""
        job_id = job_id or f"eager-{next(self._numbers)}"
        known = self._payloads.setdefault(job_id, payload)
        if known != payload:
            raise Conflict(job_id, ["payload"])
        job = AwaitedJob(job_id)
        client = _EagerClient(task.settings.subject, task.settings.retries)
        handle = JobHandle(AsyncJobHandle(job, client, task.signature.decode_result), client)
        not_run = Unavailable(f"job {job_id!r} was only recorded: eager(run=False) runs nothing, and no task waits for itself")
        earlier = next((one.handle for one in self if one.handle.job_id == job_id), None)
        if earlier is not None:
            job.existed = True
            job.settle(earlier.ended, None if earlier.ended is not None else not_run)
            return handle
        self.append(EagerJob(task.name, task.signature.decode_arguments(payload) if task.signature.names else {}, handle))
        if self._runs:
            job.settle(client.run(task, job_id, payload))
        else:
            job.settle(None, not_run)
        return handle

    def job(self, job_id: str) -> JobHandle[bytes]:
        """Return the handle of a job that was submitted before; NotFound for an unknown id."""
        for one in self:
            if one.handle.job_id == job_id:
                return one.handle.decoded_by(unchanged)
        raise NotFound(f"there is no job {job_id!r}: in eager mode only those are known that were submitted in it")

    def of(self, task: Task[P, R, T]) -> list[EagerJob]:
        """Return the jobs of one task."""
        return [job for job in self if job.task == task.name]

    def assert_submitted(self, task: Task[P, R, T], *args: P.args, **kwargs: P.kwargs) -> None:
        """Fail unless the task was submitted with exactly these arguments."""
        wanted = task.signature.decode_arguments(task.signature.encode_arguments(args, kwargs)) if task.signature.names else {}
        found = [job.arguments for job in self.of(task)]
        if wanted not in found:
            raise AssertionError(f"{task.name} was not submitted with {wanted}; it was with: {found or 'nothing'}")

    def assert_not_submitted(self, task: Task[P, R, T]) -> None:
        """Fail if the task was submitted, with whatever arguments."""
        if found := [job.arguments for job in self.of(task)]:
            raise AssertionError(f"{task.name} was submitted with {found}")


class _EagerClient:
    """Runs one job where it is submitted, and answers its handle."""

    def __init__(self, subject: str, retries: int) -> None:
        self._subject, self._retries = subject, retries
        self._ended: JobResult | None = None
        self._progress: list[Progress] = []
        self.hinted = True

    def run(self, task: Task[P, R, T], job_id: str, payload: bytes) -> JobResult:
        """Run the attempts of the job, one after the other without a delay."""
        from tasuki.worker.attempt import Handler, HandlerJob, check_exceptions

        only = None if task._retry_on is None else check_exceptions("retry_on", task._retry_on)
        never = check_exceptions("give_up_on", task._give_up_on)
        asynchronous = inspect.iscoroutinefunction(task.handler)
        handler = Handler(self._subject, task.handler, asynchronous, task.settings.timeout_s, only, never)
        spec = JobSpec(job_id=job_id, subject=self._subject, payload=payload, timeout_s=task.settings.timeout_s)
        attempt = 0
        while self._ended is None:
            attempt += 1
            job = HandlerJob(spec, attempt, report=self._progress.append)
            if asynchronous:
                outcome = _in_a_loop(handler.run(job, lambda: None))
            else:
                outcome = contextvars.copy_context().run(handler.call, job)
            if outcome.error_code is None or outcome.permanent or attempt > self._retries:
                state = State.SUCCEEDED if outcome.error_code is None else State.FAILED
                self._ended = JobResult(job_id, state, attempt, outcome, time.time())
        return self._ended

    async def result_bytes(self, ended: JobResult) -> bytes:
        return ended.outcome.result or b""

    async def open_result(self, ended: JobResult) -> BinaryIO | None:
        return io.BytesIO(ended.outcome.result) if ended.outcome.result is not None else None

    async def status(self, job_id: str) -> JobStatus:
        state = State.PENDING if self._ended is None else self._ended.state
        return JobStatus(job_id=job_id, state=state, subject=self._subject)

    async def explain(self, job_id: str) -> Explanation:
        raise NotFound(f"job {job_id!r} is known here alone: tasks run in eager mode")

    async def progress(self, job_id: str) -> AsyncGenerator[Progress, None]:
        for told in self._progress:
            yield told

    async def cancel(self, *job_ids: str, reason: str = "") -> dict[str, CancelAnswer]:
        return {job_id: CancelAnswer((await self.status(job_id)).state) for job_id in job_ids}

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that has nothing to wait for."""
        try:
            work.send(None)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        work.close()
        raise Unavailable("there is nothing to wait for in eager mode")

    def begin(self, work: Coroutine[Any, Any, T]) -> futures.Future[T]:
        future: futures.Future[T] = futures.Future()
        try:
            future.set_result(self.wait(work))
        except Exception as error:  # noqa: BLE001 - raised by the future
            future.set_exception(error)
        return future

    def future(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(self.begin(work))


def _in_a_loop(work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Run a coroutine in an event loop of its own, in another thread if this one runs a loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
