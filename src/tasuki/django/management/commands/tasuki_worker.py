"""`manage.py tasuki_worker`: run the project's jobs until a signal."""

from __future__ import annotations

import logging
from argparse import SUPPRESS
from collections.abc import Iterator
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from tasuki.cli.process import configure_log
from tasuki.errors import TasukiError


class Command(BaseCommand):
    help = "Run the jobs of this project. The first SIGTERM or Ctrl-C drains: running jobs finish. The second stops them."
    requires_migrations_checks = False

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--slots", type=int, metavar="N", help="Jobs at once. Default: one per core.")
        parser.add_argument(
            "--workers", type=int, default=1, metavar="N", help="Processes that run jobs, each with its slots. Default: 1."
        )
        parser.add_argument("--guest-url", default="", help=SUPPRESS)  # given to the processes that --workers starts
        parser.add_argument("--queue", action="append", default=[], metavar="NAME", help="Only these queues. Default: all.")
        parser.add_argument(
            "--drain-timeout", type=float, metavar="SECONDS", help="How long draining may take. Default: no limit."
        )
        parser.add_argument(
            "--grpc",
            default="",
            metavar="HOST:PORT",
            help="Take orders of the leader here, with the certificates of TASUKI['grpc']. Default: jobs are only pulled.",
        )
        parser.add_argument(
            "--metrics-file",
            default="",
            metavar="FILE",
            help="Write metrics for Prometheus here, for the textfile collector of its node exporter. Default: none.",
        )
        parser.add_argument("--data", metavar="FOLDER", help="Folder for run folders and results. Default: a temporary one.")
        parser.add_argument("--json", action="store_true", help="Log one line of JSON for each record, for programs.")

    def handle(self, *_arguments: Any, **options: Any) -> None:
        from tasuki.django.node import NodeWorker

        _show_log(options["verbosity"], json=options["json"])
        try:
            worker = NodeWorker(
                options["queue"],
                concurrency=options["slots"],
                drain_timeout_s=options["drain_timeout"],
                data=options["data"],
                guest_url=options["guest_url"],
                workers=options["workers"],
                worker_arguments=list(_repeated(options)),
                grpc=options["grpc"],
                metrics_file=options["metrics_file"],
            )
            worker.run()
        except TasukiError as error:
            raise CommandError(error.message) from error


def _repeated(options: dict[str, Any]) -> Iterator[str]:
    """Yield the options that hold for every process of --workers."""
    yield from ("--skip-checks", f"--verbosity={options['verbosity']}")
    yield from (f"--queue={queue}" for queue in options["queue"])
    yield from ("--json",) if options["json"] else ()
    for name in ("slots", "drain_timeout", "data"):
        if options[name] is not None:
            yield f"--{name.replace('_', '-')}={options[name]}"


def _show_log(verbosity: int, *, json: bool) -> None:
    """Show tasuki's log on stderr; if it is not JSON, unless the project's LOGGING has a place for it."""
    if json:
        configure_log({0: "warning", 1: "info"}.get(verbosity, "debug"), json=True)
    log = logging.getLogger("tasuki")
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
        log.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG))
