"""/metrics for Prometheus: how many jobs stand where, what this server's turns did (`job_metrics.py`), what this door does.

Where jobs stand is counted in the store, for all servers together; everything else is this server's own. Labels are bounded, and
never a job, a worker or a token.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.responses import Response

from tasuki.core.broker.broker import Broker
from tasuki.core.store_messages import Answers, GroupCounts, Turn
from tasuki.doors.http.context import RequestContext
from tasuki.doors.http.job_metrics import GROUPS_MAX, ITEMS, OTHER_GROUPS, SECONDS, JobMetrics


class Metrics:
    """What the door counts, and how it is shown."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._jobs = JobMetrics(registry)
        self._requests = Counter("tasuki_http_requests", "Requests answered.", ("method", "route", "status"), registry=registry)
        self._seconds = Histogram(
            "tasuki_http_request_seconds",
            "Time to the answer, waiting included.",
            ("method", "route"),
            buckets=SECONDS,
            registry=registry,
        )
        self._under_way = Gauge(
            "tasuki_http_requests_under_way", "Requests being answered, those that wait included.", registry=registry
        )
        self._items = Histogram("tasuki_http_batch_items", "Jobs in one request.", ("what",), buckets=ITEMS, registry=registry)
        self._leased = Counter("tasuki_http_jobs_leased", "Jobs handed out to workers over HTTP.", ("app",), registry=registry)
        self._reported = Counter(
            "tasuki_http_jobs_reported", "Reports of workers over HTTP.", ("app", "what", "answer"), registry=registry
        )

    def turn(self, turn: Turn, answers: Answers) -> None:
        """The server's store has committed one."""
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
        """`what` is result or failed."""
        self._items.labels(what).observe(recorded + fenced)
        self._reported.labels(app, what, "recorded").inc(recorded)
        self._reported.labels(app, what, "fenced").inc(fenced)

    def text(self, counts: Mapping[str, GroupCounts], broker: Broker) -> bytes:
        """Everything, with what the store and the server say at this moment."""
        now = CollectorRegistry()
        now.register(_Now(counts, broker))
        return generate_latest(now) + generate_latest(self._registry)


class _Now(Collector):
    """One look at the store's counters, the workers, and the server."""

    def __init__(self, counts: Mapping[str, GroupCounts], broker: Broker) -> None:
        self._counts, self._broker = counts, broker

    def collect(self) -> Iterable[GaugeMetricFamily]:
        jobs = GaugeMetricFamily(
            "tasuki_jobs", "Jobs that are kept, by group and state; active: they are leased.", labels=("group", "state")
        )
        for (group, state), count in bounded(self._counts).items():
            jobs.add_metric((group, state), count)
        yield jobs
        workers = self._broker.describe_workers()
        yield GaugeMetricFamily("tasuki_workers", "Workers that are connected, to whichever server.", len(workers))
        for name, text in (("credit", "Jobs that they would take at once."), ("running", "Jobs that they have.")):
            yield GaugeMetricFamily(f"tasuki_workers_{name}", text, sum(int(str(worker[name])) for worker in workers))
        yield GaugeMetricFamily(
            "tasuki_leader", "1 at the server that does the leader's duties.", bool(self._broker.duties.epoch)
        )
        problem = self._broker.store_problem or self._broker.disk_problem
        yield GaugeMetricFamily("tasuki_up", "1 if the store took the last turn and there is room for jobs.", not problem)


def bounded(counts: Mapping[str, GroupCounts]) -> dict[tuple[str, str], int]:
    """(group, state) → how many; the smaller groups of too many are one."""
    by_size = sorted(counts, key=lambda group: (-sum(_values(counts[group])), group))
    named = set(by_size[:GROUPS_MAX])
    found: dict[tuple[str, str], int] = {}
    for group in by_size:
        shown = group if group in named else OTHER_GROUPS
        for state, count in zip(GroupCounts.__struct_fields__, _values(counts[group]), strict=True):
            found[shown, state] = found.get((shown, state), 0) + count
    return found


def _values(counts: GroupCounts) -> list[int]:
    return [getattr(counts, name) for name in GroupCounts.__struct_fields__]


async def scrape(call: RequestContext) -> Response:
    """For Prometheus, with an administrator's token."""
    counts = await call.house.server.ask(lambda reader: reader.counts())
    text = call.house.metrics.text(counts, call.house.server.broker)
    return Response(text, 200, media_type=CONTENT_TYPE_LATEST)
