"""`tasuki run`: one job, from start to end, as if its program had been started here.

The job's stdout, stderr and exit code become those of the command, the two streams as they come; what did not arrive while the
job ran is read from its result. Ctrl-C cancels the job and waits for its end; a second one leaves the job. If the reader of our
stdout goes away, the job is canceled too, as SIGPIPE would have ended the program.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tasuki.cli import agents, result
from tasuki.cli.command import PATH, STDIN, Destination, command, connection_options, flag, number, option
from tasuki.cli.connect import with_client
from tasuki.cli.jobspec import TAKES_A_COMMAND, ConnectionNotice, explaining_pending, job_options, piped_payload
from tasuki.cli.output import ExitCode, Output
from tasuki.errors import TasukiError, Unavailable

if TYPE_CHECKING:
    from tasuki.client import AsyncClient, AsyncJobHandle
    from tasuki.client.logs import LogFollower
    from tasuki.core.protocol import JobResult

PROGRESS_S = 0.5
CANCEL_S = 5.0  # how long a server that may be gone gets to answer before the user's terminal is free again


def _not_stdout(context: click.Context, parameter: click.Parameter, output_file: Path | None) -> Path | None:
    if output_file == Path("-"):
        raise click.BadParameter("stdout is the job's own; name a file, or fetch it later with: tasuki result JOB -o -")
    return output_file


@command(
    "run",
    exit_code=lambda error: ExitCode.COULD_NOT_RUN,  # an error of tasuki must not look like an exit code of the job
    settings=TAKES_A_COMMAND,
    examples=[
        "tasuki run echo hello",
        "echo hello | tasuki run cat",
        "tasuki run --timeout 60 --file ./data.csv -o result.zip python3 in/data.py --fast",
        "tasuki run --job-id nightly-2026-01-31 backup /srv        # again with this id: the stored result, no second run",
        "tasuki run --to tcp://host:7000 --token-file token --subject render.eu.1 render --mode fast",
        "tasuki run --to https://host/tasuki --token-file token render --mode fast        # every command works over HTTP",
        "tasuki run --to agents:http://n1:7090,http://n2:7090 --file book.csv -o result.zip pricer --fast    # node agents",
    ],
)
@job_options(retries=0)
@option(
    "--output",
    "-o",
    "output_file",
    metavar="FILE",
    type=PATH,
    callback=_not_stdout,
    help="Save the result, a ZIP with logs and output files.",
)
@connection_options()
@number(
    "--hedge",
    metavar="SECONDS",
    type=click.FloatRange(min=0.0),
    help="Agents: without a result after this time, also at a second node.",
)
@number(
    "--give-up-after",
    metavar="SECONDS",
    type=click.FloatRange(min=0.0),
    help="Agents: how long to try in all. Default: 1260, or a minute more than --timeout if that is longer.",
)
@flag("--no-stream", help="Print the output when the job has ended.")
@flag("--quiet", "-q", help="No words of tasuki's own.")
def run(
    output: Output,
    fields: dict[str, Any],
    payload_file: str | None,
    output_file: Path | None,
    place: Destination,
    hedge: float | None,
    give_up_after: float | None,
    no_stream: bool,
) -> int:
    """tasuki's own options stand before EXEC. With no server anywhere, an embedded one runs for the time of the command.

    What is piped in (or comes from a file with <) becomes the job's standard input, up to 64 KiB: a pipe counts if it has
    data or ends at once. With < /dev/null nothing is read, as in a loop over lines; --payload-file - waits for the pipe's end.

    With agents:… the job goes to whichever node is well, with its --file inputs, and its output is printed at its end. Node
    agents take no standard input: what is piped in is left unread.

    Exits with the job's own code; 125 for every error of tasuki itself (no server, no token, a conflict), 2 for wrong options.
    """
    if agents.are_meant(place, hedge, give_up_after):
        return asyncio.run(agents.run_on_agents(place, fields, output_file, output, hedge, give_up_after))
    if payload_file is None and place.token_file != STDIN:
        fields["payload"] = piped_payload(output.hint)
    output.progress("connecting …")
    stream = not (no_stream or output.json)
    return with_client(place, lambda client: _run(client, fields, output_file, output, stream=stream))


async def _run(client: AsyncClient, fields: dict[str, Any], output_file: Path | None, output: Output, *, stream: bool) -> int:
    stop = _Interrupts()
    job_id = fields["job_id"] or client.new_id()
    streaming: _Streaming | None = None
    try:
        handle = await _submit(client, {**fields, "job_id": job_id}, stop, output)
        if handle is None:
            return ExitCode.INTERRUPTED
        ending = asyncio.ensure_future(handle.outcome())
        if stream and fields["exec"]:
            streaming = _Streaming(client, job_id, ending, stop, output)
        with explaining_pending(client, lambda: job_id, output):
            ended = await _wait(client, handle, ending, stop, output)
        if ended is not None:
            code = await _deliver(client, ended, output_file, output, streaming, is_command=bool(fields["exec"]))
            return ExitCode.BROKEN_PIPE if stop.broken_pipe else code
        return ExitCode.INTERRUPTED
    finally:
        stop.close()
        if streaming is not None:
            await streaming.close()


class _Interrupts:
    """Counts SIGINT and SIGTERM, instead of raising an exception."""

    def __init__(self) -> None:
        self.count = 0
        self.broken_pipe = False
        """The reader of our stdout is gone."""
        self.changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(signum, self._note)

    def _note(self) -> None:
        self.count += 1
        self.changed.set()

    def note_broken_pipe(self) -> None:
        """Count a broken pipe like a signal: SIGPIPE would have ended the program."""
        self.broken_pipe = True
        self._note()

    def close(self) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(signum)


class _Streaming:
    """Prints what the job writes, as it comes. Where that fails, the rest is printed from the result."""

    def __init__(
        self, client: AsyncClient, job_id: str, ending: asyncio.Future[JobResult], stop: _Interrupts, output: Output
    ) -> None:
        from tasuki.client.logs import LogFollower

        self._printer = result.LogPrinter(output)
        self._stop = stop
        self._followers = [LogFollower(client, job_id, name, on_progress=self._printer.progress) for name in result.STREAMS]
        self._tasks = [asyncio.ensure_future(self._follow(follower, ending)) for follower in self._followers]

    async def _follow(self, follower: LogFollower, ending: asyncio.Future[JobResult]) -> None:
        try:
            async for part in follower.live(ending):
                await self._printer.part(part)
        except TasukiError as error:
            self._printer.output.hint(f"tasuki: {follower.stream} comes at the job's end: {error.message}")
        except BrokenPipeError:
            self._stop.note_broken_pipe()

    async def finish(self, path: Path | None, attempt: int) -> None:
        """Print what was not printed yet, from the result at `path`, after the end of the job."""
        await asyncio.gather(*self._tasks)
        if path is None or self._stop.broken_pipe:
            return
        for follower in self._followers:
            async for part in follower.rest_in(path, attempt):
                await self._printer.part(part)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for follower in self._followers:
            await follower.close()


async def _submit(client: AsyncClient, fields: dict[str, Any], stop: _Interrupts, output: Output) -> AsyncJobHandle | None:
    """Return the job as the server accepted it, or None if the user interrupted and the server did not answer."""
    notice = ConnectionNotice(client, output)
    submitting = asyncio.ensure_future(client.submit(**fields))
    try:
        while not submitting.done() and not stop.count:
            await _sleep_until(submitting, stop)
            notice.check()
        # An accepted job is canceled afterwards; so it is not left behind just because Ctrl-C came early.
        await asyncio.wait({submitting}, timeout=CANCEL_S)
        if submitting.done():
            return submitting.result()
        output.hint(f"the server did not answer; job {fields['job_id']} may have been submitted, and may go on")
        return None
    finally:
        submitting.cancel()


async def _wait(
    client: AsyncClient, handle: AsyncJobHandle, ending: asyncio.Future[JobResult], stop: _Interrupts, output: Output
) -> JobResult | None:
    """Return how the job ended, or None if the user does not want to wait for it any more."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    notice = ConnectionNotice(client, output)
    canceling: asyncio.Task[bool] | None = None
    try:
        while not ending.done():
            await _sleep_until(ending, stop)
            if ending.done():
                break
            if stop.count > 1:
                output.hint(f"left job {handle.job_id} behind; look at it with: tasuki status {handle.job_id}")
                return None
            if stop.count and canceling is None:
                output.hint(f"canceling job {handle.job_id} …  (Ctrl-C again: leave it)")
                canceling = asyncio.create_task(_cancel(client, handle.job_id))
            if canceling is not None and canceling.done() and not canceling.result():
                output.hint(f"the cancel did not reach the server; the job may go on: tasuki status {handle.job_id}")
                return None
            notice.check()
            output.progress(f"job {handle.job_id}: {loop.time() - began:.0f} s")
        return ending.result()
    finally:
        ending.cancel()
        if canceling is not None:
            canceling.cancel()


