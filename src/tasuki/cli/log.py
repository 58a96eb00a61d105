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

    def formatMessage(self, record: logging.LogRecord) -> str:
        job_id = getattr(record, "job_id", "")
        if job_id and job_id not in record.message:  # most lines about a job name it in their own words
            record.message = f"job {job_id}: {record.message}"
        return super().formatMessage(record)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {"at": record.created, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if job_id := getattr(record, "job_id", ""):
            entry["job_id"] = job_id
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return encode_json(entry)


def configure(level: str, *, json: bool, tag: logging.Filter | None = None) -> None:
    """Our own loggers at `level`, everybody else's from warnings up. `tag` gives records the `job_id` that they are about."""
    from tasuki.errors import ConfigError

    if level not in LEVELS:
        raise ConfigError(f"--log-level must be one of {', '.join(LEVELS)}, got {level[:40]!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if json else _Plain())
    if tag is not None:
        handler.addFilter(tag)
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("tasuki").setLevel(level.upper())
