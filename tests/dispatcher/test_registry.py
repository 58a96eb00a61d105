"""A registry that dispatchers share with real agents, in a real Redis and a real PostgreSQL: what waits, what is done, what is
removed is known everywhere, whoever dies."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasuki.agent import registry_queries
from tasuki.cli.agent import REGISTRY_APP as APP
from tasuki.cli.agent import RegistryOptions, make_dispatcher_registry
from tasuki.core.address import Address, parse_agents
from tasuki.core.failover import registry_records
from tasuki.core.failover.agent_protocol import InputRecord, input_hash
from tasuki.core.job import Job, JobSpec, State, body_hash
from tasuki.core.store_messages import Submission, Turn
from tasuki.dispatcher import registry
from tasuki.dispatcher.app import Dispatcher
from tasuki.dispatcher.settings import DispatcherConfig
from tasuki.errors import ConfigError
from tests.agent.sharing import SharingStage, two_nodes
from tests.agent.stage import code_of, members, report
from tests.client.agent_stand_in import Asked, Reply, StandIn, refusal, result
from tests.dispatcher.stage import DispatcherStage, job, tell
from tests.support.postgres_service import PostgresService
from tests.support.redis_service import RedisService
from tests.support.waiting import until_async

LARGE = "head -c 300000 /dev/urandom > out/large"
NOBODY = "http://127.0.0.1:1"
Nodes = tuple[SharingStage, SharingStage]


@pytest.fixture(scope="module")
def nodes(redis_service: RedisService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with two_nodes(tmp_path_factory.mktemp("nodes"), redis_service.url()) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def postgres_node(postgres: PostgresService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharingStage]:
    with SharingStage(tmp_path_factory.mktemp("node"), postgres.database(), node="n1") as node:
        yield node


@pytest.fixture(params=["redis", "postgresql"])
def node(request: pytest.FixtureRequest) -> SharingStage:
    found: SharingStage = (
        request.getfixturevalue("nodes")[0] if request.param == "redis" else request.getfixturevalue("postgres_node")
    )
    return found


@pytest.fixture
def job_id(request: pytest.FixtureRequest) -> str:
    """One that no other test has."""
    return hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]


class Sharing(DispatcherStage):
    """A dispatcher with a registry; what it is sent are shell scripts."""

    async def script(self, job_id: str, script: str, query: str = "", exec_: str = "sh") -> httpx.Response:
        fields = {"exec": exec_} if exec_ else {}
        return await self.http.post(f"/run/{job_id}{query}", files=[("file", ("job.sh", script.encode()))], data=fields)

    def begin(self, job_id: str, script: str) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.script(job_id, script))


@asynccontextmanager
async def sharing(url: str, *agents: StandIn | SharingStage | str, inputs: Path | None, **options: Any) -> AsyncIterator[Sharing]:
    urls = ",".join(agent if isinstance(agent, str) else agent.url for agent in agents)
    config = DispatcherConfig(agents=tuple(parse_agents(urls)), inputs=str(inputs) if inputs is not None else None)
    place = RegistryOptions(url, "", APP, "", options.get("ttl_s", 15.0))
    dispatcher = Dispatcher(config, make_dispatcher_registry(place))
    stage = Sharing(dispatcher, await dispatcher.start(Address("http", "127.0.0.1", 0)), ())
    try:
        yield stage
    finally:
        await stage.close()


class Hesitant(StandIn):
    """A node that is sent jobs and does not claim them, until `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.on_post = self.hesitate

    async def __aenter__(self) -> Hesitant:
        await super().__aenter__()
        return self

    async def hesitate(self, asked: Asked) -> Reply:
        self.posts.append(await asked.body())
        await self.go.wait()
        return result(self.data)


def hashed(script: str) -> str:
    data = script.encode()
    return input_hash("sh", (), [InputRecord("job.sh", hashlib.sha256(data).hexdigest(), len(data))])


def record_of(node: SharingStage, job_id: str) -> Job:
    job = node.execute(Turn(get=[job_id])).get[0]
    assert job is not None
    return job


async def queued(stand_in: Hesitant, stage: Sharing, job_id: str, script: str) -> asyncio.Task[httpx.Response]:
    """A job that waits at the dispatcher."""
    waiting = stage.begin(job_id, script)
    await stand_in.until(lambda: f"POST /run/{job_id}" in stand_in.asked)
    return waiting


# -------------------------------------------------------------------------------------------------------- queued


def test_a_job_that_waits_is_queued_everywhere_and_whoever_has_its_input_may_take_it(
    node: SharingStage, job_id: str, tmp_path: Path
) -> None:
    async def story() -> None:
        url = node.registry_url
        async with (
            Hesitant() as hesitant,
            sharing(url, hesitant, inputs=tmp_path) as one,
            sharing(url, node.url, inputs=None) as two,
        ):
            waiting = await queued(hesitant, one, job_id, "echo once")

            seen = [(await asked.get(f"/jobs/{job_id}")).json() for asked in (one.http, two.http)]
            seen.append(await asyncio.to_thread(lambda: node.http.get(f"/jobs/{job_id}").json()))
            result = await asyncio.to_thread(node.result, job_id)
            other = await asyncio.to_thread(node.run, job_id, "echo other")
            taken = await asyncio.to_thread(node.run, job_id, "echo once")
            hesitant.go.set()

            assert {(told["state"], told["node"].split(".")[0]) for told in seen} == {("queued", "dispatcher")}
            assert [told["input"] for told in seen] == [hashed("echo once")] * 3
            assert (result.status_code, result.json()["error"]["details"]["state"]) == (423, "queued")
            assert code_of(other) == (409, "CONFLICT")
            assert (taken.status_code, report(taken.content)["attempt"]) == (200, 1)
            assert (await waiting).status_code == 200
            assert await asyncio.to_thread(lambda: node.result(job_id).content) == taken.content

    tell(story())


def test_a_run_through_a_dispatcher_is_the_first_attempt_and_its_result_outlives_all_nodes(
    node: SharingStage, job_id: str, tmp_path: Path
) -> None:
    async def story() -> None:
        url = node.registry_url
        async with sharing(url, node, inputs=tmp_path) as one, sharing(url, NOBODY, inputs=None) as two:
            done = await one.script(job_id, "echo once")

            found = await two.http.get(f"/result/{job_id}")
            again = await two.script(job_id, "echo once", query=f"?input={hashed('echo once')}")
            compared = await one.script(job_id, "echo once")
            other = await two.script(job_id, "echo other", query=f"?input={hashed('echo other')}")
            described = (await two.http.get(f"/jobs/{job_id}")).json()

            assert report(done.content)["attempt"] == 1
            assert done.content == found.content == again.content == compared.content
            assert again.headers["Tasuki-Cache"] == compared.headers["Tasuki-Cache"] == "hit"
            assert code_of(other) == (409, "CONFLICT")
            assert (described["state"], described["node"], described["attempt"]) == ("done", "n1", 1)
            job = await asyncio.to_thread(record_of, node, job_id)
            assert (job.state, job.attempt) == (State.SUCCEEDED, 2), "the lease of the dispatcher was one, too"

    tell(story())


def test_a_job_that_no_node_takes_is_interrupted(nodes: Nodes, job_id: str, tmp_path: Path) -> None:
    async def story() -> None:
        one, _ = nodes

        async def refuse(asked: Asked) -> Reply:
            await asked.body()
            return refusal(503, "DISK_FULL")

        async with StandIn() as stand_in, sharing(one.registry_url, stand_in, inputs=tmp_path) as stage:
            stand_in.on_post = refuse
            assert code_of(await stage.script(job_id, "echo once")) == (503, "DISK_FULL")

            await until_async(lambda: record_of(one, job_id).state is State.FAILED)
            told = await asyncio.to_thread(lambda: one.http.get(f"/jobs/{job_id}").json())
            assert told["state"] == "interrupted"
            assert (await asyncio.to_thread(one.run, job_id, "echo once")).status_code == 200

    tell(story())


def test_of_two_dispatchers_with_one_id_the_last_has_it_and_neither_ends_what_the_other_waits_for(
    nodes: Nodes, job_id: str, tmp_path: Path
) -> None:
    async def story() -> None:
        node, _ = nodes
        url = node.registry_url
        async with Hesitant() as hesitant, sharing(url, hesitant, inputs=tmp_path) as one:
            first = await queued(hesitant, one, job_id, "echo once")
            async with sharing(url, hesitant, inputs=tmp_path) as two:
                lease = (await asyncio.to_thread(record_of, node, job_id)).lease
                second = two.begin(job_id, "echo once")
                await until_async(lambda: record_of(node, job_id).lease not in (None, lease))

                first.cancel()
                await hesitant.until(lambda: len(hesitant.posts) == 2)
                assert registry_records.is_queued(await asyncio.to_thread(record_of, node, job_id))
                hesitant.go.set()
                assert (await second).status_code == 200

    tell(story())


def test_a_repeat_that_meets_the_first_at_its_node_does_not_end_its_wait(nodes: Nodes, job_id: str, tmp_path: Path) -> None:
    async def story() -> None:
        node, _ = nodes
        async with Hesitant() as hesitant, sharing(node.registry_url, hesitant, inputs=tmp_path) as stage:
            first = await queued(hesitant, stage, job_id, "echo once")

            async def is_there(asked: Asked) -> Reply:
                await asked.body()
                return refusal(423, "RUNNING")

            hesitant.on_post = is_there
            repeat = await stage.script(job_id, "echo once")

            assert code_of(repeat) == (423, "RUNNING")
            recording = stage.dispatcher._registry
            assert recording is not None
            await asyncio.gather(*recording._reports)
            assert registry_records.is_queued(await asyncio.to_thread(record_of, node, job_id))
            hesitant.go.set()
            assert (await first).status_code == 200

    tell(story())


def test_a_job_of_a_server_on_the_same_store_is_none_of_the_agents(nodes: Nodes, job_id: str) -> None:
    one, two = nodes
    spec = JobSpec(job_id=job_id, subject="reports.daily", payload=b"of a server")
    one.execute(Turn(submit=[Submission(spec, "alice", body_hash(spec))]))

    assert one.http.get(f"/jobs/{job_id}").status_code == two.http.delete(f"/jobs/{job_id}").status_code == 404
    assert code_of(two.run(job_id, "echo once")) == (409, "CONFLICT")
    assert record_of(one, job_id).state is State.PENDING


def test_an_exec_that_the_form_does_not_name_is_not_recorded(nodes: Nodes, job_id: str, tmp_path: Path) -> None:
    async def story() -> None:
        node, _ = nodes
        async with Hesitant() as hesitant, sharing(node.registry_url, hesitant, inputs=tmp_path) as stage:
            running = asyncio.create_task(stage.script(job_id, "echo once", exec_=""))
            await hesitant.until(lambda: f"POST /run/{job_id}" in hesitant.asked)

            assert (await asyncio.to_thread(lambda: node.execute(Turn(get=[job_id])).get)) == [None]
            hesitant.go.set()
            assert (await running).status_code == 200

    tell(story())


# -------------------------------------------------------------------------------------------------------- results at nodes


def test_a_large_result_comes_from_its_node_alone_and_nobody_runs_it_again_when_that_is_away(nodes: Nodes, job_id: str) -> None:
    async def story() -> None:
        one, _ = nodes
        done = await asyncio.to_thread(one.run, job_id, LARGE)
        async with StandIn() as other, sharing(one.registry_url, one, other, inputs=None) as stage:
            found = await stage.http.get(f"/result/{job_id}", headers={"Range": "bytes=300000-"})
            assert (found.status_code, found.content) == (206, done.content[300_000:])
            assert found.headers["Tasuki-Node"] == one.url
            assert f"GET /jobs/{job_id}" not in other.asked, "nobody else was asked"
        async with sharing(one.registry_url, NOBODY, inputs=None) as stage:
            away = await stage.http.get(f"/result/{job_id}")
            assert code_of(away) == (503, "UNAVAILABLE")
            assert away.json()["error"]["details"]["node"] == "n1"

    tell(story())


# -------------------------------------------------------------------------------------------------------- removing


def test_a_job_that_waits_can_be_removed_from_any_node(nodes: Nodes, job_id: str, tmp_path: Path) -> None:
    async def story() -> None:
        node, _ = nodes
        async with Hesitant() as hesitant, sharing(node.registry_url, hesitant, inputs=tmp_path, ttl_s=1.0) as stage:
            waiting = await queued(hesitant, stage, job_id, "echo once")

            removed = await asyncio.to_thread(lambda: node.http.delete(f"/jobs/{job_id}").json())

            assert removed == {"job_id": job_id, "state": "queued", "removed": True}
            assert code_of(await waiting) == (409, "CANCELED")

    tell(story())


def test_a_job_that_waits_at_a_dead_dispatcher_can_be_removed(nodes: Nodes, job_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_queries, "QUEUE_STOP_S", 0.0)
    node, _ = nodes
    submission = registry_records.submission_of(job_id, "sh", hashed("echo once"))
    dead = registry_queries.Holder(registry_records.dispatcher_id_of("d1", "01234567"), "i", 60.0, "d1")
    node.execute(Turn(rerun=[submission], lease=[dead.request(job_id)]))
    assert node.http.get(f"/jobs/{job_id}").json()["node"] == "dispatcher.d1"

    removed = node.http.delete(f"/jobs/{job_id}").json()

    assert removed["state"] == "queued"
    assert record_of(node, job_id).state is State.CANCELED
    assert node.run(job_id, "echo once").status_code == 200


def test_a_job_whose_cancel_was_asked_for_is_not_taken_over(nodes: Nodes, job_id: str) -> None:
    node, _ = nodes
    submission = registry_records.submission_of(job_id, "sh", hashed("echo once"))
    waits = registry_queries.Holder(registry_records.dispatcher_id_of("d1", "01234567"), "i", 60.0, "d1")
    node.execute(Turn(rerun=[submission], lease=[waits.request(job_id)]))
    node.execute(Turn(cancel=[(job_id, "test", "not wanted")]))

    assert code_of(node.run(job_id, "echo once")) == (409, "CANCELED")
    assert record_of(node, job_id).state is State.ASSIGNED, "its dispatcher ends it"


def test_what_runs_at_a_node_is_removed_through_a_dispatcher_and_what_is_done_nowhere_found_again(
    nodes: Nodes, job_id: str, tmp_path: Path
) -> None:
    async def story() -> None:
        one, two = nodes
        script = f'touch "{tmp_path}/runs"; while [ ! -e "{tmp_path}/gate" ]; do sleep 0.02; done'
        running = one.begin(job_id, script)
        await until_async((tmp_path / "runs").exists)
        async with sharing(one.registry_url, two, inputs=None) as stage:
            removed = await stage.http.delete(f"/jobs/{job_id}")
            assert (removed.status_code, removed.json()["state"]) == (200, "running")
            assert code_of(await asyncio.to_thread(running.answer)) == (409, "CANCELED")

            (tmp_path / "gate").touch()
            assert (await stage.script(job_id, script)).status_code == 200
            assert (await stage.http.delete(f"/jobs/{job_id}")).json()["state"] == "done"
            for asked in (one.url, two.url, stage.url):
                assert (await stage.http.get(f"{asked}/result/{job_id}")).status_code == 404, asked
                assert (await stage.http.get(f"{asked}/jobs/{job_id}")).json()["state"] == "interrupted"

    tell(story())


def test_with_no_node_left_a_dispatcher_removes_the_result_itself(nodes: Nodes, job_id: str) -> None:
    async def story() -> None:
        one, _ = nodes
        await asyncio.to_thread(one.run, job_id, "echo once")
        async with sharing(one.registry_url, NOBODY, inputs=None) as stage:
            removed = (await stage.http.delete(f"/jobs/{job_id}")).json()

            assert removed == {"job_id": job_id, "state": "done", "removed": True, "left_at": "n1"}
            assert (await stage.http.get(f"/result/{job_id}")).status_code == 404

    tell(story())


# -------------------------------------------------------------------------------------------------------- the registry is away


def test_without_its_registry_a_dispatcher_does_what_it_does_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry, "ANSWER_S", 0.3)
    monkeypatch.setattr(registry, "RETRY_S", 0.1)
    caplog.set_level(logging.INFO, logger="tasuki.dispatcher")

    async def story(service: RedisService) -> None:
        url = service.url()
        async with StandIn() as node, sharing(url, node, inputs=tmp_path) as stage:
            assert (await stage.script("before", "echo once")).status_code == 200
            service.pause()

            answers = [await stage.script(f"meanwhile-{number}", "echo once") for number in range(3)]
            found = await stage.http.get("/result/unknown")

            assert [answer.status_code for answer in answers] == [200, 200, 200]
            assert code_of(found) == (404, "NOT_FOUND")
            told = [line.message for line in caplog.records if line.message.startswith("the registry does not answer")]
            assert len(told) == 1
            service.resume()
            recording = stage.dispatcher._registry
            assert recording is not None
            await until_async(lambda: recording._records is not None)
            async with Hesitant() as hesitant, sharing(url, hesitant, inputs=tmp_path) as other:
                waiting = await queued(hesitant, other, "after", "echo once")
                assert (await stage.http.get("/jobs/after")).json()["state"] == "queued"
                hesitant.go.set()
                assert (await waiting).status_code == 200

    with RedisService() as service:
        tell(story(service))


def test_a_registry_that_refuses_us_is_as_good_as_away_until_it_does_not(
    nodes: Nodes, job_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "RETRY_S", 0.02)
    refusals = [ConfigError("the password is wrong")] * 3

    async def story() -> None:
        async with StandIn() as node, sharing(nodes[0].registry_url, node, inputs=tmp_path) as stage:
            recording = stage.dispatcher._registry
            assert recording is not None
            share = recording._share
            assert share is not None

            async def refuse(turn: Turn, real: Any = share.execute) -> Any:
                if refusals:
                    raise refusals.pop()
                return await real(turn)

            monkeypatch.setattr(share, "execute", refuse)
            node.job = job("done")
            found = await stage.http.get(f"/jobs/{job_id}")
            await until_async(lambda: recording._records is not None)

            assert (found.status_code, found.json()["state"]) == (200, "done")
            assert refusals == []

    tell(story())


def test_a_dispatcher_starts_without_its_registry_and_uses_it_when_it_is_there(
    nodes: Nodes, job_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "RETRY_S", 0.05)
    one, _ = nodes
    one.run(job_id, "echo once")
    here = make_dispatcher_registry(RegistryOptions(one.registry_url, "", APP, "", 15.0))._make_share
    gone = make_dispatcher_registry(RegistryOptions("redis://127.0.0.1:1/0", "", APP, "", 15.0))._make_share
    places = iter([gone, gone])

    async def story() -> None:
        async with sharing(one.registry_url, NOBODY, inputs=None) as stage:
            late = registry.DispatcherRegistry(lambda: next(places, here)(), name="late", ttl_s=15.0)
            await late.open()
            assert await late.read(job_id) is None
            await until_async(lambda: late._records is not None)
            found = await late.read(job_id)
            await late.close()
            assert found is not None
            assert (await stage.http.get(f"/result/{job_id}")).status_code == 200

    tell(story())


def test_a_large_upload_of_what_is_done_is_answered_before_it_is_read(nodes: Nodes, job_id: str) -> None:
    async def story() -> None:
        one, _ = nodes
        done = await asyncio.to_thread(one.run, job_id, "echo once")
        async with sharing(one.registry_url, NOBODY, inputs=None) as stage:
            reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
            head = f"POST /run/{job_id}?input={hashed('echo once')} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n"
            writer.write(f"{head}Content-Type: multipart/form-data; boundary=b\r\n\r\n".encode() + bytes(2_000_000))

            answer = await reader.readuntil(b"\r\n\r\n")

            assert b" 200 " in answer.splitlines()[0]
            assert members(await reader.readexactly(len(done.content)))["stdout.log"] == b"once\n"
            writer.close()

    tell(story())
