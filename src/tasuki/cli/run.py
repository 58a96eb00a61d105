"""`tasuki run`: one job, from start to end, as if its program had been started here.

The job's stdout, stderr and exit code become those of the command, the two streams as they come; what did not arrive while the
job ran is read from its result. Ctrl-C cancels the job and waits for its end; a second one leaves the job. If the reader of our
stdout goes away, the job is canceled too, as SIGPIPE would have ended the program.

`tasuki submit`: one job, an array of jobs, or one job per line of a file; returns when they are durable.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from tasuki.cli import agents, jobspec, result
from tasuki.cli.command import PATH, STDIN, Destination, command, connection_options, duration, flag, option, quiet_option
from tasuki.cli.connect import with_client
from tasuki.cli.output import ExitCode, Output, when
from tasuki.client import AsyncClient, AsyncJobHandle
from tasuki.client.aio import SUBMIT_NAMES
from tasuki.client.logs import LogFollower
from tasuki.core.job import InputFile, JobSpec
from tasuki.core.protocol import JobResult
from tasuki.core.units import shown_duration
from tasuki.errors import InvalidInput, TasukiError, Unavailable

PROGRESS_S = 0.5
PENDING_S = 3.0  # a job that waits longer than this has a reason that its user should know
BATCH = 5_000  # jobs in memory at once
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
    with result.saved_to(output_file) as path:
        return with_client(place, lambda client: _run(client, fields, path, output, stream=stream))


async def _run(client: AsyncClient, fields: dict[str, Any], path: Path, output: Output, *, stream: bool) -> int:
    """Run a job, save its result at `path`, and return the exit code."""
    fields = jobspec.located(fields, client)
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
        with _explaining_pending(client, lambda: job_id, output):
            ended = await _wait(client, handle, ending, stop, output)
        if ended is not None:
            if handle.existed and fields["job_id"]:
                result_of = f"this is its stored result, of {when(ended.finished_at)}"
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


def _submit_options(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a JobSpec as `AsyncClient.submit` calls them."""
    return {SUBMIT_NAMES.get(name, name): value for name, value in fields.items()}


async def _submit(client: AsyncClient, fields: dict[str, Any], stop: _Interrupts, output: Output) -> AsyncJobHandle[bytes] | None:
    """Return the job as the server accepted it, or None if the user interrupted and the server did not answer."""
    notice = _connection_notice(client, output)
    submitting = asyncio.ensure_future(client.submit(**_submit_options(fields)))
    try:
        while not submitting.done() and not stop.count:
            await _sleep_until(submitting, stop)
            notice()
        # An accepted job is canceled afterwards; so it is not left behind just because Ctrl-C came early.
        await asyncio.wait({submitting}, timeout=CANCEL_S)
        if submitting.done():
            return submitting.result()
        output.hint(f"the server did not answer; job {fields['job_id']} may have been submitted, and may go on")
        return None
    finally:
        submitting.cancel()


