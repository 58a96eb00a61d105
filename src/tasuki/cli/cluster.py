"""`tasuki servers`, `workers`, `stats`: the servers, their workers, how many jobs are in each state; `detach`, `attach`,
`degrade-leader`: who gets work, and who leads.

`tasuki pause`, `resume`: subjects whose jobs wait until somebody lets them continue.

`tasuki token`: who may connect. A secret is made here and shown once; the server gets and keeps only its hash.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Callable
from typing import Any

from tasuki.cli.command import (
    Destination,
    Duration,
    argument,
    command,
    connection_options,
    duration,
    flag,
    group,
    number,
    option,
    several,
)
from tasuki.cli.connect import with_client
from tasuki.cli.output import Output, table
from tasuki.client.aio import AsyncClient
from tasuki.config import check_app
from tasuki.core.access import ENROL_TOKEN_S, token_sha256
from tasuki.core.statistics import GroupStatistics
from tasuki.core.subject import app_subject
from tasuki.core.units import shown_size, shown_time
from tasuki.errors import InvalidInput, NotFound, quoted

COUNTED = ("pending", "active", "orphaned", "succeeded", "failed", "timed_out", "canceled", "skipped")
TOKEN_KINDS = ("admin", "client", "worker")
ZEROS = GroupStatistics().view(zeros=True)
PROGRESS_JOBS_MAX = 1000  # running jobs whose progress `stats --json` reports
PROGRESS_FIELDS = ("job_id", "assigned_worker_id", "progress", "progress_text")

worker_id_argument = argument("worker_id", metavar="WORKER", help="As tasuki workers shows it.")


@command("servers", examples=["tasuki servers", "tasuki servers --to tcp://a:7000 --json"])
@connection_options()
def servers(output: Output, place: Destination) -> None:
    rows = with_client(place, lambda client: client.call("servers"), embedded=False)

    def cells(row: dict[str, Any]) -> tuple[object, ...]:
        addresses = " ".join(row["addresses"]) or "unix socket only"
        return row["server_id"], "yes" if row["leads"] else "", row["workers"], addresses

    output.show(rows, lambda: table(("SERVER", "LEADS", "WORKERS", "ADDRESSES"), map(cells, rows)))


@command("workers", examples=["tasuki workers", "tasuki workers --json"])
@connection_options()
def workers(output: Output, place: Destination) -> None:
    rows = with_client(place, lambda client: client.call("workers"), embedded=False)
    output.show(rows, lambda: _worker_lines(rows))


def _worker_lines(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return ["no worker is connected; start one with: tasuki worker"]

    def cells(row: dict[str, Any]) -> tuple[object, ...]:
        slots = "detached" if row["detached"] else row["slots"]
        execs = ", ".join(row["execs"] or ()) or f"({row['takes']})"
        return row["worker_id"], row["host"], row["server_id"], row["running"], slots, execs, " ".join(row["patterns"])

    return table(("WORKER", "HOST", "SERVER", "RUNNING", "SLOTS", "EXECS", "SUBJECTS"), map(cells, rows))


@command(
    "stats",
    examples=[
        "tasuki stats",
        "tasuki stats --groups --last 1h --watch",
        "tasuki stats --watch --interval 10 --json >> stats.jsonl",
    ],
)
@flag("--groups", help="What the groups did of late: how long jobs waited, redeliveries, fenced reports, caches, messages.")
@duration("--last", type=Duration(above=True), default=900.0, help="With --groups: the time that is looked at, by whole minutes.")
@flag("--watch", help="Again and again, until Ctrl-C.")
@duration("--interval", type=Duration(above=True), default=1.0, help="Between two looks.")
@number("--limit", metavar="N", type=int, default=1000, help="Groups to show; all others are one, (other).")
@connection_options()
def stats(output: Output, groups: bool, last: float, watch: bool, interval: float, limit: int, place: Destination) -> None:
    async def jobs_and_workers(client: AsyncClient) -> tuple[dict[str, Any], Callable[[], list[str]]]:
        counts, workers = await asyncio.gather(client.call("counts", limit=limit), client.call("workers"))
        running = (await client.call("find", states=["RUNNING"], limit=PROGRESS_JOBS_MAX))["jobs"] if output.json else []
        progress = [{name: view[name] for name in PROGRESS_FIELDS} for view in running if view["progress"] is not None]
        answer = {"groups": counts, "workers": workers, "progress": progress}
        return answer, functools.partial(_stats_lines, counts, workers)

    async def of_late(client: AsyncClient) -> tuple[dict[str, Any], Callable[[], list[str]]]:
        until = int(time.time()) + 1
        past = client.call("statistics", since=until - int(last), until=until, limit=limit)
        counts, found = await asyncio.gather(client.call("counts", limit=limit), past)
        rows = _of_groups(counts, found["periods"])
        return {"since": found["since"], "until": found["until"], "groups": rows}, functools.partial(_group_lines, rows)

    async def work(client: AsyncClient) -> None:
        while True:
            answer, lines = await (of_late(client) if groups else jobs_and_workers(client))
            if watch:
                output.clear_screen()
            output.show(answer, lines)
            if not watch:
                return
            await asyncio.sleep(interval)

    with_client(place, work, embedded=False)


def _of_groups(counts: dict[str, dict[str, int]], periods: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what each group has now, and what it did in the one period that was asked for."""
    rows = {
        group: {"queued": one["pending"] + one["orphaned"], "running": one["active"], **ZEROS} for group, one in counts.items()
    }
    for period in periods:
        for name, counted in period["groups"].items():
            rows.setdefault(name, {"queued": 0, "running": 0, **ZEROS}).update(counted)
    return dict(sorted(rows.items()))


