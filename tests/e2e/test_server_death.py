"""The server dies under load and comes back: nothing that was acknowledged is lost, and nothing that runs is run again."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasuki import Client
from tasuki.core.job import JobSpec
from tasuki.errors import Conflict
from tests.e2e.stage import (
    SOON_S,
    Ledger,
    assert_one_finish_each,
    command_worker,
    jobs_worker,
    stdout_of,
    story,
)
from tests.support.processes import ServerProcess, start_server
from tests.support.waiting import until

pytestmark = pytest.mark.e2e


def submit_until(stop: threading.Event, client: Client, name: str, jobs_max: int) -> dict[str, bytes]:
    """Submit small batches until told to stop, waiting for each batch's results; what came back, by job_id."""
    results: dict[str, bytes] = {}
    numbers = iter(range(jobs_max))
    while not stop.is_set():
        work = ("", "rest 0.02", "rest 0.3")
        batch = [
            JobSpec(job_id=f"{name}-{number}", subject="load.1", payload=work[number % 3].encode())
            for number, _ in zip(numbers, range(10), strict=False)
        ]
        if not batch:
            break
        results.update((handle.job_id, handle.result(6 * SOON_S)) for handle in client.submit_many(batch))
    return results


def kill_under_load(
    tmp_path: Path, store_url: str, ledger: Ledger, *, kills: int, clients: int, seed: int, jobs_max: int = 100_000
) -> None:
    """Kill the server at random moments while clients submit and two workers work; check all that must hold."""
    chance = random.Random(seed)
    stop = threading.Event()
    with start_server(tmp_path, store=store_url) as server, jobs_worker(server, ledger), jobs_worker(server, ledger):
        crowd = [server.client() for _ in range(clients)]
        with ThreadPoolExecutor(clients) as pool:
            submitting = [pool.submit(submit_until, stop, client, f"c{place}", jobs_max) for place, client in enumerate(crowd)]
            try:
                for _ in range(kills):
                    done = len(ledger.runs())
                    until(lambda done=done: len(ledger.runs()) > done + 20, 3 * SOON_S, "jobs run between two kills")
                    stop.wait(chance.uniform(0.0, 0.15))  # this is the random moment, not a wait for something
                    server.kill()
                    server.restart()
            finally:
                stop.set()
            # then: the clients, never restarted, have the result of everything they submitted
            results = {job_id: result for one in submitting for job_id, result in one.result(6 * SOON_S).items()}
        assert len(results) > 20 * kills
        assert_one_finish_each(crowd[0], results, "load")
        # and: no job ran twice, and none was granted twice
        runs = Counter(run.job_id for run in ledger.runs())
        assert {job_id: count for job_id, count in runs.items() if count != 1} == {}
        assert set(runs) == set(results)
        assert set(results.values()) == {b"1"}
        for client in crowd:
            client.close()


def test_killing_the_server_at_random_moments_under_load_loses_and_repeats_nothing(
    tmp_path: Path, store_url: str, ledger: Ledger
) -> None:
    kill_under_load(tmp_path, store_url, ledger, kills=3, clients=3, seed=random.randrange(1 << 30))


def test_running_jobs_outlive_the_server_and_are_not_run_again(tmp_path: Path, store_url: str, ledger: Ledger) -> None:
    # given: a handler and a command that run, both behind a gate
    gate = tmp_path / "gate"
    with (
        start_server(tmp_path, store=store_url) as server,
        jobs_worker(server, ledger, "--subject", "hold.>"),
        command_worker(server, ledger, "--subject", "step.>"),
        server.client() as client,
    ):
        handled = client.submit(subject="hold.1", payload=f"hold {gate}".encode(), job_id="handled")
        command = client.submit(subject="step.1", exec="step", args=["hold", str(gate)], job_id="command")
        waiting = client.submit(subject="nobody.1", job_id="waiting")
        begun = [ledger.wait_for(job.job_id).pid for job in (handled, command)]
        before = _workers(client)

        # when: the server is killed and started twice
        for _ in range(2):
            server.kill()
            server.restart()

            # then: the same workers come back with their jobs, and renew them
            until(lambda: _workers(client) == before, SOON_S, "both workers are back, with one job each")
            until(lambda: _states(client, "handled", "command") == ["RUNNING"] * 2, SOON_S, "both are known to run")

        gate.touch()
        assert handled.result(SOON_S) == b"1"
        assert stdout_of(command.result(SOON_S)) == "attempt 1\n"
        assert [run.pid for job in (handled, command) for run in ledger.of(job.job_id)] == begun
        assert story(client, "handled") == story(client, "command") == []
        assert client.status("waiting").state == "PENDING"
        assert not waiting.done


