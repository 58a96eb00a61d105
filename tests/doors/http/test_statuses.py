"""Each status of the contract, produced for the reason that the contract gives, always in the one form of errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasuki.doors.http import exchange
from tasuki.doors.http.openapi import DESCRIPTIONS
from tasuki.doors.http.workers import WAITING_MAX
from tests.doors.http.stage import ANSWER, Stage, Worker, on_each_store
from tests.support.waiting import until

CONTRACT = (200, 204, 400, 401, 403, 404, 409, 500)
BESIDE = (405, 413, 429, 503)
Case = Callable[[Stage, Worker], httpx.Response]
SECRET = "/srv/tasuki/store.db at redis://:secret@10.1.2.3:6379"  # what a careless error would name


def lease(stage: Stage, worker: Worker) -> httpx.Response:
    stage.submit()
    return worker.lease()


def lease_of_nothing(stage: Stage, worker: Worker) -> httpx.Response:
    return worker.lease()


def result_without_a_field(stage: Stage, worker: Worker) -> httpx.Response:
    leased = worker.take(stage.submit())
    return worker.post(f"/jobs/{leased['job_id']}/result", {"lease_id": leased["lease_id"], "result": {}, "freqs_csv": ""})


def what_the_framework_cannot_read(stage: Stage, worker: Worker) -> httpx.Response:
    return stage.call("POST", "/calc/zpe/jobs", stage.client, content=b"{", headers={"Content-Type": "application/json"})


def unknown_token(stage: Stage, worker: Worker) -> httpx.Response:
    return Worker(stage, "zpe", worker.worker_id, "tsk_w_unknown").lease()


def expired_token(stage: Stage, worker: Worker) -> httpx.Response:
    fields = {"worker_id": "late", "scope": ["job.assign.zpe"]}
    return Worker(stage, "zpe", "late", stage.create_token("worker", expires_at=time.time() - 1, **fields)).lease()


def token_without_the_right(stage: Stage, worker: Worker) -> httpx.Response:
    return stage.post("/calc/zpe/jobs", {}, worker.token)


def revoked_token(stage: Stage, worker: Worker) -> httpx.Response:
    stage.call("DELETE", f"/calc/zpe/compute/servers/{worker.worker_id}", stage.admin)
    return worker.lease()


def lease_of_another_worker(stage: Stage, worker: Worker) -> httpx.Response:
    leased = worker.take(stage.submit())
    return stage.register().finish(leased)


def unknown_job(stage: Stage, worker: Worker) -> httpx.Response:
    return worker.finish({"job_id": "never-heard-of", "lease_id": "a.1"})


def unknown_worker(stage: Stage, worker: Worker) -> httpx.Response:
    return stage.call("DELETE", "/calc/zpe/compute/servers/w-nobody", stage.admin)


def another_lease(stage: Stage, worker: Worker) -> httpx.Response:
    """The job is leased, and not with this lease."""
    leased = worker.take(stage.submit())
    return worker.finish({**leased, "lease_id": "0" * 30 + ".1"})


def another_result(stage: Stage, worker: Worker) -> httpx.Response:
    """The job is finished, and with another result."""
    leased = worker.take(stage.submit())
    assert worker.finish(leased).status_code == 200
    return worker.finish(leased, summary_text="another")


def another_body(stage: Stage, worker: Worker) -> httpx.Response:
    stage.post("/calc/zpe/jobs?job_id=one-body", {"n": 1})
    return stage.post("/calc/zpe/jobs?job_id=one-body", {"n": 2})


def another_method(stage: Stage, worker: Worker) -> httpx.Response:
    return stage.call("PUT", "/calc/zpe/jobs", stage.client)


def large_payload(stage: Stage, worker: Worker) -> httpx.Response:
    """A payload is part of a job's row; what is larger belongs behind a URL: an app's client cannot upload blobs."""
    answer = stage.post("/calc/zpe/jobs", {"text": "x" * 64 * 1024})
    assert "send its name" in answer.json()["error"]["message"]
    return answer


def job_without_a_body(stage: Stage, worker: Worker) -> httpx.Response:
    """Send the request as `curl -d @missing.json` does."""
    assert stage.call("POST", "/v1/jobs", stage.client, content=b"").status_code == 400
    return stage.call("POST", "/calc/zpe/jobs", stage.client, content=b"")


def enrolment_of_an_id_that_no_worker_can_have(stage: Stage, worker: Worker) -> httpx.Response:
    """Such a worker could never lease: the last token of a subject may name a worker."""
    assert stage.post("/calc/zpe/compute/enroll-tokens", {"worker_id": "default"}, stage.admin).status_code == 400
    return stage.post("/calc/zpe/compute/enroll-tokens", {"worker_id": "my.lab"}, stage.admin)


def large_payload_of_a_batch(stage: Stage, worker: Worker) -> httpx.Response:
    """Told for the job that it is about, in the place of the whole answer's error."""
    answer = stage.post("/calc/zpe/jobs/batch", {"jobs": [{"payload": {"text": "x" * 64 * 1024}}, {"payload": {}}]})
    refused, stored = answer.json()["jobs"]
    assert (answer.status_code, stored["status"]) == (200, "queued")
    return httpx.Response(413, json={"error": refused["error"]})


