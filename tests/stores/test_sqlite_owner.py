"""One SQLite file: one owner, a local disk, and what a restart finds."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tasuki.core.job import Outcome, State
from tasuki.core.lifecycle import LEASE_MARGIN_S
from tasuki.core.store_messages import Filter, HeldLease, LeaseRequest, LeaseStatus, Report, ReportStatus
from tasuki.errors import ConfigError, Unavailable
from tasuki.stores.sql.sqlite import file_system_of
from tasuki.stores.sql.store import SqlStore
from tasuki.testing.clocks import FakeClock
from tests.stores.steps import submission


def request(limit: int = 1, **fields: object) -> LeaseRequest:
    return LeaseRequest(worker_id="w1", incarnation="w1/1", patterns=(">",), limit=limit, **fields)  # type: ignore[arg-type]


def asked(store: SqlStore, statement: str) -> list[tuple[object, ...]]:
    """A statement of the test's own on the store's connection."""
    return store._database.connection.execute(statement).fetchall()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tasuki.sqlite3"


def test_a_second_owner_in_this_process_is_refused_until_the_first_closes(path: Path) -> None:
    first = SqlStore.open_sqlite(path)

    with pytest.raises(Unavailable, match="in use"):
        SqlStore.open_sqlite(path)

    first.close()
    SqlStore.open_sqlite(path).close()


def test_a_second_owner_is_told_the_pid_of_the_first(path: Path) -> None:
    script = "import sys, pathlib; from tasuki.stores.sql.store import SqlStore\n"
    script += "store = SqlStore.open_sqlite(pathlib.Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"open\n"

        with pytest.raises(Unavailable, match=f"pid {owner.pid} "):
            SqlStore.open_sqlite(path)

        owner.kill()
        owner.wait(10)
    SqlStore.open_sqlite(path).close()  # the kernel gave the dead owner's lock back


def test_a_link_to_the_file_is_no_second_door(path: Path, tmp_path: Path) -> None:
    store = SqlStore.open_sqlite(path)
    (tmp_path / "link.sqlite3").symlink_to(path)

    with pytest.raises(Unavailable, match="in use"):
        SqlStore.open_sqlite(tmp_path / "link.sqlite3")

    store.close()


def test_only_this_user_can_read_the_file(path: Path) -> None:
    SqlStore.open_sqlite(path).close()

    assert path.stat().st_mode & 0o777 == 0o600


def test_the_lock_is_not_inherited_by_the_jobs_that_the_owner_starts(path: Path) -> None:
    store = SqlStore.open_sqlite(path)
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, close_fds=False)
    store.close()

    SqlStore.open_sqlite(path).close()

    child.communicate(timeout=10)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "fuse.sshfs"])
def test_network_file_systems_are_refused(path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"network file system \\({kind}\\)"):
        SqlStore.open_sqlite(path, file_system=lambda _path: kind)

    assert not path.exists()


def test_the_file_system_is_read_from_the_kernels_table() -> None:
    assert file_system_of(Path("/proc/self")) == "proc"
    assert file_system_of(Path("/")) not in ("unknown", "proc")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")

    with pytest.raises(ConfigError, match=r"cannot keep a database at .*/file/tasuki\.sqlite3"):
        SqlStore.open_sqlite(tmp_path / "file" / "tasuki.sqlite3")


def test_a_file_that_is_no_database_is_refused_and_given_back(path: Path) -> None:
    path.write_bytes(b"certainly not a database" * 1000)

    with pytest.raises(ConfigError, match="not a database"):
        SqlStore.open_sqlite(path)

    path.unlink()
    SqlStore.open_sqlite(path).close()  # the refused attempt holds no lock


def test_commits_are_durable_and_the_journal_is_a_wal(path: Path) -> None:
    store = SqlStore.open_sqlite(path)

    settings = {name: asked(store, f"PRAGMA {name}")[0][0] for name in ("journal_mode", "synchronous", "mmap_size")}

    assert settings == {"journal_mode": "wal", "synchronous": 2, "mmap_size": 0}
    store.close()


def test_live_leases_outlive_a_restart_on_a_clock_that_began_again(path: Path) -> None:
    clock = FakeClock(lease=50_000.0)
    store = SqlStore.open_sqlite(path, clock=clock)
    assert store.take_over("server-1", 1)
    store.submit([submission("a")])
    [[grant]] = store.lease([request(ttl_s=15.0)])
    store.close()

    clock = FakeClock(lease=10.0)  # the machine was restarted: CLOCK_BOOTTIME counts from 0 again
    store = SqlStore.open_sqlite(path, clock=clock)
    assert store.take_over("server-2", 2)

    assert store.next_due() == (10.0 + 15.0 + LEASE_MARGIN_S, None)
    assert store.reap(epoch=2) == []
    claim = HeldLease("a", "w1", "w1/1", grant.lease_id, grant.attempt)
    assert store.start([claim]) == [LeaseStatus.GO_ON]
    clock.advance(15.0 + LEASE_MARGIN_S)
    assert [reaped.job_id for reaped in store.reap(epoch=2)] == ["a"]
    store.close()


def test_results_and_counters_are_there_after_a_restart(path: Path) -> None:
    store = SqlStore.open_sqlite(path)
    store.submit([submission("a"), submission("b")])
    [[grant]] = store.lease([request()])
    outcome = Outcome(exit_code=0, result=b"zip", meta={"host": "n1", "seconds": 0.5}, message="fine")
    [recorded] = store.finish([Report("a", "w1", grant.lease_id, 1, outcome, started_at=5.0)])
    assert recorded.answer is ReportStatus.RECORDED
    before = (store.get(["a", "b"]), store.counts())
    store.close()

    store = SqlStore.open_sqlite(path)

    assert (store.get(["a", "b"]), store.counts()) == before
    [job] = store.get(["a"])
    assert job is not None
    assert job.outcome == outcome
    store.close()


def test_a_reader_in_another_thread_sees_commits_and_cannot_write(path: Path) -> None:
    store = SqlStore.open_sqlite(path)
    seen: dict[str, object] = {}

    def read() -> None:
        reader = store.reader()
        try:
            with store.turn():  # the writer is in the middle of something: readers neither wait nor see it
                store.submit([submission("unfinished")])
                seen["during"] = [job.job_id for job in reader.find(Filter()).jobs]
            seen["after"] = [job.job_id for job in reader.find(Filter(states=(State.PENDING,))).jobs]
            seen["counts"] = reader.counts()["render"].pending
            seen["ahead"] = reader.ready_ahead("unfinished")
            with pytest.raises(Unavailable, match="readonly"):
                reader._select("revoke_token", ("a", 0.0, "x"))
        finally:
            reader.close()

    store.submit([submission("a")])
    thread = threading.Thread(target=read)
    thread.start()
    thread.join(20)

    assert seen == {"during": ["a"], "after": ["unfinished", "a"], "counts": 2, "ahead": 1}
    store.close()
