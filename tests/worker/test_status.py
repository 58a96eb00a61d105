"""The status of a worker in a file: whole, no more often than needed, true after its death, and without secrets."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from tasuki.core.job import JobSpec, Outcome
from tasuki.worker import status as module
from tasuki.worker.attempt import JOB_LINES_PER_S, JobLog
from tasuki.worker.status import JOBS_MAX, RunningJob, Status, StatusFile, read_all, status_folder
from tests.support.waiting import until, until_async

JOB = RunningJob(job_id="job-1", attempt=2, subject="zpe.h2", since=12.0)


def kept(data: Path, work: Callable[[StatusFile, list[RunningJob]], Awaitable[None]], *, lasting: bool = True) -> None:
    """A worker's life: `work` changes what it says; then it ends."""

    async def main() -> None:
        file = StatusFile(data, "w1", "https://control.example", lasting=lasting)
        jobs: list[RunningJob] = []
        keeping = asyncio.ensure_future(file.keep(lambda: jobs, lambda: False))
        await work(file, jobs)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await file.end("so it is")

    asyncio.run(main())


async def status_until(data: Path, holds: Callable[[Status], bool], what: str) -> None:
    await until_async(lambda: any(map(holds, read_all(data))), what=what)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)


def test_what_changes_is_told(tmp_path: Path) -> None:
    async def work(file: StatusFile, jobs: list[RunningJob]) -> None:
        await status_until(tmp_path, lambda said: said.alive and said.connection.connected_since is None, "it is there")
        file.connected("control.example:443")
        jobs.append(JOB)
        await status_until(tmp_path, lambda said: said.connection.connected_since is not None and said.jobs == (JOB,), "it works")
        file.lost("nobody answers")
        file.lost("nobody answers still")
        await status_until(tmp_path, lambda said: said.connection.tries == 2, "it is alone")

    kept(tmp_path, work)

    (said,) = read_all(tmp_path)
    assert not said.alive
    assert (said.error, said.running, said.connection.error) == ("so it is", 0, "nobody answers still")
    assert said.connection.connected_since is None


def test_nothing_is_written_while_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    replace = StatusFile._replace
    monkeypatch.setattr(StatusFile, "_replace", lambda file, content: (written.append(content), replace(file, content))[1])
    looked: list[int] = []

    async def work(file: StatusFile, jobs: list[RunningJob]) -> None:
        class Watched(list[RunningJob]):
            def __len__(self) -> int:
                looked.append(1)
                return 0

        keeping = asyncio.ensure_future(file.keep(lambda: Watched(), lambda: False))
        await asyncio.to_thread(until, lambda: len(looked) > 5, 10.0, "it has looked again and again")
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

    kept(tmp_path, work)

    assert len(written) == 2  # the first and the last word


def test_of_thousands_of_jobs_some_are_named(tmp_path: Path) -> None:
    async def work(file: StatusFile, jobs: list[RunningJob]) -> None:
        jobs.extend([JOB] * 5000)
        await status_until(tmp_path, lambda said: said.running == 5000 and len(said.jobs) == JOBS_MAX, "they are counted")

    kept(tmp_path, work)


def test_a_worker_without_a_lasting_identity_leaves_nothing(tmp_path: Path) -> None:
    async def work(file: StatusFile, jobs: list[RunningJob]) -> None:
        await status_until(tmp_path, lambda said: said.alive, "it is there")

    kept(tmp_path, work, lasting=False)

    assert list(status_folder(tmp_path).iterdir()) == []


@pytest.mark.parametrize("lasting", [True, False])
def test_what_killed_workers_left_is_removed_if_nobody_will_come_back_for_it(tmp_path: Path, lasting: bool) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dead = StatusFile(tmp_path, "killed", "tcp://h:7000", lasting=lasting)._status
    dead.pid, dead.born = process.pid, module._born(process.pid)
    assert dead.alive
    status_folder(tmp_path).mkdir(parents=True)
    (status_folder(tmp_path) / "killed.json").write_bytes(msgspec.json.encode(dead))
    process.kill()
    process.communicate()
    assert not dead.alive

    async def work(file: StatusFile, jobs: list[RunningJob]) -> None:
        await status_until(tmp_path, lambda said: said.worker_id == "w1", "the next one is there")

    kept(tmp_path, work)

    assert ("killed" in {said.worker_id for said in read_all(tmp_path)}) is lasting


