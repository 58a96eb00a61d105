"""cgroup v2 for the keeper: one group for all that it starts, and a leaf with limits for a job that has some.

    <own cgroup>/tasuki-<incarnation>/keeper    the keeper, and every job without limits of memory or processes
                                     /job-<n>   one such job (only with the controllers memory and pids)
                                     /worker    the worker, where it had to make room for the controllers

Jobs start in the keeper's group, so the group costs nothing per job, and no process leaves it by fork, setsid or a cleared
environment. While the keeper lives it finds its jobs by parentage; the group is for a keeper that was killed: one write to
`cgroup.kill` ends everything that it had started. Touches only /sys/fs/cgroup, and there only what is delegated to this process.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from tasuki.worker.keeper.protocol import Limits
from tasuki.worker.linux_calls import counter, look, write_file

PREFIX = "tasuki-"
CONTROLLERS = ("memory", "pids")
SYSTEMD = Path("/run/systemd/system")
_DELEGATE = ("trusted.delegate", "user.delegate")  # how systemd marks what it has handed over
_MB = 1024 * 1024
_KILL_S = 5.0
_POLL_S = 0.01


class NoCgroup(Exception):
    """There is no cgroup to use; the message says why. Stays inside the keeper, which works without one."""


class ControlGroup:
    """The group of one keeper. Made by `join`."""

    def __init__(self, base: Path, incarnation: str, worker_pid: int) -> None:
        self.path = base / f"{PREFIX}{incarnation}"
        self._base = base
        self._worker_pid = worker_pid
        self._moved: list[int] = []
        self.has_limits = False

    @classmethod
    def join(cls, incarnation: str, worker_pid: int) -> ControlGroup:
        """Make the group and move this process into it, or NoCgroup."""
        group = cls(delegated(), incarnation, worker_pid)
        try:
            (group.path / "keeper").mkdir(parents=True)
            write_file(group.path / "keeper/cgroup.procs", "0")
            if not (group.path / "cgroup.kill").exists():
                raise NoCgroup("this kernel has no cgroup.kill (it came with 5.14)")
        except (OSError, NoCgroup) as error:
            group.close()
            raise NoCgroup(str(error)) from error
        group.has_limits = group._enable()
        return group

    def _enable(self) -> bool:
        """Enable the controllers for the leaves. A cgroup that hands them on may have no process itself (except the root)."""
        wanted = " ".join(f"+{name}" for name in CONTROLLERS)
        if lacking(self._base):
            return False
        try:
            self._make_room()
            write_file(self._base / "cgroup.subtree_control", wanted)
            write_file(self.path / "cgroup.subtree_control", wanted)
        except OSError:  # other processes share this cgroup, whose limits must not be set then
            return False
        return True

    def _make_room(self) -> None:
        """Move the worker and its children one level down, if no other process is in this cgroup."""
        pids = [int(pid) for pid in (self._base / "cgroup.procs").read_text().split()]
        family = [pid for pid in pids if pid == self._worker_pid or ((seen := look(pid)) and seen.parent == self._worker_pid)]
        if family == pids:
            (self.path / "worker").mkdir()
            for pid in family:
                write_file(self.path / "worker/cgroup.procs", str(pid))
            self._moved = family

    def leaf(self, number: int, limits: Limits) -> JobGroup:
        """Make a leaf with these limits, or raise OSError."""
        return JobGroup(self.path, number, limits)

    def close(self) -> None:
        """Move the processes back and remove the group. No process of a job may be alive."""
        wanted = " ".join(f"-{name}" for name in CONTROLLERS)
        with contextlib.suppress(OSError):
            if self.has_limits:
                write_file(self.path / "cgroup.subtree_control", wanted)
                write_file(self._base / "cgroup.subtree_control", wanted)
        for pid in (*self._moved, 0):  # 0: this process
            with contextlib.suppress(OSError):
                write_file(self._base / "cgroup.procs", str(pid))
        remove(self.path)


class JobGroup:
    """The cgroup of one job."""

    def __init__(self, group: Path, number: int, limits: Limits) -> None:
        self.path = group / f"job-{number}"
        self._group = group
        self._processes = limits.processes
        self.path.mkdir()
        try:
            self._limit(limits)
        except OSError:
            self.remove()
            raise

    def _limit(self, limits: Limits) -> None:
        if limits.memory_mb is not None:
            write_file(self.path / "memory.max", str(limits.memory_mb * _MB))
            write_file(self.path / "memory.oom.group", "1")  # half a job is of no use
            with contextlib.suppress(OSError):  # a kernel without swap accounting
                write_file(self.path / "memory.swap.max", "0")
        self._allow_processes(0)

    def _allow_processes(self, more: int) -> None:
        if self._processes is not None:
            write_file(self.path / "pids.max", str(self._processes + more))

    def __enter__(self) -> JobGroup:
        """Move the keeper in: a process that it starts now is in here from its first instruction."""
        self._allow_processes(1)  # the keeper itself counts while it is here
        write_file(self.path / "cgroup.procs", "0")
        return self

    def __exit__(self, *_: object) -> None:
        write_file(self._group / "keeper/cgroup.procs", "0")
        self._allow_processes(0)

    def oom_kills(self) -> int:
        return counter(self.path / "memory.events", "oom_kill")

    def forks_refused(self) -> int:
        return counter(self.path / "pids.events", "max")

    def kill(self) -> None:
        write_file(self.path / "cgroup.kill", "1")

    def remove(self) -> None:
        with contextlib.suppress(OSError):  # a process that has just died may still be counted; `ControlGroup.close` tries again
            self.path.rmdir()


def delegated() -> Path:
    """Return this process's cgroup if groups may be made below it, or raise NoCgroup."""
    mount, name = _mount(), _own()
    base = mount / name.lstrip("/")
    if not (os.access(base, os.W_OK) and os.access(base / "cgroup.procs", os.W_OK)):
        raise NoCgroup(f"cgroup {base} of this process may not be written (systemd: Delegate=yes, and User=)")
    if os.geteuid() == 0 and name != "/" and SYSTEMD.exists() and not _marked(base):
        raise NoCgroup(f"cgroup {base} of this process belongs to systemd (Delegate=yes hands it over)")
    return base


