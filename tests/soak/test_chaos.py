"""Many deaths of servers and workers, one after the other and all at once, with thousands of jobs on their way."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasuki.core.job import JobSpec
from tests.e2e import test_fault_points as faults
from tests.e2e.stage import SOON_S, Ledger, assert_one_finish_each, jobs_worker
from tests.e2e.test_server_death import kill_under_load
from tests.support.processes import start_server
from tests.support.waiting import until

pytestmark = pytest.mark.soak

STEPS_BETWEEN = ("", ",turn.before_answers")


@pytest.mark.parametrize("seed", range(3))
def test_many_random_kills_of_the_server_lose_and_repeat_nothing(
    tmp_path: Path, store_url: str, ledger: Ledger, seed: int
) -> None:
    kill_under_load(tmp_path, store_url, ledger, kills=25, clients=6, seed=seed)


@pytest.mark.parametrize("step", STEPS_BETWEEN)
@pytest.mark.parametrize("verb", ["submit", "finish", "fail"])
def test_a_job_survives_the_death_of_the_server_between_the_steps(tmp_path: Path, store_url: str, verb: str, step: str) -> None:
    failures = 1 if verb == "fail" else 0
    with faults.armed(tmp_path, store_url, f"{verb}.written{step}") as scene:
        faults.survive(scene, payload=b"stumble" if failures else b"", backoff_s=0.05)
        faults.assert_one_run_each(scene, attempts=1 + failures, failures=failures)


@pytest.mark.parametrize("nth", range(1, 11))
@pytest.mark.parametrize("point", ["turn.begun", "turn.before_commit", "turn.committed", "turn.before_answers", "turn.answered"])
def test_a_job_survives_the_death_of_the_server_in_any_turn(tmp_path: Path, store_url: str, point: str, nth: int) -> None:
    """Counted from the submit: the turns after it start, lease, renew and finish jobs, as it happens."""
    with faults.armed(tmp_path, store_url, f"submit.written,{point}:{nth}") as scene:
        faults.survive(scene, payload=b"rest 1")
        faults.assert_one_run_each(scene, attempts=1, failures=0)


def test_deaths_of_workers_and_servers_together_leave_one_finish_each(tmp_path: Path, store_url: str, ledger: Ledger) -> None:
    # given: five thousand jobs, each of which may lose as many workers as will die
    chance = random.Random(7)
    specs = [
        JobSpec(job_id=f"job-{n}", subject="load.1", payload=b"rest 0.05", max_losses=50, backoff_s=0.1) for n in range(5000)
    ]
    with (
        start_server(tmp_path, "--lease-ttl", "6", store=store_url) as server,
        server.client() as client,
        ThreadPoolExecutor(1) as pool,
    ):
        workers = [jobs_worker(server, ledger, "--slots", "8") for _ in range(3)]
        try:
            jobs = client.submit_many(specs)
            results = pool.submit(lambda: [job.result(600) for job in jobs])
            moment = threading.Event()

            # when: again and again a worker is killed and replaced, or the server is killed and restarted, or both
            for _ in range(12):
                done = len(ledger.runs())
                until(lambda done=done: results.done() or len(ledger.runs()) > done + 50, 6 * SOON_S, "work goes on")
                moment.wait(chance.uniform(0.0, 0.5))
                dies = chance.choice(["worker", "server", "both"])
                if dies != "server":
                    workers.pop(0).kill()
                if dies != "worker":
                    server.kill()
                    server.restart()
                if dies != "server":
                    workers.append(jobs_worker(server, ledger, "--slots", "8"))

            # then: everything ends, each job was finished once, and what ran twice had lost its worker
            assert len(results.result(600)) == len(specs)
        finally:
            for worker in workers:
                worker.kill()
        assert_one_finish_each(client, [spec.job_id for spec in specs], "load")
        runs = Counter(run.job_id for run in ledger.runs())
        views = [v for at in range(0, 5000, 1000) for v in client.statuses(*(s.job_id for s in specs[at : at + 1000]))]
        assert {view.job_id for view in views if runs[view.job_id] > view.losses + 1} == set()
        assert {run for run, count in Counter((run.job_id, run.attempt) for run in ledger.runs()).items() if count > 1} == set()
