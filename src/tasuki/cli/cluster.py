"""`tasuki servers`, `workers`, `stats`, `detach`, `attach`: the servers, their workers, and how many jobs are in each state."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from tasuki.cli.command import Destination, argument, command, connection_options, flag, number, option
from tasuki.cli.connect import with_client
from tasuki.cli.output import Output, table
from tasuki.errors import InvalidInput

if TYPE_CHECKING:
    from tasuki.client import AsyncClient

COUNTED = ("pending", "active", "orphaned", "succeeded", "failed", "timed_out", "canceled", "skipped")
PROGRESS_JOBS_MAX = 1000  # running jobs whose progress `stats --json` reports

worker_id_argument = argument("worker_id", metavar="WORKER", help="As tasuki workers shows it.")


@command("servers", examples=["tasuki servers", "tasuki servers --to tcp://a:7000 --json"])
@connection_options()
def servers(output: Output, place: Destination) -> None:
    rows = with_client(place, lambda client: client.request("servers"))

    def cells(row: dict[str, Any]) -> tuple[object, ...]:
        addresses = " ".join(row["addresses"]) or "unix socket only"
        return row["server_id"], "yes" if row["leads"] else "", row["workers"], addresses

    output.show(rows, lambda: table(("SERVER", "LEADS", "WORKERS", "ADDRESSES"), map(cells, rows)))


@command("workers", examples=["tasuki workers", "tasuki workers --json"])
@connection_options()
def workers(output: Output, place: Destination) -> None:
    rows = with_client(place, lambda client: client.workers())
    output.show(rows, lambda: _worker_lines(rows))


def _worker_lines(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return ["no worker is connected; start one with: tasuki worker"]

    def cells(row: dict[str, Any]) -> tuple[object, ...]:
        slots = "detached" if row["detached"] else row["slots"]
        return row["worker_id"], row["host"], row["server_id"], row["running"], slots, " ".join(row["patterns"])

    return table(("WORKER", "HOST", "SERVER", "RUNNING", "SLOTS", "SUBJECTS"), map(cells, rows))


@command("stats", examples=["tasuki stats", "tasuki stats --watch", "tasuki stats --watch --interval 10 --json >> stats.jsonl"])
@flag("--watch", help="Again and again, until Ctrl-C.")
@number("--interval", metavar="SECONDS", default=1.0, help="Between two looks.")
@connection_options()
def stats(output: Output, watch: bool, interval: float, place: Destination) -> None:
    import asyncio

    if not interval > 0:
        raise InvalidInput(f"--interval must be above 0, got {interval:g}")

    async def work(client: AsyncClient) -> None:
        while True:
            groups, workers = await asyncio.gather(client.counts(), client.workers())
            progress = await _progress(client) if output.json else []
            if watch:
                output.clear_screen()
            answer = {"groups": groups, "workers": workers, "progress": progress}
            output.show(answer, functools.partial(_stats_lines, groups, workers))
            if not watch:
                return
            await asyncio.sleep(interval)

    with_client(place, work)


async def _progress(client: AsyncClient) -> list[dict[str, Any]]:
    """Return the running jobs that report how far they are."""
    running = (await client.find(states=["RUNNING"], limit=PROGRESS_JOBS_MAX))["jobs"]
    names = ("job_id", "assigned_worker_id", "progress", "progress_text")
    return [{name: view[name] for name in names} for view in running if view["progress"] is not None]


def _stats_lines(groups: dict[str, dict[str, int]], workers: list[dict[str, Any]]) -> list[str]:
    totals = {column: sum(counts[column] for counts in groups.values()) for column in COUNTED}
    shown = [*sorted(groups.items()), ("all", totals)]
    lines = table(
        ("GROUP", *(column.upper() for column in COUNTED)),
        ((group, *(counts[column] for column in COUNTED)) for group, counts in shown),
    )
    return [*lines, "", *_worker_lines(workers)]


@command("detach", examples=["tasuki detach lab-7 --reason 'its disk is failing'"])
@worker_id_argument
@option("--reason", metavar="TEXT", default="", help="For the others.")
@connection_options()
def detach(output: Output, worker_id: str, reason: str, place: Destination) -> None:
    """Jobs that the worker runs go on."""
    _change("detach", worker_id, reason, place, output)


@command("attach", examples=["tasuki attach lab-7"])
@worker_id_argument
@connection_options()
def attach(output: Output, worker_id: str, place: Destination) -> None:
    _change("attach", worker_id, "", place, output)


def _change(verb: str, worker_id: str, reason: str, place: Destination, output: Output) -> None:
    answer = with_client(place, lambda client: client.request(verb, worker_id=worker_id, reason=reason))
    result = f"is {verb}ed" if answer["changed"] else f"was {verb}ed before"
    output.show(answer, lambda: [f"worker {worker_id} {result}"])
