"""`tasuki server`: a server without workers, on a data folder, or one of several on PostgreSQL or Redis.

The life of a server process is here too, for `server` and `up`: check the options, open the store, listen, print where, wait for
a signal, end in order.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import urlsplit

import click
import msgspec

from tasuki.cli import command as cli
from tasuki.cli import process
from tasuki.cli.connect import note_listening
from tasuki.cli.output import Output
from tasuki.config import (
    check_app,
    data_folder,
    fault_hook,
    parse_http,
    parse_listen,
    user_key,
)
from tasuki.core.address import Address, parse_url, shown_address
from tasuki.core.apps import DEFAULT_APP, AppLimits, template_of
from tasuki.core.election import LOCK_TTL_S
from tasuki.core.job import BUDGET_MAX, TIMEOUT_MAX_S
from tasuki.core.lifecycle import (
    BLOB_GRACE_S,
    GRACE_MAX_S,
    HTTP_LEASE_TTL_S,
    LEASE_TTL_MAX_S,
    LEASE_TTL_RANGE_S,
    LEASE_TTL_S,
    RETENTION_DAYS,
)
from tasuki.core.routing import ROUTE_WAIT_S, Policy, parse_routes
from tasuki.core.units import DAY_S, parse_size
from tasuki.doors.listening import Connections, ServerCertificate, raise_open_files
from tasuki.doors.tcp import TcpDoor
from tasuki.errors import ConfigError, NotFound, Overloaded
from tasuki.server.assembly import (
    StorageLocations,
    check_redis_driver,
    check_store,
    is_redis,
    make_server,
    open_presigned,
)
from tasuki.server.backup import prepare_folder
from tasuki.server.server import Server, ServerConfig
from tasuki.server.transfers import PresignedTransfers

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from tasuki.django.conf import AlertSettings
    from tasuki.django.ops.server_backend import ServerScreens
    from tasuki.doors.http.door import HttpDoor
    from tasuki.doors.http.payload_checks import PayloadCheck

logger = logging.getLogger("tasuki.server")
DEFAULT_TCP = "127.0.0.1:7000"

tcp_option = cli.several("--tcp", metavar="HOST:PORT", help=f"Listen here, several times; port 0: any. Default: {DEFAULT_TCP}.")
no_tcp_option = cli.flag("--no-tcp", help="Listen on the unix socket only.")
store_option = cli.option(
    "--store",
    metavar="URL",
    envvar="TASUKI_STORE",
    help="postgresql://user@host/database or redis://host:6379/0 (rediss://, redis+sentinel://), which several servers may "
    "share. An address with a password belongs into the variable: others can read the command line. "
    "Default: SQLite in the data folder.",
)
blobs_option = cli.option(
    "--blobs",
    metavar="URL",
    envvar="TASUKI_BLOBS",
    help="Large inputs and results: s3://bucket/prefix[?endpoint=URL], or a folder. Default: in the data folder.",
)
LEASE_RANGE = cli.Duration(*LEASE_TTL_RANGE_S)
retention_option = cli.duration(
    "--retention",
    type=cli.Duration(0, 36_500 * DAY_S, above=True, with_unit=True),
    default=RETENTION_DAYS * DAY_S,
    help="How long finished jobs and results are kept.",
)
lead_ttl_option = cli.duration(
    "--lead-ttl",
    type=cli.Duration(0.1, 3600),
    default=LOCK_TTL_S,
    help="With --store: how soon another server takes over the duties.",
)


class AppOptions(NamedTuple):
    """The apps that a server serves below /calc."""

    names: tuple[str, ...] = ()
    limits: AppLimits = AppLimits()
    payload_checks: Mapping[str, PayloadCheck] = MappingProxyType({})

    @classmethod
    def of(cls, app: tuple[str, ...], app_retries: int, app_backoff: float, app_timeout: float | None) -> Self:
        """Return the checked options; a schema is read here."""
        given = [(check_app(name), file) for name, _, file in (text.partition("=") for text in app)]
        checks = {name: _payload_check(name, file) for name, file in given if file}
        limits = AppLimits(max_retries=app_retries, backoff_s=app_backoff, timeout_s=app_timeout)
        return cls(tuple(dict.fromkeys(name for name, _ in given)), limits, checks)

    @property
    def of_keys(self) -> str:
        """The app whose keys a Redis has."""
        return self.names[0] if self.names else DEFAULT_APP


def _payload_check(app: str, file: str) -> PayloadCheck:
    process.check_http_installed()
    from tasuki.doors.http.payload_checks import PayloadCheck

    return PayloadCheck(app, Path(file))


class WebhookOptions(NamedTuple):
    """The receiver of a server's alerts."""

    webhook: str | None = None
    webhook_secret: Path | None = None
    webhook_on: tuple[str, ...] = ()
    webhook_private: bool = False

    def alerts(self, places: StorageLocations) -> AlertSettings | None:
        """Return the checked settings; None: there is no receiver."""
        if self.webhook is None:
            if any(self):
                raise ConfigError("--webhook-secret, --webhook-on and --webhook-private need a receiver: give --webhook URL too")
            return None
        if is_redis(places.store):
            raise ConfigError("--webhook needs a SQL store, which keeps alerts until they are taken; on Redis watch /metrics")
        from tasuki.django.conf import AlertSettings, AlertTarget, check_receiver

        try:
            check_receiver(self.webhook)
        except ValueError as error:
            raise ConfigError(f"--webhook: {error}") from None
        secret = ""
        if self.webhook_secret is not None and not (secret := self.webhook_secret.read_text("utf-8").strip()):
            raise ConfigError(f"--webhook-secret: the file {self.webhook_secret} is empty; write the key of the signature to it")
        given: dict[str, Any] = {"url": self.webhook, "secret": secret, "allow_private": self.webhook_private}
        if self.webhook_on:
            given["on"] = self.webhook_on
        try:
            return AlertSettings(everything=msgspec.convert(given, AlertTarget))
        except msgspec.ValidationError as error:
            raise ConfigError(f"--webhook-on: {error}") from None


