"""Plans of PostgreSQL for the statements: by index, whatever the size of the tables and however wrong their statistics are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tasuki.core.store_messages import LeaseRequest
from tasuki.stores.sql.store import SqlStore
from tests.stores import sql_statements
from tests.stores.sql_statements import POSTGRES_STATEMENTS
from tests.stores.steps import connection_of
from tests.support.postgres_service import PostgresService

ALL = {name: statement for name, statement in POSTGRES_STATEMENTS.items() if not statement.text.startswith("LOCK ")}
"""Statements that have a plan."""
ROWS = 100_000
OF_THE_READY = (
    "band_above", "groups_above", "subjects_above", "ready_below", "claim_of_queue", "next_of_queues", "head_of_queue",
)  # fmt: skip
INDEX_OF = {**sql_statements.INDEX_OF, **dict.fromkeys(OF_THE_READY, "tasuki_job_ready")}
HOT = [
    "submit_plain", "submit_full", "band", "groups", "subjects", "queues", "execs", "band_above", "groups_above",
    "subjects_above", "ready_below", "claim_of_queue", "next_of_queues", "start", "renew", "release", "finish_plain",
    "finish_full", "settle", "resume", "leases_over", "late", "delayed_due", "promote", "next_lease_over", "next_delayed",
    "old", "count", "mark",
]  # fmt: skip

MEANT_WHOLE = {
    "counts": {"tasuki_counter"},  # some rows for each group; there is no order in which to look
    "waiting_over": {"tasuki_definitionstate"},  # a row for each definition
    "next_of_nothing": {"tasuki_definitionstate"},
    "runs_ahead": {"tasuki_definitionstate"},
}

# A tenth of the jobs is ready, a few are leased or delayed, the rest is history.
FILL = f"""
    INSERT INTO tasuki_jobrun (idempotency_key, created_at, "group", subject, submitter, body_hash, spec, state, ready, attempt,
                               lease_id, assigned_worker_id, lease_expires_at, not_before, finished_at)
    SELECT 'job-' || n, n, 'render', 'render.' || n % 7, 'alice', '', '',
           CASE WHEN n % 10 = 0 THEN 'PENDING' WHEN n % 1000 = 1 THEN 'RUNNING' ELSE 'SUCCEEDED' END,
           CASE WHEN n % 10 = 0 THEN 1 ELSE 0 END, 1, '', 'w1',
           CASE WHEN n % 1000 = 1 THEN 1e12 END, NULL, CASE WHEN n % 10 <> 0 AND n % 1000 <> 1 THEN n END
    FROM generate_series(1, {ROWS}) AS n"""


@pytest.fixture(scope="module", params=["never analysed", "analysed when empty", "analysed now", "analysed when all was ready"])
def store(postgres: PostgresService, request: pytest.FixtureRequest) -> Iterator[SqlStore]:
    """However right or wrong the planner's idea of the tables is: nobody puts it right."""
    url = postgres.database()
    postgres.execute("ALTER TABLE tasuki_jobrun SET (autovacuum_enabled = off)", url=url)
    if request.param == "analysed when empty":
        postgres.execute("ANALYZE", url=url)
    postgres.execute(FILL, url=url)
    if request.param == "analysed now":
        postgres.execute("ANALYZE", url=url)
    if request.param == "analysed when all was ready":
        postgres.execute("UPDATE tasuki_jobrun SET ready = 1", url=url)
        postgres.execute("ANALYZE", url=url)
        postgres.execute("UPDATE tasuki_jobrun SET ready = 0 WHERE state <> 'PENDING'", url=url)
    store = SqlStore.open_postgresql(url)
    yield store
    store.close()
    postgres.drop(url)


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", ()):
        yield from nodes(part)


def plan_of(store: SqlStore, name: str) -> list[dict[str, Any]]:
    connection = connection_of(store)
    if connection.info.server_version < 160_000:
        pytest.skip("EXPLAIN (GENERIC_PLAN) came with PostgreSQL 16")
    found = connection.pgconn.exec_(f"EXPLAIN (GENERIC_PLAN, FORMAT JSON) {ALL[name].text}".encode())
    assert found.get_value(0, 0) is not None, found.error_message
    return list(nodes(json.loads(found.get_value(0, 0))[0]["Plan"]))


