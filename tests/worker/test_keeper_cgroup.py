"""The keeper's cgroups against a folder that behaves like cgroup v2 with its controllers, which few test machines hand out.

What the kernel does by itself (kill, count, refuse) is done here by hand; what is shown is that the keeper makes the right
groups, writes the right values to the right files in the right order, and leaves nothing behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tasuki.worker.keeper import cgroup
from tasuki.worker.keeper.cgroup import ControlGroup, JobGroup, NoCgroup, delegated, kill_group_of, lacking
from tasuki.worker.keeper.linux import LinuxSystem
from tasuki.worker.keeper.protocol import EndReason, Limits, Spawn

CORE_FILES = ("cgroup.procs", "cgroup.subtree_control", "cgroup.kill", "cgroup.events")
LIMIT_FILES = ("memory.max", "memory.oom.group", "memory.swap.max", "memory.events", "pids.max", "pids.events")
WORKER_PID = os.getpid()


class Hierarchy:
    """A cgroup v2 file system, as far as files go: a new folder has its control files, and goes with them."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.controllers = "cpu memory pids"
        mkdir: Callable[..., None] = Path.mkdir
        rmdir = Path.rmdir

        def made(path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
            if self.root not in path.parents:
                return mkdir(path, mode, parents, exist_ok)
            for group in (path.parent, path) if parents else (path,):
                if not group.exists():
                    mkdir(group, mode)
                    self.furnish(group)
            return None

        def removed(group: Path) -> None:
            if (group / "cgroup.procs").exists() and not any(path.is_dir() for path in group.iterdir()):
                for file in list(group.iterdir()):
                    file.unlink()
            rmdir(group)

        monkeypatch.setattr(Path, "mkdir", made)
        monkeypatch.setattr(Path, "rmdir", removed)
        self.furnish(root)
        (root / "cgroup.controllers").write_text(f"{self.controllers}\n")
        (root / "cgroup.procs").write_text(f"{WORKER_PID}\n")

    def furnish(self, group: Path) -> None:
        inherited = (group.parent / "cgroup.subtree_control").exists() and "+memory" in self.of(group.parent, "subtree_control")
        for name in (*CORE_FILES, *(LIMIT_FILES if inherited else ())):
            (group / name).write_text("")

    def of(self, group: Path, file: str) -> str:
        return (group / (file if "." in file else f"cgroup.{file}")).read_text().strip()

    def groups(self) -> list[str]:
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_dir())


@pytest.fixture
def hierarchy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hierarchy:
    root = tmp_path / "cgroup"
    root.mkdir()
    monkeypatch.setattr(cgroup, "_mount", lambda: root)
    monkeypatch.setattr(cgroup, "_own", lambda: "/")
    return Hierarchy(root, monkeypatch)


def test_the_keeper_moves_into_a_group_of_its_own_and_makes_room_for_the_controllers(hierarchy: Hierarchy) -> None:
    group = ControlGroup.join("inc", WORKER_PID)

    assert group.has_limits
    assert hierarchy.groups() == ["tasuki-inc", "tasuki-inc/keeper", "tasuki-inc/worker"]
    assert hierarchy.of(group.path / "keeper", "procs") == "0", "0 is whoever writes it"
    assert hierarchy.of(group.path / "worker", "procs") == str(WORKER_PID)
    assert hierarchy.of(hierarchy.root, "subtree_control") == "+memory +pids"
    assert hierarchy.of(group.path, "subtree_control") == "+memory +pids"


def test_at_its_end_all_go_back_and_nothing_is_left(hierarchy: Hierarchy) -> None:
    group = ControlGroup.join("inc", WORKER_PID)

    group.close()

    assert hierarchy.groups() == []
    assert hierarchy.of(hierarchy.root, "subtree_control") == "-memory -pids"


def test_where_others_live_in_the_cgroup_its_controllers_are_left_alone(hierarchy: Hierarchy) -> None:
    (hierarchy.root / "cgroup.procs").write_text(f"{WORKER_PID}\n{os.getppid()}\n")
    (hierarchy.root / "cgroup.subtree_control").unlink()  # the kernel's EBUSY: a write that fails

    group = ControlGroup.join("inc", WORKER_PID)

    assert not group.has_limits
    assert hierarchy.groups() == ["tasuki-inc", "tasuki-inc/keeper"]
    assert hierarchy.of(hierarchy.root, "procs").split() == [str(WORKER_PID), str(os.getppid())]


