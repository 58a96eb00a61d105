"""The log of refusals: a line for each, with code, peer and job_id; bounded per peer; no secrets, no control characters."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tasuki.cli.process import JsonFormatter
from tasuki.core.job import JobSpec, Outcome
from tasuki.core.machine import Peer
from tasuki.core.protocol import (
    AssignJobs,
    BlobPut,
    Chunk,
    Ending,
    ErrorMessage,
    GiveCredit,
    HelloClient,
    JobsFinished,
    JobsRecorded,
    Reply,
    Request,
    SubmitJobs,
)
from tasuki.errors import Forbidden, NotFound
from tasuki.server.refusal_log import INTERVAL_S, LINES_MAX, PEERS_MAX, RefusalLog
from tasuki.server.server import Server
from tests.server.peers import FakeConnection, client, worker
from tests.server.test_server import GatedStore, serve


def lines(caplog: pytest.LogCaptureFixture, code: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "code", "") == code]


class Stage:
    """A log with a clock that stands still until the test moves it."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "tasuki")
        self._caplog = caplog
        self.now_s = 0.0
        self.log = RefusalLog(logging.getLogger("tasuki.server"), lambda: self.now_s)

    def refuse(self, *peers: str) -> list[str]:
        """Refuse each of these peers; return the lines."""
        before = len(self._caplog.records)
        for peer in peers:
            self.log.write(peer, "FORBIDDEN", "no")
        return [record.getMessage() for record in self._caplog.records[before:]]


def test_a_peer_gets_its_lines_and_then_the_number_that_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(caplog)
    # Given a host that is refused three times more than is logged, on many ports
    assert len(stage.refuse(*(f"10.0.0.1:{port}" for port in range(LINES_MAX + 3)))) == LINES_MAX
    # Then another host is logged as before, and the first one again after the interval, with the number
    assert stage.refuse("10.0.0.2:1")
    stage.now_s = INTERVAL_S - 0.1
    assert not stage.refuse("10.0.0.1:1")
    stage.now_s = INTERVAL_S
    assert ["4 more" in line for line in stage.refuse("10.0.0.1:1", "10.0.0.1:2")] == [True, False]


def test_any_number_of_hosts_takes_bounded_memory_and_a_bounded_number_of_lines(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(caplog)
    assert len(stage.refuse(*(f"fd00::{number:x}:1" for number in range(3 * PEERS_MAX)))) == PEERS_MAX + LINES_MAX
    assert len(stage.log._peers) <= PEERS_MAX + 1
    stage.now_s = INTERVAL_S
    assert stage.refuse("10.0.0.1:1")


def test_a_line_has_code_peer_and_job_id_and_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    log = RefusalLog(logging.getLogger("tasuki.server"))
    with caplog.at_level(logging.INFO, "tasuki"):
        log.error("10.0.0.1:4711", Forbidden("no: tsk_w_" + "s3cret" * 7 + " \x1b[2J\nforged line"), "job-1")
        log.error("10.0.0.1:4711", NotFound("an answer, not a refusal"))
    [record] = caplog.records
    entry = json.loads(JsonFormatter().format(record))
    assert (entry["level"], entry["code"], entry["peer"], entry["job_id"]) == ("info", "FORBIDDEN", "10.0.0.1:4711", "job-1")
    assert "s3cret" not in entry["message"]
    assert entry["message"].isprintable()


def test_a_server_logs_refused_peers_and_fenced_reports(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, store: GatedStore
) -> None:
    async def work(server: Server) -> None:
        # Given a worker that holds jobs a and b
        (mine, link), (its, runner) = await client(server), await worker(server)
        server.received(its, GiveCredit(2))
        server.received(mine, SubmitJobs(5, [JobSpec(job_id="a"), JobSpec(job_id="b")]))
        grant = (await runner.wait_for(AssignJobs)).grants[0]
        # When it reports a for another attempt, a stranger comes with a wrong token, and a client asks too much
        server.received(its, JobsFinished([Ending("a", grant.lease_id, grant.attempt + 1, Outcome(result=b"x"))]))
        assert (await runner.wait_for(JobsRecorded)).fenced
        stranger = FakeConnection()
        stranger.peer = Peer("tcp", None, "10.0.0.9:1234")
        server.received(server.opened(stranger), HelloClient(msg_id=1, client_id="c2", token="tsk_a_guessed"))
        await stranger.until(lambda: stranger.closed != "")
        server.received(mine, Request(6, "find", {"limit": -1}))
        assert (await link.wait_for(ErrorMessage)).code == "INVALID"
        # and the worker goes without an end
        server.closed(its, "the peer closed the connection")

    with caplog.at_level(logging.INFO, "tasuki"):
        serve(tmp_path, store, work)
    # Then each is one line
    [fenced], [refused], [lost] = (lines(caplog, code) for code in ("FENCED", "UNAUTHORIZED", "WORKER_LOST"))
    assert fenced.__dict__["job_id"] == "a"
    assert "lease" in fenced.getMessage() or "attempt" in fenced.getMessage()
    assert refused.__dict__["peer"] == "10.0.0.9:1234"
    assert "w1" in lost.getMessage()
    assert len(lines(caplog, "INVALID")) == 1
    assert "guessed" not in caplog.text


def test_a_server_logs_uploads_that_are_refused_or_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, store: GatedStore
) -> None:
    async def work(server: Server) -> None:
        mine, link = await client(server)
        server.received(mine, BlobPut(7, "a" * 64, 2 * 10**6))  # the limit of this server is 10**6
        await link.wait_for(ErrorMessage)
        server.received(mine, BlobPut(8, "b" * 64, 1000))
        await link.wait_for(Reply)
        server.received(mine, Chunk(8, 0, b"x" * 10))
        server.closed(mine, "the peer closed the connection")

    with caplog.at_level(logging.INFO, "tasuki"):
        serve(tmp_path, store, work)
    [refused], [cut] = lines(caplog, "TOO_LARGE"), lines(caplog, "UPLOAD_CUT")
    assert "2000000" in refused.getMessage()
    assert "10 of 1000 bytes" in cut.getMessage()


@pytest.fixture
def store() -> GatedStore:
    return GatedStore()