def too_many_at_once(stage: Stage, worker: Worker) -> httpx.Response:
    with futures.ThreadPoolExecutor(WAITING_MAX) as pool:
        waiting = [pool.submit(worker.lease, 20) for _ in range(WAITING_MAX)]

        def all_wait() -> bool:
            workers = stage.get("/v1/stats", stage.admin).json()["workers"]
            return any(one["worker_id"] == worker.worker_id and one["credit"] == WAITING_MAX for one in workers)

        until(all_wait, what=f"{WAITING_MAX} lease requests wait")
        answer = worker.lease()
        stage.call("DELETE", f"/calc/zpe/compute/servers/{worker.worker_id}", stage.admin)
        assert [one.result(30.0).status_code for one in waiting] == [403] * WAITING_MAX
    return answer


CASES: list[tuple[int, str, Case]] = [
    (200, "", lease),
    (204, "", lease_of_nothing),
    (400, "INVALID_PAYLOAD", result_without_a_field),
    (400, "INVALID_PAYLOAD", what_the_framework_cannot_read),
    (400, "INVALID_PAYLOAD", job_without_a_body),
    (400, "INVALID_PAYLOAD", enrolment_of_an_id_that_no_worker_can_have),
    (401, "UNAUTHORIZED", unknown_token),
    (401, "UNAUTHORIZED", expired_token),
    (403, "FORBIDDEN", token_without_the_right),
    (403, "FORBIDDEN", lease_of_another_worker),
    (403, "TOKEN_REVOKED", revoked_token),
    (404, "NOT_FOUND", unknown_job),
    (404, "NOT_FOUND", unknown_worker),
    (405, "METHOD_NOT_ALLOWED", another_method),
    (409, "FENCED", another_lease),
    (409, "CONFLICT", another_result),
    (409, "CONFLICT", another_body),
    (413, "TOO_LARGE", large_payload),
    (413, "TOO_LARGE", large_payload_of_a_batch),
    (429, "TOO_MANY_REQUESTS", too_many_at_once),
]


