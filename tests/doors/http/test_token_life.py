"""The life of a token over HTTP: an enrol token becomes a worker's, is rotated, and ends. On each store."""

from __future__ import annotations

import re
import time
from concurrent import futures
from typing import Any

from tests.doors.http.stage import Stage, Worker, on_each_store
from tests.support.waiting import until

pytestmark = on_each_store


def test_an_expired_token_is_401(stage: Stage) -> None:
    expired = stage.create_token("worker", expires_at=time.time() - 1, worker_id="late", scope=["job.assign.zpe"])

    answer = stage.post("/calc/zpe/compute/jobs/lease", {}, expired)

    assert answer.status_code == 401
    assert "expired" in answer.json()["error"]["message"]


def test_a_revoked_token_is_403_at_once(stage: Stage) -> None:
    token_id, secret = stage.create_named_token("client")
    before = stage.get("/v1/jobs", secret)
    stage.revoke_token(token_id)

    after = stage.get("/v1/jobs", secret)

    assert before.status_code == 200
    assert (after.status_code, after.json()["error"]["code"]) == (403, "TOKEN_REVOKED")


def test_a_worker_is_revoked_with_all_its_tokens(stage: Stage, worker: Worker) -> None:
    assert worker.lease().status_code == 204

    answer = stage.call("DELETE", f"/calc/zpe/compute/servers/{worker.worker_id}", stage.admin)

    assert answer.json() == {"worker_id": worker.worker_id, "revoked": 1}
    assert worker.lease().json()["error"]["code"] == "TOKEN_REVOKED"
    again = stage.call("DELETE", f"/calc/zpe/compute/servers/{worker.worker_id}", stage.admin)
    assert again.status_code == 404


def test_a_waiting_lease_of_a_revoked_worker_ends_with_403(stage: Stage, worker: Worker) -> None:
    with futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.lease, 20)
        wait_for_worker(stage, worker)
        stage.call("DELETE", f"/calc/zpe/compute/servers/{worker.worker_id}", stage.admin)

        answer = waiting.result(30.0)

    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "TOKEN_REVOKED")


def wait_for_worker(stage: Stage, worker: Worker) -> None:
    """Until the server has the credit of a waiting lease."""

    def waits() -> bool:
        workers = stage.get("/v1/stats", stage.admin).json()["workers"]
        return any(one["worker_id"] == worker.worker_id and one["credit"] for one in workers)

    until(waits, what=f"{worker.worker_id} waits for a job")


def test_a_rotated_token_takes_the_place_of_the_one_before(stage: Stage, worker: Worker) -> None:
    leased = worker.take(stage.submit())

    answer = worker.post(f"/servers/{worker.worker_id}/rotate")
    new = Worker(stage, "zpe", worker.worker_id, answer.json()["worker_token"])

    assert answer.json()["worker_id"] == worker.worker_id
    assert worker.renew(leased).json()["error"]["code"] == "TOKEN_REVOKED"
    assert new.renew(leased).status_code == 200
    assert new.finish(leased).status_code == 200


def test_leases_of_an_app_worker_have_an_incarnation_that_no_other_worker_can_guess(stage: Stage, worker: Worker) -> None:
    workers = (worker, stage.register())
    job_ids = [one.take(stage.submit())["job_id"] for one in workers]

    jobs = stage.run(stage.server.ask(lambda reader: reader.get(job_ids)))

    incarnations = {job.lease.incarnation for job in jobs}
    assert len(incarnations) == len(workers)
    assert all(re.fullmatch("[0-9a-f]{16,}", incarnation) for incarnation in incarnations)


def test_registering_again_takes_an_enrol_token_for_that_worker(stage: Stage, worker: Worker) -> None:
    again = stage.register(worker_id=worker.worker_id)

    assert again.worker_id == worker.worker_id
    assert again.lease().status_code == 204
    assert worker.lease().json()["error"]["code"] == "TOKEN_REVOKED"


def test_an_enrol_token_registers_one_worker_whoever_is_quicker(stage: Stage) -> None:
    token = stage.enroll()

    def register(_: int) -> Any:
        return stage.post("/calc/zpe/compute/servers/register", {}, token)

    with futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(register, range(6)))

    assert sorted(answer.status_code for answer in answers) == [200] + [403] * 5


def test_an_enrol_token_that_was_used_is_403(stage: Stage) -> None:
    token = stage.enroll()
    first, second = [stage.post("/calc/zpe/compute/servers/register", {}, token) for _ in range(2)]

    assert first.status_code == 200
    assert (second.status_code, second.json()["error"]["code"]) == (403, "TOKEN_REVOKED")


def test_of_two_rotations_at_once_one_wins_and_its_token_is_good(stage: Stage, worker: Worker) -> None:
    def rotate(_: int) -> Any:
        return worker.post(f"/servers/{worker.worker_id}/rotate")

    with futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(rotate, range(4)))

    tokens = [answer.json()["worker_token"] for answer in answers if answer.status_code == 200]
    assert len(tokens) == 1, [answer.text for answer in answers]
    assert {answer.status_code for answer in answers} <= {200, 403, 503}  # 503: asked again, it would be told 403
    assert Worker(stage, "zpe", worker.worker_id, tokens[0]).lease().status_code == 204
    assert worker.lease().json()["error"]["code"] == "TOKEN_REVOKED"


def test_a_worker_of_any_subjects_registers_and_gets_the_scope_of_the_enrol_token(stage: Stage) -> None:
    scope = ["render.eu.>", "common.*"]
    now = time.time()
    _, enrol = stage.create_named_token("enrol", scope=scope, created_at=now, expires_at=now + 60)

    told = stage.post("/v1/workers/register", {"label": "lab PC"}, enrol).json()
    itself = stage.get("/v1/workers/self", told["worker_token"]).json()

    assert (told["scope"], told["ttl_seconds"]) == (scope, 7 * 86400)
    assert itself == {key: told[key] for key in ("worker_id", "token_id", "scope", "expires_at")}


def test_an_enrol_token_is_spent_by_either_way_to_register(stage: Stage) -> None:
    token = stage.enroll()
    first = stage.post("/v1/workers/register", {}, token)
    second = stage.post("/calc/zpe/compute/servers/register", {}, token)

    assert first.status_code == 200
    assert first.json()["scope"] == ["job.assign.zpe"]
    assert second.json()["error"]["code"] == "TOKEN_REVOKED"


def test_a_worker_that_is_revoked_learns_it_when_it_asks(stage: Stage, worker: Worker) -> None:
    before = stage.get("/v1/workers/self", worker.token)
    stage.call("DELETE", f"/calc/zpe/compute/servers/{worker.worker_id}", stage.admin)

    after = stage.get("/v1/workers/self", worker.token)

    assert before.json()["worker_id"] == worker.worker_id
    assert after.json()["error"]["code"] == "TOKEN_REVOKED"
