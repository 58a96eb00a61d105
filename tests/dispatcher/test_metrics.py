"""Metrics of agents and dispatchers: each figure is driven once and read, and the documented ones are those that there are."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tasuki.agent.jobs import AgentMetrics
from tasuki.core.units import DAY_S
from tasuki.dispatcher.metrics import DispatcherMetrics
from tests.agent.stage import AgentStage, code_of
from tests.client.agent_stand_in import Asked, Reply, result
from tests.dispatcher.stage import BOOK, sha256_of, tell, two_nodes

DOCS = Path(__file__).parents[2] / "docs/operate"


def figures(text: str) -> dict[str, float]:
    """`name{label=value,…}` or `name`, without what the library adds."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def names(text: bytes) -> set[str]:
    """The names as they are asked for: counters end with _total."""
    kinds = {family.name: family.type for family in text_string_to_metric_families(text.decode())}
    kinds = {name: kind for name, kind in kinds.items() if not name.endswith("_created")}
    return {name + ("_total" if kind == "counter" else "") for name, kind in kinds.items()}


def documented(page: str, prefix: str) -> set[str]:
    """`tasuki_agent_jobs_total` by its whole name, the others as `_running`."""
    line = next(line for line in (DOCS / page).read_text().splitlines() if line.startswith("| `GET /metrics`"))
    return {prefix + word.removeprefix(prefix) for word in re.findall(r"`([a-z_]+)`", line)}


@pytest.mark.parametrize(
    ("page", "prefix", "text"),
    [
        ("agents.md", "tasuki_agent", AgentMetrics(4, lambda: 0.0).text()),
        ("dispatcher.md", "tasuki_dispatcher", DispatcherMetrics().text([], 0, 0)),
    ],
)
def test_what_is_documented_is_what_there_is(page: str, prefix: str, text: bytes) -> None:
    assert documented(page, prefix) == names(text)


def test_what_an_agent_counts(tmp_path: Path) -> None:
    with AgentStage(tmp_path, slots=3) as stage:
        first = stage.run("a", "echo hello")
        stage.run("a", "echo hello")
        stage.run("b", "exit 3")
        assert code_of(stage.run("a", "echo other")) == (409, "CONFLICT")
        stage.http.get("/result/a")
        assert code_of(stage.http.get("/result/nobody")) == (404, "NOT_FOUND")
        stage.await_(stage.agent.jobs.remove_old(7.0, time.time() + 8 * DAY_S))

        found = figures(stage.http.get("/metrics").text)

    assert found["tasuki_agent_jobs_total{outcome=succeeded}"] == 1
    assert found["tasuki_agent_jobs_total{outcome=failed}"] == 1
    assert found["tasuki_agent_job_seconds_count{outcome=succeeded}"] == 1
    assert (found["tasuki_agent_running"], found["tasuki_agent_slots"]) == (0, 3)
    assert found["tasuki_agent_disk_free_bytes"] > 0
    assert found["tasuki_agent_cache_hits_total"] == 1
    assert found["tasuki_agent_refused_total{code=CONFLICT}"] == 1
    assert found["tasuki_agent_refused_total{code=PROGRAM_FAILED}"] == 1
    assert found["tasuki_agent_refused_total{code=NOT_FOUND}"] == 1
    assert found["tasuki_agent_received_bytes_total"] >= len("echo hello" * 2 + "exit 3" + "echo other")
    assert found["tasuki_agent_sent_bytes_total"] == 3 * len(first.content)
    assert found["tasuki_agent_cleaned_jobs_total"] == 2


def test_what_a_dispatcher_counts(tmp_path: Path) -> None:
    """But for what is cleaned and stopped: test_input_retention.py, test_abandoned_runs.py."""

    async def story() -> None:
        async with two_nodes(inputs=str(tmp_path)) as (one, two, stage):

            async def hang_up(asked: Asked) -> Reply:
                await asked.body()
                return None

            async def cut(asked: Asked) -> Reply:
                asked.writer.write(result(bytes(100))[:-10])
                await asked.writer.drain()
                return None

            await stage.http.put(f"/inputs/{sha256_of(BOOK)}", content=BOOK)
            await stage.post("a")
            one.on_post = hang_up
            await stage.post("b")
            two.on_result = cut
            two.job = {"state": "done"}
            with pytest.raises(Exception, match="peer closed"):
                await stage.http.get("/result/b")
            await stage.http.get("/capacity")

            found = figures((await stage.http.get("/metrics")).text)

            assert found["tasuki_dispatcher_runs_total{status=200}"] == 2
            assert found["tasuki_dispatcher_moved_total"] == 1
            assert found["tasuki_dispatcher_looks_total{end=ok}"] >= 2
            assert found["tasuki_dispatcher_input_bytes_total"] >= 3 * len(BOOK)
            assert found["tasuki_dispatcher_cut_results_total"] == 1
            assert sum(value for name, value in found.items() if name.startswith("tasuki_dispatcher_nodes{standing=")) == 2
            assert found["tasuki_dispatcher_places{kind=limit}"] >= 4
            assert found["tasuki_dispatcher_places{kind=running}"] >= 1

    tell(story())


AGENTS_BOARD = Path(__file__).parents[2] / "deploy/grafana/tasuki-agents.json"


def test_every_metric_is_on_the_page_of_metrics_and_the_dashboard_asks_for_no_other() -> None:
    page = (DOCS / "metrics.md").read_text().split("## Node agents and dispatchers")[1].split("\n## ")[0]
    there = names(AgentMetrics(4, lambda: 0.0).text()) | names(DispatcherMetrics().text([], 0, 0))
    board = json.loads(AGENTS_BOARD.read_text())

    asked = {name for panel in board["panels"] for target in panel["targets"] for name in metric_names(target["expr"])}

    assert metric_names(page) == there
    assert len(asked) > 12
    assert {name.removesuffix("_bucket") for name in asked} <= there
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def metric_names(text: str) -> set[str]:
    return set(re.findall(r"\btasuki_(?:agent|dispatcher)_\w+", text))
