"""Runs the commands of one worker: folder, inputs, process, time limit, result. The face that the worker's driver sees.

    run(attempt, stop)  →  RunResult        the driver reports it, uploads `result_file` first if there is one
    cleanup(attempt)                        when the result is recorded (or the attempt is lost): the folder goes

`run` answers with an Outcome whenever the job or its exec is to blame. It raises Unavailable (DiskFull among them) only
when nothing was started and the cause lies elsewhere: the driver then gives the lease back, which costs no retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from tasuki.core.job import InputFile, Outcome
from tasuki.errors import DiskFull, TasukiError, Unavailable
from tasuki.worker.attempt import (
    Attempt,
    Refused,
    RunResult,
    StopReason,
    exit_outcome,
    first_of,
    stopped_outcome,
    timed_out_outcome,
)
from tasuki.worker.commands import Command, build_command, choose_exec
from tasuki.worker.environment import base_environment
from tasuki.worker.execs import Exec
from tasuki.worker.folder import RunFolder, RunFolders, remove_tree, verify_input
from tasuki.worker.logs import CAP_BYTES, CappedLog, LogWatch
from tasuki.worker.process import Process, Spawn, kill_marked, spawn
from tasuki.worker.results import OutputLimits, Times, build_result

Fetch = Callable[[str, str, int, Path], Awaitable[None]]
"""`fetch(job_id, sha256, size_bytes, target)` writes an input of that job to the file `target`; it is verified here."""

GRACE_S = 5.0
LEASE_LOST_GRACE_S = 1.0  # the store waits LEASE_MARGIN_S past the lease before it gives the job away: be gone by then
ARCHIVES_AT_ONCE = 2  # each holds up to two whole logs in memory, and more than the cores would not be faster
# The system is short of something, the job is not to blame: EAGAIN is the limit of processes.
_NOT_NOW = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})

logger = logging.getLogger(__name__)


class RunLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a run may use up."""

    grace_s: float = GRACE_S
    """Between TERM and KILL."""
    log_cap_bytes: int = CAP_BYTES
    """Of stdout and of stderr, each."""
    outputs: OutputLimits = OutputLimits()


DEFAULT_LIMITS = RunLimits()


