"""Stage of the tests of the HTTP door: the server in a thread, and the peers that talk to it."""

from __future__ import annotations

import asyncio
import secrets
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import pytest

from tasuki.config import DataFolder
from tasuki.core.access import token_sha256
from tasuki.core.address import Address
from tasuki.core.protocol import FRAME_MAX_BYTES, FRAMES_TYPE, HelloClient, Message, Request
from tasuki.doors.http.context import HttpConfig
from tasuki.doors.http.door import HttpDoor
from tasuki.doors.http.routes import Route
from tasuki.doors.http.virtual_connection import VirtualConnection
from tasuki.server.assembly import StorageLocations, make_secret, make_server
from tasuki.server.backup import prepare_folder
from tasuki.server.server import ServerConfig
from tasuki.wire.messages import FrameDecoder, decode
from tests.support.sqlite_files import with_tables

T = TypeVar("T")
on_each_store = pytest.mark.parametrize("store_url", ["sqlite", "redis"], indirect=True, scope="module")
"""Mark of a test, or `pytestmark` of a file: the stage is set up on each of these stores. Without it: on SQLite."""
MADE_UP = {"app": "zpe", "job_id": "no-such-job", "worker_id": "no-such-worker", "sha256": "0" * 64, "session": "no-such-session"}
ANSWER = {"result": {"zpe_ev": 0.27}, "summary_text": "ZPE 0.27 eV", "freqs_csv": "mode,cm-1\n1,4401\n"}


def path_of(route: Route) -> str:
    """The route's path, with made-up names for what it is about."""
    return route.path.format(**MADE_UP)


