"""Processes of jobs on any POSIX system: process groups. Also the part of starting a process that Linux shares.

This is the fallback for systems other than Linux (`linux.py`): a process that leaves its group with `setsid` is not found here.
The keeper has one thread; so it can enter the working folder of a child for the moment of its start, and `posix_spawn` is
enough, at half the cost of fork and exec.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import select
import signal
from collections.abc import Iterable
from typing import NamedTuple, NoReturn

from tasuki.worker.keeper import protocol

MB = 1024 * 1024
CPU_GRACE_S = 5  # after SIGXCPU, before the kernel's SIGKILL
MEMORY_SLACK = 2  # one process may use this many times the limit; see docs/concepts.md, Limits
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class ExitedProcess(NamedTuple):
    """A child of the keeper that has ended and was waited for."""

    pid: int
    exit_code: int


class Usage(NamedTuple):
    """Usage of all processes of one job together."""

    processes: int = 0
    rss_bytes: int = 0


class PlainSystem:
    """Starts and ends jobs by process group. `number` always names a job, as in `Spawn`."""

    def __init__(self, why: str = "this is not Linux") -> None:
        self._why = why
        self.leaders: dict[int, int] = {}  # pid of the first process → number, until it is waited for
        self._groups: dict[int, int] = {}  # number → process group, until `forget`
        self.poll = select.poll()  # of the keeper, with the descriptors of warm interpreters
        self.reports: list[protocol.Report] = []  # to be sent to the worker
        self.begun: list[protocol.Spawned | protocol.NotSpawned] = []  # results of starts for which `spawn` returned None

    def ready(self) -> protocol.Ready:
        return protocol.Ready("group", f"process groups only, what calls setsid is not found ({self._why})", "none")

    # ------------------------------------------------------------------------------------------------ starting

    def prepare(self, order: protocol.Prepare) -> None:
        """Start the warm interpreter of an exec. There are none here: its jobs start as programs."""
        self.reports.append(protocol.Prepared(order.name, protocol.PythonStart.COLD, self._why))

    def withdraw(self, number: int) -> bool:
        """Cancel a start for which `spawn` returned None; False if it is too late, and `begun` will have it."""
        return False

    def spawn(self, order: protocol.Spawn) -> int | None:
        """Start the program in a session of its own and return its pid, or raise OSError. None: `begun` will have it."""
        os.chdir(order.cwd)
        if order.limits == protocol.NO_LIMITS:
            pid = spawn_session(order.program, order.argv, order.env, files_of(order))
        else:
            pid = _fork(order, rlimits_of(order.limits))
        self.leaders[pid] = order.number
        self._groups[order.number] = pid
        return pid

    def settle_in(self) -> None:
        """Leave the job's folder after the last start of a turn."""
        os.chdir("/")

    # ------------------------------------------------------------------------------------------------ ends

    def reap(self) -> list[ExitedProcess]:
        """Wait for the first processes that have ended, and return them."""
        reaped = []
        for pid in list(self.leaders):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                reaped.append(ExitedProcess(pid, os.waitstatus_to_exitcode(status)))
                del self.leaders[pid]
        return reaped

    def remains(self, numbers: Iterable[int]) -> set[int]:
        """Return those of these jobs, whose first process has ended, that have another living process."""
        return {number for number in numbers if _group_exists(self._groups[number])}

    def terminate(self, number: int) -> None:
        """Send SIGTERM to all processes of the job, and SIGCONT: a stopped process would not receive it."""
        signal_group(self._groups[number], signal.SIGTERM)
        signal_group(self._groups[number], signal.SIGCONT)

    def kill(self, number: int) -> None:
        """Send SIGKILL to all processes of the job that are found now."""
        signal_group(self._groups[number], signal.SIGKILL)

    def forget(self, number: int) -> None:
        """Drop a job that is over and has no process left."""
        self._groups.pop(number, None)

    # ------------------------------------------------------------------------------------------------ limits

    def usage(self) -> dict[int, Usage]:
        """Return the usage of jobs with watched limits, by number."""
        return {}

    def trouble(self, number: int, exit_code: int) -> tuple[protocol.EndReason | None, str]:
        """Return the reason and detail of an end that the keeper did not cause, as far as more than the exit code is known."""
        return None, ""

    def tick(self) -> None:
        """Do periodic work; called once a second while jobs run."""

    def close(self) -> None:
        """Release everything: the keeper ends."""


