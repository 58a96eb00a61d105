"""Virtual connections of clients: one for each token in use, kept a while for the next request.

A request that waits for the ends of jobs listens for them here. A job that somebody listened for stays watched until it has
ended, so that one long poll after the other costs the store nothing more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from tasuki.core import protocol
from tasuki.core.broker.authentication import IDLE_TIMEOUT_S
from tasuki.core.job import TERMINAL, JobSpec, State
from tasuki.doors.http.virtual_connection import Caller, Hello, VirtualConnection
from tasuki.errors import NotFound, TasukiError, Unavailable, from_wire
from tasuki.server.server import Server

KEPT_S = IDLE_TIMEOUT_S / 2  # after the last request
BEAT_S = IDLE_TIMEOUT_S / 3  # while a request waits
CLIENT_ID = "http"
HEARD_MAX_BYTES = 4 * 1024 * 1024  # results of one listener, inline ones of 64 KiB; the rest is read when it polls again

SubmitAnswer = protocol.Acceptance | TasukiError | None
"""The answer for one job: None if it is new and stored, its acceptance if it was there, or the error."""


class Listener:
    """A request that waits for jobs to end. `woken` is done at the first end, or when the connection has ended."""

    def __init__(self) -> None:
        self.items: list[protocol.JobResult] = []
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._size_bytes = 0

    @property
    def full(self) -> bool:
        return self._size_bytes > HEARD_MAX_BYTES

    def hear(self, item: protocol.JobResult) -> None:
        if not self.full:
            self._size_bytes += protocol.outcome_bytes(item.outcome)
            self.items.append(item)
        self.wake()

    def wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)


class TokenConnection:
    """The connection of one token, shared by its requests."""

    def __init__(self, server: Server, address: str) -> None:
        self.connection = VirtualConnection(server, address, self._on_message, self._on_close)
        self.users = 0
        self.used_at = 0.0
        self.beat_at = server.now().monotonic
        self.opened: asyncio.Future[protocol.Message] | None = None
        self._listeners: dict[str, list[Listener]] = {}
        self._watched: set[str] = set()
        """Jobs whose ends the server will report."""

    async def request(self, verb: str, **params: Any) -> Any:
        """Send a request and return the body of its Reply."""
        return await self.connection.ask_body(protocol.Request(self.connection.next_id(), verb, params))

    async def cancel(self, job_ids: list[str], reason: str) -> Any:
        """Cancel jobs and return their states."""
        return await self.connection.ask_body(protocol.CancelJobs(self.connection.next_id(), job_ids, reason))

    async def submit(self, specs: list[JobSpec], on_failed: str = "return") -> list[SubmitAnswer]:
        submit = protocol.SubmitJobs(self.connection.next_id(), specs, watch=False, on_failed=on_failed)
        answer = await self.connection.ask(submit)
        if not isinstance(answer, protocol.Accepted):
            raise Unavailable(f"the server answered with {type(answer).__name__}; try again")
        found: list[SubmitAnswer] = [None] * len(specs)
        for one in answer.exceptions:
            found[one.index] = from_wire(one.code, one.message, one.details) if one.code else one
        return found

    @contextmanager
    def listen(self, job_ids: Collection[str]) -> Iterator[Listener]:
        """Yield a listener for the ends of these jobs; `watch` makes the server report them."""
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
        """Return the jobs that the server does not watch yet."""
        return [job_id for job_id in job_ids if job_id not in self._watched]

    async def watch(self, job_ids: list[str]) -> dict[str, str]:
        """Return the states of jobs; ends are reported to their listeners, past ones at once."""
        self._watched.update(job_ids)  # before the answer: an end that comes right behind it takes its job out again
        try:
            return (await self.request("watch", job_ids=job_ids))["states"]
        except BaseException:
            self._watched.difference_update(job_ids)
            raise

    async def view(self, job_id: str, wait_s: float = 0.0, *, result: bool = False, subject: str | None = None) -> dict[str, Any]:
        """Return a job, with `subject` only one of it; with `wait_s` after its end, if that comes in time."""
        while True:
            [view] = await self.request("get", job_ids=[job_id], result=result)
            if subject is not None and view["subject"] != subject:
                raise NotFound(f"there is no job {job_id[:128]!r}, or it is not yours")
            if not wait_s or State(view["state"]) in TERMINAL:
                return view
            with self.listen([job_id]) as listener:
                await self.request("watch", job_ids=[job_id])
                await asyncio.wait([listener.woken], timeout=wait_s)
                if self.connection.closed is not None:
                    raise self.connection.closed
            wait_s = 0.0

    def _on_message(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.Results):
            for item in message.items:
                self._watched.discard(item.job_id)
                for listener in self._listeners.get(item.job_id, ()):
                    listener.hear(item)

    def _on_close(self, error: TasukiError) -> None:
        for listeners in self._listeners.values():
            for listener in listeners:
                listener.wake()


@asynccontextmanager
async def dedicated_connection(
    server: Server, caller: Caller, worker: tuple[str, str] | None = None
) -> AsyncIterator[VirtualConnection]:
    """Yield a connection of its own for a client or a `worker` (worker_id, incarnation); its end aborts what is under way."""
    connection = VirtualConnection(server, caller.address, lambda message: None)
    beating = asyncio.ensure_future(_beat(connection))
    hello: Hello = _hello(connection, caller)
    if worker is not None:
        worker_id, incarnation = worker
        hello = protocol.HelloWorker(
            msg_id=hello.msg_id,
            worker_id=worker_id,
            incarnation=incarnation,
            token=caller.secret,
            agent="http",
            transfers=True,
        )
    try:
        await connection.ask(hello)
        yield connection
    finally:
        beating.cancel()
        connection.leave()


def _hello(connection: VirtualConnection, caller: Caller) -> protocol.HelloClient:
    return protocol.HelloClient(msg_id=connection.next_id(), client_id=CLIENT_ID, token=caller.secret, agent="http")


async def _beat(connection: VirtualConnection) -> None:
    """Send heartbeats: a long download sends nothing by itself."""
    while connection.closed is None:
        await asyncio.sleep(BEAT_S)
        connection.tell(protocol.Heartbeat(connection.next_id()))


class Clients:
    """The connections of all tokens that were used lately."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._clients: dict[str, TokenConnection] = {}

    @asynccontextmanager
    async def use(self, caller: Caller) -> AsyncIterator[TokenConnection]:
        """Yield the connection of the caller's token, opened if there is none."""
        client = self._clients.get(caller.sha256)
        if client is None or client.connection.closed is not None:
            client = self._clients[caller.sha256] = TokenConnection(self._server, caller.address)
            client.opened = asyncio.ensure_future(client.connection.ask(_hello(client.connection, caller)))
        assert client.opened is not None
        client.users += 1
        try:
            try:
                await asyncio.shield(client.opened)
            except BaseException:
                if client.opened.done():  # with an error: the next request tries anew
                    client.connection.leave()
                raise
            yield client
        finally:
            client.users -= 1
            client.used_at = self._server.now().monotonic

    def tick(self) -> None:
        """Close connections that were not used lately; send heartbeats for the others."""
        now = self._server.now().monotonic
        for key, client in list(self._clients.items()):
            connection = client.connection
            if connection.closed is not None or (not client.users and now - client.used_at > KEPT_S):
                connection.leave()
                del self._clients[key]
            elif client.users and now - client.beat_at > BEAT_S and client.opened is not None and client.opened.done():
                client.beat_at = now
                connection.tell(protocol.Heartbeat(connection.next_id()))

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.connection.leave()
        self._clients.clear()
