"""Those who submit and ask: one virtual client connection for each token that is in use, kept a while for the next request.

Whoever waits for the ends of jobs listens for them here. A job that somebody listened for stays watched until it has ended, so
that who asks for it again, in one long poll after the other, costs the store nothing more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from tasuki.core.broker.handshake import IDLE_TIMEOUT_S
from tasuki.core.protocol import (
    CancelJobs,
    Heartbeat,
    HelloClient,
    HelloWorker,
    JobResult,
    Message,
    Reply,
    Request,
    Results,
    outcome_bytes,
)
from tasuki.doors.http.authentication import Caller
from tasuki.doors.http.virtual_connection import VirtualConnection
from tasuki.errors import TasukiError, Unavailable
from tasuki.server.server import Server

KEPT_S = IDLE_TIMEOUT_S / 2  # after the last request
BEAT_S = IDLE_TIMEOUT_S / 3  # while somebody waits
CLIENT_ID = "http"
HEARD_MAX_BYTES = 4 * 1024 * 1024  # results of one listener, inline ones of 64 KiB; the rest is read again when it asks again


class Listener:
    """Somebody who waits for jobs to end. `woken` is done at the first end, or when the connection has ended."""

    def __init__(self) -> None:
        self.items: list[JobResult] = []
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._size_bytes = 0

    @property
    def full(self) -> bool:
        return self._size_bytes > HEARD_MAX_BYTES

    def hear(self, item: JobResult) -> None:
        if not self.full:
            self._size_bytes += outcome_bytes(item.outcome)
            self.items.append(item)
        self.wake()

    def wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)


class TokenConnection:
    """One token's connection."""

    def __init__(self, server: Server, address: str) -> None:
        self.talk = VirtualConnection(server, address, self._hear, self._on_close)
        self.users = 0
        self.used_at = 0.0
        self.beat_at = server.now().monotonic
        self.opened: asyncio.Future[None] | None = None
        self._listeners: dict[str, list[Listener]] = {}
        self._watched: set[str] = set()
        """The server will say when these end."""

    async def request(self, verb: str, **params: Any) -> Any:
        """The body of the Reply."""
        msg_id = self.talk.next_id()
        return _body(await self.talk.ask(msg_id, Request(msg_id, verb, params)))

    async def cancel(self, job_ids: list[str], reason: str) -> Any:
        msg_id = self.talk.next_id()
        return _body(await self.talk.ask(msg_id, CancelJobs(msg_id, job_ids, reason)))

    @contextmanager
    def listen(self, job_ids: Collection[str]) -> Iterator[Listener]:
        """Hear of these jobs' ends; `watch` is what makes the server tell them."""
        listener = Listener()
        for job_id in job_ids:
            self._listeners.setdefault(job_id, []).append(listener)
        try:
            yield listener
        finally:
            for job_id in job_ids:
                others = self._listeners[job_id]
                others.remove(listener)
                if not others:
                    del self._listeners[job_id]

    def unwatched(self, job_ids: Collection[str]) -> list[str]:
        """Those of which the server has still to be told that somebody waits for their ends."""
        return [job_id for job_id in job_ids if job_id not in self._watched]

    async def watch(self, job_ids: list[str]) -> dict[str, str]:
        """Their states; those that have ended are heard of at once, the others when they end."""
        self._watched.update(job_ids)  # before the answer: an end that comes right behind it takes its job out again
        try:
            states: dict[str, str] = (await self.request("watch", job_ids=job_ids))["states"]
        except BaseException:
            self._watched.difference_update(job_ids)
            raise
        return states

    async def until_ended(self, job_id: str, wait_s: float) -> None:
        """Returns when the job has ended, or the time is over."""
        with self.listen([job_id]) as listener:
            await self.request("watch", job_ids=[job_id])
            await asyncio.wait([listener.woken], timeout=wait_s)
            if self.talk.closed is not None:
                raise self.talk.closed

    def _hear(self, message: Message) -> None:
        if isinstance(message, Results):
            for item in message.items:
                self._watched.discard(item.job_id)
                for listener in self._listeners.get(item.job_id, ()):
                    listener.hear(item)

    def _on_close(self, error: TasukiError) -> None:
        for listeners in self._listeners.values():
            for listener in listeners:
                listener.wake()


def _body(message: Message) -> Any:
    if not isinstance(message, Reply):
        raise Unavailable(f"the server answered with {type(message).__name__}; try again")
    return message.body


@asynccontextmanager
async def own_talk(server: Server, caller: Caller, worker: tuple[str, str] | None = None) -> AsyncIterator[VirtualConnection]:
    """A connection for one thing alone, of a client or of a `worker` (worker_id, incarnation): what is still under way on it at
    the end is broken off."""
    talk = VirtualConnection(server, caller.address, lambda message: None)
    beating = asyncio.ensure_future(_beat(talk))
    msg_id = talk.next_id()
    try:
        if worker is None:
            await talk.hello(HelloClient(msg_id=msg_id, client_id=CLIENT_ID, token=caller.secret, agent="http"))
        else:
            worker_id, incarnation = worker
            hello = HelloWorker(
                msg_id=msg_id, worker_id=worker_id, incarnation=incarnation, token=caller.secret, agent="http", transfers=True
            )
            await talk.hello(hello)
        yield talk
    finally:
        beating.cancel()
        talk.leave()


async def _beat(talk: VirtualConnection) -> None:
    """A long download says nothing by itself."""
    while talk.closed is None:
        await asyncio.sleep(BEAT_S)
        talk.tell(Heartbeat(talk.next_id()))


class Clients:
    """The connections of all tokens that were used lately."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._clients: dict[str, TokenConnection] = {}

    def use(self, caller: Caller) -> _Use:
        """`async with clients.use(caller) as client:`"""
        return _Use(self, caller)

    async def take(self, caller: Caller) -> TokenConnection:
        client = self._clients.get(caller.sha256)
        if client is None or client.talk.closed is not None:
            client = self._clients[caller.sha256] = TokenConnection(self._server, caller.address)
            hello = HelloClient(msg_id=client.talk.next_id(), client_id=CLIENT_ID, token=caller.secret, agent="http")
            client.opened = asyncio.ensure_future(client.talk.hello(hello))
        client.users += 1
        try:
            assert client.opened is not None
            await asyncio.shield(client.opened)
        except BaseException:
            self.give_back(client)
            if client.opened is None or client.opened.done():  # with an error: the next one tries anew
                client.talk.leave()
            raise
        return client

    def give_back(self, client: TokenConnection) -> None:
        client.users -= 1
        client.used_at = self._server.now().monotonic

    def tick(self) -> None:
        """Leave what nobody used lately, and say of the others that they are still there."""
        now = self._server.now().monotonic
        for key, client in list(self._clients.items()):
            if client.talk.closed is not None or (not client.users and now - client.used_at > KEPT_S):
                client.talk.leave()
                del self._clients[key]
            elif client.users and now - client.beat_at > BEAT_S and client.opened is not None and client.opened.done():
                client.beat_at = now
                client.talk.tell(Heartbeat(client.talk.next_id()))

    def close(self) -> None:
        for client in self._clients.values():
            client.talk.leave()
        self._clients.clear()


class _Use:
    def __init__(self, clients: Clients, caller: Caller) -> None:
        self._clients, self._caller = clients, caller
        self._client: TokenConnection | None = None

    async def __aenter__(self) -> TokenConnection:
        self._client = await self._clients.take(self._caller)
        return self._client

    async def __aexit__(self, *error: object) -> None:
        assert self._client is not None
        self._clients.give_back(self._client)
