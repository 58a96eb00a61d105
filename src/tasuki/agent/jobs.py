"""Jobs of an agent: which id is where. Takes a slot, passes the upload to the executor, records the end, answers repeats.

Every decision about an id is made between two awaits of one event loop, so that of two requests with one id exactly one runs. A
run is a task of its own: the client that asked for it may leave. Only `folders` touches the disk, in threads except for the few
system calls of a small job. A registry, shared by several agents, is optional.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import AsyncIterable, Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tasuki.agent import refusals
from tasuki.agent.folders import FsyncBatch, JobFolders
from tasuki.agent.refusals import log_context
from tasuki.agent.settings import AgentConfig
from tasuki.agent.upload import Upload, UploadForm
from tasuki.blobs.files import check_free
from tasuki.config import DISK_FLOOR_BYTES, DISK_FLOOR_INODES
from tasuki.core.failover import agent_protocol
from tasuki.core.failover.agent_protocol import AgentOutcome, AgentState, EndedMarker, InputRecord, RunningMarker
from tasuki.core.job import InputFile, JobSpec, Outcome, Progress
from tasuki.core.protocol import LogPiece, ReadLog
from tasuki.core.units import DAY_S
from tasuki.errors import AgentRefusal, DiskFull, InvalidInput, NotFound, TasukiError, TooLarge, Unavailable, quoted
from tasuki.event_loop import ignore_result
from tasuki.worker.attempt import Attempt, RunResult, StopReason
from tasuki.worker.execs import FILE, FILES, Exec
from tasuki.worker.logs import LogFollow
from tasuki.worker.runner import CommandRunner

if TYPE_CHECKING:
    from tasuki.agent.store_registry import StoreRegistry

# ------------------------------------------------------------------------------------------------ a job with a slot

_OUTCOMES = {None: AgentOutcome.SUCCEEDED, "TIMED_OUT": AgentOutcome.TIMED_OUT}
_SENDERS_MISTAKES = frozenset({"BAD_INPUT", "ARGS_NOT_ALLOWED", "ENV_NOT_ALLOWED", "EXEC_NOT_ALLOWED"})


class FinishedRun(NamedTuple):
    """End of a job; a small result is also in memory, for the request that waits for it."""

    ended: EndedMarker
    small: bytes | None = None


class SlotJob:
    """Job that has a slot: being received, or running."""

    def __init__(self, job_id: str, attempt: int, since: float, loop: asyncio.AbstractEventLoop) -> None:
        self.job_id = job_id
        self.attempt = attempt
        self.since = since
        self.exec = ""
        self.input: str | None = None
        """Input hash; None while the upload is received."""
        self.announced_bytes = self.max_bytes = 0
        self.upload: Upload | None = None
        self.running: RunningMarker | None = None
        self.progress: Progress | None = None
        self.begun = False
        """The folder of the job exists."""
        self.marked: asyncio.Future[None] | None = None
        """Done when the marker is durable. None: the run was too short for that."""
        self.started = False
        """The program was started."""
        self.stop: asyncio.Future[StopReason] = loop.create_future()
        self.ended: asyncio.Future[FinishedRun] = loop.create_future()
        self.ended.add_done_callback(ignore_result)  # a run may have no client that waits
        self.receiving: asyncio.Task[Any] | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def awaited_bytes(self) -> int:
        """Bytes of the upload that are still to be written."""
        if self.input is not None:
            return 0
        return max(0, self.announced_bytes - (0 if self.upload is None else self.upload.received_bytes))

    @property
    def canceled(self) -> bool:
        return self.stop.done() and self.stop.result() is StopReason.CANCELED

    def view(self, node: str) -> dict[str, Any]:
        """Return the answer to `GET /jobs/{job_id}`."""
        common = {
            "job_id": self.job_id,
            "node": node,
            "exec": self.exec or None,
            "input": self.input,
            "attempt": self.attempt,
            "started_at": self.running.started_at if self.running is not None else None,
        }
        return agent_protocol.job_view(common, AgentState.RUNNING, progress=self.progress)

    def end(self, reason: StopReason) -> None:
        """Stop the job in any stage."""
        if not self.stop.done():
            self.stop.set_result(reason)
            if self.task is None and self.receiving is not None:
                self.receiving.cancel()


def _state_of(marker: agent_protocol.Marker | None) -> AgentState | None:
    return None if marker is None else marker.state


def no_result(outcome: Outcome, *, started: bool) -> TasukiError:
    """Return why there is no result: 400 for the sender's mistake; a 5xx for what only this node lacks, so that another node is
    tried."""
    if outcome.error_code == DiskFull.code:
        return DiskFull(outcome.message)
    if not started and outcome.error_code in _SENDERS_MISTAKES:
        return InvalidInput(outcome.message)
    return AgentRefusal(500, outcome.error_code or "INTERNAL", outcome.message)


# ------------------------------------------------------------------------------------------------ all jobs

SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1200, 3600)


class AgentMetrics:
    """Metrics of one agent, for Prometheus. Labels are bounded, and never a job or a token."""

    def __init__(self, limit: int, free_bytes: Callable[[], float]) -> None:
        """`free_bytes`: the room on the disk of the data folder, asked for with each scrape."""
        self._registry = registry = CollectorRegistry()
        self.ended = Counter(
            "tasuki_agent_jobs",
            "Jobs that ended: succeeded, failed, timed_out, interrupted, canceled or not_run.",
            ("outcome",),
            registry=registry,
        )
        self.seconds = Histogram(
            "tasuki_agent_job_seconds", "How long programs ran.", ("outcome",), buckets=SECONDS, registry=registry
        )
        self.running = Gauge("tasuki_agent_running", "Slots that are taken, uploads included.", registry=registry)
        Gauge("tasuki_agent_slots", "Jobs that may run at once.", registry=registry).set(limit)
        free = Gauge("tasuki_agent_disk_free_bytes", "Free bytes on the disk of the data folder.", registry=registry)
        free.set_function(free_bytes)
        self.stored = Counter("tasuki_agent_cache_hits", "Requests answered with a stored result.", registry=registry)
        self.refused = Counter("tasuki_agent_refused", "Requests refused, by code.", ("code",), registry=registry)
        self.received = Counter("tasuki_agent_received_bytes", "Bytes of uploads.", registry=registry)
        self.sent = Counter("tasuki_agent_sent_bytes", "Bytes of results.", registry=registry)
        self.cleaned = Counter("tasuki_agent_cleaned_jobs", "Jobs removed because of their age.", registry=registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)


logger = logging.getLogger("tasuki.agent")
FREE_SHARE = 4  # without a configured limit, an upload may use a quarter of the free space
TIDY_S = 0.1
MARK_S = 0.05
"""After this time the marker of a running job is made durable. Of a shorter job only the end is: after a power cut its id is
unknown and runs again, as an interrupted job does."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
INTERRUPTED_DAYS = 1.0  # they have no result; a day is for users who look for an explanation
_INTERRUPTED = frozenset({StopReason.SHUTDOWN.value, StopReason.LEASE_LOST.value})


