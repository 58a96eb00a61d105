"""Several servers on one store: clients and workers turn to another when theirs dies, freezes or leaves; nothing runs twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tasuki.core.job import OnDisconnect, State
from tasuki.core.lifecycle import LEASE_MARGIN_S, LEASE_TTL_S
from tasuki.core.machine import Closed
from tasuki.errors import Unavailable
from tasuki.stores.memory.store import MemoryStore
from tasuki.testing.clocks import FakeClock
from tasuki.testing.sim.nodes import Node, ServerNode
from tests.support.harness import LOCK_TTL_S, Harness

AT_ONCE_S = 0.3  # two ticks of a driver and a round of three servers
LOST_AFTER_S = LEASE_TTL_S + LEASE_MARGIN_S
CLIENT_PATIENCE_S = 13.0


@pytest.fixture
def three() -> Iterator[Harness]:
    """A world of three servers; one of them leads."""
    clock = FakeClock()
    world = Harness(MemoryStore(clock), clock, servers=3)
    world.run_for(2.0)
    assert [bool(server.leads) for server in world.servers].count(True) == 1
    yield world
    world.check()


def others(world: Harness, server: ServerNode) -> list[ServerNode]:
    return [other for other in world.servers if other is not server]


def moved(world: Harness, node: Node, away_from: ServerNode) -> bool:
    return node.link is not None and node.link.server is not away_from


# ---------------------------------------------------------------------------------------------------- a server dies


def test_a_client_whose_server_is_killed_has_its_answers_from_another(three: Harness) -> None:
    # given: a client and a worker at different servers, and one job running
    first, second, _ = three.servers
    client, worker = three.client(to=[first, second]), three.worker(to=[second])
    three.run_for(2.0)
    home = three.server_of(client)
    client.submit_ids("a")
    three.run_for(1.0)
    assert worker.jobs == ["a"]
    # when: the client's server is killed, and while it is away the job ends and another call is made
    three.kill_server(home)
    ticket = client.submit_ids("b")
    if home is not second:
        worker.finish("a", b"while away")
    three.run_for(AT_ONCE_S)
    # then: the call was answered by another server, and the result asked for again by its id
    assert moved(three, client, home)
    assert client.answers[ticket].error is None
    if home is second:
        three.restart_server(second)
        three.run_for(AT_ONCE_S)
        three.run_until(lambda: worker.machine.online, 10.0)
        worker.finish("a", b"while away")
    three.run_until(lambda: "a" in client.results, 2.0)
    assert client.result("a").outcome.result == b"while away"
    assert worker.runs[0] == ("a", 1)


def test_a_worker_whose_server_is_killed_renews_and_reports_through_another(three: Harness) -> None:
    client, worker = three.client(), three.worker(capacity=2)
    client.submit_ids("a", "b")
    three.run_for(2.0)
    assert sorted(worker.jobs) == ["a", "b"]
    # when: its server is killed, and one of its jobs ends before it has another
    home = three.server_of(worker)
    three.kill_server(home)
    worker.finish("a", b"told to another")
    three.run_for(AT_ONCE_S)
    # then: it is at another server, which has the ending; the other job goes on far longer than its lease
    assert moved(three, worker, home)
    three.run_for(2 * LOST_AFTER_S)
    assert client.result("a").outcome.result == b"told to another"
    assert (worker.jobs, worker.stopped) == (["b"], [])
    worker.finish("b")
    three.run_for(1.0)
    assert client.result("b").attempt == 1


def test_the_next_job_starts_through_another_server_within_half_a_second(three: Harness) -> None:
    client, worker = three.client(), three.worker()
    three.run_for(2.0)
    for home in {three.server_of(client), three.server_of(worker)}:
        three.kill_server(home)
    client.submit_ids("next")
    three.run_until(lambda: worker.jobs == ["next"], 0.5, step_s=0.05)


def test_with_two_of_three_servers_dead_everybody_ends_up_at_the_last(three: Harness) -> None:
    nodes = [three.client(f"c{number}") for number in range(3)] + [three.worker(f"w{number}") for number in range(3)]
    three.run_for(2.0)
    last = three.servers[2]
    for server in others(three, last):
        three.kill_server(server)
    three.run_for(1.0)
    assert {three.server_of(node).server_id for node in nodes} == {last.server_id}


def test_peers_spread_over_the_servers_and_over_the_rest_when_one_dies() -> None:
    clock = FakeClock()
    world = Harness(MemoryStore(clock), clock, servers=3, seed=7)
    clients = [world.client(f"c{number}") for number in range(24)]
    world.run_for(2.0)
    before = [sum(world.server_of(client) is server for client in clients) for server in world.servers]
    assert min(before) >= 3, before
    world.kill_server(world.servers[0])
    world.run_for(1.0)
    after = [sum(world.server_of(client) is server for client in clients) for server in world.servers]
    assert after[0] == 0
    assert min(after[1] - before[1], after[2] - before[2]) >= 1, (before, after)


def test_a_peer_that_was_given_one_address_learns_the_others(three: Harness) -> None:
    only = three.servers[0]
    client, worker = three.client(to=[only]), three.worker(to=[only])
    three.run_for(2.0)
    three.kill_server(only)
    three.run_for(AT_ONCE_S)
    assert client.machine.online
    assert worker.machine.online


def test_a_peer_comes_back_when_all_servers_were_away(three: Harness) -> None:
    client, worker = three.client(), three.worker()
    ticket = client.submit_ids("a")
    three.run_for(2.0)
    for server in three.servers:
        three.kill_server(server)
    three.run_for(6.0)
    three.restart_server(three.servers[1])
    three.run_for(6.0)
    assert client.answers[ticket].error is None
    assert worker.jobs == ["a"]
    assert worker.stopped == []


# ---------------------------------------------------------------------------------------------------- a server freezes


def test_a_worker_leaves_a_frozen_server_in_time_to_renew_its_leases(three: Harness) -> None:
    client, worker = three.client(), three.worker()
    client.submit_ids("a")
    three.run_for(2.0)
    home = three.server_of(worker)
    three.freeze_server(home)
    three.run_for(2 * LEASE_TTL_S / 3 + AT_ONCE_S)
    assert moved(three, worker, home)
    three.run_for(2 * LOST_AFTER_S)
    assert (worker.jobs, worker.stopped) == (["a"], [])
    # when: the frozen one goes on, and reads what came meanwhile
    three.thaw_server(home)
    three.run_for(LOST_AFTER_S)
    assert (worker.jobs, worker.stopped) == (["a"], [])
    worker.finish("a")
    three.run_for(CLIENT_PATIENCE_S)
    assert client.result("a").attempt == 1


def test_a_client_leaves_a_frozen_server_and_its_calls_are_answered_elsewhere(three: Harness) -> None:
    client, worker = three.client(), three.worker()
    three.run_for(2.0)
    home = three.server_of(client)
    three.freeze_server(home)
    ticket = client.submit_ids("a")
    three.run_for(CLIENT_PATIENCE_S)
    assert moved(three, client, home)
    assert client.answers[ticket].error is None
    three.run_until(lambda: worker.jobs == ["a"], LEASE_TTL_S)
    worker.finish("a")
    three.run_for(1.0)
    assert client.result("a").state is State.SUCCEEDED


def test_what_is_said_once_is_not_said_again_to_another_server(three: Harness) -> None:
    client = three.client()
    three.run_for(2.0)
    home = three.server_of(client)
    three.freeze_server(home)
    ticket = client.request("requeue", job_ids=["a"])
    three.run_for(CLIENT_PATIENCE_S)
    assert moved(three, client, home)
    assert isinstance(client.answers[ticket].error, Unavailable)
    assert "not known" in client.answers[ticket].error.message


def test_a_frozen_server_is_not_chosen_for_long_by_those_who_come_new(three: Harness) -> None:
    frozen = three.servers[0]
    three.freeze_server(frozen)
    clients = [three.client(f"c{number}") for number in range(6)]
    three.run_for(4.0)
    assert all(client.machine.online for client in clients)


def test_a_leader_that_was_frozen_is_refused_by_the_store_and_steps_down(three: Harness) -> None:
    [leader] = [server for server in three.servers if server.leads]
    old_epoch = leader.leads
    three.freeze_server(leader)
    three.run_for(2 * LOCK_TTL_S)
    [successor] = [server for server in three.servers if server.leads and server is not leader]
    assert successor.leads > old_epoch
    three.thaw_server(leader)
    three.run_for(1.0)
    assert leader.leads == 0
    assert three.store.epoch() == (successor.leads, successor.server_id)


# ---------------------------------------------------------------------------------------------------- hints


@pytest.mark.parametrize("lost", [False, True])
def test_a_job_that_came_to_one_server_is_run_by_the_worker_of_another(three: Harness, lost: bool) -> None:
    first, second, _ = three.servers
    three.lose_hints = lost
    client, worker = three.client(to=[first]), three.worker(to=[second])
    three.cut(client)
    three.cut(worker)
    three.run_for(2.0)
    client.submit_ids("a")
    three.run_until(lambda: worker.jobs == ["a"], 3.0 if lost else 0.1, step_s=0.05)
    worker.finish("a", b"x")
    three.run_until(lambda: "a" in client.results, 3.0 if lost else 0.1, step_s=0.05)


# ---------------------------------------------------------------------------------------------------- cut off: stop and keep


def cut_off(world: Harness, node: Node, seconds: float) -> None:
    """No server can be reached for so long."""
    for server in world.servers:
        world.kill_server(server)
    world.run_for(seconds)
    for server in world.servers:
        world.restart_server(server)


def test_stop_ends_the_job_before_anybody_else_may_have_it(memory_world: Harness) -> None:
    world = memory_world
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.settle()
    cut_off(world, worker, LEASE_TTL_S)
    assert worker.stopped == [("a", "LEASE_LOST")]


def test_keep_goes_on_and_its_finish_counts_if_nobody_took_the_job(memory_world: Harness) -> None:
    world = memory_world
    client, worker = world.client(), world.worker(on_disconnect=OnDisconnect.KEEP, reconnect_grace_s=10.0)
    client.submit_ids("a")
    world.settle()
    cut_off(world, worker, 2 * LOST_AFTER_S)
    assert (worker.jobs, worker.stopped) == (["a"], [])
    lease_id = worker.finish("a", b"late").lease_id
    world.run_for(6.0)
    assert client.result("a").outcome.result == b"late"
    assert worker.forgotten == [(lease_id, "")]
    assert world.job("a").attempt == 1


def test_a_worker_that_kept_a_job_is_not_given_the_same_job_again(memory_world: Harness) -> None:
    world = memory_world
    client = world.client()
    worker = world.worker(capacity=3, on_disconnect=OnDisconnect.KEEP, reconnect_grace_s=1.0)
    client.submit_ids("a")
    world.settle()
    # given: a worker with free places that was cut off while others still served the store
    worker.link.mute = True
    dial, world.dial = world.dial, lambda node, address: node.apply(Closed(0, "cut"))  # type: ignore[method-assign]
    world.run_for(2 * LOST_AFTER_S)
    assert world.job("a").state is State.ORPHANED
    # when: it is back
    world.dial = dial  # type: ignore[method-assign]
    world.run_for(10.0)
    # then: its one run goes on, nobody else is given it, and there is room for more
    assert worker.runs == [("a", 1)]
    assert world.job("a").state is State.RUNNING
    other = world.worker("other")
    client.submit_ids("b")
    world.run_for(1.0)
    assert sorted([*worker.jobs, *other.jobs]) == ["a", "b"]
    worker.finish("a", b"kept")
    world.run_for(1.0)
    assert client.result("a").outcome.result == b"kept"


def test_keep_loses_to_who_took_the_job_and_drops_its_result(memory_world: Harness) -> None:
    world = memory_world
    kept = world.worker("kept", on_disconnect=OnDisconnect.KEEP, reconnect_grace_s=10.0)
    client = world.client()
    client.submit_ids("a")
    world.settle()
    # given: a worker that is cut off past its lease and its grace, and another that took the job
    assert kept.link is not None
    kept.frozen = True
    world.run_for(LOST_AFTER_S + 10.0 + 1.0)
    other = world.worker("other")
    world.run_for(2.0)
    assert other.jobs == ["a"]
    # when: the first ends its run and comes back
    lease_id = kept.running[next(iter(kept.running))].lease_id
    kept.finish("a", b"too late")
    kept.frozen = False
    world.run_for(6.0)
    # then: its finish is refused, and the other one's counts
    assert [(lease, bool(reason)) for lease, reason in kept.forgotten] == [(lease_id, True)]
    other.finish("a", b"in time")
    world.run_for(1.0)
    assert client.result("a").outcome.result == b"in time"


def test_what_a_worker_saved_is_recorded_by_its_next_process(memory_world: Harness) -> None:
    world = memory_world
    client, worker = world.client(), world.worker(incarnation="one")
    client.submit_ids("a", "b")
    world.settle()
    # given: an ending that no server has taken, and a worker that dies
    world.kill_server()
    worker.finish("a", b"saved")
    world.run_for(5.0)
    assert [ending.job_id for ending in worker.disk.values()] == ["a"]
    world.kill(worker)
    world.restart_server()
    # when: it is started again with the same id
    again = world.worker(worker.name, incarnation="two")
    again.restore(worker.disk)
    world.run_for(6.0)
    # then: the ending is recorded, and gone from its disk; it has a place for other jobs
    assert client.result("a").outcome.result == b"saved"
    assert again.disk == {}
    assert again.jobs == ["b"]
