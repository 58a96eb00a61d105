"""`tasuki status`, `list`, `cancel`, `explain`, `retry`: jobs that were submitted before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tasuki.cli import exit_codes, options
from tasuki.cli.command import command
from tasuki.cli.connect import Destination, with_client
from tasuki.cli.output import Output, plain, table, when
from tasuki.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from tasuki.client import AsyncClient

PAGE = 1000
ASK_MAX = 1000  # ids in one request
ENDED = ("SUCCEEDED", "FAILED", "CANCELED", "TIMED_OUT", "SKIPPED")
UNSUCCESSFUL = ("FAILED", "TIMED_OUT")

JobIds = Annotated[list[str], typer.Argument(metavar="JOB...", help="Job ids.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    command(app, "status", examples=["tasuki status nightly-2026-01-31", "tasuki status --json JOB | jq .[0].state"])(status)
    command(
        app,
        "list",
        examples=[
            "tasuki list --state FAILED --limit 20",
            "tasuki list --subject 'render.>' --array ARRAY",
            "tasuki list --text 'exit code 3' --quiet | xargs tasuki retry",
        ],
    )(list_jobs)
    command(app, "cancel", examples=["tasuki cancel JOB --reason 'wrong input'", "tasuki cancel JOB1 JOB2"])(cancel)
    command(app, "explain", examples=["tasuki explain JOB      # why it waits, why it failed, what befell it"])(explain)
    command(
        app,
        "retry",
        examples=[
            "tasuki retry JOB",
            "tasuki retry --array ARRAY --only-failed",
            "tasuki retry JOB1 JOB2 --reason 'disk replaced'",
        ],
    )(retry)


def status(
    job_ids: JobIds,
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    json: options.Json = False,
) -> int:
    """Where jobs stand, and how they ended.

    Shows those that are found; exit 3 if others are not.
    """
    views, unknown = with_client(Destination(to, data, token_file, tls_ca), lambda client: _statuses(client, job_ids))
    output = Output(json=json)

    def human() -> Iterable[str]:
        for view in views:
            yield from _view_lines(view)

    output.show(views, human)
    for error in unknown:
        output.error(error)
    return exit_codes.NOT_FOUND if unknown else exit_codes.OK


async def _statuses(client: AsyncClient, job_ids: list[str]) -> tuple[list[dict[str, Any]], list[NotFound]]:
    """The jobs that there are, and an error for each that is unknown; the one id that was asked for raises its own."""
    try:
        return await client.statuses(job_ids), []
    except NotFound:
        if len(job_ids) == 1:
            raise
    views: list[dict[str, Any]] = []
    unknown: list[NotFound] = []
    for job_id in job_ids:
        try:
            views.append(await client.status(job_id))
        except NotFound as error:
            unknown.append(error)
    return views, unknown


def _view_lines(view: dict[str, Any]) -> Iterable[str]:
    what = " ".join([view["exec"] or "(handler)", *view["args"]])
    yield f"{view['job_id']}  {view['state']}"
    yield f"  {plain(what)[:200]}  on {view['subject']}"
    worker = plain(view["assigned_worker_id"])
    yield f"  attempt {view['attempt']}, {view['failures']} failed, {view['losses']} lost; worker {worker}"
    yield f"  created {when(view['created_at'])}, started {when(view['started_at'])}, finished {when(view['finished_at'])}"
    if (progress := progress_of(view)) is not None:
        yield f"  progress {progress}" + (f" {plain(view['progress_text'])}" if view["progress_text"] else "")
    outcome = view["outcome"]
    if outcome is not None:
        how = outcome["error_code"] or "success"
        yield f"  {how}, exit code {plain(outcome['exit_code'])}, result {outcome['result_bytes']} bytes"
        if outcome["message"]:
            yield f"  {plain(outcome['message'])}"


def list_jobs(
    state: Annotated[
        list[str] | None, typer.Option("--state", metavar="STATE", help="PENDING, RUNNING, FAILED, …; several times.")
    ] = None,
    subject: Annotated[str | None, typer.Option("--subject", metavar="PATTERN", help="* and > allowed.")] = None,
    array: Annotated[str | None, typer.Option("--array", metavar="ID", help="Only elements of this array.")] = None,
    worker: Annotated[str | None, typer.Option("--worker", metavar="ID", help="Only jobs that this worker had last.")] = None,
    text: Annotated[str | None, typer.Option("--text", metavar="TEXT", help="Part of the id or of the error.")] = None,
    limit: options.Lines = 50,
    cursor: Annotated[str | None, typer.Option("--cursor", metavar="CURSOR", help="Go on where the last list ended.")] = None,
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Jobs, newest first."""
    if limit < 1:
        raise InvalidInput(f"--limit must be at least 1, got {limit}")
    filter = _filter(states=_states(state), subject=subject, array_id=array, worker_id=worker, text=text)
    jobs, following = with_client(
        Destination(to, data, token_file, tls_ca), lambda client: find_all(client, filter, limit=limit, cursor=cursor)
    )
    output = Output(json=json, quiet=quiet)
    head = ("JOB", "STATE", "SUBJECT", "EXEC", "ATTEMPT", "PROGRESS", "CREATED", "ERROR")

    def human() -> list[str]:
        return table(head, (_row(view) for view in jobs))

    output.show({"jobs": jobs, "cursor": following}, human, [view["job_id"] for view in jobs])
    if following is not None:
        output.hint(f"there are more; go on with: --cursor {following}")


