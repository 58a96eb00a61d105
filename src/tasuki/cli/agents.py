"""`tasuki run --to agents:…`: one job on whichever node agent is well, without a server.

The job's stdout and stderr are printed from its result when it has ended, and its exit code becomes ours. Ctrl-C cancels it at
all nodes; a SIGTERM leaves it, and the same --job-id takes it up again. Nothing here needs Linux.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tasuki.cli import exit_codes
from tasuki.cli.connect import Destination, read_token
from tasuki.cli.output import Output
from tasuki.core.address import AGENTS
from tasuki.errors import ConfigError, InvalidInput

if TYPE_CHECKING:
    from tasuki.client.agents.client import AgentResult, AsyncAgentsClient, RunProgress

# Fields of a job that need a server, with their options.
NEEDS_A_SERVER = {
    "subject": "--subject",
    "env": "--env",
    "payload": "--payload-file",
    "max_retries": "--retries",
    "priority": "--priority",
    "not_before": "--not-before",
    "not_after": "--not-after",
    "permanent_exit_codes": "--permanent-exit",
    "retry_exit_codes": "--retry-exit",
}
USUAL_PRIORITY = 5


def address_of(place: Destination) -> str:
    """--to, else TASUKI_URL."""
    from tasuki.config import default_url

    return place.to or default_url() or ""


def meant(place: Destination, hedge: float | None, give_up_after: float | None) -> bool:
    """Whether the command goes to node agents; options that are theirs alone go nowhere else."""
    if address_of(place).startswith(AGENTS):
        return True
    option = "--hedge" if hedge is not None else "--give-up-after" if give_up_after is not None else ""
    if option:
        raise InvalidInput(f"{option} is for node agents; name them with --to agents:http://n1:7090,http://n2:7090")
    return False


def open_client(place: Destination) -> AsyncAgentsClient:
    """Its breakers are remembered in the data folder."""
    from tasuki.client.agents.client import AsyncAgentsClient
    from tasuki.config import data_folder

    where = address_of(place)
    if not where.startswith(AGENTS):
        raise ConfigError(f"--to {where!r} names no node agents; write --to agents:http://n1:7090,http://n2:7090")
    return AsyncAgentsClient(where, token=read_token(place.token_file), tls_ca=place.tls_ca, notes=data_folder(place.data).root)


def run_on_agents(
    place: Destination,
    fields: dict[str, Any],
    output_file: Path | None,
    output: Output,
    hedge_s: float | None,
    limit_s: float | None,
) -> int:
    """The exit code of `tasuki run`."""
    _check(fields)
    return asyncio.run(_run(place, fields, output_file, output, hedge_s, limit_s))


def _check(fields: dict[str, Any]) -> None:
    for name, option in NEEDS_A_SERVER.items():
        value = fields.get(name)
        if value and (name != "priority" or value != USUAL_PRIORITY):
            raise InvalidInput(f"{option} needs a server; node agents take EXEC, its arguments, --file, --job-id and --timeout")
    if not fields["exec"]:
        raise InvalidInput("handlers need a server and workers; name a program that the agents allow")


async def _run(
    place: Destination,
    fields: dict[str, Any],
    output_file: Path | None,
    output: Output,
    hedge_s: float | None,
    limit_s: float | None,
) -> int:
    from tasuki.cli import archive

    with ExitStack() as stack:
        scratch = stack.enter_context(archive.scratch_file())
        stream = None
        if output_file is not None and _is_stream(output_file):
            stream, output_file = stack.enter_context(_open_stream(output_file)), None
        async with open_client(place) as client:
            job_id = fields["job_id"] or client.new_id()
            output.progress(f"job {job_id}: looking for a node …")
            try:
                ended = await client.run(
                    fields["exec"],
                    fields["args"],
                    files=fields["files"],
                    output=output_file or scratch,
                    job_id=job_id,
                    known=fields["job_id"] is not None,
                    timeout_s=fields["timeout_s"],
                    limit_s=limit_s,
                    hedge_s=hedge_s,
                    on_progress=lambda progress: output.progress(f"job {job_id}: {_words(progress)}"),
                    on_note=lambda text: output.hint(f"tasuki: job {job_id}: {text}"),
                )
            except asyncio.CancelledError:
                await _cancel(client, job_id, output)
                return exit_codes.INTERRUPTED
            if stream is not None and ended.path is not None:
                _copy(ended.path, stream)
            return _deliver(ended, output)


def _is_stream(path: Path) -> bool:
    """A device, a FIFO, /dev/stdout: to be written into, and never to be replaced. A folder is neither this nor a file."""
    if not path.exists() or path.is_dir():
        return False
    return not path.is_file() or (path.is_symlink() and path.is_relative_to("/dev"))


def _open_stream(path: Path) -> BinaryIO:
    """Before the run: a FIFO that nobody reads shows now, and does not hang us at the end."""
    flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise InvalidInput(
            f"-o {str(path)!r} cannot be written: {error.strerror}; if it is a FIFO, start its reader first"
        ) from None
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "wb")


def _copy(path: Path, stream: BinaryIO) -> None:
    try:
        with path.open("rb") as source:
            shutil.copyfileobj(source, stream)
        stream.flush()
    except OSError as error:
        raise InvalidInput(f"the result cannot be written to -o: {error.strerror}; the same --job-id fetches it again") from None


async def _cancel(client: AsyncAgentsClient, job_id: str, output: Output) -> None:
    from tasuki.client.agents.client import NOT_KNOWN, REMOVED, STOPPING

    output.hint(f"canceling job {job_id} …  (Ctrl-C again: leave it)")
    answers = await client.cancel(job_id)
    if output.json:
        output.show({"job_id": job_id, "canceled": answers}, list)
    stopping = [node for node, answer in answers.items() if answer == STOPPING]
    if stopping:
        output.hint(
            f"the job is still being stopped at {', '.join(stopping)}: its program did not end at once, and will be killed"
        )
    unsure = [f"{node}: {answer}" for node, answer in answers.items() if answer not in (REMOVED, NOT_KNOWN, STOPPING)]
    if unsure:
        output.hint(f"the job may go on at {'; '.join(unsure)}")


def _words(progress: RunProgress) -> str:
    if progress.stage == "run":
        done = "" if progress.fraction is None else f" {progress.fraction:.0%}"
        return f"runs at {progress.node}{done} {progress.message}".rstrip()
    total = f" of {progress.total_bytes}" if progress.total_bytes is not None else ""
    return f"{progress.stage} {progress.done_bytes}{total} bytes, {progress.node}"


def _deliver(ended: AgentResult, output: Output) -> int:
    from tasuki.cli import archive

    code = exit_code_of(ended)
    logs = {"stdout": bytearray(), "stderr": bytearray()}
    output.end_progress()
    if ended.path is not None:
        stdout, stderr = (sys.stdout.buffer.write, sys.stderr.buffer.write)
        if output.json:
            stdout, stderr = logs["stdout"].extend, logs["stderr"].extend
        with ended.path.open("rb") as source:
            archive.copy_logs(source, stdout, stderr)
        sys.stdout.buffer.flush()
        sys.stderr.buffer.flush()
    if output.json:
        texts = {name: log.decode("utf-8", "replace") for name, log in logs.items()}
        output.show({**describe(ended), **texts, "exit": code}, list)
    elif ended.path is None:
        output.hint(f"tasuki: job {ended.job_id} {ended.outcome}, and {ended.node} was lost before its result could be fetched")
    elif ended.error_code not in (None, "EXIT_CODE"):
        output.hint(f"tasuki: {ended.error_code}: job {ended.job_id}: {ended.message or ended.outcome}")
    return code


def exit_code_of(ended: AgentResult) -> int:
    """The program's own exit code, or the one that says why it has none."""
    from tasuki.cli.run import ENDED_ITSELF

    if ended.succeeded:
        return exit_codes.OK
    if ended.outcome == "timed_out":
        return exit_codes.TIME_LIMIT
    return ended.exit_code if ended.exit_code and ended.error_code in ENDED_ITSELF else exit_codes.COULD_NOT_RUN


def describe(ended: AgentResult) -> dict[str, Any]:
    """The end of a job, for programs; the words are those of `tasuki run` with a server."""
    return {
        "job_id": ended.job_id,
        "state": ended.outcome.upper(),
        "node": ended.node,
        "cached": ended.cached,
        "exit_code": ended.exit_code,
        "error_code": ended.error_code,
        "message": ended.message,
        "result_sha256": ended.sha256 or None,
    }
