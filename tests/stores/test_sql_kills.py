"""Kills of our own process at every point of a turn, on both SQL stores: whole turns are left, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tasuki.core.job import State
from tasuki.core.store_messages import Filter
from tasuki.stores.sql.store import FAULT_POINTS, SqlStore
from tests.support import nursery
from tests.support.sqlite_files import with_tables

# The second turn of this program passes through all fault points; at the armed one the process is killed as by a power cut
# of the machine that it runs on: nothing is flushed, nothing is closed.
VICTIM = """
import os, pathlib, signal, sys
from tasuki.core.job import JobSpec, Outcome, body_hash
from tasuki.core.store_messages import LeaseRequest, Report, Submission
from tasuki.stores.sql.store import SqlStore

vendor, place, point = sys.argv[1:]
armed = None
def fault(passed):
    if passed == armed:
        os.kill(os.getpid(), signal.SIGKILL)

def submission(job_id):
    spec = JobSpec(job_id=job_id, subject="render.eu", max_retries=0)
    return Submission(spec, "alice", body_hash(spec))

if vendor == "sqlite":
    store = SqlStore.open_sqlite(pathlib.Path(place), fault=fault)
else:
    store = SqlStore.open_postgresql(place, fault=fault)
store.submit([submission("first"), submission("second")])
grants = store.lease([LeaseRequest(worker_id="w1", incarnation="w1/1", patterns=(">",), limit=2)])[0]
print("acked 1", flush=True)
armed = point
with store.turn():
    store.finish([Report("first", "w1", grants[0].lease_id, 1, Outcome(result=b"done"))])
    store.fail([Report("second", "w1", grants[1].lease_id, 1, Outcome(error_code="EXIT_CODE"))])
    store.submit([submission("third")])
    store.lease([LeaseRequest(worker_id="w1", incarnation="w1/1", patterns=(">",), limit=2)])
print("acked 2", flush=True)
"""


@pytest.mark.parametrize("point", [point for point in FAULT_POINTS if not point.startswith("fire.")])
@pytest.mark.parametrize("vendor", ["sqlite", "postgresql"])
def test_a_kill_leaves_whole_turns_only(vendor: str, point: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = with_tables(tmp_path / "tasuki.sqlite3")
    place = str(path) if vendor == "sqlite" else request.getfixturevalue("postgres_url")
    victim = nursery.run([sys.executable, "-c", VICTIM, vendor, place, point])
    assert victim.returncode == -9, victim.stderr
    assert victim.stdout == "acked 1\n"

    store = SqlStore.open_sqlite(path) if vendor == "sqlite" else SqlStore.open_postgresql(place)
    # Whoever touches the rows next waits until PostgreSQL has noticed that its client is gone.
    store.cancel(["first", "second"], actor="alice")
    states = [job.state if job is not None else None for job in store.get(["first", "second", "third"])]
    counts = store.counts()["render"]
    store.close()

    if point == "turn.committed":
        assert states == [State.SUCCEEDED, State.FAILED, State.ASSIGNED]
        assert (counts.succeeded, counts.failed, counts.active, counts.pending) == (1, 1, 1, 0)
    else:
        assert states == [State.ASSIGNED, State.ASSIGNED, None]
        assert (counts.succeeded, counts.failed, counts.active, counts.pending) == (0, 0, 2, 0)


# Fires a definition and an event; killed at the armed point, or not at all.
FIRING_VICTIM = """
import os, pathlib, signal, sys, time
from tasuki.stores.sql.store import SqlStore

vendor, place, point = sys.argv[1:]
armed = None
def fault(passed):
    if passed == armed:
        os.kill(os.getpid(), signal.SIGKILL)

if vendor == "sqlite":
    store = SqlStore.open_sqlite(pathlib.Path(place), fault=fault)
else:
    store = SqlStore.open_postgresql(place, fault=fault)
from tasuki.django.models import Event, JobDefinition
alias = store._database._alias
begin = time.time() // 60 * 60 - 30
known = JobDefinition.objects.using(alias)
if not known.exists():
    by_time = {"schedule_type": "every_n_minutes", "schedule_value": "1"}
    by_event = {"type": "event", "event_type": ">"}
    for name, fields in (("by time", by_time), ("by event", by_event)):
        JobDefinition(name=name, command_name="c", **fields).save(using=alias)
    known.update(changed_at=begin)
    Event(event_type="order.paid").save(using=alias)
epoch = store.epoch()[0] + 1
store.take_over("leader", epoch)
armed = point
with store.turn():
    store.fire(epoch=epoch)
