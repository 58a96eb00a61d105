"""From what an operator wrote to a blob store: `s3://bucket/prefix?endpoint=…`, `file:///path`, or a plain path."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from tasuki.blobs.blob import BlobStore
from tasuki.blobs.folder import FolderBlobs
from tasuki.errors import ConfigError

__all__ = ["open_blobs"]


def open_blobs(where: str | Path, *, max_blob_bytes: int, floor_free_bytes: int, retry_s: float | None = None) -> BlobStore:
    """The blob store there; ConfigError for an address that cannot be one. `check` tells whether it can be used.

    `floor_free_bytes` is what a folder keeps free for others; a bucket has no such thing. `retry_s` is how long a bucket is
    waited for that does not answer; None: as long as a server that does not want to lose work.
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
    shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"  # not what may be a password
    raise ConfigError(f"blobs cannot be kept at {shown!r}; use s3://bucket/prefix, file:///folder, or the path of a folder")
