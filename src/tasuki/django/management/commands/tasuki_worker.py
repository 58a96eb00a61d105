"""`manage.py tasuki_worker`: run the project's jobs until a signal."""

from __future__ import annotations

import logging
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from tasuki.errors import TasukiError


class Command(BaseCommand):
    help = "Run the jobs of this project. The first SIGTERM or Ctrl-C drains: running jobs finish. The second stops them."
    requires_migrations_checks = False

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--slots", type=int, metavar="N", help="Jobs at once. Default: one per core.")
        parser.add_argument("--queue", action="append", default=[], metavar="NAME", help="Only these queues. Default: all.")
        parser.add_argument(
            "--drain-timeout", type=float, metavar="SECONDS", help="How long draining may take. Default: no limit."
        )
        parser.add_argument("--data", metavar="FOLDER", help="Folder for run folders and results. Default: a temporary one.")

    def handle(self, *_arguments: Any, **options: Any) -> None:
        from tasuki.django.node import NodeWorker

        _show_log(options["verbosity"])
        try:
            worker = NodeWorker(
                options["queue"],
                concurrency=options["slots"],
                drain_timeout_s=options["drain_timeout"],
                data=options["data"],
            )
            worker.run()
        except TasukiError as error:
            raise CommandError(error.message) from error


def _show_log(verbosity: int) -> None:
    """Show tasuki's log on stderr, unless the project's LOGGING has a place for it."""
    log = logging.getLogger("tasuki")
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
        log.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG))
