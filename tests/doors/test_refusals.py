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
    [
        {"subject": "listed.x", "exec": "rm"},
        {"subject": "listed.x", "exec": "/bin/sh", "args": ("-c", "touch {trace}")},
        {"subject": "listed.x", "exec": "hello; touch {trace}"},
        {"subject": "listed.x", "exec": "hello", "args": ("free argument",)},
        {"subject": "listed.x", "exec": "hello", "env": {"LD_PRELOAD": "/lib/evil.so"}},
        {"subject": "listed.x", "exec": "hello", "env": {"PYTHONPATH": "/evil"}},
        {"subject": "any.x", "exec": "/bin/touch", "args": ("{trace}",)},
        {"subject": "any.x", "exec": "sh", "args": ("-c", "touch {trace}")},
    ],
    ids=["unlisted", "path", "shell-words", "free-argument", "ld-preload", "pythonpath", "any-program", "any-shell"],
)
def test_what_the_operator_did_not_allow_is_refused_for_good(commands: Client, tmp_path: Path, fields: dict[str, Any]) -> None:
    # Given a job that would leave a trace
    trace = tmp_path / "trace"
    fields = {**fields, "exec": fields["exec"].replace("{trace}", str(trace))}
    fields["args"] = tuple(argument.replace("{trace}", str(trace)) for argument in fields.get("args", ()))
    # When it is submitted over TCP
    with pytest.raises(JobFailed) as refused:
        commands.submit(**fields).result(timeout=10)
    # Then it is refused at its first attempt, without a retry and without a trace
    assert refused.value.outcome.attempt == 1
    assert refused.value.outcome.outcome.permanent
    assert not trace.exists()


def test_what_is_allowed_runs(commands: Client, server: ServerProcess) -> None:
    assert commands.submit(subject="listed.x", exec="hello").result(timeout=10).startswith(b"PK")
    with Client(server.unix_url) as own_user:
        assert own_user.submit(subject="any.x", exec="/bin/true", retries=0).result(timeout=10).startswith(b"PK")