def _group_lines(rows: dict[str, dict[str, Any]]) -> list[str]:
    def cells(group: str, row: dict[str, Any]) -> tuple[object, ...]:
        latencies = ("-" if row[name] is None else shown_latency(row[name]) for name in ("latency_p50_s", "latency_p99_s"))
        hits = f"{row['cache_hits']}/{row['cache_inputs']}"
        counts = (row[name] for name in ("redelivered", "fenced", "dead", "published"))
        shown = (group, row["queued"], row["running"], row["submitted"], row["finished"], *latencies, *counts)
        return (*shown, row["dropped"] + row["unrelayed"], hits, shown_size(row["saved_bytes"]))

    heads = ("GROUP", "QUEUED", "RUNNING", "SUBMITTED", "FINISHED", "P50", "P99", "REDELIVERED", "FENCED", "DEAD", "PUBLISHED")
    return table((*heads, "DROPPED", "CACHE HITS", "SAVED"), (cells(group, row) for group, row in rows.items()))


def shown_latency(seconds: float) -> str:
    return f"{seconds * 1000:.3g}ms" if seconds < 1.0 else f"{seconds:.3g}s"


def _stats_lines(groups: dict[str, dict[str, int]], workers: list[dict[str, Any]]) -> list[str]:
    totals = {column: sum(counts[column] for counts in groups.values()) for column in COUNTED}
    shown = [*sorted(groups.items()), ("all", totals)]
    lines = table(
        ("GROUP", *(column.upper() for column in COUNTED)),
        ((group, *(counts[column] for column in COUNTED)) for group, counts in shown),
    )
    return [*lines, "", *_worker_lines(workers)]


@command("detach", examples=["tasuki detach lab-7 --reason 'its disk is failing'", "tasuki detach lab-7 --now"])
@worker_id_argument
@option("--reason", metavar="TEXT", default="", help="For the others.")
@flag("--now", help="Take the jobs away that it has: others get them at once.")
@connection_options()
def detach(output: Output, worker_id: str, reason: str, now: bool, place: Destination) -> None:
    """Jobs that the worker runs continue, unless --now ends them: a job that was started counts as lost."""
    _change("detach", worker_id, place, output, reason=reason, now=now)


@command("attach", examples=["tasuki attach lab-7"])
@worker_id_argument
@connection_options()
def attach(output: Output, worker_id: str, place: Destination) -> None:
    _change("attach", worker_id, place, output)


@command("degrade-leader", examples=["tasuki degrade-leader --reason 'its machine is slow'"])
@option("--reason", metavar="TEXT", default="", help="For the others.")
@connection_options()
def degrade_leader(output: Output, reason: str, place: Destination) -> None:
    """Another server is elected within seconds; running jobs continue."""
    answer = with_client(place, lambda client: client.call("degrade", reason=reason), embedded=False)
    output.show(answer, lambda: [f"server {answer['server_id']} steps down with its next heartbeat"])


