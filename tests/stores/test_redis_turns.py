"""Turns on Redis: whole or not at all, once or not at all, whatever happens to the connection or to Redis."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tasuki.core.job import Outcome, State
from tasuki.core.store_messages import (
    Answers,
    BlobClaim,
    Collection,
    HeldLease,
    LeaseRequest,
    LeaseStatus,
    Report,
    ReportStatus,
    RequeueOrder,
    Retention,
    Submitted,
    Turn,
)
from tasuki.errors import InterruptCause, StaleEpoch, TurnInterrupted
from tasuki.stores.batching import execute, execute_surely
from tasuki.stores.memory.store import MemoryStore
from tasuki.stores.redis.store import RedisStore
from tasuki.stores.store import Store
from tasuki.testing.clocks import FakeClock
from tasuki.testing.store_stage import token_row
from tests.stores.redis_proxy import RedisProxy
from tests.stores.steps import submission
from tests.support.redis_service import RedisService

TIMEOUT_S = 2.0


def request(limit: int = 1) -> LeaseRequest:
    return LeaseRequest(worker_id="w", incarnation="w/1", patterns=(">",), limit=limit)


@pytest.fixture
def store(redis_url: str) -> Iterator[RedisStore]:
    store = RedisStore.open(redis_url)
    yield store
    store.close()


@pytest.fixture
def proxy(redis_url: str) -> Iterator[RedisProxy]:
    with RedisProxy(redis_url) as proxy:
        yield proxy


@pytest.fixture
def cut_store(proxy: RedisProxy) -> Iterator[RedisStore]:
    store = RedisStore.open(proxy.url, timeout_s=TIMEOUT_S)
    store.get(["warm"])  # the script is loaded
    yield store
    store.close()


# -- whole turns ---------------------------------------------------------------------------------------------------


def story(store: Store, epoch: int) -> list[Answers]:
    """Every field of Turn at least once."""
    told = [execute(store, Turn(epoch=epoch, take_over="leader", reap=9, skip=9, promote=9))]
    claims = (BlobClaim("a" * 64, 3),)
    told.append(
        execute(
            store, Turn(place_blobs=claims, add_token=[token_row("t"), token_row("u")], submit=[submission(c) for c in "abcde"])
        )
    )
    told.append(
        execute(store, Turn(blobs_stored=told[-1].place_blobs, revoke_token=[("t", "x"), ("t", "x")], lease=[request(4)]))
    )
    grants = {grant.job_id: grant for grant in told[-1].lease[0]}
    held = {c: HeldLease(c, "w", "w/1", grant.lease_id, 1) for c, grant in grants.items()}
    reports = {c: Report(c, "w", grant.lease_id, 1, Outcome(error_code="X", message="m")) for c, grant in grants.items()}
    told.append(
        execute(store, Turn(start=[held["a"]], renew=[held["b"]], release=[held["d"]], held=[("w", "w/1", "")], get=["a", "?"]))
    )
    done = Report("a", "w", grants["a"].lease_id, 1, Outcome(result=b"1"))
    told.append(
        execute(store, Turn(finish=[done, done], fail=[reports["b"]], cancel=[("c", "x", "r"), ("e", "y", ""), ("d", "x", "r")]))
    )
    told.append(
        execute(
            store,
            Turn(
                requeue=[RequeueOrder("e", "x"), RequeueOrder("a", "x", "", 0)],
                rerun=[submission("d")],
                token=["t" * 64],
                tokens=[None],
            ),
        )
    )
    told.append(
        execute(
            store, Turn(epoch=epoch, prune=Retention(0.0), condemn_blobs=Collection(0.0, 1), forget_blobs=told[1].place_blobs)
        )
    )
    return told


def plain(answers: Answers) -> dict[str, object]:
    """Without what is random, or the store's own business."""
    found = {name: getattr(answers, name) for name in answers.__struct_fields__}
    found["lease"] = [[(grant.job_id, grant.attempt) for grant in grants] for grants in answers.lease]
    found["held"] = [sorted(grant.job_id for grant in grants) for grants in answers.held]
    found["cancel"] = [(answer.state, answer.requested) for answer in answers.cancel]
    found["get"] = [job and (job.job_id, job.state, job.attempt) for job in answers.get]
    found["rerun"] = [answer.created for answer in answers.rerun if isinstance(answer, Submitted)]
    del found["notes"]  # of Redis: not known
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def test_a_whole_turn_is_answered_as_verb_after_verb_would_be(redis_url: str) -> None:
    store = RedisStore.open(redis_url, clock=FakeClock())
    try:
        mine = [plain(answers) for answers in story(store, 1)]
    finally:
        store.close()
    theirs = [plain(answers) for answers in story(MemoryStore(FakeClock()), 1)]

    assert mine == theirs


def test_a_stale_epoch_in_the_middle_of_a_turn_leaves_nothing(store: RedisStore) -> None:
    store.take_over("leader-2", 7)
    store.submit([submission("a")])

    with pytest.raises(StaleEpoch, match="leader-2"):
        execute(store, Turn(cancel=[("a", "x", "")], epoch=6, reap=1))

    [job] = store.get(["a"])
    assert job is not None
    assert job.state is State.PENDING
    assert store.incidents("a") == []


# -- turns whose verbs are called one by one -----------------------------------------------------------------------