webhook_options = cli.options(
    cli.option(
        "--webhook",
        metavar="URL",
        help="POST alerts here: jobs that failed for good, no leader. On a SQL store; the same for all its servers.",
    ),
    cli.option("--webhook-secret", metavar="FILE", type=cli.PATH, help="File with the key that signs them."),
    cli.several("--webhook-on", metavar="KIND", help="Only these: failure (an attempt), dead_letter, no_leader. Several times."),
    cli.flag("--webhook-private", help="The receiver may be at a loopback, private or link-local address."),
    cli.gather("webhook", WebhookOptions),
)

DEFAULT_LIMITS = AppLimits()
app_options = cli.options(
    cli.several(
        "--app",
        metavar="NAME[=SCHEMA]",
        help="With --http: serve /calc/NAME, its jobs and workers; with a file, payloads that do not fit its JSON Schema are "
        "refused. Several times; on Redis once, it is the prefix of the keys.",
    ),
    cli.number(
        "--app-retries",
        metavar="N",
        type=click.IntRange(0, BUDGET_MAX),
        default=DEFAULT_LIMITS.max_retries,
        help="How often a job of an app is tried again, unless the job has a number of its own.",
    ),
    cli.duration(
        "--app-backoff",
        type=cli.Duration(0, TIMEOUT_MAX_S),
        default=DEFAULT_LIMITS.backoff_s,
        help="The delay of its first retry, which doubles with each.",
    ),
    cli.duration(
        "--app-timeout",
        type=cli.Duration(0, TIMEOUT_MAX_S, above=True),
        help="The time limit of its attempts. Default: none.",
    ),
    cli.gather("apps", AppOptions.of),
)


