"""`tasuki submit`: one job, an array of jobs, or one job per line of a file; returns when they are durable."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasuki.cli import jobspec
from tasuki.cli.command import Destination, command, connection_options, flag, option, quiet_option
from tasuki.cli.connect import with_client
from tasuki.cli.output import ExitCode, Output
from tasuki.errors import InvalidInput

if TYPE_CHECKING:
    from tasuki.client import AsyncClient, AsyncJobHandle
    from tasuki.core.job import InputFile, JobSpec

BATCH = 5_000  # jobs in memory at once
PROGRESS_S = 0.5


@command(
    "submit",
    settings=jobspec.TAKES_A_COMMAND,
    examples=[
        "tasuki submit --subject render.eu.1 --file scene.blend render --mode fast",
        "tasuki submit --array 1-1000 --job-id study-7 simulate --seed {i}      # jobs study-7.1 to study-7.1000",
        "find . -name '*.wav' | tasuki submit --each-line - --wait encode --in {line}",
        "tasuki submit --subject math.square --payload-file number.txt -        # - instead of EXEC: a Python handler's job",
    ],
)
@option("--array", metavar="RANGE", help="One job per index (1-1000, 0-100:10, 3,7,9-12); {i} in ARGS is replaced.")
@option("--each-line", metavar="FILE", help="One job per line (- for stdin): {line} in ARGS, or the last argument.")
@flag("--wait", help="Wait until all have ended; exit 1 if one did not succeed.")
@jobspec.job_options(retries=3)
@connection_options()
@quiet_option
def submit(
    output: Output,
    array: str | None,
    each_line: str | None,
    wait: bool,
    fields: dict[str, Any],
    payload_file: str | None,
    place: Destination,
) -> int:
    """A second job with the same --job-id and body is the same job."""
    if array and each_line:
        raise InvalidInput("--array and --each-line cannot stand together; choose one")
    if array:
        elements = jobspec.array_elements(jobspec.parse_array(array), fields["args"])
        return with_client(place, lambda client: _submit_many(client, fields, elements, wait, output))
    if each_line:
        with jobspec.open_lines(each_line) as lines:
            elements = jobspec.line_elements(lines, fields["args"])
            return with_client(place, lambda client: _submit_many(client, fields, elements, wait, output))
    return with_client(place, lambda client: _submit_one(client, fields, wait, output))


async def _submit_one(client: AsyncClient, fields: dict[str, Any], wait: bool, output: Output) -> int:
    job_id = fields["job_id"] or client.new_id()
    try:
        handle = await client.submit(**{**fields, "job_id": job_id}, watch=wait)
    except asyncio.CancelledError:  # Ctrl-C; the server may have accepted the job all the same
        output.hint(
            f"it is not known whether the job was accepted; see: tasuki status {job_id}; stop it with: tasuki cancel {job_id}"
        )
        raise
    answer: dict[str, Any] = {"job_id": handle.job_id, "existed": handle.existed}
    failed = 0
    if wait:
        states = await _wait_all(client, [handle], f"job {handle.job_id}", _job_hint(handle.job_id), output)
        answer["state"] = states[0]
        failed = states[0] != "SUCCEEDED"

    def human() -> Iterator[str]:
        yield f"{handle.job_id}{'  ' + answer['state'] if wait else ''}"

    output.show(answer, human, [handle.job_id])
    return ExitCode.FAILED if failed else ExitCode.OK


async def _submit_many(
    client: AsyncClient,
    fields: dict[str, Any],
    elements: Iterable[tuple[int, tuple[str, ...]]],
    wait: bool,
    output: Output,
) -> int:
    array_id = fields["job_id"] or client.new_id()
    inputs = tuple([await _uploaded(client, file) for file in fields["files"]])
    handles: list[AsyncJobHandle] = []
    count = 0
    specs = (_element(fields, inputs, array_id, index, args) for index, args in elements)
    while batch := list(itertools.islice(specs, BATCH)):
        submitted = await client.submit_many(batch, watch=wait)
        count += len(submitted)
        if wait:
            handles += submitted
        output.progress(f"{count} jobs submitted")
    if not count:
        raise InvalidInput("there was nothing to submit: no line with text in it")
    states: list[str] = []
    if wait:
        what = f"array {array_id} ({count} jobs)"
        states = await _wait_all(client, handles, what, _array_hint(array_id, count), output)
    tally = {state: states.count(state) for state in sorted(set(states))}
    answer = {"array_id": array_id, "count": count, **({"states": tally} if wait else {})}

    def human() -> Iterator[str]:
        yield f"{array_id}  {count} jobs" + "".join(f", {number} {state}" for state, number in tally.items())

    output.show(answer, human, [array_id])
    output.hint(f"look at them with: tasuki list --array {array_id}")
    return ExitCode.FAILED if any(state != "SUCCEEDED" for state in states) else ExitCode.OK


async def _uploaded(client: AsyncClient, file: str) -> InputFile:
    """Upload an input of an array once; every element names it by its hash."""
    from tasuki.core.job import InputFile

    ref = await client.put_file(file)
    return InputFile(Path(file).name, sha256=ref.sha256, size_bytes=ref.size_bytes)


def _element(fields: dict[str, Any], files: tuple[InputFile, ...], array_id: str, index: int, args: tuple[str, ...]) -> JobSpec:
    from tasuki.core.job import JobSpec

    job_id, headers = f"{array_id}.{index}", {"array_index": str(index)}
    return JobSpec(**{**fields, "job_id": job_id, "args": args, "files": files, "array_id": array_id, "headers": headers})


def _job_hint(job_id: str) -> str:
    return f"the job goes on; look at it with: tasuki status {job_id}; stop it with: tasuki cancel {job_id}"


def _array_hint(array_id: str, count: int) -> str:
    listing = f"tasuki list --array {array_id}"
    return (
        f"the jobs go on; look at them with: {listing}; stop them with: {listing} --quiet --limit {count} | xargs tasuki cancel"
    )


async def _wait_all(client: AsyncClient, handles: Sequence[AsyncJobHandle], what: str, hint: str, output: Output) -> list[str]:
    """Wait for all jobs, and return the states that they ended in; `hint` is shown if the user interrupts."""
    output.hint(f"submitted {what}; waiting for the end")
    notice = jobspec.ConnectionNotice(client, output)
    ends = [asyncio.ensure_future(handle.outcome()) for handle in handles]
    try:
        pending = set(ends)
        with jobspec.explaining_pending(client, lambda: next((each.job_id for each in handles if not each.done), None), output):
            while pending:
                output.progress(f"{len(ends) - len(pending)} of {len(ends)} jobs have ended")
                _, pending = await asyncio.wait(pending, timeout=PROGRESS_S)
                notice.check()
        return [str(end.result().state) for end in ends]
    except asyncio.CancelledError:  # Ctrl-C
        output.hint(hint)
        raise
    finally:
        for end in ends:
            end.cancel()
