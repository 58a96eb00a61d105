"""How fast is a node agent, and how soon does a job go on elsewhere when its node dies? Real processes on loopback.

    python bench/agent.py                       everything; recorded
    python bench/agent.py --quick               a short look, nothing recorded
    python bench/agent.py --only short          some of: short, large, takeover; nothing recorded

    short      `/bin/true` with a file of 1 KB, 8 clients that send the next job as soon as they have the answer; beside it
               an endpoint of FastAPI that saves the file, calls create_subprocess_exec and promises nothing (_bare_agent.py).
               In turns, the middle ratio counts. `times_bare` is how much longer a job takes than there
    large      one file of 1 GiB. `upload`: our client hashes it and sends it to a job that does nothing with it. `download`: our
               client fetches a result of this size, and hashes it. curl beside it: the same against a bare endpoint, as in
               http_transfers.py. `whole` is `tasuki run -o` with a program that copies the file: up, run, packed, down.
               `agent_memory_mb` is what the agent held at most above what it had when idle, `client_memory_mb` the same of
               `tasuki run` above a run with a file of 1 KB
    takeover   two agents; the one that runs a job is killed. From just before the SIGKILL, so a moment before the connection
               breaks, to the first instruction of the program at the other one

The clients of `short` are sockets of one other process, the same for both sides. All processes share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from _common import HERE, Process, folder, limit, percentile, record
from http_transfers import MIB, Curl, Peak, make_file, sha256_of

from tasuki.client.agents.client import AgentResult, AsyncAgentsClient
from tasuki.client.agents.node import AgentNode
from tasuki.core.address import parse_agents
from tasuki.event_loop import loop_factory

PARTS = ("short", "large", "takeover")
CLIENTS = 8
TARGETS = (
    ("short", "times_bare", 1.8),
    ("large", "upload_ratio", -0.5),
    ("large", "download_ratio", -0.5),
    ("large", "agent_memory_mb", 80.0),
    ("takeover", "p50_ms", 300.0),
)
"""Part, figure, and the most that it may be; below zero: the least."""
BOUNDARY = b"bench-boundary"
LIMIT_S = 420.0  # on a machine that is busy with other things; alone it takes less than half of that
STARTED_TIMEOUT_S = 20.0
LOOK_S = 0.02


class Size:
    """The amount of work."""

    def __init__(self, *, quick: bool) -> None:
        self.seconds = 1.0 if quick else 4.0
        self.rounds = 1 if quick else 5
        self.mib = 128 if quick else 1024
        self.times = 1 if quick else 3
        self.kills = 3 if quick else 20


class Node:
    """One `tasuki agent`, which can be killed and started again where it was."""

    def __init__(self, data: Path, execs: dict[str, str], slots: int) -> None:
        self._data, self._execs, self._slots = data, execs, slots
        self._listen = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tasuki", "agent", "--listen", self._listen, "--data", str(self._data)]
        command += ["--slots", str(self._slots), "--log-level", "warning", "--no-token"]
        for name, template in self._execs.items():
            command += ["--exec", f"{name}={template}"]
        self.process = Process(command, ready="ready", env={"TASUKI_TOKEN": ""})
        line = next(line for line in self.process.lines if "listening http://" in line)
        self._listen = line.split("http://", 1)[1].split()[0]

    @property
    def url(self) -> str:
        return f"http://{self._listen}"


@contextlib.contextmanager
def agent(data: Path, slots: int = CLIENTS, **execs: str) -> Iterator[Node]:
    node = Node(data, execs, slots)
    try:
        yield node
    finally:
        node.process.stop()


# ---------------------------------------------------------------------------------------------------- short jobs


class Load:
    """Jobs from 8 connections to one port, each with a file of 1 KB; the next as soon as one is answered."""

    def __init__(self, process: Process, port: int) -> None:
        self._process, self._port = process, port
        self._numbers = itertools.count()
        self.rounds: list[dict[str, float]] = []

    async def measure(self, seconds: float) -> None:
        await self._all(seconds / 4)
        server_s, client_s, began = self._process.cpu_s(), time.process_time(), time.perf_counter()
        latencies = await self._all(seconds)
        wall_s, jobs = time.perf_counter() - began, len(latencies)
        self.rounds.append(
            {
                "jobs_per_s": jobs / wall_s,
                "p50_ms": percentile(latencies, 0.5) * 1e3,
                "p99_ms": percentile(latencies, 0.99) * 1e3,
                "cpu_us_per_job": (self._process.cpu_s() - server_s) / jobs * 1e6,
                "load_cpu_us_per_job": (time.process_time() - client_s) / jobs * 1e6,
            }
        )

    async def _all(self, seconds: float) -> list[float]:
        until = time.perf_counter() + seconds
        return [took for one in await asyncio.gather(*(self._client(until) for _ in range(CLIENTS))) for took in one]

    async def _client(self, until: float) -> list[float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        latencies = []
        while (began := time.perf_counter()) < until:
            writer.write(request_of(next(self._numbers)))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
            body = await reader.readexactly(size)
            if not head.startswith(b"http/1.1 200 "):
                raise SystemExit(f"port {self._port}: {(head + body).decode(errors='replace')[:400]}")
            latencies.append(time.perf_counter() - began)
        writer.close()
        await writer.wait_closed()
        return latencies


def request_of(number: int) -> bytes:
    """Another content each time, as of different jobs."""
    data = b"%08d" % number + b"x" * 1016
    part = b'Content-Disposition: form-data; name="file"; filename="book.csv"\r\nContent-Type: text/csv\r\n\r\n'
    body = b"--" + BOUNDARY + b"\r\n" + part + data + b"\r\n--" + BOUNDARY + b"--\r\n"
    head = b"POST /run/job-%d HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=%s\r\n" % (
        number,
        BOUNDARY,
    )
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def short(size: Size, place: Path) -> dict[str, Any]:
    saved = place / "bare"
    saved.mkdir()
    with agent(place / "data", true="/bin/true {file}") as node:
        bare = Process([sys.executable, str(HERE / "_bare_agent.py"), str(saved), "/bin/true"], ready="listening")
        try:
            ours = Load(node.process, int(node.url.rpartition(":")[2]))
            others = Load(bare, int(bare.lines[0].split()[1]))
            for _ in range(size.rounds):
                await ours.measure(size.seconds)
                await others.measure(size.seconds)
        finally:
            bare.stop()
    pairs = zip(ours.rounds, others.rounds, strict=True)
    times = statistics.median(other["jobs_per_s"] / one["jobs_per_s"] for one, other in pairs)
    return {"agent": middle(ours.rounds), "bare": middle(others.rounds), "times_bare": round(times, 3)}


def middle(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in rounds), 2) for name in rounds[0]}


# ---------------------------------------------------------------------------------------------------- large files


class Large:
    """One agent and one bare endpoint, and the files that go to them."""

    def __init__(self, place: Path, node: Node, size_bytes: int) -> None:
        self._node, self._size_bytes = node, size_bytes
        self.path, self._back = place / "file", place / "back"
        self._small = place / "small"
        self._small.write_bytes(b"x" * 1024)
        self.figures: list[dict[str, float]] = []
        self.idle_client_mb = 0.0

    async def warm(self) -> None:
        """Load what every agent and every client needs sooner or later."""
        _, self.idle_client_mb = await self._whole("small", self._small)

    async def measure(self, number: int, curl: Curl) -> None:
        make_file(self.path, self._size_bytes, number)
        with Peak(self._node.process) as peak:
            upload_s = await self._upload(f"up-{number}")
            whole_s, client_mb = await self._whole(f"both-{number}", self.path)
            download_s = await self._download(f"both-{number}")
        curl.both(self.path, self._back, sha256_of(self.path))
        mib = self._size_bytes / MIB
        self.figures.append(
            {
                "upload_mib_per_s": mib / upload_s,
                "upload_ratio": mib / upload_s / curl.figures["upload"][-1]["mib_per_s"],
                "download_mib_per_s": mib / download_s,
                "download_ratio": mib / download_s / curl.figures["download"][-1]["mib_per_s"],
                "whole_s": whole_s,
                "agent_memory_mb": peak.most - peak.before,
                "client_memory_mb": client_mb - self.idle_client_mb,
            }
        )

    async def _upload(self, job_id: str) -> float:
        async with AsyncAgentsClient([self._node.url], token="") as client:
            began = time.perf_counter()
            ended = await client.run("true", files=[self.path], output=self._back, job_id=job_id, known=False)
            assert ended.succeeded
            return time.perf_counter() - began

    async def _download(self, job_id: str) -> float:
        (address,) = parse_agents(self._node.url)
        node = AgentNode(address, "", None)
        try:
            began = time.perf_counter()
            found = await node.fetch(job_id, self._back, Quiet())
            found.part.become(self._back)
            took_s = time.perf_counter() - began
        finally:
            await node.close()
        assert found.size_bytes > self._size_bytes
        return took_s

    async def _whole(self, job_id: str, file: Path) -> tuple[float, float]:
        """(seconds, the most memory that the client had)."""
        command = [sys.executable, "-m", "tasuki", "run", "--to", f"agents:{self._node.url}", "--data", str(self._back.parent)]
        command += ["--job-id", job_id, "--file", str(file), "-o", str(self._back), "copy"]
        began = time.perf_counter()
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: ASYNC220 - nothing else waits for the loop
        most = 0.0
        while running.poll() is None:
            most = max(most, most_memory_mb(running.pid))
            await asyncio.sleep(LOOK_S)
        if running.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {running.returncode}")
        return time.perf_counter() - began, most


class Quiet:
    """A client that asks for nothing but the result."""

    def sent(self, done_bytes: int) -> None: ...

    def uploaded(self) -> None: ...

    def heard(self, done_bytes: int, total_bytes: int | None) -> None: ...

    def led(self, to: str) -> None: ...


def most_memory_mb(pid: int) -> float:
    """The most that it had so far; 0 once it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0


