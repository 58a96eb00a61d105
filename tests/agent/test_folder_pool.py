"""Folders that one job leaves for the next: only such as nobody could tell from new ones."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tasuki.agent.folders import FEW_FILES, KEPT_BELOW, SPARES_MAX, WORKED_IN, FolderPool, JobFolders
from tasuki.worker.folder import RECYCLED_LOG_MAX_BYTES

LOGS = ("stdout", "stderr", "progress")


@pytest.fixture
def spares(tmp_path: Path) -> FolderPool:
    place = tmp_path / "spare"
    place.mkdir()
    return FolderPool(place)


def job(spares: FolderPool, folder: Path) -> Path:
    """A job's folder after its program has printed something."""
    folder.mkdir()
    for name in KEPT_BELOW:
        spares.put(str(folder), name)
    for name in LOGS:
        (folder / "log" / name).touch(mode=0o600)
    (folder / "log" / "stdout").write_text("secret of the first job")
    return folder


def test_what_a_job_left_as_it_was_is_the_next_ones(tmp_path: Path, spares: FolderPool) -> None:
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


def put_a_folder(part: Path) -> None:
    (part / "left").mkdir()


def open_to_others(part: Path) -> None:
    part.chmod(0o755)


def replace_by_a_link(part: Path) -> None:
    aside = part.rename(part.with_name("aside"))
    part.symlink_to(aside)


@pytest.mark.parametrize("name", KEPT_BELOW)
@pytest.mark.parametrize("change", [put_a_folder, open_to_others, replace_by_a_link])
def test_a_folder_that_a_program_has_changed_is_not_kept(
    tmp_path: Path, spares: FolderPool, name: str, change: Callable[[Path], None]
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
def test_logs_with_something_odd_about_them_are_not_kept(
    tmp_path: Path, spares: FolderPool, change: Callable[[Path], None]
) -> None:
    folder = job(spares, tmp_path / "job")
    change(folder / "log" / "stderr")

    assert not spares.keep(str(folder), "log")


def test_what_is_no_part_of_a_job_is_not_kept(tmp_path: Path, spares: FolderPool) -> None:
    (tmp_path / "job" / "cache").mkdir(parents=True)

    assert not spares.keep(str(tmp_path / "job"), "cache")


def test_no_more_than_some_are_kept(tmp_path: Path, spares: FolderPool) -> None:
    folders = [job(spares, tmp_path / str(number)) for number in range(SPARES_MAX + 1)]

    kept = [spares.keep(str(folder), "out") for folder in folders]

    assert kept == [True] * SPARES_MAX + [False]


def test_a_job_gets_new_folders_where_somebody_has_removed_the_spare_ones(tmp_path: Path, spares: FolderPool) -> None:
    spares.keep(str(job(spares, tmp_path / "first")), "out")
    for left in spares.place.iterdir():
        left.rmdir()

    second = job(spares, tmp_path / "second")

    assert (second / "out").is_dir()


@pytest.mark.parametrize("name", WORKED_IN)
def test_a_file_that_a_program_has_left_is_no_spare_ones(tmp_path: Path, spares: FolderPool, name: str) -> None:
    folder = job(spares, tmp_path / "job")
    (folder / name / "left.txt").write_text("left")

    assert not spares.keep(str(folder), name)
    assert (folder / name / "left.txt").exists()


def test_a_few_small_inputs_are_removed_at_once_and_what_a_link_leads_to_stays(tmp_path: Path, spares: FolderPool) -> None:
    small, many, linked = (job(spares, tmp_path / name) for name in ("small", "many", "linked"))
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    (outside / "kept").write_text("x")
    (small / "in" / "book.csv").write_text("x")
    for number in range(FEW_FILES + 1):
        (many / "in" / str(number)).write_text("x")
    (linked / "in").rmdir()
    (linked / "in").symlink_to(outside)

    assert [spares.keep(str(folder), "in") for folder in (small, many, linked)] == [True, False, False]
    assert len(list((many / "in").iterdir())) == FEW_FILES + 1
    assert (outside / "kept").exists()


def test_what_is_taken_back_is_given_to_nobody(tmp_path: Path, spares: FolderPool) -> None:
    folder = job(spares, tmp_path / "job")
    assert all(spares.keep(str(folder), name) for name in KEPT_BELOW)

    taken = spares.taken()

    assert sorted(taken) == sorted(map(str, spares.place.iterdir()))
    assert spares.taken() == []


def test_a_start_throws_away_what_an_earlier_agent_kept(tmp_path: Path) -> None:
    with contextlib.closing(JobFolders(tmp_path)) as folders:
        job(FolderPool(tmp_path / "spare"), tmp_path / "job")
        (tmp_path / "spare" / "1").mkdir()

        folders.recover()

        assert list((tmp_path / "spare").iterdir()) == []
