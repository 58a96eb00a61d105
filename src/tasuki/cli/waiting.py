"""What `run` and `submit --wait` say to a person while they wait. Asks the server, changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tasuki.errors import TasukiError

if TYPE_CHECKING:
    from tasuki.cli.output import Output
    from tasuki.client import AsyncClient

PENDING_S = 3.0  # a job that waits longer than this has a reason that its user should know


@contextlib.contextmanager
def telling_why_pending(client: AsyncClient, waited_for: Callable[[], str | None], output: Output) -> Iterator[None]:
    """Say once why a job still waits for a worker; `waited_for` names one that has not ended."""
    if output.json or output.quiet:
        yield
        return
    telling = asyncio.ensure_future(_tell_why(client, waited_for, output))
    try:
        yield
    finally:
        telling.cancel()


async def _tell_why(client: AsyncClient, waited_for: Callable[[], str | None], output: Output) -> None:
    await asyncio.sleep(PENDING_S)
    job_id = waited_for()
    if job_id is None:
        return
    with contextlib.suppress(TasukiError):  # it is only a hint: whoever may not ask why still gets the result
        told = await client.explain(job_id)
        if told["state"] == "PENDING" and told["because"]:
            output.hint(f"job {job_id} is PENDING: {told['because'][0]}")


class ConnectionNotice:
    """Says once that the connection was lost."""

    def __init__(self, client: AsyncClient, output: Output) -> None:
        self._client = client
        self._output = output
        self._told = False

    def look(self) -> None:
        if not self._client.connected and not self._told:
            self._told = True
            self._output.hint("connection lost; trying again …")
