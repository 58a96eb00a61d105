"""The parser of forms: the same events however the bytes are cut, and a refusal for all that is not exactly a form."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest

from tasuki.agent.upload import HEADERS_MAX, HEADERS_MAX_BYTES, PARTS_MAX, FormParser, Part, boundary_of
from tasuki.client.agents.transfer import RunForm, read_upload
from tasuki.errors import InvalidInput
from tests.agent.stage import BOUNDARY, DOTNET_KIND, DOTNET_NAMES, dotnet_form, form, part

KIND = f"multipart/form-data; boundary={BOUNDARY}"


def parsed(body: bytes, step: int, kind: str = KIND) -> list[tuple[Part, bytes]]:
    parser = FormParser(boundary_of(kind))
    found: list[tuple[Part, bytes]] = []
    for at in range(0, len(body), step):
        for event in parser.feed(body[at : at + step]):
            if isinstance(event, Part):
                found.append((event, b""))
            elif isinstance(event, bytes):
                found[-1] = (found[-1][0], found[-1][1] + event)
            else:
                assert event is None
    parser.finish()
    return found


@pytest.mark.parametrize("step", [1, 2, 3, 7, 31, 10_000])
def test_a_form_is_the_same_however_it_is_cut(step: int) -> None:
    tricky = b"\r\n--" + BOUNDARY[:-1].encode() + b"\r\n\r\r\n--"
    body = form(part("file", tricky, "a.bin"), part("exec", b"x"), part("file", b"", "empty"))

    assert parsed(body, step) == [(Part("file", "a.bin"), tricky), (Part("exec", None), b"x"), (Part("file", "empty"), b"")]


def test_what_httpx_sends_is_understood() -> None:
    files = [("file", ('say "hi".txt', b"one")), ("file", ("é.csv", b"two"))]
    request = httpx.Request("POST", "http://n1/", files=files, data={"exec": "x"})

    found = parsed(request.read(), 11, request.headers["content-type"])

    assert found == [(Part("exec", None), b"x"), (Part("file", "say %22hi%22.txt"), b"one"), (Part("file", "é.csv"), b"two")]


@pytest.mark.parametrize("name", DOTNET_NAMES)
def test_what_dotnet_sends_is_understood(name: str) -> None:
    found = parsed(dotnet_form(b"1,2", DOTNET_NAMES[name]), 11, DOTNET_KIND)

    assert found == [(Part("file", name), b"1,2"), (Part("exec", None), b"sh")]


def test_what_our_client_sends_is_the_name_as_it_is(tmp_path: Path) -> None:
    names = ['say "hi".txt', "100%22.csv"]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    sent = RunForm(read_upload("", (), [tmp_path / name for name in names]), Mock())

    async def body() -> bytes:
        return b"".join([piece async for piece in sent.pieces()])

    found = parsed(asyncio.run(body()), 11, sent.headers["Content-Type"])

    assert [form_part.filename for form_part, _ in found if form_part.name == "file"] == names


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=" + "x" * 71,
        'multipart/form-data; boundary="a b "',
        "multipart/form-data; boundary=a; boundary=b",
        "multipart/mixed; boundary=a",
    ],
)
def test_what_names_no_boundary_is_refused(kind: str) -> None:
    with pytest.raises(InvalidInput):
        boundary_of(kind)


def test_a_boundary_of_70_characters_is_taken() -> None:
    assert boundary_of(f'Multipart/Form-Data; charset=utf-8; boundary="{"x" * 70}"') == b"x" * 70


def with_headers(headers: bytes) -> bytes:
    return b"--" + BOUNDARY.encode() + b"\r\n" + headers + b"\r\n\r\nx\r\n--" + BOUNDARY.encode() + b"--\r\n"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "does not begin"),
        (b"--other\r\n", "does not begin"),
        (form(part("file", b"x", "a"))[:-6], "before its closing boundary"),
        (part("file", b"x", "a"), "before its closing boundary"),
        (form(part("file", b"x", "a")) + b"more", "behind the closing boundary"),
        (b"--" + BOUNDARY.encode() + b"junk\r\n", "after first boundary"),
        (with_headers(b"Content-Type: text/plain"), "Missing Content-Disposition"),
        (with_headers(b"Content-Disposition: attachment; name=a"), "Wrong type"),
        (with_headers(b"Content-Disposition: form-data"), "Missing name"),
        (with_headers(b"Content-Disposition: form-data; name=a; name=b"), "cannot be read"),
        (with_headers(b'Content-Disposition: form-data; name="a'), "Missing name"),
        (with_headers(b"Content-Disposition: form-data; name=a; filename*=x"), "percent-encoded"),
        (with_headers(b"Content-Disposition: form-data; name=a; filename=b; filename*=utf-8''%E8%zz"), "percent-encoded"),
        (with_headers(b"Content-Disposition: form-data; name=a; filename*=utf-8''%FF"), "percent-encoded"),
        (with_headers(b"Content-Disposition: form-data; name=a; filename*=latin1''x"), "percent-encoded"),
        (with_headers(b"Content-Disposition: form-data; name=a; filename*=utf-8''x; filename*=utf-8''y"), "cannot be read"),
        (with_headers(b"Content-Disposition: form-data; name=a\r\nContent-Transfer-Encoding: base64"), "as they are"),
        (with_headers(b"Content-Disposition: form-data; name=a\r\n folded"), "header continuation"),
        (with_headers(b"Content-Disposition: form-data; name=a\r\nX: \xff"), "decode"),
        (b"preamble\r\n" + form(part("file", b"x", "a")), "does not begin"),
        (b"\r\n" + form(part("file", b"x", "a")), "does not begin"),
        (b"--" + BOUNDARY.encode() + b"\r\nContent-Disposition: form-data; name=a\r\n--" + BOUNDARY.encode() + b"--", "closing"),
        (with_headers(b"Content-Disposition: form-data; name=a\r\nX: y\r\nx: z"), "twice"),
        (with_headers(b"Content-Disposition: form-data; name=a\r\nX: y\0z"), "control character"),
        (with_headers(b"Content-Disposition: form-data; name=a" + b"\r\nX: y" * HEADERS_MAX), "count exceeded"),
        (
            with_headers(b"Content-Disposition: form-data; name=a" + b"".join(b"\r\nX%d: " % n + b"y" * 300 for n in range(30))),
            "larger than",
        ),
        (with_headers(b"X: " + b"x" * HEADERS_MAX_BYTES), "length exceeded"),
        (form(*[part("file", b"", str(number)) for number in range(PARTS_MAX + 1)]), "count exceeded"),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, words: str) -> None:
    for step in (5, len(body) or 1):
        with pytest.raises(InvalidInput, match=words):
            parsed(body, step)


def test_no_more_than_a_boundary_is_held_back() -> None:
    parser = FormParser(boundary_of(KIND))
    list(parser.feed(part("file", b"", "a")[:-2]))

    told = sum(len(event) for event in parser.feed(b"x" * 100_000) if isinstance(event, bytes))

    assert 100_000 - told <= len(BOUNDARY) + 4
