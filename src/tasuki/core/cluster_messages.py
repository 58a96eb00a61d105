"""Messages between servers that share a store: hints after a commit, published messages that are relayed, and descriptions of
live servers and workers. Pure.

A hint makes the other servers look at the store at once instead of a little later. It may be lost, doubled, late, or outdated:
a server that receives one asks the store, and a server that receives none asks too, at its own interval. So a sender may always
give fewer details: `everything` means "look at everything that you wait for".

On the wire a hint is JSON, because the narrowest carrier (a payload of PostgreSQL's NOTIFY) is text of less than 8000
bytes. `split` cuts a hint into pieces of such a size. Each piece is a hint of its own. Descriptions of servers travel through the
coordination as msgpack.

Messages of publish/subscribe travel as pieces of such hints. They need no order among hints, and a piece that is lost takes its
messages with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec.structs import replace

from tasuki.core.job import OnDisconnect
from tasuki.core.protocol import PublishedMessage
from tasuki.core.routing import Candidate, SubjectRoute
from tasuki.core.store_messages import Takes
from tasuki.core.subject import SUBJECT_MAX_BYTES
from tasuki.errors import InvalidInput, TooLarge

PIECE_MAX_BYTES = 7_900  # NOTIFY takes less than 8000
PIECES_MAX = 8  # some 1,500 ids; reading more of them one by one is dearer than looking at everything
DECODE_MAX_BYTES = 64 * 1024
RELAY_PIECES_MAX = 512  # of one batch of messages: 2 MiB in pieces for NOTIFY are 366
RELAY_SENDERS_MAX = 64  # with a batch under way

_Id = Annotated[str, msgspec.Meta(max_length=128)]
_Subject = Annotated[str, msgspec.Meta(max_length=SUBJECT_MAX_BYTES)]


class RelayedMessage(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A published message on its way to the subscribers of other servers."""

    message: PublishedMessage
    queues: dict[str, str] = {}
    """By queue group: the server that gives it to one of the members."""


class RelayPiece(msgspec.Struct, frozen=True, array_like=True):
    """Piece number `place` of `count`, from 0 on, of the messages with this number of their sender."""

    number: int
    place: int
    count: int
    data: bytes


class Hint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A list of changes that other servers may want to look at. Fields that a newer server adds are skipped by an older one."""

    server_id: _Id = ""
    """The sender, which ignores its own hints. Empty: no particular server."""
    everything: bool = False
    """Look at everything: more happened than is listed, or something was missed."""
    tokens: tuple[_Id, ...] = ()
    """token_ids that were revoked."""
    canceled: tuple[tuple[_Id, _Id], ...] = ()
    """(worker_id, lease_id) for which a cancel was requested."""
    moved: tuple[tuple[_Id, _Id, _Subject], ...] = ()
    """(worker_id, incarnation, owner) that have just connected to the sender."""
    ended: tuple[_Id, ...] = ()
    """job_ids that became terminal."""
    ready: tuple[_Subject, ...] = ()
    """Subjects that have new ready jobs."""
    ready_jobs: int = 0
    """Number of these jobs; 0: not known, as in a hint that was cut into pieces."""
    routed: tuple[tuple[_Id, _Id], ...] = ()
    """(job_id, worker_id): workers that the sender chose for ready jobs by a routing policy, of other servers."""
    relay: RelayPiece | None = None
    """A piece of messages for subscribers; then the hint has nothing else."""

    @property
    def empty(self) -> bool:
        """True if the hint names nothing and need not be sent."""
        return not (self.everything or any(getattr(self, name) for name in _LISTS))


_LISTS = ("tokens", "canceled", "moved", "ended", "ready", "routed")
_NAMES_BYTES = sum(len(f',"{name}":[]') for name in _LISTS)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Hint).decode


def split(hint: Hint, max_bytes: int = PIECE_MAX_BYTES) -> list[bytes]:
    """Return the hint in as few pieces as its order allows; none if it is empty.

    More than PIECES_MAX pieces are avoided by leaving out subjects and ended jobs first: `everything` makes the others look
    for these. Revocations, cancels and moves are named as long as they fit.
    """
    if hint.empty:
        return []
    whole = _encode(hint)
    if len(whole) <= max_bytes:
        return [whole]
    shorter = replace(hint, everything=True, ended=(), ready=(), routed=())
    return _pieces(hint, max_bytes) or _pieces(shorter, max_bytes) or [everything(hint.server_id)]


def everything(server_id: str = "") -> bytes:
    """Return the shortest hint, which is never wrong."""
    return _encode(Hint(server_id=server_id, everything=True))


def decode(data: bytes) -> Hint:
    """Decode one piece, or raise InvalidInput."""
    if len(data) > DECODE_MAX_BYTES:
        raise TooLarge(f"a hint of {len(data)} bytes; at most {DECODE_MAX_BYTES} are allowed")
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"these {len(data)} bytes are not a hint: {error}") from error


def _pieces(hint: Hint, max_bytes: int) -> list[bytes] | None:
    """Return full pieces with the items in their order; None if there are too many, or an item is too large for any piece."""
    head = Hint(server_id=hint.server_id, everything=hint.everything)
    room = max_bytes - len(_encode(head)) - _NAMES_BYTES
    pieces: list[bytes] = []
    taken: dict[str, list[object]] = {}
    left = room
    for name in _LISTS:
        for item in getattr(hint, name):
            size = len(_encode(item)) + 1
            if size > left:
                if size > room or len(pieces) + 1 >= PIECES_MAX:
                    return None
                pieces.append(_encode(replace(head, **taken)))
                head, taken, left = replace(head, everything=False), {}, room
            taken.setdefault(name, []).append(item)
            left -= size
    return [*pieces, _encode(replace(head, **taken))]


# ---------------------------------------------------------------------------------------------------- relayed messages

_RELAY_HEAD_BYTES = 200  # of a piece beside its data
_encode_relayed = msgspec.msgpack.Encoder().encode
_decode_relayed = msgspec.msgpack.Decoder(list[RelayedMessage]).decode


def relay(server_id: str, number: int, messages: Sequence[RelayedMessage], max_bytes: int = PIECE_MAX_BYTES) -> list[bytes]:
    """Return messages in pieces of at most `max_bytes`; `number` is different from that of all others of this sender."""
    data = _encode_relayed(messages)
    size = (max_bytes - _RELAY_HEAD_BYTES - len(server_id)) * 3 // 4  # base64
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    pieces = (RelayPiece(number, place, len(parts), part) for place, part in enumerate(parts))
    return [_encode(Hint(server_id=server_id, relay=piece)) for piece in pieces]


class RelayedPieces:
    """Puts the pieces of each sender together again. Pieces of one sender come in order, or some are lost."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[RelayPiece, list[bytes]]] = {}

    def take(self, server_id: str, piece: RelayPiece) -> list[RelayedMessage]:
        """Return the messages that are complete with this piece, or none; InvalidInput if they make no sense."""
        last, parts = self._begun.pop(server_id, (None, []))
        if piece.place:
            is_next = last is not None and (last.number, last.place + 1, last.count) == (piece.number, piece.place, piece.count)
            if not is_next:  # one was lost, and with it the whole
                return []
        else:
            parts = []
        parts.append(piece.data)
        if piece.place + 1 < min(piece.count, RELAY_PIECES_MAX):
            if len(self._begun) >= RELAY_SENDERS_MAX:
                self._begun.clear()
            self._begun[server_id] = piece, parts
            return []
        try:
            return _decode_relayed(b"".join(parts))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidInput(f"the relayed messages of server {server_id!r} cannot be read: {error}") from None


