"""Login of `tasuki worker` over HTTP: enrolled once, then with its credential; and its messages when it may not come in."""

from __future__ import annotations

import http.server
import io
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasuki.cli import worker_login
from tasuki.cli.worker_login import LoginOptions, WorkerLogin, logged_in
from tasuki.core.address import parse_url
from tasuki.errors import ConfigError, Forbidden, TasukiError, Unauthorized, Unavailable
from tasuki.worker.credentials import CredentialFile
from tests.cli.commands import DEADLINE_S, TASUKI, environment
from tests.cli.inside import Inside, inside
from tests.doors.http.stage import Stage
from tests.support.waiting import until

__all__ = ["inside"]

NOBODY = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("enrol")) as stage:
        yield stage


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody at a terminal, nothing of the developer's own settings."""
    for name in ("TASUKI_TOKEN", "TASUKI_ENROLL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO())


def come_in(url: str, data: Path, **wish: Any) -> WorkerLogin:
    """The login with which the worker would run; it has ended when this returns."""
    with logged_in(parse_url(url), LoginOptions(data, **wish)) as found:
        return found


def refusal(url: str, data: Path, **wish: Any) -> TasukiError:
    with pytest.raises(TasukiError) as refused:
        come_in(url, data, **wish)
    assert "tsk_" not in refused.value.message.replace("tsk_e_", ""), "no secret in a message"
    return refused.value


def enrolled(stage: Stage, data: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerLogin:
    with monkeypatch.context() as patch:
        patch.setenv("TASUKI_ENROLL", stage.enroll())
        return come_in(stage.url, data)


def revoke(stage: Stage, worker_id: str | None) -> None:
    assert stage.call("DELETE", f"/calc/zpe/compute/servers/{worker_id}", stage.admin).status_code == 200


def is_good(stage: Stage, token: str) -> bool:
    return stage.get("/v1/workers/self", token).status_code == 200


# ---------------------------------------------------------------------------------------------------- enrolling


@pytest.mark.parametrize("way", ["variable", "file", "stdin", "terminal"])
def test_an_enrol_token_makes_a_worker_and_is_needed_once(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    token, wish = stage.enroll(), {}
    if way == "variable":
        monkeypatch.setenv("TASUKI_ENROLL", token)
    elif way == "terminal":
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
        monkeypatch.setattr("getpass.getpass", lambda prompt: token)
    else:
        (tmp_path / "enroll.token").write_text(f"{token}\n")
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{token}\n"))
        wish["enroll_file"] = "-" if way == "stdin" else str(tmp_path / "enroll.token")

    first = come_in(stage.url, tmp_path, **wish)
    monkeypatch.delenv("TASUKI_ENROLL", raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    again = come_in(stage.url, tmp_path)

    assert is_good(stage, first.token)
    assert (first.worker_id, first.subjects) == (again.worker_id, ("job.assign.zpe",))
    assert again.token == first.token
    assert stage.post("/v1/workers/register", {}, token).json()["error"]["code"] == "TOKEN_REVOKED"


def test_the_credential_is_on_disk_before_it_is_used(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = enrolled(stage, tmp_path, monkeypatch)

    with CredentialFile(tmp_path, stage.address) as seat:
        credential = seat.load()
    assert credential is not None
    assert (credential.worker_id, credential.token.secret) == (found.worker_id, found.token)
    assert credential.token.ttl_s == 7 * 86400
    assert credential.server == stage.url


def test_an_enrol_token_that_is_not_needed_is_not_spent(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = enrolled(stage, tmp_path, monkeypatch)
    spare = stage.enroll()
    monkeypatch.setenv("TASUKI_ENROLL", spare)

    again = come_in(stage.url, tmp_path)

    assert again.worker_id == first.worker_id
    assert f"the enrol token is not used: this worker is enrolled already, as {first.worker_id}" in caplog.text
    assert "tsk_" not in caplog.text
    assert stage.post("/v1/workers/register", {}, spare).status_code == 200


@pytest.mark.parametrize("same", [False, True])
def test_a_revoked_worker_is_enrolled_anew(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, same: bool) -> None:
    first = enrolled(stage, tmp_path, monkeypatch)
    revoke(stage, first.worker_id)
    monkeypatch.setenv("TASUKI_ENROLL", stage.enroll(worker_id=first.worker_id if same else ""))

    again = come_in(stage.url, tmp_path)

    assert (again.worker_id == first.worker_id) is same
    assert is_good(stage, again.token)
    assert not is_good(stage, first.token)


def test_results_that_only_the_former_worker_can_bring_are_named(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = enrolled(stage, tmp_path, monkeypatch)
    waiting = tmp_path / "endings" / str(first.worker_id) / "1.ending"
    waiting.parent.mkdir(parents=True)
    waiting.touch()
    revoke(stage, first.worker_id)
    monkeypatch.setenv("TASUKI_ENROLL", stage.enroll())

    come_in(stage.url, tmp_path)

    assert f"token enroll --worker-id {first.worker_id}" in caplog.text
    assert waiting.exists()


def test_a_server_that_is_away_leaves_an_enrolled_worker_what_it_is(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = enrolled(stage, tmp_path, monkeypatch)
    with CredentialFile(tmp_path, stage.address) as seat, CredentialFile(tmp_path, parse_url(NOBODY)[0]) as other:
        credential = seat.load()
        assert credential is not None
        other.save(type(credential)(server=str(other.address), worker_id=credential.worker_id, token=credential.token))
    monkeypatch.setenv("TASUKI_ENROLL", stage.enroll())

    again = come_in(NOBODY, tmp_path)

    assert again.worker_id == first.worker_id


# ---------------------------------------------------------------------------------------------------- what goes wrong


def test_without_any_token_the_ways_to_get_one_are_named(stage: Stage, tmp_path: Path) -> None:
    error = refusal(stage.url, tmp_path)

    assert isinstance(error, Unauthorized)
    assert all(way in error.message for way in ("TASUKI_ENROLL", "--enroll-file", "tasuki token enroll", "--token-file"))


def test_an_enrol_token_that_was_used_is_refused_with_the_way_out(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = stage.enroll()
    stage.post("/v1/workers/register", {}, token)
    monkeypatch.setenv("TASUKI_ENROLL", token)

    error = refusal(stage.url, tmp_path)

    assert isinstance(error, Unauthorized)
    assert "was used" in error.message
    assert "tasuki token enroll" in error.message


def test_nothing_is_spent_where_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASUKI_ENROLL", "tsk_e_some")

    error = refusal(NOBODY, tmp_path)

    assert isinstance(error, Unavailable)
    assert "the enrol token was not used" in error.message


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("tsk_w_x", "of kind worker"),
        ("tsk_c_x", "of kind client"),
        ("secret", "of kind unknown"),
        ("tsk_e_\n\u00e9", "printable ASCII"),
    ],
)
def test_what_is_no_enrol_token_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, why: str) -> None:
    monkeypatch.setenv("TASUKI_ENROLL", given)

    error = refusal(NOBODY, tmp_path)

    assert isinstance(error, ConfigError)
    assert why in error.message


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_an_enroll_file_without_a_token_is_an_error(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "enroll.token"
    if content is not None:
        path.write_text(content)

    assert "--enroll-file" in refusal(NOBODY, tmp_path, enroll_file=str(path)).message


def test_two_kinds_of_token_at_once_are_an_error(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASUKI_ENROLL", "tsk_e_x")
    monkeypatch.setenv("TASUKI_TOKEN", "tsk_w_x")

    assert "give one" in refusal(stage.url, tmp_path).message


def test_enrolling_is_for_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASUKI_ENROLL", "tsk_e_x")

    assert "over http:// or https://" in refusal("tcp://127.0.0.1:1", tmp_path).message
    assert "over http:// or https://" in refusal("unix:///nowhere", tmp_path, enroll_file="-").message
    assert come_in("unix:///nowhere", tmp_path) == WorkerLogin(), "the worker of `tasuki up` needs no token"


def test_another_worker_id_than_the_enrolled_one_is_an_error(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = enrolled(stage, tmp_path, monkeypatch)

    error = refusal(stage.url, tmp_path, worker_id="somebody")

    assert isinstance(error, ConfigError)
    assert f"is {first.worker_id}" in error.message
    assert come_in(stage.url, tmp_path, worker_id=first.worker_id).worker_id == first.worker_id


def test_a_worker_takes_only_what_it_was_enrolled_for(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enrolled(stage, tmp_path, monkeypatch)

    error = refusal(stage.url, tmp_path, patterns=("render.>",))

    assert "enrolled for job.assign.zpe, not for render.>" in error.message
    assert "--data" in error.message


def test_an_enrol_token_for_another_app_is_not_spent(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASUKI_ENROLL", stage.enroll())

    error = refusal(stage.url, tmp_path, patterns=("job.assign.other",))

    assert isinstance(error, Forbidden)
    assert "is not spent" in error.message
    assert come_in(stage.url, tmp_path, patterns=("job.assign.zpe",)).subjects == ("job.assign.zpe",)


def test_a_second_process_is_told_who_is_this_worker(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enrolled(stage, tmp_path, monkeypatch)

    with logged_in([stage.address], LoginOptions(tmp_path)):
        error = refusal(stage.url, tmp_path)

    assert f"pid {os.getpid()}" in error.message
    assert "--data" in error.message


def test_a_credential_that_cannot_be_kept_is_told_with_the_way_out(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(seat: CredentialFile, credential: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CredentialFile, "save", full)
    monkeypatch.setenv("TASUKI_ENROLL", stage.enroll())

    error = refusal(stage.url, tmp_path)

    assert "No space left" in error.message
    assert "tasuki token enroll --worker-id w-" in error.message


# ---------------------------------------------------------------------------------------------------- answers that are lost


class Cutting(http.server.BaseHTTPRequestHandler):
    """Passes requests on; the answers of the first ones never come back."""

    target = ""
    lost = 1

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {"Authorization": self.headers["Authorization"]}
        answer = httpx.post(f"{self.target}{self.path}", content=body, headers=headers)
        if type(self).lost > 0:
            type(self).lost -= 1
            self.close_connection = True
            return
        self.send_response(answer.status_code)
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, format: str, *args: Any) -> None:
        """Not into the test's output."""


@pytest.fixture
def cutting(stage: Stage) -> Iterator[tuple[str, type[Cutting]]]:
    handler = type("Handler", (Cutting,), {"target": stage.url})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", handler
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("lost", "kind", "words"), [(1, Unauthorized, "is spent"), (2, Unavailable, "is not known whether")])
def test_a_lost_answer_is_told_as_what_it_is(
    stage: Stage,
    cutting: tuple[str, type[Cutting]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lost: int,
    kind: type[TasukiError],
    words: str,
) -> None:
    url, handler = cutting
    handler.lost = lost
    monkeypatch.setenv("TASUKI_ENROLL", stage.enroll())

    error = refusal(url, tmp_path)

    assert type(error) is kind
    assert words in error.message
    assert "tasuki token enroll" in error.message


# ---------------------------------------------------------------------------------------------------- a token made by hand


def test_a_worker_with_a_token_made_by_hand_has_a_lasting_id_and_the_folder_for_itself(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASUKI_TOKEN", stage.create_token("worker"))

    first = come_in(stage.url, tmp_path)
    again = come_in(stage.url, tmp_path)
    with logged_in([stage.address], LoginOptions(tmp_path)):
        second = refusal(stage.url, tmp_path)
        named = come_in(stage.url, tmp_path, worker_id="another")

    assert first.worker_id == again.worker_id
    assert "--data" in second.message
    assert named.worker_id == "another"


def test_a_token_that_is_given_goes_before_the_credential(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = enrolled(stage, tmp_path, monkeypatch)
    monkeypatch.setenv("TASUKI_TOKEN", "tsk_w_by_hand")

    found = come_in(stage.url, tmp_path)

    assert found.token == "tsk_w_by_hand"
    assert found.worker_id != first.worker_id
    assert "and not the credential" in caplog.text


@pytest.mark.parametrize(
    ("scope", "flags"),
    [
        (("job.assign.zpe",), "--app zpe"),
        (("render.eu.>", "common.*"), "--scope 'render.eu.>' --scope 'common.*'"),
        (("job.assign.>",), "--scope 'job.assign.>'"),
        ((), "--scope '>'"),
    ],
)
def test_the_way_back_names_what_the_worker_was_enrolled_for(scope: tuple[str, ...], flags: str) -> None:
    assert worker_login._scope_flags(scope) == flags


# ---------------------------------------------------------------------------------------------------- the command


def test_an_app_without_a_program_is_an_error(inside: Inside, stage: Stage, tmp_path: Path) -> None:
    done = inside("worker", "--to", stage.url, "--app", "zpe", "--exec", "other=true", "--data", str(tmp_path))

    assert done.returncode == 2
    assert "--exec zpe=COMMAND" in done.stderr


def test_an_enrol_token_needs_something_that_the_worker_may_run(inside: Inside, tmp_path: Path) -> None:
    done = inside("token", "enroll", "--data", str(tmp_path))

    assert done.returncode == 2
    assert "--app NAME, or --scope PATTERN" in done.stderr


@pytest.mark.e2e
def test_a_worker_enrols_works_and_is_sent_away(stage: Stage, tmp_path: Path) -> None:
    stage.clear_queue()
    program = tmp_path / "zpe.sh"
    program.write_text('env > "$TASUKI_OUT/summary.txt"; echo {} > "$TASUKI_OUT/result.json"\n')
    data = tmp_path / "data"
    worker = subprocess.Popen(
        [*TASUKI, "worker", "--to", stage.url, "--app", "zpe", "--exec", f"zpe=sh {program}", "--data", str(data)],
        env=environment(tmp_path, TASUKI_ENROLL=stage.enroll(), TASUKI_SECRET="tsk_none"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        job_id = stage.submit()
        until(lambda: stage.status(job_id)["status"] == "finished", DEADLINE_S, "the job is done")
        seen = stage.get(f"/calc/zpe/jobs/{job_id}/result").json()["summary_text"]
        [path] = (data / "worker").glob("*.json")
        revoke(stage, path.read_text().split('"worker_id": "')[1].split('"')[0])
        said = worker.communicate(timeout=DEADLINE_S)[1]
    finally:
        worker.kill()
        worker.wait()

    assert "TASUKI_JOB_ID" in seen
    assert "tsk_" not in seen
    assert "TASUKI_ENROLL" not in seen
    assert worker.returncode == 4
    last = said.strip().splitlines()[-1]
    assert last.startswith("tasuki: UNAUTHORIZED: this worker may not work any more, and stops its jobs: token ")
    assert "was revoked" in last
    assert "tasuki token enroll --app zpe --worker-id w-" in last
    assert "tsk_" not in said
