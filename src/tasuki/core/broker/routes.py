"""Ready jobs of subjects that have a routing policy, and the workers that were chosen for them. Pure.

Theory of operation. The workers of a server do not look for routed subjects by their patterns: the store grants their jobs only
to the worker that was chosen (`LeaseRequest.routed`, `chosen`). The server knows the jobs that it accepted; of others (retries,
those of other servers, a backlog) it reads some when it hears that a subject is ready. Before each turn it chooses workers for
the jobs that it knows, with `core.routing`. A job that falls to a worker of another server is left to that server, which is told;
if it is still there after a while, it is for the workers here. A job that was granted elsewhere or canceled is noticed when the
store does not grant it: nothing here has to be true.

Each known job waits in a line of those that wait for the same workers: for any that can run it, for the full one that its key
belongs to, for those that hold its files. A turn looks only at lines of which a worker has free credit, the highest priority and
the oldest job of all first, until the credit is gone. A job that has to wait for others than it did goes to their line; it leaves
that when its time there is over, or when the workers that can run it are not the same any more. Of jobs that move, a turn takes
some, and the next one goes on: so a turn costs what it grants, however many jobs wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, islice
from typing import TypeVar

import msgspec

from tasuki.core.broker.subscriptions import FAILED_READ_S, HURRIED_SHARE, pause_s
from tasuki.core.job import READY, Job, JobSpec
from tasuki.core.machine import Now
from tasuki.core.routing import Candidate, Policy, RoutingFacts, SubjectRoute, choose, facts_of, preferred, route_of, why
from tasuki.core.store_messages import ChosenJob, JobKind, kind_of
from tasuki.core.subject import group_of

QUEUE_MAX = 32  # jobs of one queue that a server knows; others are read when these are gone
QUEUES_MAX = 4096
READ_SUBJECTS = 16  # subjects whose jobs are read at once
CHOICES_KEPT = 4096  # of other servers, for jobs that are not known here yet
REASONS_KEPT = 4096
ELSEWHERE_S = 0.1  # how long another server has for a job that any worker may take as well
SUBJECTS_KEPT = 1024
HELD_FOR_S = 1.0  # how long the workers that hold a job's files are thought to be the same
MOVED_PER_TURN = 1024  # jobs that change their line, for each cause: some 10 ms
QUEUES_PER_TURN = 32  # whose workers are determined anew after workers came or went
NOBODY = ""  # as a choice: the server that had the chosen worker did not act
LEFT_BY = "The server of the worker that was chosen first did not give it the job in time, so that any worker might."

Queue = tuple[str, JobKind, str]
Place = tuple[float, int, str]
"""Place of a job in a line: the smaller numbers come first."""
V = TypeVar("V")


def _keep(kept: dict[str, V], job_id: str, value: V, most: int) -> None:
    """Keep a value of a job among the latest ones."""
    kept.pop(job_id, None)
    if len(kept) >= most:
        del kept[next(iter(kept))]
    kept[job_id] = value


class _Line:
    """Jobs that wait for one of some workers, in the order of their places. What is taken out of the middle stays in the heap
    until it comes first, or makes up more than half of it."""

    def __init__(self, workers: tuple[str, ...] = ()) -> None:
        self.workers = workers
        self._heap: list[Place] = []
        self._places: dict[str, Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def put(self, place: Place) -> None:
        self._places[place[-1]] = place
        heappush(self._heap, place)

    def take_out(self, job_id: str) -> None:
        if self._places.pop(job_id, None) is not None and len(self._heap) > 2 * len(self._places):
            self._heap = list(self._places.values())
            heapify(self._heap)

    def first(self) -> Place | None:
        while self._heap and self._places.get(self._heap[0][-1]) is not self._heap[0]:
            heappop(self._heap)
        return self._heap[0] if self._heap else None


class RoutedJob(msgspec.Struct):
    """A ready job, and the worker that was chosen for it."""

    chosen: ChosenJob
    policy: Policy
    facts: RoutingFacts
    queue: Queue
    number: int
    """Number of the job among those that became known."""
    seen_at: float
    """Time since which it has been ready, or known to be."""
    worker_id: str | None = None
    """The worker that this server, or another one, chose; None: none yet."""
    until: float = 0.0
    """Time until which that choice holds."""
    line: _Line | None = None


class RoutedJobs:
    """The routes of a server, and what it knows of their jobs. `fitting` returns the live workers that may take a queue."""

    def __init__(self, routes: tuple[SubjectRoute, ...], wait_s: float, fitting: Callable[[Queue], tuple[str, ...]]) -> None:
        self.own = routes
        self.routes = routes
        self.patterns = tuple(route.pattern for route in routes)
        self.queues: dict[Queue, dict[str, RoutedJob]] = {}
        self._jobs: dict[str, RoutedJob] = {}
        self._number = 0
        self._workers: dict[Queue, tuple[str, ...]] = {}
        """Workers for which the jobs of each queue wait at first."""
        self._unsorted: dict[Queue, None] = {}
        """Queues whose workers may have changed."""
        self._lines: dict[tuple[str, ...], _Line] = {}
        self._due = _Line()
        """Jobs that do not wait for any worker that can run them, by the time until which."""
        self.left: Counter[str] = Counter()
        """Jobs that were left to workers of other servers since these were last heard of."""
        self._wait_s = wait_s
        self._fitting = fitting
        self._turns: dict[str, int] = {}
        """Number of the latest turn of each worker."""
        self._last_turn = 0
        self._unread: dict[str, None] = {}
        self._reading: tuple[str, ...] = ()
        """Subjects that are being read."""
        self._asked_at = self._next_read_at = 0.0
        self._choices: dict[str, str] = {}
        self._reasons: dict[str, tuple[str, str]] = {}
        """(worker of this server, why it was chosen) by job, those of the latest choices."""
        self._of_subject: dict[str, SubjectRoute | None] = {}

    def learn(self, elsewhere: Iterable[SubjectRoute]) -> bool:
        """Take the routes of other servers for subjects without one of our own; return whether anything changed."""
        routes = tuple(dict.fromkeys((*self.own, *elsewhere)))
        if routes == self.routes:
            return False
        self.routes, self._of_subject = routes, {}
        self.patterns = tuple(route.pattern for route in routes)
        return True

    def route_of(self, subject: str) -> SubjectRoute | None:
        if subject not in self._of_subject:
            if len(self._of_subject) >= SUBJECTS_KEPT:
                self._of_subject.clear()
            self._of_subject[subject] = route_of(self.routes, subject)
        return self._of_subject[subject]

    # -- what is ready --------------------------------------------------------------------------------------------
    def add(self, spec: JobSpec, kind: JobKind, priority: int, now: Now, *, waited_s: float = 0.0) -> None:
        """Note a job that a live worker can run, and that has been ready for so long; one that is known keeps its place and its
        choice."""
        route = self.route_of(spec.subject)
        queue = (spec.subject, kind, spec.exec)
        if route is None or spec.job_id in self._jobs or not (workers := self._fitting(queue)):
            return
        jobs = self.queues.get(queue)
        if jobs is None and len(self.queues) < QUEUES_MAX:
            jobs = self.queues[queue] = {}
            self._workers[queue] = workers
        if jobs is None or len(jobs) >= QUEUE_MAX:
            return
        self._number += 1
        chosen = ChosenJob(spec.job_id, priority, group_of(spec.subject))
        job = RoutedJob(chosen, route.policy, facts_of(spec), queue, self._number, now.monotonic - waited_s)
        jobs[spec.job_id] = self._jobs[spec.job_id] = job
        self._choose(job, self._choices.pop(spec.job_id, None), now)
        self._wait(job, self._workers[queue])

    def note(self, subject: str) -> None:
        """Note that there are jobs of this subject, which are to be read. Of too many, the walk over all that is ready tells
        again."""
        if len(self._unread) < QUEUES_MAX:
            self._unread[subject] = None

    def told(self, choices: Iterable[tuple[str, str]], now: Now) -> None:
        """Take the choices of another server."""
        for job_id, worker_id in choices:
            if (job := self._jobs.get(job_id)) is not None:
                self._choose(job, worker_id, now)
                self._wait(job, self._workers[job.queue])
            else:
                self._keep_choice(job_id, worker_id)

    def _keep_choice(self, job_id: str, worker_id: str) -> None:
        _keep(self._choices, job_id, worker_id, CHOICES_KEPT)

    def next_read(self, now: Now) -> tuple[str, ...]:
        """Return subjects whose jobs are to be read now."""
        if self._reading or not self._unread or now.monotonic < self._next_read_at:
            return ()
        self._reading = tuple(self._unread)[:READ_SUBJECTS]
        for subject in self._reading:
            del self._unread[subject]
        self._asked_at = now.monotonic
        return self._reading

    def read(self, jobs: Iterable[Job] | None, now: Now) -> None:
        """Take the jobs that were read; None: they could not be read, and are asked for again."""
        pause = pause_s(now.monotonic - self._asked_at, HURRIED_SHARE) if self._reading else 0.0
        if jobs is None:
            self._unread = dict.fromkeys((*self._reading, *self._unread))
            pause = max(FAILED_READ_S, pause)
        self._reading, self._next_read_at = (), now.monotonic + pause
        for job in jobs or ():
            if job.state in READY:
                ready_at = now.wall if job.attempt else max(job.created_at, job.not_before or 0.0)
                waited_s = max(0.0, now.wall - ready_at)
                self.add(job.spec, kind_of(job.spec.exec, job.submitter), job.priority, now, waited_s=waited_s)

    def forget(self, job_ids: Iterable[str]) -> None:
        """Forget jobs that were granted, or that the store did not grant although it could: they are not ready any more."""
        for job_id in job_ids:
            if (job := self._jobs.pop(job_id, None)) is not None:
                self._take_out(job)
                queue = job.queue
                del self.queues[queue][job_id]
                if not self.queues[queue]:
                    del self.queues[queue], self._workers[queue]
                    self.note(queue[0])  # there may be more than were known

    # -- lines ----------------------------------------------------------------------------------------------------
    def workers_changed(self) -> None:
        """Note that other workers may be able to run the known jobs: the next turns sort these anew."""
        self._unsorted.update(dict.fromkeys(self.queues))

    def awaited(self) -> set[str]:
        """Return the workers that may take a known job."""
        return set(chain.from_iterable(set(self._workers.values())))

    def _wait(self, job: RoutedJob, workers: tuple[str, ...], until: float | None = None) -> None:
        """Let a job wait for one of these workers, until then, or the end of its choice, at most; without any it only waits."""
        self._take_out(job)
        job_id = job.chosen.job_id
        if until is None and job.worker_id:
            until = job.until
        if workers:
            job.line = self._lines.get(workers)
            if job.line is None:
                job.line = self._lines[workers] = _Line(workers)
            job.line.put((-job.chosen.priority, job.number, job_id))
        if until is not None:
            self._due.put((until, job.number, job_id))

    def _take_out(self, job: RoutedJob) -> None:
        self._due.take_out(job.chosen.job_id)
        if job.line is not None:
            job.line.take_out(job.chosen.job_id)
            if not job.line:
                del self._lines[job.line.workers]
            job.line = None

    def _sort_some(self) -> None:
        """Let the jobs of some queues wait for the workers that can run them now."""
        for queue in list(islice(self._unsorted, QUEUES_PER_TURN)):
            del self._unsorted[queue]
            if queue in self.queues:
                self._sort(queue)

    def _sort(self, queue: Queue) -> bool:
        """Let the jobs of a queue wait for the workers that can run them now; return whether these are others than before."""
        before, workers = self._workers[queue], self._fitting(queue)
        self._workers[queue] = workers
        for job in self.queues[queue].values():
            if workers != before or job.worker_id == NOBODY:  # or they are the same, but at other servers
                self._wait(job, workers)
        return workers != before

    def _come_due(self, own: Mapping[str, object], now: Now) -> None:
        """Let jobs that have waited for long enough be for any worker."""
        for _ in range(MOVED_PER_TURN):
            place = self._due.first()
            if place is None or place[0] > now.monotonic:
                return
            job = self._jobs[place[-1]]
            if job.worker_id and job.worker_id not in own:
                self.forget([job.chosen.job_id])  # and read again, if it is still there
                self._keep_choice(job.chosen.job_id, NOBODY)
                continue
            if job.worker_id:
                job.worker_id = None
            self._wait(job, self._workers[job.queue])

    # -- choices --------------------------------------------------------------------------------------------------
    def reason(self, job_id: object) -> tuple[str, str]:
        """Return the worker of this server that was chosen for a job, and why; empty texts if that is not known any more."""
        return self._reasons.get(str(job_id), ("", ""))

    def _choose(self, job: RoutedJob, worker_id: str | None, now: Now) -> None:
        job.worker_id = worker_id
        job.until = now.monotonic + (self._wait_s if job.policy.waits else min(self._wait_s, ELSEWHERE_S))

    def plan(
        self, candidates: Mapping[str, Candidate], own: Mapping[str, object], now: Now
    ) -> tuple[dict[str, list[ChosenJob]], list[tuple[str, str]]]:
        """Choose a worker for every job that one could take. Return the jobs by worker of this server, `own`, and (job_id,
        worker_id) of new choices that fell to others."""
        self._turns = {worker_id: turn for worker_id, turn in self._turns.items() if worker_id in candidates}
        for worker_id, candidate in candidates.items():
            candidate.turn = self._turns.get(worker_id, 0)
        here: dict[str, list[ChosenJob]] = {}
        elsewhere: list[tuple[str, str]] = []
        free = sum(max(0, one.credit) for one in candidates.values())
        if not free:
            return here, elsewhere
        self._sort_some()
        self._come_due(own, now)
        given: list[RoutedJob] = []
        has_room = {worker_id for worker_id, one in candidates.items() if one.credit > 0}
        able = (line for line in self._lines.values() if not has_room.isdisjoint(line.workers))
        heads = [(place, line) for line in able if (place := line.first()) is not None]
        heapify(heads)
        moves = MOVED_PER_TURN
        while heads and free > 0 and moves > 0:
            place, line = heads[0]
            first = line.first()
            if first is None:
                heappop(heads)
                continue
            if first is not place:
                heapreplace(heads, (first, line))
                continue
            job = self._jobs[place[-1]]
            if self._workers[job.queue] is not self._fitting(job.queue) and self._sort(job.queue):
                continue
            worker, others, until = self._worker_for(job, candidates, own, now)
            if worker is not None:
                self._take_out(job)
                given.append(job)
                if worker.worker_id in own:
                    here.setdefault(worker.worker_id, []).append(job.chosen)
                else:
                    self.left[worker.worker_id] += 1
                    elsewhere.append((job.chosen.job_id, worker.worker_id))
                worker.credit -= 1
                worker.running += 1
                free -= 1
            elif others != line.workers:
                self._wait(job, others, until)
                moves -= len(line.workers) if job.policy is Policy.CACHE_AFFINITY else 1
            else:
                heappop(heads)  # all of them are full now
        for job in given:
            self._wait(job, (job.worker_id,) if job.worker_id and job.worker_id in own else ())
        return here, elsewhere

    def _worker_for(
        self, job: RoutedJob, candidates: Mapping[str, Candidate], own: Mapping[str, object], now: Now
    ) -> tuple[Candidate | None, tuple[str, ...], float | None]:
        """Return the worker that gets the job: the one that was chosen before, while that holds, else one that is chosen now; or
        None, the workers of which it waits for one, and until when."""
        workers = self._workers[job.queue]
        if job.worker_id and now.monotonic < job.until and job.worker_id in workers:
            worker = candidates[job.worker_id]
            if job.worker_id not in own:  # it was told
                return None, (), job.until
            return worker if worker.credit > 0 else None, (job.worker_id,), job.until
        is_left = job.worker_id == NOBODY
        if is_left:
            workers = tuple(worker_id for worker_id in workers if worker_id in own)
        until = job.seen_at + self._wait_s
        waited = is_left or now.monotonic >= until
        best = workers if waited else preferred(job.policy, job.facts, workers, candidates)
        if not any(candidates[worker_id].credit > 0 for worker_id in best):
            again = min(until, now.monotonic + HELD_FOR_S) if job.policy is Policy.CACHE_AFFINITY else until
            return None, best, None if waited else again
        fitting = [candidates[worker_id] for worker_id in workers]
        chosen = choose(job.policy, job.facts, fitting, waited=waited)
        if chosen is not None:
            if chosen.worker_id in own:
                words = LEFT_BY if is_left else why(job.policy, job.facts, chosen.worker_id, fitting, at_choice=True)
                _keep(self._reasons, job.chosen.job_id, (chosen.worker_id, words), REASONS_KEPT)
            self._last_turn += 1
            self._turns[chosen.worker_id] = chosen.turn = self._last_turn
            self._choose(job, chosen.worker_id, now)
        return chosen, best, None
