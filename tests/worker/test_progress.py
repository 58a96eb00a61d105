"""Progress that a job tells, and what it cannot do with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tasuki.core.job import Progress
from tasuki.worker.keeper.protocol import NO_LIMITS, Limits
from tasuki.worker.logs import PROGRESS_READ_BYTES, PROGRESS_TRUNCATE_BYTES, ProgressFile, parse_progress
from tasuki.worker.redaction import Redactor
from tests.worker.runs import attempt_of, exec_of, run, runner_in


class Heard:
    def __init__(self, path: Path) -> None:
        self.told: list[Progress] = []
        self.file = ProgressFile(path, self.told.append)
        self._job = os.open(path, os.O_WRONLY | os.O_APPEND)

    def say(self, data: bytes) -> None:
        os.write(self._job, data)


@pytest.fixture
def heard(tmp_path: Path) -> Heard:
    return Heard(tmp_path / "progress")


@pytest.mark.parametrize(
    ("line", "progress"),
    [
        (b"progress 0.4 reading", Progress(0.4, "reading")),
        (b"progress 1", Progress(1.0)),
        (b"  progress  0   two words ", Progress(0.0, "two words")),
        (b"progress 0.5 " + b"x" * 1000, Progress(0.5, "x" * 200)),
        (b"progress 0.5 a\x1b[31mb\0", Progress(0.5, "a [31mb ")),
        ("progress 0.5 四".encode(), Progress(0.5, "四")),
        (b"progress 0.5 \xff", Progress(0.5, "�")),
        (b"progress 40 percent", None),
        (b"progress -0.1", None),
        (b"progress nan", None),
        (b"progress inf", None),
        (b"progress", None),
        (b"progressed 0.5", None),
        (b"0.5", None),
    ],
)
def test_a_line_of_progress(line: bytes, progress: Progress | None) -> None:
    assert parse_progress(line) == progress


def test_a_text_is_masked_before_it_is_cut_or_made_printable(tmp_path: Path) -> None:
    told: list[Progress] = []
    secrets = Redactor([b"a-very-long-secret", b"with\ttab"])
    file = ProgressFile(tmp_path / "progress", told.append, secrets.text)
    for text in (b"x" * 195 + b"a-very-long-secret", b"with\ttab"):
        (tmp_path / "progress").write_bytes(b"progress 0.5 " + text + b"\n")
        file.look()

    assert [progress.text for progress in told] == ["x" * 195 + "*****", "*" * 8]


def test_only_the_latest_counts(heard: Heard) -> None:
    heard.say(b"progress 0.1\nprogress 0.2 two\n")

    heard.file.look()
    heard.file.look()

    assert heard.told == [Progress(0.2, "two")]


def test_half_a_line_waits_for_its_end(heard: Heard) -> None:
    heard.say(b"progress 0.1 on")
    heard.file.look()
    before = list(heard.told)
    heard.say(b"e\n")
    heard.file.look()

    assert (before, heard.told) == ([], [Progress(0.1, "one")])


def test_malformed_lines_are_counted_and_change_nothing(heard: Heard) -> None:
    heard.say(b"progress 0.3 fine\nnonsense\nprogress 7\n")

    heard.file.look()

    assert (heard.told, heard.file.malformed) == ([Progress(0.3, "fine")], 2)


def test_a_flood_is_looked_at_from_its_end_and_thrown_away(heard: Heard, tmp_path: Path) -> None:
    heard.say(b"progress 0.1 again\n" * 20_000 + b"progress 0.9 last\n")

    heard.file.look()

    assert heard.told == [Progress(0.9, "last")]
    assert (tmp_path / "progress").stat().st_size == 0


def test_it_goes_on_after_a_flood(heard: Heard) -> None:
    heard.say(b"x" * (PROGRESS_TRUNCATE_BYTES + 1))
    heard.file.look()
    heard.say(b"progress 0.5 after\n")
    heard.file.look()

    assert heard.told == [Progress(0.5, "after")]


def test_a_line_without_an_end_is_passed_over(heard: Heard) -> None:
    heard.say(b"progress 0.1 " + b"x" * 2 * PROGRESS_READ_BYTES)
    heard.file.look()
    heard.say(b"\nprogress 0.5 after\n")
    heard.file.look()

    assert heard.told == [Progress(0.5, "after")]


def test_a_file_that_the_job_emptied_is_read_from_its_start(heard: Heard, tmp_path: Path) -> None:
    heard.say(b"progress 0.1 before\n")
    heard.file.look()
    os.truncate(tmp_path / "progress", 0)
    heard.file.look()
    heard.say(b"progress 0.2\n")
    heard.file.look()

    assert heard.told == [Progress(0.1, "before"), Progress(0.2)]


@pytest.mark.parametrize("limits", [NO_LIMITS, Limits(cpu_seconds=100)], ids=["spawned", "forked"])
def test_a_job_finds_the_descriptor_and_is_heard(tmp_path: Path, limits: Limits) -> None:
    tool = exec_of("sh", "-c", 'echo "progress 0.5 half" >&$TASUKI_PROGRESS_FD; sleep 1', limits=limits)
    told: list[tuple[str, Progress]] = []
    runner = runner_in(tmp_path, tool, on_progress=lambda lease_id, progress: told.append((lease_id, progress)))

    result = run(runner, attempt_of(exec="tool"))

    assert (result.outcome.exit_code, told) == (0, [("lease-1", Progress(0.5, "half"))])
