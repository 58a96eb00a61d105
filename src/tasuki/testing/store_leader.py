"""Cases of the store suite for the leader (epochs, targeted grants, reaping, delayed jobs, retention), turns, and blobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tasuki.core.job import BlobRef, InputFile, State
from tasuki.core.lifecycle import LEASE_MARGIN_S
from tasuki.core.store_messages import (
    Assignment,
    BlobClaim,
    BlobPlace,
    CondemnOrder,
    LeaseStatus,
    MissingBlobs,
    ReportStatus,
    Submitted,
)
from tasuki.errors import Conflict, StaleEpoch
from tasuki.stores.common import GENERATIONS_BEGIN_AT
from tasuki.stores.store import Store
from tasuki.testing.store_stage import GRACE_S, KEEP, PAST_LEASE_S, Stage, StoreCase, token_row

LEADER_VERBS: dict[str, Callable[[Store, int], object]] = {
    "assign": lambda store, epoch: store.assign([Assignment(job_id="a", worker_id="w", incarnation="1")], epoch=epoch),
    "reap": lambda store, epoch: store.reap(epoch=epoch),
    "skip": lambda store, epoch: store.skip(epoch=epoch),
    "promote": lambda store, epoch: store.promote(epoch=epoch),
    "prune": lambda store, epoch: store.prune(before=1e12, epoch=epoch),
}


class LeaderCases(StoreCase):
    """Cases of take_over, assign, reap, promote, prune, next_due and turns."""

    # -- epochs ---------------------------------------------------------------------------------------------------
    def test_a_store_without_a_leader_says_so(self, store: Store) -> None:
        assert store.epoch() == (0, "")

    def test_the_registered_epoch_and_its_holder_are_told(self, stage: Stage) -> None:
        assert stage.store.take_over("leader-2", stage.epoch + 7)

        assert stage.store.epoch() == (stage.epoch + 7, "leader-2")

    @pytest.mark.parametrize("step", [0, -1])
    def test_a_takeover_that_is_not_higher_is_refused_and_changes_nothing(self, stage: Stage, step: int) -> None:
        stage.lead("leader-2")
        grant = stage.running("a")
        stage.clock.advance(14)
        before = (stage.store.epoch(), stage.job("a"))

        assert not stage.store.take_over("leader-1", stage.store.epoch()[0] + step)

        assert (stage.store.epoch(), stage.job("a")) == before
        assert stage.renew(grant) is LeaseStatus.GO_ON

    @pytest.mark.parametrize("verb", sorted(LEADER_VERBS))
    def test_an_older_epoch_is_refused_and_changes_nothing(self, stage: Stage, verb: str) -> None:
        stage.add("a")
        stage.running("b")
        stage.add("c", not_before=stage.clock.wall() + 1, not_after=stage.clock.wall() + 2)
        stage.ended("d", "FAILED")
        stage.lead("leader-2")
        stage.clock.advance(PAST_LEASE_S)
        before = stage.store.get(["a", "b", "c", "d"])

        with pytest.raises(StaleEpoch):
            LEADER_VERBS[verb](stage.store, stage.epoch)

        assert stage.store.get(["a", "b", "c", "d"]) == before

    @pytest.mark.parametrize("verb", sorted(LEADER_VERBS))
    def test_the_registered_epoch_is_accepted(self, stage: Stage, verb: str) -> None:
        stage.add("a")

        LEADER_VERBS[verb](stage.store, stage.lead("leader-2"))

    def test_a_takeover_renews_every_lease_by_its_own_ttl(self, stage: Stage) -> None:
        stage.running("short", lease={"ttl_s": 15.0})
        stage.running("long", lease={"ttl_s": 60.0})
        stage.clock.advance(14)

        stage.lead("leader-2")

        now = stage.clock.lease()
        leases = [job.lease for job in stage.store.get(["short", "long"]) if job is not None]
        assert [lease.expires_at - now - LEASE_MARGIN_S for lease in leases if lease is not None] == [15.0, 60.0]

    def test_a_takeover_after_a_long_outage_lets_running_jobs_go_on(self, stage: Stage) -> None:
        grant = stage.running("a")
        stage.clock.advance(3600)

        epoch = stage.lead("leader-2")

        assert stage.store.reap(epoch=epoch) == []
        assert stage.renew(grant) is LeaseStatus.GO_ON

    def test_a_worker_that_stays_silent_is_waited_for_by_one_takeover_not_by_each(self, stage: Stage) -> None:
        """Repeated takeovers: servers that come and go more often than a lease lasts, or `tasuki duties --once` every minute."""
        stage.running("a")
        stage.clock.advance(14)
        stage.lead("leader-2")
        stage.clock.advance(PAST_LEASE_S - 1)

        assert stage.store.reap(epoch=stage.lead("leader-3")) == []
        stage.clock.advance(1)

        assert [reaped.job_id for reaped in stage.store.reap(epoch=stage.lead("leader-4"))] == ["a"]

    def test_what_is_over_after_one_takeover_is_over_for_the_next(self, stage: Stage) -> None:
        stage.running("stopped", lease={"ttl_s": 60.0})
        stage.running("kept", lease={"ttl_s": 60.0, **KEEP})
        stage.clock.advance(3600)
        stage.lead("leader-2")
        stage.clock.advance(3600)

        reaped = stage.store.reap(epoch=stage.lead("leader-3"))

        assert {it.job_id: it.state for it in reaped} == {"stopped": State.PENDING, "kept": State.ORPHANED}

    def test_a_worker_that_renewed_since_is_waited_for_again(self, stage: Stage) -> None:
        grants = {"stopped": stage.running("stopped"), "kept": stage.running("kept", lease=KEEP)}
        stage.lead("leader-2")
        stage.clock.advance(1)
        assert [stage.renew(grant) for grant in grants.values()] == [LeaseStatus.GO_ON, LeaseStatus.GO_ON]
        stage.clock.advance(3600)

        assert stage.store.reap(epoch=stage.lead("leader-3")) == []

    def test_a_lease_that_was_given_since_is_waited_for(self, stage: Stage) -> None:
        stage.lead("leader-2")
        stage.clock.advance(1)
        stage.running("a")
        stage.clock.advance(3600)

        assert stage.store.reap(epoch=stage.lead("leader-3")) == []

    def test_a_takeover_that_was_refused_does_not_count(self, stage: Stage) -> None:
        stage.running("a")
        stage.clock.advance(1)
        assert not stage.store.take_over("leader-0", stage.store.epoch()[0])
        stage.clock.advance(3600)

        assert stage.store.reap(epoch=stage.lead("leader-3")) == []

    def test_after_the_lease_clock_began_again_every_lease_is_renewed(self, stage: Stage) -> None:
        """The machine of a SQLite store was started again: its earlier times mean nothing."""
        stage.running("a")
        stage.clock.advance(1)
        stage.lead("leader-2")
        stage.clock.reboot()

        stage.lead("leader-3")

        lease = stage.job("a").lease
        assert lease is not None
        assert lease.expires_at == stage.clock.lease() + 15.0 + LEASE_MARGIN_S

    # -- assign ---------------------------------------------------------------------------------------------------
    def test_assign_grants_a_ready_job_to_the_worker(self, stage: Stage) -> None:
        stage.add("a")

        grant = stage.assign("a", "w3", ttl_s=20.0, **KEEP)

        job = stage.job("a")
        assert grant is not None
        assert job.lease is not None
        assert (job.state, job.attempt, job.lease.worker_id, job.lease.lease_id) == (State.ASSIGNED, 1, "w3", grant.lease_id)
        assert job.lease.expires_at == stage.clock.lease() + 20.0 + LEASE_MARGIN_S
        assert job.leader_epoch == stage.epoch
        assert stage.finish(grant, "w3").answer is ReportStatus.RECORDED

    def test_assign_gives_none_where_the_job_is_not_ready(self, stage: Stage) -> None:
        stage.running("running")
        stage.add("delayed", not_before=stage.clock.wall() + 10)
        stage.ended("ended", "SUCCEEDED")
        stage.add("ready")
        job_ids = ["running", "delayed", "?", "ended", "ready", "ready"]

        grants = stage.store.assign(
            [Assignment(job_id=job_id, worker_id="w1", incarnation="w1/1") for job_id in job_ids], epoch=stage.epoch
        )

        assert [grant is not None for grant in grants] == [False, False, False, False, True, False]

    def test_assign_takes_an_orphan(self, stage: Stage) -> None:
        old = stage.orphaned("a", "w1")

        grant = stage.assign("a", "w2")

        assert grant is not None
        assert grant.attempt == 2
        assert stage.finish(old).answer is ReportStatus.FENCED

    # -- reap -----------------------------------------------------------------------------------------------------
    def test_a_live_lease_is_not_reaped(self, stage: Stage) -> None:
        stage.running("a")
        stage.clock.advance(PAST_LEASE_S - 1.0)

        assert stage.reap() == []

    def test_a_lost_worker_costs_a_loss_and_the_job_is_ready_at_once(self, stage: Stage) -> None:
        stage.running("a", "w1")

        [reaped] = stage.lose()

        job = stage.job("a")
        assert (reaped.job_id, reaped.state, reaped.worker_id, reaped.attempt) == ("a", State.PENDING, "w1", 1)
        assert "w1" in reaped.reason
        assert (job.state, job.losses, job.failures, job.lease) == (State.PENDING, 1, 0, None)
        assert stage.kinds("a") == ["lost"]
        assert stage.take("a", "w2").attempt == 2

    @pytest.mark.parametrize("first", [False, True])
    def test_later_losses_are_delayed_like_retries_and_the_first_if_the_job_asks_for_it(self, stage: Stage, first: bool) -> None:
        stage.running("a", max_losses=5, delay_first_loss=first, backoff_s=10.0)
        if not first:
            stage.lose()
            stage.take("a")
        delays = []
        for _ in range(3):
            stage.lose()
            not_before = stage.job("a").not_before
            assert not_before is not None
            delays.append(not_before - stage.clock.wall())
            stage.clock.advance(delays[-1])
            stage.promote()
            stage.take("a")

        assert delays == [10.0, 20.0, 40.0]

    def test_a_spent_loss_budget_dead_letters_the_job_with_its_reason(self, stage: Stage) -> None:
        stage.running("a", "w1", max_losses=1, backoff_s=0.0)
        stage.lose()
        stage.take("a", "w2")

        [reaped] = stage.lose()

        job = stage.job("a")
        assert (reaped.state, job.state, job.losses, job.failures) == (State.FAILED, State.FAILED, 2, 0)
        assert stage.kinds("a") == ["lost", "dead_lettered"]
        assert "w2" in stage.store.incidents("a")[-1].reason
        assert job.outcome is not None
        assert (job.outcome.error_code, job.outcome.message) == ("LOST", reaped.reason)
        assert job.finished_at == stage.clock.wall()

    def test_an_unstarted_attempt_is_reaped_too(self, stage: Stage) -> None:
        stage.assigned("a")

        assert [reaped.state for reaped in stage.lose()] == [State.PENDING]

    def test_a_kept_lease_is_reaped_after_its_grace(self, stage: Stage) -> None:
        stage.running("a", lease=KEEP)
        stage.clock.advance(PAST_LEASE_S)
        assert stage.reap() == []

        stage.clock.advance(GRACE_S)
        [reaped] = stage.reap()

        assert reaped.state is State.ORPHANED
        assert stage.kinds("a") == ["orphaned"]

    def test_an_orphan_keeps_its_lease_and_can_be_leased_by_pattern(self, stage: Stage) -> None:
        old = stage.orphaned("a", "w1")
        lease = stage.job("a").lease
        assert lease is not None
        assert lease.lease_id == old.lease_id

        [new] = stage.lease("w2")

        assert (new.job_id, new.attempt) == ("a", 2)

    def test_an_orphan_is_reaped_once(self, stage: Stage) -> None:
        stage.orphaned("a")
        stage.clock.advance(1000)

        assert stage.reap() == []
        assert stage.job("a").losses == 1

    def test_a_grace_without_keep_counts_for_nothing(self, stage: Stage) -> None:
        stage.running("a", lease={"reconnect_grace_s": GRACE_S})

        assert [reaped.state for reaped in stage.lose()] == [State.PENDING]

    def test_reap_ends_no_more_than_the_limit(self, stage: Stage) -> None:
        for job_id in "abc":
            stage.running(job_id)
        stage.clock.advance(PAST_LEASE_S)

        assert [len(stage.reap(limit=2)) for _ in range(3)] == [2, 1, 0]

    def test_a_jump_of_the_wall_clock_ends_no_lease(self, stage: Stage) -> None:
        stage.running("a")

        stage.clock.jump_wall(1_000_000)

        assert stage.reap() == []

    # -- promote --------------------------------------------------------------------------------------------------
    def test_a_delayed_job_is_never_granted_before_its_time(self, stage: Stage) -> None:
        stage.add("a", not_before=stage.clock.wall() + 10)
        stage.clock.advance(9.5)

        assert stage.promote() == 0
        assert stage.lease(limit=10) == []
        assert stage.lease(limit=10, job_ids=("a",)) == []
        assert stage.assign("a") is None

    def test_a_delayed_job_is_ready_once_promoted(self, stage: Stage) -> None:
        stage.add("a", not_before=stage.clock.wall() + 10)
        stage.clock.advance(10.5)

        assert stage.promote() == 1
        assert stage.promote() == 0
        assert [grant.job_id for grant in stage.lease()] == ["a"]

    def test_promote_tells_each_subject_once(self, stage: Stage) -> None:
        stage.add("a", "b", subject="x.1", not_before=stage.clock.wall() + 1)
        stage.add("c", subject="x.2", not_before=stage.clock.wall() + 2)
        stage.add("d", subject="x.3", not_before=stage.clock.wall() + 99)
        stage.clock.advance(3)

        assert stage.promote() == 3
        assert stage.came_back_to("x.1", "x.2")

    def test_promote_is_bounded(self, stage: Stage) -> None:
        stage.add("a", "b", "c", subject="x", not_before=stage.clock.wall() + 1)
        stage.clock.advance(2)

        assert [stage.store.promote(epoch=stage.epoch, limit=2) for _ in range(3)] == [2, 1, 0]

    def test_a_time_that_has_passed_delays_nothing(self, stage: Stage) -> None:
        stage.add("a", not_before=stage.clock.wall() - 10)

        assert [grant.job_id for grant in stage.lease()] == ["a"]

    def test_not_before_is_judged_by_the_wall_clock(self, stage: Stage) -> None:
        stage.add("a", not_before=stage.clock.wall() + 3600)

        stage.clock.jump_wall(3601)

        assert stage.promote() == 1

    # -- next_due -------------------------------------------------------------------------------------------------
    def test_nothing_is_due_in_an_empty_store(self, stage: Stage) -> None:
        assert stage.store.next_due() == (None, None)

    def test_next_due_tells_the_first_lease_and_the_first_delay(self, stage: Stage) -> None:
        stage.running("kept", lease={"ttl_s": 5.0, **KEEP})
        stage.running("stopped", lease={"ttl_s": 30.0})
        stage.add("late", not_before=stage.clock.wall() + 50)
        stage.add("soon", not_before=stage.clock.wall() + 40)

        assert stage.store.next_due() == (stage.clock.lease() + 30.0 + LEASE_MARGIN_S, stage.clock.wall() + 40)

    def test_what_is_over_is_not_due_any_more(self, stage: Stage) -> None:
        stage.finish(stage.running("a"))
        stage.orphaned("b")
        stage.add("c", not_before=stage.clock.wall() + 1)
        stage.clock.advance(2)
        stage.promote()

        assert stage.store.next_due() == (None, None)

    # -- prune ----------------------------------------------------------------------------------------------------
    def test_prune_deletes_what_ended_before(self, stage: Stage) -> None:
        stage.ended("old", "FAILED")
        stage.clock.advance(100)
        stage.ended("new", "SUCCEEDED")
        stage.add("waiting")

        deleted = stage.store.prune(before=stage.clock.wall() - 50, epoch=stage.epoch)

        assert deleted == 1
        assert stage.store.get(["old"]) == [None]
        assert stage.store.incidents("old") == []
        assert sorted(stage.found()) == ["new", "waiting"]
        assert stage.store.counts()["render"].failed == 0

    def test_prune_counts_from_the_end_not_from_submit(self, stage: Stage) -> None:
        grant = stage.running("a", lease={"ttl_s": 1000.0})
        stage.clock.advance(500)
        stage.finish(grant)

        assert stage.store.prune(before=stage.clock.wall() - 100, epoch=stage.epoch) == 0

    def test_prune_deletes_no_more_than_the_limit(self, stage: Stage) -> None:
        for job_id in "abc":
            stage.ended(job_id, "SUCCEEDED")

        later = stage.clock.wall() + 1
        assert [stage.store.prune(before=later, epoch=stage.epoch, limit=2) for _ in range(3)] == [2, 1, 0]

    def test_a_pruned_id_is_new(self, stage: Stage) -> None:
        stage.ended("a", "SUCCEEDED")
        stage.store.prune(before=stage.clock.wall() + 1, epoch=stage.epoch)

        stage.add("a", args=("other",))

        assert (stage.job("a").state, stage.job("a").attempt) == (State.PENDING, 0)

    # -- turns ----------------------------------------------------------------------------------------------------
    def test_a_turn_keeps_all_that_happened_in_it(self, stage: Stage) -> None:
        with stage.store.turn():
            stage.add("a")
            grant = stage.take("a")
            stage.finish(grant)

        assert stage.job("a").state is State.SUCCEEDED

    def test_an_exception_in_a_turn_leaves_nothing(self, stage: Stage) -> None:
        grants = {job_id: stage.assigned(job_id, lease={"ttl_s": 20.0}) for job_id in "abcd"}
        stage.ended("e", "FAILED")
        stage.add("f", not_before=stage.clock.wall() + 1)
        stage.add("g")
        stage.clock.advance(2)
        before = self._everything(stage)

        with stage.abandoned_turn():
            stage.finish(grants["a"])
            stage.fail(grants["b"])
            stage.release(grants["c"])
            stage.start(grants["d"])
            stage.renew(grants["d"])
            stage.store.requeue(["e"], actor="x")
            stage.promote()
            stage.store.cancel(["g", "d"], actor="x")
            stage.add("new")
            stage.lease(limit=10)
            stage.store.add_token(token_row("t"))
            stage.store.prune(before=stage.clock.wall() + 1, epoch=stage.epoch)
            stage.lead("leader-2")

        assert self._everything(stage) == before
        assert stage.promote() == 1
        assert sorted(grant.job_id for grant in stage.lease(limit=10)) == ["f", "g"]

    def test_a_turn_after_an_abandoned_one_is_not_touched_by_it(self, stage: Stage) -> None:
        with stage.abandoned_turn():
            stage.add("a")
        with stage.store.turn():
            stage.add("b")

        assert stage.found() == ["b"]

    def _everything(self, stage: Stage) -> object:
        jobs = stage.find_all()
        return (
            jobs,
            {job.job_id: stage.store.incidents(job.job_id) for job in jobs},
            stage.store.counts(),
            stage.store.next_due(),
            stage.store.tokens(),
            stage.store.audit(),
            stage.store.epoch(),
        )


# ---------------------------------------------------------------------------------------------------- blobs

A, B, C, D = (letter * 64 for letter in "abcd")
FAR = 1e12
"""A time later than any at which a blob was touched."""


def needs(*sha256s: str) -> dict[str, Any]:
    """Return the fields of a job whose inputs are these blobs."""
    return {"files": tuple(InputFile(f"in{number}", sha256=sha256, size_bytes=3) for number, sha256 in enumerate(sha256s))}


def condemn(stage: Stage, *, unused_since: float = FAR, limit: int = 256) -> list[BlobPlace]:
    return list(stage.store.condemn_blobs(CondemnOrder(unused_since, limit=limit), epoch=stage.epoch).places)


def names(places: list[BlobPlace]) -> str:
    """Return the letters of the blobs, in order."""
    return "".join(place.sha256[0] for place in places)


class BlobCases(StoreCase):
    """Cases of place_blobs, blobs_stored, blob_places, condemn_blobs, forget_blobs; and of references by submit and reports."""

    # -- places ---------------------------------------------------------------------------------------------------
    def test_new_bytes_get_a_place_that_is_theirs_until_they_are_stored(self, stage: Stage) -> None:
        [place] = stage.store.place_blobs([BlobClaim(A, 3)])
        assert place == BlobPlace(A, 3, 0, stored=False)
        assert stage.store.place_blobs([BlobClaim(A, 3)]) == [place]
        assert stage.store.blob_places([A]) == [None]
        assert stage.store.blobs_stored([place]) == [True]
        assert stage.store.place_blobs([BlobClaim(A, 3)]) == [BlobPlace(A, 3, 0, stored=True)]
        assert stage.store.blob_places([B, A, A]) == [None, BlobPlace(A, 3, 0, True), BlobPlace(A, 3, 0, True)]

    def test_a_batch_may_name_the_same_bytes_twice(self, stage: Stage) -> None:
        places = stage.store.place_blobs([BlobClaim(A, 3), BlobClaim(B, 5), BlobClaim(A, 3)])
        assert places == [BlobPlace(A, 3), BlobPlace(B, 5), BlobPlace(A, 3)]
        assert stage.store.blobs_stored([*places, BlobPlace(C, 1)]) == [True, True, True, False]

    def test_nothing_to_place_is_no_error(self, stage: Stage) -> None:
        assert (stage.store.place_blobs([]), stage.store.blobs_stored([]), stage.store.blob_places([])) == ([], [], [])

    def test_the_first_claim_says_the_size_until_the_bytes_say_it(self, stage: Stage) -> None:
        assert stage.store.place_blobs([BlobClaim(A, 3), BlobClaim(A, 4)]) == [BlobPlace(A, 3)] * 2
        assert stage.store.place_blobs([BlobClaim(A, 5)]) == [BlobPlace(A, 3)]
        stage.store.blobs_stored([BlobPlace(A, 7)])
        stage.store.blobs_stored([BlobPlace(A, 8)])
        assert stage.store.place_blobs([BlobClaim(A, 9)]) == [BlobPlace(A, 7, 0, stored=True)]

    def test_a_turn_that_is_taken_back_placed_nothing(self, stage: Stage) -> None:
        stage.store.place_blobs([BlobClaim(A, 3)])

        with stage.abandoned_turn():
            stage.store.blobs_stored(stage.store.place_blobs([BlobClaim(A, 3), BlobClaim(B, 3)]))
        assert stage.store.blob_places([A, B]) == [None, None]
        assert stage.store.blobs_stored([BlobPlace(A, 3), BlobPlace(B, 3)]) == [True, False]

    def test_generations_grow_with_time_so_that_none_comes_twice(self, stage: Stage) -> None:
        stage.clock.jump_wall(GENERATIONS_BEGIN_AT + 1000.5 - stage.clock.wall())
        [first] = stage.store.place_blobs([BlobClaim(A, 3)])
        assert condemn(stage) == [first]
        assert stage.store.forget_blobs([first], epoch=stage.epoch) == 1
        stage.clock.advance(60)
        [second] = stage.store.place_blobs([BlobClaim(A, 3)])
        assert (first.generation, second.generation) == (1000, 1060)

    # -- submit ---------------------------------------------------------------------------------------------------
    def test_a_job_is_stored_only_if_all_its_inputs_are(self, stage: Stage) -> None:
        stage.store_blobs(A)
        stage.store.place_blobs([BlobClaim(B, 3)])
        answers = stage.store.submit(
            [
                stage.submission("plain"),
                stage.submission("lacks", **needs(C, A, B, C)),
                stage.submission("whole", **needs(A, A)),
                stage.submission("inline", files=(InputFile("in", data=b"abc"),)),
            ]
        )
        assert answers[1] == MissingBlobs("lacks", (B, C))
        assert [isinstance(answer, Submitted) and answer.created for answer in answers] == [True, False, True, True]
        assert stage.store.get(["lacks"]) == [None]
        assert stage.store.blob_owners(A) == ["whole"]
        assert stage.store.counts()["render"].pending == 3

    def test_a_job_that_names_another_size_than_its_input_has_is_not_stored(self, stage: Stage) -> None:
        stage.store_blobs(A, B, size_bytes=4)
        files = needs(A)["files"] + (InputFile("right", sha256=B, size_bytes=4),)
        assert stage.submit("a", files=files) == MissingBlobs("a", (A,))
        assert stage.submit("b", files=files[1:]) == Submitted("b", True)
        assert stage.store.blob_owners(B) == ["b"]

    def test_when_the_blobs_have_come_the_job_is_stored(self, stage: Stage) -> None:
        assert stage.submit("a", **needs(A)) == MissingBlobs("a", (A,))
        stage.store_blobs(A)
        assert stage.submit("a", **needs(A)) == Submitted("a", True)
        assert stage.store.blob_owners(A) == ["a"]

    def test_a_known_id_is_known_whatever_its_blobs(self, stage: Stage) -> None:
        stage.add("a")
        stage.store_blobs(A)
        stage.add("b", **needs(A))
        stage.store.cancel(["b"], actor="alice")
        same, other = stage.submit("b", **needs(A)), stage.submit("a", **needs(C))
        rerun = stage.submit("b", on_failed="rerun", **needs(A))
        assert isinstance(same, Submitted)
        assert not same.created
        assert isinstance(other, Conflict)
        assert isinstance(rerun, Submitted)
        assert stage.job("b").state is State.PENDING

    def test_the_same_id_again_in_one_batch_is_judged_by_what_came_before(self, stage: Stage) -> None:
        answers = stage.store.submit(
            [
                stage.submission("a", **needs(C)),
                stage.submission("a"),
                stage.submission("a", **needs(C)),
                stage.submission("b", **needs(C)),
                stage.submission("b", **needs(C)),
            ]
        )
        assert answers[0] == MissingBlobs("a", (C,))
        assert answers[1] == Submitted("a", True)
        assert isinstance(answers[2], Conflict)
        assert answers[3:] == [MissingBlobs("b", (C,))] * 2

    # -- finish, fail ---------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("verb", ["finish", "fail"])
    def test_a_result_that_is_not_stored_changes_nothing_and_the_lease_stands(self, stage: Stage, verb: str) -> None:
        grant = stage.running("a", max_retries=0)
        report = getattr(stage, verb)
        before = stage.job("a")
        answer = report(grant, result_ref=BlobRef(A, 3), result_sha256=A)
        assert (answer.answer, answer.state) == (ReportStatus.BLOB_MISSING, State.RUNNING)
        assert A in answer.reason
        assert stage.job("a") == before
        assert stage.store.blob_owners(A) == []
        assert stage.kinds("a") == []

        stage.store_blobs(A)
        assert report(grant, result_ref=BlobRef(A, 3), result_sha256=A).answer is ReportStatus.RECORDED
        assert stage.store.blob_owners(A) == ["a"]
        assert report(grant, result_ref=BlobRef(A, 3), result_sha256=A).answer is ReportStatus.REPEATED

    @pytest.mark.parametrize("verb", ["finish", "fail"])
    def test_a_result_of_another_size_than_its_blob_counts_as_not_stored(self, stage: Stage, verb: str) -> None:
        grant = stage.running("a", max_retries=0)
        stage.store_blobs(A, size_bytes=4)
        report = getattr(stage, verb)
        assert report(grant, result_ref=BlobRef(A, 3)).answer is ReportStatus.BLOB_MISSING
        assert report(grant, result_ref=BlobRef(A, 4)).answer is ReportStatus.RECORDED

    def test_a_missing_blob_keeps_no_other_report_from_being_recorded(self, stage: Stage) -> None:
        stage.store_blobs(A)
        grants = [stage.running(job_id) for job_id in ("plain", "whole", "lacks", "worded")]
        outcomes: list[dict[str, Any]] = [
            {},
            {"result_ref": BlobRef(A, 3)},
            {"result_ref": BlobRef(B, 3)},
            {"message": "all good"},
        ]
        reports = [stage.report(grant, **outcome) for grant, outcome in zip(grants, outcomes, strict=True)]
        answers = [answer.answer for answer in stage.store.finish(reports)]
        assert answers == [ReportStatus.RECORDED, ReportStatus.RECORDED, ReportStatus.BLOB_MISSING, ReportStatus.RECORDED]
        assert stage.store.counts()["render"].succeeded == 3
        assert stage.job("lacks").state is State.RUNNING

    def test_who_lost_the_lease_is_fenced_before_anybody_looks_for_its_blob(self, stage: Stage) -> None:
        grant = stage.running("a")
        stage.lose()
        assert stage.finish(grant, result_ref=BlobRef(A, 3)).answer is ReportStatus.FENCED

    # -- collection -----------------------------------------------------------------------------------------------
    def test_a_blob_is_condemned_when_no_job_refers_to_it(self, stage: Stage) -> None:
        stage.store_blobs(A, B, C)
        stage.add("a", **needs(A))
        stage.finish(stage.running("b"), result_ref=BlobRef(B, 3))
        assert names(condemn(stage)) == "c"
        assert stage.store.blob_places([A, B, C]) == [BlobPlace(A, 3, 0, True), BlobPlace(B, 3, 0, True), None]

    def test_a_job_that_is_pruned_or_runs_again_refers_to_its_results_no_more(self, stage: Stage) -> None:
        stage.store_blobs(A, B, C)
        stage.finish(stage.running("pruned", **needs(A)), result_ref=BlobRef(B, 3))
        stage.fail(stage.running("again", max_retries=0), result_ref=BlobRef(C, 3))
        assert condemn(stage) == []
        stage.store.requeue(["again"], actor="alice")
        assert names(condemn(stage)) == "c"
        stage.store.prune(before=FAR, epoch=stage.epoch)
        assert names(condemn(stage)) == "cab"

    def test_bytes_that_never_came_are_condemned_too(self, stage: Stage) -> None:
        places = stage.store.place_blobs([BlobClaim(A, 3)])
        assert condemn(stage) == places

    def test_the_longest_untouched_go_first_and_the_rest_waits(self, stage: Stage) -> None:
        for blob in (A, B, C, D):
            stage.store_blobs(blob)
            stage.clock.advance(10)
        stage.store.place_blobs([BlobClaim(A, 3)])
        assert names(condemn(stage, limit=1)) == "b"
        assert names(condemn(stage, limit=2)) == "bc"
        assert names(condemn(stage)) == "bcda"

    def test_what_was_touched_since_is_left_alone(self, stage: Stage) -> None:
        stage.store_blobs(A, B, C)
        stage.store.place_blobs([BlobClaim(D, 3)])
        stage.clock.advance(100)
        since = stage.clock.wall()
        stage.store.place_blobs([BlobClaim(A, 3)])
        stage.store.blobs_stored([BlobPlace(D, 3)])
        assert sorted(names(condemn(stage, unused_since=since))) == ["b", "c"]

    def test_past_the_budget_younger_ones_go_until_there_is_room(self, stage: Stage) -> None:
        for blob in (A, B, C, D):  # 3 bytes each
            stage.store_blobs(blob)
            stage.clock.advance(10)
        stage.add("keeps b", **needs(B))
        now = stage.clock.wall()

        def squeeze(budget_bytes: int, squeezed_since: float) -> tuple[str, int | None]:
            order = CondemnOrder(now - 35, budget_bytes, squeezed_since)
            condemned = stage.store.condemn_blobs(order, epoch=stage.epoch)
            return names(list(condemned.places)), condemned.stored_bytes

        assert squeeze(12, now) == ("a", 9)  # untouched for long enough, whatever the budget
        assert squeeze(9, now) == ("a", 9)
        assert squeeze(8, now - 15) == ("ac", 6)
        assert squeeze(1, now - 15) == ("ac", 6)  # d is too young even so
        assert squeeze(1, now) == ("acd", 3)

    def test_without_a_budget_nobody_adds_up(self, stage: Stage) -> None:
        stage.store_blobs(A)
        assert stage.store.condemn_blobs(CondemnOrder(0.0), epoch=stage.epoch).stored_bytes is None
        assert stage.store.condemn_blobs(CondemnOrder(0.0, 10**9), epoch=stage.epoch).stored_bytes == 3

    def test_nothing_can_refer_to_a_condemned_blob(self, stage: Stage) -> None:
        [place] = stage.store_blobs(A)
        grant = stage.running("runs")
        condemn(stage)
        assert stage.submit("a", **needs(A)) == MissingBlobs("a", (A,))
        assert stage.finish(grant, result_ref=BlobRef(A, 3)).answer is ReportStatus.BLOB_MISSING
        assert stage.store.blobs_stored([place]) == [False]
        assert stage.store.blob_places([A]) == [None]

    def test_condemned_bytes_that_come_back_get_the_next_generation(self, stage: Stage) -> None:
        [old] = stage.store_blobs(A)
        condemn(stage)
        [new] = stage.store.place_blobs([BlobClaim(A, 3)])
        assert new == BlobPlace(A, 3, old.generation + 1, stored=False)
        stage.store.blobs_stored([new])
        stage.add("a", **needs(A))
        assert condemn(stage) == [old]
        assert stage.store.forget_blobs([old, new], epoch=stage.epoch) == 1
        assert stage.store.blob_places([A]) == [BlobPlace(A, 3, new.generation, True)]

    def test_condemned_blobs_come_again_until_they_are_forgotten(self, stage: Stage) -> None:
        stage.store_blobs(A, B)
        places = condemn(stage)
        assert condemn(stage, unused_since=0.0) == places
        assert stage.store.forget_blobs(places[:1], epoch=stage.epoch) == 1
        assert stage.store.forget_blobs(places[:1], epoch=stage.epoch) == 0
        assert condemn(stage, unused_since=0.0) == places[1:]

    def test_what_is_not_condemned_is_not_forgotten(self, stage: Stage) -> None:
        places = stage.store_blobs(A)
        assert stage.store.forget_blobs([*places, BlobPlace(B, 1)], epoch=stage.epoch) == 0
        assert stage.store.forget_blobs([], epoch=stage.epoch) == 0
        assert stage.store.blob_places([A]) == places

    def test_a_turn_that_is_taken_back_condemned_and_forgot_nothing(self, stage: Stage) -> None:
        [condemned, kept] = stage.store_blobs(A, B)
        stage.add("b", **needs(B))
        condemn(stage)
        stage.store_blobs(C)

        with stage.abandoned_turn():
            assert names(condemn(stage)) == "ac"
            stage.store.forget_blobs([condemned], epoch=stage.epoch)
        assert condemn(stage, unused_since=0.0) == [condemned]
        assert stage.store.blob_places([B, C]) == [kept, BlobPlace(C, 3, 0, True)]

    def test_collection_is_the_leaders_alone(self, stage: Stage) -> None:
        places = stage.store_blobs(A)
        old = stage.epoch
        stage.lead("leader-2")
        with pytest.raises(StaleEpoch):
            stage.store.condemn_blobs(CondemnOrder(FAR), epoch=old)
        with pytest.raises(StaleEpoch):
            stage.store.forget_blobs(places, epoch=old)
        assert stage.store.blob_places([A]) == places

    def test_collection_gets_past_many_blobs_that_are_in_use(self, stage: Stage) -> None:
        """A collection that divides its work has seen all blobs after a few calls."""
        used = [f"{number:064x}" for number in range(300)]
        stage.store_blobs(*used)
        stage.add("a", **needs(*used))
        stage.clock.advance(1)
        stage.store_blobs(A)
        assert any(names(condemn(stage, limit=1)) == "a" for _ in range(3))
