"""Values are masked in a job's output, however it is cut into pieces, and offsets stay what they were."""

import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.core.job import Outcome
from tasuki.worker.logs import CappedLog, KeptLog, LogCaps, LogRead
from tasuki.worker.redaction import SECRET_MIN_BYTES, RedactedLog, Redactor

SECRET = b"s3cr3t-value"


def masked_by_hand(data: bytes, secrets: list[bytes]) -> bytes:
    """Every byte that some occurrence covers, found by looking at every place."""
    shown = bytearray(data)
    for secret in secrets:
        for found in re.finditer(b"(?=%s)" % re.escape(secret), data):
            shown[found.start() : found.start() + len(secret)] = b"*" * len(secret)
    return bytes(shown)


@pytest.mark.parametrize(
    ("secrets", "data", "shown"),
    [
        ([SECRET], b"key=s3cr3t-value\n", b"key=************\n"),
        ([SECRET], b"s3cr3t-valu", b"s3cr3t-valu"),
        ([b"abcdef", b"defghi"], b"-abcdefghi-", b"-*********-"),
        ([b"aaaaaa"], b"aaaaaaaab", b"********b"),
        ([b"abcabcabc"], b"abcabcabcabcabcd", b"***************d"),
        ([b"secret", b"secret-longer"], b"secret-longer secret", b"************* ******"),
        ([b"12345"], b"12345", b"12345"),  # too short to be masked
        ([b"\xff\x00line\nline"], b"<\xff\x00line\nline>", b"<***********>"),
        ([], b"anything", b"anything"),
    ],
)
def test_what_is_masked(secrets: list[bytes], data: bytes, shown: bytes) -> None:
    assert Redactor(secrets).mask(data) == shown


def test_a_value_shorter_than_the_least_is_let_through() -> None:
    assert not Redactor([b"x" * (SECRET_MIN_BYTES - 1)])
    assert Redactor([b"x" * SECRET_MIN_BYTES])


ALPHABET = st.sampled_from([b"a", b"b", b"ab", b"aab", b"x"])
TEXT = st.lists(ALPHABET, max_size=60).map(b"".join)
SECRETS = st.lists(st.lists(ALPHABET, min_size=6, max_size=12).map(b"".join), min_size=1, max_size=3)


@given(secrets=SECRETS, before=TEXT, after=TEXT)
def test_every_occurrence_is_masked_also_those_that_overlap(secrets: list[bytes], before: bytes, after: bytes) -> None:
    data = before + secrets[0] + after

    assert Redactor(secrets).mask(data) == masked_by_hand(data, secrets)


# ---------------------------------------------------------------------------------------------------- logs of a result


LONG = st.lists(st.sampled_from([b"a", b"ab", b"a" * 16]), min_size=6, max_size=40).map(b"".join)


@given(secret=LONG, data=LONG)
def test_what_may_be_the_beginning_of_a_value_is_the_longest_that_is_one(secret: bytes, data: bytes) -> None:
    longest = max(length for length in range(len(secret)) if data.endswith(secret[:length]))

    assert Redactor([secret]).begun(data) == longest


REPEATED_BYTES = 64 * 1024
PATIENCE_S = 5.0  # each takes milliseconds; looking for every occurrence took an hour


@pytest.mark.parametrize(
    ("secret", "data"),
    [
        (b"a" * REPEATED_BYTES, b"a" * (16 << 20)),
        (b"ab" * 3, b"ab" * (8 << 20)),
        (b"a" * 1000 + b"b" + b"a" * 1000, (b"a" * 1000 + b"b") * 4000 + b"a" * 1000),
    ],
    ids=["one byte", "two bytes", "overlapping"],
)
def test_a_value_that_repeats_itself_is_masked_in_no_time(secret: bytes, data: bytes) -> None:
    began = time.process_time()

    shown = Redactor([secret]).mask(data)

    assert time.process_time() - began < PATIENCE_S
    assert shown == b"*" * len(data)


def test_both_ends_of_a_value_that_a_log_was_cut_in_are_masked() -> None:
    kept = Redactor([SECRET]).log(KeptLog(b"head s3cr3t-", 100, b"-value tail"))

    assert kept == KeptLog(b"head *******", 100, b"****** tail")


def test_the_end_of_a_log_that_was_not_cut_is_left_alone() -> None:
    assert Redactor([SECRET]).log(KeptLog(b"s3cr3t-value s3cr3t-")) == KeptLog(b"************ s3cr3t-")


