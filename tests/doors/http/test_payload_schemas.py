"""`--app zpe=schema.json`: payloads are checked when they are submitted, and the schema at the start."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import pytest

from tasuki.core.apps import AppLimits
from tasuki.doors.http.payload_checks import PayloadCheck
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
    checks = {"zpe": PayloadCheck("zpe", path)}
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


OTHERS_WAIT_MAX_S = 5.0
LOOK_S = 0.02
ENDLESS = "a" * 40 + "!"
SLOW = {
    "properties": {
        "name": {"pattern": r"^(\w+\s?)*$"},
        "atoms": {"uniqueItems": True},
        "tree": {"$ref": "#/$defs/tree"},
    },
    "$defs": {"tree": {"properties": {"next": {"$ref": "#/$defs/tree"}}}},
}


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Stage]:
    path = tmp_path / "zpe.json"
    path.write_text(json.dumps(SLOW))
    with Stage(tmp_path, payload_checks={"zpe": PayloadCheck("zpe", path)}) as stage:
        assert stage.post("/calc/zpe/jobs", {"name": "the first starts the process"}).status_code == 200
        yield stage


@pytest.mark.parametrize("payload", [{"name": ENDLESS}, {"atoms": [{"n": n} for n in range(5000)]}], ids=["pattern", "list"])
def test_a_payload_that_takes_for_ever_to_check_is_refused_and_others_are_served_meanwhile(slow: Stage, payload: object) -> None:
    with futures.ThreadPoolExecutor(1) as pool:
        batch = pool.submit(slow.post, "/calc/zpe/jobs/batch", {"jobs": [{"payload": payload}] * 50})
        longest_s, served = 0.0, 0
        while not futures.wait([batch], timeout=LOOK_S).done:
            began = time.monotonic()
            assert slow.get("/healthz").status_code == 200
            longest_s, served = max(longest_s, time.monotonic() - began), served + 1

    told = [job["error"] for job in batch.result().json()["jobs"]]
    assert {(error["code"], "longer than 1 s to check" in error["message"]) for error in told} == {("INVALID_PAYLOAD", True)}
    assert len(told) == 50
    assert longest_s < OTHERS_WAIT_MAX_S
    assert served > 5
    assert slow.post("/calc/zpe/jobs", {"name": "fine"}).status_code == 200


def test_a_token_with_slow_payloads_delays_others_by_one_of_them(tmp_path: Path) -> None:
    path = tmp_path / "zpe.json"
    path.write_text(json.dumps(SLOW))
    ended = []

    async def ask(check: PayloadCheck, token: str, name: str) -> None:
        [problem] = await check.problems([json.dumps({"name": name}).encode()], token)
        ended.append((token, problem is None))

    async def main() -> None:
        check = PayloadCheck("zpe", path)
        async with asyncio.TaskGroup() as tasks:
            for token, name in [("greedy", ENDLESS)] * 3 + [("other", "fine")]:
                tasks.create_task(ask(check, token, name))
        await check.close()

    asyncio.run(main())

    assert ended == [("greedy", False), ("other", True), ("greedy", False), ("greedy", False)]


def test_a_payload_that_is_nested_too_deep_for_its_schema_is_refused(slow: Stage) -> None:
    deep: dict[str, object] = {}
    for _ in range(900):
        deep = {"next": deep}

    refused = slow.post("/calc/zpe/jobs", {"tree": deep})

    assert (refused.status_code, "nested too deep" in refused.text) == (400, True)
    assert slow.post("/calc/zpe/jobs", {"name": "fine"}).status_code == 200


def test_a_payload_that_no_job_can_have_is_not_checked(slow: Stage) -> None:
    large = slow.post("/calc/zpe/jobs", {"name": "a" * 70_000 + "!"})

    assert (large.status_code, large.json()["error"]["code"]) == (413, "TOO_LARGE")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ('{"type": "objct"}', "is not a JSON Schema: .*objct"),
        ('{"$ref": "https://example.org/a.json"}', "https://example.org/a.json.*must be in the file itself"),
        ('{"properties": {"a": {"$ref": "#/$defs/missing"}}}', "/\\$defs/missing', which must be in the file itself"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path, text: str | None, told: str) -> None:
    if text is not None:
        (tmp_path / "zpe.json").write_text(text)

    with pytest.raises(ConfigError, match=told):
        PayloadCheck("zpe", tmp_path / "zpe.json")
