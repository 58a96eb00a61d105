"""What the bench scripts share: real processes on a temporary folder, and results recorded with machine and commit."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
LOAD_BEFORE = round(os.getloadavg()[0], 2)


class Process:
    """A child that is stopped by pid when the bench ends."""

    def __init__(self, command: list[str], *, ready: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **(env or {})}
        )
        self.pid = self.process.pid
        self.lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if ready in line:
                return
        raise SystemExit(f"{' '.join(command)} ended before it was ready:\n" + "\n".join(self.lines))

    def cpu_s(self) -> float:
        """User and system time so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        """Resident memory of the process itself (its own pages, without the file's)."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        return 0.0

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.contextmanager
def server(data: Path, *options: str) -> Iterator[Process]:
    """A server on this folder; its unix socket is `data/socket`."""
    command = [sys.executable, "-m", "tasuki", "server", "--data", str(data), "--tcp", "127.0.0.1:0", *options]
    process = Process(command, ready="listening tcp://")
    try:
        yield process
    finally:
        process.stop()


@contextlib.contextmanager
def handler_worker(url: str, concurrency: int, kind: str = "bench") -> Iterator[Process]:
    """A worker process with the empty handlers of `_worker.py`: of the kind `bench`, or of the kind `queue`."""
    process = Process([sys.executable, str(HERE / "_worker.py"), url, str(concurrency), kind], ready="connected")
    try:
        yield process
    finally:
        process.stop()


@contextlib.contextmanager
def folder(place: str | None = None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tasuki-bench-", dir=place) as path:
        yield Path(path)


def machine() -> dict[str, Any]:
    """Where and what was measured."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True).stdout.strip()
    cpu = next(
        (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?"
    )
    return {
        "commit": commit or "unknown",
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "load_before": LOAD_BEFORE,
    }


def record(name: str, figures: dict[str, Any], *, save: bool) -> None:
    """Print as JSON, and keep beside the script when this is a full run."""
    text = json.dumps({"machine": machine(), **figures}, indent=2)
    print(text)
    if save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(text + "\n")


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
