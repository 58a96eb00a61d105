"""`tasuki sim`: one seed from close up, many at once, and the way from a failure to something small."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tasuki.cli.main import main
from tasuki.cli.output import ExitCode
from tasuki.testing.sim.checker import Checker
from tasuki.testing.sim.history import read
from tasuki.testing.sim.seed_runner import SeedOrder, run_order
from tasuki.testing.sim.world import SimOptions

SMALL = ("--set", "servers=1", "--set", "jobs=16", "--set", "chaos_s=5", "--set", "faults=5")
Sim = Callable[..., tuple[int, str]]


@pytest.fixture
def sim(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Sim:
    """The command in this process: its exit code, and what it said."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["tasuki", "sim", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, shown.out + shown.err

    return run


@pytest.fixture(scope="module")
def broken() -> tuple[str, ...]:
    """The command that runs a seed which fails, because a safeguard is switched off."""
    options = SimOptions(servers=1, jobs=16, chaos_s=5.0, faults=5)
    failing = (seed for seed in range(50) if run_order(SeedOrder(seed, options, "body_hash")).failure is not None)
    return ("--seed", str(next(failing)), "--without", "body_hash", *SMALL)


def test_a_good_seed_tells_what_was_drawn_and_how_much_happened(sim: Sim) -> None:
    code, text = sim("--seed", "7")

    assert code == ExitCode.OK
    assert "options: servers=" in text
    assert "seed 7: " in text
    assert text.endswith("no violation\n")


def test_the_same_seed_is_the_same_run(sim: Sim) -> None:
    assert sim("--seed", "7", "--json", *SMALL) == sim("--seed", "7", "--json", *SMALL)


def test_a_failing_seed_tells_what_befell_the_job(sim: Sim, broken: tuple[str, ...]) -> None:
    code, text = sim(*broken)

    assert code == ExitCode.FAILED
    assert "what befell job-" in text
    assert "\nFAILED: I2: " in text


def test_the_trace_marks_the_line_that_broke_something_and_those_before_it(sim: Sim, broken: tuple[str, ...]) -> None:
    _, text = sim(*broken, "--trace")

    trace = text[: text.index("what befell")].splitlines()
    marks = [line[:1] for line in trace]
    assert [line for line in trace if line.startswith("!")][-1].startswith("! I2: ")
    assert marks.count("!") == 2
    assert marks.count(">") == 12
    assert any(" worker-1     to server-1: ConnectionBegin" in line for line in trace)


def test_the_trace_of_a_good_seed_marks_nothing(sim: Sim) -> None:
    _, text = sim("--seed", "3", "--trace", *SMALL)

    assert len(text.splitlines()) > 100
    assert not [line for line in text.splitlines() if line.startswith((">", "!"))]


def test_what_is_left_after_shrinking_can_be_kept_and_run_again(sim: Sim, broken: tuple[str, ...], tmp_path: Path) -> None:
    saved = tmp_path / "case.json"

    code, text = sim(*broken, "--shrink", "--save", str(saved))
    again, story = sim("--case", str(saved), "--without", "body_hash", "--json")

    assert (code, again) == (ExitCode.FAILED, ExitCode.FAILED)
    assert " still fails with 0 of 5 faults, 2 of " in text
    assert json.loads(story)["failure"]["what"] == "I2"
    assert len(json.loads(saved.read_bytes())["plan"]["operations"]) == 2


def test_the_history_is_kept_with_the_line_that_broke_something(sim: Sim, broken: tuple[str, ...], tmp_path: Path) -> None:
    kept = tmp_path / "history.jsonl"

    _, text = sim(*broken, "--history", str(kept), "--json")

    failure = json.loads(text)["failure"]
    checker = Checker()
    with kept.open("rb") as file:
        for line in read(file):
            checker.observe(line)
    [violation] = checker.violations
    assert (violation.invariant, violation.line) == (failure["what"], failure["line"])


def test_a_seed_runs_on_sqlite(sim: Sim) -> None:
    code, text = sim("--seed", "5", *SMALL, "--store", "sqlite")

    assert code == ExitCode.OK
    assert " store=sqlite " in text


def test_many_seeds_are_added_up(sim: Sim) -> None:
    _, text = sim("--seeds", "2", "--from", "10", "--processes", "2", "--store", "mixed", *SMALL)

    verdict = text.splitlines()[-1]
    assert verdict.startswith("2 seeds (10 to 11")
    assert "1 on SQLite" in verdict
    assert verdict.endswith("on 2 processes: no violation")


def test_many_seeds_as_json(sim: Sim) -> None:
    code, text = sim("--seeds", "3", "--processes", "1", "--without", "body_hash", "--json")

    summary = json.loads(text)
    assert code == ExitCode.FAILED
    assert not summary["ok"]
    assert summary["failures"][0]["repeat"].endswith("--without body_hash")


def test_a_run_that_must_cover_everything_fails_if_a_kind_of_fault_never_came(sim: Sim) -> None:
    code, text = sim("--seeds", "1", "--processes", "1", "--set", "kinds=crash,pause", "--cover")

    assert code == ExitCode.FAILED
    assert "FAILED: not covered: " in text
    assert "fault partition" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give --seed N"),
        (("--seed", "1", "--seeds", "2"), "give --seed N"),
        (("--seeds", "2", "--trace"), "are for one seed"),
        (("--seed", "1", "--store", "redis"), "got redis"),
        (("--seed", "1", "--set", "colour=red"), "got colour=red"),
        (("--seed", "1", "--set", "servers=many"), "servers"),
        (("--seed", "1", "--set", "kinds=crash,flood"), "no such kind of fault: flood"),
        (("--seed", "1", "--without", "luck"), "no such safeguard: luck"),
        (("--case", "nowhere.json"), "cannot read nowhere.json"),
        (("--seed", "1", *SMALL, "--history", "no/such/folder"), "cannot write no/such/folder"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(sim: Sim, arguments: tuple[str, ...], says: str) -> None:
    code, text = sim(*arguments)

    assert code == ExitCode.USAGE
    assert says in text
