"""A process that forks those of the tests: imports take longer than most of what a test does with a server or a worker.

    nursery = Nursery.here(clean_environment)
    forked = nursery.fork(["server", "--data", …], env, log_descriptor)        as `python -m tasuki server …`
    forked = nursery.fork([script, url, …], env, log_descriptor)               as `python script url …`

Each of pytest's processes has one, which ends with it. A forked process is one like any other, with an environment, a session and
output of its own; but /proc shows the nursery's command line and environment for it, and variables that Python reads at its start
do not count. `ForkedProcess` is used like `subprocess.Popen`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

ORDER_MAX_BYTES = 1024 * 1024
PRELOADED = (
    "uvloop", "django.db.models", "tasuki.cli.main", "tasuki.cli.server", "tasuki.cli.worker", "tasuki.cli.agent",
    "tasuki.doors.http.door", "tasuki.agent.app", "tasuki.agent.store_registry", "tasuki.dispatcher.app",
    "tasuki.stores.sql.store", "tasuki.stores.sql.postgres", "tasuki.stores.redis.store", "tasuki.coords.sql",
    "tasuki.coords.redis", "tasuki.net.http.worker_link", "tasuki.client.sync", "tasuki.blobs.s3.store",
)  # fmt: skip
READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC")
"""Beginnings of the names of variables that count only when a program starts."""


class ForkedProcess:
    """A process of a nursery. It stays a zombie, and its pid its own, until its end was asked for."""

    def __init__(self, nursery: Nursery, pid: int, args: Sequence[str]) -> None:
        self._nursery = nursery
        self.pid = pid
        self.args = args
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            self._reap()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        if self.returncode is None:
            self._reap()
        assert self.returncode is not None
        return self.returncode

    def _reap(self) -> None:
        self.returncode = self._nursery.ask({"reap": self.pid})
        os.close(self._pidfd)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The nursery of this process, started when it is first used."""

    _here: Self | None = None
    _starting = threading.Lock()

    def __init__(self, env: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, os.fspath(Path(__file__)), str(theirs.fileno())]
        self._process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._alone = threading.Lock()

    @classmethod
    def here(cls, env: Mapping[str, str]) -> Self:
        """Return it; `env` is its environment, if it has to be started."""
        with cls._starting:
            if cls._here is None:
                cls._here = cls(env)
            return cls._here

    def fork(self, argv: Sequence[str], env: Mapping[str, str], log: int) -> ForkedProcess:
        """Fork a process that writes to the descriptor `log`."""
        order = {"argv": list(argv), "env": dict(env), "folder": os.fspath(Path.cwd())}
        return ForkedProcess(self, self.ask(order, log), argv)

    def ask(self, order: Mapping[str, Any], *descriptors: int) -> int:
        with self._alone:
            socket.send_fds(self._socket, [json.dumps(order).encode()], descriptors)
            answer = self._socket.recv(64)
        assert answer, "the nursery has ended"
        return int(answer)


def may_fork(env: Mapping[str, str]) -> bool:
    """Return whether a process with this environment can be forked: no variable in it would have counted at its start alone."""
    names = {name for name, value in env.items() if os.environ.get(name) != value} | (os.environ.keys() - env.keys())
    return not any(name.startswith(READ_AT_START) for name in names - {"PYTHONPATH", "PYTHONUNBUFFERED"})


# ---------------------------------------------------------------------------------------------------- in the nursery


def serve(control: socket.socket) -> dict[str, Any]:
    """Fork processes until the test run is over. Returns the order in each of them."""
    children: set[int] = set()
    while True:
        record, descriptors, _, _ = socket.recv_fds(control, ORDER_MAX_BYTES, 1)
        if not record:
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os._exit(0)
        order: dict[str, Any] = json.loads(record)
        if "reap" in order:
            pid, status = os.waitpid(order["reap"], 0)
            children.discard(pid)
            control.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            for place in (1, 2):
                os.dup2(descriptors[0], place)
            os.closerange(3, max(descriptors[0], control.fileno()) + 1)
            return order
        os.close(descriptors[0])
        children.add(pid)
        control.send(str(pid).encode())


def run(order: dict[str, Any]) -> None:
    """Be the process that was ordered."""
    os.setsid()
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["env"])
    random.seed()
    sys.stdout.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    script, *rest = order["argv"]
    if script.endswith(".py"):
        sys.argv = [script, *rest]
        sys.path[0] = os.fspath(Path(script).parent)
        runpy.run_path(script, run_name="__main__")
    else:
        from tasuki.cli.main import main

        sys.argv = ["tasuki", script, *rest]
        main()


if __name__ == "__main__":
    sys.path[0] = ""  # not this folder
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            __import__(name)
    gc.collect()
    gc.freeze()
    run(serve(socket.socket(fileno=int(sys.argv[1]))))
