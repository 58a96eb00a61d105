"""Statistics of groups: how many jobs of each are in which state; what one server counted in one minute (a rollup), and sums of
these over servers and time. Pure.

Every server counts in its memory, and writes one rollup after each minute in which anything happened. All counts but the queue
lengths are its own, so that a sum over servers is true; the queue lengths are in the rollup of the leader alone. Nothing is
decided by any of them, and a server that is killed takes its last minute with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tasuki.core.job import LEASED, State

ROLLUP_S = 60
ROLLUP_DAYS = 8  # a week, and the same day of the week before
ROLLUP_GROUPS_MAX = 100  # of one rollup, the busiest: some 10 KB; all others are one
OTHER_GROUPS = "(other)"
UNKNOWN_GROUP = "(unknown)"  # of a job that is not there any more
LATENCIES_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 300.0, 1800.0, 7200.0),
)
"""Upper ends of the buckets of a histogram of latencies; a last bucket has everything above."""


class GroupCounts(msgspec.Struct, frozen=True, gc=False):
    """Number of jobs of a group by state. `active` is ASSIGNED + RUNNING."""

    pending: int = 0
    active: int = 0
    orphaned: int = 0
    succeeded: int = 0
    failed: int = 0
    canceled: int = 0
    timed_out: int = 0
    skipped: int = 0

    @property
    def total(self) -> int:
        return sum(msgspec.structs.astuple(self))


def largest_groups(counts: Mapping[str, GroupCounts], limit: int) -> dict[str, GroupCounts]:
    """Return the groups with the most jobs, and behind them the sum of all others as one."""
    by_size = sorted(counts, key=lambda group: (-counts[group].total, group))
    found = {group: counts[group] for group in by_size[:limit]}
    if others := [msgspec.structs.astuple(counts[group]) for group in by_size[limit:]]:
        found[OTHER_GROUPS] = GroupCounts(*map(sum, zip(*others, strict=True)))
    return found


COUNTED = {state: "active" if state in LEASED else state.lower() for state in State}
"""Field of GroupCounts that counts the jobs in each state."""


class GroupStatistics(msgspec.Struct, omit_defaults=True):
    """Counts of one group in some time."""

    submitted: int = 0
    """Jobs stored."""
    leased: int = 0
    """Attempts given to workers."""
    redelivered: int = 0
    """Part of them that is not the first attempt of its job."""
    succeeded: int = 0
    """Jobs that ended, by their final state; likewise the next four."""
    failed: int = 0
    canceled: int = 0
    timed_out: int = 0
    skipped: int = 0
    attempts_failed: int = 0
    """Attempts that their workers reported as failed."""
    attempts_lost: int = 0
    """Attempts whose lease ran out."""
    retried_failed: int = 0
    """Failed attempts that are followed by another one; likewise the next."""
    retried_lost: int = 0
    requeued: int = 0
    """Jobs that were set going again after their end."""
    fenced: int = 0
    """Reports that were refused: not the current lease."""
    cache_inputs: int = 0
    """Inputs of leased attempts that are files of a cache."""
    cache_input_bytes: int = 0
    cache_fetches: int = 0
    """Part of these inputs that a worker had to fetch."""
    cache_fetched_bytes: int = 0
    published: int = 0
    """Messages published."""
    deliveries: int = 0
    """Messages for subscribers, each as often as there were."""
    dropped: int = 0
    """Part of them that a slow subscriber did not get."""
    unrelayed: int = 0
    """Published messages that could not be passed on to the other servers."""
    delivery_s: float = 0.0
    """Sum of the latencies from the commit of a submit to that of its first lease."""
    delivery: dict[int, int] = msgspec.field(default_factory=dict)
    """Number of these latencies by the place of their bucket in LATENCIES_S."""
    firing_s: float = 0.0
    """Sum of the lags of scheduled runs: from the nominal time to the first lease; 0 for one that was leased ahead of it."""
    firing: dict[int, int] = msgspec.field(default_factory=dict)
    """Number of these lags by the place of their bucket."""

    @property
    def finished(self) -> int:
        return self.succeeded + self.failed + self.canceled + self.timed_out + self.skipped

    @property
    def dead(self) -> int:
        """Jobs that failed for good."""
        return self.failed + self.timed_out

    @property
    def cache_hits(self) -> int:
        """Inputs that were linked from a worker's cache. A fetch may be counted in a later minute than its attempt."""
        return max(0, self.cache_inputs - self.cache_fetches)

    @property
    def saved_bytes(self) -> int:
        """Bytes that were not sent because of them."""
        return max(0, self.cache_input_bytes - self.cache_fetched_bytes)

    def add(self, other: GroupStatistics) -> None:
        """Add the counts of another server, group or time."""
        for name in COUNTS:
            if count := getattr(other, name):
                setattr(self, name, getattr(self, name) + count)
        for mine, others in ((self.delivery, other.delivery), (self.firing, other.firing)):
            for bucket, count in others.items():
                mine[bucket] = mine.get(bucket, 0) + count

    def latency_s(self, share: float) -> float | None:
        """Return the latency that this share of the deliveries did not exceed, as well as the buckets tell; None without any."""
        return _quantile(self.delivery, share)

    def view(self, *, zeros: bool = False) -> dict[str, Any]:
        """Return the counts that are not 0, with those that follow from them, for people and programs outside."""
        counts = {name: count for name in (*COUNTS, *_DERIVED) if (count := getattr(self, name)) or zeros}
        if self.delivery or zeros:
            counts["latency_p50_s"], counts["latency_p99_s"] = self.latency_s(0.5), self.latency_s(0.99)
        if self.firing or zeros:
            counts["firing_p50_s"], counts["firing_p99_s"] = _quantile(self.firing, 0.5), _quantile(self.firing, 0.99)
        return counts


