"""Requests that a worker refuses over the network: programs, arguments and environment that its operator did not allow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasuki import Client
from tasuki.errors import JobFailed
from tests.support.processes import ServerProcess, start_worker

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def commands(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client over TCP, and two workers: one with a list, one over the unix socket that takes any program of its own user."""
    folder = tmp_path_factory.mktemp("commands")
    config = folder / "execs.toml"
    config.write_text('[exec.hello]\ncommand = "/bin/echo hello"\n')
    listed = ("--subject", "listed.>", "--config", str(config), "--data", str(folder / "listed"))
    anything = ("--subject", "any.>", "--any-program", "--exec", "true=/bin/true", "--data", str(folder / "any"))
    with (
        start_worker(server, *listed, command=True),
        start_worker(server.unix_url, *anything, command=True, log=folder / "any.log"),
        server.client(token=server.create_token("client")) as client,
    ):
        yield client


@pytest.mark.parametrize(
    "fields",
    [{"args": ("free argument",)}, {"env": {"LD_PRELOAD": "/lib/evil.so"}}, {"env": {"PYTHONPATH": "/evil"}}],
    ids=["free-argument", "ld-preload", "pythonpath"],
)
def test_what_the_operator_did_not_allow_is_refused_for_good(commands: Client, fields: dict[str, Any]) -> None:
    with pytest.raises(JobFailed) as refused:
        commands.submit(subject="listed.x", exec="hello", **fields).result(timeout=30)
    # Then it is refused at its first attempt, without a retry
    assert refused.value.outcome.attempt == 1
    assert refused.value.outcome.outcome.permanent


@pytest.mark.parametrize(
    ("subject", "program", "arguments"),
    [
        ("listed.x", "rm", ()),
        ("listed.x", "/bin/sh", ("-c", "touch {trace}")),
        ("listed.x", "hello; touch {trace}", ()),
        ("any.x", "/bin/touch", ("{trace}",)),
        ("any.x", "sh", ("-c", "touch {trace}")),
    ],
    ids=["unlisted", "path", "shell-words", "any-program", "any-shell"],
)
def test_a_program_that_no_operator_allowed_is_never_started(
    commands: Client, tmp_path: Path, subject: str, program: str, arguments: tuple[str, ...]
) -> None:
    # Given a job that would leave a trace, submitted over TCP
    trace = tmp_path / "trace"
    arguments = tuple(argument.replace("{trace}", str(trace)) for argument in arguments)
    job = commands.submit(subject=subject, exec=program.replace("{trace}", str(trace)), args=arguments)
    # When a job behind it has run
    commands.submit(subject=subject, exec={"listed.x": "hello", "any.x": "true"}[subject]).result(timeout=30)
    # Then it still waits
    assert commands.status(job.job_id).attempt == 0
    assert not trace.exists()
    commands.cancel(job.job_id)


def test_what_is_allowed_runs(commands: Client, server: ServerProcess) -> None:
    assert commands.submit(subject="listed.x", exec="hello").result(timeout=30).startswith(b"PK")
    with Client(server.unix_url) as own_user:
        assert own_user.submit(subject="any.x", exec="/bin/true", retries=0).result(timeout=30).startswith(b"PK")
