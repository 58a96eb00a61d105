"""The leader's duties as the broker schedules them: apart from everything else, under an epoch, in small batches."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tasuki.core.broker.events import (
    BlobArrived,
    BlobsDeleted,
    BlobsUnderWay,
    ClusterView,
    DeleteBlobs,
    Elected,
    Hinted,
    Publish,
    ReceiveBlob,
    TurnDone,
    TurnFailed,
)
from tasuki.core.broker.upkeep import (
    COLLECT_INTERVAL_S,
    DUTY_INTERVAL_S,
    FIRE_INTERVAL_S,
    IDLE_DUTY_INTERVAL_S,
    LAPSE_SHARE,
    PROMOTE_BATCH,
    PRUNE_AGAIN,
    PRUNE_INTERVAL_S,
    REAP_BATCH,
    SKIP_BATCH,
    SQUEEZED_GRACE_S,
)
from tasuki.core.cluster_messages import Hint, ServerInfo
from tasuki.core.election import EpochFenced, Lapsed, TakeOver, TookOver
from tasuki.core.job import InputFile, State
from tasuki.core.lifecycle import LEASE_MARGIN_S, LEASE_TTL_S
from tasuki.core.protocol import BlobPut, CancelLeases, ErrorMessage, GiveCredit, Reply, Results
from tasuki.core.scheduler.firing import Definition, EventRow
from tasuki.core.store_messages import Answers, JobKind, ReadyQueue, Turn, TurnNotes
from tasuki.errors import StaleEpoch, Unavailable
from tasuki.stores.batching import execute
from tasuki.stores.memory.store import MemoryStore
from tests.core.broker_stage import BrokerStage

SHA256 = "ab" * 32


def next_duty(stage: BrokerStage) -> Turn:
    while (turn := stage.broker.next_turn(stage.now())) is not None and not turn.epoch:
        stage.apply(TurnDone(turn, execute(stage.store, turn)))
    assert turn is not None
    return turn


def put(stage: BrokerStage, conn: int, sha256: str = SHA256, size_bytes: int = 100) -> None:
    """A blob comes in, all the way."""
    stage.ask(conn, BlobPut(900, sha256, size_bytes))
    [receive] = [command for command in stage.others if isinstance(command, ReceiveBlob)]
    stage.others.remove(receive)
    if not receive.place.stored:
        stage.apply(BlobArrived(conn, receive.put, receive.place))
        stage.turns()


def deletes(stage: BrokerStage) -> list[DeleteBlobs]:
    found = [command for command in stage.others if isinstance(command, DeleteBlobs)]
    stage.others = [command for command in stage.others if not isinstance(command, DeleteBlobs)]
    return found


@pytest.mark.parametrize(("pruned", "goes_on"), [(PRUNE_AGAIN, True), (PRUNE_AGAIN - 1, False)])
def test_pruning_goes_on_at_once_only_while_there_is_much_to_prune(pruned: int, goes_on: bool) -> None:
    stage = BrokerStage()
    first = next_duty(stage)
    stage.apply(TurnDone(first, replace(execute(stage.store, first), prune=pruned)))

    stage.clock.advance(DUTY_INTERVAL_S)
    again = next_duty(stage)

    assert first.prune is not None
    assert (again.prune is not None) is goes_on
    stage.apply(TurnDone(again, execute(stage.store, again)))
    stage.clock.advance(PRUNE_INTERVAL_S)
    assert next_duty(stage).prune is not None


def looks_in(stage: BrokerStage, seconds: float) -> int:
    """Return how often the leader looks for leases that are over in so many seconds."""
    found, until = 0, stage.now().monotonic + seconds
    while stage.now().monotonic < until:
        while (turn := stage.broker.next_turn(stage.now())) is not None:
            found += bool(turn.reap)
            stage.apply(TurnDone(turn, execute(stage.store, turn)))
        stage.clock.advance(DUTY_INTERVAL_S / 8)
    return found


@pytest.mark.parametrize(("fires", "idle_s"), [(True, FIRE_INTERVAL_S), (False, IDLE_DUTY_INTERVAL_S)])
def test_an_idle_leader_looks_less_often_until_something_goes_on(fires: bool, idle_s: float) -> None:
    stage = BrokerStage()
    stage.broker.config = replace(stage.broker.config, fires=fires)

    looks_in(stage, 1.0)
    idle = looks_in(stage, 4.0)
    stage.worker(credit=1)
    stage.submit(stage.client(), "a")
    looks_in(stage, 1.0)
    busy = looks_in(stage, 4.0)

    assert (idle, busy) == (4.0 / idle_s, 4.0 / DUTY_INTERVAL_S)


@pytest.mark.parametrize(("comes", "looks"), [(False, 0), (True, 1)])
def test_an_idle_leader_looks_soon_after_something_came(comes: bool, looks: int) -> None:
    stage = BrokerStage()
    looks_in(stage, 3.0)
    while not looks_in(stage, DUTY_INTERVAL_S / 8):
        pass  # the next look at idle is a second away

    if comes:
        stage.submit(stage.client(), "a")

    assert looks_in(stage, 1.5 * DUTY_INTERVAL_S) == looks


def test_duties_are_a_turn_of_their_own() -> None:
    # Given something of everything: a submit waits, and the duties are due
    stage = BrokerStage()
    client = stage.client()
    stage.clock.advance(DUTY_INTERVAL_S)
    stage.submit(client, "a")
    stage.clock.advance(DUTY_INTERVAL_S)
    # When the next turns are made
    turns = []
    while (turn := stage.broker.next_turn(stage.now())) is not None:
        turns.append(turn)
        stage.apply(TurnDone(turn, execute(stage.store, turn)))
    # Then what carries an epoch carries nothing else
    assert any(turn.epoch for turn in turns)
    assert not any(turn.epoch and (turn.submit or turn.lease or turn.finish or turn.renew) for turn in turns)


def test_a_server_that_does_not_lead_has_no_duties() -> None:
    stage = BrokerStage(shared=True)
    stage.clock.advance(60)
    assert stage.broker.next_turn(stage.now()) is None


def test_an_epoch_that_was_won_is_registered_and_reported() -> None:
    stage = BrokerStage(shared=True)
    stage.apply(TakeOver(7))
    stage.turns()
    assert stage.store.epoch() == (7, "stage")
    assert stage.others == [TookOver(7, True)]


def test_an_epoch_that_came_too_late_is_reported_as_refused() -> None:
    stage = BrokerStage(shared=True)
    stage.store.take_over("another", 9)
    stage.apply(TakeOver(7))
    stage.turns()
    assert stage.others == [TookOver(7, False)]


def test_a_takeover_that_the_store_could_not_answer_is_no_takeover() -> None:
    stage = BrokerStage(shared=True)
    stage.apply(TakeOver(7))
    stage.apply(TurnFailed(next_duty(stage), Unavailable("gone")))
    assert stage.others == [TookOver(7, False)]


def test_an_elected_server_reaps_and_one_that_stepped_down_does_not() -> None:
    stage = BrokerStage(shared=True)
    client, worker = stage.client(), stage.worker(credit=1)
    stage.submit(client, "a")
    stage.store.take_over("stage", 3)
    # When it leads, and the worker says nothing
    stage.apply(Elected(3))
    stage.clock.advance(18)
    stage.turns()
    # Then the job is free again
    job = stage.job("a")
    assert job is not None
    assert (job.state, job.losses) == (State.PENDING, 1)
    # And when it has stepped down, nothing is due any more
    stage.apply(Elected(0))
    stage.close(worker)
    stage.turns()
    stage.clock.advance(60)
    assert stage.broker.next_turn(stage.now()) is None


def test_a_refused_epoch_deposes_and_is_not_tried_again() -> None:
    stage = BrokerStage(shared=True)
    stage.apply(Elected(3))
    duty = next_duty(stage)
    stage.apply(TurnFailed(duty, StaleEpoch("another leads")))
    assert stage.others == [EpochFenced(3)]
    stage.apply(Elected(0))
    stage.clock.advance(60)
    assert stage.broker.next_turn(stage.now()) is None


def away(stage: BrokerStage, seconds: float) -> Turn:
    """The store takes no turn of this leader for so long; the first one that it is given then."""
    stage.apply(TurnFailed(next_duty(stage), Unavailable("gone")))
    stage.clock.advance(seconds)
    return next_duty(stage)


def test_after_a_short_absence_of_the_store_the_leader_goes_on() -> None:
    stage = BrokerStage(shared=True)
    stage.apply(Elected(3))

    assert away(stage, LAPSE_SHARE * LEASE_TTL_S).reap == REAP_BATCH


def test_a_leader_whose_store_was_away_takes_a_new_epoch_before_it_ends_a_lease() -> None:
    # Given a job that runs, and a leader that keeps its lock while the store is away for longer than a lease lasts
    stage = BrokerStage(shared=True)
    stage.store.take_over("stage", 3)
    stage.clock.advance(1)
    client, worker = stage.client(), stage.worker(credit=1)
    stage.submit(client, "a")
    stage.apply(Elected(3))
    first = away(stage, LEASE_TTL_S + LEASE_MARGIN_S + 1)
    # When the store takes a turn again
    assert not first.reap
    stage.apply(TurnDone(first, execute(stage.store, first)))
    # Then the epoch is given up
    assert stage.others == [Lapsed(3)]
    stage.clock.advance(DUTY_INTERVAL_S)
    assert not next_duty(stage).reap
    stage.apply(Elected(0))
    # And under the next one the lease of the worker, which could not renew it, goes on
    stage.store.take_over("stage", 4)
    stage.apply(Elected(4))
    stage.turns()
    job = stage.job("a")
    assert job is not None
    assert (job.state, job.losses) == (State.ASSIGNED, 0)
    # But a worker that stays silent is lost
    stage.close(worker)
    stage.apply(Elected(0))
    stage.clock.advance(LEASE_TTL_S + LEASE_MARGIN_S + 1)
    stage.apply(Elected(4))
    stage.turns()
    job = stage.job("a")
    assert job is not None
    assert (job.state, job.losses) == (State.PENDING, 1)


def test_a_turn_that_was_answered_late_counts_from_when_it_was_planned() -> None:
    stage = BrokerStage(shared=True)
    stage.store.take_over("stage", 3)
    stage.apply(Elected(3))
    turn = next_duty(stage)
    stage.clock.advance(LEASE_TTL_S)

    stage.apply(TurnDone(turn, execute(stage.store, turn)))

    assert not next_duty(stage).reap


def test_a_leader_that_was_frozen_after_its_takeover_gives_the_epoch_up_before_it_ends_a_lease() -> None:
    stage = BrokerStage(shared=True)
    stage.apply(TakeOver(7))
    takeover = next_duty(stage)
    stage.apply(TurnDone(takeover, execute(stage.store, takeover)))
    stage.apply(Elected(7))
    stage.clock.advance(LEASE_TTL_S)

    first = next_duty(stage)
    stage.apply(TurnDone(first, execute(stage.store, first)))

    assert not first.reap
    assert stage.others == [TookOver(7, True), Lapsed(7)]


def test_duties_have_caught_up_when_each_was_done_and_nothing_is_left() -> None:
    stage = BrokerStage(shared=True)
    stage.store.take_over("stage", 3)
    stage.apply(Elected(3))
    assert not stage.broker.upkeep.caught_up

    stage.turns()

    assert stage.broker.upkeep.caught_up
    stage.apply(Elected(0))
    assert not stage.broker.upkeep.caught_up


def test_a_full_batch_means_that_duties_have_not_caught_up() -> None:
    stage = BrokerStage(shared=True)
    stage.store.take_over("stage", 3)
    stage.apply(Elected(3))
    turn = next_duty(stage)

    stage.apply(TurnDone(turn, Answers(promote=PROMOTE_BATCH, notes=TurnNotes((ReadyQueue("a", JobKind.HANDLER),)))))

    assert not stage.broker.upkeep.caught_up
    assert stage.broker.upkeep.counts.promoted == PROMOTE_BATCH


def test_a_failed_duty_is_due_again_at_once() -> None:
    stage = BrokerStage(shared=True)
    stage.store.take_over("stage", 3)
    stage.apply(Elected(3))
    turn = next_duty(stage)
    assert turn.prune is not None

    stage.apply(TurnFailed(turn, Unavailable("gone")))
    stage.clock.advance(1)

    assert not stage.broker.upkeep.caught_up
    assert next_duty(stage).prune == turn.prune


def test_after_a_failed_turn_leases_are_ended_in_one_that_fires_nothing() -> None:
    stage = BrokerStage(shared=True)
    stage.store.take_over("stage", 3)
    stage.apply(Elected(3))
    turn = next_duty(stage)
    assert turn.fire

    stage.apply(TurnFailed(turn, Unavailable("the store failed")))
    stage.clock.advance(DUTY_INTERVAL_S)
    again = next_duty(stage)

    assert (again.reap, again.fire) == (turn.reap, None)
    stage.apply(TurnDone(again, execute(stage.store, again)))
    stage.clock.advance(FIRE_INTERVAL_S)
    assert next_duty(stage).fire == turn.fire


def test_who_cannot_reach_the_bytes_condemns_no_blobs() -> None:
    stage = BrokerStage(shared=True, collects_blobs=False)
    stage.store.take_over("stage", 3)
    stage.apply(Elected(3))

    assert next_duty(stage).condemn_blobs is None


def test_a_failed_duty_tells_no_peer_and_comes_again() -> None:
    stage = BrokerStage()
    client = stage.client()
    before = len(stage.sent[client])
    stage.clock.advance(DUTY_INTERVAL_S)
    stage.apply(TurnFailed(next_duty(stage), Unavailable("gone")))
    stage.clock.advance(DUTY_INTERVAL_S)
    assert next_duty(stage).reap
    assert len(stage.sent[client]) == before


def test_more_to_reap_than_a_batch_goes_on_at_once_but_lets_others_in_between() -> None:
    # Given more lost leases than one batch takes
    stage = BrokerStage()
    client, worker = stage.client(), stage.worker(credit=REAP_BATCH + 10)
    stage.submit(client, *(f"job-{n}" for n in range(REAP_BATCH + 10)))
    stage.close(worker)
    stage.turns()
    stage.apply(Elected(0))
    stage.clock.advance(20)
    stage.apply(Elected(stage.store.epoch()[0]))
    # When a client asks for something after the first batch
    first = next_duty(stage)
    stage.apply(TurnDone(first, execute(stage.store, first)))
    stage.tell(client, BlobPut(7, SHA256, 1))
    # Then its turn comes next, and then the rest is reaped, without a wait
    second = stage.broker.next_turn(stage.now())
    assert second is not None
    assert not second.epoch
    stage.apply(TurnDone(second, execute(stage.store, second)))
    assert len(execute(stage.store, next_duty(stage)).reap) == 10


def test_an_unused_blob_is_condemned_deleted_and_forgotten() -> None:
    # Given a blob that nobody refers to, past its grace
    stage = BrokerStage(blob_grace_s=3600.0)
    client = stage.client()
    put(stage, client)
    stage.clock.advance(3600 + COLLECT_INTERVAL_S + 1)
    # When it is collected
    stage.turns()
    [delete] = deletes(stage)
    assert [place.sha256 for place in delete.places] == [SHA256]
    assert stage.store.blob_places([SHA256]) == [None]
    stage.apply(BlobsDeleted(delete.epoch, list(delete.places)))
    stage.turns()
    # Then nothing is left of it, and it is not deleted again
    stage.clock.advance(COLLECT_INTERVAL_S + 1)
    stage.turns()
    assert deletes(stage) == []


def test_a_blob_that_a_job_needs_stays() -> None:
    stage = BrokerStage(blob_grace_s=3600.0)
    client = stage.client()
    put(stage, client)
    stage.submit(client, "a", files=(InputFile("in.bin", sha256=SHA256, size_bytes=100),))
    stage.clock.advance(10 * 3600.0)
    stage.turns()
    assert deletes(stage) == []


def test_what_was_condemned_and_not_deleted_is_deleted_by_the_next_leader() -> None:
    stage = BrokerStage(blob_grace_s=0.0)
    put(stage, stage.client())
    stage.clock.advance(COLLECT_INTERVAL_S + 1)
    stage.turns()
    assert len(deletes(stage)) == 1
    # When that leader died before it deleted anything, and another one begins
    follower = BrokerStage(beside=stage, shared=True, server_id="follower")
    follower.store.take_over("follower", 99)
    follower.apply(Elected(99))
    follower.turns()
    [delete] = deletes(follower)
    assert [place.sha256 for place in delete.places] == [SHA256]


def test_what_an_earlier_term_deleted_is_not_forgotten_under_a_later_one() -> None:
    stage = BrokerStage(blob_grace_s=0.0)
    put(stage, stage.client())
    stage.clock.advance(COLLECT_INTERVAL_S + 1)
    stage.turns()
    [delete] = deletes(stage)
    stage.store.take_over("stage", 50)
    stage.apply(Elected(50))
    stage.apply(BlobsDeleted(delete.epoch, list(delete.places)))
    assert not next_duty(stage).forget_blobs


def test_over_the_budget_unused_blobs_go_sooner() -> None:
    stage = BrokerStage(blob_grace_s=3600.0, blob_budget_bytes=50)
    put(stage, stage.client())
    stage.clock.advance(SQUEEZED_GRACE_S + COLLECT_INTERVAL_S + 1)
    stage.turns()
    assert len(deletes(stage)) == 1


def test_a_budget_full_of_blobs_in_use_refuses_new_ones_and_says_so() -> None:
    stage = BrokerStage(blob_grace_s=3600.0, blob_budget_bytes=50)
    client = stage.client()
    put(stage, client)
    stage.submit(client, "a", files=(InputFile("in.bin", sha256=SHA256, size_bytes=100),))
    stage.clock.advance(COLLECT_INTERVAL_S + 1)
    stage.turns()
    stage.tell(client, BlobPut(901, "cd" * 32, 10))
    refusal = stage.last(client, ErrorMessage)
    assert (refusal.corr_id, refusal.code) == (901, "DISK_FULL")
    assert "the budget is 50" in refusal.message


def test_a_blob_is_told_as_had_only_after_the_store_knows_it() -> None:
    stage = BrokerStage()
    client = stage.client()
    stage.ask(client, BlobPut(5, SHA256, 100))
    [receive] = [command for command in stage.others if isinstance(command, ReceiveBlob)]
    stage.apply(BlobArrived(client, receive.put, receive.place))
    assert stage.all(client, Reply) == []
    stage.turns()
    assert stage.last(client, Reply) == Reply(5, {"have": True})
    assert stage.store.blob_places([SHA256]) == [replace(receive.place, stored=True)]


def test_a_bad_hash_or_size_of_a_blob_is_refused() -> None:
    stage = BrokerStage()
    worker = stage.worker()
    stage.tell(worker, GiveCredit(1))
    for bad in (BlobPut(5, "../etc/passwd", 1), BlobPut(6, SHA256, -1), BlobPut(7, SHA256, 2**70)):
        stage.tell(worker, bad)
        assert stage.last(worker, ErrorMessage).corr_id == bad.msg_id


def test_duties_are_done_when_nothing_else_happens() -> None:
    stage = BrokerStage()
    stage.turns()
    assert stage.broker.next_turn(stage.now()) is None
    stage.clock.advance(DUTY_INTERVAL_S)
    duty = next_duty(stage)
    assert (duty.reap, bool(duty.promote)) == (REAP_BATCH, True)


def test_a_blob_that_takes_longer_than_the_grace_to_come_in_is_not_collected() -> None:
    stage = BrokerStage(blob_grace_s=3600.0)
    client = stage.client()
    stage.ask(client, BlobPut(5, SHA256, 100))
    [receive] = [command for command in stage.others if isinstance(command, ReceiveBlob)]
    for _ in range(8):
        stage.clock.advance(1800)
        stage.apply(BlobsUnderWay([receive.put]))
        stage.turns()
    assert deletes(stage) == []
    stage.apply(BlobArrived(client, receive.put, receive.place))
    stage.turns()
    assert stage.last(client, Reply) == Reply(5, {"have": True})


def test_bytes_that_were_condemned_while_they_came_in_are_deleted_and_asked_for_again() -> None:
    stage = BrokerStage(blob_grace_s=3600.0)
    client = stage.client()
    stage.ask(client, BlobPut(5, SHA256, 100))
    [receive] = [command for command in stage.others if isinstance(command, ReceiveBlob)]
    stage.clock.advance(7200)
    stage.turns()
    assert len(deletes(stage)) == 1
    stage.apply(BlobArrived(client, receive.put, receive.place))
    stage.turns()
    assert stage.last(client, ErrorMessage).code == "UNAVAILABLE"
    assert deletes(stage) == [DeleteBlobs(0, (receive.place,))]


@pytest.mark.parametrize("node_id", ["", "n1"])
def test_whoever_waits_for_a_job_that_was_skipped_is_told_and_so_are_other_servers_but_not_nodes(node_id: str) -> None:
    # Given a client that waits for a job, which may only start within a second
    stage = BrokerStage(shared=True)
    stage.apply(TakeOver(1))
    stage.turns()
    stage.apply(Elected(1))
    stage.apply(ClusterView((ServerInfo(server_id="node", node_id="n2"), ServerInfo(server_id="other", node_id=node_id))))
    client = stage.client()
    stage.submit(client, "a", not_after=stage.clock.wall() + 1)
    # When nobody takes it
    stage.pass_time(2)
    # Then it has ended, and everybody knows
    [ended] = [item for results in stage.all(client, Results) for item in results.items]
    assert (ended.job_id, ended.state, ended.outcome.error_code) == ("a", State.SKIPPED, "TOO_LATE")
    hinted = [job_id for told in stage.others if isinstance(told, Publish) for job_id in told.hint.ended]
    assert hinted == ([] if node_id else ["a"])  # a node has no clients


def test_a_full_batch_of_skipped_jobs_is_followed_by_the_next_at_once() -> None:
    stage = BrokerStage()
    client = stage.client()
    not_after = stage.clock.wall() + 1
    for half in (range(SKIP_BATCH // 2), range(SKIP_BATCH // 2, SKIP_BATCH + 1)):
        stage.submit(client, *(f"late-{number}" for number in half), not_after=not_after)
    stage.clock.advance(2)
    first = next_duty(stage)
    stage.apply(TurnDone(first, execute(stage.store, first)))
    second = next_duty(stage)
    assert second.skip == SKIP_BATCH
    assert len(execute(stage.store, second).skip) == 1


# ---------------------------------------------------------------------------------------------------- definitions


MINUTELY = Definition(id=1, name="m", command_name="tick", schedule_type="every_n_minutes", schedule_value="1")


def look(stage: BrokerStage) -> None:
    """Carry out everything that the leader asks now."""
    while (turn := stage.broker.next_turn(stage.now())) is not None:
        stage.apply(TurnDone(turn, execute(stage.store, turn)))


def test_the_driver_is_woken_when_a_definition_is_due_and_not_at_the_next_tick() -> None:
    stage = BrokerStage()
    assert isinstance(stage.store, MemoryStore)
    stage.store.define(replace(MINUTELY, changed_at=stage.now().wall))
    look(stage)
    stage.clock.advance(60 - stage.now().wall % 60 - 0.03)
    look(stage)

    assert stage.broker.upkeep.until_due_s(stage.now(), 0.1) == pytest.approx(0.03, abs=0.001)
    stage.clock.advance(0.03)
    look(stage)
    assert stage.broker.upkeep.counts.fired == 1
    assert stage.broker.upkeep.until_due_s(stage.now(), 0.1) == 0.1


def test_a_hint_has_the_leader_look_for_events_at_once_and_without_one_it_takes_a_second() -> None:
    stage = BrokerStage()
    assert isinstance(stage.store, MemoryStore)
    stage.store.define(replace(MINUTELY, type="event", event_type=">"))
    look(stage)
    stage.store.emit(EventRow(id=1, event_type="a", created_at=0.0))
    look(stage)
    before = stage.broker.upkeep.counts.fired
    stage.apply(Hinted(Hint(server_id="other", everything=True)))
    look(stage)
    hinted = stage.broker.upkeep.counts.fired
    stage.store.emit(EventRow(id=2, event_type="a", created_at=0.0))
    stage.clock.advance(FIRE_INTERVAL_S)
    look(stage)

    assert (before, hinted, stage.broker.upkeep.counts.fired) == (0, 1, 2)


def test_a_server_whose_store_has_no_definitions_asks_for_none() -> None:
    stage = BrokerStage()
    stage.broker.config = replace(stage.broker.config, fires=False)

    assert next_duty(stage).fire is None
    assert stage.broker.upkeep.until_due_s(stage.now(), 0.1) == 0.1


def test_a_worker_is_told_at_once_that_its_run_is_replaced() -> None:
    stage = BrokerStage()
    assert isinstance(stage.store, MemoryStore)
    stage.store.define(replace(MINUTELY, type="event", event_type=">", concurrency_policy="replace"))
    worker = stage.worker("w1", credit=1)
    stage.store.emit(EventRow(id=1, event_type="a", created_at=0.0))
    stage.clock.advance(FIRE_INTERVAL_S)
    look(stage)
    assert [grant.job_id for grant in stage.grants(worker)] == ["e1-1"]
    stage.store.emit(EventRow(id=2, event_type="a", created_at=0.0))
    stage.clock.advance(FIRE_INTERVAL_S)
    look(stage)

    assert len(stage.last(worker, CancelLeases).lease_ids) == 1
