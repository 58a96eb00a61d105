"""A broker with routing policies: who gets a job here and elsewhere, for how long others wait, and what a policy never breaks."""

from __future__ import annotations

from typing import Any

import pytest

from tasuki.core.broker import routes
from tasuki.core.broker.events import AskRouted, ClusterView, Hinted, Publish, Query, RoutedFound
from tasuki.core.broker.routes import QUEUE_MAX, RoutedJobs
from tasuki.core.broker.subscriptions import FAILED_READ_S, HURRIED_SHARE
from tasuki.core.cluster_messages import Hint
from tasuki.core.job import InputFile
from tasuki.core.machine import Now
from tasuki.core.protocol import GiveCredit, Heartbeat, JobsFinished, Request
from tasuki.core.routing import ROUTE_WAIT_S, Ring, hash_prefix, parse_route
from tasuki.core.store_messages import BlobClaim, CacheEntry, CacheOrder
from tests.core.broker_stage import BrokerStage, ending

A_LOOK_S = 0.1


def staged(*routes: str, beside: BrokerStage | None = None, **config: Any) -> BrokerStage:
    return BrokerStage(beside, routes=tuple(map(parse_route, routes)), **config)


def got(stage: BrokerStage, conn: int) -> list[str]:
    return list(dict.fromkeys(grant.job_id for grant in stage.grants(conn)))


def roomy(stage: BrokerStage, name: str, credit: int = 0) -> int:
    return stage.worker(name, credit=credit, slots=100)


def key_of(worker_id: str, among: list[str]) -> str:
    """A key that belongs to this worker."""
    ring = Ring(among)
    return next(key for key in map(str, range(1000)) if next(ring.order(key)) == worker_id)


# ---------------------------------------------------------------------------------------------------- one server


def test_sticky_jobs_of_one_key_go_to_one_worker() -> None:
    stage = staged("session.>=sticky")
    client, workers = stage.node(), {name: roomy(stage, name, credit=20) for name in ("w1", "w2", "w3")}

    for number in range(5):
        stage.submit(client, f"job-{number}", subject="session.x", route_key=key_of("w2", list(workers)))

    assert {name: len(got(stage, conn)) for name, conn in workers.items()} == {"w1": 0, "w2": 5, "w3": 0}


def test_a_sticky_job_waits_for_its_full_worker_no_longer_than_the_wait_then_the_next_on_the_ring_gets_it() -> None:
    stage = staged("session.>=sticky")
    names = ["w1", "w2", "w3"]
    client, workers = stage.node(), {name: roomy(stage, name, credit=1) for name in names}
    key = key_of("w2", names)
    _, second, _ = Ring(names).order(key)
    stage.submit(client, "first", "later", subject="session.x", route_key=key)
    assert got(stage, workers["w2"]) == ["first"]

    stage.pass_time(ROUTE_WAIT_S - A_LOOK_S)
    assert [got(stage, workers[name]) for name in names if name != "w2"] == [[], []]
    stage.pass_time(2 * A_LOOK_S)

    assert got(stage, workers[second]) == ["later"]


def test_the_reason_of_a_choice_is_kept_for_explain() -> None:
    stage = staged("session.>=sticky")
    names = ["w1", "w2", "w3"]
    client, _ = stage.node(), [roomy(stage, name, credit=1) for name in names]
    key = key_of("w2", names)
    _, second, _ = Ring(names).order(key)
    stage.submit(client, "first", "later", subject="session.x", route_key=key)
    stage.pass_time(ROUTE_WAIT_S + A_LOOK_S)

    def reason(job_id: str) -> tuple[str, str]:
        stage.tell(client, Request(9, "explain", {"job_id": job_id}))
        query = stage.others.pop()
        assert isinstance(query, Query)
        return query.route_reason

    own = f"Its key is '{key}', which belongs to"
    assert reason("first") == ("w2", f"{own} it among the 3 workers that fit.")
    assert reason("later") == (
        second,
        f"{own} w2: that one was full for longer than the job may wait, and this is the next on the ring.",
    )
    assert reason("other") == ("", "")


