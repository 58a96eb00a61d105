"""`submit`, `status`, `list`, `cancel`, `explain`, `retry`, `result`, `logs`: jobs by their ids."""

import json
import os
import re
import signal
import subprocess
import time
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

from tasuki.cli.command import Destination
from tasuki.cli.connect import with_client
from tasuki.cli.jobs import progress_of
from tasuki.client.aio import AsyncClient
from tasuki.core.job import JobSpec
from tests.cli.commands import DEADLINE_S, TASUKI, Running, User, read_fifo
from tests.support.processes import start_server
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

Served = tuple[User, Running]


def test_a_submitted_job_is_told_by_its_id_and_its_result_can_be_had_later(served: Served) -> None:
    user, _ = served
    done = user.run("submit", "--job-id", "later", "echo", "hello")

    assert (done.stdout, done.returncode) == ("later\n", 0)
    saved = user.json("result", "--json", "later", "-o", "later.zip")
    assert (saved["state"], saved["path"]) == ("SUCCEEDED", "later.zip")
    with zipfile.ZipFile(user.home / "later.zip") as archive:
        assert archive.read("stdout.log") == b"hello\n"


def test_a_job_that_nobody_starts_in_time_is_skipped_and_says_why(served: Served) -> None:
    user, _ = served
    words = ("--subject", "nobody.here", "--not-after", "+0.5", "--json", "-")

    done = user.run("submit", "--job-id", "late", "--wait", *words)

    assert (json.loads(done.stdout)["state"], done.returncode) == ("SKIPPED", 1)
    told = user.json("explain", "--json", "late")
    assert (told["facts"]["why"], [entry["kind"] for entry in told["story"]]) == ("TOO_LATE", ["skipped"])
    assert user.run("run", *words).returncode == 125


def test_a_jobs_own_exit_codes_decide_what_is_tried_again(served: Served) -> None:
    user, _ = served
    words = ("submit", "--wait", "--json", "--retries", "5")

    user.run(*words, "--job-id", "hopeless", "--permanent-exit", "3,4", "sh", "-c", "exit 3")
    user.run(*words, "--job-id", "other-code", "--retry-exit", "75", "sh", "-c", "exit 3")

    for job_id in ("hopeless", "other-code"):
        [view] = user.json("status", "--json", job_id)
        assert (view["state"], view["attempt"]) == ("FAILED", 1)


def test_asking_again_with_the_same_id_says_that_it_existed(served: Served) -> None:
    user, _ = served
    words = ("submit", "--json", "--job-id", "twice", "true")

    assert user.json(*words)["existed"] is False
    assert user.json(*words)["existed"] is True


def test_an_array_has_one_job_per_index(served: Served) -> None:
    user, _ = served
    told = user.json("submit", "--json", "--array", "1-3", "--job-id", "sweep", "--wait", "echo", "seed {i}")

    assert told == {"array_id": "sweep", "count": 3, "states": {"SUCCEEDED": 3}}
    assert user.run("logs", "sweep.2").stdout == "seed 2\n"
    elements = user.json("list", "--json", "--array", "sweep")["jobs"]
    assert {view["job_id"]: view["header_names"] for view in elements} == {f"sweep.{n}": ["array_index"] for n in (1, 2, 3)}
    assert user.json("status", "--json", "sweep.2")[0]["headers"] == {"array_index": "2"}


def test_each_line_is_a_job_and_is_never_split(served: Served) -> None:
    user, _ = served
    done = user.run(
        "submit", "--each-line", "-", "--job-id", "lines", "--wait", "--quiet", "printf", "<%s>", input="a b\n\n$HOME\n"
    )

    assert (done.stdout, done.returncode) == ("lines\n", 0)
    assert user.run("logs", "lines.1").stdout == "<a b>"
    assert user.run("logs", "lines.3").stdout == "<$HOME>"


