"""The journal of a SQLite store is made longer than it needs to be, and nothing else of it shows."""

from __future__ import annotations

from pathlib import Path

from tasuki.core.job import JobSpec
from tasuki.core.store_messages import Filter, Submission
from tasuki.stores.sql.store import SqlStore

MB = 1024 * 1024


def test_the_journal_is_stretched_and_the_store_is_empty(tmp_path: Path) -> None:
    store = SqlStore.open_sqlite(tmp_path / "tasuki.db", stretch_bytes=4 * MB)
    journal = tmp_path / "tasuki.db-wal"
    stretched_bytes = journal.stat().st_size

    store.submit([Submission(JobSpec(job_id="a"), "someone", b"hash")])
    store.close()

    assert 4 * MB <= stretched_bytes < 6 * MB
    assert not journal.exists()
    assert (tmp_path / "tasuki.db").stat().st_size < MB  # the filler never reached it


def test_what_is_committed_after_the_stretch_survives_a_process_that_never_closed(tmp_path: Path) -> None:
    """The next owner finds the commits, as after SIGKILL, and behind them filler that counts for nothing."""
    store = SqlStore.open_sqlite(tmp_path / "tasuki.db", stretch_bytes=4 * MB)
    store.submit([Submission(JobSpec(job_id="a"), "someone", b"hash")])
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("tasuki.db", "tasuki.db-wal"):
        (copy / name).write_bytes((tmp_path / name).read_bytes())
    store.close()

    again = SqlStore.open_sqlite(copy / "tasuki.db")

    assert [job.spec.job_id for job in again.find(Filter()).jobs] == ["a"]
    again.close()
