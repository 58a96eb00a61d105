"""Cases of the store suite for servers that must know what is ready: notes of a turn, queues, bounded walks."""

from __future__ import annotations

import pytest

from tasuki.core.pauses import PAUSES_MAX, PauseAnswer, PausedPattern, PauseOrder
from tasuki.core.store_messages import Assignment, ChosenJob, Grant, JobKind, LeaseHolder, LeaseStatus, ReportStatus
from tasuki.testing.store_leases import ids
from tasuki.testing.store_stage import GRACE_S, KEEP, PAST_LEASE_S, Stage, StoreCase

WALKED = 600  # subjects, more than a walk looks at in vain


def pause(stage: Stage, pattern: str, *, actor: str = "alice", reason: str = "", resume: bool = False) -> PauseAnswer:
    [answer] = stage.store.pause([PauseOrder(pattern, actor, reason, resume)])
    return answer


def chosen(job_id: str, priority: int = 5, group: str = "render") -> ChosenJob:
    return ChosenJob(job_id, priority, group)


class ReadyCases(StoreCase):
    """Cases of bounded walks over what is ready, and of the notes of a turn."""

    # -- notes ----------------------------------------------------------------------------------------------------
    def test_a_new_job_comes_back_to_no_queue(self, stage: Stage) -> None:
        stage.add("a")

        assert stage.came_back_to()

    def test_the_queue_of_a_retry_is_noted_unless_it_is_delayed(self, stage: Stage) -> None:
        stage.fail(stage.running("later", subject="x.later", backoff_s=10.0))
        assert stage.came_back_to()

        stage.fail(stage.running("now", subject="x.now", backoff_s=0.0))

        assert stage.came_back_to("x.now")

    def test_the_queue_of_a_job_that_is_given_back_is_noted(self, stage: Stage) -> None:
        stage.release(stage.assigned("a", subject="x.1"))

        assert stage.came_back_to("x.1")

    def test_the_queues_of_ended_leases_are_noted(self, stage: Stage) -> None:
        stage.assigned("lost", subject="x.lost", max_losses=3)
        stage.running("orphan", lease=KEEP, subject="x.orphan")
        stage.clock.advance(PAST_LEASE_S + GRACE_S)

        stage.reap()

        assert stage.came_back_to("x.lost", "x.orphan")

    def test_the_queues_of_an_owner_that_was_shut_out_are_noted(self, stage: Stage) -> None:
        stage.add("a", subject="x.1")
        stage.lease(owner="token-1")

        stage.store.end_leases([LeaseHolder("token-1")])

        assert stage.came_back_to("x.1")

    def test_the_queue_of_a_job_that_is_set_going_again_is_noted(self, stage: Stage) -> None:
        stage.ended("a", "FAILED")
        stage.store.requeue(["a"], actor="alice")
        assert stage.came_back_to("render.eu")

        stage.store.cancel(["a"], actor="alice")
        stage.submit("a", on_failed="rerun", max_retries=0)

        assert stage.came_back_to("render.eu")

    def test_the_notes_are_those_of_one_turn(self, stage: Stage) -> None:
        grants = [stage.assigned(f"job-{number}", subject=f"x.{number}") for number in range(2)]
        with stage.store.turn():
            for grant in grants:
                stage.release(grant)
        assert stage.came_back_to("x.0", "x.1")

        stage.add("a")

        assert stage.came_back_to()

    # -- queues ---------------------------------------------------------------------------------------------------
    def test_all_queues_with_ready_jobs_are_named_the_highest_priority_first(self, stage: Stage) -> None:
        stage.add("low", subject="a.x", priority=1)
        stage.add("high", "high-2", subject="b.x", priority=9)
        stage.add("command", subject="b.x", priority=9, exec="render")
        stage.add("later", subject="c.x", not_before=stage.clock.wall() + 10)
        stage.assigned("taken", subject="d.x")

        page = stage.store.ready_queues()

        assert page.place is None
        assert sorted(page.queues[:2]) == [("b.x", JobKind.COMMAND, "render"), ("b.x", JobKind.HANDLER, "")]
        assert page.queues[2:] == [("a.x", JobKind.HANDLER, "")]

    def test_the_walk_over_queues_goes_on_at_its_place(self, stage: Stage) -> None:
        for number in range(7):
            stage.add(f"job-{number}", subject=f"g{number % 3}.s{number}", priority=number % 2)
        names: list[str] = []
        page = stage.store.ready_queues(limit=2)
        names += [queue.subject for queue in page.queues]
        stage.take("job-0")
        stage.add("new", subject="g0.s9", priority=0)

        while page.place is not None:
            page = stage.store.ready_queues(page.place, limit=2)
            assert len(page.queues) <= 2
            names += [queue.subject for queue in page.queues]

        assert len(names) == len(set(names))
        assert {f"g{number % 3}.s{number}" for number in range(1, 7)} <= set(names)

    def test_the_oldest_jobs_of_each_queue_of_a_subject_are_named(self, stage: Stage) -> None:
        stage.add("a-1", "a-2", "a-3", subject="render.x", exec="a")
        stage.add("b-1", subject="render.x", exec="b")
        stage.add("high", subject="render.x", priority=9)
        stage.add("longer", subject="render.x.y")
        stage.add("other", subject="render.w")

        found = stage.store.ready_jobs("render.x", limit=2)

        assert found[0] == "high"
        assert sorted(found[1:]) == ["a-1", "a-2", "b-1"]
        assert stage.store.ready_jobs("nothing") == []

    # -- routed subjects ------------------------------------------------------------------------------------------
    def test_a_routed_subject_is_granted_only_where_its_job_is_chosen(self, stage: Stage) -> None:
        stage.add("a", "b", subject="render.x")
        stage.add("plain", subject="other.x")
        routed = ("render.>",)

        assert ids(stage.lease("w1", limit=10, routed=routed)) == ["plain"]
        assert ids(stage.lease("w1", limit=10, patterns=("render.x",), routed=routed)) == []
        assert ids(stage.lease("w1", limit=10, patterns=(), routed=routed, chosen=(chosen("b"),))) == ["b"]
        assert ids(stage.lease("w2", limit=10, routed=routed, chosen=(chosen("b"), chosen("?"), chosen("a")))) == ["a"]

    def test_chosen_jobs_break_neither_priority_nor_fairness_nor_the_limit(self, stage: Stage) -> None:
        stage.add("high", subject="other.x", priority=9)
        stage.add("c-1", "c-2", "c-3", subject="render.x")
        stage.add("o-1", "o-2", subject="other.x")
        jobs = (chosen("c-1"), chosen("c-2"), chosen("c-3"))

        granted = ids(stage.lease(limit=3, patterns=("other.>",), routed=("render.>",), chosen=jobs))

        assert granted[0] == "high"
        assert sorted(granted[1:]) == ["c-1", "o-1"]

    def test_a_chosen_job_is_granted_once_however_often_its_group_has_a_turn(self, stage: Stage) -> None:
        stage.add("c", subject="render.x")
        stage.add("o-1", "o-2", "o-3", subject="other.x")

        granted = ids(stage.lease(limit=9, patterns=(">",), chosen=(chosen("c"),)))

        assert sorted(granted) == ["c", "o-1", "o-2", "o-3"]

    def test_a_chosen_job_that_is_not_ready_is_not_granted(self, stage: Stage) -> None:
        stage.assigned("taken", "w9", subject="render.x")
        stage.add("later", subject="render.x", not_before=stage.clock.wall() + 10)
        stage.add("late", subject="render.x", not_after=stage.clock.wall() + 1)
        stage.clock.advance(2)

        assert stage.lease(limit=5, patterns=(), chosen=(chosen("taken"), chosen("later"), chosen("late"))) == []

    def test_a_routed_subject_that_names_a_live_worker_is_for_that_worker(self, stage: Stage) -> None:
        stage.add("a", subject="render.w1")
        live = {"w1": ("render.*",), "w2": (">",)}

        assert ids(stage.lease("w2", live_workers=live, routed=("render.>",))) == []
        assert ids(stage.lease("w1", live_workers=live, routed=("render.>",))) == ["a"]

    # -- pauses ---------------------------------------------------------------------------------------------------
    def test_a_paused_subject_is_granted_to_nobody_until_it_is_resumed(self, stage: Stage) -> None:
        stage.add("before", subject="render.x")
        assert pause(stage, "render.>") is PauseAnswer.DONE
        stage.add("after", subject="render.x.y")
        stage.add("other", subject="mail.x")

        assert ids(stage.lease(limit=10)) == ["other"]
        assert ids(stage.lease(limit=10, patterns=("render.x", "render.*.y", "render.>"))) == []
        assert pause(stage, "render.>", resume=True) is PauseAnswer.DONE
        assert sorted(ids(stage.lease(limit=10))) == ["after", "before"]

    @pytest.mark.parametrize(
        ("pattern", "left"),
        [
            (">", []),
            ("a.*", ["a.b.c", "b.b", "b.b.c"]),
            ("*.b", ["a.b.c", "a.c", "b.b.c"]),
            ("a.b", ["a.b.c", "a.c", "b.b", "b.b.c"]),
            ("a.>", ["b.b", "b.b.c"]),
            ("*.b.>", ["a.b", "a.c", "b.b"]),
        ],
    )
    def test_a_pause_holds_exactly_the_subjects_of_its_pattern(self, stage: Stage, pattern: str, left: list[str]) -> None:
        for subject in ("a.b", "a.b.c", "a.c", "b.b", "b.b.c"):
            stage.add(subject, subject=subject)
        pause(stage, pattern)

        found = [queue.subject for queue in stage.store.ready_queues().queues]

        assert sorted(found) == left
        assert [subject for subject in ("a.b", "a.b.c", "a.c", "b.b", "b.b.c") if stage.store.ready_jobs(subject)] == left
        assert sorted(ids(stage.lease(limit=10))) == left

    def test_overlapping_pauses_hold_until_the_last_is_resumed(self, stage: Stage) -> None:
        stage.add("a", subject="render.x")
        pause(stage, "render.>")
        pause(stage, "*.x")

        pause(stage, "render.>", resume=True)
        assert stage.lease() == []
        pause(stage, "*.x", resume=True)

        assert ids(stage.lease()) == ["a"]

    def test_a_paused_job_is_not_granted_by_its_id_nor_because_it_was_chosen(self, stage: Stage) -> None:
        stage.add("a", subject="render.x")
        pause(stage, "render.x")

        assert stage.lease(patterns=(), job_ids=("a",)) == []
        assert stage.lease(patterns=(), routed=("render.>",), chosen=(chosen("a"),)) == []

        pause(stage, "render.x", resume=True)
        assert ids(stage.lease(patterns=(), job_ids=("a",))) == ["a"]

    def test_a_paused_job_is_not_assigned(self, stage: Stage) -> None:
        stage.add("a", subject="render.x")
        pause(stage, "render.x")
        order = Assignment(job_id="a", worker_id="w1", incarnation="i1")

        assert stage.store.assign([order], epoch=stage.epoch) == [None]

        pause(stage, "render.x", resume=True)
        assert [grant and grant.job_id for grant in stage.store.assign([order], epoch=stage.epoch)] == ["a"]

    def test_a_running_job_of_a_paused_subject_goes_on_and_its_retry_waits(self, stage: Stage) -> None:
        grant = stage.running("a", subject="render.x", backoff_s=0.0, max_retries=1)
        finished = stage.running("b", subject="render.x")
        pause(stage, "render.>")

        assert stage.renew(grant) is LeaseStatus.GO_ON
        assert stage.finish(finished).answer is ReportStatus.RECORDED
        stage.fail(grant)
        assert stage.lease() == []
        pause(stage, "render.>", resume=True)

        assert ids(stage.lease()) == ["a"]

    def test_an_expired_lease_of_a_paused_subject_is_not_taken_over(self, stage: Stage) -> None:
        stage.assigned("a", subject="render.x")
        pause(stage, "render.>")
        stage.clock.advance(PAST_LEASE_S)

        assert stage.lease("w2", patterns=(), job_ids=("a",)) == []

    def test_who_paused_a_pattern_first_and_why_is_kept(self, stage: Stage) -> None:
        since = stage.clock.wall()
        pause(stage, "b.>", reason="the licence\0 server")
        stage.clock.advance(5)

        assert pause(stage, "b.>", actor="bob", reason="other") is PauseAnswer.AS_BEFORE
        assert pause(stage, "a.x", actor="bob") is PauseAnswer.DONE
        assert pause(stage, "c", resume=True) is PauseAnswer.AS_BEFORE

        assert stage.store.paused() == [
            PausedPattern("a.x", since + 5, "bob", ""),
            PausedPattern("b.>", since, "alice", "the licence\ufffd server"),
        ]

    def test_the_number_of_pauses_is_limited(self, stage: Stage) -> None:
        orders = [PauseOrder(f"p{number}.>", "alice") for number in range(PAUSES_MAX + 1)]

        assert stage.store.pause(orders) == [PauseAnswer.DONE] * PAUSES_MAX + [PauseAnswer.TOO_MANY]

        assert len(stage.store.paused()) == PAUSES_MAX
        assert pause(stage, "p0.>", resume=True) is PauseAnswer.DONE
        assert pause(stage, "new.>") is PauseAnswer.DONE

    def test_a_pause_holds_for_a_lease_of_its_own_turn_and_is_gone_with_it(self, stage: Stage) -> None:
        stage.add("a", subject="render.x")

        def turn() -> None:
            with stage.store.turn():
                pause(stage, "render.>")
                assert stage.lease() == []
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            turn()

        assert stage.store.paused() == []
        assert ids(stage.lease()) == ["a"]

    def test_any_number_of_paused_subjects_costs_a_walk_nothing(self, stage: Stage) -> None:
        stage.add(*[f"a-{number}" for number in range(3)], subject="z.last")
        for number in range(WALKED):
            stage.add(f"job-{number}", subject=f"m.{number:04}")
        pause(stage, "m.>")

        assert len(stage.lease(limit=3)) == 3
        assert stage.lease(limit=3) == []

        assert stage.store.notes().cut == ()  # no walk ended at its bound: nothing was looked at in vain

    # -- one worker alone -----------------------------------------------------------------------------------------
    def test_a_subject_with_an_at_sign_is_for_that_worker_alone_also_while_it_is_away(self, stage: Stage) -> None:
        stage.add("a", subject="render.@w.1")
        stage.add("b", subject="@w2")
        stage.add("c", subject="mail.me@w2")

        assert ids(stage.lease("w3", limit=10)) == ["c"]
        assert ids(stage.lease("w.1", limit=10, patterns=("render.@w.1",))) == ["a"]
        assert ids(stage.lease("w2", limit=10)) == ["b"]

    # -- release by a server --------------------------------------------------------------------------------------
    def test_a_lease_that_must_be_over_is_released_only_in_its_margin(self, stage: Stage) -> None:
        grant = stage.assigned("a", lease={"ttl_s": 15.0})
        stage.clock.advance(14.0)
        assert not stage.release(grant, is_over=True)
        stage.renew(grant)
        stage.clock.advance(14.0)
        assert not stage.release(grant, is_over=True)
        stage.clock.advance(1.5)

        assert stage.release(grant, is_over=True)

        assert (stage.job("a").state, stage.job("a").losses) == ("PENDING", 0)

    # -- bounded walks --------------------------------------------------------------------------------------------
    def test_a_walk_that_was_cut_short_is_noted_and_goes_on(self, stage: Stage) -> None:
        for number in range(0, 1500, 250):
            names = [f"render.{place:05}.gpu" for place in range(number, number + 250)]
            stage.store.submit([stage.submission(name, subject=name) for name in names])
        stage.add("wanted", subject="render.zzz.cpu")

        granted: list[Grant] = []
        while not granted:
            granted = stage.lease(patterns=("render.*.cpu",))
            assert granted or stage.store.notes().cut == (0,)

        assert ids(granted) == ["wanted"]

    def test_a_subject_that_a_pattern_names_is_found_whatever_else_waits(self, stage: Stage) -> None:
        names = [f"render.{number:05}.gpu" for number in range(700)]
        stage.store.submit([stage.submission(name, subject=name, priority=9) for name in names])
        stage.add("wanted", subject="zoo.7", priority=1)

        assert ids(stage.lease(patterns=("*.*.cpu", "zoo.7"))) == ["wanted"]
        assert ids(stage.lease(patterns=("*.*.gpu",), limit=3)) == names[:3]
