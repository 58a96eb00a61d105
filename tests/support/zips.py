"""Whole archives, read as `extract_zip` reads them."""

from __future__ import annotations

from typing import BinaryIO

from tasuki.blobs.zip.reader import ZipEntry, ZipLimits, ZipReader


def check_zip(source: BinaryIO, limits: ZipLimits | None = None) -> list[ZipEntry]:
    """Unpack every entry, keep nothing, and return the entries in the order of the directory."""
    archive = ZipReader(source, limits)
    for entry in archive.entries:
        archive.unpack(entry, lambda piece: None)
    return archive.entries
