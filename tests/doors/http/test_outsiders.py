"""Outsiders who write the keys of an app in Redis by hand, and what the peers of the HTTP door see of it."""

from __future__ import annotations

from collections.abc import Iterator
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
