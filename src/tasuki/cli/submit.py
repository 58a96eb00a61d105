"""`tasuki submit`: one job, an array of jobs, or one job per line of a file; returns when they are durable.

`tasuki wait`: until jobs or all jobs of arrays have ended.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tasuki.cli import jobspec
from tasuki.cli.arrays import ENDED, ArraySummary, look_up, pages, wait_all
from tasuki.cli.command import (
    Destination,
    argument,
    command,
    connection_options,
    duration,
    flag,
    option,
    quiet_option,
)
from tasuki.cli.connect import with_client
from tasuki.cli.output import ExitCode, Output
from tasuki.client.aio import AsyncClient, AsyncJobHandle
from tasuki.core.job import InputFile, JobSpec
from tasuki.core.subject import only_worker
from tasuki.errors import InvalidInput

BATCH = 5_000  # jobs in memory at once


@command(
    "submit",
    settings=jobspec.TAKES_A_COMMAND,
    examples=[
        "tasuki submit --subject render.eu.1 --file scene.blend render --mode fast",
        "tasuki submit --array 1-1000 --job-id study-7 simulate --seed {i}      # jobs study-7.1 to study-7.1000",
        "ls *.wav | tasuki submit --each-line - --file {line} --wait encode      # one job per file, which it finds as in/NAME",
        "tasuki submit --broadcast --subject 'render.>' --wait rotate-keys      # once on each worker, with a ledger",
        "tasuki submit --subject math.square --payload-file number.txt -        # - instead of EXEC: a Python handler's job",
    ],
)
@option("--array", metavar="RANGE", help="One job per index (1-1000, 0-100:10, 3,7,9-12); {i} in ARGS and --file is replaced.")
@option("--each-line", metavar="FILE", help="One job per line (- for stdin): {line} in ARGS or --file, or the last argument.")
@flag("--broadcast", help="One job for each worker that --subject, a pattern, meets now; those that are away get theirs later.")
@flag("--wait", help="Wait until all have ended; exit 1 if one did not succeed.")
@jobspec.job_options(retries=3)
@connection_options()
@quiet_option
def submit(
    output: Output,
    array: str | None,
    each_line: str | None,
    broadcast: bool,
    wait: bool,
    fields: dict[str, Any],
    place: Destination,
) -> int:
    """A second job with the same --job-id and body is the same job."""
    if sum(map(bool, (array, each_line, broadcast))) > 1:
        raise InvalidInput("--array, --each-line and --broadcast cannot stand together; choose one")
    with jobspec.naming_options():
        if broadcast:
            return with_client(place, lambda client: _broadcast(client, fields, wait, output))
        if array:
            elements = jobspec.array_elements(jobspec.parse_array(array), fields["args"], fields["files"])
            return with_client(place, lambda client: _submit_many(client, fields, elements, wait, output))
        if each_line:
            with jobspec.open_lines(each_line) as lines:
                elements = jobspec.line_elements(lines, fields["args"], fields["files"])
                return with_client(place, lambda client: _submit_many(client, fields, elements, wait, output))
        return with_client(place, lambda client: _submit_one(client, fields, wait, output))


async def _submit_one(client: AsyncClient, fields: dict[str, Any], wait: bool, output: Output) -> int:
    fields = jobspec.located(fields, client)
    fields["files"] = await jobspec.uploaded(client, fields["files"], output)
    job_id = fields["job_id"] or client.new_id()
    try:
        handle = await client.submit(**jobspec.submit_options({**fields, "job_id": job_id}), watch=wait)
    except asyncio.CancelledError:  # Ctrl-C; the server may have accepted the job all the same
        output.hint(
            f"it is not known whether the job was accepted; see: tasuki status {job_id}; stop it with: tasuki cancel {job_id}"
        )
        raise
    answer: dict[str, Any] = {"job_id": job_id, "existed": handle.existed}
    failed = 0
    if wait:
        output.hint(f"submitted job {job_id}; waiting for the end")
        with _interruptible(job_id, output):
            [ended] = await wait_all(client, [handle], output)
        answer["state"] = str(ended.state)
        failed = ended.state != "SUCCEEDED"
    output.show(answer, lambda: [f"{job_id}{'  ' + answer['state'] if wait else ''}"], [job_id])
    return ExitCode.FAILED if failed else ExitCode.OK


async def _broadcast(client: AsyncClient, fields: dict[str, Any], wait: bool, output: Output) -> int:
    if "subject" not in fields:
        raise InvalidInput("--broadcast needs --subject PATTERN: which workers is it for? '>' is for all of them")
    fields = jobspec.located(fields, client)
    files = tuple(await jobspec.uploaded(client, fields["files"], output))
    array_id = fields["job_id"] or client.new_id()
    handles = await client.broadcast(JobSpec(**{**fields, "job_id": array_id, "files": files}), watch=wait)
    if wait:
        output.hint(f"submitted {array_id} to {len(handles)} workers; waiting for the end")
        with _interruptible(array_id, output):
            await wait_all(client, handles, output, array_id=array_id)
    summary = await ArraySummary.of(client, array_id, output)
    output.show(summary.view(), summary.lines, [array_id])
    output.hint(f"look at the ledger with: tasuki status {array_id}")
    return ExitCode.FAILED if summary.unsuccessful else ExitCode.OK


async def _submit_many(
    client: AsyncClient,
    fields: dict[str, Any],
    elements: Iterable[jobspec.ArrayJob],
    wait: bool,
    output: Output,
) -> int:
    array_id = fields["job_id"] or client.new_id()
    fields = {**jobspec.located(fields, client), "array_id": array_id}
    uploaded: dict[str, InputFile] = {}
    handles: list[AsyncJobHandle[bytes]] = []
    count = 0
    if fields["files"]:  # all of them are looked at before the first job is submitted
        elements = list(elements)
        files = jobspec.check_files(dict.fromkeys(file for element in elements for file in element.files))
        uploaded = dict(zip(files, await jobspec.uploaded(client, files, output, inline=False), strict=True))
    elements = iter(elements)
    while batch := list(itertools.islice(elements, BATCH)):
        submitted = await client.submit_many([_spec(fields, array_id, element, uploaded) for element in batch], watch=wait)
        count += len(submitted)
        if wait:
            handles += submitted
        output.progress(f"{count} jobs submitted")
    if not count:
        raise InvalidInput("there was nothing to submit: no line with text in it")
    summary = ArraySummary(array_id)
    answer: dict[str, Any] = {"array_id": array_id, "count": count}
    if wait:
        output.hint(f"submitted array {array_id} ({count} jobs); waiting for the end")
        with _interruptible(array_id, output):
            for ended in await wait_all(client, handles, output, array_id=array_id):
                summary.add_result(ended)
        answer |= {"states": dict(sorted(summary.states.items()))}
    lines = [f"{array_id}  {count} jobs" + "".join(f", {number} {state}" for state, number in sorted(summary.states.items()))]
    output.show(answer, lambda: [*lines, *summary.reason_lines()], [array_id])
    output.hint(f"look at them with: tasuki status {array_id}")
    return ExitCode.FAILED if summary.unsuccessful else ExitCode.OK


@contextmanager
def _interruptible(named: str, output: Output) -> Iterator[None]:
    """Hint what goes on if the user leaves with Ctrl-C."""
    try:
        yield
    except asyncio.CancelledError:
        output.hint(f"{named} still runs; wait for it again with: tasuki wait {named}; stop it with: tasuki cancel {named}")
        raise


def _spec(fields: dict[str, Any], array_id: str, element: jobspec.ArrayJob, uploaded: dict[str, InputFile]) -> JobSpec:
    own = {"job_id": f"{array_id}.{element.number}", "args": element.args, "headers": {"array_index": str(element.number)}}
    return JobSpec(**{**fields, **own, "files": tuple(uploaded[file] for file in element.files)})


# ---------------------------------------------------------------------------------------------------- wait


@command(
    "wait",
    examples=[
        "tasuki wait JOB",
        "tasuki wait ARRAY --timeout 1h      # all of its jobs; a terminal shows how far they are",
        "tasuki wait JOB1 JOB2 ARRAY && tasuki result ARRAY",
    ],
)
@argument("ids", metavar="JOB|ARRAY...", help="Ids of jobs or arrays.", nargs=-1, required=True)
@duration("--timeout", help="How long to wait. Default: no limit.")
@connection_options()
@quiet_option
def wait(output: Output, ids: tuple[str, ...], timeout: float | None, place: Destination) -> int:
    """Exit 0 if all of them succeeded, 1 if not, 5 if the time is over: jobs continue."""
    return with_client(place, lambda client: _wait(client, ids, timeout, output))


async def _wait(client: AsyncClient, ids: tuple[str, ...], timeout: float | None, output: Output) -> int:
    found, unknown = await look_up(client, ids)
    if unknown:
        raise unknown[0]
    named = {each: ArraySummary(each) for each in found}
    waited_for: dict[str, ArraySummary] = {}
    broadcasts: set[str] = set()
    for each, view in found.items():
        for job in [view] if view is not None else [job async for page in pages(client, {"array_id": each}) for job in page]:
            if view is None and only_worker(job["subject"]) is not None:
                broadcasts.add(each)
            if job["state"] in ENDED:
                named[each].add_view(job)
            else:
                waited_for[job["job_id"]] = named[each]
    array_id = ids[0] if list(found.values()) == [None] else None
    with _interruptible(" ".join(ids), output):
        handles = [client.job(job_id) for job_id in waited_for]
        for ended in await wait_all(client, handles, output, array_id=array_id, timeout=timeout):
            waited_for[ended.job_id].add_result(ended)
    for each in broadcasts:  # with its ledger
        named[each] = await ArraySummary.of(client, each, output)

    def human() -> Iterator[str]:
        for each, view in found.items():
            if view is None:
                yield from named[each].lines()
            else:
                yield f"{each}  {next(iter(named[each].states))}"
                yield from named[each].reason_lines()

    output.show([summary.view() for summary in named.values()], human, found)
    return ExitCode.FAILED if any(summary.unsuccessful for summary in named.values()) else ExitCode.OK
