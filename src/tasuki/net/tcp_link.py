"""A connection over TCP or a Unix socket that sends and receives messages, and `connect`, which dials one.

Bytes that are written in one turn of the loop leave in one system call. Buffers for a peer that does not read are bounded: past
WRITE_SOFT_BYTES the peer is not read from, past WRITE_HARD_BYTES the link is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

from tasuki.core.address import Address
from tasuki.core.machine import Peer
from tasuki.core.protocol import (
    FRAME_MAX_BYTES,
    UNAUTHENTICATED_FRAME_MAX_BYTES,
    DeliverMessages,
    ErrorMessage,
    Message,
    Reply,
)
from tasuki.core.reconnect import CONNECT_TIMEOUT_S
from tasuki.errors import Overloaded, ProtocolError, RefusedRequest, TasukiError, TooLarge, Unavailable, UnknownFrame
from tasuki.net.tls import CUT_SHORT, handshake_words, warn_of_clear_text
from tasuki.wire.messages import Frame, FrameDecoder, decode, encode

WRITE_SOFT_BYTES = 1024 * 1024
WRITE_HARD_BYTES = 64 * 1024 * 1024
FRAME_TIMEOUT_S = 30.0  # from the first byte of a frame to its last
STALL_TIMEOUT_S = 30.0  # a peer that does not read anything for so long is cut off
_delivered: dict[str | None, tuple[DeliverMessages, bytes]] = {}
"""The last delivered message and its frame, by codec."""
LINGER_S = 5.0  # how long a peer may take to read the last messages of a closed link


class TcpLink(asyncio.Protocol):
    """One connection. `on_message` gets every message, `on_closed` the end, once."""

    on_message: Callable[[Message], None]

    def __init__(
        self,
        on_message: Callable[[TcpLink, Message], None] | None,
        on_closed: Callable[[TcpLink, str], None],
        on_opened: Callable[[TcpLink], None] | None = None,
        *,
        on_read: Callable[[], None] | None = None,
        on_trusted: Callable[[str], None] = lambda owner: None,
        max_bytes: int = UNAUTHENTICATED_FRAME_MAX_BYTES,
    ) -> None:
        """Open a link; without an `on_message`, `on_opened` sets the attribute."""
        self.codec: str | None = None
        self.blobs = None  # blobs travel as messages
        self.peer = Peer("tcp")
        self.tag: Any = None
        if on_message is not None:
            self.on_message = partial(on_message, self)
        self._on_closed, self._on_opened = on_closed, on_opened
        self._on_read, self._on_trusted = on_read, on_trusted
        self._decoder = FrameDecoder(max_bytes)
        self._from_server = on_opened is None  # a door wants to know of each new link, a caller has it in hand
        self._trusted = max_bytes > UNAUTHENTICATED_FRAME_MAX_BYTES
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._flushing = False
        self._closed = False
        self.error: TasukiError | None = None
        """The reason for which this side ended the connection."""
        self.silent_end = ""
        """The reason to report if the peer hangs up without having sent anything; empty: the usual one."""
        self._writable = asyncio.Event()
        self._writable.set()
        self._pauses: set[object] = set()
        self._undecoded: deque[Frame] = deque()
        """Frames of the last read that came while reading was paused: compressed, they are a fraction of their messages."""
        self._frame_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()

    # ------------------------------------------------------------------------------------------------ in

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transport does not inherit from it
        self.transport.set_write_buffer_limits(high=WRITE_SOFT_BYTES)
        self.peer = _peer_of(self.transport)
        if self._on_opened is not None:
            self._on_opened(self)

    def trust(self, max_bytes: int, owner: str) -> None:
        """Accept larger frames, and unknown frame types, from a peer that is authenticated as `owner`."""
        self._on_trusted(owner)
        self._decoder.max_bytes = max_bytes
        self._trusted = True

    def data_received(self, data: bytes) -> None:
        if self._closed:
            return
        self.silent_end = ""
        try:
            frames = self._decoder.feed(data)
        except TasukiError as error:
            self.close(error)
            return
        if frames and self._frame_timer is not None:  # that frame is complete; the next one has its own time
            self._frame_timer.cancel()
            self._frame_timer = None
        self._undecoded += frames
        self._watch_frame()
        self._take_all()

    def _take_all(self) -> None:
        """Take the frames that have come, until one of them makes this side pause."""
        taken = False
        try:
            while self._undecoded and not self._pauses and not self._closed:
                taken = True
                self._take(self._undecoded.popleft())
        except TasukiError as error:
            self.close(error)
            return
        if taken and not self._closed and self._on_read is not None:
            self._on_read()

    def _take(self, frame: Frame) -> None:
        try:
            message = decode(frame, self._decoder.max_bytes, from_server=self._from_server)
        except (UnknownFrame, RefusedRequest) as error:
            if not self._trusted:  # a peer that begins like this speaks another protocol
                raise
            if error.msg_id:  # its sender waits for an answer, and nobody else is concerned
                self.send(ErrorMessage(error.msg_id, error.code, error.message))
            return
        self.on_message(message)

    def _watch_frame(self) -> None:
        if self._decoder.partial and self._frame_timer is None and not self._closed:
            self._frame_timer = self._loop.call_later(FRAME_TIMEOUT_S, self._frame_late)

    def _frame_late(self) -> None:
        self._frame_timer = None
        if self._pauses:  # this side does not read
            self._watch_frame()
        else:
            self.close(ProtocolError(f"a frame did not end within {FRAME_TIMEOUT_S:g} s"))

    def pause_reading(self, why: object = None) -> None:
        """Stop reading for the reason `why`. Each reason is withdrawn by itself."""
        if not self._pauses and self.transport is not None and not self._closed:
            self.transport.pause_reading()
        self._pauses.add(why)

    def resume_reading(self, why: object = None) -> None:
        """Withdraw a reason; reading continues when there is no other."""
        if why in self._pauses:
            self._pauses.remove(why)
            if self._undecoded:
                self._loop.call_soon(self._read_on)
            else:
                self._read_on()

    def _read_on(self) -> None:
        """Take the frames that have come, then read again: who reads first has more of them after each pause."""
        self._take_all()
        if not self._pauses and self.transport is not None and not self._closed:
            self.transport.resume_reading()

    # ------------------------------------------------------------------------------------------------ out

    def send(self, message: Message) -> None:
        """Send a message in this turn of the loop: the first one at once, the others at the turn's end."""
        self.send_bytes(encode_answer(message, self.codec))

    def say(self, message: Message) -> None:
        """Send a message, or raise InvalidInput if it does not fit a frame; then nothing was sent."""
        self.send_bytes(encode(message, self.codec, max_bytes=FRAME_MAX_BYTES))

    def send_together(self, messages: Iterable[Message]) -> None:
        """Send several messages in one write, for a peer that should know all of them before it acts on the first."""
        if data := b"".join([encode_answer(message, self.codec) for message in messages]):
            self.send_bytes(data)

    def deliver(self, message: DeliverMessages) -> None:
        """Send a message that other links send as well: it is encoded once for all that follow one another."""
        last, data = _delivered.get(self.codec, (None, b""))
        if message is not last:
            data = encode(message, self.codec)
            _delivered[self.codec] = message, data
        self.send_bytes(data)

    def send_bytes(self, data: bytes) -> None:
        if self._closed or self.transport is None:
            return
        if not self._flushing and not self.transport.get_write_buffer_size():
            # The first message of a turn leaves at once; the others leave together at the turn's end.
            self._flushing = True
            self._loop.call_soon(self._flush)
            self.transport.write(data)
            return
        self._out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes + self.transport.get_write_buffer_size() > WRITE_HARD_BYTES:
            self.abort(f"the peer does not read: more than {WRITE_HARD_BYTES} bytes wait for it")
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._out and self.transport is not None and not self._closed:
            data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
            self._out.clear()
            self._out_bytes = 0
            self.transport.write(data)

    def pause_writing(self) -> None:
        self._writable.clear()
        self.pause_reading("the peer does not read")
        self._stall_timer = self._loop.call_later(STALL_TIMEOUT_S, self.abort, "the peer does not read")

    def resume_writing(self) -> None:
        self._writable.set()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        self.resume_reading("the peer does not read")

    @property
    def unread_bytes(self) -> int:
        """Number of bytes that wait for the peer to read."""
        return self._out_bytes + self.transport.get_write_buffer_size() if self.transport is not None and not self._closed else 0

    undelivered_bytes = unread_bytes

    @property
    def full(self) -> bool:
        """True if more bytes than the soft limit wait for the peer."""
        return self.unread_bytes > WRITE_SOFT_BYTES

    async def drain(self) -> None:
        """Wait until the peer has read enough that more may be sent; Unavailable if the link is gone."""
        await self._writable.wait()
        if self._closed:
            raise Unavailable("the connection is closed")

    # ------------------------------------------------------------------------------------------------ end

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self, error: TasukiError | None = None) -> None:
        """Send the queued messages (and the error, if any), then close."""
        if self._closed or self.transport is None:
            return
        self.error = error
        if error is not None:
            self._out.append(encode(ErrorMessage(0, error.code, error.message, error.details())))
        self._flush()
        if error is not None and self.transport.can_write_eof():
            # Closed with input unread, the connection would be reset, and a peer that still writes would not see the error: what
            # comes is dropped until the peer closes. TLS reads on by itself.
            self.transport.write_eof()
            self.transport.resume_reading()
        else:
            self.transport.close()
        # Without a deadline, a peer that never reads would keep this connection and its buffer, which nobody counts now.
        self._linger_timer = self._loop.call_later(LINGER_S, self.transport.abort)
        self._finish(error.message if error is not None else "closed")

    def abort(self, reason: str) -> None:
        """Close without sending the queued messages."""
        self.error = Overloaded(reason)
        if self.transport is not None:
            self.transport.abort()
        self._finish(reason)

    async def wait_closed(self) -> None:
        """Return at once: the transport ends by itself."""

    def forget(self, job_ids: Iterable[str]) -> None:
        """Do nothing: the owner drops results that it does not wait for."""

    def connection_lost(self, exc: Exception | None) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self._finish(str(exc) if exc is not None else self.silent_end or "the peer closed the connection")

    def _finish(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        self._writable.set()
        for timer in (self._frame_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._on_closed(self, reason)


def encode_answer(message: Message, codec: str | None) -> bytes:
    """Return the frame of a message; of a Reply that does not fit a frame, the frame of an error that says so."""
    data = encode(message, codec)
    if len(data) > FRAME_MAX_BYTES and isinstance(message, Reply):
        # The peer would hang up, connect again and ask the same.
        error = TooLarge(f"the answer has {len(data)} bytes, the limit is {FRAME_MAX_BYTES}; ask for less at once")
        data = encode(ErrorMessage(message.corr_id, error.code, error.message))
    return data


def _peer_of(transport: asyncio.Transport) -> Peer:
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family == getattr(socket, "AF_UNIX", None):
        return Peer("unix", _uid_of(sock), "unix socket")
    name = transport.get_extra_info("peername")
    return Peer("tcp", None, f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name))


def _uid_of(sock: socket.socket) -> int | None:
    """Return the user of the process at the other end of a unix socket; None where the system cannot tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid < 0:  # not connected: asyncio takes EAGAIN of a full backlog for success
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return int(uid)


def stranger(sock: socket.socket, address: Address) -> str:
    """Return the reason why nothing is sent to a unix socket's server; "" for one of this user, root or the address's user."""
    uid = _uid_of(sock)
    if uid in (None, 0, os.geteuid()) or address.user == str(uid):
        return ""
    import pwd

    with contextlib.suppress(KeyError):
        if address.user and uid == pwd.getpwnam(address.user).pw_uid:
            return ""
    wanted = f"not of {address.user}" if address.user else f"not of this one ({os.geteuid()}) or root"
    way_out = f"if you trust that user, write unix://{uid}@{address.path}"
    return f"{address} is a server of user {uid}, {wanted}; nothing was sent to it; {way_out}"


async def connect(
    address: Address,
    on_message: Callable[[TcpLink, Message], None],
    on_closed: Callable[[TcpLink, str], None],
    *,
    tls: ssl.SSLContext | None = None,
    timeout_s: float = CONNECT_TIMEOUT_S,
) -> TcpLink:
    """Dial one address; Unavailable with the reason if it does not answer."""
    loop = asyncio.get_running_loop()

    def make() -> TcpLink:
        return TcpLink(on_message, on_closed, max_bytes=FRAME_MAX_BYTES)

    try:
        async with asyncio.timeout(timeout_s):
            if address.scheme == "unix":
                _, link = await loop.create_unix_connection(make, sock=await _dial_unix(address))
            else:
                secure = (tls or ssl.create_default_context()) if address.scheme == "tls" or tls is not None else None
                _, link = await loop.create_connection(make, address.host, address.port, ssl=secure)
                if secure is None:
                    warn_of_clear_text(address)
                    link.silent_end = f"{address} hung up without an answer; if it speaks TLS, it is tls://"
    except TimeoutError:
        raise Unavailable(f"{address} did not answer within {timeout_s:g} s") from None
    except ssl.SSLError as error:
        why = handshake_words(error, address.host, plain="tcp", own_ca=tls is not None)
        raise Unavailable(f"no TLS connection to {address}: {why}") from None
    except OSError as error:  # a connection that ends within the handshake has no text
        raise Unavailable(f"no connection to {address}: {system_words(error) or CUT_SHORT}") from None
    return link


async def _dial_unix(address: Address) -> socket.socket:
    """Return a connected socket, before anything was sent; Unavailable if its server is a stranger's."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address.path)
        if problem := stranger(sock, address):
            raise Unavailable(problem)
    except BaseException:
        sock.close()
        raise
    return sock


def system_words(error: OSError) -> str:
    """Return the system's text for an error: asyncio has its own ("Connect call failed"), except for unknown host names."""
    if error.errno is not None and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)
    return error.strerror or str(error)
