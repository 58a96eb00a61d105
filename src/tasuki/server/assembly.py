"""Assembly of a server from its parts, as `tasuki up` and `tasuki server` start it, and `StoreClient` for other processes.

A server has SQLite and blobs in a data folder; or several servers share PostgreSQL or Redis, and S3, and the folder holds only
the socket and the token of this server's own user. Drivers and Django are imported by the functions that need them: a server on
Redis never imports Django.

Node agents and dispatchers have no broker: they name the job that they lease, and so use the store directly, by a `StoreClient`.
Beside it runs a *guest*, a server without doors that can be elected: one of all that share the store does the leader's duties
(expired leases, pruning, unused blobs).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tasuki.blobs.blob import BLOB_MAX_BYTES, BlobStore
from tasuki.blobs.files import durable_write
from tasuki.blobs.folder import FolderBlobs, FolderWriter
from tasuki.blobs.open_blobs import open_blobs
from tasuki.config import DataFolder
from tasuki.core.access import TOKEN_PREFIXES, token_sha256
from tasuki.core.address import shown_address
from tasuki.core.apps import DEFAULT_APP
from tasuki.core.broker.events import Publish
from tasuki.core.cluster_messages import Hint
from tasuki.core.election import LOCK_TTL_S
from tasuki.core.job import JobSpec
from tasuki.core.lifecycle import RETENTION_DAYS
from tasuki.core.store_messages import Answers, TokenRow, Turn
from tasuki.errors import ConfigError, TasukiError, TooLarge
from tasuki.event_loop import ignore_result
from tasuki.server.cluster import Cluster
from tasuki.server.roles import Roles
from tasuki.server.server import Server, ServerConfig
from tasuki.server.transfers import PresignedTransfers
from tasuki.stores.batching import StoreThread
from tasuki.stores.store import Reader, Store
from tasuki.stores.wakeups import Wakeups

if TYPE_CHECKING:
    from tasuki.coords.coordination import Coordination
    from tasuki.coords.scheduler_redis import SchedulerCoordination
    from tasuki.coords.sql import SqlCoordination

logger = logging.getLogger("tasuki.server")
JOURNAL_STRETCH_BYTES = 8 * 1024 * 1024  # some hundred jobs at idle; under load many share a commit
RESTS_AFTER_S = 5.0  # without anything to do: connecting again takes some milliseconds
SHARED_READERS = 4  # read-only connections of a server to a database that it shares; SQLite's reader is quick enough alone
REDIS_SCHEMES = (
    "redis://",
    "rediss://",
    "unix://",
    *(f"{tls}+{kind}://" for tls in ("redis", "rediss") for kind in ("sentinel", "cluster")),
)
COORDINATION_PREFIX = "tasuki-servers"  # of the hints in a Redis that coordinates the servers of a SQL store
IN_THE_STORE = "the database"  # name of a coordination
TTL_SLACK_S = 86_400.0  # pruning by the leader comes first; a key's own end is for a Redis whose servers are all gone


def make_secret(kind: str) -> str:
    """Return a new token: its kind in the prefix, 256 random bits."""
    return TOKEN_PREFIXES[kind] + secrets.token_urlsafe(32)


def _open_sqlite(folder: DataFolder, fault: Callable[[str], None]) -> Store:
    from tasuki.stores.sql.store import SqlStore

    store = SqlStore.open_sqlite(folder.database, fault=fault, stretch_bytes=JOURNAL_STRETCH_BYTES)
    ensure_admin_token(store, folder.token_file)
    return store


def _open_sqlite_reader(folder: DataFolder) -> Reader:
    from tasuki.stores.sql.sqlite import SqliteReadOnly
    from tasuki.stores.sql.store import SqlReader

    return SqlReader(SqliteReadOnly(folder.database))


def open_postgresql_reader(url: str, beside: SqlCoordination | None = None) -> Reader:
    """Open a reader, with a connection of its own or on that of the coordination."""
    from tasuki.stores.sql.postgres import PostgresReadOnly, connection_parameters
    from tasuki.stores.sql.store import SqlReader

    return SqlReader(PostgresReadOnly(connection_parameters(url), None if beside is None else beside.shared_connection))


def is_redis(url: str) -> bool:
    return url.startswith(REDIS_SCHEMES)


def open_redis(
    url: str,
    app: str = DEFAULT_APP,
    retention_s: float = RETENTION_DAYS * 86_400.0,
    template: JobSpec | None = None,
    *,
    strict: bool = False,
    check: bool = True,
) -> Store:
    """Open a Redis that servers share. Settings that may lose jobs are warned of, or with `strict` refused."""
    from tasuki.stores.redis.store import RedisStore

    ttl_s = int(retention_s + TTL_SLACK_S)
    return RedisStore.open(url, app=app, template=template, result_ttl_s=ttl_s, strict=strict, check=check)


def ensure_admin_token(store: Store, path: Path) -> None:
    """Make the folder's own admin token, mode 0600, at the first start and when its file was lost."""
    try:
        known = store.token(token_sha256(path.read_text("utf-8").strip()))
    except FileNotFoundError:
        known = None
    if known is not None and known.revoked_at is None:
        return
    secret = make_secret("admin")
    row = TokenRow(
        token_id=secrets.token_hex(6),
        kind="admin",
        sha256=token_sha256(secret),
        label="made by the server for its own folder",
        created_at=store.clock.wall(),
        created_by="server",
    )
    durable_write(path, f"{secret}\n".encode())  # a token that the store does not know is made again at the next start
    store.add_token(row)


