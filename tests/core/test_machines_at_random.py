"""Random schedules of everything that can happen to clients, server and workers: the invariants hold after every step, and
when the trouble ends every accepted job comes to its end."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasuki.core.job import JobSpec, OnDisconnect
from tasuki.core.lifecycle import LEASE_TTL_S
from tasuki.core.store_messages import Turn
from tasuki.errors import DiskFull, TasukiError, Unavailable
from tasuki.stores.memory.store import MemoryStore
from tasuki.testing.clocks import FakeClock
from tasuki.testing.sim.nodes import ServerNode, WorkerNode
from tests.core.conftest import sqlite_world
from tests.support.harness import Harness

STEPS = 150
CLIENT_SILENCE_S = 70.0  # within this a client has noticed that its link is half-open, and made a new one
SUBJECTS = ("a.1", "a.2", "b.1", "b.w1")


class Chaos:
    """One history, wholly given by its seed."""

    def __init__(self, seed: int, world: Harness) -> None:
        self.random = random.Random(seed)
        self.world = world
        self.world.refuse = self._refuse
        self.world.lose_answer = self._lose_answer
        self.trouble = True
        self.starts = 0
        for number in range(2):
            self.world.client(f"client-{number}")
        for name in ("w1", "w2"):
            self._worker(name)

    def _worker(self, name: str) -> WorkerNode:
        self.starts += 1
        keep: dict[str, Any] = {"on_disconnect": OnDisconnect.KEEP, "reconnect_grace_s": 5.0}
        worker = self.world.worker(
            name,
            capacity=self.random.randint(1, 3),
            incarnation=f"start-{self.starts}",
            patterns=self.random.choice([(">",), ("b.*", "a.1"), ("a.*", "b.w1")]),
            **(keep if self.random.random() < 0.2 else {}),
        )
        worker.handlers = self.random.random() < 0.5
        return worker

    def _refuse(self, turn: Turn) -> TasukiError | None:
        if self.trouble and self.random.random() < 0.03:
            return self.random.choice([Unavailable("busy"), DiskFull("no room")])
        return None

    def _lose_answer(self, turn: Turn) -> TasukiError | None:
        return Unavailable("not known") if self.trouble and self.random.random() < 0.02 else None

    # -- what can happen ------------------------------------------------------------------------------------------
    def step(self) -> None:
        kinds = [self.message] * 12 + [self.store] * 6 + [self.time] * 4 + [self.submit, self.end, self.end] + [self.accident]
        self.random.choice(kinds)()
        for node in self.world.nodes:
            if node.awake and self.random.random() < 0.7:
                node.flush()

    def message(self) -> None:
        if choices := self.world.choices():
            self.random.choice(choices)()

    def store(self) -> None:
        server = self.random.choice(self.world.servers)
        if not server.awake:
            return
        if server.answers is not None:
            server.answer_turn()
        elif server.turn is not None:
            server.commit_turn()
        else:
            server.take_turn()

    def time(self) -> None:
        self.world.clock.advance(self.random.choice([0.01, 0.1, 0.3, 1.0, 3.0]))
        self.world.tick()

    def submit(self) -> None:
        client = self.random.choice(self.world.clients)
        specs = []
        for _ in range(self.random.randint(1, 4)):
            number = self.random.randrange(12)  # few ids, so that the same one often comes again
            subject = SUBJECTS[number % len(SUBJECTS)]
            specs.append(JobSpec(job_id=f"job-{number}", subject=subject, max_retries=2, max_losses=50, backoff_s=0.5))
        roll = self.random.random()
        if roll < 0.75:
            client.submit(*specs, on_failed=self.random.choice(["return", "return", "rerun"]))
        elif roll < 0.9:
            client.cancel(specs[0].job_id)
        else:
            client.watch(*{spec.job_id for spec in specs})

    def end(self) -> None:
        workers = [worker for worker in self.world.workers if worker.awake and worker.running]
        if not workers:
            return
        worker = self.random.choice(workers)
        job_id = self.random.choice(worker.jobs)
        roll = self.random.random()
        if roll < 0.6:
            worker.finish(job_id, f"{worker.name} {self.random.random()}".encode())
        elif roll < 0.9:
            worker.fail(job_id)
        elif worker.handlers:
            worker.give_back(job_id)

    def accident(self) -> None:
        world = self.world
        node = self.random.choice([node for node in world.nodes if not node.dead])
        roll = self.random.random()
        if roll < 0.35:
            world.cut(node)
        elif roll < 0.5:
            node.frozen = not node.frozen
        elif roll < 0.6 and node.link is not None:
            node.link.mute = True
        elif roll < 0.7 and isinstance(node, WorkerNode):
            world.kill(node)
            self._worker(node.name).restore(node.disk)
        elif roll < 0.75 and isinstance(node, WorkerNode):
            node.drain()
        else:
            self.server_accident(self.random.choice(world.servers), roll)

    def server_accident(self, server: ServerNode, roll: float) -> None:
        world = self.world
        if server.broker is None:
            world.restart_server(server)
        elif server.frozen:
            world.thaw_server(server)
        elif roll > 0.9:
            world.kill_server(server)
        elif roll > 0.8 and len(world.servers) > 1:
            world.freeze_server(server)
        elif roll > 0.75:
            world.lose_hints = not world.lose_hints

    # -- the end --------------------------------------------------------------------------------------------------
    def calm_down(self) -> None:
        """The trouble ends; workers that take everything do all that is left."""
        world, self.trouble = self.world, False
        world.lose_hints = False
        for server in world.servers:
            if server.broker is None:
                world.restart_server(server)
            elif server.frozen:
                world.thaw_server(server)
        for node in world.nodes:
            node.frozen = False
        world.worker("last", capacity=5, patterns=(">",))
        end = world.clock.lease() + CLIENT_SILENCE_S + LEASE_TTL_S
        while world.clock.lease() < end:
            world.run_for(0.5, 0.25)
            for worker in world.workers:
                for job_id in list(worker.jobs):
                    worker.finish(job_id)
            world.check()


def live_through(seed: int, world: Harness) -> None:
    """Trouble, calm, and what must hold in both."""
    chaos = Chaos(seed, world)
    for _ in range(STEPS):
        chaos.step()
        world.check()
    chaos.calm_down()
    jobs = world.all_jobs()
    assert {job.job_id: job.state for job in jobs if not job.state.terminal} == {}, "liveness: these never ended"
    for client in world.clients:
        missing = [job_id for job_id in client.accepted if job_id not in client.results]
        assert not missing, f"{client.name} was never told how {missing} ended"
        assert not client.machine._calls, f"{client.name} was never answered"


# A few seeds: `make sim` goes through thousands of worse ones.
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_the_invariants_hold_on_every_schedule_and_all_jobs_end_when_the_trouble_does(seed: int) -> None:
    clock = FakeClock()
    live_through(seed, Harness(MemoryStore(clock, random.Random(seed).randbytes), clock, seed=seed))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_they_hold_with_three_servers_that_die_freeze_and_lose_their_hints(seed: int) -> None:
    clock = FakeClock()
    live_through(seed, Harness(MemoryStore(clock, random.Random(seed).randbytes), clock, seed=seed, servers=3))


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_they_hold_on_sqlite_with_a_server_that_opens_its_file_again(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = sqlite_world(Path(folder) / "world.sqlite3", FakeClock(), seed=seed)
        try:
            live_through(seed, world)
        finally:
            world.store.close()
