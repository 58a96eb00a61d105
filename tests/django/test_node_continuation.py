"""A node that asks about its runs, and what the store shows meanwhile: the driver, with a store and other nodes in memory."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from tasuki.clocks import now
from tasuki.core.cluster_messages import ServerInfo
from tasuki.core.store_messages import HeldLease, LeaseStatus
from tasuki.django.continuation import NodeContinuation
from tasuki.worker.status import RunningJob
from tests.support.waiting import until_async

LEADER = ServerInfo(server_id="1", node_id="n1", epoch=7, grpc_address="n1:50051")


class DetachedWorker:
    """A worker with one run, and around it the store, whose turns wait for `turns`, and a leader that says `may_continue`."""

    worker_id, incarnation = "2", "2/1"

    def __init__(self, deadline_in_s: float, *, is_detached_by_leader: bool = True, may_continue: bool = True) -> None:
        self.may_continue = may_continue
        self.deadline = now().monotonic + deadline_in_s
        self.turns = asyncio.Event()
        self.shown: list[float] = []
        """Values of `confirm_s` in the order in which the store took them."""
        self.answered: list[str] = []
        self.denied: list[str] = []
        self.told: list[Any] = []
        self.looks_at_nothing = 0
        session = SimpleNamespace(owner="node:host:0")
        broker = SimpleNamespace(cluster=SimpleNamespace(servers={"1": LEADER}), epoch=0, workers={"2": session})
        server: Any = SimpleNamespace(broker=broker, renew=self.renew, tell=self.told.append)
        cluster: Any = SimpleNamespace(is_detached_by_leader=is_detached_by_leader)
        self.continuation = NodeContinuation(self, server, cluster, lambda: None)
        self.continuation.questions = self

    async def renew(self, claims: list[HeldLease]) -> list[LeaseStatus]:
        await self.turns.wait()
        mine = [claim for claim in claims if claim.owner == "node:host:0"]
        self.shown += [claim.confirm_s for claim in mine if claim.confirm_s is not None]
        return [LeaseStatus.GO_ON if claim in mine else LeaseStatus.LOST for claim in claims]

    async def confirms(self, node: ServerInfo, run: RunningJob, renewed_ago_s: float, timeout_s: float) -> bool | None:
        self.shown.append(0.0)  # whoever says yes has renewed the lease so
        self.answered.append(node.server_id)
        return self.may_continue

    def renewed_at(self, lease_id: str) -> float:
        return self.deadline - 13.0

    def deadlines(self) -> dict[str, float]:
        self.looks_at_nothing += bool(self.denied)
        return {} if self.denied else {"lease": self.deadline}

    def run_of(self, lease_id: str) -> RunningJob | None:
        return RunningJob("job", 1, "", None)

    def confirm_leases(self, lease_ids: tuple[str, ...], asked_at: float) -> None:
        self.deadline = asked_at + 13.0

    def deny_leases(self, lease_ids: tuple[str, ...]) -> None:
        self.denied += lease_ids


def test_nobody_is_asked_before_the_store_shows_that_the_worker_asks() -> None:
    async def scenario() -> None:
        worker = DetachedWorker(deadline_in_s=60.0)
        task = asyncio.ensure_future(worker.continuation.run())
        looks = 0
        look = worker.continuation.machine.look

        def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal looks
            looks += 1
            return look(*arguments, **named)

        worker.continuation.machine.look = counted  # type: ignore[method-assign]
        await until_async(lambda: looks >= 20 or worker.answered, what="it has looked for longer than the questions take")
        assert worker.answered == worker.denied == []

        worker.turns.set()
        await until_async(lambda: worker.answered, what="the leader was asked")
        assert worker.shown[0] > 0
        assert worker.shown[-1] == 0.0, "the store shows that it may go on"
        await _end(task)

    asyncio.run(scenario())


def test_a_store_that_does_not_answer_holds_no_question_up_until_the_deadline_and_shows_no_late_mark() -> None:
    async def scenario() -> None:
        worker = DetachedWorker(deadline_in_s=3.0)
        task = asyncio.ensure_future(worker.continuation.run())
        await until_async(lambda: worker.answered, what="the leader was asked all the same")
        assert now().monotonic < worker.deadline
        asked = len(worker.answered)

        worker.turns.set()
        await until_async(lambda: max(worker.shown) > 0 == worker.shown[-1], what="the late mark was taken away")
        assert (len(worker.answered), worker.denied) == (asked, [])
        await _end(task)

    asyncio.run(scenario())


def test_a_run_that_must_stop_costs_a_worker_that_is_only_cut_off_no_other_lease() -> None:
    async def scenario() -> None:
        worker = DetachedWorker(deadline_in_s=1.0, is_detached_by_leader=False, may_continue=False)
        task = asyncio.ensure_future(worker.continuation.run())
        await until_async(lambda: worker.looks_at_nothing >= 4, what="it has stopped the run, and looked again")

        assert worker.denied == ["lease"]
        assert worker.told == [], "its leases are not ended"
        await _end(task)

    asyncio.run(scenario())


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
