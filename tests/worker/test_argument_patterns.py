"""Patterns of an exec's arguments: no argument of a job keeps the worker's loop from its leases, however a pattern is written."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tasuki.worker.execs import Exec, parse_execs
from tests.worker.runs import attempt_of, run, run_async, runner_in

BLOWS_UP = "a" * 28  # (a+)+b takes some 10 s, and twice as long with each further character
LOOP_MAX_S = 0.3


def exec_with(pattern: str) -> Exec:
    return parse_execs({"tool": {"argv": ["/bin/echo", "{args}"], "args": [pattern]}})["tool"]


def test_a_pattern_that_takes_for_ever_ends_the_attempt_and_the_loop_goes_on_meanwhile(tmp_path: Path) -> None:
    longest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            longest_s = max(longest_s, time.monotonic() - began)

    async def scene() -> str:
        watching = asyncio.ensure_future(watch())
        result = await run_async(runner_in(tmp_path, exec_with("(a+)+b")), attempt_of(exec="tool", args=(BLOWS_UP,)))
        watching.cancel()
        assert result.outcome.permanent
        return f"{result.outcome.error_code} {result.outcome.message}"

    said = asyncio.run(scene())

    assert said.startswith("ARGS_NOT_ALLOWED")
    assert "1 s" in said
    assert longest_s < LOOP_MAX_S


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [("(a+)+b", "aab", "ab "), ("[a-z]+(-[a-z]+)*", "ab-cd", "ab-"), ("fast|slow", "slow", "slower"), ("[0-9]+", "17", "1.7")],
)
def test_patterns_match_the_whole_argument(tmp_path: Path, pattern: str, good: str, bad: str) -> None:
    runner = runner_in(tmp_path, exec_with(pattern))
    assert run(runner, attempt_of(exec="tool", args=(good, good))).outcome.exit_code == 0
    refused = run(runner, attempt_of(job_id="job-2", exec="tool", args=(good, bad))).outcome
    assert refused.error_code == "ARGS_NOT_ALLOWED"
    assert repr(bad) in refused.message
