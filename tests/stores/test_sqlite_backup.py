"""A copy of a store in use, and its new life: nothing that the lost life granted after the copy is ever taken for its own."""

import os
import shutil
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tasuki.core.job import State
from tasuki.core.lifecycle import ATTEMPT_STEP, EPOCH_STEP, LEASE_MARGIN_S, LEASE_TTL_S
from tasuki.core.store_messages import LeaseStatus, ReportStatus
from tasuki.errors import Corrupt, InvalidInput, StaleEpoch
from tasuki.stores.sql.sqlite_backup import (
    PAGES_PER_STEP,
    begin_new_life,
    blobs_of,
    check_copy,
    compact,
    facts_of,
    snapshot,
)
from tasuki.testing.clocks import FakeClock
from tasuki.testing.store_stage import KEEP, Stage
from tests.support.backups import add_blob, make_store, opened, rows


class Lives:
    """A store, the copy that is taken of it, and the stage that the copy is opened on after the first life was lost."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self._database = folder / "old.sqlite3"
        self._copy = folder / "new.sqlite3"
        self.old = opened(self._database, self.clock)

    def copy(self) -> None:
        snapshot(self._database, self._copy)

    def lose_and_restore(self) -> Stage:
        """The first life ends; the copy begins the second, led as a server leads it."""
        self.old.store.close()
        begin_new_life(self._copy, now=self.clock.wall(), present=None)
        return opened(self._copy, self.clock)


@pytest.fixture
def lives(tmp_path: Path) -> Lives:
    return Lives(tmp_path)


# ---------------------------------------------------------------------------------------------------- the copy


def test_a_copy_is_of_one_moment_though_others_write_meanwhile(tmp_path: Path) -> None:
    database = tmp_path / "busy.sqlite3"
    with closing(sqlite3.connect(database, isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("CREATE TABLE line (text)")
        many = 3 * PAGES_PER_STEP
        writer.execute("WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT ?) "
                       "INSERT INTO line SELECT zeroblob(4000) FROM n", (many,))  # fmt: skip
        words = []

        def write_on(done: int, whole: int) -> None:
            words.append((done, whole))
            writer.execute("DELETE FROM line WHERE rowid % 7 = 0")
            writer.execute("INSERT INTO line VALUES (zeroblob(4000))")

        snapshot(database, tmp_path / "copy.sqlite3", write_on)

    assert len(words) > 2  # there was a meanwhile
    assert rows(tmp_path / "copy.sqlite3", "SELECT count(*) FROM line") == [(many,)]
    assert rows(tmp_path / "copy.sqlite3", "PRAGMA integrity_check") == [("ok",)]


def test_nobody_else_can_read_what_a_compaction_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of a store may be open to others; its files are not, whatever the umask."""
    database = make_store(tmp_path).folder.database
    modes = []
    connect = sqlite3.connect

    def noted(path: Path, **options: Any) -> sqlite3.Connection:
        modes.extend(stat.S_IMODE(one.stat().st_mode) for one in tmp_path.glob("*.compact*"))
        return connect(path, **options)

    monkeypatch.setattr(sqlite3, "connect", noted)
    before = os.umask(0)
    try:
        compact(database)
    finally:
        os.umask(before)
    assert set(modes) == {0o600}


def test_a_copy_tells_what_it_holds(tmp_path: Path) -> None:
    made = make_store(tmp_path / "data")
    snapshot(made.folder.database, tmp_path / "copy.sqlite3")

    facts = facts_of(tmp_path / "copy.sqlite3")

    assert (facts.epoch, facts.holder) == (made.epoch, "leader-1")
    assert facts.jobs == {"PENDING": 1, "RUNNING": 1, "SUCCEEDED": 1}
    assert facts.migrations[0] == "0001_initial"
    assert sorted(place.generation for place in blobs_of(tmp_path / "copy.sqlite3")) == [0, 2]


# ---------------------------------------------------------------------------------------------------- the new life


def test_the_epoch_is_above_any_that_the_lost_life_can_have_reached(lives: Lives) -> None:
    lives.copy()

    new = lives.lose_and_restore()

    assert new.epoch > EPOCH_STEP
    with pytest.raises(StaleEpoch):
        new.store.reap(epoch=lives.old.epoch + 1)


def test_each_restore_raises_the_epoch_again(lives: Lives, tmp_path: Path) -> None:
    lives.copy()
    first = begin_new_life(tmp_path / "new.sqlite3", now=0.0, present=None).epoch

    second = begin_new_life(tmp_path / "new.sqlite3", now=0.0, present=None).epoch

    assert (first, second) == (EPOCH_STEP, 2 * EPOCH_STEP)


def test_an_attempt_from_before_the_copy_is_fenced(lives: Lives) -> None:
    grant = lives.old.running("job")
    lives.copy()

    new = lives.lose_and_restore()

    assert new.store.renew([new.claim(grant)]) == [LeaseStatus.LOST]
    assert new.finish(grant, result=b"late").answer is ReportStatus.FENCED
    assert new.job("job").state is State.PENDING


def test_an_attempt_from_after_the_copy_is_fenced(lives: Lives) -> None:
    lives.old.add("job")
    lives.copy()
    grant = lives.old.take("job")

    new = lives.lose_and_restore()
    again = new.take("job")

    assert new.finish(grant, result=b"late").answer is ReportStatus.FENCED
    assert new.finish(again, result=b"new").answer is ReportStatus.RECORDED
    assert new.job("job").outcome.result == b"new"


