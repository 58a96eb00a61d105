"""Plans of SQLite for the statements: by the partial indexes, never by reading all jobs, whatever their number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasuki.stores.sql.database import load_statements
from tasuki.stores.sql.sqlite import CACHE_KIB
from tasuki.stores.sql.store import SqlStore
from tests.stores import sql_statements
from tests.stores.sql_statements import SQLITE as ALL

STATEMENTS = load_statements("sqlite")
INDEX_OF = {**sql_statements.INDEX_OF, **dict.fromkeys(("oldest_of_queue", "oldest_of_queues"), "tasuki_job_ready")}

HOT = [
    "submit_plain", "submit_full", "band", "groups", "subjects", "queues", "execs", "oldest_of_queue", "grant", "leased_groups",
    "finish_plain", "finish_full", "start", "renew", "release", "settle", "resume", "leases_over", "late", "delayed_due",
    "promote", "next_lease_over", "next_delayed", "old",
]  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqlStore]:
    store = SqlStore.open_sqlite(tmp_path_factory.mktemp("plans") / "tasuki.sqlite3")
    yield store
    store.close()


def asked(store: SqlStore, statement: str) -> list[tuple[Any, ...]]:
    """A statement of the test's own on the store's connection."""
    return store._database.connection.execute(statement).fetchall()


def plan(store: SqlStore, name: str) -> list[str]:
    statement = re.sub(r"\?\d*|:[a-z_]+", "1", ALL[name].replace("{and}", ""))
    return [row[3] for row in asked(store, f"EXPLAIN QUERY PLAN {statement}")]


@pytest.mark.parametrize("name", sorted(ALL))
def test_no_statement_reads_the_whole_table_of_jobs(store: SqlStore, name: str) -> None:
    aliases = ("tasuki_jobrun", "job", "head", "next")

    steps = plan(store, name)

    scans = [
        step for step in steps if step.split()[0] == "SCAN" and step.split()[1] in aliases and "INDEX tasuki_job" not in step
    ]
    # A recursion's own queue is called head too; scanning it is what a recursion does.
    assert [step for step in scans if name not in ("groups", "subjects", "queues", "execs") or "head" not in step] == []


@pytest.mark.parametrize(("name", "index"), sorted(INDEX_OF.items()))
def test_the_living_are_found_by_their_partial_index(store: SqlStore, name: str, index: str) -> None:
    assert any(index in step for step in plan(store, name)), plan(store, name)


@pytest.mark.parametrize("name", HOT)
def test_no_hot_statement_sorts(store: SqlStore, name: str) -> None:
    assert [step for step in plan(store, name) if "TEMP B-TREE" in step] == []


def test_the_plans_do_not_depend_on_statistics(store: SqlStore) -> None:
    assert asked(store, "SELECT name FROM sqlite_master WHERE name LIKE 'sqlite_stat%'") == []


def test_statements_exist_in_all_sizes_of_a_batch() -> None:
    assert {tuple(sizes) for sizes in STATEMENTS.many.values()} == {(1, 2, 4, 8, 16, 32, 64, 128, 256)}


def test_the_cache_leaves_room_below_the_servers_memory_limit(store: SqlStore, tmp_path: Path) -> None:
    assert asked(store, "PRAGMA cache_size") == [(-CACHE_KIB,)]
    assert CACHE_KIB * 1024 < 100_000_000
