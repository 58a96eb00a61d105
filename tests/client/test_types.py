"""Arguments of the wrong type, typed answers, results of commands, and the two clients side by side."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tasuki
from tasuki import AsyncClient, AsyncJobHandle, Client, JobHandle, JobSpec, State
from tasuki.core.job import JobIncident
from tasuki.core.protocol import SubmitJobs
from tasuki.errors import DeadlineExceeded, InvalidInput, JobFailed, NotFound, TasukiError, WrongType
from tests.support.processes import ServerProcess, start_server, start_worker

pytestmark = pytest.mark.e2e
DEADLINE_S = 25.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a worker of handlers, and one that runs a shell for subjects of job.assign."""
    folder = tmp_path_factory.mktemp("types")
    shell = ("--exec", "sh=/bin/sh -c {args}", "--subject", "job.assign.>", "--data", str(folder / "worker"))
    with start_server(folder, "--http", "127.0.0.1:0") as server, start_worker(server):
        with start_worker(server, *shell, command=True, log=folder / "shell.log"):
            yield server
        assert server.running, server.output()


@pytest.fixture(params=["tcp", "unix", "http"])
def any_client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Client]:
    urls = {"tcp": server.url, "unix": f"unix://{server.data}/socket", "http": server.http_url}
    with server.client(urls[request.param]) as client:
        yield client


# ---------------------------------------------------------------------------------------------------- wrong types

WRONG: dict[str, tuple[Callable[[Client], object], str]] = {
    "payload text": (lambda c: c.submit(payload="7"), "payload must be bytes, got str; encode it"),
    "payload dict": (lambda c: c.submit(payload={"n": 7}), "payload must be bytes, got dict"),
    "payload number": (lambda c: c.submit(payload=7), "payload must be bytes, got int"),
    "timeout_s": (lambda c: c.submit(timeout_s="5"), "timeout_s must be float | None, got str"),
    "retries": (lambda c: c.submit(retries=1.5), "retries must be int, got float"),
    "retries bool": (lambda c: c.submit(retries=True), "retries must be int, got bool"),
    "priority": (lambda c: c.submit(priority=None), "priority must be int, got NoneType"),
    "job_id": (lambda c: c.submit(job_id=5), "job_id must be str, got int"),
    "subject": (lambda c: c.submit(subject=b"a"), "subject must be str, got bytes"),
    "args text": (lambda c: c.submit(exec="sh", args="abc"), r"args must be a list, got str; write args=\[…\]"),
    "args number": (lambda c: c.submit(exec="sh", args=["a", 5]), r"args\[1\] must be str, got int"),
    "args path": (lambda c: c.submit(exec="sh", args=[Path("a")]), "args must be tuple.*PosixPath"),
    "files text": (lambda c: c.submit(exec="sh", files="x"), r"files must be a list, got str; write files=\[…\]"),
    "env list": (lambda c: c.submit(exec="sh", env=["A=1"]), "env must be a dict, got list"),
    "env value": (lambda c: c.submit(exec="sh", env={"SECRET": 5}), r"env\[...\] must be str, got int"),
    "not_before": (lambda c: c.submit(not_before="tomorrow"), "not_before must be float | None, got str"),
    "specs": (lambda c: c.submit_many([{"job_id": "a"}]), r"specs\[0\] must be a JobSpec, got dict"),
    "spec": (lambda c: c.submit_many([JobSpec(job_id="a", payload="7")]), "payload must be bytes, got str"),
    "cancel number": (lambda c: c.cancel(5), "a job_id must be str, got int"),
    "cancel list": (lambda c: c.cancel(["a", "b"]), r"a job_id must be str, got list; write \*ids"),
    "status": (lambda c: c.status(5), "a job_id must be str, got int"),
    "retry": (lambda c: c.retry(None), "a job_id must be str, got NoneType"),
    "explain": (lambda c: c.explain(5), "a job_id must be str, got int"),
    "job": (lambda c: c.job(5), "a job_id must be str, got int"),
    "logs": (lambda c: next(c.logs(5)), "a job_id must be str, got int"),
}


def test_a_wrong_type_is_an_error_that_names_the_argument_and_the_client_goes_on(any_client: Client) -> None:
    for name, (call, words) in WRONG.items():
        with pytest.raises(WrongType, match=words) as refused:
            call(any_client)
        assert isinstance(refused.value, TypeError), name
        assert isinstance(refused.value, InvalidInput), name
    assert any_client.submit(subject="math.square", payload=b"7").result(DEADLINE_S) == b"49"


