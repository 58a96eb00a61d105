"""From an operator's words to a blob store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.blobs.folder import FolderBlobs
from tasuki.blobs.open_blobs import open_blobs
from tasuki.blobs.s3.store import S3Blobs
from tasuki.errors import ConfigError


@pytest.mark.parametrize("form", ["path", "text", "url"])
def test_a_folder_can_be_a_path_or_a_url(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "with space"
    where = {"path": folder, "text": str(folder), "url": folder.as_uri()}[form]
    blobs = open_blobs(where, max_blob_bytes=10, floor_free_bytes=0)
    assert isinstance(blobs, FolderBlobs)
    assert blobs.root == folder


def test_a_bucket_is_an_s3_url() -> None:
    blobs = open_blobs("s3://bucket/a?endpoint=http://127.0.0.1:9", max_blob_bytes=10, floor_free_bytes=0)
    assert isinstance(blobs, S3Blobs)
    assert (blobs.address.bucket, blobs.address.prefix, blobs.max_blob_bytes) == ("bucket", "a/", 10)


@pytest.mark.parametrize("where", ["http://host/x", "file://elsewhere/x", "file:///", "gs://key:hidden@bucket/x"])
def test_what_is_neither_is_refused_without_repeating_a_password(where: str) -> None:
    with pytest.raises(ConfigError, match="s3://bucket/prefix") as caught:
        open_blobs(where, max_blob_bytes=10, floor_free_bytes=0)
    assert "hidden" not in str(caught.value)
