"""The leader's duties as the broker schedules them: apart from everything else, under an epoch, in small batches."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tasuki.core.broker.events import (
    BlobArrived,
    BlobsDeleted,
    BlobsUnderWay,
    DeleteBlobs,
    Deposed,
    Elected,
    Met,
    Publish,
    ReceiveBlob,
    TakeoverDone,
    TurnDone,
    TurnFailed,
    Won,
)
from tasuki.core.broker.upkeep import (
    COLLECT_INTERVAL_S,
    DUTY_INTERVAL_S,
    PROMOTE_BATCH,
    PRUNE_AGAIN,
    PRUNE_INTERVAL_S,
    REAP_BATCH,
    SKIP_BATCH,
    SQUEEZED_GRACE_S,
)
from tasuki.core.cluster_messages import ServerInfo
from tasuki.core.job import InputFile, State
from tasuki.core.protocol import BlobPut, ErrorMessage, GiveCredit, Reply, Results
from tasuki.core.store_messages import Answers, Promoted, Turn
from tasuki.errors import StaleEpoch, Unavailable
from tasuki.stores.batching import execute
from tests.core.desk import Desk

SHA256 = "ab" * 32


def next_duty(desk: Desk) -> Turn:
    while (turn := desk.broker.next_turn(desk.now())) is not None and not turn.epoch:
        desk.apply(TurnDone(turn, execute(desk.store, turn)))
    assert turn is not None
    return turn


def put(desk: Desk, conn: int, sha256: str = SHA256, size_bytes: int = 100) -> None:
    """A blob comes in, all the way."""
    desk.ask(conn, BlobPut(900, sha256, size_bytes))
    [receive] = [command for command in desk.others if isinstance(command, ReceiveBlob)]
    desk.others.remove(receive)
    if not receive.place.stored:
        desk.apply(BlobArrived(conn, receive.put, receive.place))
        desk.turns()


def deletes(desk: Desk) -> list[DeleteBlobs]:
    found = [command for command in desk.others if isinstance(command, DeleteBlobs)]
    desk.others = [command for command in desk.others if not isinstance(command, DeleteBlobs)]
    return found


@pytest.mark.parametrize(("pruned", "goes_on"), [(PRUNE_AGAIN, True), (PRUNE_AGAIN - 1, False)])
def test_pruning_goes_on_at_once_only_while_there_is_much_to_prune(pruned: int, goes_on: bool) -> None:
    desk = Desk()
    first = next_duty(desk)
    desk.apply(TurnDone(first, replace(execute(desk.store, first), prune=pruned)))

    desk.clock.advance(DUTY_INTERVAL_S)
    again = next_duty(desk)

    assert first.prune is not None
    assert (again.prune is not None) is goes_on
    desk.apply(TurnDone(again, execute(desk.store, again)))
    desk.clock.advance(PRUNE_INTERVAL_S)
    assert next_duty(desk).prune is not None


def test_duties_are_a_turn_of_their_own() -> None:
    # Given something of everything: a submit waits, and the duties are due
    desk = Desk()
    client = desk.client()
    desk.clock.advance(DUTY_INTERVAL_S)
    desk.submit(client, "a")
    desk.clock.advance(DUTY_INTERVAL_S)
    # When the next turns are made
    turns = []
    while (turn := desk.broker.next_turn(desk.now())) is not None:
        turns.append(turn)
        desk.apply(TurnDone(turn, execute(desk.store, turn)))
    # Then what carries an epoch carries nothing else
    assert any(turn.epoch for turn in turns)
    assert not any(turn.epoch and (turn.submit or turn.lease or turn.finish or turn.renew) for turn in turns)


def test_a_server_that_does_not_lead_has_no_duties() -> None:
    desk = Desk(shared=True)
    desk.clock.advance(60)
    assert desk.broker.next_turn(desk.now()) is None


def test_an_epoch_that_was_won_is_registered_and_reported() -> None:
    desk = Desk(shared=True)
    desk.apply(Won(7))
    desk.turns()
    assert desk.store.epoch() == (7, "desk")
    assert desk.others == [TakeoverDone(7, True)]


def test_an_epoch_that_came_too_late_is_reported_as_refused() -> None:
    desk = Desk(shared=True)
    desk.store.take_over("another", 9)
    desk.apply(Won(7))
    desk.turns()
    assert desk.others == [TakeoverDone(7, False)]


def test_a_takeover_that_the_store_could_not_answer_is_no_takeover() -> None:
    desk = Desk(shared=True)
    desk.apply(Won(7))
    desk.apply(TurnFailed(next_duty(desk), Unavailable("gone")))
    assert desk.others == [TakeoverDone(7, False)]


def test_an_elected_server_reaps_and_one_that_stepped_down_does_not() -> None:
    desk = Desk(shared=True)
    client, worker = desk.client(), desk.worker(credit=1)
    desk.submit(client, "a")
    desk.store.take_over("desk", 3)
    # When it leads, and the worker says nothing
    desk.apply(Elected(3))
    desk.clock.advance(18)
    desk.turns()
    # Then the job is free again
    job = desk.job("a")
    assert job is not None
    assert (job.state, job.losses) == (State.PENDING, 1)
    # And when it has stepped down, nothing is due any more
    desk.apply(Elected(0))
    desk.close(worker)
    desk.turns()
    desk.clock.advance(60)
    assert desk.broker.next_turn(desk.now()) is None


def test_a_refused_epoch_deposes_and_is_not_tried_again() -> None:
    desk = Desk(shared=True)
    desk.apply(Elected(3))
    duty = next_duty(desk)
    desk.apply(TurnFailed(duty, StaleEpoch("another leads")))
    assert desk.others == [Deposed(3)]
    desk.apply(Elected(0))
    desk.clock.advance(60)
    assert desk.broker.next_turn(desk.now()) is None


def test_duties_have_caught_up_when_each_was_done_and_nothing_is_left() -> None:
    desk = Desk(shared=True)
    desk.store.take_over("desk", 3)
    desk.apply(Elected(3))
    assert not desk.broker.upkeep.caught_up

    desk.turns()

    assert desk.broker.upkeep.caught_up
    desk.apply(Elected(0))
    assert not desk.broker.upkeep.caught_up


def test_a_full_batch_means_that_duties_have_not_caught_up() -> None:
    desk = Desk(shared=True)
    desk.store.take_over("desk", 3)
    desk.apply(Elected(3))
    turn = next_duty(desk)

    desk.apply(TurnDone(turn, Answers(promote=Promoted(("a",), PROMOTE_BATCH))))

    assert not desk.broker.upkeep.caught_up
    assert desk.broker.upkeep.counts.promoted == PROMOTE_BATCH


def test_a_failed_duty_is_due_again_at_once() -> None:
    desk = Desk(shared=True)
    desk.store.take_over("desk", 3)
    desk.apply(Elected(3))
    turn = next_duty(desk)
    assert turn.prune is not None

    desk.apply(TurnFailed(turn, Unavailable("gone")))
    desk.clock.advance(1)

    assert not desk.broker.upkeep.caught_up
    assert next_duty(desk).prune == turn.prune


def test_who_cannot_reach_the_bytes_condemns_no_blobs() -> None:
    desk = Desk(shared=True, collects_blobs=False)
    desk.store.take_over("desk", 3)
    desk.apply(Elected(3))

    assert next_duty(desk).condemn_blobs is None


def test_a_failed_duty_tells_no_peer_and_comes_again() -> None:
    desk = Desk()
    client = desk.client()
    said = len(desk.said[client])
    desk.clock.advance(DUTY_INTERVAL_S)
    desk.apply(TurnFailed(next_duty(desk), Unavailable("gone")))
    desk.clock.advance(DUTY_INTERVAL_S)
    assert next_duty(desk).reap
    assert len(desk.said[client]) == said


def test_more_to_reap_than_a_batch_goes_on_at_once_but_lets_others_in_between() -> None:
    # Given more lost leases than one batch takes
    desk = Desk()
    client, worker = desk.client(), desk.worker(credit=REAP_BATCH + 10)
    desk.submit(client, *(f"job-{n}" for n in range(REAP_BATCH + 10)))
    desk.close(worker)
    desk.turns()
    desk.clock.advance(20)
    # When a client asks for something after the first batch
    first = next_duty(desk)
    desk.apply(TurnDone(first, execute(desk.store, first)))
    desk.tell(client, BlobPut(7, SHA256, 1))
    # Then its turn comes next, and then the rest is reaped, without a wait
    second = desk.broker.next_turn(desk.now())
    assert second is not None
    assert not second.epoch
    desk.apply(TurnDone(second, execute(desk.store, second)))
    assert len(execute(desk.store, next_duty(desk)).reap) == 10


def test_an_unused_blob_is_condemned_deleted_and_forgotten() -> None:
    # Given a blob that nobody refers to, past its grace
    desk = Desk(blob_grace_s=3600.0)
    client = desk.client()
    put(desk, client)
    desk.clock.advance(3600 + COLLECT_INTERVAL_S + 1)
    # When it is collected
    desk.turns()
    [delete] = deletes(desk)
    assert [place.sha256 for place in delete.places] == [SHA256]
    assert desk.store.blob_places([SHA256]) == [None]
    desk.apply(BlobsDeleted(delete.epoch, list(delete.places)))
    desk.turns()
    # Then nothing is left of it, and it is not deleted again
    desk.clock.advance(COLLECT_INTERVAL_S + 1)
    desk.turns()
    assert deletes(desk) == []


def test_a_blob_that_a_job_needs_stays() -> None:
    desk = Desk(blob_grace_s=3600.0)
    client = desk.client()
    put(desk, client)
    desk.submit(client, "a", files=(InputFile("in.bin", sha256=SHA256, size_bytes=100),))
    desk.clock.advance(10 * 3600.0)
    desk.turns()
    assert deletes(desk) == []


def test_what_was_condemned_and_not_deleted_is_deleted_by_the_next_leader() -> None:
    desk = Desk(blob_grace_s=0.0)
    put(desk, desk.client())
    desk.clock.advance(COLLECT_INTERVAL_S + 1)
    desk.turns()
    assert len(deletes(desk)) == 1
    # When that leader died before it deleted anything, and another one begins
    follower = Desk(beside=desk, shared=True, server_id="follower")
    follower.store.take_over("follower", 99)
    follower.apply(Elected(99))
    follower.turns()
    [delete] = deletes(follower)
    assert [place.sha256 for place in delete.places] == [SHA256]


def test_what_an_earlier_term_deleted_is_not_forgotten_under_a_later_one() -> None:
    desk = Desk(blob_grace_s=0.0)
    put(desk, desk.client())
    desk.clock.advance(COLLECT_INTERVAL_S + 1)
    desk.turns()
    [delete] = deletes(desk)
    desk.store.take_over("desk", 50)
    desk.apply(Elected(50))
    desk.apply(BlobsDeleted(delete.epoch, list(delete.places)))
    assert not next_duty(desk).forget_blobs


def test_over_the_budget_unused_blobs_go_sooner() -> None:
    desk = Desk(blob_grace_s=3600.0, blob_budget_bytes=50)
    put(desk, desk.client())
    desk.clock.advance(SQUEEZED_GRACE_S + COLLECT_INTERVAL_S + 1)
    desk.turns()
    assert len(deletes(desk)) == 1


def test_a_budget_full_of_blobs_in_use_refuses_new_ones_and_says_so() -> None:
    desk = Desk(blob_grace_s=3600.0, blob_budget_bytes=50)
    client = desk.client()
    put(desk, client)
    desk.submit(client, "a", files=(InputFile("in.bin", sha256=SHA256, size_bytes=100),))
    desk.clock.advance(COLLECT_INTERVAL_S + 1)
    desk.turns()
    desk.tell(client, BlobPut(901, "cd" * 32, 10))
    refusal = desk.last(client, ErrorMessage)
    assert (refusal.corr_id, refusal.code) == (901, "DISK_FULL")
    assert "the budget is 50" in refusal.message


def test_a_blob_is_told_as_had_only_after_the_store_knows_it() -> None:
    desk = Desk()
    client = desk.client()
    desk.ask(client, BlobPut(5, SHA256, 100))
    [receive] = [command for command in desk.others if isinstance(command, ReceiveBlob)]
    desk.apply(BlobArrived(client, receive.put, receive.place))
    assert desk.all(client, Reply) == []
    desk.turns()
    assert desk.last(client, Reply) == Reply(5, {"have": True})
    assert desk.store.blob_places([SHA256]) == [replace(receive.place, stored=True)]


def test_a_bad_hash_or_size_of_a_blob_is_refused() -> None:
    desk = Desk()
    worker = desk.worker()
    desk.tell(worker, GiveCredit(1))
    for bad in (BlobPut(5, "../etc/passwd", 1), BlobPut(6, SHA256, -1), BlobPut(7, SHA256, 2**70)):
        desk.tell(worker, bad)
        assert desk.last(worker, ErrorMessage).corr_id == bad.msg_id


def test_duties_are_done_when_nothing_else_happens() -> None:
    desk = Desk()
    desk.turns()
    assert desk.broker.next_turn(desk.now()) is None
    desk.clock.advance(DUTY_INTERVAL_S)
    duty = next_duty(desk)
    assert (duty.reap, bool(duty.promote)) == (REAP_BATCH, True)


def test_a_blob_that_takes_longer_than_the_grace_to_come_in_is_not_collected() -> None:
    desk = Desk(blob_grace_s=3600.0)
    client = desk.client()
    desk.ask(client, BlobPut(5, SHA256, 100))
    [receive] = [command for command in desk.others if isinstance(command, ReceiveBlob)]
    for _ in range(8):
        desk.clock.advance(1800)
        desk.apply(BlobsUnderWay([receive.put]))
        desk.turns()
    assert deletes(desk) == []
    desk.apply(BlobArrived(client, receive.put, receive.place))
    desk.turns()
    assert desk.last(client, Reply) == Reply(5, {"have": True})


def test_bytes_that_were_condemned_while_they_came_in_are_deleted_and_asked_for_again() -> None:
    desk = Desk(blob_grace_s=3600.0)
    client = desk.client()
    desk.ask(client, BlobPut(5, SHA256, 100))
    [receive] = [command for command in desk.others if isinstance(command, ReceiveBlob)]
    desk.clock.advance(7200)
    desk.turns()
    assert len(deletes(desk)) == 1
    desk.apply(BlobArrived(client, receive.put, receive.place))
    desk.turns()
    assert desk.last(client, ErrorMessage).code == "UNAVAILABLE"
    assert deletes(desk) == [DeleteBlobs(0, (receive.place,))]


def test_whoever_waits_for_a_job_that_was_skipped_is_told_and_so_are_the_other_servers() -> None:
    # Given a client that waits for a job, which may only start within a second
    desk = Desk(shared=True)
    desk.apply(Won(1))
    desk.turns()
    desk.apply(Elected(1))
    desk.apply(Met((ServerInfo(server_id="other"),)))
    client = desk.client()
    desk.submit(client, "a", not_after=desk.clock.wall() + 1)
    # When nobody takes it
    desk.pass_time(2)
    # Then it has ended, and everybody knows
    [ended] = [item for results in desk.all(client, Results) for item in results.items]
    assert (ended.job_id, ended.state, ended.outcome.error_code) == ("a", State.SKIPPED, "TOO_LATE")
    assert "a" in [job_id for told in desk.others if isinstance(told, Publish) for job_id in told.hint.ended]


def test_a_full_batch_of_skipped_jobs_is_followed_by_the_next_at_once() -> None:
    desk = Desk()
    client = desk.client()
    not_after = desk.clock.wall() + 1
    for half in (range(SKIP_BATCH // 2), range(SKIP_BATCH // 2, SKIP_BATCH + 1)):
        desk.submit(client, *(f"late-{number}" for number in half), not_after=not_after)
    desk.clock.advance(2)
    first = next_duty(desk)
    desk.apply(TurnDone(first, execute(desk.store, first)))
    second = next_duty(desk)
    assert second.skip == SKIP_BATCH
    assert len(execute(desk.store, second).skip) == 1
