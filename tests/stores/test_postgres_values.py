"""Values on their way to PostgreSQL: what is sent comes back, and every statement has one form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasuki.stores.sql.postgres_session import KINDS, register, statement_of
from tests.support.postgres_service import PostgresService

numbers = st.integers(-(2**63), 2**63 - 1)
texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "smallint": st.integers(-(2**15), 2**15 - 1),
    "integer": st.integers(-(2**31), 2**31 - 1),
    "bigint": numbers,
    "float8": st.floats(allow_nan=False),
    "text": texts,
    "bytea": st.binary(),
}


@pytest.fixture(scope="module")
def cursor(postgres: PostgresService) -> Iterator[psycopg.RawCursor[Any]]:
    with postgres.connect() as connection:
        cursor: psycopg.RawCursor[Any] = psycopg.RawCursor(connection)
        register(cursor.adapters)
        yield cursor


def echoed(cursor: psycopg.RawCursor[Any], name: str, value: Any) -> Any:
    cursor.execute(f"SELECT $1::{name}", [KINDS[name](value)], binary=True)
    [[answer]] = cursor.fetchall()
    return answer


@pytest.mark.parametrize("name", VALUES)
@settings(max_examples=40)
@given(st.data())
def test_what_is_sent_comes_back(cursor: psycopg.RawCursor[Any], name: str, data: st.DataObject) -> None:
    value = data.draw(VALUES[name] | st.none())
    values = data.draw(st.lists(VALUES[name] | st.none(), max_size=5))

    assert echoed(cursor, name, value) == value
    assert echoed(cursor, f"{name}[]", values) == values


def test_a_nul_is_replaced_where_postgresql_would_refuse_it(cursor: psycopg.RawCursor[Any]) -> None:
    assert echoed(cursor, "text", "a\0b") == "a\ufffdb"
    assert echoed(cursor, "text[]", ["\0", None]) == ["\ufffd", None]


def test_a_statement_knows_its_parameters_by_name_and_type() -> None:
    statement = statement_of("UPDATE t SET a = :first::text WHERE b = :second::bigint AND c = :first")

    assert statement.text == "UPDATE t SET a = $1::text WHERE b = $2::bigint AND c = $1"
    assert statement.names == ("first", "second")
    assert statement.kinds == (KINDS["text"], KINDS["bigint"])
    assert [value.data for value in statement.values({"second": 1, "first": "x"})] == [b"x", b"\0\0\0\0\0\0\0\1"]


@pytest.mark.parametrize(
    ("text", "writes"), [("SELECT 1", False), ("SELECT a FROM t FOR UPDATE", True), ("WITH x AS (DELETE FROM t) SELECT 1", True)]
)
def test_a_statement_knows_whether_it_writes_or_locks(text: str, writes: bool) -> None:
    assert statement_of(text).writes is writes
