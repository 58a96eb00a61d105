"""Running the `tasuki` command as a user does: own data folders, free ports.

Commands that only talk to a server run inside the test's own process (`User.run`), which saves a start of Python each; servers,
workers and commands that are stopped or killed are forked (`User.start`, `nursery.py`); those whose interpreter is a part of the
promise have one of their own (`User.run_process`).
"""

import contextlib
import io
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tasuki.cli.main import root
from tests.support import nursery

DEADLINE_S = 30.0
TASUKI = (sys.executable, "-m", "tasuki")
# Words that set up logs, Django or signals of their process.
PROCESS_WORDS = frozenset(
    {"agent", "backup", "compact", "demo", "dispatcher", "duties", "migrate", "restore", "server", "sim", "up", "worker"}
)


def environment(home: Path, **more: str) -> dict[str, str]:
    """Nothing of the user's own tasuki; `home` stands for the home directory."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TASUKI_", "XDG_"))}
    return {**kept, "HOME": str(home), "XDG_RUNTIME_DIR": str(home), "NO_COLOR": "1", **more}


Done = subprocess.CompletedProcess[str]
Process = subprocess.Popen[str] | nursery.ForkedProcess


class User:
    """Somebody at a terminal, in a folder, with a data folder."""

    def __init__(self, home: Path, data: Path | None = None) -> None:
        self.home = home
        self.data = data or home / "data"
        self.environ = environment(home, TASUKI_DATA=str(self.data))

    def run(self, *arguments: str, input: str | None = None, **environ: str) -> Done:
        """Run a command; inside this process, unless it needs its own or a pipe as its stdin."""
        if input is not None:
            return self.run_process(*arguments, input=input, **environ)
        if arguments[0] in PROCESS_WORDS:
            return nursery.run([*TASUKI, *arguments], cwd=self.home, env={**self.environ, **environ}, timeout=DEADLINE_S)
        stdout, stderr = (io.TextIOWrapper(io.BytesIO(), "utf-8", "surrogateescape") for _ in range(2))
        with (
            contextlib.chdir(self.home),
            mock.patch.dict(os.environ, {**self.environ, **environ}, clear=True),
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stderr),
        ):
            try:
                root(args=list(arguments), prog_name="tasuki")
                code: Any = 0
            except SystemExit as ended:
                code = ended.code
        for stream in (stdout, stderr):
            stream.flush()
            stream.seek(0)
        return subprocess.CompletedProcess(arguments, int(code or 0), stdout.read(), stderr.read())

    def run_process(self, *arguments: str, input: str | None = None, **environ: str) -> Done:
        """Run a command as a process with an interpreter of its own."""
        return subprocess.run(
            [*TASUKI, *arguments],
            cwd=self.home,
            env={**self.environ, **environ},
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=DEADLINE_S,
            check=False,
        )

    def json(self, *arguments: str) -> Any:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def start(self, *arguments: str) -> Process:
        return nursery.start([*TASUKI, *arguments], cwd=self.home, env=self.environ)


class Running:
    """A server process that said that it is ready."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.lines: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("ready ") or '"event":"ready"' in line:
                break
        else:
            raise AssertionError(f"it ended before it was ready: {process.communicate()[1]}")
        # Somebody has to read on, or a full pipe would stop the server.
        threading.Thread(target=self._read_on, daemon=True).start()

    def _read_on(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip("\n") for line in self.process.stdout)

    @property
    def url(self) -> str:
        return next(line.removeprefix("listening ") for line in self.lines if line.startswith("listening tcp://"))

    def stop(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()


@contextmanager
def running(user: User, *arguments: str) -> Iterator[Running]:
    """`tasuki server …` or `tasuki up …`, ended afterwards."""
    server = Running(user.start(*arguments))
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()
        assert server.process.stderr is not None
        server.process.stderr.close()


def read_fifo(path: Path) -> str:
    """Wait for somebody to write a line to the named pipe: how a job says that it runs."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        ready, _, _ = select.select([descriptor], [], [], DEADLINE_S)
        assert ready, f"nobody wrote to {path.name} within {DEADLINE_S:g} s"
        return os.read(descriptor, 1000).decode()
    finally:
        os.close(descriptor)
