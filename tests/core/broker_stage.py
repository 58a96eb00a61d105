"""A broker with its store and nothing else: a test plays the peers, message by message."""

from __future__ import annotations

import itertools
from typing import Any, TypeVar

from tasuki.core.access import token_sha256
from tasuki.core.broker.broker import Broker
from tasuki.core.broker.events import AskReady, AskRouted, BrokerConfig, Command, ReadyFound, RoutedFound, TurnDone
from tasuki.core.job import Job, JobSpec, Outcome
from tasuki.core.machine import Closed, Hangup, Now, Opened, Peer, Received, Send, Ticked
from tasuki.core.protocol import (
    AssignJobs,
    Claim,
    Ending,
    ErrorMessage,
    GiveCredit,
    HelloClient,
    HelloWorker,
    Message,
    Reply,
    Request,
    SubmitJobs,
)
from tasuki.core.store_messages import Grant, TokenRow
from tasuki.errors import TasukiError
from tasuki.server.queries import routed_jobs
from tasuki.stores.batching import execute
from tasuki.stores.memory.store import MemoryStore
from tasuki.testing.clocks import FakeClock

OWN_UID = 1000
TCP = Peer("tcp", None, "10.0.0.7:4711")
UNIX = Peer("unix", OWN_UID, "unix socket")

M = TypeVar("M", bound=Message)


class BrokerStage:
    """A broker on a memory store. Messages to connections are in `sent`, hang-ups in `hung_up`, other commands in `others`."""

    def __init__(self, beside: BrokerStage | None = None, **config: Any) -> None:
        """Share the store of `beside`, if it is given; then neither leads until it is elected."""
        self.clock = beside.clock if beside is not None else FakeClock()
        self.store = beside.store if beside is not None else MemoryStore(self.clock)
        config = {"server_id": "stage", "own_uid": OWN_UID, **config}
        if not config.get("shared"):
            config["epoch"] = self.store.epoch()[0] + 1
            assert self.store.take_over(config["server_id"], config["epoch"])
        self.broker = Broker(BrokerConfig(**config))
        self.sent: dict[int, list[Message]] = {}
        self.hung_up: dict[int, TasukiError | None] = {}
        self.others: list[Command] = []
        self.walks = True
        """The walk over all that is ready goes on; else its commands are among the others."""
        self._conns = itertools.count(1)
        self._msg_ids = itertools.count(1)

    def now(self) -> Now:
        return Now(self.clock.lease(), self.clock.wall())

    # -- events ---------------------------------------------------------------------------------------------------
    def apply(self, event: Any) -> None:
        for command in self.broker.apply(event, self.now()):
            if isinstance(command, Send):
                self.sent.setdefault(command.conn, []).append(command.message)
            elif isinstance(command, Hangup):
                self.hung_up[command.conn] = command.error
            elif isinstance(command, AskReady) and self.walks:
                self.apply(ReadyFound(self.store.ready_queues(command.place, limit=command.limit)))
            elif isinstance(command, AskRouted) and self.walks:
                self.apply(RoutedFound(routed_jobs(self.store, command)))
            else:
                self.others.append(command)

    def open(self, peer: Peer = TCP) -> int:
        conn = next(self._conns)
        self.apply(Opened(conn, peer))
        return conn

    def close(self, conn: int) -> None:
        self.apply(Closed(conn))

    def tell(self, conn: int, message: Message) -> None:
        self.apply(Received(conn, message))

    def turns(self) -> None:
        """The store does all that is drafted."""
        while (turn := self.broker.next_turn(self.now())) is not None:
            self.apply(TurnDone(turn, execute(self.store, turn)))

    def ask(self, conn: int, message: Message) -> None:
        self.tell(conn, message)
        self.turns()

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.apply(Ticked())
        self.turns()

    # -- peers ----------------------------------------------------------------------------------------------------
    def token(self, token_id: str, kind: str, *scope: str, **fields: Any) -> str:
        """Store a token; its secret."""
        secret = f"secret-{token_id}"
        self.store.add_token(TokenRow(token_id=token_id, kind=kind, sha256=token_sha256(secret), scope=scope, **fields))
        return secret

    def client(self, kind: str = "client", token_id: str = "alice", *scope: str, peer: Peer = TCP) -> int:
        conn = self.open(peer)
        self.ask(conn, HelloClient(msg_id=next(self._msg_ids), client_id="c1", token=self.token(token_id, kind, *scope)))
        assert conn not in self.hung_up
        return conn

    def node(self) -> int:
        """A client of the server's own user."""
        conn = self.open(UNIX)
        self.tell(conn, HelloClient(msg_id=next(self._msg_ids), client_id="node"))
        return conn

    def worker(self, worker_id: str = "w1", *, credit: int = 0, peer: Peer = UNIX, **fields: Any) -> int:
        conn = self.open(peer)
        hello = {"msg_id": next(self._msg_ids), "worker_id": worker_id, "incarnation": f"{worker_id}-1", "patterns": (">",)}
        self.tell(conn, HelloWorker(**{**hello, **fields}))
        self.turns()
        assert conn not in self.hung_up, self.hung_up
        if credit:
            self.ask(conn, GiveCredit(credit))
        return conn

    # -- messages sent --------------------------------------------------------------------------------------------
    def all(self, conn: int, kind: type[M]) -> list[M]:
        return [message for message in self.sent.get(conn, ()) if isinstance(message, kind)]

    def last(self, conn: int, kind: type[M]) -> M:
        return self.all(conn, kind)[-1]

    def submit(self, conn: int, *job_ids: str, **fields: Any) -> int:
        """Submit and store; the msg_id."""
        msg_id = next(self._msg_ids)
        self.ask(conn, SubmitJobs(msg_id, [JobSpec(job_id=job_id, **fields) for job_id in job_ids]))
        return msg_id

    def request(self, conn: int, verb: str, **params: Any) -> Reply | ErrorMessage:
        """One request, and what it was answered with."""
        msg_id = next(self._msg_ids)
        self.ask(conn, Request(msg_id, verb, params))
        [answer] = [m for m in self.sent[conn] if isinstance(m, Reply | ErrorMessage) and m.corr_id == msg_id]
        return answer

    def grants(self, conn: int) -> list[Grant]:
        return [grant for message in self.all(conn, AssignJobs) for grant in message.grants]

    def job(self, job_id: str) -> Job | None:
        return self.store.get([job_id])[0]


def claim(grant: Grant) -> Claim:
    return Claim(grant.job_id, grant.lease_id, grant.attempt)


def ending(grant: Grant, **outcome: Any) -> Ending:
    return Ending(grant.job_id, grant.lease_id, grant.attempt, Outcome(**outcome))
