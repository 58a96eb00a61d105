"""HTTPS in front of the server, with the files of deploy/: a real nginx and a real Caddy.

A worker and a client reach the server through them alone. What the guides promise is looked at: long polls are left alone, blobs
above every limit for bodies pass in both directions, and with two servers a worker stays at one.
"""

from __future__ import annotations

import http.server
import io
import os
import shutil
import socket
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tasuki import Client
from tasuki.errors import TasukiError
from tests.conftest import Require
from tests.support.certificates import TestAuthority
from tests.support.ports import free_port
from tests.support.processes import ChildProcess, ServerProcess, start_server, start_worker
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

DEPLOY = Path(__file__).parents[2] / "deploy"
ELSEWHERE = "/usr/local/sbin:/usr/sbin:/sbin"
BODY_LIMIT_BYTES = 1024 * 1024  # in place of the files' 16 MiB, which would take the tests longer
SERVERS_LIMIT_BYTES = 16 * 1024 * 1024
DEADLINE_S = 30.0


def program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=ELSEWHERE)


def reachable(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    """Each of them must be there: a guide that was changed must be looked at here again."""
    for before, after in pairs:
        assert before in text, before
        text = text.replace(before, after)
    return text


def nginx(folder: Path, port: int, servers: list[str], authority: TestAuthority) -> ChildProcess:
    cert, key = authority.issue("localhost", "127.0.0.1")
    text = (DEPLOY / "nginx" / "tasuki.conf").read_text()
    (folder / "tasuki.conf").write_text(
        replaced(
            text,
            ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
            ("server_name control.example", "server_name localhost"),
            ("/etc/tasuki/cert.pem", cert),
            ("/etc/tasuki/key.pem", key),
            ("server 127.0.0.1:7080 max_fails", f"server {servers[0]} max_fails"),
            ("client_max_body_size 16m", "client_max_body_size 1m"),
            ("# server 10.0.0.2:7080", f"server {servers[1]}" if len(servers) > 1 else "# server 10.0.0.2:7080"),
        )
    )
    return nginx_process(folder)


def nginx_process(folder: Path) -> ChildProcess:
    """An nginx with the servers of tasuki.conf in the folder."""
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (folder / "nginx.conf").write_text(
        f"daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log stderr warn;\nevents {{}}\n"
        f"http {{\naccess_log {folder}/access.log;\n{temporary}include {folder}/tasuki.conf;\n}}\n"
    )
    found = program("nginx")
    assert found is not None
    return ChildProcess([found, "-e", "stderr", "-p", folder, "-c", folder / "nginx.conf"], folder / "nginx.log", {})


def caddy(folder: Path, port: int, servers: list[str], authority: TestAuthority) -> ChildProcess:
    cert, key = authority.issue("localhost", "127.0.0.1")
    text = (DEPLOY / "caddy" / "Caddyfile").read_text()
    file = folder / "Caddyfile"
    file.write_text(
        "{\n\tadmin off\n\tauto_https disable_redirects\n}\n"
        + replaced(
            text,
            ("control.example {", f"https://localhost:{port}, https://127.0.0.1:{port} {{\n\tbind 127.0.0.1\n\ttls {cert} {key}"),
            ("reverse_proxy 127.0.0.1:7080", f"reverse_proxy {' '.join(servers)}"),
        )
    )
    found = program("caddy")
    assert found is not None
    env = {"HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    return ChildProcess([found, "run", "--config", file, "--adapter", "caddyfile"], folder / "caddy.log", env)


class Front:
    """A proxy before the servers."""

    def __init__(self, process: ChildProcess, url: str, authority: TestAuthority) -> None:
        self.process, self.url, self.authority = process, url, authority

    def get(self, path: str, token: str = "", **params: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        context = self.authority.trusted()
        return httpx.get(f"{self.url}{path}", headers=headers, params=params, verify=context, timeout=DEADLINE_S)

    def client(self, server: ServerProcess) -> Client:
        return Client(self.url, token=server.token, tls_ca=self.authority.ca, connect_timeout_s=10.0)


MakeFront = Callable[[Path, list[str]], Front]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module", params=["nginx", "caddy"])
def make_front(request: pytest.FixtureRequest, require: Require, authority: TestAuthority) -> MakeFront:
    kind: str = request.param
    require(kind, program(kind) is not None, f"make system-deps, or apt-get install {kind}")

    def make(folder: Path, servers: list[str]) -> Front:
        folder.mkdir()
        port = free_port()
        start = nginx if kind == "nginx" else caddy
        process = start(folder, port, servers, authority)
        front = Front(process, f"https://localhost:{port}", authority)

        def open_() -> bool:
            assert process.running, process.output()
            return reachable(port)

        until(open_, DEADLINE_S, f"{kind} listens")
        return front

    return make


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with start_server(tmp_path_factory.mktemp("server"), "--http", "127.0.0.1:0", "--app", "zpe") as made:
        yield made


@pytest.fixture(scope="module")
def front(make_front: MakeFront, server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    made = make_front(tmp_path_factory.mktemp("front") / "it", [server.http_url.removeprefix("http://")])
    with made.process:
        yield made


def test_health_is_told_through_it(front: Front) -> None:
    assert front.get("/healthz").status_code == 200


def test_a_file_above_the_limit_for_bodies_passes_both_ways(front: Front, server: ServerProcess, tmp_path: Path) -> None:
    large = tmp_path / "large.bin"
    large.write_bytes(os.urandom(3 * BODY_LIMIT_BYTES))
    token = server.create_token("worker")
    arguments = (
        "--exec",
        "copy=cp in/large.bin out/",
        "--data",
        str(tmp_path / "worker"),
        "--tls-ca",
        front.authority.ca,
    )

    with start_worker(front.url, *arguments, command=True, token=token, log=tmp_path / "worker.log") as worker:
        with front.client(server) as client:
            result = client.submit(exec="copy", files=[large]).result(timeout=DEADLINE_S)
        worker.stop()

    with zipfile.ZipFile(io.BytesIO(result)) as archive:
        assert archive.read("out/large.bin") == large.read_bytes()


def test_a_request_that_waits_is_left_alone(front: Front, server: ServerProcess) -> None:
    with front.client(server) as client:
        job_id = client.submit(subject="nobody.takes", watch=False).job_id

    assert front.get(f"/v1/jobs/{job_id}", server.token, wait="1").json()["state"] == "PENDING"


def test_a_body_above_the_limit_is_refused_elsewhere(front: Front, server: ServerProcess) -> None:
    answer = httpx.post(
        f"{front.url}/v1/jobs",
        content=b"x" * (SERVERS_LIMIT_BYTES + 1),
        headers={"Authorization": f"Bearer {server.token}"},
        verify=front.authority.trusted(),
        timeout=DEADLINE_S,
    )

    assert answer.status_code == 413


def test_plain_http_at_its_port_is_told_by_the_client(front: Front, server: ServerProcess) -> None:
    def told() -> str:
        with pytest.raises(TasukiError) as refused:
            Client(front.url.replace("https://", "http://"), token=server.token, connect_timeout_s=1.0)
        return refused.value.message

    # Asked again: a proxy that hangs up may cut off its own answer.
    until(lambda: "https://" in told(), DEADLINE_S, "the client names https://")


# ---------------------------------------------------------------------------------------------------- a front end


def test_a_front_end_passes_an_apps_jobs_on_under_its_own_name(server: ServerProcess, require: Require, tmp_path: Path) -> None:
    require("nginx", program("nginx") is not None, "make system-deps, or apt-get install nginx")
    assert server.http_url is not None
    token = tmp_path / "token.conf"
    token.write_text(f'proxy_set_header Authorization "Bearer {server.create_token("client", scope=["job.assign.zpe"])}";\n')
    port = free_port()
    location = replaced(
        (DEPLOY / "nginx" / "front-end.conf").read_text(),
        ("/etc/tasuki/front-end-token.conf", str(token)),
        ("http://127.0.0.1:7080", server.http_url),
    )
    (tmp_path / "tasuki.conf").write_text(f"server {{\nlisten 127.0.0.1:{port};\n{location}}}\n")
    page = f"http://localhost:{port}"
    own, foreign = {"Origin": page, "Sec-Fetch-Site": "same-origin"}, {"Origin": "http://evil.example"}
    closed = ("/v1/jobs", "/api/v1/jobs", "/api/calc/zpe/compute/servers")

    with nginx_process(tmp_path), httpx.Client(base_url=page, timeout=DEADLINE_S) as browser:
        until(lambda: reachable(port), DEADLINE_S, "nginx listens")
        made = browser.post("/api/calc/zpe/jobs", json={"molecule": "H2"}, headers=own)
        status = browser.get(f"/api/calc/zpe/jobs/{made.json()['job_id']}", headers=own)
        refused = browser.post("/api/calc/zpe/jobs", json={"molecule": "H2"}, headers=foreign)
        others = [browser.get(path, headers=own).status_code for path in closed]

    assert (made.status_code, status.json()["status"]) == (200, "queued")
    assert refused.status_code == 403
    assert others == [404, 404, 404]


# ---------------------------------------------------------------------------------------------------- several servers


@contextmanager
def answering(name: str) -> Iterator[str]:
    """A server that says its name, whatever it is asked; its address."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(name)))
            self.end_headers()
            self.wfile.write(name.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads it."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(DEADLINE_S)


def test_with_several_servers_all_requests_with_one_token_reach_the_same(make_front: MakeFront, tmp_path: Path) -> None:
    with answering("one") as one, answering("two") as two:
        front = make_front(tmp_path / "front", [one, two])
        with front.process:
            reached = {token: {front.get(f"/v1/worker/{n}", token).text for n in range(3)} for token in map(str, range(12))}

    assert all(len(servers) == 1 for servers in reached.values())
    assert set().union(*reached.values()) == {"one", "two"}
