"""Good histories by chance: a small model of clients, a store, workers and leaders in which nothing ever goes wrong but faults.

It is written down here, and not taken from the code under test, so that the checker is judged against a third opinion.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tasuki.testing.sim.history import AnyLine
from tests.sim.history_lines import (
    HEALED,
    answered,
    arrived,
    asked,
    began,
    busy,
    canceled,
    ended,
    failed,
    finished,
    gone,
    granted,
    leading,
    led,
    process,
    reaped,
    repeated,
    requeued,
    row,
    settled,
    shown,
    submitted,
    told,
    took_over,
)

WORKERS = ("w1", "w2", "w3")
TTL_S = 5.0
MAX_RETRIES = MAX_LOSSES = 3
OVER = ("SUCCEEDED", "FAILED", "CANCELED")


@dataclass
class ModelJob:
    """One job of the model."""

    job_id: str
    state: str = "PENDING"
    attempt: int = 0
    generation: int = 0
    failures: int = 0
    losses: int = 0
    worker: str = ""
    runs: bool = False
    cancel: bool = False
    calls: int = 0


class Model:
    """Takes random steps, and writes down what happens."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.lines: list[AnyLine] = []
        self._jobs: list[ModelJob] = []
        self._epoch = 0
        self._leader = ""
        self._lives = dict.fromkeys(WORKERS, 1)

    def history(self, steps: int = 80) -> list[AnyLine]:
        """So many steps, and then whatever is left to be done."""
        self._elect()
        for _ in range(steps):
            self._chance.choice(self._possible())()
        self.lines.append(HEALED)
        for job in self._jobs:
            while job.state not in OVER:
                self._advance(job)
        self.lines += [self._row(job, at_end=True) for job in self._jobs]
        self.lines.append(ended(events=200))
        return told(self.lines)

    # ------------------------------------------------------------------------------------------------ steps

    def _possible(self) -> list[Callable[[], None]]:
        steps: list[Callable[[], None]] = [self._elect, self._submit]
        for job in self._jobs:
            if job.state in OVER:
                steps.append(lambda job=job: self._requeue(job))  # type: ignore[misc]
            else:
                steps += [lambda job=job: self._advance(job)] * 4  # type: ignore[misc]
                steps.append(lambda job=job: self._cancel(job))  # type: ignore[misc]
        return steps

    def _elect(self) -> None:
        self._epoch += 1
        if self._leader:
            self.lines += [process("crashed", self._leader), process("started", self._leader)]
        self._leader = self._chance.choice(("s1", "s2"))
        self.lines += [took_over(self._leader, self._epoch), leading(self._leader, self._epoch), led(self._leader, self._epoch)]

    def _submit(self) -> None:
        job = ModelJob(f"j{len(self._jobs)}")
        self._jobs.append(job)
        answer = self._chance.choice(("ok", "ok", "unknown"))
        self.lines += [asked("submit", job.job_id), submitted(job.job_id), self._row(job)]
        if self._chance.random() < 0.3:
            self.lines.append(repeated(job.job_id))
        self.lines.append(answered("submit", job.job_id, answer=answer))

    def _cancel(self, job: ModelJob) -> None:
        call = self._call("cancel", job)
        if job.state in ("PENDING", "ORPHANED"):
            self._end(job, "CANCELED", canceled(job.job_id))
        else:
            job.cancel = True
            self.lines += [canceled(job.job_id, job.state, requested=True), self._row(job)]
        self.lines.append(answered("cancel", job.job_id, call=call, states=(job.state,)))

    def _requeue(self, job: ModelJob) -> None:
        call = self._call("requeue", job)
        job.generation += 1
        job.state, job.failures, job.losses, job.cancel = "PENDING", 0, 0, False
        self.lines += [requeued(job.job_id, job.generation), self._row(job)]
        self.lines.append(answered("requeue", job.job_id, call=call, answer=self._chance.choice(("ok", "unknown"))))

    def _call(self, verb: str, job: ModelJob) -> str:
        job.calls += 1
        call = f"{verb} {job.job_id} {job.calls}"
        self.lines.append(asked(verb, job.job_id, call=call))
        return call

    def _advance(self, job: ModelJob) -> None:
        if job.state in ("PENDING", "ORPHANED"):
            self._grant(job)
        elif job.state == "ASSIGNED" and self._chance.random() < 0.2:
            self.lines.append(shown("release", job.job_id, job.attempt, job.worker, incarnation=self._life(job)))
            self._gone(job, "stopped")
            job.state = "CANCELED" if job.cancel else "PENDING"
            self.lines.append(self._row(job))
        else:
            steps = [self._start, self._renew, self._finish, self._finish, self._fail, self._lose, self._lose]
            self._chance.choice(steps)(job)

    def _grant(self, job: ModelJob) -> None:
        job.attempt += 1
        job.state, job.worker = "ASSIGNED", self._chance.choice(WORKERS)
        more = {"incarnation": self._life(job), "generation": job.generation, "ttl_s": TTL_S}
        self.lines += [granted(job.job_id, job.attempt, job.worker, **more), self._row(job), busy(1, 4)]
        self.lines.append(began(job.job_id, job.attempt, job.worker, incarnation=self._life(job)))
        job.runs = True

    def _start(self, job: ModelJob) -> None:
        if job.state == "ASSIGNED":
            self.lines.append(shown("start", job.job_id, job.attempt, job.worker, incarnation=self._life(job)))
            job.state = "RUNNING"
            self.lines.append(self._row(job))

    def _renew(self, job: ModelJob) -> None:
        self.lines.append(shown("renew", job.job_id, job.attempt, job.worker, incarnation=self._life(job)))

    def _finish(self, job: ModelJob) -> None:
        self._gone(job, "ended")
        self._end(job, "SUCCEEDED", finished(job.job_id, job.attempt, job.worker))
        self.lines += [settled(job.job_id, job.attempt, job.worker), arrived(job.job_id, job.attempt)]

    def _fail(self, job: ModelJob) -> None:
        self._gone(job, "ended")
        job.failures += not job.cancel
        state = "CANCELED" if job.cancel else "FAILED" if job.failures > MAX_RETRIES else "PENDING"
        self._end(job, state, failed(job.job_id, job.attempt, job.worker, state=state))
        self.lines.append(settled(job.job_id, job.attempt, job.worker))
        if state in OVER:
            self.lines.append(arrived(job.job_id, job.attempt, state))

    def _lose(self, job: ModelJob) -> None:
        """Let the job's worker crash with all that it runs, and the lease run out."""
        self.lines.append(process("crashed", job.worker))
        for other in self._jobs:
            if other.worker == job.worker:
                self._gone(other, "killed")
        self._lives[job.worker] += 1
        lost = [other for other in self._jobs if other.worker == job.worker and other.state in ("ASSIGNED", "RUNNING")]
        self.lines += [process("started", job.worker), *[led(self._leader, self._epoch)] * int(TTL_S)]
        for other in lost:
            other.losses += not other.cancel
            state = "CANCELED" if other.cancel else "FAILED" if other.losses > MAX_LOSSES else "PENDING"
            line = reaped(other.job_id, other.attempt, other.worker, state=state, epoch=self._epoch)
            self._end(other, state, line)

    def _gone(self, job: ModelJob, how: str) -> None:
        if job.runs:
            self.lines.append(gone(job.job_id, job.attempt, job.worker, how, incarnation=self._life(job)))
            job.runs = False

    def _end(self, job: ModelJob, state: str, line: AnyLine) -> None:
        job.state = state
        self.lines += [line, self._row(job)]

    def _life(self, job: ModelJob) -> str:
        return f"life {self._lives[job.worker]}"

    @staticmethod
    def _row(job: ModelJob, **given: Any) -> AnyLine:
        budgets = {"failures": job.failures, "losses": job.losses, "max_retries": MAX_RETRIES, "max_losses": MAX_LOSSES}
        return row(job.state, job.job_id, job.attempt, generation=job.generation, body="body", **budgets, **given)