async def large(size: Size, place: Path) -> dict[str, Any]:
    with agent(place / "data", slots=2, true="/bin/true {file}", copy="/bin/cp {file} out/copy") as node:
        found = Large(place, node, size.mib * MIB)
        found.path.touch()
        bare = Process([sys.executable, str(HERE / "_bare_transfers.py"), str(found.path)], ready="listening")
        try:
            curl = Curl(int(bare.lines[0].split()[1]))
            await found.warm()
            for number in range(size.times):
                await found.measure(number, curl)
        finally:
            bare.stop()
    curls = {f"curl_{part}_mib_per_s": middle(figures)["mib_per_s"] for part, figures in curl.figures.items()}
    memory = {f"{who}_memory_mb": round(max(one[f"{who}_memory_mb"] for one in found.figures), 1) for who in ("agent", "client")}
    return {"mib": size.mib, "times": size.times, **middle(found.figures), **curls, **memory}


# ---------------------------------------------------------------------------------------------------- a node dies

HOLD = """
date +%s%N > "$2/start-$1"
while [ ! -e "$2/go" ]; do sleep 0.02; done
"""
"""Notes when it started and at which node, and goes on until it may end."""


class Takeover:
    """Two agents, and one job after the other whose node is killed."""

    def __init__(self, place: Path, nodes: dict[str, Node]) -> None:
        self._place, self._nodes = place, nodes
        self._file = place / "book.csv"
        self._file.write_bytes(b"x" * 1024)

    async def measure(self, number: int) -> float:
        """Milliseconds from the SIGKILL to the second start."""
        notes = self._place / f"notes-{number}"
        notes.mkdir()
        async with AsyncAgentsClient([node.url for node in self._nodes.values()], token="") as client:
            result = self._place / "result.zip"
            job = client.run("hold", [str(notes)], files=[self._file], output=result, job_id=f"job-{number}", known=False)
            running = asyncio.create_task(job)
            ((first, _),) = (await self._starts(notes, 1, running)).items()
            process = self._nodes[first].process
            killed_ns = time.time_ns()
            process.process.kill()
            starts = await self._starts(notes, 2, running)
            (notes / "go").touch()
            ended = await running
        assert ended.succeeded
        assert ended.node != self._nodes[first].url
        process.kill()
        await asyncio.to_thread(self._nodes[first].start)
        return (max(starts.values()) - killed_ns) / 1e6

    async def _starts(self, notes: Path, count: int, running: asyncio.Task[AgentResult]) -> dict[str, int]:
        """Return the times of its starts, by node."""
        async with asyncio.timeout(STARTED_TIMEOUT_S):
            while True:
                said = {note.name.removeprefix("start-"): note.read_text() for note in notes.glob("start-*")}
                if len(said) >= count and all(text.endswith("\n") for text in said.values()):
                    return {name: int(text) for name, text in said.items()}
                if running.done():
                    raise SystemExit(f"the job ended before it was started {count} times: {running.result()}")
                await asyncio.sleep(LOOK_S / 4)


