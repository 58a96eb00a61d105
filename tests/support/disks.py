"""A file system of a test's own, so small that it fills up."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import Require


@contextmanager
def small_disk(folder: Path, size_bytes: int, require: Require) -> Iterator[Path]:
    """Mount a file system of this size at a new folder; only root can."""
    require("root", os.geteuid() == 0, "only root can mount a small disk")
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    require("mount", mounted.returncode == 0, f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
