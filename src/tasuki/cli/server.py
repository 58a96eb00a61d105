"""`tasuki server`: a server on a data folder, without workers."""

from __future__ import annotations

from typing import Annotated

import typer

from tasuki.cli import options
from tasuki.cli.command import command

DEFAULT_TCP = "127.0.0.1:7000"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(
        app,
        "server",
        examples=[
            "tasuki server --data /srv/tasuki",
            "tasuki server --data /srv/tasuki --tcp 0.0.0.0:7000 --tls-cert cert.pem --tls-key key.pem",
            'tasuki server --tcp 127.0.0.1:0 --no-unix --json      # any free port, told as {"event": "listening", …}',
        ],
    )(server)


def server(
    data: options.Data = None,
    tcp: Annotated[
        list[str] | None,
        typer.Option("--tcp", metavar="HOST:PORT", help=f"Listen here, several times; port 0: any. Default: {DEFAULT_TCP}."),
    ] = None,
    no_tcp: Annotated[bool, typer.Option("--no-tcp", help="Listen on the unix socket only.")] = False,
    unix: Annotated[bool, typer.Option("--unix/--no-unix", help="Listen on the data folder's unix socket.")] = True,
    tls_cert: Annotated[str | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[str | None, typer.Option("--tls-key", metavar="FILE", help="Its private key, PEM.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine without TLS: the network is trusted.")
    ] = False,
    lease_ttl: Annotated[
        float, typer.Option("--lease-ttl", metavar="SECONDS", help="How long a silent worker keeps its jobs.")
    ] = 15.0,
    retention_days: Annotated[
        float, typer.Option("--retention-days", metavar="DAYS", help="How long finished jobs and results are kept.")
    ] = 30.0,
    log_level: options.LogLevel = "info",
    json: options.Json = False,
) -> int:
    """Start a server on a data folder.

    SIGTERM or Ctrl-C ends it in order, a second one at once.
    """
    from tasuki.cli import log, serve
    from tasuki.config import data_folder, parse_listen

    log.configure(log_level, json=json)
    listen = serve.Listen(
        folder=data_folder(data),
        tcp=() if no_tcp else tuple(parse_listen(text) for text in tcp or [DEFAULT_TCP]),
        unix=unix,
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure=insecure,
        lease_ttl_s=lease_ttl,
        retention_days=retention_days,
        json=json,
    )
    events = serve.Events(json=json)

    async def main() -> int:
        stop = serve.Stop()

        async def until_stopped(opened: serve.Opened) -> None:
            root = str(listen.folder.root)
            events.tell("ready", f"data {root}", data=root, token_file=str(listen.folder.token_file))
            await stop.wanted.wait()
            events.tell("stopping")

        await serve.hosted(listen, events, until_stopped)
        return 0

    return serve.run_loop(main())