def test_a_broadcast_runs_on_each_worker_and_its_result_is_the_ledger(served: Served) -> None:
    user, _ = served
    [worker_id] = {worker["worker_id"] for worker in user.json("workers", "--json")}
    told = user.json("submit", "--json", "--broadcast", "--subject", "render.>", "--job-id", "keys", "--wait", "echo", "turned")
    assert {name: did["state"] for name, did in told["ledger"].items()} == {worker_id: "SUCCEEDED"}

    assert user.json("result", "--json", "keys")["ledger"] == told["ledger"]
    assert f"{worker_id}  SUCCEEDED" in user.run("status", "keys").stdout
    assert user.run("wait", "keys").returncode == 0
    assert user.json("status", "--json", f"keys.{worker_id}")[0]["subject"] == f"render.@{worker_id}"
    refused = user.run("submit", "--broadcast", "true")
    assert "--subject PATTERN" in refused.stderr


def test_the_inputs_of_an_array_reach_every_element(served: Served) -> None:
    user, _ = served
    (user.home / "shared.txt").write_text("shared\n")
    words = ["submit", "--json", "--array", "1-2", "--job-id", "with-input", "--wait", "--file", "shared.txt"]

    assert user.json(*words, "cat", "in/shared.txt")["states"] == {"SUCCEEDED": 2}
    assert user.run("logs", "with-input.2").stdout == "shared\n"


def test_each_line_can_name_the_input_of_its_job(served: Served) -> None:
    user, _ = served
    (user.home / "a b.csv").write_text("one\n")
    (user.home / "c.csv").write_text("two\n")
    words = ["submit", "--each-line", "-", "--file", "{line}", "--job-id", "folder", "--wait", "--quiet", "sh", "-c", "cat in/*"]

    assert user.run(*words, input="a b.csv\nc.csv\n").returncode == 0
    assert [user.run("logs", f"folder.{n}").stdout for n in (1, 2)] == ["one\n", "two\n"]


