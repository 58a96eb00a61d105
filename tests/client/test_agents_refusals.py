"""Refusals of one node, and answers that are no result: the job goes on elsewhere. Real sockets, nodes of the test's own."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tasuki.cli.agents import show_nodes
from tasuki.cli.command import Destination
from tasuki.cli.output import Output
from tasuki.client.agents.client import NOT_KNOWN, REMOVED, STOPPING, AsyncAgentsClient
from tasuki.client.agents.transfer import DownloadedResult
from tasuki.core.failover.nodes import BreakerState, NodeState
from tasuki.errors import InvalidInput, Unauthorized, Unavailable, UntrustedCertificate
from tests.client.agent_stand_in import Asked, Reply, StandIn, http, refusal, result, result_zip
from tests.client.test_agents import DEADLINE_S, Desk, at_desk
from tests.support.certificates import TestAuthority
from tests.support.processes import TASUKI

DATA = result_zip()
NO_ZIP = b"not a ZIP at all"


def answering(node: StandIn, reply: bytes) -> None:
    async def on_post(asked: Asked) -> Reply:
        node.posts.append(await asked.body())
        return reply

    node.on_post = on_post


def refusing_the_token(node: StandIn) -> Callable[[Asked], Awaitable[Reply]]:
    """In place of its answers: all but /health need a token."""
    usual = node._answer

    async def answer(asked: Asked) -> Reply:
        return await usual(asked) if asked.path == "/health" else refusal(401, "UNAUTHORIZED", "this token is not known")

    return answer


def test_a_program_that_no_node_has_is_one_post_to_each_and_no_breaker(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        for node in desk.nodes:
            answering(node, refusal(500, "PROGRAM_NOT_FOUND", f"not at {node.port}"))

        with pytest.raises(Unavailable) as raised:
            await desk.run()

        assert all(f"{node.url}: answered 500 PROGRAM_NOT_FOUND: not at {node.port}" in str(raised.value) for node in desk.nodes)
        assert [len(node.posts) for node in desk.nodes] == [1, 1]
        assert {line.breaker for line in await desk.client.ranking()} == {BreakerState.CLOSED}

    at_desk(tmp_path, 2, story)


@pytest.mark.parametrize(
    "reply",
    [
        http(200, DATA, Content_Type="application/zip"),
        http(203, DATA, Content_Type="application/zip", ETag=f'"{hashlib.sha256(DATA).hexdigest()}"'),
        result(NO_ZIP),
        http(200, DATA, Content_Type="application/zip", ETag=f'"{"0" * 64}"'),
    ],
    ids=["no etag", "not 200", "no zip", "another hash"],
)
def test_a_2xx_that_is_no_result_is_a_failure_and_the_next_node_gets_the_job(tmp_path: Path, reply: bytes) -> None:
    async def story(desk: Desk) -> None:
        bad, good = desk.nodes
        answering(bad, reply)

        async def same(asked: Asked) -> Reply:
            return reply

        bad.on_result = same

        ended = await desk.run()

        assert (ended.node, desk.output.read_bytes(), desk.leftovers()) == (good.url, good.data, [])

    at_desk(tmp_path, 2, story)


def test_a_node_that_refuses_the_token_is_shown_and_the_other_is_used(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        stranger, ours = desk.nodes
        stranger._answer = refusing_the_token(stranger)  # type: ignore[method-assign]

        ended = await desk.run()
        line = next(line for line in await desk.client.ranking() if line.node == stranger.url)

        assert (ended.node, stranger.posts) == (ours.url, [])
        assert (line.standing, line.breaker) == (NodeState.UNWELL, BreakerState.CLOSED)
        assert line.last_answer == "answered 401 UNAUTHORIZED: this token is not known"

    at_desk(tmp_path, 2, story)


def test_a_token_that_all_refuse_ends_it_at_once(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        for node in desk.nodes:
            node._answer = refusing_the_token(node)  # type: ignore[method-assign]

        async with asyncio.timeout(2.0):
            with pytest.raises(Unauthorized) as raised:
                await desk.run()
        assert str(raised.value).endswith("; give one of its tokens with --token-file or TASUKI_TOKEN")

    at_desk(tmp_path, 2, story)


def with_certificates(
    folder: Path, host: str, story: Callable[[AsyncAgentsClient, StandIn], Awaitable[None]], *, trusted: bool
) -> None:
    """One node, at 127.0.0.1, whose certificate is of this host."""
    authority = TestAuthority(folder)

    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            StandIn(tls=authority.serving(host)) as node,
            AsyncAgentsClient(node.url, token="t", tls_ca=authority.ca if trusted else None) as client,
        ):
            await story(client, node)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("host", "trusted", "words"), [("127.0.0.1", False, "give the CA with --tls-ca"), ("n1.example", True, "127.0.0.1")]
)
def test_a_certificate_that_is_not_trusted_here_opens_no_breaker(tmp_path: Path, host: str, trusted: bool, words: str) -> None:
    async def story(client: AsyncAgentsClient, node: StandIn) -> None:
        (tmp_path / "book.csv").write_bytes(b"1")
        async with asyncio.timeout(2.0):  # at once, and not after the patience for nodes that may come back
            with pytest.raises(Unavailable, match=words):
                await client.run("pricer", files=[tmp_path / "book.csv"], output=tmp_path / "result.zip")
        (line,) = await client.ranking()

        assert (line.standing, line.breaker, line.left_out_s) == (NodeState.UNWELL, BreakerState.CLOSED, 0.0)
        assert line.last_answer.startswith(f"no TLS connection to {node.url}: ")
        assert words in line.last_answer

    with_certificates(tmp_path, host, story, trusted=trusted)


def test_a_certificate_that_changes_before_the_post_opens_no_breaker(tmp_path: Path) -> None:
    """The node was well when it was looked at."""

    async def story(desk: Desk) -> None:
        changed, other = desk.nodes
        message = f"no TLS connection to {changed.url}: its certificate is of another"

        async def not_trusting(*args: object, **options: object) -> DownloadedResult:
            raise UntrustedCertificate(message)

        desk.client.agents[changed.url].post = not_trusting  # type: ignore[method-assign]
        notes: list[str] = []

        ended = await desk.run(on_note=notes.append)

        assert (ended.node, notes) == (other.url, [message, f"going on at {other.url}"])
        assert {line.breaker for line in await desk.client.ranking()} == {BreakerState.CLOSED}

    at_desk(tmp_path, 2, story)


def test_the_command_that_shows_nodes_says_which_want_another_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def story(desk: Desk) -> None:
        stranger, ours = desk.nodes
        stranger._answer = refusing_the_token(stranger)  # type: ignore[method-assign]
        place = Destination(f"agents:{stranger.url},{ours.url}", tmp_path / "data", None, None)

        assert await show_nodes(place, Output(), None) == 0

        hints = capsys.readouterr().err.splitlines()
        assert hints == [
            f"tasuki: {stranger.url} does not take the token; give one of its tokens with --token-file or TASUKI_TOKEN"
        ]

    at_desk(tmp_path, 2, story)


def test_a_run_at_a_node_that_is_slow_to_say_so_is_taken_up(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        quick, slow = desk.nodes
        usual, asked_for = slow._answer, 0

        async def answer(asked: Asked) -> Reply:
            nonlocal asked_for
            if asked.path != "/jobs/mine":
                return await usual(asked)
            asked_for += 1
            if asked_for == 1:
                await asyncio.sleep(0.6)
            return http(200, b'{"state": "running"}' if asked_for == 1 else b'{"state": "done"}')

        slow._answer = answer  # type: ignore[method-assign]

        ended = await desk.run(job_id="mine")

        assert (ended.node, quick.posts, slow.posts) == (slow.url, [], [])

    at_desk(tmp_path, 2, story)


def test_an_output_that_is_no_file_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        for output in (tmp_path, fifo):
            with pytest.raises(InvalidInput, match="is not a file"):
                await desk.client.run("pricer", files=[desk.book], output=output)

        assert desk.nodes[0].asked == []
        assert fifo.is_fifo()

    at_desk(tmp_path, 1, story)


def test_a_program_that_takes_its_time_to_end_is_told_as_being_stopped(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        stubborn, gone, other = desk.nodes
        stubborn.job = {"state": "running"}
        usual = stubborn._answer

        async def answer(asked: Asked) -> Reply:
            if asked.method == "DELETE":
                await asyncio.Event().wait()
            return await usual(asked)

        stubborn._answer = answer  # type: ignore[method-assign]
        gone._answer = refusing_removal  # type: ignore[method-assign]

        answers = await desk.client.cancel("mine")

        assert answers == {stubborn.url: STOPPING, gone.url: NOT_KNOWN, other.url: REMOVED}

    at_desk(tmp_path, 3, story)


async def refusing_removal(asked: Asked) -> Reply:
    return refusal(404, "NOT_FOUND")


def test_a_fifo_is_written_into_and_stays_one(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        command = [*TASUKI, "run", "--to", f"agents:{desk.nodes[0].url}", "--data", str(tmp_path / "notes")]
        command += ["--file", str(desk.book), "-o", str(fifo), "pricer"]

        unread = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=20, check=False)
        posts = len(desk.nodes[0].posts)
        reading = asyncio.create_task(asyncio.to_thread(fifo.read_bytes))
        ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=20, check=False)

        assert (unread.returncode, posts, b"start its reader first" in unread.stderr) == (125, 0, True)
        assert (ran.returncode, ran.stdout) == (0, b"hello\n")
        assert await reading == desk.nodes[0].data
        assert fifo.is_fifo()

    at_desk(tmp_path, 1, story)
