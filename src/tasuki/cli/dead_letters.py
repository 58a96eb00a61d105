"""`tasuki dead list|show|retry`: dead letters, that is, jobs that failed for good. They stay, with their reason, until they are
set going again or retention ends. Talks to any server as every other command does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tasuki.cli import exit_codes, options
from tasuki.cli.command import command, make_app
from tasuki.cli.connect import Destination, with_client
from tasuki.cli.job import ASK_MAX, PAGE, UNSUCCESSFUL, explain_lines, find_all
from tasuki.cli.output import Output, plain, table, when
from tasuki.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from tasuki.client import AsyncClient

REASON_SHOWN_MAX = 100  # characters in the list; `show` has all of it

Subject = Annotated[str | None, typer.Option("--subject", metavar="PATTERN", help="Only these subjects, * and > allowed.")]
App = Annotated[str | None, typer.Option("--app", metavar="NAME", help="Only jobs of this app.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    letters = make_app("List, show and retry dead letters.\n\nThose are jobs that failed for good: no retry is left.")
    command(
        letters,
        "list",
        examples=["tasuki dead list", "tasuki dead list --app zpe --limit 20", "tasuki dead list --subject 'render.>' --json"],
    )(list_dead)
    command(letters, "show", examples=["tasuki dead show JOB      # its reason, and what became of each attempt"])(show)
    command(
        letters,
        "retry",
        examples=[
            "tasuki dead retry JOB1 JOB2 --reason 'disk replaced'",
            "tasuki dead retry --all --app zpe --dry-run      # how many, and which",
            "tasuki dead retry --all --subject 'render.>'",
        ],
    )(retry)
    app.add_typer(letters, name="dead")


def list_dead(
    subject: Subject = None,
    app: App = None,
    limit: options.Lines = 50,
    cursor: Annotated[str | None, typer.Option("--cursor", metavar="CURSOR", help="Go on where the last list ended.")] = None,
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Dead letters, the newest job first."""
    if limit < 1:
        raise InvalidInput(f"--limit must be at least 1, got {limit}")
    filter = _filter(subject, app)
    views, following = with_client(
        Destination(to, data, token_file, tls_ca), lambda client: find_all(client, filter, limit=limit, cursor=cursor)
    )
    letters = [_letter(view) for view in views]
    output = Output(json=json, quiet=quiet)
    output.show({"jobs": letters, "cursor": following}, lambda: _lines(letters), [letter["job_id"] for letter in letters])
    if following is not None:
        output.hint(f"there are more; go on with: --cursor {following}")


def show(
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="Job id.")],
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    json: options.Json = False,
) -> None:
    """Why a job failed for good, and what became of each attempt."""

    async def work(client: AsyncClient) -> dict[str, Any]:
        view = await client.status(job_id)
        if view["state"] not in UNSUCCESSFUL:
            raise NotFound(f"job {job_id[:128]!r} is {view['state']}, not a dead letter; see: tasuki explain {job_id[:128]}")
        return _letter(view) | await client.explain(job_id)

    told = with_client(Destination(to, data, token_file, tls_ca), work)

    def human() -> Iterable[str]:
        head, *rest = explain_lines(told)
        yield head
        yield f"  {plain(told['reason'])}"
        counted = f"attempts {told['attempts']}, {told['failures']} failed, {told['losses']} lost"
        yield f"  {counted}; ended {when(told['finished_at'])}"
        yield from rest

    output = Output(json=json)
    output.show(told, human)
    output.hint(f"set it going again with: tasuki dead retry {job_id}")


