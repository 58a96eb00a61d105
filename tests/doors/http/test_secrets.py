"""Places where a token's secret is never found: the log of a server at its most talkative, its store, a process list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.doors.http.stage import ANSWER
from tests.support.processes import ServerProcess, start_server
from tests.support.redis_service import RedisService

pytestmark = pytest.mark.e2e


@pytest.fixture(params=["sqlite", "redis"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    store = str(request.getfixturevalue("redis_service").url()) if request.param == "redis" else ""
    with start_server(tmp_path, "--http", "127.0.0.1:0", "--app", "zpe", "--log-level", "debug", store=store) as server:
        yield server


def session(server: ServerProcess) -> tuple[dict[str, str], list[str]]:
    """Tokens of each kind, used well and badly: name → secret, and the answers that showed none on purpose."""
    url = next(line.split()[1] for line in server.output().splitlines() if line.startswith("listening http"))
    answers: list[str] = []
    with httpx.Client(base_url=f"{url}/calc/zpe", timeout=20.0) as http:

        def post(path: str, token: str, body: object = None, method: str = "POST") -> httpx.Response:
            answer = http.request(method, path, json=body or {}, headers={"Authorization": f"Bearer {token}"})
            answers.append(answer.text)
            return answer

        enrol = server.tasuki("token", "enroll", "--app", "zpe").stdout.strip()
        worker = post("/compute/servers/register", enrol).json()
        answers.pop()
        secrets = {"admin": server.token, "client": server.create_token("client"), "enrol": enrol}
        secrets |= {"worker": worker["worker_token"], "expired": server.create_token("client", expires_at=1.0)}
        post("/compute/servers/register", enrol)
        for secret in secrets.values():
            post("/jobs", secret)
            post("/compute/jobs/lease", secret)
            post("/nowhere", secret)
            post("/compute/jobs/no-such-job/result", secret, {"lease_id": "a.1", **ANSWER})
            post("/compute/jobs/no-such-job/result", secret, {"lease_id": 5})
        rotated = post(f"/compute/servers/{worker['worker_id']}/rotate", worker["worker_token"]).json()
        answers.pop()
        secrets["rotated"] = rotated["worker_token"]
        post("/compute/jobs/lease", secrets["worker"])
        post(f"/compute/servers/{worker['worker_id']}", secrets["admin"], method="DELETE")
        post("/compute/jobs/lease", secrets["rotated"])
    return secrets, answers


def command_lines() -> dict[str, bytes]:
    """Return the command lines of all visible processes."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found[str(path)] = path.read_bytes()
        except OSError:
            continue  # it has ended, or is somebody else's
    return found


def test_no_secret_is_logged_stored_or_shown(server: ServerProcess, request: pytest.FixtureRequest) -> None:
    secrets, answers = session(server)
    texts = {f"answer {number}": text.encode() for number, text in enumerate(answers)}
    texts |= command_lines()
    texts["log"] = server.log.read_bytes()
    folders = [server.data]
    if "--store" in server.command:
        redis: RedisService = request.getfixturevalue("redis_service")
        folders.append(redis.folder)
    texts |= {str(path): path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}

    found = [(name, where) for name, secret in secrets.items() for where, text in texts.items() if secret.encode() in text]

    assert len(secrets) == len(set(secrets.values())) == 6
    assert found == [("admin", str(server.folder.token_file))]
    assert server.folder.token_file.stat().st_mode & 0o077 == 0