class StorageLocations(NamedTuple):
    """Places of a server's durable data."""

    folder: DataFolder
    store: str = ""
    """postgresql://… or redis://…; empty: SQLite in the folder."""
    blobs: str = ""
    """s3://…, or a folder; empty: in the data folder."""
    lock_ttl_s: float = LOCK_TTL_S
    coordination: str = ""
    """redis://… for the servers of a PostgreSQL store; empty: in the store itself."""
    app: str = DEFAULT_APP
    """With Redis: the prefix of its keys, and the app of jobs that come without one."""
    strict: bool = False
    """With Redis: settings that may lose jobs are refused."""
    template: JobSpec | None = None
    """With Redis: jobs that come without a server are as this one; None: as those over HTTP by default."""
    migrates: bool = True
    """With PostgreSQL: the tables are brought up to date; False: the owner of the database does that."""


def make_server(places: StorageLocations, config: ServerConfig, fault: Callable[[str], None] = lambda point: None) -> Server:
    """Return a server over these places; `await server.start()` opens them."""
    folder = places.folder
    blobs = open_blobs(places.blobs or folder.blobs, max_blob_bytes=BLOB_MAX_BYTES, floor_free_bytes=config.disk_floor_bytes)
    if not places.store:
        return Server(config, lambda: _open_sqlite(folder, fault), lambda: _open_sqlite_reader(folder), blobs, fault=fault)
    check_store(places.store)
    own_folder(folder)
    if not places.blobs:
        logger.warning("the blobs of this server are in %s: other servers cannot reach them; give --blobs s3://…", folder.blobs)
    config = msgspec.structs.replace(config, readers=SHARED_READERS)
    store, reader = partial(_open_shared, places, config, folder, fault), partial(_open_shared_reader, places, config)
    return Server(config, lambda: _agreed(store(), places), reader, blobs, _cluster_on(places, config.server_id), fault)


def _open_shared(
    places: StorageLocations, config: ServerConfig, folder: DataFolder | None, fault: Callable[[str], None] = lambda point: None
) -> Store:
    """Open the store that servers share, with its tables made or migrated first. Without a folder no admin token is made."""
    if is_redis(places.store):
        store = open_redis(places.store, places.app, config.retention_s, places.template, strict=places.strict)
    else:
        from tasuki.stores.sql.store import SqlStore

        store = SqlStore.open_postgresql(places.store, fault=fault, lock_ttl_s=places.lock_ttl_s, migrates=places.migrates)
    if folder is not None:
        ensure_admin_token(store, folder.token_file)
    return store


def _agreed(store: Store, places: StorageLocations) -> Store:
    """Return a store whose servers all use this coordination; ConfigError if they use another: two would elect two leaders, who
    take the lead from each other again and again."""
    if is_redis(places.store):
        return store
    from tasuki.stores.sql.store import SqlStore

    assert isinstance(store, SqlStore)
    mine = IN_THE_STORE
    if places.coordination:
        from tasuki.stores.redis.connection import place_of

        mine = place_of(places.coordination)
    if (recorded := store.record_coordination(mine)) != mine:
        store.close()
        raise ConfigError(
            f"the servers of this store elect their leader in {recorded}, this one was given {mine}: all need the same "
            "coordination. To change it, stop all of them and run: tasuki migrate --store URL --forget-coordination"
        )
    return store


def _open_shared_reader(places: StorageLocations, config: ServerConfig) -> Reader:
    if is_redis(places.store):
        return open_redis(places.store, places.app, config.retention_s, places.template, check=False)
    return open_postgresql_reader(places.store)


