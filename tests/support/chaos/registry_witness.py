"""A witness that looks into the registry of node agents from outside, and notes what it says of its jobs over time.

It only reads. Of every job it keeps who held it, and when that was seen first.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

from tasuki.cli.agent import REGISTRY_APP as APP
from tasuki.core.failover.registry_records import DISPATCHER, attempt_of, node_of
from tasuki.core.job import Job, State
from tasuki.server.assembly import is_redis, open_postgresql_reader, open_redis
from tests.support.chaos.exclusive_program import boot_time

LOOK_S = 0.05
LOOKS_AT_ALL = 50  # to look at all jobs each time would be most of the load


class Sight(NamedTuple):
    """The holder of a job, or that it is done."""

    attempt: int
    """Of the registry: a wait at a dispatcher is one too."""
    run: int
    """The attempt as its program is told."""
    holder: str
    """Empty: nobody."""
    lease: str
    done: bool


class Story:
    """All that the registry said of one job, as often as it changed."""

    def __init__(self) -> None:
        self.sights: list[tuple[float, Sight]] = []

    @property
    def done(self) -> bool:
        return bool(self.sights) and self.sights[-1][1].done

    def saw(self, job: Job, at: float) -> None:
        """Note how the job stood before `at`."""
        lease = job.lease if not job.state.terminal else None
        holder, name = (lease.worker_id, f"{lease.incarnation}/{lease.lease_id}") if lease is not None else ("", "")
        sight = Sight(job.attempt, attempt_of(job), holder, name, job.state is State.SUCCEEDED)
        if not self.sights or self.sights[-1][1] != sight:
            self.sights.append((at, sight))

    def problems(self) -> Iterator[str]:
        """Attempts only grow, each has one holder and one lease, and what is done stays done."""
        for (_, before), (_, after) in itertools.pairwise(self.sights):
            if after.attempt < before.attempt:
                yield f"the attempts fell: {before}, {after}"
            if before.done:
                yield f"it was done, and is not any more: {before}, {after}"
        holders: dict[int, set[tuple[str, str]]] = {}
        for _, sight in self.sights:
            if sight.holder:
                holders.setdefault(sight.attempt, set()).add((sight.holder, sight.lease))
        for attempt, whose in holders.items():
            if len(whose) > 1:
                yield f"attempt {attempt} had several leases: {whose}"

    def speaks_against(self, at: float, run: int, node: str) -> Sight | None:
        """Return the sight that this node cannot have done this run at this moment: its lease was over, or another's."""
        for since, sight in self.sights:
            if since < at and sight.run > run:
                return sight
            at_a_node = sight.holder and not sight.holder.startswith(DISPATCHER)
            if at_a_node and sight.run == run and node_of(sight.holder) != node:
                return sight
        return None


class Witness:
    """Looks again and again, in a thread of its own."""

    def __init__(self, url: str, job_ids: Sequence[str]) -> None:
        self._reader = open_redis(url, APP, check=False) if is_redis(url) else open_postgresql_reader(url)
        self.stories = {job_id: Story() for job_id in job_ids}
        self.looks = 0
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="witness", daemon=True)

    def __enter__(self) -> Self:
        self._watching.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()
        self._reader.close()

    def leave(self) -> bool:
        """Look no more by itself; whether it did so until now."""
        watched = self._watching.is_alive()
        self._over.set()
        self._watching.join()
        return watched

    def look(self, *, at_all: bool = True) -> None:
        """At those that are not done; `at_all`: at those that were done too."""
        job_ids = [job_id for job_id, story in self.stories.items() if at_all or not story.done]
        jobs = self._reader.get(job_ids)
        at = boot_time()
        for job_id, job in zip(job_ids, jobs, strict=True):
            if job is not None:
                self.stories[job_id].saw(job, at)
        self.looks += 1

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            self.look(at_all=self.looks % LOOKS_AT_ALL == 0)
