"""Settings of the scheduler: each range, and each combination that cannot work."""

import re
from typing import Any

import msgspec
import pytest

from tasuki.core.scheduler.thresholds import RANGES, Thresholds, problems_of
from tests.shape.source import ROOT


def test_the_defaults_work_and_every_threshold_has_a_range() -> None:
    assert problems_of(Thresholds()) == {}
    assert set(RANGES) == set(Thresholds.__struct_fields__)


@pytest.mark.parametrize("name", Thresholds.__struct_fields__)
def test_a_value_out_of_its_range_is_named(name: str) -> None:
    least, most = RANGES[name]

    for value in (least - 1, most + 1, float("nan")):
        problem = problems_of(msgspec.structs.replace(Thresholds(), **{name: value}))
        assert "is not between" in problem[name]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("heartbeat_ttl_seconds", {"heartbeat_interval_seconds": 2.5}),
        ("heartbeat_ttl_seconds", {"heartbeat_ttl_seconds": 2.0}),
        ("leader_stale_seconds", {"leader_tick_seconds": 3.0}),
        ("leader_stale_seconds", {"leader_stale_seconds": 1.5}),
        ("subleader_check_seconds", {"subleader_check_seconds": 6.0}),
        ("reassign_after_seconds", {"reassign_after_seconds": 1.5}),
        ("continuation_retry_count", {"continuation_retry_count": 25}),
        ("continuation_retry_count", {"continuation_retry_interval_seconds": 2.5}),
        ("continuation_retry_count", {"grpc_ping_timeout_seconds": 7.0}),
    ],
)
def test_a_combination_that_cannot_work_is_named(field: str, values: dict[str, Any]) -> None:
    problems = problems_of(msgspec.structs.replace(Thresholds(), **values))

    assert list(problems) == [field]
    assert "must be" in problems[field]


def test_the_table_in_the_docs_has_all_settings_with_their_defaults() -> None:
    table = (ROOT / "docs/django/cluster.md").read_text().partition("## Settings")[2].partition("\n## ")[0]
    shown = {}
    for row in re.findall(r"^\| (`.+?) \| ([0-9., ]+) \|", table, re.MULTILINE):
        shown |= zip(re.findall(r"`(\w+)`", row[0]), map(float, row[1].split(",")), strict=True)

    assert shown == msgspec.structs.asdict(Thresholds())
