"""Handlers: the Python functions of a worker, by subject. `async def` runs in the event loop, `def` in a child process.

Theory of operation. Before the loop and any thread exist, the worker forks a *template*: a single-threaded process that has the
functions loaded and forks children from itself on request, which is safe and cheap there and neither in the worker.

    worker ──control: ForkChild, KillChild / ChildExited──► template ──fork──► child    (SEQPACKET pair: one message, one record)
       └─────────────── data: FunctionCall / Outcome ──────────────────────────┘        (stream pair: length u32 LE, msgpack)

A child does one job at a time and is kept for the next; one that passed its time limit or was stopped is killed with all of its
session. The template is the children's parent, so it alone reaps them and reports their ends. When the worker dies, the template
reads the end of the control socket, kills every child's session and ends; PDEATHSIG ties the children to the template in turn.
Messages are msgpack of known types, never pickle.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import itertools
import logging
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import msgspec

from tasuki.core.job import JobSpec, Outcome
from tasuki.core.subject import SubjectTrie, check_pattern
from tasuki.errors import ConfigError, Unavailable
from tasuki.worker.attempt import (
    Attempt,
    HandlerJob,
    StopReason,
    exit_outcome,
    first_of,
    handler_failure,
    handler_outcome,
    stopped_outcome,
    timed_out_outcome,
)
from tasuki.worker.linux_calls import die_with_parent, run_after_fork

IDLE_MAX = 8  # warm children that are kept
RECORD_MAX_BYTES = 1024
NO_TEMPLATE = "the process that forks children for handlers is gone; restart the worker"
_LENGTH = struct.Struct("<I")

Function = Callable[[HandlerJob], object]
logger = logging.getLogger(__name__)


class Handler(msgspec.Struct, frozen=True):
    """A function for a subject. An `async def` runs in the worker's loop, a `def` in a child process."""

    name: str
    function: Callable[[HandlerJob], Any]
    asynchronous: bool
    timeout_s: float | None

    def limit_s(self, spec: JobSpec) -> float | None:
        """Return the job's own time limit, else the handler's."""
        return spec.timeout_s if spec.timeout_s is not None else self.timeout_s

    async def run(self, attempt: Attempt, stopped: Callable[[], StopReason | None]) -> Outcome:
        """Run an `async def` handler in this task. `stopped()` returns the reason if the worker has canceled the task."""
        limit_s = self.limit_s(attempt.spec)
        job = HandlerJob(attempt.spec, attempt.attempt)
        limit = asyncio.timeout(limit_s) if limit_s is not None else None
        try:
            if limit is None:
                return handler_outcome(await self.function(job))
            async with limit:
                return handler_outcome(await self.function(job))
        except asyncio.CancelledError as error:  # by the worker, or by the handler's own use of cancellation
            reason = stopped()
            return stopped_outcome(reason) if reason is not None else handler_failure(error)
        except Exception as error:  # noqa: BLE001 - any exception of a handler is its attempt's outcome
            timed_out = limit is not None and limit.expired()
            return timed_out_outcome(limit_s) if timed_out else handler_failure(error)