def test_a_sticky_job_whose_worker_gets_room_in_time_goes_there() -> None:
    stage = staged("session.>=sticky")
    client, w1, w2 = stage.node(), roomy(stage, "w1", credit=1), roomy(stage, "w2", credit=1)
    key = key_of("w1", ["w1", "w2"])
    stage.submit(client, "first", "later", subject="session.x", route_key=key)

    stage.ask(w1, JobsFinished([ending(stage.grants(w1)[0])]))
    stage.ask(w1, GiveCredit(1))

    assert got(stage, w1) == ["first", "later"]
    assert got(stage, w2) == []


def test_round_robin_goes_around() -> None:
    stage = staged("job.>=round-robin")
    client, workers = stage.node(), [roomy(stage, f"w{number}", credit=10) for number in range(3)]

    for number in range(6):
        stage.submit(client, f"job-{number}", subject="job.x")

    assert [len(got(stage, conn)) for conn in workers] == [2, 2, 2]


def test_least_load_prefers_the_worker_with_the_calmer_host() -> None:
    stage = staged("job.>=least-load")
    client, hot, calm = stage.node(), roomy(stage, "a-hot", credit=10), roomy(stage, "calm", credit=10)
    stage.ask(hot, Heartbeat(7, cpu=0.95))
    stage.ask(calm, Heartbeat(7, cpu=0.05))

    stage.submit(client, *(f"job-{number}" for number in range(4)), subject="job.x")

    assert (len(got(stage, hot)), len(got(stage, calm))) == (0, 4)


def test_cache_affinity_follows_the_files() -> None:
    stage = staged("render.>=cache-affinity")
    client, holder, other = stage.node(), roomy(stage, "z-holder", credit=2), roomy(stage, "other", credit=9)
    scene = "ab" * 32
    places = stage.store.place_blobs([BlobClaim(scene, 100)])
    stage.store.blobs_stored(places)
    stage.store.put_cache([CacheOrder("scene", ">", "alice", (CacheEntry("a.bin", scene, 100),))])
    stage.ask(holder, Heartbeat(7, held=hash_prefix(scene)))

    stage.submit(client, "a", "b", "c", subject="render.x", files=(InputFile("a.bin", cache_id="scene"),))

    assert got(stage, holder) == ["a", "b"]
    assert got(stage, other) == []
    stage.pass_time(ROUTE_WAIT_S + A_LOOK_S)
    assert got(stage, other) == ["c"]


def test_credit_for_what_is_sent_ahead_is_no_free_place() -> None:
    stage = staged("session.>=sticky")
    client, names = stage.node(), ["w1", "w2"]
    first, second = (stage.worker(name, credit=5, slots=1) for name in names)

    stage.submit(client, "a", "b", subject="session.x", route_key=key_of("w1", names))
    assert (got(stage, first), got(stage, second)) == (["a"], [])
    stage.pass_time(ROUTE_WAIT_S)

    assert (got(stage, first), got(stage, second)) == (["a"], ["b"])


def test_jobs_without_a_route_go_as_ever() -> None:
    stage = staged("session.>=sticky")
    client, worker = stage.node(), roomy(stage, "w1", credit=5)

    stage.submit(client, "plain", subject="other.x")

    assert got(stage, worker) == ["plain"]


def test_priority_decides_between_routed_and_other_jobs() -> None:
    stage = staged("session.>=sticky")
    client, worker = stage.node(), roomy(stage, "w1")
    stage.submit(client, "routed-low", subject="session.x", priority=3)
    stage.submit(client, "plain-mid", subject="other.x", priority=5)
    stage.submit(client, "routed-high", subject="session.x", priority=9)

    for _ in range(3):
        stage.ask(worker, GiveCredit(1))

    assert got(stage, worker) == ["routed-high", "plain-mid", "routed-low"]


def test_groups_share_fairly_also_if_one_is_routed() -> None:
    stage = staged("session.>=sticky")
    client, worker = stage.node(), roomy(stage, "w1")
    stage.submit(client, *(f"r{number}" for number in range(8)), subject="session.x")
    stage.submit(client, *(f"p{number}" for number in range(8)), subject="other.x")

    stage.ask(worker, GiveCredit(6))

    assert sorted(name[0] for name in got(stage, worker)) == list("ppprrr")


