"""The parts that long-running commands share: the log, events on stdout, signals, the event loop, the name of the process."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasuki.blobs.files import check_free
from tasuki.cli.output import ExitCode, encode_json, visible, write_line
from tasuki.config import DISK_FLOOR_BYTES, DISK_FLOOR_INODES, host_name
from tasuki.errors import ConfigError, DiskFull
from tasuki.event_loop import loop_factory

if TYPE_CHECKING:
    from tasuki.core.address import Address
    from tasuki.doors.listening import ServerCertificate
    from tasuki.server.server import ServerConfig

logger = logging.getLogger("tasuki.server")
LOG_LEVELS = ("debug", "info", "warning", "error")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
HURRY_S = 10.0


# ---------------------------------------------------------------------------------------------------- log and events


class _PlainFormatter(logging.Formatter):
    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)sZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        job_id = getattr(record, "job_id", "")
        if job_id and job_id not in record.message:  # most messages about a job name it themselves
            record.message = f"job {job_id}: {record.message}"
        record.message = visible(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(visible, super().formatException(ei).split("\n")))


class JsonFormatter(logging.Formatter):
    """Writes each log record as a line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {"at": record.created, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        entry |= {name: value for name in ("job_id", "code", "peer", "node") if (value := getattr(record, name, ""))}
        if record.exc_info or record.exc_text:
            entry["traceback"] = self.formatException(record.exc_info) if record.exc_info else record.exc_text
        return visible(encode_json(entry))


def configure_log(level: str, *, json: bool, tag: logging.Filter | None = None) -> None:
    """Log to stderr: tasuki's own loggers from `level` up, others from warnings up. `tag` adds `job_id` and `node` to records."""
    if level not in LOG_LEVELS:
        raise ConfigError(f"--log-level must be one of {', '.join(LOG_LEVELS)}, got {level[:40]!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if json else _PlainFormatter())
    if tag is not None:
        handler.addFilter(tag)
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("tasuki").setLevel(level.upper())


class Events:
    """Prints what happens to a process, one line each on stdout: plain, or JSON for programs."""

    def __init__(self, *, json: bool) -> None:
        self._json = json

    def emit(self, event: str, text: str = "", **facts: Any) -> None:
        """Print an event: its name with `text` for people, with `facts` for programs."""
        if self._json:
            write_line(encode_json({"event": event, **facts}))
        else:
            write_line(f"{event} {text}".rstrip())

    def say(self, text: str) -> None:
        """Print a line for people only."""
        if not self._json:
            write_line(text)


# ---------------------------------------------------------------------------------------------------- signals and loop


class StopSignals:
    """Handles SIGTERM and SIGINT.

    The first asks for an orderly end. The second calls `hurry`, or ends the process at once if there is none. After HURRY_S, or
    at a third signal, the process ends in any case.
    """

    def __init__(self, hurry: Callable[[], None] | None = None) -> None:
        self.wanted = asyncio.Event()
        self.exit_code: int = ExitCode.OK
        self._hurry = hurry
        self._loop = asyncio.get_running_loop()
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._signal, number)

    def _signal(self, number: signal.Signals) -> None:
        if not self.wanted.is_set():
            self.wanted.set()
        elif self._hurry is None:
            self._leave(128 + number)
        else:
            self.exit_code = 128 + number
            self._hurry()
            self._hurry = None
            self._loop.call_later(HURRY_S, self._leave, self.exit_code)

    def _leave(self, code: int) -> None:
        sys.stdout.flush()
        os._exit(code)


def renew_on_hangup(certificate: ServerCertificate | None) -> None:
    """Read the certificate again at each SIGHUP from now on. Without a certificate SIGHUP ends the process, as usual."""
    if certificate is None:
        return

    def renew() -> None:
        try:
            logger.info("the certificate was read again; it is valid until %s", certificate.renew().isoformat())
        except ConfigError as error:
            logger.error("the certificate stays as it was: %s", error.message)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, renew)


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine to its end on uvloop, or on asyncio's own loop where uvloop is not installed."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)


# ---------------------------------------------------------------------------------------------------- names


def http_installed() -> bool:
    """Return whether FastAPI, uvicorn and the Prometheus client can be imported."""
    return all(find_spec(name) is not None for name in ("fastapi", "prometheus_client", "uvicorn"))


async def check_ports(addresses: Iterable[Address]) -> None:
    """Raise ConfigError for a port that is taken, before a folder is made for nothing. Binds, but never listens."""
    for address in addresses:
        try:
            probe = await asyncio.get_running_loop().create_server(
                asyncio.Protocol, address.host, address.port, start_serving=False
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address}: {error.strerror or error}; is another server running there?"
            ) from None
        probe.close()
        await probe.wait_closed()


def check_http_installed() -> None:
    if not http_installed():
        raise ConfigError("--http needs FastAPI and uvicorn; install them with: pip install 'tasuki[http]'")


def server_config(data: Path, **settings: Any) -> ServerConfig:
    """Return the settings of a server in this process, under a new id; host and pid alone are often the same in containers."""
    from tasuki.server.server import ServerConfig

    server_id = f"{host_name()}-{os.getpid()}-{secrets.token_hex(3)}"
    return ServerConfig(**{"server_id": server_id, "host": host_name(), "data": data, **settings})


def warn_of_full_disk(folder: Path) -> None:
    """Log that a server has no room: it answers and runs what it has, and refuses what needs space."""
    try:
        check_free(folder, 0, DISK_FLOOR_BYTES, DISK_FLOOR_INODES)
    except DiskFull as error:
        logger.error("new jobs and results will be refused: %s", error.message)
