"""/metrics for Prometheus: the store's counters by group, who is connected here, and what this door does.

Jobs are counted in the store, for all servers together; everything else is this server's own. Groups are bounded: a name for each
would let whoever may submit fill the monitoring.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.responses import Response

from tasuki.core.verbs import GroupCounts
from tasuki.doors.http.call import Call

GROUPS_MAX = 100  # with a label of their own, those with most jobs; the others are added up
OTHER_GROUPS = "(other)"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """What the door counts, and how it is shown."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("tasuki_http_requests", "Requests answered.", ("method", "route", "status"), registry=registry)
        self._seconds = Histogram(
            "tasuki_http_request_seconds",
            "Time to the answer, waiting included.",
            ("method", "route"),
            buckets=_SECONDS,
            registry=registry,
        )
        self._under_way = Gauge(
            "tasuki_http_requests_under_way", "Requests being answered, those that wait included.", registry=registry
        )
        self._items = Histogram("tasuki_http_batch_items", "Jobs in one request.", ("what",), buckets=_ITEMS, registry=registry)
        self._leased = Counter("tasuki_http_jobs_leased", "Jobs handed out to workers over HTTP.", ("app",), registry=registry)
        self._reported = Counter(
            "tasuki_http_jobs_reported", "Reports of workers over HTTP.", ("app", "what", "answer"), registry=registry
        )

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

    def text(self, counts: Mapping[str, GroupCounts], workers: Iterable[dict[str, object]]) -> bytes:
        """Everything, with what the store and the server say at this moment."""
        now = CollectorRegistry()
        now.register(_Now(counts, list(workers)))
        return generate_latest(now) + generate_latest(self._registry)


class _Now(Collector):
    """One look at the store's counters and at the workers."""

    def __init__(self, counts: Mapping[str, GroupCounts], workers: list[dict[str, object]]) -> None:
        self._counts, self._workers = counts, workers

    def collect(self) -> Iterable[GaugeMetricFamily]:
        jobs = GaugeMetricFamily(
            "tasuki_jobs", "Jobs that are kept, by group and state; active: they are leased.", labels=("group", "state")
        )
        for (group, state), count in bounded(self._counts).items():
            jobs.add_metric((group, state), count)
        yield jobs
        yield GaugeMetricFamily("tasuki_workers", "Workers that are connected, to whichever server.", len(self._workers))
        for name, text in (("credit", "Jobs that they would take at once."), ("running", "Jobs that they have.")):
            total = sum(int(str(worker[name])) for worker in self._workers)
            yield GaugeMetricFamily(f"tasuki_workers_{name}", text, total)


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


async def scrape(call: Call) -> Response:
    """For Prometheus, with an administrator's token."""
    counts = await call.house.server.ask(lambda reader: reader.counts())
    text = call.house.metrics.text(counts, call.house.server.broker.describe_workers())
    return Response(text, 200, media_type=CONTENT_TYPE_LATEST)
