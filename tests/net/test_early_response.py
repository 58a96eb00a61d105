"""Requests to node agents and the proxies of the environment: a client uses them, machines among themselves do not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tasuki.client.agents.client import AsyncAgentsClient
from tasuki.client.agents.node import AgentNode
from tasuki.core.address import Address, parse_url
from tasuki.core.failover.nodes import Nodes
from tasuki.errors import ConfigError, NoConnection
from tasuki.net.http.early_response import proxy_of
from tests.client.agent_stand_in import Asked, Reply, StandIn, http, result, result_zip
from tests.net.test_http_worker_link import connect_proxy
from tests.support.certificates import TestAuthority

DEADLINE_S = 20.0
FAR = Address("http", "far.invalid", 7090)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


def test_plain_requests_are_handed_to_the_proxy_of_the_environment(environment: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), StandIn() as proxy:

            async def answer(asked: Asked) -> Reply:
                return http(200, b'{"running": 1, "limit": 2}')

            proxy.on_post = answer
            environment.setenv("HTTP_PROXY", proxy.url)
            node = AgentNode(FAR, "", None, proxies=True)
            capacity, _ = await node.check(Nodes([node.name], lambda: 0.0), token_matters=True)
            await node.close()

            assert capacity is not None
            assert (capacity.running, capacity.limit) == (1, 2)
            assert sorted(proxy.asked) == [f"GET {FAR}/capacity", f"GET {FAR}/health"]

    asyncio.run(main())


def test_a_job_goes_over_tls_through_the_proxy_and_an_early_answer_still_stops_the_upload(
    tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    authority = TestAuthority(tmp_path)
    (tmp_path / "book.csv").write_bytes(bytes(24_000_000))

    async def at_once(asked: Asked) -> Reply:
        return result(result_zip(), Connection="close")

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), StandIn(tls=authority.serving("127.0.0.1")) as node, connect_proxy() as proxy:
            url, asked = proxy
            environment.setenv("HTTPS_PROXY", url)
            node.on_post = at_once
            sent = [0]
            async with AsyncAgentsClient(node.url, token="", tls_ca=authority.ca) as client:
                await client.run(
                    "pricer",
                    files=[tmp_path / "book.csv"],
                    output=tmp_path / "result.zip",
                    on_progress=lambda progress: sent.append(progress.done_bytes if progress.stage == "upload" else 0),
                )

            assert set(asked) == {f"CONNECT 127.0.0.1:{node.port} HTTP/1.1"}
            assert max(sent) < 24_000_000

    asyncio.run(main())


def test_a_proxy_that_refuses_is_named(environment: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), StandIn() as proxy:

            async def refuse(asked: Asked) -> Reply:
                return http(403)

            proxy._answer = refuse  # type: ignore[method-assign]  # a CONNECT has no path
            environment.setenv("HTTPS_PROXY", proxy.url)
            node = AgentNode(Address("https", "far.invalid", 7090), "", None, proxies=True)
            with pytest.raises(NoConnection, match="the proxy of HTTP_PROXY or HTTPS_PROXY"):
                await node.ask("7f3c")
            await node.close()

    asyncio.run(main())


@pytest.mark.parametrize("exempt", ["other.invalid,far.invalid", "far.invalid:7090", ".invalid", "*"])
def test_hosts_that_are_exempt_are_reached_directly(environment: pytest.MonkeyPatch, exempt: str) -> None:
    environment.setenv("HTTP_PROXY", "http://proxy:3128")
    environment.setenv("NO_PROXY", exempt)

    assert proxy_of(FAR) is None


def test_the_proxy_for_all_counts_where_none_is_named_for_the_scheme(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("ALL_PROXY", "me:secret@proxy:3128")

    proxy = proxy_of(FAR)

    assert proxy is not None
    assert (str(proxy.url), proxy.auth) == ("http://proxy:3128", ("me", "secret"))


def test_a_proxy_of_another_kind_is_refused_with_the_way_out(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("ALL_PROXY", "socks5://me:secret@proxy:1080")

    with pytest.raises(ConfigError, match=r"name far\.invalid in NO_PROXY") as told:
        proxy_of(FAR)

    assert "secret" not in told.value.message


def test_a_dispatcher_reaches_its_agents_directly(environment: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), StandIn() as agent:
            environment.setenv("HTTP_PROXY", "http://127.0.0.1:1")
            (address,) = parse_url(agent.url)
            node = AgentNode(address, "", None)
            capacity, _ = await node.check(Nodes([node.name], lambda: 0.0), token_matters=True)
            assert capacity is not None
            await node.close()

    asyncio.run(main())
