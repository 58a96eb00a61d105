"""How fast is the SQLite store alone? Submit, lease and finish on one thread, durable, without doors or workers.

    python bench/store.py               empty store, batches of 1, 16 and 256, time-ordered and random ids
    python bench/store.py --full        the same beside 1,000,000 queued and 5,000,000 finished jobs (4 GB of disk, some minutes)
    python bench/store.py --quick       a few seconds
    python bench/store.py --json        the results as JSON on stdout

One turn is one transaction: it finishes the batch leased before, submits a batch and leases a batch, as the server does under
load. `µs CPU` is what the store's thread computes per job (Python and SQLite); the rest is waiting for the disk. The rows `busy`
have a second Python thread that works like an event loop under load, which has the GIL whenever SQLite is at work.
Writes bench/results/store.json, unless --quick.
"""

from __future__ import annotations

import argparse
import json
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _common import RESULTS, machine

from tasuki.core.job import JobSpec, Outcome, State, body_hash
from tasuki.core.store_messages import Filter, LeaseRequest, Report, Submission
from tasuki.stores.sql.rows import encode_spec
from tasuki.stores.sql.store import SqlStore

QUEUED, FINISHED = 1_000_000, 5_000_000
SUBJECT = "math.square"
ENOUGH_S = 4.0
BUSY_STEPS = 4_000  # some 100 µs of Python between two system calls

# Rows as the store itself writes them, one of `every` FAILED. Ids are time-ordered or random, like those of the measured jobs.
LOAD = """
INSERT INTO tasuki_jobrun (
    idempotency_key, state, ready, "group", subject, attempt, version, lease_id, assigned_worker_id, incarnation, assigned_at,
    started_at, finished_at, error_code, result, result_sha256, result_size_bytes, created_at, submitter, body_hash, spec)
SELECT {key}, CASE WHEN done IS NULL THEN 'PENDING' WHEN n % :every = 0 THEN 'FAILED' ELSE 'SUCCEEDED' END,
    CASE WHEN done IS NULL THEN 1 ELSE 0 END, 'math', :subject, coalesce(done, 0), 3 * coalesce(done, 0),
    CASE WHEN done = 1 THEN :lease || n ELSE '' END, CASE WHEN done = 1 THEN 'w1' END, CASE WHEN done = 1 THEN 'w1/1' ELSE '' END,
    :at * done, :at * done, :at * done, CASE WHEN done = 1 AND n % :every = 0 THEN 'EXIT_CODE' END,
    CASE WHEN done = 1 THEN :result END, CASE WHEN done = 1 THEN :sha256 END, 2 * done, :at, 'client:bench', :hash, :spec
FROM (SELECT n, CASE WHEN n < :finished THEN 1 END AS done FROM ({numbers}) AS number) AS numbered
"""
NUMBERS = """
WITH RECURSIVE number (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM number WHERE n + 1 < :finished + :queued) SELECT n FROM number
"""
KEYS = {"ordered": "printf('0192a000-%04x-7000-8000-%012x', n >> 16, n)", "random": "lower(hex(randomblob(16)))"}


def ids(kind: str) -> Iterator[str]:
    """Job ids as clients make them."""
    if kind == "random":
        while True:
            yield str(uuid.uuid4())
    number = 0
    while True:
        number += 1
        yield f"0192b000-{number >> 16:04x}-7000-8000-{number:012x}"


def load_values(queued: int, finished: int, every: int) -> dict[str, Any]:
    """Return the parameters of LOAD."""
    spec = JobSpec(job_id="x" * 36, subject=SUBJECT, payload=b"7")
    values = {"finished": finished, "queued": queued, "every": every, "subject": SUBJECT, "lease": "ab" * 16 + "."}
    values |= {"at": time.time() - 86400, "result": b"49", "sha256": "ab" * 32}
    return values | {"hash": body_hash(spec), "spec": encode_spec(spec)}


