"""Inside a Django project on PostgreSQL: our verbs are part of the user's transaction, and its session is left as it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest

from tasuki.django import standalone

standalone.configure()

from django.db import DataError, InternalError, connections, transaction  # noqa: E402
from django.db.models import Count  # noqa: E402
from django.test.utils import CaptureQueriesContext  # noqa: E402

from tasuki.core.job import JobSpec, Outcome, State, body_hash  # noqa: E402
from tasuki.core.statistics import GroupCounts  # noqa: E402
from tasuki.core.store_messages import LeaseRequest, Report, Submission, Submitted  # noqa: E402
from tasuki.core.subject import group_of  # noqa: E402
from tasuki.django.models import Counter, JobDefinition, JobRun, Token  # noqa: E402
from tasuki.errors import Conflict, StaleEpoch  # noqa: E402
from tasuki.stores.sql.postgres import connection_parameters  # noqa: E402
from tasuki.stores.sql.postgres_session import PostgresSession  # noqa: E402
from tasuki.stores.sql.store import SqlStore  # noqa: E402
from tests.support.postgres_service import PostgresService  # noqa: E402


def submission(job_id: str, subject: str = "mail.send", **fields: Any) -> Submission:
    spec = JobSpec(job_id=job_id, subject=subject, **fields)
    return Submission(spec, "alice", body_hash(spec))


def request(limit: int = 1) -> LeaseRequest:
    return LeaseRequest(worker_id="w1", incarnation="1", patterns=(">",), limit=limit)


@pytest.fixture
def alias(postgres_url: str) -> Iterator[str]:
    alias = standalone.register_postgresql(connection_parameters(postgres_url))
    yield alias
    connections[alias].close()
    standalone.forget(alias)


@pytest.fixture
def store(alias: str) -> SqlStore:
    return SqlStore.in_django(alias)


def users_row(alias: str, name: str) -> None:
    """Stands for any row of the project's own tables."""
    Token.objects.using(alias).create(token_id=name, kind="client", sha256=name)


def test_a_rolled_back_transaction_takes_the_job_with_it(alias: str, store: SqlStore) -> None:
    def stumble() -> None:
        with transaction.atomic(using=alias):
            users_row(alias, "order-1")
            store.submit([submission("a")])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stumble()

    assert store.get(["a"]) == [None]
    assert store.counts() == {}
    assert not Token.objects.using(alias).exists()


def test_others_see_the_job_when_the_users_transaction_is_committed(alias: str, store: SqlStore, postgres_url: str) -> None:
    server = SqlStore.open_postgresql(postgres_url)

    with transaction.atomic(using=alias):
        users_row(alias, "order-1")
        store.submit([submission("a")])
        during = server.lease([request()])

    [[grant]] = server.lease([request()])
    assert during == [[]]
    assert grant.job_id == "a"
    server.close()


def test_a_verb_that_fails_leaves_the_users_transaction_alone(alias: str, store: SqlStore) -> None:
    assert store.take_over("one", 1)

    with transaction.atomic(using=alias):
        users_row(alias, "order-1")
        with pytest.raises(StaleEpoch):
            store.reap(epoch=7)
        store.submit([submission("a")])

    assert Token.objects.using(alias).count() == 1
    assert store.counts()["mail"].pending == 1


def test_a_whole_life_works(store: SqlStore) -> None:
    store.submit([submission("a")])
    [[grant]] = store.lease([request()])
    [recorded] = store.finish([Report("a", "w1", grant.lease_id, 1, Outcome(result=b"done"))])

    [job] = store.get(["a"])
    assert recorded.state is State.SUCCEEDED
    assert job is not None
    assert job.outcome is not None
    assert job.outcome.result == b"done"


def test_the_projects_session_is_left_as_it_is_and_nothing_is_marked(alias: str, store: SqlStore, postgres_url: str) -> None:
    def settings() -> list[Any]:
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT name, setting FROM pg_settings WHERE source = 'session'")
            found: list[Any] = cursor.fetchall()
            return found

    before = settings()
    store.submit([submission("a")])

    assert settings() == before
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM tasuki_turnmark")
        assert cursor.fetchone() == (0,)


def test_a_reader_of_the_project_has_a_connection_of_its_own(store: SqlStore, postgres: PostgresService) -> None:
    store.submit([submission("a")])

    reader = store.reader()

    assert reader.counts()["mail"].pending == 1
    reader.close()


