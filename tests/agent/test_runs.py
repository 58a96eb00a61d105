"""POST /run: what a client gets for its files, and what an id means that comes again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tasuki.core.failover.agent_protocol import InputRecord, input_hash
from tests.agent.stage import DOTNET_KIND, DOTNET_NAMES, AgentStage, code_of, dotnet_form, members, report
from tests.support.processes import alive
from tests.support.waiting import until

HOLD = 'while [ ! -e "{gate}" ]; do sleep 0.02; done; echo held'


def hash_of(script: str, exec_: str = "sh", args: tuple[str, ...] = ()) -> str:
    data = script.encode()
    return input_hash(exec_, args, [InputRecord("job.sh", hashlib.sha256(data).hexdigest(), len(data))])


# ---------------------------------------------------------------------------------------------------- one run


def test_the_answer_is_the_archive_of_the_run(stage: AgentStage, job_id: str) -> None:
    script = "echo out; echo err >&2; echo made > out/made.txt"

    answer = stage.run(job_id, script)

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/zip"
    assert answer.headers["content-disposition"] == f'attachment; filename="result-{job_id}.zip"'
    assert answer.headers["etag"] == f'"{hashlib.sha256(answer.content).hexdigest()}"'
    assert answer.headers["tasuki-cache"] == "miss"
    found = members(answer.content)
    assert (found["stdout.log"], found["stderr.log"], found["out/made.txt"]) == (b"out\n", b"err\n", b"made\n")
    told = report(answer.content)
    assert told["input_hash"] == hash_of(script)
    assert {"job_id": job_id, "exec": "sh", "exit_code": 0, "node": "n1", "attempt": 1}.items() <= told.items()
    assert told["started_at"] <= told["finished_at"]


def test_only_markers_and_the_result_stay(stage: AgentStage, job_id: str) -> None:
    stage.run(job_id, "echo left > here.txt; mkdir -p deep/er; touch deep/er/x result.zip .interrupted")

    assert {name for name in stage.files() if job_id in name} == {
        f"jobs/{job_id}", f"jobs/{job_id}/.done", f"jobs/{job_id}/result.zip",
    }  # fmt: skip


def test_several_files_lie_in_in_and_the_first_is_the_one_of_the_command(stage: AgentStage, job_id: str) -> None:
    files = {"job.sh": b"cat in/data/b.csv in/a.csv", "a.csv": b"second", "data/b.csv": b"first "}

    answer = stage.post(job_id, files)

    assert members(answer.content)["stdout.log"] == b"first second"


@pytest.mark.parametrize("name", DOTNET_NAMES)
def test_a_client_in_dotnet_is_served_without_a_token(stage: AgentStage, job_id: str, name: str) -> None:
    body = dotnet_form(b"cat in/*.csv; ls in", DOTNET_NAMES[name])

    answer = stage.http.post(f"/run/{job_id}", content=body, headers={"Content-Type": DOTNET_KIND})

    assert "authorization" not in answer.request.headers
    assert members(answer.content)["stdout.log"].decode().splitlines() == ["cat in/*.csv; ls in" + name]


def test_args_and_exec_come_as_fields(stage: AgentStage, job_id: str) -> None:
    answer = stage.run(job_id, "unused", exec="echo", args='["one", "two words"]')

    assert members(answer.content)["stdout.log"] == b"one two words\n"


def test_a_program_that_fails_is_500_with_its_code_and_its_archive_stays(stage: AgentStage, job_id: str) -> None:
    answer = stage.run(job_id, "echo why >&2; exit 3")

    assert code_of(answer) == (500, "PROGRAM_FAILED")
    assert answer.json()["error"]["details"] == {"job_id": job_id, "exit_code": 3, "error_code": "EXIT_CODE"}
    kept = stage.http.get(f"/result/{job_id}")
    assert (kept.status_code, kept.headers["tasuki-outcome"]) == (200, "failed")
    assert members(kept.content)["stderr.log"] == b"why\n"
    assert stage.state(job_id) == "failed"


def test_a_program_past_its_time_is_504_and_its_whole_tree_is_gone(stage: AgentStage, job_id: str, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    answer = stage.run(job_id, f"setsid sleep 60 & echo $! > {pid_file}; wait", timeout_s="0.3")

    assert code_of(answer) == (504, "TIMED_OUT")
    assert stage.state(job_id) == "timed_out"
    assert not alive(pid_file.read_text().strip())
    assert stage.http.get(f"/result/{job_id}").headers["tasuki-outcome"] == "timed_out"


def test_a_program_that_this_node_lacks_is_a_5xx_without_an_outcome_and_leaves_nothing(stage: AgentStage, job_id: str) -> None:
    answer = stage.run(job_id, exec="missing")

    assert code_of(answer) == (500, "PROGRAM_NOT_FOUND")
    assert stage.state(job_id) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"args": '["x"]'}, "takes no arguments"),
        ({"args": "x"}, "JSON list"),
        ({"timeout_s": "0"}, "above 0"),
        ({"color": "blue"}, "'color'"),
    ],
)
def test_a_form_that_can_never_work_is_400_and_leaves_nothing(stage: AgentStage, job_id: str, fields, words: str) -> None:
    answer = stage.run(job_id, **fields)

    assert code_of(answer) == (400, "INVALID_PAYLOAD")
    assert words in answer.json()["error"]["message"]
    assert not [name for name in stage.files() if job_id in name or name.startswith("incoming")]


def test_an_exec_that_only_another_node_may_have_has_a_code_of_its_own(stage: AgentStage, job_id: str) -> None:
    answer = stage.run(job_id, exec="other")

    assert code_of(answer) == (400, "EXEC_NOT_ALLOWED")
    assert "'other' is not allowed here" in answer.json()["error"]["message"]
    assert not [name for name in stage.files() if job_id in name or name.startswith("incoming")]


# ---------------------------------------------------------------------------------------------------- the same id again


def test_a_done_job_is_answered_from_its_folder(stage: AgentStage, job_id: str, tmp_path: Path) -> None:
    script = f"date +%N; echo x >> {tmp_path}/ran"
    first = stage.run(job_id, script)

    again, announced = stage.run(job_id, script), stage.run(job_id, script, query=f"?input={hash_of(script)}")

    assert first.content == again.content == announced.content
    assert again.headers["tasuki-cache"] == announced.headers["tasuki-cache"] == "hit"
    assert (tmp_path / "ran").read_text() == "x\n"


def test_the_same_files_in_another_order_are_another_input(stage: AgentStage, job_id: str) -> None:
    one, two = ("one.sh", b"echo one"), ("two.sh", b"echo two")
    stage.post(job_id, dict([one, two]))

    assert code_of(stage.post(job_id, dict([two, one]))) == (409, "CONFLICT")
    assert stage.post(job_id, dict([one, two])).headers["tasuki-cache"] == "hit"


def test_a_done_job_with_another_input_is_409(stage: AgentStage, job_id: str) -> None:
    stage.run(job_id, "true")

    assert code_of(stage.run(job_id, "echo other")) == (409, "CONFLICT")
    assert code_of(stage.run(job_id, "true", exec="true")) == (409, "CONFLICT")
    assert code_of(stage.run(job_id, "true", query="?input=" + "0" * 64)) == (409, "CONFLICT")


def test_of_two_requests_with_one_id_one_runs_and_both_get_the_same_bytes(stage: AgentStage, job_id: str, tmp_path: Path) -> None:
    script = HOLD.format(gate=tmp_path / "gate")
    first = stage.begin(job_id, script)
    until(lambda: stage.state(job_id) == "running")

    second = stage.run(job_id, script)

    assert code_of(second) == (423, "RUNNING")
    assert second.headers["retry-after"] == "1"
    assert second.json()["error"]["details"].items() >= {"job_id": job_id, "node": "n1"}.items()
    assert code_of(stage.http.get(f"/result/{job_id}")) == (423, "RUNNING")
    (tmp_path / "gate").touch()
    assert first.answer().content == stage.run(job_id, script).content == stage.http.get(f"/result/{job_id}").content


def test_a_running_job_with_another_input_is_409_where_both_are_known(stage: AgentStage, job_id: str, tmp_path: Path) -> None:
    script = HOLD.format(gate=tmp_path / "gate")
    first = stage.begin(job_id, script)
    until(lambda: stage.http.get(f"/jobs/{job_id}").json().get("input"))

    assert code_of(stage.run(job_id, script, query="?input=" + "0" * 64)) == (409, "CONFLICT")
    assert code_of(stage.run(job_id, script, query=f"?input={hash_of(script)}")) == (423, "RUNNING")
    (tmp_path / "gate").touch()
    assert first.answer().status_code == 200


def test_a_failed_job_runs_again_also_with_another_input(stage: AgentStage, job_id: str) -> None:
    assert stage.run(job_id, "exit 1").status_code == 500

    answer = stage.run(job_id, "echo better")

    assert answer.status_code == 200
    assert report(answer.content)["attempt"] == 2
    assert stage.state(job_id) == "done"


def test_an_upload_that_is_not_what_it_says_is_refused(stage: AgentStage, job_id: str) -> None:
    answer = stage.run(job_id, "true", query="?input=" + "0" * 64)

    assert code_of(answer) == (400, "INVALID_PAYLOAD")
    assert stage.state(job_id) is None


# ---------------------------------------------------------------------------------------------------- looking, removing


def test_a_running_job_tells_its_progress(stage: AgentStage, job_id: str, tmp_path: Path) -> None:
    first = stage.begin(job_id, f"echo progress 0.5 half way >&3; {HOLD.format(gate=tmp_path / 'gate')}")

    told = until(lambda: (answer := stage.http.get(f"/jobs/{job_id}").json()).get("progress") and answer)

    assert told["progress"] == {"fraction": 0.5, "message": "half way"}
    assert {"state": "running", "exec": "sh", "node": "n1", "ended_at": None, "exit_code": None}.items() <= told.items()
    (tmp_path / "gate").touch()
    assert first.answer().status_code == 200


def test_delete_ends_a_running_job_and_its_whole_tree(stage: AgentStage, job_id: str, tmp_path: Path) -> None:
    first = stage.begin(job_id, f"setsid sleep 60 & echo $! > {tmp_path}/pid; wait")
    pid = until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())

    removed = stage.http.delete(f"/jobs/{job_id}")

    assert removed.json() == {"job_id": job_id, "state": "running", "removed": True}
    assert code_of(first.answer()) == (409, "CANCELED")
    assert not alive(pid)
    assert stage.state(job_id) is None
    assert not [name for name in stage.files() if job_id in name]


def test_delete_removes_an_ended_job(stage: AgentStage, job_id: str) -> None:
    stage.run(job_id, "true")

    assert stage.http.delete(f"/jobs/{job_id}").json()["state"] == "done"
    assert code_of(stage.http.get(f"/result/{job_id}")) == (404, "NOT_FOUND")
    assert code_of(stage.http.delete(f"/jobs/{job_id}")) == (404, "NOT_FOUND")


def test_a_client_that_leaves_does_not_end_its_job(stage: AgentStage, job_id: str, tmp_path: Path) -> None:
    from tests.agent.stage import form, head, part

    body = form(part("file", HOLD.format(gate=tmp_path / "gate").encode(), "job.sh"))
    with stage.raw() as sock:
        sock.sendall(head(job_id, len(body)) + body)
        until(lambda: stage.state(job_id) == "running")

    (tmp_path / "gate").touch()

    until(lambda: stage.state(job_id) == "done")
    assert members(stage.http.get(f"/result/{job_id}").content)["stdout.log"] == b"held\n"


def test_health_capacity_and_metrics(stage: AgentStage, job_id: str) -> None:
    stage.run(job_id, "true")
    stage.run(job_id, "true")

    assert stage.http.get("/health").content == b'"ok"'
    assert stage.http.get("/capacity").json() == {"running": 0, "limit": 4}
    metrics = stage.http.get("/metrics").text
    for line in ('tasuki_agent_jobs_total{outcome="succeeded"}', "tasuki_agent_running 0.0", "tasuki_agent_slots 4.0"):
        assert line in metrics
    hits = next(line for line in metrics.splitlines() if line.startswith("tasuki_agent_cache_hits_total"))
    assert float(hits.split()[1]) >= 1


def test_every_line_of_a_job_has_its_id(stage: AgentStage, job_id: str) -> None:
    import io
    import logging

    from tasuki.agent.refusals import WithContext
    from tasuki.cli.process import JsonFormatter

    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(WithContext("n1"))
    logger = logging.getLogger("tasuki.agent")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        stage.run(job_id, "true")
    finally:
        logger.removeHandler(handler)

    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert len(lines) == 2
    assert {line["job_id"] for line in lines} == {job_id}
    assert {line["node"] for line in lines} == {"n1"}