def counters(queued: int, finished: int, every: int) -> list[tuple[str, str, int]]:
    """Return the rows that count the jobs of LOAD."""
    failed = -(-finished // every)
    return [("math", "pending", queued), ("math", "succeeded", finished - failed), ("math", "failed", failed)]


def load(path: Path, kind: str, queued: int, finished: int, *, every: int = 25_000) -> None:
    """Fill a new store the quick way: one statement, no fsync."""
    SqlStore.open_sqlite(path).close()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA cache_size = -2000000")
    statement = LOAD.replace("{key}", KEYS[kind]).replace("{numbers}", NUMBERS)
    connection.execute(statement, load_values(queued, finished, every))
    connection.executemany('INSERT INTO tasuki_counter ("group", state, n) VALUES (?, ?, ?)', counters(queued, finished, every))
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()


def measure(store: SqlStore, batch: int, new_ids: Iterator[str], enough_s: float) -> dict[str, float]:
    """Jobs per second through submit + lease + finish."""
    request = LeaseRequest(worker_id="w1", incarnation="w1/1", patterns=("math.>",), limit=batch)
    grants: list[Any] = []
    done = 0
    wall = cpu = 0.0
    while wall < enough_s or not done:  # the first turn has nothing to finish
        specs = [JobSpec(job_id=next(new_ids), subject=SUBJECT, payload=b"7") for _ in range(batch)]
        submissions = [Submission(spec, "client:bench", body_hash(spec)) for spec in specs]
        outcome = Outcome(result=b"49", result_sha256="ab" * 32)
        reports = [Report(grant.job_id, "w1", grant.lease_id, grant.attempt, outcome, 1.7e9) for grant in grants]
        wall_0, cpu_0 = time.perf_counter(), time.thread_time()
        with store.turn():
            recorded = store.finish(reports)
            store.submit(submissions)
            [grants] = store.lease([request])
        wall += time.perf_counter() - wall_0
        cpu += time.thread_time() - cpu_0
        done += len(recorded)
        assert len(grants) == batch
        assert all(answer.state is State.SUCCEEDED for answer in recorded)
    store.finish([Report(grant.job_id, "w1", grant.lease_id, grant.attempt, Outcome()) for grant in grants])
    return {
        "jobs": done,
        "jobs_per_s": round(done / wall),
        "cpu_us_per_job": round(cpu / done * 1e6, 1),
        "turn_ms": round(wall / done * batch * 1e3, 2),
    }


def beside_a_busy_thread(work: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Measure while another thread wants the GIL nearly all the time."""
    stop = threading.Event()
    near, far = socket.socketpair()

    def compute() -> None:
        while not stop.is_set():
            sum(range(BUSY_STEPS))
            near.send(b"x")
            far.recv(1)

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        return work()
    finally:
        stop.set()
        thread.join()
        near.close()
        far.close()


def reads(store: SqlStore) -> dict[str, float]:
    """Worst of ten, in milliseconds, on the second connection."""
    reader = store.reader()
    questions: dict[str, Callable[[], object]] = {
        "counts": reader.counts,
        "find_newest": lambda: reader.find(Filter()),
        "find_failed": lambda: reader.find(Filter(states=(State.FAILED,))),
        "find_pending": lambda: reader.find(Filter(states=(State.PENDING,))),
        "find_text_nowhere": lambda: reader.find(Filter(text="nowhere")),
    }
    worst = {}
    for name, ask in questions.items():
        times = []
        for _ in range(10):
            start = time.perf_counter()
            ask()
            times.append(time.perf_counter() - start)
        worst[f"{name}_ms"] = round(max(times) * 1e3, 2)
    reader.close()
    return worst


def scenario(kind: str, queued: int, finished: int, batches: list[int], enough_s: float, folder: Path) -> dict[str, Any]:
    """One store file, all batch sizes. Runs in a process of its own, so that its memory is its own too."""
    store = SqlStore.open_sqlite(folder / "tasuki.sqlite3")
    new_ids = ids(kind)
    rows = [{"batch": batch, **measure(store, batch, new_ids, enough_s)} for batch in batches]
    busy = beside_a_busy_thread(lambda: measure(store, max(batches), new_ids, enough_s))
    result = {"ids": kind, "queued": queued, "finished": finished, "rows": rows, "busy": busy, "reads": reads(store)}
    size = sum(file.stat().st_size for file in folder.iterdir())
    result |= {"rss_mb": rss_mb(), "file_mb": round(size / 1e6)}
    store.close()
    return result


def rss_mb() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) // 1024


def run(arguments: list[str]) -> dict[str, Any]:
    """A scenario in a child process; its store is filled by another, whose memory is not measured."""
    with tempfile.TemporaryDirectory(prefix="tasuki-bench-") as folder:
        command = [sys.executable, __file__, "--folder", folder, *arguments]
        if "--full" in arguments:
            subprocess.run([*command, "--load"], check=True)
        child = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    answer: dict[str, Any] = json.loads(child.stdout)
    return answer


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['ids']} ids, {result['queued']:,} queued, {result['finished']:,} finished")
    print(f"  {'batch':>10} {'jobs/s':>9} {'µs CPU':>8} {'ms/turn':>8}")
    busy = [{"batch": "busy", **result["busy"]}] if result["busy"] else []
    for row in [*result["rows"], *busy]:
        print(f"  {row['batch']:>10} {row['jobs_per_s']:>9,} {row['cpu_us_per_job']:>8} {row['turn_ms']:>8}")
    print("  " + ", ".join(f"{name[:-3]} {value} ms" for name, value in result["reads"].items()))
    print(f"  memory {result['rss_mb']} MB, file {result['file_mb']} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ids", choices=["ordered", "random"], help=argparse.SUPPRESS)
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    batches, enough_s = ([16, 256], 0.5) if options.quick else ([1, 16, 256], ENOUGH_S)
    if options.load:
        load(options.folder / "tasuki.sqlite3", options.ids, QUEUED, FINISHED)
        return
    if options.folder is not None:
        queued, finished = (QUEUED, FINISHED) if options.full else (0, 0)
        print(json.dumps(scenario(options.ids, queued, finished, batches, enough_s, options.folder)))
        return
    results = []
    for size in ("", "--full") if options.full else ("",):
        for kind in ("ordered", "random"):
            results.append(run(["--ids", kind, *(["--quick"] if options.quick else []), *([size] if size else [])]))
            if not options.json:
                show(results[-1])
    report = {"machine": machine(), "results": results}
    if options.json:
        print(json.dumps(report, indent=1))
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "store.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
