"""`tasuki status`, `list`, `cancel`, `explain`, `retry`: jobs that were submitted before; `tasuki dead`: those that failed.

A dead letter is a job whose last attempt failed and that has no retry left. It stays, with its reason, until somebody retries it
or its retention ends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Any

from tasuki.cli import command as cli
from tasuki.cli.arrays import ASK_MAX, ENDED, PAGE, REASON_SHOWN_MAX, ArraySummary, elements, is_array, look_up, pages
from tasuki.cli.connect import with_client
from tasuki.cli.output import ExitCode, Output, plain, table, visible
from tasuki.client.aio import AsyncClient
from tasuki.client.types import CancelAnswer
from tasuki.config import check_app
from tasuki.core.job import DEAD, TERMINAL, State
from tasuki.core.subject import app_subject, check_pattern
from tasuki.core.units import shown_time
from tasuki.errors import InvalidInput, NotFound

UNENDED = tuple(str(state) for state in State if not state.terminal)
STDERR_SHOWN_BYTES = 4096

job_id_argument = cli.argument("job_id", metavar="JOB", help="Job id.")
ids_argument = cli.argument("ids", metavar="JOB|ARRAY...", help="Ids of jobs or arrays.", nargs=-1, required=True)
any_job_ids_argument = cli.argument("job_ids", metavar="[JOB]...", help="Job ids.", nargs=-1)


# ---------------------------------------------------------------------------------------------------- status and list


@cli.command(
    "status",
    examples=[
        "tasuki status nightly-2026-01-31",
        "tasuki status ARRAY                          # how many run, failed and why, and how long the rest may take",
        "tasuki status --json JOB | jq .[0].state",
    ],
)
@ids_argument
@cli.connection_options()
def status(output: Output, ids: tuple[str, ...], place: cli.Destination) -> int:
    """Jobs that are found are shown; exit 3 if others are not. Of an array: its states, the time that is left, the reasons."""

    async def work(client: AsyncClient) -> tuple[list[dict[str, Any] | ArraySummary], list[NotFound]]:
        found, unknown = await look_up(client, ids)
        return [view or await ArraySummary.of(client, named, output) for named, view in found.items()], unknown

    shown, unknown = with_client(place, work, agents=True)
    output.show(
        [one.view() if isinstance(one, ArraySummary) else one for one in shown],
        lambda: [line for one in shown for line in (one.lines() if isinstance(one, ArraySummary) else _view_lines(one))],
    )
    return _tell_unknown(unknown, output)


def _tell_unknown(unknown: list[NotFound], output: Output) -> int:
    for error in unknown:
        output.error(error)
    return ExitCode.NOT_FOUND if unknown else ExitCode.OK


def _view_lines(view: dict[str, Any]) -> Iterable[str]:
    what = " ".join([view["exec"] or "(handler)", *view["args"]])
    yield f"{view['job_id']}  {view['state']}"
    subject = f"  on {view['subject']}" if view["subject"] else ""  # jobs of node agents have none
    where = f"  in {plain(view['cwd'])}" if view.get("cwd") else ""
    yield f"  {plain(what)[:200]}{subject}{where}"
    worker = plain(view["assigned_worker_id"])
    yield f"  attempt {view['attempt']}, {view['failures']} failed, {view['losses']} lost; worker {worker}"
    created, started, finished = (shown_time(view[f"{what}_at"]) for what in ("created", "started", "finished"))
    yield f"  created {created}, started {started}, finished {finished}"
    if (progress := progress_of(view)) is not None:
        yield f"  progress {progress}" + (f" {plain(view['progress_text'])}" if view["progress_text"] else "")
    if view.get("cancel_reason"):
        yield f"  to be canceled: {plain(view['cancel_reason'])}"
    outcome = view["outcome"]
    if outcome is not None:
        how = outcome["error_code"] or "success"
        yield f"  {how}, exit code {plain(outcome['exit_code'])}, result {outcome['result_bytes']} bytes"
        if outcome["message"]:
            yield f"  {plain(outcome['message'])}"
        yield from _traceback_lines(outcome.get("meta") or {})


@cli.command(
    "list",
    examples=[
        "tasuki list --state FAILED --limit 20",
        "tasuki list --subject 'render.>' --array ARRAY",
        "tasuki list --text 'code 3' --quiet | xargs -r tasuki retry",
    ],
)
@cli.several("--state", metavar="STATE", help="PENDING, RUNNING, FAILED, …; several times.")
@cli.option("--subject", metavar="PATTERN", help="* and > allowed.")
@cli.option("--array", metavar="ID", help="Only elements of this array.")
@cli.option("--worker", metavar="ID", help="Only jobs that this worker had last.")
@cli.option("--text", metavar="TEXT", help="Part of the id or of the error.")
@cli.limit_option
@cli.cursor_option
@cli.connection_options()
@cli.quiet_option
def list_jobs(
    output: Output,
    state: tuple[str, ...],
    subject: str | None,
    array: str | None,
    worker: str | None,
    text: str | None,
    limit: int,
    cursor: str | None,
    place: cli.Destination,
) -> None:
    for given in state:
        if given.upper() not in State.__members__:
            raise InvalidInput(f"--state {given[:40]!r} is not one of {', '.join(State.__members__)}")
    states = [given.upper() for given in state]
    chosen = {"states": states, "subject": subject, "array_id": array, "worker_id": worker, "text": text}
    filter = {name: value for name, value in chosen.items() if value}
    jobs, following = _find(place, filter, limit, cursor)
    head = ("JOB", "STATE", "SUBJECT", "EXEC", "ATTEMPT", "PROGRESS", "CREATED", "ERROR")
    _show_page(output, jobs, following, lambda: table(head, map(_row, jobs)))


def _show_page(output: Output, jobs: list[dict[str, Any]], cursor: str | None, human: Any) -> None:
    output.show({"jobs": jobs, "cursor": cursor}, human, [job["job_id"] for job in jobs])
    if cursor is not None:
        output.hint(f"there are more; continue with: --cursor {cursor}")


def _row(view: dict[str, Any]) -> tuple[object, ...]:
    error = (view["outcome"] or {}).get("error_code")
    what = (view["job_id"], view["state"], view["subject"], view["exec"], view["attempt"])
    return (*what, progress_of(view), shown_time(view["created_at"]), error)


def progress_of(view: dict[str, Any]) -> str | None:
    """Return how far a job is, in percent; None if it did not report that, or has succeeded."""
    if view["progress"] is None or view["state"] == "SUCCEEDED":
        return None
    return f"{view['progress']:.0%}"


def _find(
    place: cli.Destination, filter: dict[str, Any], limit: int, cursor: str | None
) -> tuple[list[dict[str, Any]], str | None]:
    """Return up to `limit` jobs, from as many pages as needed, and the cursor of the next page."""
    if limit < 1:
        raise InvalidInput(f"--limit must be at least 1, got {limit}")

    async def work(client: AsyncClient) -> tuple[list[dict[str, Any]], str | None]:
        jobs: list[dict[str, Any]] = []
        following = cursor
        while len(jobs) < limit:
            page = await client.call("find", limit=min(PAGE, limit - len(jobs)), cursor=following, **filter)
            jobs += page["jobs"]
            following = page["cursor"]
            if following is None:
                break
        return jobs, following

    return with_client(place, work, agents=True, embedded=False)


# ---------------------------------------------------------------------------------------------------- cancel, explain, retry


@cli.command(
    "cancel",
    examples=[
        "tasuki cancel JOB --reason 'wrong input'",
        "tasuki cancel JOB1 JOB2",
        "tasuki cancel ARRAY      # all of its jobs",
    ],
)
@ids_argument
@cli.reason_option
@cli.connection_options()
def cancel(output: Output, ids: tuple[str, ...], reason: str, place: cli.Destination) -> int:
    """Waiting jobs are canceled at once, running ones when their worker has stopped them; a job that has ended stays as it is.

    Jobs that are found are canceled; exit 3 if others are not.
    """

    async def work(client: AsyncClient) -> tuple[dict[str, CancelAnswer], list[NotFound]]:
        found, unknown = await look_up(client, ids)
        job_ids: list[str] = []
        for named, view in found.items():
            job_ids += [named] if view is not None else await elements(client, named, UNENDED)
        answers: dict[str, CancelAnswer] = {}
        for start in range(0, len(job_ids), ASK_MAX):
            answers |= await client.cancel(*job_ids[start : start + ASK_MAX], reason=reason)
            output.progress(f"{len(answers)} of {len(job_ids)} jobs canceled")
        return answers, unknown

    answers, unknown = with_client(place, work, agents=True)
    lines = [f"{job_id}  {_cancel_words(what)}" for job_id, what in answers.items()]
    output.show(answers, lambda: lines or (["all jobs had already ended"] if not unknown else []))
    return _tell_unknown(unknown, output)


def _cancel_words(answer: CancelAnswer) -> str:
    if answer.requested:
        return f"{answer.state}  (its worker was asked to stop it)"
    ended_otherwise = answer.state in ENDED and answer.state != "CANCELED"
    return f"had already ended: {answer.state}" if ended_otherwise else str(answer.state)


@cli.command(
    "explain",
    examples=[
        "tasuki explain JOB      # why it waits, why it failed, what happened to it",
        "tasuki explain ARRAY    # and one of its jobs in each state but SUCCEEDED",
    ],
)
@cli.argument("named", metavar="JOB|ARRAY", help="Id of a job or an array.")
@cli.connection_options()
def explain(output: Output, named: str, place: cli.Destination) -> None:
    async def work(client: AsyncClient) -> tuple[ArraySummary | None, list[dict[str, Any]]]:
        found, _ = await look_up(client, [named])
        summary = await ArraySummary.of(client, named, output) if found[named] is None else None
        chosen = [named] if summary is None else list(summary.examples().values())
        return summary, [await client.call("explain", job_id=job_id) for job_id in chosen]

    summary, explained = with_client(place, work)
    data = explained[0] if summary is None else {**summary.view(), "examples": explained}
    head = summary.lines() if summary is not None else ()
    output.show(data, lambda: [*head, *(line for one in explained for line in explain_lines(one))])


def explain_lines(explanation: dict[str, Any]) -> Iterable[str]:
    """Yield why a job is in its state, then its story, oldest first."""
    yield f"{explanation['job_id']}  {explanation['state']}  ({explanation['subject']})"
    for sentence in explanation["because"]:
        yield f"  {plain(sentence)}"
    for incident in explanation["story"]:
        details = " ".join(plain(incident[name]) for name in ("worker_id", "actor", "reason") if incident.get(name))
        what = f"{incident['kind'].replace('_', ' ')}, attempt {incident['attempt']}"
        yield f"  {shown_time(incident['at'])}  {what}  {details}".rstrip()
    yield from _traceback_lines(explanation["facts"])


def _traceback_lines(facts: dict[str, Any]) -> Iterable[str]:
    """Yield the traceback of the last failure of a handler, from an outcome's meta or the facts of an explanation."""
    if isinstance(traceback := facts.get("traceback"), str):
        yield from (f"    {visible(line)}" for line in traceback.splitlines())


