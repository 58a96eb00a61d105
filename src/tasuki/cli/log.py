"""What long-running processes log: a line each on stderr, plain or, with `--json`, as JSON."""

from __future__ import annotations

import logging
import time

from tasuki.cli.output import encode_json

LEVELS = ("debug", "info", "warning", "error")


class _Plain(logging.Formatter):
    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)sZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {"at": record.created, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return encode_json(entry)


def configure(level: str, *, json: bool) -> None:
    """Our own loggers at `level`, everybody else's from warnings up."""
    from tasuki.errors import ConfigError

    if level not in LEVELS:
        raise ConfigError(f"--log-level must be one of {', '.join(LEVELS)}, got {level[:40]!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if json else _Plain())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("tasuki").setLevel(level.upper())
