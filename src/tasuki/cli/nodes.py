"""`tasuki nodes`: the node agents as a client sees them. Looks at all of them at once; what it sees counts for their breakers."""

from __future__ import annotations

import asyncio
import functools
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tasuki.cli import exit_codes, options
from tasuki.cli.command import command
from tasuki.cli.connect import Destination
from tasuki.cli.output import Output, table

if TYPE_CHECKING:
    from tasuki.core.failover.nodes import Ranked

CLEAR_SCREEN = "\033[H\033[2J"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(
        app,
        "nodes",
        examples=[
            "tasuki nodes --to agents:http://n1:7090,http://n2:7090",
            "tasuki nodes --to agents:https://n1:7090,n2:7090 --token-file token --tls-ca ca.pem --watch",
            "tasuki nodes --to agents:http://n1:7090 --json",
        ],
    )(nodes)


def nodes(
    to: options.Agents = None,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option("--interval", metavar="SECONDS", help="With --watch.", min=0.1)] = 2.0,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    json: options.Json = False,
) -> int:
    """Node agents: which comes first, and which are left out.

    A node that failed is left out for 30 s, and until three health checks in a row were good; each look of this command is one.
    Exits with 5 if no node takes jobs.
    """
    place = Destination(to, data, token_file, tls_ca)
    return asyncio.run(_nodes(place, Output(json=json), interval if watch else None))


async def _nodes(place: Destination, output: Output, interval: float | None) -> int:
    from tasuki.cli.agents import open_client
    from tasuki.core.failover.events import WAY_IN

    async with open_client(place) as client:
        while True:
            ranking = await client.ranking()
            if interval is not None and not output.json and sys.stdout.isatty():
                sys.stdout.write(CLEAR_SCREEN)
            output.show([line.view() for line in ranking], functools.partial(lines_of, ranking))
            for node in refusing(ranking):
                output.hint(f"tasuki: {node} does not take the token; {WAY_IN}")
            if interval is None:
                return exit_codes.OK if any(usable(line) for line in ranking) else exit_codes.UNAVAILABLE
            await asyncio.sleep(interval)


def usable(line: Ranked) -> bool:
    return line.standing.name in ("FREE", "FULL")


def refusing(ranking: list[Ranked]) -> list[str]:
    """Nodes that want another token."""
    return [line.node for line in ranking if line.refusal is not None and line.refusal.status == 401]


def lines_of(ranking: list[Ranked]) -> list[str]:
    """A table, the best node first."""
    head = ("NODE", "STANDING", "RUNNING", "LIMIT", "BREAKER", "SAID")
    return table(
        head, ((line.node, line.standing.name.lower(), line.running, line.limit, _breaker(line), line.said) for line in ranking)
    )


def _breaker(line: Ranked) -> str:
    if str(line.breaker) == "closed":
        return "closed"
    return f"{line.breaker}, {line.left_out_s:.0f} s, {line.good_checks} good"
