"""The checks of the chaos tests find what they are there to find: each kind of broken evidence, one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from tasuki.core.job import body_hash
from tasuki.testing.sim.checker import Checker
from tests.e2e.stage import Run
from tests.support.chaos import checks
from tests.support.chaos.checks import Evidence, JobEnd
from tests.support.chaos.client import LARGE_BYTES, spec_of
from tests.support.chaos.evidence import StoredIncident, StoredJob, StoreEvidence
from tests.support.chaos.rig import invariants_hold

RESULT = b"2 c1-1 77"
RESULT_SHA256 = hashlib.sha256(RESULT).hexdigest()
LARGE_SHA256 = "f" * 64
LARGE_EVERY = 2
JOB = StoredJob(
    job_id="c1-1",
    state="SUCCEEDED",
    attempt=2,
    generation=0,
    failures=0,
    losses=1,
    max_retries=3,
    max_losses=100,
    lease_id="stays until the next grant",
    not_before=None,
    error_code=None,
    result_sha256=RESULT_SHA256,
    cancel_requested=0,
    body_hash=body_hash(spec_of("c1", 1, LARGE_EVERY)),
    leader_epoch=4,
    created_at=1.5,
    finished_at=9.5,
    worker_id="worker-1",
)
LARGE = JOB._replace(
    job_id="c1-2",
    attempt=1,
    losses=0,
    result_sha256=LARGE_SHA256,
    body_hash=body_hash(spec_of("c1", 2, LARGE_EVERY)),
    finished_at=3.0,
)
ENDS = {
    "c1-1": JobEnd("c1-1", 0, None, RESULT, len(RESULT)),
    "c1-2": JobEnd("c1-2", 0, None, None, LARGE_BYTES),
}
RUNS = [Run("c1-1", 1, 66, 2.0), Run("c1-2", 1, 66, 2.0), Run("c1-1", 2, 77, 9.0)]
LOST = StoredIncident("c1-1", 8.0, "lost", 1, "worker-1")
FENCED = StoredIncident("c1-1", 8.5, "fenced", 1, "worker-1")
SUBMIT: dict[str, Any] = {"did": "submit", "at": 1.0, "ids": ["c1-1", "c1-2"]}
ACCEPTED: dict[str, Any] = {"did": "accepted", "at": 1.8, "ids": ["c1-1", "c1-2"], "existed": [False, False]}
ANSWERS: list[dict[str, Any]] = [
    {"did": "result", "at": 4.0, "id": "c1-2", "attempt": 1, "words": "1 c1-2 66", "bytes": LARGE_BYTES, "sha256": LARGE_SHA256},
    {"did": "result", "at": 9.9, "id": "c1-1", "attempt": 2, "words": "2 c1-1 77", "bytes": 9, "sha256": RESULT_SHA256},
]
NOTES = [SUBMIT, ACCEPTED, *ANSWERS, {"did": "all_submitted", "at": 9.95}]
GOOD = Evidence(
    stored=StoreEvidence([JOB, LARGE], [LOST, FENCED], epoch=4, holder="of the store"),
    ends=ENDS,
    counters={"succeeded": 2, "active": 0},
    references={"c1-2": (LARGE_SHA256, 1, 0)},
    runs=RUNS,
    notes={"c1": NOTES},
    led={"server-1": [1, 4], "server-2": [3]},
    leads=["server-1"],
    healed_at=9.0,
    ended_at=20.0,
    large_every=LARGE_EVERY,
)
"""Two jobs: one whose worker died once, one with a large result."""


def stored(*incidents: StoredIncident, job: StoredJob = JOB, **fields: Any) -> Evidence:
    """The first job has another row or another story."""
    return GOOD._replace(stored=StoreEvidence([job._replace(**fields), LARGE], list(incidents or (LOST, FENCED)), epoch=4))


def noted(*notes: dict[str, Any]) -> Evidence:
    return GOOD._replace(notes={"c1": list(notes)})


def ran(*runs: Run) -> Evidence:
    return GOOD._replace(runs=list(runs))


def ends(**fields: Any) -> Evidence:
    return GOOD._replace(ends={**ENDS, "c1-1": ENDS["c1-1"]._replace(**fields)})


def test_a_good_history_passes_and_shows_what_it_should() -> None:
    invariants_hold(checks.history_of(GOOD), checks.SHOWN)


def test_no_evidence_is_a_failure_too() -> None:
    with pytest.raises(AssertionError, match="nothing shows that"):
        invariants_hold([], checks.SHOWN)


@pytest.mark.parametrize(
    ("invariant", "broken"),
    [
        ("I1", GOOD._replace(stored=StoreEvidence([JOB], [LOST], epoch=4))),
        ("I1", stored(state="RUNNING", finished_at=None)),
        ("I2", noted(SUBMIT, ACCEPTED, {**SUBMIT, "at": 2.0}, {**ACCEPTED, "at": 2.1}, *ANSWERS)),
        ("I2", noted({**SUBMIT, "ids": ["c1-1"]}, {**ACCEPTED, "ids": ["c1-1"], "existed": [False]}, *ANSWERS)),
        ("I2", stored(body_hash=LARGE.body_hash)),
        ("I3", stored(LOST, FENCED, LOST._replace(kind="failed", attempt=2, at=9.2), failures=1)),
        ("I4", stored(generation=1)),
        ("I5", ran(*RUNS, Run("c1-2", 1, 99, 2.5))),
        ("I5", ran(*RUNS, Run("c1-2", 2, 99, 2.5))),
        ("I5", stored(attempt=3)),
        ("I5", stored(LOST, LOST)),
        ("I5", stored(FENCED, losses=0)),
        ("I6", ran(RUNS[0], RUNS[1])),
        ("I7", GOOD._replace(led={"server-1": [1, 4], "server-2": [1]})),
        ("I7", GOOD._replace(led={"server-1": [5]})),
        ("I11", stored(losses=0)),
        ("I11", stored(max_losses=0)),
        ("I11", stored(failures=1)),
        ("I13", stored(result_sha256="e" * 64)),
        ("I13", noted(SUBMIT, ACCEPTED, ANSWERS[0], {**ANSWERS[1], "attempt": 1})),
        ("I13", noted(SUBMIT, ACCEPTED, {**ANSWERS[0], "at": 2.9}, ANSWERS[1])),
        ("I17", stored(leader_epoch=5)),
        ("liveness", GOOD._replace(leads=[])),
        ("liveness", noted(*NOTES, {**SUBMIT, "at": 9.96})),
    ],
)
def test_a_broken_invariant_is_found(invariant: str, broken: Evidence) -> None:
    lines = checks.history_of(broken)

    assert invariant in {violation.invariant for violation in Checker().check(lines).violations}
    with pytest.raises(AssertionError, match=invariant):
        invariants_hold(lines, checks.SHOWN)


def all_told(found: Evidence) -> None:
    checks.clients_were_told_everything(found, {"c1": 2})


SCENE = (
    all_told,
    checks.each_job_succeeded,
    checks.failures_ran,
    checks.results_are_what_the_jobs_wrote,
    checks.blobs_are_referred_to,
)


@pytest.mark.parametrize("check", SCENE)
def test_good_evidence_passes(check: Callable[[Evidence], None]) -> None:
    check(GOOD)


@pytest.mark.parametrize(
    ("check", "broken"),
    [
        (all_told, noted(SUBMIT, {**ACCEPTED, "ids": ["c1-1"]}, *ANSWERS)),
        (all_told, noted(SUBMIT, ACCEPTED, ANSWERS[0])),
        (all_told, noted(SUBMIT, ACCEPTED, *ANSWERS, ANSWERS[1])),
        (checks.each_job_succeeded, stored(state="FAILED")),
        (checks.each_job_succeeded, ends(lease_expires_at=5.0)),
        (checks.each_job_succeeded, ends(ready=1)),
        (checks.each_job_succeeded, GOOD._replace(counters={"succeeded": 3})),
        (checks.each_job_succeeded, GOOD._replace(counters={"succeeded": 2, "active": -1})),
        (checks.failures_ran, stored(LOST._replace(kind="failed", attempt=3))),
        (checks.results_are_what_the_jobs_wrote, noted(ANSWERS[0], {**ANSWERS[1], "words": "1 c1-1 77"})),
        (checks.results_are_what_the_jobs_wrote, noted(ANSWERS[0], {**ANSWERS[1], "words": "2 c1-2 77"})),
        (checks.results_are_what_the_jobs_wrote, noted(ANSWERS[0], {**ANSWERS[1], "words": "2 c1-1 66"})),
        (checks.results_are_what_the_jobs_wrote, noted({**ANSWERS[0], "bytes": 9}, ANSWERS[1])),
        (checks.results_are_what_the_jobs_wrote, ends(result=b"other bytes")),
        (checks.blobs_are_referred_to, GOOD._replace(references={})),
        (checks.blobs_are_referred_to, GOOD._replace(references={"c1-2": (LARGE_SHA256, None, None)})),
    ],
)
def test_broken_evidence_is_found(check: Callable[[Evidence], None], broken: Evidence) -> None:
    with pytest.raises(AssertionError):
        check(broken)
