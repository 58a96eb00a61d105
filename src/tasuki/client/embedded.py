"""Embedded servers: a process for one data folder, started on demand, that ends after its last client."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import NamedTuple

from tasuki.config import OWN_COMMAND, DataFolder
from tasuki.core.address import Address
from tasuki.errors import ConfigError, Unavailable
from tasuki.net.tcp_link import stranger

START_TIMEOUT_S = 20.0
POLL_S = 0.02


def answers(path: Path) -> bool:
    """Return if a process of this user or root listens on this unix socket; ConfigError if it is another user's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
        if problem := stranger(probe, Address("unix", path=os.fspath(path))):
            raise ConfigError(problem)
    return True


def ensure_server(folder: DataFolder) -> str:
    """Return the address of the server that owns the folder; start one if there is none."""
    if not answers(folder.socket):
        _start(folder)
    return f"unix://{folder.socket}"


def _start(folder: DataFolder) -> None:
    log = folder.root / "embedded.log"
    command = [*OWN_COMMAND, "up", "--data", os.fspath(folder.root), "--until-idle"]
    folder.make()
    try:
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=folder.root
            )
    except OSError as error:
        raise ConfigError(
            f"the data folder {folder.root} cannot be written to: {error.strerror or error}; "
            "choose another with --data or TASUKI_DATA"
        ) from None
    # The server may end long before this process does, and would stay a zombie if nobody waited for it.
    threading.Thread(target=process.wait, name="tasuki-embedded", daemon=True).start()
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if answers(folder.socket):
            return
        # Another command may have won the race to own the folder: then this one ends, and the other socket answers soon.
        if process.poll() is not None and read_owner(folder) is None:
            break
        time.sleep(POLL_S)
    tail = ""
    with contextlib.suppress(OSError):
        tail = log.read_text("utf-8", "replace")[-2000:].strip()
    raise Unavailable(f"the embedded server for {folder.root} did not start; its log {log} ends with:\n{tail or '(nothing)'}")


class Owner(NamedTuple):
    """The process that owns a folder's database."""

    pid: int
    since: float


def owner_files(folder: DataFolder) -> tuple[Path, Path]:
    """Return the files that a server locks and writes its pid into: beside its database, or alone if its store is elsewhere."""
    return folder.database.with_name(folder.database.name + ".owner"), folder.root / "server.owner"


def read_owner(folder: DataFolder) -> Owner | None:
    """Return the process in an owner file ("pid 12 since 1794715165"), if it is alive.

    The lock itself is only ever tried by servers: trying it here, even for a moment, could refuse one that is starting.
    """
    return next((owner for path in owner_files(folder) if (owner := _written_in(path)) is not None), None)


def _written_in(path: Path) -> Owner | None:
    try:
        words = path.read_text("utf-8", "replace").split()
        owner = Owner(int(words[1]), float(words[3]))
    except (OSError, ValueError, IndexError):
        return None  # no file, an unreadable one, or an empty one: its owner ended in order
    try:
        os.kill(owner.pid, 0)
    except PermissionError:
        return owner  # alive, of another user
    except (OSError, OverflowError):
        return None
    return owner
