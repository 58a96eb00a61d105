"""Parts that all screens share: login, permissions, rendering, exports, headers, files.

The response of a screen allows no script, style or connection but those of this folder, so a job's output stays text.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import json
import shlex
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import django_htmx
from django.core import signing
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.middleware.csrf import get_token
from django.template import Context, Engine
from django.urls import reverse
from django.utils import translation
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext as _
from django.views.decorators.csrf import csrf_exempt, csrf_protect
from django.views.decorators.http import require_POST

from tasuki.django.ops.backend import Backend, backend_of, has_agents, screen_cache
from tasuki.errors import Forbidden, InvalidInput, NotFound, TasukiError, Unauthorized, quoted

VIEW = "tasuki.view_jobrun"
"""Permission to look at the screens; Django makes it with the table."""

LANGUAGES = {"en": "English", "ja": "日本語"}
LANGUAGE_COOKIE = "tasuki_ops_language"
LANGUAGE_KEPT_S = 365 * 86_400
LOGIN_FAILURES_MAX = 10  # of one address
NAME_FAILURES_MAX = 30  # of one name, from all addresses
LOGIN_PAUSE_S = 300
ASSET_KEPT_S = 30 * 86_400  # an address has the hash of its file, which an upgrade changes
EXPORT_MAX = 10_000
PAGE = 50
NUMBER_MAX_CHARS = 18
DONE_S = 60  # for which a page says what was done
DONE_SALT = "tasuki-ops-done"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
        "base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
_HERE = Path(__file__).parent
_HTMX = Path(django_htmx.__file__).parent / "static" / "django_htmx"
_ASSETS = {
    **{file.name: file for file in (_HERE / "assets").iterdir()},
    "htmx.js": next(_HTMX / name for name in ("htmx-2.min.js", "htmx.min.js") if (_HTMX / name).exists()),
}
ASSET_HASHES = {name: hashlib.sha256(file.read_bytes()).hexdigest()[:12] for name, file in _ASSETS.items()}
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@dataclass
class Button:
    """A button in each row of a table, which posts the row's `id` to the screen."""

    action: str
    label: str
    confirm: str = ""
    """Question that is asked first; it says what will happen."""
    only: str = ""
    """Key of the rows that have the button; empty: all."""


@dataclass
class Table:
    """The rows of a list, of which the screen shows the named columns, and its exports all."""

    columns: dict[str, str]
    """Headings by key."""
    rows: Iterable[dict[str, Any]]
    links: dict[str, str] = field(default_factory=dict)
    """Names of the screens that cells of a column lead to, by key; the row's `id` is the argument."""
    cursor: str | None = None
    empty: str = ""
    note: str = ""
    """Text below the rows."""
    buttons: Sequence[Button] = ()
    export_max: int | None = EXPORT_MAX


Screen = Callable[..., HttpResponseBase | dict[str, Any]]


def screen(
    template: str, *, change: str = "", needs: str = "", filters: Collection[str] = ()
) -> Callable[[Screen], Callable[..., HttpResponseBase]]:
    """Make a screen of a function that returns the values of its template, or a response.

    GET needs the permission VIEW, POST the permission `change`; without one a screen takes no POST. `needs` names the screen that
    not every backend has; `filters` are the fields of a query that an export of its lists may have.
    """

    def wrap(function: Screen) -> Callable[..., HttpResponseBase]:
        @_protected
        @functools.wraps(function)
        @_translated
        def answer(request: HttpRequest, **arguments: Any) -> HttpResponseBase:
            user: Any = request.user
            if not user.is_authenticated:
                return _to_login(request)
            if not user.is_active or not user.has_perm(VIEW):
                return _forbidden(request, lacks(request, VIEW))
            if request.method not in ("GET", "HEAD", "POST"):
                return HttpResponse(status=405, headers={"Allow": "GET, POST"})
            if request.method == "POST" and not (change and user.has_perm(change)):
                error = lacks(request, change) if change else Forbidden(f"nothing can be changed at {request.path}")
                return _forbidden(request, error)
            if request.method == "POST" and (question := _question(request)):
                return render(request, "sure", {"title": _("Are you sure?"), "question": question, "fields": _fields(request)})
            try:
                if needs and needs not in _optional_screens(backend_of(request)):
                    raise NotFound(f"there is no screen of {needs} here")
                _check_fields(request, filters)
                found = function(request, **arguments)
                if "format" in request.GET and isinstance(found, dict):
                    return _exported(request, found, function.__name__)
            except Unauthorized:  # the token of the session was revoked, or has expired
                backend_of(request).log_out(request)
                return _to_login(request)
            except NotFound as error:
                return not_found(request, error)
            except Forbidden as error:
                return _forbidden(request, error)
            except TasukiError as error:
                values = {"title": _("Not done"), "problem": error.message, "way_back": request.path}
                return render(request, "problem", values, 400)
            if isinstance(found, HttpResponseBase):
                return found
            return render(request, template, {"may": bool(change) and user.has_perm(change), **found})

        return answer

    return wrap


