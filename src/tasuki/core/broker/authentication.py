"""Authentication of peers: Hello, tokens, and the enrolment of workers. Pure.

Hello. A Hello with a token waits for the store to look the token up; one without is welcome only on the unix socket of the
server's own user.

Enrolment. An administrator makes an enrol token, which is good for one registration. The peer that shows it gets a worker token
that is bound to one worker_id and has the enrol token's scope. An enrol token is spent by revoking it, which the store does at
most once: of two peers that show it at the same time one gets a worker token. Secrets are never sent, only the hash of one that
the sender has made. The worker_id is not the sender's choice: it is the one that the enrol token was made for, else a new one. So
nobody can register as somebody else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from tasuki.core import access, protocol
from tasuki.core.access import ENROL_TOKEN_S, TOKEN_PREFIXES, UNAUTHENTICATED, WORKER_TOKEN_S, Identity, PeerKind
from tasuki.core.address import parse_url
from tasuki.core.broker.events import Command
from tasuki.core.broker.state import BrokerState, ClientSession, Session, TransferSession, WorkerSession
from tasuki.core.broker.turn_builder import TurnEffects, ignore
from tasuki.core.decoding import decodable
from tasuki.core.job import TIME_END, check_name, is_sha256
from tasuki.core.lifecycle import LEASE_MARGIN_S, LEASE_TTL_RANGE_S
from tasuki.core.machine import Now, Peer, Send
from tasuki.core.store_messages import LeaseHolder, TokenRow, checked_offer
from tasuki.core.subject import DEFAULT_PATTERN, assigned
from tasuki.errors import Forbidden, InvalidInput, NotFound, ProtocolError, TasukiError, Unauthorized, VersionMismatch, discreet

IDLE_TIMEOUT_S = 60.0  # a client that says nothing for so long is gone; it beats every third of it
PATTERNS_MAX = 200  # of 255 bytes each: a Hello's header has room for 64 KiB
FEATURES = ("batch", "blobs", "caches", "logs", "messages", "watch")
CREATE, REGISTER, ROTATE, REVOKE = "token.create", "worker.register", "worker.rotate", "worker.revoke"
LABEL_MAX_CHARS = 200
SECRET_FIELDS = ("sha256", "incarnation")  # of a token: not listed
CLOCK_SLACK_S = 60.0  # by which the clock of an administrator may be ahead of the server's

# ---------------------------------------------------------------------------------------------------- Hello


def hello(state: BrokerState, session: Session, message: protocol.Message, now: Now) -> list[Command]:
    """Take the first message of a connection: look its token up, or welcome the server's own user at once."""
    if not isinstance(message, protocol.HelloClient | protocol.HelloWorker):
        raise ProtocolError(f"the first frame must be HelloClient or HelloWorker, not {type(message).__name__}")
    if session.hello_seen:
        raise ProtocolError("a second Hello came before the first was answered")
    if message.oldest > message.version:
        raise ProtocolError(f"oldest ({message.oldest}) is above version ({message.version}); it is the lowest that you speak")
    if message.oldest > protocol.PROTOCOL_VERSION or message.version < protocol.PROTOCOL_OLDEST:
        raise VersionMismatch(
            f"this server speaks protocol versions {protocol.PROTOCOL_OLDEST} to {protocol.PROTOCOL_VERSION}, "
            f"the peer {message.oldest} to {message.version}; upgrade the older side"
        )
    session.hello_seen = True
    uid = session.peer.uid
    if not message.token and uid is not None and uid == state.config.own_uid:
        # The submitter's name of a user of this machine: where servers share a store, the machine is part of it.
        name = f"node:{state.config.host}:{uid}" if state.config.shared else f"uid:{uid}"
        return _welcome(state, session, message, Identity(PeerKind.NODE, name), now)
    if not message.token:
        raise Unauthorized(UNAUTHENTICATED)
    conn, hello = session.conn, message

    def known(rows: Sequence[TokenRow | None], effects: TurnEffects) -> None:
        if conn not in state.sessions:
            return
        try:
            identity = access.identify(rows[0], effects.now.wall)
            if isinstance(hello, protocol.HelloWorker) and identity.kind is PeerKind.WORKER and not identity.worker_id:
                state.builder.ask("tokens", [None], partial(unbound, identity), failed)
                return
            effects.commands += _welcome(state, session, hello, identity, effects.now)
        except TasukiError as error:
            effects.commands += state.hang_up(conn, error)

    def unbound(identity: Identity, lists: Sequence[list[TokenRow]], effects: TurnEffects) -> None:
        """Welcome a worker token of nobody in particular, unless the worker_id belongs to the token of another."""
        if conn not in state.sessions:
            return
        assert isinstance(hello, protocol.HelloWorker)
        try:
            if hello.worker_id and _tokens_of(lists[0], hello.worker_id):
                raise Forbidden(f"worker_id {hello.worker_id[:64]!r} belongs to an enrolled worker; choose another --worker-id")
            effects.commands += _welcome(state, session, hello, identity, effects.now)
        except TasukiError as error:
            effects.commands += state.hang_up(conn, error)

    def failed(error: TasukiError, effects: TurnEffects) -> None:
        effects.commands += state.hang_up(conn, discreet(error))

    state.builder.ask("token", [access.token_sha256(message.token)], known, failed)
    return []


