"""What clients ask for, and when: drawn once from the seed, as a list, so that a failing seed can be tried with less of it."""

from __future__ import annotations

import msgspec

from tasuki.core.job import JobSpec
from tasuki.testing.sim.options import SimOptions
from tasuki.testing.sim.process import WALL_START_S
from tasuki.testing.sim.world import Streams

SUBJECTS = ("render.fast", "render.slow", "price.all", "price.worker-1", "job.submit.books.close")
PATTERNS = ((">",), ("render.>", "job.>"), ("price.*", "render.fast"))
"""Of workers; the first worker of every world takes everything, so that every job has one that fits."""


class Operation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of one client."""

    number: int
    at: float
    client: str
    verb: str
    """submit, rerun, cancel, requeue, get, watch"""
    specs: tuple[JobSpec, ...] = ()
    job_ids: tuple[str, ...] = ()


def drawn(streams: Streams, options: SimOptions) -> list[Operation]:
    """All that is asked during the chaos; most of it in its first two thirds."""
    return _Drawing(streams, options).operations()


class _Drawing:
    def __init__(self, streams: Streams, options: SimOptions) -> None:
        self.chance = streams.load
        self.options = options
        self.clients = [f"client-{number}" for number in range(1, (options.clients or 1) + 1)]
        self.known: list[tuple[str, JobSpec]] = []
        """(client, spec) of what was submitted so far."""

    def operations(self) -> list[Operation]:
        chance, jobs = self.chance, self.options.jobs or 1
        found: list[Operation] = []
        end, number = self.options.chaos_s * 0.85, 0
        moments = sorted(end * chance.random() ** 1.5 for _ in range(jobs))
        while number < jobs:
            at = moments[number]
            size = min(jobs - number, 1 if chance.random() < 0.6 else chance.randint(2, 6))
            specs = tuple(self._spec(number + place, at) for place in range(size))
            client = chance.choice(self.clients)
            self.known += [(client, spec) for spec in specs]
            found.append(Operation(number=0, at=at, client=client, verb="submit", specs=specs))
            number += size
            if chance.random() < 0.8:
                found.append(self._another(at + 4.0 * chance.random()))
        found += [self._another(end * chance.random()) for _ in range(jobs // 4)]
        found.sort(key=lambda operation: operation.at)
        return [msgspec.structs.replace(operation, number=place) for place, operation in enumerate(found)]

    def _spec(self, number: int, at: float) -> JobSpec:
        chance = self.chance
        wall = WALL_START_S + at
        not_before = wall + 3.0 * chance.random() if chance.random() < 0.15 else None
        not_after = wall + 3.0 + 8.0 * chance.random() if chance.random() < 0.12 else None
        return JobSpec(
            job_id=f"job-{number:03}",
            subject=chance.choice(SUBJECTS),
            exec="" if chance.random() < 0.3 else "program",
            payload=b"body",
            max_retries=chance.choice((0, 0, 1, 2, 3)),
            max_losses=chance.choice((0, 1, 2, 3, 3)),
            backoff_s=chance.choice((0.0, 0.3, 1.0)),
            priority=chance.choice((0, 5, 5, 5, 9)),
            not_before=not_before,
            not_after=not_after,
        )

    def _another(self, at: float) -> Operation:
        """Something about jobs that were, or will soon be, submitted."""
        chance = self.chance
        client, spec = chance.choice(self.known)
        if chance.random() < 0.3:
            client = chance.choice(self.clients)
        verb = chance.choice(("again", "again", "conflict", "rerun", "rerun", "cancel", "cancel", "requeue", "get", "watch"))
        if verb == "again":
            return Operation(number=0, at=at, client=client, verb="submit", specs=(spec,))
        if verb == "conflict":
            other = msgspec.structs.replace(spec, payload=b"another body")
            return Operation(number=0, at=at, client=client, verb="submit", specs=(other,))
        if verb == "rerun":
            return Operation(number=0, at=at, client=client, verb="rerun", specs=(spec,))
        job_ids = (spec.job_id,) if chance.random() < 0.7 else (spec.job_id, chance.choice(self.known)[1].job_id)
        return Operation(number=0, at=at, client=client, verb=verb, job_ids=tuple(dict.fromkeys(job_ids)))
