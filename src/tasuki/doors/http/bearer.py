"""The token that a request brings: `Authorization: Bearer TOKEN`. Whether it is good is for others to say."""

from __future__ import annotations

from starlette.requests import Request

from tasuki.errors import Unauthorized

SECRET_MAX_CHARS = 512


def secret_of(request: Request) -> str:
    """The bearer token; Unauthorized if there is none."""
    given = request.headers.getlist("authorization")
    if len(given) > 1:
        raise Unauthorized("there are several Authorization headers; send one")
    scheme, _, secret = (given[0] if given else "").partition(" ")
    secret = secret.strip()
    if scheme.lower() != "bearer" or not secret:
        raise Unauthorized("a token is needed: send the header Authorization: Bearer TOKEN")
    if len(secret) > SECRET_MAX_CHARS or not secret.isascii() or not secret.isprintable():
        raise Unauthorized("what the Authorization header has is not a token")
    return secret
