"""Control planes over one Redis with AOF, workers over HTTP and on the queue itself: nothing is lost, only poison is dead.

Processes and Redis itself are killed and frozen while jobs are submitted. Some jobs are poison: they fail always, or kill their
worker. No acknowledged job is lost, none is finished twice, the dead letters are exactly the poison. The history is made of the
store, of the ledger of runs, and of the answers to the submitter.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tasuki.core.job import Job, JobSpec, State, body_hash
from tasuki.core.lifecycle import LEASE_MARGIN_S
from tasuki.stores.redis.store import RedisStore
from tasuki.testing.sim.history import AnsweredEvent, AnyLine, AskedEvent
from tests.support.chaos import evidence
from tests.support.chaos.evidence import StoredIncident, StoredJob, StoreEvidence
from tests.support.chaos.rig import Fault, Rig
from tests.support.ports import free_port
from tests.support.processes import TASUKI, ChildProcess, ServerProcess, start_server
from tests.support.redis_service import RedisService
from tests.support.waiting import until

APP = "zpe"
SUBJECT = f"job.assign.{APP}"
HTTP_WORKER = Path(__file__).with_name("http_worker.py")
APP_JOB = Path(__file__).with_name("app_job.sh")
BATCH = 20
SHOWN = ("I1", "I2", "I3", "I4", "I5", "I6", "I11", "I13", "liveness")
POISON = ("fail", "die")
FAULTS = [Fault.KILLED] * 6 + [Fault.FROZEN, Fault.FROZEN_FOR_LONG]


@dataclass(frozen=True, kw_only=True)
class RedisPlan:
    """Amounts of everything."""

    seed: int = 0
    jobs: int
    http_workers: int
    queue_workers: int
    """Workers that lease straight from Redis."""
    faults: int
    gap_s: tuple[float, float]
    """Between two faults."""
    redis_restarts: int = 1
    poison_of_each: int = 2
    poison_losses: int = 1
    """The number of workers that a job may kill before its last."""
    lease_ttl_s: float = 1.0
    lead_ttl_s: float = 1.0
    ends_within_s: float = 60.0
    """After the last fault."""


class RedisRig(Rig):
    """The processes of one run."""

    def __init__(self, plan: RedisPlan, folder: Path, redis_server: Path | None = None) -> None:
        super().__init__(plan, folder)
        self.plan = plan
        self._redis_server = redis_server
        self.specs = list(_specs(plan))
        self.told: list[AnyLine] = []
        self._reports = folder / "reports.jsonl"

    def start(self, stack: contextlib.ExitStack) -> None:
        self.redis = stack.enter_context(RedisService(program=self._redis_server))
        self.store_url = self.redis.url()
        self.servers = self._start_servers(stack)
        self._admin = stack.enter_context(httpx.Client(headers=self._bearer(self.servers[0].token), timeout=20.0))
        on_the_queue = [self._queue_worker(stack, n) for n in range(self.plan.queue_workers)]
        self.workers = [*on_the_queue, *(self._http_worker(stack, n) for n in range(self.plan.http_workers))]
        for worker in on_the_queue:
            worker.wait_for_output("connected ")

    def _start_servers(self, stack: contextlib.ExitStack) -> list[ServerProcess]:
        plan = self.plan
        times = ("--http-lease-ttl", str(plan.lease_ttl_s), "--lead-ttl", str(plan.lead_ttl_s))
        ports = [free_port() for _ in range(2)]
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]

        def start(n: int) -> ServerProcess:
            words = ("--http", f"127.0.0.1:{ports[n]}", "--app", APP, *times)
            blobs = str(self.folder / "blobs")
            return start_server(self.folder, *words, store=self.store_url, blobs=blobs, data=f"server-{n}")

        return [stack.enter_context(server) for server in self.pool.map(start, range(2))]

    def _http_worker(self, stack: contextlib.ExitStack, n: int) -> ChildProcess:
        compute = f"{self.urls[n % 2]}/calc/{APP}/compute"
        enrol = self._admin.post(f"{compute}/enroll-tokens", json={}).json()["enroll_token"]
        token = httpx.post(f"{compute}/servers/register", json={}, headers=self._bearer(enrol)).json()["worker_token"]
        urls = self.urls if n % 2 == 0 else self.urls[::-1]
        linger = str(LEASE_MARGIN_S + 1.0)
        words = ["--app", APP, "--ledger", self.ledger.path, "--reports", self._reports, "--linger", linger]
        command = [sys.executable, HTTP_WORKER, ",".join(urls), *words]
        return stack.enter_context(ChildProcess(command, self.folder / f"http-worker-{n}.log", {"TASUKI_TOKEN": token}))

    def _queue_worker(self, stack: contextlib.ExitStack, n: int) -> ChildProcess:
        name = f"queue-worker-{n}"
        words = ["--app", APP, "--exec", f"{APP}=/bin/sh {APP_JOB} {self.ledger.path}", "--slots", "3"]
        words += ["--lease-ttl", str(self.plan.lease_ttl_s), "--worker-id", name, "--data", str(self.folder / name)]
        env = {"TASUKI_URL": self.store_url, "TASUKI_BLOBS": str(self.folder / "blobs")}
        return stack.enter_context(ChildProcess([*TASUKI, "worker", *words], self.folder / f"{name}.log", env))

    @staticmethod
    def _bearer(token: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {token}"}

    # ------------------------------------------------------------------------------------------------ the storm

    def storm(self) -> None:
        """Submit all jobs while faults happen."""
        plan = self.plan
        submitting = self.pool.submit(self._submit_all)
        until(lambda: len(self.ledger.runs()) > 5, 30.0, "the first jobs run")
        restarts = {plan.faults * (n + 1) // (plan.redis_restarts + 1) for n in range(plan.redis_restarts)}
        for n in range(plan.faults):
            self.wait(plan.gap_s)
            self.raise_failures()
            if n in restarts:
                self._restart_redis()
            else:
                self.hit(self.servers if n % 3 == 0 else self.workers, FAULTS, away_s=(0.1, 0.6))
        submitting.result(plan.ends_within_s)

    def calm(self) -> None:
        """Wait until every job has ended."""
        self.heal()
        until(self._all_ended, self.plan.ends_within_s, "every job has ended")

    def ended_by_itself(self, process: ChildProcess) -> None:
        """Start a worker again that a poison job has killed."""
        if process in self.servers:
            super().ended_by_itself(process)
        process.start_again()

    def _submit_all(self) -> None:
        for n, some in enumerate(_batches(self.specs)):
            ids, bodies = tuple(spec.job_id for spec in some), tuple(body_hash(spec).hex() for spec in some)
            call = f"submit {n}"
            self.told.append(AskedEvent(at=time.time(), client="c", call=call, verb="submit", job_ids=ids, bodies=bodies))
            jobs = [_body(spec) for spec in some]
            answer = until(lambda n=n, jobs=jobs: self._submitted(n, jobs), 60.0, f"{call} is answered")
            created = tuple(one["job_id"] for one in answer if one.get("created"))
            self.told.append(AnsweredEvent(at=time.time(), client="c", call=call, answer="ok", accepted=ids, created=created))

    def _submitted(self, n: int, jobs: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        url = self.urls[(n + self.chance.randrange(2)) % 2]
        try:
            answer = self._admin.post(f"{url}/v1/jobs", json={"jobs": jobs})
        except httpx.TransportError:
            return None
        assert answer.status_code in (200, 503), answer.text
        accepted: list[dict[str, Any]] | None = answer.json()["jobs"] if answer.status_code == 200 else None
        assert not [one for one in accepted or () if one.get("error")], accepted
        return accepted

    def _restart_redis(self) -> None:
        """Restart Redis, in this thread and no other: it dies with the thread that started it."""
        killed = self.chance.random() < 0.7
        self.note("Redis killed" if killed else "Redis stopped", "redis")
        (self.redis.kill if killed else self.redis.stop)()
        self.wait((0.0, 0.5))
        self.redis.start()

    def _all_ended(self) -> bool:
        self.raise_failures()
        try:
            groups = self._admin.get(f"{self.urls[0]}/v1/stats").json().get("groups", {})
        except httpx.TransportError:
            return False
        counts = groups.get(APP, {})
        return bool(counts.get("succeeded", 0) + counts.get("failed", 0) == len(self.specs))

    # ------------------------------------------------------------------------------------------------ what must hold

    def check(self) -> str:
        ids = [spec.job_id for spec in self.specs]
        with contextlib.closing(RedisStore.open(self.store_url, app=APP, check=False)) as store:
            jobs = [job for job in store.get(ids) if job is not None]
            incidents = {job_id: store.incidents(job_id) for job_id in ids}
            stored = _stored(jobs, incidents, store.epoch())
        assert [job.job_id for job in jobs] == ids, "a job is gone"
        self.judge(self._history(stored), SHOWN)
        poison = {spec.job_id for spec in self.specs if _does(spec) in POISON}
        self._only_poison_is_dead(jobs, poison)
        self._reports_were_answered_by_what_is_stored(jobs)
        return self._figures(jobs)

    def _history(self, stored: StoreEvidence) -> list[AnyLine]:
        return evidence.history(
            evidence.store_lines(stored),
            evidence.began_lines(self.ledger.runs()),
            self.told,
            self.faults,
            stored=stored._replace(epoch=0),  # which server led when is not looked at here
            healed_at=self.healed_at,
            ended_at=time.time(),
            watched=("began", "asked", "answered"),
        )

    def _only_poison_is_dead(self, jobs: list[Job], poison: set[str]) -> None:
        client = self.redis.client(int(self.store_url.rpartition("/")[2]))
        letters = client.lrange(f"{APP}:dlq", 0, -1)
        assert sorted(letters) == sorted(poison)
        states = {job.job_id: job.state for job in jobs}
        assert {job_id for job_id, state in states.items() if state is not State.SUCCEEDED} == poison, states
        assert client.zcard(f"{APP}:lease:index") == client.llen(f"{APP}:queue") == client.zcard(f"{APP}:delay") == 0
        counts = self._admin.get(f"{self.urls[0]}/v1/stats").json()["groups"][APP]
        assert {name: n for name, n in counts.items() if n} == {"succeeded": len(jobs) - len(poison), "failed": len(poison)}

    def _reports_were_answered_by_what_is_stored(self, jobs: list[Job]) -> None:
        """Check that a worker that was told 200 for a result made the stored one; all others were told 409."""
        reports = [json.loads(line) for line in self._reports.read_text().splitlines()]
        unexpected = [report for report in reports if report["status"] not in (200, 409)]
        assert not unexpected, unexpected[:3]
        results = [report for report in reports if report["status"] == 200 and not report["fails"]]
        stored = {job.job_id: job for job in jobs}
        for report in results:
            job = stored[report["job_id"]]
            assert job.outcome is not None
            assert json.loads(job.outcome.result or b"{}") == {"attempt": job.attempt, "pid": report["pid"]}, report
            assert report["attempt"] == job.attempt
        on_the_queue = [job for job in jobs if (job.assigned_worker_id or "").startswith("queue-worker")]
        assert results, "the workers over HTTP had nothing to do"
        assert on_the_queue or not self.plan.queue_workers, "those on the queue had nothing to do"

    def _figures(self, jobs: list[Job]) -> str:
        attempts, losses, failures = (sum(getattr(job, name) for job in jobs) for name in ("attempt", "losses", "failures"))
        took_s = time.time() - self.faults[0].at
        return (
            f"seed {self.plan.seed}: {len(jobs)} jobs, {attempts} attempts, {losses} losses, {failures} failures; "
            f"{self.faults_text()}; all over {took_s:.0f} s after the first fault"
        )


# ---------------------------------------------------------------------------------------------------- the jobs


def _specs(plan: RedisPlan) -> list[JobSpec]:
    """Return jobs of the app, with poison among the first of them, so that it is through in time."""
    made: list[JobSpec] = []
    for n in range(plan.jobs):
        do = "linger" if n % 40 == 7 else "stumble" if n % 10 == 3 else ""
        made.append(_spec(f"job-{n}", do, max_losses=100))
    for n in range(plan.poison_of_each):
        made.insert(BATCH // 2 + n, _spec(f"fails-{n}", "fail", max_losses=100))
        made.insert(BATCH // 2 + n, _spec(f"kills-{n}", "die", max_losses=plan.poison_losses))
    return made


def _spec(job_id: str, do: str, max_losses: int) -> JobSpec:
    """Return a job with delays that a test can wait for."""
    payload = json.dumps({"do": do}).encode()
    return JobSpec(job_id=job_id, subject=SUBJECT, payload=payload, max_retries=2, max_losses=max_losses, backoff_s=0.1)


def _does(spec: JobSpec) -> str:
    return str(json.loads(spec.payload)["do"])


def _body(spec: JobSpec) -> dict[str, Any]:
    """Return the job as /v1/jobs takes it."""
    budgets = {"max_retries": spec.max_retries, "max_losses": spec.max_losses, "backoff_s": spec.backoff_s}
    return {"job_id": spec.job_id, "subject": spec.subject, "payload": spec.payload.decode(), **budgets}


def _batches(specs: list[JobSpec]) -> list[list[JobSpec]]:
    return [specs[start : start + BATCH] for start in range(0, len(specs), BATCH)]


# ---------------------------------------------------------------------------------------------------- the store as evidence


def _stored(jobs: list[Job], incidents: dict[str, list[Any]], epoch: tuple[int, str]) -> StoreEvidence:
    stories = [
        StoredIncident(job_id, incident.at, incident.kind, incident.attempt, incident.worker_id)
        for job_id, story in incidents.items()
        for incident in story
    ]
    return StoreEvidence([_stored_job(job) for job in jobs], stories, *epoch)


def _stored_job(job: Job) -> StoredJob:
    outcome = job.outcome
    return StoredJob(
        job_id=job.job_id,
        state=job.state,
        attempt=job.attempt,
        generation=job.generation,
        failures=job.failures,
        losses=job.losses,
        max_retries=job.spec.max_retries,
        max_losses=job.spec.max_losses,
        lease_id=job.lease.lease_id if job.lease is not None else "",
        not_before=job.not_before,
        error_code=outcome.error_code if outcome is not None else None,
        result_sha256=outcome.result_sha256 if outcome is not None else None,
        cancel_requested=int(job.cancel_requested),
        body_hash=job.body_hash,
        leader_epoch=job.leader_epoch,
        created_at=job.created_at,
        finished_at=job.finished_at,
        worker_id=job.assigned_worker_id,
    )
