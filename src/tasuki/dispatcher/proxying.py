"""Bodies and responses that a dispatcher passes between its clients and the nodes, as streams.

A request body is forwarded as it arrives, or is a form made from the store of inputs. A forwarded body is kept only up to
KEPT_MAX_BYTES: while no more was sent, another node can be sent it too. A form from the store can be sent as often as needed; a
node that fetches inputs itself is sent only their names. Responses keep the headers of the contract of agents, and no others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tasuki.agent.input_sources import StoredInputs
from tasuki.agent.refusals import BODY_READ, input_not_found, log_context
from tasuki.agent.upload import UploadDeadline, UploadForm
from tasuki.client.agents.transfer import ETAG, ZIP_TYPE, read_refusal
from tasuki.core.failover.agent_protocol import InputRecord, input_hash
from tasuki.core.failover.events import Refusal
from tasuki.core.failover.nodes import InputRef
from tasuki.doors.http.uvicorn_server import while_connected
from tasuki.errors import AgentRefusal, InvalidInput, NotFound, TasukiError, Unavailable
from tasuki.net.http.transport import MultipartForm, run_fields

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger("tasuki.dispatcher")
KEPT_MAX_BYTES = 1024 * 1024
PASSED_BYTES = 128 * 1024


class OutgoingBody(NamedTuple):
    """Body of one request to a node."""

    headers: dict[str, str]
    pieces: AsyncGenerator[bytes, None]


class StreamedForm:
    """Body of a request, forwarded as it arrives."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._waiting = bytearray()
        self._deadline = UploadDeadline()
        self._over = asyncio.Event()
        self.spent = False
        """The body cannot be sent once more."""

    def sending(self, *, pulls: bool) -> OutgoingBody:
        """Return the body for one node; `pulls`: the node fetches stored inputs itself."""
        names = ("content-type", "content-length")
        return OutgoingBody(
            {name: self._request.headers[name] for name in names if name in self._request.headers}, self._pieces()
        )

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        for piece in tuple(self._kept):
            yield piece
        while not self._over.is_set():
            piece = await self._some()
            self._keep(piece)
            yield piece

    async def _some(self) -> bytes:
        """Return the next piece; large, so that the answer is noticed meanwhile. A canceled call loses nothing."""
        while len(self._waiting) < PASSED_BYTES and not self._over.is_set():
            # Not request.stream(): a generator that was canceled in the middle would be over for the next node.
            message = await self._deadline.wait(self._request.receive())
            if message["type"] == "http.disconnect":
                self.spent = True
                raise InvalidInput("the upload ended before it was whole")
            self._waiting += message.get("body", b"")
            if not message.get("more_body", False):
                self._over.set()
                self._request.scope[BODY_READ] = True
        piece = bytes(self._waiting)
        self._waiting.clear()
        # Counted when it is passed on, as the node counts: a client that is too slow is refused here before the node gives up,
        # which would look as if the node had lost the job.
        self._deadline.received_bytes += len(piece)
        return piece

    def _keep(self, piece: bytes) -> None:
        self._kept_bytes += len(piece)
        if self._kept_bytes > KEPT_MAX_BYTES:
            self.spent = True
            self._kept.clear()
        else:
            self._kept.append(piece)

    async def client_left(self) -> None:
        """Return when the client has disconnected."""
        await self._over.wait()
        await until_disconnected(self._request)


