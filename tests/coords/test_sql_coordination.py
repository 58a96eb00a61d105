"""Coordination as only a real PostgreSQL shows it: many who ask at once, lost connections, timeouts, errors that keep secrets."""

import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tasuki.coords.coordination import FORGET_AFTER_S, FORGET_BATCH, ClusterMember
from tasuki.coords.sql import SqlCoordination
from tasuki.core.election import LOCK_TTL_MAX_S, Locked
from tasuki.errors import ConfigError, TasukiError, Unavailable
from tasuki.server.assembly import open_postgresql_reader
from tests.coords.contests import (
    SERVERS,
    TTL_S,
    acquire_together,
    it_ends_by_itself,
    never_two_hold_it_and_epochs_strictly_rise,
    one_of_many_gets_it,
)
from tests.support.postgres_service import PASSWORD, PostgresService
from tests.support.waiting import until

ME = ClusterMember(member_id="me", incarnation="1")
OURS = "datname = current_database() AND application_name = 'tasuki'"

Open = Callable[..., SqlCoordination]


@pytest.fixture
def open_coordination(postgres_url: str) -> Iterator[Open]:
    opened: list[SqlCoordination] = []

    def open_one(url: str = postgres_url, **options: float) -> SqlCoordination:
        opened.append(SqlCoordination(url, **options))
        return opened[-1]

    yield open_one
    for coordination in opened:
        coordination.close()


def told(error: BaseException) -> str:
    """All that a log could show of an error, its causes too."""
    return "".join(traceback.format_exception(error))


def test_a_reader_can_share_its_connection_and_outlives_the_loss_of_it(
    open_coordination: Open, postgres: PostgresService, postgres_url: str
) -> None:
    coordination = open_coordination()
    reader = open_postgresql_reader(postgres_url, coordination)

    def beat_and_read() -> tuple[tuple[int, str], int]:
        coordination.beat(ME, seen={})
        connections = postgres.execute(f"SELECT pid FROM pg_stat_activity WHERE {OURS}", url=postgres_url)
        return reader.epoch(), len(connections)

    before = beat_and_read()
    postgres.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {OURS}", url=postgres_url)
    with pytest.raises(Unavailable):
        coordination.beat(ME, seen={})
    after = beat_and_read()
    reader.close()

    assert before == after == ((0, ""), 1)
    coordination.beat(ME, seen={})  # the reader has not closed what is not its own


# ------------------------------------------------------------------------------------------------------ many at once
def test_of_many_that_ask_at_once_for_a_new_lock_one_gets_it(open_coordination: Open) -> None:
    one_of_many_gets_it(open_coordination)


def test_of_many_that_ask_at_once_for_a_lock_that_is_over_one_gets_it(
    open_coordination: Open, postgres: PostgresService, postgres_url: str
) -> None:
    open_coordination().acquire("leader", "dead", TTL_S, 0)
    postgres.execute("UPDATE tasuki_scopelease SET expires_at = expires_at - 100", url=postgres_url)

    answers = acquire_together([open_coordination() for _ in range(SERVERS)], floor=0)

    assert [answer for answer in answers if isinstance(answer, Locked)] == [Locked(2)]


def test_many_that_take_turns_never_hold_the_lock_together_and_epochs_strictly_rise(open_coordination: Open) -> None:
    never_two_hold_it_and_epochs_strictly_rise(open_coordination)


def test_a_lock_ends_on_the_database_s_clock(open_coordination: Open) -> None:
    it_ends_by_itself(open_coordination)


def test_many_beats_at_once_remove_the_dead_together(
    open_coordination: Open, postgres: PostgresService, postgres_url: str
) -> None:
    postgres.execute(
        "INSERT INTO tasuki_member (member_id, kind, incarnation, schema_version, version, info, beat_at) "
        "SELECT 'dead-' || n, 'server', '1', 0, 0, '', extract(epoch FROM clock_timestamp()) - %s FROM generate_series(1, %s) n",
        (FORGET_AFTER_S + 1, 2 * FORGET_BATCH + 1),
        url=postgres_url,
    )

    def beat(number: int) -> None:
        coordination = open_coordination()
        for _ in range(3):
            coordination.beat(ClusterMember(member_id=f"server-{number}", incarnation="1"), seen={})

    with ThreadPoolExecutor(SERVERS) as pool:
        list(pool.map(beat, range(SERVERS)))

    assert postgres.execute("SELECT count(*) FROM tasuki_member", url=postgres_url) == [(SERVERS,)]


def test_one_beat_removes_only_a_batch_of_the_dead(open_coordination: Open, postgres: PostgresService, postgres_url: str) -> None:
    postgres.execute(
        "INSERT INTO tasuki_member (member_id, kind, incarnation, schema_version, version, info, beat_at) "
        "SELECT 'dead-' || n, 'server', '1', 0, 0, '', 0 FROM generate_series(1, %s) n",
        (FORGET_BATCH + 5,),
        url=postgres_url,
    )

    open_coordination().beat(ME, seen={})

    assert postgres.execute("SELECT count(*) FROM tasuki_member WHERE beat_at = 0", url=postgres_url) == [(5,)]