class _StartOrder(NamedTuple):
    """Checked request of an upload."""

    exec: Exec
    form: UploadForm
    timeout_s: float


class AgentJobs:
    """All jobs of one agent."""

    def __init__(
        self,
        config: AgentConfig,
        incarnation: str,
        folders: JobFolders,
        runner: CommandRunner,
        logs: LogFollow,
        metrics: AgentMetrics,
        registry: StoreRegistry | None = None,
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._boot_id = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
        self.folders = folders
        self._runner = runner
        self._logs = logs
        self.metrics = metrics
        self.registry = registry
        self._loop = asyncio.get_running_loop()
        self._syncer = FsyncBatch(str(folders.root), folders.root_descriptor)
        self._tidies = False
        folders.on_rubbish = self._tidy_soon
        self._held: dict[str, SlotJob] = {}
        self._log_reads: dict[int, asyncio.Future[LogPiece]] = {}
        self._numbers = itertools.count(1)
        self.draining = False
        self._free = asyncio.Event()
        self._free.set()

    # ------------------------------------------------------------------------------------------------ questions

    @property
    def running(self) -> int:
        return len(self._held)

    @property
    def limit(self) -> int:
        return self._config.slots

    def held(self, job_id: str) -> SlotJob | None:
        return self._held.get(job_id)

    def look(self, job_id: str) -> agent_protocol.LastMarker | None:
        """Read the marker of a job without a slot. A `.running` then means that the disk was full when the job ended."""
        marker = self.folders.read(job_id)
        if not isinstance(marker, RunningMarker):
            return marker
        return agent_protocol.InterruptedMarker(**marker.common, interrupted_at=marker.started_at)

    def is_done(self, job_id: str) -> bool:
        """Return whether a job is done here. With a registry too it is answered from here: its end was recorded before."""
        return job_id not in self._held and _state_of(self.look(job_id)) is AgentState.DONE

    async def listed(self, states: Container[str], limit: int) -> list[dict[str, Any]]:
        """Return up to `limit` jobs of this node in these states: first those that run, then the last that have ended."""
        running = [held.view(self._config.node) for held in self._held.values()] if AgentState.RUNNING in states else []
        held = set(self._held)

        def ended() -> Iterator[dict[str, Any]]:
            for job_id in self.folders.newest_first():
                marker = None if job_id in held else self.look(job_id)
                if marker is not None and marker.state in states:
                    yield agent_protocol.job_view(marker.common, marker.state, ended_at=marker.ended_at, ended=marker)

        return [*running, *await asyncio.to_thread(lambda: list(itertools.islice(ended(), limit)))][:limit]

    async def read_log(self, held: SlotJob, stream: str, offset: int, wait_s: float) -> LogPiece:
        """Read what a running program has written since an offset; wait for something new."""
        number = next(self._numbers)
        reading = self._log_reads[number] = self._loop.create_future()
        try:
            lease_id = f"{held.job_id}.{held.attempt}"
            self._logs.ask(ReadLog(number, lease_id, stream, offset, wait_s=wait_s))
            return await reading
        finally:
            del self._log_reads[number]

    def log_was_read(self, piece: LogPiece) -> None:
        reading = self._log_reads.get(piece.corr_id)  # None: its reader has left
        if reading is not None and not reading.done():
            reading.set_result(piece)

    def deadline(self, lease_id: str) -> float | None:
        return None if self.registry is None else self.registry.deadline(lease_id.rpartition(".")[0])

    def progressed(self, lease_id: str, progress: Progress) -> None:
        held = self._held.get(lease_id.rpartition(".")[0])
        if held is not None:
            held.progress = progress

    # ------------------------------------------------------------------------------------------------ taking in

    async def ask_others(self, job_id: str, sent_input: str | None) -> None:
        """Raise what the registry knows of another node, before the upload is read. Not for a job of this node."""
        if self.registry is not None and job_id not in self._held and not self.is_done(job_id):
            await self.registry.look(job_id, sent_input)

    def arrive(self, job_id: str, sent_input: str | None, size_bytes: int) -> SlotJob | EndedMarker:
        """Take a slot for an upload, or return the end of the job that has this id. Refusals are raised.

        If an end is returned and `sent_input` is None, the upload must still be compared.
        """
        held = self._held.get(job_id)
        marker = None if held is not None else self.look(job_id)
        state = AgentState.RUNNING if held is not None else _state_of(marker)
        known = held or marker
        verdict = agent_protocol.judge(state, known.input if known is not None else None, sent_input)
        if verdict is agent_protocol.IdDecision.CONFLICT:
            raise refusals.other_input(job_id)
        if held is not None:
            raise refusals.is_running(job_id, self._config.node, held.since)
        if verdict in (agent_protocol.IdDecision.STORED, agent_protocol.IdDecision.COMPARE):
            assert isinstance(marker, EndedMarker)
            return marker
        if self.draining:
            raise refusals.is_draining()
        if len(self._held) >= self.limit:
            raise refusals.is_full(len(self._held), self.limit)
        max_bytes = self._check_size(size_bytes)
        held = self._held[job_id] = SlotJob(job_id, marker.attempt + 1 if marker is not None else 1, time.time(), self._loop)
        held.announced_bytes, held.max_bytes = size_bytes, max_bytes
        self._free.clear()
        self.metrics.running.set(len(self._held))
        return held

    def _check_size(self, size_bytes: int) -> int:
        """Return the limit of an upload that is announced with this size; DiskFull, TooLarge."""
        max_bytes = self._config.max_upload_bytes
        if max_bytes is None:
            self._check_free(0)  # with a full disk every upload would be too large
            max_bytes = self.folders.free_bytes() // FREE_SHARE
        if size_bytes > max_bytes:
            raise TooLarge(f"an upload of {size_bytes} bytes is too large; the limit of this agent is {max_bytes}")
        self._check_free(size_bytes + sum(other.awaited_bytes for other in self._held.values()))
        return max_bytes

    def _check_free(self, needed_bytes: int) -> None:
        check_free(self.folders.root, needed_bytes, DISK_FLOOR_BYTES, DISK_FLOOR_INODES)

    async def run(self, held: SlotJob, upload: Upload, place: str, stream: AsyncIterable[bytes], sent: str | None) -> FinishedRun:
        """Receive an upload, run it, and wait for its end. If the client leaves, the run continues."""
        held.receiving, held.upload = asyncio.current_task(), upload
        try:
            await self._take_in(held, upload, place, stream, sent)
        except BaseException as error:
            receiving, held.receiving = held.receiving, None  # a stop from now on finds nothing to cancel
            await asyncio.shield(self._give_up(held, upload))
            if isinstance(error, asyncio.CancelledError) and held.stop.done() and receiving is not None:
                receiving.uncancel()
                raise self._stopped(held) from None
            raise
        finally:
            self.metrics.received.inc(upload.received_bytes)
        return await asyncio.shield(held.ended)

    async def _take_in(self, held: SlotJob, upload: Upload, place: str, stream: AsyncIterable[bytes], sent: str | None) -> None:
        order = self.order_of(await upload.receive(stream))
        held.exec = order.exec.name
        files = await upload.finish()
        marker = self._marker(held, order, files, sent)
        held.input = marker.input
        if self.registry is not None:  # the claim decides which agent runs the job, and counts the attempts
            held.attempt = await self.registry.claim(marker, held.end)
            marker = replace(marker, attempt=held.attempt)
        self.folders.begin(place, marker)
        held.begun = True
        if held.stop.done():
            raise self._stopped(held)
        held.running = marker
        held.task = self._loop.create_task(self._run_slot(held, self._attempt(held, order, marker, files)))

    def order_of(self, form: UploadForm) -> _StartOrder:
        exec_ = self._config.execs.get(form.exec or self._config.default_exec or "")
        if exec_ is None:
            there = ", ".join(sorted(self._config.execs))
            asked = (
                f"exec {quoted(form.exec)} is not allowed here" if form.exec else "the form names no exec, there is no default"
            )
            raise AgentRefusal(400, agent_protocol.EXEC_NOT_ALLOWED, f"{asked}; there are: {there}")
        limits = (self._config.timeout_s, exec_.timeout_s, form.timeout_s)
        return _StartOrder(exec_, form, min(limit for limit in limits if limit is not None))

    def _marker(self, held: SlotJob, order: _StartOrder, files: Sequence[InputRecord], sent: str | None) -> RunningMarker:
        found = agent_protocol.input_hash(order.exec.name, order.form.args, files)
        if sent is not None and sent != found:
            raise InvalidInput(f"the upload has the input hash {found}, the request says {sent}; it came in otherwise than sent")
        return RunningMarker(
            job_id=held.job_id,
            incarnation=self._incarnation,
            boot_id=self._boot_id,
            pid=os.getpid(),
            node=self._config.node,
            exec=order.exec.name,
            input=found,
            attempt=held.attempt,
            started_at=time.time(),
        )

    async def _give_up(self, held: SlotJob, upload: Upload) -> None:
        """Remove everything of an upload that does not become a job."""
        try:
            await upload.discard()
            if held.begun:
                self.folders.discard(held.job_id)
        finally:
            try:
                if self.registry is not None:
                    await self.registry.release(held.job_id)
            finally:
                self._let_go(held)

    def _attempt(self, held: SlotJob, order: _StartOrder, marker: RunningMarker, files: Sequence[InputRecord]) -> Attempt:
        argv = order.exec.argv
        if FILES not in argv and any(FILE in element for element in argv):
            files = files[:1]  # {file} is the first file; the others lie beside it
        return Attempt(
            spec=JobSpec(
                job_id=held.job_id,
                exec=order.exec.name,
                args=order.form.args,
                # As if the files were inline and empty: they are in in/ already, and are neither fetched nor hashed again.
                files=tuple(InputFile(file.name, b"") for file in files),
                timeout_s=order.timeout_s,
            ),
            lease_id=f"{held.job_id}.{held.attempt}",
            attempt=held.attempt,
            facts={"input_hash": marker.input, "node": marker.node},
        )

    # ------------------------------------------------------------------------------------------------ running

    async def _run_slot(self, held: SlotJob, attempt: Attempt) -> None:
        with log_context(held.job_id):
            try:
                answer = await self._run_to_end(held, attempt)
            except TasukiError as error:
                logger.warning("job %s: no result: %s", held.job_id, error.message)
                held.ended.set_exception(error)
            except Exception as error:
                logger.exception("job %s: the agent failed", held.job_id)
                held.ended.set_exception(error)
            else:
                held.ended.set_result(answer)
            finally:
                self._let_go(held)

    async def _run_to_end(self, held: SlotJob, attempt: Attempt) -> FinishedRun:
        def started() -> None:
            held.started = True

        marker = held.running
        assert marker is not None
        logger.info("job %s: starts %s, attempt %d", held.job_id, marker.exec, marker.attempt)
        marking = self._loop.call_later(MARK_S, self._mark, held)
        try:
            result = await self._runner.run(attempt, held.stop, started)
            marking.cancel()
            if held.marked is not None:
                await asyncio.wait([held.marked])  # a failed sync does not change the result
            answer = await self._ended(held, marker, result)
        except BaseException as error:
            marking.cancel()
            outcome = "interrupted" if held.stop.done() else "not_run"
            self.metrics.ended.labels("canceled" if held.canceled else outcome).inc()
            await self._end_without_result(held, marker)
            if held.stop.done() and isinstance(error, Unavailable):
                raise self._stopped(held) from None
            raise
        ended = answer.ended
        seconds = ended.ended_at - ended.started_at
        self.metrics.ended.labels(ended.outcome).inc()
        self.metrics.seconds.labels(ended.outcome).observe(seconds)
        logger.info("job %s: %s, exit code %s, %.3f s", held.job_id, ended.outcome, ended.exit_code, seconds)
        if self.registry is not None and not await self.registry.record(ended, self.folders.result(held.job_id)):
            self.folders.discard(held.job_id)
            raise refusals.claim_lost(held.job_id)
        return answer

    def _mark(self, held: SlotJob) -> None:
        """Make the marker durable, of a job that runs for a while."""
        try:
            held.marked = self._syncer.sync(self.folders.marked(held.job_id))
        except OSError as error:  # its program did that; the folder is made private again at the end
            logger.warning("job %s: its marker cannot be read any more: %s", held.job_id, error)

    async def _ended(self, held: SlotJob, running: RunningMarker, result: RunResult) -> FinishedRun:
        """Record the end of a job; raise if there is none to record."""
        outcome = result.outcome
        if outcome.error_code == StopReason.LEASE_LOST:  # the keeper noticed it first
            held.end(StopReason.LEASE_LOST)
        if held.stop.done() and outcome.error_code in (*_INTERRUPTED, StopReason.CANCELED):
            raise self._stopped(held)
        archive = result.result_file if result.result_file is not None else outcome.result
        if archive is None or outcome.result_sha256 is None:
            raise no_result(outcome, started=held.started)
        size_bytes = len(archive) if isinstance(archive, bytes) else archive.stat().st_size
        marker = EndedMarker(
            **running.common,
            outcome=_OUTCOMES.get(outcome.error_code, AgentOutcome.FAILED),
            exit_code=outcome.exit_code,
            error_code=outcome.error_code,
            message=outcome.message,
            ended_at=time.time(),
            result_sha256=outcome.result_sha256,
            result_bytes=size_bytes,
            left_out=outcome.meta.get("left_out", 0),
        )
        if isinstance(archive, bytes):
            await self._syncer.sync(self.folders.write_end(marker, archive))
            await self._syncer.sync(self.folders.show_end(marker))
            self.folders.has_ended()
        else:
            await asyncio.to_thread(self.folders.conclude, marker, archive)
        return FinishedRun(marker, archive if isinstance(archive, bytes) else None)

    def _tidy_soon(self) -> None:
        """Remove discarded folders soon, in one thread."""
        if not self._tidies:
            self._tidies = True
            self._loop.call_soon_threadsafe(self._loop.call_later, TIDY_S, self._tidy)

    def _tidy(self) -> None:
        self._tidies = False
        self._loop.run_in_executor(None, self.folders.remove_rubbish)

    async def _end_without_result(self, held: SlotJob, running: RunningMarker) -> None:
        """End a job without a result: interrupted if the agent's own end stopped it, else removed."""
        if self.registry is not None:
            await self.registry.release(held.job_id)
        if held.stop.done() and not held.canceled:
            await asyncio.to_thread(self.folders.interrupt, running, time.time())
        else:
            self.folders.discard(held.job_id)

    def _stopped(self, held: SlotJob) -> TasukiError:
        match held.stop.result() if held.stop.done() else StopReason.SHUTDOWN:
            case StopReason.CANCELED:
                return refusals.was_canceled(held.job_id)
            case StopReason.LEASE_LOST:
                return refusals.claim_lost(held.job_id)
            case StopReason.SHUTDOWN:
                return refusals.was_interrupted(held.job_id)

    def _let_go(self, held: SlotJob) -> None:
        if self._held.get(held.job_id) is held:
            del self._held[held.job_id]
        if not held.ended.done():
            held.ended.set_exception(Unavailable(f"job {held.job_id} was not received"))
        self.metrics.running.set(len(self._held))
        if not self._held:
            self._free.set()

    # ------------------------------------------------------------------------------------------------ removing, ending

    async def delete(self, job_id: str, *, only_running: bool = False) -> agent_protocol.RemovalResult:
        """Stop a job if it runs, remove it, and return its state before. With a registry, wherever it is. NotFound.

        `only_running`: a job that has ended is kept, also if it ended just before it could be stopped.
        """
        held = self._held.get(job_id)
        if held is not None:
            held.end(StopReason.CANCELED)
            await asyncio.wait([held.ended])  # the end is reported to the request that asked for the job
        if only_running and (held is None or held.ended.exception() is None):
            raise NotFound(f"job {job_id} does not run at this node")
        state = AgentState.RUNNING if held is not None else _state_of(self.look(job_id))
        removed = None if state is None else agent_protocol.RemovalResult(state)
        if self.registry is not None and held is not None:
            await self.registry.forget(job_id)
        elif self.registry is not None:
            removed = await self.registry.remove(job_id) or removed
        if removed is None:
            raise NotFound(f"there is no job {job_id} at this node")
        if job_id not in self._held and self.folders.discard(job_id):
            await self._syncer.sync(())  # the list of jobs
        return removed

    async def remove_old(self, keep_days: float, wall: float) -> int:
        """Remove jobs that are old at this time; return how many. Their folders are read in a thread, and removed in the loop:
        no running job is met."""

        def is_old(job_id: str) -> bool:
            marker = self.look(job_id)
            days = keep_days if isinstance(marker, EndedMarker) else min(INTERRUPTED_DAYS, keep_days)
            return marker is not None and wall - marker.ended_at > days * DAY_S

        removed = 0
        for job_id in await asyncio.to_thread(lambda: list(filter(is_old, self.folders.job_ids()))):
            if job_id not in self._held and is_old(job_id):
                removed += self.folders.discard(job_id)
            await asyncio.sleep(0)  # there may be very many, and other tasks wait
        if removed:
            self.metrics.cleaned.inc(removed)
            logger.info("removed %d jobs older than %g days", removed, keep_days)
        return removed

    async def drain(self, timeout_s: float | None) -> None:
        """Take no more jobs; wait for those that run, at most `timeout_s`."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._free.wait()

    def stop_all(self) -> None:
        """Stop all jobs, which are marked as interrupted."""
        self.draining = True
        if self.registry is not None:
            self.registry.hurry()
        for held in list(self._held.values()):
            held.end(StopReason.SHUTDOWN)
