"""`tasuki run`: one job, from start to end, as if its program had been started here.

The job's stdout, stderr and exit code become our own, the two streams as they come: what was not heard of while the job ran
is read from its result. Ctrl-C cancels the job and waits for its end; a second one leaves. So does the end of whoever read our
stdout, as it would have ended the program.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tasuki.cli import exit_codes, options
from tasuki.cli.command import TAKES_A_COMMAND, command
from tasuki.cli.connect import STDIN, Destination, with_client
from tasuki.cli.output import Output
from tasuki.errors import TasukiError, Unavailable

if TYPE_CHECKING:
    from tasuki.client import AsyncClient, AsyncJobHandle
    from tasuki.client.logs import LogFollower
    from tasuki.core.protocol import JobResult

PROGRESS_S = 0.5
# The program ran, and its exit code is its own, or that of the signal which a limit ended it with.
ENDED_ITSELF = frozenset({"EXIT_CODE", "SIGNAL", "OOM", "PROCESS_LIMIT", "CPU_LIMIT", "FILE_SIZE_LIMIT"})
CANCEL_S = 5.0  # how long a server that may be gone gets to answer before the user's terminal is free again


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(
        app,
        "run",
        exit_code=_own_failure,
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
    )(run)


def _own_failure(error: TasukiError) -> int:
    """Tasuki's own errors must not look like an exit code of the job."""
    return exit_codes.COULD_NOT_RUN


def _not_stdout(output_file: Path | None) -> Path | None:
    if output_file == Path("-"):
        raise typer.BadParameter("stdout is the job's own; name a file, or fetch it later with: tasuki result JOB -o -")
    return output_file


def run(
    exec_: options.Exec,
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="All of it belongs to the job.")] = None,
    subject: options.Subject = None,
    job_id: options.JobId = None,
    files: options.Files = None,
    env: options.Environment = None,
    payload_file: options.PayloadFile = None,
    timeout: options.Timeout = None,
    retries: Annotated[int, typer.Option("--retries", metavar="N", help="How often a failure is tried again.")] = 0,
    priority: options.Priority = 5,
    not_before: options.NotBefore = None,
    not_after: options.NotAfter = None,
    permanent_exit: options.PermanentExit = None,
    retry_exit: options.RetryExit = None,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Save the result, a ZIP with logs and output files.", callback=_not_stdout
        ),
    ] = None,
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    hedge: options.Hedge = None,
    give_up_after: options.GiveUpAfter = None,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Print the output when the job has ended.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No words of tasuki's own.")] = False,
    json: options.Json = False,
) -> int:
    """Run one job: prints its output, exits with its code.

    tasuki's own options stand before EXEC. With no server anywhere, an embedded one runs for the time of the command.

    What is piped in (or comes from a file with <) becomes the job's standard input, up to 64 KiB: a pipe counts if it has
    data or ends at once. With < /dev/null nothing is read, as in a loop over lines; --payload-file - waits for the pipe's end.

    With agents:… the job goes to whichever node is well, with its --file inputs, and its output is printed at its end. Node
    agents take no standard input: what is piped in is left unread.

    Exits with the job's own code; 125 for every error of tasuki itself (no server, no token, a conflict), 2 for wrong options.
    """
    from tasuki.cli import agents
    from tasuki.cli.jobspec import check_files, job_fields, piped_payload

    output = Output(json=json, quiet=quiet)
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
    fields.update(job_id=job_id, files=check_files(files))
    place = Destination(to, data, token_file, tls_ca)
    if agents.meant(place, hedge, give_up_after):
        return agents.run_on_agents(place, fields, output_file, output, hedge, give_up_after)
    if payload_file is None and token_file != STDIN:
        fields["payload"] = piped_payload(output.hint)
    output.progress("connecting …")
    stream = not (no_stream or json)
    return with_client(place, lambda client: _run(client, fields, output_file, output, stream=stream))


async def _run(client: AsyncClient, fields: dict[str, Any], output_file: Path | None, output: Output, *, stream: bool) -> int:
    from tasuki.cli.waiting import telling_why_pending

    stop = _Interrupts()
    job_id = fields["job_id"] or client.new_id()
    streaming: _Streaming | None = None
    try:
        handle = await _submit(client, {**fields, "job_id": job_id}, stop, output)
        if handle is None:
            return exit_codes.INTERRUPTED
        ending = asyncio.ensure_future(handle.outcome())
        if stream and fields["exec"]:
            streaming = _Streaming(client, job_id, ending, stop, output)
        with telling_why_pending(client, lambda: job_id, output):
            ended = await _wait(client, handle, ending, stop, output)
        if ended is not None:
            code = await _deliver(client, ended, output_file, output, streaming, is_command=bool(fields["exec"]))
            return exit_codes.BROKEN_PIPE if stop.broken_pipe else code
        return exit_codes.INTERRUPTED
    finally:
        stop.close()
        if streaming is not None:
            await streaming.close()


class _Interrupts:
    """Ctrl-C, counted instead of raised; a SIGTERM counts the same."""

    def __init__(self) -> None:
        self.count = 0
        self.broken_pipe = False
        """Nobody reads our stdout any more."""
        self.changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._note)

    def _note(self) -> None:
        self.count += 1
        self.changed.set()

    def note_broken_pipe(self) -> None:
        """A program would have been ended by SIGPIPE: its job is, too."""
        self.broken_pipe = True
        self._note()

    def close(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)


