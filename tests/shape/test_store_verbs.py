"""The table of store verbs is complete: turns, answers, the contract and every store have each verb of it."""

import pytest

from tasuki.core.store_messages import VERBS, Answers, Turn
from tasuki.stores.memory.store import MemoryStore
from tasuki.stores.redis.store import _OF_TURN, RedisStore
from tasuki.stores.sql.store import SqlStore
from tasuki.stores.store import Store

NAMES = tuple(verb.name for verb in VERBS)


def test_turns_and_answers_have_the_verbs_of_the_table_in_its_order() -> None:
    assert Turn.__struct_fields__ == (*NAMES, "epoch", "context")
    assert Answers.__struct_fields__ == (*NAMES, "notes")


@pytest.mark.parametrize("store", [Store, MemoryStore, SqlStore, RedisStore])
def test_every_store_has_every_verb(store: type) -> None:
    assert [verb.name for verb in VERBS if not callable(getattr(store, verb.method or verb.name, None))] == []


def test_the_script_of_redis_has_a_call_for_every_verb() -> None:
    own = [verb.method or verb.name for verb in VERBS if verb.name not in _OF_TURN]
    assert [name for name in own if not hasattr(getattr(RedisStore, name), "__wrapped__")] == []
    assert set(_OF_TURN) <= set(NAMES)
