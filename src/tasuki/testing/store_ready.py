"""Cases of the store suite for servers that must know what is ready: notes of a turn, queues, bounded walks."""

from __future__ import annotations

from tasuki.core.store_messages import Grant, JobKind, LeaseHolder
from tasuki.testing.store_leases import ids
from tasuki.testing.store_stage import GRACE_S, KEEP, PAST_LEASE_S, Stage, StoreCase


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
