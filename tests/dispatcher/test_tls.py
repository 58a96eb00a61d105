"""`tasuki dispatcher` over TLS, as a real process: to its clients, to its agents, and with a certificate that is renewed."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import ssl
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from tests.client.agent_stand_in import StandIn
from tests.dispatcher.stage import BOOK, DEADLINE_S, tell
from tests.support.certificates import TestAuthority
from tests.support.processes import TASUKI, ChildProcess

UNTRUSTED = "its certificate is not of the CA given with --tls-ca"


class DispatcherProcess(ChildProcess):
    """With a certificate of its own, and the CA of its agents."""

    def __init__(self, folder: Path, tls_ca: str, *agents: str) -> None:
        files = ["--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem"), "--tls-ca", tls_ca]
        command = [*TASUKI, "dispatcher", "--listen", "127.0.0.1:0", "--agents", ",".join(agents), "--no-token", *files]
        super().__init__(command, folder / "log", {})
        output = self.wait_for_output("ready ")
        self.url = next(line.split()[1] for line in output.splitlines() if line.startswith("listening "))

    def serial(self, trusting: ssl.SSLContext) -> Any:
        """Of the certificate that it shows."""
        plain = socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2])), DEADLINE_S)
        with closing(trusting.wrap_socket(plain, server_hostname="127.0.0.1")) as tls:
            shown = tls.getpeercert()
        assert shown is not None
        return shown["serialNumber"]


def put(folder: Path, files: tuple[str, str]) -> None:
    for path, name in zip(files, ("cert.pem", "key.pem"), strict=True):
        shutil.copy(path, folder / name)


def test_a_dispatcher_over_tls(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    authority, other = TestAuthority(tmp_path), TestAuthority(tmp_path / "other")
    trusting = authority.trusted()
    put(tmp_path, authority.issue())

    async def story() -> None:
        async with StandIn(running=2, tls=authority.serving()) as good, StandIn(tls=other.serving()) as strange:
            starting = asyncio.to_thread(DispatcherProcess, tmp_path, authority.ca, good.url, strange.url)
            with await starting as dispatcher:
                async with httpx.AsyncClient(base_url=dispatcher.url, verify=trusting, timeout=DEADLINE_S) as http:
                    await _is_used(http, good, strange)
                assert strange.asked == []
                assert f"{strange.url} takes no jobs: no TLS connection to {strange.url}: {UNTRUSTED}" in dispatcher.output()
                await asyncio.to_thread(_is_renewed, dispatcher)

    async def _is_used(http: httpx.AsyncClient, good: StandIn, strange: StandIn) -> None:
        answer = await http.post("/run/a", files=[("file", ("book.csv", BOOK))])
        said = {line["node"]: line["said"] for line in (await http.get("/nodes")).json()}

        assert dict(answer.headers)["tasuki-node"] == good.url
        assert answer.content == good.data
        assert UNTRUSTED in said[strange.url]

    def _is_renewed(dispatcher: DispatcherProcess) -> None:
        before = dispatcher.serial(trusting)
        put(tmp_path, authority.issue(ends_days=90))
        assert dispatcher.serial(trusting) == before
        dispatcher.signal(signal.SIGHUP)
        dispatcher.wait_for_output("the certificate was read again")
        assert dispatcher.serial(trusting) != before

    tell(story())
