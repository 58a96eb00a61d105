"""`tasuki run`: as if the program had been started here."""

import json
import os
import re
import signal
import subprocess
import zipfile
from pathlib import Path

import pytest

from tasuki import Client
from tasuki.cli import connect
from tasuki.errors import Forbidden
from tests.cli.commands import DEADLINE_S, TASUKI, Running, User, read_fifo, running
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

Served = tuple[User, Running]


def test_with_nothing_running_a_command_just_runs(user: User) -> None:
    done = user.run_process("run", "echo", "hello")

    assert (done.stdout, done.stderr, done.returncode) == ("hello\n", "", 0)


def test_outputs_that_are_not_in_the_result_are_told(user: User) -> None:
    words = ("--job-id", "lacks", "sh", "-c", 'ln -s x "$TASUKI_OUT/link"')
    told, done = user.run_process("run", "--json", *words), user.run_process("run", *words)

    assert (told.returncode, json.loads(told.stdout)["left_out"], done.returncode) == (125, 1, 125)
    assert "1 output is not in the result" in done.stderr


def test_the_embedded_server_leaves_after_its_last_client(user: User) -> None:
    user.run_process("run", "true")

    until(lambda: not (user.data / "socket").exists(), DEADLINE_S, "the socket is gone")
    until(lambda: not (user.data / "tasuki.sqlite3.owner").read_text(), DEADLINE_S, "the folder has no owner")


def test_the_embedded_server_works_off_what_was_submitted_before_it_leaves(user: User) -> None:
    slow_worker = "import sys, time\nif 'worker' in sys.orig_argv: time.sleep(1.5)\n"  # longer than the server waits for clients
    (user.home / "sitecustomize.py").write_text(slow_worker)
    user.run_process("submit", "--array", "1-3", "--job-id", "batch", "sleep", "0.5", PYTHONPATH=str(user.home))

    until(lambda: not (user.data / "socket").exists(), DEADLINE_S, "the socket is gone")
    views = user.json("status", "--json", *(f"batch.{number}" for number in (1, 2, 3)))
    assert {view["state"] for view in views} == {"SUCCEEDED"}


def test_two_at_once_share_one_embedded_server(user: User) -> None:
    script = "sed -n 's/^PPid:[[:space:]]*//p' /proc/$PPID/status; sleep 1"  # the parent of the keeper

    both = [user.start("run", "sh", "-c", script) for _ in range(2)]
    outputs = [process.communicate(timeout=DEADLINE_S) for process in both]

    assert [process.returncode for process in both] == [0, 0], outputs
    first, second = (stdout.strip() for stdout, _ in outputs)
    assert first.isdigit()
    assert first == second, "the jobs' workers belong to one server"


def test_output_and_exit_code_are_the_jobs_own(served: Served) -> None:
    user, _ = served
    done = user.run_process("run", "sh", "-c", "echo out; echo err >&2; exit 7")

    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 7)


def test_output_comes_while_the_job_runs_and_none_of_it_twice(served: Served, tmp_path: Path) -> None:
    user, _ = served
    script = f"echo first; echo trouble >&2; until [ -e {tmp_path}/go ]; do sleep 0.02; done; echo last; exit 7"
    process = user.start("run", "sh", "-c", script)
    assert process.stdout is not None
    assert process.stderr is not None

    first, trouble = process.stdout.readline(), process.stderr.readline()
    (tmp_path / "go").touch()
    rest, errors = process.communicate(timeout=DEADLINE_S)

    assert (first, trouble) == ("first\n", "trouble\n")
    assert (rest, errors, process.returncode) == ("last\n", "", 7)


def test_without_streaming_the_output_comes_at_the_end(served: Served) -> None:
    user, _ = served
    done = user.run("run", "--no-stream", "sh", "-c", "echo out; echo err >&2; exit 7")

    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 7)


def test_a_job_whose_output_nobody_reads_any_more_is_ended(served: Served) -> None:
    user, _ = served
    process = user.start("run", "--quiet", "--job-id", "unread", "yes")
    assert process.stdout is not None
    process.stdout.readline()

    process.stdout.close()

    assert process.wait(DEADLINE_S) == 141
    assert user.json("status", "--json", "unread")[0]["state"] == "CANCELED"


def test_what_looks_like_our_option_after_the_exec_belongs_to_the_job(served: Served) -> None:
    user, _ = served
    done = user.run("run", "echo", "--json", "--help", "-o", "x", "--", "y")

    assert done.stdout == "--json --help -o x -- y\n"


def test_a_program_that_is_not_there_could_not_run(served: Served) -> None:
    user, _ = served
    done = user.run("run", "no-such-program-anywhere")

    assert done.returncode == 125
    assert "tasuki: PROGRAM_NOT_FOUND: " in done.stderr
    assert "no-such-program-anywhere" in done.stderr


