"""Counts of a server's turns and messages, by group: when they are written, and what can be asked of them."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tasuki.blobs.folder import FolderBlobs
from tasuki.clocks import now
from tasuki.core.access import Identity, PeerKind
from tasuki.core.broker.events import Query
from tasuki.core.job import InputFile, JobSpec, Outcome, State
from tasuki.core.machine import Now
from tasuki.core.protocol import (
    Accepted,
    AssignJobs,
    Ending,
    GiveCredit,
    JobsFinished,
    JobsRecorded,
    PublishedMessage,
    PublishMessages,
    Reply,
    Request,
    SubmitJobs,
)
from tasuki.core.statistics import (
    LATENCIES_S,
    OTHER_GROUPS,
    ROLLUP_GROUPS_MAX,
    ROLLUP_S,
    UNKNOWN_GROUP,
    GroupCounts,
    GroupStatistics,
    QueueLength,
    Rollup,
    periods,
)
from tasuki.core.store_messages import (
    Answers,
    Canceled,
    FiredRun,
    FiredRuns,
    Grant,
    LateJob,
    LeaseRequest,
    Reaped,
    Report,
    ReportAnswer,
    ReportStatus,
    Requeued,
    Submission,
    Submitted,
    Turn,
)
from tasuki.core.subject import DEFAULT_SUBJECT, group_of
from tasuki.errors import Forbidden, InvalidInput, TooLarge, Unavailable
from tasuki.server.queries import answer_query
from tasuki.server.server import Server, ServerConfig
from tasuki.server.statistics import GROUPS_MAX, REMEMBERED_MAX, Statistics
from tasuki.stores.common import SystemClock
from tasuki.stores.memory.store import MemoryStore
from tests.server.peers import client, worker
from tests.support.waiting import until_async

WALL = 1_767_225_600.0
ADMIN = Identity(PeerKind.ADMIN, "token:root", (), "root")


class Turns(Statistics):
    """Statistics, and turns as the server would tell of them."""

    def submit(self, *job_ids: str, subject: str = "a.b", at: float = 0.0, **fields: Any) -> None:
        specs = [JobSpec(job_id=job_id, subject=subject, **fields) for job_id in job_ids]
        turn = Turn(submit=[Submission(spec, "alice", b"") for spec in specs])
        self.turn(turn, Answers(submit=[Submitted(job_id, True) for job_id in job_ids]), Now(at, WALL + at))

    def fail(self, job_id: str, *answers: ReportAnswer) -> None:
        reports = [Report(job_id, "w", "l", 1, Outcome(error_code="EXIT_CODE"))] * len(answers)
        self.turn(Turn(fail=reports), Answers(fail=list(answers)), Now(1.0, WALL + 1.0))

    def lease(self, job_id: str, *, spec: bytes = b"\x80", at: float = 0.0, attempt: int = 1, submitter: str = "alice") -> None:
        turn = Turn(lease=[LeaseRequest(worker_id="w", incarnation="i")])
        self.turn(turn, Answers(lease=[[Grant(job_id, spec, submitter, "l", attempt, 15.0)]]), Now(at, WALL + at))

    def finish(self, job_id: str, *answers: ReportAnswer) -> None:
        reports = [Report(job_id, "w", "l", 1, Outcome())] * len(answers)
        self.turn(Turn(finish=reports), Answers(finish=list(answers)), Now(1.0, WALL + 1.0))

    def of(self, group: str = "a") -> GroupStatistics:
        return self.totals().get(group, GroupStatistics())


def test_delivery_is_measured_from_the_submit_to_the_first_lease() -> None:
    turns = Turns()
    turns.submit("j", at=10.0)
    turns.lease("j", at=12.0)
    turns.lease("j", at=500.0, attempt=2)

    assert (turns.of().delivery_s, sum(turns.of().delivery.values())) == (2.0, 1)
    assert (turns.of().leased, turns.of().redelivered) == (2, 1)


def test_the_lag_of_a_scheduled_run_is_from_its_nominal_time_to_its_first_lease() -> None:
    turns = Turns()
    turns.lease(f"d7-{WALL:.0f}", at=90.0)
    turns.lease(f"d7-{WALL:.0f}", at=500.0, attempt=2)
    turns.lease(f"d8-{WALL + 60:.0f}", at=50.0)  # ahead of its time
    turns.lease("e9-7", at=70.0)

    found = turns.of(group_of(DEFAULT_SUBJECT))
    assert (found.firing_s, found.firing) == (90.0, {0: 1, bisect_left(LATENCIES_S, 90.0): 1})
    assert found.view()["firing_p99_s"] > 60.0


def test_a_run_that_is_skipped_when_it_is_fired_is_counted() -> None:
    turns = Turns()
    runs = (FiredRun("d7-1", 7, 1.0, State.SKIPPED, "a"), FiredRun("d7-2", 7, 2.0, group="a"))
    replaced = (("d7-0", Canceled(State.CANCELED, group="a")), ("d7-9", Canceled(State.RUNNING, requested=True)))

    turns.turn(Turn(epoch=1), Answers(fire=FiredRuns(runs, replaced)), Now(1.0, WALL + 1.0))

    assert (turns.of().skipped, turns.of().canceled) == (1, 1)


def test_a_job_that_was_not_to_start_at_once_is_not_measured() -> None:
    turns = Turns()
    turns.submit("j", not_before=1e10)
    turns.lease("j", at=500.0)

    assert turns.of().delivery == {}


@pytest.mark.parametrize(("state", "retried", "dead"), [(State.PENDING, 1, 0), (State.ORPHANED, 1, 0), (State.FAILED, 0, 1)])
def test_a_lost_attempt_is_followed_by_another_or_by_the_end(state: State, retried: int, dead: int) -> None:
    turns = Turns()
    turns.submit("j")

    turns.turn(Turn(epoch=1, reap=9), Answers(reap=[Reaped("j", state, "w", 1, "silent", "a")]), Now(1.0, WALL + 1.0))

    assert (turns.of().attempts_lost, turns.of().retried_lost, turns.of().dead) == (1, retried, dead)


def test_a_job_that_another_server_stored_and_leased_is_counted_for_its_group() -> None:
    turns = Turns()

    turns.finish("theirs", ReportAnswer(ReportStatus.RECORDED, State.SUCCEEDED, group="a"))
    turns.fail("dead", ReportAnswer(ReportStatus.RECORDED, State.TIMED_OUT, group="a"))
    turns.fail("tried", ReportAnswer(ReportStatus.RECORDED, State.PENDING, group="a"))
    turns.fail("late", ReportAnswer(ReportStatus.FENCED, State.SUCCEEDED, group="a"))
    reaped = [Reaped("lost", State.FAILED, "w", 1, "silent", "a")]
    turns.turn(Turn(epoch=1), Answers(reap=reaped, skip=[LateJob("skipped", "a")]), Now(1.0, WALL + 1.0))
    canceled = [Canceled(State.CANCELED, group="a"), Canceled(State.CANCELED)]  # the second ended before
    turns.turn(Turn(cancel=[("c", "x", "")] * 2), Answers(cancel=canceled), Now(1.0, WALL + 1.0))
    turns.turn(Turn(), Answers(requeue=[Requeued(True, State.PENDING, group="a")]), Now(1.0, WALL + 1.0))

    counts = {"succeeded": 1, "failed": 1, "timed_out": 1, "skipped": 1, "canceled": 1, "fenced": 1, "requeued": 1}
    attempts = {"attempts_failed": 2, "attempts_lost": 1, "retried_failed": 1, "dead": 2, "finished": 5}
    assert turns.of().view() == counts | attempts
    assert set(turns.totals()) == {"a"}


def test_a_fenced_report_on_a_job_that_is_not_there_has_no_group() -> None:
    turns = Turns()

    turns.finish("pruned", ReportAnswer(ReportStatus.FENCED, None))

    assert turns.of(UNKNOWN_GROUP).fenced == 1


def test_a_refused_and_a_repeated_report_end_nothing() -> None:
    turns = Turns()
    turns.submit("j")

    turns.finish(
        "j", ReportAnswer(ReportStatus.FENCED, State.RUNNING, group="a"), ReportAnswer(ReportStatus.REPEATED, State.SUCCEEDED)
    )

    assert (turns.of().fenced, turns.of().finished) == (1, 0)


@pytest.mark.parametrize(("submitter", "counted"), [("django", 1), ("definition:3", 1), ("app:zpe", 1), ("token:alice", 0)])
def test_a_job_that_no_server_stored_is_counted_as_submitted_when_it_is_first_leased(submitter: str, counted: int) -> None:
    turns = Turns()
    spec = msgspec.msgpack.encode({"subject": "a.b"})

    turns.lease("j", spec=spec, submitter=submitter)
    turns.lease("j", spec=spec, submitter=submitter, attempt=2)

    assert (turns.of().submitted, turns.of().leased) == (counted, 2)


def test_an_input_from_a_cache_is_a_hit_unless_its_worker_fetches_it() -> None:
    turns = Turns()
    files = (InputFile("a", sha256="1", size_bytes=10, cache=("c", "a")), InputFile("b", sha256="2", size_bytes=5, cache_id="c"))
    turns.submit("j", files=(*files, InputFile("own", sha256="3", size_bytes=1000)))
    turns.lease("j")

    turns.fetched("j", "1")
    turns.fetched("j", "3")

    counted = turns.of()
    assert (counted.cache_inputs, counted.cache_fetches, counted.cache_hits, counted.saved_bytes) == (2, 1, 1, 5)


def test_only_the_first_groups_have_a_name_among_the_totals() -> None:
    turns = Turns()
    for number in range(ROLLUP_GROUPS_MAX + 3):
        turns.submit(f"j{number}", subject=f"g{number}.x")

    assert turns.of(f"g{ROLLUP_GROUPS_MAX - 1}").submitted == 1
    assert turns.of(OTHER_GROUPS).submitted == 3


def test_a_rollup_has_the_busiest_groups_and_begins_anew() -> None:
    turns = Turns()
    for number in range(GROUPS_MAX + 5):
        turns.submit(f"j{number}", subject=f"g{number}.x")
    turns.submit(*(f"k{number}" for number in range(9)), subject="g777.x")
    lengths = {"g1": GroupCounts(pending=2, orphaned=1, active=4, failed=7), "g2": GroupCounts(succeeded=3)}

    rollup = turns.rollup(60, "s", lengths)

    assert rollup is not None
    assert next(iter(rollup.groups.items())) == ("g777", GroupStatistics(submitted=10))
    assert len(rollup.groups) == ROLLUP_GROUPS_MAX + 1
    assert sum(counted.submitted for counted in rollup.groups.values()) == GROUPS_MAX + 14
    assert rollup.queues == {"g1": QueueLength(3, 4)}
    assert turns.rollup(120, "s", {}) is None
    assert sum(counted.submitted for counted in turns.totals().values()) == GROUPS_MAX + 14


def test_a_job_costs_the_same_however_many_were_counted_before() -> None:
    turns = Turns()

    def seconds_for(first: int) -> float:
        began = time.process_time()
        turns.submit(*(f"job-{number}" for number in range(first, first + REMEMBERED_MAX // 2)))
        return time.process_time() - began

    times = [seconds_for(step * REMEMBERED_MAX // 2) for step in range(4)]

    assert max(times[2:]) < 5 * max(times[:2])  # a walk over those that were forgotten would take twenty times as long


def test_what_is_remembered_of_waiting_jobs_is_bounded() -> None:
    turns = Turns()
    turns.submit(*(f"j{number}" for number in range(REMEMBERED_MAX + 1)))

    for job_id in ("j1", "j0"):
        turns.lease(job_id)

    assert sum(turns.of().delivery.values()) == 1, "of the oldest it is not known when it was stored"


# -- sums ----------------------------------------------------------------------------------------------------------


def counted(*latencies_s: float, **counts: int) -> GroupStatistics:
    buckets = Counter(bisect_left(LATENCIES_S, latency_s) for latency_s in latencies_s)
    return GroupStatistics(**counts, delivery_s=sum(latencies_s), delivery=dict(buckets))


def test_latencies_are_told_as_well_as_the_buckets_know_them() -> None:
    many = counted(*[0.004] * 98, 0.9, 100_000.0)

    assert 0.0025 <= (many.latency_s(0.5) or 0) <= 0.005
    assert 0.5 <= (many.latency_s(0.985) or 0) <= 1.0
    assert many.latency_s(1.0) == 7200.0
    assert GroupStatistics().latency_s(0.5) is None


def test_periods_add_up_servers_and_minutes_and_have_the_last_queue_lengths() -> None:
    rollups = [
        Rollup(60, "a", {"g": counted(0.1, submitted=1)}, {"g": QueueLength(9, 9)}),
        Rollup(60, "b", {"g": counted(0.2, submitted=2), "h": counted(submitted=3)}),
        Rollup(120, "a", {"g": counted(0.3, submitted=4)}, {"g": QueueLength(1, 2)}),
        Rollup(300, "a", {"g": counted(submitted=5)}),
    ]

    first, second = periods(rollups, 180, begin=60)

    assert (first.at, second.at) == (60, 240)
    assert first.groups == {"g": counted(0.1, 0.2, 0.3, submitted=7), "h": counted(submitted=3)}
    assert (first.queues, second.queues) == ({"g": QueueLength(1, 2)}, {})


# -- the request -----------------------------------------------------------------------------------------------------


def ask(store: MemoryStore, *, who: Identity = ADMIN, current: Rollup | None = None, **params: Any) -> Any:
    return answer_query(store, Query(1, 1, "statistics", params, who, []), current)


def stored(*rollups: Rollup) -> MemoryStore:
    store = MemoryStore(SystemClock())
    store.add_rollups(rollups)
    return store


def test_a_range_is_answered_in_steps_with_what_the_server_has_not_written_yet() -> None:
    store = stored(Rollup(600, "a", {"g": counted(0.1, submitted=2, failed=1)}, {"g": QueueLength(3, 1)}))
    current = Rollup(660, "a", {"g": counted(submitted=5)})

    answer = ask(store, since=630, until=661, step_s=60, current=current)

    [first, second] = answer["periods"]
    assert (first["at"], second["at"]) == (600, 660)
    shown = {"submitted": 2, "failed": 1, "finished": 1, "dead": 1}
    assert shown.items() <= first["groups"]["g"].items()
    assert 0.05 <= first["groups"]["g"]["latency_p99_s"] <= 0.1
    assert first["queues"] == {"g": {"queued": 3, "running": 1}}
    assert second["groups"] == {"g": {"submitted": 5}}


def test_without_a_range_the_last_quarter_of_an_hour_is_one_period() -> None:
    minute = int(time.time()) // 60 * 60
    store = stored(Rollup(minute, "a", {"g": counted(submitted=1)}), Rollup(minute - 600, "a", {"g": counted(submitted=1)}))
    store.add_rollups([Rollup(minute - 3600, "a", {"g": counted(submitted=1)})])

    [period] = ask(store)["periods"]

    assert period["groups"] == {"g": {"submitted": 2}}


def test_groups_beyond_the_limit_are_one_in_every_period() -> None:
    groups = {f"g{number}": counted(submitted=number) for number in range(1, 6)}
    store = stored(Rollup(600, "a", groups, dict.fromkeys(groups, QueueLength(1, 0))), Rollup(660, "a", {"g5": groups["g5"]}))

    first, second = ask(store, since=600, until=700, step_s=60, limit=2)["periods"]

    assert {group: one["submitted"] for group, one in first["groups"].items()} == {"g4": 4, "g5": 5, OTHER_GROUPS: 6}
    assert first["queues"][OTHER_GROUPS] == {"queued": 3, "running": 0}
    assert list(second["groups"]) == ["g5"]


def test_a_question_that_asks_for_too_much_or_too_little_is_refused() -> None:
    store = stored(Rollup(600, "a", {"g": counted(submitted=1)}))
    wrong: list[dict[str, Any]] = [
        {"since": 600, "until": 600},
        {"since": 0, "until": 10_000_000, "step_s": 60},
        {"step_s": 90},
        {"step_s": 0},
        {"limit": 0},
        {"since": "yesterday"},
        {"group": "g"},
    ]
    for params in wrong:
        with pytest.raises(InvalidInput, match="statistics"):
            ask(store, **params)
    with pytest.raises(Forbidden):
        ask(store, who=Identity(PeerKind.CLIENT, "token:alice", (), "alice"))


def test_an_answer_that_fits_no_frame_says_how_to_ask_for_less() -> None:
    groups = {f"{number:0100}": counted(submitted=1) for number in range(100)}
    store = stored(*(Rollup(60 * minute, "a", groups) for minute in range(600)))

    with pytest.raises(TooLarge, match="longer steps"):
        ask(store, since=0, until=36_000, step_s=60)

    assert len(ask(store, since=0, until=36_000, step_s=600)["periods"]) == 60


# -- a server --------------------------------------------------------------------------------------------------------


class Clock:
    """The clock of a server, which a test can set ahead."""

    ahead_s = 0.0

    def now(self) -> Now:
        return Now(now().monotonic, now().wall + self.ahead_s)


def serve(tmp_path: Path, store: MemoryStore, work: Callable[[Server, Clock], Awaitable[None]]) -> None:
    async def main() -> None:
        blobs = FolderBlobs(tmp_path / "blobs", max_blob_bytes=10**6, floor_free_bytes=0)
        config = ServerConfig(server_id="test", data=tmp_path, disk_floor_bytes=0, disk_floor_inodes=0)
        server, clock = Server(config, lambda: store, lambda: store, blobs), Clock()
        server.now = clock.now  # type: ignore[method-assign]
        await server.start()
        try:
            await work(server, clock)
        finally:
            await server.stop()

    asyncio.run(main())


async def run_job(server: Server, *waiting: str) -> None:
    """Run one job of the group a, and leave others of b waiting."""
    (mine, link), (its, runner) = await client(server), await worker(server)
    server.received(its, GiveCredit(1))
    server.received(mine, SubmitJobs(5, [JobSpec(job_id="ran", subject="a.x")]))
    [grant] = (await runner.wait_for(AssignJobs)).grants
    server.received(its, JobsFinished([Ending("ran", grant.lease_id, grant.attempt, Outcome())]))
    await runner.wait_for(JobsRecorded)
    server.received(mine, SubmitJobs(6, [JobSpec(job_id=job_id, subject="b.x") for job_id in waiting]))
    await link.wait_for(Accepted, 2)


def all_rollups(store: MemoryStore) -> list[Rollup]:
    return store.rollups(0, 1 << 40)


def test_after_each_minute_the_server_writes_what_it_counted_with_the_queue_lengths(tmp_path: Path) -> None:
    store = MemoryStore(SystemClock())

    async def work(server: Server, clock: Clock) -> None:
        began = now().wall // ROLLUP_S * ROLLUP_S
        await run_job(server, "w1", "w2")
        clock.ahead_s = ROLLUP_S
        await until_async(lambda: all_rollups(store))
        [rollup] = all_rollups(store)
        assert (rollup.server_id, began <= rollup.minute) == ("test", True)
        ran = rollup.groups["a"]
        assert (ran.submitted, ran.leased, ran.succeeded, sum(ran.delivery.values())) == (1, 1, 1, 1)
        assert (rollup.groups["b"].submitted, rollup.queues) == (2, {"b": QueueLength(2, 0)})

    serve(tmp_path, store, work)
    assert len(all_rollups(store)) == 1, "nothing happened after it, and nothing is written of that"


def test_a_server_that_stops_writes_what_it_counted(tmp_path: Path) -> None:
    store = MemoryStore(SystemClock())

    async def work(server: Server, clock: Clock) -> None:
        await run_job(server)

    serve(tmp_path, store, work)

    [rollup] = all_rollups(store)
    assert rollup.groups["a"].succeeded == 1


class AwayStore(MemoryStore):
    """A store that does not take rollups for a while."""

    refusals = 0
    away = True

    def add_rollups(self, rollups: Any) -> list[None]:
        if self.away:
            self.refusals += 1
            raise Unavailable("the database is away")
        return super().add_rollups(rollups)


def test_a_rollup_that_the_store_did_not_take_is_written_when_it_does(tmp_path: Path) -> None:
    store = AwayStore(SystemClock())

    async def work(server: Server, clock: Clock) -> None:
        await run_job(server)
        clock.ahead_s = ROLLUP_S
        await until_async(lambda: store.refusals)
        store.away = False
        await until_async(lambda: all_rollups(store))

    serve(tmp_path, store, work)
    assert [one.groups["a"].succeeded for one in all_rollups(store)] == [1]


def test_messages_are_counted_by_the_group_of_their_subject(tmp_path: Path) -> None:
    async def work(server: Server, clock: Clock) -> None:
        conn, link = await client(server)
        server.received(conn, Request(7, "subscribe", {"pattern": "prices.>"}))
        await link.wait_for(Reply)
        link.deliver = lambda message: None  # type: ignore[attr-defined]
        link.undelivered_bytes = 0  # type: ignore[attr-defined]
        items = [PublishedMessage(subject, b"") for subject in ("prices.a", "prices.b", "news.c", "not a subject")]
        server.received(conn, PublishMessages(8, items))
        await until_async(lambda: "prices" in server.statistics.totals() and not server.broker.published)
        totals = server.statistics.totals()
        assert (totals["prices"].published, totals["prices"].deliveries) == (2, 2)
        assert (totals["news"].published, totals["news"].deliveries) == (1, 0)
        assert set(totals) == {"prices", "news"}

    serve(tmp_path, MemoryStore(SystemClock()), work)
