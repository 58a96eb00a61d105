"""Compressed bodies of requests and answers: gzip and zstd, within the limits of plain ones."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest
import zstandard

from tasuki.doors.http.exchange import BODY_MAX_BYTES, accepted_codec
from tests.doors.http.stage import Stage
from tests.wire.vectors import VECTORS


def send(stage: Stage, body: bytes, encoding: str, path: str = "/v1/messages") -> httpx.Response:
    return stage.call("POST", path, stage.client, content=body, headers={"Content-Encoding": encoding})


def zstd(body: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(body)


@pytest.mark.parametrize("vector", VECTORS["http_bodies"], ids=lambda vector: vector["name"])
def test_the_bodies_of_the_vectors_are_taken_or_refused_as_they_say(stage: Stage, vector: dict[str, Any]) -> None:
    answer = send(stage, bytes.fromhex(vector["hex"]), vector["content_encoding"], vector["path"])

    if "plain" in vector:
        assert (answer.status_code, answer.json()) == (200, {"subject": json.loads(vector["plain"])["subject"]})
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (vector["status"], vector["code"])
        assert answer.headers["accept-encoding"] == "zstd, gzip"


@pytest.mark.parametrize(("encoding", "packed"), [("gzip", gzip.compress), ("zstd", zstd)])
def test_a_body_that_grows_past_the_limit_is_refused_before_it_has(stage: Stage, encoding: str, packed: Any) -> None:
    answer = send(stage, packed(b" " * (BODY_MAX_BYTES + 1)), encoding)

    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "TOO_LARGE")


@pytest.mark.parametrize(
    ("encoding", "body"),
    [("gzip", b"{}"), ("zstd", b"{}"), ("gzip", gzip.compress(b"{}" * 999)[:-9]), ("zstd", zstd(bytes(999))[:-3])],
    ids=["no gzip", "no zstd", "half of a gzip", "half of a zstd"],
)
def test_a_body_that_is_not_what_it_says_is_bad_input(stage: Stage, encoding: str, body: bytes) -> None:
    answer = send(stage, body, encoding)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "INVALID_PAYLOAD")


def test_a_blob_comes_as_it_is(stage: Stage) -> None:
    answer = stage.call("PUT", f"/v1/blobs/{'0' * 64}", stage.client, content=b"", headers={"Content-Encoding": "gzip"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "UNSUPPORTED_ENCODING")


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_an_answer_is_compressed_for_a_client_that_takes_it(stage: Stage, encoding: str) -> None:
    for _ in range(30):
        stage.submit()

    plain = stage.call("GET", "/v1/jobs", stage.client, headers={"Accept-Encoding": "identity"})
    packed = stage.call("GET", "/v1/jobs", stage.client, headers={"Accept-Encoding": encoding})
    small = stage.call("GET", "/v1/jobs/none", stage.client, headers={"Accept-Encoding": encoding})

    assert packed.headers["content-encoding"] == encoding
    assert (packed.headers["vary"], "content-encoding" in plain.headers) == ("Accept-Encoding", False)
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"]) / 2
    assert packed.json() == plain.json()
    assert "content-encoding" not in small.headers


@pytest.mark.parametrize(
    ("header", "codec"),
    [
        ("", None),
        ("br", None),
        ("gzip, deflate, br, zstd", "zstd"),
        ("gzip;q=1.0, zstd;q=0.5", "gzip"),
        ("zstd;q=0, gzip", "gzip"),
        ("GZIP", "gzip"),
        ("gzip;q=many", None),
        ("*", None),
    ],
)
def test_the_codec_that_the_client_wants_most_is_taken(header: str, codec: str | None) -> None:
    assert accepted_codec(header) == codec
