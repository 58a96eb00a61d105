"""The attempts that run in a worker: started, stopped, ended, forgotten. Commands go to the runner, `async def` handlers run in
the event loop, plain functions in a child process.

`Attempts` tells the worker what happened. Leases are decided by the machine (`core/worker`), results are sent by `outbox.py`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from tasuki.core.job import RESULT_INLINE_MAX_BYTES, BlobRef, JobSpec, Outcome
from tasuki.core.protocol import Ending
from tasuki.core.store_messages import Grant
from tasuki.core.worker.events import AttemptEnded, AttemptReturned, Event, Forget, KeepRejected, Started
from tasuki.core.worker.machine import WorkerMachine
from tasuki.errors import TasukiError, Unavailable
from tasuki.event_loop import BackgroundTasks
from tasuki.worker.attempt import Attempt, HandlerJob, RunResult, StopReason, worker_failure
from tasuki.worker.handlers import FunctionProcesses, Handler, Handlers
from tasuki.worker.outbox import Outbox, OutboxRecord
from tasuki.worker.runner import CommandRunner
from tasuki.worker.status import RunningJob

logger = logging.getLogger("tasuki.worker")
_decode_spec = msgspec.msgpack.Decoder(JobSpec).decode


class ActiveAttempt(msgspec.Struct):
    """An attempt that runs here, or whose end no server has answered."""

    attempt: Attempt
    stop: asyncio.Future[StopReason] | None = None
    task: asyncio.Task[None] | None = None
    stopped: StopReason | None = None
    ended_at: float = 0.0


class Attempts:
    """All attempts of one worker process. Made and used inside the running loop."""

    def __init__(
        self,
        machine: WorkerMachine,
        runner: CommandRunner,
        handlers: Handlers,
        children: FunctionProcesses | None,
        outbox: Outbox,
        *,
        tell: Callable[[Event], None],
        ended: Callable[[AttemptEnded], None],
        give_up: Callable[[TasukiError], None],
        as_reported: Callable[[Attempt, RunResult], Awaitable[RunResult]],
    ) -> None:
        """`ended` receives ends that may be sent together with others of this turn of the loop. `give_up` ends the worker because
        nothing can run here any more. `as_reported` may give a command's result another shape."""
        self._tell = tell
        self._ended = ended
        self._give_up = give_up
        self._machine = machine
        self._runner = runner
        self._handlers = handlers
        self._children = children
        self._outbox = outbox
        self._as_reported = as_reported
        self._loop = asyncio.get_running_loop()
        self._active: dict[str, ActiveAttempt] = {}
        self._cleaning = BackgroundTasks()

    def __len__(self) -> int:
        return len(self._active)

    def running(self) -> list[RunningJob]:
        """Return the attempts as the status file shows them."""
        attempts = [active.attempt for active in self._active.values()]
        return [
            RunningJob(job_id=one.spec.job_id, attempt=one.attempt, subject=one.spec.subject, since=self._started_at(one))
            for one in attempts
        ]

    def _started_at(self, attempt: Attempt) -> float | None:
        held = self._machine.held.get(attempt.lease_id)
        return held.started_at if held is not None else None

    def start(self, grant: Grant, wall: float) -> None:
        """Start the attempt in a task of its own; `wall` is the time of its start."""
        spec = _decode_spec(grant.spec)
        attempt = Attempt(spec=spec, lease_id=grant.lease_id, attempt=grant.attempt, submitter=grant.submitter)
        active = self._active[grant.lease_id] = ActiveAttempt(attempt)
        if spec.exec:
            active.stop = self._loop.create_future()
            active.task = self._loop.create_task(self._run_command(active))
            active.task.add_done_callback(functools.partial(self._report_failure, active))
            return
        handler = self._handlers.find(spec.subject)
        if handler is not None and handler.asynchronous:
            # The machine is told without an event: this is the path of ten thousand jobs a second.
            self._machine.handler_started(grant.lease_id, wall)
            active.task = self._loop.create_task(self._run_async(active, handler))
        else:
            active.stop = self._loop.create_future()
            active.task = self._loop.create_task(self._run_plain(active, handler, wall))
            active.task.add_done_callback(functools.partial(self._report_failure, active))

    def stop(self, lease_id: str, reason: StopReason) -> None:
        """Stop an attempt; its end is reported when nothing of it is left."""
        active = self._active.get(lease_id)
        if active is not None:
            _stop(active, reason)

    async def stop_all(self, timeout_s: float) -> None:
        """Stop every attempt because the worker ends, and wait up to `timeout_s`."""
        for active in list(self._active.values()):
            _stop(active, StopReason.SHUTDOWN)
        if tasks := [active.task for active in self._active.values() if active.task]:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def close(self) -> None:
        """Stop removing run folders; the next start removes the rest."""
        await self._cleaning.close()

    # ------------------------------------------------------------------------------------------------ ways to run

    async def _run_async(self, active: ActiveAttempt, handler: Handler) -> None:
        await self._end_run(active, await handler.run(active.attempt, lambda: active.stopped))

    async def _run_plain(self, active: ActiveAttempt, handler: Handler | None, wall: float) -> None:
        spec = active.attempt.spec
        if handler is None or self._children is None or active.stop is None:
            message = f"this worker has no handler for subject {spec.subject!r}"
            self._end(active, Outcome(error_code="NO_HANDLER", message=message, permanent=True))
            return
        self._machine.handler_started(active.attempt.lease_id, wall)
        job = HandlerJob(spec, active.attempt.attempt)
        try:
            outcome = await self._children.run(handler.name, job, handler.limit_s(spec), active.stop)
        except Unavailable as error:
            # The process that forks the children is gone: no plain function can run here any more.
            outcome = Outcome(error_code=error.code, message=error.message)
            self._give_up(error)
        await self._end_run(active, outcome)

    async def _run_command(self, active: ActiveAttempt) -> None:
        assert active.stop is not None
        attempt = active.attempt
        try:
            result = await self._runner.run(attempt, active.stop, lambda: self._tell(Started(attempt.lease_id)))
            result = await self._as_reported(attempt, result)
        except Unavailable as error:  # nothing was started
            logger.warning("job %s is given back: %s", attempt.spec.job_id, error.message)
            self._active.pop(attempt.lease_id, None)
            self._tell(AttemptReturned(attempt.lease_id))
            await self._runner.cleanup(attempt)
            return
        await self._end_run(active, result.outcome, result.result_file)

    # ------------------------------------------------------------------------------------------------ ends

    async def _end_run(self, active: ActiveAttempt, outcome: Outcome, result_file: Path | None = None) -> None:
        if result_file is not None and outcome.result_ref is not None:
            await self._end_large(active, outcome, result_file)
        elif outcome.result is not None and len(outcome.result) > RESULT_INLINE_MAX_BYTES:
            await self._end_large(active, *_as_blob(outcome))
        else:
            self._end(active, outcome)

    async def _end_large(self, active: ActiveAttempt, outcome: Outcome, result: Path | bytes) -> None:
        """Upload the result, then report the end."""
        active.ended_at = time.time()
        attempt = active.attempt
        ending = Ending(attempt.spec.job_id, attempt.lease_id, attempt.attempt, outcome, self._started_at(attempt))
        record = OutboxRecord(ending, attempt.spec.subject, active.ended_at, result)
        reported = await self._outbox.upload(record, active.stop or self._loop.create_future(), lambda: active.stopped)
        if reported is not None:
            self._end(active, reported)

    def _end(self, active: ActiveAttempt, outcome: Outcome) -> None:
        if not active.ended_at:
            active.ended_at = time.time()
        self._ended(AttemptEnded(active.attempt.lease_id, outcome))

    def _report_failure(self, active: ActiveAttempt, task: asyncio.Task[None]) -> None:
        """Report an attempt whose task failed: without a report its lease would be renewed for ever."""
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            logger.error("job %s attempt %d", active.attempt.spec.job_id, active.attempt.attempt, exc_info=error)
            self._end(active, worker_failure(error))

    def save(self, ending: Ending) -> None:
        """Write an ending that no server has taken so far to disk, where it outlives this process."""
        self._outbox.save(self._record(ending))

    def set_aside(self, command: KeepRejected) -> None:
        """Keep the result of an ending that a server refused for good."""
        self._outbox.set_aside(self._record(command.ending), command.reason)

    def forget(self, command: Forget) -> None:
        """Drop everything about the attempt, and recycle or remove its folder."""
        self._outbox.forget(command.lease_id)
        active = self._active.pop(command.lease_id, None)
        if active is None or not active.attempt.spec.exec:
            return
        if command.fenced or not self._runner.recycle(active.attempt):
            self._cleaning.spawn(self._cleanup(active.attempt, bool(command.fenced)))

    def _record(self, ending: Ending) -> OutboxRecord:
        active = self._active.get(ending.lease_id)
        return OutboxRecord(ending) if active is None else OutboxRecord(ending, active.attempt.spec.subject, active.ended_at)

    async def _cleanup(self, attempt: Attempt, refused: bool) -> None:
        if refused:
            await self._outbox.written()  # its result may be in the folder until it is copied
        await self._runner.cleanup(attempt)


def _as_blob(outcome: Outcome) -> tuple[Outcome, bytes]:
    """Return the outcome that refers to a large result in memory, and the result."""
    assert outcome.result is not None
    assert outcome.result_sha256 is not None
    ref = BlobRef(outcome.result_sha256, len(outcome.result))
    return msgspec.structs.replace(outcome, result=None, result_ref=ref), outcome.result


def _stop(active: ActiveAttempt, reason: StopReason) -> None:
    active.stopped = reason
    if active.stop is not None:
        if not active.stop.done():
            active.stop.set_result(reason)
    elif active.task is not None:
        active.task.cancel()
