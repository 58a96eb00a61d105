"""The certificate of a server: what is wrong with the files is told at the start, and new files are taken without a restart."""

from __future__ import annotations

import logging
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tasuki.doors.listening import ServerCertificate, date_problem, server_tls
from tasuki.errors import ConfigError
from tasuki.net.tls import validity_of
from tests.support.certificates import TestAuthority

DEADLINE_S = 25.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("ca"))


# ---------------------------------------------------------------------------------------------------- files


def test_a_certificate_and_the_key_of_another(authority: TestAuthority) -> None:
    cert, _ = authority.issue()
    _, other_key = authority.issue("other.example")

    with pytest.raises(ConfigError, match="is not for the key") as refused:
        server_tls(cert, other_key)
    assert cert in refused.value.message


def test_an_encrypted_key_is_refused_instead_of_asked_for(authority: TestAuthority, tmp_path: Path) -> None:
    cert, key = authority.issue()
    locked = tmp_path / "locked.pem"
    subprocess.run(
        ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked],
        check=True, capture_output=True, timeout=20,
    )  # fmt: skip

    with pytest.raises(ConfigError, match="needs a password, which a service cannot ask for"):
        server_tls(cert, str(locked))


@pytest.mark.parametrize("missing", ["certificate", "key"])
def test_a_file_that_is_not_there_is_named(authority: TestAuthority, tmp_path: Path, missing: str) -> None:
    nowhere = str(tmp_path / "nowhere.pem")
    cert, key = (
        nowhere if kind == missing else path for kind, path in zip(("certificate", "key"), authority.issue(), strict=True)
    )

    with pytest.raises(ConfigError, match=rf"the {missing} .*nowhere\.pem' cannot be read: No such file"):
        server_tls(cert, key)


def test_a_file_that_is_something_else_is_named(authority: TestAuthority, tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.touch(mode=0o600)
    junk.write_text("nothing of that kind")
    cert, key = authority.issue()

    with pytest.raises(ConfigError, match=r"junk\.pem' cannot be understood: there is no certificate in it"):
        server_tls(str(junk), key)
    with pytest.raises(ConfigError, match=r"junk\.pem' cannot be used"):
        server_tls(cert, str(junk))


def test_a_torn_certificate_is_an_error_of_the_file(authority: TestAuthority, tmp_path: Path) -> None:
    cert, key = authority.issue()
    lines = Path(cert).read_text().splitlines()
    torn = tmp_path / "torn.pem"
    torn.write_text("\n".join([lines[0], lines[-1]]))

    with pytest.raises(ConfigError, match=r"torn\.pem"):
        server_tls(str(torn), key)


# ---------------------------------------------------------------------------------------------------- dates


def test_the_dates_are_those_that_openssl_tells(authority: TestAuthority) -> None:
    cert, _ = authority.issue()
    said = subprocess.run(
        ["openssl", "x509", "-in", cert, "-noout", "-dates"], check=True, capture_output=True, text=True, timeout=20
    ).stdout
    dates = [line.partition("=")[2] for line in said.splitlines()]

    assert [date.timestamp() for date in validity_of(cert)] == [ssl.cert_time_to_seconds(date) for date in dates]


def test_a_date_beyond_2050_is_read_too(authority: TestAuthority) -> None:
    cert, _ = authority.issue(ends_days=365 * 60)

    assert validity_of(cert).ends.year == (datetime.now(UTC) + timedelta(days=365 * 60)).year


@pytest.mark.parametrize(
    ("begins_days", "ends_days", "words"),
    [(-2, -1, "has expired on"), (-2, 3, "expires on"), (1, 30, "is not valid before"), (-2, 60, "")],
)
def test_dates_that_a_person_should_know_of(authority: TestAuthority, begins_days: float, ends_days: float, words: str) -> None:
    cert, _ = authority.issue(begins_days=begins_days, ends_days=ends_days)
    problem = date_problem(cert, datetime.now(UTC))

    assert words in problem
    assert bool(words) == bool(problem)


def test_an_expired_certificate_is_used_with_a_warning(authority: TestAuthority, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tasuki.server"):
        ServerCertificate(*authority.issue(begins_days=-2, ends_days=-1))

    (warning,) = caplog.messages
    assert f"has expired on {datetime.now(UTC) - timedelta(days=1):%Y-%m-%d}" in warning


# ---------------------------------------------------------------------------------------------------- renewal


@contextmanager
def serving(context: ssl.SSLContext) -> Iterator[int]:
    """Shakes hands with whoever comes; the port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                context.wrap_socket(connection, server_side=True).close()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(DEADLINE_S)


def shown(port: int, trusting: ssl.SSLContext, name: str) -> int:
    """The serial number of the certificate that a client is shown."""
    with (
        socket.create_connection(("127.0.0.1", port), DEADLINE_S) as plain,
        trusting.wrap_socket(plain, server_hostname=name) as tls,
    ):
        described = tls.getpeercert()
        assert described is not None
        return int(str(described["serialNumber"]), 16)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_renewed_certificate_is_shown_to_those_who_come_next(authority: TestAuthority, tmp_path: Path, name: str) -> None:
    cert, key = (shutil.copy(path, tmp_path) for path in authority.issue("127.0.0.1", "localhost"))
    renewed = authority.issue("127.0.0.1", "localhost", ends_days=90)
    certificate = ServerCertificate(cert, key)

    with serving(certificate.context) as port:
        before = shown(port, authority.trusted(), name)
        shutil.copy(renewed[0], cert)
        shutil.copy(renewed[1], key)
        assert shown(port, authority.trusted(), name) == before
        ends = certificate.renew()
        after = shown(port, authority.trusted(), name)

    assert after != before
    assert ends == validity_of(renewed[0]).ends


def test_files_that_cannot_be_used_leave_the_old_certificate_in_place(authority: TestAuthority, tmp_path: Path) -> None:
    cert, key = (shutil.copy(path, tmp_path) for path in authority.issue())
    certificate = ServerCertificate(cert, key)

    with serving(certificate.context) as port:
        before = shown(port, authority.trusted(), "127.0.0.1")
        shutil.copy(authority.issue("other.example")[0], cert)
        with pytest.raises(ConfigError, match="is not for the key"):
            certificate.renew()
        assert shown(port, authority.trusted(), "127.0.0.1") == before