@cli.command(
    "retry",
    examples=[
        "tasuki retry JOB",
        "tasuki retry ARRAY --only-failed",
        "tasuki retry JOB1 JOB2 --reason 'disk replaced'",
    ],
)
@cli.argument("ids", metavar="[JOB|ARRAY]...", help="Ids of jobs or arrays.", nargs=-1)
@cli.option("--array", metavar="ID", help="All elements of this array that have ended.")
@cli.flag("--only-failed", help="Leave out what succeeded or was canceled.")
@cli.reason_option
@cli.connection_options()
@cli.quiet_option
def retry(output: Output, ids: tuple[str, ...], array: str | None, only_failed: bool, reason: str, place: cli.Destination) -> int:
    """Jobs start with fresh budgets of retries and losses; the attempt number continues."""
    if bool(ids) == bool(array):
        raise InvalidInput("give either ids or --array ID, as in: tasuki retry ARRAY --only-failed")
    wanted = sorted(DEAD if only_failed else TERMINAL)

    async def work(client: AsyncClient) -> dict[str, Any]:
        if array:
            chosen = await elements(client, array, wanted)
            if not chosen and not await is_array(client, array):
                raise NotFound(f"there is no array {array[:128]!r}, or it is not yours")
        else:
            found, unknown = await look_up(client, ids)
            if unknown:
                raise unknown[0]
            chosen = []
            for named, view in found.items():
                if view is None:
                    chosen += await elements(client, named, wanted)
                elif view["state"] in wanted or not only_failed:
                    chosen.append(named)
        answers: dict[str, Any] = {}
        for start in range(0, len(chosen), ASK_MAX):
            answers.update(await client.call("requeue", job_ids=chosen[start : start + ASK_MAX], reason=reason))
            output.progress(f"{len(answers)} of {len(chosen)} jobs queued again")
        return answers

    answers = with_client(place, work)
    done = [job_id for job_id, what in answers.items() if what["done"]]

    def human() -> Iterable[str]:
        for job_id, what in answers.items():
            if not what["done"]:
                why = _overlap(what) or "only jobs that have ended can be set going again"
                yield f"{job_id}  {what['state']}: not changed, {why}"
        yield f"{len(done)} job(s) set going again"

    output.show(answers, human, done)
    return ExitCode.OK if len(done) == len(answers) else ExitCode.FAILED


