"""`tasuki dev-cert`: files that Python, curl and OpenSSL take, keys for their owner alone, and nothing replaced by accident."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tasuki.cli.dev_cert import LEAF_DAYS_MAX, usage_lines
from tasuki.cli.output import ExitCode
from tasuki.net.dev_certificates import CertificateFiles, all_names
from tasuki.net.tls import validity_of
from tests.cli.inside import Inside, inside
from tests.conftest import Require
from tests.support.processes import start_server
from tests.support.waiting import until

__all__ = ["inside"]


@pytest.fixture(autouse=True)
def openssl(require: Require) -> None:
    require("openssl", shutil.which("openssl") is not None, "certificates are made with it")


def openssl_says(*arguments: str) -> str:
    return subprocess.run(["openssl", *arguments], check=True, capture_output=True, text=True, timeout=20).stdout


def serial_of(files: CertificateFiles) -> str:
    return openssl_says("x509", "-in", str(files.cert), "-noout", "-serial")


def test_the_certificate_is_good_for_every_name_and_for_so_long(inside: Inside, tmp_path: Path) -> None:
    files = CertificateFiles.in_folder(tmp_path / "certs")

    made = inside("dev-cert", "--out", str(files.ca.parent), "--json", "control.lab", "10.0.0.7").json

    for name, flag in (
        ("control.lab", "-verify_hostname"),
        ("localhost", "-verify_hostname"),
        ("10.0.0.7", "-verify_ip"),
        ("::1", "-verify_ip"),
    ):
        openssl_says("verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", str(files.ca), flag, name, str(files.cert))
    begins, ends = validity_of(str(files.cert))
    assert (ends - begins).days == LEAF_DAYS_MAX
    assert made["names"][:2] == ["control.lab", "10.0.0.7"]
    assert made["expires_at"] == pytest.approx(ends.timestamp(), abs=1)
    assert "tasuki development CA" in openssl_says("x509", "-in", str(files.ca), "-noout", "-subject")


def test_keys_are_readable_by_their_owner_alone(inside: Inside, tmp_path: Path) -> None:
    files = CertificateFiles.in_folder(tmp_path / "certs")
    before = os.umask(0o000)
    try:
        inside("dev-cert", "--out", str(files.ca.parent))
    finally:
        os.umask(before)

    assert [path.stat().st_mode & 0o777 for path in (files.ca_key, files.key)] == [0o600, 0o600]
    assert files.ca.parent.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in files.ca.parent.iterdir()) == ["ca-key.pem", "ca.pem", "cert.pem", "key.pem"]


def test_nothing_is_replaced_without_force_and_the_ca_never(inside: Inside, tmp_path: Path) -> None:
    files = CertificateFiles.in_folder(tmp_path / "certs")
    inside("dev-cert", "--out", str(files.ca.parent))
    ca, serial = files.ca.read_bytes(), serial_of(files)

    refused = inside("dev-cert", "--out", str(files.ca.parent), "other.lab")
    assert (refused.returncode, serial_of(files)) == (ExitCode.USAGE, serial)
    assert "give --force" in refused.stderr

    forced = inside("dev-cert", "--out", str(files.ca.parent), "--force", "--json", "other.lab").json
    assert (files.ca.read_bytes(), forced["made_ca"]) == (ca, False)
    assert serial_of(files) != serial
    openssl_says("verify", "-CAfile", str(files.ca), "-verify_hostname", "other.lab", str(files.cert))


def test_half_a_ca_is_told_of(inside: Inside, tmp_path: Path) -> None:
    files = CertificateFiles.in_folder(tmp_path)
    files.ca.write_text("a certificate")

    done = inside("dev-cert", "--out", str(tmp_path))

    assert done.returncode == ExitCode.USAGE
    assert "ca-key.pem is not" in done.stderr


def test_a_ca_that_ends_too_soon_signs_nothing(inside: Inside, tmp_path: Path) -> None:
    files = CertificateFiles.in_folder(tmp_path)
    openssl_says(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "5",
        "-subj", "/CN=short", "-keyout", str(files.ca_key), "-out", str(files.ca),
    )  # fmt: skip

    done = inside("dev-cert", "--out", str(tmp_path))

    assert "fewer --days" in done.stderr
    assert not files.cert.exists()
    assert inside("dev-cert", "--out", str(tmp_path), "--days", "3").returncode == 0


@pytest.mark.parametrize("name", ["a b", "x,DNS:evil.example", "x\nDNS:evil", "-", "a..b", "$ENV::HOME", "http://x", "é.lab", ""])
def test_a_name_that_is_none_is_refused(inside: Inside, tmp_path: Path, name: str) -> None:
    done = inside("dev-cert", "--out", str(tmp_path), "--", name)

    assert done.returncode == ExitCode.USAGE
    assert "is not a host name or an IP address" in done.stderr


@pytest.mark.parametrize("days", ["0", "826"])
def test_days_have_limits(inside: Inside, tmp_path: Path, days: str) -> None:
    assert inside("dev-cert", "--out", str(tmp_path), "--days", days).returncode == ExitCode.USAGE


def test_without_openssl_the_way_out_is_told(inside: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    done = inside("dev-cert", "--out", str(tmp_path / "certs"))

    assert done.returncode == ExitCode.USAGE
    assert "apt-get install openssl" in done.stderr


def test_a_folder_with_an_odd_name_works(inside: Inside, tmp_path: Path) -> None:
    files = CertificateFiles.in_folder(tmp_path / "it's $HOME, #1")

    assert inside("dev-cert", "--out", str(files.ca.parent)).returncode == 0
    openssl_says("verify", "-CAfile", str(files.ca), str(files.cert))


def test_the_lines_to_use_name_the_host_that_was_given() -> None:
    lines = usage_lines(
        CertificateFiles.in_folder(Path("a b")), all_names(["*.lab", "control.lab"]), datetime(2030, 1, 1, tzinfo=UTC)
    )

    assert "--tls-cert 'a b/cert.pem' --tls-key 'a b/key.pem'" in lines[-2]
    assert "--to https://control.lab:7080 --tls-ca 'a b/ca.pem'" in lines[-1]


@pytest.mark.e2e
def test_a_server_shows_it_and_reads_it_again_on_sighup(inside: Inside, tmp_path: Path, require: Require) -> None:
    require("curl", shutil.which("curl") is not None, "it is who looks")
    files = CertificateFiles.in_folder(tmp_path / "certs")
    inside("dev-cert", "--out", str(files.ca.parent))
    arguments = ("--http", "127.0.0.1:0", "--tls-cert", str(files.cert), "--tls-key", str(files.key))

    with start_server(tmp_path, *arguments) as server:
        port = int(server.http_url.rpartition(":")[2])
        said = subprocess.run(
            ["curl", "--silent", "--show-error", "--cacert", files.ca, f"https://localhost:{port}/healthz"],
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
        assert (said.returncode, said.stderr) == (0, "")
        before = ssl.get_server_certificate(("127.0.0.1", port), ca_certs=str(files.ca))
        inside("dev-cert", "--out", str(files.ca.parent), "--force")
        server.signal(signal.SIGHUP)
        until(
            lambda: ssl.get_server_certificate(("127.0.0.1", port), ca_certs=str(files.ca)) != before, what="the new one is shown"
        )
        files.key.write_text("torn")
        server.signal(signal.SIGHUP)
        server.wait_for_output("the certificate stays as it was")
        assert server.running
