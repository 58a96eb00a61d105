"""The life of an app's job over HTTP, as the contract says: submit, lease, renew, result, failed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasuki.core.apps import AppLimits
from tests.doors.http.stage import ANSWER, Stage, Worker, on_each_store

pytestmark = on_each_store


def code(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_job_goes_from_submit_to_result(stage: Stage, worker: Worker) -> None:
    job_id = stage.submit(molecule="H2", settings={"ecutwfc": 40.0})
    assert stage.status(job_id)["status"] == "queued"

    leased = worker.take(job_id)
    running = stage.status(job_id)["status"]
    recorded = worker.finish(leased, meta={"worker_hostname": "lab"})
    result = stage.get(f"/calc/zpe/jobs/{job_id}/result")

    assert leased["payload"] == {"molecule": "H2", "settings": {"ecutwfc": 40.0}}
    assert leased["lease_ttl_seconds"] == 60.0
    assert running == "running"
    assert (recorded.status_code, recorded.json()["status"]) == (200, "finished")
    assert result.json() == {"job_id": job_id, "status": "finished", **ANSWER, "meta": {"worker_hostname": "lab"}}
    assert stage.status(job_id)["status"] == "finished"


def test_an_empty_queue_is_204(worker: Worker) -> None:
    answer = worker.lease()

    assert (answer.status_code, answer.content) == (204, b"")


def test_a_waiting_lease_gets_the_job_as_soon_as_it_is_there(stage: Stage, worker: Worker) -> None:
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(worker.lease(wait=20)))
    waiting.start()

    job_id = stage.submit()
    waiting.join(10.0)

    assert answers[0].json()["job_id"] == job_id


def test_a_waiting_lease_ends_with_204_when_its_time_is_over(worker: Worker) -> None:
    before = time.monotonic()

    answer = worker.lease(wait=0.3)

    assert answer.status_code == 204
    assert time.monotonic() - before >= 0.3


def test_a_lease_that_is_over_leaves_no_credit_behind(stage: Stage, worker: Worker) -> None:
    for _ in range(3):
        assert worker.lease().status_code == 204
    job_id = stage.submit()
    other = stage.register()

    leased = other.take(job_id)

    assert other.finish(leased).status_code == 200
    assert stage.get(f"/v1/jobs/{job_id}").json()["attempt"] == 1


def test_a_renewal_tells_how_long_the_lease_goes_on(stage: Stage, worker: Worker) -> None:
    leased = worker.take(stage.submit())

    assert worker.renew(leased).json() == {"lease_ttl_seconds": 60.0, "cancel": False}


def test_a_renewal_tells_of_a_cancel_and_the_worker_reports_it(stage: Stage, worker: Worker) -> None:
    job_id = stage.submit()
    leased = worker.take(job_id)
    canceled = stage.post(f"/calc/zpe/jobs/{job_id}/cancel", {"reason": "no longer needed"}).json()

    renewed = worker.renew(leased).json()
    worker.fail(leased, error_code="CANCELED", error_message="stopped")

    assert canceled == {"job_id": job_id, "status": "running", "requested": True}
    assert renewed["cancel"] is True
    assert (stage.status(job_id)["status"], stage.status(job_id)["detail"]) == ("canceled", "no longer needed; stopped")


def test_a_waiting_job_is_canceled_at_once_and_only_by_those_who_see_it(stage: Stage, worker: Worker) -> None:
    job_id = stage.submit()

    refused = [
        stage.post(f"/calc/other/jobs/{job_id}/cancel", {}),
        stage.post(f"/calc/zpe/jobs/{job_id}/cancel", {}, stage.create_token("client")),
    ]
    answer = stage.post(f"/calc/zpe/jobs/{job_id}/cancel", {"reason": "a typing error"}).json()

    assert [code(one) for one in refused] == [(404, "NOT_FOUND")] * 2
    assert answer == {"job_id": job_id, "status": "canceled", "requested": False}
    assert stage.status(job_id)["detail"] == "a typing error"
    assert worker.lease().status_code == 204


def test_a_job_may_have_its_own_retries_backoff_and_time_limit(stage: Stage, worker: Worker) -> None:
    one = stage.post("/calc/zpe/jobs?max_retries=0&backoff_s=2.5&timeout_s=90", {}).json()["job_id"]
    own = {"max_retries": 7, "backoff_s": 1.0, "timeout_s": 30.0}
    [batched] = stage.post("/calc/zpe/jobs/batch", {"jobs": [{"payload": {}, **own}]}).json()["jobs"]
    wrong = stage.post("/calc/zpe/jobs?timeout_s=0", {})

    views = [stage.get(f"/v1/jobs/{job_id}").json() for job_id in (one, batched["job_id"])]
    leased = worker.take(one)
    failed = worker.fail(leased)

    assert [(view["max_retries"], view["timeout_s"]) for view in views] == [(0, 90.0), (7, 30.0)]
    assert (leased["timeout_seconds"], leased["attempt"]) == (90.0, 1)
    assert failed.json()["status"] == "failed"
    assert code(wrong) == (400, "INVALID_PAYLOAD")
    assert worker.take(batched["job_id"])["timeout_seconds"] == 30.0


def test_an_administrator_lists_the_workers_of_an_app_and_what_they_run(stage: Stage, worker: Worker) -> None:
    job_id = stage.submit()
    worker.take(job_id)
    silent = stage.register(label="lab PC 3")
    foreign = stage.register("other")

    listed = stage.get("/calc/zpe/compute/servers", stage.admin).json()["servers"]

    found = {one["worker_id"]: one for one in listed}
    assert found[worker.worker_id]["connected"] is True
    assert found[worker.worker_id]["job_ids"] == [job_id]
    assert (found[silent.worker_id]["label"], found[silent.worker_id]["connected"]) == ("lab PC 3", False)
    assert foreign.worker_id not in found
    stage.call("DELETE", f"/calc/zpe/compute/servers/{silent.worker_id}", stage.admin)
    left = stage.get("/calc/zpe/compute/servers", stage.admin).json()["servers"]
    assert silent.worker_id not in {one["worker_id"] for one in left}


def test_a_failure_is_tried_again_later(stage: Stage, worker: Worker) -> None:
    job_id = stage.submit()

    answer = worker.fail(worker.take(job_id), traceback="Traceback: …")

    assert answer.json() == {"job_id": job_id, "status": "queued", "retry_count": 1}
    assert worker.lease().status_code == 204
    view = stage.get(f"/v1/jobs/{job_id}").json()
    assert 8.0 < view["not_before"] - time.time() <= 10.0
    assert view["outcome"]["error_code"] == "QE_RUNTIME_ERROR"


def test_a_failure_that_is_permanent_is_final(stage: Stage, worker: Worker) -> None:
    job_id = stage.submit()

    answer = worker.fail(worker.take(job_id), permanent=True)

    assert answer.json()["status"] == "failed"
    assert code(stage.get(f"/calc/zpe/jobs/{job_id}/result")) == (409, "JOB_FAILED")


def test_the_same_failure_told_again_is_200(stage: Stage, worker: Worker) -> None:
    leased = worker.take(stage.submit())

    answers = [worker.fail(leased), worker.fail(leased)]

    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[1].json()["retry_count"] == 1


def test_the_same_result_again_is_200_whatever_its_meta(stage: Stage, worker: Worker) -> None:
    leased = worker.take(stage.submit())

    answers = [worker.finish(leased, meta={"n": n}) for n in range(2)]

    assert [answer.status_code for answer in answers] == [200, 200]


@pytest.mark.parametrize("other", [{"result": {"zpe_ev": 0.28}}, {"summary_text": "other"}, {"freqs_csv": "other"}])
def test_another_result_for_a_finished_job_is_409(stage: Stage, worker: Worker, other: dict[str, Any]) -> None:
    job_id = stage.submit()
    leased = worker.take(job_id)
    worker.finish(leased)

    answer = worker.finish(leased, **other)

    assert code(answer) == (409, "CONFLICT")
    assert stage.get(f"/calc/zpe/jobs/{job_id}/result").json()["result"] == ANSWER["result"]


def test_a_lease_of_another_worker_is_403(stage: Stage, worker: Worker) -> None:
    job_id = stage.submit()
    leased = worker.take(job_id)
    other = stage.register()

    answers = [other.finish(leased), other.fail(leased), other.renew(leased)]

    assert [code(answer) for answer in answers] == [(403, "FORBIDDEN")] * 3
    assert worker.finish(leased).status_code == 200


def test_a_lease_that_is_not_the_current_one_is_409(stage: Stage, worker: Worker) -> None:
    job_id = stage.submit()
    leased = worker.take(job_id)
    inner, _, attempt = leased["lease_id"].rpartition(".")
    stale = [f"{inner}.{int(attempt) + 1}", "f" * 32 + f".1.{attempt}", "nonsense"]

    answers = [
        call({**leased, "lease_id": lease_id}) for lease_id in stale for call in (worker.finish, worker.fail, worker.renew)
    ]

    assert [code(answer) for answer in answers] == [(409, "FENCED")] * 9
    assert worker.finish(leased).status_code == 200


def test_a_job_that_nobody_knows_is_404(stage: Stage, worker: Worker) -> None:
    unknown = {"job_id": "never-heard-of", "lease_id": "a.1"}

    answers = [worker.finish(unknown), worker.fail(unknown), worker.renew(unknown)]
    asked = [stage.get("/calc/zpe/jobs/never-heard-of"), stage.get("/calc/zpe/jobs/never-heard-of/result")]

    assert [code(answer) for answer in (*answers, *asked)] == [(404, "NOT_FOUND")] * 5


def test_a_job_of_another_app_is_404(stage: Stage, worker: Worker) -> None:
    job_id = stage.post("/calc/other/jobs", {}).json()["job_id"]

    assert code(stage.get(f"/calc/zpe/jobs/{job_id}")) == (404, "NOT_FOUND")
    assert worker.lease().status_code == 204


@pytest.mark.parametrize("missing", ["lease_id", "result", "summary_text", "freqs_csv"])
def test_a_result_without_a_field_is_400_and_names_it(stage: Stage, worker: Worker, missing: str) -> None:
    leased = worker.take(stage.submit())
    body = {"lease_id": leased["lease_id"], **ANSWER}
    del body[missing]

    answer = worker.post(f"/jobs/{leased['job_id']}/result", body)

    assert code(answer) == (400, "INVALID_PAYLOAD")
    assert answer.json()["error"]["message"] == f"Missing required field: {missing}"
    assert worker.finish(leased).status_code == 200


def test_the_same_job_submitted_again_is_the_same_job(stage: Stage, worker: Worker) -> None:
    answers = [stage.post("/calc/zpe/jobs?job_id=mine-1", {"n": 1}) for _ in range(2)]

    assert [answer.json() for answer in answers] == [{"job_id": "mine-1", "status": "queued"}] * 2
    assert code(stage.post("/calc/zpe/jobs?job_id=mine-1", {"n": 2})) == (409, "CONFLICT")


def test_a_result_that_is_not_there_yet_is_409_or_waited_for(stage: Stage, worker: Worker) -> None:
    job_id = stage.submit()
    leased = worker.take(job_id)
    answers: list[Any] = []
    assert code(stage.get(f"/calc/zpe/jobs/{job_id}/result")) == (409, "NOT_FINISHED")
    waiting = threading.Thread(target=lambda: answers.append(stage.get(f"/calc/zpe/jobs/{job_id}/result?wait=20")))
    waiting.start()

    worker.finish(leased)
    waiting.join(10.0)

    assert answers[0].json()["result"] == ANSWER["result"]


@pytest.mark.parametrize("size", [20_000, 200_000], ids=["document", "blob"])
def test_large_results_come_back_whole(stage: Stage, worker: Worker, size: int) -> None:
    job_id = stage.submit()
    leased = worker.take(job_id)
    freqs = "1,4401.2\n" * (size // 9)

    answers = [worker.finish(leased, freqs_csv=freqs), worker.finish(leased, freqs_csv=freqs), worker.finish(leased)]

    assert [answer.status_code for answer in answers] == [200, 200, 409]
    assert stage.get(f"/calc/zpe/jobs/{job_id}/result").json()["freqs_csv"] == freqs


def test_batches_of_submit_lease_renew_and_result(stage: Stage, worker: Worker) -> None:
    jobs = stage.post("/calc/zpe/jobs/batch", {"jobs": [{"payload": {"n": n}} for n in range(5)]}).json()["jobs"]

    leased = worker.lease(max_jobs=16).json()["jobs"]
    shown = [{"job_id": one["job_id"], "lease_id": one["lease_id"]} for one in leased]
    lost = {"job_id": leased[0]["job_id"], "lease_id": "x.9"}
    renewed = worker.post("/jobs/renew", {"leases": [*shown, lost]}).json()["items"]
    results = worker.post("/jobs/result", {"results": [{**one, **ANSWER} for one in (*shown[:4], lost)]}).json()["items"]
    failed = worker.post("/jobs/failed", {"failures": [{**shown[4], "error_code": "BROKEN"}]}).json()["items"]

    assert {job["job_id"] for job in jobs} == {one["job_id"] for one in leased}
    assert [item["status"] for item in renewed] == [200] * 5 + [409]
    assert [item["status"] for item in results] == [200] * 4 + [409]
    assert results[4]["error"]["code"] == "FENCED"
    assert [item["status"] for item in failed] == [200]
    assert [stage.status(one["job_id"])["status"] for one in leased] == ["finished"] * 4 + ["queued"]


def test_a_job_whose_lease_ran_out_goes_to_another_and_what_comes_late_is_409(tmp_path: Path, own_store_url: str) -> None:
    with Stage(tmp_path, store=own_store_url, lease_ttl_s=1.0, limits=AppLimits(backoff_s=0.2)) as stage:
        slow, quick = stage.register(), stage.register()
        job_id = stage.submit()
        first = slow.take(job_id)

        second = quick.lease(wait=15).json()
        late = [slow.finish(first), slow.fail(first), slow.renew(first)]
        recorded = quick.finish(second)
        later = [slow.finish(first), slow.finish(first, summary_text="another"), slow.fail(first), slow.renew(first)]
        repeated, other = quick.finish(second), quick.finish(second, summary_text="another")

        assert second["job_id"] == job_id
        assert [code(answer) for answer in (*late, *later)] == [(409, "FENCED")] * 7
        assert (recorded.status_code, repeated.status_code) == (200, 200)
        assert code(other) == (409, "CONFLICT")
        assert stage.get(f"/calc/zpe/jobs/{job_id}/result").json()["summary_text"] == ANSWER["summary_text"]


def test_a_lease_request_that_was_given_up_loses_no_job(stage: Stage, worker: Worker) -> None:
    with pytest.raises(httpx.ReadTimeout):
        worker.post("/jobs/lease?wait=30", {}, timeout=0.3)
    job_id = stage.submit()
    other = stage.register()

    leased = other.lease(wait=10).json()

    assert leased["job_id"] == job_id