@cli.command(
    "server",
    examples=[
        "tasuki server --data /srv/tasuki",
        "tasuki server --data /srv/tasuki --tcp 0.0.0.0:7000 --tls-cert cert.pem --tls-key key.pem",
        "tasuki server --store postgresql://tasuki@db/tasuki --blobs s3://bucket/tasuki --tcp 10.0.0.1:7000 "
        "--tls-cert cert.pem --tls-key key.pem      # one of several",
        "tasuki server --http 0.0.0.0:7080 --tls-cert cert.pem --tls-key key.pem --app zpe      # workers behind NAT",
        "tasuki server --store redis://127.0.0.1:6379/0 --http 127.0.0.1:7080 --app zpe      # one of several",
        'tasuki server --tcp 127.0.0.1:0 --no-unix --json      # any free port, printed as {"event": "listening", …}',
    ],
)
@cli.data_option
@tcp_option
@no_tcp_option
@cli.option("--unix/--no-unix", default=True, help="Listen on the data folder's unix socket.")
@cli.tls_options
@store_option
@blobs_option
@cli.several("--advertise", metavar="URL", help="Where others reach this server: tls://host:7000. Default: as --tcp.")
@cli.duration("--lease-ttl", type=LEASE_RANGE, default=LEASE_TTL_S, help="How long a silent worker keeps its jobs.")
@cli.duration(
    "--lease-ttl-max",
    type=LEASE_RANGE,
    default=LEASE_TTL_MAX_S,
    help="Longest lease that a worker gets if it asks; at least --lease-ttl and --http-lease-ttl.",
)
@cli.duration(
    "--grace-max",
    type=cli.Duration(0, DAY_S),
    default=GRACE_MAX_S,
    help="Longest --reconnect-grace of a worker that is granted.",
)
@retention_option
@cli.duration(
    "--blob-grace",
    default=BLOB_GRACE_S,
    help="How long a blob that no job needs is kept after its last use.",
)
@cli.option("--blob-budget", metavar="SIZE", help="What all blobs may take, as 500GB: unused ones then go sooner.")
@cli.several(
    "--route", metavar="PATTERN=POLICY", help=f"Choose workers for these subjects by {', '.join(Policy)}; several times."
)
@cli.duration("--route-wait", default=ROUTE_WAIT_S, help="Longest wait of a routed job for a worker that is full.")
@lead_ttl_option
@cli.option("--http", metavar="HOST:PORT", help="Serve HTTP here (HTTPS with --tls-cert); port 0: any. Default: none.")
@app_options
@cli.duration(
    "--http-lease-ttl",
    type=LEASE_RANGE,
    default=HTTP_LEASE_TTL_S,
    help="How long a silent worker of an app (/calc) keeps its jobs.",
)
@cli.coordination_option
@cli.flag("--strict", help="With Redis: refuse to start if its settings may lose jobs, or without --blobs, instead of a warning.")
@cli.flag(
    "--presign",
    help="With --blobs s3://… and --http: peers over HTTP move large blobs straight to and from the bucket, by links "
    "that are good for some minutes. Peers that cannot reach the bucket go on through the server.",
)
@cli.option("--presign-endpoint", metavar="URL", help="Where peers reach the bucket, if not where this server does.")
@webhook_options
@cli.log_level_option
def server(
    output: Output,
    data: Path | None,
    tcp: tuple[str, ...],
    no_tcp: bool,
    unix: bool,
    tls: cli.TlsOptions,
    store: str | None,
    blobs: str | None,
    advertise: tuple[str, ...],
    lease_ttl: float,
    lease_ttl_max: float,
    grace_max: float,
    retention: float,
    blob_grace: float,
    blob_budget: str | None,
    route: tuple[str, ...],
    route_wait: float,
    lead_ttl: float,
    http: str | None,
    apps: AppOptions,
    http_lease_ttl: float,
    coordination: str | None,
    strict: bool,
    presign: bool,
    presign_endpoint: str | None,
    webhook: WebhookOptions,
    log_level: str,
) -> int:
    """SIGTERM or Ctrl-C ends it in order, a second one at once. SIGHUP makes it read --tls-cert and --tls-key again."""
    process.configure_log(log_level, json=output.json)
    folder = data_folder(data)
    listen = ListenOptions(
        tcp=() if no_tcp else tuple(parse_listen(text) for text in tcp or [DEFAULT_TCP]),
        unix=unix,
        http=parse_http(http) if http else None,
        tls=tls,
        advertise=tuple(address for url in advertise for address in parse_url(url)),
        apps=apps,
        http_lease_ttl_s=http_lease_ttl,
        presign=presign,
        presign_endpoint=presign_endpoint or "",
    )
    template = template_of(apps.of_keys, apps.limits)
    places = StorageLocations(folder, store or "", blobs or "", lead_ttl, coordination or "", apps.of_keys, strict, template)
    config = process.server_config(
        folder.root,
        key=b"" if store or not unix else _key(),
        lease_ttl_s=lease_ttl,
        lease_ttl_max_s=max(lease_ttl_max, http_lease_ttl),
        grace_max_s=grace_max,
        apps=apps.names,
        retention_s=retention,
        blob_grace_s=blob_grace,
        blob_budget_bytes=parse_size(blob_budget) if blob_budget else None,
        routes=parse_routes(route),
        route_wait_s=route_wait,
    )
    options = ServerOptions(listen, places, config, webhook.alerts(places))
    return process.run_loop(_main(options, process.Events(json=output.json)))