class Handlers:
    """The handlers of a worker. If several patterns match a job, the one that was added first counts."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._trie: SubjectTrie[str] = SubjectTrie()

    def __len__(self) -> int:
        return len(self._handlers)

    def add(self, subject: str, function: Callable[[HandlerJob], Any], timeout_s: float | None) -> None:
        check_pattern(subject)
        if subject in self._handlers:
            raise ConfigError(f"subject {subject!r} has a handler already; remove one of the two")
        self._handlers[subject] = Handler(subject, function, inspect.iscoroutinefunction(function), timeout_s)
        self._trie.add(subject, subject)

    def find(self, subject: str) -> Handler | None:
        names = self._trie.match(subject)
        return self._handlers[names[0]] if names else None

    @property
    def patterns(self) -> tuple[str, ...]:
        return tuple(self._handlers)

    @property
    def plain(self) -> dict[str, Callable[[HandlerJob], Any]]:
        """The `def` functions, by name."""
        return {name: handler.function for name, handler in self._handlers.items() if not handler.asynchronous}


# ---------------------------------------------------------------------------------------------------- messages


class ForkChild(msgspec.Struct, frozen=True, tag=True):
    """Fork a child; its end of the data socket is sent along."""

    child: int


class KillChild(msgspec.Struct, frozen=True, tag=True):
    """Kill the child and its session, if it is still alive."""

    child: int


class ChildExited(msgspec.Struct, frozen=True, tag=True):
    """The child is dead and reaped. Negative codes are signals."""

    child: int
    exit_code: int


class FunctionCall(msgspec.Struct, frozen=True):
    """One job for a child."""

    function: str
    job: HandlerJob


_encode = msgspec.msgpack.Encoder().encode
_decode_order = msgspec.msgpack.Decoder(ForkChild | KillChild).decode
_decode_exited = msgspec.msgpack.Decoder(ChildExited).decode
_decode_request = msgspec.msgpack.Decoder(FunctionCall).decode
_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


# ---------------------------------------------------------------------------------------------------- in the worker


class _Child:
    """A child, as the worker sees it."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.reader = reader
        self.writer = writer
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def ask(self, request: bytes) -> Outcome | None:
        """Return the child's answer, or None if it died meanwhile."""
        try:
            self.writer.write(_LENGTH.pack(len(request)) + request)
            await self.writer.drain()
            (length,) = _LENGTH.unpack(await self.reader.readexactly(_LENGTH.size))
            return _decode_outcome(await self.reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None


class FunctionProcesses:
    """The worker's end of its children. Belongs to one event loop, the one of its first `run`."""

    def __init__(self, control: socket.socket, template_pid: int) -> None:
        self.template_pid = template_pid
        self._control = control
        self._numbers = itertools.count(1)
        self._alive: dict[int, _Child] = {}
        self._idle: list[_Child] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._template_gone = False

    @classmethod
    def start(cls, functions: Mapping[str, Function]) -> FunctionProcesses:
        """Fork the template. For the main thread, before a loop or a thread is started: fork copies neither."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise RuntimeError("FunctionProcesses.start must be called before the event loop runs")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            run_after_fork(_Template(theirs, dict(functions)).serve)
        theirs.close()
        return cls(ours, pid)

    async def run(self, name: str, job: HandlerJob, timeout_s: float | None, stop: asyncio.Future[StopReason]) -> Outcome:
        """Run the function of that name on the job in a child. Unavailable if the template is gone.

        A time limit or a stop is a SIGKILL to the child's session: a Python function that computes handles no other signal.
        """
        if stop.done():
            return stopped_outcome(stop.result())
        child = await self._take()
        answer = asyncio.ensure_future(child.ask(_encode(FunctionCall(name, job))))
        try:
            await first_of(answer, stop, timeout_s=timeout_s)
            if answer.done():
                outcome = answer.result()
                if outcome is not None:
                    if len(self._idle) < IDLE_MAX:
                        self._idle.append(child)
                    return outcome
                return exit_outcome(await child.exited, f"the child process of handler {name!r}")
            return stopped_outcome(stop.result()) if stop.done() else timed_out_outcome(timeout_s)
        finally:
            if child not in self._idle:
                await self._end(child)
            answer.cancel()

    def kill_all(self) -> None:
        """Close the control socket: the template kills every child's session and ends, as if the worker had died."""
        with contextlib.suppress(OSError):  # it is gone already
            self._control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all children and the template, which takes milliseconds. In the loop, or when that is closed."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._control)
            for child in self._alive.values():
                child.writer.close()
        self.kill_all()
        self._control.close()
        os.waitpid(self.template_pid, 0)

    async def _take(self) -> _Child:
        self._attach()
        while self._idle:
            child = self._idle.pop()
            if not child.exited.done():
                return child
        if self._template_gone:
            raise Unavailable(NO_TEMPLATE)
        ours, theirs = socket.socketpair()
        with theirs:
            child = _Child(next(self._numbers), *await asyncio.open_unix_connection(sock=ours))
            try:
                socket.send_fds(self._control, [_encode(ForkChild(child.number))], [theirs.fileno()])
            except ConnectionError:  # it died meanwhile
                child.writer.close()
                raise Unavailable(NO_TEMPLATE) from None
            self._alive[child.number] = child
        return child

    async def _end(self, child: _Child) -> None:
        if not child.exited.done():
            self._control.send(_encode(KillChild(child.number)))
        await asyncio.shield(child.exited)
        child.writer.close()

    def _attach(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            loop.add_reader(self._control, self._on_control)
        elif self._loop is not loop:
            raise RuntimeError("FunctionProcesses belong to one event loop; start others for another loop")

    def _on_control(self) -> None:
        record = self._control.recv(RECORD_MAX_BYTES, socket.MSG_DONTWAIT)
        if record:
            exited = _decode_exited(record)
            self._note_exit(exited.child, exited.exit_code)
            return
        assert self._loop is not None
        self._loop.remove_reader(self._control)
        self._template_gone = True
        logger.error("the template process of the handlers (pid %d) is gone, and its children with it", self.template_pid)
        for number in list(self._alive):
            self._note_exit(number, -signal.SIGKILL)

    def _note_exit(self, number: int, exit_code: int) -> None:
        child = self._alive.pop(number)
        child.exited.set_result(exit_code)
        if child in self._idle:
            self._idle.remove(child)
            child.writer.close()


# ---------------------------------------------------------------------------------------------------- in the template


class _Template:
    """Forks, kills and reaps children until the worker is gone. No loop and no threads: only its poll blocks."""

    def __init__(self, control: socket.socket, functions: dict[str, Function]) -> None:
        self._control = control
        self._functions = functions
        self._poll = select.poll()
        self._pids: dict[int, int] = {}  # by the worker's number for the child
        self._numbers: dict[int, int] = {}  # by pidfd

    def serve(self) -> NoReturn:
        os.setsid()  # Ctrl-C in the worker's terminal is for the worker alone
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gc.freeze()  # children share these pages as long as no collection writes into them
        self._poll.register(self._control, select.POLLIN)
        try:
            while self._turn():
                pass
        except ConnectionError:
            logger.debug("the worker died before the end of a child could be reported")
        for number in self._pids:
            self._kill(number)
        os._exit(os.EX_OK)

    def _turn(self) -> bool:
        """Handle the next events; return False when the worker is gone."""
        for descriptor, _ in self._poll.poll():
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
            run_after_fork(lambda: _serve_jobs(socket.socket(fileno=data), self._functions, template_pid))
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
        self._control.send(_encode(ChildExited(number, os.waitstatus_to_exitcode(status))))


# ---------------------------------------------------------------------------------------------------- in a child


def _serve_jobs(data: socket.socket, functions: dict[str, Function], template_pid: int) -> NoReturn:
    os.setsid()
    die_with_parent(template_pid)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with data.makefile("rwb") as stream:
        while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
            request = _decode_request(stream.read(_LENGTH.unpack(head)[0]))
            answer = _encode(_call(functions[request.function], request.job))
            sys.stdout.flush()
            sys.stderr.flush()
            stream.write(_LENGTH.pack(len(answer)) + answer)
            stream.flush()
    os._exit(os.EX_OK)


def _call(function: Function, job: HandlerJob) -> Outcome:
    try:
        return handler_outcome(function(job))
    except BaseException as error:  # noqa: BLE001  # any exception, SystemExit too, is the handler's answer
        return handler_failure(error)
