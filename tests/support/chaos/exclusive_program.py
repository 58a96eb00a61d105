"""The program of the chaos with a registry: it tells from its own side whether another run of its job lives at the same moment.

    python exclusive_program.py FILE FOLDER NODE

Each run takes the lock FOLDER/locks/JOB, which the kernel frees when its last process is gone, and keeps a journal of itself in
FOLDER/journal/JOB: `begin`, `end`, and `violation` if the lock was taken. A child in a session of its own holds the lock too, so
that a run counts as over only when all that it started is dead. Nobody but the agent's keeper ends that child.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def boot_time() -> float:
    """One clock for all processes of this machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def note(journal: Path, **facts: Any) -> None:
    """One write to a file that is only appended to: lines of several processes do not mix."""
    line = json.dumps({"at": boot_time(), **facts}) + "\n"
    out = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(out, line.encode())
    os.close(out)


def stay_behind() -> None:
    """A child that holds what we hold, and would live for longer than the test."""
    if os.fork() == 0:
        os.setsid()
        for number in (0, 1, 2):
            os.close(number)
        time.sleep(3600)
        os._exit(0)


def main() -> None:
    file, folder, node = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    job_id, attempt = os.environ["TASUKI_JOB_ID"], int(os.environ["TASUKI_ATTEMPT"])
    order = json.loads(file.read_bytes())
    journal, run = folder / "journal" / job_id, os.urandom(8).hex()
    facts = {"run": run, "attempt": attempt, "node": node}
    lock = os.open(folder / "locks" / job_id, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note(journal, event="violation", **facts)
    note(journal, event="begin", **facts)
    stay_behind()
    time.sleep(order["first_seconds" if attempt == 1 else "seconds"])
    Path("out", "run").write_text(run)
    Path("out", "filling").write_bytes(os.urandom(order["filling_bytes"]))
    print("priced", order["row"], flush=True)
    note(journal, event="end", **facts)


if __name__ == "__main__":
    main()
