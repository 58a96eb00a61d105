"""Requests that schemathesis makes up from the OpenAPI document as it is served, sent with tokens of each kind.

Every answer stands in the document, has the shape that it has there, and none is a defect. Half of the requests follow the
schemas, half break them. Some of the ids are those of a job that is leased: not all of it ends at "there is no such job".
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasuki.core.protocol import FRAMES_TYPE
from tasuki.doors.http.exchange import WAIT_MAX_S
from tasuki.doors.http.messages import EVENTS_TYPE
from tasuki.doors.http.routes import ROUTES, Route
from tests.conftest import Require
from tests.doors.http.stage import Stage, Worker

EXAMPLES = 5
# Frames are no document, see test_frames.py; events have no end, see test_messages.py.
SENDABLE = [route for route in ROUTES if route.content != FRAMES_TYPE and EVENTS_TYPE not in route.media_types]
KINDS = ("client", "admin", "worker", "enrol", "none")


class Cast:
    """One worker of its own, a job that it has leased, and a token of each kind."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.worker = stage.register()
        stage.submit()
        self.leased = self.worker.lease().json()
        self._tokens = {"client": stage.client, "admin": stage.admin, "worker": self.worker.token, "none": ""}

    def speaker(self, kind: str, route: Route) -> Worker | str:
        """A token, or where success ends it a whole worker of its own."""
        if kind == "enrol":
            return self._stage.enroll()
        if kind == "worker" and route.path.endswith("/rotate"):
            return self._stage.register()
        return self._tokens[kind]


@pytest.fixture(scope="module")
def cast(stage: Stage) -> Cast:
    return Cast(stage)


@pytest.fixture(scope="module")
def schema(stage: Stage, require: Require) -> Any:
    require("schemathesis", find_spec("schemathesis") is not None, "pip install schemathesis")
    import schemathesis

    return schemathesis.openapi.from_url(f"{stage.url}/openapi.json")


@pytest.fixture(scope="module")
def session(schema: Any) -> Iterator[Any]:
    """Connections that are used again."""
    import requests

    with requests.Session() as session:
        yield session


def kinds_for(route: Route) -> st.SearchStrategy[str]:
    """Mostly one that is let in."""
    return st.sampled_from([*sorted(route.kinds) * 4, *KINDS])


def requests_of(operation: Any) -> st.SearchStrategy[Any]:
    from schemathesis import GenerationMode

    return st.one_of(operation.as_strategy(generation_mode=mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE))


def bring_to_life(case: Any, cast: Cast, *, meets_the_job: bool) -> None:
    """An app that there is, sometimes the job that is leased; and nobody waits for a minute."""
    if "app" in case.path_parameters:
        case.path_parameters["app"] = "zpe"
    if meets_the_job and "job_id" in case.path_parameters:
        case.path_parameters["job_id"] = cast.leased["job_id"]
        if isinstance(case.body, dict) and "lease_id" in case.body:
            case.body["lease_id"] = cast.leased["lease_id"]
    if _is_a_wait(case.query.get("wait")):
        del case.query["wait"]


def _is_a_wait(value: Any) -> bool:
    try:
        return 0.0 <= float(value) <= WAIT_MAX_S
    except (TypeError, ValueError):
        return False


@pytest.mark.parametrize("route", SENDABLE, ids=lambda route: f"{route.method} {route.path}")
def test_every_answer_is_documented(stage: Stage, cast: Cast, schema: Any, session: Any, route: Route) -> None:
    from schemathesis import checks

    judges = [
        checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(requests_of(schema[route.path][route.method]), kinds_for(route), st.booleans())
    def check(case: Any, kind: str, meets_the_job: bool) -> None:
        speaker = cast.speaker(kind, route)
        bring_to_life(case, cast, meets_the_job=meets_the_job)
        if isinstance(speaker, Worker):
            case.path_parameters["worker_id"] = speaker.worker_id
        token = speaker.token if isinstance(speaker, Worker) else speaker
        case.headers["Authorization"] = f"Bearer {token}" if token else "none"

        answer = case.call(base_url=stage.url, session=session, timeout=20.0)

        case.validate_response(answer, checks=judges)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"code", "message", "details"}

    check()
