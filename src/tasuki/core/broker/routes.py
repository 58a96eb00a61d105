"""Ready jobs of subjects that have a routing policy, and the workers that were chosen for them. Pure.

Theory of operation. The workers of a server do not look for routed subjects by their patterns: the store grants their jobs only
to the worker that was chosen (`LeaseRequest.routed`, `chosen`). The server knows the jobs that it accepted; of others (retries,
those of other servers, a backlog) it reads some when it hears that a subject is ready. Before each turn it chooses workers for
the jobs that it knows, with `core.routing`. A job that falls to a worker of another server is left to that server, which is told;
if it is still there after a while, it is for the workers here. A job that was granted elsewhere or canceled is noticed when the
store does not grant it: nothing here has to be true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from tasuki.core.job import READY, Job, JobSpec
from tasuki.core.machine import Now
from tasuki.core.routing import Candidate, Policy, RoutingFacts, SubjectRoute, choose, facts_of, route_of, why
from tasuki.core.store_messages import ChosenJob, JobKind, kind_of
from tasuki.core.subject import group_of

QUEUE_MAX = 32  # jobs of one queue that a server knows; others are read when these are gone
QUEUES_MAX = 4096
READ_SUBJECTS = 16  # subjects whose jobs are read at once
READ_TIMEOUT_S = 5.0
CHOICES_KEPT = 4096  # of other servers, for jobs that are not known here yet
REASONS_KEPT = 4096
ELSEWHERE_S = 0.1  # how long another server has for a job that any worker may take as well
SUBJECTS_KEPT = 1024
NOBODY = ""  # as a choice: the server that had the chosen worker did not act
LEFT_BY = "The server of the worker that was chosen first did not give it the job in time, so that any worker might."

Queue = tuple[str, JobKind, str]


class RoutedJob(msgspec.Struct):
    """A ready job, and the worker that was chosen for it."""

    chosen: ChosenJob
    policy: Policy
    facts: RoutingFacts
    seen_at: float
    worker_id: str | None = None
    """The worker that this server, or another one, chose; None: none yet."""
    until: float = 0.0
    """Time until which that choice holds."""


class RoutedJobs:
    """The routes of a server, and what it knows of their jobs. `fitting` returns the live workers that may take a queue."""

    def __init__(self, routes: tuple[SubjectRoute, ...], wait_s: float, fitting: Callable[[Queue], Sequence[str]]) -> None:
        self.own = routes
        self.routes = routes
        self.patterns = tuple(route.pattern for route in routes)
        self.queues: dict[Queue, dict[str, RoutedJob]] = {}
        self._queue_of: dict[str, Queue] = {}
        self.left: Counter[str] = Counter()
        """Jobs that were left to workers of other servers since these were last heard of."""
        self._wait_s = wait_s
        self._fitting = fitting
        self._turns: dict[str, int] = {}
        """Number of the latest turn of each worker."""
        self._last_turn = 0
        self._unread: dict[str, None] = {}
        self._asked_at: float | None = None
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
    def add(self, spec: JobSpec, kind: JobKind, priority: int, now: Now) -> None:
        """Note a ready job that a live worker can run; one that is known keeps its place and its choice."""
        route = self.route_of(spec.subject)
        queue = (spec.subject, kind, spec.exec)
        if route is None or spec.job_id in self._queue_of or not self._fitting(queue):
            return
        jobs = self.queues.get(queue)
        if jobs is None and len(self.queues) < QUEUES_MAX:
            jobs = self.queues[queue] = {}
        if jobs is None or len(jobs) >= QUEUE_MAX:
            return
        self._queue_of[spec.job_id] = queue
        chosen = ChosenJob(spec.job_id, priority, group_of(spec.subject))
        job = jobs[spec.job_id] = RoutedJob(chosen, route.policy, facts_of(spec), now.monotonic)
        self._choose(job, self._choices.pop(spec.job_id, None), now)

    def note(self, subject: str) -> None:
        """Note that there are jobs of this subject, which are to be read. Of too many, the walk over all that is ready tells
        again."""
        if len(self._unread) < QUEUES_MAX:
            self._unread[subject] = None

    def told(self, choices: Iterable[tuple[str, str]], now: Now) -> None:
        """Take the choices of another server."""
        for job_id, worker_id in choices:
            if (queue := self._queue_of.get(job_id)) is not None:
                self._choose(self.queues[queue][job_id], worker_id, now)
            else:
                self._keep_choice(job_id, worker_id)

    def _keep_choice(self, job_id: str, worker_id: str) -> None:
        if len(self._choices) >= CHOICES_KEPT:
            self._choices.clear()
        self._choices[job_id] = worker_id

    def next_read(self, now: Now) -> tuple[str, ...]:
        """Return subjects whose jobs are to be read now."""
        is_reading = self._asked_at is not None and now.monotonic < self._asked_at + READ_TIMEOUT_S
        if is_reading or not self._unread:
            return ()
        some = tuple(self._unread)[:READ_SUBJECTS]
        for subject in some:
            del self._unread[subject]
        self._asked_at = now.monotonic
        return some

    def read(self, jobs: Iterable[Job], now: Now) -> None:
        """Take the jobs that were read."""
        self._asked_at = None
        for job in jobs:
            if job.state in READY:
                self.add(job.spec, kind_of(job.spec.exec, job.submitter), job.priority, now)

    def forget(self, job_ids: Iterable[str]) -> None:
        """Forget jobs that were granted, or that the store did not grant although it could: they are not ready any more."""
        for job_id in job_ids:
            if (queue := self._queue_of.pop(job_id, None)) is not None:
                del self.queues[queue][job_id]
                if not self.queues[queue]:
                    del self.queues[queue]
                    self.note(queue[0])  # there may be more than were known

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
        passed_by: list[str] = []
        able: list[tuple[RoutedJob, list[Candidate]]] = []
        for queue, jobs in self.queues.items():
            fitting = [candidates[worker_id] for worker_id in self._fitting(queue) if worker_id in candidates]
            if any(worker.credit > 0 for worker in fitting):
                able += ((job, fitting) for job in jobs.values())
        able.sort(key=lambda one: -one[0].chosen.priority)
        for job, fitting in able:
            if job.worker_id and job.worker_id not in own and now.monotonic >= job.until:
                passed_by.append(job.chosen.job_id)
                continue
            before = job.worker_id
            worker = self._worker_for(job, fitting, own, now)
            if worker is None or worker.credit <= 0:
                continue
            if worker.worker_id in own:
                here.setdefault(worker.worker_id, []).append(job.chosen)
            elif worker.worker_id != before:
                self.left[worker.worker_id] += 1
                elsewhere.append((job.chosen.job_id, worker.worker_id))
            else:
                continue  # left to it before
            worker.credit -= 1
            worker.running += 1
        self.forget(passed_by)  # and read again, if they are still there
        for job_id in passed_by:
            self._keep_choice(job_id, NOBODY)
        return here, elsewhere

    def _worker_for(self, job: RoutedJob, fitting: list[Candidate], own: Mapping[str, object], now: Now) -> Candidate | None:
        """Return the worker that was chosen before, while that holds, else choose one."""
        if job.worker_id and now.monotonic < job.until:
            for worker in fitting:
                if worker.worker_id == job.worker_id:
                    return worker
        is_left = job.worker_id == NOBODY
        able = [worker for worker in fitting if worker.worker_id in own] if is_left else fitting
        waited = is_left or now.monotonic - job.seen_at >= self._wait_s
        chosen = choose(job.policy, job.facts, able, waited=waited)
        if chosen is not None:
            if chosen.worker_id in own:
                if len(self._reasons) >= REASONS_KEPT:
                    self._reasons.clear()
                words = LEFT_BY if is_left else why(job.policy, job.facts, chosen.worker_id, fitting, at_choice=True)
                self._reasons[job.chosen.job_id] = chosen.worker_id, words
            self._last_turn += 1
            self._turns[chosen.worker_id] = chosen.turn = self._last_turn
            self._choose(job, chosen.worker_id, now)
        return chosen
