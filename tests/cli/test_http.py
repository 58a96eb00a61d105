"""HTTP from the command line: `tasuki server --http`, `tasuki up`, `tasuki token enroll`, with real processes."""

from __future__ import annotations

import io
import os
import socket
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasuki.cli import server
from tasuki.cli.command import TlsOptions
from tasuki.cli.process import server_config
from tasuki.config import DataFolder
from tasuki.core.address import Address
from tasuki.errors import ConfigError
from tasuki.server.assembly import StorageLocations
from tests.cli.commands import Running, User, running

pytestmark = pytest.mark.e2e

HERE = Address("http", "127.0.0.1", 0)


def http_url(server: Running) -> str:
    return next(line.removeprefix("listening ") for line in server.lines if line.startswith("listening http"))


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[User, httpx.Client]]:
    """`tasuki up` with a worker for commands, and somebody who talks HTTP to it with the folder's token."""
    user = User(tmp_path_factory.mktemp("http"))
    words = ("--tcp", "127.0.0.1:0", "--http", "127.0.0.1:0", "--app", "zpe", "--slots", "2", "--exec", "say=/bin/echo {args}")
    with running(user, "up", *words, "--config", os.fspath(_execs(user.home))) as server:
        token = (user.data / "token").read_text().strip()
        with httpx.Client(base_url=http_url(server), headers=bearer(token), timeout=20.0) as client:
            yield user, client


def _execs(folder: Path) -> Path:
    path = folder / "execs.toml"
    path.write_text('[exec.count]\nargv = ["/bin/sh", "-c", "seq 1 5; sleep 60"]\n')
    return path


def test_a_command_runs_and_its_result_is_a_zip(served: tuple[User, httpx.Client]) -> None:
    _, client = served

    made = client.post("/v1/jobs", json={"exec": "say", "args": ["hello"]}).json()
    result = client.get(f"/v1/jobs/{made['job_id']}/result?wait=20")

    assert result.headers["content-type"] == "application/zip"
    with zipfile.ZipFile(io.BytesIO(result.content)) as archive:
        assert archive.read("stdout.log") == b"hello\n"


def test_the_log_of_a_running_command_is_followed_by_offset(served: tuple[User, httpx.Client]) -> None:
    _, client = served
    job_id = client.post("/v1/jobs", json={"exec": "count"}).json()["job_id"]
    text, offset = "", 0
    while "5\n" not in text:
        part = client.get(f"/v1/jobs/{job_id}/logs?offset={offset}&wait=5").json()
        text, offset = text + part["text"], part["next"]
        assert not part["ended"]

    client.post(f"/v1/jobs/{job_id}/cancel", json={})
    ended = client.get(f"/v1/jobs/{job_id}?wait=20").json()

    assert text == "1\n2\n3\n4\n5\n"
    assert ended["state"] == "CANCELED"


def test_a_worker_enrols_with_a_token_of_the_command_line(served: tuple[User, httpx.Client]) -> None:
    user, client = served

    made = user.json("token", "enroll", "--app", "zpe", "--label", "lab", "--json")
    worker = client.post("/calc/zpe/compute/servers/register", headers=bearer(made["token"]), json={}).json()
    job_id = client.post("/calc/zpe/jobs", json={"n": 1}).json()["job_id"]
    leased = client.post("/calc/zpe/compute/jobs/lease?wait=10", headers=bearer(worker["worker_token"]), json={}).json()

    assert made["token"].startswith("tsk_e_")
    assert leased["job_id"] == job_id
    rows = {row["token_id"]: row for row in user.json("token", "list", "--json")}
    assert rows[made["token_id"]]["revoked_at"] is not None
    assert rows[worker["token_id"]]["worker_id"] == worker["worker_id"]


def test_the_traceback_of_an_apps_job_is_shown(served: tuple[User, httpx.Client]) -> None:
    user, client = served
    enrol = user.json("token", "enroll", "--app", "zpe", "--json")["token"]
    worker = bearer(client.post("/calc/zpe/compute/servers/register", headers=bearer(enrol), json={}).json()["worker_token"])
    job_id = client.post("/calc/zpe/jobs", json={"n": 2}).json()["job_id"]
    leased = client.post("/calc/zpe/compute/jobs/lease?wait=10", headers=worker, json={}).json()
    report = {"lease_id": leased["lease_id"], "error_code": "QE_RUNTIME_ERROR", "traceback": "Traceback …\nKeyError: 'H'\n"}
    client.post(f"/calc/zpe/compute/jobs/{job_id}/failed", headers=worker, json={**report, "permanent": True})

    logs, shown = user.run("logs", job_id), user.run("dead", "show", job_id)
    tail = user.run("logs", "--tail", "14", job_id).stderr

    assert leased["job_id"] == job_id
    assert (logs.returncode, logs.stdout, logs.stderr) == (0, "", report["traceback"])
    assert tail == "KeyError: 'H'\n"
    assert "KeyError: 'H'" in shown.stdout
    assert user.json("dead", "show", job_id, "--json")["stderr"] == report["traceback"]


