"""Turns on PostgreSQL when things break: backends killed, commits whose answer is lost, restarts, deadlocks, outages."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from tasuki.core.job import Outcome, State
from tasuki.core.store_messages import Answers, LeaseRequest, Report, Turn
from tasuki.errors import DiskFull, InterruptCause, StaleEpoch, TasukiError, TurnInterrupted, Unavailable
from tasuki.stores import common
from tasuki.stores.batching import StoreThread, execute_surely
from tasuki.stores.sql.store import SqlStore
from tests.stores.cutting_proxy import CuttingProxy
from tests.stores.steps import connection_of, submission
from tests.support.postgres_service import PostgresService
from tests.support.waiting import until

WAIT_S = 20.0


def request(limit: int = 1, **fields: Any) -> LeaseRequest:
    return LeaseRequest(worker_id="w1", incarnation="w1/1", patterns=(">",), limit=limit, **fields)


def sleepy(seconds: float) -> bool:
    """A pause that really waits, and goes on."""
    threading.Event().wait(seconds)
    return True


def backend_of(store: SqlStore) -> int:
    return int(connection_of(store).info.backend_pid)


@pytest.fixture
def store(postgres_url: str) -> Iterator[SqlStore]:
    store = SqlStore.open_postgresql(postgres_url)
    yield store
    store.close()


class Once:
    """A fault that strikes the first time the point is passed."""

    def __init__(self, point: str, strike: Callable[[], None]) -> None:
        self._point = point
        self._strike = strike
        self.is_armed = True
        self.passed = 0

    def __call__(self, point: str) -> None:
        if point == self._point:
            self.passed += 1
            if self.is_armed:
                self.is_armed = False
                self._strike()


# -- a backend that is killed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["turn.begun", "submit.written", "lease.written", "turn.before_commit"])
def test_a_backend_that_is_killed_before_the_commit_costs_nothing(
    postgres: PostgresService, postgres_url: str, point: str
) -> None:
    def kill() -> None:
        postgres.execute("SELECT pg_terminate_backend(%s, 5000)", (backend_of(store),))

    fault = Once(point, kill)
    fault.is_armed = False
    store = SqlStore.open_postgresql(postgres_url, fault=fault)
    fault.is_armed = True

    answers = execute_surely(store, Turn(submit=[submission("a")], lease=[request()]), sleepy)

    assert [answer.job_id for answer in answers.submit] == ["a"]
    [[grant]] = answers.lease
    assert fault.passed == 2
    assert (grant.job_id, grant.attempt) == ("a", 1)
    [job] = store.get(["a"])
    assert job is not None
    assert (job.state, job.attempt) == (State.ASSIGNED, 1)
    assert store.counts()["render"].active == 1
    store.close()


def test_without_anybody_to_try_again_a_killed_backend_is_unavailable_and_the_next_call_works(
    postgres: PostgresService, store: SqlStore
) -> None:
    postgres.execute("SELECT pg_terminate_backend(%s, 5000)", (backend_of(store),))

    with pytest.raises(TurnInterrupted, match="nothing of this was stored") as caught:
        store.submit([submission("a")])

    assert caught.value.why is InterruptCause.CONNECTION
    assert store.get(["a"]) == [None]
    store.submit([submission("a")])
    assert store.counts()["render"].pending == 1


def test_an_idle_connection_that_was_cut_is_made_anew_for_a_reader(postgres: PostgresService, store: SqlStore) -> None:
    store.submit([submission("a")])
    reader = store.reader()
    assert reader.counts()["render"].pending == 1
    postgres.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'tasuki' AND pid <> %s",
        (backend_of(store),),
    )

    assert reader.counts()["render"].pending == 1
    reader.close()


# -- a commit whose answer is lost --------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_turn_whose_commit_was_cut_off_is_stored_once(postgres_url: str, cut: str) -> None:
    with CuttingProxy(postgres_url) as proxy:
        store = SqlStore.open_postgresql(proxy.url)
        proxy.arm(cut)

        answers = execute_surely(store, Turn(submit=[submission("a")], lease=[request()]), sleepy)

        assert proxy.cuts == 1
        [[grant]] = answers.lease
        # The lease that was answered is the one that stands: what was stored is not done again.
        recorded = store.finish([Report("a", "w1", grant.lease_id, grant.attempt, Outcome())])
        assert [answer.state for answer in recorded] == [State.SUCCEEDED]
        [job] = store.get(["a"])
        assert job is not None
        assert job.attempt == 1
        assert (store.counts()["render"].succeeded, store.counts()["render"].active) == (1, 0)
        store.close()


def test_a_commit_that_is_still_on_its_way_is_waited_for(postgres_url: str) -> None:
    """The worst case: we are cut off, come back, and the old connection's COMMIT has not reached the server yet. Its transaction
    holds the row of our turns, so asking for that row waits until it is decided."""
    with CuttingProxy(postgres_url) as proxy:
        store = SqlStore.open_postgresql(proxy.url)
        proxy.arm("late")
        asked: list[float] = []

        def pause(seconds: float) -> bool:
            if not asked:
                threading.Timer(0.3, proxy.deliver).start()
            asked.append(time.monotonic())
            return sleepy(seconds)

        answers = execute_surely(store, Turn(submit=[submission("a")], lease=[request()]), pause)

        assert [answer.created for answer in answers.submit] == [True]  # type: ignore[union-attr]
        assert len(asked) == 1
        assert time.monotonic() - asked[0] > 0.25
        [job] = store.get(["a"])
        assert job is not None
        assert job.attempt == 1
        store.close()


def test_without_anybody_to_ask_an_unknown_commit_says_so_and_can_be_asked_later(postgres_url: str) -> None:
    with CuttingProxy(postgres_url) as proxy:
        store = SqlStore.open_postgresql(proxy.url)
        proxy.arm("after")

        with pytest.raises(TurnInterrupted, match="whether this was stored is not known") as caught:
            store.submit([submission("a")])

        assert caught.value.was_stored is not None
        assert caught.value.was_stored() is True
        store.close()


# -- the server goes away -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fast", "immediate", "kill"])
def test_a_restart_in_the_middle_of_a_turn_is_survived(postgres: PostgresService, postgres_url: str, how: str) -> None:
    def restart() -> None:
        if how == "kill":
            postgres.kill()
            postgres.start()
        else:
            postgres.restart(how)

    fault = Once("submit.written", restart)
    fault.is_armed = False
    store = SqlStore.open_postgresql(postgres_url, fault=fault)
    store.submit([submission("before")])
    fault.is_armed = True

    answers = execute_surely(store, Turn(submit=[submission("a")], lease=[request(2)]), sleepy)

    assert sorted(grant.job_id for grant in answers.lease[0]) == ["a", "before"]
    assert store.counts()["render"].active == 2
    store.close()


def test_a_thread_whose_database_is_away_ends_at_once_when_it_is_closed(postgres: PostgresService, postgres_url: str) -> None:
    delivered: list[Answers | TasukiError] = []
    thread = StoreThread(lambda: SqlStore.open_postgresql(postgres_url), lambda _turn, answer: delivered.append(answer))
    assert thread.open("holder") == 0
    postgres.stop()
    try:
        thread.submit(Turn(submit=[submission("a")]))
        thread.submit(Turn(submit=[submission("b")]))
        began = time.monotonic()
        thread.close()
        assert time.monotonic() - began < 2.0
    finally:
        postgres.start()
    assert [type(answer) for answer in delivered] == [TurnInterrupted, TurnInterrupted]
    assert "127.0.0.1" in str(delivered[0])
    assert postgres.password not in str(delivered)


def test_a_thread_goes_on_when_its_database_comes_back(postgres: PostgresService, postgres_url: str) -> None:
    delivered: list[Answers | TasukiError] = []
    done = threading.Event()

    def deliver(_turn: Turn, answer: Answers | TasukiError) -> None:
        delivered.append(answer)
        done.set()

    thread = StoreThread(lambda: SqlStore.open_postgresql(postgres_url), deliver)
    thread.open("holder")
    postgres.stop()
    thread.submit(Turn(submit=[submission("a")]))
    assert not done.wait(0.5)

    postgres.start()

    assert done.wait(WAIT_S)
    [answer] = delivered
    assert isinstance(answer, Answers)
    assert [submitted.job_id for submitted in answer.submit] == ["a"]
    thread.close()


def test_a_thread_without_work_closes_its_connection_and_opens_it_for_the_next_turn(
    postgres: PostgresService, postgres_url: str
) -> None:
    def connections() -> int:
        mine = "datname = current_database() AND pid <> pg_backend_pid()"
        return len(postgres.execute(f"SELECT pid FROM pg_stat_activity WHERE {mine}", url=postgres_url))

    delivered: queue.SimpleQueue[Answers | TasukiError] = queue.SimpleQueue()
    thread = StoreThread(lambda: SqlStore.open_postgresql(postgres_url), lambda _turn, answer: delivered.put(answer), 0.05)
    thread.open("holder")
    until(lambda: connections() == 0, WAIT_S, "the connection is closed")
    postgres.stop()
    try:
        thread.submit(Turn(renew=[]))  # asks nothing
        nothing = delivered.get(timeout=WAIT_S)
    finally:
        postgres.start()

    thread.submit(Turn(submit=[submission("a")]))
    answer = delivered.get(timeout=WAIT_S)
    until(lambda: connections() == 0, WAIT_S, "the connection is closed again")
    thread.close()

    assert nothing == Answers()
    assert isinstance(answer, Answers)
    assert [submitted.job_id for submitted in answer.submit] == ["a"]


# -- other servers in the way -------------------------------------------------------------------------------------


def test_a_deadlock_is_tried_again_until_both_turns_are_done(postgres_url: str) -> None:
    """Each of two servers holds the job that the other wants next. PostgreSQL ends one of them; both are done in the end."""
    both_hold_one = threading.Barrier(2)
    meets = {"one": True, "two": True}

    def fault_of(name: str) -> Callable[[str], None]:
        def fault(point: str) -> None:
            if point == "submit.written" and meets[name]:
                meets[name] = False
                both_hold_one.wait(WAIT_S)

        return fault

    answers: dict[str, Answers] = {}
    tries: dict[str, int] = {"one": 0, "two": 0}

    def take_both(name: str, first: str, second: str) -> None:
        store = SqlStore.open_postgresql(postgres_url, fault=fault_of(name))
        connection_of(store).execute("SET deadlock_timeout = '50ms'")

        def pause(seconds: float) -> bool:
            tries[name] += 1
            return sleepy(seconds)

        # They meet after the cancel of one job, and before the lease of the other.
        turn = Turn(cancel=[(first, name, "")], submit=[submission(f"new-{name}")], lease=[request(job_ids=(second,))])
        answers[name] = execute_surely(store, turn, pause)
        store.close()

    setup = SqlStore.open_postgresql(postgres_url)
    setup.submit([submission("a"), submission("b")])
    setup.close()
    threads = [
        threading.Thread(target=take_both, args=("one", "a", "b")),
        threading.Thread(target=take_both, args=("two", "b", "a")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)

    assert sorted(answers) == ["one", "two"]
    assert sum(tries.values()) >= 1
    after = SqlStore.open_postgresql(postgres_url)
    states = [job.state for job in after.get(["a", "b", "new-one", "new-two"]) if job is not None]
    assert states[0] is State.CANCELED or states[1] is State.CANCELED
    assert states[2:] == [State.PENDING, State.PENDING]
    after.close()


def test_a_lock_that_is_held_too_long_is_a_timeout_and_tried_twice_more(
    postgres: PostgresService, postgres_url: str, store: SqlStore
) -> None:
    store.submit([submission("a")])
    connection_of(store).execute("SET lock_timeout = '50ms'")
    tries: list[float] = []

    def pause(seconds: float) -> bool:
        tries.append(seconds)
        return True

    with postgres.connect(postgres_url) as other:
        other.execute("BEGIN")
        other.execute("SELECT 1 FROM tasuki_jobrun FOR UPDATE")
        with pytest.raises(TurnInterrupted, match="took too long") as caught:
            execute_surely(store, Turn(cancel=[("a", "alice", "")]), pause)
        other.execute("ROLLBACK")

    assert caught.value.why is InterruptCause.TIMEOUT
    assert len(tries) == 2
    assert [answer.state for answer in store.cancel(["a"], actor="alice")] == [State.CANCELED]


def test_a_stale_epoch_is_a_final_word(store: SqlStore) -> None:
    store.take_over("one", 1)

    def never(_seconds: float) -> bool:
        raise AssertionError("a refused leader tries again")

    with pytest.raises(StaleEpoch):
        execute_surely(store, Turn(epoch=7, reap=10), never)


def test_an_idle_transaction_is_ended_by_the_server_and_the_store_goes_on(store: SqlStore) -> None:
    connection_of(store).execute("SET idle_in_transaction_session_timeout = '50ms'")

    def dawdle() -> None:
        with store.turn():
            store.submit([submission("a")])
            threading.Event().wait(0.3)
            store.submit([submission("b")])

    with pytest.raises(TurnInterrupted):
        dawdle()

    assert store.get(["a", "b"]) == [None, None]
    store.submit([submission("a")])
    assert store.counts()["render"].pending == 1


# -- errors -------------------------------------------------------------------------------------------------------


def breaking(store: SqlStore, table: str, event: str, code: str) -> AbstractContextManager[None]:
    """While the block runs, writes of that kind to the table fail with that code."""

    @contextmanager
    def broken() -> Iterator[None]:
        connection = connection_of(store)
        connection.execute(
            "CREATE OR REPLACE FUNCTION pg_temp.break() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION 'broken on purpose' USING ERRCODE = '{code}'; END $$"
        )
        connection.execute(f"CREATE TRIGGER broken BEFORE {event} ON {table} EXECUTE FUNCTION pg_temp.break()")
        try:
            yield
        finally:
            connection.execute(f"DROP TRIGGER broken ON {table}")

    return broken()


def test_a_full_disk_is_told_as_such_and_not_tried_again(store: SqlStore) -> None:
    store.submit([submission("a")])

    with breaking(store, "tasuki_incident", "INSERT", "53100"), pytest.raises(DiskFull, match="nothing of this was stored"):
        execute_surely(store, Turn(cancel=[("a", "alice", "")]), lambda _: pytest.fail("tried again"))

    [job] = store.get(["a"])
    assert job is not None
    assert job.state is State.PENDING


def test_a_verb_that_broke_half_way_spoils_the_turn_even_if_its_error_was_caught(store: SqlStore) -> None:
    store.submit([submission("a")])

    def careless() -> None:
        with store.turn():
            store.submit([submission("b")])
            with pytest.raises(Unavailable, match="broken on purpose"):
                store.cancel(["a"], actor="alice")

    with breaking(store, "tasuki_jobrun", "UPDATE", "P0001"), pytest.raises(Unavailable, match="rolled back"):
        careless()

    assert store.get(["b"]) == [None]
    assert store.counts()["render"].pending == 1


# -- how often ----------------------------------------------------------------------------------------------------


def test_conflicts_are_tried_five_times_with_growing_waits() -> None:
    retries = common.Retries(now=0.0, random=lambda: 1.0)

    waits = [retries.wait_s(InterruptCause.CONFLICT, now=0.0) for _ in range(common.CONFLICT_TRIES)]

    assert waits == [0.02, 0.04, 0.08, 0.16, None]


def test_a_lost_connection_is_tried_at_once_and_then_for_half_a_minute() -> None:
    retries = common.Retries(now=100.0, random=lambda: 1.0)

    waits = [retries.wait_s(InterruptCause.CONNECTION, now=101.0) for _ in range(12)]

    assert waits[:3] == [0.0, 0.04, 0.08]
    assert waits[-1] == common.LOST_WAIT_MAX_S
    assert retries.wait_s(InterruptCause.CONNECTION, now=100.0 + common.RETRY_S) is None


def test_a_turn_of_a_leader_is_not_tried_for_so_long_that_what_it_was_to_end_may_have_changed() -> None:
    retries = common.Retries(now=100.0, random=lambda: 1.0, leads=True)

    assert retries.wait_s(InterruptCause.CONNECTION, now=100.5) == 0.0
    assert retries.wait_s(InterruptCause.CONNECTION, now=100.0 + common.LEADER_RETRY_S) is None


def test_waits_are_jittered_so_that_servers_do_not_come_back_together() -> None:
    early, late = (common.Retries(0.0, lambda chance=chance: chance) for chance in (0.0, 1.0))

    assert early.wait_s(InterruptCause.TIMEOUT, 0.0) == 0.01
    assert late.wait_s(InterruptCause.TIMEOUT, 0.0) == 0.02
