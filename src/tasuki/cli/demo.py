"""`tasuki demo`: jobs on real processes that are killed. Exits 0 only if every job has exactly one recorded finish.

A server on a temporary folder and two workers; a batch of commands; SIGKILL of one worker in mid-job; SIGKILL and restart of the
server in mid-work; then a finished id is submitted again. Each command appends a line to a file when it starts and when it ends,
so that the runs can be compared with the records.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import click

from tasuki.cli.command import command, option
from tasuki.cli.output import Output, write_line
from tasuki.client.aio import AsyncClient
from tasuki.client.types import JobStatus
from tasuki.config import OWN_COMMAND
from tasuki.core.job import JobSpec
from tasuki.errors import DeadlineExceeded, NotFound, Unavailable

JOBS = 24
SLOTS = 2
JOB_S = 0.8
LEASE_TTL_S = 2.0
READY_TIMEOUT_S = 30.0
DEMO_TIMEOUT_S = 120.0
REFRESH_S = 0.2
GROUP = "demo.step"
# The program of each job: note its start, work for a while, note its end, and print a line.
WORK = 'echo "start $0 $TASUKI_ATTEMPT" >> "$1"; sleep "$2"; echo "end $0 $TASUKI_ATTEMPT" >> "$1"; echo "job $0 done"'


@command("demo", examples=["tasuki demo", "tasuki demo --json"])
@option("--jobs", type=click.IntRange(4, 500), default=JOBS, help="How many commands to run.")
def demo(output: Output, jobs: int) -> int:

    async def main() -> dict[str, Any]:
        try:
            async with asyncio.timeout(DEMO_TIMEOUT_S):
                with tempfile.TemporaryDirectory(prefix="tasuki-demo-") as folder:
                    return await _Demo(Path(folder), jobs, output).play()
        except TimeoutError:
            raise DeadlineExceeded(f"the demo did not end within {DEMO_TIMEOUT_S:g} s") from None

    report = asyncio.run(main())
    human = [
        "",
        f"{report['jobs']} jobs, {report['recorded_finishes']} recorded finishes, {report['attempts']} attempts "
        f"({report['lost_with_a_worker']} lost with worker-a), "
        f"{report['starts_of_commands']} commands started, {report['seconds']} s",
        "every job has exactly one recorded finish" if report["ok"] else "THE PROMISE WAS NOT KEPT",
    ]
    output.show(report, lambda: human)
    return 0 if report["ok"] else 1


class _Demo:
    """One demonstration: its processes, and its steps in order."""

    def __init__(self, folder: Path, jobs: int, output: Output) -> None:
        self.data = folder / "data"
        self.ledger = folder / "ledger.txt"
        self.job_ids = [f"demo-{number:03d}" for number in range(jobs)]
        self.output = output
        self.began = time.monotonic()
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.table = _Table(output)

    async def play(self) -> dict[str, Any]:
        try:
            self.say(f"starting a server on {self.data} and two workers with {SLOTS} slots each")
            await self.start_server()
            await self.start_worker("worker-a")
            await self.start_worker("worker-b")
            async with AsyncClient(f"unix://{self.data}/socket") as client, self.table.shown(client, self.job_ids):
                handles = await client.submit_many([self.spec(job_id) for job_id in self.job_ids])
                self.say(f"submitted {len(handles)} commands; each is on disk now")
                await self.kill_worker(client)
                await self.kill_server(client)
                outcomes = [await handle.outcome() for handle in handles]
                self.say(f"all {len(outcomes)} jobs have ended")
                again = await self.submit_again(client, outcomes[0])
                return await self.check(client, outcomes, again)
        finally:
            for name in list(self.processes):
                await self.kill(name)

    # ------------------------------------------------------------------------------------------------ processes

    async def start(self, name: str, ready: str, *arguments: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *OWN_COMMAND,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self.processes[name] = process
        assert process.stdout is not None
        lines: list[str] = []
        async with asyncio.timeout(READY_TIMEOUT_S):
            while line := (await process.stdout.readline()).decode("utf-8", "replace"):
                lines.append(line)
                if ready in line:
                    return
        raise Unavailable(f"{name} ended before it was ready: {''.join(lines)[-1000:].strip()}")

    async def start_server(self) -> None:
        await self.start("server", "listening", "server", "--data", str(self.data), "--no-tcp", "--lease-ttl", str(LEASE_TTL_S))

    async def start_worker(self, name: str) -> None:
        options = ("--to", f"unix://{self.data}/socket", "--worker-id", name, "--subject", "demo.>", "--slots", str(SLOTS))
        await self.start(name, "connected", "worker", *options, "--any-program")

    async def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    # ------------------------------------------------------------------------------------------------ steps

    def say(self, text: str) -> None:
        self.table.say(f"{time.monotonic() - self.began:5.1f} s  {text}")

    def spec(self, job_id: str) -> Any:
        arguments = ("-c", WORK, job_id, str(self.ledger), str(JOB_S))
        return JobSpec(job_id=job_id, subject=GROUP, exec="/bin/sh", args=arguments)

    async def until(self, client: Any, condition: Callable[[list[JobStatus]], bool]) -> list[JobStatus]:
        while True:
            statuses = await client.statuses(*self.job_ids)
            if condition(statuses):
                return statuses
            if all(job.state == "SUCCEEDED" for job in statuses):
                raise DeadlineExceeded("all jobs ended before this step: this machine is too busy for the demo; try --jobs 100")
            await asyncio.sleep(0.05)

    async def kill_worker(self, client: Any) -> None:
        statuses = await self.until(client, lambda jobs: bool(_running_at(jobs, "worker-a")))
        lost = _running_at(statuses, "worker-a")
        self.say(f"killing worker-a with SIGKILL in the middle of {', '.join(lost)}")
        await self.kill("worker-a")
        await self.until(client, lambda jobs: all(job.attempt >= 2 for job in jobs if job.job_id in lost))
        self.say(f"its lease ran out; {', '.join(lost)} went on at worker-b with attempt 2")

    async def kill_server(self, client: Any) -> None:
        await self.until(client, lambda jobs: bool(_running_at(jobs, "worker-b")))
        self.say("killing the server with SIGKILL while worker-b works")
        await self.kill("server")
        await self.start_server()
        self.say("the server is back on the same folder; worker-b and this client reconnect by themselves")
        await self.start_worker("worker-c")
        self.say("worker-c joins")

    async def submit_again(self, client: Any, outcome: Any) -> dict[str, Any]:
        lines_before = self.ledger.read_text().count("\n")
        handle = (await client.submit_many([self.spec(outcome.job_id)]))[0]
        stored = await handle.outcome(10)
        ran = self.ledger.read_text().count("\n") != lines_before
        same = stored.outcome.result == outcome.outcome.result and stored.attempt == outcome.attempt
        self.say(
            f"submitted {outcome.job_id} again: {'the stored result came back without a run' if same and not ran else 'WRONG'}"
        )
        return {"job_id": outcome.job_id, "existed": handle.existed, "same_result": same, "ran_again": ran}

    async def check(self, client: Any, outcomes: list[Any], again: dict[str, Any]) -> dict[str, Any]:
        statuses = await client.statuses(*self.job_ids)
        counts = (await client.counts())["demo"]
        lines = [line.split() for line in self.ledger.read_text().splitlines()]
        ends = Counter((job_id, int(attempt)) for word, job_id, attempt in lines if word == "end")
        finished = [job for job in statuses if job.state == "SUCCEEDED" and ends[job.job_id, job.attempt] == 1]
        report = {
            "jobs": len(self.job_ids),
            "recorded_finishes": counts.succeeded,
            "jobs_with_exactly_one_recorded_finish": len(finished),
            "attempts": sum(job.attempt for job in statuses),
            "lost_with_a_worker": sum(job.losses for job in statuses),
            "starts_of_commands": sum(1 for word, *_ in lines if word == "start"),
            "submitted_again": again,
            "seconds": round(time.monotonic() - self.began, 1),
        }
        report["ok"] = (
            len(finished) == len(self.job_ids) == counts.succeeded == len({outcome.job_id for outcome in outcomes})
            and again["existed"]
            and again["same_result"]
            and not again["ran_again"]
            and report["lost_with_a_worker"] >= 1
        )
        return report


class _Table:
    """A live table on a terminal, plain lines elsewhere."""

    def __init__(self, output: Output) -> None:
        self._plain = output.json or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb"
        self._output = output
        self._lines: list[str] = []
        self._live: Any = None
        self._printed = 0
        self._statuses: list[JobStatus] = []

    def say(self, text: str) -> None:
        self._lines.append(text)
        if self._live is not None:
            self._live.update(self._drawn())
        elif not self._output.json:
            write_line(text)

    @contextlib.asynccontextmanager
    async def shown(self, client: Any, job_ids: list[str]) -> AsyncIterator[None]:
        if self._plain:
            yield
            return
        from rich.live import Live

        self._printed = len(self._lines)
        with Live(self._drawn(), refresh_per_second=10) as self._live:
            watching = asyncio.create_task(self._watch(client, job_ids))
            try:
                yield
                self._statuses = await client.statuses(*job_ids)
                self._live.update(self._drawn())
            finally:
                watching.cancel()
                await asyncio.wait([watching])
        self._live = None

    async def _watch(self, client: Any, job_ids: list[str]) -> None:
        while True:
            with contextlib.suppress(NotFound):  # before they are submitted
                self._statuses = await client.statuses(*job_ids)
            self._live.update(self._drawn())
            await asyncio.sleep(REFRESH_S)

    def _drawn(self) -> Any:
        from rich.console import Group as Stack
        from rich.table import Table
        from rich.text import Text

        table = Table(title="jobs", expand=False)
        for column in ("state", "jobs", "where"):
            table.add_column(column)
        states = Counter(job.state for job in self._statuses)
        for state, count in sorted(states.items()):
            placed = [job for job in self._statuses if job.state == state != "PENDING" and job.attempt]
            places = Counter(job.assigned_worker_id for job in placed)
            table.add_row(state, str(count), ", ".join(f"{place}: {number}" for place, number in sorted(places.items())))
        return Stack(*(Text(line) for line in self._lines[self._printed :]), table)


def _running_at(statuses: list[JobStatus], worker_id: str) -> list[str]:
    return [job.job_id for job in statuses if job.state == "RUNNING" and job.assigned_worker_id == worker_id]
