"""Files that the program of an app leaves behind, as the app's contract has it."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tasuki.cli.worker import AppWorker, app_result
from tasuki.core.apps import result_of
from tasuki.core.job import RESULT_INLINE_MAX_BYTES, BlobRef, Outcome
from tasuki.errors import ConfigError
from tasuki.worker.attempt import RunResult
from tasuki.worker.execs import parse_exec_flag


def archive(**members: Any) -> bytes:
    """A run's archive; `out__x_json` is out/x.json."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as written:
        for name, content in members.items():
            text = content if isinstance(content, str) else json.dumps(content)
            written.writestr(name.replace("__", "/").replace("_", "."), text)
    return buffer.getvalue()


def ended(**members: Any) -> RunResult:
    return RunResult(Outcome(exit_code=0, result=archive(**members)))


def failed(**members: Any) -> RunResult:
    outcome = Outcome(exit_code=3, error_code="EXIT_CODE", message="exit code 3", result=archive(**members))
    return RunResult(outcome)


def test_the_files_of_a_run_become_the_parts_of_the_result() -> None:
    told = app_result(
        ended(
            out__result_json={"zpe_ev": 0.27},
            out__summary_txt="ZPE 0.27 eV",
            out__freqs_csv="1,4401",
            out__meta_json={"qe_version": "7.2"},
            stdout_log="{}",
        )
    ).outcome

    assert told.exit_code == 0
    shown = result_of(told.result or b"", told.meta)
    assert json.loads(bytes(shown.pop("result"))) == {"zpe_ev": 0.27}
    assert shown == {"summary_text": "ZPE 0.27 eV", "freqs_csv": "1,4401", "meta": {"qe_version": "7.2"}}


def test_without_a_file_a_document_on_stdout_is_the_result() -> None:
    told = app_result(ended(stdout_log='{"zpe_ev": 0.27}\n')).outcome

    assert told.result == b'{"zpe_ev":0.27}'


@pytest.mark.parametrize("stdout", ["", "ZPE 0.27 eV", "[1]", "{"])
def test_without_any_document_the_archive_stays_the_result(stdout: str) -> None:
    run = ended(stdout_log=stdout)

    assert app_result(run) == run


def test_a_large_document_is_one_for_a_blob() -> None:
    run = ended(out__result_json={"data": "x" * RESULT_INLINE_MAX_BYTES})

    told = app_result(run)

    assert told.result_file is None
    assert len(told.outcome.result or b"") > RESULT_INLINE_MAX_BYTES
    assert result_of(told.outcome.result or b"", told.outcome.meta)["result"]["data"].startswith("xxx")


def test_an_archive_that_is_a_file_is_read_there(tmp_path: Path) -> None:
    path = tmp_path / "result.zip"
    path.write_bytes(archive(out__result_json={"a": 1}))
    run = RunResult(Outcome(exit_code=0, result_ref=BlobRef("0" * 64, path.stat().st_size), result_sha256="0" * 64), path)

    told = app_result(run)

    assert (told.outcome.result, told.outcome.result_ref, told.result_file) == (b'{"a":1}', None, None)


def test_a_failure_has_the_code_that_the_program_gave_it() -> None:
    error = {"error_code": "QE_RUNTIME_ERROR", "error_message": "pw.x exited with code 1", "permanent": True}

    told = app_result(failed(out__error_json=error)).outcome

    assert (told.error_code, told.message, told.permanent) == ("QE_RUNTIME_ERROR", "pw.x exited with code 1", True)
    assert told.exit_code == 3


@pytest.mark.parametrize("error", ["", "nonsense", {"message": "no code"}])
def test_a_failure_without_a_word_is_that_of_the_command(error: Any) -> None:
    told = app_result(failed(out__error_json=error)).outcome

    assert (told.error_code, told.message) == ("EXIT_CODE", "exit code 3")


def test_meta_that_is_too_large_is_a_failure_that_says_so() -> None:
    told = app_result(ended(out__result_json={}, out__meta_json={"notes": "x" * 5000})).outcome

    assert (told.error_code, told.permanent) == ("TOO_LARGE", True)


def test_a_worker_for_an_app_takes_its_jobs_and_no_others() -> None:
    execs = {"zpe": parse_exec_flag("zpe=python3 zpe.py")}

    assert AppWorker("unix:///x", app="zpe", execs=execs).patterns == ("job.assign.zpe",)
    with pytest.raises(ConfigError, match="leave --subject out"):
        AppWorker("unix:///x", app="zpe", execs=execs, subjects=(">",))


def test_without_an_exec_of_its_name_the_app_is_only_a_prefix() -> None:
    worker = AppWorker("unix:///x", app="zpe", execs={"other": parse_exec_flag("other=true")}, subjects=("a.>",))

    assert worker.patterns == ("a.>",)
