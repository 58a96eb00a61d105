"""What a check of a history came to, and what its judges know in common: each job, each lease, who had a wrong clock.

The judges (checker_*.py) share these facts: those of the store's commits keep them, the others read them. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from tasuki.testing.sim.history import HistoryLine, ReapedEvent, ReportedEvent, RowEvent

INVARIANTS = (*(f"I{n}" for n in range(1, 18)), "lease", "credit", "liveness")
"""Those of RELIABILITY §1; `lease`: no lease is ended before its time (§3); `credit`: no worker has more than it asked for."""

STORE = "store"
"""The name under which a history tells that the store's own clock was wrong."""

Handler = Callable[[Any], None]


class Violation(msgspec.Struct, frozen=True):
    """One broken invariant: when, in which line (from 0), and how."""

    invariant: str
    message: str
    at: float = 0.0
    line: int = 0

    def __str__(self) -> str:
        return f"{self.invariant}: {self.message} (line {self.line}, at {self.at:g})"


class Broken(AssertionError):
    """Raised for the first violation, where that was asked for."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(str(violation))
        self.violation = violation


class GrantedLease:
    """The right to one attempt, as it was given."""

    __slots__ = ("attempt", "incarnation", "job_id", "keep", "lease_id", "since", "ttl_s", "worker_id")

    def __init__(self, lease_id: str, job_id: str, attempt: int, worker_id: str, incarnation: str) -> None:
        self.lease_id = lease_id
        self.job_id = job_id
        self.attempt = attempt
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.keep = False
        self.ttl_s: float | None = None
        self.since = 0.0
        """When it was given, or last renewed."""

    def __str__(self) -> str:
        return f"lease {self.lease_id} (attempt {self.attempt}, {self.worker_id})"


class JobFacts:
    """What is known of one job. None: not known."""

    __slots__ = (
        "acked",
        "asked",
        "asked_restarts",
        "attempt",
        "began",
        "body",
        "counted",
        "endings",
        "ends",
        "existed",
        "exists",
        "failures",
        "generation",
        "job_id",
        "lease",
        "lease_known",
        "losses",
        "orphaned",
        "removed",
        "reports",
        "restarts",
        "results",
        "row",
        "state",
    )

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.endings: set[tuple[str, int]] = set()
        """(state, attempt) in which it ever ended."""
        self.results: dict[int, set[str | None]] = {}
        """attempt → sha256 of its accepted finish; empty: not told."""
        self.removed = False
        """Once, at least."""
        self.existed = False
        self.acked = False
        """A client was told that it is stored."""
        self.asked = False
        """Somebody wanted it: a client, or a schedule."""
        self.asked_restarts = 0
        self.restarts = 0
        self.forget()

    def forget(self) -> None:
        """The job is not there, or nothing is known of it: all of one life. What clients were told of earlier ones stays."""
        self.exists = False
        self.body: str | None = None
        self.attempt: int | None = None
        self.generation: int | None = None
        self.state: str | None = None
        self.lease: GrantedLease | None = None
        self.lease_known = False
        """`lease` is the current one, or there is none."""
        self.orphaned = False
        """The lease is over, and yet counts until another is given."""
        self.reports: dict[int, str] = {}
        """attempt → the verb of its accepted report."""
        self.ends: dict[int, str] = {}
        """attempt → how it ended."""
        self.began: set[int] = set()
        self.counted = False
        """Failures and losses of this generation are known from its first moment."""
        self.failures = self.losses = 0
        self.row: RowEvent | None = None

    def has_result(self, attempt: int, sha256: str | None) -> bool:
        """Whether this may be the result of that attempt."""
        results = self.results.get(attempt, ())
        return sha256 in results or "" in results

    def let_go(self, attempt: int, how: str) -> None:
        """No lease is current any more."""
        self.ends[attempt] = how
        self.lease, self.lease_known, self.orphaned = None, True, False


class Findings:
    """Violations, evidence, and the facts that judges share."""

    def __init__(self, *, raises: bool) -> None:
        self.violations: list[Violation] = []
        self.evidence: Counter[str] = Counter()
        self.raises = raises
        self.told: set[type[HistoryLine]] = set()
        """The kinds of which no line is missing."""
        self.watched: frozenset[type[HistoryLine]] = frozenset()
        """Those of which this was so from the start."""
        self.at = 0.0
        self.line = -1
        self.healed_at: float | None = None
        self.ended = False
        self.jobs: dict[str, JobFacts] = {}
        self.leases: dict[str, GrantedLease] = {}
        self.drifted: set[str] = set()
        self.takeovers: list[float] = []
        """When, in their order."""
        self.registered = 0
        """The highest epoch that a server took over."""

    def found(self, invariant: str, message: str) -> None:
        violation = Violation(invariant, message, self.at, self.line)
        self.violations.append(violation)
        if self.raises:
            raise Broken(violation)

    def job(self, job_id: str) -> JobFacts:
        facts = self.jobs.get(job_id)
        if facts is None:
            facts = self.jobs[job_id] = JobFacts(job_id)
            facts.counted = self.watched.issuperset((ReportedEvent, ReapedEvent))
        return facts

    @property
    def is_over(self) -> bool:
        """Faults had stopped, and the system had its time to end everything."""
        return self.healed_at is not None and self.ended


class Judge:
    """Judges some invariants. `handlers`: what it looks at; `end`: what can be judged only when all is over."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.evidence = findings.evidence
        self.found = findings.found
        self.told = findings.told
        self.job = findings.job

    def handlers(self) -> dict[type[HistoryLine], Handler]:
        raise NotImplementedError

    def end(self) -> None:
        """Nothing, unless said otherwise."""