def _quantile(histogram: Mapping[int, int], share: float) -> float | None:
    whole = sum(histogram.values())
    below = 0
    for bucket, count in sorted(histogram.items()):
        if below + count >= share * whole:
            lower = LATENCIES_S[bucket - 1] if bucket else 0.0
            upper = LATENCIES_S[min(bucket, len(LATENCIES_S) - 1)]
            return lower + (upper - lower) * max(0.0, share * whole - below) / count
        below += count
    return None


COUNTS = tuple(name for name in GroupStatistics.__struct_fields__ if name not in ("delivery", "firing"))
_DERIVED = ("finished", "dead", "cache_hits", "saved_bytes")


class QueueLength(msgspec.Struct, frozen=True, array_like=True):
    """Jobs of a group at one moment: `queued` wait, delayed ones included; `running` have a lease."""

    queued: int
    running: int


class Rollup(msgspec.Struct, frozen=True):
    """Counts of one server in one minute."""

    minute: int
    """Unix time at which the minute began."""
    server_id: str
    groups: dict[str, GroupStatistics]
    queues: dict[str, QueueLength] = {}
    """Queue lengths at the end of the minute of groups that have any; from the leader alone."""


def current_minute(wall: float) -> int:
    """Return the time at which the minute of this time began."""
    return int(wall // ROLLUP_S) * ROLLUP_S


encode_rollup = msgspec.msgpack.Encoder().encode
decode_rollup = msgspec.msgpack.Decoder(Rollup).decode


def busiest(groups: Mapping[str, GroupStatistics], limit: int) -> dict[str, GroupStatistics]:
    """Return the groups that did the most, and behind them the sum of all others as one."""
    by_size = sorted(groups, key=lambda group: (group == OTHER_GROUPS, -_size(groups[group]), group))
    found = {group: groups[group] for group in by_size[:limit]}
    for group in by_size[limit:]:
        found.setdefault(OTHER_GROUPS, GroupStatistics()).add(groups[group])
    return found


def _size(counted: GroupStatistics) -> int:
    return counted.submitted + counted.leased + counted.finished + counted.published + counted.deliveries


def longest(queues: Mapping[str, QueueLength], limit: int) -> dict[str, QueueLength]:
    """Return the groups with the longest queues, and behind them the sum of all others as one."""
    by_length = sorted(queues, key=lambda group: (-queues[group].queued - queues[group].running, group))
    found = {group: queues[group] for group in by_length[:limit]}
    if others := [queues[group] for group in by_length[limit:]]:
        found[OTHER_GROUPS] = QueueLength(sum(one.queued for one in others), sum(one.running for one in others))
    return found


class Period(msgspec.Struct):
    """Counts of all servers in one step of time, and the queue lengths at its end."""

    at: int
    """Unix time at which it began."""
    groups: dict[str, GroupStatistics] = msgspec.field(default_factory=dict)
    queues: dict[str, QueueLength] = msgspec.field(default_factory=dict)
    queues_at: int = 0
    """Minute of the queue lengths."""


def periods(rollups: Iterable[Rollup], step_s: int = ROLLUP_S, *, begin: int = 0) -> list[Period]:
    """Return sums over all servers in steps of `step_s` from `begin` on; steps without rollups are not in it."""
    found: dict[int, Period] = {}
    for rollup in rollups:
        at = begin + (rollup.minute - begin) // step_s * step_s
        period = found.get(at)
        if period is None:
            period = found[at] = Period(at)
        for group, counted in rollup.groups.items():
            period.groups.setdefault(group, GroupStatistics()).add(counted)
        if rollup.queues and rollup.minute >= period.queues_at:
            period.queues, period.queues_at = rollup.queues, rollup.minute
    return [found[at] for at in sorted(found)]


def describe_periods(found: list[Period], limit: int) -> list[dict[str, Any]]:
    """Return periods for people and programs outside, with the groups that are busiest over all of them; the others are one."""
    whole: dict[str, GroupStatistics] = {}
    for period in found:
        for group, counted in period.groups.items():
            whole.setdefault(group, GroupStatistics()).add(counted)
    named = busiest(whole, limit).keys() - {OTHER_GROUPS}
    views: list[dict[str, Any]] = []
    for period in found:
        others = {group: counted for group, counted in period.groups.items() if group not in named}
        shown = {group: counted for group, counted in period.groups.items() if group in named} | busiest(others, 0)
        views.append(
            {
                "at": period.at,
                "groups": {group: counted.view() for group, counted in shown.items()},
                "queues": {group: msgspec.structs.asdict(length) for group, length in longest(period.queues, limit).items()},
            }
        )
    return views
