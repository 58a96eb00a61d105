"""Plain functions in children: results, failures, deaths, time limits, and that none outlives the worker."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from tasuki.clocks import boot_time
from tasuki.core.job import JobSpec, Outcome, Progress
from tasuki.errors import Unavailable
from tasuki.worker import function_processes
from tasuki.worker.attempt import HandlerJob, StopReason
from tasuki.worker.function_processes import FunctionProcesses
from tests.support.processes import alive
from tests.support.waiting import until, until_async
from tests.worker.runs import DEADLINE_S


def echo(job: HandlerJob) -> bytes:
    return job.payload


def describe(job: HandlerJob) -> str:
    return f"{job.job_id} {job.subject} {job.attempt} {job.args} {job.headers} {job.env}"


def nothing(job: HandlerJob) -> None: ...


def wrong_type(job: HandlerJob) -> object:
    return 7


def raises(job: HandlerJob) -> bytes:
    raise KeyError("no such pricer")


def exits(job: HandlerJob) -> bytes:
    sys.exit(3)


def dies(job: HandlerJob) -> bytes:
    os._exit(5)


def killed(job: HandlerJob) -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return b""


def pid(job: HandlerJob) -> str:
    return str(os.getpid())


def spins(job: HandlerJob) -> bytes:
    """Computes for ever, and has a child of its own that sleeps as long; its payload is where to write both numbers."""
    sleeper = subprocess.Popen(["sleep", "1000"])
    note = Path(job.payload.decode())
    note.with_suffix(".part").write_text(f"{os.getpid()} {sleeper.pid}")
    note.with_suffix(".part").rename(note)
    while True:
        pass


def waits(job: HandlerJob) -> None:
    """Makes the file that its payload names, and waits until somebody removes it."""
    note = Path(job.payload.decode())
    note.touch()
    while note.exists():
        time.sleep(0.01)


def tells(job: HandlerJob) -> bytes:
    job.progress(0.25, "a quarter")
    job.progress(1)
    return b"told"


def heeds(job: HandlerJob) -> bytes:
    """Wait until its job is canceled, and leave a note of that."""
    note = Path(job.payload.decode())
    while not job.canceled:
        note.with_suffix(".asked").touch()
        time.sleep(0.005)
    note.touch()
    return b"heeded"


FUNCTIONS = {function.__name__: function for function in (
    echo, describe, nothing, wrong_type, raises, exits, dies, killed, pid, spins, waits, tells, heeds
)}  # fmt: skip


@pytest.fixture
def children() -> Iterator[FunctionProcesses]:
    started = FunctionProcesses.start(FUNCTIONS)
    yield started
    with contextlib.suppress(ChildProcessError):  # a test has closed it
        started.close()


def job_of(payload: bytes = b"", **fields: object) -> HandlerJob:
    return HandlerJob(JobSpec(job_id="job-1", payload=payload, **fields), 3)  # type: ignore[arg-type]


Meanwhile = Callable[["asyncio.Future[StopReason]"], Awaitable[None]]


async def call(
    children: FunctionProcesses,
    name: str,
    job: HandlerJob,
    timeout_s: float | None = None,
    meanwhile: Meanwhile | None = None,
    lease_deadline: Callable[[], float | None] = lambda: None,
) -> Outcome:
    stop: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()
    running = asyncio.ensure_future(children.run(name, job, timeout_s, stop, lease_deadline))
    if meanwhile is not None:
        await meanwhile(stop)
    return await asyncio.wait_for(running, DEADLINE_S)


def run(children: FunctionProcesses, name: str, payload: bytes = b"", timeout_s: float | None = None) -> Outcome:
    return asyncio.run(call(children, name, job_of(payload), timeout_s))


def pids_in(note: Path) -> list[int]:
    return [int(number) for number in note.read_text().split()] if note.exists() else []


def test_bytes_go_in_and_out(children: FunctionProcesses) -> None:
    payload = os.urandom(1_000_000)

    outcome = run(children, "echo", payload)

    assert (outcome.result, outcome.error_code) == (payload, None)


def test_children_work_on_uvloop_too(children: FunctionProcesses) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        assert loop.run(call(children, "echo", job_of(b"x"))).result == b"x"
        assert loop.run(call(children, "killed", job_of(b"x"))).error_code == "SIGNAL"


def test_the_function_gets_the_whole_job(children: FunctionProcesses) -> None:
    job = job_of(subject="a.b", args=("x",), headers={"h": "1"}, env={"E": "2"})

    outcome = asyncio.run(call(children, "describe", job))

    assert outcome.result == b"job-1 a.b 3 ('x',) {'h': '1'} {'E': '2'}"


def test_nothing_returned_is_an_empty_result(children: FunctionProcesses) -> None:
    assert run(children, "nothing").result == b""


def test_another_type_is_the_handlers_mistake(children: FunctionProcesses) -> None:
    outcome = run(children, "wrong_type")

    assert (outcome.error_code, outcome.permanent) == ("HANDLER_ERROR", True)
    assert "int" in outcome.message


def test_an_exception_comes_back_with_type_message_and_traceback(children: FunctionProcesses) -> None:
    outcome = run(children, "raises")

    assert outcome.error_code == "HANDLER_ERROR"
    assert outcome.message == "KeyError: 'no such pricer'"
    assert outcome.meta["type"] == "KeyError"
    assert "in raises" in outcome.meta["traceback"]


def test_sys_exit_is_a_failure_of_the_handler(children: FunctionProcesses) -> None:
    assert run(children, "exits").message == "SystemExit: 3"


def test_a_child_that_exits_is_named_with_its_code(children: FunctionProcesses) -> None:
    outcome = run(children, "dies")

    assert (outcome.error_code, outcome.exit_code) == ("EXIT_CODE", 5)
    assert "'dies'" in outcome.message


def test_a_child_that_is_killed_is_named_with_the_signal(children: FunctionProcesses) -> None:
    outcome = run(children, "killed")

    assert outcome.error_code == "SIGNAL"
    assert "'killed'" in outcome.message
    assert "SIGKILL" in outcome.message


def test_a_child_is_kept_warm_for_the_next_job(children: FunctionProcesses) -> None:
    async def scenario() -> list[bytes | None]:
        return [(await call(children, "pid", job_of())).result for _ in range(3)]

    assert len(set(asyncio.run(scenario()))) == 1


def test_jobs_at_the_same_time_have_children_of_their_own(children: FunctionProcesses) -> None:
    async def scenario() -> list[Outcome]:
        return await asyncio.gather(*(call(children, "echo", job_of(b"%d" % n)) for n in range(20)))

    assert [outcome.result for outcome in asyncio.run(scenario())] == [b"%d" % n for n in range(20)]


def test_after_a_death_the_next_job_has_a_new_child(children: FunctionProcesses) -> None:
    async def scenario() -> tuple[str | None, bytes | None]:
        return (await call(children, "dies", job_of())).error_code, (await call(children, "echo", job_of(b"x"))).result

    assert asyncio.run(scenario()) == ("EXIT_CODE", b"x")


def test_an_idle_child_that_died_is_not_used(children: FunctionProcesses) -> None:
    async def scenario() -> bytes | None:
        first = int((await call(children, "pid", job_of())).result or b"")
        os.kill(first, signal.SIGKILL)
        await until_async(lambda: not children._idle, what="the death is noticed")
        return (await call(children, "echo", job_of(b"x"))).result

    assert asyncio.run(scenario()) == b"x"


def test_a_time_limit_kills_a_function_that_computes_and_what_it_started(children: FunctionProcesses, tmp_path: Path) -> None:
    note = tmp_path / "note"

    outcome = run(children, "spins", str(note).encode(), timeout_s=2.5)

    assert outcome.error_code == "TIMED_OUT"
    assert len(pids_in(note)) == 2
    until(lambda: not any(map(alive, pids_in(note))), what="nothing of it runs")


@pytest.mark.parametrize("reason", list(StopReason))
def test_a_stop_kills_a_function_that_computes(children: FunctionProcesses, tmp_path: Path, reason: StopReason) -> None:
    note = tmp_path / "note"

    async def end(stop: "asyncio.Future[StopReason]") -> None:
        await until_async(note.exists, what="the function runs")
        stop.set_result(reason)

    outcome = asyncio.run(call(children, "spins", job_of(str(note).encode()), None, end))

    assert outcome.error_code == reason.value
    assert not alive(pids_in(note)[0])


def test_a_canceled_task_leaves_no_child_at_work(children: FunctionProcesses, tmp_path: Path) -> None:
    note = tmp_path / "note"

    async def scenario() -> None:
        running = asyncio.ensure_future(call(children, "spins", job_of(str(note).encode())))
        await until_async(note.exists, what="the function runs")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until_async(lambda: not alive(pids_in(note)[0]), what="the child is dead")

    asyncio.run(scenario())


def test_a_lease_that_is_not_renewed_ends_the_function_and_what_it_started(children: FunctionProcesses, tmp_path: Path) -> None:
    note = tmp_path / "note"
    deadline = boot_time() + 1.0

    outcome = asyncio.run(call(children, "spins", job_of(str(note).encode()), lease_deadline=lambda: deadline))

    assert outcome.error_code == "LEASE_LOST"
    assert boot_time() >= deadline
    assert len(pids_in(note)) == 2
    assert not [number for number in pids_in(note) if alive(number)]


def test_a_renewed_lease_lets_the_function_go_on(children: FunctionProcesses, tmp_path: Path) -> None:
    note = tmp_path / "note"
    deadline = first = boot_time() + 1.0

    async def renew(stop: "asyncio.Future[StopReason]") -> None:
        nonlocal deadline
        await until_async(note.exists, what="the function runs")
        deadline = first + 1000.0
        children.renewed()
        await until_async(lambda: boot_time() > first + 0.2, what="its first deadline is over")
        assert alive(pids_in(note)[0])
        stop.set_result(StopReason.CANCELED)

    outcome = asyncio.run(call(children, "spins", job_of(str(note).encode()), None, renew, lambda: deadline))

    assert outcome.error_code == "CANCELED"


def test_an_idle_child_outlives_the_lease_of_its_last_job(children: FunctionProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_processes, "REUSE_S", 0.0)

    async def scenario() -> None:
        deadline = boot_time() + 0.5
        first = await call(children, "pid", job_of(), lease_deadline=lambda: deadline)
        await until_async(lambda: boot_time() > deadline + 0.2, what="that lease is over")
        assert (await call(children, "pid", job_of())).result == first.result

    asyncio.run(scenario())


def test_a_killed_template_costs_its_jobs_alone_and_the_next_one_takes_its_place(
    children: FunctionProcesses, tmp_path: Path
) -> None:
    note = tmp_path / "note"

    async def kill(_: "asyncio.Future[StopReason]") -> None:
        await until_async(note.exists, what="the function runs")
        os.kill(children.template_pid, signal.SIGKILL)

    async def scenario() -> None:
        # given
        before = children.template_pid

        # when
        lost = await call(children, "spins", job_of(str(note).encode()), None, kill)

        # then
        assert lost.error_code == "SIGNAL"
        assert (await call(children, "echo", job_of(b"x"))).result == b"x"
        assert children.template_pid != before
        await until_async(lambda: not any(map(alive, pids_in(note))), what="nothing of the lost job is alive")

    asyncio.run(scenario())


def test_a_template_that_died_a_moment_ago_is_replaced_before_the_first_job(children: FunctionProcesses) -> None:
    before = children.template_pid
    os.kill(before, signal.SIGKILL)
    asyncio.run(until_async(lambda: not alive(before), what="it is dead, and nobody has read of it"))

    assert run(children, "echo", b"x").result == b"x"
    assert children.template_pid != before


def test_a_template_that_was_stopped_is_replaced_once_a_child_must_die(
    children: FunctionProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_processes, "UNANSWERED_S", 0.1)
    note = tmp_path / "note"

    async def end(stop: "asyncio.Future[StopReason]") -> None:
        await until_async(note.exists, what="the function runs")
        os.kill(children.template_pid, signal.SIGSTOP)
        stop.set_result(StopReason.LEASE_LOST)

    async def scenario() -> None:
        lost = await call(children, "spins", job_of(str(note).encode()), None, end)
        assert lost.error_code == "LEASE_LOST"
        await until_async(lambda: not any(map(alive, pids_in(note))), what="nothing of the lost job is alive")
        assert (await call(children, "echo", job_of(b"x"))).result == b"x"

    asyncio.run(scenario())


def test_without_template_and_supervisor_nothing_runs_and_the_error_says_what_to_do(children: FunctionProcesses) -> None:
    async def scenario() -> None:
        await call(children, "echo", job_of())
        children.kill_all()
        await until_async(lambda: children._control is None, what="the end is noticed")
        with pytest.raises(Unavailable, match="restart the worker"):
            await call(children, "echo", job_of())

    asyncio.run(scenario())


def test_a_function_that_can_answer_nobody_ends_without_a_traceback(children: FunctionProcesses, tmp_path: Path) -> None:
    note = tmp_path / "note"

    async def hang_up(_: "asyncio.Future[StopReason]") -> None:
        await until_async(note.exists, what="the function runs")
        (child,) = children._alive.values()
        child.writer.transport.abort()  # as the end of the worker does
        note.unlink()

    outcome = asyncio.run(call(children, "waits", job_of(str(note).encode()), None, hang_up))

    assert outcome.exit_code == os.EX_OK


def test_close_ends_the_template_and_its_children(children: FunctionProcesses) -> None:
    async def scenario() -> int:
        number = int((await call(children, "pid", job_of())).result or b"")
        children.close()
        await until_async(lambda: not alive(number), what="the child is dead")
        return number

    asyncio.run(scenario())
    assert not alive(children.template_pid)


def test_close_works_after_the_loop_is_closed(children: FunctionProcesses) -> None:
    run(children, "echo")

    children.close()

    assert not alive(children.template_pid)


def test_children_cannot_be_started_inside_a_loop() -> None:
    async def scenario() -> None:
        with pytest.raises(RuntimeError, match="before the event loop"):
            FunctionProcesses.start(FUNCTIONS)

    asyncio.run(scenario())


WORKER = """
import asyncio, sys
from tasuki.worker.function_processes import FunctionProcesses
from tests.worker.test_function_processes import FUNCTIONS, call, job_of
children = FunctionProcesses.start(FUNCTIONS)
print(children.template_pid, flush=True)
asyncio.run(call(children, "spins", job_of(sys.argv[1].encode())))
"""


def test_children_die_with_the_worker(tmp_path: Path) -> None:
    note = tmp_path / "note"
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(note)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], text=True
    )
    assert worker.stdout is not None
    template = int(worker.stdout.readline())
    asyncio.run(until_async(note.exists, what="the function runs"))
    involved = [template, *pids_in(note)]
    assert len(involved) == 3  # with what the function itself has started

    worker.kill()
    worker.wait()
    worker.stdout.close()

    asyncio.run(until_async(lambda: not [number for number in involved if alive(number)], what="all of them are dead"))


def test_waiting_for_children_needs_no_thread(children: FunctionProcesses, tmp_path: Path) -> None:
    note = tmp_path / "note"
    threads = threading.active_count()

    async def look(stop: "asyncio.Future[StopReason]") -> None:
        await until_async(note.exists, what="the function runs")
        assert threading.active_count() == threads
        stop.set_result(StopReason.SHUTDOWN)

    before = time.monotonic()
    outcome = asyncio.run(call(children, "spins", job_of(str(note).encode()), None, look))

    assert outcome.error_code == "SHUTDOWN"
    assert time.monotonic() - before < DEADLINE_S


def test_progress_of_a_function_is_reported_while_it_runs(children: FunctionProcesses) -> None:
    told: list[Progress] = []
    job = HandlerJob(JobSpec(job_id="job-1"), 1, report=told.append)

    assert asyncio.run(call(children, "tells", job)).result == b"told"
    assert told == [Progress(0.25, "a quarter"), Progress(1.0)]


def test_a_function_that_asks_if_it_was_canceled_has_time_to_return(children: FunctionProcesses, tmp_path: Path) -> None:
    note = tmp_path / "note"

    async def cancel(stop: asyncio.Future[StopReason]) -> None:
        await until_async(note.with_suffix(".asked").exists, what="the function asks")
        stop.set_result(StopReason.CANCELED)

    outcome = asyncio.run(call(children, "heeds", job_of(str(note).encode()), meanwhile=cancel))

    assert outcome.error_code == "CANCELED"
    assert note.exists()
