"""Processes of plain function handlers: a template forks them, and they end with their lease and their worker.

Theory of operation. Before the loop and any thread exist, the worker forks a *template*: a single-threaded process that has the
functions loaded and forks children from itself on request, which is safe and cheap there and neither in the worker.

    worker ──control: ForkChild, KillChild / ChildExited──► template ──fork──► child
       └──────────────── data: FunctionCall / ChildAnswer ─────────────────────┘

Control is a SEQPACKET pair, one message a record; data is a stream pair: length u32 LE, msgpack of known types, never pickle.
A child does one job at a time and is kept for the next; one that passed its time limit or was stopped is killed with all of its
session. The template is the children's parent, so it alone reaps them and reports their ends. A child whose function asks if
its job was canceled is given CANCEL_GRACE_S before it is killed: both sides note that in shared memory. The worker
writes the deadline of each job's lease into shared memory, with the start and at each heartbeat, which costs no system call; the
template looks once a second, and kills at it: a worker that hangs loses its functions in time. When the
worker dies, the template reads the end of the control socket, kills every child's session and ends; PDEATHSIG ties the children
to the template in turn. A *supervisor* between worker and template, which does nothing else, ends what a killed template leaves,
forks the next one, and sends its control socket to the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import mmap
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from math import inf
from typing import NoReturn

import msgspec

from tasuki.clocks import boot_time
from tasuki.core.job import JobSpec, Outcome, Progress
from tasuki.errors import Unavailable
from tasuki.worker.attempt import (
    HandlerJob,
    StopReason,
    exit_outcome,
    first_of,
    handler_failure,
    handler_outcome,
    stopped_outcome,
    timed_out_outcome,
)
from tasuki.worker.linux_calls import become_subreaper, die_with_parent, living, run_after_fork

IDLE_MAX = 64  # warm children that are kept; no more than ran at the same time
CHILDREN_MAX = 65_536  # more than a process has descriptors for
RECORD_MAX_BYTES = 1024
TICK_S = 1.0  # how often the template looks at the deadlines; the store waits LEASE_MARGIN_S longer than they say
REUSE_S = 1.0  # a child so close to its deadline may be about to be killed
CANCEL_GRACE_S = 5.0  # for a function that asks whether its job was canceled
UNANSWERED_S = 2.0  # a template that has not killed a child by then was stopped; the store waits LEASE_MARGIN_S, and is later
NO_TEMPLATE = "the process that forks children for handlers is gone; restart the worker"
_LENGTH = struct.Struct("<I")

Function = Callable[[HandlerJob], object]
logger = logging.getLogger(__name__)


# ---------------------------------------------------------------------------------------------------- messages


class ForkChild(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Fork a child; its end of the data socket is sent along."""

    child: int