def test_a_message_is_masked_and_the_rest_of_an_outcome_is_left_alone() -> None:
    outcome = Outcome(exit_code=1, error_code="EXIT_CODE", message="cannot log in as s3cr3t-value")

    shown = Redactor([SECRET]).outcome(outcome)

    assert shown == Outcome(exit_code=1, error_code="EXIT_CODE", message="cannot log in as ************")


def test_a_redactor_does_not_show_what_it_hides() -> None:
    assert "s3cr3t" not in repr(Redactor([SECRET]))


# ---------------------------------------------------------------------------------------------------- logs that grow


class GrowingLog:
    """A log in memory, of which the part between `cut` is gone."""

    def __init__(self, data: bytes = b"", cut: tuple[int, int] = (0, 0), at_most: int = 1_000_000) -> None:
        self.data = data
        self._cut = cut
        self._at_most = at_most

    def read(self, offset: int, max_bytes: int) -> LogRead:
        start, end = self._cut
        if start <= offset < end:
            offset = end
        elif offset < start:
            max_bytes = min(max_bytes, start - offset)
        return LogRead(offset, self.data[offset : offset + min(max_bytes, self._at_most)])

    def size_bytes(self) -> int:
        return len(self.data)


def followed(log: RedactedLog, max_bytes: int) -> bytes:
    """All that a reader gets who asks again and again; what was cut out is a space each."""
    shown = b""
    while (piece := log.read(len(shown), max_bytes)).data:
        shown += b" " * (piece.offset - len(shown)) + piece.data
    return shown


@given(secrets=SECRETS, before=TEXT, after=TEXT, max_bytes=st.integers(1, 40), at_most=st.integers(1, 40))
def test_a_follower_sees_the_same_whatever_it_asks_for(
    secrets: list[bytes], before: bytes, after: bytes, max_bytes: int, at_most: int
) -> None:
    data = before + secrets[0] + after
    log = RedactedLog(GrowingLog(data, at_most=at_most), Redactor(secrets))
    log.end()

    assert followed(log, max_bytes) == masked_by_hand(data, secrets)


@given(secrets=SECRETS, before=TEXT, after=TEXT, offset=st.integers(0, 100), written=st.integers(0, 200))
def test_from_any_offset_and_at_any_time_nothing_is_shown_that_is_masked_later(
    secrets: list[bytes], before: bytes, after: bytes, offset: int, written: int
) -> None:
    data = before + secrets[0] + after
    log = RedactedLog(GrowingLog(data[:written]), Redactor(secrets))

    start, shown = log.read(offset, 30)

    assert start == offset
    assert shown == masked_by_hand(data, secrets)[offset:][: len(shown)]
    assert offset + len(shown) <= max(offset, log.size_bytes())


def test_the_beginning_of_a_value_waits_until_it_is_known_what_it_is() -> None:
    growing = GrowingLog(b"log s3cr3t-")
    log = RedactedLog(growing, Redactor([SECRET]))

    assert (log.read(0, 100).data, log.size_bytes()) == (b"log ", 4)
    assert log.read(4, 100) == LogRead(4, b"")
    growing.data += b"value\n"
    assert log.read(4, 100) == LogRead(4, b"************\n")


def test_the_beginning_of_a_value_is_shown_when_the_log_has_ended_with_it() -> None:
    log = RedactedLog(GrowingLog(b"log s3cr3t-"), Redactor([SECRET]))

    log.end()

    assert (log.read(0, 100).data, log.size_bytes()) == (b"log s3cr3t-", 11)


@pytest.mark.parametrize("max_bytes", [1, 5, 100])
def test_both_ends_of_a_value_that_was_cut_out_of_a_growing_log_are_masked(max_bytes: int) -> None:
    log = RedactedLog(GrowingLog(b"head s3cr3t-value tail\n", cut=(9, 13)), Redactor([SECRET]))

    shown = followed(log, max_bytes)

    assert shown[:9] == b"head ****"
    assert shown[13:] == b"**** tail\n"


def test_a_real_log_that_was_cut_is_followed_to_its_end(tmp_path: Path) -> None:
    capped = CappedLog(tmp_path / "log", LogCaps(head_bytes=20, tail_bytes=30), holes=False)
    log = RedactedLog(capped, Redactor([SECRET]))
    with (tmp_path / "log").open("ab", buffering=0) as job:
        job.write(b"s3cr3t-value" * 10)
        capped.trim()
        job.write(b"s3cr3t-value" * 10)
    log.end()

    shown = followed(log, 7)
    size_bytes = capped.size_bytes()
    capped.close()

    assert len(shown) == size_bytes
    assert set(shown) <= set(b"* ")