def test_threads_may_share_one_object(open_coordination: Open) -> None:
    shared = open_coordination()

    with ThreadPoolExecutor(SERVERS) as pool:
        answers = list(pool.map(lambda number: shared.acquire("leader", f"server-{number}", TTL_S, 0), range(4 * SERVERS)))

    assert [answer for answer in answers if isinstance(answer, Locked)] == [Locked(1)]


# ---------------------------------------------------------------------------------------------------------- trouble
def test_after_a_lost_connection_one_call_fails_and_the_next_connects_anew(
    open_coordination: Open, postgres: PostgresService, postgres_url: str
) -> None:
    coordination = open_coordination()
    coordination.beat(ME, seen={})
    postgres.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {OURS}", url=postgres_url)

    with pytest.raises(Unavailable):
        coordination.beat(ME, seen={})

    assert [live.member_id for live in coordination.beat(ME, seen={}).members] == ["me"]


def test_a_lock_that_somebody_sits_on_is_given_up_before_half_its_ttl(
    open_coordination: Open, postgres: PostgresService, postgres_url: str
) -> None:
    coordination = open_coordination(ttl_s=LOCK_TTL_MAX_S)
    coordination.acquire("leader", "one", 2.0, 0)
    coordination.set_lock_ttl(2.0)
    with postgres.connect(postgres_url) as other:
        other.execute("BEGIN")
        other.execute("SELECT 1 FROM tasuki_scopelease FOR UPDATE")
        begun_at = time.monotonic()

        with pytest.raises(Unavailable):
            coordination.renew("leader", "one", 1, 2.0)

        assert time.monotonic() - begun_at < 1.0
    assert coordination.detached() == frozenset()


def test_a_database_that_is_away_is_unavailable_until_it_is_back(open_coordination: Open) -> None:
    with PostgresService() as postgres:
        coordination = open_coordination(postgres.database())
        coordination.acquire("leader", "one", LOCK_TTL_MAX_S, 0)
        postgres.stop()
        for _ in range(2):
            with pytest.raises(Unavailable) as raised:
                coordination.renew("leader", "one", 1, TTL_S)
            assert PASSWORD not in told(raised.value)

        postgres.start()

        assert coordination.renew("leader", "one", 1, TTL_S)


def test_closing_does_not_wait_for_a_call_that_hangs(
    open_coordination: Open, postgres: PostgresService, postgres_url: str
) -> None:
    coordination = open_coordination(ttl_s=LOCK_TTL_MAX_S)
    coordination.acquire("leader", "one", TTL_S, 0)
    with postgres.connect(postgres_url) as other, ThreadPoolExecutor(1) as pool:
        other.execute("BEGIN")
        other.execute("SELECT 1 FROM tasuki_scopelease FOR UPDATE")
        hanging = pool.submit(coordination.renew, "leader", "one", 1, TTL_S)
        waits = f"SELECT count(*) FROM pg_stat_activity WHERE {OURS} AND wait_event_type = 'Lock'"
        until(lambda: postgres.execute(waits, url=postgres_url) == [(1,)], what="the renewal hangs")

        coordination.close()

        assert not hanging.done()
        other.execute("ROLLBACK")


def test_a_database_without_the_tables_says_what_to_do(open_coordination: Open, postgres: PostgresService) -> None:
    url = postgres.empty_database()

    with pytest.raises(ConfigError, match="tasuki migrate"):
        open_coordination(url).beat(ME, seen={})


@pytest.mark.parametrize(
    "broken",
    [
        lambda url: url.replace("://", "://wrong-"),
        lambda url: url.rpartition("/")[0] + "/no-such-database",
        lambda url: url.replace("127.0.0.1", "127.0.0.1:x"),
        lambda url: url.replace("127.0.0.1", "[127.0.0.1"),
        lambda url: url + "?no_such_option=1",
        lambda url: url.replace("postgresql://", "postgresql:/"),
        lambda url: "password=" + PASSWORD + " host",
    ],
)
def test_no_error_contains_the_password(postgres_url: str, broken: Callable[[str], str]) -> None:
    with pytest.raises(TasukiError) as raised:
        SqlCoordination(broken(postgres_url)).beat(ME, seen={})

    assert PASSWORD not in told(raised.value)


def test_what_was_closed_stays_closed(open_coordination: Open) -> None:
    coordination = open_coordination()
    coordination.detached()

    coordination.close()

    with pytest.raises(Unavailable, match="closed"):
        coordination.detached()


def test_neither_django_nor_psycopg_is_loaded_before_it_is_needed() -> None:
    code = "import sys, tasuki.coords.sql; print([name for name in ('django', 'psycopg') if name in sys.modules])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout.strip() == "[]"
