"""The screens of a server alone: its tokens and caches."""

from __future__ import annotations

import time
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _

from tasuki.core.access import ENROL_TOKEN_S, TOKEN_PREFIXES
from tasuki.core.units import parse_duration
from tasuki.django import operations
from tasuki.django.ops.backend import backend_of
from tasuki.django.ops.screens import Button, Table, back, moment, screen
from tasuki.errors import InvalidInput, quoted


@screen("tokens", change=operations.MANAGE, needs="tokens")
def tokens(request: HttpRequest) -> HttpResponse | dict[str, Any]:
    """List tokens without their secrets; make one, whose secret is shown once; revoke one."""
    backend: Any = backend_of(request)
    secret = ""
    if request.method == "POST":
        if "id" in request.POST:
            backend.revoke_token(request.POST["id"])
            return back("tokens", done=_("Token %s is revoked.") % request.POST["id"])
        secret = _new_token(backend, request)
    now = time.time()
    rows = [
        {
            **row,
            "id": row["token_id"],
            "state": _state(row, now),
            "valid": _state(row, now) == "valid",
            "expires": moment(row["expires_at"]),
            "created": moment(row["created_at"]),
        }
        for row in reversed(backend.tokens())
    ]
    columns = {
        "token_id": _("Token"),
        "kind": _("Kind"),
        "state": _("State"),
        "label": _("Label"),
        "scope": _("Scope"),
        "worker_id": _("Worker"),
        "created": _("Created"),
        "created_by": _("Made by"),
        "expires": _("Expires"),
    }
    button = Button(
        "revoke", _("Revoke"), _("Revoke? Connections that use it are cut, and its workers' jobs go to others."), "valid"
    )
    table = Table(columns, rows, buttons=[button])
    return {"title": _("Tokens"), "table": table, "secret": secret, "kinds": [*reversed(TOKEN_PREFIXES)], "ended": True}


def _state(row: dict[str, Any], now: float) -> str:
    if row["revoked_at"] is not None:
        return "revoked"
    return "expired" if row["expires_at"] is not None and row["expires_at"] <= now else "valid"


def _new_token(backend: Any, request: HttpRequest) -> str:
    kind, expires = request.POST.get("kind", ""), request.POST.get("expires", "").strip()
    if kind not in TOKEN_PREFIXES:
        raise InvalidInput(f"kind must be one of {', '.join(TOKEN_PREFIXES)}, got {quoted(kind)}")
    try:
        valid_s = parse_duration(expires) if expires else None
    except ValueError as error:
        raise InvalidInput(_("%s is not a duration; write it as 90d or 12h") % quoted(expires)) from error
    if kind == "enrol":
        valid_s = ENROL_TOKEN_S
    scope = request.POST.get("scope", "").split()
    secret: str = backend.create_token(kind, label=request.POST.get("label", "")[:200], scope=scope, valid_s=valid_s)
    return secret


@screen("list", change=operations.MANAGE, needs="caches")
def caches(request: HttpRequest) -> HttpResponse | dict[str, Any]:
    """List caches; remove one."""
    backend: Any = backend_of(request)
    if request.method == "POST":
        backend.remove_cache(request.POST.get("id", ""))
        return back("caches", done=_("Cache %s is removed.") % request.POST.get("id", ""))
    rows = [{**row, "id": row["cache_id"], "created": moment(row["created_at"])} for row in backend.caches()]
    columns = {
        "cache_id": _("Cache"),
        "files": _("Files"),
        "size_bytes": _("Bytes"),
        "target": _("For workers of"),
        "owner": _("Owner"),
        "created": _("Created"),
    }
    button = Button("remove", _("Remove"), _("Remove? Jobs that were accepted keep what they need; new ones cannot name it."))
    return {"title": _("Caches"), "table": Table(columns, rows, empty=_("No cache yet."), buttons=[button])}
