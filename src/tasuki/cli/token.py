"""`tasuki token`: who may come in. The secret is made here and shown once; the server gets and keeps only its hash."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from tasuki.cli import options
from tasuki.cli.command import command, make_app
from tasuki.cli.connect import Destination, with_client
from tasuki.cli.output import Output, table, when
from tasuki.errors import InvalidInput

KINDS = ("admin", "client", "worker")


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    tokens = make_app("Make, list and revoke tokens.\n\nNeeds an admin token, or the server's own user on its unix socket.")
    command(
        tokens,
        "create",
        examples=[
            "tasuki token create --kind client --label 'report host' > client.token",
            "tasuki token create --kind worker --scope 'render.eu.>' --expires-days 90 > worker.token",
        ],
    )(create)
    command(
        tokens,
        "enroll",
        examples=[
            "tasuki token enroll --app zpe > enroll.token      # for one new worker, within 15 minutes",
            "tasuki token enroll --scope 'render.eu.>' --scope 'common.>' --label 'lab PC 3'",
            "tasuki token enroll --app zpe --worker-id w-3f9c21ab77de      # that worker gets another token",
        ],
    )(enroll)
    command(tokens, "list", examples=["tasuki token list", "tasuki token list --json"])(list_tokens)
    command(tokens, "revoke", examples=["tasuki token revoke 3f9c21ab77de", "tasuki token revoke --worker-id w-3f9c21ab77de"])(
        revoke
    )
    command(tokens, "audit", examples=["tasuki token audit", "tasuki token audit --limit 1000 --json"])(audit)
    app.add_typer(tokens, name="token")


def create(
    kind: Annotated[str, typer.Option("--kind", metavar="|".join(KINDS), help="What its bearer may be.")] = "client",
    label: Annotated[str, typer.Option("--label", metavar="TEXT", help="For people.")] = "",
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", metavar="PATTERN", help="Subjects that it may use, * and > allowed. Several times."),
    ] = None,
    expires_days: Annotated[
        float | None, typer.Option("--expires-days", metavar="DAYS", help="Valid so long. Default: until revoked.")
    ] = None,
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    json: options.Json = False,
) -> None:
    """Make a token. The secret is printed on stdout, this once."""
    import secrets

    from tasuki.core.access import token_sha256
    from tasuki.server.assembly import make_secret

    if kind not in KINDS:
        raise InvalidInput(f"--kind must be one of {', '.join(KINDS)}, got {kind[:40]!r}")
    if expires_days is not None and not expires_days > 0:
        raise InvalidInput(f"--expires-days must be above 0, got {expires_days:g}")
    secret, token_id, now = make_secret(kind), secrets.token_hex(6), time.time()
    expires_at = None if expires_days is None else now + expires_days * 86400.0
    row = {
        "token_id": token_id,
        "kind": kind,
        "sha256": token_sha256(secret),
        "label": label,
        "scope": list(scope or ()),
        "created_at": now,
        "expires_at": expires_at,
    }
    with_client(Destination(to, data, token_file, tls_ca), lambda client: client.request("token.create", **row))
    output = Output(json=json)
    output.show({"token_id": token_id, "kind": kind, "token": secret, "expires_at": expires_at}, lambda: [secret])
    output.hint(f"token {token_id} ({kind}) made; this is the only time that it is shown")


def enroll(
    app: Annotated[str | None, typer.Option("--app", metavar="NAME", help="The app whose jobs the worker is to run.")] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", metavar="PATTERN", help="Subjects that the worker may take, * and > allowed. Several times."),
    ] = None,
    label: Annotated[str, typer.Option("--label", metavar="TEXT", help="For people.")] = "",
    worker_id: Annotated[
        str, typer.Option("--worker-id", metavar="ID", help="Register this worker again, instead of a new one.")
    ] = "",
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    json: options.Json = False,
) -> None:
    """Make an enrol token: good for one registration over HTTP, within 15 minutes.

    The worker is started with it: TASUKI_ENROLL=… tasuki worker --to https://host …
    """
    import secrets

    from tasuki.core.access import ENROL_TOKEN_S, token_sha256
    from tasuki.server.assembly import make_secret

    scopes = _enrol_scope(app, scope or [])
    secret, token_id, now = make_secret("enrol"), secrets.token_hex(6), time.time()
    row = {
        "token_id": token_id,
        "kind": "enrol",
        "sha256": token_sha256(secret),
        "label": label,
        "scope": scopes,
        "worker_id": worker_id,
        "created_at": now,
        "expires_at": now + ENROL_TOKEN_S,
    }
    with_client(Destination(to, data, token_file, tls_ca), lambda client: client.request("token.create", **row))
    output = Output(json=json)
    output.show({"token_id": token_id, "kind": "enrol", "token": secret, "expires_at": row["expires_at"]}, lambda: [secret])
    output.hint(f"token {token_id} (enrol, for {' '.join(scopes)}) made; it is good for one registration within 15 minutes")


def _enrol_scope(app: str | None, scope: list[str]) -> list[str]:
    """What the worker may take. It must be said: a worker for everything is one of --scope '>'."""
    from tasuki.config import check_app
    from tasuki.core.subject import app_subject

    if app is None and not scope:
        raise InvalidInput("say what the worker may run: --app NAME, or --scope PATTERN (for everything: --scope '>')")
    return [*([app_subject(check_app(app))] if app is not None else ()), *scope]


def list_tokens(
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    json: options.Json = False,
) -> None:
    """All tokens, without their secrets."""
    rows = with_client(Destination(to, data, token_file, tls_ca), lambda client: client.request("token.list"))
    head = ("ID", "KIND", "STATE", "EXPIRES", "WORKER", "SCOPE", "LABEL")

    def cells(row: dict[str, Any]) -> tuple[object, ...]:
        expires = when(row["expires_at"])
        return row["token_id"], row["kind"], _state(row), expires, row["worker_id"], " ".join(row["scope"]), row["label"]

    Output(json=json).show(rows, lambda: table(head, map(cells, rows)))


def _state(row: dict[str, object]) -> str:
    if row["revoked_at"] is not None:
        return "revoked"
    expires_at = row["expires_at"]
    return "expired" if isinstance(expires_at, float) and expires_at <= time.time() else "valid"


def revoke(
    token_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="As tasuki token list shows it.")] = None,
    worker_id: Annotated[
        str | None,
        typer.Option("--worker-id", metavar="ID", help="Instead: all tokens of this worker, also one that it just got."),
    ] = None,
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    json: options.Json = False,
) -> None:
    """End a token: connections that use it are cut, on every server within two seconds."""
    if (token_id is None) == (worker_id is None):
        raise InvalidInput("say which: a token's ID, or --worker-id ID")
    verb, params = ("token.revoke", {"token_id": token_id}) if token_id else ("worker.revoke", {"worker_id": worker_id})
    answer = with_client(Destination(to, data, token_file, tls_ca), lambda client: client.request(verb, **params))
    ended = [token_id] if token_id else answer["revoked"]
    Output(json=json).show(answer, lambda: [f"token {one} is revoked" for one in ended])


def audit(
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="At most so many, the newest.")] = 100,
    to: options.To = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    json: options.Json = False,
) -> None:
    """Who made and revoked which token, and when. The newest first."""
    rows = with_client(Destination(to, data, token_file, tls_ca), lambda client: client.request("token.audit", limit=limit))
    head = ("WHEN", "WHO", "DID", "TOKEN", "DETAIL")

    def human() -> list[str]:
        return table(head, ((when(row["at"]), row["actor"], row["action"], row["target"], row["detail"]) for row in rows))

    Output(json=json).show(rows, human)
