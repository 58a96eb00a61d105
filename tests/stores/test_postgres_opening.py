"""Opening a PostgreSQL: what is refused and in which words, what the session is set to, and that secrets stay secret."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from tasuki.core.election import LOCK_TTL_S
from tasuki.core.store_messages import Filter, LeaseRequest
from tasuki.errors import ConfigError, TurnInterrupted, Unavailable
from tasuki.stores.sql import postgres as postgres_module
from tasuki.stores.sql.postgres import check_server, clear_text_problem
from tasuki.stores.sql.store import SqlStore
from tasuki.stores.store import Feature
from tests.stores.steps import connection_of, submission
from tests.support.postgres_service import PostgresService
from tests.support.waiting import until


def shown(store: SqlStore, name: str) -> str:
    [value] = connection_of(store).execute(f"SHOW {name}").fetchone()
    return str(value)


@pytest.fixture
def store(postgres_url: str) -> Iterator[SqlStore]:
    store = SqlStore.open_postgresql(postgres_url)
    yield store
    store.close()


# -- what is refused ----------------------------------------------------------------------------------------------


def test_a_wrong_password_is_a_setting_that_cannot_work_and_is_not_repeated(postgres_url: str) -> None:
    wrong = postgres_url.replace(PostgresService.password, "a-wrong-secret")

    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:\d+, database 'test_.*password authentication failed") as caught:
        SqlStore.open_postgresql(wrong)

    assert "a-wrong-secret" not in str(caught.value)


def test_a_database_that_does_not_exist_is_named(postgres: PostgresService) -> None:
    with pytest.raises(ConfigError, match=r"database 'nowhere'.*does not exist"):
        SqlStore.open_postgresql(postgres.url("nowhere"))


def test_a_server_that_is_not_there_is_unavailable_and_named(postgres: PostgresService) -> None:
    url = postgres.url("some").replace(f":{postgres.port}/", ":1/")

    with pytest.raises(Unavailable, match=r"PostgreSQL at 127\.0\.0\.1:1, database 'some' cannot be reached") as caught:
        SqlStore.open_postgresql(url)

    assert postgres.password not in str(caught.value)


@pytest.mark.parametrize("url", ["postgresql://u:my-secret@/db?nonsense=1", "my-secret is here"])
def test_an_address_that_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="postgresql://user@host:5432/database") as caught:
        SqlStore.open_postgresql(url)

    assert "my-secret" not in str(caught.value)


def test_an_address_without_a_database_is_refused(postgres: PostgresService) -> None:
    with pytest.raises(ConfigError, match="name the database"):
        SqlStore.open_postgresql(postgres.url(""))


def test_another_encoding_than_utf8_is_refused(postgres: PostgresService) -> None:
    url = postgres.empty_database(template="template0", encoding="LATIN1")

    with pytest.raises(ConfigError, match=r"encoded in LATIN1.*ENCODING 'UTF8'"):
        SqlStore.open_postgresql(url)

    postgres.drop(url)


def test_a_server_that_is_too_old_is_refused(postgres_url: str) -> None:
    class Info:
        server_version = 120_022

    class Old:
        info = Info()

    with pytest.raises(ConfigError, match=r"version 12.* needs 13 or newer"):
        check_server(Old(), "PostgreSQL at somewhere")  # type: ignore[arg-type]


def test_a_role_that_may_not_write_is_refused(postgres: PostgresService, postgres_url: str) -> None:
    name = urlsplit(postgres_url).path.lstrip("/")
    postgres.execute("CREATE ROLE onlooker LOGIN PASSWORD 'looks-only'")
    postgres.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO onlooker", url=postgres_url)
    try:
        with pytest.raises(ConfigError, match="user 'onlooker' may not INSERT, UPDATE, DELETE"):
            SqlStore.open_postgresql(f"postgresql://onlooker:looks-only@127.0.0.1:{postgres.port}/{name}")
    finally:
        postgres.execute("DROP OWNED BY onlooker", url=postgres_url)
        postgres.execute("DROP ROLE onlooker")


def test_a_role_that_may_not_make_tables_is_told_so(postgres: PostgresService) -> None:
    url = postgres.empty_database()
    postgres.execute("CREATE ROLE guest LOGIN PASSWORD 'makes-nothing'")
    try:
        with pytest.raises(ConfigError, match="permission denied"):
            SqlStore.open_postgresql(url.replace(f"{postgres.user}:{postgres.password}", "guest:makes-nothing"))
    finally:
        postgres.execute("DROP ROLE guest")
        postgres.drop(url)


@pytest.mark.parametrize("setting", ["synchronous_commit"])
def test_settings_that_can_lose_acknowledged_jobs_are_warned_of(
    postgres: PostgresService, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = postgres.database()
    postgres.execute(f"ALTER DATABASE {urlsplit(url).path.lstrip('/')} SET {setting} = off")

    with caplog.at_level(logging.WARNING, logger="tasuki.store"):
        SqlStore.open_postgresql(url).close()

    assert f"{setting} off" in caplog.text
    assert postgres.password not in caplog.text
    postgres.drop(url)


def test_nothing_is_left_open_after_a_refusal(postgres: PostgresService) -> None:
    url = postgres.empty_database(template="template0", encoding="LATIN1")
    with pytest.raises(ConfigError):
        SqlStore.open_postgresql(url)

    name, connected = urlsplit(url).path.lstrip("/"), "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"
    until(lambda: postgres.execute(connected, (name,)) == [(0,)], what="its process at the server has ended")
    postgres.drop(url)


# -- how to get in ------------------------------------------------------------------------------------------------


def test_a_password_file_works(postgres: PostgresService, postgres_url: str, tmp_path: Path) -> None:
    passfile = tmp_path / "pgpass"
    passfile.write_text(f"*:*:*:{postgres.user}:{postgres.password}\n")
    passfile.chmod(0o600)
    name = urlsplit(postgres_url).path

    store = SqlStore.open_postgresql(f"postgresql://{postgres.user}@127.0.0.1:{postgres.port}{name}?passfile={passfile}")

    assert store.counts() == {}
    store.close()


def test_a_service_file_works(
    postgres: PostgresService, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = urlsplit(postgres_url).path.lstrip("/")
    lines = ["[jobs]", "host=127.0.0.1", f"port={postgres.port}", f"user={postgres.user}", f"dbname={name}"]
    (tmp_path / "services").write_text("\n".join([*lines, f"password={postgres.password}", ""]))
    monkeypatch.setenv("PGSERVICEFILE", os.fspath(tmp_path / "services"))

    store = SqlStore.open_postgresql("service=jobs")
    reader = store.reader()

    assert reader.counts() == store.counts() == {}
    reader.close()
    store.close()


# -- the session --------------------------------------------------------------------------------------------------


def test_no_transaction_of_ours_can_hang_for_half_the_leaders_lock(store: SqlStore) -> None:
    for name in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
        [milliseconds] = connection_of(store).execute(f"SELECT setting::int FROM pg_settings WHERE name = '{name}'").fetchone()
        assert 0 < milliseconds < LOCK_TTL_S / 2 * 1000


def test_the_session_is_set_for_look_ups(store: SqlStore) -> None:
    found = {name: shown(store, name) for name in ("jit", "enable_seqscan", "plan_cache_mode")}

    assert found == {"jit": "off", "enable_seqscan": "off", "plan_cache_mode": "force_generic_plan"}
    assert shown(store, "application_name") == "tasuki"


def test_a_database_with_another_isolation_by_default_is_worked_on_all_the_same(postgres: PostgresService) -> None:
    url = postgres.database()
    postgres.execute(f"ALTER DATABASE {urlsplit(url).path.lstrip('/')} SET default_transaction_isolation = 'serializable'")
    store = SqlStore.open_postgresql(url)

    with store.turn():
        assert shown(store, "transaction_isolation") == "read committed"

    store.close()
    postgres.drop(url)


def test_the_settings_are_there_again_after_a_reconnect(postgres: PostgresService, store: SqlStore) -> None:
    postgres.execute("SELECT pg_terminate_backend(%s, 5000)", (connection_of(store).info.backend_pid,))
    with pytest.raises(TurnInterrupted):
        store.submit([submission("a")])

    store.submit([submission("a")])

    assert shown(store, "jit") == "off"


def test_a_dead_peer_is_noticed_in_seconds(postgres_url: str) -> None:
    store = SqlStore.open_postgresql(postgres_url.partition("?")[0])
    given = connection_of(store).info.get_parameters()
    store.close()

    assert given["keepalives_idle"] == "5"
    assert int(given["tcp_user_timeout"]) <= 4000
    assert int(given["connect_timeout"]) <= 2


def test_it_says_what_it_can(store: SqlStore) -> None:
    assert store.features == {Feature.FIND_TEXT, Feature.DURABLE, Feature.SHARED, Feature.DEFINITIONS}


def test_a_reader_cannot_write(store: SqlStore) -> None:
    reader = store.reader()

    with pytest.raises(Unavailable, match="read-only"):
        reader._select("revoke_token", ("a", 0.0, "x"))

    reader.close()


def test_a_reader_sees_what_was_committed_and_no_more(store: SqlStore) -> None:
    store.submit([submission("a")])
    reader = store.reader()

    with store.turn():
        store.submit([submission("unfinished")])
        during = [job.job_id for job in reader.find(Filter()).jobs]

    assert during == ["a"]
    assert [job.job_id for job in reader.find(Filter()).jobs] == ["unfinished", "a"]
    reader.close()


def test_closing_leaves_no_connection_and_no_mark(postgres: PostgresService, postgres_url: str) -> None:
    store = SqlStore.open_postgresql(postgres_url)
    store.submit([submission("a")])
    store.close()
    store.close()

    assert postgres.execute("SELECT count(*) FROM tasuki_turnmark", url=postgres_url) == [(0,)]
    with pytest.raises(Unavailable, match="closed"):
        store.counts()


# -- time ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata"])
def test_time_is_the_databases_whatever_its_time_zone(postgres: PostgresService, zone: str) -> None:
    url = postgres.database()
    postgres.execute(f"ALTER DATABASE {urlsplit(url).path.lstrip('/')} SET timezone = '{zone}'")
    store = SqlStore.open_postgresql(url)

    with store.turn():
        at = store.clock.wall()
        assert store.clock.lease() == at
        store.submit([submission("later", not_before=at + 3600), submission("now", not_before=at - 1)])
        [grants] = store.lease([LeaseRequest(worker_id="w", incarnation="1", patterns=(">",), limit=5)])

    assert abs(at - time.time()) < 5  # the same machine
    assert [grant.job_id for grant in grants] == ["now"]
    store.close()
    postgres.drop(url)


def test_in_a_turn_the_clock_stands_and_between_turns_it_goes_on(store: SqlStore) -> None:
    with store.turn():
        first = store.clock.lease()
        store.submit([submission("a")])
        assert store.clock.lease() == first

    later = store.clock.lease()
    assert later > first
    with store.turn():
        assert store.clock.lease() >= first


# -- names --------------------------------------------------------------------------------------------------------


def test_texts_longer_than_any_limit_do_not_break_a_turn(store: SqlStore) -> None:
    """SQLite has no limits, and checks are elsewhere: what slipped through them must not fail everybody's turn."""
    store.submit([submission("a", subject="x" * 300)])

    [job] = store.get(["a"])

    assert job is not None
    assert job.spec.subject == "x" * 300