def test_nothing_is_uploaded_for_a_job_of_the_wrong_type(any_client: Client, tmp_path: Path) -> None:
    with pytest.raises(WrongType, match="payload"):
        any_client.submit(exec="sh", payload="7", files=[tmp_path / "missing: reading it would be another error"])


@pytest.mark.parametrize(
    "bad",
    [
        lambda msg_id: SubmitJobs(msg_id, [JobSpec(job_id="a", payload="7")]),
        lambda msg_id: SubmitJobs(msg_id, [JobSpec(job_id=5)]),
        lambda msg_id: SubmitJobs(msg_id, [JobSpec(job_id="a")], on_failed=5),
    ],
    ids=["payload", "job_id", "header"],
)
@pytest.mark.parametrize("scheme", ["tcp", "unix", "http"])
def test_a_request_that_the_server_cannot_read_fails_alone(server: ServerProcess, scheme: str, bad: Any) -> None:
    urls = {"tcp": server.url, "unix": f"unix://{server.data}/socket", "http": server.http_url}

    async def main() -> None:
        async with server.async_client(urls[scheme]) as client, asyncio.timeout(DEADLINE_S):
            # Given a request that waits, on the same connection
            job = await client.submit(subject="math.square", payload=b"7")
            waiting = asyncio.gather(*(client.status(job.job_id) for _ in range(5)))
            # When one is sent that no server can read
            with pytest.raises(InvalidInput, match="cannot be read"):
                await client._ask(bad)
            # Then the others have their answers, and there was no other connection
            assert {status.job_id for status in await waiting} == {job.job_id}
            assert await job == b"49"
            assert client._dials == 1

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------- one shape


@pytest.mark.parametrize("method", ["cancel", "retry", "statuses"])
def test_more_ids_than_a_request_may_have_are_refused_with_the_way_out(server: ServerProcess, method: str) -> None:
    with (
        server.client() as client,
        pytest.raises(InvalidInput, match="2000 job ids at once are too many, the limit is 1024; use several calls"),
    ):
        getattr(client, method)(*(f"j{number}" for number in range(2000)))


def test_a_bare_text_is_one_job_id_in_both_clients(server: ServerProcess) -> None:
    async def ask(client: AsyncClient) -> str:
        with pytest.raises(NotFound) as unknown:
            await client.cancel("abc")
        return unknown.value.message

    with server.client() as client:
        for job_id in "abc":
            client.submit(job_id=job_id, subject="nobody.takes", watch=False)
        with pytest.raises(NotFound, match="'abc'"):
            client.cancel("abc")
        assert "'abc'" in client.wait(ask(client.aio))
        assert {status.state for status in client.statuses(*"abc")} == {State.PENDING}
        assert {answer.state for answer in client.cancel(*"abc", reason="over").values()} == {State.CANCELED}


# The blocking client is open; the others are for the library itself.
ONLY_ASYNC = {"open", "beside", "welcome", "inline_result", "ask_cache", "upload"}
ONLY_BLOCKING = {"aio", "wait", "begin", "begin_outcome", "future"}


@pytest.mark.parametrize(("one", "other"), [(AsyncClient, Client), (AsyncJobHandle, JobHandle)], ids=["client", "handle"])
def test_both_clients_have_the_same_methods_with_the_same_arguments(one: type, other: type) -> None:
    def signatures(kind: type) -> dict[str, Any]:
        found = {"": kind.__init__} if kind in (AsyncClient, Client) else {}
        found |= {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}
        return {
            name: list(inspect.signature(method).parameters.values())[1:] if callable(method) else None
            for name, method in found.items()
        }

    assert {name: told for name, told in signatures(one).items() if name not in ONLY_ASYNC} == {
        name: told for name, told in signatures(other).items() if name not in ONLY_BLOCKING
    }


@pytest.mark.parametrize("kind", [AsyncClient, Client, AsyncJobHandle, JobHandle, tasuki.CommandResult, tasuki.JobStatus])
def test_every_public_method_is_documented(kind: type) -> None:
    own = {name: value for name, value in vars(kind).items() if not name.startswith("_") and callable(value)}
    assert [name for name, value in own.items() if not value.__doc__] == []
    if kind is Client:
        assert "await" not in "".join(value.__doc__ for value in own.values())