@on_each_store
@pytest.mark.parametrize(("status", "code", "case"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_a_status_is_given_for_its_reason(stage: Stage, worker: Worker, status: int, code: str, case: Case) -> None:
    answer = case(stage, worker)

    assert answer.status_code == status, answer.text
    if status >= 400:
        error = answer.json()["error"]
        assert set(answer.json()) == {"error"}
        assert set(error) == {"code", "message", "details"}
        assert error["code"] == code
        assert error["message"]
        assert isinstance(error["details"], dict)


def test_every_status_of_the_contract_is_produced_here_and_documented() -> None:
    assert {status for status, _, _ in CASES} | {500, 503} == {*CONTRACT, *BESIDE}
    assert {*CONTRACT, *BESIDE} <= {405, *DESCRIPTIONS}


def test_a_missing_field_is_told_in_the_words_of_the_contract(stage: Stage, worker: Worker) -> None:
    answer = result_without_a_field(stage, worker)

    expected = {"code": "INVALID_PAYLOAD", "message": "Missing required field: summary_text", "details": {}}
    assert answer.json() == {"error": expected}


# ---------------------------------------------------------------------------------------------------- what goes wrong inside


class Saboteur:
    """Breaks the store at a point of its writing, when it is told to."""

    def __init__(self) -> None:
        self.at: dict[str, Exception] = {}

    def __call__(self, point: str) -> None:
        if point in self.at:
            raise self.at[point]


@pytest.fixture
def saboteur() -> Saboteur:
    return Saboteur()


@pytest.fixture
def broken_stage(tmp_path: Path, saboteur: Saboteur) -> Iterator[Stage]:
    with Stage(tmp_path, fault=saboteur) as stage:
        yield stage


def test_a_defect_while_reading_is_500_and_tells_nothing_of_the_inside(
    stage: Stage, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job_id = stage.submit()

    async def broken(question: object) -> None:
        raise ZeroDivisionError(SECRET)

    monkeypatch.setattr(stage.server._readers, "ask", broken)
    answers = [
        stage.get(f"/calc/zpe/jobs/{job_id}"),
        stage.get("/v1/jobs"),
        stage.get(f"/v1/jobs/{job_id}/explain"),
    ]
    monkeypatch.setattr(stage.server._token_reader, "ask", broken)
    answers.append(worker.lease())

    assert [answer.status_code for answer in answers] == [500] * 4
    for answer in answers:
        assert set(answer.json()["error"]) == {"code", "message", "details"}
        assert answer.json()["error"]["code"] == "INTERNAL"
        assert not [word for word in ("ZeroDivision", "srv", "10.1.2.3", "secret", "Traceback") if word in answer.text]
    assert SECRET in caplog.text


def test_a_defect_while_writing_is_503_tells_nothing_of_the_inside_and_stores_nothing(
    broken_stage: Stage, saboteur: Saboteur
) -> None:
    saboteur.at["submit.written"] = ZeroDivisionError(SECRET)
    refused = broken_stage.post("/calc/zpe/jobs?job_id=twice", {})
    saboteur.at.clear()

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "UNAVAILABLE")
    assert refused.headers["retry-after"]
    assert not [word for word in ("ZeroDivision", "srv", "10.1.2.3", "secret") if word in refused.text]
    assert broken_stage.get("/calc/zpe/jobs/twice").status_code == 404
    assert broken_stage.post("/calc/zpe/jobs?job_id=twice", {}).json()["status"] == "queued"


def test_a_result_is_recorded_once_the_store_can_write_again(broken_stage: Stage, saboteur: Saboteur) -> None:
    worker = broken_stage.register()
    leased = worker.take(broken_stage.submit())
    saboteur.at["finish.written"] = ZeroDivisionError(SECRET)
    with futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.finish, leased)
        until(lambda: broken_stage.server.broker.store_problem, what="the store has refused the result")
        saboteur.at.clear()

        assert waiting.result(20.0).status_code == 200
    assert broken_stage.get(f"/calc/zpe/jobs/{leased['job_id']}/result").json()["result"] == ANSWER["result"]


def test_more_requests_at_once_than_there_is_room_for_are_503(stage: Stage, worker: Worker, monkeypatch: Any) -> None:
    monkeypatch.setattr(exchange, "REQUESTS_MAX", 0)

    answer = worker.lease()

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "OVERLOADED")
    assert answer.headers["retry-after"]
