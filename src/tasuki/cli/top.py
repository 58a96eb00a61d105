"""`tasuki top`: the overview of the operations screens in a terminal, on every kind of store."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from tasuki.cli.cluster import shown_latency
from tasuki.cli.command import Destination, Duration, command, connection_options, duration
from tasuki.cli.connect import CONNECT_TIMEOUT_S, with_client
from tasuki.cli.output import Output, plain, table, visible
from tasuki.core.statistics import ROLLUP_S
from tasuki.errors import Unavailable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

    from tasuki.client.aio import AsyncClient

HOUR_S = 3600
GROUPS_MAX = 100
WIDE = 80
"""Columns from which on a terminal has room for all that is known."""
BARS = " ▁▂▃▄▅▆▇█"


@command("top", examples=["tasuki top                 # until q", "tasuki top --interval 5s", "tasuki top --json | jq .figures"])
@duration("--interval", type=Duration(0.1), default=1.0, help="Between two looks.")
@connection_options()
def top(output: Output, interval: float, place: Destination) -> None:
    """Shows the figures, queues and workers of all servers of the store, until q or Ctrl-C. With --json, or where the output is
    no terminal, they are shown once."""

    async def work(client: AsyncClient) -> None:
        if output.json or not sys.stdout.isatty():
            found = await _look(client)
            output.show(found, lambda: _plain_lines(found))
        else:
            await _watch(client, interval)

    with_client(place, work, embedded=False)


async def _look(client: AsyncClient) -> dict[str, Any]:
    """Return what is to be seen now, and what happened in each minute of the last hour."""
    now = int(time.time())
    until = now // ROLLUP_S * ROLLUP_S + ROLLUP_S
    past = client.call("statistics", since=until - HOUR_S, until=until, step_s=ROLLUP_S, limit=GROUPS_MAX)
    asked = (client.call("counts", limit=GROUPS_MAX), client.call("workers"), client.call("servers"), past)
    counts, workers, servers, found = await asyncio.gather(*asked)
    leads: dict[str, Any] = next((server for server in servers if server["leads"]), {"server_id": "", "epoch": None})
    figures = {
        "waiting": _total(counts, "pending", "orphaned"),
        "running": _total(counts, "active"),
        "succeeded": _total(counts, "succeeded"),
        "failed": _total(counts, "failed", "timed_out"),
        "workers": len(workers),
        "slots": sum(worker["slots"] for worker in workers),
    }
    return {
        "at": now,
        "leader": leads["server_id"],
        "epoch": leads["epoch"],
        "alerts": list(_alerts(leads["server_id"], workers)),
        "figures": figures,
        "minutes": list(_minutes(found["periods"], until)),
        "groups": counts,
        "workers": workers,
        "servers": servers,
    }


def _total(groups: dict[str, dict[str, Any]], *names: str) -> int:
    return sum(one.get(name, 0) for one in groups.values() for name in names)


def _alerts(leader: str, workers: list[dict[str, Any]]) -> Iterator[str]:
    if not leader:
        yield "No server leads: leases that ran out, delayed jobs and schedules wait."
    if not workers:
        yield "No worker is connected. Start one with: tasuki worker"
    elif all(worker["detached"] for worker in workers):
        yield "All workers are detached: no job starts."


def _minutes(periods: list[dict[str, Any]], until: int) -> Iterator[dict[str, Any]]:
    """Yield the sums over all groups of each minute, and the latencies of the slowest group; a minute without any is left out.
    So is the one that is not over, if there is another: it would look like a fall."""
    for period in periods if len(periods) == 1 else [one for one in periods if one["at"] < until - ROLLUP_S]:
        groups = period["groups"]
        slowest = {
            name: max((one[name] for one in groups.values() if one.get(name) is not None), default=None)
            for name in ("latency_p50_s", "latency_p99_s")
        }
        sums = {name: _total(groups, name) for name in ("submitted", "finished", "dead")}
        yield {"at": period["at"], **sums, **slowest, "queued": _total(period["queues"], "queued")}


# ---------------------------------------------------------------------------------------------------- lines


def _head(found: dict[str, Any]) -> list[str]:
    leader = f"leader {plain(found['leader'])}, epoch {found['epoch']}" if found["leader"] else "no leader"
    figures = ", ".join(f"{number:,} {name}" for name, number in found["figures"].items())
    lines = [
        f"tasuki, {time.strftime('%H:%M:%S', time.localtime(found['at']))}: {leader}, servers {len(found['servers'])}",
        figures,
    ]
    if found["minutes"]:
        last = found["minutes"][-1]
        p50, p99 = ("-" if last[name] is None else shown_latency(last[name]) for name in ("latency_p50_s", "latency_p99_s"))
        lines.append(f"last minute: {last['finished']:,} finished, {last['dead']:,} failed, delivery p50 {p50}, p99 {p99}")
    return lines


def _hour(found: dict[str, Any], name: str) -> str:
    """Return a bar for each minute of the last hour."""
    values = {minute["at"]: minute[name] for minute in found["minutes"]}
    begin = found["at"] // ROLLUP_S * ROLLUP_S - HOUR_S + ROLLUP_S
    highest = max(values.values(), default=0)
    steps = len(BARS) - 1
    bars = (-(-values.get(at, 0) * steps // highest) if highest else 0 for at in range(begin, begin + HOUR_S, ROLLUP_S))
    return "".join(BARS[bar] for bar in bars)


def _queues(found: dict[str, Any], *, wide: bool) -> tuple[list[str], list[Sequence[object]]]:
    shown = {
        "waiting": ("pending", "orphaned"),
        "running": ("active",),
        "succeeded": ("succeeded",),
        "failed": ("failed", "timed_out"),
    }
    if wide:
        shown |= {"canceled": ("canceled",), "skipped": ("skipped",)}
    rows = [(name, *(sum(one[part] for part in parts) for parts in shown.values())) for name, one in found["groups"].items()]
    rows.sort(key=lambda row: (-row[1] - row[2], row[0]))
    return ["QUEUE", *map(str.upper, shown)], [*rows]


def _workers(found: dict[str, Any], *, wide: bool) -> tuple[list[str], list[Sequence[object]]]:
    shown = ("running", "slots", "host", "server_id") if wide else ("running", "slots")
    rows = [
        (one["worker_id"], *("detached" if name == "slots" and one["detached"] else one[name] for name in shown))
        for one in sorted(found["workers"], key=lambda one: (-one["running"], one["worker_id"]))
    ]
    return ["WORKER", *(name.removesuffix("_id").upper() for name in shown)], [*rows]


def _plain_lines(found: dict[str, Any]) -> Iterator[str]:
    yield from _head(found)
    yield from found["alerts"]
    for head, rows in (_queues(found, wide=True), _workers(found, wide=True)):
        if rows:
            yield ""
            yield from table(head, rows)


# ---------------------------------------------------------------------------------------------------- the terminal


class _Screen:
    """The whole terminal, drawn for the size that it has at that moment."""

    def __init__(self) -> None:
        self.found: dict[str, Any] | None = None
        self.problem = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        def line(text: str, style: str = "") -> Text:
            return Text(visible(text), style, no_wrap=True, overflow="ellipsis")

        height, wide = options.height or console.height, options.max_width >= WIDE
        if self.problem:
            yield line(self.problem, "bold red")
        if self.found is None:
            return
        lines = _head(self.found)
        yield line(lines[0], "bold")
        yield from map(line, lines[1:])
        yield from (line(alert, "bold yellow") for alert in self.found["alerts"])
        if wide and self.found["minutes"]:
            for name, style in (("finished", "green"), ("dead", "red"), ("queued", "cyan")):
                yield line(f"{name if name != 'dead' else 'failed':>8} {_hour(self.found, name)} 1 h", style)
        room = max(2, (height - len(lines) - len(self.found["alerts"]) - (3 if wide else 0) - bool(self.problem) - 6) // 2)
        for head, rows in (_queues(self.found, wide=wide), _workers(self.found, wide=wide)):
            if rows:
                yield _grid(head, rows[:room])
                yield line(f"… {len(rows) - room} more" if len(rows) > room else "", "dim")
        yield line("q: quit", "dim")


def _grid(head: list[str], rows: list[Sequence[object]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bold cyan")
    for name in head:
        is_name = name in ("QUEUE", "WORKER", "HOST", "SERVER")
        grid.add_column(name, justify="left" if is_name else "right", no_wrap=True, overflow="ellipsis")
    for row in rows:
        grid.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else plain(cell)) for cell in row))
    return grid


async def _watch(client: AsyncClient, interval_s: float) -> None:
    """Draw until a key, or SIGTERM, ends it; the terminal is as before afterwards. A server that is away is waited for."""
    from rich.console import Console
    from rich.live import Live

    screen, loop = _Screen(), asyncio.get_running_loop()
    with suppress(TimeoutError), Live(screen, console=Console(), screen=True, auto_refresh=False) as live:
        async with asyncio.timeout(None) as until_ended:
            with _keys(lambda: until_ended.reschedule(loop.time())):
                loop.add_signal_handler(signal.SIGWINCH, live.refresh)
                while True:
                    try:
                        async with asyncio.timeout(CONNECT_TIMEOUT_S):
                            screen.found, screen.problem = await _look(client), ""
                    except (TimeoutError, Unavailable) as error:
                        screen.problem = str(error) or f"The server has not answered within {CONNECT_TIMEOUT_S:g} s."
                    live.refresh()
                    await asyncio.sleep(interval_s)


@contextmanager
def _keys(end: Callable[[], None]) -> Iterator[None]:
    """Call `end` once when q is pressed, or SIGTERM comes; keys are not shown meanwhile."""
    import termios
    import tty

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, end)
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def read() -> None:
        keys = os.read(descriptor, 1024)
        if b"q" in keys.lower() or not keys:
            loop.remove_reader(descriptor)
            end()

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
