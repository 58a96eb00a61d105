"""What a worker and its keeper say to each other, and how it is cut out of a stream of bytes. Touches nothing.

    frame = length u32 LE, then a msgpack array of messages

All messages of one turn travel in one frame, in either direction, so a hundred starts cost one wake-up. Both ends belong to
one installation: there is no version to agree on, and whatever cannot be decoded means that the other end is broken.
Paths, arguments and the environment are bytes, as the kernel has them. Deadlines are CLOCK_BOOTTIME, which both ends read.
"""

from __future__ import annotations

import enum
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
    """Why an attempt was ended from outside; its value is the outcome's error code."""

    CANCELED = "CANCELED"
    LEASE_LOST = "LEASE_LOST"
    SHUTDOWN = "SHUTDOWN"
    TIMED_OUT = "TIMED_OUT"
    OOM = "OOM"
    PROCESS_LIMIT = "PROCESS_LIMIT"


class Limits(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What one attempt may use; None is no limit. How far each holds is written in docs/concepts.md, Limits."""

    memory_mb: int | None = None
    processes: int | None = None
    cpu_seconds: int | None = None
    file_size_mb: int | None = None
    open_files: int | None = None
    nice: int = 0

    @property
    def watched(self) -> bool:
        """Whether some of it concerns all processes together, which no rlimit does."""
        return self.memory_mb is not None or self.processes is not None


NO_LIMITS = Limits()


class Prepare(msgspec.Struct, frozen=True, tag="prepare", array_like=True, kw_only=True):
    """Start the warm interpreter of an exec of kind python; answered by Prepared, each time it is ready or cannot be."""

    name: str
    program: bytes
    call: str
    modules: tuple[str, ...]
    env: dict[bytes, bytes]


class Spawn(msgspec.Struct, frozen=True, tag="spawn", array_like=True, kw_only=True):
    """Start this; answered by Spawned and later Ended, or by NotSpawned."""

    number: int
    """The worker's name for the attempt; never used twice with one keeper."""
    program: bytes
    argv: tuple[bytes, ...]
    env: dict[bytes, bytes]
    cwd: bytes
    folder: bytes
    """The attempt's own folder: who works in it, or has a file of it open, is part of the attempt."""
    mark: bytes
    """The value of the marker variable in its environment."""
    stdin: bytes
    stdout: bytes
    stderr: bytes
    progress: bytes = b""
    """The file that the attempt may tell its progress to; none: it cannot."""
    lease_deadline: float | None = None
    timeout_s: float | None = None
    grace_s: float = 5.0
    """Between TERM and KILL."""
    limits: Limits = NO_LIMITS
    warm: str = ""
    """The exec whose warm interpreter forks it, with what follows the call in argv as its arguments. Where there is none
    (not on Linux) argv is the same job in a cold one."""


class RenewDeadlines(msgspec.Struct, frozen=True, tag="renew", array_like=True):
    """New lease deadlines, of all attempts that run."""

    deadlines: list[tuple[int, float]]


class StopAttempt(msgspec.Struct, frozen=True, tag="stop", array_like=True):
    """End this attempt for this reason. Harmless when it has ended, or is being ended for another reason."""

    number: int
    reason: EndReason
    grace_s: float


Order = Prepare | Spawn | RenewDeadlines | StopAttempt


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """The keeper works; how well it can hold on to what it starts."""

    level: str
    """cgroup, subreaper or group"""
    detail: str
    limits: str
    """cgroup, watched or none: how limits of memory and processes are kept."""


class Spawned(msgspec.Struct, frozen=True, tag="spawned", array_like=True):
    """The process runs."""

    number: int
    pid: int
    at: float = 0.0
    """Since when, on the clock of the deadlines; so of the end."""


class NotSpawned(msgspec.Struct, frozen=True, tag="not_spawned", array_like=True):
    """Nothing was started."""

    number: int
    errno: int
    message: str = ""
    """Not empty: its warm interpreter could not be prepared, for this reason."""


class TreeEnded(msgspec.Struct, frozen=True, tag="ended", array_like=True):
    """Nothing of the attempt is alive any more."""

    number: int
    exit_code: int
    """Of the first process; negative: a signal."""
    reason: EndReason | None = None
    """None: it ended by itself."""
    detail: str = ""
    """What is known beyond the reason: the number that passed a limit, say."""
    at: float = 0.0


class Warmth(enum.StrEnum):
    """How the jobs of an exec of kind python start."""

    WARM = "warm"
    FAILED = "failed"
    COLD = "cold"


class Prepared(msgspec.Struct, frozen=True, tag="prepared", array_like=True):
    """What became of a warm interpreter."""

    name: str
    warmth: Warmth
    detail: str
    """How long the import took; why it failed; why it is cold."""


Report = Ready | Prepared | Spawned | NotSpawned | TreeEnded

_encode = msgspec.msgpack.Encoder().encode


def frame(messages: Sequence[Order] | Sequence[Report]) -> bytes:
    """The bytes of one frame."""
    body = _encode(messages)
    return _LENGTH.pack(len(body)) + body


class Frames(Generic[MessageT]):
    """Bytes in, messages out. `kind` is a list type: `list[Order]` in the keeper, `list[Report]` in the worker."""

    def __init__(self, kind: type[list[MessageT]]) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[MessageT]:
        """The messages that are complete now, in order; ProtocolError if these bytes are no frames."""
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

    @property
    def pending_bytes(self) -> int:
        """What has arrived of a frame that is not complete."""
        return len(self._pending)
