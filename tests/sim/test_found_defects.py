"""Defects that the simulator found, each played again by hand: what happened, in what order, and what must come of it."""

from tasuki.core.job import State
from tasuki.core.machine import Ticked
from tasuki.core.store_messages import Turn
from tasuki.errors import Unavailable
from tasuki.stores.memory.store import MemoryStore
from tasuki.testing.clocks import FakeClock
from tasuki.testing.sim.nodes import ServerNode, WorkerNode
from tests.support.harness import Harness


def everything_but_the_answers_of(world: Harness, slow: ServerNode, worker: WorkerNode) -> None:
    """Until the worker runs something; the slow server does not hear of its turn."""
    for _ in range(200):
        worker.flush()
        choices = [choice for choice in world.choices() if getattr(choice, "__self__", None) is not slow]
        if worker.running:
            return
        if choices:
            choices[0]()
        else:
            assert any(server.take_turn() for server in world.servers if server is not slow), "the worker got nothing"


def test_a_grant_that_another_server_has_delivered_is_not_given_back() -> None:
    """A worker left while its lease request was at the store, and got the lease from the next server by read-back. The first one
    gave back what the worker 'never saw': another worker ran the job at the same time (I9)."""
    # given
    clock = FakeClock()
    world = Harness(MemoryStore(clock), clock, servers=2)
    first, second = world.servers
    client, worker = world.client(to=[first]), world.worker("w1", to=[first])
    world.run_for(1.0)
    client.submit_ids("job")
    assert client.link is not None
    world.deliver_to_server(client.link)
    assert first.take_turn()
    first.commit_turn()
    assert world.job("job").state is State.ASSIGNED
    # when
    world.cut(worker)
    worker.apply(Ticked())
    assert world.server_of(worker) is second
    everything_but_the_answers_of(world, first, worker)
    assert worker.jobs == ["job"]
    first.answer_turn()
    other = world.worker("w2", to=[first])
    # then
    assert not other.running
    worker.finish("job")
    world.settle()
    assert world.job("job").state is State.SUCCEEDED


def test_a_client_hears_of_an_end_whose_commit_its_lone_server_did_not_hear_of() -> None:
    """The answer to a leader's turn was lost after its commit. Only servers that share a store looked for such ends again."""
    # given
    clock = FakeClock()
    world = Harness(MemoryStore(clock), clock)
    client = world.client()
    client.submit_ids("job", not_after=clock.wall() + 5.0)
    world.settle()

    # when
    def lost(turn: Turn) -> Unavailable | None:
        return Unavailable("it is not known whether it was stored") if turn.skip else None

    world.lose_answer = lost
    world.run_until(lambda: world.job("job").state is State.SKIPPED, within_s=10.0)
    world.lose_answer = lambda turn: None
    # then
    world.run_until(lambda: "job" in client.results, within_s=5.0)
    assert client.result("job").state is State.SKIPPED


def prune(world: Harness) -> None:
    with world.store.turn():
        assert world.store.prune(before=world.clock.wall() + 1.0, epoch=world.store.epoch()[0])


def test_whoever_watches_a_job_that_retention_deletes_hears_that_it_is_gone() -> None:
    """A job was deleted after its end and before its watcher was told: what was read for it was no row, and nobody spoke."""
    # given
    clock = FakeClock()
    world = Harness(MemoryStore(clock), clock)
    client = world.client()
    client.submit_ids("late", not_after=clock.wall() + 1.0)
    world.settle()
    clock.advance(2.0)
    with world.store.turn():
        assert [job.job_id for job in world.store.skip(epoch=world.store.epoch()[0])] == ["late"]
    prune(world)
    # when
    world.run_for(10.0)
    # then
    assert client.results == {}
    assert client.refused["late"].code == "NOT_FOUND"
