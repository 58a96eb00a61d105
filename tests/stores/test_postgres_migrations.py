"""Tables on PostgreSQL: made once by whoever comes first, the same however they came about, and never changed under a server
that could not live with it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasuki.django import standalone
from tasuki.errors import ConfigError
from tasuki.stores.sql.postgres import connection_parameters
from tasuki.stores.sql.store import SqlStore
from tests.support.postgres_service import PostgresService
from tests.support.waiting import until

OPENER = """
import sys
from tasuki.stores.sql.store import SqlStore
print("ready", flush=True)
sys.stdin.readline()
store = SqlStore.open_postgresql(sys.argv[1])
print(store.counts(), store.epoch())
store.close()
"""

COLUMNS = """
    SELECT table_name, column_name, data_type, collation_name, is_nullable, column_default, identity_generation
    FROM information_schema.columns WHERE table_schema = 'public' AND table_name LIKE 'tasuki%' ORDER BY 1, 2"""
INDEXES = "SELECT indexdef FROM pg_indexes WHERE schemaname = 'public' AND tablename LIKE 'tasuki%' ORDER BY indexname"
STORAGE = "SELECT relname, reloptions FROM pg_class WHERE relkind = 'r' AND relname LIKE 'tasuki%' ORDER BY relname"


@pytest.fixture
def empty_url(postgres: PostgresService) -> Iterator[str]:
    url = postgres.empty_database()
    yield url
    postgres.drop(url)


@pytest.fixture
def url(postgres: PostgresService) -> Iterator[str]:
    """With tables that the test may change."""
    url = postgres.database()
    yield url
    postgres.drop(url)


@pytest.fixture
def alias(url: str) -> Iterator[str]:
    from django.db import connections

    standalone.configure()
    alias = standalone.register_postgresql(connection_parameters(url))
    yield alias
    connections[alias].close()
    standalone.forget(alias)


def described(postgres: PostgresService, url: str) -> dict[str, Any]:
    return {name: postgres.execute(statement, url=url) for name, statement in (("c", COLUMNS), ("i", INDEXES), ("s", STORAGE))}


def add_server(postgres: PostgresService, url: str, name: str, *, schema_version: int, beat_s_ago: float = 1.0) -> None:
    postgres.execute(
        "INSERT INTO tasuki_member (member_id, kind, incarnation, beat_at, schema_version, info)"
        " VALUES (%s, 'server', '1', %s, %s, '')",
        (name, time.time() - beat_s_ago, schema_version),
        url=url,
    )


def forget_migrations(postgres: PostgresService, url: str) -> None:
    """There is one to do; that its tables are there already is for those who get as far as doing it."""
    postgres.execute("DELETE FROM django_migrations WHERE app = 'tasuki'", url=url)


@pytest.mark.slow
def test_servers_that_start_at_once_on_an_empty_database_all_come_up(empty_url: str) -> None:
    openers = [
        subprocess.Popen(
            [sys.executable, "-c", OPENER, empty_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            text=True,
        )
        for _ in range(4)
    ]
    for opener in openers:
        assert opener.stdout is not None
        assert opener.stdout.readline() == "ready\n"

    for opener in openers:
        assert opener.stdin is not None
        opener.stdin.write("go\n")
        opener.stdin.flush()
    said = [opener.communicate(timeout=60) for opener in openers]

    assert [(out, opener.returncode) for (out, _), opener in zip(said, openers, strict=True)] == [("{} (0, '')\n", 0)] * 4, said


def test_a_fresh_schema_equals_a_migrated_one(postgres: PostgresService, empty_url: str, url: str) -> None:
    """Fresh: straight from the models, without the migrations."""
    from django.apps import apps
    from django.db import connections

    from tasuki.django.fields import set_storage

    standalone.configure()
    alias = standalone.register_postgresql(connection_parameters(empty_url))
    with connections[alias].schema_editor() as editor:
        for model in apps.get_app_config("tasuki").get_models():
            if not model._meta.proxy:
                editor.create_model(model)
        set_storage(apps, editor)
    connections[alias].close()
    standalone.forget(alias)

    fresh, migrated = described(postgres, empty_url), described(postgres, url)

    migrated["s"] = [row for row in migrated["s"] if row[0] != standalone.MIGRATING_TABLE]
    assert fresh == migrated


def test_indexes_are_built_while_others_write(postgres: PostgresService, empty_url: str) -> None:
    """A transaction that lasts holds the migration up; nobody who writes meanwhile waits for the migration."""
    from django.db import connections
    from django.db.migrations.executor import MigrationExecutor

    standalone.configure()
    alias = standalone.register_postgresql(connection_parameters(empty_url))
    MigrationExecutor(connections[alias]).migrate([("tasuki", "0008_definitions")])
    connections[alias].close()
    write = "UPDATE tasuki_jobrun SET version = version; INSERT INTO tasuki_event (event_type, created_at) VALUES ('x', 0)"
    waits = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'CREATE INDEX CONCURRENTLY%' AND wait_event_type = 'Lock'"

    def migrate() -> None:
        try:
            standalone.migrate(alias)
        finally:
            connections[alias].close()

    with postgres.connect(empty_url) as lasting, ThreadPoolExecutor(1) as threads:
        with lasting.transaction():
            lasting.execute(write)
            migrated = threads.submit(migrate)
            until(lambda: postgres.execute(waits, url=empty_url), 20.0, "the migration waits")
            postgres.execute(f"SET lock_timeout = '5s'; {write}", url=empty_url)
            assert not migrated.done()
        migrated.result(20.0)
    standalone.forget(alias)

    assert postgres.execute("SELECT count(*) FROM pg_index WHERE NOT indisvalid", url=empty_url) == [(0,)]


def test_an_open_of_tables_that_are_up_to_date_changes_nothing(postgres: PostgresService, url: str) -> None:
    before = described(postgres, url)

    SqlStore.open_postgresql(url).close()

    assert described(postgres, url) == before
    assert postgres.execute("SELECT version, oldest_code FROM tasuki_schema", url=url) == [
        (standalone.SCHEMA_VERSION, standalone.OLDEST_CODE)
    ]


def test_tables_of_a_newer_tasuki_that_this_one_cannot_read_are_refused(postgres: PostgresService, url: str) -> None:
    newer = standalone.SCHEMA_VERSION + 2
    postgres.execute("UPDATE tasuki_schema SET version = %s, oldest_code = %s", (newer, newer), url=url)

    with pytest.raises(ConfigError, match=r"made for a newer tasuki .*upgrade this one"):
        SqlStore.open_postgresql(url)


def test_tables_of_a_newer_tasuki_that_this_one_can_read_are_used_and_stay_as_they_are(
    postgres: PostgresService, url: str
) -> None:
    newer = standalone.SCHEMA_VERSION + 2
    postgres.execute("UPDATE tasuki_schema SET version = %s", (newer,), url=url)
    postgres.execute("ALTER TABLE tasuki_jobrun ADD COLUMN something_new integer DEFAULT 0", url=url)

    store = SqlStore.open_postgresql(url)

    assert store.counts() == {}
    store.close()
    assert postgres.execute("SELECT version FROM tasuki_schema", url=url) == [(newer,)]


def test_a_migration_that_a_live_server_could_not_live_with_is_refused_and_names_it(
    postgres: PostgresService, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = standalone.SCHEMA_VERSION + 1
    monkeypatch.setattr(standalone, "SCHEMA_VERSION", newer)
    monkeypatch.setattr(standalone, "OLDEST_CODE", newer)
    forget_migrations(postgres, url)
    add_server(postgres, url, "server-old", schema_version=newer - 1)
    add_server(postgres, url, "server-new", schema_version=newer)
    add_server(postgres, url, "server-gone", schema_version=1, beat_s_ago=standalone.MEMBER_ALIVE_S + 5)
    before = described(postgres, url)

    with pytest.raises(ConfigError, match=rf"server-old \(version {newer - 1}\); stop them first") as caught:
        SqlStore.open_postgresql(url)

    assert "server-new" not in str(caught.value)
    assert "server-gone" not in str(caught.value)
    assert described(postgres, url) == before


def test_the_upgrade_across_the_tables_of_caches_is_no_rolling_one(postgres: PostgresService, url: str, alias: str) -> None:
    before_caches = standalone.OLDEST_CODE - 1
    forget_migrations(postgres, url)
    add_server(postgres, url, "server-old", schema_version=before_caches)

    with pytest.raises(ConfigError, match=rf"server-old \(version {before_caches}\); stop them first"):
        standalone.migrate(alias)


def test_a_migration_that_older_servers_can_live_with_runs_while_they_are_up(
    postgres: PostgresService, url: str, alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_server(postgres, url, "server-old", schema_version=standalone.SCHEMA_VERSION)
    running = SqlStore.open_postgresql(url)
    monkeypatch.setattr(standalone, "SCHEMA_VERSION", standalone.SCHEMA_VERSION + 1)
    plan = [(SimpleNamespace(name="0002_a_new_column"), False)]

    class Executor:
        def __init__(self, connection: Any) -> None:
            self.connection = connection

        def migrate(self, _targets: object, _plan: object) -> None:
            with self.connection.cursor() as cursor:
                cursor.execute("ALTER TABLE tasuki_jobrun ADD COLUMN a_new_column integer DEFAULT 0")

    monkeypatch.setattr(standalone, "_plan", lambda connection: (Executor(connection), [], plan))

    assert standalone.migrate(alias) == ["0002_a_new_column"]

    assert running.counts() == {}
    running.close()
    assert postgres.execute("SELECT version, oldest_code FROM tasuki_schema", url=url) == [
        (standalone.SCHEMA_VERSION, standalone.OLDEST_CODE)
    ]


def test_the_queue_is_vacuumed_by_the_number_of_its_dead_rows(postgres: PostgresService, url: str) -> None:
    [[options]] = postgres.execute("SELECT reloptions FROM pg_class WHERE relname = 'tasuki_jobrun'", url=url)

    assert "autovacuum_vacuum_scale_factor=0" in options
    assert "fillfactor=70" in options
