"""GET /result: whole, from a byte on, and what happens to a download when its job goes away."""

from __future__ import annotations

import httpx
import pytest

from tests.agent.stage import AgentStage, code_of, report

BIG = "head -c 3000000 /dev/urandom > out/big.bin"


@pytest.fixture(scope="module")
def whole(stage: AgentStage) -> bytes:
    answer = stage.run("big", BIG)
    assert answer.status_code == 200
    assert len(answer.content) > 2_900_000
    return answer.content


def get(stage: AgentStage, **headers: str) -> httpx.Response:
    return stage.http.get("/result/big", headers={name.replace("_", "-"): value for name, value in headers.items()})


def test_a_large_result_is_the_same_from_the_run_and_later(stage: AgentStage, whole: bytes) -> None:
    answer = get(stage)

    assert answer.content == whole
    assert answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["tasuki-outcome"] == "succeeded"
    assert "tasuki-cache" not in answer.headers


@pytest.mark.parametrize(
    ("asked", "first", "stop"),
    [("bytes=0-0", 0, 1), ("bytes=5-", 5, None), ("bytes=1000000-1999999", 1_000_000, 2_000_000), ("bytes=-10", -10, None),
     ("bytes=0-99999999999", 0, None)],
)  # fmt: skip
def test_a_range_is_answered_with_these_bytes(stage: AgentStage, whole: bytes, asked: str, first: int, stop: int | None) -> None:
    answer = get(stage, Range=asked)

    assert answer.status_code == 206
    assert answer.content == whole[first:stop]
    start = first % len(whole)
    assert answer.headers["content-range"] == f"bytes {start}-{start + len(answer.content) - 1}/{len(whole)}"


@pytest.mark.parametrize("asked", ["bytes=-", "bytes=5-4", "bytes=x", "lines=1-2", "bytes=0-1,5-6", "bytes=--1", "bytes=٣-"])
def test_what_is_no_single_range_is_answered_with_all(stage: AgentStage, whole: bytes, asked: str) -> None:
    answer = stage.http.get("/result/big", headers={"Range": asked.encode()})

    assert (answer.status_code, answer.content == whole) == (200, True)


@pytest.mark.parametrize("asked", ["bytes=99999999-", "bytes=-0"])
def test_a_range_beyond_the_end_is_416(stage: AgentStage, whole: bytes, asked: str) -> None:
    answer = get(stage, Range=asked)

    assert code_of(answer) == (416, "RANGE_NOT_SATISFIABLE")
    assert answer.headers["content-range"] == f"bytes */{len(whole)}"


def test_a_download_goes_on_only_if_it_is_the_same_result(stage: AgentStage, whole: bytes) -> None:
    etag = get(stage, Range="bytes=0-0").headers["etag"]

    assert get(stage, Range="bytes=100-", If_Range=etag).content == whole[100:]
    assert get(stage, Range="bytes=100-", If_Range='"other"').status_code == 200


def test_head_tells_the_size(stage: AgentStage, whole: bytes) -> None:
    answer = stage.http.head("/result/big")

    assert (answer.status_code, answer.headers["content-length"], answer.content) == (200, str(len(whole)), b"")


def test_a_range_of_a_post_is_ignored(stage: AgentStage, whole: bytes) -> None:
    body = {"file": ("job.sh", BIG.encode())}

    assert stage.http.post("/run/big", files=body, headers={"Range": "bytes=0-1"}).content == whole


def test_a_download_outlives_its_job(stage: AgentStage, job_id: str) -> None:
    stage.run(job_id, BIG)
    with stage.http.stream("GET", f"/result/{job_id}") as answer:
        pieces = answer.iter_bytes(65536)
        received = next(pieces)
        assert stage.http.delete(f"/jobs/{job_id}").status_code == 200

        received += b"".join(pieces)

    assert len(received) == int(answer.headers["content-length"])


def test_a_job_that_is_not_there_is_404(stage: AgentStage) -> None:
    for path in ("/result/nobody", "/jobs/nobody"):
        assert code_of(stage.http.get(path)) == (404, "NOT_FOUND")


def test_outputs_that_were_left_out_are_counted_in_a_header(stage: AgentStage, job_id: str) -> None:
    whole = stage.run(f"{job_id}-whole", "echo x > out/x")
    answer = stage.run(job_id, "ln -s x out/one; ln -s x out/two; mkfifo out/three")

    assert "tasuki-left-out" not in whole.headers
    assert answer.headers["tasuki-left-out"] == "3"
    assert stage.http.get(f"/result/{job_id}").headers["tasuki-left-out"] == "3"
    assert stage.http.get(f"/jobs/{job_id}").json()["left_out"] == 3
    assert report(answer.content)["left_out_count"] == 3
