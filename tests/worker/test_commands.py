"""Secrets of execs: read from files at each start, seen by the job and by nobody else."""

import asyncio
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tasuki.core.job import Progress
from tasuki.core.protocol import LogPiece, ReadLog
from tasuki.errors import ConfigError
from tasuki.worker.attempt import RunResult
from tasuki.worker.commands import SECRET_MAX_BYTES, SecretProblem, build_command, problem_of, read_secrets
from tasuki.worker.execs import Exec, parse_execs
from tasuki.worker.folder import RunFolder
from tasuki.worker.logs import LogFollow
from tasuki.worker.results import OutputRules
from tests.support.processes import alive
from tests.support.waiting import until_async
from tests.worker.runs import archive_of, attempt_of, exec_of, run, run_async, runner_in, text_of

VALUE = "hunter2-is-no-password"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "api-key"
    path.write_text(VALUE + "\n")
    path.chmod(0o600)
    return path


def tool_with(secret: Path, script: str = 'printf %s "$API_KEY" > out/key', **fields: Any) -> Exec:
    return exec_of("/bin/sh", "-c", script, env_from_file={"API_KEY": str(secret)}, **fields)


def everything_in(result: RunResult) -> bytes:
    """All that leaves the worker at the end of an attempt, but for the outputs that the job wrote itself."""
    archive = archive_of(result)
    members = [archive.read(name) for name in archive.namelist() if not name.startswith("out/")]
    return b"\n".join(members) + repr(result.outcome).encode()


# ---------------------------------------------------------------------------------------------------- what a job gets


def test_a_job_finds_the_value_in_its_environment_without_the_line_end(tmp_path: Path, secret: Path) -> None:
    result = run(runner_in(tmp_path, tool_with(secret)), attempt_of(exec="tool"))

    assert text_of(result, "out/key") == VALUE


def test_a_file_that_was_replaced_counts_from_the_next_attempt_on(tmp_path: Path, secret: Path) -> None:
    runner = runner_in(tmp_path, tool_with(secret))

    async def before_and_after() -> list[str]:
        seen = []
        for number in range(2):
            result = await run_async(runner, attempt_of(exec="tool", job_id=f"job-{number}"))
            seen.append(text_of(result, "out/key"))
            new = tmp_path / "new"
            new.write_text("rotated-value")
            new.chmod(0o600)
            new.rename(secret)
        return seen

    assert asyncio.run(before_and_after()) == [VALUE, "rotated-value"]


@pytest.mark.parametrize(
    ("contents", "value"),
    [
        (b"plain", b"plain"),
        (b"line\n", b"line"),
        (b"line\r\n", b"line"),
        (b"two\nlines\n\n", b"two\nlines\n"),
        (b" spaces \n", b" spaces "),
        (b"\xff\xfe bytes", b"\xff\xfe bytes"),
        (b"x" * SECRET_MAX_BYTES, b"x" * SECRET_MAX_BYTES),
    ],
)
def test_what_the_value_of_a_file_is(secret: Path, contents: bytes, value: bytes) -> None:
    secret.write_bytes(contents)

    assert read_secrets(tool_with(secret)).environment == {b"API_KEY": value}


def test_links_are_followed_because_orchestrators_swap_them(tmp_path: Path, secret: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(secret)

    assert read_secrets(tool_with(link)).environment == {b"API_KEY": VALUE.encode()}


# ---------------------------------------------------------------------------------------------------- where it never is


def test_a_value_that_the_job_prints_is_masked_in_its_logs(tmp_path: Path, secret: Path) -> None:
    tool = tool_with(secret, 'echo "key: $API_KEY"; echo "$API_KEY" >&2; exit 3')

    result = run(runner_in(tmp_path, tool), attempt_of(exec="tool"))

    assert text_of(result) == f"key: {'*' * len(VALUE)}\n"
    assert text_of(result, "stderr.log") == "*" * len(VALUE) + "\n"
    assert VALUE.encode() not in everything_in(result)


def test_a_message_about_a_file_that_is_named_after_a_value_is_masked(tmp_path: Path, secret: Path) -> None:
    tool = tool_with(secret, 'ln -s nowhere "out/$API_KEY.csv"', outputs=OutputRules(required=("out/*.csv",)))

    result = run(runner_in(tmp_path, tool), attempt_of(exec="tool"))

    assert result.outcome.error_code == "OUTPUT_MISSING"
    assert f"'out/{'*' * len(VALUE)}.csv': is a link" in result.outcome.message


def test_progress_that_names_a_value_is_masked(tmp_path: Path, secret: Path) -> None:
    told: list[Progress] = []
    tool = tool_with(secret, f'echo "progress 0.5 with $API_KEY" >&3; until [ -e {tmp_path}/seen ]; do :; done')
    runner = runner_in(tmp_path, tool, on_progress=lambda lease_id, progress: told.append(progress))

    async def wait_for_it(*_: object) -> None:
        await until_async(lambda: told, what="progress is told")
        (tmp_path / "seen").touch()

    run(runner, attempt_of(exec="tool"), wait_for_it)

    assert told[-1].text == f"with {'*' * len(VALUE)}"


def test_a_value_that_the_job_prints_is_masked_for_those_who_follow_it(tmp_path: Path, secret: Path) -> None:
    pieces: list[LogPiece] = []
    tails = LogFollow(pieces.append)
    gone_on = tmp_path / "go-on"
    script = f'printf "%s" "key: ${{API_KEY%password}}"; until [ -e {gone_on} ]; do :; done; echo password'
    runner = runner_in(tmp_path, tool_with(secret, script), log_follow=tails)

    async def follow(*_: object) -> None:
        written = runner.folders.at(attempt_of(exec="tool")).path / "log/stdout"
        await until_async(lambda: written.exists() and written.stat().st_size > len("key: "), what="the first half is written")
        tails.ask(ReadLog(1, "lease-1", "stdout", 0))
        tails.ask(ReadLog(2, "lease-1", "stdout", len("key: "), wait_s=10.0))
        gone_on.touch()

    run(runner, attempt_of(exec="tool"), follow)

    assert [piece.data for piece in pieces] == [b"key: ", b"*" * len(VALUE) + b"\n"]


def test_a_value_is_in_no_log_line_no_argument_and_no_representation(
    tmp_path: Path, secret: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    tool = tool_with(secret, f"tr '\\0' ' ' < /proc/$$/cmdline; echo $$ > {tmp_path}/pid")

    result = run(runner_in(tmp_path, tool), attempt_of(exec="tool"))
    command = build_command(
        tool,
        attempt_of(exec="tool"),
        RunFolder(tmp_path),
        environment={"PATH": "/bin"},
        incarnation="i",
        secrets=read_secrets(tool),
    )

    assert "/bin/sh" in text_of(result)
    assert "*" not in text_of(result)
    for shown in (text_of(result), caplog.text, repr(tool), repr(command), str(command)):
        assert VALUE not in shown
    assert not alive(int((tmp_path / "pid").read_text()))


# ---------------------------------------------------------------------------------------------------- when it is missing


def test_an_attempt_without_its_secret_is_not_started_and_may_be_tried_again(tmp_path: Path, secret: Path) -> None:
    runner = runner_in(tmp_path, tool_with(secret, f"touch {tmp_path}/ran"))
    secret.unlink()

    outcome = run(runner, attempt_of(exec="tool")).outcome

    assert (outcome.error_code, outcome.permanent, outcome.exit_code) == ("SECRET_MISSING", False, None)
    assert "exec 'tool'" in outcome.message
    assert "API_KEY" in outcome.message
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"hunter2\0hunter3", "NUL"),
        (b"hunter2" * SECRET_MAX_BYTES, f"larger than {SECRET_MAX_BYTES} bytes"),
    ],
)
def test_a_file_that_holds_no_value_is_named_without_its_contents(secret: Path, contents: bytes, says: str) -> None:
    secret.write_bytes(contents)

    with pytest.raises(SecretProblem, match=says) as problem:
        read_secrets(tool_with(secret))

    assert str(problem.value).startswith(f"exec 'tool': the file {str(secret)!r} for API_KEY (env_from_file)")
    assert "hunter" not in str(problem.value)
    assert problem.value.__cause__ is None


