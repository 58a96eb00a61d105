"""Addresses: what is understood, and what is refused with a way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tasuki.config import find_token, parse_http, parse_listen
from tasuki.core.address import Address, parse_agents, parse_url
from tasuki.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "places"),
    [
        ("tcp://a,b:7001", ["tcp://a:7000", "tcp://b:7001"]),
        ("tls://a/", ["tls://a:7000"]),
        ("unix:///run/s", ["unix:///run/s"]),
        ("http://a", ["http://a:7080"]),
        ("https://a", ["https://a:443"]),
        ("http://a:1,b:2", ["http://a:1", "http://b:2"]),
        ("http://a:1,http://b:2", ["http://a:1", "http://b:2"]),
        ("https://a/tasuki/,b:8443/x/y", ["https://a:443/tasuki", "https://b:8443/x/y"]),
        ("http://[::1]:80/", ["http://[::1]:80"]),
    ],
)
def test_an_address_may_name_several_places(url: str, places: list[str]) -> None:
    assert [str(address) for address in parse_url(url)] == places


@pytest.mark.parametrize(
    "url",
    [
        *("", "host:7080", "ftp://a", "tcp://a:seven", "unix://x"),
        *("http://", "http:///x", "http://a:99999", "http://a?x=1", "http://a#b", "http://a b", "http://a\r\nX: y"),
        *("https://a,http://b", "http://a,tcp://b"),
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        parse_url(url)


@pytest.mark.parametrize("scheme", ["tcp", "http", "https"])
def test_a_password_in_an_address_is_refused_and_not_repeated(scheme: str) -> None:
    with pytest.raises(ConfigError, match="--token-file") as refused:
        parse_url(f"{scheme}://me:hunter2@host")
    assert "hunter2" not in refused.value.message


def test_http_on_this_machine_is_loopback() -> None:
    assert [Address("http", host, 1).loopback for host in ("localhost", "127.0.0.1", "::1", "a.example")] == [True] * 3 + [False]


def test_a_listener_for_tcp_is_no_place_of_http() -> None:
    with pytest.raises(ConfigError, match="--http"):
        parse_listen("http://127.0.0.1:7080")


def test_a_number_alone_is_a_port_of_this_machine_to_listen_on() -> None:
    assert str(parse_listen("31005")) == "tcp://127.0.0.1:31005"
    assert str(parse_http("31006")) == "http://127.0.0.1:31006"
    with pytest.raises(ConfigError, match=r"'127\.0\.0\.1:70000' is not host:port"):
        parse_listen("70000")


@pytest.mark.parametrize("parse", [parse_http, parse_listen])
@pytest.mark.parametrize("text", ["nowhere:66000", "tcp://nowhere:66000"])
def test_a_listener_that_is_not_understood_is_quoted_as_it_was_given(parse: Callable[[str], Address], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^address '{text}'"):
        parse(text)


@pytest.mark.parametrize("text", ["unix:///run/s", "ftp://a:1"])
def test_a_listener_of_http_is_nothing_else(text: str) -> None:
    with pytest.raises(ConfigError, match=f"address '{text}' is not one for HTTP; write host:port, as in 127.0.0.1:7080"):
        parse_http(text)


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("", "0 lines"),
        ("one\n# two\nthree\n", "3 lines"),
        ("x" * 513, "a line of 513 characters"),
        ("a\x01", "a line of 2 characters"),
    ],
)
def test_a_clients_token_file_has_one_token(text: str, has: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text(" one \n")
    assert find_token(path) == "one"

    path.write_text(text)
    with pytest.raises(ConfigError, match=f"must have exactly one token, up to 512 printable characters; it has {has}$"):
        find_token(path)


@pytest.mark.parametrize("text", ["n1", "http://n1", "http://n1/"])
def test_a_listener_without_a_port_has_the_one_of_its_kind(text: str) -> None:
    assert (parse_http(text), parse_http(text, 7090)) == (Address("http", "n1", 7080), Address("http", "n1", 7090))
    assert parse_http("[::1]:1", 7090) == Address("http", "::1", 1)


@pytest.mark.parametrize(
    ("url", "places"),
    [
        ("agents:http://n1:7090,http://n2:7091", ["http://n1:7090", "http://n2:7091"]),
        ("agents:http://n1", ["http://n1:7090"]),
        ("agents:n1,n2:1", ["http://n1:7090", "http://n2:1"]),
        ("agents:https://n1,n2/pricing/,http://n3", ["https://n1:7090", "https://n2:7090/pricing", "http://n3:7090"]),
        ("agents:http://[::1],http://[::1]:80", ["http://[::1]:7090", "http://[::1]:80"]),
        ("agents:http://n1,http://n1:7090", ["http://n1:7090"]),
    ],
)
def test_node_agents_each_say_where_they_are(url: str, places: list[str]) -> None:
    assert [str(address) for address in parse_agents(url)] == places


@pytest.mark.parametrize(
    "url", ["agents:", "agents:http://", "agents:http://a,,b", "agents:tcp://a", "agents:http://a:x", "agents:http://a?b"]
)
def test_what_names_no_agents_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        parse_agents(url)


def test_a_password_in_an_agents_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as told:
        parse_agents("agents:http://user:hunter2@n1")

    assert "hunter2" not in told.value.message


def test_commands_that_need_a_server_say_so_of_agents() -> None:
    with pytest.raises(ConfigError, match="only tasuki run, nodes, status"):
        parse_url("agents:http://n1:7090")