def _key() -> bytes:
    """Return the key of this user; empty if it cannot be kept: most servers have no workers that need it."""
    try:
        return user_key()
    except ConfigError as error:
        logger.warning("workers with --any-program will run nothing that is submitted here: %s", error.message)
    return b""


async def _main(options: ServerOptions, events: process.Events) -> int:
    raise_open_files()
    stop = process.StopSignals()

    async def until_stopped(opened: RunningServer) -> None:
        process.renew_on_hangup(opened.certificate)
        folder = options.places.folder
        events.emit("ready", f"data {folder.root}", data=str(folder.root), token_file=str(folder.token_file))
        await stop.wanted.wait()
        events.emit("stopping")

    await serve(options, events, until_stopped)
    return 0


# ---------------------------------------------------------------------------------------------------- options, checked


class ListenOptions(NamedTuple):
    """The listeners of a server, and what it serves over HTTP."""

    tcp: tuple[Address, ...] = ()
    unix: bool = True
    http: Address | None = None
    http_if_free: bool = False
    """Start without HTTP if its port is taken or FastAPI is not installed."""
    tls: cli.TlsOptions = cli.TlsOptions()
    advertise: tuple[Address, ...] = ()
    """Addresses by which others reach this server, if not those it listens on."""
    apps: AppOptions = AppOptions()
    http_lease_ttl_s: float = HTTP_LEASE_TTL_S
    presign: bool = False
    """Let peers over HTTP move large blobs to and from the bucket themselves."""
    presign_endpoint: str = ""
    """Address by which peers reach the bucket, if not that of the server."""


class ServerOptions(NamedTuple):
    """One server process: where it listens, where it keeps its data, and its settings."""

    listen: ListenOptions
    places: StorageLocations
    config: ServerConfig
    alerts: AlertSettings | None = None


def check(options: ServerOptions) -> None:
    """Raise ConfigError for options that cannot work, before anything is opened."""
    listen = options.listen
    listen.tls.check(*listen.tcp, *([listen.http] if listen.http is not None else []))
    if not listen.tcp and not listen.unix and listen.http is None:
        raise ConfigError("nothing to listen on: give --tcp HOST:PORT or --http HOST:PORT, or leave --no-unix out")
    _check_places(options.places, listen)
    _check_presign(listen, options.places.blobs)


