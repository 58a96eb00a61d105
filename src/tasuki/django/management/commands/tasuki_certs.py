"""`manage.py tasuki_certs`: a certificate authority and certificates for the nodes of a project, for development."""

from __future__ import annotations

from argparse import RawDescriptionHelpFormatter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from tasuki.django.conf import project_settings
from tasuki.errors import ConfigError
from tasuki.net.dev_certificates import CA_DAYS, Authority, CertificateFiles, all_names, checked_name
from tasuki.net.tls import validity_of

DEFAULT_FOLDER = "scheduler-tls"
EXAMPLES = """examples:
  manage.py tasuki_certs                            one certificate for all nodes, in ./scheduler-tls
  manage.py tasuki_certs --name n1.lab --name 10.0.0.7
  manage.py tasuki_certs --node n1 --node n2        one for each node, in ./scheduler-tls/n1 and n2
  manage.py tasuki_certs --force                    replace the certificates; the CA stays

Use them (where each node has its own: with "tls_name": "") as
  TASUKI = {"grpc": {"tls_cert": "scheduler-tls/tls.crt", "tls_key": "scheduler-tls/tls.key", "tls_ca": "scheduler-tls/ca.crt"}}
or copy them to /etc/scheduler/tls/. For development: in production cert-manager, or your own CA, makes them."""


class Command(BaseCommand):
    help = "Make a CA and long-lived certificates for the nodes of this project, for development."
    requires_system_checks = []
    requires_migrations_checks = False

    def add_arguments(self, parser: CommandParser) -> None:
        parser.formatter_class = RawDescriptionHelpFormatter
        parser.epilog = EXAMPLES
        parser.add_argument(
            "--out", default=DEFAULT_FOLDER, metavar="FOLDER", help=f"Where the files go; default: {DEFAULT_FOLDER}."
        )
        parser.add_argument(
            "--node", action="append", default=[], metavar="NODE_ID", help="A certificate for this node alone; several times."
        )
        parser.add_argument(
            "--name", action="append", default=[], metavar="NAME", help="Another host name or address in the certificates."
        )
        parser.add_argument(
            "--days", type=int, default=CA_DAYS - 1, metavar="N", help="How long they are valid; default: ten years."
        )
        parser.add_argument("--force", action="store_true", help="Replace certificates that are there. The CA stays.")

    def handle(self, *_arguments: Any, **options: Any) -> None:
        try:
            self._make(Path(options["out"]), options)
        except ConfigError as error:
            raise CommandError(error.message) from error

    def _make(self, folder: Path, options: dict[str, Any]) -> None:
        names = [checked_name(name) for name in options["name"]]
        wanted: dict[Path, list[str]] = {folder / node: [checked_name(node), *names] for node in options["node"]}
        wanted = wanted or {folder: [project_settings().grpc.tls_name or "scheduler-grpc", *names]}
        files = {place: _files(folder, place) for place in wanted}
        there = [str(path) for one in files.values() for path in (one.cert, one.key) if path.exists()]
        if there and not options["force"]:
            raise ConfigError(f"{', '.join(there)} would be replaced: give --force, or choose another --out")
        authority = Authority.of(_files(folder, folder))
        begins = datetime.now(UTC) - timedelta(hours=1)  # clocks of other machines may be behind
        ends = begins + timedelta(days=options["days"])
        ca_ends = validity_of(str(folder / "ca.crt")).ends
        if not begins < ends <= ca_ends:
            raise ConfigError(f"--days {options['days']}: give 1 or more; the CA {folder / 'ca.crt'} ends on {ca_ends:%Y-%m-%d}")
        for place, listed in wanted.items():
            authority.issue(files[place], all_names(listed), begins, ends, for_nodes=True)
            self.stdout.write(f"{files[place].cert}  until {ends:%Y-%m-%d}, for {', '.join(all_names(listed))}")
        self.stdout.write(f"CA: {folder / 'ca.crt'}; keep {folder / 'ca.key'} secret: it signs certificates of nodes")


def _files(folder: Path, place: Path) -> CertificateFiles:
    return CertificateFiles(folder / "ca.crt", folder / "ca.key", place / "tls.crt", place / "tls.key", cert_mode=0o600)
