"""A certificate authority for development: it makes itself, and signs certificates of servers and nodes.

For one's own machines, and laboratories where every machine is given the CA file. The `openssl` program does the signing: the
standard library cannot make certificates, and one more dependency is too much for commands that are used once. Everything is
made in a temporary folder and then renamed: a file is whole or not there, and keys are never readable by others.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from tasuki.errors import ConfigError

CA_DAYS = 3650
OWN_NAMES = ("localhost", "127.0.0.1", "::1")
OPENSSL_TIMEOUT_S = 60.0
SUBJECT_MAX_CHARACTERS = 64  # of a common name, in X.509

_dns_name = re.compile(r"(?:\*\.)?(?:[a-z0-9_](?:[a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z0-9_](?:[a-z0-9-]{0,61}[a-z0-9])?").fullmatch

# `ca` and not `x509 -req`: only it takes dates, and only with dates can a certificate begin a little before now.
_CONFIG = """\
[req]
distinguished_name = nobody
prompt = no
string_mask = utf8only
[nobody]
CN = {subject}
[authority]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[ca]
default_ca = here
[here]
database = issued
serial = serial
new_certs_dir = .
default_md = sha256
policy = any
unique_subject = no
[any]
commonName = supplied
[signed]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = {usages}
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {names}
"""


class CertificateFiles(NamedTuple):
    """The files of a CA, and of a certificate that it signed."""

    ca: Path
    ca_key: Path
    cert: Path
    key: Path
    cert_mode: int = 0o644

    @classmethod
    def in_folder(cls, folder: Path) -> CertificateFiles:
        return cls(folder / "ca.pem", folder / "ca-key.pem", folder / "cert.pem", folder / "key.pem")


class Authority(NamedTuple):
    """The CA of a folder; `new` if it was just made."""

    files: CertificateFiles
    new: bool = False

    @classmethod
    def of(cls, files: CertificateFiles) -> Authority:
        """Return the CA that is there, else a new one."""
        there = [path for path in (files.ca, files.ca_key) if path.exists()]
        if len(there) == 1:
            missing = files.ca_key if there == [files.ca] else files.ca
            raise ConfigError(f"{there[0]} is there, but {missing.name} is not: bring it back, or remove the other for a new CA")
        if there:
            return cls(files)
        subject = f"tasuki development CA {_own_name()}"[:SUBJECT_MAX_CHARACTERS]
        with _openssl_folder(files.ca.parent, subject) as place:
            made = ("-keyout", "key", "-out", "cert", "-days", str(CA_DAYS), "-extensions", "authority")
            _openssl(place, "req", "-x509", *_NEW_KEY, *made)
            _keep(place, files.ca_key, files.ca, files.cert_mode)
        return cls(files, new=True)

    def issue(
        self, files: CertificateFiles, names: Sequence[str], begins: datetime, ends: datetime, *, for_nodes: bool = False
    ) -> None:
        """Sign a new key for these names. Both files are replaced. `for_nodes`: those who call show the certificate, too."""
        usages = "serverAuth, clientAuth" if for_nodes else "serverAuth"
        with _openssl_folder(files.cert.parent, f"tasuki {names[0]}"[:SUBJECT_MAX_CHARACTERS], names, usages) as place:
            Path(place, "issued").touch()
            Path(place, "serial").write_text(f"01{secrets.token_hex(16)}")  # begins with 01: it must not look negative
            _openssl(place, "req", "-new", *_NEW_KEY, "-keyout", "key", "-out", "request")
            signer = ("-cert", str(self.files.ca.resolve()), "-keyfile", str(self.files.ca_key.resolve()))
            dates = ("-startdate", f"{begins:%Y%m%d%H%M%SZ}", "-enddate", f"{ends:%Y%m%d%H%M%SZ}")
            made = ("-in", "request", "-out", "cert", "-notext", "-extensions", "signed")
            _openssl(place, "ca", "-batch", *signer, *dates, *made)
            _keep(place, files.key, files.cert, files.cert_mode)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-pkeyopt", "ec_param_enc:named_curve", "-nodes")


def all_names(given: Sequence[str]) -> list[str]:
    """Return the given names, checked, then those by which every machine knows itself."""
    return list(dict.fromkeys([*map(checked_name, given), *OWN_NAMES, _own_name()]))


def _own_name() -> str:
    """Return the host's name, or localhost if a certificate cannot carry it."""
    name = socket.gethostname().lower()
    return name if _dns_name(name) else OWN_NAMES[0]


def checked_name(name: str) -> str:
    """Return a host name or IP address as a certificate carries it, or raise ConfigError."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(name.strip("[]")))
    if not _dns_name(name.lower()) or len(name) > 253:
        raise ConfigError(f"{name[:80]!r} is not a host name or an IP address: write control.lab, *.lab or 192.168.1.20")
    return name.lower()


def _alternative(name: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(name)}"
    except ValueError:
        return f"DNS:{name}"


def _openssl_folder(
    folder: Path, subject: str, names: Sequence[str] = OWN_NAMES, usages: str = "serverAuth"
) -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder inside the folder, for this user alone, with the configuration of openssl."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = tempfile.TemporaryDirectory(prefix=".making-", dir=folder.resolve())
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be written to: {error.strerror or error}") from None
    settings = _CONFIG.format(subject=subject, names=",".join(map(_alternative, names)), usages=usages)
    Path(place.name, "config").write_text(settings)
    return place


def _openssl(place: str, word: str, *arguments: str) -> None:
    """Run openssl inside the temporary folder, so that no path has to be quoted in its configuration."""
    program = shutil.which("openssl")
    if program is None:
        raise ConfigError("there is no openssl program on PATH, which makes the certificates: apt-get install openssl")
    try:
        done = subprocess.run(
            [program, word, "-config", "config", *arguments],
            cwd=place,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=OPENSSL_TIMEOUT_S,
            check=False,
            umask=0o077,
            env={"LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{program} {word} did not work: {error}") from None
    if done.returncode != 0:
        last = [line for line in done.stderr.splitlines() if line.strip()][-3:]
        raise ConfigError(f"{program} {word} failed: {' / '.join(last)[:600]}")


def _keep(place: str, key: Path, cert: Path, cert_mode: int) -> None:
    """Rename new files to their places: the key first, for this user alone, then the certificate."""
    for name, kept, mode in (("key", key, 0o600), ("cert", cert, cert_mode)):
        made = Path(place, name)
        made.chmod(mode)
        made.replace(kept)
