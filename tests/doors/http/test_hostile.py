"""Input that is malformed, too large, half-sent, late or doubled: an answer in the common form, and the server goes on."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from tasuki.core import job as jobs
from tasuki.doors.http import exchange, uvicorn_server
from tasuki.doors.http.context import RequestContext
from tasuki.doors.http.routes import ROUTES, Route
from tasuki.errors import Forbidden, Overloaded, Unavailable
from tests.doors.http.stage import ANSWER, Stage, Worker, path_of
from tests.support import attacker
from tests.support.foreign_sites import FOREIGN, OWN
from tests.support.waiting import until


def raw(stage: Stage, data: bytes, timeout: float = 10.0) -> bytes:
    """Send these bytes; all that comes back until the server closes."""
    with socket.create_connection((stage.address.host, stage.address.port), timeout=timeout) as sock:
        sock.sendall(data)
        pieces = []
        while piece := sock.recv(65536):
            pieces.append(piece)
        return b"".join(pieces)


def head(stage: Stage, path: str, length: int, token: str | None = None) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token or stage.client}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    ).encode()


def error_in(answer: bytes) -> tuple[bytes, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split()[1], json.loads(body)["error"]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_a_web_page_of_another_site_is_refused_with_a_token_too(stage: Stage, headers: dict[str, str]) -> None:
    bearer = {"Authorization": f"Bearer {stage.client}"}

    answer = stage.http.get("/v1/jobs", headers={**bearer, **headers})

    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "FORBIDDEN")
    assert stage.http.get("/healthz", headers=headers).status_code == 200


@pytest.mark.parametrize("headers", OWN, ids=str)
def test_a_listener_on_loopback_has_the_names_of_loopback(stage: Stage, headers: dict[str, str]) -> None:
    assert stage.http.get("/v1/jobs", headers={"Authorization": f"Bearer {stage.client}", **headers}).status_code == 200


@pytest.mark.parametrize(
    ("loopback", "names", "host", "origin", "passes"),
    [
        (False, (), "any.example:7080", "", True),
        (False, (), "any.example:7080", "https://any.example:7080", True),
        (False, (), "any.example", "https://evil.example", False),
        (False, ("a.example",), "A.Example:443", "https://a.example", True),
        (False, ("a.example",), "b.example", "", False),
        (True, ("a.example",), "a.example", "https://a.example", True),
        (True, ("a.example",), "127.0.0.1:7080", "https://a.example", True),  # a proxy that does not pass the Host on
        (True, (), "", "", True),  # HTTP/1.0: no browser
    ],
)
def test_other_names_of_a_listener_are_given_with_host_name(
    loopback: bool, names: tuple[str, ...], host: str, origin: str, passes: bool
) -> None:
    headers = [(b"host", host.encode()), *([(b"origin", origin.encode())] if origin else [])]
    request = Request({"type": "http", "headers": headers})

    with nullcontext() if passes else pytest.raises(Forbidden):
        exchange.check_site(request, names, loopback=loopback)


BAD_BODIES = [
    b"{",
    b"[]",
    b"null",
    b"5",
    b'"text"',
    b"\xff\xfe",
    b'{"a": NaN}',
    b'{"a": Infinity}',
    b"{'a': 1}",
    b'{"a": 1} trailing',
    b"[" * 100_000,
    b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    b'{"payload": "\\ud800"}',
    b'{"payload": 1e400}',
]


@pytest.mark.parametrize("path", ["/calc/zpe/jobs", "/v1/jobs/cancel"])
@pytest.mark.parametrize("body", BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_a_body_that_makes_no_sense_is_400(stage: Stage, path: str, body: bytes) -> None:
    answer = stage.call("POST", path, stage.client, content=body)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "INVALID_PAYLOAD")
    assert set(answer.json()["error"]) == {"code", "message", "details"}


@pytest.mark.parametrize(
    "body",
    [
        {"lease_id": 5, **ANSWER},
        {"lease_id": "", **ANSWER},
        {"lease_id": "x" * 1000, **ANSWER},
        {"lease_id": "a.1", **ANSWER, "result": "text"},
        {"lease_id": "a.1", **ANSWER, "summary_text": None},
        {"lease_id": "a.1", **ANSWER, "freqs_csv": ["a"]},
        {"lease_id": "a.1", **ANSWER, "meta": 5},
    ],
    ids=range(7),
)
def test_a_result_of_the_wrong_shape_is_400(worker: Worker, body: dict[str, Any]) -> None:
    answer = worker.post("/jobs/some-job/result", body)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "INVALID_PAYLOAD")


def test_notes_that_are_too_large_are_413_and_cost_no_attempt(stage: Stage, worker: Worker) -> None:
    leased = worker.take(stage.submit())

    answer = worker.finish(leased, meta={"log": "x" * 10_000})

    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "TOO_LARGE")
    assert worker.finish(leased).status_code == 200


def test_notes_with_a_number_that_no_store_can_keep_are_400_and_cost_no_attempt(stage: Stage, worker: Worker) -> None:
    leased = worker.take(stage.submit())

    answer = worker.finish(leased, meta={"n": 2**64})

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "INVALID_PAYLOAD")
    assert worker.finish(leased, result={"n": 2**64}).status_code == 200


def test_notes_that_nest_too_deep_are_400_and_cost_no_attempt(stage: Stage, worker: Worker) -> None:
    leased = worker.take(stage.submit())
    deep: dict[str, Any] = {}
    for _ in range(50):
        deep = {"a": deep}

    answer = worker.finish(leased, meta=deep)

    assert answer.status_code == 400
    assert worker.finish(leased).status_code == 200


@pytest.mark.parametrize("wait", ["x", "-1", "61", "nan", "1e9", ""])
def test_a_wait_that_makes_no_sense_is_400(worker: Worker, wait: str) -> None:
    assert worker.post(f"/jobs/lease?wait={wait}", {}).status_code == 400


@pytest.mark.parametrize("priority", ["0.5", "-1", "10", "1_0", "\u0663", "1e0", ""])
def test_a_priority_that_is_no_number_of_a_band_is_400(stage: Stage, priority: str) -> None:
    answer = stage.post(f"/calc/zpe/jobs?priority={priority}", {})

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "INVALID_PAYLOAD")


@pytest.mark.parametrize("wish", [{"max_jobs": 0}, {"max_jobs": 100_000}, {"max_jobs": "5"}, {"max_jobs": 1.5}])
def test_a_wish_that_makes_no_sense_is_400(worker: Worker, wish: dict[str, Any]) -> None:
    assert worker.post("/jobs/lease", wish).status_code == 400


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/nowhere"), ("POST", "/calc/unknown/jobs"), ("GET", "/v1"), ("GET", "/v1/jobs/")]
)
def test_what_is_not_there_is_404_in_the_common_form(stage: Stage, method: str, path: str) -> None:
    answer = stage.call(method, path, stage.client)

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "NOT_FOUND")


@pytest.mark.parametrize(
    ("method", "path"), [("DELETE", "/v1/jobs"), ("GET", "/calc/zpe/compute/jobs/lease"), ("POST", "/healthz")]
)
def test_another_method_is_405_in_the_common_form(stage: Stage, method: str, path: str) -> None:
    answer = stage.call(method, path, stage.client)

    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "METHOD_NOT_ALLOWED")
    assert method not in answer.headers["allow"].split(", ")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_a_path_names_all_that_may_be_done_with_it(stage: Stage, route: Route) -> None:
    documented = {other.method for other in ROUTES if other.path == route.path}

    answer = stage.call("OPTIONS", path_of(route), stage.client)

    assert answer.status_code == 405
    assert documented <= set(answer.headers["allow"].split(", "))


def test_a_body_that_says_it_is_too_large_is_413_before_it_comes(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "DROP_TIMEOUT_S", 0.3)

    answer = raw(stage, head(stage, "/v1/jobs", exchange.BODY_MAX_BYTES + 1))

    status, error = error_in(answer)
    assert (status, error["code"]) == (b"413", "TOO_LARGE")


def test_a_body_without_a_length_is_413_when_it_is_too_large(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_MAX_BYTES", 1000)

    answer = stage.call("POST", "/v1/jobs", stage.client, content=iter([b"x" * 600, b"x" * 600]))

    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "TOO_LARGE")


def test_no_token_takes_the_room_for_bodies_of_all_others(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage.door, "_bodies", exchange.BodyBudget(max_bytes=4000))
    other = stage.create_token("client")
    with socket.create_connection((stage.address.host, stage.address.port)) as slow:
        slow.sendall(head(stage, "/v1/jobs", 2000) + b" " * 1999)  # the last byte does not come
        until(lambda: stage.door._bodies._free_bytes == 2001)

        refused = stage.post("/v1/jobs", {"payload": "x" * 600})

        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "TOO_MANY_REQUESTS")
        assert stage.post("/v1/jobs", {"payload": "x" * 600}, other).status_code == 200
    until(lambda: stage.door._bodies._free_bytes == 4000)
    assert stage.post("/v1/jobs", {"payload": "x" * 600}).status_code == 200


def test_bodies_of_all_tokens_together_are_limited_and_the_room_comes_back() -> None:
    bodies = exchange.BodyBudget(max_bytes=1000)
    for _ in range(2):
        with bodies.share("first") as reserve, bodies.share("second") as reserve_too, bodies.share("third") as too_late:
            reserve(500)
            reserve_too(500)
            with pytest.raises(Overloaded):
                too_late(1)


def test_large_answers_that_a_token_does_not_read_are_limited(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "TEXTS_MAX_BYTES", 1024 * 1024)  # or the kernel could take the whole answer: up to 4 MiB (tcp_wmem)
    job = {"headers": {f"h{n}": "\x1b" * 16_000 for n in range(60)}, "subject": "nobody"}  # 5.8 MB as JSON
    job_id = stage.post("/v1/jobs", job).json()["job_id"]
    path, other = f"/v1/jobs/{job_id}", stage.admin
    large = len(stage.get(path).content)
    monkeypatch.setattr(stage.door, "_bodies", exchange.BodyBudget(max_bytes=3 * large))
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((stage.address.host, stage.address.port))
        slow.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {stage.client}\r\n\r\n".encode())
        until(lambda: stage.door._bodies._free_bytes == 2 * large)

        refused = stage.get(path, headers={"Accept-Encoding": "identity"})

        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "TOO_MANY_REQUESTS")
        assert stage.get("/healthz").status_code == stage.get("/v1/jobs?limit=1").status_code == 200
        assert stage.get(path, other).status_code == 200
    until(lambda: stage.door._bodies._free_bytes == 3 * large)
    assert stage.get(path).status_code == 200


def test_a_payload_that_is_too_large_for_a_job_is_413(stage: Stage) -> None:
    answer = stage.post("/calc/zpe/jobs", {"text": "x" * 70_000})

    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "TOO_LARGE")
    assert "where the workers can fetch it" in answer.json()["error"]["message"], "an app's client has no blobs"


def test_an_empty_body_is_no_job(stage: Stage) -> None:
    """`curl -d @missing.json` sends one."""
    answer = stage.call("POST", "/calc/zpe/jobs", stage.client, content=b"")

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "INVALID_PAYLOAD")
    assert "the body is empty" in answer.json()["error"]["message"]


def test_nobody_without_a_token_has_a_body_read(stage: Stage) -> None:
    answer = raw(stage, head(stage, "/v1/jobs", 1_000_000, token="tsk_c_nobody"))

    status, error = error_in(answer)
    assert (status, error["code"]) == (b"401", "UNAUTHORIZED")


@pytest.mark.parametrize(
    "data",
    [
        b"NONSENSE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"GET / HTTP/1.1\r\nA: " + b"x" * 70_000,
    ],
    ids=["words", "tls", "headers"],
)
def test_what_is_no_http_is_400_in_the_common_form(stage: Stage, data: bytes) -> None:
    status, error = error_in(raw(stage, data))

    assert (status, error["code"]) == (b"400", "INVALID_PAYLOAD")


def test_headers_that_never_end_are_hung_up_on(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_server, "HEADERS_TIMEOUT_S", 0.3)

    assert raw(stage, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n") == b""


def test_headers_of_a_second_request_that_never_end_are_hung_up_on(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_server, "HEADERS_TIMEOUT_S", 0.3)
    with socket.create_connection((stage.address.host, stage.address.port), timeout=10.0) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = sock.recv(65536)
        while not answer.endswith(b"}"):
            answer += sock.recv(65536)
        sock.sendall(b"GET /healthz HT")

        assert sock.recv(65536) == b""
    assert answer.startswith(b"HTTP/1.1 200")


def test_a_body_that_never_comes_is_400(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_TIMEOUT_S", 0.3)

    status, error = error_in(raw(stage, head(stage, "/v1/jobs", 100) + b'{"exec"'))

    assert (status, error["code"]) == (b"400", "INVALID_PAYLOAD")


def test_a_peer_that_leaves_in_the_middle_of_a_body_harms_nobody(stage: Stage) -> None:
    with socket.create_connection((stage.address.host, stage.address.port)) as sock:
        sock.sendall(head(stage, "/v1/jobs", 100) + b'{"exec"')

    assert stage.get("/v1/jobs").status_code == 200


def test_too_many_waiting_leases_of_one_worker_are_429(stage: Stage, worker: Worker) -> None:
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(worker.lease(wait=0.8).status_code)) for _ in range(18)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15.0)

    assert sorted(answers) == [204] * 16 + [429] * 2


def test_the_same_report_twice_at_once_is_recorded_once(stage: Stage, worker: Worker) -> None:
    job_id = stage.submit()
    leased = worker.take(job_id)
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(worker.finish(leased).status_code)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15.0)

    assert answers == [200] * 4
    assert stage.get(f"/v1/jobs/{job_id}").json()["attempt"] == 1


def test_no_other_origin_is_allowed(stage: Stage) -> None:
    answer = stage.get("/v1/jobs", headers={"Origin": "https://elsewhere.example"})

    assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_nobody_is_told_what_is_behind_the_server(stage: Stage, monkeypatch: pytest.MonkeyPatch, route: Route) -> None:
    async def away(question: object) -> None:
        raise Unavailable("redis://:password@10.1.2.3:6379/0 does not answer")

    monkeypatch.setattr(stage.server, "ask", away)
    monkeypatch.setattr(stage.server, "ask_tokens", away)

    answer = stage.call(route.method, path_of(route), stage.client)

    assert answer.status_code == 503 or not route.kinds
    assert not [word for word in ("redis", "password", "10.1.2.3") if word in answer.text]


# ---------------------------------------------------------------------------------------------------- connections


@pytest.mark.parametrize(
    "data",
    [
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\na",
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\na",
        b"GET /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\na",
    ],
    ids=["healthz", "no token", "no route"],
)
def test_an_answer_before_the_end_of_the_body_closes_the_connection(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(exchange, "DISCARD_S", 0.1)

    answer = raw(stage, data, timeout=3.0)

    assert b"\r\nconnection: close\r\n" in answer.lower()


@pytest.mark.parametrize("path", ["/v1/jobs/{}?wait=60", "/v1/jobs/{}/result?wait=60", "/calc/zpe/jobs/{}/result?wait=60"])
def test_a_poll_whose_peer_has_left_ends(stage: Stage, path: str) -> None:
    job_id = stage.submit()

    with polling(stage, path.format(job_id)):
        clients = stage.door._http.clients._clients.values()
        until(lambda: any(job_id in client._listeners for client in clients), what="the request waits for the end of the job")

    until(lambda: stage.door._under_way == 0, 30.0, "no request is under way")


def test_a_reader_of_a_log_that_has_left_is_not_waited_for(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def ask(context: RequestContext, verb: str, **params: Any) -> Any:
        asked.append(verb)
        await asyncio.Event().wait()  # as a worker whose program writes nothing

    monkeypatch.setattr(RequestContext, "ask", ask)

    with polling(stage, f"/v1/jobs/{stage.submit()}/logs?wait=25"):
        until(lambda: asked == ["logs"], what="the worker is asked")

    until(lambda: stage.door._under_way == 0, 30.0, "no request is under way")


@contextmanager
def polling(stage: Stage, path: str) -> Iterator[None]:
    """Ask for a path, and leave at the end of the block."""
    with socket.create_connection((stage.address.host, stage.address.port)) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {stage.client}\r\n\r\n".encode())
        yield


@pytest.mark.parametrize("kind", [kind for kind in attacker.FIRST if kind != "half TLS"])
def test_the_memory_of_a_connection_is_free_when_it_ends(stage: Stage, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free without the garbage collector, which comes late: each connection has up to 256 KiB for TLS."""
    made: list[weakref.ref[uvicorn_server.LimitedProtocol]] = []

    def note(self: uvicorn_server.LimitedProtocol, transport: Any, real: Any = H11Protocol.connection_made) -> None:
        made.append(weakref.ref(self))
        real(self, transport)

    monkeypatch.setattr(H11Protocol, "connection_made", note)
    data = attacker.FIRST[kind]({"token": stage.client, "job_id": stage.submit()})
    made.clear()
    gc.disable()
    try:
        with socket.create_connection((stage.address.host, stage.address.port)) as sock:
            sock.sendall(data)
            until(lambda: made)
        until(lambda: made[0]() is None, what="the connection is freed")
    finally:
        gc.enable()


