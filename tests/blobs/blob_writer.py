"""A process that writes one blob and can be told to die, or to be refused space, on the way. Run by the tests.

    python blob_writer.py ROOT SIZE_BYTES [--kill-at STEP] [--file-limit BYTES]

Prints `committed <sha256> <peak memory in KiB>`, or `<error code> <files in tmp/>`.
"""

from __future__ import annotations

import argparse
import enum
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasuki.blobs.blob import CHUNK_BYTES
from tasuki.blobs.files import PartFile
from tasuki.blobs.folder import FolderBlobs
from tasuki.core.job import BlobRef
from tasuki.errors import TasukiError


class Step(enum.StrEnum):
    """Moments of a write between which a crash must be harmless."""

    CREATED = "created"
    WRITTEN = "written"
    SYNCED = "synced"
    RENAMED = "renamed"
    DURABLE = "durable"


class SteppedBlobs(FolderBlobs):
    """A folder of blobs that calls `on_step` at each step of a write."""

    def __init__(self, root: Path, *, on_step: Callable[[Step], None], **options: Any) -> None:
        self._on_step = on_step
        super().__init__(root, **options)

    def _create_temporary(self) -> PartFile:
        part = super()._create_temporary()
        self._on_step(Step.CREATED)
        return part

    def publish(self, part: PartFile, ref: BlobRef, generation: int) -> None:
        self._on_step(Step.WRITTEN)
        super().publish(part, ref, generation)
        self._on_step(Step.DURABLE)

    def _rename(self, temporary: Path, final: Path) -> None:
        self._on_step(Step.SYNCED)
        super()._rename(temporary, final)
        self._on_step(Step.RENAMED)


def peak_kib() -> int:
    """Own peak: ru_maxrss would also count the parent this process was forked from."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def write_and_read(blobs: FolderBlobs, size_bytes: int) -> str:
    with blobs.begin() as writer:
        for start in range(0, size_bytes, CHUNK_BYTES):
            writer.write(bytes([start // CHUNK_BYTES % 256]) * min(CHUNK_BYTES, size_bytes - start))
        ref = writer.commit()
    with blobs.open(ref) as reader:
        assert sum(map(len, reader)) == size_bytes
    return ref.sha256


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("size_bytes", type=int)
    parser.add_argument("--kill-at", type=Step)
    parser.add_argument("--file-limit", type=int)
    arguments = parser.parse_args()

    def on_step(step: Step) -> None:
        if step is arguments.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    if arguments.file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (arguments.file_limit, arguments.file_limit))
    blobs = SteppedBlobs(arguments.root, max_blob_bytes=2**30, floor_free_bytes=0, floor_free_inodes=0, on_step=on_step)
    try:
        sha256 = write_and_read(blobs, arguments.size_bytes)
    except TasukiError as error:
        print(error.code, len(list((arguments.root / "tmp").iterdir())))
        print(error, file=sys.stderr)
    else:
        print("committed", sha256, peak_kib())


if __name__ == "__main__":
    main()
