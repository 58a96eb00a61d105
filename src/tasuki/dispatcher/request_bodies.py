"""What is sent to a node: the client's own body as it comes in, or a form made of what lies in the store of inputs.

A body that is passed through is not kept, but for its first KEPT_MAX_BYTES: while that is all that was sent, another node can
be sent it too. What lies in the store can be sent as often as needed; to a node that fetches inputs itself, only their names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple, Protocol

from starlette.requests import Request

from tasuki.agent.guard import BODY_OVER
from tasuki.agent.input_sources import StoredInputs, missing
from tasuki.agent.upload import UploadForm
from tasuki.core.failover.agent_protocol import InputRecord, input_hash
from tasuki.core.failover.dispatch_policy import InputRef
from tasuki.errors import AgentRefusal, InvalidInput, NotFound, Unavailable
from tasuki.net.http.multipart import MultipartForm, run_fields

logger = logging.getLogger("tasuki.dispatcher")
KEPT_MAX_BYTES = 1024 * 1024
PASSED_BYTES = 128 * 1024


class Sending(NamedTuple):
    """One request's body."""

    headers: dict[str, str]
    pieces: AsyncGenerator[bytes, None]


class RequestBody(Protocol):
    """What a job is sent with."""

    @property
    def spent(self) -> bool:
        """It cannot be sent once more."""
        ...

    @property
    def unread(self) -> bool:
        """The client may still be sending."""
        ...

    def sending(self, *, pulls: bool) -> Sending:
        """For one node; `pulls`: it fetches stored inputs itself."""
        ...

    async def left(self) -> None:
        """Returns when the client has gone."""
        ...


class StreamedForm:
    """The body of a request, passed on as it comes."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._waiting = bytearray()
        self._over = asyncio.Event()
        self.spent = False

    @property
    def unread(self) -> bool:
        return not self._over.is_set()

    def sending(self, *, pulls: bool) -> Sending:
        names = ("content-type", "content-length")
        return Sending({name: self._request.headers[name] for name in names if name in self._request.headers}, self._pieces())

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        for piece in tuple(self._kept):
            yield piece
        while not self._over.is_set():
            piece = await self._some()
            self._keep(piece)
            yield piece

    async def _some(self) -> bytes:
        """What comes next, in pieces so large that the answer is listened for meanwhile. Canceled, it is there for the next."""
        while len(self._waiting) < PASSED_BYTES and not self._over.is_set():
            # Not request.stream(): a generator that was canceled in the middle would be over for the next node.
            message = await self._request.receive()
            if message["type"] == "http.disconnect":
                self.spent = True
                raise InvalidInput("the upload ended before it was whole")
            self._waiting += message.get("body", b"")
            if not message.get("more_body", False):
                self._over.set()
                self._request.scope[BODY_OVER] = True
        piece = bytes(self._waiting)
        self._waiting.clear()
        return piece

    def _keep(self, piece: bytes) -> None:
        self._kept_bytes += len(piece)
        if self._kept_bytes > KEPT_MAX_BYTES:
            self.spent = True
            self._kept.clear()
        else:
            self._kept.append(piece)

    async def left(self) -> None:
        await self._over.wait()
        await until_gone(self._request)


class StoredForm:
    """A form whose files lie in the store."""

    spent = False
    unread = False

    def __init__(self, request: Request, inputs: StoredInputs, form: UploadForm, files: Sequence[tuple[InputRef, int]]) -> None:
        """`files` with their sizes, in the order in which they were sent."""
        self._request = request
        self._inputs = inputs
        self._form = form
        self._files = files

    @property
    def exec(self) -> str | None:
        """As the form names it; None: the agent's default."""
        return self._form.exec

    @property
    def input(self) -> str | None:
        """The input hash; None where the agent chooses the exec."""
        if self._form.exec is None:
            return None
        files = [InputRecord(ref.name, ref.sha256, size_bytes) for ref, size_bytes in self._files]
        return input_hash(self._form.exec, self._form.args, files)

    @property
    def hashes(self) -> list[str]:
        return [ref.sha256 for ref, _ in self._files]

    def sending(self, *, pulls: bool) -> Sending:
        fetched = self._files if pulls else ()
        sent = () if pulls else self._files
        fields = run_fields(self._form.exec, self._form.args, self._form.timeout_s, [str(ref) for ref, _ in fetched])
        form = MultipartForm(fields, [(ref.name, size_bytes) for ref, size_bytes in sent])
        return Sending(form.headers, form.pieces(self._content(ref.sha256) for ref, _ in sent))

    async def _content(self, sha256: str) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(self._inputs.pieces(sha256)) as pieces:
                async for piece in pieces:
                    yield piece
        except NotFound:
            raise missing(sha256) from None
        except Unavailable as error:  # not to be taken for the node's failure
            logger.warning("input %s cannot be read: %s", sha256, error.message)
            raise AgentRefusal(503, error.code, "the store of inputs does not answer; try again", retry=True) from error

    async def left(self) -> None:
        await until_gone(self._request)


async def until_gone(request: Request) -> None:
    """After the body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        """What came was the end of the body."""
