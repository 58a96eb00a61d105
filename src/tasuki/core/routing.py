"""Routing policies: which of the workers that may take a job gets it. Pure.

Theory of operation. Without a policy the first worker that asks the store gets a job. A route names a policy for the subjects of
a pattern; then a server looks at each ready job of them and chooses among all live workers that can run it, also those of other
servers. The choice is a function of what all servers know, so that they agree without a word, except for turns: those are told.

    least-load       the worker with the smallest load: the larger one of its used share of places and its CPU
    round-robin      the worker that was chosen the longest ago
    sticky           the worker that the job's key belongs to, on a ring of hashes: when a worker comes or goes, only those keys
                     move that it gets or had
    cache-affinity   the worker that holds the most bytes of the job's inputs that are files of caches; if nobody holds any, the
                     one with the smallest load

Sticky and cache-affinity wait for a worker that is full, but no longer than the route's wait; then the next best that has room is
chosen. A choice that its server does not act on, because it knows better or is gone, is void after the same time, and any server
takes the job. So a policy delays a job by a bounded time, and it decides about nothing else: the store still grants by priority
and fairness, and only for credit.
"""

from __future__ import annotations

import enum
import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import msgspec

from tasuki.core.job import JobSpec
from tasuki.core.subject import check_job_pattern, matches
from tasuki.errors import InvalidInput, quoted

ROUTE_WAIT_S = 1.0
ROUTES_MAX = 64  # of one server: each is compared with every subject
RING_POINTS = 128  # of each worker: shares differ by some 10 %
RINGS_KEPT = 64
PREFIX_BYTES = 4
HELD_MAX = 512  # cached files that a worker tells of, the latest used first: 2 KiB of a heartbeat
HELD_MAX_BYTES = HELD_MAX * PREFIX_BYTES
HELD_KEPT = 1024


class Policy(enum.StrEnum):
    """Ways to choose a worker."""

    LEAST_LOAD = "least-load"
    ROUND_ROBIN = "round-robin"
    STICKY = "sticky"
    CACHE_AFFINITY = "cache-affinity"

    @property
    def waits(self) -> bool:
        """True if the policy would rather wait for a full worker than take another one."""
        return self in (Policy.STICKY, Policy.CACHE_AFFINITY)


class SubjectRoute(msgspec.Struct, frozen=True, array_like=True):
    """The policy of the subjects that a pattern matches."""

    pattern: str
    policy: Policy


def parse_route(text: str) -> SubjectRoute:
    """Return the route that `PATTERN=POLICY` names, else raise InvalidInput."""
    pattern, _, policy = text.rpartition("=")
    try:
        return SubjectRoute(check_job_pattern(pattern), Policy(policy))
    except ValueError:
        raise InvalidInput(f"route {quoted(text)} has no policy; write PATTERN=POLICY, one of {', '.join(Policy)}") from None


def parse_routes(texts: Sequence[str]) -> tuple[SubjectRoute, ...]:
    """Return the routes of a server."""
    if len(texts) > ROUTES_MAX:
        raise InvalidInput(f"{len(texts)} routes are too many, the limit is {ROUTES_MAX}; name wider patterns")
    return tuple(map(parse_route, texts))


def route_of(routes: Iterable[SubjectRoute], subject: str) -> SubjectRoute | None:
    """Return the first route for a subject."""
    return next((route for route in routes if matches(route.pattern, subject)), None)


# ---------------------------------------------------------------------------------------------------- what is compared


class RoutingFacts(NamedTuple):
    """Facts of a job that a policy judges."""

    key: str
    """Key of sticky jobs: the job's own, else its subject."""
    cached_bytes: Mapping[bytes, int]
    """Size of its inputs that are files of caches, by the prefix of the hash of each."""


def hash_prefix(sha256: str) -> bytes:
    """Return the first bytes of a hash, by which workers tell what they hold: enough to compare bytes with."""
    return bytes.fromhex(sha256[: 2 * PREFIX_BYTES])


@lru_cache(HELD_KEPT)
def prefixes_in(held: bytes) -> frozenset[bytes]:
    """Return the prefixes in what a worker told."""
    return frozenset(held[start : start + PREFIX_BYTES] for start in range(0, len(held), PREFIX_BYTES))


def facts_of(spec: JobSpec) -> RoutingFacts:
    """Return the facts about a job by which it is routed."""
    cached = {hash_prefix(file.sha256): file.size_bytes or 0 for file in spec.files if file.cached_as is not None and file.sha256}
    return RoutingFacts(spec.route_key or spec.subject, cached)


