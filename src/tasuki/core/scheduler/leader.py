"""The leader's decisions about runs that were stored ahead of their times: which worker gets which run, and who is told. Pure.

Theory of operation. Each look at the definitions (`fire`) also lists the runs that were stored ahead and that no worker has
fetched. `plan` is given that list and the workers that live, and keeps nothing from one look to the next: whatever a leader did
not come to, or its successor does not know of, is in the next list.

    not due, nobody's               assigned to the least loaded worker that may take it
    not due, its worker is gone     assigned to another one, or to nobody
    due, assigned                   its worker is ordered to start it, at each look until it has fetched it
    due, its worker is gone         taken back: it is ready, and a free worker takes it

A run that nobody could be assigned to becomes ready at its time, and is pulled. An order is a hint: the store alone says what is
assigned to whom, so that one that is lost, late or doubled does no harm. A run that a worker has fetched is not in the list:
from then on its lease decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from tasuki.core.job import OnDisconnect
from tasuki.core.lifecycle import LEASE_TTL_S
from tasuki.core.store_messages import AheadRun, Assignment, Offer, ReadyQueue
from tasuki.core.subject import matches

ASSIGNED_PER_TURN = 256  # runs of one turn: more follow at once


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A live worker that takes orders and is not detached, as its last heartbeat described it."""

    worker_id: str
    incarnation: str
    owner: str = ""
    patterns: tuple[str, ...]
    """Subjects that it takes; none while it drains."""
    offer: Offer = Offer()
    slots: int
    running: int = 0
    age_s: float = 0.0
    """Time since its last heartbeat."""
    leads: bool = False
    """The worker is of the leader's own process, which is used where nobody else takes a queue."""

    def takes(self, queue: ReadyQueue) -> bool:
        return self.offer.fits(queue.kind, queue.exec) and any(matches(pattern, queue.subject) for pattern in self.patterns)


class AheadPlan(msgspec.Struct, frozen=True):
    """The consequences of one look."""

    assign: tuple[Assignment, ...] = ()
    start: dict[str, tuple[tuple[str, int], ...]] = {}
    """(job_id, attempt) of the runs that each worker is ordered to start."""


def plan(runs: Sequence[AheadRun], workers: Sequence[WorkerLoad], *, ttl_s: float = LEASE_TTL_S) -> AheadPlan:
    """Decide what becomes of the runs that nobody has fetched, the earliest first."""
    by_id = {(worker.worker_id, worker.incarnation): worker for worker in workers}
    load = Counter({worker.worker_id: worker.running for worker in workers})
    load.update(run.worker_id for run in runs if (run.worker_id, run.incarnation) in by_id)
    assign: list[Assignment] = []
    start: dict[str, list[tuple[str, int]]] = {}
    for run in runs:
        holder = by_id.get((run.worker_id, run.incarnation)) if run.worker_id else None
        if holder is not None and holder.takes(run.queue):
            if run.is_due:
                start.setdefault(run.worker_id, []).append((run.job_id, run.attempt))
        elif len(assign) >= ASSIGNED_PER_TURN:
            continue
        elif not run.is_due and (chosen := _choose(run.queue, workers, load)) is not None:
            load[chosen.worker_id] += 1
            assign.append(_assignment(run, chosen, ttl_s))
        elif run.worker_id:
            assign.append(Assignment(job_id=run.job_id, worker_id=""))
    return AheadPlan(tuple(assign), {worker_id: tuple(found) for worker_id, found in start.items()})


def _choose(queue: ReadyQueue, workers: Sequence[WorkerLoad], load: Counter[str]) -> WorkerLoad | None:
    """Return the least loaded worker with room, of several the one heard of last; the leader's own only if no other one takes
    the queue."""
    able = [worker for worker in workers if worker.takes(queue)]
    able = [worker for worker in able if not worker.leads] or able
    free = [worker for worker in able if load[worker.worker_id] < worker.slots]
    return min(free, key=lambda one: (load[one.worker_id] / one.slots, one.age_s, one.worker_id), default=None)


def _assignment(run: AheadRun, to: WorkerLoad, ttl_s: float) -> Assignment:
    # Kept without a grace: when the lease is over, the run is an orphan, which may be granted to anybody at once.
    return Assignment(
        job_id=run.job_id,
        worker_id=to.worker_id,
        incarnation=to.incarnation,
        owner=to.owner,
        ttl_s=ttl_s,
        on_disconnect=OnDisconnect.KEEP,
    )
