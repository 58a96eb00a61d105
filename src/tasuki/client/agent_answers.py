"""What a node agent or a dispatcher answers instead of a result. Reads answers, touches nothing else."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tasuki.core.failover.events import Refusal
from tasuki.net.http.transport import said_in

if TYPE_CHECKING:
    import httpx

_seconds = re.compile(r"\d{1,6}").fullmatch


class Refusing(Exception):
    """The node answered something else than a result."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.words())
        self.refusal = refusal


class NotOurs(Refusing):
    """The node is well, and does not take our token."""


class Elsewhere(Refusing):
    """A dispatcher answered that another node is to be asked the same."""

    def __init__(self, refusal: Refusal, location: str) -> None:
        super().__init__(refusal)
        self.location = location


async def refusal_of(response: httpx.Response) -> Refusal:
    """An answer that is not 2xx, read to its end."""
    said = await said_in(response)
    retry_after = response.headers.get("retry-after", "")
    retry_after_s = float(retry_after) if _seconds(retry_after) else None
    if said is None:
        where = response.headers.get("location", "")[:200]
        return Refusal(response.status_code, "", f"it leads to {where}" if where else "", retry_after_s)
    exit_code, error_code, differs = (said.details.get(name) for name in ("exit_code", "error_code", "differs"))
    return Refusal(
        response.status_code,
        said.code,
        said.message,
        retry_after_s,
        exit_code if isinstance(exit_code, int) else None,
        error_code if isinstance(error_code, str) else None,
        tuple(str(field) for field in differs) if isinstance(differs, list) else (),
    )
