"""/metrics for Prometheus: jobs by group and state, the effects of this server's turns, the requests of this door.

Jobs by group and state are counted in the store, for all servers together; everything else is this server's own. Labels are
bounded, and never a job, a worker or a token. A turn is looked at after its commit, so a job is counted once, by the server whose
turn it was, and sums over servers are true sums. Facts that a report lacks (the job's group, when it was submitted) are
remembered from the turn that stored or leased the job here, for a bounded number of jobs. No decision depends on any of this.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tasuki.core.broker.broker import Broker
from tasuki.core.job import TERMINAL, State
from tasuki.core.store_messages import (
    COUNTED,
    OTHER_GROUPS,
    Answers,
    Grant,
    GroupCounts,
    Report,
    ReportAnswer,
    ReportStatus,
    Submitted,
    Turn,
    largest_groups,
)
from tasuki.core.subject import DEFAULT_SUBJECT, group_of

GROUPS_MAX = 100  # with a label of their own; a label for each would let any submitter fill the monitoring
UNKNOWN_GROUP = "(unknown)"  # of a job that another server leased
REMEMBERED_MAX = 50_000
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LONG_SECONDS = (*SECONDS, 300.0, 1800.0, 7200.0)
ITEMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
DEAD = (State.FAILED, State.TIMED_OUT)


class _Subject(msgspec.Struct):
    """The one field of a spec that is decoded."""

    subject: str = DEFAULT_SUBJECT


_decode_subject = msgspec.msgpack.Decoder(_Subject).decode


class _OpenJob(msgspec.Struct):
    """A job that has not ended."""

    group: str
    stored_at: float | None = None
    """None: leased before, or not to start at once."""


class JobMetrics:
    """Counts what committed turns did to jobs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, labelnames=("group",), registry=registry)
        self._submitted = counter("tasuki_jobs_submitted", "Jobs stored.")
        self._leased = counter("tasuki_jobs_leased", "Attempts given to workers.")
        self._ended = counter("tasuki_jobs_ended", "Jobs that ended, by their final state.", labelnames=("group", "state"))
        self._retried = counter("tasuki_jobs_retried", "Attempts that are followed by another one.", labelnames=("group", "why"))
        self._failed = counter("tasuki_attempts_failed", "Attempts that their workers reported as failed.")
        self._lost = counter("tasuki_attempts_lost", "Attempts whose lease ran out.")
        self._dead = counter("tasuki_dead_letters", "Jobs that failed for good.")
        self._requeued = counter("tasuki_jobs_requeued", "Jobs that were set going again after their end.")
        self._fenced = counter("tasuki_reports_fenced", "Reports that were refused: not the current lease.")
        text = "From the commit of a submit to that of its first lease."
        histogram = partial(Histogram, registry=registry)
        self._delivery = histogram("tasuki_delivery_latency_seconds", text, ("group",), buckets=LONG_SECONDS)
        self._items = histogram("tasuki_turn_items", "Items of one transaction.", ("what",), buckets=ITEMS)
        # Ordered: to find the first key of a dict whose front was deleted is a walk over the holes.
        self._known: OrderedDict[str, _OpenJob] = OrderedDict()
        self._named: set[str] = set()

    def turn(self, turn: Turn, answers: Answers, now: float) -> None:
        """Count one committed turn; `now` is monotonic."""
        self._reports("finish", turn.finish, answers.finish)
        self._reports("fail", turn.fail, answers.fail)
        self._count_others(turn, answers)
        self._stored(turn, answers, now)
        self._grants([grant for grants in answers.lease for grant in grants], now)
        for what in ("submit", "finish", "fail", "renew"):
            if count := len(getattr(turn, what)):
                self._items.labels(what).observe(count)

    # ------------------------------------------------------------------------------------------------ parts of a turn

    def _stored(self, turn: Turn, answers: Answers, now: float) -> None:
        tally: Tally[str] = Tally()
        for submission, answer in zip([*turn.submit, *turn.rerun], [*answers.submit, *answers.rerun], strict=True):
            if isinstance(answer, Submitted) and answer.created:
                spec = submission.spec
                group = self._label(group_of(spec.subject))
                tally[group] += 1
                self._remember(spec.job_id, _OpenJob(group, now if spec.not_before is None else None))
        _add(self._submitted, tally)

    def _grants(self, grants: Sequence[Grant], now: float) -> None:
        if not grants:
            return
        tally: Tally[str] = Tally()
        for grant in grants:
            known = self._known.get(grant.job_id)
            if known is None:
                known = _OpenJob(self._label(group_of(_decode_subject(grant.spec).subject)))
                self._remember(grant.job_id, known)
            elif known.stored_at is not None:
                self._delivery.labels(known.group).observe(max(0.0, now - known.stored_at))
                known.stored_at = None
            tally[known.group] += 1
        _add(self._leased, tally)
        self._items.labels("lease").observe(len(grants))

    def _reports(self, verb: str, reports: Sequence[Report], answers: Sequence[ReportAnswer]) -> None:
        fenced: Tally[str] = Tally()
        failed: Tally[str] = Tally()
        for report, answer in zip(reports, answers, strict=True):
            group = self._group_of(report.job_id)
            if answer.answer is ReportStatus.FENCED:
                fenced[group] += 1
            elif answer.answer is ReportStatus.RECORDED:
                failed[group] += verb == "fail"
                self._attempt_ended(report.job_id, answer.state, "failed")
        _add(self._fenced, fenced)
        _add(self._failed, failed)

    def _count_others(self, turn: Turn, answers: Answers) -> None:
        """Count what the leader and operators did."""
        for reaped in answers.reap:
            self._lost.labels(self._group_of(reaped.job_id)).inc()
            self._attempt_ended(reaped.job_id, reaped.state, "lost")
        for job_id in answers.skip:
            self._attempt_ended(job_id, State.SKIPPED, "")
        for (job_id, _, _), canceled in zip(turn.cancel, answers.cancel, strict=True):
            # A repeated cancel is answered alike: only the first one ends the job.
            if canceled.state is State.CANCELED and not canceled.requested and job_id in self._known:
                self._attempt_ended(job_id, State.CANCELED, "")
        for order, requeued in zip(turn.requeue, answers.requeue, strict=True):
            if requeued.done:
                self._requeued.labels(self._group_of(order.job_id)).inc()

    def _attempt_ended(self, job_id: str, state: State | None, why: str) -> None:
        group = self._group_of(job_id)
        if state in TERMINAL:
            assert state is not None
            self._known.pop(job_id, None)
            self._ended.labels(group, COUNTED[state]).inc()
            if state in DEAD:
                self._dead.labels(group).inc()
        elif state is not None:
            self._retried.labels(group, why).inc()

    # ------------------------------------------------------------------------------------------------ groups

    def _remember(self, job_id: str, known: _OpenJob) -> None:
        """Remember a job; beyond the limit the oldest one is forgotten."""
        if len(self._known) >= REMEMBERED_MAX:
            self._known.popitem(last=False)
        self._known[job_id] = known

    def _group_of(self, job_id: str) -> str:
        known = self._known.get(job_id)
        return known.group if known is not None else UNKNOWN_GROUP

    def _label(self, group: str) -> str:
        """Return the label of a group: its name, for the first groups that come."""
        if group in self._named:
            return group
        if len(self._named) >= GROUPS_MAX:
            return OTHER_GROUPS
        self._named.add(group)
        return group


