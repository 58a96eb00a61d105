"""Each way in which TLS fails is told in words that show the way out, over HTTP and over TCP alike. Every server here is real."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import uvloop

from tasuki.core.address import Address
from tasuki.errors import ConfigError, NotTasuki, ResponseLost, Unavailable
from tasuki.net import tls
from tasuki.net.http.transport import HttpTransport
from tasuki.net.tcp_link import connect
from tasuki.net.tls import client_tls
from tests.support.certificates import TestAuthority

DEADLINE_S = 20.0
CONNECT_S = 5.0
HTTP_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
NGINX_ANSWER = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 4\r\nConnection: close\r\n\r\nhtml"

Dial = Callable[[int, str, ssl.SSLContext | None], Coroutine[object, object, None]]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    """A CA that nobody was told of, as that of a proxy that opens TLS."""
    return TestAuthority(tmp_path_factory.mktemp("stranger"))


@asynccontextmanager
async def listening(tls: ssl.SSLContext | None, answer: bytes = HTTP_ANSWER) -> AsyncIterator[int]:
    """A server that reads a little, answers, and hangs up; its port."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read(4096)
            writer.write(answer)
            await writer.drain()
        except (OSError, ssl.SSLError):
            pass  # the client has left, which is what the test is about
        finally:
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def over_http(port: int, host: str, tls: ssl.SSLContext | None) -> None:
    transport = HttpTransport(Address("https", host, port), tls, CONNECT_S)
    try:
        async with transport.exchange("GET", "/healthz"):
            pass
    finally:
        await transport.close()


async def over_tcp(port: int, host: str, tls: ssl.SSLContext | None) -> None:
    link = await connect(Address("tls", host, port), lambda *_: None, lambda *_: None, tls=tls, timeout_s=CONNECT_S)
    link.abort("enough")


