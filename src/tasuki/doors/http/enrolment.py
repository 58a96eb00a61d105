"""/v1/workers: how a worker comes by a token of its own, and what it can learn of it. The apps' registration is the same."""

from __future__ import annotations

import secrets
from typing import Any

from tasuki.core.access import token_sha256
from tasuki.doors.http.context import RequestContext, iso
from tasuki.doors.http.response_schemas import WorkerRegistered, WorkerSelf
from tasuki.server.assembly import make_secret


async def register(call: RequestContext) -> WorkerRegistered:
    """For who has an enrol token, which is spent by this; the worker gets the scope that the token has."""
    secret, token_id = make_secret("worker"), secrets.token_hex(6)
    async with call.house.clients.use(call.caller) as client:
        told = await client.request("worker.register", token_id=token_id, sha256=token_sha256(secret), label=call.body.label)
        if client.users == 1:  # others who show the same token are still to be told that it is spent
            client.talk.leave()
    return registered(secret, told)


def registered(secret: str, told: dict[str, Any]) -> WorkerRegistered:
    """What the server told of the token, and the token itself."""
    return WorkerRegistered(
        worker_id=told["worker_id"],
        worker_token=secret,
        token_id=told["token_id"],
        expires_at=iso(told["expires_at"]),
        ttl_seconds=int(told["ttl_s"]),
        scope=list(told["scope"]),
    )


async def itself(call: RequestContext) -> WorkerSelf:
    """For a worker: whether its token is still good, and what for."""
    identity = call.caller.identity
    expires_at = None if identity.expires_at is None else iso(identity.expires_at)
    return WorkerSelf(worker_id=identity.worker_id, token_id=identity.token_id, scope=list(identity.scope), expires_at=expires_at)
