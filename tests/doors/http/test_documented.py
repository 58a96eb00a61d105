"""Whatever is sent: an answer that the OpenAPI document names, in the common form, and never a 5xx."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasuki.core.access import PeerKind
from tasuki.doors.http.openapi import document
from tasuki.doors.http.routes import ROUTES, Route
from tests.doors.http.stage import Stage

PATHS = document()["paths"]
EXAMPLES = 12
# What is spent or ended by its own success would make every later example a 403.
PROTECTED = [route for route in ROUTES if route.kinds and not route.path.endswith(("/register", "/rotate"))]

texts = st.one_of(st.text(max_size=20), st.sampled_from(["", "job.assign.zpe", "a..b", ">", "\0", "PENDING", "w-1"]))
numbers = st.one_of(
    st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([0, -1, 2**63, 2**64, 1e308])
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)


def names_of(kind: Any) -> list[str]:
    """The fields that a body may have, with those of its parts."""
    own = list(getattr(kind, "__struct_fields__", ()))
    return own or ["job_id", "payload"]


def bodies_of(route: Route) -> st.SearchStrategy[Any]:
    names = [*names_of(route.body), *(names_of(route.batch) if route.batch is not None else ())]
    known = st.dictionaries(st.sampled_from(names), values, max_size=len(names))
    items = st.lists(
        st.dictionaries(st.sampled_from(["job_id", "lease_id", "payload", "error_code", *names]), values), max_size=2
    )
    several = st.dictionaries(st.sampled_from(["jobs", "leases", "results", "failures", "job_ids"]), items, max_size=1)
    return st.one_of(values, known, several)


def queries_of(route: Route) -> st.SearchStrategy[dict[str, str]]:
    names = [name for name, _, _ in route.query if name != "wait"] or ["unknown"]
    return st.dictionaries(st.sampled_from(names), st.one_of(texts, numbers.map(str)), max_size=3)


def path_with(route: Route, made_up: str) -> str:
    filled = {"app": "zpe", **dict.fromkeys(("job_id", "worker_id", "sha256", "session"), quote(made_up, safe=""))}
    return re.sub(r"{(\w+)}", lambda found: filled[found[1]], route.path)


@pytest.fixture(scope="module")
def tokens(stage: Stage) -> dict[str, str]:
    return {PeerKind.CLIENT: stage.client, PeerKind.ADMIN: stage.admin, PeerKind.WORKER: stage.register().token}


@pytest.mark.parametrize("route", PROTECTED, ids=lambda route: f"{route.method} {route.path}")
def test_every_answer_is_documented(stage: Stage, tokens: dict[str, str], route: Route) -> None:
    documented = PATHS[route.path][route.method.lower()]["responses"]
    kind = sorted(route.kinds)[-1]

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.text(min_size=1, max_size=12).filter(lambda text: text not in (".", "..")), bodies_of(route), queries_of(route))
    def check(made_up: str, body: Any, query: dict[str, str]) -> None:
        options = {"json": body} if route.body is not None else {}
        answer = stage.call(route.method, path_with(route, made_up), tokens[kind], params=query, **options)
        assert answer.status_code < 500, answer.text
        assert str(answer.status_code) in {*documented, "404"}, answer.text
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"code", "message", "details"}

    check()
