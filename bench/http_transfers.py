"""How fast do large files travel through the HTTP door? One file up and down, sha256 on both sides.

    python bench/http_transfers.py              1 GiB, three times, the middle one counts; recorded
    python bench/http_transfers.py --quick      128 MiB once, nothing recorded
    python bench/http_transfers.py --mib 512 --times 1

    upload     our client: the file is hashed, then sent to `tasuki server --http`, which hashes it, keeps it in its folder,
               and syncs it to the disk before it answers
    download   our client: the blob is read, hashed and sent by the server, received, hashed and written to a file
    curl       the same against a bare endpoint of uvicorn, which hashes what it gets and drops it, or reads a file and hashes it:
               the file is hashed, then `curl -T`; `curl -o`, then the file is hashed. By the same library as everywhere
               (`sha256sum` of Debian has no use for the processor's instructions, and would make us look better)

All processes share the cores. `ratio` is our speed through curl's, `cpu_s` what each of our processes took for one file, and
`memory_mb` how much the server held at most above what it had before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _common import HERE, Process, folder, limit, record

from tasuki.client.aio import AsyncClient
from tasuki.core.job import BlobRef, InputFile
from tasuki.event_loop import loop_factory

MIB = 1024 * 1024
TARGET = 0.5
LIMIT_S = 280.0
BLOCK = os.urandom(4 * MIB)
LOOK_S = 0.05


def make_file(path: Path, size_bytes: int, number: int) -> None:
    """Another content each time: what the server has, it does not take again."""
    with path.open("wb") as file:
        file.write(number.to_bytes(8, "big"))
        while (left := size_bytes - file.tell()) > 0:
            file.write(BLOCK[:left])


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Peak:
    """The most memory that a process had, while the block lasts."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.before = self.most = process.memory_mb()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            self.most = max(self.most, self._process.memory_mb())

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# ---------------------------------------------------------------------------------------------------- ours


@contextlib.contextmanager
def server(data: Path) -> Iterator[tuple[Process, str]]:
    command = [sys.executable, "-m", "tasuki", "server", "--data", str(data), "--no-tcp", "--http", "127.0.0.1:0"]
    process = Process(command, ready="listening http://")
    try:
        line = next(line for line in process.lines if "listening http://" in line)
        yield process, "http://" + line.split("http://", 1)[1].split()[0]
    finally:
        process.stop()


class Ours:
    """One server, and a client in this process."""

    def __init__(self, process: Process, client: AsyncClient) -> None:
        self._process, self._client = process, client
        self.figures: dict[str, list[dict[str, float]]] = {"upload": [], "download": []}

    async def both(self, path: Path, back: Path) -> None:
        ref = await self._measured("upload", path.stat().st_size, lambda: self._client.put_file(path))
        file = InputFile("in", sha256=ref.sha256, size_bytes=ref.size_bytes)
        handle = await self._client.submit(subject="bench.nobody", files=[file])
        await self._measured("download", ref.size_bytes, lambda: self._get(ref, handle.job_id, back))

    async def _get(self, ref: BlobRef, job_id: str, back: Path) -> None:
        with back.open("wb") as file:
            await self._client._blobs.get(ref, job_id, file.write)

    async def _measured(self, part: str, size_bytes: int, work: Callable[[], Any]) -> Any:
        client_s, server_s = own_cpu_s(), self._process.cpu_s()
        with Peak(self._process) as peak:
            began = time.perf_counter()
            done = await work()
            took_s = time.perf_counter() - began
        self.figures[part].append(
            {
                "mib_per_s": size_bytes / MIB / took_s,
                "client_cpu_s": own_cpu_s() - client_s,
                "server_cpu_s": self._process.cpu_s() - server_s,
                "memory_mb": peak.most - peak.before,
            }
        )
        return done


# ---------------------------------------------------------------------------------------------------- curl


class Curl:
    """A bare endpoint, and curl."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/file"
        self.figures: dict[str, list[dict[str, float]]] = {"upload": [], "download": []}

    def both(self, path: Path, back: Path, sha256: str) -> None:
        up_s = timed(lambda: self._up(path, sha256))
        down_s = timed(lambda: self._down(back))
        for part, took_s in (("upload", up_s), ("download", down_s)):
            self.figures[part].append({"mib_per_s": path.stat().st_size / MIB / took_s})

    def _up(self, path: Path, sha256: str) -> None:
        sha256_of(path)
        found = run("curl", "-sS", "--fail", "-T", str(path), "-H", "Expect:", self._url)
        if found != sha256:
            raise SystemExit(f"the bare endpoint got {found}, not {sha256}")

    def _down(self, back: Path) -> None:
        run("curl", "-sS", "--fail", "-o", str(back), self._url)
        sha256_of(back)


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


# ---------------------------------------------------------------------------------------------------- together


async def measure(size_bytes: int, times: int) -> dict[str, Any]:
    with folder() as place, server(place / "data") as (process, url):
        path, back = place / "file", place / "back"
        token = (place / "data" / "token").read_text().strip()
        path.touch()
        bare = Process([sys.executable, str(HERE / "_bare_transfers.py"), str(path)], ready="listening")
        try:
            curl = Curl(int(bare.lines[0].split()[1]))
            async with AsyncClient(url, token=token) as client:
                ours = Ours(process, client)
                for number in range(times):
                    make_file(path, size_bytes, number)
                    await ours.both(path, back)
                    curl.both(path, back, sha256_of(path))
        finally:
            bare.stop()
    return {part: compared(ours.figures[part], curl.figures[part]) for part in ours.figures}


def compared(ours: list[dict[str, float]], curl: list[dict[str, float]]) -> dict[str, Any]:
    middle = {name: round(statistics.median(one[name] for one in ours), 2) for name in ours[0]}
    curl_speed = statistics.median(one["mib_per_s"] for one in curl)
    ratio = statistics.median(one["mib_per_s"] / other["mib_per_s"] for one, other in zip(ours, curl, strict=True))
    return {**middle, "curl_mib_per_s": round(curl_speed, 2), "ratio": round(ratio, 3), "target_met": ratio >= TARGET}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short look; nothing is recorded")
    parser.add_argument("--mib", type=int, help="size of the file; nothing is recorded")
    parser.add_argument("--times", type=int, help="how often; nothing is recorded")
    arguments = parser.parse_args()
    mib = arguments.mib or (128 if arguments.quick else 1024)
    times = arguments.times or (1 if arguments.quick else 3)
    is_whole = not arguments.quick and arguments.mib is None and arguments.times is None
    with limit(LIMIT_S), asyncio.Runner(loop_factory=loop_factory()) as runner:
        figures = runner.run(measure(mib * MIB, times))
        record("http_transfers", {"mib": mib, "times": times, "target_ratio": TARGET, **figures}, save=is_whole)


if __name__ == "__main__":
    main()
