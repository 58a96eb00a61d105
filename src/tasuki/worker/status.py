"""The status file of a worker, which `tasuki worker status` reads; and its log, where a program has configured none.

The file is `worker/status/<worker_id>.json` in the data folder.

The worker checks its state once a second, and writes the file on a thread when something has changed, under another name and
renamed: it is whole or not there. It is for people, and nothing depends on it: it is not synced, and a failed write is only
logged. Facts that are on disk anyway (waiting results, tokens) are not in it: the reader counts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tasuki.blobs.files import replace_file
from tasuki.core.address import shown_address
from tasuki.core.decoding import decodable
from tasuki.core.job import check_name
from tasuki.worker.credentials import FOLDER
from tasuki.worker.linux_calls import look

LOOK_S = 1.0
JOBS_MAX = 100  # named in the file; the number is of all

logger = logging.getLogger("tasuki.worker")


def log_to_stderr_by_default() -> None:
    """Let the lines of a worker be seen in a program that has not configured logging."""
    log = logging.getLogger("tasuki")
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)


class RunningJob(msgspec.Struct, frozen=True):
    """An attempt that runs, or whose end no server has answered yet."""

    job_id: str
    attempt: int
    subject: str
    since: float | None = None
    """Unix time of its start; None: not started."""


class ConnectionStatus(msgspec.Struct, kw_only=True):
    """State of the connection to a server. Times are Unix times."""

    server: str = ""
    """The url as it was given, without secrets."""
    address: str = ""
    """The address of the current or the last connection."""
    connected_since: float | None = None
    error: str = ""
    """Reason why the last connection ended, or could not be made."""
    error_at: float | None = None
    tries: int = 0
    """Number of failed tries since the last connection."""


@decodable
class Status(msgspec.Struct, kw_only=True):
    """The content of the file."""

    worker_id: str
    pid: int
    born: int
    """Start of the process in clock ticks since boot; with the pid it names the process for good."""
    lasting: bool
    """True if the next process may have the same worker_id."""
    host: str
    since: float
    connection: ConnectionStatus
    running: int = 0
    jobs: tuple[RunningJob, ...] = ()
    draining: bool = False
    ended_at: float | None = None
    error: str = ""
    """The error that ended it."""

    @property
    def alive(self) -> bool:
        """True if its process lives, on this machine."""
        return self.ended_at is None and self.host == socket.gethostname() and bool(self.born) and _born(self.pid) == self.born


def status_folder(data: Path) -> Path:
    return data / FOLDER / "status"


def read_all(data: Path) -> list[Status]:
    """Return the status of all workers of a data folder, the latest start first."""
    found = []
    for path in sorted(status_folder(data).glob("*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=Status))
        except FileNotFoundError:
            continue  # that worker has just ended
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("%s cannot be read, and is ignored: %s", path, error)
    return sorted(found, key=lambda status: -status.since)


class StatusFile:
    """The status file of one worker. `lasting`: it stays after the end, because a worker of the same id may follow."""

    def __init__(self, data: Path, worker_id: str, server: str, *, lasting: bool) -> None:
        self._path = status_folder(data) / f"{check_name(worker_id, 'worker_id')}.json"
        self._connection = ConnectionStatus(server=shown_address(server))
        pid = os.getpid()
        self._status = Status(
            worker_id=worker_id,
            pid=pid,
            born=_born(pid),
            lasting=lasting,
            host=socket.gethostname(),
            since=time.time(),
            connection=self._connection,
        )
        self._written = b""
        self._writing: asyncio.Future[None] | None = None
        self._complained = False
        self._let_in = asyncio.Event()

    def connected(self, address: str) -> None:
        """Note that a server has accepted the worker."""
        self._connection.address, self._connection.connected_since = address, time.time()
        self._connection.tries = 0
        self._let_in.set()

    def lost(self, reason: str) -> None:
        """Note that the connection has ended, or was not made."""
        self._connection.connected_since = None
        self._connection.error, self._connection.error_at = reason, time.time()
        self._connection.tries += 1

    async def keep(self, running: Callable[[], list[RunningJob]], draining: Callable[[], bool]) -> None:
        """Keep the file up to date until canceled."""
        await asyncio.to_thread(self._clear)
        while True:
            self._status.draining, jobs = draining(), running()
            self._status.running, self._status.jobs = len(jobs), tuple(jobs[:JOBS_MAX])
            await self._write()
            with contextlib.suppress(TimeoutError):  # written at once after a connect: people look at a new worker
                async with asyncio.timeout(LOOK_S):
                    await self._let_in.wait()
            self._let_in.clear()

    async def end(self, error: str = "") -> None:
        """Write the end of the worker, or remove the file of one that is not `lasting`."""
        if self._writing is not None:  # the task was canceled, its thread was not
            await asyncio.gather(self._writing, return_exceptions=True)
        self._status.ended_at, self._status.error = time.time(), error
        self._status.running, self._status.jobs = 0, ()
        self._connection.connected_since = None
        if self._status.lasting:
            await self._write()
        else:
            await asyncio.to_thread(self._path.unlink, missing_ok=True)

    # ------------------------------------------------------------------------------------------------ the disk

    async def _write(self) -> None:
        content = msgspec.json.encode(self._status)
        if content == self._written:
            return
        self._written = content
        self._writing = asyncio.ensure_future(asyncio.to_thread(self._replace, content))
        try:
            await asyncio.shield(self._writing)
        except OSError as error:
            if not self._complained:
                logger.warning("tasuki worker status will not show this worker: %s", error)
                self._complained = True

    def _replace(self, content: bytes) -> None:
        for folder in (self._path.parent.parent, self._path.parent):  # `mode` is for the last one alone
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(self._path, content)

    def _clear(self) -> None:
        """Remove files of killed workers that had a new id at each start; else they would pile up."""
        for status in read_all(self._path.parent.parent.parent):
            if not status.lasting and not status.alive and status.host == self._status.host:
                self._path.with_name(f"{status.worker_id}.json").unlink(missing_ok=True)


def _born(pid: int) -> int:
    """Return the start of a process in clock ticks since boot; 0 if there is none."""
    seen = look(pid)
    return 0 if seen is None else seen.born
