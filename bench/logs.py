"""What does it cost a job that its stdout is a log that is watched, cut, and can be followed?

python bench/logs.py            1 GB of stdout at full speed, 5 rounds against the same program writing to a file; recorded
python bench/logs.py --quick    100 MB, 2 rounds, nothing recorded

The job measures itself: from its first write to its last. In every round one writes to a file in the same folder, one is a job
that nobody looks at, and one a job that is followed. Also measured: the most memory that worker and server had meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
from pathlib import Path

from _common import Process, folder, limit, record, server

from tasuki import Client

MB = 1_000_000
LIMIT_S = 600.0
LOOK_S = 0.05
WRITER = """
import os, sys, time
size, target = int(sys.argv[1]), sys.argv[2]
block = (b"0123456789abcdef" * 4095 + b"0123456789abcde\\n")
left = size
began = time.monotonic()
while left > 0:
    left -= os.write(1, block[:left])
took = time.monotonic() - began
with open(target, "w") as file:
    file.write(repr(took))
"""


class Memory:
    """The most that some processes had in RAM while the block lasted."""

    def __init__(self, **pids: int) -> None:
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.most = {name: self._now(pid) for name, pid in pids.items()}
        self.before = dict(self.most)

    @staticmethod
    def _now(pid: int) -> float:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024 / MB
        return 0.0

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            for name, pid in self._pids.items():
                self.most[name] = max(self.most[name], self._now(pid))

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def plain_s(data: Path, size_bytes: int) -> float:
    """Return the time of the same program when it writes to a file."""
    target = data / "took"
    with (data / "plain.log").open("wb") as log:
        subprocess.run([sys.executable, "-c", WRITER, str(size_bytes), str(target)], stdout=log, check=True)
    (data / "plain.log").unlink()
    return float(target.read_text())


def job_s(client: Client, data: Path, size_bytes: int, *, follow: bool) -> tuple[float, int, int]:
    """Seconds of writing, bytes that are kept, bytes that a follower saw."""
    target = data / "took"
    target.unlink(missing_ok=True)
    handle = client.submit(subject="bench.write", exec="write", args=(str(size_bytes), str(target)))
    seen = sum(map(len, client.logs(handle.job_id))) if follow else 0
    handle.outcome(LIMIT_S)
    kept = sum(map(len, client.logs(handle.job_id, follow=False)))
    return float(target.read_text()), kept, seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    size_mb, rounds = (100, 2) if arguments.quick else (1000, 5)
    times: dict[str, list[float]] = {"plain": [], "job": [], "followed": []}
    kept = seen = 0
    with limit(LIMIT_S), folder() as data:
        script = data / "write.py"
        script.write_text(WRITER)
        url = f"unix://{data}/socket"
        start = [
            sys.executable,
            "-m",
            "tasuki",
            "worker",
            "--to",
            url,
            "--data",
            str(data),
            "--subject",
            "bench.>",
            "--slots",
            "1",
        ]
        with server(data) as served:
            worker = Process([*start, "--exec", f"write={sys.executable} {script} {{args}}"], ready="connected")
            try:
                with Client(url) as client, Memory(worker=worker.pid, server=served.pid) as memory:
                    for _ in range(rounds):
                        times["plain"].append(plain_s(data, size_mb * MB))
                        took, kept, _ = job_s(client, data, size_mb * MB, follow=False)
                        times["job"].append(took)
                        took, _, seen = job_s(client, data, size_mb * MB, follow=True)
                        times["followed"].append(took)
            finally:
                worker.stop()
    middle = {name: statistics.median(some) for name, some in times.items()}
    figures = {
        "size_mb": size_mb,
        **{f"{name}_s": round(seconds, 3) for name, seconds in middle.items()},
        "job_to_plain": round(middle["job"] / middle["plain"], 3),
        "followed_to_plain": round(middle["followed"] / middle["plain"], 3),
        "kept_mb": round(kept / MB, 2),
        "seen_mb": round(seen / MB, 2),
        **{f"{name}_rss_mb_before": round(some, 1) for name, some in memory.before.items()},
        **{f"{name}_rss_mb_most": round(some, 1) for name, some in memory.most.items()},
    }
    record("logs", figures, save=not arguments.quick)


if __name__ == "__main__":
    main()