def test_a_pipe_in_the_place_of_a_secret_is_refused_and_not_waited_for(secret: Path) -> None:
    secret.unlink()
    os.mkfifo(secret, 0o600)

    with pytest.raises(SecretProblem, match="not a regular file"):
        read_secrets(tool_with(secret))


@pytest.mark.parametrize(
    ("mode", "owner", "allow_loose", "says"),
    [
        (0o600, 1000, False, ""),
        (0o400, 1000, False, ""),
        (0o400, 0, False, ""),
        (0o640, 1000, False, "read by others (mode 0640)"),
        (0o604, 0, False, "read by others (mode 0604)"),
        (0o440, 0, True, ""),
        (0o644, 1000, True, ""),
        (0o620, 1000, True, "changed by others (mode 0620)"),
        (0o666, 0, True, "changed by others (mode 0666)"),
        (0o600, 1001, False, "belongs to user 1001"),
        (0o600, 1001, True, "belongs to user 1001"),
    ],
)
def test_whose_files_with_which_modes_may_hold_secrets(mode: int, owner: int, allow_loose: bool, says: str) -> None:
    found = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, 0, 10, 0, 0, 0))

    problem = problem_of(found, 1000, allow_loose=allow_loose)

    assert says in problem
    assert bool(says) == bool(problem)


def test_a_worker_does_not_start_with_a_secret_that_others_can_read(tmp_path: Path, secret: Path) -> None:
    secret.chmod(0o644)

    with pytest.raises(ConfigError, match=r"exec 'tool': .* for API_KEY .* can be read by others \(mode 0644\)"):
        runner_in(tmp_path, tool_with(secret))

    runner_in(tmp_path, tool_with(secret, allow_loose_permissions=True))


def test_a_worker_does_not_start_with_a_secret_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        runner_in(tmp_path, tool_with(tmp_path / "nowhere"))


# ---------------------------------------------------------------------------------------------------- settings


def test_an_exec_names_its_secrets() -> None:
    table = {"command": "tool", "env_from_file": {"API_KEY": "/run/key"}, "allow_loose_permissions": True}

    (tool,) = parse_execs({"tool": table}).values()

    assert (tool.env_from_file, tool.allow_loose_permissions) == ({"API_KEY": "/run/key"}, True)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"env_from_file": {"1X": "/run/key"}}, "environment name '1X'"),
        ({"env_from_file": {"TASUKI_X": "/run/key"}}, "is reserved"),
        ({"env_from_file": {"PATH": "/run/key"}}, "PATH cannot come from a file"),
        ({"env_from_file": {"TMPDIR": "/run/key"}}, "TMPDIR cannot come from a file"),
        ({"env_from_file": {"X": "key"}}, "must be an absolute path"),
        ({"env_from_file": {"X": "/run/key"}, "env": {"X": "1"}}, "in env_from_file and in env;"),
        ({"env_from_file": {"X": "/run/key"}, "allow_env": ["X"]}, "in env_from_file and in allow_env;"),
        ({"permanent_exit_codes": [0]}, "exec 'tool': permanent_exit_codes has 0"),
        ({"permanent_exit_codes": [3], "retry_exit_codes": [3]}, "both have 3"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_execs({"tool": {"command": "tool", **settings}})
