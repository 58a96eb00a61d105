"""Transactions of the SQLite store: a full disk, and turns that fail half way. `test_sql_kills.py` has kills at every point."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasuki.core.job import Outcome, State
from tasuki.core.store_messages import Filter, HeldLease, LeaseRequest, Report, Turn
from tasuki.errors import DiskFull, StaleEpoch, TasukiError, Unavailable
from tasuki.stores import batching
from tasuki.stores.batching import execute_surely
from tasuki.stores.sql.store import SqlStore
from tests.conftest import Require
from tests.stores.steps import submission


def request(limit: int) -> LeaseRequest:
    return LeaseRequest(worker_id="w1", incarnation="w1/1", patterns=(">",), limit=limit)


def asked(store: SqlStore, statement: str) -> list[tuple[object, ...]]:
    """A statement of the test's own on the store's connection."""
    return store._database.connection.execute(statement).fetchall()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tasuki.sqlite3"


def test_a_full_database_refuses_the_turn_and_works_again_with_space(path: Path) -> None:
    store = SqlStore.open_sqlite(path)
    store.submit([submission("before")])
    [[pages]] = asked(store, "PRAGMA page_count")
    asked(store, f"PRAGMA max_page_count = {pages + 20}")

    def fill() -> None:
        with store.turn():
            store.submit([submission("small")])
            store.submit([submission(f"large-{number}", payload=b"x" * 60_000) for number in range(20)])

    with pytest.raises(DiskFull, match="full"):
        fill()

    assert store.get(["small", "large-0"]) == [None, None]
    assert store.counts()["render"].pending == 1
    asked(store, "PRAGMA max_page_count = 1000000")
    store.submit([submission("large", payload=b"x" * 60_000)])
    assert store.counts()["render"].pending == 2
    store.close()


ON_A_SMALL_DISK = """
import os, pathlib, subprocess, sys
from tasuki.core.job import JobSpec, body_hash
from tasuki.core.store_messages import Submission
from tasuki.errors import DiskFull
from tasuki.stores.sql.store import SqlStore

def submission(job_id):
    spec = JobSpec(job_id=job_id, subject="render.eu", payload=os.urandom(60_000))
    return Submission(spec, "alice", body_hash(spec))

folder = pathlib.Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)
ballast = folder / "ballast"
ballast.write_bytes(bytes(1_000_000))
store = SqlStore.open_sqlite(folder / "tasuki.sqlite3")
acked = []
try:
    while len(acked) < 100:
        store.submit([submission(f"job-{len(acked)}")])
        acked.append(f"job-{len(acked)}")
except DiskFull as error:
    print(error.code, len(acked))
