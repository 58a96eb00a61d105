"""The worker's end of its keeper: forks it, sends orders, and receives reports. Belongs to one event loop.

    keeper = Keeper.start(incarnation)          before the loop runs, in `Worker.run`
    kept = keeper.spawn(…)                      in the loop
    spawned = await kept.started                OSError: it was not started
    keeper.stop(kept, EndReason.CANCELED, 5.0)
    ended = await kept.ended                    no process of it is alive

Orders of one turn of the loop leave in one write. When the keeper is gone, every future that still waits gets KeeperLost.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from tasuki.errors import KeeperLost, PreloadFailed, ProtocolError
from tasuki.worker.keeper import protocol
from tasuki.worker.keeper.keeper import keep, level_here
from tasuki.worker.linux_calls import become_undumpable, run_after_fork

CLOSE_S = 5.0  # a keeper that takes longer to end was stopped, or waits for a process that is stuck in the kernel
PREPARED_LOG = {
    protocol.PythonStart.WARM: (logging.INFO, "exec %r: its interpreter is warm (imported in %s)"),
    protocol.PythonStart.COLD: (logging.WARNING, "exec %r: each job starts an interpreter of its own (%s)"),
    protocol.PythonStart.FAILED: (logging.ERROR, "exec %r: its jobs are refused, the import failed: %s"),
}

logger = logging.getLogger(__name__)


class KeptAttempt:
    """One attempt that the keeper runs."""

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.started: asyncio.Future[protocol.Spawned] = loop.create_future()
        self.ended: asyncio.Future[protocol.TreeEnded] = loop.create_future()

    def fail(self, error: Exception) -> None:
        for future in (self.started, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved: a caller may wait for only one of the two


class Keeper:
    """The keeper, as the worker sees it."""

    def __init__(self, control: socket.socket, pid: int) -> None:
        assert pid > 1, "0 and -1 would mean groups of processes in waitpid and kill"
        self.pid = pid
        self.level = level_here().level
        """cgroup, subreaper or group: how well it can find the processes of a job."""
        self.on_lost: Callable[[KeeperLost], None] = lambda error: None
        self.lost: KeeperLost | None = None
        self._control = control
        self._numbers = itertools.count(1)
        self._kept: dict[int, KeptAttempt] = {}
        self._socket: protocol.KeeperStream[protocol.Report] = protocol.KeeperStream(control, list[protocol.Report])
        self._orders: list[protocol.Order] = []
        self._turning = False  # whether there was an order in this turn of the loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[protocol.Ready] | None = None
        self._is_ready: protocol.Ready | None = None

    @classmethod
    def start(cls, incarnation: str, *, cgroup: bool = True) -> Keeper:
        """Fork the keeper, best before a loop or a thread is started. `cgroup=False`: use none even where it is delegated."""
        if sys.platform == "linux":
            become_undumpable()  # this process and the keeper: programs run as the same user, and could read its token
        ours, theirs = socket.socketpair()
        worker_pid = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            run_after_fork(lambda: _become_keeper(theirs, incarnation, worker_pid, cgroup))
        theirs.close()
        ours.setblocking(False)
        return cls(ours, pid)

    # ------------------------------------------------------------------------------------------------ orders

    def spawn(self, **fields: Any) -> KeptAttempt:
        """Start an attempt with the fields of a `Spawn`, except its number."""
        self._attach()
        assert self._loop is not None
        kept = KeptAttempt(next(self._numbers), self._loop)
        if self.lost is not None:
            kept.fail(self.lost)
            return kept
        self._kept[kept.number] = kept
        is_first = not self._turning
        self._order(protocol.Spawn(number=kept.number, **fields))
        if is_first:  # sent at once: a turn of the loop is a tenth of a start. Later orders of this turn go together
            self._flush()
        return kept

    def prepare(self, order: protocol.Prepare) -> None:
        """Start a warm interpreter; the result is logged."""
        self._attach()
        self._order(order)

    def stop(self, kept: KeptAttempt, reason: protocol.EndReason, grace_s: float) -> None:
        """Send TERM, and KILL after the grace. Without effect when the attempt has ended."""
        if kept.number in self._kept:
            self._order(protocol.StopAttempt(kept.number, reason, grace_s))

    def renew(self, deadlines: Iterable[tuple[KeptAttempt, float]]) -> None:
        """Set new lease deadlines."""
        known = [(kept.number, deadline) for kept, deadline in deadlines if kept.number in self._kept]
        if known:
            self._order(protocol.RenewDeadlines(known))

    def kill_all(self) -> None:
        """Send SIGKILL to every tree, without waiting. The last resort."""
        for number in self._kept:
            self._order(protocol.StopAttempt(number, protocol.EndReason.SHUTDOWN, 0.0))
        self._flush()

    async def ready(self) -> protocol.Ready:
        """Return how well the keeper can find the processes of a job, or raise KeeperLost."""
        self._attach()
        if self._is_ready is not None:
            return self._is_ready
        if self.lost is not None:
            raise self.lost
        assert self._loop is not None
        if self._ready is None:
            self._ready = self._loop.create_future()
        return await asyncio.shield(self._ready)

    def close(self) -> None:
        """End the keeper and its jobs, and wait for it, which takes milliseconds. In the loop or after it."""
        self._detach()
        self._control.close()
        if self.lost is None:
            self.lost = KeeperLost("the keeper is closed")
        if self._loop is not None and not self._loop.is_closed():
            self._fail_all(self.lost)
        deadline = time.monotonic() + CLOSE_S
        with contextlib.suppress(ChildProcessError):  # it was waited for already
            while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    logger.error("the keeper (pid %d) does not end and is killed; the next start kills what it leaves", self.pid)
                    os.kill(self.pid, signal.SIGKILL)
                    deadline += CLOSE_S
                time.sleep(0.001)

    # ------------------------------------------------------------------------------------------------ the socket

    def _attach(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._kept:
            raise RuntimeError("a keeper belongs to one event loop for as long as it has jobs")
        self._loop = loop
        self._ready = None
        if self.lost is None:
            loop.add_reader(self._control, self._on_readable)

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed() and self.lost is None:
            self._loop.remove_reader(self._control)
            self._loop.remove_writer(self._control)

    def _order(self, order: protocol.Order) -> None:
        assert self._loop is not None
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._turn)
        self._orders.append(order)

    def _turn(self) -> None:
        self._turning = False
        self._flush()

    def _flush(self) -> None:
        if self.lost is not None or self._loop is None:
            return
        orders, self._orders = self._orders, []
        try:
            if self._socket.send(orders):
                self._loop.add_writer(self._control, self._flush)
            else:
                self._loop.remove_writer(self._control)
        except OSError as error:
            self._lose(f"it does not read any more: {error.strerror}")

    def _on_readable(self) -> None:
        try:
            reports = self._socket.receive()
        except OSError:
            self._lose("its end of the socket is closed")
            return
        except ProtocolError as error:
            self._lose(error.message)
            return
        for report in reports:
            self._hear(report)

    def _hear(self, report: protocol.Report) -> None:
        match report:
            case protocol.Spawned():
                _settle(self._kept[report.number].started, report)
            case protocol.NotSpawned():
                self._kept.pop(report.number).fail(_why_not(report))
            case protocol.Prepared():
                logger.log(*PREPARED_LOG[report.warmth], report.name, report.detail)
            case protocol.TreeEnded():
                _settle(self._kept.pop(report.number).ended, report)
            case protocol.Ready():
                self._is_ready = report
                if self._ready is not None:
                    _settle(self._ready, report)

    def _lose(self, why: str) -> None:
        assert self._loop is not None
        self._detach()
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # a keeper that sends garbage ends its jobs, as if the worker had died
        self.lost = KeeperLost(f"the keeper (pid {self.pid}) is gone: {why}; restart this process, which kills what is left")
        logger.error("%s", self.lost.message)
        self._fail_all(self.lost)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(self.lost)
        self.on_lost(self.lost)

    def _fail_all(self, error: KeeperLost) -> None:
        kept, self._kept = self._kept, {}
        for one in kept.values():
            one.fail(error)


def _why_not(report: protocol.NotSpawned) -> Exception:
    if report.message:
        return PreloadFailed(f"the interpreter cannot be used: {report.message}; correct its modules, or the exec")
    return OSError(report.errno, os.strerror(report.errno))


def _settle(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():  # canceled
        future.set_result(value)


def _become_keeper(control: socket.socket, incarnation: str, worker_pid: int, cgroup: bool) -> NoReturn:
    """Close every descriptor of the worker except this socket, and run the keeper."""
    gc.freeze()  # objects of the worker must not be finalised here
    kept = control.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
    keep(control, incarnation, worker_pid, cgroup=cgroup)