def _add(counter: Counter, tally: Tally[str]) -> None:
    for group, count in tally.items():
        if count:
            counter.labels(group).inc(count)


class Metrics:
    """The counters of this server, and the page that shows them."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._jobs = JobMetrics(registry)
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self._requests = counter("tasuki_http_requests", "Requests answered.", ("method", "route", "status"))
        text = "Time to the answer, waiting included."
        self._seconds = histogram("tasuki_http_request_seconds", text, ("method", "route"), buckets=SECONDS)
        text = "Requests being answered, waiting ones included."
        self._under_way = Gauge("tasuki_http_requests_under_way", text, registry=registry)
        self._items = histogram("tasuki_http_batch_items", "Jobs in one request.", ("what",), buckets=ITEMS)
        self._leased = counter("tasuki_http_jobs_leased", "Jobs leased to workers over HTTP.", ("app",))
        self._reported = counter("tasuki_http_jobs_reported", "Reports of workers over HTTP.", ("app", "what", "answer"))

    def turn(self, turn: Turn, answers: Answers) -> None:
        self._jobs.turn(turn, answers, time.monotonic())

    def began(self) -> None:
        self._under_way.inc()

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        self._under_way.dec()
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    def submitted(self, count: int) -> None:
        self._items.labels("submit").observe(count)

    def leased(self, app: str, count: int) -> None:
        if count:
            self._items.labels("lease").observe(count)
            self._leased.labels(app).inc(count)

    def reported(self, app: str, what: str, *, recorded: int, fenced: int) -> None:
        """Count reports; `what` is result or failed."""
        self._items.labels(what).observe(recorded + fenced)
        self._reported.labels(app, what, "recorded").inc(recorded)
        self._reported.labels(app, what, "fenced").inc(fenced)

    def text(self, counts: Mapping[str, GroupCounts] | None, broker: Broker) -> bytes:
        """Return the page, with the present values of store and server; `counts` is None if the store did not tell them."""
        now = CollectorRegistry()
        now.register(_Now(counts, broker))
        return generate_latest(now) + generate_latest(self._registry)


class _Now(Collector):
    """The present values of the store's counters, the workers and the server."""

    def __init__(self, counts: Mapping[str, GroupCounts] | None, broker: Broker) -> None:
        self._counts, self._broker = counts, broker

    def collect(self) -> Iterable[GaugeMetricFamily]:
        jobs = GaugeMetricFamily(
            "tasuki_jobs", "Jobs that are kept, by group and state; active: leased.", labels=("group", "state")
        )
        for group, counts in largest_groups(self._counts or {}, GROUPS_MAX).items():
            for state, count in msgspec.structs.asdict(counts).items():
                jobs.add_metric((group, state), count)
        yield jobs
        workers = self._broker.describe_workers()
        yield GaugeMetricFamily("tasuki_workers", "Workers that are connected, to any server.", len(workers))
        for name, text in (("credit", "Jobs that workers would take at once."), ("running", "Jobs that workers have.")):
            yield GaugeMetricFamily(f"tasuki_workers_{name}", text, sum(int(str(worker[name])) for worker in workers))
        yield GaugeMetricFamily("tasuki_leader", "1 at the server that is the leader.", bool(self._broker.epoch))
        problem = self._broker.store_problem or self._broker.disk_problem
        is_up = self._counts is not None and not problem
        yield GaugeMetricFamily("tasuki_up", "1 if the store took the last turn and there is room for jobs.", is_up)
