"""Clients over HTTP: what they do over TCP, with the same tests where the way makes no difference; and what is HTTP's own."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import certifi
import pytest

from tasuki import AsyncClient, Client
from tasuki.core.job import BlobRef
from tasuki.core.protocol import Accepted, HelloClient, Reply, Request, SubmitJobs, Welcome
from tasuki.errors import ConfigError, Corrupt, InvalidInput, NotFound, Unauthorized, Unavailable
from tests.client import test_client, test_large
from tests.net.odd_server import Asked, OddServer, frames, http, welcome
from tests.support.processes import ServerProcess, start_server, start_servers, start_worker

pytestmark = pytest.mark.e2e
MIB = 1 << 20
DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with an HTTP door, and a worker for tests/support/handlers.py, which is connected over TCP."""
    with start_server(tmp_path_factory.mktemp("http"), "--http", "127.0.0.1:0") as server, start_worker(server):
        server.url = server.http_url  # from here on everybody comes this way
        yield server
        assert server.running, server.output()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as client:
        yield client


# ---------------------------------------------------------------------------------------------------- as over TCP


@pytest.mark.parametrize(
    "behaviour",
    [
        test_client.test_result_of_a_job,
        test_client.test_failed_job_raises_with_its_state_and_reason,
        test_client.test_same_id_with_another_body_is_a_conflict_that_names_the_fields_and_not_their_contents,
        test_client.test_headers_priority_and_not_before_are_not_part_of_the_body,
        test_client.test_unknown_id_is_an_error_of_its_own,
        test_client.test_invalid_job_is_refused_by_name,
        test_client.test_question_that_is_too_large_is_refused_and_not_sent_for_ever,
        test_client.test_job_that_no_frame_can_hold_is_refused_and_not_sent_for_ever,
        test_client.test_many_jobs_with_invalid_ones_between_them,
        test_client.test_many_jobs_strictly_raise_the_first_error_but_keep_the_good_ones,
        test_client.test_client_is_shared_by_threads,
        test_client.test_cancel_of_a_waiting_job_reaches_the_one_who_waits,
    ],
)
def test_it_is_the_same_over_http(client: Client, behaviour: Callable[[Client], None]) -> None:
    behaviour(client)


@pytest.mark.parametrize(
    "behaviour",
    [
        test_client.test_async_client_does_the_same,
        test_client.test_text_that_cannot_be_encoded_is_the_error_of_its_one_call,
        test_client.test_text_that_cannot_be_encoded_while_there_is_no_connection_is_the_error_of_its_call,
        test_client.test_bad_client_id_fails_at_once_with_the_reason,
        test_client.test_closing_while_another_thread_waits_ends_the_wait,
        test_client.test_closing_while_tasks_wait_ends_their_waits,
        test_client.test_token_that_is_revoked_ends_every_wait_with_the_reason,
        test_large.test_job_that_names_a_blob_which_the_server_has_not_is_refused,
    ],
)
def test_it_is_the_same_for_a_client_of_its_own(server: ServerProcess, behaviour: Callable[[ServerProcess], None]) -> None:
    behaviour(server)


def test_it_is_the_same_for_results_that_are_picked_up_later(client: Client, server: ServerProcess, tmp_path: Path) -> None:
    test_client.test_timeout_leaves_the_job_alone_and_its_result_can_be_picked_up_later(client, tmp_path)
    (tmp_path / "gate").unlink()
    (tmp_path / "gate.runs").unlink()
    test_client.test_another_client_gets_the_result_by_id(server, tmp_path)


# ---------------------------------------------------------------------------------------------------- large things