# ---------------------------------------------------------------------------------------------------- typed answers


def test_answers_are_structs_with_the_names_of_the_json(server: ServerProcess) -> None:
    with server.client() as client:
        job = client.submit(subject="math.square", payload=b"7", job_id="typed", headers={"who": "me"})
        assert job.result(DEADLINE_S) == b"49"
        status = client.status("typed")
        assert (status.state, status.ended, status.attempt, status.headers) == (State.SUCCEEDED, True, 1, {"who": "me"})
        assert status.outcome is not None
        assert (status.outcome.error_code, status.outcome.result_bytes) == (None, 2)
        [raw] = client.call("get", job_ids=["typed"])
        assert set(raw) == set(status.__struct_fields__)
        assert {name: getattr(status, name) for name in ("subject", "created_at", "priority")} == {
            name: raw[name] for name in ("subject", "created_at", "priority")
        }
        assert set(raw["outcome"]) == set(status.outcome.__struct_fields__)
        page = client.list_jobs(states="SUCCEEDED", subject="math.square", limit=1)
        assert (len(page), len(list(page)), page.jobs[0].subject) == (1, 1, "math.square")
        explanation = client.explain("typed")
        assert explanation.facts["why"] == "SUCCEEDED"
        assert "It succeeded" in str(explanation)
        again = client.retry("typed")["typed"]
        assert (again.state, again.done) == (State.PENDING, True)
        assert client.job("typed").outcome(DEADLINE_S).generation == 1
        assert isinstance(client.explain("typed").story[0], JobIncident)
        assert client.counts()["math"].succeeded >= 1
        [worker] = [worker for worker in client.workers() if "math.square" in worker.patterns]
        assert set(client.call("workers")[0]) - set(worker.__struct_fields__) == {"addressed", "owner", "held", "ttl_s"}


def test_a_handle_is_awaited_decoded_asked_and_canceled(server: ServerProcess) -> None:
    async def main() -> None:
        async with server.async_client() as client, asyncio.timeout(DEADLINE_S):
            job = await client.submit(subject="echo.json", payload=b'{"n": 7}')
            assert await job.decoded_by(json.loads) == {"n": 7}
            assert await job == b'{"n": 7}'
            assert (await job.status()).state is State.SUCCEEDED
            assert repr(job) == f"<AsyncJobHandle {job.job_id!r}: SUCCEEDED>"
            waiting = await client.submit(subject="nobody.takes")
            assert "not ended yet" in repr(waiting)
            assert (await waiting.cancel("over")).state is State.CANCELED

    asyncio.run(main())
    with server.client() as client:
        job = client.submit(subject="echo.json", payload=b'{"n": 8}')
        assert job.decoded_by(json.loads).result(DEADLINE_S) == {"n": 8}
        assert job.status().state is State.SUCCEEDED
        assert repr(job) == f"<JobHandle {job.job_id!r}: SUCCEEDED>"
        assert client.submit(subject="nobody.takes").cancel().state is State.CANCELED


def test_a_handle_of_the_blocking_client_can_be_awaited_in_a_loop_of_the_caller(client: Client) -> None:
    async def main() -> list[bytes]:
        jobs = [client.submit(subject="math.square", payload=b"%d" % number) for number in range(5)]
        return await asyncio.wait_for(asyncio.gather(*jobs), DEADLINE_S)

    assert asyncio.run(main()) == [b"0", b"1", b"4", b"9", b"16"]


def test_the_callers_own_time_out_is_a_timeout_error(client: Client) -> None:
    job = client.submit(subject="nobody.takes")
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.1s") as late:
        job.result(timeout=0.1)
    assert isinstance(late.value, DeadlineExceeded)
    assert isinstance(late.value, TasukiError)
    assert late.value.code == "DEADLINE"
    job.cancel()


# ---------------------------------------------------------------------------------------------------- commands

SCRIPT = 'cat in/*; echo problem >&2; mkdir out/deep; echo one > out/a.txt; echo two > out/deep/b.txt; test -z "$(cat -)"'


