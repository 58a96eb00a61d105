"""A real PgBouncer before a PostgreSQL of the tests, Debian's package, in transaction mode.

    with PgBouncerService(postgres.port) as pooler:
        url = pooler.url(postgres_url)           # the same database, reached through the pooler

Two connections to PostgreSQL serve all clients of a database: the transactions of several take turns on one session.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Self

from tests.support.ports import free_port
from tests.support.postgres_service import START_TIMEOUT_S, STOP_TIMEOUT_S, PostgresService, _die_with_us, _unprivileged
from tests.support.waiting import until

POOL_SIZE = 2


def pgbouncer_program() -> Path | None:
    """Return Debian's program, which is not on every user's PATH; None if it is not installed."""
    found = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    return Path(found) if found else None


class PgBouncerService:
    """One PgBouncer on a free port of the loopback."""

    def __init__(self, port: int) -> None:
        program = pgbouncer_program()
        assert program is not None, "pgbouncer is not installed"
        self.folder = Path(tempfile.mkdtemp(prefix="tasuki-pgbouncer-"))
        identity = _unprivileged(self.folder)
        self.port = free_port()
        user, password = PostgresService.user, PostgresService.password
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": "transaction",
            "default_pool_size": POOL_SIZE,
            "max_client_conn": 100,
            "ignore_startup_parameters": "extra_float_digits",
        }
        lines = ["[databases]", f"* = host=127.0.0.1 port={port} user={user} password={password}", "[pgbouncer]"]
        lines += [f"{name} = {value}" for name, value in settings.items()]
        file = self.folder / "pgbouncer.ini"
        file.write_text("\n".join(lines) + "\n")
        file.chmod(0o644)
        self.log = self.folder / "pgbouncer.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [program, file], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", preexec_fn=_die_with_us, **identity
            )
        try:
            until(self._answers, START_TIMEOUT_S, "PgBouncer takes connections")
        except BaseException:
            self.close()
            raise

    def url(self, url: str) -> str:
        """Return the address of the same database behind the pooler."""
        before, _, database = url.rpartition("/")
        return f"{before.rpartition(':')[0]}:{self.port}/{database}"

    def _answers(self) -> bool:
        import psycopg

        assert self._process.poll() is None, self.log.read_text("utf-8", "replace")
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(host="127.0.0.1", port=self.port, user=PostgresService.user, dbname="postgres").close()
            return True
        return False

    def close(self) -> None:
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
