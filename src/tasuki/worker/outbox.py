"""From the end of a run to a server's last word on it: large results are brought first, what nobody takes is saved, what is
refused is kept aside.

Inline results pass through the machine alone; here they are seen only when they have waited for a while, or were refused. What
goes to disk does so on one thread, in order: a save before the removal that follows it.

    run ends ──► (1 MiB or more: saved) ──► brought ──► told ──► recorded: removed
                  smaller: saved after 3 s                  └──► fenced: kept aside, then removed
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tasuki.core.job import Outcome
from tasuki.core.worker.events import EndingSaved, Event, Restored
from tasuki.core.worker.machine import SAVE_AFTER_S
from tasuki.errors import DiskFull, TasukiError
from tasuki.worker.attempt import StopReason, stopped_outcome, worker_failure
from tasuki.worker.outbox_files import OutboxRecord, Unreported
from tasuki.worker.rejected_results import RejectedResults
from tasuki.worker.settings import SAVE_AT_ONCE_BYTES
from tasuki.worker.transfers import WorkerTransfers

OFFERED_AT_ONCE = 4  # large results of earlier processes

logger = logging.getLogger("tasuki.worker")


class Outbox:
    """Without `unreported` nothing outlives this process, without `aside` nothing that was refused is kept.

    `closing` tells whether this process ends: then what is on disk is for the next one.
    """

    def __init__(
        self,
        transfers: WorkerTransfers,
        unreported: Unreported | None,
        aside: RejectedResults | None,
        *,
        tell: Callable[[Event], None],
        closing: Callable[[], bool],
    ) -> None:
        self._transfers = transfers
        self._unreported = unreported
        self._aside = aside
        self._tell = tell
        self._closing = closing
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tasuki-endings")
        self._offering = asyncio.Semaphore(OFFERED_AT_ONCE)
        self._records: dict[str, OutboxRecord] = {}
        """By lease: large results that no server has spoken on, and endings of earlier processes."""
        self._saving: dict[str, asyncio.Future[bool]] = {}
        """What is on disk or about to be; whether it could be saved."""

    async def load(self) -> list[OutboxRecord]:
        """What earlier processes left behind, to be offered."""
        if self._aside is not None:
            await self._loop.run_in_executor(self._thread, self._aside.sweep)
        if self._unreported is None:
            return []
        found = await self._loop.run_in_executor(self._thread, self._unreported.load)
        for record in found:
            lease_id = record.ending.lease_id
            self._records[lease_id] = record
            self._saving[lease_id] = saved = self._loop.create_future()
            saved.set_result(True)
        return found

    async def offer(self, record: OutboxRecord) -> None:
        """An ending that an earlier process could not report; its large result goes first."""
        ending = record.ending
        logger.info("job %s attempt %d: its saved ending is offered", ending.job_id, ending.attempt)
        if record.result is not None and ending.outcome.result_ref is not None:
            try:
                async with self._offering:
                    await self._transfers.bring(record.result, ending.outcome.result_ref, self._loop.create_future())
            except (TasukiError, OSError) as error:
                if self._closing():
                    return
                reason = error.message if isinstance(error, TasukiError) else str(error)
                logger.error("job %s attempt %d: its saved result cannot be sent: %s", ending.job_id, ending.attempt, reason)
                self.set_aside(record, reason)
                self.forget(ending.lease_id)
                return
        self._tell(Restored(ending))

    async def bring(
        self, record: OutboxRecord, stop: asyncio.Future[StopReason], stopped: Callable[[], StopReason | None]
    ) -> Outcome | None:
        """Bring a large result; the outcome to tell then. None: it waits on disk for our next process.

        An attempt that is stopped meanwhile (by `stop`, or by a cancel with `stopped()` saying why) has ended all the same: a job
        whose end nobody tells would be renewed for ever.
        """
        outcome, lease_id = record.ending.outcome, record.ending.lease_id
        assert outcome.result_ref is not None
        self._records[lease_id] = record
        large = outcome.result_ref.size_bytes >= SAVE_AT_ONCE_BYTES
        timer = self._loop.call_later(SAVE_AFTER_S, self.save, record)
        try:
            if large and (saving := self.save(record)) is not None:
                await asyncio.shield(saving)  # the upload begins when a kill or a power cut costs nothing any more
            await self._transfers.bring(self._result_of(record), outcome.result_ref, stop)
            return outcome
        except asyncio.CancelledError:
            if (reason := stopped()) is None:
                raise
        except TasukiError as error:
            if (reason := stopped() or (StopReason.SHUTDOWN if self._closing() else None)) is None:
                self.set_aside(record, error.message)
                return Outcome(error_code=error.code, message=f"the result could not be kept: {error.message}")
        except OSError as error:
            logger.error("job %s: its result cannot be read: %s", record.ending.job_id, error)
            return worker_failure(error)
        finally:
            timer.cancel()
        if reason is StopReason.SHUTDOWN and self.save(record) is not None:
            return None
        return stopped_outcome(reason)

    def _result_of(self, record: OutboxRecord) -> Path | bytes:
        known = self._records.get(record.ending.lease_id, record)
        assert known.result is not None
        return known.result

    # ------------------------------------------------------------------------------------------------ on disk

    def save(self, record: OutboxRecord) -> asyncio.Future[bool] | None:
        """Keep it where it outlives this process, if anything does; once."""
        lease_id = record.ending.lease_id
        if self._unreported is None or lease_id in self._saving:
            return self._saving.get(lease_id)
        known = self._records.get(lease_id)
        if known is not None:
            record = msgspec.structs.replace(record, result=known.result)
        saving = self._loop.run_in_executor(self._thread, self._unreported.save, record)
        self._saving[lease_id] = saving
        saving.add_done_callback(functools.partial(self._saved, lease_id))
        return saving

    def _saved(self, lease_id: str, saving: asyncio.Future[bool]) -> None:
        assert self._unreported is not None
        known, place = self._records.get(lease_id), self._unreported.result_path(lease_id)
        if known is not None and known.result is not None and place.exists():
            self._records[lease_id] = msgspec.structs.replace(known, result=place)
        if saving.result() and not self._closing():
            self._tell(EndingSaved(lease_id))

    def set_aside(self, record: OutboxRecord, reason: str) -> None:
        """It was refused for good: what it has is kept for people. `forget` follows."""
        record = self._records.pop(record.ending.lease_id, record)
        ending = record.ending
        if self._aside is None or (record.result is None and not ending.outcome.result):
            logger.warning("job %s attempt %d: refused, its result is dropped: %s", ending.job_id, ending.attempt, reason)
        else:
            self._thread.submit(self._keep_aside, self._aside, record, reason)

    def _keep_aside(self, aside: RejectedResults, record: OutboxRecord, reason: str) -> None:
        ending = record.ending
        named = (ending.job_id, ending.attempt)
        if isinstance(record.result, Path) and self._unreported is not None and not record.result.exists():
            record = msgspec.structs.replace(record, result=self._unreported.result_path(ending.lease_id))  # moved meanwhile
        try:
            place = aside.keep(record, reason)
        except (DiskFull, OSError) as error:
            logger.error("job %s attempt %d: refused (%s), its result is lost: %s", *named, reason, error)
        else:
            logger.warning(
                "job %s attempt %d: refused, its result is kept in %s: %s", ending.job_id, ending.attempt, place, reason
            )

    def forget(self, lease_id: str) -> None:
        """A server has spoken on it."""
        self._records.pop(lease_id, None)
        if self._saving.pop(lease_id, None) is not None and self._unreported is not None:
            self._thread.submit(self._unreported.remove, lease_id)

    async def written(self) -> None:
        """Returns when all that was asked for so far is done."""
        await self._loop.run_in_executor(self._thread, int)

    async def close(self) -> None:
        """Returns when all that was said is on disk."""
        await asyncio.to_thread(self._thread.shutdown)
        waiting = sum(1 for saving in self._saving.values() if saving.done() and saving.result())
        if waiting and self._unreported is not None:
            logger.warning("%d result(s) wait in %s; the next start offers them", waiting, self._unreported.folder)
