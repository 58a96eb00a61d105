"""The life of a server process: listen, say where, wait for a signal, end in order. What `up` and `server` share."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple

from tasuki.cli import exit_codes
from tasuki.cli.connect import note_listening
from tasuki.cli.output import encode_json, write_line
from tasuki.core.apps import DEFAULT_APP
from tasuki.core.election import LOCK_TTL_S
from tasuki.event_loop import loop_factory

if TYPE_CHECKING:
    from tasuki.config import Address, DataFolder
    from tasuki.doors.http.door import HttpDoor
    from tasuki.doors.tls import ServerCertificate
    from tasuki.server.presigned import PresignedTransfers
    from tasuki.server.server import Server

logger = logging.getLogger("tasuki.server")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
HURRY_S = 10.0


class Listen(NamedTuple):
    """What a server is told on the command line."""

    folder: DataFolder
    tcp: tuple[Address, ...] = ()
    unix: bool = True
    tls_cert: str | None = None
    tls_key: str | None = None
    insecure: bool = False
    lease_ttl_s: float = 15.0
    retention_days: float = 30.0
    json: bool = False
    store: str = ""
    blobs: str = ""
    advertise: tuple[Address, ...] = ()
    """Where others reach this server, if that is not where it listens."""
    blob_grace_s: float = 3600.0
    blob_budget_bytes: int | None = None
    lead_ttl_s: float = LOCK_TTL_S
    http: Address | None = None
    http_if_free: bool = False
    """Without HTTP rather than not at all, if its port is taken or FastAPI is not installed."""
    apps: tuple[str, ...] = ()
    http_lease_ttl_s: float = 60.0
    coordination: str = ""
    strict: bool = False
    presign: bool = False
    """Peers over HTTP may move large blobs to and from the bucket themselves."""
    presign_endpoint: str = ""
    """Where they reach it, if not where the server does."""


class Events:
    """What happens to a server process, a line each on stdout: plain, or JSON for programs."""

    def __init__(self, *, json: bool) -> None:
        self._json = json

    def tell(self, event: str, text: str = "", **facts: Any) -> None:
        if self._json:
            write_line(encode_json({"event": event, **facts}))
        else:
            write_line(f"{event} {text}".rstrip())

    def say(self, text: str) -> None:
        """For people only."""
        if not self._json:
            write_line(text)


class StopSignals:
    """Signals. The first asks for an orderly end; the second hurries what is still under way, or ends the process at once if
    there is nothing to hurry; after HURRY_S, or at a third, the process is gone in any case.
    """

    def __init__(self, hurry: Callable[[], None] | None = None) -> None:
        self.wanted = asyncio.Event()
        self.exit_code = exit_codes.OK
        self._hurry = hurry
        self._loop = asyncio.get_running_loop()
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._signal, number)

    def _signal(self, number: signal.Signals) -> None:
        if not self.wanted.is_set():
            self.wanted.set()
        elif self._hurry is None:
            self._leave(128 + number)
        else:
            self.exit_code = 128 + number
            self._hurry()
            self._hurry = None
            self._loop.call_later(HURRY_S, self._leave, self.exit_code)

    def _leave(self, code: int) -> None:
        sys.stdout.flush()
        os._exit(code)


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run to the end on the fastest event loop that is installed."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)


def check(listen: Listen) -> None:
    """Refuse what may not be opened, before anything is."""
    from tasuki.config import check_app
    from tasuki.doors.listening import check_listener
    from tasuki.errors import ConfigError

    if (listen.tls_cert is None) != (listen.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key belong together; give both, or none")
    for address in (*listen.tcp, *([listen.http] if listen.http is not None else ())):
        check_listener(address, tls=listen.tls_cert is not None, tokens=True, insecure=listen.insecure)
    if not listen.tcp and not listen.unix and listen.http is None:
        raise ConfigError("nothing to listen on: give --tcp HOST:PORT or --http HOST:PORT, or leave --no-unix out")
    for app in listen.apps:
        check_app(app)
    _check_places(listen)
    _check_presign(listen)


def _check_presign(listen: Listen) -> None:
    from urllib.parse import urlsplit

    from tasuki.blobs.s3.requests import parse_s3_url
    from tasuki.config import Address
    from tasuki.errors import ConfigError

    if not listen.presign:
        if listen.presign_endpoint:
            raise ConfigError("--presign-endpoint says where peers reach the bucket: give --presign too")
        return
    if not listen.blobs.startswith("s3://") or listen.http is None:
        raise ConfigError("--presign is for blobs in S3 and peers over HTTP: give --blobs s3://… and --http HOST:PORT too")
    endpoint = listen.presign_endpoint or parse_s3_url(listen.blobs).endpoint or "https://"
    parts = urlsplit(endpoint)
    if listen.presign_endpoint and (parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc):
        raise ConfigError("--presign-endpoint must be https://host or https://host:port, without credentials")
    if parts.scheme == "http" and not listen.insecure and not Address("http", parts.hostname or "", 0).loopback:
        raise ConfigError(
            f"--presign: links to http://{parts.hostname} would be secrets that anybody on the way can read; use an https "
            "endpoint (--presign-endpoint), or say --insecure if the network is trusted"
        )


def _check_places(listen: Listen) -> None:
    from tasuki.errors import ConfigError
    from tasuki.server.assembly import check_redis_driver, check_store, is_redis

    if listen.store:
        check_store(listen.store)
    if is_redis(listen.store):
        if len(listen.apps) > 1:
            raise ConfigError(
                f"--app {' --app '.join(listen.apps)}: on Redis an app has keys of its own, so a server serves one; "
                "start one server for each app"
            )
    elif listen.apps and listen.http is None:
        raise ConfigError(f"--app {listen.apps[0]} is served over HTTP: give --http HOST:PORT too")
    elif listen.strict:
        raise ConfigError("--strict is about the settings of Redis: give --store redis://…, or leave it out")
    if listen.coordination:
        if not listen.store or is_redis(listen.store):
            raise ConfigError(
                "--coordination is for servers on PostgreSQL; on Redis it is in the store, a data folder has one server"
            )
        if not is_redis(listen.coordination):
            raise ConfigError(f"--coordination {listen.coordination.partition('://')[0][:40]}://…: use redis://host:6379/0")
        check_redis_driver()


class RunningServer:
    """A server whose listeners are open."""

    def __init__(
        self, server: Server, listen: Listen, certificate: ServerCertificate | None, direct: PresignedTransfers | None = None
    ) -> None:
        from tasuki.doors.tcp import TcpDoor

        self.server = server
        self.addresses: list[Address] = []
        self._listen = listen
        self._certificate = certificate
        self._tls = certificate.context if certificate is not None else None
        self._door = TcpDoor(server)
        self._http = _http_door(server, listen, direct) if listen.http is not None else None
        self.http_address: Address | None = None
        self.http_problem = "FastAPI is not installed" if listen.http is not None and self._http is None else ""

    async def reopen(self) -> None:
        """Listen everywhere, and note it in the folder."""
        listen = self._listen
        await self._reopen_http()
        self.addresses = [await self._door.listen_tcp(address, self._tls) for address in listen.tcp]
        if listen.unix:
            self.addresses.append(await self._door.listen_unix(listen.folder.socket))
        note_listening(listen.folder, [*self.addresses, *([self.http_address] if self.http_address is not None else ())])
        reachable = [address for address in self.addresses if address.reachable]
        if listen.store and not (listen.advertise or reachable):
            logger.warning("other servers cannot tell peers where this one is; give --advertise tls://HOST:PORT")
        self.server.reachable_at(tuple(map(str, listen.advertise or reachable)))

    async def _reopen_http(self) -> None:
        from tasuki.errors import ConfigError

        self.http_address = None
        if self._http is None or self._listen.http is None:
            return
        try:
            self.http_address = await self._http.listen(self._listen.http, self._tls)
        except ConfigError as error:
            if not self._listen.http_if_free:
                raise
            self.http_problem = error.message

    def renew_on_hangup(self) -> None:
        """From now on SIGHUP makes it read its certificate again. Without a certificate SIGHUP ends the process, as ever."""
        if self._certificate is not None:
            renew_on_hangup(self._certificate)

    async def shut(self) -> None:
        """Take no more connections; those that are there stay, but for those over HTTP."""
        note_listening(self._listen.folder, [])
        await self._door.close()
        if self._http is not None:
            await self._http.close()


def renew_on_hangup(certificate: ServerCertificate) -> None:
    """From now on SIGHUP makes this process read its certificate again."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _renew, certificate)


