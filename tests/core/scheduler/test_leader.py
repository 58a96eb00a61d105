"""Whom the leader gives runs that were stored ahead of their times."""

from __future__ import annotations

from typing import Any

from tasuki.core.scheduler.leader import WorkerLoad, plan
from tasuki.core.store_messages import AheadRun, JobKind, Offer, ReadyQueue, Takes

QUEUE = ReadyQueue("default.report", JobKind.COMMAND, "django")


def run(job_id: str = "d1-60", worker_id: str = "", *, is_due: bool = False, attempt: int = 1) -> AheadRun:
    return AheadRun(job_id, QUEUE, is_due, worker_id, f"{worker_id}/1" if worker_id else "", attempt if worker_id else 0)


def worker(name: str, **fields: Any) -> WorkerLoad:
    facts = {"patterns": ("default.>",), "slots": 2, "offer": Offer(Takes.ANY, ("django",)), **fields}
    return WorkerLoad(worker_id=name, incarnation=f"{name}/1", **facts)


def chosen(runs: list[AheadRun], *workers: WorkerLoad) -> list[str]:
    return [assignment.worker_id for assignment in plan(runs, workers).assign]


def test_the_least_loaded_worker_gets_a_run_and_of_equals_the_one_heard_of_last() -> None:
    busy, old, fresh = worker("w1", running=1), worker("w2", age_s=0.9), worker("w3", age_s=0.2)

    assert chosen([run()], busy, old, fresh) == ["w3"]
    assert sorted(chosen([run(f"d{n}-60") for n in range(9)], busy, old, fresh)) == ["w1", "w2", "w2", "w3", "w3"]


def test_the_leaders_own_worker_is_chosen_only_where_no_other_one_subscribes() -> None:
    leader, elsewhere = worker("w1", leads=True), worker("w2", patterns=("mail.>",))

    assert chosen([run()], leader, worker("w2", slots=1, running=1)) == []  # it waits for that one, or is pulled
    assert chosen([run()], leader, elsewhere) == ["w1"]
    assert chosen([run()], worker("w3", offer=Offer(Takes.ANY, ("other",)))) == []


def test_what_is_due_is_started_again_and_again_until_it_is_fetched_and_taken_back_from_workers_that_are_gone() -> None:
    runs = [run("d1-60", "w1", is_due=True), run("d2-60", "w1"), run("d3-60", "w9", is_due=True), run("d4-60", "w9")]

    planned = plan(runs, [worker("w1", slots=3), worker("w2", slots=3)])

    assert planned.start == {"w1": (("d1-60", 1),)}
    assert [(one.job_id, one.worker_id) for one in planned.assign] == [("d3-60", ""), ("d4-60", "w2")]


def test_a_worker_that_began_anew_has_nothing_of_its_earlier_life() -> None:
    again = worker("w1")

    planned = plan([AheadRun("d1-60", QUEUE, True, "w1", "w1/0", 1)], [again])

    assert planned.start == {}
    assert [one.worker_id for one in planned.assign] == [""]
