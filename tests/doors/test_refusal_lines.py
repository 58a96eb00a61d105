"""Refusals at the real doors, TCP and HTTP: each is one line in the log, with its code and the peer, without a secret."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from tasuki.core.protocol import HelloClient
from tests.doors.http.stage import Stage
from tests.doors.raw import bomb
from tests.doors.test_limits import in_thread, opened

WRONG = "tsk_c_" + "wr0ng" * 8


def codes(caplog: pytest.LogCaptureFixture) -> list[str]:
    refused = [record.__dict__ for record in caplog.records if "code" in record.__dict__]
    assert all(str(facts["peer"]).startswith("127.0.0.1:") for facts in refused)
    return [str(facts["code"]) for facts in refused]


def test_peers_that_the_tcp_door_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tasuki")

    async def main() -> None:
        async with opened(tmp_path) as door:
            with door.peer() as peer:  # a wrong token
                peer.send(HelloClient(msg_id=1, client_id="c", token=WRONG))
                await in_thread(peer.farewell)
            with door.peer() as peer:  # a frame that is too large
                peer.send_bytes(bomb())
                await in_thread(peer.farewell)

    asyncio.run(main())

    assert codes(caplog) == ["UNAUTHORIZED", "TOO_LARGE"]
    assert WRONG not in caplog.text


def test_requests_that_the_http_door_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tasuki")
    with Stage(tmp_path) as stage:
        narrow = stage.create_token("client", scope=("a.>",))
        for token, job in [
            (WRONG, {"subject": "a.x"}),
            (narrow, {"subject": "b.x"}),
            (narrow, {"subject": "a.x", "job_id": "\x1b"}),
        ]:
            assert stage.post("/v1/jobs", job, token).status_code >= 400
        assert stage.get("/v1/jobs/no-such-job", narrow).status_code == 404

    assert codes(caplog) == ["UNAUTHORIZED", "FORBIDDEN", "INVALID"]
    assert WRONG not in caplog.text
    assert "\x1b" not in caplog.text
