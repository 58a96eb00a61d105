"""Durations and sizes as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.core.units import parse_duration, parse_size, shown_duration, shown_size
from tasuki.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("5m", 300), ("1h", 3600), ("1d", 86_400), ("1h30m", 5400), ("1.5h", 5400), ("0.25", 0.25), ("7", 7), ("0", 0)],
)
def test_a_duration_is_read_with_its_units(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "-1", "-5m", "nan", "inf", "1e3", "5 m", "5min", "1h30", "h", "1,5h", "٣s"])
def test_a_text_that_is_no_duration_is_refused_with_the_way_to_write_one(text: str) -> None:
    with pytest.raises(ConfigError, match="write 90s, 5m, 1h or 1d"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.254, "0.25s"), (2.5, "2.5s"), (9.999, "10s"), (90, "90s"), (119.6, "2m"), (300, "5m"), (3599, "59m59s"),
     (5400, "1h30m"), (3605, "1h"), (90_000, "1d1h"), (86_400 * 366, "366d"), (-3, "0s")],
)  # fmt: skip
def test_a_duration_is_shown_with_its_two_largest_units(seconds: float, text: str) -> None:
    assert shown_duration(seconds) == text


@given(st.floats(0, 1e9))
def test_what_is_shown_of_a_duration_can_be_typed_in_again(seconds: float) -> None:
    assert parse_duration(shown_duration(seconds)) == pytest.approx(seconds, rel=1 / 24, abs=0.01)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0B"), (999, "999B"), (1500, "1.50kB"), (23_449_000, "23.4MB"), (999_999, "1.00MB"), (2e15, "2000TB")],
)  # fmt: skip
def test_a_size_is_shown_with_three_digits(size_bytes: float, text: str) -> None:
    assert shown_size(size_bytes) == text


@given(st.integers(0, 10**14))
def test_what_is_shown_of_a_size_can_be_typed_in_again(size_bytes: int) -> None:
    assert parse_size(shown_size(size_bytes)) == pytest.approx(size_bytes, rel=0.01, abs=1)
