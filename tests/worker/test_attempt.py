"""Outcomes of attempts: exit codes that are tried again, by the rules of exec and job; errors of handlers as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tasuki import Retry, Worker, WrongType
from tasuki.core.job import InputFile, JobSpec, Outcome, Progress
from tasuki.core.protocol import Ending, JobsFinished
from tasuki.errors import ConfigError, InvalidInput
from tasuki.wire.messages import encode
from tasuki.worker.attempt import (
    RESULT_HEADERS_MAX_BYTES,
    ExitRules,
    Handler,
    HandlerJob,
    HandlerResult,
    Handlers,
    handler_failure,
    handler_outcome,
    judged,
)
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


# ---------------------------------------------------------------------------------------------------- handlers


@pytest.mark.parametrize(
    ("error", "permanent", "retry_in_s"),
    [
        (OSError("down"), False, None),
        (ConnectionResetError("cut"), False, None),  # a kind of OSError
        (KeyError("no such name"), True, None),  # not in retry_on
        (FileNotFoundError("gone"), True, None),  # in give_up_on, which counts first
        (Retry("later", in_s=30), False, 30),
        (Retry(), False, None),
    ],
)
def test_rules_about_exceptions_decide_on_another_attempt(error: Exception, permanent: bool, retry_in_s: float | None) -> None:
    def fail(job: HandlerJob) -> None:
        raise error

    handler = Handler("a", fail, False, retry_on=(OSError,), give_up_on=(FileNotFoundError,))

    outcome = handler.call(HandlerJob(JobSpec(job_id="a"), 1))

    assert (outcome.error_code, outcome.permanent, outcome.retry_in_s) == ("HANDLER_ERROR", permanent, retry_in_s)
    assert str(error) in outcome.message
    assert ("not tried again" in outcome.message) is permanent


@pytest.mark.parametrize("in_s", [-1, float("nan"), float("inf")])
def test_a_retry_has_a_possible_delay(in_s: float) -> None:
    with pytest.raises(ValueError, match="in_s must be 0 or more seconds"):
        Retry(in_s=in_s)


def _of_nothing() -> None: ...


def _of_two(job: HandlerJob, more: int) -> None: ...


def _of_job_and_default(job: HandlerJob, more: int = 1) -> None: ...


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda worker: worker.handler(_of_nothing), r'write @worker.handler\("_of_nothing"\), got function'),
        (lambda worker: worker.handler(7), "needs the subject"),
        (lambda worker: worker.handler("a")(_of_nothing), r"'_of_nothing' is called with one argument.* def _of_nothing\(job\)"),
        (lambda worker: worker.handler("a")(_of_two), "'_of_two' is called with one argument"),
        (lambda worker: worker.handler("a")(7), "must be a function, got int"),
        (lambda worker: worker.handler("a", retry_on="OSError"), "retry_on must be exception classes, got 'OSError'"),
        (lambda worker: worker.handler("a", give_up_on=(OSError, 7)), "give_up_on must be exception classes, got 7"),
    ],
)
def test_a_handler_that_could_only_fail_is_refused_at_once(use: Callable[[Worker], object], says: str) -> None:
    with pytest.raises(WrongType, match=says):
        use(Worker("tcp://127.0.0.1:1"))


@pytest.mark.parametrize("function", [_of_job_and_default, print])
def test_a_handler_that_can_be_called_with_a_job_is_taken(function: Callable[..., object]) -> None:
    assert Worker("tcp://127.0.0.1:1").handler("a")(function) is function


def test_a_handler_below_job_submit_is_for_the_jobs_below_job_assign() -> None:
    handlers = Handlers()
    handlers.add(Handler("job.submit.books.*", print, asynchronous=False))

    found = handlers.find("job.assign.books.close")

    assert found is not None
    assert handlers.patterns == (found.name,) == ("job.assign.books.*",)
    assert list(handlers.plain) == [found.name]
    with pytest.raises(ConfigError, match="has a handler already"):
        handlers.add(Handler("job.assign.books.*", print, asynchronous=False))


def test_a_job_has_its_inputs_and_a_large_payload_as_files(tmp_path: Path) -> None:
    (tmp_path / "large.bin").write_bytes(b"much")
    (tmp_path / "tasuki-payload").write_bytes(b"the payload")
    large = InputFile("large.bin", sha256="0" * 64, size_bytes=4)
    payload = InputFile("tasuki-payload", sha256="1" * 64, size_bytes=11)
    job = HandlerJob(JobSpec(job_id="a", files=(InputFile("small.txt", data=b"small"), large, payload)), 1, str(tmp_path))

    assert [file.name for file in job.files] == ["small.txt", "large.bin"]
    assert [file.read_bytes() for file in job.files] == [b"small", b"much"]
    with job.files[1].open() as first, job.open_payload() as second:
        assert (first.read(2), second.read(3)) == (b"mu", b"the")
    assert job.payload == b"the payload"


def test_a_small_payload_can_be_read_as_a_file_as_well() -> None:
    job = HandlerJob(JobSpec(job_id="a", payload=b"small"), 1)

    assert (job.payload, job.open_payload().read(), job.files) == (b"small", b"small", ())


def test_progress_is_0_to_1_and_a_printable_text() -> None:
    told: list[Progress] = []
    job = HandlerJob(JobSpec(job_id="a"), 1, report=told.append)

    job.progress(0.5, "a\x1bb" + "c" * 300)

    assert told == [Progress(0.5, ("a b" + "c" * 300)[:200])]
    for wrong in (1.5, -0.1, float("nan")):
        with pytest.raises(InvalidInput, match="progress must be 0 to 1"):
            job.progress(wrong)


def test_a_result_with_headers_has_them_beside_it() -> None:
    outcome = handler_outcome(HandlerResult("text", headers={"content-type": "text/plain", "über": "ja"}))

    assert (outcome.result, outcome.error_code) == (b"text", None)
    assert outcome.headers == {"content-type": "text/plain", "über": "ja"}
    assert (handler_outcome(HandlerResult()).result, handler_outcome(b"").headers) == (b"", {})


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"a": "b" * RESULT_HEADERS_MAX_BYTES}, f"1 headers of {RESULT_HEADERS_MAX_BYTES + 1} bytes"),
        ({f"h{number}": "" for number in range(65)}, "65 headers"),
        ({"a": 1}, "not all text"),
    ],
)
def test_headers_that_cannot_be_sent_are_the_handlers_mistake(headers: dict[str, str], says: str) -> None:
    outcome = handler_outcome(HandlerResult(b"", headers=headers))

    assert outcome.error_code == "HANDLER_ERROR"
    assert says in outcome.message


def test_what_else_is_wrong_with_a_result_is_told_first() -> None:
    assert "float" in handler_outcome(HandlerResult(1.5, headers={"a": "b"})).message  # type: ignore[arg-type]
