"""On PostgreSQL: jobs that come to refer to a blob, against the collection that condemns it, on connections of their own.

What must never be: a recorded job whose blob was condemned.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tasuki.core.job import BlobRef, InputFile, JobSpec, Outcome, State, body_hash
from tasuki.core.store_messages import (
    BlobClaim,
    BlobPlace,
    CacheEntry,
    CacheOrder,
    CacheStored,
    CondemnOrder,
    LeaseRequest,
    MissingBlobs,
    Report,
    ReportStatus,
    Submission,
    Submitted,
)
from tasuki.errors import CacheConflict, TurnInterrupted
from tasuki.stores.sql.postgres_session import PostgresSession
from tasuki.stores.sql.store import SqlStore
from tests.support.postgres_service import PostgresService
from tests.support.waiting import until

BLOB = "ab" * 32
ALL = CondemnOrder(1e12)
LOST = """
    SELECT count(*) FROM tasuki_jobblob AS used WHERE NOT EXISTS (
        SELECT 1 FROM tasuki_blob AS blob WHERE blob.sha256 = used.sha256 AND stored = 1 AND condemned = 0)
"""


class Side:
    """One server's store."""

    def __init__(self, url: str) -> None:
        self.store = SqlStore.open_postgresql(url)

    def bring(self, sha256: str = BLOB) -> BlobPlace:
        places = self.store.place_blobs([BlobClaim(sha256, 3)])
        if not places[0].stored:
            self.store.blobs_stored(places)
        return places[0]

    def submit(self, job_id: str, sha256: str = BLOB) -> Submitted | MissingBlobs:
        spec = JobSpec(job_id=job_id, subject="a.b", files=(InputFile("in", sha256=sha256, size_bytes=3),))
        [answer] = self.store.submit([Submission(spec, "alice", body_hash(spec))])
        assert isinstance(answer, Submitted | MissingBlobs)
        return answer

    def running(self, job_id: str, sha256: str = BLOB) -> Report:
        """A new job that was leased, and the report that its result is the blob."""
        spec = JobSpec(job_id=job_id, subject="a.b")
        self.store.submit([Submission(spec, "alice", body_hash(spec))])
        [[grant]] = self.store.lease([LeaseRequest(worker_id="w", incarnation="1", job_ids=(job_id,))])
        return Report(job_id, "w", grant.lease_id, grant.attempt, Outcome(result_ref=BlobRef(sha256, 3)))

    def put(self, name: str, sha256: str = BLOB, target: str = ">") -> CacheStored | CacheConflict | MissingBlobs:
        [answer] = self.store.put_cache([CacheOrder("c", target, "alice", (CacheEntry(name, sha256, 3),))])
        return answer

    def finish(self, report: Report) -> ReportStatus:
        [recorded] = self.store.finish([report])
        return recorded.answer


class Refer:
    """All ways in which a job or a cache comes to refer to the blob, told alike: True if it does."""

    def __init__(self, side: Side, verb: str) -> None:
        self._side = side
        self._is_cache = verb == "put_cache"
        self._report = side.running("finished") if verb == "finish" else None

    def __call__(self) -> bool:
        if self._report is not None:
            return self._side.finish(self._report) is ReportStatus.RECORDED
        if self._is_cache:
            return self._side.put("a") == CacheStored(1)
        return isinstance(self._side.submit("submitted"), Submitted)


@pytest.fixture
def sides(postgres_url: str) -> Iterator[tuple[Side, Side]]:
    worker, leader = Side(postgres_url), Side(postgres_url)
    assert leader.store.take_over("leader", 1)
    yield worker, leader
    worker.store.close()
    leader.store.close()


@pytest.fixture(params=["finish", "submit", "put_cache"])
def refer(request: pytest.FixtureRequest, sides: tuple[Side, Side]) -> Refer:
    worker, _ = sides
    worker.bring()
    return Refer(worker, request.param)


