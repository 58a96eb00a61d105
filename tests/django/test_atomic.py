"""Inside a Django project: our verbs are part of the user's transaction."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tasuki.django import standalone

standalone.configure()

from django.conf import settings  # noqa: E402
from django.db import connections, transaction  # noqa: E402
from django.utils import timezone  # noqa: E402

from tasuki.core.job import JobSpec, body_hash  # noqa: E402
from tasuki.core.store_messages import LeaseRequest, Submission, Submitted  # noqa: E402
from tasuki.django import enqueueing  # noqa: E402
from tasuki.django.conf import ProjectSettings  # noqa: E402
from tasuki.django.models import Incident, JobRun, Token  # noqa: E402
from tasuki.errors import InvalidInput, StaleEpoch  # noqa: E402
from tasuki.stores.sql.store import SqlStore  # noqa: E402


def submission(job_id: str, payload: bytes = b"") -> Submission:
    spec = JobSpec(job_id=job_id, subject="mail.send", payload=payload)
    return Submission(spec, "alice", body_hash(spec))


@pytest.fixture
def alias(tmp_path: Path) -> Iterator[str]:
    alias = standalone.register(tmp_path / "project.sqlite3")
    standalone.migrate(alias)
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


def test_a_committed_transaction_has_both(alias: str, store: SqlStore) -> None:
    with transaction.atomic(using=alias):
        users_row(alias, "order-1")
        [answer] = store.submit([submission("a")])
        assert connections[alias].in_atomic_block

    assert isinstance(answer, Submitted)
    assert JobRun.objects.using(alias).filter(idempotency_key="a").exists()
    assert store.counts()["mail"].pending == 1
    assert Token.objects.using(alias).exists()


def test_nothing_is_committed_before_the_users_block_ends(alias: str, store: SqlStore) -> None:
    with transaction.atomic(using=alias):
        with store.turn():
            store.submit([submission("a")])
        reader = store.reader()
        assert reader.get(["a"]) == [None]
        reader.close()

    assert store.get(["a"]) != [None]


def test_without_a_users_block_each_verb_is_its_own_transaction(alias: str, store: SqlStore) -> None:
    store.submit([submission("a")])

    assert not connections[alias].in_atomic_block
    [[grant]] = store.lease([LeaseRequest(worker_id="w1", incarnation="w1/1", patterns=("mail.>",))])
    assert grant.job_id == "a"


def test_a_verb_that_fails_leaves_the_users_block_usable(alias: str, store: SqlStore) -> None:
    with transaction.atomic(using=alias):
        users_row(alias, "order-1")
        with pytest.raises(StaleEpoch):
            store.reap(epoch=7)
        store.submit([submission("a")])

    assert Token.objects.using(alias).count() == JobRun.objects.using(alias).count() == 1
    assert not Incident.objects.using(alias).exists()


def test_a_naive_time_is_of_the_current_zone_where_use_tz_is_off_and_else_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    new_year = datetime(2030, 1, 1)  # noqa: DTZ001
    with pytest.raises(InvalidInput, match="not_before 2030-01-01 00:00:00 has no time zone"):
        enqueueing.unix_time("not_before", new_year)
    monkeypatch.setattr(settings, "USE_TZ", False)
    with timezone.override("Asia/Tokyo"):
        at = enqueueing.unix_time("not_before", new_year)

    assert at == datetime(2029, 12, 31, 15, tzinfo=UTC).timestamp()


def test_a_job_that_another_databases_transaction_would_not_hold_back_is_warned_of(
    alias: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = standalone.register(tmp_path / "other.sqlite3")
    monkeypatch.setattr(enqueueing, "project_settings", lambda: ProjectSettings(database=alias))
    specs = [JobSpec(job_id=name, subject="mail.send") for name in "ab"]
    with transaction.atomic(using=other), pytest.warns(RuntimeWarning, match="this one is committed at once"):
        enqueueing.enqueue_job(specs[0])
    with transaction.atomic(using=other), transaction.atomic(using=alias), warnings.catch_warnings(action="error"):
        enqueueing.enqueue_job(specs[1])
    connections[other].close()
    standalone.forget(other)

    assert JobRun.objects.using(alias).count() == 2
