"""The chaos harness: servers on one PostgreSQL, workers and clients as processes, all of them killed and frozen at random.

    with Scene(plan, tmp_path, postgres, url) as scene:
        scene.storm()          # faults, until the clients have submitted everything
        scene.calm()           # all processes run again; every client ends by itself
        figures = check(scene) # what must hold whatever happened; AssertionError names the invariant

Whatever is killed comes back after a moment, as under systemd; whatever is frozen goes on. Clients are never touched. What
happens is drawn from the plan's seed: the same seed gives much the same faults, though not at the same instruction.

What follows is in chaos_checks.py: it reads the database, the ledger that every run of a job writes to, the servers' logs and
what the clients noted, and makes one history of it for the checker.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tasuki.core.lifecycle import LEASE_MARGIN_S
from tasuki.testing.sim.history import FaultEvent
from tests.e2e.stage import Ledger, jobs_worker
from tests.support.postgres_service import PostgresService
from tests.support.processes import ChildProcess, ServerProcess, start_servers, url_of
from tests.support.waiting import until

CLIENT = Path(__file__).with_name("client.py")
REVIVED_WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of everything."""

    seed: int
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


@dataclass
class Deeds:
    """What was done, for the report."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[FaultEvent] = field(default_factory=list)
    began_at: float = field(default_factory=time.monotonic)
    storm_s: float = 0.0
    whole_s: float = 0.0
    healed_at: float = 0.0
    """Wall clock, as all times that others noted."""

    def note(self, what: str, target: str = "") -> None:
        self.counts[what] += 1
        self.faults.append(FaultEvent(at=time.time(), fault=what, target=target))


class Scene:
    """The processes of one run."""

    def __init__(self, plan: Plan, folder: Path, postgres: PostgresService, store_url: str) -> None:
        self.plan = plan
        self.folder = folder
        self.postgres = postgres
        self.store_url = store_url
        self.ledger = Ledger(folder / "ledger")
        self.deeds = Deeds()
        self.servers: list[ServerProcess] = []
        self.workers: list[ChildProcess] = []
        self.clients: list[ChildProcess] = []
        self._stack = contextlib.ExitStack()
        self._chance = random.Random(plan.seed)
        self._moment = threading.Event()  # never set: its wait is the random moment of a fault, and no wait for anything
        self._busy: dict[ChildProcess, Future[None]] = {}

    # ------------------------------------------------------------------------------------------------ life

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, stack: contextlib.ExitStack) -> None:
        plan = self.plan
        ttls = ("--lease-ttl", str(plan.lease_ttl_s), "--lead-ttl", str(plan.lead_ttl_s))
        blobs = self.folder / "blobs"
        self.servers = stack.enter_context(
            start_servers(self.folder, plan.servers, *ttls, store=self.store_url, blobs=str(blobs))
        )
        self._pool = stack.enter_context(ThreadPoolExecutor(plan.servers + plan.workers))
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
        """How many jobs client n submits."""
        share, rest = divmod(self.plan.jobs, self.plan.clients)
        return share + (n <= rest)

    def history_file(self, n: int) -> Path:
        return self.folder / f"client-{n}.jsonl"

    def history(self, n: int) -> list[dict[str, Any]]:
        """What client n learned, line by line; a line that is not whole yet is left out."""
        path = self.history_file(n)
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    # ------------------------------------------------------------------------------------------------ the storm

    def storm(self) -> None:
        """Faults at random, with one restart of PostgreSQL among them, until all jobs were submitted."""
        plan, chance, faults = self.plan, self._chance, 0
        until(lambda: len(self.ledger.runs()) > 10, 60.0, "the first jobs run")
        while faults < plan.faults_max and (faults < plan.faults_min or not self._all_submitted()):
            self._moment.wait(chance.uniform(*plan.gap_s))
            self._raise_failures()
            if faults == plan.faults_min // 2:
                mode = chance.choice(["fast", "immediate"])
                self.deeds.note(f"PostgreSQL restarted ({mode})")
                self.postgres.restart(mode)  # here and in no other thread: it dies with the thread that started it
            self._one_fault()
            faults += 1
        self.deeds.storm_s = time.monotonic() - self.deeds.began_at

    def _one_fault(self) -> None:
        chance = self._chance
        servers = [server for server in self.servers if server not in self._busy]
        workers = [worker for worker in self.workers if worker not in self._busy]
        victims: list[ChildProcess] = [*servers, *servers, *workers]  # a server is as likely as two workers
        victim, kills, long, away_s = chance.random(), chance.random() < 0.5, chance.random() < 0.3, chance.uniform(0.1, 1.0)
        if not victims:
            return
        chosen = victims[int(victim * len(victims))]
        kind = "server" if chosen in servers else "worker"
        if long and not kills:  # so that its leases, or its leadership, are over when it wakes up
            away_s += self.plan.lease_ttl_s + LEASE_MARGIN_S
        what = "killed" if kills else "frozen for long" if long else "frozen"
        self.deeds.note(f"{kind}s {what}", chosen.log.stem)
        self._busy[chosen] = self._pool.submit(self._kill if kills else self._freeze, chosen, away_s)

    def _kill(self, victim: ChildProcess, away_s: float) -> None:
        victim.kill()
        self._moment.wait(away_s)
        self._revive(victim)

    def _freeze(self, victim: ChildProcess, away_s: float) -> None:
        victim.signal(signal.SIGSTOP)
        self._moment.wait(away_s)
        victim.signal(signal.SIGCONT)

    def _revive(self, victim: ChildProcess) -> None:
        """Start it until it stays: without a database a server ends again, and whoever supervises it starts it again."""
        if not isinstance(victim, ServerProcess):
            victim.start_again()
            return

        def started() -> bool:
            try:
                victim.restart()
            except AssertionError:
                return False
            return True

        until(started, REVIVED_WITHIN_S, f"{victim.command} starts again")

    def _raise_failures(self) -> None:
        """Forget the faults that are over; whatever went wrong with them is raised."""
        for victim, deed in list(self._busy.items()):
            if deed.done():
                del self._busy[victim]
                deed.result()
        for process in (*self.servers, *self.workers):
            assert process in self._busy or process.running, f"{process.command} ended by itself:\n{process.output()[-4000:]}"

    def _all_submitted(self) -> bool:
        return all(self._has_submitted(n) for n in range(1, self.plan.clients + 1))

    def _has_submitted(self, n: int) -> bool:
        path = self.history_file(n)
        assert self.clients[n - 1].process.poll() in (None, 0), self.clients[n - 1].output()[-4000:]
        return path.exists() and '"all_submitted"' in path.read_text()

    # ------------------------------------------------------------------------------------------------ after it

    def calm(self) -> None:
        """No more faults: the clients end by themselves, one server leads."""
        for deed in list(self._busy.values()):
            deed.result()
        self._raise_failures()
        self.deeds.healed_at = time.time()
        deadline = time.monotonic() + self.plan.ends_within_s
        for n, client in enumerate(self.clients, 1):
            try:
                code = client.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"client {n} is not answered: {self._progress(n)}") from None
            assert code == 0, client.output()[-4000:]
        until(lambda: sum(server.leads for server in self.servers) == 1, 10.0, "one server leads")
        self.deeds.whole_s = time.monotonic() - self.deeds.began_at

    def _progress(self, n: int) -> str:
        known = {line["id"] for line in self.history(n) if line["did"] == "result"}
        missing = [job_id for number in range(1, self.jobs_of(n) + 1) if (job_id := f"c{n}-{number}") not in known]
        told = f"{len(known)} of {self.jobs_of(n)} results; the first that are missing: {missing[:10]}"
        if missing:
            with self.servers[0].client() as client:
                told += f"; {missing[0]}: {client.explain(missing[0])}"
        return told
