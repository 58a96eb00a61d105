"""A warm interpreter: the modules of one exec imported once, a fork for each job. Also the same job in a cold interpreter.

    python -P preforked.py CALL ARGUMENT…                           cold: import, call, exit
    python -P preforked.py --serve CONTROL RESERVED CALL MODULE…    warm: import, then fork for each request on descriptor CONTROL

This is a program of its own. It runs under the exec's own interpreter, which need not have tasuki, and imports the standard
library only.

Theory of operation. The keeper (`keeper/preforked.py`) must be the parent of each job, as it is of any program; and no job should
wait for a fork, which takes longer the more is imported. So the warm interpreter always has one process *parked*: forked twice,
adopted by the keeper, and waiting for a request. The next one is forked as soon as a request has come. While requests come faster
than that, one go-between, which costs half as much as a job, parks several; a lock says which of them is next.

    warm ──fork──► go-between ──fork──► parked     waits until the go-between is gone and the keeper its parent
      │                └─► keeper: parked (pid)     before the keeper can see it as a child, and for its turn
      │ ◄────────────── taken ────────────┤ ◄────── request
      └─ the next one                     │         sets itself up: session, tag, files, folder, environment
                                          └─► keeper: forked (number, pid), before the first line of user code

When the keeper's end of the socket closes, all of them end.
Requests are frames (length u32 LE, JSON); answers are lines of JSON. Bytes of paths are text with surrogate escapes.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import functools
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

SERVE = "--serve"
EXIT_RAISED = 1
EXIT_INTERRUPTED = 130
EXIT_UNFLUSHED = 120  # the interpreter's own exit code when its last output cannot be written
RLIMIT_LOCKS = 10  # the keeper's tag of a job; see keeper/linux.py
ADOPTION_POLL_S = 0.00005
FORK_AGAIN_S = 0.05
ABOVE_JOBS = 32  # the control socket is moved above the descriptors that a job is given
_LENGTH = struct.Struct("<I")
PARKED_MAX = 4  # processes that are parked together while requests come quickly
QUICK_S = 0.02
_TAKEN, _QUICK, _END = b"t", b"q", b"e"

Function = Callable[[list[str]], object]


# ---------------------------------------------------------------------------------------------------- the call


def find(call: str) -> Function:
    """Return the function `package.module:name`."""
    module, _, name = call.partition(":")
    function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    if not callable(function):
        raise TypeError(f"{call} is not a function but of type {type(function).__name__}")
    return function


def run(function: Function, arguments: list[str]) -> NoReturn:
    """Call the function and exit as a program does: wait for threads, run exit handlers, write output. No other teardown."""
    code = EXIT_RAISED
    try:
        code = _exit_code_of(function, arguments)
        for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
            try:
                step()
            except BaseException as error:  # noqa: BLE001
                _show(error)
        for stream in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__):
            if not _flushed(stream):
                code = EXIT_UNFLUSHED
    finally:
        os._exit(code)


def _exit_code_of(function: Function, arguments: list[str]) -> int:
    """Return the exit code as `sys.exit` does: None is 0, a number is itself, any other value is printed and is 1."""
    try:
        try:
            value = function(arguments)
        except SystemExit as error:
            value = error.code
        if value is None:
            return 0
        if isinstance(value, int):
            number = int.__index__(value)
            return number & 0xFF or (EXIT_RAISED if number else 0)
        print(value, file=sys.stderr)  # noqa: T201
        return EXIT_RAISED
    except KeyboardInterrupt as error:
        _show(error)
        return EXIT_INTERRUPTED
    except BaseException as error:  # noqa: BLE001 - any exception is the end of the job
        _show(error)
        return EXIT_RAISED


def _show(error: BaseException) -> None:
    """Print the traceback to stderr, without the frames of this file at its top."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    try:
        sys.excepthook(type(error), error.with_traceback(frames), frames)
    except BaseException:  # noqa: BLE001 - it cannot be formatted, or stderr is closed; the exit code remains
        os.write(2, f"{type(error).__name__}\n".encode())


def _flushed(stream: Any) -> bool:
    try:
        if stream is not None and not stream.closed:
            stream.flush()
    except BaseException:  # noqa: BLE001 - a full disk, a limit, or something that is no stream
        return False
    return True


