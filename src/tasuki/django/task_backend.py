"""Django's Tasks on tasuki: `TASKS = {"default": {"BACKEND": "tasuki.django.TasukiBackend"}}`.

For `django.tasks` (Django 6.0 and newer) and, on Django 5.2, for the package `django-tasks`, which has the same interface.
A task is a job without a program: its payload names the function and has the arguments as JSON, its result is the return value as
JSON. `run_task` calls the function in a process of the node; each attempt that raises leaves its traceback as a row of the log.

Django knows four states of a task: READY (also a retry that waits), RUNNING, FAILED and SUCCESSFUL. A task that was canceled or
skipped is FAILED there.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import msgspec
from django.db import DatabaseError, close_old_connections, reset_queries
from django.utils.module_loading import import_string
from msgspec.structs import replace as replace_fields

from tasuki.blobs.open_blobs import open_blobs
from tasuki.core.job import (
    BODY_INLINE_MAX_BYTES,
    Job,
    JobSpec,
    State,
    check_nesting,
    check_spec,
    check_specs,
    is_job_id,
    type_name,
)
from tasuki.core.lifecycle import ATTEMPT_STEP
from tasuki.django.conf import project_settings
from tasuki.django.enqueueing import enqueue_job, is_task, new_id, on_enqueued, project_store, task_subject, unix_time
from tasuki.django.logs import ERRORS, read_log, write_log
from tasuki.errors import ConfigError, TasukiError, TooLarge, WrongType, quoted
from tasuki.worker.attempt import HandlerJob

logger = logging.getLogger("tasuki.django")
_PACKAGE = "django.tasks" if find_spec("django.tasks") else "django_tasks"
try:
    _base: Any = import_module(f"{_PACKAGE}.base")
except ImportError as error:
    raise ConfigError("Django 5.2 has no tasks of its own; install them with: pip install django-tasks") from error
_backends: Any = import_module(f"{_PACKAGE}.backends.base")
_exceptions: Any = import_module(f"{_PACKAGE}.exceptions")
_signals: Any = import_module(f"{_PACKAGE}.signals")
InvalidTask: Any = getattr(_exceptions, "InvalidTask", None) or _exceptions.InvalidTaskError
Status: Any = _base.TaskResultStatus

FAILED_ATTEMPTS = ("failed", "lost", "dead_lettered", "orphaned")  # kinds of incidents that end an attempt
# Django's priorities, -100 to 100, in the ten bands of a store: the highest of each band, and the band.
_BANDS = ((-80, 0), (-60, 1), (-40, 2), (-20, 3), (-1, 4), (0, 5), (25, 6), (50, 7), (75, 8), (100, 9))


@lru_cache
def _band_of(priority: int) -> int:
    return next(band for most, band in _BANDS if priority <= most)


class TaskCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """The payload of a task's job."""

    function: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    backend: str = "default"
    priority: int = 0
    takes_context: bool = False


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(TaskCall).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class TasukiTask(_base.Task):
    """A task with tasuki's own options; None: the option of the same name in OPTIONS of the backend, else its default."""

    timeout_s: float | None = None
    """Limit of one attempt. Default: none."""
    max_retries: int | None = None
    """Number of failed attempts that are tried again. Default: 0."""
    backoff_s: float | None = None
    """Delay of retry n, from 0: min(300, backoff_s * 2**n). Default: 1."""

    def using(self, **changes: Any) -> TasukiTask:
        """Return the task with other values, of Django's options or of tasuki's."""
        own = {name: changes.pop(name) for name in OPTIONS if changes.get(name) is not None}
        return replace(_base.Task.using(self, **changes), **own)


@dataclass(frozen=True, slots=True, kw_only=True)
class TasukiResult(_base.TaskResult):
    """The result of a task, whose arguments came out of JSON: to normalize them again takes longer than all else here."""

    enqueued_at: datetime | None = None
    started_at: datetime | None = None
    last_attempted_at: datetime | None = None
    finished_at: datetime | None = None
    errors: list[Any] = field(default_factory=list)
    worker_ids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        pass


_TYPES: dict[str, Any] = {"priority": int, "queue_name": str, "run_after": datetime | None, "takes_context": bool}
OPTIONS = ("timeout_s", "max_retries", "backoff_s")


