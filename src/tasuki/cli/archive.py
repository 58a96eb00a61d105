"""Reading the result ZIP of a command: its logs, piece by piece, with all the checks of `tasuki.blobs`.

The archive came from a worker and is believed in nothing; it lies in a temporary file, never whole in memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tasuki.errors import InvalidInput

if TYPE_CHECKING:
    from tasuki.client import AsyncClient
    from tasuki.core.protocol import JobResult

PIECE_BYTES = 64 * 1024
STDOUT, STDERR = "stdout.log", "stderr.log"


@contextmanager
def scratch_file() -> Iterator[Path]:
    """A path in a folder of our own that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="tasuki-result-") as folder:
        yield Path(folder) / "result.zip"


def has_result(ended: JobResult) -> bool:
    """The attempt left a result (a job that never started has none)."""
    return ended.outcome.result_ref is not None or ended.outcome.result is not None


async def fetch(client: AsyncClient, ended: JobResult, path: Path) -> int:
    """Save the result; how many bytes. The folder must exist."""
    if not path.parent.is_dir():
        raise InvalidInput(f"the folder of {str(path)!r} does not exist; make it first, or choose another file")
    return await client.save_result(ended, path)


def copy_logs(source: BinaryIO, stdout: Callable[[bytes], Any], stderr: Callable[[bytes], Any]) -> None:
    """Hand over the two logs of a result, in pieces."""
    from tasuki.blobs.zip.reader import Meter, ZipLimits, read_directory, unpack_entry

    limits = ZipLimits()
    meter = Meter(limits)
    takers = {STDOUT: stdout, STDERR: stderr}
    for entry in read_directory(source, limits):
        if entry.name in takers:
            unpack_entry(source, entry, meter, takers[entry.name])


def copy_all(source: BinaryIO, write: Callable[[bytes], Any]) -> None:
    """Hand over a handler's result, which is plain bytes, in pieces."""
    while piece := source.read(PIECE_BYTES):
        write(piece)
