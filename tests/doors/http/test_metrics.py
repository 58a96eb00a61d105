"""/metrics: what it counts, that labels are bounded, and that the dashboard asks for nothing that is not there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tasuki.core.job import JobSpec
from tasuki.core.statistics import LATENCIES_S, OTHER_GROUPS, ROLLUP_GROUPS_MAX, GroupCounts, largest_groups
from tasuki.core.store_messages import Answers, Submission, Turn
from tasuki.doors.http.metrics import Metrics
from tests.doors.http.stage import Stage, Worker
from tests.support.redis_service import RedisService
from tests.support.waiting import until

DEPLOY = Path(__file__).parents[3] / "deploy" / "grafana"


def value(text: str, name: str) -> float:
    """0 if there is no such line: a counter begins with the first count."""
    return float(next((line for line in text.splitlines() if line.startswith(name)), "0").rpartition(" ")[2])


def test_jobs_leases_and_reports_are_counted(stage: Stage, worker: Worker) -> None:
    job_id = stage.submit()
    waiting = stage.get("/metrics", stage.admin).text
    leased = worker.take(job_id)
    worker.finish(leased)
    worker.finish(leased, summary_text="another")

    answer = stage.get("/metrics", stage.admin)

    assert answer.headers["content-type"].startswith("text/plain")
    assert value(waiting, 'tasuki_jobs{group="zpe",state="pending"}') == 1
    assert value(answer.text, 'tasuki_jobs{group="zpe",state="succeeded"}') == 1
    assert value(answer.text, 'tasuki_http_jobs_leased_total{app="zpe"}') == 1
    assert value(answer.text, 'tasuki_http_jobs_reported_total{answer="recorded",app="zpe",what="result"}') == 1
    assert value(answer.text, 'tasuki_http_jobs_reported_total{answer="fenced",app="zpe",what="result"}') == 1


def test_requests_are_counted_by_route_and_not_by_path(stage: Stage) -> None:
    stage.get("/v1/jobs/some-made-up-name")

    text = stage.get("/metrics", stage.admin).text

    assert value(text, 'tasuki_http_requests_total{method="GET",route="/v1/jobs/{job_id}",status="404"}') >= 1
    assert "some-made-up-name" not in text


def test_groups_beyond_the_limit_are_one() -> None:
    counts = {f"group-{n}": GroupCounts(pending=n + 1) for n in range(ROLLUP_GROUPS_MAX + 50)}

    found = largest_groups(counts, ROLLUP_GROUPS_MAX)

    assert len(found) == ROLLUP_GROUPS_MAX + 1
    assert found[OTHER_GROUPS].pending == sum(range(1, 51))
    assert sum(group.pending for group in found.values()) == sum(range(1, ROLLUP_GROUPS_MAX + 51))


# -- what turns did to jobs ----------------------------------------------------------------------------------------


def of_zpe(stage: Stage) -> dict[str, float]:
    """The counters of the group zpe, without its name and `_total`."""
    found = {}
    for family in text_string_to_metric_families(stage.get("/metrics", stage.admin).text):
        for sample in family.samples:
            if sample.labels.get("group") == "zpe" and sample.name.endswith(("_total", "_count")):
                rest = [value for name, value in sorted(sample.labels.items()) if name != "group"]
                found[" ".join([re.sub("_(total|count)$", "", sample.name), *rest])] = sample.value
    return found


def gained(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: number - before.get(name, 0.0) for name, number in after.items() if number != before.get(name, 0.0)}


def test_a_job_that_succeeds_is_counted_at_each_step(stage: Stage, worker: Worker) -> None:
    before = of_zpe(stage)

    worker.finish(worker.take(stage.submit()))

    assert gained(before, of_zpe(stage)) == {
        "tasuki_jobs_submitted": 1,
        "tasuki_jobs_leased": 1,
        "tasuki_jobs_ended succeeded": 1,
        "tasuki_delivery_latency_seconds": 1,
    }


def test_failures_retries_and_dead_letters_are_counted_apart(stage: Stage, worker: Worker) -> None:
    before = of_zpe(stage)

    worker.fail(worker.take(stage.submit()))
    worker.fail(worker.take(stage.submit()), permanent=True)

    found = gained(before, of_zpe(stage))
    assert (found["tasuki_attempts_failed"], found["tasuki_jobs_retried failed"], found["tasuki_dead_letters"]) == (2, 1, 1)
    assert found["tasuki_jobs_ended failed"] == 1


def test_a_cancel_that_is_said_twice_ends_a_job_once(stage: Stage, worker: Worker) -> None:
    before = of_zpe(stage)
    job_id = stage.submit()

    for _ in range(2):
        stage.post(f"/v1/jobs/{job_id}/cancel", {"reason": "test"})

    assert gained(before, of_zpe(stage))["tasuki_jobs_ended canceled"] == 1


def test_no_name_of_a_job_a_worker_or_a_token_is_a_label(stage: Stage, worker: Worker) -> None:
    leased = worker.take(stage.submit())

    text = stage.get("/metrics", stage.admin).text

    assert not [secret for secret in (leased["job_id"], leased["lease_id"], worker.worker_id, worker.token) if secret in text]


def test_who_leads_and_whether_the_store_answers_is_told(stage: Stage) -> None:
    text = stage.get("/metrics", stage.admin).text

    assert (value(text, "tasuki_leader "), value(text, "tasuki_up ")) == (1, 1)


def test_the_sizes_of_batches_are_seen(stage: Stage) -> None:
    metrics = Metrics()
    metrics.turn(Turn(submit=[Submission(JobSpec(job_id=job_id), "alice", b"") for job_id in "abc"]), Answers())

    text = metrics.text({}, stage.server).decode()

    assert value(text, 'tasuki_turn_items_sum{what="submit"}') == 3
    assert value(text, 'tasuki_turn_items_count{what="submit"}') == 1


# -- deploy/grafana ------------------------------------------------------------------------------------------------


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "tasuki.json").read_text())
    return found


def test_the_dashboard_and_the_alert_rules_ask_for_nothing_that_a_scrape_does_not_have(stage: Stage, worker: Worker) -> None:
    worker.fail(worker.take(stage.submit()))
    families = list(text_string_to_metric_families(stage.get("/metrics", stage.admin).text))
    there = {f"{family.name}{suffix}" for family in families for suffix in ("", "_total", "_bucket", "_sum", "_count")}
    roles = {sample.labels["role"] for family in families if family.name == "tasuki_servers" for sample in family.samples}

    board = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    rules = [rule["expr"] for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
    on_board, in_rules = ({name for text in texts for name in names(text)} for texts in (board, rules))

    assert len(on_board) > 20
    assert len(in_rules) > 8
    assert on_board | in_rules <= there
    assert {role for text in rules for role in re.findall(r'role="(\w+)"', text)} <= roles
    assert {bound for text in board + rules for bound in re.findall(r'\ble="([^"]+)"', text)} <= set(map(str, LATENCIES_S))


def names(expression: str) -> list[str]:
    return re.findall(r"\btasuki_\w+", expression)


def test_detached_workers_and_the_roles_of_servers_are_told(stage: Stage, worker: Worker) -> None:
    worker.take(stage.submit())
    stage.run(stage._ask("detach", {"worker_id": worker.worker_id, "reason": "a test"}))

    def detached() -> str:
        text = stage.get("/metrics", stage.admin).text
        return text if value(text, "tasuki_workers_detached ") == 1 else ""

    text = until(detached, what="the worker is detached")
    stage.run(stage._ask("attach", {"worker_id": worker.worker_id}))

    assert value(text, 'tasuki_servers{role="leader"}') == 1
    assert value(text, 'tasuki_servers{role="worker"}') == 0


def test_the_dashboard_has_panels_that_do_not_overlap_and_one_source() -> None:
    board = dashboard()
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]

    assert (board["uid"], board["schemaVersion"] >= 36) == ("tasuki", True)
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "group"}
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {"${datasource}"}


def test_the_scrape_config_names_a_file_for_the_token() -> None:
    text = (DEPLOY / "prometheus.yml").read_text()

    assert "credentials_file: " in text
    assert "credentials: " not in text


def test_a_scraper_that_was_let_in_before_is_answered_while_the_store_is_away(tmp_path: Path) -> None:
    with RedisService() as service, Stage(tmp_path, store=service.url()) as stage:
        at_work = stage.get("/metrics", stage.admin).text
        token_id, revoked = stage.create_named_token("admin")
        before = stage.get("/metrics", revoked).status_code
        stage.revoke_token(token_id)
        after = stage.get("/metrics", revoked).status_code

        service.stop()
        away = stage.get("/metrics", stage.admin)
        refused = [stage.get("/metrics", token).status_code for token in (revoked, stage.client, "tsk_a_unknown")]
        others = stage.get("/v1/stats", stage.admin).status_code

        service.start()

        def is_up() -> bool:
            return value(stage.get("/metrics", stage.admin).text, "tasuki_up ") == 1

        until(is_up, what="the store is back")

    assert value(at_work, "tasuki_up ") == 1
    assert away.status_code == 200, away.text
    assert "tasuki_up 0.0" in away.text
    assert "tasuki_http_requests_total" in away.text
    assert "tasuki_jobs{" not in away.text, "they are counted in the store"
    assert (before, after) == (200, 403)
    assert refused == [503, 503, 503]
    assert others == 503
