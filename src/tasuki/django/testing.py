"""Helpers for a project's own tests: jobs run in the test's process and inside its transaction; no worker is needed.

    assert_enqueued(send_invoice, order.pk)         a task, or the name of a command, with these arguments
    run_enqueued()                                  runs what is due, also what that enqueues, and returns it
    with immediate(): ...                           runs each job as soon as it is enqueued
    fire_due(at)                                    makes the runs that definitions and events get at this time

Fixtures for pytest with pytest-django, after `pytest_plugins = ["tasuki.django.testing"]` in conftest.py: `tasuki_jobs` has the
functions above, `tasuki_immediate` runs each job of the test as soon as it is enqueued.

A task that raises has FAILED, as with a worker, and the test continues. Unlike with a worker the task shares the test's
transaction: one that breaks it on PostgreSQL breaks the test's, too.
"""

from __future__ import annotations

import io
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from unittest.mock import patch

import msgspec
from django.core.management import CommandError, call_command

from tasuki.core.job import READY, Job, Outcome
from tasuki.core.scheduler.firing import DJANGO_EXEC
from tasuki.core.store_messages import Filter, Grant, LeaseRequest, Report
from tasuki.django.commands import USAGE_EXIT_CODE, check_arguments, refused_command
from tasuki.django.conf import project_settings
from tasuki.django.enqueueing import is_task, on_enqueued, project_store
from tasuki.django.logs import write_log
from tasuki.django.models import JobRun
from tasuki.errors import InvalidInput
from tasuki.stores.common import SystemClock
from tasuki.stores.sql.store import SqlStore
from tasuki.worker.attempt import HandlerJob, handler_failure, handler_outcome

WORKER = "testing"
JOBS_MAX = 1_000  # of one run_enqueued: a task that enqueues itself would never end


def enqueued() -> list[Job]:
    """Return the jobs that wait, the oldest first, also those that are not due yet."""
    page = project_store().find(Filter(states=tuple(READY)), limit=JOBS_MAX)
    return page.jobs[::-1]


def assert_enqueued(what: Any, *args: Any, count: int | None = None, **kwargs: Any) -> list[Job]:
    """Fail unless this task, or the command of this name, waits with these arguments; return the jobs.

    Without arguments any will do. `count`: exactly so many; else at least one.
    """
    waiting = enqueued()
    found = [job for job in waiting if _is(job, what, args, kwargs)]
    if len(found) != count if count is not None else not found:
        name = what if isinstance(what, str) else what.module_path
        wanted = f"{count} x " if count is not None else ""
        shown = "\n".join(f"    {_shown(job)}" for job in waiting) or "    nothing"
        raise AssertionError(f"expected {wanted}{name} with {args} {kwargs}, found {len(found)}; what waits:\n{shown}")
    return found


