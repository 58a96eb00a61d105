"""The keeper's loop: phases and deadlines of all jobs of one worker.

Theory of operation. One thread, one poll over three things: the worker's orders, the ends of processes (SIGCHLD), and the
worker's own end. A job goes one way through its phases:

    STARTING ──forked by its warm interpreter──► RUNNING          (a program is RUNNING at once)
    RUNNING ──stop, time limit, lease deadline──► STOPPING (TERM was sent) ──grace over──► KILLING ──tree empty──► reported
       └──its first process ends, a limit was passed──────────────────────────────────────────┘

An attempt is reported when none of its processes is alive, not when its first process ends. In STOPPING the rest of the tree
keeps its grace even if the first process is gone. The lease deadlines are the keeper's own timers, set with the start and once
per heartbeat: a worker that hangs loses its jobs in time. When the worker dies, or sends bytes that cannot be decoded, every
tree is killed and the keeper ends. `PlainSystem` and `LinuxSystem` act on processes; this file has only phases and time.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import select
import signal
import socket
import sys
from math import inf
from typing import NoReturn

from tasuki.clocks import boot_time
from tasuki.errors import ProtocolError
from tasuki.worker.keeper import protocol
from tasuki.worker.keeper.plain import PlainSystem

if sys.platform == "linux":
    from tasuki.worker.keeper.cgroup import NoCgroup, delegated
    from tasuki.worker.keeper.linux import LinuxSystem, ready_with

LEASE_LOST_GRACE_S = 1.0  # the store waits LEASE_MARGIN_S past the lease before it gives the job away: be gone by then
RECHECK_S = 0.02  # how soon a tree that was killed is checked again; the end of a process wakes the keeper earlier
WATCH_S = 0.05  # how often limits of whole trees are checked; a fork bomb makes some hundred processes in that time
TOGETHER_S = 0.002  # how long a Spawned waits for more reports: if the job ends at once, the worker is woken once
TICK_S = 1.0  # poll counts time as CLOCK_MONOTONIC: after a machine's sleep no deadline is later than this
MB = 1024 * 1024
_NOT_OURS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # for the worker, which drains and needs the keeper for that


class Phase(enum.Enum):
    STARTING = 0
    RUNNING = 1
    STOPPING = 2
    KILLING = 3


class _KeptJob:
    """One attempt that was started and is not reported yet."""

    def __init__(self, order: protocol.Spawn) -> None:
        self.order = order
        self.phase = Phase.STARTING
        self.stop_with: tuple[protocol.EndReason, float] | None = None
        """Reason and grace of a stop that came too late to cancel the start."""
        self.exit_code: int | None = None  # exit code of the first process; None while it lives
        self.reason: protocol.EndReason | None = None
        self.detail = ""
        self.lease_deadline = inf if order.lease_deadline is None else order.lease_deadline
        self.time_limit = inf
        self.kill_at = inf
        self.look_at = inf

    def run(self, at: float) -> None:
        """Enter RUNNING: the process exists, and its time limit counts from now."""
        self.phase = Phase.RUNNING
        if self.order.timeout_s is not None:
            self.time_limit = at + self.order.timeout_s

    @property
    def due(self) -> float:
        """The time of its next timer."""
        match self.phase:
            case Phase.STARTING:
                return self.lease_deadline if self.stop_with is None else inf
            case Phase.RUNNING:
                return min(self.lease_deadline, self.time_limit)
            case Phase.STOPPING:  # no grace is longer than the lease
                return min(self.kill_at, self.lease_deadline + LEASE_LOST_GRACE_S)
            case Phase.KILLING:
                return self.look_at


class KeeperLoop:
    """Supervises all jobs of one worker until the worker is gone."""

    def __init__(self, control: socket.socket, system: PlainSystem, worker_pid: int) -> None:
        self._control = control
        self._system = system
        self._worker_pid = worker_pid
        self._socket: protocol.KeeperStream[protocol.Order] = protocol.KeeperStream(control, list[protocol.Order])
        self._jobs: dict[int, _KeptJob] = {}
        self._by_pid: dict[int, _KeptJob] = {}
        self._reports = system.reports
        self._alone = False
        self._watch_at = inf
        self._tick_at = 0.0
        self._tell_at = inf
        self._poll = system.poll
        self._worker: int | None = None

    def serve(self) -> None:
        """Work until the worker is gone and its jobs have ended."""
        self._listen()
        try:
            self._reports.append(self._system.ready())
            while self._jobs or not self._alone:
                self._turn()
        except BaseException:
            for number in self._jobs:  # a keeper that fails leaves no process behind
                self._system.kill(number)
            raise
        finally:
            self._system.close()

    def _listen(self) -> None:
        self._control.setblocking(False)
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        for number in _NOT_OURS:
            signal.signal(number, _nothing)  # not SIG_IGN: that would be inherited
        signal.signal(signal.SIGCHLD, _nothing)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        if hasattr(os, "pidfd_open"):  # a child of the worker may keep the control socket open after the worker's end
            with contextlib.suppress(ProcessLookupError):
                self._worker = os.pidfd_open(self._worker_pid)
                self._poll.register(self._worker, select.POLLIN)
        if os.getppid() != self._worker_pid:
            self._abandon()

    # ------------------------------------------------------------------------------------------------ one turn

    def _turn(self) -> None:
        self._flush()
        for descriptor, _ in self._poll.poll(self._wait_ms()):
            if descriptor == self._wake.fileno():
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(protocol.READ_BYTES)
            elif descriptor == self._worker:
                self._abandon()
            elif descriptor == self._control.fileno() and not self._alone:
                self._read()
        at = boot_time()
        self._reap(at)
        self._timers(at)
        self._begin(at)  # an interpreter that was found to have ended, or was given up
        self._settle(at)

    def _wait_ms(self) -> float | None:
        if not self._jobs:  # abandoned while it reported: nothing would wake it any more
            return 0.0 if self._alone else None
        due = min(self._watch_at, self._tick_at, self._tell_at, *(job.due for job in self._jobs.values()))
        return max(0.0, due - boot_time()) * 1000 + 1  # poll drops fractions: one more, and it does not wake too early

    def _read(self) -> None:
        try:
            orders = self._socket.receive()
        except ConnectionError:
            self._abandon()
            return
        except ProtocolError as error:
            print(f"tasuki-keeper: {error.message}; all jobs are ended", file=sys.stderr)  # noqa: T201
            self._abandon()
            return
        for order in orders:
            self._obey(order)
        if orders:
            self._system.settle_in()

    def _obey(self, order: protocol.Order) -> None:
        match order:
            case protocol.Prepare():
                self._system.prepare(order)
            case protocol.Spawn():
                self._spawn(order)
            case protocol.RenewDeadlines():
                for number, deadline in order.deadlines:
                    if (job := self._jobs.get(number)) is not None:
                        job.lease_deadline = deadline
            case protocol.StopAttempt():
                if (job := self._jobs.get(order.number)) is not None:
                    self._stop(job, order.reason, order.grace_s, boot_time())

    def _spawn(self, order: protocol.Spawn) -> None:
        at = boot_time()
        if order.lease_deadline is not None and order.lease_deadline <= at:
            self._reports.append(protocol.NotSpawned(order.number, errno.ETIME))
            return
        try:
            pid = self._system.spawn(order)
        except OSError as error:
            self._reports.append(protocol.NotSpawned(order.number, error.errno or errno.EIO))
            return
        except ValueError:  # a NUL in an argument
            self._reports.append(protocol.NotSpawned(order.number, errno.EINVAL))
            return
        job = self._jobs[order.number] = _KeptJob(order)
        if pid is not None:
            self._run(job, pid, at)

    def _run(self, job: _KeptJob, pid: int, at: float) -> None:
        job.run(at)
        self._by_pid[pid] = job
        if job.order.limits.watched:
            self._watch_at = min(self._watch_at, at + WATCH_S)
        if not self._reports:
            self._tell_at = at + TOGETHER_S
        self._reports.append(protocol.Spawned(job.order.number, pid, at))

    def _begin(self, at: float) -> None:
        """Handle the results of starts that waited for warm interpreters."""
        found, self._system.begun = self._system.begun, []
        for begun in found:
            job = self._jobs[begun.number]
            if isinstance(begun, protocol.NotSpawned):
                del self._jobs[begun.number]
                error = begun.errno if job.stop_with is None else _errno_of(job.stop_with[0])
                self._reports.append(protocol.NotSpawned(begun.number, error, begun.message))
                continue
            self._run(job, begun.pid, at)
            if job.stop_with is not None:
                self._stop(job, *job.stop_with, at)

    # ------------------------------------------------------------------------------------------------ ends

    def _stop(self, job: _KeptJob, reason: protocol.EndReason, grace_s: float, at: float) -> None:
        """Send TERM now and KILL after the grace. A later reason does not replace the first; it may only shorten the grace."""
        number = job.order.number
        if job.phase is Phase.STARTING:
            if self._system.withdraw(number):
                del self._jobs[number]
                self._reports.append(protocol.NotSpawned(number, _errno_of(reason)))
            else:
                job.stop_with = job.stop_with or (reason, grace_s)
        if job.phase is Phase.RUNNING:
            job.phase, job.reason = Phase.STOPPING, reason
            if grace_s > 0:
                self._system.terminate(number)
        if job.phase is Phase.STOPPING:
            job.kill_at = min(job.kill_at, at + grace_s)
            if job.kill_at <= at:
                self._kill(job, at)

    def _kill(self, job: _KeptJob, at: float) -> None:
        job.phase = Phase.KILLING
        self._system.kill(job.order.number)
        job.look_at = at + RECHECK_S

    def _abandon(self) -> None:
        """Kill all jobs: the worker is gone. The socket stays open until all have ended, which shows that the keeper lives."""
        if self._alone:
            return
        self._alone = True
        self._poll.unregister(self._control)
        if self._worker is not None:
            self._poll.unregister(self._worker)
        for job in list(self._jobs.values()):
            self._stop(job, protocol.EndReason.SHUTDOWN, 0.0, boot_time())

    def _reap(self, at: float) -> None:
        ended = self._system.reap()
        self._begin(at)
        for reaped in ended:
            job = self._by_pid.pop(reaped.pid)
            job.exit_code = reaped.exit_code
            if job.phase is Phase.RUNNING:  # the processes that it leaves behind get no grace
                job.phase, job.look_at = Phase.KILLING, at
                job.reason, job.detail = self._system.trouble(job.order.number, reaped.exit_code)

    def _timers(self, at: float) -> None:
        if self._jobs and at >= self._tick_at:
            self._tick_at = at + TICK_S
            self._system.tick()
        if at >= self._watch_at:
            self._watch(at)
        for job in [job for job in self._jobs.values() if job.due <= at]:
            if job.phase is Phase.STOPPING:
                self._kill(job, at)
            elif job.phase in (Phase.STARTING, Phase.RUNNING) and job.lease_deadline <= at:
                self._stop(job, protocol.EndReason.LEASE_LOST, min(job.order.grace_s, LEASE_LOST_GRACE_S), at)
            elif job.phase is Phase.RUNNING:
                self._stop(job, protocol.EndReason.TIMED_OUT, job.order.grace_s, at)

    def _watch(self, at: float) -> None:
        """Enforce limits of whole trees, where no cgroup does."""
        usage = self._system.usage()
        self._watch_at = at + WATCH_S if usage else inf
        for number, used in usage.items():
            job = self._jobs[number]
            limits = job.order.limits
            if job.phase is not Phase.RUNNING:
                continue
            if limits.memory_mb is not None and used.rss_bytes > limits.memory_mb * MB:
                job.detail = f"it had {used.rss_bytes // MB} MB, its limit is {limits.memory_mb} MB"
                self._stop(job, protocol.EndReason.OOM, 0.0, at)
            elif limits.processes is not None and used.processes > limits.processes:
                job.detail = f"it had {used.processes} processes, its limit is {limits.processes}"
                self._stop(job, protocol.EndReason.PROCESS_LIMIT, 0.0, at)

    def _settle(self, at: float) -> None:
        """Report the trees that are empty; kill again what is not and should be."""
        ending = [job for job in self._jobs.values() if job.phase in (Phase.STOPPING, Phase.KILLING)]
        if not ending:
            return
        remains = self._system.remains(job.order.number for job in ending if job.exit_code is not None)
        for job in ending:
            number = job.order.number
            if job.exit_code is not None and number not in remains:
                self._system.forget(number)
                del self._jobs[number]
                self._reports.append(protocol.TreeEnded(number, job.exit_code, job.reason, job.detail, at))
            elif job.phase is Phase.KILLING and job.look_at <= at:
                self._kill(job, at)

    # ------------------------------------------------------------------------------------------------ reports

    def _flush(self) -> None:
        """Send all reports of a turn in one write, as far as the socket takes it. A Spawned alone waits for TOGETHER_S."""
        if not self._alone:
            if self._reports:
                if boot_time() < self._tell_at and all(type(report) is protocol.Spawned for report in self._reports):
                    return
                self._tell_at = inf
            try:
                more = self._socket.send(self._reports)
                self._poll.modify(self._control, select.POLLIN | (select.POLLOUT if more else 0))
            except ConnectionError:
                self._abandon()
        self._reports.clear()


def _errno_of(reason: protocol.EndReason) -> int:
    """Return the errno of a start that a stop has canceled."""
    return errno.ETIME if reason is protocol.EndReason.LEASE_LOST else errno.ECANCELED


def _nothing(*_: object) -> None:
    """Handle a signal that only wakes the poll, or is to be ignored."""


def system_for(incarnation: str, worker_pid: int, *, cgroup: bool) -> PlainSystem:
    """Return the best system of this machine."""
    if sys.platform != "linux":
        return PlainSystem()
    try:
        return LinuxSystem(incarnation, worker_pid, cgroup=cgroup)
    except OSError as error:  # a sandbox that is Linux by name only
        return PlainSystem(f"{error.strerror}: {error.filename or 'prctl'}")


def level_here() -> protocol.Ready:
    """Return what a keeper would report here, without starting one."""
    if sys.platform != "linux":
        return PlainSystem().ready()
    try:
        return ready_with(delegated(), "")
    except (NoCgroup, OSError) as error:
        return ready_with(None, str(error))


def keep(control: socket.socket, incarnation: str, worker_pid: int, *, cgroup: bool) -> NoReturn:
    """Run the keeper in a process that was just forked for it."""
    os.setsid()  # Ctrl-C in the worker's terminal is for the worker alone
    os.chdir("/")
    KeeperLoop(control, system_for(incarnation, worker_pid, cgroup=cgroup), worker_pid).serve()
    os._exit(os.EX_OK)
