"""/v1/blobs in pieces: where an upload goes on, and what is said to pieces that do not fit."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doors.http.stage import Stage
from tests.support.waiting import until

MIB = 1024 * 1024
SIZE = 3 * MIB


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("uploads")) as stage:
        yield stage


class Upload:
    """A blob that somebody sends."""

    def __init__(self, stage: Stage, token: str = "") -> None:
        self.stage, self.token = stage, token or stage.client
        self.data = os.urandom(SIZE)
        self.sha256 = hashlib.sha256(self.data).hexdigest()
        self.path = f"/v1/blobs/{self.sha256}"

    def offer(self, token: str = "") -> dict[str, Any]:
        answer = self.stage.post(self.path, {"size_bytes": SIZE}, token or self.token)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def put(self, start: int, stop: int, data: bytes | None = None, token: str = "", **headers: str) -> httpx.Response:
        content = self.data[start:stop] if data is None else data
        headers = {"Content-Range": f"bytes {start}-{stop - 1}/{SIZE}", **headers}
        return self.stage.call("PUT", self.path, token or self.token, content=content, headers=headers)

    def partials(self) -> list[Path]:
        return list((self.stage.folder.blobs / "tmp").iterdir())

    def leaves_nothing(self) -> None:
        """An offer's transfer is closed after its answer."""
        until(lambda: self.partials() == [], what="nothing is left of it")


@pytest.fixture
def upload(stage: Stage) -> Iterator[Upload]:
    one = Upload(stage)
    yield one
    for partial in one.partials():
        partial.unlink(missing_ok=True)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


# ---------------------------------------------------------------------------------------------------- pieces that fit


def test_a_blob_comes_in_pieces(upload: Upload) -> None:
    answers = [upload.put(at, at + MIB) for at in range(0, SIZE, MIB)]

    whole = {"sha256": upload.sha256, "size_bytes": SIZE}
    assert [answer.json() for answer in answers] == [{**whole, "offset": MIB}, {**whole, "offset": 2 * MIB}, whole]
    assert upload.offer() == {"have": True, "offset": SIZE}
    upload.leaves_nothing()


def test_an_offer_says_where_to_go_on_to_whoever_sent_it_and_to_nobody_else(upload: Upload) -> None:
    assert upload.put(0, MIB).status_code == 200

    assert upload.offer() == {"have": False, "offset": MIB}
    assert upload.offer(upload.stage.create_token("client")) == {"have": False, "offset": 0}
    assert upload.offer(upload.stage.admin) == {"have": False, "offset": 0}


def test_a_worker_hears_only_of_what_it_sent_itself(upload: Upload) -> None:
    worker = upload.stage.create_token("worker", worker_id="sender")
    assert upload.put(0, SIZE).status_code == 200

    upload.path += "?worker_id=sender&incarnation=sender-1"
    assert upload.offer(worker) == {"have": False, "offset": 0}
    assert upload.put(0, SIZE, token=worker).status_code == 200
    assert upload.offer(worker) == {"have": True, "offset": SIZE}


def test_a_piece_that_is_sent_again_because_its_answer_was_lost_is_answered_alike(upload: Upload) -> None:
    first, again = upload.put(0, MIB), upload.put(0, MIB)

    assert (again.status_code, again.json()) == (200, first.json())


def test_a_piece_of_what_is_here_is_answered_as_the_whole(upload: Upload) -> None:
    assert upload.put(0, SIZE).status_code == 200

    assert upload.put(MIB, 2 * MIB).json() == {"sha256": upload.sha256, "size_bytes": SIZE}


@pytest.mark.parametrize("ranged", [True, False])
def test_what_came_of_a_request_that_was_cut_is_kept(upload: Upload, ranged: bool) -> None:
    with socket.create_connection((upload.stage.address.host, upload.stage.address.port)) as sock:
        lines = [
            f"PUT {upload.path} HTTP/1.1",
            "Host: localhost",
            f"Authorization: Bearer {upload.token}",
            f"Content-Length: {SIZE}",
            *([f"Content-Range: bytes 0-{SIZE - 1}/{SIZE}"] if ranged else []),
        ]
        sock.sendall("\r\n".join((*lines, "\r\n")).encode() + upload.data[: 2 * MIB])
        until(lambda: upload.partials() and upload.partials()[0].stat().st_size == 2 * MIB, what="it is written")

    assert upload.offer() == {"have": False, "offset": 2 * MIB}
    assert upload.put(2 * MIB, SIZE).status_code == 200
    assert upload.offer()["have"]