def retry(
    job_ids: Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", help="Job ids.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All dead letters, or those of --subject or --app.")] = False,
    subject: Subject = None,
    app: App = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell which they are.")] = False,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Kept in the jobs' story.")] = "",
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> int:
    """Set dead letters going again, with fresh budgets of retries and losses.

    Asks nothing; --dry-run tells what it would do. Exit 1 if a job that was named is not a dead letter.
    """
    if bool(job_ids) == every:
        raise InvalidInput("give either job ids or --all, as in: tasuki dead retry --all --subject 'render.>'")
    if job_ids and (subject or app):
        raise InvalidInput("--subject and --app choose among --all; leave them out where jobs are named")
    filter = _filter(subject, app)
    output = Output(json=json, quiet=quiet)

    async def work(client: AsyncClient) -> tuple[list[str], dict[str, str]]:
        done: list[str] = []
        left: dict[str, str] = {}
        async for views in _named(client, job_ids) if job_ids else _pages(client, filter):
            left |= {view["job_id"]: view["state"] for view in views if view["state"] not in UNSUCCESSFUL}
            chosen = [view["job_id"] for view in views if view["state"] in UNSUCCESSFUL]
            answers = await client.requeue(chosen, reason) if chosen and not dry_run else {}
            done += [job_id for job_id in chosen if dry_run or answers[job_id]["done"]]
            left |= {job_id: what["state"] for job_id, what in answers.items() if not what["done"]}
            output.progress(f"{len(done)} job(s)")
        return done, left

    done, left = with_client(Destination(to, data, token_file, tls_ca), work)

    def human() -> Iterable[str]:
        yield from done if dry_run else ()
        for job_id, state in left.items():
            yield f"{job_id}  {state}: not changed, {_why_left(state)}"
        yield f"{len(done)} job(s) would be set going again" if dry_run else f"{len(done)} job(s) set going again"

    output.show({"jobs": done, "count": len(done), "dry_run": dry_run, "left": left}, human, done)
    return exit_codes.FAILED if left and job_ids else exit_codes.OK


def _filter(subject: str | None, app: str | None) -> dict[str, Any]:
    from tasuki.config import check_app
    from tasuki.core.subject import app_subject, check_pattern

    if subject and app:
        raise InvalidInput(f"--app {app} stands for its subject; leave --subject out")
    if app:
        check_app(app)
        subject = app_subject(app)
    if subject:
        check_pattern(subject)
    return {"states": list(UNSUCCESSFUL)} | ({"subject": subject} if subject else {})


async def _pages(client: AsyncClient, filter: dict[str, Any]) -> AsyncIterator[list[dict[str, Any]]]:
    """Page by page, newest first: what fails again meanwhile is not met twice."""
    cursor = None
    while True:
        page = await client.find(limit=PAGE, cursor=cursor, **filter)
        yield page["jobs"]
        cursor = page["cursor"]
        if cursor is None:
            return


async def _named(client: AsyncClient, job_ids: list[str]) -> AsyncIterator[list[dict[str, Any]]]:
    unique = list(dict.fromkeys(job_ids))
    for start in range(0, len(unique), ASK_MAX):
        yield await client.statuses(unique[start : start + ASK_MAX])


def _why_left(state: str) -> str:
    return "its payload is gone" if state in UNSUCCESSFUL else "it is not a dead letter"


def _letter(view: dict[str, Any]) -> dict[str, Any]:
    """What is told of a dead letter."""
    outcome = view["outcome"] or {}
    words = (outcome.get("error_code"), outcome.get("message"))
    plainly = ("job_id", "subject", "state", "failures", "losses", "created_at", "finished_at")
    return {
        **{name: view[name] for name in plainly},
        "reason": ": ".join(word for word in words if word) or view["state"],
        "attempts": view["attempt"],
    }


def _lines(letters: list[dict[str, Any]]) -> list[str]:
    if not letters:
        return ["no dead letters"]
    head = ("JOB", "SUBJECT", "REASON", "ATTEMPTS", "WHEN")
    return table(
        head,
        (
            (
                letter["job_id"],
                letter["subject"],
                letter["reason"].partition("\n")[0][:REASON_SHOWN_MAX],
                letter["attempts"],
                when(letter["finished_at"]),
            )
            for letter in letters
        ),
    )
