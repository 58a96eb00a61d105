"""Many seeds on several processes: added up, with each failure and the command that repeats it, whatever becomes of a process."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tasuki.testing.sim import seed_runner
from tasuki.testing.sim.run import VERBS_MIN, SeedOutcome
from tasuki.testing.sim.seed_runner import SeedOrder, SeedReport, SeedRunner, Summary, options_for, run_order, run_seeds
from tasuki.testing.sim.world import SimOptions
from tests.support.waiting import until

SMALL = SimOptions(servers=1, workers=2, clients=2, jobs=10, chaos_s=4.0, faults=4)


# A process of a crew that comes to grief over seed 2.
UNLUCKY = """
import json, signal, sys
for line in sys.stdin:
    order = json.loads(line)
    if order["seed"] == 2:
        {grief}
    print(json.dumps({{"order": order}}), flush=True)
"""
DYING = (sys.executable, "-c", UNLUCKY.format(grief="sys.exit(9)"))
HANGING = (sys.executable, "-c", UNLUCKY.format(grief="signal.pause()"))


def test_what_came_of_all_seeds_is_added_up() -> None:
    wanted = SeedRunner(count=4, options=SMALL)
    outcomes = [outcome for order in wanted.orders(range(1, 5)) if (outcome := run_order(order).outcome) is not None]

    summary = run_seeds(wanted, processes=2)

    assert (summary.seeds, summary.first, summary.last) == (4, 1, 4)
    assert summary.events == sum(outcome.events for outcome in outcomes)
    assert summary.verbs == sum((outcome.verbs for outcome in outcomes), Counter())
    assert summary.faults == sum((outcome.faults for outcome in outcomes), Counter())
    assert not summary.failures


def test_a_failing_seed_is_listed_with_the_command_that_repeats_it() -> None:
    summary = run_seeds(SeedRunner(count=4, options=SMALL, without="body_hash"), processes=1)

    assert not summary.good
    assert {ran.failure.what for ran in summary.failures if ran.failure is not None} == {"I2"}
    lines = list(summary.lines_of_failures())
    seed = summary.failures[0].order.seed
    assert any(line.startswith(f"FAILED seed {seed}: I2: ") for line in lines)
    assert any(line.startswith(f"    tasuki sim --seed {seed} --without body_hash --set servers=1") for line in lines)
    assert "FAILED" in summary.verdict()


def test_a_process_that_dies_is_its_seeds_failure_and_is_replaced() -> None:
    summary = run_seeds(SeedRunner(count=5), processes=1, program=DYING)

    [failed] = summary.failures
    assert failed.order.seed == 2
    assert failed.failure is not None
    assert "its process ended with exit code 9" in failed.failure.message
    assert summary.seeds == 5


def test_a_seed_that_never_ends_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seed_runner, "SEED_LIMIT_S", 1.5)
    monkeypatch.setattr(seed_runner, "LOOK_S", 0.05)

    summary = run_seeds(SeedRunner(count=3), processes=2, program=HANGING)

    assert [ran.order.seed for ran in summary.failures] == [2]
    assert summary.seeds == 3


def test_every_so_many_seeds_run_on_sqlite() -> None:
    stores = [options_for(seed, SMALL, 3).store for seed in range(7)]

    assert stores == ["sqlite", "memory", "memory", "sqlite", "memory", "memory", "sqlite"]
    assert options_for(3, SMALL, 0) == SMALL


def ran(seed: int, verbs: int) -> SeedReport:
    counts = SeedOutcome(seed=seed, options=SMALL, verbs=Counter(lease=verbs), faults=Counter(crash=10))
    return SeedReport(order=SeedOrder(seed), outcome=counts)


def test_for_each_seed_that_does_not_count_one_more_is_run() -> None:
    summary = Summary()
    asked: list[list[int]] = []

    for orders in SeedRunner(first=100, count=50).rounds(summary):
        asked.append([order.seed for order in orders])
        for seed in asked[-1]:
            summary.add(ran(seed, verbs=VERBS_MIN - 1 if seed in (103, 149, 151) else VERBS_MIN))

    assert asked == [list(range(100, 150)), [150, 151], [152]]
    assert summary.counted == 50


def test_there_is_an_end_to_it_if_none_counts() -> None:
    summary = Summary()
    asked = 0

    for orders in SeedRunner(count=50).rounds(summary):
        for order in orders:
            asked += 1
            summary.add(ran(order.seed, verbs=0))

    assert asked == 55
    assert summary.lacking[0] == "seeds that count (only 0 do)"


def test_what_never_came_is_named() -> None:
    wanted = SeedRunner(count=1, options=SimOptions(kinds=("crash", "pause"), jobs=20), cover=True)

    summary = run_seeds(wanted, processes=1)

    assert summary.covered["fault crash"] == summary.faults["crash"] > 0
    assert "fault crash" not in summary.lacking
    assert "fault partition" in summary.lacking


def test_to_count_what_is_rare_changes_nothing() -> None:
    plain, counted = run_order(SeedOrder(1, SMALL)), run_order(SeedOrder(1, SMALL, cover=True))

    assert plain.outcome == counted.outcome
    assert counted.covered
    assert not plain.covered


# ---------------------------------------------------------------------------------------------------- signals


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.fixture
def started() -> Iterator[subprocess.Popen[str]]:
    """The command with two processes at work, in a process group of its own, of which nothing is left afterwards."""
    command = [sys.executable, "-m", "tasuki", "sim", "--seeds", "100000", "--processes", "2"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        until(lambda: len(children_of(started.pid)) == 2, 30.0, "its processes are started")
        yield started
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.communicate()


def is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_ctrl_c_ends_it_with_what_there_is(started: subprocess.Popen[str]) -> None:
    os.killpg(started.pid, signal.SIGINT)
    told, errors = started.communicate(timeout=30)

    assert started.returncode == 130
    assert "INTERRUPTED: " in told
    assert "Traceback" not in errors
    until(lambda: is_gone(started.pid), 30.0, "no process is left")


def test_the_processes_end_when_their_parent_was_killed(started: subprocess.Popen[str]) -> None:
    started.kill()
    started.wait(10)

    until(lambda: is_gone(started.pid), 20.0, "no process is left")
