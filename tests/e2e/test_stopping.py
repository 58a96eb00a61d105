"""Jobs that are ended from outside: by cancel, and by their time limit. Nothing of them stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki import Client
from tests.e2e.stage import SOON_S, Ledger, command_worker, jobs_worker, story
from tests.support.processes import ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.e2e


def alive(pid: int) -> bool:
    """Return whether the process runs; a dead one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_cancel_of_a_running_command_leaves_no_process_of_its_group(
    shared_server: ServerProcess, shared_client: Client, ledger: Ledger, tmp_path: Path
) -> None:
    # given: a command with a child of its own, neither of which listens to TERM
    family = tmp_path / "family"
    with command_worker(shared_server, ledger):
        job = shared_client.submit(exec="step", args=["family", str(family)], job_id="family")
        until(family.exists, SOON_S, "the command has started its child")
        pids = [int(pid) for pid in family.read_text().split()]
        assert all(alive(pid) for pid in pids)

        # when
        asked = shared_client.cancel("family", reason="not needed any more")

        # then
        assert asked["family"].requested
        assert job.outcome(SOON_S).state == "CANCELED"
        assert [pid for pid in pids if alive(pid)] == []
        assert ledger.attempts("family") == [1]
        assert story(shared_client, "family")[-1] == "canceled"


def test_cancel_of_a_running_handler_frees_its_slot(
    shared_server: ServerProcess, shared_client: Client, ledger: Ledger, tmp_path: Path
) -> None:
    with jobs_worker(shared_server, ledger, "--slots", "1"):
        job = shared_client.submit(subject="x.1", payload=f"hold {tmp_path / 'never'}".encode(), job_id="held")
        ledger.wait_for("held")
        waiting = shared_client.submit(subject="x.1", job_id="next-in-line")

        shared_client.cancel("held")

        assert job.outcome(SOON_S).state == "CANCELED"
        assert waiting.result(SOON_S) == b"1"


def test_cancel_of_a_waiting_job_is_immediate_and_it_never_runs(shared_client: Client, ledger: Ledger) -> None:
    job = shared_client.submit(subject="nobody.1", job_id="waiting")

    assert shared_client.cancel("waiting")["waiting"].state == "CANCELED"

    assert job.outcome(SOON_S).state == "CANCELED"
    assert ledger.attempts("waiting") == []


def test_a_finish_that_came_first_wins_over_the_cancel(
    shared_server: ServerProcess, shared_client: Client, ledger: Ledger
) -> None:
    with jobs_worker(shared_server, ledger):
        job = shared_client.submit(subject="x.1", job_id="finished")
        assert job.result(SOON_S) == b"1"

        answer = shared_client.cancel("finished")["finished"]

        assert (answer.state, answer.requested) == ("SUCCEEDED", False)
        assert shared_client.status("finished").state == "SUCCEEDED"


def test_a_handler_that_is_canceled_by_itself_has_failed(
    shared_server: ServerProcess, shared_client: Client, ledger: Ledger
) -> None:
    """Only a stop that came from the worker may be passed over in silence."""
    with jobs_worker(shared_server, ledger):
        ended = shared_client.submit(subject="x.1", payload=b"withdraw", retries=0, job_id="withdrawn").outcome(SOON_S)

        assert (ended.state, ended.outcome.error_code, ended.attempt) == ("FAILED", "HANDLER_ERROR", 1)
        assert "CancelledError" in ended.outcome.message


@pytest.mark.parametrize("kind", ["command", "plain function", "async handler"])
def test_a_job_past_its_time_limit_is_stopped_retried_and_then_timed_out(
    shared_server: ServerProcess, shared_client: Client, ledger: Ledger, tmp_path: Path, kind: str
) -> None:
    # given: work that takes for ever, a time limit, and one retry
    never = tmp_path / "never"
    start, arguments, work = {
        "command": (command_worker, (), {"exec": "step", "args": ["hold", str(never)]}),
        "plain function": (jobs_worker, ("--plain",), {"payload": b"spin 1000"}),
        "async handler": (jobs_worker, (), {"payload": f"hold {never}".encode()}),
    }[kind]
    with start(shared_server, ledger, *arguments):
        job_id = f"slow-{kind.replace(' ', '-')}"

        # when
        ended = shared_client.submit(**work, timeout_s=0.4, retries=1, backoff_s=0.1, job_id=job_id).outcome(SOON_S)

        # then
        assert (ended.state, ended.attempt, ended.outcome.error_code) == ("TIMED_OUT", 2, "TIMED_OUT")
        assert ledger.attempts(job_id) == [1, 2]
        assert story(shared_client, job_id) == ["failed", "dead_lettered"]
        if kind == "command":
            assert [run.pid for run in ledger.of(job_id) if alive(run.pid)] == []