def new_servers(state: BrokerState, session: Session) -> tuple[str, ...]:
    """Return the addresses of all servers if they changed since this peer was last told; else nothing."""
    servers = servers_for(state, session.peer)
    if servers == session.known_servers:
        return ()
    session.known_servers = servers
    return servers


def servers_for(state: BrokerState, peer: Peer) -> tuple[str, ...]:
    """Return the addresses that this peer can turn to."""
    if not state.cluster.servers:  # alone: the peer has found us, perhaps through a relay that must not be gone round
        return ()
    return usable_by(peer, (*state.addresses, *state.cluster.addresses))


def usable_by(peer: Peer, addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Return the addresses without loopback ones, which are of use only on the machine itself."""
    return addresses if peer.local else tuple(url for url in addresses if not _is_loopback(url))


@lru_cache(1024)  # asked again for every heartbeat of every peer
def _is_loopback(url: str) -> bool:
    return parse_url(url)[0].loopback


def _welcome(
    state: BrokerState, session: Session, hello: protocol.HelloClient | protocol.HelloWorker, identity: Identity, now: Now
) -> list[Command]:
    servers = servers_for(state, session.peer)
    known = {"identity": identity, "owner": identity.owner, "known_servers": servers}
    common = asdict(session) | {"heard_at": now.monotonic, **known}
    ttl_s = state.config.lease_ttl_s
    commands: list[Command] = []
    if isinstance(hello, protocol.HelloWorker) and hello.transfers:
        _check_worker(hello, identity)
        _check_owner(state, identity, hello.worker_id)
        state.sessions[session.conn] = TransferSession(**common, worker_id=hello.worker_id, incarnation=hello.incarnation)
    elif isinstance(hello, protocol.HelloWorker):
        worker = _new_worker(state, common | {"agent": hello.agent[:200]}, hello, identity)
        commands += _replace_worker(state, worker)
        try:
            state.add_worker(worker)
        except TasukiError as error:
            return [*commands, *state.hang_up(session.conn, error)]
        ttl_s = worker.ttl_s
        worker.resuming = hello.resumed  # its first Heartbeat names the leases that it holds
        state.cluster.moved.append((worker.worker_id, worker.incarnation, worker.owner))
        commands += state.cluster.hint(state.config.server_id)
    else:
        if identity.kind is PeerKind.WORKER:
            raise Unauthorized("a worker token cannot be used by a client; make one with: tasuki token create --kind client")
        client_id = check_name(hello.client_id, "client_id")
        state.sessions[session.conn] = ClientSession(**common, client_id=client_id)
    welcome = protocol.Welcome(
        corr_id=hello.msg_id,
        version=min(protocol.PROTOCOL_VERSION, hello.version),
        server_id=state.config.server_id,
        identity=identity.name,
        kind=identity.kind,
        servers=servers,
        features=FEATURES,
        codecs=tuple(codec for codec in protocol.CODECS if codec in hello.codecs)[:1],
        lease_ttl_s=ttl_s,
        lease_margin_s=LEASE_MARGIN_S,
        frame_max_bytes=state.config.frame_max_bytes,
        idle_timeout_s=IDLE_TIMEOUT_S,
    )
    return [*commands, Send(session.conn, welcome)]


def _check_worker(hello: protocol.HelloWorker, identity: Identity) -> None:
    identity.check_worker()
    check_name(hello.worker_id, "worker_id")
    identity.check_worker_id(hello.worker_id)
    check_name(hello.incarnation, "incarnation")


def _new_worker(state: BrokerState, common: dict[str, Any], hello: protocol.HelloWorker, identity: Identity) -> WorkerSession:
    _check_worker(hello, identity)
    access.check_worker_id(hello.worker_id, state.config.apps)
    _check_owner(state, identity, hello.worker_id)
    patterns = checked_patterns(identity, hello.patterns or (DEFAULT_PATTERN,))
    config, (least, most) = state.config, LEASE_TTL_RANGE_S  # to ask for; granted up to the server's own limit
    ttl_s = hello.ttl_s if hello.ttl_s is not None else config.lease_ttl_s
    if not least <= ttl_s <= most:
        raise InvalidInput(f"the lease ttl must be {least:g} to {most:g} seconds, got {ttl_s:g}")
    return WorkerSession(
        **common,
        worker_id=hello.worker_id,
        incarnation=hello.incarnation,
        patterns=patterns,
        on_disconnect=hello.on_disconnect,
        reconnect_grace_s=max(0.0, min(hello.reconnect_grace_s, config.grace_max_s)),
        ttl_s=min(ttl_s, max(config.lease_ttl_max_s, config.lease_ttl_s)),
        host=hello.host[:200],
        slots=hello.slots,
        offer=checked_offer(hello.takes, hello.execs),
        version=min(protocol.PROTOCOL_VERSION, hello.version),
        caches=hello.caches,
    )


def checked_patterns(identity: Identity, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the patterns, each once, if this worker may subscribe to them."""
    if len(patterns) > PATTERNS_MAX:
        raise InvalidInput(f"{len(patterns)} patterns are too many, the limit is {PATTERNS_MAX}")
    identity.check_patterns(patterns)
    return tuple(dict.fromkeys(map(assigned, patterns)))


def _replace_worker(state: BrokerState, worker: WorkerSession) -> list[Command]:
    """Hang up on a session of the same worker_id: another incarnation, or an older connection of the same one."""
    old = state.workers.get(worker.worker_id)
    if old is None:
        return []
    if old.incarnation == worker.incarnation:
        return state.hang_up(old.conn, ProtocolError(f"worker {worker.worker_id!r}: a new connection of it has taken its place"))
    # INVALID is final for a worker: two processes of one id would otherwise push each other out for ever.
    taken = f"worker {worker.worker_id!r}: a new start of it has taken its place; every worker needs an id of its own"
    return state.hang_up(old.conn, InvalidInput(taken))


def _check_owner(state: BrokerState, identity: Identity, worker_id: str) -> None:
    """Refuse a peer that would take the place of a connected worker of another owner; a token that is bound to the id may."""
    here = state.workers.get(worker_id)
    owners = {worker.owner for _, worker in state.cluster.workers() if worker.worker_id == worker_id}
    if not identity.worker_id and (owners | {here.owner if here is not None else identity.owner}) != {identity.owner}:
        raise Forbidden(f"worker_id {worker_id!r} is in use by a worker with another token; choose another --worker-id")


# ---------------------------------------------------------------------------------------------------- an administrator's tokens


def _create_token(state: BrokerState, conn: int, request: protocol.Request, identity: Identity, now: Now) -> None:
    row = _checked_row(state, request, identity, now.wall)

    def created(added: Sequence[bool], effects: TurnEffects) -> None:
        answer = {"token_id": row.token_id} if added[0] else _id_is_taken(row.token_id)
        state.answer(conn, request.msg_id, answer, effects)

    state.builder.ask("add_token", [row], created, partial(state.tell_failure, conn, request.msg_id))


def _checked_row(state: BrokerState, request: protocol.Request, identity: Identity, now_wall: float) -> TokenRow:
    try:
        row = msgspec.convert(request.params, TokenRow)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"token.create: {error}") from None
    if row.kind not in TOKEN_PREFIXES:
        raise InvalidInput(f"a token's kind must be {', '.join(TOKEN_PREFIXES)}, got {row.kind[:40]!r}")
    if row.expires_at is not None and not 0 <= row.expires_at < TIME_END:  # NaN would never end
        raise InvalidInput(f"token.create: expires_at must be a Unix time in seconds, got {row.expires_at}")
    # An enrol token ends soon, so that one that is found later cannot be used.
    if row.kind == PeerKind.ENROL and (row.expires_at is None or row.expires_at > now_wall + ENROL_TOKEN_S + CLOCK_SLACK_S):
        raise InvalidInput(f"an enrol token is valid for at most {ENROL_TOKEN_S / 60:g} minutes; give it an expires_at")
    _check_new_token(request, row.token_id, row.sha256)
    if row.worker_id:
        access.check_worker_id(row.worker_id, state.config.apps)
    access.check_scope(row.scope)
    return replace(row, created_at=now_wall, created_by=identity.name, revoked_at=None, revoked_by="", incarnation="")


