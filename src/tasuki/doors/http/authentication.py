"""Authentication of HTTP requests: each token is looked up in the store, for every request."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import msgspec
from starlette.requests import Request

from tasuki.core.access import Identity, PeerKind, identify, token_sha256
from tasuki.core.store_messages import TokenRow
from tasuki.doors.http.exchange import secret_of
from tasuki.errors import Forbidden, TokenRevoked
from tasuki.server.server import Server


class Caller(msgspec.Struct, frozen=True):
    """The peer that sent a request, by its token. `secret` goes nowhere but into the Hello of a virtual connection."""

    identity: Identity
    sha256: str
    secret: str
    address: str

    def __repr__(self) -> str:
        return f"Caller({self.identity.name})"


def judge(row: TokenRow | None, wall: float) -> Identity:
    """Return the identity of a token; unknown and expired tokens are 401, revoked and used ones 403."""
    if row is not None and row.revoked_at is not None:
        what = "was used" if row.kind == PeerKind.ENROL else "was revoked"
        raise TokenRevoked(f"token {row.token_id} {what}; ask for another one")
    return identify(row, wall)


class Authenticator:
    """Looks up tokens in batches: requests that arrive during one query share the next one.

    Each request is judged by a query that began after it arrived.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._wanted: dict[str, asyncio.Future[TokenRow | None]] = {}
        self._asking: asyncio.Task[None] | None = None

    async def admit(self, request: Request, kinds: Collection[PeerKind]) -> Caller:
        """Return the caller, if its token is valid and of one of these kinds."""
        secret = secret_of(request)
        sha256 = token_sha256(secret)
        identity = judge(await self._row(sha256), self._server.now().wall)
        if identity.kind not in kinds:
            wanted = " or ".join(sorted(kinds))
            raise Forbidden(f"a token of kind {identity.kind} may not do this; it takes one of kind {wanted}")
        client = request.client
        return Caller(identity, sha256, secret, f"{client.host}:{client.port}" if client is not None else "")

    async def _row(self, sha256: str) -> TokenRow | None:
        row = self._wanted.get(sha256)
        if row is None:
            row = self._wanted[sha256] = asyncio.get_running_loop().create_future()
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._ask())
        return await asyncio.shield(row)

    async def _ask(self) -> None:
        try:
            while self._wanted:
                wanted, self._wanted = self._wanted, {}
                await self._ask_for(wanted)
        finally:
            self._asking = None

    async def _ask_for(self, wanted: dict[str, asyncio.Future[TokenRow | None]]) -> None:
        try:
            rows = await self._server.ask(lambda reader: [reader.token(sha256) for sha256 in wanted])
        except Exception as error:  # noqa: BLE001 - raised again in each request
            for future in wanted.values():
                future.set_exception(error)
                future.exception()  # its request may be gone
        else:
            for future, row in zip(wanted.values(), rows, strict=True):
                future.set_result(row)