class KillChild(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Kill the child and its session, if it is still alive."""

    child: int


class ChildExited(msgspec.Struct, frozen=True, array_like=True):
    """The child is dead and reaped. Negative codes are signals."""

    child: int
    exit_code: int
    lease_lost: bool = False
    """True if the template has killed it at its lease's deadline."""


class FunctionCall(msgspec.Struct, frozen=True):
    """One job for a child."""

    function: str
    spec: JobSpec
    attempt: int
    folder: str = ""


class ChildAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Progress of a child's job, or its end."""

    progress: Progress | None = None
    outcome: Outcome | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode_order = msgspec.msgpack.Decoder(ForkChild | KillChild).decode
_decode_exited = msgspec.msgpack.Decoder(ChildExited).decode
_decode_request = msgspec.msgpack.Decoder(FunctionCall).decode
_decode_answer = msgspec.msgpack.Decoder(ChildAnswer).decode


# ---------------------------------------------------------------------------------------------------- in the worker


class _Child:
    """A child, as the worker sees it."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.reader = reader
        self.writer = writer
        self.exited: asyncio.Future[ChildExited] = asyncio.get_running_loop().create_future()
        self.lease_deadline: Callable[[], float | None] = lambda: None
        """Deadline of the job that the child runs."""

    async def ask(self, request: bytes, report: Callable[[Progress], None]) -> Outcome | None:
        """Return the child's answer, or None if it died meanwhile; pass its progress on."""
        try:
            self.writer.write(_LENGTH.pack(len(request)) + request)
            await self.writer.drain()
            while True:
                (length,) = _LENGTH.unpack(await self.reader.readexactly(_LENGTH.size))
                answer = _decode_answer(await self.reader.readexactly(length))
                if answer.progress is None:
                    return answer.outcome
                report(answer.progress)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None


class FunctionProcesses:
    """The worker's end of its children. Belongs to one event loop, the one of its first `run`."""

    def __init__(
        self, templates: socket.socket, supervisor_pid: int, deadlines: memoryview[float], cancels: memoryview[int]
    ) -> None:
        self._templates = templates
        """Brings the pid and the control socket of each template; it ends with the supervisor."""
        self._supervisor_pid = supervisor_pid
        self._control: socket.socket | None = None
        self.template_pid = 0
        self._deadlines = deadlines
        """Boot time at which a child must be dead, by its number; 0: never. Shared with the template."""
        self._cancels = cancels
        """Two bytes for each child, shared with it: it has asked for a cancel; its job was canceled."""
        self._new_numbers = itertools.count()
        self._free_numbers: list[int] = []
        self._alive: dict[int, _Child] = {}
        self._idle: list[_Child] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._supervised = True
        self._template_decided = asyncio.Event()
        """Cleared while the next template is awaited. If there will be none, it is set, and `_control` is None."""

    @classmethod
    def start(cls, functions: Mapping[str, Function]) -> FunctionProcesses:
        """Fork supervisor and template. For the main thread, before a loop or a thread is started: fork copies neither."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise RuntimeError("FunctionProcesses.start must be called before the event loop runs")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        deadlines = memoryview(mmap.mmap(-1, CHILDREN_MAX * 8)).cast("d")
        cancels = memoryview(mmap.mmap(-1, CHILDREN_MAX * 2))
        pid = os.fork()
        if pid == 0:
            ours.close()
            run_after_fork(lambda: _supervise(theirs, dict(functions), deadlines, cancels))
        theirs.close()
        started = cls(ours, pid, deadlines, cancels)
        started._receive_template()
        return started

    async def run(
        self,
        name: str,
        job: HandlerJob,
        timeout_s: float | None,
        stop: asyncio.Future[StopReason],
        lease_deadline: Callable[[], float | None] = lambda: None,
    ) -> Outcome:
        """Run the function of that name on the job in a child. Unavailable if there is no template, and will be none.

        `lease_deadline()` returns the boot time at which the attempt must be over; None: it continues without a lease too.
        A time limit, a stop or the lease's deadline is a SIGKILL to the child's session: a Python function that computes handles
        no other signal. A cancel waits for a function that asks for it.
        """
        if stop.done():
            return stopped_outcome(stop.result())
        child = await self._take()
        child.lease_deadline = lease_deadline
        self._deadlines[child.number] = lease_deadline() or 0.0
        asked, canceled = 2 * child.number, 2 * child.number + 1
        self._cancels[asked] = self._cancels[canceled] = 0
        call = _encode(FunctionCall(name, job.spec, job.attempt, job.folder))
        answer = asyncio.ensure_future(child.ask(call, job.report))
        try:
            await first_of(answer, stop, timeout_s=timeout_s)
            if not answer.done() and stop.done() and stop.result() is StopReason.CANCELED and self._cancels[asked]:
                self._cancels[canceled] = 1
                await first_of(answer, timeout_s=CANCEL_GRACE_S)
            elif answer.done():
                outcome = answer.result()
                if outcome is not None:
                    self._keep(child)
                    return outcome
                exited = await child.exited
                if exited.lease_lost:
                    return stopped_outcome(StopReason.LEASE_LOST)
                return exit_outcome(exited.exit_code, f"the child process of handler {name!r}")
            return stopped_outcome(stop.result()) if stop.done() else timed_out_outcome(timeout_s)
        finally:
            if child not in self._idle:
                await self._end(child)
            answer.cancel()

    def renewed(self) -> None:
        """Pass the new deadlines of all leases on to the template."""
        for child in self._alive.values():
            self._deadlines[child.number] = child.lease_deadline() or 0.0

    def kill_all(self) -> None:
        """Close the sockets: the template kills every child's session and ends, as if the worker had died."""
        for end in (self._templates, self._control):
            with contextlib.suppress(OSError):  # it is gone already
                if end is not None:
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all children, the template and its supervisor, which takes milliseconds. In the loop, or when that is closed."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._templates)
            if self._control is not None:
                self._loop.remove_reader(self._control)
            for child in self._alive.values():
                child.writer.close()
        self.kill_all()
        self._templates.close()
        if self._control is not None:
            self._control.close()
        os.waitpid(self._supervisor_pid, 0)

    # ------------------------------------------------------------------------------------------------ children

    async def _take(self) -> _Child:
        self._attach()
        while self._idle:
            child = self._idle.pop()
            if not child.exited.done():
                return child
        while True:
            await self._template_decided.wait()
            if self._control is None:
                raise Unavailable(NO_TEMPLATE)
            ours, theirs = socket.socketpair()
            number = self._free_numbers.pop() if self._free_numbers else next(self._new_numbers)
            with theirs:
                child = _Child(number, *await asyncio.open_unix_connection(sock=ours))
                if self._order(ForkChild(child.number), theirs.fileno()):
                    self._alive[child.number] = child
                    return child
            child.writer.close()
            self._free_numbers.append(number)
            self._lose_template()  # it died a moment ago

    def _keep(self, child: _Child) -> None:
        """Keep a child that has done its job for the next one, if there is room."""
        if len(self._idle) < IDLE_MAX and boot_time() < (self._deadlines[child.number] or inf) - REUSE_S:
            child.lease_deadline = lambda: None
            self._deadlines[child.number] = 0.0
            self._idle.append(child)

    async def _end(self, child: _Child) -> None:
        if not child.exited.done():
            self._order(KillChild(child.number))
            await asyncio.wait([child.exited], timeout=UNANSWERED_S)
        if not child.exited.done():
            self._kill_template("it does not kill a child")
            await asyncio.shield(child.exited)
        child.writer.close()

    def _note_exit(self, exited: ChildExited) -> None:
        child = self._alive.pop(exited.child)
        self._deadlines[child.number] = 0.0
        self._free_numbers.append(child.number)
        child.exited.set_result(exited)
        if child in self._idle:
            self._idle.remove(child)
            child.writer.close()

    # ------------------------------------------------------------------------------------------------ the template

    def _order(self, order: ForkChild | KillChild, *descriptors: int) -> bool:
        """Send an order; return False if the template is dead. Its children are noted as dead when the loop reads of it."""
        if self._control is None:
            return False
        try:
            socket.send_fds(self._control, [_encode(order)], descriptors, socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._kill_template("it does not read its orders")
        except ConnectionError:
            return False
        return True

    def _kill_template(self, why: str) -> None:
        """Kill a template that was stopped: its children die with it, and the supervisor forks another."""
        logger.error("the template process of the handlers (pid %d) is killed: %s", self.template_pid, why)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.template_pid, signal.SIGKILL)

    def _attach(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            loop.add_reader(self._templates, self._receive_template)
            if self._control is not None:
                loop.add_reader(self._control, self._on_control)
        elif self._loop is not loop:
            raise RuntimeError("FunctionProcesses belong to one event loop; start others for another loop")

    def _receive_template(self) -> None:
        """Take the next template. The first one is waited for; the loop calls this when there is another, or will be none."""
        record, descriptors, _, _ = socket.recv_fds(self._templates, RECORD_MAX_BYTES, 1)
        if descriptors:
            self._lose_template()  # if its end was not read yet
            self.template_pid = int(record)
            self._control = socket.socket(fileno=descriptors[0])
            if self._loop is not None:
                self._loop.add_reader(self._control, self._on_control)
        elif self._loop is not None:
            self._loop.remove_reader(self._templates)
            self._supervised = False
        self._template_decided.set()

    def _on_control(self) -> None:
        assert self._control is not None
        try:
            record = self._control.recv(RECORD_MAX_BYTES, socket.MSG_DONTWAIT)
        except ConnectionError:  # it died with an order unread
            record = b""
        if record:
            self._note_exit(_decode_exited(record))
        else:
            self._lose_template()

    def _lose_template(self) -> None:
        if self._control is None or self._loop is None:
            return
        self._loop.remove_reader(self._control)
        self._control.close()
        self._control = None
        if self._supervised:
            self._template_decided.clear()
        logger.error("the template process of the handlers (pid %d) is gone, and its children with it", self.template_pid)
        for number in list(self._alive):
            self._note_exit(ChildExited(number, -signal.SIGKILL))


# ---------------------------------------------------------------------------------------------------- in the supervisor


def _supervise(
    worker: socket.socket, functions: dict[str, Function], deadlines: memoryview[float], cancels: memoryview[int]
) -> NoReturn:
    """Fork a template, and another one whenever it is killed, until the worker is gone."""
    os.setsid()  # Ctrl-C in the worker's terminal is for the worker alone
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # templates and children share these pages as long as no collection writes into them
    become_subreaper()
    with contextlib.suppress(ConnectionError):  # the worker died in this moment, and the template reads that by itself
        while not select.select([worker], [], [], 0)[0]:  # it sends nothing: there is only its end to read
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                worker.close()
                ours.close()
                run_after_fork(_Template(theirs, functions, deadlines, cancels).serve)
            theirs.close()
            with ours:
                socket.send_fds(worker, [str(pid).encode()], [ours.fileno()])
            while os.waitpid(-1, 0)[0] != pid:
                pass
            _end_orphans()
    os._exit(os.EX_OK)


def _end_orphans() -> None:
    """Kill the processes that a dead template and its functions have left: they are the supervisor's children now."""
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            for process in living():
                if process.parent == os.getpid():
                    os.kill(process.pid, signal.SIGKILL)
            os.waitpid(-1, 0)


# ---------------------------------------------------------------------------------------------------- in the template


class _Template:
    """Forks, kills and reaps children until the worker is gone. No loop and no threads: only its poll blocks."""

    def __init__(
        self, control: socket.socket, functions: dict[str, Function], deadlines: memoryview[float], cancels: memoryview[int]
    ) -> None:
        self._control = control
        self._functions = functions
        self._poll = select.poll()
        self._pids: dict[int, int] = {}  # by the worker's number for the child
        self._numbers: dict[int, int] = {}  # by pidfd
        self._deadlines = deadlines
        self._cancels = cancels
        self._lease_lost: set[int] = set()

    def serve(self) -> NoReturn:
        self._poll.register(self._control, select.POLLIN)
        try:
            while self._turn():
                self._kill_overdue()
        except ConnectionError:
            logger.debug("the worker died before the end of a child could be reported")
        for number in self._pids:
            self._kill(number)
        os._exit(os.EX_OK)

    def _turn(self) -> bool:
        """Handle the next events; return False when the worker is gone."""
        for descriptor, _ in self._poll.poll(TICK_S * 1000 if self._pids else None):
            if descriptor != self._control.fileno():
                self._reap(descriptor)
                continue
            record, descriptors, _, _ = socket.recv_fds(self._control, RECORD_MAX_BYTES, 1)
            if not record:
                return False
            match _decode_order(record):
                case ForkChild(number):
                    self._fork(number, descriptors[0])
                case KillChild(number):
                    self._kill(number)
        return True

    def _kill_overdue(self) -> None:
        """Kill the children whose lease another worker may be given soon."""
        at = boot_time()
        for number in self._pids:
            if 0.0 < self._deadlines[number] <= at:
                self._lease_lost.add(number)
                self._kill(number)

    def _fork(self, number: int, data: int) -> None:
        template_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # the limit of processes, or of memory
            logger.error("cannot fork a child for a handler: %s", error)
            os.close(data)
            self._control.send(_encode(ChildExited(number, os.EX_OSERR)))
            return
        if pid == 0:
            self._control.close()
            for pidfd in self._numbers:
                os.close(pidfd)
            cancel = self._cancels[2 * number : 2 * number + 2]
            run_after_fork(lambda: _serve_jobs(socket.socket(fileno=data), self._functions, template_pid, cancel))
        os.close(data)
        pidfd = os.pidfd_open(pid)
        self._pids[number] = pid
        self._numbers[pidfd] = number
        self._poll.register(pidfd, select.POLLIN)

    def _kill(self, number: int) -> None:
        pid = self._pids.get(number)
        if pid is None:
            return
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # it had no time to make its own session
            os.killpg(pid, signal.SIGKILL)

    def _reap(self, pidfd: int) -> None:
        number = self._numbers.pop(pidfd)
        self._kill(number)  # the child is a zombie; this kills the processes that it has started
        _, status = os.waitpid(self._pids.pop(number), 0)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        lease_lost = number in self._lease_lost
        self._lease_lost.discard(number)
        self._control.send(_encode(ChildExited(number, os.waitstatus_to_exitcode(status), lease_lost)))


# ---------------------------------------------------------------------------------------------------- in a child


def _serve_jobs(data: socket.socket, functions: dict[str, Function], template_pid: int, cancel: memoryview[int]) -> NoReturn:
    os.setsid()
    die_with_parent(template_pid)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stream = data.makefile("rb")

    def send(answer: ChildAnswer) -> None:
        encoded = _encode(answer)
        data.sendall(_LENGTH.pack(len(encoded)) + encoded)

    def is_canceled() -> bool:
        cancel[0] = 1
        return bool(cancel[1])

    with contextlib.suppress(ConnectionError):  # the worker died before it could be answered
        while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
            request = _decode_request(stream.read(_LENGTH.unpack(head)[0]))
            job = HandlerJob(request.spec, request.attempt, request.folder, lambda told: send(ChildAnswer(told)), is_canceled)
            outcome = _call(functions[request.function], job)
            sys.stdout.flush()
            sys.stderr.flush()
            send(ChildAnswer(outcome=outcome))
    os._exit(os.EX_OK)


def _call(function: Function, job: HandlerJob) -> Outcome:
    try:
        return handler_outcome(function(job))
    except BaseException as error:  # noqa: BLE001  # any exception, SystemExit too, is the handler's answer
        return handler_failure(error)
