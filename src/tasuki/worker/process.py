"""One job's process group on Linux: start, wait, stop. The seam behind which the keeper will stand.

Theory of operation. The process is the leader of a session and a group of its own. Its pidfd tells the loop of its end,
so that waiting costs no thread. The dead leader is left unreaped (a zombie) until the rest of its group is killed: as
long as it is there its number cannot be given to another process, so a signal to the group never hits a stranger. A
SIGKILL to a group is atomic against fork: whoever is born later is born dead. What left the group with `setsid` is not
found here.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tasuki.worker.commands import MARK, Command

POLL_S = 0.05  # how often a group is looked at that was signalled and is not empty yet; the rare path
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)

logger = logging.getLogger(__name__)


class Process(Protocol):
    """A started job, whoever started it."""

    pid: int
    exited: asyncio.Future[None]
    """Done when the first process has ended; others of its group may still be there."""

    def terminate(self) -> None:
        """Ask the whole group to end."""
        ...

    def kill(self) -> None:
        """Kill the whole group. Harmless when it is gone."""
        ...

    async def emptied(self) -> None:
        """Return when nothing of the group is alive (the unreaped leader does not count)."""
        ...

    async def end(self) -> int:
        """Kill what is left, wait until the group is empty, and give the exit code (negative: a signal). May be repeated."""
        ...


Spawn = Callable[[Command, int, int, int], Process]
"""`spawn(command, stdin, stdout, stderr)`, the latter as file descriptors; OSError if it cannot be started."""


class GroupProcess:
    """A `Process` that is a child of this one."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.pid = child.pid
        self._child = child
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = self._loop.create_future()
        self._pidfd = os.pidfd_open(child.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if not self.exited.done():
            self.exited.set_result(None)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a stopped process cannot hear the first one

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._child.returncode is None:  # not reaped yet: the number is still this group's
            try:
                os.killpg(self.pid, number)
            except PermissionError:  # it has become another user (setuid): it can only be waited for
                logger.warning("process group %d may not be signalled", self.pid)

    async def emptied(self) -> None:
        while living_members(self.pid):  # noqa: ASYNC110  # the kernel tells nobody when a group becomes empty
            await asyncio.sleep(POLL_S)

    async def end(self) -> int:
        self.kill()
        await asyncio.shield(self.exited)
        self.kill()  # what the leader started between the first one and its end
        code = self._child.wait()  # it has ended: this only reaps
        if _group_exists(self.pid):
            await self.emptied()
        return code


def spawn(command: Command, stdin: int, stdout: int, stderr: int) -> GroupProcess:
    """Start the command in its own session. `subprocess` uses vfork here: its cost does not grow with the worker's size."""
    child = subprocess.Popen(
        command.argv,
        executable=command.program,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd=command.cwd,
        env=command.env,
        close_fds=True,
        start_new_session=True,
    )
    return GroupProcess(child)


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def living_members(group: int) -> list[int]:
    """The processes of a group that are not zombies; those are dead, and stay for ever where nobody reaps orphans."""
    found = []
    for pid in _pids():
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group and fields[0] not in (b"Z", b"X"):
            found.append(pid)
    return found


def kill_marked(incarnation: str) -> list[int]:
    """SIGKILL every process whose environment has the mark of this (dead) incarnation; return their numbers."""
    wanted = f"{MARK}={incarnation}/".encode()
    killed = []
    for pid in _pids():
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:  # the pidfd is older than the look: what is killed is what was looked at
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if any(entry.startswith(wanted) for entry in environment.split(b"\0")):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                killed.append(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended, or it is another user's and none of ours
        finally:
            os.close(pidfd)
    return killed


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the parent's thread that forked it ends; end at once if that was already."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != parent_pid:
        os._exit(os.EX_UNAVAILABLE)