async def _sleep_until(work: asyncio.Future[Any], stop: _Interrupts) -> None:
    """Wait until the work is done or a signal came, PROGRESS_S at most."""
    interrupted = asyncio.ensure_future(stop.changed.wait())
    try:
        await asyncio.wait({work, interrupted}, timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        interrupted.cancel()
    stop.changed.clear()


async def _cancel(client: AsyncClient, job_id: str) -> bool:
    """Cancel the job, and return whether the server accepted that."""
    try:
        async with asyncio.timeout(CANCEL_S):
            await client.cancel([job_id], "Ctrl-C in tasuki run")
    except (TimeoutError, Unavailable):
        return False
    return True


async def _deliver(
    client: AsyncClient,
    ended: JobResult,
    output_file: Path | None,
    output: Output,
    streaming: _Streaming | None,
    *,
    is_command: bool,
) -> int:
    """Print what the job left, the rest of a command's logs or a handler's bytes, and return the exit code."""
    code = exit_code_of(ended)
    captured = result.CapturedOutput(output)
    output.end_progress()
    with result.scratch_file() as scratch:
        path = output_file or scratch
        left = result.has_result(ended)
        if left:
            await result.fetch(client, ended, path)
        if streaming is not None:
            await streaming.finish(path if left else None, ended.attempt)
        elif left:
            captured.print_result(path, is_command=is_command)
    if output.json:
        captured.show(result.describe(ended), code)
    elif ended.outcome.error_code not in (None, "EXIT_CODE"):
        output.hint(f"tasuki: {ended.outcome.error_code}: job {ended.job_id}: {ended.outcome.message or ended.state}")
    return code


def exit_code_of(ended: JobResult) -> int:
    """Return the job's own exit code, or the code that says why it has none."""
    outcome = ended.outcome
    if outcome.error_code == "TIMED_OUT":
        return ExitCode.TIME_LIMIT
    if outcome.error_code == "CANCELED":
        return ExitCode.INTERRUPTED
    if outcome.error_code is None:
        return outcome.exit_code or ExitCode.OK
    if outcome.error_code in result.ENDED_ITSELF and outcome.exit_code:
        return outcome.exit_code
    return ExitCode.COULD_NOT_RUN