def test_a_large_file_is_sent_once_and_a_large_result_comes_back(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    path, saved = tmp_path / "input.bin", tmp_path / "result.zip"
    path.write_bytes(os.urandom(20 * MIB))
    sent: list[int] = []
    client.wait(client.aio.put_file(path, sent.append))
    client.wait(client.aio.put_file(path, sent.append))

    ended = client.submit(subject="echo.large", payload=b"x", files=[path]).outcome(timeout=30)
    ref = BlobRef(hashlib.sha256(path.read_bytes()).hexdigest(), 20 * MIB)
    with saved.open("wb") as file:
        client.wait(client.aio._blobs.get(ref, ended.job_id, file.write))

    assert sent[-1] == 20 * MIB
    assert sent == sorted(set(sent))
    assert saved.read_bytes() == path.read_bytes()


def test_a_download_that_is_cut_goes_on_where_it_was() -> None:
    data = os.urandom(3 * MIB)
    ref = BlobRef(hashlib.sha256(data).hexdigest(), len(data))
    cut = {"Content-Length": str(len(data)), "Connection": "close"}

    def answer(asked: Asked) -> bytes:
        if asked.method == "POST":
            return welcome(asked)
        if "range" not in asked.headers:
            return http(200, data[:MIB], cut)
        first = int(asked.headers["range"].removeprefix("bytes=").removesuffix("-"))
        if len(server.asked) == 3:
            return http(206, data[first : first + MIB], {**cut, "Content-Length": str(len(data) - first)})
        return http(200, data)  # something on the way that knows no ranges

    async def main() -> list[Asked]:
        nonlocal server
        async with (
            asyncio.timeout(DEADLINE_S),
            OddServer(answer) as server,
            AsyncClient(str(server.address), token="t") as client,
        ):
            pieces: list[bytes] = []
            await client._blobs.get(ref, "a job", pieces.append)
            assert b"".join(pieces) == data
            return server.asked

    server: OddServer
    asked = asyncio.run(main())
    assert [one.headers.get("range") for one in asked[1:]] == [None, f"bytes={MIB}-", f"bytes={2 * MIB}-"]
    assert asked[1].target == f"/v1/blobs/{ref.sha256}?job_id=a%20job" or "job_id=a+job" in asked[1].target


@pytest.mark.parametrize("data", [b"other", b"more than there should be"])
def test_bytes_that_are_not_the_ones_are_corrupt(data: bytes) -> None:
    ref = BlobRef(hashlib.sha256(b"bytes").hexdigest(), 5)

    async def main() -> None:
        def answer(asked: Asked) -> bytes:
            return welcome(asked) if asked.method == "POST" else http(200, data)

        async with (
            asyncio.timeout(DEADLINE_S),
            OddServer(answer) as server,
            AsyncClient(str(server.address), token="t") as client,
        ):
            with pytest.raises(Corrupt):
                await client._blobs.get(ref, "a", lambda piece: None)

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------- lost


def lossy(answer: Callable[[Asked], bytes]) -> Callable[[Asked], bytes]:
    return lambda asked: welcome(asked) if isinstance(asked.first, HelloClient) else answer(asked)


def test_a_submit_is_said_again_with_its_id_and_what_must_not_be_said_twice_is_not() -> None:
    said: list[str] = []

    def answer(asked: Asked) -> bytes:
        message = asked.first
        if isinstance(message, SubmitJobs):
            said.append(message.specs[0].job_id)
            return frames(Accepted(message.msg_id, 1)) if len(said) > 2 else b""
        assert isinstance(message, Request)
        said.append(message.verb)
        return b"" if message.verb == "requeue" else frames(Reply(message.msg_id, {}))

    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            OddServer(lossy(answer)) as server,
            AsyncClient(str(server.address), token="t") as client,
        ):
            await client.submit(job_id="mine", subject="a.b", watch=False)
            with pytest.raises(Unavailable, match="not known"):
                await client.retry("mine")
            assert await client.counts() == {}

    asyncio.run(main())
    assert said == ["mine", "mine", "mine", "requeue", "counts"]


