"""A process that forks those of the tests: imports take longer than most of what a test does with a server or a worker.

    forked = start(command, env=env, cwd=folder, stdout=log, stderr=log)       as subprocess.Popen(command, …)
    done = run(command, env=env, cwd=folder)                                   as subprocess.run(command, capture_output=True, …)

`command` is one of this Python's: `-m tasuki …`, `-c code …` or a script. One that cannot be forked, because of its environment,
is started as any other. Each of pytest's processes has a nursery, which ends with it. A forked process is one like any other,
with an environment, a session and standard streams of its own; but /proc shows the nursery's command line and environment for
it, and variables that Python reads at its start do not count.
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
from typing import Any, Self, TextIO

SOURCE = Path(__file__).parents[2] / "src"
ORDER_MAX_BYTES = 1024 * 1024
PRELOADED = (
    "uvloop", "django.db.models", "tasuki.cli.main", "tasuki.cli.server", "tasuki.cli.worker", "tasuki.cli.agent",
    "tasuki.doors.http.door", "tasuki.agent.app", "tasuki.agent.store_registry", "tasuki.dispatcher.app",
    "tasuki.stores.sql.store", "tasuki.stores.sql.postgres", "tasuki.stores.redis.store", "tasuki.coords.sql",
    "tasuki.coords.redis", "tasuki.net.http.worker_link", "tasuki.client.sync", "tasuki.blobs.s3.store",
    # Those of Django that need no settings; a project brings its own.
    "django.contrib.auth.hashers", "django.core.mail", "django.core.management.commands.migrate",
    "django.core.management.commands.test", "django.db.backends.postgresql.base", "django.db.backends.sqlite3.base",
    "django.template.defaultfilters", "django.views.generic", "django_tasks",
)  # fmt: skip
READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC")
"""Beginnings of the names of variables that count only when a program starts."""


class ForkedProcess:
    """A process of a nursery, used like `subprocess.Popen`.

    It stays a zombie, and its pid its own, until its end was asked for.
    """

    def __init__(self, nursery: Nursery, pid: int, args: Sequence[str], pipes: Mapping[int, TextIO]) -> None:
        self._nursery = nursery
        self.pid = pid
        self.args = args
        self.stdout, self.stderr = pipes.get(1), pipes.get(2)
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read its pipes to their ends, wait for the end of the process, and return both texts."""
        read = {stream.fileno(): bytearray() for stream in (self.stdout, self.stderr) if stream is not None}
        unread = set(read)
        while unread:
            ready, _, _ = select.select(unread, [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            for number in ready:
                part = os.read(number, 65536)
                read[number] += part
                unread -= set() if part else {number}
        self.wait(timeout)
        texts = [
            "" if stream is None else read[stream.fileno()].decode(stream.encoding, stream.errors or "strict")
            for stream in (self.stdout, self.stderr)
        ]
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        return texts[0], texts[1]

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
    def here(cls) -> Self:
        with cls._starting:
            if cls._here is None:
                cls._here = cls(clean_environment())
            return cls._here

    def fork(self, argv: Sequence[str], env: Mapping[str, str], folder: Path, streams: Sequence[int]) -> ForkedProcess:
        """Fork a process with these descriptors as its standard streams; PIPE for its output is a pipe that the test reads."""
        pipes = {place: os.pipe() for place, stream in enumerate(streams) if stream == subprocess.PIPE}
        given = [pipes[place][1] if place in pipes else stream for place, stream in enumerate(streams)]
        try:
            pid = self.ask({"argv": list(argv), "env": dict(env), "folder": os.fspath(folder)}, *given)
        finally:
            for _, theirs in pipes.values():
                os.close(theirs)
        read = {place: os.fdopen(ours, encoding="utf-8", errors="surrogateescape") for place, (ours, _) in pipes.items()}
        return ForkedProcess(self, pid, argv, read)

    def ask(self, order: Mapping[str, Any], *descriptors: int) -> int:
        with self._alone:
            socket.send_fds(self._socket, [json.dumps(order).encode()], descriptors)
            answer = self._socket.recv(64)
        assert answer, "the nursery has ended"
        return int(answer)


def start(
    command: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
) -> ForkedProcess | subprocess.Popen[str]:
    """Start a command of this Python in a session of its own, forked if it may be. `stdin` is a descriptor or DEVNULL."""
    env = clean_environment() if env is None else env
    words = [os.fspath(part) for part in command]
    options = {"stdin": stdin, "stdout": stdout, "stderr": stderr, "errors": "surrogateescape", "start_new_session": True}
    if words[0] != sys.executable or not _may_fork(env):
        return subprocess.Popen(words, env=env, cwd=cwd, **options)
    with Path(os.devnull).open("rb") as nothing:
        streams = [nothing.fileno() if stdin == subprocess.DEVNULL else stdin, stdout, stderr]
        return Nursery.here().fork(words[1:], env, cwd or Path.cwd(), streams)


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """Run a command of this Python to its end, with nothing to read."""
    process = start(command, env=env, cwd=cwd)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def clean_environment() -> dict[str, str]:
    """Return this process's environment without TASUKI variables; the source tree is importable in any folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TASUKI_")}
    return {**kept, "PYTHONPATH": os.fspath(SOURCE), "PYTHONUNBUFFERED": "1"}


def _may_fork(env: Mapping[str, str]) -> bool:
    """Return whether a process with this environment can be forked: no variable in it would have counted at its start alone."""
    names = {name for name, value in env.items() if os.environ.get(name) != value} | (os.environ.keys() - env.keys())
    return not any(name.startswith(READ_AT_START) for name in names - {"PYTHONPATH", "PYTHONUNBUFFERED"})


# ---------------------------------------------------------------------------------------------------- in the nursery


def serve(control: socket.socket) -> dict[str, Any]:
    """Fork processes until the test run is over. Returns the order in each of them."""
    children: set[int] = set()
    while True:
        record, descriptors, _, _ = socket.recv_fds(control, ORDER_MAX_BYTES, 3)
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
            for place, descriptor in enumerate(descriptors):
                os.dup2(descriptor, place)
            os.closerange(3, max(*descriptors, control.fileno()) + 1)
            return order
        for descriptor in descriptors:
            os.close(descriptor)
        children.add(pid)
        control.send(str(pid).encode())


def be(order: dict[str, Any]) -> None:
    """Be the process that was ordered."""
    os.setsid()
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["env"])
    random.seed()
    sys.stdout.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    sys.path[1:1] = [place for place in order["env"].get("PYTHONPATH", "").split(os.pathsep) if place not in sys.path]
    kind, *words = order["argv"]
    if kind == "-m":
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__")
    elif kind == "-c":
        sys.argv = [kind, *words[1:]]
        exec(compile(words[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = [kind, *words]
        sys.path[0] = os.fspath(Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    sys.path[0] = ""  # not this folder
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            __import__(name)
    gc.collect()
    gc.freeze()
    be(serve(socket.socket(fileno=int(sys.argv[1]))))
