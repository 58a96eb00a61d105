"""`tasuki servers`, `workers`, `detach`, `attach`: who is there, and who is to be given no more work."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tasuki.cli import options
from tasuki.cli.command import command
from tasuki.cli.connect import Destination, with_client
from tasuki.cli.output import Output, table

WorkerId = Annotated[str, typer.Argument(metavar="WORKER", help="As tasuki workers shows it.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    command(app, "servers", examples=["tasuki servers", "tasuki servers --to tcp://a:7000 --json"])(servers)
    command(app, "workers", examples=["tasuki workers", "tasuki workers --json"])(workers)
    command(app, "detach", examples=["tasuki detach lab-7 --reason 'its disk is failing'"])(detach)
    command(app, "attach", examples=["tasuki attach lab-7"])(attach)


def servers(
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    json: options.Json = False,
) -> None:
    """The servers that are alive on this store."""
    rows = with_client(Destination(to, data, token_file, tls_ca), lambda client: client.request("servers"))
    head = ("SERVER", "LEADS", "WORKERS", "ADDRESSES")
    Output(json=json).show(
        rows,
        lambda: table(
            head,
            (
                (
                    row["server_id"],
                    "yes" if row["leads"] else "",
                    row["workers"],
                    " ".join(row["addresses"]) or "unix socket only",
                )
                for row in rows
            ),
        ),
    )


def workers(
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    json: options.Json = False,
) -> None:
    """The workers that are connected, to whichever server."""
    rows = with_client(Destination(to, data, token_file, tls_ca), lambda client: client.workers())
    Output(json=json).show(rows, lambda: worker_lines(rows))


def worker_lines(rows: list[dict[str, Any]]) -> list[str]:
    """A table of workers."""
    if not rows:
        return ["no worker is connected; start one with: tasuki worker"]
    head = ("WORKER", "HOST", "SERVER", "RUNNING", "SLOTS", "SUBJECTS")
    return table(
        head,
        (
            (
                row["worker_id"],
                row["host"],
                row["server_id"],
                row["running"],
                "detached" if row["detached"] else row["slots"],
                " ".join(row["patterns"]),
            )
            for row in rows
        ),
    )


def detach(
    worker_id: WorkerId,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="For the others.")] = "",
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    json: options.Json = False,
) -> None:
    """Give a worker no more work. What it runs goes on."""
    _set("detach", worker_id, reason, Destination(to, data, token_file, tls_ca), json=json)


def attach(
    worker_id: WorkerId,
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    json: options.Json = False,
) -> None:
    """Give a detached worker work again."""
    _set("attach", worker_id, "", Destination(to, data, token_file, tls_ca), json=json)


def _set(verb: str, worker_id: str, reason: str, place: Destination, *, json: bool) -> None:
    answer = with_client(place, lambda client: client.request(verb, worker_id=worker_id, reason=reason))
    word = "detached" if verb == "detach" else "attached"
    told = f"worker {worker_id} is {word}" if answer["changed"] else f"worker {worker_id} was {word} before"
    Output(json=json).show(answer, lambda: [told])
