"""Properties of the memory store alone: turns that nest, leases that stay cheap, indexes that stay true."""

from __future__ import annotations

import itertools

import pytest

from tasuki.core.job import JobSpec, Outcome, State, body_hash
from tasuki.core.store_messages import Filter, Grant, LeaseRequest, Report, Submission
from tasuki.errors import InvalidInput, StaleEpoch
from tasuki.stores.common import FairTurns
from tasuki.stores.memory import records
from tasuki.stores.memory.store import MemoryStore
from tasuki.testing.clocks import FakeClock


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(FakeClock())


def submit(store: MemoryStore, *job_ids: str, subject: str = "a.x") -> None:
    specs = [JobSpec(job_id=job_id, subject=subject) for job_id in job_ids]
    store.submit([Submission(spec, "alice", body_hash(spec)) for spec in specs])


def lease(store: MemoryStore, limit: int = 1) -> list[Grant]:
    [grants] = store.lease([LeaseRequest(worker_id="w1", incarnation="1", patterns=(">",), limit=limit)])
    return grants


def test_the_random_bytes_of_a_lease_id_come_from_outside() -> None:
    numbers = itertools.count(1)
    store = MemoryStore(FakeClock(), random=lambda size: next(numbers).to_bytes(size, "big"))
    submit(store, "a", "b")

    assert [int(grant.lease_id, 16) for grant in lease(store, limit=2)] == [1, 2]


def test_an_inner_turn_that_fails_takes_back_only_itself(store: MemoryStore) -> None:
    def inner() -> None:
        with store.turn():
            submit(store, "b")
            raise InvalidInput("no")

    with store.turn():
        submit(store, "a")
        with pytest.raises(InvalidInput):
            inner()
        submit(store, "c")

    assert [job.job_id for job in store.find(Filter()).jobs] == ["c", "a"]


def test_an_outer_turn_that_fails_takes_back_the_inner_ones(store: MemoryStore) -> None:
    def outer() -> None:
        with store.turn():
            with store.turn():
                submit(store, "a")
            raise InvalidInput("no")

    with pytest.raises(InvalidInput):
        outer()

    assert store.get(["a"]) == [None]
    assert store.counts() == {}


def test_a_refused_epoch_inside_a_turn_leaves_the_rest_of_it(store: MemoryStore) -> None:
    old = 1
    assert store.take_over("one", old)
    assert store.take_over("two", 2)

    with store.turn():
        submit(store, "a")
        with pytest.raises(StaleEpoch):
            store.reap(epoch=old)

    assert store.get(["a"]) != [None]


def test_a_job_that_was_pruned_and_taken_back_keeps_its_age(store: MemoryStore) -> None:
    submit(store, "a", "b", "c")
    store.cancel(["b"], actor="alice")
    epoch = 1
    assert store.take_over("leader", epoch)

    def prune_and_regret() -> None:
        with store.turn():
            assert store.prune(before=store.clock.wall() + 1, epoch=epoch) == 1
            raise InvalidInput("no")

    with pytest.raises(InvalidInput):
        prune_and_regret()

    assert [job.job_id for job in store.find(Filter()).jobs] == ["c", "b", "a"]


def test_a_lease_looks_only_at_what_it_takes(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(store, *(f"job-{number}" for number in range(5_000)))
    asked: list[str] = []
    monkeypatch.setattr("tasuki.stores.memory.store.matches", lambda pattern, subject: bool(asked.append(subject)) or True)

    for _ in range(10):
        lease(store, limit=2)

    assert asked == ["a.x"] * 10  # by subject, not by job


def test_nothing_is_left_behind_when_all_jobs_are_gone(store: MemoryStore) -> None:
    submit(store, "a", "b", subject="a.x")
    submit(store, "c", subject="b.x")
    for grant in lease(store, limit=3):
        store.finish([Report(grant.job_id, "w1", grant.lease_id, grant.attempt, Outcome())])

    assert store.take_over("leader", 1)
    store.prune(before=store.clock.wall() + 1, epoch=1)

    empty = vars(MemoryStore(FakeClock()))
    kept = {name: value for name, value in vars(store).items() if isinstance(value, dict | list)}
    assert {name: value for name, value in kept.items() if value != empty[name] and name != "_counts"} == {}
    assert store.counts() == {}


def test_find_looks_at_a_bounded_number_of_jobs(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "FIND_SCAN_MAX", 3)
    submit(store, "old", subject="b.x")
    submit(store, *"abcde", subject="a.x")

    first = store.find(Filter(subject="b.*"))
    second = store.find(Filter(subject="b.*"), cursor=first.cursor)

    assert first.jobs == []
    assert [job.job_id for job in second.jobs] == ["old"]
    assert second.cursor is None


@pytest.mark.parametrize("cursor", ["x", "-1", "", "1.5"])
def test_a_cursor_that_find_never_gave_is_refused(store: MemoryStore, cursor: str) -> None:
    with pytest.raises(InvalidInput, match="cursor"):
        store.find(Filter(), cursor=cursor)


def test_on_failed_has_two_values(store: MemoryStore) -> None:
    with pytest.raises(InvalidInput, match="on_failed"):
        store.submit([], on_failed="maybe")


def test_fairness_is_the_cores(store: MemoryStore) -> None:
    submit(store, *(f"a-{number}" for number in range(9)), subject="a.x")
    submit(store, *(f"b-{number}" for number in range(9)), subject="b.x")
    waiting = {"a": 9, "b": 9}
    turns = FairTurns()
    dealt = turns.fill(waiting, 5, lambda group, limit: [group] * limit)

    assert [grant.job_id[0] for grant in lease(store, limit=5)] == dealt


def test_states_are_not_shared_between_turns_and_readers(store: MemoryStore) -> None:
    submit(store, "a")
    [before] = store.get(["a"])

    lease(store)

    assert before is not None
    assert before.state is State.PENDING
