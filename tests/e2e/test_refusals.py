"""Jobs that a worker refuses: over TCP a worker runs what its operator allowed, as he allowed it, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki import Client
from tests.e2e.stage import SOON_S, shared_sqlite_only, stdout_of
from tests.support.processes import ServerProcess, start_worker

pytestmark = [pytest.mark.e2e, shared_sqlite_only]

EXECS = """
[exec.fixed]
argv = ["/bin/sh", "-c", "echo fixed $SEED"]
allow_env = ["SEED"]

[exec.chosen]
argv = ["/bin/echo", "{args}"]
args = ["--mode=[a-z]+", "[0-9]+"]
"""


@pytest.fixture(scope="module")
def worker(shared_server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A `tasuki worker` over TCP with execs of a file and of a flag."""
    config = tmp_path_factory.mktemp("worker") / "execs.toml"
    config.write_text(EXECS)
    with start_worker(shared_server, "--config", str(config), "--exec", "free=/bin/echo free", command=True):
        yield


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    ("fields", "stdout"),
    [
        ({"exec": "fixed"}, "fixed\n"),
        ({"exec": "fixed", "env": {"SEED": "7"}}, "fixed 7\n"),
        ({"exec": "chosen", "args": ["--mode=fast", "12"]}, "--mode=fast 12\n"),
        ({"exec": "free", "args": ["a b", "$HOME;id"]}, "free a b $HOME;id\n"),
    ],
    ids=["no-arguments", "allowed-environment", "allowed-arguments", "free-arguments-are-not-a-shell-line"],
)
def test_what_the_exec_allows_is_run(shared_client: Client, fields: dict[str, object], stdout: str) -> None:
    job = shared_client.submit(**fields)

    assert stdout_of(job.result(SOON_S)) == stdout


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    ("fields", "code", "named"),
    [
        ({"exec": "fixed", "env": {"LD_PRELOAD": "/tmp/evil.so"}}, "ENV_NOT_ALLOWED", "LD_PRELOAD"),
        ({"exec": "fixed", "env": {"SEED": "7", "PYTHONPATH": "/tmp"}}, "ENV_NOT_ALLOWED", "PYTHONPATH"),
        ({"exec": "free", "env": {"PATH": "/tmp"}}, "ENV_NOT_ALLOWED", "PATH"),
        ({"exec": "free", "env": {"TASUKI_JOB_ID": "other"}}, "ENV_NOT_ALLOWED", "TASUKI_JOB_ID"),
        ({"exec": "fixed", "args": ["--more"]}, "ARGS_NOT_ALLOWED", "fixed"),
        ({"exec": "chosen", "args": ["--mode=fast", "--output=/etc/passwd"]}, "ARGS_NOT_ALLOWED", "--output=/etc/passwd"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_the_exec_does_not_allow_is_refused_for_good(
    shared_client: Client, fields: dict[str, object], code: str, named: str
) -> None:
    ended = shared_client.submit(**fields, retries=3).outcome(SOON_S)

    assert (ended.state, ended.outcome.error_code, ended.attempt) == ("FAILED", code, 1)
    assert named in ended.outcome.message
    assert "evil" not in ended.outcome.message, "values of the environment are nobody's business"


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("program", ["/bin/echo", "sh"])
def test_a_program_that_is_on_no_list_is_not_run(shared_client: Client, program: str) -> None:
    waiting = shared_client.submit(exec=program)
    assert shared_client.submit(exec="fixed").outcome(SOON_S).state == "SUCCEEDED"

    assert shared_client.status(waiting.job_id).attempt == 0
    assert "No connected worker offers it" in shared_client.explain(waiting.job_id).because[0]
    shared_client.cancel(waiting.job_id)


def test_any_program_is_not_for_jobs_that_came_over_tcp(shared_server: ServerProcess, tmp_path: Path) -> None:
    # given: a worker of the server's own user on the unix socket, which may run any program for that user's own jobs
    witness = tmp_path / "witness"
    touch = {"subject": "any.1", "exec": "touch", "args": [str(witness)]}
    options = ("--any-program", "--exec", "listed=/bin/true", "--subject", "any.>")
    with start_worker(shared_server.unix_url, *options, command=True, log=tmp_path / "worker.log"):
        # when: somebody who has even the admin token asks over TCP
        with shared_server.client() as client:
            waiting = client.submit(**touch)
            assert client.submit(subject="any.1", exec="listed").outcome(SOON_S).state == "SUCCEEDED"

            # then: it waits; the same over the unix socket is run
            assert client.status(waiting.job_id).attempt == 0
            client.cancel(waiting.job_id)
        assert not witness.exists()
        with shared_server.client(shared_server.unix_url, token="") as client:
            assert client.submit(**touch).outcome(SOON_S).state == "SUCCEEDED"
        assert witness.exists()


def test_a_worker_for_its_own_user_leaves_what_came_over_tcp_to_others(shared_server: ServerProcess, tmp_path: Path) -> None:
    # given: a worker like those of `tasuki up`: no list, any program for its own user
    own_only = start_worker(
        shared_server.unix_url, "--any-program", "--subject", "own.>", command=True, log=tmp_path / "worker.log"
    )
    with own_only, shared_server.client() as client:
        # when: a job with a token waits there, and one of the own user comes after it
        waiting = client.submit(subject="own.1", exec="render")
        with shared_server.client(shared_server.unix_url, token="") as own:
            assert own.submit(subject="own.1", exec="true").outcome(SOON_S).state == "SUCCEEDED"

        # then: the first was left alone, and explain says why; a worker that has it on its list runs it
        assert client.status(waiting.job_id).attempt == 0
        assert "'render'" in client.explain(waiting.job_id).because[0]
        listed = ("--exec", "render=/bin/true", "--subject", "own.>")
        with start_worker(shared_server, *listed, command=True, log=tmp_path / "listed.log"):
            assert waiting.outcome(SOON_S).state == "SUCCEEDED"
