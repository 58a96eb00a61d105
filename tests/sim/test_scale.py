"""A big world in small: it comes to its end, counts what happened in it, and shows what a death of a server or of a rack does."""

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.shape.source import ROOT
from tests.support import nursery

BENCH = ROOT / "bench"
sys.path.append(os.fspath(BENCH))  # its scripts are no package

from _scale_world import Followed, Tally  # noqa: E402
from scale import ScaleOptions, ScaleSystem, figures, percentiles, run_scale, text  # noqa: E402

CALM = ScaleOptions(servers=2, workers=50, clients=4, jobs_per_s=6.0, minutes=0.6, load=0.5, disasters=False)
ROUGH = ScaleOptions(seed=2, servers=3, workers=50, clients=2, jobs_per_s=2.0, minutes=1.0)


@functools.cache
def figures_of(options: ScaleOptions) -> dict[str, Any]:
    return run_scale(options)


def test_every_job_comes_to_its_end() -> None:
    found = figures_of(CALM)

    jobs = found["jobs"]
    assert found["violations"] == []
    assert jobs["submitted"] == jobs["accepted"] == jobs["ended"] > 150
    assert found["delay"]["whole"]["count"] == jobs["submitted"]
    assert jobs["followed"] > 2


def test_the_same_seed_gives_the_same_figures() -> None:
    again = run_scale(CALM)

    assert _virtual(again) == _virtual(figures_of(CALM))


def _virtual(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if name not in ("cpu_s", "cpu_ms_per_job", "memory_mb")}


def test_at_half_load_jobs_start_at_once_and_workers_beat_every_five_seconds() -> None:
    found = figures_of(CALM)

    assert found["delay"]["whole"]["p99"] < 1.0
    assert found["heartbeats_per_s"] == pytest.approx(CALM.workers / 5.0, rel=0.2)


def test_jobs_of_a_dead_rack_run_again_after_their_leases_and_another_leads_after_the_leader() -> None:
    found = figures_of(ROUGH)

    assert found["violations"] == []
    assert [disaster["what"] for disaster in found["disasters"]] == [
        "a server is killed",
        "the leader is killed",
        "a rack of workers loses power",
        "a group floods",
    ]
    epochs = [epoch for _, _, epoch in found["leaderships"] if epoch]
    assert epochs == sorted(set(epochs))
    assert len(epochs) >= 2
    assert found["recovered"]["count"] > 0
    assert 12.0 < found["recovered"]["p50"] < 20.0


def test_the_report_is_for_people_and_the_file_for_programs(tmp_path: Path) -> None:
    shape = ["--workers", "20", "--servers", "2", "--clients", "2", "--jobs-per-s", "2", "--minutes", "0.3", "--calm"]

    done = nursery.run([sys.executable, str(BENCH / "scale.py"), *shape, "--json", str(tmp_path / "figures.json")])

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == text(json.loads((tmp_path / "figures.json").read_text()))
    assert "violations: none" in done.stdout


def test_figures_can_be_had_while_it_runs() -> None:
    system = ScaleSystem(ROUGH)
    system.start()

    found = figures(system, 0.0)

    assert (found["jobs"]["submitted"], found["disasters"]) == (0, [])


def test_percentiles_of_few_and_of_none() -> None:
    assert percentiles(range(1, 101)) == {"count": 100, "p5": 6, "p50": 51, "p95": 96, "p99": 100, "max": 100}
    assert percentiles([])["count"] == 0


@pytest.mark.parametrize(
    ("followed", "broken"),
    [
        (Followed(accepted=True, grants=[1], finished=[(1, "a")], results=[("SUCCEEDED", 1, "a")]), ""),
        (Followed(accepted=True, grants=[1], finished=[(1, "a")], results=[]), "I1"),
        (Followed(accepted=True, grants=[1, 1], finished=[(1, "a")], results=[("SUCCEEDED", 1, "a")]), "I5"),
        (Followed(accepted=True, grants=[1, 2], finished=[(2, "b")], results=[("SUCCEEDED", 1, "a")]), "I13"),
    ],
)
def test_a_followed_job_shows_what_is_wrong(followed: Followed, broken: str) -> None:
    tally = Tally.__new__(Tally)
    tally.unheard, tally.followed = {}, {"sampled-1": followed}

    assert [violation.split(":")[0] for violation in tally.violations()][:1] == ([broken] if broken else [])
