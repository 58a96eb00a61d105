"""Runs the commands of one worker: folder, inputs, process, time limit, result.

    run(attempt, stop)  →  RunResult        the caller reports it, and uploads `result_file` first if there is one
    cleanup(attempt)                        removes the folder, when the result is recorded or the attempt is lost

`run` returns an Outcome whenever the job or its exec is to blame. It raises Unavailable (DiskFull among them) only when nothing
was started for another reason: the caller then gives the lease back, which costs no retry. The keeper (`keeper/`) starts and
ends the processes; a worker without its keeper ends.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from msgspec.structs import replace

from tasuki.blobs.files import disk_full_as_error
from tasuki.clocks import boot_time
from tasuki.config import DISK_FLOOR_BYTES
from tasuki.core.job import BlobRef, InputFile, Outcome, Progress
from tasuki.errors import DiskFull, KeeperLost, TasukiError, Unavailable
from tasuki.worker.attempt import (
    Attempt,
    JobRefused,
    RunResult,
    StopReason,
    ended_outcome,
    first_of,
    judged,
    rules_of,
    stopped_outcome,
    unless_stopped,
)
from tasuki.worker.commands import (
    NO_SECRETS,
    Command,
    SecretProblem,
    build_command,
    build_interpreter,
    check_secrets,
    choose_exec,
    matches_apart,
    read_secrets,
)
from tasuki.worker.execs import Exec, base_environment
from tasuki.worker.folder import READ_ONLY, RunFolder, RunFolders, remove_tree, verify_input
from tasuki.worker.keeper.client import Keeper, KeptAttempt
from tasuki.worker.keeper.keeper import LEASE_LOST_GRACE_S
from tasuki.worker.keeper.linux import sweep
from tasuki.worker.keeper.protocol import EndReason, Ready, Spawned, TreeEnded
from tasuki.worker.logs import DEFAULT_CAPS, CappedLog, LogCaps, LogFollow, LogWatch, ProgressFile, ReadableLog
from tasuki.worker.redaction import RedactedLog
from tasuki.worker.results import Times, build_result, is_quick

Fetch = Callable[[str, str, int, Path], Awaitable[None]]
"""`fetch(job_id, sha256, size_bytes, target)` writes an input of that job to the file `target`; the runner verifies it."""

INPUT_CHANGED = "INPUT_CHANGED"
GRACE_S = 5.0  # between TERM and KILL
ARCHIVES_AT_ONCE = 2  # each holds up to two whole logs in memory, and more than the cores would not be faster
_NO_INPUT = os.fsencode(os.devnull)
# The system is short of something, the job is not to blame. EAGAIN: the limit of processes; ETIME: its lease was over already.
_NOT_NOW = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETIME})

logger = logging.getLogger(__name__)


class CommandRunner:
    """All commands of one worker process. Made and used inside the running loop."""

    def __init__(
        self,
        data: Path,
        execs: Mapping[str, Exec],
        *,
        incarnation: str,
        fetch: Fetch,
        fetch_cached: Fetch | None = None,
        may_run_any: Callable[[Attempt], bool] = lambda attempt: False,
        grace_s: float = GRACE_S,
        log_caps: LogCaps = DEFAULT_CAPS,
        floor_free_bytes: int = DISK_FLOOR_BYTES,
        keeper: Keeper | None = None,
        lease_deadline: Callable[[str], float | None] = lambda lease_id: None,
        on_keeper_lost: Callable[[KeeperLost], None] = lambda error: None,
        on_progress: Callable[[str, Progress], None] = lambda lease_id, progress: None,
        log_follow: LogFollow | None = None,
        folders: RunFolders | None = None,
        archives: bool = True,
    ) -> None:
        """`may_run_any(attempt)` returns whether this job may run any program: the worker's own user submitted it on its own
        machine. `lease_deadline(lease_id)` returns the boot time at which the attempt must be over, None: never.
        Without a `keeper` one is forked at the first start. `folders` replaces a worker's run folders (agents). `fetch_cached`
        is for files of caches; it has verified them. Without `archives` a result has its outcome alone."""
        check_secrets(execs.values())
        self.folders = folders or RunFolders(data, incarnation, floor_free_bytes=floor_free_bytes)
        self._execs = execs
        self._environment = base_environment()
        self._incarnation = incarnation
        self._fetch = fetch
        self._fetch_cached = fetch_cached
        self._may_run_any = may_run_any
        self._default_grace_s = grace_s
        self._log_caps = log_caps
        self._keeper = keeper
        self._lease_deadline = lease_deadline
        self._on_keeper_lost = on_keeper_lost
        self._on_progress = on_progress
        self._log_follow = log_follow or LogFollow(lambda piece: None)
        self._archives = archives
        self._prepared = False
        self._swept: asyncio.Future[None] | None = None
        self._running: dict[KeptAttempt, str] = {}  # attempts that the keeper runs, with their leases
        self._archiving = asyncio.Semaphore(ARCHIVES_AT_ONCE)

    async def run(
        self, attempt: Attempt, stop: asyncio.Future[StopReason], on_started: Callable[[], None] = lambda: None
    ) -> RunResult:
        """Run one attempt to its end. When this returns, no process of the attempt is alive.

        `on_started` is called when the process runs, and never for an attempt that is refused. A command during which a shared
        input was written to is run again, once, with copies of its own.
        """
        result = await self._run(attempt, stop, on_started)
        if result.outcome.error_code != INPUT_CHANGED:
            return result
        await self.cleanup(attempt)
        try:
            return await self._run(attempt, stop, lambda: None, own_copies=True)
        except Unavailable as error:  # it was started, and cannot be given back
            return RunResult(stopped_outcome(stop.result()) if stop.done() else _not_run_again(result.outcome, error))

    async def _run(
        self, attempt: Attempt, stop: asyncio.Future[StopReason], on_started: Callable[[], None], own_copies: bool = False
    ) -> RunResult:
        if stop.done():
            return _not_begun(stop.result())
        try:
            exec_ = choose_exec(self._execs, attempt, self._may_run_any)
            quick = self.folders.is_quick(attempt)
            folder = self.folders.create(attempt) if quick else await asyncio.to_thread(self.folders.create, attempt)
            if not await self._fetch_inputs(attempt, folder, stop, own_copies):
                return _not_begun(stop.result())
            secrets = await asyncio.to_thread(read_secrets, exec_) if exec_.env_from_file else NO_SECRETS
            building = functools.partial(build_command, exec_, attempt, folder, self._environment, self._incarnation, secrets)
            command = await asyncio.to_thread(building) if matches_apart(exec_, attempt.spec) else building()
            return await self._run_command(attempt, exec_, command, folder, stop, on_started)
        except SecretProblem as problem:  # a file that is being replaced may be there at the next attempt
            logger.error("job %s: %s", attempt.spec.job_id, problem)
            return RunResult(Outcome(error_code="SECRET_MISSING", message=f"{problem}; put it in order on this worker"))
        except (JobRefused, TasukiError, OSError) as error:
            return RunResult(_not_prepared(attempt, error))

    async def prepare(self, attempt: Attempt, stop: asyncio.Future[StopReason], own_copies: bool = False) -> RunFolder | Outcome:
        """Make a folder with the inputs of a handler's attempt; return the outcome if that fails or `stop` comes first."""
        try:
            folder = await asyncio.to_thread(self.folders.create, attempt)
            fetched = await self._fetch_inputs(attempt, folder, stop, own_copies)
            return folder if fetched else _not_begun(stop.result()).outcome
        except (JobRefused, TasukiError, OSError) as error:
            return _not_prepared(attempt, error)

    async def prepare_again(
        self, attempt: Attempt, folder: RunFolder, stop: asyncio.Future[StopReason]
    ) -> RunFolder | Outcome | None:
        """Make the folder anew, with copies of its own, if a shared input was written to while the handler ran; else None."""
        changed = None if stop.done() else _changed_input(attempt, folder)
        if changed is None:
            return None
        await self.cleanup(attempt)
        try:
            return await self.prepare(attempt, stop, own_copies=True)
        except Unavailable as error:
            return stopped_outcome(stop.result()) if stop.done() else _not_run_again(changed, error)

    async def cleanup(self, attempt: Attempt) -> None:
        """Remove the attempt's folder."""
        await asyncio.to_thread(_remove, self.folders.at(attempt).path)

    async def sweep(self) -> list[Path]:
        """Kill the processes that dead workers of this data folder left, and remove their folders. For the worker's start."""
        if self._keeper is not None:
            level = await self.keeper_level()
            logger.info("keeper %d: level %s (%s), limits %s", self._keeper.pid, level.level, level.detail, level.limits)
        return await asyncio.to_thread(self.folders.sweep, self._dispose)

    def _dispose(self, path: Path) -> None:
        if killed := sweep(path.name, path):
            logger.warning("killed %d processes that outlived their worker %s: %s", len(killed), path.name, killed)
        _remove(path)

    async def keeper_level(self) -> Ready:
        """Return how well the keeper can find the processes of a job on this system."""
        return await self._started_keeper().ready()

    def renewed(self) -> None:
        """Pass the new deadlines of all leases on to the keeper."""
        if self._running and self._keeper is not None:
            moved = ((kept, self._lease_deadline(lease_id)) for kept, lease_id in self._running.items())
            self._keeper.renew((kept, deadline) for kept, deadline in moved if deadline is not None)

    def kill_all(self) -> None:
        """Send SIGKILL to every running process, without waiting. The last resort."""
        if self._keeper is not None:
            self._keeper.kill_all()

    def close(self) -> None:
        """Close the keeper and the run folders; nothing may be running."""
        if self._keeper is not None:
            self._keeper.close()
        self.folders.close()

    def _started_keeper(self) -> Keeper:
        if self._keeper is None:
            self._keeper = Keeper.start(self._incarnation)
        self._keeper.on_lost = self._keeper_lost
        if not self._prepared:
            self._prepared = True
            for exec_ in self._execs.values():
                if (order := build_interpreter(exec_, self._environment, self._incarnation)) is not None:
                    self._keeper.prepare(order)
        return self._keeper

    def _keeper_lost(self, error: KeeperLost) -> None:
        """Kill the processes that ran under the keeper, as far as they are found. Their leases run out, and the worker ends."""
        self._swept = asyncio.ensure_future(self._sweep_own())
        self._on_keeper_lost(error)

    async def _sweep_own(self) -> None:
        if killed := await asyncio.to_thread(sweep, self._incarnation, self.folders.root):
            logger.warning("killed %d processes that outlived their keeper: %s", len(killed), killed)

    # ------------------------------------------------------------------------------------------------ one attempt

    async def _fetch_inputs(
        self, attempt: Attempt, folder: RunFolder, stop: asyncio.Future[StopReason], own_copies: bool
    ) -> bool:
        """Download the inputs that are blobs; return False if the attempt was stopped meanwhile."""
        blobs = [file for file in attempt.spec.files if file.data is None]
        if not blobs:
            return not stop.done()
        fetching = self._fetch_all(attempt.spec.job_id, blobs, folder, own_copies)
        return await unless_stopped(fetching, stop) and not stop.done()

    async def _fetch_all(self, job_id: str, blobs: list[InputFile], folder: RunFolder, own_copies: bool) -> None:
        for file in blobs:
            assert file.sha256 is not None  # `RunFolders.create` has looked
            assert file.size_bytes is not None
            target = folder.inputs / file.name
            if file.cached_as is not None and self._fetch_cached is not None and not own_copies:
                await self._fetch_cached(job_id, file.sha256, file.size_bytes, target)
                folder.note_shared(target, BlobRef(file.sha256, file.size_bytes))
                continue
            await self._fetch(job_id, file.sha256, file.size_bytes, target)
            await asyncio.to_thread(verify_input, target, file)
            if file.cached_as is not None:
                await asyncio.to_thread(target.chmod, READ_ONLY)

    async def _run_command(
        self,
        attempt: Attempt,
        exec_: Exec,
        command: Command,
        folder: RunFolder,
        stop: asyncio.Future[StopReason],
        on_started: Callable[[], None],
    ) -> RunResult:
        with ExitStack() as opened:
            with disk_full_as_error(folder.name):
                logs = self._open_log(folder, "stdout", opened), self._open_log(folder, "stderr", opened)
            redactor = command.secrets.redactor
            redacted = [RedactedLog(log, redactor) for log in logs] if redactor else []
            shown: Sequence[ReadableLog] = redacted or logs
            opened.enter_context(self._log_follow.of(attempt.lease_id, {"stdout": shown[0], "stderr": shown[1]}))
            for log in redacted:
                opened.callback(log.end)
            tell = functools.partial(self._on_progress, attempt.lease_id)
            progress = opened.enter_context(closing(ProgressFile(f"{folder.name}/log/progress", tell, redactor.text)))
            kept = self._start(command, attempt, folder)
            self._running[kept] = attempt.lease_id
            try:
                spawned = await self._started(command, kept, stop)
                if spawned is None:
                    return _not_begun(stop.result())
                on_started()
                async with LogWatch(logs, progress):
                    ended = await self._end_of(kept, command, stop)
            except KeeperLost as error:
                if self._swept is not None:  # None: this worker has closed the keeper
                    await self._swept
                return RunResult(Outcome(error_code=StopReason.SHUTDOWN, message=error.message))
            finally:
                await self._ensure_ended(kept)
                del self._running[kept]
            outcome = ended_outcome(ended, f"exec {exec_.name!r}", command.timeout_s, command.limits)
            if outcome.error_code == "EXIT_CODE" and (shortage := self.folders.shortage()):
                outcome = replace(outcome, message=f"{outcome.message}; {shortage}")
            if not stop.done() and (changed := _changed_input(attempt, folder)) is not None:
                return RunResult(changed)
            outcome = redactor.outcome(judged(outcome, exec_.name, exec_.exits, rules_of(attempt.spec)))
            wall = time.time() - boot_time()
            times = Times(spawned.at + wall, ended.at + wall, ended.at - spawned.at)
            if outcome.error_code == StopReason.LEASE_LOST:  # no server would take the result
                return RunResult(outcome)
            if not self._archives:
                return RunResult(replace(outcome, meta={**outcome.meta, "duration_s": round(times.duration_s, 6)}))
            build = functools.partial(build_result, attempt, outcome, folder, logs, exec_.outputs, times, redactor)
            return await self._archive(build, outcome, is_quick(folder, logs))

    def _open_log(self, folder: RunFolder, name: str, opened: ExitStack) -> CappedLog:
        return opened.enter_context(closing(CappedLog(f"{folder.name}/log/{name}", self._log_caps)))

    def _start(self, command: Command, attempt: Attempt, folder: RunFolder) -> KeptAttempt:
        keeper = self._started_keeper()
        if keeper.lost is not None:
            raise keeper.lost
        at = os.fsencode(folder.name)
        return keeper.spawn(
            program=os.fsencode(command.program),
            argv=tuple(map(os.fsencode, command.argv)),
            env={**{os.fsencode(name): os.fsencode(value) for name, value in command.env.items()}, **command.secrets.environment},
            cwd=os.fsencode(command.cwd),
            folder=at,
            mark=os.fsencode(command.mark),
            stdin=at + b"/stdin" if attempt.spec.payload else _NO_INPUT,
            stdout=at + b"/log/stdout",
            stderr=at + b"/log/stderr",
            progress=at + b"/log/progress",
            lease_deadline=self._lease_deadline(attempt.lease_id),
            timeout_s=command.timeout_s,
            grace_s=self._grace_s(command),
            limits=command.limits,
            warm=command.warm,
        )

    def _grace_s(self, command: Command) -> float:
        return self._default_grace_s if command.stop_grace_s is None else command.stop_grace_s

    async def _started(self, command: Command, kept: KeptAttempt, stop: asyncio.Future[StopReason]) -> Spawned | None:
        """Wait for the start; None if a stop came first: a warm interpreter may itself have to be started."""
        if command.warm:
            await first_of(kept.started, stop)
        if stop.done() and not kept.started.done():
            self._pass_on(stop.result(), kept, command)
        try:
            return await kept.started
        except OSError as error:
            if error.errno == errno.ECANCELED and stop.done():
                return None
            raise _not_started(command, error) from error

    async def _end_of(self, kept: KeptAttempt, command: Command, stop: asyncio.Future[StopReason]) -> TreeEnded:
        """Wait for the end, and pass a stop on to the keeper, which enforces the time limit and the lease itself."""

        def pass_on(stop: asyncio.Future[StopReason]) -> None:
            self._pass_on(stop.result(), kept, command)

        stop.add_done_callback(pass_on)
        try:
            return await asyncio.shield(kept.ended)
        finally:
            stop.remove_done_callback(pass_on)

    def _pass_on(self, reason: StopReason, kept: KeptAttempt, command: Command) -> None:
        assert self._keeper is not None
        grace_s = self._grace_s(command)
        if reason is StopReason.LEASE_LOST:
            grace_s = min(grace_s, LEASE_LOST_GRACE_S)
        self._keeper.stop(kept, EndReason(reason.value), grace_s)

    async def _ensure_ended(self, kept: KeptAttempt) -> None:
        """Kill the attempt if it is still alive, whatever happened, and wait for its end."""
        if not kept.ended.done():
            assert self._keeper is not None
            self._keeper.stop(kept, EndReason.SHUTDOWN, 0.0)
            await asyncio.wait([kept.ended])

    async def _archive(self, build: Callable[[], RunResult], outcome: Outcome, quick: bool) -> RunResult:
        try:
            if quick:
                return build()
            async with self._archiving:
                return await asyncio.to_thread(build)
        except DiskFull as error:
            message = f"the result could not be written: {error.message}"
            return RunResult(Outcome(exit_code=outcome.exit_code, error_code=error.code, message=message))


