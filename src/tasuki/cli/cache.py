"""`tasuki cache`: files that many jobs share, kept by the workers: put, list, show, rm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import asdict

from tasuki.cli.command import (
    Destination,
    Duration,
    argument,
    command,
    connection_options,
    duration,
    group,
    option,
    quiet_option,
)
from tasuki.cli.connect import with_client
from tasuki.cli.output import ExitCode, Output, table
from tasuki.client.aio import AsyncClient
from tasuki.client.caches import FINAL, IDLE_TIMEOUT_S, PutResult, required
from tasuki.core.protocol import CacheStatus, WorkerCache
from tasuki.core.units import shown_size, shown_time
from tasuki.errors import CacheConflict

cache = group("cache", "Jobs name files of a cache with --file ID:NAME: these are not sent again.")
cache_id_argument = argument("cache_id", metavar="ID", help="Name of the cache.")


@command(
    "cache put",
    parent=cache,
    examples=[
        "tasuki cache put scene-7 assets/ --target 'render.>'      # files are called assets/…",
        "tasuki cache put scene-7 assets/ --target 'render.>' --require 90%",
        "tasuki run --subject render.eu --file scene-7:assets/a.bin render",
    ],
)
@cache_id_argument
@argument("paths", metavar="PATH...", help="Files and folders.", nargs=-1, required=True)
@option("--target", metavar="PATTERN", default=">", help="Workers that are to have them: those that take such subjects.")
@option("--require", metavar="all|N|P%", default="all", help="How many of these workers must have them for exit code 0.")
@duration(
    "--timeout",
    type=Duration(0, above=True),
    default=IDLE_TIMEOUT_S,
    help="Time without progress after which a worker is given up.",
)
@connection_options()
@quiet_option
def put(
    output: Output, cache_id: str, paths: tuple[str, ...], target: str, require: str, timeout: float, place: Destination
) -> int:
    """Files that a cache has are not sent again, and never overwritten. The same put again does what is left. Workers that lack
    a file fetch it when a job needs it."""
    required(require, 0)
    try:
        result = with_client(place, lambda client: _put(client, cache_id, paths, target, require, timeout, output))
        is_satisfied = result.satisfies(require)
    except CacheConflict as error:
        if not (refused := error.details().get("workers")):
            raise
        reason = f"{error.code}: {error.message}"
        result = PutResult(cache_id, 0, 0, {one: WorkerCache(one, CacheStatus.FAILED, reason) for one in refused})
        is_satisfied = False
    rows = sorted(result.workers.values(), key=lambda one: one.worker_id)
    answer = {**asdict(result), "workers": [asdict(one) for one in rows], "satisfied": is_satisfied}
    output.show(answer, lambda: _lines(result, rows), [f"{one.worker_id} {one.status}" for one in rows])
    if not rows:
        output.hint(
            f"no connected worker takes {target}; the files are at the server, and workers that come fetch them for their jobs"
        )
    if not is_satisfied:
        needed = required(require, len(rows))
        output.hint(f"{result.done} of {len(rows)} workers have the files, and --require {require} asks for {needed}")
    if any(one.status not in FINAL for one in rows):
        output.hint("the others continue by themselves; the same put again shows how far they are")
    return ExitCode.OK if is_satisfied else ExitCode.FAILED


async def _put(
    client: AsyncClient, cache_id: str, paths: tuple[str, ...], target: str, require: str, timeout: float, output: Output
) -> PutResult:
    def on_upload(done_bytes: int, size_bytes: int) -> None:
        output.transfer("uploading", size_bytes)(done_bytes)

    def on_workers(workers: Mapping[str, WorkerCache], size_bytes: int) -> None:
        counts = Counter(one.status for one in workers.values())
        what = ", ".join(f"{n} {status}" for status, n in counts.items())
        output.transfer(what, size_bytes * len(workers))(sum(one.done_bytes for one in workers.values()))

    output.progress("hashing")
    return await client.put_cache(
        cache_id, paths, target=target, require=require, idle_timeout_s=timeout, on_upload=on_upload, on_workers=on_workers
    )


def _lines(result: PutResult, rows: list[WorkerCache]) -> Iterator[str]:
    size = shown_size(result.size_bytes)
    yield f"{result.cache_id}  {result.files} files, {size}; {result.done} of {len(rows)} workers have them"
    if rows:
        cells = [(one.worker_id, one.status, _note(one, result.size_bytes)) for one in rows]
        yield from table(("WORKER", "STATUS", ""), cells)


def _note(one: WorkerCache, size_bytes: int) -> str:
    if one.status is CacheStatus.FETCHING:
        return f"{shown_size(one.done_bytes)} of {shown_size(size_bytes)}"
    return "" if one.status is CacheStatus.SKIPPED else one.message


@command("cache list", parent=cache, examples=["tasuki cache list", "tasuki cache list --json"])
@connection_options()
@quiet_option
def list_caches(output: Output, place: Destination) -> None:
    rows = with_client(place, lambda client: client.caches())
    head = ("CACHE", "FILES", "SIZE", "TARGET", "OWNER", "CREATED")

    def human() -> list[str]:
        cells = [
            (one.cache_id, one.files, shown_size(one.size_bytes), one.target, one.owner, shown_time(one.created_at))
            for one in rows
        ]
        return table(head, cells)

    output.show([asdict(one) for one in rows], human, [one.cache_id for one in rows])


@command("cache show", parent=cache, examples=["tasuki cache show scene-7"])
@cache_id_argument
@connection_options()
@quiet_option
def show(output: Output, cache_id: str, place: Destination) -> None:
    files = with_client(place, lambda client: client.cache(cache_id))
    answer: dict[str, Any] = {"cache_id": cache_id, "target": files[0].target, "files": [asdict(one) for one in files]}
    cells = [(one.name, shown_size(one.size_bytes), one.sha256) for one in files]
    output.show(answer, lambda: table(("NAME", "SIZE", "SHA256"), cells), [one.name for one in files])


@command("cache rm", parent=cache, examples=["tasuki cache rm scene-7"])
@cache_id_argument
@connection_options()
def remove(output: Output, cache_id: str, place: Destination) -> None:
    """Jobs that were accepted keep their files. Workers that are away keep the files until they need the space."""
    files = with_client(place, lambda client: client.remove_cache(cache_id))
    output.show({"cache_id": cache_id, "files": files}, lambda: [f"removed {cache_id} ({files} files)"])
