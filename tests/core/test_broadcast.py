"""Jobs for one worker alone, and for each worker that a pattern meets."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tasuki.core.access import PeerKind
from tasuki.core.broker.events import ClusterView
from tasuki.core.job import JobSpec, State, broadcast_specs
from tasuki.core.protocol import ErrorMessage, GiveCredit, Heartbeat, JobsFinished, Reply, SubmitJobs
from tasuki.core.subject import base_subject, is_reached, only_worker, subject_for
from tests.core.broker_stage import BrokerStage, ending

LATER_S = 3600.0


@pytest.fixture
def stage() -> BrokerStage:
    return BrokerStage()


def specs(stage: BrokerStage, target: str, workers: Iterable[str], job_id: str = "all", **fields: str) -> list[JobSpec]:
    spec = JobSpec(job_id=job_id, subject=target, **fields)
    return broadcast_specs(spec, workers, stage.clock.wall() + LATER_S)


def targets(stage: BrokerStage, conn: int, target: str, exec: str = "") -> list[str]:
    answer = stage.request(conn, "targets", subject=target, exec=exec)
    assert isinstance(answer, Reply), answer
    return list(answer.body["workers"])


def got(stage: BrokerStage, conn: int) -> list[str]:
    return list(dict.fromkeys(grant.job_id for grant in stage.grants(conn)))


def test_a_broadcast_below_job_submit_reaches_the_workers_below_job_assign(stage: BrokerStage) -> None:
    conn, worker = stage.node(), stage.worker("w1", credit=1, patterns=("job.assign.books.>",))

    names = targets(stage, conn, "job.submit.books.>")
    stage.ask(conn, SubmitJobs(9, specs(stage, "job.submit.books.>", names)))

    assert names == ["w1"]
    assert len(got(stage, worker)) == 1


@pytest.mark.parametrize(
    ("subject", "worker_id"),
    [("render.@w1", "w1"), ("@w1", "w1"), ("a.b.@w-1", "w-1"), ("render.w1", None), ("mail.me@w1", None), ("render.@", None)],
)
def test_a_subject_names_its_only_worker_behind_an_at_sign(subject: str, worker_id: str | None) -> None:
    assert only_worker(subject) == worker_id


@pytest.mark.parametrize(
    ("target", "subject", "base"),
    [("render.>", "render.@w1", "render"), (">", "@w1", ""), ("render.*.gpu", "render.@w1", "render"), ("a.b", "a.b.@w1", "a.b")],
)
def test_the_subject_for_one_worker_is_what_stands_before_the_wildcard(target: str, subject: str, base: str) -> None:
    assert subject_for(target, "w1") == subject
    assert base_subject(subject) == base


def test_a_worker_is_reached_through_what_it_subscribes_to() -> None:
    assert is_reached(["render.eu"], "render.@w1")
    assert is_reached(["render.eu"], "render.eu.@w1")
    assert is_reached(["db"], "@w1")
    assert not is_reached(["db.>"], "render.@w1")
    assert not is_reached([], "@w1")


def test_only_that_worker_gets_the_job_whatever_others_subscribe_to(stage: BrokerStage) -> None:
    client, w1, w2 = stage.node(), stage.worker("w1", patterns=("render.eu",), credit=5), stage.worker("w2", credit=5)

    stage.submit(client, "a", subject="render.@w1")
    stage.submit(client, "b", subject="db.@w1")
    stage.pass_time(2.0)

    assert got(stage, w1) == ["a"], "and nothing of a group that it does not subscribe to"
    assert got(stage, w2) == []


def test_a_worker_that_is_away_gets_its_job_when_it_returns(stage: BrokerStage) -> None:
    client, other = stage.node(), stage.worker("other", credit=5)
    stage.submit(client, "a", subject="render.@w1")
    stage.pass_time(2.0)
    assert got(stage, other) == []

    returned = stage.worker("w1", patterns=("render.>",), credit=1)
    stage.ask(returned, Heartbeat(1))
    stage.pass_time(2.0)

    assert got(stage, returned) == ["a"]


def test_a_worker_that_stays_away_too_long_has_missed_its_job(stage: BrokerStage) -> None:
    client = stage.node()
    stage.ask(client, SubmitJobs(50, specs(stage, ">", ["gone"])))

    stage.pass_time(LATER_S + 2)
    stage.pass_time(1)

    job = stage.job("all.gone")
    assert job is not None
    assert job.state is State.SKIPPED


def test_the_targets_are_the_workers_of_all_servers_that_meet_the_pattern_and_can_run_it() -> None:
    first = BrokerStage(server_id="first", shared=True)
    second = BrokerStage(first, server_id="second", shared=True)
    client = first.node()
    first.worker("here", patterns=("render.eu",), takes="commands", execs=("rotate",))
    first.worker("handlers", patterns=("render.>",), takes="handlers")
    first.worker("db", patterns=("db.>",), takes="commands", execs=("rotate",))
    second.worker("there", patterns=(">",), takes="commands", execs=("rotate", "x"))
    second.worker("unable", patterns=("render.us",), takes="commands", execs=("x",))
    first.apply(ClusterView((first.broker.info, second.broker.info)))

    assert targets(first, client, "render.>", "rotate") == ["here", "there"]
    assert targets(first, client, "render.>") == ["handlers"]
    assert targets(first, client, ">", "nothing") == []


def test_a_broadcast_runs_once_on_each_worker_and_again_only_on_those_that_came_since(stage: BrokerStage) -> None:
    client = stage.node()
    workers = {name: stage.worker(name, patterns=(f"render.{name}",), credit=2) for name in ("w1", "w2")}
    stage.ask(client, SubmitJobs(50, specs(stage, "render.>", targets(stage, client, "render.>"))))
    assert [got(stage, conn) for conn in workers.values()] == [["all.w1"], ["all.w2"]]
    for conn in workers.values():
        stage.ask(conn, JobsFinished([ending(stage.grants(conn)[0])]))

    workers["w3"] = stage.worker("w3", patterns=("render.w3",), credit=2)
    stage.ask(client, SubmitJobs(51, specs(stage, "render.>", targets(stage, client, "render.>"))))
    for conn in workers.values():
        stage.ask(conn, GiveCredit(1))

    assert [got(stage, conn) for conn in workers.values()] == [["all.w1"], ["all.w2"], ["all.w3"]]


def test_a_failed_one_is_retried_at_the_same_worker(stage: BrokerStage) -> None:
    client, worker, other = stage.node(), stage.worker("w1", credit=1), stage.worker("w2", credit=5)
    stage.submit(client, "a", subject="render.@w1", backoff_s=0.0)

    stage.ask(worker, JobsFinished([ending(stage.grants(worker)[0], error_code="EXIT_CODE")]))
    stage.ask(worker, GiveCredit(1))

    assert [grant.attempt for grant in stage.grants(worker)] == [1, 2]
    assert got(stage, other) == []


def test_a_token_reaches_no_workers_beyond_its_scope(stage: BrokerStage) -> None:
    stage.worker("w1", patterns=("render.eu",))
    client = stage.client(PeerKind.CLIENT, "alice", "render.eu.>", "render.eu")

    refused = stage.request(client, "targets", subject="render.>")

    assert isinstance(refused, ErrorMessage)
    assert refused.code == "FORBIDDEN"
    assert targets(stage, client, "render.eu") == ["w1"]
