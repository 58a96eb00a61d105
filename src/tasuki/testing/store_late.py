"""What a job with a `not_after` may rely on: never granted past it, skipped when it waited too long. Part of `store_suite`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tasuki.core.job import State
from tasuki.core.store_messages import LeaseStatus, ReportStatus
from tasuki.testing.store_stage import GRACE_S, PAST_LEASE_S, Stage, StoreCase

IN_S = 100.0  # how long the jobs of these cases may wait

WAYS: dict[str, Callable[[Stage], object]] = {
    "by pattern": lambda stage: stage.lease(limit=10),
    "by several patterns": lambda stage: stage.lease(limit=10, patterns=("render.*", "other.*")),
    "by job_id": lambda stage: stage.lease(limit=10, job_ids=("a",)),
    "by a leader's choice": lambda stage: stage.assign("a"),
}


class LateCases(StoreCase):
    """skip, and how grants treat a not_after."""

    def _add(self, stage: Stage, *job_ids: str, **fields: object) -> None:
        stage.add(*job_ids, **{"not_after": stage.clock.wall() + IN_S, **fields})

    @pytest.mark.parametrize("way", WAYS)
    def test_a_job_is_granted_up_to_its_last_moment(self, stage: Stage, way: str) -> None:
        self._add(stage, "a")
        stage.clock.advance(IN_S)

        assert stage.skip() == []
        assert WAYS[way](stage)

    @pytest.mark.parametrize("way", WAYS)
    def test_a_job_is_never_granted_after_it_however_late_the_leader_is(self, stage: Stage, way: str) -> None:
        self._add(stage, "a")
        stage.clock.advance(IN_S + 0.5)

        assert not WAYS[way](stage)
        assert (stage.job("a").state, stage.job("a").attempt) == (State.PENDING, 0)

    def test_what_is_late_stands_in_nobodys_way(self, stage: Stage) -> None:
        self._add(stage, "late")
        self._add(stage, "late-elsewhere", subject="other.x")
        stage.add("in-time")
        stage.add("elsewhere", subject="other.x")
        stage.clock.advance(IN_S + 0.5)

        grants = stage.lease(limit=10)

        assert sorted(grant.job_id for grant in grants) == ["elsewhere", "in-time"]

    def test_a_job_that_waited_too_long_is_skipped_with_its_reason(self, stage: Stage) -> None:
        self._add(stage, "a")
        stage.add("b")
        stage.clock.advance(IN_S + 0.5)

        assert stage.skip() == ["a"]

        job = stage.job("a")
        assert (job.state, job.finished_at, job.leader_epoch) == (State.SKIPPED, stage.clock.wall(), stage.epoch)
        assert job.outcome is not None
        assert job.outcome.error_code == "TOO_LATE"
        [incident] = stage.store.incidents("a")
        assert (incident.kind, incident.reason) == ("skipped", job.outcome.message)
        assert stage.job("b").state is State.PENDING
        counts = stage.store.counts()["render"]
        assert (counts.pending, counts.skipped) == (1, 1)
        assert stage.store.ended_among(["a", "b"]) == ["a"]
        assert stage.skip() == []

    def test_a_delayed_job_is_skipped_too(self, stage: Stage) -> None:
        self._add(stage, "a", not_before=stage.clock.wall() + IN_S - 1)
        stage.clock.advance(IN_S + 0.5)

        assert stage.skip() == ["a"]
        assert stage.promote() == []

    def test_a_promoted_job_that_is_late_is_not_granted(self, stage: Stage) -> None:
        self._add(stage, "a", not_before=stage.clock.wall() + IN_S - 1)
        stage.clock.advance(IN_S + 0.5)
        stage.promote()

        assert stage.lease(limit=10) == []
        assert stage.skip() == ["a"]

    def test_a_retry_is_not_started_after_it(self, stage: Stage) -> None:
        self._add(stage, "a", backoff_s=0.0)
        grant = stage.take("a")
        stage.clock.advance(IN_S + 0.5)
        stage.renew(grant)
        assert stage.skip() == []

        stage.fail(grant, message="it broke")

        assert stage.lease(limit=10) == []
        assert stage.skip() == ["a"]
        job = stage.job("a")
        assert job.outcome is not None
        assert "it broke" in job.outcome.message
        assert stage.fail(grant, message="it broke").answer is ReportStatus.REPEATED

    def test_what_runs_is_not_skipped_and_may_finish(self, stage: Stage) -> None:
        self._add(stage, "a")
        grant = stage.take("a", ttl_s=2 * IN_S)
        stage.clock.advance(IN_S + 0.5)

        assert stage.skip() == []
        assert stage.start(grant) is LeaseStatus.GO_ON
        assert stage.finish(grant).answer is ReportStatus.RECORDED

    def test_a_lost_attempt_is_not_tried_again_after_it(self, stage: Stage) -> None:
        self._add(stage, "a")
        stage.take("a")
        stage.clock.advance(IN_S + 0.5)

        assert stage.lease("w2", limit=10, job_ids=("a",)) == []
        stage.reap()

        assert stage.lease(limit=10) == []
        assert stage.skip() == ["a"]
        assert stage.kinds("a") == ["lost", "skipped"]

    def test_an_orphan_is_skipped_and_its_late_finish_is_fenced(self, stage: Stage) -> None:
        grant = stage.orphaned("a", not_after=stage.clock.wall() + PAST_LEASE_S + GRACE_S)
        stage.clock.advance(0.5)

        assert stage.skip() == ["a"]
        assert stage.renew(grant) is LeaseStatus.LOST
        assert stage.finish(grant).answer is ReportStatus.FENCED
        assert stage.fail(grant, error_code="TOO_LATE").answer is ReportStatus.FENCED
        assert stage.store.counts()["render"].skipped == 1

    def test_skip_ends_no_more_than_the_limit_the_longest_overdue_first(self, stage: Stage) -> None:
        for wait_s, job_id in ((30, "third"), (10, "first"), (20, "second")):
            stage.add(job_id, not_after=stage.clock.wall() + wait_s)
        stage.clock.advance(40)

        assert [stage.store.skip(epoch=stage.epoch, limit=2) for _ in range(3)] == [["first", "second"], ["third"], []]

    def test_it_is_judged_by_the_wall_clock(self, stage: Stage) -> None:
        self._add(stage, "a")

        stage.clock.jump_wall(IN_S + 1)

        assert stage.skip() == ["a"]

    def test_who_sets_a_skipped_job_going_again_wants_it_all_the_same(self, stage: Stage) -> None:
        self._add(stage, "a")
        stage.clock.advance(IN_S + 0.5)
        stage.skip()

        stage.store.requeue(["a"], actor="operator")

        assert stage.job("a").not_after is None
        assert [grant.job_id for grant in stage.lease()] == ["a"]

    def test_set_going_again_in_time_it_holds_still(self, stage: Stage) -> None:
        self._add(stage, "a")
        stage.store.cancel(["a"], actor="alice")

        stage.store.requeue(["a"], actor="alice")

        assert stage.job("a").not_after == stage.clock.wall() + IN_S
        stage.clock.advance(IN_S + 0.5)
        assert stage.skip() == ["a"]
