"""One task: a function whose calls are jobs, its settings, and its handler at a worker."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar, overload

import msgspec

from tasuki.client.aio import OnFailed
from tasuki.client.sync import JobHandle
from tasuki.core.job import JobSpec
from tasuki.errors import WrongType
from tasuki.tasks.arguments import Encoding, TaskSignature

if TYPE_CHECKING:
    from tasuki.worker.attempt import HandlerJob
    from tasuki.worker.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Exceptions = type[BaseException] | tuple[type[BaseException], ...]

_one_at_a_time = threading.Lock()
"""Signatures of several tasks may have a type of the user in common (`core/decoding.py`)."""
_current: ContextVar[HandlerJob] = ContextVar("tasuki_current_job")


def current_job() -> HandlerJob:
    """Return the job of the task that runs here: its id, attempt, progress and whether it was canceled.

    A task that is called directly, in a test say, gets a job that reports to nobody.
    """
    job = _current.get(None)
    if job is None:
        from tasuki.worker.attempt import HandlerJob

        job = HandlerJob(JobSpec(job_id="called-directly"), 1)
    return job


class TaskOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a task's jobs: those of `Client.submit`, and a delay."""

    subject: str
    job_id: str | None = None
    """One job for all calls with it: a repetition gets the same result. Of `map`: the array; its jobs are <job_id>-0, -1, …"""
    retries: int = 3
    timeout_s: float | None = None
    backoff_s: float | None = None
    priority: int = 5
    delay_s: float = 0.0
    array_id: str | None = None
    headers: dict[str, str] = {}
    on_failed: OnFailed = "return"

    def specs(self, job_ids: Sequence[str], payloads: Sequence[bytes], array_id: str | None) -> list[JobSpec]:
        """Return the jobs of some calls."""
        not_before = time.time() + self.delay_s if self.delay_s else None
        return [
            JobSpec(
                job_id=job_id,
                subject=self.subject,
                payload=payload,
                timeout_s=self.timeout_s,
                max_retries=self.retries,
                backoff_s=self.backoff_s,
                priority=self.priority,
                not_before=not_before,
                headers=self.headers,
                array_id=array_id,
            )
            for job_id, payload in zip(job_ids, payloads, strict=True)
        ]


class TaskOwner(Protocol):
    """The part of Tasks that a task uses."""

    encoding: Encoding

    def submit_payloads(self, task: Task[P, R, T], payloads: list[bytes], *, many: bool = False) -> list[JobHandle[T]]: ...
    async def submit_payloads_async(
        self, task: Task[P, R, T], payloads: list[bytes], *, many: bool = False
    ) -> list[JobHandle[T]]: ...
    def job(self, job_id: str) -> JobHandle[bytes]: ...