def test_the_lease_of_a_worker_that_never_renews_is_as_long_as_the_operator_said(tmp_path: Path) -> None:
    user, two_hours_s = User(tmp_path), 7200.0
    words = ("--no-tcp", "--no-unix", "--http", "127.0.0.1:0", "--app", "zpe", "--http-lease-ttl", f"{two_hours_s:g}")

    with running(user, "server", *words) as server, httpx.Client(base_url=http_url(server), timeout=20.0) as client:
        admin = bearer((user.data / "token").read_text().strip())
        enrol = client.post("/calc/zpe/compute/enroll-tokens", json={}, headers=admin).json()["enroll_token"]
        worker = client.post("/calc/zpe/compute/servers/register", json={}, headers=bearer(enrol)).json()["worker_token"]
        job_id = client.post("/calc/zpe/jobs", json={"n": 1}, headers=admin).json()["job_id"]
        leased = client.post("/calc/zpe/compute/jobs/lease?wait=10", json={}, headers=bearer(worker))
        facts = client.get(f"/v1/jobs/{job_id}/explain", headers=admin).json()["facts"]

    assert leased.status_code == 200, leased.text
    assert leased.json()["lease_ttl_seconds"] == two_hours_s
    assert facts["lease_expires_at"] - time.clock_gettime(time.CLOCK_BOOTTIME) > two_hours_s - 60.0


def options(folder: Path, fields: dict[str, Any]) -> server.ServerOptions:
    listen = server.ListenOptions(**{name: value for name, value in fields.items() if name != "blobs"})
    places = StorageLocations(DataFolder(folder), blobs=fields.get("blobs", ""))
    return server.ServerOptions(listen, places, server_config(folder))


@pytest.mark.parametrize(
    "fields",
    [
        {"apps": server.AppOptions(("zpe",))},
        {"http": Address("http", "0.0.0.0", 0)},
        {"unix": False},
        {"presign": True, "blobs": "s3://bucket/a"},
        {"presign": True, "http": HERE},
        {"presign_endpoint": "https://s3.example", "blobs": "s3://bucket/a", "http": HERE},
        {"presign": True, "blobs": "s3://bucket/a?endpoint=http://10.0.0.9:8333", "http": HERE},
        {"presign": True, "presign_endpoint": "http://s3.example", "blobs": "s3://bucket/a", "http": HERE},
        {"presign": True, "presign_endpoint": "s3.example", "blobs": "s3://bucket/a", "http": HERE},
        {"presign": True, "presign_endpoint": "https://user:password@s3.example", "blobs": "s3://bucket/a", "http": HERE},
    ],
    ids=str,
)
def test_a_door_that_makes_no_sense_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        server.check(options(tmp_path, fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"blobs": "s3://bucket/a"},
        {"blobs": "s3://bucket/a?endpoint=http://127.0.0.1:8333"},
        {"blobs": "s3://bucket/a?endpoint=http://10.0.0.9:8333", "presign_endpoint": "https://s3.example"},
        {"blobs": "s3://bucket/a?endpoint=http://10.0.0.9:8333", "tls": TlsOptions(insecure=True)},
    ],
    ids=str,
)
def test_links_to_a_bucket_may_be_given_where_nobody_can_read_them(tmp_path: Path, fields: dict[str, Any]) -> None:
    server.check(options(tmp_path, {"presign": True, "http": HERE, **fields}))


def test_up_goes_on_without_http_if_its_port_is_taken_and_says_so(tmp_path: Path) -> None:
    with socket.socket() as taken:
        try:
            taken.bind(("127.0.0.1", 7080))
            taken.listen()
        except OSError:  # somebody else has it: all the better
            pass
        with running(User(tmp_path), "up", "--tcp", "127.0.0.1:0", "--workers", "0") as server:
            lines = list(server.lines)

    assert [line for line in lines if line.startswith("without HTTP: cannot listen on http://127.0.0.1:7080")]
