"""`--app zpe=schema.json`: payloads are checked when they are submitted, and the schema at the start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasuki.core.apps import AppLimits
from tasuki.doors.http.app_jobs import payload_check
from tasuki.errors import ConfigError
from tests.doors.http.stage import Stage

SCHEMA = {
    "type": "object",
    "required": ["atoms"],
    "properties": {"atoms": {"type": "array", "items": {"$ref": "#/$defs/atom"}}, "charge": {"type": "integer"}},
    "$defs": {"atom": {"type": "object", "properties": {"element": {"enum": ["H", "O"]}}, "required": ["element"]}},
}


def test_a_payload_that_does_not_fit_the_schema_of_its_app_is_no_job(tmp_path: Path) -> None:
    path = tmp_path / "zpe.json"
    path.write_text(json.dumps(SCHEMA))
    checks = {"zpe": payload_check("zpe", path)}
    good, bad = {"atoms": [{"element": "H"}]}, {"atoms": [{"element": "H"}, {"element": "Xx"}]}

    with Stage(tmp_path, payload_checks=checks, limits=AppLimits(max_retries=1, timeout_s=60.0)) as stage:
        refused = stage.post("/calc/zpe/jobs", bad)
        missing = stage.post("/calc/zpe/jobs", {"charge": 1}).json()["error"]["message"]
        batch = stage.post("/calc/zpe/jobs/batch", {"jobs": [{"payload": bad}, {"payload": good}]}).json()["jobs"]
        other = stage.post("/calc/other/jobs", bad).status_code
        view = stage.get(f"/v1/jobs/{batch[1]['job_id']}").json()
        listed = stage.get("/v1/jobs").json()["jobs"]

    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "INVALID_PAYLOAD")
    told = "the payload does not fit app 'zpe': $.atoms[1].element: 'Xx' is not one of ['H', 'O']"
    assert refused.json()["error"]["message"] == told
    assert missing == "the payload does not fit app 'zpe': $: 'atoms' is a required property"
    assert (batch[0]["error"]["code"], batch[1]["status"], other) == ("INVALID_PAYLOAD", "queued", 200)
    assert (view["max_retries"], view["timeout_s"], len(listed)) == (1, 60.0, 2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ('{"type": "objct"}', "is no JSON Schema: .*objct"),
        ('{"$ref": "https://example.org/a.json"}', "https://example.org/a.json.*must be in the file itself"),
        ('{"properties": {"a": {"$ref": "#/$defs/missing"}}}', "/\\$defs/missing', which must be in the file itself"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path, text: str | None, told: str) -> None:
    if text is not None:
        (tmp_path / "zpe.json").write_text(text)

    with pytest.raises(ConfigError, match=told):
        payload_check("zpe", tmp_path / "zpe.json")
