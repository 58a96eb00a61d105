"""Inside a Django project on PostgreSQL: our verbs are part of the user's transaction, and its session is left as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tasuki.django import standalone

standalone.configure()

from django.db import connections, transaction  # noqa: E402

from tasuki.core.job import JobSpec, Outcome, State, body_hash  # noqa: E402
from tasuki.core.store_messages import LeaseRequest, Report, Submission  # noqa: E402
from tasuki.django.models import Token  # noqa: E402
from tasuki.errors import StaleEpoch  # noqa: E402
from tasuki.stores.sql.postgres import connection_parameters  # noqa: E402
from tasuki.stores.sql.store import SqlStore  # noqa: E402
from tests.support.postgres_service import PostgresService  # noqa: E402


def submission(job_id: str) -> Submission:
    spec = JobSpec(job_id=job_id, subject="mail.send")
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
