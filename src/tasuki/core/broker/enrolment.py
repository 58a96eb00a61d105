"""How a worker gets a token of its own, changes it and loses it: the verbs `worker.*`. Part of the broker; pure.

An administrator makes an enrol token, which is good for one registration. Who shows it gets a worker token that is bound to one
worker_id and has the enrol token's scope. An enrol token is spent by revoking it, which the store does at most once: of two who
show it at the same time one gets a worker token. What is sent is never a secret, only the hash of one that the sender has made.

The worker_id is not the sender's choice: it is the one that the enrol token was made for, else a new one. So nobody can register
as somebody else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tasuki.core.access import ENROL_TOKEN_S, WORKER_TOKEN_S, Identity, PeerKind, covers
from tasuki.core.broker.sessions import Session
from tasuki.core.broker.turn_builder import TokenRoute
from tasuki.core.ids import check_name
from tasuki.core.job import is_sha256
from tasuki.core.machine import Now, Send
from tasuki.core.protocol import ErrorMessage, Message, Reply, Request
from tasuki.core.store_messages import Answers, TokenRow
from tasuki.errors import Forbidden, InvalidInput, NotFound, ProtocolError, TasukiError, Unauthorized

if TYPE_CHECKING:
    from tasuki.core.broker.broker import Broker
    from tasuki.core.broker.events import Command

REGISTER, ROTATE, REVOKE = "worker.register", "worker.rotate", "worker.revoke"
_ADDED = "worker.added"  # the last step of registering and rotating
VERBS = frozenset({REGISTER, REVOKE, _ADDED})
LABEL_MAX_CHARS = 200


class NewToken(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of the token that it is to get; it keeps the secret itself."""

    token_id: str
    sha256: str
    label: str = ""