def test_a_client_over_http_keeps_to_the_addresses_it_was_given() -> None:
    def answer(asked: Asked) -> bytes:
        if not isinstance(asked.first, HelloClient):
            return b""
        elsewhere = ("tcp://127.0.0.1:1", "http://127.0.0.1:1")
        return frames(Welcome(corr_id=1, version=2, server_id="s", identity="me", kind="client", servers=elsewhere))

    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            OddServer(answer) as server,
            AsyncClient(str(server.address), token="t") as client,
        ):
            assert [str(address) for address in client._machine._redial.addresses] == [str(server.address)]

    asyncio.run(main())


def test_a_server_that_is_killed_among_200_submits_loses_none_and_doubles_none(tmp_path: Path, postgres_url: str) -> None:
    with start_servers(tmp_path, 2, "--http", "127.0.0.1:0", store=postgres_url) as servers, start_worker(servers):
        url = ",".join(server.http_url for server in servers)
        token = servers[0].create_token("client")

        async def main() -> list[bytes]:
            async with asyncio.timeout(60), AsyncClient(url, token=token) as client:
                assert client.welcome is not None
                [near] = [server for server in servers if f"-{server.pid}-" in client.welcome.server_id]
                submits = []
                for number in range(200):
                    job = client.submit(job_id=f"kill-{number}", subject="math.square", payload=str(number).encode())
                    submits.append(asyncio.ensure_future(job))
                    await asyncio.sleep(0)
                    if number == 100:
                        await submits[20]
                        near.kill()
                handles = await asyncio.gather(*submits)
                results = [await handle.result() for handle in handles]
                views = await client.statuses(*(f"kill-{number}" for number in range(200)))
                assert {view.state for view in views} == {"SUCCEEDED"}
                found = await client.list_jobs(limit=1000, subject="math.square")
                assert len(found) == 200
                return results

        assert asyncio.run(main()) == [str(number * number).encode() for number in range(200)]


# ---------------------------------------------------------------------------------------------------- what is refused


def test_no_server_is_unavailable_with_address_and_reason() -> None:
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:1: Connection refused"):
        Client("http://127.0.0.1:1", token="x", connect_timeout_s=0.5)


@pytest.mark.parametrize(("token", "words"), [("tsk_c_unknown", "not known"), ("", "--token-file")])
def test_a_token_that_is_not_known_fails_at_once(server: ServerProcess, token: str, words: str) -> None:
    with pytest.raises(Unauthorized, match=words):
        Client(server.url, token=token)


def test_a_token_that_cannot_be_sent_fails_at_once(server: ServerProcess) -> None:
    with pytest.raises(InvalidInput, match="token"):
        Client(server.url, token="\udcff")


def test_another_path_of_the_server_is_no_server(server: ServerProcess) -> None:
    with pytest.raises(Unavailable, match="its path is another one"):
        Client(f"{server.url}/elsewhere", token="x", connect_timeout_s=0.5)


def test_a_ca_for_plain_http_is_refused_before_the_token_is_sent(server: ServerProcess) -> None:
    with pytest.raises(ConfigError, match="https://"):
        Client(server.url, token="x", tls_ca=certifi.where())


def test_a_blob_of_a_job_that_is_not_ours_is_not_found(server: ServerProcess) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), server.async_client() as client:
            with pytest.raises(NotFound):
                await client._blobs.get(BlobRef("0" * 64, 5), "nobody", lambda piece: None)

    asyncio.run(main())


def test_a_client_over_tcp_never_imports_httpx(server: ServerProcess) -> None:
    program = """
import sys
from tasuki import Client
with Client(sys.argv[1], token=sys.argv[2]) as client:
    client.counts()
print([name for name in sys.modules if name.startswith(("httpx", "httpcore", "anyio"))])
"""
    tcp = re.search(r"tcp://\S+", server.output())
    assert tcp is not None
    done = subprocess.run(
        [sys.executable, "-c", program, tcp[0], server.token],
        env=server.env,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.stdout.strip() == "[]", done.stderr
