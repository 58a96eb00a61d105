"""Counts of one server by group, from its committed turns and its messages, in memory; `core.statistics` explains the numbers.

A turn is looked at after its commit, so a job is counted once, by the server whose turn it was. The store's answers name the
group of a job. When it was stored, and which cached files it needs, is remembered from the turn that stored or leased it here,
for a bounded number of jobs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tasuki.core.job import TERMINAL, InputFile, State, nominal_time
from tasuki.core.machine import Now
from tasuki.core.protocol import PublishedMessage
from tasuki.core.statistics import (
    COUNTED,
    LATENCIES_S,
    OTHER_GROUPS,
    ROLLUP_GROUPS_MAX,
    UNKNOWN_GROUP,
    GroupCounts,
    GroupStatistics,
    QueueLength,
    Rollup,
    busiest,
    decode_rollup,
    encode_rollup,
    longest,
)
from tasuki.core.store_messages import Answers, Grant, Report, ReportAnswer, ReportStatus, Submitted, Turn
from tasuki.core.subject import DEFAULT_SUBJECT, group_of

REMEMBERED_MAX = 50_000  # jobs
GROUPS_MAX = 10_000  # of one minute; further ones are counted as one
STORED_ELSEWHERE = ("django", "definition:", "app:")
"""Beginnings of the submitters whose jobs no server stores by a turn's submit: they are counted when they are first leased."""


class _SpecFacts(msgspec.Struct):
    """The fields of a spec that are decoded."""

    subject: str = DEFAULT_SUBJECT
    files: tuple[InputFile, ...] = ()


_decode_facts = msgspec.msgpack.Decoder(_SpecFacts).decode


class _OpenJob(msgspec.Struct, gc=False):
    """A job that has not ended."""

    group: str
    stored_at: float | None = None
    """None: leased before, or not to start at once."""
    cached: dict[str, int] | None = None
    """Sizes of its inputs that are files of a cache, by sha256."""


def _cached(files: Iterable[InputFile]) -> dict[str, int] | None:
    return {file.sha256: file.size_bytes or 0 for file in files if file.cached_as is not None and file.sha256} or None


