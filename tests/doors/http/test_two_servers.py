"""Two servers with an HTTP door each over one PostgreSQL: whichever a request reaches, the answer is the same."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from tasuki.doors.http.workers import HttpWorker
from tasuki.errors import ProtocolError
from tests.doors.http.stage import ANSWER, Stage, Worker

pytestmark = pytest.mark.e2e


@pytest.fixture
def pair(tmp_path: Path, postgres_url: str) -> Iterator[tuple[Stage, Stage]]:
    with Stage(tmp_path / "one", store=postgres_url) as one, Stage(tmp_path / "two", store=postgres_url) as two:
        yield one, two


def at(stage: Stage, worker: Worker) -> Worker:
    return Worker(stage, worker.app, worker.worker_id, worker.token)


def test_a_worker_may_talk_to_both(pair: tuple[Stage, Stage]) -> None:
    one, two = pair
    worker = one.register()
    job_id = two.submit()

    leased = worker.lease(wait=10).json()
    renewed = at(two, worker).renew(leased)
    recorded = at(two, worker).finish(leased)
    again = worker.finish(leased)
    other = worker.finish(leased, summary_text="another")

    assert leased["job_id"] == job_id
    assert [answer.status_code for answer in (renewed, recorded, again, other)] == [200, 200, 200, 409]
    assert one.get(f"/calc/zpe/jobs/{job_id}/result", one.admin).json()["result"] == ANSWER["result"]


def test_a_report_whose_connection_a_late_hint_closes_is_sent_again(
    pair: tuple[Stage, Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    worker = one.register()
    two.submit()
    leased = worker.lease(wait=10).json()
    report, sent = HttpWorker._report, list[Any]()

    async def closed_at_first(self: HttpWorker, caller: Any, endings: Any) -> Any:
        sent.append(endings)
        if len(sent) == 1:
            raise ProtocolError("this worker is connected to another server")
        return await report(self, caller, endings)

    monkeypatch.setattr(HttpWorker, "_report", closed_at_first)

    assert worker.finish(leased).status_code == 200
    assert sent[0] == sent[1]


def test_an_enrol_token_is_used_once_at_both_together(pair: tuple[Stage, Stage]) -> None:
    token = pair[0].enroll()
    with futures.ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(stage.post, "/calc/zpe/compute/servers/register", {}, token) for stage in pair * 2]
        statuses = sorted(answer.result(30.0).status_code for answer in asked)

    assert statuses == [200, 403, 403, 403]


def test_a_worker_that_one_revokes_is_refused_by_the_other_at_once(pair: tuple[Stage, Stage]) -> None:
    one, two = pair
    worker = one.register()
    assert at(two, worker).lease().status_code == 204

    one.call("DELETE", f"/calc/zpe/compute/servers/{worker.worker_id}", one.admin)

    assert at(two, worker).lease().json()["error"]["code"] == "TOKEN_REVOKED"


def test_a_waiting_result_is_told_of_an_end_at_the_other_server(pair: tuple[Stage, Stage]) -> None:
    one, two = pair
    worker, job_id = one.register(), two.submit()
    leased = worker.lease(wait=10).json()
    with futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(two.get, f"/calc/zpe/jobs/{job_id}/result?wait=20")
        worker.finish(leased)

        assert waiting.result(15.0).json()["result"] == ANSWER["result"]