def test_the_time_limit_has_its_own_exit_code(served: Served) -> None:
    user, _ = served
    done = user.run("run", "--timeout", "0.3", "sleep", "60")

    assert done.returncode == 124
    assert "tasuki: TIMED_OUT: " in done.stderr


def test_a_signal_has_the_code_that_a_shell_shows(served: Served) -> None:
    user, _ = served
    done = user.run("run", "sh", "-c", "kill -9 $$")

    assert done.returncode == 128 + signal.SIGKILL


def test_the_same_id_gives_the_stored_result_without_a_second_run(served: Served, tmp_path: Path) -> None:
    user, _ = served
    log = tmp_path / "runs"
    words = ("run", "--job-id", "only-once", "sh", "-c", f"echo ran >> {log}; echo done")

    first, second = user.run(*words), user.run(*words)

    assert (first.stdout, second.stdout) == ("done\n", "done\n")
    assert log.read_text() == "ran\n"
    assert first.stderr == ""
    assert re.fullmatch(
        r"job only-once does not run again: this is its stored result, of \d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d; "
        r"to run it again: tasuki retry only-once\n",
        second.stderr,
    )


def test_the_same_id_by_submit_and_by_run_is_the_same_job_whatever_its_limits(served: Served) -> None:
    user, _ = served
    user.run("submit", "--wait", "--retries", "5", "--job-id", "either-way", "echo", "once")
    done = user.run("run", "--timeout", "60", "--job-id", "either-way", "echo", "once")

    assert (done.stdout, done.returncode) == ("once\n", 0), done.stderr


def test_the_same_id_with_another_body_is_a_conflict_that_names_the_difference(served: Served) -> None:
    user, _ = served
    user.run("run", "--job-id", "taken", "true")
    done = user.run("run", "--job-id", "taken", "true", "more")

    assert done.returncode == 125
    assert "tasuki: CONFLICT: " in done.stderr
    assert "args" in done.stderr


def test_inputs_payload_environment_and_result_file(served: Served, tmp_path: Path) -> None:
    user, _ = served
    (tmp_path / "input.txt").write_text("from the file\n")
    (tmp_path / "payload").write_text("from stdin\n")
    result = tmp_path / "result.zip"
    words = ["run", "--file", str(tmp_path / "input.txt"), "--payload-file", str(tmp_path / "payload"), "--env", "COLOUR=red"]
    done = user.run(*words, "-o", str(result), "sh", "-c", 'cat in/input.txt -; echo "$COLOUR"; echo kept > out/kept.txt')

    assert done.stdout == "from the file\nfrom stdin\nred\n"
    with zipfile.ZipFile(result) as archive:
        assert archive.read("out/kept.txt") == b"kept\n"


# ---------------------------------------------------------------------------------------------------- where it runs


def test_a_job_runs_in_the_current_folder_or_in_that_of_cwd(user: User) -> None:
    (user.home / "input.txt").write_text("here\n")
    (user.home / "study").mkdir()
    script = user.home / "study" / "script.sh"
    script.write_text("#!/bin/sh\npwd -P\n")
    script.chmod(0o755)

    with running(user, "up", "--no-tcp"):
        assert user.run("run", "cat", "input.txt").stdout == "here\n"
        assert user.run("run", "study/script.sh").stdout == f"{user.home}\n"
        assert user.run("run", "--cwd", "study", "./script.sh").stdout == f"{script.parent}\n"
        # Inputs lie in a folder of the job's own, so that is where it runs.
        assert user.run("run", "--file", "input.txt", "./study/script.sh").stdout.startswith(f"{user.data}/runs/")
        assert user.run("submit", "--wait", "--array", "1-2", "./study/script.sh").returncode == 0


def test_the_folder_is_part_of_what_a_job_is(served: Served) -> None:
    user, _ = served
    (user.home / "elsewhere").mkdir()

    first = user.run("run", "--job-id", "placed", "pwd")
    again = user.run("run", "--job-id", "placed", "--cwd", str(user.home), "pwd")
    other = user.run("run", "--job-id", "placed", "--cwd", "elsewhere", "pwd")

    assert (first.stdout, again.stdout) == (f"{user.home}\n",) * 2
    assert other.returncode == 125
    assert "differs in: cwd" in other.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["./missing"], "there is no program './missing' in "),
        (["./plain.txt"], "chmod +x ./plain.txt"),
        (["--cwd", "missing", "true"], "--cwd 'missing' cannot be used: No such file or directory"),
        (["--cwd", "plain.txt", "true"], "--cwd 'plain.txt' cannot be used: Not a directory"),
        (["no-such-program"], "as in ./program"),
    ],
)
def test_a_program_or_folder_that_is_not_there_is_said_with_the_way_out(served: Served, words: list[str], says: str) -> None:
    user, _ = served
    (user.home / "plain.txt").write_text("")
    done = user.run("run", *words)

    assert done.returncode == 125
    assert says in done.stderr