def test_no_token_takes_all_requests_and_health_is_always_answered(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stage.door._shares.limit <= exchange.REQUESTS_MAX // 4
    monkeypatch.setattr(stage.door._shares, "limit", 2)
    job_id, other = stage.submit(), stage.create_token("client")
    wait = f"/v1/jobs/{job_id}?wait=5"
    with ThreadPoolExecutor(2) as threads:
        polls = [threads.submit(stage.get, wait) for _ in range(2)]
        until(lambda: stage.door._under_way == 2)
        refused = stage.get(f"/v1/jobs/{job_id}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "TOO_MANY_REQUESTS")
        assert refused.headers["Retry-After"] == "1"
        assert stage.get("/v1/jobs", other).status_code == 200
        monkeypatch.setattr(exchange, "REQUESTS_MAX", 2)
        assert stage.get("/v1/jobs", other).status_code == 503
        assert [stage.call("GET", path).status_code for path in ("/healthz", "/readyz")] == [200, 200]
        monkeypatch.undo()
        stage.post("/v1/jobs/cancel", {"job_ids": [job_id]})
        assert {poll.result().status_code for poll in polls} == {200}


# ---------------------------------------------------------------------------------------------------- strictness


@pytest.mark.parametrize(
    "data",
    [
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"".join(b"a%d: %b\r\n" % (n, b"x" * 200) for n in range(100)) + b"\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 2600 + b"\r\n",
        b"POST /v1/jobs HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\na: b\r\n c\r\n\r\n",
        b"GET /healthz HTTP/1.1\nHost: x\n\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\na: b\r\n\r\n",
        b"GET /calc/zpe%2fjobs HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /calc/zpe%5Cjobs HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /calc/zpe%25252Fjobs HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    ],
    ids=["22 KB", "2600 headers", "chunked 1.0", "folded", "bare LF", "one bare LF", "slash", "backslash", "slash thrice"],
)
def test_a_request_that_proxies_read_in_another_way_is_400(stage: Stage, data: bytes) -> None:
    status, error = error_in(raw(stage, data))

    assert (status, error["code"]) == (b"400", "INVALID_PAYLOAD")


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs/no-such-job/result", "/calc/zpe/jobs/no-such-job"])
def test_no_answer_is_kept_by_a_cache(stage: Stage, path: str) -> None:
    assert stage.get(path).headers["Cache-Control"] == "no-store"


def test_an_unknown_app_asks_for_the_token_first(stage: Stage) -> None:
    assert stage.call("GET", "/calc/unknown/jobs/j").status_code == 401
    assert stage.get("/calc/unknown/jobs/j").status_code == 404


@pytest.mark.parametrize("inside", [b"{},", b"[],", b'"a",'])
def test_a_body_of_many_small_values_is_413_before_they_are_made(stage: Stage, inside: bytes) -> None:
    body = b'{"a":[' + inside * 5_000_000
    body = body[: exchange.BODY_MAX_BYTES - 2 - len(body[: exchange.BODY_MAX_BYTES - 2]) % len(inside)]
    answer = stage.call("POST", "/calc/zpe/jobs", stage.client, content=body)

    assert (answer.status_code, "too many values" in answer.text) == (413, True)


def test_a_large_result_of_numbers_in_rows_is_taken(stage: Stage) -> None:
    rows = json.dumps([[0.123456, 1.234567, -2.345678]] * 400_000).encode()
    assert len(rows) > exchange.BODY_MAX_BYTES * 3 // 4
    assert exchange.decoded_bytes(rows) <= exchange.DECODED_MAX_BYTES
