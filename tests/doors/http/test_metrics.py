"""/metrics: what it counts, and that labels are bounded."""

from __future__ import annotations

from tasuki.core.verbs import GroupCounts
from tasuki.doors.http.metrics import GROUPS_MAX, OTHER_GROUPS, bounded
from tests.doors.http.stage import Stage, Worker


def value(text: str, name: str) -> float:
    return float(next(line for line in text.splitlines() if line.startswith(name)).rpartition(" ")[2])


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
    counts = {f"group-{n}": GroupCounts(pending=n + 1) for n in range(GROUPS_MAX + 50)}

    found = bounded(counts)

    assert len({group for group, _ in found}) == GROUPS_MAX + 1
    assert found[OTHER_GROUPS, "pending"] == sum(range(1, 51))
    assert sum(found.values()) == sum(range(1, GROUPS_MAX + 51))
