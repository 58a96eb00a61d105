"""The OpenAPI document, made from the table of routes. A test compares it with `docs/openapi.json`."""

from __future__ import annotations

import functools
import re
import sys
from typing import Any

import msgspec

from tasuki.doors.http.exchange import ErrorReply
from tasuki.doors.http.routes import ROUTES, Route

TITLE = "tasuki"
API_VERSION = "1"
DESCRIPTIONS = {
    200: "Done.",
    204: "There is no job.",
    206: "The requested part.",
    400: "The request can never work as it is (INVALID_PAYLOAD).",
    401: "No token, or one that is not valid or has expired.",
    403: "The token may not do this, or was revoked.",
    404: "There is no such job, worker or app.",
    409: "The job exists with another body or result, or the upload continues at another byte (CONFLICT); the lease is not the "
    "current one (FENCED); there is no result; a request does not follow on the last one (OUT_OF_TURN).",
    413: "Too large.",
    415: "A Content-Encoding that is not supported (UNSUPPORTED_ENCODING).",
    429: "Too many requests of this caller at once.",
    500: "A defect of the server.",
    503: "Not now: the store does not answer or is full, or the server is going down. Try again.",
}
_REF = "#/components/schemas/{name}"
_parameters = re.compile(r"{(\w+)}").findall


@functools.cache
def document_text() -> bytes:
    """Return the document as JSON. Made when it is first asked for: that takes longer than the rest of the door's start."""
    return msgspec.json.encode(document())


def document() -> dict[str, Any]:
    types = [kind for route in ROUTES for kind in (route.body, route.batch, *route.answers) if kind is not None]
    _, components = msgspec.json.schema_components([*types, ErrorReply], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    bearer = {"type": "http", "scheme": "bearer", "description": "A token of the kind that x-token-kinds names."}
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": API_VERSION, "description": "See docs/operate/http.md."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"bearer": bearer}},
    }


def _content(*kinds: Any) -> dict[str, Any]:
    found = [msgspec.json.schema_components([kind], ref_template=_REF)[0][0] for kind in kinds]
    return {"application/json": {"schema": found[0] if len(found) == 1 else {"oneOf": found}}}


def _operation(route: Route) -> dict[str, Any]:
    made: dict[str, Any] = {
        "summary": (route.handle.__doc__ or "").strip().splitlines()[0],
        "operationId": f"{route.handle.__module__.rpartition('.')[2]}_{route.handle.__name__}",
        "responses": _responses(route),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in _parameters(route.path)
    ]
    parameters += [{"name": name, "in": "query", "description": text, "schema": schema} for name, schema, text in route.query]
    if parameters:
        made["parameters"] = parameters
    if route.body is not None:
        kinds = (route.body, route.batch) if route.batch is not None else (route.body,)
        made["requestBody"] = {"required": _is_required(route), "content": _content(*kinds)}
    elif route.content:
        made["requestBody"] = {"required": True, "content": {route.content: {}}}
    if route.kinds:
        made["security"] = [{"bearer": []}]
        made["x-token-kinds"] = sorted(route.kinds)
    return made


def _is_required(route: Route) -> bool:
    """Return if an empty body is refused, also because it stands for {} and there are required fields."""
    if route.needs_body:
        return True
    fields = getattr(route.body, "__struct_fields__", ())
    return bool(len(fields) - len(getattr(route.body, "__struct_defaults__", ())))


def _responses(route: Route) -> dict[str, Any]:
    other: dict[str, Any] = {media_type: {} for media_type in route.media_types}
    content = other or _content(*route.answers)
    made: dict[str, Any] = {"200": {"description": DESCRIPTIONS[200], "content": content}}
    if route.partial:
        made["206"] = {"description": DESCRIPTIONS[206], "content": content}
    if route.empty:
        made["204"] = {"description": DESCRIPTIONS[204]}
    common = (400, 401, 403, 413, 415, 429, 500, 503) if route.kinds else ()
    for status in sorted({*common, *route.errors}):
        made[str(status)] = {"description": DESCRIPTIONS[status], "content": _content(ErrorReply)}
    return made


def main() -> None:
    """Write the document as it stands in `docs/openapi.json`."""
    text = msgspec.json.format(msgspec.json.encode(document(), order="sorted"), indent=2)
    sys.stdout.buffer.write(text + b"\n")


if __name__ == "__main__":
    main()
