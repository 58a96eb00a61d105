"""Backup and restore of a data folder without a server: all of it comes back, or nothing changes, wherever it is killed."""

import errno
import io
import os
import signal
import sqlite3
import subprocess
import sys
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from tasuki.blobs.folder import FolderBlobs
from tasuki.config import DataFolder
from tasuki.core.lifecycle import EPOCH_STEP
from tasuki.core.store_messages import ReportStatus
from tasuki.errors import ConfigError, Corrupt, DiskFull, InvalidInput, NotFound, TasukiError, Unavailable
from tasuki.server.archive import ArchiveWriter
from tasuki.server.backup import back_up, check_backup, finish_publishing, prepare_folder, restore
from tasuki.stores.sql import sqlite_backup
from tests.support.backups import AGAIN, LARGE, Made, add_blob, make_store, opened, rows

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make_store(tmp_path / "data")


@pytest.fixture
def backup(made: Made, tmp_path: Path) -> Path:
    back_up(made.folder, tmp_path / "backup.tar")
    return tmp_path / "backup.tar"


def contents(root: Path) -> dict[str, bytes]:
    """All files below a folder, but for the lock that every look at a store leaves."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.endswith((".owner", "-shm", "-wal"))
    }


def assert_whole(folder: DataFolder, made: Made) -> None:
    """The store of `make_store`, in its second life."""
    prepare_folder(folder)  # as every server does first
    blobs = FolderBlobs(folder.blobs, max_blob_bytes=2**30, floor_free_bytes=0)
    bytes_by_generation = {
        generation: b"".join(blobs.open(sha256, generation=generation))
        for sha256, generation in rows(folder.database, "SELECT sha256, generation FROM tasuki_blob")
    }
    stage = opened(folder.database)
    assert stage.epoch > EPOCH_STEP
    assert stage.finish(made.running).answer is ReportStatus.FENCED
    assert stage.job("done").outcome.message == "all good"
    stage.store.close()
    assert bytes_by_generation == {0: LARGE, 2: AGAIN}


# ---------------------------------------------------------------------------------------------------- backup


def test_a_backup_is_for_its_owner_alone_and_leaves_nothing_beside_it(backup: Path, tmp_path: Path) -> None:
    assert backup.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup.tar", "data"]


def test_a_backup_has_what_jobs_refer_to_and_no_more(made: Made, tmp_path: Path) -> None:
    unused = add_blob(made.folder, b"nobody refers to this", "", "")
    condemned = add_blob(made.folder, b"this is being deleted", "done", "in", condemned=1)

    manifest = back_up(made.folder, tmp_path / "backup.tar")

    assert {unused, condemned}.isdisjoint(sha256 for sha256, _, _ in manifest.blobs)
    assert sorted(generation for _, generation, _ in manifest.blobs) == [0, 2]
    with tarfile.open(tmp_path / "backup.tar") as archive:
        assert not [name for name in archive.getnames() if "token" in name]


def test_a_blob_that_is_gone_or_damaged_is_named_and_the_rest_is_saved(made: Made, tmp_path: Path) -> None:
    gone = add_blob(made.folder, b"gone", "done", "in")
    damaged = add_blob(made.folder, b"damaged", "done", "in")
    (made.folder.blobs / gone[:2] / gone[2:]).unlink()
    (made.folder.blobs / damaged[:2] / damaged[2:]).write_bytes(b"DAMAGED")

    manifest = back_up(made.folder, tmp_path / "backup.tar")

    assert sorted(manifest.missing) == sorted([(gone, 0), (damaged, 0)])
    assert len(check_backup(tmp_path / "backup.tar").blobs) == 2


def test_a_blob_that_was_collected_meanwhile_leads_to_a_newer_copy(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = add_blob(made.folder, b"collected", "done", "in")
    take, taken = sqlite_backup.snapshot, []

    def snapshot_and_collect(*arguments: object) -> None:
        """The server prunes right after the first copy was taken."""
        take(*arguments)  # type: ignore[arg-type]
        taken.append(1)
        if len(taken) == 1:
            (made.folder.blobs / sha256[:2] / sha256[2:]).unlink()
            forget(made.folder.database, sha256)

    monkeypatch.setattr(sqlite_backup, "snapshot", snapshot_and_collect)

    manifest = back_up(made.folder, tmp_path / "backup.tar")

    assert len(taken) == 2
    assert manifest.missing == []
    assert sha256 not in [blob for blob, _, _ in manifest.blobs]


def forget(database: Path, sha256: str) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("DELETE FROM tasuki_jobblob WHERE sha256 = ?", (sha256,))
        connection.execute("DELETE FROM tasuki_blob WHERE sha256 = ?", (sha256,))


def test_a_backup_that_fails_leaves_the_one_before(made: Made, backup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = backup.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(ArchiveWriter, "close", full)
    with pytest.raises(DiskFull):
        back_up(made.folder, backup)

    assert backup.read_bytes() == before
    assert sorted(path.name for path in backup.parent.iterdir()) == ["backup.tar", "data"]


def test_a_folder_without_a_store_is_not_backed_up(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="pg_dump"):
        back_up(DataFolder(tmp_path / "empty"), tmp_path / "backup.tar")

    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------- restore


def test_a_restored_store_is_whole_and_begins_a_new_life(made: Made, backup: Path, tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "new")

    restored = restore(backup, folder)

    assert restored.epoch == EPOCH_STEP
    assert (restored.given_back, restored.canceled, restored.replaced) == (1, 0, None)
    assert not (folder.root / "restoring").exists()
    assert_whole(folder, made)


def test_without_blobs_their_rows_stay_for_the_bytes_to_be_brought_back(made: Made, tmp_path: Path) -> None:
    back_up(made.folder, tmp_path / "backup.tar", with_blobs=False)
    folder = DataFolder(tmp_path / "new")

    restore(tmp_path / "backup.tar", folder)
    assert not folder.blobs.exists()
    made.folder.blobs.rename(folder.blobs)

    assert_whole(folder, made)


def test_a_store_that_is_there_is_not_touched(made: Made, backup: Path) -> None:
    before = contents(made.folder.root)

    with pytest.raises(ConfigError, match="--force"):
        restore(backup, made.folder)

    assert contents(made.folder.root) == before


def test_a_store_in_use_is_not_touched_even_by_force(made: Made, backup: Path) -> None:
    stage = opened(made.folder.database)
    try:
        with pytest.raises(Unavailable, match="in use by another process"):
            restore(backup, made.folder, force=True)
    finally:
        stage.store.close()

    assert not (made.folder.root / "restoring").exists()


def test_by_force_the_store_that_is_there_is_moved_aside_whole(made: Made, backup: Path) -> None:
    before = contents(made.folder.root)

    restored = restore(backup, made.folder, force=True)

    assert restored.replaced is not None
    assert contents(Path(restored.replaced)) == before
    assert_whole(made.folder, made)


# ---------------------------------------------------------------------------------------------------- bad archives


def changed(backup: Path, at: int) -> bytes:
    whole = bytearray(backup.read_bytes())
    whole[at] ^= 1
    return bytes(whole)


def without(backup: Path, start: str) -> bytes:
    """The archive without the members of that name."""
    made = io.BytesIO()
    with tarfile.open(backup) as archive, tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as less:
        for member in archive:
            if not member.name.startswith(start):
                less.addfile(member, archive.extractfile(member))
    end = made.getvalue().rstrip(b"\0")
    return end + bytes(-len(end) % 512) + bytes(1024)


BAD = {
    "cut off": (lambda backup: backup.read_bytes()[:-2000], Corrupt),
    "a blob changed": (lambda backup: changed(backup, 600), Corrupt),
    "the database changed": (lambda backup: changed(backup, backup.read_bytes().index(b"SQLite format 3") + 5000), Corrupt),
    "without the database": (lambda backup: without(backup, "tasuki"), Corrupt),
    "without the blobs": (lambda backup: without(backup, "blobs"), Corrupt),
    "without the manifest": (lambda backup: without(backup, "manifest"), Corrupt),
    "another file": (lambda backup: b"#!/bin/sh\n" * 1000, InvalidInput),
    "empty": (lambda backup: b"", InvalidInput),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_archive_changes_nothing(name: str, made: Made, backup: Path) -> None:
    damage, kind = BAD[name]
    backup.write_bytes(damage(backup))
    before = contents(made.folder.root)

    with pytest.raises(kind):
        check_backup(backup)
    with pytest.raises(kind):
        restore(backup, made.folder, force=True)

    assert contents(made.folder.root) == before
    assert not (made.folder.root / "restoring").exists()


@pytest.mark.parametrize("name", ["nowhere.tar", "."])
def test_a_backup_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(TasukiError, match=r"cannot be read|is a folder"):
        restore(tmp_path / name, DataFolder(tmp_path / "new"))


# ---------------------------------------------------------------------------------------------------- killed

BEFORE = ["restore.unpacked", "restore.staged"]
AFTER = ["restore.decided", *(f"restore.moved:{n}" for n in (1, 2, 3, 4)), "restore.published"]


def killed_at(point: str, backup: Path, root: Path) -> None:
    """A real process restores by force, and kills itself there."""
    done = subprocess.run(
        [sys.executable, "-m", "tasuki", "restore", str(backup), "--data", str(root), "--force"],
        env={**os.environ, "TASUKI_FAULT": point, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("point", BEFORE)
def test_killed_before_it_was_decided_it_changed_nothing(point: str, made: Made, backup: Path) -> None:
    before = contents(made.folder.root)

    killed_at(point, backup, made.folder.root)

    assert not finish_publishing(made.folder)
    assert {name: data for name, data in contents(made.folder.root).items() if not name.startswith("restoring/")} == before
    restore(backup, made.folder, force=True)
    assert_whole(made.folder, made)


@pytest.mark.parametrize("point", AFTER)
def test_killed_after_it_was_decided_it_is_whole_for_whoever_comes_next(point: str, made: Made, backup: Path) -> None:
    before = contents(made.folder.root)

    killed_at(point, backup, made.folder.root)
    prepare_folder(made.folder)

    (aside,) = made.folder.root.glob("replaced-*")
    assert contents(aside) == before
    assert_whole(made.folder, made)
