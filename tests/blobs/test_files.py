"""Durable writes, and part files that one process at a time fills."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from tasuki.blobs import files
from tasuki.blobs.files import PartFile, durable_write, replace_file


def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the calls that make a write durable, in their order."""
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        done.append("fsync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "fsync file")
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        done.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    return done


def test_a_durable_write_syncs_the_file_before_its_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"old")
    (tmp_path / ".token.new").write_bytes(b"left by a process that was killed")
    done = steps(monkeypatch)

    durable_write(path, b"new")

    assert done == ["fsync file", "rename", "fsync folder"]
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", 0o600)
    assert [found.name for found in tmp_path.iterdir()] == ["token"]


def test_a_file_that_is_replaced_is_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = steps(monkeypatch)

    replace_file(tmp_path / "status", b"new")

    assert done == ["rename"]
    assert (tmp_path / "status").read_bytes() == b"new"


def test_a_durable_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"old")

    def broken(descriptor: int) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        durable_write(path, b"new")

    assert path.read_bytes() == b"old"


def test_a_part_file_is_one_owners_at_a_time_and_keeps_its_bytes_for_the_next(tmp_path: Path) -> None:
    path = tmp_path / "part"
    assert PartFile.claim(path, create=False) is None
    first = PartFile.claim(path)
    assert first is not None
    first.write(b"half")

    assert PartFile.claim(path) is None
    first.close()
    with PartFile.claim(path) or pytest.fail("it is locked") as second:
        found = bytearray()
        assert second.read_into(found.extend) == 4
        second.write(b"whole")
        second.publish(tmp_path / "target")

    assert (found, (tmp_path / "target").read_bytes()) == (b"half", b"halfwhole")
    assert not path.exists()


def test_a_part_file_with_more_bytes_than_expected_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_bytes(b"too many")

    with PartFile.claim(path) or pytest.fail("it is locked") as part:
        assert part.read_into(lambda piece: pytest.fail("there is nothing to read"), max_bytes=3) == 0
        part.write(b"new")

    assert path.read_bytes() == b"new"


def test_a_file_that_was_published_while_it_was_opened_is_not_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "part"
    path.write_bytes(b"whole")
    monkeypatch.setattr(files.fcntl, "flock", lambda *lock: path.replace(tmp_path / "target") if path.exists() else None)

    assert PartFile.claim(path, create=False) is None
    assert (tmp_path / "target").read_bytes() == b"whole"


def test_discarding_leaves_a_file_of_the_same_name_that_is_another_transfers(tmp_path: Path) -> None:
    path = tmp_path / "part"
    part = PartFile.claim(path)
    assert part is not None
    path.unlink()
    path.write_bytes(b"another")

    part.discard()
    part.discard()

    assert path.read_bytes() == b"another"


def test_a_file_system_without_locks_is_not_taken_for_another_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*lock: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(files.fcntl, "flock", no_locks)

    with pytest.raises(OSError, match="no locks"):
        PartFile.claim(tmp_path / "part")


def test_what_comes_is_written_to_the_disk_meanwhile_also_behind_a_new_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, int]] = []
    advise = os.posix_fadvise

    def advised(descriptor: int, start: int, size_bytes: int, advice: int) -> None:
        begun.append((start, size_bytes))
        advise(descriptor, start, size_bytes, advice)

    monkeypatch.setattr(files, "WRITE_BACK_BYTES", 1000)
    monkeypatch.setattr(os, "posix_fadvise", advised)
    with PartFile.create(tmp_path / "part") as part:
        for piece in (b"a" * 900, b"b" * 300, b"c" * 900):
            part.write(piece)
        part.truncate()
        for piece in (b"d" * 900, b"e" * 200):
            part.write(piece)
        part.publish(tmp_path / "whole")

    assert begun == [(0, 1200), (0, 1100)]
    assert (tmp_path / "whole").read_bytes() == b"d" * 900 + b"e" * 200
