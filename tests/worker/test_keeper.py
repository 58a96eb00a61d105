"""The keeper by itself: what it starts, how it ends whole trees, and what happens when worker or keeper are killed."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.errors import KeeperLost
from tasuki.worker.keeper import keeper as keeper_module
from tasuki.worker.keeper.cgroup import NoCgroup, delegated
from tasuki.worker.keeper.client import Keeper
from tasuki.worker.keeper.linux import _read_whole, sweep
from tasuki.worker.keeper.plain import PlainSystem
from tasuki.worker.keeper.protocol import EndReason, TreeEnded
from tests.conftest import Require
from tests.support.processes import alive, open_files
from tests.support.waiting import until, until_async
from tests.worker.keeper_stage import Stage, in_s, keeper_for, play
from tests.worker.runs import DEADLINE_S

_numbers = itertools.count(1)
ORDINARY_SIGNALS = (1 << 31) - 1  # above them the C library has two of its own


def has_cgroup() -> bool:
    try:
        delegated()
    except NoCgroup:
        return False
    return True


@pytest.fixture
def incarnation() -> str:
    return f"test-{os.getpid()}-{next(_numbers)}"


@pytest.fixture(params=["cgroup", "subreaper"])
def level(request: pytest.FixtureRequest, require: Require) -> str:
    if request.param == "cgroup":
        require("a delegated cgroup", has_cgroup(), "run the tests as root, or below a delegated cgroup")
    return request.param


@pytest.fixture
def stage(tmp_path: Path, incarnation: str, level: str) -> Iterator[Stage]:
    with keeper_for(incarnation, cgroup=level == "cgroup") as keeper:
        yield Stage(tmp_path, keeper)


@pytest.fixture
def simple(tmp_path: Path, incarnation: str) -> Iterator[Stage]:
    """For what does not depend on the level."""
    with keeper_for(incarnation, cgroup=False) as keeper:
        yield Stage(tmp_path, keeper)


# ---------------------------------------------------------------------------------------------------- starting


def test_it_says_how_well_it_holds_on_to_what_it_starts(stage: Stage, level: str) -> None:
    ready = play(stage.keeper.ready)

    assert (ready.level, ready.limits) == (level, "watched")
    assert "whole trees" in ready.detail


def test_a_program_runs_and_its_exit_code_comes_back(simple: Stage) -> None:
    async def scenario() -> tuple[int, TreeEnded]:
        kept = simple.shell("pwd; cat; echo on stderr >&2; exit 3")
        return await kept.started, await kept.ended

    pid, ended = play(scenario)

    assert (ended.exit_code, ended.reason) == (3, None)
    assert simple.output() == f"{simple.folder}\n"
    assert (simple.folder / "stderr").read_text() == "on stderr\n"
    assert not alive(pid)


def test_a_program_has_a_session_of_its_own_ordinary_signals_and_no_descriptor_of_ours(simple: Stage) -> None:
    script = "ls /proc/self/fd | wc -l; ps -o sid= -p $$; echo $$; grep -E 'Sig(Blk|Ign)' /proc/self/status"

    play(lambda: simple.shell(script).ended)

    descriptors, session, pid, *masks = simple.output().split()
    assert int(descriptors) == 4  # 0, 1, 2, and the one ls itself reads the folder with
    assert session == pid
    blocked, ignored = (int(mask, 16) & ORDINARY_SIGNALS for mask in masks[1::2])
    assert (blocked, ignored) == (0, 0)


def test_what_cannot_be_started_says_why_and_the_next_one_can(simple: Stage) -> None:
    async def scenario() -> TreeEnded:
        for program, arguments, error in [("/no/such", (), FileNotFoundError), ("/bin/echo", ("a\0b",), OSError)]:
            with pytest.raises(error):
                await simple.spawn(program, *arguments).started
        return await simple.shell("exit 0").ended

    assert play(scenario).exit_code == 0


def test_a_lease_that_is_over_already_is_not_begun(simple: Stage) -> None:
    async def scenario() -> None:
        await simple.shell(f"touch {simple.pids}.proof", lease_deadline=in_s(-1)).started

    with pytest.raises(OSError, match="expired"):
        play(scenario)
    assert not simple.pids.with_suffix(".proof").exists()


def test_a_job_is_the_first_to_go_when_memory_is_short(simple: Stage) -> None:
    ours = int(Path("/proc/self/oom_score_adj").read_text())

    # The score is written just after the start, so the program asks a little later.
    play(lambda: simple.shell("sleep 0.2; cat /proc/self/oom_score_adj").ended)

    assert int(simple.output()) > ours


def test_the_first_start_of_a_turn_leaves_at_once_and_the_others_in_one_write(
    simple: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []

    class Counting:
        def __init__(self, inner: object) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

        def send(self, data: bytes) -> int:
            writes.append(len(data))
            return self._inner.send(data)  # type: ignore[attr-defined]

    async def scenario() -> list[TreeEnded]:
        monkeypatch.setattr(simple.keeper._socket, "_control", Counting(simple.keeper._control))
        kept = [simple.shell("exit 0") for _ in range(20)]
        return [await one.ended for one in kept]

    assert [ended.exit_code for ended in play(scenario)] == [0] * 20
    assert len(writes) == 2  # the first start at once, all others behind it


# ---------------------------------------------------------------------------------------------------- whole trees


@pytest.mark.parametrize(
    ("how", "words"),
    [("canceled", ()), ("canceled", ("untagged",)), ("time limit", ()), ("lease", ()), ("its own end", ("untagged",))],
    ids=["canceled", "canceled, without a tag", "time limit", "lease", "its own end, without a tag"],
)
def test_nothing_is_left_of_a_tree_that_hides(stage: Stage, how: str, words: tuple[str, ...]) -> None:
    # Time in which the job must have hidden its process, also on a busy machine.
    fields = {"timeout_s": 3.0} if how == "time limit" else {}
    leave = ("leave",) if how == "its own end" else ()

    async def scenario() -> tuple[TreeEnded, list[int]]:
        kept, _ = await stage.escape(*words, *leave, **fields)
        if how == "canceled":
            stage.keeper.stop(kept, EndReason.CANCELED, 0.2)
        elif how == "lease":
            stage.keeper.renew([(kept, in_s(0.1))])
        return await kept.ended, stage.living()

    ended, living = play(scenario)

    assert living == []
    reasons = {
        "canceled": EndReason.CANCELED,
        "time limit": EndReason.TIMED_OUT,
        "lease": EndReason.LEASE_LOST,
        "its own end": None,
    }
    assert ended.reason is reasons[how]


def test_the_end_of_one_job_leaves_the_hidden_processes_of_another_alone(stage: Stage) -> None:
    async def scenario() -> list[int]:
        other, _ = await stage.escape()
        await stage.shell("setsid sleep 0.01 & exit 0").ended
        living = stage.living()
        stage.keeper.stop(other, EndReason.CANCELED, 0.0)
        await other.ended
        return living

    assert len(play(scenario)) == 2


def test_term_reaches_the_whole_tree_and_it_has_its_grace_although_the_first_process_is_gone(simple: Stage) -> None:
    script = f"""
    setsid sh -c 'trap "sleep 0.1; echo bye; exit 0" TERM; echo $$ >> {simple.pids}; while :; do sleep 0.01; done' & wait
    """

    async def scenario() -> TreeEnded:
        kept = simple.shell(script)
        await until_async(lambda: simple.numbers(), what="the second session is ready")
        simple.keeper.stop(kept, EndReason.CANCELED, 5.0)
        return await kept.ended

    ended = play(scenario)

    assert (ended.exit_code, ended.reason) == (-signal.SIGTERM, EndReason.CANCELED)
    assert simple.output() == "bye\n"


def test_a_later_reason_may_shorten_the_grace_but_not_replace_the_first(simple: Stage) -> None:
    async def scenario() -> TreeEnded:
        kept = simple.shell(f"trap '' TERM; echo $$ >> {simple.pids}; while :; do sleep 0.01; done")
        await until_async(lambda: simple.numbers(), what="the job is deaf")
        simple.keeper.stop(kept, EndReason.CANCELED, 60.0)
        simple.keeper.stop(kept, EndReason.LEASE_LOST, 0.0)
        return await kept.ended

    assert play(scenario).reason is EndReason.CANCELED


def test_no_grace_is_longer_than_the_lease(simple: Stage) -> None:
    async def scenario() -> tuple[TreeEnded, float]:
        deaf = f"trap '' TERM; echo $$ >> {simple.pids}; while :; do sleep 0.01; done"
        kept = simple.shell(deaf, lease_deadline=in_s(0.5))
        await until_async(lambda: simple.numbers(), what="the job is deaf")
        began = time.monotonic()
        simple.keeper.stop(kept, EndReason.CANCELED, 60.0)
        return await kept.ended, time.monotonic() - began

    ended, took_s = play(scenario)

    assert ended.reason is EndReason.CANCELED
    assert took_s < 5


def test_a_renewed_lease_moves_the_keepers_own_timer(simple: Stage) -> None:
    async def scenario() -> tuple[TreeEnded, float]:
        kept = simple.shell("exec sleep 60", lease_deadline=in_s(0.2))
        await kept.started
        began = time.monotonic()
        simple.keeper.renew([(kept, in_s(0.6))])
        return await kept.ended, time.monotonic() - began

    ended, took_s = play(scenario)

    assert ended.reason is EndReason.LEASE_LOST
    assert took_s > 0.5


def test_a_worker_that_hangs_changes_nothing_about_the_deadline(simple: Stage) -> None:
    async def scenario() -> bool:
        kept = simple.shell(f"echo $$ >> {simple.pids}; exec sleep 60", lease_deadline=in_s(0.3))
        await kept.started
        until(lambda: simple.numbers() and not simple.living(), what="the job is ended while this loop hangs")
        return kept.ended.done()

    assert not play(scenario)


# ---------------------------------------------------------------------------------------------------- deaths

DOOMED = """
import asyncio, sys
from pathlib import Path
from tests.worker.keeper_stage import Stage
from tasuki.worker.keeper.client import Keeper
keeper = Keeper.start(sys.argv[2], cgroup=sys.argv[3] == "cgroup")
async def scenario():
    stage = Stage(Path(sys.argv[1]), keeper)
    await stage.escape("untagged")
    print(keeper.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(scenario())
"""


def doomed_worker(tmp_path: Path, incarnation: str, level: str) -> tuple[subprocess.Popen[bytes], int]:
    """A worker process with a job that hides, and the number of its keeper."""
    command = [sys.executable, "-c", DOOMED, str(tmp_path), incarnation, level]
    worker = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE)
    assert worker.stdout is not None
    return worker, int(worker.stdout.readline())


def numbers_in(tmp_path: Path) -> list[int]:
    return [int(line) for line in (tmp_path / "pids").read_text().split()]


def test_when_the_worker_is_killed_its_jobs_and_its_keeper_go(tmp_path: Path, incarnation: str, level: str) -> None:
    worker, keeper_pid = doomed_worker(tmp_path, incarnation, level)
    pids = numbers_in(tmp_path)
    assert all(alive(pid) for pid in pids)

    worker.kill()
    worker.communicate()

    until(lambda: not any(alive(pid) for pid in [*pids, keeper_pid]), what="nothing of the worker is alive")


WITHOUT_WORKER = """
import os, socket, sys
from tasuki.worker.keeper.keeper import keep
ours, theirs = socket.socketpair()
ours.close()
keep(theirs, sys.argv[1], os.getppid(), cgroup=False)
"""


def test_a_keeper_whose_worker_left_before_its_first_report_ends(incarnation: str) -> None:
    ended = subprocess.run([sys.executable, "-c", WITHOUT_WORKER, incarnation], timeout=DEADLINE_S, check=False)

    assert ended.returncode == 0


def test_when_the_keeper_is_killed_the_worker_learns_it_and_a_sweep_ends_the_rest(stage: Stage, incarnation: str) -> None:
    async def scenario() -> list[int]:
        kept, pids = await stage.escape()
        os.kill(stage.keeper.pid, signal.SIGKILL)
        with pytest.raises(KeeperLost, match="restart this process"):
            await kept.ended
        with pytest.raises(KeeperLost):
            await stage.shell("true").started
        assert [pid for pid in pids if alive(pid)] == pids
        return pids

    pids = play(scenario)

    sweep(incarnation, stage.folder)

    assert stage.living() == []
    assert len(pids) == 2


def test_a_cgroup_holds_what_has_hidden_from_everything_else(tmp_path: Path, incarnation: str, require: Require) -> None:
    require("a delegated cgroup", has_cgroup(), "run the tests as root, or below a delegated cgroup")
    worker, keeper_pid = doomed_worker(tmp_path, incarnation, "cgroup")
    worker.send_signal(signal.SIGSTOP)
    os.kill(keeper_pid, signal.SIGKILL)
    worker.kill()
    worker.communicate()

    sweep(incarnation, tmp_path / "job")

    assert not any(alive(pid) for pid in numbers_in(tmp_path))


def test_a_sweep_bears_a_path_of_somebody_else_that_is_too_long_to_be_read(tmp_path: Path) -> None:
    dig = "import os, sys\nfor _ in range(20): os.mkdir('d' * 250); os.chdir('d' * 250)\nprint('deep', flush=True)\ninput()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", dig], cwd=tmp_path, start_new_session=True, **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"deep\n"
        with pytest.raises(OSError, match="too long"):
            Path(f"/proc/{other.pid}/cwd").readlink()

        assert sweep("somebody", tmp_path / "elsewhere") == []
        other.communicate(b"\n")


def test_a_sweep_leaves_other_incarnations_alone(simple: Stage) -> None:
    async def scenario() -> list[int]:
        kept, _ = await simple.escape()
        await asyncio.to_thread(sweep, "somebody-else", simple.folder / "elsewhere")
        living = simple.living()
        simple.keeper.stop(kept, EndReason.CANCELED, 0.0)
        await kept.ended
        return living

    assert len(play(scenario)) == 2


READER = "import os, sys, time; file = open(sys.argv[1]); print('open', flush=True); time.sleep(60)"


def test_a_sweep_ends_who_writes_into_a_run_folder_and_spares_who_reads_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    reading, writing = (
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", script, log], stdout=subprocess.PIPE, start_new_session=True, env={}, cwd="/"
        )
        for script in (READER, READER.replace("open(sys.argv[1])", "open(sys.argv[1], 'a')"))
    )
    try:
        for process in (reading, writing):
            assert process.stdout is not None
            process.stdout.readline()

        sweep("somebody", tmp_path)

        assert writing.wait(10) == -signal.SIGKILL
        assert reading.poll() is None
    finally:
        reading.kill()
        reading.communicate()
        writing.communicate()


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 8, b"\x05\x00\x00\x00hello", b"\x10\x00\x00\x00half"], ids=["length", "no msgpack", "half"]
)
def test_a_worker_that_talks_nonsense_loses_its_jobs_and_its_keeper(tmp_path: Path, incarnation: str, garbage: bytes) -> None:
    keeper = Keeper.start(incarnation, cgroup=False)
    stage = Stage(tmp_path, keeper)

    async def scenario() -> list[int]:
        kept, pids = await stage.escape()
        keeper._control.send(garbage)
        if garbage.endswith(b"half"):
            keeper._control.shutdown(1)
        with pytest.raises(KeeperLost):
            await kept.ended
        return pids

    pids = play(scenario)

    until(lambda: not any(alive(pid) for pid in pids), what="the jobs are gone")
    keeper.close()


def test_closing_the_keeper_ends_its_jobs_and_those_who_wait_for_them(tmp_path: Path, incarnation: str) -> None:
    keeper = Keeper.start(incarnation, cgroup=False)
    stage = Stage(tmp_path, keeper)

    async def scenario() -> None:
        kept, _ = await stage.escape()
        keeper.close()
        with pytest.raises(KeeperLost, match="closed"):
            await kept.ended

    play(scenario)

    assert stage.living() == []


def test_the_signals_that_end_a_service_are_left_to_the_worker(simple: Stage) -> None:
    async def scenario() -> TreeEnded:
        await simple.keeper.ready()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(simple.keeper.pid, number)
        return await simple.shell("exit 0").ended

    assert play(scenario).exit_code == 0


# ---------------------------------------------------------------------------------------------------- elsewhere, and for long


def test_without_linux_it_works_by_group_and_says_so(tmp_path: Path, incarnation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "system_for", lambda *_, **__: PlainSystem())

    with keeper_for(incarnation, cgroup=False) as keeper:
        stage = Stage(tmp_path, keeper)

        async def scenario() -> tuple[str, TreeEnded, TreeEnded]:
            own_end = await stage.shell("exit 4").ended
            deaf = stage.shell(f"trap '' TERM; echo $$ >> {stage.pids}; exec sleep 60", timeout_s=0.1)
            return (await keeper.ready()).detail, own_end, await deaf.ended

        detail, own_end, deaf = play(scenario)

    assert "what calls setsid is not found" in detail
    assert own_end.exit_code == 4
    assert deaf.reason is EndReason.TIMED_OUT
    until(lambda: not stage.living(), what="the group is gone")


def test_many_short_jobs_leave_no_process_and_no_descriptor(stage: Stage) -> None:
    def left() -> tuple[int, str]:
        pid = stage.keeper.pid
        return open_files(pid), Path(f"/proc/{pid}/task/{pid}/children").read_text()

    async def scenario() -> tuple[tuple[int, str], tuple[int, str]]:
        await stage.shell("exit 0").ended
        before = left()
        for _ in range(2):
            kept = [stage.shell("sleep 0 & exit 0") for _ in range(50)]
            assert {(await one.ended).exit_code for one in kept} == {0}
        return before, left()

    before, after = play(scenario)

    assert before == after
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > before[0]


def test_a_list_of_children_is_read_to_its_end_though_it_comes_by_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = " ".join(str(pid) for pid in range(100_000, 102_000)).encode()
    (tmp_path / "children").write_bytes(pids)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, at: pread(descriptor, min(size, 4095), at))

    with (tmp_path / "children").open("rb") as file:
        assert _read_whole(file.fileno()) == pids