class Task(Generic[P, R, T]):
    """A function whose calls can be submitted as jobs. Called directly it is the function itself."""

    def __init__(
        self,
        owner: TaskOwner,
        function: Callable[P, R],
        options: TaskOptions,
        retry_on: Exceptions | None = None,
        give_up_on: Exceptions = (),
    ) -> None:
        functools.update_wrapper(self, function)
        self._owner = owner
        self._function = function
        self._retry_on, self._give_up_on = retry_on, give_up_on
        self.name = getattr(function, "__name__", "task")
        self.settings = options

    def __repr__(self) -> str:
        return f"<Task {self.name!r}, {self.settings.subject}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function here and now, without a job."""
        return self._function(*args, **kwargs)

    @functools.cached_property
    def signature(self) -> TaskSignature:
        """Parameters and result. Made at the first use: annotations may name what is defined after the function."""
        with _one_at_a_time:
            return TaskSignature(self.name, self._function, self._owner.encoding)

    def options(
        self,
        *,
        job_id: str | None = None,
        retries: int | None = None,
        timeout_s: float | None = None,
        backoff_s: float | None = None,
        priority: int | None = None,
        delay_s: float | None = None,
        array_id: str | None = None,
        headers: dict[str, str] | None = None,
        on_failed: OnFailed | None = None,
    ) -> Task[P, R, T]:
        """Return the same task with other settings: `resize.options(priority=9, delay_s=60).submit("a.png")`.

        With a `job_id`, a call that is repeated is the same job: it runs once, and all get its result.
        """
        given = {name: value for name, value in locals().items() if name != "self" and value is not None}
        changed = Task[P, R, T].__new__(Task)
        changed.__dict__.update(self.__dict__)
        changed.settings = msgspec.structs.replace(self.settings, **given)
        return changed

    # ------------------------------------------------------------------------------------------------ in a client

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[T]:
        """Submit a call as a job, and return its handle when the job is durable.

        WrongType (a TypeError) names an argument that does not fit its annotation; nothing is sent then.
        """
        return self._owner.submit_payloads(self, [self.signature.encode_arguments(args, kwargs)])[0]

    async def submit_async(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[T]:
        """Submit a call as a job without blocking the event loop: `await (await resize.submit_async("a.png"))`."""
        return (await self._owner.submit_payloads_async(self, [self.signature.encode_arguments(args, kwargs)]))[0]

    def map(self, values: Iterable[Any]) -> list[JobHandle[T]]:
        """Submit one job for each value, which is the first argument."""
        return self.starmap((value,) for value in values)

    def starmap(self, calls: Iterable[Iterable[Any]]) -> list[JobHandle[T]]:
        """Submit one job for each list of arguments: `resize.starmap([("a.png", 400), ("b.png", 200)])`."""
        return self._owner.submit_payloads(self, self._payloads(calls), many=True)

    async def map_async(self, values: Iterable[Any]) -> list[JobHandle[T]]:
        """Do the same as `map` without blocking the event loop."""
        return await self.starmap_async((value,) for value in values)

    async def starmap_async(self, calls: Iterable[Iterable[Any]]) -> list[JobHandle[T]]:
        """Do the same as `starmap` without blocking the event loop."""
        return await self._owner.submit_payloads_async(self, self._payloads(calls), many=True)

    def _payloads(self, calls: Iterable[Iterable[Any]]) -> list[bytes]:
        payloads = []
        for place, arguments in enumerate(calls):
            try:
                payloads.append(self.signature.encode_arguments(tuple(arguments), {}))
            except WrongType as error:
                raise WrongType(f"call {place}: {error.message}") from None
        return payloads

    def job(self, job_id: str) -> JobHandle[T]:
        """Return the handle of a job of this task that was submitted before, by any process."""
        return self._owner.job(job_id).decoded_by(self.signature.decode_result)

    # ------------------------------------------------------------------------------------------------ at a worker

    def add_to(self, worker: Worker) -> None:
        """Let a worker run this task."""
        self.signature  # noqa: B018 - an annotation that cannot work is noticed before the worker starts
        worker.handler(self.settings.subject, retry_on=self._retry_on, give_up_on=self._give_up_on)(self.handler)

    @functools.cached_property
    def handler(self) -> Callable[[HandlerJob], Any]:
        """The handler of the task's jobs: `async def` if the task is."""
        from tasuki.worker.attempt import JobRefused

        signature = self.signature
        function: Callable[..., Any] = self._function

        def arguments(job: HandlerJob) -> dict[str, Any]:
            try:
                return signature.decode_arguments(job.payload)
            except WrongType as error:
                raise JobRefused("BAD_ARGUMENTS", error.message) from None

        def result(value: Any) -> bytes:
            try:
                return signature.encode_result(value)
            except WrongType as error:
                raise JobRefused("BAD_RESULT", error.message) from None

        if inspect.iscoroutinefunction(function):

            async def run_async(job: HandlerJob) -> bytes:
                _current.set(job)  # each job has a task or a process of its own
                return result(await function(**arguments(job)) if signature.names or job.payload else await function())

            return run_async

        def run(job: HandlerJob) -> bytes:
            _current.set(job)
            return result(function(**arguments(job)) if signature.names or job.payload else function())

        return run


class TaskDecorator(Protocol):
    """Makes a task of a function, with the settings that `Tasks.task` was given."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, T]], /) -> Task[P, Coroutine[Any, Any, T], T]: ...
    @overload
    def __call__(self, function: Callable[P, T], /) -> Task[P, T, T]: ...
