"""A half-sent blob: what is left of it on a disk after a kill and in a bucket after a while, and what becomes of that."""

from __future__ import annotations

import hashlib
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tasuki.blobs
from tasuki.blobs.folder import PARTIAL_GRACE_S, SUSPENDED_GRACE_S, FolderBlobs
from tasuki.blobs.s3 import store as s3_module
from tasuki.blobs.s3.store import PART_BYTES, SUSPENDED_MAX, S3Blobs
from tasuki.errors import Corrupt, DiskFull
from tests.support.s3_service import BUCKET, S3Service

MIB = 1024 * 1024
DATA = bytes(range(256)) * (3 * MIB // 256)
SHA256 = hashlib.sha256(DATA).hexdigest()
ALICE = "token:alice"


def open_blobs(root: Path, **changes: Any) -> FolderBlobs:
    return FolderBlobs(root, **{"max_blob_bytes": 2**30, "floor_free_bytes": 0, **changes})


def put_aside(blobs: FolderBlobs | S3Blobs, size_bytes: int = MIB, resume_key: str = ALICE) -> None:
    writer = blobs.begin(SHA256, len(DATA), resume_key=resume_key)
    writer.write(DATA[:size_bytes])
    writer.suspend()


def offset(blobs: FolderBlobs | S3Blobs, resume_key: str = ALICE) -> int:
    """The place where the next writer goes on."""
    writer = blobs.begin(SHA256, len(DATA), resume_key=resume_key)
    try:
        return writer.size_bytes
    finally:
        writer.suspend()


def finish(blobs: FolderBlobs | S3Blobs) -> None:
    with blobs.begin(SHA256, len(DATA), resume_key=ALICE) as writer:
        writer.write(DATA[writer.size_bytes :])
        writer.commit()


def partials(root: Path) -> list[Path]:
    return sorted((root / "tmp").iterdir())


# ---------------------------------------------------------------------------------------------------- in a folder


KILLED = """
import os, signal, sys
from pathlib import Path
from tasuki.blobs.folder import FolderBlobs
blobs = FolderBlobs(Path(sys.argv[1]), max_blob_bytes=2**30, floor_free_bytes=0)
writer = blobs.begin(sys.argv[2], int(sys.argv[3]), resume_key=sys.argv[4])
writer.write(bytes(range(256)) * (2 * 1024 * 1024 // 256))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_had_written_is_gone_on_with(tmp_path: Path) -> None:
    source = Path(tasuki.blobs.__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), SHA256, str(len(DATA)), ALICE],
        env={**os.environ, "PYTHONPATH": str(source)},
        timeout=30,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    blobs = open_blobs(tmp_path)

    assert offset(blobs) == 2 * MIB
    finish(blobs)

    assert blobs.read_bytes(SHA256, len(DATA)) == DATA
    assert partials(tmp_path) == []


def test_a_half_sent_blob_is_for_its_owner_only_and_outlives_the_process_that_took_it(tmp_path: Path) -> None:
    put_aside(open_blobs(tmp_path))

    [partial] = partials(tmp_path)
    assert stat.S_IMODE(partial.stat().st_mode) == 0o600
    assert offset(open_blobs(tmp_path)) == MIB


def test_it_is_gone_on_with_under_another_generation(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path)
    put_aside(blobs)

    with blobs.begin(SHA256, len(DATA), 7, resume_key=ALICE) as writer:
        writer.write(DATA[writer.size_bytes :])
        writer.commit()

    assert (blobs.has(SHA256), blobs.has(SHA256, 7)) == (False, True)


def test_it_is_not_read_again_by_the_process_that_put_it_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = open_blobs(tmp_path)
    put_aside(blobs)

    def read(*arguments: object) -> bytes:
        raise AssertionError("the file is read")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", read)
        finish(blobs)

    assert blobs.read_bytes(SHA256, len(DATA)) == DATA


@pytest.mark.parametrize("same_process", [True, False])
def test_damage_is_found_at_the_end_and_the_next_try_begins_at_0(tmp_path: Path, same_process: bool) -> None:
    blobs = open_blobs(tmp_path)
    put_aside(blobs)
    [partial] = partials(tmp_path)
    partial.write_bytes(b"x" + DATA[1:MIB])
    blobs = blobs if same_process else open_blobs(tmp_path)

    with pytest.raises(Corrupt, match=SHA256):
        finish(blobs)

    assert partials(tmp_path) == []
    assert offset(blobs) == 0


def test_more_than_was_announced_is_no_beginning_of_it(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path)
    put_aside(blobs)
    [partial] = partials(tmp_path)
    partial.write_bytes(DATA + b"x")

    assert offset(blobs) == 0
    finish(blobs)

    assert blobs.read_bytes(SHA256, len(DATA)) == DATA


def test_an_offer_alone_leaves_no_file(tmp_path: Path) -> None:
    assert offset(open_blobs(tmp_path)) == 0
    assert partials(tmp_path) == []


def test_a_day_of_silence_ends_it_but_not_while_somebody_has_it_open(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path)
    put_aside(blobs)
    put_aside(blobs, resume_key="token:bob")
    writer = blobs.begin(SHA256, len(DATA), resume_key=ALICE)
    for path, age_s in zip(partials(tmp_path), (PARTIAL_GRACE_S + 60, PARTIAL_GRACE_S + 60), strict=True):
        os.utime(path, (time.time() - age_s,) * 2)

    blobs.sweep()
    writer.suspend()

    assert (offset(blobs), offset(blobs, "token:bob")) == (MIB, 0)


def test_less_than_a_day_is_kept_over_a_start(tmp_path: Path) -> None:
    put_aside(open_blobs(tmp_path))
    [partial] = partials(tmp_path)
    os.utime(partial, (time.time() - PARTIAL_GRACE_S + 600,) * 2)

    assert offset(open_blobs(tmp_path)) == MIB


def free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def test_room_is_asked_for_only_what_is_still_to_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = open_blobs(tmp_path)
    put_aside(blobs)
    asked: list[int] = []
    monkeypatch.setattr(blobs, "check_space", asked.append)

    assert offset(blobs) == MIB

    assert asked == [len(DATA) - MIB]


def test_a_full_disk_refuses_the_rest_and_keeps_what_came(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path)
    put_aside(blobs)
    blobs.floor_free_bytes = 2 * free_bytes(tmp_path)

    with pytest.raises(DiskFull):
        offset(blobs)

    blobs.floor_free_bytes = 0
    assert offset(blobs) == MIB


def test_what_others_left_for_an_hour_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = open_blobs(tmp_path)
    put_aside(blobs, resume_key="token:bob")
    [partial] = partials(tmp_path)
    os.utime(partial, (time.time() - SUSPENDED_GRACE_S - 60,) * 2)

    def check_space(size_bytes: int = 0) -> None:
        if partial.exists():
            raise DiskFull("there is room only without it")

    monkeypatch.setattr(blobs, "check_space", check_space)
    finish(blobs)

    assert blobs.has(SHA256)
    assert not partial.exists()


# ---------------------------------------------------------------------------------------------------- in a bucket


LARGE = DATA * 4  # 12 MiB: a part and a half
LARGE_SHA256 = hashlib.sha256(LARGE).hexdigest()


@pytest.fixture
def bucket(s3_url: str) -> Iterator[S3Blobs]:
    store = S3Blobs(s3_url, max_blob_bytes=2**30)
    yield store
    store.close()


def put_large_aside(bucket: S3Blobs, resume_key: str = ALICE) -> None:
    writer = bucket.begin(LARGE_SHA256, len(LARGE), resume_key=resume_key)
    writer.write(LARGE[: PART_BYTES + MIB])
    writer.suspend()


def large_offset(bucket: S3Blobs) -> int:
    with bucket.begin(LARGE_SHA256, len(LARGE), resume_key=ALICE) as writer:
        return writer.size_bytes


def uploads_under(s3: S3Service, bucket: S3Blobs) -> int:
    found = s3.client().list_multipart_uploads(Bucket=BUCKET, Prefix=bucket.address.prefix)
    return len(found.get("Uploads", ()))


def test_what_nobody_came_back_for_in_time_is_aborted_in_the_bucket(
    bucket: S3Blobs, s3: S3Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_large_aside(bucket)
    assert uploads_under(s3, bucket) == 1
    monkeypatch.setattr(s3_module, "SUSPENDED_S", -1.0)

    bucket.sweep()

    assert uploads_under(s3, bucket) == 0
    assert large_offset(bucket) == 0


def test_the_oldest_goes_when_too_many_wait(bucket: S3Blobs, s3: S3Service) -> None:
    put_large_aside(bucket)
    for number in range(SUSPENDED_MAX):
        put_aside(bucket, 10, f"token:{number}")

    assert uploads_under(s3, bucket) == 0
    assert large_offset(bucket) == 0
    assert offset(bucket, "token:0") == 10


def test_another_process_begins_at_0_and_deleting_the_blob_aborts_what_the_first_left(
    bucket: S3Blobs, s3: S3Service, s3_url: str
) -> None:
    put_large_aside(bucket)
    later = S3Blobs(s3_url, max_blob_bytes=2**30)

    assert large_offset(later) == 0
    later.delete(LARGE_SHA256)

    assert uploads_under(s3, bucket) == 0
