"""`python talk.py FOLDER STEPS [SIZE]`: a job that writes to both its streams, step by step, when the test lets it.

Step n is written when the file FOLDER/go.n exists, and on `FOLDER/fail.ATTEMPT` it ends with code 3 instead of going on.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

LAST_S = 60.0  # whoever is forgotten ends by itself


def step(stream: str, number: int, size_bytes: int, attempt: int = 1) -> bytes:
    """Return the bytes of a stream in this step: no two bytes stand in the same surroundings."""
    line = b"%s %d.%d " % (stream.encode(), attempt, number)
    count = size_bytes // len(line) + 1
    return b"".join(line + b"%06d\n" % at for at in range(count))[:size_bytes]


def write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def main(folder: Path, steps: int, size_bytes: int) -> int:
    deadline = time.monotonic() + LAST_S
    attempt = int(os.environ["TASUKI_ATTEMPT"])
    for number in range(steps):
        while not (folder / f"go.{number}").exists() and time.monotonic() < deadline:
            if (folder / f"fail.{attempt}").exists():
                return 3
            time.sleep(0.01)
        write_all(1, step("stdout", number, size_bytes, attempt))
        write_all(2, step("stderr", number, size_bytes, attempt))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
