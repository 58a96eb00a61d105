"""The epoch fence on PostgreSQL (docs/invariants.md), with two connections that meet at the worst moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tasuki.core.job import State
from tasuki.core.store_messages import Reaped
from tasuki.errors import StaleEpoch
from tasuki.stores.sql import leader
from tasuki.stores.sql.store import SqlStore
from tasuki.testing.clocks import FakeClock
from tasuki.testing.store_stage import PAST_LEASE_S, Stage
from tests.support.postgres_service import PostgresService
from tests.support.waiting import until

WAIT_S = 20.0


class Background:
    """A call on a thread of its own; `result()` gives what it returned or raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._answer: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._answer = self._call()
        except BaseException as error:  # noqa: BLE001 - raised again in `result`
            self._error = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(WAIT_S)
        assert self.is_done, "it still waits"
        if self._error is not None:
            raise self._error
        return self._answer


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def old(postgres_url: str, clock: FakeClock) -> Iterator[Stage]:
    """The leader of epoch 5, with a lease that is over."""
    store = SqlStore.open_postgresql(postgres_url, clock=clock)
    stage = Stage(store, clock)
    assert store.take_over("old", 5)
    stage.epoch = 5
    stage.running("a")
    clock.advance(PAST_LEASE_S)
    yield stage
    store.close()


@pytest.fixture
def new(postgres_url: str, clock: FakeClock) -> Iterator[SqlStore]:
    store = SqlStore.open_postgresql(postgres_url, clock=clock)
    yield store
    store.close()


def waits_for_a_lock(postgres: PostgresService, url: str) -> bool:
    statement = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return bool(postgres.execute(statement, url=url))


def test_a_leader_that_comes_while_another_takes_over_waits_and_is_refused(
    postgres: PostgresService, postgres_url: str, old: Stage, new: SqlStore
) -> None:
    with new.turn():
        assert new.take_over("new", 6)
        reaping = Background(old.reap)
        until(lambda: waits_for_a_lock(postgres, postgres_url), WAIT_S, "the old leader waits for the new one's commit")
        assert not reaping.is_done

    with pytest.raises(StaleEpoch, match="epoch 5 does not lead, 6 does"):
        reaping.result()
    assert old.job("a").state is State.RUNNING
    assert old.kinds("a") == []


def test_a_lease_that_an_application_has_locked_does_not_keep_a_leader_from_taking_over(
    postgres: PostgresService, postgres_url: str, old: Stage, new: SqlStore, clock: FakeClock
) -> None:
    old.running("b")
    old.running("c")
    clock.advance(PAST_LEASE_S)
    with postgres.connect(postgres_url) as application, application.transaction():
        application.execute("SELECT 1 FROM tasuki_jobrun WHERE idempotency_key = 'b' FOR UPDATE")

        assert Background(lambda: new.take_over("new", 6)).result() is True
        # b is locked; c was renewed; a has not spoken since the takeover before.
        assert [lost.job_id for lost in new.reap(epoch=6)] == ["a"]


def test_a_lease_that_a_server_writes_at_the_moment_of_a_takeover_is_renewed(
    postgres: PostgresService, postgres_url: str, old: Stage, new: SqlStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "LOCKED_LOOKS", 1_000)
    old.running("b")
    clock.advance(PAST_LEASE_S)
    looks = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
    with postgres.connect(postgres_url) as server, server.transaction():
        server.execute("SELECT 1 FROM tasuki_jobrun WHERE idempotency_key = 'b' FOR UPDATE")
        takeover = Background(lambda: new.take_over("new", 6))
        until(lambda: postgres.execute(looks, url=postgres_url), WAIT_S, "the new leader has met the lock")

    assert takeover.result() is True
    assert [lost.job_id for lost in new.reap(epoch=6)] == ["a"]


