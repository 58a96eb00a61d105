"""What a big world is asked to do: Poisson arrivals of jobs in groups of unequal size, and how long each attempt takes.

Draws from the streams of its world and from nothing else.
"""

from __future__ import annotations

import hashlib
import math
import random
from bisect import bisect
from itertools import accumulate

import msgspec

from tasuki.core.job import JobSpec, Outcome
from tasuki.testing.sim.scale_tally import SAMPLED, Tally
from tasuki.testing.sim.world import Streams

SIGMA = 0.8  # of the lognormal times: the longest of a hundred attempts takes some five times the mean
FAILING = 0.02  # of all attempts; each is tried again after BACKOFF_S
BACKOFF_S = 10.0
SAMPLED_EVERY = 50
PRIORITIES = ((9, 0.05), (5, 0.75), (1, 0.20))
USUAL_PRIORITY = 5


class LoadGroup(msgspec.Struct, frozen=True):
    """Jobs of one kind: how many of all, and how long they take beside the average job."""

    name: str
    share: float
    length: float


GROUPS = (
    LoadGroup("render", 0.50, 1.2),
    LoadGroup("price", 0.25, 0.6),
    LoadGroup("report", 0.15, 1.3),
    LoadGroup("mail", 0.08, 0.4),
    LoadGroup("audit", 0.02, 1.0),
)
REGIONS = ("asia", "europe", "america")
SUBJECTS = {group.name: tuple(f"{group.name}.{region}" for region in REGIONS) for group in GROUPS}
FLOODING = "report"

PATTERNS = ((">",), (">",), (">",), (">",), ("render.>",))
"""Of workers: four in five take everything, the others are kept for the largest group."""

DONE = Outcome(exit_code=0)
BROKEN = Outcome(exit_code=1, error_code="EXIT_CODE", message="it broke")


class Load:
    """Draws arrivals, specs, times and outcomes."""

    def __init__(self, streams: Streams, tally: Tally, mean_s: float) -> None:
        self._chance = streams.load
        self._attempts = streams.attempts
        self._tally = tally
        self._group_marks = list(accumulate(group.share for group in GROUPS))
        self._priority_marks = list(accumulate(share for _, share in PRIORITIES))
        average = sum(group.share * group.length for group in GROUPS)
        self._mu = {group.name: _mu(mean_s * group.length / average) for group in GROUPS}
        self._number = 0

    def until_next_s(self, rate: float) -> float:
        return self._chance.expovariate(rate)

    def spec(self, at: float, group: str = "") -> JobSpec:
        """The next job; of this group, at the usual priority, if one is named."""
        chance = self._chance
        name = group or GROUPS[_pick(chance, self._group_marks)].name
        priority = USUAL_PRIORITY if group else PRIORITIES[_pick(chance, self._priority_marks)][0]
        self._number += 1
        sampled = self._number % SAMPLED_EVERY == 0
        job_id = f"{SAMPLED if sampled else 'job-'}{self._number}"
        self._tally.asked(job_id, at, name, priority, sampled=sampled)
        subject = SUBJECTS[name][self._number % len(REGIONS)]
        return JobSpec(job_id=job_id, subject=subject, exec="program", priority=priority, backoff_s=BACKOFF_S)

    def lasts_s(self, group: str) -> float:
        return self._attempts.lognormvariate(self._mu[group], SIGMA)

    def outcome(self, job_id: str, attempt: int, worker_id: str) -> Outcome:
        if self._attempts.random() < FAILING:
            return BROKEN
        if not job_id.startswith(SAMPLED):
            return DONE
        result = f"{job_id} {attempt} {worker_id}".encode()
        return Outcome(exit_code=0, result=result, result_sha256=hashlib.sha256(result).hexdigest())


def _mu(mean_s: float) -> float:
    return math.log(mean_s) - SIGMA * SIGMA / 2


def _pick(chance: random.Random, marks: list[float]) -> int:
    return min(bisect(marks, chance.random() * marks[-1]), len(marks) - 1)
