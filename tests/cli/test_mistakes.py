"""Mistakes that people make: each is told in one line, with the way out, and has the exit code of its kind."""

from __future__ import annotations

import os
import shlex
import subprocess
from typing import NamedTuple

import pytest

from tests.cli.commands import DEADLINE_S, TASUKI, Running, User

pytestmark = pytest.mark.e2e

Served = tuple[User, Running]


class Mistake(NamedTuple):
    """Words behind `tasuki`, the exit code, and a part of the line that says what is wrong and what to do."""

    words: str
    code: int
    says: str


# TCP and HTTP stand for the addresses of a server that runs.
MISTAKES = [
    Mistake("rnu", 2, "No such command 'rnu'; see: tasuki --help"),
    Mistake("--bogus", 2, "see: tasuki --help"),
    Mistake("run", 2, "Missing argument 'EXEC'; see: tasuki run --help"),
    Mistake("run 'echo hello'", 2, "write it and its arguments as words of their own, without quotes"),
    Mistake("run --tow x true", 2, "'--to'"),
    Mistake("run --timeout 5x true", 2, "write 90s, 5m, 1h or 1d"),
    Mistake("run --timeout -1 true", 2, "write 90s, 5m, 1h or 1d"),
    Mistake("run --retries -1 true", 2, "'--retries': -1 is not in the range"),
    Mistake("run --priority 12 true", 2, "'--priority': 12 is not in the range"),
    Mistake("run --job-id a,b true", 125, "--job-id 'a,b' must be 1 to 128 characters"),
    Mistake("run --subject a..b true", 125, "--subject 'a..b' has an empty token; write tokens with one dot between them"),
    Mistake("run --env plain true", 125, "write --env NAME=VALUE"),
    Mistake("run --env 1A=b true", 125, "--env '1A' must be letters, digits and _"),
    Mistake("run --file missing true", 125, "the input file 'missing' cannot be read: No such file or directory"),
    Mistake("run --file folder true", 125, "the input file 'folder' cannot be read: Is a directory"),
    Mistake("run --payload-file missing true", 125, "the payload file 'missing' cannot be read"),
    Mistake("run ./plain.txt", 125, "allow it with: chmod +x ./plain.txt"),
    Mistake("run ./missing", 125, "name one on PATH, or one that is there"),
    Mistake("run no-such-program", 125, "install it, or name it by its path, as in ./program"),
    Mistake("run --cwd missing true", 125, "name a folder with --cwd"),
    Mistake("run -o missing/x.zip true", 125, "make it with: mkdir -p missing"),
    Mistake("run -o folder true", 125, "name a file in it, as in -o folder/result.zip"),
    Mistake("run --not-before tomorrow true", 125, "write +90s, +1h, 2026-01-31T06:00, or a Unix time"),
    Mistake("run --permanent-exit x true", 125, "write exit codes with commas between, as in 3,4"),
    Mistake("run --permanent-exit 3 --retry-exit 3 true", 125, "--permanent-exit and --retry-exit both have 3"),
    Mistake("run --hedge 5s true", 125, "name them with --to agents:http://n1:7090,http://n2:7090"),
    Mistake("submit --array 9-1 true", 2, "must go up, in steps of at least 1"),
    Mistake("submit --array 1..9 true", 2, "as in 1-1000, 0-100:10 or 3,7,9-12"),
    Mistake("submit --array 1-2 --each-line - true", 2, "choose one"),
    Mistake("submit --each-line missing true", 2, "--each-line 'missing' cannot be read"),
    Mistake("status no-such-job", 3, "there is no job 'no-such-job', or it is not yours"),
    Mistake("wait no-such-job", 3, "there is no job 'no-such-job'"),
    Mistake("cancel", 2, "Missing argument 'JOB|ARRAY...'; see: tasuki cancel --help"),
    Mistake("list --state LOST", 2, "is not one of PENDING, ASSIGNED, RUNNING"),
    Mistake("list --limit 0", 2, "--limit must be at least 1"),
    Mistake("retry", 2, "as in: tasuki retry ARRAY --only-failed"),
    Mistake("dead retry", 2, "as in: tasuki dead retry --all"),
    Mistake("list --to 127.0.0.1:7000", 2, "use tcp://host:7000"),
    Mistake("list --to HTTP-as-tcp", 5, "it takes connections and does not answer; is it http://?"),
    Mistake("list --to TCP-as-http", 5, "is it tcp://, or with TLS https://?"),
    Mistake("list --to TCP-as-tls", 5, "what answers there does not speak TLS; is it tcp://?"),
    Mistake("list --to tcp://127.0.0.1:1", 5, "Connection refused"),
    *[
        Mistake(f"{words} --data missing", 5, "start one with: tasuki up, or name another with --to URL or --data FOLDER")
        for words in ("list", "token list", "token create", "servers", "workers", "stats", "detach any", "dead list")
    ],
    Mistake("list --to TCP --token-file missing", 2, "the token file 'missing' cannot be read"),
    Mistake("list --to TCP --token-file open.token", 2, "chmod 600 it"),
    Mistake("list --to TCP --token-file wrong.token", 4, "list the valid ones with: tasuki token list"),
    Mistake("detach typo", 3, "no worker 'typo' is connected; there are "),
    Mistake("attach typo", 3, "no worker 'typo' is detached or connected; see: tasuki workers"),
    Mistake("resume typo.>", 3, "pattern 'typo.>' is not paused; nothing is: tasuki pause"),
    Mistake("pause a..b", 2, "has an empty token"),
    Mistake("pause --reason why", 2, "--reason needs a PATTERN"),
    Mistake("token create --expires 90", 2, "write 90d for days"),
    Mistake("token create --kind root", 2, "--kind must be one of admin, client, worker"),
    Mistake("token revoke xyz", 3, "there is no token 'xyz' that is still valid"),
    Mistake("worker --any-program --to TCP", 2, "allow programs by name, with --exec NAME=COMMAND"),
    Mistake("worker --to TCP", 2, "give it execs (--exec NAME=COMMAND, --config FILE) or handlers"),
    Mistake("worker --exec nothing", 2, "write --exec NAME='PROGRAM ARGUMENTS'"),
    Mistake("worker --config plain.txt", 2, "the execs file 'plain.txt' is not TOML"),
    Mistake("worker --exec a=b --reconnect-grace 2h", 2, "at most 1h"),
    Mistake("up", 5, "connect to that server, or stop it first"),
    Mistake("up --data other --tcp 70000000", 2, "with a port from 0 to 65535"),
    Mistake("server --data other --tcp 0.0.0.0:7000", 2, "give it, listen on 127.0.0.1, or give --insecure"),
    Mistake("server --data other --tls-cert x", 2, "--tls-cert and --tls-key belong together; give both, or none"),
    Mistake("agent --registry redis://db/1 --lease-ttl 0.5", 2, "at least 1s and at most 1h"),
    Mistake("nodes", 2, "write --to agents:http://n1:7090,http://n2:7090"),
    Mistake("restore missing", 2, "cannot be read: No such file or directory"),
]