def _check_presign(listen: ListenOptions, blobs: str) -> None:

    from tasuki.blobs.s3.requests import parse_s3_url

    if not listen.presign:
        if listen.presign_endpoint:
            raise ConfigError("--presign-endpoint names the bucket that peers reach: give --presign too")
        return
    if not blobs.startswith("s3://") or listen.http is None:
        raise ConfigError("--presign is for blobs in S3 and peers over HTTP: give --blobs s3://… and --http HOST:PORT too")
    endpoint = listen.presign_endpoint or parse_s3_url(blobs).endpoint or "https://"
    parts = urlsplit(endpoint)
    if listen.presign_endpoint and (parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc):
        raise ConfigError("--presign-endpoint must be https://host or https://host:port, without credentials")
    if parts.scheme == "http" and not listen.tls.insecure and not Address("http", parts.hostname or "", 0).loopback:
        raise ConfigError(
            f"--presign: links to http://{parts.hostname} would be secrets that anybody on the way can read; use an https "
            "endpoint (--presign-endpoint), or give --insecure if the network is trusted"
        )


def _check_places(places: StorageLocations, listen: ListenOptions) -> None:
    if places.store:
        check_store(places.store)
    if is_redis(places.store):
        if len(listen.apps.names) > 1:
            raise ConfigError(
                f"--app {' --app '.join(listen.apps.names)}: on Redis an app has keys of its own, so a server serves one; "
                "start one server for each app"
            )
        if places.strict and not places.blobs:
            raise ConfigError(
                "--strict: results above 64 KiB would be on this machine's disk, where no other server can read them; "
                "give --blobs s3://…, or --blobs FOLDER if this server stays the only one"
            )
    elif listen.apps.names and listen.http is None:
        raise ConfigError(f"--app {listen.apps.names[0]} is served over HTTP: give --http HOST:PORT too")
    elif places.strict:
        raise ConfigError("--strict is about the settings of Redis: give --store redis://…, or leave it out")
    if places.coordination:
        if not places.store or is_redis(places.store):
            raise ConfigError(
                "--coordination is for servers on PostgreSQL; on Redis it is in the store, a data folder has one server"
            )
        if not is_redis(places.coordination):
            raise ConfigError(f"--coordination {shown_address(places.coordination)!r}: use redis://host:6379/0")
        check_redis_driver()


# ---------------------------------------------------------------------------------------------------- the process


class RunningServer:
    """A server with its listeners."""

    def __init__(
        self, server: Server, options: ServerOptions, certificate: ServerCertificate | None, presigned: PresignedTransfers | None
    ) -> None:
        self.server = server
        self.addresses: list[Address] = []
        self._listen = listen = options.listen
        self._places = options.places
        self.certificate = certificate
        self._tls = certificate.context if certificate is not None else None
        full = Overloaded(
            "there is no room for all connections; one without a token, or beyond the share of its token, was closed"
        )
        connections = Connections(lambda address: server.refusals.error(address, full))
        self._door = TcpDoor(server, connections)
        self._screens = _screens(options) if listen.http is not None else "there is no HTTP"
        self._http = _http_door(server, listen, presigned, connections, self._screens) if listen.http is not None else None
        self.http_address: Address | None = None
        self.http_problem = "FastAPI is not installed" if listen.http is not None and self._http is None else ""

    async def reopen(self) -> None:
        """Open all listeners, and note their addresses in the folder."""
        listen, folder = self._listen, self._places.folder
        self.http_address = None
        if self._http is not None and listen.http is not None:
            try:
                self.http_address = await self._http.listen(listen.http, self._tls)
            except ConfigError as error:
                if not listen.http_if_free:
                    raise
                self.http_problem = error.message
        self.addresses = [await self._door.listen_tcp(address, self._tls) for address in listen.tcp]
        if listen.unix:
            self.addresses.append(await self._door.listen_unix(folder.socket))
        note_listening(folder, self.all_addresses)
        reachable = [address for address in self.addresses if address.reachable]
        if self._places.store and not (listen.advertise or reachable):
            logger.warning("other servers cannot pass on the address of this one; give --advertise tls://HOST:PORT")
        self.server.reachable_at(tuple(map(str, listen.advertise or reachable)))

    def new_login_link(self) -> str | None:
        """Return a link that opens the operations screens, once and on this machine; None if there are none on loopback."""
        if (address := self.http_address) is None or isinstance(self._screens, str):
            return None
        if not (address.loopback or address.reachable):  # a wildcard
            address = msgspec.structs.replace(address, host="::1" if ":" in address.host else "127.0.0.1")
        return f"{address}{self._screens.new_link()}" if address.loopback else None

    @property
    def all_addresses(self) -> list[Address]:
        return [*self.addresses, *([] if self.http_address is None else [self.http_address])]

    async def shut(self) -> None:
        """Accept no more connections; open ones stay, except those over HTTP."""
        note_listening(self._places.folder, [])
        if not isinstance(self._screens, str):
            await self._screens.close()
        await self._door.close()
        if self._http is not None:
            await self._http.close()


