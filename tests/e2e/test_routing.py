"""Which worker gets a job is decided by subjects, and by nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki import Client
from tests.e2e.stage import SOON_S, Ledger, jobs_worker
from tests.support.processes import ServerProcess, WorkerProcess, start_worker
from tests.support.waiting import until

pytestmark = pytest.mark.e2e


def test_a_worker_on_one_subject_never_sees_another(shared_server: ServerProcess, shared_client: Client, ledger: Ledger) -> None:
    # given: a worker on a.*, with room
    with jobs_worker(shared_server, ledger, "--subject", "a.*"):
        # when: jobs of other subjects are submitted before some of its own
        others = {"b.1", "a", "a.1.x", "A.1"}
        for subject in others:
            shared_client.submit(subject=subject, job_id=f"other-{subject}", watch=False)
        own = [shared_client.submit(subject=f"a.{n}", job_id=f"own-{n}") for n in range(20)]

        # then: it runs its own and leaves the others alone
        assert [job.result(SOON_S) for job in own] == [b"1"] * 20
        assert {run.job_id for run in ledger.runs()} == {job.job_id for job in own}
        for subject in others:
            status = shared_client.status(f"other-{subject}")
            assert (status.state, status.attempt) == ("PENDING", 0)
        explained = shared_client.explain("other-b.1")
        assert "'b.1'" in explained.because[0]
        assert explained.facts["nearest_patterns"] == ["a.*"]

        # and: a worker that subscribes to them gets them
        with jobs_worker(shared_server, ledger, "--subject", "b.>", "--subject", "a", "--subject", "*.1.*", "--subject", "A.>"):
            assert [shared_client.job(f"other-{subject}").result(SOON_S) for subject in others] == [b"1"] * 4


def test_a_subject_that_ends_in_a_live_worker_goes_to_that_worker_only(
    shared_server: ServerProcess, shared_client: Client, ledger: Ledger
) -> None:
    with jobs_worker(shared_server, ledger, "--subject", "to.>", "--worker-id", "anna", "--slots", "1") as anna:
        with jobs_worker(shared_server, ledger, "--subject", "to.>", "--worker-id", "bert", "--slots", "1") as bert:
            # when: many jobs are addressed to one of two workers that both subscribe to them
            for_anna = [shared_client.submit(subject="to.anna", job_id=f"anna-{n}") for n in range(10)]
            for_bert = [shared_client.submit(subject="to.bert", job_id=f"bert-{n}") for n in range(10)]

            # then: each gets its own
            assert [job.result(SOON_S) for job in [*for_anna, *for_bert]] == [b"1"] * 20
            assert {run.pid for run in ledger.runs() if run.job_id.startswith("anna")} == {anna.pid}
            assert {run.pid for run in ledger.runs() if run.job_id.startswith("bert")} == {bert.pid}

        # and: when it is gone, what is addressed to it goes to whoever subscribes
        until(lambda: len(shared_client.workers()) == 1, SOON_S, "the server notices that bert is gone")
        assert shared_client.submit(subject="to.bert", job_id="bert-late").result(SOON_S) == b"1"
        assert ledger.of("bert-late")[0].pid == anna.pid


def test_workers_with_different_programs_share_a_subject(
    shared_server: ServerProcess, shared_client: Client, tmp_path: Path
) -> None:
    def worker(name: str) -> WorkerProcess:
        return start_worker(shared_server, "--exec", f"{name}=/bin/true", command=True, log=tmp_path / f"{name}.log")

    # given: two free workers on the default subject, each with a program of its own
    with worker("price"), worker("render"):
        # when: jobs for both come mixed, and one for a program that neither has
        alone = shared_client.submit(exec="nobodys")
        jobs = [shared_client.submit(exec=name) for _ in range(20) for name in ("price", "render")]

        # then: each ends at the worker that has its program, and the last one waits
        assert {(job.outcome(SOON_S).state, job.outcome(SOON_S).attempt) for job in jobs} == {("SUCCEEDED", 1)}
        assert shared_client.status(alone.job_id).attempt == 0
        assert shared_client.explain(alone.job_id).facts["offered_by"] == []
        assert sorted(worker.execs or () for worker in shared_client.workers()) == [("price",), ("render",)]

    # and: it runs as soon as somebody offers it
    with worker("nobodys"):
        assert alone.outcome(SOON_S).state == "SUCCEEDED"


def test_a_worker_can_change_its_subscriptions_while_it_runs(
    shared_server: ServerProcess, shared_client: Client, ledger: Ledger, tmp_path: Path
) -> None:
    with jobs_worker(shared_server, ledger, "--subject", "old.*", "--slots", "2"):
        # given: a running job of its old subject, and a waiting one of the new
        gate = tmp_path / "gate"
        running = shared_client.submit(subject="old.1", payload=f"hold {gate}".encode(), job_id="old-running")
        ledger.wait_for("old-running")
        new = shared_client.submit(subject="new.1", job_id="new-waiting")

        # when: it subscribes anew
        assert shared_client.submit(subject="old.2", payload=b"subscribe new.*", job_id="change").result(SOON_S) == b"1"

        # then: it takes the waiting one, no more of the old, and ends what it had begun
        assert new.result(SOON_S) == b"1"
        shared_client.submit(subject="old.3", job_id="old-after", watch=False)
        assert shared_client.submit(subject="new.2", job_id="new-after").result(SOON_S) == b"1"
        assert shared_client.status("old-after").state == "PENDING"
        gate.touch()
        assert running.result(SOON_S) == b"1"
        assert ledger.attempts("old-after") == []
