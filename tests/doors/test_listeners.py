"""Listeners of a server: loopback only unless it is protected, the unix socket for its own user, TLS."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tasuki import Client
from tasuki.config import parse_listen
from tasuki.core.address import Address
from tasuki.core.protocol import ErrorMessage, Welcome
from tasuki.doors.listening import check_listener, server_tls
from tasuki.errors import ConfigError, Unavailable
from tests.conftest import Require
from tests.doors.raw import RawPeer, frame
from tests.support.processes import SOURCE, TASUKI, ServerProcess, start_server, start_worker

NOBODY = 65534

# ---------------------------------------------------------------------------------------------------- beyond loopback


@pytest.mark.parametrize("text", ["0.0.0.0:7000", "192.168.1.5:7000", "[::]:7000", "example.org:7000", "tcp://10.0.0.1:1"])
@pytest.mark.parametrize(("tls", "tokens"), [(False, True), (True, False), (False, False)])
def test_listener_beyond_loopback_without_tls_or_tokens_is_refused(text: str, tls: bool, tokens: bool) -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines") as refused:
        check_listener(parse_listen(text), tls=tls, tokens=tokens, insecure=False)
    assert "--insecure" in refused.value.message


@pytest.mark.parametrize("text", ["127.0.0.1:7000", "localhost:0", "[::1]:7000", "127.8.8.8:1"])
def test_listener_on_loopback_needs_no_tls(text: str) -> None:
    check_listener(parse_listen(text), tls=False, tokens=True, insecure=False)


def test_listener_beyond_loopback_with_both_or_with_a_word_is_allowed() -> None:
    everywhere = Address("tcp", "0.0.0.0", 7000)
    check_listener(everywhere, tls=True, tokens=True, insecure=False)
    check_listener(everywhere, tls=False, tokens=True, insecure=True)


@pytest.mark.e2e
def test_server_refuses_to_start_beyond_loopback_and_touches_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    ended = subprocess.run(
        [*TASUKI, "server", "--data", data, "--tcp", "0.0.0.0:0"],
        capture_output=True, text=True, timeout=20, check=False, env={**os.environ, "PYTHONPATH": os.fspath(SOURCE)},
    )  # fmt: skip
    assert ended.returncode != 0
    assert "can be reached from other machines" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not data.exists()


@pytest.mark.e2e
def test_port_that_is_taken_is_a_clear_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = subprocess.run(
            [*TASUKI, "server", "--data", tmp_path / "data", "--tcp", address],
            capture_output=True, text=True, timeout=20, check=False, env={**os.environ, "PYTHONPATH": os.fspath(SOURCE)},
        )  # fmt: skip
    assert ended.returncode != 0
    assert f"cannot listen on tcp://{address}" in ended.stderr
    assert "Traceback" not in ended.stderr


# ---------------------------------------------------------------------------------------------------- unix socket


@pytest.mark.e2e
def test_unix_socket_takes_its_own_user_without_a_token_and_is_closed_to_others(tls_server: ServerProcess) -> None:
    path = tls_server.folder.socket
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(tls_server.data.stat().st_mode) == 0o700
    with RawPeer(tls_server.unix_url) as peer:
        welcome = peer.hello_client()
    assert isinstance(welcome, Welcome)
    assert welcome.kind == "node"
    assert welcome.identity == f"uid:{os.getuid()}"


@pytest.mark.e2e
def test_wrong_token_on_the_unix_socket_is_refused_though_the_user_is_right(tls_server: ServerProcess) -> None:
    with RawPeer(tls_server.unix_url) as peer:
        error = peer.hello_client("tsk_a_wrong")
    assert isinstance(error, ErrorMessage)
    assert error.code == "UNAUTHORIZED"


def as_nobody(work: Callable[[], str]) -> str:
    """Return the result of `work` in a child process of another user, or the name of the exception that it raised."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "the child could not become another user"
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            answer = work()
        except BaseException as error:  # noqa: BLE001 - a forked child must not go on as a second test run
            answer = type(error).__name__
        finally:
            os.write(writer, answer.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        answer = answers.read()
    os.waitpid(child, 0)
    return answer


@pytest.mark.e2e
def test_another_user_is_kept_out_by_the_sockets_mode_and_needs_a_token_where_it_is_not(require: Require) -> None:
    require("root", os.geteuid() == 0, "another user can only be played by root")

    def hello(token: str = "") -> str:
        with RawPeer(server.unix_url) as peer:
            answer = peer.hello_client(token)
            return answer.code if isinstance(answer, ErrorMessage) else type(answer).__name__

    with tempfile.TemporaryDirectory(prefix="tasuki-door-") as home:
        Path(home).chmod(0o755)
        with start_server(Path(home)) as server:
            token = server.create_token("client")
            # Given the folder as it is made, then open, then also the socket open: by a careless hand
            assert as_nobody(hello) == "PermissionError"
            server.data.chmod(0o711)
            assert as_nobody(hello) == "PermissionError"
            server.folder.socket.chmod(0o666)
            # Then the uid that the system tells still counts
            assert as_nobody(hello) == "UNAUTHORIZED"
            assert as_nobody(lambda: hello(token)) == "Welcome"


@pytest.mark.e2e
def test_socket_file_of_a_killed_server_does_not_hinder_the_next(tmp_path: Path) -> None:
    with start_server(tmp_path) as server:
        server.kill()
        assert server.folder.socket.exists()
        server.restart()
        with Client(server.unix_url, connect_timeout_s=5) as client:
            assert client.counts() == {}
        assert server.stop() == 0
        assert not server.folder.socket.exists()


# ---------------------------------------------------------------------------------------------------- TLS


class Certificates(NamedTuple):
    ca: str
    cert: str
    key: str
    other_ca: str


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """A certificate for 127.0.0.1 that is its own authority, and another one that nobody asked for."""
    if shutil.which("openssl") is None:
        from tests.conftest import require

        require("openssl", False, "certificates are made with it")
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "other"):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
             "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:TRUE",
             "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"],
            check=True, capture_output=True, timeout=20,
        )  # fmt: skip
    pem = os.fspath(folder / "server.pem")
    return Certificates(pem, pem, os.fspath(folder / "server.key"), os.fspath(folder / "other.pem"))


