"""Each safeguard is missed: without it the simulator finds a violation, and with it the same seed shows none."""

import pytest
from msgspec.structs import replace

from tasuki.core.broker import subscriptions
from tasuki.core.election import Election
from tasuki.stores.memory.records import MemoryRecords
from tasuki.stores.sql.database import load_statements
from tasuki.testing.sim.ablations import ABLATIONS, SEEDS_MAX, UNSEEN, Ablation, AblationFinding, hunt, table
from tasuki.testing.sim.ablations_store import ReplacedStatement, Replacement
from tasuki.testing.sim.checker import INVARIANTS, Violation

# Where to begin, so that the first seed is one that shows it. If a later change moves it, the hunt goes on from here.
FIRST_SEEDS = {
    "asks_for_the_lock": 6,
    "assigned_by_epoch": 222,
    "budgets_reset": 2,
    "cancel_is_kept": 5,
    "carried_over": 1,
    "choices_end": 22,
    "confirmed_is_renewed": 8,
    "counts_from_before": 239,
    "credit_at_the_broker": 1,
    "credit_at_the_worker": 3,
    "denied_stops": 59,
    "doubles_dropped": 20,
    "epoch_fence": 48,
    "fenced_is_not_told": 12,
    "fetched_at_its_time": 6,
    "finish_lease": 70,
    "held_of_this_life": 84,
    "keeper_at_death": 7,
    "keeper_at_the_deadline": 21,
    "lapse": 3,
    "look_again": 11,
    "loss_budget": 2,
    "not_after": 12,
    "only_worker": 1,
    "orders_by_epoch": 15,
    "owner": 37,
    "pauses_of_nodes": 96,
    "reconnect_grace": 2,
    "repeat_known": 1,
    "result_after_commit": 2,
    "rising_epochs": 20,
    "run_again_is_the_last": 10,
    "said_once": 24,
    "same_id_again": 2,
    "stops_at_the_deadline": 6,
}
UNSEEN_SEEDS = 2
WITHIN = [(ablation, store) for ablation in ABLATIONS.values() for store in ablation.stores]


def named(value: object) -> str:
    return value.name if isinstance(value, Ablation) else str(value)


@pytest.mark.parametrize(("ablation", "store"), WITHIN, ids=named)
def test_without_a_safeguard_a_violation_is_found(ablation: Ablation, store: str) -> None:
    first_seed = FIRST_SEEDS.get(ablation.name, 0)

    found = hunt(ablation, SEEDS_MAX, store=store, first_seed=first_seed)

    assert found is not None, f"nobody misses it: {ablation.what}"
    assert found.violation.invariant in ablation.invariants, str(found.violation)
    if store == "memory":  # the other stores give the same trace
        assert ablation.check(found.seed, replace(ablation.options, store=store)).good


@pytest.mark.parametrize("ablation", UNSEEN, ids=named)
def test_what_only_spares_time_or_losses_breaks_nothing(ablation: Ablation) -> None:
    assert ablation.why

    assert hunt(ablation, UNSEEN_SEEDS) is None


def test_every_invariant_is_broken_by_something() -> None:
    broken = {invariant for ablation in ABLATIONS.values() for invariant in ablation.invariants}

    assert set(INVARIANTS) == broken


def test_what_was_switched_off_is_there_again() -> None:
    before = (
        vars(MemoryRecords)["_check_epoch"],
        vars(Election)["_follow"],
        subscriptions.WALK_INTERVAL_S,
        dict(load_statements("sqlite").one),
    )

    for ablation in ABLATIONS.values():
        with ablation.switch_off():
            pass

    after = (
        vars(MemoryRecords)["_check_epoch"],
        vars(Election)["_follow"],
        subscriptions.WALK_INTERVAL_S,
        dict(load_statements("sqlite").one),
    )
    assert after == before


def test_it_is_there_again_also_after_an_error() -> None:
    before = subscriptions.WALK_INTERVAL_S
    seam = Replacement(subscriptions, "WALK_INTERVAL_S", lambda interval_s: interval_s + 1.0)

    def fail() -> None:
        assert before + 1.0 == subscriptions.WALK_INTERVAL_S
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), seam.open():
        fail()

    assert before == subscriptions.WALK_INTERVAL_S


def test_a_statement_that_reads_otherwise_is_an_error() -> None:
    with pytest.raises(LookupError, match="'finish_plain' does not say 'AND the moon is full'"):
        ReplacedStatement("finish_plain", "AND the moon is full").open().__enter__()


def test_a_function_that_is_gone_is_an_error() -> None:
    with pytest.raises(KeyError, match="no_such_thing"):
        Replacement(subscriptions, "no_such_thing", lambda before: before).open().__enter__()


def test_the_table_names_what_was_found_and_what_was_not() -> None:
    fence, lease, doubles = ABLATIONS["epoch_fence"], ABLATIONS["one_lease"], ABLATIONS["doubles_dropped"]
    found = AblationFinding(seed=3, tries=4, violation=Violation("I8", "written under epoch 2 after epoch 3"))

    told = table(
        {"epoch_fence": {"memory": found, "sqlite": None}, "one_lease": {"memory": None}, "doubles_dropped": {"memory": found}}
    )

    assert f"| `epoch_fence` | {fence.what} | 4 | not found | I8 |" in told
    assert f"| `one_lease` | {lease.what} | not found |  |  |" in told
    assert f"| `doubles_dropped` | {doubles.what} | 4 |  | I8 |" in told
    assert f"| `{UNSEEN[0].name}` | {UNSEEN[0].what} | {UNSEEN[0].why} |" in told