def _overlap(answer: dict[str, Any]) -> str:
    """Return why a run that has ended was not set going again; empty: another reason."""
    return f"run {answer['still_running']} of its definition has not ended" if "still_running" in answer else ""


# ---------------------------------------------------------------------------------------------------- dead letters

dead = cli.group("dead", "Those are jobs that failed for good: no retry is left.")
subject_option = cli.option("--subject", metavar="PATTERN", help="Only these subjects, * and > allowed.")
app_option = cli.option("--app", metavar="NAME", help="Only jobs of this app.")


@cli.command(
    "dead list",
    parent=dead,
    examples=["tasuki dead list", "tasuki dead list --app zpe --limit 20", "tasuki dead list --subject 'render.>' --json"],
)
@subject_option
@app_option
@cli.limit_option
@cli.cursor_option
@cli.connection_options()
@cli.quiet_option
def list_dead(
    output: Output, subject: str | None, app: str | None, limit: int, cursor: str | None, place: cli.Destination
) -> None:
    """List dead letters, the newest job first."""
    filter = _dead_filter(subject, app)
    views, following = _find(place, filter, limit, cursor)
    letters = [_letter(view) for view in views]
    _show_page(output, letters, following, lambda: _letter_lines(letters))


@cli.command("dead show", parent=dead, examples=["tasuki dead show JOB      # its reason, and what became of each attempt"])
@job_id_argument
@cli.connection_options()
def show_dead(output: Output, job_id: str, place: cli.Destination) -> None:
    """Show why a job failed for good, and what became of each attempt."""

    async def work(client: AsyncClient) -> dict[str, Any]:
        [view] = await client.call("get", job_ids=[job_id])
        if view["state"] not in DEAD:
            raise NotFound(f"job {job_id[:128]!r} is {view['state']}, not a dead letter; see: tasuki explain {job_id[:128]}")
        explanation = await client.call("explain", job_id=job_id)
        explanation["facts"].pop("traceback", None)  # it stands in for stderr
        return _letter(view) | explanation | {"stderr": await _stderr_tail(client, job_id)}

    letter = with_client(place, work)

    def human() -> Iterable[str]:
        head, *rest = explain_lines(letter)
        yield head
        yield f"  {plain(letter['reason'])}"
        counted = f"attempts {letter['attempts']}, {letter['failures']} failed, {letter['losses']} lost"
        yield f"  {counted}; ended {shown_time(letter['finished_at'])}"
        yield from rest
        if letter["stderr"]:
            yield "  the end of its stderr, or its traceback:"
            yield from (f"    {visible(line)}" for line in letter["stderr"].splitlines())

    output.show(letter, human)
    output.hint(f"set it going again with: tasuki dead retry {job_id}")