def messages_of(answer: httpx.Response) -> list[Message]:
    """The messages of an answer in frames."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == FRAMES_TYPE
    decoder = FrameDecoder(FRAME_MAX_BYTES)
    found = [decode(frame, FRAME_MAX_BYTES) for frame in decoder.feed(answer.content)]
    assert not decoder.partial
    return found


class Stage:
    """`with Stage(folder) as stage:`. Requests are made with `stage.get(path, token)` and its like."""

    def __init__(
        self,
        folder: Path,
        tls: ssl.SSLContext | None = None,
        verify: ssl.SSLContext | bool = True,
        store: str = "",
        blobs: str = "",
        fault: Callable[[str], None] = lambda point: None,
        **config: Any,
    ) -> None:
        self.folder = DataFolder(folder / "data")
        self._config = HttpConfig(**{"apps": ("zpe", "other"), "lease_ttl_s": 60.0, **config})
        self._tls, self._verify, self._store, self._fault = tls, verify, store, fault
        self._blobs = blobs
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.run(self._start())
        self.admin = self.folder.token_file.read_text().strip()
        self.client = self.create_token("client")
        self.http = httpx.Client(base_url=self.url, timeout=20.0, verify=self._verify)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.http.close()
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    async def _start(self) -> None:
        prepare_folder(self.folder)
        if not self._store:
            with_tables(self.folder.database)
        places = StorageLocations(self.folder, self._store, self._blobs, app=self._config.apps[0])
        config = ServerConfig(server_id=self.folder.root.parent.name, data=self.folder.root)
        self.server = make_server(places, config, self._fault)
        await self.server.start()
        self.door = HttpDoor(self.server, self._config)
        self.address = await self.door.listen(Address("http", "127.0.0.1", 0), self._tls)
        self.url = str(self.address)

    async def _stop(self) -> None:
        await self.door.close()
        await self.server.stop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """In the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20.0)

    # ------------------------------------------------------------------------------------------------ tokens

    def create_token(self, kind: str, *, scope: Iterable[str] = (), expires_at: float | None = None, worker_id: str = "") -> str:
        """A new token; returns the secret."""
        return self.create_named_token(kind, scope=scope, expires_at=expires_at, worker_id=worker_id)[1]

    def create_named_token(self, kind: str, **fields: Any) -> tuple[str, str]:
        secret, token_id = make_secret(kind), secrets.token_hex(6)
        row = {"token_id": token_id, "kind": kind, "sha256": token_sha256(secret), **fields}
        self.run(self._ask("token.create", {**row, "scope": list(fields.get("scope", ()))}))
        return token_id, secret

    def revoke_token(self, token_id: str) -> None:
        self.run(self._ask("token.revoke", {"token_id": token_id}))

    async def _ask(self, verb: str, params: dict[str, Any]) -> Any:
        connection = VirtualConnection(self.server, "test", lambda message: None)
        try:
            await connection.ask(
                HelloClient(msg_id=connection.next_id(), client_id="stage", token=self.folder.token_file.read_text().strip())
            )
            return await connection.ask(Request(connection.next_id(), verb, params))
        finally:
            connection.leave()

    # ------------------------------------------------------------------------------------------------ requests

    def call(self, method: str, path: str, token: str | None = None, **options: Any) -> httpx.Response:
        headers = dict(options.pop("headers", {}))
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return self.http.request(method, path, headers=headers, **options)

    def get(self, path: str, token: str | None = None, **options: Any) -> httpx.Response:
        return self.call("GET", path, token or self.client, **options)

    def post(self, path: str, json: Any = None, token: str | None = None, **options: Any) -> httpx.Response:
        return self.call("POST", path, token or self.client, json=json, **options)

    def submit(self, **payload: Any) -> str:
        """A job of `zpe`; its id."""
        answer = self.post("/calc/zpe/jobs", payload or {"molecule": "H2"})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["job_id"])

    def status(self, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/calc/zpe/jobs/{job_id}").json()
        return found

    def clear_queue(self) -> None:
        """Cancel what waits."""
        waiting = self.get("/v1/jobs?state=PENDING&limit=1000", self.admin).json()["jobs"]
        if waiting:
            self.post("/v1/jobs/cancel", {"job_ids": [job["job_id"] for job in waiting]}, self.admin)

    def enroll(self, app: str = "zpe", **body: Any) -> str:
        answer = self.post(f"/calc/{app}/compute/enroll-tokens", body, self.admin)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["enroll_token"])

    def register(self, app: str = "zpe", **body: Any) -> Worker:
        answer = self.post(f"/calc/{app}/compute/servers/register", {}, self.enroll(app, **body))
        assert answer.status_code == 200, answer.text
        return Worker(self, app, answer.json()["worker_id"], answer.json()["worker_token"])


class Worker:
    """A registered worker of an app."""

    def __init__(self, stage: Stage, app: str, worker_id: str, token: str) -> None:
        self.stage, self.app, self.worker_id, self.token = stage, app, worker_id, token

    def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        return self.stage.post(f"/calc/{self.app}/compute{path}", json, self.token, **options)

    def lease(self, wait: float = 0.0, **body: Any) -> httpx.Response:
        return self.post(f"/jobs/lease?wait={wait}", body)

    def take(self, job_id: str) -> dict[str, Any]:
        """Lease the job that waits."""
        answer = self.lease()
        assert answer.status_code == 200, answer.text
        leased: dict[str, Any] = answer.json()
        assert leased["job_id"] == job_id
        return leased

    def finish(self, leased: dict[str, Any], **fields: Any) -> httpx.Response:
        return self.post(f"/jobs/{leased['job_id']}/result", {"lease_id": leased["lease_id"], **ANSWER, **fields})

    def fail(self, leased: dict[str, Any], **fields: Any) -> httpx.Response:
        body = {"lease_id": leased["lease_id"], "error_code": "QE_RUNTIME_ERROR", "error_message": "pw.x exited with code 1"}
        return self.post(f"/jobs/{leased['job_id']}/failed", {**body, **fields})

    def renew(self, leased: dict[str, Any]) -> httpx.Response:
        return self.post(f"/jobs/{leased['job_id']}/renew", {"lease_id": leased["lease_id"]})