def test_no_job_is_submitted_if_one_of_the_named_inputs_is_missing(served: Served) -> None:
    user, _ = served
    (user.home / "there.csv").touch()

    done = user.run(
        "submit", "--each-line", "-", "--file", "{line}", "--job-id", "half", "true", input="there.csv\nnot-there.csv\n"
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert "the input file 'not-there.csv' cannot be read: No such file or directory" in done.stderr
    assert user.json("list", "--json", "--array", "half")["jobs"] == []


def test_only_the_failed_elements_of_an_array_are_set_going_again(served: Served) -> None:
    user, _ = served
    flag = user.home / "repaired"
    script = f'test "$0" != 2 || test -e {flag}'
    done = user.run("submit", "--array", "1-3", "--job-id", "mend", "--retries", "0", "--wait", "sh", "-c", script, "{i}")
    assert done.returncode == 1

    flag.touch()
    answers = user.json("retry", "--json", "mend", "--only-failed")

    assert list(answers) == ["mend.2"]
    assert user.json("result", "--json", "mend.2")["state"] == "SUCCEEDED"
    assert user.json("status", "--json", "mend.1")[0]["generation"] == 0


def test_a_job_that_has_not_ended_cannot_be_set_going_again(served: Served) -> None:
    user, _ = served
    user.run("submit", "--job-id", "hold", "sleep", "600")

    again = user.run("retry", "hold")
    user.run("cancel", "hold")

    assert again.returncode == 1
    assert "not changed" in again.stdout


def test_a_running_job_is_canceled_by_its_worker(served: Served, tmp_path: Path) -> None:
    user, _ = served
    os.mkfifo(tmp_path / "started")
    user.run("submit", "--job-id", "stop-me", "sh", "-c", f"echo go > {tmp_path}/started; exec sleep 600")
    read_fifo(tmp_path / "started")

    answer = user.json("cancel", "--json", "stop-me", "--reason", "no longer needed")

    assert answer["stop-me"]["requested"] is True
    ended = user.run("result", "--json", "stop-me")
    assert (json.loads(ended.stdout)["state"], ended.returncode) == ("CANCELED", 1)


def test_logs_of_a_running_job_are_what_it_has_written(served: Served, tmp_path: Path) -> None:
    user, _ = served
    os.mkfifo(tmp_path / "started")
    script = f"echo so far; echo trouble >&2; echo go > {tmp_path}/started; exec sleep 600"
    user.run("submit", "--job-id", "still-running", "sh", "-c", script)
    read_fifo(tmp_path / "started")

    done = user.run("logs", "still-running")
    user.run("cancel", "still-running")

    assert (done.returncode, done.stdout, done.stderr) == (0, "so far\n", "trouble\n")


def test_logs_are_followed_to_the_end_of_the_job(served: Served, tmp_path: Path) -> None:
    user, _ = served
    script = f"echo first; until [ -e {tmp_path}/go ]; do sleep 0.02; done; echo last; exit 3"
    user.run("submit", "--job-id", "followed", "--retries", "0", "sh", "-c", script)
    following = user.start("logs", "-f", "followed")
    assert following.stdout is not None

    first = following.stdout.readline()
    (tmp_path / "go").touch()
    rest, errors = following.communicate(timeout=DEADLINE_S)

    assert (first, rest, errors, following.returncode) == ("first\n", "last\n", "", 0)


def test_ctrl_c_ends_following_and_not_the_job(served: Served) -> None:
    user, _ = served
    user.run("submit", "--job-id", "left-alone", "sh", "-c", "echo first; exec sleep 600")
    following = user.start("logs", "-f", "left-alone")
    assert following.stdout is not None
    following.stdout.readline()
    until(lambda: user.json("status", "--json", "left-alone")[0]["state"] == "RUNNING", DEADLINE_S, "its start is recorded")

    following.send_signal(signal.SIGINT)
    _, errors = following.communicate(timeout=DEADLINE_S)
    state = user.json("status", "--json", "left-alone")[0]["state"]
    user.run("cancel", "left-alone")

    assert (following.returncode, errors, state) == (130, "", "RUNNING")


def test_pieces_of_a_followed_log_are_lines_of_json(served: Served) -> None:
    user, _ = served
    user.run("submit", "--wait", "--job-id", "pieces", "printf", "0123456789")

    done = user.run("logs", "-f", "--json", "--stream", "stdout", "--tail", "4", "pieces")

    assert json.loads(done.stdout) == {
        "job_id": "pieces",
        "stream": "stdout",
        "attempt": 1,
        "offset": 6,
        "cut_bytes": 0,
        "data": "6789",
    }


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--stream", "stdlog"), "--stream must be"),
        (("--offset", "-1"), "must be 0 or more"),
        (("--tail", "-1"), "must be 0 or more"),
        (("--tail", "1", "--offset", "1"), "choose one"),
    ],
)
def test_impossible_options_of_logs_are_refused(served: Served, options: tuple[str, ...], says: str) -> None:
    user, _ = served

    done = user.run("logs", *options, "any")

    assert (done.returncode, says in done.stderr) == (2, True)


def test_logs_keep_the_two_streams_apart(served: Served) -> None:
    user, _ = served
    user.run("submit", "--wait", "--job-id", "streams", "sh", "-c", "echo out; echo err >&2")

    assert (user.run("logs", "streams").stdout, user.run("logs", "streams").stderr) == ("out\n", "err\n")
    only = user.run("logs", "--stream", "stderr", "streams")
    assert (only.stdout, only.stderr) == ("", "err\n")
    assert user.json("logs", "--json", "streams") == {"job_id": "streams", "stdout": "out\n", "stderr": "err\n"}


def test_a_result_can_be_unpacked_or_written_to_stdout(served: Served) -> None:
    user, _ = served
    user.run("submit", "--wait", "--job-id", "unpack", "sh", "-c", 'echo kept > "$TASUKI_OUT/kept.txt"')

    assert user.run("result", "--extract", "unpacked", "unpack").returncode == 0
    assert (user.home / "unpacked/out/kept.txt").read_text() == "kept\n"
    assert user.run("result", "--stdout", "unpack").stdout.startswith("PK")


