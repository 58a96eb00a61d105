"""A job's logs: what is kept of them, and what a reader sees while they grow and are cut."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.errors import ConfigError
from tasuki.worker import logs as logs_module
from tasuki.worker.logs import CappedLog, KeptLog, LogCaps, LogRead

CAPS = LogCaps(head_bytes=60, tail_bytes=40)
WITH_AND_WITHOUT_HOLES = pytest.mark.parametrize("holes", [True, False], ids=["holes", "no-holes"])


@pytest.fixture(autouse=True)
def every_byte_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs of a hundred bytes are cut as those of many megabytes are."""
    monkeypatch.setattr(logs_module, "SLACK_BYTES", 0)


def numbered(size_bytes: int) -> bytes:
    """Bytes that tell their own offset."""
    return b"".join(b"%07d," % number for number in range(size_bytes // 8 + 1))[:size_bytes]


def write(log: CappedLog, data: bytes) -> None:
    assert os.write(log.descriptor, data) == len(data)


@WITH_AND_WITHOUT_HOLES
@given(sizes=st.lists(st.integers(0, 150), max_size=6), trims=st.lists(st.booleans(), min_size=6, max_size=6))
def test_kept_are_the_head_and_the_tail_however_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, holes: bool, sizes: list[int], trims: list[bool]
) -> None:
    log = CappedLog(tmp_path_factory.mktemp("log") / "log", CAPS, holes=holes)
    written = numbered(sum(sizes))
    at = 0
    for size, trim in zip(sizes, trims, strict=False):
        write(log, written[at : at + size])
        at += size
        if trim:
            log.trim()

    kept = log.kept()
    log.close()

    if len(written) <= 100:
        assert kept == KeptLog(written)
    else:
        assert kept == KeptLog(written[:60], len(written) - 100, written[-40:])


@WITH_AND_WITHOUT_HOLES
@given(
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=6),
    offset=st.integers(0, 400),
    max_bytes=st.integers(1, 100),
)
def test_what_is_read_stands_at_its_offset(
    tmp_path_factory: pytest.TempPathFactory, holes: bool, sizes: list[int], offset: int, max_bytes: int
) -> None:
    log = CappedLog(tmp_path_factory.mktemp("log") / "log", CAPS, holes=holes)
    written = numbered(sum(sizes))
    at = 0
    for size in sizes:
        write(log, written[at : at + size])
        at += size
        log.trim()

    start, data = log.read(offset, max_bytes)
    log.close()

    assert start >= offset
    assert data == written[start : start + len(data)]
    assert len(data) <= max_bytes
    if offset < min(60, len(written)):
        assert (start, bool(data)) == (offset, True)
    if len(written) - 40 <= offset < len(written):
        assert (start, bool(data)) == (offset, True)


@WITH_AND_WITHOUT_HOLES
def test_a_reader_that_goes_on_where_it_was_sees_every_kept_byte_once(tmp_path: Path, holes: bool) -> None:
    log = CappedLog(tmp_path / "log", CAPS, holes=holes)
    written = numbered(1000)
    write(log, written)
    log.trim()

    pieces: list[LogRead] = []
    offset = 0
    while (piece := log.read(offset, 16)).data:
        pieces.append(piece)
        offset = piece.offset + len(piece.data)

    seen = b"".join(piece.data for piece in pieces)
    assert (seen, offset) == (written[:60] + written[-40:], 1000)


def test_a_hole_gives_the_space_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = CappedLog(tmp_path / "log", LogCaps(head_bytes=8192, tail_bytes=8192))
    write(log, numbered(4 * 1024 * 1024))

    log.trim()

    assert os.fstat(log.descriptor).st_blocks * 512 < 64 * 1024
    assert log.size_bytes() == 4 * 1024 * 1024


def test_a_file_system_without_holes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_holes(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(logs_module, "punch_hole", no_holes)
    log = CappedLog(tmp_path / "log", CAPS)
    written = numbered(1000)
    write(log, written)

    log.trim()

    assert os.fstat(log.descriptor).st_size == 60
    assert log.kept() == KeptLog(written[:60], 900, written[-40:])


def test_a_log_that_is_being_cut_shows_nothing_for_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = CappedLog(tmp_path / "log", CAPS)
    write(log, numbered(1000))
    seen: list[LogRead] = []
    monkeypatch.setattr(logs_module, "punch_hole", lambda *_: seen.append(log.read(30, 10)))

    log.trim()

    assert seen == [LogRead(30, b"")]
    assert log.read(30, 10).data


def test_a_log_that_grows_fast_is_left_alone_until_it_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs_module, "FAST_BYTES", 500)
    monkeypatch.setattr(logs_module, "ROOMY_BYTES", 0)
    log = CappedLog(tmp_path / "log", CAPS)

    write(log, numbered(1000))
    growing = log.due()
    write(log, numbered(100))
    resting = log.due()

    assert (growing, resting) == (False, True)


@pytest.mark.parametrize(("name", "value"), [("POSTPONED_BYTES", 200), ("ROOMY_BYTES", 1 << 62)])
def test_it_is_cut_all_the_same_if_it_is_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    monkeypatch.setattr(logs_module, "FAST_BYTES", 500)
    monkeypatch.setattr(logs_module, "ROOMY_BYTES", 0)
    monkeypatch.setattr(logs_module, name, value)
    log = CappedLog(tmp_path / "log", CAPS)

    write(log, numbered(1000))

    assert log.due()


def test_the_text_of_a_cut_log_says_how_much_is_missing() -> None:
    assert KeptLog(b"head", 7, b"tail").text == b"head\n[tasuki: 7 bytes were cut here]\ntail"


def test_a_log_that_cannot_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = CappedLog(tmp_path / "log", CAPS)
    write(log, b"something")

    def broken(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", broken)

    assert log.kept() == KeptLog(b"[tasuki: this log could not be read: Input/output error]\n")


@pytest.mark.parametrize(("head_bytes", "tail_bytes"), [(-1, 10), (10, -1), (0, 0), (1 << 40, 0)])
def test_impossible_caps_are_refused(head_bytes: int, tail_bytes: int) -> None:
    with pytest.raises(ConfigError, match="head and tail"):
        LogCaps(head_bytes=head_bytes, tail_bytes=tail_bytes)
