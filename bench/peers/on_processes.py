"""Measures HyperQueue on this machine: programs per second that do nothing, from the first submit to the end of the last.

One process with its server, its worker and its client (`tasks_hyperqueue.py`), as for the peers on Redis (run.py), in the same
environment. Each choice favours the peer: nothing is kept of a task, not even its output, and nothing is durable. It may touch
the environment's folder, temporary folders, and the processes that it starts and stops.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from _common import Process, folder
from peers.run import DEFAULT_VENV, HERE, ensure_environment, python_of

PROGRAM = HERE / "tasks_hyperqueue.py"
SHAPES = ("array", "jobs")
"""One job with many tasks, or many jobs with one: which is faster is for the machine to say."""


def prepare(venv: Path = DEFAULT_VENV) -> None:
    """The environment is there after this; it takes a while the first time."""
    ensure_environment(venv.absolute(), HERE / "requirements-commands.txt")


def measure_hyperqueue(shape: str, tasks: int, cores: int, venv: Path = DEFAULT_VENV) -> dict[str, Any]:
    """One round in a cluster of its own."""
    with folder() as scratch:
        command = [python_of(venv.absolute()), str(PROGRAM), shape, str(tasks), str(cores), str(scratch)]
        process = Process(command, ready='"seconds"')  # a single line, at its end
        process.stop()
    measured = json.loads(next(line for line in process.lines if '"seconds"' in line))
    return {"shape": shape, **measured, "jobs_per_s": round(tasks / measured["seconds"])}