@pytest.mark.parametrize(("named", "job_id"), [("lacks", "lacks"), ("lacks-some", "lacks-some.2")], ids=["job", "array"])
def test_a_result_says_how_many_outputs_it_lacks(served: Served, named: str, job_id: str) -> None:
    user, _ = served
    script = 'ln -s x "$TASUKI_OUT/link"'
    user.run("submit", "--job-id", "lacks", "sh", "-c", script)
    user.run("submit", "--array", "1-2", "--job-id", "lacks-some", "sh", "-c", f"[ {{i}} = 1 ] || {script}")

    done = user.run("result", "-o", f"saved-{named}", named)

    assert (done.returncode, done.stderr.count("not in the result")) == (125, 1)
    assert f"job {job_id}: 1 output is not in the result" in done.stderr


def test_the_wait_for_a_result_has_an_end(served: Served) -> None:
    user, _ = served
    user.run("submit", "--job-id", "slow", "sleep", "600")
    done = user.run("result", "--timeout", "0.2", "slow")
    user.run("cancel", "slow")

    assert done.returncode == 5
    assert done.stderr.startswith("tasuki: DEADLINE: ")


def test_pages_follow_each_other_without_gap_or_repeat(served: Served) -> None:
    user, _ = served
    user.run("submit", "--array", "1-5", "--job-id", "pages", "--wait", "true")
    first = user.json("list", "--json", "--array", "pages", "--limit", "3")
    second = user.json("list", "--json", "--array", "pages", "--limit", "3", "--cursor", first["cursor"])

    ids = [view["job_id"] for view in first["jobs"] + second["jobs"]]
    assert ids == [f"pages.{index}" for index in (5, 4, 3, 2, 1)]
    assert second["cursor"] is None


def test_a_list_can_be_filtered_and_reduced_to_ids(served: Served) -> None:
    user, _ = served
    user.run("submit", "--array", "1-2", "--job-id", "mixed", "--retries", "0", "--wait", "test", "{i}", "=", "1")

    done = user.run("list", "--quiet", "--array", "mixed", "--state", "failed")

    assert done.stdout == "mixed.2\n"


def test_explain_tells_why_a_job_failed(served: Served) -> None:
    user, _ = served
    user.run("submit", "--wait", "--job-id", "explained", "--retries", "0", "false")
    told = user.json("explain", "--json", "explained")

    assert told["state"] == "FAILED"
    assert "exited with code 1" in told["because"][0]
    assert "exited with code 1" in user.run("explain", "explained").stdout


@pytest.mark.parametrize("word", ["status", "cancel", "explain", "retry", "result", "logs"])
def test_an_unknown_id_is_an_error_of_its_own(served: Served, word: str) -> None:
    user, _ = served
    done = user.run(word, "--json", "no-such-job")

    assert done.returncode == 3
    assert json.loads(done.stderr)["error"]["code"] == "NOT_FOUND"
    assert done.stdout == ""


@pytest.mark.parametrize(
    "words",
    [
        ("list", "--state", "LOST"),
        ("list", "--limit", "0"),
        ("submit", "--array", "9-1", "true"),
        ("submit", "--array", "1-2", "--each-line", "-", "true"),
        ("submit", "--file", "no-such-file", "true"),
        ("submit", "--env", "plain", "true"),
        ("retry",),
        ("result", "x", "--stdout", "-o", "y"),
        ("status",),
        ("stats", "--interval", "0"),
    ],
)
def test_what_can_never_work_is_a_usage_error(served: Served, words: tuple[str, ...]) -> None:
    user, _ = served
    done = user.run(*words)

    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_waiting_leaves_without_a_traceback(served: Served, tmp_path: Path) -> None:
    user, _ = served
    os.mkfifo(tmp_path / "started")
    script = f"echo go > {tmp_path}/started; exec sleep 600"
    process = user.start("submit", "--wait", "--job-id", "abandoned", "sh", "-c", script)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("submitted job abandoned")  # the program may start sooner
    read_fifo(tmp_path / "started")

    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    user.run("cancel", "abandoned")

    assert process.returncode == 130
    assert "tasuki wait abandoned" in stderr
    assert "Traceback" not in stderr


