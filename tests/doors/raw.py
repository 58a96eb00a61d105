"""A peer that speaks bytes: says what it likes, whole or in halves, and tells what came back. Blocking, with deadlines."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from tasuki.core.address import parse_url
from tasuki.core.protocol import (
    FRAME_MAX_BYTES,
    ErrorMessage,
    Heartbeat,
    HelloClient,
    HelloWorker,
    Message,
    Request,
    Welcome,
)
from tasuki.wire.messages import FrameDecoder, Type, decode, encode, encode_frame

DEADLINE_S = 20.0


def bomb(type: int = Type.REQUEST, announced_bytes: int = 0xFFFF_FFF0) -> bytes:
    """The first bytes of a frame that says it is huge."""
    return announced_bytes.to_bytes(4, "little") + bytes([type, 0, 0, 0])


def frame(type: int, header: bytes = b"\x80", payload: bytes = b"", flags: int = 0) -> bytes:
    """Any frame, whether it makes sense or not. The default header is an empty msgpack map."""
    return encode_frame(type, header, payload, flags)


class RawPeer:
    """One connection to a server, from the outside."""

    def __init__(self, url: str, tls: ssl.SSLContext | None = None, receive_buffer_bytes: int | None = None) -> None:
        address = parse_url(url)[0]
        if address.scheme == "unix":
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            target: Any = address.path
        else:
            self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            target = (address.host, address.port)
        if receive_buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(target)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=address.host)
        self._decoder = FrameDecoder(FRAME_MAX_BYTES)
        self._messages: list[Message] = []
        self._msg_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.socket.close()

    # ------------------------------------------------------------------------------------------------ out

    def next_id(self) -> int:
        self._msg_id += 1
        return self._msg_id

    def send_bytes(self, data: bytes) -> Self:
        self.socket.sendall(data)
        return self

    def send(self, *messages: Message) -> Self:
        return self.send_bytes(b"".join(encode(message) for message in messages))

    def flood(self, data: bytes, limit_bytes: int, stop: Callable[[], bool] = lambda: False) -> int:
        """Send the same bytes again and again, never reading, until the server takes no more for 0.3 s or hangs up."""
        sent = 0
        self.socket.settimeout(0.3)
        try:
            while sent < limit_bytes and not stop():
                self.socket.sendall(data)
                sent += len(data)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self.socket.settimeout(DEADLINE_S)
        return sent

    # ------------------------------------------------------------------------------------------------ in

    def receive(self, timeout: float = DEADLINE_S) -> Message | None:
        """The next message; None when the server hung up; TimeoutError when nothing came."""
        deadline = time.monotonic() + timeout
        while not self._messages:
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self.socket.recv(1 << 18)
            except ConnectionError:  # a reset is a hang-up as well
                return None
            if not data:
                return None
            self._messages += [decode(one, FRAME_MAX_BYTES) for one in self._decoder.feed(data)]
        return self._messages.pop(0)

    def ending(self, timeout: float = DEADLINE_S) -> list[Message]:
        """Return all messages until the server closes the connection."""
        messages: list[Message] = []
        while (message := self.receive(timeout)) is not None:
            messages.append(message)
        return messages

    def farewell(self, timeout: float = DEADLINE_S) -> ErrorMessage:
        """The error with which the server hung up. It must be the last thing it said."""
        messages = self.ending(timeout)
        assert messages, "the server hung up without a word"
        last = messages[-1]
        assert isinstance(last, ErrorMessage), messages
        assert last.corr_id == 0, last
        return last

    def answer(self, corr_id: int, timeout: float = DEADLINE_S) -> Message:
        """The next message that answers this one; others are left out."""
        while True:
            message = self.receive(timeout)
            assert message is not None, f"the server hung up instead of answering {corr_id}"
            if getattr(message, "corr_id", None) == corr_id:
                return message

    # ------------------------------------------------------------------------------------------------ whole talks

    def ask(self, verb: str, **params: Any) -> Message:
        """One request, one answer."""
        msg_id = self.next_id()
        self.send(Request(msg_id, verb, params))
        return self.answer(msg_id)

    def alive(self) -> bool:
        """Return if the server still answers on this connection."""
        msg_id = self.next_id()
        self.send(Heartbeat(msg_id))
        return self.answer(msg_id) is not None

    def hello_client(self, token: str = "", **fields: Any) -> Message | None:
        self.send(HelloClient(msg_id=self.next_id(), client_id="raw-client", token=token, **fields))
        return self.receive()

    def hello_worker(self, token: str = "", worker_id: str = "raw-worker", **fields: Any) -> Message | None:
        self.send(HelloWorker(msg_id=self.next_id(), worker_id=worker_id, incarnation=f"i-{id(self)}", token=token, **fields))
        return self.receive()

    def as_client(self, token: str = "") -> Self:
        """Said Hello and was taken."""
        welcome = self.hello_client(token)
        assert isinstance(welcome, Welcome), welcome
        return self

    def as_worker(self, token: str = "", **fields: Any) -> Self:
        """Said Hello and was taken."""
        welcome = self.hello_worker(token, **fields)
        assert isinstance(welcome, Welcome), welcome
        return self