class StoredForm:
    """Form whose files are in the store of inputs."""

    spent = False

    def __init__(self, request: Request, inputs: StoredInputs, form: UploadForm, files: Sequence[tuple[InputRef, int]]) -> None:
        """`files`: references and sizes, in the order in which they were sent."""
        self._request = request
        self._inputs = inputs
        self._form = form
        self._files = files

    @property
    def exec(self) -> str | None:
        """Name of the exec in the form; None: the agent's default."""
        return self._form.exec

    @property
    def input(self) -> str | None:
        """Input hash; None if the agent chooses the exec."""
        if self._form.exec is None:
            return None
        files = [InputRecord(ref.name, ref.sha256, size_bytes) for ref, size_bytes in self._files]
        return input_hash(self._form.exec, self._form.args, files)

    @property
    def hashes(self) -> list[str]:
        return [ref.sha256 for ref, _ in self._files]

    def sending(self, *, pulls: bool) -> OutgoingBody:
        fetched = self._files if pulls else ()
        sent = () if pulls else self._files
        fields = run_fields(self._form.exec, self._form.args, self._form.timeout_s, [str(ref) for ref, _ in fetched])
        form = MultipartForm(fields, [(ref.name, size_bytes) for ref, size_bytes in sent])
        return OutgoingBody(form.headers, form.pieces(self._content(ref.sha256) for ref, _ in sent))

    async def _content(self, sha256: str) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(self._inputs.pieces(sha256)) as pieces:
                async for piece in pieces:
                    yield piece
        except NotFound:
            raise input_not_found(sha256) from None
        except Unavailable as error:  # this is no failure of the node
            logger.warning("input %s cannot be read: %s", sha256, error.message)
            raise AgentRefusal(503, error.code, "the store of inputs does not answer; try again", retry=True) from error

    async def client_left(self) -> None:
        await until_disconnected(self._request)


RequestBody = StreamedForm | StoredForm


async def until_disconnected(request: Request) -> None:
    """Wait for the client to disconnect, after the body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        """The end of the body."""


PASSED_HEADERS = (
    "content-type", "content-length", "content-range", "content-disposition", "accept-ranges", "etag", "retry-after",
    "tasuki-cache", "tasuki-outcome", "tasuki-left-out",
)  # fmt: skip
NODE_HEADER = "Tasuki-Node"


class NodeRefusal(msgspec.Struct, frozen=True):
    """Response of a node that is not a result."""

    refusal: Refusal
    body: bytes
    headers: dict[str, str]

    def answer(self, node: str) -> Response:
        """Return the response as the node gave it."""
        return Response(self.body, self.refusal.status, {**self.headers, NODE_HEADER: node})


def passed_headers(response: httpx.Response) -> dict[str, str]:
    return {name: response.headers[name] for name in PASSED_HEADERS if name in response.headers}


def check_result(response: httpx.Response, *statuses: int) -> None:
    """Raise Unavailable unless a 2xx response is the result that was asked for."""
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if response.status_code not in statuses or kind != ZIP_TYPE or not ETAG(response.headers.get("etag", "")):
        raise Unavailable(f"the node answered {response.status_code} without a ZIP and its ETag; is it a node agent?")


async def read_node_refusal(response: httpx.Response) -> NodeRefusal:
    refusal, body = await read_refusal(response)
    headers = passed_headers(response)
    headers.pop("content-length", None)
    return NodeRefusal(refusal, body, headers)


class ProxiedResponse(Response):
    """Result from a node. `stack` holds the connection to the node, and is closed at the end."""

    def __init__(
        self,
        job_id: str,
        node: str,
        response: httpx.Response,
        stack: AsyncExitStack,
        on_cut: Callable[[], None],
        more: dict[str, str] | None = None,
    ) -> None:
        """`more`: headers of this dispatcher."""
        super().__init__(status_code=response.status_code)
        for name in ("content-length", "content-type"):
            if name in self.headers:
                del self.headers[name]
        self.headers.update({**passed_headers(response), NODE_HEADER: node, **(more or {})})
        self._job_id = job_id
        self._node = node
        self._response = response
        self._stack = stack
        self._on_cut = on_cut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with log_context(self._job_id):
            try:
                async with self._stack:
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                    if not await while_connected(receive, self._pass_on(send)):
                        logger.info("job %s: the client disconnected before the end of the result", self._job_id)
                        return
            except TasukiError as error:
                # Without the end of the body the server cuts the connection: the client sees that the result is incomplete.
                logger.warning("job %s: its result was cut: %s", self._job_id, error.message)
                self._on_cut()
                return
            await send({"type": "http.response.body", "body": b""})

    async def _pass_on(self, send: Send) -> None:
        async for piece in self._response.aiter_raw():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