def test_stats_count_the_jobs_and_name_the_workers(served: Served) -> None:
    user, _ = served
    user.run("submit", "--wait", "--subject", "counted.here", "true")
    told = user.json("stats", "--json")

    assert told["groups"]["counted"]["succeeded"] == 1
    assert [worker["patterns"] for worker in told["workers"]] == [[">"]]
    assert "counted" in user.run("stats").stdout


def test_stats_of_groups_tell_what_they_did_of_late(served: Served) -> None:
    user, _ = served
    user.run("submit", "--wait", "--subject", "lately.here", "true")

    told = user.json("stats", "--groups", "--json")
    shown = user.run("stats", "--groups", "--last", "5m", "--limit", "1").stdout

    row = told["groups"]["lately"]
    assert (row["submitted"], row["finished"], row["dead"], row["queued"]) == (1, 1, 0, 0)
    assert 0 < row["latency_p50_s"] <= row["latency_p99_s"]
    assert shown.splitlines()[0].split()[:4] == ["GROUP", "QUEUED", "RUNNING", "SUBMITTED"]


@pytest.mark.parametrize("options", [(), ("--groups", "--last", "1h")], ids=["jobs", "groups"])
def test_stats_are_told_again_and_again_until_ctrl_c(served: Served, options: tuple[str, ...]) -> None:
    user, _ = served
    user.run("submit", "--wait", "--subject", "again.here", "true")
    process = user.start("stats", *options, "--watch", "--interval", "0.05", "--json")
    assert process.stdout is not None
    seen = [json.loads(process.stdout.readline()) for _ in range(3)]

    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=DEADLINE_S)

    assert [told["groups"]["again"]["finished" if options else "succeeded"] for told in seen] == 3 * [
        seen[0]["groups"]["again"]["finished" if options else "succeeded"]
    ]
    assert (process.returncode, stderr) == (130, "")


def test_stats_work_with_thousands_of_groups(tmp_path: Path) -> None:
    names = [f"group-{number}" for number in range(2_100)]
    later = time.time() + 3600.0
    with start_server(tmp_path) as server, server.client() as client:
        client.submit_many([JobSpec(job_id=name, subject=f"{name}.x", not_before=later) for name in names])

        first = json.loads(server.tasuki("stats", "--json").stdout)["groups"]
        everything = json.loads(server.tasuki("stats", "--limit", "3000", "--json").stdout)["groups"]
        lately = json.loads(server.tasuki("stats", "--groups", "--limit", "3000", "--json").stdout)["groups"]

    assert (len(first), first["(other)"]["pending"]) == (1_001, 1_100)
    assert set(everything) == set(names)
    assert set(names) <= set(lately)
    assert sum(row["submitted"] for row in lately.values()) == len(names)  # past a number of groups a minute's others are one


def test_of_several_jobs_those_that_are_known_are_shown(served: Served) -> None:
    user, _ = served
    user.run("submit", "--wait", "--job-id", "known", "true")

    done = user.run("status", "known", "unknown")

    assert done.returncode == 3
    assert done.stdout.startswith("known  SUCCEEDED")
    assert "'unknown'" in done.stderr


def test_a_canceled_job_that_had_ended_says_so(served: Served) -> None:
    user, _ = served
    user.run("submit", "--wait", "--job-id", "over", "true")

    assert user.run("cancel", "over").stdout == "over  had already ended: SUCCEEDED\n"


# ---------------------------------------------------------------------------------------------------- an id that names an array


@pytest.fixture(scope="module")
def array(served: Served) -> User:
    """The array `parts`: of five jobs, numbers 2 and 4 fail with one reason and 5 with another."""
    user, _ = served
    script = 'echo "part $0"; case $0 in 2|4) exit 3;; 5) exit 4;; esac; echo "$0" > "$TASUKI_OUT/number"'
    done = user.run("submit", "--array", "1-5", "--job-id", "parts", "--retries", "0", "--wait", "sh", "-c", script, "{i}")

    assert done.returncode == 1
    first, *reasons = done.stdout.splitlines()
    assert first == "parts  5 jobs, 3 FAILED, 2 SUCCEEDED"
    assert reasons == [
        "  2 FAILED: EXIT_CODE: exec 'sh' exited with code 3  (as parts.2; see: tasuki logs parts.2)",
        "  1 FAILED: EXIT_CODE: exec 'sh' exited with code 4  (as parts.5; see: tasuki logs parts.5)",
    ]
    return user


