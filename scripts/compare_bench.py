"""Compare the throughput and latency of two checkouts in interleaved pairs of runs: a change of machine load hits both alike.

usage: python scripts/compare_bench.py OTHER_CHECKOUT [--pairs 11]

Each checkout runs its own quick benches with its own .venv. Prints medians, and the median of the ratios, this one to the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]

# bench script -> figure -> where it stands in the script's JSON
FIGURES: dict[str, dict[str, tuple[str, ...]]] = {
    "throughput": {"jobs/s": ("our_ids", "jobs_per_s"), "server CPU µs/job": ("our_ids", "cpu_us_per_job", "server")},
    "latency": {"submit to start p50, ms": ("submit_to_start_ms_p50",), "submit to result p50, ms": ("submit_to_result_ms_p50",)},
}


def run(checkout: Path, bench: str) -> dict[str, float]:
    command = [checkout / ".venv/bin/python", checkout / "bench" / f"{bench}.py", "--quick"]
    printed = json.loads(subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout)
    return {name: float(_at(printed, path)) for name, path in FIGURES[bench].items()}


def _at(printed: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        printed = printed[key]
    return printed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, metavar="OTHER_CHECKOUT")
    parser.add_argument("--pairs", type=int, default=11)
    options = parser.parse_args()
    other = options.other.resolve()
    for bench, figures in FIGURES.items():
        ours: dict[str, list[float]] = {name: [] for name in figures}
        theirs: dict[str, list[float]] = {name: [] for name in figures}
        for pair in range(options.pairs):
            order = [(HERE, ours), (other, theirs)]
            for checkout, into in order if pair % 2 else reversed(order):  # neither is always first
                for name, value in run(checkout, bench).items():
                    into[name].append(value)
        for name in figures:
            ratio = statistics.median(a / b for a, b in zip(ours[name], theirs[name], strict=True))
            here, there = statistics.median(ours[name]), statistics.median(theirs[name])
            print(f"{bench}: {name}: {here:.2f} here, {there:.2f} there, median ratio {ratio:.3f} of {options.pairs} pairs")


if __name__ == "__main__":
    main()
