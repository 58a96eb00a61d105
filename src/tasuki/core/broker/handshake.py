"""The first frames: who is this peer, and may it come in? Part of the broker; pure.

A Hello with a token waits for the store to look the token up; one without is welcome only on the unix socket of our own user.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tasuki.core.access import Identity, PeerKind, identify, token_sha256
from tasuki.core.address import parse_url
from tasuki.core.broker.sessions import ClientSession, Session, TransferSession, WorkerSession
from tasuki.core.broker.turn_builder import HelloRoute
from tasuki.core.ids import check_name
from tasuki.core.lifecycle import LEASE_MARGIN_S
from tasuki.core.machine import Now, Peer, Send
from tasuki.core.protocol import PROTOCOL_OLDEST, PROTOCOL_VERSION, HelloClient, HelloWorker, Message, Welcome
from tasuki.core.store_messages import TokenRow
from tasuki.core.subject import DEFAULT_PATTERN
from tasuki.errors import Forbidden, InvalidInput, ProtocolError, TasukiError, Unauthorized, VersionMismatch

if TYPE_CHECKING:
    from tasuki.core.broker.broker import Broker
    from tasuki.core.broker.events import Command

IDLE_TIMEOUT_S = 60.0  # a client that says nothing for so long is gone; it beats every third of it
LEASE_TTL_MIN_S, LEASE_TTL_MAX_S = 1.0, 3600.0
PATTERNS_MAX = 200  # of 255 bytes each: a Hello's header has room for 64 KiB
CODECS = ("zstd", "gzip")  # in the order of preference; what a peer does not offer is not used
FEATURES = ("batch", "blobs", "logs", "watch")


def hello(broker: Broker, session: Session, message: Message, now: Now) -> list[Command]:
    if not isinstance(message, HelloClient | HelloWorker):
        raise ProtocolError(f"the first frame must be HelloClient or HelloWorker, not {type(message).__name__}")
    if session.hello_seen:
        raise ProtocolError("a second Hello came before the first was answered")
    if message.oldest > PROTOCOL_VERSION or message.version < PROTOCOL_OLDEST:
        raise VersionMismatch(
            f"this server speaks protocol versions {PROTOCOL_OLDEST} to {PROTOCOL_VERSION}, "
            f"the peer {message.oldest} to {message.version}; upgrade the older side"
        )
    session.hello_seen = True
    if not message.token and session.peer.uid is not None and session.peer.uid == broker.config.own_uid:
        identity = Identity(PeerKind.NODE, _own_name(broker, session.peer.uid))
        return welcome(broker, session, message, identity, now)
    if not message.token:
        raise Unauthorized(
            "a token is needed: --token-file FILE or TASUKI_TOKEN (the server's own user finds it in the data folder)"
        )
    broker.draft.token.append(token_sha256(message.token))
    broker.draft.hello_routes.append(HelloRoute(session.conn, message))
    return []


def new_servers(broker: Broker, session: Session) -> tuple[str, ...]:
    """Where this peer can turn to, if it was last told otherwise; else nothing."""
    servers = servers_for(broker, session.peer)
    if servers == session.servers_told:
        return ()
    session.servers_told = servers
    return servers


def servers_for(broker: Broker, peer: Peer) -> tuple[str, ...]:
    """Where this peer can turn to. A loopback address means something only on the machine itself."""
    if not broker.fellows.servers:  # alone: the peer has found us, perhaps through a relay that must not be gone round
        return ()
    all_of_them = (*broker.addresses, *broker.fellows.addresses)
    if peer.local:
        return all_of_them
    return tuple(url for url in all_of_them if not _is_loopback(url))


@lru_cache(1024)  # asked again for every heartbeat of every peer
def _is_loopback(url: str) -> bool:
    return parse_url(url)[0].loopback


def _own_name(broker: Broker, uid: int) -> str:
    """The same number is another person on another machine: where servers share a store, the machine is part of the name."""
    return f"node:{broker.config.host}:{uid}" if broker.config.shared else f"uid:{uid}"


def token_known(broker: Broker, route: HelloRoute, row: TokenRow | None, now: Now) -> list[Command]:
    """The store looked the token up."""
    session = broker.sessions.get(route.conn)
    if session is None:
        return []
    try:
        return welcome(broker, session, route.hello, identify(row, now.wall), now)
    except TasukiError as error:
        return broker.hang_up(route.conn, error)


def welcome(broker: Broker, session: Session, hello: HelloClient | HelloWorker, identity: Identity, now: Now) -> list[Command]:
    common: dict[str, Any] = {
        "conn": session.conn,
        "peer": session.peer,
        "opened_at": session.opened_at,
        "heard_at": now.monotonic,
        "identity": identity,
        "servers_told": servers_for(broker, session.peer),
    }
    ttl_s = broker.config.lease_ttl_s
    commands: list[Command] = []
    if isinstance(hello, HelloWorker) and hello.transfers:
        _check_worker(hello, identity)
        _check_same_token(broker.workers.get(hello.worker_id), identity, hello.worker_id)
        broker.sessions[session.conn] = TransferSession(**common, worker_id=hello.worker_id, incarnation=hello.incarnation)
    elif isinstance(hello, HelloWorker):
        worker = _new_worker(broker, common, hello, identity)
        commands += _replace_worker(broker, worker)
        broker.add_worker(worker)
        ttl_s = worker.ttl_s
        worker.resuming = hello.resumed  # its first Heartbeat says what it holds
        broker.fellows.moved.append((worker.worker_id, worker.incarnation))
        commands += broker.fellows.hint(broker.config.server_id)
    else:
        if identity.kind is PeerKind.WORKER:
            raise Unauthorized("a worker token cannot be used by a client; make one with: tasuki token create --kind client")
        client_id = check_name(hello.client_id, "client_id")
        broker.sessions[session.conn] = ClientSession(**common, client_id=client_id)
    welcome = Welcome(
        corr_id=hello.msg_id,
        version=min(PROTOCOL_VERSION, hello.version),
        server_id=broker.config.server_id,
        identity=identity.name,
        kind=identity.kind,
        servers=common["servers_told"],
        features=FEATURES,
        codecs=tuple(codec for codec in CODECS if codec in hello.codecs)[:1],
        lease_ttl_s=ttl_s,
        lease_margin_s=LEASE_MARGIN_S,
        frame_max_bytes=broker.config.frame_max_bytes,
        idle_timeout_s=IDLE_TIMEOUT_S,
    )
    return [*commands, Send(session.conn, welcome)]


def _check_worker(hello: HelloWorker, identity: Identity) -> None:
    identity.check_worker()
    check_name(hello.worker_id, "worker_id")
    identity.check_worker_id(hello.worker_id)
    check_name(hello.incarnation, "incarnation")


def _new_worker(broker: Broker, common: dict[str, Any], hello: HelloWorker, identity: Identity) -> WorkerSession:
    _check_worker(hello, identity)
    if "." in hello.worker_id:
        raise InvalidInput(f"worker_id {hello.worker_id!r} may not contain a dot: it can be the last token of a subject")
    patterns = checked_patterns(identity, hello.patterns or (DEFAULT_PATTERN,))
    ttl_s = hello.ttl_s if hello.ttl_s is not None else broker.config.lease_ttl_s
    if not LEASE_TTL_MIN_S <= ttl_s <= LEASE_TTL_MAX_S:
        raise InvalidInput(f"the lease ttl must be {LEASE_TTL_MIN_S:g} to {LEASE_TTL_MAX_S:g} seconds, got {ttl_s:g}")
    return WorkerSession(
        **common,
        worker_id=hello.worker_id,
        incarnation=hello.incarnation,
        patterns=patterns,
        on_disconnect=hello.on_disconnect,
        reconnect_grace_s=max(0.0, min(hello.reconnect_grace_s, LEASE_TTL_MAX_S)),
        ttl_s=ttl_s,
        host=hello.host[:200],
        slots=hello.slots,
        takes=hello.takes,
        version=min(PROTOCOL_VERSION, hello.version),
    )


def checked_patterns(identity: Identity, patterns: tuple[str, ...]) -> tuple[str, ...]:
    if len(patterns) > PATTERNS_MAX:
        raise InvalidInput(f"{len(patterns)} patterns are too many, the limit is {PATTERNS_MAX}")
    identity.check_patterns(patterns)
    return tuple(dict.fromkeys(patterns))


def _replace_worker(broker: Broker, worker: WorkerSession) -> list[Command]:
    """The same worker_id again: a restarted process (a fresh incarnation) or a new connection of the same one."""
    old = broker.workers.get(worker.worker_id)
    _check_same_token(old, worker.identity, worker.worker_id)
    if old is None:
        return []
    if old.incarnation == worker.incarnation:
        return broker.hang_up(old.conn, ProtocolError(f"worker {worker.worker_id!r}: a new connection of it has taken its place"))
    # INVALID is final for a worker: two processes of one id would otherwise push each other out for ever.
    taken = f"worker {worker.worker_id!r}: a new start of it has taken its place; every worker needs an id of its own"
    return broker.hang_up(old.conn, InvalidInput(taken))


def _check_same_token(old: WorkerSession | None, identity: Identity | None, worker_id: str) -> None:
    """Nobody takes the place of a worker, or reads what is meant for it, who has another's token."""
    if old is not None and not _are_one(old.identity, identity):
        raise Forbidden(f"worker_id {worker_id!r} is in use by a worker with another token; choose another --worker-id")


def _are_one(old: Identity | None, new: Identity | None) -> bool:
    """The same token, or another one that is bound to the same worker: it was rotated."""
    if old is None or new is None or old.name == new.name:
        return True
    return bool(old.worker_id) and old.worker_id == new.worker_id