def test_the_status_of_an_array_counts_states_and_reasons(array: User) -> None:
    done = array.run("status", "parts", "parts.1", "unknown")

    assert done.returncode == 3
    lines = done.stdout.splitlines()
    assert lines[0] == "parts  array of 5 jobs: 3 FAILED, 2 SUCCEEDED"
    assert lines[1].startswith("  2 FAILED: EXIT_CODE: exec 'sh' exited with code 3")
    assert "parts.1  SUCCEEDED" in lines
    assert "'unknown'" in done.stderr
    [told] = array.json("status", "--json", "parts")
    assert (told["count"], told["states"], told["left_s"]) == (5, {"FAILED": 3, "SUCCEEDED": 2}, None)
    assert [(reason["count"], reason["example"]) for reason in told["reasons"]] == [(2, "parts.2"), (1, "parts.5")]


def test_the_explanation_of_an_array_has_an_example_of_each_state(array: User) -> None:
    done = array.run("explain", "parts")

    assert done.stdout.startswith("parts  array of 5 jobs: 3 FAILED, 2 SUCCEEDED\n")
    assert "parts.2  FAILED" in done.stdout
    assert "parts.4  FAILED" not in done.stdout


def test_logs_and_results_of_an_array_are_those_of_all_its_jobs(array: User) -> None:
    logs = array.run("logs", "parts")
    saved = array.run("result", "parts", "-o", "all")
    unpacked = array.run("result", "parts", "--extract", "unpacked-parts")

    assert logs.stdout == "".join(f"part {number}\n" for number in range(1, 6))
    assert "==> parts.2\n" in logs.stderr
    assert (saved.returncode, unpacked.returncode) == (1, 1)
    assert saved.stdout.startswith("all  5 results, ")
    assert sorted(path.name for path in (array.home / "all").iterdir()) == [f"parts.{number}.zip" for number in range(1, 6)]
    assert (array.home / "unpacked-parts/parts.3/out/number").read_text() == "3\n"
    assert "is an array; name one of its jobs" in array.run("result", "--stdout", "parts").stderr


def test_jobs_and_arrays_are_waited_for(array: User) -> None:
    array.run("submit", "--array", "1-2", "--job-id", "good", "sleep", "0.3")
    array.run("submit", "--job-id", "single", "sleep", "0.3")

    good = array.run("wait", "good", "single")
    bad = array.run("wait", "parts", "single")

    assert (good.returncode, good.stdout) == (0, "good  array of 2 jobs: 2 SUCCEEDED\nsingle  SUCCEEDED\n")
    assert (bad.returncode, bad.stdout.splitlines()[0]) == (1, "parts  array of 5 jobs: 3 FAILED, 2 SUCCEEDED")
    assert array.run("wait", "single", "nobody").returncode == 3


def test_a_wait_has_an_end_and_the_jobs_go_on(served: Served) -> None:
    user, _ = served
    user.run("submit", "--job-id", "long", "sleep", "600")
    done = user.run("wait", "--timeout", "0.2s", "long")
    state = user.json("status", "--json", "long")[0]["state"]
    user.run("cancel", "long")

    assert (done.returncode, state in ("ASSIGNED", "RUNNING")) == (5, True)
    assert "has not ended within 0.2s" in done.stderr


def test_a_wait_for_many_jobs_has_an_end_that_counts_them(served: Served) -> None:
    user, _ = served
    user.run("submit", "--job-id", "longs", "--array", "1-3", "sleep", "600")
    done = user.run("wait", "--timeout", "0.2s", "longs")
    user.run("cancel", "longs")

    assert (done.returncode, done.stderr) == (5, "tasuki: DEADLINE: 3 of 3 jobs have not ended within 0.2s; they go on\n")


