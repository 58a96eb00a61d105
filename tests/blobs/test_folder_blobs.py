"""Blobs in a folder: layout, crashes, full disks, damaged files, many writers at once."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tasuki.blobs
from tasuki.blobs import folder
from tasuki.blobs.blob import CHUNK_BYTES
from tasuki.blobs.folder import FREE_CHECK_BYTES, TEMPORARY_GRACE_S, FolderBlobs
from tasuki.errors import Corrupt, DiskFull, NotFound
from tests.blobs.blob_writer import Step, SteppedBlobs

WRITER = Path(__file__).with_name("blob_writer.py")
MIB = 1024 * 1024


def open_blobs(root: Path, **changes: Any) -> FolderBlobs:
    return FolderBlobs(root, **{"max_blob_bytes": 2**30, "floor_free_bytes": 0, **changes})


def open_stepped(root: Path, on_step: Callable[[Step], None]) -> FolderBlobs:
    return SteppedBlobs(root, on_step=on_step, max_blob_bytes=2**30, floor_free_bytes=0)


def path_of(root: Path, sha256: str) -> Path:
    return root / sha256[:2] / sha256[2:]


def temporary_names(root: Path) -> list[str]:
    return [path.name for path in (root / "tmp").iterdir()]


def run_writer(*arguments: object, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    source = Path(tasuki.blobs.__file__).parents[2]
    return subprocess.run(
        [*before, sys.executable, str(WRITER), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def written_content(size_bytes: int) -> bytes:
    """The bytes that blob_writer.py writes."""
    chunks = range(0, size_bytes, CHUNK_BYTES)
    return b"".join(bytes([start // CHUNK_BYTES % 256]) * min(CHUNK_BYTES, size_bytes - start) for start in chunks)


# Layout


def test_a_blob_lies_at_its_hash_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path / "blobs")
    ref = blobs.put_bytes(b"data")
    path = path_of(tmp_path / "blobs", ref.sha256)
    assert blobs.local_path(ref.sha256) == path
    assert path.read_bytes() == b"data"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "blobs").stat().st_mode) == 0o700


def test_a_later_generation_lies_beside_the_first(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path)
    ref = blobs.put_bytes(b"data")
    blobs.put_bytes(b"data", generation=7)
    first = path_of(tmp_path, ref.sha256)
    assert blobs.local_path(ref.sha256, 7) == first.with_name(f"{first.name}.7")
    assert sorted(path.name for path in first.parent.iterdir()) == [first.name, f"{first.name}.7"]


def test_a_blob_survives_reopening(tmp_path: Path) -> None:
    ref = open_blobs(tmp_path).put_bytes(b"data")
    assert open_blobs(tmp_path).read_bytes(ref.sha256, 4) == b"data"


@pytest.mark.parametrize("ending", ["commit", "abort", "corrupt"])
def test_no_ending_leaves_a_temporary_file(tmp_path: Path, ending: str) -> None:
    blobs = open_blobs(tmp_path)
    writer = blobs.begin(size_bytes=9 if ending == "corrupt" else None)
    writer.write(b"data")
    if ending == "corrupt":
        with pytest.raises(Corrupt):
            writer.commit()
    else:
        getattr(writer, ending)()
    assert temporary_names(tmp_path) == []


def test_an_equal_blob_is_not_rewritten(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path)
    ref = blobs.put_bytes(b"data")
    before = path_of(tmp_path, ref.sha256).stat()
    assert blobs.put_bytes(b"data") == ref
    assert path_of(tmp_path, ref.sha256).stat().st_ino == before.st_ino


# Damage


@pytest.mark.parametrize("position", [0, CHUNK_BYTES, 3 * CHUNK_BYTES - 1])
def test_one_changed_byte_is_found_before_the_last_chunk_is_given(tmp_path: Path, position: int) -> None:
    blobs = open_blobs(tmp_path)
    ref = blobs.put_bytes(b"x" * (3 * CHUNK_BYTES))
    with path_of(tmp_path, ref.sha256).open("r+b") as file:
        file.seek(position)
        file.write(b"y")
    received: list[bytes] = []
    with blobs.open(ref) as reader, pytest.raises(Corrupt, match=ref.sha256):
        received.extend(reader)
    assert len(received) == 2


def test_a_truncated_blob_is_found_by_reference_and_by_hash(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path)
    ref = blobs.put_bytes(b"whole")
    os.truncate(path_of(tmp_path, ref.sha256), 0)
    with pytest.raises(Corrupt, match="0 bytes"):
        blobs.open(ref)
    with pytest.raises(Corrupt, match="delete it there and put it again"):
        blobs.read_bytes(ref.sha256, 100)


def test_a_file_cut_while_it_is_read_is_corrupt(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path)
    ref = blobs.put_bytes(b"x" * (3 * CHUNK_BYTES))
    with blobs.open(ref, offset=1) as reader:
        chunks = iter(reader)
        next(chunks)
        os.truncate(path_of(tmp_path, ref.sha256), 10)
        with pytest.raises(Corrupt, match="ends at byte"):
            list(chunks)


def test_a_blob_of_the_wrong_size_is_replaced_by_the_next_put(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path)
    ref = blobs.put_bytes(b"whole")
    os.truncate(path_of(tmp_path, ref.sha256), 2)
    blobs.put_bytes(b"whole")
    assert blobs.read_bytes(ref.sha256, 5) == b"whole"


# Sweeping


def test_opening_sweeps_old_temporary_files_and_no_young_ones(tmp_path: Path) -> None:
    open_blobs(tmp_path)
    old, young = tmp_path / "tmp" / "blob-old", tmp_path / "tmp" / "blob-young"
    for path, age_s in ((old, TEMPORARY_GRACE_S + 60), (young, TEMPORARY_GRACE_S - 60)):
        path.write_bytes(b"left behind")
        os.utime(path, (time.time() - age_s,) * 2)
    open_blobs(tmp_path)
    assert temporary_names(tmp_path) == ["blob-young"]


def test_a_second_process_that_opens_the_folder_leaves_a_running_upload_alone(tmp_path: Path) -> None:
    with open_blobs(tmp_path).begin() as writer:
        writer.write(b"still ")
        open_blobs(tmp_path)
        writer.write(b"here")
        ref = writer.commit()
    assert open_blobs(tmp_path).read_bytes(ref.sha256, 100) == b"still here"


def test_a_writer_whose_temporary_file_was_swept_says_so(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path)
    with blobs.begin() as writer:
        writer.write(b"slept too long")
        [name] = temporary_names(tmp_path)
        (tmp_path / "tmp" / name).unlink()
        with pytest.raises(NotFound, match="send the blob again"):
            writer.commit()


# Crashes


@pytest.mark.parametrize("step", list(Step))
def test_a_crash_between_any_two_steps_leaves_nothing_torn(tmp_path: Path, step: Step) -> None:
    data = written_content(3 * CHUNK_BYTES + 5)
    sha256 = hashlib.sha256(data).hexdigest()

    died = run_writer(tmp_path, len(data), "--kill-at", step)
    assert died.returncode == -signal.SIGKILL, died.stderr

    blobs = open_blobs(tmp_path)
    visible = step in (Step.RENAMED, Step.DURABLE)
    assert blobs.has(sha256) == visible
    if visible:
        assert blobs.read_bytes(sha256, len(data)) == data
    with blobs.begin(sha256, len(data)) as writer:
        writer.write(data)
        writer.commit()
    assert blobs.read_bytes(sha256, len(data)) == data


def test_file_and_folders_are_synced_in_the_order_that_makes_the_rename_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(tmp_path)
        happened.append("fsync " + str(path).split("-")[0])
        real_fsync(descriptor)

    blobs = open_stepped(tmp_path, happened.append)
    monkeypatch.setattr(os, "fsync", fsync)
    ref = blobs.put_bytes(b"data")
    prefix = ref.sha256[:2]
    assert happened == ["created", "written", "fsync tmp/blob", "synced", "renamed", f"fsync {prefix}", "fsync .", "durable"]

    happened.clear()
    blobs.put_bytes(b"data")
    assert happened == ["created", "written", f"fsync {prefix}", "durable"], "an equal blob may not be durable yet"


def test_after_a_failed_folder_sync_the_blob_there_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = open_blobs(tmp_path)

    def failing(path: Path) -> None:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(folder, "sync_folder", failing)
        with pytest.raises(OSError, match="input/output"):
            blobs.put_bytes(b"data")
    path = path_of(tmp_path, hashlib.sha256(b"data").hexdigest())
    doubtful_inode = path.stat().st_ino

    blobs.put_bytes(b"data")
    renewed_inode = path.stat().st_ino
    blobs.put_bytes(b"data")
    assert renewed_inode != doubtful_inode
    assert path.stat().st_ino == renewed_inode, "once durable it is not rewritten again"


# Full disks


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("step", [Step.SYNCED, Step.RENAMED])
def test_no_space_at_any_step_is_disk_full_and_leaves_no_temporary_file(tmp_path: Path, number: int, step: Step) -> None:
    def full(at: Step) -> None:
        if at is step:
            raise OSError(number, os.strerror(number))

    blobs = open_stepped(tmp_path, full)
    with pytest.raises(DiskFull) as caught:
        blobs.put_bytes(b"data")
    assert str(tmp_path) in str(caught.value)
    assert "Free space" in str(caught.value)
    assert temporary_names(tmp_path) == []


def test_other_errors_of_the_disk_are_not_called_full(tmp_path: Path) -> None:
    def broken(at: Step) -> None:
        if at is Step.SYNCED:
            raise OSError(errno.EIO, "input/output error")

    blobs = open_stepped(tmp_path, broken)
    with pytest.raises(OSError, match="input/output"):
        blobs.put_bytes(b"data")
    assert temporary_names(tmp_path) == []


def test_a_real_file_size_limit_is_disk_full_and_the_next_put_works(tmp_path: Path) -> None:
    # The last write is taken in part and without an error: a short write must not pass for a whole one.
    refused = run_writer(tmp_path, MIB + 200, "--file-limit", MIB + 100)
    assert refused.stdout.split() == ["DISK_FULL", "0"], refused.stderr
    assert str(tmp_path) in refused.stderr
    assert run_writer(tmp_path, MIB + 200).stdout.startswith("committed ")


def test_a_really_full_file_system_is_disk_full_and_nothing_remains(tmp_path: Path) -> None:
    # In its own mount name space, so that nothing outside of the test sees the mount and it ends with the process.
    unshare = ("unshare", "--mount", "--map-root-user")
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        if os.environ.get("CI"):
            pytest.fail("CI must allow `unshare --mount --map-root-user`")
        pytest.skip("no right to make a mount name space")
    script = 'mount -t tmpfs -o size=1m tasuki-test "$1" && shift && exec "$@"'
    refused = run_writer(tmp_path, 2 * MIB, before=(*unshare, "sh", "-c", script, "sh", str(tmp_path)))
    assert refused.stdout.split() == ["DISK_FULL", "0"], refused.stderr
    assert os.strerror(errno.ENOSPC) in refused.stderr


def test_below_the_floor_of_free_bytes_nothing_is_begun(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path, floor_free_bytes=2**62)
    with pytest.raises(DiskFull, match=f"{2**62} must stay free"):
        blobs.begin()
    with pytest.raises(DiskFull):
        blobs.check_space()
    assert temporary_names(tmp_path) == []


def test_an_announced_size_that_does_not_fit_is_refused_before_any_byte(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path, max_blob_bytes=2**62)
    blobs.check_space(1)
    with pytest.raises(DiskFull, match=f"{2**61} are needed"):
        blobs.begin(size_bytes=2**61)


def test_below_the_floor_of_free_inodes_nothing_is_begun(tmp_path: Path) -> None:
    if os.statvfs(tmp_path).f_files == 0:
        open_blobs(tmp_path, floor_free_inodes=2**62).check_space()
        return
    with pytest.raises(DiskFull, match="inodes"):
        open_blobs(tmp_path, floor_free_inodes=2**62).begin()


def test_a_writer_that_announced_nothing_stops_when_the_floor_is_reached(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path)
    with blobs.begin() as writer:
        writer.write(b"x" * CHUNK_BYTES)
        blobs.floor_free_bytes = 2**62
        with pytest.raises(DiskFull):
            list(map(writer.write, [b"x" * CHUNK_BYTES] * (FREE_CHECK_BYTES // CHUNK_BYTES)))
    assert temporary_names(tmp_path) == []


# Many at once, and large ones


def test_many_threads_may_write_the_same_blob(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path)
    data = os.urandom(2 * CHUNK_BYTES)
    count = 8
    together = threading.Barrier(count, timeout=30)

    def put(_: int) -> str:
        with blobs.begin() as writer:
            writer.write(data)
            together.wait()
            return writer.commit().sha256

    with ThreadPoolExecutor(count) as pool:
        [sha256] = set(pool.map(put, range(count)))
    assert blobs.read_bytes(sha256, len(data)) == data
    assert temporary_names(tmp_path) == []
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 1


def test_many_threads_may_write_different_blobs(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path)
    contents = [f"blob {index}".encode() for index in range(64)]
    with ThreadPoolExecutor(8) as pool:
        refs = list(pool.map(blobs.put_bytes, contents))
    assert [blobs.read_bytes(ref.sha256, 100) for ref in refs] == contents


def test_memory_does_not_grow_with_the_blob(tmp_path: Path) -> None:
    small, large = (run_writer(tmp_path, size_bytes) for size_bytes in (CHUNK_BYTES, 64 * MIB))
    small_kib, large_kib = (int(done.stdout.split()[2]) for done in (small, large))
    assert large_kib - small_kib < 4 * 1024
