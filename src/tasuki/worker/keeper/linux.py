"""Processes of jobs on Linux: finds and ends everything that a job has started, whatever it did to hide.

Theory of operation. The keeper is the *sub-reaper* of its jobs: a process whose parent dies becomes the keeper's own child,
never init's. So the tree below the keeper is complete, and no setsid, double fork or cleared environment leads out of it.
As soon as a job's first process has ended, the rest of its tree hangs from *strays*: children of the keeper that it did
not start itself. One short read of /proc/self/task/…/children shows whether there are any; for an ordinary job that is
all. The job of a stray is found, in this order, by

    its tag        a number that a job is started with: the soft limit of file locks, which Linux keeps, hands on to
                   children and has not used for anything since 2.4
    its marker     TASUKI_MARK in the environment that it was started with
    its session    that of the job's first process
    its files      its working folder, or a file that it can write to, is in the job's folder

A stray that has removed all four has hidden on purpose, and is killed with the next job that ends. The tag names the
incarnation too, so that processes that outlive a killed keeper are found without their environment (`sweep`).

A job of kind python is forked by a warm interpreter (`preforked.py`), which is a child of the keeper but not a job. The job
itself becomes the keeper's child before its first line of user code, tagged, in its session: then it is a job like any other.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tasuki.worker import linux_calls
from tasuki.worker.keeper.cgroup import ControlGroup, JobGroup, NoCgroup, kill_group_of
from tasuki.worker.keeper.plain import ExitedProcess, PlainSystem, Usage, signal_group
from tasuki.worker.keeper.preforked import WarmInterpreters, check_texts, start_process
from tasuki.worker.keeper.protocol import EndReason, NotSpawned, Prepare, Ready, Spawn, Spawned

RLIMIT_LOCKS = 10  # <asm-generic/resource.h>; the resource module does not have it because nothing uses it
TAG_BITS = 24  # of the number; 38 bits before it are the incarnation's
OOM_SCORE_ABOVE = 300  # added to the worker's score, so that the kernel kills jobs first when memory is short
FREEZE_PASSES = 20
READ_BYTES = 64 * 1024
VMSTAT = Path("/proc/vmstat")
PAGE_BYTES = 4096  # at most returned by one read of a list in /proc, unless an entry is larger
MARK = b"TASUKI_MARK="
SWEEP_S = 10.0  # a process that survives this long is stuck in the kernel (a dead disk); the start continues without it
SWEEP_POLL_S = 0.02
NOBODY = 0  # no job has this number; a stray that shows no sign and cannot be signalled (setuid) is not waited for


def tag_of(incarnation: str) -> int:
    """Return the part of a tag that all jobs of an incarnation share."""
    digest = hashlib.sha256(incarnation.encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> (64 - 38) | 1) << TAG_BITS


def ready_with(cgroup: Path | None, why_none: str, limits: str = "watched") -> Ready:
    """Return how well a keeper can find the processes of its jobs with this cgroup, or without any."""
    if cgroup is not None:
        return Ready("cgroup", f"whole trees, also after the keeper was killed; {cgroup}", limits)
    return Ready("subreaper", f"whole trees while the keeper lives; no cgroup: {why_none}", limits)


class LinuxSystem(PlainSystem):
    """Starts and ends jobs as trees of processes."""

    def __init__(self, incarnation: str, worker_pid: int, *, cgroup: bool = True) -> None:
        super().__init__()
        # Not the worker's command line: who kills the worker by it must leave the keeper, which ends the worker's programs.
        linux_calls.set_title(f"tasuki-keeper {worker_pid}")
        linux_calls.become_subreaper()
        self._pid = os.getpid()
        self._children: int | None = None  # the list of the keeper's children, opened once: it is read twice for every job
        with contextlib.suppress(FileNotFoundError):  # a kernel without it
            self._children = os.open(f"/proc/self/task/{self._pid}/children", os.O_RDONLY)
        self._locks = resource.getrlimit(RLIMIT_LOCKS)
        self._tag = tag_of(incarnation) if self._locks[1] == resource.RLIM_INFINITY else 0
        self._orders: dict[int, Spawn] = {}
        self._leaves: dict[int, JobGroup] = {}
        self._owners: dict[int, int | None] = {}
        """stray → number. A child that was not waited for keeps its pid, so this cannot go stale."""
        self._warm = WarmInterpreters(self._start_interpreter, self._on_begun, self.poll, self.reports)
        self._oom_score = str(min(1000, int(Path("/proc/self/oom_score_adj").read_text()) + OOM_SCORE_ABOVE))
        self._group: ControlGroup | None = None
        self._no_group = "switched off"
        self._oom_kills = linux_calls.counter(VMSTAT, "oom_kill")
        if cgroup:
            try:
                self._group = ControlGroup.join(incarnation, worker_pid)
            except NoCgroup as error:
                self._no_group = str(error)

    def ready(self) -> Ready:
        if self._group is None:
            return ready_with(None, self._no_group)
        return ready_with(self._group.path, "", "cgroup" if self._group.has_limits else "watched")

    # ------------------------------------------------------------------------------------------------ starting

    def spawn(self, order: Spawn) -> int | None:
        is_warm = bool(order.warm) and not self._warm.is_cold(order.warm)
        if is_warm:
            check_texts(order)
        leaf = self._leaf_for(order)
        tag = self._tag_for(order.number) if self._tag else None
        self._orders[order.number] = order
        if leaf is not None:
            self._leaves[order.number] = leaf
        try:
            if is_warm:
                self._warm.ask(order, tag=tag, leaf=None if leaf is None else leaf.path)
                return None
            with leaf or contextlib.nullcontext():
                if tag is not None:
                    resource.setrlimit(RLIMIT_LOCKS, tag)
                pid = super().spawn(order)
        except BaseException:
            self.forget(order.number)
            raise
        self._raise_oom_score(pid)
        return pid

    def _tag_for(self, number: int) -> tuple[int, int]:
        return self._tag | number % (1 << TAG_BITS), self._locks[1]

    def _raise_oom_score(self, pid: int | None) -> None:
        with contextlib.suppress(OSError):  # it has ended already
            linux_calls.write_file(f"/proc/{pid}/oom_score_adj", self._oom_score)

    def _leaf_for(self, order: Spawn) -> JobGroup | None:
        if self._group is None or not self._group.has_limits or not order.limits.watched:
            return None
        try:
            return self._group.leaf(order.number, order.limits)
        except OSError:  # the controllers were taken away: the job is watched instead
            return None

    def settle_in(self) -> None:
        super().settle_in()
        if self._tag:
            resource.setrlimit(RLIMIT_LOCKS, self._locks)

    # ------------------------------------------------------------------------------------------------ warm interpreters

    def prepare(self, order: Prepare) -> None:
        self._warm.prepare(order)

    def withdraw(self, number: int) -> bool:
        withdrawn = self._warm.withdraw(number)
        if withdrawn:
            self.forget(number)
        return withdrawn

    def _start_interpreter(self, order: Prepare, control: socket.socket) -> int:
        """Start it in a session of its own, with the incarnation's tag: the next start finds it if the keeper is killed."""
        if self._tag:
            resource.setrlimit(RLIMIT_LOCKS, self._tag_for(NOBODY))
        try:
            return start_process(order, control)
        finally:
            self.settle_in()

    def _on_begun(self, begun: Spawned | NotSpawned) -> None:
        """Adopt a job that a warm interpreter has forked, or drop one that it could not fork."""
        if isinstance(begun, Spawned):
            self.leaders[begun.pid] = begun.number
            self._groups[begun.number] = begun.pid
            self._raise_oom_score(begun.pid)
        else:
            self.forget(begun.number)
        self.begun.append(begun)

    # ------------------------------------------------------------------------------------------------ ends

    def reap(self) -> list[ExitedProcess]:
        """Wait for all children that have ended, and return the first processes of jobs among them."""
        ended = [ExitedProcess(pid, os.waitstatus_to_exitcode(status)) for pid, status in _waited()]
        # Only now: an interpreter reports a job's fork before the job can end as the keeper's child, so before it is among these.
        self._warm.read()
        reaped = []
        for one in ended:
            self._owners.pop(one.pid, None)
            if self.leaders.pop(one.pid, None) is not None:
                reaped.append(one)
            else:
                self._warm.ended(one.pid, one.exit_code)
        return reaped

    def remains(self, numbers: Iterable[int]) -> set[int]:
        wanted = set(numbers)
        found = {*self._strays(), *self._strays()}  # a list that changes while it is read may lack one: two passes
        owners = {self._owner(pid) for pid in found}
        return wanted if None in owners else wanted & owners

    def _strays(self) -> list[int]:
        if self._children is not None:
            pids = [int(pid) for pid in _read_whole(self._children).split()]
        else:
            pids = [seen.pid for seen in linux_calls.living() if seen.parent == self._pid]
        return [pid for pid in pids if pid not in self.leaders and pid not in self._warm.pids]

    def _owner(self, pid: int) -> int | None:
        if pid not in self._owners:
            self._warm.read()  # it may have been parked, or become a job, just now; that is reported before it can be seen
            if pid in self.leaders or pid in self._warm.pids:
                return self.leaders.get(pid, NOBODY)
            self._owners[pid] = self._find_owner(pid)
        return self._owners[pid]

    def _find_owner(self, pid: int) -> int | None:
        if self._tag:
            with contextlib.suppress(OSError):  # it has become another user (setuid)
                tag = resource.prlimit(pid, RLIMIT_LOCKS)[0]
                if tag >> TAG_BITS == self._tag >> TAG_BITS:
                    own = tag % (1 << TAG_BITS)
                    return next((number for number in self._orders if number % (1 << TAG_BITS) == own), None)
        marks = [entry.removeprefix(MARK) for entry in linux_calls.environment_of(pid) if entry.startswith(MARK)]
        seen = linux_calls.look(pid)
        for number, order in self._orders.items():
            if order.mark in marks or (seen is not None and seen.session == self._groups.get(number)):
                return number
        for number, order in self._orders.items():
            if linux_calls.works_under(pid, order.folder):
                return number
        return None if _may_signal(pid) else NOBODY

    # ------------------------------------------------------------------------------------------------ signals

    def terminate(self, number: int) -> None:
        if self._groups[number] in self.leaders:  # not waited for: the group's number is still this job's
            super().terminate(number)
        for seen in self._members([number])[number]:
            if seen.group != self._groups[number] or self._groups[number] not in self.leaders:
                linux_calls.signal_checked(seen, signal.SIGTERM)
                linux_calls.signal_checked(seen, signal.SIGCONT)

    def kill(self, number: int) -> None:
        """Stop all processes of the job until no new one is found, then kill them: a fork bomb outruns a kill one by one.

        Signals go to groups: one call for many, which misses none that is forked meanwhile. A group never spans two jobs, since
        each job has sessions of its own.
        """
        if self._groups.get(number) in self.leaders:
            super().kill(number)
        if number in self._leaves:
            self._leaves[number].kill()
        frozen: set[int] = set()
        for _ in range(FREEZE_PASSES):
            new = {seen.group for seen in self._members([number])[number]} - frozen - {os.getpgrp()}
            if not new:
                break
            for group in new:
                signal_group(group, signal.SIGSTOP)
            frozen |= new
        for group in frozen:
            signal_group(group, signal.SIGKILL)

    def forget(self, number: int) -> None:
        super().forget(number)
        self._orders.pop(number, None)
        leaf = self._leaves.pop(number, None)
        if leaf is not None:
            leaf.remove()

    # ------------------------------------------------------------------------------------------------ whole trees

    def _members(self, numbers: Iterable[int]) -> dict[int, list[linux_calls.ProcessInfo]]:
        """Return all living processes of these jobs: one pass over /proc, then down from first processes and strays."""
        below: defaultdict[int, list[linux_calls.ProcessInfo]] = defaultdict(list)
        for seen in linux_calls.living():
            below[seen.parent].append(seen)
        members: dict[int, list[linux_calls.ProcessInfo]] = {number: [] for number in numbers}
        for top in below[self._pid]:
            if top.pid in self._warm.pids:
                continue
            owner = self.leaders[top.pid] if top.pid in self.leaders else self._owner(top.pid)
            for number in members if owner is None else members.keys() & {owner}:
                members[number] += _with_descendants(top, below)
        return members

    def usage(self) -> dict[int, Usage]:
        watched = [n for n, order in self._orders.items() if order.limits.watched and n not in self._leaves]
        if not watched:
            return {}
        members = self._members(watched)
        return {number: Usage(len(found), sum(seen.rss_bytes for seen in found)) for number, found in members.items()}

    def trouble(self, number: int, exit_code: int) -> tuple[EndReason | None, str]:
        limits, leaf = self._orders[number].limits, self._leaves.get(number)
        if leaf is not None and leaf.oom_kills():
            return EndReason.OOM, f"it needed more than its limit of {limits.memory_mb} MB"
        if leaf is not None and leaf.forks_refused():
            return None, f"its limit of {limits.processes} processes was reached"
        if exit_code == -signal.SIGKILL and self._machine_oom():
            return EndReason.OOM, "killed by SIGKILL while the machine was out of memory"
        return None, ""

    def tick(self) -> None:
        self._machine_oom()
        self._warm.tick()

    def _machine_oom(self) -> bool:
        """Return whether the kernel has killed a process for lack of memory since the last call."""
        before, self._oom_kills = self._oom_kills, linux_calls.counter(VMSTAT, "oom_kill")
        return self._oom_kills > before

    def close(self) -> None:
        self._warm.close()
        if self._children is not None:
            os.close(self._children)
        if self._group is not None:
            self._group.close()


