"""A worker dies, hangs or is cut off: its jobs go on elsewhere, and what it says too late changes nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tasuki import Client
from tasuki.core.job import JobSpec
from tasuki.errors import JobFailed
from tests.e2e.stage import (
    HERE,
    LOST_WITHIN_S,
    SOON_S,
    Ledger,
    assert_one_finish_each,
    command_worker,
    jobs_worker,
    stdout_of,
    story,
)
from tests.support.processes import ChildProcess, ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.e2e


def test_what_was_sent_ahead_to_a_worker_that_freezes_goes_to_another_one_and_costs_nothing(
    server: ServerProcess, client: Client, ledger: Ledger
) -> None:
    # given: a worker with one place that is sent jobs ahead, since its jobs are short
    with jobs_worker(server, ledger, "--slots", "1", "--ahead", "--worker-id", "frozen") as frozen:
        for job in client.submit_many([JobSpec(job_id=f"short-{n}", subject="load.1") for n in range(100)]):
            job.result(SOON_S)

        # when: it freezes in the first of some jobs that came together
        ahead = [JobSpec(job_id=f"ahead-{n}", subject="load.1", max_losses=0, max_retries=0) for n in range(3)]
        first, *others = client.submit_many([JobSpec(job_id="first", subject="load.1", payload=b"freeze"), *ahead])
        ledger.wait_for("first")
        until(lambda: client.status("ahead-0").state == "ASSIGNED", what="others were sent ahead")

        # then: another worker runs those that it had not begun, at the end of their leases, and none of them was lost
        with jobs_worker(server, ledger, "--slots", "1", "--worker-id", "other") as other:
            for job in others:
                assert job.result(LOST_WITHIN_S + SOON_S)
            assert {run.pid for spec in ahead for run in ledger.of(spec.job_id)} == {other.pid}
            assert [story(client, spec.job_id) for spec in ahead] == 3 * [["released"]]
            assert client.status("ahead-0").attempt == 2

            # and: the one that it had begun is lost, as nobody knows how far it came
            assert first.result(LOST_WITHIN_S + SOON_S) == b"2"
            assert story(client, "first") == ["lost"]
        frozen.kill()


def test_the_jobs_of_a_killed_worker_run_again_elsewhere_and_no_others(
    server: ServerProcess, client: Client, ledger: Ledger, tmp_path: Path
) -> None:
    # given: two workers, each holding two jobs
    gate = tmp_path / "gate"
    with jobs_worker(server, ledger, "--slots", "2") as doomed:
        lost = [client.submit(subject="hold.lost", payload=f"hold {gate}".encode(), job_id=f"lost-{n}") for n in (1, 2)]
        for job in lost:
            assert ledger.wait_for(job.job_id).pid == doomed.pid
        with jobs_worker(server, ledger, "--slots", "4") as survivor:
            kept = [client.submit(subject="hold.kept", payload=f"hold {gate}".encode(), job_id=f"kept-{n}") for n in (1, 2)]
            for job in kept:
                assert ledger.wait_for(job.job_id).pid == survivor.pid

            # when: one is killed in mid-job
            killed_at = time.monotonic()
            doomed.kill()

            # then: its jobs begin again at the other within lease ttl + margin, as attempt 2
            for job in lost:
                assert ledger.wait_for(job.job_id, 2, LOST_WITHIN_S).pid == survivor.pid
            assert time.monotonic() - killed_at < LOST_WITHIN_S
            gate.touch()
            assert [job.result(SOON_S) for job in lost] == [b"2", b"2"]
            assert [job.result(SOON_S) for job in kept] == [b"1", b"1"]

    # and: every job has one recorded finish, and only the lost ones were run twice
    assert_one_finish_each(client, [job.job_id for job in [*lost, *kept]], "hold")
    assert [ledger.attempts(job.job_id) for job in lost] == [[1, 2], [1, 2]]
    assert [ledger.attempts(job.job_id) for job in kept] == [[1], [1]]
    assert story(client, "lost-1") == ["lost"]
    assert story(client, "kept-1") == []


def test_a_worker_that_hung_past_its_lease_drops_its_run(
    server: ServerProcess, client: Client, ledger: Ledger, tmp_path: Path
) -> None:
    # given: a job at a worker that stops (SIGSTOP) until the job was given to another one
    gate = tmp_path / "gate"
    with jobs_worker(server, ledger) as hung:
        job = client.submit(subject="hold.1", payload=f"hold {gate}".encode(), job_id="slept")
        ledger.wait_for("slept")
        hung.signal(signal.SIGSTOP)
        with jobs_worker(server, ledger) as second:
            assert ledger.wait_for("slept", 2, LOST_WITHIN_S).pid == second.pid

            # when: it goes on, and could end the job at once
            gate.touch()
            hung.signal(signal.SIGCONT)

            # then: it finds its lease lost and says so; the result is the second attempt's
            hung.wait_for_output("job slept attempt 1: refused")
            assert job.result(SOON_S) == b"2"

            # and: it is a good worker again
            second.stop()
            assert client.submit(subject="note.1", job_id="after").result(SOON_S) == b"1"
            assert ledger.of("after")[0].pid == hung.pid
    assert ledger.attempts("slept") == [1, 2]


def test_a_plain_function_of_a_hung_worker_ends_before_the_next_attempt_begins(
    server: ServerProcess, client: Client, ledger: Ledger, tmp_path: Path
) -> None:
    # given: a plain function that holds a lock, in a process below a worker that stops (SIGSTOP) alone
    lock = tmp_path / "lock"
    with jobs_worker(server, ledger, "--plain", "--slots", "1") as hung:
        job = client.submit(subject="plain.1", payload=f"alone {lock}".encode(), job_id="alone", retries=0)
        ledger.wait_for("alone")
        with jobs_worker(server, ledger, "--plain", "--slots", "1") as second:
            # when
            hung.signal(signal.SIGSTOP)

            # then: the next attempt finds the lock free, and ends
            # (whose process is the first of a function there; how soon attempts begin again is tested above)
            assert ledger.wait_for("alone", 2, LOST_WITHIN_S + SOON_S).pid == second.pid
            lock.with_name("lock.end").touch()
            assert job.result(SOON_S) == b"2"

            # and: the first worker takes jobs again when it goes on
            hung.signal(signal.SIGCONT)
            second.stop()
            assert client.submit(subject="plain.2", job_id="after").result(SOON_S) == b"1"
    assert story(client, "alone") == ["lost"]


def test_a_worker_goes_on_when_the_process_that_forks_its_functions_is_killed(
    server: ServerProcess, client: Client, ledger: Ledger, tmp_path: Path
) -> None:
    # given: a plain function that runs
    lock = tmp_path / "lock"
    with jobs_worker(server, ledger, "--plain", "--slots", "2") as worker:
        lost = client.submit(subject="plain.1", payload=f"alone {lock}".encode(), job_id="lost", retries=0)
        forker = until(lambda: lock.exists() and lock.read_text().endswith("\n") and int(lock.read_text()), SOON_S, "it runs")

        # when
        os.kill(forker, signal.SIGKILL)

        # then: that function has failed, and the worker runs the next one
        with pytest.raises(JobFailed, match="SIGKILL"):
            lost.result(SOON_S)
        assert client.submit(subject="plain.2", job_id="after").result(SOON_S) == b"1"
        assert worker.running
        assert "Traceback" not in worker.output()


def test_a_finish_that_comes_after_the_job_was_given_away_is_fenced(
    server: ServerProcess, client: Client, ledger: Ledger, tmp_path: Path
) -> None:
    # given: a worker that keeps its jobs when cut off, and hangs until the job was given to another one
    gate = tmp_path / "gate"
    with jobs_worker(server, ledger, "--on-disconnect", "keep", "--reconnect-grace", "0") as hung:
        job = client.submit(subject="hold.1", payload=f"hold {gate}".encode(), job_id="late")
        ledger.wait_for("late")
        hung.signal(signal.SIGSTOP)
        with jobs_worker(server, ledger) as second:
            assert ledger.wait_for("late", 2, LOST_WITHIN_S).pid == second.pid
            second.signal(signal.SIGSTOP)

            # when: it goes on and reports the end of its attempt, before the second attempt has ended
            gate.touch()
            hung.signal(signal.SIGCONT)

            # then: the report is refused, and the refusal is kept
            hung.wait_for_output("job late attempt 1: refused")
            assert not job.done
            until(lambda: "fenced" in story(client, "late"), SOON_S, "explain tells of the fenced finish")

            # and: the result is the second attempt's
            second.signal(signal.SIGCONT)
            assert job.result(SOON_S) == b"2"
    status = client.status("late")
    assert (status.state, status.attempt) == ("SUCCEEDED", 2)


def test_a_worker_that_is_cut_off_ends_its_command_before_the_next_attempt_begins(
    server: ServerProcess, client: Client, ledger: Ledger, tmp_path: Path
) -> None:
    # given: a command that does not listen to TERM, at a worker behind a network of its own
    beat = tmp_path / "beat"
    relay_command = [sys.executable, HERE / "relay.py", "127.0.0.1", str(server.port)]
    with ChildProcess(relay_command, tmp_path / "relay.log", {}) as relay:
        port = relay.wait_for_output("\n").split()[1]
        options = {"token": server.create_token("worker"), "log": tmp_path / "first.log"}
        with command_worker(f"tcp://127.0.0.1:{port}", ledger, "--slots", "1", **options) as first:
            job = client.submit(exec="step", args=["stubborn", str(beat)], job_id="cut")
            ledger.wait_for("cut")
            with command_worker(server, ledger, "--slots", "1"):
                # when: that network carries nothing any more
                relay.signal(signal.SIGSTOP)

                # then: the second attempt begins elsewhere, and the first was gone by then
                second = ledger.wait_for("cut", 2, LOST_WITHIN_S)
                first.wait_for_output("job cut attempt 1: refused")
                last_sign = float(beat.with_name("beat.1").read_text())
                assert last_sign < second.at, f"attempt 1 was alive {last_sign - second.at:.2f} s into attempt 2"
                beat.with_name("beat.end").touch()
                assert stdout_of(job.result(SOON_S)) == "attempt 2\n"
