"""`tasuki server`: a server without workers, on a data folder, or one of several on PostgreSQL or Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tasuki.cli import options
from tasuki.cli.command import command

if TYPE_CHECKING:
    from tasuki.cli.server_process import Listen

DEFAULT_TCP = "127.0.0.1:7000"


Tcp = Annotated[
    list[str] | None,
    typer.Option("--tcp", metavar="HOST:PORT", help=f"Listen here, several times; port 0: any. Default: {DEFAULT_TCP}."),
]
NoTcp = Annotated[bool, typer.Option("--no-tcp", help="Listen on the unix socket only.")]
Unix = Annotated[bool, typer.Option("--unix/--no-unix", help="Listen on the data folder's unix socket.")]
TlsCert = Annotated[str | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate chain, PEM.")]
TlsKey = Annotated[str | None, typer.Option("--tls-key", metavar="FILE", help="Its private key, PEM.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Listen beyond this machine without TLS: the network is trusted.")]
StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        envvar="TASUKI_STORE",
        show_envvar=True,
        help="postgresql://user@host/database or redis://host:6379/0 (rediss://, redis+sentinel://), which several servers may "
        "share. An address with a password belongs into the variable: others can read the command line. "
        "Default: SQLite in the data folder.",
    ),
]
Coordination = Annotated[
    str | None,
    typer.Option(
        "--coordination",
        metavar="URL",
        envvar="TASUKI_COORDINATION",
        help="With PostgreSQL: redis://… for beats, the leader's lock and hints. The same for all servers. Default: the store.",
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="With Redis: refuse to start if its settings may lose jobs, instead of a warning.")
]
BlobsUrl = Annotated[
    str | None,
    typer.Option(
        "--blobs",
        metavar="URL",
        envvar="TASUKI_BLOBS",
        help="Large inputs and results: s3://bucket/prefix[?endpoint=URL], or a folder. Default: in the data folder.",
    ),
]
Presign = Annotated[
    bool,
    typer.Option(
        "--presign",
        help="With --blobs s3://… and --http: peers over HTTP move large blobs straight to and from the bucket, by links "
        "that are good for some minutes. Those who cannot reach it go on through the server.",
    ),
]
PresignEndpoint = Annotated[
    str | None,
    typer.Option("--presign-endpoint", metavar="URL", help="Where peers reach the bucket, if not where this server does."),
]
Advertise = Annotated[
    list[str] | None,
    typer.Option("--advertise", metavar="URL", help="Where others reach this server: tls://host:7000. Default: as --tcp."),
]
LeaseTtl = Annotated[float, typer.Option("--lease-ttl", metavar="SECONDS", help="How long a silent worker keeps its jobs.")]
RetentionDays = Annotated[
    float, typer.Option("--retention-days", metavar="DAYS", help="How long finished jobs and results are kept.")
]
BlobGrace = Annotated[
    float,
    typer.Option("--blob-grace", metavar="SECONDS", help="How long a blob that no job needs is kept after its last use."),
]
BlobBudget = Annotated[
    str | None,
    typer.Option("--blob-budget", metavar="SIZE", help="What all blobs may take, as 500GB: unused ones then go sooner."),
]
Http = Annotated[
    str | None,
    typer.Option("--http", metavar="HOST:PORT", help="Serve HTTP here (HTTPS with --tls-cert); port 0: any. Default: none."),
]
App = Annotated[
    list[str] | None,
    typer.Option(
        "--app",
        metavar="NAME",
        help="With --http: serve /calc/NAME, its jobs and workers. Several times; on Redis once, it is the prefix of the keys.",
    ),
]
HttpLeaseTtl = Annotated[
    float, typer.Option("--http-lease-ttl", metavar="SECONDS", help="How long a silent worker over HTTP keeps its jobs.")
]
LeadTtl = Annotated[
    float,
    typer.Option("--lead-ttl", metavar="SECONDS", help="With --store: how soon another server takes over the duties."),
]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(
        app,
        "server",
        examples=[
            "tasuki server --data /srv/tasuki",
            "tasuki server --data /srv/tasuki --tcp 0.0.0.0:7000 --tls-cert cert.pem --tls-key key.pem",
            "tasuki server --store postgresql://tasuki@db/tasuki --blobs s3://bucket/tasuki --tcp 10.0.0.1:7000 "
            "--tls-cert cert.pem --tls-key key.pem      # one of several",
            "tasuki server --http 0.0.0.0:7080 --tls-cert cert.pem --tls-key key.pem --app zpe      # workers behind NAT",
            "tasuki server --store redis://127.0.0.1:6379/0 --http 127.0.0.1:7080 --app zpe      # one of several",
            'tasuki server --tcp 127.0.0.1:0 --no-unix --json      # any free port, told as {"event": "listening", …}',
        ],
    )(server)


def server(
    data: options.Data = None,
    tcp: Tcp = None,
    no_tcp: NoTcp = False,
    unix: Unix = True,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    insecure: Insecure = False,
    store: StoreUrl = None,
    blobs: BlobsUrl = None,
    advertise: Advertise = None,
    lease_ttl: LeaseTtl = 15.0,
    retention_days: RetentionDays = 30.0,
    blob_grace: BlobGrace = 3600.0,
    blob_budget: BlobBudget = None,
    lead_ttl: LeadTtl = 10.0,
    http: Http = None,
    app: App = None,
    http_lease_ttl: HttpLeaseTtl = 60.0,
    coordination: Coordination = None,
    strict: Strict = False,
    presign: Presign = False,
    presign_endpoint: PresignEndpoint = None,
    log_level: options.LogLevel = "info",
    json: options.Json = False,
) -> int:
    """Start a server; with --store, one of several.

    SIGTERM or Ctrl-C ends it in order, a second one at once. SIGHUP makes it read --tls-cert and --tls-key again.
    """
    from tasuki.cli import log, server_process
    from tasuki.config import data_folder, parse_http, parse_listen, parse_size, parse_url

    log.configure(log_level, json=json)
    listen = server_process.Listen(
        folder=data_folder(data),
        tcp=() if no_tcp else tuple(parse_listen(text) for text in tcp or [DEFAULT_TCP]),
        unix=unix,
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure=insecure,
        lease_ttl_s=lease_ttl,
        retention_days=retention_days,
        json=json,
        store=store or "",
        blobs=blobs or "",
        advertise=tuple(address for url in advertise or () for address in parse_url(url)),
        blob_grace_s=blob_grace,
        blob_budget_bytes=parse_size(blob_budget) if blob_budget else None,
        lead_ttl_s=lead_ttl,
        http=parse_http(http) if http else None,
        apps=tuple(dict.fromkeys(app or ())),
        http_lease_ttl_s=http_lease_ttl,
        coordination=coordination or "",
        strict=strict,
        presign=presign,
        presign_endpoint=presign_endpoint or "",
    )
    return server_process.run_loop(_main(listen))


async def _main(listen: Listen) -> int:
    from tasuki.cli.server_process import Events, RunningServer, StopSignals, hosted

    events, stop = Events(json=listen.json), StopSignals()

    async def until_stopped(opened: RunningServer) -> None:
        opened.renew_on_hangup()
        root = str(listen.folder.root)
        events.tell("ready", f"data {root}", data=root, token_file=str(listen.folder.token_file))
        await stop.wanted.wait()
        events.tell("stopping")

    await hosted(listen, events, until_stopped)
    return 0