def _cluster_on(
    places: StorageLocations,
    server_id: str,
    *,
    candidate: bool = True,
    coordination: Coordination | None = None,
    roles: Roles | None = None,
) -> Cluster:
    """Return the membership: heartbeats and election may be in a Redis beside a SQL store, which still decides on epochs."""
    ttl_s = places.lock_ttl_s
    cluster = partial(Cluster, incarnation=secrets.token_hex(8), lock_ttl_s=ttl_s, candidate=candidate, roles=roles)
    in_redis = is_redis(places.store)
    if in_redis or (places.coordination and coordination is None):
        from tasuki.coords.coordination import TIMEOUT_SHARE
        from tasuki.coords.redis import RedisCoordination
        from tasuki.stores.redis import store as redis_store
        from tasuki.stores.redis.connection import RedisWakeups, connect, name_of

        url, app = (places.store, places.app) if in_redis else (places.coordination, COORDINATION_PREFIX)

        def open_coordination() -> RedisCoordination:
            if not in_redis:
                return open_scheduler_coordination(url, ttl_s)
            return RedisCoordination(connect(url, TIMEOUT_SHARE * ttl_s), where=name_of(url), app=app)

        wakeups = RedisWakeups(url, app=app, server_id=server_id)
        return cluster(open_coordination, wakeups, schema_version=redis_store.SCHEMA_VERSION)
    from tasuki.coords.sql import SqlCoordination
    from tasuki.stores.sql.postgres_wakeups import PostgresWakeups, SharedWakeups
    from tasuki.stores.sql.store import SCHEMA_VERSION

    hints: Wakeups[Any] = (
        SharedWakeups(places.store, coordination.shared_connection, server_id=server_id)
        if isinstance(coordination, SqlCoordination)
        else PostgresWakeups(places.store, server_id=server_id)
    )
    return cluster(lambda: coordination or SqlCoordination(places.store, ttl_s=ttl_s), hints, schema_version=SCHEMA_VERSION)


def open_scheduler_coordination(url: str, ttl_s: float = LOCK_TTL_S) -> SchedulerCoordination:
    """Open the coordination of a SQL store in Redis."""
    from tasuki.coords.coordination import TIMEOUT_SHARE
    from tasuki.coords.scheduler_redis import SchedulerCoordination
    from tasuki.stores.redis.connection import connect_coordination, name_of

    return SchedulerCoordination(connect_coordination(url, TIMEOUT_SHARE * ttl_s), where=name_of(url))


def open_presigned(blobs: str, endpoint: str = "") -> PresignedTransfers:
    """Return presigned URLs with which peers use the bucket of `blobs`, at `endpoint` if they reach it by another address."""
    from tasuki.blobs.s3.presign import S3Presign

    return PresignedTransfers(S3Presign(blobs, max_blob_bytes=BLOB_MAX_BYTES, endpoint=endpoint or None))


def make_guest(places: StorageLocations, config: ServerConfig, *, candidate: bool) -> tuple[Server, Cluster]:
    """Return a server that takes part in a store of other servers: it makes no token and owns no folder.

    `places.folder` holds its socket at most. Without `places.blobs` it can neither read nor write blobs.
    """
    check_store(places.store)
    blobs = _guest_blobs(places, config)
    config = msgspec.structs.replace(config, readers=SHARED_READERS, collects_blobs=bool(places.blobs))
    cluster = _cluster_on(places, config.server_id, candidate=candidate)
    reader = partial(_open_shared_reader, places, config)
    return Server(config, lambda: _agreed(_open_shared(places, config, None), places), reader, blobs, cluster), cluster


def make_node_guest(places: StorageLocations, config: ServerConfig) -> tuple[Server, Cluster]:
    """Return a guest on PostgreSQL with few connections, for a process whose only peer is its own worker.

    One connection is for heartbeats, the election, hints and quick reads, of which such a guest has no others; the store's is
    open while there is something to do. Where Redis coordinates, quick reads have their own connection, and hints come by another
    one of the database all the same: applications give them with their transactions.
    """
    from tasuki.coords.sql import SqlCoordination

    ttl_s = places.lock_ttl_s
    in_store = None if places.coordination else SqlCoordination(places.store, ttl_s=ttl_s)
    coordination = in_store or open_scheduler_coordination(places.coordination, ttl_s)
    config = msgspec.structs.replace(config, rests_after_s=RESTS_AFTER_S, collects_blobs=bool(places.blobs))
    cluster = _cluster_on(places, config.server_id, coordination=coordination, roles=Roles(config.node_id))
    reader = partial(open_postgresql_reader, places.store, in_store)
    blobs = _guest_blobs(places, config)
    return Server(config, lambda: _agreed(_open_shared(places, config, None), places), reader, blobs, cluster), cluster


