"""Compare the speed of two checkouts in interleaved pairs of runs: a change of machine load hits both alike.

usage: python scripts/compare_bench.py OTHER_CHECKOUT [--pairs 11]

Throughput: the two run their own quick bench in turns. Latency: server, worker and client of both are up at the same time, and
run 20 jobs in turns, ten times as often. Prints medians, and the median of the ratios, this checkout to the other. Each checkout
needs a .venv of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
BATCHES_PER_PAIR = 10
Measure = Callable[[], dict[str, float]]

# Runs in a checkout: for each line on stdin a batch of jobs, as bench/latency.py measures them.
LATENCY = """
import asyncio, json, sys
sys.path.insert(0, "bench")
import latency, uvloop
from _common import folder, handler_worker, server

async def main(url):
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await latency.measure(url, 20)), flush=True)

with folder() as data, server(data), handler_worker(f"unix://{data}/socket", 10):
    uvloop.run(main(f"unix://{data}/socket"))
"""


@contextlib.contextmanager
def throughput(checkout: Path) -> Iterator[Measure]:
    def measure() -> dict[str, float]:
        command = [checkout / ".venv/bin/python", checkout / "bench/throughput.py", "--quick"]
        printed = json.loads(subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout)["our_ids"]
        return {"jobs/s": printed["jobs_per_s"], "server CPU µs/job": printed["cpu_us_per_job"]["server"]}

    yield measure


@contextlib.contextmanager
def latency(checkout: Path) -> Iterator[Measure]:
    command = [checkout / ".venv/bin/python", "-c", LATENCY]
    with subprocess.Popen(command, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        to_child, from_child = child.stdin, child.stdout

        def measure() -> dict[str, float]:
            to_child.write("\n")
            figures: dict[str, float] = json.loads(from_child.readline())
            return {name: figure for name, figure in figures.items() if name.endswith("p50")}

        yield measure


def compare(measures: Sequence[Measure], pairs: int) -> None:
    ours, theirs = measures
    found: dict[str, list[tuple[float, float]]] = {}
    for pair in range(pairs):
        if pair % 2:  # neither is always first
            here, there = ours(), theirs()
        else:
            there, here = theirs(), ours()
        for name, figure in here.items():
            found.setdefault(name, []).append((figure, there[name]))
    for name, figures in found.items():
        here_median, there_median = (statistics.median(column) for column in zip(*figures, strict=True))
        ratio = statistics.median(a / b for a, b in figures)
        print(f"{name}: {here_median:.2f} here, {there_median:.2f} there, median ratio {ratio:.3f} of {pairs} pairs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, metavar="OTHER_CHECKOUT")
    parser.add_argument("--pairs", type=int, default=11)
    options = parser.parse_args()
    checkouts = (HERE, options.other.resolve())
    for bench, pairs in ((throughput, options.pairs), (latency, options.pairs * BATCHES_PER_PAIR)):
        with contextlib.ExitStack() as stack:
            compare([stack.enter_context(bench(checkout)) for checkout in checkouts], pairs)


if __name__ == "__main__":
    main()