def _screens(options: ServerOptions) -> ServerScreens | str:
    """Return the operations screens, or the reason why there are none."""
    if is_redis(options.places.store):
        return "the operations screens need a SQL store; this server is on Redis, and has none"
    if not options.listen.unix:
        return "the operations screens use the server's unix socket; leave --no-unix out"
    if find_spec("django_htmx") is None:
        return "the operations screens need django-htmx; install it with: pip install 'tasuki[server]'"
    from tasuki.django.ops.server_backend import ServerScreens

    return ServerScreens(options.places.folder)


def _http_door(
    server: Server,
    listen: ListenOptions,
    presigned: PresignedTransfers | None,
    connections: Connections,
    screens: ServerScreens | str,
) -> HttpDoor | None:
    """Return the HTTP door. FastAPI is imported here, not before: its import takes longer than all the rest."""
    if listen.http_if_free and not process.http_installed():
        return None
    process.check_http_installed()
    from tasuki.doors.http.context import HttpConfig
    from tasuki.doors.http.door import HttpDoor

    config = HttpConfig(
        apps=listen.apps.names,
        host_names=listen.tls.host_name,
        lease_ttl_s=listen.http_lease_ttl_s,
        limits=listen.apps.limits,
        payload_checks=listen.apps.payload_checks,
        presigned=presigned,
    )

    async def refuse(_request: Request) -> Response:
        raise NotFound(str(screens))

    return HttpDoor(server, config, connections, refuse if isinstance(screens, str) else screens.answer)


async def serve(options: ServerOptions, events: process.Events, while_open: Callable[[RunningServer], Awaitable[None]]) -> None:
    """Run a server while `while_open(server)` lasts."""
    check(options)
    listen, folder = options.listen, options.places.folder
    certificate = listen.tls.certificate()
    if not folder.root.exists():
        await process.check_ports([*listen.tcp, *([listen.http] if listen.http is not None and not listen.http_if_free else [])])
    prepare_folder(folder)
    process.warn_of_full_disk(folder.root)
    try:
        server = make_server(options.places, options.config, fault_hook())
    except OSError as error:
        raise ConfigError(f"the data folder {folder.root} cannot be written to: {error.strerror or error}") from None
    presigned = open_presigned(options.places.blobs, listen.presign_endpoint) if listen.presign else None
    await server.start()
    # The objects that exist now stay for the life of the process: the collector need not look at them again.
    gc.collect()
    gc.freeze()
    opened = None
    alerting = asyncio.create_task(_alert(options)) if options.alerts is not None else None
    try:
        if presigned is not None:
            await presigned.check()
        opened = RunningServer(server, options, certificate, presigned)
        await opened.reopen()
        for address in opened.all_addresses:
            events.emit("listening", str(address), address=str(address), pid=os.getpid())
        if opened.http_problem:
            events.emit("without", f"HTTP: {opened.http_problem}", door="http", problem=opened.http_problem)
        await while_open(opened)
    finally:
        if opened is not None:
            await opened.shut()
        if presigned is not None:
            presigned.close()
        if alerting is not None:
            alerting.cancel()
            await asyncio.wait([alerting])
        await server.stop()


async def _alert(options: ServerOptions) -> None:
    """Send alerts until this is canceled."""
    from tasuki.django.alerts import AlertLoop, server_alias

    places = options.places
    assert options.alerts is not None
    loop = AlertLoop(server_alias(places.folder.database, places.store), options.alerts, places.coordination)
    try:
        await loop.run()
    finally:
        loop.close()