def test_a_shell_in_the_folder_of_a_canceled_job_lives_on(served: Served, tmp_path: Path) -> None:
    user, _ = served
    os.mkfifo(tmp_path / "started")
    shell = subprocess.Popen(["sh", "-c", "read line"], cwd=user.home, stdin=subprocess.PIPE)
    user.run("submit", "--job-id", "beside-a-shell", "sh", "-c", f"sleep 600 & echo go > {tmp_path}/started; wait")
    read_fifo(tmp_path / "started")

    user.run("cancel", "beside-a-shell")
    ended = user.run("result", "--json", "beside-a-shell")
    is_alive = shell.poll() is None
    shell.communicate(b"\n")

    assert json.loads(ended.stdout)["state"] == "CANCELED"
    assert (is_alive, shell.returncode) == (True, 0)


@pytest.mark.parametrize(
    ("words", "says"), [(["--cwd", ".", "true"], "--cwd '.': only your own jobs"), (["./x"], "'./x' is a path on this machine")]
)
def test_a_job_that_goes_over_the_network_has_no_folder_of_the_user(served: Served, words: list[str], says: str) -> None:
    user, server = served
    done = user.run("run", "--to", server.url, *words)

    assert done.returncode == 125
    assert says in done.stderr
    with Client(server.url, token=(user.data / "token").read_text().strip()) as client, pytest.raises(Forbidden, match="cwd"):
        client.submit(exec="true", cwd="/")


# ---------------------------------------------------------------------------------------------------- output that fails


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("no/such/folder/x.zip", "there is no folder 'no/such/folder'; make it with: mkdir -p no/such/folder"),
        (".", "is a folder; name a file in it, as in -o result.zip"),
        ("/proc/x.zip", "you may not write to the folder '/proc'"),
    ],
)
def test_a_result_file_that_cannot_be_written_is_noticed_before_the_job_is_submitted(
    user: User, monkeypatch: pytest.MonkeyPatch, target: str, says: str
) -> None:
    monkeypatch.setattr("tasuki.cli.result.os.access", lambda path, mode: str(path) != "/proc")  # root may write anywhere
    for word in ("run",) if target == "." else ("run", "result"):  # of an array it may be a folder
        done = user.run(word, "-o", target, "true")

        assert (done.returncode, done.stdout) == (125 if word == "run" else 2, "")
        assert says in done.stderr
    assert not user.data.exists()


def test_a_device_as_the_result_file_is_written_to_and_not_replaced(served: Served) -> None:
    user, _ = served
    done = user.run("run", "-o", "/dev/null", "echo", "hello")

    assert (done.stdout, done.stderr, done.returncode) == ("hello\n", "", 0)
    assert not Path("/dev/null").is_file()


def test_output_to_a_full_disk_is_told_in_one_line_and_the_job_ends(served: Served) -> None:
    user, _ = served
    words = ("run --job-id no-room yes", "status no-room", "--help", "list --help")
    told = []
    for word in words:
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [*TASUKI, *word.split()], env=user.environ, stdout=full, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S
            )
        told.append((done.returncode, done.stderr.splitlines()[-1:]))

    run, status, help_of_all, help_of_list = told
    assert run[0] == 125
    assert run[1][0].startswith("tasuki: DISK_FULL: cannot write 'the output': No space left on device")
    assert status[0] == 5
    assert help_of_all == help_of_list == (1, ["tasuki: ERROR: the output cannot be written: No space left on device"])
    assert user.json("status", "--json", "no-room")[0]["state"] == "CANCELED"


def test_closed_streams_are_no_streams(served: Served) -> None:
    user, _ = served
    for word in ("run echo hello", "list --state RUNNING", "--help", "run --json true"):
        for closed in (">&-", "<&-", "2>&-"):
            script = f"{TASUKI[0]} -m tasuki {word} {closed}"
            done = subprocess.run(["sh", "-c", script], env=user.environ, capture_output=True, text=True, timeout=DEADLINE_S)

            assert (done.returncode, done.stderr) == (0, ""), script


def test_json_tells_the_end_of_the_job(served: Served) -> None:
    user, _ = served
    done = user.run("run", "--json", "--job-id", "told", "sh", "-c", "echo out; exit 3")
    told = json.loads(done.stdout)

    assert done.returncode == 3
    assert (told["job_id"], told["state"], told["exit_code"], told["stdout"]) == ("told", "FAILED", 3, "out\n")