@pytest.mark.parametrize(("controllers", "lacks"), [("cpu memory pids", []), ("cpu memory", ["pids"]), ("", ["memory", "pids"])])
def test_which_controllers_are_not_handed_on(hierarchy: Hierarchy, controllers: str, lacks: list[str]) -> None:
    (hierarchy.root / "cgroup.controllers").write_text(controllers)

    assert lacking(hierarchy.root) == lacks
    assert ControlGroup.join("inc", WORKER_PID).has_limits == (not lacks)


def test_without_cgroup_kill_there_is_no_group_and_nothing_is_left(hierarchy: Hierarchy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.CORE_FILES", ("cgroup.procs", "cgroup.subtree_control"))

    with pytest.raises(NoCgroup, match=r"no cgroup\.kill"):
        ControlGroup.join("inc", WORKER_PID)

    assert hierarchy.groups() == []


@pytest.mark.parametrize(
    ("limits", "written"),
    [
        (Limits(memory_mb=64), {"memory.max": str(64 << 20), "memory.oom.group": "1", "memory.swap.max": "0", "pids.max": ""}),
        (Limits(processes=20), {"memory.max": "", "pids.max": "20"}),
        (Limits(memory_mb=1, processes=2), {"memory.max": str(1 << 20), "pids.max": "2"}),
    ],
)
def test_a_leaf_has_the_limits_of_its_job(hierarchy: Hierarchy, limits: Limits, written: dict[str, str]) -> None:
    leaf = ControlGroup.join("inc", WORKER_PID).leaf(7, limits)

    assert leaf.path.name == "job-7"
    assert {name: hierarchy.of(leaf.path, name) for name in written} == written


def test_a_kernel_without_swap_accounting_has_the_other_limits(hierarchy: Hierarchy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.LIMIT_FILES", ("memory.max", "memory.oom.group"))

    leaf = ControlGroup.join("inc", WORKER_PID).leaf(1, Limits(memory_mb=1))

    assert hierarchy.of(leaf.path, "memory.max") == str(1 << 20)


def test_what_is_started_in_a_leaf_is_born_there_and_the_keeper_comes_back(hierarchy: Hierarchy) -> None:
    group = ControlGroup.join("inc", WORKER_PID)
    keeper = group.path / "keeper"
    (keeper / "cgroup.procs").write_text("")

    with group.leaf(1, Limits(processes=5)) as leaf:
        assert hierarchy.of(leaf.path, "procs") == "0"
        assert hierarchy.of(keeper, "procs") == ""

    assert hierarchy.of(keeper, "procs") == "0"


def test_the_keeper_does_not_count_as_a_process_of_the_job(hierarchy: Hierarchy) -> None:
    with ControlGroup.join("inc", WORKER_PID).leaf(1, Limits(processes=1)) as leaf:
        assert hierarchy.of(leaf.path, "pids.max") == "2", "with 1 nothing could be started while the keeper is in there"

    assert hierarchy.of(leaf.path, "pids.max") == "1"


def test_a_leaf_that_is_killed_and_removed(hierarchy: Hierarchy) -> None:
    group = ControlGroup.join("inc", WORKER_PID)
    leaf = group.leaf(1, Limits(processes=5))

    leaf.kill()

    assert hierarchy.of(leaf.path, "kill") == "1"
    leaf.remove()
    assert "tasuki-inc/job-1" not in hierarchy.groups()


def _spawned(tmp_path: Path, limits: Limits) -> Spawn:
    log = tmp_path / "log"
    log.touch()
    path = os.fsencode(log)
    folder = os.fsencode(tmp_path)
    return Spawn(
        number=1,
        program=b"/bin/true",
        argv=(b"true",),
        env={},
        cwd=folder,
        folder=folder,
        mark=b"inc/lease",
        stdin=b"/dev/null",
        stdout=path,
        stderr=path,
        limits=limits,
    )


@pytest.mark.parametrize(
    ("file", "events", "exit_code", "trouble"),
    [
        ("memory.events", "low 0\noom 1\noom_kill 1\n", -9, (EndReason.OOM, "it needed more than its limit of 64 MB")),
        ("pids.events", "max 3\n", 1, (None, "its limit of 5 processes was reached")),
        ("memory.events", "low 0\noom 0\noom_kill 0\n", 1, (None, "")),
    ],
)
def test_why_a_job_ended_is_read_from_its_leaf(
    hierarchy: Hierarchy, tmp_path: Path, file: str, events: str, exit_code: int, trouble: tuple[EndReason | None, str]
) -> None:
    """In the keeper's hands, as `keeper.py` asks for it; the process itself is not started."""
    order = _spawned(tmp_path, Limits(memory_mb=64, processes=5))
    system = LinuxSystem.__new__(LinuxSystem)
    leaf = ControlGroup.join("inc", WORKER_PID).leaf(1, order.limits)
    system._orders, system._leaves, system._oom_kills = {1: order}, {1: leaf}, 1 << 60
    (leaf.path / file).write_text(events)

    assert system.trouble(1, exit_code) == trouble


def test_a_job_in_a_leaf_is_not_watched_as_well(hierarchy: Hierarchy, tmp_path: Path) -> None:
    system = LinuxSystem.__new__(LinuxSystem)
    order = _spawned(tmp_path, Limits(processes=5))
    system._orders, system._leaves = {1: order}, {1: ControlGroup.join("inc", WORKER_PID).leaf(1, order.limits)}

    assert system.usage() == {}


def test_the_group_of_a_dead_incarnation_is_found_wherever_it_was_killed_and_removed(hierarchy: Hierarchy) -> None:
    service = hierarchy.root / "system.slice"
    service.mkdir()
    dead = service / "tasuki-dead"
    (dead / "keeper").mkdir(parents=True)
    other = hierarchy.root / "tasuki-alive"
    other.mkdir()
    killed: list[str] = []

    def write(path: Path, text: str) -> None:
        killed.append(f"{path.relative_to(hierarchy.root)}={text}")
        (dead / "cgroup.events").write_text("populated 0\n")

    (dead / "cgroup.events").write_text("populated 1\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cgroup, "write_file", write)
        assert kill_group_of("dead")

    assert killed == ["system.slice/tasuki-dead/cgroup.kill=1"]
    assert hierarchy.groups() == ["system.slice", "tasuki-alive"]


def test_of_an_incarnation_without_a_group_nothing_is_killed(hierarchy: Hierarchy) -> None:
    assert not kill_group_of("never")


def test_a_cgroup_that_may_not_be_written_is_named_with_the_way_out(
    hierarchy: Hierarchy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)

    with pytest.raises(NoCgroup, match="Delegate=yes"):
        delegated()


def test_a_cgroup_of_systemds_own_is_left_alone_by_root(
    hierarchy: Hierarchy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hierarchy.root / "user.slice").mkdir()
    monkeypatch.setattr(cgroup, "_own", lambda: "/user.slice")
    monkeypatch.setattr(cgroup, "SYSTEMD", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    with pytest.raises(NoCgroup, match="belongs to systemd"):
        delegated()


def test_a_leaf_without_its_files_is_refused_and_not_half_limited(hierarchy: Hierarchy) -> None:
    group = ControlGroup.join("inc", WORKER_PID)
    (group.path / "cgroup.subtree_control").write_text("")  # somebody has taken the controllers back

    with pytest.raises(OSError, match=r"memory\.max"):
        JobGroup(group.path, 1, Limits(memory_mb=1))

    assert "tasuki-inc/job-1" not in hierarchy.groups()


def test_a_job_whose_leaf_cannot_be_made_is_watched_instead(hierarchy: Hierarchy, tmp_path: Path) -> None:
    system = LinuxSystem.__new__(LinuxSystem)
    system._group = ControlGroup.join("inc", WORKER_PID)
    (system._group.path / "cgroup.subtree_control").write_text("")

    assert system._leaf_for(_spawned(tmp_path, Limits(memory_mb=1))) is None
