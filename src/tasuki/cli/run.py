"""`tasuki run`: one job, from start to end, as if its program had been started here.

The job's stdout, stderr and exit code become those of the command, the two streams as they come; what did not arrive while the
job ran is read from its result. Ctrl-C cancels the job and waits for its end; a second one leaves the job. If the reader of our
stdout goes away, the job is canceled too, as SIGPIPE would have ended the program.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import click

from tasuki.cli import agents, jobspec, result
from tasuki.cli.arrays import PROGRESS_S, connection_notice, explaining_pending
from tasuki.cli.command import PATH, STDIN, Destination, command, connection_options, duration, flag, option
from tasuki.cli.connect import with_client
from tasuki.cli.output import ExitCode, Output
from tasuki.client.aio import AsyncClient, AsyncJobHandle
from tasuki.client.logs import LogFollower
from tasuki.core.protocol import JobResult
from tasuki.core.units import shown_duration, shown_time
from tasuki.errors import TasukiError, Unavailable

CANCEL_S = 5.0  # how long a server that may be gone gets to answer before the user's terminal is free again


def _not_stdout(context: click.Context, parameter: click.Parameter, output_file: Path | None) -> Path | None:
    if output_file == Path("-"):
        raise click.BadParameter("stdout is the job's own; name a file, or fetch it later with: tasuki result JOB -o -")
    return output_file


@command(
    "run",
    exit_code=lambda error: ExitCode.COULD_NOT_RUN,  # an error of tasuki must not look like an exit code of the job
    settings=jobspec.TAKES_A_COMMAND,
    examples=[
        "tasuki run echo hello",
        "echo hello | tasuki run cat",
        "tasuki run ./script.sh                        # your own jobs run in the current folder",
        "tasuki run -o result.zip sh -c 'sort data.csv > $TASUKI_OUT/sorted.csv'      # the result has what is in $TASUKI_OUT",
        "tasuki run --timeout 1m --file data.csv wc in/data.csv      # with --file in a folder of its own, as on other machines",
        "tasuki run --job-id nightly-2026-01-31 backup /srv        # again with this id: the stored result, no second run",
        "tasuki run --to tcp://host:7000 --token-file token --subject render.eu.1 render --mode fast",
        "tasuki run --to https://host/tasuki --token-file token render --mode fast        # every command works over HTTP",
        "tasuki run --to agents:http://n1:7090,http://n2:7090 --file book.csv -o result.zip pricer --fast    # node agents",
    ],
)
@jobspec.job_options(retries=0)
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
@duration("--hedge", help="Agents: without a result after this time, also at a second node.")
@duration(
    "--give-up-after", help="Agents: how long to try in all. Default: 21m, or a minute more than --timeout if that is longer."
)
@flag("--no-stream", help="Print the output when the job has ended.")
@flag("--quiet", "-q", help="No words of tasuki's own.")
def run(
    output: Output,
    fields: dict[str, Any],
    output_file: Path | None,
    place: Destination,
    hedge: float | None,
    give_up_after: float | None,
    no_stream: bool,
) -> int:
    """tasuki's own options stand before EXEC. With no server anywhere, an embedded one runs for the time of the command.

    Your own program on this machine runs in the current folder, or in --cwd; with --file, on other machines, and under a name
    that a worker allows (--exec) in a folder of its own, with its inputs in in/. Files that it writes to $TASUKI_OUT become part
    of the result. Its environment is PATH, HOME, LANG, LC_ALL and TZ of the worker, --env, and TASUKI_… variables.

    What is piped in (or comes from a file with <) becomes the job's standard input, up to 64 KiB: a pipe counts if it has
    data or ends at once. With < /dev/null nothing is read, as in a loop over lines; --payload-file - waits for the pipe's end.

    With agents:… the job goes to whichever node is well, with its --file inputs, and its output is printed at its end. Node
    agents take no standard input: what is piped in is left unread.

    Exits with the job's own code; 125 for every error of tasuki itself (no server, no token, a conflict), 2 for wrong options.
    """
    if agents.are_meant(place, hedge, give_up_after):
        return asyncio.run(agents.run_on_agents(place, fields, output_file, output, hedge, give_up_after))
    if "payload" not in fields and place.token_file != STDIN:
        fields["payload"] = jobspec.piped_payload(output.hint)
    output.progress("connecting …")
    stream = not (no_stream or output.json)
    with result.saved_to(output_file) as path, jobspec.naming_options():
        return with_client(place, lambda client: _run(client, fields, path, output, stream=stream))


async def _run(client: AsyncClient, fields: dict[str, Any], path: Path, output: Output, *, stream: bool) -> int:
    """Run a job, save its result at `path`, and return the exit code."""
    fields = jobspec.located(fields, client)
    fields["files"] = await jobspec.uploaded(client, fields["files"], output)
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
            if handle.existed and fields["job_id"]:
                result_of = f"this is its stored result, of {shown_time(ended.finished_at)}"
                output.hint(f"job {job_id} does not run again: {result_of}; to run it again: tasuki retry {job_id}")
            code = await _deliver(client, ended, path, output, streaming, is_command=bool(fields["exec"]))
            if stop.output_error is not None and not isinstance(stop.output_error, BrokenPipeError):
                raise stop.output_error
            return code if stop.output_error is None else ExitCode.BROKEN_PIPE
        return ExitCode.INTERRUPTED
    finally:
        stop.close()
        if streaming is not None:
            await streaming.close()


class _Interrupts:
    """Counts SIGINT and SIGTERM, instead of raising an exception."""

    def __init__(self) -> None:
        self.count = 0
        self.output_error: OSError | None = None
        """The reason why the job's output cannot be printed: the reader of our stdout is gone, or its disk is full."""
        self.changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(signum, self._note)

    def _note(self) -> None:
        self.count += 1
        self.changed.set()

    def note_output_error(self, error: OSError) -> None:
        """Count an output that cannot be written like a signal: SIGPIPE would have ended the program."""
        self.output_error = error
        self._note()

    def close(self) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(signum)


