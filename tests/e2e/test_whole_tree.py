"""Nothing of a job outlives it: not what hides, and not when worker or keeper are killed, hung or cut off."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki import Client
from tasuki.core.job import JobSpec
from tests.e2e.stage import HERE, LEASE_TTL_S, LOST_WITHIN_S, SOON_S, Ledger, command_worker, stdout_of
from tests.support.processes import ServerProcess, WorkerProcess, open_files, start_server, start_worker
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

ESCAPE = HERE.parent / "worker/escape.py"
SHORT_JOBS = 300


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One for the whole file: no store has a part in any of this."""
    with start_server(tmp_path_factory.mktemp("tree"), "--lease-ttl", str(LEASE_TTL_S)) as server:
        yield server


def escape_worker(server: ServerProcess, data: Path, *arguments: str) -> WorkerProcess:
    """A worker on a data folder of its own, whose exec `escape` is tests/worker/escape.py."""
    execs = data.with_suffix(".toml")
    execs.write_text(f"""
    [exec.escape]
    argv = ["{sys.executable}", "-I", "-S", "{ESCAPE}", "{{args}}"]
    stop_grace_s = 0.3
    """)
    return start_worker(server, "--config", str(execs), "--data", str(data), "--slots", "1", *arguments, command=True)


def keeper_of(worker: WorkerProcess) -> int:
    found = re.search(r"keeper (\d+): level", worker.wait_for_output("level "))
    assert found is not None
    return int(found[1])


def hidden(pids: Path) -> list[int]:
    """The two numbers of a job that has hidden its second process."""

    def both() -> list[int]:
        numbers = [int(line) for line in pids.read_text().split()]
        return numbers if len(numbers) == 2 else []

    return until(both, SOON_S, "the job has hidden its second process")


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if alive(pid)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    """The file in which a job writes down its two process numbers."""
    path = tmp_path / "pids"
    path.touch()
    return path


@pytest.mark.parametrize("how", ["cancel", "time limit"])
def test_nothing_is_left_of_a_job_that_hides_when_it_is_reported(
    server: ServerProcess, client: Client, tmp_path: Path, pids: Path, how: str
) -> None:
    with escape_worker(server, tmp_path / "worker"):
        limit = {"timeout_s": 1.0} if how == "time limit" else {}
        job = client.submit(exec="escape", args=[str(pids)], retries=0, job_id=f"hides-{how.split()[0]}", **limit)
        family = hidden(pids)

        if how == "cancel":
            client.cancel(job.job_id)

        assert job.outcome(SOON_S).state == ("CANCELED" if how == "cancel" else "TIMED_OUT")
        assert living(family) == []


def test_nothing_is_left_when_the_lease_cannot_be_renewed(
    server: ServerProcess, client: Client, tmp_path: Path, pids: Path
) -> None:
    with escape_worker(server, tmp_path / "worker"):
        client.submit(exec="escape", args=[str(pids)], job_id="cut-off", max_losses=0, watch=False)
        family = hidden(pids)

        server.signal(signal.SIGSTOP)
        try:
            until(lambda: not living(family), LEASE_TTL_S + SOON_S, "the job is ended at the lease's deadline")
        finally:
            server.signal(signal.SIGCONT)


def test_nothing_is_left_when_the_worker_is_killed(server: ServerProcess, client: Client, tmp_path: Path, pids: Path) -> None:
    with escape_worker(server, tmp_path / "worker") as worker:
        client.submit(exec="escape", args=[str(pids)], job_id="bereft", max_losses=0, watch=False)
        family = [*hidden(pids), keeper_of(worker)]

        worker.kill()

        until(lambda: not living(family), SOON_S, "job and keeper are gone")


def test_what_outlived_keeper_and_worker_is_gone_after_the_next_start_on_that_folder(
    server: ServerProcess, client: Client, tmp_path: Path, pids: Path
) -> None:
    # given: a job whose worker and keeper were both killed, so that nobody holds it any more
    with escape_worker(server, tmp_path / "worker") as worker:
        client.submit(exec="escape", args=[str(pids)], job_id="orphan", max_losses=0, watch=False)
        family = hidden(pids)
        worker.signal(signal.SIGSTOP)
        os.kill(keeper_of(worker), signal.SIGKILL)
        worker.kill()
    assert living(family) == family

    # when
    with escape_worker(server, tmp_path / "worker", "--subject", "nothing.>"):
        # then
        assert living(family) == []
        assert len(list((tmp_path / "worker/runs").iterdir())) == 1


