"""For what the broker asks the store: for what became ready since a worker looked, and never again for what is not there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tasuki.core.broker.events import AskReady, ReadyFound, TurnDone
from tasuki.core.broker.state import CHOICE_MIN
from tasuki.core.broker.subscriptions import (
    FAILED_READ_S,
    HURRIED_SHARE,
    NOTED_MAX,
    PAGE_QUEUES,
    SLOW_SHARE,
    ReadyWalk,
)
from tasuki.core.job import JobSpec, body_hash
from tasuki.core.machine import Now, Ticked
from tasuki.core.protocol import GiveCredit, SubmitJobs
from tasuki.core.store_messages import LeaseRequest, Offer, ReadyPage, Submission, Takes
from tasuki.stores.batching import execute
from tests.core.broker_stage import BrokerStage


@pytest.fixture
def stage() -> BrokerStage:
    return BrokerStage()


def add(stage: BrokerStage, *subjects: str) -> None:
    """Store jobs of which no turn and no hint tells this server."""
    specs = [JobSpec(job_id=f"job-{subject}", subject=subject) for subject in subjects]
    stage.store.submit([Submission(spec, "elsewhere", body_hash(spec)) for spec in specs])


def flood(stage: BrokerStage, count: int) -> None:
    add(stage, *(f"render.{number:05}.gpu" for number in range(count)))


def asked(stage: BrokerStage) -> Iterator[LeaseRequest]:
    """Do all turns, and yield their lease requests."""
    while (turn := stage.broker.next_turn(stage.now())) is not None:
        yield from turn.lease
        stage.apply(TurnDone(turn, execute(stage.store, turn)))


def subjects_of(stage: BrokerStage, conn: int) -> list[str]:
    return [grant.job_id.removeprefix("job-") for grant in stage.grants(conn)]


def test_a_worker_whose_patterns_match_nothing_that_waits_asks_no_more(stage: BrokerStage) -> None:
    flood(stage, 50)
    stage.worker("w1", credit=1, patterns=("render.*.cpu",))
    list(asked(stage))

    for _ in range(30):
        stage.clock.advance(1.0)
        stage.apply(Ticked())
        assert list(asked(stage)) == []


def test_a_worker_asks_for_the_subject_that_became_ready_and_for_no_other(stage: BrokerStage) -> None:
    client, _ = stage.node(), stage.worker("w1", credit=2, patterns=("render.*.cpu", "other.>"))
    list(asked(stage))

    stage.tell(client, SubmitJobs(1, [JobSpec(job_id="a", subject="render.7.cpu"), JobSpec(job_id="b", subject="render.7.gpu")]))
    [request] = asked(stage)

    assert request.patterns == ("render.7.cpu",)


def test_a_job_of_a_kind_that_a_worker_does_not_take_wakes_it_not(stage: BrokerStage) -> None:
    client, _ = stage.node(), stage.worker("w1", credit=2, patterns=(">",), takes=Takes.COMMANDS)
    list(asked(stage))

    stage.tell(client, SubmitJobs(1, [JobSpec(job_id="a", subject="math.1")]))

    assert list(asked(stage)) == []


def test_a_job_with_a_program_wakes_only_workers_that_offer_it(stage: BrokerStage) -> None:
    client = stage.node()
    for name, execs in (("w1", ("price", "price")), ("w2", ("render", "price")), ("w3", ("other",)), ("w4", None)):
        stage.worker(name, credit=2, takes=Takes.COMMANDS, execs=execs)
    list(asked(stage))

    stage.tell(client, SubmitJobs(1, [JobSpec(job_id=job_id, subject="math.1", exec="price") for job_id in "abcd"]))
    requests = {request.worker_id: request for request in asked(stage)}

    assert set(requests) == {"w1", "w2", "w4"}
    assert requests["w1"].offer == Offer(Takes.COMMANDS, ("price",))


def test_a_worker_for_any_program_leaves_to_others_what_these_offer_by_name(stage: BrokerStage) -> None:
    client, named = stage.node(), stage.worker("named", credit=1, patterns=("a.>",), execs=("price", "render"))
    own = stage.worker("own", credit=9, execs=("*", "render"))
    stage.submit(client, "mine", "more", subject="a.1", exec="price")
    stage.submit(client, "elsewhere", subject="b.1", exec="price")
    stage.submit(client, "both", subject="a.1", exec="render")

    assert [grant.job_id for grant in stage.grants(named)] == ["mine"]
    assert [grant.job_id for grant in stage.grants(own)] == ["elsewhere", "both"]

    stage.close(named)
    stage.apply(ReadyFound(stage.store.ready_queues()))
    list(asked(stage))

    assert "more" in [grant.job_id for grant in stage.grants(own)]


def test_new_credit_of_a_worker_for_which_nothing_is_ready_asks_for_nothing(stage: BrokerStage) -> None:
    worker = stage.worker("w1", credit=1)
    list(asked(stage))

    stage.tell(worker, GiveCredit(5))

    assert list(asked(stage)) == []


def test_what_became_ready_while_a_worker_had_no_credit_is_asked_for_when_it_has_some(stage: BrokerStage) -> None:
    client, worker = stage.node(), stage.worker("w1", credit=1, patterns=("x.*",))
    stage.submit(client, "first", subject="x.1")
    list(asked(stage))
    stage.submit(client, "second", "third", subject="x.2")

    stage.tell(worker, GiveCredit(2))
    list(asked(stage))

    assert [grant.job_id for grant in stage.grants(worker)] == ["first", "second", "third"]


def test_what_becomes_ready_while_a_turn_is_under_way_is_asked_for_after_it(stage: BrokerStage) -> None:
    client, worker = stage.node(), stage.worker("w1", credit=4)
    list(asked(stage))
    stage.tell(client, SubmitJobs(1, [JobSpec(job_id="a", subject="job.assign.x")]))
    turn = stage.broker.next_turn(stage.now())
    assert turn is not None
    answers = execute(stage.store, turn)
    add(stage, "job.assign.y")
    stage.apply(ReadyFound(stage.store.ready_queues()))

    stage.apply(TurnDone(turn, answers))
    list(asked(stage))

    assert [grant.job_id for grant in stage.grants(worker)] == ["a", "job-job.assign.y"]


def test_more_subjects_than_a_pattern_remembers_are_all_taken(stage: BrokerStage) -> None:
    client, worker = stage.node(), stage.worker("w1", credit=1, patterns=("x.>",))
    stage.submit(client, "first", subject="x.first")
    subjects = [f"x.{number}" for number in range(2 * NOTED_MAX)]
    stage.ask(client, SubmitJobs(9, [JobSpec(job_id=subject, subject=subject) for subject in subjects]))

    for _ in range(10):
        stage.ask(worker, GiveCredit(100))

    assert sorted(subjects_of(stage, worker)) == sorted(["first", *subjects])


def test_a_job_behind_more_than_a_walk_looks_at_is_found_by_its_worker(stage: BrokerStage) -> None:
    flood(stage, 1500)
    add(stage, "render.zzz.cpu")

    worker = stage.worker("w1", credit=1, patterns=("render.*.cpu",))
    list(asked(stage))

    assert set(subjects_of(stage, worker)) == {"render.zzz.cpu"}


def test_a_job_of_which_nobody_told_is_found_behind_any_number_of_others(stage: BrokerStage) -> None:
    worker = stage.worker("w1", credit=1, patterns=("render.*.cpu",))
    flood(stage, 3 * PAGE_QUEUES)
    add(stage, "render.zzz.cpu")

    for _ in range(10):
        stage.pass_time(0.5)

    assert set(subjects_of(stage, worker)) == {"render.zzz.cpu"}


def test_a_worker_that_matches_few_of_very_many_asks_for_little_more_than_these(
    stage: BrokerStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    flood(stage, 20 * PAGE_QUEUES)
    few = [f"render.{number:05}.cpu" for number in range(0, 20 * PAGE_QUEUES, 4 * PAGE_QUEUES)]
    add(stage, *few)
    pages = 0
    read = stage.store.ready_queues

    def counted(*given: Any, **named: Any) -> ReadyPage:
        nonlocal pages
        pages += 1
        return read(*given, **named)

    monkeypatch.setattr(stage.store, "ready_queues", counted)
    worker = stage.worker("w1", patterns=("render.*.cpu",))
    requests: list[LeaseRequest] = []

    for _ in few:
        stage.tell(worker, GiveCredit(1))
        requests += asked(stage)

    assert sorted(subjects_of(stage, worker)) == few
    walks = [request for request in requests if "render.*.cpu" in request.patterns]
    assert len(walks) == 1, "it looks at a bounded number of subjects in the store's transaction"
    assert len(requests) == len(few) + len(walks)
    assert pages <= 2 * (20 + 1), "the slow walk's first page, and a hurried walk: all queues are read twice at most"


def test_all_jobs_of_which_nobody_told_are_found_by_as_many_workers_as_it_takes(stage: BrokerStage) -> None:
    workers = [stage.worker(f"w{number}", credit=1) for number in range(4 * CHOICE_MIN)]
    specs = [JobSpec(job_id=f"job-{number}") for number in range(len(workers))]
    stage.store.submit([Submission(spec, "elsewhere", body_hash(spec)) for spec in specs])

    for _ in range(3):
        stage.pass_time(0.6)

    assert [len(stage.grants(worker)) for worker in workers] == [1] * len(workers)


def test_a_walk_that_nobody_needs_reads_a_few_pages_per_second_whatever_waits(stage: BrokerStage) -> None:
    flood(stage, 2000)
    for number in range(5):
        stage.worker(f"w{number}", credit=1, patterns=("other.*.x",))
    stage.pass_time(1.0)
    stage.walks = False

    pages = 0
    for _ in range(100):
        stage.pass_time(0.1)
        for ask in [command for command in stage.others if isinstance(command, AskReady)]:
            stage.others.remove(ask)
            pages += 1
            stage.apply(ReadyFound(stage.store.ready_queues(ask.place, limit=ask.limit)))

    assert 10 <= pages <= 50


def pages_asked(stage: BrokerStage) -> list[AskReady]:
    """Take the pages that were asked for and have not come."""
    asks = [command for command in stage.others if isinstance(command, AskReady)]
    stage.others = [command for command in stage.others if not isinstance(command, AskReady)]
    return asks


def test_a_page_that_could_not_be_read_is_asked_for_again(stage: BrokerStage) -> None:
    worker = stage.worker("w1", credit=1)
    stage.walks = False
    stage.pass_time(2.0)
    add(stage, "job.assign.x")
    stage.apply(ReadyFound(None))
    assert len(pages_asked(stage)) == 1

    stage.pass_time(FAILED_READ_S / 2)
    assert pages_asked(stage) == []
    stage.walks = True
    stage.pass_time(FAILED_READ_S / 2)

    assert subjects_of(stage, worker) == ["job.assign.x"]


def test_a_page_in_the_middle_that_could_not_be_read_is_asked_for_at_its_place(stage: BrokerStage) -> None:
    flood(stage, 2 * PAGE_QUEUES)
    stage.worker("w1", credit=1, patterns=("other.*.x",))
    stage.walks = False
    stage.broker.walk.is_wanted = True
    stage.pass_time(2.0)
    [first] = pages_asked(stage)
    page = stage.store.ready_queues(first.place, limit=first.limit)
    stage.apply(ReadyFound(page))
    assert [ask.place for ask in pages_asked(stage)] == [page.place]

    stage.apply(ReadyFound(None))
    stage.pass_time(FAILED_READ_S)

    assert [ask.place for ask in pages_asked(stage)] == [page.place]


def test_a_page_that_takes_long_is_not_asked_for_twice(stage: BrokerStage) -> None:
    stage.worker("w1", credit=1)
    stage.walks = False

    for _ in range(20):
        stage.broker.walk.is_wanted = True
        stage.pass_time(1.0)

    assert len(pages_asked(stage)) == 1


@pytest.mark.parametrize(("is_hurried", "share"), [(True, HURRIED_SHARE), (False, SLOW_SHARE)])
@pytest.mark.parametrize("page", [ReadyPage([], "behind"), ReadyPage([]), None], ids=["middle", "end", "failed"])
@pytest.mark.parametrize("page_s", [0.1, 0.3, 1.0, 3.0])
def test_pages_that_take_long_leave_others_their_share_of_the_readers_time(
    page_s: float, page: ReadyPage | None, is_hurried: bool, share: float
) -> None:
    walk, now_s, read_s = ReadyWalk(), 0.0, 0.0

    while now_s < 300.0:
        now_s += 0.01
        walk.is_wanted = is_hurried
        if walk.is_due(Now(now_s, 0.0)):
            walk.next_place(Now(now_s, 0.0))
            now_s += page_s
            read_s += page_s
            walk.came(page, Now(now_s, 0.0))

    assert 0.0 < read_s / now_s <= share + 0.01


def test_quick_pages_of_a_hurried_walk_follow_each_other_at_once() -> None:
    walk = ReadyWalk()
    walk.is_wanted = True

    for number in range(100):
        now = Now(number * 0.01, 0.0)
        assert walk.is_due(now)
        walk.next_place(now)
        walk.came(ReadyPage([], "behind"), Now((number + 1) * 0.01, 0.0))
