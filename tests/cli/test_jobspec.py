"""From words to jobs: ranges, lines, environment, payload."""

import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tasuki.cli.jobspec import (
    array_elements,
    check_files,
    line_elements,
    open_lines,
    parse_array,
    parse_codes,
    parse_env,
    parse_time,
    read_payload,
)
from tasuki.core.units import shown_time
from tasuki.errors import InvalidInput, TooLarge


@pytest.mark.parametrize(
    ("text", "indexes"),
    [
        ("1-4", [1, 2, 3, 4]),
        ("7", [7]),
        ("0-10:5", [0, 5, 10]),
        ("3,7,9-11", [3, 7, 9, 10, 11]),
        ("1-3,2-4", [1, 2, 3, 4]),
    ],
)
def test_a_range_becomes_its_indexes(text: str, indexes: list[int]) -> None:
    assert parse_array(text) == indexes


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "5-1", "1-5:0", "1..5", "1-2-3"])
def test_a_range_that_is_none_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(InvalidInput, match="--array"):
        parse_array(text)


def test_a_range_beyond_the_limit_is_refused_before_it_is_built() -> None:
    with pytest.raises(TooLarge):
        parse_array("1-999999999999")


def test_the_index_is_put_into_every_argument_that_names_it() -> None:
    assert list(array_elements([1, 2], ["--seed={i}", "x"], ["{i}.csv"])) == [
        (1, ("--seed=1", "x"), ("1.csv",)),
        (2, ("--seed=2", "x"), ("2.csv",)),
    ]


def test_a_line_replaces_its_name_and_is_never_split() -> None:
    assert list(line_elements(["a b\n"], ["--in", "{line}", "z"], [])) == [(1, ("--in", "a b", "z"), ())]


def test_a_line_without_a_place_becomes_the_last_argument() -> None:
    assert list(line_elements(["x\n"], ["-v"], [])) == [(1, ("-v", "x"), ())]


def test_empty_lines_make_no_job_but_keep_the_numbers_true() -> None:
    assert [element.number for element in line_elements(["a\n", "\n", "  \n", "b"], [], [])] == [1, 4]


def test_an_environment_value_may_contain_equals_signs() -> None:
    assert parse_env(["A=b=c", "EMPTY="]) == {"A": "b=c", "EMPTY": ""}


def test_an_environment_name_without_a_value_is_refused() -> None:
    with pytest.raises(InvalidInput, match="NAME=VALUE"):
        parse_env(["PLAIN"])


def test_a_payload_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * (64 * 1024 + 1))

    with pytest.raises(TooLarge, match="--file"):
        read_payload(str(path))


@pytest.mark.parametrize("read", [read_payload, lambda path: check_files([path]), lambda path: open_lines(path).__enter__()])
def test_a_file_that_is_not_there_is_named(read, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no-such"):
        read(str(tmp_path / "no-such"))


def test_a_time_is_given_from_now_on_as_a_date_or_as_a_unix_time() -> None:
    before = time.time()
    assert before + 90 <= (parse_time("--not-after", "+90") or 0) <= time.time() + 90
    assert before + 5400 <= (parse_time("--not-after", "+1h30m") or 0) <= time.time() + 5400
    assert parse_time("--not-after", "1767225600.5") == 1767225600.5
    assert parse_time("--not-after", "2026-01-31T06:00Z") == datetime(2026, 1, 31, 6, tzinfo=UTC).timestamp()
    assert parse_time("--not-after", "2026-01-31T06:00") == datetime(2026, 1, 31, 6).timestamp()  # noqa: DTZ001 - local time
    assert parse_time("--not-after", None) is None


def test_a_time_as_it_is_shown_can_be_typed_in_again() -> None:
    assert parse_time("--not-before", shown_time(1767225600.0)) == 1767225600.0


@pytest.mark.parametrize("text", ["", "+", "soon", "+1year", "-5", "2026-13-01"])
def test_a_time_that_is_none_is_refused_with_its_option(text: str) -> None:
    with pytest.raises(InvalidInput, match="--not-after"):
        parse_time("--not-after", text)


def test_exit_codes_stand_with_commas_between() -> None:
    assert parse_codes("--retry-exit", "75") == (75,)
    assert parse_codes("--retry-exit", "3, 4,3") == (3, 4)
    assert parse_codes("--retry-exit", None) == ()


@pytest.mark.parametrize("text", ["", "x", "3;4", "3,"])
def test_exit_codes_that_are_none_are_refused_with_their_option(text: str) -> None:
    with pytest.raises(InvalidInput, match="--retry-exit"):
        parse_codes("--retry-exit", text)
