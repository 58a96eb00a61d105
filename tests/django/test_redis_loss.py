"""A Redis that coordinates nodes and loses what it had: ids and epochs rise, and no run starts twice. Real processes.

The site's minutes are seconds here: a definition has a run every four seconds, which is assigned two seconds before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.django_nodes import NodeRig
from tests.support.postgres_service import PostgresService
from tests.support.redis_service import RedisService
from tests.support.waiting import until

pytestmark = pytest.mark.e2e
SLOW_S = 60.0
QUICK = {
    "heartbeat_interval_seconds": 0.4,
    "heartbeat_ttl_seconds": 2,
    "leader_tick_seconds": 0.5,
    "leader_stale_seconds": 2,
    "leader_lock_ttl_seconds": 2,
    "subleader_check_seconds": 0.3,
    "assign_ahead_seconds": 2,
}
DEFINE = """
from tasuki.django.definitions import apply
entry = {"command_name": "probe", "default_args_json": ["say"], "schedule_type": "every_n_minutes",
         "schedule_value": "4", "concurrency_policy": "allow"}
apply({f"often-{n}": entry for n in range(3)}, source="test")
"""


def is_synced(replica: Any, master: Any) -> bool:
    return bool(replica.info("replication").get("master_repl_offset") == master.info("replication")["master_repl_offset"])


def test_numbers_and_epochs_rise_and_no_run_starts_twice_whatever_redis_loses(postgres: PostgresService, tmp_path: Path) -> None:
    with ExitStack() as stack:
        redis = stack.enter_context(RedisService(appendonly="no"))
        replica = stack.enter_context(RedisService())
        rig = stack.enter_context(NodeRig(tmp_path, postgres, redis.url(), SITE_SECONDS="1"))
        number = int(rig.coordination.rpartition("/")[2])
        rig.settings(**QUICK)
        for name in ("n1", "n2"):
            rig.start(name)
        leader = rig.settled()
        detached = next(node for node in rig.nodes.values() if node is not leader)
        worker_id = detached.worker_id
        # A worker is known by name, and a detach in force, with the heartbeat that follows.
        until(lambda: worker_id in rig.live_worker_ids(), SLOW_S, "the worker is live")
        rig.site.manage("tasuki_ops", "detach", worker_id)
        until(lambda: not detached.is_sub_leader, SLOW_S, "the worker knows that it is detached")
        rig.site.run(DEFINE)
        (rig.folder / "go").unlink(missing_ok=True)
        long_run = rig.enqueue("hold", str(rig.folder))
        until(lambda: rig.run_state(long_run)[0] == "RUNNING", SLOW_S, "the run runs")
        noted = stack.enter_context(redis.client(number))
        until(lambda: any(noted.scan_iter("scheduler:jobrun:lease:*")), SLOW_S, "an assignment is noted")

        # Given a worker that a person has detached, and a replica that has not got the last leader and the last worker
        with replica.client() as copy, redis.client() as master:
            copy.replicaof("127.0.0.1", redis.port)
            until(lambda: copy.info("replication").get("master_link_status") == "up" and is_synced(copy, master), SLOW_S)
            copy.replicaof("NO", "ONE")

        def flush() -> None:
            with redis.client() as client:
                client.flushall()

        def restart_empty() -> None:
            redis.kill()
            redis.start()

        def fail_over() -> None:
            redis.kill()
            replica.stop()
            replica.port = redis.port
            replica.start()

        losses: list[Callable[[], None]] = [flush, restart_empty, fail_over]
        for count, lose in enumerate(losses, 3):
            before, _ = rig.term()
            highest = max(int(node.worker_id) for node in rig.nodes.values())

            lose()

            # Then another epoch follows, above all that were; so does the number of a new worker
            rig.leader(above=before)
            new = rig.start(f"n{count}")
            until(lambda one=new: "connected to unix socket as" in one.process.output(), SLOW_S)  # type: ignore[misc]
            assert int(new.worker_id) > highest, lose.__name__

            # And the worker is detached as before, whom a leader has detached meanwhile
            rig.detach(worker_id)
            with redis.client(number) as client:
                flag = partial(client.get, f"scheduler:detach:{worker_id}")
                until(lambda get=flag: get() not in (None, "1"), SLOW_S, "the person's flag is back")  # type: ignore[misc]
            assert detached.worker_id == worker_id
        assert [epoch for epoch, _ in rig.led()] == sorted({epoch for epoch, _ in rig.led()}), "no epoch had two leaders"

        # And the run that went on meanwhile ends as the attempt that it was
        (rig.folder / "go").touch()
        until(lambda: rig.run_state(long_run)[0] == "SUCCEEDED", SLOW_S, "the run ends")
        assert rig.run_state(long_run)[1] == 1

        # And each time of each definition has one run, of one attempt, which went to one worker
        [(after,)] = rig.rows("SELECT max(finished_at) FROM tasuki_jobrun")
        later = f"SELECT count(*) FROM tasuki_jobrun WHERE finished_at > {after} AND state = 'SUCCEEDED'"
        until(lambda: rig.rows(later)[0][0] >= 6, SLOW_S, "definitions are fired after all that")
        rows = rig.rows("SELECT job_definition_id, scheduled_for, attempt, state FROM tasuki_jobrun WHERE started_at IS NOT NULL")
        assert {attempt for _, _, attempt, _ in rows} == {1}
        assert rig.rows(f"SELECT count(*) FROM tasuki_jobrun WHERE assigned_worker_id = '{worker_id}'") == [(0,)]
        assert rig.rows("SELECT count(*) FROM tasuki_incident WHERE kind = 'lost'") == [(0,)]
        times = [row[:2] for row in rows if row[0] is not None]
        assert len(times) == len(set(times)) >= 9