def test_the_driver_is_the_compiled_one() -> None:
    assert psycopg.pq.__impl__ in ("binary", "c")


@pytest.mark.parametrize(
    ("host", "sslmode", "warns"),
    [
        ("db.example", "prefer", True),
        ("10.0.0.5", "disable", True),
        ("db.example", "verify-full", False),
        ("db.example", "require", False),
        ("127.0.0.1", "prefer", False),
        ("localhost", "prefer", False),
        ("::1", "prefer", False),
        ("/run/postgresql", "prefer", False),
        ("", "prefer", False),
    ],
)
def test_a_database_on_another_host_without_tls_is_warned_of(host: str, sslmode: str, warns: bool) -> None:
    problem = clear_text_problem(host, sslmode)
    assert bool(problem) is warns
    assert not warns or "sslmode=verify-full" in problem


def test_the_warning_is_about_the_host_and_the_sslmode_of_the_connection(
    postgres_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(postgres_module, "clear_text_problem", lambda *about: asked.append(about) or "a problem")
    SqlStore.open_postgresql(f"{postgres_url}{'&' if '?' in postgres_url else '?'}sslmode=allow").close()
    SqlStore.open_postgresql(postgres_url).close()
    assert asked == [("127.0.0.1", "allow"), ("127.0.0.1", "prefer")]
    assert caplog.text.count("a problem") == 2