def check_done(done: tasuki.CommandResult, folder: Path) -> None:
    assert (done.state, done.exit_code) == (State.SUCCEEDED, 0)
    assert (done.stdout, done.stderr) == ("some text\n", "problem\n")
    assert sorted(done.files) == ["a.txt", "deep/b.txt"]
    assert (done.files["a.txt"], done.files["deep/b.txt"]) == (b"one\n", b"two\n")
    with pytest.raises(KeyError):
        done.files["stdout.log"]
    assert done.save_to(folder / "new") == folder / "new"
    assert (folder / "new" / "out" / "deep" / "b.txt").read_text() == "two\n"
    assert (folder / "new" / "stdout.log").read_text() == "some text\n"
    assert (folder / "new.zip") == done.save_to(str(folder / "new.zip"))
    assert (folder / "new.zip").read_bytes().startswith(b"PK")
    assert done.job_id in repr(done)


def test_a_commands_result_has_its_output_and_files(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("some text\n")
    with server.client() as client:
        check_done(client.run("sh", SCRIPT, files=[tmp_path / "in.txt"]), tmp_path)
        job = client.submit(exec="sh", args=[SCRIPT], files=[tmp_path / "in.txt"])
        assert job.command_result(DEADLINE_S).stdout == "some text\n"
    (tmp_path / "aio").mkdir()

    async def main() -> None:
        async with server.async_client() as client, asyncio.timeout(DEADLINE_S):
            check_done(await client.run("sh", SCRIPT, files=[tmp_path / "in.txt"]), tmp_path / "aio")

    asyncio.run(main())


def test_a_large_result_of_a_command_is_read_from_a_temporary_file(client: Client) -> None:
    done = client.run("sh", "head -c 3000000 /dev/urandom > out/noise; yes | head -c 200000")
    assert (len(done.files["noise"]), len(done.stdout)) == (3_000_000, 200_000)


def test_a_command_that_failed_is_an_error_with_the_end_of_its_stderr(client: Client) -> None:
    with pytest.raises(JobFailed, match="FAILED after attempt 1") as failed:
        client.run("sh", "echo the disk is full >&2; exit 3")
    assert failed.value.outcome.outcome.exit_code == 3
    assert "the disk is full" in failed.value.__notes__[0]
    done = client.run("sh", "echo some; exit 3", check=False)
    assert (done.exit_code, done.stdout, done.state) == (3, "some\n", State.FAILED)


def test_a_handlers_traceback_is_a_note_of_the_error(client: Client) -> None:
    with pytest.raises(JobFailed, match="the disk was on fire") as failed:
        client.submit(subject="fail", payload=b"the disk was on fire", retries=0).result(DEADLINE_S)
    assert "raise ValueError" in failed.value.__notes__[0]


def test_a_job_that_left_nothing_has_an_empty_result(client: Client, tmp_path: Path) -> None:
    job = client.submit(exec="sh", subject="nobody.takes")
    job.cancel("over")
    done = job.command_result(DEADLINE_S, check=False)
    assert (done.state, done.exit_code, done.stdout, list(done.files)) == (State.CANCELED, None, "", [])
    with pytest.raises(InvalidInput, match="left no result"):
        done.save_to(tmp_path / "new")
    with pytest.raises(JobFailed, match="over"):
        job.command_result(DEADLINE_S)


def test_a_handlers_result_is_no_commands(client: Client) -> None:
    with pytest.raises(InvalidInput, match=r"is not a command's.*ask for result\(\)"):
        client.submit(subject="math.square", payload=b"7").command_result(DEADLINE_S)


# ---------------------------------------------------------------------------------------------------- users' programs

GOOD = """
import asyncio
import json
from typing import Any
from tasuki import AsyncClient, Client, CommandResult, JobFailed, JobHandle, JobResult, JobSpec, JobStatus, State

with Client("tcp://localhost:7000", token_file="token") as client:
    job: JobHandle[bytes] = client.submit(subject="a.b", payload=b"7", retries=5, timeout_s=60, files=["a", "b"])
    data: bytes = job.result(timeout=30)
    decoded: JobHandle[dict[str, int]] = job.decoded_by(json.loads)
    numbers: dict[str, int] = decoded.result()
    ended: JobResult = job.outcome()
    state: State = client.status("a").state
    failed: list[str] = [one.job_id for one in client.list_jobs(states=["FAILED"]) if one.outcome and one.outcome.exit_code]
    asked: bool = client.cancel("a", "b", reason="x")["a"].requested
    done: CommandResult = client.run("echo", "hi", env={"A": "1"})
    text: str = done.stdout
    jpeg: bytes = done.files["a.jpg"]
    handles: list[JobHandle[bytes]] = client.submit_many([JobSpec(job_id="x")], on_failed="rerun")
    pending: int = client.counts()["a"].pending
    patterns: tuple[str, ...] = client.workers()[0].patterns
    pieces: list[bytes] = list(client.logs("a", follow=False))

async def main() -> None:
    async with AsyncClient() as client:
        job = await client.submit(exec="echo", args=["hi"])
        data: bytes = await job
        status: JobStatus = await client.status(job.job_id)
        try:
            print((await client.run("echo", "hi")).stdout, status.attempt)
        except JobFailed as error:
            print(error.message)
"""

BAD = {
    'client.submit(payload="7")': "arg-type",
    'client.submit(timeout_s="5")': "arg-type",
    "client.submit(retries=1.5)": "arg-type",
    "client.submit(priority=None)": "arg-type",
    "client.submit(job_id=5)": "arg-type",
    'client.submit(args="abc")': "arg-type",
    'client.submit(colour="blue")': "call-arg",
    'client.submit(on_failed="again")': "arg-type",
    'client.submit_many([{"job_id": "a"}])': "list-item",
    'client.cancel(["a"])': "arg-type",
    'client.status("a")["state"]': "index",
    'client.list_jobs(stats=["FAILED"])': "call-arg",
    'client.run("echo").stdout.decode()': "attr-defined",
    "Client(conect_timeout_s=5)": "call-arg",
    "client.result()": "attr-defined",
}


GOOD_TASKS = """
import asyncio

from tasuki import JobHandle, Tasks, as_completed, current_job, gather

tasks = Tasks()


@tasks.task(retries=5, timeout_s=60)
def resize(path: str, width: int = 200) -> dict[str, int]:
    current_job().progress(0.5, "half")
    return {"width": width}


@tasks.task
async def add(a: int, *, b: int = 1) -> int:
    return a + b


def main() -> None:
    job: JobHandle[dict[str, int]] = resize.options(priority=9).submit("a.png", width=400)
    width: int = job.result(timeout=30)["width"]
    here: dict[str, int] = resize("a.png")
    sums: list[int] = gather(add.map([1, 2]))
    for ended in as_completed(resize.starmap([("a.png", width)])):
        print(ended.result()["width"], here, sums)
    with tasks.eager() as jobs:
        jobs.assert_submitted(resize, "a.png", width=400)


async def in_a_loop() -> int:
    job = await add.submit_async(1, b=2)
    there: int = await add(1)
    return await job + there + sum(await asyncio.gather(*await add.map_async([1])))
"""

BAD_TASKS = {
    "resize.submit(7)": "arg-type",
    'resize.submit("a", "b")': "arg-type",
    "resize.submit()": "call-arg",
    'resize.submit("a", heigth=1)': "call-arg",
    'resize.submit("a").result().upper()': "attr-defined",
    "add.submit(1, 2)": "call-arg",
    "resize(7)": "arg-type",
    'resize.options(prority=1).submit("a")': "call-arg",
    'tasks.task(retries="5")': "call-overload",
    "gather(add.map([1])).upper()": "attr-defined",
}


def test_mypy_finds_wrong_calls_in_users_programs(tmp_path: Path) -> None:
    head = "from tasuki import Client\n\n\ndef main(client: Client) -> None:\n"
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "good_tasks.py").write_text(GOOD_TASKS)
    (tmp_path / "bad.py").write_text(head + "".join(f"    {line}\n" for line in BAD))
    tasks_head = "from good_tasks import add, resize, tasks\nfrom tasuki import gather\n"
    (tmp_path / "bad_tasks.py").write_text(tasks_head + "".join(f"{line}\n" for line in BAD_TASKS))
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\n")
    files = ["good.py", "bad.py", "bad_tasks.py"]
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-error-summary", *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    found = {tuple(line.split(":")[:2]): line.rpartition("[")[2].rstrip("]") for line in errors}
    wanted = {("bad.py", str(number)): code for number, code in enumerate(BAD.values(), head.count("\n") + 1)}
    wanted |= {("bad_tasks.py", str(number)): code for number, code in enumerate(BAD_TASKS.values(), 3)}
    assert found == wanted, done.stdout
