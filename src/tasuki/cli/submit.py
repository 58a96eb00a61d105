"""`tasuki submit`: one job, an array of jobs, or one job per line of a file; returns when they are durable."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tasuki.cli import exit_codes, options
from tasuki.cli.command import TAKES_A_COMMAND, command
from tasuki.cli.connect import Destination, with_client
from tasuki.cli.output import Output
from tasuki.errors import InvalidInput

if TYPE_CHECKING:
    from tasuki.client import AsyncClient, AsyncJobHandle
    from tasuki.core.job import InputFile, JobSpec

BATCH = 5_000  # jobs that stand in memory at once
PROGRESS_S = 0.5


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(
        app,
        "submit",
        settings=TAKES_A_COMMAND,
        examples=[
            "tasuki submit --subject render.eu.1 --file scene.blend render --mode fast",
            "tasuki submit --array 1-1000 --job-id study-7 simulate --seed {i}      # jobs study-7.1 to study-7.1000",
            "find . -name '*.wav' | tasuki submit --each-line - --wait encode --in {line}",
            "tasuki submit --subject math.square --payload-file number.txt -        # - instead of EXEC: a Python handler's job",
        ],
    )(submit)


def submit(
    exec_: options.Exec,
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="All of it belongs to the job.")] = None,
    array: Annotated[
        str | None,
        typer.Option("--array", metavar="RANGE", help="One job per index (1-1000, 0-100:10, 3,7,9-12); {i} in ARGS is replaced."),
    ] = None,
    each_line: Annotated[
        str | None,
        typer.Option("--each-line", metavar="FILE", help="One job per line (- for stdin): {line} in ARGS, or the last argument."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until all have ended; exit 1 if one did not succeed.")] = False,
    subject: options.Subject = None,
    job_id: options.JobId = None,
    files: options.Files = None,
    env: options.Environment = None,
    payload_file: options.PayloadFile = None,
    timeout: options.Timeout = None,
    retries: Annotated[int, typer.Option("--retries", metavar="N", help="How often a failure is tried again.")] = 3,
    priority: options.Priority = 5,
    not_before: options.NotBefore = None,
    not_after: options.NotAfter = None,
    permanent_exit: options.PermanentExit = None,
    retry_exit: options.RetryExit = None,
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> int:
    """Submit jobs; returns when they are durable.

    The same --job-id and body again is the same job, not a second one.
    """
    from tasuki.cli.jobspec import array_elements, check_files, job_fields, line_elements, open_lines, parse_array

    if array and each_line:
        raise InvalidInput("--array and --each-line cannot stand together; choose one")
    fields = job_fields(
        exec_,
        args or (),
        subject=subject,
        env=env,
        timeout=timeout,
        retries=retries,
        priority=priority,
        payload_file=payload_file,
        not_before=not_before,
        not_after=not_after,
        permanent_exit=permanent_exit,
        retry_exit=retry_exit,
    )
    inputs = check_files(files)
    output = Output(json=json, quiet=quiet)
    place = Destination(to, data, token_file, tls_ca)
    if array:
        elements = array_elements(parse_array(array), fields["args"])
        return with_client(place, lambda client: _submit_many(client, fields, inputs, job_id, elements, wait, output))
    if each_line:
        with open_lines(each_line) as lines:
            elements = line_elements(lines, fields["args"])
            return with_client(place, lambda client: _submit_many(client, fields, inputs, job_id, elements, wait, output))
    return with_client(place, lambda client: _submit_one(client, {**fields, "job_id": job_id, "files": inputs}, wait, output))


async def _submit_one(client: AsyncClient, fields: dict[str, Any], wait: bool, output: Output) -> int:
    job_id = fields["job_id"] or client.new_id()
    try:
        handle = await client.submit(**{**fields, "job_id": job_id}, watch=wait)
    except asyncio.CancelledError:  # how Ctrl-C comes here; it may have been accepted all the same
        output.hint(
            f"it is not known whether the job was accepted; see: tasuki status {job_id}; stop it with: tasuki cancel {job_id}"
        )
        raise
    answer: dict[str, Any] = {"job_id": handle.job_id, "existed": handle.existed}
    failed = 0
    if wait:
        states = await _wait_all(client, [handle], f"job {handle.job_id}", _single_words(handle.job_id), output)
        answer["state"] = states[0]
        failed = states[0] != "SUCCEEDED"

    def human() -> Iterator[str]:
        yield f"{handle.job_id}{'  ' + answer['state'] if wait else ''}"

    output.show(answer, human, [handle.job_id])
    return exit_codes.FAILED if failed else exit_codes.OK


async def _submit_many(
    client: AsyncClient,
    fields: dict[str, Any],
    files: Sequence[str],
    array_id: str | None,
    elements: Iterable[tuple[int, tuple[str, ...]]],
    wait: bool,
    output: Output,
) -> int:
    array_id = array_id or client.new_id()
    inputs = tuple([await _uploaded(client, file) for file in files])
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
        what, left_words = f"array {array_id} ({count} jobs)", _array_words(array_id, count)
        states = await _wait_all(client, handles, what, left_words, output)
    tally = {state: states.count(state) for state in sorted(set(states))}
    answer = {"array_id": array_id, "count": count, **({"states": tally} if wait else {})}

    def human() -> Iterator[str]:
        yield f"{array_id}  {count} jobs" + "".join(f", {number} {state}" for state, number in tally.items())

    output.show(answer, human, [array_id])
    output.hint(f"look at them with: tasuki list --array {array_id}")
    return exit_codes.FAILED if any(state != "SUCCEEDED" for state in states) else exit_codes.OK


async def _uploaded(client: AsyncClient, file: str) -> InputFile:
    """The inputs of an array are uploaded once, and every element names them by their hash."""
    from pathlib import Path

    from tasuki.core.job import InputFile

    ref = await client.put_file(file)
    return InputFile(Path(file).name, sha256=ref.sha256, size_bytes=ref.size_bytes)


def _element(fields: dict[str, Any], files: tuple[InputFile, ...], array_id: str, index: int, args: tuple[str, ...]) -> JobSpec:
    from tasuki.core.job import JobSpec

    own = {"args": args, "files": files, "array_id": array_id, "headers": {"array_index": str(index)}}
    return JobSpec(job_id=f"{array_id}.{index}", **{**fields, **own})


def _single_words(job_id: str) -> str:
    return f"the job goes on; look at it with: tasuki status {job_id}; stop it with: tasuki cancel {job_id}"


def _array_words(array_id: str, count: int) -> str:
    listing = f"tasuki list --array {array_id}"
    return (
        f"the jobs go on; look at them with: {listing}; stop them with: {listing} --quiet --limit {count} | xargs tasuki cancel"
    )


async def _wait_all(
    client: AsyncClient, handles: Sequence[AsyncJobHandle], what: str, left_words: str, output: Output
) -> list[str]:
    """The states that the jobs ended in."""
    from tasuki.cli.waiting import ConnectionNotice, telling_why_pending

    output.hint(f"submitted {what}; waiting for the end")
    notice = ConnectionNotice(client, output)
    ends = [asyncio.ensure_future(handle.outcome()) for handle in handles]
    try:
        pending = set(ends)
        with telling_why_pending(client, lambda: next((each.job_id for each in handles if not each.done), None), output):
            while pending:
                output.progress(f"{len(ends) - len(pending)} of {len(ends)} jobs have ended")
                _, pending = await asyncio.wait(pending, timeout=PROGRESS_S)
                notice.look()
        return [str(end.result().state) for end in ends]
    except asyncio.CancelledError:  # how Ctrl-C comes here
        output.hint(left_words)
        raise
    finally:
        for end in ends:
            end.cancel()