class CommandRunner:
    """All commands of one worker process. Made and used inside the running loop."""

    def __init__(
        self,
        data: Path,
        execs: Mapping[str, Exec],
        *,
        incarnation: str,
        fetch: Fetch,
        any_program_for: Callable[[], str | None] = lambda: None,
        limits: RunLimits = DEFAULT_LIMITS,
        floor_free_bytes: int | None = None,
        keep: bool = False,
        spawn: Spawn = spawn,
    ) -> None:
        """`any_program_for` names, at each start, the submitter whose jobs may run any program (see DESIGN §4), or None."""
        floor = {} if floor_free_bytes is None else {"floor_free_bytes": floor_free_bytes}
        self.folders = RunFolders(data, incarnation, **floor)
        self._execs = execs
        self._incarnation = incarnation
        self._fetch = fetch
        self._any_program_for = any_program_for
        self._limits = limits
        self._keep = keep
        self._spawn = spawn
        self._running: set[Process] = set()
        self._archiving = asyncio.Semaphore(ARCHIVES_AT_ONCE)

    async def run(
        self, attempt: Attempt, stop: asyncio.Future[StopReason], on_started: Callable[[], None] = lambda: None
    ) -> RunResult:
        """Run one attempt to its end. When it returns, no process of its group is alive.

        `on_started` is called when the process runs; for an attempt that is refused, never.
        """
        if stop.done():
            return RunResult(stopped_outcome(stop.result()))
        try:
            exec_ = choose_exec(self._execs, attempt, self._any_program_for())
            folder = await asyncio.to_thread(self.folders.create, attempt)
            if not await self._fetch_inputs(attempt, folder, stop):
                return RunResult(stopped_outcome(stop.result()))
            command = build_command(exec_, attempt, folder, environment=base_environment(), incarnation=self._incarnation)
            return await self._run_command(attempt, exec_, command, folder, stop, on_started)
        except Refused as refusal:
            return RunResult(refusal.outcome())
        except Unavailable:
            raise
        except TasukiError as error:  # an input that is not there or not what was announced
            return RunResult(Outcome(error_code=error.code, message=error.message))

    async def cleanup(self, attempt: Attempt) -> None:
        """Remove the attempt's folder, unless folders are kept for debugging."""
        if not self._keep:
            await asyncio.to_thread(_remove, self.folders.at(attempt).path)

    async def sweep(self) -> list[Path]:
        """At start: kill what dead workers of this data folder left running, and remove their folders."""
        return await asyncio.to_thread(self.folders.sweep, self._dispose)

    def _dispose(self, path: Path) -> None:
        if killed := kill_marked(path.name):
            logger.warning("killed %d processes that outlived their worker %s: %s", len(killed), path.name, killed)
        if not self._keep:
            _remove(path)

    def kill_all(self) -> None:
        """The last resort: SIGKILL to every group, without waiting."""
        for process in self._running:
            process.kill()

    def close(self) -> None:
        """Let go of the data folder; nothing may be running."""
        self.folders.close()

    # ------------------------------------------------------------------------------------------------ one attempt

    async def _fetch_inputs(self, attempt: Attempt, folder: RunFolder, stop: asyncio.Future[StopReason]) -> bool:
        """False if it was stopped meanwhile."""
        blobs = [file for file in attempt.spec.files if file.data is None]
        if not blobs:
            return not stop.done()
        fetching = asyncio.ensure_future(self._fetch_all(attempt.spec.job_id, blobs, folder))
        try:
            await first_of(fetching, stop)
            if fetching.done():
                fetching.result()
        finally:
            if not fetching.done():
                fetching.cancel()
                await asyncio.wait({fetching})
        return not stop.done()

    async def _fetch_all(self, job_id: str, blobs: list[InputFile], folder: RunFolder) -> None:
        for file in blobs:
            assert file.sha256 is not None  # `RunFolders.create` has looked
            assert file.size_bytes is not None
            target = folder.inputs / file.name
            await self._fetch(job_id, file.sha256, file.size_bytes, target)
            await asyncio.to_thread(verify_input, target, file)

    async def _run_command(
        self,
        attempt: Attempt,
        exec_: Exec,
        command: Command,
        folder: RunFolder,
        stop: asyncio.Future[StopReason],
        on_started: Callable[[], None],
    ) -> RunResult:
        with contextlib.ExitStack() as opened:
            logs = self._open_log(folder, "stdout", opened), self._open_log(folder, "stderr", opened)
            started_at, started = time.time(), time.monotonic()
            async with self._process(command, folder, logs) as process, LogWatch(logs):
                on_started()
                outcome = await self._supervise(process, exec_, command, stop)
            times = Times(started_at, time.time(), time.monotonic() - started)
            if outcome.error_code == StopReason.LEASE_LOST:  # nobody would take the result
                return RunResult(outcome)
            try:
                async with self._archiving:
                    return await asyncio.to_thread(
                        build_result, attempt, outcome, folder, logs, exec_.outputs, times, self._limits.outputs
                    )
            except DiskFull as error:
                return RunResult(
                    Outcome(
                        exit_code=outcome.exit_code,
                        error_code=error.code,
                        message=f"the result could not be written: {error.message}",
                    )
                )

    def _open_log(self, folder: RunFolder, name: str, opened: contextlib.ExitStack) -> CappedLog:
        log = CappedLog(folder.logs / name, self._limits.log_cap_bytes)
        opened.callback(log.close)
        return log

    @contextlib.asynccontextmanager
    async def _process(self, command: Command, folder: RunFolder, logs: tuple[CappedLog, CappedLog]) -> AsyncIterator[Process]:
        """The started process; whatever happens inside, its group is empty afterwards."""
        stdin = os.open(folder.stdin if folder.stdin.exists() else os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            process = self._spawn(command, stdin, logs[0].descriptor, logs[1].descriptor)
        except OSError as error:
            raise _not_started(command, error) from error
        finally:
            os.close(stdin)
        self._running.add(process)
        try:
            yield process
        finally:
            await process.end()
            self._running.discard(process)

    async def _supervise(self, process: Process, exec_: Exec, command: Command, stop: asyncio.Future[StopReason]) -> Outcome:
        """Wait for the end, or bring it about: TERM, grace, KILL, wait until the group is empty."""
        await first_of(process.exited, stop, timeout_s=command.timeout_s)
        if process.exited.done():
            return exit_outcome(await process.end(), f"exec {exec_.name!r}")
        outcome = stopped_outcome(stop.result()) if stop.done() else timed_out_outcome(command.timeout_s)
        lost = outcome.error_code == StopReason.LEASE_LOST
        grace_s = min(self._limits.grace_s, LEASE_LOST_GRACE_S) if lost else self._limits.grace_s
        process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await process.emptied()
        except TimeoutError:
            logger.info("job %s did not end within %g s of TERM and is killed", command.env["TASUKI_JOB_ID"], grace_s)
        code = await process.end()
        return msgspec.structs.replace(outcome, exit_code=exit_outcome(code, "").exit_code)


def _not_started(command: Command, error: OSError) -> Exception:
    what = f"program {command.program!r} could not be started: {os.strerror(error.errno or 0)}"
    if error.errno in _NOT_NOW:
        return Unavailable(f"{what}; this worker is short of it, try again")
    if error.errno in (errno.ENOENT, errno.ENOEXEC):  # it is there: its first line names an interpreter that is not
        return Refused("PROGRAM_NOT_FOUND", f"{what}; look at the interpreter in its first line")
    if error.errno == errno.E2BIG:
        return Refused("BAD_INPUT", f"{what}; arguments and environment are too long together")
    return Refused("PROGRAM_NOT_STARTED", what)


def _remove(path: Path) -> None:
    try:
        remove_tree(path)
    except OSError as error:  # it costs space and harms nobody; the next start tries again
        logger.warning("cannot remove the run folder %s: %s", path, error)