def _waited() -> Iterator[tuple[int, int]]:
    """Wait for all children that have ended by now, and yield them with their status."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, status


def _with_descendants(
    top: linux_calls.ProcessInfo, below: dict[int, list[linux_calls.ProcessInfo]]
) -> list[linux_calls.ProcessInfo]:
    found, at = [top], 0
    while at < len(found):
        found += below.get(found[at].pid, ())
        at += 1
    return found


def _may_signal(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except ProcessLookupError:  # it has ended meanwhile
        pass
    return True


def _read_whole(descriptor: int) -> bytes:
    """Read a file of /proc, which the kernel makes anew for each read from its beginning."""
    data = b""
    while piece := os.pread(descriptor, READ_BYTES, len(data)):
        data += piece
        if len(piece) < PAGE_BYTES // 2:  # pages are full except for the last
            break
    return data


# ---------------------------------------------------------------------------------------------------- after a dead keeper


def sweep(incarnation: str, folder: Path) -> list[int]:
    """Kill the processes of a dead incarnation, whose run folder this was, and return their pids.

    For the start of a worker on the same data folder, and for a worker that has lost its keeper."""
    if sys.platform != "linux":
        return []
    kill_group_of(incarnation)
    killed: set[int] = set()
    deadline = time.monotonic() + SWEEP_S
    empty_passes = 0
    while empty_passes < 2 and time.monotonic() < deadline:
        found = _left_of(incarnation, os.fsencode(folder.resolve()))
        for number in (signal.SIGSTOP, signal.SIGKILL):  # all are stopped first, so that none starts another
            for seen in found:
                if linux_calls.signal_checked(seen, number):
                    killed.add(seen.pid)
        empty_passes = 0 if found else empty_passes + 1
        if found:
            time.sleep(SWEEP_POLL_S)
    return sorted(killed)


def _left_of(incarnation: str, folder: bytes) -> list[linux_calls.ProcessInfo]:
    tag, mark = tag_of(incarnation) >> TAG_BITS, MARK + incarnation.encode() + b"/"
    everyone = [seen for seen in linux_calls.living() if seen.pid != os.getpid()]
    found = {seen.pid: seen for seen in everyone if _belongs(seen, tag, mark, folder)}
    grown = True
    while grown:  # down to the children, which may be better hidden than their parent
        below = {seen.pid: seen for seen in everyone if seen.parent in found and seen.pid not in found}
        found.update(below)
        grown = bool(below)
    return list(found.values())


def _belongs(seen: linux_calls.ProcessInfo, tag: int, mark: bytes, folder: bytes) -> bool:
    with contextlib.suppress(OSError):
        if resource.prlimit(seen.pid, RLIMIT_LOCKS)[0] >> TAG_BITS == tag:
            return True
    if any(entry.startswith(mark) for entry in linux_calls.environment_of(seen.pid)):
        return True
    # A person who works in the folder has a terminal; a job has none.
    return seen.terminal == 0 and linux_calls.works_under(seen.pid, folder)