def test_never_more_is_granted_than_credit_was_given() -> None:
    stage = staged(">=least-load")
    client, workers = stage.node(), [roomy(stage, f"w{number}", credit=2) for number in range(3)]

    stage.submit(client, *(f"job-{number}" for number in range(20)), subject="job.x")
    stage.pass_time(ROUTE_WAIT_S * 3)

    assert [len(got(stage, conn)) for conn in workers] == [2, 2, 2]


def test_a_retry_and_a_backlog_longer_than_is_known_are_found() -> None:
    stage = staged("session.>=sticky")
    client = stage.node()
    stage.submit(client, *(f"job-{number:03}" for number in range(100)), subject="session.x")
    worker = roomy(stage, "w1")

    for _ in range(20):
        stage.ask(worker, GiveCredit(7))
        stage.pass_time(A_LOOK_S)

    assert got(stage, worker) == [f"job-{number:03}" for number in range(100)]


def reads_asked(stage: BrokerStage) -> list[AskRouted]:
    """Take the reads that were asked for and are not answered."""
    asks = [command for command in stage.others if isinstance(command, AskRouted)]
    stage.others = [command for command in stage.others if not isinstance(command, AskRouted)]
    return asks


@pytest.fixture
def reading() -> tuple[BrokerStage, int]:
    """A stage and its worker, which has got all jobs that are known; one more is being read."""
    stage = staged("session.>=sticky")
    client, worker = stage.node(), roomy(stage, "w1")
    stage.submit(client, *(f"job-{number:03}" for number in range(QUEUE_MAX + 1)), subject="session.x")
    stage.walks = False
    stage.ask(worker, GiveCredit(QUEUE_MAX + 1))
    stage.pass_time(A_LOOK_S)
    assert len(got(stage, worker)) == QUEUE_MAX
    assert [ask.subjects for ask in reads_asked(stage)] == [("session.x",)]
    return stage, worker


def test_a_read_that_failed_is_tried_again(reading: tuple[BrokerStage, int]) -> None:
    stage, worker = reading
    stage.apply(RoutedFound(None))
    stage.walks = True

    stage.pass_time(FAILED_READ_S)

    assert len(got(stage, worker)) == QUEUE_MAX + 1


def test_a_read_that_takes_long_is_not_asked_for_twice(reading: tuple[BrokerStage, int]) -> None:
    stage, _ = reading

    for _ in range(8):
        stage.pass_time(1.0)
        stage.broker.routed.note("session.x")

    assert reads_asked(stage) == []


def test_reads_that_take_long_leave_others_half_of_the_readers_time() -> None:
    routed, now_s, read_s = RoutedJobs((parse_route("session.>=sticky"),), ROUTE_WAIT_S, lambda _: []), 0.0, 0.0

    while now_s < 300.0:
        now_s += 0.01
        routed.note("session.x")
        if routed.next_read(Now(now_s, 0.0)):
            now_s += 1.0
            read_s += 1.0
            routed.read([], Now(now_s, 0.0))

    assert 0.0 < read_s / now_s <= HURRIED_SHARE + 0.01


def test_jobs_that_nobody_can_run_do_not_stand_before_others() -> None:
    stage = staged(">=sticky")
    client, worker = stage.node(), stage.worker("w1", execs=("good",), takes="commands")
    for number in range(40):
        stage.submit(client, *(f"bad-{number}-{place}" for place in range(40)), subject="session.x", exec=f"bad-{number}")
    stage.submit(client, "good", subject="session.x", exec="good")

    stage.ask(worker, GiveCredit(1))
    stage.pass_time(2.0)

    assert got(stage, worker) == ["good"]


