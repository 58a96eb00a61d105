"""The history of a run with real processes, from what it left in its database: what the stores write can be read and judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasuki.testing.clocks import FakeClock
from tasuki.testing.sim.checker import Checker
from tasuki.testing.sim.history import AnyLine, AskedEvent
from tasuki.testing.store_stage import GRACE_S, KEEP, PAST_LEASE_S, Stage
from tests.support.chaos.evidence import (
    Query,
    StoredIncident,
    StoredJob,
    StoreEvidence,
    history,
    leading_lines,
    read_store,
    sqlite_query,
    store_lines,
)
from tests.support.postgres_service import PostgresService


@pytest.fixture(params=["sqlite", "postgresql"])
def staged(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Stage, Query]]:
    """A store with a leader, and how to ask its database."""
    from tasuki.stores.sql.store import SqlStore

    clock = FakeClock()
    if request.param == "sqlite":
        path = tmp_path / "tasuki.sqlite3"
        store, query = SqlStore.open_sqlite(path, clock=clock), sqlite_query(path)
    else:
        service: PostgresService = request.getfixturevalue("postgres")
        url = request.getfixturevalue("postgres_url") + "?connect_timeout=20"  # on a machine with much other work
        store, query = SqlStore.open_postgresql(url, clock=clock), lambda statement: service.execute(statement, url=url)
    try:
        yield Stage(store, clock), query
    finally:
        store.close()


def lost(stage: Stage, job_id: str) -> None:
    stage.running(job_id)
    stage.lose()
    stage.finish(stage.take(job_id, "w2"), "w2")


def failed_to_death(stage: Stage, job_id: str) -> None:
    stage.fail(stage.running(job_id, max_retries=0))


def lost_to_death(stage: Stage, job_id: str) -> None:
    stage.running(job_id, max_losses=0)
    stage.lose()


def taken_over(stage: Stage, job_id: str) -> None:
    stage.running(job_id)
    stage.clock.advance(PAST_LEASE_S)
    stage.finish(stage.take(job_id, "w2"), "w2")


def resumed(stage: Stage, job_id: str) -> None:
    grant = stage.running(job_id, lease=KEEP)
    stage.clock.advance(PAST_LEASE_S + GRACE_S)
    stage.reap()
    stage.renew(grant)
    stage.finish(grant)


def released(stage: Stage, job_id: str) -> None:
    stage.release(stage.assigned(job_id))
    stage.finish(stage.take(job_id, "w2"), "w2")


def canceled_while_it_ran(stage: Stage, job_id: str) -> None:
    grant = stage.running(job_id)
    stage.store.cancel([job_id], actor="alice")
    stage.fail(grant, error_code="CANCELED")


def canceled_while_it_waited(stage: Stage, job_id: str) -> None:
    stage.fail(stage.running(job_id))
    stage.store.cancel([job_id], actor="alice")


def set_going_again(stage: Stage, job_id: str) -> None:
    stage.finish(stage.running(job_id))
    stage.store.requeue([job_id], actor="alice")
    stage.fail(stage.take(job_id), permanent=True)
    stage.store.requeue([job_id], actor="alice")
    stage.finish(stage.take(job_id))


def skipped_and_set_going_again(stage: Stage, job_id: str) -> None:
    stage.add(job_id, not_after=stage.clock.wall() + 1)
    stage.clock.advance(10)
    stage.skip()
    stage.store.requeue([job_id], actor="alice")
    stage.finish(stage.take(job_id))


def fenced(stage: Stage, job_id: str) -> None:
    grant = stage.running(job_id)
    stage.lose()
    stage.finish(grant)
    stage.finish(stage.take(job_id, "w2"), "w2")


LIVES: tuple[Callable[[Stage, str], None], ...] = (
    lost,
    failed_to_death,
    lost_to_death,
    taken_over,
    resumed,
    released,
    canceled_while_it_ran,
    canceled_while_it_waited,
    set_going_again,
    skipped_and_set_going_again,
    fenced,
)


def judged(stored: StoreEvidence, *parts: list[AnyLine]) -> Checker:
    return Checker().check(history(store_lines(stored), *parts, stored=stored, healed_at=9e9, ended_at=9e9))


def broken(stored: StoreEvidence, *parts: list[AnyLine]) -> set[str]:
    return {violation.invariant for violation in judged(stored, *parts).violations}


def test_what_a_store_wrote_of_all_kinds_of_lives_is_a_good_history(staged: tuple[Stage, Query]) -> None:
    stage, query = staged
    for live in LIVES:
        live(stage, live.__name__)

    checker = judged(read_store(query))

    assert not checker.violations, checker.report()
    judged_invariants = {"I2", "I3", "I4", "I5", "I6", "I11", "I13", "I17", "liveness"}
    assert judged_invariants <= set(checker.evidence)


def test_the_stores_rows_are_read_as_they_are(staged: tuple[Stage, Query]) -> None:
    stage, query = staged
    lost(stage, "j")

    stored = read_store(query)

    [job] = stored.jobs
    expected = stage.job("j")
    assert (job.job_id, job.state, job.attempt, job.losses) == ("j", "SUCCEEDED", 2, 1)
    assert bytes(job.body_hash) == expected.body_hash
    assert job.finished_at == expected.finished_at
    assert [(incident.kind, incident.attempt, incident.worker_id) for incident in stored.incidents] == [("lost", 1, "w1")]
    assert (stored.epoch, stored.holder) == (1, "leader-1")


JOB = StoredJob(
    job_id="j",
    state="SUCCEEDED",
    attempt=2,
    generation=0,
    failures=0,
    losses=1,
    max_retries=3,
    max_losses=3,
    lease_id="stays until the next grant",
    not_before=None,
    error_code=None,
    result_sha256="sha",
    cancel_requested=0,
    body_hash=b"body",
    leader_epoch=1,
    created_at=1.0,
    finished_at=9.0,
    worker_id="w2",
)
LOST = StoredIncident("j", 5.0, "lost", 1, "w1")


def test_a_life_that_fits_its_story_passes() -> None:
    assert broken(StoreEvidence([JOB], [LOST], epoch=1)) == set()


@pytest.mark.parametrize(
    ("invariant", "fields"),
    [
        ("I4", {"generation": 1}),
        ("I5", {"attempt": 3}),
        ("I5", {"lease_id": "", "state": "RUNNING"}),
        ("I11", {"losses": 0}),
        ("I11", {"losses": 2}),
        ("I11", {"failures": 1}),
        ("I17", {"leader_epoch": 99}),
        ("liveness", {"state": "PENDING"}),
    ],
)
def test_a_row_that_does_not_fit_its_story_is_found(invariant: str, fields: dict[str, Any]) -> None:
    assert invariant in broken(StoreEvidence([JOB._replace(**fields)], [LOST], epoch=1))


@pytest.mark.parametrize(
    ("invariant", "story"),
    [
        ("I3", [("lost", 1), ("failed", 2)]),
        ("I5", [("lost", 1), ("lost", 1)]),
        ("I6", [("lost", 1), ("failed", 1)]),
        ("I5", [("lost", 1), ("lost", 7)]),
        ("I5", []),
    ],
)
def test_a_story_that_cannot_be_is_found(invariant: str, story: list[tuple[str, int]]) -> None:
    incidents = [LOST._replace(kind=kind, attempt=attempt) for kind, attempt in story]

    assert invariant in broken(StoreEvidence([JOB], incidents, epoch=1))


@pytest.mark.parametrize(
    ("led", "leads", "expected"),
    [
        ({"server-1": [1, 3], "server-2": [2]}, ["server-1"], set()),
        ({"server-1": [1, 3], "server-2": [1]}, ["server-1"], {"I7"}),
        ({"server-1": [4]}, ["server-1"], {"I7", "liveness"}),
        ({"server-1": [3], "server-2": [2]}, ["server-1", "server-2"], {"liveness"}),
        ({"server-1": [3]}, [], {"liveness"}),
    ],
)
def test_leaders_by_their_own_words_are_compared_with_the_registered_epoch(
    led: dict[str, list[int]], leads: list[str], expected: set[str]
) -> None:
    stored = StoreEvidence([], [], epoch=3, holder="of the store")

    assert broken(stored, leading_lines(led, leads, 1.0)) == expected


def test_a_job_that_nobody_asked_for_is_found() -> None:
    asked = AskedEvent(at=0.0, client="c1", call="1", verb="submit", job_ids=("another",))

    assert "I2" in broken(StoreEvidence([JOB], [LOST], epoch=1), [asked])
