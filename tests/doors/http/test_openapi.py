"""The OpenAPI document: served, kept in docs/, and true to the routes."""

from __future__ import annotations

import json
from pathlib import Path

from tasuki.doors.http.openapi import document
from tasuki.doors.http.routes import ROUTES
from tests.doors.http.stage import Stage

KEPT = Path(__file__).parents[3] / "docs" / "openapi.json"


def test_the_kept_document_is_the_one_that_is_made() -> None:
    kept = json.loads(KEPT.read_text("utf-8"))

    assert kept == document(), "make it again with: python -m tasuki.doors.http.openapi > docs/openapi.json"


def test_the_served_document_is_the_same(stage: Stage) -> None:
    assert stage.call("GET", "/openapi.json").json() == json.loads(KEPT.read_text("utf-8"))


def test_every_route_is_in_it_with_its_errors_and_kinds_of_token() -> None:
    paths = document()["paths"]

    for route in ROUTES:
        operation = paths[route.path][route.method.lower()]
        assert operation.get("x-token-kinds", []) == sorted(route.kinds)
        assert {str(status) for status in route.errors} <= operation["responses"].keys()
        assert "422" not in operation["responses"]


def test_operation_ids_are_unique() -> None:
    ids = [operation["operationId"] for path in document()["paths"].values() for operation in path.values()]

    assert len(ids) == len(set(ids))


def test_every_reference_leads_somewhere() -> None:
    text = json.dumps(document())
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}

    assert named <= document()["components"]["schemas"].keys()
