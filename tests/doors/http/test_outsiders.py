"""Outsiders who write the keys of an app in Redis by hand, and what the peers of the HTTP door see of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from tasuki.core.access import token_sha256
from tests.doors.http.stage import Stage, Worker

pytestmark = pytest.mark.parametrize("store_url", ["redis"], indirect=True, scope="module")


@pytest.fixture
def raw(store_url: str) -> Iterator[Any]:
    """A client for raw commands, as redis-cli would send them."""
    parts = urlsplit(store_url)
    client: Any = redis.Redis(port=parts.port or 0, db=int(parts.path.strip("/")), decode_responses=True)
    yield client
    client.close()


# -- ids -----------------------------------------------------------------------------------------------------------


def test_the_id_of_the_index_of_leases_is_refused_at_every_door(stage: Stage) -> None:
    spec = {"job_id": "index", "subject": "job.assign.zpe"}

    one = stage.post("/calc/zpe/jobs?job_id=index", {})
    many = stage.post("/calc/zpe/jobs/batch", {"jobs": [{"payload": {}, "job_id": "index"}, {"payload": {}, "job_id": "n1"}]})
    other = stage.post("/v1/jobs", {"jobs": [spec]})

    assert one.status_code == 400
    assert "nor be 'index'" in one.json()["error"]["message"]
    assert [job.get("error", {}).get("code") for job in many.json()["jobs"]] == ["INVALID_PAYLOAD", None]
    assert "nor be 'index'" in other.text


def test_jobs_of_outsiders_that_are_none_hold_up_nobody(stage: Stage, worker: Worker, raw: Any) -> None:
    for job_id in ("index", "mol:1", "x/y", ""):
        raw.set(f"zpe:payload:{job_id}", "{}")
        raw.lpush("zpe:queue", job_id)
    raw.set("zpe:status:odd", "queued")
    raw.set("zpe:payload:odd", "{}")
    raw.lpush("zpe:queue", "odd")

    leased = worker.lease(wait=5).json()

    assert leased["job_id"] == "odd"
    assert worker.finish(leased).status_code == 200
    assert stage.get("/calc/zpe/jobs/odd", stage.admin).json()["status"] == "finished"
    dead = stage.get("/v1/jobs?state=FAILED", stage.admin).json()["jobs"]
    assert len(dead) == 4
    assert all(job["job_id"].startswith("refused-") for job in dead)


# -- tokens --------------------------------------------------------------------------------------------------------


def test_a_hash_that_is_put_among_the_revoked_ones_by_hand_is_looked_at_by_every_request(
    stage: Stage, worker: Worker, raw: Any
) -> None:
    assert worker.lease().status_code == 204

    raw.sadd("zpe:revoked_tokens", token_sha256(worker.token))

    answer = worker.lease()
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "TOKEN_REVOKED")


def test_a_worker_whose_hash_was_put_there_by_hand_can_be_deleted_and_then_is_gone(
    stage: Stage, worker: Worker, raw: Any
) -> None:
    sha256 = token_sha256(worker.token)
    raw.sadd("zpe:revoked_tokens", sha256)
    path = f"/calc/zpe/compute/servers/{worker.worker_id}"

    deleted = stage.call("DELETE", path, stage.admin)
    again = stage.call("DELETE", path, stage.admin)

    assert (deleted.status_code, deleted.json()) == (200, {"worker_id": worker.worker_id, "revoked": 1})
    assert again.status_code == 404
    assert float(raw.hget(f"zpe:token:{sha256}", "revoked_at")) > 0


def test_a_token_whose_hash_was_put_there_by_hand_can_be_revoked(stage: Stage, raw: Any) -> None:
    token_id, secret = stage.create_named_token("client")
    raw.sadd("zpe:revoked_tokens", token_sha256(secret))

    stage.revoke_token(token_id)

    assert raw.hexists(f"zpe:token:{token_sha256(secret)}", "revoked_by")
    assert stage.get("/calc/zpe/jobs/j1", secret).json()["error"]["code"] == "TOKEN_REVOKED"


def test_a_token_that_an_outsider_wrote_in_another_way_is_none(stage: Stage, raw: Any) -> None:
    raw.set(f"zpe:token:{token_sha256('text')}", "worker")
    raw.hset(f"zpe:token:{token_sha256('fields')}", "worker_id", "w1")

    assert [stage.get("/v1/stats", secret).status_code for secret in ("text", "fields")] == [401, 401]


# -- details and results -------------------------------------------------------------------------------------------


def test_the_detail_of_a_job_is_the_same_over_http_and_in_its_status_key(stage: Stage, worker: Worker, raw: Any) -> None:
    job_id, seen = stage.submit(), []

    def look() -> None:
        told, kept = stage.status(job_id), raw.hgetall(f"zpe:status:{job_id}")
        assert (told["status"], told["detail"]) == (kept["status"], kept["detail"])
        seen.append(told["detail"])

    look()
    leased = worker.take(job_id)
    look()
    worker.fail(leased)
    look()
    stage.post(f"/v1/jobs/{job_id}/cancel", {}, stage.admin)
    look()

    assert seen[:3] == ["", "", "pw.x exited with code 1; retry 1 of 3 in 10 s"]
    assert seen[3].startswith("canceled by ")


@pytest.mark.parametrize("freqs_bytes", [10, 20_000])
def test_a_large_result_leaves_a_pointer_and_the_small_parts(stage: Stage, worker: Worker, raw: Any, freqs_bytes: int) -> None:
    job_id = stage.submit()
    answer = {"result": {"modes": "x" * 100_000}, "summary_text": "ZPE 0.27 eV", "freqs_csv": "f" * freqs_bytes}

    assert worker.finish(worker.take(job_id), **answer).status_code == 200

    pointer = json.loads(raw.get(f"zpe:result:{job_id}"))["tasuki_blob"]
    assert pointer["size_bytes"] > 100_000
    assert raw.get(f"zpe:summary:{job_id}") == "ZPE 0.27 eV"
    assert raw.get(f"zpe:freqs:{job_id}") == (answer["freqs_csv"] if freqs_bytes == 10 else None)
    assert raw.ttl(f"zpe:result:{job_id}") > 0
    read = stage.get(f"/calc/zpe/jobs/{job_id}/result").json()
    assert {name: read[name] for name in answer} == answer


def test_a_large_result_that_is_at_another_server_is_not_a_job_that_nobody_knows(
    stage: Stage, worker: Worker, store_url: str, tmp_path: Path
) -> None:
    job_id = stage.submit()
    worker.finish(worker.take(job_id), result={"modes": "x" * 100_000})

    with Stage(tmp_path, store=store_url) as other:
        for path in (f"/calc/zpe/jobs/{job_id}/result", f"/v1/jobs/{job_id}/result"):
            answer = other.get(path, stage.client)

            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "BLOB_UNAVAILABLE")
            assert "--blobs" in answer.json()["error"]["message"]
            assert str(tmp_path) not in answer.text
