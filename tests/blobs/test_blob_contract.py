"""Every blob store keeps the contract: the shipped suite, run on each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.blobs.blob import CHUNK_BYTES
from tasuki.blobs.folder import FolderBlobs
from tasuki.blobs.s3.store import S3Blobs
from tasuki.testing.blob_suite import MAX_BLOB_BYTES, BlobSuite, Damage
from tests.support.s3_service import S3Service


class TestFolderBlobs(BlobSuite):
    @pytest.fixture
    def blobs(self, tmp_path: Path) -> FolderBlobs:
        return FolderBlobs(tmp_path / "blobs", max_blob_bytes=MAX_BLOB_BYTES, floor_free_bytes=0)

    @pytest.fixture
    def damage(self, blobs: FolderBlobs) -> Damage:
        def replace(sha256: str, data: bytes) -> None:
            path = blobs.local_path(sha256)
            assert path is not None
            path.write_bytes(data)

        return replace

    def test_a_reader_goes_on_after_its_blob_is_deleted(self, blobs: FolderBlobs) -> None:
        ref = blobs.put_bytes(b"x" * (2 * CHUNK_BYTES))
        with blobs.open(ref) as reader:
            chunks = iter(reader)
            first = next(chunks)
            blobs.delete(ref.sha256)
            assert len(first) + sum(map(len, chunks)) == ref.size_bytes


class TestS3Blobs(BlobSuite):
    @pytest.fixture
    def blobs(self, s3_url: str) -> S3Blobs:
        return S3Blobs(s3_url, max_blob_bytes=MAX_BLOB_BYTES)

    @pytest.fixture
    def damage(self, blobs: S3Blobs, s3: S3Service) -> Damage:
        def replace(sha256: str, data: bytes) -> None:
            key = f"{blobs.address.prefix}{sha256[:2]}/{sha256}"
            s3.client().put_object(Bucket=blobs.address.bucket, Key=key, Body=data)

        return replace
