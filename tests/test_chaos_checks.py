"""The checker of the chaos tests finds what it is there to find: each kind of broken evidence, one by one."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable

import pytest

from tests import chaos_checks
from tests.chaos_checks import Evidence, JobRow
from tests.e2e.stage import Run

RESULT = b"2 c1-1 77"
ROW = JobRow(
    job_id="c1-1",
    state="SUCCEEDED",
    ready=0,
    attempt=2,
    generation=0,
    failures=0,
    losses=1,
    max_retries=3,
    max_losses=100,
    lease_expires_at=None,
    leader_epoch=4,
    result=RESULT,
    result_sha256=hashlib.sha256(RESULT).hexdigest(),
    result_size_bytes=len(RESULT),
)
LARGE = ROW._replace(job_id="c1-2", attempt=1, losses=0, result=None, result_sha256="f" * 64, result_size_bytes=100_000)


def evidence() -> Evidence:
    """Two jobs: one whose worker died once, one with a large result."""
    runs = [Run("c1-1", 1, 66, 1.0), Run("c1-1", 2, 77, 9.0), Run("c1-2", 1, 66, 1.0)]
    return Evidence(
        jobs={ROW.job_id: ROW, LARGE.job_id: LARGE},
        stories=defaultdict(list, {"c1-1": [("lost", 1), ("fenced", 1)]}),
        counters={"succeeded": 2, "active": 0},
        references={"c1-2": ("f" * 64, 1, 0)},
        runs=defaultdict(list, {(run.job_id, run.attempt): [run] for run in runs}),
        results=defaultdict(list),
    )


def replaced(row: JobRow) -> Evidence:
    found = evidence()
    return found._replace(jobs={**found.jobs, row.job_id: row})


CHECKS = (
    chaos_checks.each_job_ended_once,
    chaos_checks.attempts_are_counted,
    chaos_checks.finishes_came_from_the_holder,
    chaos_checks.budgets_held,
    chaos_checks.blobs_are_referred_to,
)


@pytest.mark.parametrize("check", CHECKS)
def test_good_evidence_passes(check: Callable[[Evidence], None]) -> None:
    check(evidence())


def _ran_twice() -> Evidence:
    found = evidence()
    found.runs["c1-2", 1].append(Run("c1-2", 1, 99, 2.0))
    return found


def _ran_without_a_grant() -> Evidence:
    found = evidence()
    found.runs["c1-2", 2].append(Run("c1-2", 2, 99, 2.0))
    return found


def _never_ran() -> Evidence:
    found = evidence()
    del found.runs["c1-1", 2]
    return found


@pytest.mark.parametrize(
    ("check", "broken"),
    [
        (chaos_checks.each_job_ended_once, lambda: replaced(ROW._replace(state="RUNNING"))),
        (chaos_checks.each_job_ended_once, lambda: replaced(ROW._replace(lease_expires_at=5.0))),
        (chaos_checks.each_job_ended_once, lambda: replaced(ROW._replace(generation=1))),
        (chaos_checks.each_job_ended_once, lambda: evidence()._replace(counters={"succeeded": 3})),
        (chaos_checks.each_job_ended_once, lambda: evidence()._replace(counters={"succeeded": 2, "active": -1})),
        (chaos_checks.attempts_are_counted, _ran_twice),
        (chaos_checks.attempts_are_counted, _ran_without_a_grant),
        (chaos_checks.attempts_are_counted, lambda: replaced(ROW._replace(attempt=3))),
        (chaos_checks.finishes_came_from_the_holder, _never_ran),
        (chaos_checks.budgets_held, lambda: replaced(ROW._replace(losses=0))),
        (chaos_checks.budgets_held, lambda: replaced(ROW._replace(max_losses=0))),
        (chaos_checks.budgets_held, lambda: replaced(LARGE._replace(failures=1))),
        (chaos_checks.blobs_are_referred_to, lambda: evidence()._replace(references={})),
        (chaos_checks.blobs_are_referred_to, lambda: evidence()._replace(references={"c1-2": ("f" * 64, None, None)})),
    ],
)
def test_broken_evidence_is_found(check: Callable[[Evidence], None], broken: Callable[[], Evidence]) -> None:
    with pytest.raises(AssertionError):
        check(broken())
