"""A leader that freezes in the middle of a transaction must not keep the next one from taking over."""

from __future__ import annotations

import contextlib

import pytest

from tasuki.errors import Unavailable
from tasuki.stores.sql.store import SqlStore
from tests.support.waiting import until

LOCK_TTL_S = 2.0


def test_a_transaction_that_a_frozen_leader_left_open_is_over_before_its_lock_is(postgres_url: str) -> None:
    # given: a leader that holds the epoch's row, and then does nothing more
    with (
        contextlib.closing(SqlStore.open_postgresql(postgres_url, lock_ttl_s=LOCK_TTL_S)) as frozen,
        contextlib.closing(SqlStore.open_postgresql(postgres_url, lock_ttl_s=LOCK_TTL_S)) as following,
    ):
        assert frozen.take_over("frozen", 1)

        def taken_over() -> bool:
            try:
                return following.take_over("following", 2)
            except Unavailable:  # it waited for the row as long as it may
                return False

        def freeze() -> None:
            with frozen.turn():
                frozen.reap(epoch=1)
                until(taken_over, LOCK_TTL_S, "another one takes over while the lock still lasts")

        # then: another one takes over, and the first one learns that nothing of its turn is stored
        with pytest.raises(Unavailable):
            freeze()
        assert following.epoch() == (2, "following")