def test_a_process_that_got_the_number_of_a_dead_one_is_not_it(tmp_path: Path) -> None:
    said = StatusFile(tmp_path, "w1", "tcp://h:7000", lasting=True)._status
    assert said.alive
    said.born -= 1
    assert not said.alive


def test_passwords_are_not_told(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, "w1", "redis://user:s3c/r3t@host:6379/0?password=s3cr3t", lasting=True)

    assert file._status.connection.server == "redis://host:6379/0?…"


def test_a_folder_that_cannot_be_written_to_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "worker").write_text("a file where the folder should be")

    async def work(file: StatusFile, jobs: list[RunningJob]) -> None:
        await asyncio.to_thread(until, lambda: caplog.messages, 10.0, "it is told once")

    kept(tmp_path, work)

    assert len([text for text in caplog.messages if "tasuki worker status" in text]) == 1


def test_a_file_that_is_torn_is_left_out(tmp_path: Path) -> None:
    status_folder(tmp_path).mkdir(parents=True)
    (status_folder(tmp_path) / "w9.json").write_text("{")

    assert read_all(tmp_path) == []
    assert os.listdir(status_folder(tmp_path)) == ["w9.json"]  # noqa: PTH208


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    async def work(file: StatusFile, jobs: list[RunningJob]) -> None:
        await status_until(tmp_path, lambda said: said.alive, "it is there")

    before = os.umask(0o000)
    try:
        kept(tmp_path, work)
    finally:
        os.umask(before)

    assert [folder.stat().st_mode & 0o777 for folder in (tmp_path / "worker", status_folder(tmp_path))] == [0o700, 0o700]


# ---------------------------------------------------------------------------------------------------- the log


def test_each_job_of_a_handler_has_its_lines_and_a_flood_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tasuki.worker")
    log, spec = JobLog(), JobSpec(job_id="a", subject="b.c")
    failure = Outcome(error_code="HANDLER_ERROR", message="ValueError: x", meta={"traceback": "one\n\x1b[2J"})

    log.started(spec, 1, 10.0)
    log.ended(spec, 1, Outcome(), 10.05, 10.3)
    log.ended(spec, 2, failure, 9.0, 10.5)
    assert [record.getMessage() for record in caplog.records] == [
        "job a (b.c) started, attempt 1",
        "job a (b.c) succeeded in 0.25s",
        "job a (b.c) failed in 1.5s, attempt 2: ValueError: x",
    ]
    assert (caplog.records[2].levelname, caplog.records[2].exc_text) == ("WARNING", "one\n\\x1b[2J")
    for _ in range(1000):
        log.ended(spec, 1, Outcome(), None, 10.9)
    for _ in range(2 * JOB_LINES_PER_S):
        log.ended(spec, 1, failure, None, 10.9)
    assert len(caplog.records) == 2 * JOB_LINES_PER_S
    log.flush(11.0)
    log.flush(11.1)
    untold = 1000 - (JOB_LINES_PER_S - 2) + JOB_LINES_PER_S + 1
    assert caplog.messages[-1] == f"{untold} other jobs ended in a second, {JOB_LINES_PER_S + 1} of them failed"
    assert len(caplog.records) == 2 * JOB_LINES_PER_S + 1


def test_a_worker_in_a_program_without_logging_writes_to_stderr(tmp_path: Path) -> None:
    program = """
import logging, sys
from tasuki.worker.status import log_to_stderr_by_default
if len(sys.argv) > 1:
    logging.basicConfig(level=logging.ERROR)
log_to_stderr_by_default()
log_to_stderr_by_default()
logging.getLogger("tasuki.worker").info("connected")
"""
    for arguments, lines in (([], 1), (["configured"], 0)):
        command = [sys.executable, "-c", program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        assert len(done.stderr.splitlines()) == lines
