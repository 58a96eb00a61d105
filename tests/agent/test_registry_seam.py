"""An agent and a registry: it asks before it runs a job, obeys the answer, and tells how the job ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from tasuki.agent.folders import JobFolders
from tasuki.agent.refusals import is_running
from tasuki.agent.results import ResultElsewhere
from tasuki.core.address import Address
from tasuki.core.failover.agent_protocol import EndedMarker, RemovalResult, RunningMarker
from tasuki.worker.attempt import StopReason
from tests.agent.stage import AgentStage, Started, code_of
from tests.support.processes import alive
from tests.support.waiting import until


class OneTable:
    """A registry that remembers what it was told, and answers as the test says."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.lost: Callable[[StopReason], None] = lambda reason: None
        self.answer: Exception | None = None
        self.found: Response | None = None
        self.counts = True
        self.recorded = asyncio.Event()
        self.recorded.set()

    async def open(
        self, folders: JobFolders, address: Address, *, renewed: Callable[[], None], sent: Callable[[int], None]
    ) -> None: ...

    async def close(self) -> None: ...

    def hurry(self) -> None: ...

    def deadline(self, job_id: str) -> float | None:
        return None

    async def look(self, job_id: str, sent_input: str | None) -> None: ...

    async def claim(self, running: RunningMarker, lost: Callable[[StopReason], None]) -> int:
        self.told.append(("claim", running.job_id))
        self.lost = lost
        if self.answer is not None:
            raise self.answer
        return 1

    async def record(self, ended: EndedMarker, result: Path) -> bool:
        assert result.stat().st_size == ended.result_bytes
        self.told.append((f"record {ended.outcome}", ended.job_id))
        await self.recorded.wait()
        return self.counts

    async def release(self, job_id: str) -> None:
        self.told.append(("release", job_id))

    async def forget(self, job_id: str) -> None:
        self.told.append(("forget", job_id))

    async def remove(self, job_id: str) -> RemovalResult | None:
        return None

    async def find(self, job_id: str) -> Response | None:
        return self.found

    async def describe(self, job_id: str) -> dict[str, Any] | None:
        return None


@pytest.fixture
def table(stage: AgentStage) -> Iterator[OneTable]:
    table = OneTable()
    stage.agent.jobs.registry = table
    yield table
    stage.agent.jobs.registry = None


def test_a_run_is_claimed_and_recorded(stage: AgentStage, table: OneTable) -> None:
    assert stage.run("one").status_code == 200
    assert stage.run("two", "exit 1").status_code == 500

    assert table.told == [("claim", "one"), ("record succeeded", "one"), ("claim", "two"), ("record failed", "two")]


def test_what_runs_elsewhere_is_423_and_leaves_nothing(stage: AgentStage, table: OneTable, job_id: str) -> None:
    table.answer = is_running(job_id, "n2", 1.0)

    answer = stage.run(job_id)

    assert code_of(answer) == (423, "RUNNING")
    assert answer.json()["error"]["details"]["node"] == "n2"
    assert not [name for name in stage.files() if job_id in name or name.startswith("incoming")]


def test_what_is_done_elsewhere_is_answered_by_the_registry(stage: AgentStage, table: OneTable, job_id: str) -> None:
    table.answer = ResultElsewhere(Response(b"the result of n2", media_type="application/zip"))
    table.found = Response(b"found")

    assert stage.run(job_id).content == b"the result of n2"
    assert stage.http.get(f"/result/{job_id}").content == b"found"
    assert stage.state(job_id) is None


def test_a_claim_that_is_lost_stops_the_job(stage: AgentStage, table: OneTable, job_id: str, tmp_path: Path) -> None:
    running = stage.begin(job_id, f"echo $$ > {tmp_path}/pid; exec sleep 60")
    pid = until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())

    stage.call(lambda: table.lost(StopReason.LEASE_LOST))

    assert code_of(running.answer()) == (503, "UNAVAILABLE")
    assert not alive(pid)
    assert stage.state(job_id) == "interrupted"
    assert table.told[-1] == ("release", job_id)


def test_an_end_that_does_not_count_is_shown_to_nobody(stage: AgentStage, table: OneTable, job_id: str) -> None:
    table.counts = False

    answer = stage.run(job_id)

    assert code_of(answer) == (503, "UNAVAILABLE")
    assert stage.http.get(f"/result/{job_id}").status_code == 404


def test_a_stop_that_comes_when_the_end_is_being_recorded_leaves_the_result(
    stage: AgentStage, table: OneTable, job_id: str
) -> None:
    stage.call(table.recorded.clear)
    running = stage.begin(job_id, "true")
    until(lambda: ("record succeeded", job_id) in table.told)

    stopping = Started(lambda: stage.http.delete(f"/jobs/{job_id}?state=running"))
    until(lambda: (held := stage.agent.jobs.held(job_id)) is not None and held.canceled)
    stage.call(table.recorded.set)

    assert stopping.answer().status_code == 404
    assert running.answer().content == stage.http.get(f"/result/{job_id}").content
    assert ("forget", job_id) not in table.told
