"""`tasuki server --presign`: a file and its result go straight to and from the bucket, with a real server, worker and bucket."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import pytest

from tasuki.net.http.blobs import DIRECT_MIN_BYTES
from tests.net.counting_relay import Relay
from tests.support.processes import start_server, start_worker
from tests.support.s3_service import S3Service

pytestmark = pytest.mark.e2e
SIZE_BYTES = DIRECT_MIN_BYTES + 1000
SOON_S = 30.0


def test_the_server_carries_nothing_of_a_file_or_its_result(tmp_path: Path, s3: S3Service) -> None:
    # given: whatever does not come through the server comes through the relay
    path, data = tmp_path / "input.bin", os.urandom(SIZE_BYTES)
    path.write_bytes(data)
    copy = ("--subject", "copy.>", "--exec", "copy=/bin/cp {file} out/copy.bin", "--data", str(tmp_path / "worker"))
    with Relay(s3.endpoint) as relay:
        words = ("--http", "127.0.0.1:0", "--presign", "--presign-endpoint", relay.endpoint)
        with start_server(tmp_path, *words, blobs=s3.url(), env=s3.environment) as server:
            # when: a client over HTTP sends a file, and a worker over HTTP gives it back
            token, log = server.create_token("worker"), tmp_path / "worker.log"
            with (
                start_worker(server.http_url, *copy, command=True, token=token, log=log),
                server.client(server.http_url) as client,
            ):
                result = client.submit(subject="copy.1", exec="copy", files=[path]).result(SOON_S)

    # then
    with zipfile.ZipFile(io.BytesIO(result)) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("copy.bin")]
        assert archive.read(name) == data
    assert relay.sent_bytes > 2 * SIZE_BYTES
    assert relay.received_bytes > 2 * SIZE_BYTES