def test_a_worker_whose_keeper_is_killed_ends_its_jobs_and_itself(
    server: ServerProcess, client: Client, tmp_path: Path, pids: Path
) -> None:
    with escape_worker(server, tmp_path / "worker") as worker:
        job = client.submit(exec="escape", args=[str(pids)], job_id="unkept", max_losses=0)
        family = hidden(pids)

        os.kill(keeper_of(worker), signal.SIGKILL)

        assert worker.wait() != 0
        assert "restart this process" in worker.output()
        assert living(family) == []
        assert job.outcome(LOST_WITHIN_S).state == "FAILED"
        assert "was lost" in client.explain("unkept").story[-1].reason


def test_a_hung_workers_job_is_ended_at_its_deadline_and_what_it_says_later_is_refused(
    server: ServerProcess, client: Client, ledger: Ledger, tmp_path: Path
) -> None:
    # given: a command that does not listen to TERM, at a worker that hangs
    beat = tmp_path / "beat"
    with command_worker(server, ledger, "--slots", "1") as hung:
        job = client.submit(exec="step", args=["stubborn", str(beat)], job_id="hung")
        first = ledger.wait_for("hung")
        hung.signal(signal.SIGSTOP)

        # when: its lease is over
        with command_worker(server, ledger, "--slots", "1"):
            second = ledger.wait_for("hung", 2, LOST_WITHIN_S)

            # then: nothing of the first attempt was alive when the second began, although its worker still hangs
            last_sign = float(beat.with_name("beat.1").read_text())
            assert not alive(first.pid)
            assert last_sign < second.at, f"attempt 1 was alive {last_sign - second.at:.2f} s into attempt 2"

            # and: the worker that goes on is not believed
            hung.signal(signal.SIGCONT)
            hung.wait_for_output("job hung attempt 1: refused")
            beat.with_name("beat.end").touch()
            assert stdout_of(job.result(SOON_S)) == "attempt 2\n"


def test_a_job_that_kills_its_workers_ends_as_a_dead_letter(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    # given: a program that kills the worker above the keeper that started it, and may be lost once
    kill_the_worker = "kill -9 $(sed -n s/^PPid:.//p /proc/$PPID/status)"
    execs = ("--exec", f"poison=/bin/sh -c '{kill_the_worker}'", "--lease-ttl", "1")
    job = client.submit(exec="poison", job_id="poison", max_losses=1)

    # when: each worker that takes it dies of it
    for _ in range(2):
        with start_worker(server, *execs, "--data", str(tmp_path / "worker"), command=True, wait=False) as worker:
            assert worker.wait(LOST_WITHIN_S + SOON_S) == -signal.SIGKILL

    # then: there is no third, although it has retries
    assert job.outcome(LOST_WITHIN_S).state == "FAILED"
    told = client.explain("poison")
    assert told.facts["losses"] == {"used": 1, "of": 1}
    # (a grant that a worker did not live to receive is released, and no loss)
    assert [incident.kind for incident in told.story if incident.kind != "released"] == ["lost", "dead_lettered"]
    assert any("There is no further attempt" in sentence for sentence in told.because)


def test_many_short_jobs_on_many_slots_leave_no_process_descriptor_or_folder(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    true = ["--exec", "true=/bin/true", "--slots", "200", "--data", str(tmp_path / "worker")]
    with start_worker(server, *true, command=True) as worker:
        keeper = keeper_of(worker)

        def left() -> tuple[int, int, list[str]]:
            return open_files(worker.pid), open_files(keeper), Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()

        def folders() -> list[Path]:
            """Of jobs; those that begin with a dot wait for the next one."""
            return list((tmp_path / "worker/runs").glob("*/[!.]*"))

        def round_of(name: str) -> None:
            jobs = client.submit_many([JobSpec(job_id=f"{name}-{n}", exec="true") for n in range(SHORT_JOBS)])
            assert {job.outcome(6 * SOON_S).state for job in jobs} == {"SUCCEEDED"}
            until(lambda: not folders(), SOON_S, "every run folder is removed")

        round_of("warm-up")
        before = left()

        round_of("measured")

        assert left() == before
        assert before[2] == []
