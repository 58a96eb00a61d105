"""Exit codes: one for each kind of error, all of them in the table."""

import pytest

from tasuki.cli.output import CLEAR_LINE, ExitCode, Output, exit_code_for
from tasuki.cli.run import exit_code_of
from tasuki.core.job import Outcome, State
from tasuki.core.protocol import JobResult
from tasuki.core.units import shown_time
from tasuki.errors import BY_CODE, Conflict, TasukiError


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("NOT_FOUND", 3),
        ("UNAUTHORIZED", 4),
        ("FORBIDDEN", 4),
        ("UNAVAILABLE", 5),
        ("DISK_FULL", 5),
        ("OVERLOADED", 5),
        ("DEADLINE", 5),
        ("CONFLICT", 6),
        ("INVALID", 2),
        ("TOO_LARGE", 2),
        ("CONFIG", 2),
        ("JOB_FAILED", 1),
        ("CORRUPT", 1),
        ("ERROR", 1),
    ],
)
def test_an_error_has_its_exit_code(code: str, expected: int) -> None:
    kind = BY_CODE[code]
    error: TasukiError = Conflict("a", ["args"]) if kind is Conflict else kind("what was wrong")

    assert exit_code_for(error) == expected


def test_a_transfer_is_shown_as_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Output().transfer("uploading", 200)(50)
    assert capsys.readouterr().err == ""

    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for done_bytes, size_bytes in ((50, 200), (200, 200), (0, 0)):
        Output().transfer("uploading", size_bytes)(done_bytes)
    shown = capsys.readouterr().err.split(CLEAR_LINE)[1:]

    assert shown[0] == f"uploading: 50B of 200B [{'#' * 6}{'.' * 18}] 25%"
    assert [text.rpartition("[")[2] for text in shown[1:]] == [f"{'#' * 24}] 100%"] * 2


def test_every_code_is_explained_in_the_table() -> None:
    assert all(code.meaning for code in ExitCode)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome(exit_code=0), 0),
        (Outcome(exit_code=3, error_code="EXIT_CODE"), 3),
        (Outcome(exit_code=143, error_code="SIGNAL"), 143),
        (Outcome(exit_code=137, error_code="OOM"), 137),
        (Outcome(exit_code=152, error_code="CPU_LIMIT"), 152),
        (Outcome(exit_code=143, error_code="TIMED_OUT"), 124),
        (Outcome(exit_code=143, error_code="CANCELED"), 130),
        (Outcome(exit_code=0, error_code="OUTPUT_MISSING"), 125),
        (Outcome(error_code="PROGRAM_NOT_FOUND"), 125),
    ],
)
def test_run_exits_with_the_code_of_its_job(outcome: Outcome, expected: int) -> None:
    assert exit_code_of(JobResult("job", State.FAILED, 1, outcome)) == expected


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 1e300, -1e15, 2.0**63])
def test_a_number_that_is_no_time_is_shown_as_it_is(number: float) -> None:
    assert shown_time(number) == f"{number:g}"