@pytest.mark.parametrize("name", sorted(ALL))
def test_no_statement_reads_a_whole_table(store: SqlStore, name: str) -> None:
    steps = plan_of(store, name)

    scanned = {step["Relation Name"] for step in steps if step["Node Type"] == "Seq Scan"}
    assert scanned <= MEANT_WHOLE.get(name, set())
    # An index of all jobs that is read from end to end is no look-up either.
    large = ("tasuki_jobrun_pkey", "tasuki_jobrun_idempotency_key", "tasuki_job_ready")
    whole = [step for step in steps if step.get("Index Name", "").startswith(large) and not step.get("Index Cond")]
    assert name == "id_range" or [step["Index Name"] for step in whole] == []  # that one takes an entry at each end


@pytest.mark.parametrize(("name", "index"), sorted(INDEX_OF.items()))
def test_the_living_are_found_by_their_partial_index(store: SqlStore, name: str, index: str) -> None:
    assert index in {step.get("Index Name") for step in plan_of(store, name)}


@pytest.mark.parametrize("name", sorted(set(ALL) - set(INDEX_OF)))
def test_rows_that_are_named_are_found_by_their_names(store: SqlStore, name: str) -> None:
    used = {step.get("Index Name", "") for step in plan_of(store, name)}

    assert not {index for index in used if index.startswith("tasuki_job_")}


@pytest.mark.parametrize("name", HOT)
def test_no_hot_statement_sorts_or_hashes(store: SqlStore, name: str) -> None:
    kinds = {step["Node Type"] for step in plan_of(store, name)}

    # An incremental sort puts those of the very same time in the order of their ids, no more.
    timed = {"Incremental Sort"} if name not in ("leases_over", "late", "delayed_due") else set()
    assert not kinds & ({"Sort", "Hash", "Hash Join", "Merge Join", "Materialize"} | timed)


def test_every_parameter_says_its_type() -> None:
    # The values of `enqueue_one` are literals in its text, whose types the function says.
    assert [name for name, statement in ALL.items() if None in statement.kinds] == ["enqueue_one"]


def test_what_a_lease_costs_does_not_depend_on_the_length_of_the_queue(postgres: PostgresService) -> None:
    touched = {}
    for ready in (500, 20_000):
        url = postgres.database()
        store = SqlStore.open_postgresql(url)
        connection_of(store).execute(
            'INSERT INTO tasuki_jobrun (idempotency_key, created_at, "group", subject, submitter, body_hash, spec) '
            "SELECT 'job-' || n, n, 'g' || mod(n, 3), 'g' || mod(n, 3) || '.' || mod(n, 5), 'alice', '', '' "
            "FROM generate_series(1, %s) AS n",
            (ready,),
        )
        touched[ready] = rows_touched_by_a_lease(store, 32)
        store.close()
        postgres.drop(url)

    assert touched[20_000] <= touched[500] * 1.2


def rows_touched_by_a_lease(store: SqlStore, limit: int) -> int:
    """The number of rows of jobs that one lease looks at."""
    request = LeaseRequest(worker_id="w1", incarnation="1", patterns=(">",), limit=limit)
    statement = "SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = 'tasuki_jobrun'"
    with store.turn():
        assert len(store.lease([request])[0]) == limit
        [touched] = connection_of(store).execute(statement).fetchone()
    return int(touched)


def test_names_are_sorted_by_their_bytes(store: SqlStore) -> None:
    statement = """
        SELECT attname, collname FROM pg_attribute JOIN pg_collation ON pg_collation.oid = attcollation
        WHERE attrelid = 'tasuki_jobrun'::regclass AND attname IN ('group', 'subject', 'idempotency_key', 'array_id')"""

    assert {collation for _, collation in connection_of(store).execute(statement).fetchall()} == {"C"}


def test_a_job_stands_in_no_index_that_nothing_needs(store: SqlStore) -> None:
    statement = "SELECT indexname FROM pg_indexes WHERE tablename = 'tasuki_jobrun'"
    names = {name for (name,) in connection_of(store).execute(statement).fetchall()}

    partial = {name for name in names if name.startswith("tasuki_job_")}
    assert len(names - partial) == 2, names  # the primary key, and the unique key on job_id
