"""Subjects and routes decide which worker gets a job, and nothing else does."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki import Client
from tasuki.core.job import InputFile, JobSpec
from tasuki.core.routing import Ring
from tests.e2e.stage import LEAD_TTL_S, LEASE_TTL_S, LOST_WITHIN_S, SOON_S, Ledger, jobs_worker, wait_until_met
from tests.support.processes import ServerProcess, WorkerProcess, start_server, start_worker
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


# ---------------------------------------------------------------------------------------------------- routing policies


@pytest.fixture
def routed_pair(tmp_path: Path, postgres_url: str) -> Iterator[list[ServerProcess]]:
    """Two servers on one database; only the first was started with routes."""
    ttls = ("--lease-ttl", str(LEASE_TTL_S), "--lead-ttl", str(LEAD_TTL_S))
    with (
        start_server(tmp_path, *ttls, "--route", "echo.>=sticky", data="one", store=postgres_url) as one,
        start_server(tmp_path, *ttls, data="two", store=postgres_url) as two,
    ):
        wait_until_met([one, two])
        yield [one, two]


def test_sticky_keys_stay_with_their_workers_at_two_servers_and_only_those_of_one_that_left_or_joined_move(
    routed_pair: list[ServerProcess],
) -> None:
    one, two = routed_pair
    with contextlib.ExitStack() as workers, one.client() as here, two.client() as there:
        for server, name in ((one, "w1"), (two, "w2")):
            workers.enter_context(start_worker(server, "--worker-id", name))
        leaving = start_worker(two, "--worker-id", "w3")
        until(lambda: all(len(known(server)) == 3 for server in routed_pair), what="both servers know three workers")

        def owners(round_: str) -> dict[str, str | None]:
            keys = [f"key-{number}" for number in range(30)]
            jobs = {}
            for number, key in enumerate(keys):
                client = here if number % 2 else there
                jobs[key] = client.submit(subject="echo.x", job_id=f"{round_}-{key}", route_key=key)
            for job in jobs.values():
                job.result(SOON_S)
            return {key: here.status(job.job_id).assigned_worker_id for key, job in jobs.items()}

        first, second = owners("first"), owners("second")
        assert set(first.values()) == {"w1", "w2", "w3"}
        assert second == first

        leaving.stop()
        until(lambda: all(len(known(server)) == 2 for server in routed_pair), what="both servers know that one has left")
        third = owners("third")
        assert {key for key in first if third[key] != first[key]} == {key for key in first if first[key] == "w3"}

        # and: one that joins takes its own keys, and no other one moves
        workers.enter_context(start_worker(one, "--worker-id", "w4"))
        until(lambda: all(len(known(server)) == 3 for server in routed_pair), what="both servers know that one has joined")
        fourth = owners("fourth")
        assert {fourth[key] for key in third if fourth[key] != third[key]} == {"w4"}


def test_jobs_go_where_their_cached_inputs_are_as_heartbeats_tell(tmp_path: Path) -> None:
    scene = tmp_path / "scene.bin"
    scene.write_bytes(b"x" * 100_000)
    sees = ("--exec", "see=/bin/cat {args}", "--subject", "render.>")
    caches = {name: ("--cache", str(tmp_path / name)) for name in ("holder", "other")}
    with (
        start_server(tmp_path, "--lease-ttl", str(LEASE_TTL_S), "--route", "render.>=cache-affinity") as server,
        server.client() as client,
        start_worker(server, *sees, "--worker-id", "holder", *caches["holder"], command=True),
    ):
        # given: files that were put on the one worker that was there
        put = server.tasuki("cache", "put", "scene", str(scene), "--require", "all")
        assert put.returncode == 0, put.stderr
        with start_worker(server, *sees, "--worker-id", "other", *caches["other"], command=True):
            until(lambda: len(known(server)) == 2, what="another worker has joined")
            until(lambda: bool(held(server)["holder"]), what="a heartbeat has told what the first one holds")
            assert not held(server)["other"]

            # when: jobs with that input come, one after the other: both workers are idle
            files = [InputFile("scene.bin", cache=("scene", "scene.bin"))]
            jobs = [client.submit(subject="render.x", exec="see", args=["in/scene.bin"], files=files) for _ in range(6)]
            for job in jobs:
                assert job.outcome(SOON_S).state == "SUCCEEDED"

            # then: all are done where the file is
            assert {client.status(job.job_id).assigned_worker_id for job in jobs} == {"holder"}


def held(server: ServerProcess) -> dict[str, str]:
    return {worker["worker_id"]: worker.get("held", "") for worker in json.loads(server.tasuki("workers", "--json").stdout)}


def test_explain_says_by_which_policy_a_job_is_where_it_is_and_why_another_waits(tmp_path: Path, ledger: Ledger) -> None:
    with (
        start_server(tmp_path, "--route", "session.>=sticky", "--route-wait", "1h") as server,
        server.client() as client,
        jobs_worker(server, ledger, "--worker-id", "w1", "--slots", "1"),
        jobs_worker(server, ledger, "--worker-id", "w2", "--slots", "1"),
    ):
        until(lambda: len(known(server)) == 2, what="both workers are there")
        owner, other = Ring(["w1", "w2"]).order("user-7")
        gate = tmp_path / "gate"
        held = client.submit(subject="session.x", payload=f"hold {gate}".encode(), job_id="held", route_key="user-7")
        ledger.wait_for("held")
        waiting = client.submit(subject="session.x", job_id="waiting", route_key="user-7")

        there, not_yet = client.explain("held"), client.explain("waiting")
        words = "The route 'session.>' chooses by sticky. Its key is 'user-7', which belongs to it among the 2 workers that fit."
        assert words in there.because[1]
        assert (there.facts["worker_id"], there.facts["chosen_by"]) == (owner, "STICKY")
        assert (not_yet.facts["why"], not_yet.facts["workers_with_credit"]) == ("ROUTE_WAIT", [other])
        gate.touch()
        assert [held.result(SOON_S), waiting.result(SOON_S)] == [b"1", b"1"]


def known(server: ServerProcess) -> list[object]:
    return list(json.loads(server.tasuki("workers", "--json").stdout))


def test_a_broadcast_reaches_workers_of_all_servers_and_one_that_is_away_when_it_returns(
    routed_pair: list[ServerProcess],
) -> None:
    one, two = routed_pair
    with start_worker(one, "--worker-id", "w1"), one.client() as client:
        away = start_worker(two, "--worker-id", "w2")
        until(lambda: len(known(one)) == 2, what="the first server knows both workers")
        away.signal(signal.SIGSTOP)

        jobs = {job.job_id: job for job in client.broadcast(JobSpec(job_id="all", subject="math.square", payload=b"7"))}
        assert sorted(jobs) == ["all.w1", "all.w2"]
        assert jobs["all.w1"].result(SOON_S) == b"49"
        away.kill()
        until(lambda: client.status("all.w2").state == "PENDING", LOST_WITHIN_S, "its lease, if it had one, is over")
        assert "w2" in client.explain("all.w2").because[0]

        with start_worker(two, "--worker-id", "w2"):
            assert jobs["all.w2"].result(SOON_S) == b"49"
        assert client.status("all.w2").assigned_worker_id == "w2"