def _changed_input(attempt: Attempt, folder: RunFolder) -> Outcome | None:
    """Return the outcome of an attempt during which an input that it shares with other jobs was written to; None for others."""
    if not (name := folder.changed_input()):
        return None
    logger.warning("job %s: cached input %r was changed; it runs again with copies of its own", attempt.spec.job_id, name)
    return Outcome(error_code=INPUT_CHANGED, message=f"its input {name!r} is a cached file, and was changed while it ran")


def _not_run_again(outcome: Outcome, error: Unavailable) -> Outcome:
    """Return the outcome of an attempt with a changed input that cannot be run again now."""
    return replace(outcome, message=f"{outcome.message}; it could not be run again: {error.message}")


def _not_begun(reason: StopReason) -> RunResult:
    """Return the result of a stop that came before the start. On shutdown the lease is given back, at no cost for the job."""
    if reason is StopReason.SHUTDOWN:
        raise Unavailable("the worker is shutting down and had not started the job")
    return RunResult(stopped_outcome(reason))


def _not_prepared(attempt: Attempt, error: JobRefused | TasukiError | OSError) -> Outcome:
    """Return the outcome of an attempt whose folder or inputs could not be made; raise Unavailable: another worker may try."""
    if isinstance(error, JobRefused):
        return error.outcome()
    if isinstance(error, Unavailable):
        raise error
    if isinstance(error, TasukiError):  # an input that is not there or not what was announced
        return Outcome(error_code=error.code, message=error.message)
    logger.error("job %s: its run folder cannot be used: %s", attempt.spec.job_id, error)  # a broken disk, or it was removed
    why = error.strerror or type(error).__name__  # without the path, which is the worker's own business
    return Outcome(error_code="RUN_FOLDER", message=f"the worker cannot use the job's run folder: {why}")


def _not_started(command: Command, error: OSError) -> Exception:
    what = f"program {command.program!r} could not be started: {os.strerror(error.errno or 0)}"
    if error.errno in _NOT_NOW:
        return Unavailable(f"{what}; this worker is short of a resource, try again")
    if error.errno in (errno.ENOENT, errno.ENOEXEC):  # the program exists, the interpreter in its first line does not
        return JobRefused("PROGRAM_NOT_FOUND", f"{what}; check the interpreter in its first line")
    if error.errno == errno.E2BIG:
        return JobRefused("BAD_INPUT", f"{what}; arguments and environment are too long together")
    return JobRefused("PROGRAM_NOT_STARTED", what)


def _remove(path: Path) -> None:
    try:
        remove_tree(path)
    except OSError as error:  # it costs only space; the next start tries again
        logger.warning("cannot remove the run folder %s: %s", path, error)