class _Streaming:
    """Passes on what the job writes, as it comes. Where that fails, the rest is left for its end."""

    def __init__(
        self, client: AsyncClient, job_id: str, ending: asyncio.Future[JobResult], stop: _Interrupts, output: Output
    ) -> None:
        from tasuki.cli.logs import BOTH, LogPrinter
        from tasuki.client.logs import LogFollower

        self._told = LogPrinter(output)
        self._stop = stop
        self._followers = [LogFollower(client, job_id, name, on_progress=self._told.progress) for name in BOTH]
        self._tasks = [asyncio.ensure_future(self._follow(follower, ending)) for follower in self._followers]

    async def _follow(self, follower: LogFollower, ending: asyncio.Future[JobResult]) -> None:
        try:
            async for part in follower.live(ending):
                await self._told.part(part)
        except TasukiError as error:
            self._told.output.hint(f"tasuki: {follower.stream} comes at the job's end: {error.message}")
        except BrokenPipeError:
            self._stop.note_broken_pipe()

    async def finish(self, path: Path | None, attempt: int) -> None:
        """The job has ended: what was not passed on yet, from the result at `path`."""
        await asyncio.gather(*self._tasks)
        if path is None or self._stop.broken_pipe:
            return
        for follower in self._followers:
            async for part in follower.rest_in(path, attempt):
                await self._told.part(part)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for follower in self._followers:
            await follower.close()


async def _submit(client: AsyncClient, fields: dict[str, Any], stop: _Interrupts, output: Output) -> AsyncJobHandle | None:
    """The job as the server took it, or None: the user does not want it any more, and the server did not answer."""
    from tasuki.cli.waiting import ConnectionNotice

    notice = ConnectionNotice(client, output)
    submitting = asyncio.ensure_future(client.submit(**fields))
    try:
        while not submitting.done() and not stop.count:
            await _sleep_until(submitting, stop)
            notice.look()
        # What it took is canceled afterwards; so it is not left behind just because Ctrl-C came early.
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
    """The end of the job, or None if the user does not want to wait for it any more."""
    from tasuki.cli.waiting import ConnectionNotice

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
            notice.look()
            output.progress(f"job {handle.job_id}: {loop.time() - began:.0f} s")
        return ending.result()
    finally:
        ending.cancel()
        if canceling is not None:
            canceling.cancel()


async def _sleep_until(work: asyncio.Future[Any], stop: _Interrupts) -> None:
    """Until the work is done or a signal came, but not longer than a look around is due."""
    told = asyncio.ensure_future(stop.changed.wait())
    try:
        await asyncio.wait({work, told}, timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        told.cancel()
    stop.changed.clear()


async def _cancel(client: AsyncClient, job_id: str) -> bool:
    """Whether the server took it."""
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
    """Give out what the job left: the rest of a command's logs, or a handler's bytes."""
    from tasuki.cli import archive

    code = exit_code_of(ended)
    logs = {"stdout": bytearray(), "stderr": bytearray()}
    output.end_progress()
    with archive.scratch_file() as scratch:
        path = output_file or scratch
        left = archive.has_result(ended)
        if left:
            await archive.fetch(client, ended, path)
        if streaming is not None:
            await streaming.finish(path if left else None, ended.attempt)
        elif left:
            stdout, stderr = (sys.stdout.buffer.write, sys.stderr.buffer.write)
            if output.json:
                stdout, stderr = logs["stdout"].extend, logs["stderr"].extend
            with path.open("rb") as source:
                if is_command:
                    archive.copy_logs(source, stdout, stderr)
                else:
                    archive.copy_all(source, stdout)
            sys.stdout.buffer.flush()
            sys.stderr.buffer.flush()
    if output.json:
        texts = {name: log.decode("utf-8", "replace") for name, log in logs.items()}
        output.show({**describe(ended), **texts, "exit": code}, list)
    elif ended.outcome.error_code not in (None, "EXIT_CODE"):
        output.hint(f"tasuki: {ended.outcome.error_code}: job {ended.job_id}: {ended.outcome.message or ended.state}")
    return code


def exit_code_of(ended: JobResult) -> int:
    """The job's own exit code, or the one that says why it has none."""
    outcome = ended.outcome
    if outcome.error_code == "TIMED_OUT":
        return exit_codes.TIME_LIMIT
    if outcome.error_code == "CANCELED":
        return exit_codes.INTERRUPTED
    if outcome.error_code is None:
        return outcome.exit_code or exit_codes.OK
    if outcome.error_code in ENDED_ITSELF and outcome.exit_code:
        return outcome.exit_code
    return exit_codes.COULD_NOT_RUN


def describe(ended: JobResult) -> dict[str, Any]:
    """The end of a job, for programs."""
    outcome = ended.outcome
    return {
        "job_id": ended.job_id,
        "state": str(ended.state),
        "attempt": ended.attempt,
        "exit_code": outcome.exit_code,
        "error_code": outcome.error_code,
        "message": outcome.message,
        "result_sha256": outcome.result_sha256,
    }
