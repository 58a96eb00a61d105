"""A small simulated world in which a test says what happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from tasuki.core.broker.events import Event
from tasuki.core.job import JobSpec, Outcome
from tasuki.core.machine import Received
from tasuki.core.store_messages import Submission
from tasuki.stores.memory.store import Answered, MemoryStore
from tasuki.testing.sim.clients import Operation, SimClient
from tasuki.testing.sim.faults import DRAWN_KINDS, Faults, PlannedFault
from tasuki.testing.sim.history import AnyLine, HistoryLine
from tasuki.testing.sim.servers import SimServer
from tasuki.testing.sim.system import System
from tasuki.testing.sim.workers import SimWorker
from tasuki.testing.sim.world import SimOptions, World, derived

SETTLED_S = 0.5  # by then everybody is connected
STEP_S = 0.1

Kind = TypeVar("Kind", bound=HistoryLine)


class AcceptsAnyBody(MemoryStore):
    """Forgets to compare bodies."""

    def _submit(self, submission: Submission, *, rerun: bool) -> Answered:
        record = self._records.get(submission.spec.job_id)
        known = replace(submission, body_hash=record.job.body_hash) if record is not None else submission
        return super()._submit(known, rerun=rerun)


class Stage:
    """One world, started and connected, without any fault or load but what the test adds."""

    def __init__(self, options: SimOptions, seed: int = 1) -> None:
        self.lines: list[AnyLine] = []
        self.world = World(seed, derived(seed, options, DRAWN_KINDS), self.lines.append)
        self.system = System(self.world)
        self.lasting_attempts(0.1)
        self._faults = Faults(self.system)
        self._numbers = 0
        self.system.start()
        self.run_for(SETTLED_S)

    @property
    def worker(self) -> SimWorker:
        return self.system.workers[0]

    @property
    def client(self) -> SimClient:
        return self.system.clients[0]

    # -- given ----------------------------------------------------------------------------------------------------
    def lasting_attempts(self, lasts_s: float) -> None:
        """Every attempt takes so long, and succeeds."""
        for worker in self.system.workers:
            worker.endings.lasts_s = lambda: lasts_s  # type: ignore[method-assign]
            worker.endings.outcome = lambda *_: Outcome(exit_code=0, result=b"done")  # type: ignore[method-assign]
            worker.endings.cannot_start = lambda: False  # type: ignore[method-assign]

    # -- when -----------------------------------------------------------------------------------------------------
    def submit(self, *job_ids: str) -> None:
        specs = tuple(JobSpec(job_id=job_id, subject="render.fast") for job_id in job_ids)
        self.client.operate(Operation(number=0, at=self.world.at, client=self.client.name, verb="submit", specs=specs))

    def fault(self, kind: str, target: str, *, for_s: float = 0.0, amount: float = 0.0, other: str = "") -> None:
        """Let a fault happen now."""
        self._numbers += 1
        planned = PlannedFault(
            number=self._numbers, at=self.world.at, kind=kind, target=target, other=other, for_s=for_s, amount=amount
        )
        self._faults.plan([planned])
        self.world.run_until(self.world.at)

    def messages_to(self, server: SimServer) -> list[int]:
        """Filled from now on with the connection of each message that reaches this server."""
        heard: list[int] = []
        apply = server.apply

        def noting(event: Event) -> None:
            if isinstance(event, Received):
                heard.append(event.conn)
            apply(event)

        server.apply = noting  # type: ignore[method-assign]
        return heard

    def run_for(self, seconds: float) -> None:
        self.world.run_until(self.world.at + seconds)

    def run_until(self, condition: Callable[[], bool], within_s: float = 30.0) -> None:
        end = self.world.at + within_s
        while not condition():
            assert self.world.at < end, f"it did not happen within {within_s} s"
            self.run_for(STEP_S)

    # -- then -----------------------------------------------------------------------------------------------------
    def lines_of(self, kind: type[Kind]) -> list[Kind]:
        return [line for line in self.lines if isinstance(line, kind)]

    def states(self, *job_ids: str) -> list[str]:
        """Of those that the store knows."""
        return [str(job.state) for job in self.system.storage.store.get(job_ids) if job is not None]
