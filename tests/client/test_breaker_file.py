"""Breakers in a file: best effort, and never in the way."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasuki.client.agents import client
from tasuki.client.agents.client import BreakerFile
from tasuki.core.failover.nodes import BreakerNote

DOWN = BreakerNote(failures=1, left_out_s=30.0, reason="connection refused")


def test_what_was_written_is_read_with_its_time_gone_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = BreakerFile(tmp_path / "data")
    monkeypatch.setattr(client.time, "time", lambda: 1000.0)
    assert notes.write({"http://n1:7090": DOWN})

    monkeypatch.setattr(client.time, "time", lambda: 1010.0)

    assert notes.read() == {"http://n1:7090": BreakerNote(failures=1, left_out_s=20.0, reason="connection refused")}


def test_a_writer_changes_only_its_own_nodes(tmp_path: Path) -> None:
    notes = BreakerFile(tmp_path)
    notes.write({"a": DOWN, "b": DOWN})
    notes.write({"b": None, "c": DOWN})

    assert set(notes.read()) == {"a", "c"}


def test_nothing_is_written_where_there_is_nothing_to_tell(tmp_path: Path) -> None:
    assert BreakerFile(tmp_path / "data").write({"a": None})

    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("content", [b"", b"{", b'{"nodes": 7}', b"\xff"])
def test_a_file_that_is_none_of_ours_counts_for_nothing_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "agents.json").write_bytes(content)
    notes = BreakerFile(tmp_path)
    assert notes.read() == {}

    notes.write({"a": DOWN})

    assert set(notes.read()) == {"a"}


def test_a_lock_that_somebody_holds_is_not_waited_for_long_and_a_dead_ones_is_taken(tmp_path: Path) -> None:
    notes = BreakerFile(tmp_path)
    lock = tmp_path / "agents.json.lock"
    lock.touch()
    assert not notes.write({"a": DOWN})

    os.utime(lock, (0, 0))

    assert notes.write({"a": DOWN})
    assert not lock.exists()


def test_writers_at_the_same_time_lose_nothing_of_each_other(tmp_path: Path) -> None:
    def write(number: int) -> bool:
        return BreakerFile(tmp_path).write({f"n{number}": DOWN})

    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(write, range(24)))

    assert set(BreakerFile(tmp_path).read()) == {f"n{number}" for number, done in enumerate(written) if done}
    assert any(written)


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert not BreakerFile(tmp_path / "file" / "data").write({"a": DOWN})