# ---------------------------------------------------------------------------------------------------- many jobs


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions of policies that were called for a job."""
    called: list[str] = []

    def counted(name: str) -> None:
        function = getattr(routes, name)
        monkeypatch.setattr(routes, name, lambda *args, **options: called.append(name) or function(*args, **options))

    counted("choose")
    counted("preferred")
    return called


def test_a_turn_looks_at_no_more_jobs_than_it_can_grant_however_many_wait(looks: list[str]) -> None:
    # given: a worker with room, and many jobs that wait for another one
    stage = staged("session.>=sticky")
    client, free, full = stage.node(), roomy(stage, "w1", credit=50), roomy(stage, "w2")
    key = key_of("w2", ["w1", "w2"])
    for subject in range(40):
        stage.submit(client, *(f"job-{subject}-{place}" for place in range(30)), subject=f"session.{subject}", route_key=key)
    stage.pass_time(A_LOOK_S)
    looks.clear()

    # when: the next turns look for work
    for _ in range(5):
        stage.ask(free, GiveCredit(1))
        stage.pass_time(A_LOOK_S / 10)

    # then: none of them is looked at, until its worker has room
    assert looks == []
    stage.ask(full, GiveCredit(1))
    assert looks.count("choose") == 1
    assert got(stage, full) == ["job-0-0"]


def test_without_free_credit_no_job_is_looked_at(looks: list[str]) -> None:
    stage = staged(">=least-load")
    client, worker = stage.node(), roomy(stage, "w1", credit=1)
    stage.submit(client, *(f"job-{place}" for place in range(30)), subject="job.x")
    assert got(stage, worker) == ["job-0"]
    looks.clear()

    for _ in range(5):
        stage.pass_time(A_LOOK_S)
    assert looks == []
    stage.ask(worker, GiveCredit(3))

    assert looks.count("choose") == 3
    assert got(stage, worker) == ["job-0", "job-1", "job-2", "job-3"]


def test_jobs_that_wait_are_sorted_some_in_each_turn_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MOVED_PER_TURN", 10)
    stage = staged("session.>=sticky")
    client, names = stage.node(), ["w1", "w2"]
    free, full = (roomy(stage, name) for name in names)
    for subject in ("session.x", "session.y"):
        key = key_of("w2", names)
        stage.submit(client, *(f"{subject}-{place}" for place in range(30)), subject=subject, route_key=key, priority=9)
    stage.submit(client, "last", subject="session.z", route_key=key_of("w1", names))

    stage.ask(free, GiveCredit(1))
    assert got(stage, free) == []
    for _ in range(6):
        stage.pass_time(A_LOOK_S)

    assert (got(stage, free), got(stage, full)) == (["last"], [])


def test_of_jobs_that_wait_for_a_worker_the_highest_priority_goes_first_then_the_oldest() -> None:
    stage = staged("session.>=sticky")
    client, names = stage.node(), ["w1", "w2"]
    roomy(stage, "w1", credit=9)
    full, key = roomy(stage, "w2"), key_of("w2", names)
    stage.submit(client, "old", subject="session.x", route_key=key)
    stage.submit(client, "young", subject="session.a", route_key=key)
    stage.submit(client, "urgent", subject="session.y", route_key=key, priority=9)

    for _ in range(3):
        stage.pass_time(A_LOOK_S)
        stage.ask(full, GiveCredit(1))

    assert got(stage, full) == ["urgent", "old", "young"]


def test_jobs_that_wait_for_a_worker_go_to_others_as_soon_as_it_leaves() -> None:
    stage = staged("session.>=sticky")
    client, free, full = stage.node(), roomy(stage, "w1", credit=9), roomy(stage, "w2")
    stage.submit(client, "a", "b", subject="session.x", route_key=key_of("w2", ["w1", "w2"]))
    assert got(stage, free) == []

    stage.close(full)
    stage.pass_time(A_LOOK_S)

    assert got(stage, free) == ["a", "b"]


def test_a_job_for_a_worker_that_was_detached_is_found_when_it_is_back() -> None:
    stage = staged("session.>=sticky")
    client, worker = stage.node(), roomy(stage, "w1", credit=1)
    stage.apply(ClusterView((stage.broker.info,), detached=frozenset({"w1"})))
    stage.submit(client, "a", subject="session.x")
    stage.pass_time(A_LOOK_S)
    assert got(stage, worker) == []

    stage.apply(ClusterView((stage.broker.info,)))
    stage.turns()
    stage.pass_time(A_LOOK_S)

    assert got(stage, worker) == ["a"]


def test_a_job_that_becomes_known_late_has_waited_since_it_was_ready() -> None:
    stage = staged("session.>=sticky")
    client, free = stage.node(), roomy(stage, "w1", credit=99)
    roomy(stage, "w2")
    many = [f"job-{place:02}" for place in range(3 * routes.QUEUE_MAX)]
    stage.submit(client, *many, subject="session.x", route_key=key_of("w2", ["w1", "w2"]))
    assert got(stage, free) == []

    stage.pass_time(ROUTE_WAIT_S + A_LOOK_S)
    stage.pass_time(A_LOOK_S)

    assert got(stage, free) == many


def test_the_oldest_reasons_and_choices_are_dropped_and_the_others_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "REASONS_KEPT", 2)
    monkeypatch.setattr(routes, "CHOICES_KEPT", 2)
    stage = staged("session.>=sticky")
    client, names = stage.node(), ["w1", "w2"]
    first, second = (roomy(stage, name, credit=9) for name in names)

    stage.apply(Hinted(Hint(server_id="other", routed=(("a", "w2"), ("b", "w2"), ("c", "w2")))))
    for job_id in ("a", "b", "c", "d", "e"):
        stage.submit(client, job_id, subject="session.x", route_key=key_of("w1", names))

    assert (got(stage, first), got(stage, second)) == (["a", "d", "e"], ["b", "c"])
    assert [stage.broker.routed.reason(job_id)[0] for job_id in "ade"] == ["", "w1", "w1"]


# ---------------------------------------------------------------------------------------------------- several servers


class Pair:
    """Two servers with one store; the test carries their hints and tells each of the other."""

    def __init__(self, *routes: str) -> None:
        self.first = staged(*routes, server_id="first", shared=True)
        self.second = staged(beside=self.first, server_id="second", shared=True)  # it learns the routes from the other

    def meet(self) -> None:
        infos = (self.first.broker.info, self.second.broker.info)
        for stage in (self.first, self.second):
            stage.apply(ClusterView(infos))
            stage.turns()

    def hints(self) -> None:
        for stage, other in ((self.first, self.second), (self.second, self.first)):
            told, stage.others = stage.others, []
            for command in told:
                if isinstance(command, Publish):
                    other.apply(Hinted(command.hint))
            other.turns()


@pytest.fixture
def sticky() -> Pair:
    return Pair("session.>=sticky")


def test_a_job_reaches_its_worker_at_another_server(sticky: Pair) -> None:
    client, here, there = sticky.first.node(), roomy(sticky.first, "w1", credit=5), roomy(sticky.second, "w2", credit=5)
    sticky.meet()

    sticky.first.submit(client, "a", subject="session.x", route_key=key_of("w2", ["w1", "w2"]))
    assert got(sticky.first, here) == []
    sticky.hints()

    assert got(sticky.second, there) == ["a"]


def test_a_worker_at_another_server_does_not_take_what_is_for_one_here(sticky: Pair) -> None:
    client, here, there = sticky.first.node(), roomy(sticky.first, "w1", credit=5), roomy(sticky.second, "w2")
    sticky.meet()
    key = key_of("w1", ["w1", "w2"])
    sticky.first.submit(client, *(f"job-{number}" for number in range(9)), subject="session.x", route_key=key)
    sticky.hints()

    sticky.second.ask(there, GiveCredit(5))

    assert len(got(sticky.first, here)) == 5
    assert got(sticky.second, there) == []


def test_a_job_that_another_server_does_not_take_is_taken_here_after_the_wait(sticky: Pair) -> None:
    client, here = sticky.first.node(), roomy(sticky.first, "w1", credit=5)
    roomy(sticky.second, "w2", credit=5)
    sticky.meet()

    sticky.first.submit(client, "a", subject="session.x", route_key=key_of("w2", ["w1", "w2"]))
    sticky.first.pass_time(ROUTE_WAIT_S - A_LOOK_S)  # the second server hears nothing
    assert got(sticky.first, here) == []
    sticky.first.pass_time(2 * A_LOOK_S)
    sticky.first.pass_time(A_LOOK_S)

    assert got(sticky.first, here) == ["a"]


def test_turns_go_around_all_servers() -> None:
    pair = Pair(">=round-robin")
    client, here, there = pair.first.node(), roomy(pair.first, "w1", credit=9), roomy(pair.second, "w2", credit=9)
    pair.meet()

    for number in range(8):
        pair.first.submit(client, f"job-{number}", subject="job.x")
        pair.hints()

    assert (len(got(pair.first, here)), len(got(pair.second, there))) == (4, 4)
