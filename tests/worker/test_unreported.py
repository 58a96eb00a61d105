"""Endings on disk: whole or not there, offered to the next process of the same worker, gone when a server has spoken."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tasuki.core.job import BlobRef, Outcome
from tasuki.core.protocol import Ending
from tasuki.errors import InvalidInput
from tasuki.worker.unreported import Saved, Unreported

ENDING = Ending("job-1", "lease/../1", 3, Outcome(exit_code=0, result=b"bytes \x00", meta={"n": 1}), 12.5)
LARGE = Ending("job-2", "lease-2", 1, Outcome(exit_code=0, result_ref=BlobRef("a" * 64, 5), result_sha256="a" * 64))


def life(folder: Path, work: Callable[..., None] = lambda *_: None) -> list[Saved]:
    """One process of worker w1: what it found, after it did its work."""

    async def main() -> list[Saved]:
        unreported = Unreported(folder, "w1")
        found = await unreported.load()
        work(unreported, found)
        await unreported.close()
        return found

    return asyncio.run(main())


def files(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.rglob("*") if path.is_file())


def test_a_worker_with_nothing_to_save_writes_nothing(tmp_path: Path) -> None:
    assert life(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_what_was_saved_is_found_by_the_next_process_of_the_same_worker(tmp_path: Path) -> None:
    life(tmp_path, lambda unreported, _: unreported.save(ENDING))
    assert life(tmp_path) == [Saved(ENDING)]
    assert life(tmp_path) == [Saved(ENDING)]


def test_another_worker_in_the_same_folder_does_not_see_it(tmp_path: Path) -> None:
    life(tmp_path, lambda unreported, _: unreported.save(ENDING))

    async def other() -> list[Saved]:
        unreported = Unreported(tmp_path, "w2")
        found = await unreported.load()
        await unreported.close()
        return found

    assert asyncio.run(other()) == []


def test_a_result_that_was_not_uploaded_yet_is_moved_beside_it(tmp_path: Path) -> None:
    result = tmp_path / "result.zip"
    result.write_bytes(b"12345")
    life(tmp_path / "data", lambda unreported, _: unreported.save(LARGE, result))
    assert not result.exists()
    [saved] = life(tmp_path / "data")
    assert saved.ending == LARGE
    assert saved.result_file is not None
    assert saved.result_file.read_bytes() == b"12345"


def test_what_a_server_has_spoken_on_is_gone_with_its_result(tmp_path: Path) -> None:
    result = tmp_path / "result.zip"
    result.write_bytes(b"12345")

    def save_and_forget(unreported: Unreported, _: list[Saved]) -> None:
        unreported.save(LARGE, result)
        unreported.save(ENDING)
        unreported.forget(LARGE.lease_id)
        unreported.forget("never saved")

    life(tmp_path / "data", save_and_forget)
    assert files(tmp_path / "data") == [".ending"]
    assert life(tmp_path / "data", lambda unreported, _: unreported.forget(ENDING.lease_id)) == [Saved(ENDING)]
    assert files(tmp_path / "data") == []


def test_a_refused_ending_of_an_earlier_process_is_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    life(tmp_path, lambda unreported, _: unreported.save(ENDING))
    with caplog.at_level(logging.WARNING, "tasuki.worker"):
        life(tmp_path, lambda unreported, _: unreported.forget(ENDING.lease_id, "attempt 4 runs"))
    assert "job job-1 attempt 3: refused, its saved result is dropped: attempt 4 runs" in caplog.text


@pytest.mark.parametrize("damage", [lambda data: data[:-3], lambda data: b"", lambda data: b"\xc1" + data])
def test_a_torn_file_is_ignored_with_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    for ending in (ENDING, LARGE):
        life(tmp_path, lambda unreported, _, ending=ending: unreported.save(ending))
    torn = sorted(tmp_path.rglob("*.ending"))[0]
    torn.write_bytes(damage(torn.read_bytes()))
    torn.with_suffix(".part").write_bytes(b"half")
    with caplog.at_level(logging.WARNING, "tasuki.worker"):
        found = life(tmp_path)
    assert len(found) == 1
    assert f"{torn} cannot be read, and is ignored" in caplog.text
    assert files(tmp_path) == [".ending", ".ending"]


def test_a_folder_that_cannot_be_written_is_said_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "endings").write_text("a file where a folder should be")
    with caplog.at_level(logging.ERROR, "tasuki.worker"):
        life(tmp_path, lambda unreported, _: unreported.save(ENDING))
    assert "the ending of job job-1 attempt 3 cannot be saved" in caplog.text


@pytest.mark.parametrize("worker_id", ["", "../w1", ".hidden", "a/b"])
def test_an_id_that_could_lead_elsewhere_is_refused(tmp_path: Path, worker_id: str) -> None:
    with pytest.raises(InvalidInput):
        Unreported(tmp_path, worker_id)
