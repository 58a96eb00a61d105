"""Endings on disk: whole or not there whenever the process is killed, found by the next process of the same worker."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tasuki.core.job import BlobRef, Outcome
from tasuki.core.protocol import Ending
from tasuki.errors import InvalidInput
from tasuki.worker.outbox import OutboxFiles, OutboxRecord

ENDING = Ending("job-1", "lease/../1", 3, Outcome(exit_code=0, result=b"bytes \x00", meta={"n": 1}), 12.5)
SMALL = OutboxRecord(ENDING, "a.job", 1_700_000_000.0)
LARGE = OutboxRecord(Ending("job-2", "lease-2", 1, Outcome(exit_code=0, result_ref=BlobRef("a" * 64, 5), result_sha256="a" * 64)))
RESULT = b"12345"


def large(tmp_path: Path) -> OutboxRecord:
    """A record whose result is a file of its run."""
    (tmp_path / "result.zip").write_bytes(RESULT)
    return msgspec.structs.replace(LARGE, result=tmp_path / "result.zip")


def files(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def unreported(data: Path) -> OutboxFiles:
    return OutboxFiles(data, "w1")


def test_a_worker_with_nothing_to_save_writes_nothing(unreported: OutboxFiles, data: Path) -> None:
    assert unreported.load() == []
    assert not data.exists()


def test_what_was_saved_is_found_by_the_next_process_of_the_same_worker(unreported: OutboxFiles, data: Path) -> None:
    assert unreported.save(SMALL)
    assert OutboxFiles(data, "w1").load() == [SMALL]
    assert OutboxFiles(data, "w1").load() == [SMALL]


def test_what_a_server_is_told_of_it_is_the_ending_alone(unreported: OutboxFiles) -> None:
    unreported.save(SMALL)
    [found] = unreported.load()
    assert type(found.ending) is Ending


def test_another_worker_in_the_same_folder_does_not_see_it(unreported: OutboxFiles, data: Path) -> None:
    unreported.save(SMALL)
    assert OutboxFiles(data, "w2").load() == []


def test_a_result_that_was_not_uploaded_yet_is_moved_beside_it(unreported: OutboxFiles, tmp_path: Path) -> None:
    record = large(tmp_path)
    assert unreported.save(record)
    assert not (tmp_path / "result.zip").exists()
    [found] = unreported.load()
    assert found == msgspec.structs.replace(record, result=unreported.result_path("lease-2"))
    assert isinstance(found.result, Path)
    assert found.result.read_bytes() == RESULT


def test_so_is_one_that_was_in_memory(unreported: OutboxFiles) -> None:
    assert unreported.save(msgspec.structs.replace(LARGE, result=RESULT))
    [found] = unreported.load()
    assert isinstance(found.result, Path)
    assert found.result.read_bytes() == RESULT


def test_what_a_server_has_spoken_on_is_gone_with_its_result(unreported: OutboxFiles, data: Path, tmp_path: Path) -> None:
    unreported.save(large(tmp_path))
    unreported.save(SMALL)
    unreported.remove("lease-2")
    unreported.remove("never saved")
    assert files(data) == [".ending"]
    unreported.remove(ENDING.lease_id)
    assert files(data) == []


@pytest.mark.parametrize("damage", [lambda data: data[:-3], lambda data: b"", lambda data: b"\xc1" + data])
def test_a_torn_file_is_ignored_with_a_log_line(
    unreported: OutboxFiles, data: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    for record in (SMALL, LARGE):
        unreported.save(record)
    torn = sorted(data.rglob("*.ending"))[0]
    torn.write_bytes(damage(torn.read_bytes()))
    torn.with_suffix(".part").write_bytes(b"half")
    with caplog.at_level(logging.WARNING, "tasuki.worker"):
        found = unreported.load()
    assert len(found) == 1
    assert f"{torn} cannot be read, and is ignored" in caplog.text
    assert files(data) == [".ending", ".ending"]


def test_a_folder_that_cannot_be_written_is_said_in_the_log(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    data.mkdir()
    (data / "endings").write_text("a file where a folder should be")
    with caplog.at_level(logging.ERROR, "tasuki.worker"):
        assert not OutboxFiles(data, "w1").save(SMALL)
    assert "the ending of job job-1 attempt 3 cannot be saved" in caplog.text


def test_a_full_disk_is_left_as_it_was(unreported: OutboxFiles, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tasuki.worker.outbox.sync_file", full)
    assert not unreported.save(msgspec.structs.replace(LARGE, result=RESULT))
    assert files(data) == []


@pytest.mark.parametrize("worker_id", ["", "../w1", ".hidden", "a/b"])
def test_an_id_that_could_lead_elsewhere_is_refused(tmp_path: Path, worker_id: str) -> None:
    with pytest.raises(InvalidInput):
        OutboxFiles(tmp_path, worker_id)


# ---------------------------------------------------------------------------------------------------- kills


def killed_at(folder: Path, step: int) -> int:
    """A process saves a large result, and is killed before its `step`-th opening or renaming of a file; how it ended."""
    folder.mkdir()
    record, unreported, steps = large(folder), OutboxFiles(folder / "data", "w1"), itertools.count(1)

    def die(event: str, arguments: object) -> None:
        if event in ("open", "os.rename") and next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        sys.addaudithook(die)
        os._exit(0 if unreported.save(record) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_kill_at_any_step_leaves_the_whole_or_nothing(tmp_path: Path) -> None:
    kept = []
    for step in itertools.count(1):
        folder = tmp_path / f"killed-{step}"
        if killed_at(folder, step) != -signal.SIGKILL:
            break
        in_run = (folder / "result.zip").exists()
        found = OutboxFiles(folder / "data", "w1").load()
        kept.append(bool(found))
        # then: it is where the run left it, or found with its ending; and nothing else lies about
        assert in_run != bool(found)
        assert [record.result.read_bytes() for record in found if isinstance(record.result, Path)] == [RESULT] * len(found)
        assert files(folder / "data") == [".ending", ".result"] * len(found)
    # and: from the moment at which the result is moved it is there, also before the ending has got its name
    assert kept == sorted(kept)
    assert len(kept) >= 6
    assert sum(kept) >= 2
