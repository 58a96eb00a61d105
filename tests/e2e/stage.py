"""Stage of the end-to-end tests: the start of a test's workers, the ledger that counts runs, and the deadlines."""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tasuki import Client, JobStatus
from tasuki.core.lifecycle import LEASE_MARGIN_S
from tests.support.processes import ServerProcess, WorkerProcess, start_worker
from tests.support.waiting import until

HERE = Path(__file__).parent
LEASE_TTL_S = 3.0
LEAD_TTL_S = 2.0
SCHEDULING_S = 2.5  # the reaper looks every 0.25 s; the rest is for a machine with more processes than cores
LOST_WITHIN_S = LEASE_TTL_S + LEASE_MARGIN_S + SCHEDULING_S
SOON_S = 25.0

STORES = ("sqlite", pytest.param("postgresql", marks=pytest.mark.soak))
sqlite_only = pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
"""For tests in which no store has a part."""
shared_sqlite_only = pytest.mark.parametrize("shared_store_url", ["sqlite"], indirect=True, scope="module")

Servers = ServerProcess | Sequence[ServerProcess] | str


class Run(NamedTuple):
    """One start of one job, as the job itself noted it."""

    job_id: str
    attempt: int
    pid: int
    at: float


class Ledger:
    """The file that every run of a job adds a line to before it does anything else."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def runs(self) -> list[Run]:
        if not self.path.exists():
            return []
        lines = (line.split() for line in self.path.read_text().splitlines())
        return [Run(job_id, int(attempt), int(pid), float(at)) for job_id, attempt, pid, at in lines]

    def of(self, job_id: str) -> list[Run]:
        return [run for run in self.runs() if run.job_id == job_id]

    def attempts(self, job_id: str) -> list[int]:
        return [run.attempt for run in self.of(job_id)]

    def wait_for(self, job_id: str, attempt: int = 1, timeout: float = SOON_S) -> Run:
        """Wait until this attempt has begun; return its run."""

        def begun() -> list[Run]:
            return [run for run in self.of(job_id) if run.attempt == attempt]

        return until(begun, timeout, f"attempt {attempt} of job {job_id} begins")[0]


def jobs_worker(server: Servers, ledger: Ledger, *arguments: str, **options: Any) -> WorkerProcess:
    """Start a worker with the handlers of jobs.py."""
    return start_worker(server, "--ledger", str(ledger.path), *arguments, script=HERE / "jobs.py", **options)


def command_worker(server: Servers, ledger: Ledger, *arguments: str, **options: Any) -> WorkerProcess:
    """Start a `tasuki worker` whose exec `step` is step.sh."""
    step = f"step=/bin/sh {HERE / 'step.sh'} {ledger.path} {{args}}"
    return start_worker(server, "--exec", step, *arguments, command=True, **options)


def servers_seen(client: Client) -> list[dict[str, Any]]:
    """Return all live servers, as the one that answers knows them; it comes first."""
    seen: list[dict[str, Any]] = client.wait(client.aio.call("servers"))
    return seen


def wait_until_met(servers: Sequence[ServerProcess]) -> None:
    """Wait until every server knows where all the others are; they tell each other once a second."""
    urls = {server.url for server in servers}
    for server in servers:
        with server.client() as client:
            until(lambda client=client: urls == _addresses(client), SOON_S, "the servers know each other")


def _addresses(client: Client) -> set[str]:
    return {address for server in servers_seen(client) for address in server["addresses"]}


def leader_of(servers: Sequence[ServerProcess], timeout: float = SOON_S) -> ServerProcess:
    """Wait until a server has logged that it leads; return it."""

    def leading() -> list[ServerProcess]:
        return [server for server in servers if server.running and server.leads]

    return until(leading, timeout, "one of the servers leads")[0]


def assert_one_finish_each(client: Client, job_ids: Iterable[str], group: str) -> None:
    """Check that every job of the group succeeded, and that the group's counters, kept by the finishes, saw each exactly once."""
    wanted = list(job_ids)
    views: list[JobStatus] = []
    for start in range(0, len(wanted), 1000):
        views += client.statuses(*wanted[start : start + 1000])
    unfinished = {view.job_id: view.state for view in views if view.state != "SUCCEEDED"}
    assert not unfinished
    counts = client.counts()[group]
    assert counts.succeeded == len(wanted), counts
    assert counts.total == len(wanted), counts


def story(client: Client, job_id: str) -> list[str]:
    """Return the kinds of incidents of a job, in order."""
    return [incident.kind for incident in client.explain(job_id).story]


def stdout_of(result: bytes) -> str:
    """Return the stdout of a command, from its result."""
    with zipfile.ZipFile(io.BytesIO(result)) as archive:
        return archive.read("stdout.log").decode()


@contextlib.contextmanager
def in_background(work: Any, *args: Any, **kwargs: Any) -> Iterator[Future[Any]]:
    """Run something that blocks in a thread of its own; leaving the block waits for it, unless what failed may be its cause."""
    pool = ThreadPoolExecutor(1)
    try:
        yield pool.submit(work, *args, **kwargs)
    except BaseException:
        pool.shutdown(wait=False)
        raise
    pool.shutdown()