def test_a_takeover_waits_until_the_old_leaders_transaction_has_ended(
    postgres: PostgresService, postgres_url: str, old: Stage, new: SqlStore
) -> None:
    with old.store.turn():
        reaped: list[Reaped] = old.reap()
        takeover = Background(lambda: new.take_over("new", 6))
        until(lambda: waits_for_a_lock(postgres, postgres_url), WAIT_S, "the new leader waits for the old one's commit")
        assert not takeover.is_done

    assert takeover.result() is True
    # In the order of commits the epochs of leader writes never fall: 5's write stands before 6 was registered.
    assert [one.job_id for one in reaped] == ["a"]
    assert old.job("a").leader_epoch == 5
    with pytest.raises(StaleEpoch):
        old.reap()


def test_two_turns_of_one_leader_do_not_wait_for_each_other(old: Stage, new: SqlStore) -> None:
    with old.store.turn():
        old.reap()
        assert new.reap(epoch=5) == []  # what the first has in hand is skipped


@pytest.mark.parametrize("verb", ["reap", "skip", "promote", "prune", "assign"])
def test_the_fence_is_the_first_lock_of_every_leader_verb(
    postgres: PostgresService, postgres_url: str, old: Stage, verb: str
) -> None:
    """Nothing else is locked or written before it: a leader that has to wait here holds up nobody."""
    from tasuki.testing.store_leader import LEADER_VERBS

    with postgres.connect(postgres_url) as other:
        other.execute("BEGIN")
        other.execute("UPDATE tasuki_scopeepoch SET holder = holder")
        waiting = Background(lambda: LEADER_VERBS[verb](old.store, 5))
        until(lambda: waits_for_a_lock(postgres, postgres_url), WAIT_S, f"{verb} waits for the epoch")
        free = other.execute("SELECT count(*) FROM (SELECT 1 FROM tasuki_jobrun FOR UPDATE SKIP LOCKED) AS free").fetchone()
        other.execute("ROLLBACK")

    waiting.result()
    assert free == (1,)


def test_a_mere_exists_would_have_let_the_stale_leader_write(postgres: PostgresService, postgres_url: str, old: Stage) -> None:
    """Why the fence is a lock: the same race with `AND EXISTS (SELECT … epoch = 5)` in the write itself, as it is often done.

    Under READ COMMITTED a statement that waited for a row looks again at that row only. What the sub-select said before the wait
    is not asked again, and a leader of epoch 5 writes after epoch 6 was committed.
    """
    statement = """
        UPDATE tasuki_jobrun SET leader_epoch = 5 WHERE idempotency_key = 'a'
        AND EXISTS (SELECT 1 FROM tasuki_scopeepoch WHERE scope = 'leader' AND epoch = 5)"""
    with postgres.connect(postgres_url) as new, postgres.connect(postgres_url) as stale:
        new.execute("BEGIN")
        new.execute("UPDATE tasuki_scopeepoch SET epoch = 6, holder = 'new' WHERE scope = 'leader'")
        new.execute("UPDATE tasuki_jobrun SET leader_epoch = 6 WHERE idempotency_key = 'a'")
        writing = Background(lambda: stale.execute(statement).rowcount)
        until(lambda: waits_for_a_lock(postgres, postgres_url), WAIT_S, "the stale leader waits for the row")
        new.execute("COMMIT")

        assert writing.result() == 1  # one would wish for 0

    assert (old.job("a").leader_epoch, old.store.epoch()) == (5, (6, "new"))


def test_epochs_rise_one_holder_each_whoever_comes_at_the_same_time(postgres_url: str) -> None:
    stores = [SqlStore.open_postgresql(postgres_url) for _ in range(4)]
    won: list[tuple[int, str]] = []

    def campaign(store: SqlStore, name: str) -> None:
        for _ in range(10):
            epoch = store.epoch()[0] + 1
            if store.take_over(name, epoch):
                won.append((epoch, name))

    threads = [threading.Thread(target=campaign, args=(store, f"s{number}")) for number, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)

    epochs = [epoch for epoch, _ in won]
    assert len(epochs) == len(set(epochs))
    assert stores[0].epoch() == max(won)
    for store in stores:
        store.close()