# ---------------------------------------------------------------------------------------------------- servers and workers


class WorkerInfo(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A worker as the other servers know it, about a second old."""

    worker_id: str
    incarnation: str
    patterns: tuple[str, ...] = ()
    host: str = ""
    slots: int = 1
    takes: Takes = Takes.ANY
    credit: int = 0
    running: int = 0
    address: str = ""
    on_disconnect: OnDisconnect = OnDisconnect.STOP
    addressed: bool = False
    """The worker has given credit since its Hello: a subject that ends in its id is for it alone."""
    owner: str = ""
    execs: tuple[str, ...] | None = None
    """Programs that it offers; None: it does not say."""
    cpu: float = 0.0
    """Load of its CPUs, 0 to 1."""
    held: bytes = b""
    """Prefixes of the hashes of cached files that it holds (`core.routing`); empty: no route asks for them."""
    agent: str = ""
    """Software and version, as the worker says."""

    def candidate(self) -> Candidate:
        """Return the facts by which routing policies compare it. Credit for what is sent ahead is no free place."""
        return Candidate(self.worker_id, min(self.credit, max(0, self.slots - self.running)), self.running, self.cpu, self.held)

    def view(self, server_id: str) -> dict[str, object]:
        """Return the description that the API and `tasuki workers` show."""
        fields = dict(zip(self.__struct_fields__, msgspec.to_builtins(self), strict=True))
        return {"server_id": server_id, **fields, "patterns": list(self.patterns), "held": self.held.hex()}


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One live server."""

    server_id: str
    addresses: tuple[str, ...] = ()
    """Addresses at which peers can reach the server."""
    node_id: str = ""
    """Node of a Django project that the server is a part of; empty: of none."""
    grpc_address: str = ""
    """HOST:PORT at which the node takes the leader's orders; empty: nowhere."""
    workers: tuple[WorkerInfo, ...] = ()
    epoch: int = 0
    """Epoch under which the server leads; 0: it does not lead."""
    sub_leads: bool = False
    """The server watches the leader for its node."""
    blob_problem: str = ""
    """Reason why the leader takes no new blobs; then no server does."""
    queues: tuple[tuple[str, str], ...] = ()
    """(pattern, queue group) of the subscribers of this server that are in groups."""
    routes: tuple[SubjectRoute, ...] = ()
    """Routing policies of this server, which hold at all servers."""
