"""One version apart works: version 1 is frozen, today's code reads it and speaks it, and what is newer than today is skipped."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tasuki import AsyncClient, Worker
from tasuki.core.protocol import PROTOCOL_OLDEST, PROTOCOL_VERSION
from tasuki.errors import TasukiError, VersionMismatch
from tests.support.processes import ServerProcess, start_server, start_worker
from tests.wire import peer_v1
from tests.wire.peer_v1 import (
    ACK,
    ASSIGN,
    CREDIT,
    ERROR,
    HEARTBEAT,
    HELLO_CLIENT,
    HELLO_WORKER,
    REPLY,
    REQUEST,
    RESULT,
    SUBMIT,
    SUBSCRIBE,
    V1,
    WELCOME,
    OldFrame,
    OldPeer,
    OldServer,
    write,
)
from tests.wire.vectors import decode_all, message_of

SOON_S = 25.0
LEASE = {"job_id": "old-1", "lease_id": "lease-1", "attempt": 1, "ttl_s": 15.0, "submitter": "token:c"}


# ---------------------------------------------------------------------------------------------------- the frozen frames


@pytest.mark.parametrize("vector", [*V1["messages"], *V1["accepted"]], ids=lambda vector: vector["name"])
def test_every_frame_of_version_1_is_still_read_as_what_it_was(vector: dict[str, Any]) -> None:
    assert decode_all(bytes.fromhex(vector["hex"])) == [message_of(vector)]


@pytest.mark.parametrize("vector", V1["bad_frames"], ids=lambda vector: vector["name"])
def test_what_version_1_refused_from_a_stranger_is_still_refused(vector: dict[str, Any]) -> None:
    with pytest.raises(TasukiError) as refused:
        decode_all(bytes.fromhex(vector["hex"]), vector["limit"])
    names = ("unknown_type_next", "unknown_type_publish", "unknown_type_cache_put", "unknown_type_cache_ack")
    given_since = vector["name"] in names  # version 2 has such messages, with fields
    assert refused.value.code == ("PROTOCOL" if given_since else vector["code"])


def test_a_hello_that_names_no_version_is_of_version_1() -> None:
    [hello] = decode_all(write(HELLO_CLIENT, {"msg_id": 1, "client_id": "c"}))
    assert (hello.version, hello.oldest) == (1, 1)


def test_the_oldest_version_that_is_spoken_is_one_before_the_newest() -> None:
    assert PROTOCOL_VERSION - PROTOCOL_OLDEST == 1
    assert V1["protocol_version"] == PROTOCOL_OLDEST


# ---------------------------------------------------------------------------------------------------- old peers, today's server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with start_server(tmp_path_factory.mktemp("today")) as server:
        yield server


def old_peer(server: ServerProcess) -> OldPeer:
    return OldPeer("127.0.0.1", server.port)


def test_a_worker_of_version_1_runs_a_job_of_todays_server_to_its_end(server: ServerProcess) -> None:
    with old_peer(server) as worker, server.client() as client:
        # given: a worker of version 1
        token = server.create_token("worker")
        hello = {"msg_id": 1, "worker_id": "old-worker", "incarnation": "one", "token": token, "patterns": ["old.*"]}
        worker.send(HELLO_WORKER, hello)
        assert worker.receive(WELCOME).header["version"] == 1
        worker.send(HEARTBEAT, {"msg_id": 2})
        worker.receive(HEARTBEAT)
        worker.send(CREDIT, {"credit": 1})
        # when: it is given a job, and says what version 1 says
        job = client.submit(subject="old.1", payload=b"7", job_id="for-an-old-worker")
        [grant] = worker.receive(ASSIGN).items
        assert msgspec.msgpack.decode(grant["spec"])["payload"] == b"7"
        claim = [grant["job_id"], grant["lease_id"], grant["attempt"]]
        worker.send(ACK, {"stage": "started"}, [claim])
        worker.send(HEARTBEAT, {"msg_id": 3}, [claim])
        assert worker.receive(HEARTBEAT).header["corr_id"] == 3
        ending = {"job_id": claim[0], "lease_id": claim[1], "attempt": claim[2], "outcome": {"exit_code": 0, "result": b"49"}}
        worker.send(ACK, {"stage": "finished"}, [ending])
        # then: it is recorded, and the client has the result
        recorded = worker.receive(ACK)
        assert (recorded.header["stage"], recorded.items) == ("recorded", [claim[1]])
        assert job.result(SOON_S) == b"49"


def test_a_client_of_version_1_submits_to_todays_server_and_has_its_result(server: ServerProcess) -> None:
    with start_worker(server), old_peer(server) as client:
        client.send(HELLO_CLIENT, {"msg_id": 1, "client_id": "old-client", "token": server.create_token("client")})
        assert client.receive(WELCOME).header["version"] == 1
        client.send(SUBMIT, {"msg_id": 2}, [{"job_id": "of-an-old-client", "subject": "math.square", "payload": b"12"}])
        accepted = client.receive(ACK)
        assert (accepted.header["stage"], accepted.header["corr_id"], accepted.items) == ("accepted", 2, [])
        [result] = client.receive(RESULT).items
        assert (result["state"], result["outcome"]["result"]) == ("SUCCEEDED", b"144")
        client.send(REQUEST, {"msg_id": 3, "verb": "get"}, [{"job_ids": ["of-an-old-client"]}], batch=False)
        [[view]] = client.receive(REPLY).items
        assert view["state"] == "SUCCEEDED"


@pytest.mark.parametrize(("oldest", "version"), [(PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 2), (0, PROTOCOL_OLDEST - 1)])
def test_a_peer_two_versions_apart_hears_which_versions_there_are(server: ServerProcess, oldest: int, version: int) -> None:
    with old_peer(server) as peer:
        peer.send(HELLO_CLIENT, {"msg_id": 1, "client_id": "far", "version": version, "oldest": oldest})
        error = peer.receive(ERROR).header
    assert (error["corr_id"], error["code"]) == (0, "VERSION")
    assert f"versions {PROTOCOL_OLDEST} to {PROTOCOL_VERSION}" in error["message"]
    assert f"{oldest} to {version}" in error["message"]


def test_the_next_version_is_answered_with_todays(server: ServerProcess) -> None:
    newer = {"version": PROTOCOL_VERSION + 1, "oldest": PROTOCOL_VERSION}
    with old_peer(server) as peer:
        peer.send(HELLO_CLIENT, {"msg_id": 1, "client_id": "next", "token": server.token, **newer})
        assert peer.receive(WELCOME).header["version"] == PROTOCOL_VERSION


# ---------------------------------------------------------------------------------------------------- what is newer than today


def test_fields_and_frames_of_a_newer_peer_are_skipped_and_its_requests_answered(server: ServerProcess) -> None:
    with old_peer(server) as peer:
        peer.send(HELLO_CLIENT, {"msg_id": 1, "client_id": "newer", "token": server.token})
        peer.receive(WELCOME)
        # when: frames that nobody here knows come, one of them with a request's number, and known ones with new fields
        peer._socket.sendall(write(200, {"news": True}) + write(201, {"msg_id": 77, "wish": [1]}, [{"a": 1}]))
        peer._socket.sendall(write(202, {"msg_id": "not a number"}))
        job = {"job_id": "with-new-fields", "subject": "nobody.1", "colour": "blue"}
        peer._socket.sendall(write(SUBMIT, {"msg_id": 2, "urgency": 9}, [job]))
        # then: the request is answered, the rest skipped, and the connection goes on
        error = peer.receive(ERROR).header
        assert (error["corr_id"], error["code"]) == (77, "UNKNOWN_FRAME")
        accepted = peer.receive(ACK).header
        assert (accepted["corr_id"], accepted["count"]) == (2, 1)


# ---------------------------------------------------------------------------------------------------- an old server


def old_welcome(frame: OldFrame, kind: str) -> bytes:
    known = {"server_id": "old", "identity": "token:x", "kind": kind, "lease_ttl_s": 15.0, "lease_margin_s": 2.0}
    return write(WELCOME, {"corr_id": frame.header["msg_id"], "version": 1, "idle_timeout_s": 60.0, **known})


def test_todays_client_works_with_a_server_of_version_1() -> None:
    def answer(frame: OldFrame) -> list[bytes]:
        match frame.type:
            case peer_v1.HELLO_CLIENT:
                return [old_welcome(frame, "client")]
            case peer_v1.SUBMIT:
                accepted = write(ACK, {"stage": "accepted", "corr_id": frame.header["msg_id"], "count": len(frame.items)})
                results = [
                    {"job_id": spec["job_id"], "state": "SUCCEEDED", "attempt": 1, "outcome": {"result": b"old"}}
                    for spec in frame.items
                ]
                return [accepted, write(RESULT, {}, results)]
            case peer_v1.REQUEST:
                return [write(REPLY, {"corr_id": frame.header["msg_id"]}, [{}], batch=False)]
            case _:
                return []

    async def test() -> None:
        async with OldServer(answer) as server, AsyncClient(server.url, token="t") as client:
            job = await client.submit(subject="any.1", payload=b"x", headers={"note": "1"}, priority=7)
            assert await job.result() == b"old"
            assert await client.counts() == {}
            hello = server.heard[0].header
            assert (hello["version"], hello.get("oldest", 1)) == (PROTOCOL_VERSION, 1)

    peer_v1.run(test)


def test_todays_worker_works_with_a_server_of_version_1() -> None:
    done = asyncio.Event()

    def answer(frame: OldFrame) -> list[bytes]:
        match frame.type:
            case peer_v1.HELLO_WORKER:
                return [old_welcome(frame, "worker")]
            case peer_v1.HEARTBEAT:
                return [write(HEARTBEAT, {"corr_id": frame.header["msg_id"]})]
            case peer_v1.CREDIT if not any(heard.type == ACK for heard in server.heard):
                spec = msgspec.msgpack.encode({"job_id": "old-1", "subject": "any.1", "payload": b"7"})
                return [write(ASSIGN, {"ttl_s": 15.0}, [{**LEASE, "spec": spec}])]
            case peer_v1.ACK if frame.header["stage"] == "finished":
                done.set()
                return [write(ACK, {"stage": "recorded"}, [ending["lease_id"] for ending in frame.items])]
            case peer_v1.SUBSCRIBE:
                return [write(REPLY, {"corr_id": frame.header["msg_id"]}, [{"patterns": []}], batch=False)]
            case _:
                return []

    server = OldServer(answer)

    async def test() -> None:
        async with server:
            worker = Worker(server.url, token="t", worker_id="today", subjects=["any.*"], concurrency=1)

            @worker.handler("any.*")
            async def square(job: Any) -> bytes:
                return str(int(job.payload) ** 2).encode()

            serving = asyncio.ensure_future(worker.serve())
            await done.wait()
            worker.drain()
            await serving
            [ending] = next(frame for frame in server.heard if frame.type == ACK and frame.header["stage"] == "finished").items
            assert ending["outcome"]["result"] == b"49"
            assert server.heard[-1].type == SUBSCRIBE

    peer_v1.run(test)


def test_todays_client_says_so_when_a_server_is_two_versions_away() -> None:
    def answer(frame: OldFrame) -> list[bytes]:
        words = "this server speaks protocol versions 4 to 5, the peer 1 to 2; upgrade the older side"
        return [write(ERROR, {"corr_id": 0, "code": "VERSION", "message": words})]

    async def test() -> None:
        async with OldServer(answer) as server:
            with pytest.raises(VersionMismatch, match="upgrade the older side"):
                await AsyncClient(server.url, token="t").open()

    peer_v1.run(test)