def _check_new_token(request: protocol.Request, token_id: str, sha256: str) -> None:
    check_name(token_id, "token_id")
    if not is_sha256(sha256):
        raise InvalidInput(f"{request.verb}: sha256 must be the 64 lower-case hex digits of the secret's hash, never the secret")


def _id_is_taken(token_id: str) -> TasukiError:
    return InvalidInput(f"token {token_id[:80]!r}: there is another with that id or that secret")


def _revoke_token(state: BrokerState, conn: int, request: protocol.Request, identity: Identity) -> None:
    token_id = str(request.params.get("token_id", ""))

    def revoked(answers: Sequence[bool], effects: TurnEffects) -> None:
        answer: Any = {"token_id": token_id}
        if answers[0]:
            _end_sessions(state, (token_id,), conn, effects)
            state.builder.ask("tokens", [None], listed, ignore)
        else:
            answer = NotFound(f"there is no token {token_id[:80]!r} that is still valid")
        state.answer(conn, request.msg_id, answer, effects)

    def listed(lists: Sequence[list[TokenRow]], effects: TurnEffects) -> None:
        for row in lists[0]:
            if row.token_id == token_id and not (row.worker_id and _tokens_of(lists[0], row.worker_id)):
                owner = Identity(PeerKind(row.kind), f"token:{token_id}", worker_id=row.worker_id).owner
                end_leases(state, LeaseHolder(owner))

    failed = partial(state.tell_failure, conn, request.msg_id)
    state.builder.ask("revoke_token", [(token_id, identity.name)], revoked, failed)


