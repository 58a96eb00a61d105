"""Cases of the store suite for workers that get and hold jobs: lease, held, start, renew, release; and for late jobs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest
from msgspec.structs import replace

from tasuki.core.job import JobSpec, OnDisconnect, Outcome, Progress, State
from tasuki.core.lifecycle import LEASE_MARGIN_S, LEASE_TTL_S
from tasuki.core.store_messages import (
    OWN_PROGRAMS,
    Grant,
    LeaseHolder,
    LeaseRequest,
    LeaseStatus,
    Offer,
    ReportStatus,
    Takes,
)
from tasuki.stores.common import LEASES_ENDED_MAX
from tasuki.stores.store import Feature
from tasuki.testing.store_stage import GRACE_S, KEEP, PAST_LEASE_S, Stage, StoreCase


def ids(grants: list[Grant]) -> list[str]:
    return [grant.job_id for grant in grants]


class LeaseCases(StoreCase):
    """Cases of lease, held, start, renew and release."""

    # -- which jobs -----------------------------------------------------------------------------------------------
    def test_no_more_than_the_limit_and_than_is_ready(self, stage: Stage) -> None:
        assert stage.lease(limit=10) == []
        stage.add(*"abcde")

        assert stage.lease(limit=10, patterns=()) == []
        assert len(stage.lease(limit=3)) == 3
        assert stage.lease(limit=0) == []
        assert len(stage.lease(limit=10)) == 2

    def test_higher_priority_comes_first_strictly(self, stage: Stage) -> None:
        stage.add("low-1", "low-2", priority=1, subject="a.x")
        stage.add("high-1", "high-2", priority=9, subject="b.x")
        stage.add("middle", priority=5, subject="c.x")

        assert ids(stage.lease(limit=4))[:3] in (["high-1", "high-2", "middle"], ["high-2", "high-1", "middle"])
        assert ids(stage.lease(limit=4)) == ["low-2"]

    def test_inside_a_group_the_oldest_comes_first(self, stage: Stage) -> None:
        stage.add("z", subject="g.one")
        stage.add("a", subject="g.two")
        stage.add("m", subject="g.one")

        assert [ids(stage.lease()) for _ in range(3)] == [["z"], ["a"], ["m"]]

    def test_a_retried_job_keeps_its_age(self, stage: Stage) -> None:
        stage.add("old", "young", backoff_s=0.0)
        stage.fail(stage.take("old"))

        assert ids(stage.lease()) == ["old"]

    def test_one_request_is_shared_between_groups(self, stage: Stage) -> None:
        stage.add(*(f"flood-{number}" for number in range(20)), subject="a.x")
        stage.add("b-1", "b-2", subject="b.x")
        stage.add("c-1", subject="c.x")

        granted = ids(stage.lease(limit=9))

        assert sorted(granted) == ["b-1", "b-2", "c-1", *(f"flood-{number}" for number in range(6))]

    def test_single_requests_alternate_between_groups(self, stage: Stage) -> None:
        stage.add(*(f"a-{number}" for number in range(10)), subject="a.x")
        stage.add(*(f"b-{number}" for number in range(3)), subject="b.x")

        groups = [ids(stage.lease())[0][0] for _ in range(6)]

        assert groups in (list("ababab"), list("bababa"))

    def test_the_groups_of_assigned_subjects_are_the_third_token(self, stage: Stage) -> None:
        stage.add(*(f"a-{number}" for number in range(10)), subject="job.assign.a.1")
        stage.add("b-0", subject="job.assign.b.1")

        assert "b-0" in ids(stage.lease(limit=2))

    def test_only_matching_subjects_are_granted(self, stage: Stage) -> None:
        for job_id, subject in {"1": "a.x", "2": "a.x.y", "3": "b.x", "4": "a"}.items():
            stage.add(job_id, subject=subject)

        assert ids(stage.lease("w1", limit=10, patterns=("a.*",))) == ["1"]
        assert ids(stage.lease("w2", limit=10, patterns=("nothing.>", "c"))) == []
        assert ids(stage.lease("w3", limit=10, patterns=("a.>",))) == ["2"]
        assert sorted(ids(stage.lease("w4", limit=10, patterns=("a", "b.x", "*.x")))) == ["3", "4"]

    def test_overlapping_patterns_grant_a_job_once(self, stage: Stage) -> None:
        stage.add("a", "b")

        assert sorted(ids(stage.lease(limit=10, patterns=("render.*", "render.eu", ">")))) == ["a", "b"]

    def test_a_subject_that_names_another_live_worker_is_left_for_it_if_it_subscribes(self, stage: Stage) -> None:
        for name in ("w2", "w3", "w4"):
            stage.add(f"for-{name}", subject=f"calc.{name}")
        live = {"w1": (">",), "w2": ("other", "calc.*"), "w4": ("common.>", "calc.w3")}

        assert ids(stage.lease("w1", limit=10, live_workers=live)) == ["for-w3", "for-w4"]
        assert ids(stage.lease("w2", limit=10, live_workers=live)) == ["for-w2"]

    def test_jobs_for_one_worker_alone_reach_only_it_and_all_of_them_are_one_group(self, stage: Stage) -> None:
        for name in ("w1", "w2"):
            stage.add(f"any-{name}", subject=f"@{name}")
            stage.add(f"assign-{name}", subject=f"job.assign.@{name}")

        assert sorted(ids(stage.lease("w1", limit=10))) == ["any-w1", "assign-w1"]
        assert ids(stage.lease("w2", limit=10, patterns=("@w2",))) == ["any-w2"]
        assert ids(stage.lease("w2", limit=10, patterns=("job.assign.@w2",))) == ["assign-w2"]
        assert [(group, counts.active) for group, counts in stage.store.counts().items()] == [("@", 4)]

    @pytest.mark.parametrize("pattern", ["a.x", "a.*", ">"])
    def test_a_worker_takes_only_kinds_and_programs_that_it_offers(self, stage: Stage, pattern: str) -> None:
        for number, exec_ in enumerate(["render", "price", "render", "", "other", ""]):
            stage.add(f"{number}", subject="a.x", exec=exec_)

        def lease(takes: Takes, execs: tuple[str, ...] | None = None, limit: int = 10) -> list[str]:
            return ids(stage.lease(limit=limit, patterns=(pattern,), offer=Offer(takes, execs)))

        assert lease(Takes.COMMANDS, ("price",)) == ["1"]
        assert [lease(Takes.ANY, ("price", "render", "unused"), limit) for limit in (1, 2)] == [["0"], ["2", "3"]]
        assert lease(Takes.COMMANDS, ("price", "render")) == []
        assert [lease(Takes.HANDLERS), lease(Takes.HANDLERS)] == [["5"], []]
        assert lease(Takes.COMMANDS) == ["4"]

    def test_programs_that_nobody_offers_do_not_stand_in_the_way(self, stage: Stage) -> None:
        stage.store.submit([stage.submission(f"{number:04}", subject="a.x", exec=f"p{number}") for number in range(1100)])
        stage.add("mine", subject="a.x", exec="render")

        assert ids(stage.lease(limit=10, patterns=("a.x",), offer=Offer(Takes.ANY, ("render",)))) == ["mine"]

    def test_a_worker_that_runs_every_program_of_its_user_takes_them_by_age(self, stage: Stage) -> None:
        stage.add("theirs", exec="render")
        for number, exec_ in enumerate(["ls", "render", "cat", "ls"]):
            stage.submit(f"own-{number}", subject="a.x", exec=exec_, submitter="uid:1000")
        own, elsewhere = Offer(Takes.OWN, (OWN_PROGRAMS,)), {"render": ("a.>",), "cat": ("b.>",)}

        assert ids(stage.lease("w1", offer=own)) == ["own-0"]
        assert ids(stage.lease("w2", limit=9, offer=own, named_elsewhere=elsewhere)) == ["own-2", "own-3"]
        assert ids(stage.lease("w3", limit=9, offer=Offer(Takes.COMMANDS, ("render", OWN_PROGRAMS)))) == ["theirs", "own-1"]

    def test_every_program_of_a_user_has_its_turn(self, stage: Stage) -> None:
        def submit(names: list[str]) -> None:
            stage.store.submit([stage.submission(name, subject="a.x", exec=name, submitter="uid:1000") for name in names])

        submit([f"p{number}" for number in range(600)])
        taken: list[str] = []
        for number in range(20):
            taken += ids(stage.lease(limit=50, patterns=("a.x",), offer=Offer(Takes.OWN, (OWN_PROGRAMS,))))
            submit([f"a{number}-{place}" for place in range(50)])

        assert "p599" in taken

    def test_requests_of_one_batch_never_share_a_job(self, stage: Stage) -> None:
        stage.add(*"abc")
        requests = [LeaseRequest(worker_id=f"w{n}", incarnation="1", patterns=(">",), limit=2) for n in range(3)]

        one, two, three = stage.store.lease(requests)

        assert (len(one), len(two), len(three)) == (2, 1, 0)
        assert sorted(ids(one + two)) == ["a", "b", "c"]

    def test_a_leased_or_terminal_job_is_granted_to_nobody_else(self, stage: Stage) -> None:
        stage.assigned("a", "w1")
        stage.ended("b", "SUCCEEDED")

        assert stage.lease("w2", limit=10) == []
        assert stage.lease("w2", limit=10, job_ids=("a", "b")) == []

    # -- the grant ------------------------------------------------------------------------------------------------
    def test_a_grant_carries_the_spec_and_the_submitter(self, stage: Stage) -> None:
        stage.add("a", submitter="bob", args=("1",), payload=b"x")

        [grant] = stage.lease(ttl_s=30.0)

        assert msgspec.msgpack.decode(grant.spec, type=JobSpec) == stage.job("a").spec
        assert (grant.submitter, grant.attempt, grant.ttl_s) == ("bob", 1, 30.0)

    def test_a_grant_is_the_jobs_lease(self, stage: Stage) -> None:
        grant = stage.assigned("a", "w1", lease={"ttl_s": 30.0, **KEEP})

        job = stage.job("a")
        assert job.lease is not None
        assert (job.state, job.attempt, job.assigned_worker_id) == (State.ASSIGNED, 1, "w1")
        assert (job.assigned_at, job.started_at) == (stage.clock.wall(), None)
        assert (job.lease.lease_id, job.lease.attempt) == (grant.lease_id, 1)
        assert (job.lease.worker_id, job.lease.incarnation) == ("w1", "w1/1")
        assert job.lease.expires_at == stage.clock.lease() + 30.0 + LEASE_MARGIN_S
        assert (job.lease.on_disconnect, job.lease.reconnect_grace_s) == (OnDisconnect.KEEP, GRACE_S)

    def test_every_grant_counts_the_attempt_up_by_one(self, stage: Stage) -> None:
        stage.add("a", backoff_s=0.0, max_losses=5)
        attempts = []

        for ending in ("release", "fail", "lose", "release"):
            grant = stage.take("a")
            attempts.append(grant.attempt)
            if ending == "release":
                stage.release(grant)
            elif ending == "fail":
                stage.fail(grant)
            else:
                stage.lose()

        assert attempts == [1, 2, 3, 4]

    def test_every_lease_id_is_its_own(self, stage: Stage) -> None:
        stage.add(*(f"job-{number}" for number in range(100)), subject="a.x")
        stage.add(*(f"more-{number}" for number in range(100)), subject="b.x")

        grants = stage.lease("w1", limit=120) + stage.lease("w2", limit=80)

        assert len({grant.lease_id for grant in grants}) == 200

    def test_who_knows_its_own_lease_id_cannot_guess_another_workers(self, stage: Stage) -> None:
        stage.add(*(f"job-{number}" for number in range(50)))

        lease_ids = [stage.lease(f"w{number}")[0].lease_id for number in range(50)]

        shortest = min(len(lease_id) for lease_id in lease_ids)
        assert shortest >= 16
        # Random characters agree in one place of sixteen; ids that only count on agree nearly everywhere.
        in_common = [sum(one == two for one, two in zip(*pair, strict=False)) for pair in pairwise(lease_ids)]
        assert max(in_common) < shortest / 2

    # -- by job_id ------------------------------------------------------------------------------------------------
    def test_by_job_id_only_the_named_jobs_are_granted(self, stage: Stage) -> None:
        stage.add(*"abcd")

        grants = stage.lease(limit=10, patterns=(), job_ids=("c", "?", "a", "c"))

        assert ids(grants) == ["c", "a"]
        assert stage.lease(limit=1, patterns=(), job_ids=("b", "d"))[0].job_id == "b"
        assert stage.job("d").state is State.PENDING

    def test_only_by_job_id_an_expired_lease_is_taken_over(self, stage: Stage) -> None:
        old = stage.running("a", "w1")
        stage.clock.advance(PAST_LEASE_S)

        assert stage.lease("w2") == []
        new = stage.take("a", "w2")

        job = stage.job("a")
        assert (new.attempt, job.state, job.losses) == (2, State.ASSIGNED, 1)
        assert new.lease_id != old.lease_id
        assert stage.kinds("a") == ["taken_over"]
        assert stage.renew(old) is LeaseStatus.LOST
        assert stage.finish(old).answer is ReportStatus.FENCED

    def test_a_kept_lease_is_not_taken_over_within_its_grace(self, stage: Stage) -> None:
        stage.running("a", "w1", lease=KEEP)
        stage.clock.advance(PAST_LEASE_S)

        assert stage.lease("w2", job_ids=("a",)) == []
        stage.clock.advance(GRACE_S)
        assert stage.take("a", "w2").attempt == 2

    def test_a_takeover_without_loss_budget_or_of_a_canceled_job_ends_it(self, stage: Stage) -> None:
        stage.running("spent", max_losses=0)
        stage.running("canceled")
        stage.store.cancel(["canceled"], actor="alice")
        stage.clock.advance(PAST_LEASE_S)

        assert stage.lease("w2", limit=2, job_ids=("spent", "canceled")) == []
        assert [stage.job(job_id).state for job_id in ("spent", "canceled")] == [State.FAILED, State.CANCELED]

    # -- held -----------------------------------------------------------------------------------------------------
    def test_held_gives_the_unstarted_leases_of_the_incarnation(self, stage: Stage) -> None:
        unstarted = stage.assigned("a", "w1")
        stage.running("b", "w1")
        stage.assigned("c", "w2")

        [[held], others] = stage.store.held([("w1", "w1/1", ""), ("w1", "w1/2", "")])

        assert (held.job_id, held.lease_id, held.attempt) == ("a", unstarted.lease_id, 1)
        assert held.spec == unstarted.spec
        assert others == []

    def test_held_answers_every_holder_in_its_place(self, stage: Stage) -> None:
        stage.add("a", "b", "c", "d")
        [a, b], [c] = stage.lease("w1", limit=2), stage.lease("w2")

        answers = stage.store.held([("w2", "w2/1", ""), ("w9", "w9/1", ""), ("w1", "w1/1", ""), ("w2", "w2/1", "")])

        assert [ids(grants) for grants in answers] == [[c.job_id], [], [a.job_id, b.job_id], [c.job_id]]
        assert stage.store.held([]) == []

    def test_held_does_not_lengthen_the_lease(self, stage: Stage) -> None:
        stage.assigned("a", "w1")
        stage.clock.advance(10)

        [[held]] = stage.store.held([("w1", "w1/1", "")])

        assert held.ttl_s == pytest.approx(LEASE_TTL_S - 10)
        stage.clock.advance(PAST_LEASE_S)
        assert stage.store.held([("w1", "w1/1", "")]) == [[]]

    # -- the owner ------------------------------------------------------------------------------------------------
    def test_a_lease_belongs_to_the_peer_that_was_let_in(self, stage: Stage) -> None:
        stage.add("a")
        grant = stage.take("a", owner="worker:w1")

        lease = stage.job("a").lease
        assert lease is not None
        assert lease.owner == "worker:w1"
        theirs, others = stage.store.held([("w1", "w1/1", "worker:w1"), ("w1", "w1/1", "token:other")])
        assert (ids(theirs), others) == (["a"], [])
        assert stage.start(grant, owner="worker:w1") is LeaseStatus.GO_ON
        assert stage.renew(grant, owner="worker:w1") is LeaseStatus.GO_ON
        [report] = stage.store.finish([replace(stage.report(grant), owner="worker:w1")])
        assert report.answer is ReportStatus.RECORDED

    def test_another_peer_that_knows_everything_of_a_lease_can_do_nothing_with_it(self, stage: Stage) -> None:
        stage.add("a")
        grant = stage.take("a", owner="worker:w1")
        before = stage.job("a")

        assert stage.start(grant, owner="token:other") is LeaseStatus.LOST
        assert stage.renew(grant, owner="token:other", ttl_s=3600.0, progress=Progress(0.5, "x")) is LeaseStatus.LOST
        assert stage.release(grant, owner="token:other") is False
        forged = [replace(stage.report(grant, result=b"forged"), owner="token:other")]
        [finished] = stage.store.finish(forged)
        [failed] = stage.store.fail([replace(forged[0], outcome=Outcome(error_code="EXIT_CODE", permanent=True))])

        assert (finished.answer, failed.answer) == (ReportStatus.FENCED, ReportStatus.FENCED)
        assert stage.job("a") == before
        [report] = stage.store.finish([replace(stage.report(grant), owner="worker:w1")])
        assert report.answer is ReportStatus.RECORDED

    def test_of_several_peers_that_show_one_lease_or_report_in_one_batch_its_owner_is_answered(self, stage: Stage) -> None:
        stage.add("a")
        grant = stage.take("a", owner="worker:w1")
        shown = [stage.claim(grant, owner=owner) for owner in ("token:other", "worker:w1", "token:other")]
        assert stage.store.renew(shown) == [LeaseStatus.LOST, LeaseStatus.GO_ON, LeaseStatus.LOST]
        report = replace(stage.report(grant), owner="worker:w1")
        stage.store.finish([report])

        again, forged = stage.store.finish([report, replace(report, owner="token:other")])

        assert (again.answer, forged.answer) == (ReportStatus.REPEATED, ReportStatus.FENCED)

    def test_an_orphan_is_resumed_by_its_owner_alone(self, stage: Stage) -> None:
        stage.add("a")
        grant = stage.take("a", owner="worker:w1", **KEEP)
        stage.start(grant, owner="worker:w1")
        stage.clock.advance(PAST_LEASE_S + GRACE_S)
        stage.reap()

        assert stage.renew(grant, owner="token:other") is LeaseStatus.LOST
        assert stage.job("a").state is State.ORPHANED
        assert stage.renew(grant, owner="worker:w1") is LeaseStatus.GO_ON

    def test_an_assignment_belongs_to_its_owner(self, stage: Stage) -> None:
        stage.add("a")
        grant = stage.assign("a", owner="worker:w1")

        assert grant is not None
        assert stage.renew(grant) is LeaseStatus.LOST
        assert stage.renew(grant, owner="worker:w1") is LeaseStatus.GO_ON

    def test_leases_of_an_owner_that_was_shut_out_end_at_once(self, stage: Stage) -> None:
        stage.add("unstarted", "started", "kept", "canceled", "other")
        mine = {"owner": "token:t"}
        stage.take("unstarted", **mine)
        stage.start(stage.take("started", **mine), **mine)
        stage.start(stage.take("kept", **mine, **KEEP), **mine)
        stage.take("canceled", **mine)
        stage.store.cancel(["canceled"], actor="alice")
        kept = stage.take("other", owner="token:other")

        assert stage.store.end_leases([LeaseHolder("token:t"), LeaseHolder("nobody")]) == [4, 0]

        states = [(stage.job(job_id).state, stage.job(job_id).losses) for job_id in ("unstarted", "started", "kept", "canceled")]
        waits = State.PENDING
        assert states == [(waits, 0), (waits, 1), (waits, 1), (State.CANCELED, 0)]
        assert stage.store.end_leases([LeaseHolder("token:t")]) == [0]
        assert stage.renew(kept, owner="token:other") is LeaseStatus.GO_ON
        assert set(ids(stage.lease("w2", limit=9))) == {"unstarted", "started", "kept"}

    def test_leases_of_an_owner_end_some_at_a_time(self, stage: Stage) -> None:
        stage.add(*(f"job-{number}" for number in range(LEASES_ENDED_MAX + 1)))
        stage.lease(limit=LEASES_ENDED_MAX + 1, owner="token:t")

        assert [stage.store.end_leases([LeaseHolder("token:t")]) for _ in range(3)] == [[LEASES_ENDED_MAX], [1], [0]]
        assert sum(counts.pending for counts in stage.store.counts().values()) == LEASES_ENDED_MAX + 1

    def test_leases_of_one_worker_end_and_its_owner_keeps_the_others(self, stage: Stage) -> None:
        stage.add("unstarted", "started", "other")
        mine = {"owner": "token:t"}
        stage.take("unstarted", **mine)
        stage.start(stage.take("started", **mine), **mine)
        other = stage.take("other", "w2", **mine)

        assert stage.store.end_leases([LeaseHolder(worker_id="w1")]) == [2]

        assert [(stage.job(job_id).state, stage.job(job_id).losses) for job_id in ("unstarted", "started")] == [
            (State.PENDING, 0),
            (State.PENDING, 1),
        ]
        assert "was detached" in stage.store.incidents("unstarted")[-1].reason
        assert stage.renew(other, "w2", **mine) is LeaseStatus.GO_ON

    # -- start ----------------------------------------------------------------------------------------------------
    def test_start_makes_it_running_and_a_second_one_changes_nothing(self, stage: Stage) -> None:
        grant = stage.assigned("a")
        stage.clock.advance(1)

        assert stage.start(grant) is LeaseStatus.GO_ON
        started = stage.job("a")
        assert (started.state, started.started_at) == (State.RUNNING, stage.clock.wall())
        stage.clock.advance(1)
        assert stage.start(grant) is LeaseStatus.GO_ON
        assert stage.job("a") == started

    def test_a_retry_starts_afresh(self, stage: Stage) -> None:
        stage.fail(stage.running("a", backoff_s=0.0))
        stage.take("a")

        assert (stage.job("a").state, stage.job("a").started_at, stage.job("a").outcome) == (State.ASSIGNED, None, None)

    # -- renew ----------------------------------------------------------------------------------------------------
    def test_renew_counts_from_now(self, stage: Stage) -> None:
        grant = stage.running("a")
        stage.clock.advance(10)

        assert stage.renew(grant, ttl_s=60.0) is LeaseStatus.GO_ON
        lease = stage.job("a").lease
        assert lease is not None
        assert lease.expires_at == stage.clock.lease() + 60.0 + LEASE_MARGIN_S

    def test_renew_keeps_the_progress_that_a_current_lease_brings_and_changes_nothing_else(self, stage: Stage) -> None:
        grant, quarter = stage.running("a"), Progress(0.25, "a quarter – 四分の一")
        stage.renew(grant)
        before = stage.job("a")

        stage.renew(grant, progress=quarter)
        assert stage.renew(grant, lease_id="0" * 32, progress=Progress(0.5)) is LeaseStatus.LOST
        stage.renew(grant)

        assert stage.job("a") == msgspec.structs.replace(before, progress=quarter)

    def test_progress_outlives_the_attempt_and_is_cleared_by_the_next_grant(self, stage: Stage) -> None:
        grant = stage.running("a", backoff_s=0.0)
        stage.renew(grant, progress=Progress(0.5, "half"))
        stage.fail(grant)
        after_failure = stage.job("a").progress
        stage.take("a")

        assert (after_failure, stage.job("a").progress) == (Progress(0.5, "half"), None)

    def test_a_run_whose_worker_asks_whether_it_may_go_on_is_nobody_elses_before_it_has_heard(self, stage: Stage) -> None:
        grant = stage.running("a", backoff_s=0.0)
        stage.renew(grant, ttl_s=3.0, confirm_s=30.0)
        if Feature.DEFINITIONS not in stage.store.features:
            assert stage.job("a").confirming_until is None
            return

        asked, lease = stage.job("a"), stage.job("a").lease
        assert (asked.state, asked.attempt) == (State.RUNNING, grant.attempt)
        assert asked.confirming_until == pytest.approx(stage.clock.wall() + 30.0)
        assert lease is not None
        assert lease.expires_at >= stage.clock.lease() + 30.0, "the lease lasts beyond the answer"
        stage.clock.advance(30.0)
        assert stage.reap() == []
        assert stage.renew(grant) is LeaseStatus.GO_ON
        assert stage.job("a").confirming_until == asked.confirming_until, "an ordinary renewal is no answer"
        assert stage.renew(grant, confirm_s=0.0) is LeaseStatus.GO_ON
        assert stage.job("a").confirming_until is None

        stage.renew(grant, confirm_s=1.0)
        assert stage.renew(grant, lease_id="0" * 32, confirm_s=0.0) is LeaseStatus.LOST
        assert stage.job("a").confirming_until is not None
        stage.fail(grant)
        stage.take("a")
        assert stage.job("a").confirming_until is None

    def test_a_run_whose_worker_never_heard_whether_it_may_go_on_is_reaped_once_its_lease_is_over(self, stage: Stage) -> None:
        grant = stage.running("a")
        stage.renew(grant, confirm_s=30.0)
        stage.clock.advance(30.0 + LEASE_MARGIN_S + 1.0)

        [reaped] = stage.reap()
        assert (reaped.job_id, stage.job("a").state) == ("a", State.PENDING)
        assert stage.take("a").attempt == grant.attempt + 1
        assert stage.job("a").confirming_until is None

    def test_a_renewed_lease_is_not_reaped_even_if_it_had_expired(self, stage: Stage) -> None:
        grant = stage.running("a")
        for wait_s in (LEASE_TTL_S, LEASE_TTL_S, LEASE_TTL_S, PAST_LEASE_S):
            stage.clock.advance(wait_s)
            assert stage.renew(grant) is LeaseStatus.GO_ON

        assert stage.reap() == []

    @pytest.mark.parametrize("verb", ["start", "renew"])
    def test_an_orphan_whom_nobody_took_is_resumed_when_its_worker_is_back(self, stage: Stage, verb: str) -> None:
        grant = stage.orphaned("a")
        before = stage.job("a")

        assert getattr(stage, verb)(grant, ttl_s=20.0) is LeaseStatus.GO_ON

        job = stage.job("a")
        assert job.lease is not None
        assert (job.state, job.attempt, job.losses, job.version) == (State.RUNNING, 1, 1, before.version + 1)
        assert (job.lease.lease_id, job.lease.expires_at) == (grant.lease_id, stage.clock.lease() + 20.0 + LEASE_MARGIN_S)
        assert job.started_at == before.started_at
        assert stage.kinds("a") == ["orphaned", "resumed"]
        assert (stage.store.counts()["render"].orphaned, stage.store.counts()["render"].active) == (0, 1)

    def test_a_resumed_job_is_not_given_to_others_and_can_be_orphaned_again(self, stage: Stage) -> None:
        grant = stage.orphaned("a")
        stage.renew(grant)

        assert stage.lease("w2", limit=10) == []
        assert stage.lease("w2", limit=10, job_ids=("a",)) == []
        stage.clock.advance(PAST_LEASE_S + GRACE_S)
        assert [reaped.state for reaped in stage.reap()] == [State.ORPHANED]
        assert stage.job("a").losses == 2

    def test_an_orphan_that_was_never_started_is_taken_as_running(self, stage: Stage) -> None:
        grant = stage.assigned("a", lease=KEEP)
        stage.clock.advance(PAST_LEASE_S + GRACE_S)
        stage.reap()

        assert stage.renew(grant) is LeaseStatus.GO_ON
        assert (stage.job("a").state, stage.job("a").started_at) == (State.RUNNING, stage.clock.wall())

    def test_a_claim_shown_twice_resumes_once(self, stage: Stage) -> None:
        claim = stage.claim(stage.orphaned("a"))

        assert stage.store.renew([claim, claim]) == [LeaseStatus.GO_ON, LeaseStatus.GO_ON]
        assert stage.kinds("a") == ["orphaned", "resumed"]

    @pytest.mark.parametrize("verb", ["start", "renew"])
    def test_an_orphan_that_somebody_took_is_not_resumed(self, stage: Stage, verb: str) -> None:
        old = stage.orphaned("a")
        stage.take("a", "w2")

        assert getattr(stage, verb)(old) is LeaseStatus.LOST
        assert (stage.job("a").attempt, stage.job("a").assigned_worker_id) == (2, "w2")

    @pytest.mark.parametrize("verb", ["start", "renew", "release"])
    @pytest.mark.parametrize(
        "wrong",
        [{"worker_id": "w2"}, {"incarnation": "w1/2"}, {"lease_id": "0" * 32}, {"attempt": 2}, {"job_id": "b"}],
        ids=lambda wrong: next(iter(wrong)),
    )
    def test_a_claim_with_a_wrong_field_is_lost(self, stage: Stage, verb: str, wrong: dict[str, object]) -> None:
        grant = stage.assigned("a")
        stage.add("b")
        before = stage.job("a")

        [answer] = getattr(stage.store, verb)([msgspec.structs.replace(stage.claim(grant), **wrong)])

        assert answer in (LeaseStatus.LOST, False)
        assert stage.job("a") == before
        assert stage.job("b").state is State.PENDING

    @pytest.mark.parametrize("verb", ["start", "renew", "release"])
    def test_a_claim_to_a_reaped_lease_or_a_finished_job_is_lost(self, stage: Stage, verb: str) -> None:
        reaped = stage.assigned("reaped")
        stage.lose()
        finished = stage.assigned("finished")
        stage.finish(finished)

        answers = getattr(stage.store, verb)([stage.claim(reaped), stage.claim(finished)])

        assert not {*answers} - {LeaseStatus.LOST, False}
        assert [stage.job(job_id).state for job_id in ("reaped", "finished")] == [State.PENDING, State.SUCCEEDED]

    def test_renew_answers_index_by_index(self, stage: Stage) -> None:
        good, canceled, lost = (stage.running(job_id) for job_id in "abc")
        stage.store.cancel(["b"], actor="alice")
        stage.finish(lost)

        standings = stage.store.renew([stage.claim(grant) for grant in (lost, good, canceled, good)])

        assert standings == [LeaseStatus.LOST, LeaseStatus.GO_ON, LeaseStatus.CANCEL, LeaseStatus.GO_ON]

    # -- release --------------------------------------------------------------------------------------------------
    def test_release_gives_the_job_back_at_no_cost(self, stage: Stage) -> None:
        grant = stage.assigned("a")

        assert stage.release(grant)
        assert stage.finish(grant).answer is ReportStatus.FENCED

        job = stage.job("a")
        assert (job.state, job.lease, job.failures, job.losses, job.attempt) == (State.PENDING, None, 0, 0, 1)
        assert stage.kinds("a") == ["released", "fenced"]
        assert stage.take("a", "w2").attempt == 2

    def test_release_of_a_started_attempt_is_refused(self, stage: Stage) -> None:
        grant = stage.running("a")

        assert not stage.release(grant)
        assert stage.job("a").state is State.RUNNING


# ---------------------------------------------------------------------------------------------------- late jobs

IN_S = 100.0  # how long the jobs of these cases may wait

WAYS: dict[str, Callable[[Stage], object]] = {
    "by pattern": lambda stage: stage.lease(limit=10),
    "by several patterns": lambda stage: stage.lease(limit=10, patterns=("render.*", "other.*")),
    "by job_id": lambda stage: stage.lease(limit=10, job_ids=("a",)),
    "by a leader's choice": lambda stage: stage.assign("a"),
}


class LateCases(StoreCase):
    """Cases of skip, and of grants of jobs with a not_after."""

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
        assert stage.promote() == 0

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

        assert [stage.skip(limit=2) for _ in range(3)] == [["first", "second"], ["third"], []]

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