# ---------------------------------------------------------------------------------------------------- serving


def serve(control: socket.socket, call: str, modules: list[str]) -> None:
    """Import the modules, report the result, and fork until the keeper closes its end."""
    began = time.monotonic()
    try:
        for module in modules:
            importlib.import_module(module)
        function = find(call)
    except BaseException as error:  # noqa: BLE001 - SystemExit in a module too
        traceback.print_exc()
        _tell(control, "failed", traceback.format_exception_only(error)[-1].strip())
        return
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # set by a module; children must be waited for here
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    gc.collect()
    gc.freeze()  # the collector of a job then leaves the shared pages alone
    sys.stdout.flush()
    sys.stderr.flush()
    if children := _children():
        _tell(control, "failed", f"the import started processes (pid {children}); start them in the function")
        return
    if not _alone(control):
        return
    _tell(control, "ready", round(time.monotonic() - began, 3))
    turn, count = os.memfd_create("turn"), 1
    while count and _alone(control):
        count = _parked(control, turn, count, function, call)


def _alone(control: socket.socket) -> bool:
    """Return whether there is no other thread: a fork would copy the locks that it holds, and nothing would release them."""
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208  # called for each job
    if threads == 1:
        return True
    names = ", ".join(repr(thread.name) for thread in threading.enumerate() if thread is not threading.main_thread())
    known = names or "not of Python; for numpy set OPENBLAS_NUM_THREADS and OMP_NUM_THREADS to 1 in env"
    _tell(control, "failed", f"the import left {threads - 1} thread(s) running ({known}); start them in the function")
    return False


def _children() -> str:
    file = Path(f"/proc/self/task/{os.getpid()}/children")
    return ", ".join(file.read_text().split()) if file.exists() else ""


def _parked(control: socket.socket, turn: int, count: int, function: Function, call: str) -> int:
    """Park so many processes, and wait until all are taken; return how many to park next, 0 if no request will come."""
    reading, writing = os.pipe()
    words = b""
    os.pwrite(turn, bytes([count]), 0)
    try:
        pid = os.fork()
    except OSError:  # no room for a process; the keeper refuses requests that wait for long
        os.close(writing)
    else:
        if pid == 0:
            os.close(reading)
            _go_between(control, turn, count, writing, function, call)
        os.close(writing)
        os.waitpid(pid, 0)
        while word := os.read(reading, count):
            words += word
    os.close(reading)
    if not words:  # they were killed, or could not be forked
        time.sleep(FORK_AGAIN_S)
    return 0 if _END in words else PARKED_MAX if words.endswith(_QUICK) else 1


def _go_between(control: socket.socket, turn: int, count: int, taken: int, function: Function, call: str) -> NoReturn:
    try:
        own, (gone, end) = os.getpid(), os.pipe()
        for _ in range(count):
            pid = os.fork()
            if pid == 0:
                os.close(end)
                os.read(gone, 1)  # until this process has ended, or nearly
                os.close(gone)
                _park(control, turn, count, taken, own, function, call)
            _tell(control, "parked", pid)
    finally:
        os._exit(os.EX_OK)


def _park(control: socket.socket, turn: int, count: int, taken: int, parent: int, function: Function, call: str) -> NoReturn:
    """Wait for a request, as one of so many that were parked together. The file `turn` says how many had no turn yet: on a busy
    machine it does not come in the order of the forks."""
    try:
        os.setsid()
        while os.getppid() == parent:
            time.sleep(ADOPTION_POLL_S)
        fcntl.lockf(turn, fcntl.LOCK_EX)  # released by the end of a process, too
        others = os.pread(turn, 1, 0)[0] - 1
        os.pwrite(turn, bytes([others]), 0)
        is_quick = _waits(control, QUICK_S if count > 1 else 0.0)
        if not is_quick and others:  # one is enough again
            os.write(taken, _TAKEN)
            os._exit(os.EX_OK)
        if not is_quick:
            _rehearse(function)
        request = _request(control)
        if count == 1:
            is_quick = _waits(control, 0.0)
        os.close(turn)
        os.write(taken, _END if request is None else _QUICK if is_quick else _TAKEN)
        os.close(taken)
        if request is not None:
            _become_job(control, request, function, call)
    finally:
        os._exit(os.EX_OK)


