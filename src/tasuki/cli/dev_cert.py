"""`tasuki dev-cert`: a certificate authority for one's own machines, and a server's certificate signed by it.

For development and for laboratories where every machine is given the CA file; `net/dev_certificates.py` makes the files.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tasuki.cli.command import PATH, argument, command, flag, number, option
from tasuki.cli.output import Output
from tasuki.errors import ConfigError
from tasuki.net.dev_certificates import OWN_NAMES, Authority, CertificateFiles, all_names
from tasuki.net.tls import validity_of

LEAF_DAYS_MAX = 825  # Apple's systems believe no certificate that is valid for longer
DEFAULT_FOLDER = Path("tasuki-dev-cert")


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
    files = CertificateFiles.in_folder(out)
    there = [path.name for path in (files.cert, files.key) if path.exists()]
    if there and not force:
        raise ConfigError(f"{' and '.join(there)} in {out} would be replaced: give --force, or choose another --out")
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
