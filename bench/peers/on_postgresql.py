"""Measures Procrastinate on a PostgreSQL server that is there: empty jobs per second, from the first defer to the last finish.

One worker process, one client process, as for the peers on Redis (run.py), in the same environment. Each choice favours the
peer: the concurrency and the number of connections at which it was fastest, uvloop, jobs deferred in batches. It may touch the
environment's folder, temporary folders, the database that it is given, and the processes that it starts and stops.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _common import leftover
from peers.run import (
    CLIENT_TIMEOUT_S,
    DEFAULT_VENV,
    HERE,
    await_client,
    capture,
    ensure_environment,
    python_of,
    running_process,
    stop_group,
)

PROGRAM = HERE / "tasks_procrastinate.py"
WARM_UP_JOBS = 300


@dataclasses.dataclass(frozen=True)
class Setting:
    """Settings of a worker: jobs at once, and connections in its pool (one of them listens)."""

    concurrency: int
    connections: int


# Which is fastest depends on the cores and the disk: all are measured, the best counts.
SETTINGS: Mapping[str, Setting] = {
    "concurrency-1": Setting(1, 3),
    "concurrency-4": Setting(4, 6),
    "concurrency-16": Setting(16, 10),
}


def measure_procrastinate(
    url: str, setting: str, venv: Path = DEFAULT_VENV, *, seconds: float, rounds: int = 1
) -> dict[str, Any]:
    """Return the best round of a peer with this setting, on this empty database."""
    venv = venv.absolute()
    ensure_environment(venv, HERE / "requirements-postgresql.txt")
    chosen = SETTINGS[setting]
    environment = {**os.environ, "PEERS_POSTGRESQL_URL": url, "PEERS_CONNECTIONS": str(chosen.connections)}
    program = [python_of(venv), str(PROGRAM)]
    capture([*program, "schema"], environment)
    with tempfile.TemporaryDirectory(prefix="tasuki-peers-") as scratch, contextlib.ExitStack() as running:
        worker_log, client_log, report = (Path(scratch, name) for name in ("worker.log", "client.log", "report.json"))
        worker = running.enter_context(running_process([*program, "worker", str(chosen.concurrency)], worker_log, environment))
        running.enter_context(leftover(worker, lambda: stop_group(worker)))
        client_argv = [*program, "client", str(WARM_UP_JOBS), str(seconds), str(rounds)]
        client = running.enter_context(running_process(client_argv, client_log, environment, output=report))
        running.enter_context(leftover(client, lambda: stop_group(client)))
        await_client(f"procrastinate ({setting})", CLIENT_TIMEOUT_S * (1 + rounds), client, client_log, worker, worker_log)
        measured = json.loads(report.read_text())
    return {"setting": setting, **measured, "jobs_per_s": round(measured["jobs"] / measured["seconds"])}