async def _stderr_tail(client: AsyncClient, job_id: str) -> str:
    """Return the end of what the last attempt wrote to stderr, or its traceback."""
    from tasuki.client.logs import LogFollower

    follower = LogFollower(client, job_id, "stderr", tail_bytes=STDERR_SHOWN_BYTES)
    with suppress(NotFound):
        return b"".join([part.data async for part in follower.parts(follow=False)]).decode("utf-8", "replace")
    return ""


@cli.command(
    "dead retry",
    parent=dead,
    examples=[
        "tasuki dead retry JOB1 JOB2 --reason 'disk replaced'",
        "tasuki dead retry --all --app zpe --dry-run      # how many, and which",
        "tasuki dead retry --all --subject 'render.>'",
    ],
)
@any_job_ids_argument
@cli.flag("--all", "every", help="All dead letters, or those of --subject or --app.")
@subject_option
@app_option
@cli.flag("--dry-run", help="Only list them.")
@cli.reason_option
@cli.connection_options()
@cli.quiet_option
def retry_dead(
    output: Output,
    job_ids: tuple[str, ...],
    every: bool,
    subject: str | None,
    app: str | None,
    dry_run: bool,
    reason: str,
    place: cli.Destination,
) -> int:
    """Set dead letters going again, with fresh budgets of retries and losses.

    Asks nothing; --dry-run tells what it would do. Exit 1 if a job that was named is not a dead letter.
    """
    if bool(job_ids) == every:
        raise InvalidInput("give either job ids or --all, as in: tasuki dead retry --all --subject 'render.>'")
    if job_ids and (subject or app):
        raise InvalidInput("--subject and --app choose among --all; leave them out where jobs are named")
    filter = _dead_filter(subject, app)
    overlaps: dict[str, str] = {}

    async def work(client: AsyncClient) -> tuple[list[str], dict[str, str]]:
        done: list[str] = []
        left: dict[str, str] = {}
        async for views in _named(client, job_ids) if job_ids else pages(client, filter):
            left |= {view["job_id"]: view["state"] for view in views if view["state"] not in DEAD}
            chosen = [view["job_id"] for view in views if view["state"] in DEAD]
            answers = await client.call("requeue", job_ids=chosen, reason=reason) if chosen and not dry_run else {}
            done += [job_id for job_id in chosen if dry_run or answers[job_id]["done"]]
            left |= {job_id: what["state"] for job_id, what in answers.items() if not what["done"]}
            overlaps.update({job_id: _overlap(what) for job_id, what in answers.items()})
            output.progress(f"{len(done)} job(s)")
        return done, left

    done, left = with_client(place, work)

    def human() -> Iterable[str]:
        yield from done if dry_run else ()
        for job_id, state in left.items():
            why = "its payload is gone" if state in DEAD else "it is not a dead letter"
            yield f"{job_id}  {state}: not changed, {overlaps.get(job_id) or why}"
        yield f"{len(done)} job(s) would be set going again" if dry_run else f"{len(done)} job(s) set going again"

    output.show({"jobs": done, "count": len(done), "dry_run": dry_run, "left": left}, human, done)
    return ExitCode.FAILED if left and job_ids else ExitCode.OK