def test_ctrl_c_cancels_the_job_and_waits_for_its_end(served: Served, tmp_path: Path) -> None:
    user, _ = served
    os.mkfifo(tmp_path / "started")
    process = user.start("run", "--job-id", "interrupted", "sh", "-c", f"echo go > {tmp_path}/started; exec sleep 600")
    assert read_fifo(tmp_path / "started") == "go\n"

    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 130
    assert "interrupted" in stderr
    assert "Traceback" not in stderr
    assert user.json("status", "--json", "interrupted")[0]["state"] == "CANCELED"


def test_a_second_ctrl_c_leaves_the_job_behind(served: Served, tmp_path: Path) -> None:
    user, _ = served
    os.mkfifo(tmp_path / "started")
    os.mkfifo(tmp_path / "trapped")
    # It does not listen to TERM, so that it still runs when the second Ctrl-C comes.
    script = f"trap 'echo no > {tmp_path}/trapped' TERM; echo go > {tmp_path}/started; while :; do sleep 0.1; done"
    process = user.start("run", "--job-id", "left-behind", "sh", "-c", script)
    read_fifo(tmp_path / "started")

    process.send_signal(signal.SIGINT)
    read_fifo(tmp_path / "trapped")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 130
    assert "tasuki status left-behind" in stderr


def test_no_server_at_the_address_could_not_run(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "CONNECT_TIMEOUT_S", 0.2)
    done = user.run("run", "--to", "unix:///no/such/socket", "true")

    assert done.returncode == 125
    assert done.stderr.startswith("tasuki: UNAVAILABLE: ")


def test_an_address_that_is_none_is_told_as_json(user: User) -> None:
    done = user.run("run", "--json", "--to", "gopher://x", "true")

    assert done.returncode == 125
    assert json.loads(done.stderr)["error"]["code"] == "CONFIG"


@pytest.mark.parametrize("word", ["run", "submit"])
def test_an_empty_name_is_refused_and_not_taken_for_a_handlers_job(user: User, word: str) -> None:
    done = user.run(word, "")

    assert done.returncode == 2
    assert "write - for a handler" in done.stderr
    assert not user.data.exists()


def test_what_is_piped_in_is_the_jobs_standard_input(served: Served) -> None:
    user, _ = served
    done = user.run("run", "cat", input="from the pipe\n")

    assert (done.stdout, done.stderr, done.returncode) == ("from the pipe\n", "", 0)


def test_a_file_as_stdin_is_the_jobs_standard_input(served: Served, tmp_path: Path) -> None:
    user, _ = served
    (tmp_path / "input").write_text("from the file\n")
    with (tmp_path / "input").open() as source:
        done = subprocess.run([*TASUKI, "run", "cat"], stdin=source, env=user.environ, capture_output=True, timeout=DEADLINE_S)

    assert done.stdout == b"from the file\n"


def test_more_than_a_job_can_carry_is_refused_with_the_way_out(user: User) -> None:
    done = user.run_process("run", "cat", input="x" * 70_000)

    assert done.returncode == 125
    assert "--file" in done.stderr


def test_an_idle_pipe_is_not_waited_for(served: Served) -> None:
    user, _ = served
    reading, writing = os.pipe()
    try:
        done = subprocess.run(
            [*TASUKI, "run", "cat"], stdin=reading, env=user.environ, capture_output=True, text=True, timeout=DEADLINE_S
        )
    finally:
        os.close(reading)
        os.close(writing)

    assert (done.stdout, done.returncode) == ("", 0)
    assert "the job gets no input" in done.stderr


def test_the_result_file_cannot_be_stdout_which_is_the_jobs(user: User) -> None:
    done = user.run("run", "-o", "-", "true")

    assert done.returncode == 2
    assert not (user.home / "-").exists()


def test_a_job_that_waits_says_why_and_ctrl_c_ends_even_without_a_server(user: User) -> None:
    with running(user, "up", "--no-tcp", "--workers", "0") as server:
        process = user.start("run", "--job-id", "waits", "true")
        assert process.stderr is not None
        why = process.stderr.readline()
        server.process.kill()
        server.process.wait(DEADLINE_S)
        lost = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=DEADLINE_S)
        (user.data / "socket").unlink()  # a killed server leaves it

    assert why.startswith("job waits is PENDING: No worker is connected")
    assert lost == "connection lost; trying again …\n"
    assert "the cancel did not reach the server; the job may still run" in rest
    assert process.returncode == 130


def test_a_data_folder_that_cannot_be_made_is_told_in_one_line(user: User, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (str(tmp_path / "file"), "/proc/x", "/proc"):
        done = user.run_process("submit", "true", TASUKI_DATA=folder)

        assert done.returncode == 2
        assert done.stderr.startswith("tasuki: CONFIG: the data folder ")
        assert len(done.stderr.splitlines()) == 1