@contextmanager
def accepting(tls: ssl.SSLContext) -> Iterator[int]:
    """A server for one connection that says why it refuses it, as programs in C do; asyncio's only hang up. Its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        listener.settimeout(DEADLINE_S)

        def accept() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                tls.wrap_socket(connection, server_side=True).close()

        accepted = thread.submit(accept)
        yield listener.getsockname()[1]
        accepted.result(DEADLINE_S)


def refusal(dial: Dial, serving: ssl.SSLContext, trusting: ssl.SSLContext) -> str:
    """The message of a client to which a server says why not."""
    with accepting(serving) as port, pytest.raises(Unavailable) as failed:
        uvloop.run(dial(port, "127.0.0.1", trusting))
    return failed.value.message


def told(dial: Dial, serving: ssl.SSLContext | None, trusting: ssl.SSLContext | None, host: str = "127.0.0.1") -> str:
    """The message of a client that fails to connect."""

    async def main() -> str:
        async with asyncio.timeout(DEADLINE_S), listening(serving) as port:
            with pytest.raises(Unavailable) as failed:
                await dial(port, host, trusting)
            return failed.value.message

    return uvloop.run(main())


both = pytest.mark.parametrize("dial", [over_http, over_tcp])


@both
def test_a_certificate_that_fits_is_taken(dial: Dial, authority: TestAuthority) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), listening(authority.serving()) as port:
            await dial(port, "127.0.0.1", authority.trusted())

    uvloop.run(main())


@both
def test_an_unknown_ca(dial: Dial, authority: TestAuthority) -> None:
    words = told(dial, authority.serving(), None)

    assert "of a CA that is not known here" in words
    assert "give the CA with --tls-ca" in words


@both
def test_a_proxy_on_the_way_that_opens_tls(dial: Dial, authority: TestAuthority, stranger: TestAuthority) -> None:
    words = told(dial, stranger.serving(), authority.trusted())

    assert "not of the CA given with --tls-ca" in words
    assert "a proxy on the way opens TLS" in words


@both
def test_a_certificate_of_another_host(dial: Dial, authority: TestAuthority) -> None:
    assert "not for 127.0.0.1" in told(dial, authority.serving("control.example"), authority.trusted())


@both
def test_a_certificate_of_another_name(dial: Dial, authority: TestAuthority) -> None:
    assert "not for localhost" in told(dial, authority.serving("control.example"), authority.trusted(), "localhost")


@both
def test_a_certificate_that_has_expired(dial: Dial, authority: TestAuthority) -> None:
    words = told(dial, authority.serving(begins_days=-2, ends_days=-1), authority.trusted())

    assert "has expired (here it is 20" in words
    assert "renewed at the server" in words


@both
def test_a_certificate_of_tomorrow(dial: Dial, authority: TestAuthority) -> None:
    words = told(dial, authority.serving(begins_days=1), authority.trusted())

    assert "not valid yet" in words
    assert "check the clocks" in words


@both
def test_a_server_without_tls(dial: Dial, authority: TestAuthority) -> None:
    plain = "http" if dial is over_http else "tcp"

    assert f"does not speak TLS; is it {plain}://?" in told(dial, None, authority.trusted())


@both
def test_a_version_of_tls_that_is_too_old(dial: Dial, authority: TestAuthority) -> None:
    old = authority.serving()
    old.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the version that is the point
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1

    assert "no version of TLS in common" in refusal(dial, old, authority.trusted())


@both
def test_a_server_that_wants_a_certificate_of_its_clients(dial: Dial, authority: TestAuthority) -> None:
    strict = authority.serving()
    strict.maximum_version = ssl.TLSVersion.TLSv1_2  # in which it is refused within the handshake
    strict.verify_mode = ssl.CERT_REQUIRED
    strict.load_verify_locations(authority.ca)

    assert "a certificate of" in refusal(dial, strict, authority.trusted())


@both
def test_something_that_hangs_up_in_the_middle_of_the_handshake(dial: Dial, authority: TestAuthority) -> None:
    async def main() -> str:
        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(4096)
            writer.close()

        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        async with asyncio.timeout(DEADLINE_S), server:
            with pytest.raises(Unavailable) as failed:
                await dial(server.sockets[0].getsockname()[1], "127.0.0.1", authority.trusted())
            return failed.value.message

    assert "in the middle of the handshake" in uvloop.run(main())


# ---------------------------------------------------------------------------------------------------- the reverse


def test_plain_http_at_a_port_for_tls(authority: TestAuthority) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), listening(authority.serving()) as port:
            transport = HttpTransport(Address("http", "127.0.0.1", port), None, CONNECT_S)
            with pytest.raises(ResponseLost, match="or with TLS https://"):
                async with transport.exchange("GET", "/healthz"):
                    pass
            await transport.close()

    uvloop.run(main())


def test_plain_http_at_a_port_for_tls_that_answers_as_nginx_does() -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), listening(None, NGINX_ANSWER) as port:
            transport = HttpTransport(Address("http", "127.0.0.1", port), None, CONNECT_S)
            with pytest.raises(NotTasuki, match="is it https://"):
                async with transport.exchange("GET", "/healthz"):
                    pass
            await transport.close()

    uvloop.run(main())


def test_plain_frames_at_a_port_for_tls(authority: TestAuthority) -> None:
    async def main() -> str:
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(DEADLINE_S), listening(authority.serving()) as port:
            address = Address("tcp", "127.0.0.1", port)
            link = await connect(address, lambda *_: None, lambda _, reason: ended.set_result(reason), timeout_s=CONNECT_S)
            link.send_bytes(b"\x20\x00\x00\x00" + b"\x00" * 32)
            return await ended

    assert "if it speaks TLS, it is tls://" in uvloop.run(main())


# ---------------------------------------------------------------------------------------------------- files


def test_a_ca_file_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("nothing of that kind")

    with pytest.raises(ConfigError, match="has no certificate in it"):
        client_tls(str(file))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        client_tls(str(tmp_path / "missing.pem"))


# -- clear text ---------------------------------------------------------------------------------------------------


def test_a_token_that_leaves_the_machine_in_clear_text_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "_warned", set())

    async def main() -> list[int]:
        listener = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        warned = []
        # 0.0.0.0 leads to this machine too, but no rule knows that
        for scheme, host in [("tcp", "127.0.0.1"), ("http", "localhost"), ("http", "0.0.0.0"), ("tcp", "0.0.0.0")]:
            address = Address(scheme, host, port)
            if scheme == "tcp":
                (await connect(address, lambda link, message: None, lambda link, reason: None)).abort("enough")
            else:
                transport = HttpTransport(address, None, CONNECT_S)
                transport.token = "s3cret"
                with contextlib.suppress(ResponseLost, NotTasuki, Unavailable):
                    async with transport.answer("GET", "/"):
                        """Nobody answers."""
                await transport.close()
            warned.append(len(caplog.records))
        listener.close()
        return warned

    assert asyncio.run(main()) == [0, 0, 1, 1]
    assert "https://" in caplog.text
    assert "s3cret" not in caplog.text
