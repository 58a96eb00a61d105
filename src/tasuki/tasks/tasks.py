"""The tasks of a program, with the server that keeps their jobs: submits them, and makes workers for them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, overload

from tasuki.client.embedded import ensure_server
from tasuki.client.sync import Client, JobHandle
from tasuki.client.types import AsyncJobHandle
from tasuki.config import DataFolder, data_folder, default_url
from tasuki.core.job import BODY_INLINE_MAX_BYTES
from tasuki.core.subject import check_subject
from tasuki.errors import ConfigError, InvalidInput, WrongType
from tasuki.tasks.arguments import Encoding
from tasuki.tasks.eager import EagerJobs
from tasuki.tasks.task import Exceptions, Task, TaskDecorator, TaskOptions

if TYPE_CHECKING:
    from tasuki.worker.worker import Worker

SUBJECT_PREFIX = "tasks."

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Tasks:
    """The tasks of a program, the server that keeps their jobs, and the client for it, which is opened when it is first used.

    No `url`: TASUKI_URL, else the server that owns the data folder, else an embedded one. No token: TASUKI_TOKEN. `encoding` is
    that of arguments and results. Safe to share between threads and event loops; a forked process opens a client of its own.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        data: str | os.PathLike[str] | None = None,
        tls_ca: str | None = None,
        encoding: Encoding = "json",
    ) -> None:
        if encoding not in ("json", "msgpack"):
            raise InvalidInput(f"encoding must be json or msgpack, got {encoding!r}")
        self.url = url
        self.data = data
        self.encoding: Encoding = encoding
        self._access: dict[str, Any] = {"token": token, "token_file": token_file, "data": data, "tls_ca": tls_ca}
        self._tasks: dict[str, Task[..., Any, Any]] = {}
        self._client: Client | None = None
        self._client_pid = 0
        self._opening = threading.Lock()
        self._eager: EagerJobs | None = None

    def __repr__(self) -> str:
        return f"<Tasks {', '.join(task.name for task in self)}>"

    def __iter__(self) -> Iterator[Task[..., Any, Any]]:
        return iter(self._tasks.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @overload
    def task(self, function: Callable[P, Coroutine[Any, Any, T]], /) -> Task[P, Coroutine[Any, Any, T], T]: ...
    @overload
    def task(self, function: Callable[P, T], /) -> Task[P, T, T]: ...
    @overload
    def task(
        self,
        /,
        *,
        subject: str | None = None,
        retries: int = 3,
        timeout_s: float | None = None,
        backoff_s: float | None = None,
        priority: int = 5,
        retry_on: Exceptions | None = None,
        give_up_on: Exceptions = (),
    ) -> TaskDecorator: ...
    def task(
        self,
        function: Any = None,
        /,
        *,
        subject: str | None = None,
        retries: int = 3,
        timeout_s: float | None = None,
        backoff_s: float | None = None,
        priority: int = 5,
        retry_on: Exceptions | None = None,
        give_up_on: Exceptions = (),
    ) -> Any:
        """Make a task of a function: `@tasks.task`, or `@tasks.task(retries=5, timeout_s=60)`.

        `subject` decides which workers get its jobs (default: `tasks.<name>`). A job whose function raises is tried again as long
        as it has `retries`, after `backoff_s` · 2ⁿ seconds (1, 2, 4 …); not after exceptions of `give_up_on`, and with `retry_on`
        after those alone. `raise Retry(in_s=30)` chooses the time of the next attempt. `timeout_s` limits one attempt.
        """

        def make(function: Callable[..., Any]) -> Task[..., Any, Any]:
            if not inspect.isfunction(function):
                raise WrongType(f"a task must be a function, got {type(function).__name__}")
            chosen = check_subject(subject or f"{SUBJECT_PREFIX}{function.__name__}")
            if chosen in self._tasks:
                raise ConfigError(f"subject {chosen!r} has a task already; give one of them another with subject=…")
            options = TaskOptions(subject=chosen, retries=retries, timeout_s=timeout_s, backoff_s=backoff_s, priority=priority)
            made = Task[..., Any, Any](self, function, options, retry_on, give_up_on)
            self._tasks[chosen] = made
            return made

        return make if function is None else make(function)

    # ------------------------------------------------------------------------------------------------ in a client

    @property
    def client(self) -> Client:
        """The client, opened when it is first asked for; see `Client` for what else it can do."""
        with self._opening:
            if self._client is None or self._client_pid != os.getpid():
                self._client, self._client_pid = Client(self.url, **self._access), os.getpid()
            return self._client

    def close(self) -> None:
        """Close the client. Jobs continue; the next use opens another one."""
        with self._opening:
            client, self._client = self._client, None
        if client is not None and self._client_pid == os.getpid():
            client.close()

    def job(self, job_id: str) -> JobHandle[bytes]:
        """Return the handle of a job that was submitted before; `resize.job(job_id)` has the type of the task's result."""
        return self._eager.job(job_id) if self._eager is not None else self.client.job(job_id)

    def submit_payloads(self, task: Task[P, R, T], payloads: list[bytes], *, many: bool = False) -> list[JobHandle[T]]:
        """Submit encoded calls of a task, `many` of them as an array if the task has a job_id."""
        if self._eager is not None:
            return [self._eager.submit(task, payload, job_id) for payload, job_id in self._named(task, payloads, many)]
        client = self.client
        handles = client.wait(self._sent(client, task, payloads, many))
        return [JobHandle(handle, client) for handle in handles]

    async def submit_payloads_async(
        self, task: Task[P, R, T], payloads: list[bytes], *, many: bool = False
    ) -> list[JobHandle[T]]:
        """Do the same as `submit_payloads` without blocking the event loop."""
        if self._eager is not None:
            named = self._named(task, payloads, many)
            return [await asyncio.to_thread(self._eager.submit, task, payload, job_id) for payload, job_id in named]
        is_open = self._client is not None and self._client_pid == os.getpid()
        client = self.client if is_open else await asyncio.to_thread(lambda: self.client)
        handles = await client.future(self._sent(client, task, payloads, many))
        return [JobHandle(handle, client) for handle in handles]

    def _named(self, task: Task[P, R, T], payloads: list[bytes], many: bool) -> list[tuple[bytes, str | None]]:
        """Return each payload with the job_id that the task's settings give it."""
        job_id = task.settings.job_id
        return [(payload, f"{job_id}-{place}" if job_id and many else job_id) for place, payload in enumerate(payloads)]

    async def _sent(self, client: Client, task: Task[P, R, T], payloads: list[bytes], many: bool) -> list[AsyncJobHandle[T]]:
        settings, aio = task.settings, client.aio
        if settings.job_id is None:
            job_ids = aio.new_ids(len(payloads))
        else:
            job_ids = [job_id or "" for _, job_id in self._named(task, payloads, many)]
        specs = settings.specs(job_ids, payloads, settings.array_id or (settings.job_id if many else None))
        large = any(len(payload) > BODY_INLINE_MAX_BYTES for payload in payloads)
        specs = [await aio.with_payload_uploaded(spec) for spec in specs] if large else specs
        decode = task.signature.decode_result
        return [handle.decoded_by(decode) for handle in await aio.submit_many(specs, on_failed=settings.on_failed)]

    # ------------------------------------------------------------------------------------------------ at a worker

    def add_to(self, worker: Worker) -> None:
        """Let a worker run all of these tasks."""
        if not self._tasks:
            raise ConfigError("there are no tasks yet: decorate functions with @tasks.task, and import their modules")
        for task in self:
            task.add_to(worker)

    def server(self, folder: DataFolder, *, start: bool = True) -> str:
        """Return the address of the server for these tasks; if none is named, the folder's, which is started if need be."""
        return self.url or default_url() or (ensure_server(folder) if start else f"unix://{folder.socket}")

    def worker(self, **options: Any) -> Worker:
        """Return a worker for all of these tasks at the same server; `options` are those of `Worker`.

        if __name__ == "__main__":
            tasks.worker(concurrency=4).run()
        """
        from tasuki.worker.worker import Worker

        url = self.server(data_folder(self.data))
        access = {name: value for name, value in self._access.items() if name != "data"}
        worker = Worker(url, **{**access, **options})
        self.add_to(worker)
        return worker

    # ------------------------------------------------------------------------------------------------ in users' tests

    @contextlib.contextmanager
    def eager(self, *, run: bool = True) -> Iterator[EagerJobs]:
        """Run jobs where they are submitted, without a server, while the block lasts; with run=False only record them.

            with tasks.eager() as jobs:
                upload_page("a.png")
                jobs.assert_submitted(resize, "a.png", width=400)

        Arguments and results are encoded and checked as always; failed attempts are repeated at once.
        """
        before, self._eager = self._eager, EagerJobs(run=run)
        try:
            yield self._eager
        finally:
            self._eager = before


def load_tasks(place: str) -> Tasks:
    """Return the Tasks at `module:name` (the name is `tasks` if it is left out); ConfigError if there are none."""
    module_name, _, name = place.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        if module_name.endswith(".py"):
            raise ConfigError(f"{module_name!r} is a file; name its module: {module_name[:-3]}:{name or 'tasks'}") from None
        raise ConfigError(
            f"there is no module {module_name!r} in {Path.cwd()} or on PYTHONPATH; start it where the file is"
        ) from None
    found = getattr(module, name or "tasks", None)
    if not isinstance(found, Tasks):
        others = [f"{module_name}:{key}" for key, value in vars(module).items() if isinstance(value, Tasks)]
        hint = f"; it has {', '.join(others)}" if others else "; write tasks = tasuki.Tasks() there"
        raise ConfigError(f"{module_name!r} has no Tasks named {name or 'tasks'!r}{hint}")
    return found
