"""`tasuki dev-cert`: a certificate authority for one's own machines, and a server's certificate signed by it.

For development and for laboratories where every machine is given the CA file. The `openssl` program does the signing: the
standard library cannot make certificates, and one more dependency is too much for a command that is used once. Everything is
made in a temporary folder and then renamed: a file is whole or not there, and keys are never readable by others.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from tasuki.cli.command import PATH, argument, command, flag, number, option
from tasuki.cli.output import Output
from tasuki.errors import ConfigError
from tasuki.net.tls import validity_of

CA_DAYS = 3650
LEAF_DAYS_MAX = 825  # Apple's systems believe no certificate that is valid for longer
DEFAULT_FOLDER = Path("tasuki-dev-cert")
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
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {names}
"""


@command(
    "dev-cert",
    examples=[
        "tasuki dev-cert      # for localhost and this machine's name, in ./tasuki-dev-cert",
        "tasuki dev-cert --out ~/certs control.lab 192.168.1.20",
        "tasuki dev-cert --out ~/certs --force control.lab other.lab      # another certificate of the same CA",
    ],
)
@argument("names", metavar="[NAME…]", help="More names and IP addresses by which the server is reached.", nargs=-1)
@option(
    "--out", metavar="FOLDER", type=PATH, default=DEFAULT_FOLDER, help="Where the files go. A CA that is there is used again."
)
@number(
    "--days",
    metavar="N",
    type=int,
    default=LEAF_DAYS_MAX,
    help=f"How long the certificate is valid, {LEAF_DAYS_MAX} at most.",
)
@flag("--force", help="Replace the certificate that is there. The CA stays.")
def dev_cert(output: Output, names: tuple[str, ...], out: Path, days: int, force: bool) -> None:
    """Give ca.pem (--tls-ca) to those who are to trust the server.

    Keep ca-key.pem to yourself; do not add this CA to a system's own.
    """
    if not 1 <= days <= LEAF_DAYS_MAX:
        raise ConfigError(f"--days must be 1 to {LEAF_DAYS_MAX}, got {days}")
    wanted = all_names(names)
    files = CertificateFiles(out)
    there = [path.name for path in (files.cert, files.key) if path.exists()]
    if there and not force:
        raise ConfigError(f"{' and '.join(there)} in {out} would be replaced: say --force, or choose another --out")
    authority = Authority.of(files)
    begins = datetime.now(UTC) - timedelta(hours=1)  # clocks of other machines may be behind
    ends = begins + timedelta(days=days)
    ca_ends = validity_of(str(files.ca)).ends
    if ca_ends < ends:
        raise ConfigError(
            f"the CA {files.ca} ends on {ca_ends:%Y-%m-%d}: ask for fewer --days, or remove it and its key for a new CA, "
            "which all who trust the old one must be given"
        )
    authority.issue(files, wanted, begins, ends)
    output.show(
        {
            "ca": str(files.ca),
            "cert": str(files.cert),
            "key": str(files.key),
            "names": wanted,
            "expires_at": ends.timestamp(),
            "made_ca": authority.new,
        },
        lambda: usage_lines(files, wanted, ends),
    )
    output.hint("for development only: with ca-key.pem anyone can impersonate any server to those who trust ca.pem")


def usage_lines(files: CertificateFiles, names: Sequence[str], ends: datetime) -> list[str]:
    """Return the lines for a person: the files, and how they are used."""
    ca, cert, key = (shlex.quote(str(path)) for path in (files.ca, files.cert, files.key))
    host = next((name for name in names if name not in OWN_NAMES and "*" not in name), OWN_NAMES[0])
    return [
        f"CA           {files.ca}",
        f"certificate  {files.cert}  (until {ends:%Y-%m-%d}, for {', '.join(names)})",
        f"key          {files.key}",
        "",
        f"tasuki server --http 0.0.0.0:7080 --tls-cert {cert} --tls-key {key}",
        f"tasuki worker --to https://{f'[{host}]' if ':' in host else host}:7080 --tls-ca {ca}",
    ]


class CertificateFiles:
    """The files in the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca, self.ca_key = folder / "ca.pem", folder / "ca-key.pem"
        self.cert, self.key = folder / "cert.pem", folder / "key.pem"


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
        with _openssl_folder(files.folder, subject) as place:
            made = ("-keyout", "key", "-out", "cert", "-days", str(CA_DAYS), "-extensions", "authority")
            _openssl(place, "req", "-x509", *_NEW_KEY, *made)
            _keep(place, files.ca_key, files.ca)
        return cls(files, new=True)

    def issue(self, files: CertificateFiles, names: Sequence[str], begins: datetime, ends: datetime) -> None:
        """Sign a new key for these names. Both files are replaced."""
        with _openssl_folder(files.folder, f"tasuki {names[0]}"[:SUBJECT_MAX_CHARACTERS], names) as place:
            Path(place, "issued").touch()
            Path(place, "serial").write_text(f"01{secrets.token_hex(16)}")  # begins with 01: it must not look negative
            _openssl(place, "req", "-new", *_NEW_KEY, "-keyout", "key", "-out", "request")
            signer = ("-cert", str(self.files.ca.resolve()), "-keyfile", str(self.files.ca_key.resolve()))
            dates = ("-startdate", f"{begins:%Y%m%d%H%M%SZ}", "-enddate", f"{ends:%Y%m%d%H%M%SZ}")
            made = ("-in", "request", "-out", "cert", "-notext", "-extensions", "server")
            _openssl(place, "ca", "-batch", *signer, *dates, *made)
            _keep(place, files.key, files.cert)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-pkeyopt", "ec_param_enc:named_curve", "-nodes")


def all_names(given: Sequence[str]) -> list[str]:
    """Return the given names, checked, then those by which every machine knows itself."""
    return list(dict.fromkeys([*map(_checked, given), *OWN_NAMES, _own_name()]))


def _own_name() -> str:
    """Return the host's name, or localhost if a certificate cannot carry it."""
    name = socket.gethostname().lower()
    return name if _dns_name(name) else OWN_NAMES[0]


def _checked(name: str) -> str:
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


def _openssl_folder(folder: Path, subject: str, names: Sequence[str] = OWN_NAMES) -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder inside the folder, for this user alone, with the configuration of openssl."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = tempfile.TemporaryDirectory(prefix=".making-", dir=folder.resolve())
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be written to: {error.strerror or error}") from None
    settings = _CONFIG.format(subject=subject, names=",".join(map(_alternative, names)))
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
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{program} {word} did not work: {error}") from None
    if done.returncode != 0:
        last = [line for line in done.stderr.splitlines() if line.strip()][-3:]
        raise ConfigError(f"{program} {word} failed: {' / '.join(last)[:600]}")


def _keep(place: str, key: Path, cert: Path) -> None:
    """Rename new files to their places: the key first, for this user alone, then the certificate, which all may read."""
    for name, kept, mode in (("key", key, 0o600), ("cert", cert, 0o644)):
        made = Path(place, name)
        made.chmod(mode)
        made.replace(kept)