@pytest.fixture(scope="module")
def place(served: Served) -> dict[str, str]:
    """The folder with the files that the mistakes name; returns the words that stand for addresses."""
    user, server = served
    (user.home / "folder").mkdir()
    for name, text, mode in (("plain.txt", "plain\n", 0o644), ("open.token", "x\n", 0o644), ("wrong.token", "x\n", 0o600)):
        (user.home / name).write_text(text)
        (user.home / name).chmod(mode)
    http = next(line.split()[1] for line in server.lines if line.startswith("listening http://"))
    return {
        "HTTP-as-tcp": http.replace("http://", "tcp://"),
        "TCP-as-http": server.url.replace("tcp://", "http://"),
        "TCP-as-tls": server.url.replace("tcp://", "tls://"),
        "TCP": server.url,
    }


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.words)
def test_a_mistake_is_told_in_one_line_with_the_way_out(
    served: Served, place: dict[str, str], mistake: Mistake, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, _ = served
    monkeypatch.setattr("tasuki.cli.connect.CONNECT_TIMEOUT_S", 0.5)
    done = user.run(*[place.get(word, word) for word in shlex.split(mistake.words)])

    assert (done.returncode, done.stdout) == (mistake.code, "")
    assert mistake.says in done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("tasuki: ")


@pytest.mark.parametrize(("terminal", "environ"), [(True, {}), (True, {"NO_COLOR": "1"}), (False, {})])
def test_a_terminal_has_colours_unless_they_are_not_wanted(served: Served, terminal: bool, environ: dict[str, str]) -> None:
    user, _ = served
    user.run("submit", "--wait", "--job-id", "green", "true")
    plain = {name: value for name, value in user.environ.items() if name != "NO_COLOR"}
    controller, other = os.openpty()
    done = subprocess.run(
        [*TASUKI, "status", "green", "no-such-job"],
        env={**plain, "TERM": "xterm", **environ},
        stdout=other if terminal else subprocess.PIPE,
        stderr=other if terminal else subprocess.PIPE,
        timeout=DEADLINE_S,
    )
    os.close(other)
    shown = os.read(controller, 10_000) if terminal else done.stdout + done.stderr
    os.close(controller)

    has_colours = terminal and not environ
    assert (b"\033[32mSUCCEEDED\033[0m" in shown) == has_colours
    assert (b"\033[31mtasuki: NOT_FOUND\033[0m: " in shown) == has_colours
    assert (b"\033[" in shown) == has_colours
