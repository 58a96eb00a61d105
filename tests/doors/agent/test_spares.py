"""Folders that one job leaves for the next: only such as nobody could tell from new ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tasuki.doors.agent.spares import KEPT_BELOW, SPARES_MAX, Spares
from tasuki.worker.folder import RECYCLED_LOG_MAX_BYTES

LOGS = ("stdout", "stderr", "progress")


@pytest.fixture
def spares(tmp_path: Path) -> Spares:
    place = tmp_path / "spare"
    place.mkdir()
    return Spares(place)


def job(spares: Spares, folder: Path) -> Path:
    """A job's folder after its program has printed something."""
    folder.mkdir()
    for name in KEPT_BELOW:
        spares.put(str(folder), name)
    for name in LOGS:
        (folder / "log" / name).touch(mode=0o600)
    (folder / "log" / "stdout").write_text("secret of the first job")
    return folder


def test_what_a_job_left_as_it_was_is_the_next_ones(tmp_path: Path, spares: Spares) -> None:
    first = job(spares, tmp_path / "first")
    made = {name: (first / name).stat().st_ino for name in KEPT_BELOW}

    assert all(spares.keep(str(first), name) for name in KEPT_BELOW)

    second = tmp_path / "second"
    second.mkdir()
    for name in KEPT_BELOW:
        spares.put(str(second), name)
    assert list(first.iterdir()) == []
    assert {name: (second / name).stat().st_ino for name in KEPT_BELOW} == made
    assert {log.name: log.read_bytes() for log in (second / "log").iterdir()} == dict.fromkeys(LOGS, b"")


def put_a_file(part: Path) -> None:
    (part / "left.txt").write_text("left")


def open_to_others(part: Path) -> None:
    part.chmod(0o755)


def replace_by_a_link(part: Path) -> None:
    aside = part.rename(part.with_name("aside"))
    part.symlink_to(aside)


@pytest.mark.parametrize("name", KEPT_BELOW)
@pytest.mark.parametrize("change", [put_a_file, open_to_others, replace_by_a_link])
def test_a_folder_that_a_program_has_changed_is_not_kept(
    tmp_path: Path, spares: Spares, name: str, change: Callable[[Path], None]
) -> None:
    folder = job(spares, tmp_path / "job")
    change(folder / name)

    assert not spares.keep(str(folder), name)

    assert list(spares.place.iterdir()) == []


def a_second_name(log: Path) -> None:
    os.link(log, log.parents[1] / "second")


def a_link(log: Path) -> None:
    log.unlink()
    log.symlink_to("/dev/null")


def a_great_length(log: Path) -> None:
    os.truncate(log, RECYCLED_LOG_MAX_BYTES + 1)


@pytest.mark.parametrize("change", [a_second_name, a_link, a_great_length, Path.unlink])
def test_logs_with_something_odd_about_them_are_not_kept(tmp_path: Path, spares: Spares, change: Callable[[Path], None]) -> None:
    folder = job(spares, tmp_path / "job")
    change(folder / "log" / "stderr")

    assert not spares.keep(str(folder), "log")


def test_what_is_no_part_of_a_job_is_not_kept(tmp_path: Path, spares: Spares) -> None:
    (tmp_path / "job" / "cache").mkdir(parents=True)

    assert not spares.keep(str(tmp_path / "job"), "cache")


def test_no_more_than_some_are_kept(tmp_path: Path, spares: Spares) -> None:
    folders = [job(spares, tmp_path / str(number)) for number in range(SPARES_MAX + 1)]

    kept = [spares.keep(str(folder), "out") for folder in folders]

    assert kept == [True] * SPARES_MAX + [False]


def test_a_job_gets_new_folders_where_somebody_has_removed_the_spare_ones(tmp_path: Path, spares: Spares) -> None:
    spares.keep(str(job(spares, tmp_path / "first")), "out")
    for left in spares.place.iterdir():
        left.rmdir()

    second = job(spares, tmp_path / "second")

    assert (second / "out").is_dir()


def test_a_start_throws_away_what_an_earlier_agent_kept(tmp_path: Path, spares: Spares) -> None:
    folder = job(spares, tmp_path / "job")
    assert all(spares.keep(str(folder), name) for name in KEPT_BELOW)

    Spares(spares.place).remove()

    assert list(spares.place.iterdir()) == []