def _protected(answer: Callable[..., HttpResponseBase]) -> Callable[..., HttpResponseBase]:
    """Refuse forged requests, with the headers of a screen: a project's own middleware, which would refuse them without, leaves
    these views alone."""
    checked = csrf_protect(answer)

    @functools.wraps(answer)
    def protected(request: HttpRequest, **arguments: Any) -> HttpResponseBase:
        return _with_headers(checked(request, **arguments))

    exempt: Callable[..., HttpResponseBase] = csrf_exempt(protected)
    return exempt


def render(request: HttpRequest, template: str, values: dict[str, Any], status: int = 200) -> HttpResponseBase:
    """Return a page."""
    query = request.GET.copy()
    for name in ("cursor", "done"):
        query.pop(name, None)
    backend = backend_of(request)
    shown = _optional_screens(backend)
    everywhere = {
        "request": request,
        "user": getattr(request, "user", None),
        "csrf_token": get_token(request),
        "backend": backend,
        "menu": [(name, label) for name, label in _menu().items() if name in shown or name not in _OPTIONAL],
        "language": translation.get_language() or "en",
        "languages": LANGUAGES,
        "title": "",
        "problem": "",
        "query": query.urlencode(),
        "done": _done(request),
    }
    text = _engine().get_template(f"ops/{template}.html").render(Context({**everywhere, **values}))
    return _with_headers(HttpResponse(text, status=status))