class TasukiBackend(_backends.BaseTaskBackend):
    """The backend: a task is a row of the caller's transaction."""

    task_class = TasukiTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        unknown = set(self.options) - set(OPTIONS)
        self._last: tuple[Any, str, dict[str, Any]] = (None, "", {})
        """The task that was enqueued last, which was checked, its function and the fields of its jobs: a task does not change."""
        if unknown:
            raise ConfigError(f"TASKS[{alias!r}]: unknown OPTIONS {', '.join(sorted(unknown))}; known are {', '.join(OPTIONS)}")
        try:
            self._check(self.options)
        except TasukiError as error:
            raise ConfigError(f'TASKS[{alias!r}]["OPTIONS"]: {error.message}') from error

    @staticmethod
    def _check(fields: dict[str, Any]) -> None:
        """Raise InvalidInput if jobs cannot have these fields."""
        spec = JobSpec(job_id="checked", **fields)
        check_specs([spec])
        check_spec(spec)

    def validate_task(self, task: Any) -> None:
        for name, wanted in _TYPES.items():  # Django compares and calls them without a look
            value = getattr(task, name)
            if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
                shown = getattr(wanted, "__name__", wanted)
                raise InvalidTask(f"{name} of task {task.module_path} must be {shown}, got {type_name(value)}")
        super().validate_task(task)
        try:
            self._check(self._fields(task))
        except TasukiError as error:
            raise InvalidTask(f"task {task.module_path}: {error.message}") from error

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Insert the task's job in the calling thread's transaction."""
        last, function, fields = self._last
        if task is not last:
            self.validate_task(task)
            function, fields = task.module_path, self._fields(task)
            self._last = task, function, fields
        job_id = new_id()
        given = TaskCall(function, list(args), kwargs, self.alias, task.priority, task.takes_context)
        payload, call = _as_json(given)
        result = TasukiResult(
            task=task,
            id=job_id,
            status=Status.READY,
            enqueued_at=datetime.now(UTC),
            args=call.args,
            kwargs=call.kwargs,
            backend=self.alias,
        )

        def stored() -> None:
            _signals.task_enqueued.send(type(self), task_result=result)
            if on_enqueued.get() is not None:
                result.refresh()

        enqueue_job(JobSpec(job_id=job_id, payload=payload, **fields), stored)
        return result

    def _fields(self, task: Any) -> dict[str, Any]:
        """Return the fields of a JobSpec that all jobs of the task have."""
        own = {name: value for name in OPTIONS if (value := getattr(task, name, None)) is not None}
        return {
            "subject": task_subject(task.queue_name, task.module_path),
            "priority": _band_of(task.priority),
            "not_before": unix_time("run_after", task.run_after),
            "max_retries": 0,
            **self.options,
            **own,
        }

    def get_result(self, result_id: str) -> Any:
        """Return the result as the store has it now, or raise TaskResultDoesNotExist."""
        store = project_store()
        [job] = store.get([result_id]) if is_job_id(result_id) else [None]
        if job is None or not is_task(job.spec):
            raise _exceptions.TaskResultDoesNotExist(result_id)
        return _result_of(job, store.incidents(result_id) if job.failures or job.losses else ())


def _as_json(given: TaskCall) -> tuple[bytes, TaskCall]:
    """Return the call as JSON, and as the worker will read it; WrongType if that is not what was given."""
    try:
        payload, call = _sent(given)
        if call != given:  # tuples, bytes; or what Django refuses
            given = replace_fields(given, args=_normalize(given.args), kwargs=_normalize(given.kwargs))
            payload, call = _sent(given)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong_argument(given, error) from None
    if call != given:
        raise _wrong_argument(given)
    if len(payload) > BODY_INLINE_MAX_BYTES:
        raise TooLarge(
            f"the arguments of task {given.function} have {len(payload)} bytes as JSON, the limit is {BODY_INLINE_MAX_BYTES}; "
            "store what is large, and pass its key"
        )
    check_nesting(f"an argument of task {given.function}", payload)
    return payload, call


def _sent(call: TaskCall) -> tuple[bytes, TaskCall]:
    payload = _encode(call)
    return payload, _decode(payload)


def _wrong_argument(call: TaskCall, error: Exception | None = None) -> WrongType:
    """Return the error that names the argument which is not JSON, or which JSON would change."""
    for name, value in [*enumerate(call.args, 1), *((repr(name), value) for name, value in call.kwargs.items())]:
        try:
            given = _normalize(value)
            sent = msgspec.json.decode(_encode(given))
        except (TypeError, ValueError, RecursionError) as own:
            return WrongType(f"argument {name} of task {call.function} is not JSON: {own}")
        if sent != given:
            shown = quoted(repr(given)), quoted(repr(sent))
            return WrongType(
                f"argument {name} of task {call.function} would become {shown[1]}, given {shown[0]}: JSON has only finite "
                "numbers, and keys of dicts that are texts"
            )
    return WrongType(f"arguments of task {call.function}: {error}")


# ---------------------------------------------------------------------------------------------------- results


def _result_of(job: Job, incidents: Iterable[Any]) -> Any:
    call = _decode(job.spec.payload)
    workers = {one.attempt: one.worker_id for one in incidents if one.kind in FAILED_ATTEMPTS}
    if job.assigned_worker_id and (job.started_at is not None or job.state in (State.RUNNING, State.SUCCEEDED)):
        workers[job.attempt] = job.assigned_worker_id
    result = TasukiResult(
        task=_task_of(job.spec, call),
        id=job.job_id,
        status=_status_of(job),
        enqueued_at=_at(job.created_at),
        started_at=_at(job.started_at),
        last_attempted_at=_at(job.started_at),
        finished_at=_at(job.finished_at) if job.state.terminal else None,
        args=call.args,
        kwargs=call.kwargs,
        backend=call.backend,
        errors=_errors_of(job),
        worker_ids=[workers[attempt] for attempt in sorted(workers)],
    )
    if job.state is State.SUCCEEDED and (data := _returned(job)):
        object.__setattr__(result, "_return_value", msgspec.json.decode(data))
    return result


def _returned(job: Job) -> bytes:
    """Return the result of a job that succeeded; one above 64 KiB is at the place that TASUKI["blobs"] names."""
    ref = job.outcome.result_ref if job.outcome is not None else None
    if ref is None:
        return (job.outcome.result if job.outcome is not None else None) or b""
    where = project_settings().blobs
    if not where:
        raise ConfigError(
            f'the return value of task {job.job_id} has {ref.size_bytes} bytes; set TASUKI["blobs"] as its worker has it'
        )
    [place] = project_store().blob_places([ref.sha256])
    blobs = open_blobs(where, max_blob_bytes=ref.size_bytes, floor_free_bytes=0)
    return blobs.read_bytes(ref.sha256, ref.size_bytes, place.generation if place is not None else 0)


def _status_of(job: Job) -> Any:
    if job.state is State.SUCCEEDED:
        return Status.SUCCESSFUL
    if job.state.terminal:
        return Status.FAILED
    return Status.RUNNING if job.state is State.RUNNING else Status.READY


def _task_of(spec: JobSpec, call: TaskCall) -> Any:
    task = import_string(call.function)
    run_after = _at(spec.not_before)
    queue, _, _ = spec.subject.partition(".")
    return replace(task, priority=call.priority, queue_name=queue, run_after=run_after, backend=call.backend)


def _errors_of(job: Job) -> list[Any]:
    """Return the error of each attempt that raised; of an end without one (lost, timed out, canceled), its reason."""
    raised = {attempt: msgspec.json.decode(data) for attempt, _, data, _ in read_log(job.job_id, ERRORS)}
    errors = [_base.TaskError(exception_class_path=path, traceback=text) for path, text in raised.values()]
    outcome = job.outcome
    if job.state.terminal and job.state is not State.SUCCEEDED and outcome is not None and job.attempt not in raised:
        path = "builtins.TimeoutError" if job.state is State.TIMED_OUT else "builtins.RuntimeError"
        errors.append(_base.TaskError(exception_class_path=path, traceback=f"{outcome.error_code}: {outcome.message}"))
    return errors


def _at(time_s: float | None) -> datetime | None:
    return None if time_s is None else datetime.fromtimestamp(time_s, UTC)


# ---------------------------------------------------------------------------------------------------- in a process of the node


def handle_task(job: HandlerJob) -> bytes:
    """Run a task in a process that is used again: connections that are broken or too old are closed before and after it."""
    close_old_connections()
    reset_queries()
    try:
        return run_task(job)
    finally:
        close_old_connections()


def run_task(job: HandlerJob) -> bytes:
    """Call the function of a task, and return its value as JSON. An exception is the end of the attempt."""
    try:
        result = _begun(job)
    except Exception as error:
        _keep_error(job, error)
        raise
    try:
        context = [_base.TaskContext(task_result=result)] if _decode(job.payload).takes_context else []
        value = _normalize(result.task.call(*context, *result.args, **result.kwargs))
    except BaseException as error:
        kept, is_last = _keep_error(job, error)
        result.errors.append(kept)
        if is_last:
            _finish(result, Status.FAILED)
        raise
    object.__setattr__(result, "_return_value", value)
    _finish(result, Status.SUCCESSFUL)
    return _encode(value)


def _begun(job: HandlerJob) -> Any:
    """Return the result of a task that begins now."""
    call, now = _decode(job.payload), datetime.now(UTC)
    result = TasukiResult(
        task=_task_of(job.spec, call),
        id=job.job_id,
        status=Status.RUNNING,
        started_at=now,
        last_attempted_at=now,
        args=call.args,
        kwargs=call.kwargs,
        backend=call.backend,
        worker_ids=[f"pid-{os.getpid()}"] * (job.attempt % ATTEMPT_STEP),
    )
    _signals.task_started.send_robust(type(result.task.get_backend()), task_result=result)
    return result


def _normalize(value: Any) -> Any:
    home = "django.utils.json" if _PACKAGE == "django.tasks" else "django_tasks.utils"
    return import_module(home).normalize_json(value)


def _keep_error(job: HandlerJob, error: BaseException) -> tuple[Any, bool]:
    """Keep the traceback of this attempt; return it, and whether the task is not tried again."""
    kind = type(error)
    path, text = f"{kind.__module__}.{kind.__qualname__}", "".join(traceback.format_exception(error))
    is_last = job.spec.max_retries == 0
    try:
        row = write_log(job.job_id, job.attempt, ERRORS, _encode([path, text]))
        is_last = row.failures >= row.max_retries
    except DatabaseError as problem:  # the outcome is reported by another way
        logger.warning("the traceback of job %s could not be stored: %s", job.job_id, problem)
    return _base.TaskError(exception_class_path=path, traceback=text), is_last


def _finish(result: Any, status: Any) -> None:
    object.__setattr__(result, "finished_at", datetime.now(UTC))
    object.__setattr__(result, "status", status)
    _signals.task_finished.send_robust(type(result.task.get_backend()), task_result=result)
