"""A registry that somebody else writes to, and the token of the agents: to whom it is sent, and to whom it is not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tasuki.agent.results import Peers
from tasuki.core.address import parse_agents
from tasuki.core.failover import registry_records
from tasuki.core.failover.agent_protocol import AgentOutcome, EndedMarker
from tasuki.core.job import Outcome
from tasuki.core.store_messages import LeaseRequest, Report, Turn
from tasuki.errors import AgentRefusal
from tests.agent.sharing import SharingStage, two_nodes
from tests.agent.stage import code_of
from tests.support.redis_service import RedisService

TOKEN = "the-token-of-all-agents-0123456789"
LARGE = "head -c 300000 /dev/urandom > out/large"


class Listener:
    """Somebody's HTTP server, which notes every request and whether it brought a token."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str | None]] = []
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                requests.append((self.command, self.path, self.headers["Authorization"]))
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_DELETE = do_GET

            def log_message(self, *args: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture(scope="module")
def nodes(redis_service: RedisService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SharingStage, SharingStage]]:
    with two_nodes(tmp_path_factory.mktemp("nodes"), redis_service.url(), tokens=(TOKEN,)) as nodes:
        yield nodes


def ended(job_id: str) -> EndedMarker:
    return EndedMarker(
        job_id=job_id,
        node="n9",
        exec="sh",
        input="ab" * 32,
        attempt=1,
        started_at=1.0,
        outcome=AgentOutcome.SUCCEEDED,
        exit_code=0,
        ended_at=2.0,
        result_sha256="cd" * 32,
        result_bytes=300_000,
    )


def record(stage: SharingStage, job_id: str, place: dict[str, Any]) -> None:
    """Write a finished job into the registry, as one who has no token of the agents can."""
    request = LeaseRequest(worker_id="n9-01234567", incarnation="i", job_ids=(job_id,), limit=1, ttl_s=15.0)
    submission = registry_records.submission_of(job_id, "sh", "ab" * 32)
    [[grant]] = stage.execute(Turn(rerun=[submission], lease=[request])).lease
    outcome = Outcome(exit_code=0, result_sha256="cd" * 32, meta={"agent": place})
    stage.execute(Turn(finish=[Report(job_id, "n9-01234567", grant.lease_id, grant.attempt, outcome)]))


@pytest.mark.parametrize("job_in_record", ["{}", "../../admin/delete-everything?x=1&"])
@pytest.mark.parametrize("path", ["", "/prefix"])
def test_a_forged_record_leads_no_agent_anywhere(
    nodes: tuple[SharingStage, SharingStage], job_id: str, listener: Listener, job_in_record: str, path: str
) -> None:
    marker = msgspec.to_builtins(ended(job_in_record.format(job_id)))
    record(nodes[0], job_id, {"ended": marker, "address": listener.url + path, "proof": "ef" * 32})

    fetched = nodes[1].result(job_id)
    nodes[1].http.delete(f"/jobs/{job_id}")

    assert fetched.status_code in (404, 503), fetched.text
    assert listener.requests == []


def test_the_proof_of_one_result_is_none_for_another_address(
    nodes: tuple[SharingStage, SharingStage], job_id: str, listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tasuki.agent")
    one, two = nodes
    one.run(job_id, LARGE)
    [job] = one.execute(Turn(get=[job_id])).get
    assert job is not None
    assert job.outcome is not None
    place = dict(job.outcome.meta["agent"])
    assert TOKEN not in str(place)
    record(one, f"{job_id}-copied", {**place, "address": listener.url, "ended": {**place["ended"], "job_id": f"{job_id}-copied"}})

    fetched = two.result(f"{job_id}-copied")

    assert code_of(fetched) == (503, "UNAVAILABLE")
    assert "--peers" in fetched.text
    [line] = (line for line in caplog.records if getattr(line, "code", "") == "UNAVAILABLE")
    assert (line.peer, line.job_id) == (listener.url, f"{job_id}-copied")
    assert TOKEN not in caplog.text
    assert listener.requests == []
    assert two.result(job_id).status_code == 200


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://n1.example.com:7090", "without TLS"),
        ("http://10.0.0.1:7090", "without TLS"),
        ("http://127.0.0.1:1", "without TLS"),  # nobody listens there, or another user
        ("https://n1/prefix", "not the address of an agent"),
        ("https://n1:7090?x=1", "not the address of an agent"),
        ("https://user@n1:7090", "not the address of an agent"),
        ("https://n1:7090,n2:7090", "not the address of an agent"),
        ("unix:///run/socket", "not the address of an agent"),
        ("", "not the address of an agent"),
    ],
)
def test_an_address_is_sent_the_token_only_over_tls_or_to_a_listener_of_the_same_user(address: str, words: str) -> None:
    peers = Peers((TOKEN,), None)

    with pytest.raises(AgentRefusal, match=words):
        peers.at(peers.location(ended("job"), address))


def test_a_peer_is_believed_by_any_common_token_or_because_it_was_named() -> None:
    place = Peers((TOKEN, "another"), None).location(ended("job"), "https://n1:7090")

    assert Peers(("new", TOKEN), None).at(place).token == "new"
    with pytest.raises(AgentRefusal, match="has not proven"):
        Peers(("new",), None).at(place)
    named = parse_agents("http://n2:7090")
    assert Peers((TOKEN,), None, named).at(registry_records.ResultLocation(ended("job"), "http://n2:7090")).token == TOKEN


@pytest.mark.parametrize(
    "changed", [{"job_id": "other"}, {"node": "n8"}, {"attempt": 2}, {"result_sha256": "ef" * 32}, {"result_bytes": 1}]
)
def test_a_proof_holds_for_one_result(changed: dict[str, Any]) -> None:
    place = Peers((TOKEN,), None).location(ended("job"), "https://n1:7090")

    assert place.proves(TOKEN)
    assert not replace(place, ended=replace(place.ended, **changed)).proves(TOKEN)
    assert not replace(place, address="https://n2:7090").proves(TOKEN)
