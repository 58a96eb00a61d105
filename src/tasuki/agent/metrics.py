"""What an agent counts, for Prometheus. Labels are bounded, and never a job or a token."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1200, 3600)


class AgentMetrics:
    """One agent's."""

    def __init__(self, limit: int) -> None:
        self._registry = registry = CollectorRegistry()
        self.ended = Counter(
            "tasuki_agent_jobs",
            "Jobs that ended: succeeded, failed, timed_out, interrupted, canceled or not_run.",
            ("outcome",),
            registry=registry,
        )
        self.seconds = Histogram(
            "tasuki_agent_job_seconds", "How long programs ran.", ("outcome",), buckets=SECONDS, registry=registry
        )
        self.running = Gauge("tasuki_agent_running", "Slots that are taken, uploads included.", registry=registry)
        Gauge("tasuki_agent_slots", "Jobs that may run at once.", registry=registry).set(limit)
        self.stored = Counter("tasuki_agent_cache_hits", "Requests answered with a stored result.", registry=registry)
        self.refused = Counter("tasuki_agent_refused", "Requests refused, by code.", ("code",), registry=registry)
        self.received = Counter("tasuki_agent_received_bytes", "Bytes of uploads.", registry=registry)
        self.sent = Counter("tasuki_agent_sent_bytes", "Bytes of results.", registry=registry)
        self.cleaned = Counter("tasuki_agent_cleaned_jobs", "Jobs removed because of their age.", registry=registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)