def test_the_time_of_a_change_of_a_definition_is_the_databases(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = SqlStore.in_django(alias).clock.wall()
    wrong_by_a_day = datetime.fromtimestamp(now - 86_400, UTC)
    monkeypatch.setattr("django.utils.timezone.now", lambda: wrong_by_a_day)
    row = JobDefinition(name="n", command_name="c", schedule_type="daily_at", schedule_value="02:30")
    row.save(using=alias)

    assert now <= row.changed_at.timestamp() < now + 60


# -- enqueue ----------------------------------------------------------------------------------------------------------

THREADS = 16


def recounted(alias: str) -> dict[str, int]:
    pending = JobRun.objects.using(alias).filter(state="PENDING")
    return {row["group"]: row["n"] for row in pending.values("group").annotate(n=Count("id"))}


def test_transactions_that_enqueue_never_wait_for_each_other(alias: str, store: SqlStore) -> None:
    all_have_enqueued = threading.Barrier(THREADS, timeout=20)

    def view(number: int) -> None:
        own = SqlStore.in_django(alias)
        queues = ("mail.send", "report.day") if number % 2 else ("report.day", "mail.send")
        try:
            with transaction.atomic(using=alias):
                with connections[alias].cursor() as cursor:
                    cursor.execute("SET LOCAL lock_timeout = '5s'")
                for subject in queues:
                    own.enqueue([submission(f"{subject}-{number}", subject)])
                own.cancel([f"{queues[0]}-{number}"], actor="alice")
                all_have_enqueued.wait()  # nobody commits before: whoever waits for another one waits for ever
        finally:
            connections[alias].close()

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(view, range(THREADS)))

    counts = store.counts()
    assert {group: counts[group].pending for group in counts} == {"mail": 8, "report": 8} == recounted(alias)
    assert counts["mail"].canceled == counts["report"].canceled == 8


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"]])
def test_enqueue_is_one_statement_without_a_savepoint(alias: str, store: SqlStore, names: list[str]) -> None:
    sent: list[str] = []

    class Watched(PostgresSession):
        def _run(self, statement: Any, parameters: Any) -> Any:
            sent.append(statement.text)
            return super()._run(statement, parameters)

        def _enqueue_one(self, job: Any) -> Any:
            sent.append(job[0])
            return super()._enqueue_one(job)

    with transaction.atomic(using=alias):
        store.enqueue([submission("the first of this connection")])
        connection = connections[alias].connection
        session = store._database._session = Watched(connection, prepare=False)
        assert session._has_enqueue_function  # asked once
        sent.clear()
        with CaptureQueriesContext(connections[alias]) as by_django:
            store.enqueue([submission(name, f"report.{name}") for name in names])

    assert len(sent) == 1
    assert list(by_django) == []
    assert [job is not None for job in store.get(names)] == [True] * len(names)


def test_enqueue_needs_no_function_where_tables_were_made_without_migrations(alias: str, store: SqlStore) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute("DROP FUNCTION tasuki_enqueue")

    assert store.enqueue([submission("a")]) == [Submitted("a", True)]
    [again] = store.enqueue([submission("a")])

    assert isinstance(again, Submitted)
    assert not again.created
    assert store.counts()["mail"].pending == 1


def test_what_was_enqueued_is_leased_run_and_counted_like_any_other_job(alias: str, store: SqlStore, postgres_url: str) -> None:
    server = SqlStore.open_postgresql(postgres_url)
    assert server.take_over("one", 1)
    store.enqueue([submission("a"), submission("b")])

    [[grant]] = server.lease([request()])
    server.finish([Report("a", "w1", grant.lease_id, 1, Outcome())])
    before = server.counts()["mail"]
    server.prune(before=0.0, epoch=1)  # folds, though there is no job to delete

    assert before == server.counts()["mail"] == GroupCounts(pending=1, succeeded=1)
    assert Counter.objects.using(alias).filter(shard=None).count() == 0
    server.close()


def test_an_id_that_is_known_is_answered_like_a_submit(store: SqlStore) -> None:
    store.enqueue([submission("a")])

    [alone] = store.enqueue([submission("a")])
    same, other, fresh = store.enqueue([submission("a"), submission("a", payload=b"x"), submission("b")])

    assert isinstance(same, Submitted)
    assert not same.created
    assert alone == same
    assert isinstance(other, Conflict)
    assert fresh == Submitted("b", True)
    assert store.counts()["mail"].pending == 2


def test_jobs_that_are_alike_and_jobs_that_differ_are_stored_as_they_are(alias: str, store: SqlStore) -> None:
    alike = [submission(name, payload=name.encode(), max_retries=1) for name in "ab"]
    mixed = [submission("c", "report.c", priority=7), submission("d", not_before=1.0)]

    alone = [submission("e", exec="100 %s'"), submission("f", exec="100 %s'", payload=b"'%s")]

    store.enqueue(alike)
    store.enqueue(mixed)
    for one in alone:
        store.enqueue([one])

    given = [one.spec for one in (*alike, *mixed, *alone)]
    assert [job.spec for job in store.get([spec.job_id for spec in given]) if job is not None] == given
    columns = ("subject", "group", "priority", "max_retries", "exec")
    rows = list(JobRun.objects.using(alias).order_by("id").values_list(*columns))
    assert rows == [(spec.subject, group_of(spec.subject), spec.priority, spec.max_retries, spec.exec) for spec in given]


def test_a_time_ahead_delays_and_a_time_that_is_over_does_not(store: SqlStore, postgres_url: str) -> None:
    now = store.clock.wall()
    store.enqueue([submission("later", not_before=now + 3600), submission("now", not_before=now - 3600)])
    store.enqueue([submission("later-alone", not_before=now + 3600)])
    store.enqueue([submission("now-alone", not_before=now - 3600)])

    [grants] = store.lease([request(4)])

    assert [grant.job_id for grant in grants] == ["now", "now-alone"]


def test_errors_of_enqueue_are_those_of_django(alias: str, store: SqlStore) -> None:
    def broken() -> None:
        with transaction.atomic(using=alias):
            with connections[alias].cursor() as cursor, pytest.raises(DataError):
                cursor.execute("SELECT 1 / 0")
            store.enqueue([submission("a")])

    with pytest.raises(InternalError):  # the transaction is aborted
        broken()
    assert store.get(["a"]) == [None]
