"""Two agents and one registry, in a real Redis and a real PostgreSQL: one run, one result, everywhere the same answer."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasuki.agent import registry_queries, store_registry
from tasuki.clocks import boot_time
from tasuki.core.failover.agent_protocol import InputRecord, input_hash
from tasuki.core.failover.registry_records import ResultLocation
from tasuki.core.job import Job, Lease, Outcome, State
from tasuki.core.store_messages import Report, RequeueOrder, Turn
from tasuki.errors import ConfigError, InternalError, Unavailable
from tests.agent.sharing import SharingStage, two_nodes
from tests.agent.stage import TIMEOUT_S, Started, code_of, members, report
from tests.support.postgres_service import PostgresService
from tests.support.redis_service import RedisService
from tests.support.waiting import until

HOLD = 'echo "$TASUKI_ATTEMPT" >> "{folder}/runs"; while [ ! -e "{folder}/gate" ]; do sleep 0.02; done; echo held'
LARGE = "head -c 300000 /dev/urandom > out/large"
Nodes = tuple[SharingStage, SharingStage]


@pytest.fixture(scope="module")
def redis_nodes(redis_service: RedisService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """For what has nothing to do with the kind of the store."""
    with two_nodes(tmp_path_factory.mktemp("nodes"), redis_service.url()) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def postgres_nodes(postgres: PostgresService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with two_nodes(tmp_path_factory.mktemp("nodes"), postgres.database()) as nodes:
        yield nodes


@pytest.fixture(params=["redis_nodes", "postgres_nodes"])
def nodes(request: pytest.FixtureRequest) -> Nodes:
    nodes: Nodes = request.getfixturevalue(request.param)
    return nodes


def hashed(script: str) -> str:
    data = script.encode()
    return input_hash("sh", (), [InputRecord("job.sh", hashlib.sha256(data).hexdigest(), len(data))])


def begin(node: SharingStage, job_id: str, folder: Path) -> Started:
    """A job that runs until there is a file `gate`; returns when it does."""
    folder.mkdir(exist_ok=True)
    started = node.begin(job_id, HOLD.format(folder=folder))
    until(lambda: (folder / "runs").exists(), what="the job runs")
    return started


def record_of(node: SharingStage, job_id: str) -> Job | None:
    return node.execute(Turn(get=[job_id])).get[0]


def lease_of(node: SharingStage, job_id: str) -> Lease:
    job = record_of(node, job_id)
    assert job is not None
    assert job.lease is not None
    return job.lease


# -------------------------------------------------------------------------------------------------------- one run


def test_while_it_runs_at_one_node_the_other_refuses_and_names_it(nodes: Nodes, job_id: str, tmp_path: Path) -> None:
    one, two = nodes
    running = begin(one, job_id, tmp_path)

    refused = two.run(job_id, HOLD.format(folder=tmp_path))
    looked_for = two.result(job_id)

    assert code_of(refused) == code_of(looked_for) == (423, "RUNNING")
    assert refused.json()["error"]["details"]["node"] == "n1"
    assert two.http.get(f"/jobs/{job_id}").json()["state"] == "running"
    until(lambda: (found := record_of(two, job_id)) is not None and found.state is State.RUNNING)
    (tmp_path / "gate").touch()
    assert running.answer().status_code == 200
    assert (tmp_path / "runs").read_text().split() == ["1"]


def test_the_same_id_to_both_at_once_is_one_run(nodes: Nodes, job_id: str, tmp_path: Path) -> None:
    script = HOLD.format(folder=tmp_path)
    both = [node.begin(job_id, script) for node in nodes]

    until(lambda: (tmp_path / "runs").exists())
    (tmp_path / "gate").touch()

    answers = [started.answer() for started in both]
    done = [answer for answer in answers if answer.status_code == 200]
    assert done
    assert all(code_of(answer) == (423, "RUNNING") for answer in answers if answer not in done)
    assert {node.result(job_id).content for node in nodes} == {done[0].content}
    assert (tmp_path / "runs").read_text().split() == ["1"]


def test_what_is_done_at_one_node_is_answered_by_the_other(nodes: Nodes, job_id: str) -> None:
    one, two = nodes
    done = one.run(job_id, "echo once")

    again = two.run(job_id, "echo once")
    before_it_is_read = two.run(job_id, "echo once", query=f"?input={hashed('echo once')}")

    assert again.content == before_it_is_read.content == two.result(job_id).content == done.content
    assert again.headers["Tasuki-Cache"] == before_it_is_read.headers["Tasuki-Cache"] == "hit"
    assert two.http.get(f"/jobs/{job_id}").json()["node"] == "n1"


def test_another_input_is_a_conflict_at_every_node(nodes: Nodes, job_id: str) -> None:
    one, two = nodes
    one.run(job_id, "echo one thing")

    assert code_of(two.run(job_id, "echo another")) == (409, "CONFLICT")
    assert code_of(two.run(job_id, "echo another", query=f"?input={hashed('echo another')}")) == (409, "CONFLICT")


def test_what_failed_is_seen_everywhere_and_runs_again_with_the_next_attempt(nodes: Nodes, job_id: str, tmp_path: Path) -> None:
    one, two = nodes
    script = f'[ -e "{tmp_path}/ok" ] || exit 3'
    assert code_of(one.run(job_id, script)) == (500, "PROGRAM_FAILED")
    assert two.result(job_id).headers["Tasuki-Outcome"] == "failed"

    (tmp_path / "ok").touch()
    done = two.run(job_id, script)

    assert done.status_code == 200
    assert report(done.content)["attempt"] == 2
    assert one.result(job_id).content == done.content, "what failed here before does not count any more"


# -------------------------------------------------------------------------------------------------------- leases


def test_a_lease_that_was_taken_away_stops_the_job_and_its_result_counts_for_nothing(
    nodes: Nodes, job_id: str, tmp_path: Path
) -> None:
    one, two = nodes
    running = begin(one, job_id, tmp_path)
    lease = lease_of(two, job_id)

    two.execute(Turn(fail=[Report(job_id, lease.worker_id, lease.lease_id, lease.attempt, Outcome(error_code="TAKEN"))]))
    one.renew_now()

    assert code_of(running.answer()) == (503, "UNAVAILABLE")
    assert one.result(job_id).status_code == 404
    (tmp_path / "gate").touch()
    again = two.run(job_id, HOLD.format(folder=tmp_path))
    assert (again.status_code, report(again.content)["attempt"]) == (200, 2)


def test_a_job_that_is_canceled_in_the_registry_is_stopped(nodes: Nodes, job_id: str, tmp_path: Path) -> None:
    one, two = nodes
    running = begin(one, job_id, tmp_path)

    two.execute(Turn(cancel=[(job_id, "test", "not wanted any more")]))
    one.renew_now()

    assert code_of(running.answer()) == (409, "CANCELED")
    assert (found := record_of(two, job_id)) is not None
    assert found.state is State.CANCELED


def test_a_job_runs_on_past_its_first_lease(nodes: Nodes, job_id: str, tmp_path: Path) -> None:
    one, _ = nodes
    running = begin(one, job_id, tmp_path)
    expires_at = lease_of(one, job_id).expires_at

    one.renew_now()
    until(lambda: lease_of(one, job_id).expires_at > expires_at, what="the lease is renewed")

    (tmp_path / "gate").touch()
    assert running.answer().status_code == 200


def test_a_removed_job_is_free_for_others(redis_nodes: Nodes, job_id: str, tmp_path: Path) -> None:
    one, two = redis_nodes
    running = begin(one, job_id, tmp_path)

    assert one.http.delete(f"/jobs/{job_id}").json()["removed"]

    assert code_of(running.answer()) == (409, "CANCELED")
    assert two.http.get(f"/jobs/{job_id}").json()["state"] == "interrupted"
    (tmp_path / "gate").touch()
    assert two.run(job_id, HOLD.format(folder=tmp_path)).status_code == 200


def test_what_runs_at_another_node_is_stopped_there_before_the_next_renewal(nodes: Nodes, job_id: str, tmp_path: Path) -> None:
    one, two = nodes
    running = begin(one, job_id, tmp_path)
    until(lambda: (found := record_of(two, job_id)) is not None and found.state is State.RUNNING)
    one.call(lambda: setattr(one.registry._leases, "_renew_at", boot_time() + 60.0))
    began = time.monotonic()

    removed = two.http.delete(f"/jobs/{job_id}").json()

    assert removed == {"job_id": job_id, "state": "running", "removed": True}
    assert time.monotonic() - began < one.registry._ttl_s / 2, "it was told, and did not wait to ask"
    assert code_of(running.answer()) == (409, "CANCELED")
    assert not (one.data / "jobs" / job_id).exists()
    (tmp_path / "gate").touch()
    assert two.run(job_id, HOLD.format(folder=tmp_path)).status_code == 200


@pytest.mark.parametrize("script", [LARGE, "head -c 100 /dev/urandom"], ids=["large", "small"])
def test_what_is_done_at_another_node_is_removed_there_too(nodes: Nodes, job_id: str, script: str) -> None:
    one, two = nodes
    one.run(job_id, script)

    removed = two.http.delete(f"/jobs/{job_id}").json()

    assert removed == {"job_id": job_id, "state": "done", "removed": True}
    assert [node.result(job_id).status_code for node in nodes] == [404, 404]
    assert not (one.data / "jobs" / job_id).exists()
    assert two.http.delete("/jobs/unknown").status_code == 404


def test_what_was_removed_while_its_node_was_away_is_gone_when_that_is_back(
    redis_nodes: Nodes, job_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = redis_nodes
    one.run(job_id, "echo once")
    one.run(f"{job_id}-kept", "echo twice")
    back = restarted(one, tmp_path)

    async def away(place: ResultLocation) -> None:
        raise Unavailable(f"{place.address} does not answer")

    monkeypatch.setattr(two.registry._peers, "remove", away)
    removed = two.http.delete(f"/jobs/{job_id}").json()

    assert removed["left_at"] == "n1"
    with back:
        assert back.result(job_id).status_code == two.result(job_id).status_code == 404
        assert not (back.data / "jobs" / job_id).exists()
        assert (back.data / "jobs" / f"{job_id}-kept" / ".done").exists()


def test_a_run_that_lost_its_lease_is_removed_without_the_result_of_another_node(
    redis_nodes: Nodes, job_id: str, tmp_path: Path
) -> None:
    one, two = redis_nodes
    script = f"[ -e {tmp_path}/gate ] || {{ touch {tmp_path}/runs; while true; do sleep 0.02; done; }}"
    running = one.begin(job_id, script)
    until((tmp_path / "runs").exists, what="the job runs")
    lease = lease_of(two, job_id)
    two.execute(Turn(fail=[Report(job_id, lease.worker_id, lease.lease_id, lease.attempt, Outcome(error_code="TAKEN"))]))
    (tmp_path / "gate").touch()
    newer = two.run(job_id, script)

    assert one.http.delete(f"/jobs/{job_id}").status_code == 200

    assert running.answer().status_code in (409, 503)
    assert one.result(job_id).content == two.result(job_id).content == newer.content


def test_a_store_that_refuses_us_for_a_moment_costs_no_result(
    redis_nodes: Nodes, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = redis_nodes
    monkeypatch.setattr(store_registry, "RETRY_S", 0.01)
    share, refusals = one.registry._share, iter([ConfigError("the password is wrong"), InternalError("a script failed")])

    async def refuse(turn: Turn, real: Any = share.execute) -> Any:
        if turn.finish and (error := next(refusals, None)) is not None:
            raise error
        return await real(turn)

    monkeypatch.setattr(share, "execute", refuse)
    answer = one.run(job_id, "echo once")

    assert answer.status_code == 200
    assert two.result(job_id).content == answer.content


# -------------------------------------------------------------------------------------------------------- after a kill


def restarted(node: SharingStage, folder: Path) -> SharingStage:
    """A process that finds all as if the old one was killed at this moment. The old one lives on, unknown to it."""
    shutil.copytree(node.data, folder / "data", ignore=shutil.ignore_patterns("runs", "trash", "spare", "*.lock"))
    return SharingStage(folder, node.registry_url, node="n1")


def test_a_node_that_is_back_frees_what_its_dead_self_held(redis_nodes: Nodes, job_id: str, tmp_path: Path) -> None:
    one, two = redis_nodes
    running = begin(one, job_id, tmp_path / "job")

    with restarted(one, tmp_path):
        one.renew_now()
        assert code_of(running.answer()) == (503, "UNAVAILABLE")
        (tmp_path / "job" / "gate").touch()
        answer = two.run(job_id, HOLD.format(folder=tmp_path / "job"))

    assert (answer.status_code, report(answer.content)["attempt"]) == (200, 2)


def test_a_node_that_is_back_records_what_its_dead_self_had_finished(
    redis_nodes: Nodes, job_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = redis_nodes
    ended, killed = threading.Event(), threading.Event()

    def fault(point: str) -> None:
        if point == "agent.ended":  # on its disk, and not yet in the registry
            ended.set()
            killed.wait(TIMEOUT_S)

    monkeypatch.setattr(one.agent.folders, "_fault", fault)
    cut_off = one.begin(job_id, "echo done")
    assert ended.wait(TIMEOUT_S)
    assert code_of(two.run(job_id, "echo done")) == (423, "RUNNING")

    with restarted(one, tmp_path) as again:
        recorded = two.run(job_id, "echo done")
        assert recorded.headers["Tasuki-Cache"] == "hit"
        assert recorded.content == again.result(job_id).content
    killed.set()
    assert cut_off.answer().content == recorded.content


def test_a_result_that_came_too_late_is_dropped_when_its_node_is_back(redis_nodes: Nodes, job_id: str, tmp_path: Path) -> None:
    one, two = redis_nodes
    one.run(job_id, "echo $$")
    back = restarted(one, tmp_path)
    (back.data / "claims" / job_id).touch()
    two.execute(Turn(requeue=[RequeueOrder(job_id, "test", "as if another node had been quicker")]))
    newer = two.run(job_id, "echo $$")

    with back:
        assert back.result(job_id).content == newer.content
        assert not (back.data / "jobs" / job_id).exists()
        assert not (back.data / "claims" / job_id).exists()


# -------------------------------------------------------------------------------------------------------- large results


def test_a_large_result_is_fetched_from_its_node_whole_or_in_part(redis_nodes: Nodes, job_id: str) -> None:
    one, two = redis_nodes
    done = one.run(job_id, LARGE)

    part = two.result(job_id, Range="bytes=100000-100099")

    assert len(done.content) > 300_000
    assert two.result(job_id).content == done.content
    assert two.run(job_id, LARGE).content == done.content
    assert (part.status_code, part.content) == (206, done.content[100_000:100_100])
    assert part.headers["Content-Range"] == f"bytes 100000-100099/{len(done.content)}"


def test_a_result_that_was_changed_at_its_node_does_not_arrive_whole(redis_nodes: Nodes, job_id: str) -> None:
    one, two = redis_nodes
    one.run(job_id, LARGE)
    path = one.data / "jobs" / job_id / "result.zip"
    path.write_bytes(b"x" * path.stat().st_size)

    with pytest.raises(httpx.RemoteProtocolError):
        two.result(job_id)


@pytest.mark.parametrize("script", [LARGE, "head -c 100 /dev/urandom"], ids=["large", "small"])
def test_a_result_that_was_removed_is_nowhere_and_is_made_again(redis_nodes: Nodes, job_id: str, script: str) -> None:
    one, two = redis_nodes
    first = one.run(job_id, script)

    one.http.delete(f"/jobs/{job_id}")

    assert two.result(job_id).status_code == 404
    again = two.run(job_id, script)
    assert again.status_code == 200
    assert again.content != first.content
    assert one.result(job_id).content == again.content


def test_of_two_nodes_that_miss_a_result_one_makes_it_again(
    redis_nodes: Nodes, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = redis_nodes
    one.run(job_id, LARGE)
    shutil.rmtree(one.data / "jobs" / job_id)
    answer, quicker = two.registry._answer, []

    async def slow(job: Job, cache: str | None) -> Any:
        found = await answer(job, cache)
        if found is None:
            quicker.append(await asyncio.to_thread(one.run, job_id, LARGE))
        return found

    monkeypatch.setattr(two.registry, "_answer", slow)
    late = two.run(job_id, LARGE)

    assert [made.status_code for made in quicker] == [200]
    assert (late.content, late.headers["Tasuki-Cache"]) == (quicker[0].content, "hit")
    assert (found := record_of(two, job_id)) is not None
    assert found.generation == 1


def test_a_result_that_nobody_has_any_more_is_made_again(redis_nodes: Nodes, job_id: str) -> None:
    one, two = redis_nodes
    first = one.run(job_id, LARGE)
    shutil.rmtree(one.data / "jobs" / job_id)
    assert two.result(job_id).status_code == 404

    again = two.run(job_id, LARGE)

    assert again.status_code == 200
    assert again.content != first.content
    assert one.result(job_id).content == again.content


def test_a_large_result_of_a_node_that_is_away_is_503_and_not_run_again(redis_nodes: Nodes, job_id: str, tmp_path: Path) -> None:
    one, _ = redis_nodes
    with SharingStage(tmp_path, one.registry_url, node="n3") as three:
        three.run(job_id, LARGE)
        three.run(f"{job_id}-small", "echo small")

    assert code_of(one.result(job_id)) == code_of(one.run(job_id, LARGE)) == (503, "UNAVAILABLE")
    small = members(one.result(f"{job_id}-small").content)
    assert small["stdout.log"] == b"small\n", "those are in the registry itself"


# -------------------------------------------------------------------------------------------------------- the registry is away


def test_while_the_registry_is_away_what_runs_goes_on_and_nothing_new_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_queries, "ANSWER_S", 0.2)
    monkeypatch.setattr(store_registry, "RETRY_S", 0.1)
    with RedisService() as service, SharingStage(tmp_path / "n1", service.url(), node="n1") as one:
        running = begin(one, "running", tmp_path / "job")
        one.run("done", "echo done")
        service.kill()

        refused = one.run("new", "echo new")
        (tmp_path / "job" / "gate").touch()
        until(lambda: (one.data / "jobs" / "running" / ".done").exists(), what="it has ended here")
        unrecorded = one.result("running")
        service.start()

        assert code_of(refused) == (503, "UNAVAILABLE")
        assert "registry" in refused.json()["error"]["message"]
        until(lambda: one.state("done") == "done", what="the registry answers again")
        assert code_of(unrecorded) == (423, "RUNNING"), "nobody is shown what the registry has not taken"
        assert running.answer().status_code == 200
        assert one.run("new", "echo new").status_code == 200


def test_a_lease_that_cannot_be_renewed_ends_the_job_in_time(tmp_path: Path) -> None:
    with RedisService() as service, SharingStage(tmp_path / "n1", service.url(), node="n1", ttl_s=1.0) as one:
        running = begin(one, "running", tmp_path / "job")
        service.pause()
        stopped_at = time.monotonic()

        until(lambda: not one.call(lambda: one.agent._runner._running), what="nothing runs any more")

        assert time.monotonic() - stopped_at < 1.0 + 2.0, "before the store could give it to another node"
        service.resume()
        assert code_of(running.answer()) == (503, "UNAVAILABLE")
