"""A worker's machine on a bench: the test is the server, the clock and the process."""

from __future__ import annotations

from typing import Any, TypeVar

from tasuki.core.address import Address
from tasuki.core.machine import Closed, Now, Opened, Peer, Received, Send, Ticked
from tasuki.core.protocol import AssignJobs, Heartbeat, HeartbeatAnswer, HelloWorker, Message, Welcome
from tasuki.core.store_messages import Grant
from tasuki.core.worker.events import WorkerIdentity
from tasuki.core.worker.machine import WorkerMachine

TTL_S = 15.0
ONE, OTHER = Address("tcp", "10.0.0.1", 7000), Address("tcp", "10.0.0.2", 7000)
M = TypeVar("M")


class Bench:
    """A machine on a bench: the test is the server, the clock and the process."""

    def __init__(self, *addresses: Address, capacity: int = 2, **fields: Any) -> None:
        identity = WorkerIdentity(worker_id="w1", incarnation="one", capacity=capacity, patterns=("a.*",), **fields)
        self.machine = WorkerMachine(identity, addresses=addresses or (ONE,), jitter=lambda: 1.0)
        self.time = 1000.0
        self.conn = 0
        self.commands: list[Any] = []

    @property
    def now(self) -> Now:
        return Now(self.time, self.time + 1e9)

    def do(self, event: Any) -> list[Any]:
        """Return the commands of the machine after this event, and at the end of the loop's turn."""
        commands: list[Any] = self.machine.apply(event, self.now)
        commands = [*commands, *self.machine.flush(self.now)]
        self.commands += commands
        return commands

    def hear(self, message: Message) -> list[Any]:
        return self.do(Received(self.conn, message))

    def after(self, seconds: float) -> list[Any]:
        self.time += seconds
        return self.do(Ticked())

    def open(self) -> HelloWorker:
        self.conn += 1
        [hello] = sent(self.do(Opened(self.conn, Peer("tcp"))), HelloWorker)
        return hello

    def connect(self, ttl_s: float = TTL_S) -> list[Any]:
        hello = self.open()
        return self.hear(welcome(hello.msg_id, ttl_s))

    def answer_beats(self, commands: list[Any], **fields: Any) -> list[Any]:
        answered: list[Any] = []
        for beat in sent(commands, Heartbeat):
            answered += self.hear(HeartbeatAnswer(beat.msg_id, **fields))
        return answered

    def run_answered(self, seconds: float) -> list[Any]:
        """Time passes, and the server answers every heartbeat."""
        commands: list[Any] = []
        for _ in range(int(seconds * 2)):
            now = self.after(0.5)
            commands += [*now, *self.answer_beats(now)]
        return commands

    def lose(self) -> None:
        self.do(Closed(self.conn, "cut"))


def welcome(corr_id: int, ttl_s: float = TTL_S, **fields: Any) -> Welcome:
    usual = {"version": 2, "server_id": "s", "identity": "token:w", "kind": "worker", "lease_ttl_s": ttl_s}
    return Welcome(corr_id=corr_id, **{**usual, **fields})


def sent(commands: list[Any], kind: type[M]) -> list[M]:
    return [command.message for command in commands if isinstance(command, Send) and isinstance(command.message, kind)]


def only(commands: list[Any], kind: type[M]) -> list[M]:
    return [command for command in commands if isinstance(command, kind)]


def grant(job_id: str = "a", attempt: int = 1, lease_id: str = "") -> Grant:
    return Grant(job_id, b"", "alice", lease_id or f"lease-{job_id}-{attempt}", attempt, TTL_S)


def assign(*grants: Grant, ttl_s: float = TTL_S) -> AssignJobs:
    return AssignJobs(ttl_s, list(grants or (grant(),)))
