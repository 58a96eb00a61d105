"""What the bench scripts share: real processes on a temporary folder, and results recorded with machine and commit.

A bench that hangs ends by itself (`limit`), and none leaves a process behind: those that it started die with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import platform
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
LOAD_BEFORE = round(os.getloadavg()[0], 2)
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # before any fork: the child must not load a library
_leftovers: dict[object, Callable[[], None]] = {}
"""Functions that end what is still there when the time is up."""


@contextlib.contextmanager
def leftover(owner: object, end: Callable[[], None]) -> Iterator[None]:
    """While the block lasts, `end` is called if the bench has to be given up."""
    _leftovers[owner] = end
    try:
        yield
    finally:
        _leftovers.pop(owner, None)


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """The block takes no longer: else the script says where it hangs, and ends with 1. SIGTERM unwinds it in order."""

    def give_up() -> None:
        print(f"{Path(sys.argv[0]).name}: not done within {seconds:g} s, given up; this is where it hangs:", file=sys.stderr)
        faulthandler.dump_traceback()
        for end in reversed(list(_leftovers.values())):
            end()
        os._exit(1)

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, before)


def _die_with_us() -> None:
    """In the child: a bench that is killed leaves no server behind."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    """A child that is stopped by pid when the bench ends. It is ready when it has printed a line with the word `ready`."""

    def __init__(self, command: list[str], *, ready: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(env or {})},
            preexec_fn=_die_with_us,
        )
        self.pid = self.process.pid
        self.lines: list[str] = []
        _leftovers[self] = self.kill
        self._ready_or_ended = threading.Event()
        self._is_ready = False
        self._reader = threading.Thread(target=self._read, args=(ready,), daemon=True)
        self._reader.start()
        in_time = self._ready_or_ended.wait(START_TIMEOUT_S)
        if not self._is_ready:
            self.kill()
            problem = "ended before it was ready" if in_time else f"was not ready within {START_TIMEOUT_S:g} s"
            raise SystemExit(f"{' '.join(command)} {problem}:\n" + "\n".join(self.lines))

    def _read(self, ready: str) -> None:
        """To its end, on a thread: a child whose output nobody reads would stop."""
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line.strip())
                if ready in line:
                    self._is_ready = True
                    self._ready_or_ended.set()
        self._ready_or_ended.set()

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

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.process.kill()
        self.process.wait()
        _leftovers.pop(self, None)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that does not help."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT_S)
        self.kill()
        self._reader.join(STOP_TIMEOUT_S)


def start_server(data: Path, *options: str, tcp: str = "127.0.0.1:0", store: str = "") -> Process:
    """A server on this folder, whose unix socket is `data/socket`; with `store` one of several on that database."""
    command = [sys.executable, "-m", "tasuki", "server", "--data", str(data), "--tcp", tcp, *options]
    return Process(command, ready="listening unix://", env={"TASUKI_STORE": store})


@contextlib.contextmanager
def server(data: Path, *options: str, store: str = "") -> Iterator[Process]:
    """Run a server for the time of a block."""
    process = start_server(data, *options, store=store)
    try:
        yield process
    finally:
        process.stop()


@contextlib.contextmanager
def handler_worker(url: str, concurrency: int, kind: str = "bench", token: str = "") -> Iterator[Process]:
    """A worker process with the empty handlers of `_worker.py`: of the kind `bench`, `queue` or `few`."""
    command = [sys.executable, str(HERE / "_worker.py"), url, str(concurrency), kind]
    process = Process(command, ready="connected", env={"TASUKI_TOKEN": token} if token else None)
    try:
        yield process
    finally:
        process.stop()


@contextlib.contextmanager
def folder(place: str | None = None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tasuki-bench-", dir=place))
    with leftover(path, lambda: shutil.rmtree(path, ignore_errors=True)):
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def machine() -> dict[str, Any]:
    """Return where and what was measured."""
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
