"""HTTP byte ranges: each header both ways, and what is not one."""

import pytest

from tasuki.core.ranges import (
    BodyRange,
    body_range,
    content_range,
    parse_content_range,
    parse_range,
    range_headers,
    requested_range,
)
from tasuki.errors import InvalidInput


def test_a_request_for_the_rest_names_its_first_byte_and_the_version_it_belongs_to() -> None:
    assert range_headers(0) == range_headers(0, '"etag"') == {}
    assert range_headers(7) == {"Range": "bytes=7-"}
    assert range_headers(7, '"etag"') == {"Range": "bytes=7-", "If-Range": '"etag"'}


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("bytes=0-", (0, 10)),
        ("bytes=4-", (4, 10)),
        ("bytes=4-6", (4, 7)),
        ("bytes=4-99", (4, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-99", (0, 10)),
    ],
)
def test_one_range_is_cut_at_the_size(header: str, found: tuple[int, int]) -> None:
    assert requested_range(header, 10) == found


@pytest.mark.parametrize(
    "header", ["", "bytes=-", "bytes=6-4", "bytes=0-1,3-4", "bytes=x-", "items=0-1", "bytes=٣-", "bytes= 1-2"]
)
def test_what_is_no_single_range_asks_for_everything(header: str) -> None:
    assert requested_range(header, 10) is None


@pytest.mark.parametrize("header", ["bytes=10-", "bytes=99-", "bytes=10-12", "bytes=-0"])
def test_a_range_behind_the_end_has_no_bytes(header: str) -> None:
    found = requested_range(header, 10)

    assert found is not None
    assert found[0] >= found[1]


def test_uploads_and_stored_blobs_have_at_most_fifteen_digits_and_results_eighteen() -> None:
    assert parse_range(f"bytes={'9' * 15}-") == (10**15 - 1, None)
    assert parse_range(f"bytes={'9' * 16}-") is None
    assert requested_range(f"bytes={'9' * 18}-", 10) == (10**18 - 1, 10)
    assert requested_range(f"bytes={'9' * 19}-", 10) is None
    assert parse_content_range(f"bytes 0-4/{'9' * 18}") == (0, 5, 10**18 - 1)
    assert parse_content_range(f"bytes 0-4/{'9' * 19}") is None


@pytest.mark.parametrize("part", [BodyRange(0, 10, 10), BodyRange(3, 4, 10), BodyRange(0, 0, 10), BodyRange(0, 0, 0)])
def test_a_content_range_is_read_as_it_was_written(part: BodyRange) -> None:
    assert parse_content_range(content_range(*part)) == part


def test_a_body_without_content_range_is_the_whole() -> None:
    assert body_range("10", None) == (0, 10, 10)


@pytest.mark.parametrize(
    ("length", "header"),
    [
        ("", None),
        ("-1", None),
        ("٣", None),
        ("1" * 16, None),
        ("5", f"bytes 0-4/{'1' * 16}"),
        ("5", "bytes 0-4/*"),
        ("5", "bytes 0-4"),
        ("5", "items 0-4/5"),
        ("5", "bytes 0-5/9"),
        ("5", "bytes 5-9/9"),
        ("0", "bytes 5-3/9"),
        ("1", "bytes */9"),
    ],
)
def test_a_body_that_its_headers_do_not_agree_on_is_refused(length: str, header: str | None) -> None:
    with pytest.raises(InvalidInput, match="Content-"):
        body_range(length, header)
