"""The screens of a tasuki server, below /ops/ of its HTTP door; `ServerScreens` is the part that the door calls.

    door ──► ServerScreens.answer ──► Django, on a thread ──► views ──► ServerBackend ──► AsyncClient ──unix socket──► the server

The screens are a client of the server that serves them: its own rules hold, its readers read the store, and its event loop only
moves bytes. Whoever logs in with an admin token has the rights of that token. Whoever opens the link that `tasuki up` prints is
the user of the server, and may also have programs run, as with `tasuki run`. Sessions are in memory: they end with the process.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar
from zipfile import BadZipFile, ZipFile

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tasuki.client.aio import AsyncClient
from tasuki.client.logs import LogFollower
from tasuki.config import DataFolder
from tasuki.core.access import token_sha256
from tasuki.core.address import Address
from tasuki.core.explain import why_not_again
from tasuki.core.job import State
from tasuki.core.subject import DEFAULT_SUBJECT
from tasuki.doors.http.exchange import read_body
from tasuki.errors import Forbidden, InvalidInput, NotFound, Overloaded, TasukiError, TooLarge, Unavailable, quoted
from tasuki.server.assembly import make_secret

if TYPE_CHECKING:
    from django.core.handlers.asgi import ASGIHandler
    from django.http import HttpRequest
    from django.http.response import HttpResponseBase

    from tasuki.django.ops.backend import View

T = TypeVar("T")
SESSION_S = 12 * 3600.0
SESSIONS_MAX = 64
LINK_S = 24 * 3600.0  # for who leaves `tasuki up` in a terminal over night
BODY_MAX_BYTES = 256 * 1024  # of a form
PAGES_AT_ONCE = 2  # they are made on threads of the server's process, which has jobs to serve
STRANGERS_MAX = 64
STRANGER_PAUSE_S = 0.02
ASK_TIMEOUT_S = 20.0
LOGS_READ_MAX_BYTES = 64 * 1024 * 1024  # by one look at a page
PIECE_BYTES = 256 * 1024
COOKIE = "tasuki_ops"
SCREENS = "tasuki.screens"
"""Key of the ServerScreens in the scope of a request."""


class Person(msgspec.Struct, frozen=True):
    """The user of a session; named as the server names the identity behind it. Without a name: nobody."""

    name: str = ""

    is_active = True

    @property
    def is_authenticated(self) -> bool:
        return bool(self.name)

    def get_username(self) -> str:
        return self.name

    def has_perm(self, _permission: str) -> bool:
        """Return True for everybody: only admins get a session, and the server judges each order by itself."""
        return self.is_authenticated

    def __str__(self) -> str:
        return self.name


class _Session(msgspec.Struct, frozen=True):
    person: Person
    client: AsyncClient
    expires_at: float


class ServerScreens:
    """The operations screens of one server. Made and closed inside the server's event loop."""

    def __init__(self, folder: DataFolder) -> None:
        self.folder = folder
        self._url = f"unix://{folder.socket}"
        self._loop = asyncio.get_running_loop()
        self._handler: ASGIHandler | None = None
        self._places = asyncio.Semaphore(PAGES_AT_ONCE)
        self._one_stranger = asyncio.Lock()
        self._strangers = 0
        """Number of requests under way without a session."""
        self._links: dict[str, float] = {}
        """Hashes of the codes of links that nobody has used, with the times at which they end."""
        self._sessions: dict[str, _Session] = {}
        """By the hash of the cookie."""

    # ------------------------------------------------------------------------------------------------ requests

    async def answer(self, request: Request) -> Response:
        """Return the answer of Django to a request that the door has let in."""
        declared = request.headers.get("content-length", "0")
        if "transfer-encoding" in request.headers or not declared.isdecimal() or int(declared) > BODY_MAX_BYTES:
            raise TooLarge(f"a form has at most {BODY_MAX_BYTES} bytes")
        is_known = self.session_of(request.cookies.get(COOKIE, ""))[1] is not None
        if not is_known and self._strangers >= STRANGERS_MAX:
            raise Overloaded("too many people without a session ask for screens at once; try again")
        self._strangers += not is_known
        try:
            body = await read_body(request, lambda size_bytes: None)
            if self._handler is None:
                self._handler = await asyncio.to_thread(_new_handler)
        finally:
            self._strangers -= not is_known
        return _DjangoResponse(partial(self._handle, is_known, body))

    async def _handle(self, is_known: bool, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Have Django make the page when it is its turn. Whoever sends or reads slowly has no place while others wait; people
        without a session have one place, with a pause after each page: it costs what a hundred refusals of a token do."""
        unread = [body]
        place = AsyncExitStack()

        async def receive_body() -> Message:
            return {"type": "http.request", "body": unread.pop()} if unread else await receive()

        async def send_made(message: Message) -> None:
            if message["type"] == "http.response.start":
                await place.aclose()
            await send(message)

        self._strangers += not is_known
        try:
            async with place:
                if not is_known:
                    await place.enter_async_context(self._one_stranger)
                    place.push_async_callback(asyncio.sleep, STRANGER_PAUSE_S)
                await place.enter_async_context(self._places)
                handle: Any = self._handler  # its types are those of asgiref, not Starlette's
                await handle({**scope, SCREENS: self}, receive_body, send_made)
        finally:
            self._strangers -= not is_known

    async def close(self) -> None:
        """Close the connections of all sessions."""
        sessions, self._sessions = self._sessions, {}
        for client in {session.client for session in sessions.values()}:
            await client.close()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the server's event loop, from a thread that makes a page, and return its result."""

        async def in_time() -> T:
            try:
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    return await work
            except TimeoutError:
                raise Unavailable(f"the server has not answered within {ASK_TIMEOUT_S:g} s; try again") from None

        return asyncio.run_coroutine_threadsafe(in_time(), self._loop).result()

    # ------------------------------------------------------------------------------------------------ sessions

    def new_link(self) -> str:
        """Return the path and query of a link that logs the user of the server in: once, from this machine."""
        code = secrets.token_urlsafe(32)
        self._links[token_sha256(code)] = time.monotonic() + LINK_S
        return f"/ops/login/?code={code}"

    async def begin(self, *, code: str = "", token: str = "") -> str:
        """Begin a session by the code of a link, or by a token, and return its cookie; Forbidden or Unauthorized."""
        if code and self._links.pop(token_sha256(code), 0.0) < time.monotonic():
            raise Forbidden("this link was used before, or is too old")
        client = AsyncClient(self._url, token=token, client_id=f"ops-{secrets.token_hex(3)}", connect_timeout_s=ASK_TIMEOUT_S)
        await client.open()
        assert client.welcome is not None
        if client.welcome.kind not in ("admin", "node"):
            await client.close()
            raise Forbidden(f"the screens need an admin token; this one is of kind {client.welcome.kind}")
        now = time.monotonic()
        for key, session in list(self._sessions.items()):
            if session.expires_at < now or len(self._sessions) >= SESSIONS_MAX:
                await self.end(key)
        cookie = secrets.token_urlsafe(32)
        self._sessions[token_sha256(cookie)] = _Session(Person(client.welcome.identity), client, now + SESSION_S)
        return cookie

    def session_of(self, cookie: str) -> tuple[str, _Session | None]:
        """Return the key of a session, and the session itself if it has not ended."""
        key = token_sha256(cookie)
        session = self._sessions.get(key)
        return key, session if session is not None and session.expires_at > time.monotonic() else None

    async def end(self, key: str) -> None:
        """End a session."""
        if (session := self._sessions.pop(key, None)) is not None:
            await session.client.close()


def _new_handler() -> ASGIHandler:
    from django.core.handlers.asgi import ASGIHandler  # not before somebody looks: the import takes longer than a server's start

    return ASGIHandler()


class _DjangoResponse(Response):
    def __init__(self, handle: Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]) -> None:
        super().__init__()
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handle(scope, receive, send)


