"""Servers on one PostgreSQL, workers and clients: every job succeeds once, and each client is told everything once.

Servers and workers are killed and frozen, PostgreSQL is restarted once; clients are never touched. See `checks.py`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.stage import jobs_worker
from tests.support.chaos import checks
from tests.support.chaos import evidence as left_behind
from tests.support.chaos.checks import Evidence, JobEnd
from tests.support.chaos.rig import Fault, Rig
from tests.support.postgres_service import PostgresService
from tests.support.processes import ChildProcess, start_servers, url_of
from tests.support.waiting import until

CLIENT = Path(__file__).with_name("client.py")
FAULTS = [Fault.KILLED] * 10 + [Fault.FROZEN] * 7 + [Fault.FROZEN_FOR_LONG] * 3


@dataclass(frozen=True, kw_only=True)
class PostgresPlan:
    """Amounts of everything."""

    seed: int = 0
    servers: int = 3
    workers: int
    clients: int
    jobs: int
    faults_min: int
    """Faults go on until there were so many and all jobs were submitted; one more is a restart of PostgreSQL, halfway to this."""
    faults_max: int = 1000
    """But no more than so many."""
    gap_s: tuple[float, float] = (0.1, 1.0)
    """Between two faults."""
    lease_ttl_s: float = 2.0
    lead_ttl_s: float = 2.0
    pause_s: float = 0.05
    """Of a client between two batches, on average: how long the whole takes."""
    large_every: int = 0
    """Every so manieth job has a result that becomes a blob."""
    ends_within_s: float = 60.0
    """After the last fault."""


class PostgresRig(Rig):
    """The processes of one run."""

    def __init__(self, plan: PostgresPlan, folder: Path, postgres: PostgresService, store_url: str) -> None:
        super().__init__(plan, folder)
        self.plan = plan
        self.postgres = postgres
        self.store_url = store_url
        self.clients: list[ChildProcess] = []
        self._began_at = time.monotonic()
        self._storm_s = self._whole_s = 0.0

    def start(self, stack: contextlib.ExitStack) -> None:
        plan = self.plan
        ttls = ("--lease-ttl", str(plan.lease_ttl_s), "--lead-ttl", str(plan.lead_ttl_s))
        blobs = self.folder / "blobs"
        self.servers = stack.enter_context(
            start_servers(self.folder, plan.servers, *ttls, store=self.store_url, blobs=str(blobs))
        )
        token = self.servers[0].create_token("worker")
        for n in range(1, plan.workers + 1):
            arguments = ("--signed", "--slots", "16", "--worker-id", f"worker-{n}")
            log = self.folder / f"worker-{n}.log"
            worker = jobs_worker(self.servers, self.ledger, *arguments, token=token, log=log, wait=False)
            self.workers.append(stack.enter_context(worker))
        env = {"TASUKI_TOKEN": self.servers[0].create_token("client")}
        for n in range(1, plan.clients + 1):
            command: list[str | Path] = [
                sys.executable,
                CLIENT,
                url_of(self.servers),
                "--name",
                f"c{n}",
                "--jobs",
                str(self.jobs_of(n)),
            ]
            command += ["--history", self.history_file(n), "--seed", str(plan.seed + n), "--pause", str(plan.pause_s)]
            command += ["--large-every", str(plan.large_every)]
            self.clients.append(stack.enter_context(ChildProcess(command, self.folder / f"client-{n}.log", env)))

    def jobs_of(self, n: int) -> int:
        """Return the number of jobs that client n submits."""
        share, rest = divmod(self.plan.jobs, self.plan.clients)
        return share + (n <= rest)

    def history_file(self, n: int) -> Path:
        return self.folder / f"client-{n}.jsonl"

    def history(self, n: int) -> list[dict[str, Any]]:
        """Return the notes of client n; a line that is not whole yet is left out."""
        path = self.history_file(n)
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    # ------------------------------------------------------------------------------------------------ the storm

    def storm(self) -> None:
        """Let faults happen, with one restart of PostgreSQL among them, until all jobs were submitted."""
        plan, count = self.plan, 0
        until(lambda: len(self.ledger.runs()) > 10, 60.0, "the first jobs run")
        while count < plan.faults_max and (count < plan.faults_min or not self._all_submitted()):
            self.wait(plan.gap_s)
            self.raise_failures()
            if count == plan.faults_min // 2:
                mode = self.chance.choice(["fast", "immediate"])
                self.note(f"PostgreSQL restarted ({mode})")
                self.postgres.restart(mode)  # here and in no other thread: it dies with the thread that started it
            # A server is as likely as two workers.
            self.hit([*self.servers, *self.servers, *self.workers], FAULTS, away_s=(0.1, 1.0))
            count += 1
        self._storm_s = time.monotonic() - self._began_at

    def _all_submitted(self) -> bool:
        return all(self._has_submitted(n) for n in range(1, self.plan.clients + 1))

    def _has_submitted(self, n: int) -> bool:
        path = self.history_file(n)
        assert self.clients[n - 1].process.poll() in (None, 0), self.clients[n - 1].output()[-4000:]
        return path.exists() and '"all_submitted"' in path.read_text()

    def calm(self) -> None:
        """Wait until the clients end by themselves, and one server leads."""
        self.heal()
        deadline = time.monotonic() + self.plan.ends_within_s
        for n, client in enumerate(self.clients, 1):
            try:
                code = client.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"client {n} is not answered: {self._progress(n)}") from None
            assert code == 0, client.output()[-4000:]
        until(lambda: sum(server.leads for server in self.servers) == 1, 30.0, "one server leads")
        self._whole_s = time.monotonic() - self._began_at

    def _progress(self, n: int) -> str:
        known = {line["id"] for line in self.history(n) if line["did"] == "result"}
        missing = [job_id for number in range(1, self.jobs_of(n) + 1) if (job_id := f"c{n}-{number}") not in known]
        told = f"{len(known)} of {self.jobs_of(n)} results; the first that are missing: {missing[:10]}"
        if missing:
            with self.servers[0].client() as client:
                told += f"; {missing[0]}: {client.explain(missing[0])}"
        return told

    # ------------------------------------------------------------------------------------------------ the check

    def check(self) -> str:
        found = self._gather()
        self.judge(checks.history_of(found), checks.SHOWN)
        checks.clients_were_told_everything(found, {f"c{n}": self.jobs_of(n) for n in range(1, self.plan.clients + 1)})
        checks.each_job_succeeded(found)
        checks.failures_ran(found)
        checks.results_are_what_the_jobs_wrote(found)
        checks.blobs_are_referred_to(found)
        return self._figures(found)

    def _gather(self) -> Evidence:
        def query(statement: str) -> list[tuple[Any, ...]]:
            return self.postgres.execute(statement, url=self.store_url)

        servers = {server.data.name: server for server in self.servers}
        stored = left_behind.read_store(query)

        def at_rest() -> tuple[int, dict[str, list[int]], list[str]] | None:
            """One leads, under the latest epoch. On a busy machine it may be just about to change once more."""
            led = {name: server.led(all_starts=True) for name, server in servers.items()}
            leads = [name for name, server in servers.items() if server.leads]
            epoch = left_behind.read_epoch(query)[0]
            return (epoch, led, leads) if len(leads) == 1 and led[leads[0]][-1] == epoch else None

        epoch, led, leads = until(at_rest, 20.0, "one server leads, under the registered epoch")
        return Evidence(
            stored=stored._replace(epoch=epoch),
            ends={row[0]: JobEnd(*row) for row in query(checks.ENDS)},
            counters={state: int(n) for state, n in query(checks.COUNTERS)},
            references={row[0]: row[1:] for row in query(checks.REFERENCES)},
            runs=self.ledger.runs(),
            notes={f"c{n}": self.history(n) for n in range(1, self.plan.clients + 1)},
            led=led,
            leads=leads,
            healed_at=self.healed_at,
            ended_at=time.time(),
            faults=self.faults,
            large_every=self.plan.large_every,
        )

    def _figures(self, found: Evidence) -> str:
        jobs = found.stored.jobs
        epochs = sum(map(len, found.led.values()))
        attempts, losses, failures = (sum(getattr(job, name) for job in jobs) for name in ("attempt", "losses", "failures"))
        return (
            f"seed {self.plan.seed}: {len(jobs)} jobs, {attempts} attempts, {losses} losses, {failures} failures, "
            f"{epochs} leaderships; {self.faults_text()}; "
            f"faults for {self._storm_s:.0f} s, all over after {self._whole_s:.0f} s"
        )
