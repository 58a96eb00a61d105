"""`tasuki logs`: what a command writes, while it runs and afterwards. Bytes go through as they are."""

from __future__ import annotations

import asyncio
import functools
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tasuki.cli import options
from tasuki.cli.command import command
from tasuki.cli.connect import Destination, with_client
from tasuki.cli.output import Output, encode_json, write_line
from tasuki.errors import InvalidInput

if TYPE_CHECKING:
    from tasuki.client import AsyncClient
    from tasuki.client.logs import LogFollower, LogPart

BOTH = ("stdout", "stderr")


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(
        app,
        "logs",
        examples=[
            "tasuki logs JOB                            # what it has written so far",
            "tasuki logs -f JOB                         # and what it writes, to its end",
            "tasuki logs --stream stderr JOB 2> errors.txt",
            "tasuki logs -f --tail 4096 --stream stdout JOB | grep ERROR",
        ],
    )(logs)


def logs(
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="Job id.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on to the job's end.")] = False,
    stream: Annotated[str, typer.Option("--stream", metavar="stdout|stderr|both", help="Which of the two.")] = "both",
    offset: Annotated[int | None, typer.Option("--offset", metavar="BYTES", help="Begin at this byte.")] = None,
    tail: Annotated[int | None, typer.Option("--tail", metavar="BYTES", help="Begin so much before the end.")] = None,
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    json: options.Json = False,
) -> None:
    """What a command writes, while it runs and afterwards.

    Its stdout goes to stdout, its stderr to stderr. Where a long log was cut in its middle, a line says so. Exits with 0
    however the job ends: see tasuki status. With --json a line per piece (-f), else one object with both texts.
    """
    if stream not in (*BOTH, "both"):
        raise InvalidInput(f"--stream must be stdout, stderr or both, got {stream!r}")
    if offset is not None and tail is not None:
        raise InvalidInput("choose one of --offset and --tail")
    if min(offset or 0, tail or 0) < 0:
        raise InvalidInput(f"--offset and --tail must be 0 or more, got {min(offset or 0, tail or 0)}")
    output = Output(json=json)
    streams = BOTH if stream == "both" else (stream,)
    show = _show_all if json and not follow else _show

    async def work(client: AsyncClient) -> None:
        from tasuki.client.logs import LogFollower

        told = LogPrinter(output)
        first = functools.partial(LogFollower, offset=offset or 0, tail_bytes=tail, on_progress=told.progress)
        await show([first(client, job_id, name) for name in streams], follow, told)

    with_client(Destination(to, data, token_file, tls_ca), work)


class LogPrinter:
    """Puts parts of logs where they belong, and says beside them what a reader should know."""

    def __init__(self, output: Output) -> None:
        self.output = output
        self._attempt = 0
        self._progress = ""

    async def part(self, part: LogPart) -> None:
        """Out at once. In a thread: whoever reads slowly must not keep us from answering the server."""
        self.attempt(part.attempt)
        self.output.end_progress()
        await asyncio.to_thread(_write, part.stream, part.text)

    def attempt(self, attempt: int) -> None:
        if self._attempt and attempt > self._attempt:
            self.output.hint(f"tasuki: attempt {attempt} begins")
        self._attempt = max(self._attempt, attempt)

    def progress(self, fraction: float, text: str) -> None:
        line = f"tasuki: {fraction:.0%} {text}".rstrip()
        if line != self._progress and sys.stderr.isatty():  # both streams hear of it
            self.output.hint(line)
        self._progress = line


def _write(stream: str, data: bytes) -> None:
    target = sys.stdout.buffer if stream == "stdout" else sys.stderr.buffer
    target.write(data)
    target.flush()


async def _show(followers: list[LogFollower], follow: bool, told: LogPrinter) -> None:
    async def one(follower: LogFollower) -> None:
        async for part in follower.parts(follow=follow):
            if told.output.json:
                write_line(encode_json(_for_programs(follower.job_id, part)))
            else:
                await told.part(part)

    if follow:
        tasks = [asyncio.ensure_future(one(follower)) for follower in followers]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    else:
        for follower in followers:
            await one(follower)


async def _show_all(followers: list[LogFollower], follow: bool, told: LogPrinter) -> None:
    texts: dict[str, str] = dict.fromkeys(BOTH, "")
    for follower in followers:
        pieces = [part.text async for part in follower.parts(follow=follow)]
        texts[follower.stream] = b"".join(pieces).decode("utf-8", "replace")
    told.output.show({"job_id": followers[0].job_id, **texts}, list)


def _for_programs(job_id: str, part: LogPart) -> dict[str, Any]:
    where = {"job_id": job_id, "stream": part.stream, "attempt": part.attempt, "offset": part.offset}
    return {**where, "cut_bytes": part.cut_bytes, "data": part.data.decode("utf-8", "replace")}