def _waits(control: socket.socket, wait_s: float) -> bool:
    """Return whether a request is there, or comes soon."""
    return bool(select.select([control], [], [], wait_s)[0])


def _rehearse(function: Function) -> None:
    """Do some of what the job will do, and what the function's own `rehearse` does, if it has one: the memory that it changes is
    copied now, and not while somebody waits."""
    _set_environment(json.loads(json.dumps(dict(os.environ))))
    getattr(function, "rehearse", lambda: None)()


# ---------------------------------------------------------------------------------------------------- the job


def _become_job(control: socket.socket, request: dict[str, Any], function: Function, call: str) -> NoReturn:
    try:
        try:
            _set_up(request)
        except OSError as error:
            _tell(control, "refused", [request["number"], error.errno or errno.EIO])
            os._exit(os.EX_OSERR)
        if not _tell(control, "forked", [request["number"], os.getpid()]):
            os._exit(os.EX_UNAVAILABLE)
        control.close()
        _reset_modules()
        sys.argv = [call, *request["arguments"]]
        for which, soft, hard in request["rlimits"]:  # late: they must hit the function, not its preparation
            most = resource.getrlimit(which)[1]
            values = (soft, hard) if most == resource.RLIM_INFINITY else (min(soft, most), min(hard, most))
            resource.setrlimit(which, values)
        run(function, request["arguments"])
    except BaseException as error:  # noqa: BLE001 - a memory limit below what is imported already
        _show(error)
    finally:
        os._exit(EXIT_RAISED)


def _set_up(request: dict[str, Any]) -> None:
    if request["tag"] is not None:
        resource.setrlimit(RLIMIT_LOCKS, tuple(request["tag"]))
    if request["leaf"]:
        Path(request["leaf"], "cgroup.procs").write_text("0")
    for descriptor, path, flags in request["files"]:
        opened = os.open(path, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(request["cwd"])
    os.nice(request["nice"])
    _set_environment(request["env"])


def _set_environment(variables: dict[str, str]) -> None:
    """Set exactly these variables. Most are as they were: each write copies some of the memory that is shared."""
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _reset_modules() -> None:
    """Reset what a module may have taken from the environment or from chance at its import: it differs for each job."""
    time.tzset()
    if "tempfile" in sys.modules:
        sys.modules["tempfile"].tempdir = None  # type: ignore[attr-defined]
    for name in ("random", "numpy.random"):
        if name in sys.modules:
            sys.modules[name].seed()


# ---------------------------------------------------------------------------------------------------- messages


def _tell(control: socket.socket, kind: str, value: object) -> bool:
    """Send one line in one call, so that lines of several processes do not mix. Return False if the keeper is gone."""
    try:
        control.sendall(json.dumps([kind, value]).encode() + b"\n")
    except ConnectionError:
        return False
    return True


def _request(control: socket.socket) -> dict[str, Any] | None:
    head = _exactly(control, _LENGTH.size)
    body = _exactly(control, _LENGTH.unpack(head)[0]) if head else b""
    return json.loads(body) if body else None


def _exactly(control: socket.socket, size: int) -> bytes:
    """Receive exactly so many bytes, or none if the other end was closed."""
    data = bytearray()
    while len(data) < size:
        try:
            piece = control.recv(size - len(data))
        except ConnectionError:
            return b""
        if not piece:
            return b""
        data += piece
    return bytes(data)


def _take_control(given: int, reserved: int) -> socket.socket:
    """Return the keeper's socket, moved above the descriptors of jobs; those are reserved, so that no module's file gets one."""
    number = fcntl.fcntl(given, fcntl.F_DUPFD_CLOEXEC, ABOVE_JOBS)
    os.close(given)
    nothing = os.open(os.devnull, os.O_RDWR)
    if nothing != reserved:
        os.dup2(nothing, reserved)
        os.close(nothing)
    os.dup2(2, 1)  # stdout was opened on /dev/null, so that it is not a terminal; prints of an import go to the worker's log
    return socket.socket(fileno=number)


def main(words: list[str]) -> None:
    if words[0] == SERVE:
        control, reserved, call, *modules = words[1:]
        serve(_take_control(int(control), int(reserved)), call, modules)
    else:
        call, *arguments = words
        sys.argv = words
        run(lambda given: find(call)(given), arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
