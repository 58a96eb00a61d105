"""Worlds for the machines' tests: the memory store, and a real SQLite file that a restarted server opens again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasuki.stores.memory.store import MemoryStore
from tasuki.stores.store import Store
from tasuki.testing.clocks import FakeClock
from tests.support.harness import Harness
from tests.support.sqlite_files import with_tables

MakeWorld = Callable[..., Harness]


@pytest.fixture(params=["memory", "sqlite"])
def make_world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeWorld]:
    """A function that makes a world on the store of this run; what it holds is checked and closed at the end."""
    worlds: list[Harness] = []

    def make(**options: Any) -> Harness:
        clock = FakeClock()
        if request.param == "memory":
            world = Harness(MemoryStore(clock), clock, **options)
        else:
            world = sqlite_world(tmp_path / f"world-{len(worlds)}.sqlite3", clock, **options)
        worlds.append(world)
        return world

    yield make
    for world in worlds:
        world.check()
        world.store.close()


@pytest.fixture
def world(make_world: MakeWorld) -> Harness:
    return make_world()


@pytest.fixture
def memory_world() -> Iterator[Harness]:
    """For what does not depend on the store."""
    clock = FakeClock()
    world = Harness(MemoryStore(clock), clock)
    yield world
    world.check()


def sqlite_world(path: Path, clock: FakeClock, **options: Any) -> Harness:
    from tasuki.stores.sql.store import SqlStore

    def restart(old: Store) -> Store:
        old.close()
        return SqlStore.open_sqlite(path, clock=clock)

    return Harness(SqlStore.open_sqlite(with_tables(path), clock=clock), clock, restart=restart, **options)
