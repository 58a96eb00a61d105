"""Enrolment of a worker over HTTP: exchange an enrol token for a worker token, and ask whether a worker token is valid.

httpx is slow to import: this module is imported only where a worker enrols.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence

import msgspec

from tasuki.core.address import Address
from tasuki.core.decoding import decodable
from tasuki.core.reconnect import CONNECT_TIMEOUT_S
from tasuki.errors import NoConnection, NotTasuki, Unauthorized, Unavailable
from tasuki.net.http.transport import HttpTransport, read_body

REGISTER_PATH = "/v1/workers/register"
SELF_PATH = "/v1/workers/self"
ANSWER_MAX_BYTES = 64 * 1024
ASK_AGAIN = "ask for another one at the server: tasuki token enroll"


@decodable
class Registration(msgspec.Struct, kw_only=True):
    """The answer of the server. It never tells `worker_token` again."""

    worker_id: str
    worker_token: str
    token_id: str
    ttl_seconds: float
    scope: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Registration({self.worker_id})"


async def register(
    addresses: Sequence[Address], tls: ssl.SSLContext | None, enrol_token: str, label: str, subjects: Sequence[str] = ()
) -> Registration:
    """Spend the enrol token at the first server that answers. The message of an error says whether it is spent.

    Forbidden, and not spent, if it is not for all of these subjects.
    """
    away: list[str] = []
    for address in addresses:
        try:
            return await _register_at(address, tls, enrol_token, {"label": label, "subjects": subjects})
        except NoConnection as error:
            away.append(error.message)
    raise Unavailable(f"{'; '.join(away)}; the enrol token was not used")


async def _register_at(address: Address, tls: ssl.SSLContext | None, enrol_token: str, facts: dict[str, object]) -> Registration:
    body = msgspec.json.encode(facts)
    lost = ""
    for _ in range(2):  # the second try tells whether the first was done, though its answer was lost
        try:
            answer = await _ask(address, tls, enrol_token, "POST", REGISTER_PATH, body)
            return msgspec.json.decode(answer, type=Registration)
        except msgspec.DecodeError:
            problem = f"{address} answered a registration with something else; is this a tasuki server? {ASK_AGAIN}"
            raise NotTasuki(problem) from None
        except NoConnection:
            if not lost:
                raise
        except Unavailable as error:
            lost = error.message
        except Unauthorized as error:
            if lost:
                why = f"the answer with the worker's token was lost ({lost}), and the enrol token is spent"
            else:
                why = f"the enrol token is refused: {error.message.removesuffix('; ask for another one')}"
            raise Unauthorized(f"{why}; {ASK_AGAIN}") from None
    raise Unavailable(
        f"{lost}; it is not known whether the enrol token was used: try it again, and if it is refused, {ASK_AGAIN}"
    )


async def is_good(addresses: Sequence[Address], tls: ssl.SSLContext | None, token: str) -> bool:
    """Return whether the servers accept this worker token. Unavailable if none of them answers."""
    away: list[str] = []
    for address in addresses:
        try:
            await _ask(address, tls, token, "GET", SELF_PATH)
        except Unauthorized:
            return False
        except Unavailable as error:
            away.append(error.message)
        else:
            return True
    raise Unavailable("; ".join(away))


async def _ask(
    address: Address, tls: ssl.SSLContext | None, token: str, method: str, path: str, body: bytes | None = None
) -> bytes:
    transport = HttpTransport(address, tls, CONNECT_TIMEOUT_S)
    transport.token = token
    headers = {"Content-Type": "application/json"} if body is not None else None
    try:
        async with transport.exchange(method, path, headers=headers, content=body) as response:
            return await read_body(response, ANSWER_MAX_BYTES)
    finally:
        await transport.close()