def not_found(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    """Say that there is nothing at an address; also the page of a server for addresses without a screen."""
    problem = exception.message if isinstance(exception, NotFound) else ""
    values = {"title": _("Not found"), "problem": problem, "way_back": reverse("tasuki_ops:overview")}
    return render(request, "problem", values, 404)


def _check_fields(request: HttpRequest, filters: Collection[str]) -> None:
    for name, values in (*request.GET.lists(), *request.POST.lists()):
        if any("\0" in value for value in values):  # PostgreSQL has no such text
            raise InvalidInput(f"{quoted(name)} has a NUL character; leave it out")
    if "format" in request.GET and (unknown := sorted(request.GET.keys() - {*filters, "format", "list", "cursor", "done"})):
        known = ", ".join(filters) or "none"  # an unknown one that is ignored would export everything
        raise InvalidInput(f"this list has no filter {', '.join(map(quoted, unknown))}; there are: {known}")


def _question(request: HttpRequest) -> str:
    """Return the question that the script would have asked before this form was sent; with the script the form has none."""
    return request.POST.get(f"question_{request.POST.get('action', '')}") or request.POST.get("question", "")


def _fields(request: HttpRequest) -> list[tuple[str, str]]:
    """Return the fields of a form without its questions and its token."""
    names = (name for name in request.POST if not name.startswith(("question", "csrf")))
    return [(name, value) for name in names for value in request.POST.getlist(name)]


def _done(request: HttpRequest) -> str:
    """Return the text that `back` signed a moment ago: that of a link which somebody else wrote is not shown."""
    try:
        return str(signing.loads(request.GET.get("done", ""), salt=DONE_SALT, max_age=DONE_S))
    except signing.BadSignature:
        return ""


_OPTIONAL = frozenset({"definitions", "events", "settings", "tokens", "caches", "agents"})


def _optional_screens(backend: Backend) -> frozenset[str]:
    return backend.screens | {"agents"} if has_agents() else backend.screens


def _menu() -> dict[str, str]:
    """Return the screens that can be reached from everywhere, with their names."""
    return {
        "overview": _("Overview"),
        "jobs": _("Jobs"),
        "dead": _("Dead letters"),
        "workers": _("Workers"),
        "agents": _("Agents"),
        "subjects": _("Subjects"),
        "definitions": _("Definitions"),
        "events": _("Events"),
        "tokens": _("Tokens"),
        "caches": _("Caches"),
        "settings": _("Settings"),
        "audit": _("Audit"),
    }


def _translated(function: Callable[..., HttpResponseBase]) -> Callable[..., HttpResponseBase]:
    """Answer in the language that the person chose, else in the browser's, if there is a translation."""

    @functools.wraps(function)
    def answer(request: HttpRequest, **arguments: Any) -> HttpResponseBase:
        chosen = request.COOKIES.get(LANGUAGE_COOKIE, "")
        if chosen not in LANGUAGES:
            first = request.headers.get("Accept-Language", "").partition(",")[0].partition("-")[0].strip().lower()
            chosen = first if first in LANGUAGES else "en"
        with translation.override(chosen):
            return function(request, **arguments)

    return answer


@functools.cache
def _engine() -> Engine:
    return Engine(
        dirs=[str(_HERE / "templates")],
        libraries={"ops": "tasuki.django.ops.cells"},
        builtins=["django.templatetags.i18n", "tasuki.django.ops.cells"],
    )


def _with_headers(response: HttpResponseBase) -> HttpResponseBase:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def _to_login(request: HttpRequest) -> HttpResponseBase:
    return HttpResponseRedirect(f"{reverse('tasuki_ops:login')}?{urlencode({'next': request.get_full_path()})}")


def _forbidden(request: HttpRequest, error: Forbidden) -> HttpResponseBase:
    values = {"title": _("Not done"), "problem": error.message, "way_back": reverse("tasuki_ops:overview")}
    return render(request, "problem", values, 403)


def lacks(request: HttpRequest, permission: str) -> Forbidden:
    """Return the error for a person who lacks a permission."""
    named = {"person": request.user, "permission": permission}
    return Forbidden(_("%(person)s may not do this; it needs the permission %(permission)s") % named)


def _exported(request: HttpRequest, found: dict[str, Any], name: str) -> HttpResponse:
    """Return the rows of one list of a page as a file."""
    kind, wanted = request.GET["format"], request.GET.get("list", "table")
    if kind not in ("csv", "json"):
        raise InvalidInput(f"format must be one of csv, json, got {quoted(kind)}")
    if not isinstance(table := found.get(wanted), Table):
        known = ", ".join(key for key, value in found.items() if isinstance(value, Table)) or "none"
        raise InvalidInput(f"this page has no list {quoted(wanted)}; there are: {known}")
    rows = list(islice(table.rows, table.export_max))
    if kind == "json":
        return HttpResponse(json.dumps(rows, default=_plain, ensure_ascii=False), content_type="application/json")
    headers = {"Content-Disposition": f'attachment; filename="{request.GET.get("list", name)}.csv"'}
    response = HttpResponse(content_type="text/csv; charset=utf-8", headers=headers)
    writer = csv.writer(response)
    keys: Sequence[str] = list(rows[0]) if rows else list(table.columns)
    writer.writerow(keys)
    writer.writerows([_cell_text(row.get(key)) for key in keys] for row in rows)
    return response


def _plain(value: Any) -> str:
    return value.isoformat(timespec="milliseconds") if isinstance(value, datetime) else str(value)


def _cell_text(value: Any) -> str:
    if isinstance(value, list | tuple | dict):
        return json.dumps(value, default=_plain, ensure_ascii=False)
    text = "" if value is None else _plain(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text  # spreadsheets would compute it


def number_of(request: HttpRequest) -> int | None:
    """Return the number of the row before which the wanted page begins; None: the newest page."""
    text = request.GET.get("cursor", "")
    if text and not (text.isdecimal() and len(text) <= NUMBER_MAX_CHARS):
        raise InvalidInput(f"cursor must be the number in the address of an older page, got {quoted(text)}")
    return int(text) if text else None


def moment(at: float | None) -> datetime | None:
    """Return a time of a job for a template."""
    return None if at is None else datetime.fromtimestamp(at, UTC)


def job_columns() -> dict[str, str]:
    """Return the headings of a list of jobs."""
    return {
        "job_id": _("Job"),
        "state": _("State"),
        "subject": _("Subject"),
        "command": _("Command"),
        "created": _("Created"),
        "ended": _("Ended"),
    }


def job_row(view: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a job in a list, from its description."""
    times = {"created": "created_at", "started": "started_at", "ended": "finished_at"}
    plain = {name: value for name, value in view.items() if not name.endswith("_at")}
    command = shlex.join([view["exec"], *view["args"]] if view["exec"] else view["args"])
    return {"id": view["job_id"], **plain, "command": command} | {name: moment(view[key]) for name, key in times.items()}


def back(name: str, *arguments: Any, done: str = "") -> HttpResponse:
    """Return a redirect to a screen that says what was done."""
    query = urlencode({"done": signing.dumps(done, salt=DONE_SALT, compress=True)})
    return HttpResponseRedirect(f"{reverse(f'tasuki_ops:{name}', args=arguments)}?{query}")


# ---------------------------------------------------------------------------------------------------- login and files


@_protected
@_translated
def login(request: HttpRequest) -> HttpResponseBase:
    """Ask for the name and password of a user of the project, or for a token of the server; too many failures make an address,
    or a name, wait. A link with a code, which `tasuki up` prints, logs in without a form."""
    target = _where_to(request)
    backend = backend_of(request)
    problem, status = "", 200
    # The code of a link cannot be guessed, so it is not counted: pages of others cannot lock anybody out with links. A project
    # has no such links.
    has_code = request.method == "GET" and "code" in request.GET and bool(backend.token_file)
    counted = _count_login(request) if request.method == "POST" else []
    if counted is None:
        problem, status = _("Too many failures; try again in %d minutes.") % (LOGIN_PAUSE_S // 60), 429
    elif has_code or request.method == "POST":
        if backend.log_in(request):
            for key in counted:
                with suppress(ValueError):  # it has ended since
                    screen_cache().decr(key)
            return _with_headers(HttpResponseRedirect(target))
        problem, status = backend.login_problem(request), 401
    return render(request, "login", {"next": target, "problem": problem}, status)


def _count_login(request: HttpRequest) -> list[str] | None:
    """Count an attempt to log in before it is made, so that many at once gain nothing, and return the keys of its counters; None
    if there were too many. One address alone cannot make a name wait."""
    name = unicodedata.normalize("NFKC", request.POST.get("username", "")).strip().casefold()
    limits = [(f"address:{request.META.get('REMOTE_ADDR')}", LOGIN_FAILURES_MAX)]
    if name:
        limits.append((f"name:{name}", NAME_FAILURES_MAX))
    counters, keys = screen_cache(), list[str]()
    for text, most in limits:
        key = "tasuki-ops-login:" + hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        keys.append(key)
        if counters.add(key, 1, LOGIN_PAUSE_S):
            continue
        with suppress(ValueError):  # it has ended since
            if counters.incr(key) > most:
                return None
    return keys


def _where_to(request: HttpRequest) -> str:
    """Return the address to which a login leads."""
    wanted = request.POST.get("next") or request.GET.get("next") or ""
    home = reverse("tasuki_ops:overview")
    return wanted if url_has_allowed_host_and_scheme(wanted, {request.get_host()}, request.is_secure()) else home


@_protected
@require_POST
def logout(request: HttpRequest) -> HttpResponse:
    """End the session."""
    backend_of(request).log_out(request)
    return HttpResponseRedirect(reverse("tasuki_ops:login"))


@_protected
@require_POST
def language(request: HttpRequest) -> HttpResponse:
    """Set the language of the screens for this browser."""
    response = HttpResponseRedirect(_where_to(request))
    if (chosen := request.POST.get("language", "")) in LANGUAGES:
        options: dict[str, Any] = {"httponly": True, "samesite": "Lax", "secure": request.is_secure()}
        response.set_cookie(LANGUAGE_COOKIE, chosen, max_age=LANGUAGE_KEPT_S, **options)
    return response


def asset(_request: HttpRequest, name: str) -> HttpResponseBase:
    """Return a file that pages refer to; these hold no data."""
    file = _ASSETS.get(name)
    if file is None:
        raise Http404(name)
    headers = {"Cache-Control": f"public, max-age={ASSET_KEPT_S}, immutable", "X-Content-Type-Options": "nosniff"}
    return HttpResponse(file.read_bytes(), content_type=f"{_TYPES[file.suffix]}; charset=utf-8", headers=headers)
