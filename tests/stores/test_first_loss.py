"""A job that asks for it waits after its first lost attempt too: what the contract of the apps says of an expired lease."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.stores.memory import MemoryStore
from tasuki.testing.store_stage import MakeStore, Stage, StoreCase


class FirstLoss(StoreCase):
    def test_the_first_loss_is_delayed_like_a_retry(self, stage: Stage) -> None:
        stage.running("a", max_losses=5, delay_first_loss=True)
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


class TestMemoryStore(FirstLoss):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda clock: MemoryStore(clock)


class TestSqliteStore(FirstLoss):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        from tasuki.stores.sql import SqlStore

        return lambda clock: SqlStore.open_sqlite(tmp_path / "tasuki.sqlite3", clock=clock)
