"""/metrics for Prometheus: jobs by group and state, what this server counted by group, the requests of this door.

Jobs by group and state are counted in the store, for all servers together; everything else is this server's own, and sums over
servers are true sums (`server.statistics`). Labels are bounded, and never a job, a worker or a token.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import accumulate

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tasuki.core.broker.broker import Broker
from tasuki.core.job import TERMINAL, State
from tasuki.core.statistics import COUNTED, LATENCIES_S, ROLLUP_GROUPS_MAX, GroupCounts, GroupStatistics, largest_groups
from tasuki.core.store_messages import Answers, Turn
from tasuki.server.server import Server

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ITEMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """The counters of this server, and the page that shows them."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self._turn_items = histogram("tasuki_turn_items", "Items of one transaction.", ("what",), buckets=ITEMS)
        self._requests = counter("tasuki_http_requests", "Requests answered.", ("method", "route", "status"))
        text = "Time to the answer, waiting included."
        self._seconds = histogram("tasuki_http_request_seconds", text, ("method", "route"), buckets=SECONDS)
        text = "Requests being answered, waiting ones included."
        self._under_way = Gauge("tasuki_http_requests_under_way", text, registry=registry)
        self._items = histogram("tasuki_http_batch_items", "Jobs in one request.", ("what",), buckets=ITEMS)
        self._leased = counter("tasuki_http_jobs_leased", "Jobs leased to workers over HTTP.", ("app",))
        self._reported = counter("tasuki_http_jobs_reported", "Reports of workers over HTTP.", ("app", "what", "answer"))

    def turn(self, turn: Turn, answers: Answers) -> None:
        """Note how many items a committed turn had."""
        for what in ("submit", "finish", "fail", "renew"):
            if count := len(getattr(turn, what)):
                self._turn_items.labels(what).observe(count)
        if count := sum(map(len, answers.lease)):
            self._turn_items.labels("lease").observe(count)

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

    def text(self, counts: Mapping[str, GroupCounts] | None, server: Server) -> bytes:
        """Return the page, with the present values of store and server; `counts` is None if the store did not tell them."""
        now = CollectorRegistry()
        now.register(_Now(counts, server.broker))
        now.register(_Counted(server.statistics.totals()))
        return generate_latest(now) + generate_latest(self._registry)


class _Now(Collector):
    """The present values of the store's counters, the workers and the server."""

    def __init__(self, counts: Mapping[str, GroupCounts] | None, broker: Broker) -> None:
        self._counts, self._broker = counts, broker

    def collect(self) -> Iterable[GaugeMetricFamily]:
        jobs = GaugeMetricFamily(
            "tasuki_jobs", "Jobs that are kept, by group and state; active: leased.", labels=("group", "state")
        )
        for group, counts in largest_groups(self._counts or {}, ROLLUP_GROUPS_MAX).items():
            for state, count in msgspec.structs.asdict(counts).items():
                jobs.add_metric((group, state), count)
        yield jobs
        workers = self._broker.describe_workers()
        yield GaugeMetricFamily("tasuki_workers", "Workers that are connected, to any server.", len(workers))
        for name, text in (("credit", "Jobs that workers would take at once."), ("running", "Jobs that workers have.")):
            yield GaugeMetricFamily(f"tasuki_workers_{name}", text, sum(int(str(worker[name])) for worker in workers))
        detached = sum(bool(worker["detached"]) for worker in workers)
        yield GaugeMetricFamily("tasuki_workers_detached", "Workers that are connected and get no more jobs.", detached)
        servers = GaugeMetricFamily("tasuki_servers", "Live servers, or nodes of a Django project, by role.", labels=("role",))
        infos = (self._broker.info, *self._broker.cluster.servers.values())
        roles = Tally("leader" if info.epoch else "subleader" if info.sub_leads else "worker" for info in infos)
        for role in ("leader", "subleader", "worker"):
            servers.add_metric((role,), roles[role])
        yield servers
        yield GaugeMetricFamily("tasuki_leader", "1 at the server that is the leader.", bool(self._broker.epoch))
        problem = self._broker.store_problem or self._broker.disk_problem
        is_up = self._counts is not None and not problem
        yield GaugeMetricFamily("tasuki_up", "1 if the store took the last turn and there is room for jobs.", is_up)