def _renew(certificate: ServerCertificate) -> None:
    from tasuki.errors import ConfigError

    try:
        logger.info("the certificate was read again; it is valid until %s", certificate.renew().isoformat())
    except ConfigError as error:
        logger.error("the certificate stays as it was: %s", error.message)


def _http_door(server: Server, listen: Listen, direct: PresignedTransfers | None) -> HttpDoor | None:
    """FastAPI is imported here, not before: it takes longer than all the rest."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        from tasuki.errors import ConfigError

        if listen.http_if_free:
            return None
        raise ConfigError("--http needs FastAPI and uvicorn; install them with: pip install 'tasuki[http]'") from None
    from tasuki.doors.http.context import HttpConfig
    from tasuki.doors.http.door import HttpDoor

    return HttpDoor(server, HttpConfig(apps=listen.apps, lease_ttl_s=listen.http_lease_ttl_s, presigned=direct))


async def _check_ports(addresses: tuple[Address, ...]) -> None:
    """Refuse a port that is taken before a folder is made for nothing. Binds, but never listens."""
    from tasuki.errors import ConfigError

    for address in addresses:
        try:
            probe = await asyncio.get_running_loop().create_server(
                asyncio.Protocol, address.host, address.port, start_serving=False
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address}: {error.strerror or error}; is another server running there?"
            ) from None
        probe.close()
        await probe.wait_closed()


async def hosted(listen: Listen, events: Events, while_open: Callable[[RunningServer], Awaitable[None]]) -> None:
    """A server that is open while `while_open` lasts."""
    from tasuki.config import fault_point
    from tasuki.doors.tls import ServerCertificate
    from tasuki.errors import ConfigError
    from tasuki.server.assembly import StorageLocations, kill_at, make_server, open_direct, prepare_folder
    from tasuki.server.server import ServerConfig

    check(listen)
    certificate = ServerCertificate(listen.tls_cert, listen.tls_key) if listen.tls_cert and listen.tls_key else None
    if not listen.folder.root.exists():
        await _check_ports((*listen.tcp, *([listen.http] if listen.http is not None and not listen.http_if_free else ())))
    prepare_folder(listen.folder)
    config = ServerConfig(
        server_id=new_server_id(),
        data=listen.folder.root,
        lease_ttl_s=listen.lease_ttl_s,
        retention_s=listen.retention_days * 86400.0,
        blob_grace_s=listen.blob_grace_s,
        blob_budget_bytes=listen.blob_budget_bytes,
        host=host_name(),
    )
    places = StorageLocations(
        listen.folder,
        listen.store,
        listen.blobs,
        listen.lead_ttl_s,
        coordination=listen.coordination,
        app=listen.apps[0] if listen.apps else DEFAULT_APP,
        strict=listen.strict,
    )
    try:
        server = make_server(places, config, kill_at(fault_point()))
    except OSError as error:
        raise ConfigError(f"the data folder {listen.folder.root} cannot be written to: {error.strerror or error}") from None
    direct = open_direct(listen.blobs, listen.presign_endpoint) if listen.presign else None
    await server.start()
    # This process is the server's alone: what is alive now stays, so that the collector need not look at it again, nor run
    # after every 700 new containers. It took 6 % of the time under load.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    opened = None
    try:
        if direct is not None:
            await direct.check()
        opened = RunningServer(server, listen, certificate, direct)
        await opened.reopen()
        for address in (*opened.addresses, *([opened.http_address] if opened.http_address is not None else ())):
            events.tell("listening", str(address), address=str(address), pid=os.getpid())
        if opened.http_problem:
            events.tell("without", f"HTTP: {opened.http_problem}", door="http", problem=opened.http_problem)
        await while_open(opened)
    finally:
        if opened is not None:
            await opened.shut()
        if direct is not None:
            direct.close()
        await server.stop()


def host_name() -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname().split(".")[0])[:40] or "server"


def new_server_id() -> str:
    """Of this start: in containers hosts and pids are often the same."""
    return f"{host_name()}-{os.getpid()}-{secrets.token_hex(3)}"