def _dead_filter(subject: str | None, app: str | None) -> dict[str, Any]:
    if subject and app:
        raise InvalidInput(f"--app {app} stands for its subject; leave --subject out")
    if app:
        subject = app_subject(check_app(app))
    if subject:
        check_pattern(subject)
    return {"states": sorted(DEAD)} | ({"subject": subject} if subject else {})


async def _named(client: AsyncClient, job_ids: Iterable[str]) -> AsyncIterator[list[dict[str, Any]]]:
    unique = list(dict.fromkeys(job_ids))
    for start in range(0, len(unique), ASK_MAX):
        yield await client.call("get", job_ids=unique[start : start + ASK_MAX])


def _letter(view: dict[str, Any]) -> dict[str, Any]:
    """Return a job as a dead letter."""
    outcome = view["outcome"] or {}
    words = (outcome.get("error_code"), outcome.get("message"))
    copied = ("job_id", "subject", "state", "failures", "losses", "created_at", "finished_at")
    return {
        **{name: view[name] for name in copied},
        "reason": ": ".join(word for word in words if word) or view["state"],
        "attempts": view["attempt"],
    }


def _letter_lines(letters: list[dict[str, Any]]) -> list[str]:
    if not letters:
        return ["no dead letters"]

    def row(letter: dict[str, Any]) -> tuple[object, ...]:
        reason = letter["reason"].partition("\n")[0][:REASON_SHOWN_MAX]
        return letter["job_id"], letter["subject"], reason, letter["attempts"], shown_time(letter["finished_at"])

    return table(("JOB", "SUBJECT", "REASON", "ATTEMPTS", "WHEN"), map(row, letters))
