"""`tasuki stats`: how many jobs stand where, and what the workers do."""

from __future__ import annotations

import asyncio
import functools
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tasuki.cli import options
from tasuki.cli.cluster import worker_lines
from tasuki.cli.command import command
from tasuki.cli.connect import Destination, with_client
from tasuki.cli.output import Output, table
from tasuki.errors import InvalidInput

if TYPE_CHECKING:
    from tasuki.client import AsyncClient

COLUMNS = ("pending", "active", "orphaned", "succeeded", "failed", "timed_out", "canceled", "skipped")
HOME_AND_CLEAR = "\033[H\033[2J"
PROGRESS_LOOKED_AT = 1000  # running jobs


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(
        app,
        "stats",
        examples=["tasuki stats", "tasuki stats --watch", "tasuki stats --watch --interval 10 --json >> stats.jsonl"],
    )(stats)


def stats(
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option("--interval", metavar="SECONDS", help="Between two looks.")] = 1.0,
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    json: options.Json = False,
) -> None:
    """Jobs by group and state, and the workers that are connected."""
    if not interval > 0:
        raise InvalidInput(f"--interval must be above 0, got {interval:g}")
    output = Output(json=json)

    async def work(client: AsyncClient) -> None:
        while True:
            groups, workers = await asyncio.gather(client.counts(), client.workers())
            progress = await _progress(client) if json else []
            if watch and not json and sys.stdout.isatty():
                print(HOME_AND_CLEAR, end="")
            answer = {"groups": groups, "workers": workers, "progress": progress}
            output.show(answer, functools.partial(_lines, groups, workers))
            if not watch:
                return
            await asyncio.sleep(interval)

    with_client(Destination(to, data, token_file, tls_ca), work)


async def _progress(client: AsyncClient) -> list[dict[str, Any]]:
    """The running jobs that tell how far they are."""
    running = (await client.find(states=["RUNNING"], limit=PROGRESS_LOOKED_AT))["jobs"]
    names = ("job_id", "assigned_worker_id", "progress", "progress_text")
    return [{name: view[name] for name in names} for view in running if view["progress"] is not None]


def _lines(groups: dict[str, dict[str, int]], workers: list[dict[str, Any]]) -> list[str]:
    totals = {column: sum(counts[column] for counts in groups.values()) for column in COLUMNS}
    shown = [*sorted(groups.items()), ("all", totals)]
    lines = table(
        ("GROUP", *(column.upper() for column in COLUMNS)),
        ((group, *(counts[column] for column in COLUMNS)) for group, counts in shown),
    )
    return [*lines, "", *worker_lines(workers)]
