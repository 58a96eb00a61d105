"""Results that were refused are kept for a while, where their names lead nowhere else."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from tasuki.core.job import BlobRef, Outcome
from tasuki.core.protocol import Ending
from tasuki.worker import outbox
from tasuki.worker.outbox import OutboxRecord, RejectedResults

RESULT = b"PK\x03\x04 a zip, as far as anybody looks"


def record(job_id: str = "job-1", attempt: int = 2, result: bytes = RESULT) -> OutboxRecord:
    outcome = Outcome(exit_code=0, result=result, result_sha256=hashlib.sha256(result).hexdigest())
    return OutboxRecord(Ending(job_id, "lease-1", attempt, outcome), "a.job", 1_700_000_000.5)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "kept-aside").iterdir())


def test_a_refused_result_is_kept_with_what_is_known_of_it(tmp_path: Path) -> None:
    place = RejectedResults(tmp_path).keep(record(), "attempt 3 runs")
    assert place == tmp_path / "kept-aside" / "job-1-2"
    assert (place / "result.zip").read_bytes() == RESULT
    assert json.loads((place / "about.json").read_text()) == {
        "job_id": "job-1",
        "attempt": 2,
        "lease_id": "lease-1",
        "subject": "a.job",
        "ended_at": 1_700_000_000.5,
        "reason": "attempt 3 runs",
        "error_code": None,
        "file": "result.zip",
        "size_bytes": len(RESULT),
        "sha256": hashlib.sha256(RESULT).hexdigest(),
    }
    assert place.stat().st_mode & 0o077 == 0


def test_what_is_no_archive_is_not_called_one(tmp_path: Path) -> None:
    place = RejectedResults(tmp_path).keep(record(result=b"text"), "too late")
    assert (place / "result").read_bytes() == b"text"


def test_a_large_result_is_moved_not_copied(tmp_path: Path) -> None:
    saved = tmp_path / "saved.result"
    saved.write_bytes(b"x" * 10)
    inode = saved.stat().st_ino
    ending = Ending("job-1", "lease-1", 2, Outcome(result_ref=BlobRef("a" * 64, 10), result_sha256="a" * 64))
    place = RejectedResults(tmp_path).keep(OutboxRecord(ending, result=saved), "too late")
    assert not saved.exists()
    assert (place / "result").stat().st_ino == inode
    assert json.loads((place / "about.json").read_text())["ended_at"] is None


@pytest.mark.parametrize("job_id", ["../../escape", "/etc/passwd", ".hidden", "a/b", "x" * 300, ""])
def test_an_id_that_is_none_leads_nowhere_else(tmp_path: Path, job_id: str) -> None:
    place = RejectedResults(tmp_path).keep(record(job_id), "too late")
    assert place.parent == tmp_path / "kept-aside"
    assert [path.name for path in tmp_path.iterdir()] == ["kept-aside"]
    assert json.loads((place / "about.json").read_text())["job_id"] == job_id


def test_the_same_attempt_of_an_id_that_came_again_does_not_replace_the_first(tmp_path: Path) -> None:
    aside = RejectedResults(tmp_path)
    places = [aside.keep(record(result=text), "too late") for text in (b"one", b"two", b"three")]
    assert [place.name for place in places] == ["job-1-2", "job-1-2-2", "job-1-2-3"]
    assert [(place / "result").read_bytes() for place in places] == [b"one", b"two", b"three"]


def aged(place: Path, age_s: float) -> None:
    at = time.time() - age_s
    os.utime(place, (at, at))


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "REJECTED_MAX_ENTRIES", 2)
    aside = RejectedResults(tmp_path)
    for age, job_id in ((30, "b-oldest"), (20, "a-middle")):
        aged(aside.keep(record(job_id), "too late"), age)
    aside.keep(record("c-newest"), "too late")
    assert names(tmp_path) == ["a-middle-2", "c-newest-2"]


def test_the_oldest_go_when_they_are_too_large_together_but_never_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "REJECTED_MAX_BYTES", 5_000)
    aside = RejectedResults(tmp_path)
    aged(aside.keep(record("old", result=b"x" * 3_000), "too late"), 20)
    aged(aside.keep(record("new", result=b"x" * 3_000), "too late"), 10)
    assert names(tmp_path) == ["new-2"]
    aside.keep(record("huge", result=b"x" * 9_000), "too late")
    assert names(tmp_path) == ["huge-2"]


def test_what_is_too_old_goes_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aged(RejectedResults(tmp_path).keep(record("old"), "too late"), 100.0)
    RejectedResults(tmp_path).keep(record("new"), "too late")
    monkeypatch.setattr(outbox, "REJECTED_MAX_AGE_S", 50.0)
    RejectedResults(tmp_path).sweep()
    assert names(tmp_path) == ["new-2"]


def test_a_start_without_anything_kept_makes_no_folder(tmp_path: Path) -> None:
    RejectedResults(tmp_path).sweep()
    assert list(tmp_path.iterdir()) == []