@pytest.mark.parametrize("ended", [False, True], ids=["waiting", "requeued"])
def test_no_attempt_number_is_given_twice(lives: Lives, ended: bool) -> None:
    if ended:
        lives.old.ended("job", "SUCCEEDED")
    else:
        lives.old.add("job")
    lives.copy()
    if ended:
        lives.old.store.requeue(["job"], actor="alice")
    in_lost_life = lives.old.take("job").attempt

    new = lives.lose_and_restore()
    if ended:
        new.store.requeue(["job"], actor="alice")

    assert new.take("job").attempt == ATTEMPT_STEP + 1 > in_lost_life


def test_a_job_that_has_ended_keeps_the_attempt_that_made_its_result(lives: Lives) -> None:
    lives.old.ended("job", "SUCCEEDED")
    lives.copy()

    new = lives.lose_and_restore()

    assert (new.job("job").attempt, new.job("job").state) == (1, State.SUCCEEDED)


def test_a_running_job_waits_until_its_old_worker_has_stopped_and_costs_no_loss(lives: Lives) -> None:
    lives.old.running("job")
    lives.copy()
    new = lives.lose_and_restore()

    lives.clock.advance(LEASE_TTL_S + LEASE_MARGIN_S - 0.1)
    new.store.promote(epoch=new.epoch)
    early = new.lease()
    lives.clock.advance(0.2)
    new.store.promote(epoch=new.epoch)
    (grant,) = new.lease()

    assert early == []
    assert grant.job_id == "job"
    assert new.job("job").losses == 0
    assert [incident.kind for incident in new.store.incidents("job")] == ["restored"]


def test_a_job_that_its_worker_keeps_waits_for_the_grace_too(lives: Lives) -> None:
    lives.old.running("job", lease=KEEP)
    lives.copy()
    new = lives.lose_and_restore()

    lives.clock.advance(LEASE_TTL_S + LEASE_MARGIN_S + KEEP["reconnect_grace_s"] - 0.1)
    early = new.store.promote(epoch=new.epoch)
    lives.clock.advance(0.2)

    assert (early, new.store.promote(epoch=new.epoch)) == (0, 1)


def test_an_orphaned_job_waits_for_nobody_and_its_late_finish_is_fenced(lives: Lives) -> None:
    grant = lives.old.orphaned("job")
    lives.copy()

    new = lives.lose_and_restore()

    assert new.finish(grant).answer is ReportStatus.FENCED
    assert [again.job_id for again in new.lease()] == ["job"]


def test_a_job_whose_cancel_was_asked_for_is_canceled(lives: Lives) -> None:
    lives.old.running("job")
    lives.old.store.cancel(["job"], actor="alice")
    lives.copy()

    new = lives.lose_and_restore()

    job = new.job("job")
    assert (job.state, job.outcome.error_code) == (State.CANCELED, "CANCELED")
    assert new.lease() == []


def test_what_had_ended_is_as_it_was(lives: Lives) -> None:
    grant = lives.old.running("job")
    lives.old.finish(grant, result=b"the result", exit_code=0)
    before = lives.old.job("job")
    lives.copy()

    after = lives.lose_and_restore().job("job")

    assert (after.state, after.outcome, after.finished_at) == (before.state, before.outcome, before.finished_at)


def test_the_counters_are_true(lives: Lives) -> None:
    lives.old.ended("done", "SUCCEEDED")
    lives.old.running("runs")
    lives.old.add("waits")
    lives.copy()

    counts = lives.lose_and_restore().store.counts()["render"]

    assert (counts.pending, counts.active, counts.succeeded) == (2, 0, 1)


def test_blobs_whose_bytes_did_not_come_along_are_forgotten(tmp_path: Path) -> None:
    made = make_store(tmp_path / "data")
    unused = add_blob(made.folder, b"nobody refers to this", "", "")
    here = [(place.sha256, place.generation) for place in blobs_of(made.folder.database)]

    life = begin_new_life(made.folder.database, now=0.0, present=[*here, ("f" * 64, 0)])

    assert life.unknown_blobs == (("f" * 64, 0),)
    kept = rows(made.folder.database, "SELECT sha256, generation FROM tasuki_blob")
    assert sorted(kept) == sorted(here)
    assert unused not in dict(kept)


# ---------------------------------------------------------------------------------------------------- what is refused


def test_a_copy_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    made = make_store(tmp_path / "data")
    with closing(sqlite3.connect(made.folder.database)) as connection, connection:
        connection.execute("INSERT INTO django_migrations (app, name, applied) VALUES ('tasuki', '9999_later', '2099-01-01')")

    with pytest.raises(InvalidInput, match="9999_later"):
        check_copy(made.folder.database)


def test_a_damaged_copy_is_refused(tmp_path: Path) -> None:
    made = make_store(tmp_path / "data")
    whole = made.folder.database.read_bytes()
    made.folder.database.write_bytes(whole[:8192] + b"\xff" * 4096 + whole[12288:])

    with pytest.raises(Corrupt):
        check_copy(made.folder.database)


def test_a_database_of_somebody_else_is_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "other.sqlite3")) as connection:
        connection.execute("CREATE TABLE line (text)")

    with pytest.raises(Corrupt, match="not a store of tasuki"):
        check_copy(tmp_path / "other.sqlite3")


def test_a_copy_with_a_trigger_is_refused(tmp_path: Path) -> None:
    made = make_store(tmp_path / "data")
    shutil.copy(made.folder.database, tmp_path / "copy.sqlite3")
    with closing(sqlite3.connect(tmp_path / "copy.sqlite3")) as connection:
        connection.execute("CREATE TRIGGER evil AFTER INSERT ON tasuki_token BEGIN DELETE FROM tasuki_jobrun; END")

    with pytest.raises(Corrupt, match="not a store of tasuki"):
        check_copy(tmp_path / "copy.sqlite3")
