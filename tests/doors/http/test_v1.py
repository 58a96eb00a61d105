"""/v1: what a client can ask over HTTP is what it can ask over TCP."""

from __future__ import annotations

import base64
import json
from concurrent import futures
from typing import Any

import pytest

from tasuki.doors.http.v1 import result_headers
from tests.doors.http.stage import ANSWER, Stage, Worker


def code(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_one_job_is_submitted_and_seen(stage: Stage) -> None:
    body = {"job_id": "v1-one", "exec": "echo", "args": ["hello"], "priority": 7, "headers": {"why": "test"}}

    answers = [stage.post("/v1/jobs", body) for _ in range(2)]
    view = stage.get("/v1/jobs/v1-one").json()

    assert [answer.json() for answer in answers] == [
        {"job_id": "v1-one", "state": "PENDING", "created": True},
        {"job_id": "v1-one", "state": "PENDING"},
    ]
    assert (view["state"], view["exec"], view["args"], view["priority"]) == ("PENDING", "echo", ["hello"], 7)


def test_a_subject_below_job_submit_is_shown_below_job_assign(stage: Stage) -> None:
    stage.post("/v1/jobs", {"job_id": "v1-submit", "subject": "job.submit.books.close"})
    stage.post("/v1/jobs", {"jobs": [{"job_id": "v1-submit-many", "subject": "job.submit.books.close"}]})

    for job_id in ("v1-submit", "v1-submit-many"):
        assert stage.get(f"/v1/jobs/{job_id}").json()["subject"] == "job.assign.books.close"


def test_many_jobs_are_submitted_and_each_has_its_answer(stage: Stage) -> None:
    jobs = [{"exec": "echo"}, {"exec": "echo", "priority": 99}, {"job_id": "bad id"}]

    answer = stage.post("/v1/jobs", {"jobs": jobs}).json()["jobs"]

    assert [item.get("state") for item in answer] == ["PENDING", None, None]
    assert [item["error"]["code"] for item in answer[1:]] == ["INVALID_PAYLOAD"] * 2


def test_a_broadcast_has_a_job_for_each_worker_and_is_a_request_of_its_own(stage: Stage) -> None:
    worker = stage.register()
    worker.lease()
    body = {"job_id": "v1-all", "subject": "job.assign.zpe", "broadcast": True}

    answer = stage.post("/v1/jobs", body).json()["jobs"]

    assert [item["job_id"] for item in answer if item["job_id"].endswith(worker.worker_id)] == [f"v1-all.{worker.worker_id}"]
    assert {one["array_id"] for one in stage.get("/v1/jobs?array_id=v1-all").json()["jobs"]} == {"v1-all"}
    assert code(stage.post("/v1/jobs", {**body, "subject": "nobody.>"})) == (404, "NOT_FOUND")
    assert code(stage.post("/v1/jobs", {"jobs": [body]})) == (400, "INVALID_PAYLOAD")
    stage.post("/v1/jobs/cancel", {"job_ids": [item["job_id"] for item in answer]})


def test_the_same_id_with_another_body_is_409_and_names_the_field(stage: Stage) -> None:
    stage.post("/v1/jobs", {"job_id": "v1-twice", "exec": "echo"})

    answer = stage.post("/v1/jobs", {"job_id": "v1-twice", "exec": "other"})

    assert code(answer) == (409, "CONFLICT")
    assert answer.json()["error"]["details"]["differs"] == ["exec"]


@pytest.mark.parametrize(
    "body",
    [
        {"exec": 5},
        {"unknown": 1},
        {"jobs": []},
        {"jobs": [{}], "exec": "echo"},
        {"payload": "a", "payload_base64": "YQ=="},
        {"payload_base64": "not base64!"},
        {"subject": "a..b"},
        {"priority": 10},
        {"timeout_s": -1},
        {"on_failed": "explode"},
    ],
    ids=str,
)
def test_a_job_that_makes_no_sense_is_400(stage: Stage, body: dict[str, Any]) -> None:
    assert code(stage.post("/v1/jobs", body)) == (400, "INVALID_PAYLOAD")


def test_jobs_are_listed_newest_first_page_by_page(stage: Stage) -> None:
    for n in range(3):
        stage.post("/v1/jobs", {"job_id": f"listed-{n}", "subject": "listed.here"})

    first = stage.get("/v1/jobs?subject=listed.*&limit=2").json()
    rest = stage.get("/v1/jobs", params={"subject": "listed.*", "limit": 2, "cursor": first["cursor"]}).json()

    assert [job["job_id"] for job in first["jobs"]] == ["listed-2", "listed-1"]
    assert [job["job_id"] for job in rest["jobs"]] == ["listed-0"]
    assert [job["job_id"] for job in stage.get("/v1/jobs?state=CANCELED&subject=listed.*").json()["jobs"]] == []


@pytest.mark.parametrize("query", ["state=ASLEEP", "limit=0", "limit=5000", "cursor=x", "colour=red", "subject=a..b"])
def test_a_list_that_makes_no_sense_is_400(stage: Stage, query: str) -> None:
    assert code(stage.get(f"/v1/jobs?{query}")) == (400, "INVALID_PAYLOAD")


def test_jobs_are_canceled_and_set_going_again(stage: Stage) -> None:
    for job_id in ("act-1", "act-2"):
        stage.post("/v1/jobs", {"job_id": job_id, "subject": "act.here"})

    canceled = stage.post("/v1/jobs/act-1/cancel", {"reason": "a test"}).json()
    many = stage.post("/v1/jobs/cancel", {"job_ids": ["act-2"]}).json()
    again = stage.post("/v1/jobs/act-1/requeue", {}).json()
    both = stage.post("/v1/jobs/requeue", {"job_ids": ["act-1", "act-2"]}).json()["jobs"]

    assert canceled == {"job_id": "act-1", "state": "CANCELED", "requested": False}
    assert many["jobs"]["act-2"]["state"] == "CANCELED"
    assert again == {"job_id": "act-1", "state": "PENDING", "done": True}
    assert [both[job_id]["done"] for job_id in ("act-1", "act-2")] == [False, True]


def test_an_unknown_job_is_404_everywhere(stage: Stage) -> None:
    paths = ["/v1/jobs/nobody", "/v1/jobs/nobody/result", "/v1/jobs/nobody/explain", "/v1/jobs/nobody/logs"]

    answers = [stage.get(path) for path in paths]
    acted = [stage.post(f"/v1/jobs/nobody/{verb}", {}) for verb in ("cancel", "requeue")]

    assert [code(answer) for answer in (*answers, *acted)] == [(404, "NOT_FOUND")] * 6


def test_a_result_comes_as_bytes_when_it_is_there(stage: Stage, worker: Worker) -> None:
    job_id = stage.submit()
    before = stage.get(f"/v1/jobs/{job_id}/result")
    leased = worker.take(job_id)
    with futures.ThreadPoolExecutor(2) as pool:
        result = pool.submit(stage.get, f"/v1/jobs/{job_id}/result?wait=20")
        view = pool.submit(stage.get, f"/v1/jobs/{job_id}?wait=20")
        worker.finish(leased)

        assert result.result(30.0).json() == ANSWER["result"]
        assert view.result(30.0).json()["state"] == "SUCCEEDED"
    assert code(before) == (409, "NOT_FINISHED")
    assert result.result().headers["x-tasuki-state"] == "SUCCEEDED"


def test_headers_of_a_result_are_one_of_the_response_whatever_text_they_are() -> None:
    headers = {"content-type": "image/png", "title": "Zürich\r\nX-Forged: 1"}

    found = result_headers({"headers": headers})["X-Tasuki-Headers"]

    assert (json.loads(found), found.isascii(), found.isprintable()) == (headers, True, True)
    assert [result_headers(meta) for meta in ({}, {"headers": "none"}, {"headers": {"long": "x" * 4096}})] == [{}, {}, {}]


def test_outputs_that_are_not_in_a_result_are_counted_in_a_header_of_the_response() -> None:
    assert result_headers({"left_out": 3}) == {"Tasuki-Left-Out": "3"}
    assert [result_headers({"left_out": wrong}) for wrong in (0, -1, "3", None)] == [{}, {}, {}, {}]


def test_a_large_result_is_streamed_whole(stage: Stage, worker: Worker) -> None:
    job_id = stage.submit()
    text = "0123456789" * 300_000

    worker.finish(worker.take(job_id), summary_text=text)
    answer = stage.get(f"/v1/jobs/{job_id}/result")

    assert answer.json()["summary_text"] == text
    assert int(answer.headers["content-length"]) == len(answer.content)


def test_a_job_that_was_canceled_has_no_result(stage: Stage) -> None:
    stage.post("/v1/jobs", {"job_id": "gone", "subject": "gone.here"})
    stage.post("/v1/jobs/gone/cancel", {})

    answer = stage.get("/v1/jobs/gone/result?wait=5")

    assert code(answer) == (409, "JOB_FAILED")
    assert answer.json()["error"]["details"]["state"] == "CANCELED"


def test_a_payload_may_be_bytes(stage: Stage) -> None:
    payload = bytes(range(256))

    stage.post("/v1/jobs", {"job_id": "bytes", "payload_base64": base64.b64encode(payload).decode(), "subject": "bytes.here"})

    assert stage.get("/v1/jobs/bytes").json()["payload_bytes"] == 256


def test_a_job_is_explained(stage: Stage) -> None:
    stage.post("/v1/jobs", {"job_id": "why", "subject": "nobody.listens"})

    assert "why" in stage.get("/v1/jobs/why/explain").text


def test_stats_count_the_jobs_of_a_group(stage: Stage) -> None:
    stage.post("/v1/jobs", {"subject": "counted.here"})

    answer = stage.get("/v1/stats", stage.admin).json()

    assert answer["groups"]["counted"]["pending"] == 1
    assert len(answer["servers"]) == 1


def test_health_needs_no_token(stage: Stage) -> None:
    answers = [stage.call("GET", path) for path in ("/healthz", "/readyz")]

    assert [(answer.status_code, answer.json()["status"]) for answer in answers] == [(200, "ok"), (200, "ready")]


def test_a_server_that_cannot_take_jobs_is_not_ready(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage.server, "_look_at_disk", lambda: None)  # it would find room
    stage.server.broker.disk_problem = "/data has 5 bytes free"
    try:
        answer = stage.call("GET", "/readyz")
        submitted = stage.post("/v1/jobs", {"exec": "echo"})
    finally:
        stage.server.broker.disk_problem = ""

    assert code(answer) == (503, "UNAVAILABLE")
    assert "5 bytes" not in answer.text
    assert code(submitted) == (503, "DISK_FULL")
