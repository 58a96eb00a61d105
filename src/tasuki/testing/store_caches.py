"""Cases of the store suite for caches (files by name, conflicts, the blobs that collection leaves alone for them) and rollups."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from tasuki.core.job import BlobRef, State
from tasuki.core.statistics import ROLLUP_DAYS, ROLLUP_S, GroupStatistics, QueueLength, Rollup, current_minute
from tasuki.core.store_messages import CacheEntry, CacheOrder, CacheStored, CacheSummary, MissingBlobs
from tasuki.errors import CacheConflict
from tasuki.testing.store_leader import FAR, A, B, C, condemn, names, needs
from tasuki.testing.store_stage import Stage, StoreCase


def put(stage: Stage, cache_id: str, target: str = "render.>", **files: str) -> object:
    """Put files of three bytes each, by name; return the answer, for a conflict its type."""
    entries = tuple(CacheEntry(name, sha256, 3) for name, sha256 in files.items())
    [answer] = stage.store.put_cache([CacheOrder(cache_id, target, "token:a", entries)])
    return type(answer) if isinstance(answer, CacheConflict) else answer


class CacheCases(StoreCase):
    """Cases of put_cache, remove_cache, cached_files, cache, caches; and of the references of caches."""

    def test_files_are_added_once_and_stay_what_they_are(self, stage: Stage) -> None:
        stage.store_blobs(A, B, C)
        assert put(stage, "one", b=A, a=B) == CacheStored(2)
        assert put(stage, "one", c=A, a=B) == CacheStored(1)
        assert put(stage, "one", d=C, a=A) is CacheConflict
        assert put(stage, "one", target="render.*", d=C) is CacheConflict
        assert [(file.name, file.sha256) for file in stage.store.cache("one")] == [("a", B), ("b", A), ("c", A)]
        assert [file.name for file in stage.store.cache("one", after="a", limit=1)] == ["b"]
        [there, *nowhere] = stage.store.cached_files([("one", "b"), ("one", "d"), ("two", "b")])
        assert there is not None
        assert (there.entry, there.target, there.owner) == (CacheEntry("b", A, 3), "render.>", "token:a")
        assert nowhere == [None, None]

    def test_a_file_that_cannot_lie_in_one_folder_with_the_others_is_refused(self, stage: Stage) -> None:
        stage.store_blobs(A)
        assert put(stage, "one", **{"a/b": A, "c": A}) == CacheStored(2)
        assert [put(stage, "one", **{name: A}) for name in ("a", "A", "a/b/x", "a/B/x", "A/B", "C", "c/d")] == [CacheConflict] * 7
        assert put(stage, "one", **{"a/c": A, "A/d": A, "ab": A, "a/b": A, "a!": A}) == CacheStored(4)
        assert put(stage, "two", a=A) == CacheStored(1)
        assert stage.store.remove_cache([("one", "render.>")]) == [6]
        assert put(stage, "one", a=A) == CacheStored(1)

    def test_orders_of_one_batch_see_each_other(self, stage: Stage) -> None:
        stage.store_blobs(A, B)
        orders = [CacheOrder("one", ">", "token:a", (CacheEntry("a", sha256, 3),)) for sha256 in (A, B, A)]
        first, second, third = stage.store.put_cache(orders)
        assert (first, type(second), third) == (CacheStored(1), CacheConflict, CacheStored(0))
        assert (stage.store.put_cache([]), stage.store.remove_cache([]), stage.store.cached_files([])) == ([], [], [])

    def test_a_file_whose_blob_is_not_stored_is_refused_with_all_others(self, stage: Stage) -> None:
        stage.store_blobs(A)
        assert put(stage, "one", a=A, b=C, c=B) == MissingBlobs("one", (B, C))
        assert (stage.store.cache("one"), stage.store.caches()) == ([], [])

    def test_caches_are_listed_by_id_and_gone_when_they_are_removed(self, stage: Stage) -> None:
        stage.store_blobs(A, B)
        at = stage.clock.wall()
        put(stage, "two", b=B)
        put(stage, "one", a=A, b=A)
        one = CacheSummary("one", 2, 6, "render.>", "token:a", at)
        assert stage.store.caches() == [one, CacheSummary("two", 1, 3, "render.>", "token:a", at)]
        assert [found.cache_id for found in stage.store.caches(after="one", limit=1)] == ["two"]
        assert stage.store.remove_cache([("two", "math"), ("three", "render.>")]) == [0, 0]
        assert stage.store.remove_cache([("two", "render.>")]) == [1]
        assert stage.store.caches() == [one]
        assert put(stage, "two", target="math", b=A) == CacheStored(1)

    def test_a_blob_of_a_cache_is_condemned_when_the_last_reference_is_gone(self, stage: Stage) -> None:
        stage.store_blobs(A, B, C)
        put(stage, "one", a=A, again=A, b=B)
        put(stage, "two", a=A)
        stage.add("job", **needs(B))
        assert names(condemn(stage)) == "c"
        assert sorted(stage.store.blob_owners(A)) == ["cache:one", "cache:two"]
        stage.store.remove_cache([("one", "render.>")])
        assert names(condemn(stage)) == "c"
        stage.store.remove_cache([("two", "render.>")])
        stage.store.cancel(["job"], actor="alice")
        stage.store.prune(before=FAR, epoch=stage.epoch)
        assert names(condemn(stage)) == "cab"

    def test_a_turn_that_is_taken_back_put_and_removed_nothing(self, stage: Stage) -> None:
        stage.store_blobs(A, B)
        put(stage, "one", a=A)
        with stage.abandoned_turn():
            assert put(stage, "two", b=B) == CacheStored(1)
            assert stage.store.remove_cache([("one", "render.>")]) == [1]
        assert [found.cache_id for found in stage.store.caches()] == ["one"]
        assert names(condemn(stage)) == "b"


def rollup(minute: int, server_id: str = "a", submitted: int = 1) -> Rollup:
    counted = GroupStatistics(submitted=submitted, delivery_s=0.02, delivery={4: 1})
    return Rollup(minute, server_id, {"render": counted}, {"render": QueueLength(3, 2)})


class StatisticsCases(StoreCase):
    """Cases of what statistics are made of: the groups that answers name, add_rollups and rollups, and prune for them."""

    def test_answers_by_which_servers_count_name_the_group_of_the_job(self, stage: Stage) -> None:
        # Another server may have stored and leased it.
        fields: dict[str, Any] = {"subject": "job.assign.math.x", "max_retries": 0, "max_losses": 0}
        done, broken, again = (stage.running(job_id, **fields) for job_id in ("done", "broken", "again"))
        blob = BlobRef(A, 3)

        missing, finished, repeated = stage.finish(done, result_ref=blob), stage.finish(done), stage.finish(done)
        dead, fenced = stage.fail(broken, error_code="TIMED_OUT"), stage.finish(broken)
        unknown = stage.finish(replace(broken, job_id="unknown"))
        [lost] = stage.lose()
        stage.add("late", **fields, not_after=stage.clock.wall() + 1)
        stage.clock.advance(2)

        answers = (missing, finished, repeated, dead, fenced, unknown)
        words = ["BLOB_MISSING", "RECORDED", "REPEATED", "RECORDED", "FENCED", "FENCED"]
        assert [answer.answer.name for answer in answers] == words
        assert [answer.group for answer in answers] == ["math"] * 5 + [""]
        assert (dead.state, lost.job_id, lost.state, lost.group) == (State.TIMED_OUT, "again", State.FAILED, "math")
        assert stage.finish(again).group == "math"
        assert stage.store.skip(epoch=stage.epoch) == [("late", "math")]

    def test_rollups_are_read_by_minute_as_they_were_written(self, stage: Stage) -> None:
        late, early, other = rollup(180), rollup(60), rollup(60, "b", submitted=2)

        stage.store.add_rollups([late])
        stage.store.add_rollups([early, other])

        assert sorted(stage.store.rollups(60, 180), key=lambda one: one.server_id) == [early, other]
        assert [one.minute for one in stage.store.rollups(0, 1_000)] == [60, 60, 180]
        assert (stage.store.rollups(61, 180), stage.store.add_rollups([])) == ([], [])

    def test_a_rollup_that_is_written_again_changes_nothing(self, stage: Stage) -> None:
        stage.store.add_rollups([rollup(60)])

        assert stage.store.add_rollups([rollup(60), rollup(120)]) == [None, None]

        assert stage.store.rollups(0, 1_000) == [rollup(60), rollup(120)]

    def test_a_rollup_of_a_turn_that_failed_was_never_written(self, stage: Stage) -> None:
        stage.store.add_rollups([rollup(60)])
        with suppress(ArithmeticError), stage.store.turn():
            stage.store.add_rollups([rollup(120)])
            raise ArithmeticError

        assert stage.store.rollups(0, 1_000) == [rollup(60)]

    def test_rollups_are_kept_for_days_and_then_pruned(self, stage: Stage) -> None:
        now = current_minute(stage.clock.wall())
        old, kept = now - ROLLUP_DAYS * 86_400 - 2 * ROLLUP_S, now - ROLLUP_DAYS * 86_400 + 2 * ROLLUP_S
        stage.store.add_rollups([rollup(old), rollup(kept), rollup(now)])

        stage.store.prune(before=0.0, epoch=stage.epoch)

        assert [one.minute for one in stage.store.rollups(0, now + 1)] == [kept, now]