def rlimits_of(limits: protocol.Limits) -> list[tuple[int, int, int]]:
    """Return the limits that the kernel enforces for each process: (which, soft, hard)."""
    found: list[tuple[int, int, int]] = []
    if limits.cpu_seconds is not None:
        found.append((resource.RLIMIT_CPU, limits.cpu_seconds, limits.cpu_seconds + CPU_GRACE_S))
    if limits.file_size_mb is not None:
        found.append((resource.RLIMIT_FSIZE, limits.file_size_mb * MB, limits.file_size_mb * MB))
    if limits.open_files is not None:
        found.append((resource.RLIMIT_NOFILE, limits.open_files, limits.open_files))
    if limits.memory_mb is not None:  # last: the process that sets it needs some memory itself
        most = limits.memory_mb * MEMORY_SLACK * MB
        found.append((resource.RLIMIT_DATA, most, most))
    return found


def files_of(order: protocol.Spawn) -> list[tuple[int, bytes, int]]:
    """Return the files of a job's descriptors: (number, path, flags)."""
    append = os.O_WRONLY | os.O_APPEND
    files = [(0, order.stdin, os.O_RDONLY), (1, order.stdout, append), (2, order.stderr, append)]
    return [*files, (protocol.PROGRESS_DESCRIPTOR, order.progress, append)] if order.progress else files


def spawn_session(program: bytes, argv: tuple[bytes, ...], env: dict[bytes, bytes], files: list[tuple[int, bytes, int]]) -> int:
    """Start a program in a session of its own with these files (number, path, flags), and return its pid."""
    return os.posix_spawn(
        program,
        argv,
        env,
        file_actions=[(os.POSIX_SPAWN_OPEN, number, path, flags, 0) for number, path, flags in files],
        setsid=True,
        setsigmask=(),
        setsigdef=IGNORED_BY_PYTHON,
    )


def _fork(order: protocol.Spawn, rlimits: list[tuple[int, int, int]]) -> int:
    """Start a program that has limits from its first instruction on, which `posix_spawn` cannot set."""
    failed, fail = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            _exec(order, rlimits, fail)
    finally:
        os.close(fail)
        error = os.read(failed, 16)  # nothing: the end was closed by exec, or there was no fork
        os.close(failed)
    if error:
        os.waitpid(pid, 0)
        raise OSError(int(error), os.strerror(int(error)))
    return pid


def _exec(order: protocol.Spawn, rlimits: list[tuple[int, int, int]], fail: int) -> NoReturn:
    """Set the forked process up and exec the program."""
    try:
        os.setsid()
        for number in IGNORED_BY_PYTHON:
            signal.signal(number, signal.SIG_DFL)
        fail = fcntl.fcntl(fail, fcntl.F_DUPFD_CLOEXEC, protocol.PROGRESS_DESCRIPTOR + 1)  # above the job's own descriptors
        for descriptor, path, flags in files_of(order):
            opened = os.open(path, flags)
            if opened != descriptor:
                os.dup2(opened, descriptor)
            os.set_inheritable(descriptor, True)
        os.nice(order.limits.nice)
        for which, soft, hard in rlimits:
            most = resource.getrlimit(which)[1]
            resource.setrlimit(which, (_at_most(soft, most), _at_most(hard, most)))
        os.execve(order.program, order.argv, order.env)  # noqa: S606
    except OSError as error:
        os.write(fail, b"%d" % (error.errno or errno.EIO))
    except ValueError:
        os.write(fail, b"%d" % errno.EINVAL)
    finally:
        os._exit(os.EX_OSERR)


def _at_most(value: int, hard: int) -> int:
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def signal_group(group: int, what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it is gone, or has become another user
        os.killpg(group, what)


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        pass
    return True