def _guest_blobs(places: StorageLocations, config: ServerConfig) -> BlobStore:
    floor = config.disk_floor_bytes
    if places.blobs:
        return open_blobs(places.blobs, max_blob_bytes=BLOB_MAX_BYTES, floor_free_bytes=floor)
    return NoBlobs(places.folder.blobs, max_blob_bytes=0, floor_free_bytes=floor)


class NoBlobs(FolderBlobs):
    """The blob store of a guest without one: nobody else could read blobs in a folder of its own."""

    def begin(
        self, sha256: str | None = None, size_bytes: int | None = None, generation: int = 0, resume_key: str = ""
    ) -> FolderWriter:
        raise TooLarge(
            f"{size_bytes or 'these'} bytes are too much to be kept in the store itself, and there are no blobs here; "
            'give --blobs s3://…, the same as the servers\'; in a Django project set TASUKI["blobs"]'
        )


def own_folder(folder: DataFolder) -> None:
    """Lock the data folder for as long as this process lives: a second server would take the socket away."""
    from tasuki.stores.sql.sqlite import OwnerLock

    OwnerLock(folder.root / "server")


def check_store(url: str) -> None:
    """Raise ConfigError for a URL that is no store that servers can share."""
    if is_redis(url):
        check_redis_driver()
    elif not url.startswith(("postgresql://", "postgres://")):
        shown = shown_address(url)
        raise ConfigError(f"--store {shown!r}: use postgresql://user@host/database or redis://host:6379/0, or none")


def check_redis_driver() -> None:
    if find_spec("redis") is None:
        raise ConfigError("redis:// needs the driver redis-py; install it with: pip install 'tasuki[redis]'")


class StoreClient:
    """Turns on the store, and blobs, at these places. Made inside the running loop; without `duties` it has no guest."""

    def __init__(self, places: StorageLocations, config: ServerConfig, *, duties: bool = True) -> None:
        self._guest: Server | None = None
        self._cluster: Cluster | None = None
        if duties:
            self._guest, self._cluster = make_guest(places, config, candidate=True)
        self.blobs: BlobStore | None = None
        """None: there is no blob store, and results stay at their node."""
        if places.blobs:
            floor = config.disk_floor_bytes
            self.blobs = open_blobs(places.blobs, max_blob_bytes=BLOB_MAX_BYTES, floor_free_bytes=floor)
        self._holder = config.server_id
        self._loop = asyncio.get_running_loop()
        self._thread = StoreThread(partial(_open_shared, places, config, None), self._deliver)

    async def open(self) -> None:
        """Open store and blobs. Errors are raised here, and then nothing is left open."""
        async with AsyncExitStack() as undo:
            if self.blobs is not None:
                undo.callback(self.blobs.close)
                await asyncio.to_thread(self.blobs.check)
            await asyncio.to_thread(self._thread.open, self._holder)
            undo.push_async_callback(asyncio.to_thread, self._thread.close)
            if self._guest is not None:
                await self._guest.start()
            undo.pop_all()

    async def execute(self, turn: Turn) -> Answers:
        """Execute a turn in one transaction. A caller that is canceled does not stop it: it may still be done."""
        turn.context = waiting = self._loop.create_future()
        waiting.add_done_callback(ignore_result)
        self._thread.submit(turn)
        return await asyncio.shield(waiting)

    def on_cancel(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the worker_id that holds a lease that is to be canceled. Best effort."""

        def on_hint(hint: Hint) -> None:
            for worker_id, _ in hint.canceled:
                callback(worker_id)

        if self._cluster is not None:
            self._cluster.on_hint = on_hint

    def hint_cancel(self, worker_id: str, lease_id: str) -> None:
        """Tell the holder of a lease about a cancel before its next renewal does. Without a guest nothing is sent."""
        if self._cluster is not None:
            self._cluster.carry_out(Publish(Hint(server_id=self._holder, canceled=((worker_id, lease_id),))))

    async def close(self) -> None:
        """Close store, guest and blobs. Turns that wait for the store end with Unavailable."""
        await asyncio.to_thread(self._thread.close)
        if self._guest is not None:
            await self._guest.stop()
        if self.blobs is not None:
            self.blobs.close()

    def _deliver(self, turn: Turn, answers: Answers | TasukiError) -> None:
        waiting = turn.context
        settle = waiting.set_exception if isinstance(answers, TasukiError) else waiting.set_result
        self._loop.call_soon_threadsafe(settle, answers)
