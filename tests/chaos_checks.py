"""What must hold after a storm of chaos.py, whatever happened in it. Reads the database, the ledger and the clients' histories.

The names are those of RELIABILITY §1. What rows cannot tell (I8, I9, I14, …) is shown by tests of its own.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from typing import Any, NamedTuple

from tests.chaos import Scene
from tests.chaos_client import GROUP, LARGE_BYTES, spec_of
from tests.e2e.stage import Run

ATTEMPT_ENDED = ("failed", "lost", "orphaned", "released", "taken_over")
"""Incidents with which an attempt ends without being the job's last one."""

_JOBS = """SELECT idempotency_key, state, ready, attempt, generation, failures, losses, max_retries, max_losses, lease_expires_at,
leader_epoch, result, result_sha256, result_size_bytes FROM tasuki_jobrun"""
_INCIDENTS = (
    "SELECT job.idempotency_key, story.kind, story.attempt FROM tasuki_incident story JOIN tasuki_jobrun job ON job.id = job_id"
)
_COUNTERS = 'SELECT state, sum(n) FROM tasuki_counter WHERE "group" = %s GROUP BY state'
_REFERENCES = """SELECT job.idempotency_key, ref.sha256, blob.stored, blob.condemned FROM tasuki_jobblob ref
JOIN tasuki_jobrun job ON job.id = ref.job_id LEFT JOIN tasuki_blob blob ON blob.sha256 = ref.sha256 AND blob.condemned = 0"""


class JobRow(NamedTuple):
    """The columns of `_JOBS`."""

    job_id: str
    state: str
    ready: int
    attempt: int
    generation: int
    failures: int
    losses: int
    max_retries: int
    max_losses: int
    lease_expires_at: float | None
    leader_epoch: int
    result: bytes | None
    result_sha256: str | None
    result_size_bytes: int | None


class Evidence(NamedTuple):
    """All that is left of a storm."""

    jobs: dict[str, JobRow]
    stories: dict[str, list[tuple[str, int]]]
    """job_id → (kind, attempt) of its incidents."""
    counters: dict[str, int]
    references: dict[str, tuple[str, int | None, int | None]]
    runs: dict[tuple[str, int], list[Run]]
    results: dict[str, list[dict[str, Any]]]
    """What clients were told."""


def check(scene: Scene) -> str:
    """Check everything; some figures for people."""
    evidence = gather(scene)
    submits_are_kept(scene, evidence)
    each_job_ended_once(evidence)
    attempts_are_counted(evidence)
    finishes_came_from_the_holder(evidence)
    budgets_held(evidence)
    results_are_those_of_the_finish(scene, evidence)
    blobs_are_referred_to(evidence)
    epochs_rose(scene, evidence)
    return figures(scene, evidence)


def gather(scene: Scene) -> Evidence:
    postgres, url = scene.postgres, scene.store_url
    rows = (JobRow(*row) for row in postgres.execute(_JOBS, url=url))
    stories: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for job_id, kind, attempt in postgres.execute(_INCIDENTS, url=url):
        stories[job_id].append((kind, attempt))
    runs: dict[tuple[str, int], list[Run]] = defaultdict(list)
    for run in scene.ledger.runs():
        runs[run.job_id, run.attempt].append(run)
    results: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for n in range(1, scene.plan.clients + 1):
        for line in scene.history(n):
            if line["did"] == "result":
                results[line["id"]].append(line)
    return Evidence(
        jobs={row.job_id: row for row in rows},
        stories=stories,
        counters={state: int(n) for state, n in postgres.execute(_COUNTERS, (GROUP,), url=url)},
        references={row[0]: row[1:] for row in postgres.execute(_REFERENCES, url=url)},
        runs=runs,
        results=results,
    )


def submits_are_kept(scene: Scene, evidence: Evidence) -> None:
    """I1, I2: what was submitted is there, once, and nothing else; a repeat was known as one."""
    wanted: set[str] = set()
    for n in range(1, scene.plan.clients + 1):
        accepted: Counter[str] = Counter()
        for line in scene.history(n):
            if line["did"] == "accepted":
                new_again = [
                    job_id
                    for job_id, existed in zip(line["ids"], line["existed"], strict=True)
                    if accepted[job_id] and not existed
                ]
                assert not new_again, f"I2: accepted as new a second time: {new_again[:10]}"
                accepted.update(line["ids"])
        assert len(accepted) == scene.jobs_of(n), f"client {n} was told of {len(accepted)} of {scene.jobs_of(n)} submits"
        wanted |= accepted.keys()
    assert not wanted - evidence.jobs.keys(), f"I1: acknowledged and lost: {sorted(wanted - evidence.jobs.keys())[:10]}"
    assert not evidence.jobs.keys() - wanted, "jobs that nobody submitted"


def each_job_ended_once(evidence: Evidence) -> None:
    """I1, I3, I4: every job succeeded; the counters, which each finish adds to in its own transaction, saw each of them once."""
    unfinished = {row.job_id: row.state for row in evidence.jobs.values() if row.state != "SUCCEEDED"}
    assert not unfinished, f"I1: not finished: {dict(list(unfinished.items())[:10])}"
    assert not [row for row in evidence.jobs.values() if row.ready or row.lease_expires_at is not None], (
        "I4: ended, and yet leased or ready"
    )
    assert not [row for row in evidence.jobs.values() if row.generation], "I4: set going again, though nobody asked for it"
    counted = {state: n for state, n in evidence.counters.items() if n}
    assert counted == {"succeeded": len(evidence.jobs)}, f"I3: the counters disagree with {len(evidence.jobs)} jobs: {counted}"


