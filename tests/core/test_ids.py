"""Job ids and names are checked against one alphabet; ids of our own are UUIDv7 and strictly increase."""

import random
import uuid
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.core.job import IdMaker, check_job_id, check_name
from tasuki.errors import InvalidInput, quoted

UNIX_MS_MAX = 2**48 - 1
NOW_MS = 1_760_000_000_000


def seeded_bytes(seed: int = 0) -> Callable[[int], bytes]:
    return random.Random(seed).randbytes


def maker_at(*readings_ms: int) -> IdMaker:
    """A maker whose clock shows these readings, one per look; the last one stays."""

    def readings() -> Iterator[int]:
        yield from readings_ms
        while True:
            yield readings_ms[-1]

    return IdMaker(readings().__next__, seeded_bytes())


def unix_ms_of(made: str) -> int:
    return uuid.UUID(made).int >> 80


def strictly_increasing(ids: list[str]) -> bool:
    return all(before < after for before, after in pairwise(ids))


# --- names that others give us


@pytest.mark.parametrize("job_id", ["a", "sq-7", "A.b_c-9", "_", "-", "a.", "a..b", "7" * 128, str(uuid.UUID(int=5))])
def test_a_job_id_of_the_alphabet_is_returned(job_id: str) -> None:
    assert check_job_id(job_id) == job_id


@pytest.mark.parametrize(
    "job_id",
    ["", ".", "..", ".hidden", "a/b", "a\\b", "a b", "a\n", "a\x00", "é", "a\uff10", "\ud800", "x" * 129, "a:b", "*", "index"],
)
def test_any_other_job_id_is_refused(job_id: str) -> None:
    with pytest.raises(InvalidInput):
        check_job_id(job_id)


def test_the_refusal_names_the_value_and_the_rule() -> None:
    with pytest.raises(InvalidInput, match=r"job_id '\.\./etc' must be 1 to 128 characters of .* not begin with a dot"):
        check_job_id("../etc")


def test_the_refusal_of_a_huge_value_is_short() -> None:
    with pytest.raises(InvalidInput) as refused:
        check_job_id("x" * 1_000_000)
    assert len(str(refused.value)) < 200


def test_a_name_may_have_64_characters_and_no_more() -> None:
    assert check_name("w" * 64) == "w" * 64
    with pytest.raises(InvalidInput, match="must be 1 to 64 characters"):
        check_name("w" * 65)


def test_the_refusal_of_a_name_says_what_kind_it_was() -> None:
    with pytest.raises(InvalidInput, match=r"worker_id '\.x' must be"):
        check_name(".x", "worker_id")


@given(st.text())
def test_a_quoted_value_is_one_short_printable_line(value: str) -> None:
    shown = quoted(value)
    assert len(shown) <= 40
    assert shown.isprintable()


def test_a_short_value_is_quoted_whole() -> None:
    assert quoted("a\nb") == r"'a\nb'"


# --- ids of our own


def made_at(unix_ms: int, random_byte: int) -> str:
    return IdMaker(lambda: unix_ms, lambda size: bytes([random_byte]) * size)()


@given(st.integers(0, UNIX_MS_MAX), st.integers(0, 255))
def test_an_id_is_canonical_and_carries_version_variant_and_time(unix_ms: int, random_byte: int) -> None:
    made = made_at(unix_ms, random_byte)

    parsed = uuid.UUID(made)
    assert str(parsed) == made
    assert parsed.version == 7
    assert parsed.variant == uuid.RFC_4122
    assert unix_ms_of(made) == unix_ms


def test_each_random_bit_is_in_its_place() -> None:
    assert made_at(0, 0) == "00000000-0000-7000-8000-000000000000"
    assert made_at(UNIX_MS_MAX, 0xFF) == "ffffffff-ffff-77ff-bfff-ffffffffffff"  # the counter begins in its lower half


@given(st.tuples(st.integers(0, UNIX_MS_MAX), st.integers(0, UNIX_MS_MAX)).filter(lambda pair: pair[0] < pair[1]))
def test_an_id_of_a_later_millisecond_sorts_after(pair: tuple[int, int]) -> None:
    earlier_ms, later_ms = pair
    assert made_at(earlier_ms, 0xFF) < made_at(later_ms, 0)


def test_a_made_id_is_a_uuid7_of_the_clocks_time_and_a_job_id() -> None:
    made = maker_at(NOW_MS)()

    assert uuid.UUID(made).version == 7
    assert uuid.UUID(made).variant == uuid.RFC_4122
    assert unix_ms_of(made) == NOW_MS
    assert check_job_id(made) == made


def test_ids_of_one_millisecond_strictly_increase() -> None:
    make = maker_at(NOW_MS)

    ids = [make() for _ in range(1000)]

    assert strictly_increasing(ids)
    assert {unix_ms_of(made) for made in ids} == {NOW_MS}


def test_ids_go_on_increasing_when_the_clock_steps_back() -> None:
    make = maker_at(NOW_MS, NOW_MS - 60_000, NOW_MS - 59_000, NOW_MS + 1)

    ids = [make() for _ in range(4)]

    assert strictly_increasing(ids)
    assert [unix_ms_of(made) for made in ids] == [NOW_MS, NOW_MS, NOW_MS, NOW_MS + 1]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), min_size=1, max_size=20))
def test_any_mix_of_batches_and_clock_readings_strictly_increases(turns: list[tuple[int, int]]) -> None:
    make = maker_at(*[NOW_MS + reading for reading, _ in turns])

    ids = [made for _, count in turns for made in [*make.many(count), make()]]

    assert strictly_increasing(ids)
    assert len(ids) == sum(count + 1 for _, count in turns)


def test_a_used_up_counter_carries_into_the_next_millisecond() -> None:
    make = maker_at(NOW_MS)
    make._last_stamp = (NOW_MS << 26) + 2**26 - 3  # 2 more stamps fit into this millisecond

    ids = make.many(4)

    assert strictly_increasing(ids)
    assert [unix_ms_of(made) for made in ids] == [NOW_MS, NOW_MS, NOW_MS + 1, NOW_MS + 1]


def test_a_batch_larger_than_one_run_of_the_counter_strictly_increases() -> None:
    ids = maker_at(NOW_MS).many(40_000)

    assert len(ids) == 40_000
    assert strictly_increasing(ids)
    assert all(len(made) == 36 and made[14] == "7" and made[19] in "89ab" for made in ids)


def test_two_makers_in_the_same_millisecond_make_different_ids() -> None:
    one, other = (IdMaker(lambda: NOW_MS, seeded_bytes(seed)) for seed in (1, 2))
    assert set(one.many(1000)).isdisjoint(other.many(1000))


def test_each_id_of_a_batch_has_a_random_tail_of_its_own() -> None:
    tails = {made.rpartition("-")[2] for made in maker_at(NOW_MS).many(1000)}
    assert len(tails) == 1000


def test_no_ids_asked_for_none_made() -> None:
    assert maker_at(NOW_MS).many(0) == []