assert 5 < len(acked) < 100, acked
assert None not in store.get(acked) and store.counts()["render"].pending == len(acked)
ballast.unlink()
store.submit([submission("with-space-again")])
store.close()
store = SqlStore.open_sqlite(folder / "tasuki.sqlite3")
assert None not in store.get([*acked, "with-space-again"])
store.close()
"""


def test_a_full_disk_loses_nothing_that_was_acknowledged(tmp_path: Path, require: Require) -> None:
    # In a mount namespace of its own, so that nothing is left behind whatever happens.
    tries = [["unshare", "--mount"], ["unshare", "--mount", "--user", "--map-root-user"]]
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    fitting = [unshare for unshare in tries if subprocess.run([*unshare, *mount], capture_output=True).returncode == 0]
    require("a small disk", bool(fitting), "this user may not mount a tmpfs in a namespace of its own")

    program = [*fitting[0], sys.executable, "-c", ON_A_SMALL_DISK, str(tmp_path)]
    run = subprocess.run(program, capture_output=True, text=True, timeout=100)

    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith("DISK_FULL")


def test_an_error_of_the_caller_rolls_the_turn_back_and_the_store_goes_on(path: Path) -> None:
    store = SqlStore.open_sqlite(path)

    def stumble() -> None:
        with store.turn():
            store.submit([submission("a")])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stumble()

    assert store.get(["a"]) == [None]
    assert store.counts() == {}
    store.submit([submission("b")])
    assert store.counts()["render"].pending == 1
    store.close()


def test_a_refused_leader_verb_does_not_spoil_the_turn_around_it(path: Path) -> None:
    store = SqlStore.open_sqlite(path)
    assert store.take_over("one", 1)

    with store.turn():
        store.submit([submission("a")])
        with pytest.raises(StaleEpoch):
            store.reap(epoch=99)

    assert store.counts()["render"].pending == 1
    store.close()


def test_a_verb_that_broke_half_way_spoils_the_turn_even_if_its_error_was_caught(path: Path) -> None:
    store = SqlStore.open_sqlite(path)
    [[pages]] = asked(store, "PRAGMA page_count")
    asked(store, f"PRAGMA max_page_count = {pages + 20}")

    def careless() -> None:
        with store.turn():
            store.submit([submission("small")])
            with pytest.raises(DiskFull):
                store.submit([submission(f"large-{number}", payload=b"x" * 60_000) for number in range(20)])

    with pytest.raises(Unavailable, match="rolled back"):
        careless()
    assert store.get(["small"]) == [None]
    store.close()


def test_a_database_that_another_process_locks_is_unavailable_not_a_crash(path: Path) -> None:
    store = SqlStore.open_sqlite(path)
    asked(store, "PRAGMA busy_timeout = 10")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    with pytest.raises(TasukiError, match="locked") as caught:
        store.submit([submission("a")])

    assert caught.value.retryable
    other.execute("ROLLBACK")
    other.close()
    store.submit([submission("a")])
    assert store.get(["a"]) != [None]
    store.close()


@pytest.mark.parametrize("size", [1, 2, 3, 255, 256, 257, 600])
def test_batches_of_any_size_go_through_whole(path: Path, size: int) -> None:
    store = SqlStore.open_sqlite(path)

    created = store.submit([submission(f"job-{number:04}") for number in range(size)])
    [grants] = store.lease([request(size)])
    reports = [Report(grant.job_id, "w1", grant.lease_id, 1, Outcome(result=grant.job_id.encode())) for grant in grants]
    recorded = store.finish(reports)

    assert [answer.job_id for answer in created] == [grant.job_id for grant in grants] == [f"job-{n:04}" for n in range(size)]
    assert {answer.state for answer in recorded} == {State.SUCCEEDED}
    assert store.counts()["render"].succeeded == size
    jobs = store.get([f"job-{number:04}" for number in range(size)])
    assert all(job is not None and job.outcome is not None and job.outcome.result == job.job_id.encode() for job in jobs)
    store.close()


def test_in_one_batch_the_good_reports_count_and_the_stale_ones_do_not(path: Path) -> None:
    store = SqlStore.open_sqlite(path)
    store.submit([submission(f"job-{number}") for number in range(6)])
    [grants] = store.lease([request(6)])
    reports = [Report(grant.job_id, "w1", grant.lease_id, 1, Outcome()) for grant in grants]
    reports[1] = Report("job-1", "w2", grants[1].lease_id, 1, Outcome())
    reports[2] = Report("job-2", "w1", grants[2].lease_id, 2, Outcome())
    reports[3] = Report("job-3", "w1", f"{'0' * 32}.4", 1, Outcome())
    reports[4] = Report("another", "w1", grants[4].lease_id, 1, Outcome())

    answers = store.finish(reports)

    assert [answer.answer.value for answer in answers] == ["recorded", "fenced", "fenced", "fenced", "fenced", "recorded"]
    assert [job.state.value for job in store.find(Filter(states=(State.SUCCEEDED,))).jobs] == ["SUCCEEDED"] * 2
    assert (store.counts()["render"].succeeded, store.counts()["render"].active) == (2, 4)
    assert [incident.kind for incident in store.incidents("job-3")] == ["fenced"]
    assert store.incidents("job-1") == []  # w2 never had it
    store.close()


def test_only_a_turn_of_starts_alone_does_not_wait_for_the_disk(path: Path) -> None:
    # Given a store that notes, before each commit, how much SQLite syncs then
    levels: list[object] = []

    def note(point: str) -> None:
        if point == "turn.before_commit":
            levels.append(asked(store, "PRAGMA synchronous")[0][0])

    store = SqlStore.open_sqlite(path, fault=note)
    store.submit([submission("a"), submission("b")])
    grants = store.lease([request(2)])[0]
    first, second = (HeldLease(grant.job_id, "w1", "w1/1", grant.lease_id, grant.attempt, 15.0) for grant in grants)
    ending = Report(first.job_id, "w1", first.lease_id, 1, Outcome())
    levels.clear()

    # When a start comes alone, then one with a finish, then a verb of its own
    for turn in (Turn(start=[first]), Turn(finish=[ending], start=[second])):
        execute_surely(store, turn, lambda wait_s: False)
    store.renew([second])

    # Then the first is NORMAL, which a power cut may take back, and all that follow are FULL
    assert levels == [1, 2, 2]
    assert [job.state for job in store.find(Filter()).jobs if job is not None] == [State.RUNNING, State.SUCCEEDED]
    store.close()


def test_a_turn_that_the_store_takes_late_ends_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqlStore.open_sqlite(tmp_path / "tasuki.sqlite3")
    assert store.take_over("s1", 1)
    at = time.monotonic()
    times = iter([at, at + batching.REAP_WITHIN_S + 0.1])
    monkeypatch.setattr(batching.time, "monotonic", lambda: next(times))

    with pytest.raises(Unavailable, match="too late to end leases"):
        execute_surely(store, Turn(epoch=1, reap=1, promote=1), lambda wait_s: False)
    monkeypatch.undo()
    store.close()