async def takeover(size: Size, place: Path) -> dict[str, Any]:
    script = place / "hold.sh"
    script.write_text(HOLD)
    with contextlib.ExitStack() as stack:
        nodes = {
            name: stack.enter_context(agent(place / name, slots=2, hold=f"/bin/sh {script} {name} {{args}}"))
            for name in ("one", "two")
        }
        taken = Takeover(place, nodes)
        times = [await taken.measure(number) for number in range(size.kills + 1)][1:]  # the first one imports what is needed
    return {"kills": size.kills, "p50_ms": round(statistics.median(times), 1), "max_ms": round(max(times), 1)}


# ---------------------------------------------------------------------------------------------------- all of it

MEASURES: dict[str, Callable[[Size, Path], Awaitable[dict[str, Any]]]] = {"short": short, "large": large, "takeover": takeover}


def verdicts(figures: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Return whether each target that was measured is met."""
    return {
        f"{part}_{key}": figures[part][key] <= target if target > 0 else figures[part][key] >= -target
        for part, key, target in TARGETS
        if part in figures
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run; nothing is recorded")
    parser.add_argument("--only", default=",".join(PARTS), help="some parts, with commas; nothing is recorded")
    arguments = parser.parse_args()
    size, parts = Size(quick=arguments.quick), arguments.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    figures: dict[str, dict[str, Any]] = {}
    with limit(LIMIT_S):
        for part in parts:
            with folder() as place, asyncio.Runner(loop_factory=loop_factory()) as runner:
                figures[part] = runner.run(MEASURES[part](size, place))
    is_whole = not arguments.quick and parts == list(PARTS)
    record("agent", {**figures, "targets_met": verdicts(figures)}, save=is_whole)


if __name__ == "__main__":
    main()
