"""Opening a blob store by its address: `s3://bucket/prefix?endpoint=…`, `file:///path`, or a plain path."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from tasuki.blobs.blob import BlobStore
from tasuki.blobs.folder import FolderBlobs
from tasuki.core.address import shown_address
from tasuki.errors import ConfigError

__all__ = ["open_blobs"]


def open_blobs(where: str | Path, *, max_blob_bytes: int, floor_free_bytes: int, retry_s: float | None = None) -> BlobStore:
    """Return the blob store at an address; ConfigError if it is none. `check` tells whether it can be used.

    A folder keeps `floor_free_bytes` of its disk free. `retry_s` is how long a request to a bucket that does not answer is
    retried; None: as long as suits a server that must not lose work.
    """
    if isinstance(where, Path) or "://" not in where:
        return FolderBlobs(Path(where), max_blob_bytes=max_blob_bytes, floor_free_bytes=floor_free_bytes)
    parts = urlsplit(where)
    if parts.scheme == "s3":
        from tasuki.blobs.s3.requests import RETRY_S
        from tasuki.blobs.s3.store import S3Blobs

        return S3Blobs(where, max_blob_bytes=max_blob_bytes, retry_s=RETRY_S if retry_s is None else retry_s)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path not in ("", "/"):
        return FolderBlobs(Path(unquote(parts.path)), max_blob_bytes=max_blob_bytes, floor_free_bytes=floor_free_bytes)
    shown = shown_address(where)
    raise ConfigError(f"blobs cannot be kept at {shown!r}; use s3://bucket/prefix, file:///folder, or the path of a folder")
