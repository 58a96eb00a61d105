"""The examples in `--help` are true: all of them are understood, and those about jobs, servers, workers and tokens are run."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from tasuki.cli.main import root
from tests.cli.commands import DEADLINE_S, User, running

PROGRAMS = ("backup", "encode", "jq", "simulate")  # of other people, which the examples name
RUN = {
    "run", "submit", "wait", "status", "list", "explain", "result", "logs", "cancel", "retry", "dead", "stats", "top", "servers",
    "workers", "detach", "attach", "pause", "resume", "token",
}  # fmt: skip
NOT_RUN = ("https://", "agents:", "--watch", "w-3f9c21ab77de")  # other servers, no end, a worker that enrolled
ONLY_A_SHELL_KNOWS = re.compile(r"[|&;<>$*`~]")
REFUSED = re.compile(r"^tasuki: (?!EXIT_CODE|CANCELED)[A-Z_]+: ", re.MULTILINE)


def examples(group: click.Group = root, *words: str) -> Iterator[tuple[str, ...]]:
    """Yield the words and a line of the help of each command."""
    context = click.Context(group)
    for word in group.list_commands(context):
        command = group.get_command(context, word)
        assert command is not None
        for line in (command.epilog or "").partition("Examples:\n")[2].splitlines():
            yield (word if not words else words[0], line.strip())
        if isinstance(command, click.Group):
            yield from examples(command, *words, word)


ALL = list(examples())


def calls(line: str) -> Iterator[list[str]]:
    """Yield the arguments of each `tasuki` in a line of shell."""
    plain = line.replace("'>'", "'a.>'").replace("2> ", "> ").replace("$(date +%F)", "today")  # nothing that only a shell knows
    lexer = shlex.shlex(plain, posix=True, punctuation_chars="|&;>")
    lexer.whitespace_split = True
    words = list(lexer)
    for place, word in enumerate(words):
        if word == "tasuki":
            rest = words[place + 1 :]
            ends = [at for at, each in enumerate(rest) if set(each) <= set("|&;>")]
            yield rest[: ends[0]] if ends else rest


@pytest.mark.parametrize("line", [line for _, line in ALL])
def test_an_example_is_understood(line: str) -> None:
    found = list(calls(line))
    assert found

    for arguments in found:
        context = click.Context(root, info_name="tasuki")
        command: click.Command = root
        while isinstance(command, click.Group):
            word = arguments[0] if arguments else ""
            below = command.get_command(context, word)
            if below is None:
                assert command.invoke_without_command, word
                break
            command, arguments = below, arguments[1:]
        command.make_context("tasuki", list(arguments), parent=context)


def test_an_example_with_an_unknown_option_is_not_understood() -> None:
    with pytest.raises(click.UsageError):
        test_an_example_is_understood("tasuki list --no-such-option 3 | wc -l")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[User, dict[str, str]]]:
    """A user with everything that the examples name; yields the words that stand for something else here."""
    user = User(tmp_path_factory.mktemp("help"))
    programs = user.home / "bin"
    programs.mkdir()
    for name in PROGRAMS:
        (programs / name).write_text("#!/bin/sh\nexec true\n")
    (programs / "tasuki").write_text(f'#!/bin/sh\nexec {sys.executable} -m tasuki "$@"\n')
    (user.home / "script.sh").write_text("#!/bin/sh\nexec true\n")
    for path in (*programs.iterdir(), user.home / "script.sh"):
        path.chmod(0o755)
    for name in ("data.csv", "scene.blend", "number.txt", "a.wav", "b.wav"):
        (user.home / name).write_text("1\n")
    user.environ["PATH"] = f"{programs}:{user.environ['PATH']}"
    with running(user, "up", "--tcp", "127.0.0.1:0", "--no-http", "--slots", "2", "--exec", "render=/bin/echo {args}") as server:
        shutil.copy(user.data / "token", user.home / "token")
        (user.home / "token").chmod(0o600)
        for job_id, program in (("good-1", "true"), ("good-2", "true"), ("bad-1", "false"), ("bad-2", "false")):
            user.run("submit", "--wait", "--retries", "0", "--job-id", job_id, program)
        user.run("submit", "--wait", "--retries", "0", "--job-id", "some", "--array", "1-2", "test", "{i}", "=", "1")
        user.run("submit", "--wait", "--job-id", "nightly-2026-01-31", "backup", "/srv")
        token_id = user.json("token", "create", "--json")["token_id"]
        worker = user.json("workers", "--json")[0]["worker_id"]
        here = {
            "tcp://host:7000": server.url,
            "tcp://a:7000": server.url,
            "1-1000": "1-3",
            "lab-7": worker,
            "3f9c21ab77de": token_id,
        }
        yield user, here


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("word", "line"),
    [(word, line) for word, line in ALL if word in RUN and not any(text in line for text in NOT_RUN)],
    ids=lambda text: text[:60],
)
def test_an_example_runs(stage: tuple[User, dict[str, str]], word: str, line: str) -> None:
    user, here = stage
    kind = "bad" if word == "dead" else "good"
    names = {"JOB1": f"{kind}-1", "JOB2": f"{kind}-2", "JOB": f"{kind}-1", "ARRAY": "some"}
    for text, replaced in (here | names).items():
        line = line.replace(text, replaced)
    shutil.rmtree(user.home / "out", ignore_errors=True)

    if ONLY_A_SHELL_KNOWS.search(line):
        done = subprocess.run(
            ["bash", "-c", line], cwd=user.home, env=user.environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=DEADLINE_S,
        )  # fmt: skip
    else:
        name, *arguments = shlex.split(line, comments=True)
        assert name == "tasuki"
        done = user.run(*arguments)

    assert done.returncode in (0, 1, 123), done.stderr  # 1: a job failed, or grep found nothing; 123: of xargs
    assert "Traceback" not in done.stderr
    assert not REFUSED.search(done.stderr), done.stderr
