"""What is old goes, at the start and every day: results after some days, interrupted jobs after one.

Folders are looked through in a thread; each is taken away by the desk, in the loop, so that no running job is ever met.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from tasuki.agent.jobs import AgentJobs
from tasuki.core.failover.agent_protocol import EndedMarker, InterruptedMarker, Marker, RunningMarker

logger = logging.getLogger("tasuki.agent")
DAY_S = 86_400.0
INTERRUPTED_DAYS = 1.0  # there is nothing to fetch of them; a day is for those who wonder what became of a job


def is_old(marker: Marker, wall: float, keep_days: float) -> bool:
    match marker:
        case EndedMarker():
            return wall - marker.ended_at > keep_days * DAY_S
        case InterruptedMarker():
            return wall - marker.interrupted_at > min(INTERRUPTED_DAYS, keep_days) * DAY_S
        case RunningMarker():  # the desk knows whether it really runs
            return wall - marker.started_at > min(INTERRUPTED_DAYS, keep_days) * DAY_S


class Retention:
    """Of one desk."""

    def __init__(self, desk: AgentJobs, keep_days: float, clock: Callable[[], float] = time.time) -> None:
        self._desk = desk
        self._keep_days = keep_days
        self._clock = clock

    async def clean(self) -> int:
        """Once; how many jobs were removed."""
        wall = self._clock()
        removed = 0
        for job_id in await asyncio.to_thread(self._old, wall):
            removed += self._desk.discard_ended(job_id, lambda marker: is_old(marker, wall, self._keep_days))
            await asyncio.sleep(0)  # there may be very many, and others wait
        if removed:
            self._desk.metrics.cleaned.inc(removed)
            logger.info("removed %d jobs older than %g days", removed, self._keep_days)
        return removed

    def _old(self, wall: float) -> list[str]:
        folders = self._desk.folders
        markers = ((job_id, folders.read(job_id)) for job_id in folders.job_ids())
        return [job_id for job_id, marker in markers if marker is not None and is_old(marker, wall, self._keep_days)]

    async def daily(self) -> None:
        """Until it is canceled."""
        while True:
            try:
                await self.clean()
            except OSError:
                logger.exception("old jobs could not be removed; another try tomorrow")
            await asyncio.sleep(DAY_S)
