"""A hostile worker with a valid token: real servers, one on SQLite, two on PostgreSQL and on Redis."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.core.access import token_sha256
from tasuki.core.job import OnDisconnect, Outcome
from tasuki.core.protocol import (
    AssignJobs,
    Claim,
    Ending,
    GiveCredit,
    Heartbeat,
    HeartbeatAnswer,
    HelloWorker,
    JobsFinished,
    JobsRecorded,
    JobsReleased,
    Message,
    Welcome,
)
from tests.doors.raw import RawPeer
from tests.support.processes import ServerProcess, start_servers
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

VICTIM = "victim"
SOON_S = 10.0


@pytest.fixture(params=["sqlite", "postgresql", "redis"])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[ServerProcess]]:
    """The server of the victim, and the one at which the attacker comes in: on SQLite the same."""
    fixtures = {"postgresql": "postgres_url", "redis": "redis_url"}
    store = request.getfixturevalue(fixtures[request.param]) if request.param in fixtures else ""
    with start_servers(tmp_path, 2 if store else 1, store=store) as started:
        yield [started[0], started[-1]]


def worker(server: ServerProcess, token: str, worker_id: str, pattern: str, **fields: object) -> tuple[RawPeer, Message | None]:
    peer = RawPeer(server.url)
    hello = {"worker_id": worker_id, "incarnation": "http", "token": token, "patterns": (pattern,), **fields}
    peer.send(HelloWorker(msg_id=peer.next_id(), **hello))  # type: ignore[arg-type]
    return peer, peer.receive()


def bound_token(server: ServerProcess) -> str:
    secret = f"tsk_w_{secrets.token_hex(16)}"
    row = {"token_id": "bound", "kind": "worker", "sha256": token_sha256(secret), "scope": ["b.>"], "worker_id": VICTIM}
    with server.client() as client:
        client.wait(client.aio.request("token.create", **row))
    return secret


def received(peer: RawPeer, kind: type[Message]) -> Message:
    while not isinstance(message := peer.receive(SOON_S), kind):
        assert message is not None, "the server hung up"
    return message


def test_a_worker_of_another_scope_cannot_be_the_victim_nor_touch_its_job(servers: list[ServerProcess]) -> None:
    here, there = servers
    victim, welcome = worker(here, bound_token(here), VICTIM, "b.>")
    assert isinstance(welcome, Welcome)
    victim.send(GiveCredit(1))
    with here.client() as client, there.client() as other, victim:
        job = client.submit(subject="b.x", payload=b"TOP-SECRET", job_id="secret")
        assigned = received(victim, AssignJobs)
        assert isinstance(assigned, AssignJobs)
        [grant] = assigned.grants
        claim = Claim("secret", grant.lease_id, grant.attempt)
        token = there.create_token("worker", scope=("a.>",))

        # when: it says that it is the victim, with everything that it could know
        impostor, answer = worker(there, token, VICTIM, "a.x", resumed=True)
        with impostor:
            assert getattr(answer, "code", "") == "FORBIDDEN"

        # when: under a name of its own it shows and reports the victim's lease
        stranger, welcome = worker(there, token, "stranger", "a.x")
        with stranger:
            assert isinstance(welcome, Welcome)
            stranger.send(Heartbeat(7, [claim]), JobsReleased([claim]))
            renewed = received(stranger, HeartbeatAnswer)
            stranger.send(JobsFinished([Ending("secret", claim.lease_id, claim.attempt, Outcome(result=b"forged"))]))
            recorded = received(stranger, JobsRecorded)
        assert isinstance(renewed, HeartbeatAnswer)
        assert renewed.lost == [claim.lease_id]
        assert isinstance(recorded, JobsRecorded)
        assert recorded.recorded == []

        # then: the victim goes on, and its result is the job's
        victim.send(JobsFinished([Ending("secret", claim.lease_id, claim.attempt, Outcome(result=b"right"))]))
        received(victim, JobsRecorded)
        assert job.result(SOON_S) == b"right"
        assert other.status("secret")["attempt"] == 1


def test_revoking_a_token_frees_the_jobs_that_it_took_and_keeps(servers: list[ServerProcess]) -> None:
    here, there = servers
    token_id, token = there.create_named_token("worker")
    hoarder, welcome = worker(
        there, token, "hoarder", ">", ttl_s=600.0, on_disconnect=OnDisconnect.KEEP, reconnect_grace_s=3600.0
    )
    assert isinstance(welcome, Welcome)
    names = [f"job-{number}" for number in range(20)]
    with here.client() as client, hoarder:
        hoarder.send(GiveCredit(20))
        for name in names:
            client.submit(subject="b.x", payload=b"", job_id=name)
        until(lambda: {client.status(name)["state"] for name in names} == {"ASSIGNED"}, SOON_S, "it took all of them")

    with here.client() as client:
        client.wait(client.aio.request("token.revoke", token_id=token_id))

        until(lambda: {client.status(name)["state"] for name in names} == {"PENDING"}, SOON_S, "they are free again")
        assert {client.status(name)["losses"] for name in names} == {0}
