"""Breakers between the calls of a command line: a small file in the data folder, with what each node did last.

Best effort. A command lives for seconds and would try a dead node again each time; with the file it does not. Nothing depends on
it: a file that cannot be read, written or locked is as good as none. Writers take turns by a lock file, which works on every
system, and each changes only the nodes that it has to do with.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from tasuki.core.failover.breaker import BreakerNote

NAME = "agents.json"
NODES_MAX = 1000
FORGET_S = 24 * 3600.0  # a node that nobody asked for so long starts anew
LOCK_S = 0.2
LOCK_STALE_S = 5.0  # whoever holds it longer has died
POLL_S = 0.01


class _Line(msgspec.Struct, omit_defaults=True):
    note: BreakerNote
    at: float
    """When it was written, in Unix time; the note's own times count from there."""


class _BreakerFile(msgspec.Struct):
    nodes: dict[str, _Line] = {}


class BreakerNotes:
    """The file in one data folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._lock = folder / f"{NAME}.lock"

    def read(self) -> dict[str, BreakerNote]:
        """What was written, with its times counted from now."""
        now = time.time()
        found = {}
        for node, line in self._load().nodes.items():
            age_s = max(0.0, now - line.at)
            left_out_s = None if line.note.left_out_s is None else line.note.left_out_s - age_s
            if age_s < FORGET_S:
                found[node] = msgspec.structs.replace(line.note, left_out_s=left_out_s)
        return found

    def write(self, notes: Mapping[str, BreakerNote | None]) -> bool:
        """Replace what is known of these nodes, None: forget it; whether that was possible."""
        try:
            if not any(notes.values()) and not self._path.exists():
                return True
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked() as locked:
                if locked:
                    self._replace(notes)
                return locked
        except OSError:
            return False

    def _replace(self, notes: Mapping[str, BreakerNote | None]) -> None:
        now = time.time()
        file = self._load()
        for node, note in notes.items():
            file.nodes.pop(node, None)
            if note is not None:
                file.nodes[node] = _Line(note, now)
        latest = sorted(file.nodes.items(), key=lambda item: item[1].at)[-NODES_MAX:]
        fresh = {node: line for node, line in latest if now - line.at < FORGET_S}
        temporary = self._path.with_name(f"{NAME}.{secrets.token_hex(4)}")
        try:
            temporary.write_bytes(msgspec.json.encode(_BreakerFile(fresh)))
            temporary.replace(self._path)
        finally:
            temporary.unlink(missing_ok=True)

    def _load(self) -> _BreakerFile:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_BreakerFile)
        except (OSError, msgspec.DecodeError):  # none, or another version's
            return _BreakerFile()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Whether the lock was got in time."""
        deadline = time.monotonic() + LOCK_S
        while not self._take_lock():
            if time.monotonic() >= deadline:
                yield False
                return
            time.sleep(POLL_S)
        try:
            yield True
        finally:
            self._lock.unlink(missing_ok=True)

    def _take_lock(self) -> bool:
        try:
            os.close(os.open(self._lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # given back just now
                if time.time() - self._lock.stat().st_mtime > LOCK_STALE_S:
                    self._lock.unlink(missing_ok=True)
            return False
        return True