_COUNTERS = (
    ("tasuki_jobs_submitted", "Jobs stored.", {"submitted": ()}),
    ("tasuki_jobs_leased", "Attempts given to workers.", {"leased": ()}),
    ("tasuki_jobs_redelivered", "Attempts given to workers that are not the first of their job.", {"redelivered": ()}),
    (
        "tasuki_jobs_ended",
        "Jobs that ended, by their final state.",
        {COUNTED[state]: (COUNTED[state],) for state in State if state in TERMINAL},
    ),
    (
        "tasuki_jobs_retried",
        "Attempts that are followed by another one.",
        {"retried_failed": ("failed",), "retried_lost": ("lost",)},
    ),
    ("tasuki_attempts_failed", "Attempts that their workers reported as failed.", {"attempts_failed": ()}),
    ("tasuki_attempts_lost", "Attempts whose lease ran out.", {"attempts_lost": ()}),
    ("tasuki_dead_letters", "Jobs that failed for good.", {"dead": ()}),
    ("tasuki_jobs_requeued", "Jobs that were set going again after their end.", {"requeued": ()}),
    ("tasuki_reports_fenced", "Reports that were refused: not the current lease.", {"fenced": ()}),
    ("tasuki_cache_inputs", "Inputs of attempts that are files of a cache.", {"cache_inputs": ()}),
    ("tasuki_cache_input_bytes", "Bytes of these inputs.", {"cache_input_bytes": ()}),
    ("tasuki_cache_fetches", "Inputs of these that a worker had to fetch.", {"cache_fetches": ()}),
    ("tasuki_cache_fetched_bytes", "Bytes that were fetched.", {"cache_fetched_bytes": ()}),
    ("tasuki_messages_published", "Messages published.", {"published": ()}),
    ("tasuki_message_deliveries", "Messages for subscribers, each as often as there were.", {"deliveries": ()}),
    ("tasuki_messages_dropped", "Messages that a slow subscriber did not get.", {"dropped": ()}),
    ("tasuki_messages_unrelayed", "Messages that could not be passed on to the other servers.", {"unrelayed": ()}),
)
"""Names and texts of the counters by group, and the fields of GroupStatistics that they have, with the value of another label."""
_FURTHER_LABELS = {"tasuki_jobs_ended": ("state",), "tasuki_jobs_retried": ("why",)}


class _Counted(Collector):
    """The counts of this server by group."""

    def __init__(self, totals: Mapping[str, GroupStatistics]) -> None:
        self._totals = totals

    def collect(self) -> Iterable[Metric]:
        for name, text, fields in _COUNTERS:
            family = CounterMetricFamily(name, text, labels=("group", *_FURTHER_LABELS.get(name, ())))
            for group, counted in self._totals.items():
                for field, further in fields.items():
                    if count := getattr(counted, field):
                        family.add_metric((group, *further), count)
            yield family
        text = "From the commit of a submit to that of its first lease."
        yield self._histogram("tasuki_delivery_latency_seconds", text, "delivery")
        text = "From the nominal time of a scheduled run to the commit of its first lease; 0: it was leased ahead."
        yield self._histogram("tasuki_firing_lag_seconds", text, "firing")

    def _histogram(self, name: str, text: str, field: str) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, text, labels=("group",))
        ends = (*map(str, LATENCIES_S), "+Inf")
        for group, counted in self._totals.items():
            if found := getattr(counted, field):
                counts = accumulate(found.get(place, 0) for place in range(len(ends)))
                family.add_metric((group,), list(zip(ends, counts, strict=True)), getattr(counted, f"{field}_s"))
        return family
