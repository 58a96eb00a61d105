"""Those who submit and ask: one virtual client connection for each token that is in use, kept a while for the next request."""

from __future__ import annotations

import asyncio
from typing import Any

from tasuki.core.greeting import IDLE_TIMEOUT_S
from tasuki.core.protocol import CancelJobs, Heartbeat, HelloClient, Message, Reply, Request, Results
from tasuki.doors.http.gate import Caller
from tasuki.doors.http.talk import Talk
from tasuki.errors import TasukiError, Unavailable
from tasuki.server.app import Server

KEPT_S = IDLE_TIMEOUT_S / 2  # after the last request
BEAT_S = IDLE_TIMEOUT_S / 3  # while somebody waits
CLIENT_ID = "http"


class Client:
    """One token's connection."""

    def __init__(self, server: Server, address: str) -> None:
        self.talk = Talk(server, address, self._hear, self._on_close)
        self.users = 0
        self.used_at = 0.0
        self.beat_at = server.now().monotonic
        self.opened: asyncio.Future[None] | None = None
        self._ends: dict[str, list[asyncio.Future[None]]] = {}

    async def request(self, verb: str, **params: Any) -> Any:
        """The body of the Reply."""
        msg_id = self.talk.next_id()
        return _body(await self.talk.ask(msg_id, Request(msg_id, verb, params)))

    async def cancel(self, job_ids: list[str], reason: str) -> Any:
        msg_id = self.talk.next_id()
        return _body(await self.talk.ask(msg_id, CancelJobs(msg_id, job_ids, reason)))

    async def until_ended(self, job_id: str, wait_s: float) -> None:
        """Returns when the job has ended, or the time is over."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._ends.setdefault(job_id, [])
        waiting.append(ended)
        try:
            await self.request("watch", job_ids=[job_id])
            await asyncio.wait([ended], timeout=wait_s)
            if self.talk.closed is not None:
                raise self.talk.closed
        finally:
            waiting.remove(ended)
            if not waiting:
                self._ends.pop(job_id, None)

    def _hear(self, message: Message) -> None:
        if isinstance(message, Results):
            for item in message.items:
                _wake(self._ends.get(item.job_id, ()))

    def _on_close(self, error: TasukiError) -> None:
        for waiting in self._ends.values():
            _wake(waiting)


def _wake(waiting: Any) -> None:
    for ended in waiting:
        if not ended.done():
            ended.set_result(None)


def _body(message: Message) -> Any:
    if not isinstance(message, Reply):
        raise Unavailable(f"the server answered with {type(message).__name__}; try again")
    return message.body


class Clients:
    """The connections of all tokens that were used lately."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._clients: dict[str, Client] = {}

    def use(self, caller: Caller) -> _Use:
        """`async with clients.use(caller) as client:`"""
        return _Use(self, caller)

    async def take(self, caller: Caller) -> Client:
        client = self._clients.get(caller.sha256)
        if client is None or client.talk.closed is not None:
            client = self._clients[caller.sha256] = Client(self._server, caller.address)
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

    def give_back(self, client: Client) -> None:
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
        self._client: Client | None = None

    async def __aenter__(self) -> Client:
        self._client = await self._clients.take(self._caller)
        return self._client

    async def __aexit__(self, *error: object) -> None:
        assert self._client is not None
        self._clients.give_back(self._client)
