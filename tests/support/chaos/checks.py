"""Checks of a chaos run on PostgreSQL: its history, and the promises of the scenario that are no invariants.

Every job succeeds, the counters saw each of them once, each client was told everything once, the results have the words that the
jobs wrote, and large ones are blobs.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tasuki.core.job import body_hash
from tasuki.testing.sim.history import AnsweredEvent, AnyLine, ArrivedEvent, AskedEvent, FaultEvent
from tests.e2e.stage import Run
from tests.support.chaos import evidence as left_behind
from tests.support.chaos.client import GROUP, LARGE_BYTES, spec_of
from tests.support.chaos.evidence import StoreEvidence

SHOWN = ("I1", "I2", "I3", "I4", "I5", "I6", "I7", "I11", "I13", "liveness")
"""Invariants that a storm is evidence for. The others need an observer of all processes, as in the simulator."""

ENDS = "SELECT idempotency_key, ready, lease_expires_at, result, result_size_bytes FROM tasuki_jobrun"
COUNTERS = f"SELECT state, sum(n) FROM tasuki_counter WHERE \"group\" = '{GROUP}' GROUP BY state"
REFERENCES = """SELECT job.idempotency_key, ref.sha256, blob.stored, blob.condemned FROM tasuki_jobblob ref
JOIN tasuki_jobrun job ON job.id = ref.job_id LEFT JOIN tasuki_blob blob ON blob.sha256 = ref.sha256 AND blob.condemned = 0"""


class JobEnd(NamedTuple):
    """The columns of `ENDS`: what the history has no line for."""

    job_id: str
    ready: int
    lease_expires_at: float | None
    result: bytes | None
    result_size_bytes: int | None


class Evidence(NamedTuple):
    """The remains of a storm."""

    stored: StoreEvidence
    ends: dict[str, JobEnd]
    counters: dict[str, int]
    references: dict[str, tuple[str, int | None, int | None]]
    runs: list[Run]
    notes: dict[str, list[dict[str, Any]]]
    """client → its notes."""
    led: dict[str, list[int]]
    """server → the epochs under which it led."""
    leads: list[str]
    """Servers that still do."""
    healed_at: float
    ended_at: float
    faults: Sequence[FaultEvent] = ()
    large_every: int = 0


# ---------------------------------------------------------------------------------------------------- the invariants


def history_of(found: Evidence) -> list[AnyLine]:
    """All of it as lines."""
    told = [line for client, notes in found.notes.items() for line in client_lines(client, notes, found.large_every)]
    return left_behind.history(
        left_behind.store_lines(found.stored),
        left_behind.began_lines(found.runs),
        left_behind.leading_lines(found.led, found.leads, found.healed_at),
        told,
        found.faults,
        stored=found.stored,
        healed_at=found.healed_at,
        ended_at=found.ended_at,
        watched=("began", "asked", "answered", "arrived", "leading"),
    )


def client_lines(client: str, notes: Iterable[dict[str, Any]], large_every: int) -> list[AnyLine]:
    """Yield the notes of a chaos client, which asks for one thing at a time: each acceptance answers the submit before it."""
    lines: list[AnyLine] = []
    calls = 0
    for note in notes:
        at = note["at"]
        match note["did"]:
            case "submit":
                calls += 1
                ids = tuple(note["ids"])
                bodies = tuple(_body(job_id, large_every) for job_id in ids)
                lines.append(
                    AskedEvent(at=at, client=client, call=f"{client} {calls}", verb="submit", job_ids=ids, bodies=bodies)
                )
            case "accepted":
                ids = tuple(note["ids"])
                new = tuple(job_id for job_id, existed in zip(ids, note["existed"], strict=True) if not existed)
                call = f"{client} {calls}"
                lines.append(AnsweredEvent(at=at, client=client, call=call, answer="ok", accepted=ids, created=new))
            case "result":
                result = {"attempt": note["attempt"], "result_sha256": note["sha256"]}
                lines.append(ArrivedEvent(at=at, client=client, job_id=note["id"], state="SUCCEEDED", **result))
            case _:
                pass
    return lines


def _body(job_id: str, large_every: int) -> str:
    name, _, number = job_id.rpartition("-")
    return body_hash(spec_of(name, int(number), large_every)).hex()


# ---------------------------------------------------------------------------------------------------- this scene


def clients_were_told_everything(found: Evidence, jobs: dict[str, int]) -> None:
    """Every submit was accepted, and every job answered exactly once."""
    for client, count in jobs.items():
        notes = found.notes[client]
        accepted = {job_id for note in notes if note["did"] == "accepted" for job_id in note["ids"]}
        assert len(accepted) == count, f"{client} was told of {len(accepted)} of {count} submits"
        told = [note["id"] for note in notes if note["did"] == "result"]
        assert len(told) == len(set(told)), f"{client} was answered {len(told)} times for {len(set(told))} jobs"
        assert set(told) == accepted, f"{client} was never answered for {sorted(accepted - set(told))[:10]}"


def each_job_succeeded(found: Evidence) -> None:
    """There are retries and losses enough for all. The counters, which each finish adds to in its own transaction, agree."""
    unfinished = {job.job_id: job.state for job in found.stored.jobs if job.state != "SUCCEEDED"}
    assert not unfinished, f"not finished: {dict(list(unfinished.items())[:10])}"
    assert not [end for end in found.ends.values() if end.ready or end.lease_expires_at is not None], (
        "ended, and yet leased or ready"
    )
    counted = {state: n for state, n in found.counters.items() if n}
    total = len(found.stored.jobs)
    assert counted == {"succeeded": total}, f"the counters disagree with {total} jobs: {counted}"


def failures_ran(found: Evidence) -> None:
    """In this scene only the job's own code fails: an attempt that failed has begun."""
    began = {(run.job_id, run.attempt) for run in found.runs}
    failed = {(incident.job_id, incident.attempt) for incident in found.stored.incidents if incident.kind == "failed"}
    assert failed <= began, f"failed and never ran: {sorted(failed - began)[:10]}"


