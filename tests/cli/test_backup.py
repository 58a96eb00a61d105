"""`tasuki backup` and `tasuki restore` as an operator uses them: a server with work in hand is lost, and comes back."""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tasuki.cli.output import ExitCode
from tasuki.core.job import Outcome
from tasuki.core.lifecycle import ATTEMPT_STEP, EPOCH_STEP
from tasuki.core.protocol import AssignJobs, Ending, GiveCredit, Heartbeat, JobsFinished, JobsRecorded, Message
from tests.cli.commands import User
from tests.doors.raw import RawPeer
from tests.support.backups import add_blob, make_store, rows
from tests.support.processes import ServerProcess, start_server, start_worker

pytestmark = pytest.mark.e2e

LARGE_BYTES = 300 * 1024  # above what is stored in the row itself
LEASE_TTL_S = 2.0
SOON_S = 20.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with start_server(tmp_path, "--lease-ttl", str(LEASE_TTL_S)) as started:
        yield started


def epoch_of(server: ServerProcess) -> int:
    [(epoch,)] = rows(server.folder.database, "SELECT max(epoch) FROM tasuki_scopeepoch")
    return int(epoch)


def await_message(peer: RawPeer, kind: type[Message]) -> Message:
    while not isinstance(message := peer.receive(SOON_S), kind):
        assert message is not None, f"the server hung up instead of sending {kind.__name__}"
    return message


def test_a_lost_server_comes_back_from_a_backup_that_was_made_while_it_worked(server: ServerProcess, tmp_path: Path) -> None:
    operator, backup, worker_token = User(tmp_path, server.data), tmp_path / "backup.tar", server.create_token("worker")
    large = {"subject": "big", "payload": str(LARGE_BYTES).encode(), "job_id": "done"}
    running = {"subject": "echo.held", "payload": b"again", "job_id": "runs"}
    waiting = {"subject": "math.square", "payload": b"7", "job_id": "waits"}

    # given a finished job with a blob, one that a worker has, one that waits; and a backup, made while the server runs
    with server.client() as client:
        with start_worker(server):
            result = client.submit(**large).result(SOON_S)
        with RawPeer(server.url).as_worker(worker_token, worker_id="old", patterns=("echo.held",)) as peer:
            peer.send(GiveCredit(1))
            client.submit(**running)
            (grant,) = await_message(peer, AssignJobs).grants
            client.submit(**waiting)
            made = operator.json("backup", str(backup), "--json")
    epoch = epoch_of(server)

    # when the server and its folder are lost, and the backup is restored
    server.kill()
    shutil.rmtree(server.data)
    restored = operator.json("restore", str(backup), "--json")
    server.restart()

    # then the attempt of the old life is refused
    with RawPeer(server.url).as_worker(worker_token, worker_id="old", patterns=("echo.held",)) as peer:
        refused = JobsFinished([Ending("runs", grant.lease_id, grant.attempt, Outcome(result=b"late", result_sha256="0" * 64))])
        peer.send(Heartbeat(peer.next_id()), refused)
        assert [lease_id for lease_id, _ in await_message(peer, JobsRecorded).fenced] == [grant.lease_id]

    # and what had ended is there to the byte, and what had not ends in the new life
    assert (made["blobs"], made["missing"], made["jobs"]["SUCCEEDED"], restored["given_back"]) == (1, [], 1, 1)
    assert epoch < EPOCH_STEP < epoch_of(server)
    with start_worker(server), server.client() as client:
        assert client.submit(**large).result(SOON_S) == result
        assert client.submit(**running).result(SOON_S) == b"again"
        assert client.submit(**waiting).result(SOON_S) == b"49"
        assert client.status("runs").attempt == ATTEMPT_STEP + 1
        assert client.status("runs").losses == 0


def test_a_backup_can_be_checked_and_only_that(tmp_path: Path) -> None:
    operator = User(tmp_path)
    make_store(operator.data)
    operator.json("backup", "backup.tar", "--json")

    told = operator.run("restore", "--check", "backup.tar", "--data", str(tmp_path / "new"))

    assert "backup.tar is whole: 3 jobs and 2 blobs" in told.stdout
    assert not (tmp_path / "new").exists()


def test_a_backup_that_lacks_a_blob_is_made_and_says_so(tmp_path: Path) -> None:
    operator = User(tmp_path)
    made = make_store(operator.data)
    gone = add_blob(made.folder, b"gone", "done", "in")
    (made.folder.blobs / gone[:2] / gone[2:]).unlink()

    told = operator.run("backup", "backup.tar")

    assert (told.returncode, "1 blobs that jobs refer to are gone" in told.stderr) == (ExitCode.FAILED, True)
    assert operator.json("restore", "--check", "backup.tar", "--json")["missing"] == [gone]


def test_a_restore_over_a_running_server_is_refused(server: ServerProcess, tmp_path: Path) -> None:
    operator = User(tmp_path, server.data)
    operator.json("backup", "backup.tar", "--json")

    told = operator.run("restore", "backup.tar", "--force")

    assert told.returncode == ExitCode.UNAVAILABLE
    assert f"in use by another process (pid {server.pid} " in told.stderr


def test_a_compaction_gives_unused_space_back_and_leaves_all_jobs(tmp_path: Path) -> None:
    # given: a store with the space of things that were deleted
    operator = User(tmp_path)
    database = make_store(operator.data).folder.database
    jobs = rows(database, "SELECT * FROM tasuki_jobrun")
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE bulk AS SELECT zeroblob(3000000)")
        connection.execute("DROP TABLE bulk")
    unused = next(found for found in operator.json("doctor", "--json") if found["check"] == "database")["message"]

    # when
    told = operator.json("compact", "--json")

    # then
    assert "2.9 MiB of it unused" in unused
    assert told["before_bytes"] > 3_000_000 > told["after_bytes"] == database.stat().st_size
    assert rows(database, "SELECT * FROM tasuki_jobrun") == jobs
    assert rows(database, "PRAGMA integrity_check") == [("ok",)]


def test_a_compaction_beside_a_running_server_is_refused(server: ServerProcess, tmp_path: Path) -> None:
    told = User(tmp_path, server.data).run("compact")

    assert told.returncode == ExitCode.UNAVAILABLE
    assert f"in use by another process (pid {server.pid} " in told.stderr


def test_a_compaction_needs_a_store(tmp_path: Path) -> None:
    assert "there is no store in" in User(tmp_path).run("compact").stderr
