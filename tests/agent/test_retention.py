"""Old folders are removed, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tasuki.core.units import DAY_S
from tests.agent.stage import AgentStage
from tests.support.waiting import until


def clean_after(stage: AgentStage, days: float, keep_days: float = 7.0) -> int:
    import time

    return stage.await_(stage.agent.jobs.remove_old(keep_days, time.time() + days * DAY_S))


def test_ended_jobs_are_kept_for_some_days_and_then_removed(make_stage: Callable[..., AgentStage]) -> None:
    with make_stage() as stage:
        stage.run("done")
        stage.run("failed", "exit 1")

        assert clean_after(stage, 6.9) == 0
        assert (stage.state("done"), stage.state("failed")) == ("done", "failed")
        assert clean_after(stage, 7.1) == 2
        assert (stage.state("done"), stage.state("failed")) == (None, None)
        assert stage.files() == set()


def test_an_interrupted_job_is_removed_after_a_day_and_a_running_one_never(
    make_stage: Callable[..., AgentStage], tmp_path: Path
) -> None:
    with make_stage() as stage:
        first = stage.begin("running", f'while [ ! -e "{tmp_path}/gate" ]; do sleep 0.02; done')
        until(lambda: (stage.data / "jobs/running/.running").exists())
        # given a folder that an agent left which could not write its end
        (stage.data / "jobs/stale").mkdir()
        marker = (stage.data / "jobs/running/.running").read_text().replace('"job_id":"running"', '"job_id":"stale"')
        (stage.data / "jobs/stale/.running").write_text(marker)
        assert stage.state("stale") == "interrupted"

        assert clean_after(stage, 30) == 1

        assert (stage.state("stale"), stage.state("running")) == (None, "running")
        (tmp_path / "gate").touch()
        assert first.answer().status_code == 200


def test_what_is_no_job_is_left_alone(make_stage: Callable[..., AgentStage]) -> None:
    with make_stage() as stage:
        (stage.data / "jobs/.somebody").mkdir()
        (stage.data / "jobs/a name").mkdir()

        assert clean_after(stage, 1000) == 0
        assert stage.files() == {"jobs/.somebody", "jobs/a name"}
