"""Messages between a worker and its keeper, their frames, and the socket that carries them.

    frame = length u32 LE, then a msgpack array of messages

All messages of one turn travel in one frame, in either direction, so a hundred starts cost one wake-up. Both ends belong to
one installation: there is no version to agree on, and bytes that cannot be decoded mean that the other end is broken.
Paths, arguments and the environment are bytes, as the kernel has them. Deadlines are boot times (`clocks.py`).
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from tasuki.errors import ProtocolError

FRAME_MAX_BYTES = 64 * 1024 * 1024  # a turn that starts a thousand jobs with long arguments; anything above is garbage
READ_BYTES = 256 * 1024
PROGRESS_DESCRIPTOR = 3  # of the progress file in a job; the first above the three that every program has
_LENGTH = struct.Struct("<I")

MessageT = TypeVar("MessageT")


class EndReason(enum.StrEnum):
    """The reason for ending an attempt from outside; the value is the outcome's error code."""

    CANCELED = "CANCELED"
    LEASE_LOST = "LEASE_LOST"
    SHUTDOWN = "SHUTDOWN"
    TIMED_OUT = "TIMED_OUT"
    OOM = "OOM"
    PROCESS_LIMIT = "PROCESS_LIMIT"


class Limits(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Limits of one attempt; None is no limit. docs/concepts.md, Limits, says how far each holds."""

    memory_mb: int | None = None
    processes: int | None = None
    cpu_seconds: int | None = None
    file_size_mb: int | None = None
    open_files: int | None = None
    nice: int = 0

    @property
    def watched(self) -> bool:
        """True if a limit is for all processes together, which no rlimit is."""
        return self.memory_mb is not None or self.processes is not None


NO_LIMITS = Limits()


class Prepare(msgspec.Struct, frozen=True, tag="prepare", array_like=True, kw_only=True):
    """Start the warm interpreter of an exec of kind python; answered by Prepared, each time it becomes ready or fails."""

    name: str
    program: bytes
    call: str
    modules: tuple[str, ...]
    env: dict[bytes, bytes]
    or_cold: bool = False
    """True: jobs start cold while the interpreter cannot be prepared; False: they are refused."""


class Spawn(msgspec.Struct, frozen=True, tag="spawn", array_like=True, kw_only=True):
    """Start an attempt; answered by Spawned and later TreeEnded, or by NotSpawned."""

    number: int
    """Names the attempt; never used twice with one keeper."""
    program: bytes
    argv: tuple[bytes, ...]
    env: dict[bytes, bytes]
    cwd: bytes
    folder: bytes
    """The attempt's own folder: a process that works in it, or writes to a file in it, is part of the attempt."""
    mark: bytes
    """The value of the marker variable in its environment."""
    stdin: bytes
    stdout: bytes
    stderr: bytes
    progress: bytes = b""
    """The file for the attempt's progress; empty: none."""
    lease_deadline: float | None = None
    timeout_s: float | None = None
    grace_s: float = 5.0
    """Between TERM and KILL."""
    limits: Limits = NO_LIMITS
    warm: str = ""
    """The exec whose warm interpreter forks it; argv after the call are its arguments. Where there is none (not on Linux), argv
    is the same job in a cold interpreter."""


class RenewDeadlines(msgspec.Struct, frozen=True, tag="renew", array_like=True):
    """New lease deadlines of running attempts."""

    deadlines: list[tuple[int, float]]


class StopAttempt(msgspec.Struct, frozen=True, tag="stop", array_like=True):
    """End an attempt. Without effect when it has ended, or is being ended for another reason."""

    number: int
    reason: EndReason
    grace_s: float


Order = Prepare | Spawn | RenewDeadlines | StopAttempt


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """The keeper works; with how well it can find the processes of a job."""

    level: str
    """cgroup, subreaper or group"""
    detail: str
    limits: str
    """cgroup, watched or none: the way in which limits of memory and processes are enforced."""


class Spawned(msgspec.Struct, frozen=True, tag="spawned", array_like=True):
    """The process runs."""

    number: int
    pid: int
    at: float = 0.0
    """Boot time of the start; in TreeEnded, of the end."""


class NotSpawned(msgspec.Struct, frozen=True, tag="not_spawned", array_like=True):
    """Nothing was started."""

    number: int
    errno: int
    message: str = ""
    """The reason why its warm interpreter could not be prepared; else empty."""


class TreeEnded(msgspec.Struct, frozen=True, tag="ended", array_like=True):
    """No process of the attempt is alive any more."""

    number: int
    exit_code: int
    """Exit code of the first process; negative: a signal."""
    reason: EndReason | None = None
    """None: it ended by itself."""
    detail: str = ""
    """More about the reason: the number that passed a limit, for example."""
    at: float = 0.0


class PythonStart(enum.StrEnum):
    """The way in which jobs of an exec of kind python start."""

    WARM = "warm"
    FAILED = "failed"
    COLD = "cold"


class Prepared(msgspec.Struct, frozen=True, tag="prepared", array_like=True):
    """The result of starting a warm interpreter."""

    name: str
    warmth: PythonStart
    detail: str
    """Duration of the import; or the reason why it failed, or is cold."""


Report = Ready | Prepared | Spawned | NotSpawned | TreeEnded

_encode = msgspec.msgpack.Encoder().encode


def frame(messages: Sequence[Order] | Sequence[Report]) -> bytes:
    """Return the bytes of one frame."""
    body = _encode(messages)
    return _LENGTH.pack(len(body)) + body


class KeeperStream(Generic[MessageT]):
    """One end of the socket between worker and keeper, which never blocks. `kind` is as for `Frames`."""

    def __init__(self, control: socket.socket, kind: type[list[MessageT]]) -> None:
        self._control = control
        self._frames = Frames(kind)
        self._unsent = bytearray()

    def receive(self) -> list[MessageT]:
        """Return the messages that are complete now. ConnectionError at the end of the socket, ProtocolError for garbage."""
        try:
            data = self._control.recv(READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("its end of the socket is closed")
        return self._frames.feed(data)

    def send(self, messages: Sequence[Order] | Sequence[Report] = ()) -> bool:
        """Send messages in one frame, as far as the socket takes it; return whether bytes are left for the next call."""
        if messages:
            self._unsent += frame(messages)
        if self._unsent:
            with contextlib.suppress(BlockingIOError):
                del self._unsent[: self._control.send(self._unsent)]
        return bool(self._unsent)


class Frames(Generic[MessageT]):
    """Decodes frames. `kind` is a list type: `list[Order]` in the keeper, `list[Report]` in the worker."""

    def __init__(self, kind: type[list[MessageT]]) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[MessageT]:
        """Return the messages that are complete now, in order; ProtocolError if these bytes are not frames."""
        self._pending += data
        messages: list[MessageT] = []
        at = 0
        while len(self._pending) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending, at)
            if length > FRAME_MAX_BYTES:
                raise ProtocolError(f"a frame of {length} bytes between worker and keeper; the limit is {FRAME_MAX_BYTES}")
            if len(self._pending) - at < _LENGTH.size + length:
                break
            body = memoryview(self._pending)[at + _LENGTH.size : at + _LENGTH.size + length]
            try:
                messages += self._decode(body)
            except (msgspec.DecodeError, RecursionError) as error:
                raise ProtocolError(f"a frame between worker and keeper cannot be read: {error}") from error
            finally:
                body.release()
            at += _LENGTH.size + length
        del self._pending[:at]
        return messages