def attempts_are_counted(evidence: Evidence) -> None:
    """I5: no attempt ran twice, and each but the last one has exactly one end in the job's story."""
    twice = {key: len(runs) for key, runs in evidence.runs.items() if len(runs) > 1}
    assert not twice, f"I5: ran more than once under one number: {dict(list(twice.items())[:10])}"
    beyond = [(job_id, attempt) for job_id, attempt in evidence.runs if attempt > evidence.jobs[job_id].attempt]
    assert not beyond, f"I5: ran and were never granted: {beyond[:10]}"
    for row in evidence.jobs.values():
        ended = sorted(attempt for kind, attempt in evidence.stories[row.job_id] if kind in ATTEMPT_ENDED)
        assert ended == list(range(1, row.attempt)), (
            f"I5: {row.job_id} is at attempt {row.attempt}: {evidence.stories[row.job_id]}"
        )


def finishes_came_from_the_holder(evidence: Evidence) -> None:
    """I6: whoever finished or failed an attempt had run it."""
    for row in evidence.jobs.values():
        failed = [attempt for kind, attempt in evidence.stories[row.job_id] if kind == "failed"]
        for attempt in (*failed, row.attempt):
            assert (row.job_id, attempt) in evidence.runs, f"I6: attempt {attempt} of {row.job_id} ended and never ran"


def budgets_held(evidence: Evidence) -> None:
    """I11: failures and losses are those of the story, and within their budgets."""
    for row in evidence.jobs.values():
        kinds = Counter(kind for kind, _ in evidence.stories[row.job_id])
        assert row.failures == kinds["failed"] <= row.max_retries, f"I11: {row}: {kinds}"
        assert row.losses == kinds["lost"] + kinds["orphaned"] + kinds["taken_over"] <= row.max_losses, f"I11: {row}: {kinds}"


def results_are_those_of_the_finish(scene: Scene, evidence: Evidence) -> None:
    """I13: what clients were told is what is stored, and was made by the attempt that is stored as the last one."""
    for row in evidence.jobs.values():
        told = evidence.results[row.job_id]
        assert len(told) == 1, f"{row.job_id} was answered {len(told)} times"
        answer = told[0]
        attempt, job_id, pid = answer["words"].split()
        assert (answer["attempt"], answer["sha256"]) == (row.attempt, row.result_sha256), f"I13: {row} but {answer}"
        assert (int(attempt), job_id) == (row.attempt, row.job_id), f"I13: {row.job_id} has the result of {answer['words']}"
        assert [run.pid for run in evidence.runs[job_id, row.attempt]] == [int(pid)], f"I13: another process made {answer}"
        if row.result is not None:
            assert hashlib.sha256(row.result).hexdigest() == row.result_sha256, f"I13: {row.job_id}"
        name, _, number = row.job_id.rpartition("-")
        is_large = spec_of(name, int(number), scene.plan.large_every).payload.startswith(b"large")
        assert (answer["bytes"] == LARGE_BYTES) == is_large, answer


def blobs_are_referred_to(evidence: Evidence) -> None:
    """A result that is a blob has its reference and its bytes' row; no other job has one."""
    large = {row.job_id: row.result_sha256 for row in evidence.jobs.values() if row.result is None and row.result_size_bytes}
    assert {job_id: sha256 for job_id, (sha256, _, _) in evidence.references.items()} == large
    assert {(stored, condemned) for _, stored, condemned in evidence.references.values()} <= {(1, 0)}


def epochs_rose(scene: Scene, evidence: Evidence) -> None:
    """I7: no epoch was led twice, and none is higher than the registered one."""
    led = [epoch for server in scene.servers for epoch in server.led(all_starts=True)]
    ((registered,),) = scene.postgres.execute("SELECT max(epoch) FROM tasuki_scopeepoch", url=scene.store_url)
    assert len(led) == len(set(led)), f"I7: led twice: {sorted(led)}"
    assert max(led) <= registered, f"I7: led under {max(led)}, but {registered} is registered"
    assert all(row.leader_epoch <= registered for row in evidence.jobs.values())


def figures(scene: Scene, evidence: Evidence) -> str:
    jobs = evidence.jobs.values()
    deeds = ", ".join(f"{count} {what}" for what, count in sorted(scene.deeds.counts.items()))
    epochs = sum(len(server.led(all_starts=True)) for server in scene.servers)
    attempts, losses, failures = (sum(getattr(row, name) for row in jobs) for name in ("attempt", "losses", "failures"))
    return (
        f"seed {scene.plan.seed}: {len(jobs)} jobs, {attempts} attempts, {losses} losses, {failures} failures, "
        f"{epochs} leaderships; {deeds}; "
        f"faults for {scene.deeds.storm_s:.0f} s, all over after {scene.deeds.whole_s:.0f} s"
    )