def _is(job: Job, what: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name, given, named = _call_of(job)
    if name != (what if isinstance(what, str) else what.module_path):
        return False
    return not (args or kwargs) or (given, named) == (msgspec.to_builtins(list(args)), kwargs)


def _call_of(job: Job) -> tuple[str, list[Any], dict[str, Any]]:
    if is_task(job.spec):
        call = msgspec.json.decode(job.spec.payload)
        return call["function"], call.get("args", []), call.get("kwargs", {})
    name, *words = job.spec.args or ("",)
    return name, words, {}


def _shown(job: Job) -> str:
    name, args, kwargs = _call_of(job)
    return f"{name} {args} {kwargs}"


def run_enqueued() -> list[Job]:
    """Run all jobs that are due, the most urgent and oldest first, and those that they enqueue; return them as they ended."""
    ran: list[str] = []
    store = project_store()
    ready = JobRun.objects.using(project_settings().database).filter(ready=1).order_by("-priority", "id")
    while len(ran) < JOBS_MAX:
        store.promote(epoch=store.epoch()[0])
        due = ready.first()
        if due is None:
            break
        ran.append(due.job_id)
        _run(due.job_id)
    return [job for job in store.get(ran) if job is not None]


def fire_due(at: datetime) -> list[Job]:
    """Fire the definitions and events that are due at this time, as a leader does then; return the new runs.

    `run_enqueued` runs them. Times of a definition count from its creation on.
    """
    store = SqlStore.in_django(project_settings().database, clock=_ClockAt(at.timestamp()))
    fired = store.fire(epoch=store.epoch()[0])
    return [job for job in project_store().get([run.job_id for run in fired.runs]) if job is not None]


class _ClockAt(SystemClock):
    def __init__(self, at: float) -> None:
        self._at = at

    def wall(self) -> float:
        return self._at


@contextmanager
def immediate() -> Iterator[None]:
    """Run each job as soon as it is enqueued, in the caller's transaction; those that are delayed wait."""
    reset = on_enqueued.set(run_enqueued)
    try:
        yield
    finally:
        on_enqueued.reset(reset)


def _run(job_id: str) -> None:
    store = project_store()
    [[grant]] = store.lease([LeaseRequest(worker_id=WORKER, incarnation=WORKER, job_ids=(job_id,))])
    [job] = store.get([job_id])
    assert job is not None
    outcome = _run_task(job, grant) if is_task(job.spec) else _run_command(job, grant)
    report = Report(job_id, WORKER, grant.lease_id, grant.attempt, outcome, started_at=store.clock.wall())
    (store.finish if outcome.error_code is None else store.fail)([report])


def _run_task(job: Job, grant: Grant) -> Outcome:
    from tasuki.django.task_backend import run_task

    try:
        return handler_outcome(run_task(HandlerJob(job.spec, grant.attempt)))
    except BaseException as error:  # noqa: BLE001 - as in a worker: any exception is the end of the attempt
        return handler_failure(error)


def _run_command(job: Job, grant: Grant) -> Outcome:
    if job.spec.exec != DJANGO_EXEC:
        return Outcome(error_code="EXEC_NOT_ALLOWED", message=f"{job.spec.exec!r} is not a job of this project", permanent=True)
    out, err = io.StringIO(), io.StringIO()
    variables = {**job.spec.env, "TASUKI_JOB_ID": job.job_id, "TASUKI_ATTEMPT": str(grant.attempt)}
    name, *words = job.spec.args or ("",)
    if (refused := refused_command(name)) is not None:
        return refused
    code = 0
    try:
        check_arguments(name, words)
        with patch.dict("os.environ", variables):
            call_command(name, *words, stdout=out, stderr=err)
    except InvalidInput as error:
        code = USAGE_EXIT_CODE
        err.write(f"{error.message}\n")
    except CommandError as error:
        code = error.returncode
        err.write(f"CommandError: {error}\n")
    except Exception:  # noqa: BLE001 - as of a process: its exit code is 1
        code = 1
        err.write(traceback.format_exc())
    for stream, text in (("stdout", out.getvalue()), ("stderr", err.getvalue())):
        if text:
            write_log(job.job_id, grant.attempt, stream, text.encode())
    if not code:
        return Outcome(exit_code=0)
    permanent = code == USAGE_EXIT_CODE
    return Outcome(exit_code=code, error_code="EXIT_CODE", message=f"exit code {code}", permanent=permanent)


# ---------------------------------------------------------------------------------------------------- pytest


class _JobFunctions:
    """The functions as the fixture `tasuki_jobs` has them."""

    enqueued = staticmethod(enqueued)
    assert_enqueued = staticmethod(assert_enqueued)
    run_enqueued = staticmethod(run_enqueued)
    fire_due = staticmethod(fire_due)


try:
    import pytest
except ImportError:  # Django's own test runner
    pass
else:

    @pytest.fixture
    def tasuki_jobs(db: None) -> _JobFunctions:
        """Return the functions above, in a test that may use the database."""
        return _JobFunctions()

    @pytest.fixture
    def tasuki_immediate(db: None) -> Iterator[None]:
        """Run each job that the test enqueues at once."""
        with immediate():
            yield