class _Note(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of a request until the store has done all of it."""

    worker_id: str
    actor: str
    subject: str = ""
    """Only the tokens for it; empty: all that the worker has."""
    token: NewToken | None = None
    scope: tuple[str, ...] = ()
    exchanged: int | None = None
    """Where among the turn's revocations the token stands that is exchanged."""
    dropped: tuple[str, ...] = ()
    """Tokens that the turn under way revokes."""
    answer: dict[str, Any] = {}


def check_enrolment(message: Message) -> None:
    """An enrol token is good for one thing."""
    if not isinstance(message, Request) or message.verb != REGISTER:
        raise Forbidden("an enrol token can only register a worker; for everything else another kind of token is needed")


def register(broker: Broker, conn: int, request: Request, identity: Identity) -> list[Command]:
    """Spend the enrol token; the worker's own follows when the store says that it was still good."""
    if identity.kind is not PeerKind.ENROL:
        raise Forbidden(f"{REGISTER} needs an enrol token; this is a token of kind {identity.kind}")
    worker_id = identity.worker_id or "w-" + identity.token_id.replace(".", "-")[:60]
    note = _Note(worker_id=worker_id, actor=identity.name, token=_new_token(request), scope=identity.scope)
    broker.sessions[conn].spending = True
    draft = broker.draft
    draft.revoke_token.append((identity.token_id, f"worker:{worker_id}"))
    draft.list_tokens = True  # those that it had before are good no longer
    draft.token_routes.append(TokenRoute(conn, request.msg_id, REGISTER, len(draft.revoke_token) - 1, note))
    return []


def rotate(broker: Broker, conn: int, request: Request, identity: Identity, now: Now) -> list[Command]:
    """The token that the worker came with is exchanged for another one, in one transaction."""
    if request.verb != ROTATE:
        raise ProtocolError(f"a worker may not ask for {request.verb[:40]!r}")
    if not identity.worker_id:
        raise Forbidden("only a token that is bound to a worker can be rotated; make a new one with: tasuki token create")
    note = _Note(
        worker_id=identity.worker_id,
        actor=identity.name,
        token=_new_token(request),
        scope=identity.scope,
        exchanged=len(broker.draft.revoke_token),
        dropped=(identity.token_id,),
    )
    broker.sessions[conn].spending = True
    broker.draft.revoke_token.append((identity.token_id, identity.name))
    _add(broker, TokenRoute(conn, request.msg_id, ROTATE, 0, note), note, now)
    return []


def revoke(broker: Broker, conn: int, request: Request, identity: Identity) -> list[Command]:
    """All tokens of one worker, or those with which it may take jobs of one `subject`: they are looked up first."""
    identity.check_admin(REVOKE)
    worker_id = check_name(str(request.params.get("worker_id", "")), "worker_id")
    broker.draft.list_tokens = True
    note = _Note(worker_id=worker_id, actor=identity.name, subject=str(request.params.get("subject", "")))
    broker.draft.token_routes.append(TokenRoute(conn, request.msg_id, REVOKE, 0, note))
    return []


def _new_token(request: Request) -> NewToken:
    try:
        asked = msgspec.convert(request.params, NewToken)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{request.verb}: {error}") from None
    check_name(asked.token_id, "token_id")
    if not is_sha256(asked.sha256):
        raise InvalidInput(f"{request.verb}: sha256 must be the 64 lower-case hex digits of the secret's hash, never the secret")
    return asked


def token_done(broker: Broker, route: TokenRoute, answers: Answers, now: Now) -> list[Command]:
    """The store did one step of it."""
    note: _Note = route.body
    if route.verb == REVOKE:
        return _revoked(broker, route, answers, note)
    if route.verb == _ADDED:
        return _added(broker, route, answers, note)
    if not answers.revoke_token[route.index]:
        return _answer(broker, route, Forbidden("this enrol token was used or revoked before; ask for another one"))
    bound = _bound(answers, note)
    _drop(broker, bound, note)
    _add(broker, route, msgspec.structs.replace(note, dropped=bound), now)
    return []


def _revoked(broker: Broker, route: TokenRoute, answers: Answers, note: _Note) -> list[Command]:
    """Looked up again after each time, because the worker may have rotated its token meanwhile."""
    gone = _gone(broker, note, but=route.conn)
    bound, before = _bound(answers, note), note.answer.get("revoked", [])
    if not bound and not before:
        return _answer(broker, route, NotFound(f"there is no worker {note.worker_id!r} with a token that is still valid"))
    if not bound:
        return gone + _answer(broker, route, note.answer)
    _drop(broker, bound, note)
    answer = {"worker_id": note.worker_id, "revoked": [*before, *bound]}
    again = msgspec.structs.replace(note, answer=answer, dropped=bound)
    broker.draft.list_tokens = True
    broker.draft.token_routes.append(TokenRoute(route.conn, route.msg_id, REVOKE, 0, again))
    return gone


def _added(broker: Broker, route: TokenRoute, answers: Answers, note: _Note) -> list[Command]:
    gone = _gone(broker, note, but=route.conn)
    token_id = note.answer["token_id"]
    if not answers.add_token[route.index]:
        taken = InvalidInput(f"token {token_id!r}: there is another with that id or that secret")
        return gone + _answer(broker, route, taken)
    if note.exchanged is not None and not answers.revoke_token[note.exchanged]:
        # Somebody revoked the old one first, and meant the worker, not this one secret.
        _drop(broker, (token_id,), note)
        return gone + _answer(broker, route, Forbidden(f"the token of worker {note.worker_id!r} was revoked"))
    return gone + _answer(broker, route, note.answer)


def _bound(answers: Answers, note: _Note) -> tuple[str, ...]:
    return tuple(row.token_id for row in answers.tokens[0] if _is_of(row, note))


def _is_of(row: TokenRow, note: _Note) -> bool:
    if (row.kind, row.worker_id, row.revoked_at) != (PeerKind.WORKER, note.worker_id, None):
        return False
    return not note.subject or not row.scope or any(covers(pattern, note.subject) for pattern in row.scope)


def _drop(broker: Broker, token_ids: tuple[str, ...], note: _Note) -> None:
    broker.draft.revoke_token.extend((token_id, note.actor) for token_id in token_ids)


def _gone(broker: Broker, note: _Note, but: int) -> list[Command]:
    """These are revoked: who came in with one is hung up on; other servers are told, and look for themselves too."""
    broker.fellows.tokens.extend(note.dropped)
    commands: list[Command] = []
    for session in list(broker.sessions.values()) if note.dropped else ():
        if session.identity is not None and session.identity.token_id in note.dropped and session.conn != but:
            commands += broker.hang_up(session.conn, Unauthorized(f"token {session.identity.token_id} was revoked"))
    return commands


def _add(broker: Broker, route: TokenRoute, note: _Note, now: Now) -> None:
    assert note.token is not None
    row = TokenRow(
        token_id=note.token.token_id,
        kind=PeerKind.WORKER,
        sha256=note.token.sha256,
        label=note.token.label[:LABEL_MAX_CHARS],
        scope=note.scope,
        worker_id=note.worker_id,
        created_at=now.wall,
        created_by=note.actor,
        expires_at=now.wall + WORKER_TOKEN_S,
    )
    broker.draft.add_token.append(row)
    answer = {
        "worker_id": row.worker_id,
        "token_id": row.token_id,
        "expires_at": row.expires_at,
        "ttl_s": WORKER_TOKEN_S,  # for who has another clock
        "scope": list(row.scope),
    }
    done = msgspec.structs.replace(note, answer=answer)
    index = len(broker.draft.add_token) - 1
    broker.draft.token_routes.append(TokenRoute(route.conn, route.msg_id, _ADDED, index, done))


def _answer(broker: Broker, route: TokenRoute, answer: dict[str, Any] | TasukiError) -> list[Command]:
    session: Session | None = broker.sessions.get(route.conn)
    if session is None:
        return []
    session.spending = False
    if isinstance(answer, TasukiError):
        return [Send(route.conn, ErrorMessage(route.msg_id, answer.code, answer.message, answer.details()))]
    return [Send(route.conn, Reply(route.msg_id, answer))]


def check_enrol_row(row: TokenRow) -> None:
    """An administrator's enrol token ends soon: whoever finds it later must not be able to use it."""
    if row.expires_at is None or row.expires_at > row.created_at + ENROL_TOKEN_S:
        raise InvalidInput(f"an enrol token is valid for at most {ENROL_TOKEN_S / 60:g} minutes; give it an expires_at")