def _row(view: dict[str, Any]) -> tuple[object, ...]:
    error = (view["outcome"] or {}).get("error_code")
    what = (view["job_id"], view["state"], view["subject"], view["exec"], view["attempt"])
    return (*what, progress_of(view), when(view["created_at"]), error)


def progress_of(view: dict[str, Any]) -> str | None:
    """How far the job said it is, as people read it. Of one that succeeded that is its last word but one, and of no use."""
    if view["progress"] is None or view["state"] == "SUCCEEDED":
        return None
    return f"{view['progress']:.0%}"


def _states(given: list[str] | None) -> list[str]:
    from tasuki.core.job import State

    for text in given or ():
        if text.upper() not in State.__members__:
            raise InvalidInput(f"--state {text[:40]!r} is not one of {', '.join(State.__members__)}")
    return [text.upper() for text in given or ()]


def _filter(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


async def find_all(
    client: AsyncClient, filter: dict[str, Any], *, limit: int | None = None, cursor: str | None = None
) -> tuple[list[dict[str, Any]], str | None]:
    """Up to `limit` jobs (None: all), over as many pages as it takes, and where to go on."""
    jobs: list[dict[str, Any]] = []
    while limit is None or len(jobs) < limit:
        page = await client.find(limit=PAGE if limit is None else min(PAGE, limit - len(jobs)), cursor=cursor, **filter)
        jobs += page["jobs"]
        cursor = page["cursor"]
        if cursor is None:
            break
    return jobs, cursor


def cancel(
    job_ids: JobIds,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Kept in the job's story.")] = "",
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    json: options.Json = False,
) -> None:
    """Stop jobs.

    Waiting ones are canceled at once, running ones when their worker has stopped them; one that has ended stays as it is.
    """
    answer = with_client(Destination(to, data, token_file, tls_ca), lambda client: client.cancel(job_ids, reason))

    def human() -> Iterable[str]:
        for job_id, what in answer.items():
            yield f"{job_id}  {_cancel_words(what)}"

    Output(json=json).show(answer, human)


def _cancel_words(what: dict[str, Any]) -> str:
    if what["requested"]:
        return f"{what['state']}  (its worker was asked to stop it)"
    ended_otherwise = what["state"] in ENDED and what["state"] != "CANCELED"
    return f"had already ended: {what['state']}" if ended_otherwise else str(what["state"])


def explain(
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="Job id.")],
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    json: options.Json = False,
) -> None:
    """Why a job stands where it stands, and what befell it."""
    told = with_client(Destination(to, data, token_file, tls_ca), lambda client: client.explain(job_id))

    Output(json=json).show(told, lambda: explain_lines(told))


def explain_lines(told: dict[str, Any]) -> Iterable[str]:
    """Why it stands there, then its story, oldest first."""
    yield f"{told['job_id']}  {told['state']}  ({told['subject']})"
    for sentence in told["because"]:
        yield f"  {plain(sentence)}"
    for incident in told["story"]:
        details = " ".join(plain(incident[name]) for name in ("worker_id", "actor", "reason") if incident.get(name))
        yield f"  {when(incident['at'])}  {incident['kind']}, attempt {incident['attempt']}  {details}".rstrip()


def retry(
    job_ids: Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", help="Job ids.")] = None,
    array: Annotated[
        str | None, typer.Option("--array", metavar="ID", help="All elements of this array that have ended.")
    ] = None,
    only_failed: Annotated[bool, typer.Option("--only-failed", help="Leave out what succeeded or was canceled.")] = False,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Kept in the jobs' story.")] = "",
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> int:
    """Set jobs going again that have ended.

    They start with fresh budgets of retries and losses; the attempt number goes on.
    """
    if bool(job_ids) == bool(array):
        raise InvalidInput("give either job ids or --array ID, as in: tasuki retry --array ID --only-failed")
    wanted = UNSUCCESSFUL if only_failed else ENDED

    async def work(client: AsyncClient) -> dict[str, Any]:
        if array:
            views, _ = await find_all(client, {"array_id": array, "states": list(wanted)})
            if not views and not (await client.find(limit=1, array_id=array))["jobs"]:
                raise NotFound(f"there is no array {array[:128]!r}, or it is not yours")
        else:
            views = await client.statuses(job_ids or [])
        chosen = [view["job_id"] for view in views if view["state"] in wanted or not only_failed]
        answers: dict[str, Any] = {}
        for start in range(0, len(chosen), ASK_MAX):
            answers.update(await client.requeue(chosen[start : start + ASK_MAX], reason))
            output.progress(f"{len(answers)} of {len(chosen)} set going again")
        return answers

    output = Output(json=json, quiet=quiet)
    answers = with_client(Destination(to, data, token_file, tls_ca), work)
    done = [job_id for job_id, what in answers.items() if what["done"]]

    def human() -> Iterable[str]:
        for job_id, what in answers.items():
            if not what["done"]:
                yield f"{job_id}  {what['state']}: not changed, only jobs that have ended can be set going again"
        yield f"{len(done)} job(s) set going again"

    output.show(answers, human, done)
    return exit_codes.OK if len(done) == len(answers) else exit_codes.FAILED