async def _wait(
    client: AsyncClient, handle: AsyncJobHandle[bytes], ending: asyncio.Future[JobResult], stop: _Interrupts, output: Output
) -> JobResult | None:
    """Return how the job ended, or None if the user does not want to wait for it any more."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    notice = _connection_notice(client, output)
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
        await client.save_result(ended, path)
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


# ---------------------------------------------------------------------------------------------------- while a job waits


@contextmanager
def _explaining_pending(client: AsyncClient, waited_for: Callable[[], str | None], output: Output) -> Iterator[None]:
    """Hint once why a job still waits for a worker; `waited_for` returns the id of a job that has not ended."""

    async def explain() -> None:
        await asyncio.sleep(PENDING_S)
        job_id = waited_for()
        if job_id is None or output.json or output.quiet:
            return
        with suppress(TasukiError):  # only a hint: a user who may not ask why still gets the result
            explanation = await client.explain(job_id)
            if explanation.state == "PENDING" and explanation.because:
                output.hint(f"job {job_id} is PENDING: {explanation.because[0]}")

    task = asyncio.ensure_future(explain())
    try:
        yield
    finally:
        task.cancel()


def _connection_notice(client: AsyncClient, output: Output) -> Callable[[], None]:
    """Return a function that hints, the first time that it finds the client not connected."""
    given = False

    def notice() -> None:
        nonlocal given
        if not client.connected and not given:
            given = True
            output.hint("connection lost; trying again …")

    return notice


# ---------------------------------------------------------------------------------------------------- submit


@command(
    "submit",
    settings=jobspec.TAKES_A_COMMAND,
    examples=[
        "tasuki submit --subject render.eu.1 --file scene.blend render --mode fast",
        "tasuki submit --array 1-1000 --job-id study-7 simulate --seed {i}      # jobs study-7.1 to study-7.1000",
        "ls *.wav | tasuki submit --each-line - --file {line} --wait encode      # one job per file, which it finds as in/NAME",
        "tasuki submit --subject math.square --payload-file number.txt -        # - instead of EXEC: a Python handler's job",
    ],
)
@option("--array", metavar="RANGE", help="One job per index (1-1000, 0-100:10, 3,7,9-12); {i} in ARGS and --file is replaced.")
@option("--each-line", metavar="FILE", help="One job per line (- for stdin): {line} in ARGS or --file, or the last argument.")
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
    place: Destination,
) -> int:
    """A second job with the same --job-id and body is the same job."""
    if array and each_line:
        raise InvalidInput("--array and --each-line cannot stand together; choose one")
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
    job_id = fields["job_id"] or client.new_id()
    try:
        handle = await client.submit(**_submit_options({**fields, "job_id": job_id}), watch=wait)
    except asyncio.CancelledError:  # Ctrl-C; the server may have accepted the job all the same
        output.hint(
            f"it is not known whether the job was accepted; see: tasuki status {job_id}; stop it with: tasuki cancel {job_id}"
        )
        raise
    answer: dict[str, Any] = {"job_id": job_id, "existed": handle.existed}
    failed = 0
    if wait:
        hint = f"the job goes on; look at it with: tasuki status {job_id}; stop it with: tasuki cancel {job_id}"
        states = await _wait_all(client, [handle], f"job {job_id}", hint, output)
        answer["state"] = states[0]
        failed = states[0] != "SUCCEEDED"
    output.show(answer, lambda: [f"{job_id}{'  ' + answer['state'] if wait else ''}"], [job_id])
    return ExitCode.FAILED if failed else ExitCode.OK


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
        for file in jobspec.check_files(dict.fromkeys(file for element in elements for file in element.files)):
            uploaded[file] = await _uploaded(client, file)
            output.progress(f"{len(uploaded)} files uploaded")
    elements = iter(elements)
    while batch := list(itertools.islice(elements, BATCH)):
        submitted = await client.submit_many([_spec(fields, array_id, element, uploaded) for element in batch], watch=wait)
        count += len(submitted)
        if wait:
            handles += submitted
        output.progress(f"{count} jobs submitted")
    if not count:
        raise InvalidInput("there was nothing to submit: no line with text in it")
    states: list[str] = []
    if wait:
        listing = f"tasuki list --array {array_id}"
        stop = f"{listing} --quiet --limit {count} | xargs tasuki cancel"
        hint = f"the jobs go on; look at them with: {listing}; stop them with: {stop}"
        states = await _wait_all(client, handles, f"array {array_id} ({count} jobs)", hint, output)
    tally = {state: states.count(state) for state in sorted(set(states))}
    answer = {"array_id": array_id, "count": count, **({"states": tally} if wait else {})}
    line = f"{array_id}  {count} jobs" + "".join(f", {number} {state}" for state, number in tally.items())
    output.show(answer, lambda: [line], [array_id])
    output.hint(f"look at them with: tasuki list --array {array_id}")
    return ExitCode.FAILED if any(state != "SUCCEEDED" for state in states) else ExitCode.OK


def _spec(fields: dict[str, Any], array_id: str, element: jobspec.ArrayJob, uploaded: dict[str, InputFile]) -> JobSpec:
    own = {"job_id": f"{array_id}.{element.number}", "args": element.args, "headers": {"array_index": str(element.number)}}
    return JobSpec(**{**fields, **own, "files": tuple(uploaded[file] for file in element.files)})


async def _uploaded(client: AsyncClient, file: str) -> InputFile:
    """Upload an input of an array once; every element that needs it names it by its hash."""
    ref = await client.put_file(file)
    return InputFile(Path(file).name, sha256=ref.sha256, size_bytes=ref.size_bytes)


async def _wait_all(
    client: AsyncClient, handles: Sequence[AsyncJobHandle[bytes]], what: str, hint: str, output: Output
) -> list[str]:
    """Wait for all jobs, and return the states that they ended in; `hint` is shown if the user interrupts."""
    output.hint(f"submitted {what}; waiting for the end")
    notice = _connection_notice(client, output)
    ends = [asyncio.ensure_future(handle.outcome()) for handle in handles]
    try:
        pending = set(ends)
        with _explaining_pending(client, lambda: next((each.job_id for each in handles if not each.done), None), output):
            while pending:
                output.progress(f"{len(ends) - len(pending)} of {len(ends)} jobs have ended")
                _, pending = await asyncio.wait(pending, timeout=PROGRESS_S)
                notice()
        return [str(end.result().state) for end in ends]
    except asyncio.CancelledError:  # Ctrl-C
        output.hint(hint)
        raise
    finally:
        for end in ends:
            end.cancel()