def test_a_turn_that_another_server_overtook_is_a_conflict_and_leaves_nothing(store: RedisStore, redis_url: str) -> None:
    other = RedisStore.open(redis_url)
    store.submit([submission("a")])

    def overtaken() -> None:
        with store.turn():
            [[grant]] = store.lease([request()])
            other.lease([request()])
            store.start([HeldLease("a", "w", "w/1", grant.lease_id, 1)])

    try:
        with pytest.raises(TurnInterrupted) as raised:
            overtaken()
    finally:
        other.close()

    assert raised.value.why is InterruptCause.CONFLICT
    [job] = store.get(["a"])
    assert job is not None
    assert (job.state, job.attempt) == (State.ASSIGNED, 1)


def test_readers_in_a_turn_see_what_it_has_done(store: RedisStore) -> None:
    with store.turn():
        store.submit([submission("a")])
        [job] = store.get(["a"])
        counts = store.counts()

    assert job is not None
    assert counts["render"].pending == 1


# -- lost connections ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_turn_whose_answer_was_lost_is_done_once(cut_store: RedisStore, proxy: RedisProxy, cut: str) -> None:
    turn = Turn(submit=[submission("a"), submission("b")], lease=[request(1)], get=["a"])
    proxy.arm(cut)

    answers = execute_surely(cut_store, turn, lambda wait_s: True)

    assert proxy.cuts == 1
    assert [isinstance(answer, Submitted) and answer.created for answer in answers.submit] == [True, True]
    [[grant]] = answers.lease
    assert (grant.job_id, grant.attempt, bool(grant.spec)) == ("a", 1, True)
    assert [job and job.state for job in answers.get] == [State.ASSIGNED]
    assert [job and job.attempt for job in cut_store.get(["a", "b"])] == [1, 0]
    assert cut_store.finish([Report("a", "w", grant.lease_id, 1, Outcome())])[0].answer is ReportStatus.RECORDED


def test_a_call_that_comes_late_does_nothing_any_more(cut_store: RedisStore, proxy: RedisProxy) -> None:
    turn = Turn(submit=[submission("a"), submission("b")], lease=[request(1)])
    proxy.arm("late")

    answers = execute_surely(cut_store, turn, lambda wait_s: True)
    proxy.deliver()

    assert [grant.attempt for [grant] in answers.lease] == [1]
    assert [job and job.attempt for job in cut_store.get(["a", "b"])] == [1, 0]


def test_a_verb_alone_says_whether_it_was_stored(cut_store: RedisStore, proxy: RedisProxy) -> None:
    proxy.arm("after")
    with pytest.raises(TurnInterrupted) as raised:
        cut_store.submit([submission("a")])

    assert raised.value.why is InterruptCause.CONNECTION
    assert raised.value.was_stored is not None
    assert raised.value.was_stored()
    assert cut_store.get(["a"]) != [None]


def test_a_turn_of_single_verbs_whose_commit_was_lost_says_whether_it_was_stored(
    cut_store: RedisStore, proxy: RedisProxy
) -> None:
    def cut_off() -> None:
        with cut_store.turn():
            cut_store.submit([submission("a")])
            proxy.arm("after")

    with pytest.raises(TurnInterrupted) as raised:
        cut_off()

    assert raised.value.was_stored is not None
    assert raised.value.was_stored()


def test_a_read_that_is_cut_off_can_simply_be_asked_again(cut_store: RedisStore, proxy: RedisProxy) -> None:
    cut_store.submit([submission("a")])
    proxy.arm("before")

    with contextlib.suppress(TurnInterrupted):
        cut_store.get(["a"])

    assert proxy.cuts == 1
    assert cut_store.get(["a"]) != [None]


# -- Redis itself --------------------------------------------------------------------------------------------------


def test_nothing_acknowledged_is_lost_when_redis_is_killed() -> None:
    with RedisService() as service:
        store = RedisStore.open(service.url(), timeout_s=TIMEOUT_S)
        answers = execute(store, Turn(submit=[submission("a"), submission("b")], lease=[request(1)]))
        [[grant]] = answers.lease
        service.kill()
        service.start()

        turn = Turn(finish=[Report("a", "w", grant.lease_id, 1, Outcome(result=b"1"))], get=["a", "b"])
        after = execute_surely(store, turn, lambda wait_s: True)
        store.close()

    assert after.finish[0].answer is ReportStatus.RECORDED
    assert [job and job.state for job in after.get] == [State.SUCCEEDED, State.PENDING]


def test_a_turn_waits_for_a_redis_that_is_being_restarted_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tasuki.store")
    with RedisService() as service:
        store = RedisStore.open(service.url(), timeout_s=TIMEOUT_S)
        service.stop()
        waits = []

        def start_at_the_third(wait_s: float) -> bool:
            waits.append(wait_s)
            if len(waits) == 3:
                service.start()
            return True

        answers = execute_surely(store, Turn(submit=[submission("a")]), start_at_the_third)
        store.close()

    assert len(waits) >= 3
    assert [isinstance(answer, Submitted) and answer.created for answer in answers.submit] == [True]
    assert caplog.text.count("a turn is tried again") == 1


def test_a_redis_that_forgot_the_script_is_told_it_again(store: RedisStore, redis_service: RedisService) -> None:
    store.submit([submission("a")])
    redis_service.client().script_flush()

    [[grant]] = store.lease([request()])

    assert store.renew([HeldLease("a", "w", "w/1", grant.lease_id, 1)]) == [LeaseStatus.GO_ON]


def test_several_stores_grant_every_job_once(redis_url: str) -> None:
    stores = [RedisStore.open(redis_url) for _ in range(3)]
    try:
        stores[0].submit([submission(f"job-{number}") for number in range(100)])
        granted = [grant.job_id for _ in range(12) for store in stores for grant in store.lease([request(3)])[0]]
    finally:
        for store in stores:
            store.close()

    assert sorted(granted) == sorted(f"job-{number}" for number in range(100))
