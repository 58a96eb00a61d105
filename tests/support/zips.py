"""Whole archives, read as `extract_zip` reads them."""

from __future__ import annotations

from typing import BinaryIO

from tasuki.blobs.zip.reader import Meter, ZipEntryInfo, ZipLimits, read_directory, unpack_entry


def check_zip(source: BinaryIO, limits: ZipLimits | None = None) -> list[ZipEntryInfo]:
    """Unpack every entry, keep nothing, and return the entries in the order of the directory."""
    limits = limits or ZipLimits()
    meter = Meter(limits)
    return [unpack_entry(source, entry, meter, lambda piece: None) for entry in read_directory(source, limits)]
