"""One round of HyperQueue with the peers' interpreter: `tasks_hyperqueue.py SHAPE TASKS CORES FOLDER`.

SHAPE is `array` (one job with all tasks) or `jobs` (one job for each). Server, worker and client are threads of this process, as
its LocalCluster has them; the tasks are its children. Prints one line of JSON. It may touch the folder and its own children.

HyperQueue's client asks once a second whether it is done, and holds the interpreter meanwhile. So that this does not count
against it, the clock stops when the last child has been waited for, which a process beside this one sees in /proc.
"""

from __future__ import annotations

import importlib.metadata
import json
import mmap
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

from hyperqueue import Job, LocalCluster
from hyperqueue.cluster import WorkerConfig

LOOK_S = 0.002
CHILDREN_FAULTS = 8  # of /proc/…/stat, counted from behind the name: every child that was waited for adds to it
WARM_UP_TASKS = 50
PROGRAM = ["/bin/true"]


def watch_children(last_change: mmap.mmap) -> None:
    """Fork the process that notes when a child of this one was last waited for, on the clock that both share."""
    watched = os.getpid()
    if os.fork():
        return
    seen = ""
    while os.getppid() == watched:
        found = Path(f"/proc/{watched}/stat").read_text().rpartition(")")[2].split()[CHILDREN_FAULTS]
        if found != seen:
            seen = found
            last_change[:8] = struct.pack("d", time.monotonic())
        time.sleep(LOOK_S)
    os._exit(0)


def jobs_of(shape: str, tasks: int) -> list[Job]:
    """Nothing is written by a task: that is faster for it than the files that it makes by default."""
    jobs = [Job(max_fails=None) for _ in range(1 if shape == "array" else tasks)]
    for number in range(tasks):
        jobs[number % len(jobs)].program(PROGRAM, stdout=None, stderr=None)
    return jobs


def one_round(client: Any, shape: str, tasks: int) -> float:
    """Run one round until HyperQueue says that all have succeeded; return the time of its start."""
    began = time.monotonic()
    submitted = tuple(client.submit(job).id for job in jobs_of(shape, tasks))
    failed = client.connection.wait_for_jobs(submitted, lambda progress: None)  # `Client.wait_for_jobs` draws a progress bar
    if failed:
        raise SystemExit(f"{len(failed)} jobs of HyperQueue failed")
    return began


def main() -> None:
    shape, tasks, cores, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    last_change = mmap.mmap(-1, 8)
    watch_children(last_change)  # before the cluster has threads
    with LocalCluster(folder, WorkerConfig(cores)) as cluster:
        client = cluster.client()
        one_round(client, shape, WARM_UP_TASKS)
        before = os.times()
        began = one_round(client, shape, tasks)
        after = os.times()
        seconds = struct.unpack("d", last_change[:8])[0] - began
    cpu = {
        "hyperqueue": after.user + after.system - before.user - before.system,
        "children": after.children_user + after.children_system - before.children_user - before.children_system,
    }
    version = importlib.metadata.version("hyperqueue")
    print(json.dumps({"version": version, "tasks": tasks, "seconds": seconds, "cpu_s": cpu}), flush=True)


if __name__ == "__main__":
    main()