class Candidate(msgspec.Struct):
    """A worker that can run a job, as its server knows it, or as another one heard of it."""

    worker_id: str
    credit: int = 0
    running: int = 0
    cpu: float = 0.0
    """Load of its CPUs, 0 to 1."""
    held: bytes = b""
    """Prefixes of the hashes of cached files that it holds, one after the other."""
    turn: int = 0
    """Number of its latest turn; 0: it had none."""

    @property
    def load(self) -> tuple[float, float]:
        """The larger one of its used share of places and its CPU, then the used share."""
        places = self.running + self.credit
        used = self.running / places if places else 1.0
        return max(used, self.cpu), used

    def holds(self, facts: RoutingFacts) -> int:
        """Return how many bytes of the job's cached inputs the worker has."""
        if not facts.cached_bytes or not self.held:
            return 0
        prefixes = prefixes_in(self.held)
        return sum(size for prefix, size in facts.cached_bytes.items() if prefix in prefixes)


# ---------------------------------------------------------------------------------------------------- the ring


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


class Ring:
    """Workers on a circle of hashes, each at several points. A key belongs to the first point behind its own hash."""

    def __init__(self, worker_ids: Iterable[str]) -> None:
        points = sorted((_point(f"{worker_id}#{number}"), worker_id) for worker_id in worker_ids for number in range(RING_POINTS))
        self._hashes = [point for point, _ in points]
        self._owners = [worker_id for _, worker_id in points]

    def order(self, key: str) -> Iterator[str]:
        """Yield the workers in the order in which they stand behind the key, each once."""
        start, count = bisect_right(self._hashes, _point(key)), len(self._owners)
        seen: set[str] = set()
        for place in range(start, start + count):
            worker_id = self._owners[place % count]
            if worker_id not in seen:
                seen.add(worker_id)
                yield worker_id


@lru_cache(RINGS_KEPT)
def ring_of(worker_ids: tuple[str, ...]) -> Ring:
    """Return the ring of these workers."""
    return Ring(worker_ids)


# ---------------------------------------------------------------------------------------------------- choices


def preferred(
    policy: Policy, facts: RoutingFacts, worker_ids: tuple[str, ...], candidates: Mapping[str, Candidate]
) -> tuple[str, ...]:
    """Return those of these workers, which are sorted, that the job waits for if they are full."""
    if policy is Policy.STICKY:
        return tuple(islice(ring_of(worker_ids).order(facts.key), 1))
    if policy is Policy.CACHE_AFFINITY:
        held = [candidates[worker_id].holds(facts) for worker_id in worker_ids]
        if most := max(held, default=0):
            return tuple(worker_id for worker_id, size in zip(worker_ids, held, strict=True) if size == most)
    return worker_ids


def choose(policy: Policy, facts: RoutingFacts, candidates: Sequence[Candidate], *, waited: bool) -> Candidate | None:
    """Return the worker that gets the job; None: it waits. `waited`: it has waited for a full worker for long enough."""
    by_id = {one.worker_id: one for one in candidates}
    able = tuple(sorted(by_id))
    if policy is Policy.STICKY and waited:
        return next((by_id[worker_id] for worker_id in ring_of(able).order(facts.key) if by_id[worker_id].credit > 0), None)
    if not waited:
        able = preferred(policy, facts, able, by_id)
    free = [by_id[worker_id] for worker_id in able if by_id[worker_id].credit > 0]
    if policy is Policy.ROUND_ROBIN:
        return min(free, key=lambda one: (one.turn, one.worker_id), default=None)
    return min(free, key=lambda one: (-one.holds(facts), one.load, one.turn, one.worker_id), default=None)


def why(policy: Policy, facts: RoutingFacts, worker_id: str, candidates: Sequence[Candidate], *, at_choice: bool = False) -> str:
    """Return the reason, in a sentence, for which a worker has the job, by what is known now, or at the choice itself."""
    if policy is Policy.LEAST_LOAD:
        return "It had the smallest load of the workers that fit when it was chosen."
    if policy is Policy.ROUND_ROBIN:
        return f"It was its turn among the {len(candidates)} workers that fit."
    if policy is Policy.STICKY:
        best = next(ring_of(tuple(sorted(one.worker_id for one in candidates))).order(facts.key), worker_id)
        key = f"Its key is {quoted(facts.key)}, which belongs to"
        if best == worker_id:
            return f"{key} it among the {len(candidates)} workers that fit."
        or_away = "" if at_choice else ", or away"
        return f"{key} {best}: that one was full for longer than the job may wait{or_away}, and this is the next on the ring."
    held = {one.worker_id: one.holds(facts) for one in candidates}
    best = max(held, key=held.__getitem__, default=worker_id)
    if not held.get(best):
        return "No worker holds its cached inputs; it had the smallest load."
    own, most = held.get(worker_id, 0), held[best]
    others = "" if own == most else f"; {best} holds {most}, but was full for longer than the job may wait"
    return f"It holds {own} of {sum(facts.cached_bytes.values())} bytes of its cached inputs{others}."
