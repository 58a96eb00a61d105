"""The conformance suite of the coordination contract. A new back end subclasses it and gives two fixtures:

    class TestMyCoordination(CoordinationSuite):
        @pytest.fixture
        def make_coordination(self):
            return lambda: MyCoordination(...)   # each call: what another process would open, on the same state

        @pytest.fixture
        def let_pass(self):
            return lambda seconds: ...           # make the state as if so much time had passed

Touches only what `make_coordination` opens. With `pytest.register_assert_rewrite("tasuki.testing.coords_suite")` in a
conftest.py, failures show their values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from tasuki.coords.coordination import (
    FORGET_AFTER_S,
    FORGET_BATCH,
    LEADER,
    MEMBER_TIMEOUT_S,
    ClusterMember,
    Coordination,
    LiveMember,
)
from tasuki.core.election import LOCK_TTL_MAX_S, Busy, Locked
from tasuki.errors import InvalidInput

TTL_S = 10.0
SCOPE = "leader"

MakeCoordination = Callable[[], Coordination]
LetPass = Callable[[float], None]


def member(name: str = "a", **fields: Any) -> ClusterMember:
    return ClusterMember(
        **{"member_id": name, "incarnation": f"{name}-1", "version": 1, "info": b"info of " + name.encode(), **fields}
    )


def seen_by(coordination: Coordination, *, seen: dict[str, int] | None = None, me: str = "observer") -> dict[str, LiveMember]:
    """Return the members that are alive besides the one that asks."""
    view = coordination.beat(member(me), seen=seen or {})
    return {live.member_id: live for live in view.members if live.member_id != me}


class CoordinationCase:
    """Two processes, `one` and `two`, on the same coordination."""

    @pytest.fixture
    def one(self, make_coordination: MakeCoordination) -> Coordination:
        return make_coordination()

    @pytest.fixture
    def two(self, make_coordination: MakeCoordination) -> Coordination:
        return make_coordination()


class MemberCases(CoordinationCase):
    """Cases of beat and leave."""

    def test_who_beats_is_seen_by_the_others_and_by_itself(self, one: Coordination, two: Coordination) -> None:
        mine = one.beat(member("a", kind="server", schema_version=7), seen={})

        theirs = two.beat(member("b"), seen={})

        told = LiveMember(member_id="a", kind="server", incarnation="a-1", schema_version=7, version=1, info=b"info of a")
        assert [replace(live, age_s=0.0) for live in mine.members] == [told]
        assert [live.member_id for live in theirs.members] == ["a", "b"]
        assert replace(theirs.members[0], age_s=0.0) == told
        assert all(0.0 <= live.age_s < MEMBER_TIMEOUT_S for live in theirs.members)

    def test_info_comes_only_where_its_version_was_not_seen(self, one: Coordination, two: Coordination) -> None:
        one.beat(member("a", version=4), seen={})

        assert seen_by(two, seen={"a": 4})["a"].info is None
        assert seen_by(two, seen={"a": 3})["a"].info == b"info of a"
        assert seen_by(two, seen={"b": 4})["a"].info == b"info of a"

    def test_new_info_with_a_new_version_is_seen(self, one: Coordination, two: Coordination) -> None:
        one.beat(member("a", version=1, info=b"old"), seen={})

        one.beat(member("a", version=2, info=b"new"), seen={})

        found = seen_by(two, seen={"a": 1})["a"]
        assert (found.version, found.info) == (2, b"new")

    def test_new_info_without_a_new_version_is_not_written(self, one: Coordination, two: Coordination) -> None:
        one.beat(member("a", info=b"old"), seen={})

        one.beat(member("a", info=b"new"), seen={})

        assert seen_by(two)["a"].info == b"old"

    def test_info_of_a_new_incarnation_is_written_whatever_its_version(self, one: Coordination, two: Coordination) -> None:
        one.beat(member("a", incarnation="first", info=b"old"), seen={})

        one.beat(member("a", incarnation="second", info=b"new"), seen={})

        found = seen_by(two)["a"]
        assert (found.incarnation, found.info) == ("second", b"new")

    def test_empty_info_is_info(self, one: Coordination, two: Coordination) -> None:
        one.beat(member("a", info=b""), seen={})

        assert seen_by(two)["a"].info == b""

    def test_any_bytes_can_be_told(self, one: Coordination, two: Coordination) -> None:
        info = bytes(range(256)) * 512

        one.beat(member("a", info=info), seen={})

        assert seen_by(two)["a"].info == info

    def test_silence_makes_a_member_dead(self, one: Coordination, two: Coordination, let_pass: LetPass) -> None:
        one.beat(member("a"), seen={})
        let_pass(MEMBER_TIMEOUT_S / 2)
        assert "a" in seen_by(two)

        let_pass(MEMBER_TIMEOUT_S / 2)

        assert "a" not in seen_by(two)

    def test_a_beat_keeps_a_member_alive(self, one: Coordination, two: Coordination, let_pass: LetPass) -> None:
        for _ in range(3):
            one.beat(member("a"), seen={})
            let_pass(MEMBER_TIMEOUT_S / 2)

        assert "a" in seen_by(two)

    def test_a_dead_member_that_beats_again_is_alive_with_its_info(
        self, one: Coordination, two: Coordination, let_pass: LetPass
    ) -> None:
        one.beat(member("a"), seen={})
        let_pass(2 * FORGET_AFTER_S)
        assert not seen_by(two)

        one.beat(member("a"), seen={})

        assert seen_by(two)["a"].info == b"info of a"

    def test_who_leaves_is_gone_at_once(self, one: Coordination, two: Coordination) -> None:
        one.beat(member("a"), seen={})

        one.leave("a", "a-1")

        assert not seen_by(two)

    def test_an_older_incarnation_cannot_make_the_new_one_leave(self, one: Coordination, two: Coordination) -> None:
        one.beat(member("a", incarnation="second"), seen={})

        one.leave("a", "first")

        assert "a" in seen_by(two)

    def test_a_silent_member_has_an_age_until_it_leaves(self, one: Coordination, two: Coordination, let_pass: LetPass) -> None:
        one.beat(member("a"), seen={})
        one.beat(member("b"), seen={})
        one.leave("b", "b-1")
        let_pass(2 * MEMBER_TIMEOUT_S)

        ages = two.heartbeat_ages()

        assert list(ages) == ["a"]
        assert 2 * MEMBER_TIMEOUT_S <= ages["a"] < 3 * MEMBER_TIMEOUT_S

    def test_a_beat_from_the_future_is_no_sign_of_life(self, one: Coordination, two: Coordination, let_pass: LetPass) -> None:
        one.beat(member("a"), seen={})

        let_pass(-2 * MEMBER_TIMEOUT_S)  # the coordination's clock was set back

        assert not seen_by(two)

    def test_more_dead_members_than_one_beat_removes_are_no_trouble(self, one: Coordination, let_pass: LetPass) -> None:
        for number in range(FORGET_BATCH + 1):
            one.beat(member(f"m{number}"), seen={})
        let_pass(2 * FORGET_AFTER_S)

        assert not seen_by(one)
        assert not seen_by(one)


class LockCases(CoordinationCase):
    """Cases of acquire, renew and release."""

    @pytest.mark.parametrize("floor", [0, 41])
    def test_a_free_lock_is_given_with_the_first_epoch_above_the_floor(self, one: Coordination, floor: int) -> None:
        assert one.acquire(SCOPE, "one", TTL_S, floor) == Locked(floor + 1)

    def test_the_epoch_is_higher_than_the_last_one_where_the_floor_is_lower(self, one: Coordination, let_pass: LetPass) -> None:
        one.acquire(SCOPE, "one", TTL_S, 41)
        let_pass(TTL_S)

        assert one.acquire(SCOPE, "one", TTL_S, 7) == Locked(43)

    def test_a_held_lock_is_busy_for_others_and_says_how_long(
        self, one: Coordination, two: Coordination, let_pass: LetPass
    ) -> None:
        one.acquire(SCOPE, "one", TTL_S, 0)
        let_pass(4)

        busy = two.acquire(SCOPE, "two", TTL_S, 0)

        assert isinstance(busy, Busy)
        assert busy.holder == "one"
        assert 1 < busy.left_s <= TTL_S - 4

    def test_a_held_lock_is_busy_for_its_holder_too(self, one: Coordination) -> None:
        one.acquire(SCOPE, "one", TTL_S, 0)

        assert isinstance(one.acquire(SCOPE, "one", TTL_S, 0), Busy)

    def test_asking_for_a_held_lock_uses_no_epoch(self, one: Coordination, two: Coordination, let_pass: LetPass) -> None:
        one.acquire(SCOPE, "one", TTL_S, 0)
        two.acquire(SCOPE, "two", TTL_S, 100)
        let_pass(TTL_S)

        assert two.acquire(SCOPE, "two", TTL_S, 0) == Locked(2)

    def test_a_renewed_lock_lasts_from_the_renewal(self, one: Coordination, two: Coordination, let_pass: LetPass) -> None:
        one.acquire(SCOPE, "one", TTL_S, 0)
        let_pass(TTL_S * 0.6)
        assert one.renew(SCOPE, "one", 1, TTL_S)
        let_pass(TTL_S * 0.6)

        assert isinstance(two.acquire(SCOPE, "two", TTL_S, 0), Busy)

    def test_a_lock_that_is_over_is_not_renewed_even_if_nobody_took_it(self, one: Coordination, let_pass: LetPass) -> None:
        one.acquire(SCOPE, "one", TTL_S, 0)

        let_pass(TTL_S)

        assert not one.renew(SCOPE, "one", 1, TTL_S)
        assert one.acquire(SCOPE, "one", TTL_S, 0) == Locked(2)

    def test_a_lock_that_is_over_goes_to_another_with_the_next_epoch_and_is_not_renewed(
        self, one: Coordination, two: Coordination, let_pass: LetPass
    ) -> None:
        one.acquire(SCOPE, "one", TTL_S, 0)

        let_pass(TTL_S)

        assert two.acquire(SCOPE, "two", TTL_S, 0) == Locked(2)
        assert not one.renew(SCOPE, "one", 1, TTL_S)
        assert two.renew(SCOPE, "two", 2, TTL_S)

    @pytest.mark.parametrize(("holder", "epoch"), [("one", 1), ("one", 3), ("two", 2)])
    def test_only_holder_and_epoch_together_own_the_lock(
        self, one: Coordination, let_pass: LetPass, holder: str, epoch: int
    ) -> None:
        one.acquire(SCOPE, "one", TTL_S, 0)
        let_pass(TTL_S)
        one.acquire(SCOPE, "one", TTL_S, 0)

        assert not one.renew(SCOPE, holder, epoch, TTL_S)
        assert not one.release(SCOPE, holder, epoch)
        assert one.renew(SCOPE, "one", 2, TTL_S)

    def test_a_lock_that_never_was_is_neither_renewed_nor_released(self, one: Coordination) -> None:
        assert not one.renew(SCOPE, "one", 1, TTL_S)
        assert not one.release(SCOPE, "one", 1)

    def test_a_released_lock_is_free_and_its_epoch_stays_used(self, one: Coordination, two: Coordination) -> None:
        one.acquire(SCOPE, "one", TTL_S, 0)

        assert one.release(SCOPE, "one", 1)

        assert not one.renew(SCOPE, "one", 1, TTL_S)
        assert not one.release(SCOPE, "one", 1)
        assert two.acquire(SCOPE, "two", TTL_S, 0) == Locked(2)

    def test_a_sub_leader_ends_the_lock_of_the_leader_that_it_knows_and_of_no_later_one(
        self, one: Coordination, two: Coordination
    ) -> None:
        one.acquire(SCOPE, "one", TTL_S, 0)
        assert two.release(SCOPE, "one", 1)
        assert two.acquire(SCOPE, "two", TTL_S, 0) == Locked(2)

        assert not one.release(SCOPE, "one", 1)

        assert two.renew(SCOPE, "two", 2, TTL_S)

    def test_scopes_are_apart(self, one: Coordination, two: Coordination) -> None:
        assert one.acquire("a", "one", TTL_S, 0) == Locked(1)
        assert two.acquire("b", "two", TTL_S, 8) == Locked(9)
        assert not two.release("a", "two", 9)

    def test_a_lock_that_seems_to_last_too_long_is_over(self, one: Coordination, two: Coordination, let_pass: LetPass) -> None:
        one.acquire(SCOPE, "one", TTL_S, 0)

        let_pass(-2 * LOCK_TTL_MAX_S)  # the coordination's clock was set back

        assert not one.renew(SCOPE, "one", 1, TTL_S)
        assert two.acquire(SCOPE, "two", TTL_S, 0) == Locked(2)

    @pytest.mark.parametrize("ttl_s", [0.0, -1.0, LOCK_TTL_MAX_S + 1, float("nan")])
    def test_a_ttl_that_no_lock_may_have_is_refused(self, one: Coordination, ttl_s: float) -> None:
        with pytest.raises(InvalidInput):
            one.acquire(SCOPE, "one", ttl_s, 0)
        with pytest.raises(InvalidInput):
            one.renew(SCOPE, "one", 1, ttl_s)


class DegradeCases(CoordinationCase):
    """A leader that is to step down."""

    def test_only_the_leader_is_told_to_step_down_and_once(self, one: Coordination, two: Coordination) -> None:
        leader = member("leads", led_ago_s=0.0)
        assert not one.beat(leader, seen={}).degraded

        two.degrade()
        two.degrade()

        assert not two.beat(member("follows"), seen={}).degraded
        assert [one.beat(leader, seen={}).degraded for _ in range(2)] == [True, False]


class LeaderSeenCases(CoordinationCase):
    """The time since the store took the last turn of a leader."""

    def test_all_are_told_when_the_leader_last_did_its_work(self, one: Coordination, two: Coordination) -> None:
        assert two.beat(member("follows"), seen={}).leader_seen_s is None

        one.beat(member("leads", led_ago_s=4.0), seen={})
        told = two.beat(member("follows"), seen={}).leader_seen_s

        assert told is not None
        assert 4.0 <= told < 4.0 + MEMBER_TIMEOUT_S


class DetachCases(CoordinationCase):
    """Cases of set_detached and detached."""

    def test_a_detached_worker_is_seen_by_all_until_it_is_attached(self, one: Coordination, two: Coordination) -> None:
        assert one.set_detached("w1", True, actor="admin", reason="loud fan")
        assert two.detached() == {"w1"}
        assert two.beat(member("b"), seen={}).detached == {"w1"}

        assert two.set_detached("w1", False, actor="admin")

        assert one.detached() == frozenset()
        assert one.beat(member("a"), seen={}).detached == frozenset()

    def test_the_second_of_two_that_detach_is_told_so(self, one: Coordination, two: Coordination) -> None:
        assert one.set_detached("w1", True, actor="admin")

        assert not two.set_detached("w1", True, actor="another")

    def test_attaching_a_worker_that_is_not_detached_changes_nothing(self, one: Coordination) -> None:
        assert not one.set_detached("w1", False, actor="admin")

    def test_a_worker_that_a_leader_detached_is_known_from_one_that_a_person_detached(self, one: Coordination) -> None:
        one.set_detached("w1", True, actor=LEADER, reason="no answer")
        one.set_detached("w2", True, actor="admin")

        view = one.beat(member("a"), seen={})

        assert view.detached == {"w1", "w2"}
        assert view.detached_by_leader == {"w1"}

    def test_a_person_who_detaches_a_worker_takes_the_place_of_the_leader_and_not_the_other_way_round(
        self, one: Coordination, two: Coordination
    ) -> None:
        one.set_detached("w1", True, actor=LEADER)

        assert two.set_detached("w1", True, actor="admin")
        assert not one.set_detached("w1", True, actor=LEADER)

        assert one.beat(member("a"), seen={}).detached_by_leader == frozenset()
        assert one.detached() == {"w1"}

    def test_workers_are_detached_one_by_one(self, one: Coordination) -> None:
        for name in ("w1", "w2", "w3"):
            one.set_detached(name, True, actor="admin")

        one.set_detached("w2", False, actor="admin")

        assert one.detached() == {"w1", "w3"}


class CoordinationSuite(MemberCases, LockCases, DegradeCases, LeaderSeenCases, DetachCases):
    """All conformance cases of a coordination. pytest collects a subclass whose name begins with Test."""
