"""`tasuki top` in a real terminal, that of tmux: it follows what happens, and leaves the terminal as it was."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import TASUKI, Running, User, running
from tests.conftest import require
from tests.support.waiting import until

pytestmark = pytest.mark.e2e


class Terminal:
    """A shell in a window of a tmux server of its own."""

    def __init__(self, folder: Path, user: User) -> None:
        require("tmux", shutil.which("tmux") is not None, "make system-deps")
        self._socket = folder / "tmux"
        self._env = {**user.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "TMUX": ""}
        for name in ("COLUMNS", "LINES"):  # pytest's processes have them; programs would believe them instead of the window
            self._env.pop(name, None)
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "30", "sh")

    def _tmux(self, *words: str) -> str:
        command = ["tmux", "-S", os.fspath(self._socket), *words]
        done = subprocess.run(
            command, env=self._env, cwd=self._socket.parent, capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def type(self, *keys: str) -> None:
        """Press keys; a text is typed as it is."""
        self._tmux("send-keys", *keys)

    def enter(self, line: str) -> None:
        self._tmux("send-keys", "-l", line)
        self.type("Enter")

    def resize(self, columns: int, lines: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(lines))

    @property
    def text(self) -> str:
        """The text in the window."""
        return self._tmux("capture-pane", "-p")

    def wait_for(self, *texts: str, without: str = "") -> str:
        """Wait until the window shows all these texts, and return what it shows."""

        def look() -> str:
            shown = self.text
            return shown if all(text in shown for text in texts) and not (without and without in shown) else ""

        try:
            return until(look, 60.0, f"the terminal shows {texts}")
        except AssertionError as error:
            raise AssertionError(f"{error}; it shows:\n{self.text}") from None

    def close(self) -> None:
        self._tmux("kill-server")


@pytest.fixture
def terminal(tmp_path: Path, served: tuple[User, Running]) -> Iterator[Terminal]:
    opened = Terminal(tmp_path, served[0])
    yield opened
    opened.close()


TOP = shlex.join([*TASUKI, "top", "--interval", "0.2"])
SETTINGS = "stty -a | grep -ow -e '-\\?icanon' -e '-\\?echo' | paste -sd, -"


def test_it_shows_queues_and_workers_follows_them_and_q_gives_the_terminal_back(
    served: tuple[User, Running], terminal: Terminal
) -> None:
    user, _ = served
    worker = user.json("workers", "--json")[0]["worker_id"]
    terminal.enter("echo before $((40 + 2))")
    terminal.wait_for("before 42")
    terminal.enter(TOP)
    shown = terminal.wait_for("leader ", "waiting", "WORKER", worker, "q: quit", without="before 42")
    user.run("pause", "held.>")
    user.run("submit", "--subject", "held.top", "--job-id", "seen-by-top", "true")
    terminal.wait_for("held", "1 waiting")
    user.run("cancel", "seen-by-top")
    user.run("resume", "held.>")
    terminal.wait_for("0 waiting")
    terminal.type("q")
    ended = terminal.wait_for("before 42", without="q: quit")
    terminal.enter(f"echo code $?; {SETTINGS}")
    after = terminal.wait_for("code 0", "\nicanon,echo")

    assert "HOST" in shown
    assert "1 workers, 2 slots" in shown
    assert "leader" not in ended
    assert after


def test_ctrl_c_ends_it_as_any_command_and_gives_the_terminal_back(terminal: Terminal) -> None:
    terminal.enter(TOP)
    terminal.wait_for("q: quit")
    terminal.type("C-c")
    terminal.wait_for("tasuki top", without="q: quit")
    terminal.enter(f"echo code $?; {SETTINGS}")
    terminal.wait_for("code 130", "\nicanon,echo")
    assert "Traceback" not in terminal.text


def test_a_terminal_that_becomes_narrow_has_fewer_columns_and_every_part(
    served: tuple[User, Running], terminal: Terminal
) -> None:
    terminal.enter(TOP)
    terminal.wait_for("HOST", "SERVER", "q: quit")
    terminal.resize(36, 14)
    shown = terminal.wait_for("WORKER", "SLOTS", "q: quit", without="HOST")

    lines = shown.splitlines()
    assert lines[0].startswith("tasuki, ")
    assert lines[0].rstrip().endswith("…"), "a line that is too long is cut, not wrapped"
    assert max(map(len, lines)) <= 36


def test_a_server_that_is_away_is_waited_for(tmp_path: Path) -> None:
    user = User(tmp_path)
    options = ("up", "--tcp", "127.0.0.1:0", "--no-http", "--slots", "1")
    with running(user, *options):
        terminal = Terminal(tmp_path, user)
        try:
            terminal.enter(TOP)
            terminal.wait_for("WORKER")
        except BaseException:
            terminal.close()
            raise
    try:
        away = terminal.wait_for("WORKER", "server")
        with running(user, *options):
            terminal.wait_for("tasuki, ", "WORKER", without="answer")
        assert away
    finally:
        terminal.close()


def test_once_with_json_or_without_a_terminal(served: tuple[User, Running]) -> None:
    user, _ = served
    user.run("submit", "--wait", "--job-id", "looked-at", "true")

    found = user.json("top", "--json")
    lines = user.run("top").stdout.splitlines()

    assert found["figures"]["workers"] == 1
    assert found["figures"]["slots"] == 2
    assert found["figures"]["succeeded"] == sum(counts["succeeded"] for counts in found["groups"].values()) >= 1
    assert found["leader"] in {server["server_id"] for server in found["servers"]}
    assert found["alerts"] == []
    assert sum(minute["finished"] for minute in found["minutes"]) >= 1
    assert lines[0].startswith("tasuki, ")
    assert any(line.startswith("QUEUE") for line in lines)
