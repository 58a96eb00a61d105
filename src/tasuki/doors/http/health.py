"""/healthz, /readyz: is the process there, and can it keep its promises? For load balancers; they have no token."""

from __future__ import annotations

import asyncio

from tasuki.doors.http.context import HttpContext
from tasuki.doors.http.response_schemas import Health
from tasuki.errors import Unavailable

STORE_TIMEOUT_S = 2.0


async def healthz(house: HttpContext) -> Health:
    """The event loop turns."""
    return Health()


async def readyz(house: HttpContext) -> Health:
    """The store answers, and there is room; else 503. Says no more than that: whoever asks has shown no token."""
    broker = house.server.broker
    if broker.disk_problem:
        raise Unavailable("there is too little space for new jobs")
    if broker.store_problem:
        raise Unavailable("the store does not take writes")
    try:
        async with asyncio.timeout(STORE_TIMEOUT_S):
            await house.server.ask(lambda reader: reader.epoch())
    except TimeoutError:
        raise Unavailable("the store does not answer") from None
    return Health("ready")
