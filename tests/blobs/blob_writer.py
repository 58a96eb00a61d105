"""A process that writes one blob and can be told to die, or to be refused space, on the way. Run by the tests.

    python blob_writer.py ROOT SIZE_BYTES [--kill-at STEP] [--file-limit BYTES]

Prints `committed <sha256> <peak memory in KiB>`, or `<error code> <files in tmp/>`.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
from pathlib import Path

from tasuki.blobs.blob import CHUNK_BYTES
from tasuki.blobs.folder import FolderBlobs, Step
from tasuki.errors import TasukiError


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
    blobs = FolderBlobs(arguments.root, max_blob_bytes=2**30, floor_free_bytes=0, floor_free_inodes=0, on_step=on_step)
    try:
        sha256 = write_and_read(blobs, arguments.size_bytes)
    except TasukiError as error:
        print(error.code, len(list((arguments.root / "tmp").iterdir())))
        print(error, file=sys.stderr)
    else:
        print("committed", sha256, peak_kib())


if __name__ == "__main__":
    main()
