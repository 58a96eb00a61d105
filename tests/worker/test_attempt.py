"""Outcomes of attempts: exit codes that are tried again, by the rules of exec and job; errors of handlers as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.core.job import Outcome
from tasuki.core.protocol import Ending, JobsFinished
from tasuki.wire.messages import encode
from tasuki.worker.attempt import ExitRules, handler_failure, judged
from tests.worker.runs import attempt_of, exec_of, run, runner_in, shell

RETRY = ""
BY_EXEC = "is permanent for exec 'render'"
BY_JOB = "is permanent for this job"
NONE = ExitRules()


def failed(exit_code: int, error_code: str = "EXIT_CODE") -> Outcome:
    return Outcome(exit_code=exit_code, error_code=error_code, message="it failed")


@pytest.mark.parametrize(
    ("exit_code", "of_exec", "of_job", "says"),
    [
        # without a rule everything retries
        (3, NONE, NONE, RETRY),
        # the exec's rules
        (3, ExitRules(permanent=(3,)), NONE, BY_EXEC),
        (4, ExitRules(permanent=(3,)), NONE, RETRY),
        (75, ExitRules(retry=(75,)), NONE, RETRY),
        (1, ExitRules(retry=(75,)), NONE, BY_EXEC + ", which retries only 75"),
        (1, ExitRules(retry=()), NONE, BY_EXEC + ", which retries only none"),
        (3, ExitRules(permanent=(3,), retry=(75,)), NONE, BY_EXEC),
        # the job's rules
        (3, NONE, ExitRules(permanent=(3,)), BY_JOB),
        (1, NONE, ExitRules(retry=(75,)), BY_JOB + ", which retries only 75"),
        # both: the job's own setting wins
        (3, ExitRules(permanent=(3,)), ExitRules(permanent=()), RETRY),
        (3, ExitRules(permanent=(3,)), ExitRules(permanent=(4,)), RETRY),
        (4, ExitRules(permanent=(3,)), ExitRules(permanent=(4,)), BY_JOB),
        (3, ExitRules(permanent=(3,)), ExitRules(retry=(3,)), RETRY),
        (3, ExitRules(permanent=(3,)), ExitRules(retry=(75,)), BY_EXEC),
        (1, ExitRules(retry=(75,)), ExitRules(retry=(1,)), RETRY),
        (75, ExitRules(retry=(75,)), ExitRules(retry=(1,)), BY_JOB + ", which retries only 1"),
        (75, ExitRules(retry=(75,)), ExitRules(permanent=(75,)), BY_JOB),
        (1, ExitRules(retry=(75,)), ExitRules(permanent=(75,)), BY_EXEC + ", which retries only 75"),
    ],
)
def test_which_codes_are_permanent(exit_code: int, of_exec: ExitRules, of_job: ExitRules, says: str) -> None:
    outcome = judged(failed(exit_code), "render", of_exec, of_job)

    assert outcome.permanent is bool(says)
    assert outcome.message == (f"it failed; exit code {exit_code} {says}" if says else "it failed")


@pytest.mark.parametrize("error_code", ["SIGNAL", "OOM", "PROCESS_LIMIT", "CPU_LIMIT", "FILE_SIZE_LIMIT"])
def test_a_signal_is_permanent_only_if_its_code_is_listed_as_such(error_code: str) -> None:
    killed = failed(137, error_code)

    assert judged(killed, "render", ExitRules(retry=(75,))) == killed
    assert judged(killed, "render", NONE, ExitRules(retry=())) == killed
    assert judged(killed, "render", ExitRules(permanent=(137,))).permanent


@pytest.mark.parametrize("error_code", ["TIMED_OUT", "CANCELED", "LEASE_LOST", "SHUTDOWN", "DISK_FULL", None])
def test_other_ends_are_not_judged_by_their_exit_code(error_code: str | None) -> None:
    ended = Outcome(exit_code=3, error_code=error_code)

    assert judged(ended, "render", ExitRules(permanent=(3,), retry=())) == ended


def test_an_execs_rule_decides_the_outcome_of_its_jobs(tmp_path: Path) -> None:
    tool = exec_of("/bin/sh", "-c", "exit 3", exits=ExitRules(permanent=(3,)))

    outcome = run(runner_in(tmp_path, tool), attempt_of(exec="tool")).outcome

    assert (outcome.exit_code, outcome.error_code, outcome.permanent) == (3, "EXIT_CODE", True)
    assert outcome.message == "exec 'tool' exited with code 3; exit code 3 is permanent for exec 'tool'"


def test_a_jobs_own_rule_wins_over_its_execs(tmp_path: Path) -> None:
    tool = exec_of("/bin/sh", "-c", "exit 3", exits=ExitRules(permanent=(3,)))

    outcome = run(runner_in(tmp_path, tool), attempt_of(exec="tool", retry_exit_codes=(3,))).outcome

    assert (outcome.permanent, outcome.message) == (False, "exec 'tool' exited with code 3")


def test_a_job_that_says_nothing_leaves_it_to_its_exec(tmp_path: Path) -> None:
    tool = exec_of("/bin/sh", "-c", "exit 1", exits=ExitRules(retry=(75,)))

    outcome = run(runner_in(tmp_path, tool), attempt_of(exec="tool")).outcome

    assert outcome.permanent
    assert outcome.message.endswith("exit code 1 is permanent for exec 'tool', which retries only 75")


def test_a_job_of_any_program_has_rules_too(tmp_path: Path) -> None:
    outcome = run(runner_in(tmp_path), shell("exit 3", permanent_exit_codes=(3,))).outcome

    assert outcome.message == "exec 'sh' exited with code 3; exit code 3 is permanent for this job"


def test_an_error_with_a_lone_surrogate_can_be_reported() -> None:
    outcome = handler_failure(ValueError("bad name \udcff"))

    assert outcome.message == r"ValueError: bad name \udcff"
    assert encode(JobsFinished([Ending("a", "lease", 1, outcome)]))
