"""Metrics of a dispatcher, for Prometheus. Labels are bounded, and never a job or a token."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from tasuki.core.failover.nodes import NodeState, Ranked


class DispatcherMetrics:
    """Metrics of one dispatcher."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.runs = Counter("tasuki_dispatcher_runs", "POST /run, by the status of the answer.", ("status",), registry=registry)
        self.moved = Counter("tasuki_dispatcher_moved", "Jobs that continued at another node.", registry=registry)
        self.stopped = Counter("tasuki_dispatcher_stopped_duplicates", "Runs stopped: done at another node.", registry=registry)
        self.looks = Counter("tasuki_dispatcher_looks", "Questions for capacity, by how they ended.", ("end",), registry=registry)
        self.stored = Counter("tasuki_dispatcher_input_bytes", "Bytes of inputs that were stored.", registry=registry)
        self.cleaned = Counter("tasuki_dispatcher_cleaned_inputs", "Inputs removed because they were unused.", registry=registry)
        self.cleaned_bytes = Counter("tasuki_dispatcher_cleaned_input_bytes", "Bytes of those.", registry=registry)
        self.cut = Counter("tasuki_dispatcher_cut_results", "Results that broke off on their way.", registry=registry)
        self._nodes = Gauge("tasuki_dispatcher_nodes", "Agents, by standing.", ("standing",), registry=registry)
        self._places = Gauge("tasuki_dispatcher_places", "Places of the agents that are well.", ("kind",), registry=registry)

    def text(self, ranking: Sequence[Ranked], running: int, limit: int) -> bytes:
        counts = Tally(line.standing for line in ranking)
        for standing in NodeState:
            self._nodes.labels(standing.name.lower()).set(counts[standing])
        self._places.labels("running").set(running)
        self._places.labels("limit").set(limit)
        return generate_latest(self._registry)
