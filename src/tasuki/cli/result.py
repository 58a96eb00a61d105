"""`tasuki result`: what a job left behind."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tasuki.cli import exit_codes, options
from tasuki.cli.command import command
from tasuki.cli.connect import Destination, with_client
from tasuki.cli.output import Output
from tasuki.errors import InvalidInput

if TYPE_CHECKING:
    from tasuki.client import AsyncClient


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(
        app,
        "result",
        examples=[
            "tasuki result JOB                          # waits for the end, saves JOB.zip (of a handler: JOB.bin)",
            "tasuki result JOB -o out.zip --timeout 60",
            "tasuki result JOB --extract ./out          # a new folder with logs and output files",
            "tasuki result --stdout JOB | wc -c",
        ],
    )(result)


def result(
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="Job id.")],
    output_file: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Save it here; - for stdout.")
    ] = None,
    extract: Annotated[
        Path | None, typer.Option("--extract", metavar="FOLDER", help="Unpack the ZIP into this new folder.")
    ] = None,
    stdout: Annotated[bool, typer.Option("--stdout", help="Write the bytes to stdout.")] = False,
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="SECONDS", help="How long to wait for the job's end. Default: no limit.")
    ] = None,
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    json: options.Json = False,
) -> int:
    """Wait for a job's end and save its result.

    Of a command it is a ZIP with its logs and output files, of a handler the bytes it returned. Exit 1 if it did not succeed.
    """
    if output_file == Path("-"):
        output_file, stdout = None, True
    if sum((output_file is not None, extract is not None, stdout)) > 1:
        raise InvalidInput("choose one of --output, --extract and --stdout")
    if stdout and json:
        raise InvalidInput("--stdout writes the result itself; it cannot stand with --json")
    output = Output(json=json)
    place = Destination(to, data, token_file, tls_ca)
    return with_client(place, lambda client: _result(client, job_id, output_file, extract, stdout, timeout, output))


async def _result(
    client: AsyncClient,
    job_id: str,
    output_file: Path | None,
    extract: Path | None,
    stdout: bool,
    timeout: float | None,
    output: Output,
) -> int:
    from tasuki.blobs.zip.writer import extract_zip
    from tasuki.cli import archive
    from tasuki.cli.run import describe

    output.progress(f"waiting for job {job_id} …")
    ended = await client.job(job_id).outcome(timeout)
    saved: Path | None = None
    size = 0
    with archive.scratch_file() as scratch:
        if archive.has_result(ended):
            suffix = "zip" if (await client.status(job_id))["exec"] else "bin"
            saved = output_file or Path(f"{job_id}.{suffix}")
            size = await archive.fetch(client, ended, scratch if stdout or extract else saved)
        if saved is not None and (stdout or extract):
            with scratch.open("rb") as source:
                if extract is not None:
                    extract_zip(source, extract)
                else:
                    shutil.copyfileobj(source, sys.stdout.buffer)
                    sys.stdout.buffer.flush()
            saved = extract
    succeeded = ended.state == "SUCCEEDED"
    if not stdout:
        answer = {**describe(ended), "path": str(saved) if saved else None, "size_bytes": size}
        where = f"{saved}  {size} bytes" if saved else "it left no result"
        output.show(answer, lambda: [where])
    if not succeeded:
        output.hint(f"job {job_id} is {ended.state}: {ended.outcome.message or ended.outcome.error_code}")
    return exit_codes.OK if succeeded else exit_codes.FAILED
