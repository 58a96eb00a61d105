"""Access over HTTP: every route with every kind of token, and with those that have ended."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tasuki.doors.http.routes import ROUTES, Route
from tests.doors.http.stage import ANSWER, Stage, Worker, path_of

PROTECTED = [route for route in ROUTES if route.kinds]
KINDS = ("client", "admin", "worker", "enrol")
LET_IN = {200, 204, 400, 404, 409}  # what follows when the token was not the obstacle


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


def test_nothing_is_served_that_the_table_of_routes_does_not_have(stage: Stage) -> None:
    served = {(method, route.path) for route in stage.door.asgi_app.router.routes for method in route.methods if method != "HEAD"}

    assert served == {(route.method, route.path) for route in ROUTES} | {("GET", "/openapi.json")}


@pytest.fixture(scope="module")
def ended(stage: Stage) -> dict[tuple[str, str], str]:
    """(how it ended, kind) → a token."""
    found = {}
    now = time.time()
    for kind in KINDS:
        fields = {"scope": ["job.assign.zpe"], "worker_id": "w-ended", "created_at": now - 60.0}
        _, found["expired", kind] = stage.create_named_token(kind, expires_at=now - 1.0, **fields)
        token_id, found["revoked", kind] = stage.create_named_token(kind, expires_at=now + 60.0, **fields)
        stage.revoke_token(token_id)
    return found


@pytest.mark.parametrize(("how", "expected"), [("expired", (401, "UNAUTHORIZED")), ("revoked", (403, "TOKEN_REVOKED"))])
@pytest.mark.parametrize("route", PROTECTED, ids=name_of)
def test_no_route_takes_a_token_that_has_ended(
    stage: Stage, ended: dict[tuple[str, str], str], route: Route, how: str, expected: tuple[int, str]
) -> None:
    for kind in route.kinds:
        answer = stage.call(route.method, path_of(route), ended[how, kind])

        assert (answer.status_code, answer.json()["error"]["code"]) == expected, kind


@pytest.fixture(scope="module")
def foreigner(stage: Stage) -> Worker:
    return stage.register("other")


@pytest.mark.parametrize("route", [route for route in PROTECTED if "/compute/jobs" in route.path], ids=name_of)
def test_no_route_of_an_app_takes_a_worker_of_another(stage: Stage, foreigner: Worker, route: Route) -> None:
    bodies: dict[str, Any] = {
        "result": {"lease_id": "x.1", **ANSWER},
        "failed": {"lease_id": "x.1", "error_code": "X"},
        "renew": {"lease_id": "x.1"},
        "lease": {},
    }
    last = route.path.rpartition("/")[2]
    body = bodies[last]
    if route.path.endswith(f"/jobs/{last}") and last != "lease":
        name = {"result": "results", "failed": "failures", "renew": "leases"}[last]
        body = {name: [{**body, "job_id": "some-job"}]}

    answer = stage.call(route.method, path_of(route), foreigner.token, json=body)

    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "FORBIDDEN")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Basic dXNlcjpwYXNz",
        "Bearer tsk_w_unknown",
        "Bearer " + "x" * 600,
        "tsk_w_abc",
        "Bearer tsk_w_one tsk_w_two",
        "Bearer \u00e9",
        "Bearer '; DROP TABLE tokens; --",
        "Bearer *",
    ],
)
def test_what_is_no_token_is_401(stage: Stage, header: str) -> None:
    answer = stage.call("POST", "/calc/zpe/compute/jobs/lease", headers={"Authorization": header.encode()})

    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "UNAUTHORIZED")


def test_two_authorization_headers_are_401(stage: Stage) -> None:
    headers = [("Authorization", f"Bearer {stage.client}"), ("Authorization", f"Bearer {stage.admin}")]

    answer = stage.http.get("/v1/stats", headers=headers)

    assert answer.status_code == 401


def test_a_worker_has_seven_days_and_an_enrol_token_fifteen_minutes(stage: Stage) -> None:
    made = stage.post("/calc/zpe/compute/enroll-tokens", {}, stage.admin).json()
    registered = stage.post("/calc/zpe/compute/servers/register", {}, made["enroll_token"]).json()

    assert (made["ttl_seconds"], registered["ttl_seconds"]) == (15 * 60, 7 * 86400)
    assert set(registered) == {"worker_id", "worker_token", "token_id", "expires_at", "ttl_seconds", "scope"}


def test_a_worker_cannot_rotate_the_token_of_another(stage: Stage, worker: Worker) -> None:
    other = stage.register()

    answer = worker.post(f"/servers/{other.worker_id}/rotate")

    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "FORBIDDEN")
    assert other.lease().status_code == 204


def test_a_worker_is_revoked_only_where_it_works(stage: Stage, worker: Worker) -> None:
    answer = stage.call("DELETE", f"/calc/other/compute/servers/{worker.worker_id}", stage.admin)

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "NOT_FOUND")
    assert worker.lease().status_code == 204


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