def results_are_what_the_jobs_wrote(found: Evidence) -> None:
    """The words of a result name the attempt, the job and the process that made it; the bytes have their hash."""
    pids: dict[tuple[str, int], list[int]] = defaultdict(list)
    for run in found.runs:
        pids[run.job_id, run.attempt].append(run.pid)
    results = {note["id"]: note for notes in found.notes.values() for note in notes if note["did"] == "result"}
    for job in found.stored.jobs:
        answer, end = results[job.job_id], found.ends[job.job_id]
        attempt, job_id, pid = answer["words"].split()
        assert (int(attempt), job_id) == (job.attempt, job.job_id), f"{job.job_id} has the result of {answer['words']}"
        assert pids[job.job_id, job.attempt] == [int(pid)], f"another process made {answer}"
        if end.result is not None:
            assert hashlib.sha256(end.result).hexdigest() == job.result_sha256, f"{job.job_id} has another result than its hash"
        name, _, number = job.job_id.rpartition("-")
        is_large = spec_of(name, int(number), found.large_every).payload.startswith(b"large")
        assert (answer["bytes"] == LARGE_BYTES) == is_large, answer


def blobs_are_referred_to(found: Evidence) -> None:
    """A result that is a blob has its reference and its bytes' row; no other job has one."""
    sha256s = {job.job_id: job.result_sha256 for job in found.stored.jobs}
    large = {end.job_id: sha256s[end.job_id] for end in found.ends.values() if end.result is None and end.result_size_bytes}
    assert {job_id: sha256 for job_id, (sha256, _, _) in found.references.items()} == large
    assert {(stored, condemned) for _, stored, condemned in found.references.values()} <= {(1, 0)}