class Statistics:
    """Counts since the last rollup, and totals of everything before it."""

    def __init__(self) -> None:
        self._counted: dict[str, GroupStatistics] = {}
        self._totals: dict[str, GroupStatistics] = {}
        # Ordered: to find the first key of a dict whose front was deleted is a walk over the holes.
        self._known: OrderedDict[str, _OpenJob] = OrderedDict()

    # ------------------------------------------------------------------------------------------------ what is counted

    def turn(self, turn: Turn, answers: Answers, now: Now) -> None:
        """Count one committed turn."""
        if answers.finish:
            self._reports(turn.finish, answers.finish, are_failures=False)
        if answers.fail:
            self._reports(turn.fail, answers.fail, are_failures=True)
        if answers.submit or answers.rerun:
            self._stored(turn, answers, now.monotonic)
        for grants in answers.lease:
            self._grants(grants, now)
        if answers.cancel or answers.requeue or turn.epoch:
            self._count_others(turn, answers)

    def published(self, counts: Mapping[str, int]) -> None:
        """Count messages that clients published here, by group."""
        for group, count in counts.items():
            self._of(group).published += count

    def deliveries(self, items: Sequence[PublishedMessage], receivers: int) -> None:
        """Count messages that are to be given to so many subscribers each."""
        for item in items:
            self._of(group_of(item.subject)).deliveries += receivers

    def dropped(self, items: Sequence[PublishedMessage]) -> None:
        """Count messages that a subscriber did not get."""
        for item in items:
            self._of(group_of(item.subject)).dropped += 1

    def unrelayed(self, counts: Mapping[str, int]) -> None:
        """Count messages that could not be passed on to the other servers, by group."""
        for group, count in counts.items():
            self._of(group).unrelayed += count

    def fetched(self, job_id: str, sha256: str) -> None:
        """Count an input that a worker asks for, if it is a file of a cache."""
        known = self._known.get(job_id)
        if known is not None and known.cached is not None and sha256 in known.cached:
            counted = self._of(known.group)
            counted.cache_fetches += 1
            counted.cache_fetched_bytes += known.cached[sha256]

    # ------------------------------------------------------------------------------------------------ what was counted

    def totals(self) -> dict[str, GroupStatistics]:
        """Return the counts since the start, by group: the first groups that came, and all others as one."""
        found: dict[str, GroupStatistics] = {}
        for counts in (self._totals, self._counted):
            for group, counted in counts.items():
                _add_named(found, group, counted)
        return found

    def rollup(self, minute: int, server_id: str, counts: Mapping[str, GroupCounts]) -> Rollup | None:
        """Return what was counted since the last rollup, with these queue lengths, and begin anew. None: nothing."""
        counted, self._counted = self._counted, {}
        for group, one in counted.items():
            _add_named(self._totals, group, one)
        queues = {
            group: QueueLength(one.pending + one.orphaned, one.active)
            for group, one in counts.items()
            if one.pending or one.active or one.orphaned
        }
        if not counted and not queues:
            return None
        return Rollup(minute, server_id, busiest(counted, ROLLUP_GROUPS_MAX), longest(queues, ROLLUP_GROUPS_MAX))

    def since_rollup(self, minute: int, server_id: str) -> Rollup:
        """Return a copy of what was counted since the last rollup."""
        return decode_rollup(encode_rollup(Rollup(minute, server_id, busiest(self._counted, ROLLUP_GROUPS_MAX))))

    # ------------------------------------------------------------------------------------------------ parts of a turn

    def _stored(self, turn: Turn, answers: Answers, now: float) -> None:
        known = self._known
        for submissions, stored in ((turn.submit, answers.submit), (turn.rerun, answers.rerun)):
            for submission, answer in zip(submissions, stored, strict=True):
                if type(answer) is Submitted and answer.created:
                    spec = submission.spec
                    group = group_of(spec.subject)
                    self._of(group).submitted += 1
                    cached = _cached(spec.files) if spec.files else None
                    known[spec.job_id] = _OpenJob(group, now if spec.not_before is None else None, cached)
        self._forget_oldest()

    def _grants(self, grants: Sequence[Grant], now: Now) -> None:
        for grant in grants:
            known = self._known.get(grant.job_id)
            if known is None:
                facts = _decode_facts(grant.spec)
                known = self._known[grant.job_id] = _OpenJob(group_of(facts.subject), None, _cached(facts.files))
                counted = self._of(known.group)
                counted.submitted += grant.attempt == 1 and grant.submitter.startswith(STORED_ELSEWHERE)
                self._forget_oldest()
            else:
                counted = self._of(known.group)
            if known.stored_at is not None:
                latency_s = now.monotonic - known.stored_at
                counted.delivery_s += latency_s
                _observe(counted.delivery, latency_s)
                known.stored_at = None
            counted.leased += 1
            if grant.attempt > 1:
                counted.redelivered += 1
            elif (nominal := nominal_time(grant.job_id)) is not None:
                lag_s = max(0.0, now.wall - nominal)
                counted.firing_s += lag_s
                _observe(counted.firing, lag_s)
            if known.cached is not None:
                counted.cache_inputs += len(known.cached)
                counted.cache_input_bytes += sum(known.cached.values())

    def _reports(self, reports: Sequence[Report], answers: Sequence[ReportAnswer], *, are_failures: bool) -> None:
        for report, answer in zip(reports, answers, strict=True):
            if answer.answer is ReportStatus.RECORDED:
                counted = self._ended(report.job_id, answer.state, answer.group)
                if are_failures:
                    counted.attempts_failed += 1
                    counted.retried_failed += answer.state not in TERMINAL
            elif answer.answer is ReportStatus.FENCED:
                self._of(answer.group or UNKNOWN_GROUP).fenced += 1

    def _count_others(self, turn: Turn, answers: Answers) -> None:
        """Count what the leader and operators did."""
        for reaped in answers.reap:
            counted = self._ended(reaped.job_id, reaped.state, reaped.group)
            counted.attempts_lost += 1
            counted.retried_lost += reaped.state not in TERMINAL
        for job_id, group in answers.skip:
            self._ended(job_id, State.SKIPPED, group)
        for run in answers.fire.runs:
            if run.state in TERMINAL:
                self._ended(run.job_id, run.state, run.group)
        canceled_now = zip((job_id for job_id, _, _ in turn.cancel), answers.cancel, strict=True)
        for job_id, canceled in (*canceled_now, *answers.fire.replaced):
            if canceled.group:
                self._ended(job_id, State.CANCELED, canceled.group)
        for requeued in answers.requeue:
            if requeued.done:
                self._of(requeued.group).requeued += 1

    def _ended(self, job_id: str, state: State | None, group: str) -> GroupStatistics:
        """Count the end of a job, if this state is one; return the counts of its group."""
        counted = self._of(group)
        if state in TERMINAL:
            self._known.pop(job_id, None)
            if state is State.SUCCEEDED:
                counted.succeeded += 1
            else:
                name = COUNTED[state]
                setattr(counted, name, getattr(counted, name) + 1)
        return counted

    # ------------------------------------------------------------------------------------------------ groups

    def _of(self, group: str) -> GroupStatistics:
        counted = self._counted.get(group)
        if counted is None:
            if len(self._counted) >= GROUPS_MAX:
                group = OTHER_GROUPS
            counted = self._counted.setdefault(group, GroupStatistics())
        return counted

    def _forget_oldest(self) -> None:
        while len(self._known) > REMEMBERED_MAX:
            self._known.popitem(last=False)


def _observe(histogram: dict[int, int], latency_s: float) -> None:
    bucket = bisect_left(LATENCIES_S, latency_s)
    histogram[bucket] = histogram.get(bucket, 0) + 1


def _add_named(totals: dict[str, GroupStatistics], group: str, counted: GroupStatistics) -> None:
    """Add counts under the name of the group, if it is one of the first: a label for each would let any submitter fill the
    monitoring."""
    if group not in totals and len(totals) >= ROLLUP_GROUPS_MAX:
        group = OTHER_GROUPS
    totals.setdefault(group, GroupStatistics()).add(counted)