class _Streaming:
    """Prints what the job writes, as it comes. Where that fails, the rest is printed from the result."""

    def __init__(
        self, client: AsyncClient, job_id: str, ending: asyncio.Future[JobResult], stop: _Interrupts, output: Output
    ) -> None:
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
        except OSError as error:
            self._stop.note_output_error(error)

    async def finish(self, path: Path | None, attempt: int) -> None:
        """Print what was not printed yet, from the result at `path`, after the end of the job."""
        await asyncio.gather(*self._tasks)
        if path is None or self._stop.output_error is not None:
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


async def _submit(client: AsyncClient, fields: dict[str, Any], stop: _Interrupts, output: Output) -> AsyncJobHandle[bytes] | None:
    """Return the job as the server accepted it, or None if the user interrupted and the server did not answer."""
    notice = connection_notice(client, output)
    submitting = asyncio.ensure_future(client.submit(**jobspec.submit_options(fields)))
    try:
        while not submitting.done() and not stop.count:
            await _sleep_until(submitting, stop)
            notice()
        # An accepted job is canceled afterwards; so it is not left behind just because Ctrl-C came early.
        await asyncio.wait({submitting}, timeout=CANCEL_S)
        if submitting.done():
            return submitting.result()
        output.hint(f"the server did not answer; job {fields['job_id']} may have been submitted, and may run")
        return None
    finally:
        submitting.cancel()


async def _wait(
    client: AsyncClient, handle: AsyncJobHandle[bytes], ending: asyncio.Future[JobResult], stop: _Interrupts, output: Output
) -> JobResult | None:
    """Return how the job ended, or None if the user does not want to wait for it any more."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    notice = connection_notice(client, output)
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
                output.hint(f"the cancel did not reach the server; the job may still run: tasuki status {handle.job_id}")
                return None
            notice()
            output.progress(f"job {handle.job_id}: {shown_duration(loop.time() - began)}")
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
            await client.cancel(job_id, reason="Ctrl-C in tasuki run")
    except (TimeoutError, Unavailable):
        return False
    return True


async def _deliver(
    client: AsyncClient,
    ended: JobResult,
    path: Path,
    output: Output,
    streaming: _Streaming | None,
    *,
    is_command: bool,
) -> int:
    """Print what the job left, the rest of a command's logs or a handler's bytes, and return the exit code."""
    code = exit_code_of(ended)
    captured = result.CapturedOutput(output)
    output.end_progress()
    left = result.has_result(ended)
    if left:
        await result.save(client, ended, path, output)
    if streaming is not None:
        await streaming.finish(path if left else None, ended.attempt)
    elif left:
        captured.print_result(path, is_command=is_command)
    code = result.check_left_out(ended.job_id, ended.outcome.meta.get("left_out"), code, output)
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
