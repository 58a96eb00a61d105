"""The example's Django project with the tests' own app, run as real processes on SQLite or PostgreSQL.

site = DjangoSite(tmp_path)                        # or DjangoSite(tmp_path, postgres_url=url)
site.migrate()
with site.worker():
    assert site.run("print(add.enqueue(1).id)")
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from tests.support import nursery
from tests.support.processes import SOURCE, ChildProcess

EXAMPLE = SOURCE.parent / "examples" / "django_site"
PROJECT = SOURCE.parent / "tests" / "django" / "project"
TIMEOUT_S = 60.0
PREAMBLE = """
import json, sys, time
import django
django.setup()
from django.db import connection, transaction
from shop.models import Invoice, Order
from shop.tasks import greet, send_invoice
from probes.tasks import *

def finished(result, timeout=20.0):
    until = time.monotonic() + timeout
    while not result.is_finished:
        assert time.monotonic() < until, f"{result} did not end"
        time.sleep(0.005)
        result.refresh()
    return result
"""


class DjangoSite:
    """One project with a database of its own."""

    _tables: ClassVar[dict[str, bytes]] = {}
    """By Python: the SQLite file of its first site in this process, after the migrations."""

    def __init__(self, folder: Path, postgres_url: str = "", *, python: str = sys.executable, **variables: str) -> None:
        self.folder = folder
        self.python = python
        places = {"DATABASE_URL": postgres_url} if postgres_url else {"SITE_SQLITE": os.fspath(folder / "site.sqlite3")}
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TASUKI_")},
            **places,
            **variables,
            "DJANGO_SETTINGS_MODULE": "site_settings",
            "PYTHONPATH": os.pathsep.join(map(os.fspath, (SOURCE, PROJECT, EXAMPLE))),
            "PYTHONUNBUFFERED": "1",
        }

    def manage(
        self, *arguments: str, check: bool = True, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `manage.py ARGUMENTS`."""
        return self._run([self.python, os.fspath(EXAMPLE / "manage.py"), *arguments], check, env)

    def migrate(self) -> None:
        """Make all tables, by `manage.py migrate` or on SQLite as a copy of what that made before."""
        file = Path(self.env.get("SITE_SQLITE", ""))
        if "SITE_SQLITE" in self.env and self.python in self._tables:
            file.write_bytes(self._tables[self.python])
            return
        self.manage("migrate", "-v0")
        if "SITE_SQLITE" in self.env:
            self._tables[self.python] = file.read_bytes()

    def run(self, code: str, *, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        """Run code in a process of the project, with the names of PREAMBLE; return what it printed."""
        return self._run([self.python, "-c", PREAMBLE + code], check, env).stdout

    def ask(self, code: str) -> Any:
        """Run code, and return the JSON document that it printed."""
        return json.loads(self.run(code))

    def worker(self, *arguments: str, env: Mapping[str, str] | None = None, log: str = "worker.log") -> ChildProcess:
        """Start `manage.py tasuki_worker`; returns when it is ready."""
        command = [self.python, EXAMPLE / "manage.py", "tasuki_worker", *arguments]
        started = ChildProcess(command, self.folder / log, {**self.env, **(env or {})})
        try:
            started.wait_for_output("connected to")
        except BaseException:
            started.kill()
            raise
        return started

    def _run(self, command: list[str], check: bool, env: Mapping[str, str] | None) -> subprocess.CompletedProcess[str]:
        done = nursery.run(command, env={**self.env, **(env or {})}, cwd=self.folder, timeout=TIMEOUT_S)
        assert not check or done.returncode == 0, f"{command[-3:]} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done
