"""How far a job says it is: lines `progress 0.4 text` that it writes to the descriptor named in TASUKI_PROGRESS_FD.

The descriptor is a file that the job appends to, like its logs: no pipe could be left undrained and hold it up. Only the
latest line counts. Of a job that floods it the end is looked at, and the file is emptied; nothing of it is kept in memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from tasuki.core.job import PROGRESS_TEXT_MAX_CHARS, Progress

DESCRIPTOR = 3
"""Its number in the job; above the three that every program has."""
VARIABLE = "TASUKI_PROGRESS_FD"
READ_BYTES = 4 * 1024  # some lines of the longest that count
EMPTY_AT_BYTES = 64 * 1024
_WORD = "progress"

logger = logging.getLogger(__name__)


def _as_it_is(text: str) -> str:
    return text


def parse_progress(line: bytes, mask: Callable[[str], str] = _as_it_is) -> Progress | None:
    """What the line says; None if it is none. `mask` sees the text before it is cut: half a secret is one too."""
    word, _, rest = line.decode("utf-8", "replace").strip().partition(" ")
    number, _, text = rest.strip().partition(" ")
    try:
        fraction = float(number)
    except ValueError:
        return None
    if word != _WORD or not 0.0 <= fraction <= 1.0:  # NaN is not either
        return None
    printable = "".join(character if character.isprintable() else " " for character in mask(text.strip()))
    return Progress(fraction, printable[:PROGRESS_TEXT_MAX_CHARS])


class ProgressFile:
    """The file of one attempt. `tell` hears of every look that found something new; nothing here ever fails the attempt."""

    def __init__(self, path: Path | str, tell: Callable[[Progress], None], mask: Callable[[str], str] = _as_it_is) -> None:
        """`mask` takes out of a text what nobody may see."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        self._tell = tell
        self._mask = mask
        self._seen_bytes = 0
        self._latest: Progress | None = None
        self.malformed = 0
        """Lines that said nothing, of those that were looked at."""

    def look(self) -> None:
        """Read what was written since the last time."""
        try:
            found = self._read()
        except OSError as error:
            logger.debug("progress cannot be read: %s", error)
            return
        if found is not None and found != self._latest:
            self._latest = found
            self._tell(found)

    def _read(self) -> Progress | None:
        size_bytes = os.fstat(self._descriptor).st_size
        if size_bytes < self._seen_bytes:  # the job has emptied it
            self._seen_bytes = 0
        if size_bytes == self._seen_bytes:
            return None
        start = max(self._seen_bytes, size_bytes - READ_BYTES)
        data = os.pread(self._descriptor, READ_BYTES, start)
        complete, newline, unfinished = data.rpartition(b"\n")
        lines = complete.split(b"\n") if newline else []
        if start > self._seen_bytes:
            lines = lines[1:]  # cut off at its beginning
        self._seen_bytes = start + len(data) - len(unfinished) if len(unfinished) < READ_BYTES else size_bytes
        if size_bytes > EMPTY_AT_BYTES:
            os.ftruncate(self._descriptor, 0)
            self._seen_bytes = 0
        found = [parse_progress(line, self._mask) for line in lines if line.strip()]
        said = [progress for progress in found if progress is not None]
        self.malformed += len(found) - len(said)
        return said[-1] if said else None

    def close(self) -> None:
        os.close(self._descriptor)
