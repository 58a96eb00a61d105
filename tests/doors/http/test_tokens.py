"""Who may do what over HTTP: every route with every kind of token, and the life of a worker's token."""

from __future__ import annotations

import re
import time
from concurrent import futures
from typing import Any

import pytest

from tasuki.doors.http.routes import ROUTES, Route
from tests.doors.http.stage import ANSWER, Stage, Worker
from tests.processes import wait_until

PROTECTED = [route for route in ROUTES if route.kinds]
KINDS = ("client", "admin", "worker", "enrol")
MADE_UP = {"app": "zpe", "job_id": "no-such-job", "worker_id": "no-such-worker"}
LET_IN = {200, 204, 400, 404, 409}  # what follows when the token was not the obstacle


def path_of(route: Route) -> str:
    return re.sub(r"{(\w+)}", lambda found: MADE_UP[found[1]], route.path)


def name_of(route: Route) -> str:
    return f"{route.method} {route.path}"


@pytest.fixture(scope="module")
def tokens(stage: Stage) -> dict[str, str]:
    """One of each kind. An enrol token that was spent would be refused for that, so no route that spends it gets this one."""
    return {"client": stage.client, "admin": stage.admin, "worker": stage.register().token, "enrol": stage.enroll()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", PROTECTED, ids=name_of)
def test_a_route_lets_in_the_kinds_of_token_that_it_names_and_no_other(
    stage: Stage, tokens: dict[str, str], route: Route, kind: str
) -> None:
    token = stage.enroll() if kind == "enrol" and kind in route.kinds else tokens[kind]

    answer = stage.call(route.method, path_of(route), token)

    if kind not in route.kinds:
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "FORBIDDEN")
    elif route.path.endswith("/rotate"):
        assert "belongs to worker" in answer.json()["error"]["message"]
    else:
        assert answer.status_code in LET_IN, answer.text


@pytest.mark.parametrize("route", PROTECTED, ids=name_of)
def test_no_route_works_without_a_token(stage: Stage, route: Route) -> None:
    answer = stage.call(route.method, path_of(route))

    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "UNAUTHORIZED")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Basic dXNlcjpwYXNz", "Bearer tsk_w_unknown", "Bearer " + "x" * 600, "tsk_w_abc"]
)
def test_what_is_no_token_is_401(stage: Stage, header: str) -> None:
    answer = stage.call("POST", "/calc/zpe/compute/jobs/lease", headers={"Authorization": header})

    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "UNAUTHORIZED")


def test_two_authorization_headers_are_401(stage: Stage) -> None:
    headers = [("Authorization", f"Bearer {stage.client}"), ("Authorization", f"Bearer {stage.admin}")]

    answer = stage.http.get("/v1/stats", headers=headers)

    assert answer.status_code == 401


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

        answer = waiting.result(10.0)

    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "TOKEN_REVOKED")


def wait_for_worker(stage: Stage, worker: Worker) -> None:
    """Until the server has the credit of a waiting lease."""

    def waits() -> bool:
        workers = stage.get("/v1/stats", stage.admin).json()["workers"]
        return any(one["worker_id"] == worker.worker_id and one["credit"] for one in workers)

    wait_until(waits, what=f"{worker.worker_id} waits for a job")


def test_a_rotated_token_takes_the_place_of_the_one_before(stage: Stage, worker: Worker) -> None:
    leased = worker.take(stage.submit())

    answer = worker.post(f"/servers/{worker.worker_id}/rotate")
    new = Worker(stage, "zpe", worker.worker_id, answer.json()["worker_token"])

    assert answer.json()["worker_id"] == worker.worker_id
    assert worker.renew(leased).json()["error"]["code"] == "TOKEN_REVOKED"
    assert new.renew(leased).status_code == 200
    assert new.finish(leased).status_code == 200


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


def test_a_worker_has_seven_days_and_an_enrol_token_fifteen_minutes(stage: Stage) -> None:
    made = stage.post("/calc/zpe/compute/enroll-tokens", {}, stage.admin).json()
    registered = stage.post("/calc/zpe/compute/servers/register", {}, made["enroll_token"]).json()

    assert (made["ttl_seconds"], registered["ttl_seconds"]) == (15 * 60, 7 * 86400)
    assert set(registered) == {"worker_id", "worker_token", "token_id", "expires_at", "ttl_seconds"}


def test_a_worker_of_one_app_takes_nothing_of_another(stage: Stage, worker: Worker) -> None:
    stage.post("/calc/other/jobs", {})
    foreign = Worker(stage, "other", worker.worker_id, worker.token)

    assert foreign.lease().status_code == 403
    assert stage.post("/calc/other/compute/servers/register", {}, stage.enroll("zpe")).status_code == 403


def test_a_worker_token_that_is_bound_to_nobody_cannot_lease(stage: Stage) -> None:
    answer = stage.post("/calc/zpe/compute/jobs/lease", {}, stage.create_token("worker"))

    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "FORBIDDEN")


def test_a_client_sees_its_own_jobs_only(stage: Stage) -> None:
    job_id, other = stage.submit(), stage.create_token("client")

    answers = [
        stage.get(f"/calc/zpe/jobs/{job_id}", other),
        stage.get(f"/calc/zpe/jobs/{job_id}/result", other),
        stage.get(f"/v1/jobs/{job_id}", other),
        stage.post(f"/v1/jobs/{job_id}/cancel", {}, other),
        stage.get(f"/v1/jobs/{job_id}/explain", other),
    ]

    assert [answer.status_code for answer in answers] == [404] * 5
    assert stage.get("/v1/jobs", other).json()["jobs"] == []


def test_a_token_with_a_scope_submits_only_within_it(stage: Stage) -> None:
    token = stage.create_token("client", scope=["job.assign.other"])

    answers = [stage.post(f"/calc/{app}/jobs", {}, token).status_code for app in ("other", "zpe")]

    assert answers == [200, 403]


def test_no_answer_and_no_log_line_has_a_secret(stage: Stage, worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    enrol = stage.enroll()
    texts = [
        worker.lease().text,
        worker.post("/jobs/x/result", {"lease_id": "x.1", **ANSWER}).text,
        stage.post("/calc/zpe/compute/servers/register", {"label": 5}, enrol).text,
        stage.get("/v1/stats", worker.token).text,
        stage.get("/v1/stats", stage.admin).text,
        caplog.text,
    ]

    for secret in (worker.token, enrol, stage.admin, stage.client):
        assert not [text for text in texts if secret in text]