def end_leases(state: BrokerState, holder: LeaseHolder) -> None:
    """End the leases of a holder that gets no more: its jobs go to others now, not at the end of their leases."""

    def ended(counts: Sequence[int], effects: TurnEffects) -> None:
        if counts[0]:
            end_leases(state, holder)
        elif (worker := state.workers.get(holder.worker_id)) is not None and worker.deliveries:
            # At another server a worker hears of it with its next heartbeat.
            effects.commands.append(Send(worker.conn, protocol.CancelLeases(list(worker.deliveries))))

    state.builder.ask("end_leases", [holder], ended)


def _end_sessions(state: BrokerState, token_ids: Collection[str], but: int, effects: TurnEffects) -> None:
    """Hang up on the peers that came with these revoked tokens, except connection `but`; other servers do the same."""
    state.cluster.tokens.extend(token_ids)
    for session in state.sessions_of(token_ids):
        if session.conn != but and session.identity is not None:
            effects.commands += state.hang_up(session.conn, Unauthorized(f"token {session.identity.token_id} was revoked"))


def _list_tokens(state: BrokerState, conn: int, request: protocol.Request, identity: Identity) -> None:
    def listed(lists: Sequence[list[TokenRow]], effects: TurnEffects) -> None:
        rows = [{name: getattr(row, name) for name in row.__struct_fields__ if name not in SECRET_FIELDS} for row in lists[0]]
        state.answer(conn, request.msg_id, rows, effects)

    state.builder.ask("tokens", [None], listed, partial(state.tell_failure, conn, request.msg_id))