def _change(verb: str, worker_id: str, place: Destination, output: Output, **params: Any) -> None:
    async def work(client: AsyncClient) -> dict[str, Any]:
        names = [row["worker_id"] for row in await client.call("workers")]
        if verb == "detach" and worker_id not in names:
            there = f"there are {', '.join(names[:10])}" if names else "there is none"
            raise NotFound(f"no worker {worker_id[:80]!r} is connected; {there}: tasuki workers")
        answer: dict[str, Any] = await client.call(verb, worker_id=worker_id, **params)
        if not answer["changed"] and worker_id not in names:
            raise NotFound(f"no worker {worker_id[:80]!r} is detached or connected; see: tasuki workers")
        return answer

    answer = with_client(place, work, embedded=False)
    result = f"is {verb}ed" if answer["changed"] else f"was {verb}ed before"
    output.show(answer, lambda: [f"worker {worker_id} {result}"])


# ---------------------------------------------------------------------------------------------------- pauses


@command(
    "pause",
    examples=[
        "tasuki pause 'render.>' --reason 'the licence server is down'",
        "tasuki pause      # what is paused, by whom and why",
    ],
)
@argument("pattern", metavar="[PATTERN]", help="Subjects, * and > allowed. Default: list what is paused.", required=False)
@option("--reason", metavar="TEXT", default="", help="For the others.")
@connection_options()
def pause(output: Output, pattern: str | None, reason: str, place: Destination) -> None:
    """Jobs that run continue, and new ones are accepted: they wait until tasuki resume."""
    if pattern is not None:
        _set_paused("pause", pattern, place, output, reason=reason)
        return
    if reason:
        raise InvalidInput("--reason needs a PATTERN to pause, as in: tasuki pause 'render.>' --reason TEXT")
    rows = with_client(place, lambda client: client.call("paused"), embedded=False)

    def lines() -> list[str]:
        cells = ((row["pattern"], shown_time(row["since"]), row["actor"], row["reason"]) for row in rows)
        return table(("PATTERN", "SINCE", "BY", "REASON"), cells) if rows else ["nothing is paused"]

    output.show(rows, lines)


@command("resume", examples=["tasuki resume 'render.>'"])
@argument("pattern", metavar="PATTERN", help="As tasuki pause shows it.")
@connection_options()
def resume(output: Output, pattern: str, place: Destination) -> None:
    """Jobs that wait start at once, where a worker has room."""
    _set_paused("resume", pattern, place, output)


def _set_paused(verb: str, pattern: str, place: Destination, output: Output, **params: Any) -> None:
    async def work(client: AsyncClient) -> dict[str, Any]:
        answer: dict[str, Any] = await client.call(verb, pattern=pattern, **params)
        if verb == "resume" and not answer["changed"]:
            there = ", ".join(row["pattern"] for row in (await client.call("paused"))[:10])
            known = f"there are {there}" if there else "nothing is"
            raise NotFound(f"pattern {quoted(pattern)} is not paused; {known}: tasuki pause")
        return answer

    answer = with_client(place, work, embedded=False)
    result = f"is {verb}d" if answer["changed"] else f"was {verb}d before"
    output.show(answer, lambda: [f"{pattern} {result}"])


# ---------------------------------------------------------------------------------------------------- token

token = group("token", "Needs an admin token, or the server's own user on its unix socket.")
label_option = option("--label", metavar="TEXT", default="", help="For people.")


@command(
    "token create",
    parent=token,
    examples=[
        "tasuki token create --kind client --label 'report host' > client.token",
        "tasuki token create --kind worker --scope 'render.eu.>' --expires 90d > worker.token",
    ],
)
@option("--kind", metavar="|".join(TOKEN_KINDS), default="client", help="What its bearer may be.")
@label_option
@several(
    "--scope",
    metavar="PATTERN",
    help="Subjects that it may use, * and > allowed; publish:… and subscribe:… for messages alone. Several times.",
)
@duration("--expires", type=Duration(above=True, with_unit=True), help="Valid so long. Default: until revoked.")
@connection_options()
def create(output: Output, kind: str, label: str, scope: tuple[str, ...], expires: float | None, place: Destination) -> None:
    """Make a token. The secret is printed on stdout, this once."""
    if kind not in TOKEN_KINDS:
        raise InvalidInput(f"--kind must be one of {', '.join(TOKEN_KINDS)}, got {kind[:40]!r}")
    token_id = _make(output, place, kind, expires, label=label, scope=list(scope))
    output.hint(f"token {token_id} ({kind}) made; this is the only time that it is shown")


