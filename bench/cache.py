"""What does it take to put files on workers, and how soon does a job with a large cached input start?

python bench/cache.py            1 GiB to 2 workers, 3 rounds, and 20 jobs of each kind with an input of 200 MB; recorded
python bench/cache.py --quick    64 MiB, 1 round, 5 jobs with 20 MB, nothing recorded

The peer of a put is one plain sender that hashes once and sends to two receivers over loopback, which hash, write and fsync. A
put also passes through the server, which hashes, writes and fsyncs. In every round both get new bytes. A job is measured from its
submit to the end of its program, which is `true`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from _common import Process, folder, limit, record, server

from tasuki import Client, InputFile

LIMIT_S = 900.0
BLOCK = 256 * 1024
RECEIVER = """
import hashlib, os, socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as link, open(sys.argv[2], "wb", buffering=0) as file:
    digest, left = hashlib.sha256(), int(sys.argv[3])
    while left:
        piece = link.recv(262144)
        digest.update(piece)
        file.write(piece)
        left -= len(piece)
    os.fsync(file.fileno())
    link.sendall(digest.digest())
"""


def plain_s(data: Path, source: Path) -> float:
    """Send a file to two receivers, and wait for the hashes."""
    size_bytes = source.stat().st_size
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        targets = [data / f"received-{number}" for number in range(2)]
        receivers = [
            subprocess.Popen([sys.executable, "-c", RECEIVER, str(port), str(target), str(size_bytes)]) for target in targets
        ]
        links = [listener.accept()[0] for _ in receivers]
        began = time.monotonic()
        digest = hashlib.sha256()
        with source.open("rb", buffering=0) as file:
            while piece := file.read(BLOCK):
                digest.update(piece)
                for link in links:
                    link.sendall(piece)
        answers = {link.recv(32) for link in links}
        took = time.monotonic() - began
        assert answers == {digest.digest()}
        for receiver, link, target in zip(receivers, links, targets, strict=True):
            receiver.wait()
            link.close()
            target.unlink()
    return took


def made(path: Path, size_bytes: int) -> Path:
    """A new file of random bytes, on the disk: its pages would be written while something else is measured."""
    with path.open("wb") as file:
        for start in range(0, size_bytes, 1 << 20):
            file.write(os.urandom(min(1 << 20, size_bytes - start)))
        os.fsync(file.fileno())
    return path


def put_s(client: Client, cache_id: str, path: Path) -> float:
    began = time.monotonic()
    result = client.put_cache(cache_id, path, target="bench.>")
    took = time.monotonic() - began
    assert {one.status for one in result.workers.values()} == {"OK"}, result
    assert len(result.workers) == 2
    client.remove_cache(cache_id)
    return took


def job_ms(submit: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(count):
        began = time.monotonic()
        submit()
        times.append((time.monotonic() - began) * 1000)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    size_mib, rounds, jobs, input_mb = (64, 1, 5, 20) if quick else (1024, 3, 20, 200)
    plain, puts, peaks = [], [], {}
    with limit(LIMIT_S), folder() as data, ExitStack() as stack:
        served = stack.enter_context(server(data))
        url = f"unix://{data}/socket"
        start = [
            sys.executable,
            "-m",
            "tasuki",
            "worker",
            "--to",
            url,
            "--subject",
            "bench.>",
            "--slots",
            "1",
            "--exec",
            "true=true",
        ]
        workers = []
        for number in range(2):
            worker = Process([*start, "--data", str(data / f"worker-{number}"), "--worker-id", f"w{number}"], ready="connected")
            stack.callback(worker.stop)
            workers.append(worker)
        client = stack.enter_context(Client(url))
        for number in range(rounds):
            source = made(data / "source", size_mib << 20)
            plain.append(plain_s(data, source))
            puts.append(put_s(client, f"round-{number}", source))
        peaks = {"server": served.memory_mb(), "workers": max(worker.memory_mb() for worker in workers)}
        large = made(data / "large", input_mb * 1_000_000)
        client.put_cache("large", large, target="bench.>")
        cached = InputFile("large", cache=("large", "large"))

        def run(*files: InputFile | Path) -> None:
            client.submit(exec="true", subject="bench.a", files=files).outcome(60.0)

        run()
        without_ms = job_ms(run, jobs)
        cached_ms = job_ms(lambda: run(cached), jobs)
        sent_ms = job_ms(lambda: run(made(large, input_mb * 1_000_000)), 3) - job_ms(lambda: made(large, input_mb * 1_000_000), 3)
    put, peer = statistics.median(puts), statistics.median(plain)
    figures = {
        "size_mib": size_mib,
        "plain_sender_s": round(peer, 2),
        "put_s": round(put, 2),
        "put_mib_per_s": round(size_mib / put),
        "plain_to_put": round(peer / put, 2),
        "memory_mb": {name: round(value) for name, value in peaks.items()},
        "input_mb": input_mb,
        "job_without_input_ms": round(without_ms, 2),
        "job_with_cached_input_ms": round(cached_ms, 2),
        "job_with_sent_input_ms": round(sent_ms, 2),
        "sent_to_cached": round(sent_ms / cached_ms, 1),
    }
    record("cache", figures, save=not quick)


if __name__ == "__main__":
    main()
