"""The keeper's warm interpreters: one process (`worker/preforked.py`) for each exec of kind python, which forks its jobs.

An interpreter goes through these states; it is started when the worker names it, and again when it is gone:

    STARTING ──ready──► READY ──its end──► ENDING ──its parked process is gone──► STARTING     (waiting requests stay)
       └──failed, its end, PRELOAD_S──► FAILED ──a job, after RETRY_S──► STARTING

While it is FAILED its jobs are refused with the reason. A request that is not answered before its interpreter ends is given back
at no cost for its job; but an interpreter that ends like that UNANSWERED_MAX times in a row, without a fork in between, is FAILED
too, which costs a retry: else a job that kills its interpreter would be tried for ever.

The keeper never waits for an interpreter: requests are written as far as the socket takes them, and an interpreter that answers
no request for FORK_S is killed. Jobs, and the process parked for the next request, are children of the keeper, not of the
interpreter, and do not end with it. Runs in the keeper's one thread.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from tasuki.worker import preforked
from tasuki.worker.keeper import protocol
from tasuki.worker.keeper.plain import files_of, rlimits_of, spawn_session
from tasuki.worker.linux_calls import living, signal_checked
from tasuki.worker.preforked import SERVE

PRELOAD_S = 120.0  # an import that takes longer counts as hanging; a model of some gigabytes takes half a minute
FORK_S = 10.0  # a fork takes milliseconds, of some gigabytes tenths of a second
RETRY_S = 5.0  # between two tries to import; each costs as much as a cold start
COLD_S = 60.0  # jobs that can start cold need no other try so soon
UNANSWERED_MAX = 3
STEADY_S = 1.0  # an interpreter that ends sooner after it was ready is not started again at once
PROGRAM = Path(preforked.__file__)
CALL_AT = 3  # in the argv of a cold interpreter: python -P preforked.py CALL; the job's arguments follow
_LENGTH = struct.Struct("<I")


class InterpreterState(enum.Enum):
    STARTING = 1
    READY = 2
    ENDING = 3
    FAILED = 4


class _Interpreter:
    """The interpreter of one exec, over all its restarts."""

    def __init__(self, order: protocol.Prepare) -> None:
        self.order = order
        self.state = InterpreterState.FAILED
        self.failure = ""
        self.since = 0.0  # start of the current state
        self.ready_at = 0.0
        self.pid: int | None = None
        self.control: socket.socket | None = None
        self.unsent = bytearray()
        self.received = bytearray()
        self.waiting: dict[int, bytes] = {}  # requests that are not sent yet: the interpreter is not ready
        self.asked: set[int] = set()  # requests that are sent and not answered
        self.unanswered_ends = 0  # number of ends in a row with unanswered requests
        self.moved_at = 0.0  # time of the last answer, or of the first request after all were answered

    def enter(self, state: InterpreterState) -> None:
        self.state, self.since = state, time.monotonic()

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.since


class WarmInterpreters:
    """All warm interpreters of one keeper."""

    def __init__(
        self,
        start: Callable[[protocol.Prepare, socket.socket], int],
        begun: Callable[[protocol.Spawned | protocol.NotSpawned], None],
        poll: select.poll,
        reports: list[protocol.Report],
    ) -> None:
        """`start` starts the process of an interpreter with its end of a socket, and returns the pid; `begun` receives the answer
        to each `ask`. Sockets are registered with `poll`, results of imports are added to `reports`."""
        self._start_process = start
        self._begun = begun
        self._by_name: dict[str, _Interpreter] = {}
        self._poll = poll
        self.pids: dict[int, str] = {}  # interpreters and their parked processes: children of the keeper that belong to no job
        self._reports = reports

    # ------------------------------------------------------------------------------------------------ requests

    def prepare(self, order: protocol.Prepare) -> None:
        """Start the interpreter of this exec."""
        self._by_name[order.name] = interpreter = _Interpreter(order)
        self._start(interpreter)

    def is_cold(self, name: str) -> bool:
        """Return whether the next job of this exec starts cold: its interpreter could not be prepared, and the exec allows it."""
        interpreter = self._by_name.get(name)
        if interpreter is None or not interpreter.order.or_cold:
            return False
        return interpreter.state is InterpreterState.FAILED and interpreter.age_s < COLD_S

    def ask(self, order: protocol.Spawn, *, tag: tuple[int, int] | None, leaf: Path | None) -> None:
        """Have a job forked; `begun` receives the answer, at once or later."""
        interpreter = self._by_name.get(order.warm)
        if interpreter is None:
            raise OSError(errno.EINVAL, f"no interpreter was prepared for exec {order.warm!r}")
        if interpreter.state is InterpreterState.FAILED and interpreter.age_s >= RETRY_S:
            self._start(interpreter)
        if interpreter.state is InterpreterState.FAILED:
            self._begun(protocol.NotSpawned(order.number, 0, interpreter.failure))
            return
        interpreter.waiting[order.number] = _request(order, tag, leaf)
        self._send(interpreter)

    def withdraw(self, number: int) -> bool:
        """Cancel a request that is not sent yet; False if it is sent."""
        return any(interpreter.waiting.pop(number, None) is not None for interpreter in self._by_name.values())

    # ------------------------------------------------------------------------------------------------ lives

    def _start(self, interpreter: _Interpreter) -> None:
        with contextlib.ExitStack() as opened:
            try:
                ours, theirs = socket.socketpair()
                opened.enter_context(theirs)
                opened.callback(ours.close)
                pid = self._start_process(interpreter.order, theirs)
            except OSError as error:
                self._fail(interpreter, f"{os.fsdecode(interpreter.order.program)} cannot be started: {error.strerror}")
                return
            opened.pop_all()
        theirs.close()
        ours.setblocking(False)
        interpreter.pid, interpreter.control = pid, ours
        interpreter.unsent.clear()
        interpreter.received.clear()
        interpreter.enter(InterpreterState.STARTING)
        self.pids[pid] = interpreter.order.name
        self._poll.register(ours, select.POLLIN)

    def _fail(self, interpreter: _Interpreter, why: str) -> None:
        """Enter FAILED, and refuse the waiting requests."""
        self._drop(interpreter, why)
        interpreter.failure = why
        interpreter.enter(InterpreterState.FAILED)
        is_cold = interpreter.order.or_cold
        for number in interpreter.waiting:  # given back, to be started cold; or refused
            self._begun(protocol.NotSpawned(number, errno.EAGAIN, "") if is_cold else protocol.NotSpawned(number, 0, why))
        interpreter.waiting.clear()
        warmth = protocol.PythonStart.COLD if is_cold else protocol.PythonStart.FAILED
        self._reports.append(protocol.Prepared(interpreter.order.name, warmth, why))

    def _drop(self, interpreter: _Interpreter, why: str = "") -> None:
        """End the current process, and give back the requests that it has not answered."""
        self._hang_up(interpreter)
        self._kill(interpreter)
        interpreter.pid = None
        interpreter.unanswered_ends += bool(interpreter.asked)
        message = why if interpreter.unanswered_ends >= UNANSWERED_MAX else ""
        for number in interpreter.asked:
            self._begun(protocol.NotSpawned(number, errno.EAGAIN, message))
        interpreter.asked.clear()

    def _hang_up(self, interpreter: _Interpreter) -> None:
        if interpreter.control is not None:
            self._poll.unregister(interpreter.control)
            interpreter.control.close()
            interpreter.control = None

    def _kill(self, interpreter: _Interpreter) -> None:
        for pid in [pid for pid, name in self.pids.items() if name == interpreter.order.name]:
            _kill_session(pid)

    def ended(self, pid: int, exit_code: int) -> None:
        """Handle the end of a process whose socket was read before."""
        name = self.pids.pop(pid, None)
        if name is None:
            return
        interpreter = self._by_name[name]
        if interpreter.pid == pid and interpreter.state is InterpreterState.STARTING:
            self._fail(interpreter, f"the interpreter ended while it imported ({_how(exit_code)}); its stderr is the worker's")
        elif interpreter.pid == pid and interpreter.control is not None:
            interpreter.enter(InterpreterState.ENDING)
            with contextlib.suppress(OSError):
                interpreter.control.shutdown(socket.SHUT_WR)  # the parked process ends, or takes a request that was sent before

    def tick(self) -> None:
        """End interpreters that hang. Called about once a second while jobs run."""
        for interpreter in self._by_name.values():
            if interpreter.state is InterpreterState.STARTING and interpreter.age_s > PRELOAD_S:
                self._fail(interpreter, f"the import was not done after {PRELOAD_S:g} s")
            waited_for = interpreter.asked or interpreter.state is InterpreterState.ENDING
            if waited_for and time.monotonic() - max(interpreter.moved_at, interpreter.since) > FORK_S:
                self._kill(interpreter)

    def close(self) -> None:
        """End them all, and wait for them."""
        for pid in self.pids:
            _kill_session(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self.pids.clear()

    # ------------------------------------------------------------------------------------------------ sockets

    def read(self) -> None:
        """Read the interpreters' answers, and send requests as far as the sockets take them."""
        for interpreter in self._by_name.values():
            if interpreter.control is not None:
                self._read(interpreter)
            if interpreter.control is not None and interpreter.unsent:
                self._send(interpreter)

    def _read(self, interpreter: _Interpreter) -> None:
        while interpreter.control is not None:
            try:
                data = interpreter.control.recv(protocol.READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self._over(interpreter)
                return
            interpreter.received += data
            *lines, rest = interpreter.received.split(b"\n")
            interpreter.received = bytearray(rest)
            for line in lines:
                if interpreter.control is not None:
                    self._hear(interpreter, bytes(line))

    def _hear(self, interpreter: _Interpreter, line: bytes) -> None:
        interpreter.moved_at = time.monotonic()
        try:
            match json.loads(line):
                case ["ready", float(took_s)]:
                    interpreter.enter(InterpreterState.READY)
                    interpreter.ready_at = interpreter.since
                    self._reports.append(protocol.Prepared(interpreter.order.name, protocol.PythonStart.WARM, f"{took_s:.2f} s"))
                    self._send(interpreter)
                case ["failed", str(why)]:
                    self._fail(interpreter, why)
                case ["parked", int(pid)]:
                    self.pids[pid] = interpreter.order.name
                case ["forked", [int(number), int(pid)]]:
                    self.pids.pop(pid, None)
                    interpreter.asked.remove(number)
                    interpreter.unanswered_ends = 0
                    self._begun(protocol.Spawned(number, pid))
                case ["refused", [int(number), int(error)]]:
                    interpreter.asked.remove(number)
                    self._begun(protocol.NotSpawned(number, error))
                case other:
                    raise ValueError(f"it sent {other!r}")
        except (ValueError, KeyError) as error:  # a module has written to the socket
            self._fail(interpreter, f"the interpreter does not keep to the protocol: {error}")

    def _over(self, interpreter: _Interpreter) -> None:
        """Handle the end of its socket: the interpreter and its parked process are gone."""
        if interpreter.state is InterpreterState.STARTING:  # its exit code will give the reason
            self._hang_up(interpreter)
        elif interpreter.asked and interpreter.unanswered_ends + 1 >= UNANSWERED_MAX:
            times = interpreter.unanswered_ends + 1
            self._fail(
                interpreter, f"the interpreter ended {times} times with jobs that it was to fork; its stderr is the worker's"
            )
        elif time.monotonic() - interpreter.ready_at >= STEADY_S:
            self._drop(interpreter)
            self._start(interpreter)
        else:
            self._fail(interpreter, "the interpreter ended as soon as it was ready; its stderr is the worker's")

    def _send(self, interpreter: _Interpreter) -> None:
        if interpreter.state is not InterpreterState.READY or interpreter.control is None:
            return
        if not interpreter.asked:
            interpreter.moved_at = time.monotonic()
        interpreter.asked.update(interpreter.waiting)
        interpreter.unsent += b"".join(interpreter.waiting.values())
        interpreter.waiting.clear()
        try:
            del interpreter.unsent[: interpreter.control.send(interpreter.unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:  # its end is read next
            interpreter.unsent.clear()
        self._poll.modify(interpreter.control, select.POLLIN | (select.POLLOUT if interpreter.unsent else 0))


def check_texts(order: protocol.Spawn) -> None:
    """Raise ValueError for texts that no program can be given, which functions do not get either."""
    if any(b"\0" in text for text in (*order.argv, *order.env, *order.env.values())):
        raise ValueError("an argument or a variable has a NUL character")


def _request(order: protocol.Spawn, tag: tuple[int, int] | None, leaf: Path | None) -> bytes:
    request = {
        "number": order.number,
        "arguments": [os.fsdecode(argument) for argument in order.argv[CALL_AT + 1 :]],
        "env": {os.fsdecode(name): os.fsdecode(value) for name, value in order.env.items()},
        "cwd": os.fsdecode(order.cwd),
        "files": [(descriptor, os.fsdecode(path), flags) for descriptor, path, flags in files_of(order)],
        "nice": order.limits.nice,
        "rlimits": rlimits_of(order.limits),
        "tag": tag,
        "leaf": None if leaf is None else str(leaf),
    }
    body = json.dumps(request).encode()
    return _LENGTH.pack(len(body)) + body


def start_process(order: protocol.Prepare, control: socket.socket) -> int:
    """Start an interpreter in a session of its own, with the worker's stderr, and return its pid."""
    control.set_inheritable(True)
    words = ["-P", str(PROGRAM), SERVE, str(control.fileno()), str(protocol.PROGRESS_DESCRIPTOR), order.call, *order.modules]
    nothing = os.devnull.encode()
    files = [(0, nothing, os.O_RDONLY), (1, nothing, os.O_WRONLY)]
    return spawn_session(order.program, (order.program, *map(os.fsencode, words)), order.env, files)


def _how(exit_code: int) -> str:
    return f"exit code {exit_code}" if exit_code >= 0 else f"signal {-exit_code}"


def _kill_session(pid: int) -> None:
    """Kill an interpreter with the processes of its import, or a parked process. Jobs have sessions of their own."""
    for seen in living():
        if seen.pid == pid or seen.session == pid:
            signal_checked(seen, signal.SIGKILL)
