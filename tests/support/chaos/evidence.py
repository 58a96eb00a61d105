"""The history of a run with real processes, put together afterwards from what it left behind.

    stored = read_store(sqlite_query(server.folder.database))
    lines = history(store_lines(stored), began_lines(ledger.runs()), client_lines, stored=stored, healed_at=…, ended_at=…)
    assert not Checker().check(lines).violations

A database keeps its rows and, of what befell a job, the incidents: each attempt that did not succeed, each cancel and requeue.
That is enough to say how every attempt ended (I3–I6, I11), not who held which lease in between (I9, I10, I12, I17 are the
simulator's). Whoever knows what clients were told, and which servers led, adds those lines. All times are those of one host.

Reads the tables of the SQL stores through the query that it is given, and nothing else.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tasuki.core.job import LEASED, State
from tasuki.testing.sim.history import (
    AnyLine,
    BeganEvent,
    CanceledEvent,
    EndedEvent,
    HealedEvent,
    LeadingEvent,
    ReapedEvent,
    ReportedEvent,
    RequeuedEvent,
    RowEvent,
    ShownEvent,
    SubmittedEvent,
    TookOverEvent,
    WatchingEvent,
)

Query = Callable[[str], Iterable[Sequence[Any]]]
"""Runs one SELECT."""

WATCHED = ("submitted", "reported", "reaped", "shown", "requeued")
"""The lines that a database tells in full. Of rows it has only the last ones."""
LEDGER_STEP_S = 0.001  # a ledger's times are rounded: what it notes may have been so much earlier

_JOBS = """SELECT idempotency_key, state, attempt, generation, failures, losses, max_retries, max_losses, lease_id, not_before,
error_code, result_sha256, cancel_requested, body_hash, leader_epoch, created_at, finished_at, assigned_worker_id
FROM tasuki_jobrun ORDER BY id"""
_INCIDENTS = """SELECT job.idempotency_key, story.at, story.kind, story.attempt, story.worker_id
FROM tasuki_incident story JOIN tasuki_jobrun job ON job.id = story.job_id ORDER BY story.id"""
_EPOCH = "SELECT epoch, holder FROM tasuki_scopeepoch WHERE scope = 'leader'"


class StoredJob(NamedTuple):
    """The columns of `_JOBS`."""

    job_id: str
    state: str
    attempt: int
    generation: int
    failures: int
    losses: int
    max_retries: int
    max_losses: int
    lease_id: str
    not_before: float | None
    error_code: str | None
    result_sha256: str | None
    cancel_requested: int
    body_hash: bytes
    leader_epoch: int
    created_at: float
    finished_at: float | None
    worker_id: str | None


class StoredIncident(NamedTuple):
    """The columns of `_INCIDENTS`."""

    job_id: str
    at: float
    kind: str
    attempt: int
    worker_id: str


class StoreEvidence(NamedTuple):
    """The evidence in a store."""

    jobs: list[StoredJob]
    incidents: list[StoredIncident]
    epoch: int = 0
    """The latest that was registered."""
    holder: str = ""


class RunEvidence(Protocol):
    """One start of one attempt, as the job itself noted it."""

    @property
    def job_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def at(self) -> float: ...


def sqlite_query(database: Path) -> Query:
    """The query of a SQLite store, which may still be open elsewhere."""

    def query(statement: str) -> list[Sequence[Any]]:
        with contextlib.closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            return connection.execute(statement).fetchall()

    return query


def read_store(query: Query) -> StoreEvidence:
    jobs = [StoredJob(*row) for row in query(_JOBS)]
    incidents = [StoredIncident(*row) for row in query(_INCIDENTS)]
    return StoreEvidence(jobs, incidents, *read_epoch(query))


def read_epoch(query: Query) -> tuple[int, str]:
    """The latest that was registered, and its holder."""
    return next(((int(epoch), str(holder)) for epoch, holder in query(_EPOCH)), (0, ""))


# ---------------------------------------------------------------------------------------------------- the parts


def store_lines(stored: StoreEvidence) -> list[AnyLine]:
    """The events of each job, without the rows of the end."""
    stories: dict[str, list[StoredIncident]] = defaultdict(list)
    for incident in stored.incidents:
        stories[incident.job_id].append(incident)
    lines: list[AnyLine] = []
    for job in stored.jobs:
        lines.append(SubmittedEvent(at=job.created_at, job_id=job.job_id, body=_hex(job.body_hash), created=True))
        lines += _Story(job).lines(stories[job.job_id])
    return lines


class _Story:
    """The incidents of one job as lines. The only end without an incident is success."""

    def __init__(self, job: StoredJob) -> None:
        self._job = job
        self._ended: set[int] = set()

    def lines(self, incidents: Sequence[StoredIncident]) -> list[AnyLine]:
        lines: list[AnyLine] = []
        last_start = max((n for n, incident in enumerate(incidents) if incident.kind == "requeued"), default=-1)
        for n, incident in enumerate(incidents):
            if incident.kind == "requeued" and incident.attempt and incident.attempt not in self._ended:
                lines.append(self._finish(incident.at, incident.attempt, ""))
            lines += self._one(incident, is_last=n > last_start)
        job = self._job
        if job.state == State.SUCCEEDED:
            lines.append(self._finish(job.finished_at or 0.0, job.attempt, job.result_sha256))
        return lines

    def _one(self, incident: StoredIncident, *, is_last: bool) -> list[AnyLine]:
        """`is_last`: of the generation that the row is of."""
        match incident.kind:
            case "failed":
                return [self._fail(incident, State.PENDING)]
            case "dead_lettered" if is_last and self._job.error_code == "LOST":
                return [self._reap(incident, State.FAILED)]
            case "dead_lettered":
                return [self._fail(incident, self._job.state if is_last else State.FAILED)]
            case "lost" | "taken_over":
                return [self._reap(incident, State.PENDING)]
            case "orphaned":
                return [self._reap(incident, State.ORPHANED)]
            case "canceled" if incident.worker_id:
                return [self._fail(incident, State.CANCELED)]
            case "canceled":
                return [CanceledEvent(at=incident.at, job_id=incident.job_id, state=State.CANCELED)]
            case "cancel_requested":
                return [CanceledEvent(at=incident.at, job_id=incident.job_id, state=State.RUNNING, requested=True)]
            case "released":
                return [self._show(incident, "release")]
            case "resumed":
                return [self._show(incident, "renew")]
            case "requeued":
                return [RequeuedEvent(at=incident.at, job_id=incident.job_id, done=True)]
            case _:  # fenced: nothing was written. skipped: the row says so
                return []

    def _finish(self, at: float, attempt: int, sha256: str | None) -> AnyLine:
        self._ended.add(attempt)
        job = self._job
        return ReportedEvent(
            at=at,
            verb="finish",
            job_id=job.job_id,
            attempt=attempt,
            lease_id="",
            worker_id=job.worker_id or "",
            accepted=True,
            state=State.SUCCEEDED,
            result_sha256=sha256,
        )

    def _fail(self, incident: StoredIncident, state: str) -> AnyLine:
        self._ended.add(incident.attempt)
        return ReportedEvent(
            at=incident.at,
            verb="fail",
            job_id=incident.job_id,
            attempt=incident.attempt,
            lease_id="",
            worker_id=incident.worker_id,
            accepted=True,
            state=state,
            result_sha256="",
        )

    def _reap(self, incident: StoredIncident, state: str) -> AnyLine:
        self._ended.add(incident.attempt)
        worker_id, attempt = incident.worker_id, incident.attempt
        return ReapedEvent(at=incident.at, job_id=incident.job_id, attempt=attempt, worker_id=worker_id, state=state)

    def _show(self, incident: StoredIncident, verb: str) -> AnyLine:
        if verb == "release":
            self._ended.add(incident.attempt)
        return ShownEvent(
            at=incident.at,
            verb=verb,
            job_id=incident.job_id,
            attempt=incident.attempt,
            lease_id="",
            worker_id=incident.worker_id,
            incarnation="",
            held=True,
        )


def began_lines(runs: Iterable[RunEvidence]) -> list[AnyLine]:
    """The runs in the ledger; a process is called by its pid."""
    return [
        BeganEvent(
            at=run.at - LEDGER_STEP_S,
            worker_id=f"pid {run.pid}",
            incarnation="",
            job_id=run.job_id,
            attempt=run.attempt,
            lease_id="",
        )
        for run in runs
    ]


def leading_lines(led: Mapping[str, Sequence[int]], leads: Iterable[str], at: float) -> list[AnyLine]:
    """The leaders with their epochs, by their own words, and who leads still. Told in the order of the epochs, at one moment."""
    leaderships = sorted((epoch, server_id) for server_id, epochs in led.items() for epoch in epochs)
    last = {server_id: max(led[server_id], default=0) for server_id in leads}
    lines: list[AnyLine] = []
    for epoch, server_id in leaderships:
        lines.append(LeadingEvent(at=at, server_id=server_id, epoch=epoch))
        if last.get(server_id) != epoch:
            lines.append(LeadingEvent(at=at, server_id=server_id, epoch=0))
    return lines


# ---------------------------------------------------------------------------------------------------- the whole


def history(
    *parts: Iterable[AnyLine], stored: StoreEvidence, healed_at: float, ended_at: float, watched: Sequence[str] = ()
) -> list[AnyLine]:
    """All parts in the order of time, with the rows at the end. `watched`: further kinds of which no line is missing."""
    happened = sorted((line for part in parts for line in part), key=lambda line: line.at)
    start_at = min(happened[0].at, healed_at) if happened else healed_at
    lines: list[AnyLine] = [WatchingEvent(at=start_at, kinds=(*WATCHED, *watched))]
    if stored.epoch:
        # The store knows its holder by another name than the log of that server does.
        by_logs = [line.server_id for line in happened if isinstance(line, LeadingEvent) and line.epoch == stored.epoch]
        lines.append(TookOverEvent(at=start_at, server_id=(by_logs or [stored.holder])[0], epoch=stored.epoch, done=True))
    lines += [line for line in happened if line.at <= healed_at]
    lines.append(HealedEvent(at=healed_at))
    lines += [line for line in happened if line.at > healed_at]
    lines += [_row(job, ended_at) for job in stored.jobs]
    lines.append(EndedEvent(at=ended_at))
    return lines


def _row(job: StoredJob, at: float) -> RowEvent:
    is_held = job.state in LEASED or job.state == State.ORPHANED
    is_over = State(job.state).terminal
    return RowEvent(
        at=at,
        job_id=job.job_id,
        state=job.state,
        attempt=job.attempt,
        generation=job.generation,
        failures=job.failures,
        losses=job.losses,
        max_retries=job.max_retries,
        max_losses=job.max_losses,
        # The column keeps the last lease after its end, so that an exact repeat of its report is known as one.
        lease_id=job.lease_id if is_held and job.lease_id else None,
        not_before=job.not_before,
        error_code=job.error_code or "" if is_over else "",
        result_sha256=job.result_sha256,
        cancel_requested=bool(job.cancel_requested),
        body=_hex(job.body_hash),
        leader_epoch=job.leader_epoch,
        at_end=True,
    )


def _hex(data: bytes) -> str:
    """PostgreSQL's driver gives a view of the bytes."""
    return bytes(data).hex()