def test_a_job_that_ends_while_the_server_is_away_is_reported_when_it_is_back(
    tmp_path: Path, store_url: str, ledger: Ledger
) -> None:
    # given: a running job
    gate = tmp_path / "gate"
    with start_server(tmp_path, store=store_url) as server, jobs_worker(server, ledger) as worker, server.client() as client:
        job = client.submit(subject="hold.1", payload=f"hold {gate}".encode(), job_id="away")
        ledger.wait_for("away")

        # when: it ends while there is no server
        server.kill()
        worker.wait_for_output("connection lost")
        gate.touch()
        server.restart()

        # then: its result arrives all the same, from its only run
        assert job.result(SOON_S) == b"1"
        assert ledger.attempts("away") == [1]


def test_a_refused_submit_of_its_id_does_not_end_the_wait_for_a_job(tmp_path: Path, store_url: str, ledger: Ledger) -> None:
    # given: a running job, under whose id the same client was refused another body
    gate = tmp_path / "gate"
    with start_server(tmp_path, store=store_url) as server, jobs_worker(server, ledger), server.client() as client:
        job = client.submit(subject="hold.1", payload=f"hold {gate}".encode(), job_id="refused")
        ledger.wait_for("refused")
        with pytest.raises(Conflict):
            client.submit(subject="hold.1", payload=b"another", job_id="refused")

        # when: the server forgets who waits for what
        server.kill()
        server.restart()

        # then: the client has asked for the result again
        gate.touch()
        assert job.result(SOON_S) == b"1"


def test_an_orderly_restart_of_the_server_keeps_everything_too(tmp_path: Path, store_url: str, ledger: Ledger) -> None:
    gate = tmp_path / "gate"
    with start_server(tmp_path, store=store_url) as server, jobs_worker(server, ledger), server.client() as client:
        job = client.submit(subject="hold.1", payload=f"hold {gate}".encode(), job_id="orderly")
        ledger.wait_for("orderly")

        assert server.stop() == 0
        server.restart()

        gate.touch()
        assert job.result(SOON_S) == b"1"
        assert ledger.attempts("orderly") == [1]


def test_leases_are_renewed_by_the_restarted_server(
    server: ServerProcess, client: Client, ledger: Ledger, tmp_path: Path
) -> None:
    # given: a job whose lease of 3 s would be over, and reaped, soon after the restart if nobody renewed it
    gate = tmp_path / "gate"
    with jobs_worker(server, ledger, "--on-disconnect", "keep", "--reconnect-grace", "60"):
        job = client.submit(subject="hold.1", payload=f"hold {gate}".encode(), job_id="renewed")
        ledger.wait_for("renewed")
        before = _workers(client)
        server.kill()
        server.restart()
        until(lambda: _workers(client) == before, SOON_S, "the worker is back with its job")

        # when: the lease was renewed several times
        expiry = client.explain("renewed").facts["lease_expires_at"]
        for _ in range(3):
            last = expiry
            expiry = until(
                lambda last=last: _later_expiry(client, last), SOON_S, f"a heartbeat moves the lease's end past {last}"
            )

        # then: the job is still in its first attempt
        gate.touch()
        assert job.result(SOON_S) == b"1"
        assert ledger.attempts("renewed") == [1]


def _later_expiry(client: Client, last: float) -> float:
    now = client.explain("renewed").facts["lease_expires_at"]
    return now if now > last else 0.0


def _states(client: Client, *job_ids: str) -> list[str]:
    return [client.status(job_id).state for job_id in job_ids]


def _workers(client: Client) -> dict[str, int]:
    """The number of jobs that each live worker runs, by its incarnation."""
    return {worker.incarnation: worker.running for worker in client.workers()}