def condemn(leader: Side) -> list[str]:
    return [place.sha256 for place in leader.store.condemn_blobs(ALL, epoch=1).places]


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    threads = ThreadPoolExecutor(1)
    future = threads.submit(work)
    threads.shutdown(wait=False)
    return future


def wait_for_a_waiter(postgres: PostgresService) -> None:
    """Until a connection stands before somebody's lock."""
    question = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    until(lambda: postgres.execute(question)[0][0] > 0, 20, "a connection waits for a lock")


def test_a_blob_that_is_about_to_be_referred_to_is_passed_over(sides: tuple[Side, Side], refer: Refer) -> None:
    worker, leader = sides
    with worker.store.turn():
        assert refer()
        assert condemn(leader) == []
    assert condemn(leader) == []
    assert worker.store.blob_places([BLOB]) != [None]


def test_who_comes_while_it_is_condemned_waits_and_finds_it_gone(
    sides: tuple[Side, Side], refer: Refer, postgres: PostgresService
) -> None:
    worker, leader = sides
    with leader.store.turn():
        assert condemn(leader) == [BLOB]
        referred = in_thread(refer)
        wait_for_a_waiter(postgres)
        assert not referred.done()
    assert referred.result(20) is False
    assert worker.store.blob_owners(BLOB) == []


def test_who_comes_while_it_is_condemned_has_it_if_that_is_taken_back(
    sides: tuple[Side, Side], refer: Refer, postgres: PostgresService
) -> None:
    worker, leader = sides

    def condemn_and_give_up() -> Future[Any]:
        with leader.store.turn():
            assert condemn(leader) == [BLOB]
            started.append(in_thread(refer))
            wait_for_a_waiter(postgres)
            raise RuntimeError("given up")

    started: list[Future[Any]] = []
    with pytest.raises(RuntimeError, match="given up"):
        condemn_and_give_up()
    assert started[0].result(20) is True
    assert len(worker.store.blob_owners(BLOB)) == 1


