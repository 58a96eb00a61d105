"""The example of docs/simulator.md: a seed that failed without a safeguard, told again by hand in a small world."""

import pytest

from tasuki.testing.sim.cases import switched_off
from tasuki.testing.sim.history import BeganEvent, SettledEvent
from tasuki.testing.sim.world import SimOptions
from tests.sim.worlds import Stage


def test_an_ending_from_a_workers_disk_does_not_take_the_place_of_a_newer_attempt() -> None:
    # given an attempt that ended while the server was away, so that its ending is on the worker's disk
    stage = Stage(SimOptions(servers=1, workers=5, clients=1, jobs=1, lease_ttl_s=2.0, latency_s=0.001))
    stage.lasting_attempts(0.5)
    stage.submit("job-1")
    stage.run_until(lambda: bool(stage.lines_of(BeganEvent)))
    holder = stage.system.worker(stage.lines_of(BeganEvent)[0].worker_id)
    stage.fault("crash", "server-1", for_s=5.0)
    stage.run_until(lambda: bool(holder.disk))
    # when the worker is away until its lease is over and another one runs the job
    stage.lasting_attempts(60.0)
    stage.fault("crash", holder.name, for_s=12.0)
    stage.run_until(lambda: len(stage.lines_of(BeganEvent)) == 2)
    stage.run_until(lambda: bool(stage.lines_of(SettledEvent)))
    # then what it offers when it is back is refused
    assert [(line.worker_id, line.recorded) for line in stage.lines_of(SettledEvent)] == [(holder.name, False)]
    assert stage.states("job-1")[-1] == "RUNNING"


def test_without_the_safeguard_the_example_fails() -> None:
    with switched_off("finish_lease"), pytest.raises(AssertionError, match="True"):
        test_an_ending_from_a_workers_disk_does_not_take_the_place_of_a_newer_attempt()
