"""The store of inputs: sent once, verified, gone on with where it was cut, run by its hash, and fetched by agents."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tasuki.agent import input_sources, upload
from tasuki.agent.input_sources import DispatcherInputs, open_inputs
from tasuki.core.address import parse_url
from tasuki.errors import ConfigError, Unavailable
from tests.agent.stage import AgentStage, code_of, members
from tests.client.agent_stand_in import Asked, Reply, StandIn, http
from tests.dispatcher.stage import BOOK, dispatching, sha256_of, tell, two_nodes
from tests.support.waiting import until

LARGE = bytes(range(256)) * 16 * 1024  # 4 MiB
SHA256 = sha256_of(LARGE)
MIB = 1024 * 1024


def test_an_input_is_stored_once_and_read_back_whole_or_from_a_byte_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_nodes(inputs=str(tmp_path)) as (_, _, stage):
            path = f"/inputs/{SHA256}"

            assert (await stage.http.head(path)).status_code == 404
            first, again = await stage.http.put(path, content=LARGE), await stage.http.put(path, content=LARGE)
            assert (first.status_code, again.status_code) == (201, 200)
            assert first.json() == again.json() == {"sha256": SHA256, "size_bytes": len(LARGE), "offset": len(LARGE)}
            assert (await stage.http.head(path)).headers["content-length"] == str(len(LARGE))
            assert (await stage.http.get(path)).content == LARGE
            rest = await stage.http.get(path, headers={"Range": "bytes=4194300-"})
            assert (rest.status_code, rest.content) == (206, LARGE[-4:])
            assert code_of(await stage.http.get(path, headers={"Range": "bytes=4194304-"})) == (416, "RANGE_NOT_SATISFIABLE")

    tell(story())


def test_what_is_not_what_its_name_says_is_not_stored(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_nodes(inputs=str(tmp_path), max_upload_bytes=5_000_000) as (_, _, stage):
            put = stage.http.put

            assert code_of(await put(f"/inputs/{SHA256}", content=LARGE[:-1] + b"?")) == (400, "CORRUPT")
            assert code_of(await put("/inputs/abc", content=b"x")) == (400, "INVALID_PAYLOAD")
            assert code_of(await put(f"/inputs/{SHA256}", content=bytes(5_000_001))) == (413, "TOO_LARGE")
            assert (await stage.http.head(f"/inputs/{SHA256}")).status_code == 404
            for ranged in ("bytes 0-9/5", "bytes 5-4/10", "bytes 0-0/10", "all"):
                answer = await put(f"/inputs/{SHA256}", content=b"12345", headers={"Content-Range": ranged})
                assert code_of(answer) == (400, "INVALID_PAYLOAD"), ranged

            assert code_of(await put(f"/inputs/{SHA256}", content=_in_chunks())) == (400, "INVALID_PAYLOAD")
            assert (await put(f"/inputs/{SHA256}", content=LARGE)).status_code == 201
            assert code_of(await put(f"/inputs/{SHA256}", content=b"other bytes")) == (400, "INVALID_PAYLOAD")
            # What is stored is answered before the body is read, and stays as it is.
            assert (await put(f"/inputs/{SHA256}", content=LARGE[:-1] + b"?")).status_code == 200
            assert (await stage.http.get(f"/inputs/{SHA256}")).content == LARGE

    tell(story())


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


async def _in_chunks() -> AsyncIterator[bytes]:
    yield b"a body without Content-Length"


def test_an_upload_that_was_cut_goes_on_where_it_was_at_any_dispatcher(tmp_path: Path) -> None:
    async def story() -> None:
        where = str(tmp_path)
        async with StandIn() as node, dispatching(node, inputs=where) as one, dispatching(node, inputs=where) as two:
            path = f"/inputs/{SHA256}"
            _, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(
                f"PUT {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(LARGE)}\r\n\r\n".encode() + LARGE[:3_000_000]
            )
            await asyncio.to_thread(until, lambda: any(_size(part) >= 2 * MIB for part in tmp_path.glob("inputs/tmp/part-*")))
            writer.close()

            async def offset() -> int:
                answer = await two.http.put(path, headers={"Content-Range": f"bytes */{len(LARGE)}"})
                return int(answer.json()["offset"])

            while not (at := await offset()):
                """The first dispatcher has not let go of it."""
            wrong = await two.http.put(path, content=LARGE[9:], headers={"Content-Range": f"bytes 9-4194303/{len(LARGE)}"})
            assert code_of(wrong) == (409, "CONFLICT")
            assert wrong.json()["error"]["details"] == {"offset": at}
            piece = {"Content-Range": f"bytes {at}-{at + 999}/{len(LARGE)}"}
            answer = await two.http.put(path, content=LARGE[at : at + 1000], headers=piece)
            assert (answer.status_code, answer.json()["offset"]) == (200, at + 1000)
            assert at >= 2 * MIB
            assert (await one.http.put(path, content=LARGE)).status_code == 201  # a sender that knows nothing of pieces
            assert (await two.http.get(path)).content == LARGE

    tell(story())


def test_a_job_is_run_by_the_hash_of_its_input(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_nodes(inputs=str(tmp_path)) as (one, _, stage):
            form = [("input", (None, f"{sha256_of(BOOK)}:in/book.csv")), ("exec", (None, "pricer"))]

            unknown = await stage.http.post("/run/a", files=form)
            assert code_of(unknown) == (404, "INPUT_NOT_FOUND")
            assert unknown.json()["error"]["details"] == {"sha256": sha256_of(BOOK)}

            await stage.http.put(f"/inputs/{sha256_of(BOOK)}", content=BOOK)
            answer = await stage.http.post("/run/a", files=form)

            assert answer.content == one.data
            assert b'name="file"; filename="in/book.csv"' in one.posts[0]
            assert BOOK in one.posts[0]

    tell(story())


def test_as_many_files_pass_through_a_dispatcher_as_an_agent_takes(tmp_path: Path) -> None:
    files = [("file", (f"{number}.csv", b"")) for number in range(upload.FILES_MAX - 1)]

    async def story() -> None:
        async with dispatching(agent.url, inputs=str(tmp_path / "inputs")) as stage:
            form = [("file", ("job.sh", b"ls in | wc -l")), *files]
            fields = {"exec": "sh", "args": "[]", "timeout_s": "60"}
            answer = await stage.http.post("/run/many", files=form, data=fields)
            too_many = await stage.http.post("/run/more", files=[*form, ("file", ("one-more", b""))], data=fields)

        assert members(answer.content)["stdout.log"].strip() == str(upload.FILES_MAX).encode()
        assert code_of(too_many) == (400, "INVALID_PAYLOAD")

    with AgentStage(tmp_path) as agent:
        tell(story())


def test_a_node_that_fetches_inputs_itself_is_sent_only_their_names(tmp_path: Path) -> None:
    async def story() -> None:
        async with Pulling() as node, dispatching(node, inputs=str(tmp_path)) as stage:
            answer = await stage.post("a", LARGE)

            assert answer.content == node.data
            assert f"{SHA256}:book.csv".encode() in node.posts[0]
            assert len(node.posts[0]) < 2000
            assert (await stage.http.get(f"/inputs/{SHA256}")).content == LARGE

    tell(story())


class Pulling(StandIn):
    """Says that it fetches inputs itself."""

    async def _answer(self, asked: Asked) -> Reply:
        if asked.path == "/capacity":
            return http(200, b'{"running": 0, "limit": 4, "pulls": true}')
        return await super()._answer(asked)


def test_a_dispatcher_without_a_store_says_so() -> None:
    async def story() -> None:
        async with two_nodes() as (_, _, stage):
            assert code_of(await stage.http.put(f"/inputs/{SHA256}", content=b"x")) == (404, "NOT_FOUND")

    tell(story())


def test_what_a_bucket_holds_was_spooled_first(s3_url: str) -> None:
    async def story() -> None:
        large = LARGE * 3  # more than a bucket takes without a name
        async with two_nodes(inputs=s3_url) as (one, _, stage):
            answer = await stage.post("a", large)

            assert answer.content == one.data
            assert large in one.posts[0]
            source = open_inputs(s3_url, "", None)
            fetched = b"".join([piece async for piece in source.pieces(sha256_of(large))])
            await source.close()
            assert fetched == large

    tell(story())


def test_a_bucket_that_does_not_answer_is_not_waited_for_as_long_as_a_server_would(monkeypatch: pytest.MonkeyPatch) -> None:
    assert input_sources.STORE_RETRY_S < 10.0
    monkeypatch.setattr(input_sources, "STORE_RETRY_S", 0.05)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")

    async def story() -> None:
        source = open_inputs("s3://bucket?endpoint=http://127.0.0.1:9", "", None)
        with pytest.raises(Unavailable):
            await anext(source.pieces(SHA256))
        await source.close()

    tell(story())


def test_an_agent_fetches_from_the_next_dispatcher_what_the_first_did_not_give(tmp_path: Path) -> None:
    async def story() -> None:
        async with StandIn() as node, dispatching(node, inputs=str(tmp_path), tokens=("secret",)) as stage:
            await stage.http.put(f"/inputs/{SHA256}", content=LARGE)
            half = await asyncio.start_server(_half_of(LARGE), "127.0.0.1", 0)
            port = half.sockets[0].getsockname()[1]
            source = DispatcherInputs(parse_url(f"http://127.0.0.1:{port},127.0.0.1:{stage.port}"), "secret", None)

            fetched = b"".join([piece async for piece in source.pieces(SHA256)])

            assert fetched == LARGE
            await source.close()
            half.close()

    tell(story())


def _half_of(data: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data[: len(data) // 2])
            await writer.drain()
        writer.close()

    return serve


def test_inputs_need_a_token(tmp_path: Path) -> None:
    async def story() -> None:
        async with StandIn() as node, dispatching(node, inputs=str(tmp_path), tokens=("secret",)) as stage:
            del stage.http.headers["Authorization"]

            assert code_of(await stage.http.put(f"/inputs/{SHA256}", content=BOOK)) == (401, "UNAUTHORIZED")
            assert code_of(await stage.http.get(f"/inputs/{SHA256}")) == (401, "UNAUTHORIZED")
            assert (await stage.http.head(f"/inputs/{SHA256}")).status_code == 401

    tell(story())


@pytest.mark.parametrize("where", ["ftp://somewhere", "http://host:port"])
def test_a_place_for_inputs_that_cannot_be_one_is_refused_at_the_start(where: str) -> None:
    with pytest.raises(ConfigError):
        open_inputs(where, "", None)
