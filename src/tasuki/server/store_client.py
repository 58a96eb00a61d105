"""A share in a store that others use too, for a process that is no server: the store's verbs as turns, blobs, and the duties.

Node agents and dispatchers are what it is for. They name the job that they want (`lease` by job_id), so they need no broker that
matches jobs with workers, and no connection. Turns run on a thread of their own, as those of a server do. Beside it a guest
stands for election: of all that share the store one does the leader's duties (leases that are over, what is old, blobs that
nobody needs). Whoever has no part in the duties needs no guest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tasuki.blobs.blob import BlobStore
from tasuki.blobs.open_blobs import open_blobs
from tasuki.core.broker.events import Publish
from tasuki.core.cluster_messages import Hint
from tasuki.core.store_messages import Answers, Turn
from tasuki.errors import TasukiError
from tasuki.event_loop import ignore_result
from tasuki.server.assembly import BLOB_MAX_BYTES, StorageLocations, is_redis, make_guest, open_postgresql, open_redis
from tasuki.server.cluster import Cluster
from tasuki.server.server import Server, ServerConfig
from tasuki.stores.batching import StoreThread


class StoreClient:
    """Of the store and the blobs at these places. Made inside the running loop."""

    def __init__(self, places: StorageLocations, config: ServerConfig, *, duties: bool = True) -> None:
        self._guest: Server | None = None
        self._company: Cluster | None = None
        if duties:
            self._guest, self._company = make_guest(places, config, stands=True)
        self.blobs: BlobStore | None = None
        """None: there are none, and results stay where they are."""
        if places.blobs:
            floor = config.disk_floor_bytes
            self.blobs = open_blobs(places.blobs, max_blob_bytes=BLOB_MAX_BYTES, floor_free_bytes=floor)
        if is_redis(places.store):
            opening = open_redis(places.store, app=places.app, retention_s=config.retention_s, strict=places.strict)
        else:
            opening = open_postgresql(places.store, None, lock_ttl_s=places.lock_ttl_s)
        self._holder = config.server_id
        self._loop = asyncio.get_running_loop()
        self._thread = StoreThread(opening, self._deliver)

    async def open(self) -> None:
        """Errors of the store and of the blobs are raised here; then nothing of it is left open."""
        try:
            await self._open()
        except BaseException:
            if self.blobs is not None:
                self.blobs.close()
            raise

    async def _open(self) -> None:
        if self.blobs is not None:
            await asyncio.to_thread(self.blobs.check)
        await asyncio.to_thread(self._thread.open, self._holder)
        try:
            if self._guest is not None:
                await self._guest.start()
        except BaseException:
            await asyncio.to_thread(self._thread.close)
            raise

    async def execute(self, turn: Turn) -> Answers:
        """One transaction. Who stops waiting does not stop it: it may be done all the same."""
        turn.context = waiting = self._loop.create_future()
        waiting.add_done_callback(ignore_result)
        self._thread.submit(turn)
        answers: Answers = await asyncio.shield(waiting)
        return answers

    def on_cancel(self, asked: Callable[[str], None]) -> None:
        """`asked` hears the worker_id of whoever holds a lease that somebody wants canceled: soon, if at all."""

        def heard(hint: Hint) -> None:
            for worker_id, _ in hint.canceled:
                asked(worker_id)

        if self._company is not None:
            self._company.heard = heard

    def hint_cancel(self, worker_id: str, lease_id: str) -> None:
        """A cancel was asked for: who holds the lease need not wait for its next renewal. Without a guest nobody is told."""
        if self._company is not None:
            self._company.told(Publish(Hint(server_id=self._holder, canceled=((worker_id, lease_id),))))

    async def close(self) -> None:
        """Turns that wait for a store that is away end now, with Unavailable."""
        await asyncio.to_thread(self._thread.close)
        if self._guest is not None:
            await self._guest.stop()
        if self.blobs is not None:
            self.blobs.close()

    def _deliver(self, turn: Turn, answers: Answers | TasukiError) -> None:
        self._loop.call_soon_threadsafe(_settle, turn.context, answers)


def _settle(waiting: asyncio.Future[Answers], answers: Answers | TasukiError) -> None:
    if isinstance(answers, TasukiError):
        waiting.set_exception(answers)
    else:
        waiting.set_result(answers)