def test_without_a_range_it_is_the_whole_blob_whatever_came_before(upload: Upload) -> None:
    upload.put(0, MIB)

    answer = upload.stage.call("PUT", upload.path, upload.token, content=upload.data)

    assert answer.json() == {"sha256": upload.sha256, "size_bytes": SIZE}


# ---------------------------------------------------------------------------------------------------- those that do not


@pytest.mark.parametrize(("start", "stop"), [(0, 2 * MIB), (MIB - 1, 2 * MIB), (2 * MIB, SIZE)], ids=["again", "over", "gap"])
def test_a_piece_that_begins_elsewhere_is_refused_with_the_right_offset(upload: Upload, start: int, stop: int) -> None:
    upload.put(0, MIB)

    answer = upload.put(start, stop)

    assert code(answer) == (409, "CONFLICT")
    assert answer.json()["error"]["details"] == {"offset": MIB}
    assert str(MIB) in answer.json()["error"]["message"]
    assert upload.offer() == {"have": False, "offset": MIB}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bytes",
        "bytes */100",
        "bytes 0-9",
        "bytes 0-9/*",
        "bytes 9-0/100",
        "bytes 0-99/99",
        "bytes -1-8/100",
        "bytes 0-10/100",
        "bytes 0-8/100",
        "items 0-9/100",
        "bytes 0-9/" + "9" * 400,
        "bytes ٠-٩/100".encode().decode("latin-1"),
    ],
)
def test_a_range_that_is_none_is_refused(upload: Upload, text: str) -> None:
    headers = {"Content-Range": text.encode("latin-1")}
    answer = upload.stage.call("PUT", upload.path, upload.token, content=b"0123456789", headers=headers)

    assert code(answer) == (400, "INVALID_PAYLOAD")
    assert "Content-Range" in answer.json()["error"]["message"]
    upload.leaves_nothing()


def test_wrong_bytes_are_refused_at_the_end_and_nothing_of_them_is_kept(upload: Upload) -> None:
    upload.put(0, MIB, b"x" * MIB)

    answer = upload.put(MIB, SIZE)

    assert code(answer) == (400, "CORRUPT")
    assert upload.sha256 in answer.json()["error"]["message"]
    assert upload.offer() == {"have": False, "offset": 0}
    upload.leaves_nothing()


def test_a_blob_larger_than_any_may_be_is_refused_at_its_first_piece(upload: Upload) -> None:
    size = 10**15 - 1
    answers = [
        upload.stage.call("PUT", upload.path, upload.token, content=b"x", headers={"Content-Range": f"bytes 0-0/{size}"}),
        upload.stage.post(upload.path, {"size_bytes": size}),
    ]

    assert [code(answer) for answer in answers] == [(413, "TOO_LARGE")] * 2
    upload.leaves_nothing()


@pytest.mark.parametrize("kind", ["nobody", "enrol"])
def test_who_may_not_send_changes_nothing(upload: Upload, kind: str) -> None:
    upload.put(0, MIB)
    token = "tsk_c_unknown" if kind == "nobody" else upload.stage.enroll()

    answer = upload.put(MIB, SIZE, token=token)

    assert answer.status_code in (401, 403)
    assert upload.offer() == {"have": False, "offset": MIB}


def test_pieces_of_what_is_small_are_not_kept(stage: Stage) -> None:
    data = os.urandom(1000)
    path = f"/v1/blobs/{hashlib.sha256(data).hexdigest()}"

    answer = stage.call("PUT", path, stage.client, content=data[:10], headers={"Content-Range": "bytes 0-9/1000"})

    assert code(answer) == (409, "CONFLICT")
    assert answer.json()["error"]["details"] == {"offset": 0}
    until(lambda: list((stage.folder.blobs / "tmp").iterdir()) == [], what="nothing is left of it")