def with_session(get_response: Callable[[HttpRequest], HttpResponseBase]) -> Callable[[HttpRequest], HttpResponseBase]:
    """Give each request its person and backend: a middleware of Django."""

    def middleware(request: Any) -> HttpResponseBase:
        if "HTTP_ORIGIN" in request.META:  # the door has compared it with its names; Django does not know those of a proxy
            request.META["HTTP_ORIGIN"] = f"{request.scheme}://{request.get_host()}"
        screens: ServerScreens = request.scope[SCREENS]
        key, session = screens.session_of(request.COOKIES.get(COOKIE, ""))
        request.user = session.person if session is not None else Person()
        request.tasuki_backend = backend = ServerBackend(screens, key, session)
        response = get_response(request)
        if backend.cookie is not None:
            options: dict[str, Any] = {"httponly": True, "samesite": "Strict", "secure": request.is_secure(), "path": "/ops/"}
            response.set_cookie(COOKIE, backend.cookie, max_age=int(SESSION_S) if backend.cookie else 0, **options)
        return response

    return middleware


class ServerBackend:
    """The backend of one request to a server's screens, with the rights of its session."""

    screens = frozenset({"result", "tokens", "caches"})
    streams: tuple[str, ...] = ("stdout", "stderr")
    start_worker = "tasuki worker"

    def __init__(self, screens: ServerScreens, key: str, session: _Session | None) -> None:
        self._screens, self._key, self._session = screens, key, session
        self.token_file = str(screens.folder.token_file)
        self.cookie: str | None = None
        """A new cookie for the browser; empty: it is to forget the one that it has."""

    def log_in(self, request: HttpRequest) -> bool:
        """Begin a session by the link of `tasuki up`, or by an admin token. False: it is wrong."""
        code, token = request.GET.get("code", ""), request.POST.get("token", "").strip()
        if not (_is_local(request) and code if request.method == "GET" else token):
            return False
        begun = {"code": code} if request.method == "GET" else {"token": token}
        try:
            self.cookie = self._screens.wait(self._screens.begin(**begun))
        except TasukiError:
            return False
        return True

    def login_problem(self, request: HttpRequest) -> str:
        """Say why a login failed."""
        from django.utils.translation import gettext as _

        if request.method == "GET":
            return _("This link was used before, is too old, or was not opened on the server's own machine.")
        return _("This is not an admin token of this server, or it has ended.")

    def log_out(self, _request: HttpRequest) -> None:
        self._screens.wait(self._screens.end(self._key))
        self.cookie = ""

    # ------------------------------------------------------------------------------------------------ reads

    def _client(self) -> AsyncClient:
        if self._session is None:
            raise Forbidden("this session has ended; log in again")
        return self._session.client

    def _call(self, verb: str, **params: Any) -> Any:
        return self._screens.wait(self._client().call(verb, **params))

    def counts(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = self._call("counts")
        return found

    def statistics(self, since: int, until: int, step_s: int, groups: int) -> list[View]:
        found: list[View] = self._call("statistics", since=since, until=until, step_s=step_s, limit=groups)["periods"]
        return found

    def leader(self) -> tuple[str, int | None]:
        leads = next((server for server in self.servers() if server["leads"]), None)
        return (leads["server_id"], leads["epoch"]) if leads is not None else ("", None)

    def workers(self) -> list[View]:
        found: list[View] = self._call("workers")
        return [{**worker, "actions": ["attach" if worker["detached"] else "detach"]} for worker in found]

    def servers(self) -> list[View]:
        found: list[View] = self._call("servers")
        return found

    def alerts(self) -> Iterator[str]:
        from django.utils.translation import gettext as _

        for server in self.servers():
            if server.get("problem"):
                yield _("Disk or store of %(server)s: %(problem)s") % {
                    "server": server["server_id"],
                    "problem": server["problem"],
                }

    def find(self, *, limit: int, cursor: str | None = None, **wanted: Any) -> tuple[list[View], str | None]:
        given = {name: value for name, value in wanted.items() if value}
        page = self._call("find", limit=limit, cursor=cursor, **given)
        return page["jobs"], page["cursor"]

    def job(self, job_id: str) -> View:
        [view] = self._call("get", job_ids=[job_id])
        found: View = view
        return found

    def explain(self, job_id: str) -> View:
        found: View = self._call("explain", job_id=job_id)
        return found

    def log_tail(self, job_id: str, stream: str, max_bytes: int) -> tuple[bytes, bool]:
        async def read() -> tuple[bytes, bool]:
            data, offset = b"", 0
            follower = LogFollower(self._client(), job_id, stream, tail_bytes=max_bytes)
            async with aclosing(follower.parts(follow=False)) as parts:
                async for part in parts:
                    offset = offset if data else part.offset
                    data = (data + part.text)[-max_bytes:]
                    if part.offset - offset > LOGS_READ_MAX_BYTES:  # it is written faster than it is read
                        break
            return data, offset > 0

        try:
            return self._screens.wait(read())
        except NotFound:  # a handler's job has no logs
            return b"", False

    async def log(self, job_id: str, stream: str) -> AsyncIterator[bytes]:
        async for piece in self._client().logs(job_id, stream, follow=False):
            yield piece

    def log_lines(self, job_id: str, stream: str) -> Iterator[bytes]:
        async def read() -> list[bytes]:
            pieces: list[bytes] = []
            size_bytes = 0
            async with aclosing(self._client().logs(job_id, stream, follow=False)) as found:
                async for piece in found:
                    pieces.append(piece)
                    size_bytes += len(piece)
                    if size_bytes > LOGS_READ_MAX_BYTES:
                        break
            return pieces

        try:
            return iter(self._screens.wait(read()))
        except NotFound:
            return iter(())

    def result(self, job_id: str) -> AsyncIterator[bytes]:
        """Return the pieces of the result of a job that has ended."""
        return _pieces(self._open_result(job_id))

    def result_files(self, job_id: str) -> list[tuple[str, int]]:
        """Return the names and sizes of the files in the result of a program; none: they cannot be read."""
        try:
            with self._open_result(job_id) as file, ZipFile(file) as archive:
                return [(entry.filename, entry.file_size) for entry in archive.infolist()]
        except (TasukiError, BadZipFile):
            return []

    def _open_result(self, job_id: str) -> BinaryIO:
        async def read() -> BinaryIO | None:
            client = self._client()
            return await client.open_result(await client.job(job_id).outcome(ASK_TIMEOUT_S))

        if not State(self.job(job_id)["state"]).terminal or (file := self._screens.wait(read())) is None:
            raise NotFound(f"job {quoted(job_id)} has no result")
        return file

    def audit(self, *, before: int | None, limit: int) -> list[View]:
        found: list[View] = self._call("token.audit", limit=limit, before=before)
        return found

    def agents(self) -> list[View]:
        from tasuki.django.ops.backend import ranked_agents

        return self._screens.wait(ranked_agents(self._screens.folder.root))

    # ------------------------------------------------------------------------------------------------ changes

    def cancel(self, job_ids: Sequence[str], reason: str) -> list[State]:
        answers = self._screens.wait(self._client().cancel(*job_ids, reason=reason))
        return [State(answer.state) for answer in answers.values()]

    def rerun(self, job_ids: Sequence[str], reason: str) -> list[str]:
        answers = self._screens.wait(self._client().retry(*job_ids, reason=reason))
        kept = {job_id: answer for job_id, answer in answers.items() if not answer.done}
        return [why_not_again(job_id, answer.state, answer.still_running) for job_id, answer in kept.items()]

    def programs(self) -> list[str]:
        return []

    def submit(self, program: str, arguments: Sequence[str], subject: str) -> str:
        job = self._client().submit(exec=program, args=tuple(arguments), subject=subject or DEFAULT_SUBJECT, watch=False)
        return self._screens.wait(job).job_id

    def steer(self, worker_id: str, action: str, reason: str) -> None:
        if action == "degrade":
            self._call(action, reason=reason)
        elif action in ("detach", "attach"):
            self._call(action, worker_id=worker_id, reason=reason)
        else:
            text = f"workers of a server are detached and attached; {quoted(action)} is for nodes of a Django project"
            raise InvalidInput(text)

    def pauses(self) -> list[View]:
        found: list[View] = self._call("paused")
        return found

    def set_paused(self, pattern: str, paused: bool, reason: str) -> None:
        self._call("pause" if paused else "resume", pattern=pattern, reason=reason)

    # ------------------------------------------------------------------------------------------------ tokens and caches

    def tokens(self) -> list[View]:
        found: list[View] = self._call("token.list")
        return found

    def create_token(self, kind: str, *, label: str, scope: list[str], valid_s: float | None) -> str:
        """Make a token, and return its secret, which is shown this once."""
        secret, now = make_secret(kind), time.time()
        row = {"token_id": secrets.token_hex(6), "kind": kind, "sha256": token_sha256(secret), "label": label, "scope": scope}
        self._call("token.create", **row, created_at=now, expires_at=None if valid_s is None else now + valid_s)
        return secret

    def revoke_token(self, token_id: str) -> None:
        self._call("token.revoke", token_id=token_id)

    def caches(self) -> list[View]:
        found: list[View] = self._call("cache.list", limit=1000)["caches"]
        return found

    def remove_cache(self, cache_id: str) -> None:
        self._screens.wait(self._client().remove_cache(cache_id))


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        file.seek(0)
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece


def _is_local(request: HttpRequest) -> bool:
    """Return True for a request from this machine, by a name of loopback, that no proxy has passed on."""
    if any(name in request.headers for name in ("X-Forwarded-For", "Forwarded", "X-Real-IP")):
        return False
    host, _, port = request.get_host().rpartition(":")
    if not Address("http", (host if port.isdecimal() else request.get_host()).strip("[]")).loopback:
        return False
    try:
        return ip_address(str(request.META.get("REMOTE_ADDR"))).is_loopback
    except ValueError:
        return False