def test_a_command_says_itself_why_a_job_waits(served: Served) -> None:
    async def is_told(client: AsyncClient) -> bool:
        return client.hinted

    user, _ = served
    assert with_client(Destination(data=user.data), is_told), "a warning would be in the output of commands that are to be quiet"


def test_jobs_of_an_array_are_canceled_together_and_those_that_are_found_beside_unknown_ones(served: Served) -> None:
    user, _ = served
    user.run("submit", "--array", "1-3", "--job-id", "endless", "sleep", "600")
    user.run("submit", "--job-id", "alone", "sleep", "600")

    done = user.run("cancel", "endless", "nobody", "alone")

    assert done.returncode == 3
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["endless.1", "endless.2", "endless.3", "alone"]
    assert done.stderr == "tasuki: NOT_FOUND: there is no job 'nobody', or it is not yours\n"
    assert user.run("wait", "endless", "alone").returncode == 1
    assert user.json("status", "--json", "endless")[0]["states"] == {"CANCELED": 3}
    assert user.run("cancel", "endless").stdout == "all jobs had already ended\n"


def test_a_terminal_shows_how_far_an_array_and_a_transfer_are(served: Served) -> None:
    user, _ = served
    (user.home / "large.bin").write_bytes(os.urandom(3_000_000))
    script = 'test $0 = 1 || sleep 3; cat in/large.bin > "$TASUKI_OUT/copy"; exit $0'
    shown = b""
    for words in (
        [
            "submit",
            "--wait",
            "--array",
            "1-2",
            "--file",
            "large.bin",
            "--retries",
            "0",
            "--job-id",
            "far",
            "sh",
            "-c",
            script,
            "{i}",
        ],
        ["result", "far.1"],
    ):
        controller, terminal = os.openpty()
        process = subprocess.Popen([*TASUKI, *words], cwd=user.home, env=user.environ, stdin=subprocess.DEVNULL, stderr=terminal)
        os.close(terminal)
        with suppress(OSError):  # the end of a terminal
            while piece := os.read(controller, 10_000):
                shown += piece
        assert process.wait(DEADLINE_S) == 1
        os.close(controller)

    assert re.search(rb"uploading large.bin: [\d.]+[kM]B of 3.00MB", shown)
    assert re.search(rb"1 of 2 jobs have ended, 1 of them without success, 1 running, about [\d.]+s left", shown)
    assert re.search(rb"downloading the result: [\d.]+[kM]B of [\d.]+MB", shown)


def test_an_unknown_array_cannot_be_set_going_again(served: Served) -> None:
    user, _ = served
    done = user.run("retry", "--array", "nope")

    assert done.returncode == 3
    assert done.stderr.startswith("tasuki: NOT_FOUND: ")


def test_a_result_goes_to_stdout_with_a_dash(served: Served) -> None:
    user, _ = served
    user.run("submit", "--wait", "--job-id", "dashed", "true")

    done = user.run("result", "dashed", "-o", "-")

    assert done.stdout.startswith("PK")
    assert not (user.home / "-").exists()


def test_who_stops_waiting_is_told_how_to_find_the_jobs(served: Served, tmp_path: Path) -> None:
    user, _ = served
    os.mkfifo(tmp_path / "started")
    script = f"echo go > {tmp_path}/started; exec sleep 600"
    process = user.start("submit", "--array", "1-1", "--job-id", "awaited", "--wait", "sh", "-c", script)
    read_fifo(tmp_path / "started")
    assert process.stderr is not None
    told = process.stderr.readline()

    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    user.run("cancel", "awaited.1")

    assert told == "submitted array awaited (1 jobs); waiting for the end\n"
    assert process.returncode == 130
    assert "tasuki cancel awaited" in stderr


@pytest.mark.parametrize(
    ("state", "progress", "shown"),
    [("RUNNING", 0.425, "42%"), ("FAILED", 0.5, "50%"), ("RUNNING", None, None), ("SUCCEEDED", 0.9, None)],
)
def test_progress_is_shown_of_what_is_not_done(state: str, progress: float | None, shown: str | None) -> None:
    assert progress_of({"state": state, "progress": progress}) == shown