print("fired", flush=True)
"""


@pytest.mark.parametrize("point", ["turn.begun", "submit.written", "fire.written", "turn.before_commit", "turn.committed"])
@pytest.mark.parametrize("vendor", ["sqlite", "postgresql"])
def test_a_leader_killed_while_it_fires_leaves_all_runs_or_none(
    vendor: str, point: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = with_tables(tmp_path / "tasuki.sqlite3")
    place = str(path) if vendor == "sqlite" else request.getfixturevalue("postgres_url")

    def fire(armed: str) -> subprocess.CompletedProcess[str]:
        return nursery.run([sys.executable, "-c", FIRING_VICTIM, vendor, place, armed])

    assert fire(point).returncode == -9
    again = fire("nowhere")
    assert again.stdout == "fired\n", again.stderr

    store = SqlStore.open_sqlite(path) if vendor == "sqlite" else SqlStore.open_postgresql(place)
    runs = [job.job_id for job in store.find(Filter()).jobs]
    store.close()
    by_time = [job_id for job_id in runs if job_id.startswith("d1-")]
    assert runs.count("e1-2") == 1
    assert len(by_time) == len(set(by_time)) == len(runs) - 1
    assert 1 <= len(by_time) <= 2  # a minute may have begun meanwhile


# Stores a run ahead of its time, assigns it, judges it at its time, and has its worker fetch it; killed at the armed point of one
# of these turns, or not at all.
AHEAD_VICTIM = """
import os, pathlib, signal, sys
from tasuki.core.store_messages import Assignment
from tasuki.stores.sql.store import SqlStore
from tasuki.testing.clocks import FakeClock

vendor, place, *armed = sys.argv[1:]
turn, at = "", 1_800_000_000.0
def fault(passed):
    if [turn, passed] == armed:
        os.kill(os.getpid(), signal.SIGKILL)

clock = FakeClock(wall=at - 10.0)
if vendor == "sqlite":
    store = SqlStore.open_sqlite(pathlib.Path(place), clock=clock, fault=fault)
else:
    store = SqlStore.open_postgresql(place, clock=clock, fault=fault)
from tasuki.django.models import JobDefinition
known = JobDefinition.objects.using(store._database._alias)
if not known.exists():
    JobDefinition(name="tick", command_name="c", schedule_type="every_n_minutes", schedule_value="1").save(using=known.db)
    known.update(changed_at=at - 20.0)
epoch = store.epoch()[0] + 1
store.take_over("leader", epoch)

def look():
    return store.fire(epoch=epoch, ahead_s=30.0, reassign_after_s=20.0)

turn = "stored"
free = [run.job_id for run in look().ahead if not run.worker_id]
turn = "assigned"
store.assign([Assignment(job_id=job_id, worker_id="w1", incarnation="w1/1") for job_id in free], epoch=epoch)
clock.advance(10.5)
turn = "judged"
look()
turn = "fetched"
[grants] = store.held([("w1", "w1/1", "")])
turn = ""
print(*((grant.job_id, grant.attempt) for grant in grants), flush=True)
"""


@pytest.mark.parametrize(
    ("turn", "point"),
    [
        ("stored", "fire.written"),
        ("stored", "turn.committed"),
        ("assigned", "turn.before_commit"),
        ("assigned", "turn.committed"),
        ("judged", "fire.judged"),
        ("judged", "turn.committed"),
        ("fetched", "turn.before_commit"),
        ("fetched", "turn.committed"),
    ],
)
@pytest.mark.parametrize("vendor", ["sqlite", "postgresql"])
def test_a_leader_killed_at_any_step_of_a_run_that_is_assigned_ahead_leaves_one_attempt_of_it_to_its_worker(
    vendor: str, turn: str, point: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = with_tables(tmp_path / "tasuki.sqlite3")
    place = str(path) if vendor == "sqlite" else request.getfixturevalue("postgres_url")

    def lead(*armed: str) -> subprocess.CompletedProcess[str]:
        return nursery.run([sys.executable, "-c", AHEAD_VICTIM, vendor, place, *armed])

    killed = lead(turn, point)
    assert (killed.returncode, killed.stdout) == (-9, ""), killed.stderr
    again = lead("never", "")

    assert again.stdout == "('d1-1800000000', 1)\n", again.stderr
    store = SqlStore.open_sqlite(path) if vendor == "sqlite" else SqlStore.open_postgresql(place)
    assert [job.job_id for job in store.find(Filter()).jobs] == ["d1-1800000000"]
    store.close()