@command(
    "token enroll",
    parent=token,
    examples=[
        "tasuki token enroll --app zpe > enroll.token      # for one new worker, within 15 minutes",
        "tasuki token enroll --scope 'render.eu.>' --scope 'common.>' --label 'lab PC 3'",
        "tasuki token enroll --app zpe --worker-id w-3f9c21ab77de      # that worker gets another token",
    ],
)
@option("--app", metavar="NAME", help="The app whose jobs the worker is to run.")
@several("--scope", metavar="PATTERN", help="Subjects that the worker may take, * and > allowed. Several times.")
@label_option
@option("--worker-id", metavar="ID", default="", help="Register this worker again, instead of a new one.")
@connection_options()
def enroll(output: Output, app: str | None, scope: tuple[str, ...], label: str, worker_id: str, place: Destination) -> None:
    """Make an enrol token: good for one registration over HTTP, within 15 minutes.

    The worker is started with it: TASUKI_ENROLL=… tasuki worker --to https://host …
    """
    if app is None and not scope:  # a worker for everything must be asked for
        raise InvalidInput("give what the worker may run: --app NAME, or --scope PATTERN (for everything: --scope '>')")
    scopes = [*([app_subject(check_app(app))] if app is not None else ()), *scope]
    token_id = _make(output, place, "enrol", ENROL_TOKEN_S, label=label, scope=scopes, worker_id=worker_id)
    output.hint(f"token {token_id} (enrol, for {' '.join(scopes)}) made; it is good for one registration within 15 minutes")


def _make(output: Output, place: Destination, kind: str, valid_s: float | None, **fields: Any) -> str:
    """Make a secret, register its hash at the server, print the secret, and return the token's id."""

    from tasuki.server.assembly import make_secret

    secret, token_id, now = make_secret(kind), secrets.token_hex(6), time.time()
    row = {
        "token_id": token_id,
        "kind": kind,
        "sha256": token_sha256(secret),
        "created_at": now,
        "expires_at": None if valid_s is None else now + valid_s,
        **fields,
    }
    with_client(place, lambda client: client.call("token.create", **row), embedded=False)
    output.show({"token_id": token_id, "kind": kind, "token": secret, "expires_at": row["expires_at"]}, lambda: [secret])
    return token_id


@command("token list", parent=token, examples=["tasuki token list", "tasuki token list --json"])
@connection_options()
def list_tokens(output: Output, place: Destination) -> None:
    """List all tokens, without their secrets."""
    rows = with_client(place, lambda client: client.call("token.list"), embedded=False)

    def cells(row: dict[str, Any]) -> tuple[object, ...]:
        is_expired = row["expires_at"] is not None and row["expires_at"] <= time.time()
        state = "revoked" if row["revoked_at"] is not None else "expired" if is_expired else "valid"
        expires = shown_time(row["expires_at"])
        return row["token_id"], row["kind"], state, expires, row["worker_id"], " ".join(row["scope"]), row["label"]

    output.show(rows, lambda: table(("ID", "KIND", "STATE", "EXPIRES", "WORKER", "SCOPE", "LABEL"), map(cells, rows)))


@command(
    "token revoke", parent=token, examples=["tasuki token revoke 3f9c21ab77de", "tasuki token revoke --worker-id w-3f9c21ab77de"]
)
@argument("token_id", metavar="[ID]", help="As tasuki token list shows it.", required=False)
@option("--worker-id", metavar="ID", help="Instead: all tokens of this worker, also one that it just got.")
@connection_options()
def revoke(output: Output, token_id: str | None, worker_id: str | None, place: Destination) -> None:
    """End a token: connections that use it are cut, on every server within two seconds."""
    if (token_id is None) == (worker_id is None):
        raise InvalidInput("name one: a token's ID, or --worker-id ID")
    verb, params = ("token.revoke", {"token_id": token_id}) if token_id else ("worker.revoke", {"worker_id": worker_id})
    answer = with_client(place, lambda client: client.call(verb, **params), embedded=False)
    revoked = [token_id] if token_id else answer["revoked"]
    output.show(answer, lambda: [f"token {one} is revoked" for one in revoked])


@command("token audit", parent=token, examples=["tasuki token audit", "tasuki token audit --limit 1000 --json"])
@number("--limit", metavar="N", type=int, default=100, help="At most so many, the newest.")
@connection_options()
def audit(output: Output, limit: int, place: Destination) -> None:
    """List who made and revoked which token, and when. The newest first."""
    rows = with_client(place, lambda client: client.call("token.audit", limit=limit), embedded=False)

    def cells(row: dict[str, Any]) -> tuple[object, ...]:
        return shown_time(row["at"]), row["actor"], row["action"], row["target"], row["detail"]

    output.show(rows, lambda: table(("WHEN", "WHO", "DID", "TOKEN", "DETAIL"), map(cells, rows)))