# ---------------------------------------------------------------------------------------------------- a worker's own token


@decodable
class NewToken(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a request for a worker's own token; the worker keeps the secret itself."""

    token_id: str
    sha256: str
    label: str = ""


def check_enrolment(message: protocol.Message) -> None:
    """Refuse any message but a registration: an enrol token is good for nothing else."""
    if not isinstance(message, protocol.Request) or message.verb != REGISTER:
        raise Forbidden("an enrol token can only register a worker; for everything else another kind of token is needed")


def _register(state: BrokerState, conn: int, request: protocol.Request, identity: Identity) -> None:
    """Spend the enrol token; the worker's own follows when the store says that it was still good."""
    if identity.kind is not PeerKind.ENROL:
        raise Forbidden(f"{REGISTER} needs an enrol token; this is a token of kind {identity.kind}")
    worker_id = identity.worker_id or "w-" + identity.token_id.replace(".", "-")[:60]
    token, session = _new_token(request), state.sessions[conn]
    spent: list[bool] = []

    def registered(lists: Sequence[list[TokenRow]], effects: TurnEffects) -> None:
        if not spent[0]:
            session.token_exchanges -= 1
            used = Forbidden("this enrol token was used or revoked before; ask for another one")
            state.answer(conn, request.msg_id, used, effects)
            return
        old = _tokens_of(lists[0], worker_id)  # they are good no longer
        _revoke_all(state, old, identity.name)
        row = _worker_row(token, worker_id, identity, effects.now)
        if not row.label:
            row = replace(row, label=next((one.label for one in lists[0] if one.token_id == identity.token_id), ""))
        _add_token(state, session, request, row, old, [True])

    session.token_exchanges += 1
    spend = [(identity.token_id, f"worker:{worker_id}")]
    state.builder.ask("revoke_token", spend, lambda revoked, _: spent.extend(revoked), ignore)
    state.builder.ask("tokens", [None], registered, partial(state.tell_failure, conn, request.msg_id))


def rotate(state: BrokerState, conn: int, request: protocol.Request, identity: Identity, now: Now) -> list[Command]:
    """Exchange the token that the worker came with for another one, in one transaction."""
    if request.verb != ROTATE:
        raise ProtocolError(f"a worker may not ask for {request.verb[:40]!r}")
    if not identity.worker_id:
        raise Forbidden("only a token that is bound to a worker can be rotated; make a new one with: tasuki token create")
    row = replace(_worker_row(_new_token(request), identity.worker_id, identity, now), incarnation=identity.incarnation)
    session = state.sessions[conn]
    session.token_exchanges += 1
    exchanged: list[bool] = []
    old = [(identity.token_id, identity.name)]
    state.builder.ask("revoke_token", old, lambda revoked, _: exchanged.extend(revoked), ignore)
    _add_token(state, session, request, row, (identity.token_id,), exchanged)
    return []


def _new_token(request: protocol.Request) -> NewToken:
    try:
        token = msgspec.convert(request.params, NewToken)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{request.verb}: {error}") from None
    _check_new_token(request, token.token_id, token.sha256)
    return token


def _worker_row(token: NewToken, worker_id: str, identity: Identity, now: Now) -> TokenRow:
    return TokenRow(
        token_id=token.token_id,
        kind=PeerKind.WORKER,
        sha256=token.sha256,
        label=token.label[:LABEL_MAX_CHARS],
        scope=identity.scope,
        worker_id=worker_id,
        created_at=now.wall,
        created_by=identity.name,
        expires_at=now.wall + WORKER_TOKEN_S,
    )


def _add_token(
    state: BrokerState, session: Session, request: protocol.Request, row: TokenRow, old: Sequence[str], exchanged: list[bool]
) -> None:
    """Add a worker's token in the turn that revokes its `old` ones; `exchanged` tells whether that one was still good."""
    conn, msg_id = session.conn, request.msg_id

    def added(answers: Sequence[bool], effects: TurnEffects) -> None:
        _end_sessions(state, old, conn, effects)
        session.token_exchanges -= 1
        answer: Any = {
            "worker_id": row.worker_id,
            "token_id": row.token_id,
            "expires_at": row.expires_at,
            "ttl_s": WORKER_TOKEN_S,  # for a worker with another clock
            "scope": list(row.scope),
        }
        if not answers[0]:
            answer = _id_is_taken(row.token_id)
        elif not exchanged[0]:
            # Somebody revoked the old one first, and meant the worker, not this one secret.
            _revoke_all(state, (row.token_id,), row.created_by)
            answer = Forbidden(f"the token of worker {row.worker_id!r} was revoked")
        state.answer(conn, msg_id, answer, effects)

    state.builder.ask("add_token", [row], added, partial(state.tell_failure, conn, msg_id))


def _revoke_worker(state: BrokerState, conn: int, request: protocol.Request, identity: Identity) -> None:
    """Revoke all tokens of one worker, or those with which it may take jobs of one `subject`."""
    worker_id = check_name(str(request.params.get("worker_id", "")), "worker_id")
    subject = str(request.params.get("subject", ""))
    revoked: list[str] = []
    under_way: tuple[str, ...] = ()

    def found(lists: Sequence[list[TokenRow]], effects: TurnEffects) -> None:
        """Revoke the tokens that are there, each once, and look again: the worker may have rotated its token meanwhile."""
        nonlocal under_way
        _end_sessions(state, under_way, conn, effects)
        under_way = tuple(token_id for token_id in _tokens_of(lists[0], worker_id, subject) if token_id not in revoked)
        revoked.extend(under_way)
        if under_way:
            _revoke_all(state, under_way, identity.name)
            look_up()
        elif revoked:
            if not _tokens_of(lists[0], worker_id):
                end_leases(state, LeaseHolder(f"worker:{worker_id}"))
            state.answer(conn, request.msg_id, {"worker_id": worker_id, "revoked": revoked}, effects)
        else:
            unknown = NotFound(f"there is no worker {worker_id!r} with a token that is still valid")
            state.answer(conn, request.msg_id, unknown, effects)

    def look_up() -> None:
        state.builder.ask("tokens", [None], found, partial(state.tell_failure, conn, request.msg_id))

    look_up()


def _revoke_all(state: BrokerState, token_ids: Sequence[str], actor: str) -> None:
    state.builder.ask("revoke_token", [(token_id, actor) for token_id in token_ids], ignore, ignore)


def _tokens_of(rows: Sequence[TokenRow], worker_id: str, subject: str = "") -> tuple[str, ...]:
    """Return the ids of a worker's tokens, for the subject if one is given, that nobody revoked here: in Redis others may."""
    bound = (PeerKind.WORKER, worker_id, "")
    return tuple(
        row.token_id
        for row in rows
        if (row.kind, row.worker_id, row.revoked_by) == bound and (not subject or access.in_scope(row.scope, subject))
    )


REQUESTS: dict[str, Callable[[BrokerState, int, protocol.Request, Identity], None]] = {
    "token.list": _list_tokens,
    "token.revoke": _revoke_token,
    REGISTER: _register,
    REVOKE: _revoke_worker,
}


TOKEN_VERBS = (CREATE, *REQUESTS)


def token_request(state: BrokerState, conn: int, request: protocol.Request, identity: Identity, now: Now) -> list[Command]:
    """Begin one of TOKEN_VERBS; all but the registration are an administrator's."""
    if request.verb != REGISTER:
        identity.check_admin(request.verb)
    if request.verb == CREATE:
        _create_token(state, conn, request, identity, now)
    else:
        REQUESTS[request.verb](state, conn, request, identity)
    return []