def lacking(base: Path) -> list[str]:
    """Return the needed controllers that this cgroup does not have."""
    available = (base / "cgroup.controllers").read_text().split()
    return [name for name in CONTROLLERS if name not in available]


def _marked(base: Path) -> bool:
    for name in _DELEGATE:
        with contextlib.suppress(OSError):
            return os.getxattr(base, name) == b"1"
    return False


def _mount() -> Path:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            _, _, _, root, point, *_ = before.split()
            if root == "/":
                return Path(point)
    raise NoCgroup("there is no cgroup v2 file system")


def _own() -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line.removeprefix("0::")
    raise NoCgroup("this process is in no cgroup of version 2")


def kill_group_of(incarnation: str) -> bool:
    """Kill the processes in the group of a dead incarnation, wherever that was, remove it, and return whether there were any."""
    try:
        mount = _mount()
    except (OSError, NoCgroup):
        return False
    found = [Path(path) for path, _, _ in os.walk(mount) if path.endswith(f"/{PREFIX}{incarnation}")]
    killed = False
    for path in found:
        killed = killed or bool(_populated(path))
        with contextlib.suppress(OSError):  # gone meanwhile, or not writable
            write_file(path / "cgroup.kill", "1")
        deadline = time.monotonic() + _KILL_S
        while _populated(path) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        remove(path)
    return killed


def _populated(path: Path) -> int:
    return counter(path / "cgroup.events", "populated")


def remove(path: Path) -> None:
    """Remove a group and its leaves, as far as they are empty."""
    for leaf in [*path.glob("*/"), path]:
        with contextlib.suppress(OSError):
            leaf.rmdir()
