"""What those who bring, refer to and collect blobs may rely on. Part of `store_suite`."""

from __future__ import annotations

from typing import Any

import pytest

from tasuki.core.job import BlobRef, InputFile, State
from tasuki.core.store_messages import BlobClaim, BlobPlace, CondemnOrder, MissingBlobs, ReportStatus, Submitted
from tasuki.errors import Conflict, StaleEpoch
from tasuki.stores.common import GENERATIONS_BEGIN_AT
from tasuki.testing.store_leader import Abandoned
from tasuki.testing.store_stage import Stage, StoreCase

A, B, C, D = (letter * 64 for letter in "abcd")
FAR = 1e12
"""A time that everything was touched before."""


def needs(*sha256s: str) -> dict[str, Any]:
    """The fields of a job whose inputs are these blobs."""
    return {"files": tuple(InputFile(f"in{number}", sha256=sha256, size_bytes=3) for number, sha256 in enumerate(sha256s))}


def condemn(stage: Stage, *, unused_since: float = FAR, limit: int = 256) -> list[BlobPlace]:
    return list(stage.store.condemn_blobs(CondemnOrder(unused_since, limit=limit), epoch=stage.epoch).places)


def names(places: list[BlobPlace]) -> str:
    """The letters of the blobs, in order."""
    return "".join(place.sha256[0] for place in places)


class BlobCases(StoreCase):
    """place_blobs, blobs_stored, blob_places, condemn_blobs, forget_blobs; and what submit, finish and fail make of blobs."""

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

        def abandon() -> None:
            with stage.store.turn():
                stage.store.blobs_stored(stage.store.place_blobs([BlobClaim(A, 3), BlobClaim(B, 3)]))
                raise Abandoned

        with pytest.raises(Abandoned):
            abandon()
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

        def abandon() -> None:
            with stage.store.turn():
                assert names(condemn(stage)) == "ac"
                stage.store.forget_blobs([condemned], epoch=stage.epoch)
                raise Abandoned

        with pytest.raises(Abandoned):
            abandon()
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
        """However it divides its work, in a few calls it has seen them all."""
        used = [f"{number:064x}" for number in range(300)]
        stage.store_blobs(*used)
        stage.add("a", **needs(*used))
        stage.clock.advance(1)
        stage.store_blobs(A)
        assert any(names(condemn(stage, limit=1)) == "a" for _ in range(3))