@pytest.fixture(scope="module")
def tls_server(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    arguments = ("--tls-cert", certificates.cert, "--tls-key", certificates.key)
    with start_server(tmp_path_factory.mktemp("tls-server"), *arguments) as server:
        yield server
        assert server.running, server.output()


def tls_client(server: ServerProcess, certificates: Certificates, **options: object) -> Client:
    return server.client(server.url, tls_ca=certificates.ca, **options)


def served_over_tls(server: ServerProcess, certificates: Certificates) -> None:
    with tls_client(server, certificates, connect_timeout_s=5) as client:
        assert client.counts() is not None


@pytest.mark.e2e
def test_job_over_tls(tls_server: ServerProcess, certificates: Certificates, tmp_path: Path) -> None:
    assert tls_server.url.startswith("tls://127.0.0.1:")
    with Client(tls_server.unix_url) as local:
        from tasuki.core.access import token_sha256
        from tasuki.server.assembly import make_secret

        token = make_secret("worker")
        local.wait(local.aio.call("token.create", token_id="tls", kind="worker", sha256=token_sha256(token)))
    arguments = ("--tls-ca", certificates.ca)
    with start_worker(tls_server, *arguments, token=token), tls_client(tls_server, certificates) as client:
        assert client.submit(subject="math.square", payload=b"9").result(timeout=30) == b"81"
        large = tmp_path / "large.bin"
        large.write_bytes(os.urandom(3_000_000))
        client.submit(subject="nobody.takes", files=[large], watch=False)


@pytest.mark.e2e
def test_plain_peer_at_the_tls_door_is_cut_off_and_others_are_served(
    tls_server: ServerProcess, certificates: Certificates
) -> None:
    plain_url = tls_server.url.replace("tls://", "tcp://")
    with RawPeer(plain_url) as peer:
        peer.send_bytes(frame(9, b"\x80" * 200))
        served_over_tls(tls_server, certificates)
        data = b""
        try:
            while piece := peer.socket.recv(4096):
                data += piece
        except ConnectionError:
            pass
        assert not data.startswith(b"\x11")  # no Welcome in the clear
    with pytest.raises(Unavailable):
        Client(plain_url, token=tls_server.token, connect_timeout_s=1.0)


@pytest.mark.e2e
def test_silent_peers_at_the_tls_door_do_not_hinder_others(tls_server: ServerProcess, certificates: Certificates) -> None:
    peers = [socket.create_connection(("127.0.0.1", tls_server.port)) for _ in range(50)]
    served_over_tls(tls_server, certificates)
    for peer in peers:
        peer.close()


@pytest.mark.e2e
def test_client_that_does_not_trust_the_certificate_says_so(tls_server: ServerProcess, certificates: Certificates) -> None:
    with pytest.raises(Unavailable, match=r"(?i)certificate.*--tls-ca"):
        Client(tls_server.url, token=tls_server.token, tls_ca=certificates.other_ca, connect_timeout_s=1.0)
    with pytest.raises(Unavailable, match=r"(?i)certificate.*--tls-ca"):
        Client(tls_server.url, token=tls_server.token, connect_timeout_s=1.0)


@pytest.mark.e2e
def test_unencrypted_protocols_are_not_spoken(tls_server: ServerProcess, certificates: Certificates) -> None:
    context = ssl.create_default_context(cafile=certificates.ca)
    with RawPeer(tls_server.url, tls=context) as peer:
        assert isinstance(peer.hello_client(tls_server.token), Welcome)
        assert isinstance(peer.socket, ssl.SSLSocket)
        assert peer.socket.version() in {"TLSv1.2", "TLSv1.3"}


def test_certificate_problems_name_the_file(tmp_path: Path, certificates: Certificates) -> None:
    missing, junk = os.fspath(tmp_path / "missing.pem"), tmp_path / "junk.pem"
    junk.write_text("not a certificate")
    for cert in (missing, os.fspath(junk), certificates.other_ca):
        with pytest.raises(ConfigError) as refused:
            server_tls(cert, certificates.key)
        assert cert in refused.value.message
    for ca in (missing, os.fspath(junk)):
        with pytest.raises(ConfigError) as refused:
            Client("tls://127.0.0.1:1", tls_ca=ca)
        assert ca in refused.value.message