def test_a_reference_that_is_written_between_look_and_lock_is_seen(
    sides: tuple[Side, Side], refer: Refer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The race that one statement would lose: its snapshot is older than the lock it waited for."""
    worker, leader = sides
    run = PostgresSession.rows
    done: list[bool] = []

    def rows(session: PostgresSession, name: str, parameters: Any = ()) -> list[Any]:
        if name == "lock_blobs":
            done.append(refer())
        return run(session, name, parameters)

    monkeypatch.setattr(PostgresSession, "rows", rows)
    assert condemn(leader) == []
    assert done == [True]
    assert worker.store.blob_places([BLOB]) != [None]


def test_who_touches_it_between_look_and_lock_keeps_it(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    worker, leader = sides
    worker.bring()
    run = PostgresSession.rows

    def rows(session: PostgresSession, name: str, parameters: Any = ()) -> list[Any]:
        if name == "lock_blobs":
            worker.bring()
        return run(session, name, parameters)

    with worker.store.turn():
        since = worker.store.clock.wall()
    monkeypatch.setattr(PostgresSession, "rows", rows)
    assert leader.store.condemn_blobs(CondemnOrder(since), epoch=1).places == ()
    assert worker.store.blob_places([BLOB]) != [None]


def test_two_who_bring_the_same_bytes_at_once_get_one_place(sides: tuple[Side, Side], postgres: PostgresService) -> None:
    one, other = sides
    with one.store.turn():
        [first] = one.store.place_blobs([BlobClaim(BLOB, 3)])
        second = in_thread(lambda: other.store.place_blobs([BlobClaim(BLOB, 3)]))
        wait_for_a_waiter(postgres)
    assert second.result(20) == [first]


@pytest.mark.parametrize(
    ("name", "sha256", "target"),
    [("a", "cd" * 32, ">"), ("a/b", BLOB, ">"), ("A", BLOB, ">"), ("b", BLOB, "other.>")],
    ids=["other bytes", "in a folder that is a file", "without case", "other target"],
)
def test_of_two_who_put_at_once_what_cannot_be_in_one_cache_the_second_is_refused(
    sides: tuple[Side, Side], postgres: PostgresService, name: str, sha256: str, target: str
) -> None:
    one, other = sides
    one.bring()
    one.bring("cd" * 32)
    with one.store.turn():
        assert one.put("a") == CacheStored(1)
        second = in_thread(lambda: other.put(name, sha256, target))
        wait_for_a_waiter(postgres)
    assert isinstance(second.result(20), CacheConflict)
    assert other.put("a") == CacheStored(0)


def test_who_puts_while_the_cache_is_removed_puts_all_of_it_again(sides: tuple[Side, Side], postgres: PostgresService) -> None:
    one, other = sides
    one.bring()
    one.put("a")
    order = CacheOrder("c", ">", "alice", (CacheEntry("a", BLOB, 3), CacheEntry("b", BLOB, 3)))
    with one.store.turn():
        assert one.store.remove_cache([("c", ">")]) == [1]
        second = in_thread(lambda: other.store.put_cache([order]))
        wait_for_a_waiter(postgres)
    assert second.result(20) == [CacheStored(2)]


def test_who_brings_bytes_while_they_are_condemned_gets_a_new_place(sides: tuple[Side, Side], postgres: PostgresService) -> None:
    worker, leader = sides
    old = worker.bring()
    with leader.store.turn():
        assert condemn(leader) == [BLOB]
        brought = in_thread(lambda: worker.store.place_blobs([BlobClaim(BLOB, 3)]))
        wait_for_a_waiter(postgres)
    [new] = brought.result(20)
    assert new.generation > old.generation
    assert not new.stored
    assert leader.store.forget_blobs([new, old], epoch=1) == 1


def test_at_random_no_recorded_job_has_lost_its_blob(postgres_url: str, postgres: PostgresService) -> None:
    """Two servers bring, submit and finish; a third collects all it can get, as fast as it can."""
    blobs = [f"{number:064x}" for number in range(3)]
    stop = threading.Event()
    tally = {"referred": 0, "missing": 0, "condemned": 0}

    def refer_again_and_again(number: int) -> None:
        chance = random.Random(number)
        side = Side(postgres_url)
        try:
            for count in range(60):
                refer_once(side, f"job-{number}-{count}", chance)
        finally:
            side.store.close()

    def refer_once(side: Side, job_id: str, chance: random.Random) -> None:
        sha256 = chance.choice(blobs)
        report = side.running(f"{job_id}-out", sha256) if chance.random() < 0.5 else None
        try:
            if chance.random() < 0.7:
                side.bring(sha256)
            answer = (
                side.finish(report) is ReportStatus.RECORDED if report else isinstance(side.submit(job_id, sha256), Submitted)
            )
        except TurnInterrupted:  # the others were in the way: the whole turn was taken back
            return
        tally["referred" if answer else "missing"] += 1

    def collect() -> None:
        side = Side(postgres_url)
        assert side.store.take_over("leader", 1)
        with postgres.connect(postgres_url) as connection:
            while not stop.is_set() or not tally["condemned"]:  # on a busy machine the others may end first
                places = side.store.condemn_blobs(ALL, epoch=1).places
                tally["condemned"] += len(places)
                side.store.forget_blobs(places, epoch=1)
                assert connection.execute(LOST).fetchall() == [(0,)]
                connection.execute("DELETE FROM tasuki_jobblob")  # as if all were pruned: there is something to condemn again
        side.store.close()

    with ThreadPoolExecutor(3) as threads:
        collector = threads.submit(collect)
        try:
            list(threads.map(refer_again_and_again, (1, 2)))
        finally:
            stop.set()
        collector.result(20)

    assert postgres.execute(LOST, url=postgres_url) == [(0,)]
    assert min(tally.values()) > 0, f"this run tried nothing: {tally}"
    side = Side(postgres_url)
    finished = [job for job in side.store.get([f"job-1-{count}-out" for count in range(60)]) if job is not None]
    assert {job.state for job in finished} <= {State.SUCCEEDED, State.ASSIGNED}
    side.store.close()
